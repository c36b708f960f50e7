//! Request statistics, cheap enough to be always on. Owns the counters; devices bump them.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::counter::shard_index;
use crate::device::Class;

const CLASS_COUNT: usize = 3;
const SHARD_COUNT: usize = 16;

/// Requests and bytes of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpStats {
    /// Number of requests.
    pub request_count: u64,
    /// Bytes they moved.
    pub bytes: u64,
}

/// Statistics of a device since it was opened. Arrays are indexed by `Class as usize`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceStats {
    /// Reads by class.
    pub reads: [OpStats; CLASS_COUNT],
    /// Writes by class.
    pub writes: [OpStats; CLASS_COUNT],
    /// Writes that asked for FUA (also counted in `writes`).
    pub fua_count: u64,
    /// Flushes asked for, by class.
    pub flush_count: [u64; CLASS_COUNT],
    /// Flushes sent to the device; the rest were combined or had nothing to do.
    pub flush_issued_count: u64,
    /// Discards.
    pub discards: OpStats,
    /// Write-zeroes requests.
    pub write_zeroes: OpStats,
    /// Requests that failed.
    pub error_count: u64,
}

impl DeviceStats {
    /// Reads of all classes.
    pub fn reads_total(&self) -> OpStats {
        total(&self.reads)
    }

    /// Writes of all classes.
    pub fn writes_total(&self) -> OpStats {
        total(&self.writes)
    }
}

fn total(by_class: &[OpStats]) -> OpStats {
    by_class.iter().fold(OpStats::default(), |sum, op| OpStats {
        request_count: sum.request_count + op.request_count,
        bytes: sum.bytes + op.bytes,
    })
}

#[derive(Default)]
struct Op {
    request_count: AtomicU64,
    bytes: AtomicU64,
}

impl Op {
    fn add(&self, bytes: u64) {
        self.request_count.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    fn add_to(&self, sum: &mut OpStats) {
        sum.request_count += self.request_count.load(Ordering::Relaxed);
        sum.bytes += self.bytes.load(Ordering::Relaxed);
    }
}

#[derive(Default)]
#[repr(align(128))]
struct Shard {
    reads: [Op; CLASS_COUNT],
    writes: [Op; CLASS_COUNT],
    discards: Op,
    write_zeroes: Op,
    flush_count: [AtomicU64; CLASS_COUNT],
    fua_count: AtomicU64,
    flush_issued_count: AtomicU64,
    error_count: AtomicU64,
}

/// The counters of [`DeviceStats`], sharded by thread; for implementers of [`crate::Device`].
#[derive(Default)]
pub struct StatCounters([Shard; SHARD_COUNT]);

impl std::fmt::Debug for StatCounters {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.snapshot().fmt(f)
    }
}

impl StatCounters {
    fn shard(&self) -> &Shard {
        &self.0[shard_index()]
    }

    /// Counts a read.
    pub fn read(&self, class: Class, bytes: u64) {
        self.shard().reads[class as usize].add(bytes);
    }

    /// Counts a write.
    pub fn write(&self, class: Class, bytes: u64, fua: bool) {
        self.shard().writes[class as usize].add(bytes);
        if fua {
            self.shard().fua_count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Counts a flush asked for.
    pub fn flush(&self, class: Class) {
        self.shard().flush_count[class as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a flush sent down.
    pub fn flush_issued(&self) {
        self.shard().flush_issued_count.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a discard.
    pub fn discard(&self, bytes: u64) {
        self.shard().discards.add(bytes);
    }

    /// Counts a write-zeroes request.
    pub fn write_zeroes(&self, bytes: u64) {
        self.shard().write_zeroes.add(bytes);
    }

    /// Counts a failed request.
    pub fn error(&self) {
        self.shard().error_count.fetch_add(1, Ordering::Relaxed);
    }

    /// The sums at this moment.
    pub fn snapshot(&self) -> DeviceStats {
        let mut sum = DeviceStats::default();
        for shard in &self.0 {
            for class in 0..CLASS_COUNT {
                shard.reads[class].add_to(&mut sum.reads[class]);
                shard.writes[class].add_to(&mut sum.writes[class]);
                sum.flush_count[class] += shard.flush_count[class].load(Ordering::Relaxed);
            }
            shard.discards.add_to(&mut sum.discards);
            shard.write_zeroes.add_to(&mut sum.write_zeroes);
            sum.fua_count += shard.fua_count.load(Ordering::Relaxed);
            sum.flush_issued_count += shard.flush_issued_count.load(Ordering::Relaxed);
            sum.error_count += shard.error_count.load(Ordering::Relaxed);
        }
        sum
    }
}
