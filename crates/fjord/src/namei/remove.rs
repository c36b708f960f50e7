//! Linking and removing names.

use std::sync::Arc;

use fjord_block::plant::{Bug, planted};
use fjord_format::InodeNo;
use fjord_format::htree::LINK_COUNT_MAX;
use fjord_format::inode::InodeFlags;
use rustix::io::Errno;

use super::{
    check_dir, check_may_remove, check_new_entry, child, credits_add_entry, credits_remove_entry,
    drop_link, drop_subdir, file_type, note_removed, retry_full, store_changed_dir,
};
use crate::error::Result;
use crate::fs::FsInner;
use crate::inode::changes::CommitReason;
use crate::inode::{Inode, InodeState, Place, attr, disk};
use crate::vfs::InodeRef;
use crate::{dir, orphan};

/// Gives `target` another name in `dir`.
///
/// # Errors
/// `EEXIST`, `EPERM` (a directory, immutable or append-only), `EMLINK`, `EXDEV` (another
/// project), `ENOENT` (already deleted), `ENOSPC`; damage, I/O.
pub(crate) fn link(
    fs: &Arc<FsInner>,
    target: &Arc<Inode>,
    dir: &Arc<Inode>,
    name: &[u8],
) -> Result<()> {
    retry_full(fs, || link_once(fs, target, dir, name))
}

fn link_once(fs: &Arc<FsInner>, target: &Arc<Inode>, dir: &Arc<Inode>, name: &[u8]) -> Result<()> {
    // A file's type never changes, so this look needs no lock order.
    let target_is_dir = target.state.read().is_dir();
    let mut dir_state = dir.state.write();
    check_new_entry(fs, dir, &dir_state, name)?;
    if target_is_dir {
        return Err(Errno::PERM.into());
    }
    let mut state = target.state.write_in_order(Place::Child.key());
    check_linkable(&dir_state, &state)?;
    let h = fs.start(credits_add_entry(fs) + credits_remove_entry())?;
    dir::insert(fs, &h, dir, &mut dir_state, name, target.ino, file_type(&state))?;
    let time = fs.now();
    if state.disk.links_count == 0 {
        orphan::remove(fs, &h, target, &mut state)?;
    }
    state.disk.links_count += 1;
    if !planted(Bug::ItransactionLinkNotCommitted) {
        state.changes.require_commit(h.tid(), CommitReason::HardLink);
    }
    attr::set_ctime(&mut state.disk, time);
    disk::store(fs, &h, target, &mut state)?;
    store_changed_dir(fs, &h, dir, &mut dir_state, time)?;
    h.stop();
    Ok(())
}

fn check_linkable(dir: &InodeState, target: &InodeState) -> Result<()> {
    if target.disk.flags.intersects(InodeFlags::IMMUTABLE | InodeFlags::APPEND) {
        return Err(Errno::PERM.into());
    }
    if target.dead || (target.disk.links_count == 0 && !target.linkable) {
        return Err(Errno::NOENT.into());
    }
    if u32::from(target.disk.links_count) >= LINK_COUNT_MAX {
        return Err(Errno::MLINK.into());
    }
    if dir.disk.flags.contains(InodeFlags::PROJINHERIT) && dir.disk.projid != target.disk.projid {
        return Err(Errno::XDEV.into());
    }
    Ok(())
}

/// Removes a name that is not a directory's. Returns the inode that it named.
///
/// # Errors
/// `ENOENT`, `EISDIR`, `EPERM` (immutable or append-only); damage, I/O.
pub(crate) fn unlink(fs: &Arc<FsInner>, dir: &Arc<Inode>, name: &[u8]) -> Result<InodeRef> {
    if name == b"." || name == b".." {
        return Err(Errno::ISDIR.into());
    }
    remove(fs, dir, name, false)
}

/// Removes an empty directory. Returns it.
///
/// # Errors
/// `ENOENT`, `ENOTDIR`, `ENOTEMPTY`, `EINVAL` (`.`), `EBUSY` (the root), `EPERM`; damage, I/O.
pub(crate) fn rmdir(fs: &Arc<FsInner>, dir: &Arc<Inode>, name: &[u8]) -> Result<InodeRef> {
    match name {
        b"." => Err(Errno::INVAL.into()),
        b".." => Err(Errno::NOTEMPTY.into()),
        _ => remove(fs, dir, name, true),
    }
}

fn remove(fs: &Arc<FsInner>, dir: &Arc<Inode>, name: &[u8], is_rmdir: bool) -> Result<InodeRef> {
    let mut dir_state = dir.state.write();
    check_dir(&dir_state)?;
    dir::check_name(name)?;
    let found = dir::find(fs, dir, &dir_state, name)?.ok_or(Errno::NOENT)?;
    let victim = child(fs, dir, found.ino)?;
    {
        let mut state = victim.state.write_in_order(Place::Child.key());
        check_may_remove(&dir_state, &state)?;
        match (is_rmdir, state.is_dir()) {
            (true, false) => return Err(Errno::NOTDIR.into()),
            (false, true) => return Err(Errno::ISDIR.into()),
            _ => {}
        }
        if victim.ino == InodeNo::ROOT {
            return Err(Errno::BUSY.into());
        }
        if is_rmdir && !dir::is_empty(fs, &victim, &state)? {
            return Err(Errno::NOTEMPTY.into());
        }
        let h = fs.start(credits_remove_entry())?;
        dir::remove(fs, &h, dir, &mut dir_state, &found)?;
        let time = fs.now();
        drop_link(fs, &h, &victim, &mut state, time)?;
        note_removed(fs, &h, &mut dir_state, name, (victim.ino, &mut state));
        if is_rmdir {
            drop_subdir(&mut dir_state);
        }
        store_changed_dir(fs, &h, dir, &mut dir_state, time)?;
        h.stop();
    }
    Ok(InodeRef::new(fs, victim))
}
