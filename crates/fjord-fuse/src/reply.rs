//! Replies: each request that needs a reply gets exactly one.

use std::io::IoSlice;
use std::sync::Arc;

use zerocopy::{Immutable, IntoBytes};

use crate::{abi::*, transport::ReplyPath};

/// A reply of up to so many bytes is put together first: for each place that a reply is gathered from the kernel pins a
/// page.
const TOGETHER_BYTES_MAX: usize = 512;
/// Most slices that one reply may be gathered from: header and payload.
const REPLY_PARTS_MAX: usize = 1 + 257;

/// Answers one request, from any thread. Dropped without an answer it sends EIO, so that no caller
/// hangs.
pub struct Responder {
    path: Arc<dyn ReplyPath>,
    unique: u64,
    answered: bool,
}

impl Responder {
    /// A responder for the request with this number, which came by `path`.
    pub fn new(path: Arc<dyn ReplyPath>, unique: u64) -> Responder {
        Responder { path, unique, answered: false }
    }

    /// Success without a payload.
    pub fn empty(self) {
        self.gather(&[]);
    }

    /// Success with one structure.
    pub fn value<T: IntoBytes + Immutable>(self, value: &T) {
        self.gather(&[value.as_bytes()]);
    }

    /// Success with plain bytes.
    pub fn bytes(self, bytes: &[u8]) {
        self.gather(&[bytes]);
    }

    /// Success with a payload gathered from several places; a large one is sent without copying.
    pub fn gather(self, payload: &[&[u8]]) {
        if payload.len() >= REPLY_PARTS_MAX {
            return self.bytes(&payload.concat());
        }
        let len = payload.iter().map(|p| p.len()).sum::<usize>();
        self.send(0, len, payload);
    }

    /// Failure; `errno` is positive.
    pub fn error(self, errno: i32) {
        self.send(-errno, 0, &[]);
    }

    /// Success or failure without a payload.
    pub fn result<E: Into<Errno>>(self, result: Result<(), E>) {
        match result {
            Ok(()) => self.empty(),
            Err(e) => self.error(e.into().0),
        }
    }

    /// The value of a success, or the failure.
    pub fn answer<T: IntoBytes + Immutable>(self, outcome: Result<T, Errno>) {
        match outcome {
            Ok(value) => self.value(&value),
            Err(Errno(errno)) => self.error(errno),
        }
    }

    /// Answers a failure and passes it on.
    ///
    /// # Errors
    /// Always `errno`.
    pub fn fail(self, errno: Errno) -> Result<(), Errno> {
        self.error(errno.0);
        Err(errno)
    }

    /// Drops pages of a node from the kernel's cache. Waits for requests on these pages, and no signal ends
    /// that wait: for pages that no request can hold.
    pub fn invalidate(&self, nodeid: u64, offset: i64, len: i64) {
        let notice = NotifyInvalInodeOut { ino: nodeid, off: offset, len };
        let header = OutHeader {
            len: (size_of::<OutHeader>() + size_of::<NotifyInvalInodeOut>()) as u32,
            error: FUSE_NOTIFY_INVAL_INODE,
            unique: 0,
        };
        let parts = [IoSlice::new(header.as_bytes()), IoSlice::new(notice.as_bytes())];
        if let Err(e) = self.path.notify(&parts) {
            tracing::debug!(error = %e, nodeid, "the kernel refused a notification");
        }
    }

    /// Makes the kernel ask for a node's attributes again. Waits for nothing.
    pub fn invalidate_attr(&self, nodeid: u64) {
        // A negative offset stands for no page.
        self.invalidate(nodeid, -1, 0);
    }

    /// For requests that have no reply.
    pub fn none(mut self) {
        self.answered = true;
        self.path.forgo();
    }

    /// Success with the bytes that `fill` writes into a room of `len_max`, or its failure. `spare` is that room
    /// where the path has none of its own.
    pub fn fill(
        mut self,
        len_max: usize,
        spare: &mut Vec<u8>,
        mut fill: impl FnMut(&mut [u8]) -> Result<usize, Errno>,
    ) {
        let mut write = |room: &mut [u8]| fill(room).map_err(|Errno(errno)| errno);
        if self.path.fill(self.unique, len_max, &mut write) {
            self.answered = true;
            return;
        }
        if spare.len() < len_max {
            spare.resize(len_max, 0);
        }
        match write(&mut spare[..len_max]) {
            Ok(len) => self.bytes(&spare[..len.min(len_max)]),
            Err(errno) => self.error(errno),
        }
    }

    fn send(mut self, error: i32, payload_len: usize, payload: &[&[u8]]) {
        self.answered = true;
        self.transmit(error, payload_len, payload);
    }

    fn transmit(&self, error: i32, payload_len: usize, payload: &[&[u8]]) {
        let len = (size_of::<OutHeader>() + payload_len) as u32;
        let header = OutHeader { len, error, unique: self.unique };
        if len as usize <= TOGETHER_BYTES_MAX {
            let mut together = [0; TOGETHER_BYTES_MAX];
            let mut end = 0;
            for part in [header.as_bytes()].iter().chain(payload) {
                together[end..end + part.len()].copy_from_slice(part);
                end += part.len();
            }
            return self.pass(&[IoSlice::new(&together[..end])]);
        }
        let mut parts = Vec::with_capacity(1 + payload.len());
        parts.push(IoSlice::new(header.as_bytes()));
        parts.extend(payload.iter().filter(|p| !p.is_empty()).map(|p| IoSlice::new(p)));
        self.pass(&parts);
    }

    fn pass(&self, parts: &[IoSlice<'_>]) {
        if let Err(e) = self.path.send(parts) {
            tracing::error!(unique = self.unique, error = %e, "the kernel refused a FUSE reply");
        }
    }
}

impl Drop for Responder {
    fn drop(&mut self) {
        if !self.answered {
            self.transmit(-libc::EIO, 0, &[]);
        }
    }
}

/// A positive errno on its way to the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Errno(pub i32);

/// Packs directory entries into the space that the kernel offers.
#[derive(Debug)]
pub struct DirentBuf {
    bytes: Vec<u8>,
    len_max: usize,
}

impl DirentBuf {
    /// For a reply of at most `len_max` bytes.
    pub fn new(len_max: usize) -> DirentBuf {
        DirentBuf { bytes: Vec::with_capacity(len_max.min(1 << 16)), len_max }
    }

    /// Bytes that an entry with a name of this length takes; `plus` for READDIRPLUS.
    pub fn entry_len(name_len: usize, plus: bool) -> usize {
        let fixed = size_of::<Dirent>() + if plus { size_of::<EntryOut>() } else { 0 };
        (fixed + name_len).next_multiple_of(8)
    }

    /// Adds an entry, `cookie` being where reading goes on after it. False when it does not fit.
    pub fn push(
        &mut self,
        ino: u64,
        cookie: u64,
        kind: u32,
        name: &[u8],
        entry: Option<&EntryOut>,
    ) -> bool {
        if self.bytes.len() + Self::entry_len(name.len(), entry.is_some()) > self.len_max {
            return false;
        }
        if let Some(entry) = entry {
            self.bytes.extend_from_slice(entry.as_bytes());
        }
        let dirent = Dirent { ino, off: cookie, namelen: name.len() as u32, type_: kind };
        self.bytes.extend_from_slice(dirent.as_bytes());
        self.bytes.extend_from_slice(name);
        self.bytes.resize(self.bytes.len().next_multiple_of(8), 0);
        true
    }

    /// The packed entries.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }
}
