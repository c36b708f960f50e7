//! Statistics of fsync: calls by outcome, fallbacks by reason, blocks, latency.
//!
//! All counters are atomic and independent: a snapshot taken meanwhile may be one call apart.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::inode::changes::CommitReason;

/// Why an fsync made a full commit although the policy is finer (fallback).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Fallback {
    /// The inode is a directory or another file that is not regular.
    NotAFile,
    /// A hard link of the file was added or removed.
    HardLink,
    /// The file was renamed.
    Rename,
    /// In the last commit its name belonged to a file that cannot simply be replaced.
    NameReuse,
    /// The file has no name, or is being truncated in several steps.
    Orphan,
    /// Its extended attributes outside the inode changed.
    Attributes,
    /// It has a block map, not extents.
    BlockMap,
    /// Its data goes through the journal.
    DataJournal,
    /// A part of it was collapsed or inserted.
    ShiftedRange,
    /// It was evicted with uncommitted changes, and read again.
    Forgotten,
    /// The changes are too large for the policy's log.
    TooLarge,
    /// The policy's log is full until the next commit.
    LogFull,
    /// The budget of recovery is used up.
    RecoveryFull,
    /// The image has no log for the policy.
    NoLog,
    /// A full commit was in progress.
    CommitUnderWay,
    /// The change is tied to everything else in the transaction.
    Entangled,
    /// Its data is inline.
    InlineData,
    /// The directory that it was made in has not committed.
    NewDirectory,
    /// Entries left the directory that it was made in, or blocks came to it.
    DirectoryChanged,
    /// Replay would have to allocate blocks for the extents of another file.
    ExtentTree,
    /// The change is tied to one of the superblock.
    Superblock,
    /// The transaction or the log of everything was full: a commit or a checkpoint came first.
    TransactionFull,
}

impl Fallback {
    /// All reasons, in order.
    pub const ALL: [Fallback; 22] = [
        Fallback::NotAFile,
        Fallback::HardLink,
        Fallback::Rename,
        Fallback::NameReuse,
        Fallback::Orphan,
        Fallback::Attributes,
        Fallback::BlockMap,
        Fallback::DataJournal,
        Fallback::ShiftedRange,
        Fallback::Forgotten,
        Fallback::TooLarge,
        Fallback::LogFull,
        Fallback::RecoveryFull,
        Fallback::NoLog,
        Fallback::CommitUnderWay,
        Fallback::Entangled,
        Fallback::InlineData,
        Fallback::NewDirectory,
        Fallback::DirectoryChanged,
        Fallback::ExtentTree,
        Fallback::Superblock,
        Fallback::TransactionFull,
    ];

    /// Name for statistics.
    pub fn name(self) -> &'static str {
        match self {
            Fallback::NotAFile => "not-a-file",
            Fallback::HardLink => "hard-link",
            Fallback::Rename => "rename",
            Fallback::NameReuse => "name-reuse",
            Fallback::Orphan => "orphan",
            Fallback::Attributes => "attributes",
            Fallback::BlockMap => "block-map",
            Fallback::DataJournal => "data-journal",
            Fallback::ShiftedRange => "shifted-range",
            Fallback::Forgotten => "forgotten",
            Fallback::TooLarge => "too-large",
            Fallback::LogFull => "log-full",
            Fallback::RecoveryFull => "recovery-full",
            Fallback::NoLog => "no-log",
            Fallback::CommitUnderWay => "commit-under-way",
            Fallback::Entangled => "entangled",
            Fallback::InlineData => "inline-data",
            Fallback::NewDirectory => "new-directory",
            Fallback::DirectoryChanged => "directory-changed",
            Fallback::ExtentTree => "extent-tree",
            Fallback::Superblock => "superblock",
            Fallback::TransactionFull => "transaction-full",
        }
    }
}

impl From<CommitReason> for Fallback {
    fn from(why: CommitReason) -> Fallback {
        match why {
            CommitReason::HardLink => Fallback::HardLink,
            CommitReason::Rename => Fallback::Rename,
            CommitReason::Attributes => Fallback::Attributes,
            CommitReason::ShiftedRange => Fallback::ShiftedRange,
            CommitReason::Entangled => Fallback::Entangled,
            CommitReason::TooLarge => Fallback::TooLarge,
            CommitReason::Forgotten => Fallback::Forgotten,
        }
    }
}

/// How an fsync was served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Nothing had changed.
    Nothing,
    /// Overwritten data and a flush; no metadata.
    Data,
    /// By the policy of the mount.
    Policy,
    /// By a full commit.
    Fallback(Fallback),
}

/// Counters of one mount.
#[derive(Debug, Default)]
pub(crate) struct FsyncCounters {
    nothing: AtomicU64,
    data: AtomicU64,
    policy: AtomicU64,
    fallbacks: [AtomicU64; Fallback::ALL.len()],
    failed: AtomicU64,
    /// Blocks and bytes that the policy's own log took.
    log_blocks: AtomicU64,
    inline_data_bytes: AtomicU64,
    latency: Histogram,
}

impl FsyncCounters {
    /// Counts a call that succeeded.
    pub(crate) fn served(&self, outcome: Outcome, took: Duration) {
        let counter = match outcome {
            Outcome::Nothing => &self.nothing,
            Outcome::Data => &self.data,
            Outcome::Policy => &self.policy,
            Outcome::Fallback(why) => &self.fallbacks[why as usize],
        };
        counter.fetch_add(1, Ordering::Relaxed);
        self.latency.record(took);
    }

    /// Counts a call that failed.
    pub(crate) fn failed(&self) {
        self.failed.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts what a policy wrote to a log of its own: blocks in all, and how many bytes of
    /// them were file data.
    pub(crate) fn logged(&self, blocks: u64, data_bytes: u64) {
        self.log_blocks.fetch_add(blocks, Ordering::Relaxed);
        self.inline_data_bytes.fetch_add(data_bytes, Ordering::Relaxed);
    }

    /// The counters now.
    pub(crate) fn snapshot(&self) -> FsyncStats {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        FsyncStats {
            nothing: get(&self.nothing),
            data: get(&self.data),
            policy: get(&self.policy),
            fallbacks: Fallback::ALL
                .iter()
                .zip(&self.fallbacks)
                .map(|(&why, count)| (why, get(count)))
                .filter(|&(_, count)| count > 0)
                .collect(),
            failed: get(&self.failed),
            log_blocks: get(&self.log_blocks),
            inline_data_bytes: get(&self.inline_data_bytes),
            latency_us: self.latency.snapshot(),
        }
    }
}

/// Statistics of fsync and fdatasync calls since the mount.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct FsyncStats {
    /// Calls that found nothing to do.
    pub nothing: u64,
    /// Calls that wrote data in place and flushed, with no metadata.
    pub data: u64,
    /// Calls served by the mount's policy.
    pub policy: u64,
    /// Fallbacks: calls served by a full commit instead, by reason; reasons without calls are left
    /// out.
    pub fallbacks: Vec<(Fallback, u64)>,
    /// Calls that failed.
    pub failed: u64,
    /// Blocks written to a log of the policy's own.
    pub log_blocks: u64,
    /// Bytes of file data among them.
    pub inline_data_bytes: u64,
    /// Latency of the calls that succeeded, in microseconds.
    pub latency_us: LatencyHistogram,
}

impl FsyncStats {
    /// Calls that succeeded.
    pub fn calls(&self) -> u64 {
        let fallbacks: u64 = self.fallbacks.iter().map(|&(_, count)| count).sum();
        self.nothing + self.data + self.policy + fallbacks
    }
}

/// Sub-buckets per power of two.
const SUB_BUCKETS: usize = 8;
/// Powers of two: the last bucket takes all from 2^35 us (9 hours) on.
const POWERS: usize = 36;
const BUCKETS: usize = POWERS * SUB_BUCKETS;

/// Log-linear buckets, each at most an eighth wider than its start.
#[derive(Debug)]
struct Histogram {
    buckets: [AtomicU64; BUCKETS],
}

impl Default for Histogram {
    fn default() -> Histogram {
        Histogram { buckets: std::array::from_fn(|_| AtomicU64::new(0)) }
    }
}

impl Histogram {
    fn record(&self, took: Duration) {
        let us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        self.buckets[bucket_of(us)].fetch_add(1, Ordering::Relaxed);
    }

    fn snapshot(&self) -> LatencyHistogram {
        let count = |bucket: &AtomicU64| bucket.load(Ordering::Relaxed);
        let counts = self.buckets.iter().map(count).enumerate();
        let filled = counts.filter(|&(_, count)| count > 0);
        LatencyHistogram { buckets: filled.map(|(i, count)| (upper_us(i), count)).collect() }
    }
}

/// The bucket of a value: exact below 16, then eight per power of two.
fn bucket_of(us: u64) -> usize {
    let exact = 2 * SUB_BUCKETS as u64;
    if us < exact {
        return us as usize;
    }
    let power = us.ilog2();
    let sub = (us >> (power - SUB_BUCKETS.ilog2())) as usize - SUB_BUCKETS;
    let first = (power - SUB_BUCKETS.ilog2()) as usize * SUB_BUCKETS + SUB_BUCKETS;
    (first + sub).min(BUCKETS - 1)
}

/// The largest value of a bucket.
fn upper_us(bucket: usize) -> u64 {
    if bucket < 2 * SUB_BUCKETS {
        return bucket as u64;
    }
    let shift = bucket / SUB_BUCKETS - 1;
    let start = ((bucket % SUB_BUCKETS + SUB_BUCKETS) as u64) << shift;
    start + (1 << shift) - 1
}

/// Latencies in buckets.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LatencyHistogram {
    /// Largest value of each bucket that is not empty, in microseconds, and how many are in
    /// it; ascending.
    pub buckets: Vec<(u64, u64)>,
}

impl LatencyHistogram {
    /// How many were recorded.
    pub fn count(&self) -> u64 {
        self.buckets.iter().map(|&(_, count)| count).sum()
    }

    /// The value that `quantile` (0 to 1) of all do not exceed, in microseconds, at most an
    /// eighth too large; 0 without any.
    pub fn quantile_us(&self, quantile: f64) -> u64 {
        let wanted = (self.count() as f64 * quantile).ceil() as u64;
        let mut seen = 0;
        for &(upper_us, count) in &self.buckets {
            seen += count;
            if seen >= wanted {
                return upper_us;
            }
        }
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_hold_what_they_say() {
        let mut last = None;
        for us in (0..5000).chain([u64::from(u32::MAX), 1 << 34]) {
            let bucket = bucket_of(us);
            assert!(upper_us(bucket) >= us, "{us} in bucket {bucket}");
            assert!(upper_us(bucket) - us <= us / 8, "{us} up to {}", upper_us(bucket));
            assert!(last.is_none_or(|last| last <= bucket));
            last = Some(bucket);
        }
        assert_eq!(bucket_of(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn quantiles_come_from_the_buckets() {
        let histogram = Histogram::default();
        for us in 1..=100 {
            histogram.record(Duration::from_micros(us));
        }
        let snapshot = histogram.snapshot();
        assert_eq!(snapshot.count(), 100);
        assert!((50..=56).contains(&snapshot.quantile_us(0.5)));
        assert!((99..=111).contains(&snapshot.quantile_us(0.99)));
    }

    #[test]
    fn every_reason_has_its_place() {
        for (place, why) in Fallback::ALL.into_iter().enumerate() {
            assert_eq!(why as usize, place, "{}", why.name());
        }
    }
}
