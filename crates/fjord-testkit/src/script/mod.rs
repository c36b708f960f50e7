//! A seeded script of varied operations, as abstract steps with several executors.
//!
//! The same [`Script`] runs through a directory ([`KernelExecutor`]: kernel ext4 or a FUSE mount)
//! or through fjord's library; outcomes are errno for errno comparable, and so are the trees.
//!
//! Invariant: a script depends on its seed only; paths are relative and stay inside the root.

mod engine;
pub mod fsxattr;
mod generate;
mod kernel;

use std::fmt;

pub use engine::EngineExecutor;
pub(crate) use engine::{decode_dev, join, list};
pub use generate::{Shape, acl};
pub use kernel::KernelExecutor;

use crate::manifest::{Kind, Stamp};

/// A path below the root; components separated by `/`.
pub type Path = Bytes;

/// Bytes that messages show as short text.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bytes(pub Vec<u8>);

impl std::ops::Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl From<&str> for Bytes {
    fn from(text: &str) -> Self {
        Bytes(text.as_bytes().to_vec())
    }
}

impl From<Vec<u8>> for Bytes {
    fn from(bytes: Vec<u8>) -> Self {
        Bytes(bytes)
    }
}

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 48;
        let text = String::from_utf8_lossy(&self.0[..self.0.len().min(SHOWN)]);
        write!(f, "{text:?}")?;
        if self.0.len() > SHOWN {
            write!(f, "… ({} bytes)", self.0.len())?;
        }
        Ok(())
    }
}

/// One step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Op {
    /// Makes a directory.
    Mkdir {
        /// Where.
        path: Path,
        /// Permission bits.
        mode: u32,
    },
    /// Makes an empty file, failing if the name is taken.
    Create {
        /// Where.
        path: Path,
        /// Permission bits.
        mode: u32,
    },
    /// Writes the pattern of `seed` to a range of an existing file.
    Write {
        /// File.
        path: Path,
        /// Byte offset.
        offset: u64,
        /// Length in bytes.
        len: u64,
        /// Pattern.
        seed: u64,
    },
    /// Writes the pattern of `seed` after the end, with O_APPEND.
    Append {
        /// File.
        path: Path,
        /// Length in bytes.
        len: u64,
        /// Pattern.
        seed: u64,
    },
    /// Sets the size.
    Truncate {
        /// File.
        path: Path,
        /// New size in bytes.
        size: u64,
    },
    /// fallocate(2).
    Fallocate {
        /// File.
        path: Path,
        /// FALLOC_FL_* bits.
        mode: u32,
        /// Byte offset.
        offset: u64,
        /// Length in bytes.
        len: u64,
    },
    /// Makes a hard link.
    Link {
        /// Existing file.
        from: Path,
        /// New name.
        to: Path,
    },
    /// Makes a symbolic link.
    Symlink {
        /// Where.
        path: Path,
        /// What it holds.
        target: Bytes,
    },
    /// Makes a pipe, socket or device.
    Mknod {
        /// Where.
        path: Path,
        /// Which.
        kind: Kind,
        /// Permission bits.
        mode: u32,
        /// Major and minor number of devices.
        rdev: (u32, u32),
    },
    /// Removes a name.
    Unlink {
        /// Which.
        path: Path,
    },
    /// Removes a directory.
    Rmdir {
        /// Which.
        path: Path,
    },
    /// renameat2(2).
    Rename {
        /// Old name.
        from: Path,
        /// New name.
        to: Path,
        /// RENAME_* bits.
        flags: u32,
    },
    /// Sets an extended attribute.
    SetXattr {
        /// File.
        path: Path,
        /// Full name.
        name: Bytes,
        /// Value.
        value: Bytes,
        /// 0, XATTR_CREATE (1) or XATTR_REPLACE (2).
        flags: u32,
    },
    /// Removes an extended attribute.
    RemoveXattr {
        /// File.
        path: Path,
        /// Full name.
        name: Bytes,
    },
    /// Sets permission bits.
    Chmod {
        /// File.
        path: Path,
        /// Bits.
        mode: u32,
    },
    /// Sets owner and group, not following links.
    Chown {
        /// File.
        path: Path,
        /// Owner.
        uid: u32,
        /// Group.
        gid: u32,
    },
    /// Sets access and modification time, not following links.
    SetTimes {
        /// File.
        path: Path,
        /// Access time.
        atime: Stamp,
        /// Modification time.
        mtime: Stamp,
    },
    /// Sets `set` and clears `clear` among the FS_IOC_SETFLAGS bits.
    SetFlags {
        /// File or directory.
        path: Path,
        /// Bits to set.
        set: u32,
        /// Bits to clear.
        clear: u32,
    },
    /// Sets the project ID.
    SetProject {
        /// File or directory.
        path: Path,
        /// ID.
        project: u32,
    },
    /// Makes an unnamed file in `dir`, writes it, and gives it a name or lets it go.
    Tmpfile {
        /// Directory.
        dir: Path,
        /// Name to give, if any.
        link: Option<Path>,
        /// Length in bytes.
        len: u64,
        /// Pattern.
        seed: u64,
    },
    /// Opens a file, removes its name, writes on, closes.
    WriteUnlinked {
        /// File.
        path: Path,
        /// Bytes to append after the unlink.
        len: u64,
        /// Pattern.
        seed: u64,
    },
    /// fsync of a file or directory.
    Fsync {
        /// Which.
        path: Path,
    },
    /// Gives every entry of the tree times drawn from the seed, so that trees made at different
    /// moments compare.
    StampAll {
        /// Seed.
        seed: u64,
    },
}

/// An errno as an outcome.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Errno(pub i32);

impl fmt::Debug for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", std::io::Error::from_raw_os_error(self.0))
    }
}

/// What a step gave.
pub type Outcome = Result<(), Errno>;

/// Something that can carry out steps on a tree.
pub trait Executor {
    /// Carries out one step.
    fn apply(&mut self, op: &Op) -> Outcome;

    /// The whole content of a file.
    fn read_file(&mut self, path: &[u8]) -> Result<Vec<u8>, Errno>;

    /// Carries out all steps and returns their outcomes.
    fn run(&mut self, script: &Script) -> Vec<Outcome> {
        script.ops.iter().map(|op| self.apply(op)).collect()
    }
}

/// A list of steps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Script {
    /// What it was made from.
    pub seed: u64,
    /// The steps.
    pub ops: Vec<Op>,
}

impl Script {
    /// Lines for the steps whose outcomes differ between two executors (at most 20).
    pub fn compare_outcomes(&self, left: &[Outcome], right: &[Outcome]) -> Vec<String> {
        let mut lines = Vec::new();
        for (index, op) in self.ops.iter().enumerate() {
            if left.get(index) != right.get(index) && lines.len() < 20 {
                let op = format!("{op:?}");
                let op: String = op.chars().take(200).collect();
                lines.push(format!("step {index} {op}: {:?} != {:?}", left[index], right[index]));
            }
        }
        lines
    }
}

/// The times that [`Op::StampAll`] gives to a path: (access, modification).
pub fn stamp_of(seed: u64, path: &[u8]) -> (Stamp, Stamp) {
    let mut hash = seed;
    for chunk in path.chunks(8) {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        hash = crate::rng::mix(hash ^ u64::from_le_bytes(word));
    }
    let mut rng = crate::rng::Rng::new(hash);
    let mut one = || {
        // Most in recent decades; some before 1970 and beyond 2038. ext4 reaches 2446, but e2fsck
        // takes what lies beyond 2310 for a mistake.
        let sec = match rng.below(10) {
            0 => -(rng.below(60 * 365 * 86_400) as i64),
            1 => rng.range(1 << 31, 10_700_000_000) as i64,
            _ => rng.range(0, 1 << 31) as i64,
        };
        Stamp { sec, nsec: rng.below(1_000_000_000) as u32 }
    };
    (one(), one())
}
