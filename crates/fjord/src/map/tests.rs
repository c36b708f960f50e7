//! Both kinds of map against a model, with e2fsck as the judge.

use std::collections::BTreeMap;
use std::sync::Arc;

use fjord_format::types::BlockNo;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError};

use super::{MapKind, Progress};
use crate::alloc::Goal;
use crate::inode::{Inode, disk};
use crate::map;
use crate::testing::TestFs;

type TestResult<T = ()> = Result<T, TestCaseError>;

/// Blocks of the file that tests work in.
const SPACE: u32 = 3000;

#[derive(Debug, Clone)]
enum Op {
    Insert { lblk: u32, len: u32, scatter: u32, written: bool },
    Remove { lblk: u32, len: u32 },
    MarkWritten { lblk: u32, len: u32 },
    MarkUnwritten { lblk: u32, len: u32 },
    Collapse { lblk: u32, len: u32 },
    Expand { lblk: u32, len: u32 },
    Comb { lblk: u32, count: u32, step: u32 },
    Commit,
}

fn op(extents: bool) -> impl Strategy<Value = Op> {
    let place = 0..SPACE;
    let len = prop_oneof![4 => 1u32..40, 1 => 1u32..600];
    let range = (place, len);
    let written = if extents { any::<bool>().boxed() } else { Just(true).boxed() };
    let insert = (range.clone(), any::<u32>(), written)
        .prop_map(|((lblk, len), scatter, written)| Op::Insert { lblk, len, scatter, written });
    let remove = range.clone().prop_map(|(lblk, len)| Op::Remove { lblk, len });
    let comb = (0..SPACE, 1u32..400, 2u32..4).prop_map(|(lblk, count, step)| Op::Comb {
        lblk,
        count,
        step,
    });
    if !extents {
        return prop_oneof![5 => insert, 3 => remove, 2 => comb, 1 => Just(Op::Commit)].boxed();
    }
    prop_oneof![
        5 => insert,
        3 => remove,
        2 => comb,
        2 => range.clone().prop_map(|(lblk, len)| Op::MarkWritten { lblk, len }),
        2 => range.clone().prop_map(|(lblk, len)| Op::MarkUnwritten { lblk, len }),
        1 => range.clone().prop_map(|(lblk, len)| Op::Collapse { lblk, len }),
        1 => range.prop_map(|(lblk, len)| Op::Expand { lblk, len }),
        1 => Just(Op::Commit),
    ]
    .boxed()
}

/// What should be mapped: physical block and whether it is written.
type Model = BTreeMap<u32, (u64, bool)>;

struct Tester {
    image: TestFs,
    inode: Arc<Inode>,
    model: Model,
    /// Far pieces of the file start here, to reach the higher levels of a tree.
    base: u32,
}

impl Tester {
    fn new(args: &[&str], size_mib: u32, base: u32) -> Tester {
        let image = TestFs::new(args, size_mib);
        let inode = image.create("file");
        Tester { image, inode, model: Model::new(), base }
    }

    fn with_handle<T>(
        &self,
        credits: u32,
        change: impl FnOnce(&fjord_journal::Handle, &mut crate::inode::InodeState) -> crate::Result<T>,
    ) -> crate::Result<T> {
        let fs = &self.image.fs;
        let mut state = self.inode.state.write();
        let handle = fs.start(credits + disk::STORE_CREDITS)?;
        let result = change(&handle, &mut state);
        disk::store(fs, &handle, &self.inode, &mut state)?;
        handle.stop();
        result
    }

    /// Maps one block after the other of a hole; `near` says where on the device.
    fn insert(&mut self, lblk: u32, len: u32, near: u64, written: bool) -> TestResult {
        let end = lblk + len;
        let mut at = lblk;
        while at < end {
            if self.model.contains_key(&at) {
                at += 1;
                continue;
            }
            let stop = self.model.range(at..end).next().map_or(end, |(l, _)| *l);
            let fs = self.image.fs.clone();
            let count = fs.geo.block_count;
            let block = BlockNo(fs.geo.first_data_block.0 + near % (count - 1));
            let goal = Goal::near(&fs, block);
            let goal = if map::has_extents(&self.inode.state.read()) {
                goal
            } else {
                goal.with_32bit_blocks()
            };
            let inode = self.inode.clone();
            let got = self.with_handle(map::credits_insert(&fs, 1), |h, state| {
                let run = fs.alloc_blocks(h, goal, stop - at)?;
                map::insert(&fs, h, &inode, state, at, run.start, run.len, written)?;
                Ok(run)
            });
            let run = match got {
                Ok(run) => run,
                Err(error) if error.is(rustix::io::Errno::NOSPC) => {
                    self.image.commit();
                    return Ok(());
                }
                Err(error) => return Err(TestCaseError::fail(error.to_string())),
            };
            for i in 0..run.len {
                self.model.insert(at + i, (run.start.0 + u64::from(i), written));
            }
            at += run.len;
        }
        Ok(())
    }

    fn remove(&mut self, lblk: u32, len: u32) -> TestResult {
        let fs = self.image.fs.clone();
        let inode = self.inode.clone();
        let (from, to) = (u64::from(lblk), u64::from(lblk) + u64::from(len));
        for _ in 0..10_000 {
            let progress = self
                .with_handle(map::credits_remove(&fs), |h, state| {
                    map::remove(&fs, h, &inode, state, from, to)
                })
                .map_err(|e| TestCaseError::fail(e.to_string()))?;
            if progress == Progress::Done {
                let gone: Vec<u32> = self.model.range(lblk..lblk + len).map(|(l, _)| *l).collect();
                for l in gone {
                    self.model.remove(&l);
                }
                return Ok(());
            }
        }
        Err(TestCaseError::fail("remove never ends"))
    }

    /// Marks the mapped parts of a range.
    fn mark(&mut self, lblk: u32, len: u32, written: bool) -> TestResult {
        let mut runs: Vec<(u32, u32)> = Vec::new();
        for (l, _) in self.model.range(lblk..lblk + len) {
            match runs.last_mut() {
                Some(run) if run.0 + run.1 == *l => run.1 += 1,
                _ => runs.push((*l, 1)),
            }
        }
        let fs = self.image.fs.clone();
        let inode = self.inode.clone();
        // Each extent may need a split of its own.
        for (start, count) in runs {
            let mut at = start;
            while at < start + count {
                let left = start + count - at;
                let found = map::lookup(&fs, &inode, &inode.state.read(), at, left)
                    .map_err(|e| TestCaseError::fail(e.to_string()))?;
                self.with_handle(map::credits_insert(&fs, 1), |h, state| {
                    if written {
                        map::mark_written(&fs, h, &inode, state, at, found.len)
                    } else {
                        map::mark_unwritten(&fs, h, &inode, state, at, found.len)
                    }
                })
                .map_err(|e| TestCaseError::fail(e.to_string()))?;
                at += found.len;
            }
            for (_, entry) in self.model.range_mut(start..start + count) {
                entry.1 = written;
            }
        }
        Ok(())
    }

    fn shift(&mut self, lblk: u32, len: u32, up: bool) -> TestResult {
        if !up {
            self.remove(lblk, len)?;
        }
        let fs = self.image.fs.clone();
        let mut state = self.inode.state.write();
        let result = if up {
            map::expand(&fs, &self.inode, &mut state, lblk, len)
        } else {
            map::collapse(&fs, &self.inode, &mut state, lblk, len)
        };
        result.map_err(|e| TestCaseError::fail(e.to_string()))?;
        let tail = self.model.split_off(&lblk);
        self.model.extend(tail.into_iter().map(|(l, e)| (if up { l + len } else { l - len }, e)));
        Ok(())
    }

    fn apply(&mut self, op: &Op) -> TestResult {
        let base = self.base;
        match *op {
            Op::Insert { lblk, len, scatter, written } => {
                self.insert(base + lblk, len, u64::from(scatter), written)
            }
            Op::Remove { lblk, len } => self.remove(base + lblk, len),
            Op::MarkWritten { lblk, len } => self.mark(base + lblk, len, true),
            Op::MarkUnwritten { lblk, len } => self.mark(base + lblk, len, false),
            Op::Collapse { lblk, len } => self.shift(base + lblk, len, false),
            Op::Expand { lblk, len } => self.shift(base + lblk, len, true),
            Op::Comb { lblk, count, step } => {
                let extents = map::has_extents(&self.inode.state.read());
                (0..count).try_for_each(|i| {
                    let written = !extents || i % 3 != 0;
                    self.insert(base + lblk + i * step, 1, u64::from(i) * 7, written)
                })
            }
            Op::Commit => {
                self.image.commit();
                Ok(())
            }
        }
    }

    /// Every block of the model is there, and nothing else.
    fn compare(&self) -> TestResult {
        let fs = &self.image.fs;
        let state = self.inode.state.read();
        let mut at = 0u64;
        let mut expected = self.model.iter().peekable();
        while at < u64::from(u32::MAX) {
            let found = map::lookup(fs, &self.inode, &state, at as u32, u32::MAX)
                .map_err(|e| TestCaseError::fail(e.to_string()))?;
            let (start, written) = match found.kind {
                MapKind::Hole => {
                    at += u64::from(found.len);
                    if let Some((next, _)) = expected.peek() {
                        prop_assert!(u64::from(**next) >= at, "block {next} is a hole");
                    }
                    continue;
                }
                MapKind::Written(start) => (start, true),
                MapKind::Unwritten(start) => (start, false),
            };
            for i in 0..u64::from(found.len) {
                let want = expected.next();
                prop_assert_eq!(want, Some((&((at + i) as u32), &(start.0 + i, written))));
            }
            at += u64::from(found.len);
        }
        prop_assert_eq!(expected.next(), None);
        Ok(())
    }

    /// Gives the file the size that its blocks ask for and lets e2fsck look at it.
    fn finish(self) -> TestResult {
        self.compare()?;
        let end = self.model.keys().next_back().map_or(0, |last| u64::from(*last) + 1);
        self.with_handle(0, |_, state| {
            state.disk.size = end * u64::from(self.image.fs.geo.block_size);
            state.size = state.disk.size;
            Ok(())
        })
        .map_err(|e| TestCaseError::fail(e.to_string()))?;
        self.image.finish();
        Ok(())
    }
}

fn run(args: &[&str], size_mib: u32, base: u32, ops: &[Op]) -> TestResult {
    let mut tester = Tester::new(args, size_mib, base);
    for op in ops {
        tester.apply(op)?;
        tester.compare()?;
    }
    tester.finish()
}

const EXT4_1K: &[&str] = &["-t", "ext4", "-b", "1024", "-m", "0"];
const EXT4_4K: &[&str] = &["-t", "ext4", "-b", "4096", "-m", "0"];
const EXT4_OLD: &[&str] =
    &["-t", "ext4", "-b", "1024", "-m", "0", "-O", "^metadata_csum,uninit_bg,^64bit,^flex_bg"];
const EXT3_1K: &[&str] = &["-t", "ext3", "-b", "1024", "-m", "0"];
const EXT2_2K: &[&str] = &["-t", "ext2", "-b", "2048", "-m", "0"];

fn config(cases: u32) -> Config {
    // The seed of a failure is printed and the case shrunk; no file is left behind.
    Config { cases, failure_persistence: None, max_shrink_iters: 200, ..Config::default() }
}

proptest! {
    #![proptest_config(config(12))]

    #[test]
    fn extent_trees_agree_with_a_model_1k(ops in prop::collection::vec(op(true), 1..40)) {
        run(EXT4_1K, 24, 0, &ops)?;
    }

    #[test]
    fn extent_trees_agree_with_a_model_4k(ops in prop::collection::vec(op(true), 1..40)) {
        run(EXT4_4K, 64, 1_000_000, &ops)?;
    }

    #[test]
    fn extent_trees_agree_with_a_model_without_checksums(
        ops in prop::collection::vec(op(true), 1..40),
    ) {
        run(EXT4_OLD, 24, 0, &ops)?;
    }

    #[test]
    fn block_maps_agree_with_a_model_1k(
        ops in prop::collection::vec(op(false), 1..40),
        base in prop_oneof![Just(0u32), Just(200), Just(65_000), Just(66_000)],
    ) {
        run(EXT3_1K, 24, base, &ops)?;
    }

    #[test]
    fn block_maps_agree_with_a_model_2k(
        ops in prop::collection::vec(op(false), 1..40),
        base in prop_oneof![Just(0u32), Just(262_000)],
    ) {
        run(EXT2_2K, 24, base, &ops)?;
    }
}

#[test]
fn a_tree_of_depth_three_grows_and_shrinks_back_into_the_root() {
    use fjord_format::extent::{ExtentNode, NodeKind};
    let mut tester = Tester::new(EXT4_1K, 64, 0);
    let depth = |tester: &Tester| {
        let state = tester.inode.state.read();
        let geo = &tester.image.fs.geo;
        ExtentNode::parse(&state.disk.i_block, NodeKind::Root, None, geo).expect("a root").depth()
    };
    let mut depths = std::collections::BTreeSet::new();
    // A fixed permutation, so that nodes split everywhere.
    let count = 31_013u64;
    for i in 0..count {
        let lblk = (i * 7919 % count) as u32 * 2;
        tester.insert(lblk, 1, 20_000 + i, i % 5 != 0).expect("room");
        depths.insert(depth(&tester));
    }
    assert!(depths.into_iter().eq([0, 1, 2, 3]), "depth {}", depth(&tester));
    tester.compare().expect("all there");
    for i in 0..20u32 {
        let piece = i * 7 % 20;
        tester.remove(piece * 3200, 3200).expect("removed");
        if i % 8 == 0 {
            tester.image.commit();
            tester.compare().expect("the rest is there");
        }
    }
    assert_eq!(depth(&tester), 0);
    assert_eq!(tester.inode.state.read().disk.blocks_512, 0);
    tester.finish().expect("clean");
}

#[test]
fn a_triple_indirect_map_grows_and_goes() {
    let mut tester = Tester::new(EXT3_1K, 64, 0);
    let top = 12 + 256 + 256 * 256;
    for base in [0, 11, 12, 267, 268, 65_803, top, top + 70_000, top + 16_000_000] {
        tester.insert(base, 700, 5_000, true).expect("room");
    }
    tester.compare().expect("all there");
    tester.remove(100, 66_000).expect("removed");
    tester.compare().expect("the rest is there");
    tester.remove(0, u32::MAX - 1).expect("removed");
    assert_eq!(tester.inode.state.read().disk.blocks_512, 0);
    assert_eq!(tester.inode.state.read().disk.i_block, [0; 60]);
    tester.finish().expect("clean");
}

#[test]
fn no_space_for_a_node_changes_nothing() {
    let mut tester = Tester::new(EXT4_1K, 16, 0);
    for i in 0..4 {
        tester.insert(i * 2, 1, 5000 + u64::from(i) * 3, true).expect("room");
    }
    let fs = tester.image.fs.clone();
    let inode = tester.inode.clone();
    // A picked block for the fifth extent, and then nothing more.
    fs.reserve_blocks(1, true).expect("room");
    let run = fs.pick_blocks(Goal::near(&fs, BlockNo(9000)), 1).expect("reserved");
    let goal = Goal::near(&fs, BlockNo(9000)).with_claim(crate::alloc::Claim::Metadata);
    let mut filler = Vec::new();
    while let Ok(run) = tester.with_handle(4, |h, _| fs.alloc_blocks(h, goal, 9999)) {
        filler.push(run);
    }
    let before = tester.inode.state.read().disk.clone();
    let error = tester.with_handle(map::credits_insert(&fs, 1), |h, state| {
        fs.use_picked(h, run, 1)?;
        map::insert(&fs, h, &inode, state, 100, run.start, 1, true).or_else(|error| {
            fs.free_blocks(h, run.start, 1)?;
            Err(error)
        })
    });
    assert!(error.expect_err("no room for a leaf").is(rustix::io::Errno::NOSPC));
    let after = tester.inode.state.read().disk.clone();
    assert_eq!((before.i_block, before.blocks_512), (after.i_block, after.blocks_512));
    for run in filler {
        tester
            .with_handle(8, |h, _| fs.free_blocks(h, run.start, u64::from(run.len)))
            .expect("in use");
    }
    tester.finish().expect("clean");
}

/// Sets random bytes of random blocks of a tree, then does everything to the file.
#[test]
fn damaged_trees_give_errors_and_nothing_worse() {
    for (seed, args) in (0u64..120).zip([EXT4_1K, EXT4_OLD, EXT3_1K].into_iter().cycle()) {
        let mut tester = Tester::new(args, 24, 0);
        for i in 0..500u32 {
            tester.insert(i * 2, 1, u64::from(i) * 11, true).expect("room");
        }
        tester.image.commit();
        tester.image.fs.unmount().expect("clean");
        let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut next = move || {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random
        };
        let mut nodes = Vec::new();
        for line in tester.image.debugfs("ex file").lines() {
            // Lines of index nodes: "level/depth entry/of logical physical".
            nodes.extend(line.split_whitespace().filter_map(|word| word.parse::<u64>().ok()));
        }
        nodes.extend(
            tester
                .image
                .debugfs("stat file")
                .split(|c: char| !c.is_ascii_digit())
                .filter_map(|word| word.parse::<u64>().ok()),
        );
        nodes.retain(|&n| n > 300 && n < 24_000);
        for _ in 0..40 {
            let block = BlockNo(nodes[next() as usize % nodes.len()]);
            let bytes = next().to_le_bytes();
            tester.image.damage(block, next() % 256 * 4, &bytes[..1 + next() as usize % 7]);
        }
        let mounted = crate::fs::mount::open_device(
            tester.image.device.clone(),
            &crate::testing::quiet_options(),
        );
        let Ok(fs) = mounted else { continue };
        let Ok(inode) = crate::inode::table::get(&fs, tester.inode.ino) else { continue };
        let mut state = inode.state.write();
        let mut at = 0u64;
        while at < 2000 {
            match map::lookup(&fs, &inode, &state, at as u32, 50) {
                Ok(found) => at += u64::from(found.len),
                Err(error) => {
                    assert!(error.is_corrupt(), "{error}");
                    at += 1;
                }
            }
        }
        for i in 0..40u64 {
            let Ok(h) = fs.start(100) else { break };
            let lblk = (next() % 1100) as u32;
            let result = match i % 3 {
                0 => {
                    map::remove(&fs, &h, &inode, &mut state, u64::from(lblk), u64::from(lblk) + 99)
                        .map(drop)
                }
                1 => map::alloc_block(&fs, &h, &inode, &mut state, lblk).map(drop),
                _ => map::mark_unwritten(&fs, &h, &inode, &mut state, lblk, 3),
            };
            if let Err(error) = result {
                let usual = error.is(rustix::io::Errno::OPNOTSUPP) || error.is_corrupt();
                assert!(usual, "{error}");
            }
        }
        drop(state);
        let _ = fs.journal().commit_running();
    }
}
