//! A device as a file, for programs that read and write files: one file in a directory of its own.
//!
//! Owns what a file's requests are for a device; [`crate::sim`] has them too. Invariants: nothing is cached above the
//! device; an fsync is a flush that starts after every write that was answered before.

use std::path::Path;
use std::sync::Arc;

use fjord_block::{
    AlignedBuf, Buf, Class, Device, DeviceExt, IoError, Order, Request as DeviceRequest,
};

use crate::abi::*;
use crate::mount::{self, FuseOptions, MountHandle, Mounted};
use crate::reply::{DirentBuf, Errno, Responder};
use crate::request::{Op, Request};
use crate::server::ServeError;
use crate::session::{Handler, Negotiated, Scratch, Session, SessionConfig};

/// The mount's subtype, in `fuse.SUBTYPE`.
const SUBTYPE: &str = "fjord-device";
/// How long the kernel may keep what never changes.
pub(crate) const LONG_SECS: u64 = 365 * 24 * 3600;
/// The node of the file.
const FILE_NODE: u64 = 2;

pub(crate) type Outcome<T> = Result<T, Errno>;

impl From<IoError> for Errno {
    fn from(error: IoError) -> Errno {
        Errno(error.errno())
    }
}

/// Answers a read.
pub(crate) fn read(device: &dyn Device, args: &ReadIn, reply: Responder) -> Outcome<()> {
    let len = u64::from(args.size).min(device.size_bytes().saturating_sub(args.offset));
    let bufs = vec![AlignedBuf::uninit(len as usize)];
    match device.submit_read(args.offset, bufs, Class::Sync).wait() {
        Ok(bufs) => reply.gather(&bufs.iter().map(|buf| &buf[..]).collect::<Vec<_>>()),
        Err(error) => return reply.fail(error.into()),
    }
    Ok(())
}

/// Writes, and returns when the device has it.
pub(crate) fn write(device: &dyn Device, args: &WriteIn, data: &[u8]) -> Outcome<()> {
    let end = args.offset.checked_add(data.len() as u64);
    if end.is_none_or(|end| end > device.size_bytes()) {
        return Err(Errno(libc::ENOSPC));
    }
    let write = DeviceRequest::Write {
        offset: args.offset,
        bufs: vec![Buf::from_slice(data)],
        order: Order::Orderless,
        fua: args.flags & libc::O_DSYNC as u32 != 0,
        class: Class::Sync,
    };
    Ok(device.submit_one(write).wait()?)
}

/// Zeroes a range, or makes sure that it has room, which it always has.
pub(crate) fn fallocate(device: &dyn Device, args: &FallocateIn) -> Outcome<()> {
    let end = args.offset.checked_add(args.length).ok_or(Errno(libc::EFBIG))?;
    if end > device.size_bytes() {
        return Err(Errno(libc::ENOSPC));
    }
    let keep = libc::FALLOC_FL_KEEP_SIZE;
    let zeroes = [libc::FALLOC_FL_PUNCH_HOLE | keep, libc::FALLOC_FL_ZERO_RANGE | keep];
    let mode = args.mode as i32;
    if zeroes.contains(&mode) || mode == libc::FALLOC_FL_ZERO_RANGE {
        let (offset, len) = (args.offset, args.length);
        return Ok(device.submit_one(DeviceRequest::WriteZeroes { offset, len }).wait()?);
    }
    if mode & !keep == 0 { Ok(()) } else { Err(Errno(libc::EOPNOTSUPP)) }
}

/// Past the kernel's cache, by many at once.
pub(crate) fn open_flags() -> u32 {
    let flags = OpenReplyFlags::DIRECT_IO
        | OpenReplyFlags::NOFLUSH
        | OpenReplyFlags::PARALLEL_DIRECT_WRITES;
    flags.bits()
}

/// The room that statfs tells of a device.
pub(crate) fn statfs(device: &dyn Device) -> StatfsOut {
    StatfsOut {
        blocks: device.size_bytes() / 4096,
        bsize: 4096,
        frsize: 4096,
        namelen: 255,
        ..Default::default()
    }
}

/// The attributes of a node that belongs to who serves it; `size` in bytes.
pub(crate) fn attr(id: u64, mode: u32, size: u64) -> FuseAttr {
    FuseAttr {
        ino: id,
        size,
        blocks: size / 512,
        mode,
        nlink: if mode & libc::S_IFMT == libc::S_IFDIR { 2 } else { 1 },
        uid: rustix::process::geteuid().as_raw(),
        gid: rustix::process::getegid().as_raw(),
        blksize: 4096,
        ..Default::default()
    }
}

struct DeviceHandler {
    device: Arc<dyn Device>,
    name: Vec<u8>,
}

impl DeviceHandler {
    fn attr(&self, id: u64) -> Outcome<FuseAttr> {
        match id {
            FUSE_ROOT_ID => Ok(attr(id, libc::S_IFDIR | 0o700, 0)),
            FILE_NODE => Ok(attr(id, libc::S_IFREG | 0o600, self.device.size_bytes())),
            _ => Err(Errno(libc::ESTALE)),
        }
    }

    fn lookup(&self, request: &Request<'_>, name: &[u8]) -> Outcome<EntryOut> {
        let id = match name {
            b"." | b".." => FUSE_ROOT_ID,
            name if request.header.nodeid == FUSE_ROOT_ID && name == self.name => FILE_NODE,
            _ => return Err(Errno(libc::ENOENT)),
        };
        let attr = self.attr(id)?;
        let (entry_valid, attr_valid) = (LONG_SECS, LONG_SECS);
        Ok(EntryOut { nodeid: id, entry_valid, attr_valid, attr, ..Default::default() })
    }

    fn attributes(&self, request: &Request<'_>) -> Outcome<AttrOut> {
        let attr = self.attr(request.header.nodeid)?;
        Ok(AttrOut { attr_valid: LONG_SECS, attr, ..Default::default() })
    }

    fn fsync(&self, request: &Request<'_>) -> Outcome<()> {
        match request.header.nodeid {
            FILE_NODE => Ok(self.device.flush()?),
            _ => Ok(()),
        }
    }

    fn readdir(&self, args: &ReadIn, reply: Responder) {
        let mut buf = DirentBuf::new(args.size as usize);
        let root = FUSE_ROOT_ID;
        let all = [(root, &b"."[..]), (root, b".."), (FILE_NODE, &self.name)];
        for (index, (id, name)) in all.into_iter().enumerate().skip(args.offset as usize) {
            let kind = u32::from(if id == root { libc::DT_DIR } else { libc::DT_REG });
            if !buf.push(id, index as u64 + 1, kind, name, None) {
                break;
            }
        }
        reply.bytes(buf.as_bytes());
    }
}

impl Handler for DeviceHandler {
    fn init(&self, negotiated: Negotiated) {
        tracing::debug!(?negotiated, "FUSE connection is up");
    }

    fn handle(&self, request: &Request<'_>, reply: Responder, _: &mut Scratch) {
        let device = &*self.device;
        match &request.op {
            Op::Forget { .. } | Op::BatchForget { .. } => reply.none(),
            Op::Lookup { name } => reply.answer(self.lookup(request, name)),
            Op::Getattr(_) => reply.answer(self.attributes(request)),
            Op::Open(_) => {
                reply.value(&OpenOut { fh: 0, open_flags: open_flags(), backing_id: 0 });
            }
            Op::Opendir(_) => reply.value(&OpenOut::default()),
            Op::Read(args) => {
                // The caller has the error; a device logs what it has to say itself.
                let _ = read(device, args, reply);
            }
            Op::Write { args, data } => {
                let written = write(device, args, data);
                reply.answer(written.map(|()| WriteOut { size: args.size, padding: 0 }));
            }
            Op::Fsync(_) => reply.result(self.fsync(request)),
            Op::Fsyncdir(_) | Op::Syncfs | Op::Releasedir(_) | Op::Release(_) => reply.empty(),
            Op::Fallocate(args) => reply.result(fallocate(device, args)),
            Op::Readdir(args) => self.readdir(args, reply),
            Op::Statfs => reply.value(&statfs(device)),
            Op::Ioctl { .. } => reply.error(libc::ENOTTY),
            _ => reply.error(libc::ENOSYS),
        }
    }

    fn destroy(&self) {}
}

/// A device that is mounted as a file, ready to be served.
pub struct DeviceServer {
    mounted: Mounted,
    session: Session<DeviceHandler>,
}

impl DeviceServer {
    /// Mounts `device` as the file `name` in `dir`; the mount table shows `source`. When this returns the mount
    /// stands; requests wait until [`DeviceServer::run`].
    ///
    /// # Errors
    /// See [`ServeError`]; nothing stays mounted.
    pub fn mount(
        device: Arc<dyn Device>,
        source: &str,
        dir: &Path,
        name: &str,
    ) -> Result<DeviceServer, ServeError> {
        let mounted = mount::mount_plain(SUBTYPE, source, dir, &FuseOptions::default())?;
        let handler = DeviceHandler { device, name: name.into() };
        let session = Session::new(mounted.transport(), handler, SessionConfig::default());
        if let Err(error) = session.init() {
            if let Err(error) = mounted.handle().cut() {
                tracing::error!(%error, "a failed mount could not be unmounted");
            }
            return Err(error.into());
        }
        Ok(DeviceServer { mounted, session })
    }

    /// A handle to unmount it, from any thread.
    pub fn handle(&self) -> MountHandle {
        self.mounted.handle()
    }

    /// Serves until the mount is taken down.
    ///
    /// # Errors
    /// No worker could be started.
    pub fn run(self) -> Result<(), ServeError> {
        Ok(self.session.run()?)
    }
}
