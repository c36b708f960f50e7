//! Parts: the units of a partial commit.
//!
//! A file system whose parts seldom change together (block groups) tells the journal once which
//! part each block belongs to ([`Parts`]). The journal records the parts that each handle touched,
//! and [`Journal::commit_parts`](crate::Journal::commit_parts) commits some parts as a separate
//! transaction (per-block-group journaling, Kang and Shin).
//!
//! Invariants: the parts that one handle touched stay together until they have committed, so that
//! no handle is torn; and so do, transitively, all parts that share a handle, because a block has
//! one version for all of its handles. A block that parts share entry by entry (a buffer made by
//! [`Buffer::new_keeping_base`](crate::Buffer::new_keeping_base)) does not connect parts: the log
//! gets its last committed version, with the entries of the parts that commit.

use std::sync::Arc;

use fjord_format::types::BlockNo;

use crate::error::Result;
use crate::journal::{Journal, PartRules};
use crate::part_set::{Part, PartSet};

/// Definition of the parts of a file system.
pub trait Parts: Send + Sync {
    /// The part of a block; always the same for the same block. Not called for blocks whose buffer
    /// keeps its base.
    fn part_of(&self, block: BlockNo) -> Part;

    /// For a block that parts share: copies the entries of the parts in `chosen` from
    /// `current` to `version`, which comes in as the block's last committed contents. Both
    /// have the length of a block.
    fn copy_entries(&self, block: BlockNo, current: &[u8], version: &mut [u8], chosen: &PartSet);

    /// Whether a partial commit is possible now; if not, [`LastChanges`](crate::LastChanges) are to be
    /// added first, which only a full commit does.
    fn is_ready(&self, _chosen: &PartSet) -> bool {
        true
    }
}

impl Journal {
    /// Defines the parts of the file system, for [`Journal::commit_parts`]. Call it once, while no
    /// transaction runs.
    pub fn set_parts(&self, parts: Arc<dyn Parts>) -> Result<()> {
        self.set_once(&self.inner.parts, Box::new(parts), "parts")
    }
}

impl PartRules for Arc<dyn Parts> {
    fn part_of(&self, block: BlockNo) -> Part {
        (**self).part_of(block)
    }

    fn copy_entries(&self, block: BlockNo, current: &[u8], version: &mut [u8], chosen: &PartSet) {
        (**self).copy_entries(block, current, version, chosen);
    }

    fn is_ready(&self, chosen: &PartSet) -> bool {
        (**self).is_ready(chosen)
    }
}
