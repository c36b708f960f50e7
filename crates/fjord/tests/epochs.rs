//! Epochs: what `is_durable` and `wait_durable` say of barrier calls, against what the device has after a
//! power cut that takes everything it may. New files, which need a commit, and data in place, in random
//! order; `FJORD_SEED` repeats a run.

use std::sync::Arc;
use std::time::Duration;

use fjord::{
    CommitPipeline, Cred, Epoch, Fs, FsyncPolicyKind, InodeRef, MemDevice, MkfsOptions,
    MountOptions, Scheduler,
};
use fjord_block::{MemImage, Request};
use fjord_testkit::gate_device::{Cache, GateDevice, is_durable};
use fjord_testkit::rng::{Rng, mix, seed_from_env};

const OLD_COUNT: usize = 24;
const OLD_BYTES: usize = 8192;
const ROUNDS: usize = 8;
/// Fewer than the bound on commits in flight, at which a barrier call waits.
const CALLS_MAX: u64 = 6;

/// What a barrier call has ordered.
struct Promise {
    epoch: Epoch,
    path: String,
    content: Vec<u8>,
}

/// Files with content that no mount has in its cache.
fn image() -> MemImage {
    let device = Arc::new(MemDevice::new(48 << 20));
    let fs = Fs::create_on(device.clone(), &MkfsOptions::default(), &MountOptions::default())
        .expect("a file system");
    for number in 0..OLD_COUNT {
        fs.write(format!("/old{number}"), [1; OLD_BYTES]).expect("a file");
    }
    fs.unmount().expect("unmount");
    device.snapshot()
}

struct Rig {
    what: String,
    gate: Arc<GateDevice>,
    fs: Fs,
    rng: Rng,
    /// Files whose content is not replaced yet.
    old: Vec<usize>,
    made: usize,
    promises: Vec<Promise>,
}

impl Rig {
    fn new(image: &MemImage, cache: Cache, pipeline: CommitPipeline, rng: Rng, what: &str) -> Rig {
        let gate = Arc::new(GateDevice::new(image, cache));
        let options = MountOptions {
            background_threads: false,
            scheduler: Scheduler::Epoch,
            // `ijournal` orders by itself.
            fsync: FsyncPolicyKind::Compound,
            pipeline,
            ..MountOptions::default()
        };
        let fs = Fs::open_device(gate.clone(), &options).expect("it mounts");
        let what = format!("{cache:?}, {pipeline:?}, {what}");
        let old = (0..OLD_COUNT).collect();
        Rig { what, gate, fs, rng, old, made: 0, promises: Vec::new() }
    }

    fn open(&mut self) -> (InodeRef, String, usize) {
        if self.rng.below(2) == 0
            && let Some(number) = self.old.pop()
        {
            let path = format!("/old{number}");
            return (self.fs.resolve(&path).expect("an old file"), path, OLD_BYTES);
        }
        let name = format!("new{}", self.made);
        let root = self.fs.root().expect("the root");
        let file = root.create(name.as_bytes(), 0o644, &Cred::root()).expect("a file");
        (file, format!("/{name}"), 1 + self.rng.below(20_000) as usize)
    }

    /// Writes a file and orders it.
    fn order_one(&mut self) {
        self.made += 1;
        let (file, path, bytes) = self.open();
        let content = vec![self.made as u8 | 0x80; bytes];
        file.write(0, &content).expect("written");
        // fdatabarrier orders the name of a new file, too: without it the data cannot be read.
        let epoch = file.barrier(self.rng.below(2) == 0).expect("a barrier call");
        let last = self.promises.last().map(|promise| promise.epoch);
        assert!(last.is_none_or(|last| last < epoch), "{}: epochs ascend", self.what);
        self.promises.push(Promise { epoch, path, content });
    }

    fn durable_count(&self) -> usize {
        self.promises
            .iter()
            .filter(|promise| self.fs.is_durable(promise.epoch).expect("an epoch of it"))
            .count()
    }

    /// What is said to be durable is, and is a prefix.
    fn check(&self) -> usize {
        let durable = self.durable_count();
        let image = self.gate.durable_image();
        let device = Arc::new(MemDevice::from_image(&image));
        let fs = Fs::open_device(device, &MountOptions::default()).expect("it recovers");
        for (index, promise) in self.promises.iter().enumerate() {
            let is_durable = self.fs.is_durable(promise.epoch).expect("an epoch of it");
            // Others may have become durable since they were counted.
            assert!(is_durable || index >= durable, "{}: no prefix", self.what);
            if index < durable {
                let found = fs.read(&promise.path);
                let is_there = found.as_ref().is_ok_and(|found| *found == promise.content);
                assert!(is_there, "{}: {} is lost: {:?}", self.what, promise.path, found.err());
            }
        }
        fs.unmount().expect("unmount");
        durable
    }

    fn round(&mut self, stalls: bool) {
        if stalls {
            // None in flight, so that none of these calls waits for the bound.
            if let Some(last) = self.promises.last() {
                self.fs.wait_durable(last.epoch).expect("durable");
            }
            self.gate.hold(is_durable);
        }
        for _ in 0..=self.rng.below(CALLS_MAX - 1) {
            self.order_one();
            self.check();
        }
        self.gate.release_all();
        let number = self.rng.below(self.promises.len() as u64) as usize;
        let epoch = self.promises[number].epoch;
        self.fs.wait_durable(epoch).expect("durable");
        assert!(self.check() > number, "{}: epoch {number} is not durable", self.what);
    }
}

fn every_kind(what: &str, test: impl Fn(&mut Rig)) {
    let seed = seed_from_env(what, 16);
    let image = image();
    let mut number = 0;
    for cache in [Cache::NativeBarrier, Cache::Volatile, Cache::None] {
        for pipeline in [CommitPipeline::Serial, CommitPipeline::Dual] {
            number += 1;
            let rng = Rng::new(mix(seed.wrapping_add(number)));
            test(&mut Rig::new(&image, cache, pipeline, rng, &format!("{what}, seed {seed}")));
        }
    }
}

#[test]
fn what_is_said_to_be_durable_is() {
    every_kind("random", |rig| {
        for round in 0..ROUNDS {
            rig.round(round % 2 == 0);
        }
        rig.fs.sync().expect("sync");
        let last = rig.promises.last().expect("a promise").epoch;
        rig.fs.wait_durable(last).expect("durable");
        assert_eq!(rig.check(), rig.promises.len(), "{}", rig.what);
        let unknown = Epoch::from_parts(last.mount(), last.number() + 1);
        let of_another = Epoch::from_parts(last.mount() ^ 1, last.number());
        for wrong in [unknown, of_another] {
            let refused = rig.fs.wait_durable(wrong).expect_err("not an epoch that has ended here");
            assert_eq!(refused.errno(), libc::EINVAL, "{}", rig.what);
            let refused = rig.fs.is_durable(wrong).expect_err("not an epoch that has ended here");
            assert_eq!(refused.errno(), libc::EINVAL, "{}", rig.what);
        }
        rig.fs.unmount().expect("unmount");
    });
}

#[test]
fn a_failure_is_told_to_the_waiter() {
    every_kind("failure", |rig| {
        rig.order_one();
        let first = rig.promises[0].epoch;
        rig.fs.wait_durable(first).expect("durable");
        rig.gate.fail_all();
        let root = rig.fs.root().expect("the root");
        let file = root.create(b"lost", 0o644, &Cred::root()).expect("in memory");
        file.write(0, &[7; 5000]).expect("in memory");
        // The call may fail already.
        if let Ok(epoch) = file.barrier(false) {
            assert!(rig.fs.wait_durable(epoch).is_err(), "{}", rig.what);
            assert!(!rig.fs.is_durable(epoch).expect("an epoch of it"), "{}", rig.what);
        }
        assert!(rig.fs.is_durable(first).expect("an epoch of it"), "{}", rig.what);
        // It reports the failure.
        let _ = rig.fs.unmount();
    });
}

/// Data in place are ordered, then a commit, whose blocks arrive first; then the data's write fails. The
/// commit is durable, but neither epoch is.
#[test]
fn a_commit_does_not_hide_a_failed_write_before_it() {
    every_kind("overtaken failure", |rig| {
        rig.fs.sync().expect("sync");
        let old = rig.fs.resolve("/old0").expect("an old file");
        old.fsync(false).expect("fsync");
        rig.gate.hold(|_| true);
        old.write(0, &[3; 4096]).expect("written");
        let in_place = old.barrier(true).expect("a barrier call");
        let Some(Request::Write { offset: failing, .. }) = rig.gate.held().into_iter().next()
        else {
            panic!("{}: its write is held", rig.what)
        };
        rig.gate.hold(
            move |request| matches!(request, Request::Write { offset, .. } if *offset == failing),
        );
        let root = rig.fs.root().expect("the root");
        let new = root.create(b"new", 0o644, &Cred::root()).expect("a file");
        let behind = new.barrier(false).expect("a barrier call");
        let waited = std::thread::scope(|scope| {
            let waiting = scope.spawn(|| rig.fs.wait_durable(behind));
            // It waits by then; if it is slower, it finds the failure when it asks.
            std::thread::sleep(Duration::from_millis(20));
            rig.gate.fail_next_write();
            rig.gate.release_all();
            waiting.join().expect("no panic")
        });
        assert!(waited.is_err(), "{}: {waited:?}", rig.what);
        for epoch in [in_place, behind] {
            assert!(!rig.fs.is_durable(epoch).expect("an epoch of it"), "{}: {epoch:?}", rig.what);
            assert!(rig.fs.wait_durable(epoch).is_err(), "{}: {epoch:?}", rig.what);
        }
        // It reports the failure.
        let _ = rig.fs.unmount();
    });
}

/// As on Linux, a read-only mount has nothing to make durable or to order.
#[test]
fn calls_on_a_read_only_mount_succeed() {
    let options = MountOptions { read_only: true, ..MountOptions::default() };
    let device = Arc::new(MemDevice::from_image(&image()));
    let fs = Fs::open_device(device, &options).expect("it mounts");
    for path in ["/old0", "/"] {
        let file = fs.resolve(path).expect("it exists").open();
        file.fsync(false).expect("fsync");
        file.fsync(true).expect("fdatasync");
        let epoch = file.barrier(false).expect("a barrier call");
        assert!(fs.is_durable(epoch).expect("an epoch of it"));
    }
}

/// Where neither device nor policy keeps order a barrier call is an fsync.
#[test]
fn an_fsync_ends_a_durable_epoch() {
    let device = Arc::new(MemDevice::from_image(&image()));
    let options = MountOptions { fsync: FsyncPolicyKind::Compound, ..MountOptions::default() };
    let fs = Fs::open_device(device, &options).expect("it mounts");
    let file = fs.resolve("/old0").expect("a file");
    for round in 2..5 {
        file.write(0, &[round; 100]).expect("written");
        let epoch = file.barrier(true).expect("a barrier call");
        assert!(fs.is_durable(epoch).expect("an epoch of it"));
        fs.wait_durable(epoch).expect("durable");
    }
    assert_eq!((fs.stats().barriers, fs.stats().barriers_as_fsync), (0, 3));
    drop(file);
    fs.unmount().expect("unmount");
}
