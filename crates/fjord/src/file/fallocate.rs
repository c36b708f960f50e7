//! fallocate(2): preallocate, punch, zero, collapse, insert.
//!
//! Owns the alignment rules and the order of page cache and map. Invariant: every mode
//! runs under the writeback lock with nothing in flight, and pages of a range are
//! written or dropped before its blocks change.

use std::sync::Arc;

use fjord_block::Class;
use fjord_block::plant::{Bug, planted};
use fjord_format::inode::InodeFlags;
use fjord_journal::Handle;
use rustix::io::Errno;

use crate::alloc::Goal;
use crate::attr::FileKind;
use crate::error::{Error, Result};
use crate::file::read::load_page;
use crate::file::{background, inline, truncate, write, writeback};
use crate::fs::FsInner;
use crate::inode::{InFlight, Inode, InodeState, disk};
use crate::map::{self, MapKind, Progress};

bitflags::bitflags! {
    /// Modes of [`crate::InodeRef::fallocate`], with the values of `fallocate(2)`. None of them
    /// allocates the range and extends the file to its end.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use fjord::{Fs, MemDevice, MkfsOptions, MountOptions};
    /// use fjord::FallocMode;
    ///
    /// # let device = Arc::new(MemDevice::new(16 << 20));
    /// # let fs = Fs::create_on(device, &MkfsOptions::default(), &MountOptions::default())?;
    /// fs.write("/f", vec![7; 1 << 20])?;
    /// let file = fs.resolve("/f")?;
    /// file.fallocate(FallocMode::PUNCH_HOLE | FallocMode::KEEP_SIZE, 0, 512 << 10)?;
    /// assert_eq!(file.seek_data(0)?, 512 << 10);
    /// # drop(file);
    /// # fs.unmount()?;
    /// # Ok::<(), fjord::Error>(())
    /// ```
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub struct FallocMode: u32 {
        /// Leave the size as it is.
        const KEEP_SIZE = 0x01;
        /// Free the range's blocks.
        const PUNCH_HOLE = 0x02;
        /// Cut the range out and move what follows down.
        const COLLAPSE_RANGE = 0x08;
        /// Make the range read as zeros, allocated.
        const ZERO_RANGE = 0x10;
        /// Move what follows up and leave a hole.
        const INSERT_RANGE = 0x20;
    }
}

/// Blocks that one handle allocates at the most.
const ALLOC_BLOCKS_PER_HANDLE: u32 = 32_768;

/// A range in bytes and in whole blocks inside it.
#[derive(Clone, Copy)]
struct Span {
    start: u64,
    end: u64,
    /// First whole block.
    inner_start: u64,
    /// Behind the last whole block.
    inner_end: u64,
    /// First touched block.
    outer_start: u64,
    /// Behind the last touched block.
    outer_end: u64,
}

/// Carries out one fallocate call.
pub(crate) fn fallocate(
    fs: &Arc<FsInner>,
    inode: &Arc<Inode>,
    mode: FallocMode,
    offset: u64,
    len: u64,
) -> Result<()> {
    let end = offset.checked_add(len).filter(|_| len > 0).ok_or(Errno::INVAL)?;
    let operation = mode - FallocMode::KEEP_SIZE;
    let valid = operation.is_empty()
        || operation == FallocMode::ZERO_RANGE
        || mode == FallocMode::PUNCH_HOLE | FallocMode::KEEP_SIZE
        || mode == FallocMode::COLLAPSE_RANGE
        || mode == FallocMode::INSERT_RANGE;
    if !valid || FallocMode::from_bits(mode.bits()).is_none() {
        return Err(Errno::OPNOTSUPP.into());
    }
    background::throttle(fs, inode)?;
    let mut in_flight = inode.lock_writeback();
    writeback::drain(fs, inode, &mut in_flight)?;
    {
        let mut state = inode.state.write();
        check(fs, &state, operation, offset, end)?;
        inline::convert(fs, inode, &mut state)?;
    }
    let block_size = u64::from(fs.geo.block_size);
    let span = Span {
        start: offset,
        end,
        inner_start: offset.div_ceil(block_size),
        inner_end: (end / block_size).max(offset.div_ceil(block_size)),
        outer_start: offset / block_size,
        outer_end: end.div_ceil(block_size),
    };
    match operation {
        FallocMode::PUNCH_HOLE => {
            settle_tail(fs, inode, &mut in_flight, end)?;
            punch(fs, inode, span)
        }
        FallocMode::ZERO_RANGE => {
            settle_tail(fs, inode, &mut in_flight, end)?;
            zero_range(fs, inode, span, mode)
        }
        FallocMode::COLLAPSE_RANGE => collapse(fs, inode, &mut in_flight, span),
        FallocMode::INSERT_RANGE => insert(fs, inode, &mut in_flight, span),
        _ => allocate(fs, inode, &mut in_flight, span, mode),
    }
}

fn check(
    fs: &FsInner,
    state: &InodeState,
    operation: FallocMode,
    offset: u64,
    end: u64,
) -> Result<()> {
    match state.kind() {
        FileKind::Regular => {}
        FileKind::Directory => return Err(Errno::ISDIR.into()),
        _ => return Err(Errno::NODEV.into()),
    }
    let flags = state.disk.flags;
    let only_adds = operation.is_empty();
    if flags.contains(InodeFlags::IMMUTABLE) || flags.contains(InodeFlags::APPEND) && !only_adds {
        return Err(Errno::PERM.into());
    }
    // Block maps have no unwritten blocks and cannot be shifted.
    if !flags.intersects(InodeFlags::EXTENTS | InodeFlags::INLINE_DATA)
        && operation != FallocMode::PUNCH_HOLE
    {
        return Err(Errno::OPNOTSUPP.into());
    }
    if end > fs.max_file_size(state) && operation != FallocMode::PUNCH_HOLE {
        return Err(Errno::FBIG.into());
    }
    let block_size = u64::from(fs.geo.block_size);
    let aligned = offset.is_multiple_of(block_size) && end.is_multiple_of(block_size);
    match operation {
        FallocMode::COLLAPSE_RANGE if !aligned || end >= state.size => Err(Errno::INVAL.into()),
        FallocMode::INSERT_RANGE if !aligned || offset >= state.size => Err(Errno::INVAL.into()),
        FallocMode::INSERT_RANGE if state.size + (end - offset) > fs.max_file_size(state) => {
            Err(Errno::FBIG.into())
        }
        _ => Ok(()),
    }
}

/// Writes a file out whose delayed last pages are about to be dropped: with them would go the
/// reason to move the on-disk size on.
fn settle_tail(
    fs: &Arc<FsInner>,
    inode: &Arc<Inode>,
    in_flight: &mut InFlight,
    end: u64,
) -> Result<()> {
    let behind = {
        let state = inode.state.read();
        end >= state.size && state.disk.size < state.size
    };
    if behind {
        writeback::write_locked(
            fs,
            inode,
            in_flight,
            0..u64::MAX,
            writeback::Mode::DataFirst(Class::Sync),
        )?;
    }
    Ok(())
}

/// The same for a write that came in after [`settle_tail`]: what it added is zeros from now on.
fn keep_size(fs: &FsInner, inode: &Inode, state: &mut InodeState, end: u64) {
    if end >= state.size {
        truncate::settle_size(fs, inode, state);
    }
}

/// Zeroes the partly covered blocks at both ends of a range, in the page cache.
fn zero_edges(
    fs: &Arc<FsInner>,
    inode: &Arc<Inode>,
    state: &mut InodeState,
    span: Span,
) -> Result<()> {
    let block_size = u64::from(fs.geo.block_size);
    for lblk in [span.outer_start, span.outer_end.saturating_sub(1)] {
        if (span.inner_start..span.inner_end).contains(&lblk) {
            continue;
        }
        let base = lblk * block_size;
        let from = span.start.max(base) - base;
        let to = span.end.min(base + block_size).saturating_sub(base);
        if from >= to || lblk > u64::from(u32::MAX) {
            continue;
        }
        let lblk = lblk as u32;
        let present = load_page(fs, inode, state, lblk)?.is_some();
        if present {
            inode.pages.modify(lblk, false, |page| page[from as usize..to as usize].fill(0));
            fs.dirty_inodes.add(inode);
        }
    }
    writeback::journal_at_once(fs, inode, state)
}

fn punch(fs: &Arc<FsInner>, inode: &Arc<Inode>, span: Span) -> Result<()> {
    let mut state = inode.state.write();
    zero_edges(fs, inode, &mut state, span)?;
    if span.inner_start >= span.inner_end {
        return touch(fs, inode, &mut state);
    }
    truncate::drop_pages(fs, inode, &mut state, span.inner_start..span.inner_end);
    keep_size(fs, inode, &mut state, span.end);
    truncate::discard_prealloc(fs, &mut state);
    truncate::stamp(fs, &mut state);
    truncate::remove_blocks(fs, inode, &mut state, span.inner_start, span.inner_end, false)
}

/// Stores new times.
fn touch(fs: &FsInner, inode: &Inode, state: &mut InodeState) -> Result<()> {
    let handle = fs.start(disk::STORE_CREDITS)?;
    truncate::stamp(fs, state);
    disk::store(fs, &handle, inode, state)?;
    handle.stop();
    Ok(())
}

fn zero_range(fs: &Arc<FsInner>, inode: &Arc<Inode>, span: Span, mode: FallocMode) -> Result<()> {
    let mut state = inode.state.write();
    let grows = !mode.contains(FallocMode::KEEP_SIZE) && span.end > state.size;
    if grows {
        write::zero_old_tail(fs, inode, &state, span.start)?;
    }
    zero_edges(fs, inode, &mut state, span)?;
    truncate::drop_pages(fs, inode, &mut state, span.inner_start..span.inner_end);
    keep_size(fs, inode, &mut state, span.end);
    // Holes become unwritten blocks, written blocks lose their content by the flag alone.
    fill_holes(fs, inode, &mut state, span.outer_start, span.outer_end)?;
    let mut lblk = span.inner_start;
    while lblk < span.inner_end {
        let most = (span.inner_end - lblk).min(u64::from(ALLOC_BLOCKS_PER_HANDLE)) as u32;
        let found = map::lookup(fs, inode, &state, lblk as u32, most)?;
        if let MapKind::Written(_) = found.kind {
            let handle = fs.start(map::credits_insert(fs, 2) + disk::STORE_CREDITS)?;
            map::mark_unwritten(fs, &handle, inode, &mut state, lblk as u32, found.len)?;
            inode.touch_tid(handle.changes(), true);
            disk::store(fs, &handle, inode, &mut state)?;
            handle.stop();
        }
        lblk += u64::from(found.len.max(1));
    }
    extend_size(fs, inode, &mut state, span.end, mode)
}

fn extend_size(
    fs: &FsInner,
    inode: &Inode,
    state: &mut InodeState,
    end: u64,
    mode: FallocMode,
) -> Result<()> {
    if !mode.contains(FallocMode::KEEP_SIZE) && end > state.size {
        state.size = end;
        truncate::settle_size(fs, inode, state);
    }
    let handle = fs.start(disk::STORE_CREDITS)?;
    truncate::note_growth(inode, state, handle.tid());
    inode.touch_tid(handle.changes(), true);
    truncate::stamp(fs, state);
    disk::store(fs, &handle, inode, state)?;
    handle.stop();
    Ok(())
}

fn allocate(
    fs: &Arc<FsInner>,
    inode: &Arc<Inode>,
    in_flight: &mut InFlight,
    span: Span,
    mode: FallocMode,
) -> Result<()> {
    let grows = !mode.contains(FallocMode::KEEP_SIZE);
    let (old_tail, behind) = {
        let state = inode.state.write();
        let old_tail = grows && write::zero_old_tail(fs, inode, &state, span.end)?;
        (old_tail, state.disk.size < state.size)
    };
    // Delayed pages in the range get their own blocks first; the rest becomes unwritten. With
    // those of the range the on-disk size moves on, so those below it must not stay behind.
    let range = if old_tail || behind { 0..u64::MAX } else { span.outer_start..span.outer_end };
    writeback::write_locked(fs, inode, in_flight, range, writeback::Mode::DataFirst(Class::Sync))?;
    let mut state = inode.state.write();
    let result = fill_holes(fs, inode, &mut state, span.outer_start, span.outer_end);
    match result {
        Ok(()) => extend_size(fs, inode, &mut state, span.end, mode),
        Err(error) => Err(error),
    }
}

/// Allocates unwritten blocks for every hole of a range.
fn fill_holes(
    fs: &Arc<FsInner>,
    inode: &Arc<Inode>,
    state: &mut InodeState,
    from: u64,
    to: u64,
) -> Result<()> {
    let mut lblk = from;
    while lblk < to {
        let most = (to - lblk).min(u64::from(ALLOC_BLOCKS_PER_HANDLE)) as u32;
        let at = lblk as u32;
        let found = map::lookup(fs, inode, state, at, most)?;
        if found.kind != MapKind::Hole {
            lblk += u64::from(found.len.max(1));
            continue;
        }
        let mut len = found.len;
        if inode.pages.is_delalloc(at) {
            // A write reserved it after the range was flushed; writeback will place it.
            lblk += 1;
            continue;
        }
        if let Some(next) = inode.pages.next_pending(lblk) {
            len = u64::from(len).min(u64::from(next).saturating_sub(lblk).max(1)) as u32;
        }
        let goal = Goal::for_file(fs, inode, state, at)?;
        let handle = fs.start(map::credits_insert(fs, 1) + disk::STORE_CREDITS)?;
        let run = fs.alloc_unwritten(&handle, goal, len)?;
        map::insert(fs, &handle, inode, state, at, run.start, run.len, false).or_else(|error| {
            fs.free_blocks(&handle, run.start, u64::from(run.len))?;
            Err(error)
        })?;
        inode.touch_tid(handle.changes(), true);
        disk::store(fs, &handle, inode, state)?;
        handle.stop();
        lblk += u64::from(run.len);
    }
    Ok(())
}

fn shift_prepare(
    fs: &Arc<FsInner>,
    inode: &Arc<Inode>,
    in_flight: &mut InFlight,
    from: u64,
) -> Result<()> {
    writeback::write_locked(
        fs,
        inode,
        in_flight,
        0..u64::MAX,
        writeback::Mode::DataFirst(Class::Sync),
    )?;
    writeback::drain(fs, inode, in_flight)?;
    let mut state = inode.state.write();
    if inode.pages.next_pending(from).is_some() {
        // A write came in between; the caller's loop writes it too.
        return Err(Error::Posix(Errno::AGAIN));
    }
    truncate::drop_pages(fs, inode, &mut state, from..u64::MAX);
    truncate::discard_prealloc(fs, &mut state);
    Ok(())
}

/// Runs `shift` with the state locked and no page from `from` on in memory.
fn with_quiet_tail(
    fs: &Arc<FsInner>,
    inode: &Arc<Inode>,
    in_flight: &mut InFlight,
    from: u64,
    shift: impl Fn(&mut InodeState) -> Result<()>,
) -> Result<()> {
    loop {
        match shift_prepare(fs, inode, in_flight, from) {
            Err(error) if error.is(Errno::AGAIN) => continue,
            other => other?,
        }
        let mut state = inode.state.write();
        if inode.pages.next_pending(from).is_none() {
            truncate::drop_pages(fs, inode, &mut state, from..u64::MAX);
            shift(&mut state)?;
            drop(state);
            return commit_shift(fs, inode);
        }
    }
}

/// Commits a shift before anything is written to the blocks that moved: after a crash the old
/// mapping would show it at another offset. The caller holds the writeback lock.
fn commit_shift(fs: &FsInner, inode: &Inode) -> Result<()> {
    if planted(Bug::ShiftNotCommitted) {
        return Ok(());
    }
    match inode.sync_tid.get().filter(|&tid| !fs.journal().is_committed(tid)) {
        Some(tid) if fs.has_log() => Ok(fs.journal().commit(tid)?),
        _ => Ok(()),
    }
}

/// A handle for all of a shift, if the map can be changed under one that fits the journal.
fn start_shift(fs: &FsInner, state: &InodeState, more_credits: u32) -> Result<Option<Handle>> {
    let credits = map::credits_shift(fs) + disk::STORE_CREDITS + more_credits;
    if !map::shifts_at_once(fs, state) || credits > fs.journal().credits_max() {
        return Ok(None);
    }
    fs.start(credits).map(Some)
}

fn store_shift(fs: &FsInner, handle: &Handle, inode: &Inode, state: &mut InodeState) -> Result<()> {
    inode.touch_tid(handle.changes(), true);
    truncate::stamp(fs, state);
    disk::store(fs, handle, inode, state)
}

fn collapse(
    fs: &Arc<FsInner>,
    inode: &Arc<Inode>,
    in_flight: &mut InFlight,
    span: Span,
) -> Result<()> {
    with_quiet_tail(fs, inode, in_flight, span.inner_start, |state| {
        if span.end >= state.size {
            return Err(Errno::INVAL.into());
        }
        let (from, to) = (span.inner_start, span.inner_end);
        let range = (from as u32, (to - from) as u32);
        let shrink = |state: &mut InodeState| {
            state.size -= span.end - span.start;
            state.disk.size = state.disk.size.min(state.size);
            truncate::settle_size(fs, inode, state);
        };
        if let Some(handle) = start_shift(fs, state, map::credits_remove(fs))? {
            let removed = map::remove(fs, &handle, inode, state, from, to)?;
            if removed == Progress::Done {
                map::collapse_at_once(fs, &handle, inode, state, range)?;
                shrink(state);
            }
            store_shift(fs, &handle, inode, state)?;
            handle.stop();
            if removed == Progress::Done {
                return Ok(());
            }
        }
        truncate::remove_blocks(fs, inode, state, from, to, false)?;
        map::collapse(fs, inode, state, range.0, range.1)?;
        shrink(state);
        extend_size(fs, inode, state, 0, FallocMode::KEEP_SIZE)
    })
}

fn insert(
    fs: &Arc<FsInner>,
    inode: &Arc<Inode>,
    in_flight: &mut InFlight,
    span: Span,
) -> Result<()> {
    with_quiet_tail(fs, inode, in_flight, span.inner_start, |state| {
        if span.start >= state.size {
            return Err(Errno::INVAL.into());
        }
        let (from, len) = (span.inner_start, span.inner_end - span.inner_start);
        if let Some(handle) = start_shift(fs, state, 0)? {
            let moved = map::expand_at_once(fs, &handle, inode, state, (from as u32, len as u32));
            if moved.is_ok() {
                state.size += span.end - span.start;
                truncate::settle_size(fs, inode, state);
                truncate::note_growth(inode, state, handle.tid());
            }
            store_shift(fs, &handle, inode, state)?;
            handle.stop();
            return moved;
        }
        // The size grows first: a crash in between leaves a longer file, not a shorter one.
        state.size += span.end - span.start;
        truncate::settle_size(fs, inode, state);
        extend_size(fs, inode, state, 0, FallocMode::KEEP_SIZE)?;
        map::expand(fs, inode, state, from as u32, len as u32)
    })
}
