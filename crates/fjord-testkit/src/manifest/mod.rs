//! Everything a user can see of a tree, as a value: [`Manifest`].
//!
//! Invariant: two trees with equal manifests cannot be told apart by reading them. Content is
//! kept as hashes of 64 KiB pieces with all-zero pieces left out, so that it does not depend on
//! where the holes are; holes are kept apart.

mod diff;
mod engine;
mod kernel;

use std::{
    collections::BTreeMap,
    hash::{DefaultHasher, Hasher},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

pub use diff::{Compare, Difference, Holes};

/// Bytes in a hashed piece of content.
pub const PIECE_BYTES: usize = 64 << 10;

/// Files up to this size are read whole, so that a wrong hole map cannot hide data.
const READ_WHOLE_BYTES: u64 = 64 << 20;

/// The kernel stamps with the time of its last tick.
const TICK: Duration = Duration::from_millis(10);

/// What an entry is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Regular file.
    File,
    /// Directory.
    Directory,
    /// Symbolic link.
    Symlink,
    /// Named pipe.
    Fifo,
    /// Socket.
    Socket,
    /// Character device.
    CharDevice,
    /// Block device.
    BlockDevice,
}

impl Kind {
    /// From the type bits of `st_mode`.
    pub fn from_mode(mode: u32) -> Option<Kind> {
        Some(match mode & libc::S_IFMT {
            libc::S_IFREG => Kind::File,
            libc::S_IFDIR => Kind::Directory,
            libc::S_IFLNK => Kind::Symlink,
            libc::S_IFIFO => Kind::Fifo,
            libc::S_IFSOCK => Kind::Socket,
            libc::S_IFCHR => Kind::CharDevice,
            libc::S_IFBLK => Kind::BlockDevice,
            _ => return None,
        })
    }
}

/// A time stamp, seconds and nanoseconds since 1970.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Stamp {
    /// Seconds, negative before 1970.
    pub sec: i64,
    /// Nanoseconds, 0..1e9.
    pub nsec: u32,
}

/// One name of a tree, with all that the system tells about its inode.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Type.
    pub kind: Kind,
    /// Permission bits, 0o7777.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Size in bytes.
    pub size: u64,
    /// Link count.
    pub nlink: u32,
    /// Allocated, in units of 512 bytes.
    pub blocks_512b: u64,
    /// Last access.
    pub atime: Stamp,
    /// Last change of content.
    pub mtime: Stamp,
    /// Last change of the inode.
    pub ctime: Stamp,
    /// Creation, where it is kept.
    pub btime: Option<Stamp>,
    /// Device number (major, minor) of a device file.
    pub rdev: (u32, u32),
    /// Target of a symbolic link.
    pub target: Vec<u8>,
    /// Extended attributes by full name.
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    /// Hash of each 64 KiB piece that is not all zeros, by its index.
    pub pieces: BTreeMap<u64, u64>,
    /// Ranges (start, end) that SEEK_DATA reports as data.
    pub data: Vec<(u64, u64)>,
    /// FS_IOC_GETFLAGS of files and directories.
    pub flags: u32,
    /// Project ID.
    pub project: u32,
    /// First path, in byte order, that names the same inode.
    pub first_name: Vec<u8>,
}

/// A tree: entries by path below its root; the root itself is the empty path.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Manifest {
    /// Entries by path.
    pub entries: BTreeMap<Vec<u8>, Entry>,
}

impl Manifest {
    /// Leaves out `lost+found`, which each maker sizes as it likes.
    pub fn without_lost_found(mut self) -> Self {
        self.entries.retain(|path, _| path != b"lost+found");
        self
    }

    /// Takes back the times that Linux gave to files when it mounted the image at `mounted` or later:
    /// those whose truncation a cut had left half done, and which it completed. The others leave them
    /// the time of the truncation; `like` has it. Says which files.
    pub fn take_back_truncation_times(
        &mut self,
        like: &Manifest,
        mounted: SystemTime,
    ) -> Vec<String> {
        let mounted = mounted.duration_since(UNIX_EPOCH).unwrap_or_default().saturating_sub(TICK);
        let mut paths = Vec::new();
        for (path, entry) in &mut self.entries {
            let sec = u64::try_from(entry.mtime.sec).unwrap_or(0);
            let is_new = Duration::new(sec, entry.mtime.nsec) >= mounted;
            if let Some(before) = like.entries.get(path)
                && (entry.kind, is_new) == (Kind::File, true)
                && entry.mtime == entry.ctime
            {
                (entry.mtime, entry.ctime) = (before.mtime, before.ctime);
                paths.push(String::from_utf8_lossy(path).into_owned());
            }
        }
        paths
    }

    /// Gives each entry the smallest path of its inode; `inodes` maps a path to its inode number.
    pub(crate) fn group_links(&mut self, inodes: &BTreeMap<Vec<u8>, u64>) {
        let mut first: BTreeMap<u64, Vec<u8>> = BTreeMap::new();
        for (path, ino) in inodes {
            first.entry(*ino).or_insert_with(|| path.clone());
        }
        for (path, entry) in &mut self.entries {
            if let Some(name) = inodes.get(path).and_then(|ino| first.get(ino)) {
                entry.first_name.clone_from(name);
            }
        }
    }
}

/// The hash of one piece; None when it is all zeros.
pub fn hash_piece(piece: &[u8]) -> Option<u64> {
    if piece.iter().all(|byte| *byte == 0) {
        return None;
    }
    // Trailing zeros are cut off, so that the last piece does not depend on the read's length.
    let end = piece.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
    let mut hasher = DefaultHasher::new();
    hasher.write(&piece[..end]);
    Some(hasher.finish())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_times_since_the_mount_are_taken_back() {
        let at = |sec| Stamp { sec, nsec: 5 };
        let entry = |kind, sec| Entry {
            kind,
            mode: 0o644,
            uid: 0,
            gid: 0,
            size: 0,
            nlink: 1,
            blocks_512b: 0,
            atime: at(1),
            mtime: at(sec),
            ctime: at(sec),
            btime: None,
            rdev: (0, 0),
            target: Vec::new(),
            xattrs: BTreeMap::new(),
            pieces: BTreeMap::new(),
            data: Vec::new(),
            flags: 0,
            project: 0,
            first_name: b"f".to_vec(),
        };
        let tree = |kind, sec| Manifest { entries: [(b"f".to_vec(), entry(kind, sec))].into() };
        let mounted = UNIX_EPOCH + Duration::from_secs(50);
        let mut linux = tree(Kind::File, 60);
        let other = tree(Kind::File, 40);
        assert_eq!(linux.take_back_truncation_times(&other, mounted), ["f"]);
        assert_eq!(linux, other);
        for untouched in [tree(Kind::File, 45), tree(Kind::Directory, 60)] {
            let mut linux = untouched.clone();
            assert!(linux.take_back_truncation_times(&other, mounted).is_empty());
            assert_eq!(linux, untouched);
        }
    }
}
