//! Rules with one mistake each. The search must find every one.

use fjord_block::Order;
use fjord_block::epoch::{DeviceTraits, Io, IoKind, Progress, Rules};

macro_rules! wrong {
    ($name:ident, $doc:literal, $($body:tt)*) => {
        #[doc = $doc]
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
        pub(crate) struct $name;
        impl Rules for $name { $($body)* }
    };
}

wrong!(
    BarrierStays,
    "The barrier is not reassigned: it leaves on the write it came with.",
    fn leaves_as(self, asked: Order, _last: bool) -> Order {
        asked
    }
);

wrong!(
    BarrierLost,
    "The barrier leaves as an ordered write.",
    fn leaves_as(self, asked: Order, _last: bool) -> Order {
        if asked == Order::Orderless { asked } else { Order::Ordered }
    }
);

wrong!(
    NoFlushBetween,
    "The next epoch follows the transfer of the one before, without a flush.",
    fn next_epoch_may_leave(self, traits: &DeviceTraits, progress: Progress) -> bool {
        progress.left && (traits.native_barrier || progress.transferred)
    }
);

wrong!(
    NoTransferWait,
    "The next epoch follows at once on a device that keeps no order.",
    fn next_epoch_may_leave(self, _traits: &DeviceTraits, progress: Progress) -> bool {
        progress.left
    }
);

wrong!(
    LeavesTooEarly,
    "The next epoch may leave as soon as the barrier was submitted, on a device with barriers.",
    fn next_epoch_may_leave(self, traits: &DeviceTraits, progress: Progress) -> bool {
        traits.native_barrier || (progress.left && progress.transferred && progress.durable)
    }
);

wrong!(
    CompletedForgotten,
    "A barrier with FUA leaves what had completed before it in the cache.",
    fn barrier_covers_completed(self) -> bool {
        false
    }
);

wrong!(
    OverlapIgnored,
    "Writes overtake each other on the same bytes.",
    fn excludes(self, earlier: &Io, later: &Io) -> bool {
        earlier.kind == IoKind::Read || later.kind == IoKind::Read
    }
);

wrong!(
    ReadsOvertake,
    "Reads do not wait for earlier writes of their bytes.",
    fn excludes(self, _earlier: &Io, later: &Io) -> bool {
        later.kind != IoKind::Read
    }
);

wrong!(
    FlushTooEarly,
    "A flush does not wait for the ordered writes before it.",
    fn flush_may_begin(self, _ordered_before: bool) -> bool {
        true
    }
);

wrong!(
    FuaOvertakes,
    "FUA of ordered writes is passed on to a device that keeps order in its cache.",
    fn passes_fua(self, traits: &DeviceTraits, _order: Order) -> bool {
        traits.fua
    }
);

wrong!(
    FuaDropped,
    "FUA is neither passed on nor emulated where the device has none.",
    fn passes_fua(self, _traits: &DeviceTraits, _order: Order) -> bool {
        true
    }
);

wrong!(
    ErrorForgotten,
    "The failure of an ordered write stops nothing.",
    fn stops(self, kind: IoKind) -> bool {
        kind == IoKind::Flush
    }
);

wrong!(
    FailsBackwards,
    "A failed ordered write fails also what was submitted before it.",
    fn stopped_by_write(self, kind: IoKind, _later: bool) -> bool {
        kind == IoKind::Flush || kind.order() != Order::Orderless
    }
);

wrong!(
    WritesPassFailure,
    "A failed ordered write fails later flushes, but no later ordered write.",
    fn stopped_by_write(self, kind: IoKind, later: bool) -> bool {
        later && kind == IoKind::Flush
    }
);

wrong!(
    FlushesPassFailure,
    "A failed ordered write fails later ordered writes, but no later flush.",
    fn stopped_by_write(self, kind: IoKind, later: bool) -> bool {
        later && kind.order() != Order::Orderless
    }
);

wrong!(
    CompletedFlushStopped,
    "A failed ordered write fails the flush of what had completed.",
    fn stopped_by_write(self, kind: IoKind, later: bool) -> bool {
        later && (kind.is_flush() || kind.order() != Order::Orderless)
    }
);

wrong!(
    FlushErrorForgotten,
    "The failure of a flush stops nothing.",
    fn stops(self, kind: IoKind) -> bool {
        kind != IoKind::Flush && kind.order() != Order::Orderless
    }
);
