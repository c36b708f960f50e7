//! A device in memory whose answers a test holds back, and whose requests fail as the test asks.
//!
//! Owns [`GateDevice`]: a thread that runs requests one at a time, in the order of submission, except
//! those that are held back; the contents that a power cut may leave; and a record of all requests.
//!
//! Invariants:
//! - a flush makes durable the writes that had completed when it was submitted, nothing more;
//! - a failed request has no effect; once a flush has failed, every later flush fails;
//! - requests complete outside the lock.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use fjord_block::{
    AlignedBuf, Capabilities, Class, Completer, Device, DeviceExt, IoError, MemDevice, MemImage,
    Order, ReadTicket, Request, Ticket,
};

use crate::rng::Rng;

/// Time within which a request that must come has come.
const PATIENCE: Duration = Duration::from_secs(120);

/// What a device keeps in a power cut, and in which order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cache {
    /// Every completed write is durable.
    None,
    /// Writes that no flush covers may be lost, each by itself.
    Volatile,
    /// The same, but what survives is a prefix: the device keeps the order of barrier writes.
    NativeBarrier,
}

/// Which requests are held back.
type Hold = Box<dyn Fn(&Request) -> bool + Send>;

/// See the [module](self).
pub struct GateDevice {
    capabilities: Capabilities,
    shared: Arc<Shared>,
}

/// Shared with the thread.
struct Shared {
    cache: Cache,
    /// Contents as readers see them.
    current: MemDevice,
    state: Mutex<State>,
    /// Something was queued or released, or the device is dropped.
    moved: Condvar,
}

/// Guarded by `Shared::state`.
struct State {
    /// Contents that a power cut leaves in any case.
    durable: MemDevice,
    /// Completed changes that no flush has made durable, in the order of completion.
    cached: Vec<Change>,
    /// Changes that have completed.
    completed_count: u64,
    /// Requests that have run or failed.
    ran_count: u64,
    queue: VecDeque<Queued>,
    hold: Option<Hold>,
    /// Reads wait in the call that submits them.
    holds_reads: bool,
    /// Time that each flush takes.
    delay: Duration,
    fails: Fails,
    flush_has_failed: bool,
    records: Vec<Record>,
    is_closed: bool,
}

/// Which requests fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fails {
    Never,
    /// That of this number in the workload.
    Number(u64),
    /// The first write with this number or a later one.
    NextWrite(usize),
    Always,
}

struct Change {
    /// Number of changes that had completed before.
    number: u64,
    request: Request,
}

struct Queued {
    /// Index of its record.
    index: usize,
    request: Request,
    completer: Completer,
    /// Number of changes that had completed when it was submitted.
    completed_before: u64,
}

/// One request since [`GateDevice::start_workload`].
#[derive(Clone, Debug)]
pub struct Record {
    /// The request.
    pub request: Request,
    /// It ran, or failed, after so many others; `None` while it is in flight.
    pub ran_at: Option<u64>,
    /// It failed.
    pub failed: bool,
    /// No power cut undoes it from this moment on, counted as [`Record::ran_at`].
    pub durable_at: Option<u64>,
    /// Number of its change among the completed ones.
    completed: Option<u64>,
}

/// See [`GateDevice::release_on_drop`].
pub struct ReleaseOnDrop<'a>(&'a GateDevice);

impl Drop for ReleaseOnDrop<'_> {
    fn drop(&mut self) {
        self.0.release_all();
    }
}

impl GateDevice {
    /// A device with the contents of `image`.
    pub fn new(image: &MemImage, cache: Cache) -> GateDevice {
        let current = MemDevice::from_image(image);
        let capabilities = Capabilities {
            volatile_cache: cache != Cache::None,
            native_barrier: cache == Cache::NativeBarrier,
            queue_depth: 32,
            ..current.capabilities().clone()
        };
        let state = State {
            durable: MemDevice::from_image(image),
            cached: Vec::new(),
            completed_count: 0,
            ran_count: 0,
            queue: VecDeque::new(),
            hold: None,
            holds_reads: false,
            delay: Duration::ZERO,
            fails: Fails::Never,
            flush_has_failed: false,
            records: Vec::new(),
            is_closed: false,
        };
        let (state, moved) = (Mutex::new(state), Condvar::new());
        let shared = Arc::new(Shared { cache, current, state, moved });
        let runs = shared.clone();
        thread::spawn(move || runs.run());
        GateDevice { capabilities, shared }
    }

    /// Begins a workload: the record is emptied, the requests count from 0, and number `fails` fails.
    /// Nothing may be in flight.
    pub fn start_workload(&self, fails: Option<u64>, delay: Duration) {
        let mut state = self.shared.lock();
        (state.fails, state.delay) = (fails.map_or(Fails::Never, Fails::Number), delay);
        state.records.clear();
    }

    /// The next write that runs fails: one that is held back, say.
    pub fn fail_next_write(&self) {
        self.shared.lock().fails = Fails::NextWrite(0);
    }

    /// The next write that is submitted fails, whatever is under way.
    pub fn fail_next_submitted_write(&self) {
        let mut state = self.shared.lock();
        state.fails = Fails::NextWrite(state.records.len());
    }

    /// Every request fails that has not run, and every later one.
    pub fn fail_all(&self) {
        self.shared.lock().fails = Fails::Always;
    }

    /// Holds back the requests that `hold` selects, queued ones among them, until
    /// [`GateDevice::release_all`]. Those that it does not select run.
    pub fn hold(&self, hold: impl Fn(&Request) -> bool + Send + 'static) {
        self.shared.lock().hold = Some(Box::new(hold));
        self.shared.moved.notify_all();
    }

    /// Holds back every read, in the thread that submits it, until [`GateDevice::release_all`].
    pub fn hold_reads(&self) {
        self.shared.lock().holds_reads = true;
    }

    /// Lets all requests run. (Not `release`: of an `Arc` that is [`Device::release`].)
    pub fn release_all(&self) {
        let mut state = self.shared.lock();
        (state.hold, state.holds_reads) = (None, false);
        drop(state);
        self.shared.moved.notify_all();
    }

    /// Lets all requests run when the result is dropped: a check that fails ends the test, instead of
    /// leaving its threads with the device.
    pub fn release_on_drop(&self) -> ReleaseOnDrop<'_> {
        ReleaseOnDrop(self)
    }

    /// The requests that are held back, in the order of submission.
    pub fn held(&self) -> Vec<Request> {
        let state = self.shared.lock();
        let held = state.queue.iter().filter(|queued| state.is_held(queued));
        held.map(|queued| queued.request.clone()).collect()
    }

    /// Number of requests that are held back.
    pub fn held_count(&self) -> usize {
        let state = self.shared.lock();
        state.queue.iter().filter(|queued| state.is_held(queued)).count()
    }

    /// Waits until a request is held back.
    ///
    /// # Panics
    /// If none is within [`PATIENCE`].
    pub fn wait_until_held(&self) {
        let began = Instant::now();
        while self.held_count() == 0 {
            assert!(began.elapsed() < PATIENCE, "no request is held back within {PATIENCE:?}");
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// The requests of the workload, in the order of submission.
    pub fn records(&self) -> Vec<Record> {
        self.shared.lock().records.clone()
    }

    /// Contents after a power cut that takes everything that may be lost.
    pub fn durable_image(&self) -> MemImage {
        self.shared.lock().durable.snapshot()
    }

    /// Contents after a power cut that takes nothing that has completed.
    pub fn completed_image(&self) -> MemImage {
        let _state = self.shared.lock();
        self.shared.current.snapshot()
    }

    /// Contents after a power cut; `rng` draws which of the writes that may be lost survive.
    pub fn cut_image(&self, rng: &mut Rng) -> MemImage {
        let state = self.shared.lock();
        let image = MemDevice::from_image(&state.durable.snapshot());
        let count = rng.below(state.cached.len() as u64 + 1) as usize;
        for (index, change) in state.cached.iter().enumerate() {
            let survives = match self.shared.cache {
                Cache::None => true,
                Cache::Volatile => rng.percent(50),
                Cache::NativeBarrier => index < count,
            };
            if survives {
                apply(&image, &change.request);
            }
        }
        image.snapshot()
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // The state is consistent at each point where a test can panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The thread: runs requests until the device is dropped and nothing is queued.
    fn run(&self) {
        let mut state = self.lock();
        loop {
            let next = state.queue.iter().position(|queued| !state.is_held(queued));
            let Some(queued) = next.and_then(|next| state.queue.remove(next)) else {
                if state.is_closed {
                    return;
                }
                state = self.moved.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let is_flush = matches!(queued.request, Request::Flush { .. });
            let delay = if is_flush { state.delay } else { Duration::ZERO };
            drop(state);
            thread::sleep(delay);
            let result = self.execute(&mut self.lock(), &queued);
            queued.completer.complete(result);
            state = self.lock();
        }
    }

    fn execute(&self, state: &mut State, queued: &Queued) -> Result<(), IoError> {
        let (op, offset, len) = queued.request.extent();
        let fails = state.fails_now(queued);
        let is_flush = matches!(queued.request, Request::Flush { .. });
        let now = state.ran_count;
        state.ran_count += 1;
        let failed = fails || is_flush && state.flush_has_failed;
        if let Some(record) = state.records.get_mut(queued.index) {
            (record.ran_at, record.failed) = (Some(now), failed);
        }
        if failed {
            state.flush_has_failed |= is_flush;
            return Err(IoError::os(libc::EIO, op, offset, len));
        }
        if is_flush {
            state.flush(queued.completed_before, now);
            return Ok(());
        }
        apply(&self.current, &queued.request);
        let number = state.completed_count;
        state.completed_count += 1;
        if let Some(record) = state.records.get_mut(queued.index) {
            record.completed = Some(number);
        }
        let fua = matches!(queued.request, Request::Write { fua: true, .. });
        if fua || self.cache == Cache::None {
            // Older contents of the same bytes must not be made durable afterwards.
            let is_covered = |change: &Change| {
                let (_, at, bytes) = change.request.extent();
                offset <= at && at + bytes <= offset + len
            };
            state.cached.retain(|change| !is_covered(change));
            apply(&state.durable, &queued.request);
            if let Some(record) = state.records.get_mut(queued.index) {
                record.durable_at = Some(now);
            }
        } else {
            state.cached.push(Change { number, request: queued.request.clone() });
        }
        Ok(())
    }
}

impl State {
    fn is_held(&self, queued: &Queued) -> bool {
        self.hold.as_ref().is_some_and(|hold| hold(&queued.request))
    }

    /// Whether a request fails that runs now.
    fn fails_now(&mut self, queued: &Queued) -> bool {
        match self.fails {
            Fails::Never => false,
            Fails::Number(number) => number == queued.index as u64,
            Fails::NextWrite(first) => {
                let is_write =
                    queued.index >= first && matches!(queued.request, Request::Write { .. });
                if is_write {
                    self.fails = Fails::Never;
                }
                is_write
            }
            Fails::Always => true,
        }
    }

    fn flush(&mut self, completed_before: u64, now: u64) {
        let durable = &self.durable;
        let covered = self.cached.extract_if(.., |change| change.number < completed_before);
        covered.for_each(|change| apply(durable, &change.request));
        for record in &mut self.records {
            if record.completed.is_some_and(|number| number < completed_before) {
                record.durable_at.get_or_insert(now);
            }
        }
    }
}

/// Changes contents as a request says.
fn apply(device: &MemDevice, request: &Request) {
    // The device in memory refuses requests beyond its end only, which its owner has checked.
    let done = device.submit_one(request.clone()).wait();
    assert!(done.is_ok(), "the device in memory refuses {:?}: {done:?}", request.extent());
}

/// Whether a request makes something durable: a flush, or a write with FUA.
pub fn is_durable(request: &Request) -> bool {
    matches!(request, Request::Flush { .. } | Request::Write { fua: true, .. })
}

/// Whether a write keeps an epoch apart from the next one: log blocks and commit blocks do.
pub fn is_barrier(request: &Request) -> bool {
    matches!(request, Request::Write { order: Order::Barrier, .. })
}

impl Device for GateDevice {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn size_bytes(&self) -> u64 {
        self.shared.current.size_bytes()
    }

    fn submit(&self, batch: Vec<Request>) -> Vec<Ticket> {
        let mut state = self.shared.lock();
        let submit = |request: Request| {
            let (ticket, completer) = Ticket::pending(None);
            let (index, completed_before) = (state.records.len(), state.completed_count);
            state.records.push(Record {
                request: request.clone(),
                ran_at: None,
                failed: false,
                durable_at: None,
                completed: None,
            });
            state.queue.push_back(Queued { index, request, completer, completed_before });
            ticket
        };
        let tickets = batch.into_iter().map(submit).collect();
        drop(state);
        self.shared.moved.notify_all();
        tickets
    }

    fn submit_read(&self, offset: u64, bufs: Vec<AlignedBuf>, class: Class) -> ReadTicket {
        let mut state = self.shared.lock();
        while state.holds_reads {
            state = self.shared.moved.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        drop(state);
        self.shared.current.submit_read(offset, bufs, class)
    }
}

impl fmt::Debug for GateDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let queued_count = self.shared.lock().queue.len();
        f.debug_struct("GateDevice").field("queued_count", &queued_count).finish_non_exhaustive()
    }
}

impl Drop for GateDevice {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        (state.is_closed, state.hold) = (true, None);
        drop(state);
        self.shared.moved.notify_all();
    }
}
