//! Statistics of the model. Owns the queue-depth histogram and the optional traces.
//!
//! Invariant: the histogram's times add up to the time since the device was made (or since the
//! statistics were reset), until its power was cut.

use super::core::CommandId;

/// Counts of a modelled device. Times are in virtual nanoseconds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SimStats {
    /// Time since the device was made or the statistics were reset, until its power was cut.
    pub elapsed_ns: u64,
    /// Write commands transferred.
    pub write_count: u64,
    /// Their bytes.
    pub write_bytes: u64,
    /// Write commands with the barrier flag among them.
    pub barrier_count: u64,
    /// Write commands with FUA among them.
    pub fua_count: u64,
    /// Read commands.
    pub read_count: u64,
    /// Their bytes.
    pub read_bytes: u64,
    /// Flush commands completed.
    pub flush_count: u64,
    /// Discards and write-zeroes.
    pub discard_count: u64,
    /// Program operations (writes of the arm, on a disk).
    pub program_count: u64,
    /// Units of 4096 bytes that they programmed.
    pub programmed_units: u64,
    /// Time that transfers waited for room in the cache.
    pub cache_stall_ns: u64,
    /// How long the queue held so many commands, by number of commands.
    pub queue_depth_ns: Vec<u64>,
}

impl SimStats {
    /// The mean queue depth over time.
    pub fn queue_depth_mean(&self) -> f64 {
        let weighted: f64 = self
            .queue_depth_ns
            .iter()
            .enumerate()
            .map(|(depth, ns)| depth as f64 * *ns as f64)
            .sum();
        weighted / self.queue_depth_ns.iter().sum::<u64>().max(1) as f64
    }

    /// The largest depth that the queue had.
    pub fn queue_depth_max(&self) -> usize {
        self.queue_depth_ns.iter().rposition(|ns| *ns > 0).unwrap_or(0)
    }
}

/// A command that was transferred.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transferred {
    /// Which.
    pub id: CommandId,
    /// When, in virtual nanoseconds.
    pub at_ns: u64,
    /// The epoch that it belongs to on the device: one more than barriers transferred before it.
    pub epoch: u64,
}

/// A unit of 4096 bytes that was programmed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Persisted {
    /// The command that wrote it.
    pub id: CommandId,
    /// When its program operation ended, in virtual nanoseconds.
    pub at_ns: u64,
    /// The epoch that it belongs to on the device.
    pub epoch: u64,
    /// Byte offset on the device.
    pub offset: u64,
}

/// Events in order. Recorded only on request, because it grows with every command.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SimTrace {
    /// Transfer order.
    pub transfers: Vec<Transferred>,
    /// Persist order.
    pub persists: Vec<Persisted>,
    /// Changes of the queue depth: when, and how many commands from then on.
    pub queue_depths: Vec<(u64, u32)>,
}

/// Counts and traces while the device works.
#[derive(Debug, Default)]
pub(super) struct Meter {
    pub(super) stats: SimStats,
    /// None while nothing is recorded.
    pub(super) trace: Option<SimTrace>,
    /// When the statistics began.
    started_ns: u64,
    /// Since when the queue has the depth it has.
    depth_since_ns: u64,
    depth: u32,
    /// When the power was cut: nothing is counted afterwards.
    ended_ns: Option<u64>,
}

impl Meter {
    /// The queue holds `depth` commands from `now_ns` on.
    pub(super) fn set_depth(&mut self, depth: u32, now_ns: u64) {
        self.settle(now_ns);
        self.depth = depth;
        if let Some(trace) = &mut self.trace {
            trace.queue_depths.push((now_ns, depth));
        }
    }

    /// The power is cut.
    pub(super) fn end(&mut self, now_ns: u64) {
        self.set_depth(0, now_ns);
        self.ended_ns.get_or_insert(now_ns);
    }

    fn settle(&mut self, now_ns: u64) {
        let now_ns = self.ended_ns.unwrap_or(now_ns);
        let index = self.depth as usize;
        if self.stats.queue_depth_ns.len() <= index {
            self.stats.queue_depth_ns.resize(index + 1, 0);
        }
        self.stats.queue_depth_ns[index] += now_ns - self.depth_since_ns;
        self.depth_since_ns = now_ns;
    }

    /// The counts up to `now_ns`.
    pub(super) fn snapshot(&mut self, now_ns: u64) -> SimStats {
        self.settle(now_ns);
        self.stats.elapsed_ns = self.ended_ns.unwrap_or(now_ns) - self.started_ns;
        self.stats.clone()
    }

    /// Resets the statistics.
    pub(super) fn reset(&mut self, now_ns: u64) {
        let now_ns = self.ended_ns.unwrap_or(now_ns);
        self.stats = SimStats::default();
        self.started_ns = now_ns;
        self.depth_since_ns = now_ns;
    }
}
