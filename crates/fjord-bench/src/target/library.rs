//! fjord as a library as a target.

use std::io;
use std::path::Path;
use std::sync::Arc;

use fjord::{Device, File, Fs, MountOptions, OpenOptions};

use super::{BenchFile, BenchFs};
use crate::error::{BenchError, Result};
use crate::served::Served;

/// An image open in this process; unmounted when dropped.
pub(crate) struct LibraryFs {
    fs: Fs,
    /// Sync calls give order only.
    order: bool,
}

/// A file of it.
struct LibraryFile {
    file: File,
    order: bool,
}

impl LibraryFs {
    /// An image file; with `order`, sync calls give order only.
    pub(crate) fn open(image: &Path, options: &MountOptions, order: bool) -> Result<LibraryFs> {
        let opened = Fs::open(image, options).map_err(io_error);
        let fs = opened.map_err(BenchError::io(format!("open {}", image.display())))?;
        Ok(LibraryFs { fs, order })
    }

    /// The same on a device in this process.
    pub(crate) fn on(
        device: Arc<dyn Device>,
        options: &MountOptions,
        order: bool,
    ) -> Result<LibraryFs> {
        let opened = Fs::open_device(device, options).map_err(io_error);
        let fs = opened.map_err(BenchError::io("open the modelled device"))?;
        Ok(LibraryFs { fs, order })
    }

    fn file(&self, opened: fjord::Result<File>) -> io::Result<Box<dyn BenchFile>> {
        Ok(Box::new(LibraryFile { file: opened.map_err(io_error)?, order: self.order }))
    }
}

impl Drop for LibraryFs {
    fn drop(&mut self) {
        // Files of a run are closed by now; an error here was told by a sync before.
        let _ = self.fs.unmount();
    }
}

pub(super) fn io_error(error: fjord::Error) -> io::Error {
    let kind = io::Error::from_raw_os_error(error.errno()).kind();
    io::Error::new(kind, error)
}

impl BenchFile for LibraryFile {
    fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut done = 0;
        while done < data.len() {
            done += self.file.write_at(&data[done..], offset + done as u64).map_err(io_error)?;
        }
        Ok(())
    }

    fn read_at(&mut self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        let mut done = 0;
        while done < data.len() {
            match self.file.read_at(&mut data[done..], offset + done as u64).map_err(io_error)? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                count => done += count,
            }
        }
        Ok(())
    }

    fn sync(&mut self, data_only: bool) -> io::Result<()> {
        match (self.order, data_only) {
            (false, false) => self.file.sync_all(),
            (false, true) => self.file.sync_data(),
            (true, false) => self.file.fbarrier().map(drop),
            (true, true) => self.file.fdatabarrier().map(drop),
        }
        .map_err(io_error)
    }
}

impl BenchFs for LibraryFs {
    fn create(&self, path: &str) -> io::Result<Box<dyn BenchFile>> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(true);
        self.file(options.open(&self.fs, path))
    }
    fn open(&self, path: &str) -> io::Result<Box<dyn BenchFile>> {
        self.file(OpenOptions::new().read(true).write(true).open(&self.fs, path))
    }
    fn make_dir(&self, path: &str) -> io::Result<()> {
        self.fs.create_dir(path).map(drop).map_err(io_error)
    }
    fn remove_file(&self, path: &str) -> io::Result<()> {
        self.fs.remove_file(path).map_err(io_error)
    }
    fn remove_tree(&self, path: &str) -> io::Result<()> {
        self.fs.remove_dir_all(path).map_err(io_error)
    }
    fn sync(&self) -> io::Result<()> {
        self.fs.sync().map_err(io_error)
    }
    fn served(&self) -> Option<Served> {
        Some(Served::of(&self.fs.stats().fsync))
    }
}
