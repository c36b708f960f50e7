//! The layout of a mounted file system, which can grow.
//!
//! Owns every version of the [`Geometry`] since the mount. Invariants: versions are added, never
//! removed, so that a reference to one stays valid for the life of the mount; each has all blocks,
//! inodes and groups of the one before it; all other fields but `desc_block_count` and
//! `reserved_gdt_blocks` are the same in all.
//!
//! Whoever looks twice may see two versions. What a number is checked against is at least as new as
//! the number: a growth publishes the layout before anything refers to what it added.

use std::ops::Deref;
use std::sync::atomic::{AtomicUsize, Ordering};

use fjord_format::geometry::Geometry;

/// See the module. Dereferences to the newest version.
#[derive(Debug)]
pub(crate) struct Geo {
    /// That of the mount.
    first: Geometry,
    /// Those after it, in order.
    later: boxcar::Vec<Geometry>,
    /// How many of `later` have been published.
    published: AtomicUsize,
}

impl Geo {
    pub(crate) fn new(first: Geometry) -> Geo {
        Geo { first, later: boxcar::Vec::new(), published: AtomicUsize::new(0) }
    }

    /// Makes `next` the layout. To be called by one thread at a time.
    pub(crate) fn publish(&self, next: Geometry) {
        let index = self.later.push(next);
        self.published.store(index + 1, Ordering::Release);
    }
}

impl Deref for Geo {
    type Target = Geometry;

    fn deref(&self) -> &Geometry {
        match self.published.load(Ordering::Acquire) {
            0 => &self.first,
            count => self.later.get(count - 1).unwrap_or(&self.first),
        }
    }
}
