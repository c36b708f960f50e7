//! Shared state of an open file. Owns [`Job`]: a request that is not done, and that the first
//! thread to claim it does.
//!
//! A single request of class Sync is not dispatched at submission: the thread that waits for it
//! claims it and does a plain system call, which is measured faster than a thread switch. It is
//! dispatched without a waiter when its thread submits something else, on `start`, or when the
//! helpers find it a few milliseconds old.
//!
//! Invariants:
//! - a job is claimed once, by taking its work;
//! - `dirty` is bumped before the ticket of a change completes, and [`Pending`] is left before, too;
//! - a change becomes a job only after it has passed the gate.

use std::sync::Arc;
use std::time::Duration;

use super::flush::{DirtyClock, Flusher};
use super::gate::{Gate, Pending};
use super::helper::Helpers;
use super::raw::{RawFile, Route};
use super::ring::Ring;
use crate::buf::{AlignedBuf, Buf};
use crate::device::{Class, Request, bufs_len};
use crate::error::{IoError, IoErrorKind, IoOp};
use crate::lock::{Mutex, Rank};
use crate::stats::StatCounters;
use crate::sticky::Sticky;
use crate::ticket::{Completer, Driver, IoResult, ReadSlot, Ticket, TicketCore};

/// All shared state of an open file.
pub(super) struct Shared {
    pub(super) file: RawFile,
    pub(super) ring: Option<Ring>,
    pub(super) flusher: Flusher,
    pub(super) helpers: Helpers,
    pub(super) dirty: DirtyClock,
    pub(super) sticky: Arc<Sticky>,
    pub(super) stats: StatCounters,
    pub(super) gate: Arc<Gate>,
}

/// The work of a request. Flushes are not here; see [`Flusher`].
pub(super) enum Action {
    Write { bufs: Vec<Buf>, fua: bool },
    Read { bufs: Vec<AlignedBuf>, slot: ReadSlot },
    Discard,
    WriteZeroes,
}

/// A request with its extent, and the means to report its result.
pub(super) struct Work {
    pub(super) action: Action,
    pub(super) offset: u64,
    pub(super) len: u64,
    completer: Completer,
    pub(super) pending: Pending,
}

impl Work {
    /// Makes work of a request, which must pass [`Gate::pass`] before it starts; None for flushes.
    pub(super) fn new(request: Request, shared: &Shared) -> Option<(Work, Ticket, Class)> {
        let (_, offset, len) = request.extent();
        let (action, class) = match request {
            Request::Write { bufs, fua, class, .. } => (Action::Write { bufs, fua }, class),
            Request::Discard { .. } => (Action::Discard, Class::Sync),
            Request::WriteZeroes { .. } => (Action::WriteZeroes, Class::Sync),
            Request::Flush { .. } => return None,
        };
        let (ticket, completer) = Ticket::pending(Some(shared.sticky.clone()));
        Some((
            Work { action, offset, len, completer, pending: shared.gate.enter_change() },
            ticket,
            class,
        ))
    }

    pub(super) fn new_read(
        offset: u64,
        bufs: Vec<AlignedBuf>,
        slot: ReadSlot,
        shared: &Shared,
    ) -> (Work, Ticket) {
        let (ticket, completer) = Ticket::pending(None);
        let len = bufs_len(&bufs);
        let action = Action::Read { bufs, slot };
        (Work { action, offset, len, completer, pending: shared.gate.enter() }, ticket)
    }

    fn op(&self) -> IoOp {
        match self.action {
            Action::Write { .. } => IoOp::Write,
            Action::Read { .. } => IoOp::Read,
            Action::Discard => IoOp::Discard,
            Action::WriteZeroes => IoOp::WriteZeroes,
        }
    }

    /// An error of this request.
    pub(super) fn error(&self, kind: IoErrorKind) -> IoError {
        IoError::new(kind, self.op(), self.offset, self.len)
    }

    pub(super) fn set_driver(&self, driver: Arc<dyn Driver>) {
        self.completer.set_driver(driver);
    }

    pub(super) fn is_discard(&self) -> bool {
        matches!(self.action, Action::Discard)
    }

    /// Wakes a waiter that went to sleep before the driver was changed.
    pub(super) fn nudge(&self) {
        if let Some(core) = self.completer.core() {
            core.nudge();
        }
    }

    /// The route of its transfer; None if it is not a transfer.
    pub(super) fn route(&self, file: &RawFile) -> Option<Route> {
        match &self.action {
            Action::Write { bufs, .. } => {
                Some(file.route(self.offset, bufs.iter().map(|b| (b.as_ptr().addr(), b.len()))))
            }
            Action::Read { bufs, .. } => {
                Some(file.route(self.offset, bufs.iter().map(|b| (b.as_ptr().addr(), b.len()))))
            }
            Action::Discard | Action::WriteZeroes => None,
        }
    }

    /// Whether the ring does this better than a thread: there, buffered writes and range operations
    /// go to a kernel worker, which is also a thread.
    fn suits_ring(&self, file: &RawFile) -> bool {
        match (self.route(file), &self.action) {
            // Two calls, one after the other.
            (_, Action::Write { fua: true, .. }) if !file.trusts_dsync => false,
            (Some(Route::Direct), _) => true,
            (Some(Route::Buffered), Action::Read { .. }) => true,
            (Some(Route::Buffered), _) | (None, _) => false,
        }
    }

    /// Does the work with plain calls on this thread.
    fn run(mut self, shared: &Shared) {
        let (offset, len) = (self.offset, self.len);
        let result = match &mut self.action {
            Action::Write { bufs, fua: true } if !shared.file.trusts_dsync => {
                let written = shared.file.write(offset, bufs, false, 0);
                // The kernel reports a failure once; every later flush must report it, too.
                written.and_then(|()| {
                    shared.stats.flush_issued();
                    shared.file.flush().inspect_err(|error| shared.sticky.set(error))
                })
            }
            Action::Write { bufs, fua } => shared.file.write(offset, bufs, *fua, 0),
            Action::Read { bufs, .. } => shared.file.read(offset, bufs, 0),
            Action::Discard => shared.file.discard(offset, len),
            Action::WriteZeroes => shared.file.write_zeroes(offset, len),
        };
        self.finish(shared, result);
    }

    /// Reports the result.
    pub(super) fn finish(self, shared: &Shared, result: IoResult) {
        let Work { action, completer, pending, .. } = self;
        // FUA promises what a flush does, and must fail on a truncated file.
        let result = match &action {
            Action::Write { fua: true, .. } => result.and_then(|()| shared.file.check(IoOp::Write)),
            _ => result,
        };
        match action {
            Action::Write { fua: true, .. } if result.is_ok() => {}
            // A failed write may have changed a part.
            Action::Write { .. } | Action::Discard | Action::WriteZeroes => shared.dirty.bump(),
            Action::Read { bufs, slot } => slot.fill(bufs),
        }
        if result.is_err() {
            shared.stats.error();
        }
        drop(pending);
        completer.complete(result);
    }
}

/// A request that waits to be claimed.
pub(super) struct Job {
    /// None once claimed.
    work: Mutex<Option<Work>>,
    pub(super) shared: Arc<Shared>,
}

impl Job {
    pub(super) fn new(work: Work, shared: &Arc<Shared>) -> Arc<Job> {
        let job = Arc::new(Job { work: Mutex::new(Rank::FileJob, None), shared: shared.clone() });
        work.set_driver(job.clone());
        *job.work.lock() = Some(work);
        job
    }

    pub(super) fn is_claimed(&self) -> bool {
        self.work.lock().is_none()
    }

    /// Takes the work; None if another thread has it.
    pub(super) fn claim(&self) -> Option<Work> {
        self.work.lock().take()
    }

    /// Does the work on this thread, unless it is claimed.
    pub(super) fn run(&self) {
        if let Some(work) = self.claim() {
            work.run(&self.shared);
        }
    }

    /// Takes the work if it suits the ring.
    pub(super) fn claim_for_ring(&self) -> Option<Work> {
        self.shared.ring.as_ref()?;
        let mut work = self.work.lock();
        if work.as_ref()?.suits_ring(&self.shared.file) { work.take() } else { None }
    }
}

impl Driver for Job {
    fn drive(&self, _: &Arc<TicketCore>) {
        self.run();
    }

    fn start(&self, _: &Arc<TicketCore>) {
        // The queue needs an owned handle, which a driver has only through its work.
        if let Some(work) = self.claim() {
            let job = Job::new(work, &self.shared);
            self.shared.dispatch(vec![job], Class::Sync);
        }
    }
}

impl Shared {
    /// Starts jobs without a waiter: in the ring if they suit it, else in the helpers.
    pub(super) fn dispatch(self: &Arc<Self>, jobs: Vec<Arc<Job>>, class: Class) {
        let mut for_ring = Vec::new();
        for job in jobs {
            match job.claim_for_ring() {
                Some(work) => for_ring.push(work),
                None if job.is_claimed() => {}
                None => self.helpers.push_job(self, job, class),
            }
        }
        if !for_ring.is_empty() {
            Ring::submit(self, for_ring);
        }
    }

    /// Reaps completions for their waiters, for at most `timeout`. `false` if there is a leader, or
    /// nothing is in the ring.
    pub(super) fn reap_for_all(&self, timeout: Duration) -> bool {
        self.ring.as_ref().is_some_and(|ring| ring.reap_for_all(self, timeout))
    }

    /// Releases the lock of the image. Called when the device is dropped and nothing is pending.
    pub(super) fn release(&self) {
        if let Some(ring) = &self.ring {
            ring.release();
        }
        self.file.unlock();
    }

    /// Has a helper run the flush that `ticket` waits for.
    pub(super) fn start_flush(self: &Arc<Self>, ticket: Ticket) {
        self.helpers.push_flush(self, ticket);
    }
}
