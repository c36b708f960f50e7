//! io_uring. Owns the ring, and the roles of its waiters: leader and followers.
//!
//! No thread is dedicated to completions. The first thread that waits becomes the leader: it enters
//! the kernel, reaps for all, and completes their tickets. When its own ticket is done it steps
//! down and wakes one follower, which becomes the leader. Without waiters, the ticker leads.
//!
//! Invariants:
//! - only the leader touches the completion queue; only the holder of `submitting` the submission
//!   queue;
//! - an [`Op`] is owned by the kernel (through its user data) from submission to completion, and
//!   keeps its pieces' memory alive through its [`Parts`];
//! - stepping down wakes a follower whose ticket is not done, if there is one.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use io_uring::types::{Fixed, SubmitArgs, Timespec};
use io_uring::{IoUring, cqueue, opcode, squeue};

use super::raw::{IOV_COUNT_MAX, RawFile, Route};
use super::shared::{Action, Shared, Work};
use crate::error::{IoError, IoErrorKind};
use crate::lock::{Mutex, MutexGuard, Rank};
use crate::ticket::{Driver, TicketCore};

const SUBMISSION_COUNT: u32 = 256;
/// Beyond this many completions the kernel queues them itself (NODROP).
const COMPLETION_COUNT: u32 = 4096;
const ENTER_GETEVENTS: u32 = 1;
/// Index of each descriptor in the registered table.
const FIXED_DIRECT: u32 = 0;
const FIXED_BUFFERED: u32 = 1;

/// Guarded by `Ring::lead`.
#[derive(Default)]
struct Lead {
    leading: bool,
    /// Tickets of followers; some may be done.
    followers: VecDeque<Arc<TicketCore>>,
    /// How often a waiter led, so that the ticker can see whether any does.
    turn_count: u64,
}

/// The ring of one device.
pub(super) struct Ring {
    ring: IoUring,
    submitting: Mutex<()>,
    lead: Mutex<Lead>,
    /// Ops in the kernel.
    inflight_count: AtomicUsize,
}

/// A work in the ring, split into ops.
struct Parts {
    /// Ops not done yet.
    count: AtomicUsize,
    /// The first failure of an op.
    error: Mutex<Option<IoError>>,
    /// Taken by the op that finishes last. Holds the memory of all ops.
    work: Mutex<Option<Work>>,
    write: bool,
    fua: bool,
}

/// One submission: at most IOV_MAX pieces of a work.
struct Op {
    parts: Arc<Parts>,
    iovecs: Vec<libc::iovec>,
    /// Where the rest starts, in bytes on the device.
    offset: u64,
    route: Route,
    /// A retry goes to a kernel worker, which may block.
    retry: bool,
}

// SAFETY: the pointers in `iovecs` lead to pool memory that `parts` keeps alive and that nobody
// else writes while the op exists; they are only passed to the kernel.
unsafe impl Send for Op {}

impl Ring {
    /// Sets up a ring on the file's descriptors.
    pub(super) fn new(file: &RawFile) -> io::Result<Ring> {
        let ring = IoUring::builder()
            .setup_cqsize(COMPLETION_COUNT)
            .setup_clamp()
            .build(SUBMISSION_COUNT)?;
        if !ring.params().is_feature_nodrop() || !ring.params().is_feature_ext_arg() {
            return Err(io::Error::from_raw_os_error(libc::ENOSYS));
        }
        let buffered = file.fd(Route::Buffered).as_raw_fd();
        let direct = file.fd(Route::Direct).as_raw_fd();
        ring.submitter().register_files(&[direct, buffered])?;
        Ok(Ring {
            ring,
            submitting: Mutex::new(Rank::RingSubmission, ()),
            lead: Mutex::new(Rank::RingLead, Lead::default()),
            inflight_count: AtomicUsize::new(0),
        })
    }

    /// Unregisters the files: the kernel keeps a ring for some time after its last use, and with it
    /// the lock of a block device.
    pub(super) fn release(&self) {
        // Only fails when nothing is registered.
        let _ = self.ring.submitter().unregister_files();
    }

    /// Submits transfers; other work does not use the ring.
    pub(super) fn submit(shared: &Arc<Shared>, works: Vec<Work>) {
        let Some(ring) = &shared.ring else { return };
        let mut ops = Vec::with_capacity(works.len());
        for work in works {
            work.set_driver(shared.clone());
            // A waiter may already sleep, because its old driver found the work claimed.
            work.nudge();
            split(work, shared, &mut ops);
        }
        ring.inflight_count.fetch_add(ops.len(), Ordering::SeqCst);
        ring.submit_ops(shared, ops);
        shared.helpers.notice_ring();
    }

    fn submit_ops(&self, shared: &Shared, ops: Vec<Op>) {
        let mut submitting = self.submitting.lock();
        for op in ops {
            let entry = op
                .entry(&shared.file)
                .user_data(Box::into_raw(Box::new(op)).expose_provenance() as u64);
            // SAFETY: `submitting` is held, so no other thread uses the submission queue.
            let mut queue = unsafe { self.ring.submission_shared() };
            // SAFETY: the entry's memory (iovecs and pieces) belongs to the op, which lives until
            // its completion is reaped.
            while unsafe { queue.push(&entry) }.is_err() {
                drop(queue);
                self.enter_submit(shared, &mut submitting);
                // SAFETY: as above; `enter_submit` returns with the lock held.
                queue = unsafe { self.ring.submission_shared() };
            }
        }
        self.enter_submit(shared, &mut submitting);
    }

    /// Submits all queued entries to the kernel. May release the lock meanwhile.
    fn enter_submit(&self, shared: &Shared, submitting: &mut MutexGuard<'_, ()>) {
        loop {
            // SAFETY: the lock is held.
            let left = unsafe { self.ring.submission_shared() }.len();
            if left == 0 {
                return;
            }
            match self.ring.submitter().submit() {
                Ok(_) => {}
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
                // Out of memory or completions to take first. The entries stay queued.
                Err(_) => MutexGuard::unlocked(submitting, || {
                    if self.try_lead() {
                        self.reap(shared);
                        self.step_down();
                    }
                    std::thread::yield_now();
                }),
            }
        }
    }

    /// Becomes the leader if there is none.
    fn try_lead(&self) -> bool {
        !std::mem::replace(&mut self.lead.lock().leading, true)
    }

    /// Becomes the leader, or registers as a follower.
    fn lead_or_follow(&self, ticket: &Arc<TicketCore>) -> bool {
        let mut lead = self.lead.lock();
        if lead.leading {
            lead.followers.push_back(ticket.clone());
            return false;
        }
        lead.leading = true;
        lead.turn_count += 1;
        true
    }

    /// Steps down and wakes the next leader.
    fn step_down(&self) {
        let mut lead = self.lead.lock();
        lead.leading = false;
        while let Some(follower) = lead.followers.pop_front() {
            if !follower.is_done() {
                drop(lead);
                follower.nudge();
                return;
            }
        }
    }

    fn drive(&self, shared: &Shared, ticket: &Arc<TicketCore>) {
        if ticket.is_done() || !self.lead_or_follow(ticket) {
            return;
        }
        loop {
            self.reap(shared);
            if ticket.is_done() {
                break;
            }
            self.enter_wait(None);
        }
        self.step_down();
    }

    /// Waits for at least one completion, at most for `timeout`.
    fn enter_wait(&self, timeout: Option<Duration>) {
        let submitter = self.ring.submitter();
        // Errors are EINTR and ETIME (look again), or EBUSY (completions wait to be reaped).
        let _ = match timeout {
            // SAFETY: nothing is submitted and no argument is passed.
            None => unsafe { submitter.enter::<()>(0, 1, ENTER_GETEVENTS, None) },
            Some(timeout) => {
                let timespec = Timespec::from(timeout);
                submitter.submit_with_args(1, &SubmitArgs::new().timespec(&timespec))
            }
        };
    }

    /// Takes all completions that are there. The caller leads.
    fn reap(&self, shared: &Shared) {
        let mut again = Vec::new();
        loop {
            // SAFETY: the caller leads, so no other thread uses the completion queue.
            let entries: Vec<cqueue::Entry> =
                unsafe { self.ring.completion_shared() }.take(64).collect();
            if entries.is_empty() {
                break;
            }
            for entry in entries {
                let address =
                    std::ptr::with_exposed_provenance_mut::<Op>(entry.user_data() as usize);
                // SAFETY: user data are set only by `submit_ops`, to a leaked Box of an Op, and
                // each is reported once.
                let op = *unsafe { Box::from_raw(address) };
                match op.advance(entry.result(), shared) {
                    Some(rest) => again.push(rest),
                    None => {
                        self.inflight_count.fetch_sub(1, Ordering::SeqCst);
                    }
                }
            }
        }
        if !again.is_empty() {
            self.submit_ops(shared, again);
        }
    }

    /// For the ticker: leads for one wait of at most `timeout` if no waiter led since the last call
    /// with this `turn_count`.
    pub(super) fn reap_unattended(
        shared: &Shared,
        turn_count: &mut u64,
        timeout: Duration,
    ) -> Attendance {
        let Some(ring) = &shared.ring else { return Attendance::Idle };
        if ring.inflight_count.load(Ordering::SeqCst) == 0 {
            return Attendance::Idle;
        }
        let now = ring.lead.lock().turn_count;
        if std::mem::replace(turn_count, now) != now || !ring.reap_for_all(shared, timeout) {
            return Attendance::ByWaiters;
        }
        Attendance::ByTicker
    }

    /// Leads for one wait of at most `timeout`; `false` if there is a leader, or nothing is in
    /// flight.
    pub(super) fn reap_for_all(&self, shared: &Shared, timeout: Duration) -> bool {
        if self.inflight_count.load(Ordering::SeqCst) == 0 || !self.try_lead() {
            return false;
        }
        self.enter_wait(Some(timeout));
        self.reap(shared);
        self.step_down();
        true
    }
}

/// Who reaps the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Attendance {
    /// Nothing is in flight.
    Idle,
    /// Threads that wait for tickets.
    ByWaiters,
    /// The ticker did just now.
    ByTicker,
}

/// Shared as the driver of tickets in the ring.
impl Driver for Shared {
    fn drive(&self, ticket: &Arc<TicketCore>) {
        if let Some(ring) = &self.ring {
            ring.drive(self, ticket);
        }
    }

    /// Requests in the ring are in flight.
    fn start(&self, _: &Arc<TicketCore>) {}
}

/// Makes ops of a work, each with at most IOV_MAX pieces.
fn split(work: Work, shared: &Shared, ops: &mut Vec<Op>) {
    let mut offset = work.offset;
    let Some(route) = work.route(&shared.file) else {
        let error = work.error(IoErrorKind::Unsupported);
        work.finish(shared, Err(error));
        return;
    };
    let mut work = work;
    let (iovecs, write, fua) = work.iovecs();
    if iovecs.is_empty() {
        work.finish(shared, Ok(()));
        return;
    }
    let count = AtomicUsize::new(iovecs.len().div_ceil(IOV_COUNT_MAX));
    let parts = Arc::new(Parts {
        count,
        error: Mutex::new(Rank::RingError, None),
        work: Mutex::new(Rank::FileJob, Some(work)),
        write,
        fua,
    });
    for chunk in iovecs.chunks(IOV_COUNT_MAX) {
        let op = Op { parts: parts.clone(), iovecs: chunk.to_vec(), offset, route, retry: false };
        offset += op.left();
        ops.push(op);
    }
}

impl Op {
    /// Bytes not transferred yet.
    fn left(&self) -> u64 {
        self.iovecs.iter().map(|iovec| iovec.iov_len as u64).sum()
    }

    fn entry(&self, file: &RawFile) -> squeue::Entry {
        let place = file.place(self.offset);
        let fd = Fixed(match self.route {
            Route::Direct => FIXED_DIRECT,
            Route::Buffered => FIXED_BUFFERED,
        });
        let (pointer, count) = (self.iovecs.as_ptr(), self.iovecs.len() as u32);
        let entry = if self.parts.write {
            let flags = if self.parts.fua { libc::RWF_DSYNC } else { 0 };
            opcode::Writev::new(fd, pointer, count).offset(place).rw_flags(flags).build()
        } else {
            opcode::Readv::new(fd, pointer, count).offset(place).build()
        };
        if self.retry { entry.flags(squeue::Flags::ASYNC) } else { entry }
    }

    /// Processes a completion; returns itself if there is more to transfer.
    fn advance(mut self, result: i32, shared: &Shared) -> Option<Op> {
        match result {
            count if count > 0 => {
                self.skip(count as usize);
                if self.iovecs.is_empty() {
                    self.done(shared, None);
                    return None;
                }
                self.route = shared
                    .file
                    .route(self.offset, self.iovecs.iter().map(|v| (v.iov_base.addr(), v.iov_len)));
            }
            0 => {
                let kind = if self.parts.write {
                    IoErrorKind::Os(libc::ENOSPC)
                } else {
                    shared.file.why_short()
                };
                self.done(shared, Some(kind));
                return None;
            }
            // Cancelled: the thread that submitted it ended before a kernel worker began.
            errno if [libc::EINTR, libc::EAGAIN, libc::ECANCELED].contains(&-errno) => {
                self.retry = true
            }
            errno => {
                self.done(shared, Some(IoErrorKind::Os(-errno)));
                return None;
            }
        }
        Some(self)
    }

    /// Drops `count` transferred bytes from the front.
    fn skip(&mut self, mut count: usize) {
        self.offset += count as u64;
        let whole = self.iovecs.iter().take_while(|iovec| {
            let fits = iovec.iov_len <= count;
            count -= if fits { iovec.iov_len } else { 0 };
            fits
        });
        let whole = whole.count();
        self.iovecs.drain(..whole);
        if let Some(first) = self.iovecs.first_mut().filter(|_| count > 0) {
            // SAFETY: `count` is less than the piece's length, so this stays inside it.
            first.iov_base = unsafe { first.iov_base.add(count) };
            first.iov_len -= count;
        }
    }

    /// This op is done; the last one of its work reports.
    fn done(self, shared: &Shared, kind: Option<IoErrorKind>) {
        if let Some(kind) = kind {
            let error = self.parts.work.lock().as_ref().map(|work| work.error(kind));
            let mut first = self.parts.error.lock();
            *first = first.take().or(error);
        }
        if self.parts.count.fetch_sub(1, Ordering::AcqRel) > 1 {
            return;
        }
        let error = self.parts.error.lock().take();
        let work = self.parts.work.lock().take();
        if let Some(work) = work {
            work.finish(shared, error.map_or(Ok(()), Err));
        }
    }
}

impl Work {
    /// The pieces as iovecs, whether it is a write, and whether with FUA.
    fn iovecs(&mut self) -> (Vec<libc::iovec>, bool, bool) {
        let iovec = |base: *mut u8, len| libc::iovec { iov_base: base.cast(), iov_len: len };
        let not_empty = |iovec: &libc::iovec| iovec.iov_len > 0;
        match &mut self.action {
            Action::Write { bufs, fua } => {
                let iovecs = bufs.iter().map(|b| iovec(b.as_ptr().cast_mut(), b.len()));
                (iovecs.filter(not_empty).collect(), true, *fua)
            }
            Action::Read { bufs, .. } => {
                let iovecs = bufs.iter_mut().map(|b| iovec(b.as_mut_ptr(), b.len()));
                (iovecs.filter(not_empty).collect(), false, false)
            }
            Action::Discard | Action::WriteZeroes => (Vec::new(), false, false),
        }
    }
}
