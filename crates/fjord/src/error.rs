//! The engine's error type.
//!
//! Owns the classification: device failure (`Io`), damaged image (`Corrupt`), unsupported feature
//! (`Incompatible`), unexpected contents of a file (`InvalidData`), wrong call (`Usage`), call
//! after the unmount (`Closed`), or an outcome that POSIX defines (`Posix`: no such file, no space,
//! ...). Invariant: `errno()` maps every error to the number that ext4 gives for it.

use std::borrow::Cow;
use std::sync::Arc;

use fjord_block::{IoError, OpenError, SnapshotError};
use fjord_format::FormatError;
use fjord_journal::JournalError;
use fjord_mkfs::MkfsError;
use rustix::io::Errno;
use thiserror::Error;

use crate::disk::DiskContents;
use crate::resize::ResizeError;

/// Result of an engine call.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Error of an engine call. It converts to [`std::io::Error`], with the kind that
/// `std::fs` gives for the same failure.
///
/// ```
/// # use std::sync::Arc;
/// # use fjord::{Fs, MemDevice, MkfsOptions, MountOptions};
/// use fjord::Error;
///
/// # let device = Arc::new(MemDevice::new(16 << 20));
/// # let fs = Fs::create_on(device, &MkfsOptions::default(), &MountOptions::default())?;
/// match fs.read("/missing") {
///     Err(Error::Posix(errno)) => assert_eq!(errno.raw_os_error(), 2), // ENOENT
///     other => panic!("{other:?}"),
/// }
/// let error = std::io::Error::from(fs.read("/missing").unwrap_err());
/// assert_eq!(error.kind(), std::io::ErrorKind::NotFound);
///
/// fs.unmount()?;
/// assert!(matches!(fs.read("/missing"), Err(Error::Closed)));
/// # Ok::<(), fjord::Error>(())
/// ```
#[derive(Debug, Clone, Error)]
#[non_exhaustive]
pub enum Error {
    /// The device failed; after a failed write the file system is read-only.
    #[error("device error: {0}")]
    Io(#[from] IoError),
    /// Bytes on disk contradict the format.
    #[error("damaged {what}: {detail}; unmount and run e2fsck -f on the image")]
    Corrupt {
        /// The structure that is damaged.
        what: Cow<'static, str>,
        /// Where it is and what is wrong with it.
        detail: String,
    },
    /// The image cannot be opened: missing, in use, no permission, not a file.
    #[error("{0}")]
    Open(Arc<OpenError>),
    /// The image has a feature that is not supported for this operation.
    #[error("{feature} is not supported: {hint}")]
    Incompatible {
        /// Name of the feature as `dumpe2fs` prints it.
        feature: String,
        /// What to do instead.
        hint: String,
    },
    /// There is no superblock of ext2, ext3 or ext4.
    #[error("this is not an ext2, ext3 or ext4 image{0}")]
    NotExt4(DiskContents),
    /// The file system that holds the image is full, and the image needs space there.
    #[error("{0}")]
    NoRoom(String),
    /// A file does not hold what the call expects of it, such as text in UTF-8.
    #[error("{0}")]
    InvalidData(String),
    /// The call or its options are invalid.
    #[error("{0}")]
    Usage(String),
    /// A snapshot could not be taken; the file system is unchanged.
    #[error("{0}")]
    Snapshot(Arc<SnapshotError>),
    /// The file system did not get its new size.
    #[error("{0}")]
    Resize(#[from] ResizeError),
    /// The outcome that POSIX and Linux define for this call.
    #[error("{}", posix_message(*.0))]
    Posix(Errno),
    /// The file system was unmounted ([`crate::Fs::unmount`]) before the call.
    #[error("the file system is closed: it was unmounted before this call; open the image again")]
    Closed,
    /// The journal failed or was aborted; nothing more can be written.
    #[error("journal: {0}")]
    Journal(JournalError),
}

fn posix_message(errno: Errno) -> String {
    std::io::Error::from_raw_os_error(errno.raw_os_error()).to_string()
}

impl Error {
    /// A `Corrupt` error.
    pub(crate) fn corrupt(what: impl Into<Cow<'static, str>>, detail: impl Into<String>) -> Self {
        Error::Corrupt { what: what.into(), detail: detail.into() }
    }

    /// The errno that a system call gives for this error.
    pub fn errno(&self) -> i32 {
        self.to_errno().raw_os_error()
    }

    /// As [`Error::errno`], typed.
    pub fn to_errno(&self) -> Errno {
        match self {
            Error::Io(_) | Error::Journal(_) => Errno::IO,
            Error::Corrupt { .. } => Errno::UCLEAN,
            Error::Incompatible { .. } => Errno::OPNOTSUPP,
            Error::NoRoom(_) => Errno::NOSPC,
            Error::InvalidData(_) => Errno::ILSEQ,
            Error::Usage(_) | Error::NotExt4(_) => Errno::INVAL,
            // As a call on a file descriptor that was closed.
            Error::Closed => Errno::BADF,
            Error::Posix(errno) => *errno,
            Error::Open(open) => Errno::from_raw_os_error(open.errno()),
            Error::Snapshot(error) => Errno::from_raw_os_error(error.errno()),
            Error::Resize(error) => Errno::from_raw_os_error(error.errno()),
        }
    }

    /// Whether the image itself is damaged.
    pub fn is_corrupt(&self) -> bool {
        matches!(self, Error::Corrupt { .. })
    }

    /// Whether this is the POSIX outcome `errno`.
    pub fn is(&self, errno: Errno) -> bool {
        matches!(self, Error::Posix(e) if *e == errno)
    }
}

impl From<Errno> for Error {
    fn from(errno: Errno) -> Self {
        Error::Posix(errno)
    }
}

impl From<SnapshotError> for Error {
    fn from(error: SnapshotError) -> Self {
        Error::Snapshot(Arc::new(error))
    }
}

impl From<FormatError> for Error {
    fn from(error: FormatError) -> Self {
        match error {
            FormatError::Incompatible { .. } => Error::Incompatible {
                feature: error.to_string(),
                hint: "use a newer fjord or e2fsprogs on this image".into(),
            },
            other => Error::corrupt("structure", other.to_string()),
        }
    }
}

impl From<MkfsError> for Error {
    fn from(error: MkfsError) -> Self {
        match error {
            MkfsError::Io(error) => Error::Io(error),
            other => Error::Usage(other.to_string()),
        }
    }
}

impl From<JournalError> for Error {
    fn from(error: JournalError) -> Self {
        match error {
            corrupt @ (JournalError::Corrupt { .. }
            | JournalError::Format { .. }
            | JournalError::BadMap(_)
            | JournalError::Marked(_)) => Error::corrupt("journal", corrupt.to_string()),
            other => Error::Journal(other),
        }
    }
}

impl From<Error> for std::io::Error {
    fn from(error: Error) -> Self {
        match &error {
            Error::Posix(errno) => std::io::Error::from_raw_os_error(errno.raw_os_error()),
            Error::Io(_) | Error::Journal(_) => std::io::Error::other(error),
            Error::Open(open) => {
                let kind = std::io::Error::from_raw_os_error(open.errno()).kind();
                std::io::Error::new(kind, error)
            }
            Error::Corrupt { .. } | Error::InvalidData(_) => {
                std::io::Error::new(std::io::ErrorKind::InvalidData, error)
            }
            Error::Snapshot(failed) => {
                let kind = std::io::Error::from_raw_os_error(failed.errno()).kind();
                std::io::Error::new(kind, error)
            }
            Error::Resize(refused) => {
                let kind = std::io::Error::from_raw_os_error(refused.errno()).kind();
                std::io::Error::new(kind, error)
            }
            Error::Incompatible { .. } => {
                std::io::Error::new(std::io::ErrorKind::Unsupported, error)
            }
            Error::NoRoom(_) => std::io::Error::new(std::io::ErrorKind::StorageFull, error),
            Error::Usage(_) | Error::NotExt4(_) => {
                std::io::Error::new(std::io::ErrorKind::InvalidInput, error)
            }
            Error::Closed => std::io::Error::new(std::io::ErrorKind::NotConnected, error),
        }
    }
}
