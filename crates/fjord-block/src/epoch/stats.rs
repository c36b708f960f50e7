//! Counters of the scheduler. Owns [`EpochStats`].

use std::hash::{Hash, Hasher};

/// Statistics of the scheduler since its creation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EpochStats {
    /// Requests submitted, flushes and reads included.
    pub request_count: u64,
    /// Commands sent to the device, flushes included.
    pub command_count: u64,
    /// Epochs that a barrier closed.
    pub epoch_count: u64,
    /// Barriers that moved to another write of their epoch.
    pub reassigned_count: u64,
    /// Requests merged into the command of another one.
    pub merged_count: u64,
    /// Additional pieces from splitting requests below class Sync.
    pub split_count: u64,
    /// Requests promoted to a higher class, directly or because a higher one waited for them.
    pub promoted_count: u64,
    /// Flush requests and writes with emulated FUA.
    pub flush_request_count: u64,
    /// Flushes sent to the device.
    pub flush_count: u64,
    /// Flush requests and emulated FUA writes that shared a flush or needed none.
    pub combined_flush_count: u64,
    /// Flushes sent only to drain writes below class Sync from the device's cache.
    pub background_flush_count: u64,
    /// Requests in the queue at this moment: submitted and not fully dispatched.
    pub queued_count: u64,
    /// The maximum so far.
    pub queued_count_max: u64,
    /// Commands in flight at this moment.
    pub in_flight_count: u32,
    /// The maximum so far.
    pub in_flight_count_max: u32,
}

/// Counters do not affect decisions: queues that differ only in them are the same state for a
/// search.
impl Hash for EpochStats {
    fn hash<H: Hasher>(&self, _: &mut H) {}
}
