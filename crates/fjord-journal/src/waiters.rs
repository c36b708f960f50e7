//! Threads that wait for a commit.
//!
//! Each commit has its own list, from the moment when the first thread asks for it, so a thread
//! sleeps once until it has a result or a role to take ([`crate::roles`]), and no commit wakes the
//! threads of another one.
//!
//! Invariant: a list is waited for and counted under the journal's state lock.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use fjord_block::lock::{Condvar, MutexGuard};

/// Threads that wait for the same commit.
#[derive(Default)]
pub(crate) struct Waiters {
    /// Signalled, with the state lock, when the commit has an outcome, when one of the threads may
    /// take a role, and on an error.
    moved: Condvar,
    /// Number of threads. Changed under the state lock.
    count: AtomicU32,
}

impl Waiters {
    /// Waits for a signal, until a point in time if there is one. Returns whether that has passed.
    pub(crate) fn wait<T>(
        self: &Arc<Self>,
        state: &mut MutexGuard<'_, T>,
        until: Option<Instant>,
    ) -> bool {
        self.count.fetch_add(1, Ordering::Relaxed);
        let timed_out = match until {
            Some(until) => self.moved.wait_until(state, until).timed_out(),
            None => {
                self.moved.wait(state);
                false
            }
        };
        self.count.fetch_sub(1, Ordering::Relaxed);
        timed_out
    }

    /// Number of threads that wait.
    pub(crate) fn count(&self) -> u32 {
        self.count.load(Ordering::Relaxed)
    }

    /// Wakes one thread; whether there was one.
    pub(crate) fn wake_one(&self) -> bool {
        self.moved.notify_one()
    }

    /// Wakes all threads.
    pub(crate) fn wake_all(&self) {
        self.moved.notify_all();
    }
}
