//! How often a process allocates, in builds with the feature `lock-stats`. Owns that count.

#[cfg(feature = "lock-stats")]
use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::atomic::{AtomicU64, Ordering},
};

#[cfg(feature = "lock-stats")]
static COUNT: AtomicU64 = AtomicU64::new(0);

/// The system's allocator, with a count; for a program's `#[global_allocator]`.
#[cfg(feature = "lock-stats")]
#[derive(Debug)]
pub struct CountingAllocator;

// SAFETY: each call is the system allocator's, with the same arguments.
#[cfg(feature = "lock-stats")]
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        COUNT.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        COUNT.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's.
        unsafe { System.realloc(memory, layout, size) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller's.
        unsafe { System.dealloc(memory, layout) }
    }
}

/// Allocations and reallocations of this process so far; `None` in a build that does not count them. 0 where the
/// program has another allocator.
pub fn allocation_count() -> Option<u64> {
    #[cfg(feature = "lock-stats")]
    return Some(COUNT.load(Ordering::Relaxed));
    #[cfg(not(feature = "lock-stats"))]
    None
}
