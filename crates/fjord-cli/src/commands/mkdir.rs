//! `fjord mkdir`: make directories.

use std::path::PathBuf;

use fjord::{Cred, FileKind, Fs};

use crate::{
    failure::{Context, Result},
    image,
    paths::{self, Last},
    targets,
};

#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  fjord mkdir -p disk.img /srv/www/html")]
pub(crate) struct Args {
    /// Image file, block device, or image on a cluster (rbd:POOL/IMAGE)
    pub(crate) image: PathBuf,
    /// Directories to create
    #[arg(required = true)]
    paths: Vec<String>,
    /// Create missing parents; accept directories that exist
    #[arg(short, long)]
    parents: bool,
    /// Permission bits, octal
    #[arg(short, long, value_parser = parse_mode, default_value = "755")]
    mode: u16,
}

/// Permission bits in octal.
pub(super) fn parse_mode(text: &str) -> Result<u16, String> {
    match u16::from_str_radix(text, 8) {
        Ok(mode) if mode <= 0o7777 => Ok(mode),
        _ => Err("expected permission bits in octal, such as 755".into()),
    }
}

pub(crate) fn run(args: &Args) -> Result<()> {
    image::change(&args.image, |fs| {
        targets::all(&args.paths, |path| make(fs, path, args.mode, args.parents))
    })
}

fn make(fs: &Fs, path: &str, mode: u16, parents: bool) -> Result<()> {
    if parents {
        let is_dir = |file: fjord::InodeRef| file.attr().kind() == FileKind::Directory;
        if paths::find(fs, path, Last::Follow).is_ok_and(is_dir) {
            return Ok(());
        }
        if let Some((above, _)) = path.trim_end_matches('/').rsplit_once('/')
            && !above.is_empty()
        {
            make(fs, above, mode, true)?;
        }
    }
    let (dir, name) = paths::parent_of_new(fs, path)?;
    dir.mkdir(&name, mode, &Cred::root()).context(path)?;
    Ok(())
}
