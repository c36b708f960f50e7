//! Requests and commands of the scheduler. Owns no state.

use crate::device::{Class, Order, Request};
use crate::error::IoOp;

/// A request in the scheduler. Later requests have greater numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub(super) u64);

/// A command for the device. Later commands have greater numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CommandId(pub(super) u64);

/// The number of an epoch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Epoch(pub(super) u64);

/// Kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IoKind {
    /// Read a range.
    Read,
    /// Write a range.
    Write {
        /// Order relative to other writes.
        order: Order,
        /// Durable by itself when done.
        fua: bool,
    },
    /// The range is no longer needed.
    Discard,
    /// The range reads as zeroes from now on.
    WriteZeroes,
    /// Make durable all writes that completed before, and every ordered write submitted before.
    Flush,
    /// Make durable all writes that completed before. A failed write does not fail it. As a command
    /// it is a [`IoKind::Flush`].
    FlushCompleted,
}

impl IoKind {
    /// The order of a write; anything else is orderless.
    pub fn order(self) -> Order {
        match self {
            IoKind::Write { order, .. } => order,
            _ => Order::Orderless,
        }
    }

    /// Whether it changes the device's contents.
    pub fn changes(self) -> bool {
        matches!(self, IoKind::Write { .. } | IoKind::Discard | IoKind::WriteZeroes)
    }

    /// Either kind of flush.
    pub fn is_flush(self) -> bool {
        matches!(self, IoKind::Flush | IoKind::FlushCompleted)
    }

    /// Whether it takes part in order: an ordered write or a flush.
    pub(super) fn takes_part(self) -> bool {
        self.is_flush() || self.order() != Order::Orderless
    }

    /// For errors.
    pub fn op(self) -> IoOp {
        match self {
            IoKind::Read => IoOp::Read,
            IoKind::Write { .. } => IoOp::Write,
            IoKind::Discard => IoOp::Discard,
            IoKind::WriteZeroes => IoOp::WriteZeroes,
            IoKind::Flush | IoKind::FlushCompleted => IoOp::Flush,
        }
    }
}

/// A request without its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Io {
    /// What.
    pub kind: IoKind,
    /// Where, in bytes; 0 for a flush.
    pub offset: u64,
    /// How many bytes; 0 for a flush.
    pub len: u64,
    /// Who waits.
    pub class: Class,
}

impl Io {
    /// A read.
    pub fn read(offset: u64, len: u64, class: Class) -> Io {
        Io { kind: IoKind::Read, offset, len, class }
    }

    /// A write without FUA.
    pub fn write(offset: u64, len: u64, order: Order, class: Class) -> Io {
        Io { kind: IoKind::Write { order, fua: false }, offset, len, class }
    }

    /// A flush.
    pub fn flush(class: Class) -> Io {
        Io { kind: IoKind::Flush, offset: 0, len: 0, class }
    }

    /// A flush of the writes that have completed.
    pub fn flush_completed(class: Class) -> Io {
        Io { kind: IoKind::FlushCompleted, offset: 0, len: 0, class }
    }
}

impl From<&Request> for Io {
    fn from(request: &Request) -> Io {
        let (_, offset, len) = request.extent();
        let (kind, class) = match request {
            Request::Write { order, fua, class, .. } => {
                (IoKind::Write { order: *order, fua: *fua }, *class)
            }
            Request::Flush { class } => (IoKind::Flush, *class),
            Request::Discard { .. } => (IoKind::Discard, Class::Async),
            Request::WriteZeroes { .. } => (IoKind::WriteZeroes, Class::Sync),
        };
        Io { kind, offset, len, class }
    }
}

/// A piece of a request inside a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Part {
    /// Its request.
    pub request: RequestId,
    /// Where the piece starts within its request, in bytes.
    pub skip: u64,
    /// How many bytes.
    pub len: u64,
}

/// One command for the device: a request, a piece of a large one, or several merged ones.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Command {
    /// Returned on completion.
    pub id: CommandId,
    /// What. Order and FUA of a write are those for the device: a barrier may have moved to another
    /// write, and FUA is cleared if a flush replaces it.
    pub kind: IoKind,
    /// Where, in bytes; 0 for a flush.
    pub offset: u64,
    /// How many bytes; 0 for a flush.
    pub len: u64,
    /// The highest class of its parts.
    pub class: Class,
    /// Its pieces by ascending offset, without gaps. A flush has none.
    pub parts: Vec<Part>,
}

/// A choice for the next command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Choice {
    /// A flush for all requests that need one.
    Flush,
    /// This request, or the next piece of it, with what can be merged into it.
    Request(RequestId),
}

/// Parameters of the scheduling discipline. None affects order.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Tuning {
    /// Age in ns, by class, at which the oldest request is taken before the nearest one.
    pub deadline_ns: [u64; 3],
    /// Age in ns, by class, at which a request or the flush that it waits for is overdue: it
    /// alternates with other choices, so that no stream of other requests can starve it.
    pub starvation_ns: [u64; 3],
    /// Merged commands have at most this many bytes; 0 merges nothing.
    pub merge_bytes_max: u64,
    /// Maximum number of commands of class Async or Background in flight.
    pub async_depth: u32,
    /// Maximum number of commands of class Background in flight.
    pub background_depth: u32,
    /// Largest piece of a background write in bytes (a multiple of 4096); once the device's
    /// latencies are known, also of an async one.
    pub background_bytes_max: u64,
    /// Upper bound of lower classes' bytes in a volatile cache, because a flush has to drain them;
    /// when half of the current limit is used, the scheduler sends a flush of its own.
    pub background_cache_bytes_max: u64,
    /// Initial limit of bytes below class Sync in flight, once the first write of class Sync has
    /// shown its latency.
    pub lower_bytes_start: u64,
    /// The same for bytes in a volatile cache.
    pub lower_cache_bytes_start: u64,
    /// Permitted delay of a write of class Sync by lower classes, and again of a flush, in percent
    /// of their latencies alone.
    pub slowdown_percent: u64,
    /// Maximum number of flushes in flight; more of them combine fewer requests.
    pub flush_depth: u32,
}

impl Tuning {
    /// Default values for a device with this `queue_depth`.
    pub fn for_depth(queue_depth: u32) -> Tuning {
        let quarter = (queue_depth / 4).max(1);
        Tuning {
            deadline_ns: [5_000_000, 50_000_000, 500_000_000],
            starvation_ns: [u64::MAX, 500_000_000, 2_000_000_000],
            merge_bytes_max: 512 << 10,
            async_depth: queue_depth.saturating_sub(quarter).max(1),
            background_depth: quarter,
            background_bytes_max: 512 << 10,
            background_cache_bytes_max: 8 << 20,
            lower_bytes_start: 32 << 10,
            lower_cache_bytes_start: 16 << 10,
            slowdown_percent: 130,
            flush_depth: 1,
        }
    }

    /// Permitted delay of commands with latency `alone_ns` alone.
    pub(super) fn slack_ns(&self, alone_ns: u64) -> u64 {
        alone_ns.saturating_mul(self.slowdown_percent.saturating_sub(100)) / 100
    }
}
