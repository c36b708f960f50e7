//! Attributes of inodes: reading them, changing them, access times.
//!
//! Owns the rules of chmod, chown, utimes and relatime. Invariant: a change of
//! attributes is in a transaction when the call returns; access times alone are kept
//! lazily.

use std::sync::Arc;

use fjord_format::geometry::GOOD_OLD_INODE_BYTES;
use fjord_format::inode::{DiskInode, InodeFlags};
use fjord_format::time::{SECONDS_MAX, SECONDS_MAX_32BIT, SECONDS_MIN, Timestamp};
use fjord_journal::Handle;
use rustix::io::Errno;

use super::{Inode, InodeState, disk};
use crate::attr::{
    Attr, Cred, FileKind, S_IFMT, S_ISGID, S_ISUID, S_IXGRP, SetAttr, SetTime, Timespec,
};
use crate::error::Result;
use crate::file::{truncate, write};
use crate::fs::FsInner;
use crate::options::AtimeMode;
use crate::{acl, xattr};

/// Seconds after which relatime updates an access time anyway.
const RELATIME_SECONDS: i64 = 24 * 60 * 60;

impl From<Timespec> for Timestamp {
    fn from(time: Timespec) -> Self {
        Timestamp { sec: time.sec, nsec: time.nsec }
    }
}

impl From<Timestamp> for Timespec {
    fn from(time: Timestamp) -> Self {
        Timespec { sec: time.sec, nsec: time.nsec }
    }
}

/// Sets the modification time.
pub(crate) fn set_mtime(disk: &mut DiskInode, time: Timespec) {
    disk.mtime = time.into();
}

/// Sets the change time and counts the change (`i_version`).
pub(crate) fn set_ctime(disk: &mut DiskInode, time: Timespec) {
    disk.ctime = time.into();
    disk.version = disk.version.wrapping_add(1);
}

/// The attributes of an inode as they are now.
pub(crate) fn attr(fs: &FsInner, inode: &Inode) -> Attr {
    let state = inode.state.read();
    attr_of(fs, inode, &state)
}

fn attr_of(fs: &FsInner, inode: &Inode, state: &InodeState) -> Attr {
    let disk = &state.disk;
    // Old inodes have no room for nanoseconds and birth; showing what cannot last would mislead.
    let has_extra = disk.extra_isize > 0;
    let stored = |time: Timestamp| {
        let (low, extra) = time.to_disk(has_extra);
        Timespec::from(Timestamp::from_disk(low, has_extra.then_some(extra)))
    };
    let sectors_per_block = u64::from(fs.geo.block_size / 512);
    // Programs such as tar take a file of no blocks for one hole; Linux counts inline data too.
    let inline_file = disk.flags.contains(InodeFlags::INLINE_DATA)
        && FileKind::from_mode(disk.mode) == Some(FileKind::Regular);
    let inline_sectors = if inline_file { state.size.div_ceil(512) } else { 0 };
    let extra = (state.reserved_blocks * sectors_per_block).saturating_add(inline_sectors);
    Attr {
        ino: inode.ino,
        generation: disk.generation,
        size: state.size,
        blocks: disk.blocks_512.saturating_add(extra),
        atime: stored(disk.atime),
        mtime: stored(disk.mtime),
        ctime: stored(disk.ctime),
        crtime: if has_extra { disk.crtime.into() } else { Timespec::default() },
        mode: disk.mode,
        nlink: u32::from(disk.links_count),
        uid: disk.uid,
        gid: disk.gid,
        rdev: disk.device().map_or(0, fjord_format::inode::DeviceNumber::to_u32),
        blksize: fs.geo.block_size,
        flags: (disk.flags & InodeFlags::USER_VISIBLE).bits(),
        projid: disk.projid,
    }
}

/// Carries out [`crate::InodeRef::set_attr`].
pub(crate) fn set_attr(
    fs: &Arc<FsInner>,
    inode: &Arc<Inode>,
    change: &SetAttr,
    cred: &Cred,
) -> Result<Attr> {
    check(inode, change)?;
    if let Some(size) = change.size {
        truncate::set_size(fs, inode, size)?;
    }
    let mut state = inode.state.write();
    if state.dead {
        return Err(Errno::STALE.into());
    }
    if change.kill_privileges && state.is_file() {
        write::kill_privileges(fs, inode, &mut state, change.outside_group)?;
    }
    let acl_update = match change.mode {
        Some(mode) => acl::prepare_chmod(fs, inode, &state, mode)?,
        None => None,
    };
    let handle = fs.start(disk::STORE_CREDITS + xattr::CREDITS)?;
    apply(fs, &mut state, change, cred);
    if let Some(update) = acl_update {
        acl::store(fs, &handle, inode, &mut state, update)?;
    }
    store(fs, handle, inode, &mut state)?;
    Ok(attr_of(fs, inode, &state))
}

fn check(inode: &Inode, change: &SetAttr) -> Result<()> {
    let state = inode.state.read();
    let times_only = SetAttr { mtime: change.mtime, ctime: change.ctime, ..SetAttr::default() };
    if change.mtime.is_some() && change.ctime.is_some() && *change == times_only {
        // A cache above tells when it took writes that were allowed then.
        return Ok(());
    }
    if state.disk.flags.contains(InodeFlags::IMMUTABLE) {
        return Err(Errno::PERM.into());
    }
    let append = state.disk.flags.contains(InodeFlags::APPEND);
    let sets_times = change.atime.is_some_and(|t| t != SetTime::Now)
        || change.mtime.is_some_and(|t| t != SetTime::Now);
    let other = change.mode.is_some() || change.uid.is_some() || change.gid.is_some();
    if append && (change.size.is_some() || sets_times || other) {
        return Err(Errno::PERM.into());
    }
    match (change.size, state.kind()) {
        (None, _) | (Some(_), FileKind::Regular) => Ok(()),
        (Some(_), FileKind::Directory) => Err(Errno::ISDIR.into()),
        (Some(_), _) => Err(Errno::INVAL.into()),
    }
}

fn apply(fs: &FsInner, state: &mut InodeState, change: &SetAttr, cred: &Cred) {
    let now = fs.now();
    let is_dir = state.is_dir();
    let disk = &mut state.disk;
    let chown = change.uid.is_some() || change.gid.is_some();
    disk.uid = change.uid.unwrap_or(disk.uid);
    disk.gid = change.gid.unwrap_or(disk.gid);
    if chown && change.kill_privileges && !is_dir && change.mode.is_none() {
        disk.mode &= !S_ISUID;
        if change.outside_group || disk.mode & S_IXGRP != 0 {
            disk.mode &= !S_ISGID;
        }
    }
    if let Some(mode) = change.mode {
        let mut mode = mode & !S_IFMT;
        let in_group = cred.uid == 0 || cred.gid == disk.gid || cred.groups.contains(&disk.gid);
        // Only a front end that passes groups wants the set-group-ID rule from us.
        if !cred.groups.is_empty() && !in_group {
            mode &= !S_ISGID;
        }
        disk.mode = disk.mode & S_IFMT | mode;
    }
    // Without extra fields there are no attributes that keep it from getting them with this change.
    let has_extra = disk.extra_isize.max(fs.geo.want_extra_isize) > 0
        && fs.geo.inode_size > GOOD_OLD_INODE_BYTES;
    let last = if has_extra { SECONDS_MAX } else { SECONDS_MAX_32BIT };
    let at = |set: SetTime| match set {
        // Linux lets the ends of the range stand for all that lies beyond, whole seconds only.
        SetTime::At(Timespec { sec, .. }) if sec <= SECONDS_MIN || sec >= last => {
            Timespec { sec: sec.clamp(SECONDS_MIN, last), nsec: 0 }
        }
        SetTime::At(time) => time,
        SetTime::Now => now,
    };
    if let Some(set) = change.atime {
        disk.atime = at(set).into();
    }
    if let Some(set) = change.mtime {
        disk.mtime = at(set).into();
    }
    set_ctime(disk, change.ctime.unwrap_or(now));
}

fn store(fs: &FsInner, handle: Handle, inode: &Inode, state: &mut InodeState) -> Result<()> {
    disk::store(fs, &handle, inode, state)?;
    handle.stop();
    Ok(())
}

/// Updates the access time after a read, if the mount's rule asks for it.
pub(crate) fn accessed(fs: &Arc<FsInner>, inode: &Arc<Inode>) {
    if fs.options.atime == AtimeMode::Never || fs.is_read_only() {
        return;
    }
    let now = fs.now();
    let due = |state: &InodeState| {
        let disk = &state.disk;
        let quiet = disk.flags.intersects(InodeFlags::NOATIME | InodeFlags::IMMUTABLE);
        let relative = disk.atime <= disk.mtime
            || disk.atime <= disk.ctime
            || now.sec.saturating_sub(disk.atime.sec) >= RELATIME_SECONDS;
        let excepted = !fs.options.diratime && state.is_dir();
        !quiet && !excepted && !state.dead && (fs.options.atime == AtimeMode::Strict || relative)
    };
    if !due(&inode.state.read()) {
        return;
    }
    let mut state = inode.state.write();
    if due(&state) {
        state.disk.atime = now.into();
        state.dirty = true;
        drop(state);
        fs.dirty_inodes.add(inode);
    }
}
