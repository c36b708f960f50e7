//! An image as a device.
//!
//! Owns the way of requests to librbd. An acknowledged write is stable on all acting replicas (librbd's cache is
//! off), so there is no volatile cache and a flush has nothing to do; there is no order among writes under way, so
//! order ends by acknowledgement; a write within one object happens as a whole or not at all.
//!
//! Invariant: an image that is open for writing has its exclusive lock, until [`Device::release`].

use std::fmt;
use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use fjord_block::{
    AlignedBuf, Buf, Capabilities, Class, Device, DeviceStats, ErrorSink, IoError, IoErrorKind,
    IoOp, IoResult, OpenError, ReadSlot, ReadTicket, Reflink, RemoteOptions, Request,
    SnapshotError, SnapshotOptions, SnapshotReport, Ticket,
};

use crate::events::{Data, Events, Pending, Shared};
use crate::image::Image;
use crate::lock;
use crate::name::{RbdName, Step};
use crate::pool::Pool;
use crate::snapshot;

/// Requests that keep a few OSDs busy.
const QUEUE_DEPTH: u32 = 128;

/// An open image.
pub(crate) struct RbdDevice {
    capabilities: Capabilities,
    size_bytes: AtomicU64,
    object_bytes: u64,
    is_locked: AtomicBool,
    /// A copy is under way.
    is_copied: AtomicBool,
    events: Events,
}

impl RbdDevice {
    /// Opens an image; for writing, takes its lock first.
    pub(crate) fn open(name: RbdName, options: &RemoteOptions<'_>) -> Result<RbdDevice, OpenError> {
        if name.snapshot.is_some() && !options.read_only {
            let what = "a snapshot cannot be written; one of an image that was mounted has a journal to replay: \
                 `fjord snapshot` makes a recovered copy, `-o ro,noload` shows it as it is";
            return Err(name.failed(libc::EROFS, what));
        }
        let pool = Arc::new(Pool::connect(&name)?);
        let image = Image::open(pool, name, options.read_only)?;
        if !options.read_only {
            lock::take(&image, options)?;
        }
        let has_cache = image.has_cache()?;
        let object_bytes = image.stripe_unit_bytes()?;
        let size_bytes = image.size_bytes().map_err(|code| image.name.refused(Step::Look, code))?;
        Ok(RbdDevice {
            capabilities: Capabilities {
                volatile_cache: has_cache,
                fua: false,
                native_barrier: false,
                discard: true,
                queue_depth: QUEUE_DEPTH,
                logical_block_size: 512,
                read_only: options.read_only,
            },
            size_bytes: AtomicU64::new(size_bytes),
            object_bytes,
            is_locked: AtomicBool::new(!options.read_only),
            is_copied: AtomicBool::new(false),
            events: Events::start(image)?,
        })
    }

    fn shared(&self) -> &Arc<Shared> {
        self.events.shared()
    }

    fn sink(&self) -> Arc<dyn ErrorSink> {
        self.shared().clone()
    }

    /// Refuses what cannot be done.
    fn refuse(&self, op: IoOp, offset: u64, len: u64) -> IoResult {
        let failed = |kind| Err(IoError::new(kind, op, offset, len));
        if op != IoOp::Read && op != IoOp::Flush && self.capabilities.read_only {
            return failed(IoErrorKind::ReadOnly);
        }
        if op != IoOp::Read
            && let Some(kind) = self.shared().stopped()
        {
            return failed(kind);
        }
        match offset.checked_add(len) {
            Some(end) if end <= self.size_bytes() => Ok(()),
            _ => failed(IoErrorKind::OutOfRange),
        }
    }

    fn count(&self, request: &Request) {
        let stats = &self.shared().stats;
        match request {
            Request::Write { bufs, fua, class, .. } => stats.write(*class, bytes_of(bufs), *fua),
            Request::Flush { class } => stats.flush(*class),
            Request::Discard { len, .. } => stats.discard(*len),
            Request::WriteZeroes { len, .. } => stats.write_zeroes(*len),
        }
    }

    /// Copies what it is at one moment. Needs no lock: the cluster has the holder make the snapshot.
    fn copy(
        &self,
        out: &File,
        options: &SnapshotOptions<'_>,
    ) -> Result<SnapshotReport, SnapshotError> {
        let image = &self.shared().image;
        if !self.capabilities.read_only || image.name.snapshot.is_some() {
            return snapshot::copy(image, out, options);
        }
        let doing = "opening the image to make a snapshot";
        let failed = |error| SnapshotError::Cluster { doing, source: io::Error::other(error) };
        snapshot::copy(&image.writable().map_err(failed)?, out, options)
    }

    fn submit_one(&self, request: Request) -> Ticket {
        self.count(&request);
        let shared = self.shared();
        let extent @ (op, offset, len) = request.extent();
        let mut refused = self.refuse(op, offset, len);
        if let (Request::Flush { .. }, Ok(())) = (&request, &refused) {
            refused = match shared.lost_errno.load(Ordering::Acquire) {
                0 => Ok(()),
                errno => Err(IoError::new(IoErrorKind::Earlier(errno), op, offset, len)),
            };
        }
        // What is acknowledged is stable, unless librbd has a cache.
        let is_nothing = match op {
            IoOp::Flush => !self.capabilities.volatile_cache,
            _ => len == 0,
        };
        let is_done = refused.is_err() || is_nothing;
        if is_done {
            if refused.is_err() {
                shared.stats.error();
            }
            return Ticket::ready(refused);
        }
        let (ticket, completer) = Ticket::pending(Some(self.sink()));
        let data = match request {
            Request::Write { bufs, .. } => Data::Write(bufs),
            Request::Flush { .. } | Request::Discard { .. } | Request::WriteZeroes { .. } => {
                Data::Nothing
            }
        };
        let pending = Pending::new(extent, completer, data);
        shared.send(pending, |rbd, image, (parts, count), completion| {
            // SAFETY: the image is open, and the buffers live until the request ends.
            unsafe {
                match op {
                    IoOp::Write => (rbd.rbd_aio_writev)(image, parts, count, offset, completion),
                    IoOp::Discard => (rbd.rbd_aio_discard)(image, offset, len, completion),
                    IoOp::WriteZeroes => {
                        (rbd.rbd_aio_write_zeroes)(image, offset, len as usize, completion, 0, 0)
                    }
                    _ => (rbd.rbd_aio_flush)(image, completion),
                }
            }
        });
        ticket
    }
}

fn bytes_of(bufs: &[Buf]) -> u64 {
    bufs.iter().map(|buf| buf.len() as u64).sum()
}

impl Device for RbdDevice {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn size_bytes(&self) -> u64 {
        self.size_bytes.load(Ordering::Acquire)
    }

    fn set_size(&self, size_bytes: u64) -> IoResult {
        if self.capabilities.read_only {
            return Err(IoError::new(IoErrorKind::ReadOnly, IoOp::SetSize, 0, size_bytes));
        }
        let shared = self.shared();
        let resized = shared.image.resize(size_bytes);
        resized.map_err(|code| shared.failed(-code, IoOp::SetSize, 0, size_bytes))?;
        self.size_bytes.store(size_bytes, Ordering::Release);
        Ok(())
    }

    fn ensure_size(&self, size_bytes: u64) -> Result<u64, IoError> {
        let shared = self.shared();
        // `rbd resize` may have been called meanwhile.
        let failed = |code: i32| shared.failed(-code, IoOp::SetSize, 0, size_bytes);
        let has_bytes = shared.image.size_bytes().map_err(failed)?;
        self.size_bytes.store(has_bytes, Ordering::Release);
        if has_bytes >= size_bytes {
            return Ok(has_bytes);
        }
        self.set_size(size_bytes)?;
        Ok(size_bytes)
    }

    fn check(&self) -> IoResult {
        match self.shared().stopped() {
            Some(kind) => Err(IoError::new(kind, IoOp::Check, 0, 0)),
            None => Ok(()),
        }
    }

    fn submit(&self, batch: Vec<Request>) -> Vec<Ticket> {
        batch.into_iter().map(|request| self.submit_one(request)).collect()
    }

    fn submit_read(&self, offset: u64, bufs: Vec<AlignedBuf>, class: Class) -> ReadTicket {
        let len = bufs.iter().map(|buf| buf.len() as u64).sum();
        let shared = self.shared();
        shared.stats.read(class, len);
        if let Err(error) = self.refuse(IoOp::Read, offset, len) {
            shared.stats.error();
            return ReadTicket::ready(Err(error));
        }
        if len == 0 {
            return ReadTicket::ready(Ok(bufs));
        }
        let (ticket, completer) = Ticket::pending(Some(self.sink()));
        let slot = ReadSlot::default();
        let data = Data::Read(bufs, slot.clone());
        let pending = Pending::new((IoOp::Read, offset, len), completer, data);
        shared.send(pending, |rbd, image, (parts, count), completion| {
            // SAFETY: the image is open; buffers and list live until the request ends.
            unsafe { (rbd.rbd_aio_readv)(image, parts, count, offset, completion) }
        });
        ReadTicket::new(ticket, slot)
    }

    fn stats(&self) -> DeviceStats {
        self.shared().stats.snapshot()
    }

    fn object_bytes(&self) -> Option<u64> {
        Some(self.object_bytes)
    }

    fn silence(&self) -> Duration {
        self.shared().silence()
    }

    fn give_up(&self) {
        self.shared().give_up();
    }

    fn snapshot_to(
        &self,
        out: &File,
        options: &SnapshotOptions<'_>,
    ) -> Result<SnapshotReport, SnapshotError> {
        if options.reflink == Reflink::Always {
            let why = "the image lies on a cluster";
            return Err(SnapshotError::NoReflink(io::Error::new(io::ErrorKind::Unsupported, why)));
        }
        if self.is_copied.swap(true, Ordering::AcqRel) {
            return Err(SnapshotError::Busy);
        }
        let copied = self.copy(out, options);
        self.is_copied.store(false, Ordering::Release);
        copied
    }

    fn release(&self) {
        // The cluster gives up the lock of whoever does not answer it.
        if self.is_locked.swap(false, Ordering::AcqRel) && !self.shared().is_given_up() {
            let image = &self.shared().image;
            let code = image.lock_release();
            if code < 0 && !self.shared().is_fenced.load(Ordering::Acquire) {
                let image = image.name.path().display();
                tracing::warn!(code, "{image}: giving up the exclusive lock failed");
            }
        }
    }
}

impl Drop for RbdDevice {
    fn drop(&mut self) {
        self.release();
    }
}

impl fmt::Debug for RbdDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RbdDevice({})", self.shared().image.name.path().display())
    }
}
