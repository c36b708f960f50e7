//! Directory trees of the host: [`read`] brings them into an image, [`write`] out of one.
//!
//! Invariant: concurrent changes of the tree lead to an error or to an older state, never outside
//! the tree: entries are reached through the open directory that has them, and symbolic links are
//! copied, not followed.

pub(crate) mod read;
pub(crate) mod sys;
pub(crate) mod write;

/// Directories open at once on the way down; deeper trees are refused.
pub(crate) const DEPTH_MAX: usize = 500;

/// Whether this process has the privileges of root, or believes so (fakeroot).
pub fn is_root() -> bool {
    sys::effective_uid() == 0
}
