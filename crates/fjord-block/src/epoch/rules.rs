//! The rules of storage order, one function each, separate from the mechanism that applies them.
//!
//! Owns no state. [`Paper`] is the set in use: section 3 of *Barrier-Enabled IO Stack for Flash
//! Storage* (FAST '18), with rules for cases that the paper leaves open. Tests use wrong rules to
//! prove that the proof of order detects them.

use std::fmt;
use std::hash::Hash;

use super::types::{Io, IoKind};
use crate::device::{Capabilities, Order};
use crate::plant::{Bug, planted};

/// Device properties that the rules depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DeviceTraits {
    /// Completed writes may be lost in a power cut until they are flushed.
    pub volatile_cache: bool,
    /// FUA is passed on; else it is emulated by a write and a flush.
    pub fua: bool,
    /// The device keeps the order of barrier writes (native barrier).
    pub native_barrier: bool,
    /// Maximum number of commands in flight.
    pub queue_depth: u32,
    /// Requests not aligned to this many bytes exclude others from their 4096-byte pages.
    pub logical_block_size: u32,
}

impl From<&Capabilities> for DeviceTraits {
    fn from(capabilities: &Capabilities) -> Self {
        DeviceTraits {
            volatile_cache: capabilities.volatile_cache,
            fua: capabilities.fua,
            native_barrier: capabilities.native_barrier,
            queue_depth: capabilities.queue_depth.max(1),
            logical_block_size: capabilities.logical_block_size.max(1),
        }
    }
}

/// Progress of the open epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Its barrier was submitted and all its writes have been dispatched.
    pub left: bool,
    /// All its writes have been transferred.
    pub transferred: bool,
    /// A flush that began after the last transfer has completed, or none is needed.
    pub durable: bool,
}

/// The decisions that determine storage order. The defaults are correct.
pub trait Rules: Copy + Default + Eq + Hash + fmt::Debug {
    /// The order of a write command. `asked` is the strongest order of its parts; `last`: it is the
    /// last write of a closed epoch.
    fn leaves_as(self, asked: Order, last: bool) -> Order {
        match (asked, last) {
            (asked, _) if planted(Bug::BarrierNotReassigned) => asked,
            (Order::Orderless, _) => Order::Orderless,
            (_, true) => Order::Barrier,
            (_, false) => Order::Ordered,
        }
    }

    /// Whether the next epoch may be dispatched: at once if the device keeps order (wait on
    /// dispatch), else when this epoch is durable.
    fn next_epoch_may_leave(self, traits: &DeviceTraits, progress: Progress) -> bool {
        progress.left && (traits.native_barrier || (progress.transferred && progress.durable))
    }

    /// Whether a barrier also orders changes that had completed when it was submitted, as on a
    /// device with native barriers. An epoch of FUA writes needs a flush for that, if such changes
    /// are still in the cache.
    fn barrier_covers_completed(self) -> bool {
        true
    }

    /// Whether `later` must wait until `earlier`, which touches the same bytes, is done.
    fn excludes(self, earlier: &Io, later: &Io) -> bool {
        !(earlier.kind == IoKind::Read && later.kind == IoKind::Read)
    }

    /// Whether a flush may begin for a flush request; `ordered_before`: an ordered write submitted
    /// before the request is not transferred yet.
    fn flush_may_begin(self, ordered_before: bool) -> bool {
        !ordered_before
    }

    /// Whether FUA of this write is passed to the device. A device with native barriers could make
    /// an ordered FUA write durable before earlier epochs in its cache; there a flush replaces it.
    fn passes_fua(self, traits: &DeviceTraits, order: Order) -> bool {
        traits.fua && (order == Order::Orderless || !traits.native_barrier)
    }

    /// Whether the failure of such a command breaks order.
    fn stops(self, kind: IoKind) -> bool {
        kind.takes_part()
    }

    /// Whether the failure of an ordered write fails such a request, dispatched or not; `later`: it
    /// was submitted after the failed one.
    fn stopped_by_write(self, kind: IoKind, later: bool) -> bool {
        later && kind.takes_part() && kind != IoKind::FlushCompleted
    }
}

/// The rules in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Paper;

impl Rules for Paper {}
