//! Helper threads for requests without a waiter. Owns the queues of unclaimed jobs.
//!
//! - The *ticker* looks every few milliseconds for requests that their submitter does not wait for,
//!   and reaps ring completions that no waiter reaps. While the device is idle, it sleeps without a
//!   timeout.
//! - *Workers*, started when needed, run jobs that block and do not suit the ring, Sync first.
//!
//! Invariant: while a request is pending, the ticker is awake or about to wake.

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::ring::{Attendance, Ring};
use super::shared::{Job, Shared};
use crate::device::Class;
use crate::lock::{Condvar, Mutex, Rank};
use crate::ticket::Ticket;

/// Age at which the ticker dispatches a request.
const TICK: Duration = Duration::from_millis(5);
/// Ticks without work before the ticker sleeps without a timeout; avoids wake-ups under steady
/// load.
const IDLE_TICK_COUNT_MAX: u32 = 20;
/// Threads for blocking jobs.
const WORKER_COUNT_MAX: usize = 8;

/// A job that its submitter is expected to do itself soon.
enum Lazy {
    Job(Arc<Job>),
    Flush(Ticket),
}

/// Guarded by `Helpers::queues`.
#[derive(Default)]
struct Queues {
    /// Oldest first.
    lazy: VecDeque<(Instant, Lazy)>,
    /// For workers, by class. Promoted jobs are in two queues; the first to claim wins.
    urgent: [VecDeque<Arc<Job>>; 3],
    flushes: VecDeque<Ticket>,
    worker_count: usize,
    idle_worker_count: usize,
    /// The ticker sleeps without a timeout.
    ticker_asleep: bool,
    stopping: bool,
    threads: Vec<JoinHandle<()>>,
}

/// The helper threads of one device.
pub(super) struct Helpers {
    queues: Mutex<Queues>,
    ticker_wake: Condvar,
    worker_wake: Condvar,
}

impl Default for Helpers {
    fn default() -> Helpers {
        Helpers {
            queues: Mutex::new(Rank::FileHelpers, Queues::default()),
            ticker_wake: Condvar::new(),
            worker_wake: Condvar::new(),
        }
    }
}

impl Helpers {
    /// Starts the ticker.
    pub(super) fn start(shared: &Arc<Shared>) -> std::io::Result<()> {
        let for_thread = shared.clone();
        let ticker = thread::Builder::new()
            .name("fjord-block".into())
            .spawn(move || Helpers::tick(&for_thread))?;
        shared.helpers.queues.lock().threads.push(ticker);
        Ok(())
    }

    /// Remembers a job that its submitter will probably wait for at once.
    pub(super) fn push_lazy_job(&self, job: Arc<Job>) {
        self.push_lazy(Lazy::Job(job));
    }

    /// Remembers a flush that its submitter will probably wait for at once.
    pub(super) fn push_lazy_flush(&self, ticket: Ticket) {
        self.push_lazy(Lazy::Flush(ticket));
    }

    fn push_lazy(&self, lazy: Lazy) {
        let mut queues = self.queues.lock();
        queues.lazy.push_back((Instant::now(), lazy));
        self.wake_ticker(&mut queues);
    }

    /// The ring has requests in flight.
    pub(super) fn notice_ring(&self) {
        self.wake_ticker(&mut self.queues.lock());
    }

    fn wake_ticker(&self, queues: &mut Queues) {
        if queues.ticker_asleep {
            queues.ticker_asleep = false;
            self.ticker_wake.notify_one();
        }
    }

    /// Gives a job to the workers.
    pub(super) fn push_job(&self, shared: &Arc<Shared>, job: Arc<Job>, class: Class) {
        let mut queues = self.queues.lock();
        queues.urgent[class as usize].push_back(job);
        self.wake_worker(shared, &mut queues);
    }

    /// Gives a flush to the workers.
    pub(super) fn push_flush(&self, shared: &Arc<Shared>, ticket: Ticket) {
        let mut queues = self.queues.lock();
        queues.flushes.push_back(ticket);
        self.wake_worker(shared, &mut queues);
    }

    fn wake_worker(&self, shared: &Arc<Shared>, queues: &mut Queues) {
        if queues.idle_worker_count > 0 {
            self.worker_wake.notify_one();
            return;
        }
        if queues.worker_count == WORKER_COUNT_MAX {
            return;
        }
        let for_thread = shared.clone();
        let spawned = thread::Builder::new()
            .name("fjord-block".into())
            .spawn(move || Helpers::work(&for_thread));
        match spawned {
            Ok(thread) => {
                queues.worker_count += 1;
                queues.threads.push(thread);
            }
            // The ticker does the workers' part when there are none.
            Err(error) => tracing::warn!("cannot start a thread for I/O: {error}"),
        }
    }

    /// The worker thread.
    fn work(shared: &Arc<Shared>) {
        let helpers = &shared.helpers;
        let mut queues = helpers.queues.lock();
        loop {
            if let Some(run) = queues.pop_urgent() {
                drop(queues);
                run.run();
                queues = helpers.queues.lock();
            } else if queues.stopping && shared.gate.pending_count() == 0 {
                return;
            } else {
                queues.idle_worker_count += 1;
                helpers.worker_wake.wait_for(&mut queues, Duration::from_secs(1));
                queues.idle_worker_count -= 1;
            }
        }
    }

    /// The ticker thread.
    fn tick(shared: &Arc<Shared>) {
        let helpers = &shared.helpers;
        let (mut idle_tick_count, mut turn_count) = (0, 0);
        loop {
            let (jobs, flushes, alone) = helpers.take_old();
            idle_tick_count =
                if jobs.is_empty() && flushes.is_empty() { idle_tick_count + 1 } else { 0 };
            shared.dispatch(jobs, Class::Sync);
            flushes.into_iter().for_each(|ticket| shared.start_flush(ticket));
            if alone && let Some(run) = { helpers.queues.lock().pop_urgent() } {
                run.run();
                continue;
            }
            let attendance = Ring::reap_unattended(shared, &mut turn_count, TICK);
            let mut queues = helpers.queues.lock();
            if queues.stopping {
                if shared.gate.pending_count() == 0 {
                    helpers.worker_wake.notify_all();
                    // Drops finished jobs, also younger than a tick; they would keep the device
                    // alive.
                    queues.lazy.clear();
                    queues.urgent.iter_mut().for_each(VecDeque::clear);
                    queues.flushes.clear();
                    drop(queues);
                    shared.release();
                    return;
                }
                helpers.ticker_wake.wait_for(&mut queues, Duration::from_millis(1));
            } else if attendance == Attendance::ByTicker {
                // It is older than a tick.
            } else if idle_tick_count < IDLE_TICK_COUNT_MAX || shared.gate.pending_count() > 0 {
                helpers.ticker_wake.wait_for(&mut queues, TICK);
            } else if queues.lazy.is_empty() {
                queues.ticker_asleep = true;
                while queues.ticker_asleep {
                    helpers.ticker_wake.wait(&mut queues);
                }
                idle_tick_count = 0;
            } else {
                // Done already, but not a tick old.
                helpers.ticker_wake.wait_for(&mut queues, TICK);
            }
        }
    }

    /// Takes unclaimed jobs older than a tick (all when stopping); also returns whether workers are
    /// missing.
    fn take_old(&self) -> (Vec<Arc<Job>>, Vec<Ticket>, bool) {
        let now = Instant::now();
        let (mut jobs, mut flushes) = (Vec::new(), Vec::new());
        let mut queues = self.queues.lock();
        while let Some((since, _)) = queues.lazy.front() {
            if !queues.stopping && now.duration_since(*since) < TICK {
                break;
            }
            match queues.lazy.pop_front() {
                Some((_, Lazy::Job(job))) if !job.is_claimed() => jobs.push(job),
                Some((_, Lazy::Flush(ticket))) if !ticket.is_done() => flushes.push(ticket),
                _ => {}
            }
        }
        (jobs, flushes, queues.worker_count == 0)
    }

    /// Waits until every request is done and ends the threads. From one of the threads themselves
    /// (a callback dropped the device) it only asks them to end.
    pub(super) fn stop(&self) {
        let mut queues = self.queues.lock();
        queues.stopping = true;
        queues.ticker_asleep = false;
        let mut threads = std::mem::take(&mut queues.threads);
        drop(queues);
        self.ticker_wake.notify_all();
        self.worker_wake.notify_all();
        let current = thread::current().id();
        if threads.iter().any(|thread| thread.thread().id() == current) {
            return;
        }
        // Workers that a late request started are in the list by the time the first ones ended.
        while !threads.is_empty() {
            for thread in threads {
                // A helper does not panic; if a callback did, there is nothing to clean up.
                let _ = thread.join();
            }
            threads = std::mem::take(&mut self.queues.lock().threads);
        }
    }
}

/// One thing for a worker.
enum Run {
    Job(Arc<Job>),
    Flush(Ticket),
}

impl Run {
    fn run(self) {
        match self {
            Run::Job(job) => job.run(),
            Run::Flush(ticket) => ticket.finish(),
        }
    }
}

impl Queues {
    fn pop_urgent(&mut self) -> Option<Run> {
        if let Some(ticket) = self.flushes.pop_front() {
            return Some(Run::Flush(ticket));
        }
        self.urgent.iter_mut().find_map(VecDeque::pop_front).map(Run::Job)
    }
}
