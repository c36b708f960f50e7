//! Counters that many threads can increment without sharing a cache line.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

const SHARD_COUNT: usize = 16;

/// One shard, alone on its pair of cache lines.
#[repr(align(128))]
struct Shard(AtomicU64);

/// A counter spread over shards; sums wrap, so that `sub` may hit another shard than `add` did.
pub(crate) struct ShardedCounter([Shard; SHARD_COUNT]);

/// The shard of this thread, always below `SHARD_COUNT`.
pub(crate) fn shard_index() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static INDEX: usize = NEXT.fetch_add(1, Ordering::Relaxed) % SHARD_COUNT;
    }
    // A thread that is ending has lost its locals; any shard will do.
    INDEX.try_with(|index| *index).unwrap_or(0)
}

impl ShardedCounter {
    pub(crate) const fn new() -> Self {
        ShardedCounter([const { Shard(AtomicU64::new(0)) }; SHARD_COUNT])
    }

    pub(crate) fn add(&self, n: u64) {
        self.0[shard_index()].0.fetch_add(n, Ordering::Relaxed);
    }

    pub(crate) fn sub(&self, n: u64) {
        self.0[shard_index()].0.fetch_sub(n, Ordering::Relaxed);
    }

    /// The sum over all shards; exact if no thread counts concurrently.
    pub(crate) fn sum(&self) -> u64 {
        self.0.iter().fold(0, |sum, shard| sum.wrapping_add(shard.0.load(Ordering::Relaxed)))
    }
}
