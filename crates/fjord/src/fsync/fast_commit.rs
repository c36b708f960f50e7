//! ext4's fast commit: an fsync logs what changed in its file as a few records.
//!
//! Blocks written: one of the fast-commit area (more for very many extents), for all threads that
//! call meanwhile together: INODE, an ADD_RANGE or DEL_RANGE for each run of the changed part of
//! the map, and for a file made since the last full commit INODE and CREAT in front of them. If its
//! name was that of a file which is gone, that one is emptied and unlinked before (DEL_RANGE,
//! UNLINK). Unlike Linux, which logs the changes of all files, an fsync here logs those of its own.
//!
//! Steps: 1. dirty data is submitted, blocks and extents go into the running transaction as ever;
//! 2. wait for the data; 3. under the inode's lock the records are made and queued, so that those
//! of one file stand in the area in the order of its changes; 4. **flush**, if data lies in blocks
//! that the log adds or behind the old size; 5. the block is written **with FUA** (where data was
//! only overwritten: written, then **flush**). Steps 4 and 5 are those of
//! [`fjord_journal::Journal::queue_fast_commit`] and [`fjord_journal::Journal::wait_fast_commit`].
//!
//! A crash before 5 is complete leaves the file as of its last fast or full commit, after it the
//! new state. All of it is in the running transaction too: once that has committed, the area
//! means nothing.
//!
//! Replay: by fjord, Linux and e2fsck 1.47, to the same tree. That decides what is logged, for the
//! replays of the others have limits. An fsync commits everything ([`Fallback`]) when
//! - the file got, lost or changed a name, is an orphan, or its attributes changed (as in Linux);
//! - its data is inline or journaled, it has a block map, a part of it was collapsed or inserted;
//! - it was made in a directory that has no full commit yet (e2fsck 1.47 does not make the first
//!   block of a directory, and Linux counts its links wrong), under a name of something else than
//!   a plain file that is gone, or where the entry may not fit without what left or
//!   came to the directory in this transaction (e2fsck 1.47.0 adds no block to a directory, later
//!   ones may take one that a later record gives to a file). So that this hardly happens,
//!   directories grow early under this policy: see [`crate::dir`];
//! - the area is full, or blocks would be added behind a file whose extent tree has nodes of its own:
//!   replay allocates new ones, and what is added later, to that file or another, could be among them.
//!
//! A full commit ends the stream of fast commits. One that is under way is waited for, as in Linux.
//! One in the background keeps the area from filling up; whoever uses the last quarter of it all
//! the same is served, and then commits.
//!
//! The replay of e2fsck 1.47 begins with what it read before it replayed the log, and writes some
//! of it back: fields of the superblock, the block of the inode table that holds the journal's
//! inode, and which groups have bitmaps. So before a fast commit of an inode in that block, and
//! after a transaction that changed the superblock, put a group into use or truncates in several
//! steps, the log is brought home.

use std::sync::Arc;

use fjord_block::plant::{Bug, planted};
use fjord_format::InodeNo;
use fjord_format::extent::Extent;
use fjord_format::geometry::GOOD_OLD_INODE_BYTES;
use fjord_format::inode::InodeFlags;
use fjord_format::jbd2::fast_commit::{EntryRecord, Record};
use fjord_format::types::{LogicalBlock, Tid};
use fjord_journal::{DataNeeds, FastCommitOutcome, FastCommitRequest, FastCommitTicket};

use super::changes::{Entry, Logged, Shown};
use super::{Fallback, FsyncPolicy, Outcome, compound};
use crate::error::Result;
use crate::file::writeback::{self, journals_data};
use crate::fs::FsInner;
use crate::inode::{Inode, InodeState, disk, table};
use crate::map::{self, MapKind};

/// Most ranges that one fsync logs; a file changed in more places is better off with a commit.
const RANGES_MAX: usize = 256;
/// Blocks that a file which is gone had at most: 8 TiB of 4 KiB each. Linux counts no further.
const GONE_BLOCKS: u32 = i32::MAX as u32;
/// Bytes of `i_extra_isize` and the checksum behind it, which e2fsck's replay asks for.
const EXTRA_BYTES_MIN: u16 = 4;

/// Logs the changes of one file in the fast-commit area.
pub(crate) struct FastCommit;

/// What an fsync has queued.
struct Queued {
    ticket: FastCommitTicket,
    /// The mark of data in place that the flush covers.
    owed: Option<u64>,
    care: Care,
    /// Which state of the inode it is.
    touches: u64,
    /// The log has that state already.
    same: bool,
}

impl FsyncPolicy for FastCommit {
    fn name(&self) -> &'static str {
        "fast-commit"
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
        // Without anything to commit it was no fallback.
        Ok(match commit_all(fs, inode, datasync)? {
            Outcome::Policy => Outcome::Fallback(why),
            other => other,
        })
    }
}

/// What e2fsck would undo if it came from the log.
#[derive(Clone, Copy)]
struct Care {
    /// The log must be home.
    needed: bool,
    /// Once it is, what this transaction did is safe.
    until: Option<Tid>,
}

impl Care {
    fn of(fs: &FsInner, inode: &Inode, entry: Option<&NewEntry>) -> Care {
        let fragile = fs.fragile.get();
        let table_block = |ino| fs.geo.inode_location(ino).map(|at| (at.group, at.table_block));
        let is_beside_journal = |ino| table_block(ino) == table_block(InodeNo::JOURNAL);
        let replaced = entry.and_then(|entry| entry.replaces);
        Care {
            needed: fragile.is_some()
                || is_beside_journal(inode.ino)
                || replaced.is_some_and(is_beside_journal),
            until: fragile.filter(|&tid| fs.journal().is_committed(tid)),
        }
    }
}

/// The name that a file was made with, to be logged.
#[derive(Clone, Debug, PartialEq, Eq)]
struct NewEntry {
    entry: Entry,
    /// The file that a crash would show under the name, and that is gone.
    replaces: Option<InodeNo>,
}

/// Fast commits are ahead of one transaction; what one of before has under way is waited for, as
/// in Linux. Its writeback is the caller's, so this may wait.
fn wait_for_commit_before(fs: &FsInner, inode: &Inode) -> Result<()> {
    let Some(tid) = inode.sync_tid.get() else { return Ok(()) };
    let before = Tid(tid.0.wrapping_sub(1));
    if !fs.journal().is_committed(before) {
        fs.journal().commit(before)?;
    }
    Ok(())
}

/// The commit of everything, and the wait for the file's own data.
fn commit_all(fs: &Arc<FsInner>, inode: &Arc<Inode>, datasync: bool) -> Result<Outcome> {
    let committed = compound::commit(fs, inode, datasync);
    // The failure of the file's own data says more than that of the commit it was attached to.
    writeback::finish(fs, inode).and(committed)
}

/// Waits until what was queued is durable, one way or the other.
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
            if let Some(tid) = queued.care.until {
                fs.fragile.clear(tid);
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
        // By somebody's commit, which has not asked for data in place.
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

/// Sees to it that the next fast commit has room: a full commit ends the stream. It is asked for
/// in the background when half of the area is used; if nobody has got to it by the last
/// quarter, the caller, which has been served, does it.
fn leave_room(fs: &Arc<FsInner>) -> Result<()> {
    let journal = fs.journal();
    if journal.fast_commits_exhaust_area() {
        journal.commit_running()?;
    } else if journal.fast_commits_fill_area() {
        fs.threads.want_commit();
    }
    Ok(())
}

/// The name that the file was made with, if that has to be logged; else why it cannot be, as far
/// as the directory tells. Takes the directory's lock, so the caller holds none of the kind.
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
    // The entry that leaves makes room for one of the same length.
    if replaces.is_none() && !entry.fits {
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

/// Whether the file's changes can be told by records, as far as it tells itself.
fn check_file(fs: &FsInner, state: &InodeState) -> Result<(), Fallback> {
    let committed = |tid| fs.journal().is_committed(tid);
    if !state.is_file() {
        return Err(Fallback::NotAFile);
    }
    if let Some(why) = state.changes.needs_commit(committed) {
        return Err(why);
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
    let small =
        fs.geo.inode_size > GOOD_OLD_INODE_BYTES && state.disk.extra_isize < EXTRA_BYTES_MIN;
    // The replay of Linux counts a file's blocks anew, and forgets the one of its attributes.
    let has_block = state.disk.file_acl.0 != 0 && !planted(Bug::FastCommitAttributeBlock);
    if small || has_block || state.changes.has_attribute_changes(committed) {
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
    // Whoever logged the name meanwhile stands before this in the queue.
    let entry = entry.filter(|old| now == Some(&old.entry) && !state.changes.is_entry_logged());
    // Once that commits, the number of what had the name may be somebody else's.
    // Not earlier: what others did since may have begun to commit.
    let care = Care::of(fs, inode, entry.as_ref());
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
        adds_blocks,
        allocates: has_nodes && !ranges.is_empty(),
        owner: inode.ino.0,
        records: if same { Vec::new() } else { records(inode, entry, ranges, &image) },
        data,
        needs_empty_log: care.needed,
    };
    let Some(ticket) = fs.journal().queue_fast_commit(request) else {
        return Ok(Err(Fallback::NoLog));
    };
    if !same {
        state.changes.set_logged(Logged { tid, size, image: image.into() });
    }
    Ok(Ok(Queued { ticket, owed, care, touches: inode.touches(), same }))
}

/// Puts the records in the order of replay: an inode before its name, its blocks before the
/// attributes that count them; before all, what had the name loses its blocks (e2fsck deletes
/// files without names for good only when they are empty) and then the name.
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
            let (logical, len) = (LogicalBlock(0), GONE_BLOCKS);
            records.push(Record::DelRange { ino, logical, len });
            records.push(Record::Unlink(EntryRecord { parent, ino, name: name.clone() }));
        }
        records.push(attributes.clone());
        records.push(Record::Create(EntryRecord { parent, ino, name }));
    }
    records.append(&mut ranges);
    records.push(attributes);
    records
}

/// What the changed part of the file is mapped to, hole by hole and run by run.
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
