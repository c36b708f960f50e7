//! Bytes to types and back for ext4, ext2/3 and JBD2: no I/O, no unsafe.
//!
//! The only place of the workspace that knows an on-disk offset. Raw structures have the kernel's
//! field names; decoders return validated domain types or a typed [`FormatError`] for any bytes.
//! One definition serves reading and writing: what was decoded encodes to the same bytes.

#![forbid(unsafe_code)]

pub mod acl;
pub mod bitmap;
pub mod blockmap;
pub mod checksum;
pub mod dirent;
pub mod disk;
pub mod error;
pub mod extent;
pub mod features;
pub mod geometry;
pub mod group;
pub mod growth;
pub mod hash;
pub mod htree;
pub mod ijournal;
pub mod inline_data;
pub mod inode;
pub mod jbd2;
mod le;
pub mod mmp;
pub mod orphan_file;
pub mod superblock;
pub mod time;
pub mod types;
pub mod xattr;

pub use error::{FormatError, Result};
pub use types::{BlockNo, GroupNo, InodeNo, LogicalBlock, Tid};
