//! How many metadata blocks a change of a map can dirty.
//!
//! Owns the estimates that callers start their handles with. Invariant: an estimate is
//! never too low, for a handle that runs out of credits in the middle of a change stops
//! the file system; the inode itself is not counted.

use fjord_format::blockmap;
use fjord_format::extent::{self, EXTENT_DEPTH_MAX, NodeKind};
use fjord_format::features::Incompat;

use crate::alloc::RUN_CREDITS;
use crate::fs::FsInner;

/// Runs of blocks in one group each that one call of [`super::remove`] frees at most.
pub(super) const REMOVE_RUNS: u32 = 32;
/// Blocks of journaled files that one call frees at most: each may need a revoke record.
pub(super) const REMOVE_JOURNALED_BLOCKS: u32 = 512;
/// Blocks that the revoke records of one call fill at most, with blocks of 1 KiB.
const REVOKE_BLOCKS: u32 = 8;
/// A new node: itself, bitmap, descriptor.
const NODE: u32 = 1 + RUN_CREDITS;
/// Runs that one handle inserts at most.
const RUNS_MAX: u32 = 16;
/// Levels of a block map below the inode.
const INDIRECT_LEVELS: u32 = 3;

/// Levels below the root that a map can have on this image.
fn levels_max(fs: &FsInner) -> u32 {
    if !fs.geo.features.incompat.contains(Incompat::EXTENTS) {
        return INDIRECT_LEVELS;
    }
    // Nodes are at least half full but for the last one of each level, and no file has
    // more extents than the image has blocks.
    let half = u64::from(extent::capacity(NodeKind::Block, &fs.geo) / 2).max(2);
    let mut reach = u64::from(extent::capacity(NodeKind::Root, &fs.geo) / 2);
    let mut levels = 1;
    while reach < fs.geo.block_count && levels < u32::from(EXTENT_DEPTH_MAX) {
        reach = reach.saturating_mul(half);
        levels += 1;
    }
    // Files made before the image had extents keep their block maps.
    levels.max(INDIRECT_LEVELS)
}

/// Credits for putting `runs` picked runs into use and mapping them, or for changing the
/// state of so many runs.
pub(crate) fn credits_insert(fs: &FsInner, runs: u32) -> u32 {
    let levels = levels_max(fs);
    // Each run: bitmap, descriptor, its own leaf, which may be split. Together: the nodes
    // above, which may be split, and a new root.
    let mut per_run = RUN_CREDITS + 1 + NODE;
    if !fs.geo.features.incompat.contains(Incompat::EXTENTS) {
        // A run of a block map has a pointer per block, and may be a whole group, so it can fill
        // several nodes, one of them in part, which come from one group or two.
        let pointers = blockmap::pointers_per_block(&fs.geo);
        per_run += fs.geo.blocks_per_group.div_ceil(pointers) + 1 + RUN_CREDITS;
    }
    runs.saturating_mul(per_run).saturating_add(levels * (1 + NODE) + NODE)
}

/// Runs that one handle can insert without taking too much of a small journal.
pub(crate) fn runs_per_handle(fs: &FsInner) -> u32 {
    let most = fs.journal().credits_max() / 2;
    (1..=RUNS_MAX).rev().find(|&runs| credits_insert(fs, runs) <= most).unwrap_or(1)
}

/// Credits for one call of [`super::remove`].
pub(crate) fn credits_remove(fs: &FsInner) -> u32 {
    let levels = levels_max(fs);
    // Runs (two blocks each, which includes freed nodes), the nodes left above, and one
    // split of a leaf for a hole in the middle.
    REMOVE_RUNS * RUN_CREDITS + REVOKE_BLOCKS + levels * (2 + NODE) + NODE
}
