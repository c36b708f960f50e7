//! Attributes in the habits of `std::fs::Metadata`, and the calls on [`Fs`] that change them.
//!
//! Owns [`Permissions`] and [`FileTimes`]. Invariant: the calls act for root, as all of the path
//! interface; what Linux does to the set-user-ID bit at a change of owner is done here too.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;
use std::time::{Duration, SystemTime};

use rustix::io::Errno;

use super::path;
use crate::attr::{Attr, Cred, FileKind, SetAttr, SetTime, Timespec};
use crate::error::Result;
use crate::vfs::{Fs, InodeRef, XattrFlags};

/// Bits of a mode that are permissions: read, write, execute, and the three above them.
const PERMISSION_BITS: u16 = 0o7777;
/// Those that allow writing.
const WRITE_BITS: u16 = 0o222;

/// Permission bits of a file, as `std::fs::Permissions`; [`Fs::set_permissions`] takes a plain
/// number as well.
///
/// ```
/// # use std::sync::Arc;
/// # use fjord::{Fs, MemDevice, MkfsOptions, MountOptions};
/// # let device = Arc::new(MemDevice::new(16 << 20));
/// # let fs = Fs::create_on(device, &MkfsOptions::default(), &MountOptions::default())?;
/// fs.write("/key", "secret")?;
/// fs.set_permissions("/key", 0o600)?;
///
/// let mut permissions = fs.metadata("/key")?.permissions();
/// permissions.set_readonly(true);
/// fs.set_permissions("/key", permissions)?;
/// assert_eq!(fs.metadata("/key")?.permissions().mode(), 0o400);
/// # fs.unmount()?;
/// # Ok::<(), fjord::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Permissions {
    mode: u16,
}

impl Permissions {
    /// From permission bits; others are ignored.
    pub fn from_mode(mode: u32) -> Self {
        Self { mode: mode as u16 & PERMISSION_BITS }
    }

    /// The permission bits, without the type of the file.
    pub fn mode(&self) -> u32 {
        u32::from(self.mode)
    }

    /// Sets the permission bits; others are ignored.
    pub fn set_mode(&mut self, mode: u32) {
        *self = Self::from_mode(mode);
    }

    /// Whether nobody may write.
    pub fn readonly(&self) -> bool {
        self.mode & WRITE_BITS == 0
    }

    /// Takes the right to write from everybody, or gives it to everybody.
    pub fn set_readonly(&mut self, readonly: bool) {
        if readonly {
            self.mode &= !WRITE_BITS;
        } else {
            self.mode |= WRITE_BITS;
        }
    }
}

impl From<u16> for Permissions {
    fn from(mode: u16) -> Self {
        Self::from_mode(u32::from(mode))
    }
}

/// Times to set, as `std::fs::FileTimes`: those that are not named stay.
///
/// ```
/// # use std::sync::Arc;
/// # use fjord::{FileTimes, Fs, MemDevice, MkfsOptions, MountOptions};
/// use std::time::{Duration, SystemTime};
///
/// # let device = Arc::new(MemDevice::new(16 << 20));
/// # let fs = Fs::create_on(device, &MkfsOptions::default(), &MountOptions::default())?;
/// fs.write("/old", "")?;
/// let day_two = SystemTime::UNIX_EPOCH + Duration::from_secs(24 * 60 * 60);
/// fs.set_times("/old", FileTimes::new().set_modified(day_two))?;
/// assert_eq!(fs.metadata("/old")?.modified()?, day_two);
/// # fs.unmount()?;
/// # Ok::<(), fjord::Error>(())
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FileTimes {
    accessed: Option<SystemTime>,
    modified: Option<SystemTime>,
}

impl FileTimes {
    /// No time.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the time of the last access.
    #[must_use]
    pub fn set_accessed(self, time: SystemTime) -> Self {
        Self { accessed: Some(time), ..self }
    }

    /// Sets the time of the last change of content.
    #[must_use]
    pub fn set_modified(self, time: SystemTime) -> Self {
        Self { modified: Some(time), ..self }
    }
}

impl From<SystemTime> for Timespec {
    /// Times that 64 bits of seconds cannot hold become the first or the last that they can.
    fn from(time: SystemTime) -> Self {
        match time.duration_since(SystemTime::UNIX_EPOCH) {
            Ok(since) => Self {
                sec: i64::try_from(since.as_secs()).unwrap_or(i64::MAX),
                nsec: since.subsec_nanos(),
            },
            Err(before) => {
                let before = before.duration();
                let sec = i64::try_from(before.as_secs()).map_or(i64::MIN, |sec| -sec);
                match before.subsec_nanos() {
                    0 => Self { sec, nsec: 0 },
                    nsec => Self { sec: sec.saturating_sub(1), nsec: 1_000_000_000 - nsec },
                }
            }
        }
    }
}

impl From<Timespec> for SystemTime {
    /// Times that the system has no value for become 1970-01-01; ext4 holds none of them.
    fn from(time: Timespec) -> Self {
        let seconds = Duration::from_secs(time.sec.unsigned_abs());
        let whole = if time.sec < 0 {
            SystemTime::UNIX_EPOCH.checked_sub(seconds)
        } else {
            SystemTime::UNIX_EPOCH.checked_add(seconds)
        };
        let nanoseconds = Duration::from_nanos(u64::from(time.nsec));
        whole.and_then(|whole| whole.checked_add(nanoseconds)).unwrap_or(SystemTime::UNIX_EPOCH)
    }
}

impl From<SystemTime> for SetTime {
    fn from(time: SystemTime) -> Self {
        SetTime::At(time.into())
    }
}

impl From<FileTimes> for SetAttr {
    fn from(times: FileTimes) -> Self {
        Self {
            atime: times.accessed.map(SetTime::from),
            mtime: times.modified.map(SetTime::from),
            ..Self::default()
        }
    }
}

impl FileKind {
    /// Whether it is a regular file.
    pub fn is_file(&self) -> bool {
        *self == Self::Regular
    }

    /// Whether it is a directory.
    pub fn is_dir(&self) -> bool {
        *self == Self::Directory
    }

    /// Whether it is a symbolic link.
    pub fn is_symlink(&self) -> bool {
        *self == Self::Symlink
    }
}

/// What `std::fs::Metadata` and its `MetadataExt` of Unix tell.
impl Attr {
    /// The kind of file; the same as [`Attr::kind`].
    pub fn file_type(&self) -> FileKind {
        self.kind()
    }

    /// Whether it is a regular file.
    pub fn is_file(&self) -> bool {
        self.kind().is_file()
    }

    /// Whether it is a directory.
    pub fn is_dir(&self) -> bool {
        self.kind().is_dir()
    }

    /// Whether it is a symbolic link; only [`Fs::symlink_metadata`] and directory entries show one.
    pub fn is_symlink(&self) -> bool {
        self.kind().is_symlink()
    }

    /// Size in bytes.
    #[expect(clippy::len_without_is_empty, reason = "as std::fs::Metadata")]
    pub fn len(&self) -> u64 {
        self.size
    }

    /// Permission bits.
    pub fn permissions(&self) -> Permissions {
        Permissions::from(self.mode)
    }

    /// Type and permission bits.
    pub fn mode(&self) -> u32 {
        u32::from(self.mode)
    }

    /// Time of the last change of content.
    ///
    /// # Errors
    /// None; `std::fs::Metadata` has the same signature.
    pub fn modified(&self) -> Result<SystemTime> {
        Ok(self.mtime.into())
    }

    /// Time of the last access, as far as [`crate::AtimeMode`] keeps it.
    ///
    /// # Errors
    /// None; `std::fs::Metadata` has the same signature.
    pub fn accessed(&self) -> Result<SystemTime> {
        Ok(self.atime.into())
    }

    /// Time of creation.
    ///
    /// # Errors
    /// `EOPNOTSUPP` on images with inodes of 128 bytes, which have no room for it.
    pub fn created(&self) -> Result<SystemTime> {
        if self.crtime == Timespec::default() {
            return Err(Errno::OPNOTSUPP.into());
        }
        Ok(self.crtime.into())
    }

    /// Inode number.
    pub fn ino(&self) -> u64 {
        u64::from(self.ino.0)
    }

    /// Count of hard links.
    pub fn nlink(&self) -> u64 {
        u64::from(self.nlink)
    }

    /// Owner.
    pub fn uid(&self) -> u32 {
        self.uid
    }

    /// Group.
    pub fn gid(&self) -> u32 {
        self.gid
    }

    /// Space used in units of 512 bytes.
    pub fn blocks(&self) -> u64 {
        self.blocks
    }
}

impl Fs {
    /// Attributes of what a path names, symbolic links followed.
    ///
    /// # Errors
    /// As [`Fs::resolve`].
    pub fn metadata(&self, path: impl AsRef<Path>) -> Result<Attr> {
        Ok(self.resolve(path)?.attr())
    }

    /// Attributes of what a path names; a symbolic link at its end is not followed.
    ///
    /// # Errors
    /// As [`Fs::resolve`].
    pub fn symlink_metadata(&self, path: impl AsRef<Path>) -> Result<Attr> {
        Ok(self.resolve_link(path)?.attr())
    }

    /// Sets permission bits (chmod); see [`Permissions`].
    ///
    /// # Errors
    /// `EPERM` for immutable files, `EROFS`; as [`Fs::resolve`].
    pub fn set_permissions(
        &self,
        path: impl AsRef<Path>,
        permissions: impl Into<Permissions>,
    ) -> Result<()> {
        set_permissions(&self.resolve(path)?, permissions.into())
    }

    /// Changes owner and group; `None` leaves them as they are. A file loses its set-user-ID bit
    /// and its capabilities, and the set-group-ID bit where its group may execute it, as on Linux.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use fjord::{Fs, MemDevice, MkfsOptions, MountOptions};
    /// # let device = Arc::new(MemDevice::new(16 << 20));
    /// # let fs = Fs::create_on(device, &MkfsOptions::default(), &MountOptions::default())?;
    /// fs.write("/mail", "")?;
    /// fs.chown("/mail", Some(1000), Some(8))?;
    /// let mail = fs.metadata("/mail")?;
    /// assert_eq!((mail.uid(), mail.gid()), (1000, 8));
    /// # fs.unmount()?;
    /// # Ok::<(), fjord::Error>(())
    /// ```
    ///
    /// # Errors
    /// `EPERM` for immutable files, `EROFS`; as [`Fs::resolve`].
    pub fn chown(&self, path: impl AsRef<Path>, uid: Option<u32>, gid: Option<u32>) -> Result<()> {
        chown(&self.resolve(path)?, uid, gid)
    }

    /// As [`Fs::chown`]; a symbolic link at the end of the path is changed itself.
    ///
    /// # Errors
    /// As [`Fs::chown`].
    pub fn lchown(&self, path: impl AsRef<Path>, uid: Option<u32>, gid: Option<u32>) -> Result<()> {
        chown(&self.resolve_link(path)?, uid, gid)
    }

    /// Sets the times of access and modification; see [`FileTimes`].
    ///
    /// # Errors
    /// `EPERM` for immutable files, `EROFS`; as [`Fs::resolve`].
    pub fn set_times(&self, path: impl AsRef<Path>, times: FileTimes) -> Result<()> {
        set_times(&self.resolve(path)?, times)
    }

    /// As [`Fs::set_times`]; a symbolic link at the end of the path is changed itself.
    ///
    /// # Errors
    /// As [`Fs::set_times`].
    pub fn set_times_nofollow(&self, path: impl AsRef<Path>, times: FileTimes) -> Result<()> {
        set_times(&self.resolve_link(path)?, times)
    }

    /// The value of an extended attribute, by its full name (`user.mime_type`); `None` if the file
    /// has none of that name. Access control lists are `system.posix_acl_access` and
    /// `system.posix_acl_default`, in the form that Linux gives.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use fjord::{Fs, MemDevice, MkfsOptions, MountOptions};
    /// use fjord::XattrFlags;
    ///
    /// # let device = Arc::new(MemDevice::new(16 << 20));
    /// # let fs = Fs::create_on(device, &MkfsOptions::default(), &MountOptions::default())?;
    /// fs.write("/page", "<html>")?;
    /// fs.set_xattr("/page", "user.mime_type", b"text/html", XattrFlags::empty())?;
    /// assert_eq!(fs.get_xattr("/page", "user.mime_type")?.as_deref(), Some(&b"text/html"[..]));
    /// assert_eq!(fs.list_xattr("/page")?, ["user.mime_type"]);
    /// fs.remove_xattr("/page", "user.mime_type")?;
    /// assert_eq!(fs.get_xattr("/page", "user.mime_type")?, None);
    /// # fs.unmount()?;
    /// # Ok::<(), fjord::Error>(())
    /// ```
    ///
    /// These four calls follow a symbolic link at the end of the path; for its own attributes, ask
    /// [`Fs::resolve_link`].
    ///
    /// # Errors
    /// `EOPNOTSUPP` for an unknown name space; as [`Fs::resolve`].
    pub fn get_xattr(
        &self,
        path: impl AsRef<Path>,
        name: impl AsRef<OsStr>,
    ) -> Result<Option<Vec<u8>>> {
        match self.resolve(path)?.get_xattr(name.as_ref().as_bytes()) {
            Ok(value) => Ok(Some(value)),
            Err(error) if error.is(Errno::NODATA) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Sets an extended attribute, whether or not there is one of that name unless `flags` say
    /// otherwise; [`Fs::get_xattr`] has an example.
    ///
    /// # Errors
    /// As [`InodeRef::set_xattr`]; as [`Fs::resolve`].
    pub fn set_xattr(
        &self,
        path: impl AsRef<Path>,
        name: impl AsRef<OsStr>,
        value: &[u8],
        flags: XattrFlags,
    ) -> Result<()> {
        self.resolve(path)?.set_xattr(name.as_ref().as_bytes(), value, flags)
    }

    /// The names of all extended attributes, in no order.
    ///
    /// # Errors
    /// As [`Fs::resolve`]; I/O errors.
    pub fn list_xattr(&self, path: impl AsRef<Path>) -> Result<Vec<OsString>> {
        let names = self.resolve(path)?.list_xattr()?;
        Ok(names.into_iter().map(OsString::from_vec).collect())
    }

    /// Removes an extended attribute.
    ///
    /// # Errors
    /// `ENODATA` if there is none of that name; as [`InodeRef::remove_xattr`]; as [`Fs::resolve`].
    pub fn remove_xattr(&self, path: impl AsRef<Path>, name: impl AsRef<OsStr>) -> Result<()> {
        self.resolve(path)?.remove_xattr(name.as_ref().as_bytes())
    }

    /// The inode that a path names; a symbolic link at its end is not followed.
    ///
    /// # Errors
    /// As [`Fs::resolve`].
    pub fn resolve_link(&self, path: impl AsRef<Path>) -> Result<InodeRef> {
        path::resolve(self, path.as_ref(), false)
    }
}

/// Carries out chmod.
pub(super) fn set_permissions(inode: &InodeRef, permissions: Permissions) -> Result<()> {
    let change = SetAttr { mode: Some(permissions.mode), ..SetAttr::default() };
    inode.set_attr(&change, &Cred::root()).map(drop)
}

/// Carries out utimensat; without a time nothing changes.
pub(super) fn set_times(inode: &InodeRef, times: FileTimes) -> Result<()> {
    if times == FileTimes::default() {
        return Ok(());
    }
    inode.set_attr(&times.into(), &Cred::root()).map(drop)
}

fn chown(inode: &InodeRef, uid: Option<u32>, gid: Option<u32>) -> Result<()> {
    let change = SetAttr { uid, gid, kill_privileges: true, ..SetAttr::default() };
    inode.set_attr(&change, &Cred::root()).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_before_and_after_1970() {
        for (sec, nsec) in [(0, 0), (1, 5), (-1, 0), (-1, 999_999_999), (-5, 1), (i64::MAX, 7)] {
            let time = Timespec { sec, nsec };
            assert_eq!(Timespec::from(SystemTime::from(time)), time);
        }
        let half_before = SystemTime::UNIX_EPOCH - Duration::from_millis(500);
        assert_eq!(Timespec::from(half_before), Timespec { sec: -1, nsec: 500_000_000 });
    }

    #[test]
    fn permissions_hold_nothing_else() {
        let mut permissions = Permissions::from_mode(0o100_755);
        assert_eq!(permissions.mode(), 0o755);
        permissions.set_mode(0o777_4444);
        assert!(permissions.readonly());
        assert_eq!(permissions.mode(), 0o4444);
        permissions.set_readonly(false);
        assert_eq!(permissions.mode(), 0o4666);
    }
}
