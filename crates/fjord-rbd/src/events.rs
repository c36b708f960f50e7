//! Requests under way, and the thread that ends them.
//!
//! Owns what a request needs until librbd has completed it: buffers, and the ticket to complete. librbd tells of
//! completions by an eventfd, on which one thread for each image waits: no thread for a request, and none of
//! librbd's is kept from its work.
//!
//! Invariants: a request that librbd has taken is ended once: by the thread, or by [`Shared::give_up`]; the thread
//! ends after the last of them; the image is open until then. What librbd may still read or write of a request that
//! was given up stays allocated, and the image stays open, until the process ends.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::mem;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use fjord_block::lock::{Mutex, Rank};
use fjord_block::{
    AlignedBuf, Buf, Completer, ErrorSink, IoError, IoErrorKind, IoOp, IoResult, OpenError,
    ReadSlot,
};
use libc::iovec;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;

use crate::image::Image;
use crate::library::{CompletionHandle, ImageHandle, Rbd};

/// Completions taken at a time.
const EVENTS_LEN: usize = 64;
/// Requests that wait for so long are worth a line in the log.
const SILENCE_WORTH_TELLING: Duration = Duration::from_secs(5);

/// A request that librbd has, or is about to get.
pub(crate) struct Pending {
    pub(crate) op: IoOp,
    pub(crate) offset: u64,
    pub(crate) len: u64,
    pub(crate) completer: Completer,
    pub(crate) data: Data,
    /// What `data` consists of; librbd reads the list until the end.
    parts: Vec<iovec>,
}

// SAFETY: the list points into `data`, which goes along with it.
unsafe impl Send for Pending {}

/// The list of a request's buffers, and its length.
pub(crate) type Parts = (*const iovec, i32);

/// The buffers of a request.
pub(crate) enum Data {
    /// None.
    Nothing,
    /// What is written.
    Write(Vec<Buf>),
    /// Where to read to, and whom to give it.
    Read(Vec<AlignedBuf>, ReadSlot),
}

impl Pending {
    /// A request of `op` at byte `offset` over `len` bytes.
    pub(crate) fn new(
        (op, offset, len): (IoOp, u64, u64),
        completer: Completer,
        mut data: Data,
    ) -> Pending {
        let part = |base: *mut u8, len| iovec { iov_base: base.cast::<c_void>(), iov_len: len };
        let parts = match &mut data {
            Data::Nothing => Vec::new(),
            // librbd only reads them.
            Data::Write(bufs) => {
                bufs.iter().map(|buf| part(buf.as_ptr().cast_mut(), buf.len())).collect()
            }
            Data::Read(bufs, _) => {
                bufs.iter_mut().map(|buf| part(buf.as_mut_ptr(), buf.len())).collect()
            }
        };
        Pending { op, offset, len, completer, data, parts }
    }

    /// Where the buffers are; valid until the request ends.
    fn parts(&self) -> Parts {
        (self.parts.as_ptr(), i32::try_from(self.parts.len()).unwrap_or(i32::MAX))
    }

    fn end(self, result: IoResult) {
        let Pending { completer, data, .. } = self;
        if let (Data::Read(bufs, slot), Ok(())) = (data, &result) {
            slot.fill(bufs);
        }
        completer.complete(result);
    }
}

/// What librbd has.
struct Requests {
    /// With the time of the beginning, by the number that librbd gets along with each, the oldest first.
    pending: BTreeMap<usize, (Instant, Pending)>,
    next: usize,
    /// The last answer, or the first request after a time with none under way.
    quiet_since: Instant,
    /// Nothing is sent any more. Only ever set.
    are_given_up: bool,
}

/// What requests and the thread share.
pub(crate) struct Shared {
    pub(crate) image: Image,
    wake: OwnedFd,
    requests: Mutex<Requests>,
    is_ending: AtomicBool,
    /// Another client has the lock: nothing may be done any more. Only ever set.
    pub(crate) is_fenced: AtomicBool,
    /// A write failed whose result nobody read, with this errno; 0 for none.
    pub(crate) lost_errno: AtomicI32,
    pub(crate) stats: fjord_block::StatCounters,
}

impl Shared {
    /// Sends a request with `call`, which gets the image's handle, the buffers and the completion.
    pub(crate) fn send(
        &self,
        pending: Pending,
        call: impl FnOnce(&Rbd, ImageHandle, Parts, CompletionHandle) -> i32,
    ) {
        let (rbd, handle) = self.image.raw();
        // The lists stay where they are when the request moves.
        let parts = pending.parts();
        let number = match self.enter(pending) {
            Ok(number) => number,
            Err(pending) => {
                let (op, offset, len) = (pending.op, pending.offset, pending.len);
                self.stats.error();
                return pending.end(Err(IoError::new(IoErrorKind::GivenUp, op, offset, len)));
            }
        };
        let mut completion = ptr::null_mut();
        // SAFETY: the function writes the completion. There is no callback; the argument is a mere number.
        let code = unsafe {
            let create = rbd.rbd_aio_create_completion;
            create(ptr::without_provenance_mut(number), ptr::null(), &raw mut completion)
        };
        // From here on the thread may end the request.
        let code = if code < 0 { code } else { call(rbd, handle, parts, completion) };
        if code < 0 {
            if !completion.is_null() {
                // SAFETY: librbd has not taken the request, so this is the only reference.
                unsafe { (rbd.rbd_aio_release)(completion) };
            }
            self.end(number, code as isize);
        }
    }

    /// The number of a request that is under way from now on; the request itself if all were given up.
    fn enter(&self, pending: Pending) -> Result<usize, Pending> {
        let mut requests = self.requests.lock();
        if requests.are_given_up {
            return Err(pending);
        }
        let now = Instant::now();
        if requests.pending.is_empty() {
            requests.quiet_since = now;
        }
        let number = requests.next;
        requests.next = number.wrapping_add(1);
        requests.pending.insert(number, (now, pending));
        Ok(number)
    }

    /// How long requests have been under way without an answer to any.
    pub(crate) fn silence(&self) -> Duration {
        let requests = self.requests.lock();
        match requests.pending.is_empty() {
            true => Duration::ZERO,
            false => requests.quiet_since.elapsed(),
        }
    }

    /// Whether nothing is sent any more.
    pub(crate) fn is_given_up(&self) -> bool {
        self.requests.lock().are_given_up
    }

    /// Why nothing can be changed any more, if so.
    pub(crate) fn stopped(&self) -> Option<IoErrorKind> {
        if self.is_fenced.load(Ordering::Acquire) {
            return Some(IoErrorKind::Fenced);
        }
        self.is_given_up().then_some(IoErrorKind::GivenUp)
    }

    /// Fails all requests under way and all later ones.
    pub(crate) fn give_up(self: &Arc<Self>) {
        let mut requests = self.requests.lock();
        if mem::replace(&mut requests.are_given_up, true) {
            return;
        }
        let pending = mem::take(&mut requests.pending);
        drop(requests);
        // librbd still has the image, the eventfd, and the buffers.
        mem::forget(self.clone());
        for (_, pending) in pending.into_values() {
            let Pending { op, offset, len, completer, data, parts } = pending;
            mem::forget((data, parts));
            completer.complete(Err(IoError::new(IoErrorKind::GivenUp, op, offset, len)));
        }
    }

    /// Ends a request with what librbd returned: bytes, or a negative errno.
    fn end(&self, number: usize, value: isize) {
        let pending = {
            let mut requests = self.requests.lock();
            requests.quiet_since = Instant::now();
            requests.pending.remove(&number)
        };
        // It was given up.
        let Some((_, pending)) = pending else { return };
        let (op, offset, len) = (pending.op, pending.offset, pending.len);
        let is_short = op == IoOp::Read && value >= 0 && value as u64 != len;
        let result = if value < 0 {
            Err(self.failed(-value as i32, op, offset, len))
        } else if is_short {
            Err(IoError::new(IoErrorKind::UnexpectedEof, op, offset, len))
        } else {
            Ok(())
        };
        if result.is_err() {
            self.stats.error();
        }
        pending.end(result);
    }

    /// Waits until the eventfd can be read; false after some time.
    fn wait_for_answer(&self) -> bool {
        let patience = Timespec::try_from(SILENCE_WORTH_TELLING).ok();
        let mut fds = [PollFd::new(&self.wake, PollFlags::IN)];
        // An interrupted call is as good as an answer: the read waits for one.
        !matches!(poll(&mut fds, patience.as_ref()), Ok(0))
    }

    /// Says in the log when a request waits for long, and when it does again.
    fn tell_of_silence(&self, told: &mut bool) {
        let is_silent = {
            let requests = self.requests.lock();
            let oldest = requests.pending.values().next();
            oldest.is_some_and(|(began, _)| began.elapsed() >= SILENCE_WORTH_TELLING)
        };
        if is_silent == *told || self.is_given_up() {
            return;
        }
        *told = is_silent;
        let image = self.image.name.path().display();
        match is_silent {
            true => tracing::warn!(
                "{image}: the cluster has not answered a request for {} s; reads and writes wait until it does (`ceph health detail` \
                 tells of OSDs that are down and of full pools)",
                SILENCE_WORTH_TELLING.as_secs()
            ),
            false => tracing::warn!("{image}: the cluster answers again"),
        }
    }

    /// The error for an errno; notes that the lock is lost.
    pub(crate) fn failed(&self, errno: i32, op: IoOp, offset: u64, len: u64) -> IoError {
        // A client whose lock was broken is blocklisted (ESHUTDOWN); one whose lock went to another in peace may
        // not write (EROFS).
        if !matches!(errno, libc::ESHUTDOWN | libc::EROFS) {
            return IoError::os(errno, op, offset, len);
        }
        if !self.is_fenced.swap(true, Ordering::AcqRel) {
            let image = self.image.name.path().display();
            tracing::error!(
                "{image}: another client has taken the exclusive lock: nothing is written any more; what \
                 fsync has promised is in the image, whatever came after it may be lost"
            );
        }
        IoError::new(IoErrorKind::Fenced, op, offset, len)
    }
}

impl ErrorSink for Shared {
    fn unseen_error(&self, error: &IoError) {
        if error.op != IoOp::Read {
            // The first one stays.
            let _ = self.lost_errno.compare_exchange(
                0,
                error.errno(),
                Ordering::AcqRel,
                Ordering::Acquire,
            );
        }
    }
}

/// The thread; ended by drop, which waits for all requests under way.
pub(crate) struct Events {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Events {
    /// Starts the thread for an image.
    ///
    /// # Errors
    /// `Remote`.
    pub(crate) fn start(image: Image) -> Result<Events, OpenError> {
        let failed = |what: &str, error: std::io::Error| {
            image.name.failed(error.raw_os_error().unwrap_or(libc::EIO), format!("{what}: {error}"))
        };
        let wake = eventfd(0, EventfdFlags::CLOEXEC)
            .map_err(|error| failed("making an eventfd", error.into()))?;
        image.notify(wake.as_raw_fd())?;
        let shared = Arc::new(Shared {
            image,
            wake,
            requests: Mutex::new(
                Rank::RbdRequests,
                Requests {
                    pending: BTreeMap::new(),
                    next: 0,
                    quiet_since: Instant::now(),
                    are_given_up: false,
                },
            ),
            is_ending: AtomicBool::new(false),
            is_fenced: AtomicBool::new(false),
            lost_errno: Default::default(),
            stats: Default::default(),
        });
        let of_thread = shared.clone();
        let thread = thread::Builder::new().name("fjord-rbd".into()).spawn(move || run(&of_thread));
        let thread = thread.map_err(|error| {
            let errno = error.raw_os_error().unwrap_or(libc::EAGAIN);
            shared.image.name.failed(errno, format!("starting a thread: {error}"))
        })?;
        Ok(Events { shared, thread: Some(thread) })
    }

    /// What requests share with the thread.
    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        self.shared.is_ending.store(true, Ordering::Release);
        // The counter cannot overflow: the thread takes it off.
        let _ = rustix::io::write(&self.shared.wake, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            // A panic of it has been told.
            let _ = thread.join();
        }
    }
}

fn run(shared: &Shared) {
    let mut count = [0; 8];
    let mut told = false;
    loop {
        if shared.wait_for_answer() {
            match rustix::io::read(&shared.wake, &mut count) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => {
                    tracing::error!(%error, "the thread for completions of librbd cannot read its eventfd");
                    return;
                }
            }
            take_all(shared);
        }
        shared.tell_of_silence(&mut told);
        let is_ending = shared.is_ending.load(Ordering::Acquire);
        if is_ending && shared.requests.lock().pending.is_empty() {
            return;
        }
    }
}

/// Ends all requests that librbd has completed.
fn take_all(shared: &Shared) {
    let (rbd, handle) = shared.image.raw();
    let mut completions: [CompletionHandle; EVENTS_LEN] = [ptr::null_mut(); EVENTS_LEN];
    loop {
        // SAFETY: the image is open, and there is room for so many.
        let count = unsafe {
            (rbd.rbd_poll_io_events)(handle, completions.as_mut_ptr(), EVENTS_LEN as i32)
        };
        let count = usize::try_from(count).unwrap_or(0);
        for &completion in &completions[..count] {
            // SAFETY: the completion is one of `Shared::send`; librbd is done with it, and tells of it once.
            let (number, value) = unsafe {
                let number = (rbd.rbd_aio_get_arg)(completion).addr();
                let value = (rbd.rbd_aio_get_return_value)(completion);
                (rbd.rbd_aio_release)(completion);
                (number, value)
            };
            shared.end(number, value);
        }
        if count < EVENTS_LEN {
            return;
        }
    }
}
