//! Handles, commits and checkpoints from many threads at once.

use std::sync::atomic::{AtomicBool, Ordering};

use fjord_format::jbd2::ChecksumVersion;
use fjord_journal::{JournalIo, JournalLists, PipelineMode};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::history::each_third_recovered;
use crate::rig::{Rig, is_whole, set_value};

const THREADS: u64 = 4;
const ROUNDS: u64 = 60;

/// Each handle adds 1 to its thread's own two blocks and to one that all share, so at every
/// transaction boundary the shared value is the sum of the others. Older versions are copied
/// out from under the writers all the time: they commit and checkpoint while the blocks go on
/// being modified.
fn versions_stay_apart(io: JournalIo, lists: JournalLists, descriptor_blocks_max: Option<usize>) {
    let mut rig = Rig::new(1024, ChecksumVersion::V3, true, 60);
    (rig.options.io, rig.options.lists) = (io, lists);
    rig.options.descriptor_blocks_max = descriptor_blocks_max;
    if io == JournalIo::Dedicated {
        rig.options.pipeline = PipelineMode::Serial;
    }
    let journal = rig.open();
    let start = rig.device.image();
    let shared = rig.buffer(0);
    let promises = parking_lot::Mutex::new(Vec::new());
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                journal.checkpoint_some(3).unwrap();
                std::thread::yield_now();
            }
        });
        let workers: Vec<_> = (1..=THREADS)
            .map(|thread| {
                let (journal, shared, promises, rig) = (&journal, &shared, &promises, &rig);
                scope.spawn(move || {
                    let own = [rig.buffer(thread * 2), rig.buffer(thread * 2 + 1)];
                    let mut rng = StdRng::seed_from_u64(thread);
                    for round in 1..=ROUNDS {
                        let handle = journal.start(3).unwrap();
                        for buffer in &own {
                            set_value(&mut handle.get_write(buffer).unwrap(), round);
                        }
                        let mut guard = handle.get_write(shared).unwrap();
                        let sum = u64::from_be_bytes(guard[8..16].try_into().unwrap());
                        set_value(&mut guard, sum + 1);
                        drop(guard);
                        let tid = handle.stop();
                        if rng.random_range(0..3) == 0 {
                            journal.commit(tid).unwrap();
                            promises.lock().push((rig.device.event_count(), thread, round));
                        }
                    }
                })
            })
            .collect();
        workers.into_iter().for_each(|worker| worker.join().unwrap());
        done.store(true, Ordering::Relaxed);
    });
    let events = rig.device.events();
    let promises = promises.into_inner();
    each_third_recovered(&rig, &start, &events, |cut, image| {
        let mut sum = 0;
        for thread in 1..=THREADS {
            let value = rig.value(image, thread * 2);
            assert_eq!(value, rig.value(image, thread * 2 + 1), "cut {cut}: a torn transaction");
            let promised =
                promises.iter().filter(|(at, of, _)| *at <= cut && *of == thread).map(|p| p.2);
            assert!(value >= promised.max().unwrap_or(0), "cut {cut}: a promise was broken");
            sum += value;
        }
        assert_eq!(rig.value(image, 0), sum, "cut {cut}");
        assert!((0..10).all(|block| is_whole(&image[block * 1024..(block + 1) * 1024])));
    });
    journal.close().unwrap();
    assert_eq!(rig.value(&rig.device.image(), 0), THREADS * ROUNDS);
    assert!(shared.is_evictable());
}

#[test]
fn versions_stay_apart_under_concurrency_and_crashes() {
    versions_stay_apart(JournalIo::Cooperative, JournalLists::LockFree, None);
}

/// A commit of more than two blocks has several pieces.
#[test]
fn versions_stay_apart_where_threads_write_pieces() {
    versions_stay_apart(JournalIo::Cooperative, JournalLists::LockFree, Some(2));
}

#[test]
fn versions_stay_apart_where_one_thread_commits_for_all() {
    versions_stay_apart(JournalIo::Dedicated, JournalLists::Locked, None);
}

#[test]
fn waiters_share_a_commit() {
    let rig = Rig::new(1024, ChecksumVersion::V3, true, 200);
    let journal = rig.open();
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let (journal, rig) = (&journal, &rig);
            scope.spawn(move || {
                let buffer = rig.buffer(thread);
                for value in 0..50 {
                    let handle = journal.start(1).unwrap();
                    set_value(&mut handle.get_write(&buffer).unwrap(), value);
                    journal.commit(handle.stop()).unwrap();
                }
            });
        }
    });
    assert!(journal.stats().commits <= 400);
    assert_eq!(journal.stats().handles, 400);
}
