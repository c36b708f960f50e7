//! Turns: a thread that wants a commit waits for its outcome, or takes the role that it needs.
//!
//! A thread waits in the list of its commit ([`crate::waiters`]), and is woken when the commit has an
//! outcome, when it is the one that a free role is offered to ([`crate::roles`]), or when it may write pieces of
//! the commit ([`super::pieces`]).
//!
//! Owns no state. Invariant: no thread leaves with an error while a commit in flight has neither an
//! outcome nor a thread that settles it.

use std::sync::Arc;
use std::time::Instant;

use fjord_block::lock::{MutexGuard, Rank, Turn as LockTurn};

use crate::commit_pieces::CommitPieces;
use crate::error::Result;
use crate::journal::{Inner, Journal};
use crate::pipeline::Commit;
use crate::roles::{CommitLock, SettleLock, Woken};
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
    /// The same for order only: at once.
    CommitInOrder,
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

/// What a thread waits for.
enum WaitFor {
    /// The commit of the running transaction, in this list of it.
    Running(Arc<Waiters>),
    /// A frozen commit.
    Frozen(Arc<Commit>),
    /// The commit lock.
    CommitLock,
}

/// Result of a try to take the role that a thread needs.
enum Tried<'a, T> {
    Turn(Turn<'a, T>),
    /// No role, but pieces of the commit that is waited for.
    Help(Arc<CommitPieces>),
    Wait(WaitFor),
}

impl Journal {
    /// Waits until `next` is done, or a role that it needs is free; then takes it. `next` is asked
    /// first, and again after every wait. `arrives`: the call counts as a caller
    /// of the commit; false as soon as it has been counted.
    ///
    /// # Errors
    /// Those of `next`; the journal has stopped, and the commit that is waited for has failed. If
    /// the journal has stopped, the commits in flight have an outcome or a thread that settles them.
    pub(crate) fn take_turn<T>(
        &self,
        arrives: &mut bool,
        mut next: impl FnMut(&mut State) -> Result<Next<T>>,
    ) -> Result<Turn<'_, T>> {
        let mut waited = false;
        let mut woken = Woken::default();
        let orders = Orders::check();
        let mut state = self.inner.state.lock();
        loop {
            let tried = next(&mut state).and_then(|next| {
                match next {
                    Next::Commit(_) if std::mem::take(arrives) => self.arrive(&mut state),
                    Next::Settle(_) if std::mem::take(arrives) => self.arrive_late(&mut state),
                    _ => {}
                }
                self.try_turn(&mut state, next, orders)
            });
            let until = match &tried {
                Ok(Tried::Wait(WaitFor::Running(_) | WaitFor::Frozen(_))) => {
                    state.late_joiners.watch()
                }
                _ => None,
            };
            self.inner.pass_on(&state, std::mem::take(&mut woken));
            let waits_for = match tried {
                Ok(Tried::Turn(turn)) => return Ok(turn),
                Ok(Tried::Wait(waits_for)) => waits_for,
                Ok(Tried::Help(pieces)) => {
                    MutexGuard::unlocked(&mut state, || self.help(&pieces));
                    continue;
                }
                Err(error) => {
                    drop(state);
                    self.settle_if_stopped();
                    return Err(error);
                }
            };
            if !std::mem::replace(&mut waited, true) {
                stats::add(&self.inner.counters.commit_waits, 1);
            }
            woken = self.wait_in(&mut state, waits_for, until);
        }
    }

    /// A caller asks for a commit of the running transaction.
    pub(crate) fn arrive(&self, state: &mut State) {
        if let Some(running) = &mut state.running {
            running.callers += 1;
        }
        self.arrive_late(state);
    }

    /// A caller asks for a commit, perhaps a frozen one: no commit need wait for it any more.
    pub(crate) fn arrive_late(&self, state: &mut State) {
        if state.late_joiners.arrived() {
            self.inner.offer_roles(state);
        }
    }

    /// Takes the role that `next` needs, if it is free.
    fn try_turn<T>(
        &self,
        state: &mut State,
        next: Next<T>,
        orders: Orders,
    ) -> Result<Tried<'_, T>> {
        let waits_for = match next {
            Next::Done(outcome) => return Ok(Tried::Turn(Turn::Outcome(outcome))),
            Next::Commit(_) if self.inner.may_commit(state) => {
                return Ok(Tried::Turn(self.inner.start_dispatching(state, orders)));
            }
            Next::CommitInOrder if self.inner.may_dispatch(state) => {
                return Ok(Tried::Turn(self.inner.start_dispatching(state, orders)));
            }
            Next::Commit(generation) => match &state.running {
                Some(running) => WaitFor::Running(running.waiters_for(generation).clone()),
                None => WaitFor::CommitLock,
            },
            Next::FastCommit if !state.expects_commits() && state.roles.lock_waiters == 0 => {
                return Ok(Tried::Turn(self.inner.start_dispatching(state, orders)));
            }
            Next::CommitInOrder | Next::FastCommit | Next::Dispatch => WaitFor::CommitLock,
            Next::Settle(commit) => {
                if commit.has_failed() {
                    self.check_running()?;
                }
                if !state.roles.settling && self.inner.may_begin_round(state) {
                    state.roles.settling = true;
                    let lock = SettleLock { inner: &self.inner, _held: orders.settle.taken() };
                    return Ok(Tried::Turn(Turn::Settle(lock)));
                }
                if let Some(pieces) = commit.shared_pieces() {
                    return Ok(Tried::Help(pieces));
                }
                WaitFor::Frozen(commit)
            }
        };
        Ok(Tried::Wait(waits_for))
    }

    /// Waits for a signal; as the watcher of late joiners, `until` then.
    fn wait_in(
        &self,
        state: &mut MutexGuard<'_, State>,
        waits_for: WaitFor,
        until: Option<Instant>,
    ) -> Woken {
        let mut woken = Woken { list: None, watched: until.is_some() };
        let timed_out = match waits_for {
            WaitFor::Running(waiters) => {
                self.stop_fast_commit_wait();
                let timed_out = waiters.wait(state, until);
                if !state.expects_commits() {
                    // Fast commits have let this thread go first.
                    self.inner.commit_lock_freed.notify_all();
                }
                woken.list = Some(waiters);
                timed_out
            }
            WaitFor::Frozen(commit) => {
                commit.waiters.first().is_some_and(|waiters| waiters.wait(state, until))
            }
            WaitFor::CommitLock => {
                self.inner.commit_lock_freed.wait(state);
                false
            }
        };
        if woken.watched {
            state.late_joiners.watch_ended(timed_out);
        }
        woken
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
