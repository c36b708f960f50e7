//! Extent trees.
//!
//! Owns reading ([`path`]), the one place through which nodes change ([`edit`]), and the
//! operations on top: insert and change of state ([`change`]), removal ([`remove`]), moving
//! ([`shift`]). Invariants:
//! - every node of a path has the depth that its parent says, so no damaged tree can loop;
//! - the key of an index entry is the first block of its child, as e2fsck demands;
//! - no node but the root is empty; a tree that fits the root lies in the root.

mod change;
mod edit;
mod path;
mod remove;
mod shift;

pub(super) use change::{insert, mark};
pub(super) use path::{lookup, neighbour};
pub(super) use remove::remove;
pub(super) use shift::{collapse, collapse_at_once, expand, expand_at_once};
