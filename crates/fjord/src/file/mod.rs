//! File content: reading, writing, writeback, truncation, preallocation.
//!
//! Owns what happens between the page cache and the device for file data. Invariants:
//! - data is on the device (or attached to the transaction) before an extent that
//!   points to it can commit, and before the on-disk size that shows it can commit;
//! - no block is written by two requests at once: writeback of an inode runs under its
//!   `writeback` lock and waits for the writes before it;
//! - blocks are taken away from a file only under its `writeback` lock, when nothing is
//!   in flight.

pub(crate) mod background;
pub(crate) mod carry;
pub(crate) mod data_device;
pub(crate) mod fallocate;
pub(crate) mod inline;
pub(crate) mod pace;
pub(crate) mod read;
pub(crate) mod seek;
pub(crate) mod truncate;
pub(crate) mod write;
pub(crate) mod writeback;
