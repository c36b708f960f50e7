//! System calls that wait for this process's own FUSE server, made by a child process.
//!
//! umount(2), syncfs(2) and sync(2) wait for answers of the server, and no signal ends that wait. A
//! server that is killed while one of its own threads is in such a call would never end: the thread
//! waits for the answer, and the connection, whose end would answer it, stays open as long as the
//! thread. A child has no descriptor of the connection, so the server ends alone, the connection
//! with it, and then the call of the child.
//!
//! The child shares the memory, so a core dump waits for it before Linux 5.16: a server that crashes while
//! a call is under way may have to be killed.
//!
//! Owns no state. Invariant: the child makes async-signal-safe calls only.

use std::{
    ffi::CString,
    os::unix::ffi::OsStrExt,
    path::Path,
    sync::atomic::{AtomicI32, Ordering},
};

use rustix::io::Errno;
use rustix::mount::UnmountFlags;

/// Descriptors that a child closes where it must close one by one.
const FD_COUNT_MAX: u64 = 1 << 20;
/// Size of the child's stack in words of 16 bytes.
const STACK_WORDS: usize = (64 << 10) / size_of::<u128>();
/// No result yet; errno values are positive.
const NO_RESULT: i32 = -1;

/// umount2(2).
///
/// # Errors
/// Those of umount2(2).
pub(super) fn unmount(dir: &Path, flags: UnmountFlags) -> Result<(), Errno> {
    let dir = CString::new(dir.as_os_str().as_bytes()).map_err(|_| Errno::INVAL)?;
    // SAFETY: the call is a system call, without allocations or locks.
    unsafe { run(|| rustix::mount::unmount(dir.as_c_str(), flags)) }
}

/// syncfs(2) on the file system of `dir`.
///
/// # Errors
/// Those of open(2) and syncfs(2).
pub(super) fn sync_fs(dir: &Path) -> Result<(), Errno> {
    use rustix::fs::{Mode, OFlags};
    let dir = CString::new(dir.as_os_str().as_bytes()).map_err(|_| Errno::INVAL)?;
    let call = || {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        rustix::fs::syncfs(rustix::fs::open(dir.as_c_str(), flags, Mode::empty())?)
    };
    // SAFETY: these are system calls, without allocations or locks.
    unsafe { run(call) }
}

/// sync(2).
pub(super) fn sync() {
    let call = || {
        rustix::fs::sync();
        Ok(())
    };
    // SAFETY: this is a system call, without allocations or locks. It has no error.
    let _ = unsafe { run(call) };
}

/// What the child does.
struct Job<F> {
    call: Option<F>,
    /// 0, the errno of the call, or [`NO_RESULT`].
    result: AtomicI32,
}

/// Makes `call` in a child process and waits for its result; without one where none can be started.
///
/// The child shares this process's memory, as that of vfork(2) does: a copy would take time, and kernels
/// before 5.19 may give the copy a page into which a direct read is in flight.
///
/// # Safety
/// `call` is async-signal-safe (signal-safety(7)): other threads may hold any lock, and none of them
/// runs in the child.
unsafe fn run<F: FnOnce() -> Result<(), Errno>>(call: F) -> Result<(), Errno> {
    let mut job = Job { call: Some(call), result: AtomicI32::new(NO_RESULT) };
    let mut stack = vec![0_u128; STACK_WORDS];
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
    let blocked = block_signals();
    // SAFETY: the stack grows down from its end, which is aligned to 16 bytes, and is used by the child
    // only. `job` is of the type that `child` takes. Both live until the child has ended: with
    // CLONE_VFORK this thread waits for that, and the memory outlives this process if it is killed.
    let child = unsafe {
        let stack_end = stack.as_mut_ptr().add(STACK_WORDS).cast();
        libc::clone(child::<F>, stack_end, flags, (&raw mut job).cast())
    };
    if child >= 0 {
        // SAFETY: the status is not asked for. ECHILD means that the kernel has reaped the child. No
        // signal ends the wait.
        unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) };
    }
    restore_signals(&blocked);
    if child < 0 {
        return job.call.take().map_or(Ok(()), |call| call());
    }
    match job.result.into_inner() {
        0 => Ok(()),
        // The child was killed.
        NO_RESULT => Err(Errno::INTR),
        errno => Err(Errno::from_raw_os_error(errno)),
    }
}

/// Runs in the child.
extern "C" fn child<F: FnOnce() -> Result<(), Errno>>(job: *mut libc::c_void) -> libc::c_int {
    // SAFETY: `run` passes a job of this type and waits, so nothing else uses it.
    let job = unsafe { &mut *job.cast::<Job<F>>() };
    close_all();
    if let Some(call) = job.call.take() {
        let errno = call().err().map_or(0, Errno::raw_os_error);
        job.result.store(errno, Ordering::SeqCst);
    }
    // SAFETY: _exit(2) runs no code of the parent.
    unsafe { libc::_exit(0) }
}

/// Closes all descriptors of the calling process. Async-signal-safe.
fn close_all() {
    // SAFETY: the child uses none of these descriptors.
    if unsafe { libc::syscall(libc::SYS_close_range, 0, u32::MAX, 0) } == 0 {
        return;
    }
    // Linux before 5.9, or a filter of system calls.
    let count = rustix::process::getrlimit(rustix::process::Resource::Nofile).maximum;
    let count = count.unwrap_or(u64::MAX).min(FD_COUNT_MAX);
    for fd in 0..count as i32 {
        // SAFETY: as above.
        unsafe { libc::close(fd) };
    }
}

/// Blocks all signals in this thread, so that no handler runs in the child; returns those blocked before.
fn block_signals() -> libc::sigset_t {
    // SAFETY: a signal set is plain data, and both pointers are valid.
    unsafe {
        let (mut all, mut before) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before);
        before
    }
}

fn restore_signals(before: &libc::sigset_t) {
    // SAFETY: the pointer is valid.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before, std::ptr::null_mut()) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    use rustix::pipe::{PipeFlags, pipe_with};

    #[test]
    fn the_error_of_the_call_comes_back() {
        let dir = tempfile::tempdir().unwrap();
        let error = unmount(dir.path(), UnmountFlags::empty()).unwrap_err();
        assert!([Errno::INVAL, Errno::PERM].contains(&error), "{error}");
        assert_eq!(sync_fs(&dir.path().join("none")), Err(Errno::NOENT));
        assert_eq!(sync_fs(dir.path()), Ok(()));
    }

    #[test]
    fn the_child_has_no_descriptors_of_its_parent() {
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        let raw = writer.as_raw_fd();
        let is_open = || {
            // SAFETY: the call only reads the flags of a descriptor number.
            if unsafe { libc::fcntl(raw, libc::F_GETFD) } < 0 { Err(Errno::BADF) } else { Ok(()) }
        };
        assert_eq!(is_open(), Ok(()));
        // SAFETY: this is a system call.
        assert_eq!(unsafe { run(is_open) }, Err(Errno::BADF));
        // It is that of the child only.
        assert_eq!(is_open(), Ok(()));
        drop((reader, writer));
    }

    #[test]
    fn a_killed_child_is_an_interrupted_call() {
        let killed = || {
            // SAFETY: these are system calls.
            unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
            Ok(())
        };
        // SAFETY: as above.
        assert_eq!(unsafe { run(killed) }, Err(Errno::INTR));
    }
}
