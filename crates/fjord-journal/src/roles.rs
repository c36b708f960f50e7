//! The two roles in a commit, one thread each at a time, and the one way to take them.
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
//! - fast commits are written under the commit lock, and let waiting commits go first.

use std::sync::Arc;

use fjord_block::lock::{Held, MutexGuard, Rank, Turn as LockTurn};

use crate::error::Result;
use crate::journal::{Inner, Journal};
use crate::pipeline::Commit;
use crate::state::State;
use crate::stats;
use crate::transaction::Running;
use crate::waiters::Waiters;

/// What a thread needs next.
pub(crate) enum Next<T> {
    /// Nothing.
    Done(T),
    /// The commit lock, to commit the running transaction or, with a number, that partial commit
    /// of it.
    Commit(Option<u32>),
    /// The commit lock for a fast commit: after all commits that wait.
    FastCommit,
    /// The dispatch of a commit that is frozen.
    Dispatch,
    /// The outcome of a commit that is frozen, or the settle lock.
    Settle(Arc<Commit>),
}

/// Result of waiting for a role.
pub(crate) enum Turn<'a, T> {
    /// No role is needed.
    Outcome(T),
    /// The caller holds the commit lock.
    Commit(CommitLock<'a>),
    /// The caller holds the settle lock.
    Settle(SettleLock<'a>),
}

/// Where a thread waits.
enum Place {
    /// Next to the others that wait for the commit of the running transaction.
    Running(Arc<Waiters>),
    /// Next to the others that wait for a frozen commit.
    Frozen(Arc<Commit>),
    /// Until the commit lock is free.
    CommitLock,
}

/// Result of a try to take the role that a thread needs.
enum Tried<'a, T> {
    Turn(Turn<'a, T>),
    Wait(Place),
}

impl Journal {
    /// Waits until `next` is done, or a role that it needs is free; then takes it. `next` is asked
    /// first, and again after every wait.
    ///
    /// # Errors
    /// Those of `next`; the journal has stopped, and the commit that is waited for has failed. If
    /// the journal has stopped, the commits in flight have an outcome or a thread that settles them.
    pub(crate) fn take_turn<T>(
        &self,
        mut next: impl FnMut(&mut State) -> Result<Next<T>>,
    ) -> Result<Turn<'_, T>> {
        let mut waited = false;
        let mut woken_in = None;
        let orders = Orders::check();
        let mut state = self.inner.state.lock();
        loop {
            let tried = next(&mut state).and_then(|next| self.try_turn(&mut state, next, orders));
            if let Some(list) = woken_in.take() {
                self.inner.pass_on(&state, &list);
            }
            let place = match tried {
                Ok(Tried::Turn(turn)) => return Ok(turn),
                Ok(Tried::Wait(place)) => place,
                Err(error) => {
                    drop(state);
                    self.settle_if_stopped();
                    return Err(error);
                }
            };
            if !std::mem::replace(&mut waited, true) {
                stats::add(&self.inner.counters.commit_waits, 1);
            }
            woken_in = self.wait_in(&mut state, place);
        }
    }

    /// Takes the role that `next` needs, if it is free.
    fn try_turn<T>(
        &self,
        state: &mut State,
        next: Next<T>,
        orders: Orders,
    ) -> Result<Tried<'_, T>> {
        let place = match next {
            Next::Done(outcome) => return Ok(Tried::Turn(Turn::Outcome(outcome))),
            Next::Commit(_) if !state.roles.dispatching => {
                return Ok(Tried::Turn(self.inner.start_dispatching(state, orders)));
            }
            Next::Commit(generation) => match &state.running {
                Some(running) => Place::Running(running.waiters_for(generation).clone()),
                None => Place::CommitLock,
            },
            Next::FastCommit if !state.expects_commits() && state.roles.lock_waiters == 0 => {
                return Ok(Tried::Turn(self.inner.start_dispatching(state, orders)));
            }
            Next::FastCommit | Next::Dispatch => Place::CommitLock,
            Next::Settle(commit) => {
                if commit.has_failed() {
                    self.check_running()?;
                }
                if !state.roles.settling && self.inner.may_settle(state) {
                    if state.pipeline.can_settle() {
                        state.roles.settling = true;
                        let lock = SettleLock { inner: &self.inner, _held: orders.settle.taken() };
                        return Ok(Tried::Turn(Turn::Settle(lock)));
                    }
                    if !state.roles.dispatching {
                        // Commits before the failure have their own outcome.
                        self.check_running()?;
                    }
                }
                Place::Frozen(commit)
            }
        };
        Ok(Tried::Wait(place))
    }

    /// Waits for a signal. Returns the list of the running transaction in which it waited.
    fn wait_in(
        &self,
        state: &mut MutexGuard<'_, State>,
        place: Place,
    ) -> Option<Arc<Waiters>> {
        match place {
            Place::Running(waiters) => {
                self.stop_fast_commit_wait();
                waiters.wait(state);
                if !state.expects_commits() {
                    // Fast commits have let this thread go first.
                    self.inner.commit_lock_freed.notify_all();
                }
                return Some(waiters);
            }
            Place::Frozen(commit) => {
                if let Some(waiters) = commit.waiters.first() {
                    waiters.wait(state);
                }
            }
            Place::CommitLock => self.inner.commit_lock_freed.wait(state),
        }
        None
    }
}

/// The order of both locks, checked before the state lock is taken.
#[derive(Clone, Copy)]
struct Orders {
    commit: LockTurn,
    settle: LockTurn,
}

impl Orders {
    fn check() -> Orders {
        let (commit, settle) = (Rank::CommitLock, Rank::SettleLock);
        Orders { commit: LockTurn::wait_for(commit), settle: LockTurn::wait_for(settle) }
    }
}

impl Inner {
    fn start_dispatching<T>(&self, state: &mut State, orders: Orders) -> Turn<'_, T> {
        state.roles.dispatching = true;
        let (inner, _held) = (self, orders.commit.taken());
        Turn::Commit(CommitLock { inner, _held, settles_next: false })
    }

    /// Whether threads without the commit lock may settle now.
    fn may_settle(&self, state: &State) -> bool {
        self.dual || !state.roles.dispatching
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

    /// The commit lock is free: offers it to one thread that waits to commit, and to all that wait
    /// for it for other reasons.
    fn offer_commit_lock(&self, state: &State) {
        self.commit_lock_freed.notify_all();
        if let Some(running) = &state.running
            && !running.waiters.wake_one()
        {
            running.late_waiters.wake_one();
        }
    }

    /// A thread that was woken in `list` has not taken the commit lock: offers it to another thread
    /// of the list, unless the list belongs to a frozen commit by now.
    fn pass_on(&self, state: &State, list: &Arc<Waiters>) {
        let is_running = |running: &Running| {
            Arc::ptr_eq(&running.waiters, list) || Arc::ptr_eq(&running.late_waiters, list)
        };
        if !state.roles.dispatching && state.running.as_ref().is_some_and(is_running) {
            self.offer_commit_lock(state);
        }
    }

    /// The settle lock is free: offers it to a thread that waits for it, else to one that waits for
    /// a commit in flight.
    fn offer_settle_lock(&self, state: &State) {
        if self.settle_lock_freed.notify_one()
            || !self.may_settle(state)
            || !state.pipeline.can_settle()
        {
            return;
        }
        let mut lists = state.pipeline.in_flight().flat_map(|commit| &commit.waiters);
        lists.any(|waiters| waiters.wake_one());
    }
}

/// The commit lock; released on drop.
pub(crate) struct CommitLock<'a> {
    inner: &'a Inner,
    _held: Held,
    /// The holder asks for the settle lock next.
    settles_next: bool,
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
        let mut state = self.inner.state.lock();
        state.roles.dispatching = false;
        self.inner.offer_commit_lock(&state);
        if !self.settles_next && !state.roles.settling {
            self.inner.offer_settle_lock(&state);
        }
    }
}

/// The settle lock; released on drop.
pub(crate) struct SettleLock<'a> {
    inner: &'a Inner,
    _held: Held,
}

impl Drop for SettleLock<'_> {
    fn drop(&mut self) {
        let mut state = self.inner.state.lock();
        state.roles.settling = false;
        self.inner.offer_settle_lock(&state);
        // The holder of the commit lock may have to settle instead.
        self.inner.commits_follow.notify_all();
    }
}
