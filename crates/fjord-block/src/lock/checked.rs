//! Ranks that a thread holds, for debug builds.
//!
//! Invariants: a [`Held`] stays on the thread that made it, and is on that thread's list until it is
//! dropped.

use std::cell::RefCell;
use std::marker::PhantomData;

use super::primitive::{self, thread_local};
use super::rank::Rank;

thread_local! {
    /// Ranks that this thread holds, with their keys, in the order of taking.
    static HELD: RefCell<Vec<(Rank, u64)>> = const { RefCell::new(Vec::new()) };
}

/// The rank of a lock.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tag(Rank);

impl Tag {
    pub(super) const fn new(rank: Rank) -> Tag {
        Tag(rank)
    }

    /// Panics if this thread must not wait for the lock now. A lock may follow one of its rank
    /// with a lower key.
    #[track_caller]
    pub(super) fn check(self, key: u64) {
        if std::thread::panicking() {
            return;
        }
        let taken = (self.0, key);
        // A thread that ends has dropped its list.
        let above = HELD.try_with(|held| held.borrow().iter().copied().find(|held| *held >= taken));
        if let Ok(Some(held)) = above {
            panic!("lock order: {} is taken while {} is held", name(taken), name(held));
        }
    }

    /// The lock was taken.
    pub(super) fn hold(self, key: u64) -> Held {
        let entry = (self.0, key);
        let _ = HELD.try_with(|held| held.borrow_mut().push(entry));
        Held { entry, not_send: PhantomData }
    }
}

fn name((rank, key): (Rank, u64)) -> String {
    let key = if key == 0 { String::new() } else { format!(", key {key}") };
    format!("{rank:?} (rank {}{key})", rank.number())
}

/// A held rank: part of every guard, and of each lock that is made by hand.
#[must_use = "the rank is held until this is dropped"]
#[derive(Debug)]
pub struct Held {
    entry: (Rank, u64),
    /// A guard stays on its thread.
    not_send: PhantomData<primitive::MutexGuard<'static, ()>>,
}

impl Held {
    /// Runs `unlocked` while the lock is released.
    #[track_caller]
    pub(super) fn released<R>(&mut self, unlocked: impl FnOnce() -> R) -> R {
        let (rank, key) = self.entry;
        self.remove();
        // It will be waited for with what is held now.
        Tag(rank).check(key);
        let result = unlocked();
        std::mem::forget(Tag(rank).hold(key));
        result
    }

    fn remove(&self) {
        let _ = HELD.try_with(|held| {
            let mut held = held.borrow_mut();
            if let Some(at) = held.iter().rposition(|entry| *entry == self.entry) {
                held.remove(at);
            }
        });
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.remove();
    }
}
