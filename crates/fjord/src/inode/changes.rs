//! Uncommitted changes of an inode, for the fine-grained policies.
//!
//! Owns [`Changes`], a part of each inode's state, recorded on changes of names, maps and
//! attributes, and read by fsync. It always includes *all* uncommitted changes: an entry is pruned
//! only after its transaction has committed. A change that involves other files (a rename, a hard
//! link, a shared block) is recorded as a reason for a full commit ([`Changes::needs_commit`]),
//! valid until its transaction has committed.
//!
//! Guarded by the inode's state lock, like the rest of [`crate::inode::InodeState`].
//!
//! iJournaling calls two of these the uncommitted-DE and the uncommitted-HL flag (section 4.2
//! of the paper); the changed range is what ext4's fast commit tracks for each inode.

use std::collections::HashMap;
use std::ops::Range;

use fjord_format::{BlockNo, InodeNo, Tid};

/// Most removed names per directory; with more, each name counts as removed.
const REMOVED_NAMES_MAX: usize = 512;
/// Most extent blocks that are tracked for one inode.
const EXTENT_BLOCKS_MAX: usize = 4096;

/// Why the changes of one inode cannot be told apart from those of others, or are not known: an fsync
/// of it needs a full commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CommitReason {
    /// A hard link was added or removed.
    HardLink,
    /// It was renamed.
    Rename,
    /// Its extended attributes outside the inode changed.
    Attributes,
    /// A part of it was collapsed or inserted.
    ShiftedRange,
    /// It had a map, and has its data inline now.
    Entangled,
    /// More blocks of its extent tree changed than are tracked.
    TooLarge,
    /// It was evicted with uncommitted changes, and read again.
    Forgotten,
}

/// The uncommitted changes of one inode.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    /// The transaction that created the inode.
    born: Option<Tid>,
    /// The name that the inode was made with.
    entry: Option<Entry>,
    /// Why an fsync of it needs a full commit, and until which transaction.
    needs_commit: Option<(Tid, CommitReason)>,
    /// Extent blocks changed, with the newest transaction that did.
    extent_blocks: HashMap<BlockNo, Tid>,
    /// File blocks whose mapping changed: a range that holds them all.
    mapping: Option<(Tid, Range<u32>)>,
    /// Names removed from this directory.
    removed: HashMap<Box<[u8]>, Removed>,
    /// More names were removed than are recorded.
    removed_more: Option<Tid>,
    /// The inode was evicted with changes of transactions up to this one.
    forgotten: Option<Tid>,
    /// Entries were removed from this directory, or blocks added.
    reshaped: Option<Reshaped>,
    /// In-inode attributes changed, or their area on disk is of an older inode.
    attributes: Option<Tid>,
    /// State of the inode in the policy's log.
    logged: Option<Logged>,
    /// The log has the entry.
    entry_logged: bool,
}

/// State of an inode in the policy's log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Logged {
    /// The transaction that the log preceded.
    pub(crate) tid: Tid,
    /// Size on disk.
    pub(crate) size: u64,
    /// The bytes of the inode.
    pub(crate) image: Box<[u8]>,
}

/// The name that an inode was made with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    /// The transaction that wrote the directory entry.
    pub(crate) tid: Tid,
    /// The directory.
    pub(crate) parent: InodeNo,
    /// The name in it.
    pub(crate) name: Box<[u8]>,
    /// The previous owner of the name, which lost it in a transaction that may be uncommitted.
    pub(crate) replaced: Option<Removed>,
    /// The entry fitted in the directory as of the start of the transaction.
    pub(crate) fits: bool,
}

/// A removed name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Removed {
    /// The transaction that did it.
    pub(crate) tid: Tid,
    /// The inode that had the name last.
    pub(crate) ino: InodeNo,
    /// Its fate.
    pub(crate) fate: Fate,
    /// Content of the name after a crash.
    pub(crate) shown: Shown,
}

/// Content of a removed name after a crash, according to the earlier transactions and the policy's
/// log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shown {
    /// Nothing.
    Nothing,
    /// This file, which has no other name, and only extents besides its inode.
    File(InodeNo),
    /// Something else.
    Other,
}

/// A directory whose blocks changed in the transaction.
#[derive(Clone, Copy, Debug)]
struct Reshaped {
    tid: Tid,
    /// Bytes in a row that a new entry finds in the blocks of before, with all of the transaction's
    /// in them and with those that left; less than none when one found no room.
    room_bytes: i64,
}

/// Fate of an inode that lost a name; ordered by the cost of reusing the name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Fate {
    /// It was a file, and this was its last name, and the only one that the last commit has:
    /// whoever has the name next replaces it.
    Gone,
    /// It was an empty directory.
    GoneDir,
    /// It lives on under another name, or does so in the last commit: replacing it without that
    /// name would lose it, or show it with that one alone.
    Moved,
}

impl Changes {
    /// The inode was created by `tid`, without a name so far.
    pub(crate) fn born(&mut self, tid: Tid) {
        self.born = Some(tid);
    }

    /// A new inode got its name. `replaced` and `fits` are what its directory says about the name
    /// ([`Changes::removed`]) and about its own shape ([`Changes::has_shape_of_before`]).
    pub(crate) fn named(
        &mut self,
        tid: Tid,
        parent: InodeNo,
        name: &[u8],
        replaced: Option<Removed>,
        fits: bool,
    ) {
        self.entry = Some(Entry { tid, parent, name: name.into(), replaced, fits });
        self.entry_logged = false;
    }

    /// Room is made in this directory, by an entry that leaves or a block that comes: until then
    /// a new entry had `room_bytes` in a row, or less than none if one did not fit.
    pub(crate) fn reshaped(&mut self, tid: Tid, room_bytes: i64) {
        let before = self.reshaped.filter(|reshaped| reshaped.tid == tid);
        let room_bytes = before.map_or(room_bytes, |before| before.room_bytes.min(room_bytes));
        self.reshaped = Some(Reshaped { tid, room_bytes });
    }

    /// An entry was added to this directory. In the worst case it took space in the fullest block.
    pub(crate) fn entry_added(&mut self, tid: Tid, bytes: usize) {
        if let Some(reshaped) = self.reshaped.as_mut().filter(|reshaped| reshaped.tid == tid) {
            reshaped.room_bytes -= i64::try_from(bytes).unwrap_or(i64::MAX);
        }
    }

    /// Whether all entries that `tid` added fit in the directory as it was before.
    pub(crate) fn has_shape_of_before(&self, tid: Tid) -> bool {
        self.reshaped.is_none_or(|reshaped| reshaped.tid != tid || reshaped.room_bytes >= 0)
    }

    /// The in-inode attributes changed.
    pub(crate) fn attributes_changed(&mut self, tid: Tid) {
        self.attributes = Some(tid);
    }

    /// Whether they have uncommitted changes.
    pub(crate) fn has_attribute_changes(&self, committed: impl Fn(Tid) -> bool) -> bool {
        self.attributes.is_some_and(|tid| !committed(tid))
    }

    /// State of the inode in the policy's log, while that is valid.
    pub(crate) fn logged(&self, committed: impl Fn(Tid) -> bool) -> Option<&Logged> {
        self.logged.as_ref().filter(|logged| !committed(logged.tid))
    }

    /// Whether the policy's log has the name that the inode was created with.
    pub(crate) fn is_entry_logged(&self) -> bool {
        self.entry_logged
    }

    /// The policy's log now has all of the inode: name, changed range and bytes.
    pub(crate) fn set_logged(&mut self, logged: Logged) {
        self.logged = Some(logged);
        self.entry_logged = self.entry.is_some();
        self.mapping_logged();
    }

    /// The inode needs a full commit until `tid` has committed. The first reason of a transaction
    /// stays.
    pub(crate) fn require_commit(&mut self, tid: Tid, why: CommitReason) {
        if self.needs_commit.is_none_or(|(old, _)| old != tid) {
            self.needs_commit = Some((tid, why));
        }
    }

    /// The inode was read again; its uncommitted changes in transactions up to `tid` are unknown.
    pub(crate) fn forgotten(&mut self, tid: Tid) {
        self.forgotten = Some(tid);
    }

    /// A block of the extent tree was changed or made.
    pub(crate) fn extent_block_changed(&mut self, tid: Tid, block: BlockNo) {
        if self.extent_blocks.len() >= EXTENT_BLOCKS_MAX {
            self.require_commit(tid, CommitReason::TooLarge);
        } else {
            self.extent_blocks.insert(block, tid);
        }
    }

    /// A block of the extent tree was freed.
    pub(crate) fn extent_block_freed(&mut self, block: BlockNo) {
        self.extent_blocks.remove(&block);
    }

    /// The blocks that back `range` of the file changed: mapped, unmapped, written first.
    pub(crate) fn mapping_changed(&mut self, tid: Tid, range: Range<u32>) {
        self.mapping = Some(match self.mapping.take() {
            Some((_, old)) => (tid, old.start.min(range.start)..old.end.max(range.end)),
            None => (tid, range),
        });
    }

    /// A name was removed from this directory. If several inodes had the name in turn, the worst
    /// fate counts, because the last commit may have any of them.
    pub(crate) fn name_removed(&mut self, name: &[u8], removed: Removed) {
        if let Some(old) = self.removed.get_mut(name) {
            *old = Removed { fate: old.fate.max(removed.fate), ..removed };
        } else if self.removed.len() < REMOVED_NAMES_MAX {
            self.removed.insert(name.into(), removed);
        } else {
            self.removed_more = Some(removed.tid);
        }
    }

    /// The previous owners of `name` in this directory that lost it, as far as recorded.
    pub(crate) fn removed(&self, name: &[u8]) -> Option<Removed> {
        let known = self.removed.get(name).copied();
        let unknown = self.removed_more.or(self.forgotten);
        let (fate, shown) = (Fate::Moved, Shown::Other);
        let moved = |tid| Removed { tid, ino: InodeNo(0), fate, shown };
        known.or_else(|| unknown.map(moved))
    }

    /// What a crash shows under the name of a file that transaction `tid` takes away, its last
    /// one, as far as names go. What transactions before `tid` did counts as committed, for
    /// nothing is logged ahead of that.
    pub(crate) fn shown_by_name(&self, tid: Tid, ino: InodeNo) -> Shown {
        let is_known =
            self.needs_commit.is_none_or(|(other, _)| other != tid) && self.forgotten != Some(tid);
        let is_logged =
            self.entry_logged && self.logged.as_ref().is_some_and(|logged| logged.tid == tid);
        if !is_known {
            return Shown::Other;
        }
        if self.born != Some(tid) || is_logged {
            return Shown::File(ino);
        }
        // What had the name before this one, which no crash shows.
        let before = self.entry.as_ref().and_then(|entry| entry.replaced);
        before.filter(|before| before.tid == tid).map_or(Shown::Nothing, |before| before.shown)
    }

    /// The transaction that made the inode, unless it has committed.
    pub(crate) fn uncommitted_birth(&self, committed: impl Fn(Tid) -> bool) -> Option<Tid> {
        self.born.filter(|&tid| !committed(tid))
    }

    /// The name that the inode was made with, unless that has committed (uncommitted-DE flag).
    pub(crate) fn uncommitted_entry(&self, committed: impl Fn(Tid) -> bool) -> Option<&Entry> {
        self.entry.as_ref().filter(|entry| !committed(entry.tid))
    }

    /// Why the inode needs a full commit, if it does.
    pub(crate) fn needs_commit(&self, committed: impl Fn(Tid) -> bool) -> Option<CommitReason> {
        let known = self.needs_commit.filter(|&(tid, _)| !committed(tid)).map(|(_, why)| why);
        known.or_else(|| self.is_forgotten(committed).then_some(CommitReason::Forgotten))
    }

    /// Whether the inode may have uncommitted changes that are not listed here, so that even
    /// the absence of an uncommitted name says nothing.
    pub(crate) fn is_forgotten(&self, committed: impl Fn(Tid) -> bool) -> bool {
        self.forgotten.is_some_and(|tid| !committed(tid))
    }

    /// The range of file blocks whose mapping no commit covers.
    pub(crate) fn uncommitted_mapping(
        &self,
        committed: impl Fn(Tid) -> bool,
    ) -> Option<Range<u32>> {
        self.mapping.as_ref().filter(|(tid, _)| !committed(*tid)).map(|(_, range)| range.clone())
    }

    /// Clears the changed range, because the policy's log has it now.
    pub(crate) fn mapping_logged(&mut self) {
        self.mapping = None;
    }

    /// The extent blocks that no commit covers, in order.
    pub(crate) fn uncommitted_extent_blocks(
        &mut self,
        committed: impl Fn(Tid) -> bool,
    ) -> Vec<BlockNo> {
        self.extent_blocks.retain(|_, tid| !committed(*tid));
        let mut blocks: Vec<BlockNo> = self.extent_blocks.keys().copied().collect();
        blocks.sort_unstable();
        blocks
    }

    /// Drops committed entries; for directories with many changes of names.
    pub(crate) fn prune(&mut self, committed: impl Fn(Tid) -> bool) {
        self.born = self.born.filter(|&tid| !committed(tid));
        self.entry.take_if(|entry| committed(entry.tid));
        self.needs_commit = self.needs_commit.filter(|&(tid, _)| !committed(tid));
        self.extent_blocks.retain(|_, tid| !committed(*tid));
        self.mapping.take_if(|(tid, _)| committed(*tid));
        self.removed.retain(|_, removed| !committed(removed.tid));
        self.removed_more = self.removed_more.filter(|&tid| !committed(tid));
        self.forgotten = self.forgotten.filter(|&tid| !committed(tid));
    }

    /// Whether so many names are recorded that [`Changes::prune`] is due.
    pub(crate) fn is_large(&self) -> bool {
        self.removed.len() >= REMOVED_NAMES_MAX / 2 || self.extent_blocks.len() >= 64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: fn(Tid) -> bool = |_| false;

    fn removed(tid: u32, ino: u32, fate: Fate) -> Removed {
        Removed { tid: Tid(tid), ino: InodeNo(ino), fate, shown: Shown::Other }
    }

    #[test]
    fn the_worst_fate_of_a_name_stays() {
        let mut dir = Changes::default();
        dir.name_removed(b"a", removed(5, 12, Fate::Moved));
        dir.name_removed(b"a", removed(5, 13, Fate::Gone));
        assert_eq!(dir.removed(b"a"), Some(removed(5, 13, Fate::Moved)));
        assert_eq!(dir.removed(b"b"), None);
    }

    #[test]
    fn a_crash_shows_what_was_committed_or_logged() {
        let mut old = Changes::default();
        old.born(Tid(4));
        assert_eq!(old.shown_by_name(Tid(5), InodeNo(12)), Shown::File(InodeNo(12)));
        let replaced = Removed { shown: Shown::File(InodeNo(12)), ..removed(5, 12, Fate::Gone) };
        let mut new = Changes::default();
        new.born(Tid(5));
        new.named(Tid(5), InodeNo(2), b"f", Some(replaced), true);
        assert_eq!(new.shown_by_name(Tid(5), InodeNo(13)), Shown::File(InodeNo(12)));
        new.set_logged(Logged { tid: Tid(5), size: 0, image: Box::default() });
        assert_eq!(new.shown_by_name(Tid(5), InodeNo(13)), Shown::File(InodeNo(13)));
        new.require_commit(Tid(5), CommitReason::HardLink);
        assert_eq!(new.shown_by_name(Tid(5), InodeNo(13)), Shown::Other);
        assert_eq!(new.shown_by_name(Tid(6), InodeNo(13)), Shown::File(InodeNo(13)));
    }

    #[test]
    fn entries_take_the_room_that_was_there_before() {
        let mut dir = Changes::default();
        dir.entry_added(Tid(5), 1000);
        assert!(dir.has_shape_of_before(Tid(5)), "it found room without any change");
        dir.reshaped(Tid(5), 40);
        dir.entry_added(Tid(5), 24);
        dir.reshaped(Tid(5), 100);
        assert!(dir.has_shape_of_before(Tid(5)));
        dir.entry_added(Tid(5), 24);
        assert!(!dir.has_shape_of_before(Tid(5)));
        assert!(dir.has_shape_of_before(Tid(6)));
    }

    #[test]
    fn names_beyond_the_bound_count_as_moved() {
        let mut dir = Changes::default();
        for name in 0..=REMOVED_NAMES_MAX {
            dir.name_removed(name.to_string().as_bytes(), removed(5, 12, Fate::Gone));
        }
        assert_eq!(dir.removed(b"other").map(|removed| removed.fate), Some(Fate::Moved));
        dir.prune(|tid| tid == Tid(5));
        assert_eq!(dir.removed(b"other"), None);
    }

    #[test]
    fn what_has_committed_is_not_named_any_more() {
        let mut file = Changes::default();
        file.born(Tid(7));
        file.named(Tid(7), InodeNo(2), b"f", None, true);
        file.mapping_changed(Tid(7), 0..4);
        file.mapping_changed(Tid(8), 10..12);
        file.extent_block_changed(Tid(7), BlockNo(99));
        file.require_commit(Tid(7), CommitReason::HardLink);
        assert!(file.uncommitted_entry(NONE).is_some());
        assert_eq!(file.uncommitted_mapping(NONE), Some(0..12));
        let seven = |tid: Tid| tid == Tid(7);
        assert_eq!(file.uncommitted_entry(seven), None);
        assert_eq!(file.uncommitted_birth(seven), None);
        assert_eq!(file.needs_commit(seven), None);
        assert_eq!(file.uncommitted_mapping(seven), Some(0..12));
        assert!(file.uncommitted_extent_blocks(seven).is_empty());
    }
}
