//! Walking a tree.
//!
//! Owns the order of [`Walk`]. Invariants: a directory comes before its entries, names are in byte
//! order; no directory is entered from within itself, even on a damaged image.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::fmt;
use std::path::{Path, PathBuf};

use fjord_format::InodeNo;
use rustix::io::Errno;

use super::dir::{OwnedDirEntry, ReadDir};
use crate::attr::{Attr, FileKind};
use crate::error::Result;
use crate::vfs::{Fs, InodeRef};

/// Iterates over a tree; see [`Fs::walk`].
pub struct Walk {
    /// What comes next: the root at first, later a directory that was returned and is to be entered.
    enter: Option<WalkEntry>,
    is_root_due: bool,
    levels: Vec<Level>,
    /// Inode numbers of the directories in `levels`.
    inside: HashSet<InodeNo>,
}

/// A directory that is being walked.
struct Level {
    ino: InodeNo,
    path: PathBuf,
    /// Not returned yet; in reverse order.
    entries: Vec<OwnedDirEntry>,
}

/// One file or directory of a [`Walk`].
#[derive(Clone)]
pub struct WalkEntry {
    path: PathBuf,
    depth: usize,
    inode: InodeRef,
    attr: Attr,
}

impl Fs {
    /// Walks a file or a directory with everything in it: `path` itself first, each directory before
    /// what is in it, the names of a directory in the order of their bytes. Symbolic links are
    /// returned and not followed, but for one that `path` ends in. What is removed before its turn is
    /// left out; a directory that cannot be read is an error in its place, and the walk goes on.
    /// Memory holds the names of the directories from the root of the walk to the present one.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use fjord::{Fs, MemDevice, MkfsOptions, MountOptions};
    /// # let device = Arc::new(MemDevice::new(16 << 20));
    /// # let fs = Fs::create_on(device, &MkfsOptions::default(), &MountOptions::default())?;
    /// fs.create_dir_all("/srv/www")?;
    /// fs.write("/srv/www/index.html", "<html>")?;
    /// fs.write("/srv/notes", "")?;
    ///
    /// let mut bytes = 0;
    /// let mut paths = Vec::new();
    /// for entry in fs.walk("/srv")? {
    ///     let entry = entry?;
    ///     if entry.metadata().is_file() {
    ///         bytes += entry.metadata().len();
    ///     }
    ///     paths.push(entry.path().display().to_string());
    /// }
    /// assert_eq!(paths, ["/srv", "/srv/notes", "/srv/www", "/srv/www/index.html"]);
    /// assert_eq!(bytes, 6);
    /// # fs.unmount()?;
    /// # Ok::<(), fjord::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Fs::resolve`]; those of the iterator are I/O errors and corruption.
    pub fn walk(&self, path: impl AsRef<Path>) -> Result<Walk> {
        let path = path.as_ref();
        let inode = self.resolve(path)?;
        let root = WalkEntry { path: path.to_owned(), depth: 0, attr: inode.attr(), inode };
        Ok(Walk {
            enter: Some(root),
            is_root_due: true,
            levels: Vec::new(),
            inside: HashSet::new(),
        })
    }
}

impl Walk {
    /// Does not enter the directory that was returned last; after anything else, does nothing.
    pub fn skip_dir(&mut self) {
        if !self.is_root_due {
            self.enter = None;
        }
    }

    /// Makes the entries of `dir` the next ones.
    fn enter(&mut self, dir: WalkEntry) -> Result<()> {
        let WalkEntry { path, inode, .. } = dir;
        let ino = inode.ino();
        if self.inside.contains(&ino) {
            let detail =
                format!("the directory with inode {ino} contains itself at {}", path.display());
            return inode.damaged(detail);
        }
        let mut entries = ReadDir::new(inode, &path)?.collect::<Result<Vec<_>>>()?;
        entries.sort_unstable_by(|a, b| b.file_name().cmp(a.file_name()));
        self.inside.insert(ino);
        self.levels.push(Level { ino, path, entries });
        Ok(())
    }

    /// The next entry of the directories on the stack.
    fn advance(&mut self) -> Option<Result<WalkEntry>> {
        loop {
            let depth = self.levels.len();
            let level = self.levels.last_mut()?;
            let Some(entry) = level.entries.pop() else {
                self.inside.remove(&level.ino);
                self.levels.pop();
                continue;
            };
            match entry.inode() {
                Ok(inode) => {
                    let path = level.path.join(entry.file_name());
                    return Some(Ok(WalkEntry { path, depth, attr: inode.attr(), inode }));
                }
                Err(error) if error.is(Errno::NOENT) => {}
                Err(error) => return Some(Err(error)),
            }
        }
    }
}

impl Iterator for Walk {
    type Item = Result<WalkEntry>;

    fn next(&mut self) -> Option<Self::Item> {
        let next = if std::mem::take(&mut self.is_root_due) {
            self.enter.take()?
        } else {
            if let Some(dir) = self.enter.take()
                && let Err(error) = self.enter(dir)
            {
                return Some(Err(error));
            }
            match self.advance()? {
                Ok(entry) => entry,
                Err(error) => return Some(Err(error)),
            }
        };
        if next.attr.is_dir() {
            self.enter = Some(next.clone());
        }
        Some(Ok(next))
    }
}

impl WalkEntry {
    /// The path that was given to [`Fs::walk`], and the names from there.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// As [`WalkEntry::path`].
    pub fn into_path(self) -> PathBuf {
        self.path
    }

    /// The last name of the path; the whole path where it has none (`/`).
    pub fn file_name(&self) -> &OsStr {
        self.path.file_name().unwrap_or(self.path.as_os_str())
    }

    /// Directories between this and the root of the walk; 0 for the root itself.
    pub fn depth(&self) -> usize {
        self.depth
    }

    /// Attributes at the time when it was its turn; those of a symbolic link, not of its target.
    pub fn metadata(&self) -> Attr {
        self.attr
    }

    /// Kind of file.
    pub fn file_type(&self) -> FileKind {
        self.attr.kind()
    }

    /// The inode. It stays in memory as long as the entry does.
    pub fn inode(&self) -> &InodeRef {
        &self.inode
    }
}

impl fmt::Debug for Walk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let here = self.levels.last().map(|level| &level.path);
        f.debug_struct("Walk").field("here", &here).finish_non_exhaustive()
    }
}

impl fmt::Debug for WalkEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { path, depth, attr, .. } = self;
        let mut entry = f.debug_struct("WalkEntry");
        entry.field("path", path).field("depth", depth).field("attr", attr).finish_non_exhaustive()
    }
}
