//! Injected faults, and recording, for tests of the layers above.
//!
//! Owns [`FaultPlan`] (which requests fail, and how), which [`crate::MemDevice`] has too,
//! [`SparseRoom`] (a sparse file on a disk that fills up), and [`FaultDevice`], a wrapper over any
//! device that applies both and can log every request.
//!
//! Invariants:
//! - like a real backend, a wrapper whose flush failed fails every later flush;
//! - one clock stamps submissions and completions, so that `a.completed_at < b.submitted_at` says
//!   that `a` was done before `b` was submitted, and `a` is covered by `b` when `b` is a flush.

use std::collections::HashSet;
use std::fs::File;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::buf::{AlignedBuf, Buf};
use crate::device::{Capabilities, Class, Device, Request};
use crate::error::{IoError, IoOp, OpenError};
use crate::lock::{Mutex, Rank};
use crate::snapshot::{SnapshotError, SnapshotOptions, SnapshotReport};
use crate::stats::DeviceStats;
use crate::sticky::Sticky;
use crate::ticket::{Completer, Driver, IoResult, ReadSlot, ReadTicket, Ticket, TicketCore};

/// Matches requests of a rule.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FaultMatch {
    /// Only this operation; None for any.
    pub op: Option<IoOp>,
    /// Only requests that touch this byte range; None for any. Flushes touch no range.
    pub range: Option<Range<u64>>,
}

impl FaultMatch {
    fn matches(&self, op: IoOp, offset: u64, len: u64) -> bool {
        let touches = |range: &Range<u64>| {
            op != IoOp::Flush && offset < range.end && offset.saturating_add(len) > range.start
        };
        self.op.is_none_or(|wanted| wanted == op) && self.range.as_ref().is_none_or(touches)
    }
}

/// Effect on a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FaultAction {
    /// Fails with this errno and has no effect.
    Fail(i32),
    /// A write reaches the device only with its first `keep_bytes` bytes, and fails with `errno`.
    /// Other operations fail without effect.
    Torn {
        /// Bytes that are written.
        keep_bytes: u64,
        /// The errno reported.
        errno: i32,
    },
    /// Starts only after this time ([`crate::MemDevice`] just sleeps).
    Delay(Duration),
}

/// A rule: skip `skip_count` matching requests, then act on the next `hit_count_max`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FaultRule {
    /// Which requests.
    pub matches: FaultMatch,
    /// How many matching requests pass first.
    pub skip_count: u64,
    /// How many are hit then.
    pub hit_count_max: u64,
    /// What happens to them.
    pub action: FaultAction,
}

/// The rules. The first one that matches and is not used up acts.
#[derive(Debug)]
pub struct FaultPlan {
    rules: Mutex<Vec<FaultRule>>,
    hit_count: AtomicU64,
    /// Whether `rules` has any, so that the usual path takes no lock.
    armed: AtomicBool,
}

impl Default for FaultPlan {
    fn default() -> FaultPlan {
        FaultPlan {
            rules: Mutex::new(Rank::FaultRules, Vec::new()),
            hit_count: AtomicU64::default(),
            armed: AtomicBool::default(),
        }
    }
}

impl FaultPlan {
    /// Adds a rule.
    pub fn add(&self, rule: FaultRule) {
        self.rules.lock().push(rule);
        self.armed.store(true, Ordering::Release);
    }

    /// Lets `skip_count` requests of kind `op` (None: any) pass and fails the next one with `errno`.
    pub fn fail_nth(&self, op: Option<IoOp>, skip_count: u64, errno: i32) {
        let matches = FaultMatch { op, range: None };
        self.add(FaultRule {
            matches,
            skip_count,
            hit_count_max: 1,
            action: FaultAction::Fail(errno),
        });
    }

    /// Fails every request of kind `op` (None: any) that touches `range` with `errno`.
    pub fn fail_range(&self, op: Option<IoOp>, range: Range<u64>, errno: i32) {
        let matches = FaultMatch { op, range: Some(range) };
        self.add(FaultRule {
            matches,
            skip_count: 0,
            hit_count_max: u64::MAX,
            action: FaultAction::Fail(errno),
        });
    }

    /// Fails the next flush with `errno`.
    pub fn fail_flush(&self, errno: i32) {
        self.fail_nth(Some(IoOp::Flush), 0, errno);
    }

    /// Removes all rules.
    pub fn clear(&self) {
        self.rules.lock().clear();
        self.armed.store(false, Ordering::Release);
    }

    /// How many requests were hit so far.
    pub fn hit_count(&self) -> u64 {
        self.hit_count.load(Ordering::Relaxed)
    }

    /// The action for a request, if a rule hits it; rules count down by this call.
    pub(crate) fn decide(&self, op: IoOp, offset: u64, len: u64) -> Option<FaultAction> {
        if !self.armed.load(Ordering::Acquire) {
            return None;
        }
        let mut rules = self.rules.lock();
        let mut action = None;
        for rule in rules.iter_mut().filter(|rule| rule.matches.matches(op, offset, len)) {
            if rule.skip_count > 0 {
                rule.skip_count -= 1;
            } else if rule.hit_count_max > 0 && action.is_none() {
                rule.hit_count_max -= 1;
                action = Some(rule.action.clone());
            }
        }
        if action.is_some() {
            self.hit_count.fetch_add(1, Ordering::Relaxed);
        }
        action
    }
}

/// Allocation unit of a [`SparseRoom`] in bytes.
const ROOM_PAGE_BYTES: u64 = 4096;

/// Host space of a sparse image: which pages have blocks, and how many more can be allocated.
#[derive(Clone, Debug, Default)]
pub struct SparseRoom {
    /// Pages of 4096 bytes that have blocks.
    pub backed: HashSet<u64>,
    /// Pages that can still be allocated.
    pub left_count: u64,
    /// Allocations that were refused.
    pub refused_count: u64,
    /// Writes among them, for which no space had been allocated before.
    pub refused_write_count: u64,
}

impl SparseRoom {
    fn pages(offset: u64, len: u64) -> Range<u64> {
        offset / ROOM_PAGE_BYTES..offset.saturating_add(len).div_ceil(ROOM_PAGE_BYTES)
    }

    fn take(&mut self, op: IoOp, offset: u64, len: u64) -> IoResult {
        let holes: Vec<u64> =
            Self::pages(offset, len).filter(|page| !self.backed.contains(page)).collect();
        if holes.len() as u64 > self.left_count {
            self.refused_count += 1;
            self.refused_write_count += u64::from(op == IoOp::Write);
            return Err(IoError::os(libc::ENOSPC, op, offset, len));
        }
        self.left_count -= holes.len() as u64;
        self.backed.extend(holes);
        Ok(())
    }

    fn give_back(&mut self, offset: u64, len: u64) {
        for page in offset.div_ceil(ROOM_PAGE_BYTES)..offset.saturating_add(len) / ROOM_PAGE_BYTES {
            self.left_count += u64::from(self.backed.remove(&page));
        }
    }
}

/// One request as [`FaultDevice`] saw it.
#[derive(Clone, Debug)]
pub struct Record {
    /// The request; its buffers are clones and keep their contents.
    pub request: Request,
    /// The clock at submission.
    pub submitted_at: u64,
    /// The clock at completion; None while in flight.
    pub completed_at: Option<u64>,
    /// The error, if it failed. A failed write may have been written partly.
    pub error: Option<IoError>,
}

/// State shared with the callbacks of requests in flight.
#[derive(Debug)]
struct Shared {
    faults: FaultPlan,
    sticky: Arc<Sticky>,
    clock: AtomicU64,
    /// None while not recording.
    log: Mutex<Option<Vec<Record>>>,
    /// None if host space is unlimited.
    room: Mutex<Option<SparseRoom>>,
}

impl Default for Shared {
    fn default() -> Shared {
        Shared {
            faults: FaultPlan::default(),
            sticky: Arc::default(),
            clock: AtomicU64::default(),
            log: Mutex::new(Rank::FaultLog, None),
            room: Mutex::new(Rank::FaultRoom, None),
        }
    }
}

impl Shared {
    fn tick(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::SeqCst)
    }

    /// Allocates the space that a request needs.
    fn take_room(&self, op: IoOp, offset: u64, len: u64) -> IoResult {
        let mut room = self.room.lock();
        let Some(room) = room.as_mut() else { return Ok(()) };
        match op {
            IoOp::Write | IoOp::EnsureRoom => room.take(op, offset, len),
            IoOp::Discard => {
                room.give_back(offset, len);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn record(&self, request: &Request) -> Option<usize> {
        let mut log = self.log.lock();
        let log = log.as_mut()?;
        let submitted_at = self.tick();
        log.push(Record {
            request: request.clone(),
            submitted_at,
            completed_at: None,
            error: None,
        });
        Some(log.len() - 1)
    }

    /// Records the completion and returns the result for the caller.
    fn finish(&self, index: Option<usize>, op: IoOp, result: IoResult) -> IoResult {
        if let (IoOp::Flush, Err(error)) = (op, &result) {
            self.sticky.set(error);
        }
        let mut log = self.log.lock();
        if let Some(record) = index.and_then(|index| log.as_mut()?.get_mut(index)) {
            record.completed_at = Some(self.tick());
            record.error = result.as_ref().err().cloned();
        }
        result
    }
}

/// Has a waiting thread drive the inner device.
struct Forward(Ticket);

impl Driver for Forward {
    fn drive(&self, _: &Arc<TicketCore>) {
        // The callback delivers the result.
        let _ = self.0.wait();
    }
    fn start(&self, _: &Arc<TicketCore>) {
        self.0.start();
    }
    fn promote(&self, _: &Arc<TicketCore>) {
        self.0.promote();
    }
    fn needs_waiter(&self) -> bool {
        self.0.needs_waiter()
    }
}

/// A wrapper that makes chosen requests fail, tears or delays them, and records them.
#[derive(Debug)]
pub struct FaultDevice {
    inner: Arc<dyn Device>,
    capabilities: Capabilities,
    shared: Arc<Shared>,
}

impl FaultDevice {
    /// Wraps `inner`; without rules it passes requests on unchanged.
    pub fn new(inner: Arc<dyn Device>) -> Self {
        let capabilities = inner.capabilities().clone();
        FaultDevice { inner, capabilities, shared: Arc::default() }
    }

    /// Reports other capabilities than the inner device's: to record the requests that another kind
    /// of device would get.
    pub fn claiming(mut self, change: impl FnOnce(&mut Capabilities)) -> Self {
        change(&mut self.capabilities);
        self
    }

    /// The rules; can be changed at any time.
    pub fn faults(&self) -> &FaultPlan {
        &self.shared.faults
    }

    /// The host space, for reading and changing; `None` (the default) if it is unlimited.
    pub fn with_room<T>(&self, act: impl FnOnce(&mut Option<SparseRoom>) -> T) -> T {
        act(&mut self.shared.room.lock())
    }

    /// Starts to record, with an empty log.
    pub fn start_recording(&self) {
        *self.shared.log.lock() = Some(Vec::new());
    }

    /// Stops recording and returns the log, in the order of submission, without reads.
    pub fn take_recording(&self) -> Vec<Record> {
        self.shared.log.lock().take().unwrap_or_default()
    }

    /// Number of requests recorded so far.
    pub fn record_count(&self) -> usize {
        self.shared.log.lock().as_ref().map_or(0, Vec::len)
    }

    /// A stamp between the requests before and after it, for example for "this fsync returned now".
    pub fn stamp(&self) -> u64 {
        self.shared.tick()
    }

    fn submit_faulty(&self, request: Request, completer: Completer) {
        let (op, offset, len) = request.extent();
        let index = self.shared.record(&request);
        if op == IoOp::Flush
            && let Err(error) = self.shared.sticky.check()
        {
            completer.complete(self.shared.finish(index, op, Err(error)));
            return;
        }
        if let Err(error) = self.shared.take_room(op, offset, len) {
            completer.complete(self.shared.finish(index, op, Err(error)));
            return;
        }
        let fail = |errno| Err(IoError::os(errno, op, offset, len));
        let (inner, shared) = (self.inner.clone(), self.shared.clone());
        match self.shared.faults.decide(op, offset, len) {
            None => forward(&*inner, request, shared, index, op, completer, None),
            Some(FaultAction::Fail(errno)) => {
                completer.complete(shared.finish(index, op, fail(errno)))
            }
            Some(FaultAction::Torn { keep_bytes, errno }) => {
                forward(
                    &*inner,
                    tear(request, keep_bytes),
                    shared,
                    index,
                    op,
                    completer,
                    Some(fail(errno)),
                );
            }
            Some(FaultAction::Delay(delay)) => {
                std::thread::spawn(move || {
                    std::thread::sleep(delay);
                    forward(&*inner, request, shared, index, op, completer, None);
                });
            }
        }
    }
}

/// Submits to the inner device; `result` replaces the inner result when it is Some.
fn forward(
    inner: &dyn Device,
    request: Request,
    shared: Arc<Shared>,
    index: Option<usize>,
    op: IoOp,
    completer: Completer,
    result: Option<IoResult>,
) {
    let Some(ticket) = inner.submit(vec![request]).pop() else { return };
    completer.set_driver(Arc::new(Forward(ticket.clone())));
    ticket.watch(move |inner_result| {
        let result = result.unwrap_or_else(|| inner_result.clone());
        completer.complete(shared.finish(index, op, result));
    });
}

/// The first `keep_bytes` bytes of a write; a write of nothing for other requests.
fn tear(request: Request, keep_bytes: u64) -> Request {
    let Request::Write { offset, bufs, order, class, .. } = request else {
        return Request::write(0, Vec::new());
    };
    let mut left = keep_bytes;
    let mut kept = Vec::new();
    for buf in bufs {
        let take = left.min(buf.len() as u64);
        left -= take;
        match take as usize {
            0 => break,
            take if take == buf.len() => kept.push(buf),
            take => kept.push(Buf::from_slice(&buf[..take])),
        }
    }
    Request::Write { offset, bufs: kept, order, fua: false, class }
}

impl Device for FaultDevice {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }
    fn size_bytes(&self) -> u64 {
        self.inner.size_bytes()
    }
    fn set_size(&self, size_bytes: u64) -> IoResult {
        self.inner.set_size(size_bytes)
    }
    fn ensure_size(&self, size_bytes: u64) -> Result<u64, IoError> {
        self.inner.ensure_size(size_bytes)
    }
    fn ensure_room(&self, offset: u64, len: u64) -> IoResult {
        self.shared.take_room(IoOp::EnsureRoom, offset, len)?;
        self.inner.ensure_room(offset, len)
    }
    fn check(&self) -> IoResult {
        self.inner.check()
    }

    fn submit(&self, batch: Vec<Request>) -> Vec<Ticket> {
        let submit = |request| {
            let (ticket, completer) = Ticket::pending(Some(self.shared.sticky.clone()));
            self.submit_faulty(request, completer);
            ticket
        };
        batch.into_iter().map(submit).collect()
    }

    fn submit_read(&self, offset: u64, bufs: Vec<AlignedBuf>, class: Class) -> ReadTicket {
        let len = crate::device::bufs_len(&bufs);
        match self.shared.faults.decide(IoOp::Read, offset, len) {
            None => self.inner.submit_read(offset, bufs, class),
            Some(FaultAction::Fail(errno) | FaultAction::Torn { errno, .. }) => {
                ReadTicket::ready(Err(IoError::os(errno, IoOp::Read, offset, len)))
            }
            Some(FaultAction::Delay(delay)) => {
                let inner = self.inner.clone();
                let (ticket, completer) = Ticket::pending(None);
                let slot = ReadSlot::default();
                let filled = slot.clone();
                std::thread::spawn(move || {
                    std::thread::sleep(delay);
                    let result = inner.submit_read(offset, bufs, class).wait();
                    completer.complete(result.map(|bufs| filled.fill(bufs)));
                });
                ReadTicket::new(ticket, slot)
            }
        }
    }

    fn stats(&self) -> DeviceStats {
        self.inner.stats()
    }

    fn release(&self) {
        self.inner.release();
    }

    fn claim(&self, alone: bool) -> Result<(), OpenError> {
        self.inner.claim(alone)
    }

    fn snapshot_to(
        &self,
        out: &File,
        options: &SnapshotOptions<'_>,
    ) -> Result<SnapshotReport, SnapshotError> {
        self.inner.snapshot_to(out, options)
    }
}
