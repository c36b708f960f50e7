//! The calls that commit a transaction: for durability, or for order only.
//!
//! Serial mode: the holder of the commit lock dispatches its commit and settles it. Dual mode: it
//! releases the lock when the commit is dispatched, and every caller waits for its own commit.
//!
//! | device | commits in flight in dual mode |
//! |---|---|
//! | keeps order | up to [`IN_FLIGHT_COUNT_MAX`], dispatched without a wait |
//! | keeps no order | one whose log blocks no flush covers yet, beside those that await the flush after their commit block. The next transaction stays open meanwhile, so later callers join it |

use fjord_format::types::Tid;

use super::script::Wants;
use super::turn::{Next, Turn};
use crate::error::{JournalError, Result};
use crate::journal::Journal;
use crate::open_handles::check_no_open_handle;
use crate::state::State;

/// Maximum number of commits in flight; bounds their memory and log space.
const IN_FLIGHT_COUNT_MAX: usize = 8;

impl Journal {
    /// Makes transaction `tid` durable: waits for a commit in progress, or commits. Returns at once
    /// if it is durable.
    pub fn commit(&self, tid: Tid) -> Result<()> {
        self.commit_for(tid, true)
    }

    /// As [`Journal::commit`]; `arrives` as in [`Journal::take_turn`].
    pub(crate) fn commit_for(&self, tid: Tid, arrives: bool) -> Result<()> {
        check_no_open_handle(self, "a commit")?;
        let Some(thread) = &self.inner.thread else { return self.commit_here(tid, arrives) };
        if self.is_committed(tid) {
            return Ok(());
        }
        let journal = self.clone();
        thread.run(move || journal.commit_here(tid, arrives))
    }

    fn commit_here(&self, tid: Tid, mut arrives: bool) -> Result<()> {
        loop {
            match self.take_turn(&mut arrives, |state| self.next_for(state, tid))? {
                Turn::Outcome(()) => return Ok(()),
                Turn::Commit(lock) => {
                    if self.dispatch_running(tid, Wants::Durability)? && self.inner.dual {
                        lock.release_to_settle();
                    }
                }
                Turn::Settle(lock) => {
                    self.settle_until(lock, |state| state.committed.at_least(tid));
                }
            }
        }
    }

    /// Fixes the order of transaction `tid`, without waiting for the device: no ordered write
    /// that is submitted from now on is durable before the transaction is. A later commit, or
    /// [`Journal::finish_commits`], makes it durable. Where the device does not keep order this
    /// is [`Journal::commit`].
    pub fn commit_in_order(&self, tid: Tid) -> Result<()> {
        if !self.inner.ordered {
            return self.commit(tid);
        }
        check_no_open_handle(self, "a commit")?;
        let Some(thread) = &self.inner.thread else { return self.commit_in_order_here(tid) };
        let journal = self.clone();
        thread.run(move || journal.commit_in_order_here(tid))
    }

    fn commit_in_order_here(&self, tid: Tid) -> Result<()> {
        loop {
            let turn = self.take_turn(&mut false, |state| {
                Ok(match self.next_for(state, tid)? {
                    Next::Settle(commit) if commit.is_dispatched() => Next::Done(()),
                    Next::Settle(commit) => {
                        if commit.has_failed() {
                            self.check_running()?;
                        }
                        Next::Dispatch
                    }
                    Next::Commit(_) => Next::CommitInOrder,
                    other => other,
                })
            })?;
            let Turn::Commit(lock) = turn else { return Ok(()) };
            self.dispatch_running(tid, Wants::Order)?;
            drop(lock);
        }
    }

    /// Makes the commits in flight durable ([`Journal::commit_in_order`]): for the commit timer.
    pub fn finish_commits(&self) -> Result<()> {
        let newest = self.inner.state.lock().pipeline.in_flight().last().map(|commit| commit.tid);
        newest.map_or(Ok(()), |tid| self.commit(tid))
    }

    /// Commits the running transaction and waits for commits in progress. Returns the newest
    /// transaction, which is then durable.
    pub fn commit_running(&self) -> Result<Tid> {
        let tid = self.newest_tid();
        self.commit(tid)?;
        Ok(tid)
    }

    /// What a thread needs that waits for transaction `tid`.
    fn next_for(&self, state: &State, tid: Tid) -> Result<Next<()>> {
        if state.committed.at_least(tid) {
            return Ok(Next::Done(()));
        }
        if !state.next_tid.newer_than(tid) {
            self.check_running()?;
            return Err(JournalError::Usage(format!("transaction {tid} does not exist yet")));
        }
        if let Some(commit) = state.pipeline.commit_of(tid) {
            return Ok(Next::Settle(commit.clone()));
        }
        self.check_running()?;
        Ok(Next::Commit(None))
    }

    /// Dispatches transaction `tid` if it is still the running one; in serial mode also settles it.
    /// Returns whether it did. The caller holds the commit lock.
    fn dispatch_running(&self, tid: Tid, wants: Wants) -> Result<bool> {
        let runs = |state: &State| {
            state.running.as_ref().is_some_and(|running| running.transaction.tid == tid)
        };
        self.avoid_log_wrap()?;
        if self.inner.dual || wants == Wants::Order {
            self.wait_for_room_in_flight()?;
        }
        if !runs(&self.inner.state.lock()) {
            return Ok(false);
        }
        let overlaps = self.inner.dual || wants == Wants::Order;
        let wants = if overlaps { self.wants(wants) } else { wants };
        let commit = self.dispatch_one(wants)?;
        if !overlaps || commit.is_durable() {
            self.settle()?;
        }
        Ok(true)
    }

    /// Waits until another commit may be in flight. The caller holds the commit lock.
    pub(super) fn wait_for_room_in_flight(&self) -> Result<()> {
        let in_flight = self.inner.state.lock().pipeline.in_flight().count();
        if in_flight >= IN_FLIGHT_COUNT_MAX { self.settle() } else { Ok(()) }
    }

    /// How the commit that follows becomes durable: by its own FUA if no other commit is near, since
    /// a flush that others share costs less than FUA for each.
    pub(super) fn wants(&self, asked: Wants) -> Wants {
        let state = self.inner.state.lock();
        let is_alone = state.pipeline.is_drained() && !state.has_waiting_commits();
        match asked {
            Wants::Durability if self.inner.dual && self.inner.ordered && !is_alone => {
                Wants::SharedFlush
            }
            other => other,
        }
    }
}
