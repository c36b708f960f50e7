//! Counters of the journal.
//!
//! Invariant: counters only grow; they are relaxed atomics, so a snapshot may miss operations in
//! progress.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

macro_rules! counters {
    ($($(#[doc = $doc:literal])* $name:ident),* $(,)?) => {
        /// A snapshot of the journal's counters.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct JournalStats {
            $($(#[doc = $doc])* pub $name: u64,)*
        }

        /// The live counters.
        #[derive(Debug, Default)]
        pub(crate) struct Counters {
            $(pub(crate) $name: AtomicU64,)*
        }

        impl Counters {
            pub(crate) fn snapshot(&self) -> JournalStats {
                JournalStats { $($name: self.$name.load(Ordering::Relaxed),)* }
            }
        }
    };
}

counters! {
    /// Handles started.
    handles,
    /// Commits: of whole transactions and of parts.
    commits,
    /// Partial commits.
    partial_commits,
    /// Commits that began while another was in flight.
    overlapped_commits,
    /// Metadata blocks logged (without a log: written to their home locations by a commit).
    metadata_blocks,
    /// Blocks of file data logged.
    data_blocks,
    /// Descriptor blocks logged.
    descriptor_blocks,
    /// Revoke blocks logged.
    revoke_blocks,
    /// Blocks named in revoke blocks.
    revoke_records,
    /// Flushes sent by commits and checkpoints.
    flushes,
    /// Versions written by checkpoints.
    checkpoint_blocks,
    /// Versions never written by a checkpoint, because of a newer version or a free.
    superseded_blocks,
    /// Writes of the journal superblock.
    superblock_writes,
    /// Blocks that joined a transaction.
    joined_blocks,
    /// Of these, blocks with a version in flight (page conflicts): their contents are copied.
    conflicting_blocks,
    /// Handle starts that had to wait.
    start_waits,
    /// Time they waited, in nanoseconds.
    start_wait_nanoseconds,
    /// Commits that a caller waited for, done by another thread.
    commit_waits,
    /// Time spent in commits by the threads that did them, in nanoseconds.
    commit_nanoseconds,
    /// Fast commits written.
    fast_commits,
    /// Requests that fast commits made durable: several may share one.
    fast_commit_requests,
    /// Blocks of fast commits.
    fast_commit_blocks,
    /// Handle starts that had to checkpoint themselves.
    log_full,
    /// Barriers written to the areas.
    barriers,
    /// Rounds that made barriers durable, with one flush each, or two.
    barrier_rounds,
    /// Waits of callers for barriers before theirs, because of the bound on memory.
    barrier_waits,
}

/// Adds to a counter.
pub(crate) fn add(counter: &AtomicU64, count: usize) {
    counter.fetch_add(count as u64, Ordering::Relaxed);
}

/// Adds a duration to a counter of nanoseconds.
pub(crate) fn add_time(counter: &AtomicU64, time: Duration) {
    counter.fetch_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
}
