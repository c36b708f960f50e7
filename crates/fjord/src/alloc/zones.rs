//! Blocks that no file may own: superblocks, descriptors, bitmaps, inode tables, journal.
//!
//! Owns the sorted list of those zones. Invariant: zones do not overlap and are in order,
//! so that one binary search answers; those of the mount stay, growth adds some behind them.
//!
//! Locking: the lists are leaves, read by whoever allocates, frees or maps blocks.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use fjord_block::lock::{Rank, RwLock};

/// System zones of a file system.
#[derive(Debug)]
pub(crate) struct Zones {
    /// Start and end (exclusive) of each zone, sorted, merged.
    fixed: RwLock<Vec<(u64, u64)>>,
    /// The same for the journal's blocks; set once by mount.
    journal: OnceLock<Vec<(u64, u64)>>,
    /// The journal inode is being changed: its blocks are not protected.
    journal_is_open: AtomicBool,
}

impl Default for Zones {
    fn default() -> Zones {
        Zones::new(Vec::new())
    }
}

/// Sorts zones and merges those that touch.
fn normalise(mut zones: Vec<(u64, u64)>) -> Vec<(u64, u64)> {
    zones.retain(|(start, end)| start < end);
    // The stable sort makes use of the few long sorted runs that it gets.
    zones.sort();
    let mut merged: Vec<(u64, u64)> = Vec::new();
    for (start, end) in zones {
        match merged.last_mut() {
            Some(last) if start <= last.1 => last.1 = last.1.max(end),
            _ => merged.push((start, end)),
        }
    }
    merged.shrink_to_fit();
    merged
}

/// Adds a zone to a list that is mostly in order, growing the last zone where it can.
pub(super) fn append(zones: &mut Vec<(u64, u64)>, start: u64, count: u64) {
    let end = start.saturating_add(count);
    match zones.last_mut() {
        Some(last) if last.1 == start => last.1 = end,
        _ if count > 0 => zones.push((start, end)),
        _ => {}
    }
}

fn count(zones: &[(u64, u64)]) -> u64 {
    zones.iter().map(|(start, end)| end - start).sum()
}

fn overlaps(zones: &[(u64, u64)], start: u64, end: u64) -> bool {
    let next = zones.partition_point(|(_, zone_end)| *zone_end <= start);
    zones.get(next).is_some_and(|(zone_start, _)| *zone_start < end)
}

impl Zones {
    /// From start and end of each zone, in any order.
    pub(crate) fn new(zones: Vec<(u64, u64)>) -> Self {
        Self {
            fixed: RwLock::new(Rank::Zones, normalise(zones)),
            journal: OnceLock::new(),
            journal_is_open: AtomicBool::new(false),
        }
    }

    /// Sets the journal's blocks; a second call changes nothing.
    pub(crate) fn set_journal(&self, zones: Vec<(u64, u64)>) {
        let _ = self.journal.set(normalise(zones));
    }

    /// Lets the journal inode be changed, until the end of the mount.
    pub(crate) fn open_journal(&self) {
        self.journal_is_open.store(true, Ordering::Release);
    }

    /// Adds zones of new groups. Returns how many blocks they have.
    pub(super) fn add(&self, zones: Vec<(u64, u64)>) -> u64 {
        let mut fixed = self.fixed.write();
        let before = count(&fixed);
        let all = fixed.iter().copied().chain(zones).collect();
        *fixed = normalise(all);
        count(&fixed).saturating_sub(before)
    }

    /// The parts of all zones that lie in `start..end`, the journal's last.
    pub(super) fn within(&self, start: u64, end: u64) -> Vec<(u64, u64)> {
        let fixed = self.fixed.read();
        [fixed.as_slice(), self.journal.get().map_or(&[][..], Vec::as_slice)]
            .into_iter()
            .flat_map(move |zones| {
                let first = zones.partition_point(|(_, zone_end)| *zone_end <= start);
                let rest = zones.get(first..).unwrap_or_default().iter();
                rest.take_while(move |(zone_start, _)| *zone_start < end)
            })
            .map(move |&(zone_start, zone_end)| (zone_start.max(start), zone_end.min(end)))
            .filter(|(zone_start, zone_end)| zone_start < zone_end)
            .collect()
    }

    /// Whether one of the blocks `start..end` belongs to the file system's own structures.
    pub(crate) fn overlaps_fixed(&self, start: u64, end: u64) -> bool {
        overlaps(&self.fixed.read(), start, end)
    }

    /// Whether one of the blocks `start..end` belongs to the journal.
    pub(crate) fn overlaps_journal(&self, start: u64, end: u64) -> bool {
        !self.journal_is_open.load(Ordering::Acquire)
            && self.journal.get().is_some_and(|zones| overlaps(zones, start, end))
    }

    /// Count of blocks in the fixed zones.
    pub(crate) fn fixed_blocks(&self) -> u64 {
        count(&self.fixed.read())
    }

    /// Count of blocks in the journal.
    pub(crate) fn journal_blocks(&self) -> u64 {
        self.journal.get().map_or(0, |zones| count(zones))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zones_are_merged_and_found() {
        let zones = Zones::new(vec![(10, 20), (0, 5), (18, 30), (5, 5), (40, 41)]);
        assert_eq!(*zones.fixed.read(), [(0, 5), (10, 30), (40, 41)]);
        assert!(!zones.overlaps_fixed(5, 10));
        assert!(zones.overlaps_fixed(5, 11));
        assert!(zones.overlaps_fixed(29, 31));
        assert!(!zones.overlaps_fixed(30, 40));
        assert!(zones.overlaps_fixed(0, u64::MAX));
        assert!(!zones.overlaps_fixed(41, u64::MAX));
        assert_eq!(zones.fixed_blocks(), 26);
        assert_eq!(zones.add(vec![(60, 62), (41, 44)]), 5);
        assert!(zones.overlaps_fixed(61, 70) && zones.within(0, 100).contains(&(40, 44)));
    }
}
