//! Barriers: i-transactions that nobody has waited for, in the order of their calls.
//!
//! Owns their numbers, those that are not submitted, and the writes that perhaps are not durable. Invariants:
//! - numbers of a transaction have no gap: one is given out with the place of its i-transaction, under one lock;
//! - a call that is taken into an earlier i-transaction ([`OpenBarriers`]) counts among all, and has no number of
//!   its own in the transaction;
//! - an i-transaction names the last barriers before it, of all transactions that have not committed
//!   ([`Order`]);
//! - [`Barriers::durable`] covers a barrier only when a flush has begun after its write had ended.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};

use fjord_block::lock::{Mutex, MutexGuard, Rank};
use fjord_block::plant::{Bug, planted};
use fjord_block::{Request, Ticket};
use fjord_format::ijournal::Order;
use fjord_format::types::Tid;

use super::open::OpenBarriers;

/// A write of barriers that is perhaps not durable.
#[derive(Debug)]
pub(crate) struct Outstanding {
    pub(crate) write: BarrierWrite,
    /// Its place in the ring of its area.
    pub(crate) area: usize,
    pub(crate) start: u32,
    bytes: u64,
}

/// The write of an i-transaction, or of several.
#[derive(Debug)]
pub(crate) enum BarrierWrite {
    /// Submitted.
    Sent(Vec<Ticket>),
    /// To be submitted after a flush of what it refers to.
    Held(Vec<Request>),
}

/// Guarded by [`Barriers::state`].
#[derive(Debug, Default)]
pub(crate) struct BarrierState {
    /// Calls so far, of all transactions.
    last: u64,
    /// For each transaction with barriers that may not have committed the number of the last; oldest first.
    numbers: VecDeque<(Tid, u32)>,
    /// Those that are not submitted; newer than all the others.
    pub(crate) open: Option<OpenBarriers>,
    /// Those that are submitted, oldest first; without those whose writes have ended.
    sent: VecDeque<Outstanding>,
    /// Those that wait for a flush, oldest first.
    held: Vec<Outstanding>,
    /// Bytes of the blocks of those two.
    bytes: u64,
}

/// The barriers of a journal.
#[derive(Debug)]
pub(crate) struct Barriers {
    state: Mutex<BarrierState>,
    /// Copy of [`BarrierState::last`], stored under `state`.
    last: AtomicU64,
    /// The last barrier that is durable, with all before it. Grows under `round`.
    durable: AtomicU64,
    /// Held by the thread that makes barriers durable, over I/O.
    round: Mutex<()>,
}

impl Default for Barriers {
    fn default() -> Barriers {
        Barriers {
            state: Mutex::new(Rank::Barriers, BarrierState::default()),
            last: AtomicU64::new(0),
            durable: AtomicU64::new(0),
            round: Mutex::new(Rank::BarrierRound, ()),
        }
    }
}

impl Barriers {
    pub(crate) fn lock(&self) -> MutexGuard<'_, BarrierState> {
        self.state.lock()
    }

    /// The right to make barriers durable.
    pub(crate) fn lock_round(&self) -> MutexGuard<'_, ()> {
        self.round.lock()
    }

    /// How many there were.
    pub(crate) fn last(&self) -> u64 {
        self.last.load(Ordering::Acquire)
    }

    /// The last one that is durable, with all before it.
    pub(crate) fn durable(&self) -> u64 {
        self.durable.load(Ordering::Acquire)
    }

    /// Those up to this one are durable. The caller has the round.
    pub(crate) fn set_durable(&self, last: u64) {
        self.durable.store(last, Ordering::Release);
    }

    /// Counts a call that has its place; its number among all.
    pub(crate) fn count(&self, state: &mut BarrierState) -> u64 {
        state.last += 1;
        self.last.store(state.last, Ordering::Release);
        state.last
    }
}

/// A barrier's number among those of its transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Numbered {
    pub(crate) tid: Tid,
    pub(crate) number: u32,
    /// The last one that it counts with: of those that are submitted with it, or itself.
    pub(crate) last: u32,
}

impl BarrierState {
    /// Number of the next barrier of `tid`; [`BarrierState::take_number`] gives it out. `None` if the format has no
    /// room for it: barriers of more transactions than two are not durable.
    pub(crate) fn next_number(
        &mut self,
        tid: Tid,
        is_committed: impl Fn(Tid) -> bool,
    ) -> Option<u32> {
        self.numbers.retain(|&(tid, _)| !is_committed(tid));
        let newest = newest(self.numbers.iter().map(|it| it.0).chain([tid]))?;
        let fits = |of: Tid| of == newest || of == before(newest) || is_committed(of);
        let all_fit = self.numbers.iter().map(|it| it.0).chain([tid]).all(fits);
        self.last_of(tid).checked_add(1).filter(|_| all_fit)
    }

    /// Gives out the next number of `tid`.
    pub(crate) fn take_number(&mut self, tid: Tid) {
        match self.numbers.iter_mut().find(|(of, _)| *of == tid) {
            Some((_, last)) => *last += 1,
            None => self.numbers.push_back((tid, 1)),
        }
    }

    /// Number of the last barrier of a transaction; 0 if there is none, or it has committed.
    fn last_of(&self, tid: Tid) -> u32 {
        self.numbers.iter().find(|(of, _)| *of == tid).map_or(0, |it| it.1)
    }

    /// The place of an i-transaction behind all barriers, or of a barrier among them. Those that are open count only
    /// for each other. `None` if the format has no room for it, as [`BarrierState::next_number`].
    pub(crate) fn order(
        &mut self,
        barrier: Option<Numbered>,
        is_committed: impl Fn(Tid) -> bool,
    ) -> Option<Order> {
        self.numbers.retain(|&(tid, _)| !is_committed(tid));
        let own = barrier.map(|barrier| barrier.tid);
        let Some(newest) = newest(self.numbers.iter().map(|it| it.0).chain(own)) else {
            return Some(Order::default());
        };
        let older = before(newest);
        let fits = |of: Tid| of == newest || of == older || is_committed(of);
        if !self.numbers.iter().map(|it| it.0).chain(own).all(fits) {
            return None;
        }
        let behind = |of: Tid| {
            let own = barrier.filter(|barrier| barrier.tid == of);
            let last = own.map_or(self.last_of(of), |barrier| barrier.last);
            if planted(Bug::LastBarrierNotNamed) { last.saturating_sub(1) } else { last }
        };
        Some(Order {
            barrier: barrier.map_or(0, |barrier| barrier.number),
            newest,
            behind_newest: behind(newest),
            behind_older: behind(older),
        })
    }

    /// Enters a write of barriers.
    pub(crate) fn add(&mut self, barriers: Outstanding) {
        self.bytes += barriers.bytes;
        match &barriers.write {
            BarrierWrite::Sent(_) => self.sent.push_back(barriers),
            BarrierWrite::Held(_) => self.held.push(barriers),
        }
    }

    /// Whether a write of barriers is on its way, as far as the list knows.
    pub(crate) fn has_sent(&self) -> bool {
        !self.sent.is_empty()
    }

    /// Takes those whose writes have ended out of the list, from the oldest on; for the caller to tell their
    /// areas, and to see how they ended.
    pub(crate) fn take_ended(&mut self) -> Vec<Outstanding> {
        let has_ended = |barrier: &Outstanding| match &barrier.write {
            BarrierWrite::Sent(tickets) => tickets.iter().all(Ticket::is_done),
            BarrierWrite::Held(_) => false,
        };
        let count = self.sent.iter().take_while(|barrier| has_ended(barrier)).count();
        let ended: Vec<Outstanding> = self.sent.drain(..count).collect();
        self.bytes -= ended.iter().map(|barrier| barrier.bytes).sum::<u64>();
        ended
    }

    /// The write of the oldest that has been submitted.
    pub(crate) fn oldest_sent(&self) -> Option<Vec<Ticket>> {
        match &self.sent.front()?.write {
            BarrierWrite::Sent(tickets) => Some(tickets.clone()),
            BarrierWrite::Held(_) => None,
        }
    }

    /// Takes all out of the list, and tells the number of the last barrier. The caller has submitted those that were
    /// open.
    pub(crate) fn take_all(&mut self) -> (u64, Vec<Outstanding>) {
        if planted(Bug::BarrierCountLost) {
            self.numbers.clear();
        }
        self.bytes = 0;
        (self.last, self.sent.drain(..).chain(self.held.drain(..)).collect())
    }

    /// Bytes of blocks whose writes have not been seen to end.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// The newest of some transactions.
pub(super) fn newest(tids: impl Iterator<Item = Tid>) -> Option<Tid> {
    tids.reduce(|one, other| if other.newer_than(one) { other } else { one })
}

fn before(tid: Tid) -> Tid {
    Tid(tid.0.wrapping_sub(1))
}

impl Outstanding {
    pub(crate) fn new(write: BarrierWrite, area: usize, start: u32, bytes: u64) -> Outstanding {
        Outstanding { write, area, start, bytes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn add(barriers: &Barriers, tid: u32, committed: u32) -> Option<Order> {
        let is_committed = |of| Tid(committed).at_least(of);
        let mut state = barriers.lock();
        let tid = Tid(tid);
        let number = state.next_number(tid, is_committed)?;
        state.take_number(tid);
        barriers.count(&mut state);
        state.order(Some(Numbered { tid, number, last: number }), is_committed)
    }

    fn order(barrier: u32, newest: u32, behind_newest: u32, behind_older: u32) -> Order {
        Order { barrier, newest: Tid(newest), behind_newest, behind_older }
    }

    #[test]
    fn numbers_count_within_each_transaction() {
        let barriers = Barriers::default();
        assert_eq!(add(&barriers, 7, 6), Some(order(1, 7, 1, 0)));
        assert_eq!(add(&barriers, 7, 6), Some(order(2, 7, 2, 0)));
        assert_eq!(add(&barriers, 8, 6), Some(order(1, 8, 1, 2)));
        assert_eq!(add(&barriers, 7, 6), Some(order(3, 8, 1, 3)), "a file that 8 has not changed");
        let plain = barriers.lock().order(None, |of| Tid(6).at_least(of));
        assert_eq!(plain, Some(order(0, 8, 1, 3)));
        assert_eq!(add(&barriers, 9, 6), None, "three transactions");
        assert_eq!(add(&barriers, 9, 7), Some(order(1, 9, 1, 1)));
        assert_eq!(barriers.last(), 5);
    }

    #[test]
    fn those_that_are_submitted_together_name_the_last() {
        let barriers = Barriers::default();
        add(&barriers, 6, 5);
        add(&barriers, 7, 5);
        add(&barriers, 7, 5);
        let first = Numbered { tid: Tid(7), number: 1, last: 2 };
        let placed = barriers.lock().order(Some(first), |of| Tid(5).at_least(of));
        assert_eq!(placed, Some(order(1, 7, 2, 1)));
    }

    #[test]
    fn without_barriers_there_is_no_order() {
        let barriers = Barriers::default();
        assert_eq!(barriers.lock().order(None, |_| false), Some(Order::default()));
        add(&barriers, 7, 6);
        assert_eq!(barriers.lock().order(None, |_| true), Some(Order::default()));
    }

    #[test]
    fn writes_are_taken_in_order() {
        let barriers = Barriers::default();
        let (pending, completer) = Ticket::pending(None);
        let mut state = barriers.lock();
        for write in [
            BarrierWrite::Sent(vec![Ticket::ready(Ok(()))]),
            BarrierWrite::Sent(vec![pending]),
            BarrierWrite::Sent(vec![Ticket::ready(Ok(()))]),
            BarrierWrite::Held(Vec::new()),
        ] {
            barriers.count(&mut state);
            state.add(Outstanding::new(write, 0, 0, 100));
        }
        assert_eq!((state.take_ended().len(), state.bytes()), (1, 300));
        completer.complete(Ok(()));
        assert_eq!((state.take_ended().len(), state.bytes()), (2, 100));
        let (last, rest) = state.take_all();
        assert_eq!((last, rest.len(), state.bytes()), (4, 1, 0));
    }
}
