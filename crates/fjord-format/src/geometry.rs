//! The layout that a superblock implies, validated once and then trusted.
//!
//! Invariants of a [`Geometry`]: block size 1 to 64 KiB, inode and descriptor sizes powers of
//! two that fit a block, every count non-zero and consistent with the others, bitmaps of a
//! group fit one block, `group_count * inodes_per_group == inode_count`, and the last group is
//! not empty. All arithmetic on it that takes numbers from disk is checked.

use crate::error::{FormatError, Result};
use crate::features::{Compat, Features, Incompat, RoCompat};
use crate::superblock::{OS_HURD, OS_LINUX, RawSuperblock};
use crate::types::{BlockNo, GroupNo, InodeNo};

const STRUCTURE: &str = "superblock";

/// Smallest block size in bytes.
pub const BLOCK_SIZE_MIN_BYTES: u32 = 1024;
/// Largest block size in bytes.
pub const BLOCK_SIZE_MAX_BYTES: u32 = 65536;
/// Size of an inode without extra fields, in bytes.
pub const GOOD_OLD_INODE_BYTES: u16 = 128;
/// Size of a group descriptor without the feature `64bit`, in bytes.
pub const DESC_MIN_BYTES: u16 = 32;
/// Size of a group descriptor as mke2fs makes it with the feature `64bit`, in bytes.
pub const DESC_64BIT_BYTES: u16 = 64;

/// Derived layout of a file system.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Geometry {
    /// Block size in bytes.
    pub block_size: u32,
    /// Block size as a power of two.
    pub block_size_bits: u32,
    /// Blocks per cluster; 1 without bigalloc.
    pub cluster_ratio: u32,
    /// `cluster_ratio` as a power of two.
    pub cluster_ratio_bits: u32,
    /// Blocks of the file system.
    pub block_count: u64,
    /// Block that group 0 starts at.
    pub first_data_block: BlockNo,
    /// Blocks per group.
    pub blocks_per_group: u32,
    /// Clusters per group: the bits of a block bitmap that count.
    pub clusters_per_group: u32,
    /// Inodes per group: the bits of an inode bitmap that count.
    pub inodes_per_group: u32,
    /// Inodes of the file system.
    pub inode_count: u32,
    /// First inode for files of users.
    pub first_inode: InodeNo,
    /// Groups of the file system.
    pub group_count: u32,
    /// Inode size in bytes.
    pub inode_size: u16,
    /// Extra bytes that a new inode gets (0 with 128-byte inodes).
    pub want_extra_isize: u16,
    /// Group-descriptor size in bytes.
    pub desc_size: u16,
    /// Descriptors per block.
    pub descs_per_block: u32,
    /// Blocks of one copy of all descriptors.
    pub desc_block_count: u32,
    /// Blocks after each copy of the descriptors kept for growth.
    pub reserved_gdt_blocks: u32,
    /// First meta block group in units of descriptor blocks (meaningful with meta_bg).
    pub first_meta_bg: u32,
    /// Groups with backups under sparse_super2; 0 for none.
    pub backup_groups: [u32; 2],
    /// Groups per flex group; 1 without flex_bg.
    pub groups_per_flex: u32,
    /// Seed of all metadata checksums.
    pub csum_seed: u32,
    /// UUID, which the CRC-16 of descriptors covers.
    pub uuid: [u8; 16],
    /// Feature bits.
    pub features: Features,
    /// Made by the Hurd, which has a translator's block where Linux has the inode's version.
    pub is_hurd: bool,
    /// Inode checksums can be relied on: Linux neither checks nor writes those of images that another
    /// system made.
    pub has_checked_inodes: bool,
}

/// Where an inode lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InodeLocation {
    /// The inode's group.
    pub group: GroupNo,
    /// Index inside the group: its bit in the inode bitmap.
    pub index: u32,
    /// Block inside the group's inode table.
    pub table_block: u32,
    /// Where the inode starts inside that block, in bytes.
    pub offset_bytes: u32,
}

fn corrupt(detail: impl Into<String>) -> FormatError {
    FormatError::corrupt(STRUCTURE, detail)
}

fn ensure(condition: bool, detail: impl FnOnce() -> String) -> Result<()> {
    if condition { Ok(()) } else { Err(corrupt(detail())) }
}

impl Geometry {
    /// Validates the superblock (its checksum too) and derives the layout.
    ///
    /// Whether fjord supports the features is not asked here.
    ///
    /// # Errors
    /// [`FormatError::Checksum`], or [`FormatError::Corrupt`] with the field that is wrong.
    pub fn from_superblock(sb: &RawSuperblock) -> Result<Geometry> {
        let features = sb.features();
        if features.incompat.contains(Incompat::JOURNAL_DEV) {
            // Such a device has no groups to derive anything from.
            return Err(FormatError::Incompatible { feature: "journal_dev".to_owned() });
        }
        sb.verify_checksum()?;
        let (block_size_bits, cluster_ratio_bits) = sizes(sb, &features)?;
        let block_size = 1u32 << block_size_bits;
        let cluster_ratio = 1u32 << cluster_ratio_bits;
        let (clusters_per_group, blocks_per_group) =
            group_sizes(sb, &features, block_size, cluster_ratio)?;
        let (inode_size, first_inode, want_extra_isize) = inode_sizes(sb, &features, block_size)?;
        let desc_size = desc_size(sb, &features, block_size)?;
        let descs_per_block = block_size / u32::from(desc_size);
        let group_count = group_count(sb, blocks_per_group, descs_per_block)?;
        let inodes_per_group = inodes_per_group(sb, block_size, inode_size, group_count)?;
        let reserved_gdt_blocks = u32::from(sb.s_reserved_gdt_blocks.get());
        ensure(reserved_gdt_blocks <= block_size / 4, || {
            format!("s_reserved_gdt_blocks is {reserved_gdt_blocks}")
        })?;
        let groups_per_flex = groups_per_flex(sb, &features);
        let geometry = Geometry {
            block_size,
            block_size_bits,
            cluster_ratio,
            cluster_ratio_bits,
            block_count: sb.blocks_count(),
            first_data_block: BlockNo(u64::from(sb.s_first_data_block.get())),
            blocks_per_group,
            clusters_per_group,
            inodes_per_group,
            inode_count: sb.s_inodes_count.get(),
            first_inode,
            group_count,
            inode_size,
            want_extra_isize,
            desc_size,
            descs_per_block,
            desc_block_count: group_count.div_ceil(descs_per_block),
            reserved_gdt_blocks,
            first_meta_bg: sb.s_first_meta_bg.get(),
            backup_groups: sb.s_backup_bgs.map(|group| group.get()),
            groups_per_flex,
            csum_seed: sb.checksum_seed(),
            uuid: sb.s_uuid,
            features,
            is_hurd: sb.s_creator_os.get() == OS_HURD,
            has_checked_inodes: features.has_metadata_csum() && sb.s_creator_os.get() == OS_LINUX,
        };
        geometry.check_fixed_metadata_fits()?;
        Ok(geometry)
    }

    /// The superblock and descriptors of group 0 must leave room in their group.
    fn check_fixed_metadata_fits(&self) -> Result<()> {
        let base = u64::from(self.base_metadata_blocks(GroupNo(0)));
        let room = u64::from(self.blocks_in_group(GroupNo(0)));
        ensure(base < room, || {
            format!("descriptors take {base} blocks of a first group that has {room}")
        })?;
        let last = self.superblock_location().0 + u64::from(self.old_desc_blocks());
        ensure(last < self.block_count, || "the descriptors reach past the end".to_owned())
    }

    /// Whether block and cluster are the same.
    pub fn is_clustered(&self) -> bool {
        self.cluster_ratio > 1
    }

    /// Blocks of one group's inode table.
    pub fn inode_table_blocks(&self) -> u32 {
        self.inodes_per_group.div_ceil(self.inodes_per_block())
    }

    /// Inodes in one block of an inode table.
    pub fn inodes_per_block(&self) -> u32 {
        self.block_size / u32::from(self.inode_size)
    }

    /// The block that holds the primary superblock.
    pub fn superblock_location(&self) -> BlockNo {
        BlockNo(u64::from(self.block_size == BLOCK_SIZE_MIN_BYTES))
    }

    /// Whether the block is one that data or metadata may lie in: after the first data block
    /// and before the end.
    pub fn contains(&self, block: BlockNo) -> bool {
        block >= self.first_data_block && block.0 < self.block_count
    }

    /// Whether all of `count` blocks from `start` lie in the file system.
    pub fn contains_range(&self, start: BlockNo, count: u64) -> bool {
        start >= self.first_data_block
            && start.0.checked_add(count).is_some_and(|end| end <= self.block_count)
    }

    /// Whether this is the number of an inode of the file system.
    pub fn contains_inode(&self, ino: InodeNo) -> bool {
        ino.0 >= 1 && ino.0 <= self.inode_count
    }

    /// First block of the group, which must be below [`Geometry::group_count`].
    pub fn group_first_block(&self, group: GroupNo) -> BlockNo {
        BlockNo(self.first_data_block.0 + u64::from(group.0) * u64::from(self.blocks_per_group))
    }

    /// Blocks in the group; the last group may be shorter. 0 for a group that does not exist.
    pub fn blocks_in_group(&self, group: GroupNo) -> u32 {
        let left = self.block_count.saturating_sub(self.group_first_block(group).0);
        left.min(u64::from(self.blocks_per_group)) as u32
    }

    /// Clusters in the group: the bits of its block bitmap that stand for blocks.
    pub fn clusters_in_group(&self, group: GroupNo) -> u32 {
        self.blocks_in_group(group).div_ceil(self.cluster_ratio)
    }

    /// The group a block lies in, or `None` when it lies outside the file system.
    pub fn group_of_block(&self, block: BlockNo) -> Option<GroupNo> {
        self.contains(block).then(|| {
            GroupNo(((block.0 - self.first_data_block.0) / u64::from(self.blocks_per_group)) as u32)
        })
    }

    /// The bit of a block's cluster in the block bitmap of its group.
    pub fn cluster_in_group(&self, block: BlockNo) -> Option<(GroupNo, u32)> {
        let group = self.group_of_block(block)?;
        let offset = (block.0 - self.group_first_block(group).0) as u32;
        Some((group, offset >> self.cluster_ratio_bits))
    }

    /// First block of the cluster that bit `cluster` of the group's block bitmap stands for.
    pub fn cluster_first_block(&self, group: GroupNo, cluster: u32) -> BlockNo {
        BlockNo(self.group_first_block(group).0 + (u64::from(cluster) << self.cluster_ratio_bits))
    }

    /// The group an inode lies in, or `None` when there is no such inode.
    pub fn group_of_inode(&self, ino: InodeNo) -> Option<GroupNo> {
        self.inode_location(ino).map(|location| location.group)
    }

    /// Where the inode lies, or `None` when there is no such inode.
    pub fn inode_location(&self, ino: InodeNo) -> Option<InodeLocation> {
        if !self.contains_inode(ino) {
            return None;
        }
        let index = (ino.0 - 1) % self.inodes_per_group;
        Some(InodeLocation {
            group: GroupNo((ino.0 - 1) / self.inodes_per_group),
            index,
            table_block: index / self.inodes_per_block(),
            offset_bytes: index % self.inodes_per_block() * u32::from(self.inode_size),
        })
    }

    /// The inode that bit `index` of the group's inode bitmap stands for, or `None` when out
    /// of range.
    pub fn inode_at(&self, group: GroupNo, index: u32) -> Option<InodeNo> {
        (group.0 < self.group_count && index < self.inodes_per_group)
            .then(|| InodeNo(group.0 * self.inodes_per_group + index + 1))
    }

    /// First group of the flex group that the group belongs to.
    pub fn flex_first_group(&self, group: GroupNo) -> GroupNo {
        GroupNo(group.0 / self.groups_per_flex * self.groups_per_flex)
    }

    /// Whether the group holds a copy of the superblock.
    pub fn group_has_super(&self, group: GroupNo) -> bool {
        let number = group.0;
        if number == 0 {
            return true;
        }
        if self.features.compat.contains(Compat::SPARSE_SUPER2) {
            return self.backup_groups.contains(&number);
        }
        if number == 1 || !self.features.ro_compat.contains(RoCompat::SPARSE_SUPER) {
            return true;
        }
        number % 2 == 1 && [3, 5, 7].into_iter().any(|base| is_power_of(number, base))
    }

    fn has_meta_bg(&self) -> bool {
        self.features.incompat.contains(Incompat::META_BG)
    }

    /// Descriptor blocks that lie after every superblock copy (all of them without meta_bg).
    pub fn old_desc_blocks(&self) -> u32 {
        if self.has_meta_bg() {
            self.first_meta_bg.min(self.desc_block_count)
        } else {
            self.desc_block_count
        }
    }

    fn is_in_meta_bg(&self, desc_block: u32) -> bool {
        self.has_meta_bg() && desc_block >= self.first_meta_bg
    }

    /// Block of the primary copy of descriptor block `index`, or `None` when `index` is not
    /// below [`Geometry::desc_block_count`].
    pub fn desc_block_location(&self, index: u32) -> Option<BlockNo> {
        if index >= self.desc_block_count {
            return None;
        }
        if !self.is_in_meta_bg(index) {
            return self.superblock_location().checked_add(u64::from(index) + 1);
        }
        Some(self.meta_bg_desc_block(GroupNo(index * self.descs_per_block)))
    }

    /// Block of the descriptor copy that a meta block group keeps in `group`.
    fn meta_bg_desc_block(&self, group: GroupNo) -> BlockNo {
        let first = self.first_usable_block(group).0;
        BlockNo(first + u64::from(self.group_has_super(group)))
    }

    /// The group's first block, past the boot block that a 1 KiB bigalloc image begins with.
    fn first_usable_block(&self, group: GroupNo) -> BlockNo {
        self.group_first_block(group).max(if group.0 == 0 {
            self.superblock_location()
        } else {
            BlockNo(0)
        })
    }

    /// Blocks of all backups of descriptor block `index`, nearest first.
    pub fn desc_block_backups(&self, index: u32) -> Vec<BlockNo> {
        if index >= self.desc_block_count {
            return Vec::new();
        }
        if !self.is_in_meta_bg(index) {
            return self
                .old_desc_backup_groups()
                .map(|group| BlockNo(self.group_first_block(group).0 + 1 + u64::from(index)))
                .filter(|&block| self.contains(block))
                .collect();
        }
        let first = index * self.descs_per_block;
        [1, self.descs_per_block - 1]
            .into_iter()
            .filter_map(|offset| first.checked_add(offset))
            .filter(|&group| group < self.group_count)
            .map(|group| self.meta_bg_desc_block(GroupNo(group)))
            .collect()
    }

    /// Groups with backups of the descriptor blocks that lie behind the superblock, in ascending
    /// order: those with a backup of the superblock, but for groups of a meta block group.
    pub fn old_desc_backup_groups(&self) -> impl Iterator<Item = GroupNo> + '_ {
        self.super_backup_groups()
            .filter(|group| !self.is_in_meta_bg(group.0 / self.descs_per_block))
    }

    /// Groups with a backup of the superblock, in ascending order.
    ///
    /// Cheap to walk with sparse_super: candidates are powers, not all groups.
    pub fn super_backup_groups(&self) -> impl Iterator<Item = GroupNo> + '_ {
        let sparse = self.features.compat.contains(Compat::SPARSE_SUPER2)
            || self.features.ro_compat.contains(RoCompat::SPARSE_SUPER);
        let mut candidates = Vec::new();
        if sparse {
            candidates.push(1);
            candidates.extend(self.backup_groups);
            for base in [3u64, 5, 7] {
                let powers = std::iter::successors(Some(base), move |p| p.checked_mul(base));
                let in_range = powers.take_while(|&p| p < u64::from(self.group_count));
                candidates.extend(in_range.map(|p| p as u32));
            }
            candidates.sort_unstable();
            candidates.dedup();
        }
        let dense = if sparse { 1..1 } else { 1..self.group_count };
        candidates
            .into_iter()
            .chain(dense)
            .filter(|&group| group != 0 && group < self.group_count)
            .map(GroupNo)
            .filter(|&group| self.group_has_super(group))
    }

    /// Where the descriptor of `group` lies: index of the descriptor block and offset in bytes
    /// inside it. `None` when there is no such group.
    pub fn desc_location(&self, group: GroupNo) -> Option<(u32, u32)> {
        (group.0 < self.group_count).then(|| {
            (
                group.0 / self.descs_per_block,
                group.0 % self.descs_per_block * u32::from(self.desc_size),
            )
        })
    }

    /// Blocks at the start of the group taken by superblock copy, descriptors and blocks
    /// reserved for descriptors (and the boot block where group 0 starts with it).
    pub fn base_metadata_blocks(&self, group: GroupNo) -> u32 {
        let has_super = u32::from(self.group_has_super(group));
        let boot = (self.first_usable_block(group).0 - self.group_first_block(group).0) as u32;
        if !self.is_in_meta_bg(group.0 / self.descs_per_block) {
            let descriptors = self.old_desc_blocks().saturating_add(self.reserved_gdt_blocks);
            return boot + has_super + has_super * descriptors;
        }
        let place = group.0 % self.descs_per_block;
        let holds = place == 0 || place == 1 || place == self.descs_per_block - 1;
        boot + has_super + u32::from(holds)
    }

    /// Largest size in bytes of a file mapped by extents: block indices have 32 bits, the last
    /// one is not used.
    pub fn extent_file_size_max_bytes(&self) -> u64 {
        u64::from(u32::MAX) << self.block_size_bits
    }
}

fn is_power_of(mut number: u32, base: u32) -> bool {
    while number > 1 && number.is_multiple_of(base) {
        number /= base;
    }
    number == 1
}

/// Block size and cluster ratio, both as powers of two.
fn sizes(sb: &RawSuperblock, features: &Features) -> Result<(u32, u32)> {
    let log_block = sb.s_log_block_size.get();
    ensure(log_block <= 6, || format!("s_log_block_size is {log_block}"))?;
    let log_cluster = sb.s_log_cluster_size.get();
    let cluster_ratio_bits = if features.ro_compat.contains(RoCompat::BIGALLOC) {
        ensure((log_block..=20).contains(&log_cluster), || {
            format!("s_log_cluster_size is {log_cluster} where s_log_block_size is {log_block}")
        })?;
        log_cluster - log_block
    } else {
        ensure(log_cluster == log_block, || {
            format!("s_log_cluster_size is {log_cluster}, but blocks are not clustered")
        })?;
        0
    };
    Ok((log_block + 10, cluster_ratio_bits))
}

/// Clusters and blocks per group.
fn group_sizes(
    sb: &RawSuperblock,
    features: &Features,
    block_size: u32,
    cluster_ratio: u32,
) -> Result<(u32, u32)> {
    let blocks = sb.s_blocks_per_group.get();
    let stored = sb.s_clusters_per_group.get();
    let clustered = features.ro_compat.contains(RoCompat::BIGALLOC);
    let clusters = if clustered { stored } else { blocks };
    ensure(clusters != 0 && clusters <= block_size * 8 && clusters.is_multiple_of(8), || {
        format!("s_clusters_per_group is {clusters} with blocks of {block_size} bytes")
    })?;
    ensure(stored == clusters && clusters.checked_mul(cluster_ratio) == Some(blocks), || {
        format!("s_blocks_per_group is {blocks}, but a group has {stored} clusters")
    })?;
    Ok((clusters, blocks))
}

/// Inode size, first inode of users and wanted extra size.
fn inode_sizes(
    sb: &RawSuperblock,
    features: &Features,
    block_size: u32,
) -> Result<(u16, InodeNo, u16)> {
    if !sb.has_features() {
        return Ok((GOOD_OLD_INODE_BYTES, InodeNo::GOOD_OLD_FIRST, 0));
    }
    let size = sb.s_inode_size.get();
    let fits = size >= GOOD_OLD_INODE_BYTES && u32::from(size) <= block_size;
    ensure(fits && size.is_power_of_two(), || format!("s_inode_size is {size}"))?;
    let first = InodeNo(sb.s_first_ino.get());
    ensure(first >= InodeNo::GOOD_OLD_FIRST, || format!("s_first_ino is {first}"))?;
    let room = size - GOOD_OLD_INODE_BYTES;
    let mut want = if room == 0 { 0 } else { crate::inode::EXTRA_ISIZE_KNOWN };
    if room != 0 && features.ro_compat.contains(RoCompat::EXTRA_ISIZE) {
        for asked in [sb.s_want_extra_isize.get(), sb.s_min_extra_isize.get()] {
            ensure(asked <= room && asked.is_multiple_of(4), || {
                format!("s_want_extra_isize or s_min_extra_isize is {asked}")
            })?;
            want = want.max(asked);
        }
    }
    Ok((size, first, want))
}

fn desc_size(sb: &RawSuperblock, features: &Features, block_size: u32) -> Result<u16> {
    if !features.incompat.contains(Incompat::BIT64) {
        return Ok(DESC_MIN_BYTES);
    }
    let size = sb.s_desc_size.get();
    let fits = size >= DESC_64BIT_BYTES && u32::from(size) <= block_size.min(1024);
    ensure(fits && size.is_power_of_two(), || format!("s_desc_size is {size}"))?;
    Ok(size)
}

fn group_count(sb: &RawSuperblock, blocks_per_group: u32, descs_per_block: u32) -> Result<u32> {
    let blocks = sb.blocks_count();
    let log_block = sb.s_log_block_size.get();
    ensure(
        blocks.checked_shl(log_block + 10).is_some_and(|b| b >> (log_block + 10) == blocks),
        || format!("the block count is {blocks}"),
    )?;
    let first = u64::from(sb.s_first_data_block.get());
    ensure(first < blocks, || format!("s_first_data_block is {first} of {blocks} blocks"))?;
    let clustered = sb.features().ro_compat.contains(RoCompat::BIGALLOC);
    let expected = u64::from(log_block == 0 && !clustered);
    ensure(first == expected || (clustered && first <= 1 && log_block == 0), || {
        format!("s_first_data_block is {first}, where {expected} belongs")
    })?;
    let groups = (blocks - first).div_ceil(u64::from(blocks_per_group));
    let limit = (1u64 << 32) - u64::from(descs_per_block);
    ensure(groups <= limit, || format!("there would be {groups} groups"))?;
    Ok(groups as u32)
}

fn inodes_per_group(
    sb: &RawSuperblock,
    block_size: u32,
    inode_size: u16,
    group_count: u32,
) -> Result<u32> {
    let per_group = sb.s_inodes_per_group.get();
    let per_block = block_size / u32::from(inode_size);
    ensure(
        per_group >= per_block && per_group <= block_size * 8 && per_group.is_multiple_of(8),
        || format!("s_inodes_per_group is {per_group}"),
    )?;
    let count = sb.s_inodes_count.get();
    ensure(u64::from(per_group) * u64::from(group_count) == u64::from(count), || {
        format!("s_inodes_count is {count} with {group_count} groups of {per_group}")
    })?;
    let first = sb.s_first_ino.get();
    ensure(!sb.has_features() || first <= count, || {
        format!("s_first_ino is {first} of {count} inodes")
    })?;
    Ok(per_group)
}

fn groups_per_flex(sb: &RawSuperblock, features: &Features) -> u32 {
    if !features.incompat.contains(Incompat::FLEX_BG) {
        return 1;
    }
    let log = sb.s_log_groups_per_flex;
    // As Linux does: a size that cannot be means that groups are not packed.
    if log < 32 { 1 << log } else { 1 }
}
