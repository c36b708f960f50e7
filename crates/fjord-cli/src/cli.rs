//! The arguments: commands and what they have in common.

use std::path::PathBuf;

use clap::{Parser, Subcommand, builder::Styles};
use fjord::ImageName;

use crate::commands::{
    bench, cat, chmod, chown, completions, cp, fsck, get, info, journal, ln, ls, man, mkdir, mkfs,
    mount, mv, put, recover, resize, rm, sim, snapshot, stat, stats, tree, tune, umount,
};
use crate::size;

const EXIT_CODES: &str = "\
Exit codes:
  0  done
  1  failed (the message says what to do)
  2  wrong arguments
  3  the image or the mount point is in use
  4  the image is damaged; run e2fsck
  5  the image has a feature that fjord does not support for this operation
  6  done, but not everything could be copied (the rest is listed)

Environment:
  FJORD_LOG     what to log to standard error (tracing EnvFilter, such as fjord_fuse=debug)
  FJORD_SYSLOG  the socket to which daemons send warnings and errors (/dev/log)
  FJORD_FSYNC   fsync policy of mounts without --fsync (auto)";

/// A crash-safe ext4 in user space: make, mount, inspect, edit and repair images
#[derive(Debug, Parser)]
#[command(name = "fjord", version, after_help = EXIT_CODES, styles = Styles::plain())]
#[command(propagate_version = true, max_term_width = 100)]
pub(crate) struct Cli {
    /// Log more (twice: debug, three times: every request)
    // After the options of the command, --help and --version.
    #[arg(short, long, global = true, display_order = 2000, action = clap::ArgAction::Count)]
    pub(crate) verbose: u8,

    /// The image is this part of the file, as IMAGE@offset=BYTES+SIZE; for a partition give IMAGE@NUMBER
    #[arg(long, value_name = "BYTES[,SIZE]", global = true, display_order = 1999)]
    #[arg(value_parser = Offset::parse)]
    offset: Option<Offset>,

    #[command(subcommand)]
    pub(crate) command: Command,
}

/// The place of an image in a file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Offset {
    bytes: u64,
    size_bytes: Option<u64>,
}

impl Offset {
    fn parse(text: &str) -> Result<Offset, String> {
        let (bytes, size) = match text.split_once(',') {
            Some((bytes, size)) => (bytes, Some(size::parse(size)?)),
            None => (text, None),
        };
        Ok(Offset { bytes: size::parse(bytes)?, size_bytes: size })
    }

    /// Makes `image` the name of that part of it.
    ///
    /// # Errors
    /// It names a part already.
    pub(crate) fn apply(
        bytes: u64,
        size_bytes: Option<u64>,
        image: &mut PathBuf,
    ) -> Result<(), String> {
        if ImageName::parse(image).is_part() {
            return Err(format!(
                "{} names a part of a file already; give no offset",
                image.display()
            ));
        }
        *image = ImageName::of_bytes(image, bytes, size_bytes);
        Ok(())
    }
}

impl Cli {
    /// Carries out --offset: changes the name of the command's image.
    ///
    /// # Errors
    /// The command has no image, or its image is a part already.
    pub(crate) fn settle(&mut self) -> Result<(), String> {
        let Some(Offset { bytes, size_bytes }) = self.offset else { return Ok(()) };
        let Some(image) = self.command.image_mut() else {
            return Err("--offset is for commands on an image".to_owned());
        };
        Offset::apply(bytes, size_bytes, image)
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Mount an image on a directory
    Mount(mount::Args),
    /// Unmount a directory and wait until the image is clean
    Umount(umount::Args),
    /// Make a new image
    Mkfs(Box<mkfs::Args>),
    /// Show statistics of a mount: fsyncs by policy, fallbacks, latency, commits, blocks
    Stats(stats::Args),
    /// Copy an image as it is at one moment, while it is mounted and in use
    Snapshot(snapshot::Args),
    /// Make an image larger, while it is mounted or not
    Resize(resize::Args),
    /// Replay the journal and complete interrupted deletions
    Recover(recover::Args),
    /// Check and repair an image: recover its journal, then run e2fsck
    Fsck(fsck::Args),
    /// Change the parameters of an unmounted image
    Tune(tune::Args),
    /// Show superblock, features and journal, as dumpe2fs -h does
    Info(info::Args),
    /// List a directory of an unmounted image
    Ls(ls::Args),
    /// Write files of an unmounted image to standard output
    Cat(cat::Args),
    /// Show attributes and extents of a file of an unmounted image
    Stat(stat::Args),
    /// List an unmounted image as a tree
    Tree(tree::Args),
    /// Copy a file or directory into an unmounted image
    Put(put::Args),
    /// Copy a file or directory out of an unmounted image
    Get(get::Args),
    /// Copy files inside an unmounted image
    Cp(cp::Args),
    /// Rename files of an unmounted image
    Mv(mv::Args),
    /// Make hard and symbolic links in an unmounted image
    Ln(ln::Args),
    /// Change permission bits of files of an unmounted image
    Chmod(chmod::Args),
    /// Change owners of files of an unmounted image
    Chown(chown::Args),
    /// Remove files from an unmounted image
    Rm(rm::Args),
    /// Make directories in an unmounted image
    Mkdir(mkdir::Args),
    /// Show the transactions in the journal
    Journal(journal::Args),
    /// Compare fjord with the raw device, the kernel's ext4 and fuse2fs
    Bench(bench::Args),
    /// Simulate a storage device with realistic timing, and cut its power
    Sim(sim::Args),
    /// Print a completion script for a shell
    Completions(completions::Args),
    /// Write the manual pages into a directory
    Man(man::Args),
}

impl Command {
    /// The name of the image that the command works on.
    pub(crate) fn image(&mut self) -> Option<PathBuf> {
        self.image_mut().cloned()
    }

    /// The same, to be changed.
    fn image_mut(&mut self) -> Option<&mut PathBuf> {
        Some(match self {
            Command::Mount(args) => &mut args.image,
            Command::Umount(args) => &mut args.dir,
            Command::Mkfs(args) => &mut args.image,
            Command::Snapshot(args) => &mut args.source,
            Command::Resize(args) => &mut args.target,
            Command::Recover(args) => &mut args.image,
            Command::Fsck(args) => &mut args.image,
            Command::Tune(args) => &mut args.image,
            Command::Info(args) => &mut args.image,
            Command::Ls(args) => &mut args.image,
            Command::Cat(args) => &mut args.image,
            Command::Stat(args) => &mut args.image,
            Command::Tree(args) => &mut args.image,
            Command::Put(args) => &mut args.image,
            Command::Get(args) => &mut args.image,
            Command::Cp(args) => &mut args.image,
            Command::Mv(args) => &mut args.image,
            Command::Ln(args) => &mut args.image,
            Command::Chmod(args) => &mut args.image,
            Command::Chown(args) => &mut args.image,
            Command::Rm(args) => &mut args.image,
            Command::Mkdir(args) => &mut args.image,
            Command::Journal(args) => &mut args.image,
            Command::Stats(_)
            | Command::Bench(_)
            | Command::Sim(_)
            | Command::Completions(_)
            | Command::Man(_) => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, Parser};

    use super::Cli;

    /// The options of a help text, in its order: `-v, --verbose`.
    fn options(help: &str) -> Vec<&str> {
        let lines = help.lines().skip_while(|line| *line != "Options:").skip(1);
        let lines = lines.take_while(|line| line.is_empty() || line.starts_with(' '));
        lines.map(str::trim_start).filter(|line| line.starts_with('-')).collect()
    }

    /// Commands of the examples in a help text.
    fn examples(help: &str) -> Vec<Vec<&str>> {
        let lines = help.lines().skip_while(|line| !matches!(*line, "Example:" | "Examples:"));
        let lines = lines.skip(1).take_while(|line| line.starts_with("  "));
        let commands =
            lines.flat_map(|line| line.split([';', '|', '>']).flat_map(|part| part.split("&&")));
        let words = commands.map(|command| command.split_whitespace().collect::<Vec<_>>());
        words.filter(|words| words.first() == Some(&"fjord")).collect()
    }

    #[test]
    fn the_examples_of_every_help_are_well_formed() {
        let mut tried = 0;
        for command in Cli::command().get_subcommands() {
            let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            assert!(help.contains("Example"), "{} has no example", command.get_name());
            for example in examples(&help) {
                let parsed = Cli::try_parse_from(&example);
                assert!(parsed.is_ok(), "{example:?}: {}", parsed.unwrap_err());
                tried += 1;
            }
        }
        assert!(tried > 40, "{tried} examples");
    }

    #[test]
    fn verbose_is_the_last_option_of_every_help() {
        let mut cli = Cli::command();
        cli.build();
        let names: Vec<String> =
            cli.get_subcommands().map(|command| command.get_name().to_owned()).collect();
        let names = names.into_iter().filter(|name| name != "help");
        let mut seen = 0;
        for name in names {
            let command = cli.find_subcommand_mut(&name).expect("a name of the list");
            for help in [command.render_help(), command.render_long_help()] {
                let help = help.to_string();
                let shown = options(&help);
                let last = shown.last().expect("every command has options");
                assert!(last.starts_with("-v"), "{name}: {shown:?}");
                seen += 1;
            }
        }
        assert!(seen > 30, "{seen} help texts");
        let top = cli.render_help().to_string();
        assert!(options(&top).last().expect("options").starts_with("-v"), "{top}");
    }
}
