//! Open files with a position, as `std::fs::File`.

use std::fmt;
use std::io;
use std::path::Path;

use fjord_block::lock::{Mutex, Rank};
use rustix::io::Errno;

use super::metadata::{self, FileTimes, Permissions};
use super::path::{self, Located};
use crate::attr::{Attr, Cred, FileKind, SetAttr};
use crate::error::Result;
use crate::file::write::WriteOptions;
use crate::fsync::Epoch;
use crate::vfs::{Fs, InodeRef, OpenFile};

/// Permission bits of files that [`OpenOptions`] creates unless told otherwise.
const FILE_MODE: u16 = 0o644;

/// How to open a file; as `std::fs::OpenOptions`.
///
/// ```
/// # use std::sync::Arc;
/// # use fjord::{Fs, MemDevice, MkfsOptions, MountOptions};
/// use std::io::Write;
/// use fjord::OpenOptions;
///
/// # let device = Arc::new(MemDevice::new(16 << 20));
/// # let fs = Fs::create_on(device, &MkfsOptions::default(), &MountOptions::default())?;
/// let mut log = OpenOptions::new().append(true).create(true).open(&fs, "/log")?;
/// log.write_all(b"started\n")?;
/// log.sync_data()?;
/// # drop(log);
/// # fs.unmount()?;
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
    /// when a directory is to be written, `EROFS`, `ENOSPC`; as [`Fs::resolve`].
    pub fn open(&self, fs: &Fs, path: impl AsRef<Path>) -> Result<File> {
        let writes = self.write || self.append;
        self.check()?;
        let path = path.as_ref();
        if (self.create || self.create_new) && path::wants_dir(path) {
            path::parent(fs, path, Errno::ISDIR)?;
            return Err(Errno::ISDIR.into());
        }
        let inode = if self.create_new {
            let (parent, name) = path::parent(fs, path, Errno::EXIST)?;
            parent.create(&name, self.mode, &Cred::root())?
        } else {
            self.open_or_create(fs, path)?
        };
        let attr = inode.attr();
        if (writes || self.create) && attr.kind() == FileKind::Directory {
            return Err(Errno::ISDIR.into());
        }
        if self.truncate && attr.size > 0 {
            inode.set_attr(&SetAttr { size: Some(0), ..SetAttr::default() }, &Cred::root())?;
        }
        let position = Mutex::new(Rank::FilePosition, 0);
        let open = inode.open();
        Ok(File { open, position, read: self.read, write: writes, append: self.append })
    }

    /// The rules of `std::fs::OpenOptions` for what goes together.
    fn check(&self) -> Result<()> {
        let creates = self.create || self.create_new;
        let is_sensible = match (self.write, self.append) {
            (_, true) => !self.truncate || self.create_new,
            (true, false) => true,
            (false, false) => self.read && !self.truncate && !creates,
        };
        if is_sensible { Ok(()) } else { Err(Errno::INVAL.into()) }
    }

    fn open_or_create(&self, fs: &Fs, path: &Path) -> Result<InodeRef> {
        match path::locate(fs, path, true)? {
            Located::Found(inode) => Ok(inode),
            Located::Missing { .. } if !self.create => Err(Errno::NOENT.into()),
            Located::Missing { dir, name } => match dir.create(&name, self.mode, &Cred::root()) {
                Err(error) if error.is(Errno::EXIST) => fs.resolve(path),
                other => other,
            },
        }
    }
}

/// An open file with a position, as `std::fs::File`: it reads, writes and seeks by the traits of
/// `std::io`, also through a shared reference.
///
/// A write is in memory when the call returns, and survives a crash after [`File::sync_all`] or
/// [`File::sync_data`]. Dropping a file reports no error.
///
/// ```
/// # use std::sync::Arc;
/// # use fjord::{Fs, MemDevice, MkfsOptions, MountOptions};
/// use std::io::{Read, Seek, SeekFrom, Write};
/// use fjord::OpenOptions;
///
/// # let device = Arc::new(MemDevice::new(16 << 20));
/// # let fs = Fs::create_on(device, &MkfsOptions::default(), &MountOptions::default())?;
/// let mut file = OpenOptions::new().read(true).write(true).create_new(true).open(&fs, "/file")?;
/// file.write_all(b"hello, world")?;
/// file.sync_all()?; // durable from here on
///
/// file.seek(SeekFrom::Start(7))?;
/// let mut text = String::new();
/// file.read_to_string(&mut text)?;
/// assert_eq!(text, "world");
/// # drop(file);
/// # fs.unmount()?;
/// # Ok::<(), std::io::Error>(())
/// ```
pub struct File {
    open: OpenFile,
    /// Held for the time of a read or write that moves it.
    position: Mutex<u64>,
    read: bool,
    write: bool,
    append: bool,
}

impl fmt::Debug for File {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { read, write, append, .. } = self;
        let mut file = f.debug_struct("File");
        file.field("ino", &self.inode().ino()).field("read", read).field("write", write);
        file.field("append", append).finish_non_exhaustive()
    }
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

    /// As [`File::sync_all`], or with `datasync` as [`File::sync_data`], without a thread that waits:
    /// see [`InodeRef::fsync_then`].
    pub fn sync_then(&self, datasync: bool, done: impl FnOnce(Result<()>) + Send + 'static) {
        self.open.fsync_then(datasync, done);
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
    /// [`InodeRef::barrier`]. The epoch tells later when that is durable:
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use fjord::{Fs, MemDevice, MkfsOptions, MountOptions};
    /// use fjord::OpenOptions;
    ///
    /// # let device = Arc::new(MemDevice::new(16 << 20));
    /// # let fs = Fs::create_on(device, &MkfsOptions::default(), &MountOptions::default())?;
    /// let log = OpenOptions::new().write(true).create(true).open(&fs, "/log")?;
    /// log.write_at(b"first", 0)?;
    /// let first = log.fbarrier()?; // what follows is not durable before "first" is
    /// log.write_at(b"second", 5)?;
    /// fs.wait_durable(first)?; // now it is certain
    /// assert!(fs.is_durable(first)?);
    /// # drop(log);
    /// # fs.unmount()?;
    /// # Ok::<(), fjord::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`File::sync_all`], as far as they show before the device has answered.
    pub fn fbarrier(&self) -> Result<Epoch> {
        self.open.barrier(false)
    }

    /// As [`File::fbarrier`], for content only (`fdatabarrier`).
    ///
    /// # Errors
    /// As [`File::fbarrier`].
    pub fn fdatabarrier(&self) -> Result<Epoch> {
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

    /// As [`File::read_at`], until the buffer is full.
    ///
    /// # Errors
    /// `UnexpectedEof` where the file ends before; as [`File::read_at`].
    pub fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let mut done = 0;
        while done < buf.len() {
            match self.read_at(&mut buf[done..], offset.saturating_add(done as u64))? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                count => done += count,
            }
        }
        Ok(())
    }

    /// As [`File::write_at`], until all is written.
    ///
    /// # Errors
    /// As [`File::write_at`]; part of the data may have been written.
    pub fn write_all_at(&self, data: &[u8], offset: u64) -> Result<()> {
        let mut done = 0;
        while done < data.len() {
            match self.write_at(&data[done..], offset.saturating_add(done as u64))? {
                0 => return Err(Errno::IO.into()),
                count => done += count,
            }
        }
        Ok(())
    }

    /// Sets permission bits; see [`Permissions`].
    ///
    /// # Errors
    /// As [`Fs::set_permissions`].
    pub fn set_permissions(&self, permissions: impl Into<Permissions>) -> Result<()> {
        metadata::set_permissions(self.inode(), permissions.into())
    }

    /// Sets the times of access and modification; see [`FileTimes`].
    ///
    /// # Errors
    /// As [`Fs::set_times`].
    pub fn set_times(&self, times: FileTimes) -> Result<()> {
        metadata::set_times(self.inode(), times)
    }

    fn check(&self, allowed: bool) -> Result<()> {
        if allowed { Ok(()) } else { Err(Errno::BADF.into()) }
    }
}

impl io::Read for &File {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let mut position = self.position.lock();
        let count = self.read_at(buf, *position)?;
        *position += count as u64;
        Ok(count)
    }
}

impl io::Write for &File {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let mut position = self.position.lock();
        let count = self.write_at(data, *position)?;
        *position =
            if self.append { self.metadata().size } else { position.saturating_add(count as u64) };
        Ok(count)
    }

    /// Does nothing, as for `std::fs::File`: durability is asked for by
    /// [`File::sync_all`].
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl io::Seek for &File {
    fn seek(&mut self, to: io::SeekFrom) -> io::Result<u64> {
        let mut position = self.position.lock();
        let target = match to {
            io::SeekFrom::Start(offset) => Some(offset),
            io::SeekFrom::End(delta) => self.metadata().size.checked_add_signed(delta),
            io::SeekFrom::Current(delta) => position.checked_add_signed(delta),
        };
        *position = target.ok_or(io::ErrorKind::InvalidInput)?;
        Ok(*position)
    }
}

impl io::Read for File {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        (&*self).read(buf)
    }
}

impl io::Write for File {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        (&*self).write(data)
    }

    /// Does nothing, as for `std::fs::File`: durability is asked for by
    /// [`File::sync_all`].
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl io::Seek for File {
    fn seek(&mut self, to: io::SeekFrom) -> io::Result<u64> {
        (&*self).seek(to)
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
