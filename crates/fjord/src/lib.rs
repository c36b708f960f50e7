//! A user-space ext4 engine.
//!
//! [`Fs`] opens an image, replays its journal and gives [`InodeRef`]s; every change is
//! journaled in JBD2's format, so that Linux, e2fsck and fjord recover it alike. Front
//! ends (FUSE, the command line, embedding programs) sit on this crate; below it are
//! `fjord-journal` (the log), `fjord-block` (the device) and `fjord-format` (bytes).
//!
//! ```no_run
//! use fjord::{Cred, Fs, MountOptions};
//!
//! let fs = Fs::open("disk.img", &MountOptions::default())?;
//! let file = fs.root()?.create(b"hello", 0o644, &Cred::root())?;
//! file.write(0, b"world")?;
//! file.fsync(false)?;
//! drop(file);
//! fs.unmount()?;
//! # Ok::<(), fjord::Error>(())
//! ```

#![forbid(unsafe_code)]

mod acl;
mod alloc;
mod api;
mod areas;
pub mod attr;
pub mod awake;
mod cache;
mod dir;
mod error;
mod file;
mod fs;
mod fsync;
mod inode;
pub mod inspect;
mod map;
mod namei;
mod options;
mod orphan;
mod replay;
pub mod snapshot;
#[cfg(test)]
mod testing;
mod vfs;
mod xattr;

pub use api::{File, OpenOptions, OwnedDirEntry, ReadDir};
pub use areas::AreaLayout;
pub use attr::{Attr, Cred, FileKind, SetAttr, SetTime, StatFs, Timespec};
pub use error::{Error, Result};
pub use file::fallocate::FallocMode;
pub use file::seek::FiemapExtent;
pub use file::write::WriteOptions;
pub use fjord_format::InodeNo;
pub use fs::events::{Event, Severity};
pub use fs::status::{Failure, ShutdownMode};
pub use fsync::stats::{Fallback, FsyncStats, LatencyHistogram};
pub use options::{AtimeMode, DataMode, FsyncPolicyKind, MountOptions, Scheduler};
pub use vfs::{DirEntry, Fs, InodeRef, OpenFile, RenameFlags, Stats, TrimRange, XattrFlags};
