//! A file system for each thread, side by side on one device: what a file system reaches at best whose threads
//! share nothing but the device (SpanFS, which *parallel journaling* compares itself with).
//!
//! Owns the parts of the device and which file system a path lies in. Invariant: a directory directly below the
//! root is in all of them, and what is in it in one, by the thread's number in its name.

use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use fjord::{Device, Fs, MkfsOptions, MountOptions};
use fjord_block::{
    AlignedBuf, Capabilities, Class, FileDevice, FileOptions, IoError, IoErrorKind, IoOp,
    ReadTicket, Request, Ticket,
};

use super::library::{LibraryFs, io_error};
use super::{BenchFile, BenchFs};
use crate::error::{BenchError, Result};

type IoDone<T> = std::result::Result<T, IoError>;

/// As of all targets; a small image would get smaller ones.
const BLOCK_BYTES: u32 = 4096;

/// Parts begin at whole MiB, as partitions do.
const PART_UNIT_BYTES: u64 = 1 << 20;

/// Bytes of a larger device as a device. A flush of one part flushes all.
#[derive(Debug)]
struct Part {
    whole: Arc<dyn Device>,
    range: Range<u64>,
}

impl Part {
    fn len(&self) -> u64 {
        self.range.end - self.range.start
    }

    /// Where `len` bytes of the part lie on the whole.
    fn place(&self, op: IoOp, offset: u64, len: u64) -> IoDone<u64> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len() => Ok(self.range.start + offset),
            _ => Err(IoError::new(IoErrorKind::OutOfRange, op, offset, len)),
        }
    }

    fn moved(&self, mut request: Request) -> IoDone<Request> {
        let (op, at, len) = request.extent();
        match &mut request {
            Request::Write { offset, .. }
            | Request::Discard { offset, .. }
            | Request::WriteZeroes { offset, .. } => *offset = self.place(op, at, len)?,
            Request::Flush { .. } => {}
        }
        Ok(request)
    }
}

impl Device for Part {
    fn capabilities(&self) -> &Capabilities {
        self.whole.capabilities()
    }

    fn size_bytes(&self) -> u64 {
        self.len()
    }

    fn submit(&self, batch: Vec<Request>) -> Vec<Ticket> {
        let moved: IoDone<Vec<Request>> =
            batch.iter().cloned().map(|request| self.moved(request)).collect();
        match moved {
            Ok(moved) => self.whole.submit(moved),
            Err(error) => batch.iter().map(|_| Ticket::ready(Err(error.clone()))).collect(),
        }
    }

    fn flush_completed(&self) -> Ticket {
        self.whole.flush_completed()
    }

    fn submit_read(&self, offset: u64, bufs: Vec<AlignedBuf>, class: Class) -> ReadTicket {
        let len = bufs.iter().map(|buf| buf.len() as u64).sum();
        match self.place(IoOp::Read, offset, len) {
            Ok(offset) => self.whole.submit_read(offset, bufs, class),
            // Beyond the whole, too: it answers with the error.
            Err(_) => self.whole.submit_read(u64::MAX - len, bufs, class),
        }
    }

    fn keeps_order(&self) -> bool {
        self.whole.keeps_order()
    }
}

/// As many file systems as threads.
pub(crate) struct SeparateFs {
    parts: Vec<LibraryFs>,
}

impl SeparateFs {
    /// Makes `count` file systems of equal size on an image.
    pub(crate) fn make(image: &Path, count: usize, options: &MountOptions) -> Result<SeparateFs> {
        let failed = || BenchError::io(format!("make {count} file systems on {}", image.display()));
        let opened = FileDevice::open(image, &FileOptions::default());
        let whole: Arc<dyn Device> = Arc::new(opened.map_err(io::Error::other).map_err(failed())?);
        let len = (whole.size_bytes() / count as u64) & !(PART_UNIT_BYTES - 1);
        let mkfs = MkfsOptions { block_size: Some(BLOCK_BYTES), ..MkfsOptions::default() };
        let cache_size_bytes = options.cache_size_bytes / count as u64;
        let options = &MountOptions { cache_size_bytes, ..options.clone() };
        let make = |index: u64| -> Result<LibraryFs> {
            let range = index * len..(index + 1) * len;
            let device = Arc::new(Part { whole: whole.clone(), range });
            let made = Fs::create_on(device.clone(), &mkfs, options).map_err(io_error);
            made.and_then(|fs| fs.unmount().map_err(io_error)).map_err(failed())?;
            LibraryFs::on(device, options, false)
        };
        Ok(SeparateFs { parts: (0..count as u64).map(make).collect::<Result<_>>()? })
    }

    /// The file system of a path: of the thread whose number the name in the first directory begins with.
    fn part(&self, path: &str) -> io::Result<&LibraryFs> {
        let name = path.split('/').nth(1).unwrap_or_default();
        let digits = name.find(|c: char| !c.is_ascii_digit()).unwrap_or(name.len());
        let part = name[..digits].parse().ok().and_then(|thread: usize| self.parts.get(thread));
        part.ok_or_else(|| io::Error::other(format!("{path}: no thread's number in its name")))
    }

    /// Calls all file systems at the same time.
    fn all(&self, call: impl Fn(&LibraryFs) -> io::Result<()> + Sync) -> io::Result<()> {
        let call = &call;
        std::thread::scope(|scope| {
            let threads: Vec<_> =
                self.parts.iter().map(|part| scope.spawn(move || call(part))).collect();
            threads.into_iter().try_for_each(|thread| {
                thread.join().unwrap_or_else(|_| Err(io::Error::other("panic")))
            })
        })
    }
}

impl BenchFs for SeparateFs {
    fn create(&self, path: &str) -> io::Result<Box<dyn BenchFile>> {
        self.part(path)?.create(path)
    }
    fn open(&self, path: &str) -> io::Result<Box<dyn BenchFile>> {
        self.part(path)?.open(path)
    }
    fn make_dir(&self, path: &str) -> io::Result<()> {
        match path.contains('/') {
            true => self.part(path)?.make_dir(path),
            false => self.all(|part| part.make_dir(path)),
        }
    }
    fn remove_file(&self, path: &str) -> io::Result<()> {
        self.part(path)?.remove_file(path)
    }
    fn remove_tree(&self, path: &str) -> io::Result<()> {
        match path.contains('/') {
            true => self.part(path)?.remove_tree(path),
            false => self.all(|part| part.remove_tree(path)),
        }
    }
    fn sync(&self) -> io::Result<()> {
        self.all(BenchFs::sync)
    }
}
