//! Maps requests to engine calls and results to replies; only the protocol's requirements, no
//! policy.
//!
//! Invariants: each engine error leaves as the errno that ext4 gives; replies that name a node are
//! counted in `nodes` before they leave; attributes and names are handed out with long timeouts,
//! because every change comes through the kernel that caches them; no lock is held across an
//! engine call.

use fjord::{AtimeMode, Error, Fs, InodeRef};
use fjord_block::lock::{Mutex, Rank};
use rustix::mount::MountFlags;

use crate::{
    abi::*,
    mount::FuseOptions,
    reply::{Errno, Responder},
    request::{Op, Request},
    session::{Handler, Negotiated, Scratch, SessionConfig},
    snapshot::SnapshotServer,
};

mod attrs;
mod caller;
mod file;
mod handles;
mod ioctl;
mod names;
mod nodes;
mod readdir;
mod requests;
mod xattr;

use handles::Handles;
use nodes::Nodes;
use requests::RequestCounts;

/// What an operation gives: a value for the reply, or the errno.
type Outcome<T> = Result<T, Errno>;

impl From<Error> for Errno {
    fn from(e: Error) -> Errno {
        Errno(e.errno())
    }
}

/// Serves an [`Fs`] to the kernel.
pub struct EngineHandler {
    fs: Fs,
    nodes: Nodes,
    handles: Handles,
    requests: RequestCounts,
    atime: AtimeMode,
    acl: bool,
    /// The kernel uses labels of SELinux.
    selinux: bool,
    /// The kernel's writeback cache is on.
    writeback_cache: bool,
    /// Mounted with `sync` or `dirsync`: names are durable when the call returns. The kernel does
    /// that for writes only.
    sync_names: bool,
    /// Mounted with `sync`: attributes and reserved space too.
    sync_attrs: bool,
    snapshot_server: SnapshotServer,
    /// How closing the file system ended; set by the first [`Handler::destroy`].
    closed: Mutex<Option<Result<(), Error>>>,
}

impl EngineHandler {
    /// A handler for a file system that was opened with options that agree with `options`.
    ///
    /// # Errors
    /// The root directory cannot be read.
    pub fn new(fs: Fs, options: &FuseOptions) -> Result<EngineHandler, Error> {
        // Without it there is nothing to serve.
        fs.root()?;
        Ok(EngineHandler {
            nodes: Nodes::new(fs.clone()),
            fs,
            handles: Handles::default(),
            requests: RequestCounts::default(),
            atime: options.atime,
            acl: options.acl,
            selinux: xattr::has_selinux(),
            writeback_cache: options.writeback_cache,
            sync_names: options.flags.intersects(MountFlags::SYNCHRONOUS | MountFlags::DIRSYNC),
            sync_attrs: options.flags.contains(MountFlags::SYNCHRONOUS),
            snapshot_server: SnapshotServer::default(),
            closed: Mutex::new(Rank::FuseClosed, None),
        })
    }

    /// Features to request from the kernel.
    pub fn session_config(options: &FuseOptions) -> SessionConfig {
        let mut config = SessionConfig::default();
        config.flags |= InitFlags::ATOMIC_O_TRUNC
            | InitFlags::EXPORT_SUPPORT
            | InitFlags::DO_READDIRPLUS
            | InitFlags::READDIRPLUS_AUTO
            | InitFlags::HANDLE_KILLPRIV_V2
            | InitFlags::SETXATTR_EXT
            | InitFlags::CACHE_SYMLINKS
            | InitFlags::EXPLICIT_INVAL_DATA
            | InitFlags::NO_OPENDIR_SUPPORT
            | InitFlags::HAS_IOCTL_DIR
            | InitFlags::DIRECT_IO_ALLOW_MMAP;
        if options.acl {
            config.flags |= InitFlags::POSIX_ACL | InitFlags::DONT_MASK;
        }
        if options.atime == AtimeMode::Strict {
            config.flags -= InitFlags::NO_OPENDIR_SUPPORT | InitFlags::CACHE_SYMLINKS;
        }
        if options.writeback_cache {
            config.flags |= InitFlags::WRITEBACK_CACHE;
        }
        config.rings = options.rings;
        config.low_latency = options.low_latency;
        if let Some(threads_max) = options.threads_max {
            config.threads_max = threads_max;
        }
        config
    }

    /// How closing the file system ended; `None` before [`Handler::destroy`].
    pub fn close_result(&self) -> Option<Result<(), Error>> {
        self.closed.lock().clone()
    }

    /// The node that a request is about.
    fn node(&self, request: &Request<'_>) -> Outcome<InodeRef> {
        self.node_by_id(request.header.nodeid)
    }

    /// Makes a change of names in `dir` durable where the mount asks for that.
    fn names_changed(&self, dir: &InodeRef) -> Outcome<()> {
        if self.sync_names {
            dir.fsync(false)?;
        }
        Ok(())
    }

    /// Makes a change of attributes or space of `node` durable where the mount asks for that.
    fn inode_changed(&self, node: &InodeRef) -> Outcome<()> {
        if self.sync_attrs {
            node.fsync(false)?;
        }
        Ok(())
    }

    fn node_by_id(&self, nodeid: u64) -> Outcome<InodeRef> {
        self.nodes.get(nodeid)
    }

    fn dispatch(
        &self,
        request: &Request<'_>,
        reply: Responder,
        scratch: &mut Scratch,
    ) -> Outcome<()> {
        let header = request.header;
        match &request.op {
            Op::Forget { nlookup } => {
                self.nodes.forget(header.nodeid, *nlookup);
                reply.none();
            }
            Op::BatchForget { nodes } => {
                for one in *nodes {
                    self.nodes.forget(one.nodeid, one.nlookup);
                }
                reply.none();
            }
            Op::Read(args) => return self.read(request, args, reply, scratch),
            Op::Write { args, data } => {
                reply.answer(self.write(request, args, data));
            }
            Op::Open(args) => return self.open(request, args, reply),
            // What the kernel answers from its cache would not count as an access.
            Op::Opendir(_) if self.atime == AtimeMode::Strict => reply.value(&OpenOut::default()),
            // ENOSYS: the kernel opens directories by itself from now on, and caches them.
            Op::Opendir(_) => reply.error(libc::ENOSYS),
            Op::Fsync(args) => return self.fsync(request, args, reply),
            Op::Fsyncdir(args) => return self.fsyncdir(request, args, reply),
            // Nothing happens at close(2): ENOSYS keeps the kernel from asking again.
            Op::Flush(_) => reply.error(libc::ENOSYS),
            Op::Release(args) => {
                self.handles.remove(args.fh);
                reply.empty();
            }
            Op::Releasedir(_) => reply.empty(),
            Op::Fallocate(args) => reply.result(self.fallocate(request, args)),
            // What the kernel has not written back yet would look like a hole: ENOSYS makes it take
            // the whole file for data.
            Op::Lseek(_) if self.writeback_cache => reply.error(libc::ENOSYS),
            Op::Lseek(args) => reply.answer(self.lseek(request, args)),
            Op::Bmap(args) => reply.answer(self.bmap(request, args)),
            Op::Ioctl { args, input } => {
                return self.ioctl(request, args, input, reply);
            }
            Op::Syncfs => {
                // FORGET and RELEASE of removed files may be in flight.
                self.fs.settle_removed();
                reply.result(self.fs.sync());
            }
            _ => return self.dispatch_names(request, reply),
        }
        Ok(())
    }

    fn dispatch_names(&self, request: &Request<'_>, reply: Responder) -> Outcome<()> {
        match &request.op {
            Op::Lookup { name } => reply.answer(self.lookup(request, name)),
            Op::Getattr(_) => reply.answer(self.getattr(request)),
            Op::Setattr(args) => reply.answer(self.setattr(request, args)),
            Op::Statx(_) => reply.answer(self.statx(request)),
            Op::Statfs => reply.value(&self.statfs()),
            Op::Readlink => return self.readlink(request, reply),
            Op::Symlink { name, target } => reply.answer(self.symlink(request, name, target)),
            Op::Mknod { args, name } => reply.answer(self.mknod(request, args, name)),
            Op::Mkdir { args, name } => reply.answer(self.mkdir(request, args, name)),
            Op::Unlink { name } => reply.result(self.unlink(request, name)),
            Op::Rmdir { name } => reply.result(self.rmdir(request, name)),
            Op::Rename { newdir, flags, name, newname } => {
                reply.result(self.rename(request, *newdir, *flags, name, newname));
            }
            Op::Link { oldnodeid, newname } => {
                reply.answer(self.link(request, *oldnodeid, newname))
            }
            Op::Create { args, name } => {
                return self.create(request, args, name, reply);
            }
            Op::Tmpfile(args) => return self.tmpfile(request, args, reply),
            Op::Readdir(args) => return self.readdir(request, args, false, reply),
            Op::Readdirplus(args) => return self.readdir(request, args, true, reply),
            Op::Setxattr { flags, acl_kill_sgid, name, value } => {
                reply.result(self.setxattr(request, *flags, *acl_kill_sgid, name, value));
            }
            Op::Getxattr { size, name } => {
                return self.getxattr(request, *size, name, reply);
            }
            Op::Listxattr { size } => return self.listxattr(request, *size, reply),
            Op::Removexattr { name } => reply.result(self.removexattr(request, name)),
            _ => reply.error(libc::ENOSYS),
        }
        Ok(())
    }
}

impl Handler for EngineHandler {
    fn init(&self, negotiated: Negotiated) {
        tracing::debug!(?negotiated, "FUSE connection is up");
    }

    fn handle(&self, request: &Request<'_>, reply: Responder, scratch: &mut Scratch) {
        let opcode = request.header.opcode;
        self.requests.count(opcode);
        if let Err(Errno(errno)) = self.dispatch(request, reply, scratch) {
            tracing::trace!(opcode, errno, nodeid = request.header.nodeid, "failed");
        }
    }

    fn destroy(&self) {
        // Held throughout, so that a second caller returns only when the image is clean.
        let mut closed = self.closed.lock();
        if closed.is_some() {
            return;
        }
        self.snapshot_server.close();
        self.handles.clear();
        self.nodes.clear();
        let result = self.fs.unmount();
        if let Err(error) = &result {
            tracing::error!(%error, "closing the image failed");
        }
        *closed = Some(result);
    }
}
