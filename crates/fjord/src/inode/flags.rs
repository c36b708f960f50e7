//! Inode flags (chattr) and project IDs.
//!
//! Owns which flags a user may change and what immutable and append-only forbid.

use std::sync::Arc;

use fjord_format::features::RoCompat;
use fjord_format::inode::InodeFlags;
use rustix::io::Errno;

use super::{Inode, InodeState, attr, disk};
use crate::attr::FileKind;
use crate::error::Result;
use crate::fs::FsInner;

/// Inode size from which an inode has room for a project ID.
const PROJECT_INODE_BYTES: u16 = 160;

/// The flags that FS_IOC_GETFLAGS shows.
pub(crate) fn get(inode: &Inode) -> u32 {
    (inode.state.read().disk.flags & InodeFlags::USER_VISIBLE).bits()
}

/// Whether the inode has one of `flags`.
pub(crate) fn has(inode: &Inode, flags: InodeFlags) -> bool {
    inode.state.read().disk.flags.intersects(flags)
}

/// Sets the flags that FS_IOC_SETFLAGS may change; others must keep their value.
pub(crate) fn set(fs: &Arc<FsInner>, inode: &Arc<Inode>, new: u32) -> Result<()> {
    let new = InodeFlags::from_bits_retain(new);
    let mut state = inode.state.write();
    let old = state.disk.flags;
    if ((new ^ old) & InodeFlags::USER_VISIBLE).intersects(!InodeFlags::USER_MODIFIABLE) {
        return Err(Errno::OPNOTSUPP.into());
    }
    if new.contains(InodeFlags::JOURNAL_DATA) != old.contains(InodeFlags::JOURNAL_DATA) {
        // Changing a file's data mode needs its pages written under the old one.
        return Err(Errno::OPNOTSUPP.into());
    }
    let asked = new & InodeFlags::USER_MODIFIABLE;
    let unfit = match state.kind() {
        FileKind::Directory => InodeFlags::empty(),
        FileKind::Regular => InodeFlags::DIRSYNC | InodeFlags::CASEFOLD | InodeFlags::PROJINHERIT,
        _ => !(InodeFlags::NODUMP | InodeFlags::NOATIME),
    };
    if asked.intersects(unfit) {
        return Err(Errno::OPNOTSUPP.into());
    }
    // An immutable file takes no other flag until it is mutable again. As Linux compares with
    // flags that cannot be asked for, an indexed or inline one does not even take the same.
    let both = old & new;
    if both.contains(InodeFlags::IMMUTABLE) && old != asked {
        return Err(Errno::PERM.into());
    }
    let changeable = InodeFlags::USER_MODIFIABLE - InodeFlags::EXTENTS;
    let mut flags = (old - changeable) | (new & changeable);
    if !state.is_dir() {
        flags -= InodeFlags::TOPDIR;
    }
    let handle = fs.start(disk::STORE_CREDITS)?;
    state.disk.flags = flags;
    attr::set_ctime(&mut state.disk, fs.now());
    disk::store(fs, &handle, inode, &mut state)?;
    handle.stop();
    Ok(())
}

/// Sets the project ID.
pub(crate) fn set_project(fs: &Arc<FsInner>, inode: &Arc<Inode>, project: u32) -> Result<()> {
    let mut state = inode.state.write();
    if state.disk.projid == project {
        return Ok(());
    }
    let has_feature = fs.geo.features.ro_compat.contains(RoCompat::PROJECT);
    if !has_feature || fs.geo.inode_size < PROJECT_INODE_BYTES {
        return Err(Errno::OPNOTSUPP.into());
    }
    if state.disk.flags.contains(InodeFlags::IMMUTABLE) {
        return Err(Errno::PERM.into());
    }
    let handle = fs.start(disk::STORE_CREDITS)?;
    state.disk.projid = project;
    attr::set_ctime(&mut state.disk, fs.now());
    disk::store(fs, &handle, inode, &mut state)?;
    handle.stop();
    Ok(())
}

/// Fails if the flags forbid a write.
pub(crate) fn check_write(state: &InodeState, append: bool) -> Result<()> {
    let flags = state.disk.flags;
    if flags.contains(InodeFlags::IMMUTABLE) || flags.contains(InodeFlags::APPEND) && !append {
        return Err(Errno::PERM.into());
    }
    Ok(())
}
