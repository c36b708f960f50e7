//! Names: creating, linking, removing and renaming files.
//!
//! Owns the rules of Linux ext4 (and of the VFS above it) for these: which errno when, link
//! counts, times, ownership and inherited properties of new inodes. The entries themselves
//! are [`crate::dir`]'s.
//!
//! Invariants:
//! - an operation is one handle: a crash shows all of it or nothing;
//! - all checks come before the first change; what can fail after it for want of space is
//!   undone in the same handle;
//! - an inode whose last name goes is on the orphan record in that handle;
//! - every function takes its locks, then starts its handle, and returns an inode as a
//!   counted reference that was taken under the lock of its directory, so that nobody can
//!   delete it in between. References are never dropped under a lock.
//!
//! Locks: parents before children; of two directories the ancestor first, else the lower
//! number; of two children directories first, then the lower number. A rename between
//! directories holds `rename_lock` before all of them, so that ancestors stay ancestors.
//! The state of an inode that is being created is locked before anybody can know of it.

mod create;
mod new;
mod remove;
mod rename;

use std::sync::Arc;

use fjord_block::plant::{Bug, planted};
use fjord_format::dirent::FileType;
use fjord_format::features::Incompat;
use fjord_format::htree::LINK_COUNT_MAX;
use fjord_format::inode::InodeFlags;
use fjord_format::{InodeNo, Tid};
use fjord_journal::Handle;
use rustix::io::Errno;

use crate::alloc::INODE_CREDITS;
use crate::attr::Timespec;
use crate::dir;
use crate::error::{Error, Result};
use crate::fs::FsInner;
use crate::inode::changes::{CommitReason, Fate, Removed, Shown};
use crate::inode::{Inode, InodeState, attr, disk, table};
use crate::map;
use crate::vfs::InodeRef;
use crate::{orphan, xattr};

pub(crate) use create::{create, mkdir, mknod, symlink, tmpfile};
pub(crate) use remove::{link, rmdir, unlink};
pub(crate) use rename::rename;

/// Looks a name up.
///
/// # Errors
/// `ENOTDIR`, `ENOENT`, `ENAMETOOLONG`, `EINVAL`; damage, I/O.
pub(crate) fn lookup(fs: &Arc<FsInner>, dir: &Arc<Inode>, name: &[u8]) -> Result<InodeRef> {
    let state = dir.state.read();
    check_dir(&state)?;
    dir::check_name(name)?;
    if name == b"." {
        return Ok(InodeRef::new(fs, dir.clone()));
    }
    let found = dir::find(fs, dir, &state, name)?.ok_or(Errno::NOENT)?;
    Ok(InodeRef::new(fs, named(fs, dir, found.ino)?))
}

/// The target of a symbolic link.
///
/// # Errors
/// `EINVAL` if it is none; damage, I/O.
pub(crate) fn read_link(fs: &Arc<FsInner>, inode: &Arc<Inode>) -> Result<Vec<u8>> {
    let state = inode.state.read();
    if !state.disk.is_symlink() {
        return Err(Errno::INVAL.into());
    }
    let damaged =
        |detail: &str| Error::corrupt("symbolic link", format!("inode {}: {detail}", inode.ino));
    let size = usize::try_from(state.size).unwrap_or(usize::MAX);
    if size == 0 || size > fs.geo.block_size as usize {
        return Err(damaged("its length cannot be"));
    }
    if let Some(target) = state.disk.fast_symlink(&fs.geo) {
        return Ok(target.to_vec());
    }
    if state.disk.flags.contains(InodeFlags::INLINE_DATA) {
        let tail = xattr::inline_tail(fs, inode, &state)?;
        let mut target = [&state.disk.i_block[..], &tail].concat();
        if target.len() < size {
            return Err(damaged("it is longer than the inode"));
        }
        target.truncate(size);
        return Ok(target);
    }
    let map::MapKind::Written(block) = map::lookup(fs, inode, &state, 0, 1)?.kind else {
        return Err(damaged("it has no block"));
    };
    let buffer = fs.meta.read(block, |_| Ok(()))?;
    let bytes = buffer.read();
    bytes.get(..size).map(<[u8]>::to_vec).ok_or_else(|| damaged("it is longer than a block"))
}

/// Runs an operation; when it finds no space, once more after a commit, which lets go of the
/// blocks and inode numbers that the running transaction freed.
fn retry_full<T>(fs: &Arc<FsInner>, operation: impl Fn() -> Result<T>) -> Result<T> {
    match operation() {
        Err(error) if error.is(Errno::NOSPC) && fs.journal().needs_commit() => {
            fs.journal().commit_running()?;
            operation()
        }
        other => other,
    }
}

/// Fails unless names can be looked up in it: a directory that is still there.
fn check_dir(state: &InodeState) -> Result<()> {
    if !state.is_dir() {
        return Err(Errno::NOTDIR.into());
    }
    if state.dead || state.disk.links_count == 0 {
        return Err(Errno::NOENT.into());
    }
    Ok(())
}

/// Fails if new names must not come into the directory.
fn check_may_add(state: &InodeState) -> Result<()> {
    if state.disk.flags.contains(InodeFlags::IMMUTABLE) {
        return Err(Errno::PERM.into());
    }
    Ok(())
}

/// Fails if the name of `victim` must not leave the directory.
fn check_may_remove(dir: &InodeState, victim: &InodeState) -> Result<()> {
    let fixed = InodeFlags::IMMUTABLE | InodeFlags::APPEND;
    if dir.disk.flags.intersects(fixed) || victim.disk.flags.intersects(fixed) {
        return Err(Errno::PERM.into());
    }
    Ok(())
}

/// Fails unless the new name may come into the directory.
fn check_new_entry(fs: &FsInner, dir: &Inode, state: &InodeState, name: &[u8]) -> Result<()> {
    check_dir(state)?;
    dir::check_name(name)?;
    if name == b"." || name == b".." || dir::find(fs, dir, state, name)?.is_some() {
        return Err(Errno::EXIST.into());
    }
    check_may_add(state)
}

/// The inode that an entry of `dir` names. Called under the directory's lock.
fn named(fs: &Arc<FsInner>, dir: &Inode, ino: InodeNo) -> Result<Arc<Inode>> {
    let bad = |detail: &str| {
        Error::corrupt(
            "directory",
            format!("inode {}: an entry names inode {ino}, {detail}", dir.ino),
        )
    };
    if ino != InodeNo::ROOT && ino < fs.geo.first_inode {
        return Err(bad("which is reserved"));
    }
    let inode = table::get(fs, ino)
        .map_err(|error| if error.is(Errno::STALE) { bad("which is not in use") } else { error })?;
    if fs.is_internal(&inode) {
        return Err(bad("which belongs to the file system itself"));
    }
    // Whoever holds the lock knows the inode, so it is alive; and waiting could be long.
    if inode.state.try_read().is_some_and(|state| state.disk.links_count == 0) {
        return Err(bad("which has no links"));
    }
    Ok(inode)
}

/// The inode that an entry of `dir` names, when its state is to be locked too.
fn child(fs: &Arc<FsInner>, dir: &Inode, ino: InodeNo) -> Result<Arc<Inode>> {
    if ino == dir.ino {
        let detail = format!("inode {ino} contains itself");
        return Err(Error::corrupt("directory", detail));
    }
    named(fs, dir, ino)
}

fn file_type(state: &InodeState) -> FileType {
    FileType::from_mode(state.disk.mode)
}

/// Whether the directory can take no further subdirectory.
fn links_full(fs: &FsInner, state: &InodeState) -> bool {
    use fjord_format::features::RoCompat;
    let may_overflow =
        fs.geo.features.ro_compat.contains(RoCompat::DIR_NLINK) && dir::is_indexed(state);
    u32::from(state.disk.links_count) >= LINK_COUNT_MAX && !may_overflow
}

/// Counts a subdirectory; a count that overflows stays at 1 for good.
fn add_subdir(state: &mut InodeState) {
    let links = state.disk.links_count.saturating_add(1);
    let overflows = u32::from(links) > LINK_COUNT_MAX || links == 2;
    state.disk.links_count = if dir::is_indexed(state) && overflows { 1 } else { links };
}

/// Counts a subdirectory less.
fn drop_subdir(state: &mut InodeState) {
    if state.disk.links_count > 2 {
        state.disk.links_count -= 1;
    }
}

/// Stores a directory whose entries have changed.
fn store_changed_dir(
    fs: &FsInner,
    h: &Handle,
    dir: &Inode,
    state: &mut InodeState,
    time: Timespec,
) -> Result<()> {
    attr::set_mtime(&mut state.disk, time);
    attr::set_ctime(&mut state.disk, time);
    disk::store(fs, h, dir, state)
}

/// Takes away one name of `inode` (all, for a directory) and stores it.
fn drop_link(
    fs: &FsInner,
    h: &Handle,
    inode: &Arc<Inode>,
    state: &mut InodeState,
    time: Timespec,
) -> Result<()> {
    let links = if state.is_dir() { 0 } else { state.disk.links_count.saturating_sub(1) };
    state.disk.links_count = links;
    attr::set_ctime(&mut state.disk, time);
    if links == 0 && !planted(Bug::OrphanTooLate) {
        orphan::add(fs, h, inode, state)?;
        fs.releases.begin(inode);
    }
    if links == 0 && planted(Bug::InodeReuse) {
        fs.free_inode(h, inode.ino, state.is_dir())?;
    }
    disk::store(fs, h, inode, state)
}

/// Notes for fsync that a name in a directory no longer stands for `ino`, whose links have
/// been counted.
fn note_removed(
    fs: &FsInner,
    h: &Handle,
    dir_state: &mut InodeState,
    name: &[u8],
    (ino, state): (InodeNo, &mut InodeState),
) {
    let tid = h.tid();
    let fate = if state.disk.links_count > 0 {
        state.changes.require_commit(tid, CommitReason::HardLink);
        Fate::Moved
    } else if state.is_dir() {
        Fate::GoneDir
    } else if state.changes.needs_commit(|tid| fs.journal().is_committed(tid)).is_some() {
        // It may have had other names in the last commit.
        Fate::Moved
    } else {
        Fate::Gone
    };
    let shown = if fate == Fate::Gone && is_plain(fs, state, tid) {
        state.changes.shown_by_name(tid, ino)
    } else {
        Shown::Other
    };
    note_name_free(fs, dir_state, name, Removed { tid, ino, fate, shown });
}

/// Whether all that a file has besides its inode are extents, and had before `tid` too.
fn is_plain(fs: &FsInner, state: &InodeState, tid: Tid) -> bool {
    let may_have_values = fs.geo.features.incompat.contains(Incompat::EA_INODE);
    let has_other = state.disk.file_acl.0 != 0
        || may_have_values
        || state.changes.has_attribute_changes(|other| other != tid);
    state.is_file() && map::has_extents(state) && !has_other
}

/// Notes for fsync what became of the inode that had a name.
fn note_name_free(fs: &FsInner, dir_state: &mut InodeState, name: &[u8], removed: Removed) {
    if dir_state.changes.is_large() {
        dir_state.changes.prune(|tid| fs.journal().is_committed(tid));
    }
    dir_state.changes.name_removed(name, removed);
}

/// Metadata blocks that adding one entry can dirty: a new block per index level and for the
/// leaf, each with its allocation, the index blocks and leaf that were there, the inode.
pub(crate) fn credits_add_entry(fs: &FsInner) -> u32 {
    const NEW_BLOCKS: u32 = 3;
    const OLD_BLOCKS: u32 = 5;
    NEW_BLOCKS * (map::credits_insert(fs, 1) + 1) + OLD_BLOCKS + disk::STORE_CREDITS
}

/// Metadata blocks that allocating, filling and storing a new inode can dirty: bitmap,
/// descriptor, table, one block of its own with its allocation, attributes, orphan record.
fn credits_new_inode(fs: &FsInner) -> u32 {
    INODE_CREDITS
        + disk::STORE_CREDITS
        + map::credits_insert(fs, 1)
        + xattr::CREDITS_NEW
        + orphan::CREDITS
}

/// Metadata blocks that removing one entry can dirty, its inode included.
pub(crate) fn credits_remove_entry() -> u32 {
    2 + 3 * disk::STORE_CREDITS + orphan::CREDITS + xattr::CREDITS_INLINE
}
