//! Flush combining. Owns who runs `fdatasync`, and which tickets each run answers.
//!
//! A flush ticket joins the batch of the next run to start; that run covers it, because every
//! write it is about completed before it was submitted. The run is done by a thread that waits
//! (measured faster than IORING_OP_FSYNC, which hands over to a kernel worker and back), or by a
//! helper thread when nobody waits.
//!
//! Invariants:
//! - a run that starts takes the whole waiting batch; tickets are never moved between batches;
//! - at most `RUNNING_COUNT_MAX` runs are under way;
//! - after a failed run every flush fails ([`Sticky`]), also those under way.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::gate::Pending;
use super::raw::RawFile;
use super::shared::Shared;
use crate::stats::StatCounters;
use crate::sticky::Sticky;
use crate::ticket::{Completer, Driver, IoResult, Ticket, TicketCore};

/// Runs under way at a time. The device takes flushes one after the other anyway; a few more
/// in its queue hide the wake-up of the thread that would start the next.
const RUNNING_COUNT_MAX: u32 = 4;

/// Writes that completed, and those of them known to be durable, as counts of one clock.
#[derive(Debug)]
pub(super) struct DirtyClock {
    completed: AtomicU64,
    durable: AtomicU64,
}

impl DirtyClock {
    /// Starts dirty: what earlier users of the image left in caches is not known.
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
    /// A thread waits with this ticket of the batch for its turn to run it.
    next_runner: Option<Arc<TicketCore>>,
}

/// Combines the flushes of one device.
#[derive(Default)]
pub(super) struct Flusher {
    state: Mutex<State>,
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

    /// Runs the batch of `run_number` if it has not started and there is room; else makes sure
    /// that its turn comes.
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
    // A run beside this one may have been told of a loss that the kernel reports only once.
    sticky.check()?;
    dirty.durable.fetch_max(covered, Ordering::SeqCst);
    Ok(())
}
