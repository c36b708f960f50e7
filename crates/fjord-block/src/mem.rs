//! The memory backend. Owns [`MemDevice`], a sparse device whose requests are done when submitted.
//!
//! Contents live in 4096-byte pieces, spread over locked shards; a missing piece reads as zeroes.
//! [`MemDevice::snapshot`] shares the pieces copy-on-write, so that images are cheap to keep.
//!
//! Invariant: bytes beyond `size_bytes` are never stored, so that growing reads as zeroes.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::SeekFrom;
use rustix::io::Errno;

use crate::buf::{AlignedBuf, Buf};
use crate::device::{Capabilities, Class, Device, Request, bufs_len, check_range};
use crate::error::{IoError, IoOp};
use crate::fault::{FaultAction, FaultPlan};
use crate::lock::{Rank, RwLock};
use crate::stats::{DeviceStats, StatCounters};
use crate::sticky::Sticky;
use crate::ticket::{IoResult, ReadTicket, Ticket};

const PIECE_BYTES: u64 = 4096;
const SHARD_COUNT: u64 = 64;

type Pieces = HashMap<u64, Buf>;

/// A device in memory, for images of tests and images that are written to a file later.
///
/// Only written pieces take memory. Clones of an `Arc` of it share the contents;
/// [`MemDevice::snapshot`] copies the contents at one moment.
///
/// ```
/// use fjord_block::{Buf, DeviceExt, MemDevice, Request};
///
/// let device = MemDevice::new(1 << 40);
/// device.submit_one(Request::write(4096, vec![Buf::from_slice(&[7; 512])])).wait()?;
/// assert_eq!(device.allocated_bytes(), 4096);
///
/// let before = device.snapshot();
/// device.submit_one(Request::WriteZeroes { offset: 4096, len: 512 }).wait()?;
/// let mut bytes = [0; 512];
/// before.read_at(4096, &mut bytes)?;
/// assert_eq!(bytes, [7; 512]);
/// # Ok::<(), fjord_block::IoError>(())
/// ```
#[derive(Debug)]
pub struct MemDevice {
    capabilities: Capabilities,
    size_bytes: AtomicU64,
    /// Piece number modulo the count; each guarded by its own lock.
    shards: Vec<RwLock<Pieces>>,
    faults: FaultPlan,
    sticky: Arc<Sticky>,
    stats: StatCounters,
}

impl MemDevice {
    /// An empty device (all zeroes) of `size_bytes`.
    pub fn new(size_bytes: u64) -> Self {
        MemDevice {
            capabilities: Capabilities {
                volatile_cache: false,
                fua: true,
                native_barrier: false,
                discard: true,
                queue_depth: 64,
                logical_block_size: 512,
                read_only: false,
            },
            size_bytes: AtomicU64::new(size_bytes),
            shards: (0..SHARD_COUNT)
                .map(|_| RwLock::new(Rank::MemPieces, Pieces::default()))
                .collect(),
            faults: FaultPlan::default(),
            sticky: Arc::default(),
            stats: StatCounters::default(),
        }
    }

    /// A device with the contents of a file; pieces of zeroes stay unallocated.
    ///
    /// # Errors
    /// Those of opening and reading the file.
    pub fn from_file(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        let size_bytes = file.metadata()?.len();
        let device = MemDevice::new(size_bytes);
        let mut data = vec![0; 1 << 20];
        let mut offset = 0;
        while offset < size_bytes {
            offset = match rustix::fs::seek(&file, SeekFrom::Data(offset)) {
                Ok(data) => data / PIECE_BYTES * PIECE_BYTES,
                Err(Errno::NXIO) => break,
                // A file system that does not report holes.
                Err(_) => offset,
            };
            let want = (size_bytes - offset).min(data.len() as u64) as usize;
            file.read_exact_at(&mut data[..want], offset)?;
            for (index, piece) in data[..want].chunks(PIECE_BYTES as usize).enumerate() {
                if piece.iter().any(|byte| *byte != 0) {
                    device.store(offset + index as u64 * PIECE_BYTES, piece);
                }
            }
            offset += want as u64;
        }
        Ok(device)
    }

    /// A device with the contents of `image`, which does not change.
    pub fn from_image(image: &MemImage) -> Self {
        let device = MemDevice::new(image.size_bytes);
        for (piece, buf) in &image.pieces {
            device.shard(*piece).write().insert(*piece, buf.clone());
        }
        device
    }

    /// The fault plan of this device; can be changed at any time.
    pub fn faults(&self) -> &FaultPlan {
        &self.faults
    }

    /// The contents at this moment. Later writes do not change it.
    pub fn snapshot(&self) -> MemImage {
        let guards: Vec<_> =
            (0..).zip(&self.shards).map(|(index, shard)| shard.read_in_order(index)).collect();
        let pieces =
            guards.iter().flat_map(|guard| guard.iter().map(|(k, v)| (*k, v.clone()))).collect();
        MemImage { size_bytes: self.size_bytes(), pieces }
    }

    /// Bytes of memory that hold contents.
    pub fn allocated_bytes(&self) -> u64 {
        self.shards.iter().map(|shard| shard.read().len() as u64 * PIECE_BYTES).sum()
    }

    fn shard(&self, piece: u64) -> &RwLock<Pieces> {
        &self.shards[(piece % SHARD_COUNT) as usize]
    }

    fn store(&self, offset: u64, data: &[u8]) {
        for_pieces(offset, data.len() as u64, |piece, start, range| {
            let mut shard = self.shard(piece).write();
            let buf = shard.entry(piece).or_insert_with(|| Buf::zeroed(PIECE_BYTES as usize));
            buf.make_mut()[start..start + range.len()].copy_from_slice(&data[range]);
        });
    }

    fn load(&self, offset: u64, data: &mut [u8]) {
        for_pieces(offset, data.len() as u64, |piece, start, range| {
            match self.shard(piece).read().get(&piece) {
                Some(buf) => data[range.clone()].copy_from_slice(&buf[start..start + range.len()]),
                None => data[range].fill(0),
            }
        });
    }

    fn zero(&self, offset: u64, len: u64) {
        for_pieces(offset, len, |piece, start, range| {
            let mut shard = self.shard(piece).write();
            if range.len() as u64 == PIECE_BYTES {
                shard.remove(&piece);
            } else if let Some(buf) = shard.get_mut(&piece) {
                buf.make_mut()[start..start + range.len()].fill(0);
            }
        });
    }

    fn run(&self, request: &Request) -> IoResult {
        let (op, offset, len) = request.extent();
        check_range(op, offset, len, self.size_bytes())?;
        let mut keep_bytes = u64::MAX;
        let mut result = Ok(());
        match self.faults.decide(op, offset, len) {
            None => {}
            Some(FaultAction::Delay(delay)) => std::thread::sleep(delay),
            Some(FaultAction::Torn { keep_bytes: keep, errno }) if op == IoOp::Write => {
                keep_bytes = keep;
                result = Err(IoError::os(errno, op, offset, len));
            }
            Some(FaultAction::Fail(errno) | FaultAction::Torn { errno, .. }) => {
                return Err(IoError::os(errno, op, offset, len));
            }
        }
        match request {
            Request::Write { bufs, .. } => {
                let mut at = offset;
                for buf in bufs {
                    let take = (keep_bytes - (at - offset)).min(buf.len() as u64) as usize;
                    self.store(at, &buf[..take]);
                    at += take as u64;
                }
            }
            Request::Flush { .. } => {
                self.sticky.check()?;
                self.stats.flush_issued();
            }
            Request::Discard { .. } | Request::WriteZeroes { .. } => self.zero(offset, len),
        }
        result
    }

    fn count(&self, request: &Request, result: &IoResult) {
        match request {
            Request::Write { bufs, fua, class, .. } => {
                self.stats.write(*class, bufs_len(bufs), *fua)
            }
            Request::Flush { class } => self.stats.flush(*class),
            Request::Discard { len, .. } => self.stats.discard(*len),
            Request::WriteZeroes { len, .. } => self.stats.write_zeroes(*len),
        }
        if let Err(error) = result {
            self.stats.error();
            if error.op == IoOp::Flush {
                self.sticky.set(error);
            }
        }
    }
}

/// Calls `f(piece, start in piece, range of the data)` for each piece that the extent touches.
fn for_pieces(offset: u64, len: u64, mut f: impl FnMut(u64, usize, std::ops::Range<usize>)) {
    let mut done = 0;
    while done < len {
        let at = offset + done;
        let start = at % PIECE_BYTES;
        let take = (PIECE_BYTES - start).min(len - done);
        f(at / PIECE_BYTES, start as usize, done as usize..(done + take) as usize);
        done += take;
    }
}

impl Device for MemDevice {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn size_bytes(&self) -> u64 {
        self.size_bytes.load(Ordering::Acquire)
    }

    fn set_size(&self, size_bytes: u64) -> IoResult {
        let old = self.size_bytes.swap(size_bytes, Ordering::AcqRel);
        if size_bytes < old {
            // Only stored pieces need clearing: the device may be far larger than memory.
            for shard in &self.shards {
                shard.write().retain(|piece, _| piece * PIECE_BYTES < size_bytes);
            }
            self.zero(size_bytes, size_bytes.next_multiple_of(PIECE_BYTES) - size_bytes);
        }
        Ok(())
    }

    fn submit(&self, batch: Vec<Request>) -> Vec<Ticket> {
        let submit = |request| {
            let result = self.run(&request);
            self.count(&request, &result);
            let (ticket, completer) = Ticket::pending(Some(self.sticky.clone()));
            completer.complete(result);
            ticket
        };
        batch.into_iter().map(submit).collect()
    }

    fn submit_read(&self, offset: u64, mut bufs: Vec<AlignedBuf>, class: Class) -> ReadTicket {
        let len = bufs_len(&bufs);
        self.stats.read(class, len);
        let result = check_range(IoOp::Read, offset, len, self.size_bytes()).and_then(|()| {
            match self.faults.decide(IoOp::Read, offset, len) {
                Some(FaultAction::Fail(errno) | FaultAction::Torn { errno, .. }) => {
                    return Err(IoError::os(errno, IoOp::Read, offset, len));
                }
                Some(FaultAction::Delay(delay)) => std::thread::sleep(delay),
                None => {}
            }
            let mut at = offset;
            for buf in &mut bufs {
                self.load(at, buf);
                at += buf.len() as u64;
            }
            Ok(bufs)
        });
        if result.is_err() {
            self.stats.error();
        }
        ReadTicket::ready(result)
    }

    fn stats(&self) -> DeviceStats {
        self.stats.snapshot()
    }
}

/// The contents of a [`MemDevice`] at one moment.
///
/// ```
/// use fjord_block::{MemDevice, MemImage};
///
/// let mut image = MemImage::new(1 << 20);
/// image.write_at(100, b"bytes")?;
/// let device = MemDevice::from_image(&image); // shares the memory until either changes
/// assert!(device.snapshot() == image);
/// # Ok::<(), fjord_block::IoError>(())
/// ```
#[derive(Clone, Debug)]
pub struct MemImage {
    size_bytes: u64,
    pieces: Pieces,
}

impl MemImage {
    /// An image of zeroes.
    pub fn new(size_bytes: u64) -> Self {
        MemImage { size_bytes, pieces: Pieces::new() }
    }

    /// The contents of a file.
    ///
    /// # Errors
    /// As [`MemDevice::from_file`].
    pub fn from_file(path: &Path) -> io::Result<Self> {
        MemDevice::from_file(path).map(|device| device.snapshot())
    }

    /// Size in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// Copies bytes from `offset` on; beyond the end is an error.
    pub fn read_at(&self, offset: u64, data: &mut [u8]) -> IoResult {
        check_range(IoOp::Read, offset, data.len() as u64, self.size_bytes)?;
        for_pieces(offset, data.len() as u64, |piece, start, range| {
            match self.pieces.get(&piece) {
                Some(buf) => data[range.clone()].copy_from_slice(&buf[start..start + range.len()]),
                None => data[range].fill(0),
            }
        });
        Ok(())
    }

    /// Overwrites bytes from `offset` on; beyond the end is an error.
    pub fn write_at(&mut self, offset: u64, data: &[u8]) -> IoResult {
        check_range(IoOp::Write, offset, data.len() as u64, self.size_bytes)?;
        for_pieces(offset, data.len() as u64, |piece, start, range| {
            let buf = self.pieces.entry(piece).or_insert_with(|| Buf::zeroed(PIECE_BYTES as usize));
            buf.make_mut()[start..start + range.len()].copy_from_slice(&data[range]);
        });
        Ok(())
    }

    /// As [`MemImage::write_at`] within one piece, sharing `buf` when it is a whole one. The caller
    /// has checked the range.
    pub(crate) fn put(&mut self, offset: u64, buf: &Buf) {
        if offset.is_multiple_of(PIECE_BYTES) && buf.len() as u64 == PIECE_BYTES {
            self.pieces.insert(offset / PIECE_BYTES, buf.clone());
        } else {
            let _ = self.write_at(offset, buf);
        }
    }

    /// Makes a range read as zeroes; its cost is bounded by the stored pieces.
    pub(crate) fn zero(&mut self, offset: u64, len: u64) {
        let end = offset.saturating_add(len);
        let whole = offset.div_ceil(PIECE_BYTES)..end / PIECE_BYTES;
        let count = whole.end.saturating_sub(whole.start);
        if count < self.pieces.len() as u64 {
            for piece in whole.clone() {
                self.pieces.remove(&piece);
            }
        } else {
            self.pieces.retain(|piece, _| !whole.contains(piece));
        }
        for at in [offset, end.saturating_sub(1)].into_iter().filter(|_| len > 0) {
            let piece = at / PIECE_BYTES;
            if let (false, Some(buf)) = (whole.contains(&piece), self.pieces.get_mut(&piece)) {
                let start = piece * PIECE_BYTES;
                let from = offset.max(start) - start;
                let to = end.min(start + PIECE_BYTES) - start;
                buf.make_mut()[from as usize..to as usize].fill(0);
            }
        }
    }

    /// Whether the piece at `offset` is stored; a missing one reads as zeroes.
    pub(crate) fn is_stored(&self, offset: u64) -> bool {
        self.pieces.contains_key(&(offset / PIECE_BYTES))
    }

    /// Writes the image to a new sparse file (an existing one is replaced).
    ///
    /// # Errors
    /// Those of making and writing the file.
    pub fn write_to_file(&self, path: &Path) -> io::Result<()> {
        let file = File::create(path)?;
        file.set_len(self.size_bytes)?;
        for (piece, buf) in &self.pieces {
            let start = piece * PIECE_BYTES;
            let len = PIECE_BYTES.min(self.size_bytes.saturating_sub(start)) as usize;
            // The new file reads as zeroes where nothing was written.
            if buf[..len].iter().any(|byte| *byte != 0) {
                file.write_all_at(&buf[..len], start)?;
            }
        }
        Ok(())
    }
}

impl PartialEq for MemImage {
    /// Equal bytes; a stored piece of zeroes equals a missing one.
    fn eq(&self, other: &Self) -> bool {
        let covers = |a: &MemImage, b: &MemImage| {
            a.pieces.iter().all(|(piece, buf)| match b.pieces.get(piece) {
                Some(other) => buf.ptr_eq(other) || **buf == **other,
                None => buf.iter().all(|byte| *byte == 0),
            })
        };
        self.size_bytes == other.size_bytes && covers(self, other) && covers(other, self)
    }
}
