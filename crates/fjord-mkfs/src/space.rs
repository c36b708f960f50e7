//! Which blocks of a new image are in use, kept as runs per group: almost all groups of a
//! large image have none or one.
//!
//! Invariant: the runs of a group are sorted, apart from each other, and lie inside the group;
//! `lazy` says that only the group's own fixed metadata is in use, so that its bitmap need not
//! be written.

use fjord_format::bitmap;
use fjord_format::extent::EXTENT_LEN_MAX;
use fjord_format::features::Incompat;
use fjord_format::geometry::Geometry;
use fjord_format::types::{BlockNo, GroupNo};

use crate::error::{Result, too_small, usage};

/// A run of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockRun {
    pub(crate) start: BlockNo,
    pub(crate) len: u64,
}

impl BlockRun {
    fn end(&self) -> u64 {
        self.start.0 + self.len
    }
}

/// Where the metadata of a group lies and what is in use in it.
#[derive(Debug)]
pub(crate) struct GroupSpace {
    pub(crate) block_bitmap: BlockNo,
    pub(crate) inode_bitmap: BlockNo,
    pub(crate) inode_table: BlockNo,
    pub(crate) lazy: bool,
    used: Vec<BlockRun>,
}

/// Use of all blocks of the image.
#[derive(Debug)]
pub(crate) struct Space<'a> {
    geometry: &'a Geometry,
    groups: Vec<GroupSpace>,
}

impl<'a> Space<'a> {
    /// Places superblock copies, descriptors, bitmaps and inode tables.
    pub(crate) fn new(geometry: &'a Geometry) -> Result<Space<'a>> {
        let last = geometry.group_count - 1;
        let groups = (0..geometry.group_count)
            .map(|number| GroupSpace {
                block_bitmap: BlockNo(0),
                inode_bitmap: BlockNo(0),
                inode_table: BlockNo(0),
                // Linux takes the last group's bitmap for granted, whatever its flags.
                lazy: geometry.features.has_group_csum() && number != last,
                used: Vec::new(),
            })
            .collect();
        let mut space = Space { geometry, groups };
        for number in 0..geometry.group_count {
            let group = GroupNo(number);
            let len = u64::from(geometry.base_metadata_blocks(group));
            let start = geometry.group_first_block(group);
            if len > u64::from(geometry.blocks_in_group(group)) {
                return Err(usage("a group cannot hold the descriptors; use larger blocks"));
            }
            space.mark(BlockRun { start, len }, Some(group));
        }
        space.place_tables()?;
        Ok(space)
    }

    /// Bitmaps and tables, packed per flex group or each in its own group.
    fn place_tables(&mut self) -> Result<()> {
        let per_flex = if self.geometry.features.incompat.contains(Incompat::FLEX_BG) {
            self.geometry.groups_per_flex
        } else {
            1
        };
        let table_blocks = u64::from(self.geometry.inode_table_blocks());
        for first in (0..self.geometry.group_count).step_by(per_flex as usize) {
            let members = first..self.geometry.group_count.min(first.saturating_add(per_flex));
            let count = u64::from(members.end - members.start);
            let from = self.geometry.group_first_block(GroupNo(first));
            let limit = self.group_end(GroupNo(members.end - 1));
            let block_bitmaps = self.find(from, count, limit)?;
            self.mark_shared(block_bitmaps, count, &members);
            let inode_bitmaps = self.find(from, count, limit)?;
            self.mark_shared(inode_bitmaps, count, &members);
            let mut from = from;
            for (index, number) in members.clone().enumerate() {
                let table = self.find(from, table_blocks, limit)?;
                from = table;
                self.mark_shared(table, table_blocks, &(number..number + 1));
                let group = &mut self.groups[number as usize];
                group.block_bitmap = BlockNo(block_bitmaps.0 + index as u64);
                group.inode_bitmap = BlockNo(inode_bitmaps.0 + index as u64);
                group.inode_table = table;
            }
        }
        Ok(())
    }

    fn group_end(&self, group: GroupNo) -> u64 {
        let first = self.geometry.group_first_block(group).0;
        first + u64::from(self.geometry.blocks_in_group(group))
    }

    /// Marks metadata of `owners`; a group that holds another's needs its bitmap written.
    fn mark_shared(&mut self, start: BlockNo, len: u64, owners: &std::ops::Range<u32>) {
        let sole = (owners.end - owners.start == 1).then_some(GroupNo(owners.start));
        self.mark(BlockRun { start, len }, sole);
    }

    /// First place from `from` on with `len` free blocks in a row that end before `limit`,
    /// else anywhere after it.
    fn find(&self, from: BlockNo, len: u64, limit: u64) -> Result<BlockNo> {
        let no_room = || {
            too_small("the groups are too small for their metadata; reduce the number of inodes")
        };
        let found = self.first_fit(from, len).ok_or_else(no_room)?;
        if found.0 + len > limit {
            tracing::debug!(block = found.0, "metadata lies behind its flex group");
        }
        Ok(found)
    }

    fn first_fit(&self, from: BlockNo, len: u64) -> Option<BlockNo> {
        let first = self.geometry.group_of_block(from)?;
        let mut start = from.0;
        for number in first.0..self.geometry.group_count {
            for run in &self.groups[number as usize].used {
                if run.end() <= start {
                    continue;
                }
                if run.start.0 >= start + len {
                    return Some(BlockNo(start));
                }
                start = run.end();
            }
            if start + len <= self.group_end(GroupNo(number)) {
                return Some(BlockNo(start));
            }
        }
        None
    }

    /// Marks blocks as used. `owner` is the group whose fixed metadata they are, if any.
    fn mark(&mut self, run: BlockRun, owner: Option<GroupNo>) {
        let mut at = run.start;
        while let Some(group) =
            (at.0 < run.end()).then(|| self.geometry.group_of_block(at)).flatten()
        {
            let end = run.end().min(self.group_end(group));
            let space = &mut self.groups[group.0 as usize];
            insert_run(&mut space.used, BlockRun { start: at, len: end - at.0 });
            space.lazy &= owner == Some(group);
            at = BlockNo(end);
        }
    }

    /// Takes `count` blocks from `goal` on (and from the start when the end is reached), in as
    /// few runs as first fit gives, none longer than one extent.
    pub(crate) fn allocate(&mut self, goal: BlockNo, count: u64) -> Result<Vec<BlockRun>> {
        let mut runs = Vec::new();
        let mut left = count;
        let start = self.geometry.group_of_block(goal).unwrap_or_default().0;
        for number in (start..self.geometry.group_count).chain(0..start) {
            for gap in self.gaps(GroupNo(number)) {
                if left == 0 {
                    break;
                }
                let len = gap.len.min(left).min(u64::from(EXTENT_LEN_MAX));
                runs.push(BlockRun { start: gap.start, len });
                left -= len;
            }
            if left == 0 {
                runs.iter().for_each(|run| self.mark(*run, None));
                return Ok(runs);
            }
        }
        Err(too_small(format!("the image is too small: {left} of {count} blocks do not fit")))
    }

    /// Free runs of a group.
    fn gaps(&self, group: GroupNo) -> Vec<BlockRun> {
        let mut gaps = Vec::new();
        let mut start = self.geometry.group_first_block(group).0;
        let end = self.group_end(group);
        for run in &self.groups[group.0 as usize].used {
            if run.start.0 > start {
                gaps.push(BlockRun { start: BlockNo(start), len: run.start.0 - start });
            }
            start = run.end();
        }
        if end > start {
            gaps.push(BlockRun { start: BlockNo(start), len: end - start });
        }
        gaps
    }

    pub(crate) fn group(&self, group: GroupNo) -> &GroupSpace {
        &self.groups[group.0 as usize]
    }

    /// Free blocks of a group.
    pub(crate) fn free_blocks(&self, group: GroupNo) -> u32 {
        let used: u64 = self.groups[group.0 as usize].used.iter().map(|run| run.len).sum();
        // A group has at most 2^19 blocks, and runs do not overlap.
        self.geometry.blocks_in_group(group) - used as u32
    }

    /// Fills `bits`, one block, with the block bitmap of a group.
    pub(crate) fn fill_bitmap(&self, group: GroupNo, bits: &mut [u8]) {
        bits.fill(0);
        for run in &self.groups[group.0 as usize].used {
            bitmap::mark_blocks(bits, self.geometry, group, run.start, run.len as u32);
        }
        bitmap::pad(bits, self.geometry.clusters_in_group(group));
    }

    /// Where a journal goes best: a group with much room in the middle of the image.
    pub(crate) fn journal_goal(&self) -> BlockNo {
        let geometry = self.geometry;
        let middle = (geometry.block_count - geometry.first_data_block.0) / 2;
        let mut group = geometry.group_of_block(BlockNo(middle)).unwrap_or_default().0;
        let count = geometry.group_count;
        let flex = geometry.groups_per_flex;
        let start = if flex > 1 && group > flex {
            group = group / flex * flex;
            while group < count && self.free_blocks(GroupNo(group)) == 0 {
                group += 1;
            }
            group = if group == count { 0 } else { group };
            group
        } else {
            group.saturating_sub(1)
        };
        let end = if group + 1 < count { group + 1 } else { group };
        let best = (start..=end)
            .rev()
            .max_by_key(|number| self.free_blocks(GroupNo(*number)))
            .unwrap_or_default();
        geometry.group_first_block(GroupNo(best))
    }
}

/// Inserts a run that overlaps no other, joining it with the ones it touches.
fn insert_run(runs: &mut Vec<BlockRun>, run: BlockRun) {
    if run.len == 0 {
        return;
    }
    let at = runs.partition_point(|other| other.start < run.start);
    let joins_next = runs.get(at).is_some_and(|next| next.start.0 == run.end());
    let joins_last = at > 0 && runs[at - 1].end() == run.start.0;
    match (joins_last, joins_next) {
        (true, true) => {
            let next = runs.remove(at);
            runs[at - 1].len += run.len + next.len;
        }
        (true, false) => runs[at - 1].len += run.len,
        (false, true) => {
            runs[at].start = run.start;
            runs[at].len += run.len;
        }
        (false, false) => runs.insert(at, run),
    }
}
