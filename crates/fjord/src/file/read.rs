//! Reading file data through the page cache.
//!
//! Owns the filling of missing pages and the daemon-side read-ahead. Invariant: a page
//! enters the cache with zeros after the end of the file, and never replaces one that
//! is already there.

use std::ops::{Range, RangeInclusive};
use std::sync::atomic::Ordering;

use fjord_block::{AlignedBuf, Buf, Class};
use fjord_format::BlockNo;
use rustix::io::Errno;

use crate::attr::FileKind;
use crate::error::Result;
use crate::file::{inline, writeback};
use crate::fs::FsInner;
use crate::inode::{Inode, InodeState};
use crate::map::{self, MapKind};

/// Bytes read ahead when a read continues where cached pages end: as many as it wants itself, within these bounds.
const READ_AHEAD_BYTES: RangeInclusive<u64> = (256 << 10)..=(1 << 20);
/// Bytes that are fetched at once at the most.
const READ_MAX_BYTES: u64 = 2 << 20;
/// Bytes of one device read at the most; several are under way side by side.
const REQUEST_MAX_BYTES: usize = 1 << 20;

/// Reads up to `buf.len()` bytes at `offset`. Returns the count, 0 at the end of the file.
///
/// # Errors
/// `EISDIR` for directories, `EINVAL` for other special files, device errors, corruption.
pub(crate) fn read(fs: &FsInner, inode: &Inode, offset: u64, buf: &mut [u8]) -> Result<usize> {
    fs.check_alive()?;
    let state = inode.state.read();
    match state.kind() {
        FileKind::Regular => {}
        FileKind::Directory => return Err(Errno::ISDIR.into()),
        _ => return Err(Errno::INVAL.into()),
    }
    if offset >= state.size {
        return Ok(0);
    }
    let len = (buf.len() as u64).min(state.size - offset) as usize;
    let buf = &mut buf[..len];
    if inline::has_inline_data(&state) {
        return inline::read(fs, inode, &state, offset, buf);
    }
    let block_size = u64::from(fs.geo.block_size);
    let mut done = 0;
    while done < len {
        let position = offset + done as u64;
        let lblk = (position / block_size) as u32;
        let skip = (position % block_size) as usize;
        if let Some(page) = inode.pages.get(lblk) {
            let part = (len - done).min(page.len() - skip);
            buf[done..done + part].copy_from_slice(&page[skip..skip + part]);
            done += part;
            continue;
        }
        let end = (offset + len as u64).div_ceil(block_size);
        done += fill(fs, inode, &state, u64::from(lblk)..end, skip, &mut buf[done..])?;
    }
    fs.page_lru.reclaim();
    Ok(len)
}

/// A call that fetches pages of a file, until it is dropped.
struct Fetch<'a> {
    inode: &'a Inode,
    /// No other call does.
    is_alone: bool,
}

impl<'a> Fetch<'a> {
    fn begin(inode: &'a Inode) -> Fetch<'a> {
        let is_alone = inode.fetching.fetch_add(1, Ordering::Relaxed) == 0;
        Fetch { inode, is_alone }
    }

    /// How much it fetches at the most. Who reads a file in several calls at a time, as the kernel does, reads ahead
    /// himself: then far read-ahead would fetch what the next call fetches too.
    fn bytes_max(&self) -> u64 {
        if self.is_alone { READ_MAX_BYTES } else { REQUEST_MAX_BYTES as u64 }
    }
}

impl Drop for Fetch<'_> {
    fn drop(&mut self) {
        self.inode.fetching.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Copies bytes of the pages `want`, the first of which is not cached, into `out`, and
/// caches what it read. Returns how many bytes it copied (at least one).
fn fill(
    fs: &FsInner,
    inode: &Inode,
    state: &InodeState,
    want: Range<u64>,
    skip: usize,
    out: &mut [u8],
) -> Result<usize> {
    let block_size = fs.geo.block_size as usize;
    let first = want.start as u32;
    let fetch = Fetch::begin(inode);
    let ahead = want.end + read_ahead_pages(fs, inode, &want);
    let pages_in_file = state.size.div_ceil(block_size as u64);
    let most = (ahead.min(pages_in_file) - want.start).min(fetch.bytes_max() / block_size as u64);
    let found = map::lookup(fs, inode, state, first, most.max(1) as u32)?;
    let mut len = found.len.min(most.max(1) as u32);
    // A cached page (maybe newer than the device) ends the run.
    if let Some(cached) = (1..len).find(|&i| inode.pages.contains(first + i)) {
        len = cached;
    }
    let MapKind::Written(start) = found.kind else {
        let bytes = (len as usize * block_size - skip).min(out.len());
        out[..bytes].fill(0);
        return Ok(bytes);
    };
    let pages = read_run(fs, state, first, start, len)?;
    let mut copied = 0;
    for (index, page) in pages.into_iter().enumerate() {
        let from = if index == 0 { skip } else { 0 };
        if copied < out.len() {
            let part = (out.len() - copied).min(block_size - from);
            out[copied..copied + part].copy_from_slice(&page[from..from + part]);
            copied += part;
        }
        inode.pages.insert_clean(first + index as u32, page);
    }
    Ok(copied)
}

fn read_ahead_pages(fs: &FsInner, inode: &Inode, want: &Range<u64>) -> u64 {
    let sequential = want.start > 0 && inode.pages.contains((want.start - 1) as u32);
    if !sequential && want.start > 0 {
        return 0;
    }
    let block_size = u64::from(fs.geo.block_size);
    let wanted_bytes = (want.end - want.start) * block_size;
    wanted_bytes.clamp(*READ_AHEAD_BYTES.start(), *READ_AHEAD_BYTES.end()) / block_size
}

/// Reads `len` blocks from `start`; what lies after the end of the file becomes zeros.
fn read_run(
    fs: &FsInner,
    state: &InodeState,
    lblk: u32,
    start: BlockNo,
    len: u32,
) -> Result<Vec<Buf>> {
    let block_size = fs.geo.block_size as usize;
    let blocks_max = REQUEST_MAX_BYTES / block_size;
    let requests: Vec<_> = (0..len as usize)
        .step_by(blocks_max)
        .map(|at| {
            let count = blocks_max.min(len as usize - at);
            let memory = (0..count).map(|_| AlignedBuf::uninit(block_size)).collect();
            let from = fs.byte_offset(BlockNo(start.0 + at as u64));
            fs.device.submit_read(from, memory, Class::Sync)
        })
        .collect();
    let mut read = Vec::with_capacity(len as usize);
    for request in requests {
        read.extend(request.wait()?);
    }
    let journaled = writeback::journals_data(fs, state);
    let mut pages = Vec::with_capacity(len as usize);
    for (index, mut page) in read.into_iter().enumerate() {
        if journaled {
            // The newest content may be in the log, not checkpointed yet.
            let block = BlockNo(start.0 + index as u64);
            if let Some(buffer) = fs.meta.peek(block).filter(|b| !b.is_evictable()) {
                page.copy_from_slice(&buffer.read());
            }
        }
        let position = (u64::from(lblk) + index as u64) * block_size as u64;
        let valid = state.size.saturating_sub(position).min(block_size as u64) as usize;
        page[valid..].fill(0);
        pages.push(Buf::from(page));
    }
    Ok(pages)
}

/// Brings one page into the cache and returns it; a hole gives zeros and is not cached.
pub(crate) fn load_page(
    fs: &FsInner,
    inode: &Inode,
    state: &InodeState,
    lblk: u32,
) -> Result<Option<Buf>> {
    if let Some(page) = inode.pages.get(lblk) {
        return Ok(Some(page));
    }
    let MapKind::Written(start) = map::lookup(fs, inode, state, lblk, 1)?.kind else {
        return Ok(None);
    };
    let page = read_run(fs, state, lblk, start, 1)?.pop();
    if let Some(page) = &page {
        inode.pages.insert_clean(lblk, page.clone());
    }
    Ok(page)
}
