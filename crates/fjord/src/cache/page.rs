//! The page cache: file blocks in memory.
//!
//! A page is one file-system block of a file. Pages are kept per inode in chunks of 64,
//! each with bit masks for the states a page can have:
//!
//! - *dirty*: newer than the device;
//! - **delalloc*: has a reservation, no block is allocated yet;
//! - **writeback*: its write is in flight, or its extent is not inserted yet.
//!
//! Invariants: a dirty or writeback page is never evicted; the global counters equal the
//! sums over all maps; a page's bytes beyond the end of its file are zero. Content is a
//! [`Buf`], so freezing a page for I/O is a reference count and a later write copies.
//!
//! Locking: [`PageMap::inner`] (`Rank::PageMap`) is held for memory operations only. The inode's state
//! lock above it decides which blocks may change.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use fjord_block::Buf;
use fjord_block::lock::{Mutex, Rank};
use smallvec::SmallVec;

/// Pages in a chunk.
const CHUNK_PAGES: u32 = 64;
/// Memory that a page costs beside its content, in bytes: the buffer's header and the
/// allocator's.
const PAGE_OVERHEAD_BYTES: u64 = 64;
/// The same for a chunk: itself, its place in the map and in the queue.
const CHUNK_OVERHEAD_BYTES: u64 = size_of::<Chunk>() as u64 + 64;
/// Number of stale entries of the queue that are tolerated.
const STALE_MIN: u64 = 1024;

struct Chunk {
    pages: [Option<Buf>; CHUNK_PAGES as usize],
    dirty: u64,
    delalloc: u64,
    writeback: u64,
    /// Used since the last visit of the evictor (second chance).
    referenced: bool,
    /// Tells it from earlier chunks of the same pages; its entry in the queue has it too.
    ticket: u64,
}

impl Default for Chunk {
    fn default() -> Self {
        Self {
            pages: std::array::from_fn(|_| None),
            dirty: 0,
            delalloc: 0,
            writeback: 0,
            referenced: false,
            ticket: 0,
        }
    }
}

impl Chunk {
    fn is_empty(&self) -> bool {
        self.pages.iter().all(Option::is_none)
    }
}

#[derive(Default)]
struct PageState {
    chunks: BTreeMap<u32, Box<Chunk>>,
    /// Indexes of chunks with at least one dirty page.
    dirty_chunks: BTreeSet<u32>,
    dirty_count: u64,
}

/// The pages of one inode.
pub(crate) struct PageMap {
    inner: Mutex<PageState>,
    lru: Arc<PageLru>,
    me: Weak<PageMap>,
}

/// A chunk in the order of eviction.
struct Entry {
    map: Weak<PageMap>,
    index: u32,
    ticket: u64,
}

/// Byte budget and eviction order of all pages of a file system.
pub(crate) struct PageLru {
    /// Chunks in the order of their creation or last second chance.
    queue: Mutex<VecDeque<Entry>>,
    /// Chunks that exist.
    chunk_count: AtomicU64,
    /// Entries of the queue, about, whose chunk is gone: a short-lived file leaves one.
    stale_count: AtomicU64,
    /// Tickets given out.
    tickets: AtomicU64,
    cached_bytes: AtomicU64,
    dirty_bytes: AtomicU64,
    budget_bytes: u64,
    page_size: u64,
}

/// A page picked for writeback.
pub(crate) struct DirtyPage {
    pub(crate) lblk: u32,
    pub(crate) buf: Buf,
    pub(crate) delalloc: bool,
}

fn split(lblk: u32) -> (u32, u32) {
    (lblk / CHUNK_PAGES, lblk % CHUNK_PAGES)
}

/// The bits of chunk `index` that fall into `range` of pages.
fn chunk_mask(index: u32, range: &Range<u64>) -> u64 {
    let first = u64::from(index) * u64::from(CHUNK_PAGES);
    let low = range.start.max(first);
    let high = range.end.min(first + u64::from(CHUNK_PAGES));
    if low >= high {
        return 0;
    }
    let count = high - low;
    let mask = if count == 64 { u64::MAX } else { (1u64 << count) - 1 };
    mask << (low - first)
}

impl PageLru {
    pub(crate) fn new(budget_bytes: u64, page_size: u32) -> Arc<Self> {
        Arc::new(Self {
            queue: Mutex::new(Rank::PageLru, VecDeque::new()),
            chunk_count: AtomicU64::new(0),
            stale_count: AtomicU64::new(0),
            tickets: AtomicU64::new(0),
            cached_bytes: AtomicU64::new(0),
            dirty_bytes: AtomicU64::new(0),
            budget_bytes,
            page_size: u64::from(page_size),
        })
    }

    /// Bytes of pages in memory.
    pub(crate) fn cached_bytes(&self) -> u64 {
        self.cached_bytes.load(Ordering::Relaxed)
    }

    /// Bytes of dirty pages.
    pub(crate) fn dirty_bytes(&self) -> u64 {
        self.dirty_bytes.load(Ordering::Relaxed)
    }

    /// Dirty bytes from which background writeback should run.
    pub(crate) fn background_threshold_bytes(&self) -> u64 {
        self.budget_bytes / 4
    }

    /// Dirty bytes from which writers must help.
    pub(crate) fn throttle_threshold_bytes(&self) -> u64 {
        self.budget_bytes / 2
    }

    /// Dirty bytes from which writers of small files must help, too.
    pub(crate) fn urgent_threshold_bytes(&self) -> u64 {
        self.budget_bytes / 4 * 3
    }

    /// Most bytes of data writes in flight without a waiter.
    pub(crate) fn unawaited_threshold_bytes(&self) -> u64 {
        self.budget_bytes / 8
    }

    /// Memory of all pages with their administration.
    fn used_bytes(&self) -> u64 {
        let cached = self.cached_bytes();
        let chunks = self.chunk_count.load(Ordering::Relaxed);
        cached + cached / self.page_size * PAGE_OVERHEAD_BYTES + chunks * CHUNK_OVERHEAD_BYTES
    }

    /// Drops clean pages until the cache is within its budget, or nothing more is clean.
    pub(crate) fn reclaim(&self) {
        self.drop_stale();
        if self.used_bytes() <= self.budget_bytes {
            return;
        }
        let mut attempts = 2 * self.queue.lock().len();
        while self.used_bytes() > self.budget_bytes && attempts > 0 {
            attempts -= 1;
            let Some(entry) = self.queue.lock().pop_front() else { return };
            match entry.map.upgrade().map(|map| map.evict_chunk(entry.index, entry.ticket)) {
                Some(Evicted::Kept) => self.queue.lock().push_back(entry),
                Some(Evicted::Gone) => {}
                Some(Evicted::Unknown) | None => self.forget_stale(1),
            }
        }
    }

    /// Takes entries without a chunk out of the queue when they are most of it. Without this
    /// files that come and go would fill it while the cache is within its budget.
    fn drop_stale(&self) {
        let stale = self.stale_count.load(Ordering::Relaxed);
        if stale < STALE_MIN || stale < self.chunk_count.load(Ordering::Relaxed) {
            return;
        }
        let mut queue = std::mem::take(&mut *self.queue.lock());
        let before = queue.len();
        // Not under the queue's lock: creating a chunk takes it under the map's lock.
        queue.retain(|entry| {
            entry.map.upgrade().is_some_and(|map| map.has_chunk(entry.index, entry.ticket))
        });
        self.forget_stale((before - queue.len()) as u64);
        let mut current = self.queue.lock();
        queue.append(&mut current);
        queue.shrink_to(2 * queue.len());
        *current = queue;
    }

    fn forget_stale(&self, count: u64) {
        // The counter may lag behind by what others are doing right now.
        let subtract = |stale: u64| Some(stale.saturating_sub(count));
        let _ = self.stale_count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, subtract);
    }
}

/// What eviction made of a chunk.
enum Evicted {
    /// It still exists.
    Kept,
    /// It is gone now.
    Gone,
    /// It was gone before.
    Unknown,
}

impl PageMap {
    pub(crate) fn new(lru: Arc<PageLru>) -> Arc<Self> {
        Arc::new_cyclic(|me| Self {
            inner: Mutex::new(Rank::PageMap, PageState::default()),
            lru,
            me: me.clone(),
        })
    }

    /// The page at `lblk`, if it is cached.
    pub(crate) fn get(&self, lblk: u32) -> Option<Buf> {
        let (index, slot) = split(lblk);
        let mut inner = self.inner.lock();
        let chunk = inner.chunks.get_mut(&index)?;
        chunk.referenced = true;
        chunk.pages[slot as usize].clone()
    }

    /// Whether the page at `lblk` is cached.
    pub(crate) fn contains(&self, lblk: u32) -> bool {
        let (index, slot) = split(lblk);
        let inner = self.inner.lock();
        inner.chunks.get(&index).is_some_and(|c| c.pages[slot as usize].is_some())
    }

    /// Whether the page at `lblk` holds a reservation.
    pub(crate) fn is_delalloc(&self, lblk: u32) -> bool {
        let (index, slot) = split(lblk);
        let inner = self.inner.lock();
        inner.chunks.get(&index).is_some_and(|c| c.delalloc >> slot & 1 == 1)
    }

    /// Adds a page read from the device; one that is already there stays.
    pub(crate) fn insert_clean(&self, lblk: u32, buf: Buf) {
        let (index, slot) = split(lblk);
        let mut inner = self.inner.lock();
        let chunk = self.chunk_mut(&mut inner, index);
        if chunk.pages[slot as usize].is_none() {
            chunk.pages[slot as usize] = Some(buf);
            self.lru.cached_bytes.fetch_add(self.lru.page_size, Ordering::Relaxed);
        }
    }

    /// Replaces the page by `buf` and marks it dirty; with `delalloc` it has a reservation.
    pub(crate) fn insert_dirty(&self, lblk: u32, buf: Buf, delalloc: bool) {
        let (index, slot) = split(lblk);
        let mut inner = self.inner.lock();
        let chunk = self.chunk_mut(&mut inner, index);
        if chunk.pages[slot as usize].replace(buf).is_none() {
            self.lru.cached_bytes.fetch_add(self.lru.page_size, Ordering::Relaxed);
        }
        chunk.delalloc |= u64::from(delalloc) << slot;
        self.mark_dirty(&mut inner, index, slot);
    }

    /// As [`PageMap::modify`]: puts `bytes` at byte `at` of the page.
    pub(crate) fn overwrite(&self, lblk: u32, delalloc: bool, at: usize, bytes: &[u8]) -> bool {
        self.change(lblk, delalloc, |buf| buf.overwrite(at, bytes))
    }

    /// Changes a cached page in place (a copy of it while I/O holds the old one) and
    /// marks it dirty. Returns false, and does nothing, if the page is not cached.
    pub(crate) fn modify(&self, lblk: u32, delalloc: bool, change: impl FnOnce(&mut [u8])) -> bool {
        self.change(lblk, delalloc, |buf| change(buf.make_mut()))
    }

    fn change(&self, lblk: u32, delalloc: bool, change: impl FnOnce(&mut Buf)) -> bool {
        let (index, slot) = split(lblk);
        let mut inner = self.inner.lock();
        let Some(chunk) = inner.chunks.get_mut(&index) else { return false };
        let Some(buf) = chunk.pages[slot as usize].as_mut() else { return false };
        change(buf);
        chunk.referenced = true;
        chunk.delalloc |= u64::from(delalloc) << slot;
        self.mark_dirty(&mut inner, index, slot);
        true
    }

    fn chunk_mut<'a>(&self, inner: &'a mut PageState, index: u32) -> &'a mut Chunk {
        inner.chunks.entry(index).or_insert_with(|| {
            let ticket = self.lru.tickets.fetch_add(1, Ordering::Relaxed);
            self.lru.chunk_count.fetch_add(1, Ordering::Relaxed);
            self.lru.queue.lock().push_back(Entry { map: self.me.clone(), index, ticket });
            Box::new(Chunk { ticket, ..Chunk::default() })
        })
    }

    fn mark_dirty(&self, inner: &mut PageState, index: u32, slot: u32) {
        let Some(chunk) = inner.chunks.get_mut(&index) else { return };
        let bit = 1u64 << slot;
        if chunk.dirty & bit == 0 {
            chunk.dirty |= bit;
            inner.dirty_chunks.insert(index);
            inner.dirty_count += 1;
            self.lru.dirty_bytes.fetch_add(self.lru.page_size, Ordering::Relaxed);
        }
    }

    fn clear_dirty(&self, inner: &mut PageState, index: u32, mask: u64) {
        let Some(chunk) = inner.chunks.get_mut(&index) else { return };
        let cleared = u64::from((chunk.dirty & mask).count_ones());
        chunk.dirty &= !mask;
        if chunk.dirty == 0 {
            inner.dirty_chunks.remove(&index);
        }
        inner.dirty_count -= cleared;
        self.lru.dirty_bytes.fetch_sub(cleared * self.lru.page_size, Ordering::Relaxed);
    }

    /// Whether any page is dirty.
    pub(crate) fn has_dirty(&self) -> bool {
        self.inner.lock().dirty_count > 0
    }

    /// How many pages are dirty.
    pub(crate) fn dirty_count(&self) -> usize {
        usize::try_from(self.inner.lock().dirty_count).unwrap_or(usize::MAX)
    }

    /// Whether a dirty page has no block yet.
    pub(crate) fn has_dirty_delalloc(&self) -> bool {
        let inner = self.inner.lock();
        let dirty = inner.dirty_chunks.iter().filter_map(|index| inner.chunks.get(index));
        dirty.into_iter().any(|chunk| chunk.dirty & chunk.delalloc != 0)
    }

    /// The first dirty page of `range`.
    pub(crate) fn first_dirty(&self, range: Range<u64>) -> Option<u32> {
        let inner = self.inner.lock();
        let first = (range.start / u64::from(CHUNK_PAGES)).min(u64::from(u32::MAX)) as u32;
        inner
            .dirty_chunks
            .range(first..)
            .take_while(|&&index| u64::from(index) * u64::from(CHUNK_PAGES) < range.end)
            .find_map(|&index| {
                let dirty = inner.chunks.get(&index)?.dirty & chunk_mask(index, &range);
                (dirty != 0).then(|| index * CHUNK_PAGES + dirty.trailing_zeros())
            })
    }

    /// Takes up to `max` dirty pages of `range` in order: each becomes clean and *writeback*.
    pub(crate) fn take_dirty(&self, range: Range<u64>, max: usize) -> Vec<DirtyPage> {
        let mut inner = self.inner.lock();
        let mut taken = Vec::new();
        let first = (range.start / u64::from(CHUNK_PAGES)).min(u64::from(u32::MAX)) as u32;
        let indexes: SmallVec<[u32; 8]> = inner.dirty_chunks.range(first..).copied().collect();
        for index in indexes {
            let Some(chunk) = inner.chunks.get_mut(&index) else { continue };
            let mut picked = 0u64;
            let mut left = chunk.dirty & chunk_mask(index, &range);
            while left != 0 && taken.len() < max {
                let slot = left.trailing_zeros();
                left &= left - 1;
                let Some(buf) = chunk.pages[slot as usize].clone() else { continue };
                picked |= 1 << slot;
                let delalloc = chunk.delalloc >> slot & 1 == 1;
                taken.push(DirtyPage { lblk: index * CHUNK_PAGES + slot, buf, delalloc });
            }
            chunk.writeback |= picked;
            self.clear_dirty(&mut inner, index, picked);
            if taken.len() >= max || u64::from(index + 1) * u64::from(CHUNK_PAGES) >= range.end {
                break;
            }
        }
        taken
    }

    /// Records that `len` pages from `lblk` are now mapped: their reservations are consumed.
    pub(crate) fn end_delalloc(&self, lblk: u32, len: u32) {
        self.for_chunks(u64::from(lblk)..u64::from(lblk) + u64::from(len), |chunk, mask| {
            chunk.delalloc &= !mask;
        });
    }

    /// Ends writeback of `len` pages from `lblk`: the device has their content.
    pub(crate) fn end_writeback(&self, lblk: u32, len: u32) {
        self.for_chunks(u64::from(lblk)..u64::from(lblk) + u64::from(len), |chunk, mask| {
            chunk.writeback &= !mask;
        });
    }

    /// Marks pages dirty again whose writeback did not start or failed.
    pub(crate) fn undo_writeback(&self, lblk: u32, len: u32) {
        for page in lblk..lblk.saturating_add(len) {
            let (index, slot) = split(page);
            let mut inner = self.inner.lock();
            let Some(chunk) = inner.chunks.get_mut(&index) else { continue };
            if chunk.writeback >> slot & 1 == 1 {
                chunk.writeback &= !(1 << slot);
                self.mark_dirty(&mut inner, index, slot);
            }
        }
    }

    fn for_chunks(&self, range: Range<u64>, mut f: impl FnMut(&mut Chunk, u64)) {
        let mut inner = self.inner.lock();
        let first = (range.start / u64::from(CHUNK_PAGES)).min(u64::from(u32::MAX)) as u32;
        for (&index, chunk) in inner.chunks.range_mut(first..) {
            let mask = chunk_mask(index, &range);
            if mask == 0 {
                break;
            }
            f(chunk, mask);
        }
    }

    /// Drops all pages of `range`, dirty or not. Returns how many held a reservation,
    /// which the caller releases. No writeback of the range may be in flight.
    pub(crate) fn remove(&self, range: Range<u64>) -> u64 {
        let mut inner = self.inner.lock();
        let first = (range.start / u64::from(CHUNK_PAGES)).min(u64::from(u32::MAX)) as u32;
        let indexes: Vec<u32> = inner
            .chunks
            .range(first..)
            .map(|(&i, _)| i)
            .take_while(|&i| chunk_mask(i, &range) != 0)
            .collect();
        let mut reserved = 0;
        for index in indexes {
            let mask = chunk_mask(index, &range);
            self.clear_dirty(&mut inner, index, mask);
            let Some(chunk) = inner.chunks.get_mut(&index) else { continue };
            reserved += u64::from((chunk.delalloc & mask).count_ones());
            chunk.delalloc &= !mask;
            chunk.writeback &= !mask;
            self.drop_pages(chunk, mask);
            if chunk.is_empty() {
                inner.chunks.remove(&index);
                self.lru.chunk_count.fetch_sub(1, Ordering::Relaxed);
                self.lru.stale_count.fetch_add(1, Ordering::Relaxed);
            }
        }
        reserved
    }

    fn drop_pages(&self, chunk: &mut Chunk, mask: u64) {
        let mut left = mask;
        while left != 0 {
            let slot = left.trailing_zeros();
            left &= left - 1;
            if chunk.pages[slot as usize].take().is_some() {
                self.lru.cached_bytes.fetch_sub(self.lru.page_size, Ordering::Relaxed);
            }
        }
    }

    /// The first page at or after `lblk` that holds data not on the device yet.
    pub(crate) fn next_pending(&self, lblk: u64) -> Option<u32> {
        let inner = self.inner.lock();
        let first = (lblk / u64::from(CHUNK_PAGES)).min(u64::from(u32::MAX)) as u32;
        for (&index, chunk) in inner.chunks.range(first..) {
            let pending = (chunk.delalloc | chunk.dirty | chunk.writeback)
                & chunk_mask(index, &(lblk..u64::MAX));
            if pending != 0 {
                return Some(index * CHUNK_PAGES + pending.trailing_zeros());
            }
        }
        None
    }

    /// Whether the page at `lblk` holds data not on the device yet.
    pub(crate) fn is_pending(&self, lblk: u32) -> bool {
        let (index, slot) = split(lblk);
        let inner = self.inner.lock();
        inner
            .chunks
            .get(&index)
            .is_some_and(|c| (c.delalloc | c.dirty | c.writeback) >> slot & 1 == 1)
    }

    fn has_chunk(&self, index: u32, ticket: u64) -> bool {
        self.inner.lock().chunks.get(&index).is_some_and(|chunk| chunk.ticket == ticket)
    }

    /// Evicts the clean pages of a chunk unless it was used lately.
    fn evict_chunk(&self, index: u32, ticket: u64) -> Evicted {
        let mut inner = self.inner.lock();
        let Some(chunk) = inner.chunks.get_mut(&index).filter(|chunk| chunk.ticket == ticket)
        else {
            return Evicted::Unknown;
        };
        if std::mem::take(&mut chunk.referenced) {
            return Evicted::Kept;
        }
        let keep = chunk.dirty | chunk.writeback | chunk.delalloc;
        self.drop_pages(chunk, !keep);
        if !chunk.is_empty() {
            return Evicted::Kept;
        }
        inner.chunks.remove(&index);
        self.lru.chunk_count.fetch_sub(1, Ordering::Relaxed);
        Evicted::Gone
    }
}

impl Drop for PageMap {
    fn drop(&mut self) {
        self.remove(0..u64::MAX);
    }
}

#[cfg(test)]
#[path = "page_tests.rs"]
mod tests;
