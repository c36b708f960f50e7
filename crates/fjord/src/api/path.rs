//! Path resolution inside an image.

use std::collections::VecDeque;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path};

use rustix::io::Errno;

use crate::attr::FileKind;
use crate::error::Result;
use crate::vfs::{Fs, InodeRef};

/// Symbolic links that one resolution follows at the most (Linux's MAXSYMLINKS).
const LINKS_MAX: usize = 40;

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

/// Walks a path from the root; `follow_last` decides about a link at its end.
pub(super) fn resolve(fs: &Fs, path: &Path, follow_last: bool) -> Result<InodeRef> {
    let start = fs.root()?;
    walk(fs, start, names(path)?.into(), follow_last)
}

/// The directory that holds the last name of a path, and that name.
pub(super) fn parent(fs: &Fs, path: &Path) -> Result<(InodeRef, Vec<u8>)> {
    let mut all = names(path)?;
    match all.pop() {
        None => Err(Errno::EXIST.into()),
        Some(last) if last == b".." => Err(Errno::INVAL.into()),
        Some(last) => Ok((walk(fs, fs.root()?, all.into(), true)?, last)),
    }
}

/// Follows `inode` if it is a symbolic link with an absolute target.
pub(super) fn follow(fs: &Fs, inode: InodeRef) -> Result<InodeRef> {
    if inode.attr().kind() != FileKind::Symlink {
        return Ok(inode);
    }
    let target = inode.read_link()?;
    if target.first() != Some(&b'/') {
        // The directory it is relative to is not known here.
        return Err(Errno::NOTDIR.into());
    }
    resolve(fs, Path::new(std::ffi::OsStr::from_bytes(&target)), true)
}

fn walk(
    fs: &Fs,
    start: InodeRef,
    mut rest: VecDeque<Vec<u8>>,
    follow_last: bool,
) -> Result<InodeRef> {
    let mut links = 0;
    // The directories above `here`, for `..` and relative links.
    let mut above: Vec<InodeRef> = Vec::new();
    let mut here = start;
    while let Some(name) = rest.pop_front() {
        if name == b".." {
            here = above.pop().map_or_else(|| fs.root(), Ok)?;
            continue;
        }
        let next = here.lookup(&name)?;
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
        let path = Path::new(std::ffi::OsStr::from_bytes(&target));
        for name in names(path)?.into_iter().rev() {
            rest.push_front(name);
        }
    }
    Ok(here)
}
