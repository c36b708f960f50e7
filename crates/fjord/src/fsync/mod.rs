//! Fsync policies: the blocks that a call makes durable.
//!
//! Owns the interface between the engine and the policies. A policy writes an inode's data (see
//! [`crate::file::writeback`]) and makes its newest metadata durable, by its own log or, always
//! possible, by a full commit ([`compound`]). [`stats`] counts calls. The changes of an inode that no
//! commit covers are the inode's ([`crate::inode::changes`]), recorded whatever the policy.
//!
//! What a policy asks of the rest of the engine is a capability of [`FsyncPolicy`]; no other module
//! knows which policy a mount has.
//!
//! An fsync has two parts ([`step`]); the second one, after a commit, needs no thread that waits.
//!
//! Invariant: when an fsync ends with `Ok`, everything written to the file before the call, its
//! attributes, and a path to it survive a power cut.

mod compound;
pub(crate) mod epochs;
mod fast_commit;
mod feature;
mod group;
pub(crate) mod hazards;
mod ijournal;
pub(crate) mod order_only;
pub(crate) mod stats;
mod step;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use fjord_block::plant::{Bug, planted};
use fjord_format::features::Features;
use fjord_journal::{ChangesUpTo, Journal, room_waits_of_this_thread};
use rustix::io::Errno;

pub(crate) use compound::Compound;
pub use epochs::Epoch;
use group::Group;
pub(crate) use stats::{Fallback, Outcome};
pub(crate) use step::Runs;
use step::Step;

use crate::error::Result;
use crate::file::writeback;
use crate::fs::FsInner;
use crate::inode::{Inode, disk};
use crate::options::FsyncPolicyKind;

/// A way to make one file durable.
pub(crate) trait FsyncPolicy: Send + Sync {
    /// Name as on the command line.
    fn name(&self) -> &'static str;

    /// Writes the dirty data of `inode` and makes it and the metadata durable; with
    /// `datasync` only what is needed to read the data back. Runs in the calling thread, which
    /// holds no lock, until the fsync has ended, or only a commit is left to wait for.
    ///
    /// # Errors
    /// The first error of a write, flush or commit that the promise depends on.
    fn start(&self, fs: &Arc<FsInner>, inode: &Arc<Inode>, datasync: bool) -> Result<Step>;

    /// Orders without durability, as [`barrier`] promises it, on any device.
    ///
    /// # Errors
    /// Those that show before the device has answered.
    fn order(&self, _fs: &Arc<FsInner>, _inode: &Arc<Inode>, _datasync: bool) -> Result<Ordered> {
        Ok(Ordered::NeedsDevice)
    }

    /// Whether everything that it makes durable is ordered after earlier barriers: it only commits
    /// transactions of the log.
    fn keeps_barriers(&self) -> bool {
        false
    }

    /// Whether it commits block groups apart from each other, so that each buffer is of a part of
    /// the transaction, and changes of the superblock are put off to the next full commit.
    fn commits_groups(&self) -> bool {
        false
    }

    /// Whether it logs the names of new files apart from their directory, whose replay finds room
    /// only in the blocks that the directory had at the last full commit.
    fn logs_names_alone(&self) -> bool {
        false
    }

    /// Whether replay of its log writes the fields of a new inode only, and keeps the bytes after
    /// them that the inode table has on disk.
    fn replays_fields_only(&self) -> bool {
        false
    }

    /// Refuses an image without the features that it needs. Not asked for a read-only mount.
    ///
    /// # Errors
    /// `Usage`, with what to do.
    fn check_features(&self, _features: &Features) -> Result<()> {
        Ok(())
    }

    /// Refuses a journal without the room that it needs; `None` for an image without a journal. Not
    /// asked for a read-only mount.
    ///
    /// # Errors
    /// `Usage`, with what to do.
    fn check_journal(&self, _journal: Option<&Journal>) -> Result<()> {
        Ok(())
    }
}

/// Outcome of [`FsyncPolicy::order`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ordered {
    /// A barrier of the journal with this number has the file's state.
    Barrier(u64),
    /// This file needs an fsync for it.
    NeedsFsync,
    /// The policy has nothing for it: the device has to keep order.
    NeedsDevice,
}

/// The policy of an option. A writable mount has resolved `Auto` (see `fs/mount.rs`); for a
/// read-only one, and for checks before that, any policy that needs nothing of the image will do.
pub(crate) fn policy(kind: FsyncPolicyKind) -> Box<dyn FsyncPolicy> {
    match kind {
        FsyncPolicyKind::Auto | FsyncPolicyKind::Compound => Box::new(Compound),
        FsyncPolicyKind::FastCommit => Box::new(fast_commit::FastCommit),
        FsyncPolicyKind::Group => Box::new(Group),
        FsyncPolicyKind::Ijournal => Box::<ijournal::Ijournal>::default(),
    }
}

/// Whether a call means the data of a regular file only. As in ext4, fdatasync of any other inode
/// is fsync: the "data" of a directory are its names.
fn means_data_only(inode: &Inode, datasync: bool) -> bool {
    datasync && (inode.is_regular || planted(Bug::DirectoryFdatasync))
}

/// Makes a file durable: its data, then its metadata by the mount's policy.
///
/// # Errors
/// I/O errors of this file's data or of the journal.
pub(crate) fn fsync(fs: &Arc<FsInner>, inode: &Arc<Inode>, datasync: bool) -> Result<()> {
    let Some(mut call) = Call::begin(fs, inode, datasync)? else { return Ok(()) };
    let result = call.start(datasync).and_then(|step| step.wait(fs.journal()));
    call.end(result)
}

/// As [`fsync`], and calls `done` with the outcome: in this call, or later in another thread that
/// calls this function. Neither holds a lock then; this thread may call `done` of others.
pub(crate) fn fsync_then(
    fs: &Arc<FsInner>,
    inode: &Arc<Inode>,
    datasync: bool,
    done: impl FnOnce(Result<()>) + Send + 'static,
) {
    let mut call = match Call::begin(fs, inode, datasync) {
        Ok(Some(call)) => call,
        Ok(None) => return done(Ok(())),
        Err(error) => return done(Err(error)),
    };
    match call.start(datasync) {
        Ok(step) => step.then(fs.clone(), Box::new(move |result| done(call.end(result)))),
        Err(error) => done(call.end(Err(error))),
    }
}

/// An fsync in progress. Until it is dropped the inode counts as being written back, so that a
/// concurrent sync sees the writes in flight.
struct Call {
    fs: Arc<FsInner>,
    inode: Arc<Inode>,
    began: Instant,
    /// A handle of the first part had to wait for a commit or a checkpoint.
    waited_for_room: bool,
}

impl Call {
    /// `None` if there is nothing to do.
    fn begin(fs: &Arc<FsInner>, inode: &Arc<Inode>, datasync: bool) -> Result<Option<Call>> {
        fs.check_alive()?;
        if fs.is_read_only() {
            // A host that has lost the image is told so by each call.
            fs.device.check()?;
            return unwritten_is_lost(fs, inode, means_data_only(inode, datasync)).map(|()| None);
        }
        if let Some(awake) = fs.awake.get() {
            awake.count();
        }
        let began = Instant::now();
        fs.pace.note_fsync(began, inode);
        fs.dirty_inodes.begin_unguarded(inode);
        let (fs, inode) = (fs.clone(), inode.clone());
        Ok(Some(Call { fs, inode, began, waited_for_room: false }))
    }

    /// The first part.
    fn start(&mut self, datasync: bool) -> Result<Step> {
        let (fs, inode) = (&self.fs, &self.inode);
        let datasync = means_data_only(inode, datasync);
        let behind_barriers = fs.data_in_order.load(Ordering::Acquire);
        let waits = room_waits_of_this_thread();
        let step = if behind_barriers && !fs.fsync_policy.keeps_barriers() {
            Compound.start(fs, inode, datasync)
        } else {
            fs.fsync_policy.start(fs, inode, datasync)
        };
        self.waited_for_room = room_waits_of_this_thread() != waits;
        step
    }

    /// Counts it.
    fn end(self, result: Result<Outcome>) -> Result<()> {
        match result {
            Ok(mut outcome) => {
                if outcome == Outcome::Policy && self.waited_for_room {
                    outcome = Outcome::Fallback(Fallback::TransactionFull);
                }
                self.fs.fsync_counters.served(outcome, self.began.elapsed());
                Ok(())
            }
            Err(error) => {
                self.fs.fsync_counters.failed();
                self.fs.note_write_error(&error);
                Err(error)
            }
        }
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        self.fs.dirty_inodes.end(&self.inode);
    }
}

/// Whether the inode has changes that no commit covers; with `datasync` those that its data
/// needs.
pub(crate) fn is_uncommitted(fs: &FsInner, inode: &Inode, datasync: bool) -> bool {
    let wanted = if datasync { &inode.datasync_tid } else { &inode.sync_tid };
    let is_uncommitted = |changes: &ChangesUpTo| !fs.journal().is_committed(changes.tid());
    let Some(changes) = wanted.changes().filter(is_uncommitted) else { return false };
    if !fs.commits_groups() {
        return true;
    }
    // A partial commit may have made them durable before the rest of their transaction.
    let part = disk::table_block(fs, inode.ino).map(|block| fs.part_of(block));
    part.map_or(true, |part| !fs.journal().are_parts_committed(changes, &[part]))
}

/// Order without durability (`fbarrier`, `fdatabarrier`; section 4 of *Barrier-Enabled IO Stack
/// for Flash Storage*): whatever is changed after the call, in this file or another, is durable
/// only after everything written to this file before the call is. Where neither the policy nor the device
/// keeps order this is [`fsync`], and the epoch is durable.
///
/// # Errors
/// As [`fsync`], as far as they show now; later ones reach the next fsync.
pub(crate) fn barrier(fs: &Arc<FsInner>, inode: &Arc<Inode>, datasync: bool) -> Result<Epoch> {
    match order(fs, inode, datasync)? {
        Some(epoch) => Ok(epoch),
        None => fsync(fs, inode, datasync).map(|()| served_as_fsync(fs)),
    }
}

/// As [`barrier`], and calls `done` with the outcome: where it is [`fsync`], as [`fsync_then`] does.
pub(crate) fn barrier_then(
    fs: &Arc<FsInner>,
    inode: &Arc<Inode>,
    datasync: bool,
    done: impl FnOnce(Result<Epoch>) + Send + 'static,
) {
    match order(fs, inode, datasync) {
        Ok(Some(epoch)) => return done(Ok(epoch)),
        Ok(None) => {}
        Err(error) => return done(Err(error)),
    }
    let ended = fs.clone();
    fsync_then(fs, inode, datasync, move |result| {
        done(result.map(|()| served_as_fsync(&ended)));
    });
}

fn served_as_fsync(fs: &FsInner) -> Epoch {
    fs.stats.barriers_as_fsync.fetch_add(1, Ordering::Relaxed);
    fs.epochs.end_durable()
}

/// `None` if it takes an fsync.
fn order(fs: &Arc<FsInner>, inode: &Arc<Inode>, datasync: bool) -> Result<Option<Epoch>> {
    let datasync = means_data_only(inode, datasync);
    fs.check_alive()?;
    if fs.is_read_only() {
        return unwritten_is_lost(fs, inode, datasync).map(|()| Some(fs.epochs.end_durable()));
    }
    if planted(Bug::BarrierIgnored) {
        return Ok(Some(fs.epochs.end_durable()));
    }
    let busy = fs.dirty_inodes.begin(inode);
    let ordered = fs.fsync_policy.order(fs, inode, datasync);
    let epoch = match ordered.inspect_err(|error| fs.note_write_error(error))? {
        Ordered::Barrier(number) => fs.epochs.end_barrier(fs, number),
        Ordered::NeedsDevice if fs.keeps_order() => order_by_device(fs, inode, datasync)?,
        Ordered::NeedsDevice | Ordered::NeedsFsync => return Ok(None),
    };
    drop(busy);
    fs.stats.barriers.fetch_add(1, Ordering::Relaxed);
    Ok(Some(epoch))
}

/// Over a device that keeps order.
fn order_by_device(fs: &Arc<FsInner>, inode: &Arc<Inode>, datasync: bool) -> Result<Epoch> {
    fs.data_in_order.store(true, Ordering::Release);
    writeback::write_inode(fs, inode, 0..u64::MAX, writeback::Mode::Barrier { datasync })?;
    let ordered = compound::order(fs, inode, datasync);
    let result = writeback::leave_in_flight(fs, inode).and(ordered);
    result.inspect_err(|error| fs.note_write_error(error))
}

/// On a file system that is read-only. If an error made it so: fails if the file has changes that did
/// not reach the device.
fn unwritten_is_lost(fs: &FsInner, inode: &Inode, datasync: bool) -> Result<()> {
    if fs.options.read_only {
        return Ok(());
    }
    // What another thread is writing back is neither dirty nor in a transaction: its outcome comes first.
    let has_failed = writeback::wait_in_flight(fs, inode).is_err();
    let is_in_memory = {
        let state = inode.state.read();
        !state.dead && (state.disk.size < state.size || (state.dirty && !datasync))
    };
    // Recovery will find changes in the policy's log.
    let is_logged =
        inode.is_logged(inode.touches()) && fs.journal().make_barriers_durable().is_ok();
    if is_uncommitted(fs, inode, datasync) {
        // Commits that were dispatched before the error may succeed.
        fs.journal().settle_in_flight();
    }
    let uncommitted = is_uncommitted(fs, inode, datasync) && !is_logged;
    let is_unwritten = has_failed || is_in_memory || inode.pages.has_dirty();
    if !(uncommitted || is_unwritten || inode.in_place.owed().is_some()) {
        return Ok(());
    }
    Err(fs.status.first_error().unwrap_or(Errno::IO.into()))
}

#[cfg(test)]
mod tests {
    use fjord_block::{IoError, IoErrorKind, IoOp};
    use fjord_format::features::Compat;

    use super::*;
    use crate::file::write::{WriteOptions, write};
    use crate::testing::TestFs;

    #[test]
    fn what_each_policy_asks_of_others() {
        let plain = Features::default();
        let compat = Compat::FAST_COMMIT | Compat::HAS_JOURNAL;
        let whole = Features { compat, ..Features::default() };
        for &kind in [FsyncPolicyKind::Auto].iter().chain(FsyncPolicyKind::ALL) {
            let policy = policy(kind);
            let is = |other| kind == other;
            assert_eq!(policy.commits_groups(), is(FsyncPolicyKind::Group));
            assert_eq!(policy.logs_names_alone(), is(FsyncPolicyKind::FastCommit));
            assert_eq!(policy.replays_fields_only(), is(FsyncPolicyKind::FastCommit));
            assert_eq!(policy.check_features(&plain).is_err(), is(FsyncPolicyKind::FastCommit));
            assert!(policy.check_features(&whole).is_ok());
            let has_own_log = is(FsyncPolicyKind::FastCommit) || is(FsyncPolicyKind::Ijournal);
            assert_eq!(policy.check_journal(None).is_err(), has_own_log);
            assert_eq!(policy.keeps_barriers(), !has_own_log);
        }
    }

    /// The background has taken the new page for its write when the file system turns read-only: it is neither
    /// dirty nor in a transaction.
    #[test]
    fn on_a_failed_file_system_what_is_being_written_back_is_not_durable() {
        let test = TestFs::new(&["-t", "ext4", "-b", "4096"], 16);
        let fs = &test.fs;
        let [grown, rewritten, clean] =
            ["grown", "rewritten", "clean"].map(|name| test.create(name));
        let page = |inode: &Arc<Inode>, at| {
            write(fs, inode, at, &[7; 4096], WriteOptions::default()).unwrap();
        };
        for inode in [&grown, &rewritten, &clean] {
            page(inode, 0);
            fsync(fs, inode, false).unwrap();
        }
        page(&grown, 4096);
        page(&rewritten, 0);
        let open = crate::InodeRef::new(fs, rewritten.clone()).open();
        std::thread::scope(|scope| {
            let mut taken = Vec::new();
            for inode in [&grown, &rewritten] {
                let in_flight = inode.writeback.try_lock().unwrap();
                taken.push((in_flight, inode.pages.take_dirty(0..u64::MAX, 8)));
            }
            let failure = IoError::new(IoErrorKind::Os(5), IoOp::Write, 0, 4096);
            fs.note_write_error(&failure.into());
            let fsyncs = [&grown, &rewritten].map(|inode| scope.spawn(|| fsync(fs, inode, true)));
            let opened = scope.spawn(|| open.fsync(true));
            // What the background does when its write fails.
            for (_, inode) in taken.iter().zip([&grown, &rewritten]) {
                inode.wb_errors.fetch_add(1, Ordering::AcqRel);
            }
            drop(taken);
            let [of_grown, _] = fsyncs.map(|fsync| fsync.join().unwrap());
            assert!(of_grown.is_err(), "the size on disk is the old one");
            assert!(opened.join().unwrap().is_err());
        });
        assert!(fsync(fs, &clean, true).is_ok());
    }
}
