//! A mutex with a rank.

use std::fmt;
use std::ops::{Deref, DerefMut};

use super::held::{Held, Tag};
use super::primitive;
use super::rank::Rank;

/// A mutex with a rank.
pub struct Mutex<T: ?Sized> {
    tag: Tag,
    inner: primitive::Mutex<T>,
}

impl<T> Mutex<T> {
    /// An unlocked mutex of this rank.
    pub const fn new(rank: Rank, value: T) -> Mutex<T> {
        Mutex { tag: Tag::new(rank), inner: primitive::Mutex::new(value) }
    }

    /// As [`Mutex::new`], for a lock of the whole process (a static): a model check, of which each run
    /// begins anew, leaves it alone.
    pub const fn process_wide(rank: Rank, value: T) -> Mutex<T> {
        Mutex { tag: Tag::new(rank), inner: primitive::process_wide(value) }
    }

    /// The value.
    pub fn into_inner(self) -> T {
        self.inner.into_inner()
    }
}

impl<T: ?Sized> Mutex<T> {
    /// Waits for the lock.
    #[inline]
    #[track_caller]
    pub fn lock(&self) -> MutexGuard<'_, T> {
        self.tag.check(0);
        MutexGuard { inner: self.inner.lock(), held: self.tag.hold(0) }
    }

    /// Waits for the lock; locks of one rank may be held together if each is taken by this method,
    /// with a higher key than those before. A plain `lock` has key 0.
    #[inline]
    #[track_caller]
    pub fn lock_in_order(&self, key: u64) -> MutexGuard<'_, T> {
        self.tag.check(key);
        MutexGuard { inner: self.inner.lock(), held: self.tag.hold(key) }
    }

    /// Takes the lock if it is free.
    #[inline]
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        let inner = self.inner.try_lock()?;
        Some(MutexGuard { inner, held: self.tag.hold(0) })
    }

    /// The value, without a lock, as nobody else has access.
    pub fn get_mut(&mut self) -> &mut T {
        self.inner.get_mut()
    }
}

impl<T: ?Sized + fmt::Debug> fmt::Debug for Mutex<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

/// A locked [`Mutex`].
#[must_use = "unlocked at once if it is not used"]
pub struct MutexGuard<'a, T: ?Sized> {
    /// Unlocked before the rank is given up.
    pub(super) inner: primitive::MutexGuard<'a, T>,
    pub(super) held: Held,
}

impl<T: ?Sized> MutexGuard<'_, T> {
    /// Runs `unlocked` while the mutex is unlocked.
    #[inline]
    #[track_caller]
    pub fn unlocked<R>(guard: &mut Self, unlocked: impl FnOnce() -> R) -> R {
        let inner = &mut guard.inner;
        guard.held.released(|| primitive::MutexGuard::unlocked(inner, unlocked))
    }
}

impl<T: ?Sized> Deref for MutexGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.inner
    }
}

impl<T: ?Sized> DerefMut for MutexGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        &mut self.inner
    }
}

impl<T: ?Sized + fmt::Debug> fmt::Debug for MutexGuard<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}
