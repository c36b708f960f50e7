//! Fast commits: the calls that queue records, write them, and wait until they are durable.
//!
//! A caller queues its records ([`Journal::queue_fast_commit`]) and waits. The thread that gets the
//! commit lock writes all queued records to the area ([`crate::fast_commit_area`]) as one fast
//! commit, so concurrent callers share a write and a flush.
//!
//! Steps of a fast commit: 1. callers have waited for their file data; 2. **flush**, if the
//! records refer to data that must be durable first; 3. write the blocks **with FUA** (or write and
//! **flush**, if file data needs a flush anyway); 4. the first of a stream sets the journal's
//! feature bit FAST_COMMIT **with FUA**. The checksum covers all blocks, so no order is needed
//! among them. A crash before 3 or 4 is complete leaves the earlier fast commits.
//!
//! Invariants:
//! - a fast commit is written under the commit lock, with its transaction running, so the full
//!   commit that ends the stream has not begun;
//! - the bit is set on disk only while the area begins with the head of the next transaction in the
//!   log.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use fjord_block::Buf;
use fjord_block::lock::{Mutex, Rank};
use fjord_block::plant::{Bug, planted};
use fjord_format::jbd2::fast_commit::{FastCommitWriter, Record, compat};
use fjord_format::jbd2::{Incompat, MIN_JOURNAL_BLOCKS};

use crate::commit::{Next, Turn};
use crate::error::{JournalError, Result};
use crate::fast_commit_area::{
    Area, DataNeeds, FastCommitOutcome, FastCommitRequest, FastCommitTicket, Stream, Waiting,
};
use crate::journal::Journal;
use crate::log::{Log, wait_all};
use crate::open_handles::check_no_open_handle;
use crate::stats;

/// The area has 1/N of the journal's blocks, as with mke2fs.
const AREA_SHARE: u32 = 64;
/// Minimum length of an area, in blocks.
const AREA_BLOCKS_MIN: u32 = 4;

impl Journal {
    /// Capacity of the area between two full commits, in blocks; 0 without an area.
    pub fn fast_commit_blocks(&self) -> u32 {
        self.inner.area.as_ref().map_or(0, |area| area.blocks.len() as u32)
    }

    /// Whether more than half of the area is used: a background commit then avoids refusals. A
    /// hint.
    pub fn fast_commits_fill_area(&self) -> bool {
        self.is_area_used_beyond(1, 2)
    }

    /// Whether little of the area is left: its last user should start a full commit. A hint.
    pub fn fast_commits_exhaust_area(&self) -> bool {
        self.is_area_used_beyond(3, 4)
    }

    fn is_area_used_beyond(&self, part: u32, of: u32) -> bool {
        self.inner.area.as_ref().is_some_and(|area| {
            area.used_hint.load(Ordering::Relaxed) > area.blocks.len() as u32 * part / of
        })
    }

    /// Whether the full commit that ends the stream would have to checkpoint older transactions: a
    /// background checkpoint then saves it that. A hint.
    pub fn fast_commits_follow_others(&self) -> bool {
        self.is_area_used_beyond(0, 1) && self.inner.state.lock().pipeline.has_checkpoints()
    }

    /// Sets the size of the fast-commit area of later mounts (`s_num_fc_blks`): a 64th of the
    /// journal as in mke2fs, if a log of the minimum length is left. Returns the size; 0 if there
    /// is no space.
    ///
    /// # Errors
    /// I/O errors; the journal has an area now.
    pub fn size_fast_commit_area(&self) -> Result<u32> {
        let log = self.inner.log_or_usage()?;
        if self.inner.area.is_some() {
            return Err(JournalError::Usage("the journal has a fast-commit area".into()));
        }
        let maxlen = log.of_superblock(|superblock| superblock.s_maxlen);
        let room = maxlen.saturating_sub(MIN_JOURNAL_BLOCKS);
        let blocks = (maxlen / AREA_SHARE).min(room);
        // One block is unused, and so is the last.
        if blocks < AREA_BLOCKS_MIN {
            return Ok(0);
        }
        log.write_superblock(&self.inner.counters, self.inner.barrier, |superblock| {
            superblock.s_num_fc_blks = blocks;
        })?;
        Ok(blocks)
    }

    /// Appends a request to the queue of all threads. `None` without an area. Takes a leaf lock
    /// only, so the caller may hold the locks under which it made its records.
    pub fn queue_fast_commit(&self, request: FastCommitRequest) -> Option<FastCommitTicket> {
        let area = self.inner.area.as_ref()?;
        let waiting =
            Arc::new(Waiting { request, outcome: Mutex::new(Rank::FastCommitOutcome, None) });
        area.queue.push(waiting.clone());
        Some(FastCommitTicket(waiting))
    }

    /// Makes a queued request durable by a fast commit, together with those of other threads, or
    /// returns why a full commit is needed.
    ///
    /// # Errors
    /// I/O errors, which stop the journal; a call from a thread with an open handle.
    pub fn wait_fast_commit(&self, ticket: FastCommitTicket) -> Result<FastCommitOutcome> {
        check_no_open_handle(self, "a fast commit")?;
        let (Some(area), Some(log)) = (&self.inner.area, &self.inner.log) else {
            return Ok(FastCommitOutcome::Unavailable);
        };
        let FastCommitTicket(mine) = ticket;
        let mut tried = false;
        loop {
            let turn = self.take_turn(&mut false, |state| {
                if let Some(outcome) = mine.outcome.lock().take() {
                    return outcome.map(Next::Done);
                }
                self.check_running()?;
                if tried {
                    // The thread that had taken it has panicked.
                    let message = "the thread that wrote the fast commit panicked";
                    return Err(JournalError::Usage(message.into()));
                }
                // The next writer finds it in the queue and skips it.
                let committed = state.committed.at_least(mine.request.tid);
                Ok(if committed {
                    Next::Done(FastCommitOutcome::Committed)
                } else {
                    Next::FastCommit
                })
            })?;
            let lock = match turn {
                Turn::Outcome(outcome) => return Ok(outcome),
                Turn::Commit(lock) => lock,
                // Not asked for.
                Turn::Settle(_) => continue,
            };
            // Commits in flight precede it; their failure is reported above.
            if self.settle().is_ok() {
                let batch = area.queue.gather();
                let began = Instant::now();
                self.write_batch(log, area, &batch);
                area.queue.served(batch.len(), began);
            }
            drop(lock);
            tried = true;
        }
    }

    /// The outcome of a queued request, if it is known.
    pub(crate) fn poll_fast_commit(
        &self,
        ticket: &FastCommitTicket,
    ) -> Option<Result<FastCommitOutcome>> {
        let FastCommitTicket(mine) = ticket;
        let outcome = mine.outcome.lock().take();
        let committed = || self.is_committed(mine.request.tid);
        outcome.or_else(|| committed().then_some(Ok(FastCommitOutcome::Committed)))
    }

    /// Decides about each request and writes those that can be logged. The caller holds the commit
    /// lock.
    fn write_batch(&self, log: &Log, area: &Area, batch: &[Arc<Waiting>]) {
        if batch.iter().any(|waiting| waiting.request.needs_empty_log)
            && self.empty_log(log).is_err()
        {
            // The journal has stopped; every waiter gets the error.
            return;
        }
        let (committed, next) = {
            let state = self.inner.state.lock();
            (state.committed, state.logged.next().0)
        };
        let mut stream = area.stream.lock();
        let first = stream.used == 0;
        let mut writer = FastCommitWriter::new(self.inner.block_size, next, first);
        let mut allocates = stream.allocates;
        let mut closed = stream.closed.filter(|(tid, _)| *tid == next).map(|(_, why)| why);
        let (mut logged, mut data) = (Vec::new(), DataNeeds::Nothing);
        for waiting in batch {
            let request = &waiting.request;
            let outcome = if committed.at_least(request.tid) {
                FastCommitOutcome::Committed
            } else if let Some(why) = closed {
                why
            } else if compat::conflicts(allocates, request.blocks) {
                FastCommitOutcome::Conflict
            } else if !push_all(&mut writer, &request.records) {
                FastCommitOutcome::Full
            } else {
                data = data.max(request.data);
                if request.blocks.allocates {
                    allocates = Some(request.blocks.owner);
                }
                logged.push(waiting);
                continue;
            };
            if outcome != FastCommitOutcome::Committed {
                closed = Some(outcome);
            }
            *waiting.outcome.lock() = Some(Ok(outcome));
        }
        let outcome = self.write_stream(log, area, &mut stream, writer, &logged, data);
        match &outcome {
            Ok(FastCommitOutcome::Logged { .. }) => stream.allocates = allocates,
            Ok(why) => closed = Some(*why),
            Err(error) => self.abort(error.clone()),
        }
        stream.closed = closed.map(|why| (next, why));
        drop(stream);
        for (index, waiting) in logged.into_iter().enumerate() {
            let mut mine = outcome.clone();
            if let (Ok(FastCommitOutcome::Logged { blocks }), true) = (&mut mine, index > 0) {
                *blocks = 0;
            }
            *waiting.outcome.lock() = Some(mine);
        }
    }

    fn write_stream(
        &self,
        log: &Log,
        area: &Area,
        stream: &mut Stream,
        writer: FastCommitWriter,
        logged: &[&Arc<Waiting>],
        data: DataNeeds,
    ) -> Result<FastCommitOutcome> {
        if logged.iter().all(|waiting| waiting.request.records.is_empty()) {
            // Nothing to write; earlier requests are durable, because their writer has released the
            // lock.
            if data != DataNeeds::Nothing {
                self.inner.flush("flushing file data")?;
            }
            return Ok(FastCommitOutcome::Logged { blocks: 0 });
        }
        let bytes = match writer.finish() {
            Ok(bytes) => bytes,
            Err(_) => return Ok(FastCommitOutcome::Full),
        };
        let bufs: Vec<Buf> = bytes.chunks(self.inner.block_size).map(Buf::from_slice).collect();
        let count = bufs.len() as u32;
        if count > area.blocks.len() as u32 - stream.used {
            return Ok(FastCommitOutcome::Full);
        }
        if data == DataNeeds::FlushBefore && !planted(Bug::FastCommitBeforeData) {
            self.inner.flush("flushing file data before a fast commit")?;
        }
        let flush_after = data == DataNeeds::FlushAfter;
        let fua = self.inner.barrier && !flush_after && !planted(Bug::FastCommitNotDurable);
        let requests = log.contiguous_requests(area.blocks.start + stream.used, bufs, fua)?;
        if planted(Bug::StreamMarkedEarly) {
            self.mark_stream(log, stream)?;
        }
        stream.has_head = true;
        let tickets = self.inner.device.submit(requests);
        wait_all(&tickets, "writing a fast commit")?;
        if flush_after {
            self.inner.flush("flushing a fast commit")?;
        }
        self.mark_stream(log, stream)?;
        // A shutdown meanwhile: recovery decides whether the fast commit is valid.
        self.check_running()?;
        stream.used += count;
        area.used_hint.store(stream.used, Ordering::Relaxed);
        stats::add(&self.inner.counters.fast_commits, 1);
        stats::add(&self.inner.counters.fast_commit_requests, logged.len());
        stats::add(&self.inner.counters.fast_commit_blocks, count as usize);
        Ok(FastCommitOutcome::Logged { blocks: count })
    }

    /// Makes the area valid, durably, if it is not; and records where recovery looks for the next
    /// full commit, if the superblock does not have it. Waited for: the callers' fast commit is
    /// durable only when the area is valid.
    fn mark_stream(&self, log: &Log, stream: &mut Stream) -> Result<()> {
        if stream.is_live {
            return Ok(());
        }
        let new_start = {
            let mut state = self.inner.state.lock();
            let restarts = std::mem::take(&mut state.restarts);
            let is_new = std::mem::take(&mut state.empty_on_disk) || restarts;
            is_new.then(|| (state.head, state.logged.next()))
        };
        log.write_superblock(&self.inner.counters, self.inner.barrier, |superblock| {
            if let Some((head, sequence)) = new_start {
                superblock.s_start = head;
                superblock.s_sequence = sequence.0;
            }
            superblock.s_feature_incompat |= Incompat::FAST_COMMIT;
        })?;
        stream.is_live = true;
        Ok(())
    }
}

/// Adds all records, or none if they do not fit.
fn push_all(writer: &mut FastCommitWriter, records: &[Record]) -> bool {
    let before = writer.clone();
    let pushed = records.iter().all(|record| writer.push(record).is_ok());
    if !pushed {
        *writer = before;
    }
    pushed
}
