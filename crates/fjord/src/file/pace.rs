//! How much background writeback puts before the device at a time.
//!
//! A request that somebody waits for queues at the device behind what was sent before it. As long
//! as nobody calls fsync, much at a time is best; while somebody does, little is, and as fast
//! where requests of a mebibyte keep the device busy.
//!
//! Invariant: the number of batches times their size bounds the background data at the device.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How long after an fsync another one is expected.
const EXPECTED: Duration = Duration::from_secs(2);
/// Most data of a batch, while an fsync is expected and while none is.
const EXPECTED_BATCH_BYTES: u64 = 1 << 20;
const BATCH_BYTES: u64 = 8 << 20;

/// When fsync was called last.
pub(crate) struct Pace {
    start: Instant,
    /// In nanoseconds since `start`; 0 for never. A hint.
    last_fsync_ns: AtomicU64,
}

impl Default for Pace {
    fn default() -> Pace {
        Pace { start: Instant::now(), last_fsync_ns: AtomicU64::new(0) }
    }
}

impl Pace {
    /// Somebody called fsync at `began`.
    pub(crate) fn note_fsync(&self, began: Instant) {
        self.last_fsync_ns.store(self.ns_of(began), Ordering::Relaxed);
    }

    /// Pages of `block_size` bytes in a batch, for which nobody waits in an fsync.
    pub(super) fn batch_pages(&self, block_size: u32) -> usize {
        let bytes = if self.is_expected() { EXPECTED_BATCH_BYTES } else { BATCH_BYTES };
        usize::try_from(bytes / u64::from(block_size)).unwrap_or(1).max(1)
    }

    fn is_expected(&self) -> bool {
        let last_ns = self.last_fsync_ns.load(Ordering::Relaxed);
        last_ns != 0
            && u128::from(self.ns_of(Instant::now()).saturating_sub(last_ns)) < EXPECTED.as_nanos()
    }

    fn ns_of(&self, time: Instant) -> u64 {
        // Never 0, which stands for never.
        time.saturating_duration_since(self.start).as_nanos() as u64 | 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_are_small_after_an_fsync() {
        let pace = Pace::default();
        assert_eq!(pace.batch_pages(4096), 2048);
        pace.note_fsync(Instant::now());
        assert_eq!([pace.batch_pages(4096), pace.batch_pages(1024)], [256, 1024]);
    }
}
