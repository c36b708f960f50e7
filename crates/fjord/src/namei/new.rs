//! New inodes: what they are given and what they inherit.
//!
//! Invariant: a new inode is in the table of inodes from [`prepare`] on, so that nobody reads a
//! second copy of it, but its state stays locked until it is complete or [`take_back`] has
//! undone it without a trace in the same handle.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;

use fjord_format::checksum;
use fjord_format::features::RoCompat;
use fjord_format::inode::{DeviceNumber, DiskInode, InodeFlags};
use fjord_journal::Handle;

use crate::attr::{Cred, FileKind, S_ISGID, S_IXGRP};
use crate::error::Result;
use crate::fs::FsInner;
use crate::inode::{Inode, InodeState, disk, table};
use crate::{acl, map, xattr};

/// What a new inode is to be.
pub(super) struct Wanted<'a> {
    /// Type and permission bits.
    pub(super) mode: u16,
    /// Device number of a device node, in the form of `Attr::rdev`.
    pub(super) rdev: u32,
    /// Who makes it.
    pub(super) cred: &'a Cred,
}

/// Allocates an inode below `dir` and fills it in, access lists included. It has no links, no
/// content and is not stored.
pub(super) fn allocate(
    fs: &Arc<FsInner>,
    h: &Handle,
    dir: &Inode,
    dir_state: &InodeState,
    wanted: &Wanted<'_>,
) -> Result<Arc<Inode>> {
    let mut decoded = DiskInode::new(wanted.mode, &fs.geo);
    inherit(fs, &mut decoded, &dir_state.disk, wanted.cred);
    let time = fs.now().into();
    (decoded.atime, decoded.mtime, decoded.ctime) = (time, time, time);
    decoded.crtime = time;
    if decoded.is_device() {
        decoded.i_block = DeviceNumber::from_u32(wanted.rdev).to_i_block();
    }
    let ino = fs.alloc_inode(h, dir.ino, decoded.is_dir())?;
    decoded.generation = match fs.options.fixed_time {
        // Nothing had the number before, in an image that is being made.
        Some(_) => checksum::inode_seed(fs.geo.csum_seed, ino, 0),
        None => random(),
    };
    Ok(table::detached(fs, ino, decoded))
}

/// Owner, group, mode bits, flags and project, as Linux gives them.
fn inherit(fs: &FsInner, new: &mut DiskInode, dir: &DiskInode, cred: &Cred) {
    let is_dir = new.is_dir();
    new.uid = cred.uid;
    new.gid = cred.gid;
    if dir.mode & S_ISGID != 0 || fs.options.grpid {
        new.gid = dir.gid;
    }
    if dir.mode & S_ISGID != 0 && !fs.options.grpid {
        if is_dir {
            new.mode |= S_ISGID;
        } else if new.mode & (S_ISGID | S_IXGRP) == S_ISGID | S_IXGRP {
            // Not for those who are outside of that group.
            let member = cred.uid == 0 || cred.gid == dir.gid || cred.groups.contains(&dir.gid);
            if !member {
                new.mode &= !S_ISGID;
            }
        }
    }
    let kind = FileKind::from_mode(new.mode);
    let lost = match kind {
        Some(FileKind::Directory) => InodeFlags::empty(),
        Some(FileKind::Regular) => {
            InodeFlags::DIRSYNC
                | InodeFlags::TOPDIR
                | InodeFlags::CASEFOLD
                | InodeFlags::PROJINHERIT
        }
        _ => !(InodeFlags::NODUMP | InodeFlags::NOATIME),
    };
    new.flags = (dir.flags & InodeFlags::INHERITED).difference(lost);
    let has_project = fs.geo.features.ro_compat.contains(RoCompat::PROJECT);
    if has_project && dir.flags.contains(InodeFlags::PROJINHERIT) {
        new.projid = dir.projid;
    }
}

/// An unpredictable number.
fn random() -> u32 {
    // Each `RandomState` has keys of its own.
    (RandomState::new().build_hasher().finish() >> 16) as u32
}

/// Makes the new inode, whose state is locked, known; stores it and gives it its access lists and the start of its content map. After
/// an error the caller takes the inode back.
pub(super) fn prepare(
    fs: &Arc<FsInner>,
    h: &Handle,
    parent: (&Inode, &InodeState),
    inode: &Arc<Inode>,
    state: &mut InodeState,
    cred: &Cred,
) -> Result<()> {
    table::publish(fs, inode);
    if state.is_file() || state.is_dir() || state.disk.is_symlink() {
        map::init(fs, state);
    }
    disk::store_new(fs, h, inode, state)?;
    acl::inherit(fs, h, parent, (inode, state), cred.umask)?;
    xattr::inherit_order_only(fs, h, parent, (inode, state))
}

/// Takes back what [`allocate`], [`prepare`] and a failed operation did.
pub(super) fn take_back(
    fs: &Arc<FsInner>,
    h: &Handle,
    inode: &Arc<Inode>,
    state: &mut InodeState,
) -> Result<()> {
    let is_dir = state.is_dir();
    if map::has_map(state) {
        // One block at most, so one step.
        map::remove(fs, h, inode, state, 0, u64::from(u32::MAX))?;
    }
    // With the handle open nothing can be freed; an orphan waits for the next mount.
    drop(xattr::release_block(fs, h, inode, state)?);
    disk::clear(fs, h, inode, state)?;
    state.dead = true;
    fs.inodes.forget(inode);
    fs.free_inode(h, inode.ino, is_dir)
}
