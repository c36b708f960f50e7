//! Where `mv`, `cp` and `ln` put things inside an image, in the habits of coreutils, and walks for
//! `chmod -R` and `chown -R`.
//!
//! Invariant: no symbolic link below a directory is followed, and a walk ends also in an image whose
//! directories are damaged so that they contain themselves.

use std::collections::HashSet;

use fjord::{FileKind, Fs, InodeRef};

use crate::{
    failure::{Context, EXIT_DAMAGED, Failure, Result},
    output,
    paths::{self, Last},
};

/// Where sources go.
pub(crate) enum Destination {
    /// Into this directory, each under its own name.
    Directory {
        dir: InodeRef,
        /// For messages.
        path: String,
    },
    /// To a name that no directory has.
    Name(Spot),
}

/// A name in a directory of the image.
#[derive(Clone)]
pub(crate) struct Spot {
    pub(crate) dir: InodeRef,
    pub(crate) name: Vec<u8>,
    /// For messages, and with a slash at its end if only a directory may have the name.
    pub(crate) path: String,
}

impl Destination {
    /// What `path` names, for so many sources.
    pub(crate) fn find(fs: &Fs, path: &str, source_count: usize) -> Result<Destination> {
        let found = paths::find(fs, path, Last::Follow);
        if let Ok(dir) = &found
            && dir.attr().kind() == FileKind::Directory
        {
            return Ok(Destination::Directory { dir: dir.clone(), path: path.to_owned() });
        }
        if source_count > 1 {
            let message = format!("{path}: is not a directory; several files need one");
            return Err(Failure::new(message));
        }
        Destination::name(fs, path)
    }

    /// The name `path`, whatever has it.
    pub(crate) fn name(fs: &Fs, path: &str) -> Result<Destination> {
        let (dir, name) = paths::parent(fs, path)?;
        Ok(Destination::Name(Spot { dir, name, path: path.to_owned() }))
    }

    /// Where something goes whose path is `source`.
    pub(crate) fn spot(&self, source: &str, is_dir: bool) -> Result<Spot> {
        match self {
            Destination::Directory { dir, path } => {
                let name = last_name(source);
                if matches!(name, "" | "." | "..") {
                    let message = "its path has no name at the end; name the target in full";
                    return Err(Failure::new(message));
                }
                let path = format!("{}/{name}", path.trim_end_matches('/'));
                Ok(Spot { dir: dir.clone(), name: name.as_bytes().to_vec(), path })
            }
            Destination::Name(spot) if spot.path.ends_with('/') && !is_dir => {
                let path = &spot.path;
                let message =
                    format!("{path}: no directory has this name; leave out the slash at the end");
                Err(Failure::new(message))
            }
            Destination::Name(spot) => Ok(spot.clone()),
        }
    }
}

impl Spot {
    /// What has the name, if anything has.
    pub(crate) fn there(&self) -> Result<Option<InodeRef>> {
        match self.dir.lookup(&self.name) {
            Ok(found) => Ok(Some(found)),
            Err(error) if error.errno() == libc::ENOENT => Ok(None),
            Err(error) => Err(error).context(&self.path),
        }
    }
}

/// The name at the end of a path; slashes behind it do not count.
pub(crate) fn last_name(path: &str) -> &str {
    path.trim_end_matches('/').rsplit('/').next().unwrap_or_default()
}

/// Does something for each of several, also when it fails for some. Prints all failures but the last,
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

/// A directory was met a second time on the way down.
pub(crate) fn two_paths() -> Failure {
    let message = "the directory has two paths; run e2fsck -f on the image".to_owned();
    Failure { code: EXIT_DAMAGED, message }
}

/// Calls `each` for a file and, with `recursive`, for all below it, directories before what is in
/// them.
///
/// # Errors
/// The first failure, with the path at which it happened.
pub(crate) fn for_each(
    file: &InodeRef,
    path: &str,
    recursive: bool,
    each: &mut dyn FnMut(&InodeRef) -> Result<()>,
) -> Result<()> {
    let mut waiting = vec![(file.clone(), path.to_owned())];
    let mut seen = HashSet::new();
    while let Some((file, path)) = waiting.pop() {
        each(&file).context(&path)?;
        if !recursive || file.attr().kind() != FileKind::Directory {
            continue;
        }
        if !seen.insert(file.ino()) {
            return Err(two_paths().context(path));
        }
        for name in crate::commands::ls::names(&file).context(&path)? {
            let below = format!("{}/{}", path.trim_end_matches('/'), output::name(&name));
            let child = file.lookup(&name).context(&below)?;
            // Only directories can wait: of a large one not each file is kept in memory.
            if child.attr().kind() == FileKind::Directory {
                waiting.push((child, below));
            } else {
                each(&child).context(&below)?;
            }
        }
    }
    Ok(())
}
