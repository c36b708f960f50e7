//! Workloads for states that short sequences on a small tree do not reach: directories whose index
//! is created and split, deletions of several transactions, a log that fills up, extent trees of
//! depth 2, values with an inode of their own, more revoke records than one block holds.
//!
//! Owns [`edges`]. Invariant: each workload reaches its state; a test checks the engine's counters
//! and the image.

use crate::base::{FAR_1K, FAR_EA, SMALL_LOG, SPREAD};
use crate::explore::Workload;
use crate::workloads::own;

/// Images of each, if nobody asks for more: their trees are large, and each image is read whole.
const IMAGES: usize = 1200;
/// Blocks of 1 KiB have room for so many of the names here, and the root of an index for so many
/// blocks.
const NAMES_PER_BLOCK: usize = 4;
const ROOT_ENTRIES: usize = 123;

/// A workload of this module, and its purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Edge {
    /// A directory gets an index, and its leaves split.
    IndexMade,
    /// The root of an index is full: a level is added.
    IndexDeeper,
    /// Deletion of a file with blocks in more groups than fit in one transaction.
    LongTruncate,
    /// The log is full, more than once: checkpoints, and the tail moves, between the operations.
    FullLog,
    /// A log with a fast-commit area reaches its end, more than once: it is emptied, and restarts
    /// at its front.
    LogAnew,
    /// Extent trees of depth 2, that grow, are cut, and go.
    DeepExtents,
    /// Values of attributes with inodes of their own come, change and go.
    ValueInodes,
    /// More blocks that are in the log are freed by one transaction than a revoke block holds.
    ManyRevokes,
}

impl Edge {
    /// All of them.
    pub const ALL: [Edge; 8] = [
        Edge::IndexMade,
        Edge::IndexDeeper,
        Edge::LongTruncate,
        Edge::FullLog,
        Edge::LogAnew,
        Edge::DeepExtents,
        Edge::ValueInodes,
        Edge::ManyRevokes,
    ];

    /// Its workload.
    pub fn workload(self) -> Workload {
        let (features, setup, ops) = match self {
            Edge::IndexMade => (FAR_1K, index(1), named(1..24)),
            Edge::IndexDeeper => {
                // Leaves split in halves, so they are between half and wholly full.
                let before = ROOT_ENTRIES * NAMES_PER_BLOCK / 2;
                (FAR_1K, index(before), named(before..ROOT_ENTRIES * NAMES_PER_BLOCK))
            }
            Edge::LongTruncate => (SPREAD, spread(), long_truncate()),
            Edge::FullLog => (SMALL_LOG, String::new(), full_log()),
            Edge::LogAnew => (FAR_1K, String::new(), full_log()),
            Edge::DeepExtents => (FAR_1K, scattered(), deep_extents()),
            Edge::ValueInodes => (FAR_EA, filled(11_200_000), value_inodes()),
            Edge::ManyRevokes => (FAR_1K, filled(14_540_000), many_revokes()),
        };
        let workload = Workload::new(own(&setup), own(&ops));
        Workload { features: Some(features), images_max: Some(IMAGES), ..workload }
    }
}

/// All workloads of this module.
pub fn edges() -> impl Iterator<Item = Workload> + Send {
    Edge::ALL.into_iter().map(Edge::workload)
}

/// An image with little free space: freed blocks are reused for other purposes.
fn filled(bytes: u64) -> String {
    format!("create /fill; fallocate /fill keep 0 {bytes}; create /pad; append /pad 200000; sync; ")
}

/// A name so long that few fit a block.
fn long_name(number: usize) -> String {
    format!("{number:04}{}", "n".repeat(220))
}

/// A directory with so many names of one file.
fn index(count: usize) -> String {
    let mut text = String::from("mkdir /d; create /f; append /f 700; sync; ");
    for number in 0..count {
        text += &format!("link /f /d/{}; ", long_name(number));
    }
    text
}

/// More names, and now and then one goes.
fn named(numbers: std::ops::Range<usize>) -> String {
    let mut text = String::new();
    for number in numbers {
        text += &format!("link /f /d/{}; ", long_name(number));
        text += match number % 7 {
            2 => "fsync /d; ",
            5 => "fsync /f; ",
            _ => "",
        };
        if number % 11 == 10 {
            text += &format!("unlink /d/{}; ", long_name(number / 2));
        }
    }
    text + "sync"
}

/// Two files with a written block in each of many groups, and holes between.
fn spread() -> String {
    const GROUPS: u64 = 160;
    const GROUP_BYTES: u64 = 256 << 10;
    let mut text = String::from("create /other; ");
    for name in ["wide", "gone"] {
        text += &format!("create /{name}; fallocate /{name} keep 0 {}; ", GROUPS * GROUP_BYTES);
        for group in 0..GROUPS {
            let at = group * GROUP_BYTES;
            let (after, rest) = (at + 1024, GROUP_BYTES - 1024);
            text +=
                &format!("write /{name} {at} 1024; fallocate /{name} keep+punch {after} {rest}; ");
        }
    }
    (0..OTHERS).for_each(|number| text += &format!("create /o{number}; "));
    text
}

/// So many files take a part of the transaction in which the long one begins.
const OTHERS: usize = 70;

fn long_truncate() -> String {
    let others = |xattr: &str| -> String {
        let one = |number| format!("setxattr /o{number} user.{xattr} 400; ");
        (0..OTHERS).map(one).collect()
    };
    let mut text = String::from("append /other 3000; fsync /other; ");
    text += &others("x");
    text += "truncate /wide 2500; append /other 3000; fsync /other; fsync /wide; ";
    text += &others("y");
    text += "unlink /gone; append /wide 5000; fsync /wide; fsync /; \
        create /after; append /after 60000; fsync /after; sync";
    text
}

fn full_log() -> String {
    // Blocks without a newer version must be checkpointed.
    let mut text = String::from("mkdir /kept; fsync /kept; ");
    for round in 0..170 {
        text += &format!("create /f{round}; append /f{round} 1500; fsync /f{round}; ");
        if round >= 6 {
            text += &format!("unlink /f{}; ", round - 6);
        }
        if round % 9 == 4 {
            text += &format!("write /f{} 200 3000; fdatasync /f{}; ", round - 2, round - 2);
        }
    }
    text + "sync"
}

/// A file of single blocks with holes between.
fn scattered() -> String {
    let mut text = String::from("create /far; ");
    for block in 0..360 {
        text += &format!("write /far {} 1024; ", block * 2048);
    }
    text
}

fn deep_extents() -> String {
    let mut text = String::new();
    for block in 360..400 {
        text += &format!("write /far {} 1024; ", block * 2048);
        text += if block % 5 == 0 { "fsync /far; " } else { "" };
    }
    text += "fallocate /far keep+punch 200000 30000; fsync /far; \
        fallocate /far zero 400000 5000; fdatasync /far; \
        fallocate /far insert 100352 2048; fsync /far; fallocate /far collapse 10240 4096; \
        fsync /far; truncate /far 300000; fsync /far; \
        create /next; append /next 90000; fsync /next; unlink /far; fsync /; \
        append /next 200000; fsync /next; sync";
    text
}

fn value_inodes() -> String {
    let text = "create /a; setxattr /a user.big 9000; fsync /a; setxattr /a user.big 30000; \
        append /a 500; fsync /a; create /b; setxattr /b user.big 12000; setxattr /b user.more 6000; \
        fsync /b; rmxattr /a user.big; fsync /a; setxattr /a user.big 100; fdatasync /a; \
        hold /b; unlink /b; fsync /; create /c; append /c 40000; setxattr /c user.big 50000; \
        fsync /c; rename /c /a; fsync /; setxattr /a user.big 30000; fsync /a; \
        setxattr /a user.big 60000; rmxattr /a user.big; fsync /a; \
        create /d; append /d 300000; fsync /d; create /e; append /e 200000; fsync /e; sync";
    text.into()
}

fn many_revokes() -> String {
    const FILES: usize = 150;
    let mut text = String::from("mkdir /d; ");
    for number in 0..FILES {
        text += &format!("create /d/f{number}; setxattr /d/f{number} user.x 500; ");
    }
    text += "sync; create /data; ";
    (0..FILES).for_each(|number| text += &format!("unlink /d/f{number}; "));
    // Their blocks come back as data, which no replay may overwrite.
    text + "fsync /d; append /data 400000; fsync /data; create /more; append /more 60000; \
        fsync /more; sync"
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use fjord::{Fs, FsyncPolicyKind, MountOptions, Stats};
    use fjord_testkit::image::{self, Scratch};
    use parking_lot::Mutex;

    use super::*;
    use crate::base::{Base, quiet};
    use crate::ops::Op;
    use crate::record::{DeviceKind, RecordingDevice};
    use crate::run::Runner;

    /// What there is when all operations but the last ones are done.
    struct There {
        /// Counters of the run.
        stats: Stats,
        /// Operations that are no syncs and had commits inside.
        cut: Vec<String>,
        /// Most revoke records of one operation that commits.
        revokes_inside: u64,
        image: Scratch,
    }

    impl There {
        fn debugfs(&self, request: &str) -> String {
            image::debugfs(&self.image.join("image"), request).expect("debugfs")
        }
    }

    /// Runs the first `count` operations of a workload.
    fn run(workload: &Workload, count: usize) -> There {
        let features = workload.features.expect("a feature set");
        let base = Base::get(features, &workload.setup).expect("a base");
        let device = RecordingDevice::plain(base.image.clone(), DeviceKind::Volatile);
        let device = Arc::new(device);
        let options = MountOptions { fsync: FsyncPolicyKind::Compound, ..MountOptions::default() };
        let fs = Fs::open_device(device.clone(), &quiet(&options)).expect("a mount");
        let model = Mutex::new(base.model.clone());
        let stamp = || 1;
        let mut runner = Runner::new(&fs, &model, &stamp);
        let (mut cut, mut revokes_inside) = (Vec::new(), 0);
        for op in &workload.ops[..count] {
            let before = fs.stats().journal;
            assert!(runner.step(op).expect("the engine works"), "{op} is refused");
            let after = fs.stats().journal;
            if op.is_sync() {
                revokes_inside = (after.revoke_records - before.revoke_records).max(revokes_inside);
            } else if after.commits > before.commits {
                cut.push(op.to_string());
            }
        }
        drop(runner);
        let stats = fs.stats();
        fs.unmount().expect("an unmount");
        let image = Scratch::in_memory("edges").expect("a directory");
        device.image().write_to_file(&image.join("image")).expect("the image is written");
        There { stats, cut, revokes_inside, image }
    }

    /// Runs a workload until it has done an operation whose text begins so, for the last time.
    fn run_to(edge: Edge, start: &str) -> There {
        let workload = edge.workload();
        let is_it = |op: &Op| op.to_string().starts_with(start);
        let last = workload.ops.iter().rposition(is_it).expect("there is one");
        run(&workload, last + 1)
    }

    #[test]
    fn indexes_are_made_and_get_deeper() {
        let levels = |there: &There| {
            let dump = there.debugfs("htree_dump /d");
            let line = dump.lines().find(|line| line.contains("Indirect levels"));
            line.and_then(|line| line.trim().rsplit(' ').next()?.parse::<u32>().ok())
        };
        let before = run(&Edge::IndexMade.workload(), 0);
        assert_eq!(levels(&before), None);
        assert_eq!(levels(&run_to(Edge::IndexMade, "sync")), Some(0));
        let before = run(&Edge::IndexDeeper.workload(), 0);
        assert_eq!(levels(&before), Some(0));
        assert_eq!(levels(&run_to(Edge::IndexDeeper, "sync")), Some(1));
    }

    #[test]
    fn deletions_take_several_transactions() {
        let workload = Edge::LongTruncate.workload();
        let cut = run(&workload, workload.ops.len()).cut;
        assert!(cut.contains(&"truncate /wide 2500".to_owned()), "{cut:?}");
        assert!(cut.contains(&"unlink /gone".to_owned()), "{cut:?}");
    }

    #[test]
    fn logs_fill_up() {
        let there = run_to(Edge::FullLog, "fsync");
        let journal = there.stats.journal;
        assert!(journal.log_full > 0 && journal.checkpoint_blocks > 0, "{journal:?}");
    }

    #[test]
    fn logs_begin_anew() {
        /// Blocks of the whole journal.
        const BLOCKS: u64 = 1024;
        let journal = run_to(Edge::LogAnew, "fsync").stats.journal;
        let written = journal.metadata_blocks + journal.descriptor_blocks + journal.commits;
        assert!(written > BLOCKS && journal.checkpoint_blocks > 0, "{journal:?}");
    }

    #[test]
    fn extent_trees_are_two_deep() {
        let depth = |there: &There| there.debugfs("ex /far").contains(" 2/ 2");
        assert!(depth(&run(&Edge::DeepExtents.workload(), 0)), "the tree is flat");
        assert!(!depth(&run_to(Edge::DeepExtents, "truncate")), "the tree is as deep as before");
    }

    #[test]
    fn values_have_inodes() {
        let there = run_to(Edge::ValueInodes, "fsync /b");
        let stat = there.debugfs("ea_list /b");
        assert!(stat.contains("user.big (12000)"), "{stat}");
        // The four that programs made, the two that all have, and three values.
        let used = |there: &There| {
            let stats = there.debugfs("stats -h");
            let number = |name: &str| {
                let line = stats.lines().find(|line| line.starts_with(name)).expect("a count");
                let word = line.rsplit(' ').next().expect("a word");
                word.parse::<i64>().expect("a number")
            };
            number("Inode count:") - number("Free inodes:")
        };
        let before = used(&run(&Edge::ValueInodes.workload(), 0));
        assert_eq!(used(&there) - before, 5, "two files and three values");
        assert_eq!(used(&run_to(Edge::ValueInodes, "sync")) - before, 3, "three files, no value");
    }

    #[test]
    fn revokes_fill_more_than_a_block() {
        let there = run_to(Edge::ManyRevokes, "fsync /d");
        assert!(there.revokes_inside > 130, "{}", there.revokes_inside);
    }
}
