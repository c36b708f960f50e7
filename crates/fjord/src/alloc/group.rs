//! One group: its descriptor and bitmaps, read and changed.
//!
//! Owns the rule that a bitmap, its checksum and the counts in the descriptor change together.
//! Invariants: callers hold the group's lock; a bitmap is used only after its checksum (when it
//! comes from the device) and its count of clear bits (once per mount) agreed with the descriptor;
//! a bitmap that is not initialised on disk is computed.

use std::ops::Range;
use std::sync::Arc;

use fjord_block::Buf;
use fjord_block::plant::{Bug, planted};
use fjord_format::bitmap;
use fjord_format::group::{GroupDesc, GroupFlags};
use fjord_format::types::{BlockNo, GroupNo};
use fjord_journal::{Buffer, Handle};

use super::parts::part_of_group;
use super::table::Cell;
use crate::error::{Error, Result};
use crate::fs::FsInner;

/// Structures, in messages about damage.
const BLOCK_BITMAP: &str = "block bitmap";
const INODE_BITMAP: &str = "inode bitmap";

/// A bitmap of a group.
pub(super) enum Bitmap {
    /// Stored on disk, or to be stored.
    Stored(Arc<Buffer>),
    /// Not initialised on disk; computed contents.
    Initial(Vec<u8>),
}

impl Bitmap {
    /// Its present contents.
    pub(super) fn contents(&self) -> Buf {
        match self {
            Bitmap::Stored(buffer) => buffer.snapshot(),
            Bitmap::Initial(bytes) => Buf::from_slice(bytes),
        }
    }
}

fn corrupt_group(what: &'static str, group: GroupNo, detail: impl std::fmt::Display) -> Error {
    Error::corrupt(what, format!("group {group}: {detail}"))
}

/// The descriptor must count as many free bits as its bitmap has among the first `bits`.
fn check_count(
    what: &'static str,
    group: GroupNo,
    found: &Bitmap,
    bits: u32,
    counted: u32,
) -> Result<()> {
    let clear = bitmap::count_clear(&found.contents(), bits);
    if clear == counted {
        return Ok(());
    }
    let detail = format!("{clear} bits are clear, the descriptor counts {counted}");
    Err(corrupt_group(what, group, detail))
}

impl FsInner {
    /// The buffer of the group's descriptor and where in it the descriptor lies.
    fn desc_place(&self, group: GroupNo) -> Result<(Arc<Buffer>, Range<usize>)> {
        let missing = || corrupt_group("group descriptor", group, "there is no such group");
        let (index, offset) = self.geo.desc_location(group).ok_or_else(missing)?;
        let block = self.geo.desc_block_location(index).ok_or_else(missing)?;
        let start = offset as usize;
        let range = start..start + usize::from(self.geo.desc_size);
        // Each descriptor has its own checksum, which every decoding verifies.
        Ok((self.desc_block(block)?, range))
    }

    /// A block of descriptors, or one that is reserved for some.
    pub(crate) fn desc_block(&self, block: BlockNo) -> Result<Arc<Buffer>> {
        if self.commits_groups() {
            self.meta.read_keeping_base(block)
        } else {
            self.meta.read(block, |_| Ok(()))
        }
    }

    /// The group's descriptor.
    pub(super) fn read_desc(&self, group: GroupNo) -> Result<GroupDesc> {
        let (buffer, range) = self.desc_place(group)?;
        let guard = buffer.read();
        let bytes = guard.get(range).unwrap_or_default();
        GroupDesc::decode(bytes, &self.geo, group)
            .map_err(|error| corrupt_group("group descriptor", group, error))
    }

    /// The inode table of a group whose descriptor is damaged, if it can lie there.
    pub(super) fn unverified_inode_table(&self, group: GroupNo) -> Result<Option<BlockNo>> {
        let (buffer, range) = self.desc_place(group)?;
        let guard = buffer.read();
        let bytes = guard.get(range).unwrap_or_default();
        Ok(GroupDesc::unverified_inode_table(bytes, &self.geo, group))
    }

    /// Stores the group's descriptor in the handle's transaction.
    pub(crate) fn write_desc(&self, h: &Handle, group: GroupNo, desc: &GroupDesc) -> Result<()> {
        let (buffer, range) = self.desc_place(group)?;
        h.touch_part(part_of_group(group));
        let mut guard = h.get_write(&buffer)?;
        let bytes = guard.get_mut(range).unwrap_or_default();
        desc.encode(bytes, &self.geo, group)
            .map_err(|error| corrupt_group("group descriptor", group, error))
    }

    /// Whether the block bitmap exists only by rule.
    fn is_block_uninit(&self, desc: &GroupDesc) -> bool {
        desc.has_flag(&self.geo, GroupFlags::BLOCK_UNINIT)
    }

    /// The group's block bitmap.
    ///
    /// # Errors
    /// `Corrupt` (the group is then marked damaged), I/O errors.
    pub(super) fn block_bitmap(
        &self,
        group: GroupNo,
        cell: &Cell,
        desc: &GroupDesc,
    ) -> Result<Bitmap> {
        self.usable(group, cell)?;
        let damaged = |error: &Error| self.note_damaged_group(cell, error);
        let found = if self.is_block_uninit(desc) {
            let mut bytes = vec![0; self.geo.block_size as usize];
            bitmap::init_block_bitmap(&mut bytes, &self.geo, group, desc);
            Bitmap::Initial(bytes)
        } else {
            let verify = |bytes: &[u8]| {
                desc.verify_block_bitmap(bytes, &self.geo)
                    .map_err(|error| corrupt_group(BLOCK_BITMAP, group, error))
            };
            Bitmap::Stored(self.meta.read(desc.block_bitmap, verify).inspect_err(damaged)?)
        };
        if !cell.blocks_checked() {
            let bits = self.geo.clusters_in_group(group);
            check_count(BLOCK_BITMAP, group, &found, bits, desc.free_clusters)
                .and_then(|()| self.check_system_bits(group, &found))
                .inspect_err(damaged)?;
            cell.set_blocks_checked();
        }
        Ok(found)
    }

    /// The file system's own blocks must be marked as used, or files would overwrite them.
    fn check_system_bits(&self, group: GroupNo, found: &Bitmap) -> Result<()> {
        let first = self.geo.group_first_block(group).0;
        let end = first + u64::from(self.geo.blocks_in_group(group));
        let contents = found.contents();
        for (start, end) in self.groups.zones.within(first, end) {
            // Both lie in the group, whose blocks are counted in 32 bits.
            let (at, len) = ((start - first) as u32, (end - start) as u32);
            if !bitmap::is_range_set(&contents, at, len) {
                let detail =
                    format!("blocks {start} to {end} are in use by the file system itself");
                return Err(corrupt_group(BLOCK_BITMAP, group, detail));
            }
        }
        Ok(())
    }

    /// The group's inode bitmap.
    ///
    /// # Errors
    /// `Corrupt` (the group is then marked damaged), I/O errors.
    pub(super) fn inode_bitmap(
        &self,
        group: GroupNo,
        cell: &Cell,
        desc: &GroupDesc,
    ) -> Result<Bitmap> {
        self.usable(group, cell)?;
        let damaged = |error: &Error| self.note_damaged_group(cell, error);
        let found = if desc.has_flag(&self.geo, GroupFlags::INODE_UNINIT) {
            let mut bytes = vec![0; self.geo.block_size as usize];
            bitmap::init_inode_bitmap(&mut bytes, &self.geo);
            Bitmap::Initial(bytes)
        } else {
            let verify = |bytes: &[u8]| {
                desc.verify_inode_bitmap(bytes, &self.geo)
                    .map_err(|error| corrupt_group(INODE_BITMAP, group, error))
            };
            Bitmap::Stored(self.meta.read(desc.inode_bitmap, verify).inspect_err(damaged)?)
        };
        if !cell.inodes_checked() {
            check_count(INODE_BITMAP, group, &found, self.geo.inodes_per_group, desc.free_inodes)
                .inspect_err(damaged)?;
            cell.set_inodes_checked();
        }
        Ok(found)
    }

    fn usable(&self, group: GroupNo, cell: &Cell) -> Result<()> {
        if cell.is_damaged() {
            return Err(corrupt_group("block group", group, "its descriptor or bitmap is wrong"));
        }
        Ok(())
    }

    fn note_damaged_group(&self, cell: &Cell, error: &Error) {
        if error.is_corrupt() {
            self.groups.set_damaged(cell);
        }
    }

    /// The buffer of a bitmap, put into the transaction; an initial one becomes stored.
    pub(super) fn stored_bitmap(
        &self,
        h: &Handle,
        found: Bitmap,
        block: BlockNo,
    ) -> Result<Arc<Buffer>> {
        match found {
            Bitmap::Stored(buffer) => Ok(buffer),
            Bitmap::Initial(bytes) => {
                let buffer = self.meta.create(block);
                h.get_create(&buffer)?.copy_from_slice(&bytes);
                Ok(buffer)
            }
        }
    }

    /// Sets or clears the bits of blocks and adjusts descriptor and checksums.
    ///
    /// # Errors
    /// `Corrupt` if one of the bits already has the new value (nothing is changed then), I/O and
    /// journal errors.
    pub(super) fn change_block_bits(
        &self,
        h: &Handle,
        group: GroupNo,
        cell: &Cell,
        bits: Range<u32>,
        set: bool,
    ) -> Result<()> {
        let mut desc = self.read_desc(group)?;
        let found = self.block_bitmap(group, cell, &desc)?;
        let (first, count) = (bits.start, bits.end.saturating_sub(bits.start));
        let (as_expected, free) = if set {
            let clear = bitmap::is_range_clear(&found.contents(), first, count);
            (clear, desc.free_clusters.checked_sub(count))
        } else {
            let in_use = bitmap::is_range_set(&found.contents(), first, count);
            (in_use, desc.free_clusters.checked_add(count))
        };
        let (true, Some(free)) = (as_expected, free) else {
            let state = if set { "in use" } else { "free" };
            return Err(corrupt_group(
                BLOCK_BITMAP,
                group,
                format!(
                    "of {count} blocks from the group's block {first} on some are already {state}"
                ),
            ));
        };
        let buffer = self.stored_bitmap(h, found, desc.block_bitmap)?;
        {
            let mut guard = h.get_write(&buffer)?;
            if set {
                bitmap::set_range(&mut guard, first, count);
            } else {
                bitmap::clear_range(&mut guard, first, count);
            }
            desc.update_block_bitmap_csum(&guard, &self.geo)?;
        }
        desc.free_clusters = free;
        self.init_flag(h, &mut desc, GroupFlags::BLOCK_UNINIT);
        self.write_desc(h, group, &desc)
    }

    /// Initialises the block bitmap on disk where it exists only by rule; `desc` is changed
    /// but not stored.
    pub(super) fn init_block_bitmap(
        &self,
        h: &Handle,
        group: GroupNo,
        cell: &Cell,
        desc: &mut GroupDesc,
    ) -> Result<()> {
        if !self.is_block_uninit(desc) {
            return Ok(());
        }
        let found = self.block_bitmap(group, cell, desc)?;
        let buffer = self.stored_bitmap(h, found, desc.block_bitmap)?;
        desc.update_block_bitmap_csum(&buffer.read(), &self.geo)?;
        self.init_flag(h, desc, GroupFlags::BLOCK_UNINIT);
        Ok(())
    }

    /// Notes that a group's count of directories is changed.
    pub(super) fn directory_count_changes(&self, h: &Handle) {
        if !planted(Bug::DirectoryCountNotHome) {
            self.hazards.read_ahead_changed(h.tid());
        }
    }

    /// Takes a flag off that says that a bitmap exists only by rule.
    pub(super) fn init_flag(&self, h: &Handle, desc: &mut GroupDesc, flag: GroupFlags) {
        if desc.flags.contains(flag) {
            desc.flags.remove(flag);
            self.hazards.read_ahead_changed(h.tid());
        }
    }

    /// Sets or clears the bit of an inode; `desc` gets the checksum but is not stored.
    pub(super) fn change_inode_bit(
        &self,
        h: &Handle,
        found: Bitmap,
        desc: &mut GroupDesc,
        bit: u32,
        set: bool,
    ) -> Result<()> {
        let buffer = self.stored_bitmap(h, found, desc.inode_bitmap)?;
        let mut guard = h.get_write(&buffer)?;
        if set {
            bitmap::set(&mut guard, bit);
        } else {
            bitmap::clear(&mut guard, bit);
        }
        desc.update_inode_bitmap_csum(&guard, &self.geo)?;
        Ok(())
    }
}
