//! Directory blocks, indexes, inline directories, the orphan file.

use fjord_format::dirent::{self, DirEntry, FileType, Inserted};
use fjord_format::hash::{HashKind, HashSeed, HashVersion, dirhash};
use fjord_format::htree::{self, Depth, DxKind};
use fjord_format::inline_data::{self, InlineData, InlineDir};
use fjord_format::orphan_file;
use fjord_format::types::{BlockNo, InodeNo, LogicalBlock};
use fjord_format::xattr::parse_ibody;

use super::{Env, pick};

const SEED: u32 = 0x1234_5678;

fn hash_version(bytes: &[u8]) -> HashVersion {
    let kinds = [HashKind::Legacy, HashKind::HalfMd4, HashKind::Tea];
    HashVersion { kind: kinds[pick(bytes, 7) as usize % 3], unsigned: pick(bytes, 8) & 1 == 1 }
}

/// Names of a valid area, sorted; `None` when the area breaks a rule.
fn names(env: &Env, area: &[u8]) -> Option<Vec<(Vec<u8>, InodeNo)>> {
    let mut names = Vec::new();
    for entry in dirent::entries(area, &env.dir) {
        let DirEntry { name, inode, .. } = entry.ok()?;
        names.push((name.to_vec(), inode?));
    }
    names.sort();
    Some(names)
}

/// A directory block: any bytes.
pub fn dirent_block(env: &Env, bytes: &[u8]) {
    let mut block = bytes.to_vec();
    block.resize(env.dir.block_bytes, 0);
    let _ = dirent::verify_checksum(&block, &env.dir, SEED);
    let Ok(area) = env.dir.entries_area(&block) else { unreachable!("the block is whole") };
    let records: usize = dirent::records(area, &env.dir).count();
    assert!(records <= area.len() / 12 + 1);
    let _ = dirent::dotdot(area, &env.dir);
    let _ = dirent::is_empty(area, &env.dir);
    let Some(before) = names(env, area) else { return };
    edit_area(env, &block, &before);
    split(env, &block, &before);
    index(env, &block, &before);
}

fn edit_area(env: &Env, block: &[u8], before: &[(Vec<u8>, InodeNo)]) {
    let mut copy = block.to_vec();
    let area = env.dir.entries_area_mut(&mut copy).expect("the block is whole");
    for (name, _) in before {
        let found = dirent::find(area, &env.dir, name).expect("a valid area");
        assert!(found.is_some_and(|entry| entry.name == name));
    }
    let name = vec![b'n'; 1 + pick(block, 1) as usize % 255];
    let inode = InodeNo(1 + pick(block, 2) % env.dir.inodes_count);
    let room = dirent::has_room(area, &env.dir, name.len()).expect("a valid area");
    let mut expected = before.to_vec();
    match dirent::insert(area, &env.dir, &name, inode, FileType::Fifo).expect("a valid area") {
        Inserted::At(offset) => {
            assert!(room);
            let entry = env.dir.entry_at(area, offset).expect("just written");
            assert!(entry.name == name && entry.inode == Some(inode));
            expected.push((name, inode));
            expected.sort();
        }
        Inserted::NoRoom => assert!(!room),
        Inserted::Exists(_) => assert!(before.iter().any(|(known, _)| *known == name)),
    }
    assert_eq!(names(env, area).as_ref(), Some(&expected));
    // Remove some entries, wherever they are.
    let keep = (before.len() / 2).max(expected.len().saturating_sub(16));
    while expected.len() > keep {
        let victim = expected.swap_remove(pick(block, expected.len()) as usize % expected.len());
        let offset = dirent::entries(area, &env.dir)
            .filter_map(Result::ok)
            .find(|entry| entry.name == victim.0 && entry.inode == Some(victim.1))
            .map(|entry| entry.offset);
        dirent::remove(area, &env.dir, offset.expect("it is there")).expect("a valid area");
    }
    expected.sort();
    assert_eq!(names(env, area), Some(expected));
}

fn split(env: &Env, block: &[u8], before: &[(Vec<u8>, InodeNo)]) {
    let (mut low, mut high) = (block.to_vec(), vec![0; block.len()]);
    let version = hash_version(block);
    let seed = HashSeed([1, 2, 3, 4]);
    let Ok(split) = dirent::split_leaf(&mut low, &mut high, &env.dir, version, seed) else {
        assert!(before.len() < 2);
        assert_eq!(low, block);
        return;
    };
    let part = |block| names(env, env.dir.entries_area(block).expect("whole")).expect("valid");
    let (lower, upper) = (part(&low), part(&high));
    let hash = |name: &[u8]| dirhash(name, version, seed).hash;
    assert!(lower.iter().all(|(name, _)| hash(name) <= split.first_hash));
    assert!(upper.iter().all(|(name, _)| hash(name) >= split.first_hash));
    assert_eq!(split.continued, lower.iter().any(|(name, _)| hash(name) == split.first_hash));
    let mut all = [lower, upper].concat();
    all.sort();
    assert_eq!(all, before);
    dirent::set_checksum(&mut high, &env.dir, SEED).expect("a split leaf has a tail");
    dirent::verify_checksum(&high, &env.dir, SEED).expect("just set");
}

fn index(env: &Env, block: &[u8], before: &[(Vec<u8>, InodeNo)]) {
    let (mut root, mut leaf) = (block.to_vec(), vec![0; block.len()]);
    let version = hash_version(block);
    if htree::make_indexed(&mut root, &mut leaf, &env.dir, version, LogicalBlock(1)).is_err() {
        assert_eq!(root, block);
        return;
    }
    let (_, entries) = htree::parse_root(&root, &env.dir, Depth::new(false)).expect("just made");
    assert_eq!(entries.count(), 1);
    let mut moved = names(env, env.dir.entries_area(&leaf).expect("whole")).expect("valid");
    let dots = names(env, &root[..24]).unwrap_or_default();
    moved.extend(dots);
    let count =
        |list: &[(Vec<u8>, InodeNo)]| list.iter().filter(|(n, _)| n != b"." && n != b"..").count();
    assert_eq!(count(&moved), count(before));
}

/// An index block: any bytes.
pub fn htree_block(env: &Env, bytes: &[u8]) {
    let mut block = bytes.to_vec();
    block.resize(env.dir.block_bytes, 0);
    let _ = htree::parse_root(&block, &env.dir, Depth::of(&env.geometry));
    let _ = htree::root_parent(&block, &env.dir);
    for kind in [DxKind::Root, DxKind::Node] {
        let _ = htree::verify_checksum(&block, kind, &env.dir, SEED);
        let Ok(entries) = htree::parse(&block, kind, &env.dir) else { continue };
        for salt in 0..4 {
            let hash = pick(&block, salt);
            let found = entries.search(hash);
            assert!(found < entries.count());
            if entries.is_sorted() {
                assert!(found == 0 || entries.hash(found).expect("found") <= hash);
                let next = entries.hash(found + 1);
                assert!(next.is_err() || next.expect("checked") > hash);
            }
        }
        for at in 0..entries.count() {
            entries.block(at).expect("counted");
            let _ = entries.continues(at, pick(&block, at));
        }
        edit_index(env, &block, kind);
    }
}

fn edit_index(env: &Env, block: &[u8], kind: DxKind) {
    let mut copy = block.to_vec();
    let count = |block: &[u8], kind| htree::parse(block, kind, &env.dir).expect("valid").count();
    let before = count(&copy, kind);
    let after = pick(block, 3) as usize % before;
    if htree::insert(&mut copy, kind, &env.dir, after, 42, LogicalBlock(7)).is_ok() {
        assert_eq!(count(&copy, kind), before + 1);
        let entries = htree::parse(&copy, kind, &env.dir).expect("valid");
        assert_eq!(entries.hash(after + 1), Ok(42));
        assert_eq!(entries.block(after + 1), Ok(LogicalBlock(7)));
    } else {
        assert_eq!(before, htree::limit(kind, &env.dir));
    }
    let total = count(&copy, kind);
    let mut new = vec![0; block.len()];
    match kind {
        DxKind::Node => {
            if let Ok(split) = htree::split_node(&mut copy, &mut new, &env.dir) {
                let parts = (count(&copy, kind), count(&new, kind));
                assert_eq!(parts, (split.stayed, total - split.stayed));
            }
        }
        DxKind::Root => {
            let depth = Depth::new(true);
            if htree::grow_root(&mut copy, &mut new, &env.dir, depth, LogicalBlock(9)).is_ok() {
                assert_eq!((count(&copy, kind), count(&new, DxKind::Node)), (1, total));
            }
        }
    }
    htree::set_checksum(&mut copy, kind, &env.dir, SEED).expect("a valid block");
    htree::verify_checksum(&copy, kind, &env.dir, SEED).expect("just set");
}

/// An inode with inline data: `i_block` and the attribute area behind it.
pub fn inline(env: &Env, bytes: &[u8]) {
    let Some((head, area)) = bytes.split_first_chunk::<60>() else { return };
    let view = parse_ibody(area, &env.xattr).ok().flatten();
    let capacity = inline_data::capacity_bytes(area.len(), view.as_ref());
    assert!(capacity <= 60 + area.len());
    let Ok(data) = InlineData::parse(head, view.as_ref()) else { return };
    for size in [0, 59, 60, 61, data.room_bytes() as u64, u64::from(pick(bytes, 1)), u64::MAX] {
        let Ok(contents) = data.contents(size) else {
            assert!(size > data.room_bytes() as u64);
            continue;
        };
        let (again, tail) = inline_data::split(&contents);
        assert_eq!([&again[..], tail].concat()[..contents.len()], contents);
    }
    let Ok(dir) = InlineDir::parse(data, &env.dir) else { return };
    let mut block = vec![0; env.dir.block_bytes];
    let inode = InodeNo(1 + pick(bytes, 2) % env.dir.inodes_count);
    if dir.to_block(&mut block, &env.dir, inode).is_err() {
        return;
    }
    let count = |area| names(env, area).expect("a valid area").len();
    let area = env.dir.entries_area(&block).expect("whole");
    assert_eq!(count(area), 2 + count(dir.head) + count(dir.tail));
    assert_eq!(dirent::dotdot(area, &env.dir).expect("valid").inode, Some(dir.parent));
}

/// A block of the orphan file: any bytes.
pub fn orphan_block(env: &Env, bytes: &[u8]) {
    let mut block = bytes.to_vec();
    let _ = orphan_file::verify(&block, Some(SEED), BlockNo(77));
    block.resize(env.dir.block_bytes, 0);
    let used = orphan_file::orphans(&block).count();
    let slots = orphan_file::slot_count(block.len());
    let from = pick(bytes, 1) as usize;
    match orphan_file::free_slot(&block, from % (slots + 9)) {
        Some(slot) => {
            orphan_file::set_slot(&mut block, slot, Some(InodeNo(12))).expect("a slot");
            assert_eq!(orphan_file::orphans(&block).count(), used + 1);
        }
        None => assert_eq!(used, slots),
    }
    orphan_file::seal(&mut block, Some(SEED), BlockNo(77)).expect("a whole block");
    orphan_file::verify(&block, Some(SEED), BlockNo(77)).expect("just sealed");
    assert!(orphan_file::set_slot(&mut block, slots, None).is_err());
}
