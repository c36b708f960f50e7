//! The areas after the log, to which callers of fsync write i-transactions themselves.
//!
//! An area is a ring of blocks. An i-transaction in it is *live* until the transaction that it
//! names has committed. Its space is then reused without any write: recovery ignores i-transactions
//! that are not newer than the last commit.
//!
//! Before the first one, the ijournal mark is set on disk ([`IjournalMark`]). It is cleared when
//! the log has been emptied and no i-transaction is live ([`Journal::quiesce`],
//! [`Journal::close`]).
//!
//! Invariants: the mark is durable before anything is written to an area; an i-transaction that is
//! live or in flight is never overwritten; an i-transaction is contiguous. The lock of an area is
//! held for a few instructions; `mark` is held shared while an i-transaction is written, so that
//! the mark is not cleared meanwhile.

mod ring;
mod scan;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use fjord_block::lock::{Mutex, Rank, RwLock, RwLockReadGuard};
use fjord_block::plant::{Bug, planted};
use fjord_block::{Buf, Class, Device, DeviceExt, Order, Request, Ticket};
use fjord_format::ijournal::{AreaFormat, AreaTable, ITransaction};
use fjord_format::jbd2::{IjournalMark, Superblock};
use fjord_format::types::Tid;

use crate::error::{JournalError, Result};
use crate::journal::Journal;
use crate::log::Log;
use crate::map::JournalMap;
use ring::Ring;

pub(crate) use scan::{read_table, scan};

/// The areas of an open journal.
pub(crate) struct Areas {
    table: AreaTable,
    /// Journal block of the table.
    table_at: u32,
    block_size: usize,
    uuid: [u8; 16],
    areas: Vec<Mutex<Ring>>,
    /// The nonce of the mark on disk, if it is set. Held shared while an i-transaction is written,
    /// exclusively during the I/O that changes the mark.
    mark: RwLock<Option<u64>>,
    /// The mark on disk is from before a crash: recovery is not complete.
    recovering: AtomicBool,
    /// I-transactions for recovery, until the caller takes them.
    pending: Mutex<Vec<ITransaction>>,
    /// The last sub-transaction ID given out.
    sub_id: AtomicU64,
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

/// Outcome of [`AreaWriter::submit`].
#[derive(Debug)]
pub enum Submitted {
    /// In flight.
    Written(AreaWrite),
    /// No area has space for it until a commit.
    Full,
}

/// An i-transaction in flight; wait for it.
#[derive(Debug)]
pub struct AreaWrite {
    tickets: Vec<Ticket>,
    area: usize,
    start: u32,
    /// More than half of the area is live: a commit should follow soon.
    pub wants_commit: bool,
}

/// The right to write i-transactions: while it exists the mark stays set.
pub struct AreaWriter<'a> {
    journal: &'a Journal,
    areas: &'a Areas,
    _marked: RwLockReadGuard<'a, Option<u64>>,
    format: AreaFormat,
}

impl Areas {
    /// Opens the areas that the table describes. `mark` is that of the superblock.
    pub(crate) fn new(
        table: AreaTable,
        superblock: &Superblock,
        pending: Vec<ITransaction>,
    ) -> Areas {
        let ring = || Mutex::new(Rank::AreaRing, Ring::new(table.area_blocks));
        let mark = superblock.ijournal();
        Areas {
            table,
            table_at: superblock.s_maxlen,
            block_size: superblock.s_blocksize as usize,
            uuid: superblock.s_uuid,
            areas: (0..table.area_count).map(|_| ring()).collect(),
            mark: RwLock::new(Rank::AreaMark, mark.map(|mark| mark.nonce)),
            recovering: AtomicBool::new(mark.is_some()),
            pending: Mutex::new(Rank::PendingITransactions, pending),
            sub_id: AtomicU64::new(0),
            counters: Counters::default(),
        }
    }

    fn format(&self, nonce: u64) -> AreaFormat {
        AreaFormat { block_size: self.block_size, uuid: self.uuid, nonce }
    }

    /// Whether an i-transaction may be newer than the last commit.
    fn has_live(&self, journal: &Journal) -> bool {
        self.areas.iter().any(|area| {
            let mut ring = area.lock();
            ring.reclaim(|tid| journal.is_committed(tid));
            ring.live_blocks() > 0
        })
    }

    /// Journal block of a block of an area.
    fn journal_block(&self, area: usize, block: u32) -> u32 {
        // The table was checked against the journal's length.
        self.table_at + 1 + area as u32 * self.table.area_blocks + block
    }
}

impl Journal {
    /// Whether there are areas to write i-transactions to.
    pub fn has_areas(&self) -> bool {
        self.inner.areas.is_some()
    }

    /// Takes the i-transactions that a crash left, by sub-transaction ID. The caller applies
    /// them in one transaction, the first of this journal, then calls [`Journal::quiesce`],
    /// which ends the recovery; until then there is no [`AreaWriter`].
    pub fn take_pending(&self) -> Vec<ITransaction> {
        let areas = self.inner.areas.as_ref();
        areas.map_or_else(Vec::new, |areas| std::mem::take(&mut *areas.pending.lock()))
    }

    /// Whether a recovery is in progress, until [`Journal::quiesce`] ends it.
    pub fn is_recovering(&self) -> bool {
        let areas = self.inner.areas.as_ref();
        areas.is_some_and(|areas| areas.recovering.load(Ordering::Acquire))
    }

    /// State of the areas; `None` without any.
    pub fn area_stats(&self) -> Option<AreaStats> {
        let areas = self.inner.areas.as_ref()?;
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Some(AreaStats {
            area_count: areas.table.area_count,
            area_blocks: areas.table.area_blocks,
            live_blocks: areas.areas.iter().map(|area| u64::from(area.lock().live_blocks())).sum(),
            transactions: load(&areas.counters.transactions),
            blocks: load(&areas.counters.blocks),
            full: load(&areas.counters.full),
        })
    }

    /// Starts writing i-transactions: sets the mark durably if it is not set. `None` without areas.
    /// Drop it soon, and before waiting for a commit.
    pub fn area_writer(&self) -> Result<Option<AreaWriter<'_>>> {
        let (Some(areas), Some(log)) = (&self.inner.areas, &self.inner.log) else {
            return Ok(None);
        };
        loop {
            self.check_running()?;
            // With partial commits, transaction IDs differ from the sequences in the log.
            if areas.recovering.load(Ordering::Acquire) || self.parts().is_some() {
                return Ok(None);
            }
            let marked = areas.mark.read();
            if let Some(nonce) = *marked {
                let format = areas.format(nonce);
                return Ok(Some(AreaWriter { journal: self, areas, _marked: marked, format }));
            }
            drop(marked);
            self.mark_areas(areas, log)?;
        }
    }

    fn mark_areas(&self, areas: &Areas, log: &Log) -> Result<()> {
        let mut mark = areas.mark.write();
        if mark.is_some() {
            return Ok(());
        }
        let nonce = rand::random();
        if planted(Bug::ItransactionNoMark) {
            *mark = Some(nonce);
            return Ok(());
        }
        let written =
            log.write_superblock(&self.inner.counters, self.inner.barrier, |superblock| {
                superblock.set_ijournal(Some(IjournalMark { nonce, recovering_after: None }));
            });
        if let Err(error) = written {
            self.abort(error.clone());
            return Err(error);
        }
        *mark = Some(nonce);
        Ok(())
    }

    /// Applies `change` to the superblock and clears the ijournal mark, if it is set. The log must
    /// be empty, or `change` marks it empty, and the caller holds the commit lock. Does nothing and
    /// returns `false` if an i-transaction is newer than the last commit.
    pub(crate) fn write_rest(
        &self,
        log: &Log,
        is_empty: bool,
        change: impl FnOnce(&mut Superblock),
    ) -> Result<bool> {
        let mut mark = self.inner.areas.as_ref().map(|areas| areas.mark.write());
        let is_marked = mark.as_ref().is_some_and(|mark| mark.is_some());
        if let Some(areas) = &self.inner.areas
            && is_marked
            && areas.has_live(self)
        {
            return Ok(false);
        }
        if is_empty && !is_marked {
            return Ok(true);
        }
        log.write_superblock(&self.inner.counters, self.inner.barrier, |superblock| {
            change(superblock);
            superblock.set_ijournal(None);
        })?;
        if let Some(mark) = &mut mark {
            **mark = None;
        }
        if let Some(areas) = &self.inner.areas {
            areas.recovering.store(false, Ordering::Release);
        }
        Ok(true)
    }
}

impl AreaWriter<'_> {
    /// Parameters for building i-transactions.
    pub fn format(&self) -> &AreaFormat {
        &self.format
    }

    /// Most blocks that an i-transaction can have.
    pub fn blocks_max(&self) -> u32 {
        self.areas.table.area_blocks / 2
    }

    /// Takes the next sub-transaction ID. Call it while the recorded state cannot change, so that
    /// IDs are in the order of the states.
    pub fn next_sub_id(&self) -> u64 {
        self.areas.sub_id.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Submits an i-transaction of `blocks`, header first, that is live until `tid` has committed:
    /// to the area of CPU `hint`, or to another with space. With `fua` it is durable when the wait
    /// returns.
    pub fn submit(&self, hint: usize, tid: Tid, blocks: Vec<Buf>, fua: bool) -> Result<Submitted> {
        self.journal.check_running()?;
        let areas = self.areas;
        let count = areas.areas.len();
        let len = u32::try_from(blocks.len()).unwrap_or(u32::MAX);
        for area in (0..count).map(|step| (hint % count + step) % count) {
            let mut ring = areas.areas[area].lock();
            let is_dead =
                |tid| self.journal.is_committed(tid) || planted(Bug::ItransactionAreaReused);
            let found = ring.reserve(len, tid, is_dead);
            let Some(start) = found else { continue };
            let wants_commit = ring.live_blocks() > areas.table.area_blocks / 2;
            drop(ring);
            let requests = self.requests(areas.journal_block(area, start), blocks, fua)?;
            let tickets = self.journal.inner.device.submit(requests);
            areas.counters.transactions.fetch_add(1, Ordering::Relaxed);
            areas.counters.blocks.fetch_add(u64::from(len), Ordering::Relaxed);
            return Ok(Submitted::Written(AreaWrite { tickets, area, start, wants_commit }));
        }
        areas.counters.full.fetch_add(1, Ordering::Relaxed);
        Ok(Submitted::Full)
    }

    /// Waits until an i-transaction has been written. A failed write stops the journal: whether a
    /// later scan accepts it is unknown.
    pub fn wait(&self, write: AreaWrite) -> Result<()> {
        let result = Ticket::wait_all(&write.tickets);
        self.areas.areas[write.area].lock().written(write.start);
        result.map_err(JournalError::io("writing an i-transaction")).inspect_err(|error| {
            self.journal.abort(error.clone());
        })
    }

    fn requests(&self, at: u32, blocks: Vec<Buf>, fua: bool) -> Result<Vec<Request>> {
        let journal = &self.journal.inner;
        let fua = fua && journal.barrier && !planted(Bug::ItransactionNotDurable);
        journal.log_or_usage()?.contiguous_requests(at, blocks, fua)
    }
}

impl Drop for AreaWrite {
    fn drop(&mut self) {
        // Not waited for: the space stays allocated until the write ends.
        self.tickets.iter().filter(|ticket| !ticket.is_done()).for_each(Ticket::start);
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
