//! The two roles in a commit, one thread each at a time.
//!
//! | role | lock | may |
//! |---|---|---|
//! | dispatch | commit lock | lock and freeze the running transaction, take log blocks, submit |
//! | settle | settle lock | wait until dispatched commits are durable, retire them |
//!
//! A thread that wants a commit waits in the list of that commit ([`crate::waiters`]), and is woken
//! when the commit has an outcome, or when it is the one that a free role is offered to. So a role
//! that becomes free wakes one thread, and the end of a commit wakes the threads of that commit.
//!
//! Invariants:
//! - the commit lock is taken before the settle lock; both may be held over I/O; both are released
//!   also by a panic of a callback, so that no thread waits forever;
//! - while a role is free, there is work for it and threads wait for that work, one of them is
//!   awake: the thread that released the role has woken it, or it has not slept yet. A thread that
//!   is woken and does not take the role passes the offer on, unless another thread has the role,
//!   which offers it again;
//! - in serial mode the holder of the commit lock settles its commit; other threads settle only
//!   while the commit lock is free;
//! - in dual mode a commit waits until it has as many callers as those in flight, and for late
//!   joiners ([`crate::late_joiners`]); calls for order only do not wait;
//! - fast commits are written under the commit lock, and let waiting commits go first.

use std::sync::Arc;

use fjord_block::lock::{Held, MutexGuard, Rank, Turn as LockTurn};
use fjord_block::plant::{Bug, planted};

use crate::journal::Inner;
use crate::pipeline::Commit;
use crate::state::State;
use crate::transaction::Running;
use crate::waiters::Waiters;

impl Inner {
    /// Whether threads without the commit lock may settle now.
    fn may_settle(&self, state: &State) -> bool {
        self.dual || !state.roles.dispatching
    }

    /// Whether a commit may be dispatched now. A device that keeps no order has one commit at a time
    /// with log blocks that no flush covers; the next transaction stays open meanwhile, so that later
    /// threads join it.
    pub(crate) fn may_dispatch(&self, state: &State) -> bool {
        let has_unflushed = || state.pipeline.has_unflushed() && !planted(Bug::DispatchedUnflushed);
        !state.roles.dispatching && (self.ordered || !has_unflushed())
    }

    /// Whether the running transaction has as many callers as all commits in flight, or more. In dual
    /// mode it waits until then, so that commits that overlap do not become small.
    fn has_enough_callers(&self, state: &State) -> bool {
        !self.dual || state.compare_callers().is_ge()
    }

    /// Whether a commit for callers that wait until it is durable may begin now.
    pub(crate) fn may_commit(&self, state: &State) -> bool {
        let are_all_here = || state.late_joiners.awaited_until().is_none();
        self.may_dispatch(state) && self.has_enough_callers(state) && are_all_here()
    }

    /// Whether a round waits for late joiners: over a device that keeps order, its flush covers all
    /// that is dispatched before it.
    fn round_waits(&self, state: &State) -> bool {
        self.ordered && state.late_joiners.awaited_until().is_some()
    }

    /// Whether a thread without the commit lock may begin a round, if the settle lock is free.
    pub(crate) fn may_begin_round(&self, state: &State) -> bool {
        self.may_settle(state) && state.pipeline.can_settle() && !self.round_waits(state)
    }

    /// Takes the commit lock if it is free, that many threads wait for a commit, and no handle is
    /// open, so that the commit can begin at once.
    pub(crate) fn try_lock_commits(&self, threads_min: u32) -> Option<CommitLock<'_>> {
        let mut state = self.state.lock();
        let is_ready = |running: &Running| {
            running.waiter_count() >= threads_min && running.transaction.gate.handle_count() == 0
        };
        if !self.may_dispatch(&state) || !state.running.as_ref().is_some_and(is_ready) {
            return None;
        }
        state.roles.dispatching = true;
        let _held = LockTurn::try_for(Rank::CommitLock).taken();
        Some(CommitLock { inner: self, _held, settles_next: false })
    }

    /// Takes the commit lock; waits while another thread has it.
    pub(crate) fn lock_commits(&self) -> CommitLock<'_> {
        let order = LockTurn::wait_for(Rank::CommitLock);
        let mut state = self.state.lock();
        state.roles.lock_waiters += 1;
        while state.roles.dispatching {
            self.commit_lock_freed.wait(&mut state);
        }
        state.roles.lock_waiters -= 1;
        state.roles.dispatching = true;
        CommitLock { inner: self, _held: order.taken(), settles_next: false }
    }

    /// Takes the settle lock; waits while another thread has it.
    pub(crate) fn lock_settling(&self) -> SettleLock<'_> {
        let order = LockTurn::wait_for(Rank::SettleLock);
        let mut state = self.state.lock();
        while state.roles.settling {
            if planted(Bug::SleepsWithoutLooking) {
                MutexGuard::unlocked(&mut state, || ());
            }
            self.settle_lock_freed.wait(&mut state);
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

    /// Releases the commit lock; `settles_next` as in [`CommitLock::release_to_settle`].
    pub(crate) fn release_commit_lock(&self, settles_next: bool) {
        let mut state = self.state.lock();
        state.roles.dispatching = false;
        self.offer_commit_lock(&state);
        if !settles_next {
            self.offer_settle_lock(&state);
        }
    }

    /// If the commit lock is free: offers it to one thread that waits to commit, and to all that wait
    /// for it for other reasons.
    pub(crate) fn offer_commit_lock(&self, state: &State) {
        if state.roles.dispatching {
            return;
        }
        self.commit_lock_freed.notify_all();
        if self.may_dispatch(state)
            && self.has_enough_callers(state)
            && !state.late_joiners.are_watched()
            && let Some(running) = &state.running
            && !running.waiters.wake_one()
        {
            running.late_waiters.wake_one();
        }
    }

    /// A thread that was woken, perhaps since a role was offered to it, goes on: offers what it has not
    /// taken to another thread. If the list in which it waited belongs to a frozen commit by now, the
    /// thread was not woken for the commit lock.
    pub(crate) fn pass_on(&self, state: &State, woken: Woken) {
        let is_running = |running: &Running| {
            woken.list.as_ref().is_some_and(|list| {
                Arc::ptr_eq(&running.waiters, list) || Arc::ptr_eq(&running.late_waiters, list)
            })
        };
        if woken.watched || state.running.as_ref().is_some_and(is_running) {
            self.offer_commit_lock(state);
        }
        if (woken.watched || woken.list.is_some()) && !planted(Bug::OfferLost) {
            self.offer_settle_lock(state);
        }
    }

    /// Offers both roles, if they are free: what was waited for has changed.
    pub(crate) fn offer_roles(&self, state: &State) {
        self.offer_commit_lock(state);
        self.offer_settle_lock(state);
    }

    /// If the settle lock is free: offers it to a thread that waits for it, else to one that waits for
    /// a commit that can be settled.
    fn offer_settle_lock(&self, state: &State) {
        if state.roles.settling || self.settle_lock_freed.notify_one() || !self.may_settle(state) {
            return;
        }
        let is_watched = self.round_waits(state) && state.late_joiners.are_watched();
        if !state.pipeline.can_settle() || is_watched {
            return;
        }
        let is_for_it = |commit: &&Arc<Commit>| commit.can_settle() || planted(Bug::OfferLost);
        let can_settle = state.pipeline.in_flight().filter(is_for_it);
        can_settle.flat_map(|commit| &commit.waiters).any(|waiters| waiters.wake_one());
    }
}

/// How a thread waited.
#[derive(Default)]
pub(crate) struct Woken {
    /// In this list of the running transaction.
    pub(crate) list: Option<Arc<Waiters>>,
    /// It was the watcher of [`crate::late_joiners`].
    pub(crate) watched: bool,
}

/// The commit lock; released on drop.
pub(crate) struct CommitLock<'a> {
    pub(crate) inner: &'a Inner,
    pub(crate) _held: Held,
    /// The holder asks for the settle lock next.
    pub(crate) settles_next: bool,
}

impl CommitLock<'_> {
    /// Releases the lock. The caller has dispatched a commit and settles next, so that no other
    /// thread need be woken for that.
    pub(crate) fn release_to_settle(mut self) {
        self.settles_next = true;
    }
}

impl Drop for CommitLock<'_> {
    fn drop(&mut self) {
        self.inner.release_commit_lock(self.settles_next);
    }
}

/// The settle lock; released on drop.
pub(crate) struct SettleLock<'a> {
    pub(crate) inner: &'a Inner,
    pub(crate) _held: Held,
}

impl Drop for SettleLock<'_> {
    fn drop(&mut self) {
        let mut state = self.inner.state.lock();
        state.roles.settling = false;
        if !planted(Bug::SettleLockWakesNobody) {
            self.inner.offer_settle_lock(&state);
        }
    }
}
