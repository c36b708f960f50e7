//! ext4's fast commit: an fsync logs the changes of its file as a few records.
//!
//! Blocks written: one of the fast-commit area (more for very many extents), shared by all
//! concurrent callers: INODE, an ADD_RANGE or DEL_RANGE for each run of the changed part of the
//! map, and for a file made since the last full commit INODE and CREAT in front of them. If the
//! name belonged to a deleted file, that file is first truncated and unlinked (DEL_RANGE, UNLINK).
//! Unlike Linux, which logs the changes of all files, an fsync here logs only those of its file.
//!
//! Steps: 1. dirty data is submitted; blocks and extents enter the running transaction as usual;
//! 2. wait for the data; 3. the records are made and queued under the inode's lock, so that those
//! of one file are in the order of its changes; 4. **flush**, if data is in blocks that the records
//! add or past the old size; 5. the block is written **with FUA** (if data was only overwritten:
//! written, then **flush**). Steps 4 and 5 are those of
//! [`fjord_journal::Journal::queue_fast_commit`] and [`fjord_journal::Journal::wait_fast_commit`].
//!
//! A crash before 5 is complete leaves the file as of its last fast or full commit, after it the
//! new state. The changes are also in the running transaction; its commit makes the area invalid.
//!
//! Replay by fjord, Linux and e2fsck gives the same tree. The limits of the other two ([`compat`])
//! determine what can be logged. An fsync makes a full commit ([`Fallback`]) if
//! - the file got, lost or changed a name, is an orphan, or its attributes changed (as in Linux);
//! - its data is inline or journaled, it has a block map, a part of it was collapsed or inserted;
//! - it was made in a directory that has no full commit yet, under a name of something else than
//!   a plain file that is gone, or where the entry may not fit without what left or
//!   came to the directory in this transaction ([`compat::name_finds_room`]). So that this hardly
//!   happens, directories grow early under this policy: see [`crate::dir`];
//! - the area is full, or blocks would be added to a file whose extent tree has nodes of its own:
//!   see [`compat::conflicts`].
//!
//! A full commit ends the stream of fast commits. An fsync waits for one in progress, as in Linux.
//! Background commits keep the area from filling up; an fsync that uses its last quarter commits
//! afterwards.
//!
//! Before a fast commit of an inode beside the journal's, and after a transaction that changed what
//! e2fsck reads ahead, the log is checkpointed: see [`super::hazards`].

use std::sync::Arc;

use fjord_block::plant::{Bug, planted};
use fjord_format::InodeNo;
use fjord_format::extent::Extent;
use fjord_format::features::{Compat, Features};
use fjord_format::inode::InodeFlags;
use fjord_format::jbd2::fast_commit::compat::{self, BlockUse};
use fjord_format::jbd2::fast_commit::{EntryRecord, Record};
use fjord_format::types::{LogicalBlock, Tid};
use fjord_journal::{DataNeeds, FastCommitOutcome, FastCommitRequest, FastCommitTicket, Journal};

use super::{Fallback, FsyncPolicy, Outcome, compound};
use crate::error::{Error, Result};
use crate::file::writeback::{self, journals_data};
use crate::fs::FsInner;
use crate::inode::changes::{Entry, Logged, Shown};
use crate::inode::{Inode, InodeState, disk, table};
use crate::map::{self, MapKind};

/// Most ranges in one fsync; for more of them a full commit is cheaper.
const RANGES_MAX: usize = 256;

/// Logs the changes of one file in the fast-commit area.
pub(crate) struct FastCommit;

/// A queued fsync.
struct Queued {
    ticket: FastCommitTicket,
    /// Mark of the overwritten data that the flush covers.
    owed: Option<u64>,
    hazard: ReplayHazard,
    /// State of the inode, by its change count.
    touches: u64,
    /// The log has that state already.
    same: bool,
}

impl FsyncPolicy for FastCommit {
    fn name(&self) -> &'static str {
        "fast-commit"
    }

    fn logs_names_alone(&self) -> bool {
        true
    }

    fn replays_fields_only(&self) -> bool {
        true
    }

    fn check_features(&self, features: &Features) -> Result<()> {
        if features.compat.contains(Compat::FAST_COMMIT | Compat::HAS_JOURNAL) {
            return Ok(());
        }
        Err(Error::Usage(
            "fsync=fast-commit needs an image with the features has_journal and fast_commit; run \
             `fjord tune --fast-commit on` on it, or mount it with fsync=compound"
                .into(),
        ))
    }

    fn check_journal(&self, journal: Option<&Journal>) -> Result<()> {
        if journal.is_some_and(|journal| journal.fast_commit_blocks() > 0) {
            return Ok(());
        }
        Err(Error::Usage(
            "the journal is too short for a fast-commit area; mount with fsync=compound, or make a \
             longer journal with tune2fs -O ^has_journal and -J size=32"
                .into(),
        ))
    }

    fn fsync(&self, fs: &Arc<FsInner>, inode: &Arc<Inode>, datasync: bool) -> Result<Outcome> {
        let mut in_flight = inode.writeback.lock();
        let mode = writeback::Mode::Fsync { datasync };
        writeback::write_locked(fs, inode, &mut in_flight, 0..u64::MAX, mode)?;
        if inode.is_regular && !super::is_uncommitted(fs, inode, datasync) {
            drop(in_flight);
            return commit_all(fs, inode, datasync);
        }
        wait_for_commit_before(fs, inode)?;
        let why = match new_entry(fs, inode) {
            Ok(entry) => {
                let owed = inode.in_place.owed();
                writeback::drain(fs, inode, &mut in_flight)?;
                match queue(fs, inode, entry, owed, datasync)? {
                    Ok(queued) => {
                        drop(in_flight);
                        return finish(fs, inode, queued, datasync);
                    }
                    Err(why) => why,
                }
            }
            Err(why) => why,
        };
        drop(in_flight);
        // If there was nothing to commit, it was not a fallback.
        Ok(match commit_all(fs, inode, datasync)? {
            Outcome::Policy => Outcome::Fallback(why),
            other => other,
        })
    }
}

/// Whether replay by e2fsck would undo changes that are in the log only.
#[derive(Clone, Copy)]
struct ReplayHazard {
    /// The log must be checkpointed first.
    needed: bool,
    /// After the checkpoint, changes of this transaction are safe.
    until: Option<Tid>,
}

impl ReplayHazard {
    fn of(fs: &FsInner, inode: &Inode, entry: Option<&NewEntry>) -> ReplayHazard {
        let newest = fs.hazards.newest_unsafe();
        let is_beside_journal = |ino| compat::is_beside_journal(&fs.geo, ino);
        let replaced = entry.and_then(|entry| entry.replaces);
        ReplayHazard {
            needed: newest.is_some()
                || is_beside_journal(inode.ino)
                || replaced.is_some_and(is_beside_journal),
            until: newest.filter(|&tid| fs.journal().is_committed(tid)),
        }
    }
}

/// The name that a file was made with, to be logged.
#[derive(Clone, Debug, PartialEq, Eq)]
struct NewEntry {
    entry: Entry,
    /// The deleted file that a crash would restore under the name.
    replaces: Option<InodeNo>,
}

/// Fast commits may precede one transaction only: waits for the previous one, as in Linux. The
/// caller holds the writeback lock, so this may wait.
fn wait_for_commit_before(fs: &FsInner, inode: &Inode) -> Result<()> {
    let Some(tid) = inode.sync_tid.get() else { return Ok(()) };
    let before = Tid(tid.0.wrapping_sub(1));
    if !fs.journal().is_committed(before) {
        fs.journal().commit(before)?;
    }
    Ok(())
}

/// A full commit, and the wait for the file's own data.
fn commit_all(fs: &Arc<FsInner>, inode: &Arc<Inode>, datasync: bool) -> Result<Outcome> {
    let committed = compound::commit(fs, inode, datasync);
    // An error of the file's own data is more specific than that of the commit.
    writeback::finish(fs, inode).and(committed)
}

/// Waits until the queued fsync is durable, by a fast commit or a full commit.
fn finish(
    fs: &Arc<FsInner>,
    inode: &Arc<Inode>,
    queued: Queued,
    datasync: bool,
) -> Result<Outcome> {
    let why = match fs.journal().wait_fast_commit(queued.ticket)? {
        FastCommitOutcome::Logged { blocks } => {
            if let Some(mark) = queued.owed {
                inode.in_place.record_flush(mark);
            }
            inode.set_logged(queued.touches);
            if let Some(tid) = queued.hazard.until {
                fs.hazards.are_home(tid);
            }
            if !queued.same {
                fs.fsync_counters.logged(u64::from(blocks), 0);
            }
            leave_room(fs)?;
            return Ok(match (queued.same, queued.owed) {
                (true, None) => Outcome::Nothing,
                (true, Some(_)) => Outcome::Data,
                (false, _) => Outcome::Policy,
            });
        }
        // By another caller's commit, which did not wait for overwritten data.
        FastCommitOutcome::Committed => {
            commit_all(fs, inode, datasync)?;
            return Ok(Outcome::Policy);
        }
        FastCommitOutcome::Full => Fallback::LogFull,
        FastCommitOutcome::Conflict => Fallback::ExtentTree,
        FastCommitOutcome::Unavailable => Fallback::NoLog,
    };
    commit_all(fs, inode, datasync)?;
    Ok(Outcome::Fallback(why))
}

/// Keeps space for the next fast commit: a full commit ends the stream. It is requested in the
/// background when half of the area is used; in the last quarter, the caller commits after its
/// fsync is done.
fn leave_room(fs: &Arc<FsInner>) -> Result<()> {
    let journal = fs.journal();
    if journal.fast_commits_exhaust_area() {
        journal.commit_running()?;
    } else if journal.fast_commits_fill_area() {
        fs.threads.want_commit();
    }
    Ok(())
}

/// The name that the file was created with, if it must be logged, or why it cannot be, judged by
/// the directory. Takes the directory's lock, so the caller holds none of the kind.
fn new_entry(fs: &Arc<FsInner>, inode: &Arc<Inode>) -> Result<Option<NewEntry>, Fallback> {
    let committed = |tid| fs.journal().is_committed(tid);
    let entry = {
        let state = inode.state.read();
        check_file(fs, &state)?;
        let entry = state.changes.uncommitted_entry(committed).cloned();
        entry.filter(|_| !state.changes.is_entry_logged())
    };
    let Some(entry) = entry else { return Ok(None) };
    let replaced = entry.replaced.filter(|replaced| !committed(replaced.tid));
    let replaces = match replaced.map_or(Shown::Nothing, |replaced| replaced.shown) {
        Shown::Nothing => None,
        Shown::File(ino) => Some(ino),
        Shown::Other => return Err(Fallback::NameReuse),
    };
    if !compat::name_finds_room(replaces.is_some(), entry.fits) {
        return Err(Fallback::DirectoryChanged);
    }
    // It cannot have been removed without taking the name away first.
    let Ok(parent) = table::get(fs, entry.parent) else { return Err(Fallback::Forgotten) };
    let state = parent.state.read();
    if state.changes.uncommitted_birth(committed).is_some() {
        return Err(Fallback::NewDirectory);
    }
    if state.changes.is_forgotten(committed) {
        return Err(Fallback::Forgotten);
    }
    if state.disk.flags.contains(InodeFlags::INLINE_DATA) {
        return Err(Fallback::InlineData);
    }
    Ok(Some(NewEntry { entry, replaces }))
}

/// Whether records can describe the file's changes, judged by the file alone.
fn check_file(fs: &FsInner, state: &InodeState) -> Result<(), Fallback> {
    let committed = |tid| fs.journal().is_committed(tid);
    if !state.is_file() {
        return Err(Fallback::NotAFile);
    }
    if let Some(why) = state.changes.needs_commit(committed) {
        return Err(why.into());
    }
    if state.orphan.is_some() || state.disk.links_count == 0 {
        return Err(Fallback::Orphan);
    }
    if state.disk.flags.contains(InodeFlags::INLINE_DATA) {
        return Err(Fallback::InlineData);
    }
    if !map::has_extents(state) {
        return Err(Fallback::BlockMap);
    }
    if journals_data(fs, state) {
        return Err(Fallback::DataJournal);
    }
    let is_accepted = compat::accepts_inode(fs.geo.inode_size, state.disk.extra_isize);
    let counts_all =
        compat::counts_all_blocks(state.disk.file_acl) || planted(Bug::FastCommitAttributeBlock);
    if !is_accepted || !counts_all || state.changes.has_attribute_changes(committed) {
        return Err(Fallback::Attributes);
    }
    Ok(())
}

/// Makes the records of a file and queues them, under its lock. All its data is complete.
fn queue(
    fs: &Arc<FsInner>,
    inode: &Arc<Inode>,
    entry: Option<NewEntry>,
    owed: Option<u64>,
    datasync: bool,
) -> Result<Result<Queued, Fallback>> {
    let committed = |tid| fs.journal().is_committed(tid);
    let mut state = inode.state.write();
    if let Err(why) = check_file(fs, &state) {
        return Ok(Err(why));
    }
    let Some(tid) = inode.sync_tid.get() else { return Ok(Err(Fallback::Forgotten)) };
    let now = state.changes.uncommitted_entry(committed);
    // A concurrent fsync that logged the name precedes this one in the queue.
    let entry = entry.filter(|old| now == Some(&old.entry) && !state.changes.is_entry_logged());
    // After its commit, the inode number of the old file may be reused. Not checked earlier: a
    // later transaction may have begun to commit.
    let hazard = ReplayHazard::of(fs, inode, entry.as_ref());
    let stale = |entry: &NewEntry| entry.entry.replaced.is_some_and(|replaced| replaced.tid != tid);
    if entry.as_ref().is_some_and(|entry| entry.replaces.is_some() && stale(entry)) {
        return Ok(Err(Fallback::CommitUnderWay));
    }
    let ranges = match changed_ranges(fs, inode, &state)? {
        Ok(ranges) => ranges,
        Err(why) => return Ok(Err(why)),
    };
    let image = disk::read_bytes(fs, inode.ino, |bytes| Ok(bytes.to_vec()))?;
    let size = state.disk.size;
    let logged = state.changes.logged(committed);
    let grown = logged.is_none_or(|logged| logged.size != size);
    let same = entry.is_none()
        && ranges.is_empty()
        && logged.is_some_and(|old| (datasync && old.size == size) || old.image[..] == image[..]);
    let adds_blocks = ranges.iter().any(|range| matches!(range, Record::AddRange { .. }));
    let has_nodes = map::depth(fs, &state) > 0;
    let data = if adds_blocks || grown {
        DataNeeds::FlushBefore
    } else if owed.is_some() {
        DataNeeds::FlushAfter
    } else {
        DataNeeds::Nothing
    };
    let request = FastCommitRequest {
        tid,
        blocks: BlockUse {
            owner: inode.ino.0,
            adds_blocks,
            allocates: compat::allocates_nodes(has_nodes, !ranges.is_empty()),
        },
        records: if same { Vec::new() } else { records(inode, entry, ranges, &image) },
        data,
        needs_empty_log: hazard.needed,
    };
    let Some(ticket) = fs.journal().queue_fast_commit(request) else {
        return Ok(Err(Fallback::NoLog));
    };
    if !same {
        state.changes.set_logged(Logged { tid, size, image: image.into() });
    }
    Ok(Ok(Queued { ticket, owed, hazard, touches: inode.touches(), same }))
}

/// Records in replay order: an inode before its name, its blocks before the attributes that count
/// them; first, the removal of the name's old file.
fn records(
    inode: &Inode,
    entry: Option<NewEntry>,
    mut ranges: Vec<Record>,
    image: &[u8],
) -> Vec<Record> {
    let ino = inode.ino;
    let attributes = Record::Inode { ino, bytes: image.to_vec() };
    let mut records = Vec::with_capacity(ranges.len() + 3);
    if let Some(entry) = entry.filter(|_| !planted(Bug::FastCommitNoName)) {
        let (parent, name) = (entry.entry.parent, entry.entry.name.into_vec());
        if let Some(ino) = entry.replaces {
            records.extend(compat::removal(ino, parent, name.clone()));
        }
        records.push(attributes.clone());
        records.push(Record::Create(EntryRecord { parent, ino, name }));
    }
    records.append(&mut ranges);
    records.push(attributes);
    records
}

/// The mapping of the changed part of the file: holes and runs.
fn changed_ranges(
    fs: &FsInner,
    inode: &Inode,
    state: &InodeState,
) -> Result<Result<Vec<Record>, Fallback>> {
    let ino = inode.ino;
    let mut records = Vec::new();
    let changed = state.changes.uncommitted_mapping(|tid| fs.journal().is_committed(tid));
    let Some(changed) = changed else { return Ok(Ok(records)) };
    let mut at = changed.start;
    while at < changed.end {
        if records.len() >= RANGES_MAX {
            return Ok(Err(Fallback::TooLarge));
        }
        let found = map::lookup(fs, inode, state, at, changed.end - at)?;
        let len = found.len.clamp(1, changed.end - at);
        let logical = LogicalBlock(at);
        let (start, unwritten) = match found.kind {
            MapKind::Hole if planted(Bug::FastCommitNoHoles) => {
                at += len;
                continue;
            }
            MapKind::Hole => {
                records.push(Record::DelRange { ino, logical, len });
                at += len;
                continue;
            }
            MapKind::Written(start) => (start, false),
            MapKind::Unwritten(start) => (start, true),
        };
        let len = len.min(Extent::len_max(unwritten));
        let extent = Extent { logical, len, start, unwritten };
        records.push(Record::AddRange { ino, extent });
        at += len;
    }
    Ok(Ok(records))
}
