//! From an inode's state to an i-transaction.

use std::collections::BTreeMap;

use fjord_block::Buf;
use fjord_block::plant::{Bug, planted};
use fjord_format::extent::{ExtentNode, NodeKind};
use fjord_format::ijournal::{Entry, InodeImage, Superseded};
use fjord_format::{BlockNo, Tid};
use fjord_journal::{AreaWriter, UnplacedITransaction};

use super::Stop;
use super::budget::Footprint;
use super::names::Chain;
use crate::fs::FsInner;
use crate::inode::{Inode, InodeState, disk};
use crate::map::has_extents;

/// What goes into an i-transaction besides the inode and its extent blocks.
pub(super) struct Contents<'a> {
    pub(super) chain: &'a Chain,
    /// Data blocks with their homes.
    pub(super) data: &'a [(BlockNo, Buf)],
    /// Runs of blocks whose carried data is superseded.
    pub(super) superseded: &'a [(BlockNo, u32)],
    /// The inode's bytes, if nobody has to read them.
    pub(super) image: Option<Vec<u8>>,
}

/// An i-transaction, and what recovery would have to do.
pub(super) struct Built {
    pub(super) transaction: UnplacedITransaction,
    pub(super) footprint: Footprint,
}

/// Builds the i-transaction of an inode. Its state lock is held, so its state cannot change
/// meanwhile, and later i-transactions have newer states.
pub(super) fn build(
    fs: &FsInner,
    inode: &Inode,
    state: &mut InodeState,
    writer: &AreaWriter<'_>,
    tid: Tid,
    contents: Contents<'_>,
) -> Result<Built, Stop> {
    let committed = |tid| fs.journal().is_committed(tid);
    let mut footprint = Footprint::default();
    footprint.inode(fs, inode.ino);
    if has_extents(state)
        && let Ok(root) = ExtentNode::parse(&state.disk.i_block, NodeKind::Root, None, &fs.geo)
    {
        footprint.runs(fs, &root);
    }
    let mut inodes = Vec::new();
    for link in &contents.chain.links {
        if let Some(bytes) = &link.image {
            inodes.push(InodeImage { ino: link.inode.ino, bytes: bytes.clone() });
        }
    }
    let bytes = match contents.image {
        Some(bytes) => bytes,
        None => disk::read_bytes(fs, inode.ino, |bytes| Ok(bytes.to_vec()))?,
    };
    inodes.push(InodeImage { ino: inode.ino, bytes });
    let mut entries = Vec::new();
    for link in &contents.chain.links {
        footprint.inode(fs, link.inode.ino);
        footprint.entry(fs, link.parent, &link.name);
        entries.push(Entry {
            parent: link.parent,
            child: link.inode.ino,
            file_type: link.file_type,
            name: link.name.to_vec(),
        });
    }
    let superseded = contents.superseded.iter();
    let superseded = superseded.map(|&(home, count)| Superseded { home, count }).collect();
    let mut extent_blocks = Vec::new();
    let mut nodes = state.changes.uncommitted_extent_blocks(committed);
    nodes.retain(|_| !planted(Bug::ItransactionNoNodes));
    for block in nodes {
        let content = fs.meta.read(block, |_| Ok(()))?.snapshot();
        footprint.node(fs, block);
        if let Ok(node) = ExtentNode::parse_header(&content, NodeKind::Block, None, &fs.geo) {
            footprint.runs(fs, &node);
        }
        extent_blocks.push((block, content));
    }
    let mut data = BTreeMap::new();
    // Not collected: that sorts a copy first.
    for (home, content) in contents.data {
        data.insert(*home, content.clone());
    }
    let transaction = UnplacedITransaction {
        tid,
        sub_id: writer.next_sub_id(),
        ino: inode.ino,
        inodes,
        entries,
        superseded,
        extent_blocks,
        data,
    };
    Ok(Built { transaction, footprint })
}
