//! Mapping of file blocks to blocks of the device.
//!
//! Owns one interface over extent trees and the block maps of ext2 and ext3. Invariants:
//! - callers get only checked block numbers: inside the file system and not of its own structures;
//! - `state.disk.blocks_512` counts every block that the map and its nodes use;
//! - a change that fails with `ENOSPC` has changed nothing;
//! - callers hold the inode's state lock, shared for [`lookup`], exclusive for the rest,
//!   and store the inode in the same handle afterwards (`i_block` may have changed).
//!
//! Who frees and allocates: [`insert`] maps blocks that are in use already; [`remove`]
//! frees what it unmaps; nodes of the maps are allocated and freed here.

mod credits;
mod extent;
mod indirect;
mod init;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use fjord_block::plant::{Bug, planted};
use fjord_format::types::BlockNo;
use fjord_journal::Handle;
use rustix::io::Errno;

pub(crate) use credits::{credits_insert, credits_remove, runs_per_handle};
pub(crate) use init::{clear, depth, has_extents, has_map, init, max_size_bytes};

use crate::alloc::Goal;
use crate::error::{Error, Result};
use crate::file::writeback::journals_data;
use crate::fs::FsInner;
use crate::inode::changes::CommitReason;
use crate::inode::{Inode, InodeState};

/// One past the last block index that a file can have, as a number that 32 bits cannot hold.
const LOGICAL_END: u64 = 1 << 32;

/// Content of a run of file blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MapKind {
    /// Nothing: reads as zeros.
    Hole,
    /// Data, from this block of the device on.
    Written(BlockNo),
    /// Blocks without data: reads as zeros.
    Unwritten(BlockNo),
}

/// A run of file blocks of one kind, contiguous on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Mapping {
    /// Blocks in the run; at least 1. The next block may well be of the same kind.
    pub(crate) len: u32,
    /// What is there.
    pub(crate) kind: MapKind,
}

/// How far [`remove`] came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Progress {
    /// The range has no blocks any more.
    Done,
    /// Call again with the same range and another handle.
    More,
}

fn corrupt(inode: &Inode, detail: impl std::fmt::Display) -> Error {
    Error::corrupt("block map", format!("inode {}: {detail}", inode.ino))
}

/// What the file has at block `lblk`, looking at most `max_len` blocks far.
///
/// # Errors
/// `Corrupt`, I/O errors.
pub(crate) fn lookup(
    fs: &FsInner,
    inode: &Inode,
    state: &InodeState,
    lblk: u32,
    max_len: u32,
) -> Result<Mapping> {
    let max_len = max_len.max(1);
    if has_extents(state) {
        extent::lookup(fs, inode, state, lblk, max_len)
    } else {
        indirect::lookup(fs, inode, state, lblk, max_len)
    }
}

/// Where block `lblk` should best lie as far as its neighbours in the file go, and whether
/// that is right after the block before it.
///
/// # Errors
/// `Corrupt`, I/O errors.
pub(crate) fn neighbour(
    fs: &FsInner,
    inode: &Inode,
    state: &InodeState,
    lblk: u32,
) -> Result<Option<(BlockNo, bool)>> {
    if !has_map(state) {
        return Ok(None);
    }
    let found = if has_extents(state) {
        extent::neighbour(fs, inode, state, lblk)?
    } else {
        indirect::neighbour(fs, inode, state, lblk)?
    };
    Ok(found.filter(|(block, _)| fs.geo.contains(*block)))
}

/// Maps `len` blocks from `lblk` on, which must be a hole, to the blocks from `phys` on.
///
/// # Errors
/// `ENOSPC` for the map's own blocks, `EOPNOTSUPP` for unwritten blocks in a block map,
/// `Corrupt` if something is mapped there, I/O and journal errors.
#[expect(clippy::too_many_arguments, reason = "a run of a map, all of it needed")]
pub(crate) fn insert(
    fs: &FsInner,
    h: &Handle,
    inode: &Inode,
    state: &mut InodeState,
    lblk: u32,
    phys: BlockNo,
    len: u32,
    written: bool,
) -> Result<()> {
    if u64::from(lblk) + u64::from(len) > LOGICAL_END - 1 {
        return Err(Errno::FBIG.into());
    }
    if has_extents(state) {
        extent::insert(fs, h, inode, state, lblk, phys, len, !written)?;
    } else if written {
        indirect::insert(fs, h, inode, state, lblk, phys, len)?;
    } else {
        return Err(Errno::OPNOTSUPP.into());
    }
    charge(fs, state, u64::from(len));
    state.changes.mapping_changed(h.tid(), lblk..lblk.saturating_add(len));
    Ok(())
}

/// Allocates one block of metadata (of a directory, of a symbolic link) and maps it at
/// `lblk`. Its buffer is the caller's to create.
///
/// # Errors
/// As [`insert`].
pub(crate) fn alloc_block(
    fs: &FsInner,
    h: &Handle,
    inode: &Inode,
    state: &mut InodeState,
    lblk: u32,
) -> Result<BlockNo> {
    let goal = Goal::for_file(fs, inode, state, lblk)?;
    let run = fs.alloc_blocks(h, goal, 1)?;
    insert(fs, h, inode, state, lblk, run.start, 1, true).or_else(|error| {
        fs.free_blocks(h, run.start, 1)?;
        Err(error)
    })?;
    Ok(run.start)
}

/// Turns unwritten blocks, which all of the range must be or be written, into written ones.
///
/// # Errors
/// `ENOSPC` for the map's own blocks, `Corrupt` if part of the range is a hole, I/O and
/// journal errors.
pub(crate) fn mark_written(
    fs: &FsInner,
    h: &Handle,
    inode: &Inode,
    state: &mut InodeState,
    lblk: u32,
    len: u32,
) -> Result<()> {
    if !has_extents(state) {
        return Ok(());
    }
    state.changes.mapping_changed(h.tid(), lblk..lblk.saturating_add(len));
    extent::mark(fs, h, inode, state, lblk, len, false)
}

/// Turns written blocks into unwritten ones, so that they read as zeros.
///
/// # Errors
/// As [`mark_written`]; `EOPNOTSUPP` for a block map.
pub(crate) fn mark_unwritten(
    fs: &FsInner,
    h: &Handle,
    inode: &Inode,
    state: &mut InodeState,
    lblk: u32,
    len: u32,
) -> Result<()> {
    if !has_extents(state) {
        return Err(Errno::OPNOTSUPP.into());
    }
    state.changes.mapping_changed(h.tid(), lblk..lblk.saturating_add(len));
    extent::mark(fs, h, inode, state, lblk, len, true)
}

/// Unmaps and frees the blocks `from..to`, from the end on, as far as the credits of
/// [`credits_remove`] go.
///
/// # Errors
/// `ENOSPC` if a node has to be split for a hole in the middle, `Corrupt`, I/O and journal
/// errors.
pub(crate) fn remove(
    fs: &FsInner,
    h: &Handle,
    inode: &Inode,
    state: &mut InodeState,
    from: u64,
    to: u64,
) -> Result<Progress> {
    let to = to.min(LOGICAL_END);
    if from >= to {
        return Ok(Progress::Done);
    }
    // Both ends fit 32 bits but for 2^32 itself, past which no file has a block.
    let end = u32::try_from(to).unwrap_or(u32::MAX);
    state.changes.mapping_changed(h.tid(), u32::try_from(from).unwrap_or(end)..end);
    if has_extents(state) {
        extent::remove(fs, h, inode, state, from, to)
    } else {
        indirect::remove(fs, h, inode, state, from, to)
    }
}

/// Moves everything behind the hole of `len` blocks at `from` down to `from`. Takes handles
/// of its own: a crash in between leaves part of it moved, as in ext4.
///
/// # Errors
/// `EOPNOTSUPP` for a block map, `Corrupt`, I/O and journal errors.
pub(crate) fn collapse(
    fs: &Arc<FsInner>,
    inode: &Inode,
    state: &mut InodeState,
    from: u32,
    len: u32,
) -> Result<()> {
    if !has_extents(state) {
        return Err(Errno::OPNOTSUPP.into());
    }
    extent::collapse(fs, inode, state, from, len)
}

/// Moves everything from `from` on up by `len` blocks. Takes handles of its own.
///
/// # Errors
/// `EOPNOTSUPP` for a block map, `EFBIG` if blocks would be moved past the end, `ENOSPC`,
/// `Corrupt`, I/O and journal errors.
pub(crate) fn expand(
    fs: &Arc<FsInner>,
    inode: &Inode,
    state: &mut InodeState,
    from: u32,
    len: u32,
) -> Result<()> {
    if !has_extents(state) {
        return Err(Errno::OPNOTSUPP.into());
    }
    extent::expand(fs, inode, state, from, len)
}

/// Whether [`collapse_at_once`] and [`expand_at_once`] can take the map: it has one leaf.
pub(crate) fn shifts_at_once(fs: &FsInner, state: &InodeState) -> bool {
    has_extents(state) && depth(fs, state) == 0
}

/// Credits for one of them, without [`remove`].
pub(crate) fn credits_shift(fs: &FsInner) -> u32 {
    // The root, which may become a leaf of its own, and that leaf again.
    credits_insert(fs, 4)
}

/// As [`collapse`], under one handle, so that no crash leaves a part of it. The caller stores the
/// inode.
pub(crate) fn collapse_at_once(
    fs: &FsInner,
    h: &Handle,
    inode: &Inode,
    state: &mut InodeState,
    range: (u32, u32),
) -> Result<()> {
    state.changes.require_commit(h.tid(), CommitReason::ShiftedRange);
    extent::collapse_at_once(fs, h, inode, state, range)
}

/// As [`expand`], in the same way.
pub(crate) fn expand_at_once(
    fs: &FsInner,
    h: &Handle,
    inode: &Inode,
    state: &mut InodeState,
    range: (u32, u32),
) -> Result<()> {
    state.changes.require_commit(h.tid(), CommitReason::ShiftedRange);
    extent::expand_at_once(fs, h, inode, state, range)
}

/// Counts blocks in that the inode uses from now on.
fn charge(fs: &FsInner, state: &mut InodeState, blocks: u64) {
    let units = blocks.saturating_mul(u64::from(fs.geo.block_size / 512));
    state.disk.blocks_512 = state.disk.blocks_512.saturating_add(units);
}

/// Counts blocks out. An inode that counted too few on disk ends at zero.
fn discharge(fs: &FsInner, state: &mut InodeState, blocks: u64) {
    let units = blocks.saturating_mul(u64::from(fs.geo.block_size / 512));
    state.disk.blocks_512 = state.disk.blocks_512.saturating_sub(units);
}

/// Whether the file's own blocks go through the journal, so that freeing them must revoke
/// what the log has of them.
fn is_journaled(fs: &FsInner, state: &InodeState) -> bool {
    use fjord_format::inode::InodeFlags;
    !state.is_file()
        || journals_data(fs, state)
        || state.disk.flags.contains(InodeFlags::JOURNAL_DATA)
        || (state.disk.flags.contains(InodeFlags::EA_INODE) && !planted(Bug::ValueNotRevoked))
}

/// Frees a run of the file's blocks.
fn free_run(
    fs: &FsInner,
    h: &Handle,
    state: &mut InodeState,
    start: BlockNo,
    len: u32,
) -> Result<()> {
    fs.free_blocks(h, start, u64::from(len))?;
    if is_journaled(fs, state) {
        for offset in 0..u64::from(len) {
            let Some(block) = start.checked_add(offset) else { break };
            h.forget(block, fs.meta.peek(block).as_ref())?;
        }
    }
    discharge(fs, state, u64::from(len));
    Ok(())
}
