//! The policy `group`, per-block-group journaling (Kang and Shin): a partial commit of the groups
//! that the file depends on.
//!
//! Blocks written: those of [`super::compound`], for the *closure* only: the file's group and all
//! groups tied to it by an uncommitted operation that changed both. Of a block of group descriptors
//! the last committed copy with the closure's descriptors in it. All of it is one plain JBD2
//! transaction.
//!
//! Steps: 1. the file's data is submitted and attached to the transaction; 2. the transaction is
//! locked, its handles drain, the closure's blocks are frozen, and the transaction keeps running;
//! 3. journal blocks are written; 4. wait for them and for the data that the closure refers to,
//! **flush**; 5. commit block by FUA (or write and **flush**). The next commit serves all threads
//! that arrive meanwhile.
//!
//! The seed is the block of the inode table: every handle that changes a file, its data, its names
//! or its parents stores one of their inodes in the same handle, so the closure includes the
//! uncommitted part of the path to the file.
//!
//! Falls back to compound: `entangled` (the closure is nearly everything), `superblock` (it
//! includes the superblock: the first orphan of a mount with an orphan file; without one, a file
//! that loses its last name and stays open, see [`crate::orphan`]), `log-full` (no space for two
//! transactions instead of one), `commit-under-way`, `no-log`.
//!
//! A crash before 5 is complete leaves the closure as of its last commit, after it the new
//! state; other groups stay as of theirs. Linux and e2fsck recover it.

use std::sync::Arc;

use fjord_block::plant::{Bug, planted};
use fjord_journal::{ChangesUpTo, PartialCommit, WholeReason};

use super::step::{Step, ending};
use super::{Fallback, FsyncPolicy, Outcome};
use crate::error::Result;
use crate::file::writeback;
use crate::fs::FsInner;
use crate::inode::{Inode, disk};

/// Commits groups.
pub(crate) struct Group;

impl FsyncPolicy for Group {
    fn name(&self) -> &'static str {
        "group"
    }

    fn keeps_barriers(&self) -> bool {
        true
    }

    fn commits_groups(&self) -> bool {
        true
    }

    fn start(&self, fs: &Arc<FsInner>, inode: &Arc<Inode>, datasync: bool) -> Result<Step> {
        let submitted = writeback::submit_for_fsync(fs, inode, datasync)?;
        let step = request(fs, inode, datasync);
        let (fs, inode) = (fs.clone(), inode.clone());
        // The failure of the file's own data says more than that of the commit it was attached
        // to.
        ending(step, move |committed, runs| {
            writeback::finish(&fs, &inode, &submitted, runs).and(committed)
        })
    }
}

fn request(fs: &Arc<FsInner>, inode: &Arc<Inode>, datasync: bool) -> Result<Step> {
    let wanted = if datasync { &inode.datasync_tid } else { &inode.sync_tid };
    let owed = inode.in_place.owed();
    if owed.is_some() && !fs.keeps_order() {
        // As in the compound commit: data that is attached to nothing is complete before the
        // flush that is to cover it.
        writeback::wait_in_flight(fs, inode)?;
    }
    let is_uncommitted = |changes: &ChangesUpTo| !fs.journal().is_committed(changes.tid());
    let Some(changes) = wanted.changes().filter(is_uncommitted) else {
        return end(fs, inode, owed, false, PartialCommit::Durable);
    };
    let seed = fs.part_of(disk::table_block(fs, inode.ino)?);
    let is_running = fs.journal().flush_is_to_come(changes.tid());
    let (fs, inode) = (fs.clone(), inode.clone());
    let rest = move |done: std::result::Result<PartialCommit, _>, _| {
        end(&fs, &inode, owed, is_running, done?)
    };
    Ok(Step::CommitPart(changes, seed, Box::new(rest)))
}

/// `was_running`: the flush of a full commit of the transaction was to come when it was requested.
fn end(
    fs: &FsInner,
    inode: &Inode,
    owed: Option<u64>,
    was_running: bool,
    done: PartialCommit,
) -> Result<Step> {
    // Partial commits flush after the request; other commits may have flushed before.
    let is_flushed = match done {
        PartialCommit::Durable => false,
        PartialCommit::Parts { .. } => true,
        PartialCommit::Whole(_) => was_running,
    };
    if let Some(mark) = owed {
        if !is_flushed && !planted(Bug::PartOverwriteNotFlushed) {
            fs.flush_device()?;
        }
        inode.in_place.record_flush(mark);
    }
    Ok(Step::Done(match done {
        PartialCommit::Durable if owed.is_some() => Outcome::Data,
        PartialCommit::Durable => Outcome::Nothing,
        PartialCommit::Parts { log_blocks } => {
            fs.fsync_counters.logged(u64::from(log_blocks), 0);
            Outcome::Policy
        }
        // The closure was the whole transaction.
        PartialCommit::Whole(WholeReason::Everything) => Outcome::Policy,
        PartialCommit::Whole(reason) => Outcome::Fallback(fallback(reason)),
    }))
}

fn fallback(reason: WholeReason) -> Fallback {
    match reason {
        WholeReason::NoParts => Fallback::NoLog,
        WholeReason::WholePart => Fallback::Superblock,
        WholeReason::Everything | WholeReason::NearlyAll => Fallback::Entangled,
        WholeReason::LogSpace => Fallback::LogFull,
        WholeReason::UnderWay => Fallback::CommitUnderWay,
    }
}
