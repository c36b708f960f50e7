//! Directories without an index: blocks of entries, searched from the first to the last.
//!
//! Invariants: holes are skipped, as in Linux; an entry goes to the first block with space for it.

use std::sync::Arc;

use fjord_format::dirent::{self, Inserted};
use fjord_format::{BlockNo, LogicalBlock};
use fjord_journal::{Buffer, Handle};

use super::block::{self, Damage, Located};
use super::{Dir, Found, NewEntry, Place, early_room_bytes, htree};
use crate::error::Result;
use crate::inode::InodeState;

/// Calls `visit` with each block's number and entries until it answers.
fn each_block<T>(
    dir: &Dir<'_>,
    state: &InodeState,
    mut visit: impl FnMut(LogicalBlock, &[u8]) -> Result<Option<T>>,
) -> Result<Option<T>> {
    let blocks = block::count(dir, state)?;
    let mut lblk = 0;
    while lblk < blocks {
        match block::locate(dir, state, LogicalBlock(lblk))? {
            Located::Hole(len) => lblk = lblk.saturating_add(len),
            Located::At(at) => {
                let here = LogicalBlock(lblk);
                let buffer = block::read_leaf_at(dir, here, at)?;
                let bytes = buffer.read();
                let area = dir.format().entries_area(&bytes).map_err(dir.damaged(here))?;
                if let Some(answer) = visit(here, area)? {
                    return Ok(Some(answer));
                }
                lblk += 1;
            }
        }
    }
    Ok(None)
}

/// See [`super::find`]. The name may be in a sound block though another is damaged.
pub(super) fn find(dir: &Dir<'_>, state: &InodeState, name: &[u8]) -> Result<Option<Found>> {
    find_from(dir, state, name, 0, |lblk, at| block::read_leaf_at(dir, lblk, at).map(Some))
}

/// As [`find`], in a directory whose index is damaged: in all blocks but the first, the root of the index.
pub(super) fn find_without_index(
    dir: &Dir<'_>,
    state: &InodeState,
    name: &[u8],
) -> Result<Option<Found>> {
    find_from(dir, state, name, 1, |lblk, at| block::read_leaf_or_node(dir, state, lblk, at))
}

/// Looks into the blocks from `first` on that `read` gives.
fn find_from(
    dir: &Dir<'_>,
    state: &InodeState,
    name: &[u8],
    first: u32,
    read: impl Fn(LogicalBlock, BlockNo) -> Result<Option<Arc<Buffer>>>,
) -> Result<Option<Found>> {
    let (blocks, mut damage, mut lblk) = (block::count(dir, state)?, Damage::default(), first);
    while lblk < blocks && !damage.is_too_much() {
        let here = LogicalBlock(lblk);
        let at = match damage.pass_map(block::locate(dir, state, here))? {
            Some(Located::Hole(len)) => {
                lblk = lblk.saturating_add(len);
                continue;
            }
            Some(Located::At(at)) => Some(at),
            None => None,
        };
        let buffer = at.map(|at| damage.pass(read(here, at))).transpose()?.flatten().flatten();
        let found = buffer.map(|buffer| {
            let bytes = buffer.read();
            let area = dir.format().entries_area(&bytes).map_err(dir.damaged(here))?;
            let entry = dirent::find(area, dir.format(), name).map_err(dir.damaged(here))?;
            Ok(entry.and_then(|entry| {
                let place = Place::Block { lblk: here, offset: entry.offset };
                Some(Found { ino: entry.inode?, file_type: entry.file_type, place })
            }))
        });
        if let Some(found) = damage.pass(found.transpose())?.flatten().flatten() {
            return Ok(Some(found));
        }
        lblk += 1;
    }
    damage.into_result().map(|()| None)
}

/// See [`super::is_empty`].
pub(super) fn is_empty(dir: &Dir<'_>, state: &InodeState) -> Result<bool> {
    let used = each_block(dir, state, |lblk, area| {
        let empty = dirent::is_empty(area, dir.format()).map_err(dir.damaged(lblk))?;
        Ok((!empty).then_some(()))
    })?;
    Ok(used.is_none())
}

/// See [`super::insert`].
pub(super) fn insert(
    dir: &Dir<'_>,
    h: &Handle,
    state: &mut InodeState,
    new: &NewEntry<'_>,
) -> Result<()> {
    let format = dir.format();
    let place = each_block(dir, state, |lblk, area| {
        let room = dirent::has_room(area, format, new.name.len()).map_err(dir.damaged(lblk))?;
        Ok(room.then_some(lblk))
    })?;
    if let Some(lblk) = place {
        return block::edit(dir, h, state, lblk, |area| {
            match dirent::insert(area, format, new.name, new.ino, new.file_type)? {
                Inserted::At(_) => Ok(()),
                // The caller has looked for the name, and holds the lock.
                Inserted::Exists(_) | Inserted::NoRoom => Err(lost_room()),
            }
        });
    }
    if block::count(dir, state)? == 1 && dir.params.dir_index {
        htree::convert(dir, h, state)?;
        return htree::insert(dir, h, state, new);
    }
    block::append(dir, h, state, |bytes| {
        dirent::init_block(bytes, format)?;
        let area = format.entries_area_mut(bytes)?;
        dirent::insert(area, format, new.name, new.ino, new.file_type)?;
        dirent::set_checksum(bytes, format, dir.seed)
    })?;
    Ok(())
}

/// Bytes of the largest entry that still fits the last block; none if that is a hole.
pub(super) fn last_room_bytes(dir: &Dir<'_>, state: &InodeState) -> Result<usize> {
    let last = LogicalBlock(block::count(dir, state)?.saturating_sub(1));
    match block::locate(dir, state, last)? {
        Located::Hole(_) => Ok(0),
        Located::At(_) => block::room_bytes(dir, state, last),
    }
}

/// Adds a block, or an index, if there is little space left in the last one. If so, returns the
/// bytes that were left there.
pub(super) fn grow_early(
    dir: &Dir<'_>,
    h: &Handle,
    state: &mut InodeState,
) -> Result<Option<usize>> {
    let room_bytes = last_room_bytes(dir, state)?;
    // All names go to the one block there is, so it fills faster than those of an index.
    let is_only = block::count(dir, state)? == 1;
    let early_bytes = early_room_bytes(dir) * if is_only { 2 } else { 1 };
    if room_bytes >= early_bytes {
        return Ok(None);
    }
    if is_only && dir.params.dir_index {
        htree::convert(dir, h, state)?;
        htree::split_first(dir, h, state)?;
    } else {
        block::append(dir, h, state, |bytes| {
            dirent::init_block(bytes, dir.format())?;
            dirent::set_checksum(bytes, dir.format(), dir.seed)
        })?;
    }
    Ok(Some(room_bytes))
}

/// The directory is locked, so the space is still there; only a damaged image, with a block in two
/// inodes, can change it.
fn lost_room() -> fjord_format::FormatError {
    fjord_format::FormatError::corrupt("directory block", "it changed while it was locked")
}
