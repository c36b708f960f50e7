//! Allocation goals for new blocks.
//!
//! Owns the rules of locality: a file continues after its last block and begins in the group of its
//! inode (with flex groups, data is separate from directories); metadata is near the data that it
//! maps. Invariant: a goal is only a hint; any block may be allocated instead.

use std::sync::atomic::Ordering;

use fjord_format::types::{BlockNo, GroupNo, InodeNo};

use super::Claim;
use crate::error::Result;
use crate::fs::FsInner;
use crate::inode::{Inode, InodeState};
use crate::map;

/// From this many groups on, a flex group keeps its first group for directories, as Linux.
const FLEX_GROUPS_WITH_DIR_GROUP: u32 = 4;

/// A hint for the location of new blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Goal {
    /// The group to begin with.
    pub(super) group: GroupNo,
    /// The block to begin at.
    pub(super) block: Option<BlockNo>,
    /// The block directly follows the file's previous block, so even a single block there is better
    /// than many elsewhere.
    pub(super) extends: bool,
    /// The block is the file's first or follows the previous one, and the file is open: it may
    /// continue to grow.
    pub(super) grows: bool,
    /// Block numbers must fit 32 bits (block maps).
    pub(super) only_32bit: bool,
    /// The claim for unreserved blocks.
    pub(super) claim: Claim,
}

impl Goal {
    /// For block `lblk` of a file: after the preceding blocks, else near the inode.
    ///
    /// # Errors
    /// I/O errors and corruption met in the file's map.
    pub(crate) fn for_file(
        fs: &FsInner,
        inode: &Inode,
        state: &InodeState,
        lblk: u32,
    ) -> Result<Goal> {
        let only_32bit = !map::has_extents(state);
        let is_open = inode.refs.load(Ordering::Relaxed) > 0;
        Ok(match map::neighbour(fs, inode, state, lblk)? {
            Some((block, true)) => Goal::behind(fs, inode, state, block),
            Some((block, false)) => Goal { only_32bit, ..Goal::near(fs, block) },
            None => {
                let grows = lblk == 0 && is_open;
                Goal { grows, only_32bit, ..Goal::for_inode(fs, inode.ino, state.is_file()) }
            }
        })
    }

    /// For a block of a file that continues at `block`.
    pub(crate) fn behind(fs: &FsInner, inode: &Inode, state: &InodeState, block: BlockNo) -> Goal {
        let only_32bit = !map::has_extents(state);
        let grows = inode.refs.load(Ordering::Relaxed) > 0;
        Goal { extends: true, grows, only_32bit, ..Goal::near(fs, block) }
    }

    /// For the first block of an inode.
    pub(crate) fn for_inode(fs: &FsInner, ino: InodeNo, is_file: bool) -> Goal {
        let geo = &fs.geo;
        let mut group = geo.group_of_inode(ino).unwrap_or_default();
        if geo.groups_per_flex >= FLEX_GROUPS_WITH_DIR_GROUP {
            group = geo.flex_first_group(group);
            if is_file && group.0 + 1 < geo.group_count {
                group.0 += 1;
            }
        }
        Goal {
            group,
            block: None,
            extends: false,
            grows: false,
            only_32bit: false,
            claim: Claim::User,
        }
    }

    /// Near a block, of the tree that a new node belongs to for example.
    pub(crate) fn near(fs: &FsInner, block: BlockNo) -> Goal {
        // The last block of the device has no successor; begin at the first group then.
        let group = fs.geo.group_of_block(block);
        Goal {
            group: group.unwrap_or_default(),
            block: group.map(|_| block),
            extends: false,
            grows: false,
            only_32bit: false,
            claim: Claim::User,
        }
    }

    /// The same with another claim on blocks that nobody has reserved.
    #[must_use]
    pub(crate) fn with_claim(self, claim: Claim) -> Goal {
        Goal { claim, ..self }
    }

    /// The same for a user of 32-bit block numbers.
    #[must_use]
    pub(crate) fn with_32bit_blocks(self) -> Goal {
        Goal { only_32bit: true, ..self }
    }
}
