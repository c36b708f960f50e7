//! A file of fjord's library for the model checker of [`crate::fsx`].
//!
//! Reopening closes the whole file system every few times, so that what was written goes through
//! the disk.

use std::{io, path::PathBuf};

use fjord::{Cred, FallocMode, Fs, InodeRef, MountOptions, SetAttr};

use crate::fsx::FileUnderTest;

/// How many reopens make one unmount.
const REOPENS_PER_UNMOUNT: u64 = 8;

/// A file in an image.
pub struct EngineFile {
    image: PathBuf,
    options: MountOptions,
    name: Vec<u8>,
    open: Option<(Fs, InodeRef)>,
    reopens: u64,
}

impl std::fmt::Debug for EngineFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EngineFile").field("image", &self.image).finish_non_exhaustive()
    }
}

fn io(error: fjord::Error) -> io::Error {
    io::Error::from_raw_os_error(error.errno())
}

impl EngineFile {
    /// Opens the image and makes the file in its root.
    pub fn create(image: PathBuf, name: &[u8], options: MountOptions) -> fjord::Result<Self> {
        let fs = Fs::open(&image, &options)?;
        let inode = fs.root()?.create(name, 0o644, &Cred::root())?;
        let open = Some((fs, inode));
        Ok(EngineFile { image, options, name: name.to_vec(), open, reopens: 0 })
    }

    /// Unmounts.
    pub fn close(mut self) -> fjord::Result<()> {
        self.shut()
    }

    fn shut(&mut self) -> fjord::Result<()> {
        let Some((fs, inode)) = self.open.take() else { return Ok(()) };
        drop(inode);
        fs.unmount()
    }

    fn inode(&self) -> io::Result<&InodeRef> {
        self.open.as_ref().map(|(_, inode)| inode).ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

impl FileUnderTest for EngineFile {
    fn read(&mut self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        let mut done = 0;
        while done < buf.len() {
            match self.inode()?.read(offset + done as u64, &mut buf[done..]).map_err(io)? {
                0 => break,
                got => done += got,
            }
        }
        Ok(done)
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut done = 0;
        while done < data.len() {
            done += self.inode()?.write(offset + done as u64, &data[done..]).map_err(io)?;
        }
        Ok(())
    }

    fn truncate(&mut self, size: u64) -> io::Result<()> {
        let change = SetAttr { size: Some(size), ..SetAttr::default() };
        self.inode()?.set_attr(&change, &Cred::root()).map(drop).map_err(io)
    }

    fn fallocate(&mut self, mode: i32, offset: u64, len: u64) -> io::Result<()> {
        let mode = FallocMode::from_bits_retain(mode as u32);
        self.inode()?.fallocate(mode, offset, len).map_err(io)
    }

    fn size(&mut self) -> io::Result<u64> {
        Ok(self.inode()?.attr().size)
    }

    fn fsync(&mut self, data_only: bool) -> io::Result<()> {
        self.inode()?.fsync(data_only).map_err(io)
    }

    fn reopen(&mut self) -> io::Result<()> {
        self.reopens += 1;
        if self.reopens.is_multiple_of(REOPENS_PER_UNMOUNT) {
            self.shut().map_err(io)?;
            let fs = Fs::open(&self.image, &self.options).map_err(io)?;
            let inode = fs.root().and_then(|root| root.lookup(&self.name)).map_err(io)?;
            self.open = Some((fs, inode));
        }
        Ok(())
    }

    fn seek_data(&mut self, offset: u64) -> io::Result<Option<u64>> {
        match self.inode()?.seek_data(offset) {
            Ok(at) => Ok(Some(at)),
            Err(error) if error.errno() == libc::ENXIO => Ok(None),
            Err(error) => Err(io(error)),
        }
    }

    fn seek_hole(&mut self, offset: u64) -> io::Result<u64> {
        self.inode()?.seek_hole(offset).map_err(io)
    }
}
