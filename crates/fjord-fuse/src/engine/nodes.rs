//! The nodes that the kernel knows, with their lookup counts.
//!
//! The contract: every reply that names a node (LOOKUP, CREATE, MKNOD, MKDIR, SYMLINK, LINK,
//! TMPFILE, and each entry of READDIRPLUS with a node ID) adds one to that node's count; FORGET and
//! BATCH_FORGET subtract what they say. While the count is above zero the table holds an
//! [`InodeRef`], so the inode's number is not given to another file and an unlinked file that is
//! still open keeps its blocks. At zero the reference goes, and with it the last blocks of a
//! deleted file.
//!
//! Node IDs are inode numbers, except that the root directory (inode 2) is node 1. Inode 1 holds
//! bad blocks and has no name, so the numbers never meet. A node ID therefore means the same file
//! in every mount of an image, which file handles (open_by_handle_at, NFS) rely on.
//!
//! Locks: each shard's mutex guards its map. It is a leaf: no engine call is made under it, and
//! references are dropped after it is released, because the last one may free blocks.

use std::{
    collections::HashMap,
    collections::hash_map::Entry,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use fjord::{InodeNo, InodeRef};
use parking_lot::Mutex;

use crate::abi::FUSE_ROOT_ID;

const SHARDS: usize = 32;

/// A node: an inode that the kernel holds.
pub(super) struct Node {
    /// The inode.
    pub(super) inode: InodeRef,
    /// Known to have no file capabilities, so that a write need not look for any to remove.
    /// Cleared when the attribute is set; only an optimisation, so ordering does not matter.
    pub(super) no_capabilities: AtomicBool,
}

impl Node {
    fn new(inode: InodeRef) -> Arc<Node> {
        Arc::new(Node { inode, no_capabilities: AtomicBool::new(false) })
    }

    /// Notes that the attribute `security.capability` may have appeared.
    pub(super) fn capabilities_may_exist(&self) {
        self.no_capabilities.store(false, Ordering::Release);
    }
}

struct Counted {
    node: Arc<Node>,
    lookups: u64,
}

/// All nodes of a mount.
pub(super) struct Nodes {
    shards: [Mutex<HashMap<u64, Counted>>; SHARDS],
}

/// The node ID of an inode.
pub(super) fn node_id(ino: InodeNo) -> u64 {
    if ino == InodeNo::ROOT { FUSE_ROOT_ID } else { u64::from(ino.0) }
}

/// The inode of a node ID, if it can be one.
pub(super) fn inode_no(nodeid: u64) -> Option<InodeNo> {
    match nodeid {
        FUSE_ROOT_ID => Some(InodeNo::ROOT),
        0 | 2 => None,
        n => u32::try_from(n).ok().map(InodeNo),
    }
}

impl Nodes {
    /// A table that knows the root, which the kernel holds without ever looking it up.
    pub(super) fn new(root: InodeRef) -> Nodes {
        let nodes = Nodes { shards: Default::default() };
        nodes.remember(root);
        nodes
    }

    fn shard(&self, nodeid: u64) -> &Mutex<HashMap<u64, Counted>> {
        &self.shards[nodeid as usize % SHARDS]
    }

    /// The node, if the kernel holds it.
    pub(super) fn get(&self, nodeid: u64) -> Option<Arc<Node>> {
        self.shard(nodeid).lock().get(&nodeid).map(|c| Arc::clone(&c.node))
    }

    /// Counts one more lookup of `inode`, which the reply in the making hands to the kernel.
    pub(super) fn remember(&self, inode: InodeRef) -> u64 {
        let nodeid = node_id(inode.ino());
        let spare = match self.shard(nodeid).lock().entry(nodeid) {
            Entry::Occupied(mut known) => {
                let counted = known.get_mut();
                counted.lookups = counted.lookups.saturating_add(1);
                Some(inode)
            }
            Entry::Vacant(new) => {
                new.insert(Counted { node: Node::new(inode), lookups: 1 });
                None
            }
        };
        drop(spare);
        nodeid
    }

    /// Takes `lookups` back. The root stays, whatever the kernel says.
    pub(super) fn forget(&self, nodeid: u64, lookups: u64) {
        if nodeid == FUSE_ROOT_ID {
            return;
        }
        let gone = {
            let mut shard = self.shard(nodeid).lock();
            let Some(counted) = shard.get_mut(&nodeid) else { return };
            counted.lookups = counted.lookups.saturating_sub(lookups);
            if counted.lookups > 0 { None } else { shard.remove(&nodeid) }
        };
        drop(gone);
    }

    /// Lets go of everything, at the end of the mount.
    pub(super) fn clear(&self) {
        for shard in &self.shards {
            let gone = std::mem::take(&mut *shard.lock());
            drop(gone);
        }
    }
}
