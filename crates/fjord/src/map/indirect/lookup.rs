//! Looking blocks up in a block map.
//!
//! Owns no state. Invariant: a run never goes past the node that its pointers stand in.

use fjord_format::blockmap::{BlockPath, DIRECT_POINTERS, pointers_per_block};
use fjord_format::types::{BlockNo, LogicalBlock};

use super::Node;
use crate::error::Result;
use crate::fs::FsInner;
use crate::inode::{Inode, InodeState};
use crate::map::{MapKind, Mapping};

/// See [`crate::map::lookup`].
pub(in crate::map) fn lookup(
    fs: &FsInner,
    inode: &Inode,
    state: &InodeState,
    lblk: u32,
    max_len: u32,
) -> Result<Mapping> {
    let Some(path) = BlockPath::to(LogicalBlock(lblk), &fs.geo) else {
        return Ok(Mapping { len: max_len, kind: MapKind::Hole });
    };
    let per_node = u64::from(pointers_per_block(&fs.geo));
    let mut node = Node::Inode;
    for (depth, &place) in path.offsets().iter().enumerate() {
        // Blocks below this pointer, and which of them is looked for.
        let levels_below = path.indirect_blocks() - depth;
        let rest = path.offsets().get(depth + 1..).unwrap_or_default();
        let index = rest.iter().fold(0, |index, &at| index * per_node + u64::from(at));
        if levels_below == 0 {
            return run(fs, inode, state, &node, place, max_len);
        }
        match node.pointer(fs, inode, state, place)? {
            Some(block) => node = Node::read(fs, inode, block)?,
            None => {
                // At most 2^14 pointers in a block and three levels.
                let span = (0..levels_below).fold(1u64, |span, _| span.saturating_mul(per_node));
                let len = (span - index).min(u64::from(max_len));
                return Ok(Mapping { len: len as u32, kind: MapKind::Hole });
            }
        }
    }
    Ok(Mapping { len: 1, kind: MapKind::Hole })
}

/// The run of data that begins at a pointer.
fn run(
    fs: &FsInner,
    inode: &Inode,
    state: &InodeState,
    node: &Node,
    place: u32,
    max_len: u32,
) -> Result<Mapping> {
    let end = match node {
        Node::Inode => DIRECT_POINTERS,
        Node::Block(_) => pointers_per_block(&fs.geo),
    };
    let places = place..end.min(place.saturating_add(max_len));
    let mut first: Option<Option<BlockNo>> = None;
    let mut len = 0u32;
    node.pointers(fs, inode, state, places, |_, pointer| {
        let expected = match first {
            None => {
                first = Some(pointer);
                pointer
            }
            Some(start) => start.and_then(|start| start.checked_add(u64::from(len))),
        };
        let goes_on = pointer == expected;
        len += u32::from(goes_on);
        goes_on
    })?;
    let len = len.max(1);
    match first.flatten() {
        None => Ok(Mapping { len, kind: MapKind::Hole }),
        Some(start) => {
            fs.check_owned(inode.ino, start, u64::from(len))?;
            Ok(Mapping { len, kind: MapKind::Written(start) })
        }
    }
}

/// See [`crate::map::neighbour`].
pub(in crate::map) fn neighbour(
    fs: &FsInner,
    inode: &Inode,
    state: &InodeState,
    lblk: u32,
) -> Result<Option<(BlockNo, bool)>> {
    let Some(before) = lblk.checked_sub(1) else { return Ok(None) };
    Ok(match lookup(fs, inode, state, before, 1)?.kind {
        MapKind::Written(block) | MapKind::Unwritten(block) => {
            block.checked_add(1).map(|next| (next, true))
        }
        MapKind::Hole => None,
    })
}
