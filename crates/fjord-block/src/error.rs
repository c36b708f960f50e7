//! Errors of the block layer. Owns [`IoError`] (a request failed) and [`OpenError`] (a device could not be opened).
//!
//! Invariant: an [`IoError`] is cheap to clone, because one failure is reported to every ticket that depended on it.

use std::fmt;
use std::io;
use std::ops::Range;
use std::path::PathBuf;

/// The operation that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IoOp {
    /// A read request.
    Read,
    /// A write request.
    Write,
    /// A cache flush.
    Flush,
    /// A discard request.
    Discard,
    /// A write-zeroes request.
    WriteZeroes,
    /// A change of the device's size.
    SetSize,
    /// Allocating space on the host for later writes.
    EnsureRoom,
    /// A check that the device is unchanged since the open.
    Check,
}

impl fmt::Display for IoOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            IoOp::Read => "read",
            IoOp::Write => "write",
            IoOp::Flush => "flush",
            IoOp::Discard => "discard",
            IoOp::WriteZeroes => "write-zeroes",
            IoOp::SetSize => "set-size",
            IoOp::EnsureRoom => "taking room",
            IoOp::Check => "check",
        })
    }
}

/// Kind of failure of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IoErrorKind {
    /// The operating system (or an injected fault) reported this errno.
    Os(i32),
    /// The request reaches beyond the end of the device.
    OutOfRange,
    /// The device was opened read-only.
    ReadOnly,
    /// The file ended before the request was complete.
    UnexpectedEof,
    /// The image file is shorter than when it was opened: it was truncated. The data past its end
    /// is lost.
    Truncated {
        /// Its current size in bytes.
        size_bytes: u64,
    },
    /// The device does not support this operation.
    Unsupported,
    /// An earlier flush, or a write whose result was never read, failed with this errno. Which data
    /// is durable is unknown, so every later flush fails until the device is opened again.
    Earlier(i32),
    /// An ordered write or a flush before it failed, so the epoch scheduler dispatches nothing
    /// ordered after it, until the device is opened again. Names the failed request.
    OrderBroken {
        /// Why that request failed.
        errno: i32,
        /// Its operation.
        op: IoOp,
        /// Its offset, in bytes.
        offset: u64,
        /// Its length in bytes.
        len: u64,
    },
    /// The device went away before it finished the request.
    Abandoned,
    /// Another host has taken the image over.
    Fenced,
    /// The device did not answer, and whoever uses it ends without it ([`crate::Device::give_up`]).
    GivenUp,
}

/// A failed request: what, where, and why. Offsets and lengths are in bytes (both 0 for a flush).
#[derive(Clone, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub struct IoError {
    /// The kind of failure.
    pub kind: IoErrorKind,
    /// The operation that failed.
    pub op: IoOp,
    /// Byte offset of the request on the device.
    pub offset: u64,
    /// Length of the request in bytes.
    pub len: u64,
}

impl fmt::Display for IoError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.op {
            IoOp::Flush => write!(f, "flush failed: ")?,
            IoOp::Check => {}
            IoOp::EnsureRoom => write!(
                f,
                "allocating space for {} bytes at offset {} failed: ",
                self.len, self.offset
            )?,
            op => write!(f, "{op} of {} bytes at offset {} failed: ", self.len, self.offset)?,
        }
        match self.kind {
            IoErrorKind::Os(libc::ENOSPC | libc::EDQUOT) => {
                f.write_str("no space left on the disk that holds the image; free space there")
            }
            IoErrorKind::Os(errno) => write!(f, "{}", io::Error::from_raw_os_error(errno)),
            IoErrorKind::OutOfRange => f.write_str("past the end of the device"),
            IoErrorKind::ReadOnly => f.write_str("the device is open read-only"),
            IoErrorKind::UnexpectedEof => f.write_str("unexpected end of the device"),
            IoErrorKind::Truncated { size_bytes } => write!(
                f,
                "the image file was truncated to {size_bytes} bytes by another program; unmount, \
                 restore the file and run e2fsck -f"
            ),
            IoErrorKind::Unsupported => f.write_str("the device does not support it"),
            IoErrorKind::Earlier(errno) => write!(
                f,
                "an earlier request failed ({}), so it is unknown which data is durable; unmount \
                 and run fjord recover",
                io::Error::from_raw_os_error(errno)
            ),
            IoErrorKind::OrderBroken { errno, op, offset, len } => write!(
                f,
                "an earlier {op} of {len} bytes at offset {offset} failed ({}), so nothing may be \
                 written after it; unmount and run fjord recover",
                io::Error::from_raw_os_error(errno)
            ),
            IoErrorKind::Abandoned => {
                f.write_str("the device was closed before the request finished")
            }
            IoErrorKind::GivenUp => f.write_str(
                "the device does not answer, and was given up: what fsync has promised is kept; unmount",
            ),
            IoErrorKind::Fenced => f.write_str(
                "another host has taken the image over, so nothing can be written any more; unmount",
            ),
        }
    }
}

impl IoError {
    /// An error of `op` at `offset` over `len` bytes.
    pub fn new(kind: IoErrorKind, op: IoOp, offset: u64, len: u64) -> Self {
        IoError { kind, op, offset, len }
    }

    /// An error with an errno from the operating system.
    pub fn os(errno: i32, op: IoOp, offset: u64, len: u64) -> Self {
        Self::new(IoErrorKind::Os(errno), op, offset, len)
    }

    /// The errno that a POSIX caller should see.
    pub fn errno(&self) -> i32 {
        match self.kind {
            IoErrorKind::Os(errno) => errno,
            IoErrorKind::ReadOnly => libc::EROFS,
            IoErrorKind::Unsupported => libc::EOPNOTSUPP,
            IoErrorKind::OutOfRange
            | IoErrorKind::UnexpectedEof
            | IoErrorKind::Truncated { .. }
            | IoErrorKind::Earlier(_)
            | IoErrorKind::OrderBroken { .. }
            | IoErrorKind::Abandoned
            | IoErrorKind::Fenced
            | IoErrorKind::GivenUp => libc::EIO,
        }
    }

    /// Whether the host file system ran out of space under the image (a retry may succeed later).
    pub fn is_no_space(&self) -> bool {
        matches!(self.kind, IoErrorKind::Os(libc::ENOSPC | libc::EDQUOT))
    }

    /// Whether the image file was truncated while it was in use.
    pub fn is_truncated(&self) -> bool {
        matches!(self.kind, IoErrorKind::Truncated { .. })
    }
}

impl From<IoError> for io::Error {
    fn from(error: IoError) -> io::Error {
        let kind = io::Error::from_raw_os_error(error.errno()).kind();
        io::Error::new(kind, error)
    }
}

/// Errors of opening a file or block device.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Another process (or another handle of this one) has the image open.
    #[error("{} is in use by {by}; unmount it there first", path.display())]
    InUse {
        /// The path as given.
        path: PathBuf,
        /// Who has it open, if known.
        by: String,
    },
    /// The path is neither a regular file nor a block device.
    #[error("{} is a {what}; give an image file or a block device", path.display())]
    NotADevice {
        /// The path as given.
        path: PathBuf,
        /// Its actual type.
        what: &'static str,
    },
    /// The path can be read, but not written.
    #[error("{} cannot be written ({source}): make it writable (chmod, chattr -i, the mount options of its file system, blockdev --setrw), or open it read-only", path.display())]
    WriteProtected {
        /// The path as given.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The range of the file that was asked for reaches beyond its end.
    #[error("{} has {file_bytes} bytes, and bytes {} to {} are asked for: the image is truncated, or the \
             offset or the partition table is wrong", path.display(), range.start, range.end)]
    OutOfRange {
        /// The path as given.
        path: PathBuf,
        /// The range in bytes.
        range: Range<u64>,
        /// Size of the file in bytes.
        file_bytes: u64,
    },
    /// io_uring or O_DIRECT was requested and is not supported here.
    #[error("{}: {what} was requested but is not supported here ({source}); unset the option, and \
             fjord chooses", path.display())]
    Unavailable {
        /// The path as given.
        path: PathBuf,
        /// The facility that is missing.
        what: &'static str,
        /// Why.
        source: io::Error,
    },
    /// An image that a URL names cannot be had.
    #[error("{name}: {what}")]
    Remote {
        /// The name as given.
        name: String,
        /// The errno that a POSIX caller should see.
        errno: i32,
        /// What was being done, why it failed, and what to do.
        what: String,
    },
    /// The operating system refused (not found, no permission, …).
    #[error("cannot open {}: {source}", path.display())]
    Os {
        /// The path as given.
        path: PathBuf,
        /// The error of the system call.
        source: io::Error,
    },
}

impl OpenError {
    /// The errno that a POSIX caller should see.
    pub fn errno(&self) -> i32 {
        match self {
            OpenError::InUse { .. } => libc::EBUSY,
            OpenError::NotADevice { .. } => libc::ENOTBLK,
            OpenError::OutOfRange { .. } => libc::EINVAL,
            OpenError::Remote { errno, .. } => *errno,
            OpenError::WriteProtected { source, .. }
            | OpenError::Unavailable { source, .. }
            | OpenError::Os { source, .. } => source.raw_os_error().unwrap_or(libc::EIO),
        }
    }
}
