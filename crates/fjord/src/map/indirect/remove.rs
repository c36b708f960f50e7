//! Taking blocks out of a block map, from the end on, in bounded steps.
//!
//! Owns the walk over the trees. Invariant: a block is freed after its pointer has gone,
//! in the same handle; a step that ends early leaves a valid map.

use fjord_format::blockmap::{DIRECT_POINTERS, TRIPLE_INDIRECT, pointers_per_block};
use fjord_format::types::BlockNo;
use fjord_journal::Handle;

use super::Node;
use super::insert::write;
use crate::error::Result;
use crate::fs::FsInner;
use crate::inode::{Inode, InodeState};
use crate::map::credits::{REMOVE_JOURNALED_BLOCKS, REMOVE_RUNS};
use crate::map::{Progress, discharge, free_run, is_journaled};

/// What one indirect block costs beside the data: itself, or bitmap and descriptor.
const NODE_RUNS: u32 = 2;

/// One step of a removal.
struct Step<'a> {
    fs: &'a FsInner,
    h: &'a Handle,
    inode: &'a Inode,
    state: &'a mut InodeState,
    /// First block of the file to go.
    from: u64,
    /// Behind the last one.
    to: u64,
    runs_left: u32,
    blocks_left: u32,
    /// The step had to stop early.
    stopped: bool,
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
    let blocks_left = if is_journaled(fs, state) { REMOVE_JOURNALED_BLOCKS } else { u32::MAX };
    let runs_left = REMOVE_RUNS;
    let mut step = Step { fs, h, inode, state, from, to, runs_left, blocks_left, stopped: false };
    let per_node = u64::from(pointers_per_block(&fs.geo));
    let direct = u64::from(DIRECT_POINTERS);
    // Levels of each tree and the first block of the file below it.
    let double = direct + per_node;
    let trees = [(3, double + per_node * per_node), (2, double), (1, direct)];
    for (levels, base) in trees {
        let place = TRIPLE_INDIRECT - 3 + levels;
        step.child(&Node::Inode, place, levels, base)?;
        if step.stopped {
            return Ok(Progress::More);
        }
    }
    step.data(&Node::Inode, 0, direct)?;
    Ok(if step.stopped { Progress::More } else { Progress::Done })
}

impl Step<'_> {
    /// Blocks of the file below a node with so many levels of pointers, its own included.
    fn span(&self, levels: u32) -> u64 {
        let per_node = u64::from(pointers_per_block(&self.fs.geo));
        (0..levels).fold(1, |span: u64, _| span.saturating_mul(per_node))
    }

    /// Removes the range from the tree that a pointer leads to, and the tree if nothing is
    /// left of it.
    fn child(&mut self, parent: &Node, place: u32, levels: u32, base: u64) -> Result<()> {
        if base >= self.to || base.saturating_add(self.span(levels)) <= self.from {
            return Ok(());
        }
        let Some(block) = parent.pointer(self.fs, self.inode, self.state, place)? else {
            return Ok(());
        };
        if self.runs_left < 2 * NODE_RUNS {
            self.stopped = true;
            return Ok(());
        }
        self.runs_left -= NODE_RUNS;
        let node = Node::read(self.fs, self.inode, block)?;
        if levels == 1 {
            self.data(&node, base, self.span(1))?;
        } else {
            self.children(&node, levels, base)?;
        }
        if !self.stopped && self.is_empty(&node)? {
            write(self.h, self.inode, self.state, parent, place, [None])?;
            self.fs.forget_metadata(self.h, block)?;
            discharge(self.fs, self.state, 1);
        }
        Ok(())
    }

    fn children(&mut self, node: &Node, levels: u32, base: u64) -> Result<()> {
        let span = self.span(levels - 1);
        let places = self.places(base, span, u64::from(pointers_per_block(&self.fs.geo)));
        for place in places.rev() {
            self.child(node, place, levels - 1, base + u64::from(place) * span)?;
            if self.stopped {
                break;
            }
        }
        Ok(())
    }

    /// Places of a node's pointers, each of which covers `span` blocks, that touch the range.
    fn places(&self, base: u64, span: u64, count: u64) -> std::ops::Range<u32> {
        let first = self.from.saturating_sub(base) / span;
        let end = self.to.saturating_sub(base).div_ceil(span).min(count);
        // A node has at most 2^14 pointers.
        first.min(end) as u32..end as u32
    }

    fn is_empty(&self, node: &Node) -> Result<bool> {
        let mut empty = true;
        let places = 0..pointers_per_block(&self.fs.geo);
        node.pointers(self.fs, self.inode, self.state, places, |_, pointer| {
            empty = pointer.is_none();
            empty
        })?;
        Ok(empty)
    }

    /// Frees the data that the first `count` pointers of a node lead to, as far as it lies
    /// in the range.
    fn data(&mut self, node: &Node, base: u64, count: u64) -> Result<()> {
        let places = self.places(base, 1, count);
        let (mut runs_left, mut blocks_left) = (self.runs_left, self.blocks_left);
        let mut runs: Vec<(BlockNo, u32)> = Vec::new();
        let mut lowest = places.end;
        let mut stopped = false;
        let fs = self.fs;
        node.pointers(fs, self.inode, self.state, places.rev(), |place, pointer| {
            if let Some(block) = pointer {
                let joins = runs.last().is_some_and(|(start, _)| {
                    block.0.checked_add(1) == Some(start.0)
                        && fs.geo.group_of_block(block) == fs.geo.group_of_block(*start)
                });
                if (!joins && runs_left == 0) || blocks_left == 0 {
                    stopped = true;
                    return false;
                }
                blocks_left -= 1;
                match runs.last_mut() {
                    Some(last) if joins => *last = (block, last.1 + 1),
                    _ => {
                        runs_left -= 1;
                        runs.push((block, 1));
                    }
                }
            }
            lowest = place;
            true
        })?;
        let end = self.places(base, 1, count).end;
        if !runs.is_empty() {
            let holes = std::iter::repeat_n(None, end.saturating_sub(lowest) as usize);
            write(self.h, self.inode, self.state, node, lowest, holes)?;
        }
        for (start, len) in runs {
            free_run(fs, self.h, self.state, start, len)?;
        }
        (self.runs_left, self.blocks_left) = (runs_left, blocks_left);
        self.stopped |= stopped;
        Ok(())
    }
}
