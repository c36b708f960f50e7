//! Allocation of blocks and inodes.
//!
//! Owns the block groups of a mounted file system: their descriptors and bitmaps (as metadata
//! blocks, on demand), the state in memory beyond them, and the counts of free blocks and inodes.
//!
//! A block goes through these states; "busy" is a set of bits in memory, per group:
//!
//! ```text
//!  free ── pick ──> bit clear, busy ── use_picked ──> bit set
//!   ^  <── unpick ──────┘                                │
//!   └── commit ── bit clear, busy <──── free_blocks ─────┘
//! ```
//!
//! Invariants:
//! - a block or inode number freed by a transaction stays busy until that transaction has
//!   committed; if the commit fails, until the unmount;
//! - bitmap, its checksum and the descriptor's counts change together, in one handle and
//!   under the group's lock;
//! - a run of blocks never crosses a group's border ([`Run`]s given to callers);
//! - each reservation ([`FsInner::reserve_blocks`]) finds its blocks;
//! - nothing here changes a bigalloc image, whose bitmaps count clusters.
//!
//! Accounting: delayed data has a reservation, which [`FsInner::use_picked`] consumes;
//! [`FsInner::alloc_blocks`] takes unreserved blocks. A claim that fails with `ENOSPC` can succeed
//! after a commit when [`FsInner::pending_free_blocks`] is not zero, and after writeback, because a
//! reservation includes the worst case of metadata.
//!
//! Locking: one mutex per group, after the handle's start and before any buffer; no thread takes
//! two of them at once. It is held over the read of the group's own bitmap. Counts are atomics.

mod account;
mod adopt;
mod bits;
mod blocks;
mod cells;
mod freed;
mod goal;
mod group;
mod grow;
mod inodes;
mod parts;
mod pick;
mod stats;
mod table;
#[cfg(test)]
mod tests;
mod trim;
mod window;
mod zones;

use fjord_format::BlockNo;

pub(crate) use account::Claim;
pub(crate) use goal::Goal;
pub(crate) use parts::GroupParts;
pub(crate) use table::Groups;

/// Metadata blocks that [`FsInner::use_picked`](crate::fs::FsInner::use_picked) dirties for
/// one run, and [`FsInner::free_blocks`](crate::fs::FsInner::free_blocks) for each group of
/// its range: bitmap and descriptor.
pub(crate) const RUN_CREDITS: u32 = 2;
/// Metadata blocks that allocating an inode dirties: both bitmaps, descriptor, table block.
pub(crate) const INODE_CREDITS: u32 = 4;

/// A run of blocks inside one group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Run {
    /// First block.
    pub(crate) start: BlockNo,
    /// Count of blocks.
    pub(crate) len: u32,
}
