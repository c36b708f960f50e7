//! Ranks whose locks are timed, for builds with the feature `lock-stats`. The order of locks is not checked.
//!
//! Invariant: each begin of a wait on a thread is the latest of its rank, and goes with the lock that is
//! taken next.

use std::cell::RefCell;
use std::marker::PhantomData;
use std::time::{Duration, Instant};

use super::primitive;
use super::rank::Rank;
use super::stats;

thread_local! {
    /// When this thread began to wait, for each lock that it has not yet; a lock made by hand takes others
    /// meanwhile.
    static WAITS: RefCell<Vec<(Rank, Instant)>> = const { RefCell::new(Vec::new()) };
}

/// The rank of a lock.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tag(Rank);

impl Tag {
    pub(super) const fn new(rank: Rank) -> Tag {
        Tag(rank)
    }

    /// A wait for the lock begins.
    pub(super) fn check(self, _: u64) {
        // A thread that ends has dropped its list.
        let _ = WAITS.try_with(|waits| {
            let mut waits = waits.borrow_mut();
            waits.retain(|(rank, _)| *rank != self.0);
            waits.push((self.0, Instant::now()));
        });
    }

    /// The lock was taken, after a wait or at the first attempt.
    pub(super) fn hold(self, _: u64) -> Held {
        let since = Instant::now();
        let began = WAITS.try_with(|waits| {
            let mut waits = waits.borrow_mut();
            let at = waits.iter().position(|(rank, _)| *rank == self.0)?;
            Some(waits.swap_remove(at).1)
        });
        let waited = began.ok().flatten().map_or(Duration::ZERO, |began| since - began);
        stats::count_taken(self.0, waited);
        Held { rank: self.0, since, not_send: PhantomData }
    }
}

/// A held rank: part of every guard, and of each lock that is made by hand.
#[must_use = "the rank is held until this is dropped"]
#[derive(Debug)]
pub struct Held {
    rank: Rank,
    since: Instant,
    /// A guard stays on its thread.
    not_send: PhantomData<primitive::MutexGuard<'static, ()>>,
}

impl Held {
    /// Runs `unlocked` while the lock is released.
    pub(super) fn released<R>(&mut self, unlocked: impl FnOnce() -> R) -> R {
        stats::count_held(self.rank, self.since.elapsed());
        let result = unlocked();
        self.since = Instant::now();
        result
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        stats::count_held(self.rank, self.since.elapsed());
    }
}
