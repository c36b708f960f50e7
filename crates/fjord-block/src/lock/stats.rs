//! What locks cost, by rank. Owns the counters of the process, in builds with the feature `lock-stats`.
//!
//! Each thread counts in one of a few sets, so that counting does not make threads wait for each other;
//! the sets are added up when they are read. Reading while others count gives a figure of that time.

#[cfg(feature = "lock-stats")]
use std::{
    sync::atomic::{AtomicU64, AtomicUsize, Ordering},
    time::Duration,
};

use super::rank::Rank;

/// Counters of the locks of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LockStats {
    /// The rank.
    pub rank: Rank,
    /// Times that a lock was taken.
    pub taken_count: u64,
    /// Times that it was taken after a wait of a microsecond or more.
    pub waited_count: u64,
    /// Time of those waits, in nanoseconds.
    pub waited_ns: u64,
    /// Time for which a lock was held, in nanoseconds, without waits on a condition variable.
    pub held_ns: u64,
    /// The longest time in one piece.
    pub held_ns_max: u64,
}

/// A shorter wait is the cost of taking a free lock.
#[cfg(feature = "lock-stats")]
const WAITED_NS_MIN: u64 = 1000;
#[cfg(feature = "lock-stats")]
const SET_COUNT: usize = 32;
/// Above the number of every rank.
#[cfg(feature = "lock-stats")]
const RANK_END: usize = 1024;

#[cfg(feature = "lock-stats")]
struct Counters {
    taken_count: AtomicU64,
    waited_count: AtomicU64,
    waited_ns: AtomicU64,
    held_ns: AtomicU64,
    held_ns_max: AtomicU64,
}

#[cfg(feature = "lock-stats")]
impl Counters {
    const fn new() -> Counters {
        Counters {
            taken_count: AtomicU64::new(0),
            waited_count: AtomicU64::new(0),
            waited_ns: AtomicU64::new(0),
            held_ns: AtomicU64::new(0),
            held_ns_max: AtomicU64::new(0),
        }
    }
}

/// By the set of a thread and the number of a rank.
#[cfg(feature = "lock-stats")]
static SETS: [[Counters; RANK_END]; SET_COUNT] =
    [const { [const { Counters::new() }; RANK_END] }; SET_COUNT];
#[cfg(feature = "lock-stats")]
static THREAD_COUNT: AtomicUsize = AtomicUsize::new(0);

#[cfg(feature = "lock-stats")]
thread_local! {
    static SET: usize = THREAD_COUNT.fetch_add(1, Ordering::Relaxed) % SET_COUNT;
}

#[cfg(feature = "lock-stats")]
fn counters(rank: Rank) -> &'static Counters {
    // A thread that ends may lock after its set is gone.
    let set = SET.try_with(|set| *set).unwrap_or(0);
    &SETS[set][usize::from(rank.number())]
}

#[cfg(feature = "lock-stats")]
fn ns(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// A lock of this rank was taken after this time.
#[cfg(feature = "lock-stats")]
pub(super) fn count_taken(rank: Rank, waited: Duration) {
    let (counters, waited_ns) = (counters(rank), ns(waited));
    counters.taken_count.fetch_add(1, Ordering::Relaxed);
    if waited_ns >= WAITED_NS_MIN {
        counters.waited_count.fetch_add(1, Ordering::Relaxed);
        counters.waited_ns.fetch_add(waited_ns, Ordering::Relaxed);
    }
}

/// A lock of this rank was held for this time.
#[cfg(feature = "lock-stats")]
pub(super) fn count_held(rank: Rank, held: Duration) {
    let (counters, held_ns) = (counters(rank), ns(held));
    counters.held_ns.fetch_add(held_ns, Ordering::Relaxed);
    counters.held_ns_max.fetch_max(held_ns, Ordering::Relaxed);
}

/// The counters of all ranks whose locks were taken, lowest first; `None` in a build without the feature
/// `lock-stats`.
#[cfg(feature = "lock-stats")]
pub fn lock_stats() -> Option<Vec<LockStats>> {
    let of = |rank: Rank| {
        let mut sum = LockStats {
            rank,
            taken_count: 0,
            waited_count: 0,
            waited_ns: 0,
            held_ns: 0,
            held_ns_max: 0,
        };
        for set in &SETS {
            let one = &set[usize::from(rank.number())];
            sum.taken_count += one.taken_count.load(Ordering::Relaxed);
            sum.waited_count += one.waited_count.load(Ordering::Relaxed);
            sum.waited_ns += one.waited_ns.load(Ordering::Relaxed);
            sum.held_ns += one.held_ns.load(Ordering::Relaxed);
            sum.held_ns_max = sum.held_ns_max.max(one.held_ns_max.load(Ordering::Relaxed));
        }
        sum
    };
    Some(Rank::ALL.iter().map(|rank| of(*rank)).filter(|sum| sum.taken_count > 0).collect())
}

/// The counters of all ranks whose locks were taken, lowest first; `None` in a build without the feature
/// `lock-stats`.
#[cfg(not(feature = "lock-stats"))]
pub fn lock_stats() -> Option<Vec<LockStats>> {
    None
}

/// Sets the counters to zero. What other threads count meanwhile may be lost in part.
pub fn reset_lock_stats() {
    #[cfg(feature = "lock-stats")]
    for one in SETS.iter().flatten() {
        one.taken_count.store(0, Ordering::Relaxed);
        one.waited_count.store(0, Ordering::Relaxed);
        one.waited_ns.store(0, Ordering::Relaxed);
        one.held_ns.store(0, Ordering::Relaxed);
        one.held_ns_max.store(0, Ordering::Relaxed);
    }
}

impl Rank {
    /// Whether a file system has one lock of this rank, which no two threads hold at a time: what it is held
    /// for, per operation, bounds how far a file system scales. Others are shared (`Checkpoint`, `AreaMark`), or
    /// belong to a file, a block, a request, or a part of a table; those of the modelled device and of the program are no part of a file system.
    pub fn is_of_the_file_system(self) -> bool {
        matches!(
            self,
            Rank::FuseWorkers
                | Rank::FuseDuty
                | Rank::Resize
                | Rank::Rename
                | Rank::CommitLock
                | Rank::SettleLock
                | Rank::CheckpointTail
                | Rank::CheckpointClaims
                | Rank::FastCommitStream
                | Rank::LogSuperblock
                | Rank::OrphanSerial
                | Rank::Trim
                | Rank::Superblock
                | Rank::CommitRequests
                | Rank::JournalState
                | Rank::TransactionContents
                | Rank::CheckpointWrites
                | Rank::FastCommitQueue
                | Rank::PendingITransactions
                | Rank::Epochs
                | Rank::OrphanState
                | Rank::Releases
                | Rank::Budget
                | Rank::Pace
                | Rank::Freed
                | Rank::Discarding
                | Rank::StaleTails
                | Rank::HostRoom
                | Rank::UncommittedSizes
                | Rank::GroupPlaces
                | Rank::Zones
                | Rank::PageLru
                | Rank::QuasiAsyncWrites
                | Rank::EpochQueue
                | Rank::FileFlush
                | Rank::FileHelpers
                | Rank::RingSubmission
                | Rank::RingLead
        )
    }
}
