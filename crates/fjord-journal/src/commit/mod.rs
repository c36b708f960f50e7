//! The compound commit: makes the running transaction durable.
//!
//! Steps, and what a crash after each leaves:
//!
//! 1. freeze: lock the transaction, wait for its handles, freeze its buffers (nothing on disk);
//! 2. dispatch: run the commit's script ([`script`]), which writes revoke, descriptor, data and
//!    commit blocks in the order that the device needs (a torn log tail, which recovery ignores,
//!    or all of the transaction);
//! 3. settle: wait until it is durable ([`settle`]);
//! 4. retire: queue the versions for the checkpoint, call the callbacks, wake the waiters.
//!
//! The next transaction starts at the end of step 1. A partial commit ([`partial`]) differs in step
//! 1 only: it freezes the contents of some parts, and the transaction keeps running.
//!
//! Invariant: one thread dispatches at a time, in order of sequences (the commit lock,
//! [`crate::roles`]).

mod build;
mod calls;
mod failure;
mod partial;
mod script;
mod settle;
mod switch;

use std::sync::Arc;
use std::time::Instant;

use fjord_block::lock::{Mutex, Rank};
use fjord_block::plant::{Bug, planted};
use fjord_format::jbd2::{ChecksumVersion, Incompat};

use crate::admission::Admitted;
use crate::buffer::{Buffer, BufferKind};
use crate::error::{JournalError, Result};
use crate::handle::Handle;
use crate::journal::Journal;
use crate::log::Log;
use crate::part::{ADDED_BLOCKS, Part};
use crate::pipeline::{Commit, Unsettled};
use crate::stats;
use crate::transaction::{Batch, Phase, Sequence, Transaction, Version};

use build::LogShape;
use script::Protocol;
use settle::call_all;

pub use partial::PartialCommit;
pub(crate) use partial::WantedParts;

/// A locked running transaction: no new handles, none open.
struct Locked {
    transaction: Arc<Transaction>,
    /// The commit's sequence in the log.
    sequence: Sequence,
    /// Number of the partial commit that follows.
    generation: u32,
    /// Parts that threads wait for.
    wanted: Vec<Part>,
}

/// When a caller needs a commit to be durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wants {
    /// It waits for this commit alone: FUA of the commit block is cheapest.
    Durability,
    /// It waits for a flush that covers other commits too.
    SharedFlush,
    /// It does not wait: order only.
    Order,
}

impl Journal {
    /// Commits the running transaction, which must exist, and those before it. The caller holds the
    /// commit lock. On failure the journal stops and every callback is called with the error.
    pub(crate) fn commit_one(&self) -> Result<()> {
        let began = Instant::now();
        let locked = self.lock_running()?;
        self.commit_whole(&locked, began)
    }

    /// Dispatches the running transaction, which must exist. Waits only if the commit's script
    /// does. The caller holds the commit lock. On failure as [`Journal::commit_one`].
    pub(crate) fn dispatch_one(&self, wants: Wants) -> Result<()> {
        let began = Instant::now();
        let locked = self.lock_running()?;
        let commit = self.dispatch_whole(&locked, began, wants)?;
        if commit.is_durable() { self.settle() } else { Ok(()) }
    }

    fn commit_whole(&self, locked: &Locked, began: Instant) -> Result<()> {
        self.dispatch_whole(locked, began, Wants::Durability)?;
        self.settle()
    }

    fn dispatch_whole(&self, locked: &Locked, began: Instant, wants: Wants) -> Result<Arc<Commit>> {
        self.complete_whole(locked)?;
        let batch = locked.transaction.freeze(locked.sequence, locked.generation);
        self.dispatch(batch, began, wants)
    }

    /// Lets the file system add its last changes to a locked transaction before a full freeze. On
    /// failure the journal stops.
    fn complete_whole(&self, locked: &Locked) -> Result<()> {
        let Some(parts) = self.parts() else { return Ok(()) };
        let generation = {
            let mut state = self.inner.state.lock();
            let Some(running) = &mut state.running else { return Ok(()) };
            running.handles += 1;
            running.reserved_blocks += ADDED_BLOCKS;
            running.generation
        };
        let transaction = locked.transaction.clone();
        let admitted = Admitted { transaction, generation, credits: ADDED_BLOCKS };
        let handle = Handle::new(self.clone(), admitted);
        let done = parts.before_whole_commit(&handle);
        handle.stop();
        done.inspect_err(|error| self.abort(error.clone()))
    }

    /// Runs the script of a frozen commit. On failure the journal stops and the commit's callbacks
    /// are called with the error. The caller holds the commit lock.
    fn dispatch(&self, mut batch: Batch, began: Instant, wants: Wants) -> Result<Arc<Commit>> {
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
        let script = self.script(protocol, &batch, &commit, wants);
        match script.and_then(|script| self.run(script, &commit, batch.data)) {
            Ok(sent) => {
                if planted(Bug::CommitLockReleasedEarly) {
                    self.inner.release_commit_lock();
                }
                commit.dispatched(sent);
                if self.inner.dual && planted(Bug::ToldWhenDispatched) {
                    call_all(commit.take_callbacks(), &Ok(()));
                }
                Ok(commit)
            }
            Err(error) => Err(self.fail_dispatch(&commit, error)),
        }
    }

    /// Number of log blocks that a commit takes.
    fn log_blocks(&self, protocol: Protocol<'_>, batch: &Batch) -> Result<u32> {
        let Some(log) = protocol.log() else { return Ok(0) };
        let log_blocks = protocol.hidden_blocks() + self.count_body(log, batch) + 1;
        self.check_no_wrap(log, log_blocks)?;
        Ok(log_blocks)
    }

    /// Locks the running transaction and waits until its handles have stopped.
    fn lock_running(&self) -> Result<Locked> {
        let mut state = self.inner.state.lock();
        loop {
            self.check_running()?;
            let sequence = state.next_sequence;
            let Some(running) = &mut state.running else {
                return Err(JournalError::Usage("there is no transaction to commit".into()));
            };
            running.phase = Phase::Locked;
            if running.handles == 0 {
                // Atomically: later callers are served by a later generation.
                running.generation += 1;
                let wanted = std::mem::take(&mut running.wanted);
                let (transaction, generation) = (running.transaction.clone(), running.generation);
                return Ok(Locked { transaction, sequence, generation, wanted });
            }
            self.inner.drained.wait(&mut state);
        }
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
        let buffers: Vec<Arc<Buffer>> =
            batch.versions.iter().map(|(buffer, _)| buffer.clone()).collect();
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
        match &mut state.running {
            Some(running) if parts.is_some() => {
                running.phase = Phase::Running;
                let rest = running.reserved_blocks.saturating_sub(batch.reserved_blocks);
                running.reserved_blocks = rest;
            }
            _ => state.running = None,
        }
        let commit = Arc::new(Commit {
            tid: batch.tid,
            sequence: batch.sequence,
            parts,
            generation: batch.generation,
            log_start,
            log_blocks,
            began,
            buffers,
            forgotten,
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

    /// Errs if a commit of so many blocks would wrap in a log that must not wrap
    /// ([`Journal::avoid_log_wrap`] has ensured it): recovery would look for the rest elsewhere.
    fn check_no_wrap(&self, log: &Log, log_blocks: u32) -> Result<()> {
        let room = log.end.saturating_sub(self.inner.state.lock().head);
        if self.inner.area.is_none() || log_blocks < room || planted(Bug::LogGoesRound) {
            return Ok(());
        }
        let message = format!("a commit of {log_blocks} blocks {room} before the end of its log");
        Err(JournalError::Usage(message))
    }

    /// Number of log blocks of the batch without its commit block; adds them to the statistics.
    fn count_body(&self, log: &Log, batch: &Batch) -> u32 {
        let shape = LogShape::new(&log.format, batch.versions.len(), batch.revoked.len());
        stats::add(&self.inner.counters.descriptor_blocks, shape.descriptors);
        stats::add(&self.inner.counters.revoke_blocks, shape.revoke_blocks);
        stats::add(&self.inner.counters.revoke_records, batch.revoked.len());
        shape.blocks() as u32
    }

    /// Before the first commit to an empty log: writes its start (`s_start`). The flush before the
    /// commit block covers this write.
    fn mark_log_in_use(
        &self,
        log: &Log,
        sequence: Sequence,
        log_start: u32,
        revokes: bool,
    ) -> Result<()> {
        let is_new_start = {
            let mut state = self.inner.state.lock();
            let restarts = std::mem::take(&mut state.restarts);
            std::mem::take(&mut state.empty_on_disk) || restarts
        };
        let has_revoke = || log.superblock.lock().0.s_feature_incompat.contains(Incompat::REVOKE);
        if !is_new_start && (!revokes || has_revoke()) {
            return Ok(());
        }
        log.write_superblock(&self.inner.counters, false, |superblock| {
            if is_new_start {
                superblock.s_start = log_start;
                superblock.s_sequence = sequence.0;
            }
            superblock.s_feature_incompat |= Incompat::REVOKE;
        })
    }

    fn count_blocks(&self, versions: &[Version]) {
        let is_data = |version: &&Version| version.0.kind() == BufferKind::Data;
        let data = versions.iter().filter(is_data).count();
        stats::add(&self.inner.counters.data_blocks, data);
        stats::add(&self.inner.counters.metadata_blocks, versions.len() - data);
    }
}

/// Whether a commit has to compute the checksum of the whole transaction.
fn wants_transaction_crc(version: ChecksumVersion) -> bool {
    version == ChecksumVersion::V1
}
