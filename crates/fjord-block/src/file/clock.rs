//! The clock of a snapshot's limits: how long a pause or a hold lasts. It is the machine's; a unit
//! test may stop it and move it.

use std::time::Instant;

use super::gate::Guard;
use crate::lock::{Condvar, MutexGuard};

/// The time of one gate. Its state in a test is guarded by the gate's lock.
#[derive(Default)]
pub(super) struct Clock {
    #[cfg(test)]
    stopped: Option<Stopped>,
}

#[cfg(test)]
struct Stopped {
    now: Instant,
    /// The last time at which a thread began to wait for a later one.
    seen: Option<Instant>,
}

impl Clock {
    pub(super) fn now(&self) -> Instant {
        #[cfg(test)]
        if let Some(stopped) = &self.stopped {
            return stopped.now;
        }
        Instant::now()
    }
}

/// Waits until `changed` is signalled, or until `deadline` by the clock.
pub(super) fn wait_until(changed: &Condvar, guard: &mut MutexGuard<'_, Guard>, deadline: Instant) {
    #[cfg(test)]
    if let Some(stopped) = &mut guard.clock.stopped {
        stopped.seen = Some(stopped.now);
        changed.wait(guard);
        return;
    }
    changed.wait_until(guard, deadline);
}

#[cfg(test)]
impl Clock {
    /// From now on the time stands still.
    pub(super) fn stop(&mut self) {
        self.stopped = Some(Stopped { now: Instant::now(), seen: None });
    }

    pub(super) fn advance(&mut self, time: std::time::Duration) {
        self.stopped.as_mut().expect("it was stopped").now += time;
    }

    /// Whether a thread has looked at the time that it is now, and waits for a later one.
    pub(super) fn is_waited_for(&self) -> bool {
        self.stopped.as_ref().is_some_and(|stopped| stopped.seen == Some(stopped.now))
    }
}
