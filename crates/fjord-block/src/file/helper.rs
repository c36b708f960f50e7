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
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::ring::{Attendance, Ring};
use super::shared::{Job, Shared};
use crate::counter::shard_index;
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

/// Number of shards of what is left to its submitter.
const SHARDS: usize = 8;

/// Guarded by `Helpers::queues`.
#[derive(Default)]
struct Queues {
    /// For workers, by class. Promoted jobs are in two queues; the first to claim wins.
    urgent: [VecDeque<Arc<Job>>; 3],
    flushes: VecDeque<Ticket>,
    worker_count: usize,
    idle_worker_count: usize,
    stopping: bool,
    threads: Vec<JoinHandle<()>>,
}

/// The helper threads of one device.
pub(super) struct Helpers {
    /// Oldest first, of some threads each. Leaf locks; never two at a time, and none with `queues`.
    lazy: [Mutex<VecDeque<(Instant, Lazy)>>; SHARDS],
    /// In all of `lazy`. Raised before it is put there, lowered after it is taken.
    lazy_count: AtomicUsize,
    /// The ticker sleeps without a timeout. Set under `queues`, before a last look for work.
    ticker_asleep: AtomicBool,
    queues: Mutex<Queues>,
    ticker_wake: Condvar,
    worker_wake: Condvar,
}

impl Default for Helpers {
    fn default() -> Helpers {
        Helpers {
            lazy: std::array::from_fn(|_| Mutex::new(Rank::FileLazy, VecDeque::new())),
            lazy_count: AtomicUsize::new(0),
            ticker_asleep: AtomicBool::new(false),
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
        self.lazy_count.fetch_add(1, Ordering::SeqCst);
        self.lazy[shard_index() % SHARDS].lock().push_back((Instant::now(), lazy));
        self.wake_ticker();
    }

    /// The ring has requests in flight.
    pub(super) fn notice_ring(&self) {
        self.wake_ticker();
    }

    /// To be called when there is something to do: the ticker looks after it has said that it sleeps.
    fn wake_ticker(&self) {
        fence(Ordering::SeqCst);
        if self.ticker_asleep.load(Ordering::SeqCst) {
            let _queues = self.queues.lock();
            self.ticker_asleep.store(false, Ordering::SeqCst);
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
                    queues.urgent.iter_mut().for_each(VecDeque::clear);
                    queues.flushes.clear();
                    drop(queues);
                    helpers.lazy.iter().for_each(|lazy| lazy.lock().clear());
                    shared.release();
                    return;
                }
                helpers.ticker_wake.wait_for(&mut queues, Duration::from_millis(1));
            } else if attendance == Attendance::ByTicker {
                // It is older than a tick.
            } else if idle_tick_count < IDLE_TICK_COUNT_MAX || shared.gate.pending_count() > 0 {
                helpers.ticker_wake.wait_for(&mut queues, TICK);
            } else if helpers.lazy_count.load(Ordering::SeqCst) == 0 {
                helpers.ticker_asleep.store(true, Ordering::SeqCst);
                fence(Ordering::SeqCst);
                if helpers.lazy_count.load(Ordering::SeqCst) > 0 || shared.gate.pending_count() > 0
                {
                    helpers.ticker_asleep.store(false, Ordering::SeqCst);
                }
                while helpers.ticker_asleep.load(Ordering::SeqCst) {
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
        let (stopping, alone) = {
            let queues = self.queues.lock();
            (queues.stopping, queues.worker_count == 0)
        };
        for lazy in &self.lazy {
            let mut lazy = lazy.lock();
            let is_young = |since: &Instant| !stopping && now.duration_since(*since) < TICK;
            while lazy.front().is_some_and(|(since, _)| !is_young(since)) {
                match lazy.pop_front() {
                    Some((_, Lazy::Job(job))) if !job.is_claimed() => jobs.push(job),
                    Some((_, Lazy::Flush(ticket))) if !ticket.is_done() => flushes.push(ticket),
                    _ => {}
                }
                self.lazy_count.fetch_sub(1, Ordering::SeqCst);
            }
        }
        (jobs, flushes, alone)
    }

    /// Waits until every request is done and ends the threads. From one of the threads themselves
    /// (a callback dropped the device) it only asks them to end.
    pub(super) fn stop(&self) {
        let mut queues = self.queues.lock();
        queues.stopping = true;
        self.ticker_asleep.store(false, Ordering::SeqCst);
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
