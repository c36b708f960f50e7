//! What the explorer has found in the engine, so that it stays mended.

use std::sync::Arc;
use std::time::{Duration, Instant};

use fjord::{Cred, DataMode, Fs, FsyncPolicyKind, InodeRef, MountOptions, Scheduler};
use fjord_block::{
    AlignedBuf, Capabilities, Class, Completer, Device, Driver, ReadTicket, Request, Ticket,
    TicketCore,
};
use fjord_crash::base::{Base, FAST_COMMIT, FEATURES, Features, quiet};
use fjord_crash::edges::Edge;
use fjord_crash::explore::{Config, Workload, explore};
use fjord_crash::ops;
use fjord_crash::record::{DeviceKind, RecordingDevice};
use fjord_crash::states::Budget;
use parking_lot::Mutex;

fn passes(setup: &str, text: &str) {
    passes_by(FsyncPolicyKind::Compound, setup, text);
}

fn passes_by(fsync: FsyncPolicyKind, setup: &str, text: &str) {
    let features = match fsync {
        FsyncPolicyKind::FastCommit => FAST_COMMIT[0],
        FsyncPolicyKind::Ijournal => FEATURES[0].with_areas(1),
        _ => FEATURES[0],
    };
    passes_on(features, fsync, setup, text);
}

fn passes_on(features: Features, fsync: FsyncPolicyKind, setup: &str, text: &str) {
    for data in [DataMode::Ordered, DataMode::Writeback, DataMode::Journal] {
        for device in DeviceKind::ALL {
            let options = MountOptions { data, fsync, ..MountOptions::default() };
            let config = Config { device, features, ..Config::new(options) };
            let parse = |text| ops::parse(text).expect("operations");
            let workload = Workload::new(parse(setup), parse(text));
            let report = explore(&config, &workload, &Default::default()).expect("it runs");
            assert!(report.findings.is_empty(), "{}", report.findings[0]);
        }
    }
}

/// The size was stored at once, what lies below it was still only in memory: zeros in place of
/// data, or what a truncation had taken away.
#[test]
fn a_size_does_not_show_what_is_not_there_yet() {
    let setup = "create /a; append /a 9000";
    passes(setup, "truncate /a 5000; truncate /a 8100; create /b; fsync /b");
    passes(setup, "append /a 20000; truncate /a 40000; create /b; fsync /b");
    passes(setup, "append /a 20000; truncate /a 15000; create /b; fsync /b");
    passes(setup, "append /a 6000; fallocate /a plain 20480 20000; create /b; fsync /b");
    passes(setup, "truncate /a 5000; fallocate /a zero 20480 20000; create /b; fsync /b");
}

/// An overwrite in place went to blocks that the committed tree still showed elsewhere.
#[test]
fn a_shifted_range_is_committed_before_it_is_overwritten() {
    let setup = "create /foo; append /foo 20000";
    passes(setup, "fallocate /foo insert 4096 4096; write /foo 3000 6000; fdatasync /foo");
    passes(setup, "fallocate /foo collapse 4096 4096; write /foo 3000 6000; sync");
}

/// A file whose range was cut out, or let in, was committed by others between the two steps: a hole in
/// place of what follows, or zeros in place of its end.
#[test]
fn a_shift_is_whole_however_others_commit() {
    const TRIES: u32 = 12;
    let shifts = "fallocate /T0/a collapse 0 4096; fallocate /T0/a insert 4096 4096; ".repeat(3);
    let others = (1..4).map(|thread| {
        let round = |n| format!("create /T{thread}/f{n}; fsync /T{thread}/f{n}; mkdir /T{thread}/d{n}; fsync /T{thread}/d{n}");
        (0..3).map(round).collect::<Vec<_>>().join("; ")
    });
    let setup = "mkdir /T0; mkdir /T1; mkdir /T2; mkdir /T3; create /T0/a; append /T0/a 40000";
    let parse = |text: &str| ops::parse(text).expect("operations");
    let mut workload = Workload::new(parse(setup), parse(&shifts));
    workload.others = others.map(|text| parse(&text)).collect();
    for _ in 0..TRIES {
        let mut config = Config::new(MountOptions::default());
        (config.inner_every, config.damage_every, config.use_every) = (0, 0, 0);
        let report = explore(&config, &workload, &Default::default()).expect("it runs");
        assert!(report.findings.is_empty(), "{}", report.findings[0]);
    }
}

/// Pages of a range were written before those below it, and took the on-disk size along.
#[test]
fn allocating_a_range_leaves_no_hole_below_the_size() {
    let setup = "create /a; mkdir /D";
    passes(setup, "append /a 23534; fallocate /a keep 5969 14514; fsync /D");
    passes(
        "mkdir /D; mkdir /D/E; create /D/e; link /D/e /D/E/a",
        "append /D/E/a 23534; fallocate /D/E/a keep 5969 14514; fsync /D",
    );
}

/// fdatasync took a first write to blocks that were allocated before for one over old data, and did
/// not log that they are written now.
#[test]
fn the_first_write_to_allocated_blocks_is_more_than_data() {
    for &policy in FsyncPolicyKind::ALL {
        let setup = "create /a; fallocate /a plain 0 19411";
        passes_by(policy, setup, "write /a 7347 36; fdatasync /a; write /a 9000 36; fsync /a");
    }
}

/// A new file took over one name of a file that had had two, and both had gone: after a crash the
/// old file was there with the other one alone, as it never had been.
#[test]
fn a_name_is_not_taken_from_a_file_with_another_name() {
    for &policy in FsyncPolicyKind::ALL {
        let setup = "create /a; append /a 100; link /a /b; mkdir /d";
        passes_by(policy, setup, "unlink /b; unlink /a; create /a; fdatasync /a");
        passes_by(policy, setup, "rename /b /d/b; unlink /a; unlink /d/b; create /a; fsync /a");
        passes_by(policy, "create /a; create /c", "link /a /b; rename /c /a; create /e; fsync /e");
    }
}

/// Data that left the inode for a block of its own was waited for, but an i-transaction showed the
/// block without a flush.
#[test]
fn data_that_leaves_the_inode_is_flushed_before_it_is_shown() {
    let inline = Features::by_name("inline_data").expect("a feature set").with_areas(1);
    let policies = [(inline, FsyncPolicyKind::Ijournal), (inline, FsyncPolicyKind::Compound)];
    let fast_commit = Features::by_name("fast_commit-inline").expect("a feature set");
    for (features, policy) in
        policies.into_iter().chain([(fast_commit, FsyncPolicyKind::FastCommit)])
    {
        let setup = "create /a; append /a 90";
        passes_on(features, policy, setup, "fallocate /a keep+punch 8698 20029; fsync /a");
        passes_on(
            features,
            policy,
            setup,
            "truncate /a 9000; fdatasync /a; write /a 5000 10; fsync /a",
        );
    }
}

/// A truncation zeroes the rest of its last block, in place. A new size, logged without a flush of
/// that, showed again what the truncation had taken.
#[test]
fn zeros_in_place_are_flushed_before_a_size_that_shows_them() {
    let setup = "create /q; append /q 52800";
    let grow = ["fallocate /q plain 28216 9954", "truncate /q 38170", "append /q 5000"];
    for policy in [FsyncPolicyKind::Ijournal, FsyncPolicyKind::FastCommit] {
        for grow in grow {
            // The second time the zeros are on their way already.
            passes_by(policy, setup, &format!("truncate /q 31430; {grow}; fsync /q"));
            passes_by(
                policy,
                setup,
                &format!("truncate /q 31430; fallocate /q keep 30000 4096; {grow}; fsync /q"),
            );
        }
    }
}

/// A device that does something once, when somebody waits for a write.
#[derive(Debug)]
struct Interrupted {
    inner: Arc<RecordingDevice>,
    interruption: Arc<Interruption>,
}

/// What is done, taken out when it is.
#[derive(Default)]
struct Interruption(Mutex<Option<Box<dyn FnOnce() + Send>>>);

impl std::fmt::Debug for Interruption {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Interruption")
    }
}

/// Completes a write of [`Interrupted`] for whoever waits first.
struct OnWait {
    inner: Ticket,
    outer: Mutex<Option<Completer>>,
    interruption: Arc<Interruption>,
}

impl Driver for OnWait {
    fn drive(&self, _: &Arc<TicketCore>) {
        let interruption = self.interruption.0.lock().take();
        interruption.into_iter().for_each(|interrupt| interrupt());
        let outer = self.outer.lock().take();
        outer.into_iter().for_each(|outer| outer.complete(self.inner.wait()));
    }

    fn start(&self, _: &Arc<TicketCore>) {}
}

impl Device for Interrupted {
    fn capabilities(&self) -> &Capabilities {
        self.inner.capabilities()
    }

    fn size_bytes(&self) -> u64 {
        self.inner.size_bytes()
    }

    fn submit(&self, batch: Vec<Request>) -> Vec<Ticket> {
        let wrap = |inner: Ticket| {
            let (ticket, completer) = Ticket::pending(None);
            let interruption = self.interruption.clone();
            let driver = Arc::new(OnWait { inner, outer: Mutex::new(None), interruption });
            completer.set_driver(driver.clone());
            *driver.outer.lock() = Some(completer);
            ticket
        };
        self.inner.submit(batch).into_iter().map(wrap).collect()
    }

    fn submit_read(&self, offset: u64, bufs: Vec<AlignedBuf>, class: Class) -> ReadTicket {
        self.inner.submit_read(offset, bufs, class)
    }
}

/// A file system with blocks of 1 KiB and a file of so many bytes in memory, on a device that is
/// interrupted, once, with an append of 3000 bytes to that file, begun by `append`. `sync` syncs; gives
/// what a crash leaves of the file then, and whether it has appended blocks on the device.
fn appended_during(
    size: usize,
    append: fn(Box<dyn FnOnce() + Send>),
    sync: fn(&Fs, &InodeRef),
) -> (Vec<u8>, bool) {
    let features = Features::by_name("block-1k").expect("a feature set");
    let base = Base::get(features, &[]).expect("an image");
    let inner = Arc::new(RecordingDevice::plain(base.image.clone(), DeviceKind::Volatile));
    let interruption = Arc::new(Interruption::default());
    let device = Interrupted { inner: inner.clone(), interruption: interruption.clone() };
    let options = MountOptions { scheduler: Scheduler::Direct, ..MountOptions::default() };
    let fs = Fs::open_device(Arc::new(device), &quiet(&options)).expect("a file system");
    let root = fs.root().expect("a root");
    let file = root.create(b"a", 0o644, &Cred::root()).expect("a file");
    file.write(0, &vec![7; size]).expect("written");
    // Where fsyncs are expected, batches are small.
    root.create(b"b", 0o644, &Cred::root()).and_then(|other| other.fsync(false)).expect("synced");
    let again = file.clone();
    let work = move || assert_eq!(again.write(size as u64, &[8; 3000]).expect("appended"), 3000);
    *interruption.0.lock() = Some(Box::new(move || append(Box::new(work))));
    sync(&fs, &file);
    assert!(interruption.0.lock().is_none(), "nobody waited for a write");

    let image = inner.image();
    let mut block = [0; 1024];
    let holds_appended = (0..image.size_bytes() / 1024).any(|number| {
        image.read(number * 1024, &mut block);
        block == [8; 1024]
    });
    let crashed = Arc::new(RecordingDevice::plain(image, DeviceKind::Volatile));
    let fs = Fs::open_device(crashed, &quiet(&options)).expect("a file system");
    let file = fs.root().and_then(|root| root.lookup(b"a")).expect("the file");
    let mut bytes = vec![0; file.attr().size as usize];
    file.read(0, &mut bytes).expect("read");
    assert!(bytes.len() >= size, "what was there at the sync was promised: {}", bytes.len());
    (bytes, holds_appended)
}

/// In some of several rounds what was appended is written back by the sync that it came into, if need be
/// of more on a busy machine; in none the file has zeros then.
fn no_zeros(mut round: impl FnMut() -> (Vec<u8>, bool)) {
    const ROUNDS: usize = 8;
    let began = Instant::now();
    let mut found = false;
    for number in 0.. {
        if number >= ROUNDS && (found || began.elapsed() > Duration::from_secs(120)) {
            break;
        }
        let (bytes, holds_appended) = round();
        assert_eq!(
            bytes.iter().position(|byte| *byte == 0),
            None,
            "zeros in {} bytes",
            bytes.len()
        );
        found |= holds_appended;
    }
    assert!(found, "the append never came between two batches");
}

/// Writeback waits for one batch of pages while a later one is to come; an append in between
/// dirties the last page of those taken, and pages behind them. The size must not pass the former:
/// what was appended to it was not there after a crash.
#[test]
fn a_size_does_not_pass_a_page_that_is_dirty_again() {
    // Three batches of a mebibyte are under way at once.
    let size = (3 << 20) - 100;
    let sync = |fs: &Fs, _: &InodeRef| fs.sync().expect("synced");
    no_zeros(|| appended_during(size, |append| append(), sync));
}

/// Fast commits of a file that was inline in the last full commit, as its own or as what had a name
/// before: e2fsck's replay gives up where it looks for the map of an inode that has none.
#[test]
fn fast_commits_spare_files_that_were_inline() {
    let options = MountOptions { fsync: FsyncPolicyKind::FastCommit, ..MountOptions::default() };
    let features = FAST_COMMIT.into_iter().find(|set| set.name == "fast_commit-inline");
    let features = features.expect("the feature set");
    let config = Config { features, compare_every: 1, ..Config::new(options) };
    for text in [
        "create /n; append /n 9; fsync /n; append /n 704; fsync /n",
        "create /n; append /n 9; sync; append /n 704; unlink /n; create /n; append /n 704; fsync /n",
    ] {
        let workload = Workload::new(Vec::new(), ops::parse(text).expect("operations"));
        let report = explore(&config, &workload, &Default::default()).expect("it runs");
        assert!(report.findings.is_empty(), "{}", report.findings[0]);
        assert!(report.judged.compared > 10, "{report:?}");
    }
}

/// e2fsck 1.47.0 looks for the log behind the area for fast commits where it goes on at the front of the
/// journal, and loses what is there. So it never goes on there, but begins anew. (That this goes
/// round the log shows in the planted bug `LogGoesRound`.)
#[test]
fn a_log_with_an_area_begins_anew_instead_of_going_round() {
    let features = Features::by_name("fast_commit-1k").expect("a feature set");
    for fsync in [FsyncPolicyKind::Compound, FsyncPolicyKind::FastCommit] {
        let options = MountOptions { fsync, data: DataMode::Journal, ..MountOptions::default() };
        let config = Config { features, compare_every: 1, inner_every: 0, ..Config::new(options) };
        let config = Config { budget: Budget { subsets_max: 2, ..config.budget }, ..config };
        let write = "write /a 0 200000; fsync /a; ";
        let text = format!("create /a; append /a 200000; {}", write.repeat(6));
        let workload = Workload::new(Vec::new(), ops::parse(&text).expect("operations"));
        let report = explore(&config, &workload, &Default::default()).expect("it runs");
        assert!(report.findings.is_empty(), "{}", report.findings[0]);
        assert!(report.judged.compared > 40, "{:?}", report.judged);
    }
}

/// e2fsck gives extent trees new nodes at each record of their file, and took blocks for them that the
/// file itself added later in the stream.
#[test]
fn nodes_of_a_replayed_tree_spare_blocks_added_later() {
    let options = MountOptions { fsync: FsyncPolicyKind::FastCommit, ..MountOptions::default() };
    let mut config = Config { compare_every: 1, ..Config::new(options) };
    config.budget.subsets_max = 3;
    let ops = "write /far 737280 1024; fsync /far; write /far 741376 1024; fsync /far";
    let ops = ops::parse(ops).expect("operations");
    let workload = Workload { ops, ..Edge::DeepExtents.workload() };
    let report = explore(&config, &workload, &Default::default()).expect("it runs");
    assert!(report.findings.is_empty(), "{}", report.findings[0]);
    assert!(report.judged.fast_commits > 0, "{report:?}");
}

/// Each transaction of a truncation had times of its own, and a mount that completed one gave the file
/// the time of the mount.
#[test]
fn a_truncation_of_several_transactions_has_one_time() {
    let options = MountOptions { fsync: FsyncPolicyKind::Compound, ..MountOptions::default() };
    let mut config = Config::new(options);
    config.budget = Budget { subsets_max: 2, torn_max: 0, images_max: Some(160) };
    let workload = Edge::LongTruncate.workload();
    let report = explore(&config, &workload, &Default::default()).expect("it runs");
    assert!(report.findings.is_empty(), "{}", report.findings[0]);
}
