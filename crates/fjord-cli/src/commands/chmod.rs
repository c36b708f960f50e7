//! `fjord chmod`: change permission bits.

use std::path::PathBuf;

use fjord::{Cred, FileKind, SetAttr};

use crate::{
    failure::Result,
    image,
    mode_change::ModeChange,
    paths::{self, Last},
    targets, users,
};

#[derive(Debug, clap::Args)]
#[command(after_help = "Modes as chmod(1) takes them: octal (644), or symbolic (u+rwX,go-w). A \
symbolic link that is named is followed; links below a directory (-R) are neither followed nor \
changed.\n\n\
Examples:\n  fjord chmod disk.img 4755 /bin/su\n  fjord chmod -R disk.img u=rwX,go=rX /srv/www")]
pub(crate) struct Args {
    /// Image file, block device, or image on a cluster (rbd:POOL/IMAGE)
    pub(crate) image: PathBuf,
    /// Permission bits, octal or symbolic
    #[arg(value_parser = ModeChange::parse, allow_hyphen_values = true)]
    mode: ModeChange,
    /// Files to change
    #[arg(required = true)]
    paths: Vec<String>,
    /// Change directories with all that is in them
    #[arg(short = 'R', long)]
    recursive: bool,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let umask = users::umask();
    image::change(&args.image, |fs| {
        targets::all(&args.paths, |path| {
            let file = paths::find(fs, path, Last::Follow)?;
            targets::for_each(&file, path, args.recursive, &mut |file| {
                let attr = file.attr();
                if attr.kind() == FileKind::Symlink {
                    return Ok(());
                }
                let is_dir = attr.kind() == FileKind::Directory;
                let mode = args.mode.apply(attr.mode, is_dir, umask);
                let change = SetAttr { mode: Some(mode), ..SetAttr::default() };
                file.set_attr(&change, &Cred::root())?;
                Ok(())
            })
        })
    })
}
