//! Tickets: handles for the results of submitted requests.
//!
//! Owns the delivery of a result from the backend ([`Completer`]) to any number of waiters
//! ([`Ticket`]). It has no thread: a waiting thread first drives the backend ([`Driver::drive`]),
//! so that a single writer does its own I/O without a context switch.
//!
//! Invariants:
//! - each ticket completes exactly once; a [`Completer`] that is dropped completes it with
//!   [`IoErrorKind::Abandoned`];
//! - callbacks run once, on the completing thread, outside of all locks of this module;
//! - a failure that was never read (all clones dropped) is reported to the [`ErrorSink`].

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use crate::buf::AlignedBuf;
use crate::error::{IoError, IoErrorKind, IoOp};
use crate::lock::{Condvar, Mutex, Rank};

/// The result of a request that returns no data.
pub type IoResult = Result<(), IoError>;

/// The backend's side of waiting. One driver may serve one ticket or many.
pub trait Driver: Send + Sync {
    /// Called by a thread that waits for `ticket`. Does the I/O, or reaps completions for all, and
    /// returns when the ticket is done or nothing is left but to sleep; it is called again after
    /// [`TicketCore::nudge`].
    fn drive(&self, ticket: &Arc<TicketCore>);

    /// Starts the request now, without a waiter.
    fn start(&self, ticket: &Arc<TicketCore>);

    /// A thread depends on this request: treat it as [`crate::Class::Sync`] from now on.
    fn promote(&self, ticket: &Arc<TicketCore>) {
        self.start(ticket);
    }

    /// Whether the request ends only when a thread waits for it, even if it was started: for devices
    /// whose record must not depend on time.
    fn needs_waiter(&self) -> bool {
        false
    }
}

/// Receives failures whose tickets were all dropped unread.
pub trait ErrorSink: Send + Sync {
    /// A request failed with `error` and its result was never read.
    fn unseen_error(&self, error: &IoError);
}

type Callback = Box<dyn FnOnce(&IoResult) + Send>;

/// The state shared by the clones of a ticket; drivers see it, callers use [`Ticket`].
pub struct TicketCore {
    /// Set once, under `waiting`.
    result: OnceLock<IoResult>,
    /// Whether the result was read.
    seen: AtomicBool,
    sink: Option<Arc<dyn ErrorSink>>,
    waiting: Mutex<Waiting>,
    wake: Condvar,
}

/// Guarded by `TicketCore::waiting`.
#[derive(Default)]
struct Waiting {
    driver: Option<Arc<dyn Driver>>,
    callbacks: Vec<Callback>,
    sleeper_count: u32,
    nudged: bool,
}

impl TicketCore {
    /// Whether the result is there.
    pub fn is_done(&self) -> bool {
        self.result.get().is_some()
    }

    /// Wakes one thread that sleeps in `wait`, so that it calls [`Driver::drive`] again.
    pub fn nudge(&self) {
        let mut waiting = self.waiting.lock();
        waiting.nudged = true;
        if waiting.sleeper_count > 0 {
            self.wake.notify_one();
        }
    }

    fn complete(&self, result: IoResult) {
        let mut waiting = self.waiting.lock();
        if self.result.set(result).is_err() {
            return;
        }
        let driver = waiting.driver.take();
        let callbacks = std::mem::take(&mut waiting.callbacks);
        if waiting.sleeper_count > 0 {
            self.wake.notify_all();
        }
        drop(waiting);
        drop(driver);
        if let (false, Some(result)) = (callbacks.is_empty(), self.result.get()) {
            self.seen.store(true, Ordering::Relaxed);
            callbacks.into_iter().for_each(|callback| callback(result));
        }
    }

    fn seen_result(&self) -> Option<IoResult> {
        let result = self.result.get()?;
        if result.is_err() {
            self.seen.store(true, Ordering::Relaxed);
        }
        Some(result.clone())
    }

    fn driver(&self) -> Option<Arc<dyn Driver>> {
        self.waiting.lock().driver.clone()
    }
}

impl Drop for TicketCore {
    fn drop(&mut self) {
        if let (Some(Err(error)), Some(sink), false) =
            (self.result.get(), &self.sink, *self.seen.get_mut())
        {
            sink.unseen_error(error);
        }
    }
}

/// A submitted request. Dropping it does not cancel anything.
#[derive(Clone)]
pub struct Ticket(Arc<TicketCore>);

impl Ticket {
    /// A ticket that is done already.
    pub fn ready(result: IoResult) -> Ticket {
        let (ticket, completer) = Ticket::pending(None);
        completer.complete(result);
        ticket
    }

    /// A pending ticket and the means to complete it; for implementers of [`crate::Device`].
    pub fn pending(sink: Option<Arc<dyn ErrorSink>>) -> (Ticket, Completer) {
        let core = Arc::new(TicketCore {
            result: OnceLock::new(),
            seen: AtomicBool::new(false),
            sink,
            waiting: Mutex::new(Rank::Ticket, Waiting::default()),
            wake: Condvar::new(),
        });
        (Ticket(core.clone()), Completer { core: Some(core) })
    }

    /// The ticket of a core, for drivers that need to hand it on.
    pub fn from_core(core: Arc<TicketCore>) -> Ticket {
        Ticket(core)
    }

    /// Whether it is the ticket of `core`.
    pub(crate) fn is_of(&self, core: &Arc<TicketCore>) -> bool {
        Arc::ptr_eq(&self.0, core)
    }

    /// Waits for the result; this thread drives the backend meanwhile.
    pub fn wait(&self) -> IoResult {
        loop {
            self.finish();
            if let Some(result) = self.0.seen_result() {
                return result;
            }
        }
    }

    /// As `wait`, for helpers of backends: the result does not count as seen.
    pub(crate) fn finish(&self) {
        while !self.is_done() {
            if let Some(driver) = self.0.driver() {
                driver.drive(&self.0);
            }
            let mut waiting = self.0.waiting.lock();
            waiting.sleeper_count += 1;
            while !self.0.is_done() && !waiting.nudged {
                self.0.wake.wait(&mut waiting);
            }
            waiting.sleeper_count -= 1;
            waiting.nudged = false;
        }
    }

    /// The result, if the request is done.
    pub fn result(&self) -> Option<IoResult> {
        self.0.seen_result()
    }

    /// Whether the request is done.
    pub fn is_done(&self) -> bool {
        self.0.is_done()
    }

    /// Dispatches the request now, for callers that will wait later or never: a request of class
    /// [`crate::Class::Sync`] may otherwise stay with the backend for some milliseconds because its
    /// submitter is expected to wait at once.
    pub fn start(&self) {
        if let Some(driver) = self.0.driver() {
            driver.start(&self.0);
        }
    }

    /// Tells the backend that a thread now depends on this request: it is treated as
    /// [`crate::Class::Sync`] and dispatched ahead of its former class. Waiting does not imply it.
    pub fn promote(&self) {
        if let Some(driver) = self.0.driver() {
            driver.promote(&self.0);
        }
    }

    /// See [`Driver::needs_waiter`].
    pub(crate) fn needs_waiter(&self) -> bool {
        self.0.driver().is_some_and(|driver| driver.needs_waiter())
    }

    /// Calls `callback` with the result: on the completing thread, or here when the request is
    /// done. It must not block, nor wait for another ticket. The request is started.
    pub fn on_complete(&self, callback: impl FnOnce(&IoResult) + Send + 'static) {
        self.watch(callback);
        self.start();
    }

    /// As [`Ticket::on_complete`], but without starting the request: for wrappers whose own ticket
    /// has its waiter drive this one.
    pub fn watch(&self, callback: impl FnOnce(&IoResult) + Send + 'static) {
        let mut waiting = self.0.waiting.lock();
        let Some(result) = self.0.result.get() else {
            waiting.callbacks.push(Box::new(callback));
            return;
        };
        drop(waiting);
        self.0.seen.store(true, Ordering::Relaxed);
        callback(result);
    }

    /// Waits for all of `tickets`; the first error wins. All are started before the first wait, so
    /// that they run in parallel.
    pub fn wait_all(tickets: &[Ticket]) -> IoResult {
        if tickets.len() > 1 {
            tickets.iter().for_each(Ticket::start);
        }
        let mut first = Ok(());
        for ticket in tickets {
            let result = ticket.wait();
            first = first.and(result);
        }
        first
    }
}

impl fmt::Debug for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.result.get() {
            Some(result) => write!(f, "Ticket({result:?})"),
            None => f.write_str("Ticket(pending)"),
        }
    }
}

/// Completes one ticket. Dropping it unused completes the ticket as abandoned.
pub struct Completer {
    /// None after completion.
    core: Option<Arc<TicketCore>>,
}

impl Completer {
    /// Sets the driver that waiting threads call.
    pub fn set_driver(&self, driver: Arc<dyn Driver>) {
        if let Some(core) = &self.core {
            core.waiting.lock().driver = Some(driver);
        }
    }

    /// The state of the ticket, to compare with what [`Driver::drive`] is given.
    pub fn core(&self) -> Option<&Arc<TicketCore>> {
        self.core.as_ref()
    }

    /// Hands over the result and wakes all waiters.
    pub fn complete(mut self, result: IoResult) {
        if let Some(core) = self.core.take() {
            core.complete(result);
        }
    }
}

impl Drop for Completer {
    fn drop(&mut self) {
        if let Some(core) = self.core.take() {
            core.complete(Err(IoError::new(IoErrorKind::Abandoned, IoOp::Write, 0, 0)));
        }
    }
}

/// The buffers of a read, for the ticket's owner.
#[derive(Clone, Debug)]
pub struct ReadSlot(Arc<Mutex<Option<Vec<AlignedBuf>>>>);

impl Default for ReadSlot {
    fn default() -> ReadSlot {
        ReadSlot(Arc::new(Mutex::new(Rank::ReadSlot, None)))
    }
}

impl ReadSlot {
    /// Puts the buffers there, before the ticket completes.
    pub fn fill(&self, bufs: Vec<AlignedBuf>) {
        *self.0.lock() = Some(bufs);
    }

    /// The buffers, if they are there.
    pub fn take(&self) -> Option<Vec<AlignedBuf>> {
        self.0.lock().take()
    }
}

/// A submitted read. Dropping it does not cancel anything; the buffers live until it is done.
#[derive(Debug)]
pub struct ReadTicket {
    ticket: Ticket,
    slot: ReadSlot,
}

impl ReadTicket {
    /// A ticket whose buffers the backend puts into `slot` before it completes `ticket`.
    pub fn new(ticket: Ticket, slot: ReadSlot) -> Self {
        ReadTicket { ticket, slot }
    }

    /// A read that is done already.
    pub fn ready(result: Result<Vec<AlignedBuf>, IoError>) -> Self {
        let (result, bufs) = match result {
            Ok(bufs) => (Ok(()), Some(bufs)),
            Err(error) => (Err(error), None),
        };
        ReadTicket {
            ticket: Ticket::ready(result),
            slot: ReadSlot(Arc::new(Mutex::new(Rank::ReadSlot, bufs))),
        }
    }

    /// Waits for the data. The buffers come back in order and full.
    pub fn wait(self) -> Result<Vec<AlignedBuf>, IoError> {
        self.ticket.wait()?;
        Ok(self.slot.take().unwrap_or_default())
    }

    /// The ticket, and the slot that holds the data once it is done; for wrappers.
    pub(crate) fn into_parts(self) -> (Ticket, ReadSlot) {
        (self.ticket, self.slot)
    }

    /// The ticket inside, to poll, promote, start, or watch.
    pub fn ticket(&self) -> &Ticket {
        &self.ticket
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    #[derive(Default)]
    struct CountingSink(AtomicUsize);
    impl ErrorSink for CountingSink {
        fn unseen_error(&self, _: &IoError) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn failure() -> IoResult {
        Err(IoError::os(libc::EIO, IoOp::Write, 0, 512))
    }

    #[test]
    fn a_ticket_wakes_all_waiters_and_runs_callbacks_once() {
        let (ticket, completer) = Ticket::pending(None);
        let calls = Arc::new(AtomicUsize::new(0));
        let waiters: Vec<_> = (0..4)
            .map(|_| {
                let ticket = ticket.clone();
                std::thread::spawn(move || ticket.wait())
            })
            .collect();
        let counter = calls.clone();
        ticket.on_complete(move |_| {
            counter.fetch_add(1, Ordering::SeqCst);
        });
        completer.complete(Ok(()));
        waiters.into_iter().for_each(|waiter| waiter.join().unwrap().unwrap());
        let counter = calls.clone();
        ticket.on_complete(move |_| {
            counter.fetch_add(1, Ordering::SeqCst);
        });
        assert_eq!(calls.load(Ordering::SeqCst), 2);
    }

    #[test]
    fn a_dropped_completer_abandons() {
        let (ticket, completer) = Ticket::pending(None);
        drop(completer);
        assert_eq!(ticket.wait().unwrap_err().kind, IoErrorKind::Abandoned);
    }

    #[test]
    fn only_unseen_errors_reach_the_sink() {
        let sink = Arc::new(CountingSink::default());
        let (ticket, completer) = Ticket::pending(Some(sink.clone()));
        completer.complete(failure());
        assert!(ticket.wait().is_err());
        drop(ticket);
        assert_eq!(sink.0.load(Ordering::SeqCst), 0);
        let (ticket, completer) = Ticket::pending(Some(sink.clone()));
        drop(ticket);
        completer.complete(failure());
        assert_eq!(sink.0.load(Ordering::SeqCst), 1);
        let (ticket, completer) = Ticket::pending(Some(sink.clone()));
        completer.complete(Ok(()));
        drop(ticket);
        assert_eq!(sink.0.load(Ordering::SeqCst), 1);
    }
}
