//! What fast commits must look like for e2fsck 1.47 and Linux to replay them to the same tree.
//!
//! Owns every rule that exists only because of the limits of these two replays, one item each; the
//! journal and the fsync policy ask here. `docs/fast-commit-compatibility.md` has a row for each, with
//! the limit, the places that obey the rule, and the test that shows it.
//!
//! Five rules are procedures, so that they are elsewhere:
//! - both replays refuse the whole log when the first fast commit of an area is torn, so an empty one
//!   in its sector precedes it ([`super::FastCommitWriter`]);
//! - e2fsck drops the whole log if a valid area starts with the head of another transaction's stream,
//!   so one write makes a full commit valid and the stream before it invalid (the commit's module
//!   `switch` of `fjord-journal`);
//! - e2fsck gives up at a range of an inode that has no map yet, so a file whose data leaves its inode
//!   needs a full commit (`file::inline` of the engine);
//! - e2fsck adds no block to a directory, so directories grow early (`dir` of the engine);
//! - e2fsck writes back what it read before the replay, so such changes are checkpointed before a fast
//!   commit (`fsync::hazards` of the engine).
//!
//! Invariant: stateless; nothing here decides whether an image has fast commits.

use std::ops::Range;

use super::{EntryRecord, Record};
use crate::geometry::{GOOD_OLD_INODE_BYTES, Geometry};
use crate::inode::EXTRA_ISIZE_KNOWN;
use crate::types::{BlockNo, InodeNo, LogicalBlock};

/// Blocks at the end of the area that stay unused: both replays read one block past the last one in
/// use, and fail past the end of the area.
const SPARE_BLOCKS: u32 = 1;

/// Blocks that a deleted file had at most: 8 TiB of 4 KiB each. The replay of Linux counts no further.
const DELETED_BLOCKS: u32 = i32::MAX as u32;

/// Bytes of `i_extra_isize` and the checksum after it, which the replay of e2fsck asks for.
const EXTRA_BYTES_MIN: u16 = 4;

/// The blocks of the area that fast commits may use.
pub fn usable_blocks(area: Range<u32>) -> Range<u32> {
    area.start..area.end.saturating_sub(SPARE_BLOCKS)
}

/// Whether a commit of up to `blocks` that begins at `head` ends before the end of the log. Where the
/// journal has an area, one that does not must begin at the front of an empty log: e2fsck looks for the
/// wrapped rest of a transaction after the area, and the end of the log depends on whether the
/// area is valid, so that no commit may end exactly there either.
pub fn ends_in_front_of_area(head: u32, blocks: u32, log_end: u32) -> bool {
    log_end - head > blocks
}

/// Whether the replay of changed ranges allocates blocks: both replays build the nodes of a tree anew.
pub fn allocates_nodes(tree_has_nodes: bool, changes_ranges: bool) -> bool {
    tree_has_nodes && changes_ranges
}

/// What records do to blocks, as far as their replay depends on other records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockUse {
    /// The inode that the records are of.
    pub owner: u32,
    /// They add blocks to it.
    pub adds_blocks: bool,
    /// Their replay allocates blocks for it ([`allocates_nodes`]).
    pub allocates: bool,
}

/// Whether records of a stream may not follow those before them, where replay allocates blocks for
/// inode `allocates` already. e2fsck does not look ahead: the nodes that it allocates may lie in
/// blocks that a later record adds, to any file.
pub fn conflicts(allocates: Option<u32>, records: BlockUse) -> bool {
    let is_for_another = allocates.is_some_and(|owner| owner != records.owner);
    (allocates.is_some() && records.adds_blocks) || (is_for_another && records.allocates)
}

/// The records that remove a deleted file with its last name: it loses its blocks first, because
/// e2fsck deletes only empty files as a whole, and puts others into lost+found.
pub fn removal(ino: InodeNo, parent: InodeNo, name: Vec<u8>) -> [Record; 2] {
    let blocks = Record::DelRange { ino, logical: LogicalBlock(0), len: DELETED_BLOCKS };
    [blocks, Record::Unlink(EntryRecord { parent, ino, name })]
}

/// Whether the replay of e2fsck accepts the image of an inode.
pub fn accepts_inode(inode_size: u16, extra_isize: u16) -> bool {
    inode_size <= GOOD_OLD_INODE_BYTES || extra_isize >= EXTRA_BYTES_MIN
}

/// Whether the replay of Linux counts all blocks of an inode: it recounts those of its map, and forgets
/// the one of its attributes.
pub fn counts_all_blocks(attribute_block: BlockNo) -> bool {
    attribute_block == BlockNo(0)
}

/// Whether a new name finds room in its directory. e2fsck 1.47.0 adds no block to a directory, and
/// later ones may take one that a later record gives to a file, so that the blocks of the last
/// full commit must do: the name `fits` there, or takes the place of one that is removed by records.
pub fn name_finds_room(replaces: bool, fits: bool) -> bool {
    replaces || fits
}

/// Whether bytes of an inode lie after the fields that a new one has. Replay by e2fsck writes fields
/// and keeps those bytes, so that a new inode would have the attributes of an older one.
pub fn has_tail(bytes: &[u8]) -> bool {
    let fields = usize::from(GOOD_OLD_INODE_BYTES) + usize::from(EXTRA_ISIZE_KNOWN);
    bytes.get(fields..).is_some_and(|tail| tail.iter().any(|&byte| byte != 0))
}

/// Whether the inode shares its block of the inode table with the journal's. e2fsck reads that block
/// before it replays the log, and writes it back after the replay of fast commits.
pub fn is_beside_journal(geo: &Geometry, ino: InodeNo) -> bool {
    let block = |ino| geo.inode_location(ino).map(|at| (at.group, at.table_block));
    block(ino) == block(InodeNo::JOURNAL)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::superblock::RawSuperblock;

    #[test]
    fn the_last_block_of_an_area_stays_unused() {
        assert_eq!(usable_blocks(960..1024), 960..1023);
        assert!(usable_blocks(1024..1024).is_empty());
        assert!(usable_blocks(0..0).is_empty());
    }

    #[test]
    fn a_commit_ends_in_front_of_the_area() {
        assert!(ends_in_front_of_area(100, 50, 151));
        assert!(!ends_in_front_of_area(100, 50, 150), "it ends exactly there");
        assert!(!ends_in_front_of_area(100, 51, 150));
    }

    /// All cases: blocks are added only where no tree has been given nodes.
    #[test]
    fn no_blocks_are_added_after_nodes_were_allocated() {
        let case = |adds_blocks, allocates| BlockUse { owner: 12, adds_blocks, allocates };
        for (adds_blocks, allocates) in [(false, false), (false, true), (true, false), (true, true)]
        {
            let records = case(adds_blocks, allocates);
            assert!(!conflicts(None, records), "{records:?}");
            assert_eq!(conflicts(Some(12), records), adds_blocks, "{records:?}");
            assert_eq!(conflicts(Some(13), records), adds_blocks || allocates, "{records:?}");
        }
    }

    #[test]
    fn a_deleted_file_loses_its_blocks_before_its_name() {
        let [first, second] = removal(InodeNo(13), InodeNo(2), b"n".to_vec());
        assert!(matches!(first, Record::DelRange { len: 0x7fff_ffff, .. }), "{first:?}");
        let entry = EntryRecord { parent: InodeNo(2), ino: InodeNo(13), name: b"n".to_vec() };
        assert_eq!(second, Record::Unlink(entry));
    }

    #[test]
    fn only_bytes_after_the_fields_are_a_tail() {
        let mut bytes = [0; 256];
        bytes[..160].fill(1);
        assert!(!has_tail(&bytes) && !has_tail(&bytes[..128]));
        bytes[160] = 1;
        assert!(has_tail(&bytes));
    }

    #[test]
    fn the_inodes_beside_the_journal_share_its_block() {
        let mut sb = RawSuperblock::empty();
        sb.s_rev_level.set(1);
        sb.s_log_block_size.set(2);
        sb.s_log_cluster_size.set(2);
        sb.s_blocks_per_group.set(8192);
        sb.s_clusters_per_group.set(8192);
        sb.s_inodes_per_group.set(1024);
        sb.s_inodes_count.set(4096);
        sb.set_blocks_count(4 * 8192);
        sb.s_inode_size.set(256);
        sb.s_first_ino.set(11);
        let geo = Geometry::from_superblock(&sb).expect("a valid superblock was made");
        for (ino, beside) in [(1, true), (8, true), (16, true), (17, false), (1024 + 8, false)] {
            assert_eq!(is_beside_journal(&geo, InodeNo(ino)), beside, "{ino}");
        }
    }

    #[test]
    fn small_inodes_and_those_with_a_checksum_are_accepted() {
        assert!(accepts_inode(128, 0) && accepts_inode(256, 4) && accepts_inode(256, 32));
        assert!(!accepts_inode(256, 0) && !accepts_inode(256, 3));
    }
}
