//! The calls that commit a transaction: for durability, or for order only.
//!
//! Serial mode: the holder of the commit lock dispatches its commit and settles it. Dual mode: it
//! releases the lock when the commit is dispatched, and every caller waits for its own commit.
//!
//! | device | commits in flight in dual mode |
//! |---|---|
//! | keeps order | up to [`IN_FLIGHT_COUNT_MAX`], dispatched without a wait |
//! | keeps no order | one whose log blocks no flush covers yet, beside those that await the flush after their commit block. The next transaction stays open meanwhile, so later callers join it |

use fjord_block::plant::{Bug, planted};
use fjord_format::types::Tid;

use super::Wants;
use crate::error::{JournalError, Result};
use crate::handle::check_no_open_handle;
use crate::journal::Journal;
use crate::roles::{Claim, Turn};
use crate::state::State;
use crate::transaction::Running;

/// Maximum number of commits in flight; bounds their memory and log space.
const IN_FLIGHT_COUNT_MAX: usize = 8;

impl Journal {
    /// Makes transaction `tid` durable: waits for a commit in progress, or commits. Returns at once
    /// if it is durable.
    pub fn commit(&self, tid: Tid) -> Result<()> {
        check_no_open_handle(self, "a commit")?;
        if self.inner.dual {
            self.dispatch_until(tid, Wants::Durability)?;
            return self.settle_until(|state| state.committed.at_least(tid));
        }
        self.commit_until(
            tid,
            |state| state.committed.at_least(tid),
            |journal| {
                let is_in_flight = journal.inner.state.lock().pipeline.has_in_flight(tid);
                if is_in_flight { journal.settle() } else { journal.commit_one() }
            },
        )
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
        self.dispatch_until(tid, Wants::Order)
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

    /// Dispatches transaction `tid`, unless another thread has.
    fn dispatch_until(&self, tid: Tid, wants: Wants) -> Result<()> {
        let is_dispatched = |state: &State| {
            let runs = |running: &Running| running.transaction.tid == tid;
            let exists = state.next_tid.newer_than(tid);
            state.committed.at_least(tid)
                || exists
                    && !state.running.as_ref().is_some_and(runs)
                    && state.pipeline.is_dispatched(tid)
        };
        self.commit_until(tid, is_dispatched, |journal| {
            journal.wait_for_room_in_flight()?;
            journal.dispatch_one(journal.wants(wants))
        })
    }

    /// Waits until another commit may be in flight. The caller holds the commit lock.
    pub(super) fn wait_for_room_in_flight(&self) -> Result<()> {
        if self.inner.ordered {
            let in_flight = self.inner.state.lock().pipeline.in_flight().count();
            return if in_flight >= IN_FLIGHT_COUNT_MAX { self.settle() } else { Ok(()) };
        }
        loop {
            let mut state = self.inner.state.lock();
            if !state.pipeline.has_unflushed() {
                return Ok(());
            }
            self.check_running()?;
            if state.roles.is_settling() {
                self.inner.commits_follow.wait(&mut state);
                if planted(Bug::FollowerDoesNotLookAgain) {
                    return Ok(());
                }
            } else {
                drop(state);
                self.settle_once()?;
            }
        }
    }

    /// How the commit that follows becomes durable: by its own FUA if no other commit is near, since
    /// a flush that others share costs less than FUA for each.
    pub(super) fn wants(&self, asked: Wants) -> Wants {
        let state = self.inner.state.lock();
        let is_alone = state.pipeline.is_drained() && !state.roles.has_waiting_commits();
        match asked {
            Wants::Durability if self.inner.dual && !is_alone => Wants::SharedFlush,
            other => other,
        }
    }

    /// Takes the commit lock and runs `step`, until `done`.
    fn commit_until(
        &self,
        tid: Tid,
        done: impl Fn(&State) -> bool,
        step: impl Fn(&Journal) -> Result<()>,
    ) -> Result<()> {
        loop {
            let turn = self.take_turn(Claim::Commit, |state| {
                if done(state) {
                    return Ok(Some(()));
                }
                self.check_running()?;
                if !state.next_tid.newer_than(tid) {
                    let message = format!("transaction {tid} does not exist yet");
                    return Err(JournalError::Usage(message));
                }
                Ok(None)
            })?;
            let Turn::Mine(lock) = turn else { return Ok(()) };
            self.avoid_log_wrap()?;
            // That may have settled the commits in flight.
            if !done(&self.inner.state.lock()) {
                step(self)?;
            }
            drop(lock);
        }
    }
}
