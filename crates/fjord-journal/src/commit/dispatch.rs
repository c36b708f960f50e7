//! Dispatch: a locked transaction is frozen, takes log blocks and enters the pipeline; its script runs.
//!
//! Owns no state. Invariant: the caller holds the commit lock, so sequences and log blocks are given
//! out in the order of commits.

use std::sync::Arc;
use std::time::Instant;

use fjord_block::lock::{Mutex, Rank};
use fjord_block::plant::{Bug, planted};

use super::build::LogShape;
use super::lock::Locked;
use super::protocol::Protocol;
use super::retire::call_all;
use super::script::Wants;
use crate::buffer::BufferKind;
use crate::error::Result;
use crate::journal::Journal;
use crate::log::Log;
use crate::part_set::ChangedParts;
use crate::pipeline::{Commit, Unsettled};
use crate::stats;
use crate::transaction::{Batch, Version};

impl Journal {
    /// Dispatches the running transaction, which must exist. Waits only if the commit's script
    /// does. The caller holds the commit lock. On failure the journal stops and every callback is
    /// called with the error.
    pub(super) fn dispatch_one(&self, wants: Wants) -> Result<Arc<Commit>> {
        let began = Instant::now();
        let locked = self.lock_running()?;
        self.dispatch_whole(&locked, began, wants)
    }

    /// Freezes and dispatches the rest of a locked transaction.
    pub(super) fn dispatch_whole(
        &self,
        locked: &Locked,
        began: Instant,
        wants: Wants,
    ) -> Result<Arc<Commit>> {
        self.complete_whole(locked)?;
        let batch = locked.transaction.freeze(locked.sequence, locked.generation);
        self.dispatch(batch, began, wants)
    }

    /// Runs the script of a frozen commit. On failure the journal stops and the commit's callbacks
    /// are called with the error. The caller holds the commit lock.
    pub(super) fn dispatch(
        &self,
        mut batch: Batch,
        began: Instant,
        wants: Wants,
    ) -> Result<Arc<Commit>> {
        let callbacks = std::mem::take(&mut batch.callbacks);
        self.count_blocks(&batch.versions);
        let protocol = self.protocol();
        let log_blocks = match self.log_blocks(protocol, &batch) {
            Ok(log_blocks) => log_blocks,
            Err(error) => {
                self.abort_at(batch.sequence, error.clone());
                call_all(callbacks, &Err(error.clone()));
                return Err(error);
            }
        };
        let unsettled =
            Mutex::new(Rank::Unsettled, Unsettled { callbacks, ..Unsettled::default() });
        let commit = self.start_flushing(&mut batch, began, log_blocks, unsettled);
        if planted(Bug::ToldBeforeLogged) {
            call_all(commit.take_callbacks(), &Ok(()));
        }
        // From here on handles start again and modify the same buffers.
        let script = self.script(protocol, &mut batch, &commit, wants);
        match script.and_then(|script| self.run(script, &commit, batch.data)) {
            Ok(sent) => {
                if planted(Bug::CommitLockReleasedEarly) {
                    self.inner.release_commit_lock(false);
                }
                commit.dispatched(sent);
                if self.inner.dual && planted(Bug::ToldWhenDispatched) {
                    call_all(commit.take_callbacks(), &Ok(()));
                }
                Ok(commit)
            }
            Err(error) => {
                commit.give_up_pieces();
                Err(self.fail_dispatch(&commit, error))
            }
        }
    }

    /// Number of log blocks that a commit takes.
    fn log_blocks(&self, protocol: Protocol<'_>, batch: &Batch) -> Result<u32> {
        let Some(log) = protocol.log() else { return Ok(0) };
        let log_blocks = protocol.hidden_blocks() + self.count_body(log, batch) + 1;
        self.check_no_wrap(log, log_blocks)?;
        Ok(log_blocks)
    }

    /// After freezing: the commit enters the pipeline with `log_blocks`, and the next transaction,
    /// or the rest of this one, runs.
    fn start_flushing(
        &self,
        batch: &mut Batch,
        began: Instant,
        log_blocks: u32,
        unsettled: Mutex<Unsettled>,
    ) -> Arc<Commit> {
        let buffers = std::mem::take(&mut batch.buffers);
        let (parts, forgotten) = (batch.parts.take(), std::mem::take(&mut batch.forgotten));
        let mut state = self.inner.state.lock();
        let log_start = state.head;
        if let Some(log) = &self.inner.log {
            state.head = log.after(log_start, log_blocks);
            state.used_blocks = state.used_blocks.saturating_add(log_blocks);
        }
        if parts.is_none() || !planted(Bug::PartSequenceReused) {
            state.next_sequence = batch.sequence.next();
        }
        let callers =
            state.running.as_mut().map_or(0, |running| std::mem::take(&mut running.callers));
        let (waiters, changed) = match &mut state.running {
            Some(running) if self.parts().is_some() => {
                (running.take_waiters(parts.is_none()), running.take_parts(parts.as_ref()))
            }
            Some(running) => (running.take_waiters(true), ChangedParts::default()),
            None => Default::default(),
        };
        match &state.running {
            Some(running) if parts.is_some() => {
                let gate = &running.transaction.gate;
                gate.take_blocks(batch.reserved_blocks);
                gate.set_limit(self.reservable_blocks(&state));
                gate.open();
            }
            _ => {
                state.running = None;
                self.inner.current.store(None);
            }
        }
        let commit = Arc::new(Commit {
            tid: batch.tid,
            sequence: batch.sequence,
            parts: changed,
            is_last: parts.is_none(),
            generation: batch.generation,
            log_start,
            log_blocks,
            began,
            buffers,
            forgotten,
            callers,
            waiters,
            unsettled,
        });
        if !state.pipeline.is_drained() {
            stats::add(&self.inner.counters.overlapped_commits, 1);
        }
        state.pipeline.push(commit.clone());
        state.check(self.inner.log.as_ref());
        self.inner.unlocked.notify_all();
        commit
    }

    /// Number of log blocks of the batch without its commit block; adds them to the statistics.
    fn count_body(&self, log: &Log, batch: &Batch) -> u32 {
        let shape = LogShape::new(log, batch.versions.len(), batch.revoked.len());
        stats::add(&self.inner.counters.descriptor_blocks, shape.descriptors);
        stats::add(&self.inner.counters.revoke_blocks, shape.revoke_blocks);
        stats::add(&self.inner.counters.revoke_records, batch.revoked.len());
        shape.blocks() as u32
    }

    fn count_blocks(&self, versions: &[Version]) {
        let is_data = |version: &&Version| version.0.kind() == BufferKind::Data;
        let data = versions.iter().filter(is_data).count();
        stats::add(&self.inner.counters.data_blocks, data);
        stats::add(&self.inner.counters.metadata_blocks, versions.len() - data);
    }
}
