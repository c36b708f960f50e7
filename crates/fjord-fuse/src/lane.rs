//! How many workers a queue of requests has.
//!
//! Owns these counts. A lane grows when a worker takes a request and none is left that waits. More workers than a few for
//! each processor are only of use while others sleep: with 64 of them at work on two processors, 64 callers of fsync had
//! seven tenths of the rate and four times the slowest times. So from [`SOON_MAX`] on it grows only once no worker has
//! taken a request for a while.
//!
//! Invariants: the count of workers never exceeds [`Lane::new`]'s; a worker of a ring never ends while the connection
//! lives (see [`crate::transport`]).

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;

use crate::transport::Queue;

/// Workers for each processor that are started at once when they are missing.
const SOON_MAX: usize = 8;

/// What a lane does about a request that was the last one that a worker waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Growth {
    /// Nothing: others wait, or there are enough.
    None,
    /// A worker was counted, which the caller starts.
    Now,
    /// The lane has to be looked at in a while: [`Lane::claim_start_if_stuck`].
    Later,
}

/// The workers of one queue.
#[derive(Debug)]
pub(crate) struct Lane {
    pub(crate) queue: Queue,
    threads_max: usize,
    /// Most workers that wait for requests.
    idle_max: usize,
    /// Workers alive, and those that are being started.
    threads: AtomicUsize,
    /// Workers that wait for requests, and those that are being started. A hint for growing and shrinking, not a
    /// lock.
    idle: AtomicUsize,
    /// Workers up to which it grows at once, those that wait for a reply not counted.
    soon_max: usize,
    /// Workers that wait until somebody else has answered their request.
    waiting: AtomicUsize,
    /// Requests taken, and that number when the lane was looked at last.
    taken: AtomicU64,
    taken_before: AtomicU64,
}

impl Lane {
    /// A queue without workers.
    pub(crate) fn new(queue: Queue, threads_max: usize, idle_max: usize) -> Lane {
        let idle_max = if matches!(queue, Queue::Ring(_)) { threads_max } else { idle_max };
        // Each ring is for one processor.
        let processors = match queue {
            Queue::Device => thread::available_parallelism().map_or(1, usize::from),
            Queue::Ring(_) => 1,
        };
        Lane {
            queue,
            threads_max,
            idle_max,
            threads: AtomicUsize::new(0),
            idle: AtomicUsize::new(0),
            soon_max: SOON_MAX * processors,
            waiting: AtomicUsize::new(0),
            taken: AtomicU64::new(0),
            taken_before: AtomicU64::new(0),
        }
    }

    /// Counts one more worker, idle, which the caller starts; `false` if there are enough.
    pub(crate) fn claim_start(&self) -> bool {
        let claimed = raise(&self.threads, self.threads_max);
        if claimed {
            self.idle.fetch_add(1, Ordering::Relaxed);
        }
        claimed
    }

    /// Grows if no worker waits for requests and none is being started. Counted from the decision on: a start takes
    /// long enough for others to decide the same.
    pub(crate) fn grow(&self) -> Growth {
        if self.idle.load(Ordering::Relaxed) > 0 {
            return Growth::None;
        }
        match self.threads.load(Ordering::Relaxed) {
            threads if threads >= self.threads_max => Growth::None,
            threads if threads >= self.soon_max + self.waiting.load(Ordering::Relaxed) => {
                Growth::Later
            }
            _ if self.claim_start_if_short() => Growth::Now,
            _ => Growth::None,
        }
    }

    fn claim_start_if_short(&self) -> bool {
        if !raise(&self.idle, 1) {
            return false;
        }
        let claimed = raise(&self.threads, self.threads_max);
        if !claimed {
            self.idle.fetch_sub(1, Ordering::Relaxed);
        }
        claimed
    }

    /// Looks whether all workers are at work and none has taken a request since the last look: then one more is counted,
    /// which the caller starts.
    pub(crate) fn claim_start_if_stuck(&self) -> bool {
        let taken = self.taken.load(Ordering::Relaxed);
        let is_stuck = self.taken_before.swap(taken, Ordering::Relaxed) == taken;
        is_stuck && self.claim_start_if_short()
    }

    /// Whether no worker waits for requests, and there may be more.
    pub(crate) fn is_short(&self) -> bool {
        self.idle.load(Ordering::Relaxed) == 0
            && self.threads.load(Ordering::Relaxed) < self.threads_max
    }

    /// A worker has a request.
    pub(crate) fn begin_work(&self) {
        self.taken.fetch_add(1, Ordering::Relaxed);
        self.idle.fetch_sub(1, Ordering::Relaxed);
    }

    /// While `wait` runs, the worker is not at work.
    pub(crate) fn waiting<R>(&self, wait: impl FnOnce() -> R) -> R {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let result = wait();
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        result
    }

    /// Counts a worker in as idle, if not enough are.
    pub(crate) fn may_rest(&self) -> bool {
        raise(&self.idle, self.idle_max)
    }

    /// A worker that is not idle has ended. Returns how many are left.
    pub(crate) fn end(&self) -> usize {
        self.threads.fetch_sub(1, Ordering::Relaxed) - 1
    }

    /// A claimed worker was not started.
    pub(crate) fn give_up(&self) {
        self.begin_work();
        self.end();
    }
}

/// Adds one, unless `count` has reached `max`.
fn raise(count: &AtomicUsize, max: usize) -> bool {
    let one_more = |count| (count < max).then_some(count + 1);
    count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lane_grows_while_it_is_short_and_has_room() {
        let lane = Lane::new(Queue::Ring(0), 3, 1);
        assert!(lane.claim_start());
        assert_eq!(lane.grow(), Growth::None);
        lane.begin_work();
        assert_eq!([lane.grow(), lane.grow()], [Growth::Now, Growth::None]);
        lane.begin_work();
        assert_eq!(lane.grow(), Growth::Now);
        lane.begin_work();
        assert_eq!(lane.grow(), Growth::None);
        assert!(!lane.claim_start() && !lane.is_short());
        assert_eq!(lane.end(), 2);
        assert!(lane.claim_start());
        lane.give_up();
        assert_eq!(lane.end(), 1);
    }

    #[test]
    fn of_the_device_few_rest() {
        let lane = Lane::new(Queue::Device, 3, 1);
        (0..2).for_each(|_| assert!(lane.claim_start()));
        (0..2).for_each(|_| lane.begin_work());
        assert!(lane.may_rest() && !lane.may_rest());
    }

    #[test]
    fn with_many_workers_it_grows_when_they_are_stuck() {
        let lane = Lane::new(Queue::Ring(0), SOON_MAX + 2, 0);
        assert!(lane.claim_start());
        lane.begin_work();
        for _ in 1..SOON_MAX {
            assert_eq!(lane.grow(), Growth::Now);
            lane.begin_work();
        }
        assert_eq!(lane.grow(), Growth::Later);
        lane.waiting(|| assert_eq!(lane.grow(), Growth::Now));
        lane.give_up();
        assert!(!lane.claim_start_if_stuck() && lane.is_short());
        assert!(lane.claim_start_if_stuck(), "nobody has taken a request since");
        lane.begin_work();
        assert!(!lane.claim_start_if_stuck(), "one has");
        assert!(lane.may_rest() && !lane.claim_start_if_stuck());
    }

    #[test]
    fn workers_of_a_ring_stay() {
        let lane = Lane::new(Queue::Ring(0), 3, 1);
        for _ in 0..3 {
            assert!(lane.claim_start());
            lane.begin_work();
        }
        assert!((0..3).all(|_| lane.may_rest()));
    }
}
