//! The reservation of log space: how many log blocks a transaction needs, and the credits of handles.
//!
//! Invariant: the log blocks of a running transaction are reserved before its handles may use them,
//! so that a commit never runs out of log. Everything is guarded by the journal's state lock.

use std::sync::atomic::Ordering;

use fjord_block::plant::{Bug, planted};

use crate::journal::Journal;
use crate::state::State;
use crate::transaction::Phase;

/// Blocks that [`Parts::before_whole_commit`](crate::Parts::before_whole_commit) may add to a
/// transaction.
pub(crate) const ADDED_BLOCKS: u32 = 1;

impl Journal {
    /// Most credits that a handle can start with.
    pub fn credits_max(&self) -> u32 {
        let max = self.transaction_blocks_max();
        let Some(log) = &self.inner.log else { return max };
        let per_descriptor = (log.format.tags_per_descriptor() as u32).max(1);
        let hidden = u32::from(self.inner.area.is_some());
        max.saturating_sub(2 + hidden + max / per_descriptor)
    }

    /// While on, one transaction may use the whole log, and a handle that does not fit is an error
    /// instead of a reason to commit: all changes are one transaction. For a single-threaded
    /// caller, such as one that applies
    /// [`RecoveryReport::fast_commit_records`](crate::RecoveryReport::fast_commit_records).
    pub fn whole_log(&self, on: bool) {
        self.inner.whole_log.store(on, Ordering::Release);
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

    /// Whether one transaction may use the whole log.
    pub(crate) fn is_whole_log(&self) -> bool {
        self.inner.whole_log.load(Ordering::Acquire)
    }

    /// Most log blocks of a transaction.
    pub(crate) fn transaction_blocks_max(&self) -> u32 {
        match &self.inner.log {
            Some(log) if self.is_whole_log() => log.len().saturating_sub(1),
            _ => self.inner.transaction_blocks_max,
        }
    }

    /// Log blocks that nothing uses and a transaction may.
    pub(crate) fn free_blocks(&self, state: &State) -> u32 {
        // One block stays free, so that a full log is distinct from an empty one.
        let Some(log) = &self.inner.log else { return u32::MAX };
        log.len().saturating_sub(1).saturating_sub(state.used_blocks)
    }
}
