//! Data writes in flight of one inode: who waits for them, and who releases their pages.
//!
//! Invariant: a page stays *writeback* until its write is complete, and is released once.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use fjord_block::{IoError, Ticket};

use super::{Batch, Mode};
use crate::error::Result;
use crate::file::carry::DeferredRun;
use crate::fs::FsInner;
use crate::fsync::Runs;
use crate::inode::{InFlight, InFlightWrite, Inode};

/// Notes writes that the caller does not wait for here.
pub(super) fn record_in_flight(fs: &FsInner, in_flight: &mut InFlight, batch: Batch, mode: Mode) {
    let is_awaited = matches!(mode, Mode::Fsync { .. });
    for (run, ticket) in batch.runs.iter().zip(batch.tickets) {
        let bytes = u64::from(run.len()) * u64::from(fs.geo.block_size);
        let unawaited_bytes = if is_awaited { 0 } else { bytes };
        fs.unawaited_bytes.fetch_add(unawaited_bytes, Ordering::Relaxed);
        let (lblk, len) = (run.lblk, run.len());
        in_flight.writes.push(InFlightWrite { ticket, lblk, len, unawaited_bytes });
    }
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
        let DeferredRun { ticket, lblk, len, .. } = run;
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
pub(super) fn reap(fs: &FsInner, inode: &Inode, in_flight: &mut InFlight) -> Result<()> {
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

/// Waits for all; returns the first error.
pub(super) fn wait_all(tickets: &[Ticket]) -> Result<(), IoError> {
    tickets.iter().map(Ticket::wait).fold(Ok(()), Result::and)
}
