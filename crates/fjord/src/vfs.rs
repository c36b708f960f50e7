//! The engine's interface for front ends: counted inodes and open files.
//!
//! Owns [`Fs`], [`InodeRef`] and [`OpenFile`]. Names are bytes, all calls lock inside,
//! permission checks are the caller's (FUSE `default_permissions`, or the path API's
//! trust), ownership rules of new files are the engine's.
//!
//! Invariants: an [`InodeRef`] keeps its inode usable even when its last name goes; the
//! blocks of a nameless inode are freed when its last reference goes; a writeback error
//! is reported once to each file that was open when it happened.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use fjord_block::{Device, SnapshotOptions, SnapshotReport};
use fjord_format::InodeNo;
use fjord_format::inode::InodeFlags;
use rustix::io::Errno;

use crate::attr::{Attr, Cred, FileKind, SetAttr, StatFs};
use crate::error::{Error, Result};
use crate::file::fallocate::{self, FallocMode};
use crate::file::seek::{self, FiemapExtent};
use crate::file::write::WriteOptions;
use crate::file::{read, truncate, write};
use crate::fs::FsInner;
use crate::fs::events::Event;
use crate::fs::mount;
use crate::fs::status::{Failure, ShutdownMode};
use crate::fsync::stats::FsyncStats;
use crate::inode::table::Users;
use crate::inode::{Inode, attr, evict, flags, table};
use crate::options::MountOptions;
use crate::{dir, fsync, namei, xattr};

const CAPABILITY_XATTR: &[u8] = b"security.capability";

/// A mounted file system. Clones share it. End its use with [`Fs::unmount`]: an `Fs` that is
/// only dropped leaves the image as a crash would, recoverable, but without what was not
/// synced.
#[derive(Clone)]
pub struct Fs(pub(crate) Arc<FsInner>);

/// A range of the device for [`Fs::trim`], in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TrimRange {
    /// First byte.
    pub start: u64,
    /// Count of bytes.
    pub len: u64,
    /// Shortest free run worth a discard.
    pub min_len: u64,
}

/// One entry of a directory.
#[derive(Debug, Clone, Copy)]
pub struct DirEntry<'a> {
    /// Inode number.
    pub ino: InodeNo,
    /// Kind, where the directory records it.
    pub kind: Option<FileKind>,
    /// Name.
    pub name: &'a [u8],
    /// Where to go on behind this entry.
    pub next_cookie: u64,
}

bitflags::bitflags! {
    /// Flags of [`InodeRef::rename`], with the values of `renameat2(2)`.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub struct RenameFlags: u32 {
        /// Fail if the target exists.
        const NOREPLACE = 1;
        /// Swap the two.
        const EXCHANGE = 2;
        /// Leave a whiteout in place of the source.
        const WHITEOUT = 4;
    }

    /// Flags of [`InodeRef::set_xattr`], with the values of `setxattr(2)`.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub struct XattrFlags: u32 {
        /// Fail if the attribute exists.
        const CREATE = 1;
        /// Fail if it does not.
        const REPLACE = 2;
    }
}

impl Fs {
    /// Opens an image file or a block device. Replays the journal and completes deletions
    /// that a crash interrupted, unless `options` say read-only
    /// ([`MountOptions::recover_before_read_only`] has that done before a read-only mount).
    ///
    /// # Errors
    /// `Io`; `Corrupt` if this is no ext4 or a damaged one; `Incompatible` naming the
    /// feature; `Usage` for options that do not fit the image, and when it is in use.
    pub fn open(path: impl AsRef<Path>, options: &MountOptions) -> Result<Fs> {
        mount::open_path(path.as_ref(), options).map(Fs)
    }

    /// As [`Fs::open`], on any device.
    ///
    /// # Errors
    /// As [`Fs::open`].
    pub fn open_device(device: Arc<dyn Device>, options: &MountOptions) -> Result<Fs> {
        mount::open_device(device, options).map(Fs)
    }

    /// Writes everything and marks the image clean. Calls after it fail with `EIO`; a
    /// second `unmount` does nothing.
    ///
    /// # Errors
    /// The first error that kept something from reaching the device; the image then asks
    /// for recovery or e2fsck.
    pub fn unmount(&self) -> Result<()> {
        self.0.unmount()
    }

    /// Makes everything written so far durable, as `syncfs(2)`.
    ///
    /// # Errors
    /// Write errors since the mount.
    pub fn sync(&self) -> Result<()> {
        self.0.sync()
    }

    /// Lets `take` claim the block device below in place of this file system, as mount(2) of a
    /// `fuseblk` mount does, which needs the device to be claimed by nobody else. If `take` fails,
    /// the file system holds the device alone again. Image files have no such claim.
    ///
    /// # Errors
    /// The outer error: somebody else holds the device by now. The file system writes nothing to
    /// it any more. Also what [`Fs::sync`] gives, before anything else is done.
    pub fn hand_over<T, E>(&self, take: impl FnOnce() -> Result<T, E>) -> Result<Result<T, E>> {
        self.0.hand_over(take)
    }

    /// Copies the image into `out`, an empty regular file open for writing, as it is at one moment:
    /// all that was written before the call is in the copy, and the use of the file system goes on
    /// meanwhile. The copy is what a crash at that moment would leave; [`crate::snapshot::settle`]
    /// recovers it. It is not durable before its owner has called fsync(2).
    ///
    /// # Errors
    /// `Snapshot`; what [`Fs::sync`] gives; `Usage` for an image without a journal that is open for
    /// writing, as nothing could recover its copy. `out` holds anything then.
    pub fn snapshot_to(
        &self,
        out: &std::fs::File,
        options: &SnapshotOptions<'_>,
    ) -> Result<SnapshotReport> {
        self.0.snapshot_to(out, options)
    }

    /// Waits a moment for removed files that nobody seems to use any more, and for the end of
    /// deletions: for front ends that are told late who lets go of a file, before they call
    /// [`Fs::sync`] or [`Fs::statfs`].
    pub fn settle_removed(&self) {
        self.0.settle_removed();
    }

    /// Space and inode counts.
    pub fn statfs(&self) -> StatFs {
        self.0.statfs()
    }

    /// Commits, so that what was freed is free, and discards free space. Returns the bytes
    /// discarded.
    ///
    /// # Errors
    /// `EOPNOTSUPP` if the device cannot discard, `EROFS`, I/O errors.
    pub fn trim(&self, range: TrimRange) -> Result<u64> {
        self.0.check_writable()?;
        noting(&self.0, true, || {
            self.0.commit()?;
            self.0.trim(range.start, range.len, range.min_len)
        })
    }

    /// Stops the file system as `XFS_IOC_GOINGDOWN` does; every later call fails.
    ///
    /// # Errors
    /// Errors of the writing that the mode asks for; the file system is stopped anyway.
    pub fn shutdown(&self, mode: ShutdownMode) -> Result<()> {
        self.0.go_down(mode)
    }

    /// The superblock as it is now.
    pub fn superblock(&self) -> fjord_format::superblock::RawSuperblock {
        self.0.sb.snapshot()
    }

    /// Layout of the file system.
    pub fn geometry(&self) -> &fjord_format::geometry::Geometry {
        &self.0.geo
    }

    /// The options it was mounted with.
    pub fn options(&self) -> &MountOptions {
        &self.0.options
    }

    /// Whether nothing can be changed, by choice or after an error.
    pub fn is_read_only(&self) -> bool {
        self.0.is_read_only()
    }

    /// The error that made the file system read-only, if one did.
    pub fn first_error(&self) -> Option<Error> {
        self.0.status.first_error()
    }

    /// Records a warning of a front end among [`Stats::events`], and sends it to `tracing`.
    pub fn warn(&self, message: impl std::fmt::Display) {
        self.0.warn(message);
    }

    /// Counters since the mount.
    pub fn stats(&self) -> Stats {
        Stats {
            fsync: self.0.fsync_counters.snapshot(),
            barriers: self.0.stats.barriers.load(Ordering::Relaxed),
            scheduler: self.0.scheduler.as_ref().map(|scheduler| scheduler.epoch_stats()),
            fsync_policy: self.0.fsync_policy.name(),
            cached_pages_bytes: self.0.page_lru.cached_bytes(),
            dirty_pages_bytes: self.0.page_lru.dirty_bytes(),
            full_below_since: self.0.room.full_since(),
            cached_metadata_bytes: self.0.meta.cached_bytes(),
            journal: self.0.journal().stats(),
            areas: self.0.has_log().then(|| self.0.journal().area_stats()).flatten(),
            device: self.0.device.stats(),
            failure: self.0.status.failure(),
            events: self.0.events.snapshot(),
        }
    }

    /// The root directory.
    ///
    /// # Errors
    /// I/O errors and corruption.
    pub fn root(&self) -> Result<InodeRef> {
        self.inode(InodeNo::ROOT, None)
    }

    /// An inode by number, and by generation where the caller knows it.
    ///
    /// # Errors
    /// `ESTALE` if it is not in use or has another generation.
    pub fn inode(&self, ino: InodeNo, generation: Option<u32>) -> Result<InodeRef> {
        self.0.check_alive()?;
        if ino != InodeNo::ROOT && (ino < self.0.geo.first_inode || !self.0.geo.contains_inode(ino))
        {
            return Err(Errno::STALE.into());
        }
        let inode = noting(&self.0, false, || table::get(&self.0, ino))?;
        if self.0.is_internal(&inode) {
            return Err(Errno::STALE.into());
        }
        let reference = InodeRef::new(&self.0, inode);
        {
            let state = reference.inode.state.read();
            let other = generation.is_some_and(|g| g != state.disk.generation);
            if other || state.dead || state.disk.links_count == 0 && state.orphan.is_none() {
                return Err(Errno::STALE.into());
            }
        }
        Ok(reference)
    }

    /// An inode that the caller holds by number ([`InodeRef::hold`]).
    ///
    /// # Errors
    /// `ESTALE` if there is no such inode; errors of reading it again.
    pub fn held_inode(&self, ino: InodeNo) -> Result<InodeRef> {
        match self.0.inodes.peek(ino) {
            Some(inode) => Ok(InodeRef::new(&self.0, inode)),
            None => self.inode(ino, None),
        }
    }

    /// Takes back `count` calls of [`InodeRef::hold`]. With the last one go the blocks of a
    /// deleted file.
    pub fn unhold(&self, ino: InodeNo, count: u64) {
        if self.0.inodes.unhold(ino, count) {
            self.release_unheld(ino);
        }
    }

    /// Takes back all calls of [`InodeRef::hold`].
    pub fn unhold_all(&self) {
        for ino in self.0.inodes.unhold_all() {
            self.release_unheld(ino);
        }
    }

    fn release_unheld(&self, ino: InodeNo) {
        // One that is not in memory has a name. For others the last reference decides.
        drop(self.0.inodes.peek(ino).map(|inode| InodeRef::new(&self.0, inode)));
    }
}

/// Runs a call; damage that it meets makes the file system read-only, and so does a failed
/// read in the middle of a change, whose first half must not commit.
fn noting<T>(fs: &FsInner, changing: bool, call: impl FnOnce() -> Result<T>) -> Result<T> {
    if changing {
        fs.journal().take_abandoned();
    }
    let result = call();
    if let Err(error) = &result {
        let half_done = changing && matches!(error, Error::Io(_)) && fs.journal().take_abandoned();
        if half_done {
            fs.note_write_error(error);
        } else {
            fs.note_damage(error, changing);
        }
    }
    result
}

/// Counters since the mount; see [`Fs::stats`].
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Stats {
    /// fsync and fdatasync calls.
    pub fsync: FsyncStats,
    /// Calls of [`InodeRef::barrier`] that gave order without durability.
    pub barriers: u64,
    /// The epoch scheduler's counters, if the mount put one above the device.
    pub scheduler: Option<fjord_block::epoch::EpochStats>,
    /// The policy in use.
    pub fsync_policy: &'static str,
    /// Bytes of file pages in memory.
    pub cached_pages_bytes: u64,
    /// Bytes of dirty pages.
    pub dirty_pages_bytes: u64,
    /// Since when the file system that holds the image is full, if file data waits for room there.
    pub full_below_since: Option<std::time::SystemTime>,
    /// Bytes of metadata blocks in memory.
    pub cached_metadata_bytes: u64,
    /// The journal's counters.
    pub journal: fjord_journal::JournalStats,
    /// Areas for i-transactions, if the image has some.
    pub areas: Option<fjord_journal::AreaStats>,
    /// The device's counters.
    pub device: fjord_block::DeviceStats,
    /// The error that made the file system read-only, if one did.
    pub failure: Option<Failure>,
    /// The latest warnings and errors, oldest first; 16 at most.
    pub events: Vec<Event>,
}

/// A counted reference to an inode.
pub struct InodeRef {
    fs: Arc<FsInner>,
    inode: Arc<Inode>,
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
    /// `ENOTDIR`, I/O errors, corruption.
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
    /// `ENXIO` behind the end of the file.
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

    /// Makes the file durable; with `datasync` without times that are not needed.
    ///
    /// # Errors
    /// I/O errors that the promise depends on.
    pub fn fsync(&self, datasync: bool) -> Result<()> {
        self.reading(|| fsync::fsync(&self.fs, &self.inode, datasync))
    }

    /// Order without durability (`fbarrier`; with `datasync`, `fdatabarrier`): whatever is
    /// changed after the call, in this file or another, survives a power cut only together with
    /// everything written to this file before the call. Cheap over the epoch scheduler, which
    /// is not waited for; else as [`InodeRef::fsync`].
    ///
    /// # Errors
    /// As for fsync, as far as they show before the device has answered.
    pub fn barrier(&self, datasync: bool) -> Result<()> {
        self.reading(|| fsync::barrier(&self.fs, &self.inode, datasync))
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
        OpenFile { inode: self.clone(), errors_seen: AtomicU32::new(seen) }
    }
}

/// An open file: an inode with a memory of the errors it has reported.
pub struct OpenFile {
    inode: InodeRef,
    /// Writeback errors already reported through this file.
    errors_seen: AtomicU32,
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

    /// Order without durability; see [`InodeRef::barrier`].
    ///
    /// # Errors
    /// As [`OpenFile::fsync`], as far as they show before the device has answered.
    pub fn barrier(&self, datasync: bool) -> Result<()> {
        self.reporting(|| self.inode.barrier(datasync))
    }

    /// Adds the failures of writeback that this file has not reported yet.
    fn reporting(&self, call: impl FnOnce() -> Result<()>) -> Result<()> {
        let result = call();
        let now = self.inode.inode.wb_errors.load(Ordering::Acquire);
        let before = self.errors_seen.swap(now, Ordering::AcqRel);
        match result {
            Ok(()) if before != now => Err(Errno::IO.into()),
            other => other,
        }
    }
}

impl Drop for OpenFile {
    fn drop(&mut self) {
        truncate::write_if_replaced(&self.inode.fs, &self.inode.inode);
    }
}
