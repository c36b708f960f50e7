//! An fsync that nobody waits for ends as one that is waited for, also when the device fails: the
//! same calls with each request failed in turn, under each policy.

use std::process::Command;
use std::sync::{Arc, OnceLock, mpsc};

use fjord::{
    AreaLayout, CommitPipeline, Cred, Fs, FsyncPolicyKind, MountOptions, OpenFile, Result,
    Scheduler, SetAttr, SetTime, Timespec,
};
use fjord_block::{
    FaultAction, FaultDevice, FaultMatch, FaultRule, IoOp, MemDevice, MemImage, Request,
};

/// Most requests of a kind that are failed, one in each run.
const FAILED_MAX: u64 = 24;
/// Pairs of runs of which one must make the same requests both ways.
const RUNS_MAX: u32 = 20;

fn image(fsync: FsyncPolicyKind) -> MemImage {
    static PLAIN: OnceLock<MemImage> = OnceLock::new();
    let plain = PLAIN.get_or_init(|| {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("image");
        let mut mke2fs = Command::new("mke2fs");
        mke2fs.args(["-q", "-F", "-t", "ext4", "-O", "fast_commit", "-J", "size=4"]);
        let made = mke2fs.arg(&path).arg("16M").output().expect("mke2fs (package e2fsprogs)");
        assert!(made.status.success(), "{made:?}");
        MemDevice::from_file(&path).expect("the image").snapshot()
    });
    let device = Arc::new(MemDevice::from_image(plain));
    if fsync == FsyncPolicyKind::Ijournal {
        let options = MountOptions { background_threads: false, ..MountOptions::default() };
        let fs = Fs::open_device(device.clone(), &options).expect("open");
        let layout = AreaLayout { count: 1, area_bytes: 256 << 10 };
        fs.set_ijournal_areas(Some(layout)).expect("areas");
        fs.unmount().expect("unmount");
    }
    device.snapshot()
}

/// Calls fsync and gives its errno.
type Call = fn(&OpenFile, bool) -> Option<i32>;

fn errno(result: Result<()>) -> Option<i32> {
    result.err().map(|error| error.errno())
}

fn waits(file: &OpenFile, datasync: bool) -> Option<i32> {
    errno(file.fsync(datasync))
}

fn goes_on(file: &OpenFile, datasync: bool) -> Option<i32> {
    let (sender, receiver) = mpsc::channel();
    file.fsync_then(datasync, move |result| sender.send(errno(result)).expect("it is waited for"));
    // Nobody else serves requests, so this thread has.
    receiver.try_recv().expect("told before the call returns")
}

/// What happened in a run.
struct Outcome {
    /// The errno of each call.
    said: Vec<Option<i32>>,
    /// Where the writes began, and the flushes (`None`), up to the one that failed.
    requests: Vec<Option<u64>>,
    is_hit: bool,
}

/// The requests up to the one that failed.
fn requests(device: &FaultDevice) -> Vec<Option<u64>> {
    let mut requests = Vec::new();
    for record in device.take_recording() {
        match record.request {
            Request::Write { offset, .. } => requests.push(Some(offset)),
            Request::Flush { .. } => requests.push(None),
            _ => {}
        }
        if record.error.is_some() {
            break;
        }
    }
    requests
}

/// New files, overwritten data and a directory; two open handles of each file.
fn run(image: &MemImage, options: &MountOptions, (op, place): (IoOp, u64), call: Call) -> Outcome {
    let device = Arc::new(FaultDevice::new(Arc::new(MemDevice::from_image(image))));
    let fs = Fs::open_device(device.clone(), options).expect("open");
    let root = fs.root().expect("the root");
    let old = root.create(b"old", 0o644, &Cred::root()).expect("a file");
    old.write(0, &[1; 20_000]).expect("written");
    old.fsync(false).expect("on the device");
    let new = root.create(b"new", 0o644, &Cred::root()).expect("a file");
    let handles = [old.open(), old.open(), new.open(), new.open()];
    device.faults().add(FaultRule {
        matches: FaultMatch { op: Some(op), range: None },
        skip_count: place,
        hit_count_max: 1,
        action: FaultAction::Fail(libc::EIO),
    });
    device.start_recording();
    let mut said = Vec::new();
    let long_ago =
        SetAttr { mtime: Some(SetTime::At(Timespec { sec: 1, nsec: 0 })), ..SetAttr::default() };
    for round in 0..3_u8 {
        // In the other rounds an overwrite finds the time that it sets, and leaves the inode clean.
        if round != 1 {
            said.push(errno(old.set_attr(&long_ago, &Cred::root()).map(|_| ())));
        }
        // A file system that has become read-only refuses; that is the same in both runs.
        said.push(old.write(4096, &[round; 4096]).err().map(|error| error.errno()));
        said.push(new.write(u64::from(round) * 9000, &[round; 9000]).err().map(|e| e.errno()));
        for (number, handle) in handles.iter().enumerate() {
            said.push(call(handle, (number + usize::from(round)).is_multiple_of(2)));
        }
        said.push(call(&root.open(), false));
    }
    let is_hit = device.faults().hit_count() > 0;
    drop((handles, old, new, root));
    // It fails where the fault was.
    said.push(errno(fs.unmount()).map(|_| libc::EIO));
    Outcome { said, requests: requests(&device), is_hit }
}

/// Both ways. The epoch scheduler merges requests by measured times: runs that differ in a merged
/// request before the fault are not compared.
fn run_both(image: &MemImage, options: &MountOptions, fault: (IoOp, u64)) -> [Outcome; 2] {
    for _ in 0..RUNS_MAX {
        let both = [waits, goes_on].map(|call: Call| run(image, options, fault, call));
        if both[0].requests == both[1].requests {
            return both;
        }
    }
    panic!("{options:?}, {fault:?}: the requests differ in {RUNS_MAX} runs");
}

#[test]
fn both_ways_of_an_fsync_end_alike() {
    let mut failed = 0;
    for &fsync in FsyncPolicyKind::ALL {
        let image = image(fsync);
        for (scheduler, pipeline) in [
            (Scheduler::Direct, CommitPipeline::Serial),
            (Scheduler::Epoch, CommitPipeline::Serial),
            (Scheduler::Epoch, CommitPipeline::Dual),
        ] {
            let options = MountOptions {
                fsync,
                scheduler,
                pipeline,
                background_threads: false,
                fixed_time: Some(Timespec { sec: 1_000_000_000, nsec: 0 }),
                ..MountOptions::default()
            };
            let places = (0..FAILED_MAX).map(|place| (IoOp::Write, place));
            for fault in places.chain((0..FAILED_MAX / 2).map(|place| (IoOp::Flush, place))) {
                let [one, other] = run_both(&image, &options, fault);
                let (one_said, other_said) = (&one.said, &other.said);
                assert_eq!(
                    one_said, other_said,
                    "{fsync:?}, {scheduler:?}, {pipeline:?}, {fault:?}"
                );
                failed += usize::from(one.is_hit && one.said.contains(&Some(libc::EIO)));
            }
        }
    }
    assert!(failed > 100, "{failed} runs met a failure");
}
