//! Flush combining. Owns the runs of `fdatasync`, and the tickets that each run answers.
//!
//! A flush ticket joins the batch of the next run to start; that run covers it, because all its
//! writes completed before it was submitted. A waiting thread does the run (measured faster than
//! IORING_OP_FSYNC, which switches to a kernel worker and back), or a helper thread if no thread
//! waits.
//!
//! Invariants:
//! - a run that starts takes the whole waiting batch; tickets are never moved between batches;
//! - at most `RUNNING_COUNT_MAX` runs are in progress;
//! - after a failed run every flush fails ([`Sticky`]), including those in progress.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::gate::Pending;
use super::raw::RawFile;
use super::shared::Shared;
use crate::lock::{Mutex, Rank};
use crate::stats::StatCounters;
use crate::sticky::Sticky;
use crate::ticket::{Completer, Driver, IoResult, Ticket, TicketCore};

/// Most concurrent runs. The device serialises flushes; a few more in its queue hide the wake-up
/// latency of the thread that starts the next.
const RUNNING_COUNT_MAX: u32 = 4;

/// Completed writes, and those known to be durable, as counts of one clock.
#[derive(Debug)]
pub(super) struct DirtyClock {
    completed: AtomicU64,
    durable: AtomicU64,
}

impl DirtyClock {
    /// Starts dirty: earlier users of the image may have left data in caches.
    pub(super) fn new() -> Self {
        DirtyClock { completed: AtomicU64::new(1), durable: AtomicU64::new(0) }
    }

    /// A change completed that only a flush makes durable. Called before its ticket completes.
    pub(super) fn bump(&self) {
        self.completed.fetch_add(1, Ordering::SeqCst);
    }

    fn is_clean(&self) -> bool {
        self.durable.load(Ordering::SeqCst) >= self.completed.load(Ordering::SeqCst)
    }
}

/// Guarded by `Flusher::state`.
#[derive(Default)]
struct State {
    /// Runs started so far; also the number of the newest run.
    started_count: u64,
    running_count: u32,
    /// The batch of run `started_count + 1`.
    waiting: Vec<(Completer, Pending)>,
    /// A thread waits, with this ticket of the batch, for its turn to run the batch.
    next_runner: Option<Arc<TicketCore>>,
}

/// Combines the flushes of one device.
pub(super) struct Flusher {
    state: Mutex<State>,
}

impl Default for Flusher {
    fn default() -> Flusher {
        Flusher { state: Mutex::new(Rank::FileFlush, State::default()) }
    }
}

/// Drives one flush ticket.
struct FlushTurn {
    /// The run that answers the ticket.
    run_number: u64,
    shared: Arc<Shared>,
}

impl Driver for FlushTurn {
    fn drive(&self, ticket: &Arc<TicketCore>) {
        self.shared.flusher.take_turn(&self.shared, self.run_number, ticket);
    }

    fn start(&self, ticket: &Arc<TicketCore>) {
        self.shared.start_flush(Ticket::from_core(ticket.clone()));
    }
}

impl Flusher {
    /// A ticket for a flush that covers all writes completed so far.
    pub(super) fn submit(shared: &Arc<Shared>) -> Ticket {
        if let Err(error) = shared.sticky.check() {
            return Ticket::ready(Err(error));
        }
        if shared.dirty.is_clean() {
            return Ticket::ready(Ok(()));
        }
        let (ticket, completer) = Ticket::pending(None);
        let mut state = shared.flusher.state.lock();
        let run_number = state.started_count + 1;
        completer.set_driver(Arc::new(FlushTurn { run_number, shared: shared.clone() }));
        state.waiting.push((completer, shared.gate.enter()));
        ticket
    }

    /// Runs the batch of `run_number` if it has not started and the limit allows it; else ensures
    /// that it will run.
    fn take_turn(&self, shared: &Shared, run_number: u64, ticket: &Arc<TicketCore>) {
        let mut state = self.state.lock();
        if state.started_count >= run_number {
            return;
        }
        if state.running_count >= RUNNING_COUNT_MAX {
            state.next_runner.get_or_insert_with(|| ticket.clone());
            return;
        }
        state.started_count += 1;
        state.running_count += 1;
        state.next_runner = None;
        let batch = std::mem::take(&mut state.waiting);
        drop(state);
        let result = run(&shared.file, &shared.dirty, &shared.sticky, &shared.stats);
        let mut state = self.state.lock();
        state.running_count -= 1;
        let next = state.next_runner.take();
        drop(state);
        // First the thread with work to do, then those that only return.
        if let Some(next) = next {
            next.nudge();
        }
        for (completer, pending) in batch {
            drop(pending);
            completer.complete(result.clone());
        }
    }
}

fn run(file: &RawFile, dirty: &DirtyClock, sticky: &Sticky, stats: &StatCounters) -> IoResult {
    sticky.check()?;
    let covered = dirty.completed.load(Ordering::SeqCst);
    stats.flush_issued();
    if let Err(error) = file.flush() {
        stats.error();
        sticky.set(&error);
        return Err(error);
    }
    // A concurrent run may have got an error that the kernel reports only once.
    sticky.check()?;
    dirty.durable.fetch_max(covered, Ordering::SeqCst);
    Ok(())
}
