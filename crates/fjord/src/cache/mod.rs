//! Bounded caches: file pages and metadata blocks.
//!
//! Owns all memory that grows with use. Invariant: each cache has a byte budget; what is
//! over it is dropped as soon as it is clean, and writers wait while dirty data alone
//! would exceed its share.

pub(crate) mod meta;
pub(crate) mod page;
