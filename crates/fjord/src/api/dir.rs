//! Directory listings of the path interface.

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

use fjord_format::InodeNo;

use crate::attr::{Attr, FileKind};
use crate::error::Result;
use crate::vfs::InodeRef;

/// Entries fetched in one go.
const BATCH: usize = 512;

/// Iterates over the entries of a directory; see [`crate::Fs::read_dir`].
pub struct ReadDir {
    dir: InodeRef,
    cookie: u64,
    fetched: VecDeque<OwnedDirEntry>,
    done: bool,
}

/// One entry of [`ReadDir`].
#[derive(Clone)]
pub struct OwnedDirEntry {
    dir: InodeRef,
    ino: InodeNo,
    kind: Option<FileKind>,
    name: OsString,
}

impl ReadDir {
    pub(super) fn new(dir: InodeRef) -> Result<Self> {
        let mut listing = Self { dir, cookie: 0, fetched: VecDeque::new(), done: false };
        listing.fetch()?;
        Ok(listing)
    }

    fn fetch(&mut self) -> Result<()> {
        let mut count = 0;
        let (dir, fetched, cookie) = (&self.dir, &mut self.fetched, &mut self.cookie);
        dir.read_dir(*cookie, &mut |entry| {
            *cookie = entry.next_cookie;
            count += 1;
            if entry.name != b"." && entry.name != b".." {
                fetched.push_back(OwnedDirEntry {
                    dir: dir.clone(),
                    ino: entry.ino,
                    kind: entry.kind,
                    name: OsString::from_vec(entry.name.to_vec()),
                });
            }
            count < BATCH
        })?;
        self.done = count < BATCH;
        Ok(())
    }
}

impl Iterator for ReadDir {
    type Item = Result<OwnedDirEntry>;

    fn next(&mut self) -> Option<Self::Item> {
        while self.fetched.is_empty() && !self.done {
            if let Err(error) = self.fetch() {
                self.done = true;
                return Some(Err(error));
            }
        }
        self.fetched.pop_front().map(Ok)
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

/// Removes everything in a directory, depth first, without recursion on the stack.
pub(super) fn empty(dir: &InodeRef) -> Result<()> {
    let mut stack: Vec<(InodeRef, ReadDir, Option<OwnedDirEntry>)> =
        vec![(dir.clone(), ReadDir::new(dir.clone())?, None)];
    while let Some((here, listing, _)) = stack.last_mut() {
        match listing.next() {
            Some(entry) => {
                let entry = entry?;
                let inode = entry.inode()?;
                if inode.attr().kind() == FileKind::Directory {
                    stack.push((inode.clone(), ReadDir::new(inode)?, Some(entry)));
                } else {
                    drop(inode);
                    here.unlink(entry.name.as_bytes())?;
                }
            }
            None => {
                let Some((inode, _, entry)) = stack.pop() else { break };
                drop(inode);
                if let Some(entry) = entry {
                    entry.dir.rmdir(entry.name.as_bytes())?;
                }
            }
        }
    }
    Ok(())
}
