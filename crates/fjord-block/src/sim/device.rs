//! The model in real time: a [`Device`] for the engine and its threads.
//!
//! Owns the tickets of the commands under way and a thread that completes them when the modelled
//! time has come: it sleeps until shortly before, then spins, so that completions are late by some
//! 20 to 50 µs on an idle machine. The model itself is never late: its times are computed.
//!
//! Invariants: virtual time is the real time since the device was made and is the same for all
//! threads (both under the lock of `state`); tickets complete outside of that lock.

use std::collections::HashMap;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::core::{CommandId, Completion, SimCore};
use super::cut::{Chooser, CutScope, CutState};
use super::profile::Profile;
use super::stats::{SimStats, SimTrace};
use crate::buf::AlignedBuf;
use crate::device::{Capabilities, Class, Device, Request, bufs_len};
use crate::error::{IoError, IoErrorKind, IoOp};
use crate::lock::{Condvar, Mutex, Rank};
use crate::mem::MemImage;
use crate::stats::{DeviceStats, StatCounters};
use crate::sticky::Sticky;
use crate::ticket::{Completer, IoResult, ReadSlot, ReadTicket, Ticket};

/// How long before an event the timer thread stops sleeping.
const SPIN: Duration = Duration::from_micros(60);

/// A modelled device in real time. Contents live in memory.
#[derive(Debug)]
pub struct SimDevice {
    shared: Arc<Shared>,
    capabilities: Capabilities,
    timer: Option<JoinHandle<()>>,
}

struct Shared {
    started: Instant,
    size_bytes: u64,
    state: Mutex<State>,
    /// Signalled when an event was added before the one that the timer waits for.
    wake: Condvar,
    sticky: Arc<Sticky>,
    counters: StatCounters,
}

/// Guarded by `Shared::state`.
struct State {
    core: SimCore,
    pending: HashMap<CommandId, Pending>,
    /// What the timer thread waits for; None while it waits for anything.
    timer_until_ns: Option<u64>,
    stopping: bool,
}

enum Pending {
    Write(Completer),
    Flush(Completer),
    Read(Completer, ReadSlot, Vec<AlignedBuf>),
}

/// A ticket whose time has come, to be completed outside of the lock.
type Due = (Pending, Completion);

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SimDevice").field("size_bytes", &self.size_bytes).finish_non_exhaustive()
    }
}

impl Shared {
    fn now_ns(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Advances the model to the present. Returns the tickets to complete.
    fn catch_up(&self, state: &mut State) -> Vec<Due> {
        let completions = state.core.advance_to(self.now_ns());
        let pending = &mut state.pending;
        completions.into_iter().filter_map(|c| Some((pending.remove(&c.id)?, c))).collect()
    }

    fn complete(&self, due: Vec<Due>) {
        for (pending, completion) in due {
            if completion.result.is_err() {
                self.counters.error();
            }
            match pending {
                Pending::Write(completer) => completer.complete(completion.result),
                Pending::Flush(completer) => {
                    if let Err(error) = &completion.result {
                        self.sticky.set(error);
                    }
                    completer.complete(completion.result);
                }
                Pending::Read(completer, slot, mut bufs) => {
                    let data = completion.data.unwrap_or_default();
                    let mut rest = &data[..];
                    for buf in &mut bufs {
                        let (head, tail) = rest.split_at(buf.len().min(rest.len()));
                        buf[..head.len()].copy_from_slice(head);
                        rest = tail;
                    }
                    if completion.result.is_ok() {
                        slot.fill(bufs);
                    }
                    completer.complete(completion.result);
                }
            }
        }
    }

    /// Submits under the lock, completes what is due outside of it.
    fn submit(&self, add: impl FnOnce(&mut State)) {
        let mut state = self.state.lock();
        let mut due = self.catch_up(&mut state);
        add(&mut state);
        // Requests that fail at once.
        due.extend(self.catch_up(&mut state));
        let next_ns = state.core.next_event_ns();
        if next_ns.is_some_and(|next| state.timer_until_ns.is_none_or(|until| next < until)) {
            self.wake.notify_one();
        }
        drop(state);
        self.complete(due);
    }

    /// The timer thread.
    fn run_timer(&self) {
        let mut state = self.state.lock();
        while !state.stopping {
            let due = self.catch_up(&mut state);
            if !due.is_empty() {
                drop(state);
                self.complete(due);
                state = self.state.lock();
                continue;
            }
            let next_ns = state.core.next_event_ns();
            state.timer_until_ns = next_ns;
            match next_ns {
                None => self.wake.wait(&mut state),
                Some(next_ns) => {
                    let wait = Duration::from_nanos(next_ns.saturating_sub(self.now_ns()));
                    if wait > SPIN {
                        self.wake.wait_for(&mut state, wait - SPIN);
                    } else {
                        drop(state);
                        while self.now_ns() < next_ns {
                            std::thread::yield_now();
                        }
                        state = self.state.lock();
                    }
                }
            }
        }
    }
}

impl SimDevice {
    /// An empty device of `size_bytes`.
    pub fn new(profile: &Profile, size_bytes: u64) -> Self {
        SimDevice::with_contents(profile, MemImage::new(size_bytes))
    }

    /// A device that holds `contents`, all durable.
    pub fn with_contents(profile: &Profile, contents: MemImage) -> Self {
        let shared = Arc::new(Shared {
            started: Instant::now(),
            size_bytes: contents.size_bytes(),
            state: Mutex::new(
                Rank::SimDevice,
                State {
                    core: SimCore::with_contents(profile, contents),
                    pending: HashMap::new(),
                    timer_until_ns: None,
                    stopping: false,
                },
            ),
            wake: Condvar::new(),
            sticky: Arc::default(),
            counters: StatCounters::default(),
        });
        let for_thread = Arc::clone(&shared);
        let timer = std::thread::Builder::new()
            .name("fjord-sim".into())
            .spawn(move || for_thread.run_timer())
            .inspect_err(|error| tracing::error!(%error, "no thread for the modelled device"))
            .ok();
        SimDevice { shared, capabilities: profile.capabilities(), timer }
    }

    /// Cuts the power now and returns one of the images that this may leave. Requests in flight and
    /// all later ones fail with EIO.
    pub fn cut_power(&self, scope: CutScope, chooser: &mut dyn Chooser) -> MemImage {
        self.cut(scope).image(chooser)
    }

    /// As [`SimDevice::cut_power`], for callers that want more than one of the images.
    pub fn cut(&self, scope: CutScope) -> CutState {
        let mut state = self.shared.state.lock();
        let mut due = self.shared.catch_up(&mut state);
        let cut = state.core.cut_state(scope);
        state.core.power_off();
        due.extend(self.shared.catch_up(&mut state));
        drop(state);
        self.shared.complete(due);
        cut
    }

    /// The state from which the images come that a power cut now could leave; the device goes on.
    pub fn cut_state(&self, scope: CutScope) -> CutState {
        let mut state = self.shared.state.lock();
        let due = self.shared.catch_up(&mut state);
        let cut = state.core.cut_state(scope);
        drop(state);
        self.shared.complete(due);
        cut
    }

    /// Whether the power is on.
    pub fn is_powered(&self) -> bool {
        self.shared.state.lock().core.is_powered()
    }

    /// The contents as reads see them.
    pub fn contents(&self) -> MemImage {
        self.shared.state.lock().core.contents()
    }

    /// The constants of the device.
    pub fn profile(&self) -> Profile {
        self.shared.state.lock().core.profile().clone()
    }

    /// Statistics of the model: queue depth over time, transfers, program operations.
    pub fn sim_stats(&self) -> SimStats {
        let mut state = self.shared.state.lock();
        let due = self.shared.catch_up(&mut state);
        let stats = state.core.stats();
        drop(state);
        self.shared.complete(due);
        stats
    }

    /// Starts to record transfer order, persist order and queue depth.
    pub fn start_trace(&self) {
        self.shared.state.lock().core.start_trace();
    }

    /// Stops recording and gives the trace.
    pub fn take_trace(&self) -> SimTrace {
        self.shared.state.lock().core.take_trace()
    }

    /// Gives the trace so far and goes on with an empty one; None when nothing is recorded.
    pub fn next_trace(&self) -> Option<SimTrace> {
        let mut state = self.shared.state.lock();
        let due = self.shared.catch_up(&mut state);
        let trace = state.core.next_trace();
        drop(state);
        self.shared.complete(due);
        trace
    }

    fn count(&self, request: &Request) {
        let counters = &self.shared.counters;
        match request {
            Request::Write { bufs, fua, class, .. } => counters.write(*class, bufs_len(bufs), *fua),
            Request::Flush { class } => {
                counters.flush(*class);
                counters.flush_issued();
            }
            Request::Discard { len, .. } => counters.discard(*len),
            Request::WriteZeroes { len, .. } => counters.write_zeroes(*len),
        }
    }

    /// Requests that must fail: a flush after a failed one, any request without a timer.
    fn refusal(&self, op: IoOp, offset: u64, len: u64) -> IoResult {
        if self.timer.is_none() {
            return Err(IoError::new(IoErrorKind::Abandoned, op, offset, len));
        }
        if op == IoOp::Flush { self.shared.sticky.check() } else { Ok(()) }
    }
}

impl Device for SimDevice {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn size_bytes(&self) -> u64 {
        self.shared.size_bytes
    }

    fn submit(&self, batch: Vec<Request>) -> Vec<Ticket> {
        let mut tickets = Vec::with_capacity(batch.len());
        self.shared.submit(|state| {
            for request in batch {
                let (op, offset, len) = request.extent();
                self.count(&request);
                let (ticket, completer) = Ticket::pending(Some(self.shared.sticky.clone()));
                tickets.push(ticket);
                if let Err(error) = self.refusal(op, offset, len) {
                    // Nobody can watch a ticket that was not handed out: no callback runs here.
                    completer.complete(Err(error));
                    continue;
                }
                let id = state.core.submit(&request);
                let pending = match op {
                    IoOp::Flush => Pending::Flush(completer),
                    _ => Pending::Write(completer),
                };
                state.pending.insert(id, pending);
            }
        });
        tickets
    }

    fn submit_read(&self, offset: u64, bufs: Vec<AlignedBuf>, class: Class) -> ReadTicket {
        let len = bufs_len(&bufs);
        self.shared.counters.read(class, len);
        let (ticket, completer) = Ticket::pending(Some(self.shared.sticky.clone()));
        if let Err(error) = self.refusal(IoOp::Read, offset, len) {
            return ReadTicket::ready(Err(error));
        }
        let slot = ReadSlot::default();
        let filled = slot.clone();
        self.shared.submit(|state| {
            let id = state.core.submit_read(offset, len);
            state.pending.insert(id, Pending::Read(completer, filled, bufs));
        });
        ReadTicket::new(ticket, slot)
    }

    fn stats(&self) -> DeviceStats {
        self.shared.counters.snapshot()
    }
}

impl Drop for SimDevice {
    fn drop(&mut self) {
        self.shared.state.lock().stopping = true;
        self.shared.wake.notify_one();
        // A callback of a ticket may hold the last reference: then this is the timer itself, which
        // ends by itself.
        if let Some(timer) = self.timer.take()
            && timer.thread().id() != std::thread::current().id()
        {
            // A panic in a callback was reported when it happened.
            let _ = timer.join();
        }
        // Remaining waiters get an error.
        let pending = std::mem::take(&mut self.shared.state.lock().pending);
        drop(pending);
    }
}
