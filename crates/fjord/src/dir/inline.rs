//! Directories in the inode (feature `inline_data`).
//!
//! Invariants: `.` and `..` are not stored, the parent's number is; entries lie in two areas, the
//! rest of `i_block` and the value of the attribute `system.data`, and none spans both; `size` is
//! 60 plus the length of that value. When first needed, the second area takes all free space of the
//! inode; when that is full, the directory moves to a block.

use fjord_format::dirent::{self, DirEntry, FileType, Inserted};
use fjord_format::inline_data::{self, InlineData, InlineDir};
use fjord_format::inode::{I_BLOCK_BYTES, InodeFlags};
use fjord_format::{FormatError, InodeNo, LogicalBlock};
use fjord_journal::Handle;
use rustix::io::Errno;

use super::{Dir, Found, NewEntry, Place, block};
use crate::error::Result;
use crate::inode::InodeState;
use crate::{map, xattr};

/// Shortest second area: one record with the shortest name.
const TAIL_BYTES_MIN: usize = 12;
/// Where the entries begin in the offset order of a listing: after `.` and `..`.
const DOTS_BYTES: u64 = 24;

/// What [`xattr`] holds of the directory.
fn read_tail(dir: &Dir<'_>, state: &InodeState) -> Result<Vec<u8>> {
    xattr::inline_tail(dir.fs, dir.inode, state)
}

fn parse<'a>(dir: &Dir<'_>, state: &'a InodeState, tail: &'a [u8]) -> Result<InlineDir<'a>> {
    InlineDir::parse(InlineData { head: &state.disk.i_block, tail }, dir.format())
        .map_err(|error| dir.corrupt(error))
}

/// Calls `visit` for the used entries of both areas until it answers.
fn each_entry<T>(
    dir: &Dir<'_>,
    parsed: &InlineDir<'_>,
    mut visit: impl FnMut(bool, &DirEntry<'_>) -> Option<T>,
) -> Result<Option<T>> {
    for (in_xattr, part) in [(false, parsed.head), (true, parsed.tail)] {
        for entry in dirent::entries(part, dir.format()) {
            let entry = entry.map_err(|error| dir.corrupt(error))?;
            if let Some(answer) = visit(in_xattr, &entry) {
                return Ok(Some(answer));
            }
        }
    }
    Ok(None)
}

/// See [`super::find`].
pub(super) fn find(dir: &Dir<'_>, state: &InodeState, name: &[u8]) -> Result<Option<Found>> {
    let tail = read_tail(dir, state)?;
    let parsed = parse(dir, state, &tail)?;
    each_entry(dir, &parsed, |in_xattr, entry| {
        let ino = entry.inode.filter(|_| entry.name == name)?;
        let place = Place::Inline { in_xattr, offset: entry.offset };
        Some(Found { ino, file_type: entry.file_type, place })
    })
}

/// The entry that `..` would be.
pub(super) fn parent(dir: &Dir<'_>, state: &InodeState) -> Result<Found> {
    let ino = parse(dir, state, &[])?.parent;
    let place = Place::Inline { in_xattr: false, offset: 0 };
    Ok(Found { ino, file_type: FileType::Directory, place })
}

/// See [`super::set_parent`].
pub(super) fn set_parent(dir: &Dir<'_>, state: &mut InodeState, parent: InodeNo) -> Result<()> {
    inline_data::set_dir_parent(&mut state.disk.i_block, dir.format(), parent)
        .map_err(|error| dir.corrupt(error))
}

/// See [`super::is_empty`].
pub(super) fn is_empty(dir: &Dir<'_>, state: &InodeState) -> Result<bool> {
    let tail = read_tail(dir, state)?;
    let parsed = parse(dir, state, &tail)?;
    Ok(each_entry(dir, &parsed, |_, _| Some(()))?.is_none())
}

/// Calls `visit` for all entries up to the first that is damaged, `.` and `..` first, with the offsets that they
/// would have in a block, and those after them.
pub(super) fn each(
    dir: &Dir<'_>,
    state: &InodeState,
    mut visit: impl FnMut(InodeNo, FileType, &[u8], u64, u64),
) -> Result<()> {
    let tail = read_tail(dir, state)?;
    let parsed = parse(dir, state, &tail)?;
    visit(dir.inode.ino, FileType::Directory, b".", 0, 12);
    visit(parsed.parent, FileType::Directory, b"..", 12, DOTS_BYTES);
    let head_bytes = parsed.head.len() as u64;
    each_entry(dir, &parsed, |in_xattr, entry| {
        let start = if in_xattr { DOTS_BYTES + head_bytes } else { DOTS_BYTES };
        let position = start + entry.offset as u64;
        let behind = position + entry.rec_len as u64;
        if let Some(ino) = entry.inode {
            visit(ino, entry.file_type, entry.name, position, behind);
        }
        None::<()>
    })
    .map(drop)
}

/// Makes `state` an empty inline directory. `false` when its inode has no room for that.
pub(super) fn init(
    dir: &Dir<'_>,
    h: &Handle,
    state: &mut InodeState,
    parent: InodeNo,
) -> Result<bool> {
    if xattr::inline_capacity(dir.fs, dir.inode, state)? < I_BLOCK_BYTES {
        return Ok(false);
    }
    xattr::set_inline_tail(dir.fs, h, dir.inode, state, Some(&[]))?;
    inline_data::init_dir(&mut state.disk.i_block, dir.format(), parent)?;
    state.disk.flags.remove(InodeFlags::EXTENTS);
    state.disk.flags.insert(InodeFlags::INLINE_DATA);
    state.size = I_BLOCK_BYTES as u64;
    state.disk.size = state.size;
    Ok(true)
}

/// Adds the entry if there is space. `false` if the directory had to move to a block and the entry
/// must still be added there.
pub(super) fn insert(
    dir: &Dir<'_>,
    h: &Handle,
    state: &mut InodeState,
    new: &NewEntry<'_>,
) -> Result<bool> {
    let format = dir.format();
    let add = |area: &mut [u8]| -> Result<bool> {
        match dirent::insert(area, format, new.name, new.ino, new.file_type)
            .map_err(|error| dir.corrupt(error))?
        {
            Inserted::At(_) => Ok(true),
            Inserted::Exists(_) => Err(Errno::EXIST.into()),
            Inserted::NoRoom => Ok(false),
        }
    };
    if add(inline_data::dir_head_mut(&mut state.disk.i_block))? {
        return Ok(true);
    }
    let mut tail = read_tail(dir, state)?;
    if tail.is_empty() {
        let capacity = xattr::inline_capacity(dir.fs, dir.inode, state)?;
        let room = capacity.saturating_sub(I_BLOCK_BYTES);
        if room >= TAIL_BYTES_MIN {
            tail = vec![0; room];
            dirent::init_area(&mut tail, format)?;
        }
    }
    if !tail.is_empty() && add(&mut tail)? {
        xattr::set_inline_tail(dir.fs, h, dir.inode, state, Some(&tail))?;
        state.size = (I_BLOCK_BYTES + tail.len()) as u64;
        state.disk.size = state.size;
        return Ok(true);
    }
    convert(dir, h, state)?;
    Ok(false)
}

/// Edits the area that `place` lies in.
pub(super) fn edit(
    dir: &Dir<'_>,
    h: &Handle,
    state: &mut InodeState,
    place: Place,
    change: impl FnOnce(&mut [u8], usize) -> Result<(), FormatError>,
) -> Result<()> {
    let Place::Inline { in_xattr, offset } = place else {
        return Err(dir.corrupt("an entry of a block in an inline directory"));
    };
    if !in_xattr {
        let area = inline_data::dir_head_mut(&mut state.disk.i_block);
        return change(area, offset).map_err(|error| dir.corrupt(error));
    }
    let mut tail = read_tail(dir, state)?;
    change(&mut tail, offset).map_err(|error| dir.corrupt(error))?;
    xattr::set_inline_tail(dir.fs, h, dir.inode, state, Some(&tail))
}

/// Moves the entries to a block. On `ENOSPC` the directory is unchanged.
fn convert(dir: &Dir<'_>, h: &Handle, state: &mut InodeState) -> Result<()> {
    let format = dir.format();
    let mut bytes = vec![0; format.block_bytes];
    {
        let tail = read_tail(dir, state)?;
        let parsed = parse(dir, state, &tail)?;
        parsed
            .to_block(&mut bytes, format, dir.inode.ino)
            .and_then(|()| dirent::set_checksum(&mut bytes, format, dir.seed))
            .map_err(|error| dir.corrupt(error))?;
    }
    let before = (state.disk.clone(), state.size);
    state.disk.flags.remove(InodeFlags::INLINE_DATA);
    map::init(dir.fs, state);
    state.size = 0;
    state.disk.size = 0;
    let appended = block::append(dir, h, state, |block| {
        block.copy_from_slice(&bytes);
        Ok(())
    });
    match appended {
        Ok(LogicalBlock(0)) => xattr::set_inline_tail(dir.fs, h, dir.inode, state, None),
        Ok(other) => Err(dir.corrupt(format_args!("its first block became block {other}"))),
        Err(error) => {
            (state.disk, state.size) = before;
            Err(error)
        }
    }
}
