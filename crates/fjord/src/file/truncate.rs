//! Changing a file's size.
//!
//! Owns the order in which pages, size and blocks are removed. Invariants: a truncation that
//! does not fit one transaction is on the orphan list from its first transaction to its
//! last, so that recovery completes it; nothing of the file is in flight while blocks
//! are taken away, except for what commits wait for when the file is deleted; the on-disk size never shows what is still only in memory
//! ([`settle_size`]).
//!
//! A program that truncates a file, rewrites and closes it expects the old or the new content after
//! a crash, even without fsync. As in ext4 (`auto_da_alloc`) such content is written back on close
//! ([`write_if_replaced`]), so that a crash rarely shows the empty file.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use fjord_block::plant::{Bug, planted};
use fjord_format::Tid;
use fjord_journal::Handle;
use rustix::io::Errno;

use crate::error::Result;
use crate::file::read::load_page;
use crate::file::write::zero_old_tail;
use crate::file::writeback::WriteRun;
use crate::file::{inline, writeback};
use crate::fs::FsInner;
use crate::fs::threads::Who;
use crate::inode::{InFlight, Inode, InodeState, disk};
use crate::map::{self, Progress};
use crate::orphan;

/// Sets the size of a regular file. The caller stores nothing else in this call.
///
/// # Errors
/// `EFBIG`, `EINVAL`, I/O errors, corruption.
pub(crate) fn set_size(fs: &Arc<FsInner>, inode: &Arc<Inode>, size: u64) -> Result<()> {
    let mut in_flight = inode.lock_writeback();
    writeback::drain(fs, inode, &mut in_flight)?;
    {
        let mut state = inode.state.write();
        if size > fs.max_file_size(&state) {
            return Err(Errno::FBIG.into());
        }
        if inline::has_inline_data(&state) {
            if inline::resize(fs, inode, &mut state, size)? {
                return Ok(());
            }
            inline::convert(fs, inode, &mut state)?;
        }
        if size <= state.size {
            return shrink(fs, inode, &mut state, size);
        }
        zero_old_tail(fs, inode, &state, size)?;
        writeback::journal_at_once(fs, inode, &mut state)?;
    }
    grow(fs, inode, &mut in_flight, size)
}

/// The size in bytes that a crash may show, if nothing of the file is on its way to the device:
/// up to the first dirty page that the size on disk does not reach beyond. A crash would show what
/// lies in its place on the device. `written` bytes are there, or will be before the size is.
pub(crate) fn shown_size(fs: &FsInner, inode: &Inode, state: &InodeState, written: u64) -> u64 {
    shown_size_before(fs, inode, state, written, u64::MAX)
}

/// The same if the pages from `end` on are about to be written.
pub(crate) fn shown_size_before(
    fs: &FsInner,
    inode: &Inode,
    state: &InodeState,
    written: u64,
    end: u64,
) -> u64 {
    let block_size = u64::from(fs.geo.block_size);
    let written = written.min(state.size);
    match inode.pages.first_dirty(written / block_size..end) {
        Some(lblk) => written.max(u64::from(lblk) * block_size).min(state.size),
        None => state.size,
    }
}

/// Gives the file on disk the size that it has in memory, or as much of it as may be shown.
pub(crate) fn settle_size(fs: &FsInner, inode: &Inode, state: &mut InodeState) {
    let shown = shown_size(fs, inode, state, state.disk.size);
    state.disk.size = if planted(Bug::StaleTail) { state.size } else { shown };
}

/// The size on disk grew in a transaction. Data that was written in place may be what the old size
/// hid, so whatever shows the new one by itself must be after a flush of it.
pub(crate) fn note_growth(inode: &Inode, state: &mut InodeState, tid: Tid) {
    if inode.in_place.owed().is_some() {
        state.carried.mapped_unflushed(tid);
    }
}

fn grow(fs: &Arc<FsInner>, inode: &Arc<Inode>, in_flight: &mut InFlight, size: u64) -> Result<()> {
    writeback::drain(fs, inode, in_flight)?;
    let mut state = inode.state.write();
    let handle = fs.start(disk::STORE_CREDITS)?;
    if size > state.size {
        state.size = size;
        settle_size(fs, inode, &mut state);
        note_growth(inode, &mut state, handle.tid());
    }
    stamp(fs, &mut state);
    finish(fs, &handle, inode, &mut state)
}

/// Gives the inode the times of a change of its content, once for all transactions of the change:
/// else a crash between them could leave times that nobody ever saw.
pub(super) fn stamp(fs: &FsInner, state: &mut InodeState) {
    let now = fs.now();
    crate::inode::attr::set_mtime(&mut state.disk, now);
    crate::inode::attr::set_ctime(&mut state.disk, now);
}

fn finish(fs: &FsInner, handle: &Handle, inode: &Inode, state: &mut InodeState) -> Result<()> {
    inode.touch_tid(handle.changes(), true);
    disk::store(fs, handle, inode, state)
}

fn shrink(fs: &Arc<FsInner>, inode: &Arc<Inode>, state: &mut InodeState, size: u64) -> Result<()> {
    let block_size = u64::from(fs.geo.block_size);
    let tail = (size % block_size) as usize;
    let keep = size.div_ceil(block_size);
    if tail != 0 && size < state.size {
        let lblk = (size / block_size) as u32;
        if load_page(fs, inode, state, lblk)?.is_some() {
            inode.pages.modify(lblk, false, |page| page[tail..].fill(0));
            if !planted(Bug::ShrunkPageForgotten) {
                fs.dirty_inodes.add(inode);
            }
        }
    }
    drop_pages(fs, inode, state, keep..u64::MAX);
    discard_prealloc(fs, state);
    if size == 0 && state.size > 0 {
        inode.replaced.store(true, Ordering::Relaxed);
    }
    state.size = size;
    settle_size(fs, inode, state);
    stamp(fs, state);
    // With `data=journal` the zeros are in the transaction that changes the size.
    let tail = writeback::take_for_journal(fs, inode, state, size / block_size)?;
    remove_blocks_with(fs, inode, state, (keep, u64::from(u32::MAX)), true, tail)
}

/// Requests writeback of a file that was truncated to zero since its last close. Does not wait.
pub(crate) fn write_if_replaced(fs: &FsInner, inode: &Inode) {
    let replaced =
        inode.replaced.load(Ordering::Relaxed) && inode.replaced.swap(false, Ordering::Relaxed);
    if replaced && fs.dirty_inodes.hasten(inode) {
        fs.threads.wake(Who::Writeback);
    }
}

/// Drops cached pages of a range together with their reservations.
pub(crate) fn drop_pages(
    fs: &FsInner,
    inode: &Inode,
    state: &mut InodeState,
    range: std::ops::Range<u64>,
) {
    let reserved = inode.pages.remove(range);
    if reserved > 0 {
        fs.release_blocks(reserved);
        state.reserved_blocks = state.reserved_blocks.saturating_sub(reserved);
    }
}

/// Releases the window of the file.
pub(crate) fn discard_prealloc(fs: &FsInner, state: &mut InodeState) {
    fs.discard_window(state);
}

/// Frees the blocks `from..to` in as many transactions as it takes and stores the inode, whose times
/// are the caller's.
/// With `orphan`, the inode is on the orphan list while that is more than one.
pub(crate) fn remove_blocks(
    fs: &Arc<FsInner>,
    inode: &Arc<Inode>,
    state: &mut InodeState,
    from: u64,
    to: u64,
    orphan: bool,
) -> Result<()> {
    remove_blocks_with(fs, inode, state, (from, to), orphan, Vec::new())
}

/// As [`remove_blocks`], with pages that the first transaction has.
fn remove_blocks_with(
    fs: &Arc<FsInner>,
    inode: &Arc<Inode>,
    state: &mut InodeState,
    (from, to): (u64, u64),
    orphan: bool,
    mut pages: Vec<WriteRun>,
) -> Result<()> {
    let credits = map::credits_remove(fs) + disk::STORE_CREDITS + orphan::CREDITS;
    let was_orphan = state.orphan.is_some();
    loop {
        let handle = fs.start(credits + writeback::credits_for_journal(fs, &pages))?;
        for run in pages.drain(..) {
            writeback::journal_run(fs, &handle, inode, state, &run)?;
        }
        let progress = map::remove(fs, &handle, inode, state, from, to)?;
        let done = progress == Progress::Done;
        if done && orphan && !was_orphan && state.orphan.is_some() {
            orphan::remove(fs, &handle, inode, state)?;
        }
        if !done && orphan && state.orphan.is_none() {
            orphan::add(fs, &handle, inode, state)?;
        }
        finish(fs, &handle, inode, state)?;
        handle.stop();
        if done {
            return Ok(());
        }
    }
}
