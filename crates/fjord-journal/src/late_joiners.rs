//! Late joiners: callers whose commit has ended and that may ask for the next one at once.
//!
//! A thread that fsyncs in a loop comes back soon after its commit. If the next commit begins with the
//! first of such threads, the others wait for that commit and for their own. In dual mode it waits
//! for them instead, and so does the flush of a round over a device that keeps order (the late
//! joiners of CJFS, FAST '23).
//!
//! Owns their count and the time of the wait. Invariants:
//! - a wait ends after [`LateJoiners::WAIT_MAX`] or half the mean time of a commit, whichever is less;
//! - callers that do not come back end the waits for a while, for longer each time;
//! - one thread, the watcher, sleeps until the end of the wait; it offers both roles then.

use std::time::{Duration, Instant};

#[cfg(not(test))]
use fjord_block::lock::now;

#[cfg(test)]
use tests::now;

/// Weight of a commit in the mean time, as a shift.
const MEAN_SHIFT: u32 = 3;
/// After so many failed waits in a row the time without waits grows no more.
const FAILED_WAITS_MAX: u32 = 6;

/// Guarded by the journal's state lock.
pub(crate) struct LateJoiners {
    /// Callers that are expected back.
    expected: u32,
    /// When the wait for them ends.
    until: Instant,
    /// Mean time of a commit, from its begin until it is durable.
    commit_time: Duration,
    /// Waits in a row that ended with callers missing.
    failed_waits: u32,
    /// Ends of commits after which callers are not expected.
    skipped_commits: u32,
    /// A thread sleeps until `until`.
    is_watched: bool,
    /// Another commit has ended since it began to.
    is_extended: bool,
}

impl LateJoiners {
    /// Longest wait.
    const WAIT_MAX: Duration = Duration::from_millis(1);
    /// A shorter wait ends before a thread has been woken.
    const WAIT_MIN: Duration = Duration::from_micros(1);

    pub(crate) fn new() -> LateJoiners {
        LateJoiners {
            expected: 0,
            until: now(),
            commit_time: Duration::ZERO,
            failed_waits: 0,
            skipped_commits: 0,
            is_watched: false,
            is_extended: false,
        }
    }

    /// A commit with that many callers has ended, which took `time`.
    pub(crate) fn commit_ended(&mut self, callers: u32, time: Duration) {
        self.commit_time = match self.commit_time {
            Duration::ZERO => time,
            mean => mean - mean / (1 << MEAN_SHIFT) + time / (1 << MEAN_SHIFT),
        };
        if callers == 0 {
            return;
        }
        if self.skipped_commits > 0 {
            self.skipped_commits -= 1;
            return;
        }
        let now = now();
        if now >= self.until {
            self.expected = 0;
        }
        self.expected = self.expected.saturating_add(callers);
        self.is_extended = true;
        self.until = now + (self.commit_time / 2).clamp(Self::WAIT_MIN, Self::WAIT_MAX);
    }

    /// A caller asks for a commit. Returns whether it was the last that was expected.
    pub(crate) fn arrived(&mut self) -> bool {
        if self.expected == 0 {
            return false;
        }
        if now() >= self.until {
            // Nobody has waited for the others.
            self.expected = 0;
            return false;
        }
        self.expected -= 1;
        if self.expected == 0 {
            self.failed_waits = 0;
        }
        self.expected == 0
    }

    /// Until when a commit should wait; `None` if all are here.
    pub(crate) fn awaited_until(&self) -> Option<Instant> {
        (self.expected > 0 && now() < self.until).then_some(self.until)
    }

    /// Whether a commit should wait and a thread watches the time.
    pub(crate) fn are_watched(&self) -> bool {
        self.is_watched && self.awaited_until().is_some()
    }

    /// Makes the calling thread the watcher, if one is needed: until when it should sleep.
    pub(crate) fn watch(&mut self) -> Option<Instant> {
        let until = self.awaited_until().filter(|_| !self.is_watched)?;
        (self.is_watched, self.is_extended) = (true, false);
        Some(until)
    }

    /// The watcher is awake; `timed_out` if nothing else has woken it.
    pub(crate) fn watch_ended(&mut self, timed_out: bool) {
        self.is_watched = false;
        if timed_out && self.expected > 0 && !self.is_extended {
            self.expected = 0;
            self.failed_waits = (self.failed_waits + 1).min(FAILED_WAITS_MAX);
            self.skipped_commits = (1 << self.failed_waits) - 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    const COMMIT: Duration = Duration::from_secs(1);

    thread_local! {
        /// What time it is for this thread, if its test has stopped the clock.
        static STOPPED: Cell<Option<Instant>> = const { Cell::new(None) };
    }

    pub(super) fn now() -> Instant {
        STOPPED.get().unwrap_or_else(Instant::now)
    }

    /// New ones, with the time standing still.
    fn joiners() -> LateJoiners {
        STOPPED.set(Some(Instant::now()));
        LateJoiners::new()
    }

    #[test]
    fn a_lone_caller_is_not_waited_for() {
        let mut joiners = joiners();
        joiners.commit_ended(1, COMMIT);
        assert!(joiners.arrived());
        assert_eq!(joiners.awaited_until(), None);
    }

    #[test]
    fn all_callers_of_a_commit_are_waited_for() {
        let mut joiners = joiners();
        joiners.commit_ended(2, COMMIT);
        joiners.commit_ended(1, COMMIT);
        assert!(!joiners.arrived() && !joiners.arrived());
        let until = now() + LateJoiners::WAIT_MAX;
        assert_eq!(joiners.awaited_until(), Some(until));
        assert_eq!(joiners.watch(), Some(until));
        assert!(joiners.watch().is_none(), "one watcher");
        STOPPED.set(Some(until));
        assert_eq!(joiners.awaited_until(), None);
    }

    #[test]
    fn callers_that_do_not_come_back_end_the_waits() {
        let mut joiners = joiners();
        for failed in 1..10_u32 {
            joiners.commit_ended(2, COMMIT);
            assert!(joiners.watch().is_some());
            joiners.watch_ended(true);
            let skipped = (1 << failed.min(FAILED_WAITS_MAX)) - 1;
            for _ in 0..skipped {
                joiners.commit_ended(2, COMMIT);
                assert_eq!(joiners.awaited_until(), None);
            }
        }
        joiners.commit_ended(1, COMMIT);
        assert!(joiners.arrived());
        assert_eq!(joiners.failed_waits, 0);
    }

    #[test]
    fn callers_that_come_late_are_not_waited_for() {
        let mut joiners = joiners();
        joiners.commit_ended(3, COMMIT);
        STOPPED.set(Some(joiners.until));
        assert!(!joiners.arrived());
        assert_eq!((joiners.expected, joiners.skipped_commits), (0, 0));
    }

    #[test]
    fn waits_are_bounded() {
        for (time, wait) in
            [(Duration::ZERO, LateJoiners::WAIT_MIN), (COMMIT, LateJoiners::WAIT_MAX)]
        {
            let mut joiners = joiners();
            joiners.commit_ended(2, time);
            assert_eq!(joiners.until, now() + wait);
        }
    }
}
