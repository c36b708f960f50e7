//! The two roles in a commit, one thread each at a time, and their locks. A caller that may not need the
//! commit lock takes it by `Journal::take_turn`, in the commit's module `turn`.
//!
//! | role | lock | may |
//! |---|---|---|
//! | dispatch | commit lock | lock and freeze the running transaction, take log blocks, submit |
//! | settle | settle lock | wait until dispatched commits are durable, retire them |
//!
//! Invariants: the commit lock is taken before the settle lock; both may be held over I/O; both are
//! released also by a panic of a callback, so that no thread waits forever. Fast commits are written
//! under the commit lock, and let waiting commits go first.

use fjord_block::lock::{Held, Rank, Turn as LockTurn};

use crate::error::Result;
use crate::journal::{Inner, Journal};
use crate::state::State;

impl Journal {
    /// Waits until `done`, or the settle lock is free and some commit can be settled; then takes it.
    ///
    /// # Errors
    /// The journal has stopped, and no commit in flight can fulfil `done`.
    pub(crate) fn take_settle_turn(
        &self,
        done: impl Fn(&State) -> bool,
    ) -> Result<Option<SettleLock<'_>>> {
        let order = LockTurn::wait_for(Rank::SettleLock);
        let mut state = self.inner.state.lock();
        loop {
            if done(&state) {
                return Ok(None);
            }
            if !state.roles.settling {
                if state.pipeline.can_settle() {
                    state.roles.settling = true;
                    return Ok(Some(SettleLock { inner: &self.inner, _held: order.taken() }));
                }
                // Commits before the failure have their own outcome.
                self.check_running()?;
            }
            self.inner.settle_moved.wait(&mut state);
        }
    }
}

impl Inner {
    /// Takes the commit lock; waits while another thread has it.
    pub(crate) fn lock_commits(&self) -> CommitLock<'_> {
        let order = LockTurn::wait_for(Rank::CommitLock);
        let mut state = self.state.lock();
        while state.roles.dispatching {
            self.commits_moved.wait(&mut state);
        }
        state.roles.dispatching = true;
        CommitLock { inner: self, _held: order.taken() }
    }

    /// Takes the settle lock; waits while another thread has it.
    pub(crate) fn lock_settling(&self) -> SettleLock<'_> {
        let order = LockTurn::wait_for(Rank::SettleLock);
        let mut state = self.state.lock();
        while state.roles.settling {
            self.settle_moved.wait(&mut state);
        }
        state.roles.settling = true;
        SettleLock { inner: self, _held: order.taken() }
    }

    /// Takes the settle lock if it is free.
    pub(crate) fn try_lock_settling(&self) -> Option<SettleLock<'_>> {
        let was_taken = std::mem::replace(&mut self.state.lock().roles.settling, true);
        // Not `then_some`: a lock that is made and dropped would release that of another thread.
        (!was_taken)
            .then(|| SettleLock { inner: self, _held: LockTurn::try_for(Rank::SettleLock).taken() })
    }
}

/// The commit lock; released on drop.
pub(crate) struct CommitLock<'a> {
    pub(crate) inner: &'a Inner,
    pub(crate) _held: Held,
}

impl Drop for CommitLock<'_> {
    fn drop(&mut self) {
        self.inner.state.lock().roles.dispatching = false;
        self.inner.commits_moved.notify_all();
    }
}

/// The settle lock; released on drop.
pub(crate) struct SettleLock<'a> {
    inner: &'a Inner,
    _held: Held,
}

impl Drop for SettleLock<'_> {
    fn drop(&mut self) {
        self.inner.state.lock().roles.settling = false;
        self.inner.settle_moved.notify_all();
        // The holder of the commit lock may have to settle instead.
        self.inner.commits_follow.notify_all();
    }
}
