//! An allocator that counts, so that a length taken from a damaged image unchecked shows.
//!
//! A test program installs it as its `#[global_allocator]`; without that the figures stay 0.
//! Invariant: the counters are exact sums of what was asked for, whatever thread asked.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

static LIVE_BYTES: AtomicUsize = AtomicUsize::new(0);
static LARGEST_BYTES: AtomicUsize = AtomicUsize::new(0);

/// The system's allocator with counters.
#[derive(Debug, Clone, Copy, Default)]
pub struct CountingAllocator;

fn count(bytes: usize) {
    LIVE_BYTES.fetch_add(bytes, Ordering::Relaxed);
    LARGEST_BYTES.fetch_max(bytes, Ordering::Relaxed);
}

// SAFETY: every call goes to the system's allocator unchanged; counting touches atomics only.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller keeps the contract, which is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        LIVE_BYTES.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        LIVE_BYTES.fetch_sub(layout.size(), Ordering::Relaxed);
        count(new_size);
        // SAFETY: as above.
        unsafe { System.realloc(ptr, layout, new_size) }
    }
}

/// Bytes in use: of the counted heap, and of the block layer's buffer pool.
pub fn live_bytes() -> u64 {
    LIVE_BYTES.load(Ordering::Relaxed) as u64 + fjord_block::pool_stats().live_bytes
}

/// The largest single allocation since the last call, in bytes.
pub fn take_largest_bytes() -> u64 {
    LARGEST_BYTES.swap(0, Ordering::Relaxed) as u64
}
