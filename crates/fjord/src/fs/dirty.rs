//! The list of dirty inodes.
//!
//! Owns the order in which background writeback visits them, and the set of inodes that are being
//! written back. Invariants: an inode with dirty pages or lazy changes is on the list, or is busy
//! in the thread that took it off; both hold a reference, so such an inode stays in memory; a sync
//! also gets the busy ones, so that it can wait for them. A deleted inode that a thread still has, or
//! puts back, is another one than the new inode of its number.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use fjord_block::lock::{Mutex, MutexGuard, Rank};

use crate::inode::{Inode, Instance};

/// Since when an inode waits for its writeback.
#[derive(Clone, Copy, Debug)]
enum Since {
    At(Instant),
    /// It is due whatever its age.
    Ever,
}

/// Number of shards. An inode is in one, so that two files seldom meet.
const SHARDS: usize = 16;

#[derive(Default)]
struct Shard {
    /// By place; the oldest has the lowest.
    queue: BTreeMap<i64, (Since, Arc<Inode>)>,
    /// The place of each inode on the list.
    members: HashMap<Instance, i64>,
    /// Inodes being written back, by how many threads.
    busy: HashMap<Instance, (Arc<Inode>, usize)>,
}

/// Inodes in the order in which they became dirty.
pub(crate) struct DirtyList {
    /// Each a leaf lock; never two at a time.
    shards: [Mutex<Shard>; SHARDS],
    /// The place of the next inode that is added.
    next: AtomicI64,
    /// The place of the last inode that was put before all others.
    first: AtomicI64,
    /// Inodes on the list.
    len: AtomicUsize,
}

impl Default for DirtyList {
    fn default() -> DirtyList {
        DirtyList {
            shards: std::array::from_fn(|_| Mutex::new(Rank::DirtyList, Shard::default())),
            next: AtomicI64::new(0),
            first: AtomicI64::new(0),
            len: AtomicUsize::new(0),
        }
    }
}

/// Says that an inode is being written back, until it is dropped.
pub(crate) struct Busy<'a> {
    list: &'a DirtyList,
    inode: Arc<Inode>,
    /// Since when it was on the list from which it was taken.
    since: Option<Since>,
}

impl Busy<'_> {
    /// The inode.
    pub(crate) fn inode(&self) -> &Arc<Inode> {
        &self.inode
    }

    /// Puts the inode on the list again, after the others, as old as it was.
    pub(crate) fn put_back(self) {
        self.list.add_since(self.since, &self.inode);
    }
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.list.end(&self.inode);
    }
}

impl Shard {
    fn set_busy(&mut self, inode: &Arc<Inode>) {
        self.busy.entry(inode.instance()).or_insert_with(|| (inode.clone(), 0)).1 += 1;
    }
}

impl DirtyList {
    fn shard(&self, inode: &Inode) -> MutexGuard<'_, Shard> {
        self.shards[inode.ino.0 as usize % SHARDS].lock()
    }

    /// Adds an inode unless it is there.
    pub(crate) fn add(&self, inode: &Arc<Inode>) {
        self.add_since(None, inode);
    }

    /// Puts an inode after the others unless it is there, as dirty since then or from now on.
    fn add_since(&self, since: Option<Since>, inode: &Arc<Inode>) {
        let mut shard = self.shard(inode);
        if let Entry::Vacant(vacant) = shard.members.entry(inode.instance()) {
            let place = self.next.fetch_add(1, Ordering::Relaxed);
            vacant.insert(place);
            let since = since.unwrap_or_else(|| Since::At(Instant::now()));
            shard.queue.insert(place, (since, inode.clone()));
            self.len.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Makes an inode that is on the list the next one, due at once; false if it is not on it.
    pub(crate) fn hasten(&self, inode: &Inode) -> bool {
        let mut shard = self.shard(inode);
        let Shard { queue, members, .. } = &mut *shard;
        let Some(place) = members.get_mut(&inode.instance()) else { return false };
        let Some((_, inode)) = queue.remove(place) else { return false };
        *place = self.first.fetch_sub(1, Ordering::Relaxed) - 1;
        queue.insert(*place, (Since::Ever, inode));
        true
    }

    /// Count of inodes on the list.
    pub(crate) fn len(&self) -> usize {
        self.len.load(Ordering::Relaxed)
    }

    /// Marks an inode as being written back.
    pub(crate) fn begin(&self, inode: &Arc<Inode>) -> Busy<'_> {
        self.begin_unguarded(inode);
        Busy { list: self, inode: inode.clone(), since: None }
    }

    /// As [`DirtyList::begin`], until [`DirtyList::end`].
    pub(crate) fn begin_unguarded(&self, inode: &Arc<Inode>) {
        self.shard(inode).set_busy(inode);
    }

    /// One thread less writes the inode back.
    pub(crate) fn end(&self, inode: &Inode) {
        let mut shard = self.shard(inode);
        let Some((_, count)) = shard.busy.get_mut(&inode.instance()) else { return };
        *count -= 1;
        if *count == 0 {
            shard.busy.remove(&inode.instance());
        }
    }

    /// Takes the oldest inode if it has been dirty for `age` at `now`. One that was added later is
    /// skipped, so that a pass over the list ends even if writes fail.
    pub(crate) fn pop_older_than(&self, now: Instant, age: Duration) -> Option<Busy<'_>> {
        let oldest = |shard: &Mutex<Shard>| Some(*shard.lock().queue.first_key_value()?.0);
        let places = self.shards.iter().filter_map(|shard| Some((oldest(shard)?, shard)));
        let (_, shard) = places.min_by_key(|(place, _)| *place)?;
        // Another thread may have taken it since; then the next one of the shard is as good.
        let mut shard = shard.lock();
        let (_, (since, _)) = shard.queue.first_key_value()?;
        let is_young =
            |since| now.checked_duration_since(since).is_none_or(|dirty_for| dirty_for < age);
        if matches!(since, Since::At(since) if is_young(*since)) {
            return None;
        }
        let (_, (since, inode)) = shard.queue.pop_first()?;
        shard.members.remove(&inode.instance());
        shard.set_busy(&inode);
        self.len.fetch_sub(1, Ordering::Relaxed);
        Some(Busy { list: self, inode, since: Some(since) })
    }

    /// Takes all inodes, with those that others are writing back: all that were there when it was called.
    pub(crate) fn take_all(&self) -> Vec<Busy<'_>> {
        let mut taken = Vec::new();
        for shard in &self.shards {
            let mut shard = shard.lock();
            let queue = std::mem::take(&mut shard.queue);
            shard.members.clear();
            self.len.fetch_sub(queue.len(), Ordering::Relaxed);
            let busy = shard.busy.values().map(|(inode, _)| (i64::MIN, inode.clone()));
            let mut found: Vec<_> = busy.collect();
            found.extend(queue.into_iter().map(|(place, (_, inode))| (place, inode)));
            found.iter().for_each(|(_, inode)| shard.set_busy(inode));
            taken.append(&mut found);
        }
        // Those that are busy first, then in the order of the list.
        taken.sort_by_key(|(place, _)| *place);
        taken.into_iter().map(|(_, inode)| Busy { list: self, inode, since: None }).collect()
    }

    /// Takes an inode off after its deletion.
    pub(crate) fn forget(&self, inode: &Inode) {
        let mut shard = self.shard(inode);
        if let Some(place) = shard.members.remove(&inode.instance())
            && shard.queue.remove(&place).is_some()
        {
            self.len.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file::write::{WriteOptions, write};
    use crate::inode::table;
    use crate::namei;
    use crate::testing::TestFs;

    const SIZE_BYTES: usize = 64_812;

    /// A file `old` with something to write.
    fn old_file(test: &TestFs) -> Arc<Inode> {
        let old = test.create("old");
        write(&test.fs, &old, 0, &[1; 100], WriteOptions::default()).unwrap();
        old
    }

    /// Deletes `old` and makes `new`, of the same number.
    fn replace(test: &TestFs, old: &Arc<Inode>) -> Arc<Inode> {
        let root = table::get(&test.fs, fjord_format::InodeNo::ROOT).unwrap();
        drop(namei::unlink(&test.fs, &root, b"old").unwrap());
        test.commit();
        let new = test.create("new");
        assert_eq!(new.ino, old.ino);
        new
    }

    fn fill(test: &TestFs, new: &Arc<Inode>) {
        write(&test.fs, new, 0, &[2; SIZE_BYTES], WriteOptions::default()).unwrap();
    }

    fn pop(test: &TestFs) -> Busy<'_> {
        test.fs.dirty_inodes.pop_older_than(Instant::now(), Duration::ZERO).unwrap()
    }

    /// Unmounts and demands that all of `new` is on the device.
    fn finish(test: TestFs) {
        test.fs.unmount().unwrap();
        let stat = test.debugfs("stat /new");
        assert!(stat.contains(&format!("Size: {SIZE_BYTES}\n")), "{stat}");
        test.finish();
    }

    /// Background writeback has taken a file off the list, and puts it back after its deletion.
    #[test]
    fn a_deleted_file_put_back_keeps_nobody_off_the_list() {
        let test = TestFs::new(&["-t", "ext4"], 16);
        let old = old_file(&test);
        let busy = pop(&test);
        assert!(Arc::ptr_eq(busy.inode(), &old));
        let new = replace(&test, &old);
        busy.put_back();
        fill(&test, &new);
        drop((old, new));
        finish(test);
    }

    /// A deletion commits before it has come to the list.
    #[test]
    fn a_late_deletion_takes_nobody_else_off_the_list() {
        let test = TestFs::new(&["-t", "ext4"], 16);
        let old = old_file(&test);
        let new = replace(&test, &old);
        fill(&test, &new);
        test.fs.dirty_inodes.forget(&old);
        drop((old, new));
        finish(test);
    }

    /// A thread that began before the deletion is still busy with the deleted file.
    #[test]
    fn a_sync_waits_for_a_busy_file_of_a_used_number() {
        let test = TestFs::new(&["-t", "ext4"], 16);
        let old = old_file(&test);
        let busy_old = pop(&test);
        let new = replace(&test, &old);
        fill(&test, &new);
        let busy_new = pop(&test);
        assert!(Arc::ptr_eq(busy_new.inode(), &new));
        let taken = test.fs.dirty_inodes.take_all();
        assert!(taken.iter().any(|busy| Arc::ptr_eq(busy.inode(), &new)));
        drop(taken);
        drop(busy_old);
        busy_new.put_back();
        drop((old, new));
        finish(test);
    }
}
