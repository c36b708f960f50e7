//! A user-space ext4 engine: makes, reads and writes ext4 images without root and without a mount.
//!
//! [`Fs`] is a file system in use. [`Fs::create`] formats an image file and opens it, [`Fs::open`]
//! opens one and recovers it after a crash; the calls by path do what the functions of the same names
//! in `std::fs` do.
//!
//! ```
//! use fjord::{Fs, MkfsOptions, MountOptions};
//!
//! # let dir = tempfile::tempdir()?;
//! # let path = dir.path().join("disk.img");
//! let image = MkfsOptions { size_bytes: Some(64 << 20), ..MkfsOptions::default() };
//! let fs = Fs::create(&path, &image, &MountOptions::default())?;
//! fs.create_dir_all("/etc/app")?;
//! fs.write("/etc/app/config", "colour = blue\n")?;
//! fs.open_file("/etc/app/config")?.sync_all()?; // survives a crash from here on
//! for entry in fs.walk("/etc")? {
//!     println!("{}", entry?.path().display());
//! }
//! fs.unmount()?; // writes the rest, and marks the image clean
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! **After a crash** an image made with the defaults must be recovered by fjord before Linux or e2fsck
//! take it; [`Fs::open`] says why, and how to choose otherwise. **Without [`Fs::unmount`]** an image is
//! left as a crash leaves it.
//!
//! - Calls by path: [`Fs`], [`File`], [`OpenOptions`], [`ReadDir`], [`Walk`], [`Attr`].
//! - Calls by inode, for front ends: [`InodeRef`], [`OpenFile`], with [`Cred`] and [`SetAttr`].
//! - Where an image lies: a file or block device ([`FileDevice`]), memory ([`MemDevice`]), anything else
//!   that implements [`Device`].
//! - How it is made and opened: [`MkfsOptions`], [`MountOptions`], [`FsyncPolicyKind`].
//! - What goes wrong: [`Error`], which converts to [`std::io::Error`].
//!
//! Every change is journaled in JBD2's format. Below this crate are `fjord-journal` (the log),
//! `fjord-block` (devices), `fjord-mkfs` (the formatter) and `fjord-format` (bytes). Everything is
//! `Send` and `Sync`; calls lock inside.

#![forbid(unsafe_code)]

mod acl;
mod alloc;
mod api;
mod areas;
pub mod attr;
pub mod awake;
mod cache;
mod dir;
mod disk;
mod error;
mod file;
mod fs;
mod fsync;
mod image_name;
mod inode;
mod inode_ref;
pub mod inspect;
mod label;
mod map;
mod namei;
mod options;
mod orphan;
mod replay;
pub mod resize;
pub mod snapshot;
#[cfg(test)]
mod testing;
mod vfs;
mod xattr;

pub use api::{File, FileTimes, OpenOptions, OwnedDirEntry, Permissions, ReadDir, Walk, WalkEntry};
pub use areas::AreaLayout;
pub use attr::{Attr, Cred, FileKind, SetAttr, SetTime, StatFs, Timespec};
pub use dir::htree::INDEX_FULL;
pub use disk::{DiskContents, Partitions};
pub use error::{Error, Result};
pub use file::fallocate::FallocMode;
pub use file::seek::FiemapExtent;
pub use file::write::WriteOptions;
pub use fjord_block::{Device, FileDevice, FileOptions, MemDevice, MemImage, OpenError};
pub use fjord_format::InodeNo;
pub use fjord_journal::{JournalIo, JournalLists, RecoveryReport};
pub use fjord_mkfs::{IjournalAreas, JournalSize, MkfsOptions};
pub use fs::events::{Event, Severity};
pub use fs::status::{Failure, ShutdownMode};
pub use fsync::Epoch;
pub use fsync::stats::{Fallback, FsyncStats, LatencyHistogram};
pub use image_name::ImageName;
pub use label::LABEL_BYTES_MAX;
pub use options::{AtimeMode, CommitPipeline, DataMode, FsyncPolicyKind, MountOptions, Scheduler};
pub use vfs::{
    DeviceWatch, DirEntry, Fs, InodeRef, OpenFile, RenameFlags, Stats, TrimRange, XattrFlags,
};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
