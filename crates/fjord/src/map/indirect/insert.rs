//! Putting blocks into a block map.
//!
//! Owns the making of indirect blocks. Invariant: all indirect blocks that a run needs are
//! allocated before the first pointer changes, so that `ENOSPC` changes nothing.

use fjord_format::blockmap::{self, BlockPath, DIRECT_POINTERS, pointers_per_block};
use fjord_format::types::{BlockNo, LogicalBlock};
use fjord_journal::Handle;
use rustix::io::Errno;

use super::Node;
use crate::alloc::{Claim, Goal};
use crate::error::{Error, Result};
use crate::fs::FsInner;
use crate::inode::{Inode, InodeState};
use crate::map::{charge, corrupt};

/// Pointers of one run that stand in one node.
struct Chunk {
    path: BlockPath,
    first: u32,
    len: u32,
}

/// The parts of a run by node, in order.
fn chunks(fs: &FsInner, lblk: u32, len: u32) -> Result<Vec<Chunk>> {
    let mut chunks = Vec::new();
    let (mut at, mut left) = (lblk, len);
    while left > 0 {
        let path = BlockPath::to(LogicalBlock(at), &fs.geo).ok_or(Errno::FBIG)?;
        let capacity =
            if path.indirect_blocks() == 0 { DIRECT_POINTERS } else { pointers_per_block(&fs.geo) };
        let place = path.offsets().last().copied().unwrap_or(0);
        let here = left.min(capacity.saturating_sub(place).max(1));
        chunks.push(Chunk { path, first: at, len: here });
        left -= here;
        at = at.checked_add(here).ok_or(Errno::FBIG)?;
    }
    Ok(chunks)
}

/// Counts the indirect blocks that are missing for all chunks.
fn count_missing(
    fs: &FsInner,
    inode: &Inode,
    state: &InodeState,
    chunks: &[Chunk],
) -> Result<usize> {
    let mut missing = 0;
    let mut last: &[u32] = &[];
    for chunk in chunks {
        let offsets = chunk.path.offsets();
        let nodes = offsets.get(..chunk.path.indirect_blocks()).unwrap_or_default();
        let shared = nodes.iter().zip(last).take_while(|(a, b)| a == b).count();
        let mut node = Some(Node::Inode);
        for (depth, &place) in nodes.iter().enumerate() {
            let child = match &node {
                Some(node) => node.pointer(fs, inode, state, place)?,
                None => None,
            };
            node = child.map(|block| Node::read(fs, inode, block)).transpose()?;
            if node.is_none() && depth >= shared {
                missing += 1;
            }
        }
        last = nodes;
    }
    Ok(missing)
}

/// See [`crate::map::insert`].
pub(in crate::map) fn insert(
    fs: &FsInner,
    h: &Handle,
    inode: &Inode,
    state: &mut InodeState,
    lblk: u32,
    phys: BlockNo,
    len: u32,
) -> Result<()> {
    let chunks = chunks(fs, lblk, len)?;
    check_free(fs, inode, state, &chunks)?;
    let missing = count_missing(fs, inode, state, &chunks)?;
    let mut spare = allocate(fs, h, inode, state, missing)?;
    for chunk in &chunks {
        let offset = u64::from(chunk.first.saturating_sub(lblk));
        let start = phys.checked_add(offset).ok_or(Errno::FBIG)?;
        insert_chunk(fs, h, inode, state, chunk, start, &mut spare)?;
    }
    Ok(())
}

/// Errs when something is mapped already.
fn check_free(fs: &FsInner, inode: &Inode, state: &InodeState, chunks: &[Chunk]) -> Result<()> {
    use crate::map::MapKind;
    for chunk in chunks {
        let mut at = chunk.first;
        let end = chunk.first.saturating_add(chunk.len);
        while at < end {
            let found = super::lookup(fs, inode, state, at, end - at)?;
            if found.kind != MapKind::Hole {
                return Err(corrupt(inode, format_args!("block {at} is mapped already")));
            }
            at = at.saturating_add(found.len);
        }
    }
    Ok(())
}

/// Allocates blocks for `count` nodes.
fn allocate(
    fs: &FsInner,
    h: &Handle,
    inode: &Inode,
    state: &mut InodeState,
    count: usize,
) -> Result<Vec<BlockNo>> {
    let goal = Goal::for_inode(fs, inode.ino, state.is_file())
        .with_claim(Claim::Metadata)
        .with_32bit_blocks();
    let mut blocks: Vec<BlockNo> = Vec::new();
    while blocks.len() < count {
        match fs.alloc_blocks(h, goal, (count - blocks.len()) as u32) {
            Ok(run) => {
                let end = run.start.0.saturating_add(u64::from(run.len));
                blocks.extend((run.start.0..end).map(BlockNo));
            }
            Err(error) => {
                for block in blocks {
                    fs.free_blocks(h, block, 1)?;
                }
                return Err(error);
            }
        }
    }
    // Used from the end, so that the first one used is the lowest.
    blocks.reverse();
    Ok(blocks)
}

fn insert_chunk(
    fs: &FsInner,
    h: &Handle,
    inode: &Inode,
    state: &mut InodeState,
    chunk: &Chunk,
    start: BlockNo,
    spare: &mut Vec<BlockNo>,
) -> Result<()> {
    let mut node = Node::Inode;
    let offsets = chunk.path.offsets();
    let (nodes, place) = match offsets.split_last() {
        Some((place, nodes)) => (nodes, *place),
        None => return Ok(()),
    };
    for &at in nodes {
        node = match node.pointer(fs, inode, state, at)? {
            Some(block) => Node::read(fs, inode, block)?,
            None => {
                let missing = || corrupt(inode, "an indirect block was not allocated");
                let block = spare.pop().ok_or_else(missing)?;
                let buffer = fs.meta.create(block);
                // Comes back as zeros: no pointers.
                drop(h.get_create(&buffer)?);
                charge(fs, state, 1);
                write(h, inode, state, &node, at, [Some(block)])?;
                Node::Block(buffer)
            }
        };
    }
    let blocks = (start.0..start.0.saturating_add(u64::from(chunk.len))).map(|b| Some(BlockNo(b)));
    write(h, inode, state, &node, place, blocks)
}

/// Sets pointers of a node from place `at` on. Every change of a node goes through here.
pub(super) fn write(
    h: &Handle,
    inode: &Inode,
    state: &mut InodeState,
    node: &Node,
    at: u32,
    pointers: impl IntoIterator<Item = Option<BlockNo>>,
) -> Result<()> {
    let set = |bytes: &mut [u8]| -> Result<()> {
        for (place, pointer) in (at..).zip(pointers) {
            blockmap::write_pointer(bytes, place, pointer)
                .map_err(|error: fjord_format::FormatError| -> Error { corrupt(inode, error) })?;
        }
        Ok(())
    };
    match node {
        Node::Inode => set(&mut state.disk.i_block),
        Node::Block(buffer) => set(&mut h.get_write(buffer)?),
    }
}
