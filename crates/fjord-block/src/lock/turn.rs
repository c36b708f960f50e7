//! Ranks of locks that are made by hand, from a flag under a mutex and a condition variable.
//!
//! The mutex of the flag ranks above the lock itself, so the order is checked before that mutex is
//! taken: [`Turn::wait_for`], then the wait, then [`Turn::taken`] for as long as the lock is held.

use super::held::{Held, Tag};
use super::rank::Rank;

/// The right to wait for a lock.
#[must_use = "the order was checked for the lock that is taken next"]
#[derive(Clone, Copy, Debug)]
pub struct Turn(Tag);

impl Turn {
    /// Checks that this thread may wait for a lock of this rank.
    #[track_caller]
    pub fn wait_for(rank: Rank) -> Turn {
        let tag = Tag::new(rank);
        tag.check(0);
        Turn(tag)
    }

    /// An attempt that does not wait: no check.
    pub fn try_for(rank: Rank) -> Turn {
        Turn(Tag::new(rank))
    }

    /// The lock is taken; held until the result is dropped.
    pub fn taken(self) -> Held {
        self.0.hold(0)
    }
}
