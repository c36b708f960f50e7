//! Bugs of dual mode: several commits in flight, each with its own durability.
//!
//! Three ways to find them: the explorer, with commits in flight by `fbarrier` (one thread, over a
//! device that keeps order) or by threads; a device of which one write fails; and, for what no image
//! shows, the callbacks of a journal.

use std::sync::Arc;

use fjord::{CommitPipeline, DataMode, Fs, FsyncPolicyKind, Scheduler};
use fjord_block::epoch::EpochDevice;
use fjord_block::plant::{Bug, Planting};
use fjord_block::{
    AlignedBuf, Buf, Capabilities, Class, Device, DeviceExt, FaultAction, FaultDevice, FaultMatch,
    FaultRule, IoOp, MemDevice, ReadTicket, Request, Ticket,
};
use fjord_crash::base::{Base, Features, quiet};
use fjord_crash::check::Kind;
use fjord_crash::explore::{Config, Workload};
use fjord_crash::ops::{self, Op};
use fjord_crash::record::{DeviceKind, RecordingDevice};
use fjord_crash::run::Runner;
use fjord_format::jbd2::{ChecksumVersion, Superblock};
use fjord_format::types::BlockNo;
use fjord_journal::{
    Buffer, BufferKind, Journal, JournalExtent, JournalMap, JournalOptions, PipelineMode,
};
use parking_lot::Mutex;

use crate::{Plant, churn};

/// Commits in flight that share blocks, settled by one fsync.
const CHAIN: &str = "create /b; fbarrier /b; append /b 5000; fbarrier /b; create /c; fbarrier /c; \
                     chmod /a 600; fsync /a; write /a 100 5000; fbarrier /a; append /b 3000; \
                     fbarrier /b; unlink /c; fsync /";

/// Over a device that keeps order: fbarrier leaves commits in flight.
fn in_order(bug: Bug) -> Plant {
    // Commits settle beside the checkpoint thread, so a rerun takes the requests of the recording.
    let plant = Plant { races: true, ..Plant::new(bug) };
    plant.ops(CHAIN).with(|config| {
        config.options.pipeline = CommitPipeline::Dual;
        config.options.scheduler = Scheduler::Epoch;
        config.device = DeviceKind::Barrier;
    })
}

/// Over a device that keeps no order.
fn by_flush(bug: Bug) -> Plant {
    Plant::new(bug).with(|config| {
        config.options.pipeline = CommitPipeline::Dual;
        config.options.scheduler = Scheduler::Direct;
    })
}

/// Threads that commit at the same time; some images of each run.
fn of_threads(plant: Plant) -> Plant {
    let plant = Plant { workload: churn(), ..plant };
    plant.with(|config| {
        config.budget.subsets_max = 8;
        config.budget.images_max = Some(400);
    })
}

/// Fills the log, with commits in flight when it is full.
fn full_log(bug: Bug) -> Plant {
    let plant = in_order(bug).setup("mkdir /d; create /b; append /b 900000");
    let plant = plant.data(DataMode::Journal);
    plant.ops(
        "create /d/x; fsync /d/x; write /b 0 900000; fsync /b; create /d/y; fbarrier /d/y; \
         write /b 0 900000; fbarrier /b; write /b 0 900000; fbarrier /b; write /b 0 900000; \
         fbarrier /b; write /b 0 900000; fsync /b; fsync /d/y; create /a; fsync /a",
    )
}

#[test]
fn newer_version_dropped() {
    let kinds = [Kind::PromiseLost, Kind::Fsck, Kind::RecoveryFailed, Kind::Invented];
    in_order(Bug::NewerVersionDropped).shows_as(&kinds);
}

#[test]
fn retired_newest_first() {
    let kinds = [Kind::PromiseLost, Kind::Fsck, Kind::RecoveryFailed, Kind::Invented];
    in_order(Bug::RetiredNewestFirst).shows_as(&kinds);
}

/// Only a log with a fast-commit area does not wrap.
#[test]
fn log_restarts_in_flight() {
    let plant = full_log(Bug::LogRestartsInFlight).setup("create /a; create /b; append /b 200000");
    let plant = plant.ops(
        "write /b 0 200000; fbarrier /b; write /b 0 200000; fbarrier /b; write /b 0 200000; \
         fbarrier /b; write /b 0 100000; fbarrier /b; chmod /a 600; sync; create /c; fsync /c",
    );
    let plant = plant.with(|config| {
        config.features = Features::by_name("fast_commit-1k").expect("a feature set");
        config.options.fsync = FsyncPolicyKind::FastCommit;
    });
    let kinds = [Kind::OrderBroken, Kind::PromiseLost, Kind::Fsck, Kind::RecoveryFailed];
    plant.shows_as(&kinds);
}

#[test]
fn commit_block_before_flush() {
    let kinds = [Kind::RecoveryFailed, Kind::PromiseLost, Kind::ForeignBytes];
    by_flush(Bug::CommitBlockBeforeFlush).shows_as(&kinds);
}

#[test]
fn told_when_dispatched() {
    of_threads(by_flush(Bug::ToldWhenDispatched)).found_by_threads();
}

#[test]
fn told_before_flush() {
    of_threads(by_flush(Bug::ToldBeforeFlush)).found_by_threads();
}

#[test]
fn commit_block_not_flushed() {
    of_threads(by_flush(Bug::CommitBlockNotFlushed)).found_by_threads();
}

#[test]
fn later_data_not_awaited() {
    of_threads(by_flush(Bug::LaterDataNotAwaited)).found_by_threads();
}

/// Threads that fsync files of one group, and change others.
#[test]
fn parts_told_in_flight() {
    let thread = |number: u64| {
        let mut text = String::new();
        for round in 0..10 {
            let file = format!("/G0/t{number}r{round}");
            text += &format!("create {file}; append {file} 3000; ");
            text += &format!("create /G{}/n{round}; fsync {file}; ", 2 + number);
        }
        ops::parse(&text).expect("operations")
    };
    let groups = Plant::groups(Bug::PartsToldInFlight);
    let workload = Workload::threads(groups.workload.setup, (0..4).map(thread).collect());
    let plant = Plant { config: groups.config, ..by_flush(Bug::PartsToldInFlight) };
    let plant = Plant { workload, ..plant }.with(|config| {
        config.options.pipeline = CommitPipeline::Dual;
        config.options.scheduler = Scheduler::Direct;
        config.budget.subsets_max = 8;
        config.budget.images_max = Some(400);
    });
    plant.found_by_threads();
}

/// Files that are created one after the other, ordered or promised.
const CREATED: &str = "create /n0; fbarrier /n0; create /n1; fbarrier /n1; create /n2; fsync /n2; \
                       create /n3; fbarrier /n3; create /n4; fsync /n4";

/// Runs [`CREATED`] on a device of which one write reports a failure although it took place: the
/// number `position`. Gives what is wrong after recovery, and whether there was such a write.
fn fails_at(config: &Config, position: u64) -> (Option<String>, bool) {
    let base = Base::get(config.features, &[]).expect("an image");
    let recorder = Arc::new(RecordingDevice::plain(base.image.clone(), config.device));
    let device = Arc::new(FaultDevice::new(recorder.clone()));
    let fs = Fs::open_device(device.clone(), &quiet(&config.options)).expect("it mounts");
    device.faults().add(FaultRule {
        matches: FaultMatch { op: Some(IoOp::Write), range: None },
        skip_count: position,
        hit_count_max: 1,
        action: FaultAction::Torn { keep_bytes: u64::MAX, errno: 5 },
    });
    let (model, stamp) = (Mutex::new(base.model.clone()), || device.stamp());
    let mut runner = Runner::new(&fs, &model, &stamp);
    let (mut promised, mut failed) = (0, None);
    for op in ops::parse(CREATED).expect("operations") {
        let path = op.target().unwrap_or_default().to_owned();
        match runner.step(&op) {
            Ok(true) if matches!(op, Op::Fsync(_)) => promised = number_of(&path) + 1,
            Ok(_) => {}
            Err(_) => {
                failed = Some(path);
                break;
            }
        }
    }
    let left = RecordingDevice::plain(recorder.image(), config.device);
    drop(runner);
    let recovered = Fs::open_device(Arc::new(left), &quiet(&config.options)).expect("it mounts");
    let root = recovered.root().expect("a root");
    let exists = |path: &str| root.lookup(path.as_bytes()).is_ok();
    let lost = (0..promised).map(|number| format!("n{number}")).find(|path| !exists(path));
    let wrong = match (lost, failed.filter(|path| exists(path))) {
        (Some(path), _) => Some(format!("{path} is lost, though fsync reported success")),
        (None, Some(path)) => Some(format!("{path} is there, though its sync failed")),
        (None, None) => None,
    };
    (wrong, device.faults().hit_count() > 0)
}

fn number_of(path: &str) -> u64 {
    path.trim_start_matches('n').parse().expect("a number")
}

/// What is wrong at the first position where something is, and the number of positions tried.
fn fails_anywhere(config: &Config, bug: Option<Bug>) -> (Option<String>, u64) {
    let _planting = Planting::new(bug);
    let mut tried = 0;
    loop {
        let (wrong, was_hit) = fails_at(config, tried);
        tried += 1;
        if wrong.is_some() || !was_hit {
            return (wrong, tried);
        }
    }
}

fn found_by_failures(plants: &[Plant]) {
    let mut found = None;
    for plant in plants {
        let (wrong, all) = fails_anywhere(&plant.config, None);
        assert!(wrong.is_none() && all > 4, "without the bug, {all} positions: {wrong:?}");
        let (wrong, tried) = fails_anywhere(&plant.config, Some(plant.bug));
        if let Some(wrong) = wrong {
            let scheduler = plant.config.options.scheduler;
            println!("| `{:?}` | {scheduler:?} | failing device | {tried} | {all} |", plant.bug);
            println!("    {wrong}");
            found = Some(plant.bug);
        }
    }
    assert!(found.is_some(), "not found with a write failed at any position");
}

#[test]
fn later_not_told() {
    found_by_failures(&[in_order(Bug::LaterNotTold), by_flush(Bug::LaterNotTold)]);
}

#[test]
fn failed_not_taken_back() {
    found_by_failures(&[in_order(Bug::FailedNotTakenBack), by_flush(Bug::FailedNotTakenBack)]);
}

const BLOCK_SIZE: usize = 1024;

const LOG_BLOCKS: u32 = 1024;
const LOG_START: u64 = 100;

/// A new journal alone, over a device with a volatile cache, whose order is kept.
fn open_journal(device: Arc<dyn Device>) -> (Arc<dyn Device>, Journal) {
    let mut superblock = Superblock::new(BLOCK_SIZE as u32, LOG_BLOCKS, *b"0123456789abcdef");
    // Without checksums a commit waits for its log blocks.
    superblock.set_checksum_version(ChecksumVersion::V3);
    let mut block = Buf::zeroed(BLOCK_SIZE);
    block.make_mut()[..1024].copy_from_slice(&superblock.encode());
    device.write_all_at(LOG_START * BLOCK_SIZE as u64, &block).expect("a log");
    open_journal_on(device).expect("it opens")
}

/// The journal that the device has, after recovery.
fn open_journal_on(inner: Arc<dyn Device>) -> fjord_journal::Result<(Arc<dyn Device>, Journal)> {
    let inner = FaultDevice::new(inner).claiming(|claimed| claimed.volatile_cache = true);
    let device: Arc<dyn Device> = Arc::new(EpochDevice::new(Arc::new(inner)));
    let extent = JournalExtent { logical: 0, start: BlockNo(LOG_START), len: LOG_BLOCKS };
    let map = JournalMap::new(vec![extent]).expect("a map");
    let options = JournalOptions { pipeline: PipelineMode::Dual, ..JournalOptions::default() };
    let (journal, _) = Journal::open(device.clone(), map, BLOCK_SIZE, &options)?;
    Ok((device, journal))
}

/// The order in which the callbacks of three commits in flight are called.
fn told() -> Vec<u64> {
    let (_, journal) = open_journal(Arc::new(MemDevice::new(2 << 20)));
    let told = Arc::new(Mutex::new(Vec::new()));
    for number in 0..3 {
        let buffer = Buffer::new(BlockNo(number), Buf::zeroed(BLOCK_SIZE), BufferKind::Metadata);
        let handle = journal.start(1).expect("a handle");
        handle.get_write(&buffer).expect("a block")[0] = 1;
        let list = told.clone();
        handle.on_commit(move |_| list.lock().push(number));
        journal.commit_in_order(handle.stop()).expect("a commit");
    }
    journal.finish_commits().expect("all of them");
    std::mem::take(&mut *told.lock())
}

#[test]
fn later_told_first() {
    let run = |bug| {
        let _planting = Planting::new(bug);
        told()
    };
    assert_eq!(run(None), [0, 1, 2]);
    let order = run(Some(Bug::LaterToldFirst));
    assert_ne!(order, [0, 1, 2]);
    println!("| `LaterToldFirst` | order of callbacks | {order:?} | |");
}

/// The home location of a block after a checkpoint: its second version is in flight.
fn checkpointed() -> u8 {
    let (device, journal) = open_journal(Arc::new(MemDevice::new(2 << 20)));
    let buffer = Buffer::new(BlockNo(7), Buf::zeroed(BLOCK_SIZE), BufferKind::Metadata);
    let change = |value| {
        let handle = journal.start(1).expect("a handle");
        handle.get_write(&buffer).expect("a block").fill(value);
        handle.stop()
    };
    journal.commit(change(1)).expect("a commit");
    journal.commit_in_order(change(2)).expect("a commit in flight");
    journal.checkpoint_all().expect("a checkpoint");
    device.read_buf(7 * BLOCK_SIZE as u64, BLOCK_SIZE).expect("a block")[0]
}

/// No image shows it: the flush of a checkpoint makes the log of the commits in flight durable, too.
#[test]
fn checkpoint_in_flight() {
    let run = |bug| {
        let _planting = Planting::new(bug);
        checkpointed()
    };
    assert_eq!(run(None), 1);
    let home = run(Some(Bug::CheckpointInFlight));
    assert_ne!(home, 1);
    println!("| `CheckpointInFlight` | home location after a checkpoint | version {home} | |");
}

/// What recovery finds of two commits that were in flight during a checkpoint, and then became
/// durable.
fn after_checkpoint() -> [u8; 2] {
    let disk = Arc::new(MemDevice::new(2 << 20));
    let (_, journal) = open_journal(disk.clone());
    let change = |block| {
        let buffer = Buffer::new(BlockNo(block), Buf::zeroed(BLOCK_SIZE), BufferKind::Metadata);
        let handle = journal.start(1).expect("a handle");
        handle.get_write(&buffer).expect("a block").fill(1);
        handle.stop()
    };
    journal.commit(change(7)).expect("a commit");
    for block in [8, 9] {
        journal.commit_in_order(change(block)).expect("a commit in flight");
    }
    journal.checkpoint_all().expect("a checkpoint");
    journal.finish_commits().expect("both of them");
    let left = Arc::new(MemDevice::from_image(&disk.snapshot()));
    let (device, _) = open_journal_on(left).expect("recovery");
    [8, 9].map(|block| device.read_buf(block * BLOCK_SIZE as u64, BLOCK_SIZE).expect("a block")[0])
}

/// The explorer finds it in some runs only: a commit in flight may be durable before the tail moves.
#[test]
fn tail_past_in_flight() {
    let run = |bug| {
        let _planting = Planting::new(bug);
        after_checkpoint()
    };
    assert_eq!(run(None), [1, 1]);
    let recovered = run(Some(Bug::TailPastInFlight));
    assert_eq!(recovered, [0, 0]);
    println!("| `TailPastInFlight` | two commits after recovery | {recovered:?} | |");
}

/// A device that does something else in the middle of its next flush.
struct DuringFlush {
    inner: MemDevice,
    act: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

impl std::fmt::Debug for DuringFlush {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DuringFlush").finish_non_exhaustive()
    }
}

impl Device for DuringFlush {
    fn capabilities(&self) -> &Capabilities {
        self.inner.capabilities()
    }

    fn size_bytes(&self) -> u64 {
        self.inner.size_bytes()
    }

    fn submit(&self, batch: Vec<Request>) -> Vec<Ticket> {
        if batch.iter().any(|request| matches!(request, Request::Flush { .. }))
            && let Some(act) = self.act.lock().take()
        {
            std::thread::scope(|scope| scope.spawn(act).join()).expect("no panic");
        }
        self.inner.submit(batch)
    }

    fn submit_read(&self, offset: u64, bufs: Vec<AlignedBuf>, class: Class) -> ReadTicket {
        self.inner.submit_read(offset, bufs, class)
    }
}

/// Whether a commit that is dispatched during the flush of others counts as durable after it, and
/// whether it was dispatched.
fn joined() -> (bool, bool) {
    let inner = Arc::new(DuringFlush { inner: MemDevice::new(2 << 20), act: Mutex::new(None) });
    let (_, journal) = open_journal(inner.clone());
    let change = |journal: &Journal, block| {
        let buffer = Buffer::new(BlockNo(block), Buf::zeroed(BLOCK_SIZE), BufferKind::Metadata);
        let handle = journal.start(1).expect("a handle");
        handle.get_write(&buffer).expect("a block").fill(1);
        handle.stop()
    };
    for block in 0..2 {
        let tid = change(&journal, block);
        journal.commit_in_order(tid).expect("a commit in flight");
    }
    let late = Arc::new(Mutex::new(None));
    let (other, tid) = (journal.clone(), late.clone());
    *inner.act.lock() = Some(Box::new(move || {
        let changed = change(&other, 2);
        other.commit_in_order(changed).expect("a commit in flight");
        *tid.lock() = Some(changed);
    }));
    journal.finish_commits().expect("the first two");
    let late = *late.lock();
    (late.is_some_and(|tid| journal.is_committed(tid)), late.is_some())
}

/// In an image of threads it seldom shows: a flush of the next round follows soon.
#[test]
fn round_joined_late() {
    let run = |bug| {
        let _planting = Planting::new(bug);
        joined()
    };
    assert_eq!(run(None), (false, true));
    assert_eq!(run(Some(Bug::RoundJoinedLate)), (true, true));
    println!("| `RoundJoinedLate` | a commit that is dispatched during a flush | | |");
}
