//! The device does not make anything durable until the gate opens.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use fjord::{DataMode, InodeRef};
use fjord_block::Request;
use fjord_testkit::gate_device::{Cache, is_barrier};

use crate::rig::{
    BLOCK_BYTES, CACHE_DIRECT, CACHE_EPOCH, Kind, MODES, Mode, NATIVE_BARRIER, NO_CACHE_DIRECT,
    NO_CACHE_EPOCH, OLD, Rig, wait_until,
};

/// Most commits in flight over a device that keeps order.
const IN_FLIGHT_COUNT_MAX: usize = 8;
/// How long something that must not happen is waited for. What happens later goes unnoticed.
const A_WHILE: Duration = Duration::from_millis(60);

/// Stalls flushes. Without a cache, an epoch is durable when it is transferred and no flush reaches
/// the device, so that the writes that end epochs stall instead.
fn stall(rig: &Rig) {
    let by_writes = rig.kind.keeps_order() && rig.kind.cache == Cache::None;
    rig.gate.hold(move |request| match request {
        Request::Flush { .. } => true,
        write => by_writes && is_barrier(write),
    });
}

/// Commits dispatched since the mount; each has one descriptor block.
fn dispatched(rig: &Rig) -> usize {
    rig.fs.stats().journal.descriptor_blocks as usize
}

/// Readers and writers go on: reads that the device serves, writes into the cache, new files.
fn others_go_on(rig: &Rig, old: &InodeRef, file: usize) {
    std::thread::scope(|scope| {
        let others = scope.spawn(|| {
            let mut bytes = vec![0; OLD.len()];
            assert_eq!(old.read(0, &mut bytes).expect("read"), OLD.len());
            assert_eq!(bytes, OLD);
            old.write(OLD.len() as u64, &[9; BLOCK_BYTES]).expect("write");
            old.set_attr(&truncated(), &fjord::Cred::root()).expect("truncate");
            rig.write(file).expect("a new file");
        });
        wait_until("readers and writers", || others.is_finished());
        others.join().expect("readers and writers go on");
    });
}

/// Back to the contents that later checks expect.
fn truncated() -> fjord::SetAttr {
    fjord::SetAttr { size: Some(OLD.len() as u64), ..fjord::SetAttr::default() }
}

/// A device that keeps order: commits are dispatched up to the bound, without a wait.
fn barriers_return(kind: Kind, mode: Mode) {
    let rig = Rig::new(kind, mode);
    let old = rig.fs.root().expect("the root").lookup(b"old").expect("the old file");
    let before = dispatched(&rig);
    stall(&rig);
    let returned = AtomicUsize::new(0);
    let count = IN_FLIGHT_COUNT_MAX;
    std::thread::scope(|scope| {
        let _release = rig.gate.release_on_drop();
        let chain = scope.spawn(|| {
            let one = |number| {
                let file = rig.write(number).expect("a new file");
                file.barrier(false).expect("fbarrier");
                returned.fetch_add(1, Ordering::SeqCst);
                file
            };
            (0..=count).map(one).collect::<Vec<_>>()
        });
        wait_until("barrier calls up to the bound", || {
            returned.load(Ordering::SeqCst) >= count || chain.is_finished()
        });
        std::thread::sleep(A_WHILE);
        // One more has to wait for the oldest.
        assert!(!chain.is_finished(), "{kind:?} {mode:?}: more in flight than the bound");
        assert_eq!(returned.load(Ordering::SeqCst), count, "{kind:?} {mode:?}");
        assert_eq!(dispatched(&rig) - before, count, "{kind:?} {mode:?}");
        wait_until("a request that stalls", || rig.gate.held_count() > 0);
        others_go_on(&rig, &old, count + 1);
        assert_eq!(rig.fs.stats().journal.commits, 0, "{kind:?} {mode:?}: reported durable");
        rig.check(&rig.gate.durable_image(), &[false; 8], "stalled");
        rig.gate.release_all();
        let files = chain.join().expect("barrier calls return");
        for file in &files {
            file.fsync(false).expect("fsync");
        }
    });
    let promised = vec![true; count + 1];
    rig.check(&rig.gate.durable_image(), &promised, "released");
    data_barriers_return(&rig, &old);
}

/// fdatabarrier of data in place needs no commit, so no bound applies.
fn data_barriers_return(rig: &Rig, old: &InodeRef) {
    if rig.mode.data == DataMode::Journal {
        return;
    }
    old.fsync(false).expect("fsync");
    stall(rig);
    std::thread::scope(|scope| {
        let _release = rig.gate.release_on_drop();
        let calls = scope.spawn(|| {
            for _ in 0..2 * IN_FLIGHT_COUNT_MAX {
                old.write(0, OLD).expect("write");
                old.barrier(true).expect("fdatabarrier");
            }
        });
        wait_until("fdatabarrier", || calls.is_finished());
        calls.join().expect("fdatabarrier returns");
    });
    rig.gate.release_all();
    old.fsync(false).expect("fsync");
}

/// Threads that fsync, each begun when the one before is dispatched, or waits.
fn fsyncs_stall(kind: Kind, mode: Mode) {
    let rig = Rig::new(kind, mode);
    rig.change_aside();
    let old = rig.fs.root().expect("the root").lookup(b"old").expect("the old file");
    let before = dispatched(&rig);
    // A commit begins when it has as many callers as those in flight: 1, 1, 2, 4, ... Without order,
    // all but the first join the transaction that runs.
    let bound = |callers: usize| if kind.keeps_order() { callers.ilog2() as usize + 1 } else { 1 };
    let count = IN_FLIGHT_COUNT_MAX + 3;
    let waits = || rig.fs.stats().journal.commit_waits;
    let waits_before = waits();
    // One thread settles.
    let waiting = count as u64 - 1;
    stall(&rig);
    std::thread::scope(|scope| {
        let _release = rig.gate.release_on_drop();
        let mut fsyncs = Vec::new();
        for number in 0..count {
            let file = rig.write(number).expect("a new file");
            fsyncs.push(scope.spawn(move || file.fsync(false)));
            wait_until("commits up to the bound", || {
                dispatched(&rig) - before >= bound(number + 1)
            });
        }
        wait_until("the fsyncs that wait", || waits() - waits_before >= waiting);
        std::thread::sleep(A_WHILE);
        assert_eq!(dispatched(&rig) - before, bound(count), "{kind:?} {mode:?}");
        wait_until("a request that stalls", || rig.gate.held_count() > 0);
        others_go_on(&rig, &old, count);
        let finished = fsyncs.iter().filter(|fsync| fsync.is_finished()).count();
        assert_eq!(finished, 0, "{kind:?} {mode:?}: fsyncs return");
        assert_eq!(rig.fs.stats().journal.commits, 0, "{kind:?} {mode:?}: reported durable");
        rig.check(&rig.gate.durable_image(), &[false; 8], "stalled");
        rig.gate.release_all();
        for fsync in fsyncs {
            fsync.join().expect("no panic").expect("fsync");
        }
    });
    let (dispatched, partial) = (dispatched(&rig) - before, rig.partial_commits() as usize);
    println!("{kind:?} {mode:?}: {dispatched} commits for {count} fsyncs, {partial} partial");
    assert_eq!(partial, if mode.commits_groups() { dispatched } else { 0 }, "{kind:?} {mode:?}");
    assert!(
        dispatched <= bound(count) + 2,
        "{kind:?} {mode:?}: {dispatched} commits, nobody joins"
    );
    rig.check(&rig.gate.durable_image(), &vec![true; count], "released");
}

#[test]
fn barrier_calls_return() {
    for kind in [NATIVE_BARRIER, CACHE_EPOCH, NO_CACHE_EPOCH] {
        MODES.into_iter().for_each(|mode| barriers_return(kind, mode));
    }
}

#[test]
fn fsyncs_are_dispatched_up_to_the_bound() {
    for kind in [NATIVE_BARRIER, CACHE_EPOCH, NO_CACHE_EPOCH] {
        MODES.into_iter().for_each(|mode| fsyncs_stall(kind, mode));
    }
}

#[test]
fn without_order_fsyncs_join_the_next_commit() {
    for kind in [CACHE_DIRECT, NO_CACHE_DIRECT] {
        MODES.into_iter().for_each(|mode| fsyncs_stall(kind, mode));
    }
}
