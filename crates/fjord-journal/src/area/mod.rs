//! The areas after the log, to which callers of fsync write i-transactions themselves.
//!
//! An area is a ring of blocks. An i-transaction in it is *live* until the transaction that it
//! names has committed. Its space is then reused without any write: recovery ignores i-transactions
//! that are not newer than the last commit.
//!
//! Before the first one, the ijournal mark is set on disk. It is cleared when
//! the log has been emptied and no i-transaction is live ([`Journal::quiesce`],
//! [`Journal::close`]). The journal's part of this is in `area_writer`.
//!
//! Invariants: the mark is durable before anything is written to an area; an i-transaction that is
//! live or in flight is never overwritten; an i-transaction is contiguous. The lock of an area is
//! held for a few instructions; `mark` is held shared while an i-transaction is written, so that
//! the mark is not cleared meanwhile.
//!
//! [`Journal::quiesce`]: crate::Journal::quiesce
//! [`Journal::close`]: crate::Journal::close

mod barriers;
mod open;
mod ring;
mod scan;
mod unplaced;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use fjord_block::lock::{Mutex, Rank, RwLock, RwLockReadGuard};
use fjord_block::{Buf, Class, Device, DeviceExt, Order, Request};
use fjord_format::ijournal::{AreaFormat, AreaTable, ITransaction};
use fjord_format::jbd2::Superblock;
use fjord_format::types::Tid;

use crate::error::{JournalError, Result};
use crate::map::JournalMap;
use ring::{Objects, Ring};

pub(crate) use barriers::{BarrierState, BarrierWrite, Barriers, Numbered, Outstanding};
pub(crate) use open::{Joining, OpenBarriers};
pub(crate) use ring::Reserved;
pub(crate) use scan::{Found, read_table, scan};
pub use unplaced::UnplacedITransaction;

/// The mark on disk, as far as writers of i-transactions need it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mark {
    pub(crate) nonce: u64,
    /// I-transactions name the barriers before them.
    pub(crate) has_barriers: bool,
}

/// The mark, which cannot be cleared meanwhile.
pub(crate) type Marked<'a> = RwLockReadGuard<'a, Option<Mark>>;

/// The areas of an open journal.
pub(crate) struct Areas {
    table: AreaTable,
    /// Journal block of the table.
    table_at: u32,
    block_size: usize,
    uuid: [u8; 16],
    areas: Vec<Mutex<Ring>>,
    /// The mark on disk, if it is set. Held shared while an i-transaction is written,
    /// exclusively during the I/O that changes the mark.
    pub(crate) mark: RwLock<Option<Mark>>,
    /// The mark on disk is from before a crash: recovery is not complete.
    recovering: AtomicBool,
    /// I-transactions for recovery, until the caller takes them.
    pending: Mutex<Vec<ITransaction>>,
    /// The last sub-transaction ID given out.
    sub_id: AtomicU64,
    pub(crate) barriers: Barriers,
    counters: Counters,
}

#[derive(Default)]
struct Counters {
    transactions: AtomicU64,
    blocks: AtomicU64,
    full: AtomicU64,
}

/// Geometry and counters of the areas.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AreaStats {
    /// How many areas there are.
    pub area_count: u32,
    /// Blocks of each.
    pub area_blocks: u32,
    /// Blocks of live i-transactions (some may have committed since).
    pub live_blocks: u64,
    /// I-transactions written.
    pub transactions: u64,
    /// Blocks written.
    pub blocks: u64,
    /// I-transactions for which no area had space.
    pub full: u64,
}

impl Areas {
    /// Opens the areas that the table describes, on a device with objects of `object_bytes`. `mark` is that of the
    /// superblock.
    pub(crate) fn new(
        table: AreaTable,
        superblock: &Superblock,
        pending: Vec<ITransaction>,
        map: &JournalMap,
        object_bytes: Option<u64>,
    ) -> Areas {
        let table_at = superblock.s_maxlen;
        let ring = |area: u32| {
            let first = table_at + 1 + area * table.area_blocks;
            let objects = object_bytes.and_then(|bytes| {
                Objects::of(map, first, &table, bytes / u64::from(superblock.s_blocksize))
            });
            Mutex::new(Rank::AreaRing, Ring::new(table.area_blocks, objects))
        };
        let mark = superblock
            .ijournal()
            .map(|mark| Mark { nonce: mark.nonce, has_barriers: mark.has_barriers });
        Areas {
            table,
            table_at,
            block_size: superblock.s_blocksize as usize,
            uuid: superblock.s_uuid,
            areas: (0..table.area_count).map(ring).collect(),
            mark: RwLock::new(Rank::AreaMark, mark),
            recovering: AtomicBool::new(mark.is_some()),
            pending: Mutex::new(Rank::PendingITransactions, pending),
            sub_id: AtomicU64::new(0),
            barriers: Barriers::default(),
            counters: Counters::default(),
        }
    }

    /// Parameters of i-transactions under the mark with `nonce`.
    pub(crate) fn format(&self, nonce: u64) -> AreaFormat {
        AreaFormat { block_size: self.block_size, uuid: self.uuid, nonce }
    }

    /// The i-transactions for recovery, once.
    pub(crate) fn take_pending(&self) -> Vec<ITransaction> {
        std::mem::take(&mut *self.pending.lock())
    }

    /// Whether recovery is not complete.
    pub(crate) fn is_recovering(&self) -> bool {
        self.recovering.load(Ordering::Acquire)
    }

    /// Recovery is complete, and the mark cleared.
    pub(crate) fn end_recovery(&self) {
        self.recovering.store(false, Ordering::Release);
    }

    /// Geometry and counters.
    pub(crate) fn stats(&self) -> AreaStats {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        AreaStats {
            area_count: self.table.area_count,
            area_blocks: self.table.area_blocks,
            live_blocks: self.areas.iter().map(|area| u64::from(area.lock().live_blocks())).sum(),
            transactions: load(&self.counters.transactions),
            blocks: load(&self.counters.blocks),
            full: load(&self.counters.full),
        }
    }

    /// Whether an i-transaction may be newer than the last commit.
    pub(crate) fn has_live(&self, is_committed: impl Fn(Tid) -> bool) -> bool {
        self.areas.iter().any(|area| {
            let mut ring = area.lock();
            ring.reclaim(&is_committed);
            ring.live_blocks() > 0
        })
    }

    /// Most blocks that an i-transaction can have.
    pub(crate) fn blocks_max(&self) -> u32 {
        self.table.area_blocks / 2
    }

    /// Takes the next sub-transaction ID.
    pub(crate) fn next_sub_id(&self) -> u64 {
        self.sub_id.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Allocates `len` blocks for an i-transaction that is live until `tid` is dead: in area `hint`,
    /// or in another with space. `None` if there is none.
    pub(crate) fn reserve(
        &self,
        hint: usize,
        len: u32,
        tid: Tid,
        is_dead: impl Fn(Tid) -> bool,
    ) -> Option<Reserved> {
        let count = self.areas.len();
        for area in (0..count).map(|step| (hint % count + step) % count) {
            let mut ring = self.areas[area].lock();
            let Some(start) = ring.reserve(len, tid, &is_dead) else { continue };
            let is_half_full = ring.live_blocks() > self.table.area_blocks / 2;
            drop(ring);
            let at = self.journal_block(area, start);
            return Some(Reserved { area, start, at, len, is_half_full });
        }
        self.counters.full.fetch_add(1, Ordering::Relaxed);
        None
    }

    /// Adds `more` blocks to the end of what was reserved last in an area. Returns whether more than half of the
    /// area is live then; `None` if something else follows, or the area ends.
    pub(crate) fn extend(&self, place: &Reserved, more: u32) -> Option<bool> {
        let mut ring = self.areas.get(place.area)?.lock();
        ring.extend(place.start, more).then(|| ring.live_blocks() > self.table.area_blocks / 2)
    }

    /// Counts i-transactions of `len` blocks together that are submitted.
    pub(crate) fn count(&self, transactions: u64, len: u32) {
        self.counters.transactions.fetch_add(transactions, Ordering::Relaxed);
        self.counters.blocks.fetch_add(u64::from(len), Ordering::Relaxed);
    }

    /// The i-transaction at block `start` of an area is no longer in flight.
    pub(crate) fn written(&self, area: usize, start: u32) {
        self.areas[area].lock().written(start);
    }

    /// Journal block of a block of an area.
    fn journal_block(&self, area: usize, block: u32) -> u32 {
        // The table was checked against the journal's length.
        self.table_at + 1 + area as u32 * self.table.area_blocks + block
    }
}

/// Writes the table, durably, and so turns the blocks after the log into areas. For the tool that
/// grows the journal inode: the blocks must belong to the journal, or be added to it afterwards.
pub fn write_table(
    device: &Arc<dyn Device>,
    map: &JournalMap,
    superblock: &Superblock,
    table: &AreaTable,
) -> Result<()> {
    let at = superblock.s_maxlen;
    if u64::from(map.blocks()) < u64::from(at) + table.total_blocks() {
        let message = format!("{} blocks are too few for the areas", map.blocks());
        return Err(JournalError::Usage(message));
    }
    let block_size = superblock.s_blocksize as usize;
    let mut block = Buf::zeroed(block_size);
    table.encode(block.make_mut()).map_err(JournalError::format(at))?;
    let (start, _) = map.run(at)?;
    let request = Request::Write {
        offset: start.0.saturating_mul(block_size as u64),
        bufs: vec![block],
        order: Order::Barrier,
        fua: true,
        class: Class::Sync,
    };
    device.submit_one(request).wait().map_err(JournalError::io("writing the area table"))
}
