//! The metadata of a writeback: extents of the written runs, and the size on disk.
//!
//! Owns the handles that record a batch. Invariant: the size on disk does not pass bytes whose writing no commit
//! covers.

use std::sync::Arc;

use fjord_block::Ticket;
use fjord_format::BlockNo;
use fjord_journal::Handle;
use rustix::io::Errno;

use super::Batch;
use super::in_flight::wait_all;
use super::runs::{Place, WriteRun, take_back};
use crate::alloc::Run;
use crate::error::Result;
use crate::file::truncate::shown_size_before;
use crate::fs::FsInner;
use crate::inode::{Inode, InodeState, disk};
use crate::map;

/// Inserts the extents of a batch and moves the on-disk size on; `tickets` are attached
/// to the transaction that does it, so that its commit covers all of the data. Where nothing
/// but data changes, no commit does, and `inode.in_place` notes that a flush is owed.
pub(super) fn record(
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
            inode.touch_tid(handle.changes(), true);
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
pub(in crate::file) fn insert_run(
    fs: &Arc<FsInner>,
    handle: &Handle,
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
