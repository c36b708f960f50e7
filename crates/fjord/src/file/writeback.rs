//! Writeback: dirty pages to the device, and their extents into the metadata.
//!
//! Owns the order of the two. In the background, blocks are picked in memory, data is written and
//! awaited, and only then does a handle insert the extents, so that a periodic commit never waits
//! for data of other files. An fsync cannot spare that wait: it inserts the extents at once and
//! attaches the data's tickets to the transaction.
//!
//! Invariants: see [`crate::file`]. A page stays *writeback* (and so cached) until its
//! write is complete, so that a read never meets old content on the device. (After
//! [`Mode::Barrier`] a page may be written again before that; there the scheduler below keeps
//! reads and writes of the same bytes in order.)

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use fjord_block::plant::{Bug, planted};
use fjord_block::{Buf, Class, IoError, Order, Request, Ticket};
use fjord_format::BlockNo;
use rustix::io::Errno;

use crate::alloc::{Goal, Run};
use crate::cache::page::DirtyPage;
use crate::error::Result;
use crate::file::carry::DeferredRun;
use crate::file::pace::{self, Pace, Pass};
use crate::file::truncate::{note_growth, settle_size, shown_size, shown_size_before};
use crate::fs::FsInner;
use crate::fsync::Runs;
use crate::inode::{InFlight, InFlightWrite, Inode, InodeState, disk};
use crate::map::{self, MapKind};
use crate::options::DataMode;

/// Pages taken in one go.
const BATCH_PAGES: usize = 2048;
/// Batches of background writeback in flight at once.
const BATCHES_IN_FLIGHT: usize = 3;

/// Reason of a writeback.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// For an fsync: attach data to the transaction.
    Fsync {
        /// Times alone need not be stored.
        datasync: bool,
    },
    /// For fbarrier, without a wait: as `Fsync`, and later ordered writes are ordered after this
    /// data.
    Barrier {
        /// Times alone need not be stored.
        datasync: bool,
    },
    /// Data first, then metadata; who waits is the class of the data writes.
    DataFirst(Class),
}

impl Mode {
    /// Whether times alone need not be stored.
    fn is_datasync(self) -> bool {
        matches!(self, Mode::Fsync { datasync: true } | Mode::Barrier { datasync: true })
    }
}

/// Target of a run of pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// Blocks picked for it, not in the map yet; `reserved` of them were reserved.
    New { reserved: u32 },
    /// Blocks in the map, marked unwritten.
    Unwritten,
    /// Blocks in the map.
    Written,
}

/// Pages that are contiguous in the file and on the device.
pub(super) struct WriteRun {
    pub(super) lblk: u32,
    pub(super) phys: BlockNo,
    pub(super) place: Place,
    pub(super) bufs: Vec<Buf>,
}

impl WriteRun {
    pub(super) fn len(&self) -> u32 {
        // A batch has some thousand pages at most.
        self.bufs.len() as u32
    }

    /// Some of its pages.
    fn part(&self, pages: Range<u32>) -> WriteRun {
        WriteRun {
            lblk: self.lblk + pages.start,
            phys: BlockNo(self.phys.0 + u64::from(pages.start)),
            place: match self.place {
                Place::New { reserved: 0 } => Place::New { reserved: 0 },
                Place::New { .. } => Place::New { reserved: pages.end - pages.start },
                other => other,
            },
            bufs: self.bufs[pages.start as usize..pages.end as usize].to_vec(),
        }
    }
}

/// Runs whose data has been submitted.
pub(super) struct Batch {
    runs: Vec<WriteRun>,
    tickets: Vec<Ticket>,
    /// The size in bytes that a crash may show once they are written. That of the moment at which
    /// the pages were taken: what is dirtied later is not there.
    shown_size: u64,
    /// The last one is a barrier.
    ends_epoch: bool,
    /// Given back when the writes are complete.
    pass: Option<Pass>,
}

/// Writes back what is dirty in `range` of pages, and the inode itself if it is dirty.
///
/// In `Fsync` mode the data may still be in flight on return: new blocks are attached to
/// the transaction, writes in place are recorded in `inode.in_place`.
///
/// # Errors
/// I/O errors of data writes, journal errors; the pages stay dirty if a retry may succeed.
pub(crate) fn write_inode(
    fs: &Arc<FsInner>,
    inode: &Arc<Inode>,
    range: Range<u64>,
    mode: Mode,
) -> Result<()> {
    let mut in_flight = inode.lock_writeback();
    write_locked(fs, inode, &mut in_flight, range, mode)
}

/// As [`write_inode`], for a caller that holds the writeback lock.
pub(crate) fn write_locked(
    fs: &Arc<FsInner>,
    inode: &Arc<Inode>,
    in_flight: &mut InFlight,
    range: Range<u64>,
    mode: Mode,
) -> Result<()> {
    match mode {
        Mode::Barrier { .. } => reap(fs, inode, in_flight)?,
        _ => drain(fs, inode, in_flight)?,
    }
    let result = write_batches(fs, inode, in_flight, range, mode);
    noting(fs, inode, result)
}

/// Records the failure of a writeback: for the files that have the inode open, and for the whole
/// file system; unless it was a mere lack of space, so that nothing is lost. Pages that stayed
/// dirty are tried again later.
pub(super) fn noting(fs: &Arc<FsInner>, inode: &Arc<Inode>, result: Result<()>) -> Result<()> {
    if let Err(error) = &result {
        let waits = error.is(Errno::NOSPC) && inode.pages.has_dirty();
        inode.wb_errors.fetch_add(u32::from(!waits), Ordering::AcqRel);
        fs.note_write_error(error);
        if inode.pages.has_dirty() {
            fs.dirty_inodes.add(inode);
        }
    }
    result
}

pub(super) fn write_batches(
    fs: &Arc<FsInner>,
    inode: &Arc<Inode>,
    in_flight: &mut InFlight,
    range: Range<u64>,
    mode: Mode,
) -> Result<()> {
    let wanted = wanted_size(inode, &range);
    loop {
        let mut pending: VecDeque<Batch> = VecDeque::new();
        let mut result = submit_all(fs, inode, in_flight, range.clone(), mode, &mut pending);
        for batch in pending {
            result = result.and(complete(fs, inode, batch));
        }
        result?;
        // A page that was dirtied meanwhile may keep the size back that the caller is to find on
        // disk; each round gets at least past that page.
        if store_lazy(fs, inode, mode)? >= wanted {
            return Ok(());
        }
    }
}

/// The size in bytes that the file must have on disk, at least, when all of it is written back.
pub(super) fn wanted_size(inode: &Inode, range: &Range<u64>) -> u64 {
    if *range == (0..u64::MAX) { inode.state.read().size } else { 0 }
}

/// Submits the dirty pages of `range`. Background batches that are not complete yet are left
/// in `pending`, also when a later one fails.
pub(super) fn submit_all(
    fs: &Arc<FsInner>,
    inode: &Arc<Inode>,
    in_flight: &mut InFlight,
    range: Range<u64>,
    mode: Mode,
    pending: &mut VecDeque<Batch>,
) -> Result<()> {
    let mut cursor = range.start;
    let mut written = 0;
    loop {
        let pass = pass(fs, inode, mode, pending)?;
        let mut state = inode.state.write();
        let batch_pages = match mode {
            _ if pass.is_some() => Pace::pass_pages(fs.geo.block_size),
            Mode::DataFirst(_) => fs.pace.batch_pages(fs.geo.block_size),
            Mode::Fsync { .. } | Mode::Barrier { .. } => BATCH_PAGES,
        };
        let pages = inode.pages.take_dirty(cursor..range.end, batch_pages);
        let (Some(first), Some(last)) = (pages.first(), pages.last()) else { return Ok(()) };
        let first = u64::from(first.lblk);
        cursor = u64::from(last.lblk) + 1;
        // Pages behind the cursor that are dirty again are not in this batch, so the size must not
        // pass them; those of batches under way that are, will be there as they were taken.
        written = state.disk.size.max(written);
        let end = cursor * u64::from(fs.geo.block_size);
        written = shown_size_before(fs, inode, &state, written, first).min(end).max(written);
        if journals_data(fs, &state) {
            drop(pass);
            journal_pages(fs, inode, &mut state, pages, written)?;
            continue;
        }
        let mut batch = submit(fs, inode, &mut state, pages, written, mode)?;
        match mode {
            Mode::Fsync { .. } | Mode::Barrier { .. } => {
                let datasync = mode.is_datasync();
                record(fs, inode, &mut state, &batch, &batch.tickets, datasync)?;
                drop(state);
                if pass.is_some() {
                    // Errors are reported by the thread that ends the writes.
                    batch.tickets.iter().for_each(|ticket| drop(ticket.wait()));
                }
                if batch.ends_epoch {
                    inode.in_place.record_barrier(inode.in_place.mark());
                }
                fly(fs, in_flight, batch, mode);
            }
            Mode::DataFirst(_) => {
                drop(state);
                batch.pass = pass;
                pending.push_back(batch);
                if pending.len() >= BATCHES_IN_FLIGHT
                    && let Some(batch) = pending.pop_front()
                {
                    complete(fs, inode, batch)?;
                }
            }
        }
    }
}

/// What a batch needs while somebody calls fsync for small files, if there is much to write. What
/// the caller has under way is completed first: it may hold what others, or it, wait for.
fn pass(
    fs: &Arc<FsInner>,
    inode: &Arc<Inode>,
    mode: Mode,
    pending: &mut VecDeque<Batch>,
) -> Result<Option<Pass>> {
    let is_bulk = !matches!(mode, Mode::Barrier { .. })
        && inode.pages.dirty_count() > pace::SMALL_PAGES
        && fs.pace.needs_pass();
    if !is_bulk {
        return Ok(None);
    }
    while let Some(batch) = pending.pop_front() {
        complete(fs, inode, batch)?;
    }
    Ok(Some(fs.pace.pass()))
}

/// Notes writes that the caller does not wait for here.
fn fly(fs: &FsInner, in_flight: &mut InFlight, batch: Batch, mode: Mode) {
    let is_awaited = matches!(mode, Mode::Fsync { .. });
    for (run, ticket) in batch.runs.iter().zip(batch.tickets) {
        let bytes = u64::from(run.len()) * u64::from(fs.geo.block_size);
        let unawaited_bytes = if is_awaited { 0 } else { bytes };
        fs.unawaited_bytes.fetch_add(unawaited_bytes, Ordering::Relaxed);
        let (lblk, len) = (run.lblk, run.len());
        in_flight.writes.push(InFlightWrite { ticket, lblk, len, unawaited_bytes });
    }
}

/// Whether this file's data goes through the journal.
pub(crate) fn journals_data(fs: &FsInner, state: &InodeState) -> bool {
    state.is_file()
        && fs.has_log()
        && (fs.options.data == DataMode::Journal || disk::has_journal_data_flag(&state.disk))
}

/// Stores an inode whose lazily kept fields (times) changed, and its size as far as no dirty page
/// keeps it back: pages that would have moved the on-disk size on may have been punched out.
/// Gives the size that is on disk; all there can be, of a file that is as long there as in memory.
pub(super) fn store_lazy(fs: &Arc<FsInner>, inode: &Arc<Inode>, mode: Mode) -> Result<u64> {
    let mut state = inode.state.write();
    let grows = shown_size(fs, inode, &state, state.disk.size) > state.disk.size;
    let lazy = state.dirty && !mode.is_datasync();
    if !state.dead && (grows || lazy) {
        let handle = fs.start(disk::STORE_CREDITS)?;
        if grows {
            settle_size(fs, inode, &mut state);
            note_growth(inode, &mut state, handle.tid());
            inode.touch_tid(handle.tid(), true);
        }
        disk::store(fs, &handle, inode, &mut state)?;
        handle.stop();
    }
    let is_whole = state.dead || state.disk.size >= state.size;
    Ok(if is_whole { u64::MAX } else { state.disk.size })
}

/// Finds or picks the blocks of `pages` and submits their writes.
fn submit(
    fs: &FsInner,
    inode: &Inode,
    state: &mut InodeState,
    pages: Vec<DirtyPage>,
    shown_size: u64,
    mode: Mode,
) -> Result<Batch> {
    let runs = match place(fs, inode, state, pages) {
        Ok(runs) => runs,
        Err((error, lost)) => {
            for (lblk, len) in lost {
                inode.pages.undo_writeback(lblk, len);
            }
            return Err(error);
        }
    };
    for run in &runs {
        state.carried.written_in_place(run.phys, run.len());
    }
    let (class, order) = how(fs, inode, mode);
    let mut orders = vec![order; runs.len()];
    // Else a commit will end the epoch.
    let grows = shown_size > state.disk.size;
    let ends_epoch = matches!(mode, Mode::Barrier { .. })
        && !grows
        && is_data_only(state, &runs, mode.is_datasync());
    if ends_epoch && let Some(last) = orders.last_mut() {
        *last = Order::Barrier;
    }
    let requests = runs
        .iter()
        .zip(&orders)
        .map(|(run, &order)| Request::Write {
            offset: fs.byte_offset(run.phys),
            bufs: run.bufs.clone(),
            order,
            fua: false,
            class,
        })
        .collect();
    let tickets = fs.device.submit(requests);
    if matches!(mode, Mode::DataFirst(_)) {
        inode.quasi_async.began(&tickets);
    }
    Ok(Batch { runs, tickets, shown_size, ends_epoch, pass: None })
}

/// Class and order of data writes. Data that is complete before its extents enter a transaction
/// needs no order, and must have none: or each commit would wait for all of it. Only where
/// somebody relies on order between files ([`Mode::Barrier`]) it has.
fn how(fs: &FsInner, inode: &Inode, mode: Mode) -> (Class, Order) {
    match mode {
        Mode::Fsync { .. } if planted(Bug::DataAfterCommit) || planted(Bug::PartDataNotAwaited) => {
            (Class::Sync, Order::Orderless)
        }
        Mode::Fsync { .. } => (Class::Sync, Order::Ordered),
        Mode::Barrier { .. } => (Class::Async, Order::Ordered),
        Mode::DataFirst(class) => {
            let in_order = fs.data_in_order.load(Ordering::Acquire);
            let order = if in_order { Order::Ordered } else { Order::Orderless };
            (inode.quasi_async.class(class), order)
        }
    }
}

/// Whether writing these runs, without growth, changes nothing but data.
fn is_data_only(state: &InodeState, runs: &[WriteRun], datasync: bool) -> bool {
    let changes = runs.iter().any(|run| run.place != Place::Written);
    !changes && (datasync || !state.dirty)
}

pub(super) type Lost = Vec<(u32, u32)>;

/// Splits `pages` into runs that are contiguous in the file and on the device.
pub(super) fn place(
    fs: &FsInner,
    inode: &Inode,
    state: &mut InodeState,
    pages: Vec<DirtyPage>,
) -> Result<Vec<WriteRun>, (crate::error::Error, Lost)> {
    let mut runs: Vec<WriteRun> = Vec::new();
    let mut rest: VecDeque<DirtyPage> = pages.into();
    while let Some(first) = rest.front() {
        let (lblk, delalloc) = (first.lblk, first.delalloc);
        let want = rest
            .iter()
            .zip(lblk..)
            .take_while(|(page, expected)| page.lblk == *expected && page.delalloc == delalloc)
            .count() as u32;
        let target = if delalloc {
            let before = runs.last().filter(|run| run.lblk.checked_add(run.len()) == Some(lblk));
            let behind = before.and_then(|run| run.phys.checked_add(u64::from(run.len())));
            pick(fs, inode, state, (lblk, want), behind)
                .map(|run| (run, Place::New { reserved: run.len }))
        } else {
            existing(fs, inode, state, lblk, want)
        };
        // Before anything depends on it. The disk below may be full.
        let roomy = target.and_then(|(run, place)| {
            fs.ensure_room(run.start, u64::from(run.len))
                .inspect_err(|_| give_up(fs, run, place))?;
            Ok((run, place))
        });
        let (run, place) = match roomy {
            Ok(found) => found,
            Err(error) => {
                let mut lost: Lost = runs.iter().map(|r| (r.lblk, r.len())).collect();
                lost.extend(rest.iter().map(|p| (p.lblk, 1)));
                for run in &runs {
                    give_up(fs, Run { start: run.phys, len: run.len() }, run.place);
                }
                return Err((error, lost));
            }
        };
        let bufs = rest.drain(..run.len as usize).map(|page| page.buf).collect();
        runs.push(WriteRun { lblk, phys: run.start, place, bufs });
    }
    Ok(runs)
}

/// Releases the blocks of a run that will not be written.
pub(super) fn give_up(fs: &FsInner, run: Run, place: Place) {
    if matches!(place, Place::New { .. }) {
        fs.unpick(run);
    }
}

/// Marks the pages of runs dirty again that are not being written.
pub(super) fn take_back(fs: &FsInner, inode: &Inode, runs: &[WriteRun]) {
    for run in runs {
        give_up(fs, Run { start: run.phys, len: run.len() }, run.place);
        inode.pages.undo_writeback(run.lblk, run.len());
    }
}

/// Picks blocks for new data: after the block before it, which is not mapped yet if it was picked
/// just now.
fn pick(
    fs: &FsInner,
    inode: &Inode,
    state: &mut InodeState,
    (lblk, want): (u32, u32),
    behind: Option<BlockNo>,
) -> Result<Run> {
    let goal = match behind {
        Some(block) => Goal::behind(fs, inode, state, block),
        None => Goal::for_file(fs, inode, state, lblk)?,
    };
    fs.pick_for_file(state, goal, lblk, want)
}

/// The blocks that a run of pages has already.
fn existing(
    fs: &FsInner,
    inode: &Inode,
    state: &mut InodeState,
    lblk: u32,
    want: u32,
) -> Result<(Run, Place)> {
    let found = map::lookup(fs, inode, state, lblk, want)?;
    Ok(match found.kind {
        MapKind::Written(start) => (Run { start, len: found.len }, Place::Written),
        MapKind::Unwritten(start) => (Run { start, len: found.len }, Place::Unwritten),
        MapKind::Hole => {
            let run = pick(fs, inode, state, (lblk, found.len.min(want)), None)?;
            (run, Place::New { reserved: 0 })
        }
    })
}

/// Waits for a background batch, then inserts its extents.
pub(super) fn complete(fs: &Arc<FsInner>, inode: &Arc<Inode>, mut batch: Batch) -> Result<()> {
    let written = match planted(Bug::WritebackNotAwaited) {
        true => Ok(()),
        false => wait_all(&batch.tickets),
    };
    drop(batch.pass.take());
    inode.quasi_async.ended();
    if let Err(error) = written {
        if error.is_no_space() {
            // A file system that needs room for overwriting, too. Nothing refers to it yet.
            take_back(fs, inode, &batch.runs);
        }
        fs.told_room(Err(error.clone()))?;
        return Err(error.into());
    }
    let mut state = inode.state.write();
    record(fs, inode, &mut state, &batch, &[], true)?;
    drop(state);
    for run in &batch.runs {
        inode.pages.end_writeback(run.lblk, run.len());
    }
    Ok(())
}

/// Waits for all; returns the first error.
fn wait_all(tickets: &[Ticket]) -> Result<(), IoError> {
    tickets.iter().map(Ticket::wait).fold(Ok(()), Result::and)
}

/// Inserts the extents of a batch and moves the on-disk size on; `tickets` are attached
/// to the transaction that does it, so that its commit covers all of the data. Where nothing
/// but data changes, no commit does, and `inode.in_place` notes that a flush is owed.
fn record(
    fs: &Arc<FsInner>,
    inode: &Arc<Inode>,
    state: &mut InodeState,
    batch: &Batch,
    tickets: &[Ticket],
    datasync: bool,
) -> Result<()> {
    let mut recorded = batch.runs.len();
    let result = record_runs(fs, inode, state, batch, tickets, datasync, &mut recorded);
    let Err(error) = &result else { return result };
    // Data without a commit to cover it.
    inode.in_place.record_write();
    if error.is(Errno::NOSPC) {
        // The map had no room for all of the runs. Nobody else may get the blocks of the others
        // while they are being written.
        let _ = wait_all(&batch.tickets);
        let (kept, others) = batch.runs.split_at(recorded);
        kept.iter().for_each(|run| inode.pages.end_writeback(run.lblk, run.len()));
        take_back(fs, inode, others);
    }
    result
}

/// As [`record`]; says on `ENOSPC` how many of the runs are recorded.
fn record_runs(
    fs: &Arc<FsInner>,
    inode: &Arc<Inode>,
    state: &mut InodeState,
    batch: &Batch,
    tickets: &[Ticket],
    datasync: bool,
    recorded: &mut usize,
) -> Result<()> {
    let runs = &batch.runs;
    let mut disk_size = batch.shown_size.min(state.size);
    if fs.room.is_full() {
        // Pages of batches before this one may be dirty again.
        disk_size = disk_size.min(shown_size_before(fs, inode, state, state.disk.size, u64::MAX));
    }
    let grows = disk_size > state.disk.size;
    let changes: Vec<usize> =
        (0..runs.len()).filter(|&i| runs[i].place != Place::Written).collect();
    if changes.is_empty() && !grows {
        inode.in_place.record_write();
        if datasync || !state.dirty {
            return Ok(());
        }
    }
    let mut groups = changes.chunks(map::runs_per_handle(fs) as usize).peekable();
    loop {
        let group = groups.next().unwrap_or(&[]);
        let credits = map::credits_insert(fs, group.len() as u32) + disk::STORE_CREDITS;
        let handle = fs.start(credits)?;
        let mut result = Ok(());
        for &i in group {
            match insert_run(fs, &handle, inode, state, &runs[i]) {
                Err(error) if error.is(Errno::NOSPC) => {
                    *recorded = i;
                    disk_size = disk_size.min(fs.byte_offset(BlockNo(runs[i].lblk.into())));
                    result = Err(error);
                    break;
                }
                inserted => inserted?,
            }
            if let Some(ticket) = tickets.get(i) {
                handle.attach_data(ticket.clone());
            }
        }
        let last = groups.peek().is_none() || result.is_err();
        if last {
            // The bytes that the new size shows may lie in runs written in place, and the last
            // commit is the one that an fsync waits for.
            for ticket in tickets.iter().take(*recorded) {
                handle.attach_data(ticket.clone());
            }
            state.disk.size = state.disk.size.max(disk_size);
        }
        if !group.is_empty() || grows {
            inode.touch_tid(handle.tid(), true);
            state.carried.mapped_unflushed(handle.tid());
        }
        disk::store(fs, &handle, inode, state)?;
        handle.stop();
        if last {
            return result;
        }
    }
}

/// Inserts or converts the extent of one run. On `ENOSPC` nothing is changed: the blocks are
/// picked, the pages have their reservation.
pub(super) fn insert_run(
    fs: &Arc<FsInner>,
    handle: &fjord_journal::Handle,
    inode: &Arc<Inode>,
    state: &mut InodeState,
    run: &WriteRun,
) -> Result<()> {
    match run.place {
        Place::Written => {}
        Place::Unwritten => map::mark_written(fs, handle, inode, state, run.lblk, run.len())?,
        Place::New { reserved } => {
            map::insert(fs, handle, inode, state, run.lblk, run.phys, run.len(), true)?;
            // This consumes the reservation as well.
            fs.use_picked(handle, Run { start: run.phys, len: run.len() }, reserved)?;
            state.reserved_blocks = state.reserved_blocks.saturating_sub(u64::from(reserved));
            inode.pages.end_delalloc(run.lblk, run.len());
        }
    }
    Ok(())
}

/// data=journal: puts the pages into the running transaction instead of writing them; with the
/// last of them the file may show `shown_size` bytes.
fn journal_pages(
    fs: &Arc<FsInner>,
    inode: &Arc<Inode>,
    state: &mut InodeState,
    pages: Vec<DirtyPage>,
    shown_size: u64,
) -> Result<()> {
    let runs = place(fs, inode, state, pages).map_err(|(error, lost)| {
        for (lblk, len) in lost {
            inode.pages.undo_writeback(lblk, len);
        }
        error
    })?;
    let limit = fs.journal().credits_max() / 4;
    for (index, run) in runs.iter().enumerate() {
        let mut done = 0;
        while done < run.len() {
            let part = (run.len() - done).min(limit.max(1));
            let slice = run.part(done..done + part);
            journal_run(fs, inode, state, &slice, shown_size).inspect_err(|error| {
                if error.is(Errno::NOSPC) {
                    let rest = run.part(done..run.len());
                    take_back(fs, inode, &[rest]);
                    take_back(fs, inode, &runs[index + 1..]);
                }
            })?;
            done += part;
        }
    }
    Ok(())
}

fn journal_run(
    fs: &Arc<FsInner>,
    inode: &Arc<Inode>,
    state: &mut InodeState,
    run: &WriteRun,
    shown_size: u64,
) -> Result<()> {
    let credits = map::credits_insert(fs, 1) + disk::STORE_CREDITS + run.len();
    let handle = fs.start(credits)?;
    insert_run(fs, &handle, inode, state, run)?;
    for (index, page) in run.bufs.iter().enumerate() {
        let buffer = fs.meta.create_data(BlockNo(run.phys.0 + index as u64));
        handle.get_create(&buffer)?.copy_from_slice(page);
    }
    let end = (u64::from(run.lblk) + u64::from(run.len())) * u64::from(fs.geo.block_size);
    state.disk.size = state.disk.size.max(end.min(shown_size).min(state.size));
    inode.touch_tid(handle.tid(), true);
    disk::store(fs, &handle, inode, state)?;
    handle.stop();
    inode.pages.end_writeback(run.lblk, run.len());
    Ok(())
}

/// Waits until no data write of the inode is in flight, or waiting to be.
pub(crate) fn drain(fs: &FsInner, inode: &Inode, in_flight: &mut InFlight) -> Result<()> {
    let writes = take_writes(in_flight);
    end_writes(fs, inode, writes)
}

/// Takes all data writes, also those that wait until somebody starts them.
fn take_writes(in_flight: &mut InFlight) -> Vec<InFlightWrite> {
    let mut writes = std::mem::take(&mut in_flight.writes);
    let deferred = std::mem::take(&mut in_flight.deferred).into_values();
    writes.extend(deferred.map(|run| {
        let DeferredRun { ticket, lblk, len } = run;
        InFlightWrite { ticket, lblk, len, unawaited_bytes: 0 }
    }));
    writes
}

/// As [`drain`], but leaves alone what i-transactions carry and nobody has started.
pub(crate) fn drain_submitted(fs: &FsInner, inode: &Inode, in_flight: &mut InFlight) -> Result<()> {
    let mut writes = std::mem::take(&mut in_flight.writes);
    let completed_count = fs.deferred.completed_count();
    if in_flight.deferred_seen != completed_count {
        in_flight.deferred_seen = completed_count;
        in_flight.deferred.retain(|_, run| {
            let is_done = run.ticket.is_done();
            if is_done {
                let (ticket, lblk, len) = (run.ticket.clone(), run.lblk, run.len);
                writes.push(InFlightWrite { ticket, lblk, len, unawaited_bytes: 0 });
            }
            !is_done
        });
    }
    end_writes(fs, inode, writes)
}

/// Ends those data writes that are complete; all, by waiting, when so much is under way that
/// the memory it holds matters. Writes that waited to be started are started.
fn reap(fs: &FsInner, inode: &Inode, in_flight: &mut InFlight) -> Result<()> {
    if fs.unawaited_bytes.load(Ordering::Relaxed) > fs.page_lru.unawaited_threshold_bytes() {
        return drain(fs, inode, in_flight);
    }
    in_flight.deferred.values().for_each(|run| run.ticket.start());
    in_flight.writes = take_writes(in_flight);
    let done = in_flight.writes.extract_if(.., |write| write.ticket.is_done()).collect();
    end_writes(fs, inode, done)
}

fn end_writes(fs: &FsInner, inode: &Inode, writes: Vec<InFlightWrite>) -> Result<()> {
    let mut first_error = None;
    for write in writes {
        if let Err(error) = write.ticket.wait() {
            first_error.get_or_insert(error);
        }
        fs.unawaited_bytes.fetch_sub(write.unawaited_bytes, Ordering::Relaxed);
        inode.pages.end_writeback(write.lblk, write.len);
    }
    match first_error {
        Some(error) => {
            inode.wb_errors.fetch_add(1, Ordering::AcqRel);
            let error = error.into();
            fs.note_write_error(&error);
            Err(error)
        }
        None => Ok(()),
    }
}

/// As [`drain`], taking the lock.
pub(crate) fn wait_in_flight(fs: &FsInner, inode: &Inode) -> Result<()> {
    drain(fs, inode, &mut inode.lock_writeback())
}

/// After writes in [`Mode::Barrier`]: sees to it that somebody ends them, at once when they would
/// hold too much memory.
pub(crate) fn leave_in_flight(fs: &Arc<FsInner>, inode: &Arc<Inode>) -> Result<()> {
    let mut in_flight = inode.lock_writeback();
    reap(fs, inode, &mut in_flight)?;
    if !in_flight.writes.is_empty() {
        fs.dirty_inodes.add(inode);
    }
    Ok(())
}

/// The data writes of the inode that are in flight.
pub(crate) fn submitted(in_flight: &InFlight) -> Vec<Ticket> {
    in_flight.writes.iter().map(|write| write.ticket.clone()).collect()
}

/// As [`write_inode`] for an fsync. Returns the data writes in flight, for [`finish`].
pub(crate) fn submit_for_fsync(
    fs: &Arc<FsInner>,
    inode: &Arc<Inode>,
    datasync: bool,
) -> Result<Vec<Ticket>> {
    let mut in_flight = inode.lock_writeback();
    write_locked(fs, inode, &mut in_flight, 0..u64::MAX, Mode::Fsync { datasync })?;
    Ok(submitted(&in_flight))
}

/// Ends an fsync: the commit has waited for the data, which is `submitted`, so the pages are
/// released.
pub(crate) fn finish(
    fs: &FsInner,
    inode: &Arc<Inode>,
    submitted: &[Ticket],
    runs: Runs,
) -> Result<()> {
    if runs == Runs::ByCaller {
        return wait_in_flight(fs, inode);
    }
    let written = wait_all(submitted);
    match inode.writeback.try_lock() {
        Some(mut in_flight) => {
            let done = in_flight.writes.extract_if(.., |write| write.ticket.is_done()).collect();
            end_writes(fs, inode, done)
        }
        // The thread that has the lock may keep it over I/O; it, or the next one, releases the
        // pages.
        None if written.is_ok() => {
            fs.dirty_inodes.add(inode);
            Ok(())
        }
        // Counted once for each open file, by the thread that releases the pages.
        None => wait_in_flight(fs, inode),
    }
}

/// Before a rename replaces a file: the new content goes into the same or an earlier
/// transaction, so that a crash never leaves an empty file in place of the old one.
pub(crate) fn flush_for_rename(fs: &Arc<FsInner>, inode: &Arc<Inode>) -> Result<()> {
    if inode.pages.has_dirty() {
        write_inode(fs, inode, 0..u64::MAX, Mode::Fsync { datasync: true })?;
    }
    Ok(())
}
