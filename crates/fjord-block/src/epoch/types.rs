//! What goes into the scheduler and what comes out of it. Owns no state.

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

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IoKind {
    /// Read a range.
    Read,
    /// Write a range.
    Write {
        /// Against other writes.
        order: Order,
        /// Durable by itself when done.
        fua: bool,
    },
    /// The range is no longer needed.
    Discard,
    /// The range reads as zeroes from now on.
    WriteZeroes,
    /// Make durable what completed before, and every ordered write submitted before.
    Flush,
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

    /// For errors.
    pub fn op(self) -> IoOp {
        match self {
            IoKind::Read => IoOp::Read,
            IoKind::Write { .. } => IoOp::Write,
            IoKind::Discard => IoOp::Discard,
            IoKind::WriteZeroes => IoOp::WriteZeroes,
            IoKind::Flush => IoOp::Flush,
        }
    }
}

/// A request as the scheduler sees it: without its data.
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
    /// Whose.
    pub request: RequestId,
    /// Where the piece starts within its request, in bytes.
    pub skip: u64,
    /// How many bytes.
    pub len: u64,
}

/// One command for the device: a request, a piece of a large one, or several merged ones.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Command {
    /// To be given back on completion.
    pub id: CommandId,
    /// What. The order and FUA of a write are those the device must see: a barrier may sit on
    /// another write than it was submitted with, and FUA is absent where a flush stands in.
    pub kind: IoKind,
    /// Where, in bytes; 0 for a flush.
    pub offset: u64,
    /// How many bytes; 0 for a flush.
    pub len: u64,
    /// The best class of its parts.
    pub class: Class,
    /// Its pieces by ascending offset, without gaps. A flush has none.
    pub parts: Vec<Part>,
}

/// What may leave the queue next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Choice {
    /// A flush on behalf of all that need one.
    Flush,
    /// This request, or the next piece of it, with what can be merged into it.
    Request(RequestId),
}

/// How the scheduler chooses among what may leave. Nothing here touches order.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Tuning {
    /// Age in ns, by class, at which the oldest request is taken before the nearest one.
    pub deadline_ns: [u64; 3],
    /// Age in ns, by class, at which a request or the flush that it waits for is overdue: it takes
    /// turns with whatever else may leave, so that no stream of others can hold it for ever.
    pub starvation_ns: [u64; 3],
    /// Merged commands have at most this many bytes; 0 merges nothing.
    pub merge_bytes_max: u64,
    /// Commands under way that may be of class Async or Background.
    pub async_depth: u32,
    /// Commands of class Background under way.
    pub background_depth: u32,
    /// Background writes leave in pieces of at most this many bytes (a multiple of 4096); once the
    /// device's times are known, so do async ones.
    pub background_bytes_max: u64,
    /// Bytes of lower classes that may ever lie in a volatile cache, since a flush has to drain them;
    /// when half of what may is used up, a flush of the scheduler's own makes room.
    pub background_cache_bytes_max: u64,
    /// Bytes below class Sync that may be under way: where to begin when the first write of class
    /// Sync has shown what it takes.
    pub lower_bytes_start: u64,
    /// The same for bytes in a volatile cache.
    pub lower_cache_bytes_start: u64,
    /// What a write of class Sync may take on account of lower classes, and a flush once more: in
    /// percent of the time that the two take alone.
    pub slowdown_percent: u64,
    /// Flushes under way at a time; more combine less.
    pub flush_depth: u32,
}

impl Tuning {
    /// Sensible values for a device that takes `queue_depth` commands.
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

    /// How long commands that take `alone_ns` by themselves may be held up.
    pub(super) fn slack_ns(&self, alone_ns: u64) -> u64 {
        alone_ns.saturating_mul(self.slowdown_percent.saturating_sub(100)) / 100
    }
}
