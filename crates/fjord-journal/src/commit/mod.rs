//! Full commit: makes the running transaction durable.
//!
//! Steps, and in parentheses the effect of a crash after each:
//!
//! 1. lock the transaction, wait for its handles, freeze its buffers (the transaction is lost);
//! 2. write revoke, descriptor and data blocks to the log, and wait for the file data
//!    attached to the transaction (a torn log tail that recovery ignores);
//! 3. flush (the same);
//! 4. write the commit block with FUA (all of the transaction);
//! 5. queue the versions for checkpoints, run the callbacks, wake the waiters.
//!
//! Over a device that keeps order ([`ordered`]), 2 to 4 are submitted at once, with one wait at the
//! end: file data and log blocks as ordered writes, the last one a barrier, the commit block in the
//! next epoch. Without a log, steps 2 to 4 write the blocks to their home locations and flush.
//!
//! The next transaction runs from the end of step 1. A partial commit ([`partial`]) differs in step
//! 1 only: it freezes only its parts, and the transaction keeps running. A full commit that ends a
//! stream of fast commits ([`switch`]) differs from step 2 on.
//!
//! Invariant: one thread commits at a time ([`State::committer_busy`]), in order of sequences.
//!
//! [`State::committer_busy`]: crate::journal::State

mod build;
mod ordered;
mod partial;
mod switch;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use fjord_block::plant::{Bug, planted};
use fjord_block::{Buf, Class, DeviceExt, Order, Request, Ticket};
use fjord_format::jbd2::{ChecksumVersion, CommitBlock, Incompat};
use fjord_format::types::Tid;

use crate::admission::Admitted;
use crate::buffer::{Buffer, BufferKind};
use crate::error::{JournalError, Result};
use crate::handle::Handle;
use crate::journal::Journal;
use crate::log::{Log, home_requests, wait_all};
use crate::part::{ADDED_BLOCKS, Part};
use crate::stats;
use crate::transaction::{
    Batch, Callback, Checkpoint, Committing, Phase, Sequence, Transaction, Version,
};

use build::{LogBlocks, LogShape};

pub(crate) use ordered::InFlight;
pub use partial::{PartialCommit, WholeReason};

/// A locked running transaction: no new handles, none open.
struct Locked {
    transaction: Arc<Transaction>,
    /// The commit's sequence in the log.
    sequence: Sequence,
    /// Parts that threads wait for.
    wanted: Vec<Part>,
}

impl Journal {
    /// Commits the running transaction and those before it. The caller holds the commit lock. On
    /// failure the journal stops and every callback is called with the error.
    pub(crate) fn commit_one(&self) -> Result<()> {
        let began = Instant::now();
        let locked = self.lock_running()?;
        self.commit_whole(&locked, began)
    }

    fn commit_whole(&self, locked: &Locked, began: Instant) -> Result<()> {
        self.complete_whole(locked)?;
        self.commit_batch(locked.transaction.freeze(locked.sequence), began).map(drop)
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

    /// Writes the frozen blocks. Returns the number of log blocks.
    fn commit_batch(&self, mut batch: Batch, began: Instant) -> Result<u32> {
        let stream = self.live_area();
        if self.inner.ordered && stream.is_none() {
            let log_blocks = self.begin_batch(batch, began, true)?;
            self.finish_in_flight()?;
            return Ok(log_blocks);
        }
        let whole = batch.whole();
        let mut callbacks = std::mem::take(&mut batch.callbacks);
        if planted(Bug::ToldBeforeLogged) {
            callbacks.drain(..).for_each(|callback| callback(Ok(())));
        }
        self.count_blocks(&batch.versions);
        let result = match (&self.inner.log, stream) {
            (Some(log), Some(area)) => self.commit_behind(log, area, batch),
            (Some(log), None) => self.commit_to_log(log, batch),
            (None, _) => self.commit_home(batch).map(|()| 0),
        };
        if let Err(error) = &result {
            self.abort(error.clone());
        }
        let outcome = self.conclude(whole, began, callbacks, result.as_ref().map(drop));
        outcome.and(result)
    }

    /// Calls the callbacks with the outcome of a commit, then wakes all waiters; `whole` is the
    /// transaction that it ends.
    fn conclude(
        &self,
        whole: Option<Tid>,
        began: Instant,
        callbacks: Vec<Callback>,
        result: std::result::Result<(), &JournalError>,
    ) -> Result<()> {
        let outcome = result.map_err(JournalError::clone).and_then(|()| self.check_running());
        for callback in callbacks {
            callback(outcome.clone());
        }
        outcome?;
        if let Some(tid) = whole {
            let mut state = self.inner.state.lock();
            state.committed = tid;
            self.inner.committed.store(tid.0, Ordering::Release);
        }
        stats::add(&self.inner.counters.commits, 1);
        stats::add_time(&self.inner.counters.commit_nanoseconds, began.elapsed());
        Ok(())
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
                return Ok(Locked { transaction: running.transaction.clone(), sequence, wanted });
            }
            self.inner.drained.wait(&mut state);
        }
    }

    /// After freezing: reserves `log_blocks` for the batch and lets the next transaction, or the
    /// rest of this one, run.
    fn start_flushing(&self, batch: &Batch, log_blocks: u32) -> u32 {
        let mut state = self.inner.state.lock();
        let log_start = state.head;
        if let Some(log) = &self.inner.log {
            state.head = log.after(log_start, log_blocks);
            state.used_blocks = state.used_blocks.saturating_add(log_blocks);
        }
        if batch.parts.is_none() || !planted(Bug::PartSequenceReused) {
            state.next_sequence = batch.sequence.next();
        }
        match &mut state.running {
            Some(running) if batch.parts.is_some() => {
                running.phase = Phase::Running;
                let rest = running.reserved_blocks.saturating_sub(batch.reserved_blocks);
                running.reserved_blocks = rest;
            }
            _ => state.running = None,
        }
        state.committing.push_back(Committing {
            tid: batch.tid,
            sequence: batch.sequence,
            parts: batch.parts.clone(),
            phase: Phase::Flushing,
            log_start,
        });
        self.inner.unlocked.notify_all();
        log_start
    }

    fn set_phase(&self, sequence: Sequence, phase: Phase) {
        let mut state = self.inner.state.lock();
        if let Some(slot) = state.committing.iter_mut().find(|slot| slot.sequence == sequence) {
            slot.phase = phase;
        }
    }

    fn commit_to_log(&self, log: &Log, batch: Batch) -> Result<u32> {
        let sequence = batch.sequence;
        let body_blocks = self.count_body(log, &batch);
        self.check_no_wrap(log, body_blocks + 1)?;
        let log_start = self.start_flushing(&batch, body_blocks + 1);
        // From here on handles start again and modify the same buffers.
        let blocks = LogBlocks::build(&log.format, sequence.0, &batch.versions, &batch.revoked)?;
        self.mark_log_in_use(log, sequence, log_start, !batch.revoked.is_empty())?;

        let commit_at = log.after(log_start, body_blocks);
        let requests = log.write_requests(log_start, blocks.bufs, Class::Sync)?;
        let tickets = self.inner.device.submit(requests);
        if planted(Bug::CommitBeforeBlocks) {
            self.write_commit_block(log, sequence, commit_at, blocks.crc)?;
        }
        wait_with_data(&tickets, &batch.data, "writing the log")?;
        self.set_phase(sequence, Phase::Committing);
        if !planted(Bug::NoFlushBeforeCommit) {
            self.inner.flush("flushing before the commit block")?;
        }
        // After a shutdown meanwhile, the transaction must not be committed.
        self.check_running()?;
        if !planted(Bug::CommitBeforeBlocks) {
            self.write_commit_block(log, sequence, commit_at, blocks.crc)?;
        }
        let whole = batch.whole();
        let buffers = batch.versions.into_iter().map(|(buffer, _)| buffer).collect();
        self.logged(whole, sequence, log_start, buffers, &batch.forgotten);
        Ok(body_blocks + 1)
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

    /// The frozen versions are durable in the log: they wait for a checkpoint.
    fn logged(
        &self,
        whole: Option<Tid>,
        sequence: Sequence,
        log_start: u32,
        buffers: Vec<Arc<Buffer>>,
        forgotten: &[Arc<Buffer>],
    ) {
        self.publish(sequence, &buffers, false);
        self.discard_forgotten(sequence, forgotten);
        let mut state = self.inner.state.lock();
        state.committing.retain(|slot| slot.sequence != sequence);
        state.logged = sequence;
        state.checkpoints.push_back(Checkpoint {
            tid: whole,
            sequence,
            phase: Phase::Committed,
            log_start,
            buffers: buffers.into(),
        });
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

    /// Writes a commit block and waits.
    fn write_commit_block(&self, log: &Log, sequence: Sequence, at: u32, crc: u32) -> Result<()> {
        let request = self.commit_request(log, sequence, at, crc, self.inner.barrier)?;
        let ticket = self.inner.device.submit_one(request);
        ticket.wait().map_err(JournalError::io("writing the commit block"))
    }

    /// The write of a commit block at journal block `at`.
    fn commit_request(
        &self,
        log: &Log,
        sequence: Sequence,
        at: u32,
        crc: u32,
        fua: bool,
    ) -> Result<Request> {
        let block = self.commit_block(log, sequence, at, crc)?;
        let (home, _) = log.map.run(at)?;
        Ok(Request::Write {
            offset: log.offset(home),
            bufs: vec![block],
            // Without barriers there is no order either.
            order: if self.inner.barrier { Order::Barrier } else { Order::Orderless },
            fua: fua && !planted(Bug::CommitNotDurable),
            class: Class::Sync,
        })
    }

    /// The commit block of `sequence`, which belongs at journal block `at`.
    fn commit_block(&self, log: &Log, sequence: Sequence, at: u32, crc: u32) -> Result<Buf> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let commit = CommitBlock {
            sequence: sequence.0,
            commit_sec: now.as_secs(),
            commit_nsec: now.subsec_nanos(),
            transaction_crc: crc,
        };
        let mut block = Buf::zeroed(self.inner.block_size);
        commit.encode(&log.format, block.make_mut()).map_err(JournalError::format(at))?;
        Ok(block)
    }

    /// Without a log: home writes, then a flush.
    fn commit_home(&self, batch: Batch) -> Result<()> {
        let sequence = batch.sequence;
        self.start_flushing(&batch, 0);
        let (buffers, blocks): (Vec<_>, Vec<_>) = batch
            .versions
            .into_iter()
            .map(|(buffer, version)| {
                let block = buffer.block();
                (buffer, (block, version))
            })
            .unzip();
        let requests = home_requests(self.inner.block_size, blocks, Class::Sync);
        let tickets = self.inner.device.submit(requests);
        wait_with_data(&tickets, &batch.data, "writing metadata")?;
        self.set_phase(sequence, Phase::Committing);
        self.inner.flush("flushing metadata")?;
        self.publish(sequence, &buffers, true);
        self.discard_forgotten(sequence, &batch.forgotten);
        self.remove_clean(buffers.iter());
        let mut state = self.inner.state.lock();
        state.committing.retain(|slot| slot.sequence != sequence);
        state.logged = sequence;
        Ok(())
    }

    /// Marks frozen versions as committed.
    fn publish(&self, sequence: Sequence, buffers: &[Arc<Buffer>], home: bool) {
        for buffer in buffers {
            buffer.committed(sequence, home);
        }
    }

    /// Excludes freed blocks from checkpoints: their next owner may write them as soon as the
    /// callbacks have run. Waits for home writes in flight.
    fn discard_forgotten(&self, sequence: Sequence, forgotten: &[Arc<Buffer>]) {
        for buffer in forgotten {
            if buffer.discard_up_to(sequence) {
                continue;
            }
            let _promoted = self.inner.home_writes.promote();
            let mut idle = self.inner.home_lock.lock();
            while !buffer.discard_up_to(sequence) {
                self.inner.home_idle.wait(&mut idle);
            }
        }
        self.remove_clean(forgotten.iter());
    }

    fn count_blocks(&self, versions: &[Version]) {
        let is_data = |version: &&Version| version.0.kind() == BufferKind::Data;
        let data = versions.iter().filter(is_data).count();
        stats::add(&self.inner.counters.data_blocks, data);
        stats::add(&self.inner.counters.metadata_blocks, versions.len() - data);
    }
}

/// Waits for the transaction's log blocks and for the file data attached to it.
fn wait_with_data(own: &[Ticket], data: &[Ticket], what: &'static str) -> Result<()> {
    if planted(Bug::DataAfterCommit) {
        return wait_all(own, what);
    }
    if !data.is_empty() {
        // In parallel: a ticket may do its work in the waiting thread.
        own.iter().for_each(Ticket::start);
    }
    let data = wait_all(data, "writing file data that a transaction refers to");
    wait_all(own, what).and(data)
}

/// Whether a commit has to compute the checksum of the whole transaction.
fn wants_transaction_crc(version: ChecksumVersion) -> bool {
    version == ChecksumVersion::V1
}
