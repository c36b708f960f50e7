//! The file system as a whole, for front ends and embedding programs.
//!
//! Owns [`Fs`]: opening, creating, syncing, unmounting, statistics. Inodes are [`InodeRef`]'s,
//! paths those of [`crate::api`]. Permission checks are the caller's (FUSE `default_permissions`,
//! or the path API's trust).
//!
//! Invariant: every call but those that only read memory fails with [`Error::Closed`] after
//! [`Fs::unmount`].

use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use fjord_block::{Device, SnapshotOptions, SnapshotReport};
use fjord_format::InodeNo;
use fjord_journal::RecoveryReport;
use fjord_mkfs::MkfsOptions;
use rustix::io::Errno;

use crate::attr::{FileKind, StatFs};
use crate::error::{Error, Result};
use crate::fs::events::Event;
use crate::fs::status::{Failure, ShutdownMode};
use crate::fs::{FsInner, create, mount};
use crate::fsync::stats::FsyncStats;
use crate::fsync::{Epoch, epochs};
use crate::inode::table;
use crate::options::MountOptions;

pub use crate::inode_ref::{InodeRef, OpenFile};

/// A mounted file system. Clones share it, and threads may use it and its clones at the same time.
///
/// [`Fs::create`] makes an image, [`Fs::open`] opens one; the calls that take paths do what the
/// functions of the same names in `std::fs` do.
///
/// **End its use with [`Fs::unmount`].** Dropping the last clone writes nothing: the image is left as
/// a crash would leave it. It can be recovered, but all that no [`Fs::sync`] or fsync covered may be
/// missing: the last seconds of work
/// ([`MountOptions::commit_interval`], [`MountOptions::writeback_interval`]).
///
/// ```
/// use std::sync::Arc;
/// use fjord::{Fs, MemDevice, MkfsOptions, MountOptions};
///
/// let device = Arc::new(MemDevice::new(16 << 20));
/// let fs = Fs::create_on(device, &MkfsOptions::default(), &MountOptions::default())?;
/// fs.create_dir_all("/var/log")?;
/// fs.write("/var/log/hello", "hello, world")?;
/// assert_eq!(fs.read_to_string("/var/log/hello")?, "hello, world");
/// fs.unmount()?;
/// # Ok::<(), fjord::Error>(())
/// ```
#[derive(Clone)]
pub struct Fs(pub(crate) Arc<FsInner>);

/// Watches the device of a file system: an image on a cluster may not answer for as long as the cluster is down.
/// Devices of this host always answer.
#[derive(Clone, Debug)]
pub struct DeviceWatch(Weak<FsInner>);

impl DeviceWatch {
    /// How long requests have been under way without an answer to any; zero if none are.
    pub fn silence(&self) -> Duration {
        self.0.upgrade().map_or(Duration::ZERO, |fs| fs.device.silence())
    }

    /// Fails all requests under way and all later ones: the file system turns read-only, calls fail with `EIO`, and
    /// an unmount no longer waits. Whatever an fsync has promised is in the image; what came after may be lost.
    pub fn give_up(&self) {
        if let Some(fs) = self.0.upgrade() {
            fs.device.give_up();
        }
    }
}

impl std::fmt::Debug for Fs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut fs = f.debug_struct("Fs");
        fs.field("read_only", &self.is_read_only()).field("fsync", &self.0.fsync_policy.name());
        fs.finish_non_exhaustive()
    }
}

/// A range of the device for [`Fs::trim`], in bytes.
///
/// ```
/// # use std::sync::Arc;
/// # use fjord::{Fs, MemDevice, MkfsOptions, MountOptions};
/// use fjord::TrimRange;
///
/// # let device = Arc::new(MemDevice::new(16 << 20));
/// # let fs = Fs::create_on(device, &MkfsOptions::default(), &MountOptions::default())?;
/// let discarded_bytes = fs.trim(TrimRange { start: 0, len: u64::MAX, min_len: 0 })?;
/// assert!(discarded_bytes > 8 << 20);
/// # fs.unmount()?;
/// # Ok::<(), fjord::Error>(())
/// ```
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
    /// Where to go on after this entry.
    pub next_cookie: u64,
}

bitflags::bitflags! {
    /// Flags of [`InodeRef::rename`], with the values of `renameat2(2)`.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use fjord::{Fs, MemDevice, MkfsOptions, MountOptions};
    /// use fjord::{Cred, RenameFlags};
    ///
    /// # let device = Arc::new(MemDevice::new(16 << 20));
    /// # let fs = Fs::create_on(device, &MkfsOptions::default(), &MountOptions::default())?;
    /// fs.write("/a", "1")?;
    /// fs.write("/b", "2")?;
    /// let root = fs.root()?;
    /// root.rename(b"a", &root, b"b", RenameFlags::EXCHANGE, &Cred::root())?;
    /// assert_eq!(fs.read("/a")?, b"2");
    /// # drop(root);
    /// # fs.unmount()?;
    /// # Ok::<(), fjord::Error>(())
    /// ```
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub struct RenameFlags: u32 {
        /// Fail if the target exists.
        const NOREPLACE = 1;
        /// Swap the two.
        const EXCHANGE = 2;
        /// Leave a whiteout in place of the source.
        const WHITEOUT = 4;
    }

    /// Flags of [`Fs::set_xattr`] and [`InodeRef::set_xattr`], with the values of `setxattr(2)`. None
    /// of them sets the attribute whether or not it is there.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use fjord::{Fs, MemDevice, MkfsOptions, MountOptions};
    /// use fjord::XattrFlags;
    ///
    /// # let device = Arc::new(MemDevice::new(16 << 20));
    /// # let fs = Fs::create_on(device, &MkfsOptions::default(), &MountOptions::default())?;
    /// fs.write("/f", "")?;
    /// fs.set_xattr("/f", "user.owner", b"alice", XattrFlags::CREATE)?;
    /// let again = fs.set_xattr("/f", "user.owner", b"bob", XattrFlags::CREATE);
    /// assert!(again.is_err());
    /// fs.set_xattr("/f", "user.owner", b"bob", XattrFlags::empty())?;
    /// # fs.unmount()?;
    /// # Ok::<(), fjord::Error>(())
    /// ```
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub struct XattrFlags: u32 {
        /// Fail if the attribute exists.
        const CREATE = 1;
        /// Fail if it does not.
        const REPLACE = 2;
    }
}

impl Fs {
    /// Opens an image file or a block device.
    ///
    /// **After a crash, recover the image with fjord before Linux or e2fsck get it.** An image made
    /// with the defaults ([`FsyncPolicyKind::Ijournal`](crate::FsyncPolicyKind::Ijournal)) keeps
    /// fsynced changes since the last commit in areas that only fjord can read. Until that is
    /// recovered, the journal has a mark that makes Linux refuse to mount the image and e2fsck
    /// report an unsupported journal; nothing is lost, unless e2fsck is forced to continue. Opening
    /// the image here for writing recovers it, and so does `fjord recover IMAGE`; after
    /// [`Fs::unmount`] it is plain ext4. Programs whose images must be recoverable by Linux choose
    /// [`FsyncPolicyKind::Compound`](crate::FsyncPolicyKind::Compound) for [`MountOptions::fsync`],
    /// or make them with [`IjournalAreas::None`](crate::IjournalAreas::None).
    ///
    /// Replays the journal and completes deletions that a crash interrupted, unless `options` say
    /// read-only ([`MountOptions::recover_before_read_only`] has that done before a read-only
    /// mount). Waits for an image that another process has locked ([`MountOptions::lock_timeout`]).
    ///
    /// ```no_run
    /// use fjord::{Fs, MountOptions};
    ///
    /// let fs = Fs::open("disk.img", &MountOptions::default())?;
    /// for entry in fs.read_dir("/")? {
    ///     println!("{}", entry?.file_name().display());
    /// }
    /// fs.unmount()?;
    /// # Ok::<(), fjord::Error>(())
    /// ```
    ///
    /// # Errors
    /// `Open` if there is no such image, it may not be opened, or is still in use after the wait;
    /// `Io`; `Corrupt` if it is damaged; `Incompatible` naming the feature; `Usage` if it is not
    /// ext4, and for options that do not fit the image.
    pub fn open(path: impl AsRef<Path>, options: &MountOptions) -> Result<Fs> {
        mount::open_path(path.as_ref(), options).map(Fs)
    }

    /// As [`Fs::open`], on any device.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use fjord::{Fs, MemDevice, MkfsOptions, MountOptions};
    ///
    /// let device = Arc::new(MemDevice::new(16 << 20));
    /// let fs = Fs::create_on(device.clone(), &MkfsOptions::default(), &MountOptions::default())?;
    /// fs.write("/kept", "by the device")?;
    /// fs.unmount()?;
    ///
    /// let fs = Fs::open_device(device, &MountOptions::default())?;
    /// assert_eq!(fs.read("/kept")?, b"by the device");
    /// fs.unmount()?;
    /// # Ok::<(), fjord::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Fs::open`].
    pub fn open_device(device: Arc<dyn Device>, options: &MountOptions) -> Result<Fs> {
        mount::open_device(device, options).map(Fs)
    }

    /// Makes an image file, formats it and opens it. The file must not exist yet, or be empty;
    /// its size is [`MkfsOptions::size_bytes`], and it is sparse: it takes the space of what is
    /// written to it. If this fails, the file is removed again.
    ///
    /// [`Fs::open`] describes what to do with the image after a crash.
    ///
    /// ```
    /// use fjord::{Fs, MkfsOptions, MountOptions};
    ///
    /// # let dir = tempfile::tempdir()?;
    /// # let path = dir.path().join("disk.img");
    /// let image = MkfsOptions { size_bytes: Some(64 << 20), ..MkfsOptions::default() };
    /// let fs = Fs::create(&path, &image, &MountOptions::default())?;
    /// fs.write("/hello", "world")?;
    /// fs.unmount()?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// `Open` with `EEXIST` if `path` names something that is not an empty file
    /// ([`Fs::create_on`] formats that), and if the file cannot be made; `Usage` without a size, and
    /// for parameters that do not fit together; as [`Fs::open`].
    pub fn create(
        path: impl AsRef<Path>,
        image: &MkfsOptions,
        options: &MountOptions,
    ) -> Result<Fs> {
        create::at_path(path.as_ref(), image, options).map(Fs)
    }

    /// Formats a device, whatever it holds, and opens it. Without [`MkfsOptions::size_bytes`] the
    /// file system takes all of the device.
    ///
    /// [`Fs`] has an example in memory; a block device or an existing file is a
    /// [`FileDevice`](crate::FileDevice).
    ///
    /// # Errors
    /// `Usage` for parameters that do not fit together or the device; `Io`; as [`Fs::open`].
    pub fn create_on(
        device: Arc<dyn Device>,
        image: &MkfsOptions,
        options: &MountOptions,
    ) -> Result<Fs> {
        create::on_device(device, image, options).map(Fs)
    }

    /// Writes everything and marks the image clean. Calls after it fail with [`Error::Closed`]; a
    /// second `unmount` does nothing.
    ///
    /// # Errors
    /// The first error that prevented a write; the image then needs recovery or e2fsck.
    pub fn unmount(&self) -> Result<()> {
        self.0.unmount()
    }

    /// The device below, for whoever must not wait for one that does not answer. Keeps nothing open.
    pub fn device_watch(&self) -> DeviceWatch {
        DeviceWatch(Arc::downgrade(&self.0))
    }

    /// Makes everything written so far durable, as `syncfs(2)`.
    ///
    /// # Errors
    /// Write errors since the mount.
    pub fn sync(&self) -> Result<()> {
        self.0.sync()
    }

    /// Commits, and writes what is in the log to its place, so that recovery has nothing to do for it.
    ///
    /// # Errors
    /// `ENODEV` for an image without a journal; `EROFS`; journal and I/O errors.
    pub fn checkpoint(&self) -> Result<()> {
        self.0.check_writable()?;
        if !self.0.has_log() {
            return Err(Errno::NODEV.into());
        }
        self.0.commit()?;
        self.0.journal().checkpoint_all().map_err(Error::from)
    }

    /// What this mount has found in the journal and replayed; the records of fast commits are not kept. `None` for
    /// an image without a journal and where the journal was not read, as for a read-only open.
    pub fn recovery(&self) -> Option<&RecoveryReport> {
        self.0.recovery.get()
    }

    /// Whether everything before the end of this epoch is durable ([`crate::File::fbarrier`]). Without
    /// a wait; `false` may be out of date.
    ///
    /// # Errors
    /// `EINVAL` for an epoch of another mount, or one that has not ended.
    pub fn is_durable(&self, epoch: Epoch) -> Result<bool> {
        epochs::is_durable(&self.0, epoch)
    }

    /// Makes everything before the end of this epoch durable, if it is not yet.
    ///
    /// # Errors
    /// `EINVAL` for an epoch of another mount, or one that has not ended; write errors.
    pub fn wait_durable(&self, epoch: Epoch) -> Result<()> {
        epochs::wait_durable(&self.0, epoch)
    }

    /// Lets `take` claim the block device instead of this file system: mount(2) of a `fuseblk`
    /// mount needs a device without another claim. If `take` fails, the file system holds the
    /// device alone again. Image files have no such claim.
    ///
    /// # Errors
    /// The outer error: another process has claimed the device. The file system writes nothing to
    /// it any more. Also errors of [`Fs::sync`], which is called first.
    pub fn hand_over<T, E>(&self, take: impl FnOnce() -> Result<T, E>) -> Result<Result<T, E>> {
        self.0.hand_over(take)
    }

    /// Copies the image into `out`, an empty regular file open for writing, as it is at one moment:
    /// the copy has everything written before the call, and the file system stays in use. The copy
    /// is what a crash at that moment would leave; [`crate::snapshot::settle`] recovers it. It is
    /// not durable before its owner has called fsync(2).
    ///
    /// # Errors
    /// `Snapshot`; what [`Fs::sync`] gives; `Usage` for an image without a journal that is open for
    /// writing, because its copy could not be recovered. The contents of `out` are then undefined.
    pub fn snapshot_to(
        &self,
        out: &std::fs::File,
        options: &SnapshotOptions<'_>,
    ) -> Result<SnapshotReport> {
        self.0.snapshot_to(out, options)
    }

    /// Makes the file system larger, while it is in use. An image file grows with it; a block device
    /// must have the size already. A file system cannot become smaller. A crash leaves the old size,
    /// the new one, or one between them, and a consistent file system; when the call returns, the new
    /// size is durable.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use fjord::{Fs, MemDevice, MkfsOptions, MountOptions};
    /// use fjord::resize::NewSize;
    ///
    /// # let device = Arc::new(MemDevice::new(16 << 20));
    /// # let fs = Fs::create_on(device, &MkfsOptions::default(), &MountOptions::default())?;
    /// let before = fs.statfs().blocks;
    /// fs.resize(NewSize::Bytes(64 << 20))?;
    /// assert!(fs.statfs().blocks > 3 * before);
    /// # fs.unmount()?;
    /// # Ok::<(), fjord::Error>(())
    /// ```
    ///
    /// # Errors
    /// `Resize`, and the file system has its size (an image file may have grown); `NoRoom` where the
    /// file system below is full, I/O errors and corruption: it may have got a part of the growth.
    pub fn resize(&self, size: crate::resize::NewSize) -> Result<crate::resize::ResizeReport> {
        self.0.resize(size)
    }

    /// Waits a moment for removed files that seem unused, and for the end of deletions: for front
    /// ends that get the release of a file late, before they call [`Fs::sync`] or [`Fs::statfs`].
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
            barriers_as_fsync: self.0.stats.barriers_as_fsync.load(Ordering::Relaxed),
            barrier_bytes_max: fjord_journal::BARRIER_BYTES_MAX,
            fsyncs_order_only: self.0.stats.fsyncs_order_only.load(Ordering::Relaxed),
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
    /// I/O errors and corruption: also where it has no links or is no directory.
    pub fn root(&self) -> Result<InodeRef> {
        noting(&self.0, false, || self.checked_root())
    }

    fn checked_root(&self) -> Result<InodeRef> {
        let bad = |detail: &str| {
            Error::corrupt(
                "inode",
                format!("inode {}, the root directory, {detail}", InodeNo::ROOT),
            )
        };
        let root = self.inode(InodeNo::ROOT, None);
        let root = root.map_err(|error| match error.is(Errno::STALE) {
            true => bad("is not in use"),
            false => error,
        })?;
        match root.attr().kind() {
            FileKind::Directory => Ok(root),
            _ => Err(bad("is not a directory")),
        }
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
            let state = reference.state().read();
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
pub(crate) fn noting<T>(
    fs: &FsInner,
    changing: bool,
    call: impl FnOnce() -> Result<T>,
) -> Result<T> {
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
///
/// ```
/// # use std::sync::Arc;
/// # use fjord::{Fs, MemDevice, MkfsOptions, MountOptions};
/// # let device = Arc::new(MemDevice::new(16 << 20));
/// # let fs = Fs::create_on(device, &MkfsOptions::default(), &MountOptions::default())?;
/// fs.create_file("/f")?.sync_all()?;
/// let stats = fs.stats();
/// assert_eq!(stats.fsync.policy, 1);
/// assert!(stats.failure.is_none());
/// # fs.unmount()?;
/// # Ok::<(), fjord::Error>(())
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Stats {
    /// fsync and fdatasync calls.
    pub fsync: FsyncStats,
    /// Calls of [`InodeRef::barrier`] that gave order without durability.
    pub barriers: u64,
    /// Those that were served as fsync: neither policy nor device keeps order for them.
    pub barriers_as_fsync: u64,
    /// Most bytes that calls may have in flight under a policy that orders by itself; beyond, they wait.
    pub barrier_bytes_max: u64,
    /// fsync and fdatasync calls that were to order only ([`MountOptions::order_only`]); the barriers that they
    /// were count above, too.
    pub fsyncs_order_only: u64,
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
