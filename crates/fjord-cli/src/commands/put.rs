//! `fjord put`: copy a file or directory into an image.

use std::{
    fs, io,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};

use fjord::Fs;
use fjord_tree::{Destination, Owners, Populated};

use super::mkdir::parse_mode;
use crate::{
    failure::{Context, Failure, Result},
    image, output, paths, tree_rules, users,
};

#[derive(Debug, clap::Args)]
#[command(
    after_help = "Kept as cp -a keeps it: modes, owners, times, hard links, holes, extended \
attributes, ACLs, capabilities, devices, pipes and sockets. What cannot be kept is \
listed, and the exit code is 6. An existing file in the image is replaced when the new one is \
complete and durable; on failure it stays as it was. Directories are merged. `-` as the source \
reads standard input.\n\n\
Examples:\n  fjord mkdir -p disk.img /srv && fjord put disk.img hello.txt /srv/\n  fjord put -r disk.img ./site /srv/www\n  \
tar c . | fjord put disk.img - /backup.tar"
)]
pub(crate) struct Args {
    /// Image file, block device, or image on a cluster (rbd:POOL/IMAGE)
    pub(crate) image: PathBuf,
    /// File or directory to copy, or - for standard input
    source: PathBuf,
    /// Destination; an existing directory (or a path that ends in a slash) receives it under its
    /// own name
    path: String,
    /// Copy a directory and its contents
    #[arg(short, long)]
    recursive: bool,
    /// Owner of all copied files, instead of their own
    #[arg(long, value_name = "USER:GROUP", value_parser = users::owner)]
    #[arg(conflicts_with_all = ["owner_map", "squash_owner"])]
    owner: Option<(u32, u32)>,
    /// Permission bits of regular files, octal, instead of their own
    #[arg(short, long, value_parser = parse_mode)]
    mode: Option<u16>,
    #[command(flatten)]
    rules: tree_rules::TreeArgs,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let from_stdin = args.source.as_os_str() == "-";
    if !from_stdin {
        check_source(args)?;
    }
    let mut rules = args.rules.rules()?;
    rules.file_mode = args.mode;
    rules.latest = image::latest_time()?;
    if let Some((uid, gid)) = args.owner {
        rules.owners = Owners::squashed(uid, gid);
    }
    let bar = output::byte_counter("copying");
    let mut show = |so_far: &Populated| bar.set_position(so_far.bytes);
    let copied = image::change(&args.image, |fs| {
        if from_stdin {
            let (dir, name) = paths::parent_of_new(fs, &args.path)?;
            if let Ok(there) = dir.lookup(&name) {
                paths::check_slash(&args.path, &there)?;
            }
            let stdin = &mut io::stdin().lock();
            return Ok(fjord_tree::put_stream(stdin, (&dir, &name), &rules, &mut show)?);
        }
        let destination = destination(fs, args)?;
        Ok(fjord_tree::put(&args.source, &destination, &rules, &mut show)?)
    });
    bar.finish_and_clear();
    let copied = copied?;
    output::left_out(&copied.skipped, "");
    output::copied(&copied.failed, &copied.unkept)
}

/// Checks the source before the image is opened.
fn check_source(args: &Args) -> Result<()> {
    let meta = fs::symlink_metadata(&args.source).context(args.source.display())?;
    if meta.is_dir() && !args.recursive {
        let source = args.source.display();
        return Err(Failure::new(format!("{source}: is a directory; copy it with -r")));
    }
    Ok(())
}

/// Destination of the copy.
fn destination(fs: &Fs, args: &Args) -> Result<Destination> {
    match (paths::receiving(fs, &args.path)?, own_name(&args.source)) {
        (Some(dir), Some(name)) => Ok(Destination::Name(dir, name.to_vec())),
        (Some(dir), None) => Ok(Destination::Contents(dir)),
        (None, _) => {
            let (dir, name) = paths::parent_of_new(fs, &args.path)?;
            Ok(Destination::Name(dir, name))
        }
    }
}

/// The name at the end of a path; none for `.`, `..` and the root.
fn own_name(source: &Path) -> Option<&[u8]> {
    if source.as_os_str().as_bytes().ends_with(b"/.") {
        return None;
    }
    source.file_name().map(OsStrExt::as_bytes)
}
