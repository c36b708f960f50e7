//! Group descriptors, 32 bytes or (with the feature `64bit`) 64 and more.
//!
//! Invariant: [`GroupDesc::encode`] of what [`GroupDesc::parse`] read leaves the bytes as they
//! were; bytes past the 64 known ones are never touched, but the checksum covers them.

use std::mem::offset_of;

use bitflags::bitflags;
use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

use crate::checksum;
use crate::error::{FormatError, Result};
use crate::features::{Incompat, RoCompat};
use crate::geometry::{DESC_64BIT_BYTES, DESC_MIN_BYTES, Geometry};
use crate::types::{BlockNo, GroupNo};

const STRUCTURE: &str = "group descriptor";

bitflags! {
    /// Bits of `bg_flags`; they count only when descriptors carry a checksum.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct GroupFlags: u16 {
        /// Inode bitmap and table are not initialised: all inodes are free.
        const INODE_UNINIT = 0x1;
        /// The block bitmap is not initialised: only metadata blocks are in use.
        const BLOCK_UNINIT = 0x2;
        /// The unused part of the inode table is zero on disk.
        const INODE_ZEROED = 0x4;
        const _ = !0;
    }
}

/// A 64-byte group descriptor as it lies on disk; the short form is its first 32 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RawGroupDesc {
    bg_block_bitmap_lo: U32,
    bg_inode_bitmap_lo: U32,
    bg_inode_table_lo: U32,
    bg_free_blocks_count_lo: U16,
    bg_free_inodes_count_lo: U16,
    bg_used_dirs_count_lo: U16,
    bg_flags: U16,
    bg_exclude_bitmap_lo: U32,
    bg_block_bitmap_csum_lo: U16,
    bg_inode_bitmap_csum_lo: U16,
    bg_itable_unused_lo: U16,
    bg_checksum: U16,
    bg_block_bitmap_hi: U32,
    bg_inode_bitmap_hi: U32,
    bg_inode_table_hi: U32,
    bg_free_blocks_count_hi: U16,
    bg_free_inodes_count_hi: U16,
    bg_used_dirs_count_hi: U16,
    bg_itable_unused_hi: U16,
    bg_exclude_bitmap_hi: U32,
    bg_block_bitmap_csum_hi: U16,
    bg_inode_bitmap_csum_hi: U16,
    bg_reserved: U32,
}

const CHECKSUM_OFFSET: usize = offset_of!(RawGroupDesc, bg_checksum);

const _: () = {
    assert!(size_of::<RawGroupDesc>() == DESC_64BIT_BYTES as usize);
    assert!(offset_of!(RawGroupDesc, bg_flags) == 0x12);
    assert!(CHECKSUM_OFFSET == 0x1e);
    assert!(offset_of!(RawGroupDesc, bg_block_bitmap_hi) == DESC_MIN_BYTES as usize);
    assert!(offset_of!(RawGroupDesc, bg_inode_bitmap_csum_hi) == 0x3a);
};

/// A decoded group descriptor, both halves of every number combined.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GroupDesc {
    /// `bg_block_bitmap`: block of the block bitmap.
    pub block_bitmap: BlockNo,
    /// `bg_inode_bitmap`: block of the inode bitmap.
    pub inode_bitmap: BlockNo,
    /// `bg_inode_table`: first block of the inode table.
    pub inode_table: BlockNo,
    /// `bg_free_blocks_count`: free clusters (blocks without bigalloc).
    pub free_clusters: u32,
    /// `bg_free_inodes_count`: free inodes.
    pub free_inodes: u32,
    /// `bg_used_dirs_count`: directories.
    pub used_dirs: u32,
    /// `bg_flags`.
    pub flags: GroupFlags,
    /// `bg_exclude_bitmap`: never used by Linux.
    pub exclude_bitmap: u64,
    /// `bg_block_bitmap_csum`: raw CRC-32C, its low half with short descriptors.
    pub block_bitmap_csum: u32,
    /// `bg_inode_bitmap_csum`: raw CRC-32C, its low half with short descriptors.
    pub inode_bitmap_csum: u32,
    /// `bg_itable_unused`: inodes at the end of the table that were never used.
    pub itable_unused: u32,
    /// `bg_reserved`.
    pub reserved: u32,
}

fn wide(geometry: &Geometry) -> bool {
    geometry.desc_size >= DESC_64BIT_BYTES
}

fn join(lo: U16, hi: U16) -> u32 {
    u32::from(hi.get()) << 16 | u32::from(lo.get())
}

fn join_block(lo: U32, hi: U32) -> u64 {
    u64::from(hi.get()) << 32 | u64::from(lo.get())
}

/// Whether a bitmap or a table of `group` may lie there: in the group, or anywhere with flex_bg, and behind
/// the descriptors.
fn may_lie(geometry: &Geometry, group: GroupNo, start: BlockNo, count: u64) -> bool {
    let flex = geometry.features.incompat.contains(Incompat::FLEX_BG);
    let first = geometry.group_first_block(group).0;
    let end = first + u64::from(geometry.blocks_in_group(group));
    let primary_end = geometry.superblock_location().0 + u64::from(geometry.old_desc_blocks()) + 1;
    let inside = geometry.contains_range(start, count) && start.0 >= primary_end;
    inside && (flex || (start.0 >= first && start.0 + count <= end))
}

impl GroupDesc {
    /// Decodes the descriptor of `group` and checks it: checksum, and that bitmaps and inode
    /// table lie where they may and the counts are possible.
    ///
    /// # Errors
    /// [`FormatError::Checksum`], [`FormatError::Corrupt`], [`FormatError::Truncated`].
    pub fn decode(bytes: &[u8], geometry: &Geometry, group: GroupNo) -> Result<GroupDesc> {
        verify_checksum(bytes, geometry, group)?;
        let desc = GroupDesc::parse(bytes, geometry)?;
        desc.validate(geometry, group)?;
        Ok(desc)
    }

    /// Decodes without any check but for length; for tools that show damaged images.
    ///
    /// # Errors
    /// [`FormatError::Truncated`].
    pub fn parse(bytes: &[u8], geometry: &Geometry) -> Result<GroupDesc> {
        let raw = read_raw(bytes, geometry)?;
        Ok(GroupDesc {
            block_bitmap: BlockNo(join_block(raw.bg_block_bitmap_lo, raw.bg_block_bitmap_hi)),
            inode_bitmap: BlockNo(join_block(raw.bg_inode_bitmap_lo, raw.bg_inode_bitmap_hi)),
            inode_table: BlockNo(join_block(raw.bg_inode_table_lo, raw.bg_inode_table_hi)),
            free_clusters: join(raw.bg_free_blocks_count_lo, raw.bg_free_blocks_count_hi),
            free_inodes: join(raw.bg_free_inodes_count_lo, raw.bg_free_inodes_count_hi),
            used_dirs: join(raw.bg_used_dirs_count_lo, raw.bg_used_dirs_count_hi),
            flags: GroupFlags::from_bits_retain(raw.bg_flags.get()),
            exclude_bitmap: join_block(raw.bg_exclude_bitmap_lo, raw.bg_exclude_bitmap_hi),
            block_bitmap_csum: join(raw.bg_block_bitmap_csum_lo, raw.bg_block_bitmap_csum_hi),
            inode_bitmap_csum: join(raw.bg_inode_bitmap_csum_lo, raw.bg_inode_bitmap_csum_hi),
            itable_unused: join(raw.bg_itable_unused_lo, raw.bg_itable_unused_hi),
            reserved: raw.bg_reserved.get(),
        })
    }

    /// The inode table by a descriptor with a wrong checksum or impossible counts, if a table may lie there;
    /// for reading.
    pub fn unverified_inode_table(
        bytes: &[u8],
        geometry: &Geometry,
        group: GroupNo,
    ) -> Option<BlockNo> {
        let table = GroupDesc::parse(bytes, geometry).ok()?.inode_table;
        let blocks = u64::from(geometry.inode_table_blocks());
        may_lie(geometry, group, table, blocks).then_some(table)
    }

    fn validate(&self, geometry: &Geometry, group: GroupNo) -> Result<()> {
        let table_blocks = u64::from(geometry.inode_table_blocks());
        let places = [
            ("block bitmap", self.block_bitmap, 1),
            ("inode bitmap", self.inode_bitmap, 1),
            ("inode table", self.inode_table, table_blocks),
        ];
        for (what, start, count) in places {
            if !may_lie(geometry, group, start, count) {
                return Err(FormatError::corrupt(
                    STRUCTURE,
                    format!("group {group}: the {what} cannot lie at block {start}"),
                ));
            }
        }
        let counts = [
            ("free clusters", self.free_clusters, geometry.clusters_in_group(group)),
            ("free inodes", self.free_inodes, geometry.inodes_per_group),
            ("unused inodes", self.itable_unused, geometry.inodes_per_group),
            ("directories", self.used_dirs, geometry.inodes_per_group),
        ];
        for (what, count, max) in counts {
            if count > max {
                return Err(FormatError::corrupt(
                    STRUCTURE,
                    format!("group {group}: {count} {what}, at most {max} are possible"),
                ));
            }
        }
        Ok(())
    }

    /// Writes the descriptor of `group` into `bytes` in place and sets its checksum. Without
    /// the feature `64bit` the high halves are not stored.
    ///
    /// # Errors
    /// [`FormatError::Truncated`] when `bytes` is shorter than a descriptor.
    pub fn encode(&self, bytes: &mut [u8], geometry: &Geometry, group: GroupNo) -> Result<()> {
        let lo_hi = |value: u32| (U16::new(value as u16), U16::new((value >> 16) as u16));
        let block = |value: u64| (U32::new(value as u32), U32::new((value >> 32) as u32));
        let mut raw = read_raw(bytes, geometry)?;
        (raw.bg_block_bitmap_lo, raw.bg_block_bitmap_hi) = block(self.block_bitmap.0);
        (raw.bg_inode_bitmap_lo, raw.bg_inode_bitmap_hi) = block(self.inode_bitmap.0);
        (raw.bg_inode_table_lo, raw.bg_inode_table_hi) = block(self.inode_table.0);
        (raw.bg_exclude_bitmap_lo, raw.bg_exclude_bitmap_hi) = block(self.exclude_bitmap);
        (raw.bg_free_blocks_count_lo, raw.bg_free_blocks_count_hi) = lo_hi(self.free_clusters);
        (raw.bg_free_inodes_count_lo, raw.bg_free_inodes_count_hi) = lo_hi(self.free_inodes);
        (raw.bg_used_dirs_count_lo, raw.bg_used_dirs_count_hi) = lo_hi(self.used_dirs);
        (raw.bg_block_bitmap_csum_lo, raw.bg_block_bitmap_csum_hi) = lo_hi(self.block_bitmap_csum);
        (raw.bg_inode_bitmap_csum_lo, raw.bg_inode_bitmap_csum_hi) = lo_hi(self.inode_bitmap_csum);
        (raw.bg_itable_unused_lo, raw.bg_itable_unused_hi) = lo_hi(self.itable_unused);
        raw.bg_flags.set(self.flags.bits());
        raw.bg_reserved.set(self.reserved);
        let size = usize::from(geometry.desc_size.min(DESC_64BIT_BYTES));
        bytes[..size].copy_from_slice(&raw.as_bytes()[..size]);
        if let Some(checksum) = compute_checksum(bytes, geometry, group)? {
            bytes[CHECKSUM_OFFSET..CHECKSUM_OFFSET + 2].copy_from_slice(&checksum.to_le_bytes());
        }
        Ok(())
    }

    /// Whether a flag is set and counts: without descriptor checksums none does.
    pub fn has_flag(&self, geometry: &Geometry, flag: GroupFlags) -> bool {
        geometry.features.has_group_csum() && self.flags.contains(flag)
    }

    /// Number of inodes at the front of the table that may have been used.
    pub fn itable_used(&self, geometry: &Geometry) -> u32 {
        if !geometry.features.has_group_csum() {
            return geometry.inodes_per_group;
        }
        if self.flags.contains(GroupFlags::INODE_UNINIT) {
            return 0;
        }
        geometry.inodes_per_group.saturating_sub(self.itable_unused)
    }

    /// Checks a block bitmap against the stored checksum (no-op without `metadata_csum`).
    ///
    /// # Errors
    /// [`FormatError::Checksum`], [`FormatError::Truncated`].
    pub fn verify_block_bitmap(&self, bitmap: &[u8], geometry: &Geometry) -> Result<()> {
        match bitmap_checksum(bitmap, geometry.clusters_per_group, "block bitmap", geometry)? {
            Some(computed) => {
                FormatError::check_checksum("block bitmap", self.block_bitmap_csum, computed)
            }
            None => Ok(()),
        }
    }

    /// Takes over the checksum of a changed block bitmap (no-op without `metadata_csum`).
    ///
    /// # Errors
    /// [`FormatError::Truncated`].
    pub fn update_block_bitmap_csum(&mut self, bitmap: &[u8], geometry: &Geometry) -> Result<()> {
        let bits = geometry.clusters_per_group;
        if let Some(checksum) = bitmap_checksum(bitmap, bits, "block bitmap", geometry)? {
            self.block_bitmap_csum = checksum;
        }
        Ok(())
    }

    /// Checks an inode bitmap against the stored checksum (no-op without `metadata_csum`).
    ///
    /// # Errors
    /// [`FormatError::Checksum`], [`FormatError::Truncated`].
    pub fn verify_inode_bitmap(&self, bitmap: &[u8], geometry: &Geometry) -> Result<()> {
        match bitmap_checksum(bitmap, geometry.inodes_per_group, "inode bitmap", geometry)? {
            Some(computed) => {
                FormatError::check_checksum("inode bitmap", self.inode_bitmap_csum, computed)
            }
            None => Ok(()),
        }
    }

    /// Takes over the checksum of a changed inode bitmap (no-op without `metadata_csum`).
    ///
    /// # Errors
    /// [`FormatError::Truncated`].
    pub fn update_inode_bitmap_csum(&mut self, bitmap: &[u8], geometry: &Geometry) -> Result<()> {
        let bits = geometry.inodes_per_group;
        if let Some(checksum) = bitmap_checksum(bitmap, bits, "inode bitmap", geometry)? {
            self.inode_bitmap_csum = checksum;
        }
        Ok(())
    }
}

fn read_raw(bytes: &[u8], geometry: &Geometry) -> Result<RawGroupDesc> {
    FormatError::check_len(STRUCTURE, bytes, usize::from(geometry.desc_size))?;
    let size = if wide(geometry) { DESC_64BIT_BYTES } else { DESC_MIN_BYTES };
    let mut raw = RawGroupDesc::new_zeroed();
    raw.as_mut_bytes()[..usize::from(size)].copy_from_slice(&bytes[..usize::from(size)]);
    Ok(raw)
}

/// Checks the checksum of the descriptor of `group`, of the kind that the features call for.
///
/// # Errors
/// [`FormatError::Checksum`], [`FormatError::Truncated`].
pub fn verify_checksum(bytes: &[u8], geometry: &Geometry, group: GroupNo) -> Result<()> {
    let Some(computed) = compute_checksum(bytes, geometry, group)? else {
        return Ok(());
    };
    let stored = read_raw(bytes, geometry)?.bg_checksum.get();
    FormatError::check_checksum(STRUCTURE, u32::from(stored), u32::from(computed))
}

fn compute_checksum(bytes: &[u8], geometry: &Geometry, group: GroupNo) -> Result<Option<u16>> {
    let size = usize::from(geometry.desc_size);
    FormatError::check_len(STRUCTURE, bytes, size)?;
    let number = group.0.to_le_bytes();
    let (front, tail) = (&bytes[..CHECKSUM_OFFSET], &bytes[CHECKSUM_OFFSET + 2..size]);
    if geometry.features.has_metadata_csum() {
        let crc = checksum::crc32c(geometry.csum_seed, &number);
        let crc = checksum::crc32c(crc, front);
        let crc = checksum::crc32c(crc, &[0; 2]);
        return Ok(Some(checksum::crc32c(crc, tail) as u16));
    }
    if geometry.features.ro_compat.contains(RoCompat::GDT_CSUM) {
        // Unlike CRC-32C, this one skips its own field instead of counting it as zero.
        let crc = checksum::crc16(!0, &geometry.uuid);
        let crc = checksum::crc16(crc, &number);
        let crc = checksum::crc16(crc, front);
        return Ok(Some(checksum::crc16(crc, tail)));
    }
    Ok(None)
}

/// Checksum over the bits of a bitmap that count; the low half with short descriptors.
fn bitmap_checksum(
    bitmap: &[u8],
    bits: u32,
    structure: &'static str,
    geometry: &Geometry,
) -> Result<Option<u32>> {
    if !geometry.features.has_metadata_csum() {
        return Ok(None);
    }
    let size = bits as usize / 8;
    FormatError::check_len(structure, bitmap, size)?;
    let crc = checksum::crc32c(geometry.csum_seed, &bitmap[..size]);
    Ok(Some(if wide(geometry) { crc } else { crc & 0xffff }))
}
