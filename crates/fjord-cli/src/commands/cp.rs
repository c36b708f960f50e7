//! `fjord cp`: copy files inside an image.

use std::path::PathBuf;

use fjord::{FileKind, Fs};
use fjord_tree::{CopyItem, CopyRules, Populated};

use crate::{
    failure::{Context, Failure, Result},
    image, output,
    paths::{self, Last},
    targets::{self, Destination},
    users,
};

#[derive(Debug, clap::Args)]
#[command(
    after_help = "Works as cp(1): without -p or -a a copy belongs to root, has the permission \
bits of the original but for those of the umask, and the time of now; a file that is replaced keeps \
its owner and mode. Holes are kept. A file is replaced when the copy is complete. To copy between an \
image and the host use put and get.\n\n\
Examples:\n  fjord cp disk.img /etc/fstab /etc/fstab.old\n  fjord cp -a disk.img /srv/www /srv/www.new"
)]
pub(crate) struct Args {
    /// Image file or block device
    image: PathBuf,
    /// Files to copy, and where to
    #[arg(required = true, num_args = 2.., value_name = "SOURCE... TARGET")]
    paths: Vec<String>,
    /// Copy directories with all that is in them
    #[arg(short, long, short_alias = 'R')]
    recursive: bool,
    /// Keep modes, owners and times
    #[arg(short, long)]
    preserve: bool,
    /// Keep all: -r, -p, links, extended attributes and access control lists
    #[arg(short, long)]
    archive: bool,
    /// Replace nothing
    #[arg(short, long)]
    no_clobber: bool,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let Some((target, sources)) = args.paths.split_last() else {
        return Err(Failure::usage("a source and a target are needed"));
    };
    let rules = CopyRules {
        attributes: args.preserve || args.archive,
        all: args.archive,
        no_clobber: args.no_clobber,
        umask: users::umask(),
    };
    let bar = output::byte_counter("copying");
    let mut show = |so_far: &Populated| bar.set_position(so_far.bytes);
    let copied = image::change(&args.image, |fs| {
        let destination = Destination::find(fs, target, sources.len())?;
        let mut items = Vec::new();
        // The others are copied when one cannot be.
        let found = targets::all(sources, |source| {
            items.push(item(fs, args, source, &destination).context(source)?);
            Ok(())
        });
        fjord_tree::copy(&items, &rules, &mut show)?;
        found
    });
    bar.finish_and_clear();
    copied
}

/// What a source is, and where it goes.
fn item(fs: &Fs, args: &Args, source: &str, destination: &Destination) -> Result<CopyItem> {
    let recursive = args.recursive || args.archive;
    let last = if recursive { Last::Keep } else { Last::Follow };
    let file = paths::find(fs, source, last)?;
    let is_dir = file.attr().kind() == FileKind::Directory;
    if is_dir && !recursive {
        return Err(Failure::new("is a directory; copy it with -r"));
    }
    let own_name = source.trim_end_matches('/').rsplit('/').next().unwrap_or_default();
    if matches!(own_name, "" | "." | "..") && matches!(destination, Destination::Directory(_)) {
        return Err(Failure::new("a name is needed at the end of the target"));
    }
    let (dir, name) = destination.place(own_name.as_bytes(), is_dir)?;
    if targets::there(&dir, &name)?.is_some_and(|there| there.ino() == file.ino()) {
        return Err(Failure::new("source and target are the same file"));
    }
    Ok(CopyItem { file, dir, name })
}
