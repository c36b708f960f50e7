//! `fjord mv`: rename files.

use std::path::PathBuf;

use fjord::{Cred, FileKind, Fs, RenameFlags};

use crate::{
    failure::{Context, Failure, Result},
    image, paths,
    targets::{self, Destination},
};

#[derive(Debug, clap::Args)]
#[command(
    after_help = "As mv(1) inside one file system: a file that has the new name is replaced \
atomically, an empty directory by a directory. Several files need a directory as the target.\n\n\
Examples:\n  fjord mv disk.img /etc/old.conf /etc/new.conf\n  fjord mv disk.img /a /b /srv/"
)]
pub(crate) struct Args {
    /// Image file, block device, or image on a cluster (rbd:POOL/IMAGE)
    pub(crate) image: PathBuf,
    /// Files to move
    #[arg(required = true, value_name = "SOURCE")]
    sources: Vec<String>,
    /// New name, or the directory that receives the files
    target: String,
    /// Replace nothing
    #[arg(short, long)]
    no_clobber: bool,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    image::change(&args.image, |fs| {
        let destination = Destination::find(fs, &args.target, args.sources.len())?;
        targets::all(&args.sources, |source| move_one(fs, source, &destination, args.no_clobber))
    })
}

fn move_one(fs: &Fs, source: &str, destination: &Destination, no_clobber: bool) -> Result<()> {
    let (from, old_name) = paths::parent(fs, source)?;
    let file = from.lookup(&old_name).context(source)?;
    paths::check_slash(source, &file)?;
    let is_dir = file.attr().kind() == FileKind::Directory;
    let to = destination.spot(source, is_dir).context(source)?;
    let refuse = |why: &str| Err(Failure::new(format!("{source}, to {}: {why}", to.path)));
    if let Some(there) = to.there()? {
        if no_clobber {
            return Ok(());
        }
        if there.ino() == file.ino() {
            // Of two names of one file rename(2) would leave both.
            return refuse("source and target are the same file");
        }
        match (is_dir, there.attr().kind() == FileKind::Directory) {
            (false, true) => return refuse("a directory has the new name"),
            (true, false) => return refuse("a file has the new name, and a directory moves"),
            _ => {}
        }
    }
    match from.rename(&old_name, &to.dir, &to.name, RenameFlags::empty(), &Cred::root()) {
        Err(error) if error.errno() == libc::EINVAL => {
            refuse("a directory cannot be moved into itself")
        }
        Err(error) if error.errno() == libc::ENOTEMPTY => {
            refuse("the directory that has the new name is not empty")
        }
        renamed => renamed.context(format_args!("{source}, to {}", to.path)),
    }
}
