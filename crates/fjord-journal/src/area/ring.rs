//! Allocation of the blocks of one area.
//!
//! Invariants: live pieces are in the order of `live` around the ring, without overlap; a piece is
//! freed when its transaction has committed and its write has ended, oldest first.

use std::collections::VecDeque;

use fjord_format::types::Tid;

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

/// The blocks of an area.
#[derive(Debug)]
pub(super) struct Ring {
    blocks: u32,
    /// Start of the next piece, if it fits there.
    head: u32,
    /// Oldest first.
    live: VecDeque<Piece>,
    live_blocks: u32,
}

impl Ring {
    pub(super) fn new(blocks: u32) -> Ring {
        Ring { blocks, head: 0, live: VecDeque::new(), live_blocks: 0 }
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
        let fits_at_head = self.head <= self.blocks - len;
        let Some(oldest) = self.live.front() else {
            return Some(if fits_at_head { self.head } else { 0 });
        };
        if self.head > oldest.start {
            let at_front = (len <= oldest.start).then_some(0);
            return if fits_at_head { Some(self.head) } else { at_front };
        }
        (len <= oldest.start - self.head).then_some(self.head)
    }

    /// Makes the piece at `start` longer. Fails if it is not the newest one, or there are no blocks behind it; by no
    /// blocks never.
    pub(super) fn extend(&mut self, start: u32, more: u32) -> bool {
        if more == 0 {
            return true;
        }
        let end = match self.live.front() {
            Some(oldest) if oldest.start > start => oldest.start,
            _ => self.blocks,
        };
        let Some(newest) = self.live.back_mut().filter(|piece| piece.start == start) else {
            return false;
        };
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
        let mut ring = Ring::new(20);
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
        let mut ring = Ring::new(20);
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
        let mut ring = Ring::new(20);
        assert_eq!(ring.reserve(9, Tid(0), none), Some(0));
        assert_eq!(ring.reserve(9, Tid(1), none), Some(9));
        ring.written(0);
        assert_eq!(ring.reserve(3, Tid(2), |tid| tid == Tid(0)), Some(0));
        assert_eq!(ring.live_blocks(), 12);
    }

    proptest! {
        /// Against a byte per block: live pieces never share one.
        #[test]
        fn pieces_never_overlap(steps in proptest::collection::vec((1u32..9, any::<bool>()), 1..200)) {
            let mut ring = Ring::new(32);
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
