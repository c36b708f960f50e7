//! Ranks without checks, for release builds: types without a size, and empty functions.

use std::marker::PhantomData;

use super::primitive;
use super::rank::Rank;

/// The rank of a lock.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tag;

impl Tag {
    #[inline]
    pub(super) const fn new(_: Rank) -> Tag {
        Tag
    }

    #[inline]
    pub(super) fn check(self, _: Option<u64>) {}

    #[inline]
    pub(super) fn hold(self, _: Option<u64>) -> Held {
        Held { not_send: PhantomData }
    }
}

/// A held rank: part of every guard, and of each lock that is made by hand.
#[must_use = "the rank is held until this is dropped"]
#[derive(Debug)]
pub struct Held {
    /// A guard stays on its thread.
    not_send: PhantomData<primitive::MutexGuard<'static, ()>>,
}

impl Held {
    #[inline]
    pub(super) fn released<R>(&mut self, unlocked: impl FnOnce() -> R) -> R {
        unlocked()
    }
}
