//! The nodes that the kernel knows, with their lookup counts.
//!
//! The contract: every reply that names a node (LOOKUP, CREATE, MKNOD, MKDIR, SYMLINK, LINK,
//! TMPFILE, and each entry of READDIRPLUS with a node ID) adds one to that node's count; FORGET and
//! BATCH_FORGET subtract what they say. While the count is above zero the engine holds the inode by
//! number, so the number is not given to another file and an unlinked file that is still open keeps
//! its blocks. At zero the hold is dropped, and the blocks of a deleted file are freed.
//!
//! The kernel may remember millions of files. That is why a node is a number and a count, not an
//! inode in memory: the engine keeps those that are in use, and reads others again.
//!
//! Node IDs are inode numbers, except that the root directory (inode 2) is node 1. Inode 1 holds
//! bad blocks and has no name, so the numbers never meet. A node ID therefore means the same file
//! in every mount of an image, which file handles (open_by_handle_at, NFS) rely on.

use fjord::{Fs, InodeNo, InodeRef};

use super::Outcome;
use crate::{abi::FUSE_ROOT_ID, reply::Errno};

/// All nodes of a mount.
pub(super) struct Nodes(Fs);

/// The node ID of an inode.
pub(super) fn node_id(ino: InodeNo) -> u64 {
    if ino == InodeNo::ROOT { FUSE_ROOT_ID } else { u64::from(ino.0) }
}

/// The inode of a node ID, if it can be one.
fn inode_no(nodeid: u64) -> Option<InodeNo> {
    match nodeid {
        FUSE_ROOT_ID => Some(InodeNo::ROOT),
        0 | 2 => None,
        n => u32::try_from(n).ok().map(InodeNo),
    }
}

impl Nodes {
    /// The nodes of a file system; the kernel holds the root without ever looking it up.
    pub(super) fn new(fs: Fs) -> Nodes {
        Nodes(fs)
    }

    /// The inode of a node that the kernel holds, or has a file handle of.
    pub(super) fn get(&self, nodeid: u64) -> Outcome<InodeRef> {
        let ino = inode_no(nodeid).ok_or(Errno(libc::ESTALE))?;
        Ok(self.0.held_inode(ino)?)
    }

    /// Counts one more lookup of `inode`, which the reply in the making hands to the kernel.
    pub(super) fn remember(&self, inode: &InodeRef) {
        inode.hold();
    }

    /// Subtracts `lookups`. The root cannot be deleted, so its count does not matter.
    pub(super) fn forget(&self, nodeid: u64, lookups: u64) {
        if let Some(ino) = inode_no(nodeid) {
            self.0.unhold(ino, lookups);
        }
    }

    /// Drops all nodes, at the end of the mount.
    pub(super) fn clear(&self) {
        self.0.unhold_all();
    }
}
