//! `fjord get`: copy a file or directory out of an image.

use std::{io, path::PathBuf};

use fjord::FileKind;
use fjord_tree::{ExtractRules, Extracted};

use crate::{
    failure::{Failure, Result},
    image, output,
    paths::{self, Last},
    targets,
};

#[derive(Debug, clap::Args)]
#[command(
    after_help = "Kept as cp -a keeps it: modes, times, hard links, holes, extended attributes, \
access control lists, capabilities, pipes and sockets; for root also owners and devices. What \
cannot be kept is listed, and the exit code is 6; what is damaged is listed, the rest is copied, and the \
exit code is 4. Without root, files belong to the caller unless \
--same-owner is given. An existing file is replaced when its copy is complete; directories are \
merged.\n\nExamples:\n  fjord get disk.img /etc/fstab\n  fjord get -r disk.img /var/log ./logs\n  \
fjord get disk.img /backup.tar - | tar t"
)]
pub(crate) struct Args {
    /// Image file, block device, or image on a cluster (rbd:POOL/IMAGE)
    pub(crate) image: PathBuf,
    /// File or directory in the image
    path: String,
    /// Destination; an existing directory receives it under its own name, - is standard output
    #[arg(default_value = ".")]
    target: PathBuf,
    /// Copy a directory and its contents
    #[arg(short, long)]
    recursive: bool,
    /// Keep owners (the default for root); failures are listed
    #[arg(long)]
    same_owner: bool,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let fs = image::open_to_read(&args.image)?;
    let to_stream = args.target.as_os_str() == "-";
    let last = if to_stream { Last::Follow } else { Last::Keep };
    let file = paths::find(&fs, &args.path, last)?;
    let is_dir = file.attr().kind() == FileKind::Directory;
    if is_dir && to_stream {
        let path = &args.path;
        return Err(Failure::usage(format!(
            "{path}: is a directory; only a file can be written to -"
        )));
    }
    if is_dir && !args.recursive {
        return Err(Failure::new(format!("{}: is a directory; copy it with -r", args.path)));
    }
    let bar = output::byte_counter("copying");
    let mut show = |so_far: &Extracted| bar.set_position(so_far.bytes);
    if to_stream {
        let copied = fjord_tree::extract_to_stream(&file, &mut io::stdout().lock(), &mut show);
        bar.finish_and_clear();
        return copied.map(drop).map_err(Failure::from);
    }
    let rules = ExtractRules { owners: args.same_owner || fjord_tree::is_root() };
    let copied = match targets::last_name(&args.path) {
        name if args.target.is_dir() && !matches!(name, "" | "." | "..") => {
            let name = name.as_bytes();
            fjord_tree::extract_into(&file, &args.target, name, &rules, &mut show)
        }
        _ => fjord_tree::extract(&file, &args.target, &rules, &mut show),
    };
    bar.finish_and_clear();
    let copied = copied?;
    let image = args.image.display();
    let damaged = copied.damaged.iter().map(|line| format!("{image}: {line}"));
    let failed: Vec<String> = damaged.chain(copied.failed).collect();
    let is_damaged = copied.unkept_by_damage || !copied.damaged.is_empty();
    output::copied(&failed, &copied.unkept)
        .map_err(|failure| if is_damaged { failure.of_damage() } else { failure })
}
