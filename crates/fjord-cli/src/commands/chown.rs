//! `fjord chown`: change owners.

use std::path::PathBuf;

use fjord::{Cred, SetAttr};

use crate::{
    accounts::OwnerChange,
    failure::Result,
    image,
    paths::{self, Last},
    targets,
};

#[derive(Debug, clap::Args)]
// -h is chown's own.
#[command(disable_help_flag = true)]
#[command(
    after_help = "Owners as chown(1) takes them: USER, USER:GROUP, :GROUP, or USER: with the \
user's own group. Names are those of the image's /etc/passwd and /etc/group; where the image has no \
such file, those of this machine. Numbers are always numbers. As with chown(1), files lose \
set-user-ID and set-group-ID bits and capabilities. A symbolic link that is named is followed (not \
with -h or -R); links below a directory are changed themselves, never followed.\n\n\
Examples:\n  fjord chown disk.img root:shadow /etc/shadow\n  \
fjord chown -R disk.img 33:33 /srv/www\n  fjord chown -h disk.img 0:0 /etc/mtab"
)]
pub(crate) struct Args {
    /// Image file, block device, or image on a cluster (rbd:POOL/IMAGE)
    pub(crate) image: PathBuf,
    /// New owner, group or both
    #[arg(value_name = "OWNER[:GROUP]", value_parser = OwnerChange::parse)]
    owner: OwnerChange,
    /// Files to change
    #[arg(required = true)]
    paths: Vec<String>,
    /// Change directories with all that is in them
    #[arg(short = 'R', long)]
    recursive: bool,
    /// Change a symbolic link itself, not what it leads to
    #[arg(short = 'h', long)]
    no_dereference: bool,
    /// Print help
    #[arg(long, action = clap::ArgAction::Help)]
    help: Option<bool>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let last = if args.no_dereference || args.recursive { Last::Keep } else { Last::Follow };
    image::change(&args.image, |fs| {
        let (uid, gid) = args.owner.resolve(fs)?;
        let change = SetAttr { uid, gid, kill_privileges: true, ..SetAttr::default() };
        targets::all(&args.paths, |path| {
            let file = paths::find(fs, path, last)?;
            targets::for_each(&file, path, args.recursive, &mut |file| {
                file.set_attr(&change, &Cred::root())?;
                Ok(())
            })
        })
    })
}
