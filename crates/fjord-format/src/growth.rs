//! Growth: the layout that a larger block count gives, and where the metadata of new groups lies.
//!
//! Owns the limits of growth and the contents of new groups; pure computation. Invariants: groups
//! that exist keep their fixed metadata, since a new descriptor block takes the place of one that
//! was reserved; the metadata of new groups lies in new groups, so that it can be written while the
//! old file system is in use; a step ends where a descriptor block is full at the latest.

use crate::bitmap;
use crate::error::{FormatError, Result};
use crate::features::{Compat, Incompat};
use crate::geometry::Geometry;
use crate::group::{GroupDesc, GroupFlags};
use crate::types::{BlockNo, GroupNo};

/// Spare blocks that a short last group must have to be worth its metadata, as in mke2fs.
const LAST_GROUP_SPARE_BLOCKS: u64 = 50;

/// What keeps a file system from more blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GrowthLimit {
    /// There is no room for more group descriptors: neither blocks reserved for them
    /// (`resize_inode`) nor the feature `meta_bg`.
    Descriptors,
    /// Block numbers have 32 bits: without the feature `64bit`, and in the resize inode.
    BlockNumbers,
    /// Inode numbers have 32 bits.
    InodeNumbers,
}

/// The most blocks that the file system can have without a change of its features, and what limits
/// it.
pub fn block_count_max(geo: &Geometry) -> (u64, GrowthLimit) {
    let per_group = u64::from(geo.blocks_per_group);
    let of_groups =
        |groups: u64| geo.first_data_block.0.saturating_add(groups.saturating_mul(per_group));
    let narrow = !geo.features.incompat.contains(Incompat::BIT64) || has_resize_inode(geo);
    let by_block_numbers = match narrow {
        true => u64::from(u32::MAX),
        // As many groups as there are group numbers.
        false => of_groups((1 << 32) - u64::from(geo.descs_per_block)),
    };
    let limits = [
        (of_groups(descriptors_max(geo)), GrowthLimit::Descriptors),
        (
            of_groups(u64::from(u32::MAX) / u64::from(geo.inodes_per_group)),
            GrowthLimit::InodeNumbers,
        ),
        (by_block_numbers, GrowthLimit::BlockNumbers),
    ];
    limits.into_iter().min_by_key(|(blocks, _)| *blocks).unwrap_or((0, GrowthLimit::Descriptors))
}

fn has_resize_inode(geo: &Geometry) -> bool {
    geo.features.compat.contains(Compat::RESIZE_INODE)
}

/// How many groups can have a descriptor.
fn descriptors_max(geo: &Geometry) -> u64 {
    let reserved = if has_resize_inode(geo) { geo.reserved_gdt_blocks } else { 0 };
    let blocks = u64::from(geo.desc_block_count) + u64::from(reserved);
    if geo.features.incompat.contains(Incompat::META_BG) && blocks >= u64::from(geo.first_meta_bg) {
        return u64::MAX;
    }
    blocks.saturating_mul(u64::from(geo.descs_per_block))
}

/// The layout with `block_count` blocks, or with fewer where a short last group would hold little
/// but its own metadata. The same layout comes back where nothing is gained.
///
/// # Errors
/// [`FormatError::Corrupt`] for a count that is lower than the present one or above
/// [`block_count_max`].
pub fn grown(geo: &Geometry, block_count: u64) -> Result<Geometry> {
    if block_count < geo.block_count || block_count > block_count_max(geo).0 {
        let detail = format!("{block_count} blocks cannot be reached from {}", geo.block_count);
        return Err(FormatError::corrupt("superblock", detail));
    }
    let whole = with_block_count(geo, block_count);
    let last = GroupNo(whole.group_count - 1);
    let used =
        2 + u64::from(geo.inode_table_blocks()) + u64::from(whole.base_metadata_blocks(last));
    let blocks = u64::from(whole.blocks_in_group(last));
    let is_short = blocks < whole.blocks_per_group.into()
        && blocks < used.saturating_add(LAST_GROUP_SPARE_BLOCKS);
    if whole.group_count > geo.group_count && is_short {
        return Ok(with_block_count(geo, whole.group_first_block(last).0));
    }
    Ok(whole)
}

/// The first step on the way from one layout to another: up to the next full descriptor block.
pub fn next_step(geo: &Geometry, target: &Geometry) -> Geometry {
    let groups =
        (u64::from(geo.group_count / geo.descs_per_block) + 1) * u64::from(geo.descs_per_block);
    let end = geo.first_data_block.0 + groups * u64::from(geo.blocks_per_group);
    with_block_count(geo, target.block_count.min(end))
}

/// The layout with a count of blocks that has been checked.
fn with_block_count(geo: &Geometry, block_count: u64) -> Geometry {
    let blocks = block_count - geo.first_data_block.0;
    // Checked by `block_count_max`: fewer than 2^32 groups and inodes.
    let group_count = blocks.div_ceil(u64::from(geo.blocks_per_group)) as u32;
    let desc_block_count = group_count.div_ceil(geo.descs_per_block);
    let old = |count: u32| match geo.features.incompat.contains(Incompat::META_BG) {
        true => count.min(geo.first_meta_bg),
        false => count,
    };
    let taken = old(desc_block_count) - old(geo.desc_block_count);
    Geometry {
        block_count,
        group_count,
        inode_count: group_count.saturating_mul(geo.inodes_per_group),
        desc_block_count,
        reserved_gdt_blocks: geo.reserved_gdt_blocks.saturating_sub(taken),
        ..geo.clone()
    }
}

/// A new group: its descriptor, and its block bitmap where no rule gives it.
#[derive(Clone, Debug)]
pub struct NewGroup {
    /// Which group.
    pub group: GroupNo,
    /// Its descriptor, with the checksums of its bitmaps.
    pub desc: GroupDesc,
    /// The block bitmap to be written; `None` for a group with `BLOCK_UNINIT`.
    pub block_bitmap: Option<Vec<u8>>,
    /// The inode bitmap to be written; `None` for a group with `INODE_UNINIT`.
    pub inode_bitmap: Option<Vec<u8>>,
}

/// Lays the groups of `new` out that `old` has not. `is_zero` tells of an inode table's blocks (the
/// first one and the count) whether they read as zeroes.
///
/// # Errors
/// [`FormatError::Corrupt`] where a group has no room for its metadata.
pub fn new_groups(
    old: &Geometry,
    new: &Geometry,
    is_zero: impl Fn(BlockNo, u64) -> bool,
) -> Result<Vec<NewGroup>> {
    let mut placed = Vec::new();
    let mut first = old.group_count;
    while first < new.group_count {
        // A flex group that exists in part is continued with new groups only.
        let flex_end =
            u64::from(new.flex_first_group(GroupNo(first)).0) + u64::from(new.groups_per_flex);
        let end = flex_end.min(u64::from(new.group_count)) as u32;
        place(new, first..end, &mut placed)?;
        first = end;
    }
    let used = used_by_others(new, &placed);
    let last = new.group_count - 1;
    placed
        .iter()
        .map(|(group, desc)| {
            let is_shared = used.contains(group) || group.0 == last;
            fill(new, *group, desc.clone(), &placed, is_shared, &is_zero)
        })
        .collect()
}

/// The groups in which metadata of another group lies.
fn used_by_others(
    geo: &Geometry,
    placed: &[(GroupNo, GroupDesc)],
) -> std::collections::HashSet<GroupNo> {
    let mut used = std::collections::HashSet::new();
    for (owner, desc) in placed {
        for (start, count) in places(geo, desc) {
            let end = start.0.saturating_add(count.saturating_sub(1));
            let touched = [start.0, end].map(|block| geo.group_of_block(BlockNo(block)));
            let [Some(first), Some(last)] = touched else { continue };
            used.extend((first.0..=last.0).map(GroupNo).filter(|group| group != owner));
        }
    }
    used
}

fn places(geo: &Geometry, desc: &GroupDesc) -> [(BlockNo, u64); 3] {
    let table_blocks = u64::from(geo.inode_table_blocks());
    [(desc.block_bitmap, 1), (desc.inode_bitmap, 1), (desc.inode_table, table_blocks)]
}

/// Finds places for the metadata of new groups in a row: packed at the front with flex groups, else
/// each in its own group.
fn place(
    geo: &Geometry,
    groups: std::ops::Range<u32>,
    placed: &mut Vec<(GroupNo, GroupDesc)>,
) -> Result<()> {
    if geo.groups_per_flex > 1
        && let Some(packed) = pack(geo, groups.clone())
    {
        placed.extend(packed);
        return Ok(());
    }
    for number in groups {
        let alone = pack(geo, number..number + 1).ok_or_else(|| {
            FormatError::corrupt("superblock", format!("group {number} cannot hold its metadata"))
        })?;
        placed.extend(alone);
    }
    Ok(())
}

/// Block bitmaps, inode bitmaps and inode tables of the groups, one kind behind the other.
fn pack(geo: &Geometry, groups: std::ops::Range<u32>) -> Option<Vec<(GroupNo, GroupDesc)>> {
    let mut at =
        Cursor { geo, end: groups.end, at: geo.group_first_block(GroupNo(groups.start)).0 };
    let mut descs: Vec<(GroupNo, GroupDesc)> =
        groups.map(|number| (GroupNo(number), GroupDesc::default())).collect();
    for (_, desc) in &mut descs {
        desc.block_bitmap = at.take(1)?;
    }
    for (_, desc) in &mut descs {
        desc.inode_bitmap = at.take(1)?;
    }
    for (_, desc) in &mut descs {
        desc.inode_table = at.take(u64::from(geo.inode_table_blocks()))?;
    }
    Some(descs)
}

/// Walks over the blocks of groups, past the fixed metadata at their fronts.
struct Cursor<'a> {
    geo: &'a Geometry,
    /// The group to stop at.
    end: u32,
    at: u64,
}

impl Cursor<'_> {
    /// The next `count` blocks in a row.
    fn take(&mut self, count: u64) -> Option<BlockNo> {
        loop {
            let group = self.geo.group_of_block(BlockNo(self.at))?;
            if group.0 >= self.end {
                return None;
            }
            let base = self.geo.group_first_block(group).0
                + u64::from(self.geo.base_metadata_blocks(group));
            self.at = self.at.max(base);
            let end = self.at.checked_add(count)?;
            // The first group in the way that begins with metadata of its own.
            let blocker = (group.0 + 1..self.end)
                .map(GroupNo)
                .find(|&next| self.geo.base_metadata_blocks(next) > 0);
            let limit = match blocker {
                Some(next) => self.geo.group_first_block(next).0,
                None => {
                    let last = GroupNo(self.end - 1);
                    self.geo.group_first_block(last).0 + u64::from(self.geo.blocks_in_group(last))
                }
            };
            if end <= limit {
                let start = self.at;
                self.at = end;
                return Some(BlockNo(start));
            }
            self.at = self.geo.group_first_block(blocker?).0;
        }
    }
}

/// Completes the descriptor of a new group and makes its bitmaps.
fn fill(
    geo: &Geometry,
    group: GroupNo,
    mut desc: GroupDesc,
    placed: &[(GroupNo, GroupDesc)],
    is_shared: bool,
    is_zero: impl Fn(BlockNo, u64) -> bool,
) -> Result<NewGroup> {
    let mut bits = vec![0; geo.block_size as usize];
    bitmap::init_block_bitmap(&mut bits, geo, group, &desc);
    if is_shared {
        for (_, other) in placed {
            for (start, count) in places(geo, other) {
                // No more than the blocks of an inode table.
                bitmap::mark_blocks(&mut bits, geo, group, start, count as u32);
            }
        }
    }
    desc.free_clusters = bitmap::count_clear(&bits, geo.clusters_in_group(group));
    desc.free_inodes = geo.inodes_per_group;
    let has_flags = geo.features.has_group_csum();
    let block_bitmap = if has_flags && !is_shared {
        desc.flags |= GroupFlags::BLOCK_UNINIT;
        None
    } else {
        desc.update_block_bitmap_csum(&bits, geo)?;
        Some(bits)
    };
    let inode_bitmap = if has_flags {
        desc.itable_unused = geo.inodes_per_group;
        desc.flags |= GroupFlags::INODE_UNINIT;
        if is_zero(desc.inode_table, u64::from(geo.inode_table_blocks())) {
            desc.flags |= GroupFlags::INODE_ZEROED;
        }
        None
    } else {
        let mut bits = vec![0; geo.block_size as usize];
        bitmap::init_inode_bitmap(&mut bits, geo);
        desc.update_inode_bitmap_csum(&bits, geo)?;
        Some(bits)
    };
    Ok(NewGroup { group, desc, block_bitmap, inode_bitmap })
}

/// Where the copy of a block of group 0 lies in a group that keeps a backup.
pub fn backup_of(geo: &Geometry, block: BlockNo, group: GroupNo) -> BlockNo {
    let distance = geo.group_first_block(group).0 - geo.group_first_block(GroupNo(0)).0;
    BlockNo(block.0.saturating_add(distance))
}
