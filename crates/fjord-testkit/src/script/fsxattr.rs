//! The FS_IOC_FSGETXATTR and FS_IOC_FSSETXATTR calls: project IDs.

use std::os::fd::AsFd;

use rustix::{
    io,
    ioctl::{Getter, Setter, ioctl, opcode},
};

/// `struct fsxattr` of linux/fs.h.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FsXattr {
    /// FS_XFLAG_* bits.
    pub xflags: u32,
    /// Extent size hint, bytes.
    pub extsize: u32,
    /// Number of extents (read only).
    pub nextents: u32,
    /// Project ID.
    pub project: u32,
    /// Copy-on-write extent size hint, bytes.
    pub cowextsize: u32,
    pad: [u8; 8],
}

/// Reads the attributes of an open file or directory.
pub fn get(file: impl AsFd) -> io::Result<FsXattr> {
    const GET: u32 = opcode::read::<FsXattr>(b'X', 31);
    // SAFETY: FS_IOC_FSGETXATTR fills one `struct fsxattr`, which FsXattr mirrors.
    unsafe { ioctl(file, Getter::<GET, FsXattr>::new()) }
}

/// Writes the attributes of an open file or directory.
pub fn set(file: impl AsFd, attr: FsXattr) -> io::Result<()> {
    const SET: u32 = opcode::write::<FsXattr>(b'X', 32);
    // SAFETY: FS_IOC_FSSETXATTR reads one `struct fsxattr`, which FsXattr mirrors.
    unsafe { ioctl(file, Setter::<SET, FsXattr>::new(attr)) }
}
