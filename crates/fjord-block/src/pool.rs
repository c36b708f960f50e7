//! The buffer pool. Owns all memory of [`crate::AlignedBuf`], and gives it back to the system.
//!
//! Layers, from the caller down:
//! 1. a small magazine of free buffers per thread and class (no lock);
//! 2. one free list per class (a mutex each): *hot* buffers, whose pages are resident, and *cold*
//!    ones, whose pages went back to the system with `MADV_DONTNEED`;
//! 3. slabs of address space from `mmap`, carved in order, never unmapped.
//!
//! Classes below a page are pieces of pages of the 4096-byte class; a page whose pieces are all
//! free goes back to that class.
//!
//! Invariant: resident free memory is at most `HOT_BYTES_MIN` per class, or a part of the live bytes up to
//! `HOT_BYTES_MAX`, plus the magazines (`MAGAZINE_BYTES_MAX` per class and thread), so that RSS stays close to the
//! live bytes.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use crate::counter::ShardedCounter;
use crate::lock::{Mutex, MutexGuard, Rank};

const PAGE_BYTES: usize = 4096;
const CLASS_BYTES_MIN: usize = 512;
const CLASS_BYTES_MAX: usize = 1 << 20;
const CLASS_COUNT: usize = 12;
const PAGE_CLASS: usize = 3;
/// Address space taken from the system at a time.
const SLAB_BYTES: usize = 4 << 20;
/// Free resident bytes kept per class before the oldest half is given back: one part in `HOT_SHARE` of the live bytes,
/// within these bounds. A commit frees many megabytes at once, and the next one needs them again.
const HOT_BYTES_MIN: usize = 4 << 20;
const HOT_BYTES_MAX: usize = 32 << 20;
const HOT_SHARE: u64 = 4;
/// Free bytes a thread keeps per class.
const MAGAZINE_BYTES_MAX: usize = 64 << 10;

/// A size class: a power of two from 512 bytes to 1 MiB, or, beyond that, whole pages mapped for
/// one buffer alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SizeClass {
    /// Index into the classes of the pool.
    Pooled(u8),
    /// A mapping of its own, of this many bytes.
    Own(usize),
}

impl SizeClass {
    /// The smallest class that holds `len` bytes.
    pub(crate) fn for_len(len: usize) -> Self {
        if len > CLASS_BYTES_MAX {
            return SizeClass::Own(len.next_multiple_of(PAGE_BYTES));
        }
        let bytes = len.max(CLASS_BYTES_MIN).next_power_of_two();
        SizeClass::Pooled((bytes.trailing_zeros() - CLASS_BYTES_MIN.trailing_zeros()) as u8)
    }

    /// Bytes of memory of a buffer of this class.
    pub(crate) fn bytes(self) -> usize {
        match self {
            SizeClass::Pooled(index) => CLASS_BYTES_MIN << index,
            SizeClass::Own(bytes) => bytes,
        }
    }
}

/// What the pool holds, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolStats {
    /// In buffers that are alive, counted by size class.
    pub live_bytes: u64,
    /// Address space taken from the system (most of it not resident after a peak).
    pub mapped_bytes: u64,
    /// Free and resident in the shared lists (the threads' magazines not counted).
    pub free_resident_bytes: u64,
}

/// Statistics of the process-wide pool.
pub fn pool_stats() -> PoolStats {
    let free_resident_bytes = POOL
        .classes
        .iter()
        .enumerate()
        .map(|(i, c)| c.lock().hot.len() * (CLASS_BYTES_MIN << i))
        .sum::<usize>();
    PoolStats {
        live_bytes: POOL.live_bytes.sum(),
        mapped_bytes: POOL.mapped_bytes.load(Ordering::Relaxed),
        free_resident_bytes: free_resident_bytes as u64,
    }
}

/// The address of a free buffer. It is exclusively the holder's.
struct Free(NonNull<u8>);
// SAFETY: a free buffer has no other owner; whoever holds the `Free` may use the memory anywhere.
unsafe impl Send for Free {}

/// The shared free list of one class.
struct ClassList {
    /// Free, resident; newest at the back.
    hot: VecDeque<Free>,
    /// Free, pages given back.
    cold: Vec<Free>,
    /// Below a page: pages with free pieces, and which (bit = piece). Lowest address first, so
    /// that the highest pages empty out.
    partial: BTreeMap<usize, (Free, u8)>,
    /// The part of the newest slab not handed out yet.
    slab: Option<(Free, usize)>,
}

struct Pool {
    /// Guarded one by one.
    classes: [Mutex<ClassList>; CLASS_COUNT],
    live_bytes: ShardedCounter,
    mapped_bytes: AtomicU64,
}

static POOL: Pool = Pool {
    classes: [const {
        Mutex::process_wide(
            Rank::BufferPool,
            ClassList {
                hot: VecDeque::new(),
                cold: Vec::new(),
                partial: BTreeMap::new(),
                slab: None,
            },
        )
    }; CLASS_COUNT],
    live_bytes: ShardedCounter::new(),
    mapped_bytes: AtomicU64::new(0),
};

/// The free buffers of one thread. They return to the shared lists when the thread ends.
struct Magazines([Vec<Free>; CLASS_COUNT]);

impl Drop for Magazines {
    fn drop(&mut self) {
        for (index, magazine) in self.0.iter_mut().enumerate() {
            give_back(index, magazine.drain(..));
        }
    }
}

thread_local! {
    static MAGAZINES: RefCell<Magazines> = const { RefCell::new(Magazines([const { Vec::new() }; CLASS_COUNT])) };
}

/// Buffers a magazine of class `index` holds at most (0 for the large classes).
fn magazine_max(index: usize) -> usize {
    match MAGAZINE_BYTES_MAX / (CLASS_BYTES_MIN << index) {
        0 | 1 => 0,
        n => n.min(64),
    }
}

/// Memory for one buffer of `class`, initialised but with unspecified contents.
pub(crate) fn alloc(class: SizeClass) -> NonNull<u8> {
    POOL.live_bytes.add(class.bytes() as u64);
    let index = match class {
        SizeClass::Pooled(index) => usize::from(index),
        SizeClass::Own(bytes) => return map(bytes),
    };
    let max = magazine_max(index);
    if max == 0 {
        return take_one(index).0;
    }
    // The thread-local is gone while its thread ends; then go to the shared list.
    MAGAZINES
        .try_with(|magazines| {
            let magazine = &mut magazines.borrow_mut().0[index];
            if magazine.is_empty() {
                take(index, max / 2, magazine);
            }
            magazine.pop()
        })
        .ok()
        .flatten()
        .unwrap_or_else(|| take_one(index))
        .0
}

/// Returns the memory of one buffer.
///
/// # Safety
/// `ptr` came from [`alloc`] with the same class, and the caller is its only owner.
pub(crate) unsafe fn free(ptr: NonNull<u8>, class: SizeClass) {
    POOL.live_bytes.sub(class.bytes() as u64);
    let index = match class {
        SizeClass::Pooled(index) => usize::from(index),
        SizeClass::Own(bytes) => {
            POOL.mapped_bytes.fetch_sub(bytes as u64, Ordering::Relaxed);
            // SAFETY: `alloc` mapped exactly these bytes for this buffer, which is gone.
            // Unmapping a valid private mapping cannot fail other than by a lack of map entries,
            // which costs address space only.
            let _ = unsafe { munmap(ptr.as_ptr().cast(), bytes) };
            return;
        }
    };
    let max = magazine_max(index);
    let mut item = Some(Free(ptr));
    if max > 0 {
        // A thread that is ending has no magazine any more: `item` stays Some then.
        let _ = MAGAZINES.try_with(|magazines| {
            let magazine = &mut magazines.borrow_mut().0[index];
            if magazine.len() >= max {
                give_back(index, magazine.drain(..max / 2));
            }
            magazine.extend(item.take());
        });
    }
    give_back(index, item);
}

fn take_one(index: usize) -> Free {
    let mut one = Vec::with_capacity(1);
    take(index, 1, &mut one);
    match one.pop() {
        Some(free) => free,
        None => unreachable!("take() delivers at least one buffer"),
    }
}

/// Locks the list of class `index`. A class below a page locks that of pages too, so the order is
/// that of the classes.
fn lock(index: usize) -> MutexGuard<'static, ClassList> {
    POOL.classes[index].lock_in_order(index as u64)
}

/// Moves `count` (at least one) free buffers of class `index` to `out`, oldest last.
fn take(index: usize, count: usize, out: &mut Vec<Free>) {
    let bytes = CLASS_BYTES_MIN << index;
    let mut list = lock(index);
    for _ in 0..count.max(1) {
        let free = match list.hot.pop_back().or_else(|| list.cold.pop()) {
            Some(free) => free,
            None if index < PAGE_CLASS => take_piece(&mut list, bytes),
            None => carve(&mut list, bytes),
        };
        out.push(free);
    }
}

/// One buffer from the newest slab, mapping another when it is used up.
fn carve(list: &mut ClassList, bytes: usize) -> Free {
    let (start, left) = match list.slab.take() {
        Some((start, left)) if left >= bytes => (start.0, left),
        _ => (map(SLAB_BYTES), SLAB_BYTES),
    };
    if left > bytes {
        // SAFETY: `bytes < left`, so the result is inside the slab.
        list.slab = Some((Free(unsafe { start.add(bytes) }), left - bytes));
    }
    Free(start)
}

/// One piece of a page, for the classes below a page.
fn take_piece(list: &mut ClassList, bytes: usize) -> Free {
    let (page, mask) = match list.partial.pop_first() {
        Some((_, entry)) => entry,
        None => (take_one(PAGE_CLASS), full_mask(bytes)),
    };
    let piece = mask.trailing_zeros() as usize;
    // SAFETY: `piece < 4096 / bytes`, as the mask has only such bits, so this is inside the page.
    let ptr = unsafe { page.0.add(piece * bytes) };
    let rest = mask & (mask - 1);
    if rest != 0 {
        list.partial.insert(page.0.as_ptr().addr(), (page, rest));
    }
    Free(ptr)
}

/// The mask of a page whose pieces of `bytes` are all free.
fn full_mask(bytes: usize) -> u8 {
    match bytes {
        512 => 0xff,
        1024 => 0x0f,
        _ => 0x03,
    }
}

/// Free resident bytes that a class keeps now.
fn hot_bytes_max() -> usize {
    let share = usize::try_from(POOL.live_bytes.sum() / HOT_SHARE).unwrap_or(usize::MAX);
    share.clamp(HOT_BYTES_MIN, HOT_BYTES_MAX)
}

/// Puts buffers of class `index` on its shared list, and gives pages to the system beyond the limit.
fn give_back(index: usize, items: impl IntoIterator<Item = Free>) {
    let bytes = CLASS_BYTES_MIN << index;
    if index < PAGE_CLASS {
        let mut pages = Vec::new();
        let mut list = lock(index);
        items.into_iter().for_each(|item| pages.extend(return_piece(&mut list, item, bytes)));
        drop(list);
        if !pages.is_empty() {
            give_back(PAGE_CLASS, pages);
        }
        return;
    }
    let mut list = lock(index);
    list.hot.extend(items);
    if list.hot.len() * bytes <= HOT_BYTES_MIN {
        return;
    }
    let hot_bytes_max = hot_bytes_max();
    if list.hot.len() * bytes <= hot_bytes_max {
        return;
    }
    let excess = list.hot.len() - hot_bytes_max / bytes / 2;
    let mut cold: Vec<Free> = list.hot.drain(..excess).collect();
    drop(list);
    purge(&mut cold, bytes);
    lock(index).cold.append(&mut cold);
}

/// Marks a piece free; returns its page when all pieces of it are.
fn return_piece(list: &mut ClassList, item: Free, bytes: usize) -> Option<Free> {
    let offset = item.0.as_ptr().addr() % PAGE_BYTES;
    // SAFETY: a piece lies `offset` bytes into its page, which belongs to the same slab.
    let page = unsafe { item.0.sub(offset) };
    let bit = 1u8 << (offset / bytes);
    let entry = list.partial.entry(page.as_ptr().addr()).or_insert((Free(page), 0));
    entry.1 |= bit;
    if entry.1 == full_mask(bytes) {
        list.partial.remove(&page.as_ptr().addr()).map(|(page, _)| page)
    } else {
        None
    }
}

/// Gives the pages of free buffers back to the system, neighbours in one call.
fn purge(items: &mut [Free], bytes: usize) {
    items.sort_unstable_by_key(|item| item.0.as_ptr().addr());
    let mut rest = &items[..];
    while let Some(first) = rest.first() {
        let start = first.0.as_ptr().addr();
        let run = rest
            .iter()
            .enumerate()
            .take_while(|(i, item)| item.0.as_ptr().addr() == start + i * bytes)
            .count();
        // SAFETY: `run` adjacent free buffers, all ours: their contents may vanish. The memory
        // stays mapped and reads as zeroes. A failure leaves it resident, which is harmless.
        let _ = unsafe { madvise(first.0.as_ptr().cast(), run * bytes, Advice::LinuxDontNeed) };
        rest = &rest[run..];
    }
}

/// Maps `bytes` of fresh, zeroed, page-aligned memory.
fn map(bytes: usize) -> NonNull<u8> {
    // SAFETY: a new anonymous mapping at an address of the kernel's choice aliases nothing.
    let mapped = unsafe {
        mmap_anonymous(
            std::ptr::null_mut(),
            bytes,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::PRIVATE,
        )
    };
    let Some(ptr) = mapped.ok().and_then(|ptr| NonNull::new(ptr.cast::<u8>())) else {
        // As every allocator of Rust does when memory is out.
        std::alloc::handle_alloc_error(std::alloc::Layout::new::<[u8; PAGE_BYTES]>());
    };
    POOL.mapped_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    // Huge pages would come back whole behind MADV_DONTNEED and make RSS unpredictable; where
    // the kernel has none the call fails, which is as good.
    // SAFETY: the mapping was just made with this length.
    let _ = unsafe { madvise(ptr.as_ptr().cast(), bytes, Advice::LinuxNoHugepage) };
    ptr
}
