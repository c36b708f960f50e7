//! System calls that read or change owners, modes, devices and attributes of the host's files.
//!
//! Owns the unsafe calls of this crate. Invariant: they use the C library instead of raw system
//! calls, so that fakeroot(1), which replaces the library's functions, works.

use std::ffi::{CStr, CString};
use std::os::fd::{AsRawFd, BorrowedFd};

use fjord::Timespec;
use rustix::fs::FileType;
use rustix::io::Errno;

use crate::marks::Marks;

/// What stat(2) tells.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Status {
    /// Type and permission bits.
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    /// In bytes.
    pub(crate) size: u64,
    /// Space used, in units of 512 bytes.
    pub(crate) blocks_512: u64,
    pub(crate) links: u64,
    pub(crate) dev: u64,
    pub(crate) ino: u64,
    /// Of a device.
    pub(crate) rdev: u64,
    pub(crate) atime: Timespec,
    pub(crate) mtime: Timespec,
}

impl Status {
    pub(crate) fn kind(&self) -> FileType {
        FileType::from_raw_mode(self.mode)
    }

    /// Whether the file may have holes. One that has as many blocks as bytes has none.
    pub(crate) fn has_holes(&self) -> bool {
        self.blocks_512.saturating_mul(512) < self.size
    }

    /// What tells one file of the host from all others.
    pub(crate) fn key(&self) -> (u64, u64) {
        (self.dev, self.ino)
    }
}

/// A file whose attributes are wanted.
#[derive(Clone, Copy)]
pub(crate) enum Place<'a> {
    /// An open file.
    Open(BorrowedFd<'a>),
    /// A name in an open directory, for what cannot be opened without effect: links, devices,
    /// sockets, pipes. A link is not followed.
    At(BorrowedFd<'a>, &'a CStr),
}

impl Place<'_> {
    /// A path for calls that take no directory.
    fn path(dir: BorrowedFd<'_>, name: &CStr) -> rustix::io::Result<CString> {
        let mut path = format!("/proc/self/fd/{}/", dir.as_raw_fd()).into_bytes();
        path.extend_from_slice(name.to_bytes());
        CString::new(path).map_err(|_| Errno::INVAL)
    }
}

/// `struct fsxattr` of linux/fs.h.
#[repr(C)]
#[derive(Default)]
struct FsXattr {
    xflags: u32,
    extsize: u32,
    nextents: u32,
    projid: u32,
    cowextsize: u32,
    pad: [u8; 8],
}

/// `FS_IOC_FSGETXATTR` of linux/fs.h.
const FS_IOC_FSGETXATTR: libc::c_ulong = 0x801c_581f;

/// Flags and project ID of an open file or directory; none where the file system has none, and for what
/// cannot be opened.
pub(crate) fn marks(place: Place<'_>) -> Marks {
    let Place::Open(file) = place else { return Marks::default() };
    let flags = rustix::fs::ioctl_getflags(file).map_or(0, |flags| flags.bits());
    let mut found = FsXattr::default();
    // SAFETY: the kernel fills one `fsxattr` through a pointer valid for the call.
    let rc = unsafe { libc::ioctl(file.as_raw_fd(), FS_IOC_FSGETXATTR as _, &raw mut found) };
    Marks { flags, project: if rc == 0 { found.projid } else { 0 } }
}

fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

fn done(result: libc::c_int) -> rustix::io::Result<()> {
    if result == 0 { Ok(()) } else { Err(last_error()) }
}

fn count(result: libc::ssize_t) -> rustix::io::Result<usize> {
    usize::try_from(result).map_err(|_| last_error())
}

pub(crate) fn effective_uid() -> u32 {
    // SAFETY: takes nothing and cannot fail.
    unsafe { libc::geteuid() }
}

pub(crate) fn effective_gid() -> u32 {
    // SAFETY: takes nothing and cannot fail.
    unsafe { libc::getegid() }
}

fn status_of(stat: &libc::stat64) -> Status {
    let time = |sec: i64, nsec: i64| Timespec { sec, nsec: u32::try_from(nsec).unwrap_or(0) };
    Status {
        mode: stat.st_mode,
        uid: stat.st_uid,
        gid: stat.st_gid,
        size: u64::try_from(stat.st_size).unwrap_or(0),
        blocks_512: u64::try_from(stat.st_blocks).unwrap_or(0),
        // Its type differs between machines.
        #[allow(clippy::useless_conversion)]
        links: stat.st_nlink.into(),
        dev: stat.st_dev,
        ino: stat.st_ino,
        rdev: stat.st_rdev,
        atime: time(stat.st_atime, stat.st_atime_nsec),
        mtime: time(stat.st_mtime, stat.st_mtime_nsec),
    }
}

pub(crate) fn status(file: BorrowedFd<'_>) -> rustix::io::Result<Status> {
    let mut stat = std::mem::MaybeUninit::<libc::stat64>::uninit();
    // SAFETY: the call fills the structure that the pointer leads to.
    done(unsafe { libc::fstat64(file.as_raw_fd(), stat.as_mut_ptr()) })?;
    // SAFETY: filled, since the call succeeded.
    Ok(status_of(&unsafe { stat.assume_init() }))
}

/// As lstat(2).
pub(crate) fn status_at(dir: BorrowedFd<'_>, name: &CStr) -> rustix::io::Result<Status> {
    let mut stat = std::mem::MaybeUninit::<libc::stat64>::uninit();
    let flags = libc::AT_SYMLINK_NOFOLLOW;
    // SAFETY: `name` ends with a zero byte; the call fills the structure.
    done(unsafe { libc::fstatat64(dir.as_raw_fd(), name.as_ptr(), stat.as_mut_ptr(), flags) })?;
    // SAFETY: filled, since the call succeeded.
    Ok(status_of(&unsafe { stat.assume_init() }))
}

/// The names of all attributes, each with a zero byte after it.
pub(crate) fn list_xattrs(place: Place<'_>, buffer: &mut [u8]) -> rustix::io::Result<usize> {
    let (start, len) = (buffer.as_mut_ptr().cast(), buffer.len());
    match place {
        // SAFETY: the call writes at most `len` bytes to the buffer.
        Place::Open(file) => count(unsafe { libc::flistxattr(file.as_raw_fd(), start, len) }),
        Place::At(dir, name) => {
            let path = Place::path(dir, name)?;
            // SAFETY: as above, and the path ends with a zero byte.
            count(unsafe { libc::llistxattr(path.as_ptr(), start, len) })
        }
    }
}

pub(crate) fn get_xattr(
    place: Place<'_>,
    attribute: &CStr,
    buffer: &mut [u8],
) -> rustix::io::Result<usize> {
    let (start, len) = (buffer.as_mut_ptr().cast(), buffer.len());
    let attribute = attribute.as_ptr();
    match place {
        Place::Open(file) => {
            // SAFETY: the name ends with a zero byte; at most `len` bytes are written.
            count(unsafe { libc::fgetxattr(file.as_raw_fd(), attribute, start, len) })
        }
        Place::At(dir, name) => {
            let path = Place::path(dir, name)?;
            // SAFETY: as above, and so does the path.
            count(unsafe { libc::lgetxattr(path.as_ptr(), attribute, start, len) })
        }
    }
}

pub(crate) fn set_xattr(
    place: Place<'_>,
    attribute: &CStr,
    value: &[u8],
) -> rustix::io::Result<()> {
    let (start, len) = (value.as_ptr().cast(), value.len());
    let attribute = attribute.as_ptr();
    match place {
        Place::Open(file) => {
            // SAFETY: the name ends with a zero byte; `len` bytes of the value are read.
            done(unsafe { libc::fsetxattr(file.as_raw_fd(), attribute, start, len, 0) })
        }
        Place::At(dir, name) => {
            let path = Place::path(dir, name)?;
            // SAFETY: as above, and so does the path.
            done(unsafe { libc::lsetxattr(path.as_ptr(), attribute, start, len, 0) })
        }
    }
}

pub(crate) fn remove_xattr(place: Place<'_>, attribute: &CStr) -> rustix::io::Result<()> {
    let attribute = attribute.as_ptr();
    match place {
        // SAFETY: the name ends with a zero byte.
        Place::Open(file) => done(unsafe { libc::fremovexattr(file.as_raw_fd(), attribute) }),
        Place::At(dir, name) => {
            let path = Place::path(dir, name)?;
            // SAFETY: as above, and so does the path.
            done(unsafe { libc::lremovexattr(path.as_ptr(), attribute) })
        }
    }
}

pub(crate) fn chown(place: Place<'_>, uid: u32, gid: u32) -> rustix::io::Result<()> {
    match place {
        // SAFETY: only numbers are passed.
        Place::Open(file) => done(unsafe { libc::fchown(file.as_raw_fd(), uid, gid) }),
        Place::At(dir, name) => {
            let (dir, flags) = (dir.as_raw_fd(), libc::AT_SYMLINK_NOFOLLOW);
            // SAFETY: the name ends with a zero byte.
            done(unsafe { libc::fchownat(dir, name.as_ptr(), uid, gid, flags) })
        }
    }
}

/// Sets permission bits. Not for symbolic links, which have none.
pub(crate) fn chmod(place: Place<'_>, mode: u32) -> rustix::io::Result<()> {
    match place {
        // SAFETY: only numbers are passed.
        Place::Open(file) => done(unsafe { libc::fchmod(file.as_raw_fd(), mode) }),
        Place::At(dir, name) => {
            // SAFETY: the name ends with a zero byte.
            done(unsafe { libc::fchmodat(dir.as_raw_fd(), name.as_ptr(), mode, 0) })
        }
    }
}

pub(crate) fn set_times(
    place: Place<'_>,
    atime: Timespec,
    mtime: Timespec,
) -> rustix::io::Result<()> {
    let time = |time: Timespec| libc::timespec { tv_sec: time.sec, tv_nsec: time.nsec.into() };
    let times = [time(atime), time(mtime)];
    match place {
        // SAFETY: two times are read.
        Place::Open(file) => done(unsafe { libc::futimens(file.as_raw_fd(), times.as_ptr()) }),
        Place::At(dir, name) => {
            let (dir, flags) = (dir.as_raw_fd(), libc::AT_SYMLINK_NOFOLLOW);
            // SAFETY: as above, and the name ends with a zero byte.
            done(unsafe { libc::utimensat(dir, name.as_ptr(), times.as_ptr(), flags) })
        }
    }
}

/// Makes a device, pipe or socket.
pub(crate) fn make_node(
    dir: BorrowedFd<'_>,
    name: &CStr,
    mode: u32,
    rdev: u64,
) -> rustix::io::Result<()> {
    // SAFETY: the name ends with a zero byte.
    done(unsafe { libc::mknodat(dir.as_raw_fd(), name.as_ptr(), mode, rdev) })
}

pub(crate) fn make_symlink(
    dir: BorrowedFd<'_>,
    name: &CStr,
    target: &CStr,
) -> rustix::io::Result<()> {
    // SAFETY: both end with a zero byte.
    done(unsafe { libc::symlinkat(target.as_ptr(), dir.as_raw_fd(), name.as_ptr()) })
}

pub(crate) fn make_dir(dir: BorrowedFd<'_>, name: &CStr, mode: u32) -> rustix::io::Result<()> {
    // SAFETY: the name ends with a zero byte.
    done(unsafe { libc::mkdirat(dir.as_raw_fd(), name.as_ptr(), mode) })
}

/// Gives the file at the path `original` a name in `dir`.
pub(crate) fn link(original: &CStr, dir: BorrowedFd<'_>, name: &CStr) -> rustix::io::Result<()> {
    let (from, dir) = (original.as_ptr(), dir.as_raw_fd());
    // SAFETY: both end with a zero byte.
    done(unsafe { libc::linkat(libc::AT_FDCWD, from, dir, name.as_ptr(), 0) })
}

/// Gives an open file, which may have no name, a name in `dir`.
pub(crate) fn link_open(
    file: BorrowedFd<'_>,
    dir: BorrowedFd<'_>,
    name: &CStr,
) -> rustix::io::Result<()> {
    let path = CString::new(format!("/proc/self/fd/{}", file.as_raw_fd()));
    let path = path.map_err(|_| Errno::INVAL)?;
    let (flags, dir) = (libc::AT_SYMLINK_FOLLOW, dir.as_raw_fd());
    // SAFETY: both end with a zero byte.
    done(unsafe { libc::linkat(libc::AT_FDCWD, path.as_ptr(), dir, name.as_ptr(), flags) })
}

pub(crate) fn rename(dir: BorrowedFd<'_>, from: &CStr, to: &CStr) -> rustix::io::Result<()> {
    let dir = dir.as_raw_fd();
    // SAFETY: both names end with a zero byte.
    done(unsafe { libc::renameat(dir, from.as_ptr(), dir, to.as_ptr()) })
}

pub(crate) fn unlink(dir: BorrowedFd<'_>, name: &CStr) -> rustix::io::Result<()> {
    // SAFETY: the name ends with a zero byte.
    done(unsafe { libc::unlinkat(dir.as_raw_fd(), name.as_ptr(), 0) })
}
