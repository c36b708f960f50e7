//! From options to a superblock: sizes and counts, by the rules of mke2fs.
//!
//! Invariant: the superblock that comes out is accepted by [`Geometry::from_superblock`]; free
//! counts, inode numbers of special files and checksums are filled in later.

use fjord_format::features::{Compat, Features, Incompat};
use fjord_format::geometry::Geometry;
use fjord_format::superblock::{
    CHECKSUM_TYPE_CRC32C, DefaultMountOptions, FsFlags, FsState, RawSuperblock,
};
use fjord_format::types::{GroupNo, InodeNo};
use rand::RngCore;

use crate::error::{Result, too_small, usage};
use crate::options::MkfsOptions;

/// Groups that keep bitmaps and tables together are 1 << this.
const LOG_GROUPS_PER_FLEX: u8 = 4;
/// Spare blocks that a short last group must have to be worth keeping.
const LAST_GROUP_SPARE_BLOCKS: u64 = 50;
const DEFAULT_INODE_SIZE: u16 = 256;
const HASH_HALF_MD4: u8 = 1;
const MIB: u64 = 1 << 20;

/// Block size and bytes per inode for an image of this size, as `mke2fs.conf` has them.
fn usage_type(size_bytes: u64) -> (u32, u32) {
    match size_bytes / MIB {
        0..3 => (1024, 8192),
        3..512 => (1024, 4096),
        512..0x40_0000 => (4096, 16384),
        0x40_0000..0x100_0000 => (4096, 32768),
        _ => (4096, 65536),
    }
}

/// The numbers that decide the layout.
struct Sizes {
    block_size: u32,
    inode_size: u16,
    block_count: u64,
    blocks_per_group: u32,
    inodes_per_group: u32,
    group_count: u32,
    reserved_gdt_blocks: u32,
}

/// Makes the superblock of a new file system of `size_bytes`.
pub(crate) fn superblock(
    options: &MkfsOptions,
    mut features: Features,
    size_bytes: u64,
    now_seconds: u64,
) -> Result<RawSuperblock> {
    let (usual_block_size, _) = usage_type(size_bytes);
    let block_size = options.block_size.unwrap_or(usual_block_size);
    if !block_size.is_power_of_two() || !(1024..=65536).contains(&block_size) {
        return Err(usage(format!("block size {block_size}: 1024 to 65536, a power of two")));
    }
    if size_bytes / u64::from(block_size) > u64::from(u32::MAX) {
        if !features.incompat.contains(Incompat::BIT64) {
            return Err(usage("more than 2^32 blocks need the feature 64bit"));
        }
        // Its descriptors could never reach such block numbers.
        features.compat.remove(Compat::RESIZE_INODE);
    }
    let sizes = sizes(options, &features, size_bytes, block_size)?;
    let mut sb = RawSuperblock::empty();
    fill_fixed(&mut sb, &features);
    fill_sizes(&mut sb, &features, &sizes);
    fill_options(&mut sb, options, &features, now_seconds)?;
    sb.update_checksum();
    Ok(sb)
}

fn inode_size(options: &MkfsOptions, block_size: u32) -> Result<u16> {
    let size = options.inode_size.unwrap_or(DEFAULT_INODE_SIZE);
    if !size.is_power_of_two() || size < 128 || u32::from(size) > block_size {
        return Err(usage(format!("inode size {size}: 128 to the block size, a power of two")));
    }
    Ok(size)
}

/// The smallest image that holds the structures and a directory.
const SIZE_BYTES_MIN: u64 = 128 << 10;
/// 16 TiB in blocks of 4 KiB.
const BLOCK_COUNT_MAX: u64 = 1 << 32;

fn sizes(
    options: &MkfsOptions,
    features: &Features,
    size_bytes: u64,
    block_size: u32,
) -> Result<Sizes> {
    let (_, usual_ratio) = usage_type(size_bytes);
    let ratio = options.inode_ratio.unwrap_or(usual_ratio).max(block_size);
    let mut block_count = size_bytes / u64::from(block_size);
    if size_bytes < SIZE_BYTES_MIN {
        return Err(too_small(format!(
            "{size_bytes} bytes are too few for a file system; use at least {} KiB",
            SIZE_BYTES_MIN >> 10
        )));
    }
    if block_count > BLOCK_COUNT_MAX {
        let larger = if block_size < 4096 { "larger blocks (-b 4096) or " } else { "" };
        return Err(usage(format!(
            "{block_count} blocks of {block_size} bytes are more than {BLOCK_COUNT_MAX}; take {larger}\
             a smaller image"
        )));
    }
    let inodes = match options.inode_count {
        Some(count) => u64::from(count),
        None => block_count * u64::from(block_size) / u64::from(ratio),
    };
    let inodes = inodes.clamp(u64::from(InodeNo::GOOD_OLD_FIRST.0) + 1, u64::from(u32::MAX));
    let inode_size = inode_size(options, block_size)?;
    let mut blocks_per_group = (block_size * 8).min(65528);
    let first = u64::from(block_size == 1024);
    let too_few = || too_small(format!("{size_bytes} bytes are too few for a file system"));
    loop {
        if block_count <= first {
            return Err(too_few());
        }
        let groups = (block_count - first).div_ceil(u64::from(blocks_per_group));
        let group_count = u32::try_from(groups).map_err(|_| usage("too many block groups"))?;
        let per_group = inodes.div_ceil(groups);
        if per_group > u64::from(block_size) * 8 {
            // A bitmap block has too few bits: use more, smaller groups.
            if blocks_per_group < 256 {
                return Err(too_small(format!("{inodes} inodes are too many for this size")));
            }
            blocks_per_group -= 8;
            block_count = size_bytes / u64::from(block_size);
            continue;
        }
        let inodes_per_group = fit_inodes(per_group as u32, block_size, inode_size, group_count);
        let mut sizes = Sizes {
            block_size,
            inode_size,
            block_count,
            blocks_per_group,
            inodes_per_group,
            group_count,
            reserved_gdt_blocks: 0,
        };
        sizes.reserved_gdt_blocks = reserved_gdt_blocks(features, &sizes);
        let rest = (block_count - first) % u64::from(blocks_per_group);
        let overhead = last_group_overhead(features, &sizes)?;
        if rest == 0 || rest >= overhead + LAST_GROUP_SPARE_BLOCKS {
            return Ok(sizes);
        }
        if group_count == 1 {
            if rest < overhead {
                return Err(too_few());
            }
            return Ok(sizes);
        }
        block_count -= rest;
    }
}

/// Inodes per group so that they fill whole table blocks and whole bitmap bytes, and their sum
/// has 32 bits.
fn fit_inodes(wanted: u32, block_size: u32, inode_size: u16, group_count: u32) -> u32 {
    let per_block = block_size / u32::from(inode_size);
    let mut per_group = wanted;
    loop {
        let filled = per_group.div_ceil(per_block) * per_block;
        let filled = (filled / 8 * 8).clamp(8, block_size * 8).max(per_block);
        if u64::from(filled) * u64::from(group_count) <= u64::from(u32::MAX) || per_group <= 8 {
            return filled;
        }
        per_group -= 1;
    }
}

fn desc_size(features: &Features) -> u32 {
    if features.incompat.contains(Incompat::BIT64) { 64 } else { 32 }
}

/// Room for descriptors of 1024 times the blocks, not more than one block can point to.
fn reserved_gdt_blocks(features: &Features, sizes: &Sizes) -> u32 {
    if !features.compat.contains(Compat::RESIZE_INODE) {
        return 0;
    }
    let per_block = u64::from(sizes.block_size / desc_size(features));
    let limit = u64::from(u32::MAX);
    let grown = if sizes.block_count < limit / 1024 { sizes.block_count * 1024 } else { limit };
    let first = u64::from(sizes.block_size == 1024);
    let groups = (grown - first).div_ceil(u64::from(sizes.blocks_per_group));
    let now = u64::from(sizes.group_count).div_ceil(per_block);
    let reserved = groups.div_ceil(per_block).saturating_sub(now);
    reserved.min(u64::from(sizes.block_size / 4)) as u32
}

/// Metadata blocks that the last group needs when it keeps its own.
fn last_group_overhead(features: &Features, sizes: &Sizes) -> Result<u64> {
    let mut sb = RawSuperblock::empty();
    fill_fixed(&mut sb, features);
    // Only the rules for backups are asked; a layout of full groups always answers them.
    let first = u64::from(sizes.block_size == 1024);
    let full = u64::from(sizes.group_count) * u64::from(sizes.blocks_per_group) + first;
    let padded = Sizes { block_count: full, ..*sizes };
    fill_sizes(&mut sb, features, &padded);
    sb.update_checksum();
    let geometry = Geometry::from_superblock(&sb)?;
    let last = GroupNo(geometry.group_count - 1);
    let tables = 2 + u64::from(geometry.inode_table_blocks());
    Ok(tables + u64::from(geometry.base_metadata_blocks(last)))
}

fn fill_fixed(sb: &mut RawSuperblock, features: &Features) {
    sb.set_features(features);
    sb.s_rev_level.set(1);
    sb.s_max_mnt_count.set(u16::MAX);
    sb.s_errors.set(1);
    sb.set_state(FsState::VALID);
    sb.s_first_ino.set(InodeNo::GOOD_OLD_FIRST.0);
    sb.s_def_hash_version = HASH_HALF_MD4;
    sb.s_flags.set(FsFlags::SIGNED_HASH.bits());
    let mount_options = DefaultMountOptions::XATTR_USER | DefaultMountOptions::ACL;
    sb.s_default_mount_opts.set(mount_options.bits());
    if features.has_metadata_csum() {
        sb.s_checksum_type = CHECKSUM_TYPE_CRC32C;
    }
    if features.incompat.contains(Incompat::FLEX_BG) {
        sb.s_log_groups_per_flex = LOG_GROUPS_PER_FLEX;
    }
    if features.incompat.contains(Incompat::BIT64) {
        sb.s_desc_size.set(desc_size(features) as u16);
    }
}

fn fill_sizes(sb: &mut RawSuperblock, features: &Features, sizes: &Sizes) {
    let log_block_size = sizes.block_size.ilog2() - 10;
    sb.s_log_block_size.set(log_block_size);
    sb.s_log_cluster_size.set(log_block_size);
    sb.s_first_data_block.set(u32::from(sizes.block_size == 1024));
    sb.set_blocks_count(sizes.block_count);
    sb.s_blocks_per_group.set(sizes.blocks_per_group);
    sb.s_clusters_per_group.set(sizes.blocks_per_group);
    sb.s_inodes_per_group.set(sizes.inodes_per_group);
    // `fit_inodes` keeps the product in 32 bits.
    sb.s_inodes_count.set(sizes.inodes_per_group.saturating_mul(sizes.group_count));
    sb.s_inode_size.set(sizes.inode_size);
    sb.s_reserved_gdt_blocks.set(sizes.reserved_gdt_blocks as u16);
    if sizes.inode_size > 128 {
        sb.s_min_extra_isize.set(fjord_format::inode::EXTRA_ISIZE_KNOWN);
        sb.s_want_extra_isize.set(fjord_format::inode::EXTRA_ISIZE_KNOWN);
    }
    if features.compat.contains(Compat::SPARSE_SUPER2) && sizes.group_count > 1 {
        sb.s_backup_bgs[0].set(1);
        let last = sizes.group_count - 1;
        sb.s_backup_bgs[1].set(if last > 1 { last } else { 0 });
    }
}

fn fill_options(
    sb: &mut RawSuperblock,
    options: &MkfsOptions,
    features: &Features,
    now_seconds: u64,
) -> Result<()> {
    if options.label.len() > sb.s_volume_name.len() || options.label.contains(&0) {
        return Err(usage("a label has at most 16 bytes, none of them zero"));
    }
    sb.s_volume_name[..options.label.len()].copy_from_slice(&options.label);
    if !(0.0..=50.0).contains(&options.reserved_percent) {
        return Err(usage("between 0 and 50 percent of the blocks can be reserved"));
    }
    let reserved = sb.blocks_count() as f64 * options.reserved_percent / 100.0;
    sb.set_r_blocks_count(reserved as u64);
    sb.s_uuid = options.uuid.unwrap_or_else(random_uuid);
    let seed = options.hash_seed.unwrap_or_else(random_uuid);
    for (word, bytes) in sb.s_hash_seed.iter_mut().zip(seed.as_chunks::<4>().0) {
        word.set(u32::from_le_bytes(*bytes));
    }
    if features.incompat.contains(Incompat::CSUM_SEED) {
        sb.s_checksum_seed.set(fjord_format::checksum::uuid_seed(&sb.s_uuid));
    }
    sb.set_mkfs_time_seconds(now_seconds);
    sb.set_wtime_seconds(now_seconds);
    sb.set_lastcheck_seconds(now_seconds);
    Ok(())
}

/// A UUID of version 4.
fn random_uuid() -> [u8; 16] {
    let mut uuid = [0; 16];
    rand::rng().fill_bytes(&mut uuid);
    uuid[6] = uuid[6] & 0x0f | 0x40;
    uuid[8] = uuid[8] & 0x3f | 0x80;
    uuid
}
