//! Opening a journal: recovery, the features of this mount, and the state of a journal that is empty.
//!
//! Owns no state. Invariant: nothing is written before the log has been scanned, and a log that cannot
//! be replayed is left as it is.

use std::sync::atomic::{AtomicBool, AtomicU32};
use std::sync::{Arc, OnceLock};

use arc_swap::ArcSwapOption;
use fjord_block::Device;
use fjord_block::lock::{Condvar, Mutex, Rank, RwLock};
use fjord_format::types::Tid;

use crate::area::{self, Areas};
use crate::checkpoint_claims::CheckpointClaims;
use crate::checkpoint_writes::CheckpointWrites;
use crate::error::{JournalError, Result};
use crate::fast_commit_area::{self, Area};
use crate::journal::{Inner, Journal};
use crate::journal_thread::JournalThread;
use crate::live_buffers::LiveBuffers;
use crate::log::Log;
use crate::map::JournalMap;
use crate::options::{JournalIo, JournalOptions, PipelineMode};
use crate::recovery::{self, RecoveryReport};
use crate::request_queue::Requests;
use crate::state::State;
use crate::stats::Counters;

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
        if options.io == JournalIo::Dedicated && options.pipeline == PipelineMode::Dual {
            let message =
                "a dedicated journal thread has one commit at a time: use the serial pipeline";
            return Err(JournalError::Usage(message.into()));
        }
        let plan = recovery::scan(&device, &map, block_size)?;
        let table = plan.area_table()?;
        let area::Found { transactions: pending, newest_dropped } = plan.scan_areas()?;
        if !pending.is_empty() && !options.replays_ijournal {
            return Err(JournalError::NeedsIjournalReplay { count: pending.len() });
        }
        let mut report = plan.apply_fitted(options.fit_replayed, options.replayed_last)?;
        report.i_transactions = pending.len();
        // The recovery's own transaction is then at least as new as all of them, so its commit
        // invalidates them. Barriers of this mount are of no transaction that has some already.
        let applied = pending.iter().map(|transaction| transaction.tid);
        for tid in applied.chain(newest_dropped.map(Tid::next)) {
            if tid.newer_than(report.next_tid) {
                report.next_tid = tid;
            }
        }
        let (mut superblock, block) = recovery::read_superblock(&device, &map, block_size)?;
        let areas =
            table.map(|table| Areas::new(table, &superblock, pending, &map, device.object_bytes()));
        let before = superblock.encode();
        let pending = !report.fast_commit_records.is_empty();
        recovery::apply_features(&mut superblock, options, pending);
        let changed = before != superblock.encode();
        let start = superblock.s_start;
        let has_area = pending || (options.fast_commit && superblock.has_fast_commit_room());
        let log = Log::new(
            device.clone(),
            map,
            superblock,
            block,
            has_area,
            options.descriptor_blocks_max,
        );
        if !pending {
            fast_commit_area::wipe_stale_head(&log)?;
        }
        let next_tid = report.next_tid;
        let in_use = pending && start != 0;
        let head = if in_use { start } else { log.first };
        let thread = match options.io {
            JournalIo::Dedicated => Some(JournalThread::start()?),
            JournalIo::Cooperative => None,
        };
        let journal =
            Journal::build(device, block_size, (Some(log), areas, thread), options, next_tid, head);
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
        let none = (None, None, None);
        Journal::build(device, block_size, none, &JournalOptions::default(), Tid(1), 0)
    }

    fn build(
        device: Arc<dyn Device>,
        block_size: usize,
        (log, areas, thread): (Option<Log>, Option<Areas>, Option<JournalThread>),
        options: &JournalOptions,
        next_tid: Tid,
        head: u32,
    ) -> Journal {
        let default_max = log.as_ref().map_or(u32::MAX, |log| log.len() / 3);
        let max = options.transaction_blocks_max.unwrap_or(default_max).min(default_max);
        let state = State::new(next_tid, head);
        let area = log.as_ref().and_then(Area::new);
        let ordered = options.barrier && log.is_some() && device.keeps_order();
        let log_exists = log.is_some();
        let inner = Inner {
            ordered,
            dual: options.pipeline == PipelineMode::Dual && log_exists,
            lists: options.lists,
            io: options.io,
            helpers_max: options.helpers_max.unwrap_or_else(spare_processors),
            thread,
            checkpoint_writes: CheckpointWrites::default(),
            device,
            block_size,
            log,
            areas,
            area,
            whole_log: AtomicBool::new(false),
            barrier: options.barrier,
            commit_time: options.commit_time,
            transaction_blocks_max: max,
            parts: OnceLock::new(),
            last_changes: OnceLock::new(),
            checkpoint_lock: RwLock::new(Rank::Checkpoint, ()),
            checkpoint_claims: CheckpointClaims::default(),
            tail_lock: Mutex::new(Rank::CheckpointTail, ()),
            committed: AtomicU32::new(state.committed.0),
            current: ArcSwapOption::empty(),
            state: Mutex::new(Rank::JournalState, state),
            drained: Condvar::new(),
            unlocked: Condvar::new(),
            commit_lock_freed: Condvar::new(),
            settle_lock_freed: Condvar::new(),
            ended: Condvar::new(),
            live: LiveBuffers::default(),
            error: OnceLock::new(),
            requests: Requests::default(),
            counters: Counters::default(),
        };
        Journal { inner: Arc::new(inner) }
    }
}

/// Processors besides the one of the thread that commits; one at least.
fn spare_processors() -> usize {
    std::thread::available_parallelism().map_or(1, |count| count.get().saturating_sub(1).max(1))
}
