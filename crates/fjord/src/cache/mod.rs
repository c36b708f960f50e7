//! Bounded caches: file pages and metadata blocks.
//!
//! Owns all memory that grows with use. Invariant: each cache has a byte budget; above it, clean
//! entries are evicted, and writers wait while dirty data exceeds its share.

pub(crate) mod meta;
pub(crate) mod page;
