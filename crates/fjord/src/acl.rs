//! POSIX access control lists: attributes that are tied to the mode.
//!
//! Invariant: the permission bits of the mode and the access list always agree, because chmod,
//! setting the list and creation change both in one handle. A list equivalent to a mode is not
//! stored.

use std::sync::Arc;

use fjord_format::FormatError;
use fjord_format::acl::Acl;
use fjord_format::xattr::NameIndex;
use fjord_journal::Handle;
use rustix::io::Errno;

use crate::error::{Error, Result};
use crate::fs::FsInner;
use crate::inode::{Inode, InodeState, attr, disk};
use crate::xattr;

/// Fails unless the inode can have lists.
pub(crate) fn check_supported(fs: &FsInner, state: &InodeState) -> Result<()> {
    if fs.options.acl && !state.disk.is_symlink() { Ok(()) } else { Err(Errno::OPNOTSUPP.into()) }
}

fn load(fs: &FsInner, inode: &Inode, state: &InodeState, index: NameIndex) -> Result<Option<Acl>> {
    let Some(value) = xattr::read(fs, inode, state, index, b"")? else { return Ok(None) };
    Acl::from_disk(&value).map_err(|error| {
        Error::corrupt("access control list", format!("inode {}: {error}", inode.ino))
    })
}

/// The value that `system.posix_acl_*` shows.
///
/// # Errors
/// `ENODATA`, `EOPNOTSUPP`; damage, I/O.
pub(crate) fn get_xattr(
    fs: &FsInner,
    inode: &Inode,
    state: &InodeState,
    index: NameIndex,
) -> Result<Vec<u8>> {
    check_supported(fs, state)?;
    let acl = load(fs, inode, state, index)?.ok_or(Errno::NODATA)?;
    Ok(acl.to_xattr())
}

/// Sets `system.posix_acl_*`; an empty list removes it.
///
/// # Errors
/// `EINVAL` for a malformed list, `EACCES` for a default list on a file that is not a directory,
/// `EOPNOTSUPP`, `ENOSPC`; damage, I/O.
pub(crate) fn set_xattr(
    fs: &Arc<FsInner>,
    inode: &Arc<Inode>,
    state: &mut InodeState,
    index: NameIndex,
    value: &[u8],
) -> Result<()> {
    check_supported(fs, state)?;
    let acl = Acl::from_xattr(value).map_err(|error| match error {
        FormatError::Incompatible { .. } => Errno::OPNOTSUPP,
        _ => Errno::INVAL,
    })?;
    let mut mode = state.disk.mode;
    let stored = if index == NameIndex::POSIX_ACL_ACCESS {
        if let Some(acl) = &acl {
            mode = acl.apply_to_mode(mode);
        }
        acl.filter(|acl| !acl.is_mode_only())
    } else if acl.is_some() && !state.is_dir() {
        return Err(Errno::ACCESS.into());
    } else {
        acl
    };
    let value = stored.map(|acl| acl.to_disk());
    let h = fs.start(xattr::CREDITS)?;
    let garbage = xattr::update(fs, &h, inode, state, index, b"", value.as_deref())?;
    state.disk.mode = mode;
    attr::set_ctime(&mut state.disk, fs.now());
    disk::store(fs, &h, inode, state)?;
    h.stop();
    garbage.free(fs)
}

/// The access list that a chmod to `mode` calls for, if the inode has one.
///
/// # Errors
/// Damage, I/O.
pub(crate) fn prepare_chmod(
    fs: &FsInner,
    inode: &Inode,
    state: &InodeState,
    mode: u16,
) -> Result<Option<Acl>> {
    if check_supported(fs, state).is_err() {
        return Ok(None);
    }
    let mut acl = load(fs, inode, state, NameIndex::POSIX_ACL_ACCESS)?;
    if let Some(acl) = &mut acl {
        acl.chmod(mode);
    }
    Ok(acl)
}

/// Stores an access list from [`prepare_chmod`], of the same length as the old one.
///
/// # Errors
/// `ENOSPC` where a shared block must be copied; damage, I/O.
pub(crate) fn store(
    fs: &Arc<FsInner>,
    h: &Handle,
    inode: &Inode,
    state: &mut InodeState,
    acl: Acl,
) -> Result<()> {
    put(fs, h, inode, state, NameIndex::POSIX_ACL_ACCESS, &acl)
}

fn put(
    fs: &Arc<FsInner>,
    h: &Handle,
    inode: &Inode,
    state: &mut InodeState,
    index: NameIndex,
    acl: &Acl,
) -> Result<()> {
    let value = acl.to_disk();
    let garbage = xattr::update(fs, h, inode, state, index, b"", Some(&value))?;
    // With the handle open nothing can be freed; an orphan waits for the next mount.
    drop(garbage);
    Ok(())
}

/// Gives a new inode the lists and permissions that its directory's default list calls for;
/// without one, the umask rules.
///
/// # Errors
/// `ENOSPC`; damage, I/O.
pub(crate) fn inherit(
    fs: &Arc<FsInner>,
    h: &Handle,
    (dir, dir_state): (&Inode, &InodeState),
    (inode, state): (&Inode, &mut InodeState),
    umask: u16,
) -> Result<()> {
    if state.disk.is_symlink() {
        return Ok(());
    }
    let default = match fs.options.acl {
        true => load(fs, dir, dir_state, NameIndex::POSIX_ACL_DEFAULT)?,
        false => None,
    };
    let Some(default) = default else {
        state.disk.mode &= !(umask & 0o777);
        return Ok(());
    };
    if state.is_dir() {
        put(fs, h, inode, state, NameIndex::POSIX_ACL_DEFAULT, &default)?;
    }
    let inherited = default.inherit(state.disk.mode);
    state.disk.mode = inherited.mode;
    match inherited.access {
        Some(access) => put(fs, h, inode, state, NameIndex::POSIX_ACL_ACCESS, &access),
        None => Ok(()),
    }
}
