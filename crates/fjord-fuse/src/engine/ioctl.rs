//! IOCTL: inode flags, project IDs, barriers, discard of free space, shutdown, label, counters, snapshots,
//! growth.
//!
//! The kernel passes on only well-formed ioctls: the direction and size in the number tell which
//! bytes come with the request and how many may go back.

use fjord::{Epoch, ShutdownMode, TrimRange};
use rustix::ioctl::opcode;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::{EngineHandler, Outcome, attrs::FS_IMMUTABLE_FL, caller};
use crate::{
    abi::*,
    call::{Call, FJORD_IOC_RESIZE, FJORD_IOC_SNAPSHOT},
    reply::{Errno, Responder},
    request::Request,
    resize,
    stats::{FJORD_IOC_STATS, MountStats},
};

const FS_IOC_GETFLAGS: u32 = 0x8008_6601;
const FS_IOC_SETFLAGS: u32 = 0x4008_6602;
const FS_IOC32_GETFLAGS: u32 = 0x8004_6601;
const FS_IOC32_SETFLAGS: u32 = 0x4004_6602;
const FS_IOC_GETVERSION: u32 = 0x8008_7601;
const FS_IOC32_GETVERSION: u32 = 0x8004_7601;
const EXT4_IOC_GETVERSION: u32 = 0x8008_6603;
const EXT4_IOC32_GETVERSION: u32 = 0x8004_6603;
const FS_IOC_FSGETXATTR: u32 = 0x801c_581f;
const FS_IOC_FSSETXATTR: u32 = 0x401c_5820;
const FS_IOC_GETFSLABEL: u32 = 0x8100_9431;
/// Bytes that it gives.
const FSLABEL_MAX: usize = 256;
const FS_IOC_SETFSLABEL: u32 = 0x4100_9432;
const EXT4_IOC_CHECKPOINT: u32 = 0x4004_662b;
const FITRIM: u32 = 0xc018_5879;
const XFS_IOC_GOINGDOWN: u32 = 0x8004_587d;

/// `_IO('J', 4)` and `_IO('J', 5)`, as `fjord.h` has them.
const FJORD_IOC_FBARRIER: u32 = opcode::none(b'J', 4);
const FJORD_IOC_FDATABARRIER: u32 = opcode::none(b'J', 5);
/// `_IOWR('J', 6, struct fjord_epoch)`.
const FJORD_IOC_EPOCH: u32 = opcode::read_write::<FjordEpoch>(b'J', 6);

/// `struct fjord_epoch` of `fjord.h`.
#[derive(Clone, Copy, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct FjordEpoch {
    mount: u64,
    number: u64,
    /// What is asked for: [`epoch_call`].
    call: u32,
    is_durable: u32,
}

/// Values of [`FjordEpoch::call`].
mod epoch_call {
    pub(super) const FBARRIER: u32 = 0;
    pub(super) const FDATABARRIER: u32 = 1;
    pub(super) const LOOK: u32 = 2;
    pub(super) const WAIT: u32 = 3;
}

/// Inode flags with their counterparts in [`FsXattr::fsx_xflags`].
const XFLAGS: [(u32, u32); 7] = [
    (0x0000_0008, 0x0000_0020), // synchronous
    (0x0000_0010, 0x0000_0008), // immutable
    (0x0000_0020, 0x0000_0010), // append only
    (0x0000_0040, 0x0000_0080), // no dump
    (0x0000_0080, 0x0000_0040), // no access time
    (0x0200_0000, 0x0000_8000), // direct access
    (0x2000_0000, 0x0000_0200), // inherit project
];

/// `struct fsxattr`.
#[derive(Clone, Copy, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct FsXattr {
    fsx_xflags: u32,
    fsx_extsize: u32,
    fsx_nextents: u32,
    fsx_projid: u32,
    fsx_cowextsize: u32,
    fsx_pad: [u8; 8],
}

/// `struct fstrim_range`.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct FstrimRange {
    start: u64,
    len: u64,
    minlen: u64,
}

fn parse<T: FromBytes>(input: &[u8]) -> Outcome<T> {
    T::read_from_prefix(input).map(|(value, _)| value).map_err(|_| Errno(libc::EINVAL))
}

fn to_xflags(flags: u32) -> u32 {
    XFLAGS.iter().filter(|(fl, _)| flags & fl != 0).fold(0, |x, (_, xfl)| x | xfl)
}

/// The inode flags after an FSSETXATTR: those that it can name are replaced.
fn merge_xflags(flags: u32, xflags: u32) -> u32 {
    XFLAGS.iter().fold(flags, |f, (fl, xfl)| if xflags & xfl != 0 { f | fl } else { f & !fl })
}

/// With `tells` the epoch goes along.
fn reply_barrier(reply: Responder, result: fjord::Result<Epoch>, tells: bool) {
    match result {
        Ok(epoch) if tells => reply_epoch(reply, epoch, 0),
        Ok(_) => reply.gather(&[IoctlOut::default().as_bytes()]),
        Err(error) => reply.error(Errno::from(error).0),
    }
}

fn reply_epoch(reply: Responder, epoch: Epoch, is_durable: u32) {
    let told = FjordEpoch {
        mount: epoch.mount(),
        number: epoch.number(),
        is_durable,
        ..FjordEpoch::default()
    };
    reply.gather(&[IoctlOut::default().as_bytes(), told.as_bytes()]);
}

impl EngineHandler {
    pub(super) fn ioctl(
        &self,
        request: &Request<'_>,
        args: &IoctlIn,
        input: &[u8],
        reply: Responder,
    ) -> Outcome<()> {
        match args.cmd {
            FJORD_IOC_FBARRIER => return self.barrier(request, args, false, reply),
            FJORD_IOC_FDATABARRIER => return self.barrier(request, args, true, reply),
            FJORD_IOC_EPOCH => return self.epoch(request, args, input, reply),
            _ => {}
        }
        let output = self.ioctl_output(request, args, input);
        let sets = matches!(args.cmd, FS_IOC_SETFLAGS | FS_IOC32_SETFLAGS | FS_IOC_FSSETXATTR);
        if sets && output.is_ok() {
            // The change time moved, which the kernel cannot know.
            reply.invalidate_attr(request.header.nodeid);
        }
        match output {
            Ok(output) if output.len() <= args.out_size as usize => {
                reply.gather(&[IoctlOut::default().as_bytes(), &output]);
                Ok(())
            }
            Ok(_) => reply.fail(Errno(libc::EINVAL)),
            Err(e) => reply.fail(e),
        }
    }

    /// Where it is an fsync, no worker waits.
    fn barrier(
        &self,
        request: &Request<'_>,
        args: &IoctlIn,
        datasync: bool,
        reply: Responder,
    ) -> Outcome<()> {
        let tells = args.cmd == FJORD_IOC_EPOCH;
        if let Some(file) = self.handles.get(args.fh) {
            file.file.barrier_then(datasync, move |result| reply_barrier(reply, result, tells));
            return Ok(());
        }
        // A directory.
        match self.node(request) {
            Ok(node) => {
                node.barrier_then(datasync, move |result| reply_barrier(reply, result, tells));
                Ok(())
            }
            Err(error) => reply.fail(error),
        }
    }

    /// A barrier that gives its epoch, or a question about one. Who waits for one occupies a worker.
    fn epoch(
        &self,
        request: &Request<'_>,
        args: &IoctlIn,
        input: &[u8],
        reply: Responder,
    ) -> Outcome<()> {
        let asked: FjordEpoch = match parse(input) {
            Ok(asked) => asked,
            Err(error) => return reply.fail(error),
        };
        let epoch = Epoch::from_parts(asked.mount, asked.number);
        let is_durable = match asked.call {
            epoch_call::FBARRIER => return self.barrier(request, args, false, reply),
            epoch_call::FDATABARRIER => return self.barrier(request, args, true, reply),
            epoch_call::LOOK => self.fs.is_durable(epoch),
            epoch_call::WAIT => self.fs.wait_durable(epoch).map(|()| true),
            _ => return reply.fail(Errno(libc::EINVAL)),
        };
        match is_durable {
            Ok(is_durable) => reply_epoch(reply, epoch, is_durable.into()),
            Err(error) => return reply.fail(error.into()),
        }
        Ok(())
    }

    fn ioctl_output(
        &self,
        request: &Request<'_>,
        args: &IoctlIn,
        input: &[u8],
    ) -> Outcome<Vec<u8>> {
        let node = self.node(request)?;
        let inode = &node;
        match args.cmd {
            FS_IOC_GETFLAGS | FS_IOC32_GETFLAGS => Ok(inode.flags().to_ne_bytes().to_vec()),
            FS_IOC_SETFLAGS | FS_IOC32_SETFLAGS => {
                inode.set_flags(parse::<u32>(input)?)?;
                self.inode_changed(inode)?;
                Ok(Vec::new())
            }
            FS_IOC_GETVERSION
            | FS_IOC32_GETVERSION
            | EXT4_IOC_GETVERSION
            | EXT4_IOC32_GETVERSION => Ok(inode.attr().generation.to_ne_bytes().to_vec()),
            FS_IOC_FSGETXATTR => {
                let attr = inode.attr();
                let out = FsXattr {
                    fsx_xflags: to_xflags(attr.flags),
                    fsx_projid: attr.projid,
                    ..Default::default()
                };
                Ok(out.as_bytes().to_vec())
            }
            FS_IOC_FSSETXATTR => {
                let wanted: FsXattr = parse(input)?;
                let attr = inode.attr();
                let flags = merge_xflags(attr.flags, wanted.fsx_xflags);
                // A file that is made immutable takes the project before, one that no longer is
                // takes it after.
                let flags_first = flags & FS_IMMUTABLE_FL == 0;
                if flags_first && flags != attr.flags {
                    inode.set_flags(flags)?;
                }
                if wanted.fsx_projid != attr.projid {
                    inode.set_project(wanted.fsx_projid)?;
                }
                if !flags_first && flags != attr.flags {
                    inode.set_flags(flags)?;
                }
                self.inode_changed(inode)?;
                Ok(Vec::new())
            }
            FJORD_IOC_STATS => {
                let requests = self.requests.report();
                let stats = MountStats { requests, ..MountStats::of(&self.fs) };
                stats.to_bytes().ok_or(Errno(libc::EOVERFLOW))
            }
            FS_IOC_GETFSLABEL => {
                let mut label = self.fs.label();
                label.resize(FSLABEL_MAX, 0);
                Ok(label)
            }
            FITRIM | XFS_IOC_GOINGDOWN | FS_IOC_SETFSLABEL | EXT4_IOC_CHECKPOINT
            | FJORD_IOC_SNAPSHOT | FJORD_IOC_RESIZE => self.ioctl_on_fs(request, args, input),
            _ => Err(Errno(libc::ENOTTY)),
        }
    }

    /// `EXT4_IOC_CHECKPOINT` with these flags. Erasing what the log had (by discard or zeros) is not supported.
    fn checkpoint(&self, flags: u32) -> Outcome<()> {
        const DISCARD: u32 = 1;
        const ZEROOUT: u32 = 2;
        const DRY_RUN: u32 = 4;
        match flags {
            0 => Ok(self.fs.checkpoint()?),
            DRY_RUN => Ok(()),
            _ if flags & !(DISCARD | ZEROOUT | DRY_RUN) != 0 => Err(Errno(libc::EINVAL)),
            _ if flags & (DISCARD | ZEROOUT) == DISCARD | ZEROOUT => Err(Errno(libc::EINVAL)),
            _ => Err(Errno(libc::EOPNOTSUPP)),
        }
    }

    /// Ioctls that concern the file system and not the file they are made on.
    fn ioctl_on_fs(&self, request: &Request<'_>, args: &IoctlIn, input: &[u8]) -> Outcome<Vec<u8>> {
        if matches!(args.cmd, FJORD_IOC_SNAPSHOT | FJORD_IOC_RESIZE) {
            if !caller::is_owner(request.header) && !caller::is_admin(request.header) {
                return Err(Errno(libc::EPERM));
            }
            let call: Call = parse(input)?;
            call.check_version()?;
            if args.cmd == FJORD_IOC_RESIZE {
                resize::begin(&self.fs, &call)?;
            } else {
                self.snapshot_server.begin(&self.fs, &call)?;
            }
            return Ok(Vec::new());
        }
        if !caller::is_admin(request.header) {
            return Err(Errno(libc::EPERM));
        }
        if args.cmd == FS_IOC_SETFSLABEL {
            let end = input.iter().position(|byte| *byte == 0).unwrap_or(input.len());
            self.fs.set_label(&input[..end])?;
            return Ok(Vec::new());
        }
        if args.cmd == EXT4_IOC_CHECKPOINT {
            self.checkpoint(parse(input)?)?;
            return Ok(Vec::new());
        }
        if args.cmd == FITRIM {
            let mut range: FstrimRange = parse(input)?;
            let wanted = TrimRange { start: range.start, len: range.len, min_len: range.minlen };
            range.len = self.fs.trim(wanted)?;
            return Ok(range.as_bytes().to_vec());
        }
        // Declared as giving a number while it takes one, so the kernel did not send it along.
        let mode = match input {
            [] => caller::read_memory(request.header, args.arg, 4)
                .and_then(|bytes| bytes.first_chunk().map(|b| u32::from_ne_bytes(*b)))
                .ok_or(Errno(libc::EFAULT))?,
            bytes => parse(bytes)?,
        };
        let mode = match mode {
            0 => ShutdownMode::Default,
            1 => ShutdownMode::LogFlush,
            2 => ShutdownMode::NoLogFlush,
            _ => return Err(Errno(libc::EINVAL)),
        };
        self.fs.shutdown(mode)?;
        Ok(Vec::new())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn xflags_go_both_ways_and_leave_other_flags_alone() {
        let extents = 0x0008_0000;
        let flags = extents | 0x10 | 0x40;
        assert_eq!(to_xflags(flags), 0x8 | 0x80);
        assert_eq!(merge_xflags(flags, 0x10), extents | 0x20);
        assert_eq!(merge_xflags(flags, to_xflags(flags)), flags);
    }
}
