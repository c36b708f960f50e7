//! Checkpoints: committed versions are written to their home locations, and the log's tail
//! advances.
//!
//! The order is: checkpoint writes complete; flush; superblock with the new tail, durably; only then is
//! the log space reused. A crash between any two steps replays more than needed, which is harmless.
//!
//! Threads that wait for room in the log, and those that checkpoint by themselves, carry one out together:
//! they share `Inner::checkpoint_lock`, and claim batches of home writes (`checkpoint_claims`). Who needs the
//! log as it is, has that lock alone.
//!
//! Invariants: oldest transaction first; only committed versions are written, and of those only the newest;
//! the tail moves under `Inner::tail_lock`, past commits whose checkpoint has ended; the block of
//! [`Journal::checkpoint_last`] is written when everything that committed with it or before is
//! in its home location.

use std::sync::Arc;

use fjord_block::lock::{RwLockReadGuard, RwLockWriteGuard};
use fjord_block::plant::{Bug, planted};
use fjord_block::{Buf, Class};
use fjord_format::jbd2::IjournalMark;
use fjord_format::types::BlockNo;

use crate::buffer::{Buffer, HomeWrite};
use crate::checkpoint_claims::{BATCH_BLOCKS, Batch, Claim, ClaimedBlocks, Wanted};
use crate::error::Result;
use crate::journal::Journal;
use crate::log::{Log, home_requests, wait_all};
use crate::options::JournalIo;
use crate::pipeline::Commit;
use crate::stats;
use crate::transaction::Sequence;

/// The checkpoint lock of a thread that checkpoints: shared, or alone with [`JournalIo::Dedicated`].
pub(crate) struct CheckpointGuard<'a> {
    _shared: Option<RwLockReadGuard<'a, ()>>,
    _alone: Option<RwLockWriteGuard<'a, ()>>,
}

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
        let _shared = self.share_checkpoint(class);
        let mut done = 0;
        // To the end of a commit, so that the tail can move past it.
        while done < blocks || self.inner.checkpoint_claims.has_more() {
            let wanted = Wanted::Blocks(blocks.saturating_sub(done));
            match self.checkpoint_batch(class, None, wanted)? {
                Batch::Done(count) => done += count.max(1),
                Batch::Waited => {}
                Batch::Nothing => break,
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

    /// Takes the checkpoint lock alone: no checkpoint is in progress. Promotes the checkpoint writes that it
    /// waits for.
    pub(crate) fn lock_checkpoint(&self) -> RwLockWriteGuard<'_, ()> {
        let _promoted = self.inner.checkpoint_writes.in_flight.promote();
        self.inner.checkpoint_lock.write()
    }

    /// Joins a checkpoint, or begins one. A foreground waiter promotes the writes in flight of who has the
    /// lock alone.
    pub(crate) fn share_checkpoint(&self, class: Class) -> CheckpointGuard<'_> {
        let lock = &self.inner.checkpoint_lock;
        if self.inner.io == JournalIo::Dedicated {
            let alone = match class {
                Class::Background => lock.write(),
                _ => self.lock_checkpoint(),
            };
            return CheckpointGuard { _shared: None, _alone: Some(alone) };
        }
        let shared = match class {
            Class::Background => lock.read(),
            _ => lock.try_read().unwrap_or_else(|| {
                let _promoted = self.inner.checkpoint_writes.in_flight.promote();
                lock.read()
            }),
        };
        CheckpointGuard { _shared: Some(shared), _alone: None }
    }

    /// As [`Journal::checkpoint_all`], for a caller that holds the commit lock and has waited for
    /// the commits in flight, so that the log is empty afterwards.
    pub(crate) fn empty_log(&self, log: &Log) -> Result<()> {
        let _alone = self.lock_checkpoint();
        self.checkpoint_older_than(None)?;
        self.move_tail(log).map(drop)
    }

    /// Checkpoints all that has committed. `newer` is the sequence of a committing transaction to which the
    /// caller will move the tail: blocks with a version of it are skipped. The caller has the checkpoint lock
    /// alone.
    pub(crate) fn checkpoint_older_than(&self, newer: Option<Sequence>) -> Result<()> {
        let all = Wanted::Blocks(usize::MAX);
        while !matches!(self.checkpoint_batch(Class::Sync, newer, all)?, Batch::Nothing) {}
        Ok(())
    }

    /// Writes the next batch of the oldest commit home, or waits for those of other threads where none is
    /// left. Begins no commit that `wanted` does not need. The checkpoint lock is held; with `newer` alone, see
    /// [`Journal::checkpoint_older_than`].
    pub(crate) fn checkpoint_batch(
        &self,
        class: Class,
        newer: Option<Sequence>,
        wanted: Wanted,
    ) -> Result<Batch> {
        self.check_running()?;
        let claims = &self.inner.checkpoint_claims;
        let last = self.inner.checkpoint_writes.last();
        let has_last = |commit: &Commit| {
            last.is_some_and(|last| commit.buffers.iter().any(|buffer| buffer.block() == last))
        };
        let begin = || self.inner.state.lock().pipeline.begin_checkpoint();
        match claims.claim(wanted, begin, has_last) {
            Claim::Nothing => {
                // A write of another thread may have failed meanwhile.
                self.check_running()?;
                Ok(Batch::Nothing)
            }
            Claim::Wait(moves) => {
                let _promoted = (class != Class::Background)
                    .then(|| self.inner.checkpoint_writes.in_flight.promote());
                claims.wait(moves);
                Ok(Batch::Waited)
            }
            Claim::Prepare => {
                self.or_stop(last.map_or(Ok(()), |last| self.write_others_home(last, class)))?;
                claims.ready();
                Ok(Batch::Done(0))
            }
            Claim::Batch(blocks) => {
                self.or_stop(self.write_claimed(newer, &blocks, class))?;
                claims.ended(&blocks, || self.inner.state.lock().pipeline.end_checkpoint());
                Ok(Batch::Done(blocks.iter().map(|(_, range)| range.len()).sum()))
            }
        }
    }

    /// After a failed home write the journal stops, and whoever waits for that write goes on.
    fn or_stop(&self, written: Result<()>) -> Result<()> {
        if let Err(error) = &written {
            self.abort(error.clone());
            self.inner.checkpoint_claims.failed();
        }
        written
    }

    fn write_claimed(
        &self,
        newer: Option<Sequence>,
        blocks: &ClaimedBlocks,
        class: Class,
    ) -> Result<()> {
        let mut left: Vec<(Arc<Buffer>, Sequence)> = Vec::new();
        for (commit, range) in blocks {
            let buffers = commit.buffers[range.clone()].iter();
            left.extend(buffers.map(|buffer| (buffer.clone(), commit.sequence)));
        }
        let mut looked_at = left.len();
        loop {
            let (mut begun, mut in_flight) = (Vec::new(), Vec::new());
            for (buffer, sequence) in left {
                match buffer.begin_home_write(sequence, newer) {
                    HomeWrite::Begun(version) => begun.push((buffer, sequence, version)),
                    HomeWrite::InFlight => in_flight.push((buffer, sequence)),
                    HomeWrite::NotNeeded => {}
                }
            }
            self.send_home(looked_at - in_flight.len(), begun, class)?;
            looked_at = in_flight.len();
            // Batches wait for older ones only, so that none waits for another in a circle.
            let Some((first, _)) = in_flight.first() else { return Ok(()) };
            self.inner.checkpoint_writes.wait_until(|| !first.is_going_home());
            self.check_running()?;
            left = in_flight;
        }
    }

    /// Writes the newest committed versions of all blocks but `last` to their home locations, durably.
    fn write_others_home(&self, last: BlockNo, class: Class) -> Result<()> {
        let buffers = self.inner.live.select(|block| block != last);
        for batch in buffers.chunks(BATCH_BLOCKS) {
            let begun = batch.iter().filter_map(|buffer| {
                let (sequence, version) = buffer.begin_newest_home_write()?;
                Some((buffer.clone(), sequence, version))
            });
            self.send_home(batch.len(), begun.collect(), class)?;
        }
        self.inner.flush("flushing a checkpoint")
    }

    /// Writes versions whose writing has begun, of `looked_at` blocks in all.
    fn send_home(
        &self,
        looked_at: usize,
        begun: Vec<(Arc<Buffer>, Sequence, Buf)>,
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
        self.inner.live.remove_clean(begun.iter().map(|(buffer, ..)| buffer));
        self.inner.checkpoint_writes.batch_ended();
        result
    }

    /// From now on `block` is written to its home location only after everything that has committed,
    /// durably; `None` ends that. For a block that is read before the log is replayed. Each of its
    /// checkpoint writes then takes one more flush. Waits for the batches in flight, so the caller has no open
    /// handle.
    pub fn checkpoint_last(&self, block: Option<BlockNo>) {
        let _alone = self.lock_checkpoint();
        self.inner.checkpoint_writes.set_last(block);
        // The commit that is in part in its home location has to heed it, too.
        self.inner.checkpoint_claims.prepare_again();
    }

    /// Advances the tail past checkpointed transactions. `true` if log space was freed. The
    /// checkpoint lock is held, shared or alone.
    pub(crate) fn move_tail(&self, log: &Log) -> Result<bool> {
        let _tail = self.inner.tail_lock.lock();
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
