//! Waiting for the commit lock, unless other commits make it unnecessary.
//!
//! Owns no state. Invariant: nobody leaves with an error while a commit in flight has neither an outcome
//! nor a thread that settles it.

use fjord_block::lock::{MutexGuard, Rank, Turn as LockTurn};

use crate::error::Result;
use crate::journal::Journal;
use crate::roles::CommitLock;
use crate::state::{Claim, State};
use crate::stats;

/// Result of waiting for the commit lock.
pub(crate) enum Turn<'a, T> {
    /// The lock is not needed.
    Outcome(T),
    /// The caller holds the lock.
    Mine(CommitLock<'a>),
}

impl Journal {
    /// Waits until `outcome` gives a result, or the commit lock is free; then takes it. `outcome` is
    /// asked first, and again after every change of the pipeline.
    ///
    /// # Errors
    /// Those of `outcome`; if the journal has stopped, the commits in flight have an outcome or a
    /// thread that settles them.
    pub(crate) fn take_turn<T>(
        &self,
        claim: Claim,
        mut outcome: impl FnMut(&mut State) -> Result<Option<T>>,
    ) -> Result<Turn<'_, T>> {
        let mut waited = false;
        let order = LockTurn::wait_for(Rank::CommitLock);
        let mut state = self.inner.state.lock();
        loop {
            match outcome(&mut state) {
                Ok(Some(outcome)) => return Ok(Turn::Outcome(outcome)),
                Ok(None) => {}
                Err(error) => {
                    drop(state);
                    self.settle_if_stopped();
                    return Err(error);
                }
            }
            if state.roles.admits(claim) {
                state.roles.dispatching = true;
                return Ok(Turn::Mine(CommitLock { inner: &self.inner, _held: order.taken() }));
            }
            if claim == Claim::Commit {
                if !std::mem::replace(&mut waited, true) {
                    stats::add(&self.inner.counters.commit_waits, 1);
                }
                self.wait_to_commit(&mut state);
            } else {
                self.inner.commits_moved.wait(&mut state);
            }
        }
    }

    fn wait_to_commit(&self, state: &mut MutexGuard<'_, State>) {
        state.roles.commits_waiting += 1;
        self.stop_fast_commit_wait();
        self.inner.commits_moved.wait(state);
        state.roles.commits_waiting -= 1;
        if state.roles.commits_waiting == 0 {
            self.inner.commits_moved.notify_all();
        }
    }
}
