//! `fjord rm`: remove files.

use std::{collections::HashSet, path::PathBuf};

use fjord::{FileKind, Fs, InodeNo, InodeRef};

use super::ls;
use crate::{
    failure::{Context, Failure, Result},
    image, output, paths, targets,
};

#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  fjord rm -r disk.img /tmp/build")]
pub(crate) struct Args {
    /// Image file, block device, or image on a cluster (rbd:POOL/IMAGE)
    pub(crate) image: PathBuf,
    /// Files to remove
    #[arg(required = true)]
    paths: Vec<String>,
    /// Remove directories and their contents
    #[arg(short, long)]
    recursive: bool,
    /// Ignore files that do not exist
    #[arg(short, long)]
    force: bool,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    image::change(&args.image, |fs| targets::all(&args.paths, |path| remove_one(fs, path, args)))
}

fn remove_one(fs: &Fs, path: &str, args: &Args) -> Result<()> {
    if path.split('/').all(|name| matches!(name, "" | ".")) {
        return Err(Failure::new(format!("{path}: the root directory cannot be removed")));
    }
    let (dir, name) = paths::parent(fs, path)?;
    let file = match dir.lookup(&name) {
        Err(e) if args.force && e.errno() == libc::ENOENT => return Ok(()),
        found => found.context(path)?,
    };
    match paths::check_slash(path, &file) {
        // As rm(1): no directory of this name exists. What a link leads to is not removed.
        Err(_) if args.force && file.attr().kind() != FileKind::Symlink => return Ok(()),
        checked => checked?,
    }
    if file.attr().kind() == FileKind::Directory && !args.recursive {
        return Err(Failure::new(format!("{path}: is a directory; use -r to remove it")));
    }
    remove(&dir, &name, &file, &mut HashSet::new()).context(path)
}

/// Removes a file, or a directory with all that is in it. `seen` has the directories that are being
/// removed: in a damaged image one may lie in itself.
fn remove(dir: &InodeRef, name: &[u8], file: &InodeRef, seen: &mut HashSet<InodeNo>) -> Result<()> {
    if file.attr().kind() != FileKind::Directory {
        return Ok(dir.unlink(name)?);
    }
    if !seen.insert(file.ino()) {
        return Err(targets::two_paths());
    }
    for name in ls::names(file)? {
        let child = file.lookup(&name)?;
        remove(file, &name, &child, seen).context(output::name(&name))?;
    }
    Ok(dir.rmdir(name)?)
}
