//! `fjord resize`: more room for an image, whether it is mounted or not.

use std::{
    fs::File,
    path::{Path, PathBuf},
};

use fjord::resize::{NewSize, ResizeReport};
use serde::Serialize;

use crate::{
    failure::{Context, Result},
    image,
    in_use::{self, Found},
    output, size,
};

#[derive(Debug, clap::Args)]
#[command(after_help = "\
SIZE is the size that the file system is to have, such as 2G, or with a plus what is added to it,
such as +512M. Without SIZE it becomes as large as the file or device that it lies in. An image
file grows with it; a block device must have the size already.

A mounted image stays in use meanwhile. Only root and the user who mounted an image can resize its
mount. The new size is durable when the command ends; a crash before that leaves a consistent file
system of the old size, the new one, or one between them.

To make a file system smaller, unmount it and run resize2fs on the image.

Examples:
  fjord resize disk.img 256M
  fjord resize /mnt +64M
  fjord resize disk.img")]
pub(crate) struct Args {
    /// Directory that a fjord mount stands on, or an image file or block device, mounted or not
    pub(crate) target: PathBuf,
    /// New size such as 2G, or +SIZE to add so much
    #[arg(value_parser = new_size)]
    size: Option<Wanted>,
    /// Print the outcome as JSON
    #[arg(long)]
    json: bool,
}

/// A size as it was given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Wanted(NewSize);

fn new_size(text: &str) -> Result<Wanted, String> {
    Ok(Wanted(match text.strip_prefix('+') {
        Some(more) => NewSize::Plus(size::parse(more)?),
        None => NewSize::Bytes(size::parse(text)?),
    }))
}

#[derive(Debug, Serialize)]
struct Outcome<'a> {
    target: &'a Path,
    mounted: bool,
    old_bytes: u64,
    new_bytes: u64,
    old_inodes: u32,
    new_inodes: u32,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let wanted = args.size.map_or(NewSize::Device, |Wanted(size)| size);
    let target = args.target.as_path();
    let found = in_use::find(target)?;
    let mounted = matches!(found, Found::Mount(_));
    let report = match found {
        Found::Mount(dir) => ask(&dir, wanted).context(target.display())?,
        Found::Image => image::change(target, |fs| fs.resize(wanted).context(target.display()))?,
    };
    tell(args, &report, mounted)
}

fn ask(dir: &File, wanted: NewSize) -> Result<ResizeReport> {
    Ok(fjord_fuse::resize::ask(dir, wanted)?)
}

fn tell(args: &Args, report: &ResizeReport, mounted: bool) -> Result<()> {
    let &ResizeReport { old_bytes, new_bytes, old_inodes, new_inodes } = report;
    let target = args.target.as_path();
    if args.json {
        return output::json(&Outcome {
            target,
            mounted,
            old_bytes,
            new_bytes,
            old_inodes,
            new_inodes,
        });
    }
    let target = target.display();
    output::print(if old_bytes == new_bytes {
        format!("{target}: {} as before\n", size::show(old_bytes))
    } else {
        format!(
            "{target}: {} before, {} now; {} inodes more\n",
            size::show(old_bytes),
            size::show(new_bytes),
            new_inodes.saturating_sub(old_inodes)
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_absolute_or_relative() {
        assert_eq!(new_size("2G"), Ok(Wanted(NewSize::Bytes(2 << 30))));
        assert_eq!(new_size("+512M"), Ok(Wanted(NewSize::Plus(512 << 20))));
        for wrong in ["", "+", "-1G", "++1G", "1X"] {
            assert!(new_size(wrong).is_err(), "{wrong}");
        }
    }
}
