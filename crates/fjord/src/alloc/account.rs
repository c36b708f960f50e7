//! Counts of free blocks, and claims on them.
//!
//! Owns the counts of the whole file system; each group owns its own. Invariants:
//!
//! - `unclaimed` = clear bits of the bitmaps − blocks that an uncommitted transaction freed
//!   − blocks of damaged groups − reserved blocks, and is never negative while every change uses
//!   this module: each reservation finds a block;
//! - a picked block is covered by a reservation.
//!
//! All fields are atomics without a lock; `unclaimed` alone decides, by compare-and-swap.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use fjord_format::features::{Features, Incompat};
use rustix::io::Errno;

use crate::error::Result;

/// Blocks reserved for metadata of data, as in Linux: 2 %, at most this.
const POOL_BLOCKS_MAX: u64 = 4096;

/// Limit of a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Claim {
    /// Excludes the blocks reserved for root and the pool for metadata.
    User,
    /// Includes the blocks reserved for root.
    Root,
    /// All unclaimed blocks: for extent and indirect blocks, for which the other claims leave the
    /// pool.
    Metadata,
}

/// Counts of free blocks and inodes; see the module.
#[derive(Debug)]
pub(crate) struct Account {
    unclaimed: AtomicI64,
    reserved: AtomicI64,
    pending: AtomicI64,
    free_blocks: AtomicI64,
    free_inodes: AtomicI64,
    /// Blocks for root only (`s_r_blocks_count`).
    root_blocks: AtomicU64,
    /// Blocks kept back for metadata.
    pool_blocks: AtomicU64,
    /// Metadata blocks that a reserved data block may need at worst, in sixteenths; fixed.
    metadata_sixteenths: AtomicI64,
}

impl Account {
    /// Starts with nothing free.
    pub(crate) fn new(blocks: u64, root_blocks: u64, features: &Features) -> Self {
        // An indirect block can serve a single data block, and so can each level above it.
        let extents = features.incompat.contains(Incompat::EXTENTS);
        Self {
            unclaimed: AtomicI64::new(0),
            reserved: AtomicI64::new(0),
            pending: AtomicI64::new(0),
            free_blocks: AtomicI64::new(0),
            free_inodes: AtomicI64::new(0),
            root_blocks: AtomicU64::new(root_blocks),
            pool_blocks: AtomicU64::new((blocks / 50).min(POOL_BLOCKS_MAX)),
            metadata_sixteenths: AtomicI64::new(if extents { 2 } else { 48 }),
        }
    }

    /// From now on every claim may use all blocks. Call it at mount.
    pub(crate) fn keep_nothing(&self) {
        self.root_blocks.store(0, Ordering::Relaxed);
        self.pool_blocks.store(0, Ordering::Relaxed);
        self.metadata_sixteenths.store(0, Ordering::Relaxed);
    }

    /// The file system has `blocks` from now on, `root_blocks` of them for root only. Where nothing
    /// is kept back, that stays so.
    pub(crate) fn grow(&self, blocks: u64, root_blocks: u64) {
        if self.metadata_sixteenths.load(Ordering::Relaxed) != 0 {
            self.root_blocks.store(root_blocks, Ordering::Relaxed);
            self.pool_blocks.store((blocks / 50).min(POOL_BLOCKS_MAX), Ordering::Relaxed);
        }
    }

    /// Counts in a group found at mount, or made since.
    pub(crate) fn add_group(&self, free_blocks: u32, free_inodes: u32) {
        self.free_blocks.fetch_add(i64::from(free_blocks), Ordering::Relaxed);
        self.unclaimed.fetch_add(i64::from(free_blocks), Ordering::Relaxed);
        self.free_inodes.fetch_add(i64::from(free_inodes), Ordering::Relaxed);
    }

    /// Blocks that a claim must leave.
    fn floor(&self, claim: Claim) -> i64 {
        let root = i64::try_from(self.root_blocks.load(Ordering::Relaxed)).unwrap_or(i64::MAX);
        let pool = i64::try_from(self.pool_blocks.load(Ordering::Relaxed)).unwrap_or(i64::MAX);
        // Worst case of the mapping metadata of reserved data.
        let outstanding = self.reserved.load(Ordering::Relaxed).max(0);
        let sixteenths = self.metadata_sixteenths.load(Ordering::Relaxed);
        let metadata = outstanding.saturating_mul(sixteenths) / 16;
        let kept = pool.saturating_add(metadata);
        match claim {
            Claim::User => root.saturating_add(kept),
            Claim::Root => kept,
            Claim::Metadata => 0,
        }
    }

    /// Reserves up to `want` unclaimed blocks, at least `min`.
    fn take(&self, min: u64, want: u64, floor: i64) -> Result<u64> {
        let to_i64 = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
        let mut current = self.unclaimed.load(Ordering::Relaxed);
        loop {
            let room = current.saturating_sub(floor);
            if room <= 0 || room < to_i64(min) {
                return Err(Errno::NOSPC.into());
            }
            let taken = room.min(to_i64(want));
            match self.unclaimed.compare_exchange_weak(
                current,
                current - taken,
                Ordering::AcqRel,
                Ordering::Relaxed,
            ) {
                Ok(_) => {
                    self.reserved.fetch_add(taken, Ordering::AcqRel);
                    return Ok(taken.unsigned_abs());
                }
                Err(now) => current = now,
            }
        }
    }

    /// Reserves `count` data blocks for delayed allocation, leaving space for the metadata that
    /// they and all other reserved blocks may need.
    ///
    /// # Errors
    /// `ENOSPC`.
    pub(crate) fn reserve(&self, count: u64, claim: Claim) -> Result<()> {
        self.take(count, count, self.floor(claim)).map(drop)
    }

    /// Reserves between 1 and `want` blocks that are about to be picked.
    ///
    /// # Errors
    /// `ENOSPC`.
    pub(crate) fn claim(&self, want: u64, claim: Claim) -> Result<u64> {
        self.take(1, want, self.floor(claim))
    }

    /// Releases a reservation.
    pub(crate) fn release(&self, count: u64) {
        let count = i64::try_from(count).unwrap_or(i64::MAX);
        self.reserved.fetch_sub(count, Ordering::AcqRel);
        self.unclaimed.fetch_add(count, Ordering::AcqRel);
    }

    /// `count` blocks went into use, of which `reserved` were reserved.
    pub(crate) fn used(&self, count: u32, reserved: u32) {
        self.free_blocks.fetch_sub(i64::from(count), Ordering::AcqRel);
        self.reserved.fetch_sub(i64::from(reserved), Ordering::AcqRel);
        let unreserved = i64::from(count) - i64::from(reserved);
        if unreserved != 0 {
            self.unclaimed.fetch_sub(unreserved, Ordering::AcqRel);
        }
    }

    /// `count` blocks were freed by a transaction that has not committed.
    pub(crate) fn freed(&self, count: u32) {
        self.free_blocks.fetch_add(i64::from(count), Ordering::AcqRel);
        self.pending.fetch_add(i64::from(count), Ordering::AcqRel);
    }

    /// `count` blocks that a transaction freed are in use after all, before it committed.
    pub(crate) fn unfreed(&self, count: u32) {
        self.free_blocks.fetch_sub(i64::from(count), Ordering::AcqRel);
        self.pending.fetch_sub(i64::from(count), Ordering::AcqRel);
    }

    /// The transaction that freed `count` blocks has committed.
    pub(crate) fn free_committed(&self, count: u64) {
        let count = i64::try_from(count).unwrap_or(i64::MAX);
        self.pending.fetch_sub(count, Ordering::AcqRel);
        self.unclaimed.fetch_add(count, Ordering::AcqRel);
    }

    /// A group is damaged: its `count` free blocks will not be used.
    pub(crate) fn lost(&self, count: u32) {
        self.unclaimed.fetch_sub(i64::from(count), Ordering::AcqRel);
    }

    /// One inode more or less is free.
    pub(crate) fn change_inodes(&self, change: i64) {
        self.free_inodes.fetch_add(change, Ordering::AcqRel);
    }

    /// Blocks freed by transactions that have not committed.
    pub(crate) fn pending_blocks(&self) -> u64 {
        positive(&self.pending)
    }

    /// Reserved blocks.
    pub(crate) fn reserved_blocks(&self) -> u64 {
        positive(&self.reserved)
    }

    /// Clear bits of all block bitmaps, that is the sum of the descriptors' counts.
    pub(crate) fn free_blocks(&self) -> u64 {
        positive(&self.free_blocks)
    }

    /// Free inodes, the sum of the descriptors' counts.
    pub(crate) fn free_inodes(&self) -> u64 {
        positive(&self.free_inodes)
    }

    /// Blocks that are free for all users.
    pub(crate) fn available_blocks(&self) -> u64 {
        let pool = self.pool_blocks.load(Ordering::Relaxed);
        let kept = self.root_blocks.load(Ordering::Relaxed).saturating_add(pool);
        self.free_blocks().saturating_sub(self.reserved_blocks()).saturating_sub(kept)
    }
}

fn positive(count: &AtomicI64) -> u64 {
    u64::try_from(count.load(Ordering::Acquire)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn account(free: u32) -> Account {
        let features = Features { incompat: Incompat::EXTENTS, ..Features::default() };
        let account = Account::new(1000, 50, &features);
        account.add_group(free, 0);
        account
    }

    #[test]
    fn each_kind_of_claim_leaves_what_is_not_its_own() {
        let account = account(100);
        assert!(account.claim(1000, Claim::User).is_ok_and(|n| n == 30));
        assert!(account.claim(1, Claim::User).is_err());
        // An eighth of what is reserved is kept for metadata.
        assert!(account.claim(1000, Claim::Root).is_ok_and(|n| n == 50 - 30 / 8));
        assert!(account.claim(1000, Claim::Metadata).is_ok_and(|n| n == 20 + 30 / 8));
        assert!(account.claim(1, Claim::Metadata).is_err());
        account.release(1);
        assert!(account.claim(1, Claim::Metadata).is_ok());
    }

    #[test]
    fn nothing_is_kept_where_all_may_be_used() {
        let account = account(100);
        account.keep_nothing();
        assert!(account.claim(1000, Claim::User).is_ok_and(|n| n == 100));
        assert!(account.claim(1, Claim::Metadata).is_err());
        assert_eq!(account.available_blocks(), 0);
    }

    #[test]
    fn freed_blocks_count_as_free_but_cannot_be_claimed_until_the_commit() {
        let account = account(0);
        account.freed(10);
        assert_eq!((account.free_blocks(), account.pending_blocks()), (10, 10));
        assert!(account.claim(1, Claim::Metadata).is_err());
        account.free_committed(10);
        assert!(account.claim(10, Claim::Metadata).is_ok_and(|n| n == 10));
        account.used(10, 10);
        assert_eq!((account.free_blocks(), account.reserved_blocks()), (0, 0));
    }
}
