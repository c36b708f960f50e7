//! How many workers a queue of requests has.
//!
//! Owns these counts. Invariants: the count of workers never exceeds [`Lane::new`]'s; a worker of a ring
//! never ends while the connection lives (see [`crate::transport`]).

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::transport::Queue;

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
}

impl Lane {
    /// A queue without workers.
    pub(crate) fn new(queue: Queue, threads_max: usize, idle_max: usize) -> Lane {
        let idle_max = if matches!(queue, Queue::Ring(_)) { threads_max } else { idle_max };
        let (threads, idle) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Lane { queue, threads_max, idle_max, threads, idle }
    }

    /// Counts one more worker, idle, which the caller starts; `false` if there are enough.
    pub(crate) fn claim_start(&self) -> bool {
        let claimed = raise(&self.threads, self.threads_max);
        if claimed {
            self.idle.fetch_add(1, Ordering::Relaxed);
        }
        claimed
    }

    /// The same, if no worker waits for requests and none is being started. Counted from the decision on: a
    /// start takes long enough for others to decide the same.
    pub(crate) fn claim_start_if_short(&self) -> bool {
        if self.threads.load(Ordering::Relaxed) >= self.threads_max || !raise(&self.idle, 1) {
            return false;
        }
        let claimed = raise(&self.threads, self.threads_max);
        if !claimed {
            self.idle.fetch_sub(1, Ordering::Relaxed);
        }
        claimed
    }

    /// A worker has a request.
    pub(crate) fn begin_work(&self) {
        self.idle.fetch_sub(1, Ordering::Relaxed);
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
        let lane = Lane::new(Queue::Device, 3, 1);
        assert!(lane.claim_start() && !lane.claim_start_if_short());
        lane.begin_work();
        assert!(lane.claim_start_if_short() && !lane.claim_start_if_short());
        lane.begin_work();
        assert!(lane.claim_start_if_short());
        lane.begin_work();
        assert!(!lane.claim_start_if_short() && !lane.claim_start());
        assert!(lane.may_rest() && !lane.may_rest());
        assert_eq!(lane.end(), 2);
        assert!(lane.claim_start());
        lane.give_up();
        assert_eq!(lane.end(), 1);
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
