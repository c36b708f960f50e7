//! The arguments: commands and what they have in common.

use clap::{Parser, Subcommand, builder::Styles};

use crate::commands::{
    bench, cat, chmod, chown, completions, cp, get, info, journal, ln, ls, mkdir, mkfs, mount, mv,
    put, recover, rm, sim, stat, stats, tree, tune, umount,
};

const EXIT_CODES: &str = "\
Exit codes:
  0  done
  1  failed (the message says what to do)
  2  wrong arguments
  3  the image or the mount point is in use
  4  the image is damaged; run e2fsck
  5  the image has a feature that fjord does not support in this way
  6  done, but some things could not be kept (they are listed)

Environment:
  FJORD_LOG    what to log to standard error, as tracing's EnvFilter (fjord_fuse=debug)
  FJORD_SYSLOG the socket to which daemons send warnings and errors (/dev/log)
  FJORD_FSYNC  the fsync policy of mounts that are not told which (auto)";

/// A crash-safe ext4 in user space: make, mount, inspect, edit and repair images
#[derive(Debug, Parser)]
#[command(name = "fjord", version, after_help = EXIT_CODES, styles = Styles::plain())]
#[command(propagate_version = true, max_term_width = 100)]
pub(crate) struct Cli {
    /// Log more (twice: debug, three times: every request)
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub(crate) verbose: u8,

    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Mount an image on a directory
    Mount(mount::Args),
    /// Unmount a directory and wait until the image is clean
    Umount(umount::Args),
    /// Make a new image
    Mkfs(Box<mkfs::Args>),
    /// Show what a mount has done: fsyncs by policy, fallbacks, latency, commits, blocks
    Stats(stats::Args),
    /// Replay the journal and complete interrupted deletions
    Recover(recover::Args),
    /// Change the parameters of an unmounted image
    Tune(tune::Args),
    /// Show superblock, features and journal, as dumpe2fs -h does
    Info(info::Args),
    /// List a directory of an unmounted image
    Ls(ls::Args),
    /// Write files of an unmounted image to standard output
    Cat(cat::Args),
    /// Show all there is to know about a file of an unmounted image
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
    /// Show what is in the journal's log
    Journal(journal::Args),
    /// Measure fjord beside the raw device, the kernel's ext4 and fuse2fs
    Bench(bench::Args),
    /// Serve a modelled device, slow as the real ones are, and cut its power
    Sim(sim::Args),
    /// Print a completion script for a shell
    Completions(completions::Args),
}
