//! Turns: a thread that wants a commit waits for its outcome, or takes the role that it needs.
//!
//! A thread waits in the list of its commit ([`crate::waiters`]), and is woken when the commit has an
//! outcome, or when it is the one that a free role is offered to ([`crate::roles`]).
//!
//! Owns no state. Invariant: no thread leaves with an error while a commit in flight has neither an
//! outcome nor a thread that settles it.

use std::sync::Arc;

use fjord_block::lock::{MutexGuard, Rank, Turn as LockTurn};

use crate::error::Result;
use crate::journal::{Inner, Journal};
use crate::pipeline::Commit;
use crate::roles::{CommitLock, SettleLock};
use crate::state::State;
use crate::stats;
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
        let mut woken = None;
        let orders = Orders::check();
        let mut state = self.inner.state.lock();
        loop {
            let tried = next(&mut state).and_then(|next| self.try_turn(&mut state, next, orders));
            if let Some(list) = woken.take() {
                self.inner.pass_on(&state, list);
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
            woken = Some(self.wait_in(&mut state, place));
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
            Next::Commit(_) if self.inner.may_dispatch(state) => {
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
                let may_settle = !state.roles.settling && self.inner.may_settle(state);
                if may_settle && state.pipeline.can_settle() {
                    state.roles.settling = true;
                    let lock = SettleLock { inner: &self.inner, _held: orders.settle.taken() };
                    return Ok(Tried::Turn(Turn::Settle(lock)));
                }
                Place::Frozen(commit)
            }
        };
        Ok(Tried::Wait(place))
    }

    /// Waits for a signal. Returns the list of the running transaction in which it waited.
    fn wait_in(&self, state: &mut MutexGuard<'_, State>, place: Place) -> Option<Arc<Waiters>> {
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
}
