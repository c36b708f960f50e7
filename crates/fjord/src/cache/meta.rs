//! The metadata cache: blocks of bitmaps, inode tables, extent nodes, directories, ...
//!
//! Owns every [`Buffer`] of a mounted file system. Invariants: there is at most one
//! buffer for a block at any time, so that all transactions see the same content; a
//! buffer that is dirty, in a transaction or referenced from outside is never dropped;
//! a block is checked by its reader's `verify` once, when it comes from the device.
//!
//! Locking: a shard's map lock is a leaf and never held over I/O; `Slot::load` is held
//! over the read of one block, so that two readers of it do one read.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use fjord_block::lock::{Mutex, Rank};
use fjord_block::{AlignedBuf, Buf, Class, Device};
use fjord_format::BlockNo;
use fjord_journal::{Buffer, BufferKind};
use foldhash::fast::RandomState;

use crate::error::Result;

const SHARDS: usize = 32;
/// Memory that a block costs beside its content, in bytes.
const BLOCK_OVERHEAD_BYTES: u64 = 384;
/// Buffers that a new block looks at for one to drop. While most are dirty it may find none; all would be looked at
/// for each new block otherwise, which with `data=journal` was half of a writer's time.
const LOOKS_PER_INSERT: usize = 16;
/// Most bytes over the budget that dirty blocks may cause.
const EXCESS_MAX_BYTES: usize = 16 << 20;

struct Slot {
    /// The buffer once it is loaded; the lock is held over the read.
    load: Mutex<Option<Arc<Buffer>>>,
    referenced: AtomicBool,
}

#[derive(Default)]
struct Shard {
    slots: HashMap<u64, Arc<Slot>, RandomState>,
    /// Eviction order (second chance).
    queue: std::collections::VecDeque<u64>,
}

/// All metadata blocks in memory.
pub(crate) struct MetaCache {
    device: Arc<dyn Device>,
    block_size: usize,
    shards: Vec<Mutex<Shard>>,
    count: AtomicUsize,
    capacity: usize,
}

impl MetaCache {
    pub(crate) fn new(device: Arc<dyn Device>, block_size: u32, budget_bytes: u64) -> Self {
        let capacity = (budget_bytes / (u64::from(block_size) + BLOCK_OVERHEAD_BYTES)).max(64);
        Self {
            device,
            block_size: block_size as usize,
            shards: (0..SHARDS).map(|_| Mutex::new(Rank::MetaShard, Shard::default())).collect(),
            count: AtomicUsize::new(0),
            capacity: usize::try_from(capacity).unwrap_or(usize::MAX),
        }
    }

    fn shard(&self, block: BlockNo) -> &Mutex<Shard> {
        let mixed = block.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
        &self.shards[mixed as usize % SHARDS]
    }

    fn slot(&self, block: BlockNo) -> Arc<Slot> {
        let mut shard = self.shard(block).lock();
        if let Some(slot) = shard.slots.get(&block.0) {
            slot.referenced.store(true, Ordering::Relaxed);
            return slot.clone();
        }
        let slot = Arc::new(Slot {
            load: Mutex::new(Rank::MetaLoad, None),
            referenced: AtomicBool::new(false),
        });
        shard.slots.insert(block.0, slot.clone());
        shard.queue.push_back(block.0);
        let count = self.count.fetch_add(1, Ordering::Relaxed) + 1;
        if count > self.capacity {
            self.evict_from(&mut shard, count - self.capacity, LOOKS_PER_INSERT);
        }
        slot
    }

    /// The buffer of `block`, read from the device if need be. `verify` is called on
    /// content that comes from the device.
    ///
    /// # Errors
    /// The device's, and what `verify` finds.
    pub(crate) fn read(
        &self,
        block: BlockNo,
        verify: impl FnOnce(&[u8]) -> Result<()>,
    ) -> Result<Arc<Buffer>> {
        self.read_as(block, verify, Buffer::new)
    }

    /// As [`MetaCache::read`], for a block whose last committed version partial commits need.
    pub(crate) fn read_keeping_base(&self, block: BlockNo) -> Result<Arc<Buffer>> {
        self.read_as(block, |_| Ok(()), Buffer::new_keeping_base)
    }

    /// Looks at a block of which nobody has checked what it holds; so it is not kept, or a later
    /// [`MetaCache::read`] would not check it.
    pub(crate) fn look<T>(
        &self,
        block: BlockNo,
        look: impl FnOnce(&[u8]) -> Result<T>,
    ) -> Result<T> {
        let slot = self.slot(block);
        let loaded = slot.load.lock();
        match loaded.as_ref() {
            Some(buffer) => look(&buffer.read()),
            None => look(&self.read_device(block)?),
        }
    }

    fn read_device(&self, block: BlockNo) -> Result<Buf> {
        let offset = block.0.saturating_mul(self.block_size as u64);
        let memory = vec![AlignedBuf::uninit(self.block_size)];
        let mut bufs = self.device.submit_read(offset, memory, Class::Sync).wait()?;
        Ok(bufs.pop().map_or_else(|| Buf::zeroed(self.block_size), Buf::from))
    }

    fn read_as(
        &self,
        block: BlockNo,
        verify: impl FnOnce(&[u8]) -> Result<()>,
        make: fn(BlockNo, Buf, BufferKind) -> Arc<Buffer>,
    ) -> Result<Arc<Buffer>> {
        let slot = self.slot(block);
        let mut loaded = slot.load.lock();
        if let Some(buffer) = loaded.as_ref() {
            return Ok(buffer.clone());
        }
        let content = self.read_device(block)?;
        verify(&content)?;
        let buffer = make(block, content, BufferKind::Metadata);
        *loaded = Some(buffer.clone());
        Ok(buffer)
    }

    /// The buffer of `block` for a caller that overwrites all of it: nothing is read, a missing
    /// block starts as zeros.
    pub(crate) fn create(&self, block: BlockNo) -> Arc<Buffer> {
        self.create_kind(block, BufferKind::Metadata, || Buf::zeroed(self.block_size))
    }

    /// As [`MetaCache::create`], for a block of file data that goes through the journal; a new buffer has this
    /// content.
    pub(crate) fn create_data(&self, block: BlockNo, content: &Buf) -> Arc<Buffer> {
        self.create_kind(block, BufferKind::Data, || content.clone())
    }

    fn create_kind(
        &self,
        block: BlockNo,
        kind: BufferKind,
        content: impl FnOnce() -> Buf,
    ) -> Arc<Buffer> {
        let slot = self.slot(block);
        let mut loaded = slot.load.lock();
        loaded.get_or_insert_with(|| Buffer::new(block, content(), kind)).clone()
    }

    /// The buffer of `block` if it is in memory.
    pub(crate) fn peek(&self, block: BlockNo) -> Option<Arc<Buffer>> {
        let slot = self.shard(block).lock().slots.get(&block.0).cloned()?;
        slot.load.lock().clone()
    }

    /// Bytes of blocks in memory.
    pub(crate) fn cached_bytes(&self) -> u64 {
        (self.count.load(Ordering::Relaxed) * self.block_size) as u64
    }

    /// Whether more blocks are in memory than the budget allows, because they are dirty.
    pub(crate) fn is_over_budget(&self) -> bool {
        self.count.load(Ordering::Relaxed) > self.capacity
    }

    /// Whether the cache is so far over budget that changes must wait for a checkpoint.
    pub(crate) fn is_far_over_budget(&self) -> bool {
        let count = self.count.load(Ordering::Relaxed);
        count > self.capacity.saturating_add(EXCESS_MAX_BYTES / self.block_size)
    }

    /// Evicts blocks until the cache is within its budget.
    pub(crate) fn trim(&self) {
        for shard in &self.shards {
            let mut shard = shard.lock();
            let mut excess = self.count.load(Ordering::Relaxed).saturating_sub(self.capacity);
            while excess > 0 {
                let whole = 2 * shard.queue.len();
                self.evict_from(&mut shard, excess, whole);
                let left = self.count.load(Ordering::Relaxed).saturating_sub(self.capacity);
                if left >= excess {
                    break;
                }
                excess = left;
            }
        }
    }

    /// Drops up to `want` clean, unused buffers of a shard, of the next `looks` in the order of eviction.
    fn evict_from(&self, shard: &mut Shard, want: usize, looks: usize) {
        let mut dropped = 0;
        for _ in 0..looks {
            if dropped >= want.min(16) {
                break;
            }
            let Some(block) = shard.queue.pop_front() else { break };
            let Some(slot) = shard.slots.get(&block) else { continue };
            if slot.referenced.swap(false, Ordering::Relaxed) || !is_unused(slot) {
                shard.queue.push_back(block);
                continue;
            }
            shard.slots.remove(&block);
            self.count.fetch_sub(1, Ordering::Relaxed);
            dropped += 1;
        }
    }
}

/// Whether the slot and its buffer are unreferenced and clean. Called under the shard lock, so that
/// no new reference can appear.
fn is_unused(slot: &Arc<Slot>) -> bool {
    if Arc::strong_count(slot) != 1 {
        return false;
    }
    match slot.load.try_lock() {
        Some(guard) => guard
            .as_ref()
            .is_none_or(|buffer| Arc::strong_count(buffer) == 1 && buffer.is_evictable()),
        None => false,
    }
}
