//! `fjord ln`: more names, and symbolic links.

use std::path::PathBuf;

use fjord::{Cred, FileKind, Fs, InodeRef, RenameFlags};

use crate::{
    failure::{Context, Failure, Result},
    image,
    paths::{self, Last},
    targets::{self, Destination, Spot},
};

#[derive(Debug, clap::Args)]
#[command(
    after_help = "As ln(1): a hard link is one more name of a file in the image; the text of a \
symbolic link (-s) is stored as it is given. With -f a file that has the name is replaced \
atomically.\n\n\
Examples:\n  fjord ln disk.img /bin/busybox /bin/sh\n  fjord ln -s disk.img ../usr/lib /lib\n  \
fjord ln -sf disk.img /run /var/run"
)]
pub(crate) struct Args {
    /// Image file, block device, or image on a cluster (rbd:POOL/IMAGE)
    pub(crate) image: PathBuf,
    /// Files that get one more name; with -s, texts of symbolic links
    #[arg(required = true, value_name = "TARGET")]
    targets: Vec<String>,
    /// Name of the link, or the directory that receives the links
    link: String,
    /// Make symbolic links
    #[arg(short, long)]
    symbolic: bool,
    /// Replace a file that has the name
    #[arg(short, long)]
    force: bool,
    /// Take a symbolic link to a directory as the name of the link, not as a directory for links
    #[arg(short, long)]
    no_dereference: bool,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let originals = &args.targets;
    image::change(&args.image, |fs| {
        let destination = destination(fs, args, &args.link, originals.len())?;
        targets::all(originals, |original| link_one(fs, args, original, &destination))
    })
}

fn destination(fs: &Fs, args: &Args, link: &str, count: usize) -> Result<Destination> {
    let is_link = args.no_dereference
        && paths::find(fs, link, Last::Keep).is_ok_and(|f| f.attr().kind() == FileKind::Symlink);
    match is_link && count == 1 {
        true => Destination::name(fs, link),
        false => Destination::find(fs, link, count),
    }
}

fn link_one(fs: &Fs, args: &Args, original: &str, destination: &Destination) -> Result<()> {
    let spot = destination.spot(original, false).context(original)?;
    let Spot { dir, name, path } = &spot;
    let file = match args.symbolic {
        true => None,
        false => Some(original_file(fs, original)?),
    };
    let make = |name: &[u8]| -> Result<()> {
        match &file {
            Some(file) => dir.link(file, name).context(path),
            None => dir.symlink(name, original.as_bytes(), &Cred::root()).map(drop).context(path),
        }
    };
    let Some(there) = spot.there()? else { return make(name) };
    if there.attr().kind() == FileKind::Directory {
        return Err(Failure::new(format!("{path}: a directory has the name of the link")));
    }
    if !args.force {
        return Err(Failure::new(format!("{path}: the name is in use; replace the file with -f")));
    }
    if file.as_ref().is_some_and(|file| file.ino() == there.ino()) {
        if is_at(fs, original, &spot) {
            return Err(Failure::new(format!("{path}: target and link are the same name")));
        }
        return Ok(());
    }
    drop(there);
    replace(&spot, &make)
}

/// The file that gets one more name; a symbolic link is taken itself.
fn original_file(fs: &Fs, original: &str) -> Result<InodeRef> {
    let file = paths::find(fs, original, Last::Keep)?;
    match file.attr().kind() {
        FileKind::Directory => {
            Err(Failure::new(format!("{original}: a directory has one name only; use -s")))
        }
        _ => Ok(file),
    }
}

/// Whether a path is this name of this directory.
fn is_at(fs: &Fs, path: &str, spot: &Spot) -> bool {
    let found = paths::parent(fs, path);
    found.is_ok_and(|(dir, name)| dir.ino() == spot.dir.ino() && name == spot.name)
}

/// Makes a link beside what has the name, and renames it.
fn replace(spot: &Spot, make: &dyn Fn(&[u8]) -> Result<()>) -> Result<()> {
    let beside = unused_name(spot)?;
    make(&beside)?;
    let Spot { dir, name, path } = spot;
    let renamed = dir.rename(&beside, dir, name, RenameFlags::empty(), &Cred::root());
    if renamed.is_err() {
        // The error is the one that counts.
        let _ = dir.unlink(&beside);
    }
    renamed.context(path)
}

/// A name that nothing has in the directory.
fn unused_name(spot: &Spot) -> Result<Vec<u8>> {
    let mut number = 0u64;
    loop {
        let name = format!(".fjord-{}-{number}", std::process::id()).into_bytes();
        let tried = Spot { name, ..spot.clone() };
        if tried.there()?.is_none() {
            return Ok(tried.name);
        }
        number += 1;
    }
}
