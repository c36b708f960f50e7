//! Limits on bulk data of writeback in flight.
//!
//! A request with a waiter queues at the device after earlier requests. Without fsync calls, large
//! amounts in flight are best; with fsync calls, small ones are, and nearly as fast if requests of
//! 512 KiB keep the device busy. Two measures:
//!
//! - batches of background writeback are smaller while an fsync is expected;
//! - while one of a *small* file is expected, each batch of bulk data, in the background or in an
//!   fsync, needs a [`Pass`], and there are few. See docs/decisions/0009.
//!
//! Invariants: a pass is held from before the data is submitted until it is complete; its holder
//! may wait for the inode's lock and for a handle meanwhile. The wait for one is without an open
//! handle, so that no commit waits for it, and ends after [`PASS_WAIT_MAX`]: so there is no lock
//! order.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use fjord_block::lock::{Condvar, Mutex, Rank};

use crate::inode::Inode;

/// How long after an fsync another one is expected; in tests long enough for a machine that stalls.
const EXPECTED: Duration = Duration::from_secs(if cfg!(test) { 60 } else { 2 });
/// Most data of a batch, while an fsync is expected and while none is.
const EXPECTED_BATCH_BYTES: u64 = 1 << 20;
const BATCH_BYTES: u64 = 8 << 20;
/// Inodes that are written back together, while an fsync is expected, which one of them may have to wait for, and
/// while none is.
const EXPECTED_GROUP_INODES: usize = 64;
const GROUP_INODES: usize = 256;
/// Most data of a batch that has a pass.
const PASS_BYTES: u64 = 512 << 10;
/// Passes. Two, so that the device has something to do while a thread wakes up.
const PASS_COUNT: u32 = 2;
/// Dirty pages up to which a file is small: it needs no pass, and its fsync asks others to have one.
pub(super) const SMALL_PAGES: usize = 64;
/// How long a thread waits for a pass.
const PASS_WAIT_MAX: Duration = Duration::from_millis(50);

/// When fsync was called last, and the passes.
pub(crate) struct Pace {
    start: Instant,
    /// In nanoseconds since `start`; 0 for never. A hint.
    last_fsync_ns: AtomicU64,
    /// The same of an fsync of a small file.
    last_small_ns: AtomicU64,
    /// Passes in use.
    out_count: Mutex<u32>,
    /// Signalled when a pass is returned.
    back: Condvar,
}

/// The permission to have one batch of bulk data in flight.
pub(super) struct Pass(Arc<Pace>);

impl Drop for Pass {
    fn drop(&mut self) {
        *self.0.out_count.lock() -= 1;
        self.0.back.notify_one();
    }
}

impl Default for Pace {
    fn default() -> Pace {
        Pace {
            start: Instant::now(),
            last_fsync_ns: AtomicU64::new(0),
            last_small_ns: AtomicU64::new(0),
            out_count: Mutex::new(Rank::Pace, 0),
            back: Condvar::new(),
        }
    }
}

impl Pace {
    /// An fsync of `inode` was called at `began`.
    pub(crate) fn note_fsync(&self, began: Instant, inode: &Inode) {
        let began_ns = self.ns_of(began);
        let is_small = inode.pages.dirty_count() <= SMALL_PAGES;
        inode.small_fsync_ns.store(if is_small { began_ns } else { 0 }, Ordering::Relaxed);
        self.note(began_ns, is_small);
    }

    fn note(&self, began_ns: u64, is_small: bool) {
        self.last_fsync_ns.store(began_ns, Ordering::Relaxed);
        if is_small {
            self.last_small_ns.store(began_ns, Ordering::Relaxed);
        }
    }

    /// Whether the inode has few dirty pages and an fsync of it is expected.
    pub(super) fn is_left_to_its_owner(&self, inode: &Inode) -> bool {
        self.is_recent(&inode.small_fsync_ns) && inode.pages.dirty_count() <= SMALL_PAGES
    }

    /// Pages of `block_size` bytes in a batch, for which nobody waits in an fsync.
    pub(super) fn batch_pages(&self, block_size: u32) -> usize {
        let is_expected = self.is_recent(&self.last_fsync_ns);
        pages_in(if is_expected { EXPECTED_BATCH_BYTES } else { BATCH_BYTES }, block_size)
    }

    /// Inodes that are written back together.
    pub(super) fn group_inodes(&self) -> usize {
        match self.is_recent(&self.last_fsync_ns) {
            true => EXPECTED_GROUP_INODES,
            false => GROUP_INODES,
        }
    }

    /// Pages of `block_size` bytes in a batch that has a pass.
    pub(super) fn pass_pages(block_size: u32) -> usize {
        pages_in(PASS_BYTES, block_size)
    }

    /// Whether bulk data needs a pass.
    pub(super) fn needs_pass(&self) -> bool {
        self.is_recent(&self.last_small_ns)
    }

    /// Waits for a pass, with a timeout.
    pub(super) fn pass(self: &Arc<Pace>) -> Pass {
        let until = Instant::now() + PASS_WAIT_MAX;
        let mut out_count = self.out_count.lock();
        while *out_count >= PASS_COUNT && self.needs_pass() {
            if self.back.wait_until(&mut out_count, until).timed_out() {
                break;
            }
        }
        *out_count += 1;
        drop(out_count);
        Pass(self.clone())
    }

    /// Passes that are out.
    #[cfg(test)]
    pub(super) fn out_count(&self) -> u32 {
        *self.out_count.lock()
    }

    fn is_recent(&self, fsync_ns: &AtomicU64) -> bool {
        let last_ns = fsync_ns.load(Ordering::Relaxed);
        last_ns != 0
            && u128::from(self.ns_of(Instant::now()).saturating_sub(last_ns)) < EXPECTED.as_nanos()
    }

    fn ns_of(&self, time: Instant) -> u64 {
        // Never 0, which means never.
        time.saturating_duration_since(self.start).as_nanos() as u64 | 1
    }
}

fn pages_in(bytes: u64, block_size: u32) -> usize {
    usize::try_from(bytes / u64::from(block_size)).unwrap_or(1).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_are_small_after_an_fsync() {
        let pace = Pace::default();
        assert_eq!(pace.batch_pages(4096), 2048);
        pace.note(pace.ns_of(Instant::now()), false);
        assert_eq!([pace.batch_pages(4096), pace.batch_pages(1024)], [256, 1024]);
        assert!(!pace.needs_pass());
        pace.note(pace.ns_of(Instant::now()), true);
        assert!(pace.needs_pass());
    }

    /// The third waits until one of two comes back, or until its patience ends.
    #[test]
    fn passes_are_few_after_an_fsync_of_a_small_file() {
        let pace = Arc::new(Pace::default());
        let free: Vec<Pass> = (0..8).map(|_| pace.pass()).collect();
        drop(free);
        pace.note(pace.ns_of(Instant::now()), true);
        let (first, _second) = (pace.pass(), pace.pass());
        std::thread::scope(|scope| {
            let third = scope.spawn(|| {
                let began = Instant::now();
                drop(pace.pass());
                began.elapsed()
            });
            while Instant::now() < pace.start + Duration::from_millis(5) {
                std::thread::yield_now();
            }
            drop(first);
            third.join().unwrap();
        });
        let _third = pace.pass();
        let began = Instant::now();
        let _fourth = pace.pass();
        assert!(began.elapsed() >= PASS_WAIT_MAX || !pace.needs_pass());
    }
}
