//! Writes of checkpoints to home locations: those in flight, and threads that wait for their end.
//!
//! Invariant: whoever waits looks again after the end of each batch.

use std::sync::atomic::{AtomicU64, Ordering};

use fjord_block::QuasiAsyncWrites;
use fjord_block::lock::{Condvar, Mutex, Rank};
use fjord_format::types::BlockNo;

/// The checkpoint writes of a journal.
pub(crate) struct CheckpointWrites {
    /// Those in flight.
    pub(crate) in_flight: QuasiAsyncWrites,
    /// Number of the block that a checkpoint writes last; `u64::MAX` for none.
    last: AtomicU64,
    /// Pairs with `idle`; a leaf lock.
    lock: Mutex<()>,
    /// Signalled when a batch ends.
    idle: Condvar,
}

impl Default for CheckpointWrites {
    fn default() -> CheckpointWrites {
        CheckpointWrites {
            in_flight: QuasiAsyncWrites::default(),
            last: AtomicU64::new(u64::MAX),
            lock: Mutex::new(Rank::CheckpointWrites, ()),
            idle: Condvar::new(),
        }
    }
}

impl CheckpointWrites {
    /// The block that a checkpoint writes last.
    pub(crate) fn last(&self) -> Option<BlockNo> {
        let last = self.last.load(Ordering::Acquire);
        (last != u64::MAX).then_some(BlockNo(last))
    }

    /// Sets the block that a checkpoint writes last.
    pub(crate) fn set_last(&self, block: Option<BlockNo>) {
        self.last.store(block.map_or(u64::MAX, |block| block.0), Ordering::Release);
    }

    /// Waits until `done`, which the end of a batch brings about, and promotes the writes in flight.
    pub(crate) fn wait_until(&self, done: impl Fn() -> bool) {
        let _promoted = self.in_flight.promote();
        let mut idle = self.lock.lock();
        while !done() {
            self.idle.wait(&mut idle);
        }
    }

    /// A batch has ended, and the buffers know it.
    pub(crate) fn batch_ended(&self) {
        // Whoever has looked before sleeps by now.
        drop(self.lock.lock());
        self.idle.notify_all();
    }
}
