//! Counters of locks, in a build with the feature `lock-stats`. One test: the counters are those of the
//! process.

use std::sync::Barrier;
use std::time::Duration;

use fjord_block::lock::{
    Condvar, LockStats, Mutex, Rank, Turn, lock_stats, pause, reset_lock_stats,
};

const STEP: Duration = Duration::from_millis(20);

fn stats_of(rank: Rank) -> LockStats {
    let all = lock_stats().expect("the feature is on");
    all.into_iter().find(|stats| stats.rank == rank).expect("it was taken")
}

fn ns(time: Duration) -> u64 {
    time.as_nanos() as u64
}

#[test]
fn waits_and_holds_are_counted() {
    reset_lock_stats();
    assert_eq!(lock_stats(), Some(Vec::new()));
    // A second thread waits while the first holds the lock.
    let (lock, both) = (Mutex::new(Rank::JournalState, 0), Barrier::new(2));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut held = lock.lock();
            both.wait();
            pause(STEP);
            *held += 1;
        });
        both.wait();
        *lock.lock() += 1;
    });
    let journal = stats_of(Rank::JournalState);
    assert_eq!(journal.taken_count, 2);
    assert!(journal.held_ns_max >= ns(STEP) && journal.held_ns >= journal.held_ns_max);
    // A free lock is taken without a wait; a wait on a condition variable is no time of the lock.
    let (free, never) = (Mutex::new(Rank::Budget, ()), Condvar::new());
    assert!(never.wait_for(&mut free.lock(), STEP).timed_out());
    assert!(free.try_lock().is_some());
    let budget = stats_of(Rank::Budget);
    assert_eq!(budget.taken_count, 2);
    // A lock made by hand, with the mutex of its flag inside the wait.
    let turn = Turn::wait_for(Rank::CommitLock);
    drop(free.lock());
    pause(STEP);
    drop(turn.taken());
    let commit = stats_of(Rank::CommitLock);
    assert_eq!((commit.taken_count, commit.waited_count), (1, 1));
    assert!(commit.waited_ns >= ns(STEP), "{commit:?}");
    assert!(Rank::CommitLock.is_of_the_file_system() && !Rank::InodeState.is_of_the_file_system());
    reset_lock_stats();
    assert_eq!(lock_stats(), Some(Vec::new()));
}
