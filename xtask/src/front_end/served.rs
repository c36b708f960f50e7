//! What serving a workload cost the daemon.

use std::{collections::BTreeMap, fs, path::Path};

use anyhow::{Context, Result};
use fjord_block::lock::Rank;
use fjord_fuse::stats::{LockReport, MountStats};
use serde_json::{Value, json};

/// Ticks of a second in /proc (USER_HZ, the same on all Linux machines).
const TICK_US: f64 = 10_000.0;

/// Counts of a daemon, since it began or in an interval.
#[derive(Clone, Debug, Default)]
pub(super) struct Served {
    requests: BTreeMap<String, u64>,
    switches: u64,
    cpu_us: f64,
    write_bytes: u64,
    /// Read from and written to /dev/fuse.
    copied_bytes: u64,
    /// Locks taken: all, and those of which a file system has one; with the allocations, where the build counts.
    inside: Option<Inside>,
    /// System calls and threads woken, where they were counted.
    calls: Option<(u64, u64)>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Inside {
    locks: u64,
    locks_of_the_file_system: u64,
    allocations: u64,
}

impl Served {
    /// The counts of the daemon `pid`, which serves `dir`.
    pub(super) fn now(pid: u32, dir: &Path) -> Result<Served> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
        // The second field is a name in parentheses; user and system time are fields 14 and 15.
        let fields = stat.rsplit_once(')').context("a name in parentheses")?.1.split_whitespace();
        let ticks: u64 =
            fields.skip(11).take(2).filter_map(|ticks| ticks.parse::<u64>().ok()).sum();
        let mut switches = 0;
        for thread in fs::read_dir(format!("/proc/{pid}/task"))? {
            // One that ends meanwhile is not counted.
            let status = fs::read_to_string(thread?.path().join("status")).unwrap_or_default();
            let counts = status.lines().filter_map(|line| line.split_once("ctxt_switches:"));
            switches += counts.filter_map(|(_, n)| n.trim().parse::<u64>().ok()).sum::<u64>();
        }
        let stats = MountStats::read(dir)?;
        let io = fs::read_to_string(format!("/proc/{pid}/io"))?;
        let copied = io.lines().filter_map(|line| line.split_once("char: "));
        let inside = stats.locks.as_ref().map(|locks| Inside {
            locks: locks.iter().map(|lock| lock.taken).sum(),
            locks_of_the_file_system: of_the_file_system(locks).sum(),
            allocations: stats.allocations.unwrap_or(0),
        });
        Ok(Served {
            requests: stats.requests,
            switches,
            cpu_us: ticks as f64 * TICK_US,
            write_bytes: stats.device.write_bytes,
            copied_bytes: copied.filter_map(|(_, bytes)| bytes.parse::<u64>().ok()).sum(),
            inside,
            calls: None,
        })
    }

    /// What came after `before`.
    pub(super) fn since(&self, before: &Served) -> Served {
        let requests = self.requests.iter().map(|(kind, count)| {
            let before = before.requests.get(kind).copied().unwrap_or(0);
            (kind.clone(), count.saturating_sub(before))
        });
        Served {
            requests: requests.filter(|(_, count)| *count > 0).collect(),
            switches: self.switches.saturating_sub(before.switches),
            cpu_us: self.cpu_us - before.cpu_us,
            write_bytes: self.write_bytes.saturating_sub(before.write_bytes),
            copied_bytes: self.copied_bytes.saturating_sub(before.copied_bytes),
            inside: self.inside.zip(before.inside).map(|(after, before)| Inside {
                locks: after.locks - before.locks,
                locks_of_the_file_system: after.locks_of_the_file_system
                    - before.locks_of_the_file_system,
                allocations: after.allocations - before.allocations,
            }),
            calls: None,
        }
    }

    /// For each of `count` operations.
    pub(super) fn show(&self, count: f64) -> String {
        let mut kinds: Vec<_> = self.requests.iter().collect();
        kinds.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
        let kinds = kinds.iter().map(|(kind, requests)| (kind, **requests as f64 / count));
        let kinds = kinds.filter(|(_, each)| *each >= 0.05);
        let kinds: Vec<_> = kinds.map(|(kind, each)| format!("{each:.2} {kind}")).collect();
        let (switches, cpu_us) = (self.switches as f64 / count, self.cpu_us / count);
        format!("{}; {switches:.2}; {cpu_us:.1}", kinds.join(", "))
    }

    /// Adds the system calls and the threads woken.
    pub(super) fn with_calls(self, calls: (u64, u64)) -> Served {
        Served { calls: Some(calls), ..self }
    }

    /// What was counted inside the daemon, for each of `count` operations: requests, system calls, threads woken,
    /// switches, KiB copied, allocations, locks, locks of which a file system has one.
    pub(super) fn counts(&self, count: f64) -> [f64; 8] {
        let (calls, woken) = self.calls.unwrap_or_default();
        let inside = self.inside.unwrap_or_default();
        let counts = [
            self.requests.values().sum(),
            calls,
            woken,
            self.switches,
            self.copied_bytes / 1024,
            inside.allocations,
            inside.locks,
            inside.locks_of_the_file_system,
        ];
        counts.map(|all| all as f64 / count)
    }

    pub(super) fn to_json(&self) -> Value {
        json!({
            "requests": self.requests, "switches": self.switches, "cpu_us": self.cpu_us,
            "write_bytes": self.write_bytes, "copied_bytes": self.copied_bytes,
            "calls": self.calls.map(|(calls, _)| calls), "woken": self.calls.map(|(_, woken)| woken),
            "allocations": self.inside.map(|inside| inside.allocations),
            "locks": self.inside.map(|inside| inside.locks),
            "locks_of_the_file_system": self.inside.map(|inside| inside.locks_of_the_file_system),
        })
    }
}

/// How often those locks were taken of which a file system has one.
fn of_the_file_system(locks: &[LockReport]) -> impl Iterator<Item = u64> {
    let is_one = |lock: &&LockReport| {
        let rank = Rank::ALL.iter().find(|rank| format!("{rank:?}") == lock.lock);
        rank.is_some_and(|rank| rank.is_of_the_file_system())
    };
    locks.iter().filter(is_one).map(|lock| lock.taken)
}
