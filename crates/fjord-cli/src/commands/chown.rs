//! `fjord chown`: change owners.

use std::path::PathBuf;

use fjord::{Cred, SetAttr};

use crate::{
    failure::Result,
    image,
    paths::{self, Last},
    targets,
    users::OwnerChange,
};

#[derive(Debug, clap::Args)]
// -h is chown's own.
#[command(disable_help_flag = true)]
#[command(
    after_help = "Owners are those of chown(1): USER, USER:GROUP, :GROUP, or USER: with the \
user's own group; by number, or by the names that this machine has. As there, a change takes \
set-user-ID and set-group-ID bits and capabilities from files. Links that are named are followed \
(unless -h), links below a directory (-R) are changed themselves.\n\n\
Examples:\n  fjord chown disk.img root:shadow /etc/shadow\n  fjord chown -R disk.img 33:33 /srv/www"
)]
pub(crate) struct Args {
    /// Image file or block device
    image: PathBuf,
    /// New owner, group or both
    #[arg(value_name = "OWNER[:GROUP]", value_parser = OwnerChange::parse)]
    owner: OwnerChange,
    /// Files to change
    #[arg(required = true)]
    paths: Vec<String>,
    /// Change directories with all that is in them
    #[arg(short = 'R', long)]
    recursive: bool,
    /// Change a link itself, not what it leads to
    #[arg(short = 'h', long)]
    no_dereference: bool,
    /// Print help
    #[arg(long, action = clap::ArgAction::Help)]
    help: Option<bool>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let last = if args.no_dereference || args.recursive { Last::Keep } else { Last::Follow };
    let change = SetAttr {
        uid: args.owner.uid,
        gid: args.owner.gid,
        kill_privileges: true,
        ..SetAttr::default()
    };
    image::change(&args.image, |fs| {
        targets::all(&args.paths, |path| {
            let file = paths::find(fs, path, last)?;
            targets::for_each(&file, path, args.recursive, &mut |file, _| {
                file.set_attr(&change, &Cred::root())?;
                Ok(())
            })
        })
    })
}
