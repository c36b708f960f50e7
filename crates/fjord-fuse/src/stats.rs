//! Counters of a mount, for `fjord stats`: an ioctl returns them as JSON.
//!
//! The text goes through a buffer of fixed size, because the size is part of an ioctl's number and
//! the kernel lets no more through. Anybody who can open a directory of the mount may ask.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::UNIX_EPOCH;

use fjord::{Event, Failure, Fs, Stats};
use fjord_block::lock::{LockStats, allocation_count, lock_stats};
use serde::{Deserialize, Serialize};

/// Room for the text; an ioctl's number tells sizes below 16 KiB.
const TEXT_BYTES: usize = 15 << 10;
/// What is told of a message, in bytes.
const MESSAGE_BYTES_MAX: usize = 400;
/// `_IOR('J', 1, [u8; TEXT_BYTES])`.
pub(crate) const FJORD_IOC_STATS: u32 = 2 << 30 | (TEXT_BYTES as u32) << 16 | 0x4a << 8 | 1;
/// Quantiles of latency that are told.
const QUANTILES: [(&str, f64); 5] =
    [("p50", 0.5), ("p95", 0.95), ("p99", 0.99), ("p99_9", 0.999), ("max", 1.0)];

/// What a mount has done since it was made.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountStats {
    /// The fsync policy in use.
    pub fsync_policy: String,
    /// fsync and fdatasync.
    pub fsync: FsyncReport,
    /// fbarrier and fdatabarrier.
    pub barriers: BarrierReport,
    /// The log.
    pub journal: JournalReport,
    /// Areas for i-transactions; None where the image has none.
    pub areas: Option<AreasReport>,
    /// Memory in use.
    pub cache: CacheReport,
    /// The device.
    pub device: DeviceReport,
    /// Requests of the kernel, by the lower-case name of what they ask for.
    #[serde(default)]
    pub requests: BTreeMap<String, u64>,
    /// What went wrong.
    pub health: HealthReport,
    /// What locks cost the process, most waited for first; None in a build that does not count it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub locks: Option<Vec<LockReport>>,
    /// Allocations of the process; None in a build that does not count them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allocations: Option<u64>,
}

/// What went wrong since the mount.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HealthReport {
    /// Nothing can be changed, by choice or because of an error.
    pub read_only: bool,
    /// The error that made it so.
    pub failure: Option<FailureReport>,
    /// The latest warnings and errors, oldest first.
    pub events: Vec<EventReport>,
}

/// The first error that made the file system read-only.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailureReport {
    /// When, in seconds since 1970-01-01 UTC.
    pub time: i64,
    /// What failed, and where.
    pub error: String,
}

/// A warning or an error.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventReport {
    /// When it happened, for the last time, in seconds since 1970-01-01 UTC.
    pub time: i64,
    /// `warning` or `error`.
    pub severity: String,
    /// What happened.
    pub message: String,
    /// How often.
    pub count: u64,
}

impl HealthReport {
    fn of(fs: &Fs, stats: &Stats) -> HealthReport {
        let event = |event: &Event| EventReport {
            time: event.time.sec,
            severity: event.severity.name().into(),
            message: shortened(&event.message),
            count: event.count,
        };
        let failure = |failure: &Failure| FailureReport {
            time: failure.time.sec,
            error: shortened(&failure.error.to_string()),
        };
        HealthReport {
            read_only: fs.is_read_only(),
            failure: stats.failure.as_ref().map(failure),
            events: stats.events.iter().map(event).collect(),
        }
    }
}

fn shortened(message: &str) -> String {
    if message.len() <= MESSAGE_BYTES_MAX {
        return message.to_owned();
    }
    let ends = (0..MESSAGE_BYTES_MAX - 2).rev().find(|at| message.is_char_boundary(*at));
    format!("{}...", &message[..ends.unwrap_or(0)])
}

/// How fsyncs were served.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FsyncReport {
    /// Calls that succeeded.
    pub calls: u64,
    /// Nothing had changed.
    pub nothing: u64,
    /// Data in place and a flush, no metadata.
    pub data: u64,
    /// By the policy.
    pub policy: u64,
    /// By a commit of everything, by reason.
    pub fallbacks: BTreeMap<String, u64>,
    /// Calls that failed.
    pub failed: u64,
    /// Blocks written to a log of the policy's own.
    pub log_blocks: u64,
    /// Bytes of file data among them.
    pub inline_data_bytes: u64,
    /// Latency by quantile, in microseconds, at most an eighth too large.
    pub latency_us: BTreeMap<String, u64>,
    /// Calls by latency: the largest value of each bucket in microseconds, and how many.
    pub latency_histogram: Vec<(u64, u64)>,
}

/// How barrier calls were served.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BarrierReport {
    /// Calls that gave order without a wait for the device.
    pub ordered: u64,
    /// Calls that were an fsync: neither policy nor device keeps order for them.
    pub as_fsync: u64,
    /// Waits of calls for the writes of earlier ones, because of the bound on memory.
    #[serde(default)]
    pub waits: u64,
    /// Bytes of calls that may be in flight.
    #[serde(default)]
    pub bytes_max: u64,
    /// Calls that programs made as fsync or fdatasync, of files that order only.
    #[serde(default)]
    pub fsyncs: u64,
}

/// Counters of the log.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct JournalReport {
    /// Commits.
    pub commits: u64,
    /// Metadata blocks logged.
    pub metadata_blocks: u64,
    /// Blocks of file data logged.
    pub data_blocks: u64,
    /// Descriptor and revoke blocks logged.
    pub control_blocks: u64,
    /// Flushes sent by commits and checkpoints.
    pub flushes: u64,
    /// Blocks written by checkpoints.
    pub checkpoint_blocks: u64,
    /// Blocks that joined a transaction.
    #[serde(default)]
    pub joined_blocks: u64,
    /// Of these, blocks with a version in flight, whose contents are copied.
    #[serde(default)]
    pub conflicting_blocks: u64,
}

/// Areas of i-transactions.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AreasReport {
    /// How many there are.
    pub count: u32,
    /// Blocks of each.
    pub area_blocks: u32,
    /// Blocks of live i-transactions (some may have committed since).
    pub live_blocks: u64,
    /// I-transactions written.
    pub transactions: u64,
    /// Their blocks.
    pub blocks: u64,
    /// I-transactions for which no area had space.
    pub full: u64,
}

/// Bytes of memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheReport {
    /// File pages.
    pub pages_bytes: u64,
    /// Those that are dirty.
    pub dirty_bytes: u64,
    /// Since when the file system that holds the image is full, in seconds since 1970; what is
    /// dirty waits for room there.
    #[serde(default)]
    pub full_below_since: Option<u64>,
    /// Metadata blocks.
    pub metadata_bytes: u64,
}

/// What reached the device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceReport {
    /// Reads.
    pub read_count: u64,
    /// Their bytes.
    pub read_bytes: u64,
    /// Writes.
    pub write_count: u64,
    /// Their bytes.
    pub write_bytes: u64,
    /// Writes with FUA.
    pub fua_count: u64,
    /// Flushes asked for.
    pub flush_count: u64,
    /// Flushes sent; the rest were combined or had nothing to do.
    pub flush_issued_count: u64,
    /// Requests that failed.
    pub error_count: u64,
}

/// The locks of one rank: docs/locking.md says which lock it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LockReport {
    /// Name of the rank.
    pub lock: String,
    /// Times taken.
    pub taken: u64,
    /// Times taken after a wait of a microsecond or more.
    pub waited: u64,
    /// Time of those waits.
    pub waited_ns: u64,
    /// Time for which it was held.
    pub held_ns: u64,
    /// The longest time in one piece.
    pub held_ns_max: u64,
}

impl From<&LockStats> for LockReport {
    fn from(stats: &LockStats) -> LockReport {
        LockReport {
            lock: format!("{:?}", stats.rank),
            taken: stats.taken_count,
            waited: stats.waited_count,
            waited_ns: stats.waited_ns,
            held_ns: stats.held_ns,
            held_ns_max: stats.held_ns_max,
        }
    }
}

fn locks() -> Option<Vec<LockReport>> {
    let mut locks: Vec<LockReport> = lock_stats()?.iter().map(LockReport::from).collect();
    locks.sort_by_key(|lock| std::cmp::Reverse((lock.waited_ns, lock.held_ns)));
    Some(locks)
}

impl MountStats {
    /// The counters of an open file system; those of requests are the server's.
    pub fn of(fs: &Fs) -> MountStats {
        let stats = fs.stats();
        let latency = &stats.fsync.latency_us;
        let (reads, writes) = (stats.device.reads_total(), stats.device.writes_total());
        MountStats {
            fsync_policy: stats.fsync_policy.into(),
            fsync: FsyncReport {
                calls: stats.fsync.calls(),
                nothing: stats.fsync.nothing,
                data: stats.fsync.data,
                policy: stats.fsync.policy,
                fallbacks: stats
                    .fsync
                    .fallbacks
                    .iter()
                    .map(|(why, count)| (why.name().into(), *count))
                    .collect(),
                failed: stats.fsync.failed,
                log_blocks: stats.fsync.log_blocks,
                inline_data_bytes: stats.fsync.inline_data_bytes,
                latency_us: QUANTILES
                    .iter()
                    .map(|(name, quantile)| ((*name).into(), latency.quantile_us(*quantile)))
                    .collect(),
                latency_histogram: latency.buckets.clone(),
            },
            barriers: BarrierReport {
                ordered: stats.barriers,
                as_fsync: stats.barriers_as_fsync,
                waits: stats.journal.barrier_waits,
                bytes_max: stats.barrier_bytes_max,
                fsyncs: stats.fsyncs_order_only,
            },
            journal: JournalReport {
                commits: stats.journal.commits,
                metadata_blocks: stats.journal.metadata_blocks,
                data_blocks: stats.journal.data_blocks,
                control_blocks: stats.journal.descriptor_blocks + stats.journal.revoke_blocks,
                flushes: stats.journal.flushes,
                checkpoint_blocks: stats.journal.checkpoint_blocks,
                joined_blocks: stats.journal.joined_blocks,
                conflicting_blocks: stats.journal.conflicting_blocks,
            },
            areas: stats.areas.map(|areas| AreasReport {
                count: areas.area_count,
                area_blocks: areas.area_blocks,
                live_blocks: areas.live_blocks,
                transactions: areas.transactions,
                blocks: areas.blocks,
                full: areas.full,
            }),
            cache: CacheReport {
                pages_bytes: stats.cached_pages_bytes,
                dirty_bytes: stats.dirty_pages_bytes,
                full_below_since: stats
                    .full_below_since
                    .map(|since| since.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()),
                metadata_bytes: stats.cached_metadata_bytes,
            },
            device: DeviceReport {
                read_count: reads.request_count,
                read_bytes: reads.bytes,
                write_count: writes.request_count,
                write_bytes: writes.bytes,
                fua_count: stats.device.fua_count,
                flush_count: stats.device.flush_count.iter().sum(),
                flush_issued_count: stats.device.flush_issued_count,
                error_count: stats.device.error_count,
            },
            requests: BTreeMap::new(),
            health: HealthReport::of(fs, &stats),
            locks: locks(),
            allocations: allocation_count(),
        }
    }

    /// As the ioctl gives it: JSON, zeroes after. What does not fit is left out: the histogram,
    /// then the oldest events, then the locks that cost least.
    pub(crate) fn to_bytes(&self) -> Option<Vec<u8>> {
        let mut short = self.clone();
        let mut text = serde_json::to_vec(&short).ok()?;
        while text.len() > TEXT_BYTES {
            if !short.fsync.latency_histogram.is_empty() {
                short.fsync.latency_histogram.clear();
            } else if !short.health.events.is_empty() {
                short.health.events.remove(0);
            } else if short.locks.as_mut().and_then(Vec::pop).is_none() {
                return None;
            }
            text = serde_json::to_vec(&short).ok()?;
        }
        text.resize(TEXT_BYTES, 0);
        Some(text)
    }

    /// Asks the mount at `dir`, which may be any directory or file of it.
    ///
    /// # Errors
    /// `ENOTTY` if it is no mount of fjord; errors of opening it.
    pub fn read(dir: &Path) -> io::Result<MountStats> {
        let file = File::open(dir)?;
        let mut text = vec![0u8; TEXT_BYTES];
        // SAFETY: the number says that at most TEXT_BYTES are written, and `text` has as many.
        let rc = unsafe {
            libc::ioctl(file.as_raw_fd(), FJORD_IOC_STATS as libc::Ioctl, text.as_mut_ptr())
        };
        if rc < 0 {
            return Err(io::Error::last_os_error());
        }
        let len = text.iter().position(|byte| *byte == 0).unwrap_or(text.len());
        serde_json::from_slice(&text[..len]).map_err(io::Error::from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_fits_whatever_was_counted() {
        let mut stats = MountStats { fsync_policy: "compound".into(), ..MountStats::default() };
        let bytes = stats.to_bytes().unwrap();
        assert_eq!(bytes.len(), TEXT_BYTES);
        let len = bytes.iter().position(|byte| *byte == 0).unwrap();
        assert_eq!(serde_json::from_slice::<MountStats>(&bytes[..len]).unwrap(), stats);
        // As many buckets as there can be, all full.
        stats.fsync.latency_histogram = vec![(u64::MAX, u64::MAX); 288];
        let event = |number| EventReport {
            time: number,
            severity: "warning".into(),
            // Six bytes each in JSON.
            message: shortened(&"\u{1}".repeat(1000)),
            count: u64::MAX,
        };
        stats.health.events = (0..16).map(event).collect();
        let bytes = stats.to_bytes().unwrap();
        let len = bytes.iter().position(|byte| *byte == 0).unwrap();
        let short: MountStats = serde_json::from_slice(&bytes[..len]).unwrap();
        assert_eq!(short.fsync.latency_histogram, []);
        assert_eq!(short.fsync_policy, "compound");
        let kept = short.health.events;
        assert!(!kept.is_empty() && kept.len() < 16 && kept.last().unwrap().time == 15);
    }

    #[test]
    fn what_is_no_mount_says_so() {
        let error = MountStats::read(Path::new("/proc")).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOTTY));
    }
}
