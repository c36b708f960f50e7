//! Changing nodes of an extent tree.
//!
//! Owns [`Editor`], the one place through which nodes change. Invariants: blocks for new
//! nodes are allocated before the first node changes, so that `ENOSPC` changes nothing;
//! each node is sealed with its checksum before its guard drops; keys above follow.

use fjord_format::extent::{
    self, EXTENT_DEPTH_MAX, Extent, ExtentIndex, ExtentNode, ExtentNodeMut, NodeKind,
};
use fjord_format::types::{BlockNo, LogicalBlock};
use fjord_journal::Handle;
use rustix::io::Errno;

use smallvec::SmallVec;

use super::path::{Level, Path, node_error, seed, walk, with_node};
use crate::alloc::{Claim, Goal};
use crate::error::Result;
use crate::fs::FsInner;
use crate::inode::{Inode, InodeState};
use crate::map::{charge, corrupt, discharge};

/// An entry of a node of either kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Entry {
    Extent(Extent),
    Index(ExtentIndex),
}

impl Entry {
    fn logical(&self) -> LogicalBlock {
        match self {
            Entry::Extent(extent) => extent.logical,
            Entry::Index(index) => index.logical,
        }
    }

    fn put(&self, node: &mut ExtentNodeMut<'_>, at: usize) -> fjord_format::Result<()> {
        match self {
            Entry::Extent(extent) => node.insert_extent(at, *extent),
            Entry::Index(index) => node.insert_index(at, *index),
        }
    }
}

fn entries(node: &ExtentNode<'_>) -> Vec<Entry> {
    if node.is_leaf() {
        node.extents().map(Entry::Extent).collect()
    } else {
        node.indices().map(Entry::Index).collect()
    }
}

fn put_all(node: &mut ExtentNodeMut<'_>, entries: &[Entry]) -> fjord_format::Result<()> {
    entries.iter().enumerate().try_for_each(|(at, entry)| entry.put(node, at))
}

/// A change of one inode's tree under one handle.
pub(super) struct Editor<'a> {
    pub(super) fs: &'a FsInner,
    pub(super) h: &'a Handle,
    pub(super) inode: &'a Inode,
    pub(super) state: &'a mut InodeState,
    /// Blocks allocated for nodes to come.
    spare: Vec<BlockNo>,
}

impl<'a> Editor<'a> {
    pub(super) fn new(
        fs: &'a FsInner,
        h: &'a Handle,
        inode: &'a Inode,
        state: &'a mut InodeState,
    ) -> Self {
        Self { fs, h, inode, state, spare: Vec::new() }
    }

    /// The way to the leaf of a block.
    pub(super) fn walk(&self, lblk: u32) -> Result<Path> {
        walk(self.fs, self.inode, self.state, lblk)
    }

    /// Reads a node.
    pub(super) fn read<T>(
        &self,
        level: &Level,
        read: impl FnOnce(&ExtentNode<'_>) -> T,
    ) -> Result<T> {
        with_node(self.fs, self.inode, self.state, level, read)
    }

    /// Changes a node. Every change of a node that exists goes through here.
    fn change(
        &mut self,
        level: &Level,
        change: impl FnOnce(&mut ExtentNodeMut<'_>) -> fjord_format::Result<()>,
    ) -> Result<()> {
        let (geo, inode) = (&self.fs.geo, self.inode);
        let named = |error| node_error(inode, level.buffer.as_ref().map(|b| b.block()), error);
        let Some(buffer) = &level.buffer else {
            let root = &mut self.state.disk.i_block;
            let mut node = ExtentNodeMut::parse(root, NodeKind::Root, None, geo).map_err(named)?;
            return change(&mut node).map_err(named);
        };
        let seed = seed(self.fs, inode, self.state);
        self.state.changes.extent_block_changed(self.h.tid(), buffer.block());
        let mut content = self.h.get_write(buffer)?;
        let mut node = ExtentNodeMut::parse(&mut content, NodeKind::Block, Some(level.depth), geo)
            .map_err(named)?;
        change(&mut node).map_err(named)?;
        extent::update_checksum(&mut content, seed, geo).map_err(named)
    }

    /// Makes a node of `entries` in a spare block.
    fn create(&mut self, depth: u16, entries: &[Entry]) -> Result<BlockNo> {
        let missing = || corrupt(self.inode, "a node needs a block that was not allocated");
        let block = self.spare.pop().ok_or_else(missing)?;
        let geo = &self.fs.geo;
        let named = |error| node_error(self.inode, Some(block), error);
        let buffer = self.fs.meta.create(block);
        let mut content = self.h.get_create(&buffer)?;
        let mut node =
            ExtentNodeMut::init(&mut content, NodeKind::Block, depth, geo).map_err(named)?;
        put_all(&mut node, entries).map_err(named)?;
        let seed = seed(self.fs, self.inode, self.state);
        extent::update_checksum(&mut content, seed, geo).map_err(named)?;
        drop(content);
        self.state.changes.extent_block_changed(self.h.tid(), block);
        charge(self.fs, self.state, 1);
        Ok(block)
    }

    /// Makes the root a node of this depth with these entries.
    fn set_root(&mut self, depth: u16, entries: &[Entry]) -> Result<()> {
        let root = &mut self.state.disk.i_block;
        let named = |error| node_error(self.inode, None, error);
        let mut node =
            ExtentNodeMut::init(root, NodeKind::Root, depth, &self.fs.geo).map_err(named)?;
        put_all(&mut node, entries).map_err(named)
    }

    /// Replaces `count` extents of the leaf from place `at` on by `new`. On `ENOSPC`
    /// nothing has changed. The path is out of date afterwards.
    pub(super) fn splice(
        &mut self,
        path: &Path,
        at: usize,
        count: usize,
        new: &[Extent],
    ) -> Result<()> {
        let new: SmallVec<[Entry; 4]> = new.iter().copied().map(Entry::Extent).collect();
        self.provide(path, new.len().saturating_sub(count))?;
        self.splice_level(path, path.leaf(), at, count, &new)
    }

    /// Allocates the blocks that growing the leaf by `growth` entries takes.
    fn provide(&mut self, path: &Path, growth: usize) -> Result<()> {
        let mut need = 0;
        let mut growth = growth;
        for (index, level) in path.levels.iter().enumerate().rev() {
            let room = self.read(level, |node| node.max().saturating_sub(node.len()))?;
            if growth <= room {
                break;
            }
            if index == 0 && level.depth >= EXTENT_DEPTH_MAX {
                return Err(Errno::FBIG.into());
            }
            need += 1;
            growth = 1;
        }
        if need == 0 {
            return Ok(());
        }
        // Nodes keep together, out of the way of data.
        let last = path.levels.iter().rev().find_map(|level| level.buffer.as_ref());
        let goal = match last {
            Some(buffer) => Goal::near(self.fs, buffer.block()),
            None => Goal::for_inode(self.fs, self.inode.ino, false),
        };
        let goal = goal.with_claim(Claim::Metadata);
        while self.spare.len() < need {
            let want = (need - self.spare.len()) as u32;
            match self.fs.alloc_blocks(self.h, goal, want) {
                Ok(run) => {
                    let blocks = run.start.0..run.start.0.saturating_add(u64::from(run.len));
                    self.spare.extend(blocks.map(BlockNo));
                }
                Err(error) => {
                    for block in std::mem::take(&mut self.spare) {
                        self.fs.free_blocks(self.h, block, 1)?;
                    }
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    fn splice_level(
        &mut self,
        path: &Path,
        index: usize,
        at: usize,
        count: usize,
        new: &[Entry],
    ) -> Result<()> {
        let Some(level) = path.levels.get(index) else { return Ok(()) };
        let (len, max) = self.read(level, |node| (node.len(), node.max()))?;
        let new_len = len.saturating_sub(count) + new.len();
        if new_len == 0 {
            return self.remove_node(path, index);
        }
        if new_len > max {
            return self.split(path, index, at, count, new);
        }
        self.change(level, |node| {
            node.remove(at, count)?;
            new.iter().enumerate().try_for_each(|(i, entry)| entry.put(node, at + i))
        })?;
        if at == 0 {
            self.follow_first(path, index)?;
        }
        Ok(())
    }

    /// Sets the keys above a node to the node's first block.
    fn follow_first(&mut self, path: &Path, index: usize) -> Result<()> {
        let mut index = index;
        while let Some(above) = index.checked_sub(1) {
            let (Some(level), Some(parent)) = (path.levels.get(index), path.levels.get(above))
            else {
                break;
            };
            let first = self.read(level, |node| {
                node.extent(0).map(|e| e.logical).or(node.index(0).map(|i| i.logical))
            })?;
            let old = self.read(parent, |node| node.index(parent.at))?;
            let (Some(first), Some(old)) = (first, old) else { break };
            if first == old.logical {
                break;
            }
            let key = ExtentIndex { logical: first, ..old };
            self.change(parent, |node| node.set_index(parent.at, key))?;
            if parent.at != 0 {
                break;
            }
            index = above;
        }
        Ok(())
    }

    /// Splits a node (or the root, which then gets a level more) that would overflow.
    fn split(
        &mut self,
        path: &Path,
        index: usize,
        at: usize,
        count: usize,
        new: &[Entry],
    ) -> Result<()> {
        let Some(level) = path.levels.get(index) else { return Ok(()) };
        let (mut all, max) = self.read(level, |node| (entries(node), node.max()))?;
        let old_len = all.len();
        let end = at.saturating_add(count);
        if end > old_len {
            return Err(corrupt(self.inode, "a node has fewer entries than it had"));
        }
        all.splice(at..end, new.iter().copied());
        let Some(first) = all.first().map(Entry::logical) else { return Ok(()) };
        if index == 0 {
            let leaf = self.create(level.depth, &all)?;
            let key = Entry::Index(ExtentIndex { logical: first, leaf });
            return self.set_root(level.depth.saturating_add(1), &[key]);
        }
        // A file that grows at its end leaves full nodes behind.
        let at_end = end == old_len;
        let middle = if at_end { max.min(all.len() - 1) } else { all.len() / 2 };
        let (left, right) = all.split_at(middle);
        let Some(right_first) = right.first().map(Entry::logical) else { return Ok(()) };
        let leaf = self.create(level.depth, right)?;
        self.change(level, |node| {
            let len = node.as_node().len();
            node.remove(0, len)?;
            put_all(node, left)
        })?;
        self.follow_first(path, index)?;
        let parent_at = path.levels.get(index - 1).map_or(0, |parent| parent.at);
        let key = Entry::Index(ExtentIndex { logical: right_first, leaf });
        self.splice_level(path, index - 1, parent_at + 1, 0, &[key])
    }

    /// Takes an empty node out of the tree; an empty root becomes a leaf.
    fn remove_node(&mut self, path: &Path, index: usize) -> Result<()> {
        let Some(level) = path.levels.get(index) else { return Ok(()) };
        let (Some(buffer), Some(above)) = (&level.buffer, index.checked_sub(1)) else {
            return self.set_root(0, &[]);
        };
        self.free_node(buffer.block())?;
        let at = path.levels.get(above).map_or(0, |parent| parent.at);
        self.splice_level(path, above, at, 1, &[])
    }

    /// Moves the only child's entries into the root while they fit there.
    pub(super) fn shrink(&mut self) -> Result<()> {
        loop {
            let path = self.walk(0)?;
            let [root, child, ..] = path.levels.as_slice() else { return Ok(()) };
            let (count, room) = self.read(root, |node| (node.len(), node.max()))?;
            let all = self.read(child, entries)?;
            if count != 1 || all.len() > room {
                return Ok(());
            }
            let Some(buffer) = &child.buffer else { return Ok(()) };
            self.set_root(child.depth, &all)?;
            self.free_node(buffer.block())?;
        }
    }

    fn free_node(&mut self, block: BlockNo) -> Result<()> {
        self.state.changes.extent_block_freed(block);
        discharge(self.fs, self.state, 1);
        self.fs.forget_metadata(self.h, block)
    }
}
