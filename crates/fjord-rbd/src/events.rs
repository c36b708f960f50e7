//! Requests under way, and the thread that ends them.
//!
//! Owns what a request needs until librbd has completed it: buffers, and the ticket to complete. librbd tells of
//! completions by an eventfd, on which one thread for each image waits: no thread for a request, and none of
//! librbd's is kept from its work.
//!
//! Invariants: a request that librbd has taken is ended by the thread, once; the thread ends after the last of
//! them; the image is open until then.

use std::ffi::c_void;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};

use fjord_block::{
    AlignedBuf, Buf, Completer, ErrorSink, IoError, IoErrorKind, IoOp, IoResult, OpenError,
    ReadSlot,
};
use libc::iovec;
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;

use crate::image::Image;
use crate::library::{CompletionHandle, ImageHandle, Rbd};

/// Completions taken at a time.
const EVENTS_LEN: usize = 64;

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
    ) -> Box<Pending> {
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
        Box::new(Pending { op, offset, len, completer, data, parts })
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

/// What requests and the thread share.
pub(crate) struct Shared {
    pub(crate) image: Image,
    wake: OwnedFd,
    /// Requests that librbd has.
    under_way: AtomicU64,
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
        pending: Box<Pending>,
        call: impl FnOnce(&Rbd, ImageHandle, Parts, CompletionHandle) -> i32,
    ) {
        let (rbd, handle) = self.image.raw();
        // The thread may end the request before `call` returns.
        let parts = pending.parts();
        let pending = Box::into_raw(pending);
        let mut completion = ptr::null_mut();
        // SAFETY: the function writes the completion. There is no callback.
        let code = unsafe {
            let create = rbd.rbd_aio_create_completion;
            create(pending.cast::<c_void>(), ptr::null(), &raw mut completion)
        };
        self.under_way.fetch_add(1, Ordering::AcqRel);
        let code = if code < 0 { code } else { call(rbd, handle, parts, completion) };
        if code < 0 {
            if !completion.is_null() {
                // SAFETY: librbd has not taken the request, so this is the only reference.
                unsafe { (rbd.rbd_aio_release)(completion) };
            }
            // SAFETY: as above: the box is ours again.
            self.end(unsafe { *Box::from_raw(pending) }, code as isize);
        }
    }

    /// Ends a request with what librbd returned: bytes, or a negative errno.
    fn end(&self, pending: Pending, value: isize) {
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
        self.under_way.fetch_sub(1, Ordering::AcqRel);
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
            under_way: AtomicU64::new(0),
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
    loop {
        match rustix::io::read(&shared.wake, &mut count) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => {
                tracing::error!(%error, "the thread for completions of librbd cannot read its eventfd");
                return;
            }
        }
        take_all(shared);
        let is_ending = shared.is_ending.load(Ordering::Acquire);
        if is_ending && shared.under_way.load(Ordering::Acquire) == 0 {
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
            // SAFETY: the completion is one of `Shared::send`, whose argument is a box; librbd is done with it,
            // and tells of it once.
            let (pending, value) = unsafe {
                let pending = (rbd.rbd_aio_get_arg)(completion).cast::<Pending>();
                let value = (rbd.rbd_aio_get_return_value)(completion);
                (rbd.rbd_aio_release)(completion);
                (*Box::from_raw(pending), value)
            };
            shared.end(pending, value);
        }
        if count < EVENTS_LEN {
            return;
        }
    }
}
