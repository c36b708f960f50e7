//! Snapshots: a copy of a device as of one moment, while it is in use. Owns the types of
//! [`crate::Device::snapshot_to`]; the file backend implements it.

use std::fmt;
use std::io;
use std::time::Duration;

use crate::error::IoError;

/// Whether the copy shares its blocks with the image (FICLONE), as `cp --reflink` has it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reflink {
    /// If the file system supports it; else the bytes are copied.
    #[default]
    Auto,
    /// Always; fail if unsupported.
    Always,
    /// Never: the bytes are copied, so that overwriting the image needs no space.
    Never,
}

impl Reflink {
    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Reflink::Auto => "auto",
            Reflink::Always => "always",
            Reflink::Never => "never",
        }
    }

    /// The kind with this name.
    pub fn from_name(name: &str) -> Option<Reflink> {
        [Reflink::Auto, Reflink::Always, Reflink::Never].into_iter().find(|r| r.name() == name)
    }
}

/// How to take a snapshot.
#[derive(Clone, Copy, Default)]
pub struct SnapshotOptions<'a> {
    /// Whether blocks are shared.
    pub reflink: Reflink,
    /// Polled between pieces of the copy; `true` cancels it.
    pub is_cancelled: Option<&'a (dyn Fn() -> bool + Sync)>,
}

impl fmt::Debug for SnapshotOptions<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SnapshotOptions").field("reflink", &self.reflink).finish_non_exhaustive()
    }
}

impl SnapshotOptions<'_> {
    /// For implementers of [`crate::Device::snapshot_to`], between pieces.
    ///
    /// # Errors
    /// `Cancelled` if the caller has done that.
    pub fn check_cancelled(&self) -> Result<(), SnapshotError> {
        match self.is_cancelled {
            Some(is_cancelled) if is_cancelled() => Err(SnapshotError::Cancelled),
            _ => Ok(()),
        }
    }
}

/// Report of a snapshot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SnapshotReport {
    /// The size of the copy in bytes.
    pub size_bytes: u64,
    /// Bytes written to the copy; 0 if it shares all blocks.
    pub copied_bytes: u64,
    /// The copy shares its blocks with the image.
    pub reflinked: bool,
    /// Length of the pause of all changes.
    pub pause: Duration,
    /// Changes that waited: during the pause, or until their chunks had been read.
    pub held_count: u64,
    /// Permission bits of the image.
    pub mode: u32,
    /// The image, as stat(2) names it: device and inode number.
    pub image: (u64, u64),
}

/// Errors of a snapshot. The copy is then incomplete.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// A device that is neither a file nor a block device.
    #[error("snapshots of this device are not supported; unmount the image and copy it")]
    Unsupported,
    /// Another snapshot is in progress.
    #[error("another snapshot of this image is in progress; try again when it has ended")]
    Busy,
    /// Cancelled by the caller.
    #[error("the snapshot was cancelled")]
    Cancelled,
    /// The device was closed meanwhile.
    #[error("the image was unmounted during the snapshot; run fjord snapshot on the image")]
    Closed,
    /// The image became shorter.
    #[error("the size of the image changed during the snapshot; try again")]
    Resized,
    /// Writes in flight, or the clone, took longer than the maximum pause.
    #[error(
        "writes were paused for longer than {0:?}: the disk of the image is too slow at present, \
         or the file system takes too long to share the blocks; try again, or use --reflink=never"
    )]
    SlowPause(Duration),
    /// Writes to the image waited too long for the copy.
    #[error(
        "the copy was too slow: writes to the image waited for {0:?}; copy to a faster disk, or \
         when the mount is less busy"
    )]
    SlowCopy(Duration),
    /// The blocks cannot be shared.
    #[error(
        "the blocks cannot be shared ({0}); put the copy on the file system of the image, which \
         must support reflinks (XFS, Btrfs), or omit --reflink"
    )]
    NoReflink(io::Error),
    /// The image could not be read.
    #[error("reading the image failed: {0}")]
    Read(IoError),
    /// The copy could not be written.
    #[error("writing the copy failed: {0}")]
    Write(io::Error),
    /// The cluster on which the image lies refused a step.
    #[error("{doing} failed: {source}")]
    Cluster {
        /// The step.
        doing: &'static str,
        /// What it said.
        source: io::Error,
    },
    /// No thread could be started.
    #[error("no thread could be started for the snapshot: {0}")]
    Thread(io::Error),
}

impl SnapshotError {
    /// The errno that a POSIX caller should see.
    pub fn errno(&self) -> i32 {
        match self {
            SnapshotError::Unsupported | SnapshotError::NoReflink(_) => libc::EOPNOTSUPP,
            SnapshotError::Busy => libc::EBUSY,
            SnapshotError::Cancelled | SnapshotError::Closed => libc::ECANCELED,
            SnapshotError::Resized => libc::EAGAIN,
            SnapshotError::SlowPause(_) | SnapshotError::SlowCopy(_) => libc::ETIMEDOUT,
            SnapshotError::Read(error) => error.errno(),
            SnapshotError::Write(error)
            | SnapshotError::Thread(error)
            | SnapshotError::Cluster { source: error, .. } => {
                error.raw_os_error().unwrap_or(libc::EIO)
            }
        }
    }
}
