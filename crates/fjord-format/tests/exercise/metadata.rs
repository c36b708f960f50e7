//! Superblock, descriptors, inodes, extents, block maps, bitmaps, MMP.

use fjord_format::bitmap;
use fjord_format::blockmap::{self, BlockPath};
use fjord_format::extent::{self, Extent, ExtentIndex, ExtentNode, ExtentNodeMut, NodeKind};
use fjord_format::geometry::Geometry;
use fjord_format::group::{self, GroupDesc};
use fjord_format::inode::{self, DiskInode};
use fjord_format::mmp::MmpBlock;
use fjord_format::superblock::RawSuperblock;
use fjord_format::types::{BlockNo, GroupNo, InodeNo, LogicalBlock};

use super::{Env, pick};

/// A superblock: any bytes.
pub fn superblock(bytes: &[u8]) {
    let Ok(mut sb) = RawSuperblock::decode(bytes) else { return };
    let _ = Geometry::from_superblock(&sb);
    // Most mutations die of the checksum; let them live.
    sb.update_checksum();
    let _ = (sb.volume_name(), sb.last_mounted(), sb.journal_inode(), sb.hash_seed());
    let Ok(geometry) = Geometry::from_superblock(&sb) else { return };
    let groups = geometry.group_count;
    for group in [0, 1, groups / 2, groups - 1, groups, u32::MAX] {
        let _ = geometry.desc_location(GroupNo(group));
        if group >= groups {
            continue;
        }
        let group = GroupNo(group);
        let first = geometry.group_first_block(group);
        assert!(geometry.contains(first) && geometry.group_of_block(first) == Some(group));
        assert!(geometry.blocks_in_group(group) <= geometry.blocks_per_group);
        let _ = (geometry.group_has_super(group), geometry.base_metadata_blocks(group));
        let _ = (geometry.flex_first_group(group), geometry.clusters_in_group(group));
    }
    for index in [0, geometry.desc_block_count - 1, geometry.desc_block_count] {
        let _ = geometry.desc_block_location(index);
    }
    for ino in [0, 1, 11, geometry.inode_count, geometry.inode_count.wrapping_add(1), u32::MAX] {
        let location = geometry.inode_location(InodeNo(ino));
        assert_eq!(location.is_some(), geometry.contains_inode(InodeNo(ino)));
        if let Some(location) = location {
            assert!(location.table_block < geometry.inode_table_blocks());
            assert_eq!(geometry.inode_at(location.group, location.index), Some(InodeNo(ino)));
        }
    }
    let _ = (geometry.extent_file_size_max_bytes(), blockmap::file_size_max_bytes(&geometry));
    let _ = geometry.super_backup_groups().take(100).count();
}

/// A group descriptor: any bytes.
pub fn group_descriptor(env: &Env, bytes: &[u8]) {
    let group = GroupNo(pick(bytes, 1) % env.geometry.group_count);
    let _ = GroupDesc::decode(bytes, &env.geometry, group);
    let Ok(desc) = GroupDesc::parse(bytes, &env.geometry) else { return };
    let mut again = bytes.to_vec();
    desc.encode(&mut again, &env.geometry, group).expect("the buffer was long enough");
    assert_eq!(GroupDesc::parse(&again, &env.geometry), Ok(desc));
    group::verify_checksum(&again, &env.geometry, group).expect("just encoded");
    let Ok(desc) = GroupDesc::decode(&again, &env.geometry, group) else { return };
    let mut bits = vec![0; env.geometry.block_size as usize];
    bitmap::init_block_bitmap(&mut bits, &env.geometry, group, &desc);
    let _ = desc.verify_block_bitmap(&bits, &env.geometry);
    let _ = desc.itable_used(&env.geometry);
}

/// An inode: any bytes.
pub fn inode(env: &Env, bytes: &[u8]) {
    let ino = InodeNo(12);
    let _ = inode::verify_checksum(bytes, &env.geometry, ino);
    let Ok(inode) = DiskInode::decode(bytes, &env.geometry) else { return };
    let mut again = bytes.to_vec();
    inode.encode(&mut again, &env.geometry).expect("it was decoded from these bytes");
    // Nanoseconds beyond a second are cut, so only the decoded inodes must be the same.
    assert!(DiskInode::decode(&again, &env.geometry).as_ref() == Ok(&inode));
    let is_cut = |at: usize| bytes.get(at + 3).is_some_and(|high| *high >= 0xee);
    if ![0x84, 0x88, 0x8c, 0x94].into_iter().any(is_cut) {
        assert!(again == bytes, "what was decoded encodes to the same bytes");
    }
    let _ = (inode.fast_symlink(&env.geometry), inode.device(), inode.file_type());
    inode::update_checksum(&mut again, &env.geometry, ino).expect("a valid inode");
    inode::verify_checksum(&again, &env.geometry, ino).expect("just set");
    extent_node(env, &inode.i_block);
    block_map(env, &inode.i_block);
}

/// An extent node, in an inode or in a block: any bytes.
pub fn extent_node(env: &Env, bytes: &[u8]) {
    let _ = extent::verify_checksum(bytes, 1, &env.geometry);
    for kind in [NodeKind::Root, NodeKind::Block] {
        let Ok(node) = ExtentNode::parse(bytes, kind, None, &env.geometry) else { continue };
        assert!(node.len() <= node.max());
        let depth = node.depth();
        assert!(ExtentNode::parse(bytes, kind, Some(depth + 1), &env.geometry).is_err());
        for salt in 0..4 {
            let logical = LogicalBlock(pick(bytes, salt) << 2);
            let first = node.extent(0).map(|e| e.logical).or(node.index(0).map(|i| i.logical));
            assert_eq!(node.search(logical).is_some(), first.is_some_and(|f| f <= logical));
        }
        let last_end = node.extents().map(|extent| extent.logical_end()).last();
        assert!(last_end.is_none_or(|end| end <= 1 << 32));
        for extent in node.extents() {
            assert!(extent.physical(extent.logical) == Some(extent.start));
        }
        edit_extents(env, bytes, kind);
    }
}

fn edit_extents(env: &Env, bytes: &[u8], kind: NodeKind) {
    let mut copy = bytes.to_vec();
    let len = {
        let mut node = ExtentNodeMut::parse(&mut copy, kind, None, &env.geometry).expect("valid");
        let at = pick(bytes, 5) as usize % (node.as_node().len() + 2);
        let logical = LogicalBlock(pick(bytes, 6));
        let start = BlockNo(u64::from(pick(bytes, 7) % 40_000));
        if node.as_node().is_leaf() {
            let unwritten = pick(bytes, 8) & 1 == 1;
            // An edit takes any blocks of the image; whoever makes one knows where the image ends.
            let room = env.geometry.block_count.saturating_sub(start.0).min(50_000) as u32;
            if room == 0 {
                return;
            }
            let extent = Extent { logical, len: 1 + pick(bytes, 9) % room, start, unwritten };
            let _ = node.insert_extent(at, extent);
            let _ = node.set_extent(at, extent);
        } else {
            let index = ExtentIndex { logical, leaf: start };
            let _ = node.insert_index(at, index);
            let _ = node.set_index(at, index);
        }
        node.as_node().len()
    };
    let node = ExtentNode::parse(&copy, kind, None, &env.geometry).expect("an edit keeps order");
    assert_eq!(node.len(), len);
    let (depth, keep) = (node.depth(), usize::from(!node.is_leaf()));
    let mut other = vec![0; env.geometry.block_size as usize];
    let mut target = ExtentNodeMut::init(&mut other, NodeKind::Block, depth, &env.geometry)
        .expect("a depth that was valid");
    let mut node = ExtentNodeMut::parse(&mut copy, kind, None, &env.geometry).expect("valid");
    let at = (len / 2).max(keep);
    if at <= len && node.move_tail_to(at, &mut target).is_ok() {
        assert_eq!(node.as_node().len() + target.as_node().len(), len);
    }
    let _ = node.remove(keep, 1);
    ExtentNode::parse(&copy, kind, None, &env.geometry).expect("an edit keeps order");
}

/// `i_block` or an indirect block of a block map: any bytes.
pub fn block_map(env: &Env, bytes: &[u8]) {
    for place in (0..20).map(|salt| pick(bytes, salt)).chain([0, 11, 14, u32::MAX]) {
        let Ok(Some(block)) = blockmap::read_pointer(bytes, place, &env.geometry) else { continue };
        assert!(env.geometry.contains(block));
    }
    for place in 0..bytes.len().min(4096) / 4 {
        let _ = blockmap::read_pointer(bytes, place as u32, &env.geometry);
    }
    let logical = LogicalBlock(pick(bytes, 30) << 3);
    if let Some(path) = BlockPath::to(logical, &env.geometry) {
        let in_block = blockmap::pointers_per_block(&env.geometry);
        let (first, rest) = path.offsets().split_first().expect("one to four");
        assert!(*first < 15 && rest.iter().all(|&offset| offset < in_block));
    }
}

/// A bitmap: any bytes, and any range.
pub fn bits(bytes: &[u8]) {
    let (start, len) = (pick(bytes, 1) % 40_000, pick(bytes, 2) % 40_000);
    let count = (bytes.len() * 8) as u32;
    let end = start.saturating_add(len);
    let runs: u64 = bitmap::clear_runs(bytes, start, end).map(|run| u64::from(run.len)).sum();
    let clear = (start..end.min(count)).filter(|&bit| !bitmap::test(bytes, bit)).count();
    assert_eq!(runs, clear as u64);
    assert_eq!(bitmap::next_clear(bytes, start, end).is_some(), clear > 0);
    let longest = bitmap::longest_clear_run(bytes, start, end);
    assert_eq!(longest.is_some(), clear > 0);
    let mut copy = bytes.to_vec();
    bitmap::set_range(&mut copy, start, len);
    assert_eq!(bitmap::next_clear(&copy, start, end), None);
    bitmap::clear_range(&mut copy, start, len);
    assert_eq!(bitmap::next_set(&copy, start, end), None);
    assert!(bitmap::count_clear(bytes, count) <= count);
}

/// An MMP block: any bytes.
pub fn mmp(env: &Env, bytes: &[u8]) {
    let Ok(block) = MmpBlock::decode(bytes, &env.geometry) else { return };
    let mut again = bytes.to_vec();
    block.encode(&mut again, &env.geometry).expect("the buffer was long enough");
    assert_eq!(MmpBlock::decode(&again, &env.geometry), Ok(block));
}
