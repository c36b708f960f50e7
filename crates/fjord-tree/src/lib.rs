//! Trees of files in and out of ext4 images: directory trees of the host and tar streams.
//!
//! Owns what an entry needs to pass between the two worlds without loss (owners, times, access
//! lists, capabilities, hard links, holes, devices). Invariant: a path of the source never leaves
//! the image, and a path of the image never leaves the target.

mod build;
mod builder;
mod contents;
mod copy;
mod digest;
mod error;
mod exclude;
mod extract;
mod fit;
mod gather;
mod host;
mod marks;
mod owners;
mod put;
mod rules;
mod shrink;
mod tar;

pub use builder::{Populated, Progress, Source, populate};
pub use contents::Contents;
pub use copy::{CopyItem, CopyRules, copy};
pub use error::{Full, Result, TreeError, limit};
pub use exclude::Exclude;
pub use extract::{
    ExtractRules, Extracted, extract, extract_into, extract_to_stream, readable_names,
};
pub use fit::Room;
pub use host::is_root;
pub use owners::{IdKind, IdOfName, Owners};
pub use put::{Destination, put, put_stream};
pub use rules::Rules;
pub use shrink::{shrink, small};
pub use tar::compress::{CompressError, Compression};
pub use tar::error::{EntryError, HeaderError, TarError};
pub use tar::input::{TarInput, TarOptions};
