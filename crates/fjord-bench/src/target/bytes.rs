//! Targets without names: the raw device floor, and fjord's block layer on the same kind of file.
//!
//! A "file" here is a region of the preallocated file; writes wrap around at its end.

use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use fjord::ImageName;
use fjord_block::{AlignedBuf, Buf, Class, Device, DeviceExt, FileOptions, Request};
use fjord_rbd::RawImage;

use super::pool::RbdFile;
use super::{BenchFile, BenchFs};
use crate::error::{BenchError, Result};
use crate::workload::LARGE_FILE;

/// Regions that small files are spread over.
const REGION_COUNT: u64 = 16;

/// A file open with O_DIRECT (where the file system has it).
pub(crate) struct DirectFile {
    file: File,
    buf: AlignedBuf,
}

impl DirectFile {
    pub(crate) fn open(path: &Path) -> io::Result<DirectFile> {
        let open =
            |flags: i32| OpenOptions::new().read(true).write(true).custom_flags(flags).open(path);
        let direct = rustix::fs::OFlags::DIRECT.bits() as i32;
        Ok(DirectFile {
            file: open(direct).or_else(|_| open(0))?,
            buf: AlignedBuf::zeroed(1 << 20),
        })
    }

    /// Writes `size_bytes` zero bytes from the start and makes them durable.
    pub(crate) fn fill(&mut self, size_bytes: u64) -> io::Result<()> {
        self.buf.fill(0);
        for offset in (0..size_bytes).step_by(self.buf.len()) {
            let len = (size_bytes - offset).min(self.buf.len() as u64) as usize;
            self.file.write_all_at(&self.buf[..len], offset)?;
        }
        self.file.sync_all()
    }
}

impl BenchFile for DirectFile {
    fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.buf[..data.len()].copy_from_slice(data);
        self.file.write_all_at(&self.buf[..data.len()], offset)
    }

    fn read_at(&mut self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(&mut self.buf[..data.len()], offset)?;
        data.copy_from_slice(&self.buf[..data.len()]);
        Ok(())
    }

    fn sync(&mut self, _: bool) -> io::Result<()> {
        self.file.sync_data()
    }
}

/// The block layer as a file.
struct BlockFile(Arc<dyn Device>);

impl BenchFile for BlockFile {
    fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        Ok(self.0.submit_one(Request::write(offset, vec![Buf::from_slice(data)])).wait()?)
    }

    fn read_at(&mut self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        let bufs =
            self.0.submit_read(offset, vec![AlignedBuf::uninit(data.len())], Class::Sync).wait()?;
        bufs.iter().for_each(|buf| data.copy_from_slice(buf));
        Ok(())
    }

    fn sync(&mut self, _: bool) -> io::Result<()> {
        Ok(self.0.flush()?)
    }
}

/// A part of a file, with offsets from its start.
struct Region<F> {
    inner: F,
    start: u64,
    len: u64,
}

impl<F> Region<F> {
    fn place(&self, offset: u64, len: usize) -> u64 {
        let offset = offset % self.len;
        self.start + if offset + len as u64 > self.len { 0 } else { offset }
    }
}

impl<F: BenchFile> BenchFile for Region<F> {
    fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.inner.write_at(self.place(offset, data.len()), data)
    }
    fn read_at(&mut self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        self.inner.read_at(self.place(offset, data.len()), data)
    }
    fn sync(&mut self, data_only: bool) -> io::Result<()> {
        self.inner.sync(data_only)
    }
}

/// Hands out regions of a preallocated file; `open` makes a handle on it.
pub(super) struct Regions<O> {
    size_bytes: u64,
    next: AtomicU64,
    open: O,
}

/// The floor.
pub(super) struct RawFs;

impl RawFs {
    pub(super) fn open(path: &Path) -> Result<impl BenchFs + use<>> {
        let path = path.to_owned();
        // The end, and not the length of the metadata, which block devices do not have.
        let end = File::open(&path).and_then(|mut file| file.seek(SeekFrom::End(0)));
        let size_bytes = end.map_err(BenchError::io(format!("open {}", path.display())))?;
        Ok(Regions { size_bytes, next: AtomicU64::new(0), open: move || DirectFile::open(&path) })
    }

    /// librbd's own calls on an image of a cluster.
    pub(super) fn on_cluster(url: &Path) -> Result<impl BenchFs + use<>> {
        let failed = || BenchError::io(format!("open {}", url.display()));
        let image = RawImage::open(&url.to_string_lossy()).map_err(io::Error::other);
        let image = Arc::new(image.map_err(failed())?);
        let size_bytes = image.size_bytes().map_err(failed())?;
        let open = move || Ok(RbdFile(image.clone()));
        Ok(Regions { size_bytes, next: AtomicU64::new(0), open })
    }
}

/// The block layer.
pub(super) struct BlockFs;

impl BlockFs {
    pub(super) fn open(path: &Path) -> Result<impl BenchFs + use<>> {
        let opened = ImageName::parse(path).open(&FileOptions::default(), false);
        let device = opened.map_err(|error| BenchError::Io {
            what: format!("open {}", path.display()),
            source: io::Error::from_raw_os_error(error.errno()),
        })?;
        let size_bytes = device.size_bytes();
        Ok(Regions {
            size_bytes,
            next: AtomicU64::new(0),
            open: move || Ok(BlockFile(device.clone())),
        })
    }
}

impl<F: BenchFile + 'static, O: Fn() -> io::Result<F> + Send + Sync> BenchFs for Regions<O> {
    fn create(&self, path: &str) -> io::Result<Box<dyn BenchFile>> {
        let inner = (self.open)()?;
        if path == LARGE_FILE {
            return Ok(Box::new(Region { inner, start: 0, len: self.size_bytes }));
        }
        let len = self.size_bytes / REGION_COUNT / 4096 * 4096;
        let start = self.next.fetch_add(1, Ordering::Relaxed) % REGION_COUNT * len;
        Ok(Box::new(Region { inner, start, len }))
    }

    fn open(&self, path: &str) -> io::Result<Box<dyn BenchFile>> {
        self.create(path)
    }

    fn make_dir(&self, _: &str) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn remove_file(&self, _: &str) -> io::Result<()> {
        Ok(())
    }

    fn remove_tree(&self, _: &str) -> io::Result<()> {
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        (self.open)()?.sync(false)
    }
}
