//! The backend for image files and block devices. Owns [`FileDevice`].

mod open;
mod raw;

use std::path::Path;
use std::sync::Arc;

use crate::buf::AlignedBuf;
use crate::device::{Capabilities, Class, Device, Request, bufs_len, check_range};
use crate::error::{IoError, IoErrorKind, IoOp, OpenError};
use crate::stats::{DeviceStats, StatCounters};
use crate::sticky::Sticky;
use crate::ticket::{IoResult, ReadTicket, Ticket};
use raw::RawFile;

/// How requests reach the kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Engine {
    /// io_uring where the kernel allows it, else plain calls. The environment variable
    /// `FJORD_IO_ENGINE` (`uring` or `plain`) decides when it is set.
    #[default]
    Auto,
    /// io_uring, or fail to open.
    Uring,
    /// pwritev, preadv and fdatasync.
    Plain,
}

/// How to open a file or block device.
#[derive(Clone, Debug)]
pub struct FileOptions {
    /// Refuse writes, and share the image with other readers.
    pub read_only: bool,
    /// How requests reach the kernel.
    pub engine: Engine,
    /// Bypass the page cache where the file system allows it. The environment variable
    /// `FJORD_IO_DIRECT=0` overrides it.
    pub direct: bool,
}

impl Default for FileOptions {
    fn default() -> Self {
        FileOptions { read_only: false, engine: Engine::Auto, direct: true }
    }
}

/// A file or block device, open and locked.
#[derive(Debug)]
pub struct FileDevice {
    capabilities: Capabilities,
    file: RawFile,
    sticky: Arc<Sticky>,
    stats: StatCounters,
}

impl FileDevice {
    /// Opens and locks `path`, which must exist.
    pub fn open(path: &Path, options: &FileOptions) -> Result<FileDevice, OpenError> {
        let (file, capabilities) = open::open(path, options)?;
        Ok(FileDevice {
            capabilities,
            file,
            sticky: Arc::default(),
            stats: StatCounters::default(),
        })
    }

    /// Whether transfers bypass the page cache.
    pub fn is_direct(&self) -> bool {
        self.file.direct.is_some()
    }

    fn run(&self, request: &Request) -> IoResult {
        let (op, offset, len) = request.extent();
        check_range(op, offset, len, self.size_bytes())?;
        if self.capabilities.read_only && op != IoOp::Flush {
            return Err(IoError::new(IoErrorKind::ReadOnly, op, offset, len));
        }
        match request {
            Request::Write { bufs, fua, class, .. } => {
                self.stats.write(*class, len, *fua);
                self.file.write(offset, bufs, *fua, 0)
            }
            Request::Flush { class } => {
                self.stats.flush(*class);
                self.sticky.check()?;
                self.stats.flush_issued();
                self.file.flush().inspect_err(|error| self.sticky.set(error))
            }
            Request::Discard { .. } => {
                self.stats.discard(len);
                self.file.discard(offset, len)
            }
            Request::WriteZeroes { .. } => {
                self.stats.write_zeroes(len);
                self.file.write_zeroes(offset, len)
            }
        }
    }
}

impl Device for FileDevice {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn size_bytes(&self) -> u64 {
        self.file.size_bytes()
    }

    fn set_size(&self, size_bytes: u64) -> IoResult {
        self.file.set_size(size_bytes)
    }

    fn submit(&self, batch: Vec<Request>) -> Vec<Ticket> {
        let submit = |request| {
            let result = self.run(&request);
            let (ticket, completer) = Ticket::pending(Some(self.sticky.clone()));
            completer.complete(result);
            ticket
        };
        batch.into_iter().map(submit).collect()
    }

    fn submit_read(&self, offset: u64, mut bufs: Vec<AlignedBuf>, class: Class) -> ReadTicket {
        let len = bufs_len(&bufs);
        self.stats.read(class, len);
        let result = check_range(IoOp::Read, offset, len, self.size_bytes())
            .and_then(|()| self.file.read(offset, &mut bufs, 0));
        ReadTicket::ready(result.map(|()| bufs))
    }

    fn stats(&self) -> DeviceStats {
        self.stats.snapshot()
    }
}
