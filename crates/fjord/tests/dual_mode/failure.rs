//! One request fails, at every position of a workload in turn.
//!
//! The order is that of the commits in the log. Let the failed request belong to commit `f`: then
//! the fsync of a file returns `Ok` if the file's commit lies before `f`, and fails otherwise. A
//! flush belongs to the commits of which the journal does not know otherwise that they are durable.
//!
//! [`later_failure`]: an fsync of a file without changes returns `Ok` whatever failed later.

use std::sync::{Barrier, Mutex};
use std::time::Duration;

use fjord::InodeRef;
use fjord_block::{MemImage, Request};
use fjord_testkit::gate_device::Record;
use fjord_testkit::rng::{Rng, mix, seed_from_env};

use crate::log::{Log, Purpose};
use crate::rig::{
    BLOCK_BYTES, CACHE_DIRECT, CACHE_EPOCH, DIR_COUNT, Kind, MODES, Mode, NATIVE_BARRIER,
    NO_CACHE_DIRECT, NO_CACHE_EPOCH, OLD, Rig, wait_until,
};

const FILE_COUNT: usize = 6;
const THREAD_COUNT: usize = 3;
/// Long enough for other threads to dispatch while one waits.
const FLUSH_DELAY: Duration = Duration::from_micros(300);
/// No workload has so many requests.
const POSITION_MAX: u64 = 200;
const EROFS: i32 = 30;

/// Who does what.
#[derive(Clone, Copy, Debug)]
enum Workload {
    /// Threads that create, write and fsync files of their own.
    Threads,
    /// One thread: each file and a barrier call behind it, then an fsync of each.
    Chain,
}

/// What a workload left.
struct Run {
    /// Whether each file's fsync returned `Ok`.
    promised: Vec<bool>,
    records: Vec<Record>,
    images: [MemImage; 3],
    /// The errno of a change afterwards.
    errno_after: Option<i32>,
    partial_commits: u64,
}

fn write_and_fsync(rig: &Rig, file: usize) -> bool {
    rig.write(file).is_ok_and(|inode| inode.fsync(false).is_ok())
}

fn threads(rig: &Rig) -> Vec<bool> {
    let promised = Mutex::new(vec![false; FILE_COUNT]);
    let begin = Barrier::new(THREAD_COUNT);
    std::thread::scope(|scope| {
        for thread in 0..THREAD_COUNT {
            let (promised, begin) = (&promised, &begin);
            scope.spawn(move || {
                begin.wait();
                for file in (thread..FILE_COUNT).step_by(THREAD_COUNT) {
                    let outcome = write_and_fsync(rig, file);
                    promised.lock().expect("no panic")[file] = outcome;
                }
            });
        }
    });
    promised.into_inner().expect("no panic")
}

fn chain(rig: &Rig) -> Vec<bool> {
    let ordered = |file: usize| {
        let inode = rig.write(file).ok()?;
        let barrier = inode.barrier(false);
        Some((inode, barrier.is_ok()))
    };
    let files: Vec<Option<(InodeRef, bool)>> = (0..FILE_COUNT).map(ordered).collect();
    let fsync = |file: &Option<(InodeRef, bool)>| {
        let Some((inode, barrier)) = file else { return false };
        let fsynced = inode.fsync(false).is_ok();
        // Without order in the device, the barrier call is an fsync: its failure is the first news.
        fsynced && (*barrier || rig.kind.keeps_order())
    };
    files.iter().map(fsync).collect()
}

fn run(kind: Kind, mode: Mode, workload: Workload, fails: Option<u64>, seed: u64) -> Run {
    let rig = Rig::new(kind, mode);
    // At half of the positions the last group commit is one of the whole transaction.
    if fails.is_none_or(|position| position % 2 == 0) {
        rig.change_aside();
    }
    rig.gate.start_workload(fails, FLUSH_DELAY);
    let promised = match workload {
        Workload::Threads => threads(&rig),
        Workload::Chain => chain(&rig),
    };
    // The device is idle: every fsync has returned.
    let records = rig.gate.records();
    let mut rng = Rng::new(mix(seed ^ fails.unwrap_or(u64::MAX)));
    let images =
        [rig.gate.durable_image(), rig.gate.completed_image(), rig.gate.cut_image(&mut rng)];
    let errno_after = rig.fs.create_dir("/after").err().map(|error| error.errno());
    Run { promised, records, images, errno_after, partial_commits: rig.partial_commits() }
}

/// What the order of commits says about an fsync.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Expected {
    Success,
    Failure,
    /// Both are right.
    Either,
}

/// Whether the journal knew before request `failed` that the commit with commit block `block` is
/// durable: by FUA, or by a flush. The epoch scheduler's own flushes say nothing to the journal.
fn is_known_durable(
    kind: Kind,
    log: &Log,
    records: &[Record],
    block: usize,
    failed: usize,
) -> bool {
    let ran = |index: usize| records[index].ran_at.filter(|_| !records[index].failed);
    let (Some(written_at), Some(failed_at)) = (ran(block), records[failed].ran_at) else {
        return false;
    };
    let has_fua = matches!(records[block].request, Request::Write { fua: true, .. });
    let covers = |index: usize| {
        let is_flush = log.purposes[index] == Purpose::Flush;
        is_flush && ran(index).is_some_and(|at| written_at < at && at < failed_at)
    };
    let is_flushed = || (block + 1..records.len()).any(covers);
    has_fua && written_at < failed_at || !kind.keeps_order() && is_flushed()
}

/// What has to become of the fsync of `file`, when request `failed` failed.
fn expected(kind: Kind, log: &Log, records: &[Record], failed: usize, file: usize) -> Expected {
    let own = log.commit_of.get(&file).copied();
    let block = own.and_then(|own| log.commit_blocks.get(&own)).map(|&index| &records[index]);
    let behind = |of: u32| match own {
        Some(own) if own < of => Expected::Success,
        _ => Expected::Failure,
    };
    match log.purposes[failed] {
        Purpose::Log(of) => behind(of),
        // Before the first commit.
        Purpose::JournalStart => Expected::Failure,
        Purpose::Data(data) if data == file => Expected::Failure,
        Purpose::Data(data) => match log.commit_of.get(&data) {
            Some(&of) if own.is_none_or(|own| own >= of) => Expected::Failure,
            _ if kind.keeps_order() => {
                // The data may have been submitted ahead of the log blocks of commits before its
                // own. So what had not completed when it failed may be behind it.
                let completed_at = block.and_then(|block| block.ran_at);
                let is_completed = completed_at.is_some_and(|at| Some(at) < records[failed].ran_at);
                if is_completed { Expected::Success } else { Expected::Either }
            }
            Some(_) => Expected::Success,
            // Its commit was not written, so it is behind all that were.
            None if block.is_some_and(|block| block.durable_at.is_some()) => Expected::Success,
            None => Expected::Either,
        },
        Purpose::Flush => match own.and_then(|own| log.commit_blocks.get(&own)) {
            Some(&block) if is_known_durable(kind, log, records, block, failed) => {
                Expected::Success
            }
            Some(&block) if records[block].durable_at.is_some() => Expected::Either,
            _ => Expected::Failure,
        },
        Purpose::Other => panic!("a write of unknown purpose: {:?}", records[failed].request),
    }
}

/// Runs the workload with one request failed: the number of partial commits; `None` if it has no such
/// request.
fn fails_at(kind: Kind, mode: Mode, workload: Workload, position: u64, seed: u64) -> Option<u64> {
    let what = format!("{workload:?}, request {position} failed");
    let done = run(kind, mode, workload, Some(position), seed);
    let failed = usize::try_from(position).expect("a small number");
    if done.records.len() <= failed {
        assert_eq!(done.promised, [true; FILE_COUNT], "{kind:?} {mode:?} {what}");
        return None;
    }
    assert!(done.records[failed].failed, "{kind:?} {mode:?} {what}: it did not");
    let log = Log::read(mode.image(), &done.records, FILE_COUNT);
    for (file, &promised) in done.promised.iter().enumerate() {
        let expected = expected(kind, &log, &done.records, failed, file);
        let is_right = match expected {
            Expected::Success => promised,
            Expected::Failure => !promised,
            Expected::Either => true,
        };
        assert!(
            is_right,
            "{kind:?} {mode:?} {what}: fsync of file {file} returned {}, expected {expected:?}\n\
             promised {:?}\n{log:?}",
            if promised { "Ok" } else { "Err" },
            done.promised
        );
    }
    assert_eq!(done.errno_after, Some(EROFS), "{kind:?} {mode:?} {what}: a change afterwards");
    let rig = Rig::new(kind, mode);
    for (image, which) in done.images.iter().zip(["durable", "completed", "cut"]) {
        rig.check(image, &done.promised, &format!("{what}, {which}, {:?}", log.purposes[failed]));
    }
    Some(done.partial_commits)
}

/// Without order in the device, each commit of the chain is alone: its commit block has FUA.
fn check_fua(kind: Kind, mode: Mode, records: &[Record]) {
    let log = Log::read(mode.image(), records, FILE_COUNT);
    for &block in log.commit_blocks.values() {
        let has_fua = matches!(records[block].request, Request::Write { fua: true, .. });
        assert!(has_fua, "{kind:?}: a commit block that is alone without FUA\n{log:?}");
    }
    let flush_count = log.purposes.iter().filter(|&&purpose| purpose == Purpose::Flush).count();
    assert_eq!(flush_count, log.commit_blocks.len(), "{kind:?}: flushes and commits\n{log:?}");
}

fn every_position(kind: Kind, workload: Workload) {
    let seed = seed_from_env(&format!("{kind:?} {workload:?}"), 1);
    for mode in MODES {
        let whole = run(kind, mode, workload, None, seed);
        assert_eq!(whole.promised, [true; FILE_COUNT], "{kind:?} {mode:?} {workload:?}");
        assert_eq!(whole.errno_after, None, "{kind:?} {mode:?} {workload:?}");
        if matches!(workload, Workload::Chain) && !kind.keeps_order() {
            check_fua(kind, mode, &whole.records);
        }
        let (mut position, mut partial_commits) = (0, whole.partial_commits);
        while let Some(more) = fails_at(kind, mode, workload, position, seed) {
            position += 1;
            partial_commits += more;
            assert!(position < POSITION_MAX, "{kind:?} {mode:?} {workload:?} does not end");
        }
        println!(
            "{kind:?} {mode:?} {workload:?}: {position} positions, {partial_commits} partial commits"
        );
        // Barrier calls commit whole transactions.
        if mode.commits_groups() && matches!(workload, Workload::Threads) {
            assert!(partial_commits > position, "{kind:?} {workload:?}: {partial_commits}");
        }
        assert!(position > 3, "{kind:?} {mode:?} {workload:?}: {position} requests only");
    }
}

/// A file is durable, by a partial commit where there are such. A request of the fsync of file `other`
/// fails. `false` if it has no such request.
fn later_failure(kind: Kind, mode: Mode, other: usize, position: u64) -> bool {
    let what = format!("{kind:?} {mode:?}: request {position} of file {other} failed");
    let rig = Rig::new(kind, mode);
    let files = [0, other, 2].map(|number| rig.write(number).expect("a new file"));
    let [durable, other, _] = &files;
    durable.fsync(false).expect("fsync");
    assert_eq!(rig.partial_commits() > 0, mode.commits_groups(), "{what}");
    other.write(0, &[7; 2 * BLOCK_BYTES]).expect("write");
    rig.gate.start_workload(Some(position), Duration::ZERO);
    if other.fsync(false).is_ok() {
        return false;
    }
    assert!(rig.fs.is_read_only(), "{what}");
    for datasync in [false, true, false] {
        let again = durable.fsync(datasync);
        assert!(again.is_ok(), "{what}: fsync of the durable file: {again:?}");
        assert!(other.fsync(datasync).is_err(), "{what}: fsync of the failed file");
    }
    true
}

#[test]
fn a_later_failure_is_not_that_of_a_durable_file() {
    for kind in [NATIVE_BARRIER, CACHE_EPOCH, CACHE_DIRECT, NO_CACHE_EPOCH, NO_CACHE_DIRECT] {
        for mode in MODES {
            // In another group, and in the same.
            for other in [1, DIR_COUNT] {
                let fails = |&position: &u64| later_failure(kind, mode, other, position);
                let failed = (0..).take_while(fails).count();
                assert!(failed > 1, "{kind:?} {mode:?}: {failed} positions only");
            }
        }
    }
}

/// The commit of one file is in flight, its flush stalled. Data of another file, written in place, fail,
/// and `beside` a third file's fsync waits for the next commit, and hears of it.
fn failure_beside_a_commit(mode: Mode, beside: bool) {
    let what = format!("{mode:?}, beside: {beside}");
    let rig = Rig::new(CACHE_DIRECT, mode);
    let old = rig.fs.resolve("/old").expect("the old file");
    let first = rig.write(0).expect("a new file");
    rig.gate.hold(|request| matches!(request, Request::Flush { .. }));
    let (first, third) = std::thread::scope(|scope| {
        let first = scope.spawn(move || first.fsync(false));
        rig.gate.wait_until_held();
        let third = beside.then(|| {
            let (third, waits) = (rig.write(1).expect("a new file"), rig.commit_waits());
            let third = scope.spawn(move || third.fsync(false));
            wait_until("the third fsync waits", || rig.commit_waits() > waits);
            third
        });
        old.write(0, OLD).expect("write");
        rig.gate.fail_next_submitted_write();
        let failing = scope.spawn(|| old.fsync(true));
        wait_until("the failure is known", || {
            rig.fs.is_read_only() && rig.fs.stats().fsync.failed >= u64::from(beside)
        });
        rig.gate.release_all();
        assert!(failing.join().expect("no panic").is_err(), "{what}");
        (first.join().expect("no panic"), third.map(|third| third.join().expect("no panic")))
    });
    assert!(first.is_ok(), "{what}: the fsync before the failure: {first:?}");
    assert!(third.is_none_or(|third| third.is_err()), "{what}: the fsync behind the failure");
    rig.check(&rig.gate.durable_image(), &[true], &what);
}

#[test]
fn an_fsync_behind_a_failure_does_not_fail_those_before() {
    for mode in [MODES[0], MODES[2]] {
        for beside in [false, true] {
            failure_beside_a_commit(mode, beside);
        }
    }
}

#[test]
fn threads_native_barrier() {
    every_position(NATIVE_BARRIER, Workload::Threads);
}

#[test]
fn threads_cache_epoch() {
    every_position(CACHE_EPOCH, Workload::Threads);
}

#[test]
fn threads_cache_direct() {
    every_position(CACHE_DIRECT, Workload::Threads);
}

#[test]
fn threads_no_cache_epoch() {
    every_position(NO_CACHE_EPOCH, Workload::Threads);
}

#[test]
fn threads_no_cache_direct() {
    every_position(NO_CACHE_DIRECT, Workload::Threads);
}

#[test]
fn chain_native_barrier() {
    every_position(NATIVE_BARRIER, Workload::Chain);
}

#[test]
fn chain_cache_epoch() {
    every_position(CACHE_EPOCH, Workload::Chain);
}

#[test]
fn chain_cache_direct() {
    every_position(CACHE_DIRECT, Workload::Chain);
}

#[test]
fn chain_no_cache_epoch() {
    every_position(NO_CACHE_EPOCH, Workload::Chain);
}

#[test]
fn chain_no_cache_direct() {
    every_position(NO_CACHE_DIRECT, Workload::Chain);
}
