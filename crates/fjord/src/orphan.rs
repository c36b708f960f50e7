//! Orphans: inodes that are deleted or being truncated.
//!
//! Owns the linked list that starts in the superblock (`s_last_orphan`, linked through
//! `i_dtime`), the orphan file, and their processing at mount.
//!
//! Invariants: an inode whose blocks would be lost by a crash is recorded before its transaction
//! commits (in the orphan file at once; on the list just before the freeze of a full commit: most have
//! been deleted by then); `OrphanTable::list` mirrors the on-disk list, head first; the next pointer of a listed
//! inode is taken from there whenever the inode is stored.
//!
//! Locking: `serial` is taken with a handle open, after inode state locks and before buffers,
//! and held over each change of the record, in memory and on disk, so that both see the same
//! order. The table's own lock is a leaf.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use fjord_block::lock::{Mutex, MutexGuard, Rank};
use fjord_block::plant::{Bug, planted};
use fjord_format::{BlockNo, InodeNo, checksum, orphan_file};
use fjord_journal::{Handle, JournalError, LastChanges};

use crate::error::{Error, Result};
use crate::file::truncate;
use crate::fs::FsInner;
use crate::inode::{Inode, InodeState, Orphan, disk, evict, table};
use crate::map::{self, MapKind};

/// Metadata blocks that adding or removing an orphan can dirty.
pub(crate) const CREDITS: u32 = 4;

#[derive(Default)]
struct OrphanState {
    /// Inodes on the linked list, head first.
    list: Vec<InodeNo>,
    /// Inodes that the running transaction made orphans and no commit has as such: see
    /// [`FreshOrphans`].
    unrecorded: Vec<InodeNo>,
    /// Blocks of the orphan file with the seed of their checksums, if there is one.
    file: Vec<BlockNo>,
    seed: Option<u32>,
    /// Inodes in the orphan file with their slot.
    slots: HashMap<u32, (u32, u32)>,
}

/// All inodes recorded as orphans.
pub(crate) struct OrphanTable {
    state: Mutex<OrphanState>,
    /// Held while the record changes, and while a listed inode is stored.
    serial: Mutex<()>,
    /// Whether `unrecorded` has any, for whoever commits; changes under the lock of `state`.
    has_unrecorded: AtomicBool,
}

impl Default for OrphanTable {
    fn default() -> OrphanTable {
        OrphanTable {
            state: Mutex::new(Rank::OrphanState, OrphanState::default()),
            serial: Mutex::new(Rank::OrphanSerial, ()),
            has_unrecorded: AtomicBool::new(false),
        }
    }
}

impl OrphanTable {
    /// Keeps the list as it is while the guard lives.
    pub(crate) fn freeze(&self) -> MutexGuard<'_, ()> {
        self.serial.lock()
    }

    /// The value of `i_dtime` of a listed inode: the next inode on the list, 0 at its end.
    pub(crate) fn next_of(&self, ino: InodeNo) -> u32 {
        let state = self.state.lock();
        let at = state.list.iter().position(|&i| i == ino);
        at.and_then(|i| state.list.get(i + 1)).map_or(0, |next| next.0)
    }

    /// The head of the list, 0 if it is empty.
    pub(crate) fn head(&self) -> u32 {
        self.state.lock().list.first().map_or(0, |head| head.0)
    }

    /// Whether no inode is recorded.
    pub(crate) fn is_empty(&self) -> bool {
        let state = self.state.lock();
        state.list.is_empty() && state.slots.is_empty() && state.unrecorded.is_empty()
    }

    /// Inodes that go on the list only if they are orphans still when their transaction commits.
    pub(crate) fn unrecorded(&self) -> Vec<InodeNo> {
        self.state.lock().unrecorded.clone()
    }

    fn add_unrecorded(&self, ino: InodeNo) {
        let mut state = self.state.lock();
        state.unrecorded.push(ino);
        self.has_unrecorded.store(true, Ordering::Release);
    }

    /// Whether it was among them.
    fn remove_unrecorded(&self, ino: InodeNo) -> bool {
        let mut state = self.state.lock();
        let at = state.unrecorded.iter().rposition(|&other| other == ino);
        if let Some(at) = at {
            state.unrecorded.swap_remove(at);
            self.has_unrecorded.store(!state.unrecorded.is_empty(), Ordering::Release);
        }
        at.is_some()
    }

    /// Puts those that were unrecorded at the head of the list, and returns them.
    fn list_unrecorded(&self) -> Vec<InodeNo> {
        let mut state = self.state.lock();
        let fresh = std::mem::take(&mut state.unrecorded);
        state.list.splice(0..0, fresh.iter().copied());
        self.has_unrecorded.store(false, Ordering::Release);
        fresh
    }
}

/// Records `inode` as an orphan and stores it. Does nothing if it is recorded already.
pub(crate) fn add(fs: &FsInner, h: &Handle, inode: &Inode, state: &mut InodeState) -> Result<()> {
    if state.orphan.is_some() {
        return Ok(());
    }
    if state.disk.links_count > 0 {
        fs.hazards.read_ahead_changed(h.tid());
    }
    {
        let _serial = fs.orphans.freeze();
        let slot = add_to_file(fs, h, inode.ino)?;
        state.orphan = Some(match slot {
            Some((block, slot)) => Orphan::File { block, slot },
            None if fs.has_log() => {
                fs.orphans.add_unrecorded(inode.ino);
                // The head of the list may change with this transaction's commit.
                fs.hazards.read_ahead_changed(h.tid());
                Orphan::List
            }
            None => {
                fs.orphans.state.lock().list.insert(0, inode.ino);
                fs.set_last_orphan(h, inode.ino.0)?;
                Orphan::List
            }
        });
    }
    disk::store(fs, h, inode, state)
}

/// Puts on the list, just before the running transaction commits as a whole, all inodes that it leaves as
/// orphans. Until then most have been deleted, in the same transaction, so that the head of the list,
/// which is the superblock's, seldom changes.
pub(crate) struct FreshOrphans(Weak<FsInner>);

impl FreshOrphans {
    pub(crate) fn of(fs: &Arc<FsInner>) -> FreshOrphans {
        FreshOrphans(Arc::downgrade(fs))
    }
}

impl LastChanges for FreshOrphans {
    fn are_pending(&self) -> bool {
        self.0.upgrade().is_some_and(|fs| fs.orphans.has_unrecorded.load(Ordering::Acquire))
    }

    fn add(&self, handle: &Handle) -> Result<(), JournalError> {
        let Some(fs) = self.0.upgrade() else { return Ok(()) };
        record_fresh(&fs, handle).map_err(|error| match error {
            Error::Journal(error) => error,
            other => JournalError::Usage(format!("recording orphans: {other}")),
        })
    }
}

fn record_fresh(fs: &FsInner, h: &Handle) -> Result<()> {
    let _serial = fs.orphans.freeze();
    let fresh = fs.orphans.list_unrecorded();
    let Some(head) = fresh.first() else { return Ok(()) };
    for &ino in &fresh {
        disk::relink_orphan(fs, h, ino)?;
    }
    fs.set_last_orphan(h, head.0)
}

/// Takes `inode` out of the record; the caller stores it.
pub(crate) fn remove(
    fs: &FsInner,
    h: &Handle,
    inode: &Inode,
    state: &mut InodeState,
) -> Result<()> {
    let _serial = fs.orphans.freeze();
    match state.orphan.take() {
        None => Ok(()),
        Some(Orphan::File { block, slot }) => {
            write_slot(fs, h, block, slot, None)?;
            fs.orphans.state.lock().slots.remove(&inode.ino.0);
            state.disk.dtime = 0;
            Ok(())
        }
        Some(Orphan::List) => {
            state.disk.dtime = 0;
            remove_from_list(fs, h, inode.ino)
        }
    }
}

fn remove_from_list(fs: &FsInner, h: &Handle, ino: InodeNo) -> Result<()> {
    if fs.orphans.remove_unrecorded(ino) {
        return Ok(());
    }
    let (previous, next) = {
        let mut orphans = fs.orphans.state.lock();
        let Some(at) = orphans.list.iter().position(|&i| i == ino) else { return Ok(()) };
        orphans.list.remove(at);
        let previous = at.checked_sub(1).map(|i| orphans.list[i]);
        (previous, orphans.list.get(at).map_or(0, |next| next.0))
    };
    match previous {
        None => fs.set_last_orphan(h, next),
        Some(previous) => disk::relink_orphan(fs, h, previous),
    }
}

fn add_to_file(fs: &FsInner, h: &Handle, ino: InodeNo) -> Result<Option<(u32, u32)>> {
    let blocks = fs.orphans.state.lock().file.clone();
    for (index, &block) in blocks.iter().enumerate() {
        let buffer = fs.meta.read(block, |_| Ok(()))?;
        let free = orphan_file::free_slot(&buffer.read(), 0);
        if let Some(slot) = free {
            let place = (index as u32, slot as u32);
            fs.orphans.state.lock().slots.insert(ino.0, place);
            fs.mark_orphan_present(h)?;
            write_slot(fs, h, place.0, place.1, Some(ino))?;
            return Ok(Some(place));
        }
    }
    Ok(None)
}

fn write_slot(fs: &FsInner, h: &Handle, block: u32, slot: u32, ino: Option<InodeNo>) -> Result<()> {
    let (number, seed) = {
        let orphans = fs.orphans.state.lock();
        let number = orphans.file.get(block as usize).copied();
        (number.ok_or_else(|| Error::corrupt("orphan file", "slot out of range"))?, orphans.seed)
    };
    let buffer = fs.meta.read(number, |_| Ok(()))?;
    let mut bytes = h.get_write(&buffer)?;
    orphan_file::set_slot(&mut bytes, slot as usize, ino)?;
    Ok(orphan_file::seal(&mut bytes, seed, number)?)
}

/// Finds the orphan file's blocks. Called once at mount.
pub(crate) fn load_file(fs: &FsInner) -> Result<()> {
    let Some(ino) = fs.sb.orphan_file_inode() else { return Ok(()) };
    let inode = table::get(fs, ino)?;
    let state = inode.state.read();
    let count = state.size / u64::from(fs.geo.block_size);
    if count > u64::from(orphan_file::ORPHAN_FILE_BLOCKS_MAX) {
        return Err(Error::corrupt("orphan file", format!("{count} blocks are too many")));
    }
    let seed = fs
        .geo
        .features
        .has_metadata_csum()
        .then(|| checksum::inode_seed(fs.geo.csum_seed, ino, state.disk.generation));
    let mut blocks = Vec::new();
    for lblk in 0..count as u32 {
        let MapKind::Written(block) = map::lookup(fs, &inode, &state, lblk, 1)?.kind else {
            return Err(Error::corrupt("orphan file", format!("block {lblk} is a hole")));
        };
        fs.meta.read(block, |bytes| Ok(orphan_file::verify(bytes, seed, block)?))?;
        blocks.push(block);
    }
    let mut orphans = fs.orphans.state.lock();
    orphans.file = blocks;
    orphans.seed = seed;
    Ok(())
}

/// Result of reading the orphan records.
#[derive(Default)]
pub(crate) struct Records {
    /// Orphans to process, the list first.
    pub(crate) inodes: Vec<Arc<Inode>>,
    /// The first invalid record.
    pub(crate) damage: Option<Error>,
}

impl Records {
    /// As Linux: an invalid record is recorded as an error in the superblock, but the mount
    /// succeeds. `e2fsck -f` frees what remains.
    fn note(&mut self, fs: &FsInner, error: Error) {
        fs.error(format_args!("an invalid orphan record is ignored: {error}"));
        self.damage.get_or_insert(error);
    }
}

/// Reads the records of orphans: from then on the table knows them. Called once at mount,
/// before anything changes.
///
/// # Errors
/// Those of the device. Records that cannot be right are in [`Records::damage`]: the list ends
/// before its first such entry, slots of the file are left out one by one.
pub(crate) fn load(fs: &Arc<FsInner>) -> Result<Records> {
    let mut records = Records::default();
    if planted(Bug::OrphansNotProcessed) {
        return Ok(records);
    }
    load_list(fs, &mut records)?;
    load_slots(fs, &mut records)?;
    Ok(records)
}

/// Walks the list to its end or to the first entry that cannot be right.
fn load_list(fs: &Arc<FsInner>, records: &mut Records) -> Result<()> {
    let mut seen = HashSet::new();
    let mut list = Vec::new();
    let mut next = fs.sb.last_orphan();
    while next != 0 {
        let ino = InodeNo(next);
        let inode = match get_orphan(fs, ino) {
            Ok(inode) => inode,
            Err(error @ Error::Io(_)) => return Err(error),
            Err(error) => {
                records.note(fs, error);
                break;
            }
        };
        let mut state = inode.state.write();
        if !seen.insert(ino) {
            // One with links has left the list by then; one without them has been deleted.
            if state.disk.links_count == 0 {
                records.note(fs, wrong(ino, "is on the orphan list twice"));
            }
            break;
        }
        next = state.disk.dtime;
        state.orphan = Some(Orphan::List);
        drop(state);
        list.push(ino);
        records.inodes.push(inode);
    }
    fs.orphans.state.lock().list = list;
    Ok(())
}

/// Takes in the slots of the orphan file.
fn load_slots(fs: &Arc<FsInner>, records: &mut Records) -> Result<()> {
    for (ino, (block, slot)) in collect_file(fs)? {
        if can_be_orphan(fs, ino) && !fs.inode_in_use(ino)? {
            let why = "in the orphan file, but deleted, as e2fsck -p leaves it";
            fs.warn(format_args!("inode {ino} is {why}"));
            continue;
        }
        let inode = match get_orphan(fs, ino) {
            Ok(inode) => inode,
            Err(error @ Error::Io(_)) => return Err(error),
            Err(error) => {
                records.note(fs, error);
                continue;
            }
        };
        let mut state = inode.state.write();
        if state.orphan.is_some() {
            if state.disk.links_count == 0 {
                records.note(fs, wrong(ino, "is recorded as an orphan twice"));
            }
            continue;
        }
        state.orphan = Some(Orphan::File { block, slot });
        drop(state);
        fs.orphans.state.lock().slots.insert(ino.0, (block, slot));
        records.inodes.push(inode);
    }
    Ok(())
}

/// Empties the slots of the orphan file that [`load`] did not take for orphans. `e2fsck -p` (1.47.0)
/// deletes the inodes and leaves their numbers, Linux takes away the flag then: with new inodes of these
/// numbers, and the flag back, they would be found.
pub(crate) fn empty_stale_slots(fs: &Arc<FsInner>) -> Result<()> {
    let blocks = fs.orphans.state.lock().file.clone();
    let mut is_changed = false;
    for (index, &block) in blocks.iter().enumerate() {
        let buffer = fs.meta.read(block, |_| Ok(()))?;
        let is_stale = |(slot, ino): &(usize, InodeNo)| {
            let place = (index as u32, *slot as u32);
            fs.orphans.state.lock().slots.get(&ino.0) != Some(&place)
        };
        let slots: Vec<usize> = {
            let bytes = buffer.read();
            orphan_file::orphans(&bytes).filter(is_stale).map(|(slot, _)| slot).collect()
        };
        if slots.is_empty() {
            continue;
        }
        let handle = fs.start(CREDITS)?;
        {
            let _serial = fs.orphans.freeze();
            for slot in slots {
                write_slot(fs, &handle, index as u32, slot as u32, None)?;
            }
        }
        handle.stop();
        is_changed = true;
    }
    if is_changed { fs.commit() } else { Ok(()) }
}

/// Completes what a crash interrupted: deletes orphans without links, truncates others.
pub(crate) fn complete_all(fs: &Arc<FsInner>, inodes: &[Arc<Inode>]) -> Result<()> {
    inodes.iter().try_for_each(|inode| complete(fs, inode))
}

/// A record that names `ino` and cannot be right.
fn wrong(ino: InodeNo, why: &str) -> Error {
    Error::corrupt("record of orphans", format!("inode {ino} {why}"))
}

/// An inode that recovery is to delete or truncate, which a wrong number must not reach.
fn get_orphan(fs: &Arc<FsInner>, ino: InodeNo) -> Result<Arc<Inode>> {
    if !can_be_orphan(fs, ino) {
        return Err(wrong(ino, "cannot be an orphan"));
    }
    if !fs.inode_in_use(ino)? {
        return Err(wrong(ino, "is not in use"));
    }
    let inode = table::get(fs, ino)?;
    let state = inode.state.read();
    if state.disk.links_count > 0 && !(map::has_map(&state) || state.is_file() || state.is_dir()) {
        return Err(wrong(ino, "has links and nothing to truncate"));
    }
    if state.disk.dtime > fs.geo.inode_count {
        return Err(wrong(ino, "leads to an inode that does not exist"));
    }
    if map::has_map(&state) {
        // As Linux: one whose map is damaged at its root is not touched.
        map::lookup(fs, &inode, &state, 0, 1)?;
    }
    drop(state);
    Ok(inode)
}

fn complete(fs: &Arc<FsInner>, inode: &Arc<Inode>) -> Result<()> {
    let links = inode.state.read().disk.links_count;
    if links == 0 {
        return evict::delete(fs, inode);
    }
    let mut state = inode.state.write();
    let keep = state.size.div_ceil(u64::from(fs.geo.block_size));
    if (state.is_file() || state.is_dir()) && !planted(Bug::TruncationNotCompleted) {
        truncate::remove_blocks(fs, inode, &mut state, keep, u64::from(u32::MAX), false)?;
    }
    let handle = fs.start(disk::STORE_CREDITS + CREDITS)?;
    remove(fs, &handle, inode, &mut state)?;
    disk::store(fs, &handle, inode, &mut state)?;
    handle.stop();
    Ok(())
}

/// Whether a record of orphans may name `ino`: a file of a user or the value of an attribute.
fn can_be_orphan(fs: &FsInner, ino: InodeNo) -> bool {
    fs.geo.contains_inode(ino)
        && ino >= fs.geo.first_inode
        && fs.sb.orphan_file_inode() != Some(ino)
}

fn collect_file(fs: &FsInner) -> Result<Vec<(InodeNo, (u32, u32))>> {
    if !fs.sb.may_have_filed_orphans() {
        return Ok(Vec::new());
    }
    let blocks = fs.orphans.state.lock().file.clone();
    let mut found = Vec::new();
    for (index, &block) in blocks.iter().enumerate() {
        let buffer = fs.meta.read(block, |_| Ok(()))?;
        let filed = orphan_file::orphans(&buffer.read())
            .map(|(slot, ino)| (ino, (index as u32, slot as u32)))
            .collect::<Vec<_>>();
        found.extend(filed);
    }
    Ok(found)
}
