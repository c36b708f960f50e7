//! Space allocation of a sparse image file. Owns the map of allocated chunks.
//!
//! The file is divided into chunks, with a bit each that says that the whole chunk has its blocks.
//! Space is allocated before a write that other changes depend on; the first one in a chunk looks
//! for holes and allocates them (`fallocate`, which keeps contents; if the file system has none,
//! zeroes are written to the holes). Later ones read one bit.
//!
//! Invariants:
//! - bits are set, and holes made, under `changes` only, so that no bit outlives its blocks;
//! - zeroes are written to holes only, and only on file systems that cannot punch holes, so that no
//!   other write to the hole is in flight.

use std::ops::Range;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{FallocateFlags, SeekFrom};
use rustix::io::Errno;

use super::raw::RawFile;
use crate::error::{IoError, IoOp};
use crate::lock::{Mutex, Rank};
use crate::ticket::IoResult;

/// The smallest chunk: some blocks at a time are cheaper than one by one.
const CHUNK_BITS_MIN: u32 = 16;
/// The most chunks; a bit each.
const CHUNK_COUNT_MAX: u64 = 1 << 24;
/// How far one look for a hole goes, at least.
const LOOK_BYTES: u64 = 1 << 30;
/// `FS_IOC_FIEMAP` of linux/fs.h.
const FS_IOC_FIEMAP: libc::c_ulong = 0xc020_660b;
/// Extents per FIEMAP call.
const EXTENT_COUNT: usize = 32;

/// Allocation state of one file.
#[derive(Debug)]
pub(super) struct Room {
    chunk_bits: u32,
    /// By chunk of the file as it was opened: it has all its blocks.
    backed: Vec<AtomicU64>,
    /// The same for what was added since, as far as anybody asked; grows under `changes`.
    added: boxcar::Vec<AtomicU64>,
    changes: Mutex<()>,
}

impl Room {
    /// Unknown state of a file of `size_bytes`.
    pub(super) fn new(size_bytes: u64) -> Room {
        let mut chunk_bits = CHUNK_BITS_MIN;
        while size_bytes >> chunk_bits > CHUNK_COUNT_MAX {
            chunk_bits += 1;
        }
        let chunk_count = (size_bytes >> chunk_bits) + 1;
        let words = chunk_count.div_ceil(64);
        Room {
            chunk_bits,
            backed: (0..words).map(|_| AtomicU64::new(0)).collect(),
            added: boxcar::Vec::new(),
            changes: Mutex::new(Rank::FileRoom, ()),
        }
    }

    /// The word that has the bit of a chunk.
    fn word(&self, chunk: u64) -> Option<&AtomicU64> {
        let index = usize::try_from(chunk / 64).ok()?;
        match self.backed.get(index) {
            Some(word) => Some(word),
            None => self.added.get(index - self.backed.len()),
        }
    }

    /// Makes words for chunks up to `end`; the caller holds `changes`.
    fn make_words(&self, end: u64) {
        let count = usize::try_from(end.div_ceil(64)).unwrap_or(usize::MAX);
        while self.backed.len() + self.added.count() < count {
            self.added.push(AtomicU64::new(0));
        }
    }

    fn is_backed(&self, chunk: u64) -> bool {
        self.word(chunk).is_some_and(|word| word.load(Ordering::Acquire) >> (chunk % 64) & 1 == 1)
    }

    /// The chunks that `range` touches.
    fn touched(&self, range: &Range<u64>) -> Range<u64> {
        range.start >> self.chunk_bits..range.end.div_ceil(1 << self.chunk_bits)
    }

    /// Records that `range` is allocated: sets the bits of the chunks inside it.
    fn set(&self, range: &Range<u64>, size_bytes: u64) {
        let first = range.start.div_ceil(1 << self.chunk_bits);
        let end = match range.end >= size_bytes {
            true => size_bytes.div_ceil(1 << self.chunk_bits),
            false => range.end >> self.chunk_bits,
        };
        for chunk in first..end {
            let Some(word) = self.word(chunk) else { return };
            word.fetch_or(1 << (chunk % 64), Ordering::Release);
        }
    }

    /// Runs `make`, which may punch holes in `range`.
    pub(super) fn while_holes_come<T>(&self, range: Range<u64>, make: impl FnOnce() -> T) -> T {
        let _changes = self.changes.lock();
        for chunk in self.touched(&range) {
            let Some(word) = self.word(chunk) else { break };
            word.fetch_and(!(1 << (chunk % 64)), Ordering::Release);
        }
        make()
    }

    /// Allocates `range`. `true` if that changed the file.
    pub(super) fn ensure(&self, file: &RawFile, range: Range<u64>) -> Result<bool, IoError> {
        let mut chunks = self.touched(&range);
        if chunks.all(|chunk| self.is_backed(chunk)) {
            return Ok(false);
        }
        let _changes = self.changes.lock();
        let size_bytes = file.size_bytes();
        let chunks = self.touched(&range);
        self.make_words(chunks.end.min(size_bytes.div_ceil(1 << self.chunk_bits)));
        let end = (chunks.end << self.chunk_bits).min(size_bytes);
        let mut at = chunks.start << self.chunk_bits;
        let mut changed = false;
        while at < end {
            if self.is_backed(at >> self.chunk_bits) {
                at += 1 << self.chunk_bits;
                continue;
            }
            // Data needs no allocation. The look waits for writes in flight on some file systems, so it pays to
            // know how far it goes on.
            let hole = first_hole(file, at..size_bytes.min(at + LOOK_BYTES).max(end));
            self.set(&(at..hole), size_bytes);
            if hole >= end {
                break;
            }
            at = hole >> self.chunk_bits << self.chunk_bits;
            let part = at..self.end_of_unknown(at, end);
            match fill(file, part.clone()) {
                Ok(()) => self.set(&part, size_bytes),
                // There may be space for the range itself, if not for the whole chunks.
                Err(errno) if is_no_space(errno) => {
                    fill_exactly(file, part.start.max(range.start)..part.end.min(range.end))
                        .map_err(|errno| error(errno, &range))?;
                }
                Err(errno) => return Err(error(errno, &range)),
            }
            changed = true;
            at = part.end;
        }
        Ok(changed)
    }

    /// The end of the run of unknown chunks from `at` on.
    fn end_of_unknown(&self, at: u64, end: u64) -> u64 {
        let mut chunk = (at >> self.chunk_bits) + 1;
        while chunk << self.chunk_bits < end && !self.is_backed(chunk) {
            chunk += 1;
        }
        (chunk << self.chunk_bits).min(end)
    }
}

fn is_no_space(errno: i32) -> bool {
    matches!(errno, libc::ENOSPC | libc::EDQUOT)
}

fn error(errno: i32, range: &Range<u64>) -> IoError {
    IoError::os(errno, IoOp::EnsureRoom, range.start, range.end - range.start)
}

/// Start of the first hole of `range`, if the file system reports holes; the end if there is none.
fn first_hole(file: &RawFile, range: Range<u64>) -> u64 {
    match file.seek(SeekFrom::Hole, range.start) {
        Ok(hole) => hole.min(range.end),
        // The file is shorter than that.
        Err(Errno::NXIO) => range.start,
        // A file system that does not report holes.
        Err(_) => range.end,
    }
}

/// Allocates all of `range`.
fn fill(file: &RawFile, range: Range<u64>) -> Result<(), i32> {
    let len = range.end.saturating_sub(range.start);
    match file.fallocate(FallocateFlags::KEEP_SIZE, range.start, len) {
        Err(libc::EOPNOTSUPP | libc::ENOSYS) => fill_with_zeroes(file, range),
        result => result,
    }
}

/// As [`fill`] on a full file system. Some check for free space before they see that all blocks are
/// allocated.
fn fill_exactly(file: &RawFile, range: Range<u64>) -> Result<(), i32> {
    if first_hole(file, range.clone()) >= range.end || is_mapped(file, &range) {
        return Ok(());
    }
    fill(file, range)
}

fn fill_with_zeroes(file: &RawFile, range: Range<u64>) -> Result<(), i32> {
    let mut at = range.start;
    while at < range.end {
        let hole = first_hole(file, at..range.end);
        let data = match file.seek(SeekFrom::Data, hole) {
            Ok(data) => data.min(range.end),
            Err(_) => range.end,
        };
        if hole < data {
            file.write_zeroes_plainly(hole, data - hole).map_err(|error| error.errno())?;
        }
        at = data.max(hole);
    }
    Ok(())
}

/// The header of `struct fiemap` of linux/fiemap.h, with room for the extents.
#[repr(C)]
struct Fiemap {
    start: u64,
    length: u64,
    flags: u32,
    mapped_extents: u32,
    extent_count: u32,
    reserved: u32,
    extents: [FiemapExtent; EXTENT_COUNT],
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct FiemapExtent {
    logical: u64,
    physical: u64,
    length: u64,
    reserved64: [u64; 2],
    flags: u32,
    reserved: [u32; 3],
}

/// Whether all of `range` is allocated, including unwritten extents, which `SEEK_HOLE` reports as
/// holes. `false` if the file system does not report it.
fn is_mapped(file: &RawFile, range: &Range<u64>) -> bool {
    let (mut at, end) = (file.place(range.start), file.place(range.end));
    while at < end {
        let mut map = Fiemap {
            start: at,
            length: end - at,
            flags: 0,
            mapped_extents: 0,
            extent_count: EXTENT_COUNT as u32,
            reserved: 0,
            extents: [FiemapExtent::default(); EXTENT_COUNT],
        };
        let fd = file.buffered.as_raw_fd();
        // SAFETY: the kernel reads the header and writes at most `extent_count` extents after it,
        // all of which `map` has.
        if unsafe { libc::ioctl(fd, FS_IOC_FIEMAP as _, &raw mut map) } != 0 {
            return false;
        }
        let count = (map.mapped_extents as usize).min(EXTENT_COUNT);
        let before = at;
        for extent in &map.extents[..count] {
            if extent.logical > at {
                return false;
            }
            at = at.max(extent.logical.saturating_add(extent.length));
        }
        if at == before {
            return false;
        }
    }
    true
}

/// As [`Room::ensure`], as a result of a request.
pub(super) fn ensure(file: &RawFile, offset: u64, len: u64, changed: impl FnOnce()) -> IoResult {
    let Some(room) = &file.room else { return Ok(()) };
    let result = room.ensure(file, offset..offset.saturating_add(len));
    // A failed call may have changed a part.
    if !matches!(result, Ok(false)) {
        changed();
    }
    result.map(drop)
}
