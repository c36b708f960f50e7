//! The cells of all groups, to which growth adds.
//!
//! Invariants: a cell never moves and never goes; cells are added in the order of groups, by one
//! thread at a time; a new one has nothing free until its group is durable, so that whoever meets
//! it passes it by.

use super::table::Cell;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Cells {
    /// Those of the mount.
    first: Vec<Cell>,
    /// Those of groups made since.
    later: boxcar::Vec<Cell>,
}

impl Cells {
    pub(super) fn new(count: usize) -> Cells {
        let mut first = Vec::new();
        first.resize_with(count, Cell::default);
        Cells { first, later: boxcar::Vec::new() }
    }

    pub(super) fn get(&self, index: usize) -> Option<&Cell> {
        match self.first.get(index) {
            Some(cell) => Some(cell),
            None => self.later.get(index - self.first.len()),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.first.len() + self.later.count()
    }

    /// Adds cells of groups that are not in use yet until there are `count`.
    pub(super) fn grow_to(&self, count: usize) {
        while self.len() < count {
            self.later.push(Cell::default());
        }
    }
}
