//! Inodes of a log, as changes to the inode table.
//!
//! Invariant: the link count of a node is that of the inode table plus the names that the log adds
//! minus those that it removes, regardless of the count in its image: so it agrees with the
//! directories.

use std::collections::BTreeMap;
use std::sync::Arc;

use fjord_format::types::InodeNo;

use super::ranges::Ranges;
use crate::error::Result;
use crate::fs::FsInner;
use crate::inode::table;
use crate::replay::damaged;

/// An inode that a log speaks of.
#[derive(Debug, Default)]
pub(super) struct Node {
    /// It is in use in the inode table and has not been deleted by the log.
    pub(super) exists: bool,
    /// It was in use, and the log deleted it.
    pub(super) deleted: bool,
    /// It is on the record of orphans: what is done about it there is enough.
    pub(super) is_orphan: bool,
    /// It is a directory, if it was deleted and made anew the new one.
    pub(super) is_dir: bool,
    /// What the inode table has is a directory.
    pub(super) was_dir: bool,
    /// Links in the inode table, while it exists.
    base_links: u16,
    /// Names added less names taken away.
    pub(super) names: i64,
    /// The newest image.
    pub(super) image: Option<Vec<u8>>,
    /// Ranges of its blocks.
    pub(super) ranges: Ranges,
}

impl Node {
    /// Whether there is an inode that names and ranges can refer to.
    pub(super) fn is_alive(&self) -> bool {
        self.exists || self.image.is_some()
    }

    /// Whether the log makes it.
    pub(super) fn is_made(&self) -> bool {
        !self.exists && self.image.is_some() && self.names > 0
    }

    /// How many names it has, if it is no directory.
    pub(super) fn links(&self) -> i64 {
        let base = if self.exists { i64::from(self.base_links) } else { 0 };
        base.saturating_add(self.names)
    }

    /// A name was taken away; the last one takes the inode with it.
    pub(super) fn name_taken(&mut self) {
        self.names -= 1;
        // A directory has one name; one that moves gets its new name first.
        let left = if self.is_dir { self.names + i64::from(self.exists) } else { self.links() };
        if left <= 0 {
            self.deleted |= self.exists;
            self.exists = false;
            self.names = 0;
            self.image = None;
            self.ranges.clear();
        }
    }

    /// An image came up: of the inode as it is, or of a new one under its number.
    pub(super) fn set_image(&mut self, image: Vec<u8>, is_dir: bool, links: u16) {
        if !self.is_alive() {
            if links == 0 {
                // Open somewhere, with its last name gone.
                return;
            }
            self.is_dir = is_dir;
        }
        self.image = Some(image);
    }
}

/// The inodes that a log speaks of, by number.
#[derive(Debug, Default)]
pub(super) struct Nodes(BTreeMap<InodeNo, Node>);

impl Nodes {
    /// The node of a number, looked up in the inode table the first time.
    ///
    /// # Errors
    /// `Corrupt` for the number of no user's file; I/O errors.
    pub(super) fn get(&mut self, fs: &Arc<FsInner>, ino: InodeNo) -> Result<&mut Node> {
        use std::collections::btree_map::Entry;
        match self.0.entry(ino) {
            Entry::Occupied(known) => Ok(known.into_mut()),
            Entry::Vacant(place) => Ok(place.insert(look(fs, ino)?)),
        }
    }

    /// All of them.
    pub(super) fn iter(&self) -> impl Iterator<Item = (InodeNo, &Node)> {
        self.0.iter().map(|(ino, node)| (*ino, node))
    }

    /// A node that was looked up.
    pub(super) fn known(&self, ino: InodeNo) -> Option<&Node> {
        self.0.get(&ino)
    }
}

fn look(fs: &Arc<FsInner>, ino: InodeNo) -> Result<Node> {
    let of_user = fs.geo.contains_inode(ino) && (ino == InodeNo::ROOT || ino >= fs.geo.first_inode);
    if !of_user {
        return Err(damaged(format!("inode {ino} is no user's")));
    }
    if !fs.inode_in_use(ino)? {
        return Ok(Node::default());
    }
    let inode = table::get(fs, ino)?;
    if fs.is_internal(&inode) {
        return Err(damaged(format!("inode {ino} belongs to the file system itself")));
    }
    let state = inode.state.read();
    Ok(Node {
        exists: true,
        is_orphan: state.orphan.is_some(),
        is_dir: state.is_dir(),
        was_dir: state.is_dir(),
        base_links: state.disk.links_count,
        ..Node::default()
    })
}
