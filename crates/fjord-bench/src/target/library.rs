//! fjord as a library as a target.

use std::io;
use std::path::Path;

use fjord::{File, Fs, MountOptions, OpenOptions};

use super::{BenchFile, BenchFs};
use crate::error::{BenchError, Result};
use crate::served::Served;

/// An image open in this process; unmounted when dropped.
pub(crate) struct LibraryFs(Fs);

impl LibraryFs {
    pub(crate) fn open(image: &Path, options: &MountOptions) -> Result<LibraryFs> {
        let opened = Fs::open(image, options).map_err(io_error);
        Ok(LibraryFs(opened.map_err(BenchError::io(format!("open {}", image.display())))?))
    }
}

impl Drop for LibraryFs {
    fn drop(&mut self) {
        // Files of a run are closed by now; an error here was told by a sync before.
        let _ = self.0.unmount();
    }
}

fn io_error(error: fjord::Error) -> io::Error {
    let kind = io::Error::from_raw_os_error(error.errno()).kind();
    io::Error::new(kind, error)
}

impl BenchFile for File {
    fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut done = 0;
        while done < data.len() {
            done += File::write_at(self, &data[done..], offset + done as u64).map_err(io_error)?;
        }
        Ok(())
    }

    fn read_at(&mut self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        let mut done = 0;
        while done < data.len() {
            match File::read_at(self, &mut data[done..], offset + done as u64).map_err(io_error)? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                count => done += count,
            }
        }
        Ok(())
    }

    fn sync(&mut self, data_only: bool) -> io::Result<()> {
        if data_only { self.sync_data() } else { self.sync_all() }.map_err(io_error)
    }
}

impl BenchFs for LibraryFs {
    fn create(&self, path: &str) -> io::Result<Box<dyn BenchFile>> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(true);
        Ok(Box::new(options.open(&self.0, path).map_err(io_error)?))
    }
    fn open(&self, path: &str) -> io::Result<Box<dyn BenchFile>> {
        Ok(Box::new(
            OpenOptions::new().read(true).write(true).open(&self.0, path).map_err(io_error)?,
        ))
    }
    fn make_dir(&self, path: &str) -> io::Result<()> {
        self.0.create_dir(path).map(drop).map_err(io_error)
    }
    fn remove_file(&self, path: &str) -> io::Result<()> {
        self.0.remove_file(path).map_err(io_error)
    }
    fn remove_tree(&self, path: &str) -> io::Result<()> {
        self.0.remove_dir_all(path).map_err(io_error)
    }
    fn sync(&self) -> io::Result<()> {
        self.0.sync().map_err(io_error)
    }
    fn served(&self) -> Option<Served> {
        Some(Served::of(&self.0.stats().fsync))
    }
}
