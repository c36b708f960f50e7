//! System calls on the open file. Owns the file descriptors; each call here blocks until done.
//!
//! Invariants:
//! - transfers use the direct descriptor if every address, length and offset is aligned for it,
//!   else the buffered one; the kernel keeps the two coherent;
//! - a call returns Ok only if every byte was transferred: short transfers are continued, EINTR and
//!   EAGAIN retried;
//! - reads and flushes fail on a file that has become shorter since it was opened;
//! - offsets are those of the device; only the system calls know that it may begin further back in the
//!   file ([`RawFile::place`]).

use std::io::{IoSlice, IoSliceMut};
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rustix::fs::{AtFlags, FallocateFlags, SeekFrom, StatxFlags};
use rustix::io::{Errno, ReadWriteFlags};
use smallvec::SmallVec;

use super::lock::{self, Claim};
use super::room::Room;
use crate::buf::{AlignedBuf, Buf};
use crate::device::bufs_len;
use crate::error::{IoError, IoErrorKind, IoOp, OpenError};
use crate::ticket::IoResult;

/// The most pieces that one vectored call takes (IOV_MAX).
pub(super) const IOV_COUNT_MAX: usize = 1024;
/// Zeroes written at a time if the file system cannot zero a range.
const ZERO_BYTES: usize = 1 << 20;
/// `_IO(0x12, 119)` of linux/fs.h.
const BLKDISCARD: libc::c_ulong = 0x1277;

/// The descriptors of one image, and their requirements.
#[derive(Debug)]
pub(super) struct RawFile {
    /// Opened with O_DIRECT, if supported.
    pub(super) direct: Option<OwnedFd>,
    /// Opened without O_DIRECT. Holds the lock of the image.
    pub(super) buffered: OwnedFd,
    /// The claim of a block device; `None` for files.
    pub(super) claim: Option<Claim>,
    /// Of a loop device: its backing file, locked as if it were the image.
    pub(super) backing_lock: Option<OwnedFd>,
    /// Alignment of direct transfers: of offsets and lengths, and of addresses, in bytes.
    pub(super) direct_align: usize,
    pub(super) memory_align: usize,
    pub(super) is_block_device: bool,
    /// A write with RWF_DSYNC is durable when it returns. Else FUA is a write and a flush.
    pub(super) trusts_dsync: bool,
    /// Where the device begins in the file, in bytes.
    pub(super) start: u64,
    /// The device is a range of the file, and so of fixed size.
    pub(super) is_range: bool,
    /// Size of the device.
    pub(super) size_bytes: AtomicU64,
    /// Changes of the size that have begun, and that have ended: while they differ, the size of the file and that
    /// of the device may.
    pub(super) size_changes: [AtomicU64; 2],
    /// The allocated space of a file that is open for writing, if it is tracked.
    pub(super) room: Option<Room>,
    /// For messages.
    pub(super) path: PathBuf,
    /// The truncation has been logged.
    pub(super) told_truncated: AtomicBool,
}

/// Which descriptor a transfer uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Route {
    Direct,
    Buffered,
}

impl RawFile {
    pub(super) fn size_bytes(&self) -> u64 {
        self.size_bytes.load(Ordering::Acquire)
    }

    /// Where in the file an offset of the device lies. No overflow: requests are checked against the size.
    pub(super) fn place(&self, offset: u64) -> u64 {
        self.start + offset
    }

    /// The bytes of the file that are the device, if it is not all of the file.
    pub(super) fn range(&self) -> Option<Range<u64>> {
        self.is_range.then(|| self.start..self.start + self.size_bytes())
    }

    /// The offset in the device that lseek(2) with SEEK_HOLE or SEEK_DATA finds.
    pub(super) fn seek(
        &self,
        wanted: impl FnOnce(u64) -> SeekFrom,
        offset: u64,
    ) -> Result<u64, Errno> {
        let found = rustix::fs::seek(&self.buffered, wanted(self.place(offset)))?;
        Ok(found.saturating_sub(self.start))
    }

    /// The descriptor for a transfer of the pieces (address, length) at `offset`.
    pub(super) fn route(
        &self,
        offset: u64,
        mut pieces: impl Iterator<Item = (usize, usize)>,
    ) -> Route {
        let aligned = self.direct.is_some()
            && self.place(offset).is_multiple_of(self.direct_align as u64)
            && pieces.all(|(address, len)| {
                address.is_multiple_of(self.memory_align) && len.is_multiple_of(self.direct_align)
            });
        if aligned { Route::Direct } else { Route::Buffered }
    }

    pub(super) fn fd(&self, route: Route) -> BorrowedFd<'_> {
        match (route, &self.direct) {
            (Route::Direct, Some(direct)) => direct.as_fd(),
            _ => self.buffered.as_fd(),
        }
    }

    /// Writes all of `bufs` from `offset` on, the first `done` bytes excepted.
    pub(super) fn write(&self, offset: u64, bufs: &[Buf], fua: bool, mut done: u64) -> IoResult {
        let len = bufs_len(bufs);
        let flags = if fua { ReadWriteFlags::DSYNC } else { ReadWriteFlags::empty() };
        while done < len {
            let slices: SmallVec<[IoSlice<'_>; 16]> = tails(bufs, done).map(IoSlice::new).collect();
            let fd = self
                .fd(self.route(offset + done, slices.iter().map(|s| (s.as_ptr().addr(), s.len()))));
            match rustix::io::pwritev2(fd, &slices, self.place(offset + done), flags) {
                Ok(0) => return Err(IoError::os(libc::ENOSPC, IoOp::Write, offset, len)),
                Ok(count) => done += count as u64,
                Err(Errno::INTR | Errno::AGAIN) => {}
                Err(errno) => {
                    return Err(IoError::os(errno.raw_os_error(), IoOp::Write, offset, len));
                }
            }
        }
        Ok(())
    }

    /// Fills all of `bufs` from `offset` on, the first `done` bytes excepted.
    pub(super) fn read(&self, offset: u64, bufs: &mut [AlignedBuf], mut done: u64) -> IoResult {
        let len = bufs_len(bufs);
        while done < len {
            let mut slices: Vec<IoSliceMut> = tails_mut(bufs, done).map(IoSliceMut::new).collect();
            let fd = self
                .fd(self.route(offset + done, slices.iter().map(|s| (s.as_ptr().addr(), s.len()))));
            match rustix::io::preadv(fd, &mut slices, self.place(offset + done)) {
                Ok(0) => {
                    let kind = self.why_short();
                    return Err(IoError::new(kind, IoOp::Read, offset, len));
                }
                Ok(count) => done += count as u64,
                Err(Errno::INTR | Errno::AGAIN) => {}
                Err(errno) => {
                    return Err(IoError::os(errno.raw_os_error(), IoOp::Read, offset, len));
                }
            }
        }
        Ok(())
    }

    /// Makes completed writes durable. An error is final: the kernel reports it once.
    pub(super) fn flush(&self) -> IoResult {
        loop {
            match rustix::fs::fdatasync(&self.buffered) {
                // The flush must fail if a part of the file is gone.
                Ok(()) => return self.check(IoOp::Flush),
                // Interrupted before it did anything; a real failure is never EINTR.
                Err(Errno::INTR) => {}
                Err(errno) => return Err(IoError::os(errno.raw_os_error(), IoOp::Flush, 0, 0)),
            }
        }
    }

    /// Fails if the file is shorter than when it was opened.
    pub(super) fn check(&self, op: IoOp) -> IoResult {
        match self.truncated_to() {
            Some(size_bytes) => Err(IoError::new(IoErrorKind::Truncated { size_bytes }, op, 0, 0)),
            None => Ok(()),
        }
    }

    /// Why a read found the end of the file.
    pub(super) fn why_short(&self) -> IoErrorKind {
        let truncated = |size_bytes| IoErrorKind::Truncated { size_bytes };
        self.truncated_to().map_or(IoErrorKind::UnexpectedEof, truncated)
    }

    /// The size in bytes that the file has now. Only the size is asked for: whoever asks for the
    /// times makes each later write update them (multigrain timestamps, Linux 6.13), and a write
    /// with O_DSYNC then takes half as long again.
    fn present_size(&self) -> Option<u64> {
        let flags = AtFlags::EMPTY_PATH;
        match rustix::fs::statx(&self.buffered, "", flags, StatxFlags::SIZE) {
            Ok(stat) => Some(stat.stx_size),
            Err(Errno::NOSYS) => {
                u64::try_from(rustix::fs::fstat(&self.buffered).ok()?.st_size).ok()
            }
            Err(_) => None,
        }
    }

    /// The size in bytes of a truncated file. Logs the first time.
    fn truncated_to(&self) -> Option<u64> {
        if self.is_block_device {
            return None;
        }
        let (size_bytes, expected_bytes) = loop {
            let begun = self.size_changes[0].load(Ordering::SeqCst);
            let is_stable = self.size_changes[1].load(Ordering::SeqCst) == begun;
            let size_bytes = self.present_size()?;
            let expected_bytes = self.place(self.size_bytes());
            if size_bytes >= expected_bytes {
                return None;
            }
            if is_stable && self.size_changes[0].load(Ordering::SeqCst) == begun {
                break (size_bytes, expected_bytes);
            }
            // Another thread changes the size: one of the two is older than the other.
            std::thread::yield_now();
        };
        if !self.told_truncated.swap(true, Ordering::Relaxed) {
            let image = self.path.display();
            tracing::error!(%image, size_bytes, expected_bytes, "the image file was truncated");
        }
        Some(size_bytes)
    }

    pub(super) fn discard(&self, offset: u64, len: u64) -> IoResult {
        let Some(room) = &self.room else { return self.discard_now(offset, len) };
        room.while_holes_come(offset..offset.saturating_add(len), || self.discard_now(offset, len))
    }

    fn discard_now(&self, offset: u64, len: u64) -> IoResult {
        let result = if self.is_block_device {
            let range = [self.place(offset), len];
            // SAFETY: BLKDISCARD reads two u64 from the pointer, which is valid for the call.
            match unsafe { libc::ioctl(self.buffered.as_raw_fd(), BLKDISCARD, range.as_ptr()) } {
                0 => Ok(()),
                _ => Err(last_errno()),
            }
        } else {
            self.fallocate(FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, offset, len)
        };
        result.map_err(|errno| os_error(errno, IoOp::Discard, offset, len))
    }

    pub(super) fn write_zeroes(&self, offset: u64, len: u64) -> IoResult {
        match self.fallocate(FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE, offset, len) {
            Ok(()) => Ok(()),
            Err(libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL) => {
                self.write_zeroes_plainly(offset, len)
            }
            Err(errno) => Err(os_error(errno, IoOp::WriteZeroes, offset, len)),
        }
    }

    pub(super) fn write_zeroes_plainly(&self, offset: u64, len: u64) -> IoResult {
        let zeroes = Buf::zeroed(len.min(ZERO_BYTES as u64) as usize);
        let mut done = 0;
        while done < len {
            let take = (len - done).min(zeroes.len() as u64) as usize;
            let chunk = if take == zeroes.len() { zeroes.clone() } else { Buf::zeroed(take) };
            self.write(offset + done, &[chunk], false, 0)
                .map_err(|error| IoError::new(error.kind, IoOp::WriteZeroes, offset, len))?;
            done += take as u64;
        }
        Ok(())
    }

    pub(super) fn fallocate(
        &self,
        flags: FallocateFlags,
        offset: u64,
        len: u64,
    ) -> Result<(), i32> {
        loop {
            match rustix::fs::fallocate(&self.buffered, flags, self.place(offset), len) {
                Ok(()) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.raw_os_error()),
            }
        }
    }

    /// Releases the lock of a file, which tickets not yet dropped would keep.
    pub(super) fn unlock(&self) {
        // A block device keeps its lock as long as it is open.
        let file = Some(&self.buffered).filter(|_| !self.is_block_device);
        for fd in file.into_iter().chain(&self.backing_lock) {
            lock::unlock_range(fd);
            // Fails if locks are not supported.
            let _ = rustix::fs::flock(fd, rustix::fs::FlockOperation::Unlock);
        }
    }

    /// See [`crate::device::Device::claim`].
    pub(super) fn claim(&self, alone: bool) -> Result<(), OpenError> {
        match &self.claim {
            Some(claim) if alone => claim.take(&self.buffered),
            Some(claim) => {
                claim.give_up();
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// Runs a change of the size.
    fn change_size<T>(&self, change: impl FnOnce() -> T) -> T {
        let [begun, ended] = &self.size_changes;
        begun.fetch_add(1, Ordering::SeqCst);
        let result = change();
        ended.fetch_add(1, Ordering::SeqCst);
        result
    }

    pub(super) fn set_size(&self, size_bytes: u64) -> IoResult {
        if self.is_block_device || self.is_range {
            return Err(IoError::new(IoErrorKind::Unsupported, IoOp::SetSize, 0, size_bytes));
        }
        self.change_size(|| self.set_size_now(size_bytes))
    }

    fn set_size_now(&self, size_bytes: u64) -> IoResult {
        let before_bytes = self.size_bytes();
        // Requests beyond it are refused from here on.
        self.size_bytes.fetch_min(size_bytes, Ordering::AcqRel);
        let set = || rustix::fs::ftruncate(&self.buffered, size_bytes);
        let result = match &self.room {
            Some(room) => room.while_holes_come(size_bytes.min(before_bytes)..before_bytes, set),
            None => set(),
        };
        let after_bytes = if result.is_ok() { size_bytes } else { before_bytes };
        self.size_bytes.store(after_bytes, Ordering::Release);
        result.map_err(|errno| IoError::os(errno.raw_os_error(), IoOp::SetSize, 0, size_bytes))
    }

    /// See [`crate::device::Device::ensure_size`].
    pub(super) fn ensure_size(&self, size_bytes: u64) -> Result<u64, IoError> {
        if self.is_range {
            return Ok(self.size_bytes());
        }
        self.change_size(|| self.ensure_size_now(size_bytes))
    }

    fn ensure_size_now(&self, size_bytes: u64) -> Result<u64, IoError> {
        let failed = |errno: Errno| IoError::os(errno.raw_os_error(), IoOp::SetSize, 0, size_bytes);
        // Transfers name their offsets, so that nobody needs the position.
        let found_bytes = rustix::fs::seek(&self.buffered, SeekFrom::End(0)).map_err(failed)?;
        let mut has_bytes = found_bytes;
        if found_bytes < size_bytes && !self.is_block_device {
            rustix::fs::ftruncate(&self.buffered, size_bytes).map_err(failed)?;
            has_bytes = size_bytes;
        }
        self.size_bytes.fetch_max(has_bytes, Ordering::AcqRel);
        Ok(has_bytes)
    }
}

fn last_errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}

fn os_error(errno: i32, op: IoOp, offset: u64, len: u64) -> IoError {
    match errno {
        libc::EOPNOTSUPP | libc::ENOTTY => IoError::new(IoErrorKind::Unsupported, op, offset, len),
        _ => IoError::os(errno, op, offset, len),
    }
}

/// The parts of `bufs` after the first `skip` bytes, at most IOV_MAX of them.
fn tails(bufs: &[Buf], skip: u64) -> impl Iterator<Item = &[u8]> {
    let mut skip = skip;
    bufs.iter()
        .filter_map(move |buf| {
            let cut = skip.min(buf.len() as u64) as usize;
            skip -= cut as u64;
            (cut < buf.len()).then(|| &buf[cut..])
        })
        .take(IOV_COUNT_MAX)
}

/// As [`tails`], to write into.
fn tails_mut(bufs: &mut [AlignedBuf], skip: u64) -> impl Iterator<Item = &mut [u8]> {
    let mut skip = skip;
    bufs.iter_mut()
        .filter_map(move |buf| {
            let cut = skip.min(buf.len() as u64) as usize;
            skip -= cut as u64;
            (cut < buf.len()).then(|| &mut buf[cut..])
        })
        .take(IOV_COUNT_MAX)
}
