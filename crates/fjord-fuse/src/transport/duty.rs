//! Which workers wait for requests at the device.
//!
//! The kernel wakes a sleeping reader for each request, also when another worker polls and has
//! the request before the sleeper is awake; with a single caller that costs more than serving it.
//! So one worker is *on duty*: it alone waits at the device, serves what it finds and comes
//! back, and the others are parked. Two things end that:
//!
//! - a worker on duty that serves one request for longer than [`LOOK`] is relieved by a parked
//!   one, the *lookout*;
//! - if the worker on duty often finds that a request of another caller is already pending, callers
//!   wait for each other. Then for the next [`CROWD_REQUESTS`] all workers wait at the device. (The
//!   next request of the same caller may be there as well, if it shares the worker's processor.)
//!
//! Owns these two decisions, and whether crowds follow each other for long. Invariant: while a worker is parked, one is at the device or will be
//! relieved within about [`LOOK`]. Two on duty at a time for a moment is harmless.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use fjord_block::lock::{Condvar, Mutex, Rank};

use super::clock::Clock;

/// How long requests may wait while another one is being served.
const LOOK: Duration = Duration::from_millis(1);
/// Looks without any request after which the lookout sleeps until it is woken.
const QUIET_LOOKS: u32 = 20;
/// Number of requests for which all workers wait, once there are several callers.
const CROWD_REQUESTS: u32 = 512;
/// Crowds one after the other, after which many callers are the rule.
const CROWDS_LASTING: u32 = 16;
/// A request of another caller that was there already, against any other, on the way to a crowd.
const HIT_SCORE: u32 = 2;
const CROWD_SCORE: u32 = 16;

/// The caller of requests that the kernel sends by itself.
const NOBODY: u32 = 0;

/// Shared by the workers of one connection.
#[derive(Debug)]
pub(super) struct Duty {
    next_worker: AtomicU64,
    /// The worker on duty; 0 for none.
    holder: AtomicU64,
    /// When it found the request that it serves, in nanoseconds by the clock; 0 while it waits.
    found_ns: AtomicU64,
    /// Requests to go in a crowd.
    crowd_left: AtomicU32,
    /// Whose request the worker on duty found last. A hint.
    last_caller: AtomicU32,
    /// Tends to a crowd. A hint.
    score: AtomicU32,
    /// Crowds since a single caller was last seen. A hint.
    crowds: AtomicU32,
    /// The lookout sleeps until [`Duty::found`] wakes it. Written under `bench`.
    lookout_sleeps: AtomicBool,
    clock: Clock,
    bench: Mutex<Bench>,
    /// Signalled when a parked worker may have something to do.
    changed: Condvar,
}

impl Default for Duty {
    fn default() -> Duty {
        Duty {
            next_worker: AtomicU64::new(1),
            holder: AtomicU64::new(0),
            found_ns: AtomicU64::new(0),
            crowd_left: AtomicU32::new(0),
            last_caller: AtomicU32::new(0),
            score: AtomicU32::new(0),
            crowds: AtomicU32::new(0),
            lookout_sleeps: AtomicBool::new(false),
            clock: Clock::new(),
            bench: Mutex::new(Rank::FuseDuty, Bench::default()),
            changed: Condvar::new(),
        }
    }
}

/// The parked workers.
#[derive(Debug, Default)]
struct Bench {
    has_lookout: bool,
    /// The connection has ended: no worker parks any more.
    ended: bool,
    /// Looks of lookouts.
    #[cfg(test)]
    look_count: u64,
}

/// How a worker may wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// Alone.
    OnDuty,
    /// As one of many.
    Crowd,
}

impl Duty {
    /// A name for a worker, to be passed to the other functions.
    pub(super) fn worker(&self) -> u64 {
        self.next_worker.fetch_add(1, Ordering::Relaxed)
    }

    /// Waits until the worker may wait at the device.
    pub(super) fn turn(&self, worker: u64) -> Turn {
        if self.is_crowd() {
            return Turn::Crowd;
        }
        if self.holder.load(Ordering::Acquire) == worker || self.take_over(0, worker) {
            self.found_ns.store(0, Ordering::SeqCst);
            return Turn::OnDuty;
        }
        self.park(worker)
    }

    /// The worker found a request of the thread `caller`, `at_once` if it was there already when
    /// the worker looked.
    pub(super) fn found(&self, turn: Turn, caller: u32, at_once: bool) {
        if turn == Turn::Crowd {
            // Without a lock some go uncounted; it ends a little later then.
            let left = self.crowd_left.load(Ordering::Relaxed);
            self.crowd_left.store(left.saturating_sub(1), Ordering::Relaxed);
            return;
        }
        self.found_ns.store(self.now_ns(), Ordering::SeqCst);
        if self.is_crowded(caller, at_once) {
            self.begin_crowd();
        } else if self.lookout_sleeps.load(Ordering::SeqCst) {
            let _bench = self.bench.lock();
            self.lookout_sleeps.store(false, Ordering::SeqCst);
            self.changed.notify_all();
        }
    }

    /// Notes whose request came, and whether it is time for a crowd.
    fn is_crowded(&self, caller: u32, at_once: bool) -> bool {
        // FORGET, RELEASE and what the kernel writes back are nobody's, and nobody waits for them. They come beside
        // the requests of a single caller, too.
        if caller == NOBODY {
            return false;
        }
        let is_other = self.last_caller.swap(caller, Ordering::Relaxed) != caller;
        let score = self.score.load(Ordering::Relaxed);
        let score = if at_once && is_other { score + HIT_SCORE } else { score.saturating_sub(1) };
        self.score.store(score, Ordering::Relaxed);
        if score == 0 {
            self.crowds.store(0, Ordering::Relaxed);
        }
        score >= CROWD_SCORE
    }

    /// Whether there have been many callers for some time.
    pub(super) fn is_crowd_lasting(&self) -> bool {
        self.crowds.load(Ordering::Relaxed) >= CROWDS_LASTING
    }

    /// The worker goes.
    pub(super) fn leave(&self, worker: u64) {
        if self.take_over(worker, 0) {
            let _bench = self.bench.lock();
            self.changed.notify_all();
        }
    }

    /// The connection has ended: releases all workers.
    pub(super) fn end(&self) {
        self.bench.lock().ended = true;
        self.changed.notify_all();
    }

    fn is_crowd(&self) -> bool {
        self.crowd_left.load(Ordering::Relaxed) > 0
    }

    fn begin_crowd(&self) {
        // Half way, so that a crowd that goes on is soon seen again.
        self.score.store(CROWD_SCORE / 2, Ordering::Relaxed);
        self.crowds.fetch_add(1, Ordering::Relaxed);
        let _bench = self.bench.lock();
        self.crowd_left.store(CROWD_REQUESTS, Ordering::Relaxed);
        self.holder.store(0, Ordering::Release);
        self.changed.notify_all();
    }

    fn take_over(&self, from: u64, worker: u64) -> bool {
        let (set, fetch) = (Ordering::AcqRel, Ordering::Relaxed);
        self.holder.compare_exchange(from, worker, set, fetch).is_ok()
    }

    fn park(&self, worker: u64) -> Turn {
        let mut is_lookout = false;
        let mut quiet_looks = 0;
        let mut bench = self.bench.lock();
        let turn = loop {
            if bench.ended || self.is_crowd() {
                break Turn::Crowd;
            }
            if self.take_over(0, worker) {
                break Turn::OnDuty;
            }
            if !is_lookout {
                if bench.has_lookout {
                    self.changed.wait(&mut bench);
                    continue;
                }
                (is_lookout, bench.has_lookout) = (true, true);
            }
            #[cfg(test)]
            {
                bench.look_count += 1;
            }
            match self.found_ns.load(Ordering::SeqCst) {
                0 => quiet_looks += 1,
                found_ns => {
                    quiet_looks = 0;
                    let holder = self.holder.load(Ordering::Acquire);
                    if self.is_long_ago(found_ns) && self.take_over(holder, worker) {
                        break Turn::OnDuty;
                    }
                }
            }
            if quiet_looks < QUIET_LOOKS {
                self.changed.wait_for(&mut bench, LOOK);
                continue;
            }
            quiet_looks = 0;
            self.lookout_sleeps.store(true, Ordering::SeqCst);
            // A worker that finds a request from here on sees the flag, and needs `bench` to wake
            // this one.
            if self.found_ns.load(Ordering::SeqCst) == 0 {
                self.changed.wait(&mut bench);
            }
            self.lookout_sleeps.store(false, Ordering::SeqCst);
        };
        if is_lookout {
            bench.has_lookout = false;
            self.changed.notify_all();
        }
        if turn == Turn::OnDuty {
            self.found_ns.store(0, Ordering::SeqCst);
        }
        turn
    }

    fn now_ns(&self) -> u64 {
        // Never 0, which stands for nothing.
        self.clock.now_ns() | 1
    }

    fn is_long_ago(&self, found_ns: u64) -> bool {
        u128::from(self.now_ns().saturating_sub(found_ns)) >= LOOK.as_nanos()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::mpsc;
    use std::thread;
    use std::time::Instant;

    use super::*;

    /// Ends a test that would hang.
    const LONG: Duration = Duration::from_secs(120);

    /// Asks for the worker's turn on a thread of its own.
    fn asks(duty: &Arc<Duty>, worker: u64) -> mpsc::Receiver<Turn> {
        let (sender, receiver) = mpsc::channel();
        let duty = duty.clone();
        thread::spawn(move || sender.send(duty.turn(worker)));
        receiver
    }

    /// The clock stands still.
    fn rig() -> (Arc<Duty>, u64, u64) {
        let duty = Arc::new(Duty { clock: Clock::stopped(), ..Duty::default() });
        let (first, second) = (duty.worker(), duty.worker());
        assert_eq!(duty.turn(first), Turn::OnDuty);
        (duty, first, second)
    }

    fn wait_until(what: &str, reached: impl Fn() -> bool) {
        let began = Instant::now();
        while !reached() {
            assert!(began.elapsed() < LONG, "{what}: not within {LONG:?}");
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Waits until a lookout has looked, from begin to end.
    fn wait_for_a_look(duty: &Duty) {
        let looks = || duty.bench.lock().look_count;
        let before = looks();
        wait_until("a look", || looks() > before);
    }

    #[test]
    fn the_others_wait_while_one_is_quick() {
        let (duty, first, second) = rig();
        let parked = asks(&duty, second);
        for _ in 0..50 {
            duty.found(Turn::OnDuty, 7, true);
            duty.clock.advance(LOOK / 2);
            wait_for_a_look(&duty);
            assert!(parked.try_recv().is_err());
            assert_eq!(duty.turn(first), Turn::OnDuty);
            // Ends a look that has seen the request.
            drop(duty.bench.lock());
            duty.clock.advance(LOOK);
        }
        duty.leave(first);
        assert_eq!(parked.recv_timeout(LONG), Ok(Turn::OnDuty));
    }

    /// `rm -r`: a FORGET for each file came between two requests of the only caller, and all workers were woken.
    #[test]
    fn what_nobody_waits_for_makes_no_crowd() {
        let (duty, first, _) = rig();
        for _ in 0..2 * CROWD_SCORE {
            duty.found(Turn::OnDuty, NOBODY, true);
            duty.found(Turn::OnDuty, 7, true);
        }
        assert_eq!(duty.turn(first), Turn::OnDuty);
    }

    #[test]
    fn who_is_busy_for_long_is_relieved() {
        let (duty, first, second) = rig();
        let parked = asks(&duty, second);
        let sleeps = || duty.lookout_sleeps.load(Ordering::SeqCst);
        wait_until("the lookout sleeps", sleeps);
        duty.clock.advance(LOOK * 20);
        assert!(parked.try_recv().is_err());
        duty.found(Turn::OnDuty, 7, true);
        wait_for_a_look(&duty);
        assert!(parked.try_recv().is_err());
        duty.clock.advance(LOOK);
        assert_eq!(parked.recv_timeout(LONG), Ok(Turn::OnDuty));
        let relieved = asks(&duty, first);
        duty.clock.advance(LOOK * 5);
        // It looks until then, at one who only waits.
        wait_until("the lookout sleeps", sleeps);
        assert!(relieved.try_recv().is_err());
        duty.end();
        assert_eq!(relieved.recv_timeout(LONG), Ok(Turn::Crowd));
    }

    #[test]
    fn many_callers_are_served_by_everybody_for_a_while() {
        let (duty, first, second) = rig();
        let parked = asks(&duty, second);
        let hits = CROWD_SCORE.div_ceil(HIT_SCORE);
        (0..hits).for_each(|caller| duty.found(Turn::OnDuty, 8 + caller % 2, true));
        assert_eq!(parked.recv_timeout(LONG), Ok(Turn::Crowd));
        let crowd = || {
            for _ in 0..CROWD_REQUESTS {
                assert_eq!(duty.turn(first), Turn::Crowd);
                duty.found(Turn::Crowd, 8, false);
            }
            assert_eq!(duty.turn(first), Turn::OnDuty);
        };
        crowd();
        for _ in 1..CROWDS_LASTING {
            assert!(!duty.is_crowd_lasting());
            for caller in (0..).take_while(|_| !duty.is_crowd()) {
                duty.found(Turn::OnDuty, 8 + caller % 2, true);
            }
            crowd();
        }
        assert!(duty.is_crowd_lasting());
        (0..CROWD_SCORE).for_each(|_| duty.found(Turn::OnDuty, 8, false));
        assert!(!duty.is_crowd_lasting());
    }
}
