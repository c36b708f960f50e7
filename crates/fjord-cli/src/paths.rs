//! Paths inside an image.

use fjord::{Error, FileKind, Fs, InodeRef};
use rustix::io::Errno;

use crate::{
    failure::{Context, Failure, Result},
    output,
};

/// Linux's limit of symbolic links in a path.
const LINKS_MAX: u32 = 40;
/// What to do about a missing directory.
const MAKE_IT: &str = "; make it with `fjord mkdir -p`";

/// Whether a symbolic link at the end of a path is followed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Last {
    Follow,
    Keep,
}

/// The file at `path`, which starts at the root with or without a slash. Links are resolved inside
/// the image. A path that ends in a slash (or `/.`) is that of a directory: a link before it is
/// followed in any case.
pub(crate) fn find(fs: &Fs, path: &str, last: Last) -> Result<InodeRef> {
    let root = fs.root().context("the root directory")?;
    let mut links_left = LINKS_MAX;
    let is_directory = path.ends_with('/') || path.ends_with("/.");
    let last = if is_directory { Last::Follow } else { last };
    let found = walk(&root, vec![root.clone()], path.as_bytes(), last, &mut links_left);
    let (_, file) = found.map_err(|error| match error.errno() {
        libc::ENOENT => Failure::new(format!("{path}: no such file or directory in the image")),
        _ => Failure::from(error).context(path),
    })?;
    if is_directory && file.attr().kind() != FileKind::Directory {
        return Err(Error::from(Errno::NOTDIR)).context(path);
    }
    Ok(file)
}

/// Fails if `path` ends in a slash and `file`, which has its name, is no directory. Calls that change
/// names follow no link there, so the path names neither the link nor what it leads to.
pub(crate) fn check_slash(path: &str, file: &InodeRef) -> Result<()> {
    let what = match file.attr().kind() {
        _ if !path.ends_with('/') => return Ok(()),
        FileKind::Directory => return Ok(()),
        FileKind::Symlink => "a symbolic link",
        _ => "not a directory",
    };
    let message = format!("{path}: is {what}; leave out the slash at the end to name it");
    Err(Failure::new(message))
}

/// The directory that holds `path`, and the name in it.
pub(crate) fn parent(fs: &Fs, path: &str) -> Result<(InodeRef, Vec<u8>)> {
    parent_of(fs, path.as_bytes(), "")
}

/// As [`parent`], of something that is to be made there.
pub(crate) fn parent_of_new(fs: &Fs, path: &str) -> Result<(InodeRef, Vec<u8>)> {
    parent_of(fs, path.as_bytes(), MAKE_IT)
}

/// The directory at `path`, links followed, that is to receive something; `None` if it is another
/// kind of file, which a slash at the end of the path does not permit.
pub(crate) fn receiving(fs: &Fs, path: &str) -> Result<Option<InodeRef>> {
    let root = fs.root().context("the root directory")?;
    let mut links_left = LINKS_MAX;
    match walk(&root, vec![root.clone()], path.as_bytes(), Last::Follow, &mut links_left) {
        Ok((_, found)) if found.attr().kind() == FileKind::Directory => Ok(Some(found)),
        Ok(_) if path.ends_with('/') => Err(Error::from(Errno::NOTDIR)).context(path),
        Ok(_) => Ok(None),
        Err(error) if error.errno() == libc::ENOENT && !path.ends_with('/') => Ok(None),
        Err(error) => Err(missing(path.as_bytes(), error, MAKE_IT)),
    }
}

/// The failure to find a directory; `hint` ends the message if it is missing.
fn missing(dir: &[u8], error: Error, hint: &str) -> Failure {
    let dir = output::name(dir);
    match error.errno() {
        libc::ENOENT => Failure::new(format!("{dir}: no such directory in the image{hint}")),
        _ => Failure::from(error).context(dir),
    }
}

/// As [`parent`], of the file that a path leads to: symbolic links at its end are followed.
pub(crate) fn parent_followed(fs: &Fs, path: &str) -> Result<(InodeRef, Vec<u8>)> {
    let mut way = path.as_bytes().to_vec();
    for _ in 0..LINKS_MAX {
        let (dir, name) = parent_of(fs, &way, MAKE_IT)?;
        let found = match dir.lookup(&name) {
            Err(error) if error.errno() == libc::ENOENT && way != path.as_bytes() => {
                return Err(Failure::new("a symbolic link to nothing; remove it first"))
                    .context(path);
            }
            Err(error) if error.errno() == libc::ENOENT => return Ok((dir, name)),
            found => found.context(path)?,
        };
        if found.attr().kind() != FileKind::Symlink {
            return Ok((dir, name));
        }
        let target = found.read_link().context(path)?;
        let end = way.iter().rposition(|byte| *byte != b'/').map_or(0, |last| last + 1);
        let above = way[..end].iter().rposition(|byte| *byte == b'/').map_or(0, |slash| slash + 1);
        way.truncate(if target.first() == Some(&b'/') { 0 } else { above });
        way.extend_from_slice(&target);
    }
    Err(Failure::new("too many symbolic links").context(path))
}

/// `hint` ends the message about a missing directory.
fn parent_of(fs: &Fs, path: &[u8], hint: &str) -> Result<(InodeRef, Vec<u8>)> {
    let shown = output::name(path);
    let end = path.iter().rposition(|byte| *byte != b'/').map_or(0, |last| last + 1);
    let name_at = path[..end].iter().rposition(|byte| *byte == b'/').map_or(0, |slash| slash + 1);
    let (dir, name) = path[..end].split_at(name_at);
    if matches!(name, b"" | b"." | b"..") {
        return Err(Failure::new(format!("{shown}: the path must end in a name")));
    }
    let root = fs.root().context("the root directory")?;
    let mut links_left = LINKS_MAX;
    let found = walk(&root, vec![root.clone()], dir, Last::Follow, &mut links_left);
    let (_, dir) = found.map_err(|error| missing(dir, error, hint))?;
    if dir.attr().kind() != FileKind::Directory {
        return Err(Failure::new(format!("{shown}: its parent is not a directory")));
    }
    Ok((dir, name.to_vec()))
}

/// Walks from the last of `above`; returns the directories on the way and the file.
fn walk(
    root: &InodeRef,
    mut above: Vec<InodeRef>,
    path: &[u8],
    last: Last,
    links_left: &mut u32,
) -> Result<(Vec<InodeRef>, InodeRef), Error> {
    if path.first() == Some(&b'/') {
        above.truncate(1);
    }
    let names: Vec<&[u8]> =
        path.split(|&b| b == b'/').filter(|n| !n.is_empty() && *n != b".").collect();
    for (i, name) in names.iter().enumerate() {
        if *name == b".." {
            if above.len() > 1 {
                above.pop();
            }
            continue;
        }
        let here = above.last().unwrap_or(root);
        let next = here.lookup(name)?;
        let at_end = i + 1 == names.len();
        if next.attr().kind() == FileKind::Symlink && (!at_end || last == Last::Follow) {
            if *links_left == 0 {
                return Err(Errno::LOOP.into());
            }
            *links_left -= 1;
            let target = next.read_link()?;
            let (passed, found) = walk(root, above, &target, Last::Follow, links_left)?;
            above = passed;
            above.push(found);
        } else {
            above.push(next);
        }
    }
    let found = above.last().unwrap_or(root).clone();
    if above.len() > 1 {
        above.pop();
    }
    Ok((above, found))
}
