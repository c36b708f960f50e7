//! Mapping of the journal's blocks: the journal inode's extents, supplied by the engine.
//!
//! Invariant: the extents cover journal blocks `0..blocks()` without hole or overlap, and no
//! block of the device twice.

use fjord_format::types::BlockNo;

use crate::error::{JournalError, Result};

/// A run of journal blocks that are contiguous on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JournalExtent {
    /// First block, counted from the start of the journal.
    pub logical: u32,
    /// First block on the device.
    pub start: BlockNo,
    /// Number of blocks.
    pub len: u32,
}

/// The mapping of all journal blocks.
#[derive(Clone, Debug)]
pub struct JournalMap {
    /// Sorted by `logical`.
    extents: Vec<JournalExtent>,
    /// First and last block of each run on the device, sorted.
    physical: Vec<(BlockNo, BlockNo)>,
    blocks: u32,
}

impl JournalMap {
    /// Takes the extents in any order. Errs when they leave a hole or overlap.
    pub fn new(mut extents: Vec<JournalExtent>) -> Result<JournalMap> {
        extents.sort_by_key(|extent| extent.logical);
        let mut blocks = 0u32;
        let mut physical = Vec::with_capacity(extents.len());
        for extent in &extents {
            if extent.logical != blocks || extent.len == 0 {
                let at = extent.logical;
                return Err(JournalError::BadMap(format!(
                    "its extent at block {at} leaves a hole or overlaps (expected {blocks})"
                )));
            }
            let too_long = || JournalError::BadMap("it has more than 2^32 blocks".into());
            blocks = blocks.checked_add(extent.len).ok_or_else(too_long)?;
            let last = extent.start.checked_add(u64::from(extent.len) - 1).ok_or_else(too_long)?;
            physical.push((extent.start, last));
        }
        physical.sort();
        if let Some(pair) = physical.windows(2).find(|pair| pair[1].0 <= pair[0].1) {
            let at = pair[1].0;
            return Err(JournalError::BadMap(format!("block {at} is mapped twice")));
        }
        Ok(JournalMap { extents, physical, blocks })
    }

    /// A contiguous journal.
    pub fn contiguous(start: BlockNo, len: u32) -> Result<JournalMap> {
        JournalMap::new(vec![JournalExtent { logical: 0, start, len }])
    }

    /// Length of the journal in blocks.
    pub fn blocks(&self) -> u32 {
        self.blocks
    }

    /// Device block of journal block `logical`, and the length of the contiguous run that starts
    /// there. Errs past the end.
    pub fn run(&self, logical: u32) -> Result<(BlockNo, u32)> {
        let index = self.extents.partition_point(|extent| extent.logical <= logical);
        let extent = index.checked_sub(1).and_then(|index| self.extents.get(index));
        let found = extent.and_then(|extent| {
            let skip = logical - extent.logical;
            let left = extent.len.checked_sub(skip).filter(|&left| left > 0)?;
            Some((extent.start.checked_add(u64::from(skip))?, left))
        });
        found.ok_or_else(|| {
            JournalError::BadMap(format!("block {logical} is past its end ({})", self.blocks))
        })
    }

    /// Whether a block of the device belongs to the journal.
    pub fn contains(&self, block: BlockNo) -> bool {
        let index = self.physical.partition_point(|&(first, _)| first <= block);
        index.checked_sub(1).is_some_and(|index| block <= self.physical[index].1)
    }

    /// The last block of the device that belongs to the journal.
    pub fn last_block(&self) -> Option<BlockNo> {
        self.physical.last().map(|&(_, last)| last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extent(logical: u32, start: u64, len: u32) -> JournalExtent {
        JournalExtent { logical, start: BlockNo(start), len }
    }

    #[test]
    fn runs_and_membership() {
        let map = JournalMap::new(vec![extent(10, 50, 5), extent(0, 100, 10)]).unwrap();
        assert_eq!(map.blocks(), 15);
        assert_eq!(map.run(0).unwrap(), (BlockNo(100), 10));
        assert_eq!(map.run(12).unwrap(), (BlockNo(52), 3));
        assert!(map.run(15).is_err());
        assert!(map.contains(BlockNo(54)) && !map.contains(BlockNo(55)));
        assert!(map.contains(BlockNo(109)) && !map.contains(BlockNo(49)));
    }

    #[test]
    fn holes_and_overlaps_are_refused() {
        assert!(JournalMap::new(vec![extent(1, 50, 5)]).is_err());
        assert!(JournalMap::new(vec![extent(0, 50, 5), extent(4, 90, 5)]).is_err());
        assert!(JournalMap::new(vec![extent(0, 50, 5), extent(5, 54, 5)]).is_err());
        assert!(JournalMap::new(vec![extent(0, u64::MAX, 5)]).is_err());
        assert!(
            JournalMap::new(vec![extent(0, 1, u32::MAX), extent(u32::MAX, 1 << 40, 9)]).is_err()
        );
    }
}
