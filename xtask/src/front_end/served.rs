//! What serving a workload cost the daemon.

use std::{collections::BTreeMap, fs, path::Path};

use anyhow::{Context, Result};
use fjord_fuse::stats::MountStats;
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
        let (requests, write_bytes) = (stats.requests, stats.device.write_bytes);
        Ok(Served { requests, switches, cpu_us: ticks as f64 * TICK_US, write_bytes })
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

    pub(super) fn to_json(&self) -> Value {
        json!({
            "requests": self.requests, "switches": self.switches, "cpu_us": self.cpu_us,
            "write_bytes": self.write_bytes,
        })
    }
}
