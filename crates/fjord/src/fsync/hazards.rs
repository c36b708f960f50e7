//! Changes after which a fast commit needs more than its records: what replay by e2fsck would
//! undo, or mix up, by the rules of [`fjord_format::jbd2::fast_commit::compat`].
//!
//! Owns [`ReplayHazards`], which allocation, orphans and the superblock report to whatever the policy,
//! and which the policy `fast-commit` asks.

use std::collections::HashSet;

use fjord_block::lock::{Mutex, Rank};
use fjord_format::jbd2::fast_commit::compat;
use fjord_format::{BlockNo, Tid};

use crate::inode::TidCell;

/// Hazards of one mount.
#[derive(Debug)]
pub(crate) struct ReplayHazards {
    /// The newest transaction whose changes e2fsck would write back as they were.
    unsafe_tid: TidCell,
    /// Inode-table blocks that were zeroed in memory although they had nonzero bytes on disk after
    /// the fields of their inodes.
    stale_tails: Mutex<HashSet<BlockNo>>,
}

impl Default for ReplayHazards {
    fn default() -> ReplayHazards {
        ReplayHazards {
            unsafe_tid: TidCell::default(),
            stale_tails: Mutex::new(Rank::StaleTails, HashSet::new()),
        }
    }
}

impl ReplayHazards {
    /// `tid` changed what e2fsck reads before it replays the log, and writes back after the replay of
    /// fast commits: the superblock, the count of a group's directories, which bitmaps a group has,
    /// or the record of a file that is being truncated. The change must be checkpointed first.
    pub(crate) fn read_ahead_changed(&self, tid: Tid) {
        self.unsafe_tid.set(tid);
    }

    /// The newest such transaction since [`ReplayHazards::are_home`].
    pub(crate) fn newest_unsafe(&self) -> Option<Tid> {
        self.unsafe_tid.get()
    }

    /// The log was checkpointed after `tid` had committed.
    pub(crate) fn are_home(&self, tid: Tid) {
        self.unsafe_tid.clear(tid);
    }

    /// Looks at the contents on disk of an inode-table block that is zeroed in memory.
    pub(crate) fn table_block_zeroed(&self, block: BlockNo, on_disk: &[u8], inode_size: u16) {
        if on_disk.chunks(usize::from(inode_size)).any(compat::has_tail) {
            self.stale_tails.lock().insert(block);
        }
    }

    /// Whether a block of the inode table was zeroed in memory although it was not empty on disk.
    pub(crate) fn has_stale_tails(&self, block: BlockNo) -> bool {
        self.stale_tails.lock().contains(&block)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_newer_change_is_not_home_with_an_older_one() {
        let hazards = ReplayHazards::default();
        assert_eq!(hazards.newest_unsafe(), None);
        hazards.read_ahead_changed(Tid(5));
        hazards.read_ahead_changed(Tid(6));
        hazards.are_home(Tid(5));
        assert_eq!(hazards.newest_unsafe(), Some(Tid(6)));
        hazards.are_home(Tid(6));
        assert_eq!(hazards.newest_unsafe(), None);
    }

    #[test]
    fn one_inode_with_a_tail_makes_its_block_stale() {
        let hazards = ReplayHazards::default();
        let mut block = vec![0; 1024];
        block[256..256 + 160].fill(1);
        hazards.table_block_zeroed(BlockNo(7), &block, 256);
        assert!(!hazards.has_stale_tails(BlockNo(7)), "fields only");
        block[1023] = 1;
        hazards.table_block_zeroed(BlockNo(7), &block, 256);
        assert!(hazards.has_stale_tails(BlockNo(7)) && !hazards.has_stale_tails(BlockNo(8)));
    }
}
