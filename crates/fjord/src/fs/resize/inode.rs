//! The resize inode: inode 7, which owns the blocks that are reserved for group descriptors.
//!
//! Owns its form: the double indirect block of its map points to the reserved blocks of group 0, the
//! pointer's place being the number of the descriptor block; each reserved block points to its copies
//! in the groups with backups, in the order of groups. Invariant: it is checked before it is changed,
//! and it is changed in the transaction that takes blocks from it or adds groups with backups.

use std::sync::Arc;

use fjord_format::blockmap::{self, DOUBLE_INDIRECT, pointers_per_block};
use fjord_format::features::Compat;
use fjord_format::geometry::Geometry;
use fjord_format::growth::backup_of;
use fjord_format::inode::{DiskInode, InodeFlags};
use fjord_format::{BlockNo, GroupNo, InodeNo};
use fjord_journal::{Buffer, Handle};

use super::no_room;
use crate::error::{Error, Result};
use crate::fs::FsInner;
use crate::inode::disk;
use crate::resize::ResizeError;

/// What a step changes of it.
pub(super) struct ResizeInode {
    dind: Arc<Buffer>,
    /// Places in `dind` of the blocks that become descriptors.
    taken: Vec<u32>,
    /// The blocks that stay reserved, where they get more copies.
    kept: Vec<(BlockNo, Arc<Buffer>)>,
    /// Groups with backups that there are.
    old_backups: u32,
    /// Groups with backups that there are to be.
    new_backups: Vec<GroupNo>,
    /// By how much the count of its blocks changes.
    blocks_change: i64,
}

impl ResizeInode {
    /// What is to be changed for `next`; `None` if nothing is.
    ///
    /// # Errors
    /// `Corrupt` for a resize inode that is not as it must be; `Resize` where a block has no room for
    /// so many pointers; I/O errors.
    pub(super) fn load(fs: &FsInner, next: &Geometry) -> Result<Option<ResizeInode>> {
        let geo: &Geometry = &fs.geo;
        let old_backups: Vec<GroupNo> = geo.old_desc_backup_groups().collect();
        let new_backups: Vec<GroupNo> =
            next.old_desc_backup_groups().skip(old_backups.len()).collect();
        let taken_count = geo.reserved_gdt_blocks.saturating_sub(next.reserved_gdt_blocks);
        let has_inode = geo.features.compat.contains(Compat::RESIZE_INODE);
        if !has_inode
            || geo.reserved_gdt_blocks == 0
            || (taken_count == 0 && new_backups.is_empty())
        {
            return Ok(None);
        }
        let pointers = pointers_per_block(geo);
        if old_backups.len() + new_backups.len() > pointers as usize {
            let why = format!("the resize inode has no room for more than {pointers} backups");
            return Err(ResizeError::Offline(why).into());
        }
        let dind_block = dind_block(fs)?;
        let dind = fs.meta.read(dind_block, |_| Ok(()))?;
        let (mut taken, mut kept) = (Vec::new(), Vec::new());
        for index in geo.desc_block_count..geo.desc_block_count + geo.reserved_gdt_blocks {
            let is_taken = index < next.desc_block_count;
            if !is_taken && new_backups.is_empty() {
                break;
            }
            let block = BlockNo(geo.superblock_location().0 + 1 + u64::from(index));
            let slot = index % pointers;
            expect(fs, &dind.read(), slot, block)?;
            let buffer = fs.desc_block(block)?;
            for (slot, group) in (0..).zip(&old_backups) {
                expect(fs, &buffer.read(), slot, backup_of(geo, block, *group))?;
            }
            fs.ensure_room(block, 1).map_err(no_room)?;
            if is_taken { taken.push(slot) } else { kept.push((block, buffer)) }
        }
        let freed = taken.len() as i64 * (1 + old_backups.len() as i64);
        let blocks_change = kept.len() as i64 * new_backups.len() as i64 - freed;
        let old_backups = old_backups.len() as u32;
        Ok(Some(ResizeInode { dind, taken, kept, old_backups, new_backups, blocks_change }))
    }

    /// Metadata blocks that [`ResizeInode::change`] dirties.
    pub(super) fn credits(&self) -> u32 {
        // The inode, the double indirect block, and the reserved blocks, of which a block holds the
        // pointers to all.
        2 + self.kept.len() as u32
    }

    /// Changes it.
    ///
    /// # Errors
    /// Corruption, I/O and journal errors.
    pub(super) fn change(self, fs: &FsInner, h: &Handle) -> Result<()> {
        if !self.taken.is_empty() {
            let mut bytes = h.get_write(&self.dind)?;
            for slot in &self.taken {
                blockmap::write_pointer(&mut bytes, *slot, None)?;
            }
        }
        for (block, buffer) in &self.kept {
            let mut bytes = h.get_write(buffer)?;
            for (slot, group) in (self.old_backups..).zip(&self.new_backups) {
                let copy = backup_of(&fs.geo, *block, *group);
                blockmap::write_pointer(&mut bytes, slot, Some(copy))?;
            }
        }
        let change_512 = self.blocks_change.saturating_mul(i64::from(fs.geo.block_size / 512));
        disk::change_bytes(fs, h, InodeNo::RESIZE, |bytes| {
            let mut inode = DiskInode::decode(bytes, &fs.geo)?;
            inode.blocks_512 = inode.blocks_512.saturating_add_signed(change_512);
            Ok(inode.encode(bytes, &fs.geo)?)
        })
    }
}

/// The double indirect block of the resize inode.
fn dind_block(fs: &FsInner) -> Result<BlockNo> {
    let inode = disk::load(fs, InodeNo::RESIZE)?;
    let has_extents = inode.flags.contains(InodeFlags::EXTENTS);
    blockmap::read_pointer(&inode.i_block, DOUBLE_INDIRECT, &fs.geo)?
        .filter(|_| inode.links_count > 0 && !has_extents)
        .ok_or_else(|| damaged("it has no double indirect block".into()))
}

fn expect(fs: &FsInner, bytes: &[u8], slot: u32, block: BlockNo) -> Result<()> {
    match blockmap::read_pointer(bytes, slot, &fs.geo)? {
        Some(found) if found == block => Ok(()),
        found => Err(damaged(format!("a pointer leads to {found:?} instead of block {block}"))),
    }
}

fn damaged(detail: String) -> Error {
    Error::corrupt("resize inode", detail)
}
