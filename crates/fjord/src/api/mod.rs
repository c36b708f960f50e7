//! The library interface in the habits of `std::fs`: paths, [`File`], [`OpenOptions`].
//!
//! Owns path resolution ([`path`]), file positions ([`file`]), listings and walks ([`dir`], [`walk`]),
//! what a copy takes over ([`copy`]) and attributes as `std::fs` shows them ([`metadata`]);
//! everything else is done by [`InodeRef`](crate::InodeRef). Invariants: paths are bytes with `/`
//! between names and always start at the root of the image; symbolic links are followed inside the
//! image, never out of it; all calls act for root; errors convert to [`std::io::Error`] with the kind
//! that `std::fs` would give.

mod copy;
mod dir;
mod file;
mod metadata;
mod path;
mod walk;

pub use dir::{OwnedDirEntry, ReadDir};
pub use file::{File, OpenOptions};
pub use metadata::{FileTimes, Permissions};
pub use walk::{Walk, WalkEntry};

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use rustix::io::Errno;

use crate::attr::{Cred, FileKind};
use crate::error::{Error, Result};
use crate::vfs::{Fs, InodeRef, RenameFlags};

/// Permission bits of directories that the path calls create.
const DIR_MODE: u16 = 0o755;
/// Bytes that [`Fs::read`] asks for at a time.
const READ_BYTES: u64 = 1 << 20;

/// Calls by path. A path starts at the root of the image, with or without a slash; the empty path is
/// the root. Symbolic links are followed inside the image.
impl Fs {
    /// The inode that a path names, symbolic links followed.
    ///
    /// # Errors
    /// `ENOENT`, `ENOTDIR`, `ELOOP`, `ENAMETOOLONG`; `EINVAL` for a NUL byte; `Closed`.
    pub fn resolve(&self, path: impl AsRef<Path>) -> Result<InodeRef> {
        path::resolve(self, path.as_ref(), true)
    }

    /// Whether a path exists; symbolic links are followed.
    ///
    /// # Errors
    /// As [`Fs::resolve`], but for `ENOENT`: `ENOTDIR` below a file, as `std::fs::exists`.
    pub fn try_exists(&self, path: impl AsRef<Path>) -> Result<bool> {
        match self.resolve(path) {
            Ok(_) => Ok(true),
            Err(error) if error.is(Errno::NOENT) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Opens a file for reading; [`OpenOptions`] opens it otherwise.
    ///
    /// # Errors
    /// As [`OpenOptions::open`].
    pub fn open_file(&self, path: impl AsRef<Path>) -> Result<File> {
        OpenOptions::new().read(true).open(self, path)
    }

    /// Creates a file, or empties an existing one, for writing.
    ///
    /// # Errors
    /// As [`OpenOptions::open`].
    pub fn create_file(&self, path: impl AsRef<Path>) -> Result<File> {
        OpenOptions::new().write(true).create(true).truncate(true).open(self, path)
    }

    /// The whole content of a file.
    ///
    /// # Errors
    /// `EISDIR`; as [`Fs::resolve`]; I/O errors.
    pub fn read(&self, path: impl AsRef<Path>) -> Result<Vec<u8>> {
        let inode = self.resolve(path)?;
        // Reads one byte more than the size to find the end; a damaged size must not allocate that
        // much memory.
        let chunk_bytes = inode.attr().size.saturating_add(1).min(READ_BYTES) as usize;
        let mut content = Vec::new();
        loop {
            let done = content.len();
            content.resize(done + chunk_bytes, 0);
            let count = inode.read(done as u64, &mut content[done..])?;
            content.truncate(done + count);
            if count == 0 {
                return Ok(content);
            }
        }
    }

    /// The whole content of a file of text.
    ///
    /// # Errors
    /// `InvalidData` if it is not UTF-8; as [`Fs::read`].
    pub fn read_to_string(&self, path: impl AsRef<Path>) -> Result<String> {
        let path = path.as_ref();
        String::from_utf8(self.read(path)?).map_err(|error| {
            let at = error.utf8_error().valid_up_to();
            let path = path.display();
            Error::InvalidData(format!("{path} is not UTF-8 text: the byte at {at} is wrong"))
        })
    }

    /// Creates a file with this content, or replaces that of an existing one. Durable only after a
    /// sync ([`Fs::sync`], [`File::sync_all`]).
    ///
    /// # Errors
    /// As [`OpenOptions::open`]; `ENOSPC`; I/O errors.
    pub fn write(&self, path: impl AsRef<Path>, content: impl AsRef<[u8]>) -> Result<()> {
        let file = self.create_file(path)?;
        file::write_all_at(file.inode(), 0, content.as_ref())
    }

    /// Creates a directory.
    ///
    /// # Errors
    /// `EEXIST`, `ENOENT`, `ENOSPC`, `EROFS`.
    pub fn create_dir(&self, path: impl AsRef<Path>) -> Result<InodeRef> {
        let (parent, name) = path::parent(self, path.as_ref(), Errno::EXIST)?;
        parent.mkdir(&name, DIR_MODE, &Cred::root())
    }

    /// Creates a directory and those above it that are missing. One that exists is no error.
    ///
    /// # Errors
    /// `EEXIST` or `ENOTDIR` if something else is in the way; as [`Fs::create_dir`].
    pub fn create_dir_all(&self, path: impl AsRef<Path>) -> Result<InodeRef> {
        let path = path.as_ref();
        let names = path::names(path)?;
        match self.resolve(path) {
            Ok(dir) if dir.attr().is_dir() => return Ok(dir),
            Err(error) if !error.is(Errno::NOENT) && !error.is(Errno::NOTDIR) => return Err(error),
            _ => {}
        }
        let mut dir = self.root()?;
        for depth in 1..=names.len() {
            dir = self.ensure_dir(&names[..depth], depth == names.len())?;
        }
        Ok(dir)
    }

    /// The directory that a path of these names leads to, made if it is missing.
    fn ensure_dir(&self, names: &[Vec<u8>], is_last: bool) -> Result<InodeRef> {
        let path: PathBuf = names.iter().map(|name| OsStr::from_bytes(name)).collect();
        match self.resolve(&path) {
            Ok(dir) if dir.attr().is_dir() => return Ok(dir),
            Ok(_) if !is_last => return Err(Errno::NOTDIR.into()),
            Err(error) if !error.is(Errno::NOENT) => return Err(error),
            _ => {}
        }
        let (parent, name) = path::parent_of(self, names.to_vec(), Errno::EXIST)?;
        match parent.mkdir(&name, DIR_MODE, &Cred::root()) {
            Err(error) if error.is(Errno::EXIST) => match self.resolve(&path) {
                // Another thread has just created it.
                Ok(dir) if dir.attr().is_dir() => Ok(dir),
                _ => Err(error),
            },
            made => made,
        }
    }

    /// The entries of a directory, `.` and `..` left out, in the order of the directory;
    /// [`ReadDir`] has an example.
    ///
    /// # Errors
    /// `ENOTDIR`; as [`Fs::resolve`].
    pub fn read_dir(&self, path: impl AsRef<Path>) -> Result<ReadDir> {
        let path = path.as_ref();
        ReadDir::new(self.resolve(path)?, path)
    }

    /// Removes a name of a file that is not a directory.
    ///
    /// # Errors
    /// `ENOENT`, `EISDIR`, `EPERM`.
    pub fn remove_file(&self, path: impl AsRef<Path>) -> Result<()> {
        let (parent, name) = path::parent_of_file(self, path.as_ref(), Errno::ISDIR)?;
        parent.unlink(&name)
    }

    /// Removes an empty directory.
    ///
    /// # Errors
    /// `ENOTEMPTY`, `ENOTDIR`, `ENOENT`.
    pub fn remove_dir(&self, path: impl AsRef<Path>) -> Result<()> {
        let (parent, name) = path::parent(self, path.as_ref(), Errno::BUSY)?;
        parent.rmdir(&name)
    }

    /// Removes a directory with everything in it. Symbolic links are removed, not
    /// followed; so is one that the path ends in.
    ///
    /// # Errors
    /// `ENOTDIR`; `EBUSY` for the root. The first error met; what was removed before stays removed.
    pub fn remove_dir_all(&self, path: impl AsRef<Path>) -> Result<()> {
        let (parent, name) = path::parent(self, path.as_ref(), Errno::BUSY)?;
        let dir = parent.lookup(&name)?;
        if dir.attr().kind() == FileKind::Symlink {
            return parent.unlink(&name);
        }
        dir::empty(&dir)?;
        drop(dir);
        parent.rmdir(&name)
    }

    /// Renames, replacing what `to` names.
    ///
    /// # Errors
    /// As `rename(2)`.
    pub fn rename(&self, from: impl AsRef<Path>, to: impl AsRef<Path>) -> Result<()> {
        let (from, to) = (from.as_ref(), to.as_ref());
        let (from_dir, from_name) = path::parent(self, from, Errno::BUSY)?;
        let (to_dir, to_name) = path::parent(self, to, Errno::BUSY)?;
        if (path::wants_dir(from) || path::wants_dir(to))
            && from_dir.lookup(&from_name)?.attr().kind() != FileKind::Directory
        {
            return Err(Errno::NOTDIR.into());
        }
        from_dir.rename(&from_name, &to_dir, &to_name, RenameFlags::empty(), &Cred::root())
    }

    /// Creates a hard link.
    ///
    /// # Errors
    /// `EEXIST`, `EMLINK`, `EPERM` for directories.
    pub fn hard_link(&self, original: impl AsRef<Path>, link: impl AsRef<Path>) -> Result<()> {
        let target = path::resolve(self, original.as_ref(), false)?;
        let (parent, name) = path::parent_of_file(self, link.as_ref(), Errno::EXIST)?;
        parent.link(&target, &name)
    }

    /// Creates a symbolic link.
    ///
    /// # Errors
    /// `EEXIST`, `ENAMETOOLONG`, `ENOSPC`.
    pub fn symlink(&self, target: impl AsRef<Path>, link: impl AsRef<Path>) -> Result<InodeRef> {
        let (parent, name) = path::parent_of_file(self, link.as_ref(), Errno::EXIST)?;
        parent.symlink(&name, target.as_ref().as_os_str().as_bytes(), &Cred::root())
    }

    /// The target of a symbolic link.
    ///
    /// # Errors
    /// `EINVAL` if it is none.
    pub fn read_link(&self, path: impl AsRef<Path>) -> Result<PathBuf> {
        let target = path::resolve(self, path.as_ref(), false)?.read_link()?;
        Ok(OsString::from_vec(target).into())
    }
}
