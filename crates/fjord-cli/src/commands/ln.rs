//! `fjord ln`: more names, and symbolic links.

use std::path::PathBuf;

use fjord::{Cred, FileKind, Fs, InodeRef, RenameFlags};

use crate::{
    failure::{Context, Failure, Result},
    image,
    paths::{self, Last},
    targets::{self, Destination},
};

#[derive(Debug, clap::Args)]
#[command(
    after_help = "Works as ln(1): a hard link is one more name of a file in the image; the text \
of a symbolic link (-s) is taken as it is.\n\n\
Examples:\n  fjord ln disk.img /bin/busybox /bin/sh\n  fjord ln -s disk.img ../usr/lib /lib\n  \
fjord ln -sf disk.img /run /var/run"
)]
pub(crate) struct Args {
    /// Image file or block device
    image: PathBuf,
    /// Files (or texts of symbolic links), and the name of the link or a directory for links
    #[arg(required = true, num_args = 2.., value_name = "TARGET... LINK")]
    paths: Vec<String>,
    /// Make symbolic links
    #[arg(short, long)]
    symbolic: bool,
    /// Replace a file that has the name
    #[arg(short, long)]
    force: bool,
    /// Take a link to a directory as the name of the link, not as a directory for links
    #[arg(short, long)]
    no_dereference: bool,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let Some((link, originals)) = args.paths.split_last() else {
        return Err(Failure::usage("a target and the name of a link are needed"));
    };
    image::change(&args.image, |fs| {
        let destination = destination(fs, args, link, originals.len())?;
        originals
            .iter()
            .try_for_each(|original| link_one(fs, args, original, &destination).context(original))
    })
}

fn destination(fs: &Fs, args: &Args, link: &str, count: usize) -> Result<Destination> {
    let is_link = args.no_dereference
        && paths::find(fs, link, Last::Keep).is_ok_and(|f| f.attr().kind() == FileKind::Symlink);
    if is_link && count == 1 {
        let (dir, name) = paths::parent(fs, link)?;
        return Ok(Destination::Name { dir, name, must_be_dir: false });
    }
    Destination::find(fs, link, count)
}

fn link_one(fs: &Fs, args: &Args, original: &str, destination: &Destination) -> Result<()> {
    let own_name = original.trim_end_matches('/').rsplit('/').next().unwrap_or_default();
    let (dir, name) = destination.place(own_name.as_bytes(), false)?;
    let make = |name: &[u8]| -> Result<()> {
        if args.symbolic {
            return Ok(dir.symlink(name, original.as_bytes(), &Cred::root()).map(drop)?);
        }
        let file = paths::find(fs, original, Last::Keep)?;
        if file.attr().kind() == FileKind::Directory {
            return Err(Failure::new("a directory has one name only; use -s"));
        }
        Ok(dir.link(&file, name)?)
    };
    let Some(there) = targets::there(&dir, &name)? else { return make(&name) };
    if there.attr().kind() == FileKind::Directory {
        return Err(Failure::new("a directory has the name of the link"));
    }
    if !args.force {
        return Err(Failure::new("the name of the link is in use; replace it with -f"));
    }
    if !args.symbolic && paths::find(fs, original, Last::Keep)?.ino() == there.ino() {
        return Ok(());
    }
    drop(there);
    replace(&dir, &name, &make)
}

/// Makes a link beside what has the name, and renames it.
fn replace(dir: &InodeRef, name: &[u8], make: &dyn Fn(&[u8]) -> Result<()>) -> Result<()> {
    let beside = format!(".fjord-{}", std::process::id()).into_bytes();
    make(&beside)?;
    let renamed = dir.rename(&beside, dir, name, RenameFlags::empty(), &Cred::root());
    if renamed.is_err() {
        // The error is the one that counts.
        let _ = dir.unlink(&beside);
    }
    Ok(renamed?)
}
