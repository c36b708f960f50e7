//! The rules of storage order, one function each, apart from the mechanism that applies them.
//!
//! Owns no state. [`Paper`] is the set in force: section 3 of *Barrier-Enabled IO Stack for Flash
//! Storage* (FAST '18), completed where the paper is silent. Tests put wrong rules in its place to
//! see that the proof of order notices.

use std::fmt;
use std::hash::Hash;

use super::types::{Io, IoKind};
use crate::device::{Capabilities, Order};
use crate::plant::{Bug, planted};

/// What the rules need to know of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DeviceTraits {
    /// Completed writes may be lost in a power cut until they are flushed.
    pub volatile_cache: bool,
    /// FUA is passed on; else it is made of a write and a flush.
    pub fua: bool,
    /// The device keeps the order of barrier writes by itself.
    pub native_barrier: bool,
    /// How many commands may be under way.
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

/// How far the open epoch has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Its barrier was submitted and all its writes have left the queue.
    pub left: bool,
    /// All its writes have been transferred.
    pub transferred: bool,
    /// A flush that began after the last transfer has ended, or none is needed.
    pub durable: bool,
}

/// The decisions that storage order hangs on. The defaults are the right ones.
pub trait Rules: Copy + Default + Eq + Hash + fmt::Debug {
    /// The order that a write bears when it leaves the queue. `asked` is the strongest order of
    /// its parts; `last` says that no other write of its epoch is left and the epoch is closed.
    fn leaves_as(self, asked: Order, last: bool) -> Order {
        match (asked, last) {
            (asked, _) if planted(Bug::BarrierNotReassigned) => asked,
            (Order::Orderless, _) => Order::Orderless,
            (_, true) => Order::Barrier,
            (_, false) => Order::Ordered,
        }
    }

    /// Whether the next epoch may leave the queue: at once when the device keeps order (wait on
    /// dispatch), else when nothing of this epoch can be lost any more.
    fn next_epoch_may_leave(self, traits: &DeviceTraits, progress: Progress) -> bool {
        progress.left && (traits.native_barrier || (progress.transferred && progress.durable))
    }

    /// Whether a barrier stands behind every change that had completed when it was submitted, as
    /// it does on a device with barriers. An epoch of FUA writes needs a flush for that, if they
    /// are still in the cache.
    fn barrier_covers_completed(self) -> bool {
        true
    }

    /// Whether `later` must wait until `earlier`, which touches the same bytes, is done.
    fn excludes(self, earlier: &Io, later: &Io) -> bool {
        !(earlier.kind == IoKind::Read && later.kind == IoKind::Read)
    }

    /// Whether a flush may begin on behalf of a flush request; `ordered_before` says that an
    /// ordered write submitted before the request is not transferred yet.
    fn flush_may_begin(self, ordered_before: bool) -> bool {
        !ordered_before
    }

    /// Whether FUA of this write may be left to the device. A device that keeps order by itself
    /// could make an ordered FUA write durable ahead of earlier epochs in its cache; there a
    /// flush does it.
    fn passes_fua(self, traits: &DeviceTraits, order: Order) -> bool {
        traits.fua && (order == Order::Orderless || !traits.native_barrier)
    }

    /// Whether the failure of such a request ends all order: nothing ordered and no flush
    /// succeeds after it.
    fn stops(self, kind: IoKind) -> bool {
        match kind {
            IoKind::Write { order, .. } => order != Order::Orderless,
            IoKind::Flush => true,
            IoKind::Read | IoKind::Discard | IoKind::WriteZeroes => false,
        }
    }
}

/// The rules in force.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Paper;

impl Rules for Paper {}
