//! Blocks of directories: reading with checks, editing, appending.
//!
//! Invariants: a block is checked (checksum, then its shape) when it comes from the device; an
//! edited block has its checksum set before its guard is dropped; the directory grows by one block
//! at a time, and the block is in the transaction before the size covers it.

use std::sync::Arc;

use fjord_format::dirent;
use fjord_format::htree::{self, DxKind};
use fjord_format::{BlockNo, FormatError, LogicalBlock};
use fjord_journal::{Buffer, Handle};
use rustix::io::Errno;

use super::Dir;
use crate::error::{Error, Result};
use crate::inode::{InodeState, disk};
use crate::map::{self, MapKind};

/// Kind of block 0 of a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum First {
    /// The root of an index.
    Root,
    /// A block of entries.
    Leaf,
}

/// Most blocks passed over because the map of blocks is damaged: a search through any size ends.
const UNMAPPED_BLOCKS_MAX: u32 = 1024;

/// The first damage that a search through all blocks passed over.
#[derive(Default)]
pub(super) struct Damage {
    pub(super) first: Option<Error>,
    /// Blocks whose place is not known.
    unmapped_count: u32,
}

impl Damage {
    /// What was read, or `None` if it is damaged; other errors stay errors.
    pub(super) fn pass<T>(&mut self, read: Result<T>) -> Result<Option<T>> {
        match read {
            Ok(value) => Ok(Some(value)),
            Err(error) if error.is_corrupt() => {
                self.first.get_or_insert(error);
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// As [`Self::pass`], of the place of a block.
    pub(super) fn pass_map<T>(&mut self, located: Result<T>) -> Result<Option<T>> {
        let located = self.pass(located)?;
        self.unmapped_count += u32::from(located.is_none());
        Ok(located)
    }

    /// Whether the search gives up.
    pub(super) fn is_too_much(&self) -> bool {
        self.unmapped_count >= UNMAPPED_BLOCKS_MAX
    }

    /// This, or else what another search passed over later.
    pub(super) fn or(self, later: Damage) -> Damage {
        Damage { first: self.first.or(later.first), ..self }
    }

    /// # Errors
    /// The first damage, if there was any.
    pub(super) fn into_result(self) -> Result<()> {
        self.first.map_or(Ok(()), Err)
    }
}

/// Number of blocks of the directory.
pub(super) fn count(dir: &Dir<'_>, state: &InodeState) -> Result<u32> {
    let blocks = state.size >> dir.fs.geo.block_size_bits;
    if blocks > dir.fs.geo.block_count || blocks << dir.fs.geo.block_size_bits != state.size {
        return Err(dir.corrupt(format_args!("size {} cannot be", state.size)));
    }
    u32::try_from(blocks).map_err(|_| dir.corrupt("more than 2^32 blocks"))
}

/// Mapping of block `lblk`: a block, or the length of a hole.
pub(super) enum Located {
    /// Its block on the device.
    At(BlockNo),
    /// No block for so many blocks, at least one.
    Hole(u32),
}

/// Finds block `lblk`.
pub(super) fn locate(dir: &Dir<'_>, state: &InodeState, lblk: LogicalBlock) -> Result<Located> {
    let mapping = map::lookup(dir.fs, dir.inode, state, lblk.0, u32::MAX)?;
    match mapping.kind {
        MapKind::Written(block) => Ok(Located::At(block)),
        MapKind::Hole => Ok(Located::Hole(mapping.len.max(1))),
        MapKind::Unwritten(_) => Err(dir.corrupt(format_args!("block {lblk} is unwritten"))),
    }
}

fn locate_present(dir: &Dir<'_>, state: &InodeState, lblk: LogicalBlock) -> Result<BlockNo> {
    match locate(dir, state, lblk)? {
        Located::At(block) => Ok(block),
        Located::Hole(_) => Err(dir.corrupt(format_args!("block {lblk} is a hole"))),
    }
}

/// Reads a block of entries that lies at `block`.
pub(super) fn read_leaf_at(
    dir: &Dir<'_>,
    lblk: LogicalBlock,
    block: BlockNo,
) -> Result<Arc<Buffer>> {
    dir.fs.meta.read(block, |bytes| {
        dirent::verify_checksum(bytes, dir.format(), dir.seed).map_err(dir.damaged(lblk))
    })
}

/// Reads block `lblk`, which must hold entries.
pub(super) fn read_leaf(
    dir: &Dir<'_>,
    state: &InodeState,
    lblk: LogicalBlock,
) -> Result<Arc<Buffer>> {
    read_leaf_at(dir, lblk, locate_present(dir, state, lblk)?)
}

/// Reads block `lblk`, which must be a block of the index.
pub(super) fn read_index(
    dir: &Dir<'_>,
    state: &InodeState,
    lblk: LogicalBlock,
    kind: DxKind,
) -> Result<Arc<Buffer>> {
    let block = locate_present(dir, state, lblk)?;
    dir.fs.meta.read(block, |bytes| {
        let format = dir.format();
        let check = || -> Result<(), FormatError> {
            htree::verify_checksum(bytes, kind, format, dir.seed)?;
            if !htree::parse(bytes, kind, format)?.is_sorted() {
                return Err(FormatError::corrupt("directory index", "hashes are out of order"));
            }
            Ok(())
        };
        check().map_err(dir.damaged(lblk))
    })
}

/// Looks at block `lblk`, whatever it holds.
pub(super) fn look_unchecked<T>(
    dir: &Dir<'_>,
    state: &InodeState,
    lblk: LogicalBlock,
    look: impl FnOnce(&[u8]) -> Result<T>,
) -> Result<T> {
    dir.fs.meta.look(locate_present(dir, state, lblk)?, look)
}

/// Reads a block of a directory whose index is damaged: one of entries, or a node of the index, for which this
/// returns `None`. A sound node looks like a block without entries; of another one the index tells.
pub(super) fn read_leaf_or_node(
    dir: &Dir<'_>,
    state: &InodeState,
    lblk: LogicalBlock,
    block: BlockNo,
) -> Result<Option<Arc<Buffer>>> {
    let format = dir.format();
    let has_entries = |bytes: &[u8]| -> Result<(), FormatError> {
        dirent::verify_checksum(bytes, format, dir.seed)?;
        dirent::entries(format.entries_area(bytes)?, format).try_for_each(|entry| entry.map(drop))
    };
    let (is_node, is_leaf) = dir.fs.meta.look(block, |bytes| {
        Ok((htree::looks_like_node(bytes, format), has_entries(bytes).is_ok()))
    })?;
    if is_node || (!is_leaf && super::htree::nodes(dir, state).contains(&lblk)) {
        return Ok(None);
    }
    read_leaf_at(dir, lblk, block).map(Some)
}

/// Reads block 0, and says which kind it is.
pub(super) fn read_first(dir: &Dir<'_>, state: &InodeState) -> Result<(Arc<Buffer>, First)> {
    if dir.is_indexed(state) {
        Ok((read_index(dir, state, LogicalBlock(0), DxKind::Root)?, First::Root))
    } else {
        Ok((read_leaf(dir, state, LogicalBlock(0))?, First::Leaf))
    }
}

/// Bytes of the largest entry that still fits block `lblk`, which must hold entries.
pub(super) fn room_bytes(dir: &Dir<'_>, state: &InodeState, lblk: LogicalBlock) -> Result<usize> {
    let buffer = read_leaf(dir, state, lblk)?;
    let bytes = buffer.read();
    let area = dir.format().entries_area(&bytes).map_err(dir.damaged(lblk))?;
    dirent::largest_room_bytes(area, dir.format()).map_err(dir.damaged(lblk))
}

/// Edits the entries of block `lblk` and sets its checksum.
pub(super) fn edit(
    dir: &Dir<'_>,
    h: &Handle,
    state: &InodeState,
    lblk: LogicalBlock,
    change: impl FnOnce(&mut [u8]) -> Result<(), FormatError>,
) -> Result<()> {
    let buffer = read_leaf(dir, state, lblk)?;
    let mut bytes = h.get_write(&buffer)?;
    let format = dir.format();
    let run = || {
        change(format.entries_area_mut(&mut bytes)?)?;
        dirent::set_checksum(&mut bytes, format, dir.seed)
    };
    run().map_err(dir.damaged(lblk))
}

/// Adds a block at the end of the directory, filled by `fill` (checksum included). On an
/// error of the allocation nothing has changed. Stores the inode.
pub(super) fn append(
    dir: &Dir<'_>,
    h: &Handle,
    state: &mut InodeState,
    fill: impl FnOnce(&mut [u8]) -> Result<(), FormatError>,
) -> Result<LogicalBlock> {
    let lblk = LogicalBlock(count(dir, state)?);
    let block_bytes = u64::from(dir.fs.geo.block_size);
    let size = state.size.checked_add(block_bytes).ok_or(Error::Posix(Errno::NOSPC))?;
    // Without large_dir the upper half of the size is another field.
    if lblk >= LogicalBlock::LAST || (!dir.params.large_dir && size > u64::from(u32::MAX)) {
        return Err(Errno::NOSPC.into());
    }
    let block = map::alloc_block(dir.fs, h, dir.inode, state, lblk.0)?;
    let buffer = dir.fs.meta.create(block);
    let mut bytes = h.get_create(&buffer)?;
    bytes.fill(0);
    fill(&mut bytes).map_err(dir.damaged(lblk))?;
    drop(bytes);
    state.size = size;
    state.disk.size = size;
    disk::store(dir.fs, h, dir.inode, state)?;
    Ok(lblk)
}
