//! The uncommitted names on the path to a file.
//!
//! Invariant: after these entries are added, topmost first, a path leads to the file from a
//! committed directory.

use std::sync::Arc;

use fjord_block::plant::{Bug, planted};
use fjord_format::InodeNo;
use fjord_format::dirent::FileType;

use super::Stop;
use crate::fs::FsInner;
use crate::fsync::Fallback;
use crate::inode::changes::{Entry, Fate};
use crate::inode::{Inode, disk, table};

/// Most levels of new directories in one i-transaction.
const DEPTH_MAX: usize = 64;

/// A name, and the directory that it names, if any.
pub(super) struct Link {
    pub(super) parent: InodeNo,
    pub(super) name: Box<[u8]>,
    pub(super) file_type: u8,
    /// What it names.
    pub(super) inode: Arc<Inode>,
    /// The inode's bytes, for directories.
    pub(super) image: Option<Vec<u8>>,
}

/// The names, topmost first.
pub(super) struct Chain {
    pub(super) links: Vec<Link>,
}

impl Chain {
    /// Follows the names upwards from a file. Takes the state lock of one inode at a time.
    pub(super) fn collect(fs: &Arc<FsInner>, inode: &Arc<Inode>) -> Result<Chain, Stop> {
        let mut links = Vec::new();
        let mut at = inode.clone();
        while let Some(link) = link_of(fs, &at, links.is_empty())? {
            if links.len() == DEPTH_MAX {
                return Err(Fallback::TooLarge.into());
            }
            let parent = link.parent;
            links.push(link);
            if planted(Bug::ItransactionNoParents) {
                break;
            }
            at = table::get(fs, parent)?;
        }
        links.reverse();
        Ok(Chain { links })
    }

    /// All inodes that are named.
    pub(super) fn inodes(&self) -> impl Iterator<Item = &Arc<Inode>> {
        self.links.iter().map(|link| &link.inode)
    }
}

/// The name of an inode, if neither a commit nor an i-transaction has it.
fn link_of(fs: &Arc<FsInner>, inode: &Arc<Inode>, is_file: bool) -> Result<Option<Link>, Stop> {
    let committed = |tid| fs.journal().is_committed(tid);
    let state = inode.state.read();
    if state.changes.is_forgotten(committed) {
        return Err(Fallback::Forgotten.into());
    }
    let Some(entry) = state.changes.uncommitted_entry(committed) else { return Ok(None) };
    // A directory that the last commit has is found under its name there.
    if let Some(why) = state.changes.needs_commit(committed) {
        return Err(Fallback::from(why).into());
    }
    if inode.entry_logged.load(std::sync::atomic::Ordering::Acquire) {
        return Ok(None);
    }
    check_reuse(fs, entry)?;
    let image = match is_file {
        true => None,
        false => Some(disk::read_bytes(fs, inode.ino, |bytes| Ok(bytes.to_vec()))?),
    };
    Ok(Some(Link {
        parent: entry.parent,
        name: entry.name.clone(),
        file_type: FileType::from_mode(state.disk.mode) as u8,
        inode: inode.clone(),
        image,
    }))
}

/// A name can be reused only if its old owner is deleted.
fn check_reuse(fs: &FsInner, entry: &Entry) -> Result<(), Fallback> {
    if planted(Bug::ItransactionNameTaken) {
        return Ok(());
    }
    match &entry.replaced {
        Some(replaced)
            if replaced.fate != Fate::Gone && !fs.journal().is_committed(replaced.tid) =>
        {
            Err(Fallback::NameReuse)
        }
        _ => Ok(()),
    }
}
