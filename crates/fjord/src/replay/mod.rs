//! Applies logical logs (fast commits and i-transactions) at mount.
//!
//! Runs after the replay of the JBD2 log and before anything else, through the engine's own
//! functions and handles, so bitmaps, counts and checksums are updated as usual.
//!
//! Invariant: [`in_one_transaction`] commits everything at once, so a crash leaves none of it (the
//! log is applied again) or all of it (the commit has made the log invalid).

pub(crate) mod fast_commit;
pub(crate) mod ijournal;
mod names;
mod nodes;
mod ranges;

use std::sync::Arc;

use fjord_block::plant::{Bug, planted};
use fjord_format::inode::{DiskInode, I_BLOCK_BYTES, I_BLOCK_OFFSET, InodeFlags};
use fjord_format::types::{BlockNo, InodeNo};

use crate::alloc::{INODE_CREDITS, RUN_CREDITS};
use crate::attr::FileKind;
use crate::dir;
use crate::error::{Error, Result};
use crate::fs::FsInner;
use crate::inode::{Inode, InodeState, disk, table};
use crate::map::{self, Progress};

/// Runs `apply` and commits all it did as one transaction.
///
/// # Errors
/// What `apply` finds; nothing is committed then, and the journal must not be used further.
pub(crate) fn in_one_transaction(
    fs: &Arc<FsInner>,
    apply: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let journal = fs.journal();
    journal.whole_log(!planted(Bug::FastCommitInParts));
    apply()?;
    // Committed while it may still be as long as it is.
    let committed = journal.commit_running();
    journal.whole_log(false);
    Ok(committed.map(drop)?)
}

/// An error of a log.
fn damaged(detail: impl Into<String>) -> Error {
    Error::corrupt("log", detail)
}

/// Decodes an inode as a log has it: `image` are its first 128 bytes or more, `below` what the
/// inode table has in its place. Returns the inode and its whole bytes; the map is the image's.
fn decode_image(fs: &FsInner, image: &[u8], below: &[u8]) -> Result<(DiskInode, Vec<u8>)> {
    let mut bytes = below.to_vec();
    let known = image.len().min(bytes.len());
    bytes[..known].copy_from_slice(&image[..known]);
    let disk = DiskInode::decode(&bytes, &fs.geo)?;
    if FileKind::from_mode(disk.mode).is_none() || disk.size > fs.geo.extent_file_size_max_bytes() {
        return Err(damaged(format!("an inode of mode {:o}, {} bytes", disk.mode, disk.size)));
    }
    Ok((disk, bytes))
}

/// Whether what `i_block` holds is told by the inode alone: a device number, a short link's
/// target, inline data.
fn is_self_contained(disk: &DiskInode) -> bool {
    let kind = FileKind::from_mode(disk.mode);
    let short = kind == Some(FileKind::Symlink) && disk.size < I_BLOCK_BYTES as u64;
    disk.flags.contains(InodeFlags::INLINE_DATA)
        || (short && !disk.flags.contains(InodeFlags::EXTENTS))
        || !matches!(kind, Some(FileKind::Regular | FileKind::Directory | FileKind::Symlink))
}

/// Makes an inode that the bitmaps do not know: with the attributes of its image, an empty map
/// and no links.
///
/// # Errors
/// `Corrupt` for a number in use or an invalid inode image; I/O and journal errors.
pub(crate) fn adopt_inode(fs: &Arc<FsInner>, ino: InodeNo, image: &[u8]) -> Result<Arc<Inode>> {
    let zeros = vec![0; usize::from(fs.geo.inode_size)];
    let (mut decoded, bytes) = decode_image(fs, image, &zeros)?;
    (decoded.links_count, decoded.blocks_512, decoded.dtime) = (0, 0, 0);
    decoded.file_acl = BlockNo(0);
    let self_contained = is_self_contained(&decoded);
    let is_dir = decoded.is_dir();
    if is_dir {
        decoded.size = 0;
        decoded.flags.remove(InodeFlags::INDEX | InodeFlags::INLINE_DATA);
    }
    let handle = fs.start(INODE_CREDITS + disk::STORE_CREDITS)?;
    fs.adopt_inode(&handle, ino, is_dir)?;
    let inode = table::detached(fs, ino, decoded);
    {
        let mut state = inode.state.write_unshared();
        table::publish(fs, &inode);
        if is_dir || !self_contained {
            map::init(fs, &mut state);
        }
        disk::store_new(fs, &handle, &inode, &mut state)?;
        if !is_dir {
            keep_tail(fs, &handle, ino, &state, &bytes)?;
        }
    }
    handle.stop();
    Ok(inode)
}

/// Gives an inode the attributes of its image; number, links, blocks and attribute block stay, and
/// the entries of a directory, wherever they lie: names come by records of their own.
///
/// # Errors
/// `Corrupt` for an invalid inode image or is of another kind; I/O and journal errors.
pub(crate) fn replace_inode(fs: &Arc<FsInner>, inode: &Arc<Inode>, image: &[u8]) -> Result<()> {
    let below = disk::read_bytes(fs, inode.ino, |bytes| Ok(bytes.to_vec()))?;
    let (mut new, bytes) = decode_image(fs, image, &below)?;
    let mut state = inode.state.write();
    let old = &state.disk;
    let kinds = (FileKind::from_mode(new.mode), FileKind::from_mode(old.mode));
    let layout = InodeFlags::EXTENTS | InodeFlags::INLINE_DATA | InodeFlags::EA_INODE;
    let from_inline = old.flags.contains(InodeFlags::INLINE_DATA);
    if kinds.0 != kinds.1 || (!from_inline && (new.flags ^ old.flags).intersects(layout)) {
        let ino = inode.ino;
        return Err(damaged(format!("inode {ino} is of another kind than in the inode table")));
    }
    (new.links_count, new.blocks_512, new.dtime) = (old.links_count, old.blocks_512, old.dtime);
    new.file_acl = old.file_acl;
    if old.is_dir() {
        (new.size, new.flags) = (old.size, old.flags);
    }
    if old.is_dir() || !is_self_contained(&new) {
        new.i_block = old.i_block;
    }
    let leaves_inline = from_inline && !new.flags.contains(InodeFlags::INLINE_DATA);
    let is_dir = old.is_dir();
    let handle = fs.start(disk::STORE_CREDITS)?;
    state.size = new.size;
    state.disk = new;
    if leaves_inline {
        map::init(fs, &mut state);
    }
    disk::store(fs, &handle, inode, &mut state)?;
    if !is_dir {
        keep_tail(fs, &handle, inode.ino, &state, &bytes)?;
    }
    handle.stop();
    Ok(())
}

/// Stores what an image has after the inode's fields: attributes, the rest of inline data.
fn keep_tail(
    fs: &FsInner,
    handle: &fjord_journal::Handle,
    ino: InodeNo,
    state: &InodeState,
    image: &[u8],
) -> Result<()> {
    let base = I_BLOCK_OFFSET + I_BLOCK_BYTES;
    let from = (usize::from(fjord_format::geometry::GOOD_OLD_INODE_BYTES))
        .saturating_add(usize::from(state.disk.extra_isize))
        .max(base);
    disk::change_bytes(fs, handle, ino, |bytes| {
        if let (Some(to), Some(tail)) = (bytes.get_mut(from..), image.get(from..)) {
            to.copy_from_slice(tail);
        }
        Ok(())
    })
}

/// Marks exactly these blocks used.
///
/// # Errors
/// `Corrupt` if one is in use or no file's; I/O and journal errors.
pub(crate) fn adopt_run(fs: &Arc<FsInner>, start: BlockNo, count: u32) -> Result<()> {
    let groups = u64::from(count).div_ceil(u64::from(fs.geo.blocks_per_group).max(1)) + 1;
    let handle = fs.start(RUN_CREDITS.saturating_mul(u32::try_from(groups).unwrap_or(u32::MAX)))?;
    fs.adopt_blocks(&handle, start, u64::from(count))?;
    handle.stop();
    Ok(())
}

/// Maps blocks that are marked used already.
///
/// # Errors
/// As [`map::insert`].
pub(crate) fn map_run(
    fs: &Arc<FsInner>,
    inode: &Arc<Inode>,
    lblk: u32,
    (start, count): (BlockNo, u32),
    written: bool,
) -> Result<()> {
    let mut state = inode.state.write();
    let handle = fs.start(map::credits_insert(fs, 1) + disk::STORE_CREDITS)?;
    map::insert(fs, &handle, inode, &mut state, lblk, start, count, written)?;
    disk::store(fs, &handle, inode, &mut state)?;
    handle.stop();
    Ok(())
}

/// Sets the state of mapped blocks.
///
/// # Errors
/// As [`map::mark_written`].
pub(crate) fn mark_run(
    fs: &Arc<FsInner>,
    inode: &Arc<Inode>,
    (lblk, count): (u32, u32),
    written: bool,
) -> Result<()> {
    let mut state = inode.state.write();
    let handle = fs.start(map::credits_insert(fs, 2) + disk::STORE_CREDITS)?;
    if written {
        map::mark_written(fs, &handle, inode, &mut state, lblk, count)?;
    } else {
        map::mark_unwritten(fs, &handle, inode, &mut state, lblk, count)?;
    }
    disk::store(fs, &handle, inode, &mut state)?;
    handle.stop();
    Ok(())
}

/// Unmaps and frees blocks; times stay as they are.
///
/// # Errors
/// As [`map::remove`].
pub(crate) fn unmap(fs: &Arc<FsInner>, inode: &Arc<Inode>, from: u64, to: u64) -> Result<()> {
    let mut state = inode.state.write();
    loop {
        let handle = fs.start(map::credits_remove(fs) + disk::STORE_CREDITS)?;
        let progress = map::remove(fs, &handle, inode, &mut state, from, to)?;
        disk::store(fs, &handle, inode, &mut state)?;
        handle.stop();
        if progress == Progress::Done {
            return Ok(());
        }
    }
}

/// A directory that entries can go to or leave.
///
/// # Errors
/// `Corrupt` if the inode is not a user's directory in use; I/O errors.
pub(crate) fn directory(fs: &Arc<FsInner>, ino: InodeNo) -> Result<Arc<Inode>> {
    let bad = || damaged(format!("inode {ino} is no directory that entries can change in"));
    if ino != InodeNo::ROOT && (ino < fs.geo.first_inode || !fs.geo.contains_inode(ino)) {
        return Err(bad());
    }
    if fs.inodes.peek(ino).is_none() && !fs.inode_in_use(ino)? {
        return Err(bad());
    }
    let inode = table::get(fs, ino)?;
    if !inode.state.read().is_dir() || fs.is_internal(&inode) {
        return Err(bad());
    }
    Ok(inode)
}

/// Adds an entry, for which there is none of the name; link counts and times are the caller's.
///
/// # Errors
/// As [`dir::insert`].
pub(crate) fn add_entry(
    fs: &Arc<FsInner>,
    parent: &Arc<Inode>,
    name: &[u8],
    inode: &Arc<Inode>,
) -> Result<()> {
    dir::check_name(name).map_err(|_| damaged("an entry with a name that cannot be"))?;
    let kind = fjord_format::dirent::FileType::from_mode(inode.state.read().disk.mode);
    let mut state = parent.state.write();
    let handle = fs.start(crate::namei::credits_add_entry(fs))?;
    dir::insert(fs, &handle, parent, &mut state, name, inode.ino, kind)?;
    disk::store(fs, &handle, parent, &mut state)?;
    handle.stop();
    Ok(())
}

/// Removes an entry if it is there; link counts and times are the caller's.
///
/// # Errors
/// As [`dir::remove`].
pub(crate) fn remove_entry(fs: &Arc<FsInner>, parent: &Arc<Inode>, name: &[u8]) -> Result<()> {
    let mut state = parent.state.write();
    let Some(found) = dir::find(fs, parent, &state, name)? else { return Ok(()) };
    let handle = fs.start(crate::namei::credits_remove_entry())?;
    dir::remove(fs, &handle, parent, &mut state, &found)?;
    disk::store(fs, &handle, parent, &mut state)?;
    handle.stop();
    Ok(())
}

/// Sets the count of links.
///
/// # Errors
/// I/O and journal errors.
pub(crate) fn set_links(fs: &Arc<FsInner>, inode: &Arc<Inode>, links: u16) -> Result<()> {
    let mut state = inode.state.write();
    if state.disk.links_count == links {
        return Ok(());
    }
    let handle = fs.start(disk::STORE_CREDITS)?;
    state.disk.links_count = links;
    disk::store(fs, &handle, inode, &mut state)?;
    handle.stop();
    Ok(())
}
