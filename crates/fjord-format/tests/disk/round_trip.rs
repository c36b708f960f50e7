//! Values through bytes and back, and hostile bytes: whatever comes in, decoders return.

use crate::support::Image;
use fjord_format::blockmap::{self, BlockPath};
use fjord_format::checksum;
use fjord_format::error::FormatError;
use fjord_format::extent::{self, Extent, ExtentIndex, ExtentNode, ExtentNodeMut, NodeKind};
use fjord_format::geometry::Geometry;
use fjord_format::group::{self, GroupDesc, GroupFlags};
use fjord_format::inode::{self, DeviceNumber, DiskInode, I_BLOCK_BYTES, InodeFlags};
use fjord_format::mmp::MmpBlock;
use fjord_format::superblock::RawSuperblock;
use fjord_format::time::Timestamp;
use fjord_format::types::{BlockNo, GroupNo, InodeNo, LogicalBlock};
use proptest::prelude::*;
use std::sync::LazyLock;
use zerocopy::FromBytes;

static IMAGE: LazyLock<Image> = LazyLock::new(|| Image::make(&["-t", "ext4", "-b", "4096"], "64M"));

fn with_inode_size(size: u16) -> Geometry {
    let mut sb = IMAGE.sb;
    sb.s_inode_size.set(size);
    let per_block = sb.s_inodes_per_group.get();
    assert!(per_block >= 4096 / u32::from(size));
    if size == 128 {
        sb.s_want_extra_isize.set(0);
        sb.s_min_extra_isize.set(0);
    }
    sb.update_checksum();
    Geometry::from_superblock(&sb).expect("a sound layout")
}

fn time() -> impl Strategy<Value = Timestamp> {
    (fjord_format::time::SECONDS_MIN..=fjord_format::time::SECONDS_MAX, 0u32..1_000_000_000)
        .prop_map(|(sec, nsec)| Timestamp { sec, nsec })
}

prop_compose! {
    fn any_inode()(
        ids in any::<(u16, u32, u32, u32, u16, u32, u32)>(),
        size in 0u64..=i64::MAX as u64,
        times in (time(), time(), time(), time()),
        blocks in 0u64..1 << 48,
        flags in any::<u32>(),
        version in any::<u64>(),
        i_block in proptest::collection::vec(any::<u8>(), I_BLOCK_BYTES),
        acl in 0u64..16384,
    ) -> DiskInode {
        let geometry = &IMAGE.geometry;
        let mut inode = DiskInode::new(inode::S_IFREG | (ids.0 & 0o7777), geometry);
        (inode.uid, inode.gid, inode.dtime) = (ids.1, ids.2, ids.3);
        (inode.links_count, inode.generation, inode.projid) = (ids.4, ids.5, ids.6);
        inode.size = size;
        (inode.atime, inode.ctime, inode.mtime, inode.crtime) = times;
        inode.blocks_512 = blocks;
        inode.flags = InodeFlags::from_bits_retain(flags) - InodeFlags::INLINE_DATA
            - InodeFlags::HUGE_FILE;
        inode.version = version;
        inode.i_block.copy_from_slice(&i_block);
        inode.file_acl = BlockNo(acl);
        inode
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn inode_round_trip(inode in any_inode(), ino in 1u32..1000, tail in any::<u8>()) {
        let geometry = &IMAGE.geometry;
        let mut bytes = vec![0u8; 256];
        bytes[160..].fill(tail);
        inode.encode(&mut bytes, geometry).expect("fits");
        inode::update_checksum(&mut bytes, geometry, InodeNo(ino)).expect("fits");
        prop_assert!(bytes[160..].iter().all(|&byte| byte == tail));
        inode::verify_checksum(&bytes, geometry, InodeNo(ino)).expect("just set");
        let back = DiskInode::decode(&bytes, geometry).expect("sound");
        prop_assert_eq!(&back, &inode);
        bytes[10] ^= 1;
        prop_assert!(inode::verify_checksum(&bytes, geometry, InodeNo(ino)).is_err());
    }

    #[test]
    fn small_inode_keeps_its_base(mut inode in any_inode()) {
        let geometry = with_inode_size(128);
        prop_assert_eq!(geometry.want_extra_isize, 0);
        inode.extra_isize = 0;
        let mut bytes = [0u8; 128];
        inode.encode(&mut bytes, &geometry).expect("fits");
        inode::update_checksum(&mut bytes, &geometry, InodeNo(12)).expect("fits");
        inode::verify_checksum(&bytes, &geometry, InodeNo(12)).expect("just set");
        let back = DiskInode::decode(&bytes, &geometry).expect("sound");
        prop_assert_eq!(back.size, inode.size);
        prop_assert_eq!(back.version, inode.version & 0xffff_ffff);
        prop_assert_eq!((back.mtime.nsec, back.projid), (0, 0));
    }

    #[test]
    fn inode_bytes_come_back(mut bytes in proptest::collection::vec(any::<u8>(), 256)) {
        let geometry = &IMAGE.geometry;
        bytes[128..130].copy_from_slice(&32u16.to_le_bytes());
        let Ok(inode) = DiskInode::decode(&bytes, geometry) else { return Ok(()) };
        let mut again = bytes.clone();
        inode.encode(&mut again, geometry).expect("what was decoded encodes");
        let twice = DiskInode::decode(&again, geometry).expect("sound");
        prop_assert_eq!(twice, inode);
        prop_assert_eq!(&again[160..], &bytes[160..]);
    }

    #[test]
    fn group_desc_round_trip(
        numbers in any::<(u64, u64, u64, u32, u32, u32)>(),
        more in any::<(u64, u32, u32, u32, u32, u16)>(),
        group in 0u32..100,
    ) {
        let geometry = &IMAGE.geometry;
        let desc = GroupDesc {
            block_bitmap: BlockNo(numbers.0),
            inode_bitmap: BlockNo(numbers.1),
            inode_table: BlockNo(numbers.2),
            free_clusters: numbers.3,
            free_inodes: numbers.4,
            used_dirs: numbers.5,
            flags: GroupFlags::from_bits_retain(more.5),
            exclude_bitmap: more.0,
            block_bitmap_csum: more.1,
            inode_bitmap_csum: more.2,
            itable_unused: more.3,
            reserved: more.4,
        };
        let mut bytes = [0u8; 64];
        desc.encode(&mut bytes, geometry, GroupNo(group)).expect("fits");
        group::verify_checksum(&bytes, geometry, GroupNo(group)).expect("just set");
        prop_assert!(group::verify_checksum(&bytes, geometry, GroupNo(group + 1)).is_err());
        prop_assert_eq!(GroupDesc::parse(&bytes, geometry).expect("fits"), desc);
    }

    #[test]
    fn device_numbers(major in 0u32..4096, minor in 0u32..1 << 20) {
        let device = DeviceNumber { major, minor };
        prop_assert_eq!(DeviceNumber::from_u32(device.to_u32()), device);
        prop_assert_eq!(DeviceNumber::from_i_block(&device.to_i_block()), device);
    }

    /// A leaf filled in any order by `insert_extent` reads as the sorted list, and `search`
    /// finds what a linear search finds.
    #[test]
    fn extents_round_trip(
        slots in proptest::collection::btree_map(0u32..2000, (1u32..8, 1u64..16000, any::<bool>()), 0..100),
        picks in proptest::collection::vec(any::<proptest::sample::Index>(), 0..100),
        wanted in 0u32..20000,
    ) {
        let geometry = &IMAGE.geometry;
        let mut pool: Vec<Extent> = slots
            .into_iter()
            .map(|(slot, (len, start, unwritten))| Extent {
                logical: LogicalBlock(slot * 8), len, start: BlockNo(start), unwritten,
            })
            .collect();
        let sorted = pool.clone();
        let mut block = vec![0xaa; 4096];
        let mut node = ExtentNodeMut::init(&mut block, NodeKind::Block, 0, geometry).expect("fits");
        let mut picks = picks.iter();
        while !pool.is_empty() {
            let extent = pool.remove(picks.next().map_or(0, |pick| pick.index(pool.len())));
            let at = node.as_node().search(extent.logical).map_or(0, |at| at + 1);
            node.insert_extent(at, extent).expect("fits");
        }
        extent::update_checksum(&mut block, 7, geometry).expect("sound");
        extent::verify_checksum(&block, 7, geometry).expect("just set");
        let node = ExtentNode::parse(&block, NodeKind::Block, Some(0), geometry).expect("sound");
        prop_assert_eq!(node.extents().collect::<Vec<_>>(), sorted.clone());
        let found = sorted.iter().rposition(|extent| extent.logical.0 <= wanted);
        prop_assert_eq!(node.search(LogicalBlock(wanted)), found);
    }

    #[test]
    fn block_paths_are_a_bijection(logical in 0u32..u32::MAX) {
        let geometry = &IMAGE.geometry;
        let path = BlockPath::to(LogicalBlock(logical), geometry);
        prop_assert_eq!(path.is_some(), u64::from(logical) < blockmap::blocks_max(geometry));
        let Some(path) = path else { return Ok(()) };
        let n = 1024u64;
        let back = match *path.offsets() {
            [a] => u64::from(a),
            [12, b] => 12 + u64::from(b),
            [13, b, c] => 12 + n + u64::from(b) * n + u64::from(c),
            [14, b, c, d] => 12 + n + n * n + (u64::from(b) * n + u64::from(c)) * n + u64::from(d),
            ref other => panic!("{other:?}"),
        };
        prop_assert_eq!(back, u64::from(logical));
    }

    /// Any bytes: typed errors or values, never a panic.
    #[test]
    fn hostile_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..4200), ino in any::<u32>()) {
        let geometry = &IMAGE.geometry;
        let _ = GroupDesc::decode(&bytes, geometry, GroupNo(0));
        let _ = DiskInode::decode(&bytes, geometry).map(|inode| {
            (inode.fast_symlink(geometry).is_some(), inode.device())
        });
        let _ = inode::verify_checksum(&bytes, geometry, InodeNo(ino));
        let _ = MmpBlock::decode(&bytes, geometry);
        let mut node = bytes.clone();
        if node.len() >= 8 {
            node[..2].copy_from_slice(&0xf30au16.to_le_bytes());
            node[3] = 0;
            node[5] = 0;
        }
        for kind in [NodeKind::Root, NodeKind::Block] {
            if let Ok(node) = ExtentNode::parse(&node, kind, None, geometry) {
                prop_assert!(node.extents().all(|e| geometry.contains_range(e.start, u64::from(e.len))));
            }
            let _ = extent::verify_checksum(&node, 1, geometry);
        }
        let _ = blockmap::read_pointer(&bytes, ino, geometry);
        prop_assert_eq!(geometry.inode_location(InodeNo(ino)).is_some(),
            ino >= 1 && ino <= geometry.inode_count);
    }

    /// A sound superblock with some bytes changed: accepted ones give a layout that answers
    /// every question without overflow.
    #[test]
    fn hostile_superblocks(
        changes in proptest::collection::vec((0usize..0x180, any::<u8>()), 1..6),
        fix_csum in any::<bool>(),
        group in any::<u32>(),
        block in any::<u64>(),
    ) {
        let mut bytes = IMAGE.sb.as_bytes().to_vec();
        for (at, value) in changes {
            bytes[at] = value;
        }
        let Ok(mut sb) = RawSuperblock::decode(&bytes) else { return Ok(()) };
        if fix_csum {
            sb.update_checksum();
        }
        let Ok(geometry) = Geometry::from_superblock(&sb) else { return Ok(()) };
        let group = GroupNo(group % geometry.group_count);
        let last = GroupNo(geometry.group_count - 1);
        for group in [group, last] {
            prop_assert!(geometry.blocks_in_group(group) > 0);
            prop_assert!(geometry.group_of_block(geometry.group_first_block(group)) == Some(group));
            let _ = geometry.base_metadata_blocks(group);
            let (index, _) = geometry.desc_location(group).expect("exists");
            prop_assert!(geometry.desc_block_location(index).is_some());
            let _ = geometry.desc_block_backups(index);
            let _ = geometry.flex_first_group(group);
        }
        let _ = geometry.cluster_in_group(BlockNo(block));
        let _ = geometry.inode_location(InodeNo(geometry.inode_count));
        let _ = blockmap::file_size_max_bytes(&geometry);
        let _ = geometry.super_backup_groups().take(100).count();
    }
}

#[test]
fn random_superblock_bytes_never_panic() {
    proptest!(|(bytes in proptest::collection::vec(any::<u8>(), 1024))| {
        let sb = RawSuperblock::read_from_bytes(&bytes).expect("1024 bytes");
        let _ = Geometry::from_superblock(&sb);
    });
}

#[test]
fn extent_writer_refuses_what_breaks_a_node() {
    let geometry = &IMAGE.geometry;
    let mut root = [0u8; I_BLOCK_BYTES];
    let mut node = ExtentNodeMut::init(&mut root, NodeKind::Root, 0, geometry).expect("fits");
    let extent = |logical, len, start| Extent {
        logical: LogicalBlock(logical),
        len,
        start: BlockNo(start),
        unwritten: false,
    };
    node.insert_extent(0, extent(10, 5, 100)).expect("fits");
    assert!(node.insert_extent(1, extent(14, 1, 200)).is_err(), "overlaps");
    assert!(node.insert_extent(0, extent(8, 3, 200)).is_err(), "overlaps");
    assert!(node.insert_extent(0, extent(20, 1, 200)).is_err(), "out of order");
    assert!(node.insert_extent(1, extent(20, 0, 200)).is_err(), "empty");
    assert!(node.insert_extent(1, extent(20, 40000, 200)).is_err(), "too long");
    assert!(node.insert_extent(1, extent(20, 2, 16383)).is_err(), "past the end");
    let unwritten = Extent { unwritten: true, ..extent(20, 32768, 200) };
    assert!(node.insert_extent(1, unwritten).is_err(), "too long for an unwritten one");
    node.insert_extent(1, extent(u32::MAX, 1, 1)).expect("the last block");
    assert!(node.set_extent(0, extent(10, 6, 100)).is_ok());
    assert!(
        node.insert_index(0, ExtentIndex { logical: LogicalBlock(0), leaf: BlockNo(9) }).is_err()
    );
    node.insert_extent(1, extent(30, 1, 1)).expect("fits");
    node.insert_extent(1, extent(20, 1, 1)).expect("fits");
    assert!(matches!(node.insert_extent(1, extent(17, 1, 1)), Err(FormatError::NoRoom { .. })));

    let mut block = vec![0; 4096];
    let mut next = ExtentNodeMut::init(&mut block, NodeKind::Block, 0, geometry).expect("fits");
    node.move_tail_to(2, &mut next).expect("moves");
    assert_eq!((node.as_node().len(), next.as_node().len()), (2, 2));
    assert_eq!(next.as_node().extent(0), Some(extent(30, 1, 1)));
    assert!(node.remove(1, 2).is_err());
    node.remove(0, 2).expect("two entries");
    assert!(node.as_node().is_empty());
}

#[test]
fn extents_merge_only_where_they_touch() {
    let a = Extent { logical: LogicalBlock(0), len: 8, start: BlockNo(50), unwritten: false };
    let b = Extent { logical: LogicalBlock(8), len: 8, start: BlockNo(58), unwritten: false };
    assert!(a.can_merge(&b));
    assert!(!b.can_merge(&a));
    assert!(!a.can_merge(&Extent { unwritten: true, ..b }));
    assert!(!a.can_merge(&Extent { len: 32761, ..b }));
    assert_eq!(a.physical(LogicalBlock(7)), Some(BlockNo(57)));
    assert_eq!(a.physical(LogicalBlock(8)), None);
}

#[test]
fn extent_loops_and_wrong_depths_are_seen() {
    let geometry = &IMAGE.geometry;
    let mut block = vec![0; 4096];
    ExtentNodeMut::init(&mut block, NodeKind::Block, 2, geometry)
        .and_then(|mut node| {
            node.insert_index(0, ExtentIndex { logical: LogicalBlock(0), leaf: BlockNo(77) })
        })
        .expect("fits");
    assert!(ExtentNode::parse(&block, NodeKind::Block, Some(2), geometry).is_ok());
    // A child that points back to its parent has the parent's depth, not one less.
    assert!(ExtentNode::parse(&block, NodeKind::Block, Some(1), geometry).is_err());
    let seed = checksum::inode_seed(geometry.csum_seed, InodeNo(12), 3);
    assert!(extent::verify_checksum(&block, seed, geometry).is_err());
}

#[test]
fn huge_files_count_in_blocks() {
    let geometry = &IMAGE.geometry;
    let mut inode = DiskInode::new(inode::S_IFREG, geometry);
    inode.blocks_512 = 1 << 48;
    let mut bytes = [0u8; 256];
    inode.encode(&mut bytes, geometry).expect("fits");
    let back = DiskInode::decode(&bytes, geometry).expect("sound");
    assert_eq!(back.blocks_512, 1 << 48);
    assert!(back.flags.contains(InodeFlags::HUGE_FILE));
    inode.blocks_512 = 1 << 51;
    assert!(matches!(inode.encode(&mut bytes, geometry), Err(FormatError::Usage(_))));
}

#[test]
fn block_map_limits_match_linux() {
    // Largest files of block maps: 16 GiB, 256 GiB and a bit over 4 TiB with 1, 2 and 4 KiB
    // blocks, and 2 TiB where the block counter has 32 bits.
    for (size, gib) in [("1024", 16u64), ("2048", 256), ("4096", 4100)] {
        let image = Image::make(&["-t", "ext4", "-b", size], "64M");
        let max = blockmap::file_size_max_bytes(&image.geometry);
        assert_eq!(max >> 30, gib, "blocks of {size} bytes");
    }
    let image = Image::make(&["-t", "ext3", "-b", "4096"], "64M");
    let max = blockmap::file_size_max_bytes(&image.geometry);
    assert_eq!(max, 2_196_873_666_560);
}
