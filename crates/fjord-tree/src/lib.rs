//! Trees of files in and out of ext4 images: directory trees of the host and tar streams.
//!
//! Owns what an entry needs to pass between the two worlds without loss (owners, times, access
//! lists, capabilities, hard links, holes, devices). Invariant: a path of the source never leaves
//! the image, and a path of the image never leaves the target.

mod builder;
mod contents;
mod error;
mod host;
mod tar;

pub use builder::{Populated, Source, populate};
pub use contents::Contents;
pub use error::{Result, TreeError};
