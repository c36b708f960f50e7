//! The journal: what its parts share, and the steps that all of them take: the sticky error, flushes,
//! the table of live buffers, questions about the state.
//!
//! The modules above it, listed in the documentation of the crate, add their own methods to
//! [`Journal`].
//!
//! Invariants:
//! - transaction IDs have no gaps, and transactions commit in order; the same holds for sequences
//!   in the log (one transaction may have several, by partial commits);
//! - the log space of a running transaction is reserved before its handles may use it, so a
//!   commit never runs out of log;
//! - log space is reused only after the superblock that no longer covers it is durable;
//! - once an error is set nothing more is written to the log.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use arc_swap::ArcSwapOption;
use fjord_block::lock::{Condvar, Mutex, RwLock, point};
use fjord_block::plant::{Bug, planted};
use fjord_block::{Device, DeviceExt};
use fjord_format::jbd2::Superblock;
use fjord_format::types::{BlockNo, Tid};

use crate::area::Areas;
use crate::buffer::{Buffer, Joined, WriteGuard};
use crate::checkpoint_claims::CheckpointClaims;
use crate::checkpoint_writes::CheckpointWrites;
use crate::error::{JournalError, Result};
use crate::fast_commit_area::Area;
use crate::journal_thread::JournalThread;
use crate::live_buffers::LiveBuffers;
use crate::log::Log;
use crate::options::{JournalIo, JournalLists};
use crate::part_set::{Part, PartSet};
use crate::request_queue::Requests;
use crate::state::State;
use crate::stats::{self, Counters, JournalStats};
use crate::transaction::{Admitted, Phase, Sequence, Transaction};

/// An open journal; cheap to clone.
#[derive(Clone)]
pub struct Journal {
    pub(crate) inner: Arc<Inner>,
}

pub(crate) struct Inner {
    pub(crate) device: Arc<dyn Device>,
    pub(crate) block_size: usize,
    /// None for a file system without a journal.
    pub(crate) log: Option<Log>,
    /// Areas after the log, if any.
    pub(crate) areas: Option<Areas>,
    /// None without the feature, or without space for it.
    pub(crate) area: Option<Area>,
    pub(crate) barrier: bool,
    /// See [`JournalOptions::commit_time`](crate::JournalOptions::commit_time).
    pub(crate) commit_time: Option<Duration>,
    /// The device keeps the order of commits, instead of waits and flushes.
    pub(crate) ordered: bool,
    /// Commits follow each other without a wait: [`PipelineMode::Dual`](crate::PipelineMode::Dual).
    pub(crate) dual: bool,
    pub(crate) transaction_blocks_max: u32,
    /// How handles add to a transaction.
    pub(crate) lists: JournalLists,
    /// Which threads carry out the I/O.
    pub(crate) io: JournalIo,
    /// See [`JournalOptions::helpers_max`](crate::JournalOptions::helpers_max).
    pub(crate) helpers_max: usize,
    /// The only one that commits, with [`JournalIo::Dedicated`].
    pub(crate) thread: Option<JournalThread>,
    /// Definition of the parts, for partial commits. Set once, while no transaction runs.
    pub(crate) parts: OnceLock<Box<dyn PartRules>>,
    /// What the file system adds before a full commit. Set once, while no transaction runs.
    pub(crate) last_changes: OnceLock<Box<dyn LastRules>>,
    /// One transaction may use the whole log, and none is committed to free space.
    pub(crate) whole_log: AtomicBool,
    /// Shared by threads that checkpoint; who needs the log and the versions as they are has it alone. Held
    /// over I/O; outermost except for the commit lock.
    pub(crate) checkpoint_lock: RwLock<()>,
    /// The home writes that come next.
    pub(crate) checkpoint_claims: CheckpointClaims,
    /// Serialises moves of the tail. Held over I/O.
    pub(crate) tail_lock: Mutex<()>,
    /// The running transaction, for handles that start without the state lock; stored under it. None with
    /// [`JournalLists::Locked`].
    pub(crate) current: ArcSwapOption<Transaction>,
    pub(crate) state: Mutex<State>,
    /// A copy of [`State::committed`], stored under `state`, read without a lock.
    pub(crate) committed: AtomicU32,
    /// Signalled, with `state`, when a handle stopped while its transaction is locked.
    pub(crate) drained: Condvar,
    /// Signalled, with `state`, when handles may start again, and on an error.
    pub(crate) unlocked: Condvar,
    /// Signalled, with `state`, when the commit lock is free, and on an error: for fast commits,
    /// and for threads that do not wait for the outcome of a commit.
    pub(crate) commit_lock_freed: Condvar,
    /// Signalled, with `state`, when a commit has an outcome: for threads that settle others.
    pub(crate) ended: Condvar,
    /// Signalled, with `state`, when the settle lock is free, and on an error: for threads that
    /// settle all commits.
    pub(crate) settle_lock_freed: Condvar,
    pub(crate) live: LiveBuffers,
    pub(crate) checkpoint_writes: CheckpointWrites,
    /// What stopped the journal. Set once.
    pub(crate) error: OnceLock<JournalError>,
    /// Commits that callers do not wait for.
    pub(crate) requests: Requests,
    pub(crate) counters: Counters,
}

/// [`crate::Parts`] as the modules below the handle know them: whoever implements those has a handle,
/// whose type is above the journal's.
pub(crate) trait PartRules: Send + Sync {
    /// The part of a block.
    fn part_of(&self, block: BlockNo) -> Part;

    /// Copies the entries of the parts in `chosen` to a version of a shared block.
    fn copy_entries(&self, block: BlockNo, current: &[u8], version: &mut [u8], chosen: &PartSet);

    /// Whether a partial commit is possible now.
    fn is_ready(&self, chosen: &PartSet) -> bool;
}

/// [`crate::LastChanges`], likewise.
pub(crate) trait LastRules: Send + Sync {
    /// Whether there is something to add now.
    fn are_pending(&self) -> bool;

    /// Adds it, under a handle with this grant.
    fn add(&self, journal: &Journal, admitted: Admitted) -> Result<()>;
}

impl Journal {
    /// The parts of the file system, if it has any.
    pub(crate) fn parts(&self) -> Option<&dyn PartRules> {
        self.inner.parts.get().map(|rules| &**rules)
    }

    /// Sets what all transactions are to see the same: once, while none runs.
    pub(crate) fn set_once<T>(&self, cell: &OnceLock<T>, value: T, what: &str) -> Result<()> {
        let state = self.inner.state.lock();
        if state.running.is_some() || cell.set(value).is_err() {
            let message = format!("{what} must be set once, and while no transaction runs");
            return Err(JournalError::Usage(message));
        }
        Ok(())
    }

    /// What the file system adds before a full commit, if it ever does.
    pub(crate) fn last_changes(&self) -> Option<&dyn LastRules> {
        self.inner.last_changes.get().map(|rules| &**rules)
    }

    /// Whether a commit begins as soon as the one before is dispatched.
    pub fn is_dual(&self) -> bool {
        self.inner.dual
    }

    /// Whether the device keeps the order of commits.
    pub fn keeps_order(&self) -> bool {
        self.inner.ordered
    }

    /// Whether the flush of the transaction's commit has not started, so that it will cover all
    /// writes that are complete now (with [`Journal::keeps_order`], all ordered writes that are
    /// submitted now).
    pub fn flush_is_to_come(&self, tid: Tid) -> bool {
        let state = self.inner.state.lock();
        state.running.as_ref().is_some_and(|running| running.transaction.tid == tid)
    }

    /// Whether the transaction is durable.
    pub fn is_committed(&self, tid: Tid) -> bool {
        point();
        // Acquire: a reader of the number also sees the effects of the commit.
        Tid(self.inner.committed.load(Ordering::Acquire)).at_least(tid)
    }

    /// The running transaction, if any handle has started one since the last commit.
    pub fn running_tid(&self) -> Option<Tid> {
        self.inner.state.lock().running.as_ref().map(|running| running.transaction.tid)
    }

    /// The newest transaction: the running one, or else the last one. When it is durable, all
    /// changes so far are.
    pub fn newest_tid(&self) -> Tid {
        Tid(self.inner.state.lock().next_tid.0.wrapping_sub(1))
    }

    /// Whether there is anything that a commit would make durable: for the commit timer.
    pub fn needs_commit(&self) -> bool {
        let state = self.inner.state.lock();
        let running = state.running.as_ref();
        !state.pipeline.is_drained()
            || running.is_some_and(|running| !running.transaction.lock_contents().is_empty())
    }

    /// How long ago the running transaction started: for the commit timer.
    pub fn running_age(&self) -> Option<Duration> {
        let state = self.inner.state.lock();
        state.running.as_ref().map(|running| running.transaction.started.elapsed())
    }

    /// Phase of a transaction that is not checkpointed yet; `None` for others.
    pub fn phase(&self, tid: Tid) -> Option<Phase> {
        let state = self.inner.state.lock();
        let running = state.running.iter().map(|slot| (slot.transaction.tid, slot.phase()));
        let mut running = running;
        let running = running.find(|&(other, _)| other == tid).map(|(_, phase)| phase);
        running.or_else(|| state.pipeline.phase_of(tid))
    }

    /// Log blocks in use, and in total: for the checkpoint thread, which starts well before the log
    /// is full. `(0, 0)` without a log.
    pub fn log_usage_blocks(&self) -> (u32, u32) {
        let Some(log) = &self.inner.log else { return (0, 0) };
        (self.inner.state.lock().used_blocks, log.len())
    }

    /// Blocks of the log; 0 without one.
    pub fn log_len_blocks(&self) -> u32 {
        self.inner.log.as_ref().map_or(0, |log| log.len())
    }

    /// Stops the journal: every later start and commit fails with `error`; commits in flight, which
    /// refer to nothing that comes after them, keep their own outcome. Records the error on disk
    /// (`s_errno`) if the device still accepts writes.
    pub fn abort(&self, error: JournalError) {
        let next = self.inner.state.lock().next_sequence;
        self.abort_at(next, error);
    }

    /// As [`Journal::abort`], but commits before `sequence` keep their own outcome.
    pub(crate) fn abort_at(&self, sequence: Sequence, error: JournalError) {
        if self.stop_with(sequence, error.into_sticky()) {
            const EIO: i32 = 5;
            if let Some(log) = &self.inner.log {
                let mark = log.write_superblock(&self.inner.counters, self.inner.barrier, |sb| {
                    sb.s_errno = -EIO;
                });
                if let Err(error) = mark {
                    tracing::warn!("cannot mark the journal as aborted: {error}");
                }
            }
        }
    }

    /// Stops the journal without a write to the device, as a power cut does.
    pub fn shutdown(&self) {
        let in_flight = self.inner.state.lock().oldest_in_flight();
        self.stop_with(in_flight, JournalError::Shutdown);
    }

    /// What stopped the journal, if something did.
    pub fn error(&self) -> Option<JournalError> {
        self.inner.error.get().cloned()
    }

    /// Clears the error of an earlier abort on disk; the caller has recorded it in the file
    /// system's superblock ([`RecoveryReport::errno`](crate::RecoveryReport::errno)).
    pub fn clear_errno(&self) -> Result<()> {
        self.check_running()?;
        let Some(log) = &self.inner.log else { return Ok(()) };
        if log.of_superblock(|superblock| superblock.s_errno) == 0 {
            return Ok(());
        }
        log.write_superblock(&self.inner.counters, self.inner.barrier, |sb| sb.s_errno = 0)
    }

    /// The buffer of a block with a version that is not checkpointed. A cache must call this before
    /// it reads a block from the device.
    pub fn live_buffer(&self, block: BlockNo) -> Option<Arc<Buffer>> {
        self.inner.live.get(block)
    }

    /// Number of blocks with a version that is not checkpointed: they cannot be evicted.
    pub fn live_block_count(&self) -> usize {
        self.inner.live.len()
    }

    /// Counters of the journal.
    pub fn stats(&self) -> JournalStats {
        self.inner.counters.snapshot()
    }

    /// The journal superblock as last submitted; `None` without a log.
    pub fn superblock(&self) -> Option<Superblock> {
        self.inner.log.as_ref().map(|log| log.of_superblock(Superblock::clone))
    }

    /// Identity for the table of open handles.
    pub(crate) fn key(&self) -> usize {
        Arc::as_ptr(&self.inner) as usize
    }

    /// Checks that the journal has not stopped.
    ///
    /// # Errors
    /// What stopped it.
    pub fn check_running(&self) -> Result<()> {
        point();
        self.inner.error.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// Errs for a buffer that the journal cannot log.
    pub(crate) fn check_buffer(&self, block: BlockNo, contents: &WriteGuard<'_>) -> Result<()> {
        if contents.len() != self.inner.block_size {
            let (got, want) = (contents.len(), self.inner.block_size);
            let message = format!("a buffer of {got} bytes; blocks have {want}");
            return Err(JournalError::Usage(message));
        }
        let Some(log) = &self.inner.log else { return Ok(()) };
        let too_wide = !log.format.bit64 && u32::try_from(block.0).is_err();
        if too_wide || log.map.contains(block) {
            let message = format!(
                "block {block} cannot be logged: it belongs to the journal or is past the end of \
                 the device"
            );
            return Err(JournalError::Usage(message));
        }
        Ok(())
    }

    /// Sets the sticky error for commits from `sequence` on; `true` if this error was the first.
    pub(crate) fn stop_with(&self, sequence: Sequence, error: JournalError) -> bool {
        // Under the lock, so that no thread checks for the error and then misses the wake-up.
        let mut state = self.inner.state.lock();
        let first = self.inner.error.set(error).is_ok();
        let is_earlier = |at: Sequence| !sequence.at_least(at);
        if state.stopped_at.is_none_or(is_earlier) {
            state.stopped_at = Some(sequence);
        }
        state.wake_waiters();
        if !planted(Bug::StopUnheard) {
            self.inner.unlocked.notify_all();
        }
        self.inner.commit_lock_freed.notify_all();
        self.inner.ended.notify_all();
        self.inner.settle_lock_freed.notify_all();
        self.inner.drained.notify_all();
        first
    }

    /// A full commit waits for the commit lock: ends the wait of a fast commit for more requests.
    pub(crate) fn stop_fast_commit_wait(&self) {
        if let Some(area) = &self.inner.area {
            area.queue.stop_wait();
        }
    }

    /// The area, if it is valid, so that a full commit must end its stream. Exact under the commit
    /// lock; else a hint.
    pub(crate) fn live_area(&self) -> Option<&Area> {
        self.inner.area.as_ref().filter(|area| area.is_live())
    }

    /// Whether the next revoke, after `count`, starts another revoke block.
    pub(crate) fn needs_revoke_block(&self, count: usize) -> bool {
        let log = self.inner.log.as_ref();
        log.is_some_and(|log| count.is_multiple_of(log.format.revokes_per_block().max(1)))
    }

    /// Registers the buffer as live and part of transaction `tid`. Errs when another buffer of its block is live.
    pub(crate) fn join(
        &self,
        buffer: &Arc<Buffer>,
        tid: Tid,
        contents: &WriteGuard<'_>,
    ) -> Result<()> {
        let joined = self.inner.live.join(buffer, tid, contents)?;
        let counters = &self.inner.counters;
        stats::add(&counters.joined_blocks, usize::from(joined != Joined::Before));
        stats::add(&counters.conflicting_blocks, usize::from(joined == Joined::InConflict));
        Ok(())
    }
}

impl Inner {
    /// The log, for calls that need one.
    pub(crate) fn log_or_usage(&self) -> Result<&Log> {
        let missing = || JournalError::Usage("the file system has no journal".into());
        self.log.as_ref().ok_or_else(missing)
    }

    /// Makes all transferred writes durable, unless barriers are off. Also sent to a device without
    /// a volatile cache: an image file has its own metadata to make durable, and a flush reports
    /// earlier failures of writes.
    pub(crate) fn flush(&self, what: &'static str) -> Result<()> {
        if !self.barrier {
            return Ok(());
        }
        stats::add(&self.counters.flushes, 1);
        self.device.flush().map_err(JournalError::io(what))
    }

    /// As [`Inner::flush`], for what has been transferred before a write failed.
    pub(crate) fn flush_completed(&self, what: &'static str) -> Result<()> {
        if !self.barrier {
            return Ok(());
        }
        stats::add(&self.counters.flushes, 1);
        self.device.flush_completed().wait().map_err(JournalError::io(what))
    }
}

impl std::fmt::Debug for Journal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = self.inner.state.lock();
        f.debug_struct("Journal")
            .field("committed", &state.committed)
            .field("next_tid", &state.next_tid)
            .field("used_blocks", &state.used_blocks)
            .field("error", &self.inner.error.get())
            .finish_non_exhaustive()
    }
}
