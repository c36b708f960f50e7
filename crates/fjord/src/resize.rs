//! Growth of a file system, in use or not: [`Fs::resize`].
//!
//! ```
//! # use std::sync::Arc;
//! # use fjord::{Fs, MemDevice, MkfsOptions, MountOptions};
//! use fjord::resize::NewSize;
//!
//! # let device = Arc::new(MemDevice::new(32 << 20));
//! # let fs = Fs::create_on(device, &MkfsOptions::default(), &MountOptions::default())?;
//! // ... the file system is in use, by other threads too ...
//! let report = fs.resize(NewSize::Plus(96 << 20))?;
//! assert_eq!((report.old_bytes, report.new_bytes), (32 << 20, 128 << 20));
//! # fs.unmount()?;
//! # Ok::<(), fjord::Error>(())
//! ```
//!
//! [`Fs::resize`]: crate::Fs::resize

use fjord_format::growth::GrowthLimit;
use rustix::io::Errno;
use thiserror::Error;

/// The size that a file system is to have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NewSize {
    /// So many bytes.
    Bytes(u64),
    /// So many bytes more than now.
    Plus(u64),
    /// As large as the file or device that it lies in.
    Device,
}

/// What a call of [`Fs::resize`](crate::Fs::resize) did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResizeReport {
    /// Bytes of the file system before.
    pub old_bytes: u64,
    /// Bytes of it now. Fewer than asked for where the rest is no whole block, or too little for a
    /// block group.
    pub new_bytes: u64,
    /// Inodes before.
    pub old_inodes: u32,
    /// Inodes now.
    pub new_inodes: u32,
}

/// Why a file system keeps its size, or got only a part of the new one.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum ResizeError {
    /// It would become smaller.
    #[error(
        "the file system has {old_bytes} bytes, and {new_bytes} are fewer; to shrink it, unmount it \
         and run `resize2fs` on the image"
    )]
    Shrink {
        /// Bytes that it has.
        old_bytes: u64,
        /// Bytes that were asked for.
        new_bytes: u64,
    },
    /// The device below has too few bytes and cannot grow by itself.
    #[error(
        "the device has {device_bytes} bytes, {wanted_bytes} are needed; make it larger first \
         (a partition: parted; a logical volume: lvextend; a loop device: truncate its file, then \
         losetup -c)"
    )]
    DeviceTooSmall {
        /// Bytes of the device.
        device_bytes: u64,
        /// Bytes asked for.
        wanted_bytes: u64,
    },
    /// The format of the image, as it was made, has no place for so much.
    #[error("{}", limit_message(.limit, *.max_bytes))]
    Limit {
        /// What it is that has no place.
        limit: GrowthLimit,
        /// The largest size that the image can have as it is, in bytes.
        max_bytes: u64,
    },
    /// Too many backups for the resize inode, or a journal too short for one step of the growth.
    #[error(
        "{0}; unmount the file system, make the image file or device larger, and run `resize2fs` on it"
    )]
    Offline(String),
    /// Nothing can be written.
    #[error("the file system is mounted read-only; mount it for writing, then try again")]
    ReadOnly,
    /// Another call is at it.
    #[error("it is being resized already; wait until that is done, then try again")]
    Busy,
}

fn limit_message(limit: &GrowthLimit, max_bytes: u64) -> String {
    match limit {
        GrowthLimit::Descriptors => format!(
            "the image has room for the group descriptors of at most {max_bytes} bytes (no blocks are \
             left that resize_inode reserves, and it has no meta_bg); unmount it, make the image file \
             or device larger, and run `resize2fs` on it"
        ),
        GrowthLimit::BlockNumbers => format!(
            "its block numbers have 32 bits, so it can have at most {max_bytes} bytes; to convert it, \
             unmount it, run `resize2fs -b` on it, then resize2fs with the new size"
        ),
        GrowthLimit::InodeNumbers => format!(
            "inode numbers have 32 bits, and with its number of inodes for each block group it can have \
             at most {max_bytes} bytes; make a larger image with fewer inodes: fjord mkfs -i"
        ),
    }
}

impl ResizeError {
    /// As a system call would tell it.
    pub fn errno(&self) -> i32 {
        match self {
            ResizeError::Shrink { .. } => Errno::INVAL,
            ResizeError::DeviceTooSmall { .. } => Errno::NOSPC,
            ResizeError::Limit { .. } | ResizeError::Offline(_) => Errno::OPNOTSUPP,
            ResizeError::ReadOnly => Errno::ROFS,
            ResizeError::Busy => Errno::BUSY,
        }
        .raw_os_error()
    }
}
