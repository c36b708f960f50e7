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
use std::time::{Duration, Instant};

use fjord_block::lock::{Mutex, Rank};

use crate::inode::{Inode, Instance};

/// Since when an inode waits for its writeback.
#[derive(Clone, Copy, Debug)]
enum Since {
    At(Instant),
    /// It is due whatever its age.
    Ever,
}

#[derive(Default)]
struct Entries {
    /// By place; the oldest has the lowest.
    queue: BTreeMap<i64, (Since, Arc<Inode>)>,
    /// The place of each inode on the list.
    members: HashMap<Instance, i64>,
    /// The place of the next one.
    next: i64,
    /// How many were put before all others.
    hastened: i64,
    /// Inodes being written back, by how many threads.
    busy: HashMap<Instance, (Arc<Inode>, usize)>,
}

/// Inodes in the order in which they became dirty.
pub(crate) struct DirtyList {
    /// Leaf lock.
    entries: Mutex<Entries>,
}

impl Default for DirtyList {
    fn default() -> DirtyList {
        DirtyList { entries: Mutex::new(Rank::DirtyList, Entries::default()) }
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
        let mut entries = self.list.entries.lock();
        entries.add(self.since, &self.inode);
        // Before `self`, which takes the lock.
        drop(entries);
    }
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.list.end(&self.inode);
    }
}

impl Entries {
    /// Puts an inode after the others unless it is there, as dirty since then or from now on.
    fn add(&mut self, since: Option<Since>, inode: &Arc<Inode>) {
        if let Entry::Vacant(vacant) = self.members.entry(inode.instance()) {
            vacant.insert(self.next);
            let since = since.unwrap_or_else(|| Since::At(Instant::now()));
            self.queue.insert(self.next, (since, inode.clone()));
            self.next += 1;
        }
    }

    /// Puts an inode that is on the list before all others.
    fn hasten(&mut self, inode: &Inode) -> bool {
        let Some(place) = self.members.get_mut(&inode.instance()) else { return false };
        let Some((_, inode)) = self.queue.remove(place) else { return false };
        self.hastened += 1;
        *place = -self.hastened;
        self.queue.insert(*place, (Since::Ever, inode));
        true
    }

    fn set_busy(&mut self, inode: &Arc<Inode>) {
        self.busy.entry(inode.instance()).or_insert_with(|| (inode.clone(), 0)).1 += 1;
    }
}

impl DirtyList {
    /// Adds an inode unless it is there.
    pub(crate) fn add(&self, inode: &Arc<Inode>) {
        self.entries.lock().add(None, inode);
    }

    /// Makes an inode that is on the list the next one, due at once; false if it is not on it.
    pub(crate) fn hasten(&self, inode: &Inode) -> bool {
        self.entries.lock().hasten(inode)
    }

    /// Count of inodes on the list.
    pub(crate) fn len(&self) -> usize {
        self.entries.lock().queue.len()
    }

    /// Marks an inode as being written back.
    pub(crate) fn begin(&self, inode: &Arc<Inode>) -> Busy<'_> {
        self.begin_unguarded(inode);
        Busy { list: self, inode: inode.clone(), since: None }
    }

    /// As [`DirtyList::begin`], until [`DirtyList::end`].
    pub(crate) fn begin_unguarded(&self, inode: &Arc<Inode>) {
        self.entries.lock().set_busy(inode);
    }

    /// One thread less writes the inode back.
    pub(crate) fn end(&self, inode: &Inode) {
        let mut entries = self.entries.lock();
        let Some((_, count)) = entries.busy.get_mut(&inode.instance()) else { return };
        *count -= 1;
        if *count == 0 {
            entries.busy.remove(&inode.instance());
        }
    }

    /// Takes the oldest inode if it has been dirty for `age` at `now`. One that was added later is
    /// skipped, so that a pass over the list ends even if writes fail.
    pub(crate) fn pop_older_than(&self, now: Instant, age: Duration) -> Option<Busy<'_>> {
        let mut entries = self.entries.lock();
        let (_, (since, _)) = entries.queue.first_key_value()?;
        let is_young =
            |since| now.checked_duration_since(since).is_none_or(|dirty_for| dirty_for < age);
        if matches!(since, Since::At(since) if is_young(*since)) {
            return None;
        }
        let (_, (since, inode)) = entries.queue.pop_first()?;
        entries.members.remove(&inode.instance());
        entries.set_busy(&inode);
        Some(Busy { list: self, inode, since: Some(since) })
    }

    /// Takes all inodes, with those that others are writing back.
    pub(crate) fn take_all(&self) -> Vec<Busy<'_>> {
        let mut entries = self.entries.lock();
        let mut taken: Vec<Arc<Inode>> = entries.busy.values().map(|(i, _)| i.clone()).collect();
        entries.members.clear();
        taken.extend(std::mem::take(&mut entries.queue).into_values().map(|(_, inode)| inode));
        for inode in &taken {
            entries.set_busy(inode);
        }
        taken.into_iter().map(|inode| Busy { list: self, inode, since: None }).collect()
    }

    /// Takes an inode off after its deletion.
    pub(crate) fn forget(&self, inode: &Inode) {
        let mut entries = self.entries.lock();
        if let Some(place) = entries.members.remove(&inode.instance()) {
            entries.queue.remove(&place);
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
