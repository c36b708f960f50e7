//! The classic fsync: commit the whole running transaction.
//!
//! Blocks written: descriptor, every metadata block that the running transaction
//! changed, revoke blocks, commit block; nothing if the file's newest change has
//! committed already.
//!
//! Steps: 1. the file's data was submitted and, where metadata changes with it, attached to
//! the transaction, so that data and log are on their way together; 2. the transaction is locked, its handles drain, its blocks are frozen;
//! 3. journal blocks are written; 4. wait for the data and the journal blocks, **flush**;
//! 5. commit block by FUA (or write and **flush**). Steps 2–5 run in the calling thread
//! when no other commit is under way.
//!
//! A crash before 5 is complete leaves the file as of its last commit, after it the new
//! state. There is no fallback: this is what the others fall back to.

use fjord_block::plant::{Bug, planted};

use crate::error::Result;
use crate::file::writeback;
use crate::fs::FsInner;
use crate::fsync::FsyncPolicy;
use crate::inode::Inode;

/// Commits the running transaction.
pub(crate) struct Compound;

impl FsyncPolicy for Compound {
    fn name(&self) -> &'static str {
        "compound"
    }

    fn commit(&self, fs: &FsInner, inode: &Inode, datasync: bool) -> Result<()> {
        let datasync = datasync || planted(Bug::FsyncAsFdatasync);
        let wanted = if datasync { &inode.datasync_tid } else { &inode.sync_tid };
        let owed = inode.in_place.owed();
        if owed.is_some() {
            // Writes that change no metadata are attached to no transaction: whichever flush
            // comes next covers them only if they are complete before it starts.
            writeback::wait_in_flight(fs, inode)?;
        }
        match wanted.get().filter(|&tid| !fs.journal().is_committed(tid)) {
            Some(tid) => fs.journal().commit(tid)?,
            None if owed.is_some() && !planted(Bug::OverwriteNotFlushed) => fs.flush_device()?,
            None => {}
        }
        if let Some(mark) = owed {
            inode.in_place.record_flush(mark);
        }
        Ok(())
    }
}
