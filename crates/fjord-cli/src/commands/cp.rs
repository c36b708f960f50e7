//! `fjord cp`: copy files inside an image.

use std::path::PathBuf;

use fjord::{FileKind, Fs};
use fjord_tree::{CopyItem, CopyRules, Populated};

use crate::{
    failure::{Context, Failure, Result},
    image, output,
    paths::{self, Last},
    targets::{self, Destination, Spot},
    users,
};

#[derive(Debug, clap::Args)]
#[command(
    after_help = "As cp(1): without -p or -a a copy belongs to root, has the permission bits of \
the original without those of the umask, and the time of now. Holes are kept. A file that is there \
is replaced atomically when the copy is complete: it keeps its owner, mode and ACLs; its \
other names (hard links) keep the old content. A source that ends in /. stands for what is in the \
directory. To copy between an image and the host use put and get.\n\n\
Examples:\n  fjord cp disk.img /etc/fstab /etc/fstab.old\n  \
fjord cp -a disk.img /srv/www /srv/www.new\n  fjord cp -a disk.img /etc/. /srv"
)]
pub(crate) struct Args {
    /// Image file, block device, or image on a cluster (rbd:POOL/IMAGE)
    pub(crate) image: PathBuf,
    /// Files to copy
    #[arg(required = true, value_name = "SOURCE")]
    sources: Vec<String>,
    /// New name, or the directory that receives the files
    target: String,
    /// Copy directories with all that is in them; symbolic links are copied, not followed
    #[arg(short, long, short_alias = 'R')]
    recursive: bool,
    /// Keep modes, owners, times and ACLs
    #[arg(short, long)]
    preserve: bool,
    /// Keep all: -r, -p, hard links, extended attributes and capabilities
    #[arg(short, long)]
    archive: bool,
    /// Replace nothing
    #[arg(short, long)]
    no_clobber: bool,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let rules = CopyRules {
        attributes: args.preserve || args.archive,
        all: args.archive,
        no_clobber: args.no_clobber,
        umask: users::umask(),
    };
    let bar = output::byte_counter("copying");
    let mut show = |so_far: &Populated| bar.set_position(so_far.bytes);
    let copied = image::change(&args.image, |fs| {
        let destination = Destination::find(fs, &args.target, args.sources.len())?;
        let mut items = Vec::new();
        // One that cannot be copied does not stop the others.
        let found = targets::all(&args.sources, |source| {
            items.extend(item(fs, args, source, &destination).context(source)?);
            Ok(())
        });
        let (copied, failed) = fjord_tree::copy(&items, &rules, &mut show);
        let mut failed = failed.into_iter().map(Failure::from);
        let Some(last) = failed.next_back() else { return found.map(|()| copied) };
        found.err().into_iter().chain(failed).for_each(output::complain);
        Err(last)
    });
    bar.finish_and_clear();
    let copied = copied?;
    output::copied(&copied.failed, &copied.unkept)
}

/// What a source is, and where it goes; none if it stays as it is.
fn item(fs: &Fs, args: &Args, source: &str, to: &Destination) -> Result<Option<CopyItem>> {
    let recursive = args.recursive || args.archive;
    let last = if recursive { Last::Keep } else { Last::Follow };
    let file = paths::find(fs, source, last)?;
    let kind = file.attr().kind();
    let is_dir = kind == FileKind::Directory;
    if is_dir && !recursive {
        return Err(Failure::new("is a directory; copy it with -r"));
    }
    if let (Destination::Directory { dir, path }, ".") = (to, targets::last_name(source)) {
        let (to, path) = (fjord_tree::Destination::Contents(dir.clone()), path.clone());
        return Ok(Some(CopyItem { file, to, path: path.into_bytes() }));
    }
    let mut spot = to.spot(source, is_dir)?;
    if kind == FileKind::Regular && !(args.no_clobber && spot.there()?.is_some()) {
        // As cp(1): what a link leads to gets the content.
        (spot.dir, spot.name) = paths::parent_followed(fs, &spot.path)?;
    }
    let there = spot.there()?;
    if args.no_clobber && there.is_some() && !is_dir {
        return Ok(None);
    }
    if there.is_some_and(|there| there.ino() == file.ino()) {
        return Err(Failure::new("source and target are the same file"));
    }
    let Spot { dir, name, path } = spot;
    let to = fjord_tree::Destination::Name(dir, name);
    Ok(Some(CopyItem { file, to, path: path.into_bytes() }))
}
