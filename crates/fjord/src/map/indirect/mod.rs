//! The block maps of ext2 and ext3: direct pointers and three trees of indirect blocks.
//!
//! Owns reading ([`lookup`]), mapping ([`insert`]) and unmapping ([`remove`]). Invariants:
//! the depth of a tree follows from where its pointer stands, so no damaged map can loop;
//! an indirect block without pointers is freed; no guard of a block is held while another
//! block is looked at.

mod insert;
mod lookup;
mod remove;

use std::sync::Arc;

use fjord_format::blockmap;
use fjord_format::types::BlockNo;
use fjord_journal::Buffer;

pub(super) use insert::insert;
pub(super) use lookup::{lookup, neighbour};
pub(super) use remove::remove;

use super::corrupt;
use crate::error::Result;
use crate::fs::FsInner;
use crate::inode::{Inode, InodeState};

/// A block of pointers: the inode's own or an indirect block.
#[derive(Debug, Clone)]
enum Node {
    Inode,
    Block(Arc<Buffer>),
}

impl Node {
    /// The indirect block at `block`.
    fn read(fs: &FsInner, inode: &Inode, block: BlockNo) -> Result<Node> {
        fs.check_owned(inode.ino, block, 1)?;
        // Indirect blocks have no checksum, and each pointer is checked when it is used.
        Ok(Node::Block(fs.meta.read(block, |_| Ok(()))?))
    }

    /// Its pointers at some places, until `take` has enough of them.
    fn pointers(
        &self,
        fs: &FsInner,
        inode: &Inode,
        state: &InodeState,
        places: impl Iterator<Item = u32>,
        mut take: impl FnMut(u32, Option<BlockNo>) -> bool,
    ) -> Result<()> {
        let content;
        let bytes: &[u8] = match self {
            Node::Inode => &state.disk.i_block,
            Node::Block(buffer) => {
                content = buffer.read();
                &content
            }
        };
        for place in places {
            let pointer = blockmap::read_pointer(bytes, place, &fs.geo)
                .map_err(|error| corrupt(inode, error))?;
            if !take(place, pointer) {
                break;
            }
        }
        Ok(())
    }

    /// The pointer at one place.
    fn pointer(
        &self,
        fs: &FsInner,
        inode: &Inode,
        state: &InodeState,
        at: u32,
    ) -> Result<Option<BlockNo>> {
        let mut found = None;
        self.pointers(fs, inode, state, std::iter::once(at), |_, pointer| {
            found = pointer;
            false
        })?;
        Ok(found)
    }
}
