//! Order without waiting: barriers are submitted, and become durable with what comes later.
//!
//! A barrier is an i-transaction like any other, but nobody waits for it. Recovery takes barriers up to the
//! first that is missing, and drops i-transactions behind it (`area/barriers.rs` numbers them). While the write of
//! one is on its way the next ones gather, and go together (`area/open.rs`). Data in place
//! that comes behind a barrier waits until that is durable: the engine calls
//! [`Journal::make_barriers_durable`]. A commit waits for none: it has all that the barriers before it have, and
//! a barrier that it has not got is younger than its changes.
//!
//! A barrier that refers to data which is written but not flushed is *held*: the next round flushes the data,
//! then submits it.
//!
//! Owns no state: that is [`Barriers`]. Invariants: a round covers every barrier whose number was given out
//! before it began; barriers reach the device in the order of their numbers, or together.
//!
//! [`Barriers`]: crate::area::Barriers

use fjord_block::Ticket;
use fjord_block::plant::{Bug, planted};

use crate::area::{
    Areas, BarrierState, BarrierWrite, Joining, Numbered, OpenBarriers, Outstanding,
    UnplacedITransaction,
};
use crate::area_writer::AreaWriter;
use crate::error::{JournalError, Result};
use crate::journal::Journal;
use crate::stats;

/// Most bytes of barriers whose writes have not ended. A caller beyond waits.
pub const BARRIER_BYTES_MAX: u64 = 8 << 20;

/// A barrier that has its place: it is submitted, held, or open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlacedBarrier {
    /// Its number among all barriers of the mount, from 1.
    pub number: u64,
    /// Blocks that it adds to the areas, at the most.
    pub blocks: u32,
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
        let (last, outstanding) = {
            let mut state = areas.barriers.lock();
            // They are waited for below.
            self.submit_open(areas, &mut state)?;
            state.take_all()
        };
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

    /// Lets go of the writes of barriers that have ended, and waits until those in flight keep to their bound.
    fn make_room_for_barrier(&self, areas: &Areas) -> Result<()> {
        loop {
            let (ended, full) = {
                let mut state = areas.barriers.lock();
                (
                    state.take_ended(),
                    (state.bytes() > BARRIER_BYTES_MAX).then(|| state.oldest_sent()),
                )
            };
            self.end_barriers(areas, ended)?;
            match full {
                None => return Ok(()),
                // The result is looked at when it is taken out of the list.
                Some(Some(tickets)) => drop(Ticket::wait_all(&tickets)),
                Some(None) => drop(self.make_barriers_durable()?),
            }
            stats::add(&self.inner.counters.barrier_waits, 1);
        }
    }

    /// Tells the areas of writes that have ended.
    fn end_barriers(&self, areas: &Areas, ended: Vec<Outstanding>) -> Result<()> {
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
}

impl AreaWriter<'_> {
    /// Gives a barrier its place, and submits it unless the write of another is on its way: then it goes with the next one,
    /// or [`Journal::submit_barriers`]. Waits for nothing but the bound on what is in flight. With `is_held` a flush
    /// of the data that it refers to comes before it. `None` if no area has space for it, or barriers of several
    /// transactions are not durable: then a commit has to follow.
    ///
    /// # Errors
    /// Of earlier barriers; the journal stops.
    pub fn submit_barrier(
        &self,
        hint: usize,
        transaction: UnplacedITransaction,
        is_held: bool,
    ) -> Result<Option<PlacedBarrier>> {
        self.journal.check_running()?;
        self.journal.make_room_for_barrier(self.areas)?;
        let Some(blocks) = transaction.blocks_max(self.format()) else { return Ok(None) };
        let is_held = is_held && !planted(Bug::HeldBarrierSentAtOnce);
        let (mut sent, mut also_sent) = (Vec::new(), Vec::new());
        let mut state = self.areas.barriers.lock();
        let room = if is_held { None } else { self.room_to_join(&mut state, &transaction, blocks) };
        let taken = match room {
            Some(room) => Some(join(&mut state, room, transaction)),
            None => {
                sent = self.journal.submit_open(self.areas, &mut state)?;
                self.begin(&mut state, hint, transaction, blocks, is_held)?
            }
        };
        let barrier = taken.map(|Taken { blocks, wants_commit }| {
            let number = self.areas.barriers.count(&mut state);
            PlacedBarrier { number, blocks, wants_commit }
        });
        if !state.has_sent() {
            also_sent = self.journal.submit_open(self.areas, &mut state)?;
        }
        drop(state);
        sent.iter().chain(&also_sent).for_each(Ticket::start);
        stats::add(&self.journal.inner.counters.barriers, usize::from(barrier.is_some()));
        Ok(barrier)
    }

    /// Reserves what a barrier needs to go with those that are open. `None` if it cannot.
    fn room_to_join(
        &self,
        state: &mut BarrierState,
        transaction: &UnplacedITransaction,
        blocks: u32,
    ) -> Option<Room> {
        let open = state.open.as_ref()?;
        let (joining, place) = (open.joining(transaction, blocks)?, open.place);
        let number = state.next_number(transaction.tid, |tid| self.journal.is_committed(tid))?;
        let is_half_full = self.areas.extend(&place, joining.more)?;
        Some(Room { joining, number, is_half_full })
    }

    /// Opens barriers with this one, or holds it. `None` if there is no space.
    fn begin(
        &self,
        state: &mut BarrierState,
        hint: usize,
        transaction: UnplacedITransaction,
        blocks: u32,
        is_held: bool,
    ) -> Result<Option<Taken>> {
        let (format, tid) = (*self.format(), transaction.tid);
        let is_committed = |tid| self.journal.is_committed(tid);
        let Some(number) = state.next_number(tid, is_committed) else { return Ok(None) };
        let own = Numbered { tid, number, last: number };
        // The others get theirs when they are submitted.
        let order = match is_held.then(|| state.order(Some(own), is_committed)) {
            Some(None) => return Ok(None),
            order => order.flatten(),
        };
        let Some(place) = self.reserve(hint, blocks, tid) else { return Ok(None) };
        if let Some(order) = order {
            let blocks = transaction.put_together(&format, &order)?;
            let bytes = blocks.iter().map(|block| block.len() as u64).sum();
            self.areas.count(1, place.len);
            let write = BarrierWrite::Held(self.requests(place.at, blocks, false)?);
            state.add(Outstanding::new(write, place.area, place.start, bytes));
        } else {
            state.open = Some(OpenBarriers::new(format, place, number, transaction));
        }
        state.take_number(tid);
        Ok(Some(Taken { blocks, wants_commit: place.is_half_full }))
    }
}

/// What a barrier has taken of the areas.
struct Taken {
    blocks: u32,
    wants_commit: bool,
}

/// What a barrier needs to go with those that are open; reserved.
struct Room {
    joining: Joining,
    number: u32,
    is_half_full: bool,
}

fn join(state: &mut BarrierState, room: Room, transaction: UnplacedITransaction) -> Taken {
    let Room { joining, number, is_half_full } = room;
    let tid = transaction.tid;
    if let Some(open) = &mut state.open
        && open.join(joining, number, transaction)
    {
        state.take_number(tid);
    }
    Taken { blocks: joining.more, wants_commit: is_half_full }
}
