//! The six nodes of the mount and their attributes. Owns no state.

use super::{CONTROL, DISK, IMAGE, STATS, TRACE};
use crate::abi::*;
use crate::device_file;

/// A node; the number is its ID on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub(super) enum Node {
    Root = FUSE_ROOT_ID,
    Disk = 2,
    Stats = 3,
    Control = 4,
    Image = 5,
    Trace = 6,
}

impl Node {
    /// The files, in the order of the directory.
    pub(super) const FILES: [(Node, &'static str); 5] = [
        (Node::Disk, DISK),
        (Node::Stats, STATS),
        (Node::Control, CONTROL),
        (Node::Image, IMAGE),
        (Node::Trace, TRACE),
    ];

    pub(super) fn from_id(id: u64) -> Option<Node> {
        match id {
            FUSE_ROOT_ID => Some(Node::Root),
            id => Node::FILES.into_iter().map(|(node, _)| node).find(|node| *node as u64 == id),
        }
    }

    pub(super) fn from_name(name: &[u8]) -> Option<Node> {
        Node::FILES.into_iter().find(|(_, other)| other.as_bytes() == name).map(|(node, _)| node)
    }

    /// Type and permissions: the device is its owner's, the counts are everybody's.
    fn mode(self) -> u32 {
        match self {
            Node::Root => libc::S_IFDIR | 0o755,
            Node::Disk => libc::S_IFREG | 0o600,
            Node::Stats => libc::S_IFREG | 0o444,
            // Who reads it takes it away.
            Node::Trace => libc::S_IFREG | 0o400,
            Node::Control => libc::S_IFREG | 0o200,
            Node::Image => libc::S_IFREG | 0o400,
        }
    }

    /// The attributes; `size` in bytes.
    pub(super) fn attr(self, size: u64) -> FuseAttr {
        device_file::attr(self as u64, self.mode(), size)
    }
}
