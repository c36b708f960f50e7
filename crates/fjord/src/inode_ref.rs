//! Counted inodes and open files: what a front end works with.
//!
//! Owns [`InodeRef`] and [`OpenFile`]. Names are bytes, all calls lock inside, permission checks
//! are the caller's, ownership rules of new files are the engine's.
//!
//! Invariants: an [`InodeRef`] keeps its inode usable even when its last name goes; the
//! blocks of a nameless inode are freed when its last reference goes; a writeback error
//! is reported once to each file that was open when it happened.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use fjord_block::Class;
use fjord_format::InodeNo;
use fjord_format::inode::InodeFlags;
use rustix::io::Errno;

use crate::attr::{Attr, Cred, SetAttr};
use crate::error::{Error, Result};
use crate::file::fallocate::{self, FallocMode};
use crate::file::seek::{self, FiemapExtent};
use crate::file::write::WriteOptions;
use crate::file::writeback::{self, Mode};
use crate::file::{read, truncate, write};
use crate::fs::FsInner;
use crate::fsync::{Epoch, order_only};
use crate::inode::table::Users;
use crate::inode::{Inode, InodeState, attr, evict, flags};
use crate::vfs::{DirEntry, Fs, RenameFlags, XattrFlags, noting};
use crate::{dir, fsync, namei, xattr};

const CAPABILITY_XATTR: &[u8] = b"security.capability";

/// A counted reference to an inode: what the calls by path stand on, and what front ends use that
/// look names up themselves.
///
/// ```
/// # use std::sync::Arc;
/// # use fjord::{Fs, MemDevice, MkfsOptions, MountOptions};
/// use fjord::Cred;
///
/// # let device = Arc::new(MemDevice::new(16 << 20));
/// # let fs = Fs::create_on(device, &MkfsOptions::default(), &MountOptions::default())?;
/// let file = fs.root()?.create(b"hello", 0o644, &Cred::root())?;
/// file.write(0, b"world")?;
/// file.fsync(false)?;
/// assert_eq!(fs.resolve("/hello")?.ino(), file.ino());
/// # drop(file);
/// # fs.unmount()?;
/// # Ok::<(), fjord::Error>(())
/// ```
pub struct InodeRef {
    fs: Arc<FsInner>,
    inode: Arc<Inode>,
}

impl fmt::Debug for InodeRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("InodeRef").field(&self.inode.ino).finish()
    }
}

impl Clone for InodeRef {
    fn clone(&self) -> Self {
        Self::new(&self.fs, self.inode.clone())
    }
}

impl Drop for InodeRef {
    fn drop(&mut self) {
        let released = match self.fs.inodes.drop_ref(&self.inode) {
            Users::References => Ok(()),
            Users::Holders => {
                evict::close(&self.fs, &self.inode);
                Ok(())
            }
            Users::Nobody => noting(&self.fs, true, || evict::release(&self.fs, &self.inode)),
        };
        if let Err(error) = released {
            // It stays on the orphan record; the next mount completes the deletion.
            let ino = self.inode.ino.0;
            self.fs.warn(format_args!("could not free the deleted inode {ino}: {error}"));
        }
    }
}

impl InodeRef {
    pub(crate) fn new(fs: &Arc<FsInner>, inode: Arc<Inode>) -> Self {
        fs.inodes.add_ref(&inode);
        Self { fs: fs.clone(), inode }
    }

    /// Damage of this directory that a walk through the tree has met.
    ///
    /// # Errors
    /// `Corrupt` with this detail.
    pub(crate) fn damaged<T>(&self, detail: String) -> Result<T> {
        noting(&self.fs, false, || Err(Error::corrupt("directory", detail)))
    }

    /// The inode's state, for a look.
    pub(crate) fn state(&self) -> &fjord_block::lock::RwLock<InodeState> {
        &self.inode.state
    }

    fn reading<T>(&self, call: impl FnOnce() -> Result<T>) -> Result<T> {
        self.fs.check_alive()?;
        noting(&self.fs, false, call)
    }

    /// Runs a call that changes something. If it finds no space while freed blocks or
    /// generous reservations wait for a commit, that is done and the call tried again.
    fn changing<T>(&self, call: impl Fn() -> Result<T>) -> Result<T> {
        self.fs.check_writable()?;
        let result = noting(&self.fs, true, &call);
        match result {
            Err(error) if error.is(Errno::NOSPC) && self.fs.regain_space() => {
                noting(&self.fs, true, call)
            }
            other => other,
        }
    }

    /// Makes a change of content or attributes durable where the file asks for that (chattr +S).
    fn settle(&self) -> Result<()> {
        if flags::has(&self.inode, InodeFlags::SYNC) { self.fsync(false) } else { Ok(()) }
    }

    /// Makes a change of names durable where the directory asks for that (chattr +D, +S).
    fn settle_names(&self) -> Result<()> {
        if self.is_dirsync() { self.fsync(false) } else { Ok(()) }
    }

    fn is_dirsync(&self) -> bool {
        flags::has(&self.inode, InodeFlags::SYNC | InodeFlags::DIRSYNC)
    }

    /// Holds the inode by number until [`Fs::unhold`]: the number is not given to another file,
    /// and the blocks stay if the file is deleted. Unlike a reference it costs a few bytes and
    /// no inode in memory; [`Fs::held_inode`] leads back to it.
    pub fn hold(&self) {
        self.fs.inodes.hold(self.inode.ino);
    }

    /// The file system it belongs to.
    pub fn fs(&self) -> Fs {
        Fs(self.fs.clone())
    }

    /// Its number.
    pub fn ino(&self) -> InodeNo {
        self.inode.ino
    }

    /// Its attributes.
    pub fn attr(&self) -> Attr {
        attr::attr(&self.fs, &self.inode)
    }

    /// Changes attributes; a new size truncates or extends.
    ///
    /// # Errors
    /// `EPERM` for immutable files, `EFBIG`, `EISDIR`, `EINVAL`, `EROFS`, I/O errors.
    pub fn set_attr(&self, change: &SetAttr, cred: &Cred) -> Result<Attr> {
        let attr = self.changing(|| attr::set_attr(&self.fs, &self.inode, change, cred))?;
        self.settle()?;
        Ok(attr)
    }

    /// Looks `name` up in this directory.
    ///
    /// # Errors
    /// `ENOENT`, `ENOTDIR`, `ENAMETOOLONG`.
    pub fn lookup(&self, name: &[u8]) -> Result<InodeRef> {
        self.reading(|| namei::lookup(&self.fs, &self.inode, name))
    }

    /// Creates a regular file; `mode` holds permission bits.
    ///
    /// # Errors
    /// `EEXIST`, `ENOTDIR`, `ENOSPC`, `EROFS`, `ENAMETOOLONG`, `EPERM`.
    pub fn create(&self, name: &[u8], mode: u16, cred: &Cred) -> Result<InodeRef> {
        let inode = self.changing(|| namei::create(&self.fs, &self.inode, name, mode, cred))?;
        self.settle_names()?;
        Ok(inode)
    }

    /// Creates a special file (or a regular one); `mode` holds type and permission bits.
    ///
    /// # Errors
    /// As [`InodeRef::create`]; `EINVAL` for an unknown type.
    pub fn mknod(&self, name: &[u8], mode: u16, rdev: u32, cred: &Cred) -> Result<InodeRef> {
        let inode =
            self.changing(|| namei::mknod(&self.fs, &self.inode, name, mode, rdev, cred))?;
        self.settle_names()?;
        Ok(inode)
    }

    /// Creates a directory.
    ///
    /// # Errors
    /// As [`InodeRef::create`]; `EMLINK`.
    pub fn mkdir(&self, name: &[u8], mode: u16, cred: &Cred) -> Result<InodeRef> {
        let inode = self.changing(|| namei::mkdir(&self.fs, &self.inode, name, mode, cred))?;
        self.settle_names()?;
        Ok(inode)
    }

    /// Creates a symbolic link to `target`.
    ///
    /// # Errors
    /// As [`InodeRef::create`]; `ENAMETOOLONG` if the target does not fit a block.
    pub fn symlink(&self, name: &[u8], target: &[u8], cred: &Cred) -> Result<InodeRef> {
        let inode = self.changing(|| namei::symlink(&self.fs, &self.inode, name, target, cred))?;
        self.settle_names()?;
        Ok(inode)
    }

    /// Creates a file without a name in this directory (`O_TMPFILE`).
    ///
    /// # Errors
    /// As [`InodeRef::create`].
    pub fn tmpfile(&self, mode: u16, cred: &Cred) -> Result<InodeRef> {
        self.changing(|| namei::tmpfile(&self.fs, &self.inode, mode, cred))
    }

    /// Gives `target` another name in this directory.
    ///
    /// # Errors
    /// `EEXIST`, `EMLINK`, `EPERM` (directories, immutable files), `EXDEV`, `ENOSPC`.
    pub fn link(&self, target: &InodeRef, name: &[u8]) -> Result<()> {
        self.same_fs(target)?;
        self.changing(|| namei::link(&self.fs, &target.inode, &self.inode, name))?;
        self.settle_names()
    }

    /// Removes a name that is not a directory's.
    ///
    /// # Errors
    /// `ENOENT`, `EISDIR`, `EPERM`.
    pub fn unlink(&self, name: &[u8]) -> Result<()> {
        // The reference that comes back frees the file if its last name is gone.
        self.changing(|| namei::unlink(&self.fs, &self.inode, name)).map(drop)?;
        self.settle_names()
    }

    /// Removes an empty directory.
    ///
    /// # Errors
    /// `ENOENT`, `ENOTDIR`, `ENOTEMPTY`, `EPERM`.
    pub fn rmdir(&self, name: &[u8]) -> Result<()> {
        self.changing(|| namei::rmdir(&self.fs, &self.inode, name)).map(drop)?;
        self.settle_names()
    }

    /// Renames `name` in this directory to `new_name` in `new_dir`.
    ///
    /// # Errors
    /// As `renameat2(2)`.
    pub fn rename(
        &self,
        name: &[u8],
        new_dir: &InodeRef,
        new_name: &[u8],
        flags: RenameFlags,
        cred: &Cred,
    ) -> Result<()> {
        self.same_fs(new_dir)?;
        self.changing(|| {
            namei::rename(&self.fs, &self.inode, name, &new_dir.inode, new_name, flags, cred)
        })
        .map(drop)?;
        if self.is_dirsync() || new_dir.is_dirsync() {
            new_dir.fsync(false)?;
            self.fsync(false)?;
        }
        Ok(())
    }

    fn same_fs(&self, other: &InodeRef) -> Result<()> {
        if Arc::ptr_eq(&self.fs, &other.fs) { Ok(()) } else { Err(Errno::XDEV.into()) }
    }

    /// The target of a symbolic link.
    ///
    /// # Errors
    /// `EINVAL` if this is none.
    pub fn read_link(&self) -> Result<Vec<u8>> {
        let target = self.reading(|| namei::read_link(&self.fs, &self.inode))?;
        attr::accessed(&self.fs, &self.inode);
        Ok(target)
    }

    /// Calls `emit` for each entry from `cookie` on (0: the start) until it returns false.
    ///
    /// # Errors
    /// `ENOTDIR`, I/O errors; corruption, after all entries that can be read.
    pub fn read_dir(&self, cookie: u64, emit: &mut dyn FnMut(DirEntry<'_>) -> bool) -> Result<()> {
        self.reading(|| dir::read_dir(&self.fs, &self.inode, cookie, emit))?;
        attr::accessed(&self.fs, &self.inode);
        Ok(())
    }

    /// Reads up to `buf.len()` bytes at `offset`; 0 means the end of the file.
    ///
    /// # Errors
    /// `EISDIR`, `EINVAL`, I/O errors, corruption.
    pub fn read(&self, offset: u64, buf: &mut [u8]) -> Result<usize> {
        let count = self.reading(|| read::read(&self.fs, &self.inode, offset, buf))?;
        attr::accessed(&self.fs, &self.inode);
        Ok(count)
    }

    /// Writes `data` at `offset`; returns the count of bytes written.
    ///
    /// # Errors
    /// See [`WriteOptions`]; `ENOSPC`, `EFBIG`, `EPERM`, `EROFS`, I/O errors.
    pub fn write(&self, offset: u64, data: &[u8]) -> Result<usize> {
        self.write_with(offset, data, WriteOptions::default())
    }

    /// As [`InodeRef::write`], with options.
    ///
    /// # Errors
    /// As [`InodeRef::write`].
    pub fn write_with(&self, offset: u64, data: &[u8], options: WriteOptions) -> Result<usize> {
        let count = self.changing(|| write::write(&self.fs, &self.inode, offset, data, options))?;
        if !options.from_cache {
            self.settle()?;
        }
        Ok(count)
    }

    /// Preallocates, punches, zeroes, collapses or inserts a range of bytes.
    ///
    /// # Errors
    /// As `fallocate(2)`.
    pub fn fallocate(&self, mode: FallocMode, offset: u64, len: u64) -> Result<()> {
        self.changing(|| fallocate::fallocate(&self.fs, &self.inode, mode, offset, len))?;
        self.settle()
    }

    /// The offset of the next data at or after `offset`.
    ///
    /// # Errors
    /// `ENXIO` if there is none.
    pub fn seek_data(&self, offset: u64) -> Result<u64> {
        self.reading(|| seek::seek(&self.fs, &self.inode, offset, true))
    }

    /// The offset of the next hole at or after `offset`; the end of the file is one.
    ///
    /// # Errors
    /// `ENXIO` after the end of the file.
    pub fn seek_hole(&self, offset: u64) -> Result<u64> {
        self.reading(|| seek::seek(&self.fs, &self.inode, offset, false))
    }

    /// The extents of a byte range.
    ///
    /// # Errors
    /// I/O errors and corruption.
    pub fn fiemap(&self, offset: u64, len: u64) -> Result<Vec<FiemapExtent>> {
        self.reading(|| seek::fiemap(&self.fs, &self.inode, offset, len))
    }

    /// The block of the device that holds block `lblk` of the file, as `FIBMAP` tells it. Data
    /// without a place gets one first. `None` for a hole, a block that was never written, content
    /// in the inode, and what is not a file or directory.
    ///
    /// # Errors
    /// I/O errors and corruption.
    pub fn bmap(&self, lblk: u64) -> Result<Option<u64>> {
        self.reading(|| seek::bmap(&self.fs, &self.inode, lblk))
    }

    /// Makes the file durable; with `datasync` without times that are not needed. With
    /// [`crate::MountOptions::order_only`], and for files with the attribute `user.fjord.order_only`, as
    /// [`InodeRef::barrier`].
    ///
    /// # Errors
    /// I/O errors that the promise depends on.
    pub fn fsync(&self, datasync: bool) -> Result<()> {
        self.reading(|| order_only::sync(&self.fs, &self.inode, datasync))
    }

    /// As [`InodeRef::fsync`], without a thread that waits: calls `done` with the outcome. Of all
    /// callers up to three stay in this call, to commit for the others and to call their `done`;
    /// the rest return at once. `done` runs without a lock held, in any of these threads.
    pub fn fsync_then(&self, datasync: bool, done: impl FnOnce(Result<()>) + Send + 'static) {
        if let Err(error) = self.fs.check_alive() {
            return done(Err(error));
        }
        order_only::sync_then(&self.fs, &self.inode, datasync, self.held_until(done));
    }

    /// Notes an error, gives up a reference to the inode, and calls `done`.
    fn held_until<T, D>(&self, done: D) -> impl FnOnce(Result<T>) + Send + use<T, D>
    where
        D: FnOnce(Result<T>) + Send,
    {
        let held = self.clone();
        move |result| {
            let result = noting(&held.fs, false, || result);
            // Not after `done`: the last reference deletes a file without names.
            drop(held);
            done(result);
        }
    }

    /// Writes dirty data to its place, as background writeback does sooner or later: nothing of it is durable
    /// then (`sync_file_range(2)`).
    ///
    /// # Errors
    /// Of the device, of an allocation, or of the journal; the next fsync of the file reports them, too.
    pub fn write_back(&self) -> Result<()> {
        let mode = Mode::DataFirst(Class::Async);
        self.reading(|| writeback::write_inode(&self.fs, &self.inode, 0..u64::MAX, mode))
    }

    /// Order without durability (`fbarrier`; with `datasync`, `fdatabarrier`): whatever is
    /// changed after the call, in this file or another, survives a power cut only together with
    /// everything written to this file before the call. Under `ijournal`, and over the
    /// epoch scheduler, the device is not waited for; else as [`InodeRef::fsync`].
    ///
    /// The epoch tells later whether that is durable: [`crate::Fs::is_durable`].
    ///
    /// # Errors
    /// As for fsync, as far as they show before the device has answered.
    pub fn barrier(&self, datasync: bool) -> Result<Epoch> {
        self.reading(|| fsync::barrier(&self.fs, &self.inode, datasync))
    }

    /// As [`InodeRef::barrier`]. Where that is [`InodeRef::fsync`], it is
    /// [`InodeRef::fsync_then`] here; else `done` is called before this call returns.
    pub fn barrier_then(&self, datasync: bool, done: impl FnOnce(Result<Epoch>) + Send + 'static) {
        if let Err(error) = self.fs.check_alive() {
            return done(Err(error));
        }
        fsync::barrier_then(&self.fs, &self.inode, datasync, self.held_until(done));
    }

    /// The value of an extended attribute (full name, as `user.mime_type`).
    ///
    /// # Errors
    /// `ENODATA`, `EOPNOTSUPP` for unknown name spaces.
    pub fn get_xattr(&self, name: &[u8]) -> Result<Vec<u8>> {
        self.reading(|| xattr::get(&self.fs, &self.inode, name))
    }

    /// Sets an extended attribute.
    ///
    /// # Errors
    /// `EEXIST`, `ENODATA`, `ENOSPC`, `E2BIG`, `ERANGE`, `EPERM`, `EOPNOTSUPP`.
    pub fn set_xattr(&self, name: &[u8], value: &[u8], flags: XattrFlags) -> Result<()> {
        self.changing(|| xattr::set(&self.fs, &self.inode, name, value, flags))?;
        // After it is there, so that no write in between takes it for absent for good.
        self.inode.no_capability.store(false, Ordering::Release);
        self.settle()
    }

    /// Removes file capabilities, as every write to the content must; cheap when there are
    /// none.
    ///
    /// # Errors
    /// I/O errors and corruption.
    pub fn drop_capability(&self) -> Result<()> {
        let known_absent = &self.inode.no_capability;
        if known_absent.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        let removed = match self.get_xattr(CAPABILITY_XATTR) {
            Ok(_) => self.remove_xattr(CAPABILITY_XATTR),
            Err(error) => Err(error),
        };
        match removed {
            Err(error) if !error.is(Errno::NODATA) && !error.is(Errno::OPNOTSUPP) => {
                known_absent.store(false, Ordering::Release);
                Err(error)
            }
            _ => Ok(()),
        }
    }

    /// The names of all extended attributes.
    ///
    /// # Errors
    /// I/O errors and corruption.
    pub fn list_xattr(&self) -> Result<Vec<Vec<u8>>> {
        self.reading(|| xattr::list(&self.fs, &self.inode))
    }

    /// Removes an extended attribute.
    ///
    /// # Errors
    /// `ENODATA`, `EPERM`, `EOPNOTSUPP`.
    pub fn remove_xattr(&self, name: &[u8]) -> Result<()> {
        self.changing(|| xattr::remove(&self.fs, &self.inode, name))?;
        self.settle()
    }

    /// Inode flags as FS_IOC_GETFLAGS gives them.
    pub fn flags(&self) -> u32 {
        flags::get(&self.inode)
    }

    /// Sets inode flags as FS_IOC_SETFLAGS does.
    ///
    /// # Errors
    /// `EOPNOTSUPP` for flags that cannot be changed, `EINVAL`.
    pub fn set_flags(&self, new: u32) -> Result<()> {
        self.changing(|| flags::set(&self.fs, &self.inode, new))?;
        self.settle()
    }

    /// Sets the project ID.
    ///
    /// # Errors
    /// `EOPNOTSUPP` without the `project` feature.
    pub fn set_project(&self, project: u32) -> Result<()> {
        self.changing(|| flags::set_project(&self.fs, &self.inode, project))
    }

    /// Opens the file: an [`OpenFile`] reports each writeback error once.
    pub fn open(&self) -> OpenFile {
        let seen = self.inode.wb_errors.load(Ordering::Acquire);
        OpenFile { inode: self.clone(), errors_seen: Arc::new(AtomicU32::new(seen)) }
    }
}

/// An open file: an inode with a memory of the errors it has reported, which [`crate::File`] stands on.
///
/// ```
/// # use std::sync::Arc;
/// # use fjord::{Fs, MemDevice, MkfsOptions, MountOptions};
/// # let device = Arc::new(MemDevice::new(16 << 20));
/// # let fs = Fs::create_on(device, &MkfsOptions::default(), &MountOptions::default())?;
/// fs.write("/f", "")?;
/// let open = fs.resolve("/f")?.open();
/// open.inode().write(0, b"content")?;
/// open.fsync(true)?; // tells also what the background failed to write since the opening
/// # drop(open);
/// # fs.unmount()?;
/// # Ok::<(), fjord::Error>(())
/// ```
#[derive(Debug)]
pub struct OpenFile {
    inode: InodeRef,
    /// Writeback errors already reported through this file.
    errors_seen: Arc<AtomicU32>,
}

impl OpenFile {
    /// The inode that is open.
    pub fn inode(&self) -> &InodeRef {
        &self.inode
    }

    /// Makes the file durable.
    ///
    /// # Errors
    /// `EIO` once for each failure of writeback since the file was opened, even when it
    /// was the background that met it; errors of this call.
    pub fn fsync(&self, datasync: bool) -> Result<()> {
        self.reporting(|| self.inode.fsync(datasync))
    }

    /// As [`OpenFile::fsync`], without a thread that waits; see [`InodeRef::fsync_then`].
    pub fn fsync_then(&self, datasync: bool, done: impl FnOnce(Result<()>) + Send + 'static) {
        let (inode, errors_seen) = (self.inode.inode.clone(), self.errors_seen.clone());
        self.inode.fsync_then(datasync, move |result| done(reported(&inode, &errors_seen, result)));
    }

    /// Order without durability; see [`InodeRef::barrier`].
    ///
    /// # Errors
    /// As [`OpenFile::fsync`], as far as they show before the device has answered.
    pub fn barrier(&self, datasync: bool) -> Result<Epoch> {
        self.reporting(|| self.inode.barrier(datasync))
    }

    /// As [`OpenFile::barrier`], without a thread that waits; see [`InodeRef::barrier_then`].
    pub fn barrier_then(&self, datasync: bool, done: impl FnOnce(Result<Epoch>) + Send + 'static) {
        let (inode, errors_seen) = (self.inode.inode.clone(), self.errors_seen.clone());
        self.inode
            .barrier_then(datasync, move |result| done(reported(&inode, &errors_seen, result)));
    }

    /// Adds the failures of writeback that this file has not reported yet.
    fn reporting<T>(&self, call: impl FnOnce() -> Result<T>) -> Result<T> {
        let result = call();
        reported(&self.inode.inode, &self.errors_seen, result)
    }
}

/// The result of a call on an open file that has reported `errors_seen` failures of writeback.
fn reported<T>(inode: &Inode, errors_seen: &AtomicU32, result: Result<T>) -> Result<T> {
    let now = inode.wb_errors.load(Ordering::Acquire);
    let before = errors_seen.swap(now, Ordering::AcqRel);
    match result {
        Ok(_) if before != now => Err(Errno::IO.into()),
        other => other,
    }
}

impl Drop for OpenFile {
    fn drop(&mut self) {
        truncate::write_if_replaced(&self.inode.fs, &self.inode.inode);
    }
}
