//! Unmapping and freeing a range, from its end on, in bounded steps.
//!
//! Owns the budget of one step. Invariant: the tree and the bitmaps agree after every
//! step, so that a crash between two of them loses nothing but time.

use fjord_format::extent::Extent;
use fjord_journal::Handle;

use super::change::part;
use super::edit::Editor;
use super::path::Path;
use crate::error::Result;
use crate::fs::FsInner;
use crate::inode::{Inode, InodeState};
use crate::map::credits::{REMOVE_JOURNALED_BLOCKS, REMOVE_RUNS};
use crate::map::{LOGICAL_END, Progress, free_run, is_journaled};

/// What one step may still do.
struct Budget {
    /// Runs of one group each.
    runs: u32,
    /// Blocks that may need a revoke record; `None` if none does.
    journaled: Option<u32>,
}

impl Budget {
    /// A leaf and the nodes above it that may go with it cost as much as so many runs.
    const LEAF_RUNS: u32 = 4;

    fn is_spent(&self) -> bool {
        self.runs < Self::LEAF_RUNS + 1 || self.journaled == Some(0)
    }

    /// The last part of an extent that the budget allows, which is then taken out of it.
    fn take(&mut self, fs: &FsInner, extent: &Extent) -> Option<Extent> {
        let mut from = extent.logical_end();
        let first = u64::from(extent.logical.0);
        while from > first && self.runs > 0 && self.journaled != Some(0) {
            // The last block before `from`, and how many before it share its group.
            let offset = from - 1 - first;
            let block = fjord_format::types::BlockNo(extent.start.0 + offset);
            let per_group = u64::from(fs.geo.blocks_per_group);
            let in_group = per_group - fs.blocks_to_group_end(block) + 1;
            let mut len = in_group.min(from - first);
            if let Some(left) = &mut self.journaled {
                len = len.min(u64::from(*left));
                *left -= len as u32;
            }
            self.runs -= 1;
            from -= len;
        }
        part(extent, from, u64::MAX)
    }
}

/// What to do to one leaf.
struct Cut {
    /// Extents `at..at + count` are replaced by `kept`.
    at: usize,
    count: usize,
    kept: Vec<Extent>,
    freed: Vec<Extent>,
}

/// See [`crate::map::remove`].
pub(in crate::map) fn remove(
    fs: &FsInner,
    h: &Handle,
    inode: &Inode,
    state: &mut InodeState,
    from: u64,
    to: u64,
) -> Result<Progress> {
    let journaled = is_journaled(fs, state).then_some(REMOVE_JOURNALED_BLOCKS);
    let mut budget = Budget { runs: REMOVE_RUNS, journaled };
    let mut editor = Editor::new(fs, h, inode, state);
    let mut to = to.min(LOGICAL_END);
    let mut progress = Progress::Done;
    while from < to {
        if budget.is_spent() {
            progress = Progress::More;
            break;
        }
        // Above `from`, so at least 1, and at most 2^32.
        let path = editor.walk((to - 1) as u32)?;
        let Some(cut) = plan(&editor, &path, from, to, &mut budget)? else { break };
        let Some(lowest) = cut.freed.last().map(|extent| u64::from(extent.logical.0)) else {
            progress = Progress::More;
            break;
        };
        editor.splice(&path, cut.at, cut.count, &cut.kept)?;
        for extent in &cut.freed {
            free_run(fs, h, editor.state, extent.start, extent.len)?;
        }
        to = lowest;
    }
    editor.shrink()?;
    Ok(progress)
}

/// Works out what to take from a leaf; `None` if nothing is left in the range.
fn plan(
    editor: &Editor<'_>,
    path: &Path,
    from: u64,
    to: u64,
    budget: &mut Budget,
) -> Result<Option<Cut>> {
    let leaf = &path.levels[path.leaf()];
    if !path.has_entry {
        return Ok(None);
    }
    let extents: Vec<Extent> =
        editor.read(leaf, |node| node.extents().take(leaf.at + 1).collect())?;
    if extents.last().is_none_or(|last| last.logical_end() <= from) {
        return Ok(None);
    }
    budget.runs = budget.runs.saturating_sub(Budget::LEAF_RUNS);
    let mut cut = Cut { at: extents.len(), count: 0, kept: Vec::new(), freed: Vec::new() };
    for extent in extents.iter().rev() {
        let Some(inside) = part(extent, from, to) else { break };
        let Some(taken) = budget.take(editor.fs, &inside) else { break };
        cut.at -= 1;
        cut.count += 1;
        let head = part(extent, 0, u64::from(taken.logical.0));
        cut.kept.extend(part(extent, to, u64::MAX));
        cut.kept.extend(head);
        cut.freed.push(taken);
        if head.is_some() {
            break;
        }
    }
    // Gathered from the end.
    cut.kept.reverse();
    Ok(Some(cut))
}
