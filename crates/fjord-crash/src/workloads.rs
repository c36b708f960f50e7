//! The workloads.
//!
//! Owns [`Family`] and the sequences of each. The bounded ones follow ACE (*Finding
//! Crash-Consistency Bugs with Bounded Black-Box Crash Testing*, OSDI '18): every sequence of so
//! many operations on a small tree, each with every way to sync. Others come from the papers on
//! barrier-enabled I/O and iJournaling, and from a seed.
//!
//! Invariant: a family gives the same workloads in the same order for one seed.

use fjord_testkit::rng::Rng;

use crate::explore::Workload;
use crate::filling::Filling;
use crate::ops::{self, Op, parent};

/// What ACE sequences find: a file in the root, two directories, one with files and a directory.
const ACE_SETUP: &str = "mkdir /A; mkdir /B; mkdir /A/C; create /foo; append /foo 6000; \
    create /A/foo; append /A/foo 20000; create /A/bar; append /A/bar 300; \
    setxattr /A/foo user.x 30; setxattr /A/bar user.x 2000";

/// The operations of ACE sequences.
const ACE_OPS: &str = "create /bar; create /A/new; create /B/new; mkdir /D; mkdir /A/D; \
    symlink /B/s 20; symlink /A/t 200; \
    link /foo /A/l; link /A/foo /B/l; link /A/foo /A/l; \
    unlink /foo; unlink /A/foo; unlink /A/bar; rmdir /B; rmdir /A/C; \
    rename /foo /bar; rename /foo /A/foo; rename /A/foo /B/foo; rename /A/foo /A/bar; \
    rename /A/C /B/C; rename /A/C /B; rename /A/C /E; exchange /foo /A/foo; \
    truncate /A/foo 0; truncate /A/foo 5000; truncate /A/foo 30000; truncate /foo 100; \
    append /A/foo 100; append /A/foo 5000; append /foo 8192; append /A/bar 200; \
    write /A/foo 0 4096; magic /A/foo 4096; write /A/foo 3000 6000; write /foo 40960 100; write /A/bar 10 50; \
    fallocate /A/foo plain 16384 20000; fallocate /A/foo keep 16384 20000; \
    fallocate /A/foo keep+punch 4096 8192; fallocate /A/foo keep+punch 3000 3000; \
    fallocate /A/foo zero 3000 9000; fallocate /A/foo keep+zero 8192 20000; \
    fallocate /A/foo collapse 4096 4096; fallocate /A/foo insert 4096 4096; \
    setxattr /A/foo user.y 20; setxattr /A/foo user.y 2000; setxattr /A user.d 10; \
    rmxattr /A/foo user.x; rmxattr /A/bar user.x; chmod /A/foo 600; chown /A/foo 7";

/// Sorts of workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Family {
    /// One operation, one sync.
    Ace1,
    /// Two operations, each synced in every way, the first also not at all.
    Ace2,
    /// Three operations, syncs in between, by seed; without end.
    Ace3,
    /// The barrier paper: a file is moved from the root to a directory.
    RenameToSub,
    /// The barrier paper: files are created and deleted.
    CreateDelete,
    /// iJournaling: a thousand files, the odd ones synced.
    ThousandFiles,
    /// iJournaling: appends of 4 KiB with fsync beyond 1 GiB, so that extents leave the inode.
    AppendFar,
    /// iJournaling: fsync of a leaf below several new directories.
    DeepLeaf,
    /// fbarrier and fdatabarrier between changes of a few files.
    Barriers,
    /// What takes large trees or long runs to reach ([`crate::edges`]).
    Edges,
    /// iJournaling: ten threads of random mkdir, create, write, truncate, unlink and fsync.
    TenThreads,
    /// Long sequences by seed; without end.
    Random,
    /// Four threads of the same, with the engine's own threads; without end.
    Threads,
    /// Four threads that fsync files of their own in directories which one of them has just made;
    /// by seed, without end.
    SharedDirs,
    /// Three threads with small changes, each of them synced or ordered at once, so that commits
    /// overlap; by seed, without end.
    Overlaps,
    /// Work in six directories that seldom touches two, none of it synced as a whole, by seed;
    /// without end. What may commit alone where block groups do.
    Groups,
    /// Files that grow and change, most changes synced at once, and few names that leave; by
    /// seed, without end. What logs of single files are for.
    Fsyncs,
}

/// All families.
pub const FAMILIES: [Family; 17] = [
    Family::RenameToSub,
    Family::CreateDelete,
    Family::DeepLeaf,
    Family::Barriers,
    Family::AppendFar,
    Family::Edges,
    Family::TenThreads,
    Family::ThousandFiles,
    Family::Ace1,
    Family::Ace2,
    Family::Random,
    Family::Ace3,
    Family::Threads,
    Family::SharedDirs,
    Family::Overlaps,
    Family::Groups,
    Family::Fsyncs,
];

impl Family {
    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Family::Ace1 => "ace1",
            Family::Ace2 => "ace2",
            Family::Ace3 => "ace3",
            Family::RenameToSub => "rename-to-sub",
            Family::CreateDelete => "create-delete",
            Family::ThousandFiles => "thousand-files",
            Family::AppendFar => "append-far",
            Family::DeepLeaf => "deep-leaf",
            Family::Barriers => "barriers",
            Family::Edges => "edges",
            Family::TenThreads => "ten-threads",
            Family::Random => "random",
            Family::Threads => "threads",
            Family::SharedDirs => "shared-dirs",
            Family::Overlaps => "overlaps",
            Family::Groups => "groups",
            Family::Fsyncs => "fsyncs",
        }
    }

    /// The family with this name.
    pub fn by_name(name: &str) -> Option<Family> {
        FAMILIES.into_iter().find(|family| family.name() == name)
    }

    /// Whether it never ends.
    pub fn is_endless(self) -> bool {
        matches!(
            self,
            Family::Ace3
                | Family::Random
                | Family::Threads
                | Family::SharedDirs
                | Family::Overlaps
                | Family::Groups
                | Family::Fsyncs
        )
    }

    /// Its workloads.
    pub fn workloads(self, seed: u64) -> Box<dyn Iterator<Item = Workload> + Send> {
        match self {
            Family::Ace1 => Box::new(ace1()),
            Family::Ace2 => Box::new(ace2()),
            Family::Ace3 => Box::new((0u64..).map(move |round| ace3(seed, round))),
            Family::RenameToSub => Box::new(std::iter::once(rename_to_sub())),
            Family::CreateDelete => Box::new(std::iter::once(create_delete())),
            Family::ThousandFiles => Box::new(std::iter::once(thousand_files())),
            Family::AppendFar => Box::new(std::iter::once(append_far())),
            Family::DeepLeaf => Box::new((1..=6).map(deep_leaf)),
            Family::Barriers => Box::new((0..24).map(move |round| barriers(seed, round))),
            Family::Edges => Box::new(crate::edges::edges()),
            Family::TenThreads => Box::new(std::iter::once(ten_threads(seed))),
            Family::Random => Box::new((0u64..).map(move |round| random(seed, round))),
            Family::Threads => Box::new((0u64..).map(move |round| threads(seed, round))),
            Family::SharedDirs => Box::new((0u64..).map(move |round| shared_dirs(seed, round))),
            Family::Overlaps => Box::new((0u64..).map(move |round| overlaps(seed, round))),
            Family::Groups => Box::new((0u64..).map(move |round| groups(seed, round))),
            Family::Fsyncs => Box::new((0u64..).map(move |round| fsyncs(seed, round))),
        }
    }
}

/// Parses text of this crate's own workloads.
pub(crate) fn own(text: &str) -> Vec<Op> {
    ops::parse(text).expect("the operations of this module are well formed; a test parses them")
}

/// The ways to sync after an operation: its object, its object's data, the parents by fsync and by
/// fdatasync, another file and its data, everything. What no longer exists is left out.
fn syncs(op: &Op) -> Vec<Op> {
    let target = op.target().unwrap_or_default().to_owned();
    let both = |path: &str| [Op::Fsync(path.to_owned()), Op::Fdatasync(path.to_owned())];
    let mut list = Vec::from(both(parent(&target)));
    match op {
        Op::Unlink(_) | Op::Rmdir(_) | Op::Symlink(..) => {}
        _ => list.extend(both(&target)),
    }
    if let Op::Rename(from, _) | Op::Exchange(from, _) | Op::Link(from, _) = op {
        list.extend(both(parent(from)));
    }
    let other = if target == "A/bar" { "foo" } else { "A/bar" };
    list.extend(both(other));
    list.push(Op::Sync);
    let mut seen = Vec::new();
    list.retain(|sync| {
        !seen.contains(sync) && {
            seen.push(sync.clone());
            true
        }
    });
    list
}

fn ace(ops: Vec<Op>) -> Workload {
    Workload::new(own(ACE_SETUP), ops)
}

fn ace1() -> impl Iterator<Item = Workload> + Send {
    own(ACE_OPS).into_iter().flat_map(|op| {
        let syncs = syncs(&op);
        syncs.into_iter().map(move |sync| ace(vec![op.clone(), sync]))
    })
}

fn ace2() -> impl Iterator<Item = Workload> + Send {
    let all = own(ACE_OPS);
    let firsts = all.clone();
    firsts.into_iter().flat_map(move |first| {
        let all = all.clone();
        all.into_iter().flat_map(move |second| {
            let first = first.clone();
            let between = std::iter::once(None).chain(syncs(&first).into_iter().map(Some));
            between.into_iter().flat_map(move |sync| {
                let start: Vec<Op> = [first.clone()].into_iter().chain(sync).collect();
                let second = second.clone();
                syncs(&second).into_iter().map(move |last| {
                    let mut ops = start.clone();
                    ops.extend([second.clone(), last]);
                    ace(ops)
                })
            })
        })
    })
}

fn ace3(seed: u64, round: u64) -> Workload {
    let mut rng = Rng::new(seed ^ round.wrapping_mul(0x9E37_79B9));
    let all = own(ACE_OPS);
    let mut ops = Vec::new();
    for step in 0..3 {
        let op = rng.pick(&all).clone();
        let syncs = syncs(&op);
        ops.push(op);
        if step == 2 || rng.percent(50) {
            ops.push(rng.pick(&syncs).clone());
        }
    }
    ace(ops)
}

fn rename_to_sub() -> Workload {
    let mut text = String::from("mkdir /sub; ");
    for file in 0..8 {
        text += &format!("create /f{file}; append /f{file} 5000; fsync /f{file}; ");
    }
    for file in 0..8 {
        text += &format!("rename /f{file} /sub/f{file}; ");
        text += if file % 2 == 0 { "fsync /sub; " } else { "fsync /; " };
    }
    Workload::new(Vec::new(), own(&text))
}

fn create_delete() -> Workload {
    let mut text = String::new();
    for round in 0..10 {
        text += &format!("create /n{round}; append /n{round} 9000; fsync /n{round}; ");
        if round >= 2 {
            text += &format!("unlink /n{}; fsync /; ", round - 2);
        }
    }
    Workload::new(Vec::new(), own(&text))
}

/// Images of the thousand files, if nobody asks for more: each takes the reading of them all.
const THOUSAND_FILES_IMAGES: usize = 4000;

fn thousand_files() -> Workload {
    let mut text = String::from("mkdir /d; ");
    for file in 0..1000 {
        text += &format!("create /d/f{file}; append /d/f{file} {}; ", 100 + file * 7);
        if file % 2 == 1 {
            text += &format!("fsync /d/f{file}; ");
        }
    }
    let features = Some(crate::base::MANY);
    let images_max = Some(THOUSAND_FILES_IMAGES);
    Workload { features, images_max, ..Workload::new(Vec::new(), own(&text)) }
}

fn deep_leaf(depth: usize) -> Workload {
    let mut text = String::new();
    let mut dir = String::new();
    for level in 0..depth {
        dir += &format!("/l{level}");
        text += &format!("mkdir {dir}; create {dir}/other; ");
    }
    text += &format!("create {dir}/leaf; append {dir}/leaf 7000; fsync {dir}/leaf; ");
    text += &format!("mkdir {dir}/more; create {dir}/more/leaf; fdatasync {dir}/more/leaf; ");
    text += &format!("rename {dir}/more /moved; append /moved/leaf 100; fsync /moved/leaf");
    Workload::new(Vec::new(), own(&text))
}

fn append_far() -> Workload {
    let mut text = String::from("create /other; create /far; ");
    // Blocks here and there: more extents than an inode holds.
    for place in 0..6u64 {
        text += &format!("write /far {} 4096; ", place * (150 << 20));
    }
    text += &format!("truncate /far {}; sync; ", 1u64 << 30);
    for round in 0..16 {
        text += "append /far 4096; ";
        text += if round % 2 == 0 { "fsync /far; " } else { "fdatasync /far; " };
        if round % 4 == 3 {
            // The next block goes to another file, so the next append begins an extent.
            text += "append /other 4096; fsync /other; ";
        }
    }
    let features = Some(crate::base::LARGE);
    Workload { features, ..Workload::new(Vec::new(), own(&text)) }
}

fn ten_threads(seed: u64) -> Workload {
    let mut rng = Rng::new(seed ^ 10);
    let dirs: String = (0..10).map(|number| format!("mkdir /T{number}; ")).collect();
    let dirs = own(&dirs);
    let thread = |number: u64| {
        let mut ops = Filling::on(&dirs);
        for _ in 0..24 {
            let dir = *rng.pick(&["", "/d0", "/d1"]);
            let file = format!("T{number}{dir}/f{}", rng.below(4));
            ops.push(match rng.below(12) {
                0 => Op::Mkdir(format!("T{number}/d{}", rng.below(2))),
                1 => Op::Create(file),
                2..=5 => Op::Write(file, rng.below(20_000), 1 + rng.magnitude(9000)),
                6 => Op::Truncate(file, rng.below(20_000)),
                7 | 8 => Op::Unlink(file),
                _ => Op::Fsync(file),
            });
        }
        ops.into_ops()
    };
    let threads = (0..10).map(thread).collect();
    Workload::threads(dirs.clone(), threads)
}

/// The operations of random sequences, each thread below a directory of its own.
fn threads(seed: u64, round: u64) -> Workload {
    let count = 4u64;
    let thread = |number: u64| {
        let below = |path: &str| format!("T{number}/{path}");
        let ops = random(seed ^ (number << 40), round).ops;
        let ops = ops.into_iter().filter(|op| *op != Op::Sync);
        ops.map(|op| op.map_paths(&below)).collect()
    };
    let dirs: String = (0..count).map(|number| format!("mkdir /T{number}; ")).collect();
    Workload::threads(own(&dirs), (0..count).map(thread).collect())
}

/// One thread at a time makes a directory, the others meet it right after: whose fsync logs the
/// directory, and who relies on it?
fn shared_dirs(seed: u64, round: u64) -> Workload {
    let mut rng = Rng::new(seed ^ round.wrapping_mul(0xD134_2543_DE82_EF95));
    let count = 4;
    let mut threads = vec![String::new(); count];
    for dir in 0..12 {
        let depth = if rng.percent(25) { "/e" } else { "" };
        let maker = rng.below(count as u64) as usize;
        for (number, text) in threads.iter_mut().enumerate() {
            if number == maker {
                *text += &format!("mkdir /s{dir}; ");
                if !depth.is_empty() {
                    *text += &format!("mkdir /s{dir}{depth}; ");
                }
            } else {
                // Takes about as long, so that the directory is there and not yet logged.
                let changes = 2 + rng.below(8);
                *text += &format!("chmod /w{number} 600; ").repeat(changes as usize);
            }
            let file = format!("/s{dir}{depth}/t{number}");
            *text += &format!("create {file}; append {file} {}; ", 1 + rng.below(9000));
            *text += &format!("fsync {file}; append {file} 300; fdatasync {file}; ");
        }
    }
    let setup: String = (0..count).map(|number| format!("create /w{number}; ")).collect();
    Workload::threads(own(&setup), threads.iter().map(|text| own(text)).collect())
}

/// Each thread in a directory of its own, which has a block group of its own where there are many.
fn overlaps(seed: u64, round: u64) -> Workload {
    let count = 3;
    let setup: String = (0..count)
        .map(|n| format!("mkdir /T{n}; create /T{n}/a; append /T{n}/a 9000; create /T{n}/b; "))
        .collect();
    let setup = own(&setup);
    let thread = |number: u64| {
        let mut rng = Rng::new(seed ^ (number << 40) ^ round.wrapping_mul(0xA24B_AED4_963E_E407));
        let mut ops = Filling::on(&setup);
        for step in 0..5 {
            let mut file = format!("T{number}/{}", rng.pick(&["a", "b"]));
            ops.push(match rng.below(12) {
                0..3 => Op::Append(file.clone(), 1 + rng.below(6000)),
                3..5 => Op::Write(file.clone(), rng.below(9000), 1 + rng.below(5000)),
                5..7 => Op::Truncate(file.clone(), rng.below(9000)),
                7 => Op::Chmod(file.clone(), 0o600 + rng.below(64) as u16),
                8 => {
                    let new = format!("T{number}/r{step}");
                    let old = std::mem::replace(&mut file, new.clone());
                    Op::Rename(old, new)
                }
                9 => {
                    file = format!("T{number}");
                    Op::Unlink(format!("T{number}/{}", rng.pick(&["a", "b"])))
                }
                _ => {
                    file = format!("T{number}/n{step}");
                    Op::Create(file.clone())
                }
            });
            ops.push(match rng.below(10) {
                0..2 => Op::Fbarrier(file),
                2 => Op::Fdatabarrier(file),
                3 => Op::Fdatasync(file),
                _ => Op::Fsync(file),
            });
        }
        ops.into_ops()
    };
    let threads = (0..count).map(thread).collect();
    Workload::threads(setup.clone(), threads)
}

const RANDOM_NAMES: [&str; 4] = ["a", "b", "c", "e"];

fn random(seed: u64, round: u64) -> Workload {
    let mut rng = Rng::new(seed ^ round.wrapping_mul(0xD134_2543_DE82_EF95));
    let mut ops = Filling::default();
    own("mkdir /D; mkdir /D/E").into_iter().for_each(|op| ops.push(op));
    let count = rng.range(20, 80);
    let path = |rng: &mut Rng| {
        let dir = *rng.pick(&["", "D/", "D/E/"]);
        format!("{dir}{}", rng.pick(&RANDOM_NAMES))
    };
    for _ in 0..count {
        let file = path(&mut rng);
        let op = match rng.below(100) {
            0..12 => Op::Create(file),
            12..28 => Op::Append(file, 1 + rng.magnitude(30_000)),
            28..30 => Op::Magic(file, rng.below(8) * 4096),
            30..38 => {
                let offset = rng.below(40_000);
                // Some more than an i-transaction carries.
                let large = if rng.percent(15) { 40_000 } else { 0 };
                Op::Write(file, offset, 1 + large + rng.magnitude(20_000))
            }
            38..44 => Op::Truncate(file, rng.below(40_000)),
            44..50 => random_fallocate(file, &mut rng),
            50..55 => Op::Unlink(file),
            55..60 => Op::Rename(file, path(&mut rng)),
            60..63 => Op::Link(file, path(&mut rng)),
            63..65 => Op::Mkdir(file),
            65..67 => Op::Rmdir(file),
            67..69 => Op::Symlink(file, 1 + rng.magnitude(300) as usize),
            69..72 => Op::SetXattr(file, "user.r".into(), 1 + rng.magnitude(2500) as usize),
            72..74 => Op::RemoveXattr(file, "user.r".into()),
            74..76 => Op::Hold(file),
            76..78 => Op::Chmod(file, 0o600 + rng.below(64) as u16),
            78..90 => Op::Fsync(file),
            90..95 => Op::Fdatasync(file),
            95..98 => {
                let dir = *rng.pick(&["", "D", "D/E"]);
                sync_of(dir, &mut rng)
            }
            _ => Op::Sync,
        };
        // What a truncation leaves of the last block shows when the file grows again.
        let again = match &op {
            Op::Truncate(file, size) if rng.percent(40) => {
                Some(Op::Truncate(file.clone(), size + rng.below(20_000)))
            }
            _ => None,
        };
        ops.push(op);
        if let Some(op) = again {
            ops.push(op);
            ops.push(Op::Sync);
        }
    }
    Workload::new(Vec::new(), ops.into_ops())
}

/// Changes of a few files with a barrier after most of them, few syncs, and data that goes to its place before.
fn barriers(seed: u64, round: u64) -> Workload {
    let mut rng = Rng::new(seed ^ round.wrapping_mul(0x9E37_79B9_7F4A_7C15));
    let setup = "create /f0; append /f0 12000; create /f1; append /f1 5000; create /f2; create /f3";
    let setup = own(setup);
    let mut ops = Filling::on(&setup);
    for _ in 0..rng.range(6, 20) {
        let mut file = format!("f{}", rng.below(4));
        ops.push(match rng.below(20) {
            0..8 => Op::Write(file.clone(), rng.below(3) * 4096, 1 + rng.below(9000)),
            8..12 => Op::Append(file.clone(), 1 + rng.below(9000)),
            12..14 => Op::Truncate(file.clone(), rng.below(12_000)),
            14..16 => {
                let new = format!("f{}", rng.below(4));
                let old = std::mem::replace(&mut file, new.clone());
                Op::Rename(old, new)
            }
            16..18 => {
                file = format!("n{}", ops.len());
                Op::Create(file.clone())
            }
            _ => Op::Chmod(file.clone(), 0o600 + rng.below(64) as u16),
        });
        match rng.below(12) {
            0..4 => ops.push(Op::Fbarrier(file)),
            4..9 => ops.push(Op::Fdatabarrier(file)),
            9 => ops.push(Op::Fsync(file)),
            10 => ops.push(Op::Writeback(file)),
            _ => {}
        }
    }
    Workload::new(setup, ops.into_ops())
}

/// New directories of the root lie in groups of their own, and so do their files.
fn groups(seed: u64, round: u64) -> Workload {
    let mut rng = Rng::new(seed ^ round.wrapping_mul(0xA24B_AED4_963E_E407));
    let dirs = 6;
    let names = ["a", "b", "c"];
    let mut setup = String::new();
    for dir in 0..dirs {
        setup += &format!("mkdir /G{dir}; create /G{dir}/a; append /G{dir}/a 9000; ");
        setup += &format!("create /G{dir}/b; append /G{dir}/b 300; ");
    }
    let path = |rng: &mut Rng, dir: u64| format!("G{dir}/{}", rng.pick(&names));
    let setup = own(&setup);
    let mut ops = Filling::on(&setup);
    for _ in 0..rng.range(24, 70) {
        let (dir, other) = (rng.below(dirs), rng.below(dirs));
        let file = path(&mut rng, dir);
        let op = match rng.below(100) {
            0..10 => Op::Create(file),
            10..28 => Op::Append(file, 1 + rng.magnitude(40_000)),
            28..36 => {
                let offset = rng.below(20_000);
                Op::Write(file, offset, 1 + rng.magnitude(20_000))
            }
            36..41 => Op::Truncate(file, rng.below(20_000)),
            41..46 => random_fallocate(file, &mut rng),
            46..48 => Op::Unlink(file),
            48..52 => Op::Rename(file, path(&mut rng, dir)),
            52..55 => Op::Rename(file, path(&mut rng, other)),
            55..57 => Op::Link(file, path(&mut rng, other)),
            57..60 => Op::SetXattr(file, "user.r".into(), 1 + rng.magnitude(2500) as usize),
            60..63 => Op::Chmod(file, 0o600 + rng.below(64) as u16),
            63..66 => Op::Mkdir(format!("G{dir}/d{}", rng.below(3))),
            66..71 => {
                // In place, with nothing to commit.
                let start = rng.below(4000);
                ops.push(Op::Write(file.clone(), start, 4000));
                ops.push(Op::Fdatasync(file.clone()));
                ops.push(Op::Write(file.clone(), start, 4000));
                Op::Fdatasync(file)
            }
            71..88 => Op::Fsync(file),
            88..95 => Op::Fdatasync(file),
            _ => sync_of(&format!("G{dir}"), &mut rng),
        };
        ops.push(op);
    }
    Workload::new(setup, ops.into_ops())
}

fn fsyncs(seed: u64, round: u64) -> Workload {
    let mut rng = Rng::new(seed ^ round.wrapping_mul(0xA24B_AED4_963E_E407));
    // Enough inodes that those of the workload lie in a block of their own.
    let mut setup = String::from("mkdir /D; ");
    for number in 0..24 {
        setup += &format!("create /old{number}; ");
    }
    for file in ["p", "q"] {
        setup += &format!("create /{file}; append /{file} {}; ", 1 + rng.below(60_000));
    }
    if rng.percent(25) {
        // Too large for the inode.
        setup += "setxattr /q user.r 700; ";
    }
    let setup = own(&setup);
    let mut ops = Filling::on(&setup);
    for _ in 0..rng.range(8, 30) {
        let dir = *rng.pick(&["", "D/"]);
        let file = format!("{dir}{}", rng.pick(&["p", "q", "n1", "n2", "n3"]));
        let sync = match rng.below(10) {
            0..6 => Some(Op::Fsync(file.clone())),
            6..8 => Some(Op::Fdatasync(file.clone())),
            _ => None,
        };
        let op = match rng.below(100) {
            0..20 => Op::Create(file),
            20..46 => Op::Append(file, 1 + rng.magnitude(20_000)),
            // Too much for a log of the file: what it carried before is written over in place.
            46..50 => {
                ops.push(Op::Write(file.clone(), rng.below(12) * 4096, 4096));
                ops.push(Op::Fsync(file.clone()));
                Op::Write(file, 0, 40_000 + rng.below(30_000))
            }
            50..70 => Op::Write(file, rng.below(70_000), 1 + rng.magnitude(9000)),
            70..80 => Op::Truncate(file, rng.below(60_000)),
            80..92 => file_fallocate(file, &mut rng),
            92..95 => Op::Chmod(file, 0o600 + rng.below(64) as u16),
            95..97 => Op::Unlink(file),
            97..99 => Op::Rename(file.clone(), format!("{file}r")),
            _ => Op::Sync,
        };
        ops.push(op.clone());
        if let Op::Unlink(file) = op {
            // The name comes back.
            ops.push(Op::Create(file.clone()));
            ops.push(Op::Append(file, 1 + rng.magnitude(20_000)));
        }
        sync.into_iter().for_each(|sync| ops.push(sync));
    }
    Workload::new(setup, ops.into_ops())
}

/// fsync or fdatasync.
fn sync_of(path: &str, rng: &mut Rng) -> Op {
    if rng.percent(50) { Op::Fsync(path.to_owned()) } else { Op::Fdatasync(path.to_owned()) }
}

fn file_fallocate(file: String, rng: &mut Rng) -> Op {
    let mode = *rng.pick(&["plain", "keep", "keep+punch", "keep+punch", "zero", "keep+zero"]);
    let (offset, len) = (rng.below(60_000), 1 + rng.below(30_000));
    own(&format!("fallocate /{file} {mode} {offset} {len}")).remove(0)
}

fn random_fallocate(file: String, rng: &mut Rng) -> Op {
    let modes = ["plain", "keep", "keep+punch", "zero", "keep+zero", "collapse", "insert"];
    let mode = *rng.pick(&modes);
    let aligned = matches!(mode, "collapse" | "insert");
    let (mut offset, mut len) = (rng.below(30_000), 1 + rng.below(20_000));
    if aligned {
        (offset, len) = (offset / 4096 * 4096, len / 4096 * 4096 + 4096);
    }
    own(&format!("fallocate /{file} {mode} {offset} {len}")).remove(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::DeviceKind;

    #[test]
    fn every_family_parses_and_repeats() {
        for family in FAMILIES {
            let take = || family.workloads(7).take(50).collect::<Vec<_>>();
            let list = take();
            assert_eq!(list, take(), "{}", family.name());
            assert_eq!(Family::by_name(family.name()), Some(family));
            for workload in list {
                assert_eq!(own(&ops::format(&workload.ops)), workload.ops);
            }
        }
    }

    /// An operation that is refused tests little.
    #[test]
    fn few_operations_are_refused() {
        let families = [Family::Random, Family::Groups, Family::Fsyncs, Family::Barriers];
        for family in families {
            let (mut all, mut refused) = (0, 0);
            for workload in family.workloads(7).take(12) {
                let base = crate::base::Base::get(crate::base::FEATURES[0], &workload.setup);
                let base = base.expect("a base");
                let image = base.image.clone();
                let device = crate::record::RecordingDevice::plain(image, DeviceKind::Volatile);
                let options = crate::base::quiet(&fjord::MountOptions::default());
                let device = std::sync::Arc::new(device);
                let fs = fjord::Fs::open_device(device, &options).expect("a file system");
                let model = parking_lot::Mutex::new(base.model.clone());
                let stamp = || 1;
                let mut runner = crate::run::Runner::new(&fs, &model, &stamp);
                for op in &workload.ops {
                    all += 1;
                    refused += u32::from(!runner.step(op).expect("the engine works"));
                }
            }
            assert!(all > 150 && refused * 10 < all, "{}: {refused} of {all}", family.name());
        }
    }

    #[test]
    fn ace_is_exhaustive() {
        let ops = own(ACE_OPS);
        let single: usize = ops.iter().map(|op| syncs(op).len()).sum();
        assert_eq!((ace1().count(), ops.len()), (single, 51));
        let of = |text: &str| ops::format(&syncs(&own(text)[0]));
        let all = "fsync /A; fdatasync /A; fsync /A/foo; fdatasync /A/foo; fsync /A/bar; \
            fdatasync /A/bar; sync";
        assert_eq!(of("append /A/foo 100"), all);
        assert_eq!(of("unlink /foo"), "fsync /; fdatasync /; fsync /A/bar; fdatasync /A/bar; sync");
        let moved = "fsync /B; fdatasync /B; fsync /B/foo; fdatasync /B/foo; fsync /A; fdatasync /A; \
            fsync /A/bar; fdatasync /A/bar; sync";
        assert_eq!(of("rename /A/foo /B/foo"), moved);
        // After the first nothing, or any of its syncs.
        assert_eq!(ace2().count(), (ops.len() + single) * single);
    }
}
