//! From an inode's state to the blocks of an i-transaction.

use fjord_block::Buf;
use fjord_block::plant::{Bug, planted};
use fjord_format::extent::{ExtentNode, NodeKind};
use fjord_format::ijournal::{Builder, Place};
use fjord_format::{BlockNo, FormatError, Tid};
use fjord_journal::{AreaWriter, UnplacedITransaction};

use super::Stop;
use super::budget::Footprint;
use super::names::Chain;
use crate::fs::FsInner;
use crate::fsync::Fallback;
use crate::inode::{Inode, InodeState, disk};
use crate::map::has_extents;

/// What goes into an i-transaction besides the inode and its extent blocks.
pub(super) struct Contents<'a> {
    pub(super) chain: &'a Chain,
    /// Data blocks with their homes.
    pub(super) data: &'a [(BlockNo, Buf)],
    /// Runs of blocks whose carried data is superseded.
    pub(super) superseded: &'a [(BlockNo, u32)],
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
    contents: &Contents<'_>,
) -> Result<Built, Stop> {
    let committed = |tid| fs.journal().is_committed(tid);
    let mut footprint = Footprint::default();
    footprint.inode(fs, inode.ino);
    if has_extents(state)
        && let Ok(root) = ExtentNode::parse(&state.disk.i_block, NodeKind::Root, None, &fs.geo)
    {
        footprint.runs(fs, &root);
    }
    let mut builder = Builder::new(writer.format(), tid, writer.next_sub_id(), inode.ino);
    for link in &contents.chain.links {
        if let Some(image) = &link.image {
            builder.inode(link.inode.ino, image).map_err(too_large)?;
        }
    }
    disk::read_bytes(fs, inode.ino, |bytes| Ok(builder.inode(inode.ino, bytes)))?
        .map_err(too_large)?;
    for link in &contents.chain.links {
        builder
            .entry(link.parent, link.inode.ino, link.file_type, &link.name)
            .map_err(too_large)?;
    }
    for link in &contents.chain.links {
        footprint.inode(fs, link.inode.ino);
        footprint.entry(fs, link.parent, &link.name);
    }
    for &(start, count) in contents.superseded {
        builder.superseded(start, count).map_err(too_large)?;
    }
    let mut payload = Vec::new();
    let mut nodes = state.changes.uncommitted_extent_blocks(committed);
    nodes.retain(|_| !planted(Bug::ItransactionNoNodes));
    for &block in &nodes {
        let content = fs.meta.read(block, |_| Ok(()))?.snapshot();
        let place = builder.extent_block(block, &content).map_err(too_large)?;
        footprint.node(fs, block);
        if let Ok(node) = ExtentNode::parse_header(&content, NodeKind::Block, None, &fs.geo) {
            footprint.runs(fs, &node);
        }
        put(&mut payload, place, content);
    }
    for (home, content) in contents.data {
        let place = builder.data(*home, content).map_err(too_large)?;
        put(&mut payload, place, content.clone());
    }
    builder.check().map_err(too_large)?;
    Ok(Built { transaction: UnplacedITransaction { builder, payload }, footprint })
}

fn put(payload: &mut Vec<Buf>, place: Place, mut content: Buf) {
    if let Place::Payload { escaped } = place {
        if escaped {
            content.make_mut()[..4].fill(0);
        }
        payload.push(content);
    }
}

/// If it exceeds the format, it is too large for an i-transaction.
fn too_large(_: FormatError) -> Stop {
    Fallback::TooLarge.into()
}
