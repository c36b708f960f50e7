//! The transport over /dev/fuse: one read(2) per request, one writev(2) per reply.

use std::{
    fs::File,
    io::{self, IoSlice, Read, Write},
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
    path::PathBuf,
    sync::Arc,
};

use parking_lot::Mutex;

use super::{Channel, RequestBuf, Transport};
use crate::abi::FUSE_DEV_IOC_CLONE;

/// The device that a connection is opened through.
pub const DEV_FUSE: &str = "/dev/fuse";

/// A mounted connection over /dev/fuse.
#[derive(Debug)]
pub struct DevFuse {
    /// The descriptor that was given to mount(2). Gone once the connection was aborted.
    fd: Mutex<Option<Arc<OwnedFd>>>,
    /// `/sys/fs/fuse/connections/N/abort`, once the mount is known.
    abort_path: Mutex<Option<PathBuf>>,
}

impl DevFuse {
    /// Takes over a descriptor of /dev/fuse that is, or will be, mounted.
    pub fn new(fd: OwnedFd) -> DevFuse {
        DevFuse { fd: Mutex::new(Some(Arc::new(fd))), abort_path: Mutex::new(None) }
    }

    /// Opens /dev/fuse, not yet mounted.
    ///
    /// # Errors
    /// As open(2): the module is not loaded, or permission is missing.
    pub fn open() -> io::Result<DevFuse> {
        let file = File::options().read(true).write(true).open(DEV_FUSE)?;
        Ok(DevFuse::new(file.into()))
    }

    /// The descriptor to hand to mount(2).
    ///
    /// # Errors
    /// ENOTCONN after [`Transport::abort`].
    pub fn fd(&self) -> io::Result<Arc<OwnedFd>> {
        self.fd.lock().clone().ok_or_else(|| io::Error::from_raw_os_error(libc::ENOTCONN))
    }

    /// Tells which connection this is, by the device number of the mounted root directory.
    pub fn set_connection(&self, root_dev: u64) {
        let minor = libc::minor(root_dev);
        let major = libc::major(root_dev);
        // The kernel names a connection by the low 32 bits of its internal device number.
        let number = (u64::from(major) << 20) | u64::from(minor);
        *self.abort_path.lock() =
            Some(PathBuf::from(format!("/sys/fs/fuse/connections/{number}/abort")));
    }
}

impl Transport for DevFuse {
    fn channel(&self) -> io::Result<Box<dyn Channel>> {
        let session = self.fd()?;
        Ok(Box::new(DevFuseChannel { file: clone_device(session.as_fd())?, _session: session }))
    }

    fn abort(&self) -> io::Result<()> {
        let path = self.abort_path.lock().clone();
        self.fd.lock().take();
        match path {
            Some(path) => std::fs::write(path, "1"),
            None => Ok(()),
        }
    }
}

/// A second way into the same connection, with a list of pending requests of its own.
fn clone_device(session: BorrowedFd<'_>) -> io::Result<File> {
    let file = File::options().read(true).write(true).open(DEV_FUSE)?;
    let session_fd = session.as_raw_fd() as u32;
    // SAFETY: the ioctl reads one u32 through a pointer that is valid for the call.
    let rc = unsafe {
        libc::ioctl(file.as_raw_fd(), FUSE_DEV_IOC_CLONE as libc::Ioctl, &raw const session_fd)
    };
    if rc == 0 {
        return Ok(file);
    }
    // Sandboxes may forbid the ioctl: share the descriptor then, which is correct and only slower.
    // SAFETY: dup returns a new descriptor that nothing else owns.
    let fd = unsafe { libc::fcntl(session.as_raw_fd(), libc::F_DUPFD_CLOEXEC, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: as above.
    Ok(unsafe { File::from_raw_fd(fd) })
}

/// One worker's descriptor of /dev/fuse.
#[derive(Debug)]
pub struct DevFuseChannel {
    file: File,
    /// Keeps the connection alive while this worker serves it.
    _session: Arc<OwnedFd>,
}

impl Channel for DevFuseChannel {
    fn receive<'b>(&mut self, buf: &'b mut RequestBuf) -> io::Result<Option<&'b [u8]>> {
        let room = buf.as_mut_slice();
        loop {
            match self.file.read(room) {
                Ok(len) => return Ok(Some(&room[..len])),
                Err(e) => match e.raw_os_error() {
                    // ENOENT: the request was given up before it could be read.
                    Some(libc::EINTR | libc::EAGAIN | libc::ENOENT) => {}
                    Some(libc::ENODEV | libc::ECONNABORTED) => return Ok(None),
                    _ => return Err(e),
                },
            }
        }
    }

    fn send(&mut self, parts: &[IoSlice<'_>]) -> io::Result<()> {
        match self.file.write_vectored(parts) {
            Ok(_) => Ok(()),
            // The request was given up, or the connection has ended: nobody waits for this.
            Err(e) if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ENODEV)) => Ok(()),
            Err(e) => Err(e),
        }
    }
}
