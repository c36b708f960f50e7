//! The policy `ijournal` (iJournaling): the changes of one file, written by the caller of fsync to
//! an area after the log.
//!
//! Blocks written: one i-transaction, and nothing else if the file's dirty data is small: a header
//! block with the inode, the uncommitted names (topmost directory first, with the inodes of new
//! directories) and small data; then changed blocks of the extent tree and the *carried data*.
//! Larger data is written to its blocks first.
//!
//! Steps, in the calling thread:
//!
//! 1. small data: its pages get their blocks under a handle, as for a commit, but their writes are
//!    deferred ([`crate::file::carry`]). Larger data is written and waited for;
//! 2. the inode, its changed extent blocks and its names are copied under the inode's lock,
//!    which also assigns the sub-transaction ID;
//! 3. **flush**, if data that new extents refer to, or that supersedes carried data, was written
//!    in 1 or before;
//! 4. the i-transaction is written with **FUA**: one write. If data was overwritten in place, a
//!    plain write and then a **flush** for both.
//!
//! A crash before the end of 4 leaves the file as of the last commit or an earlier i-transaction;
//! after it, recovery (`replay/ijournal.rs`) applies the i-transaction unless its transaction has
//! committed. There is no wait for a commit. All changes of the i-transaction are also in the
//! running transaction, so that the next commit makes it obsolete.
//!
//! Falls back to a full commit for changes that involve other files (see [`Fallback`]):
//! directories, uncommitted renames and links, names whose last owner has other names, orphans,
//! attribute blocks, block maps, journaled data; and if the area or the budget of recovery is full,
//! which a background commit prevents: it is requested when half is used.
//!
//! An fsync writes nothing if a durable i-transaction has the current state of the inode.
//!
//! Fsyncs of one file are written one after the other, and each is durable before the next one is built: what an
//! earlier one carries is not in a later one.
//!
//! Invariants: an i-transaction names the newest transaction that changed the file, and includes
//! every uncommitted block of the extent tree; a name is left out only if a durable i-transaction
//! has it; recovery of all live i-transactions fits in one transaction.
//!
//! A barrier call ([`barrier`]) writes such an i-transaction too, and waits for nothing. An fsync behind it makes it
//! durable, by a flush in place of FUA.
//!
//! "iJournaling: Fine-Grained Journaling for Improving the Latency of Fsync System Call"
//! (ATC '17), sections 4 and 5; carried data, and entries instead of directory blocks, are
//! fjord's own (`docs/decisions/`).

mod barrier;
mod budget;
mod names;
mod snapshot;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use fjord_block::lock::MutexGuard;
use fjord_block::plant::{Bug, planted};
use fjord_format::Tid;
use fjord_journal::{AreaWriter, Journal, Submitted, UnplacedITransaction};

use super::step::{Step, ending};
use super::{Fallback, FsyncPolicy, Ordered, Outcome, compound};
use crate::error::{Error, Result};
use crate::file::truncate::{note_growth, settle_size, shown_size};
use crate::file::writeback::{self, journals_data};
use crate::file::{carry, writeback::Mode};
use crate::fs::FsInner;
use crate::inode::{InFlight, Inode, InodeState, disk};
use crate::map;

use budget::{Budget, Charge};
use names::Chain;

/// Writes i-transactions.
#[derive(Default)]
pub(crate) struct Ijournal {
    budget: Budget,
}

/// Outcome of an attempt that wrote no i-transaction.
enum Stop {
    /// A full commit is needed.
    Fallback(Fallback),
    /// It failed.
    Error(Error),
}

impl From<Fallback> for Stop {
    fn from(why: Fallback) -> Stop {
        Stop::Fallback(why)
    }
}

impl From<Error> for Stop {
    fn from(error: Error) -> Stop {
        Stop::Error(error)
    }
}

impl From<fjord_journal::JournalError> for Stop {
    fn from(error: fjord_journal::JournalError) -> Stop {
        Stop::Error(error.into())
    }
}

/// What an i-transaction is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    Durability,
    /// A barrier; with data in place that no flush has covered it has to come after one.
    Order {
        owes_flush: bool,
    },
}

/// An i-transaction to write.
struct Prepared<'a> {
    writer: AreaWriter<'a>,
    transaction: UnplacedITransaction,
    data_bytes: u64,
    /// Carried blocks that it declares superseded.
    superseded: Vec<(fjord_format::BlockNo, u32)>,
    /// The flush that must precede it, and the debt that it settles.
    flush_before: Option<(Tid, u64)>,
    /// State of the inode, by its change count.
    touches: u64,
    /// The budget of recovery is half used.
    wants_commit: bool,
}

impl FsyncPolicy for Ijournal {
    fn name(&self) -> &'static str {
        "ijournal"
    }

    fn check_journal(&self, journal: Option<&Journal>) -> Result<()> {
        if journal.is_some_and(Journal::has_areas) {
            return Ok(());
        }
        Err(Error::Usage(
            "fsync=ijournal needs an image with areas for i-transactions; run `fjord tune --ijournal \
             4x16M` on it, or mount it with fsync=compound"
                .into(),
        ))
    }

    fn order(&self, fs: &Arc<FsInner>, inode: &Arc<Inode>, datasync: bool) -> Result<Ordered> {
        match self.order_alone(fs, inode, datasync) {
            Ok(number) => Ok(Ordered::Barrier(number)),
            Err(Stop::Error(error)) => Err(error),
            Err(Stop::Fallback(_)) => Ok(Ordered::NeedsFsync),
        }
    }

    fn start(&self, fs: &Arc<FsInner>, inode: &Arc<Inode>, datasync: bool) -> Result<Step> {
        let why = match self.attempt(fs, inode, datasync) {
            Ok(outcome) => return Ok(Step::Done(outcome)),
            Err(Stop::Error(error)) => return Err(error),
            Err(Stop::Fallback(why)) => why,
        };
        let submitted = writeback::submit_for_fsync(fs, inode, datasync)?;
        let step = compound::commit(fs, inode, datasync, submitted);
        let fs = fs.clone();
        ending(step, move |outcome, _| {
            let outcome = outcome?;
            carry::reap_all(&fs);
            Ok(outcome.of_fallback(why))
        })
    }
}

impl Ijournal {
    fn attempt(
        &self,
        fs: &Arc<FsInner>,
        inode: &Arc<Inode>,
        datasync: bool,
    ) -> Result<Outcome, Stop> {
        let (chain, mut in_flight) = begin(fs, inode)?;
        if inode.pages.dirty_count() > pages_max(fs) {
            let range = 0..u64::MAX;
            writeback::write_locked(fs, inode, &mut in_flight, range, Mode::Fsync { datasync })?;
            writeback::drain_submitted(fs, inode, &mut in_flight)?;
        }
        let purpose = Purpose::Durability;
        let prepared = self.prepare(fs, inode, &mut in_flight, &chain, datasync, purpose)?;
        // Under the lock: no other overwrites are in flight. It is held until the i-transaction is durable: the
        // next one of the file has not what this one carries.
        let in_place = inode.in_place.owed();
        let outcome = match prepared {
            Some(prepared) => {
                if planted(Bug::EntryLoggedTooEarly) {
                    chain.logged();
                }
                self.write(fs, inode, prepared, in_place.is_some())?;
                chain.logged();
                Outcome::Policy
            }
            None if in_place.is_some() => {
                flush_with_barriers(fs)?;
                Outcome::Data
            }
            None => {
                // A barrier may have logged it.
                if !planted(Bug::FsyncTrustsBarriers) {
                    fs.journal().make_barriers_durable()?;
                }
                Outcome::Nothing
            }
        };
        if let Some(mark) = in_place {
            inode.in_place.record_flush(mark);
        }
        drop(in_flight);
        carry::reap_many(fs);
        Ok(outcome)
    }

    /// Steps 1 (small data) and 2. `None` when there is nothing to log.
    fn prepare<'a>(
        &self,
        fs: &'a Arc<FsInner>,
        inode: &Arc<Inode>,
        in_flight: &mut InFlight,
        chain: &Chain,
        datasync: bool,
        purpose: Purpose,
    ) -> Result<Option<Prepared<'a>>, Stop> {
        let committed = |tid| fs.journal().is_committed(tid);
        let mut guard = inode.state.write();
        check_kind(fs, &guard)?;
        check_state(fs, &guard)?;
        if guard.carried.needs_commit(committed) {
            return Err(Fallback::CommitUnderWay.into());
        }
        let mut data = Vec::new();
        // The inode's bytes, if they are known since its state was locked.
        let mut image = None;
        let dirty = inode.pages.dirty_count();
        if (1..=purpose.pages_max(fs)).contains(&dirty) {
            if purpose != Purpose::Durability || self.carries(fs, inode, &guard, datasync) {
                let carried = carry::carry(fs, inode, in_flight, &mut guard, dirty)?;
                (data, image) = (carried.data, Some(carried.image));
                if let Some(tid) = inode.sync_tid.get() {
                    guard.carried.begin(tid);
                }
            } else {
                drop(guard);
                let (range, mode) = (0..u64::MAX, Mode::Fsync { datasync });
                writeback::write_locked(fs, inode, in_flight, range, mode)?;
                writeback::drain_submitted(fs, inode, in_flight)?;
                if !super::is_uncommitted(fs, inode, datasync) {
                    // Only overwritten blocks, no other change to make durable.
                    return Ok(None);
                }
                // Some blocks were allocated before, but written for the first time.
                guard = inode.state.write();
                check_kind(fs, &guard)?;
                check_state(fs, &guard)?;
            }
        }
        let state = &mut *guard;
        image = store_lazy(fs, inode, state, datasync)?.or(image);
        let superseded = state.carried.superseded(committed);
        let is_owed = purpose == Purpose::Order { owes_flush: true };
        let has_contents = !data.is_empty() || !superseded.is_empty() || is_owed;
        if is_owed && !super::is_uncommitted(fs, inode, false) {
            image = Some(store_again(fs, inode, state)?);
        }
        if !has_contents && !super::is_uncommitted(fs, inode, datasync) {
            return Ok(None);
        }
        let Some(tid) = inode.sync_tid.get() else { return Ok(None) };
        if chain.links.is_empty() && !has_contents && inode.is_logged(inode.touches()) {
            return Ok(None);
        }
        if !data.is_empty() {
            // Whoever commits for the data's sake must commit what carries it.
            inode.touch_tid(tid, true);
        }
        let flush_before = state.carried.owes_flush(committed);
        let flush_before = flush_before.filter(|_| !planted(Bug::ItransactionBeforeData));
        let writer = match purpose {
            Purpose::Durability => fs.journal().area_writer()?,
            Purpose::Order { .. } => fs.journal().barrier_writer()?,
        };
        let Some(writer) = writer else { return Err(Fallback::NoLog.into()) };
        let touches = inode.touches();
        let is_barrier = purpose != Purpose::Durability;
        let logged = if is_barrier && planted(Bug::BarrierWithoutData) { &[] } else { &data[..] };
        let contents = snapshot::Contents { chain, data: logged, superseded: &superseded, image };
        let built = snapshot::build(fs, inode, state, &writer, tid, contents)?;
        let blocks_max = built.transaction.blocks_max(writer.format());
        if blocks_max.is_none_or(|blocks| blocks > writer.blocks_max()) {
            return Err(Fallback::TooLarge.into());
        }
        let wants_commit = match self.budget.charge(fs, tid, built.footprint) {
            Charge::Fits => false,
            Charge::Fills => true,
            Charge::Full => return Err(Fallback::RecoveryFull.into()),
        };
        for &(block, _) in &data {
            state.carried.carry(block, tid);
        }
        if state.carried.is_large() {
            state.carried.prune(committed);
        }
        let data_bytes = data.len() as u64 * u64::from(fs.geo.block_size);
        Ok(Some(Prepared {
            writer,
            transaction: built.transaction,
            data_bytes,
            superseded,
            flush_before,
            touches,
            wants_commit,
        }))
    }

    /// Whether small dirty data goes into the i-transaction. Not if fdatasync only overwrites
    /// blocks: their write alone is sufficient.
    fn carries(
        &self,
        fs: &Arc<FsInner>,
        inode: &Inode,
        state: &InodeState,
        datasync: bool,
    ) -> bool {
        let grows = state.disk.size < state.size || state.reserved_blocks > 0;
        !datasync
            || grows
            || super::is_uncommitted(fs, inode, datasync)
            || inode.pages.has_dirty_delalloc()
    }

    /// Steps 3 and 4.
    fn write(
        &self,
        fs: &Arc<FsInner>,
        inode: &Inode,
        prepared: Prepared<'_>,
        in_place: bool,
    ) -> Result<(), Stop> {
        let Prepared { writer, transaction, data_bytes, superseded, flush_before, .. } = prepared;
        // The newer data must be durable before the carried data is declared superseded.
        let supersedes = !superseded.is_empty() && !planted(Bug::SupersededNotFlushed);
        let flush_first = flush_before.is_some() || supersedes;
        if flush_first {
            fs.flush_device()?;
        }
        let flush_after =
            in_place && !flush_first && !planted(Bug::ItransactionOverwriteNotFlushed);
        let submitted = writer.submit(cpu(), transaction, !flush_after)?;
        let Submitted::Written(write) = submitted else { return Err(Fallback::LogFull.into()) };
        let count = u64::from(write.blocks);
        let wants_commit = write.wants_commit || prepared.wants_commit;
        let needs_flush = flush_after || write.is_behind_barriers;
        writer.wait(write)?;
        if needs_flush {
            flush_with_barriers(fs)?;
        }
        drop(writer);
        fs.fsync_counters.logged(count, data_bytes);
        inode.set_logged(prepared.touches);
        let mut state = inode.state.write();
        state.carried.end();
        state.carried.named(&superseded);
        if let Some(mark) = flush_before {
            state.carried.flushed(mark);
        }
        drop(state);
        if wants_commit {
            fs.threads.want_commit();
        }
        Ok(())
    }
}

/// What an i-transaction of a file begins with: the names above it, and the right to write its data, of which nothing
/// is on its way.
fn begin<'a>(
    fs: &Arc<FsInner>,
    inode: &'a Arc<Inode>,
) -> Result<(Chain, MutexGuard<'a, InFlight>), Stop> {
    check_kind(fs, &inode.state.read())?;
    if !fs.journal().has_areas() {
        return Err(Fallback::NoLog.into());
    }
    let chain = Chain::collect(fs, inode)?;
    let mut in_flight = inode.lock_writeback();
    writeback::drain_submitted(fs, inode, &mut in_flight)?;
    Ok((chain, in_flight))
}

impl Purpose {
    /// Most dirty pages that the i-transaction carries.
    fn pages_max(self, fs: &FsInner) -> usize {
        match self {
            Purpose::Durability => pages_max(fs),
            Purpose::Order { .. } => barrier::pages_max(fs),
        }
    }
}

/// Makes all completed writes durable, and with them the barriers that have been submitted.
fn flush_with_barriers(fs: &FsInner) -> Result<()> {
    match fs.journal().make_barriers_durable()? {
        true => Ok(()),
        false => fs.flush_device(),
    }
}

/// Most dirty pages that an i-transaction of an fsync carries.
fn pages_max(fs: &FsInner) -> usize {
    let pages = fs.options.inline_data_max_bytes / u64::from(fs.geo.block_size);
    let pages = usize::try_from(pages).unwrap_or(usize::MAX);
    pages.min(map::runs_per_handle(fs) as usize)
}

/// Whether i-transactions can describe this kind of inode.
fn check_kind(fs: &FsInner, state: &InodeState) -> Result<(), Fallback> {
    if !state.is_file() {
        return Err(Fallback::NotAFile);
    }
    if journals_data(fs, state) {
        return Err(Fallback::DataJournal);
    }
    if map::has_map(state) && !map::has_extents(state) {
        return Err(Fallback::BlockMap);
    }
    Ok(())
}

/// Whether i-transactions can describe the inode's uncommitted changes.
fn check_state(fs: &FsInner, state: &InodeState) -> Result<(), Fallback> {
    if state.dead || state.disk.links_count == 0 || state.orphan.is_some() {
        return Err(Fallback::Orphan);
    }
    match state.changes.needs_commit(|tid| fs.journal().is_committed(tid)) {
        Some(why) => Err(why.into()),
        None => Ok(()),
    }
}

/// Stores lazy changes: times, and the size up to the first dirty page. Returns the inode's bytes if it did.
fn store_lazy(
    fs: &Arc<FsInner>,
    inode: &Arc<Inode>,
    state: &mut InodeState,
    datasync: bool,
) -> Result<Option<Vec<u8>>> {
    let grows = shown_size(fs, inode, state, state.disk.size) > state.disk.size;
    if !(grows || (state.dirty && !datasync)) {
        return Ok(None);
    }
    let handle = fs.start(disk::STORE_CREDITS)?;
    if grows {
        settle_size(fs, inode, state);
        note_growth(inode, state, handle.tid());
        inode.touch_tid(handle.changes(), true);
    }
    let image = disk::store_image(fs, &handle, inode, state)?;
    handle.stop();
    Ok(Some(image))
}

/// Stores an inode that has not changed, for the sake of a transaction that an i-transaction of it can name. Returns
/// its bytes.
fn store_again(fs: &Arc<FsInner>, inode: &Arc<Inode>, state: &mut InodeState) -> Result<Vec<u8>> {
    let handle = fs.start(disk::STORE_CREDITS)?;
    inode.touch_tid(handle.changes(), true);
    let image = disk::store_image(fs, &handle, inode, state)?;
    handle.stop();
    Ok(image)
}

/// The CPU that this thread runs on, more or less.
fn cpu() -> usize {
    rustix::thread::sched_getcpu()
}

impl Chain {
    /// An i-transaction with these names is durable.
    fn logged(&self) {
        for inode in self.inodes() {
            inode.entry_logged.store(true, Ordering::Release);
        }
    }
}
