//! Admission: which handles may start, and which must wait.
//!
//! Owns the reservation of log space. Invariant: the log blocks of a running transaction are
//! reserved before its handles may use them, so that a commit never runs out of log. Everything is
//! guarded by the journal's state lock, which is never held over a commit or a checkpoint.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use fjord_block::lock::thread_local;
use fjord_block::plant::{Bug, planted};
use fjord_format::types::Tid;

use crate::error::{JournalError, Result};
use crate::journal::Journal;
use crate::part::ADDED_BLOCKS;
use crate::state::State;
use crate::stats;
use crate::transaction::{Phase, Running, Transaction};

thread_local! {
    /// How often a handle of this thread waited for a commit or a checkpoint before it could start.
    static WAITS: Cell<u64> = const { Cell::new(0) };
}

/// How often handles of the calling thread had to wait for a commit or a checkpoint. Only the
/// difference of two calls is meaningful.
pub fn room_waits_of_this_thread() -> u64 {
    WAITS.get()
}

/// Grant of a started handle.
pub(crate) struct Admitted {
    pub(crate) transaction: Arc<Transaction>,
    pub(crate) generation: u32,
    pub(crate) credits: u32,
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
    /// Finds or starts a running transaction with room for `credits` and counts a handle in.
    pub(crate) fn admit(&self, credits: u32) -> Result<Admitted> {
        if credits > self.credits_max() {
            return Err(JournalError::Usage(format!(
                "a handle of {credits} blocks, but a transaction of this journal holds at most {}; \
                 split the change or make the journal larger",
                self.credits_max()
            )));
        }
        let mut waiting_since = None;
        let mut state = self.inner.state.lock();
        loop {
            self.check_running()?;
            match self.admission(&state, credits) {
                Admission::Now => break,
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
        }
        if let Some(since) = waiting_since {
            stats::add(&self.inner.counters.start_waits, 1);
            stats::add_time(&self.inner.counters.start_wait_nanoseconds, since.elapsed());
        }
        stats::add(&self.inner.counters.handles, 1);
        let running = state.running_or_new();
        running.handles += 1;
        running.reserved_blocks += credits;
        let (transaction, generation) = (running.transaction.clone(), running.generation);
        Ok(Admitted { transaction, generation, credits })
    }

    fn admission(&self, state: &State, credits: u32) -> Admission {
        let reserved = match &state.running {
            Some(running)
                if running.phase != Phase::Running && !planted(Bug::HandleDuringFreeze) =>
            {
                return Admission::Locked;
            }
            Some(running) => running.reserved_blocks,
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
    pub(crate) fn is_log_full_for(&self, credits: u32) -> bool {
        matches!(self.admission(&self.inner.state.lock(), credits), Admission::LogFull)
    }

    /// Grants credits to an open handle if the running transaction and the log have room.
    pub(crate) fn extend(&self, credits: u32) -> bool {
        let mut state = self.inner.state.lock();
        let free = self.free_blocks(&state);
        let Some(running) = &mut state.running else { return false };
        let wanted = running.reserved_blocks.saturating_add(credits);
        let need = self.log_blocks_needed(wanted);
        if need > self.transaction_blocks_max() || need > free {
            return false;
        }
        running.reserved_blocks = wanted;
        true
    }

    /// Returns the unused `credits` of a stopped handle.
    pub(crate) fn release(&self, credits: u32) {
        let mut state = self.inner.state.lock();
        if let Some(running) = &mut state.running {
            running.reserved_blocks = running.reserved_blocks.saturating_sub(credits);
            running.handles = running.handles.saturating_sub(1);
            let is_last = running.handles == 0 && running.phase == Phase::Locked;
            if is_last && !planted(Bug::LastHandleWakesNobody) {
                self.inner.drained.notify_all();
            }
        }
    }

    /// Log blocks of a transaction with `blocks` buffers and revoke blocks.
    pub(crate) fn log_blocks_needed(&self, blocks: u32) -> u32 {
        let Some(log) = &self.inner.log else { return 0 };
        let added = if self.parts().is_some() { ADDED_BLOCKS } else { 0 };
        // A full commit that ends a fast-commit stream leaves a block unused.
        let hidden = u32::from(self.inner.area.is_some());
        let blocks = blocks.saturating_add(added);
        let per_descriptor = (log.format.tags_per_descriptor() as u32).max(1);
        blocks.saturating_add(blocks.div_ceil(per_descriptor)).saturating_add(1 + hidden)
    }

    fn is_whole_log(&self) -> bool {
        self.inner.whole_log.load(Ordering::Acquire)
    }

    pub(crate) fn transaction_blocks_max(&self) -> u32 {
        match &self.inner.log {
            Some(log) if self.is_whole_log() => log.len().saturating_sub(1),
            _ => self.inner.transaction_blocks_max,
        }
    }

    pub(crate) fn free_blocks(&self, state: &State) -> u32 {
        // One block stays free, so that a full log is distinct from an empty one.
        let Some(log) = &self.inner.log else { return u32::MAX };
        log.len().saturating_sub(1).saturating_sub(state.used_blocks)
    }
}

impl State {
    /// The running transaction; starts one if there is none.
    fn running_or_new(&mut self) -> &mut Running {
        let next_tid = &mut self.next_tid;
        self.running.get_or_insert_with(|| {
            let tid = *next_tid;
            *next_tid = tid.next();
            Running::new(tid)
        })
    }
}
