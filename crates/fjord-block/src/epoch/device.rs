//! The scheduler as a device. Owns [`EpochDevice`]: the queue under a lock, the data and tickets
//! of its requests, and the hand-over to the inner device.
//!
//! It has no thread: threads that submit, or complete a request of the inner device, dispatch. A
//! waiting thread drives the inner requests that its own request waits for.
//!
//! Invariants:
//! - one thread at a time dispatches (`State::dispatching`), so that commands reach the inner
//!   device in queue order, and so that a completion inside a submission does not recurse;
//! - no call to the inner device, no completion and no callback happens under the lock;
//! - a ticket of the inner device is in `State::commands` before its completion is processed;
//! - a waiter drives only what has to end before its own request, so that it does not sleep in
//!   another one, such as a flush, when its own is done;
//! - a waiter that finds nothing to drive is in `State::sleepers`, and is woken after a dispatch or
//!   a completion. If its request waits for a place in the device's queue, all commands in flight
//!   have been started.

use std::collections::HashMap;
use std::fmt;
use std::fs::File;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::queue::EpochQueue;
use super::rules::DeviceTraits;
use super::stats::EpochStats;
use super::types::{Command, CommandId, Io, IoKind, Part, RequestId, Tuning};
use crate::buf::{AlignedBuf, Buf};
use crate::device::{Capabilities, Class, Device, Order, Request, bufs_len, check_range};
use crate::error::{IoError, IoErrorKind, IoOp, OpenError};
use crate::lock::{Mutex, MutexGuard, Rank};
use crate::snapshot::{SnapshotError, SnapshotOptions, SnapshotReport};
use crate::stats::DeviceStats;
use crate::ticket::{
    Completer, Driver, ErrorSink, IoResult, ReadSlot, ReadTicket, Ticket, TicketCore,
};

/// A device that keeps the order of its writes, above any device.
///
/// Requests of one batch are ordered as in the batch, and a flush also covers ordered writes
/// submitted before it that have not completed: `[D, JD barrier, JC barrier, flush]` can be
/// submitted at once, with one wait, for the flush.
pub struct EpochDevice {
    shared: Arc<Shared>,
}

struct Shared {
    inner: Arc<dyn Device>,
    capabilities: Capabilities,
    started: Instant,
    unseen: Arc<Unseen>,
    state: Mutex<State>,
}

/// Guarded by `Shared::state`.
struct State {
    queue: EpochQueue,
    requests: HashMap<RequestId, Held>,
    /// Requests in flight in the inner device.
    commands: HashMap<CommandId, InDevice>,
    /// Waiters with nothing to drive.
    sleepers: Vec<Arc<TicketCore>>,
    /// A thread is dispatching.
    dispatching: bool,
}

/// A command in flight in the inner device.
struct InDevice {
    ticket: Ticket,
    /// It was started, for the case that its owner waits late or never.
    started: bool,
    needs_waiter: bool,
}

/// A request without its result.
struct Held {
    data: Data,
    completer: Completer,
    /// Its owner will not wait soon.
    start: bool,
}

enum Data {
    Write(Vec<Buf>),
    /// Empty while the inner device has the buffers.
    Read(Vec<AlignedBuf>, ReadSlot),
    None,
}

/// A command in the form of the inner device.
enum Outgoing {
    Request(Request),
    Read { offset: u64, bufs: Vec<AlignedBuf>, class: Class, slot: ReadSlot },
}

/// A command in the inner device, with the destination of its data.
struct Sent {
    id: CommandId,
    ticket: Ticket,
    start: bool,
    slots: Option<(ReadSlot, ReadSlot)>,
}

/// Failures whose tickets were all dropped unseen.
struct Unseen(Mutex<Option<IoError>>);

impl ErrorSink for Unseen {
    fn unseen_error(&self, error: &IoError) {
        // A failed read does not affect order.
        if error.op != IoOp::Read {
            self.0.lock().get_or_insert_with(|| error.clone());
        }
    }
}

impl EpochDevice {
    /// A scheduler above `inner`, tuned for its queue depth.
    pub fn new(inner: Arc<dyn Device>) -> Self {
        let tuning = Tuning::for_depth(inner.capabilities().queue_depth.max(1));
        EpochDevice::with_tuning(inner, tuning)
    }

    /// A scheduler above `inner`.
    pub fn with_tuning(inner: Arc<dyn Device>, tuning: Tuning) -> Self {
        let traits = DeviceTraits::from(inner.capabilities());
        let capabilities = Capabilities { native_barrier: true, ..inner.capabilities().clone() };
        let state = State {
            queue: EpochQueue::new(traits, tuning),
            requests: HashMap::new(),
            commands: HashMap::new(),
            sleepers: Vec::new(),
            dispatching: false,
        };
        let shared = Shared {
            inner,
            capabilities,
            started: Instant::now(),
            unseen: Arc::new(Unseen(Mutex::new(Rank::EpochUnseen, None))),
            state: Mutex::new(Rank::EpochQueue, state),
        };
        EpochDevice { shared: Arc::new(shared) }
    }

    /// Statistics of the scheduler.
    pub fn epoch_stats(&self) -> EpochStats {
        self.shared.state.lock().queue.stats()
    }
}

impl fmt::Debug for EpochDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EpochDevice")
            .field("inner", &self.shared.inner)
            .field("stats", &self.epoch_stats())
            .finish_non_exhaustive()
    }
}

impl Shared {
    fn now_ns(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Queues requests in order; returns one ticket for each.
    fn submit(self: &Arc<Self>, requests: Vec<(Io, Data)>) -> Vec<Ticket> {
        let now_ns = self.now_ns();
        let mut refused = Vec::new();
        let mut tickets = Vec::with_capacity(requests.len());
        let mut state = self.state.lock();
        if let Some(error) = self.unseen.0.lock().take() {
            state.queue.fail(error);
        }
        for (io, data) in requests {
            let (ticket, completer) = Ticket::pending(Some(self.unseen.clone()));
            tickets.push(ticket);
            if let Err(error) = self.check(&io) {
                if io.kind.order() != Order::Orderless {
                    state.queue.fail(error.clone());
                }
                refused.push((completer, error));
                continue;
            }
            let id = state.queue.push(io, now_ns);
            completer.set_driver(Arc::new(Lend { shared: self.clone(), id }));
            state.requests.insert(id, Held { data, completer, start: io.class != Class::Sync });
        }
        self.advance(state, false);
        for (completer, error) in refused {
            completer.complete(Err(error));
        }
        tickets
    }

    /// Refuses requests that the device would refuse: a bad request must not fail those it is
    /// merged with.
    fn check(&self, io: &Io) -> IoResult {
        if io.kind.changes() && self.capabilities.read_only {
            return Err(IoError::new(IoErrorKind::ReadOnly, io.kind.op(), io.offset, io.len));
        }
        check_range(io.kind.op(), io.offset, io.len, self.inner.size_bytes())
    }

    /// Processes the completion of a command.
    fn completed(self: &Arc<Self>, id: CommandId, result: &IoResult) {
        let mut state = self.state.lock();
        let in_device = state.commands.remove(&id);
        state.queue.completed(id, result.clone(), self.now_ns());
        self.advance(state, true);
        drop(in_device);
    }

    /// Completes finished requests and dispatches commands until there are none. `moved`: wake the
    /// sleepers.
    fn advance(self: &Arc<Self>, mut state: MutexGuard<'_, State>, mut moved: bool) {
        loop {
            let done = state.take_done();
            let sleepers = match moved {
                true => std::mem::take(&mut state.sleepers),
                false => Vec::new(),
            };
            moved = false;
            if !done.is_empty() || !sleepers.is_empty() {
                MutexGuard::unlocked(&mut state, || {
                    for (held, result) in done {
                        // Waiters may want to change the buffers in place.
                        drop(held.data);
                        held.completer.complete(result);
                    }
                    sleepers.iter().for_each(|sleeper| sleeper.nudge());
                    drop(sleepers);
                });
                continue;
            }
            if state.dispatching {
                return;
            }
            let batch = state.take_batch(self.now_ns());
            if batch.is_empty() {
                return;
            }
            state.dispatching = true;
            let sent = MutexGuard::unlocked(&mut state, || self.hand_out(batch));
            for sent in &sent {
                let (ticket, started) = (sent.ticket.clone(), sent.start);
                let needs_waiter = ticket.needs_waiter();
                state.commands.insert(sent.id, InDevice { ticket, started, needs_waiter });
            }
            MutexGuard::unlocked(&mut state, || {
                sent.into_iter().for_each(|sent| self.watch(sent));
            });
            state.dispatching = false;
            moved = true;
        }
    }

    /// Submits to the inner device, one by one: the requests of one batch have no order there.
    fn hand_out(&self, batch: Vec<(CommandId, Outgoing, bool)>) -> Vec<Sent> {
        let hand_out = |(id, outgoing, start)| match outgoing {
            Outgoing::Request(request) => {
                let (op, offset, len) = request.extent();
                let lost =
                    || Ticket::ready(Err(IoError::new(IoErrorKind::Abandoned, op, offset, len)));
                let ticket = self.inner.submit(vec![request]).pop().unwrap_or_else(lost);
                Sent { id, ticket, start, slots: None }
            }
            Outgoing::Read { offset, bufs, class, slot } => {
                let read = self.inner.submit_read(offset, bufs, class);
                let (ticket, filled) = read.into_parts();
                Sent { id, ticket, start, slots: Some((filled, slot)) }
            }
        };
        batch.into_iter().map(hand_out).collect()
    }

    fn watch(self: &Arc<Self>, sent: Sent) {
        let Sent { id, ticket, start, slots } = sent;
        let shared = self.clone();
        ticket.watch(move |result| {
            if let Some((filled, slot)) = slots
                && let Some(bufs) = filled.take()
            {
                slot.fill(bufs);
            }
            shared.completed(id, result);
        });
        if start {
            ticket.start();
        }
    }
}

impl State {
    /// Undelivered results, with their requests.
    fn take_done(&mut self) -> Vec<(Held, IoResult)> {
        let mut done = Vec::new();
        while let Some((id, result)) = self.queue.pop_done() {
            done.extend(self.requests.remove(&id).map(|held| (held, result)));
        }
        done
    }

    /// All commands that may be dispatched now, and whether to start each.
    fn take_batch(&mut self, now_ns: u64) -> Vec<(CommandId, Outgoing, bool)> {
        let mut batch = Vec::new();
        while let Some(command) = self.queue.next_dispatch(now_ns) {
            let start = command.class != Class::Sync || self.wants_start(&command.parts);
            batch.push((command.id, self.outgoing(&command), start));
        }
        if self.queue.stats().queued_count > 0 {
            // Other requests depend on these: do not leave them to a waiter that may come late.
            batch.iter_mut().for_each(|(.., start)| *start = true);
        }
        batch
    }

    fn wants_start(&self, parts: &[Part]) -> bool {
        parts.iter().any(|part| self.requests.get(&part.request).is_some_and(|held| held.start))
    }

    fn outgoing(&mut self, command: &Command) -> Outgoing {
        let (offset, len, class) = (command.offset, command.len, command.class);
        let request = match command.kind {
            IoKind::Flush | IoKind::FlushCompleted => Request::Flush { class },
            IoKind::Discard => Request::Discard { offset, len },
            IoKind::WriteZeroes => Request::WriteZeroes { offset, len },
            IoKind::Write { order, fua } => {
                let bufs = command.parts.iter().flat_map(|part| self.piece(part)).collect();
                Request::Write { offset, bufs, order, fua, class }
            }
            IoKind::Read => {
                let held = command.parts.first().and_then(|p| self.requests.get_mut(&p.request));
                let (bufs, slot) = match held.map(|held| &mut held.data) {
                    Some(Data::Read(bufs, slot)) => (std::mem::take(bufs), slot.clone()),
                    _ => Default::default(),
                };
                return Outgoing::Read { offset, bufs, class, slot };
            }
        };
        Outgoing::Request(request)
    }

    /// The data of a piece. A buffer that crosses its border is copied.
    fn piece(&self, part: &Part) -> Vec<Buf> {
        let Some(Held { data: Data::Write(bufs), .. }) = self.requests.get(&part.request) else {
            return Vec::new();
        };
        let (from, to) = (part.skip, part.skip + part.len);
        let mut at = 0;
        let mut piece = Vec::new();
        for buf in bufs {
            let (start, end) = (at, at + buf.len() as u64);
            at = end;
            let (low, high) = (start.max(from), end.min(to));
            if low >= high {
                continue;
            }
            piece.push(match (low, high) == (start, end) {
                true => buf.clone(),
                false => Buf::from_slice(&buf[(low - start) as usize..(high - start) as usize]),
            });
        }
        piece
    }

    /// The ticket of the inner device that has to end before a request can.
    fn inner_ticket(&self, id: RequestId) -> Option<Ticket> {
        let command = self.queue.waits_for(id)?;
        self.commands.get(&command).map(|in_device| in_device.ticket.clone())
    }

    /// The oldest command that nothing but a waiter ends ([`Driver::needs_waiter`]), whosever it is.
    fn needs_waiter(&self) -> Option<Ticket> {
        let needs_one =
            |in_device: &InDevice| in_device.needs_waiter && !in_device.ticket.is_done();
        let commands = self.commands.iter().filter(|(_, in_device)| needs_one(in_device));
        commands.min_by_key(|(id, _)| **id).map(|(_, in_device)| in_device.ticket.clone())
    }

    /// The tickets of the inner device to start so that a request goes on: the one that it waits for,
    /// else all that may have no waiter yet, since one of them has to leave the device's queue. None
    /// while a thread dispatches, which may send the request.
    fn take_unstarted(&mut self, id: RequestId) -> Vec<Ticket> {
        if let Some(inner) = self.inner_ticket(id) {
            return vec![inner];
        }
        if self.dispatching || !self.requests.contains_key(&id) {
            return Vec::new();
        }
        let unstarted = self.commands.values_mut().filter(|in_device| !in_device.started);
        let start = |in_device: &mut InDevice| {
            in_device.started = true;
            in_device.ticket.clone()
        };
        unstarted.map(start).collect()
    }
}

/// Has the waiter of a request drive what that request waits for.
struct Lend {
    shared: Arc<Shared>,
    id: RequestId,
}

impl Driver for Lend {
    fn drive(&self, ticket: &Arc<TicketCore>) {
        while !ticket.is_done() {
            let mut state = self.shared.state.lock();
            let inner = state.inner_ticket(self.id).or_else(|| state.needs_waiter());
            if let Some(inner) = inner.filter(|inner| !inner.is_done()) {
                drop(state);
                inner.finish();
                continue;
            }
            // If the inner ticket is done, another thread is processing its completion.
            state.sleepers.push(ticket.clone());
            let others = state.take_unstarted(self.id);
            drop(state);
            others.iter().for_each(Ticket::start);
            return;
        }
    }

    fn start(&self, _: &Arc<TicketCore>) {
        let mut state = self.shared.state.lock();
        if let Some(held) = state.requests.get_mut(&self.id) {
            held.start = true;
        }
        let inner = state.take_unstarted(self.id);
        drop(state);
        inner.iter().for_each(Ticket::start);
    }

    fn promote(&self, _: &Arc<TicketCore>) {
        let mut state = self.shared.state.lock();
        if let Some(held) = state.requests.get_mut(&self.id) {
            held.start = true;
        }
        state.queue.promote(self.id, self.shared.now_ns());
        self.shared.advance(state, false);
        let inner = self.shared.state.lock().take_unstarted(self.id);
        inner.iter().for_each(Ticket::promote);
    }
}

impl Device for EpochDevice {
    fn capabilities(&self) -> &Capabilities {
        &self.shared.capabilities
    }

    fn size_bytes(&self) -> u64 {
        self.shared.inner.size_bytes()
    }

    fn set_size(&self, size_bytes: u64) -> IoResult {
        self.shared.inner.set_size(size_bytes)
    }

    fn ensure_size(&self, size_bytes: u64) -> Result<u64, IoError> {
        self.shared.inner.ensure_size(size_bytes)
    }

    fn ensure_room(&self, offset: u64, len: u64) -> IoResult {
        self.shared.inner.ensure_room(offset, len)
    }

    fn check(&self) -> IoResult {
        self.shared.inner.check()
    }

    fn submit(&self, batch: Vec<Request>) -> Vec<Ticket> {
        let with_data = |request| {
            let io = Io::from(&request);
            match request {
                Request::Write { bufs, .. } => (io, Data::Write(bufs)),
                _ => (io, Data::None),
            }
        };
        self.shared.submit(batch.into_iter().map(with_data).collect())
    }

    fn flush_completed(&self) -> Ticket {
        let io = Io::flush_completed(Class::Sync);
        let lost = || IoError::new(IoErrorKind::Abandoned, IoOp::Flush, 0, 0);
        let ticket = self.shared.submit(vec![(io, Data::None)]).pop();
        ticket.unwrap_or_else(|| Ticket::ready(Err(lost())))
    }

    fn submit_read(&self, offset: u64, bufs: Vec<AlignedBuf>, class: Class) -> ReadTicket {
        let io = Io::read(offset, bufs_len(&bufs), class);
        let slot = ReadSlot::default();
        let ticket = self.shared.submit(vec![(io, Data::Read(bufs, slot.clone()))]).pop();
        let lost = || IoError::new(IoErrorKind::Abandoned, IoOp::Read, offset, io.len);
        ReadTicket::new(ticket.unwrap_or_else(|| Ticket::ready(Err(lost()))), slot)
    }

    fn keeps_order(&self) -> bool {
        true
    }

    fn stats(&self) -> DeviceStats {
        self.shared.inner.stats()
    }

    fn object_bytes(&self) -> Option<u64> {
        self.shared.inner.object_bytes()
    }

    fn silence(&self) -> Duration {
        self.shared.inner.silence()
    }

    fn give_up(&self) {
        self.shared.inner.give_up();
    }

    fn release(&self) {
        self.shared.inner.release();
    }

    fn claim(&self, alone: bool) -> Result<(), OpenError> {
        self.shared.inner.claim(alone)
    }

    fn snapshot_to(
        &self,
        out: &File,
        options: &SnapshotOptions<'_>,
    ) -> Result<SnapshotReport, SnapshotError> {
        self.shared.inner.snapshot_to(out, options)
    }
}
