//! Writes i-transactions to the areas of a journal.
//!
//! Owns no state: the areas are [`Areas`], the journal decides with its commits what is live.
//! Invariants: as [`crate::area`] states them; a failed write stops the journal.

use fjord_block::plant::{Bug, planted};
use fjord_block::{Buf, Request, Ticket};
use fjord_format::ijournal::{AreaFormat, ITransaction, Order};
use fjord_format::jbd2::{IjournalMark, Superblock};
use fjord_format::types::Tid;

use crate::area::{AreaStats, Areas, Mark, Marked, Reserved, UnplacedITransaction};
use crate::error::{JournalError, Result};
use crate::journal::Journal;
use crate::log::Log;

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
    /// Its blocks.
    pub blocks: u32,
    /// More than half of the area is live: a commit should follow soon.
    pub wants_commit: bool,
    /// Barriers before it are perhaps not durable, so that it counts only after
    /// [`Journal::make_barriers_durable`].
    pub is_behind_barriers: bool,
}

/// The right to write i-transactions: while it exists the mark stays set.
pub struct AreaWriter<'a> {
    pub(crate) journal: &'a Journal,
    pub(crate) areas: &'a Areas,
    _marked: Marked<'a>,
    mark: Mark,
    format: AreaFormat,
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
        areas.map_or_else(Vec::new, Areas::take_pending)
    }

    /// Whether a recovery is in progress, until [`Journal::quiesce`] ends it.
    pub fn is_recovering(&self) -> bool {
        let areas = self.inner.areas.as_ref();
        areas.is_some_and(Areas::is_recovering)
    }

    /// State of the areas; `None` without any.
    pub fn area_stats(&self) -> Option<AreaStats> {
        self.inner.areas.as_ref().map(Areas::stats)
    }

    /// Starts writing i-transactions: sets the mark durably if it is not set. `None` without areas.
    /// Drop it soon, and before waiting for a commit.
    pub fn area_writer(&self) -> Result<Option<AreaWriter<'_>>> {
        self.marked_writer(false)
    }

    /// As [`Journal::area_writer`]; with `with_barriers` the mark also says that i-transactions come behind
    /// barriers.
    pub(crate) fn marked_writer(&self, with_barriers: bool) -> Result<Option<AreaWriter<'_>>> {
        let (Some(areas), Some(log)) = (&self.inner.areas, &self.inner.log) else {
            return Ok(None);
        };
        loop {
            self.check_running()?;
            // With partial commits, transaction IDs differ from the sequences in the log.
            if areas.is_recovering() || self.parts().is_some() {
                return Ok(None);
            }
            let marked = areas.mark.read();
            if let Some(mark) = marked.filter(|mark| mark.has_barriers || !with_barriers) {
                let format = areas.format(mark.nonce);
                return Ok(Some(AreaWriter {
                    journal: self,
                    areas,
                    _marked: marked,
                    mark,
                    format,
                }));
            }
            drop(marked);
            self.mark_areas(areas, log, with_barriers)?;
        }
    }

    fn mark_areas(&self, areas: &Areas, log: &Log, with_barriers: bool) -> Result<()> {
        let mut mark = areas.mark.write();
        if mark.is_some_and(|mark| mark.has_barriers || !with_barriers) {
            return Ok(());
        }
        let nonce = mark.map_or_else(rand::random, |mark| mark.nonce);
        let new = Mark { nonce, has_barriers: with_barriers };
        if planted(if with_barriers { Bug::BarriersNotMarked } else { Bug::ItransactionNoMark }) {
            *mark = Some(new);
            return Ok(());
        }
        let written =
            log.write_superblock(&self.inner.counters, self.inner.barrier, |superblock| {
                let has_barriers = with_barriers;
                let mark = IjournalMark { nonce, has_barriers, recovering_after: None };
                superblock.set_ijournal(Some(mark));
            });
        if let Err(error) = written {
            self.abort(error.clone());
            return Err(error);
        }
        *mark = Some(new);
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
            && areas.has_live(|tid| self.is_committed(tid))
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
            areas.end_recovery();
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
        self.areas.blocks_max()
    }

    /// Takes the next sub-transaction ID. Call it while the recorded state cannot change, so that
    /// IDs are in the order of the states.
    pub fn next_sub_id(&self) -> u64 {
        self.areas.next_sub_id()
    }

    /// Submits an i-transaction: to the area of CPU `hint`, or to another with space. With `fua` it is durable when
    /// the wait returns, unless [`AreaWrite::is_behind_barriers`].
    pub fn submit(
        &self,
        hint: usize,
        transaction: UnplacedITransaction,
        fua: bool,
    ) -> Result<Submitted> {
        self.journal.check_running()?;
        let Some((order, is_behind)) = self.order()? else { return Ok(Submitted::Full) };
        let tid = transaction.tid;
        let blocks = transaction.put_together(&self.format, &order)?;
        // As many as an area has, at the most, or there is no space.
        let len = u32::try_from(blocks.len()).unwrap_or(u32::MAX);
        let Some(found) = self.reserve(hint, len, tid) else { return Ok(Submitted::Full) };
        let Reserved { area, start, at, is_half_full: wants_commit, .. } = found;
        let fua = fua && !is_behind;
        let tickets = self.journal.inner.device.submit(self.requests(at, blocks, fua)?);
        self.areas.count(1, len);
        Ok(Submitted::Written(AreaWrite {
            tickets,
            area,
            start,
            blocks: len,
            wants_commit,
            is_behind_barriers: is_behind,
        }))
    }

    /// Place of an i-transaction among barriers, and whether some before it are perhaps not durable. `None`
    /// if it cannot be told. Barriers that are open are submitted.
    fn order(&self) -> Result<Option<(Order, bool)>> {
        if !self.mark.has_barriers {
            return Ok(Some((Order::default(), false)));
        }
        let is_committed = |tid| self.journal.is_committed(tid);
        let mut state = self.areas.barriers.lock();
        let sent = self.journal.submit_open(self.areas, &mut state)?;
        let order = state.order(None, is_committed);
        drop(state);
        sent.iter().for_each(Ticket::start);
        let Some(order) = order else { return Ok(None) };
        let is_behind = self.areas.barriers.durable() < self.areas.barriers.last();
        Ok(Some((order, is_behind && !planted(Bug::FuaCoversBarriers))))
    }

    /// Space for an i-transaction of `len` blocks that is live until `tid` has committed.
    pub(crate) fn reserve(&self, hint: usize, len: u32, tid: Tid) -> Option<Reserved> {
        let is_dead = |tid| self.journal.is_committed(tid) || planted(Bug::ItransactionAreaReused);
        self.areas.reserve(hint, len, tid, is_dead)
    }

    /// Waits until an i-transaction has been written. A failed write stops the journal: whether a
    /// later scan accepts it is unknown.
    pub fn wait(&self, write: AreaWrite) -> Result<()> {
        let result = Ticket::wait_all(&write.tickets);
        self.areas.written(write.area, write.start);
        result.map_err(JournalError::io("writing an i-transaction")).inspect_err(|error| {
            self.journal.abort(error.clone());
        })
    }

    /// The writes of an i-transaction at block `at` of the journal.
    pub(crate) fn requests(&self, at: u32, blocks: Vec<Buf>, fua: bool) -> Result<Vec<Request>> {
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
