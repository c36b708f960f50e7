//! The way from the root of an extent tree to a leaf, and looking things up.
//!
//! Owns how nodes are read. Invariants: a node is verified when it comes from the device
//! (checksum, structure, every pointer) and its header again at each use; a child's
//! entries lie between its key and the next one's.

use std::sync::Arc;

use fjord_format::checksum;
use fjord_format::extent::{self, Extent, ExtentNode, NodeKind};
use fjord_format::types::{BlockNo, LogicalBlock};
use fjord_journal::Buffer;

use smallvec::SmallVec;

use crate::error::{Error, Result};
use crate::fs::FsInner;
use crate::inode::{Inode, InodeState};
use crate::map::{LOGICAL_END, MapKind, Mapping, corrupt};

/// A node on the way.
#[derive(Debug, Clone)]
pub(super) struct Level {
    /// Its buffer; `None` for the root, which lies in the inode.
    pub(super) buffer: Option<Arc<Buffer>>,
    /// Levels below it.
    pub(super) depth: u16,
    /// Place of the entry that the way takes; in a leaf, of the last extent that begins at
    /// or before the block looked for (0 if there is none).
    pub(super) at: usize,
}

/// The way to a leaf.
#[derive(Debug, Clone)]
pub(super) struct Path {
    /// From the root to the leaf; never empty.
    pub(super) levels: SmallVec<[Level; 4]>,
    /// Whether the leaf has an extent at or before the block looked for.
    pub(super) has_entry: bool,
    /// First block that belongs to the next leaf.
    pub(super) limit: u64,
}

impl Path {
    /// Index of the leaf in `levels`.
    pub(super) fn leaf(&self) -> usize {
        self.levels.len() - 1
    }

    /// Place in the leaf at which an extent that begins at the block would be put in.
    pub(super) fn insert_place(&self) -> usize {
        self.levels.last().map_or(0, |leaf| leaf.at + usize::from(self.has_entry))
    }
}

/// Calls `read` with a node.
pub(super) fn with_node<T>(
    fs: &FsInner,
    inode: &Inode,
    state: &InodeState,
    level: &Level,
    read: impl FnOnce(&ExtentNode<'_>) -> T,
) -> Result<T> {
    let named = |error| node_error(inode, level.buffer.as_ref().map(|b| b.block()), error);
    match &level.buffer {
        None => {
            let root = &state.disk.i_block;
            let node = ExtentNode::parse(root, NodeKind::Root, None, &fs.geo).map_err(named)?;
            Ok(read(&node))
        }
        Some(buffer) => {
            let content = buffer.read();
            let depth = Some(level.depth);
            let node = ExtentNode::parse_header(&content, NodeKind::Block, depth, &fs.geo)
                .map_err(named)?;
            Ok(read(&node))
        }
    }
}

/// Names the inode and the node in an error of the format.
pub(super) fn node_error(
    inode: &Inode,
    block: Option<BlockNo>,
    error: fjord_format::FormatError,
) -> Error {
    match block {
        Some(block) => corrupt(inode, format_args!("node at block {block}: {error}")),
        None => corrupt(inode, format_args!("root of the extent tree: {error}")),
    }
}

/// Seed of the checksums of an inode's nodes.
pub(super) fn seed(fs: &FsInner, inode: &Inode, state: &InodeState) -> u32 {
    checksum::inode_seed(fs.geo.csum_seed, inode.ino, state.disk.generation)
}

/// Reads the node at `block`, which must have `depth` levels below it.
fn read_node(
    fs: &FsInner,
    inode: &Inode,
    state: &InodeState,
    block: BlockNo,
    depth: u16,
) -> Result<Arc<Buffer>> {
    fs.check_owned(inode.ino, block, 1)?;
    fs.meta.read(block, |bytes| {
        let named = |error| node_error(inode, Some(block), error);
        extent::verify_checksum(bytes, seed(fs, inode, state), &fs.geo).map_err(named)?;
        let node = ExtentNode::parse(bytes, NodeKind::Block, Some(depth), &fs.geo);
        for extent in node.map_err(named)?.extents() {
            fs.check_owned(inode.ino, extent.start, u64::from(extent.len))?;
        }
        Ok(())
    })
}

/// What a node says about the way to a block.
struct Step {
    depth: u16,
    at: Option<usize>,
    child: Option<(BlockNo, u64)>,
    next_key: Option<u64>,
    first: Option<u64>,
    end: u64,
}

fn step(node: &ExtentNode<'_>, lblk: u32) -> Step {
    let at = node.search(LogicalBlock(lblk));
    let taken = at.unwrap_or(0);
    let last = node.len().saturating_sub(1);
    let key = |place| u64::from(place);
    let (first, end) = if node.is_leaf() {
        let first = node.extent(0).map(|extent| key(extent.logical.0));
        (first, node.extent(last).map_or(0, |extent| extent.logical_end()))
    } else {
        let first = node.index(0).map(|index| key(index.logical.0));
        (first, node.index(last).map_or(0, |index| key(index.logical.0) + 1))
    };
    Step {
        depth: node.depth(),
        at,
        child: node.index(taken).map(|index| (index.leaf, key(index.logical.0))),
        next_key: node.index(taken + 1).map(|index| key(index.logical.0)),
        first,
        end,
    }
}

/// The way to the leaf that `lblk` belongs to.
///
/// # Errors
/// `Corrupt`, I/O errors.
pub(super) fn walk(fs: &FsInner, inode: &Inode, state: &InodeState, lblk: u32) -> Result<Path> {
    let mut path = Path { levels: SmallVec::new(), has_entry: false, limit: LOGICAL_END };
    let mut key = 0;
    let mut level = Level { buffer: None, depth: 0, at: 0 };
    loop {
        let found = with_node(fs, inode, state, &level, |node| step(node, lblk))?;
        let below_key = found.first.is_some_and(|first| first < key);
        if below_key || found.end > path.limit || (found.first.is_none() && level.buffer.is_some())
        {
            return Err(corrupt(
                inode,
                format_args!("entries of a node lie outside {key}..{}", path.limit),
            ));
        }
        level.depth = found.depth;
        level.at = found.at.unwrap_or(0);
        path.levels.push(level);
        let Some((block, child_key)) = found.child else {
            path.has_entry = found.at.is_some();
            return Ok(path);
        };
        key = child_key;
        path.limit = path.limit.min(found.next_key.unwrap_or(LOGICAL_END));
        if path.limit <= u64::from(lblk) {
            return Err(corrupt(inode, format_args!("an index is out of order at block {lblk}")));
        }
        // An index node has at least one level below it.
        let depth = found.depth.saturating_sub(1);
        let buffer = read_node(fs, inode, state, block, depth)?;
        level = Level { buffer: Some(buffer), depth, at: 0 };
    }
}

/// The leaf's extent at or before the block looked for and the one after it.
pub(super) fn around(
    fs: &FsInner,
    inode: &Inode,
    state: &InodeState,
    path: &Path,
) -> Result<(Option<Extent>, Option<Extent>)> {
    let Some(leaf) = path.levels.last() else { return Ok((None, None)) };
    let next = path.insert_place();
    with_node(fs, inode, state, leaf, |node| {
        (if path.has_entry { node.extent(leaf.at) } else { None }, node.extent(next))
    })
}

/// See [`crate::map::lookup`].
pub(in crate::map) fn lookup(
    fs: &FsInner,
    inode: &Inode,
    state: &InodeState,
    lblk: u32,
    max_len: u32,
) -> Result<Mapping> {
    let path = walk(fs, inode, state, lblk)?;
    let (before, after) = around(fs, inode, state, &path)?;
    if let Some(extent) = before
        && let Some(start) = extent.physical(LogicalBlock(lblk))
    {
        // The block lies inside the extent, so the rest of it is at least one block.
        let rest = (extent.logical_end() - u64::from(lblk)) as u32;
        let len = rest.min(max_len);
        fs.check_owned(inode.ino, start, u64::from(len))?;
        let kind =
            if extent.unwritten { MapKind::Unwritten(start) } else { MapKind::Written(start) };
        return Ok(Mapping { len, kind });
    }
    let end = after.map_or(path.limit, |extent| u64::from(extent.logical.0));
    let len = end.saturating_sub(u64::from(lblk)).clamp(1, u64::from(max_len));
    Ok(Mapping { len: len as u32, kind: MapKind::Hole })
}

/// See [`crate::map::neighbour`].
pub(in crate::map) fn neighbour(
    fs: &FsInner,
    inode: &Inode,
    state: &InodeState,
    lblk: u32,
) -> Result<Option<(BlockNo, bool)>> {
    let path = walk(fs, inode, state, lblk)?;
    Ok(match around(fs, inode, state, &path)? {
        (Some(before), _) => {
            let distance = u64::from(lblk).saturating_sub(u64::from(before.logical.0));
            let extends = before.logical_end() == u64::from(lblk);
            before.start.checked_add(distance).map(|block| (block, extends))
        }
        (None, Some(after)) => {
            let distance = u64::from(after.logical.0).saturating_sub(u64::from(lblk));
            after.start.0.checked_sub(distance).map(|block| (BlockNo(block), false))
        }
        (None, None) => None,
    })
}
