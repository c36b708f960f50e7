//! Allocation of the blocks of one area.
//!
//! On a device with objects a piece lies in one object, if it is no longer than that and there is space: the blocks
//! before the next object are left out. Recovery finds pieces wherever they begin.
//!
//! Invariants: live pieces are in the order of `live` around the ring, without overlap; a piece is
//! freed when its transaction has committed and its write has ended, oldest first.

use std::collections::VecDeque;
use std::ops::Range;

use fjord_format::ijournal::AreaTable;
use fjord_format::types::Tid;

use crate::map::JournalMap;

/// Space for an i-transaction, or for several.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reserved {
    /// Its area.
    pub(crate) area: usize,
    /// Its first block in the area.
    pub(crate) start: u32,
    /// Its first block in the journal.
    pub(crate) at: u32,
    /// Blocks.
    pub(crate) len: u32,
    /// More than half of the area is live.
    pub(crate) is_half_full: bool,
}

/// A piece of the ring that holds i-transactions.
#[derive(Debug)]
struct Piece {
    tid: Tid,
    start: u32,
    len: u32,
    written: bool,
}

/// Where objects of the device begin in an area.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Objects {
    /// Blocks of an object.
    len: u32,
    /// Where the area's first block lies in its object.
    phase: u32,
}

impl Objects {
    /// Those of an area that begins at journal block `first`, where an object has `len` blocks. `None` if the area
    /// is in several pieces on the device, or the whole of it in one object.
    pub(super) fn of(map: &JournalMap, first: u32, table: &AreaTable, len: u64) -> Option<Objects> {
        let (start, run) = map.run(first).ok()?;
        let phase = start.0.checked_rem(len)?;
        let is_divided = phase + u64::from(table.area_blocks) > len;
        if run < table.area_blocks || !is_divided {
            return None;
        }
        // Where it begins in an object, and an object is shorter than the area and that.
        Some(Objects { len: u32::try_from(len).ok()?, phase: u32::try_from(phase).ok()? })
    }

    /// Where a piece of `len` blocks may begin from `at` on.
    fn whole_from(&self, at: u32, len: u32) -> u32 {
        let offset = (self.phase + at) % self.len;
        if len > self.len || offset + len <= self.len { at } else { at + (self.len - offset) }
    }
}

/// The blocks of an area.
#[derive(Debug)]
pub(super) struct Ring {
    blocks: u32,
    /// `None` where it makes no difference.
    objects: Option<Objects>,
    /// Start of the next piece, if it fits there.
    head: u32,
    /// Oldest first.
    live: VecDeque<Piece>,
    live_blocks: u32,
}

impl Ring {
    pub(super) fn new(blocks: u32, objects: Option<Objects>) -> Ring {
        Ring { blocks, objects, head: 0, live: VecDeque::new(), live_blocks: 0 }
    }

    /// Blocks of pieces that are not freed.
    pub(super) fn live_blocks(&self) -> u32 {
        self.live_blocks
    }

    /// Allocates `len` contiguous blocks for an i-transaction of `tid`. `None` if there is no space
    /// until more transactions have committed.
    pub(super) fn reserve(
        &mut self,
        len: u32,
        tid: Tid,
        is_committed: impl Fn(Tid) -> bool,
    ) -> Option<u32> {
        if self.live_blocks.saturating_add(len) > self.blocks / 2 {
            self.reclaim(is_committed);
        }
        let start = self.place(len)?;
        self.head = start + len;
        self.live_blocks += len;
        self.live.push_back(Piece { tid, start, len, written: false });
        Some(start)
    }

    fn place(&self, len: u32) -> Option<u32> {
        if len == 0 || len > self.blocks {
            return None;
        }
        // Behind the newest piece; then at the front.
        let free = match self.live.front() {
            None => [self.head..self.blocks, 0..self.blocks],
            Some(oldest) if self.head > oldest.start => [self.head..self.blocks, 0..oldest.start],
            Some(oldest) => [self.head..oldest.start, 0..0],
        };
        let fits = |at: u32, free: &Range<u32>| {
            at.checked_add(len).is_some_and(|end| end <= free.end).then_some(at)
        };
        let whole = free.iter().find_map(|free| fits(self.whole_from(free.start, len), free));
        whole.or_else(|| free.iter().find_map(|free| fits(free.start, free)))
    }

    /// Where a piece of `len` blocks may begin from `at` on, so that it lies in one object if it can.
    fn whole_from(&self, at: u32, len: u32) -> u32 {
        self.objects.map_or(at, |objects| objects.whole_from(at, len))
    }

    /// Makes the piece at `start` longer. Fails if it is not the newest one, there are no blocks behind it, or it would
    /// no longer lie in one object; by no blocks never.
    pub(super) fn extend(&mut self, start: u32, more: u32) -> bool {
        if more == 0 {
            return true;
        }
        let end = match self.live.front() {
            Some(oldest) if oldest.start > start => oldest.start,
            _ => self.blocks,
        };
        let objects = self.objects;
        let Some(newest) = self.live.back_mut().filter(|piece| piece.start == start) else {
            return false;
        };
        let is_whole = |len| objects.is_none_or(|objects| objects.whole_from(start, len) == start);
        if is_whole(newest.len) && !is_whole(newest.len.saturating_add(more)) {
            return false;
        }
        if more > end - (newest.start + newest.len) {
            return false;
        }
        newest.len += more;
        self.head += more;
        self.live_blocks += more;
        true
    }

    /// The write of the piece at `start` has ended.
    pub(super) fn written(&mut self, start: u32) {
        if let Some(piece) = self.live.iter_mut().rfind(|piece| piece.start == start) {
            piece.written = true;
        }
    }

    /// Frees pieces whose transactions have committed.
    pub(super) fn reclaim(&mut self, is_committed: impl Fn(Tid) -> bool) {
        while let Some(oldest) = self.live.front()
            && oldest.written
            && is_committed(oldest.tid)
        {
            self.live_blocks -= oldest.len;
            self.live.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn none(_: Tid) -> bool {
        false
    }

    #[test]
    fn a_full_ring_waits_for_commits() {
        let mut ring = Ring::new(20, None);
        let takes: Vec<_> = (0..4).map(|tid| ring.reserve(5, Tid(tid), none)).collect();
        assert_eq!(takes, [Some(0), Some(5), Some(10), Some(15)]);
        assert_eq!(ring.reserve(1, Tid(4), none), None);
        assert_eq!(ring.reserve(1, Tid(4), |_| true), None, "its write is under way");
        ring.written(0);
        assert_eq!(ring.reserve(6, Tid(4), |tid| tid == Tid(0)), None);
        assert_eq!(ring.reserve(5, Tid(4), none), Some(0));
        assert_eq!(ring.reserve(21, Tid(4), |_| true), None);
    }

    #[test]
    fn the_newest_piece_grows() {
        let mut ring = Ring::new(20, None);
        assert_eq!(
            [ring.reserve(5, Tid(0), none), ring.reserve(5, Tid(1), none)],
            [Some(0), Some(5)]
        );
        assert!(!ring.extend(0, 1), "another follows");
        assert!(ring.extend(5, 3));
        assert_eq!(ring.live_blocks(), 13);
        assert_eq!(ring.reserve(5, Tid(2), none), Some(13));
        assert!(!ring.extend(13, 3), "the area ends");
        assert!(ring.extend(13, 2));
        ring.written(0);
        assert_eq!(ring.reserve(3, Tid(3), |tid| tid == Tid(0)), Some(0));
        assert!(!ring.extend(0, 3), "the oldest follows");
        assert!(ring.extend(0, 2));
        assert_eq!(ring.live_blocks(), 20);
    }

    #[test]
    fn a_piece_does_not_wrap() {
        let mut ring = Ring::new(20, None);
        assert_eq!(ring.reserve(9, Tid(0), none), Some(0));
        assert_eq!(ring.reserve(9, Tid(1), none), Some(9));
        ring.written(0);
        assert_eq!(ring.reserve(3, Tid(2), |tid| tid == Tid(0)), Some(0));
        assert_eq!(ring.live_blocks(), 12);
    }

    #[test]
    fn a_piece_lies_in_one_object() {
        let mut ring = Ring::new(20, Some(Objects { len: 8, phase: 1 }));
        // Objects begin at blocks 7 and 15.
        let takes: Vec<_> = [3, 3, 3, 4].map(|len| ring.reserve(len, Tid(0), none)).into();
        assert_eq!(takes, [Some(0), Some(3), Some(7), Some(10)]);
        assert_eq!(ring.reserve(3, Tid(0), none), Some(15), "14 is left out");
        assert!(!ring.extend(15, 3), "the area ends");
        assert!(ring.extend(15, 2));
        ring.written(0);
        ring.written(3);
        let is_committed = |tid: Tid| tid == Tid(0);
        assert_eq!(ring.reserve(7, Tid(1), is_committed), Some(0));
        assert!(!ring.extend(0, 1), "the object ends");
        assert_eq!(ring.reserve(1, Tid(1), is_committed), None);
        // One that is longer than an object lies across as many as it needs.
        let mut ring = Ring::new(20, Some(Objects { len: 8, phase: 1 }));
        assert_eq!(ring.reserve(10, Tid(0), none), Some(0));
        // So does one that fits nowhere else.
        let mut ring = Ring::new(10, Some(Objects { len: 8, phase: 4 }));
        assert_eq!(ring.reserve(7, Tid(0), none), Some(0));
    }

    #[test]
    fn objects_of_an_area_are_those_of_the_device() {
        let table = AreaTable { uuid: [0; 16], area_count: 1, area_blocks: 16 };
        let map = |start| JournalMap::contiguous(fjord_format::BlockNo(start), 64).expect("a map");
        let of = |start, len| Objects::of(&map(start), 9, &table, len);
        assert_eq!(of(7, 16), None, "all of it in one");
        assert_eq!(of(8, 16), Some(Objects { len: 16, phase: 1 }));
        assert_eq!(of(1024, 1024), None);
        assert_eq!(of(1007, 1024), Some(Objects { len: 1024, phase: 1016 }));
        assert_eq!(of(7, 0), None);
        assert_eq!(of(8, 4), Some(Objects { len: 4, phase: 1 }));
    }

    proptest! {
        /// Against a byte per block: live pieces never share one.
        #[test]
        fn pieces_never_overlap(
            steps in proptest::collection::vec((1u32..9, any::<bool>()), 1..200),
            object in 0u32..12,
            phase in 0u32..12,
        ) {
            let objects = (object > 0).then(|| Objects { len: object, phase: phase % object });
            let mut ring = Ring::new(32, objects);
            let mut owner = [None; 32];
            let mut committed = 0;
            for (tid, (len, commit)) in (1u32..).zip(steps) {
                let placed = ring.reserve(len, Tid(tid), |tid| tid.0 <= committed);
                for slot in &mut owner {
                    *slot = slot.filter(|&tid| tid > committed);
                }
                if let Some(start) = placed {
                    for slot in &mut owner[start as usize..(start + len) as usize] {
                        prop_assert_eq!(*slot, None);
                        *slot = Some(tid);
                    }
                    ring.written(start);
                }
                if commit {
                    committed = tid - u32::from(tid % 3 == 0);
                }
                if placed.is_none() {
                    // A commit of everything always makes room for what fits.
                    committed = tid;
                }
            }
        }
    }
}
