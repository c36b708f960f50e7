//! Applying fast commits, those of Linux among them.
//!
//! Two steps. First the records are applied in memory, to get the final state of each name, inode
//! and range ([`Log`]). Then the difference to the disk is applied, in an order in which the engine
//! never allocates a block that the log uses: remove entries; delete inodes without names; create
//! new ones; unmap ranges; mark *all* blocks in the log as used; map them; add entries; count
//! links.
//!
//! Where the recoveries of Linux and e2fsck differ, this one follows the meaning of the log: links
//! are counted from names (the replay of Linux leaves 1 for a new directory, and e2fsck corrects
//! it), an inode without a name is not created, a name of another inode is replaced.
//!
//! Invariant: nothing is changed before all records have been read.

use std::collections::BTreeMap;
use std::sync::Arc;

use fjord_block::plant::{Bug, planted};
use fjord_format::extent::Extent;
use fjord_format::inode::{S_IFDIR, S_IFMT};
use fjord_format::jbd2::fast_commit::{EntryRecord, Record};
use fjord_format::types::{BlockNo, InodeNo};

use super::names::{Names, Slot};
use super::nodes::Nodes;
use super::ranges::Target;
use crate::dir;
use crate::error::Result;
use crate::fs::FsInner;
use crate::inode::{Inode, evict, table};
use crate::map::{self, MapKind};
use crate::replay::{self, damaged};

/// Offset of `i_links_count` in an inode.
const LINKS_OFFSET: usize = 0x1a;

/// Applies what the fast commits of a log say, as one transaction.
///
/// # Errors
/// `Corrupt` for records that contradict each other or the file system; a log too short for one
/// transaction; I/O and journal errors. Nothing has changed then.
pub(crate) fn apply(fs: &Arc<FsInner>, records: Vec<Record>) -> Result<()> {
    if records.is_empty() {
        return Ok(());
    }
    let count = records.len();
    let mut log = Log::default();
    for record in records {
        log.play(fs, record)?;
    }
    replay::in_one_transaction(fs, || log.apply(fs))?;
    tracing::info!(records = count, "applied the fast commits of the log");
    Ok(())
}

/// What a log comes to.
#[derive(Default)]
pub(super) struct Log {
    pub(super) nodes: Nodes,
    names: Names,
}

impl Log {
    /// Takes a record in.
    pub(super) fn play(&mut self, fs: &Arc<FsInner>, record: Record) -> Result<()> {
        match record {
            Record::Inode { ino, bytes } => self.play_inode(fs, ino, bytes),
            Record::AddRange { ino, extent } => self.play_extent(fs, ino, &extent),
            Record::DelRange { ino, logical, len } => {
                let from = u64::from(logical.0);
                let node = self.nodes.get(fs, ino)?;
                if node.is_alive() {
                    node.ranges.set(from, from + u64::from(len), None);
                }
                Ok(())
            }
            Record::Create(entry) | Record::Link(entry) => self.play_link(fs, entry),
            Record::Unlink(entry) => self.play_unlink(fs, entry),
        }
    }

    fn play_inode(&mut self, fs: &Arc<FsInner>, ino: InodeNo, bytes: Vec<u8>) -> Result<()> {
        if bytes.len() > usize::from(fs.geo.inode_size) {
            return Err(damaged(format!("an image of inode {ino} has {} bytes", bytes.len())));
        }
        let word = |at: usize| match bytes.get(at..at + 2) {
            Some(&[low, high]) => u16::from_le_bytes([low, high]),
            _ => 0,
        };
        let (mode, links) = (word(0), word(LINKS_OFFSET));
        self.nodes.get(fs, ino)?.set_image(bytes, mode & S_IFMT == S_IFDIR, links);
        Ok(())
    }

    fn play_extent(&mut self, fs: &Arc<FsInner>, ino: InodeNo, extent: &Extent) -> Result<()> {
        let (from, to) = (u64::from(extent.logical.0), extent.logical_end());
        let len = u64::from(extent.len);
        let fits = fs.geo.contains_range(extent.start, len) && to < 1 << 32;
        if !fits || fs.is_system_block(extent.start, len) {
            return Err(damaged(format!("{extent:?} of inode {ino} cannot be a file's")));
        }
        let node = self.nodes.get(fs, ino)?;
        if node.is_alive() {
            let target = Target { start: extent.start, written: !extent.unwritten };
            node.ranges.set(from, to, Some(target));
        }
        Ok(())
    }

    /// The slot of an entry and what it stands for; `None` if the directory is not there.
    fn look_up(
        &mut self,
        fs: &Arc<FsInner>,
        entry: &EntryRecord,
    ) -> Result<Option<(Slot, Option<InodeNo>)>> {
        dir::check_name(&entry.name).map_err(|_| damaged("an entry with a name that cannot be"))?;
        let parent = self.nodes.get(fs, entry.parent)?;
        if !parent.is_alive() {
            return Ok(None);
        }
        if !parent.is_dir {
            return Err(damaged(format!("inode {} is no directory", entry.parent)));
        }
        let made = !parent.exists;
        let slot = (entry.parent, entry.name.clone());
        let now = self.names.get(fs, &slot, made)?;
        Ok(Some((slot, now)))
    }

    fn play_link(&mut self, fs: &Arc<FsInner>, entry: EntryRecord) -> Result<()> {
        let Some((slot, now)) = self.look_up(fs, &entry)? else { return Ok(()) };
        if now == Some(entry.ino) || !self.nodes.get(fs, entry.ino)?.is_alive() {
            return Ok(());
        }
        if let Some(other) = now {
            self.nodes.get(fs, other)?.name_taken();
        }
        self.names.set(&slot, Some(entry.ino));
        self.nodes.get(fs, entry.ino)?.names += 1;
        Ok(())
    }

    fn play_unlink(&mut self, fs: &Arc<FsInner>, entry: EntryRecord) -> Result<()> {
        let Some((slot, now)) = self.look_up(fs, &entry)? else { return Ok(()) };
        if now == Some(entry.ino) {
            self.names.set(&slot, None);
            self.nodes.get(fs, entry.ino)?.name_taken();
        }
        Ok(())
    }

    /// A directory has one name; the root has none. (A rename is a name that comes before
    /// another leaves, so this shows in the end only.)
    fn check_directories(&self) -> Result<()> {
        for (ino, node) in self.nodes.iter().filter(|(_, node)| node.is_alive() && node.is_dir) {
            let most = if node.exists { 0 } else { 1 };
            if node.names > most {
                return Err(damaged(format!("directory {ino} would have a second name")));
            }
        }
        Ok(())
    }

    /// Brings the file system to what all records come to.
    pub(super) fn apply(&self, fs: &Arc<FsInner>) -> Result<()> {
        self.check_directories()?;
        let mut subdirs: BTreeMap<InodeNo, i64> = BTreeMap::new();
        for ((parent, name), ino) in self.names.removed() {
            if self.was_dir(fs, ino)? {
                *subdirs.entry(*parent).or_default() -= 1;
            }
            replay::remove_entry(fs, &replay::directory(fs, *parent)?, name)?;
        }
        self.delete(fs)?;
        let alive = self.make_and_replace(fs)?;
        self.map(fs, &alive)?;
        if planted(Bug::FastCommitInParts) {
            fs.journal().commit_running()?;
        }
        for ((parent, name), ino) in self.names.added() {
            // An inode that never came to life has no place in a directory.
            let Some(inode) = alive.get(&ino) else { continue };
            if inode.state.read().is_dir() {
                *subdirs.entry(*parent).or_default() += 1;
                self.begin_directory(fs, ino, inode, *parent)?;
            }
            replay::add_entry(fs, &replay::directory(fs, *parent)?, name, inode)?;
        }
        self.count_links(fs, &alive, &subdirs)
    }

    /// Whether what an entry of the file system names is a directory.
    fn was_dir(&self, fs: &Arc<FsInner>, ino: InodeNo) -> Result<bool> {
        match self.nodes.known(ino) {
            Some(node) => Ok(node.was_dir),
            None => Ok(table::get(fs, ino)?.state.read().is_dir()),
        }
    }

    /// Deletes inodes whose last name the log took away.
    fn delete(&self, fs: &Arc<FsInner>) -> Result<()> {
        for (ino, _) in self.nodes.iter().filter(|(_, node)| node.deleted && !node.is_orphan) {
            let inode = table::get(fs, ino)?;
            let full = {
                let state = inode.state.read();
                state.is_dir() && !dir::is_empty(fs, &inode, &state)?
            };
            if full || ino == InodeNo::ROOT {
                return Err(damaged(format!("directory {ino} is removed, but not empty")));
            }
            evict::delete(fs, &inode)?;
        }
        Ok(())
    }

    /// Makes new inodes and gives the others their attributes. Returns all that are there.
    fn make_and_replace(&self, fs: &Arc<FsInner>) -> Result<BTreeMap<InodeNo, Arc<Inode>>> {
        let mut alive = BTreeMap::new();
        for (ino, node) in self.nodes.iter() {
            let inode = match &node.image {
                Some(image) if node.is_made() => replay::adopt_inode(fs, ino, image)?,
                _ if !node.exists => continue,
                image => {
                    let inode = table::get(fs, ino)?;
                    if let Some(image) = image {
                        replay::replace_inode(fs, &inode, image)?;
                    }
                    inode
                }
            };
            alive.insert(ino, inode);
        }
        Ok(alive)
    }

    /// Brings the maps to what the log says.
    fn map(&self, fs: &Arc<FsInner>, alive: &BTreeMap<InodeNo, Arc<Inode>>) -> Result<()> {
        let mut all = Vec::new();
        for (ino, node) in self.nodes.iter() {
            let Some(inode) = alive.get(&ino) else { continue };
            let changes = Differences::find(fs, inode, node.ranges.iter())?;
            for &(from, to) in &changes.unmap {
                replay::unmap(fs, inode, from, to)?;
            }
            all.push((inode, changes));
        }
        for &(_, start, count, _) in all.iter().flat_map(|(_, changes)| &changes.insert) {
            replay::adopt_run(fs, start, count)?;
        }
        for (inode, changes) in &all {
            for &(lblk, start, count, written) in &changes.insert {
                replay::map_run(fs, inode, lblk, (start, count), written)?;
            }
            for &(lblk, count, written) in &changes.mark {
                replay::mark_run(fs, inode, (lblk, count), written)?;
            }
        }
        Ok(())
    }

    /// Writes the first block of a directory that the log makes.
    fn begin_directory(
        &self,
        fs: &Arc<FsInner>,
        ino: InodeNo,
        inode: &Arc<Inode>,
        parent: InodeNo,
    ) -> Result<()> {
        if !self.nodes.known(ino).is_some_and(|node| node.is_made()) {
            return Ok(());
        }
        let mut state = inode.state.write();
        if state.size != 0 {
            return Err(damaged(format!("directory {ino} has two names")));
        }
        let handle = fs.start(crate::namei::credits_add_entry(fs))?;
        dir::init(fs, &handle, inode, &mut state, parent)?;
        crate::inode::disk::store(fs, &handle, inode, &mut state)?;
        handle.stop();
        Ok(())
    }

    fn count_links(
        &self,
        fs: &Arc<FsInner>,
        alive: &BTreeMap<InodeNo, Arc<Inode>>,
        subdirs: &BTreeMap<InodeNo, i64>,
    ) -> Result<()> {
        for (ino, inode) in alive {
            let Some(node) = self.nodes.known(*ino) else { continue };
            let old = inode.state.read().disk.links_count;
            let links = if !node.is_dir {
                node.links()
            } else if node.exists && old == 1 {
                // More subdirectories than can be counted.
                1
            } else {
                let base = if node.exists { i64::from(old) } else { 2 };
                base + subdirs.get(ino).copied().unwrap_or(0)
            };
            let links = u16::try_from(links)
                .map_err(|_| damaged(format!("inode {ino} would have {links} links")))?;
            if !(node.is_orphan && !node.is_dir && links == 0) {
                replay::set_links(fs, inode, links)?;
            }
        }
        Ok(())
    }
}

/// How a file's map differs from what a log says.
#[derive(Default)]
struct Differences {
    /// Ranges to be unmapped.
    unmap: Vec<(u64, u64)>,
    /// Runs to be mapped: file block, block, count, written.
    insert: Vec<(u32, BlockNo, u32, bool)>,
    /// Runs whose state changes: file block, count, written.
    mark: Vec<(u32, u32, bool)>,
}

impl Differences {
    fn find(
        fs: &Arc<FsInner>,
        inode: &Arc<Inode>,
        ranges: impl Iterator<Item = (u64, u64, Option<Target>)>,
    ) -> Result<Differences> {
        let mut differences = Differences::default();
        let state = inode.state.read();
        for (from, to, target) in ranges {
            if !map::has_map(&state) {
                let ino = inode.ino;
                return Err(damaged(format!("blocks are mapped in inode {ino}, which has none")));
            }
            let to = to.min(u64::from(u32::MAX));
            let mut at = from;
            while at < to {
                // Below `to`, which fits 32 bits.
                let found = map::lookup(fs, inode, &state, at as u32, (to - at) as u32)?;
                let len = u64::from(found.len.max(1)).min(to - at);
                let wanted = target.map(|target| Target {
                    start: BlockNo(target.start.0 + (at - from)),
                    ..target
                });
                differences.note(at as u32, len as u32, found.kind, wanted);
                at += len;
            }
        }
        Ok(differences)
    }

    /// Notes what to do about `len` blocks at `at`.
    fn note(&mut self, at: u32, len: u32, found: MapKind, wanted: Option<Target>) {
        let is = match found {
            MapKind::Hole => None,
            MapKind::Written(start) => Some(Target { start, written: true }),
            MapKind::Unwritten(start) => Some(Target { start, written: false }),
        };
        match (is, wanted) {
            (is, wanted) if is == wanted => {}
            (Some(is), Some(wanted)) if is.start == wanted.start => {
                self.mark.push((at, len, wanted.written));
            }
            (is, wanted) => {
                if is.is_some() {
                    self.unmap.push((u64::from(at), u64::from(at) + u64::from(len)));
                }
                if let Some(wanted) = wanted {
                    self.insert.push((at, wanted.start, len, wanted.written));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attr::Cred;
    use crate::error::Error;
    use crate::namei;
    use crate::testing::TestFs;

    /// A log may be forged: checksums are no secret.
    #[test]
    fn a_directory_gets_no_second_name() {
        let test = TestFs::new(&["-t", "ext4"], 16);
        let fs = &test.fs;
        let root = table::get(fs, InodeNo::ROOT).expect("a root");
        let dir = namei::mkdir(fs, &root, b"d", 0o755, &Cred::root()).expect("a directory").ino();
        fs.journal().commit_running().expect("committed");
        let record =
            |ino, name: &[u8]| EntryRecord { parent: InodeNo::ROOT, ino, name: name.into() };
        for (ino, name) in [(dir, b"again"), (InodeNo::ROOT, b"roots")] {
            let error = apply(fs, vec![Record::Link(record(ino, name))]).expect_err("damage");
            assert!(matches!(error, Error::Corrupt { .. }), "{error}");
        }
        let moved = [Record::Link(record(dir, b"moved")), Record::Unlink(record(dir, b"d"))];
        apply(fs, moved.into()).expect("a rename");
    }
}
