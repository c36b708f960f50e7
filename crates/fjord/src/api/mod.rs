//! The library interface in the habits of `std::fs`: paths, [`File`], [`OpenOptions`].
//!
//! Owns path resolution and file positions; everything else is done by
//! [`InodeRef`](crate::InodeRef). Invariants: paths are bytes with `/` between names and
//! always start at the root of the image; symbolic links are followed inside the image,
//! never out of it; errors convert to [`std::io::Error`] with the kind that `std::fs`
//! would give.

mod dir;
mod file;
mod path;

pub use dir::{OwnedDirEntry, ReadDir};
pub use file::{File, OpenOptions};

use std::path::Path;

use rustix::io::Errno;

use crate::attr::{Attr, Cred, FileKind, SetAttr};
use crate::error::Result;
use crate::vfs::{Fs, InodeRef, RenameFlags};

/// Permission bits of directories that the path calls create.
const DIR_MODE: u16 = 0o755;

impl Fs {
    /// The inode that a path names, symbolic links followed.
    ///
    /// # Errors
    /// `ENOENT`, `ENOTDIR`, `ELOOP`, `ENAMETOOLONG`.
    pub fn resolve(&self, path: impl AsRef<Path>) -> Result<InodeRef> {
        path::resolve(self, path.as_ref(), true)
    }

    /// Attributes of what a path names, symbolic links followed.
    ///
    /// # Errors
    /// As [`Fs::resolve`].
    pub fn metadata(&self, path: impl AsRef<Path>) -> Result<Attr> {
        Ok(self.resolve(path)?.attr())
    }

    /// Attributes of what a path names; a symbolic link at its end is not followed.
    ///
    /// # Errors
    /// As [`Fs::resolve`].
    pub fn symlink_metadata(&self, path: impl AsRef<Path>) -> Result<Attr> {
        Ok(path::resolve(self, path.as_ref(), false)?.attr())
    }

    /// Whether a path names something.
    ///
    /// # Errors
    /// Errors other than that it does not.
    pub fn try_exists(&self, path: impl AsRef<Path>) -> Result<bool> {
        match self.resolve(path) {
            Ok(_) => Ok(true),
            Err(error) if error.is(Errno::NOENT) || error.is(Errno::NOTDIR) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Opens a file for reading.
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
    /// As [`OpenOptions::open`]; I/O errors.
    pub fn read(&self, path: impl AsRef<Path>) -> Result<Vec<u8>> {
        let inode = self.resolve(path)?;
        let mut content = Vec::new();
        let mut chunk = vec![0; 1 << 20];
        loop {
            let count = inode.read(content.len() as u64, &mut chunk)?;
            if count == 0 {
                return Ok(content);
            }
            content.extend_from_slice(&chunk[..count]);
        }
    }

    /// Creates or replaces a file with this content. Durable only after a sync.
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
        let (parent, name) = path::parent(self, path.as_ref())?;
        parent.mkdir(&name, DIR_MODE, &Cred::root())
    }

    /// Creates a directory and those above it that are missing.
    ///
    /// # Errors
    /// `ENOTDIR` if something else is in the way; as [`Fs::create_dir`].
    pub fn create_dir_all(&self, path: impl AsRef<Path>) -> Result<InodeRef> {
        let mut dir = self.root()?;
        for name in path::names(path.as_ref())? {
            dir = match dir.lookup(&name) {
                Ok(next) => path::follow(self, next)?,
                Err(error) if error.is(Errno::NOENT) => {
                    match dir.mkdir(&name, DIR_MODE, &Cred::root()) {
                        Err(error) if error.is(Errno::EXIST) => dir.lookup(&name)?,
                        other => other?,
                    }
                }
                Err(error) => return Err(error),
            };
        }
        if dir.attr().kind() == FileKind::Directory { Ok(dir) } else { Err(Errno::NOTDIR.into()) }
    }

    /// The entries of a directory, `.` and `..` left out.
    ///
    /// # Errors
    /// `ENOTDIR`; as [`Fs::resolve`].
    pub fn read_dir(&self, path: impl AsRef<Path>) -> Result<ReadDir> {
        ReadDir::new(self.resolve(path)?)
    }

    /// Removes a name that is not a directory's.
    ///
    /// # Errors
    /// `ENOENT`, `EISDIR`, `EPERM`.
    pub fn remove_file(&self, path: impl AsRef<Path>) -> Result<()> {
        let (parent, name) = path::parent(self, path.as_ref())?;
        parent.unlink(&name)
    }

    /// Removes an empty directory.
    ///
    /// # Errors
    /// `ENOTEMPTY`, `ENOTDIR`, `ENOENT`.
    pub fn remove_dir(&self, path: impl AsRef<Path>) -> Result<()> {
        let (parent, name) = path::parent(self, path.as_ref())?;
        parent.rmdir(&name)
    }

    /// Removes a directory with everything in it. Symbolic links are removed, not
    /// followed.
    ///
    /// # Errors
    /// The first error met; what was removed before stays removed.
    pub fn remove_dir_all(&self, path: impl AsRef<Path>) -> Result<()> {
        let (parent, name) = path::parent(self, path.as_ref())?;
        let dir = parent.lookup(&name)?;
        dir::empty(&dir)?;
        drop(dir);
        parent.rmdir(&name)
    }

    /// Renames, replacing what `to` names.
    ///
    /// # Errors
    /// As `rename(2)`.
    pub fn rename(&self, from: impl AsRef<Path>, to: impl AsRef<Path>) -> Result<()> {
        let (from_dir, from_name) = path::parent(self, from.as_ref())?;
        let (to_dir, to_name) = path::parent(self, to.as_ref())?;
        from_dir.rename(&from_name, &to_dir, &to_name, RenameFlags::empty(), &Cred::root())
    }

    /// Gives a file a second name.
    ///
    /// # Errors
    /// `EEXIST`, `EMLINK`, `EPERM` for directories.
    pub fn hard_link(&self, original: impl AsRef<Path>, link: impl AsRef<Path>) -> Result<()> {
        let target = path::resolve(self, original.as_ref(), false)?;
        let (parent, name) = path::parent(self, link.as_ref())?;
        parent.link(&target, &name)
    }

    /// Creates a symbolic link.
    ///
    /// # Errors
    /// `EEXIST`, `ENAMETOOLONG`, `ENOSPC`.
    pub fn symlink(&self, target: impl AsRef<Path>, link: impl AsRef<Path>) -> Result<InodeRef> {
        use std::os::unix::ffi::OsStrExt;
        let (parent, name) = path::parent(self, link.as_ref())?;
        parent.symlink(&name, target.as_ref().as_os_str().as_bytes(), &Cred::root())
    }

    /// The target of a symbolic link.
    ///
    /// # Errors
    /// `EINVAL` if it is none.
    pub fn read_link(&self, path: impl AsRef<Path>) -> Result<std::path::PathBuf> {
        use std::os::unix::ffi::OsStringExt;
        let target = path::resolve(self, path.as_ref(), false)?.read_link()?;
        Ok(std::ffi::OsString::from_vec(target).into())
    }

    /// Sets permission bits.
    ///
    /// # Errors
    /// `EPERM` for immutable files, `EROFS`.
    pub fn set_permissions(&self, path: impl AsRef<Path>, mode: u16) -> Result<()> {
        let change = SetAttr { mode: Some(mode), ..SetAttr::default() };
        self.resolve(path)?.set_attr(&change, &Cred::root()).map(drop)
    }
}
