//! The primitives below the ranked locks: those of `parking_lot`, or with the feature `model` those
//! whose threads a model check schedules.

#[cfg(not(feature = "model"))]
mod real {
    use std::time::{Duration, Instant};

    pub use parking_lot::WaitTimeoutResult;
    pub(in crate::lock) use parking_lot::{
        Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard,
    };
    pub use std::thread_local;

    pub(in crate::lock) const fn process_wide<T>(value: T) -> Mutex<T> {
        Mutex::new(value)
    }

    /// Another thread may run here: before a read of what others change without a lock. Of use in a
    /// model check (feature `model`) only.
    #[inline(always)]
    pub fn point() {}

    /// The time, for waits with an end.
    #[inline(always)]
    pub fn now() -> Instant {
        Instant::now()
    }

    /// Sleeps.
    pub fn pause(time: Duration) {
        std::thread::sleep(time);
    }
}

#[cfg(feature = "model")]
pub(super) use super::model::{
    Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard, process_wide,
};
#[cfg(feature = "model")]
pub use super::model::{WaitTimeoutResult, now, pause, point};
#[cfg(feature = "model")]
pub use crate::model_thread_local as thread_local;
#[cfg(not(feature = "model"))]
pub(super) use real::{
    Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard, process_wide,
};
#[cfg(not(feature = "model"))]
pub use real::{WaitTimeoutResult, now, pause, point, thread_local};
