//! Newtypes for the numbers that ext4 counts with, so that they cannot be mixed up.
//!
//! Invariant: a newtype says what a number counts, not that it is in range; ranges are
//! checked by [`Geometry`](crate::geometry::Geometry) and by the decoders.

use std::fmt;

/// Number of a physical block of the file system (units: file-system blocks, also with bigalloc).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct BlockNo(pub u64);

/// Index of a block inside a file (units: file-system blocks).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct LogicalBlock(pub u32);

/// Inode number; the first inode of a file system is 1, and 0 means "none".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct InodeNo(pub u32);

/// Number of a block group, from 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct GroupNo(pub u32);

/// JBD2 transaction ID. It wraps, so it has no `Ord`: compare with [`Tid::newer_than`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Tid(pub u32);

impl BlockNo {
    /// The block `count` blocks further on, or `None` when the number overflows.
    pub fn checked_add(self, count: u64) -> Option<BlockNo> {
        self.0.checked_add(count).map(BlockNo)
    }
}

impl LogicalBlock {
    /// The last block index a file can have; `u32::MAX` itself is kept free as a mark.
    pub const LAST: LogicalBlock = LogicalBlock(u32::MAX - 1);

    /// The block `count` blocks further on, or `None` past the end of the 32-bit space.
    pub fn checked_add(self, count: u32) -> Option<LogicalBlock> {
        self.0.checked_add(count).map(LogicalBlock)
    }
}

impl InodeNo {
    /// The inode that lists bad blocks.
    pub const BAD_BLOCKS: InodeNo = InodeNo(1);
    /// The root directory.
    pub const ROOT: InodeNo = InodeNo(2);
    /// The user quota file, when the quota feature is on.
    pub const USER_QUOTA: InodeNo = InodeNo(3);
    /// The group quota file, when the quota feature is on.
    pub const GROUP_QUOTA: InodeNo = InodeNo(4);
    /// The boot loader's inode.
    pub const BOOT_LOADER: InodeNo = InodeNo(5);
    /// The undelete directory (never used by Linux).
    pub const UNDELETE_DIR: InodeNo = InodeNo(6);
    /// The file that owns the reserved group-descriptor blocks.
    pub const RESIZE: InodeNo = InodeNo(7);
    /// The journal's usual inode; the superblock names the real one.
    pub const JOURNAL: InodeNo = InodeNo(8);
    /// First inode that a revision-0 file system leaves for users.
    pub const GOOD_OLD_FIRST: InodeNo = InodeNo(11);
}

impl Tid {
    /// Whether this transaction came after `other`, counting round the 32-bit wrap.
    pub fn newer_than(self, other: Tid) -> bool {
        self.0 != other.0 && self.0.wrapping_sub(other.0) < 1 << 31
    }

    /// Whether this transaction is `other` or came after it.
    pub fn at_least(self, other: Tid) -> bool {
        self == other || self.newer_than(other)
    }

    /// The ID that follows this one.
    #[must_use]
    pub fn next(self) -> Tid {
        Tid(self.0.wrapping_add(1))
    }
}

macro_rules! display_as_number {
    ($($name:ident),*) => {$(
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    )*};
}
display_as_number!(BlockNo, LogicalBlock, InodeNo, GroupNo, Tid);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tid_order_survives_the_wrap() {
        assert!(Tid(1).newer_than(Tid(0)));
        assert!(!Tid(0).newer_than(Tid(1)));
        assert!(!Tid(7).newer_than(Tid(7)));
        assert!(Tid(3).newer_than(Tid(u32::MAX - 3)));
        assert_eq!(Tid(u32::MAX).next(), Tid(0));
        assert!(Tid(0).at_least(Tid(0)));
    }
}
