//! Creating files of every kind.
//!
//! Invariant: the new inode is complete and has its name before other threads can see it; if
//! space runs out on the way, inode, block and attributes are given back in the same handle.

use std::sync::Arc;

use fjord_block::plant::{Bug, planted};
use fjord_journal::Handle;
use rustix::io::Errno;

use super::new::{self, Wanted};
use super::{
    add_subdir, check_dir, check_may_add, check_new_entry, credits_add_entry, credits_new_inode,
    file_type, links_full, retry_full, store_changed_dir,
};
use crate::attr::{
    Cred, FileKind, S_IFBLK, S_IFCHR, S_IFDIR, S_IFIFO, S_IFLNK, S_IFMT, S_IFREG, S_IFSOCK,
};
use crate::error::Result;
use crate::fs::FsInner;
use crate::inode::{Inode, InodeState, disk};
use crate::vfs::InodeRef;
use crate::{dir, map, orphan};

/// Permission bits that a caller may ask for.
const PERMISSIONS: u16 = 0o7777;
/// The same for directories, which get set-group-ID from their parent only, as in Linux.
const DIR_PERMISSIONS: u16 = 0o1777;
/// Longest target of a symbolic link, less than Linux's `PATH_MAX`.
const TARGET_BYTES_MAX: usize = 4095;

/// Creates a regular file.
///
/// # Errors
/// `EEXIST`, `ENOTDIR`, `ENOENT` (the directory was removed), `EPERM` (immutable), `ENOSPC`,
/// `ENAMETOOLONG`, `EINVAL`, `EROFS`; damage, I/O.
pub(crate) fn create(
    fs: &Arc<FsInner>,
    dir: &Arc<Inode>,
    name: &[u8],
    mode: u16,
    cred: &Cred,
) -> Result<InodeRef> {
    make(fs, dir, name, &Wanted { mode: S_IFREG | mode & PERMISSIONS, rdev: 0, cred }, &[])
}

/// Creates a special or regular file; `mode` names the type (none: regular).
///
/// # Errors
/// As [`create`]; `EINVAL` for an unknown type, `EPERM` for a directory, as in Linux.
pub(crate) fn mknod(
    fs: &Arc<FsInner>,
    dir: &Arc<Inode>,
    name: &[u8],
    mode: u16,
    rdev: u32,
    cred: &Cred,
) -> Result<InodeRef> {
    let kind = match mode & S_IFMT {
        0 | S_IFREG => S_IFREG,
        kind @ (S_IFCHR | S_IFBLK | S_IFIFO | S_IFSOCK) => kind,
        S_IFDIR => return Err(Errno::PERM.into()),
        _ => return Err(Errno::INVAL.into()),
    };
    make(fs, dir, name, &Wanted { mode: kind | mode & PERMISSIONS, rdev, cred }, &[])
}

/// Creates a directory.
///
/// # Errors
/// As [`create`]; `EMLINK`.
pub(crate) fn mkdir(
    fs: &Arc<FsInner>,
    dir: &Arc<Inode>,
    name: &[u8],
    mode: u16,
    cred: &Cred,
) -> Result<InodeRef> {
    make(fs, dir, name, &Wanted { mode: S_IFDIR | mode & DIR_PERMISSIONS, rdev: 0, cred }, &[])
}

/// Creates a symbolic link.
///
/// # Errors
/// As [`create`]; `ENOENT` for an empty target, `ENAMETOOLONG` for one that does not fit a
/// block with its terminating zero, `EINVAL` for one with a zero byte.
pub(crate) fn symlink(
    fs: &Arc<FsInner>,
    dir: &Arc<Inode>,
    name: &[u8],
    target: &[u8],
    cred: &Cred,
) -> Result<InodeRef> {
    if target.is_empty() {
        return Err(Errno::NOENT.into());
    }
    if target.len() >= fs.geo.block_size as usize || target.len() > TARGET_BYTES_MAX {
        return Err(Errno::NAMETOOLONG.into());
    }
    if target.contains(&0) {
        return Err(Errno::INVAL.into());
    }
    make(fs, dir, name, &Wanted { mode: S_IFLNK | 0o777, rdev: 0, cred }, target)
}

/// Creates a regular file without a name. It goes when its last reference goes, unless it is
/// linked before.
///
/// # Errors
/// As [`create`].
pub(crate) fn tmpfile(
    fs: &Arc<FsInner>,
    dir: &Arc<Inode>,
    mode: u16,
    cred: &Cred,
) -> Result<InodeRef> {
    retry_full(fs, || make_nameless(fs, dir, mode, cred))
}

fn make_nameless(fs: &Arc<FsInner>, dir: &Arc<Inode>, mode: u16, cred: &Cred) -> Result<InodeRef> {
    let dir_state = dir.state.read();
    check_dir(&dir_state)?;
    check_may_add(&dir_state)?;
    let wanted = Wanted { mode: S_IFREG | mode & PERMISSIONS, rdev: 0, cred };
    let h = fs.start(credits_new_inode(fs))?;
    let inode = new::allocate(fs, &h, dir, &dir_state, &wanted)?;
    {
        let mut state = inode.state.write_unshared();
        let done = new::prepare(fs, &h, (dir, &dir_state), &inode, &mut state, cred)
            .and_then(|()| orphan::add(fs, &h, &inode, &mut state));
        if let Err(error) = done {
            new::take_back(fs, &h, &inode, &mut state)?;
            return Err(error);
        }
        state.linkable = true;
        state.changes.born(h.tid());
    }
    h.stop();
    Ok(InodeRef::new(fs, inode))
}

fn make(
    fs: &Arc<FsInner>,
    dir: &Arc<Inode>,
    name: &[u8],
    wanted: &Wanted<'_>,
    target: &[u8],
) -> Result<InodeRef> {
    retry_full(fs, || make_once(fs, dir, name, wanted, target))
}

fn make_once(
    fs: &Arc<FsInner>,
    dir: &Arc<Inode>,
    name: &[u8],
    wanted: &Wanted<'_>,
    target: &[u8],
) -> Result<InodeRef> {
    let mut dir_state = dir.state.write();
    check_new_entry(fs, dir, &dir_state, name)?;
    let is_dir = wanted.mode & S_IFMT == S_IFDIR;
    if is_dir && links_full(fs, &dir_state) {
        return Err(Errno::MLINK.into());
    }
    let mut h = fs.start(credits_add_entry(fs) + credits_new_inode(fs))?;
    let inode = new::allocate(fs, &h, dir, &dir_state, wanted)?;
    {
        let mut state = inode.state.write_unshared();
        let done = new::prepare(fs, &h, (dir, &dir_state), &inode, &mut state, wanted.cred)
            .and_then(|()| fill(fs, &h, dir, &inode, &mut state, target))
            .and_then(|()| {
                let kind = file_type(&state);
                dir::insert(fs, &h, dir, &mut dir_state, name, inode.ino, kind)
            });
        if let Err(error) = done {
            new::take_back(fs, &h, &inode, &mut state)?;
            return Err(error);
        }
        if planted(Bug::EntryBeforeInode) {
            h = fs.split_change(h)?;
        }
        let replaced = dir_state.changes.removed(name);
        state.changes.born(h.tid());
        let fits = dir_state.changes.has_shape_of_before(h.tid());
        state.changes.named(h.tid(), dir.ino, name, replaced, fits);
        disk::store(fs, &h, &inode, &mut state)?;
        if is_dir {
            add_subdir(&mut dir_state);
        }
        store_changed_dir(fs, &h, dir, &mut dir_state, fs.now())?;
    }
    h.stop();
    // Still under the directory's lock: nobody can have removed the name.
    Ok(InodeRef::new(fs, inode))
}

/// Gives a new inode its links and the content that it is born with.
fn fill(
    fs: &Arc<FsInner>,
    h: &Handle,
    dir: &Inode,
    inode: &Inode,
    state: &mut InodeState,
    target: &[u8],
) -> Result<()> {
    state.disk.links_count = 1;
    match state.kind() {
        FileKind::Directory => {
            state.disk.links_count = 2;
            dir::init(fs, h, inode, state, dir.ino)
        }
        FileKind::Symlink => write_target(fs, h, inode, state, target),
        _ => Ok(()),
    }
}

fn write_target(
    fs: &Arc<FsInner>,
    h: &Handle,
    inode: &Inode,
    state: &mut InodeState,
    target: &[u8],
) -> Result<()> {
    state.size = target.len() as u64;
    state.disk.size = state.size;
    // Linux keeps the terminating zero in the inode too.
    if target.len() < state.disk.i_block.len() {
        map::clear(state);
        for (to, from) in state.disk.i_block.iter_mut().zip(target) {
            *to = *from;
        }
        return Ok(());
    }
    let block = map::alloc_block(fs, h, inode, state, 0)?;
    let buffer = fs.meta.create(block);
    let mut bytes = h.get_create(&buffer)?;
    bytes.fill(0);
    for (to, from) in bytes.iter_mut().zip(target) {
        *to = *from;
    }
    Ok(())
}
