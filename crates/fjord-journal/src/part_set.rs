//! Sets of parts, and which parts of a transaction must commit together.
//!
//! Invariants: the sets of a [`PartUnions`] are disjoint; parts that one handle touched are in one. Of
//! each part that is touched, the generation is known in which it was touched first.

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

/// Parts that handles touched, each with the number of partial commits that its transaction had when
/// it was touched first since it last committed.
#[derive(Debug, Default)]
pub(crate) struct ChangedParts(HashMap<Part, u32>);

impl ChangedParts {
    /// Whether any of `seeds` has changes up to those of `generation`, or any if that is `None`.
    pub(crate) fn has_any(&self, seeds: &[Part], generation: Option<u32>) -> bool {
        let has = |since: &u32| generation.is_none_or(|generation| *since <= generation);
        seeds.iter().any(|seed| self.0.get(seed).is_some_and(has))
    }
}

/// Parts of a transaction that must commit together: disjoint sets with path halving.
#[derive(Debug, Default)]
pub(crate) struct PartUnions {
    /// Each touched part and another of its set; the root of a set is its own.
    parent: HashMap<Part, Part>,
    changed: ChangedParts,
}

impl PartUnions {
    /// A handle of `generation` touched `parts`.
    pub(crate) fn merge(&mut self, parts: &[Part], generation: u32) {
        for &part in parts {
            self.changed.0.entry(part).or_insert(generation);
        }
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

    /// The touched parts.
    pub(crate) fn changed(&self) -> &ChangedParts {
        &self.changed
    }

    /// Removes the parts of a closure.
    pub(crate) fn take(&mut self, closure: &PartSet) -> ChangedParts {
        self.parent.retain(|&part, _| !closure.contains(part));
        ChangedParts(self.changed.0.extract_if(|&part, _| closure.contains(part)).collect())
    }

    /// Removes all parts.
    pub(crate) fn take_all(&mut self) -> ChangedParts {
        std::mem::take(self).changed
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
        unions.merge(&[Part(1), Part(2)], 0);
        unions.merge(&[Part(3)], 0);
        unions.merge(&[], 0);
        assert_eq!(unions.closure(&[Part(1)]), set([1, 2]));
        assert_eq!(unions.closure(&[Part(3)]), set([3]));
        assert_eq!(unions.closure(&[Part(9)]), set([]));
        unions.take(&set([1, 2]));
        assert!(!unions.contains(Part(2)) && unions.contains(Part(3)));
    }

    #[test]
    fn changes_are_known_from_the_first_since_the_last_commit_on() {
        let mut unions = PartUnions::default();
        unions.merge(&[Part(1)], 3);
        unions.merge(&[Part(1), Part(2)], 4);
        let has = |changed: &ChangedParts, part, generation| {
            changed.has_any(&[Part(part)], Some(generation))
        };
        assert!(has(unions.changed(), 1, 3) && !has(unions.changed(), 1, 2));
        assert!(has(unions.changed(), 2, 4) && !has(unions.changed(), 2, 3));
        let taken = unions.take(&set([1, 2]));
        assert!(has(&taken, 1, 3) && taken.has_any(&[Part(2)], None));
        unions.merge(&[Part(1)], 5);
        assert!(has(unions.changed(), 1, 5) && !has(unions.changed(), 1, 4));
        assert!(!unions.changed().has_any(&[Part(2)], None));
        assert!(unions.take_all().has_any(&[Part(2), Part(1)], None));
        assert!(!unions.contains(Part(1)));
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
                unions.merge(&handle.iter().copied().map(Part).collect::<Vec<_>>(), 0);
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
            unions.take(&closure);
            for part in touched {
                prop_assert_eq!(unions.contains(Part(part)), !wanted.contains(&part));
            }
        }
    }
}
