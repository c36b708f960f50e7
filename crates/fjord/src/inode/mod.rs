//! Inodes in memory.
//!
//! Owns [`Inode`] (one per inode number and file system, see [`table`]), its lock and
//! the rules of that lock.
//!
//! Invariants:
//! - `state.disk` is what the next [`disk::store`] writes; after any change of it the
//!   changer stores it in the same handle, or sets `state.dirty` and puts the inode on
//!   the dirty list (times, lazily);
//! - `state.disk.size` is the size a crash may show (ext4's `i_disksize`), `state.size`
//!   the one that programs see; they differ only while delayed data is pending;
//! - an inode with `refs == 0`, no dirty pages and `dirty == false` may be dropped from
//!   memory at any time.
//!
//! Lock order: `writeback` → `state` (parents before children, then by number) → handle
//! start → group locks → buffers. `state` is never taken while a handle is open.

pub(crate) mod attr;
pub(crate) mod carried;
pub(crate) mod changes;
pub(crate) mod disk;
pub(crate) mod evict;
mod extra;
pub(crate) mod flags;
pub(crate) mod order_only;
pub(crate) mod table;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use fjord_block::lock::{Mutex, MutexGuard, Rank, RwLock};
use fjord_block::{QuasiAsyncWrites, Ticket};
use fjord_format::inode::{DiskInode, InodeFlags};
use fjord_format::{BlockNo, InodeNo, Tid};
use fjord_journal::ChangesUpTo;

use crate::attr::FileKind;
use crate::cache::page::PageMap;
use crate::error::Error;
use crate::file::carry::DeferredRun;

use carried::Carried;
use changes::Changes;
use order_only::OrderOnly;

/// Tells an [`Inode`] from all others, as long as somebody has it. Its number does not: a new file may
/// have the number once the deletion has committed, while threads still work with the deleted one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Instance(usize);

/// An inode in memory.
pub(crate) struct Inode {
    /// Its number.
    pub(crate) ino: InodeNo,
    /// It holds the value of an attribute (`EA_INODE`): no file of a user, never seen by one.
    pub(crate) holds_value: bool,
    /// A regular file; the type of an inode in memory never changes.
    pub(crate) is_regular: bool,
    /// Its state; the lock is also the file's read/write lock (`i_rwsem`).
    pub(crate) state: RwLock<InodeState>,
    /// Held while this inode's pages are written back or its blocks freed.
    pub(crate) writeback: Mutex<InFlight>,
    /// Background data writes in flight: a thread that waits for `writeback` promotes them, see
    /// [`Inode::lock_writeback`].
    pub(crate) quasi_async: QuasiAsyncWrites,
    /// The file's cached blocks.
    pub(crate) pages: Arc<PageMap>,
    /// References from outside the engine (open files, front ends); see [`table`].
    pub(crate) refs: AtomicUsize,
    /// The transaction that holds the newest change fsync must commit (0: none).
    pub(crate) sync_tid: ChangesCell,
    /// The same for fdatasync: changes needed to reach the data.
    pub(crate) datasync_tid: ChangesCell,
    /// Change count of the two: if it is unchanged, so is the inode.
    touches: AtomicU64,
    /// The newest change count that the policy's log has; 0: none.
    logged_touches: AtomicU64,
    /// Which data writes a device flush has covered.
    pub(crate) in_place: FlushCell,
    /// A durable i-transaction has the name that the inode was made with.
    pub(crate) entry_logged: AtomicBool,
    /// Known to have no file capabilities, so that a write need not look for any; only an
    /// optimisation, cleared when an attribute is set.
    pub(crate) no_capability: AtomicBool,
    /// Whether fsync of it orders only.
    pub(crate) order_only: OrderOnly,
    /// Whether the directory's index is damaged, while nothing can be written.
    pub(crate) index: IndexHealth,
    /// The first damage that a listing of the directory passed over: each listing ends with it, also one that is
    /// taken up behind it. Only e2fsck mends it, on an image that nobody has mounted.
    pub(crate) listing_damage: OnceLock<Box<Error>>,
    /// Truncated to zero since its last close: new content is written back on close, see
    /// [`crate::file::truncate`].
    pub(crate) replaced: AtomicBool,
    /// When fsync was called last while few pages were dirty, in the clock of
    /// [`Pace`](crate::file::pace::Pace); 0: never. A hint.
    pub(crate) small_fsync_ns: AtomicU64,
    /// Calls that fetch pages from the device now. A hint.
    pub(crate) fetching: AtomicU32,
    /// Errors of writeback so far; an open file remembers which it has reported.
    pub(crate) wb_errors: AtomicU32,
}

/// What is known of a directory's index while nothing can be written: a listing asks at each batch, and to
/// look reads the whole index. Asked and forgotten under the directory's lock.
#[derive(Default)]
pub(crate) struct IndexHealth {
    looked_at: AtomicBool,
    damaged: AtomicBool,
}

impl IndexHealth {
    /// Whether the index is known to be damaged; `look` is called if that is not known, and again if it fails.
    pub(crate) fn is_damaged<E>(&self, look: impl FnOnce() -> Result<bool, E>) -> bool {
        if !self.looked_at.load(Ordering::Acquire) {
            let Ok(damaged) = look() else { return false };
            self.damaged.store(damaged, Ordering::Relaxed);
            self.looked_at.store(true, Ordering::Release);
        }
        self.damaged.load(Ordering::Relaxed)
    }

    /// The index may change from now on.
    pub(crate) fn forget(&self) {
        self.looked_at.store(false, Ordering::Release);
    }
}

/// State of an inode, under its lock.
#[derive(Debug)]
pub(crate) struct InodeState {
    /// The decoded on-disk inode.
    pub(crate) disk: DiskInode,
    /// Size in bytes as programs see it.
    pub(crate) size: u64,
    /// Blocks reserved for delayed allocation, not in `disk.blocks` yet.
    pub(crate) reserved_blocks: u64,
    /// Times or other lazy fields differ from what is stored.
    pub(crate) dirty: bool,
    /// The file's window; see `alloc`.
    pub(crate) prealloc: Option<Prealloc>,
    /// On the orphan list or in the orphan file.
    pub(crate) orphan: Option<Orphan>,
    /// Made without a name, which may still come (`O_TMPFILE`).
    pub(crate) linkable: bool,
    /// Uncommitted changes; see [`Changes`].
    pub(crate) changes: Changes,
    /// Carried data of the file.
    pub(crate) carried: Carried,
    /// The engine took the inode apart (deleted); every further call gets ESTALE.
    pub(crate) dead: bool,
}

impl InodeState {
    /// The state of an inode as read.
    fn new(disk: DiskInode) -> InodeState {
        InodeState {
            size: disk.size,
            disk,
            reserved_blocks: 0,
            dirty: false,
            prealloc: None,
            orphan: None,
            linkable: false,
            changes: Changes::default(),
            carried: Carried::default(),
            dead: false,
        }
    }

    /// Moves the state out of its lock, for a deletion. The inode is dead for all who find it then.
    pub(crate) fn take_dead(&mut self) -> InodeState {
        let dead = InodeState { size: 0, dead: true, ..InodeState::new(self.disk.clone()) };
        std::mem::replace(self, dead)
    }
}

/// Place of an inode whose state is locked after that of another one. The first one needs none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// The second directory of a rename: below the first one, or with a higher number.
    SecondDir = 1,
    /// A child of a locked directory.
    Child = 2,
    /// Another child: a file after a directory, else the higher number.
    SecondChild = 3,
}

impl Place {
    /// For [`fjord_block::lock::RwLock::write_in_order`].
    pub(crate) fn key(self) -> u64 {
        self as u64
    }
}

/// A run of free blocks that one file is expected to grow into.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Prealloc {
    /// The logical block that `start` is meant for.
    pub(crate) lblk: u32,
    /// First block.
    pub(crate) start: BlockNo,
    /// Count of blocks.
    pub(crate) len: u32,
}

/// How an inode is recorded as an orphan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Orphan {
    /// In the singly linked list that starts in the superblock.
    List,
    /// In the orphan file, at this slot.
    File {
        /// Logical block of the orphan file.
        block: u32,
        /// Slot in that block.
        slot: u32,
    },
}

/// Data writes of an inode that may not be complete.
#[derive(Default)]
pub(crate) struct InFlight {
    /// The writes, oldest first.
    pub(crate) writes: Vec<InFlightWrite>,
    /// Carried runs with deferred writes, by first page. They do not overlap.
    pub(crate) deferred: BTreeMap<u32, DeferredRun>,
    /// [`fjord_block::DeferredWrites::completed_count`] when those of `deferred` that are
    /// complete were last looked for.
    pub(crate) deferred_seen: u64,
}

/// A data write that has been submitted.
pub(crate) struct InFlightWrite {
    pub(crate) ticket: Ticket,
    /// First page that it writes.
    pub(crate) lblk: u32,
    /// Count of pages.
    pub(crate) len: u32,
    /// Bytes that it counts for in `FsInner::unawaited_bytes`.
    pub(crate) unawaited_bytes: u64,
}

/// A transaction ID or none, changed without a lock.
#[derive(Debug, Default)]
pub(crate) struct TidCell(AtomicU64);

impl TidCell {
    const SET: u64 = 1 << 32;

    /// Records `tid`.
    pub(crate) fn set(&self, tid: Tid) {
        self.0.store(Self::SET | u64::from(tid.0), Ordering::Release);
    }

    /// Records `tid` unless a newer one is recorded.
    pub(crate) fn advance(&self, tid: Tid) {
        let newer = |raw: u64| raw & Self::SET == 0 || tid.newer_than(Tid(raw as u32));
        let new = Self::SET | u64::from(tid.0);
        // An `Err` means that a newer one is there.
        let _ = self
            .0
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |raw| newer(raw).then_some(new));
    }

    /// Forgets `tid` if it is still the one recorded.
    pub(crate) fn clear(&self, tid: Tid) {
        let old = Self::SET | u64::from(tid.0);
        let _ = self.0.compare_exchange(old, 0, Ordering::AcqRel, Ordering::Relaxed);
    }

    /// The recorded ID.
    pub(crate) fn get(&self) -> Option<Tid> {
        let raw = self.0.load(Ordering::Acquire);
        (raw & Self::SET != 0).then_some(Tid(raw as u32))
    }
}

/// Changes of a transaction up to a handle, or none, changed without a lock.
#[derive(Debug, Default)]
pub(crate) struct ChangesCell(AtomicU64);

impl ChangesCell {
    const SET: u64 = 1 << 63;
    const GENERATION_SHIFT: u32 = 32;
    /// For changes of any generation.
    const ANY: u32 = (1 << 31) - 1;

    /// Records `changes`.
    pub(crate) fn set(&self, changes: ChangesUpTo) {
        let generation = changes.generation().map_or(Self::ANY, |number| number.min(Self::ANY));
        let generation = u64::from(generation) << Self::GENERATION_SHIFT;
        self.0.store(Self::SET | generation | u64::from(changes.tid().0), Ordering::Release);
    }

    /// The recorded changes.
    pub(crate) fn changes(&self) -> Option<ChangesUpTo> {
        let raw = self.0.load(Ordering::Acquire);
        let tid = Tid(raw as u32);
        let changes = match ((raw & !Self::SET) >> Self::GENERATION_SHIFT) as u32 {
            Self::ANY => ChangesUpTo::from(tid),
            generation => ChangesUpTo::new(tid, generation),
        };
        (raw & Self::SET != 0).then_some(changes)
    }

    /// The transaction that holds them.
    pub(crate) fn get(&self) -> Option<Tid> {
        self.changes().map(ChangesUpTo::tid)
    }
}

/// Counts data writes in place and how many of them a device flush, or a barrier, has covered.
#[derive(Default)]
pub(crate) struct FlushCell {
    written: AtomicU64,
    flushed: AtomicU64,
    ordered: AtomicU64,
}

impl FlushCell {
    /// Records a submitted write.
    pub(crate) fn record_write(&self) {
        self.written.fetch_add(1, Ordering::AcqRel);
    }

    /// The mark of the newest write if a flush is still owed for it.
    pub(crate) fn owed(&self) -> Option<u64> {
        let written = self.written.load(Ordering::Acquire);
        (written > self.flushed.load(Ordering::Acquire)).then_some(written)
    }

    /// The mark of the newest write.
    pub(crate) fn mark(&self) -> u64 {
        self.written.load(Ordering::Acquire)
    }

    /// Records that the writes up to `mark` belong to an epoch that has ended.
    pub(crate) fn record_barrier(&self, mark: u64) {
        self.ordered.fetch_max(mark, Ordering::AcqRel);
    }

    /// Whether later writes could overtake one of these.
    pub(crate) fn owes_barrier(&self) -> bool {
        self.owed().is_some_and(|written| written > self.ordered.load(Ordering::Acquire))
    }

    /// Records that a flush, begun after the writes up to `mark` were complete, succeeded.
    pub(crate) fn record_flush(&self, mark: u64) {
        self.flushed.fetch_max(mark, Ordering::AcqRel);
    }
}

impl InodeState {
    /// The kind of file; a mode without a valid type was refused when the inode was read.
    pub(crate) fn kind(&self) -> FileKind {
        FileKind::from_mode(self.disk.mode).unwrap_or(FileKind::Regular)
    }

    /// Whether this is a directory.
    pub(crate) fn is_dir(&self) -> bool {
        self.kind() == FileKind::Directory
    }

    /// Whether this is a regular file.
    pub(crate) fn is_file(&self) -> bool {
        self.kind() == FileKind::Regular
    }
}

impl Inode {
    /// Which of the inodes in memory this is.
    pub(crate) fn instance(&self) -> Instance {
        Instance(std::ptr::from_ref(self).addr())
    }

    /// Whether anything outside the engine refers to it: an open file, a call under way.
    pub(crate) fn is_referenced(&self) -> bool {
        self.refs.load(Ordering::Relaxed) != 0
    }

    /// Wraps a decoded inode.
    pub(crate) fn new(ino: InodeNo, disk: DiskInode, pages: Arc<PageMap>) -> Arc<Self> {
        let holds_value = disk.flags.contains(InodeFlags::EA_INODE);
        let rank = if holds_value { Rank::ValueState } else { Rank::InodeState };
        Arc::new(Self {
            ino,
            holds_value,
            is_regular: FileKind::from_mode(disk.mode) == Some(FileKind::Regular),
            state: RwLock::new(rank, InodeState::new(disk)),
            writeback: Mutex::new(Rank::InodeWriteback, InFlight::default()),
            quasi_async: QuasiAsyncWrites::default(),
            pages,
            refs: AtomicUsize::new(0),
            sync_tid: ChangesCell::default(),
            datasync_tid: ChangesCell::default(),
            touches: AtomicU64::new(0),
            logged_touches: AtomicU64::new(0),
            in_place: FlushCell::default(),
            entry_logged: AtomicBool::new(false),
            no_capability: AtomicBool::new(false),
            order_only: OrderOnly::default(),
            index: IndexHealth::default(),
            listing_damage: OnceLock::new(),
            replaced: AtomicBool::new(false),
            small_fsync_ns: AtomicU64::new(0),
            fetching: AtomicU32::new(0),
            wb_errors: AtomicU32::new(0),
        })
    }

    /// Takes the writeback lock. Its holder may be waiting for writes of a low class, which are
    /// urgent from now on.
    pub(crate) fn lock_writeback(&self) -> MutexGuard<'_, InFlight> {
        self.writeback.try_lock().unwrap_or_else(|| {
            let _promoted = self.quasi_async.promote();
            self.writeback.lock()
        })
    }

    /// Records that a handle, or a transaction, holds a change of this inode; `data` if fdatasync
    /// needs it.
    pub(crate) fn touch_tid(&self, changes: impl Into<ChangesUpTo>, data: bool) {
        let changes = changes.into();
        self.touches.fetch_add(1, Ordering::AcqRel);
        self.sync_tid.set(changes);
        if data {
            self.datasync_tid.set(changes);
        }
    }

    /// A number that every recorded change of the inode makes another one. To be asked for under
    /// the state lock, which changes are made under.
    pub(crate) fn touches(&self) -> u64 {
        self.touches.load(Ordering::Acquire)
    }

    /// The state of `touches`, and a path to it, are durable in the policy's log.
    pub(crate) fn set_logged(&self, touches: u64) {
        self.logged_touches.fetch_max(touches, Ordering::AcqRel);
    }

    /// Whether the state of `touches` is durable by such a log, unless a commit has it by now.
    pub(crate) fn is_logged(&self, touches: u64) -> bool {
        touches > 0 && self.logged_touches.load(Ordering::Acquire) == touches
    }
}
