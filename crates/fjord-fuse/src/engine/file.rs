//! Open files: OPEN, READ, WRITE, FSYNC, FALLOCATE, LSEEK.

use fjord::{AtimeMode, Attr, FallocMode, InodeRef, SetAttr, Timespec, WriteOptions};

use super::{
    EngineHandler, Outcome,
    attrs::{FS_APPEND_FL, FS_IMMUTABLE_FL, has_set_ids, outside_group},
    caller,
};
use crate::{
    abi::*,
    reply::{Errno, Responder},
    request::Request,
    session::Scratch,
};

const O_ACCMODE: u32 = libc::O_ACCMODE as u32;
const O_RDONLY: u32 = libc::O_RDONLY as u32;
const O_WRONLY: u32 = libc::O_WRONLY as u32;
const O_TRUNC: u32 = libc::O_TRUNC as u32;
const O_APPEND: u32 = libc::O_APPEND as u32;
const DAY_SECS: i64 = 24 * 3600;

impl EngineHandler {
    /// The kernel's pages stay valid from one open to the next, because there is no other writer;
    /// close(2) has nothing to flush.
    pub(super) const OPEN_FLAGS: OpenReplyFlags = OpenReplyFlags::KEEP_CACHE
        .union(OpenReplyFlags::NOFLUSH)
        .union(OpenReplyFlags::PARALLEL_DIRECT_WRITES);

    pub(super) fn open(
        &self,
        request: &Request<'_>,
        args: &OpenIn,
        reply: Responder,
    ) -> Outcome<()> {
        let node = match self.open_node(request, args) {
            Ok(node) => node,
            Err(e) => return reply.fail(e),
        };
        let mut flags = Self::OPEN_FLAGS;
        let reads = args.flags & O_ACCMODE != O_WRONLY;
        let due = reads && args.flags & O_TRUNC == 0 && self.atime_is_due(&node.attr());
        if due {
            flags.remove(OpenReplyFlags::KEEP_CACHE);
        }
        // The daemon sees only reads that miss the kernel's cache. Losing its first page makes the first
        // read of this open one of them. Where others have the file open, a request may hold that page,
        // and this process must not wait for its own answer: then the opener loses all pages, and waits.
        let fh = self.handles.open(&node, args.flags, request.header.uid, || {
            if due {
                reply.invalidate(request.header.nodeid, 0, 1);
                flags.insert(OpenReplyFlags::KEEP_CACHE);
            }
        });
        reply.value(&OpenOut { fh, open_flags: flags.bits(), backing_id: 0 });
        Ok(())
    }

    /// The node to open, after the checks that the kernel cannot make and after O_TRUNC.
    fn open_node(&self, request: &Request<'_>, args: &OpenIn) -> Outcome<InodeRef> {
        let node = self.node(request)?;
        let writes = args.flags & O_ACCMODE != O_RDONLY || args.flags & O_TRUNC != 0;
        if !writes {
            return Ok(node);
        }
        if self.fs.is_read_only() {
            return Err(Errno(libc::EROFS));
        }
        let inode_flags = node.flags();
        let rewrites = args.flags & O_APPEND == 0 || args.flags & O_TRUNC != 0;
        if inode_flags & FS_IMMUTABLE_FL != 0 || inode_flags & FS_APPEND_FL != 0 && rewrites {
            return Err(Errno(libc::EPERM));
        }
        if args.flags & O_TRUNC != 0 {
            let kill_privileges = args.open_flags & FUSE_OPEN_KILL_SUIDGID != 0;
            if !kill_privileges {
                node.drop_capability()?;
            }
            let outside_group =
                kill_privileges && outside_group(request.header, &node.attr(), None);
            let change =
                SetAttr { size: Some(0), kill_privileges, outside_group, ..Default::default() };
            node.set_attr(&change, &caller::cred(request.header, 0))?;
            self.inode_changed(&node)?;
        }
        Ok(node)
    }

    /// Whether a read now would have to set the access time.
    fn atime_is_due(&self, attr: &Attr) -> bool {
        match self.atime {
            AtimeMode::Never => false,
            AtimeMode::Strict => true,
            AtimeMode::Relatime => {
                attr.atime <= attr.mtime
                    || attr.atime <= attr.ctime
                    || Timespec::now().sec.saturating_sub(attr.atime.sec) >= DAY_SECS
            }
        }
    }

    pub(super) fn read(
        &self,
        request: &Request<'_>,
        args: &ReadIn,
        reply: Responder,
        scratch: &mut Scratch,
    ) -> Outcome<()> {
        let node = match self.node(request) {
            Ok(node) => node,
            Err(e) => return reply.fail(e),
        };
        let read = |room: &mut [u8]| Ok(node.read(args.offset, room)?);
        reply.fill(args.size as usize, &mut scratch.read, read);
        Ok(())
    }

    pub(super) fn write(
        &self,
        request: &Request<'_>,
        args: &WriteIn,
        data: &[u8],
    ) -> Outcome<WriteOut> {
        let node = self.node(request)?;
        let kill_privileges = args.write_flags & FUSE_WRITE_KILL_SUIDGID != 0;
        let cached = args.write_flags & FUSE_WRITE_CACHE != 0;
        if kill_privileges {
            self.drop_set_ids(request, &node)?;
        }
        // A change through a mapping takes no privileges away.
        if !kill_privileges && !cached {
            node.drop_capability()?;
        }
        let options = WriteOptions {
            append: args.flags & O_APPEND != 0 && !cached,
            // Without a write cache only mapped pages come this way; the time is ours then.
            from_cache: cached && self.writeback_cache,
            kill_privileges,
            use_reserve: self.may_use_reserve(request),
        };
        let count = node.write_with(args.offset, data, options)?;
        Ok(WriteOut { size: count as u32, padding: 0 })
    }

    /// Drops set-user-ID and set-group-ID before a change by a caller without CAP_FSETID. The
    /// kernel has asked for that already (SETATTR), but not so that it could be followed where the
    /// file was opened by another user than the caller.
    fn drop_set_ids(&self, request: &Request<'_>, node: &InodeRef) -> Outcome<()> {
        let attr = node.attr();
        if has_set_ids(&attr) && !caller::keeps_set_ids(request.header) {
            let outside_group = outside_group(request.header, &attr, None);
            let kill = SetAttr { kill_privileges: true, outside_group, ..Default::default() };
            node.set_attr(&kill, &caller::cred(request.header, 0))?;
        }
        Ok(())
    }

    fn may_use_reserve(&self, request: &Request<'_>) -> bool {
        let (uid, gid) = (request.header.uid, request.header.gid);
        let options = self.fs.options();
        uid == 0 || options.resuid == Some(uid) || options.resgid == Some(gid)
    }

    /// Answered by the thread that settles its commit: no worker waits for that.
    pub(super) fn fsync(
        &self,
        request: &Request<'_>,
        args: &FsyncIn,
        reply: Responder,
    ) -> Outcome<()> {
        let datasync = args.fsync_flags & FUSE_FSYNC_FDATASYNC != 0;
        match self.handles.get(args.fh) {
            Some(file) => {
                file.file.fsync_then(datasync, |result| reply.result(result));
                Ok(())
            }
            None => self.fsyncdir(request, args, reply),
        }
    }

    pub(super) fn fsyncdir(
        &self,
        request: &Request<'_>,
        args: &FsyncIn,
        reply: Responder,
    ) -> Outcome<()> {
        let datasync = args.fsync_flags & FUSE_FSYNC_FDATASYNC != 0;
        match self.node(request) {
            Ok(node) => {
                node.fsync_then(datasync, |result| reply.result(result));
                Ok(())
            }
            Err(e) => reply.fail(e),
        }
    }

    pub(super) fn fallocate(&self, request: &Request<'_>, args: &FallocateIn) -> Outcome<()> {
        let node = self.node(request)?;
        let mode = FallocMode::from_bits(args.mode).ok_or(Errno(libc::EOPNOTSUPP))?;
        node.drop_capability()?;
        self.drop_set_ids(request, &node)?;
        node.fallocate(mode, args.offset, args.length)?;
        // A write would be followed by FSYNC, a reservation is not.
        if self.handles.get(args.fh).is_some_and(|file| file.sync) {
            node.fsync(false)?;
        }
        self.inode_changed(&node)
    }

    /// Block number of a block of the file, in the kernel's block size, which may differ from the
    /// image's; 0 if unmapped. A block larger than the image's has a number only if it is
    /// contiguous and aligned: the kernel may use it without fjord, for swapping.
    pub(super) fn bmap(&self, request: &Request<'_>, args: &BmapIn) -> Outcome<BmapOut> {
        let node = self.node(request)?;
        let (asked, ours) = (u64::from(args.blocksize), u64::from(self.fs.geometry().block_size));
        if !args.blocksize.is_power_of_two() {
            return Err(Errno(libc::EINVAL));
        }
        let offset = args.block.checked_mul(asked).ok_or(Errno(libc::EFBIG))?;
        let Some(first) = node.bmap(offset / ours)? else {
            return Ok(BmapOut { block: 0 });
        };
        // Nothing is mapped past the end.
        let end = (offset + asked).min(node.attr().size.max(offset + 1)).div_ceil(ours);
        for (lblk, place) in (offset / ours..end).zip(first..) {
            if node.bmap(lblk)? != Some(place) {
                return Ok(BmapOut { block: 0 });
            }
        }
        let start = first * ours + offset % ours;
        Ok(BmapOut { block: if start.is_multiple_of(asked) { start / asked } else { 0 } })
    }

    pub(super) fn lseek(&self, request: &Request<'_>, args: &LseekIn) -> Outcome<LseekOut> {
        let inode = self.node(request)?;
        let offset = match i32::try_from(args.whence) {
            Ok(libc::SEEK_DATA) => inode.seek_data(args.offset)?,
            Ok(libc::SEEK_HOLE) => inode.seek_hole(args.offset)?,
            _ => return Err(Errno(libc::EINVAL)),
        };
        Ok(LseekOut { offset })
    }
}
