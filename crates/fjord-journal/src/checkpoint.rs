//! Checkpoints: committed versions go home, and the log's tail moves on.
//!
//! The tail moves in this order: home writes complete; flush; superblock with the new tail,
//! durably; only then is the log space given out again. A crash between any two steps replays
//! more than needed, which is harmless.
//!
//! Invariants: one checkpoint at a time (`Inner::checkpoint_lock`), oldest transaction first;
//! only committed versions go home, and of those only the newest; the block of
//! [`Journal::write_home_last`] goes home when what had committed with it or before is there.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use fjord_block::plant::{Bug, planted};
use fjord_block::{Buf, Class};
use fjord_format::jbd2::{IjournalMark, Incompat};
use fjord_format::types::BlockNo;
use parking_lot::MutexGuard;

use crate::buffer::Buffer;
use crate::error::{JournalError, Result};
use crate::handle::check_no_open_handle;
use crate::journal::Journal;
use crate::log::{Log, home_requests, wait_all};
use crate::stats;
use crate::transaction::{Phase, Sequence};

/// Blocks that one batch of home writes takes at most, so that a freed block or a handle
/// start never waits for more than this.
const BATCH_BLOCKS: usize = 256;

impl Journal {
    /// Writes the versions of the oldest committed transactions home until at least
    /// `blocks` blocks were looked at or none are left, and moves the tail of the log.
    /// Returns how many it looked at. For a background thread.
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

    /// Writes every committed version home and moves the tail. Transactions that commit
    /// meanwhile are included or not.
    pub fn checkpoint_all(&self) -> Result<()> {
        self.checkpoint(usize::MAX, Class::Async).map(drop)
    }

    /// Waits for the place of the one who checkpoints. Who waits in front of others than the
    /// background hurries the writes that it waits for.
    pub(crate) fn lock_checkpoint(&self, class: Class) -> MutexGuard<'_, ()> {
        let lock = &self.inner.checkpoint_lock;
        if class == Class::Background {
            return lock.lock();
        }
        lock.try_lock().unwrap_or_else(|| {
            let _hurry = self.inner.home_writes.hurry();
            lock.lock()
        })
    }

    /// As [`Journal::checkpoint_all`], for a caller who has the committer's place and has waited
    /// for what was flying, so that the log is empty afterwards.
    pub(crate) fn empty_log(&self, log: &Log) -> Result<()> {
        let _lock = self.lock_checkpoint(Class::Sync);
        while self.checkpoint_oldest(Class::Sync, None)?.is_some() {}
        self.move_tail(log).map(drop)
    }

    /// Before a commit, for its caller, who has the committer's place: lets it begin at the front of
    /// the log, which is emptied for that, if it might not fit before the log's end. Only where
    /// there is an area for fast commits: where the log ends depends on whether some count
    /// ([`crate::fast_commit`]), and e2fsck 1.47.0 looks for what goes on at the front of such a log
    /// behind the area, and loses it.
    pub(crate) fn keep_log_straight(&self) -> Result<()> {
        let (Some(log), Some(_)) = (&self.inner.log, &self.inner.area) else { return Ok(()) };
        let fits = {
            let state = self.inner.state.lock();
            // What was admitted while it might use the whole log may be more than is allowed now.
            let running = state.running.as_ref().map_or(0, |running| running.reserved_blocks);
            let most = self.transaction_blocks_max().max(self.log_blocks_needed(running));
            // One more, so that it does not end where the log does either.
            log.end - state.head > most
        };
        if fits || planted(Bug::LogGoesRound) {
            return Ok(());
        }
        self.finish_flying()?;
        self.empty_log(log)?;
        let mut state = self.inner.state.lock();
        (state.head, state.tail) = (log.first, log.first);
        state.restarts = !state.empty_on_disk;
        Ok(())
    }

    /// Commits, writes everything home and marks the log empty on disk: afterwards the image
    /// is as clean as after [`Journal::close`], and the journal goes on (freeze, sync before a
    /// snapshot). Handles that start meanwhile may dirty it again.
    pub fn quiesce(&self) -> Result<()> {
        check_no_open_handle(self, "emptying the log")?;
        loop {
            self.commit_running()?;
            let Some(log) = &self.inner.log else { return Ok(()) };
            self.checkpoint_all()?;
            // Nobody commits or checkpoints from here on, so the log stays as it is.
            let _committer = self.inner.lock_committer();
            let _checkpoint = self.lock_checkpoint(Class::Sync);
            let (sequence, head, empty) = {
                let state = self.inner.state.lock();
                if !(state.checkpoints.is_empty() && state.committing.is_empty()) {
                    continue;
                }
                (state.logged.next().0, state.head, state.empty_on_disk)
            };
            self.check_running()?;
            self.wipe_area(log)?;
            let done = self.write_rest(log, empty, |superblock| {
                superblock.s_start = 0;
                superblock.s_sequence = sequence;
                superblock.s_head = head;
                superblock.s_feature_incompat.remove(Incompat::FAST_COMMIT);
            })?;
            if !done {
                continue;
            }
            self.inner.state.lock().empty_on_disk = true;
            return Ok(());
        }
    }

    /// Ends the use of the journal: as [`Journal::quiesce`], and later starts fail. On `Ok`
    /// the journal is clean on disk. Idempotent. No handle may start meanwhile.
    pub fn close(&self) -> Result<()> {
        if self.error() == Some(JournalError::Closed) {
            return Ok(());
        }
        self.quiesce()?;
        self.stop_with(JournalError::Closed);
        Ok(())
    }

    /// Makes room in a full log for a handle of `credits` blocks that wants to start.
    pub(crate) fn make_room(&self, credits: u32) -> Result<()> {
        let log = self.inner.log_or_usage()?;
        {
            let _lock = self.lock_checkpoint(Class::Sync);
            if !self.is_log_full_for(credits) {
                return Ok(());
            }
            // A quarter of the log at once, so that the superblock is not written for each
            // handle that comes by.
            let goal = log.len() / 4;
            while self.checkpoint_oldest(Class::Sync, None)?.is_some() {
                let state = self.inner.state.lock();
                let keeps = log.distance(state.oldest_needed().1, state.head);
                if state.used_blocks.saturating_sub(keeps) >= goal {
                    break;
                }
            }
            if self.move_tail(log)? {
                return Ok(());
            }
        }
        self.commit_oldest()
    }

    /// There was nothing to checkpoint, so what fills the log is not committed yet.
    fn commit_oldest(&self) -> Result<()> {
        let oldest = {
            let state = self.inner.state.lock();
            let committing = state.committing.front().map(|slot| slot.tid);
            committing.or_else(|| state.running.as_ref().map(|slot| slot.transaction.tid))
        };
        oldest.map_or(Ok(()), |tid| self.commit(tid))
    }

    /// Writes the oldest transaction's versions home; not those of blocks of which a transaction
    /// that is being committed has a newer one, if the caller moves the tail to that. `None` when
    /// there is none; else how many blocks it had. The checkpoint lock is held.
    pub(crate) fn checkpoint_oldest(
        &self,
        class: Class,
        newer: Option<Sequence>,
    ) -> Result<Option<usize>> {
        self.check_running()?;
        let (sequence, buffers) = {
            let mut state = self.inner.state.lock();
            let Some(oldest) = state.checkpoints.front_mut() else { return Ok(None) };
            oldest.phase = Phase::Checkpointing;
            (oldest.sequence, oldest.buffers.clone())
        };
        let last = self.inner.home_last.load(Ordering::Acquire);
        let written = match buffers.iter().any(|buffer| buffer.block().0 == last) {
            true => self.write_others_home(BlockNo(last), class),
            false => Ok(()),
        };
        let written = written.and_then(|()| {
            let mut batches = buffers.chunks(BATCH_BLOCKS);
            batches.try_for_each(|batch| self.write_home(sequence, newer, batch, class))
        });
        if let Err(error) = written {
            self.abort(error.clone());
            return Err(error);
        }
        self.inner.state.lock().checkpoints.pop_front();
        Ok(Some(buffers.len()))
    }

    fn write_home(
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

    /// Writes the newest committed versions of all blocks but `last` home, durably.
    fn write_others_home(&self, last: BlockNo, class: Class) -> Result<()> {
        let buffers = self.live_buffers(|block| block != last);
        for batch in buffers.chunks(BATCH_BLOCKS) {
            let begun = batch.iter().filter_map(|buffer| {
                let (sequence, version) = buffer.begin_newest_home_write()?;
                Some((buffer, sequence, version))
            });
            self.send_home(batch.len(), begun.collect(), class)?;
        }
        self.inner.flush("flushing a checkpoint")
    }

    /// Writes versions home whose writing has begun, of `looked_at` blocks in all.
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
        let class = self.inner.home_writes.class(class);
        let requests = home_requests(self.inner.block_size, blocks, class);
        let tickets = self.inner.device.submit(requests);
        self.inner.home_writes.began(&tickets);
        let result = wait_all(&tickets, "writing metadata home");
        self.inner.home_writes.ended();
        for (buffer, sequence, _) in &begun {
            buffer.end_home_write(*sequence, result.is_ok());
        }
        self.remove_clean(begun.iter().map(|(buffer, ..)| *buffer));
        drop(self.inner.home_lock.lock());
        self.inner.home_idle.notify_all();
        result
    }

    /// From now on `block` is written home only when everything that has committed is there, durably;
    /// `None` takes that back. For a block that must not be believed before others are read, by those
    /// who look before they replay the log. Each of its home writes then takes a flush more.
    pub fn write_home_last(&self, block: Option<BlockNo>) {
        self.inner.home_last.store(block.map_or(u64::MAX, |block| block.0), Ordering::Release);
    }

    /// Moves the tail past transactions that are home. `true` when log space came free. The
    /// checkpoint lock is held.
    fn move_tail(&self, log: &Log) -> Result<bool> {
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
                // A recovery's own transaction is home, so `s_sequence` says it all again.
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
