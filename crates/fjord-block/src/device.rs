//! The device interface: requests, classes, orders, capabilities. Owns no state.
//!
//! Addresses are byte offsets. Order and durability are separate: a write has an [`Order`] and may
//! ask FUA; a flush is its own request ("The order-preserving block device layer", section 3 of
//! *Barrier-Enabled IO Stack for Flash Storage*, FAST '18).
//!
//! Guarantees of a backend:
//! - requests run in any order, also those of one batch. A backend passes [`Order`] on but does not
//!   enforce it; the epoch scheduler, a [`Device`] above the backend, does. Without it, callers
//!   order by waiting and flushing;
//! - a flush makes durable every write that *completed before the flush was submitted*;
//! - once a flush has failed, every later flush fails until the device is opened again;
//! - every request completes, with or without a waiter, and its buffers live until then;
//! - requests in flight together that overlap have an undefined outcome per byte; the same holds
//!   for a request not aligned to `logical_block_size` and others in the same 4096-byte page.

use std::fmt;
use std::fs::File;
use std::sync::Arc;
use std::time::Duration;

use crate::buf::{AlignedBuf, Buf};
use crate::error::{IoError, IoErrorKind, IoOp, OpenError};
use crate::snapshot::{SnapshotError, SnapshotOptions, SnapshotReport};
use crate::stats::DeviceStats;
use crate::ticket::{IoResult, ReadTicket, Ticket};

/// Order of a write relative to other writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Order {
    /// May cross epochs freely (REQ_ORDERED unset in the paper).
    #[default]
    Orderless,
    /// Belongs to the current epoch.
    Ordered,
    /// Belongs to the current epoch and ends it.
    Barrier,
}

/// Class (priority) of a request: who waits for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Class {
    /// A thread waits for it, or is about to. The backend may leave the work to that thread's
    /// `wait()`; see [`Ticket::start`].
    #[default]
    Sync = 0,
    /// Dispatched at once; no thread waits for it yet.
    Async = 1,
    /// Writeback that must not delay other requests.
    Background = 2,
}

/// A request that changes the device.
#[derive(Clone, Debug)]
pub enum Request {
    /// Writes `bufs`, concatenated, at byte `offset`.
    Write {
        /// Where, in bytes.
        offset: u64,
        /// The data; shared buffers stay unchanged until the request is done.
        bufs: Vec<Buf>,
        /// Its order relative to other writes.
        order: Order,
        /// Durable by itself when done.
        fua: bool,
        /// Who waits.
        class: Class,
    },
    /// Makes durable all writes that completed before the submission.
    Flush {
        /// Who waits.
        class: Class,
    },
    /// The range's contents are no longer needed; it may read as anything until written.
    Discard {
        /// Where, in bytes.
        offset: u64,
        /// How many bytes.
        len: u64,
    },
    /// The range reads as zeroes from now on.
    WriteZeroes {
        /// Where, in bytes.
        offset: u64,
        /// How many bytes.
        len: u64,
    },
}

impl Request {
    /// An orderless write of class `Sync` without FUA.
    pub fn write(offset: u64, bufs: Vec<Buf>) -> Request {
        Request::Write { offset, bufs, order: Order::Orderless, fua: false, class: Class::Sync }
    }

    /// A flush of class `Sync`.
    pub fn flush() -> Request {
        Request::Flush { class: Class::Sync }
    }

    /// Kind, byte offset and length (0 and 0 for a flush).
    pub fn extent(&self) -> (IoOp, u64, u64) {
        match self {
            Request::Write { offset, bufs, .. } => (IoOp::Write, *offset, bufs_len(bufs)),
            Request::Flush { .. } => (IoOp::Flush, 0, 0),
            Request::Discard { offset, len } => (IoOp::Discard, *offset, *len),
            Request::WriteZeroes { offset, len } => (IoOp::WriteZeroes, *offset, *len),
        }
    }
}

/// The sum of the buffers' lengths in bytes.
pub(crate) fn bufs_len<B: std::ops::Deref<Target = [u8]>>(bufs: &[B]) -> u64 {
    bufs.iter().map(|buf| buf.len() as u64).sum()
}

/// Checks that `len` bytes from `offset` on lie on a device of `size` bytes.
pub(crate) fn check_range(op: IoOp, offset: u64, len: u64, size: u64) -> IoResult {
    match offset.checked_add(len) {
        Some(end) if end <= size => Ok(()),
        _ => Err(IoError::new(IoErrorKind::OutOfRange, op, offset, len)),
    }
}

/// Capabilities and preferences of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// Completed writes may be lost in a power cut until they are flushed.
    pub volatile_cache: bool,
    /// FUA costs less than a write and a flush. (FUA always works.)
    pub fua: bool,
    /// The device keeps the order of barrier writes: all writes of the epochs up to a barrier, and
    /// all other writes that had completed when the barrier was submitted, are durable before any
    /// later ordered write.
    pub native_barrier: bool,
    /// Discard frees space.
    pub discard: bool,
    /// Number of requests in flight that saturate the device.
    pub queue_depth: u32,
    /// Unit in bytes that is written without read-modify-write; a power cut tears writes only at
    /// its borders. Other offsets and lengths work, more slowly.
    pub logical_block_size: u32,
    /// Writes are refused.
    pub read_only: bool,
}

/// A block device.
pub trait Device: Send + Sync + fmt::Debug {
    /// Capabilities of the device; fixed while it is open.
    fn capabilities(&self) -> &Capabilities;

    /// Its size in bytes. Requests beyond it fail with [`IoErrorKind::OutOfRange`].
    fn size_bytes(&self) -> u64;

    /// Changes the size, if possible (files and memory). New space reads as zeroes.
    fn set_size(&self, size_bytes: u64) -> IoResult {
        Err(IoError::new(IoErrorKind::Unsupported, IoOp::SetSize, 0, size_bytes))
    }

    /// Ensures that the device has at least `size_bytes`, if it can grow, and returns its size. Space
    /// that was added below since the device was opened counts; nothing is cut off. New space reads
    /// as zeroes; space found may hold anything.
    ///
    /// # Errors
    /// Those of the host file system. A device that cannot grow (a block device) returns its size.
    fn ensure_size(&self, size_bytes: u64) -> Result<u64, IoError> {
        let has_bytes = self.size_bytes();
        if has_bytes >= size_bytes {
            return Ok(has_bytes);
        }
        match self.set_size(size_bytes) {
            Ok(()) => Ok(size_bytes),
            Err(error) if error.kind == IoErrorKind::Unsupported => Ok(has_bytes),
            Err(error) => Err(error),
        }
    }

    /// Allocates space for a write of the range: in a sparse image file, holes get blocks, and
    /// existing contents stay. Costs nothing if the space is allocated. Called before anything
    /// depends on the write, it reports a full disk while there is nothing to undo.
    ///
    /// A host file system that needs space for overwriting (copy on write) may still fail the
    /// write.
    ///
    /// # Errors
    /// [`IoError::is_no_space`], and other failures of the host file system.
    fn ensure_room(&self, offset: u64, len: u64) -> IoResult {
        let _ = (offset, len);
        Ok(())
    }

    /// Checks that the device is unchanged since the open: a file may have been truncated.
    ///
    /// # Errors
    /// [`IoErrorKind::Truncated`].
    fn check(&self) -> IoResult {
        Ok(())
    }

    /// Submits requests and returns one ticket for each, in order, without waiting for the device.
    /// The requests of a batch may run in any order, so a flush covers none of its own batch.
    fn submit(&self, batch: Vec<Request>) -> Vec<Ticket>;

    /// Submits a flush that a failed write does not fail: it makes durable every write that
    /// completed successfully before the submission, and fails only if a flush fails. On a device
    /// that keeps no order this is an ordinary flush.
    fn flush_completed(&self) -> Ticket {
        let missing =
            || Ticket::ready(Err(IoError::new(IoErrorKind::Abandoned, IoOp::Flush, 0, 0)));
        self.submit(vec![Request::flush()]).pop().unwrap_or_else(missing)
    }

    /// Submits a read that fills `bufs`, concatenated, from byte `offset`.
    fn submit_read(&self, offset: u64, bufs: Vec<AlignedBuf>, class: Class) -> ReadTicket;

    /// Whether the device keeps order for its callers: [`Order`] is enforced, requests of a batch
    /// are taken in the order of the batch, and a flush also covers all ordered writes submitted
    /// before it. True for the epoch scheduler only; a native barrier alone is not sufficient.
    fn keeps_order(&self) -> bool {
        false
    }

    /// Statistics since the device was opened.
    fn stats(&self) -> DeviceStats {
        DeviceStats::default()
    }

    /// Size of the objects in which the bytes of the device lie one after the other, on a cluster: a write within one
    /// happens as a whole or not at all, and is one request there.
    fn object_bytes(&self) -> Option<u64> {
        None
    }

    /// How long requests have been under way without an answer to any; zero if none are. Devices that always
    /// answer do not count.
    fn silence(&self) -> Duration {
        Duration::ZERO
    }

    /// Fails all requests under way, and all later ones, with [`IoErrorKind::GivenUp`]: for whoever has to end
    /// and cannot wait for a device that does not answer. A write that was under way may happen all the same.
    /// No effect on devices that always answer.
    fn give_up(&self) {}

    /// Ends the use of the device although references to it may remain: unlocks the image, if that
    /// is possible before the last reference is dropped (files, not block devices). Nothing may be
    /// submitted afterwards.
    fn release(&self) {}

    /// Claims a block device exclusively (`true`, the state after an open for writing), or releases
    /// it so that mount(2) can claim it (`false`). No effect on image files and on devices that are
    /// open read-only.
    ///
    /// # Errors
    /// Another process or the kernel has claimed the device.
    fn claim(&self, _alone: bool) -> Result<(), OpenError> {
        Ok(())
    }

    /// Copies the device to `out`, an empty regular file open for writing, as of one moment during
    /// this call: the copy includes every change that completed before the call; and if it includes
    /// a change, it includes all that completed before that one was submitted (as after a power cut
    /// that loses no completed change). The copy is not durable. The device stays in use, except
    /// for a pause. If blocks are not shared, aligned zeroes of 4096 bytes become holes.
    ///
    /// # Errors
    /// [`SnapshotError`]; the contents of `out` are then undefined. `Unsupported` if the device is
    /// not a file.
    fn snapshot_to(
        &self,
        out: &File,
        options: &SnapshotOptions<'_>,
    ) -> Result<SnapshotReport, SnapshotError> {
        let _ = (out, options);
        Err(SnapshotError::Unsupported)
    }
}

impl<D: Device + ?Sized> Device for Arc<D> {
    fn capabilities(&self) -> &Capabilities {
        (**self).capabilities()
    }
    fn size_bytes(&self) -> u64 {
        (**self).size_bytes()
    }
    fn set_size(&self, size_bytes: u64) -> IoResult {
        (**self).set_size(size_bytes)
    }
    fn ensure_size(&self, size_bytes: u64) -> Result<u64, IoError> {
        (**self).ensure_size(size_bytes)
    }
    fn ensure_room(&self, offset: u64, len: u64) -> IoResult {
        (**self).ensure_room(offset, len)
    }
    fn check(&self) -> IoResult {
        (**self).check()
    }
    fn submit(&self, batch: Vec<Request>) -> Vec<Ticket> {
        (**self).submit(batch)
    }
    fn flush_completed(&self) -> Ticket {
        (**self).flush_completed()
    }
    fn submit_read(&self, offset: u64, bufs: Vec<AlignedBuf>, class: Class) -> ReadTicket {
        (**self).submit_read(offset, bufs, class)
    }
    fn keeps_order(&self) -> bool {
        (**self).keeps_order()
    }
    fn stats(&self) -> DeviceStats {
        (**self).stats()
    }
    fn object_bytes(&self) -> Option<u64> {
        (**self).object_bytes()
    }
    fn silence(&self) -> Duration {
        (**self).silence()
    }
    fn give_up(&self) {
        (**self).give_up();
    }
    fn release(&self) {
        (**self).release();
    }
    fn claim(&self, alone: bool) -> Result<(), OpenError> {
        (**self).claim(alone)
    }
    fn snapshot_to(
        &self,
        out: &File,
        options: &SnapshotOptions<'_>,
    ) -> Result<SnapshotReport, SnapshotError> {
        (**self).snapshot_to(out, options)
    }
}

/// The largest buffer that the helpers below allocate at once, in bytes.
const HELPER_BUF_BYTES_MAX: usize = 1 << 20;

/// Synchronous helper calls on top of [`Device`].
pub trait DeviceExt: Device {
    /// Submits one request.
    fn submit_one(&self, request: Request) -> Ticket {
        let (op, offset, len) = request.extent();
        let missing = || Ticket::ready(Err(IoError::new(IoErrorKind::Abandoned, op, offset, len)));
        self.submit(vec![request]).pop().unwrap_or_else(missing)
    }

    /// Reads into `data` from byte `offset` on and waits. Any alignment.
    fn read_exact_at(&self, offset: u64, data: &mut [u8]) -> IoResult {
        let mut at = offset;
        for chunk in data.chunks_mut(HELPER_BUF_BYTES_MAX) {
            let bufs = vec![AlignedBuf::uninit(chunk.len())];
            let bufs = self.submit_read(at, bufs, Class::Sync).wait()?;
            let mut rest = chunk;
            for buf in &bufs {
                let (head, tail) = rest.split_at_mut(buf.len().min(rest.len()));
                head.copy_from_slice(&buf[..head.len()]);
                rest = tail;
            }
            at += HELPER_BUF_BYTES_MAX as u64;
        }
        Ok(())
    }

    /// Reads one buffer of `len` bytes from byte `offset` on and waits.
    fn read_buf(&self, offset: u64, len: usize) -> Result<AlignedBuf, IoError> {
        let mut bufs =
            self.submit_read(offset, vec![AlignedBuf::uninit(len)], Class::Sync).wait()?;
        bufs.pop()
            .ok_or_else(|| IoError::new(IoErrorKind::Abandoned, IoOp::Read, offset, len as u64))
    }

    /// Writes `data` from byte `offset` on and waits for the transfer (not for durability).
    fn write_all_at(&self, offset: u64, data: &[u8]) -> IoResult {
        let mut at = offset;
        for chunk in data.chunks(HELPER_BUF_BYTES_MAX) {
            self.submit_one(Request::write(at, vec![Buf::from_slice(chunk)])).wait()?;
            at += chunk.len() as u64;
        }
        Ok(())
    }

    /// Flushes and waits.
    fn flush(&self) -> IoResult {
        self.submit_one(Request::flush()).wait()
    }
}

impl<D: Device + ?Sized> DeviceExt for D {}
