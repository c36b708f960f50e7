//! Attributes as callers see them: times, `Attr`, `SetAttr`, credentials, file types.
//!
//! Owns no state. Invariant: sizes are bytes, `blocks` is in units of 512 bytes as in
//! `stat(2)`, and a `Timespec` always has `0 <= nsec < 1_000_000_000`.

use fjord_format::InodeNo;

/// Seconds and nanoseconds since the epoch; seconds may be negative. Converts from and to
/// `std::time::SystemTime`.
///
/// ```
/// use std::time::{Duration, SystemTime};
/// use fjord::Timespec;
///
/// let half_before = SystemTime::UNIX_EPOCH - Duration::from_millis(500);
/// let time = Timespec::from(half_before);
/// assert_eq!(time, Timespec { sec: -1, nsec: 500_000_000 });
/// assert_eq!(SystemTime::from(time), half_before);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Timespec {
    /// Seconds since 1970-01-01 UTC.
    pub sec: i64,
    /// Nanoseconds, below one thousand million.
    pub nsec: u32,
}

impl Timespec {
    /// The time now.
    pub fn now() -> Self {
        let t = rustix::time::clock_gettime(rustix::time::ClockId::RealtimeCoarse);
        Self { sec: t.tv_sec, nsec: t.tv_nsec as u32 }
    }
}

/// What kind of file an inode is, as `std::fs::FileType`.
///
/// ```
/// use fjord::FileKind;
///
/// let kind = FileKind::from_mode(0o040_755);
/// assert_eq!(kind, Some(FileKind::Directory));
/// assert!(kind.is_some_and(|kind| kind.is_dir()));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FileKind {
    /// Regular file.
    Regular,
    /// Directory.
    Directory,
    /// Symbolic link.
    Symlink,
    /// Character device.
    CharDevice,
    /// Block device.
    BlockDevice,
    /// Named pipe.
    Fifo,
    /// Unix socket.
    Socket,
}

impl FileKind {
    /// From the type bits of a mode; `None` if they name no type.
    pub fn from_mode(mode: u16) -> Option<Self> {
        Some(match mode & S_IFMT {
            S_IFREG => Self::Regular,
            S_IFDIR => Self::Directory,
            S_IFLNK => Self::Symlink,
            S_IFCHR => Self::CharDevice,
            S_IFBLK => Self::BlockDevice,
            S_IFIFO => Self::Fifo,
            S_IFSOCK => Self::Socket,
            _ => return None,
        })
    }

    /// The type bits of a mode.
    pub fn mode_bits(self) -> u16 {
        match self {
            Self::Regular => S_IFREG,
            Self::Directory => S_IFDIR,
            Self::Symlink => S_IFLNK,
            Self::CharDevice => S_IFCHR,
            Self::BlockDevice => S_IFBLK,
            Self::Fifo => S_IFIFO,
            Self::Socket => S_IFSOCK,
        }
    }
}

/// Mask of the file type in a mode.
pub const S_IFMT: u16 = 0o170_000;
/// Regular file.
pub const S_IFREG: u16 = 0o100_000;
/// Directory.
pub const S_IFDIR: u16 = 0o040_000;
/// Symbolic link.
pub const S_IFLNK: u16 = 0o120_000;
/// Character device.
pub const S_IFCHR: u16 = 0o020_000;
/// Block device.
pub const S_IFBLK: u16 = 0o060_000;
/// Named pipe.
pub const S_IFIFO: u16 = 0o010_000;
/// Unix socket.
pub const S_IFSOCK: u16 = 0o140_000;
/// Set-user-ID bit.
pub const S_ISUID: u16 = 0o4000;
/// Set-group-ID bit.
pub const S_ISGID: u16 = 0o2000;
/// Group execute bit.
pub const S_IXGRP: u16 = 0o0010;

/// What `stat(2)` and `statx(2)` tell of a file; its methods are those of `std::fs::Metadata`.
///
/// ```
/// # use std::sync::Arc;
/// # use fjord::{Fs, MemDevice, MkfsOptions, MountOptions};
/// # let device = Arc::new(MemDevice::new(16 << 20));
/// # let fs = Fs::create_on(device, &MkfsOptions::default(), &MountOptions::default())?;
/// fs.write("/report", "twelve bytes")?;
/// let report = fs.metadata("/report")?;
/// assert!(report.is_file() && !report.is_dir());
/// assert_eq!(report.len(), 12);
/// assert_eq!(report.permissions().mode(), 0o644);
/// assert!(report.modified()?.elapsed().is_ok());
/// assert_eq!((report.uid(), report.nlink()), (0, 1));
/// # fs.unmount()?;
/// # Ok::<(), fjord::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attr {
    /// Inode number.
    pub ino: InodeNo,
    /// Generation, which distinguishes successive uses of an inode number.
    pub generation: u32,
    /// Size in bytes.
    pub size: u64,
    /// Space used in units of 512 bytes, with delayed allocations.
    pub blocks: u64,
    /// Last access.
    pub atime: Timespec,
    /// Last change of content.
    pub mtime: Timespec,
    /// Last change of the inode.
    pub ctime: Timespec,
    /// Birth; zero if the inode is too small for it.
    pub crtime: Timespec,
    /// Type and permission bits.
    pub mode: u16,
    /// Count of hard links; 1 for directories whose count overflowed (dir_nlink).
    pub nlink: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Device number (Linux `new_encode_dev` form) of device nodes.
    pub rdev: u32,
    /// Preferred I/O size in bytes.
    pub blksize: u32,
    /// Inode flags as FS_IOC_GETFLAGS gives them.
    pub flags: u32,
    /// Project ID.
    pub projid: u32,
}

impl Attr {
    /// The kind of file.
    pub fn kind(&self) -> FileKind {
        FileKind::from_mode(self.mode).unwrap_or(FileKind::Regular)
    }
}

/// A time to set; [`SetAttr`] has an example.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SetTime {
    /// This time.
    At(Timespec),
    /// The time at which the call is carried out.
    Now,
}

/// Changes that [`crate::InodeRef::set_attr`] makes, several in one transaction; `None` leaves a field
/// as it is. The calls by path ([`crate::Fs::set_permissions`], [`crate::Fs::chown`],
/// [`crate::Fs::set_times`]) make one change each.
///
/// ```
/// # use std::sync::Arc;
/// # use fjord::{Fs, MemDevice, MkfsOptions, MountOptions};
/// use fjord::{Cred, SetAttr, SetTime};
///
/// # let device = Arc::new(MemDevice::new(16 << 20));
/// # let fs = Fs::create_on(device, &MkfsOptions::default(), &MountOptions::default())?;
/// fs.write("/log", "old entries")?;
/// let change = SetAttr {
///     size: Some(0),
///     mode: Some(0o640),
///     gid: Some(4),
///     mtime: Some(SetTime::Now),
///     ..SetAttr::default()
/// };
/// let log = fs.resolve("/log")?.set_attr(&change, &Cred::root())?;
/// assert_eq!((log.len(), log.permissions().mode(), log.gid()), (0, 0o640, 4));
/// # fs.unmount()?;
/// # Ok::<(), fjord::Error>(())
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SetAttr {
    /// New permission bits (type bits are ignored).
    pub mode: Option<u16>,
    /// New owner.
    pub uid: Option<u32>,
    /// New group.
    pub gid: Option<u32>,
    /// New size in bytes.
    pub size: Option<u64>,
    /// New access time.
    pub atime: Option<SetTime>,
    /// New modification time.
    pub mtime: Option<SetTime>,
    /// New change time; the present time when `None` and anything else changes.
    pub ctime: Option<Timespec>,
    /// Drop set-user-ID, set-group-ID (where group execute is set) and capabilities.
    pub kill_privileges: bool,
    /// With `kill_privileges`, the caller is not in the file's group: set-group-ID is dropped even
    /// if group execute is not set.
    pub outside_group: bool,
}

/// Credentials of a call: for ownership of new files and the rules of set-group-ID. Permissions are
/// not checked; a program that acts for other users must check them itself. The calls by path act
/// for root.
///
/// ```
/// # use std::sync::Arc;
/// # use fjord::{Fs, MemDevice, MkfsOptions, MountOptions};
/// use fjord::Cred;
///
/// # let device = Arc::new(MemDevice::new(16 << 20));
/// # let fs = Fs::create_on(device, &MkfsOptions::default(), &MountOptions::default())?;
/// let alice = Cred { uid: 1000, gid: 1000, umask: 0o027, ..Cred::default() };
/// fs.root()?.mkdir(b"home", 0o777, &alice)?;
/// let home = fs.metadata("/home")?;
/// assert_eq!((home.uid(), home.permissions().mode()), (1000, 0o750));
/// # fs.unmount()?;
/// # Ok::<(), fjord::Error>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cred {
    /// File-system user ID.
    pub uid: u32,
    /// File-system group ID.
    pub gid: u32,
    /// Supplementary groups, where the front end knows them.
    pub groups: Vec<u32>,
    /// Permission bits to leave out of new files where no default ACL rules.
    pub umask: u16,
}

impl Cred {
    /// Root with an empty umask.
    pub fn root() -> Self {
        Self::default()
    }
}

/// Figures of `statfs(2)`.
///
/// ```
/// # use std::sync::Arc;
/// # use fjord::{Fs, MemDevice, MkfsOptions, MountOptions};
/// # let device = Arc::new(MemDevice::new(16 << 20));
/// # let fs = Fs::create_on(device, &MkfsOptions::default(), &MountOptions::default())?;
/// let space = fs.statfs();
/// let free_bytes = space.blocks_available * u64::from(space.block_size);
/// assert!(free_bytes > 8 << 20);
/// # fs.unmount()?;
/// # Ok::<(), fjord::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StatFs {
    /// Block size in bytes.
    pub block_size: u32,
    /// Data blocks in the file system (overhead left out, as ext4's minixdf off).
    pub blocks: u64,
    /// Free blocks.
    pub blocks_free: u64,
    /// Free blocks for those who may not use the reserve.
    pub blocks_available: u64,
    /// Inodes in the file system.
    pub files: u64,
    /// Free inodes.
    pub files_free: u64,
    /// Longest name in bytes.
    pub name_max: u32,
    /// File system ID, from the UUID.
    pub fsid: u64,
}
