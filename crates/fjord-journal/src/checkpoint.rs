//! Checkpoints: committed versions are written to their home locations, and the log's tail
//! advances.
//!
//! The order is: checkpoint writes complete; flush; superblock with the new tail, durably; only then is
//! the log space reused. A crash between any two steps replays more than needed, which is harmless.
//!
//! Invariants: one checkpoint at a time (`Inner::checkpoint_lock`), oldest transaction first; only
//! committed versions are written, and of those only the newest; the block of
//! [`Journal::checkpoint_last`] is written when everything that committed with it or before is
//! in its home location.

use std::sync::Arc;

use fjord_block::lock::MutexGuard;
use fjord_block::plant::{Bug, planted};
use fjord_block::{Buf, Class};
use fjord_format::jbd2::IjournalMark;
use fjord_format::types::BlockNo;

use crate::buffer::Buffer;
use crate::error::Result;
use crate::journal::Journal;
use crate::log::{Log, home_requests, wait_all};
use crate::stats;
use crate::transaction::Sequence;

/// Most blocks in one batch of checkpoint writes: the most that a freed block or a handle start waits
/// for.
const BATCH_BLOCKS: usize = 256;

impl Journal {
    /// Checkpoints the oldest committed transactions until at least `blocks` blocks were visited or
    /// none are left, and advances the tail. Returns the number of visited blocks. For a background
    /// thread.
    pub fn checkpoint_some(&self, blocks: usize) -> Result<usize> {
        self.checkpoint(blocks, Class::Background)
    }

    /// As [`Journal::checkpoint_some`], for a caller that needs clean buffers now.
    pub fn checkpoint_now(&self, blocks: usize) -> Result<usize> {
        self.checkpoint(blocks, Class::Sync)
    }

    fn checkpoint(&self, blocks: usize, class: Class) -> Result<usize> {
        let Some(log) = &self.inner.log else { return Ok(0) };
        let _lock = self.lock_checkpoint(class);
        let mut done = 0;
        while done < blocks {
            match self.checkpoint_oldest(class, None)? {
                Some(count) => done += count.max(1),
                None => break,
            }
        }
        self.move_tail(log)?;
        Ok(done)
    }

    /// Checkpoints everything that is committed and advances the tail. Transactions that commit
    /// meanwhile may or may not be included.
    pub fn checkpoint_all(&self) -> Result<()> {
        self.checkpoint(usize::MAX, Class::Async).map(drop)
    }

    /// Takes the checkpoint lock. A foreground waiter promotes the checkpoint writes that it waits for.
    pub(crate) fn lock_checkpoint(&self, class: Class) -> MutexGuard<'_, ()> {
        let lock = &self.inner.checkpoint_lock;
        if class == Class::Background {
            return lock.lock();
        }
        lock.try_lock().unwrap_or_else(|| {
            let _promoted = self.inner.checkpoint_writes.in_flight.promote();
            lock.lock()
        })
    }

    /// As [`Journal::checkpoint_all`], for a caller that holds the commit lock and has waited for
    /// the commits in flight, so that the log is empty afterwards.
    pub(crate) fn empty_log(&self, log: &Log) -> Result<()> {
        let _lock = self.lock_checkpoint(Class::Sync);
        while self.checkpoint_oldest(Class::Sync, None)?.is_some() {}
        self.move_tail(log).map(drop)
    }

    /// Checkpoints the oldest transaction and returns its number of blocks; `None` if there is
    /// none. `newer` is the sequence of a committing transaction to which the caller will move the
    /// tail: blocks with a version of it are skipped. The checkpoint lock is held.
    pub(crate) fn checkpoint_oldest(
        &self,
        class: Class,
        newer: Option<Sequence>,
    ) -> Result<Option<usize>> {
        self.check_running()?;
        let begun = self.inner.state.lock().pipeline.begin_checkpoint();
        let Some(commit) = begun else { return Ok(None) };
        let last = self.inner.checkpoint_writes.last();
        let last = last.filter(|last| commit.buffers.iter().any(|buffer| buffer.block() == *last));
        let written = last.map_or(Ok(()), |last| self.write_others_home(last, class));
        let written = written.and_then(|()| {
            let mut batches = commit.buffers.chunks(BATCH_BLOCKS);
            batches.try_for_each(|batch| self.write_versions(commit.sequence, newer, batch, class))
        });
        if let Err(error) = written {
            self.abort(error.clone());
            return Err(error);
        }
        self.inner.state.lock().pipeline.end_checkpoint();
        Ok(Some(commit.buffers.len()))
    }

    fn write_versions(
        &self,
        sequence: Sequence,
        newer: Option<Sequence>,
        buffers: &[Arc<Buffer>],
        class: Class,
    ) -> Result<()> {
        let begun = buffers.iter().filter_map(|buffer| {
            let version = buffer.begin_home_write(sequence, newer)?;
            Some((buffer, sequence, version))
        });
        self.send_home(buffers.len(), begun.collect(), class)
    }

    /// Writes the newest committed versions of all blocks but `last` to their home locations, durably.
    fn write_others_home(&self, last: BlockNo, class: Class) -> Result<()> {
        let buffers = self.inner.live.select(|block| block != last);
        for batch in buffers.chunks(BATCH_BLOCKS) {
            let begun = batch.iter().filter_map(|buffer| {
                let (sequence, version) = buffer.begin_newest_home_write()?;
                Some((buffer, sequence, version))
            });
            self.send_home(batch.len(), begun.collect(), class)?;
        }
        self.inner.flush("flushing a checkpoint")
    }

    /// Writes versions whose writing has begun, of `looked_at` blocks in all.
    fn send_home(
        &self,
        looked_at: usize,
        begun: Vec<(&Arc<Buffer>, Sequence, Buf)>,
        class: Class,
    ) -> Result<()> {
        let blocks: Vec<(BlockNo, Buf)> = begun
            .iter()
            .map(|(buffer, _, version)| {
                let running = planted(Bug::RunningGoesHome).then(|| buffer.snapshot());
                (buffer.block(), running.unwrap_or_else(|| version.clone()))
            })
            .collect();
        let counters = &self.inner.counters;
        stats::add(&counters.checkpoint_blocks, blocks.len());
        stats::add(&counters.superseded_blocks, looked_at - blocks.len());
        let class = self.inner.checkpoint_writes.in_flight.class(class);
        let requests = home_requests(self.inner.block_size, blocks, class);
        let tickets = self.inner.device.submit(requests);
        self.inner.checkpoint_writes.in_flight.began(&tickets);
        let result = wait_all(&tickets, "writing metadata to its home location");
        self.inner.checkpoint_writes.in_flight.ended();
        for (buffer, sequence, _) in &begun {
            buffer.end_home_write(*sequence, result.is_ok());
        }
        self.inner.live.remove_clean(begun.iter().map(|(buffer, ..)| *buffer));
        self.inner.checkpoint_writes.batch_ended();
        result
    }

    /// From now on `block` is written to its home location only after everything that has committed,
    /// durably; `None` ends that. For a block that is read before the log is replayed. Each of its
    /// checkpoint writes then takes one more flush.
    pub fn checkpoint_last(&self, block: Option<BlockNo>) {
        self.inner.checkpoint_writes.set_last(block);
    }

    /// Advances the tail past checkpointed transactions. `true` if log space was freed. The
    /// checkpoint lock is held.
    pub(crate) fn move_tail(&self, log: &Log) -> Result<bool> {
        let (sequence, start) = {
            let state = self.inner.state.lock();
            let (sequence, start) = state.oldest_needed();
            if state.empty_on_disk || state.tail == start {
                return Ok(false);
            }
            (sequence, start)
        };
        let flushed = match planted(Bug::TailBeforeHome) {
            true => Ok(()),
            false => self.inner.flush("flushing a checkpoint"),
        };
        let durable = self.inner.barrier && !planted(Bug::TailNotDurable);
        let result = flushed.and_then(|()| {
            self.check_running()?;
            log.write_superblock(&self.inner.counters, durable, |superblock| {
                superblock.s_start = start;
                superblock.s_sequence = sequence.0;
                // A recovery's own transaction is checkpointed, so `s_sequence` alone is sufficient
                // again.
                let mark = superblock.ijournal();
                superblock
                    .set_ijournal(mark.map(|mark| IjournalMark { recovering_after: None, ..mark }));
            })
        });
        if let Err(error) = result {
            self.abort(error.clone());
            return Err(error);
        }
        let mut state = self.inner.state.lock();
        let freed = log.distance(state.tail, start);
        state.tail = start;
        state.used_blocks = state.used_blocks.saturating_sub(freed);
        Ok(true)
    }
}
