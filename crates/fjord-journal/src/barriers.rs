//! Order without waiting: barriers are submitted, and become durable with what comes later.
//!
//! A barrier is an i-transaction like any other, but nobody waits for it. Recovery takes barriers up to the
//! first that is missing, and drops i-transactions behind it (`area/barriers.rs` numbers them). Data in place
//! that comes behind a barrier waits until that is durable: the engine calls
//! [`Journal::make_barriers_durable`]. A commit waits for none: it has all that the barriers before it have, and
//! a barrier that it has not got is younger than its changes.
//!
//! A barrier that refers to data which is written but not flushed is *held*: the next round flushes the data,
//! then submits it.
//!
//! Owns no state: that is [`Barriers`]. Invariant: a round covers every barrier whose number was given out
//! before it began.

use fjord_block::Ticket;
use fjord_block::plant::{Bug, planted};
use fjord_format::types::Tid;

use crate::area::{Areas, BarrierWrite, Outstanding};
use crate::area_writer::{AreaWriter, UnplacedITransaction};
use crate::error::{JournalError, Result};
use crate::journal::Journal;
use crate::stats;

/// Most bytes of barriers whose writes have not ended. A caller beyond waits.
pub const BARRIER_BYTES_MAX: u64 = 8 << 20;

/// A barrier that has been submitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SubmittedBarrier {
    /// Its number among all barriers of the mount, from 1.
    pub number: u64,
    /// More than half of the area is live: a commit should follow soon.
    pub wants_commit: bool,
}

impl Journal {
    /// Starts writing barriers: as [`Journal::area_writer`], and the journal is marked so that recovery looks
    /// for gaps. Waits for the device the first time, and after the log was emptied.
    pub fn barrier_writer(&self) -> Result<Option<AreaWriter<'_>>> {
        self.marked_writer(true)
    }

    /// Number of the last barrier; 0 if there was none.
    pub fn last_barrier(&self) -> u64 {
        self.inner.areas.as_ref().map_or(0, |areas| areas.barriers.last())
    }

    /// Number of the last barrier that is durable, with all before it.
    pub fn durable_barrier(&self) -> u64 {
        self.inner.areas.as_ref().map_or(0, |areas| areas.barriers.durable())
    }

    /// Makes every barrier durable that has been submitted before the call. Whether this thread has flushed
    /// the device for that, at a moment after the call: if not, there was none, or another thread did.
    ///
    /// # Errors
    /// Of the device; the journal stops, since later i-transactions count on the barriers.
    pub fn make_barriers_durable(&self) -> Result<bool> {
        let Some(areas) = &self.inner.areas else { return Ok(false) };
        let wanted = areas.barriers.last();
        if areas.barriers.durable() >= wanted {
            return Ok(false);
        }
        let _round = areas.barriers.lock_round();
        if areas.barriers.durable() >= wanted {
            return Ok(false);
        }
        self.check_running()?;
        let (last, outstanding) = areas.barriers.lock().take_all();
        self.write_out(areas, outstanding).inspect_err(|error| self.abort(error.clone()))?;
        areas.barriers.set_durable(last);
        stats::add(&self.inner.counters.barrier_rounds, 1);
        Ok(true)
    }

    /// Waits for the writes of barriers, and flushes.
    fn write_out(&self, areas: &Areas, outstanding: Vec<Outstanding>) -> Result<()> {
        let is_held = |barrier: &Outstanding| matches!(barrier.write, BarrierWrite::Held(_));
        if outstanding.iter().any(is_held) {
            self.inner.flush("making data durable before a barrier")?;
        }
        let mut sent = Vec::with_capacity(outstanding.len());
        for Outstanding { write, area, start, .. } in outstanding {
            let tickets = match write {
                BarrierWrite::Sent(tickets) => tickets,
                BarrierWrite::Held(requests) => self.inner.device.submit(requests),
            };
            sent.push((tickets, area, start));
        }
        let mut result = Ok(());
        for (tickets, area, start) in &sent {
            result = result.and(Ticket::wait_all(tickets));
            areas.written(*area, *start);
        }
        result.map_err(JournalError::io("writing a barrier"))?;
        if planted(Bug::BarriersNotFlushed) {
            return Ok(());
        }
        self.inner.flush("making barriers durable")
    }

    /// Lets go of the writes of barriers that have ended.
    fn reap_barriers(&self, areas: &Areas) -> Result<()> {
        let ended = areas.barriers.lock().take_ended();
        let mut result = Ok(());
        for barrier in ended {
            if let BarrierWrite::Sent(tickets) = &barrier.write {
                // They are done.
                result = result.and(Ticket::wait_all(tickets));
            }
            areas.written(barrier.area, barrier.start);
        }
        result.map_err(JournalError::io("writing a barrier")).inspect_err(|error| {
            self.abort(error.clone());
        })
    }

    /// Waits until barriers in flight keep to their bound.
    fn make_room_for_barrier(&self, areas: &Areas) -> Result<()> {
        self.reap_barriers(areas)?;
        while areas.barriers.lock().bytes() > BARRIER_BYTES_MAX {
            stats::add(&self.inner.counters.barrier_waits, 1);
            let oldest = areas.barriers.lock().oldest_sent();
            match oldest {
                Some(tickets) => {
                    // The result is looked at below.
                    let _ = Ticket::wait_all(&tickets);
                    self.reap_barriers(areas)?;
                }
                None => drop(self.make_barriers_durable()?),
            }
        }
        Ok(())
    }
}

impl AreaWriter<'_> {
    /// Submits a barrier that is live until `tid` has committed, and waits for nothing but the bound on what
    /// is in flight. With `is_held` a flush of the data that it refers to comes before it. `None` if no
    /// area has space for it, or barriers of several transactions are not durable: then a commit has to follow.
    ///
    /// # Errors
    /// Of earlier barriers; the journal stops.
    pub fn submit_barrier(
        &self,
        hint: usize,
        tid: Tid,
        transaction: UnplacedITransaction,
        is_held: bool,
    ) -> Result<Option<SubmittedBarrier>> {
        self.journal.check_running()?;
        self.journal.make_room_for_barrier(self.areas)?;
        let len = transaction.total_blocks();
        let barriers = &self.areas.barriers;
        let mut state = barriers.lock();
        let is_committed = |tid| self.journal.is_committed(tid);
        let Some(order) = state.order(tid, true, is_committed) else { return Ok(None) };
        let blocks = transaction.place(&order, self.format().block_size)?;
        let Some(found) = self.reserve(hint, len, tid) else { return Ok(None) };
        let bytes = blocks.iter().map(|block| block.len() as u64).sum();
        let requests = self.requests(found.at, blocks, false)?;
        let write = match is_held && !planted(Bug::HeldBarrierSentAtOnce) {
            true => BarrierWrite::Held(requests),
            false => BarrierWrite::Sent(self.journal.inner.device.submit(requests)),
        };
        let sent = match &write {
            BarrierWrite::Sent(tickets) => tickets.clone(),
            BarrierWrite::Held(_) => Vec::new(),
        };
        let barrier = Outstanding::new(write, found.area, found.start, bytes);
        let number = barriers.add(&mut state, tid, barrier);
        drop(state);
        sent.iter().for_each(Ticket::start);
        self.areas.count(len);
        stats::add(&self.journal.inner.counters.barriers, 1);
        Ok(Some(SubmittedBarrier { number, wants_commit: found.is_half_full }))
    }
}
