//! A reader-writer lock with a rank. A thread must not hold it twice, not even as a reader: a
//! writer that waits between the two would stop both.

use std::fmt;
use std::ops::{Deref, DerefMut};

use super::held::{Held, Tag};
use super::primitive;
use super::rank::Rank;

/// A reader-writer lock with a rank.
pub struct RwLock<T: ?Sized> {
    tag: Tag,
    inner: primitive::RwLock<T>,
}

impl<T> RwLock<T> {
    /// An unlocked lock of this rank.
    pub const fn new(rank: Rank, value: T) -> RwLock<T> {
        RwLock { tag: Tag::new(rank), inner: primitive::RwLock::new(value) }
    }

    /// The value.
    pub fn into_inner(self) -> T {
        self.inner.into_inner()
    }
}

impl<T: ?Sized> RwLock<T> {
    /// Waits to share the lock.
    #[inline]
    #[track_caller]
    pub fn read(&self) -> RwLockReadGuard<'_, T> {
        self.tag.check(None);
        RwLockReadGuard { inner: self.inner.read(), _held: self.tag.hold(None) }
    }

    /// As [`Mutex::lock_in_order`](super::Mutex::lock_in_order), shared.
    #[inline]
    #[track_caller]
    pub fn read_in_order(&self, key: u64) -> RwLockReadGuard<'_, T> {
        self.tag.check(Some(key));
        RwLockReadGuard { inner: self.inner.read(), _held: self.tag.hold(Some(key)) }
    }

    /// Shares the lock if no writer has it or waits for it.
    #[inline]
    pub fn try_read(&self) -> Option<RwLockReadGuard<'_, T>> {
        let inner = self.inner.try_read()?;
        Some(RwLockReadGuard { inner, _held: self.tag.hold(None) })
    }

    /// Waits to have the lock alone.
    #[inline]
    #[track_caller]
    pub fn write(&self) -> RwLockWriteGuard<'_, T> {
        self.tag.check(None);
        RwLockWriteGuard { inner: self.inner.write(), _held: self.tag.hold(None) }
    }

    /// As [`Mutex::lock_in_order`](super::Mutex::lock_in_order), alone.
    #[inline]
    #[track_caller]
    pub fn write_in_order(&self, key: u64) -> RwLockWriteGuard<'_, T> {
        self.tag.check(Some(key));
        RwLockWriteGuard { inner: self.inner.write(), _held: self.tag.hold(Some(key)) }
    }

    /// The value, without a lock, as nobody else has access.
    pub fn get_mut(&mut self) -> &mut T {
        self.inner.get_mut()
    }
}

impl<T: ?Sized + fmt::Debug> fmt::Debug for RwLock<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

/// A [`RwLock`] that is shared.
#[must_use = "unlocked at once if it is not used"]
pub struct RwLockReadGuard<'a, T: ?Sized> {
    /// Unlocked before the rank is given up.
    inner: primitive::RwLockReadGuard<'a, T>,
    _held: Held,
}

impl<T: ?Sized> Deref for RwLockReadGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.inner
    }
}

impl<T: ?Sized + fmt::Debug> fmt::Debug for RwLockReadGuard<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

/// A [`RwLock`] that one thread has alone.
#[must_use = "unlocked at once if it is not used"]
pub struct RwLockWriteGuard<'a, T: ?Sized> {
    /// Unlocked before the rank is given up.
    inner: primitive::RwLockWriteGuard<'a, T>,
    _held: Held,
}

impl<T: ?Sized> Deref for RwLockWriteGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.inner
    }
}

impl<T: ?Sized> DerefMut for RwLockWriteGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        &mut self.inner
    }
}

impl<T: ?Sized + fmt::Debug> fmt::Debug for RwLockWriteGuard<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}
