//! Fsync by i-transactions: what it writes, what it waits for, when it falls back.

use std::process::Command;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use fjord::{
    AreaLayout, Cred, Fallback, Fs, FsyncPolicyKind, InodeRef, MountOptions, RenameFlags,
    Scheduler, SetAttr,
};
use fjord_block::{Device, DeviceExt, FaultDevice, MemDevice, MemImage, Request};
use fjord_testkit::gate_device::{Cache, GateDevice};

/// Longer than anything here takes, unless it waits for what never comes.
const PATIENCE: Duration = Duration::from_secs(120);

/// Size of the images.
const IMAGE_BYTES: usize = 128 << 20;

fn image(areas: Option<AreaLayout>) -> MemImage {
    image_with("", areas)
}

/// The same with these features besides.
fn image_with(features: &str, areas: Option<AreaLayout>) -> MemImage {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("image");
    let made = Command::new("mke2fs")
        // A log in which what sixteen threads ask for at once fits one transaction.
        .args(["-q", "-F", "-t", "ext4", "-b", "4096", "-J", "size=32", "-O", features])
        .arg(&path)
        .arg(format!("{}M", IMAGE_BYTES >> 20))
        .status()
        .expect("mke2fs runs (package e2fsprogs)");
    assert!(made.success());
    let device = MemDevice::from_file(&path).expect("the image is read");
    if areas.is_some() {
        let device = Arc::new(MemDevice::from_image(&device.snapshot()));
        let plain = MountOptions { fsync: FsyncPolicyKind::Compound, ..options() };
        let fs = Fs::open_device(device.clone(), &plain).expect("the image mounts");
        fs.set_ijournal_areas(areas).expect("there is room");
        fs.unmount().expect("the image is clean");
        return device.snapshot();
    }
    device.snapshot()
}

fn areas(count: u32, area_bytes: u64) -> Option<AreaLayout> {
    Some(AreaLayout { count, area_bytes })
}

fn options() -> MountOptions {
    MountOptions {
        fsync: FsyncPolicyKind::Ijournal,
        scheduler: Scheduler::Direct,
        background_threads: false,
        ..MountOptions::default()
    }
}

/// A device with a cache and FUA.
fn logged(image: &MemImage) -> Arc<FaultDevice> {
    let memory = Arc::new(MemDevice::from_image(image));
    let device = FaultDevice::new(memory).claiming(|has| {
        (has.volatile_cache, has.fua) = (true, true);
    });
    Arc::new(device)
}

fn fallbacks(fs: &Fs) -> Vec<(Fallback, u64)> {
    fs.stats().fsync.fallbacks
}

/// Writes (with how many FUA) and flushes that `act` sends.
fn requests_of(device: &FaultDevice, act: impl FnOnce()) -> (usize, usize, usize) {
    device.start_recording();
    act();
    let log = device.take_recording();
    let writes = log.iter().filter(|r| matches!(r.request, Request::Write { .. })).count();
    let fua = log.iter().filter(|r| matches!(r.request, Request::Write { fua: true, .. })).count();
    let flushes = log.iter().filter(|r| matches!(r.request, Request::Flush { .. })).count();
    (writes, fua, flushes)
}

#[test]
fn a_small_fsync_is_one_write() {
    let device = logged(&image(areas(2, 1 << 20)));
    let fs = Fs::open_device(device.clone(), &options()).expect("the image mounts");
    let root = fs.root().expect("a root");
    let file = root.create(b"file", 0o644, &Cred::root()).expect("a file");
    // The first one marks the journal.
    file.fsync(false).expect("durable");
    for size in [4096, 1, 100, 8192, 4096] {
        let bytes = vec![7; size];
        let at = file.attr().size;
        let sent = requests_of(&device, || {
            file.write(at, &bytes).expect("written");
            file.fsync(false).expect("durable");
        });
        assert_eq!(sent, (1, 1, 0), "an append of {size} bytes");
    }
    for name in [&b"one"[..], b"two"] {
        let sent = requests_of(&device, || {
            let file = root.create(name, 0o644, &Cred::root()).expect("a file");
            file.write(0, &[9; 5000]).expect("written");
            file.fsync(false).expect("durable");
        });
        assert_eq!(sent, (1, 1, 0), "a new file");
    }
    for datasync in [false, true] {
        let sent = requests_of(&device, || file.fsync(datasync).expect("durable"));
        assert_eq!(sent, (0, 0, 0), "nothing new");
    }
    // What the transaction of the same number changes is written again.
    let change = SetAttr { mode: Some(0o600), ..SetAttr::default() };
    file.set_attr(&change, &Cred::root()).expect("set");
    let sent = requests_of(&device, || file.fsync(false).expect("durable"));
    assert_eq!(sent, (1, 1, 0), "a new mode");
    file.set_xattr(b"user.name", b"value", fjord::XattrFlags::empty()).expect("set");
    let sent = requests_of(&device, || file.fsync(false).expect("durable"));
    assert_eq!(sent, (1, 1, 0), "a new attribute");
    file.fallocate(fjord::FallocMode::KEEP_SIZE, 1 << 20, 8192).expect("room");
    let sent = requests_of(&device, || file.fsync(true).expect("durable"));
    assert_eq!(sent, (1, 1, 0), "new blocks");
    let sent = requests_of(&device, || file.fsync(false).expect("durable"));
    assert_eq!(sent, (0, 0, 0), "nothing new");
    assert_eq!(fs.stats().fsync.nothing, 3);
    assert_eq!(fallbacks(&fs), []);
    fs.unmount().expect("clean");
}

#[test]
fn large_data_goes_to_its_place_first() {
    let device = logged(&image(areas(1, 1 << 20)));
    let fs = Fs::open_device(device.clone(), &options()).expect("the image mounts");
    let file = fs.root().and_then(|root| root.create(b"f", 0o644, &Cred::root())).expect("a file");
    file.fsync(false).expect("durable");
    let sent = requests_of(&device, || {
        file.write(0, &vec![1; 200_000]).expect("written");
        file.fsync(false).expect("durable");
    });
    assert_eq!(sent, (2, 1, 1), "data, a flush, the i-transaction");
    let stats = fs.stats().fsync;
    assert_eq!((stats.policy, stats.inline_data_bytes), (2, 0));
    fs.unmount().expect("clean");
}

#[test]
fn without_areas_it_is_refused() {
    let device = logged(&image(None));
    let refused = Fs::open_device(device.clone(), &options()).expect_err("no areas, no ijournal");
    assert!(refused.to_string().contains("fjord tune --ijournal"), "{refused}");
    let looking = MountOptions { read_only: true, ..options() };
    assert!(Fs::open_device(device, &looking).is_ok(), "nobody calls fsync there");
}

#[test]
fn fallbacks_are_counted_by_reason() {
    let device = logged(&image(areas(1, 64 << 10)));
    let fs = Fs::open_device(device, &options()).expect("the image mounts");
    let root = fs.root().expect("a root");
    let make = |name: &[u8]| root.create(name, 0o644, &Cred::root()).expect("a file");
    let count = |why: Fallback| {
        fallbacks(&fs).iter().find(|(reason, _)| *reason == why).map_or(0, |(_, count)| *count)
    };
    let (a, b) = (make(b"a"), make(b"b"));
    root.link(&a, b"a2").expect("a link");
    a.fsync(false).expect("durable");
    assert_eq!(count(Fallback::HardLink), 1);
    b.write(0, b"x").expect("written");
    b.fsync(false).expect("durable");
    root.rename(b"b", &root, b"c", RenameFlags::empty(), &Cred::root()).expect("renamed");
    b.fsync(false).expect("durable");
    assert_eq!(count(Fallback::Rename), 1);
    root.rename(b"c", &root, b"d", RenameFlags::empty(), &Cred::root()).expect("renamed");
    let again = make(b"c");
    again.fsync(false).expect("durable");
    assert_eq!(count(Fallback::NameReuse), 1, "c's last owner lives on as d");
    root.unlink(b"c").expect("unlinked");
    again.write(0, b"x").expect("written");
    again.fsync(false).expect("durable");
    assert_eq!(count(Fallback::Orphan), 1);
    root.fsync(false).expect("durable");
    let file = make(b"e");
    for _ in 0..40 {
        file.write(file.attr().size, &[5; 4096]).expect("written");
        file.fsync(false).expect("durable");
    }
    assert!(count(Fallback::LogFull) > 0, "{:?}", fallbacks(&fs));
    fs.unmount().expect("clean");
}

/// What recovery would have to do fills up long before the commit interval is over: a commit in
/// the background starts at half, and fsyncs go on in the other half.
fn wait_until(reached: impl Fn() -> bool) {
    let began = std::time::Instant::now();
    while !reached() {
        assert!(began.elapsed() < PATIENCE, "not within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_commit_in_the_background_keeps_recovery_small() {
    // Half of an area takes 1,024 i-transactions; what recovery may do is half used up before,
    // for each of these makes a directory.
    const FSYNCS_MAX: u32 = 900;
    let device = logged(&image(areas(2, 8 << 20)));
    let options = MountOptions {
        background_threads: true,
        commit_interval: Duration::from_secs(3600),
        ..options()
    };
    let fs = Fs::open_device(device, &options).expect("the image mounts");
    let root = fs.root().expect("a root");
    let before = fs.stats().journal.commits;
    let mut number = 0;
    while fs.stats().journal.commits == before {
        if number == FSYNCS_MAX {
            // It is due, but the other thread may not have run yet.
            wait_until(|| fs.stats().journal.commits > before);
            break;
        }
        let dir = root.mkdir(format!("{number}").as_bytes(), 0o755, &Cred::root());
        let file = dir.expect("a directory").create(b"file", 0o644, &Cred::root());
        file.expect("a file").fsync(false).expect("durable");
        number += 1;
        if number % 16 == 0 {
            // The other thread may have no CPU of its own.
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    assert_eq!(fallbacks(&fs), [], "after {number} fsyncs");
    assert!(number > 100, "a commit after {number} fsyncs has another reason");
    fs.unmount().expect("clean");
}

#[test]
fn what_was_fsynced_is_there_after_a_crash() {
    let device = logged(&image(areas(2, 1 << 20)));
    let fs = Fs::open_device(device.clone(), &options()).expect("the image mounts");
    let root = fs.root().expect("a root");
    let dir = root.mkdir(b"d", 0o750, &Cred::root()).expect("a directory");
    let dir = dir.mkdir(b"e", 0o755, &Cred::root()).expect("a directory");
    let (kept, lost) = (
        dir.create(b"kept", 0o640, &Cred::root()).expect("a file"),
        dir.create(b"lost", 0o644, &Cred::root()).expect("a file"),
    );
    kept.write(0, &[1; 10_000]).expect("written");
    lost.write(0, &[2; 100]).expect("written");
    kept.fsync(false).expect("durable");
    kept.write(5000, &[3; 100]).expect("written");
    kept.fsync(true).expect("durable");
    assert_eq!(fallbacks(&fs), []);

    let (dead, found) = after_a_kill(&device);
    let mut wanted = vec![1; 10_000];
    wanted[5000..5100].fill(3);
    assert!(found.read("/d/e/kept").expect("there") == wanted);
    assert!(!found.try_exists("/d/e/lost").expect("looked up"));
    let attr = found.metadata("/d").expect("there");
    assert_eq!(attr.mode & 0o777, 0o750);
    found.unmount().expect("clean");
    is_clean_for_e2fsck(&dead);
    fs.unmount().expect("clean");
}

/// What a process leaves that is killed: what was written is there, nothing more comes. Recovered.
fn after_a_kill(device: &dyn Device) -> (Arc<MemDevice>, Fs) {
    let dead = MemDevice::new(IMAGE_BYTES as u64);
    let mut bytes = vec![0; IMAGE_BYTES];
    device.read_exact_at(0, &mut bytes).expect("read");
    dead.write_all_at(0, &bytes).expect("copied");
    let dead = Arc::new(dead);
    let found = Fs::open_device(dead.clone(), &options()).expect("recovers");
    (dead, found)
}

fn is_clean_for_e2fsck(image: &MemDevice) {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("recovered");
    let mut bytes = vec![0; IMAGE_BYTES];
    image.read_exact_at(0, &mut bytes).expect("read");
    std::fs::write(&path, &bytes).expect("written");
    let e2fsck = Command::new("e2fsck").arg("-fn").arg(&path).output().expect("e2fsck runs");
    assert!(e2fsck.status.success(), "{}", String::from_utf8_lossy(&e2fsck.stdout));
}

/// The i-transaction has the directory, for no commit had it yet; then one has.
#[test]
fn a_new_directory_may_commit_behind_the_i_transaction_with_it() {
    for features in ["", "inline_data"] {
        let gate = gate(&image_with(features, areas(2, 1 << 20)));
        let fs = Fs::open_device(gate.clone(), &options()).expect("the image mounts");
        let root = fs.root().expect("a root");
        let dir = root.mkdir(b"d", 0o750, &Cred::root()).expect("a directory");
        dir.create(b"first", 0o644, &Cred::root()).expect("a file");
        close(&gate);
        std::thread::scope(|scope| {
            let commit = scope.spawn(|| fs.sync());
            gate.wait_until_held();
            let kept = dir.create(b"kept", 0o644, &Cred::root()).expect("a file");
            kept.write(0, &[7; 500]).expect("written");
            dir.create(b"lost", 0o644, &Cred::root()).expect("a file");
            kept.fsync(false).expect("durable");
            gate.release_all();
            commit.join().expect("no panic").expect("committed");
        });
        assert_eq!(fallbacks(&fs), []);
        let (dead, found) = after_a_kill(&*gate);
        assert!(found.read("/d/kept").expect("there") == [7; 500], "{features}");
        assert!(found.try_exists("/d/first").expect("looked up"), "{features}");
        assert!(!found.try_exists("/d/lost").expect("looked up"), "{features}");
        found.unmount().expect("clean");
        is_clean_for_e2fsck(&dead);
        fs.unmount().expect("clean");
    }
}

/// A device with a cache, whose flushes a test can hold back.
fn gate(image: &MemImage) -> Arc<GateDevice> {
    Arc::new(GateDevice::new(image, Cache::Volatile))
}

fn close(gate: &GateDevice) {
    gate.hold(|request| matches!(request, Request::Flush { .. }));
}

/// A file system with an empty `/file`, which is durable.
fn with_file(layout: Option<AreaLayout>) -> (Arc<GateDevice>, Fs, InodeRef) {
    let gate = gate(&image(layout));
    let fs = Fs::open_device(gate.clone(), &options()).expect("the image mounts");
    let file = fs.root().expect("a root").create(b"file", 0o644, &Cred::root()).expect("a file");
    file.fsync(false).expect("durable");
    (gate, fs, file)
}

/// One thread fsyncs the file, and is held up by the device; another one appends to it at `end` and fsyncs it. The
/// content of `/file` after a power cut at the moment at which the second fsync returns.
fn durable_beside_a_held_fsync(gate: &GateDevice, file: &InodeRef, end: u64) -> Vec<u8> {
    std::thread::scope(|scope| {
        let first = scope.spawn(|| file.fsync(false));
        gate.wait_until_held();
        let (done, is_done) = channel();
        scope.spawn(move || {
            file.write(end, &[8; 100]).expect("written");
            file.fsync(false).expect("durable");
            done.send(gate.durable_image()).expect("somebody waits");
        });
        // It returns at once where it does not wait.
        let early = is_done.recv_timeout(Duration::from_millis(300)).ok();
        gate.release_all();
        let image = early.unwrap_or_else(|| is_done.recv_timeout(PATIENCE).expect("it ends"));
        first.join().expect("no panic").expect("durable");
        let (_, found) = after_a_kill(&MemDevice::from_image(&image));
        let content = found.read("/file").expect("it is there");
        found.unmount().expect("clean");
        content
    })
}

/// Two threads fsync one file. What the first has carried is in its i-transaction only, which is held up; so the
/// second must not return before that is durable.
#[test]
fn an_fsync_beside_another_of_the_file_waits_for_what_that_carries() {
    let (gate, fs, file) = with_file(areas(2, 1 << 20));
    file.write(0, &[7; 5000]).expect("written");
    // The first i-transaction only; each request is asked for more than once.
    let first = std::sync::OnceLock::new();
    gate.hold(move |request| match request {
        Request::Write { fua: true, offset, .. } => first.get_or_init(|| *offset) == offset,
        _ => false,
    });
    let content = durable_beside_a_held_fsync(&gate, &file, 5000);
    assert!(content == [vec![7; 5000], vec![8; 100]].concat(), "fsynced data is lost");
    drop(file);
    fs.unmount().expect("clean");
}

/// An i-transaction was too large for its area when its data had been taken to be carried: only the commit that
/// the fsync falls back to has them, and it is stuck. Another fsync of the file waits for it.
#[test]
fn an_fsync_beside_one_that_falls_back_waits_for_the_commit() {
    let (gate, fs, file) = with_file(areas(1, 64 << 10));
    fs.sync().expect("synced");
    file.write(0, &[7; 32 << 10]).expect("written");
    close(&gate);
    let content = durable_beside_a_held_fsync(&gate, &file, 32 << 10);
    assert!(content == [vec![7; 32 << 10], vec![8; 100]].concat(), "fsynced data is lost");
    let why = fallbacks(&fs);
    assert!(why.iter().any(|(why, _)| *why == Fallback::TooLarge), "{why:?}");
    drop(file);
    fs.unmount().expect("clean");
}

/// A commit is stuck in its flush. Fsyncs of files that it holds, and of others, in private and
/// shared directories, with renames and removals in between, go on.
#[test]
fn no_fsync_waits_for_a_commit_under_way() {
    const THREADS: usize = 16;
    const FSYNCS: usize = 6;
    let gate = gate(&image(areas(4, 1 << 20)));
    let fs = Fs::open_device(gate.clone(), &options()).expect("the image mounts");
    let root = fs.root().expect("a root");
    let old: Vec<_> = (0..THREADS)
        .map(|number| {
            let file = root.create(format!("old{number}").as_bytes(), 0o644, &Cred::root());
            let file = file.expect("a file");
            file.write(0, &[1; 3000]).expect("written");
            file.fsync(false).expect("durable");
            file
        })
        .collect();
    let shared: Vec<_> = (0..4)
        .map(|number| root.mkdir(format!("shared{number}").as_bytes(), 0o755, &Cred::root()))
        .collect::<fjord::Result<_>>()
        .expect("directories");
    close(&gate);
    std::thread::scope(|scope| {
        let commit = scope.spawn(|| fs.sync());
        gate.wait_until_held();
        let (done, finished) = channel();
        for (number, old) in old.iter().enumerate() {
            let (root, done, shared) = (&root, done.clone(), &shared[number % shared.len()]);
            scope.spawn(move || {
                let dir = root.mkdir(format!("d{number}").as_bytes(), 0o755, &Cred::root());
                let dir = dir.expect("a directory");
                for round in 0..FSYNCS {
                    let new = dir.create(format!("{round}").as_bytes(), 0o644, &Cred::root());
                    let new = new.expect("a file");
                    new.write(0, &[2; 4096]).expect("written");
                    new.fsync(false).expect("durable");
                    old.write(old.attr().size, &[3; 2000]).expect("written");
                    old.fsync(round % 2 == 0).expect("durable");
                    let name = format!("{number}-{round}");
                    for (name, is_removed) in [(&name, false), (&format!("{number}"), true)] {
                        let name = name.as_bytes();
                        let new = shared.create(name, 0o644, &Cred::root()).expect("a file");
                        new.write(0, &[4; 5000]).expect("written");
                        new.fsync(false).expect("durable");
                        if is_removed {
                            // And comes back in the next round.
                            shared.unlink(name).expect("removed");
                        } else {
                            let (to, flags) = (format!("moved{round}"), RenameFlags::empty());
                            let cred = Cred::root();
                            let renamed = shared.rename(name, &dir, to.as_bytes(), flags, &cred);
                            renamed.expect("renamed");
                        }
                    }
                }
                done.send(()).expect("somebody counts");
            });
        }
        let all = (0..THREADS).all(|_| finished.recv_timeout(PATIENCE).is_ok());
        let under_way = !commit.is_finished();
        gate.release_all();
        assert!(all, "an fsync waits for the commit");
        assert!(under_way, "the commit was not held up");
        commit.join().expect("no panic").expect("committed");
    });
    let stats = fs.stats().fsync;
    assert_eq!(stats.fallbacks, []);
    assert_eq!(stats.policy as usize, THREADS * (1 + 4 * FSYNCS));
    fs.unmount().expect("clean");
}
