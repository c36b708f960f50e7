//! Descriptors of /dev/fuse.
//!
//! Invariant: while a descriptor of a connection is open, so is one of its mount namespace, with a lower
//! number. A process that is killed as the last of its mount namespace would otherwise never end: the kernel
//! takes the mounts of a namespace down when its last user goes, the exit of a process does that before the
//! files it has closed are released, and the unmount of `fuseblk` waits for the answer of a server whose
//! connection is still open, in that same exit. With the descriptor the namespace goes when that file is
//! released. An exit closes descriptors in ascending order, and releases the files of the last ones first
//! (exit_files and task_work_run of the kernel), so the connection has ended by then.

use std::{
    fs::File,
    io::{self, IoSlice},
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
    sync::Arc,
};

use rustix::io::{fcntl_dupfd_cloexec, writev};

use super::ReplyPath;

/// The file whose open descriptor keeps the mount namespace of the calling thread.
const MOUNT_NAMESPACE: &str = "/proc/thread-self/ns/mnt";

/// A descriptor of /dev/fuse.
#[derive(Debug)]
pub struct FuseFd {
    fd: OwnedFd,
    /// Closed after `fd`, as fields are dropped in their order. None without /proc: then only the end of
    /// the last process of a mount namespace is unsafe.
    namespace: Option<Arc<OwnedFd>>,
}

impl FuseFd {
    /// Takes over a descriptor that is not mounted yet, or was mounted by another process.
    ///
    /// # Errors
    /// The process has too many descriptors.
    pub(super) fn new(fd: OwnedFd) -> io::Result<FuseFd> {
        let namespace = File::open(MOUNT_NAMESPACE).ok().map(|file| Arc::new(file.into()));
        FuseFd::above(fd, namespace)
    }

    /// Takes over a descriptor that will be a further one of this connection.
    ///
    /// # Errors
    /// As [`FuseFd::new`].
    pub(super) fn further(&self, fd: OwnedFd) -> io::Result<FuseFd> {
        FuseFd::above(fd, self.namespace.clone())
    }

    fn above(fd: OwnedFd, namespace: Option<Arc<OwnedFd>>) -> io::Result<FuseFd> {
        let fd = match &namespace {
            Some(low) if fd.as_raw_fd() < low.as_raw_fd() => {
                fcntl_dupfd_cloexec(&fd, low.as_raw_fd() + 1)?
            }
            _ => fd,
        };
        Ok(FuseFd { fd, namespace })
    }
}

impl AsFd for FuseFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl AsRawFd for FuseFd {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

impl ReplyPath for FuseFd {
    fn send(&self, parts: &[IoSlice<'_>]) -> io::Result<()> {
        match writev(&self.fd, parts).map_err(io::Error::from) {
            Ok(_) => Ok(()),
            // The request was interrupted, or the connection has ended: no caller waits for this
            // reply.
            Err(e) if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ENODEV)) => Ok(()),
            Err(e) => Err(e),
        }
    }

    fn notify(&self, parts: &[IoSlice<'_>]) -> io::Result<()> {
        writev(&self.fd, parts).map(drop).map_err(Into::into)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn null() -> OwnedFd {
        File::open("/dev/null").unwrap().into()
    }

    #[test]
    fn a_descriptor_lies_above_that_of_its_namespace() {
        let low = null();
        let first = FuseFd::new(low).unwrap();
        let namespace = first.namespace.as_ref().unwrap().as_raw_fd();
        assert!(first.as_raw_fd() > namespace);
        // Free numbers below it are given to what is opened next.
        let holes: Vec<OwnedFd> = (0..8).map(|_| null()).collect();
        let high = FuseFd::new(null()).unwrap();
        drop(holes);
        let further = high.further(null()).unwrap();
        assert!(further.as_raw_fd() > high.namespace.as_ref().unwrap().as_raw_fd());
    }
}
