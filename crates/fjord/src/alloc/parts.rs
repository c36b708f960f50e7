//! Block groups as parts of partial commits ([`fjord_journal::Parts`]).
//!
//! Owns the mapping of metadata blocks to groups: the group whose bitmap or inode table it is, or
//! else the group that contains it. Invariants: the mapping of a block never changes (growth adds
//! blocks); a descriptor belongs to the group that it describes, its block is shared; the superblock
//! belongs to no group.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use fjord_block::lock::{Rank, RwLock};
use fjord_format::geometry::Geometry;
use fjord_format::superblock::SUPERBLOCK_OFFSET_BYTES;
use fjord_format::types::{BlockNo, GroupNo};
use fjord_journal::{Part, PartSet, Parts};

use crate::fs::FsInner;
use crate::fs::geo::Geo;

/// Contiguous bitmaps or inode tables of consecutive groups, in another group (`flex_bg`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ForeignRun {
    /// First block.
    start: u64,
    /// Blocks of each group.
    stride: u32,
    /// The first of the groups.
    group: u32,
    /// How many groups.
    count: u32,
}

impl ForeignRun {
    /// Notes in `runs`, which are of one kind and in order of groups, that `stride` blocks from
    /// `start` on are of `group`.
    pub(super) fn append(runs: &mut Vec<ForeignRun>, start: u64, stride: u32, group: GroupNo) {
        if let Some(last) = runs.last_mut()
            && last.stride == stride
            && last.group.checked_add(last.count) == Some(group.0)
            && last.end() == start
        {
            last.count += 1;
        } else {
            runs.push(ForeignRun { start, stride, group: group.0, count: 1 });
        }
    }

    fn end(&self) -> u64 {
        self.start.saturating_add(u64::from(self.stride) * u64::from(self.count))
    }
}

/// The part that a group is.
pub(crate) fn part_of_group(group: GroupNo) -> Part {
    Part(group.0)
}

/// See the module.
pub(crate) struct GroupParts {
    fs: Weak<FsInner>,
    geo: Arc<Geo>,
    superblock: BlockNo,
    places: RwLock<Places>,
}

/// Locations of metadata.
#[derive(Default)]
struct Places {
    /// Metadata outside its group, by block number.
    foreign: Vec<ForeignRun>,
    /// The blocks of descriptors, with their index.
    desc_blocks: HashMap<BlockNo, u32>,
}

impl Places {
    fn add(&mut self, geo: &Geometry, foreign: impl IntoIterator<Item = ForeignRun>) {
        self.foreign.extend(foreign);
        self.foreign.sort_by_key(|run| run.start);
        let first = self.desc_blocks.len() as u32;
        self.desc_blocks.extend((first..geo.desc_block_count).filter_map(|index| {
            let block = geo.desc_block_location(index)?;
            Some((block, index))
        }));
    }
}

impl GroupParts {
    pub(crate) fn new(fs: &Arc<FsInner>) -> GroupParts {
        let mut places = Places::default();
        places.add(&fs.geo, fs.groups.foreign.iter().copied());
        GroupParts {
            fs: Arc::downgrade(fs),
            superblock: BlockNo(SUPERBLOCK_OFFSET_BYTES / u64::from(fs.geo.block_size)),
            places: RwLock::new(Rank::GroupPlaces, places),
            geo: fs.geo.clone(),
        }
    }

    /// Takes new groups in, of which `foreign` lies outside its group. The layout has them already.
    pub(super) fn grow(&self, foreign: Vec<ForeignRun>) {
        self.places.write().add(&self.geo, foreign);
    }
}

impl Parts for GroupParts {
    fn part_of(&self, block: BlockNo) -> Part {
        if block == self.superblock {
            return Part::WHOLE;
        }
        let places = self.places.read();
        let behind = places.foreign.partition_point(|run| run.start <= block.0);
        let run = behind.checked_sub(1).and_then(|at| places.foreign.get(at)).copied();
        drop(places);
        if let Some(run) = run.filter(|run| block.0 < run.end()) {
            // Less than the count of groups.
            let index = (block.0 - run.start) / u64::from(run.stride.max(1));
            return Part(run.group + index as u32);
        }
        self.geo.group_of_block(block).map_or(Part::WHOLE, part_of_group)
    }

    fn copy_entries(&self, block: BlockNo, current: &[u8], version: &mut [u8], chosen: &PartSet) {
        let Some(index) = self.places.read().desc_blocks.get(&block).copied() else { return };
        let first = index * self.geo.descs_per_block;
        let size = usize::from(self.geo.desc_size);
        let entries = current.chunks_exact(size).zip(version.chunks_exact_mut(size));
        for (group, (current, version)) in (first..self.geo.group_count).zip(entries) {
            if chosen.contains(part_of_group(GroupNo(group))) {
                version.copy_from_slice(current);
            }
        }
    }

    fn is_ready(&self, chosen: &PartSet) -> bool {
        let Some(fs) = self.fs.upgrade() else { return true };
        !fs.orphans.unrecorded().iter().any(|&ino| {
            let location = self.geo.inode_location(ino);
            location.is_none_or(|location| chosen.contains(part_of_group(location.group)))
        })
    }
}

impl FsInner {
    /// Whether partial commits of groups are possible.
    pub(crate) fn commits_groups(&self) -> bool {
        self.fsync_policy.commits_groups() && self.has_log()
    }

    /// The part that a block of metadata is of, as the journal sees it.
    pub(crate) fn part_of(&self, block: BlockNo) -> Part {
        self.parts.get().map_or(Part::WHOLE, |parts| parts.part_of(block))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_grow_over_groups_in_a_row() {
        let mut runs = Vec::new();
        for (start, stride, group) in [(100, 4, 3), (104, 4, 4), (108, 4, 5), (120, 4, 6)] {
            ForeignRun::append(&mut runs, start, stride, GroupNo(group));
        }
        ForeignRun::append(&mut runs, 124, 1, GroupNo(7));
        let expected = [(100, 4, 3, 3), (120, 4, 6, 1), (124, 1, 7, 1)];
        let expected = expected.map(|(start, stride, group, count)| ForeignRun {
            start,
            stride,
            group,
            count,
        });
        assert_eq!(runs, expected);
    }
}
