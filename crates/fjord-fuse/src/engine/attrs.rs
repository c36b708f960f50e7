//! Attributes: GETATTR, SETATTR, STATX, STATFS, and how long the kernel may cache them.

use fjord::{Attr, FileKind, InodeRef, SetAttr, SetTime, Timespec};

use super::{EngineHandler, Outcome, caller, nodes::node_id};
use crate::{abi::*, request::Request};

/// How long the kernel may keep names and attributes: it makes every change itself.
const LONG_SECS: u64 = 365 * 24 * 3600;
/// The same for a recently changed file: delayed allocation still changes its block count, which
/// the kernel does not see.
const SHORT_SECS: u64 = 1;
/// For how long after a change the block count may still change: writeback and commit, with a
/// margin.
const SETTLE_SECS: i64 = 30;

const STATX_BASIC_STATS: u32 = 0x7ff;
const STATX_BTIME: u32 = 0x800;
const STATX_ATTR_IMMUTABLE: u64 = 0x10;
const STATX_ATTR_APPEND: u64 = 0x20;
const STATX_ATTR_NODUMP: u64 = 0x40;
const SUPPORTED_STATX_ATTRS: u64 = STATX_ATTR_IMMUTABLE | STATX_ATTR_APPEND | STATX_ATTR_NODUMP;

/// Set-user-ID, set-group-ID, and group execute.
const S_ISUID: u16 = 0o4000;
const S_ISGID: u16 = 0o2000;
const S_IXGRP: u16 = 0o0010;

/// Inode flag: no change at all.
pub(super) const FS_IMMUTABLE_FL: u32 = 0x10;
/// Inode flag: only appending.
pub(super) const FS_APPEND_FL: u32 = 0x20;
/// Inode flag: left out by dump(8).
pub(super) const FS_NODUMP_FL: u32 = 0x40;

/// Attributes on the wire.
fn fuse_attr(attr: &Attr) -> FuseAttr {
    FuseAttr {
        ino: u64::from(attr.ino.0),
        size: attr.size,
        blocks: attr.blocks,
        atime: attr.atime.sec as u64,
        mtime: attr.mtime.sec as u64,
        ctime: attr.ctime.sec as u64,
        atimensec: attr.atime.nsec,
        mtimensec: attr.mtime.nsec,
        ctimensec: attr.ctime.nsec,
        mode: u32::from(attr.mode),
        nlink: attr.nlink,
        uid: attr.uid,
        gid: attr.gid,
        rdev: attr.rdev,
        blksize: attr.blksize,
        flags: 0,
    }
}

/// Whether the file runs with the rights of its owner or group, which a write takes away.
pub(super) fn has_set_ids(attr: &Attr) -> bool {
    attr.kind() == FileKind::Regular && attr.mode & (S_ISUID | S_ISGID) != 0
}

/// How long the kernel may keep these attributes, in seconds.
fn attr_valid_secs(attr: &Attr, writeback_cache: bool) -> u64 {
    // OPEN and WRITE drop the bits, and their replies have no attributes: so the kernel asks again
    // before each exec.
    if has_set_ids(attr) {
        return 0;
    }
    // An empty file has no data that waits for blocks, and a write makes the kernel ask again. A write that stays in the
    // kernel's cache does not: the file would have as few blocks as before for as long as the attributes last.
    let is_empty = attr.size == 0 && attr.blocks == 0;
    let is_final = (is_empty || is_settled(attr)) && !writeback_cache;
    if attr.kind() != FileKind::Regular || is_final { LONG_SECS } else { SHORT_SECS }
}

fn is_settled(attr: &Attr) -> bool {
    Timespec::now().sec.saturating_sub(attr.ctime.sec) > SETTLE_SECS
}

/// The reply that names `inode`; the caller has counted the lookup.
pub(super) fn entry_out(inode: &InodeRef, writeback_cache: bool) -> EntryOut {
    let attr = inode.attr();
    EntryOut {
        nodeid: node_id(attr.ino),
        generation: u64::from(attr.generation),
        entry_valid: LONG_SECS,
        attr_valid: attr_valid_secs(&attr, writeback_cache),
        attr: fuse_attr(&attr),
        ..Default::default()
    }
}

/// The reply for a missing name, with a timeout (negative entry).
pub(super) fn negative_entry() -> EntryOut {
    EntryOut { entry_valid: LONG_SECS, ..Default::default() }
}

fn sx_time(t: Timespec) -> SxTime {
    SxTime { tv_sec: t.sec, tv_nsec: t.nsec, reserved: 0 }
}

/// Splits a device number (12 bits major, 20 bits minor, interleaved as the kernel does).
fn split_rdev(rdev: u32) -> (u32, u32) {
    ((rdev >> 8) & 0xfff, (rdev & 0xff) | ((rdev >> 12) & 0xf_ff00))
}

impl EngineHandler {
    fn attr_out(&self, attr: &Attr) -> AttrOut {
        let attr_valid = attr_valid_secs(attr, self.writeback_cache);
        AttrOut { attr_valid, attr: fuse_attr(attr), ..Default::default() }
    }

    pub(super) fn getattr(&self, request: &Request<'_>) -> Outcome<AttrOut> {
        Ok(self.attr_out(&self.node(request)?.attr()))
    }

    pub(super) fn statx(&self, request: &Request<'_>) -> Outcome<StatxOut> {
        let attr = self.node(request)?.attr();
        let flag = |fl: u32, bit: u64| if attr.flags & fl != 0 { bit } else { 0 };
        let (rdev_major, rdev_minor) = split_rdev(attr.rdev);
        let has_birth = attr.crtime != Timespec::default();
        let stat = FuseStatx {
            mask: STATX_BASIC_STATS | if has_birth { STATX_BTIME } else { 0 },
            blksize: attr.blksize,
            attributes: flag(FS_IMMUTABLE_FL, STATX_ATTR_IMMUTABLE)
                | flag(FS_APPEND_FL, STATX_ATTR_APPEND)
                | flag(FS_NODUMP_FL, STATX_ATTR_NODUMP),
            attributes_mask: SUPPORTED_STATX_ATTRS,
            nlink: attr.nlink,
            uid: attr.uid,
            gid: attr.gid,
            mode: attr.mode,
            ino: u64::from(attr.ino.0),
            size: attr.size,
            blocks: attr.blocks,
            atime: sx_time(attr.atime),
            btime: sx_time(attr.crtime),
            ctime: sx_time(attr.ctime),
            mtime: sx_time(attr.mtime),
            rdev_major,
            rdev_minor,
            ..Default::default()
        };
        let attr_valid = attr_valid_secs(&attr, self.writeback_cache);
        Ok(StatxOut { attr_valid, stat, ..Default::default() })
    }

    pub(super) fn setattr(&self, request: &Request<'_>, args: &SetattrIn) -> Outcome<AttrOut> {
        let node = self.node(request)?;
        let valid = Fattr::from_bits_truncate(args.valid);
        let time = |set, now, sec: u64, nsec: u32| {
            if valid.contains(now) {
                Some(SetTime::Now)
            } else {
                valid.contains(set).then(|| SetTime::At(timespec(sec, nsec)))
            }
        };
        let before = node.attr();
        let kill_privileges = valid.contains(Fattr::KILL_SUIDGID)
            || valid.difference(Fattr::FH | Fattr::LOCKOWNER | Fattr::CTIME).is_empty()
                && self.is_before_write(request.header, &before);
        let gid = valid.contains(Fattr::GID).then_some(args.gid);
        let change = SetAttr {
            mode: valid.contains(Fattr::MODE).then_some((args.mode & 0o7777) as u16),
            uid: valid.contains(Fattr::UID).then_some(args.uid),
            gid,
            size: valid.contains(Fattr::SIZE).then_some(args.size),
            atime: time(Fattr::ATIME, Fattr::ATIME_NOW, args.atime, args.atimensec),
            mtime: time(Fattr::MTIME, Fattr::MTIME_NOW, args.mtime, args.mtimensec),
            ctime: valid.contains(Fattr::CTIME).then(|| timespec(args.ctime, args.ctimensec)),
            kill_privileges,
            outside_group: kill_privileges && outside_group(request.header, &before, gid),
        };
        if valid.contains(Fattr::SIZE) && !change.kill_privileges {
            node.drop_capability()?;
        }
        // The groups matter only where set-group-ID is being given.
        let cred = match change.mode {
            Some(mode) if mode & 0o2000 != 0 => caller::cred_with_groups(request.header, 0),
            _ => caller::cred(request.header, 0),
        };
        let attr = node.set_attr(&change, &cred)?;
        self.inode_changed(&node)?;
        Ok(self.attr_out(&attr))
    }

    /// Whether a SETATTR that sets nothing comes before a write or an fallocate, to take
    /// set-user-ID and set-group-ID away; the kernel looks at its own copy of the mode, which the
    /// reply renews before the content changes. A chown(2) with -1, -1 looks the same, and any user
    /// may call it: so the bits are dropped only for the owner or a user who has the file open for
    /// writing.
    fn is_before_write(&self, header: &InHeader, attr: &Attr) -> bool {
        has_set_ids(attr)
            && !caller::keeps_set_ids(header)
            && (header.uid == attr.uid || self.handles.has_writer(attr.ino, header.uid))
    }

    pub(super) fn statfs(&self) -> StatfsOut {
        self.fs.settle_removed();
        let st = self.fs.statfs();
        StatfsOut {
            blocks: st.blocks,
            bfree: st.blocks_free,
            bavail: st.blocks_available,
            files: st.files,
            ffree: st.files_free,
            bsize: st.block_size,
            namelen: st.name_max,
            frsize: st.block_size,
            ..Default::default()
        }
    }
}

/// Whether set-group-ID without group execute goes with the other privileges, as it does for
/// callers outside the file's group. A chown that takes set-user-ID away looks at the new group too.
pub(super) fn outside_group(header: &InHeader, attr: &Attr, new_gid: Option<u32>) -> bool {
    if attr.mode & (S_ISGID | S_IXGRP) != S_ISGID || caller::keeps_set_ids(header) {
        return false;
    }
    let caller = caller::cred_with_groups(header, 0);
    let outside = |gid| caller.gid != gid && !caller.groups.contains(&gid);
    outside(attr.gid) || attr.mode & S_ISUID != 0 && new_gid.is_some_and(outside)
}

/// A time from the wire, where seconds before 1970 arrive as large unsigned numbers.
fn timespec(sec: u64, nsec: u32) -> Timespec {
    Timespec { sec: sec as i64, nsec: nsec.min(999_999_999) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_numbers_are_split_as_the_kernel_does() {
        assert_eq!(split_rdev(0x0801), (8, 1));
        // major 259, minor 0x12345
        assert_eq!(split_rdev(0x45 | 259 << 8 | 0x123 << 20), (259, 0x12345));
    }

    #[test]
    fn times_before_the_epoch_stay_there() {
        assert_eq!(timespec(-5i64 as u64, u32::MAX).sec, -5);
    }
}
