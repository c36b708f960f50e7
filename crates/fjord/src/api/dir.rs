//! Directory listings of the path interface.

use std::collections::{HashSet, VecDeque};
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use fjord_format::InodeNo;

use crate::attr::{Attr, FileKind};
use crate::error::{Error, Result};
use crate::vfs::InodeRef;

/// Entries fetched in one go.
const BATCH: usize = 512;

/// Iterates over the entries of a directory; see [`crate::Fs::read_dir`].
///
/// ```
/// # use std::sync::Arc;
/// # use fjord::{Fs, MemDevice, MkfsOptions, MountOptions};
/// # let device = Arc::new(MemDevice::new(16 << 20));
/// # let fs = Fs::create_on(device, &MkfsOptions::default(), &MountOptions::default())?;
/// fs.create_dir("/etc")?;
/// fs.write("/etc/hosts", "127.0.0.1 localhost")?;
/// for entry in fs.read_dir("/etc")? {
///     let entry = entry?;
///     assert_eq!(entry.path(), std::path::Path::new("/etc/hosts"));
///     assert_eq!(entry.metadata()?.len(), 19);
/// }
/// # fs.unmount()?;
/// # Ok::<(), fjord::Error>(())
/// ```
pub struct ReadDir {
    dir: InodeRef,
    /// The path that was given.
    path: Arc<Path>,
    cookie: u64,
    fetched: VecDeque<OwnedDirEntry>,
    /// What comes after the fetched entries, if it is an error.
    failure: Option<Error>,
    done: bool,
}

/// One entry of [`ReadDir`], which has an example.
#[derive(Clone)]
pub struct OwnedDirEntry {
    dir: InodeRef,
    /// That of the directory.
    path: Arc<Path>,
    ino: InodeNo,
    kind: Option<FileKind>,
    name: OsString,
}

impl ReadDir {
    pub(super) fn new(dir: InodeRef, path: &Path) -> Result<Self> {
        let (path, fetched) = (Arc::from(path), VecDeque::new());
        let mut listing = Self { dir, path, cookie: 0, fetched, failure: None, done: false };
        listing.fetch();
        match listing.failure.take_if(|_| listing.fetched.is_empty()) {
            Some(error) => Err(error),
            None => Ok(listing),
        }
    }

    fn fetch(&mut self) {
        let mut count = 0;
        let Self { dir, path, fetched, cookie, .. } = self;
        let read = dir.read_dir(*cookie, &mut |entry| {
            *cookie = entry.next_cookie;
            count += 1;
            if entry.name != b"." && entry.name != b".." {
                fetched.push_back(OwnedDirEntry {
                    dir: dir.clone(),
                    path: path.clone(),
                    ino: entry.ino,
                    kind: entry.kind,
                    name: OsString::from_vec(entry.name.to_vec()),
                });
            }
            count < BATCH
        });
        self.failure = read.err();
        self.done = count < BATCH;
    }
}

impl Iterator for ReadDir {
    type Item = Result<OwnedDirEntry>;

    fn next(&mut self) -> Option<Self::Item> {
        while self.fetched.is_empty() && !self.done {
            self.fetch();
        }
        self.fetched.pop_front().map(Ok).or_else(|| self.failure.take().map(Err))
    }
}

impl OwnedDirEntry {
    /// Inode number.
    pub fn ino(&self) -> InodeNo {
        self.ino
    }

    /// Kind of file, where the directory records it.
    pub fn kind(&self) -> Option<FileKind> {
        self.kind
    }

    /// Kind of file, from the inode where the directory does not record it; a symbolic link is not
    /// followed.
    ///
    /// # Errors
    /// `ENOENT` if the name has gone since.
    pub fn file_type(&self) -> Result<FileKind> {
        match self.kind {
            Some(kind) => Ok(kind),
            None => Ok(self.metadata()?.kind()),
        }
    }

    /// The path that was given to [`crate::Fs::read_dir`], and the name.
    pub fn path(&self) -> PathBuf {
        self.path.join(&self.name)
    }

    /// Name.
    pub fn file_name(&self) -> &OsStr {
        &self.name
    }

    /// The inode.
    ///
    /// # Errors
    /// `ENOENT` if the name has gone since.
    pub fn inode(&self) -> Result<InodeRef> {
        self.dir.lookup(self.name.as_bytes())
    }

    /// Attributes; a symbolic link is not followed.
    ///
    /// # Errors
    /// `ENOENT` if the name has gone since.
    pub fn metadata(&self) -> Result<Attr> {
        Ok(self.inode()?.attr())
    }
}

impl fmt::Debug for ReadDir {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ReadDir").field(&self.path).finish()
    }
}

impl fmt::Debug for OwnedDirEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("OwnedDirEntry").field(&self.path()).finish()
    }
}

/// A directory that is being emptied.
struct Emptied {
    dir: InodeRef,
    listing: ReadDir,
    /// Where it is to be removed from afterwards.
    entry: Option<OwnedDirEntry>,
}

impl Emptied {
    fn new(dir: InodeRef, entry: Option<OwnedDirEntry>) -> Result<Self> {
        let listing = ReadDir::new(dir.clone(), Path::new(""))?;
        Ok(Self { dir, listing, entry })
    }
}

/// Removes everything in a directory, depth first, without recursion on the stack.
pub(super) fn empty(dir: &InodeRef) -> Result<()> {
    let mut stack = vec![Emptied::new(dir.clone(), None)?];
    let mut inside = HashSet::from([dir.ino()]);
    while let Some(here) = stack.last_mut() {
        match here.listing.next() {
            Some(entry) => {
                let entry = entry?;
                let inode = entry.inode()?;
                if inode.attr().kind() == FileKind::Directory {
                    if !inside.insert(inode.ino()) {
                        let detail =
                            format!("the directory with inode {} contains itself", inode.ino());
                        return here.dir.damaged(detail);
                    }
                    stack.push(Emptied::new(inode, Some(entry))?);
                } else {
                    drop(inode);
                    here.dir.unlink(entry.name.as_bytes())?;
                }
            }
            None => {
                let Some(Emptied { dir, entry, .. }) = stack.pop() else { break };
                inside.remove(&dir.ino());
                drop(dir);
                if let Some(entry) = entry {
                    entry.dir.rmdir(entry.name.as_bytes())?;
                }
            }
        }
    }
    Ok(())
}
