//! Path resolution inside an image.
//!
//! Owns the rules of Linux for names, `.`, `..`, symbolic links and a slash at the end. Invariant: no
//! path leads out of the image; `..` of the root is the root.

use std::collections::VecDeque;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path};

use rustix::io::Errno;

use crate::attr::FileKind;
use crate::error::Result;
use crate::vfs::{Fs, InodeRef};

/// Symbolic links that one resolution follows at the most (Linux's MAXSYMLINKS).
const LINKS_MAX: usize = 40;

/// Outcome of a resolution.
pub(super) enum Located {
    /// An inode.
    Found(InodeRef),
    /// No inode: this directory lacks this name. Symbolic links on the way, including one at the
    /// end, have been followed.
    Missing {
        /// The directory in which the last name is looked for.
        dir: InodeRef,
        /// The last name.
        name: Vec<u8>,
    },
}

/// The names of a path without `.`; a path with `..` keeps it as a name.
pub(super) fn names(path: &Path) -> Result<Vec<Vec<u8>>> {
    let mut names = Vec::new();
    for component in path.components() {
        match component {
            Component::Normal(name) => names.push(name.as_bytes().to_vec()),
            Component::ParentDir => names.push(b"..".to_vec()),
            Component::RootDir | Component::CurDir => {}
            Component::Prefix(_) => return Err(Errno::INVAL.into()),
        }
    }
    Ok(names)
}

/// Whether only a directory can be meant: there is a slash after the last name.
pub(super) fn wants_dir(path: &Path) -> bool {
    let bytes = path.as_os_str().as_bytes();
    bytes.ends_with(b"/") || bytes.ends_with(b"/.")
}

/// Walks a path from the root; `follow_last` decides about a link at its end.
pub(super) fn resolve(fs: &Fs, path: &Path, follow_last: bool) -> Result<InodeRef> {
    match locate(fs, path, follow_last)? {
        Located::Found(inode) => Ok(inode),
        Located::Missing { .. } => Err(Errno::NOENT.into()),
    }
}

/// As [`resolve`], for paths whose last name need not exist.
pub(super) fn locate(fs: &Fs, path: &Path, follow_last: bool) -> Result<Located> {
    let wants_dir = wants_dir(path);
    let located = walk(fs, names(path)?.into(), follow_last || wants_dir)?;
    match &located {
        Located::Found(inode) if wants_dir && !is_dir(inode) => Err(Errno::NOTDIR.into()),
        _ => Ok(located),
    }
}

/// The directory that holds the last name of a path, and that name. A path that ends in no name,
/// but in the root or `..`, gives the error `nameless`.
pub(super) fn parent(fs: &Fs, path: &Path, nameless: Errno) -> Result<(InodeRef, Vec<u8>)> {
    parent_of(fs, names(path)?, nameless)
}

/// As [`parent`], for the names of a path.
pub(super) fn parent_of(
    fs: &Fs,
    mut names: Vec<Vec<u8>>,
    nameless: Errno,
) -> Result<(InodeRef, Vec<u8>)> {
    match names.pop() {
        Some(last) if last != b".." => match walk(fs, names.into(), true)? {
            Located::Found(dir) => Ok((dir, last)),
            Located::Missing { .. } => Err(Errno::NOENT.into()),
        },
        _ => Err(nameless.into()),
    }
}

/// As [`parent`], for a name that is not to be a directory's: a slash after it is an error.
pub(super) fn parent_of_file(fs: &Fs, path: &Path, nameless: Errno) -> Result<(InodeRef, Vec<u8>)> {
    let (dir, name) = parent(fs, path, nameless)?;
    if wants_dir(path) {
        let errno = if is_dir(&dir.lookup(&name)?) { nameless } else { Errno::NOTDIR };
        return Err(errno.into());
    }
    Ok((dir, name))
}

fn is_dir(inode: &InodeRef) -> bool {
    inode.attr().kind() == FileKind::Directory
}

fn walk(fs: &Fs, mut rest: VecDeque<Vec<u8>>, follow_last: bool) -> Result<Located> {
    let mut links = 0;
    // The directories above `here`, for `..` and relative links.
    let mut above: Vec<InodeRef> = Vec::new();
    let mut here = fs.root()?;
    while let Some(name) = rest.pop_front() {
        if name == b".." {
            if !is_dir(&here) {
                return Err(Errno::NOTDIR.into());
            }
            here = above.pop().map_or_else(|| fs.root(), Ok)?;
            continue;
        }
        let next = match here.lookup(&name) {
            Err(error) if error.is(Errno::NOENT) && rest.is_empty() => {
                return Ok(Located::Missing { dir: here, name });
            }
            found => found?,
        };
        let is_link = next.attr().kind() == FileKind::Symlink;
        if !is_link || (rest.is_empty() && !follow_last) {
            above.push(here);
            here = next;
            continue;
        }
        links += 1;
        if links > LINKS_MAX {
            return Err(Errno::LOOP.into());
        }
        let target = next.read_link()?;
        if target.first() == Some(&b'/') {
            above.clear();
            here = fs.root()?;
        }
        for name in names(Path::new(OsStr::from_bytes(&target)))?.into_iter().rev() {
            rest.push_front(name);
        }
    }
    Ok(Located::Found(here))
}
