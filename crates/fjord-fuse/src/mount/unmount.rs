//! Unmounting: by the server itself, for instance on SIGTERM, and from outside.
//!
//! Owns no state. Invariant: no thread of a server makes a system call that waits for the server's own
//! answers; a child process does ([`crate::child`]).

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use rustix::io::Errno;
use rustix::mount::UnmountFlags;

use fjord_block::mountinfo::{MountEntry, mount_at};

use super::{MountError, fusermount};
use crate::child;
use crate::transport::{DevFuse, Transport};

/// How long an unmount waits for a busy mount.
const BUSY_WAIT: Duration = Duration::from_millis(500);
/// Time until it tries again: at first, and at most. Each try is a process ([`crate::child`]).
const BUSY_POLL_MIN: Duration = Duration::from_millis(1);
const BUSY_POLL_MAX: Duration = Duration::from_millis(100);

/// Takes a mount down from outside the session, for instance on SIGTERM.
#[derive(Clone, Debug)]
pub struct MountHandle {
    pub(super) mountpoint: PathBuf,
    pub(super) transport: Arc<DevFuse>,
    /// The mount as it was made, so that a later one in the same place is left alone.
    pub(super) entry: MountEntry,
}

impl MountHandle {
    /// The directory, absolute and without symbolic links.
    pub fn mountpoint(&self) -> &Path {
        &self.mountpoint
    }

    /// Unmounts, so that the session ends. For `fuseblk` it returns when the image is clean.
    ///
    /// # Errors
    /// [`MountError::Busy`] while programs use the mount. Already unmounted is no error.
    pub fn unmount(&self) -> Result<(), MountError> {
        if !self.is_mounted() {
            return Ok(());
        }
        unmount_dir(&self.mountpoint, false)
    }

    /// As [`MountHandle::unmount`], trying again while the mount is busy, for up to `patience`;
    /// after that the mount is detached and the connection aborted, so that programs with open
    /// files on it get ENOTCONN. Earlier writes are safe in either case: the caller must have
    /// written the kernel's dirty pages back with syncfs(2), and closes the file system afterwards.
    ///
    /// # Errors
    /// The mount could be neither unmounted nor detached.
    pub fn unmount_or_cut(&self, patience: Duration) -> Result<(), MountError> {
        let deadline = Instant::now() + patience;
        loop {
            match self.unmount() {
                Err(MountError::Busy(_) | MountError::NoProcess(_))
                    if Instant::now() < deadline =>
                {
                    std::thread::sleep(Duration::from_millis(50));
                }
                Err(MountError::Busy(_) | MountError::NoProcess(_)) => break,
                done => return done,
            }
        }
        // An error here shows again when the file system is closed.
        let _ = child::sync_fs(&self.mountpoint);
        self.cut()
    }

    /// Aborts the connection and detaches the mount, for instance if INIT failed.
    ///
    /// # Errors
    /// The mount could not be detached, or the connection outlives it (only without privileges
    /// and without `/sys/fs/fuse/connections`).
    pub fn cut(&self) -> Result<(), MountError> {
        if rustix::process::geteuid().is_root() {
            // In one call: the force cuts the connection, and then this process may end.
            let flags = UnmountFlags::FORCE | UnmountFlags::DETACH;
            return match child::unmount(&self.mountpoint, flags) {
                Ok(()) => Ok(()),
                Err(_) => unmount_dir(&self.mountpoint, true),
            };
        }
        let cut = self.transport.abort();
        unmount_dir(&self.mountpoint, true)?;
        cut.map_err(|e| MountError::io("abort the FUSE connection", e))
    }

    /// Ends a session that remains after the unmount because another mount namespace has a copy of
    /// the mount: syncs the kernel's dirty pages, for up to `patience`, and aborts the connection.
    /// Not an error if the session has ended meanwhile.
    ///
    /// # Errors
    /// The connection could not be cut: no privilege, or `/sys/fs/fuse/connections` is missing.
    pub fn cut_copies(&self, patience: Duration) -> Result<(), MountError> {
        // There is no mount here for syncfs(2). In a separate thread, because sync(2) waits for all
        // file systems.
        let (done, synced) = std::sync::mpsc::channel();
        let sync = move || {
            child::sync();
            // Nobody listens any more once patience has ended.
            let _ = done.send(());
        };
        let spawned = std::thread::Builder::new().name("fjord-sync".into()).spawn(sync);
        if spawned.is_err() || synced.recv_timeout(patience).is_err() {
            tracing::warn!("aborting the connection although sync(2) has not returned");
        }
        self.transport.abort().map_err(|e| MountError::io("abort the FUSE connection", e))
    }

    fn is_mounted(&self) -> bool {
        let same = |m: MountEntry| {
            (m.dev_major, m.dev_minor) == (self.entry.dev_major, self.entry.dev_minor)
        };
        mount_at(&self.mountpoint).ok().flatten().is_some_and(same)
    }
}

/// Unmounts whatever is mounted on `dir`; `lazy` detaches it although it is in use.
///
/// # Errors
/// Busy, not mounted, no permission.
pub fn unmount_dir(dir: &Path, lazy: bool) -> Result<(), MountError> {
    if !rustix::process::geteuid().is_root() {
        return fusermount::unmount(dir, lazy).map_err(|e| match e.kind() {
            io::ErrorKind::ResourceBusy => MountError::Busy(dir.to_owned()),
            io::ErrorKind::NotFound => MountError::NoFusermount,
            _ => MountError::Fusermount(e.to_string()),
        });
    }
    let flags = if lazy { UnmountFlags::DETACH } else { UnmountFlags::empty() };
    // A file closed just now keeps the mount busy until its release has been answered.
    let started = Instant::now();
    let mut poll = BUSY_POLL_MIN;
    let result = loop {
        match child::unmount(dir, flags | UnmountFlags::NOFOLLOW) {
            Err(Errno::BUSY | Errno::AGAIN) if started.elapsed() < BUSY_WAIT => {
                std::thread::sleep(poll);
                poll = (poll * 2).min(BUSY_POLL_MAX);
            }
            other => break other,
        }
    };
    result.map_err(|e| match e {
        Errno::BUSY => MountError::Busy(dir.to_owned()),
        Errno::AGAIN => MountError::NoProcess(dir.to_owned()),
        Errno::INVAL => MountError::NotMounted(dir.to_owned()),
        Errno::PERM => MountError::Permission {
            what: format!("{} can be unmounted only by root", dir.display()),
        },
        e => MountError::io(format!("unmount {}", dir.display()), e),
    })
}
