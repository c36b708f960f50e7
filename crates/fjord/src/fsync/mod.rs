//! Fsync: which blocks a call makes durable.
//!
//! Owns the seam between the engine and the ways of committing. A policy gets an inode
//! whose data has been submitted (see [`crate::file::writeback`]) and makes the newest
//! metadata of that inode durable, together with every data write attached to it.
//!
//! Invariant: when [`FsyncPolicy::fsync`] returns `Ok`, everything written to the file
//! before the call, its attributes, and a path to it survive a power cut.

mod compound;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use fjord_block::Class;
use fjord_block::plant::{Bug, planted};
use rustix::io::Errno;

pub(crate) use compound::Compound;

use crate::error::Result;
use crate::file::writeback;
use crate::fs::FsInner;
use crate::inode::Inode;
use crate::options::FsyncPolicyKind;

/// A way to make one file durable.
pub(crate) trait FsyncPolicy: Send + Sync {
    /// Name as on the command line.
    fn name(&self) -> &'static str;

    /// Makes the metadata of `inode` durable; with `datasync` only what is needed to
    /// read its data back. All data writes have been submitted and are either complete
    /// or attached to the running transaction.
    ///
    /// # Errors
    /// The first error of a write, flush or commit that the promise depends on.
    fn commit(&self, fs: &FsInner, inode: &Inode, datasync: bool) -> Result<()>;

    /// Puts the metadata of `inode`, as [`FsyncPolicy::commit`] would make it durable, and all
    /// its data, before everything that is written later, without waiting for the device. All
    /// data writes have been submitted as ordered ones. The device keeps order.
    ///
    /// # Errors
    /// What shows before the device has answered; the rest is the next fsync's to report.
    fn order(&self, fs: &FsInner, inode: &Inode, datasync: bool) -> Result<()>;
}

/// The policy that an option names.
pub(crate) fn policy(kind: FsyncPolicyKind) -> Box<dyn FsyncPolicy> {
    match kind {
        FsyncPolicyKind::Compound => Box::new(Compound),
    }
}

/// Makes a file durable: writes its data back, then commits by the mount's policy.
///
/// # Errors
/// I/O errors of this file's data or of the journal.
pub(crate) fn fsync(fs: &Arc<FsInner>, inode: &Arc<Inode>, datasync: bool) -> Result<()> {
    fs.check_alive()?;
    if fs.is_read_only() {
        return unwritten_is_lost(fs, inode, datasync);
    }
    // A sync by somebody else must know of the writes that are under way here.
    let _busy = fs.dirty_inodes.begin(inode);
    writeback::write_inode(fs, inode, 0..u64::MAX, writeback::Mode::Fsync { datasync })?;
    let committed = fs.fsync_policy.commit(fs, inode, datasync);
    // The failure of the file's own data says more than that of the commit it was attached to.
    let result = writeback::finish(fs, inode).and(committed);
    result.inspect_err(|error| fs.note_write_error(error))?;
    fs.stats.fsyncs.fetch_add(1, Ordering::Relaxed);
    Ok(())
}

/// Order without durability (`fbarrier`, `fdatabarrier`; section 4 of *Barrier-Enabled IO Stack
/// for Flash Storage*): whatever is changed after the call, in this file or another, is durable
/// only after everything written to this file before the call is. Where the device does not keep
/// order this is [`fsync`].
///
/// # Errors
/// As [`fsync`], as far as they show now; later ones reach the next fsync.
pub(crate) fn barrier(fs: &Arc<FsInner>, inode: &Arc<Inode>, datasync: bool) -> Result<()> {
    if !fs.keeps_order() {
        return fsync(fs, inode, datasync);
    }
    fs.check_alive()?;
    if fs.is_read_only() {
        return unwritten_is_lost(fs, inode, datasync);
    }
    if planted(Bug::BarrierIgnored) {
        let mode = writeback::Mode::DataFirst(Class::Async);
        return writeback::write_inode(fs, inode, 0..u64::MAX, mode);
    }
    fs.data_in_order.store(true, Ordering::Release);
    let _busy = fs.dirty_inodes.begin(inode);
    writeback::write_inode(fs, inode, 0..u64::MAX, writeback::Mode::Barrier { datasync })?;
    let ordered = fs.fsync_policy.order(fs, inode, datasync);
    let result = writeback::leave_in_flight(fs, inode).and(ordered);
    result.inspect_err(|error| fs.note_write_error(error))?;
    fs.stats.barriers.fetch_add(1, Ordering::Relaxed);
    Ok(())
}

/// On a file system that an error made read-only: fails if the file has changes that did not
/// reach the device before, and never will.
fn unwritten_is_lost(fs: &FsInner, inode: &Inode, datasync: bool) -> Result<()> {
    let wanted = if datasync { &inode.datasync_tid } else { &inode.sync_tid };
    let uncommitted = wanted.get().is_some_and(|tid| !fs.journal().is_committed(tid));
    if !(uncommitted || inode.pages.has_dirty() || inode.in_place.owed().is_some()) {
        return Ok(());
    }
    Err(fs.status.first_error().unwrap_or(Errno::IO.into()))
}
