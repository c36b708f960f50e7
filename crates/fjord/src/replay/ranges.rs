//! Ranges of a file in a log; later records replace earlier ones.
//!
//! Invariant: ranges do not overlap, and none is empty.

use std::collections::BTreeMap;

use fjord_format::types::BlockNo;

/// What a range of a file is mapped to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Target {
    /// The block of its first block.
    pub(super) start: BlockNo,
    /// Whether it holds data.
    pub(super) written: bool,
}

/// Ranges of a file with what they are to be: `None` for a hole.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Ranges {
    /// By first block: the block after the last, and the target.
    map: BTreeMap<u64, (u64, Option<Target>)>,
}

/// The target of the part of a range that begins `offset` blocks after its start.
fn shifted(target: Option<Target>, offset: u64) -> Option<Target> {
    target.map(|target| Target { start: BlockNo(target.start.0.saturating_add(offset)), ..target })
}

impl Ranges {
    /// Lets `from..to` be `target`, whatever was said before.
    pub(super) fn set(&mut self, from: u64, to: u64, target: Option<Target>) {
        if from >= to {
            return;
        }
        self.cut(from);
        self.cut(to);
        let covered: Vec<u64> = self.map.range(from..to).map(|(start, _)| *start).collect();
        for start in covered {
            self.map.remove(&start);
        }
        self.map.insert(from, (to, target));
    }

    /// Lets a range begin at `at` if one goes across it.
    fn cut(&mut self, at: u64) {
        let Some((&start, &(end, target))) = self.map.range(..at).next_back() else { return };
        if end > at {
            self.map.insert(start, (at, target));
            self.map.insert(at, (end, shifted(target, at - start)));
        }
    }

    /// All ranges, in order.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, u64, Option<Target>)> + '_ {
        self.map.iter().map(|(&from, &(to, target))| (from, to, target))
    }

    /// Forgets everything.
    pub(super) fn clear(&mut self) {
        self.map.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(start: u64) -> Option<Target> {
        Some(Target { start: BlockNo(start), written: true })
    }

    #[test]
    fn the_last_word_counts() {
        let mut ranges = Ranges::default();
        ranges.set(0, 10, at(100));
        ranges.set(3, 5, None);
        ranges.set(4, 7, at(200));
        ranges.set(9, 9, at(1));
        let all: Vec<_> = ranges.iter().collect();
        assert_eq!(
            all,
            [(0, 3, at(100)), (3, 4, None), (4, 7, at(200)), (7, 10, at(107))],
            "what is left of a run keeps its blocks"
        );
        ranges.set(0, u64::from(u32::MAX), None);
        assert_eq!(ranges.iter().count(), 1);
    }
}
