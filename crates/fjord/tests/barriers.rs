//! Barrier calls under `ijournal`, over a device that keeps no order: they wait for no flush, turn nothing off,
//! and what they promise holds in every image that a power cut leaves. `FJORD_SEED` repeats a run.

use std::sync::Arc;
use std::time::Duration;

use fjord::{
    Cred, Epoch, Error, Fs, FsyncPolicyKind, IjournalAreas, InodeRef, MemDevice, MkfsOptions,
    MountOptions, SetAttr, XattrFlags,
};
use fjord_testkit::gate_device::{Cache, GateDevice, is_durable};
use fjord_testkit::rng::{Rng, mix, seed_from_env};

const FILES: usize = 8;
const FILE_BYTES: usize = 8192;
/// Two blocks or three in an area each.
const CALLS: u64 = 2000;
const PATIENCE: Duration = Duration::from_secs(20);

struct Rig {
    gate: Arc<GateDevice>,
    fs: Fs,
    files: Vec<InodeRef>,
}

fn rig(cache: Cache) -> Rig {
    let rig = rig_with(cache, MountOptions::default());
    // The first barrier marks the journal, durably.
    rig.order(0, 1);
    rig
}

/// Files whose blocks are there.
fn rig_with(cache: Cache, options: MountOptions) -> Rig {
    rig_of(256 << 20, 16 << 20, cache, options)
}

fn rig_of(image_bytes: u64, area_bytes: u64, cache: Cache, options: MountOptions) -> Rig {
    let device = Arc::new(MemDevice::new(image_bytes));
    let areas = IjournalAreas::Areas { count: 2, area_bytes };
    let made = MkfsOptions { ijournal: areas, ..MkfsOptions::default() };
    let fs = Fs::create_on(device.clone(), &made, &MountOptions::default()).expect("a file system");
    for number in 0..FILES {
        fs.write(format!("/f{number}"), [1; FILE_BYTES]).expect("a file");
    }
    fs.unmount().expect("unmount");
    let gate = Arc::new(GateDevice::new(&device.snapshot(), cache));
    let options =
        MountOptions { background_threads: false, fsync: FsyncPolicyKind::Ijournal, ..options };
    let fs = Fs::open_device(gate.clone(), &options).expect("it mounts");
    let files = (0..FILES).map(|number| fs.resolve(format!("/f{number}")).expect("a file"));
    let files = files.collect();
    Rig { gate, fs, files }
}

impl Rig {
    fn order(&self, number: usize, value: u8) -> Epoch {
        self.files[number].write(0, &[value; 4096]).expect("written");
        self.files[number].barrier(true).expect("a barrier call")
    }

    /// Many calls, and what others do between them.
    fn order_many(&self) -> Epoch {
        let mut last = None;
        for call in 0..CALLS {
            let number = call as usize % FILES;
            last = Some(self.order(number, call as u8));
            // Readers, writers and stat.
            let file = &self.files[(number + 1) % FILES];
            file.read(0, &mut [0]).expect("read");
            file.write(5000, b"more").expect("written");
            assert_eq!(file.attr().size, FILE_BYTES as u64);
        }
        last.expect("a call")
    }

    fn end(self) {
        drop(self.files);
        self.fs.unmount().expect("unmount");
    }
}

/// Opens an image as after a power cut.
fn recovered(image: &fjord_block::MemImage) -> Fs {
    let device = Arc::new(MemDevice::from_image(image));
    Fs::open_device(device, &MountOptions::default()).expect("it recovers")
}

/// Calls under a stalled flush; a call that waits for it fails the test, and does not hang it.
#[test]
fn nothing_waits_for_a_stalled_flush() {
    for cache in [Cache::Volatile, Cache::None] {
        let rig = rig(cache);
        rig.gate.hold(is_durable);
        let (done, is_done) = std::sync::mpsc::channel();
        let last = std::thread::scope(|scope| {
            let calls = scope.spawn(|| {
                let last = rig.order_many();
                done.send(()).expect("somebody waits");
                last
            });
            let in_time = is_done.recv_timeout(PATIENCE);
            let is_durable = rig.fs.stats().journal.barrier_rounds > 0;
            rig.gate.release_all();
            let last = calls.join().expect("no panic");
            assert!(in_time.is_ok(), "{cache:?}: a call waits for the flush");
            assert!(!is_durable, "{cache:?}");
            last
        });
        let stats = rig.fs.stats();
        assert_eq!((stats.barriers, stats.barriers_as_fsync), (CALLS + 1, 0), "{cache:?}");
        rig.fs.wait_durable(last).expect("durable");
        assert!(rig.fs.is_durable(last).expect("an epoch of it"));
        let fs = recovered(&rig.gate.durable_image());
        let content = fs.read(format!("/f{}", (CALLS as usize - 1) % FILES)).expect("it is there");
        assert_eq!(content[..4096], [(CALLS - 1) as u8; 4096]);
        fs.unmount().expect("unmount");
        rig.end();
    }
}

#[test]
fn nothing_is_turned_off() {
    let rig = rig(Cache::Volatile);
    let commits = rig.fs.stats().journal.commits;
    for value in 0..20 {
        rig.order(1, value);
        rig.files[2].write(0, &[value; 6000]).expect("written");
        rig.files[2].fsync(false).expect("fsync");
    }
    let stats = rig.fs.stats();
    assert_eq!((stats.fsync.policy, stats.fsync.calls()), (20, 20));
    assert_eq!(stats.journal.commits, commits);
    assert_eq!((stats.barriers, stats.barriers_as_fsync), (21, 0));
    rig.end();
}

#[test]
fn what_no_i_transaction_can_have_is_an_fsync() {
    let rig = rig(Cache::Volatile);
    let root = rig.fs.root().expect("the root");
    let epoch = root.barrier(false).expect("a barrier call");
    assert!(rig.fs.is_durable(epoch).expect("an epoch of it"), "a directory");
    rig.files[3].write(0, &[7; 2 << 20]).expect("written");
    let epoch = rig.files[3].barrier(true).expect("a barrier call");
    assert!(rig.fs.is_durable(epoch).expect("an epoch of it"), "more than is carried");
    assert_eq!(rig.fs.stats().barriers_as_fsync, 2);
    drop(root);
    rig.end();
}

/// How an fsync of a changed file was served.
#[derive(Debug, PartialEq, Eq)]
enum Served {
    Durable,
    InOrder,
}

fn fsync(fs: &Fs, file: &InodeRef) -> Served {
    let counts = |fs: &Fs| {
        let stats = fs.stats();
        (stats.fsync.calls(), stats.barriers, stats.fsyncs_order_only, stats.barriers_as_fsync)
    };
    file.write(0, &[9; 100]).expect("written");
    let (calls, barriers, order_only, as_fsync) = counts(fs);
    file.fsync(false).expect("fsync");
    match counts(fs) {
        now if now == (calls + 1, barriers, order_only, as_fsync) => Served::Durable,
        now if now == (calls, barriers + 1, order_only + 1, as_fsync) => Served::InOrder,
        now => panic!("{now:?} after {:?}", (calls, barriers, order_only, as_fsync)),
    }
}

#[test]
fn a_mount_can_make_fsync_order_only() {
    let rig =
        rig_with(Cache::Volatile, MountOptions { order_only: true, ..MountOptions::default() });
    let warned = rig.fs.stats().events.iter().any(|event| event.message.contains("order_only"));
    assert!(warned, "it is said at mount");
    assert_eq!(fsync(&rig.fs, &rig.files[0]), Served::InOrder);
    let fs = recovered(&rig.gate.durable_image());
    assert_eq!(fs.read("/f0").expect("it is there")[0], 1, "not durable");
    fs.unmount().expect("unmount");
    rig.fs.sync().expect("sync");
    let fs = recovered(&rig.gate.durable_image());
    assert_eq!(fs.read("/f0").expect("it is there")[0], 9, "sync is durable");
    fs.unmount().expect("unmount");
    rig.end();
}

#[test]
fn files_and_directories_can_ask_for_order_only() {
    const ATTRIBUTE: &[u8] = b"user.fjord.order_only";
    let rig = rig(Cache::Volatile);
    let (fs, cred) = (&rig.fs, Cred::root());
    let set = |file: &InodeRef, value: &[u8]| {
        file.set_xattr(ATTRIBUTE, value, XattrFlags::empty()).expect("set");
    };
    assert_eq!(fsync(fs, &rig.files[0]), Served::Durable);
    for other in [&b""[..], b"2", b"yes", b"11", b"1\n", b"\0"] {
        set(&rig.files[0], other);
        assert_eq!(fsync(fs, &rig.files[0]), Served::Durable, "{other:?}");
    }
    set(&rig.files[0], b"1");
    assert_eq!(fsync(fs, &rig.files[0]), Served::InOrder);
    assert_eq!(fsync(fs, &rig.files[1]), Served::Durable);
    rig.files[0].remove_xattr(ATTRIBUTE).expect("removed");
    assert_eq!(fsync(fs, &rig.files[0]), Served::Durable);

    let root = fs.root().expect("the root");
    let dir = root.mkdir(b"dir", 0o755, &cred).expect("a directory");
    let before = dir.create(b"before", 0o644, &cred).expect("a file");
    set(&dir, b"1");
    let below = dir.mkdir(b"below", 0o755, &cred).expect("a directory");
    let file = below.create(b"file", 0o644, &cred).expect("a file");
    let link = below.symlink(b"link", b"file", &cred).expect("a link");
    assert_eq!(link.list_xattr().expect("a list"), Vec::<Vec<u8>>::new());
    fs.sync().expect("sync");
    assert_eq!(fsync(fs, &before), Served::Durable, "made before");
    assert_eq!(fsync(fs, &file), Served::InOrder);
    set(&file, b"0");
    fs.sync().expect("sync");
    assert_eq!(fsync(fs, &file), Served::Durable, "not this one");
    let said =
        fs.stats().events.iter().filter(|event| event.message.contains("order_only")).count();
    assert_eq!(said, 1);
    drop((root, dir, before, below, file, link));

    // It lies with the files.
    fs.sync().expect("sync");
    let again = recovered(&rig.gate.durable_image());
    assert_eq!(fsync(&again, &again.resolve("/dir/below/file").expect("a file")), Served::Durable);
    let below = again.resolve("/dir/below").expect("a directory");
    let new = below.create(b"new", 0o644, &cred).expect("a file");
    again.sync().expect("sync");
    assert_eq!(fsync(&again, &new), Served::InOrder);
    drop((below, new));
    again.unmount().expect("unmount");
    rig.end();
}

#[test]
fn data_that_was_written_back_before_is_in_order_too() {
    for cache in [Cache::Volatile, Cache::None] {
        let rig = rig(cache);
        rig.files[0].write(0, &[5; 4096]).expect("written");
        rig.files[0].write_back().expect("written back");
        let flushes = rig.fs.stats().journal.flushes;
        let epoch = rig.files[0].barrier(true).expect("a barrier call");
        assert_eq!(rig.fs.stats().journal.flushes, flushes);
        let behind = rig.order(1, 6);
        // Without a flush neither counts.
        let fs = recovered(&rig.gate.completed_image());
        let content = |name: &str| fs.read(name).expect("it is there")[0];
        assert_eq!(content("/f1"), 1, "behind one that is held");
        fs.unmount().expect("unmount");
        rig.fs.wait_durable(behind).expect("durable");
        assert!(rig.fs.is_durable(epoch).expect("an epoch of it"));
        let fs = recovered(&rig.gate.durable_image());
        let content = |name: &str| fs.read(name).expect("it is there")[0];
        assert_eq!([content("/f0"), content("/f1")], [5, 6]);
        fs.unmount().expect("unmount");
        rig.end();
    }
}

#[test]
fn a_failure_is_told_to_all_who_ask() {
    let rig = rig(Cache::Volatile);
    let first = rig.order(0, 2);
    rig.fs.wait_durable(first).expect("durable");
    rig.gate.fail_all();
    rig.files[1].write(0, &[3; 100]).expect("in memory");
    // The call may meet the failure, or leave it to those who wait.
    let lost: Option<Epoch> = rig.files[1].barrier(true).ok();
    if let Some(lost) = lost {
        assert!(rig.fs.wait_durable(lost).is_err());
        assert!(!rig.fs.is_durable(lost).expect("an epoch of it"));
        // Nothing was changed since.
        let again = rig.files[1].barrier(true).expect_err("what came before is lost");
        assert_eq!(again.errno(), libc::EIO);
    }
    let errno = |result: Result<(), Error>| result.expect_err("it is lost").errno();
    assert_eq!(errno(rig.files[1].fsync(true)), libc::EIO);
    assert!(rig.fs.is_durable(first).expect("an epoch of it"));
    drop(rig.files);
    // It reports the failure.
    let _ = rig.fs.unmount();
}

/// Files grow with a barrier call for each piece until there is no space; then one makes room, and it goes on.
#[test]
fn a_full_image_is_told_and_loses_nothing() {
    let rig = rig_of(32 << 20, 1 << 20, Cache::Volatile, MountOptions::default());
    let mut sizes = [FILE_BYTES as u64; FILES];
    let mut calls = 0;
    for _ in 0..3 {
        let refused = loop {
            let number = calls % FILES;
            let (file, piece) = (&rig.files[number], [calls as u8; 30_000]);
            calls += 1;
            assert!(calls < 20_000, "it never fills");
            match file.write(sizes[number], &piece) {
                Ok(count) => sizes[number] += count as u64,
                Err(error) => break error,
            }
            match file.barrier(true) {
                Ok(_) => {}
                Err(error) => break error,
            }
        };
        assert_eq!(refused.errno(), libc::ENOSPC, "{refused}");
        rig.fs.sync().expect("sync");
        let fs = recovered(&rig.gate.durable_image());
        for (number, &size) in sizes.iter().enumerate() {
            assert_eq!(fs.read(format!("/f{number}")).expect("it is there").len() as u64, size);
        }
        fs.unmount().expect("unmount");
        let empty = SetAttr { size: Some(0), ..SetAttr::default() };
        rig.files[calls % FILES].set_attr(&empty, &Cred::root()).expect("room");
        sizes[calls % FILES] = 0;
        // What was freed is free once a commit has it.
        rig.fs.sync().expect("sync");
    }
    let last = rig.order(0, 9);
    rig.fs.wait_durable(last).expect("durable");
    let fs = recovered(&rig.gate.durable_image());
    assert_eq!(fs.read("/f0").expect("it is there")[0], 9);
    fs.unmount().expect("unmount");
    rig.end();
}

/// Contents of the files by version: byte `v` at offset 0 is the version.
#[test]
fn every_image_has_a_prefix() {
    let seed = seed_from_env("barriers", 20);
    for round in 0..6 {
        let mut rng = Rng::new(mix(seed.wrapping_add(round)));
        let rig = rig([Cache::Volatile, Cache::None][round as usize % 2]);
        // Versions of each file with a number in the order of all barriers.
        let mut barriers: Vec<(usize, u8)> = Vec::new();
        let mut promised = 0;
        for value in 2..60 {
            let number = rng.below(FILES as u64) as usize;
            rig.order(number, value);
            barriers.push((number, value));
            let other = rng.below(FILES as u64) as usize;
            match rng.below(12) {
                0 => {
                    rig.files[other].write(6000, &[value; 500]).expect("written");
                    rig.files[other].fsync(false).expect("fsync");
                    promised = barriers.len();
                }
                1 => rig.files[other].write_back().expect("written back"),
                2 => {
                    rig.fs.sync().expect("sync");
                    promised = barriers.len();
                }
                _ => {}
            }
            if rng.below(3) != 0 {
                continue;
            }
            let fs = recovered(&rig.gate.cut_image(&mut rng));
            let found: Vec<u8> = (0..FILES)
                .map(|number| fs.read(format!("/f{number}")).expect("it is there")[0])
                .collect();
            fs.unmount().expect("unmount");
            // The last barrier that shows; all before it have to.
            let shows = barriers.iter().rposition(|&(file, value)| found[file] == value);
            let last = shows.map_or(0, |index| index + 1);
            assert!(last >= promised, "seed {seed}, round {round}: {found:?} after {barriers:?}");
            let mut expected = vec![1; FILES];
            barriers[..last].iter().for_each(|&(file, value)| expected[file] = value);
            assert_eq!(found, expected, "seed {seed}, round {round}: {barriers:?}");
        }
        rig.end();
    }
}

/// Threads that order and fsync beside each other: an fsync that has returned is never behind a gap.
#[test]
fn threads_that_order_and_sync() {
    let rig = rig(Cache::Volatile);
    std::thread::scope(|scope| {
        for (number, file) in rig.files.iter().enumerate() {
            scope.spawn(move || {
                for value in 0..200 {
                    file.write(0, &[value; 4096]).expect("written");
                    match number % 2 {
                        0 => drop(file.barrier(true).expect("a barrier call")),
                        _ => file.fsync(true).expect("fsync"),
                    }
                }
            });
        }
        // Commits in between, so that barriers of two transactions are live.
        scope.spawn(|| {
            for _ in 0..20 {
                rig.fs.sync().expect("sync");
                std::thread::sleep(Duration::from_millis(1));
            }
        });
    });
    let fs = recovered(&rig.gate.durable_image());
    for number in (1..FILES).step_by(2) {
        assert_eq!(fs.read(format!("/f{number}")).expect("it is there")[0], 199);
    }
    fs.unmount().expect("unmount");
    rig.end();
}
