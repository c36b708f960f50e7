//! The two roles in a commit, one thread each at a time, and the one way to take them.
//!
//! | role | lock | may |
//! |---|---|---|
//! | dispatch | commit lock | lock and freeze the running transaction, take log blocks, submit |
//! | settle | settle lock | wait until dispatched commits are durable, retire them |
//!
//! Invariants: the commit lock is taken before the settle lock; both may be held over I/O; both are
//! released also by a panic of a callback, so that no thread waits forever. Fast commits are written
//! under the commit lock, and let waiting commits go first.

use fjord_block::lock::{Held, MutexGuard, Rank, Turn as LockTurn};
use fjord_block::plant::{Bug, planted};

use crate::error::Result;
use crate::journal::{Inner, Journal};
use crate::state::State;
use crate::stats;

/// Guarded by `Inner::state`.
#[derive(Default)]
pub(crate) struct Roles {
    /// A thread holds the commit lock.
    dispatching: bool,
    /// A thread holds the settle lock.
    settling: bool,
    /// Threads that wait for the commit lock to commit.
    commits_waiting: u32,
}

/// Purpose of a claim to the commit lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Claim {
    /// A commit.
    Commit,
    /// A fast commit: after all commits that wait.
    FastCommit,
}

/// Result of waiting for the commit lock.
pub(crate) enum Turn<'a, T> {
    /// The lock is not needed.
    Outcome(T),
    /// The caller holds the lock.
    Mine(CommitLock<'a>),
}

impl Roles {
    /// Whether threads wait for the commit lock to commit.
    pub(crate) fn has_waiting_commits(&self) -> bool {
        self.commits_waiting > 0
    }

    /// Whether a thread holds the commit lock or waits for it to commit.
    pub(crate) fn expects_commits(&self) -> bool {
        self.dispatching || self.commits_waiting > 0
    }

    /// Whether a thread holds the settle lock.
    pub(crate) fn is_settling(&self) -> bool {
        self.settling
    }

    fn admits(&self, claim: Claim) -> bool {
        !self.dispatching && (claim == Claim::Commit || self.commits_waiting == 0)
    }
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
            if planted(Bug::SleepsWithoutLooking) {
                MutexGuard::unlocked(&mut state, || ());
            }
            self.settle_moved.wait(&mut state);
        }
        state.roles.settling = true;
        SettleLock { inner: self, _held: order.taken() }
    }

    /// Takes the settle lock if it is free.
    pub(crate) fn try_lock_settling(&self) -> Option<SettleLock<'_>> {
        let was_taken = std::mem::replace(&mut self.state.lock().roles.settling, true);
        let lock =
            || SettleLock { inner: self, _held: LockTurn::try_for(Rank::SettleLock).taken() };
        if planted(Bug::AttemptReleasesSettleLock) {
            return (!was_taken).then_some(lock());
        }
        // Not `then_some`: a lock that is made and dropped would release that of another thread.
        (!was_taken).then(lock)
    }

    pub(crate) fn release_commit_lock(&self) {
        self.state.lock().roles.dispatching = false;
        self.commits_moved.notify_all();
    }
}

/// The commit lock; released on drop.
pub(crate) struct CommitLock<'a> {
    inner: &'a Inner,
    _held: Held,
}

impl Drop for CommitLock<'_> {
    fn drop(&mut self) {
        self.inner.release_commit_lock();
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
        if !planted(Bug::SettleLockWakesNobody) {
            self.inner.settle_moved.notify_all();
        }
        // The holder of the commit lock may have to settle instead.
        if !planted(Bug::FollowerNotWoken) {
            self.inner.commits_follow.notify_all();
        }
    }
}
