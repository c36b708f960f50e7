//! Submits barriers that have gathered.
//!
//! Owns no state: that is [`Barriers`](crate::area::Barriers). Invariant: what is submitted here is the newest among
//! barriers, and stays in the order of their numbers, since the caller holds their state.

use fjord_block::Ticket;
use fjord_block::plant::{Bug, planted};

use crate::area::{Areas, BarrierState, BarrierWrite, Numbered, Outstanding};
use crate::error::{JournalError, Result};
use crate::journal::Journal;

impl Journal {
    /// Submits the barriers that have gathered, if there are any: a crash of this process loses them otherwise. For a
    /// thread that comes by now and then.
    ///
    /// # Errors
    /// The journal has stopped.
    pub fn submit_barriers(&self) -> Result<()> {
        let Some(areas) = &self.inner.areas else { return Ok(()) };
        self.check_running()?;
        let sent = self.submit_open(areas, &mut areas.barriers.lock())?;
        sent.iter().for_each(Ticket::start);
        Ok(())
    }

    /// Submits the barriers that have gathered; the caller starts the tickets. If their transaction has committed they
    /// need no write.
    pub(crate) fn submit_open(
        &self,
        areas: &Areas,
        state: &mut BarrierState,
    ) -> Result<Vec<Ticket>> {
        let Some(open) = state.open.take() else { return Ok(Vec::new()) };
        let (tid, place, count) = (open.tid, open.place, open.count());
        if self.is_committed(tid) {
            areas.written(place.area, place.start);
            return Ok(Vec::new());
        }
        let is_committed = |tid| self.is_committed(tid);
        let order = |number, last| {
            let last = if planted(Bug::OpenBarriersCountAlone) { number } else { last };
            state.order(Some(Numbered { tid, number, last }), is_committed)
        };
        let blocks = open.put_together(order).and_then(|blocks| {
            // There was room when the first was called, and what has committed since needs none.
            let blocks = blocks
                .ok_or_else(|| JournalError::Usage("barriers of too many transactions".into()))?;
            let bytes = blocks.iter().map(|block| block.len() as u64).sum();
            areas.count(count, u32::try_from(blocks.len()).unwrap_or(u32::MAX));
            Ok((self.inner.log_or_usage()?.contiguous_requests(place.at, blocks, false)?, bytes))
        });
        // Their numbers are given out: without them nothing behind them would count.
        let (requests, bytes) = blocks.inspect_err(|error| self.abort(error.clone()))?;
        let tickets = self.inner.device.submit(requests);
        let write = BarrierWrite::Sent(tickets.clone());
        state.add(Outstanding::new(write, place.area, place.start, bytes));
        Ok(tickets)
    }
}
