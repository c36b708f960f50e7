//! Free space, for statfs and for the superblock.
//!
//! Owns no state. Invariant: the totals are sums of the descriptors' counts, as Linux
//! writes them into the superblock; blocks reserved for delayed data are in use for
//! `statfs`, but free on disk.

use std::sync::atomic::Ordering;

use super::Groups;
use crate::attr::StatFs;
use crate::fs::FsInner;

/// Longest name in bytes.
const NAME_MAX: u32 = 255;

impl Groups {
    /// Free blocks for `s_free_blocks_count`, in blocks.
    pub(crate) fn free_blocks_total(&self) -> u64 {
        self.account.free_blocks()
    }

    /// Blocks of superblocks, descriptors, bitmaps and inode tables.
    pub(crate) fn fixed_blocks(&self) -> u64 {
        self.fixed_blocks.load(Ordering::Relaxed)
    }

    /// Free inodes for `s_free_inodes_count`.
    pub(crate) fn free_inodes_total(&self) -> u32 {
        u32::try_from(self.account.free_inodes()).unwrap_or(u32::MAX)
    }
}

impl FsInner {
    /// Figures of `statfs(2)`, as ext4 gives them.
    pub(crate) fn statfs(&self) -> StatFs {
        let groups = &self.groups;
        let account = &groups.account;
        let ratio = u64::from(self.geo.cluster_ratio);
        let fixed = groups.fixed_blocks().saturating_add(groups.zones.journal_blocks());
        let overhead = if self.options.minix_df { 0 } else { fixed };
        let free = account.free_blocks().saturating_sub(account.reserved_blocks());
        // Linux folds the UUID in the same way.
        let half =
            |bytes: &[u8]| bytes.iter().rev().fold(0u64, |id, byte| id << 8 | u64::from(*byte));
        let (low, high) = self.geo.uuid.split_at(8);
        StatFs {
            block_size: self.geo.block_size,
            blocks: self.geo.block_count.saturating_sub(overhead),
            blocks_free: free.saturating_mul(ratio),
            blocks_available: account.available_blocks().saturating_mul(ratio),
            files: u64::from(self.geo.inode_count),
            files_free: account.free_inodes(),
            name_max: NAME_MAX,
            fsid: half(low) ^ half(high),
        }
    }
}
