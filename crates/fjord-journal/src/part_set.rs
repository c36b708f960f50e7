//! Sets of parts, and which parts of a transaction must commit together.
//!
//! Invariant: the sets of a [`PartUnions`] are disjoint; parts that one handle touched are in one.

use std::collections::{HashMap, HashSet};

/// A part of the file system, by a number that the caller chooses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Part(pub u32);

impl Part {
    /// A block of no single part: only a full commit includes it.
    pub const WHOLE: Part = Part(u32::MAX);
}

/// Parts that commit together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PartSet(HashSet<Part>);

impl PartSet {
    /// Whether `part` is in the set.
    pub fn contains(&self, part: Part) -> bool {
        self.0.contains(&part)
    }

    /// Number of parts.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl FromIterator<Part> for PartSet {
    fn from_iter<I: IntoIterator<Item = Part>>(parts: I) -> PartSet {
        PartSet(parts.into_iter().collect())
    }
}

/// Parts of a transaction that must commit together: disjoint sets with path halving.
#[derive(Debug, Default)]
pub(crate) struct PartUnions {
    /// Each touched part and another of its set; the root of a set is its own.
    parent: HashMap<Part, Part>,
}

impl PartUnions {
    /// A handle touched `parts`.
    pub(crate) fn merge(&mut self, parts: &[Part]) {
        let Some((&first, rest)) = parts.split_first() else { return };
        let mut root = self.root(first);
        for &part in rest {
            let other = self.root(part);
            self.parent.insert(other, root);
            root = self.root(root);
        }
    }

    /// Whether a handle touched the part since it last committed.
    pub(crate) fn contains(&self, part: Part) -> bool {
        self.parent.contains_key(&part)
    }

    /// The closure of `seeds`; empty if no handle touched them.
    pub(crate) fn closure(&mut self, seeds: &[Part]) -> PartSet {
        let touched = seeds.iter().copied().filter(|&seed| self.contains(seed));
        let touched: Vec<Part> = touched.collect();
        let roots: HashSet<Part> = touched.into_iter().map(|seed| self.root(seed)).collect();
        let all: Vec<Part> = self.parent.keys().copied().collect();
        all.into_iter().filter(|&part| roots.contains(&self.root(part))).collect()
    }

    /// Removes the parts of a closure.
    pub(crate) fn remove(&mut self, closure: &PartSet) {
        self.parent.retain(|&part, _| !closure.contains(part));
    }

    fn root(&mut self, part: Part) -> Part {
        let mut at = part;
        loop {
            let parent = *self.parent.entry(at).or_insert(at);
            if parent == at {
                return at;
            }
            let above = self.parent.get(&parent).copied().unwrap_or(parent);
            self.parent.insert(at, above);
            at = above;
        }
    }
}

/// Why a full commit was made instead of a partial commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WholeReason {
    /// There is no log, or no parts are defined.
    NoParts,
    /// The closure includes a block of no single part.
    WholePart,
    /// The closure is the whole transaction.
    Everything,
    /// The closure is nearly the whole transaction.
    NearlyAll,
    /// The log has no room for two transactions instead of one.
    LogSpace,
    /// A full commit was in progress.
    UnderWay,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn set(parts: impl IntoIterator<Item = u32>) -> PartSet {
        parts.into_iter().map(Part).collect()
    }

    #[test]
    fn parts_without_a_common_handle_stay_apart() {
        let mut unions = PartUnions::default();
        unions.merge(&[Part(1), Part(2)]);
        unions.merge(&[Part(3)]);
        unions.merge(&[]);
        assert_eq!(unions.closure(&[Part(1)]), set([1, 2]));
        assert_eq!(unions.closure(&[Part(3)]), set([3]));
        assert_eq!(unions.closure(&[Part(9)]), set([]));
        unions.remove(&set([1, 2]));
        assert!(!unions.contains(Part(2)) && unions.contains(Part(3)));
    }

    proptest! {
        /// Against the definition: add what shares a handle until nothing is added.
        #[test]
        fn a_closure_is_what_the_handles_say(
            handles in prop::collection::vec(prop::collection::vec(0u32..12, 0..4), 0..12),
            seeds in prop::collection::vec(0u32..14, 0..3),
        ) {
            let mut unions = PartUnions::default();
            for handle in &handles {
                unions.merge(&handle.iter().copied().map(Part).collect::<Vec<_>>());
            }
            let touched: HashSet<u32> = handles.iter().flatten().copied().collect();
            let mut wanted: HashSet<u32> =
                seeds.iter().copied().filter(|seed| touched.contains(seed)).collect();
            loop {
                let before = wanted.len();
                for handle in &handles {
                    if handle.iter().any(|part| wanted.contains(part)) {
                        wanted.extend(handle);
                    }
                }
                if wanted.len() == before {
                    break;
                }
            }
            let seeds: Vec<Part> = seeds.into_iter().map(Part).collect();
            let closure = unions.closure(&seeds);
            prop_assert_eq!(&closure, &set(wanted.iter().copied()));
            unions.remove(&closure);
            for part in touched {
                prop_assert_eq!(unions.contains(Part(part)), !wanted.contains(&part));
            }
        }
    }
}
