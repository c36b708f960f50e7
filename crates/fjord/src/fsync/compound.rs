//! The policy `compound`: a full commit for each fsync.
//!
//! Blocks written: descriptor, every metadata block that the running transaction
//! changed, revoke blocks, commit block; nothing if the file's newest change has
//! committed already.
//!
//! Steps: 1. the file's data was submitted and, where metadata changes with it, attached to the
//! transaction, so that data and log are in flight together; 2. the transaction is locked, its
//! handles drain, its blocks are frozen;
//! 3. journal blocks are written; 4. wait for the data and the journal blocks, **flush**;
//! 5. commit block by FUA (or write and **flush**). Steps 2–5 run in the calling thread unless
//!    another commit is in progress.
//!
//! Over a device that keeps order, 3 to 5 are submitted at once, in two epochs, with one wait at
//! the end: see `fjord_journal`'s commit.
//!
//! For a regular file whose changes have committed, nothing is written. For any other inode the
//! running transaction is committed, as in `ext4_sync_file`: an fsync of a directory is expected to
//! include changes below it.
//!
//! A crash before 5 is complete leaves the file as of its last commit, after it the new
//! state. There is no fallback: this policy is the fallback of the others.

use std::sync::Arc;

use fjord_block::Ticket;
use fjord_block::plant::{Bug, planted};
use fjord_format::Tid;

use super::step::{Step, ending};
use super::{Epoch, FsyncPolicy, Outcome};
use crate::error::Result;
use crate::file::writeback;
use crate::fs::FsInner;
use crate::inode::Inode;

/// Commits the running transaction.
pub(crate) struct Compound;

impl FsyncPolicy for Compound {
    fn name(&self) -> &'static str {
        "compound"
    }

    fn keeps_barriers(&self) -> bool {
        true
    }

    fn start(&self, fs: &Arc<FsInner>, inode: &Arc<Inode>, datasync: bool) -> Result<Step> {
        let submitted = writeback::submit_for_fsync(fs, inode, datasync)?;
        commit(fs, inode, datasync, submitted)
    }
}

/// The newest transaction that has to be durable for an fsync of the inode, unless it is.
fn wanted(fs: &FsInner, inode: &Inode, datasync: bool) -> Option<Tid> {
    let own = if datasync { &inode.datasync_tid } else { &inode.sync_tid };
    let newest = || Some(fs.journal().newest_tid());
    let all = !inode.is_regular && !planted(Bug::DirectoryFsyncAlone);
    let tid = if all { newest() } else { own.get() };
    tid.filter(|&tid| !fs.journal().is_committed(tid))
}

/// Commits the inode's changes. Its data has been `submitted`, and is complete or attached to the
/// running transaction; it is released in the end. The fallback of all other policies.
///
/// # Errors
/// I/O errors of the journal, the device, or data in place.
pub(crate) fn commit(
    fs: &Arc<FsInner>,
    inode: &Arc<Inode>,
    datasync: bool,
    submitted: Vec<Ticket>,
) -> Result<Step> {
    let step = request(fs, inode, datasync);
    let (fs, inode) = (fs.clone(), inode.clone());
    // An error of the file's own data is more specific than that of the commit.
    ending(step, move |committed, runs| {
        writeback::finish(&fs, &inode, &submitted, runs).and(committed)
    })
}

fn request(fs: &Arc<FsInner>, inode: &Arc<Inode>, datasync: bool) -> Result<Step> {
    let datasync = datasync || planted(Bug::FsyncAsFdatasync);
    let owed = inode.in_place.owed();
    if owed.is_some() && !fs.keeps_order() {
        // Overwrites are not attached to a transaction: the next flush covers them only if they are
        // complete before it starts.
        writeback::wait_in_flight(fs, inode)?;
    }
    let Some(tid) = wanted(fs, inode, datasync) else {
        let Some(mark) = owed else { return Ok(Step::Done(Outcome::Nothing)) };
        let outcome = match planted(Bug::OverwriteNotFlushed) {
            true => Outcome::Nothing,
            false => fs.flush_device().map(|()| Outcome::Data)?,
        };
        inode.in_place.record_flush(mark);
        return Ok(Step::Done(outcome));
    };
    if owed.is_some() && !fs.journal().flush_is_to_come(tid) {
        // A commit in progress may have flushed before the overwrites.
        fs.flush_device()?;
    }
    let inode = inode.clone();
    Ok(Step::Commit(
        tid,
        Box::new(move |committed, _| {
            committed?;
            if let Some(mark) = owed {
                inode.in_place.record_flush(mark);
            }
            Ok(Step::Done(Outcome::Policy))
        }),
    ))
}

/// Orders the metadata of `inode`, and all its data, before everything that is written later,
/// without waiting for the device, which keeps order. All data writes have been submitted as
/// ordered ones. Ends an epoch.
///
/// # Errors
/// Errors before the device has answered; the next fsync reports later ones.
pub(crate) fn order(fs: &FsInner, inode: &Inode, datasync: bool) -> Result<Epoch> {
    let mark = inode.in_place.mark();
    let journal = fs.journal();
    let wanted = wanted(fs, inode, datasync);
    // A transaction whose flush begins after the writes in place were submitted.
    let newest = journal.newest_tid();
    let mut settled_by = if journal.flush_is_to_come(newest) { newest } else { newest.next() };
    if let Some(tid) = wanted {
        let ends_epoch = journal.flush_is_to_come(tid);
        journal.commit_in_order(tid)?;
        if ends_epoch {
            inode.in_place.record_barrier(mark);
            settled_by = tid;
        }
    }
    if inode.in_place.owes_barrier() {
        // Data that another thread wrote back, in no epoch or an open one. What was written up to the
        // mark is complete, or ordered.
        fs.flush_device()?;
        inode.in_place.record_flush(mark);
    }
    Ok(match (wanted, inode.in_place.owed()) {
        (None, None) => fs.epochs.end_durable(),
        (Some(tid), None) => fs.epochs.end(fs, tid),
        (_, Some(_)) => fs.epochs.end_in_place(fs, wanted, settled_by),
    })
}
