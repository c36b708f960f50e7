//! System calls that wait for this process's own FUSE server, made by a child process.
//!
//! umount(2), a remount, statfs(2), syncfs(2) and sync(2) wait for answers of the server, as does a look at
//! the memory of a process that has a file of the mount mapped, and no signal ends that wait. A server that
//! is killed while one of its own threads is in such a call would never end: the thread waits for the
//! answer, and the connection, whose end would answer it, stays open as long as the thread. A child has no
//! descriptor of the connection, so the server ends alone, the connection with it, and then the call of the
//! child. `clippy.toml` of this crate forbids these calls anywhere else.
//!
//! The child shares the memory, so a core dump waits for it before Linux 5.16: a server that crashes while
//! a call is under way may have to be killed. In that memory are the rings of io_uring too, and a ring keeps the image
//! open and locked: the child is killed with the thread that waits for it. What no signal ends, such as a sync of
//! another file system whose server has the request and does not answer, keeps the image locked until it ends.
//!
//! Owns no state. Invariant: the child makes async-signal-safe calls only.

#![expect(clippy::disallowed_methods, reason = "the child may wait for the server")]

use std::{
    ffi::CString,
    os::unix::ffi::OsStrExt,
    path::Path,
    sync::atomic::{AtomicI32, Ordering},
};

use rustix::fs::StatVfs;
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};

/// Descriptors that a child closes where it must close one by one.
const FD_COUNT_MAX: u64 = 1 << 20;
/// Size of the child's stack in words of 16 bytes.
const STACK_WORDS: usize = (64 << 10) / size_of::<u128>();
/// No result yet; errno values are positive.
const NO_RESULT: i32 = -1;

/// umount2(2).
///
/// # Errors
/// Those of umount2(2); EAGAIN as all calls of this module where no process can be started, except that
/// a forced unmount waits for no server and needs none.
pub(crate) fn unmount(dir: &Path, flags: UnmountFlags) -> Result<(), Errno> {
    let dir = CString::new(dir.as_os_str().as_bytes()).map_err(|_| Errno::INVAL)?;
    let call = || rustix::mount::unmount(dir.as_c_str(), flags);
    // SAFETY: the call is a system call, without allocations or locks.
    match unsafe { run(call) } {
        Err(Errno::AGAIN) if flags.contains(UnmountFlags::FORCE) => call(),
        result => result,
    }
}

/// mount(2) of an existing mount, with these flags. The kernel first syncs the file system.
///
/// # Errors
/// Those of mount(2).
pub(crate) fn remount(dir: &Path, flags: MountFlags) -> Result<(), Errno> {
    let dir = CString::new(dir.as_os_str().as_bytes()).map_err(|_| Errno::INVAL)?;
    // SAFETY: the call is a system call, without allocations or locks.
    unsafe { run(|| rustix::mount::mount_remount(dir.as_c_str(), flags, c"")) }
}

/// statvfs(3) of the file system of `dir`.
///
/// # Errors
/// Those of statvfs(3).
pub(crate) fn stat_fs(dir: &Path) -> Result<StatVfs, Errno> {
    let dir = CString::new(dir.as_os_str().as_bytes()).map_err(|_| Errno::INVAL)?;
    let mut stat = None;
    let call = || {
        stat = Some(rustix::fs::statvfs(dir.as_c_str())?);
        Ok(())
    };
    // SAFETY: the call is a system call, without allocations or locks.
    unsafe { run(call) }?;
    stat.ok_or(Errno::INTR)
}

/// Reads memory of process `pid` at `addr`, all of `bytes`.
///
/// # Errors
/// Those of process_vm_readv(2); EFAULT if only some of it could be read.
pub(crate) fn read_memory(pid: libc::pid_t, addr: usize, bytes: &mut [u8]) -> Result<(), Errno> {
    let local = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    let remote = libc::iovec { iov_base: addr as *mut _, iov_len: bytes.len() };
    let call = || {
        // SAFETY: `local` describes memory of `bytes`, valid for the call; only the kernel uses the
        // remote address, and checks it.
        let got =
            unsafe { libc::process_vm_readv(pid, &raw const local, 1, &raw const remote, 1, 0) };
        match usize::try_from(got) {
            Ok(got) if got == local.iov_len => Ok(()),
            Ok(_) => Err(Errno::FAULT),
            // SAFETY: the address is that of this thread's errno, which the child has to itself.
            Err(_) => Err(Errno::from_raw_os_error(unsafe { *libc::__errno_location() })),
        }
    };
    // SAFETY: the call is a system call, without allocations or locks.
    unsafe { run(call) }
}

/// syncfs(2) on the file system of `dir`.
///
/// # Errors
/// Those of open(2) and syncfs(2).
pub(crate) fn sync_fs(dir: &Path) -> Result<(), Errno> {
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
pub(crate) fn sync() {
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
    /// The process that waits.
    parent: libc::pid_t,
    /// 0, the errno of the call, or [`NO_RESULT`].
    result: AtomicI32,
}

/// Makes `call` in a child process and waits for its result; EAGAIN where none can be started.
///
/// The child shares this process's memory, as that of vfork(2) does: a copy would take time, and kernels
/// before 5.19 may give the copy a page into which a direct read is in flight.
///
/// # Safety
/// `call` is async-signal-safe (signal-safety(7)): other threads may hold any lock, and none of them
/// runs in the child.
unsafe fn run<F: FnOnce() -> Result<(), Errno>>(call: F) -> Result<(), Errno> {
    // SAFETY: getpid(2) has no conditions.
    let parent = unsafe { libc::getpid() };
    let mut job = Job { call: Some(call), parent, result: AtomicI32::new(NO_RESULT) };
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
        // A limit of processes (EAGAIN) or of memory (ENOMEM).
        return Err(Errno::AGAIN);
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
    // SAFETY: these are system calls.
    let is_orphan = unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        // It may have ended before; none outside of this process' namespace can be the parent.
        libc::getppid() != job.parent
    };
    close_all();
    if !is_orphan && let Some(call) = job.call.take() {
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
