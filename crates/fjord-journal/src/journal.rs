//! The journal: states of the transactions (running, committing, committed) and the sticky error.
//! [`crate::admission`] decides which handles may start.
//!
//! Invariants:
//! - transaction IDs have no gaps, and transactions commit in order; the same holds for sequences
//!   in the log (one transaction may have several, by partial commits);
//! - the log space of a running transaction is reserved before its handles may use it, so a
//!   commit never runs out of log;
//! - log space is reused only after the superblock that no longer covers it is durable;
//! - once an error is set nothing more is written to the log.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use fjord_block::lock::{Condvar, Mutex, Rank, point};
use fjord_block::plant::{Bug, planted};
use fjord_block::{Device, DeviceExt, QuasiAsyncWrites};
use fjord_format::jbd2::Superblock;
use fjord_format::types::{BlockNo, Tid};

use crate::area::Areas;
use crate::buffer::{Buffer, Joined, WriteGuard};
use crate::error::{JournalError, Result};
use crate::fast_commit::{self, Area};
use crate::handle::{Handle, check_no_open_handle};
use crate::log::Log;
use crate::map::JournalMap;
use crate::options::{JournalOptions, PipelineMode};
use crate::part::Parts;
use crate::pipeline::Pipeline;
use crate::recovery::{self, RecoveryReport};
use crate::requests::Requests;
use crate::roles::Roles;
use crate::state::State;
use crate::stats::{self, Counters, JournalStats};
use crate::transaction::{Phase, Sequence};

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
    /// The device keeps the order of commits, instead of waits and flushes.
    pub(crate) ordered: bool,
    /// Commits follow each other without a wait: [`PipelineMode::Dual`].
    pub(crate) dual: bool,
    pub(crate) transaction_blocks_max: u32,
    /// Definition of the parts, for partial commits. Set once, while no transaction runs.
    parts: OnceLock<Arc<dyn Parts>>,
    /// One transaction may use the whole log, and none is committed to free space.
    pub(crate) whole_log: AtomicBool,
    /// Serialises checkpoints. Held over I/O; outermost except for the commit lock.
    pub(crate) checkpoint_lock: Mutex<()>,
    pub(crate) state: Mutex<State>,
    /// A copy of [`State::committed`], stored under `state`, read without a lock.
    pub(crate) committed: AtomicU32,
    /// Signalled, with `state`, when a handle stopped while its transaction is locked.
    pub(crate) drained: Condvar,
    /// Signalled, with `state`, when handles may start again, and on an error.
    pub(crate) unlocked: Condvar,
    /// Signalled, with `state`, when the commit lock is free, and on an error.
    pub(crate) commits_moved: Condvar,
    /// Signalled, with `state`, when the log blocks of a commit are durable, for the holder of the
    /// commit lock, and on an error.
    pub(crate) commits_follow: Condvar,
    /// Signalled, with `state`, when the settle lock is free, and on an error.
    pub(crate) settle_moved: Condvar,
    /// Number of the block that a checkpoint writes last; `u64::MAX` for none.
    pub(crate) home_last: AtomicU64,
    /// Buffers with a version that is not checkpointed, by block.
    live: Mutex<HashMap<BlockNo, Arc<Buffer>>>,
    /// Home writes in flight.
    pub(crate) home_writes: QuasiAsyncWrites,
    /// Pairs with `home_idle`; a leaf lock.
    pub(crate) home_lock: Mutex<()>,
    /// Signalled when a batch of home writes ends.
    pub(crate) home_idle: Condvar,
    /// What stopped the journal. Set once.
    error: OnceLock<JournalError>,
    /// Commits that callers do not wait for.
    pub(crate) requests: Requests,
    pub(crate) counters: Counters,
}

impl Journal {
    /// Opens the journal of a file system: replays it if it is dirty, so that it is empty. `map`
    /// locates the journal inode's blocks. Writes to the device, unless the journal is clean and
    /// the features are unchanged.
    ///
    /// When the report has [`RecoveryReport::fast_commit_records`], the caller must apply them in
    /// the first transaction that it commits: see [`Journal::whole_log`].
    pub fn open(
        device: Arc<dyn Device>,
        map: JournalMap,
        block_size: usize,
        options: &JournalOptions,
    ) -> Result<(Journal, RecoveryReport)> {
        let plan = recovery::scan(&device, &map, block_size)?;
        let table = plan.area_table()?;
        let pending = plan.i_transactions()?;
        if !pending.is_empty() && !options.replays_ijournal {
            return Err(JournalError::NeedsIjournalReplay { count: pending.len() });
        }
        let mut report = plan.apply_fitted(options.fit_home, options.home_last)?;
        report.i_transactions = pending.len();
        // The recovery's own transaction is then at least as new as all of them, so its commit
        // invalidates them.
        for tid in pending.iter().map(|transaction| transaction.tid) {
            if tid.newer_than(report.next_tid) {
                report.next_tid = tid;
            }
        }
        let (mut superblock, block) = recovery::read_superblock(&device, &map, block_size)?;
        let areas = table.map(|table| Areas::new(table, &superblock, pending));
        let before = superblock.encode();
        let pending = !report.fast_commit_records.is_empty();
        recovery::apply_features(&mut superblock, options, pending);
        let changed = before != superblock.encode();
        let start = superblock.s_start;
        let has_area = pending || (options.fast_commit && superblock.has_fast_commit_room());
        let log = Log::new(device.clone(), map, superblock, block, has_area);
        if !pending {
            fast_commit::wipe_stale_head(&log)?;
        }
        let next_tid = report.next_tid;
        let in_use = pending && start != 0;
        let head = if in_use { start } else { log.first };
        let journal = Journal::build(device, block_size, Some(log), areas, options, next_tid, head);
        journal.inner.state.lock().empty_on_disk = !in_use;
        if changed {
            let log = journal.inner.log_or_usage()?;
            log.write_superblock(&journal.inner.counters, options.barrier, |_| ())?;
        }
        Ok((journal, report))
    }

    /// For a file system without a journal (ext2): the same handles, but a commit writes the blocks
    /// to their home locations and flushes. A crash meanwhile leaves an inconsistent image, as with
    /// ext2.
    pub fn without_log(device: Arc<dyn Device>, block_size: usize) -> Journal {
        Journal::build(device, block_size, None, None, &JournalOptions::default(), Tid(1), 0)
    }

    fn build(
        device: Arc<dyn Device>,
        block_size: usize,
        log: Option<Log>,
        areas: Option<Areas>,
        options: &JournalOptions,
        next_tid: Tid,
        head: u32,
    ) -> Journal {
        let default_max = log.as_ref().map_or(u32::MAX, |log| log.len() / 3);
        let max = options.transaction_blocks_max.unwrap_or(default_max).min(default_max);
        let state = State {
            running: None,
            pipeline: Pipeline::default(),
            roles: Roles::default(),
            whole: None,
            committed: Tid(next_tid.0.wrapping_sub(1)),
            logged: Sequence(Tid(next_tid.0.wrapping_sub(1))),
            next_tid,
            next_sequence: Sequence(next_tid),
            head,
            tail: head,
            used_blocks: 0,
            stopped_at: None,
            empty_on_disk: true,
            restarts: false,
        };
        let area = log.as_ref().and_then(Area::new);
        let ordered = options.barrier && log.is_some() && device.keeps_order();
        let log_exists = log.is_some();
        let inner = Inner {
            ordered,
            dual: options.pipeline == PipelineMode::Dual && log_exists,
            home_writes: QuasiAsyncWrites::default(),
            device,
            block_size,
            log,
            areas,
            area,
            whole_log: AtomicBool::new(false),
            barrier: options.barrier,
            transaction_blocks_max: max,
            parts: OnceLock::new(),
            checkpoint_lock: Mutex::new(Rank::Checkpoint, ()),
            committed: AtomicU32::new(state.committed.0),
            state: Mutex::new(Rank::JournalState, state),
            drained: Condvar::new(),
            unlocked: Condvar::new(),
            commits_moved: Condvar::new(),
            commits_follow: Condvar::new(),
            settle_moved: Condvar::new(),
            home_last: AtomicU64::new(u64::MAX),
            live: Mutex::new(Rank::LiveBuffers, HashMap::new()),
            home_lock: Mutex::new(Rank::HomeWrites, ()),
            home_idle: Condvar::new(),
            error: OnceLock::new(),
            requests: Requests::default(),
            counters: Counters::default(),
        };
        Journal { inner: Arc::new(inner) }
    }

    /// Starts a handle that may add `credits` blocks to the running transaction. Waits while that
    /// transaction is locked by a commit, and commits or checkpoints if it or the log is full.
    ///
    /// Errs if this thread has an open handle, if no transaction can hold that many blocks, and
    /// after the journal has stopped.
    pub fn start(&self, credits: u32) -> Result<Handle> {
        check_no_open_handle(self, "starting a handle")?;
        let admitted = self.admit(credits)?;
        Ok(Handle::new(self.clone(), admitted))
    }

    /// Defines the parts of the file system, for [`Journal::commit_parts`]. Call it once, while no
    /// transaction runs.
    pub fn set_parts(&self, parts: Arc<dyn Parts>) -> Result<()> {
        let state = self.inner.state.lock();
        if state.running.is_some() || self.inner.parts.set(parts).is_err() {
            let message = "parts must be set once, and while no transaction runs";
            return Err(JournalError::Usage(message.into()));
        }
        Ok(())
    }

    pub(crate) fn parts(&self) -> Option<&Arc<dyn Parts>> {
        self.inner.parts.get()
    }

    /// Most credits that a handle can start with.
    pub fn credits_max(&self) -> u32 {
        let max = self.transaction_blocks_max();
        let Some(log) = &self.inner.log else { return max };
        let per_descriptor = (log.format.tags_per_descriptor() as u32).max(1);
        let hidden = u32::from(self.inner.area.is_some());
        max.saturating_sub(2 + hidden + max / per_descriptor)
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
            || running.is_some_and(|running| !running.transaction.contents.lock().is_empty())
    }

    /// How long ago the running transaction started: for the commit timer.
    pub fn running_age(&self) -> Option<Duration> {
        let state = self.inner.state.lock();
        state.running.as_ref().map(|running| running.transaction.started.elapsed())
    }

    /// Phase of a transaction that is not checkpointed yet; `None` for others.
    pub fn phase(&self, tid: Tid) -> Option<Phase> {
        let state = self.inner.state.lock();
        let running = state.running.iter().map(|slot| (slot.transaction.tid, slot.phase));
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
    /// system's superblock ([`RecoveryReport::errno`]).
    pub fn clear_errno(&self) -> Result<()> {
        self.check_running()?;
        let Some(log) = &self.inner.log else { return Ok(()) };
        if log.superblock.lock().0.s_errno == 0 {
            return Ok(());
        }
        log.write_superblock(&self.inner.counters, self.inner.barrier, |sb| sb.s_errno = 0)
    }

    /// The buffer of a block with a version that is not checkpointed. A cache must call this before
    /// it reads a block from the device.
    pub fn live_buffer(&self, block: BlockNo) -> Option<Arc<Buffer>> {
        self.inner.live.lock().get(&block).cloned()
    }

    /// Number of blocks with a version that is not checkpointed: they cannot be evicted.
    pub fn live_block_count(&self) -> usize {
        self.inner.live.lock().len()
    }

    /// Counters of the journal.
    pub fn stats(&self) -> JournalStats {
        self.inner.counters.snapshot()
    }

    /// The journal superblock as last written; `None` without a log.
    pub fn superblock(&self) -> Option<Superblock> {
        self.inner.log.as_ref().map(|log| log.superblock.lock().0.clone())
    }

    /// Identity for the table of open handles.
    pub(crate) fn key(&self) -> usize {
        Arc::as_ptr(&self.inner) as usize
    }

    /// Errs once the journal stopped.
    pub(crate) fn check_running(&self) -> Result<()> {
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
        if !planted(Bug::StopUnheard) {
            self.inner.unlocked.notify_all();
        }
        self.inner.commits_moved.notify_all();
        self.inner.commits_follow.notify_all();
        self.inner.settle_moved.notify_all();
        self.inner.drained.notify_all();
        first
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
        // Under the lock of the table, so that no thread removes a clean buffer meanwhile.
        let mut live = self.inner.live.lock();
        let known = live.entry(buffer.block()).or_insert_with(|| buffer.clone());
        if !Arc::ptr_eq(known, buffer) {
            if known.is_dirty() {
                return Err(JournalError::TwoBuffers(buffer.block()));
            }
            *known = buffer.clone();
        }
        let joined = buffer.join(tid, contents);
        let counters = &self.inner.counters;
        stats::add(&counters.joined_blocks, usize::from(joined != Joined::Before));
        stats::add(&counters.conflicting_blocks, usize::from(joined == Joined::InConflict));
        Ok(())
    }

    /// The live buffers of blocks that `wanted` selects.
    pub(crate) fn live_buffers(&self, wanted: impl Fn(BlockNo) -> bool) -> Vec<Arc<Buffer>> {
        let live = self.inner.live.lock();
        live.iter().filter(|(block, _)| wanted(**block)).map(|(_, buffer)| buffer.clone()).collect()
    }

    /// Removes buffers that have become clean from the table of live ones.
    pub(crate) fn remove_clean<'a>(&self, buffers: impl Iterator<Item = &'a Arc<Buffer>>) {
        let mut live = self.inner.live.lock();
        for buffer in buffers {
            let known = live.get(&buffer.block());
            if known.is_some_and(|known| Arc::ptr_eq(known, buffer)) && !buffer.is_dirty() {
                live.remove(&buffer.block());
            }
        }
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
