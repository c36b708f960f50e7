//! Where `mv`, `cp` and `ln` put things inside an image, in the habits of coreutils.

use fjord::{FileKind, Fs, InodeRef};

use crate::{
    failure::{Context, Failure, Result},
    output,
    paths::{self, Last},
};

/// Where sources go.
pub(crate) enum Destination {
    /// Into this directory, each under its own name.
    Directory(InodeRef),
    /// To this name in this directory. `must_be_dir`: the path ends with a slash.
    Name { dir: InodeRef, name: Vec<u8>, must_be_dir: bool },
}

impl Destination {
    /// What `path` names, for so many sources.
    pub(crate) fn find(fs: &Fs, path: &str, source_count: usize) -> Result<Destination> {
        let found = paths::find(fs, path, Last::Follow);
        if let Ok(dir) = &found
            && dir.attr().kind() == FileKind::Directory
        {
            return Ok(Destination::Directory(dir.clone()));
        }
        if source_count > 1 {
            return Err(Failure::new(format!("{path}: is not a directory, as several files need")));
        }
        let (dir, name) = paths::parent(fs, path)?;
        Ok(Destination::Name { dir, name, must_be_dir: path.ends_with('/') })
    }

    /// The directory and name that something named `own_name` gets.
    pub(crate) fn place(&self, own_name: &[u8], is_dir: bool) -> Result<(InodeRef, Vec<u8>)> {
        match self {
            Destination::Directory(dir) => Ok((dir.clone(), own_name.to_vec())),
            Destination::Name { must_be_dir: true, .. } if !is_dir => {
                Err(Failure::new("the target is no directory, but its path ends with a slash"))
            }
            Destination::Name { dir, name, .. } => Ok((dir.clone(), name.clone())),
        }
    }
}

/// Does something for each of several, also when it fails for some. Tells of all failures but the last,
/// which is the outcome.
pub(crate) fn all<T>(items: &[T], mut each: impl FnMut(&T) -> Result<()>) -> Result<()> {
    let mut outcome = Ok(());
    for item in items {
        if let Err(failure) = each(item)
            && let Err(before) = std::mem::replace(&mut outcome, Err(failure))
        {
            output::complain(before);
        }
    }
    outcome
}

/// What has a name in a directory, if anything has.
pub(crate) fn there(dir: &InodeRef, name: &[u8]) -> Result<Option<InodeRef>> {
    match dir.lookup(name) {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.errno() == libc::ENOENT => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Calls `each` for a file and, with `recursive`, for all below it, directories first. No link below
/// it is followed.
pub(crate) fn for_each(
    file: &InodeRef,
    path: &str,
    recursive: bool,
    each: &mut dyn FnMut(&InodeRef, bool) -> Result<()>,
) -> Result<()> {
    visit(file, true, recursive, each).context(path)
}

fn visit(
    file: &InodeRef,
    is_top: bool,
    recursive: bool,
    each: &mut dyn FnMut(&InodeRef, bool) -> Result<()>,
) -> Result<()> {
    each(file, is_top)?;
    if !recursive || file.attr().kind() != FileKind::Directory {
        return Ok(());
    }
    for name in crate::commands::ls::names(file)? {
        let shown = output::name(&name);
        let child = file.lookup(&name).context(&shown)?;
        visit(&child, false, true, each).context(&shown)?;
    }
    Ok(())
}
