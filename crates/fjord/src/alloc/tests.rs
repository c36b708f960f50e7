//! Allocation on real images: parallel, across commits, at the end of space, on damage.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use fjord_format::InodeNo;
use fjord_format::types::{BlockNo, GroupNo};
use rustix::io::Errno;

use super::{Claim, Goal, Run};
use crate::attr::Cred;
use crate::fs::{FsInner, mount};
use crate::inode::{disk, table};
use crate::map;
use crate::namei;
use crate::options::MountOptions;
use crate::testing::{TestFs, quiet_options};

const SMALL_1K: &[&str] = &["-t", "ext4", "-b", "1024", "-m", "0", "-J", "size=1"];

fn anywhere(fs: &FsInner) -> Goal {
    Goal::for_inode(fs, InodeNo::ROOT, true)
}

/// Takes blocks under one handle after the other until none is left.
fn take_all(fs: &Arc<FsInner>, claim: Claim) -> Vec<Run> {
    let goal = anywhere(fs).with_claim(claim);
    let mut runs = Vec::new();
    loop {
        let h = fs.start(super::RUN_CREDITS).expect("a handle");
        match fs.alloc_blocks(&h, goal, 5000) {
            Ok(run) => runs.push(run),
            Err(error) => {
                assert!(error.is(Errno::NOSPC), "{error}");
                return runs;
            }
        }
    }
}

fn free(fs: &Arc<FsInner>, run: Run) -> crate::Result<()> {
    let h = fs.start(super::RUN_CREDITS * 2)?;
    fs.free_blocks(&h, run.start, u64::from(run.len))
}

#[test]
fn freed_blocks_come_back_with_the_commit_and_not_before() {
    let image = TestFs::new(SMALL_1K, 16);
    let fs = &image.fs;
    let runs = take_all(fs, Claim::Metadata);
    assert_eq!(fs.statfs().blocks_free, 0);
    let total: u32 = runs.iter().map(|run| run.len).sum();
    image.commit();
    for run in &runs {
        free(fs, *run).expect("blocks in use can be freed");
    }
    assert_eq!(fs.pending_free_blocks(), u64::from(total));
    assert!(take_all(fs, Claim::Metadata).is_empty(), "nothing may be reused before the commit");
    assert!(fs.reserve_blocks(1, true).expect_err("all is pending").is(Errno::NOSPC));
    image.commit();
    assert_eq!(fs.pending_free_blocks(), 0);
    let again: u32 = take_all(fs, Claim::Metadata).iter().map(|run| run.len).sum();
    assert_eq!(again, total);
}

#[test]
fn blocks_freed_by_a_transaction_that_fails_never_come_back() {
    let image = TestFs::new(SMALL_1K, 16);
    let fs = &image.fs;
    let runs = take_all(fs, Claim::Metadata);
    image.commit();
    free(fs, runs[0]).expect("blocks in use can be freed");
    fs.journal().shutdown();
    let _ = fs.journal().commit_running();
    assert_eq!(fs.pending_free_blocks(), u64::from(runs[0].len));
    assert!(fs.pick_blocks(anywhere(fs), 1).is_err());
}

#[test]
fn double_frees_and_foreign_blocks_are_damage() {
    let image = TestFs::new(SMALL_1K, 40);
    let fs = &image.fs;
    let journal = table::get(fs, InodeNo::JOURNAL).expect("a journal");
    let found = map::lookup(fs, &journal, &journal.state.read(), 0, 1).expect("its first block");
    let map::MapKind::Written(journal_start) = found.kind else { panic!("{found:?}") };
    let h = fs.start(40).expect("a handle");
    let run = fs.alloc_blocks(&h, anywhere(fs), 8).expect("room");
    fs.free_blocks(&h, run.start, 8).expect("in use");
    let corrupt = |start: BlockNo, len: u64| {
        let error = fs.free_blocks(&h, start, len).expect_err("must not be freed");
        assert!(error.is_corrupt(), "{error}");
    };
    corrupt(run.start, 8);
    corrupt(run.start, 1);
    let table = fs.inode_table(GroupNo(0)).expect("a descriptor");
    corrupt(table, 1);
    corrupt(BlockNo(1), 1);
    corrupt(BlockNo(0), 1);
    corrupt(BlockNo(u64::MAX), 1);
    corrupt(BlockNo(fs.geo.block_count - 1), 2);
    corrupt(BlockNo(2), u64::MAX);
    // The journal's blocks are nobody's either.
    corrupt(journal_start, 1);
    assert!(fs.check_owned(InodeNo(12), journal_start, 1).is_err());
    // A group whose bitmap is not initialised has nothing to free.
    let last = GroupNo(fs.geo.group_count - 2);
    corrupt(BlockNo(fs.geo.group_first_block(last).0 + 4000), 1);
}

#[test]
fn every_reserved_block_is_found_by_parallel_pickers() {
    let image = TestFs::new(SMALL_1K, 24);
    let fs = &image.fs;
    let mut reserved = 0;
    while fs.reserve_blocks(16, true).is_ok() {
        reserved += 16;
    }
    while fs.reserve_blocks(1, true).is_ok() {
        reserved += 1;
    }
    assert!(reserved > 10_000, "{reserved} of {}", fs.statfs().blocks_free);
    // Others get nothing but what the margin for metadata holds.
    let h = fs.start(10).expect("a handle");
    assert!(fs.alloc_blocks(&h, anywhere(fs), 1).expect_err("all is reserved").is(Errno::NOSPC));
    h.stop();
    let taken: u64 = take_all(fs, Claim::Metadata).iter().map(|run| u64::from(run.len)).sum();
    assert!(taken > 1000, "the margin is {taken}");
    let runs: Vec<Run> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4u64)
            .map(|thread| {
                scope.spawn(move || {
                    let mut runs = Vec::new();
                    let mut left = (reserved / 4) as u32;
                    while left > 0 {
                        let near = BlockNo(1 + (thread * 5000 + u64::from(left) * 37) % 24_000);
                        let goal = Goal::near(fs, near);
                        let run = fs.pick_blocks(goal, left.min(13)).expect("it is reserved");
                        left -= run.len;
                        if left.is_multiple_of(5) {
                            fs.unpick(run);
                            left += run.len;
                            let run = fs.pick_blocks(goal, left.min(9)).expect("it is reserved");
                            left -= run.len;
                            runs.push(run);
                        } else {
                            runs.push(run);
                        }
                    }
                    runs
                })
            })
            .collect();
        threads.into_iter().flat_map(|t| t.join().expect("no panic")).collect()
    });
    let mut seen = HashSet::new();
    for run in &runs {
        for block in run.start.0..run.start.0 + u64::from(run.len) {
            assert!(seen.insert(block), "block {block} was picked twice");
        }
    }
    for run in runs {
        let h = fs.start(super::RUN_CREDITS).expect("a handle");
        fs.use_picked(&h, run, run.len).expect("it is picked");
    }
    assert_eq!(fs.groups.account.reserved_blocks(), reserved % 4);
}

#[test]
fn threads_that_allocate_and_free_leave_a_clean_image() {
    for args in [
        &["-t", "ext4", "-b", "1024", "-m", "0"][..],
        &["-t", "ext4", "-b", "4096", "-m", "0", "-g", "8192"][..],
    ] {
        let image = TestFs::new(args, 64);
        let fs = &image.fs;
        std::thread::scope(|scope| {
            for thread in 0..4u32 {
                let inode = image.create(&format!("file{thread}"));
                scope.spawn(move || {
                    let mut state = inode.state.write();
                    for round in 0..200u32 {
                        let credits = map::credits_insert(fs, 1) + map::credits_remove(fs);
                        let h = fs.start(credits + disk::STORE_CREDITS).expect("a handle");
                        let at = round * 40;
                        let goal = Goal::for_file(fs, &inode, &state, at).expect("a goal");
                        let run = fs.alloc_blocks(&h, goal, 1 + round % 37).expect("room");
                        map::insert(fs, &h, &inode, &mut state, at, run.start, run.len, true)
                            .expect("a hole");
                        if round % 3 == 0 && round > 6 {
                            let from = u64::from(at - 200);
                            map::remove(fs, &h, &inode, &mut state, from, from + 50)
                                .expect("mapped");
                        }
                        state.disk.size = u64::from(at + 40) * u64::from(fs.geo.block_size);
                        state.size = state.disk.size;
                        disk::store(fs, &h, &inode, &mut state).expect("stored");
                        h.stop();
                        if round % 50 == thread {
                            fs.journal().commit_running().expect("committed");
                        }
                    }
                });
            }
        });
        image.finish();
    }
}

#[test]
fn files_that_grow_in_turns_stay_in_one_piece() {
    let image = TestFs::new(&["-t", "ext4", "-b", "4096"], 64);
    let fs = &image.fs;
    let files: Vec<_> = (0..3).map(|i| image.create(&format!("file{i}"))).collect();
    for file in &files {
        file.refs.fetch_add(1, Ordering::Relaxed);
    }
    for lblk in 0..600u32 {
        for inode in &files {
            let mut state = inode.state.write();
            fs.reserve_blocks(1, false).expect("room");
            let goal = Goal::for_file(fs, inode, &state, lblk).expect("a goal");
            let run = fs.pick_for_file(&mut state, goal, lblk, 1).expect("reserved");
            let h = fs.start(map::credits_insert(fs, 1) + disk::STORE_CREDITS).expect("a handle");
            fs.use_picked(&h, run, 1).expect("picked");
            map::insert(fs, &h, inode, &mut state, lblk, run.start, 1, true).expect("a hole");
            state.disk.size = u64::from(lblk + 1) * 4096;
            disk::store(fs, &h, inode, &mut state).expect("stored");
        }
    }
    for inode in &files {
        let mut state = inode.state.write();
        let mut extents = 0;
        let mut at = 0;
        while at < 600 {
            at += map::lookup(fs, inode, &state, at, 600 - at).expect("mapped").len;
            extents += 1;
        }
        assert!(extents <= 4, "{extents} extents: more than fit an inode");
        fs.discard_window(&mut state);
        assert!(state.prealloc.is_none());
        drop(state);
        inode.refs.fetch_sub(1, Ordering::Relaxed);
    }
    image.finish();
}

#[test]
fn inode_numbers_come_back_with_the_commit_and_all_of_them_can_be_had() {
    let image = TestFs::new(&["-t", "ext4", "-b", "1024", "-N", "128", "-m", "0"], 24);
    let fs = &image.fs;
    let free = fs.groups.free_inodes_total();
    let mut taken = Vec::new();
    let error = loop {
        let h = fs.start(super::INODE_CREDITS).expect("a handle");
        match fs.alloc_inode(&h, InodeNo::ROOT, false) {
            Ok(ino) => taken.push(ino),
            Err(error) => break error,
        }
    };
    assert!(error.is(Errno::NOSPC));
    assert_eq!(taken.len(), free as usize);
    assert_eq!(fs.groups.free_inodes_total(), 0);
    assert_eq!(taken.iter().collect::<HashSet<_>>().len(), taken.len());
    image.commit();
    let h = fs.start(40).expect("a handle");
    fs.free_inode(&h, taken[7], false).expect("in use");
    assert!(!fs.inode_in_use(taken[7]).expect("a bitmap"));
    assert!(fs.free_inode(&h, taken[7], false).expect_err("free already").is_corrupt());
    assert!(fs.free_inode(&h, InodeNo::ROOT, true).expect_err("not a user's").is_corrupt());
    assert!(fs.free_inode(&h, InodeNo(u32::MAX), true).expect_err("none such").is_corrupt());
    assert!(fs.alloc_inode(&h, InodeNo::ROOT, false).expect_err("pending").is(Errno::NOSPC));
    h.stop();
    image.commit();
    let h = fs.start(super::INODE_CREDITS).expect("a handle");
    assert_eq!(fs.alloc_inode(&h, InodeNo::ROOT, false).expect("committed"), taken[7]);
}

#[test]
fn every_feature_mix_stays_clean() {
    let sets: &[&[&str]] = &[
        &["-t", "ext4", "-b", "1024"],
        &["-t", "ext4", "-b", "4096", "-g", "2048"],
        &["-t", "ext4", "-b", "1024", "-O", "^metadata_csum,uninit_bg"],
        &["-t", "ext4", "-b", "1024", "-O", "^metadata_csum,uninit_bg,^64bit,^flex_bg"],
        &["-t", "ext4", "-b", "1024", "-O", "^metadata_csum,^uninit_bg"],
        &["-t", "ext4", "-b", "1024", "-O", "meta_bg,^resize_inode"],
        &["-t", "ext4", "-b", "1024", "-O", "meta_bg,^resize_inode,^flex_bg,^64bit"],
        &["-t", "ext4", "-b", "1024", "-O", "^flex_bg"],
        &["-t", "ext4", "-b", "1024", "-O", "metadata_csum_seed,^64bit"],
        &["-t", "ext4", "-b", "1024", "-O", "sparse_super2"],
        &["-t", "ext4", "-b", "1024", "-I", "128"],
        &["-t", "ext3", "-b", "1024"],
        &["-t", "ext2", "-b", "1024"],
        &["-t", "ext2", "-b", "1024", "-O", "^sparse_super,^resize_inode", "-r", "1"],
        &["-t", "ext4", "-b", "65536"],
    ];
    for args in sets {
        let image = TestFs::new(args, 96);
        let fs = &image.fs;
        let root = table::get(fs, InodeNo::ROOT).expect("a root");
        for i in 0..24u32 {
            let name = format!("dir{i}");
            let dir = namei::mkdir(fs, &root, name.as_bytes(), 0o755, &Cred::root())
                .unwrap_or_else(|error| panic!("{args:?}: {error}"));
            let dir = table::get(fs, dir.ino()).expect("made");
            for j in 0..20 {
                let name = format!("file{j}");
                let made = namei::create(fs, &dir, name.as_bytes(), 0o644, &Cred::root());
                let file = made.unwrap_or_else(|error| panic!("{args:?}: {error}"));
                file.write(0, &vec![i as u8; 3000 * j]).expect("room");
            }
            if i % 3 == 0 {
                namei::unlink(fs, &dir, b"file3").expect("there");
                namei::unlink(fs, &dir, b"file17").expect("there");
            }
        }
        let free = fs.groups.free_blocks_total();
        fs.sync().expect("synced");
        let info = {
            assert!(fs.groups.free_blocks_total() < free, "{args:?}");
            (fs.groups.free_blocks_total(), fs.groups.free_inodes_total())
        };
        let sums = (0..fs.geo.group_count).fold((0, 0), |sum, group| {
            let desc = fs.read_desc(GroupNo(group)).expect("a descriptor");
            (sum.0 + u64::from(desc.free_clusters), sum.1 + desc.free_inodes)
        });
        assert_eq!(info, sums, "{args:?}");
        image.finish();
    }
}

#[test]
fn bigalloc_is_read_and_never_written() {
    let args = ["-t", "ext4", "-b", "1024", "-O", "bigalloc", "-C", "16384"];
    let dir = tempfile::tempdir().expect("a directory");
    let device = crate::testing::make_image(&dir, &args, 64);
    assert!(mount::open_device(device.clone(), &quiet_options()).is_err());
    let options = MountOptions { read_only: true, ..quiet_options() };
    let fs = mount::open_device(device, &options).expect("readable");
    let stat = fs.statfs();
    assert!(stat.blocks_free > stat.blocks / 2 && stat.blocks_free <= stat.blocks, "{stat:?}");
    assert!(table::get(&fs, InodeNo::ROOT).is_ok());
    assert!(fs.start(1).is_err());
}

#[test]
fn damaged_bitmaps_and_descriptors_are_found_before_they_do_harm() {
    // A bitmap that does not agree with its descriptor, without checksums to tell.
    let args = ["-t", "ext4", "-b", "1024", "-O", "^metadata_csum,^uninit_bg"];
    let image = TestFs::new(&args, 24);
    let desc = image.fs.read_desc(GroupNo(0)).expect("a descriptor");
    image.damage(desc.block_bitmap, 900, &[0xff; 8]);
    image.damage(desc.inode_bitmap, 100, &[0xff; 8]);
    let h = image.fs.start(20).expect("a handle");
    let goal = Goal::near(&image.fs, BlockNo(5000));
    assert!(image.fs.alloc_blocks(&h, goal, 1).expect_err("damaged").is_corrupt());
    assert!(image.fs.free_blocks(&h, BlockNo(7200), 1).expect_err("damaged").is_corrupt());
    let error = image.fs.alloc_inode(&h, InodeNo::ROOT, false);
    assert!(error.is_ok_and(|ino| ino.0 > image.fs.geo.inodes_per_group), "the group is not used");
    drop(h);

    // One with a wrong checksum.
    let image = TestFs::new(&["-t", "ext4", "-b", "1024"], 24);
    let desc = image.fs.read_desc(GroupNo(0)).expect("a descriptor");
    image.damage(desc.block_bitmap, 900, &[0xff; 8]);
    let h = image.fs.start(20).expect("a handle");
    let goal = Goal::near(&image.fs, BlockNo(5000));
    assert!(image.fs.alloc_blocks(&h, goal, 1).expect_err("damaged").is_corrupt());
    drop(h);

    // A descriptor that points elsewhere.
    for field in 0..3u64 {
        let image = TestFs::new(&["-t", "ext4", "-b", "1024", "-O", "^metadata_csum"], 24);
        image.fs.unmount().expect("clean");
        let first = image.fs.geo.desc_block_location(0).expect("descriptors");
        image.damage(first, field * 4, &[0xff; 4]);
        let error = mount::open_device(image.device.clone(), &quiet_options());
        assert!(error.is_err_and(|error| error.is_corrupt()), "field {field}");
    }
}

#[test]
fn trim_discards_what_is_free_and_nothing_else() {
    let image = TestFs::new(&["-t", "ext4", "-b", "1024", "-m", "0"], 32);
    let fs = &image.fs;
    let root = table::get(fs, InodeNo::ROOT).expect("a root");
    let kept = namei::create(fs, &root, b"kept", 0o644, &Cred::root()).expect("made");
    let gone = namei::create(fs, &root, b"gone", 0o644, &Cred::root()).expect("made");
    let data: Vec<u8> = (0..3_000_000u32).map(|i| (i / 7) as u8).collect();
    kept.write(0, &data).expect("room");
    gone.write(0, &data).expect("room");
    fs.sync().expect("synced");
    let full = image.device.allocated_bytes();
    drop(gone);
    namei::unlink(fs, &root, b"gone").expect("there");
    let before = fs.trim(0, u64::MAX, 0).expect("trimmed");
    image.commit();
    let after = fs.trim(0, u64::MAX, 0).expect("trimmed");
    assert!(before > 0 && after >= 2_900_000, "{before}, {after}");
    assert_eq!(fs.trim(0, u64::MAX, 0).expect("trimmed"), 0, "nothing is trimmed twice");
    assert!(image.device.allocated_bytes() + 2_500_000 < full);
    assert!(fs.trim(u64::MAX, 1, 0).expect_err("past the end").is(Errno::INVAL));
    let mut read = vec![0; data.len()];
    assert_eq!(kept.read(0, &mut read).expect("readable"), data.len());
    assert!(read == data);
    drop(kept);
    image.finish();
}

#[test]
fn discard_follows_the_commit() {
    let options = MountOptions { discard: true, ..quiet_options() };
    let image = TestFs::with_options(SMALL_1K, 16, &options);
    let fs = &image.fs;
    let runs = take_all(fs, Claim::Metadata);
    for run in &runs {
        free(fs, *run).expect("in use");
    }
    image.commit();
    let total: u64 = runs.iter().map(|run| u64::from(run.len)).sum();
    fs.reserve_blocks(total / 2, true).expect("discards are waited for when space is short");
    assert!(fs.device.stats().discards.request_count > 0);
}

/// Fills an image with files of all sizes, empties half of it and fills it again: every
/// write that succeeded is there after a new mount, whatever the writes after it met.
#[test]
fn a_full_image_keeps_what_it_took() {
    let sets: &[&[&str]] = &[
        SMALL_1K,
        &["-t", "ext4", "-b", "4096"],
        &["-t", "ext3", "-b", "1024", "-J", "size=1"],
        &["-t", "ext2", "-b", "1024"],
    ];
    for args in sets {
        let image = TestFs::new(args, 16);
        let fs = &image.fs;
        let root = table::get(fs, InodeNo::ROOT).expect("a root");
        let mut kept: Vec<(String, Vec<u8>)> = Vec::new();
        for round in 0..3usize {
            let mut failures = 0;
            for i in 0.. {
                let name = format!("file{round}.{i}");
                let made = namei::create(fs, &root, name.as_bytes(), 0o644, &Cred::root());
                let Ok(file) = made else {
                    assert!(made.is_err_and(|e| e.is(Errno::NOSPC)), "{args:?}");
                    failures += 1;
                    break;
                };
                let mut content = Vec::new();
                // Holes between the pieces cost nodes of the map.
                for piece in 0..1 + i * 7 % 60 {
                    let data = vec![(i + piece) as u8 | 1; 1 + (i * 131 + piece * 977) % 5000];
                    let offset = content.len() + piece % 3 * 4096;
                    let options = crate::file::write::WriteOptions {
                        use_reserve: true,
                        ..Default::default()
                    };
                    match file.write_with(offset as u64, &data, options) {
                        Ok(written) => {
                            content.resize(offset, 0);
                            content.extend_from_slice(&data[..written]);
                        }
                        Err(error) => {
                            assert!(error.is(Errno::NOSPC), "{args:?}: {error}");
                            failures += 1;
                            break;
                        }
                    }
                }
                kept.push((name, content));
                if failures > 20 {
                    break;
                }
            }
            assert!(failures > 0, "{args:?}: the image never was full");
            fs.sync().expect("what was accepted can be written");
            if round < 2 {
                let mut index = 0;
                kept.retain(|(name, _)| {
                    index += 1;
                    if index % 2 == 0 {
                        namei::unlink(fs, &root, name.as_bytes()).expect("there");
                    }
                    index % 2 != 0
                });
            }
        }
        fs.unmount().expect("clean");
        let again = mount::open_device(image.device.clone(), &quiet_options()).expect("mounts");
        let root = table::get(&again, InodeNo::ROOT).expect("a root");
        for (name, content) in &kept {
            let file = namei::lookup(&again, &root, name.as_bytes()).expect("there");
            let mut read = vec![0; content.len() + 1];
            let len = file.read(0, &mut read).expect("readable");
            assert!(len == content.len() && read[..len] == content[..], "{args:?}: {name}");
        }
        again.unmount().expect("clean");
        image.finish();
    }
}
