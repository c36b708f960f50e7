//! The table of inodes in memory.
//!
//! Owns which [`Inode`] objects exist: at most one per inode number. Unused inodes stay until the
//! table is over its capacity, so that a later lookup is cheap.
//!
//! Invariants: an inode is dropped from the table only when nothing outside refers to
//! it, it has no dirty pages and nothing lazy to store; `Inode::refs` is changed only
//! under the shard lock of its number. Who holds a number ([`InodeTable::hold`]) keeps the
//! inode from being deleted, not from leaving memory.
//!
//! Locking: a shard's map lock is a leaf and never held over I/O; `Slot::load` is held
//! while one inode is read.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use fjord_block::lock::{Mutex, Rank};
use fjord_format::inode::DiskInode;
use fjord_format::{InodeNo, Tid};
use foldhash::fast::RandomState;
use rustix::io::Errno;

use super::{FlushCell, InFlight, Inode, TidCell, disk};
use crate::cache::page::PageMap;
use crate::error::Result;
use crate::fs::FsInner;

const SHARDS: usize = 64;

struct Slot {
    /// The inode once it is loaded; the lock is held over the read.
    load: Mutex<Option<Arc<Inode>>>,
    /// Used since the evictor last looked.
    referenced: AtomicBool,
}

impl Default for Slot {
    fn default() -> Slot {
        Slot { load: Mutex::new(Rank::InodeLoad, None), referenced: AtomicBool::new(false) }
    }
}

#[derive(Default)]
struct Shard {
    slots: HashMap<u32, Arc<Slot>, RandomState>,
    queue: VecDeque<u32>,
    /// Inodes held by number, in memory or not, and how often.
    held: HashMap<u32, u64>,
}

/// Remaining users of an inode after an outside reference was dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Users {
    /// Other references.
    References,
    /// Only holders of its number.
    Holders,
    /// None.
    Nobody,
}

/// All inodes in memory.
pub(crate) struct InodeTable {
    shards: Vec<Mutex<Shard>>,
    count: AtomicUsize,
    capacity: usize,
    /// The newest transaction that changed an inode which has left memory since.
    departed: TidCell,
    /// Counts inodes that have left memory with writes in place that no flush had covered. Flushes of the
    /// engine cover them; mount ends with one.
    pub(crate) departed_in_place: FlushCell,
}

impl InodeTable {
    /// A table that keeps about `capacity` unused inodes.
    pub(crate) fn new(capacity: usize) -> Self {
        Self {
            shards: (0..SHARDS).map(|_| Mutex::new(Rank::InodeShard, Shard::default())).collect(),
            count: AtomicUsize::new(0),
            capacity,
            departed: TidCell::default(),
            departed_in_place: FlushCell::default(),
        }
    }

    /// How many unused inodes it keeps, about.
    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    fn shard(&self, ino: InodeNo) -> &Mutex<Shard> {
        &self.shards[ino.0 as usize % SHARDS]
    }

    fn slot(&self, ino: InodeNo) -> Arc<Slot> {
        let mut shard = self.shard(ino).lock();
        if let Some(slot) = shard.slots.get(&ino.0) {
            slot.referenced.store(true, Ordering::Relaxed);
            return slot.clone();
        }
        let slot = Arc::new(Slot::default());
        shard.slots.insert(ino.0, slot.clone());
        shard.queue.push_back(ino.0);
        let count = self.count.fetch_add(1, Ordering::Relaxed) + 1;
        if count > self.capacity {
            self.evict_from(&mut shard);
        }
        slot
    }

    /// Evicts a few unused inodes, oldest first.
    fn evict_from(&self, shard: &mut Shard) {
        for _ in 0..shard.queue.len().min(16) {
            let Some(ino) = shard.queue.pop_front() else { return };
            let Some(slot) = shard.slots.get(&ino) else { continue };
            if slot.referenced.swap(false, Ordering::Relaxed) || !is_unused(slot) {
                shard.queue.push_back(ino);
                continue;
            }
            let loaded = slot.load.try_lock();
            if let Some(tid) = loaded.as_deref().and_then(newest_change) {
                self.departed.advance(tid);
            }
            let owes_flush = |inode: &Arc<Inode>| inode.in_place.owed().is_some();
            if loaded.as_deref().and_then(Option::as_ref).is_some_and(owes_flush) {
                self.departed_in_place.record_write();
            }
            drop(loaded);
            shard.slots.remove(&ino);
            self.count.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// The inode if it is in memory.
    pub(crate) fn peek(&self, ino: InodeNo) -> Option<Arc<Inode>> {
        let slot = self.shard(ino).lock().slots.get(&ino.0).cloned()?;
        slot.referenced.store(true, Ordering::Relaxed);
        slot.load.lock().clone()
    }

    /// Takes an inode out after its deletion, so that its number can start a new life.
    /// The number may have a new life already, which stays.
    pub(crate) fn forget(&self, inode: &Arc<Inode>) {
        let slot = self.shard(inode.ino).lock().slots.get(&inode.ino.0).cloned();
        let Some(slot) = slot else { return };
        let mut loaded = slot.load.lock();
        if loaded.as_ref().is_some_and(|known| Arc::ptr_eq(known, inode)) {
            *loaded = None;
        }
    }

    /// An inode with something to write that only the table has. There is none while writes succeed:
    /// whoever makes an inode dirty has it until it is on the list of dirty inodes.
    #[cfg(debug_assertions)]
    pub(crate) fn unlisted_dirty(&self) -> Option<InodeNo> {
        let is_unlisted = |slot: &Slot| {
            let loaded = slot.load.try_lock()?;
            let inode = loaded.as_ref().filter(|inode| Arc::strong_count(inode) == 1)?;
            let state = inode.state.try_read()?;
            let lags = state.dirty || state.size != state.disk.size || inode.pages.has_dirty();
            (lags && !state.dead).then_some(inode.ino)
        };
        self.shards
            .iter()
            .find_map(|shard| shard.lock().slots.values().find_map(|s| is_unlisted(s)))
    }

    /// Adds an outside reference.
    pub(crate) fn add_ref(&self, inode: &Inode) {
        let _shard = self.shard(inode.ino).lock();
        inode.refs.fetch_add(1, Ordering::Relaxed);
    }

    /// Drops an outside reference.
    pub(crate) fn drop_ref(&self, inode: &Inode) -> Users {
        let shard = self.shard(inode.ino).lock();
        if inode.refs.fetch_sub(1, Ordering::Relaxed) != 1 {
            Users::References
        } else if shard.held.contains_key(&inode.ino.0) {
            Users::Holders
        } else {
            Users::Nobody
        }
    }

    /// Whether somebody outside refers to the inode or holds its number.
    pub(crate) fn is_used(&self, inode: &Inode) -> bool {
        let shard = self.shard(inode.ino).lock();
        inode.is_referenced() || shard.held.contains_key(&inode.ino.0)
    }

    /// Counts one more holder of the number. The caller has a reference.
    pub(crate) fn hold(&self, ino: InodeNo) {
        let mut shard = self.shard(ino).lock();
        let count = shard.held.entry(ino.0).or_default();
        *count = count.saturating_add(1);
    }

    /// Takes `count` holders away. Returns whether none is left, and there was one.
    pub(crate) fn unhold(&self, ino: InodeNo, count: u64) -> bool {
        let mut shard = self.shard(ino).lock();
        let Some(held) = shard.held.get_mut(&ino.0) else { return false };
        *held = held.saturating_sub(count);
        if *held > 0 {
            return false;
        }
        shard.held.remove(&ino.0);
        // A cache of names that was emptied is to leave nothing behind.
        if shard.held.capacity() > 4 * shard.held.len().max(64) {
            let room = 2 * shard.held.len();
            shard.held.shrink_to(room);
        }
        true
    }

    /// Takes all holders away, and names what they held.
    pub(crate) fn unhold_all(&self) -> Vec<InodeNo> {
        let take = |shard: &Mutex<Shard>| std::mem::take(&mut shard.lock().held);
        self.shards.iter().flat_map(take).map(|(ino, _)| InodeNo(ino)).collect()
    }
}

/// The newest transaction that changed a loaded inode.
fn newest_change(loaded: &Option<Arc<Inode>>) -> Option<Tid> {
    loaded.as_ref().and_then(|inode| inode.sync_tid.get())
}

/// Whether an inode can be dropped. Called under the shard lock.
fn is_unused(slot: &Arc<Slot>) -> bool {
    if Arc::strong_count(slot) != 1 {
        return false;
    }
    let Some(guard) = slot.load.try_lock() else { return false };
    let Some(inode) = guard.as_ref() else { return true };
    if Arc::strong_count(inode) != 1 || inode.refs.load(Ordering::Relaxed) != 0 {
        return false;
    }
    let Some(state) = inode.state.try_read() else { return false };
    let idle = |w: &InFlight| w.writes.is_empty() && w.deferred.is_empty();
    let in_flight = inode.writeback.try_lock().is_none_or(|w| !idle(&w));
    !in_flight && !state.dirty && state.orphan.is_none() && !inode.pages.has_dirty()
}

/// The inode `ino`, read from the device if need be.
///
/// # Errors
/// `ESTALE` if the inode is not in use; corruption; I/O errors.
pub(crate) fn get(fs: &FsInner, ino: InodeNo) -> Result<Arc<Inode>> {
    let slot = fs.inodes.slot(ino);
    let mut loaded = slot.load.lock();
    if let Some(inode) = loaded.as_ref() {
        return Ok(inode.clone());
    }
    let decoded = disk::load(fs, ino)?;
    if decoded.links_count == 0 && decoded.mode == 0 {
        return Err(Errno::STALE.into());
    }
    let mut inode = Inode::new(ino, decoded, PageMap::new(fs.page_lru.clone()));
    // It may have been in memory before, with changes that are not durable yet.
    if let Some(tid) = fs.inodes.departed.get().filter(|&tid| !fs.journal().is_committed(tid)) {
        inode.touch_tid(tid, true);
        let own = Arc::get_mut(&mut inode).expect("no other reference was made yet");
        own.state.get_mut().changes.forgotten(tid);
    }
    if fs.inodes.departed_in_place.owed().is_some() {
        inode.in_place.record_write();
    }
    *loaded = Some(inode.clone());
    Ok(inode)
}

/// Wraps a freshly allocated inode that nobody else is to see yet.
pub(crate) fn detached(fs: &FsInner, ino: InodeNo, decoded: DiskInode) -> Arc<Inode> {
    Inode::new(ino, decoded, PageMap::new(fs.page_lru.clone()))
}

/// Puts a new inode into the table. The caller holds its state until it is complete.
pub(crate) fn publish(fs: &FsInner, inode: &Arc<Inode>) {
    let slot = fs.inodes.slot(inode.ino);
    *slot.load.lock() = Some(inode.clone());
}
