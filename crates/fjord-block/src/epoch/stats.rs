//! Counters of the scheduler. Owns [`EpochStats`].

use std::hash::{Hash, Hasher};

/// What the scheduler did since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EpochStats {
    /// Requests submitted, flushes and reads included.
    pub request_count: u64,
    /// Commands sent to the device, flushes included.
    pub command_count: u64,
    /// Epochs that a barrier closed.
    pub epoch_count: u64,
    /// Barriers that left on another write than they were submitted with.
    pub reassigned_count: u64,
    /// Requests that left inside the command of another one.
    pub merged_count: u64,
    /// Further pieces that requests below class Sync were split into.
    pub split_count: u64,
    /// Requests raised to a better class, by promotion or because a better one waited for them.
    pub promoted_count: u64,
    /// Flush requests and writes with emulated FUA.
    pub flush_request_count: u64,
    /// Flushes sent to the device.
    pub flush_count: u64,
    /// Flush requests and emulated FUA writes that shared a flush or needed none.
    pub combined_flush_count: u64,
    /// Flushes sent only to take writes below class Sync out of the device's cache.
    pub background_flush_count: u64,
    /// Requests in the queue at this moment: submitted and not wholly with the device.
    pub queued_count: u64,
    /// The most there ever were.
    pub queued_count_max: u64,
    /// Commands under way at this moment.
    pub in_flight_count: u32,
    /// The most there ever were.
    pub in_flight_count_max: u32,
}

/// Counters decide nothing: queues that differ only in them are one state to a search.
impl Hash for EpochStats {
    fn hash<H: Hasher>(&self, _: &mut H) {}
}
