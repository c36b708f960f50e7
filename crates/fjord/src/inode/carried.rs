//! Carried and superseded data of a file.
//!
//! Invariant: a block is *carried* as long as an i-transaction that recovery would apply may hold
//! its data. A later overwrite marks it *superseded*, and the next i-transaction of the file
//! records that before an fsync returns.
//!
//! Guarded by the inode's state lock.

use std::collections::{BTreeMap, BTreeSet};

use fjord_block::plant::{Bug, planted};
use fjord_format::{BlockNo, Tid};

/// The data of one inode in i-transactions.
#[derive(Debug, Default)]
pub(crate) struct Carried {
    /// Carried blocks, with the transaction of their i-transaction.
    blocks: BTreeMap<BlockNo, Tid>,
    /// Carried blocks that were overwritten since.
    superseded: BTreeMap<BlockNo, Tid>,
    /// The newest transaction with extents whose data was written instead of carried, and their
    /// number: before an i-transaction refers to them, a flush is required.
    unflushed: Option<(Tid, u64)>,
    /// Blocks that [`Carried::prune`] left.
    pruned_len: usize,
    /// Data was to be carried, and no i-transaction with it is durable: if none will be, the commit of this
    /// transaction makes it so.
    unlogged: Option<Tid>,
    /// The last barrier that waits for a flush of what was written.
    held: Option<HeldBarrier>,
    /// Blocks that were carried again since: what it names them for is older.
    carried_again: BTreeSet<BlockNo>,
}

/// What is settled once a barrier of the file is durable.
#[derive(Debug)]
pub(crate) struct HeldBarrier {
    /// Its number.
    pub(crate) number: u64,
    /// Writes in place that the flush before it covers ([`crate::inode::FlushCell`]).
    pub(crate) in_place: u64,
    /// As for [`Carried::flushed`].
    pub(crate) unflushed: Option<(Tid, u64)>,
    /// Runs of superseded blocks that it names.
    pub(crate) superseded: Vec<(BlockNo, u32)>,
}

impl Carried {
    /// An i-transaction of `tid` carries the data of a block.
    pub(crate) fn carry(&mut self, block: BlockNo, tid: Tid) {
        self.blocks.insert(block, tid);
        self.superseded.remove(&block);
        if self.held.is_some() {
            self.carried_again.insert(block);
        }
    }

    /// Data is to be carried by an i-transaction of `tid`.
    pub(crate) fn begin(&mut self, tid: Tid) {
        self.unlogged = Some(tid);
    }

    /// That i-transaction is durable.
    pub(crate) fn end(&mut self) {
        self.unlogged = None;
    }

    /// Whether only a commit will have data that was to be carried. The caller's is the only fsync of the file.
    pub(crate) fn needs_commit(&self, committed: impl Fn(Tid) -> bool) -> bool {
        self.unlogged.is_some_and(|tid| !committed(tid))
    }

    /// `count` blocks from `start` on are overwritten.
    pub(crate) fn written_in_place(&mut self, start: BlockNo, count: u32) {
        if self.blocks.is_empty() || planted(Bug::InlineDataStale) {
            return;
        }
        let end = BlockNo(start.0.saturating_add(u64::from(count)));
        for (&block, &tid) in self.blocks.range(start..end) {
            self.superseded.insert(block, tid);
        }
    }

    /// Extents that `tid` holds refer to data that was written, but not flushed.
    pub(crate) fn mapped_unflushed(&mut self, tid: Tid) {
        let count = self.unflushed.map_or(0, |(_, count)| count);
        self.unflushed = Some((tid, count + 1));
    }

    /// The mark to pass to [`Carried::flushed`] if a flush is owed.
    pub(crate) fn owes_flush(&self, committed: impl Fn(Tid) -> bool) -> Option<(Tid, u64)> {
        self.unflushed.filter(|&(tid, _)| !committed(tid))
    }

    /// A flush that began after [`Carried::owes_flush`] has ended.
    pub(crate) fn flushed(&mut self, mark: (Tid, u64)) {
        self.unflushed.take_if(|unflushed| *unflushed == mark);
    }

    /// Runs of superseded blocks that an i-transaction has to name.
    pub(crate) fn superseded(&self, committed: impl Fn(Tid) -> bool) -> Vec<(BlockNo, u32)> {
        let mut runs: Vec<(BlockNo, u32)> = Vec::new();
        for (&block, _) in self.superseded.iter().filter(|&(_, &tid)| !committed(tid)) {
            match runs.last_mut() {
                Some((start, count)) if start.0 + u64::from(*count) == block.0 => *count += 1,
                _ => runs.push((block, 1)),
            }
        }
        runs
    }

    /// An i-transaction that names the runs is durable.
    pub(crate) fn named(&mut self, runs: &[(BlockNo, u32)]) {
        for block in blocks_of(runs) {
            self.superseded.remove(&block);
            self.blocks.remove(&block);
        }
    }

    /// A barrier is held. Of several the last one counts, which names what those before it do.
    pub(crate) fn hold(&mut self, barrier: HeldBarrier) {
        self.held = Some(barrier);
        self.carried_again.clear();
    }

    /// Settles what the held barrier has settled, if it is durable: all up to `durable` are. Returns the mark of
    /// the writes in place that its flush has covered.
    pub(crate) fn settle_held(&mut self, durable: u64) -> Option<u64> {
        let held = self.held.take_if(|held| held.number <= durable)?;
        for block in blocks_of(&held.superseded) {
            if !self.carried_again.contains(&block) {
                self.superseded.remove(&block);
                self.blocks.remove(&block);
            }
        }
        self.carried_again.clear();
        if let Some(mark) = held.unflushed {
            self.flushed(mark);
        }
        Some(held.in_place)
    }

    /// Drops blocks of i-transactions that recovery would not apply any more.
    pub(crate) fn prune(&mut self, committed: impl Fn(Tid) -> bool) {
        // Few transactions, many blocks: each is asked after once.
        let mut last = None;
        self.blocks.retain(|_, tid| match last {
            Some((asked, keep)) if asked == *tid => keep,
            _ => last.insert((*tid, !committed(*tid))).1,
        });
        self.pruned_len = self.blocks.len();
        self.superseded.retain(|_, tid| !committed(*tid));
        self.unflushed = self.unflushed.filter(|&(tid, _)| !committed(tid));
    }

    /// Whether there are so many blocks that [`Carried::prune`] is due: twice what the last one
    /// left, so that its cost per block does not grow with their number.
    pub(crate) fn is_large(&self) -> bool {
        self.blocks.len() >= (2 * self.pruned_len).max(256)
    }
}

fn blocks_of(runs: &[(BlockNo, u32)]) -> impl Iterator<Item = BlockNo> {
    runs.iter().flat_map(|&(start, count)| (start.0..start.0 + u64::from(count)).map(BlockNo))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: fn(Tid) -> bool = |_| false;

    #[test]
    fn a_block_written_in_place_is_named_once() {
        let mut carried = Carried::default();
        for block in [5, 6, 9] {
            carried.carry(BlockNo(block), Tid(3));
        }
        carried.written_in_place(BlockNo(4), 3);
        carried.written_in_place(BlockNo(20), 3);
        assert_eq!(carried.superseded(NONE), [(BlockNo(5), 2)]);
        assert_eq!(carried.superseded(|tid| tid == Tid(3)), []);
        carried.carry(BlockNo(6), Tid(4));
        let runs = carried.superseded(NONE);
        assert_eq!(runs, [(BlockNo(5), 1)]);
        carried.named(&runs);
        assert_eq!(carried.superseded(NONE), []);
        carried.written_in_place(BlockNo(5), 2);
        assert_eq!(carried.superseded(NONE), [(BlockNo(6), 1)], "5 is not carried any more");
    }

    #[test]
    fn a_held_barrier_settles_when_it_is_durable() {
        let mut carried = Carried::default();
        carried.carry(BlockNo(5), Tid(3));
        carried.written_in_place(BlockNo(5), 1);
        carried.mapped_unflushed(Tid(3));
        let (unflushed, superseded) = (carried.owes_flush(NONE), carried.superseded(NONE));
        carried.hold(HeldBarrier { number: 4, in_place: 9, unflushed, superseded });
        assert_eq!(carried.settle_held(3), None);
        assert!(carried.owes_flush(NONE).is_some() && !carried.superseded(NONE).is_empty());
        assert_eq!(carried.settle_held(4), Some(9));
        assert!(carried.owes_flush(NONE).is_none() && carried.superseded(NONE).is_empty());
        assert_eq!(carried.settle_held(5), None);
    }

    #[test]
    fn a_later_write_owes_another_flush() {
        let mut carried = Carried::default();
        assert_eq!(carried.owes_flush(NONE), None);
        carried.mapped_unflushed(Tid(3));
        let mark = carried.owes_flush(NONE).unwrap();
        carried.mapped_unflushed(Tid(3));
        carried.flushed(mark);
        let mark = carried.owes_flush(NONE).unwrap();
        assert_eq!(carried.owes_flush(|tid| tid == Tid(3)), None);
        carried.flushed(mark);
        assert_eq!(carried.owes_flush(NONE), None);
    }

    #[test]
    fn a_block_carried_again_is_not_what_a_held_barrier_named() {
        let mut carried = Carried::default();
        carried.carry(BlockNo(5), Tid(3));
        carried.carry(BlockNo(6), Tid(3));
        carried.written_in_place(BlockNo(5), 2);
        let superseded = carried.superseded(NONE);
        carried.hold(HeldBarrier { number: 4, in_place: 9, unflushed: None, superseded });
        carried.carry(BlockNo(5), Tid(3));
        assert_eq!(carried.settle_held(4), Some(9));
        carried.written_in_place(BlockNo(5), 2);
        assert_eq!(carried.superseded(NONE), [(BlockNo(5), 1)], "6 is not carried any more");
    }
}
