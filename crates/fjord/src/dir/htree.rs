//! Indexed directories: a tree of hashes over blocks of entries.
//!
//! Invariants: a split is prepared in copies, then its new block is allocated, then all its blocks
//! are written in one handle, so that `ENOSPC` leaves the tree unchanged and a commit never has
//! half a split; each split leaves a valid tree, even if the insertion that needed it fails. A path
//! from root to leaf never visits a block twice, and a walk over leaves takes at most as many steps
//! as the directory has blocks.

use std::collections::HashSet;
use std::ops::{Range, RangeInclusive};
use std::sync::Arc;

use fjord_format::dirent::{self, Inserted};
use fjord_format::hash::{HashVersion, dirhash};
use fjord_format::htree::{self, DxEntries, DxKind};
use fjord_format::{FormatError, LogicalBlock};
use fjord_journal::{Buffer, Handle};
use rustix::io::Errno;

use super::{Dir, Found, NewEntry, Place, block, early_room_bytes};
use crate::error::{Error, Result};
use crate::inode::{InodeState, disk};

/// Why a name does not fit into a directory while there is space, as Linux says it too.
pub const INDEX_FULL: &str = "its index is full: set the feature large_dir (tune2fs -O large_dir), or use \
                              several directories";

/// Where the root of an index lies.
const ROOT: LogicalBlock = LogicalBlock(0);
/// Most splits of one insertion: each level may grow or split once, and the leaf.
const SPLITS_MAX: usize = 8;

/// One index block on the path.
struct Frame {
    lblk: LogicalBlock,
    kind: DxKind,
    buffer: Arc<Buffer>,
    /// The entry that the path follows.
    at: usize,
}

/// The path from the root to a leaf.
pub(super) struct Path {
    /// Root first; never empty.
    frames: Vec<Frame>,
    /// Hash parameters of the directory.
    pub(super) version: HashVersion,
    /// The leaf.
    pub(super) leaf: LogicalBlock,
    /// Leaves visited since the descent.
    steps: u32,
}

impl Frame {
    fn with_entries<T>(
        &self,
        dir: &Dir<'_>,
        look: impl FnOnce(DxEntries<'_>) -> Result<T, FormatError>,
    ) -> Result<T> {
        let bytes = self.buffer.read();
        htree::parse(&bytes, self.kind, dir.format()).and_then(look).map_err(dir.damaged(self.lblk))
    }

    fn is_full(&self, dir: &Dir<'_>) -> Result<bool> {
        self.with_entries(dir, |entries| Ok(entries.is_full()))
    }
}

/// Descends to the leaf for the hash that `hash_of` computes for the directory's hash version. Also
/// returns that hash.
pub(super) fn probe(
    dir: &Dir<'_>,
    state: &InodeState,
    hash_of: impl FnOnce(HashVersion) -> u32,
) -> Result<(Path, u32)> {
    let (buffer, indirect_levels, version) = read_root(dir, state)?;
    let hash = hash_of(version);
    let mut path = Path { frames: Vec::with_capacity(3), version, leaf: ROOT, steps: 0 };
    path.push(dir, ROOT, DxKind::Root, buffer, Some(hash))?;
    for _ in 0..indirect_levels {
        let lblk = path.leaf;
        let buffer = block::read_index(dir, state, lblk, DxKind::Node)?;
        path.push(dir, lblk, DxKind::Node, buffer, Some(hash))?;
    }
    Ok((path, hash))
}

/// Whether the root of the index cannot be used. A failed read is not damage.
pub(super) fn is_root_damaged(dir: &Dir<'_>, state: &InodeState) -> bool {
    read_root(dir, state).is_err_and(|error| is_damage(&error))
}

/// Whether any block of the index cannot be used, or two entries lead to one block. Reads the whole index.
///
/// # Errors
/// A read failed.
pub(super) fn is_damaged(dir: &Dir<'_>, state: &InodeState) -> Result<bool> {
    match check(dir, state) {
        Ok(()) => Ok(false),
        Err(error) if is_damage(&error) => Ok(true),
        Err(error) => Err(error),
    }
}

/// The nodes below the root of which the sound blocks of the index tell.
pub(super) fn nodes(dir: &Dir<'_>, state: &InodeState) -> HashSet<LogicalBlock> {
    let mut nodes = HashSet::new();
    let (Ok(blocks), Ok((root, indirect_levels, _))) =
        (block::count(dir, state), read_root(dir, state))
    else {
        return nodes;
    };
    let mut level = targets(dir, ROOT, DxKind::Root, &root).unwrap_or_default();
    for _ in 0..indirect_levels {
        let mut next = Vec::new();
        for (_, lblk) in level {
            let is_new = lblk.0 < blocks && lblk != ROOT && nodes.insert(lblk);
            if is_new
                && next.len() <= blocks as usize
                && let Ok(node) = block::read_index(dir, state, lblk, DxKind::Node)
            {
                next.extend(targets(dir, lblk, DxKind::Node, &node).unwrap_or_default());
            }
        }
        level = next;
    }
    nodes
}

/// Whether an error says that the index cannot be used.
pub(super) fn is_damage(error: &Error) -> bool {
    error.is_corrupt() || matches!(error, Error::Incompatible { .. })
}

/// Reads all blocks of the index, level by level.
fn check(dir: &Dir<'_>, state: &InodeState) -> Result<()> {
    let blocks = block::count(dir, state)?;
    let (root, indirect_levels, _) = read_root(dir, state)?;
    let mut seen = HashSet::from([ROOT]);
    let mut level = targets(dir, ROOT, DxKind::Root, &root)?;
    for below in (0..=indirect_levels).rev() {
        let is_wrong = |(_, lblk): &&(u32, LogicalBlock)| lblk.0 >= blocks || !seen.insert(*lblk);
        if let Some((_, lblk)) = level.iter().find(is_wrong) {
            return Err(dir.corrupt(format_args!("its index leads to block {lblk} in error")));
        }
        if !level.is_sorted_by_key(|(hash, _)| *hash) {
            return Err(dir.corrupt("blocks of its index are for names of others"));
        }
        if below == 0 {
            break;
        }
        let mut next = Vec::new();
        for (hash, lblk) in level {
            let node = block::read_index(dir, state, lblk, DxKind::Node)?;
            let first = next.len();
            next.extend(targets(dir, lblk, DxKind::Node, &node)?);
            if let Some((own, _)) = next.get_mut(first) {
                *own = hash;
            }
            if next.len() > blocks as usize {
                return Err(dir.corrupt("its index leads to more blocks than it has"));
            }
        }
        level = next;
    }
    Ok(())
}

/// The hashes of the entries of an index block, without continuation bits, and the blocks that they lead to.
fn targets(
    dir: &Dir<'_>,
    lblk: LogicalBlock,
    kind: DxKind,
    buffer: &Buffer,
) -> Result<Vec<(u32, LogicalBlock)>> {
    let all = |entries: DxEntries<'_>| {
        (0..entries.count()).map(|at| Ok((entries.hash(at)? & !1, entries.block(at)?))).collect()
    };
    htree::parse(&buffer.read(), kind, dir.format()).and_then(all).map_err(dir.damaged(lblk))
}

/// The root of the index, its levels below it, and the hash of the directory.
fn read_root(dir: &Dir<'_>, state: &InodeState) -> Result<(Arc<Buffer>, u8, HashVersion)> {
    let buffer = block::read_index(dir, state, ROOT, DxKind::Root)?;
    let (info, _) = htree::parse_root(&buffer.read(), dir.format(), dir.params.depth)
        .map_err(dir.damaged(ROOT))?;
    let version = HashVersion::from_disk(info.hash_version, dir.params.unsigned_hash)?;
    Ok((buffer, info.indirect_levels, version))
}

impl Path {
    /// Adds an index block and the entry in it that leads to `hash` (`None`: the first).
    fn push(
        &mut self,
        dir: &Dir<'_>,
        lblk: LogicalBlock,
        kind: DxKind,
        buffer: Arc<Buffer>,
        hash: Option<u32>,
    ) -> Result<()> {
        let mut frame = Frame { lblk, kind, buffer, at: 0 };
        let (at, next) = frame.with_entries(dir, |entries| {
            let at = hash.map_or(0, |hash| entries.search(hash));
            Ok((at, entries.block(at)?))
        })?;
        frame.at = at;
        let parent = self.bounds(dir)?;
        self.frames.push(frame);
        let own = self.bounds(dir)?;
        if own.start < parent.start || own.end > parent.end {
            let hashes = "names of other blocks of the index";
            return Err(dir.corrupt(format_args!("block {lblk} of the index is for {hashes}")));
        }
        self.descend(dir, next)
    }

    /// The hashes that the index has for the leaf below the last block of the path, without continuation bits; past
    /// the end where names of the last hash continue.
    fn bounds(&self, dir: &Dir<'_>) -> Result<Range<u32>> {
        let mut start = 0;
        for frame in &self.frames {
            if frame.at > 0 {
                start = frame.with_entries(dir, |entries| entries.hash(frame.at))? & !1;
            }
        }
        Ok(start..self.next_hash(dir)?.map_or(u32::MAX, |next| next & !1))
    }

    /// The hashes of names in the leaf: also the one at which the next begins, where its names continue there.
    pub(super) fn leaf_hashes(&self, dir: &Dir<'_>) -> Result<RangeInclusive<u32>> {
        let Range { start, end } = self.bounds(dir)?;
        let continues = self.next_hash(dir)?.is_none_or(|next| next & 1 == 1);
        Ok(start..=if continues { end } else { end.saturating_sub(1) })
    }

    fn descend(&mut self, dir: &Dir<'_>, next: LogicalBlock) -> Result<()> {
        if self.frames.iter().any(|frame| frame.lblk == next) {
            return Err(dir.corrupt(format_args!("block {next} of the index leads to itself")));
        }
        self.leaf = next;
        Ok(())
    }

    /// The hash in the index at which the next leaf begins, with its continuation bit.
    pub(super) fn next_hash(&self, dir: &Dir<'_>) -> Result<Option<u32>> {
        for frame in self.frames.iter().rev() {
            let next = frame.at.saturating_add(1);
            let hash = frame.with_entries(dir, |entries| {
                if next < entries.count() { entries.hash(next).map(Some) } else { Ok(None) }
            })?;
            if hash.is_some() {
                return Ok(hash);
            }
        }
        Ok(None)
    }

    /// Advances to the next leaf. Returns whether there is one.
    pub(super) fn advance(&mut self, dir: &Dir<'_>, state: &InodeState) -> Result<bool> {
        self.steps = self.steps.saturating_add(1);
        if self.steps > block::count(dir, state)? {
            return Err(dir.corrupt("the index has more leaves than the directory has blocks"));
        }
        let levels = self.frames.len();
        while let Some(frame) = self.frames.last_mut() {
            let next = frame.at.saturating_add(1);
            let target = frame.with_entries(dir, |entries| {
                if next < entries.count() { entries.block(next).map(Some) } else { Ok(None) }
            })?;
            if let Some(target) = target {
                frame.at = next;
                self.descend(dir, target)?;
                break;
            }
            self.frames.pop();
        }
        if self.frames.is_empty() {
            return Ok(false);
        }
        while self.frames.len() < levels {
            let lblk = self.leaf;
            let buffer = block::read_index(dir, state, lblk, DxKind::Node)?;
            self.push(dir, lblk, DxKind::Node, buffer, None)?;
        }
        Ok(true)
    }

    fn bottom(&self, dir: &Dir<'_>) -> Result<&Frame> {
        self.frames.last().ok_or_else(|| dir.corrupt("an index without a root"))
    }
}

/// See [`super::find`].
pub(super) fn find(dir: &Dir<'_>, state: &InodeState, name: &[u8]) -> Result<Option<Found>> {
    let (mut path, hash) =
        probe(dir, state, |version| dirhash(name, version, dir.params.hash_seed).hash)?;
    loop {
        let lblk = path.leaf;
        let buffer = block::read_leaf(dir, state, lblk)?;
        {
            let bytes = buffer.read();
            let area = dir.format().entries_area(&bytes).map_err(dir.damaged(lblk))?;
            let entry = dirent::find(area, dir.format(), name).map_err(dir.damaged(lblk))?;
            if let Some(entry) = entry
                && let Some(ino) = entry.inode
            {
                let place = Place::Block { lblk, offset: entry.offset };
                return Ok(Some(Found { ino, file_type: entry.file_type, place }));
            }
        }
        // Names with the same hash may continue in the next leaf.
        match path.next_hash(dir)? {
            Some(next) if next & !1 == hash => {}
            _ => return Ok(None),
        }
        if !path.advance(dir, state)? {
            return Ok(None);
        }
    }
}

/// See [`super::is_empty`].
pub(super) fn is_empty(dir: &Dir<'_>, state: &InodeState) -> Result<bool> {
    let (mut path, _) = probe(dir, state, |_| 0)?;
    loop {
        let lblk = path.leaf;
        let buffer = block::read_leaf(dir, state, lblk)?;
        let bytes = buffer.read();
        let area = dir.format().entries_area(&bytes).map_err(dir.damaged(lblk))?;
        if !dirent::is_empty(area, dir.format()).map_err(dir.damaged(lblk))? {
            return Ok(false);
        }
        drop(bytes);
        if !path.advance(dir, state)? {
            return Ok(true);
        }
    }
}

/// See [`super::insert`].
pub(super) fn insert(
    dir: &Dir<'_>,
    h: &Handle,
    state: &mut InodeState,
    new: &NewEntry<'_>,
) -> Result<()> {
    for _ in 0..SPLITS_MAX {
        let (path, hash) =
            probe(dir, state, |version| dirhash(new.name, version, dir.params.hash_seed).hash)?;
        if insert_in_leaf(dir, h, state, path.leaf, new)? {
            return Ok(());
        }
        if !path.bottom(dir)?.is_full(dir)? {
            return split_leaf(dir, h, state, &path, Some((new, hash)));
        }
        split_index(dir, h, state, &path)?;
    }
    Err(dir.corrupt("the index has no space after the maximum number of splits"))
}

/// Adds the entry to a leaf. `false` if it has no space.
fn insert_in_leaf(
    dir: &Dir<'_>,
    h: &Handle,
    state: &InodeState,
    lblk: LogicalBlock,
    new: &NewEntry<'_>,
) -> Result<bool> {
    let buffer = block::read_leaf(dir, state, lblk)?;
    let format = dir.format();
    let mut bytes = h.get_write(&buffer)?;
    let area = format.entries_area_mut(&mut bytes).map_err(dir.damaged(lblk))?;
    match dirent::insert(area, format, new.name, new.ino, new.file_type)
        .map_err(dir.damaged(lblk))?
    {
        Inserted::At(_) => {
            dirent::set_checksum(&mut bytes, format, dir.seed).map_err(dir.damaged(lblk))?;
            Ok(true)
        }
        Inserted::Exists(_) => Err(Errno::EXIST.into()),
        Inserted::NoRoom => Ok(false),
    }
}

/// Splits the leaf of a name if it has little space left. If so, returns the bytes that were left.
pub(super) fn split_early(
    dir: &Dir<'_>,
    h: &Handle,
    state: &mut InodeState,
    name: &[u8],
) -> Result<Option<usize>> {
    let seed = dir.params.hash_seed;
    let (mut path, _) = probe(dir, state, |version| dirhash(name, version, seed).hash)?;
    let room_bytes = block::room_bytes(dir, state, path.leaf)?;
    if room_bytes >= early_room_bytes(dir) {
        return Ok(None);
    }
    let mut splits = 0;
    while path.bottom(dir)?.is_full(dir)? && splits < SPLITS_MAX {
        split_index(dir, h, state, &path)?;
        path = probe(dir, state, |version| dirhash(name, version, seed).hash)?.0;
        splits += 1;
    }
    split_leaf(dir, h, state, &path, None)?;
    Ok(Some(room_bytes))
}

/// Splits the first leaf.
pub(super) fn split_first(dir: &Dir<'_>, h: &Handle, state: &mut InodeState) -> Result<()> {
    let (path, _) = probe(dir, state, |_| 0)?;
    split_leaf(dir, h, state, &path, None)
}

/// Splits the leaf at the end of `path`, whose index block has room, and adds the entry if
/// there is one.
fn split_leaf(
    dir: &Dir<'_>,
    h: &Handle,
    state: &mut InodeState,
    path: &Path,
    new: Option<(&NewEntry<'_>, u32)>,
) -> Result<()> {
    let (format, seed) = (dir.format(), dir.seed);
    let frame = path.bottom(dir)?;
    let leaf = block::read_leaf(dir, state, path.leaf)?;
    let mut lower = leaf.read().to_vec();
    let mut upper = vec![0; lower.len()];
    let mut prepare = || -> Result<_, FormatError> {
        let split =
            dirent::split_leaf(&mut lower, &mut upper, format, path.version, dir.params.hash_seed)?;
        if let Some((new, hash)) = new {
            let half = if hash >= split.first_hash { &mut upper } else { &mut lower };
            let area = format.entries_area_mut(half)?;
            let inserted = dirent::insert(area, format, new.name, new.ino, new.file_type)?;
            if !matches!(inserted, Inserted::At(_)) {
                return Err(FormatError::corrupt("directory block", "half a block has no space"));
            }
        }
        dirent::set_checksum(&mut lower, format, seed)?;
        dirent::set_checksum(&mut upper, format, seed)?;
        Ok(split)
    };
    let split = prepare().map_err(dir.damaged(path.leaf))?;
    let upper_at = append_copy(dir, h, state, &upper)?;
    h.get_write(&leaf)?.copy_from_slice(&lower);
    let mut bytes = h.get_write(&frame.buffer)?;
    htree::insert(&mut bytes, frame.kind, format, frame.at, split.index_hash(), upper_at)
        .map_err(dir.damaged(frame.lblk))?;
    seal(dir, &mut bytes, frame.kind, frame.lblk)
}

/// Frees space in the index above a full leaf: splits the highest full block on the path whose
/// parent has space, or adds a level if all are full.
fn split_index(dir: &Dir<'_>, h: &Handle, state: &mut InodeState, path: &Path) -> Result<()> {
    let mut level = path.frames.len().saturating_sub(1);
    while let Some(parent) = level.checked_sub(1).and_then(|above| path.frames.get(above)) {
        let Some(frame) = path.frames.get(level) else { break };
        if !parent.is_full(dir)? {
            return split_node(dir, h, state, parent, frame);
        }
        level -= 1;
    }
    match path.frames.first() {
        Some(root) => grow(dir, h, state, root),
        None => Err(dir.corrupt("an index without a root")),
    }
}

fn split_node(
    dir: &Dir<'_>,
    h: &Handle,
    state: &mut InodeState,
    parent: &Frame,
    node: &Frame,
) -> Result<()> {
    let format = dir.format();
    let mut lower = node.buffer.read().to_vec();
    let mut upper = vec![0; lower.len()];
    let mut prepare = || -> Result<_, FormatError> {
        let split = htree::split_node(&mut lower, &mut upper, format)?;
        htree::set_checksum(&mut lower, DxKind::Node, format, dir.seed)?;
        htree::set_checksum(&mut upper, DxKind::Node, format, dir.seed)?;
        Ok(split)
    };
    let split = prepare().map_err(dir.damaged(node.lblk))?;
    let upper_at = append_copy(dir, h, state, &upper)?;
    h.get_write(&node.buffer)?.copy_from_slice(&lower);
    let mut bytes = h.get_write(&parent.buffer)?;
    htree::insert(&mut bytes, parent.kind, format, parent.at, split.hash, upper_at)
        .map_err(dir.damaged(parent.lblk))?;
    seal(dir, &mut bytes, parent.kind, parent.lblk)
}

/// Adds a level below the root.
fn grow(dir: &Dir<'_>, h: &Handle, state: &mut InodeState, root: &Frame) -> Result<()> {
    let format = dir.format();
    let mut top = root.buffer.read().to_vec();
    let mut below = vec![0; top.len()];
    let below_at = LogicalBlock(block::count(dir, state)?);
    let mut prepare = || -> Result<(), FormatError> {
        htree::grow_root(&mut top, &mut below, format, dir.params.depth, below_at)?;
        htree::set_checksum(&mut top, DxKind::Root, format, dir.seed)?;
        htree::set_checksum(&mut below, DxKind::Node, format, dir.seed)
    };
    match prepare() {
        // The tree has its maximum depth: full for this name.
        Err(FormatError::NoRoom { .. }) => {
            dir.fs.warn(format_args!("directory inode {}: {INDEX_FULL}", dir.inode.ino));
            return Err(Errno::NOSPC.into());
        }
        other => other.map_err(dir.damaged(root.lblk))?,
    }
    append_copy(dir, h, state, &below)?;
    h.get_write(&root.buffer)?.copy_from_slice(&top);
    Ok(())
}

/// Appends a block with this content.
fn append_copy(
    dir: &Dir<'_>,
    h: &Handle,
    state: &mut InodeState,
    content: &[u8],
) -> Result<LogicalBlock> {
    block::append(dir, h, state, |bytes| {
        bytes.copy_from_slice(content);
        Ok(())
    })
}

/// Turns the only block of a linear directory into a root over one leaf.
pub(super) fn convert(dir: &Dir<'_>, h: &Handle, state: &mut InodeState) -> Result<()> {
    let format = dir.format();
    let version = dir.default_hash()?;
    let first = LogicalBlock(0);
    let buffer = block::read_leaf(dir, state, first)?;
    let mut root = buffer.read().to_vec();
    let mut leaf = vec![0; root.len()];
    let leaf_at = LogicalBlock(block::count(dir, state)?);
    let mut prepare = || -> Result<(), FormatError> {
        htree::make_indexed(&mut root, &mut leaf, format, version, leaf_at)?;
        htree::set_checksum(&mut root, DxKind::Root, format, dir.seed)?;
        dirent::set_checksum(&mut leaf, format, dir.seed)
    };
    prepare().map_err(dir.damaged(first))?;
    append_copy(dir, h, state, &leaf)?;
    h.get_write(&buffer)?.copy_from_slice(&root);
    state.disk.flags.insert(fjord_format::inode::InodeFlags::INDEX);
    disk::store(dir.fs, h, dir.inode, state)
}

/// Sets the checksum of an edited index block.
pub(super) fn seal(
    dir: &Dir<'_>,
    bytes: &mut [u8],
    kind: DxKind,
    lblk: LogicalBlock,
) -> Result<()> {
    htree::set_checksum(bytes, kind, dir.format(), dir.seed)
        .map_err(|error| -> Error { dir.damaged(lblk)(error) })
}
