//! Requests on the mount, carried out by the model.
//!
//! Owns the open `stats` and `trace` files and the power cut, once there was one. Invariant: an fsync of `disk`
//! is a flush of the device that starts after every write that was answered before.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use fjord_block::lock::{Mutex, Rank};
use fjord_block::sim::{CutScope, CutState, SeededChooser, SimDevice, SimTrace};
use fjord_block::{Device, DeviceExt, MemImage};

use super::{SimReport, nodes::Node};
use crate::abi::*;
use crate::device_file::{self, LONG_SECS, Outcome};
use crate::reply::{DirentBuf, Errno, Responder};
use crate::request::{Op, Request};
use crate::session::{Handler, Negotiated, Scratch};

/// Serves a modelled device to the kernel.
pub(super) struct SimHandler {
    device: Arc<SimDevice>,
    /// Open `stats` and `trace` files, by handle: the text as it was at open.
    texts: Mutex<HashMap<u64, Vec<u8>>>,
    next_handle: AtomicU64,
    /// None while the power is on.
    cut: Mutex<Option<Cut>>,
}

/// The power cut: the device's state, and the image chosen last.
struct Cut {
    state: CutState,
    image: MemImage,
}

impl SimHandler {
    pub(super) fn new(device: Arc<SimDevice>) -> SimHandler {
        SimHandler {
            device,
            texts: Mutex::new(Rank::SimTexts, HashMap::new()),
            next_handle: AtomicU64::new(1),
            cut: Mutex::new(Rank::SimCut, None),
        }
    }

    fn size(&self, node: Node) -> u64 {
        match node {
            Node::Disk => self.device.size_bytes(),
            Node::Image if self.cut.lock().is_some() => self.device.size_bytes(),
            _ => 0,
        }
    }

    fn node(&self, request: &Request<'_>) -> Outcome<Node> {
        Node::from_id(request.header.nodeid).ok_or(Errno(libc::ESTALE))
    }

    fn valid_secs(node: Node) -> u64 {
        // The image exists only after the power cut.
        if node == Node::Image { 0 } else { LONG_SECS }
    }

    fn lookup(&self, request: &Request<'_>, name: &[u8]) -> Outcome<EntryOut> {
        let node = match (self.node(request)?, name) {
            (Node::Root, b"." | b"..") => Node::Root,
            (Node::Root, name) => Node::from_name(name).ok_or(Errno(libc::ENOENT))?,
            _ => return Err(Errno(libc::ENOTDIR)),
        };
        Ok(EntryOut {
            nodeid: node as u64,
            entry_valid: LONG_SECS,
            attr_valid: Self::valid_secs(node),
            attr: node.attr(self.size(node)),
            ..Default::default()
        })
    }

    fn attributes(&self, node: Node) -> AttrOut {
        let attr = node.attr(self.size(node));
        AttrOut { attr_valid: Self::valid_secs(node), attr, ..Default::default() }
    }

    /// A device has the size and the owner that it has; setting the same again is allowed, and
    /// times are not kept.
    fn setattr(&self, request: &Request<'_>, args: &SetattrIn) -> Outcome<AttrOut> {
        let node = self.node(request)?;
        let valid = Fattr::from_bits_truncate(args.valid);
        let fixed = Fattr::MODE | Fattr::UID | Fattr::GID;
        // `echo cut 1 > control` truncates first.
        let resizes =
            valid.contains(Fattr::SIZE) && node != Node::Control && args.size != self.size(node);
        if valid.intersects(fixed) || resizes {
            return Err(Errno(libc::EPERM));
        }
        Ok(self.attributes(node))
    }

    /// Keeps the text of an open file; gives its handle.
    fn keep(&self, text: Vec<u8>) -> u64 {
        let fh = self.next_handle.fetch_add(1, Ordering::Relaxed);
        self.texts.lock().insert(fh, text);
        fh
    }

    fn open(&self, request: &Request<'_>) -> Outcome<OpenOut> {
        let node = self.node(request)?;
        let mut fh = 0;
        match node {
            Node::Stats => {
                let report = SimReport::new(&self.device);
                let mut text = serde_json::to_vec_pretty(&report).map_err(|_| Errno(libc::EIO))?;
                text.push(b'\n');
                fh = self.keep(text);
            }
            Node::Trace => {
                let trace = self.device.next_trace().ok_or(Errno(libc::ENODATA))?;
                fh = self.keep(lines(&trace).into_bytes());
            }
            Node::Image if self.cut.lock().is_none() => return Err(Errno(libc::ENODATA)),
            _ => {}
        }
        Ok(OpenOut { fh, open_flags: device_file::open_flags(), backing_id: 0 })
    }

    fn read(&self, request: &Request<'_>, args: &ReadIn, reply: Responder) -> Outcome<()> {
        let node = match self.node(request) {
            Ok(node) => node,
            Err(e) => return reply.fail(e),
        };
        let size = self.size(node);
        let len = u64::from(args.size).min(size.saturating_sub(args.offset));
        match node {
            Node::Disk => return device_file::read(&*self.device, args, reply),
            Node::Stats | Node::Trace => {
                let texts = self.texts.lock();
                let text = texts.get(&args.fh).map_or(&[][..], Vec::as_slice);
                let start = (args.offset as usize).min(text.len());
                let end = start.saturating_add(args.size as usize).min(text.len());
                reply.bytes(&text[start..end]);
            }
            Node::Image => {
                let mut bytes = vec![0; len as usize];
                let image = self.cut.lock().as_ref().map(|cut| cut.image.clone());
                let Some(image) = image else { return reply.fail(Errno(libc::ENODATA)) };
                match image.read_at(args.offset, &mut bytes) {
                    Ok(()) => reply.bytes(&bytes),
                    Err(e) => return reply.fail(e.into()),
                }
            }
            Node::Root => return reply.fail(Errno(libc::EISDIR)),
            Node::Control => return reply.fail(Errno(libc::EACCES)),
        }
        Ok(())
    }

    fn write(&self, request: &Request<'_>, args: &WriteIn, data: &[u8]) -> Outcome<WriteOut> {
        match self.node(request)? {
            Node::Disk => device_file::write(&*self.device, args, data)?,
            Node::Control => self.control(data)?,
            _ => return Err(Errno(libc::EACCES)),
        }
        Ok(WriteOut { size: args.size, padding: 0 })
    }

    /// `cut SEED`: cuts the power, if it is on, and chooses an image by the seed. `trace`: starts
    /// recording events.
    fn control(&self, data: &[u8]) -> Outcome<()> {
        let text = std::str::from_utf8(data).map_err(|_| Errno(libc::EINVAL))?;
        if text.trim() == "trace" {
            self.device.start_trace();
            return Ok(());
        }
        let seed = text.trim().strip_prefix("cut ").and_then(|seed| seed.trim().parse().ok());
        let seed = seed.ok_or(Errno(libc::EINVAL))?;
        let mut cut = self.cut.lock();
        let state = match cut.take() {
            Some(cut) => cut.state,
            None => self.device.cut(CutScope::Contract),
        };
        let image = state.image(&mut SeededChooser::new(seed));
        *cut = Some(Cut { state, image });
        Ok(())
    }

    fn fsync(&self, request: &Request<'_>) -> Outcome<()> {
        match self.node(request)? {
            Node::Disk => Ok(self.device.flush()?),
            _ => Ok(()),
        }
    }

    fn fallocate(&self, request: &Request<'_>, args: &FallocateIn) -> Outcome<()> {
        if self.node(request)? != Node::Disk {
            return Err(Errno(libc::EOPNOTSUPP));
        }
        device_file::fallocate(&*self.device, args)
    }

    fn readdir(&self, args: &ReadIn, reply: Responder) {
        let mut buf = DirentBuf::new(args.size as usize);
        let dots = [(Node::Root, "."), (Node::Root, "..")];
        let all = dots.into_iter().chain(Node::FILES);
        for (index, (node, name)) in all.enumerate().skip(args.offset as usize) {
            let kind = u32::from(if node == Node::Root { libc::DT_DIR } else { libc::DT_REG });
            if !buf.push(node as u64, index as u64 + 1, kind, name.as_bytes(), None) {
                break;
            }
        }
        reply.bytes(buf.as_bytes());
    }

    fn dispatch(&self, request: &Request<'_>, reply: Responder) -> Outcome<()> {
        match &request.op {
            // Nodes are never freed, so nothing is counted.
            Op::Forget { .. } | Op::BatchForget { .. } => reply.none(),
            Op::Lookup { name } => reply.answer(self.lookup(request, name)),
            Op::Getattr(_) => reply.answer(self.node(request).map(|node| self.attributes(node))),
            Op::Setattr(args) => reply.answer(self.setattr(request, args)),
            Op::Open(_) => reply.answer(self.open(request)),
            Op::Opendir(_) => reply.value(&OpenOut::default()),
            Op::Read(args) => return self.read(request, args, reply),
            Op::Write { args, data } => reply.answer(self.write(request, args, data)),
            Op::Fsync(_) => reply.result(self.fsync(request)),
            Op::Fsyncdir(_) | Op::Syncfs | Op::Releasedir(_) => reply.empty(),
            Op::Release(args) => {
                self.texts.lock().remove(&args.fh);
                reply.empty();
            }
            Op::Fallocate(args) => reply.result(self.fallocate(request, args)),
            Op::Readdir(args) => self.readdir(args, reply),
            Op::Statfs => reply.value(&device_file::statfs(&*self.device)),
            Op::Ioctl { .. } => reply.error(libc::ENOTTY),
            Op::Create { .. }
            | Op::Mknod { .. }
            | Op::Mkdir { .. }
            | Op::Symlink { .. }
            | Op::Link { .. }
            | Op::Unlink { .. }
            | Op::Rmdir { .. }
            | Op::Rename { .. } => reply.error(libc::EPERM),
            _ => reply.error(libc::ENOSYS),
        }
        Ok(())
    }
}

/// The events of a trace by time.
fn lines(trace: &SimTrace) -> String {
    let transfers = trace.transfers.iter().map(|event| {
        (event.at_ns, format!("transfer {} {} {}\n", event.at_ns, event.id.0, event.epoch))
    });
    let persists = trace.persists.iter().map(|event| {
        let (id, epoch, offset) = (event.id.0, event.epoch, event.offset);
        (event.at_ns, format!("persist {} {id} {epoch} {offset}\n", event.at_ns))
    });
    let depths = trace.queue_depths.iter();
    let depths = depths.map(|(at_ns, depth)| (*at_ns, format!("queue {at_ns} {depth}\n")));
    let mut events: Vec<(u64, String)> = transfers.chain(persists).chain(depths).collect();
    // Stable: what happened at the same moment keeps its order.
    events.sort_by_key(|(at_ns, _)| *at_ns);
    events.into_iter().map(|(_, line)| line).collect()
}

impl Handler for SimHandler {
    fn init(&self, negotiated: Negotiated) {
        tracing::debug!(?negotiated, "FUSE connection is up");
    }

    fn handle(&self, request: &Request<'_>, reply: Responder, _: &mut Scratch) {
        if let Err(Errno(errno)) = self.dispatch(request, reply) {
            tracing::trace!(opcode = request.header.opcode, errno, "failed");
        }
    }

    fn destroy(&self) {}
}
