//! Writeback: dirty pages to the device, and their extents into the metadata.
//!
//! Owns the order of the two: [`runs`] has blocks for the data, [`extents`] the metadata, [`in_flight`]
//! the writes that nobody has waited for, [`journaled`] data that is logged, [`together`] requests with data of several inodes. In the background, blocks are picked in memory, data is written and
//! awaited, and only then does a handle insert the extents, so that a periodic commit never waits
//! for data of other files. An fsync cannot spare that wait: it inserts the extents at once and
//! attaches the data's tickets to the transaction.
//!
//! Invariants: see [`crate::file`]. A page stays *writeback* (and so cached) until its
//! write is complete, so that a read never meets old content on the device. (After
//! [`Mode::Barrier`] a page may be written again before that; there the scheduler below keeps
//! reads and writes of the same bytes in order.)

mod extents;
mod in_flight;
mod journaled;
mod runs;
mod together;

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use fjord_block::plant::{Bug, planted};
use fjord_block::{Class, Device, Order, Ticket};
use rustix::io::Errno;

use crate::cache::page::DirtyPage;
use crate::error::Result;
use crate::file::pace::{self, Pace, Pass};
use crate::file::truncate::{note_growth, settle_size, shown_size, shown_size_before};
use crate::fs::FsInner;
use crate::inode::{InFlight, Inode, InodeState, disk};

use extents::record;
use in_flight::{reap, record_in_flight};
use journaled::journal_pages;

pub(super) use extents::insert_run;
pub(crate) use in_flight::{
    drain, drain_submitted, finish, leave_in_flight, submitted, wait_in_flight,
};
pub(crate) use journaled::journals_data;
pub(super) use journaled::{credits_for_journal, journal_at_once, journal_run, take_for_journal};
pub(super) use runs::{Place, WriteRun, place, take_back};
pub(super) use together::submit_together;

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
    /// The same; the data is left to [`submit_together`], with that of other inodes.
    Together(Class),
}

impl Mode {
    /// Whether times alone need not be stored.
    fn is_datasync(self) -> bool {
        matches!(self, Mode::Fsync { datasync: true } | Mode::Barrier { datasync: true })
    }
}

/// Runs whose data has been submitted, unless it is left to [`submit_together`].
pub(super) struct Batch {
    runs: Vec<WriteRun>,
    tickets: Vec<Ticket>,
    /// Who waits for the data, while it is not submitted.
    unsent: Option<Class>,
    /// Some of its requests carry data of other inodes too.
    is_merged: bool,
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
            Mode::DataFirst(_) | Mode::Together(_) => fs.pace.batch_pages(fs.geo.block_size),
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
                record_in_flight(fs, in_flight, batch, mode);
            }
            Mode::DataFirst(_) | Mode::Together(_) => {
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
            inode.touch_tid(handle.changes(), true);
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
    let runs = place(fs, inode, state, pages)?;
    for run in &runs {
        state.carried.written_in_place(run.phys, run.len());
    }
    if let Mode::Together(class) = mode {
        let unsent = Some(class);
        let (tickets, is_merged, ends_epoch) = (Vec::new(), false, false);
        return Ok(Batch { runs, tickets, unsent, is_merged, shown_size, ends_epoch, pass: None });
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
    let requests =
        runs.iter().zip(&orders).map(|(run, &order)| run.request(fs, order, class)).collect();
    let tickets = fs.data_device.submit(requests);
    if matches!(mode, Mode::DataFirst(_)) {
        inode.quasi_async.began(&tickets);
    }
    let (unsent, is_merged) = (None, false);
    Ok(Batch { runs, tickets, unsent, is_merged, shown_size, ends_epoch, pass: None })
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
        Mode::DataFirst(class) | Mode::Together(class) => {
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

/// Waits for a background batch, then inserts its extents.
pub(super) fn complete(fs: &Arc<FsInner>, inode: &Arc<Inode>, mut batch: Batch) -> Result<()> {
    submit_together(fs, &mut [(&**inode, &mut batch)]);
    let written = match planted(Bug::WritebackNotAwaited) {
        true => Ok(()),
        false => together::wait(fs, inode, &mut batch),
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

/// Before a rename replaces a file: the new content goes into the same or an earlier
/// transaction, so that a crash never leaves an empty file in place of the old one.
pub(crate) fn flush_for_rename(fs: &Arc<FsInner>, inode: &Arc<Inode>) -> Result<()> {
    if inode.pages.has_dirty() {
        write_inode(fs, inode, 0..u64::MAX, Mode::Fsync { datasync: true })?;
    }
    Ok(())
}
