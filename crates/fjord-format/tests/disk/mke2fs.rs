//! Images made by mke2fs, read by fjord-format: every descriptor, bitmap, inode and extent
//! node must come out as dumpe2fs and debugfs print it, with every checksum right, and must
//! encode to the bytes it was decoded from.

use std::collections::HashMap;

use crate::support::{Image, debugfs, run};
use fjord_format::bitmap;
use fjord_format::checksum;
use fjord_format::extent::{self, ExtentNode, ExtentNodeMut, NodeKind};
use fjord_format::group::{GroupDesc, GroupFlags};
use fjord_format::inode::{self, DiskInode, InodeFlags};
use fjord_format::mmp::MmpBlock;
use fjord_format::superblock::RawSuperblock;
use fjord_format::types::{BlockNo, GroupNo, InodeNo};

/// Feature sets: name, arguments of mke2fs, size.
const SETS: &[(&str, &[&str], &str)] = &[
    ("defaults", &["-t", "ext4"], "200M"),
    ("defaults-4k", &["-t", "ext4", "-b", "4096"], "600M"),
    ("no-64bit", &["-t", "ext4", "-O", "^64bit"], "64M"),
    ("no-csum", &["-t", "ext4", "-O", "^metadata_csum"], "64M"),
    ("uninit_bg", &["-t", "ext4", "-O", "^metadata_csum,uninit_bg"], "64M"),
    ("uninit_bg-32", &["-t", "ext4", "-O", "^metadata_csum,uninit_bg,^64bit"], "64M"),
    ("csum-seed", &["-t", "ext4", "-O", "metadata_csum_seed"], "64M"),
    ("meta_bg", &["-t", "ext4", "-O", "meta_bg,^resize_inode"], "200M"),
    (
        "meta_bg-4k",
        &["-t", "ext4", "-b", "4096", "-O", "meta_bg,^resize_inode", "-g", "2048"],
        "600M",
    ),
    ("no-flex_bg", &["-t", "ext4", "-O", "^flex_bg"], "64M"),
    ("meta_bg-no-flex", &["-t", "ext4", "-O", "meta_bg,^resize_inode,^flex_bg"], "200M"),
    ("bigalloc", &["-t", "ext4", "-O", "bigalloc", "-b", "4096", "-C", "65536"], "600M"),
    ("bigalloc-1k", &["-t", "ext4", "-O", "bigalloc", "-b", "1024", "-C", "16384"], "300M"),
    ("2k", &["-t", "ext4", "-b", "2048"], "128M"),
    ("64k", &["-t", "ext4", "-b", "65536"], "1G"),
    ("inode-128", &["-t", "ext4", "-I", "128"], "64M"),
    ("inode-1024", &["-t", "ext4", "-I", "1024", "-b", "4096"], "64M"),
    ("sparse_super2", &["-t", "ext4", "-O", "sparse_super2"], "64M"),
    ("no-sparse", &["-t", "ext4", "-O", "^sparse_super,^resize_inode"], "64M"),
    ("mmp", &["-t", "ext4", "-O", "mmp"], "64M"),
    ("inline_data", &["-t", "ext4", "-O", "inline_data"], "64M"),
    (
        "many",
        &["-t", "ext4", "-O", "quota,project,ea_inode,large_dir,orphan_file,fast_commit"],
        "64M",
    ),
    ("ext2", &["-t", "ext2"], "32M"),
    ("ext2-rev0", &["-t", "ext2", "-r", "0"], "32M"),
    ("ext3", &["-t", "ext3", "-b", "4096"], "64M"),
];

/// What dumpe2fs says of a group, as numbers.
#[derive(Debug, Default, PartialEq, Eq)]
struct Told {
    blocks: (u64, u64),
    csum: Option<u16>,
    inode_uninit: bool,
    block_uninit: bool,
    super_at: Option<u64>,
    desc_blocks: Option<(u64, u64)>,
    reserved_gdt: Option<(u64, u64)>,
    block_bitmap: u64,
    block_bitmap_csum: Option<u32>,
    inode_bitmap: u64,
    inode_bitmap_csum: Option<u32>,
    inode_table: (u64, u64),
    free_blocks: u32,
    free_inodes: u32,
    used_dirs: u32,
    itable_unused: u32,
    free_ranges: Vec<(u64, u64)>,
}

fn range(text: &str) -> (u64, u64) {
    let (from, to) = text.split_once('-').unwrap_or((text, text));
    (from.parse().expect("a number"), to.parse().expect("a number"))
}

fn word_after<'a>(line: &'a str, mark: &str) -> Option<&'a str> {
    let rest = &line[line.find(mark)? + mark.len()..];
    rest.split([' ', ',', ')', ']']).next()
}

fn hex(text: &str) -> u32 {
    u32::from_str_radix(text.trim_start_matches("0x"), 16).expect("a hexadecimal number")
}

fn told_by_dumpe2fs(image: &Image) -> (HashMap<String, String>, Vec<Told>) {
    let text = run("dumpe2fs", &[image.path.to_str().expect("utf-8")]);
    let mut fields = HashMap::new();
    let mut groups: Vec<Told> = Vec::new();
    for line in text.lines() {
        if line.starts_with("Group ") && line.contains("(Blocks") {
            groups.push(Told {
                blocks: range(word_after(line, "(Blocks ").expect("blocks")),
                csum: word_after(line, "csum ").map(|csum| hex(csum) as u16),
                inode_uninit: line.contains("INODE_UNINIT"),
                block_uninit: line.contains("BLOCK_UNINIT"),
                ..Told::default()
            });
        }
        let Some(told) = groups.last_mut() else {
            if let Some((name, value)) = line.split_once(':') {
                fields.insert(name.to_owned(), value.trim().to_owned());
            }
            continue;
        };
        group_line(line, told);
    }
    (fields, groups)
}

fn group_line(line: &str, told: &mut Told) {
    if let Some(block) = word_after(line, "superblock at ") {
        told.super_at = Some(range(block).0);
    }
    for mark in ["Group descriptors at ", "Group descriptor at "] {
        told.desc_blocks = word_after(line, mark).map(range).or(told.desc_blocks);
    }
    if let Some(blocks) = word_after(line, "Reserved GDT blocks at ") {
        told.reserved_gdt = Some(range(blocks));
    }
    // Without flex_bg both bitmaps stand in one line.
    for part in line.split("bitmap at").collect::<Vec<_>>().windows(2) {
        let block = range(part[1].trim_start().split([' ', ',']).next().expect("a block")).0;
        let csum = word_after(part[1], "csum ").map(hex);
        if part[0].trim_end().ends_with("Block") {
            (told.block_bitmap, told.block_bitmap_csum) = (block, csum);
        } else {
            (told.inode_bitmap, told.inode_bitmap_csum) = (block, csum);
        }
    }
    if let Some(blocks) = word_after(line, "Inode table at ") {
        told.inode_table = range(blocks);
    }
    if line.contains(" free inodes, ") {
        let numbers: Vec<u32> =
            line.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        (told.free_blocks, told.free_inodes, told.used_dirs) = (numbers[0], numbers[1], numbers[2]);
        told.itable_unused = numbers.get(3).copied().unwrap_or(0);
    }
    if let Some(list) = line.trim_start().strip_prefix("Free blocks: ") {
        told.free_ranges = list.split(", ").filter(|part| !part.is_empty()).map(range).collect();
    }
}

fn check_superblock(image: &Image, fields: &HashMap<String, String>) {
    let (sb, geometry) = (&image.sb, &image.geometry);
    let number = |name: &str| -> u64 { fields[name].parse().expect("a number") };
    let features = sb.features().names().join(" ");
    let told = fields["Filesystem features"].as_str();
    assert_eq!(if features.is_empty() { "(none)" } else { &features }, told);
    assert_eq!(sb.blocks_count(), number("Block count"));
    assert_eq!(sb.r_blocks_count(), number("Reserved block count"));
    assert_eq!(sb.free_blocks_count(), number("Free blocks"));
    assert_eq!(u64::from(geometry.inode_count), number("Inode count"));
    assert_eq!(u64::from(geometry.block_size), number("Block size"));
    assert_eq!(u64::from(geometry.blocks_per_group), number("Blocks per group"));
    assert_eq!(u64::from(geometry.inodes_per_group), number("Inodes per group"));
    assert_eq!(u64::from(geometry.inode_table_blocks()), number("Inode blocks per group"));
    assert_eq!(geometry.first_data_block.0, number("First block"));
    if let Some(csum) = fields.get("Checksum") {
        assert_eq!(sb.compute_checksum(), hex(csum));
    }
    if let Some(seed) = fields.get("Checksum seed") {
        assert_eq!(geometry.csum_seed, hex(seed));
    }
    let again = RawSuperblock::decode(sb.as_bytes()).expect("decodes again");
    assert_eq!(again.as_bytes(), &image.bytes[1024..2048]);
}

fn check_group(image: &Image, group: GroupNo, told: &Told) -> GroupDesc {
    let geometry = &image.geometry;
    let bytes = image.desc_bytes(group);
    let desc = GroupDesc::decode(bytes, geometry, group).expect("a sound descriptor");
    let stored = u16::from_le_bytes([bytes[0x1e], bytes[0x1f]]);
    let ours = Told {
        blocks: {
            let first = geometry.group_first_block(group).0;
            (first, first + u64::from(geometry.blocks_in_group(group)) - 1)
        },
        csum: geometry.features.has_group_csum().then_some(stored),
        inode_uninit: desc.has_flag(geometry, GroupFlags::INODE_UNINIT),
        block_uninit: desc.has_flag(geometry, GroupFlags::BLOCK_UNINIT),
        super_at: told.super_at,
        desc_blocks: told.desc_blocks,
        reserved_gdt: told.reserved_gdt,
        block_bitmap: desc.block_bitmap.0,
        block_bitmap_csum: told.block_bitmap_csum.map(|_| desc.block_bitmap_csum),
        inode_bitmap: desc.inode_bitmap.0,
        inode_bitmap_csum: told.inode_bitmap_csum.map(|_| desc.inode_bitmap_csum),
        inode_table: {
            let first = desc.inode_table.0;
            (first, first + u64::from(geometry.inode_table_blocks()) - 1)
        },
        // Clusters, for dumpe2fs too.
        free_blocks: desc.free_clusters,
        free_inodes: desc.free_inodes,
        used_dirs: desc.used_dirs,
        itable_unused: desc.itable_unused,
        free_ranges: free_ranges(image, group, &desc),
    };
    assert_eq!(&ours, told, "group {group}");

    let mut again = bytes.to_vec();
    desc.encode(&mut again, geometry, group).expect("encodes");
    assert_eq!(again, bytes, "group {group}");
    check_copies(image, group, told);
    desc
}

/// Where copies of superblock and descriptors lie, and what the group begins with.
fn check_copies(image: &Image, group: GroupNo, told: &Told) {
    let geometry = &image.geometry;
    assert_eq!(geometry.group_has_super(group), told.super_at.is_some(), "group {group}");
    assert_eq!(
        geometry.super_backup_groups().any(|backup| backup == group),
        group.0 != 0 && told.super_at.is_some()
    );
    let blocks = |span: Option<(u64, u64)>| span.map_or(0, |(from, to)| to - from + 1);
    let first = geometry.group_first_block(group).0;
    let boot = u64::from(group.0 == 0 && geometry.block_size == 1024 && first == 0);
    let told_base = boot
        + u64::from(told.super_at.is_some())
        + blocks(told.desc_blocks)
        + blocks(told.reserved_gdt);
    assert_eq!(u64::from(geometry.base_metadata_blocks(group)), told_base, "group {group}");
    let Some((from, to)) = told.desc_blocks else { return };
    let here: Vec<u64> = (0..geometry.desc_block_count)
        .flat_map(|index| {
            let mut places = geometry.desc_block_backups(index);
            places.extend(geometry.desc_block_location(index));
            places
        })
        .map(|block| block.0)
        .filter(|&block| block >= told.blocks.0 && block <= told.blocks.1)
        .collect();
    assert_eq!(here, (from..=to).collect::<Vec<_>>(), "group {group}");
}

fn free_ranges(image: &Image, group: GroupNo, desc: &GroupDesc) -> Vec<(u64, u64)> {
    let geometry = &image.geometry;
    let mut bits = image.block(desc.block_bitmap).to_vec();
    let clusters = geometry.clusters_in_group(group);
    if desc.has_flag(geometry, GroupFlags::BLOCK_UNINIT) {
        bitmap::init_block_bitmap(&mut bits, geometry, group, desc);
    } else {
        desc.verify_block_bitmap(&bits, geometry).expect("a sound block bitmap");
        assert!(bitmap::is_range_set(&bits, clusters, geometry.block_size * 8 - clusters));
    }
    assert_eq!(bitmap::count_clear(&bits, clusters), desc.free_clusters, "group {group}");
    let mut inode_bits = image.block(desc.inode_bitmap).to_vec();
    if desc.has_flag(geometry, GroupFlags::INODE_UNINIT) {
        bitmap::init_inode_bitmap(&mut inode_bits, geometry);
    } else {
        desc.verify_inode_bitmap(&inode_bits, geometry).expect("a sound inode bitmap");
    }
    assert_eq!(bitmap::count_clear(&inode_bits, geometry.inodes_per_group), desc.free_inodes);
    bitmap::clear_runs(&bits, 0, clusters)
        .map(|run| {
            // dumpe2fs ends a range with the first block of its last cluster.
            let last = run.start + run.len - 1;
            let block = |cluster| geometry.cluster_first_block(group, cluster).0;
            (block(run.start), block(last))
        })
        .collect()
}

/// All inodes in use: number, bytes on disk, decoded.
fn used_inodes(image: &Image, descs: &[GroupDesc]) -> Vec<(InodeNo, Vec<u8>, DiskInode)> {
    let geometry = &image.geometry;
    let mut inodes = Vec::new();
    for group in image.groups() {
        let desc = &descs[group.0 as usize];
        for index in 0..desc.itable_used(geometry) {
            if !bitmap::test(image.block(desc.inode_bitmap), index) {
                continue;
            }
            let ino = geometry.inode_at(group, index).expect("an inode");
            let place = geometry.inode_location(ino).expect("a location");
            assert_eq!((place.group, place.index), (group, index));
            let block = image.block(BlockNo(desc.inode_table.0 + u64::from(place.table_block)));
            let from = place.offset_bytes as usize;
            let bytes = &block[from..from + usize::from(geometry.inode_size)];
            let inode = DiskInode::decode(bytes, geometry).expect("a sound inode");
            if inode.mode == 0 {
                continue; // a reserved inode without a purpose
            }
            check_inode_bytes(image, ino, bytes, &inode);
            inodes.push((ino, bytes.to_vec(), inode));
        }
    }
    inodes
}

fn check_inode_bytes(image: &Image, ino: InodeNo, bytes: &[u8], inode: &DiskInode) {
    let geometry = &image.geometry;
    inode::verify_checksum(bytes, geometry, ino).expect("a right checksum");
    let mut again = bytes.to_vec();
    inode.encode(&mut again, geometry).expect("encodes");
    inode::update_checksum(&mut again, geometry, ino).expect("has room");
    assert_eq!(again, bytes, "inode {ino}");
    if inode.flags.contains(InodeFlags::EXTENTS) {
        let seed = checksum::inode_seed(geometry.csum_seed, ino, inode.generation);
        let mut leaves = Vec::new();
        check_node(image, &inode.i_block, NodeKind::Root, None, seed, &mut leaves);
    }
}

fn check_node(
    image: &Image,
    bytes: &[u8],
    kind: NodeKind,
    depth: Option<u16>,
    seed: u32,
    leaves: &mut Vec<extent::Extent>,
) {
    let geometry = &image.geometry;
    let node = ExtentNode::parse(bytes, kind, depth, geometry).expect("a sound node");
    let mut again = bytes.to_vec();
    let mut rebuilt =
        ExtentNodeMut::init(&mut again, kind, node.depth(), geometry).expect("initialises");
    for (at, extent) in node.extents().enumerate() {
        rebuilt.insert_extent(at, extent).expect("goes back in");
        leaves.push(extent);
    }
    for (at, index) in node.indices().enumerate() {
        rebuilt.insert_index(at, index).expect("goes back in");
        let child = image.block(index.leaf);
        extent::verify_checksum(child, seed, geometry).expect("a right checksum");
        check_node(image, child, NodeKind::Block, Some(node.depth() - 1), seed, leaves);
    }
    if kind == NodeKind::Block {
        extent::update_checksum(&mut again, seed, geometry).expect("a sound header");
    }
    // Bytes past the last entry may hold anything; only the live part must be the same.
    let live = 12 + node.len() * 12;
    assert_eq!(again[..live], bytes[..live]);
}

/// Compares inodes with `imap` and `stat` of debugfs.
fn check_against_debugfs(image: &Image, descs: &[GroupDesc]) {
    let inodes = used_inodes(image, descs);
    assert!(inodes.len() >= 40, "only {} inodes are in use", inodes.len());
    let commands: Vec<String> = inodes
        .iter()
        .flat_map(|(ino, ..)| [format!("imap <{ino}>"), format!("stat <{ino}>")])
        .collect();
    let text = debugfs(&image.path, &commands, false);
    let answers: Vec<&str> = text.split("debugfs: imap ").skip(1).collect();
    assert_eq!(answers.len(), inodes.len());
    for ((ino, bytes, inode), answer) in inodes.iter().zip(answers) {
        check_answer(image, descs, *ino, bytes, inode, answer);
    }
}

fn check_answer(
    image: &Image,
    descs: &[GroupDesc],
    ino: InodeNo,
    bytes: &[u8],
    inode: &DiskInode,
    answer: &str,
) {
    let geometry = &image.geometry;
    let place = geometry.inode_location(ino).expect("a location");
    let block = descs[place.group.0 as usize].inode_table.0 + u64::from(place.table_block);
    let located = format!("located at block {block}, offset {:#06x}", place.offset_bytes);
    assert!(answer.contains(&located), "{located}: {answer}");
    let value = |mark: &str| -> &str {
        let at = answer.find(mark).unwrap_or_else(|| panic!("{mark} in {answer}"));
        answer[at + mark.len()..].split_whitespace().next().expect("a value")
    };
    assert_eq!(u16::from_str_radix(value("Mode:"), 8), Ok(inode.mode & 0o7777));
    assert_eq!(hex(value("Flags:")), inode.flags.bits());
    assert_eq!(value("User:"), inode.uid.to_string());
    assert_eq!(value("Group:"), inode.gid.to_string());
    assert_eq!(value("Links:"), inode.links_count.to_string());
    assert_eq!(value("Blockcount:"), inode.blocks_512.to_string());
    assert_eq!(value("File ACL:"), inode.file_acl.to_string());
    if inode.is_file() || inode.is_dir() {
        let size = answer.split("Size:").nth(1).and_then(|rest| rest.split_whitespace().next());
        assert_eq!(size, Some(inode.size.to_string().as_str()));
    }
    for (mark, time) in [("ctime:", inode.ctime), ("atime:", inode.atime), ("mtime:", inode.mtime)]
    {
        let (low, extra) = time.to_disk(inode.extra_isize >= 16);
        let mut parts = value(mark).split(':').map(hex);
        assert_eq!(parts.next(), Some(low), "{mark} of inode {ino}");
        assert_eq!(parts.next().unwrap_or(0), extra, "{mark} of inode {ino}");
    }
    if let Some(device) = inode.device() {
        let told = answer.split("Device major/minor number:").nth(1).expect("a device");
        let (major, minor) = (device.major, device.minor);
        assert!(told.trim_start().starts_with(&format!("{major:02}:{minor:02}")), "{told}");
        assert_eq!(device.to_i_block(), inode.i_block);
    }
    if let Some(target) = inode.fast_symlink(geometry) {
        let target = String::from_utf8_lossy(target);
        assert!(answer.contains(&format!("Fast link dest: \"{target}\"")), "{answer}");
    } else {
        assert!(
            !answer.contains("Fast link dest") || inode.flags.contains(InodeFlags::INLINE_DATA)
        );
    }
    if geometry.features.has_metadata_csum() {
        let low = u32::from(u16::from_le_bytes([bytes[0x7c], bytes[0x7d]]));
        let high = if inode.extra_isize >= 4 {
            u32::from(u16::from_le_bytes([bytes[0x82], bytes[0x83]]))
        } else {
            0
        };
        assert_eq!(hex(value("Inode checksum:")), high << 16 | low);
    }
}

fn check_mmp(image: &Image) {
    let block = image.sb.s_mmp_block.get();
    if block == 0 {
        return;
    }
    let bytes = image.block(BlockNo(block));
    let mmp = MmpBlock::decode(bytes, &image.geometry).expect("a sound MMP block");
    assert_eq!(mmp.seq, fjord_format::mmp::SEQ_CLEAN);
    let mut again = bytes.to_vec();
    mmp.encode(&mut again, &image.geometry).expect("has room");
    assert_eq!(again, bytes);
}

#[test]
fn every_structure_is_what_e2fsprogs_says() {
    for (name, args, size) in SETS {
        println!("feature set {name}");
        let image = Image::make(args, size);
        let (fields, told) = told_by_dumpe2fs(&image);
        check_superblock(&image, &fields);
        assert_eq!(told.len(), image.geometry.group_count as usize);
        let descs: Vec<GroupDesc> = image
            .groups()
            .zip(&told)
            .map(|(group, told)| check_group(&image, group, told))
            .collect();
        check_against_debugfs(&image, &descs);
        check_mmp(&image);
        image.dir.close().expect("the temporary directory goes away");
    }
}
