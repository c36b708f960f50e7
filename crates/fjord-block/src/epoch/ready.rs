//! Ready requests in the order of the discipline. Owns the indexes by class, age and offset.
//!
//! Discipline: strict priority of classes; within a class, the oldest if it is past its deadline,
//! else the next one by ascending offset from the end of the last (C-SCAN).

use std::collections::{BTreeMap, BTreeSet};

use super::types::RequestId;
use crate::device::Class;

/// The ready requests of one class.
#[derive(Clone, Debug, Default, Hash)]
struct Line {
    /// By arrival time.
    by_age: BTreeSet<(u64, RequestId)>,
    by_offset: BTreeSet<(u64, RequestId)>,
    /// End offset of the last command.
    head: u64,
}

/// All ready requests.
#[derive(Clone, Debug, Default, Hash)]
pub(super) struct Ready {
    lines: [Line; 3],
    /// Ready writes of all classes by offset, for merging.
    writes: BTreeMap<u64, RequestId>,
}

/// Position of a request among the ready ones.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) id: RequestId,
    pub(super) class: Class,
    pub(super) pushed_ns: u64,
    /// Offset of its remaining part.
    pub(super) offset: u64,
    pub(super) is_write: bool,
}

impl Ready {
    pub(super) fn insert(&mut self, place: Place) {
        let line = &mut self.lines[place.class as usize];
        line.by_age.insert((place.pushed_ns, place.id));
        line.by_offset.insert((place.offset, place.id));
        if place.is_write {
            self.writes.insert(place.offset, place.id);
        }
    }

    /// Removes a request; returns whether it was there.
    pub(super) fn remove(&mut self, place: Place) -> bool {
        let line = &mut self.lines[place.class as usize];
        if place.is_write && self.writes.get(&place.offset) == Some(&place.id) {
            self.writes.remove(&place.offset);
        }
        line.by_offset.remove(&(place.offset, place.id));
        line.by_age.remove(&(place.pushed_ns, place.id))
    }

    /// A command of this class ended here.
    pub(super) fn set_head(&mut self, class: Class, end: u64) {
        self.lines[class as usize].head = end;
    }

    pub(super) fn is_empty(&self, class: Class) -> bool {
        self.lines[class as usize].by_age.is_empty()
    }

    /// Arrival and number of the oldest of a class.
    pub(super) fn oldest(&self, class: Class) -> Option<(u64, RequestId)> {
        self.lines[class as usize].by_age.first().copied()
    }

    /// The next of a class by the discipline.
    pub(super) fn next(&self, class: Class, now_ns: u64, deadline_ns: u64) -> Option<RequestId> {
        let line = &self.lines[class as usize];
        let (pushed_ns, oldest) = self.oldest(class)?;
        if now_ns.saturating_sub(pushed_ns) >= deadline_ns {
            return Some(oldest);
        }
        let ahead = line.by_offset.range((line.head, RequestId(0))..).next();
        ahead.or_else(|| line.by_offset.first()).map(|(_, id)| *id)
    }

    /// All of a class.
    pub(super) fn all(&self, class: Class) -> impl Iterator<Item = RequestId> {
        self.lines[class as usize].by_age.iter().map(|(_, id)| *id)
    }

    /// The ready write that starts at `offset`.
    pub(super) fn write_at(&self, offset: u64) -> Option<RequestId> {
        self.writes.get(&offset).copied()
    }

    /// The nearest ready write that starts below `offset`.
    pub(super) fn write_below(&self, offset: u64) -> Option<RequestId> {
        self.writes.range(..offset).next_back().map(|(_, id)| *id)
    }
}
