//! Queue of requests for fast commits, and the time that a writer waits for more of them.
//!
//! A fast commit of new data takes two flushes, so threads that fsync repeatedly are fastest if
//! each fast commit serves all of them. Otherwise they split into two groups, each of which waits
//! for the other's flushes. So a writer waits for the threads that the last fast commit served:
//! they return soon or not at all. (jbd2 sleeps for a commit's time if another thread than last
//! time calls fsync.)
//!
//! Invariants: no wait lasts longer than a fast commit takes, counted from the end of the last one,
//! or while a full commit waits; waits that do not pay back off exponentially.

use std::time::{Duration, Instant};

use fjord_block::lock::{Condvar, Mutex, Rank};

/// Upper bound of a wait; in tests long enough for a machine that stalls.
const WAIT_MAX: Duration = Duration::from_millis(if cfg!(test) { 120_000 } else { 15 });
/// Durations are clipped at this multiple of the average.
const OUTLIER: u32 = 4;
/// Upper bound of the backoff: after useless waits, at most 2^N fast commits without a wait.
const PATIENCE_LOST_MAX: u32 = 8;

/// Requests of type `R`, in order of arrival.
pub(crate) struct Queue<R> {
    /// A leaf lock.
    inner: Mutex<Inner<R>>,
    /// Signalled when the wanted number of requests is queued.
    enough: Condvar,
}

struct Inner<R> {
    waiting: Vec<R>,
    /// Number of requests that wakes the gathering thread; 0 if none gathers.
    wanted: usize,
    pace: Pace,
}

/// Expected number of requests, and when.
struct Pace {
    /// Requests served by the last fast commit, or queued while it was written.
    expected: usize,
    /// End of the last fast commit; `None` before the first.
    ended: Option<Instant>,
    /// Duration of a fast commit, smoothed.
    average: Duration,
    /// Consecutive waits that did not pay.
    vain: u32,
    /// Fast commits to write without a wait (backoff).
    skip: u32,
}

impl Pace {
    /// Deadline of a wait for more than `count` requests; `None` for no wait.
    fn deadline(&mut self, count: usize, now: Instant) -> Option<Instant> {
        let deadline = self.ended? + self.average.min(WAIT_MAX);
        if count >= self.expected || deadline <= now {
            return None;
        }
        if self.skip > 0 {
            self.skip -= 1;
            return None;
        }
        Some(deadline)
    }

    /// Records the result of a wait: `count` requests. It paid if the throughput is higher than
    /// without: all expected requests in two fast commits.
    fn waited(&mut self, count: usize, waited: Duration) {
        let factor = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        let with = (self.average * 2).saturating_mul(factor(count));
        let without = (self.average + waited).saturating_mul(factor(self.expected));
        let pays = with > without;
        self.vain = if pays { 0 } else { (self.vain + 1).min(PATIENCE_LOST_MAX) };
        self.skip = (1 << self.vain) - 1;
    }

    fn ended(&mut self, expected: usize, began: Instant, now: Instant) {
        let took = now.saturating_duration_since(began);
        let usual = match self.ended {
            None => took,
            Some(_) => (self.average * 7 + took.min(self.average * OUTLIER)) / 8,
        };
        self.average = usual.max(Duration::from_micros(1));
        (self.expected, self.ended) = (expected, Some(now));
    }
}

impl<R> Queue<R> {
    pub(crate) fn new() -> Queue<R> {
        let average = Duration::ZERO;
        let pace = Pace { expected: 0, ended: None, average, vain: 0, skip: 0 };
        let inner =
            Mutex::new(Rank::FastCommitQueue, Inner { waiting: Vec::new(), wanted: 0, pace });
        Queue { inner, enough: Condvar::new() }
    }

    /// Appends a request.
    pub(crate) fn push(&self, request: R) {
        let mut inner = self.inner.lock();
        inner.waiting.push(request);
        if inner.wanted > 0 && inner.waiting.len() >= inner.wanted {
            self.enough.notify_one();
        }
    }

    /// Takes all requests, after a wait for more if that is likely to pay. Single caller.
    pub(crate) fn gather(&self) -> Vec<R> {
        let mut inner = self.inner.lock();
        let (count, began) = (inner.waiting.len(), Instant::now());
        if let Some(deadline) = inner.pace.deadline(count, began) {
            inner.wanted = inner.pace.expected;
            while inner.waiting.len() < inner.wanted {
                if self.enough.wait_until(&mut inner, deadline).timed_out() {
                    break;
                }
            }
            inner.wanted = 0;
            let count = inner.waiting.len();
            inner.pace.waited(count, began.elapsed());
        }
        std::mem::take(&mut inner.waiting)
    }

    /// Ends a wait for more: a full commit wants the commit lock.
    pub(crate) fn stop_wait(&self) {
        let mut inner = self.inner.lock();
        if std::mem::take(&mut inner.wanted) > 0 {
            self.enough.notify_one();
        }
    }

    /// Records a fast commit that began at `began` and served `count` requests.
    pub(crate) fn served(&self, count: usize, began: Instant) {
        let mut inner = self.inner.lock();
        let expected = count + inner.waiting.len();
        inner.pace.ended(expected, began, Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn pace(expected: usize, average: Duration, ended: Instant) -> Pace {
        Pace { expected, ended: Some(ended), average, vain: 0, skip: 0 }
    }

    #[test]
    fn those_who_were_served_are_waited_for_as_long_as_a_commit_takes() {
        let now = Instant::now();
        let mut pace = pace(4, 4 * MS, now);
        assert_eq!(pace.deadline(1, now), Some(now + 4 * MS));
        assert_eq!(pace.deadline(4, now), None, "all are there");
        assert_eq!(pace.deadline(1, now + 5 * MS), None, "too late for them");
        pace.ended(1, now, now + 12 * MS);
        assert_eq!(pace.average, 5 * MS);
        assert_eq!(pace.deadline(1, now + 12 * MS), None, "a single thread never waits");
    }

    #[test]
    fn waits_in_vain_become_rare_and_one_that_pays_brings_them_back() {
        let now = Instant::now();
        let mut pace = pace(2, 4 * MS, now);
        let mut waits = 0;
        for _ in 0..1000 {
            if pace.deadline(1, now).is_some() {
                waits += 1;
                pace.waited(1, 4 * MS);
            }
        }
        assert!((5..15).contains(&waits), "{waits}");
        pace.waited(2, 3 * MS);
        assert!(pace.deadline(1, now).is_some());
        pace.expected = 4;
        pace.waited(3, 3 * MS);
        assert!(pace.deadline(1, now).is_none(), "3 in 7 ms instead of 4 in 8");
    }

    /// Runs `act` once a thread waits in `gather`, or has not waited.
    fn during_the_wait(queue: &Queue<u32>, is_over: &AtomicBool, act: impl FnOnce()) {
        while queue.inner.lock().wanted == 0 {
            if is_over.load(Ordering::SeqCst) {
                return;
            }
            std::thread::sleep(MS);
        }
        act();
    }

    /// What `gather` returns if `act` is run during its wait, which must not last to its end.
    fn gathered(queue: &Queue<u32>, act: impl FnOnce() + Send) -> Vec<u32> {
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| during_the_wait(queue, &is_over, act));
            let began = Instant::now();
            let gathered = queue.gather();
            is_over.store(true, Ordering::SeqCst);
            assert!(began.elapsed() < WAIT_MAX);
            gathered
        })
    }

    #[test]
    fn whoever_gathers_gets_all_that_came_in_time() {
        let queue = Queue::new();
        queue.push(1);
        assert_eq!(queue.gather(), [1], "nobody is expected");
        queue.push(2);
        queue.served(2, Instant::now().checked_sub(WAIT_MAX).unwrap());
        let got = gathered(&queue, || (3..5).for_each(|number| queue.push(number)));
        assert_eq!(got, [2, 3, 4]);
    }

    #[test]
    fn a_full_commit_ends_the_wait() {
        let queue = Queue::new();
        queue.push(1);
        queue.served(2, Instant::now().checked_sub(WAIT_MAX).unwrap());
        // Before the wait begins it means nothing.
        queue.stop_wait();
        assert_eq!(gathered(&queue, || queue.stop_wait()), [1]);
    }
}
