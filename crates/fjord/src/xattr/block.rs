//! Attribute blocks, which several inodes may share.
//!
//! Invariants: the reference count is read and changed under one lock of the buffer; a block
//! with one reference belongs to the inode whose state is locked and is changed in place; the
//! last reference frees the block and the references that it holds on value inodes.

use std::sync::Arc;

use fjord_block::plant::{Bug, planted};
use fjord_format::BlockNo;
use fjord_format::xattr::{self as format, XattrHeader, XattrSet, XattrView};
use fjord_journal::{Buffer, Handle};

use super::value_inode::{self, Fresh};
use super::{Garbage, damaged, rules};
use crate::alloc::Goal;
use crate::error::Result;
use crate::fs::FsInner;
use crate::inode::changes::CommitReason;
use crate::inode::{Inode, InodeState};

fn read(fs: &FsInner, inode: &Inode, block: BlockNo) -> Result<Arc<Buffer>> {
    if !fs.geo.contains(block) {
        return Err(damaged(inode, format_args!("block {block} does not exist")));
    }
    fs.meta.read(block, |bytes| {
        if fs.geo.features.has_metadata_csum() {
            format::verify_block_checksum(bytes, fs.geo.csum_seed, block)
                .map_err(|error| damaged(inode, error))?;
        }
        Ok(())
    })
}

/// Looks at the attributes in the inode's block, if it has one.
pub(super) fn with_view<T>(
    fs: &FsInner,
    inode: &Inode,
    state: &InodeState,
    look: impl FnOnce(XattrHeader, &XattrView<'_>) -> Result<T>,
) -> Result<Option<T>> {
    let block = state.disk.file_acl;
    if block.0 == 0 {
        return Ok(None);
    }
    let buffer = read(fs, inode, block)?;
    let bytes = buffer.read();
    let (header, view) =
        format::parse_block(&bytes, &rules(fs)).map_err(|error| damaged(inode, error))?;
    look(header, &view).map(Some)
}

/// Copies the attributes in the inode's block.
pub(super) fn load(fs: &FsInner, inode: &Inode, state: &InodeState) -> Result<XattrSet> {
    let set = with_view(fs, inode, state, |_, view| {
        XattrSet::from_view(view).map_err(|error| damaged(inode, error))
    })?;
    Ok(set.unwrap_or_default())
}

/// Makes `set` the attributes in the inode's block: in place, or in a new block when there is
/// none or others share it. Returns whether it was shared. `fresh` is the value inode that
/// was made for this; its reference is counted already.
///
/// # Errors
/// `ENOSPC`, and nothing has changed; damage, I/O.
pub(super) fn store(
    fs: &Arc<FsInner>,
    h: &Handle,
    inode: &Inode,
    state: &mut InodeState,
    set: &XattrSet,
    fresh: Option<&Fresh>,
    garbage: &mut Garbage,
) -> Result<bool> {
    let old = state.disk.file_acl;
    if (old.0 != 0 || !set.is_empty()) && !planted(Bug::ItransactionAttributesNotCommitted) {
        state.changes.require_commit(h.tid(), CommitReason::Attributes);
    }
    let shared =
        with_view(fs, inode, state, |header, _| Ok(header.h_refcount > 1))?.unwrap_or(false);
    if set.is_empty() {
        if old.0 != 0 {
            drop_ref(fs, h, inode, state, shared, garbage)?;
        }
        return Ok(shared);
    }
    if old.0 != 0 && !shared {
        let buffer = read(fs, inode, old)?;
        encode(fs, h, inode, &buffer, set)?;
        return Ok(false);
    }
    let goal = Goal::for_inode(fs, inode.ino, false);
    let run = fs.alloc_blocks(h, goal, 1)?;
    let buffer = fs.meta.create(run.start);
    drop(h.get_create(&buffer)?);
    encode(fs, h, inode, &buffer, set)?;
    if old.0 != 0 {
        for place in value_inode::places(set) {
            if fresh.is_none_or(|fresh| fresh.place != place) {
                value_inode::add_ref(fs, h, inode, place)?;
            }
        }
        drop_ref(fs, h, inode, state, shared, garbage)?;
    }
    state.disk.file_acl = run.start;
    state.disk.blocks_512 += sectors(fs);
    Ok(shared)
}

fn sectors(fs: &FsInner) -> u64 {
    u64::from(fs.geo.block_size / 512)
}

fn encode(
    fs: &FsInner,
    h: &Handle,
    inode: &Inode,
    buffer: &Arc<Buffer>,
    set: &XattrSet,
) -> Result<()> {
    let mut bytes = h.get_write(buffer)?;
    set.encode_block(&mut bytes, 1).map_err(|error| damaged(inode, error))?;
    seal(fs, inode, buffer.block(), &mut bytes)
}

fn seal(fs: &FsInner, inode: &Inode, block: BlockNo, bytes: &mut [u8]) -> Result<()> {
    if fs.geo.features.has_metadata_csum() {
        format::set_block_checksum(bytes, fs.geo.csum_seed, block)
            .map_err(|error| damaged(inode, error))?;
    }
    Ok(())
}

/// Takes the inode's reference off its block; the last one frees it, and with `counts_values`
/// the references that it holds on value inodes.
fn drop_ref(
    fs: &Arc<FsInner>,
    h: &Handle,
    inode: &Inode,
    state: &mut InodeState,
    counts_values: bool,
    garbage: &mut Garbage,
) -> Result<()> {
    let block = state.disk.file_acl;
    let buffer = read(fs, inode, block)?;
    let last = {
        let mut bytes = h.get_write(&buffer)?;
        let header = format::parse_block(&bytes, &rules(fs)).map(|(header, _)| header);
        let header = header.map_err(|error| damaged(inode, error))?;
        if header.h_refcount > 1 {
            format::set_block_refcount(&mut bytes, header.h_refcount - 1)?;
            seal(fs, inode, block, &mut bytes)?;
            false
        } else {
            true
        }
    };
    if last {
        if counts_values {
            for place in value_inode::places(&load(fs, inode, state)?) {
                value_inode::drop_ref(fs, h, inode, place, garbage)?;
            }
        }
        fs.forget_metadata(h, block)?;
    }
    state.disk.file_acl = BlockNo(0);
    state.disk.blocks_512 = state.disk.blocks_512.saturating_sub(sectors(fs));
    Ok(())
}

/// Takes the inode's block away from it. The caller stores the inode.
///
/// # Errors
/// Damage, I/O.
pub(crate) fn release(
    fs: &Arc<FsInner>,
    h: &Handle,
    inode: &Inode,
    state: &mut InodeState,
) -> Result<Garbage> {
    let mut garbage = Garbage::default();
    if state.disk.file_acl.0 != 0 {
        state.changes.require_commit(h.tid(), CommitReason::Attributes);
        let values = value_inode::sectors(fs, &load(fs, inode, state)?);
        drop_ref(fs, h, inode, state, true, &mut garbage)?;
        state.disk.blocks_512 = state.disk.blocks_512.saturating_sub(values);
    }
    Ok(garbage)
}
