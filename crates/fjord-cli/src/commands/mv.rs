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
    after_help = "Works as mv(1) does inside one file system: a file that has the new name is \
replaced, an empty directory by a directory; a directory that is named last gets all others.\n\n\
Examples:\n  fjord mv disk.img /etc/old.conf /etc/new.conf\n  fjord mv disk.img /a /b /srv/"
)]
pub(crate) struct Args {
    /// Image file or block device
    image: PathBuf,
    /// Files to move, and where to
    #[arg(required = true, num_args = 2.., value_name = "SOURCE... TARGET")]
    paths: Vec<String>,
    /// Replace nothing
    #[arg(short, long)]
    no_clobber: bool,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let Some((target, sources)) = args.paths.split_last() else {
        return Err(Failure::usage("a source and a target are needed"));
    };
    image::change(&args.image, |fs| {
        let destination = Destination::find(fs, target, sources.len())?;
        targets::all(sources, |source| {
            move_one(fs, source, &destination, args.no_clobber).context(source)
        })
    })
}

fn move_one(fs: &Fs, source: &str, destination: &Destination, no_clobber: bool) -> Result<()> {
    let (from, old_name) = paths::parent(fs, source)?;
    let file = from.lookup(&old_name)?;
    let is_dir = file.attr().kind() == FileKind::Directory;
    let (to, new_name) = destination.place(&old_name, is_dir)?;
    if let Some(there) = targets::there(&to, &new_name)? {
        if no_clobber {
            return Ok(());
        }
        if there.ino() == file.ino() {
            // Of two names of one file rename(2) would leave both.
            return Err(Failure::new("source and target are the same file"));
        }
        let there_is_dir = there.attr().kind() == FileKind::Directory;
        match (is_dir, there_is_dir) {
            (false, true) => return Err(Failure::new("a directory has the new name")),
            (true, false) => return Err(Failure::new("what is no directory has the new name")),
            _ => {}
        }
    }
    let renamed = from.rename(&old_name, &to, &new_name, RenameFlags::empty(), &Cred::root());
    match renamed {
        Err(error) if error.errno() == libc::EINVAL => {
            Err(Failure::new("a directory cannot be moved into itself"))
        }
        renamed => Ok(renamed?),
    }
}
