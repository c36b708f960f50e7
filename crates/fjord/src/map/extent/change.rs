//! Mapping blocks, and turning unwritten into written and back.
//!
//! Owns the merging of neighbours. Invariant: two extents of one leaf that could be one
//! are one, as far as a change touches them.

use fjord_format::extent::Extent;
use fjord_format::types::{BlockNo, LogicalBlock};
use fjord_journal::Handle;

use smallvec::SmallVec;

use super::edit::Editor;
use super::path::around;
use crate::error::Result;
use crate::fs::FsInner;
use crate::inode::{Inode, InodeState};
use crate::map::corrupt;

/// Merges neighbours that can be one extent.
pub(super) fn merged(extents: impl IntoIterator<Item = Extent>) -> SmallVec<[Extent; 4]> {
    let mut merged = SmallVec::<[Extent; 4]>::new();
    for extent in extents {
        match merged.last_mut() {
            Some(last) if last.can_merge(&extent) => last.len += extent.len,
            _ => merged.push(extent),
        }
    }
    merged
}

/// The part of an extent between two blocks of the file, if any.
pub(super) fn part(extent: &Extent, from: u64, to: u64) -> Option<Extent> {
    let start = from.max(u64::from(extent.logical.0));
    let end = to.min(extent.logical_end());
    if start >= end {
        return None;
    }
    // Both lie inside the extent.
    let offset = start - u64::from(extent.logical.0);
    Some(Extent {
        logical: LogicalBlock(start as u32),
        len: (end - start) as u32,
        start: BlockNo(extent.start.0 + offset),
        unwritten: extent.unwritten,
    })
}

/// An extent of any length in pieces that can be stored.
fn pieces(extent: Extent) -> impl Iterator<Item = Extent> {
    let end = extent.logical_end();
    let most = u64::from(Extent::len_max(extent.unwritten));
    (u64::from(extent.logical.0)..end)
        .step_by(most as usize)
        .filter_map(move |from| part(&extent, from, from + most))
}

/// See [`crate::map::insert`].
#[expect(clippy::too_many_arguments, reason = "a run of a map, all of it needed")]
pub(in crate::map) fn insert(
    fs: &FsInner,
    h: &Handle,
    inode: &Inode,
    state: &mut InodeState,
    lblk: u32,
    phys: BlockNo,
    len: u32,
    unwritten: bool,
) -> Result<()> {
    let whole = Extent { logical: LogicalBlock(lblk), len, start: phys, unwritten };
    let mut editor = Editor::new(fs, h, inode, state);
    pieces(whole).try_for_each(|extent| insert_one(&mut editor, extent))
}

fn insert_one(editor: &mut Editor<'_>, extent: Extent) -> Result<()> {
    let path = editor.walk(extent.logical.0)?;
    let (before, after) = around(editor.fs, editor.inode, editor.state, &path)?;
    let end = extent.logical_end();
    let taken = before.is_some_and(|b| b.logical_end() > u64::from(extent.logical.0))
        || after.is_some_and(|a| u64::from(a.logical.0) < end)
        || path.limit < end;
    if taken {
        let (first, len) = (extent.logical, extent.len);
        return Err(corrupt(
            editor.inode,
            format_args!("{len} blocks are to be mapped at {first}, where some are already"),
        ));
    }
    let before = before.filter(|before| before.can_merge(&extent));
    let after = after.filter(|after| extent.can_merge(after));
    let at = path.insert_place() - usize::from(before.is_some());
    let count = usize::from(before.is_some()) + usize::from(after.is_some());
    let new = merged([before, Some(extent), after].into_iter().flatten());
    editor.splice(&path, at, count, &new)
}

/// See [`crate::map::mark_written`] and [`crate::map::mark_unwritten`].
pub(in crate::map) fn mark(
    fs: &FsInner,
    h: &Handle,
    inode: &Inode,
    state: &mut InodeState,
    lblk: u32,
    len: u32,
    unwritten: bool,
) -> Result<()> {
    let mut editor = Editor::new(fs, h, inode, state);
    let end = u64::from(lblk) + u64::from(len);
    let mut at = u64::from(lblk);
    while at < end {
        // Below `end`, which is at most 2^32.
        let path = editor.walk(at as u32)?;
        let (found, after) = around(editor.fs, editor.inode, editor.state, &path)?;
        let Some(extent) = found.filter(|extent| extent.logical_end() > at) else {
            return Err(corrupt(inode, format_args!("block {at} should be mapped")));
        };
        if extent.unwritten != unwritten {
            mark_part(&mut editor, &path, (extent, after), at, end, unwritten)?;
        }
        at = extent.logical_end();
    }
    Ok(())
}

/// Changes the state of the part of an extent that lies in `from..to`.
fn mark_part(
    editor: &mut Editor<'_>,
    path: &super::path::Path,
    (extent, after): (Extent, Option<Extent>),
    from: u64,
    to: u64,
    unwritten: bool,
) -> Result<()> {
    let leaf = &path.levels[path.leaf()];
    let before = match leaf.at.checked_sub(1) {
        Some(place) => editor.read(leaf, |node| node.extent(place))?,
        None => None,
    };
    let head = part(&extent, 0, from);
    let tail = part(&extent, to, u64::MAX);
    let changed = part(&extent, from, to).map(|middle| Extent { unwritten, ..middle });
    let new = merged(
        before
            .into_iter()
            .chain(head)
            .chain(changed.into_iter().flat_map(pieces))
            .chain(tail)
            .chain(after),
    );
    let at = leaf.at - usize::from(before.is_some());
    let count = 1 + usize::from(before.is_some()) + usize::from(after.is_some());
    editor.splice(path, at, count, &new)
}
