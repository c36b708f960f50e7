//! The reservation of log space: how many log blocks a transaction needs, and the credits of handles.
//!
//! Invariant: the log blocks of a running transaction are reserved before its handles may use them,
//! so that a commit never runs out of log: the limit of its gate is set under the journal's state lock.

use std::sync::atomic::Ordering;

use fjord_block::plant::{Bug, planted};

use crate::journal::Journal;
use crate::log::Log;
use crate::options::JournalLists;
use crate::state::State;
use crate::transaction::Transaction;

/// Blocks that [`LastChanges`](crate::LastChanges) may add to a transaction.
pub(crate) const ADDED_BLOCKS: u32 = 1;

impl Journal {
    /// Most credits that a handle can start with.
    pub fn credits_max(&self) -> u32 {
        let max = self.transaction_blocks_max();
        self.inner.log.as_ref().map_or(max, |log| self.blocks_in(log, max))
    }

    /// Most blocks of a transaction that takes so many log blocks.
    fn blocks_in(&self, log: &Log, log_blocks: u32) -> u32 {
        let added = if self.last_changes().is_some() { ADDED_BLOCKS } else { 0 };
        // A full commit that ends a fast-commit stream leaves a block unused.
        let hidden = u32::from(self.inner.area.is_some());
        let room = u64::from(log_blocks.saturating_sub(1 + hidden));
        // Of each so many blocks one is a descriptor.
        let per_descriptor = log.versions_per_descriptor as u64;
        let blocks = room * per_descriptor / (per_descriptor + 1);
        u32::try_from(blocks).unwrap_or(u32::MAX).saturating_sub(added)
    }

    /// While on, one transaction may use the whole log, and a handle that does not fit is an error
    /// instead of a reason to commit: all changes are one transaction. For a single-threaded
    /// caller, such as one that applies
    /// [`RecoveryReport::fast_commit_records`](crate::RecoveryReport::fast_commit_records).
    pub fn whole_log(&self, on: bool) {
        self.inner.whole_log.store(on, Ordering::Release);
    }

    /// Grants credits to an open handle if the running transaction and the log have room.
    pub(crate) fn extend(&self, transaction: &Transaction, credits: u32) -> bool {
        if self.inner.lists == JournalLists::LockFree && transaction.gate.reserve(credits) {
            return true;
        }
        let state = self.inner.state.lock();
        transaction.gate.set_limit(self.reservable_blocks(&state));
        transaction.gate.reserve(credits)
    }

    /// Counts a stopped handle of the transaction out, with its unused `credits`.
    pub(crate) fn release(&self, transaction: &Transaction, credits: u32) {
        let locked = (self.inner.lists == JournalLists::Locked).then(|| self.inner.state.lock());
        let is_last = transaction.gate.leave(credits);
        drop(locked);
        if is_last && !planted(Bug::LastHandleWakesNobody) {
            // Who has looked before sleeps by now.
            drop(self.inner.state.lock());
            self.inner.drained.notify_all();
        }
    }

    /// Most blocks that a transaction may reserve, as far as the log has room for it now.
    pub(crate) fn reservable_blocks(&self, state: &State) -> u32 {
        let Some(log) = &self.inner.log else { return u32::MAX };
        self.blocks_in(log, self.transaction_blocks_max().min(self.free_blocks(state)))
    }

    /// Log blocks of a transaction with `blocks` buffers and revoke blocks.
    pub(crate) fn log_blocks_needed(&self, blocks: u32) -> u32 {
        let Some(log) = &self.inner.log else { return 0 };
        let added = if self.last_changes().is_some() { ADDED_BLOCKS } else { 0 };
        // A full commit that ends a fast-commit stream leaves a block unused.
        let hidden = u32::from(self.inner.area.is_some());
        let blocks = blocks.saturating_add(added);
        let per_descriptor = log.versions_per_descriptor as u32;
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
