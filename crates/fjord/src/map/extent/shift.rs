//! Moving extents along the file: COLLAPSE_RANGE and INSERT_RANGE.
//!
//! Owns the order of the moves, leaf by leaf, one handle each; all under one where there is one leaf.
//! Invariant: no extent ever passes another, so the tree is in order after each handle; a crash in
//! between leaves a consistent file of which a part has moved, as in ext4.

use std::sync::Arc;

use fjord_format::extent::Extent;
use fjord_format::types::LogicalBlock;
use fjord_journal::Handle;
use rustix::io::Errno;

use super::change::{merged, part};
use super::edit::Editor;
use super::path::around;
use crate::error::Result;
use crate::fs::FsInner;
use crate::inode::changes::CommitReason;
use crate::inode::{Inode, InodeState, disk};
use crate::map::{LOGICAL_END, corrupt, credits_insert};

/// Runs `change` under a handle and stores the inode.
fn with_handle<T>(
    fs: &Arc<FsInner>,
    inode: &Inode,
    state: &mut InodeState,
    change: impl FnOnce(&mut Editor<'_>) -> Result<T>,
) -> Result<T> {
    let handle: Handle = fs.start(credits_insert(fs, 2) + disk::STORE_CREDITS)?;
    let result = change(&mut Editor::new(fs, &handle, inode, state))?;
    inode.touch_tid(handle.changes(), true);
    state.changes.require_commit(handle.tid(), CommitReason::ShiftedRange);
    disk::store(fs, &handle, inode, state)?;
    handle.stop();
    Ok(result)
}

/// See [`crate::map::collapse`].
pub(in crate::map) fn collapse(
    fs: &Arc<FsInner>,
    inode: &Inode,
    state: &mut InodeState,
    from: u32,
    len: u32,
) -> Result<()> {
    let mut at = u64::from(from) + u64::from(len);
    while at < LOGICAL_END {
        at = with_handle(fs, inode, state, |editor| collapse_leaf(editor, at, len))?;
    }
    with_handle(fs, inode, state, |editor| editor.shrink())
}

/// Moves the extents from `at` on that lie in one leaf; returns where to go on.
fn collapse_leaf(editor: &mut Editor<'_>, at: u64, len: u32) -> Result<u64> {
    // The caller's loop ends before 2^32.
    let path = editor.walk(at as u32)?;
    let leaf = &path.levels[path.leaf()];
    let all: Vec<Extent> = editor.read(leaf, |node| node.extents().collect())?;
    let first = all.partition_point(|extent| u64::from(extent.logical.0) < at);
    let Some(moving) = all.get(first..).filter(|moving| !moving.is_empty()) else {
        return Ok(path.limit);
    };
    let before = first.checked_sub(1).and_then(|place| all.get(place)).copied();
    let floor = before.map_or(0, |before| before.logical_end());
    let mut moved = Vec::with_capacity(moving.len());
    for extent in moving {
        let logical = extent.logical.0.checked_sub(len).filter(|&l| u64::from(l) >= floor);
        let logical = logical.ok_or_else(|| {
            corrupt(editor.inode, format_args!("no room to move block {} down", extent.logical))
        })?;
        moved.push(Extent { logical: LogicalBlock(logical), ..*extent });
    }
    let next = moving.last().map_or(path.limit, |last| last.logical_end());
    if next <= at {
        return Err(corrupt(editor.inode, format_args!("a leaf is out of order at block {at}")));
    }
    let new = merged(before.into_iter().chain(moved));
    let place = first - usize::from(before.is_some());
    editor.splice(&path, place, all.len() - place, &new)?;
    Ok(next)
}

/// See [`crate::map::expand`].
pub(in crate::map) fn expand(
    fs: &Arc<FsInner>,
    inode: &Inode,
    state: &mut InodeState,
    from: u32,
    len: u32,
) -> Result<()> {
    with_handle(fs, inode, state, |editor| make_way(editor, from, len))?;
    let mut bound = LOGICAL_END;
    while bound > u64::from(from) {
        bound = with_handle(fs, inode, state, |editor| expand_leaf(editor, from, len, bound))?;
    }
    Ok(())
}

/// As [`collapse`], all under `h`.
pub(in crate::map) fn collapse_at_once(
    fs: &FsInner,
    h: &Handle,
    inode: &Inode,
    state: &mut InodeState,
    (from, len): (u32, u32),
) -> Result<()> {
    let mut editor = Editor::new(fs, h, inode, state);
    let mut at = u64::from(from) + u64::from(len);
    while at < LOGICAL_END {
        at = collapse_leaf(&mut editor, at, len)?;
    }
    editor.shrink()
}

/// As [`expand`], all under `h`.
pub(in crate::map) fn expand_at_once(
    fs: &FsInner,
    h: &Handle,
    inode: &Inode,
    state: &mut InodeState,
    (from, len): (u32, u32),
) -> Result<()> {
    let mut editor = Editor::new(fs, h, inode, state);
    make_way(&mut editor, from, len)?;
    let mut bound = LOGICAL_END;
    while bound > u64::from(from) {
        bound = expand_leaf(&mut editor, from, len, bound)?;
    }
    Ok(())
}

/// Makes an extent begin at `from`, if all from there on can move up by `len`.
fn make_way(editor: &mut Editor<'_>, from: u32, len: u32) -> Result<()> {
    let path = editor.walk(u32::MAX)?;
    let (last, _) = around(editor.fs, editor.inode, editor.state, &path)?;
    let end = last.map_or(0, |last| last.logical_end());
    if end > u64::from(from) && end + u64::from(len) > LOGICAL_END - 1 {
        return Err(Errno::FBIG.into());
    }
    cut_at(editor, from)
}

/// Makes an extent begin at `lblk` if one goes across it.
fn cut_at(editor: &mut Editor<'_>, lblk: u32) -> Result<()> {
    let path = editor.walk(lblk)?;
    let (Some(extent), _) = around(editor.fs, editor.inode, editor.state, &path)? else {
        return Ok(());
    };
    let middle = u64::from(lblk);
    match (part(&extent, 0, middle), part(&extent, middle, u64::MAX)) {
        (Some(head), Some(tail)) => {
            let at = path.levels[path.leaf()].at;
            editor.splice(&path, at, 1, &[head, tail])
        }
        _ => Ok(()),
    }
}

/// Moves the extents of one leaf that begin in `from..bound`; returns the first block that
/// has been moved, or `from` when nothing is left.
fn expand_leaf(editor: &mut Editor<'_>, from: u32, len: u32, bound: u64) -> Result<u64> {
    // The caller's loop keeps it above `from`.
    let path = editor.walk((bound - 1) as u32)?;
    if !path.has_entry {
        return Ok(u64::from(from));
    }
    let leaf = &path.levels[path.leaf()];
    let all: Vec<Extent> = editor.read(leaf, |node| node.extents().take(leaf.at + 1).collect())?;
    let first = all.partition_point(|extent| extent.logical.0 < from);
    let Some(moving) = all.get(first..).filter(|moving| !moving.is_empty()) else {
        return Ok(u64::from(from));
    };
    let mut moved = Vec::with_capacity(moving.len());
    for extent in moving {
        let logical = extent.logical.checked_add(len).ok_or(Errno::FBIG)?;
        moved.push(Extent { logical, ..*extent });
    }
    let lowest = moving.first().map_or(u64::from(from), |e| u64::from(e.logical.0));
    if lowest >= bound {
        return Err(corrupt(editor.inode, format_args!("a leaf is out of order at block {bound}")));
    }
    editor.splice(&path, first, moving.len(), &moved)?;
    Ok(lowest)
}
