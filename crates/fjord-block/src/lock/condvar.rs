//! A condition variable for ranked mutexes.

use std::time::{Duration, Instant};

use super::mutex::MutexGuard;
use super::primitive::{self, WaitTimeoutResult};

/// A condition variable. Has no rank: its mutex has.
#[derive(Debug, Default)]
pub struct Condvar(primitive::Condvar);

impl Condvar {
    /// A condition variable without waiting threads.
    pub const fn new() -> Condvar {
        Condvar(primitive::Condvar::new())
    }

    /// Waits for a signal, with the mutex unlocked.
    #[track_caller]
    pub fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        let inner = &mut guard.inner;
        guard.held.released(|| self.0.wait(inner));
    }

    /// Waits for a signal, `timeout` at most, with the mutex unlocked.
    #[track_caller]
    pub fn wait_for<T>(
        &self,
        guard: &mut MutexGuard<'_, T>,
        timeout: Duration,
    ) -> WaitTimeoutResult {
        let inner = &mut guard.inner;
        guard.held.released(|| self.0.wait_for(inner, timeout))
    }

    /// Waits for a signal, until `deadline` at most, with the mutex unlocked.
    #[track_caller]
    pub fn wait_until<T>(
        &self,
        guard: &mut MutexGuard<'_, T>,
        deadline: Instant,
    ) -> WaitTimeoutResult {
        let inner = &mut guard.inner;
        guard.held.released(|| self.0.wait_until(inner, deadline))
    }

    /// Wakes one waiting thread; whether there was one.
    pub fn notify_one(&self) -> bool {
        self.0.notify_one()
    }

    /// Wakes all waiting threads; their number.
    pub fn notify_all(&self) -> usize {
        self.0.notify_all()
    }
}
