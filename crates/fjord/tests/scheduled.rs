//! The engine over the epoch scheduler, on a device whose answers the test holds back.
//!
//! Verifies: fbarrier and fdatabarrier do not wait for the device, and what they left is durable
//! with the next fsync; who waits for background writes promotes them; memory under way is
//! bounded; fdatasync is not taken in by somebody else's commit that had flushed before; a commit
//! sends data that i-transactions carry in the epoch of its log blocks, and costs one flush.

use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use fjord::{AreaLayout, Cred, Fs, FsyncPolicyKind, InodeRef, MountOptions, Scheduler, SetAttr};
use fjord_block::epoch::EpochStats;
use fjord_block::{
    Class, FaultAction, FaultDevice, FaultMatch, FaultRule, IoOp, MemDevice, MemImage, Record,
    Request,
};
use fjord_testkit::gate_device::{Cache, GateDevice};

/// How long something that must happen may take.
const PATIENCE: Duration = Duration::from_secs(120);

fn gate(image: &MemImage) -> Arc<GateDevice> {
    Arc::new(GateDevice::new(image, Cache::Volatile))
}

/// Holds back all writes and flushes.
fn close(gate: &GateDevice) {
    gate.hold(|_| true);
}

fn image(args: &[&str]) -> MemImage {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("image");
    let made = Command::new("mke2fs")
        .args(["-q", "-F", "-t", "ext4"])
        .args(args)
        .arg(&path)
        .arg("64M")
        .status()
        .expect("mke2fs runs (package e2fsprogs)");
    assert!(made.success());
    MemDevice::from_file(&path).expect("the image is read").snapshot()
}

fn options() -> MountOptions {
    MountOptions {
        background_threads: false,
        scheduler: Scheduler::Epoch,
        ..MountOptions::default()
    }
}

fn create(fs: &Fs, name: &str) -> InodeRef {
    let root = fs.root().expect("root");
    root.create(name.as_bytes(), 0o644, &Cred::root()).expect("create")
}

/// Runs `act`, which must not need the gate to open; opens it if it does, and fails.
fn without_waiting<T: Send>(gate: &GateDevice, what: &str, act: impl FnOnce() -> T + Send) -> T {
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let watch = scope.spawn(|| {
            let began = Instant::now();
            while !done.load(Ordering::SeqCst) {
                if began.elapsed() > PATIENCE {
                    gate.release_all();
                    return true;
                }
                std::thread::sleep(Duration::from_millis(2));
            }
            false
        });
        let value = act();
        done.store(true, Ordering::SeqCst);
        assert!(!watch.join().expect("the watch ends"), "{what} waited for the device");
        value
    })
}

fn wait_until(what: &str, mut reached: impl FnMut() -> bool) {
    let began = Instant::now();
    while !reached() {
        assert!(began.elapsed() < PATIENCE, "{what}: not within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn barriers_do_not_wait() {
    for args in [&[][..], &["-O", "^metadata_csum"]] {
        let gate = gate(&image(args));
        let fs = Fs::open_device(gate.clone(), &options()).expect("open");
        let (file, other) = (create(&fs, "a"), create(&fs, "b"));
        file.write(0, &[1; 4096]).expect("write");
        file.fsync(false).expect("fsync");
        // Without checksums a commit waits for its log blocks; with them for nothing.
        let checksums = args.is_empty();
        close(&gate);
        without_waiting(&gate, "fdatabarrier in place", || {
            for round in 0..20 {
                file.write(0, &[round; 4096]).expect("write");
                file.barrier(true).expect("fdatabarrier");
            }
        });
        if checksums {
            without_waiting(&gate, "fbarrier with metadata", || {
                for round in 0..6_u64 {
                    other.write(round * 4096, &[7; 4096]).expect("write");
                    other.barrier(false).expect("fbarrier");
                }
            });
        }
        assert!(gate.held_count() > 0, "nothing was under way");
        gate.release_all();
        other.fsync(false).expect("fsync");
        file.fsync(false).expect("fsync");
        let stats = fs.stats();
        assert_eq!(stats.barriers, if checksums { 26 } else { 20 });
        // What was promised now is there for the next user, who recovers.
        let left = Arc::new(MemDevice::from_image(&gate.completed_image()));
        let again = Fs::open_device(left, &options()).expect("recovery");
        assert_eq!(again.read("a").expect("a"), [19; 4096]);
        assert_eq!(again.read("b").expect("b").len(), if checksums { 6 * 4096 } else { 0 });
        again.unmount().expect("unmount");
        fs.unmount().expect("unmount");
    }
}

/// Commits that were only ordered are finished after eight of them, by the timer's call, and at
/// unmount.
#[test]
fn ordered_commits_are_finished() {
    let gate = gate(&image(&[]));
    let fs = Fs::open_device(gate.clone(), &options()).expect("open");
    let file = create(&fs, "a");
    for round in 0..50_u64 {
        file.write(round * 4096, &[5; 4096]).expect("write");
        file.barrier(false).expect("fbarrier");
    }
    let commits = fs.stats().journal.commits;
    assert!(commits > 40, "{commits} of 50 commits are finished");
    fs.unmount().expect("unmount");
    let left = Arc::new(MemDevice::from_image(&gate.completed_image()));
    let again = Fs::open_device(left, &options()).expect("open");
    assert_eq!(again.read("a").expect("a").len(), 50 * 4096);
}

#[test]
fn an_fsync_promotes_background_writes() {
    let gate = gate(&image(&[]));
    let options = MountOptions {
        background_threads: true,
        writeback_interval: Duration::ZERO,
        commit_interval: Duration::from_secs(3600),
        ..options()
    };
    let fs = Fs::open_device(gate.clone(), &options).expect("open");
    let file = create(&fs, "a");
    close(&gate);
    file.write(0, &vec![3; 1 << 20]).expect("write");
    let scheduler = || fs.stats().scheduler.expect("there is a scheduler");
    wait_until("background writeback", || gate.held_count() > 0);
    let before = scheduler().promoted_count;
    std::thread::scope(|scope| {
        let fsync = scope.spawn(|| file.fsync(false));
        wait_until("promotion", || scheduler().promoted_count > before);
        gate.release_all();
        fsync.join().expect("no panic").expect("fsync");
    });
    fs.unmount().expect("unmount");
}

/// Data for which nobody waits holds no more than its share of the cache.
#[test]
fn memory_under_way_is_bounded() {
    const CACHE_BYTES: u64 = 16 << 20;
    let gate = gate(&image(&[]));
    let options = MountOptions { cache_size_bytes: CACHE_BYTES, ..options() };
    let fs = Fs::open_device(gate.clone(), &options).expect("open");
    let file = create(&fs, "a");
    file.write(0, &vec![1; 1 << 20]).expect("write");
    file.fsync(false).expect("fsync");
    close(&gate);
    let stuck = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            for round in 0..64 {
                file.write(0, &vec![round; 1 << 20]).expect("write");
                file.barrier(true).expect("fdatabarrier");
            }
            stuck.store(true, Ordering::SeqCst);
        });
        // It goes as far as its share and stays there. A writer that is only slow goes unnoticed.
        let queued = || fs.stats().scheduler.expect("a scheduler").queued_count;
        let mut last = (queued(), Instant::now());
        while last.1.elapsed() < Duration::from_secs(1) {
            std::thread::sleep(Duration::from_millis(20));
            if queued() != last.0 {
                last = (queued(), Instant::now());
            }
        }
        assert!(!stuck.load(Ordering::SeqCst), "64 MiB are under way");
        gate.release_all();
        writer.join().expect("no panic");
    });
    fs.unmount().expect("unmount");
}

/// Whether a request writes a block that begins so.
fn writes_block(request: &Request, start: &[u8]) -> bool {
    match request {
        Request::Write { bufs, .. } => bufs.iter().any(|buf| buf.starts_with(start)),
        _ => false,
    }
}

/// Data whose writes an i-transaction put off goes into the epoch of the log blocks of the commit that
/// makes it good, and the commit does not wait for it. Within the epoch the scheduler sends what it likes first.
#[test]
fn a_commit_sends_carried_data_with_its_log() {
    const DESCRIPTOR: [u8; 8] = [0xc0, 0x3b, 0x39, 0x98, 0, 0, 0, 1];
    const COMMIT: [u8; 8] = [0xc0, 0x3b, 0x39, 0x98, 0, 0, 0, 2];
    let gate = gate(&image(&[]));
    let fs = Fs::open_device(gate.clone(), &options()).expect("open");
    let layout = AreaLayout { count: 2, area_bytes: 256 << 10 };
    fs.set_ijournal_areas(Some(layout)).expect("areas");
    fs.unmount().expect("unmount");
    let options = MountOptions { fsync: FsyncPolicyKind::Ijournal, ..options() };
    let fs = Fs::open_device(gate.clone(), &options).expect("open");
    let (file, other) = (create(&fs, "a"), create(&fs, "b"));
    fs.sync().expect("sync");
    let before = fs.stats().fsync.policy;
    file.write(0, &[0xa5; 8192]).expect("write");
    file.fsync(false).expect("fsync");
    assert_eq!(fs.stats().fsync.policy, before + 1, "it went into an area");
    let earlier = gate.records().len();
    other.write(0, &[7; 4096]).expect("write");
    close(&gate);
    // An fsync of a directory is a commit.
    let root = fs.root().expect("the root");
    let commit = std::thread::spawn(move || root.fsync(false).expect("fsync"));
    // What the scheduler flushes by itself, for room in the device's cache, has the lowest class.
    let is_flush = |request: &Request| match request {
        Request::Flush { class } => *class != Class::Background,
        _ => false,
    };
    // All of the epoch goes through, which the scheduler sends in the order and in the portions that it likes.
    gate.hold(move |request| is_flush(request) || writes_block(request, &COMMIT));
    let sent = || -> Vec<Request> {
        gate.records().into_iter().skip(earlier).map(|record| record.request).collect()
    };
    wait_until("a flush", || sent().iter().any(is_flush));
    let requests = sent();
    let place = |start: &[u8]| requests.iter().position(|request| writes_block(request, start));
    let flush = requests.iter().position(is_flush);
    // The data may have been sent before. In the i-transaction it is not the first block.
    let is_data = |request: &Request| match request {
        Request::Write { bufs, .. } => bufs.first().is_some_and(|buf| buf.starts_with(&[0xa5; 64])),
        _ => false,
    };
    let was_sent = gate.records()[..earlier].iter().any(|record| is_data(&record.request));
    let (data, log) = (place(&[0xa5; 64]), place(&DESCRIPTOR));
    assert!(was_sent || data.is_some() && data < flush, "data {data:?}, flush {flush:?}");
    assert!(log.is_some() && log < flush, "log {log:?}, flush {flush:?}");
    assert_eq!(place(&COMMIT), None, "the next epoch is on its way");
    gate.release_all();
    commit.join().expect("no panic");
    other.fsync(false).expect("fsync");
    let left = Arc::new(MemDevice::from_image(&gate.completed_image()));
    let again = Fs::open_device(left, &options).expect("recovery");
    assert_eq!(again.read("a").expect("a"), [0xa5; 8192]);
    assert_eq!(again.read("b").expect("b"), [7; 4096]);
    fs.unmount().expect("unmount");
}

/// Whatever background writes have completed before it.
#[test]
fn a_commit_costs_one_flush() {
    let memory = Arc::new(MemDevice::from_image(&image(&[])));
    let device =
        FaultDevice::new(memory).claiming(|has| (has.volatile_cache, has.fua) = (true, true));
    let device = Arc::new(device);
    let options = MountOptions {
        background_threads: true,
        writeback_interval: Duration::ZERO,
        commit_interval: Duration::from_secs(3600),
        ..options()
    };
    let fs = Fs::open_device(device.clone(), &options).expect("open");
    let (file, other) = (create(&fs, "a"), create(&fs, "b"));
    file.fsync(false).expect("fsync");
    device.start_recording();
    let scheduler = || fs.stats().scheduler.expect("there is a scheduler");
    let before = scheduler();
    for round in 0..20 {
        let record_count = device.record_count();
        other.write(round * 4096, &[1; 4096]).expect("write");
        wait_until("background writeback", || device.record_count() > record_count);
        file.write(round * 4096, &[2; 4096]).expect("write");
        file.fsync(false).expect("fsync");
    }
    let after = scheduler();
    assert_eq!(after.epoch_count - before.epoch_count, 40, "two epochs each");
    // Those for room in the device's cache come as the scheduler's measurements have it.
    let asked = |stats: &EpochStats| stats.flush_count - stats.background_flush_count;
    assert_eq!(asked(&after) - asked(&before), 20);
    fs.unmount().expect("unmount");
}

/// A commit that flushed before data in place was written does not make that data durable.
#[test]
fn fdatasync_beside_a_commit_under_way() {
    for scheduler in [Scheduler::Direct, Scheduler::Epoch] {
        let memory = Arc::new(MemDevice::from_image(&image(&[])));
        let device = FaultDevice::new(memory).claiming(|has| has.volatile_cache = true);
        let device = Arc::new(device);
        let options = MountOptions { scheduler, ..options() };
        let fs = Fs::open_device(device.clone(), &options).expect("open");
        let (file, other) = (create(&fs, "a"), create(&fs, "b"));
        file.write(0, &[1; 4096]).expect("write");
        fs.sync().expect("sync");
        // fdatasync of the file needs the running transaction.
        let grow = SetAttr { size: Some(8192), ..SetAttr::default() };
        file.set_attr(&grow, &Cred::root()).expect("truncate");
        other.write(0, &[9; 4096]).expect("write");
        // Its commit writes data, log, flushes, and is slow with the commit block; if this thread is
        // slower, what it does comes after the commit.
        let action = FaultAction::Delay(Duration::from_millis(300));
        let matches = FaultMatch { op: Some(IoOp::Write), range: None };
        device.start_recording();
        device.faults().add(FaultRule { matches, skip_count: 2, hit_count_max: 1, action });
        std::thread::scope(|scope| {
            let commit = scope.spawn(|| other.fsync(false));
            wait_until("the commit block", || device.record_count() >= 4);
            file.write(0, &[4; 4096]).expect("write");
            file.fsync(true).expect("fdatasync");
            commit.join().expect("no panic").expect("fsync");
        });
        let end = device.stamp();
        let records = device.take_recording();
        let has_data = |record: &&Record| match &record.request {
            Request::Write { bufs, .. } => bufs.iter().any(|buf| buf.iter().all(|byte| *byte == 4)),
            _ => false,
        };
        let written = records.iter().find(has_data).and_then(|record| record.completed_at);
        let written = written.expect("the data was written");
        let covered = records.iter().any(|record| {
            matches!(record.request, Request::Flush { .. })
                && record.submitted_at > written
                && record.completed_at.is_some_and(|at| at < end)
        });
        assert!(covered, "{scheduler:?}: fdatasync promised what no flush had covered");
        fs.unmount().expect("unmount");
    }
}
