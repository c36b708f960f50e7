//! Admission: which handles may start, and which must wait.
//!
//! Owns no state. A handle that finds no room commits or checkpoints itself; how much room it takes is
//! [`crate::reservation`]. While a transaction runs that has room, a handle starts at its gate
//! ([`crate::gate`]); else the decision is guarded by the journal's state lock. Invariant: that lock is
//! never held over a commit or a checkpoint.

use std::cell::Cell;
use std::time::Instant;

use fjord_block::Class;
use fjord_block::lock::{Rank, thread_local};
use fjord_block::plant::{Bug, planted};
use fjord_format::types::Tid;

use crate::checkpoint_claims::{Batch, Wanted};
use crate::error::{JournalError, Result};
use crate::handle::Handle;
use crate::journal::Journal;
use crate::open_handles::check_no_open_handle;
use crate::options::JournalLists;
use crate::state::State;
use crate::stats;
use crate::transaction::{Admitted, Phase, Running};

thread_local! {
    /// How often a handle of this thread waited for a commit or a checkpoint before it could start.
    static WAITS: Cell<u64> = const { Cell::new(0) };
}

/// How often handles of the calling thread had to wait for a commit or a checkpoint. Only the
/// difference of two calls is meaningful.
pub fn room_waits_of_this_thread() -> u64 {
    WAITS.get()
}

/// Whether a handle may start.
enum Admission {
    Now,
    /// A commit has locked the running transaction.
    Locked,
    /// The running transaction has to be committed first.
    TransactionFull(Tid),
    /// The log has to be checkpointed first.
    LogFull,
}

impl Journal {
    /// Starts a handle that may add `credits` blocks to the running transaction. Waits while that
    /// transaction is locked by a commit, and commits or checkpoints if it or the log is full.
    ///
    /// Errs if this thread has an open handle, if no transaction can hold that many blocks, and
    /// after the journal has stopped.
    pub fn start(&self, credits: u32) -> Result<Handle> {
        check_no_open_handle(self, "starting a handle")?;
        let admitted = self.admit(credits)?;
        Ok(Handle::new(self.clone(), admitted))
    }

    /// Finds or starts a running transaction with room for `credits` and counts a handle in.
    fn admit(&self, credits: u32) -> Result<Admitted> {
        if credits > self.credits_max() {
            return Err(JournalError::Usage(format!(
                "a handle of {credits} blocks, but a transaction of this journal holds at most {}; \
                 split the change or make the journal larger",
                self.credits_max()
            )));
        }
        if let Some(admitted) = self.admit_at_gate(credits)? {
            return Ok(admitted);
        }
        let mut waiting_since = None;
        let mut state = self.inner.state.lock();
        let admitted = loop {
            self.check_running()?;
            match self.admission(&state, credits) {
                Admission::Now => {
                    if let Some(admitted) = self.enter(&mut state, credits) {
                        break admitted;
                    }
                }
                Admission::Locked => {
                    waiting_since.get_or_insert_with(Instant::now);
                    self.inner.unlocked.wait(&mut state);
                }
                Admission::TransactionFull(_) | Admission::LogFull if self.is_whole_log() => {
                    return Err(JournalError::ReplayTooLarge);
                }
                Admission::TransactionFull(tid) => {
                    waiting_since.get_or_insert_with(Instant::now);
                    WAITS.set(WAITS.get() + 1);
                    drop(state);
                    self.commit(tid)?;
                    state = self.inner.state.lock();
                }
                Admission::LogFull => {
                    waiting_since.get_or_insert_with(Instant::now);
                    WAITS.set(WAITS.get() + 1);
                    drop(state);
                    stats::add(&self.inner.counters.log_full, 1);
                    self.make_room(credits)?;
                    state = self.inner.state.lock();
                }
            }
        };
        if let Some(since) = waiting_since {
            stats::add(&self.inner.counters.start_waits, 1);
            stats::add_time(&self.inner.counters.start_wait_nanoseconds, since.elapsed());
        }
        stats::add(&self.inner.counters.handles, 1);
        Ok(admitted)
    }

    /// Counts a handle in without the state lock. `None` if only that lock's holder can tell what is to be done.
    fn admit_at_gate(&self, credits: u32) -> Result<Option<Admitted>> {
        let Some(transaction) = self.inner.current.load_full() else { return Ok(None) };
        if transaction.gate.enter(credits).is_err() {
            return Ok(None);
        }
        if let Err(error) = self.check_running() {
            self.release(&transaction, credits);
            return Err(error);
        }
        stats::add(&self.inner.counters.handles, 1);
        let generation = transaction.gate.generation();
        Ok(Some(Admitted { transaction, generation, credits }))
    }

    /// Counts a handle into the running transaction, or begins one. `None` if others that do not take the
    /// state lock have taken the room meanwhile.
    fn enter(&self, state: &mut State, credits: u32) -> Option<Admitted> {
        let limit_blocks = self.reservable_blocks(state);
        let transaction = match &state.running {
            Some(running) => {
                running.transaction.gate.set_limit(limit_blocks);
                running.transaction.gate.enter(credits).ok()?;
                running.transaction.clone()
            }
            None => {
                let transaction = state.begin(self.inner.lists, limit_blocks).transaction.clone();
                transaction.gate.enter_as_exception(credits);
                if self.inner.lists == JournalLists::LockFree {
                    self.inner.current.store(Some(transaction.clone()));
                }
                transaction
            }
        };
        let generation = transaction.gate.generation();
        Some(Admitted { transaction, generation, credits })
    }

    fn admission(&self, state: &State, credits: u32) -> Admission {
        let reserved = match &state.running {
            Some(running)
                if running.phase() != Phase::Running && !planted(Bug::HandleDuringFreeze) =>
            {
                return Admission::Locked;
            }
            Some(running) => running.transaction.gate.reserved_blocks(),
            None => 0,
        };
        let need = self.log_blocks_needed(reserved.saturating_add(credits));
        if need > self.transaction_blocks_max() {
            return match &state.running {
                Some(running) => Admission::TransactionFull(running.transaction.tid),
                None => Admission::Now,
            };
        }
        if need > self.free_blocks(state) { Admission::LogFull } else { Admission::Now }
    }

    /// Whether the log must be checkpointed before a handle of `credits` blocks can start.
    fn is_log_full_for(&self, credits: u32) -> bool {
        matches!(self.admission(&self.inner.state.lock(), credits), Admission::LogFull)
    }

    /// Frees space in a full log so that a handle of `credits` blocks can start.
    fn make_room(&self, credits: u32) -> Result<()> {
        let log = self.inner.log_or_usage()?;
        {
            let _shared = self.share_checkpoint(Class::Sync);
            if !self.is_log_full_for(credits) {
                return Ok(());
            }
            // A quarter of the log at once, so that the superblock is not written for each handle.
            let goal = log.len() / 4;
            let may_free = || {
                let state = self.inner.state.lock();
                let keeps = log.distance(state.oldest_needed().1, state.head);
                state.used_blocks.saturating_sub(keeps)
            };
            while self.is_log_full_for(credits) && may_free() < goal {
                let wanted = Wanted::Room(goal.saturating_sub(may_free()));
                let next = self.checkpoint_batch(Class::Sync, None, wanted)?;
                if matches!(next, Batch::Nothing) {
                    break;
                }
            }
            // Another thread may have moved it for this one, too.
            if self.move_tail(log)? || !self.is_log_full_for(credits) {
                return Ok(());
            }
        }
        self.commit_oldest()
    }

    /// Nothing to checkpoint: the log is full of transactions that are not committed.
    fn commit_oldest(&self) -> Result<()> {
        let oldest = {
            let state = self.inner.state.lock();
            let in_flight = state.pipeline.in_flight().next().map(|commit| commit.tid);
            in_flight.or_else(|| state.running.as_ref().map(|slot| slot.transaction.tid))
        };
        oldest.map_or(Ok(()), |tid| self.commit(tid))
    }
}

impl Handle {
    /// Ends this handle and starts another with `credits`, which may be in a later
    /// transaction. The changes so far may be committed without those that follow.
    pub fn restart(&mut self, credits: u32) -> Result<Tid> {
        self.stop_now();
        Rank::CommitLock.check_order();
        let admitted = self.journal().admit(credits)?;
        self.begin(admitted);
        Ok(self.tid())
    }
}

impl State {
    /// Begins a transaction; none is running.
    fn begin(&mut self, lists: JournalLists, limit_blocks: u32) -> &Running {
        let tid = self.next_tid;
        self.next_tid = tid.next();
        self.running.insert(Running::new(tid, lists, limit_blocks))
    }
}
