//! Open files with a position, as `std::fs::File`.

use std::io;
use std::path::Path;

use rustix::io::Errno;

use super::path;
use crate::attr::{Attr, Cred, FileKind, SetAttr};
use crate::error::Result;
use crate::file::write::WriteOptions;
use crate::vfs::{Fs, InodeRef, OpenFile};

/// Permission bits of files that [`OpenOptions`] creates unless told otherwise.
const FILE_MODE: u16 = 0o644;

/// How to open a file; as `std::fs::OpenOptions`.
///
/// ```no_run
/// use std::io::Write;
/// use fjord::{Fs, MountOptions, OpenOptions};
///
/// let fs = Fs::open("disk.img", &MountOptions::default())?;
/// let mut log = OpenOptions::new().append(true).create(true).open(&fs, "/var/log/app")?;
/// log.write_all(b"started\n")?;
/// log.sync_data()?;
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct OpenOptions {
    read: bool,
    write: bool,
    append: bool,
    truncate: bool,
    create: bool,
    create_new: bool,
    mode: u16,
}

impl Default for OpenOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl OpenOptions {
    /// Nothing allowed yet.
    pub fn new() -> Self {
        Self {
            read: false,
            write: false,
            append: false,
            truncate: false,
            create: false,
            create_new: false,
            mode: FILE_MODE,
        }
    }

    /// Allow reading.
    pub fn read(&mut self, yes: bool) -> &mut Self {
        self.read = yes;
        self
    }

    /// Allow writing.
    pub fn write(&mut self, yes: bool) -> &mut Self {
        self.write = yes;
        self
    }

    /// Write at the end, whatever the position.
    pub fn append(&mut self, yes: bool) -> &mut Self {
        self.append = yes;
        self
    }

    /// Empty the file.
    pub fn truncate(&mut self, yes: bool) -> &mut Self {
        self.truncate = yes;
        self
    }

    /// Create the file if it is missing.
    pub fn create(&mut self, yes: bool) -> &mut Self {
        self.create = yes;
        self
    }

    /// Create the file; fail if it exists.
    pub fn create_new(&mut self, yes: bool) -> &mut Self {
        self.create_new = yes;
        self
    }

    /// Permission bits of a new file.
    pub fn mode(&mut self, mode: u16) -> &mut Self {
        self.mode = mode;
        self
    }

    /// Opens `path` in `fs`.
    ///
    /// # Errors
    /// `EINVAL` for options that make no sense together, `ENOENT`, `EEXIST`, `EISDIR`
    /// when a directory is to be written, `EROFS`, `ENOSPC`.
    pub fn open(&self, fs: &Fs, path: impl AsRef<Path>) -> Result<File> {
        let writes = self.write || self.append;
        let creates = self.create || self.create_new;
        let changes = self.truncate || creates;
        if !writes && (changes || !self.read) {
            return Err(Errno::INVAL.into());
        }
        let path = path.as_ref();
        let inode = if self.create_new {
            let (parent, name) = path::parent(fs, path)?;
            parent.create(&name, self.mode, &Cred::root())?
        } else {
            self.open_or_create(fs, path)?
        };
        if writes && inode.attr().kind() == FileKind::Directory {
            return Err(Errno::ISDIR.into());
        }
        if self.truncate && inode.attr().size > 0 {
            inode.set_attr(&SetAttr { size: Some(0), ..SetAttr::default() }, &Cred::root())?;
        }
        Ok(File {
            open: inode.open(),
            position: 0,
            read: self.read,
            write: writes,
            append: self.append,
        })
    }

    fn open_or_create(&self, fs: &Fs, path: &Path) -> Result<InodeRef> {
        match fs.resolve(path) {
            Err(error) if self.create && error.is(Errno::NOENT) => {
                let (parent, name) = path::parent(fs, path)?;
                match parent.create(&name, self.mode, &Cred::root()) {
                    Err(error) if error.is(Errno::EXIST) => fs.resolve(path),
                    other => other,
                }
            }
            other => other,
        }
    }
}

/// An open file with a position.
pub struct File {
    open: OpenFile,
    position: u64,
    read: bool,
    write: bool,
    append: bool,
}

impl File {
    /// The inode.
    pub fn inode(&self) -> &InodeRef {
        self.open.inode()
    }

    /// Makes content and attributes durable (`fsync`).
    ///
    /// # Errors
    /// `EIO` and others, also for background writes since the file was opened.
    pub fn sync_all(&self) -> Result<()> {
        self.open.fsync(false)
    }

    /// Makes content durable (`fdatasync`).
    ///
    /// # Errors
    /// As [`File::sync_all`].
    pub fn sync_data(&self) -> Result<()> {
        self.open.fsync(true)
    }

    /// Puts everything written to the file so far, content and attributes, before whatever is
    /// written later to any file, without making it durable (`fbarrier`); see
    /// [`InodeRef::barrier`].
    ///
    /// # Errors
    /// As [`File::sync_all`], as far as they show before the device has answered.
    pub fn fbarrier(&self) -> Result<()> {
        self.open.barrier(false)
    }

    /// As [`File::fbarrier`], for content only (`fdatabarrier`).
    ///
    /// # Errors
    /// As [`File::fbarrier`].
    pub fn fdatabarrier(&self) -> Result<()> {
        self.open.barrier(true)
    }

    /// Truncates or extends the file.
    ///
    /// # Errors
    /// `EBADF` if the file is not open for writing, `EFBIG`, I/O errors.
    pub fn set_len(&self, size: u64) -> Result<()> {
        self.check(self.write)?;
        let change = SetAttr { size: Some(size), ..SetAttr::default() };
        self.inode().set_attr(&change, &Cred::root()).map(drop)
    }

    /// Attributes.
    pub fn metadata(&self) -> Attr {
        self.inode().attr()
    }

    /// Reads at an offset, leaving the position alone.
    ///
    /// # Errors
    /// `EBADF`, I/O errors.
    pub fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<usize> {
        self.check(self.read)?;
        self.inode().read(offset, buf)
    }

    /// Writes at an offset, leaving the position alone.
    ///
    /// # Errors
    /// `EBADF`, `ENOSPC`, I/O errors.
    pub fn write_at(&self, data: &[u8], offset: u64) -> Result<usize> {
        self.check(self.write)?;
        let options = WriteOptions { append: self.append, ..WriteOptions::default() };
        self.inode().write_with(offset, data, options)
    }

    fn check(&self, allowed: bool) -> Result<()> {
        if allowed { Ok(()) } else { Err(Errno::BADF.into()) }
    }
}

impl io::Read for File {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let count = self.read_at(buf, self.position)?;
        self.position += count as u64;
        Ok(count)
    }
}

impl io::Write for File {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let count = self.write_at(data, self.position)?;
        self.position = if self.append {
            self.metadata().size
        } else {
            self.position.saturating_add(count as u64)
        };
        Ok(count)
    }

    /// Does nothing, as for `std::fs::File`: durability is asked for by
    /// [`File::sync_all`].
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl io::Seek for File {
    fn seek(&mut self, to: io::SeekFrom) -> io::Result<u64> {
        let position = match to {
            io::SeekFrom::Start(offset) => Some(offset),
            io::SeekFrom::End(delta) => self.metadata().size.checked_add_signed(delta),
            io::SeekFrom::Current(delta) => self.position.checked_add_signed(delta),
        };
        self.position = position.ok_or(io::ErrorKind::InvalidInput)?;
        Ok(self.position)
    }
}

/// Writes all of `data` at `offset`.
pub(super) fn write_all_at(inode: &InodeRef, offset: u64, data: &[u8]) -> Result<()> {
    let mut done = 0;
    while done < data.len() {
        let count = inode.write(offset + done as u64, &data[done..])?;
        if count == 0 {
            return Err(Errno::IO.into());
        }
        done += count;
    }
    Ok(())
}
