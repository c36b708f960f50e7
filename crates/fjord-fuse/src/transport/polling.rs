//! When polling for the next request is better than sleeping.
//!
//! Owns the estimate, shared by the workers of a connection. Invariants: at most one worker polls
//! at a time, for at most [`POLL_MAX`] per request; a connection whose requests are further apart
//! than that costs no processor time, but for one attempt now and then; with one processor there is
//! no polling, because the caller needs it.

use std::{
    num::NonZero,
    sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    thread,
    time::Duration,
};

use super::clock::Clock;

/// The longest that one worker polls before it sleeps. Some three times what waking a sleeper on
/// another processor takes.
const POLL_MAX: Duration = Duration::from_micros(50);

/// The credit at which polling starts.
const CREDIT_ENOUGH: u32 = 4;

/// The highest credit.
const CREDIT_MAX: u32 = 64;

/// What a poll in vain costs. Hits must be several times as frequent.
const CREDIT_LOSS: u32 = 4;

/// Shared by the workers of one connection.
#[derive(Debug)]
pub(super) struct Polling {
    possible: bool,
    /// Somebody polls. A flag of its own right: it guards nothing else.
    busy: AtomicBool,
    /// Waits begun by [`Polling::begin_newest`].
    newest: AtomicU64,
    /// Grows with each request that came soon, shrinks with each that did not. A hint.
    credit: AtomicU32,
    clock: Clock,
    /// When some worker began to wait last, in nanoseconds by the clock. Workers take turns, so
    /// the time that one of them has waited itself says little. A hint.
    last_wait_ns: AtomicU64,
}

impl Default for Polling {
    fn default() -> Polling {
        let possible = thread::available_parallelism().is_ok_and(|n| n > NonZero::<usize>::MIN);
        Polling::new(possible, 0)
    }
}

impl Polling {
    fn new(possible: bool, credit: u32) -> Polling {
        Polling {
            possible,
            busy: AtomicBool::new(false),
            newest: AtomicU64::new(0),
            credit: AtomicU32::new(credit),
            clock: Clock::new(),
            last_wait_ns: AtomicU64::new(0),
        }
    }

    /// Whether this machine has the processors for it.
    pub(super) fn is_possible(&self) -> bool {
        self.possible
    }

    /// A worker begins to wait for a request. It polls if nobody does.
    pub(super) fn begin(&self) -> Wait<'_> {
        let polls = self.is_worthwhile() && !self.busy.swap(true, Ordering::Acquire);
        self.wait(polls, None)
    }

    /// The same where the next request goes to the worker that began to wait last. So it polls, and who did
    /// so far stops.
    pub(super) fn begin_newest(&self) -> Wait<'_> {
        let number = self.newest.fetch_add(1, Ordering::Relaxed) + 1;
        self.wait(self.is_worthwhile(), Some(number))
    }

    fn is_worthwhile(&self) -> bool {
        self.possible && self.credit.load(Ordering::Relaxed) >= CREDIT_ENOUGH
    }

    fn wait(&self, polls: bool, number: Option<u64>) -> Wait<'_> {
        let since_ns = self.clock.now_ns();
        self.last_wait_ns.store(since_ns, Ordering::Relaxed);
        Wait { polling: self, polls, number, polled_in_vain: false, since_ns }
    }
}

/// One worker's wait for one request.
pub(super) struct Wait<'a> {
    polling: &'a Polling,
    polls: bool,
    /// Of [`Polling::newest`], if only the newest polls.
    number: Option<u64>,
    polled_in_vain: bool,
    since_ns: u64,
}

impl Wait<'_> {
    /// Whether to ask once more.
    pub(super) fn poll_on(&self) -> bool {
        self.polls && self.is_newest() && self.is_within(self.since_ns)
    }

    fn is_newest(&self) -> bool {
        self.number.is_none_or(|number| number == self.polling.newest.load(Ordering::Relaxed))
    }

    /// Polling is over, the worker sleeps from now on.
    pub(super) fn sleep(&mut self) {
        self.polled_in_vain |= self.polls && self.is_newest();
        self.stop_polling();
    }

    /// A request is there.
    pub(super) fn found(mut self) {
        let last_wait_ns = self.polling.last_wait_ns.load(Ordering::Relaxed);
        let soon = !self.polled_in_vain && self.is_within(last_wait_ns);
        let credit = self.polling.credit.load(Ordering::Relaxed);
        // Without a lock an update may get lost; the next one is as good.
        let credit = match soon {
            true => (credit + 1).min(CREDIT_MAX),
            false if self.polled_in_vain => credit.saturating_sub(CREDIT_LOSS),
            false => credit.saturating_sub(1),
        };
        self.polling.credit.store(credit, Ordering::Relaxed);
        self.stop_polling();
    }

    /// Whether less than the longest poll has passed since then.
    fn is_within(&self, since_ns: u64) -> bool {
        u128::from(self.polling.clock.now_ns().saturating_sub(since_ns)) < POLL_MAX.as_nanos()
    }

    fn stop_polling(&mut self) {
        if self.polls {
            self.polls = false;
            if self.number.is_none() {
                self.polling.busy.store(false, Ordering::Release);
            }
        }
    }
}

impl Drop for Wait<'_> {
    fn drop(&mut self) {
        self.stop_polling();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn polling(credit: u32) -> Polling {
        Polling { clock: Clock::stopped(), ..Polling::new(true, credit) }
    }

    #[test]
    fn requests_in_quick_succession_are_polled_for() {
        let polling = polling(0);
        for _ in 0..CREDIT_ENOUGH {
            let mut wait = polling.begin();
            assert!(!wait.poll_on());
            wait.sleep();
            wait.found();
        }
        assert!(polling.begin().poll_on());
    }

    #[test]
    fn rare_requests_are_slept_for() {
        let polling = polling(CREDIT_MAX);
        for _ in 0..=CREDIT_MAX / CREDIT_LOSS {
            let mut wait = polling.begin();
            polling.clock.advance(POLL_MAX);
            assert!(!wait.poll_on());
            wait.sleep();
            wait.found();
        }
        assert!(!polling.begin().polls);
    }

    #[test]
    fn one_worker_polls_at_a_time() {
        let polling = polling(CREDIT_MAX);
        let first = polling.begin();
        assert!(first.polls && !polling.begin().polls);
        drop(first);
        assert!(polling.begin().polls);
    }
}
