//! One file per command: its arguments, its help, its work.

pub(crate) mod bench;
pub(crate) mod cat;
pub(crate) mod chmod;
pub(crate) mod chown;
pub(crate) mod completions;
pub(crate) mod cp;
pub(crate) mod fsck;
pub(crate) mod get;
pub(crate) mod info;
pub(crate) mod journal;
pub(crate) mod ln;
pub(crate) mod ls;
pub(crate) mod man;
pub(crate) mod mkdir;
pub(crate) mod mkfs;
pub(crate) mod mount;
pub(crate) mod mv;
pub(crate) mod put;
pub(crate) mod recover;
pub(crate) mod resize;
pub(crate) mod rm;
pub(crate) mod sim;
pub(crate) mod snapshot;
pub(crate) mod stat;
pub(crate) mod stats;
pub(crate) mod tree;
pub(crate) mod tune;
pub(crate) mod umount;

use crate::{cli::Command, failure::Result};

/// Runs a command.
pub(crate) fn run(command: Command) -> Result<()> {
    match command {
        Command::Mount(args) => mount::run(args),
        Command::Umount(args) => umount::run(&args),
        Command::Mkfs(args) => mkfs::run(&args),
        Command::Fsck(args) => fsck::run(&args),
        Command::Recover(args) => recover::run(&args),
        Command::Info(args) => info::run(&args),
        Command::Ls(args) => ls::run(&args),
        Command::Cat(args) => cat::run(&args),
        Command::Stat(args) => stat::run(&args),
        Command::Tree(args) => tree::run(&args),
        Command::Tune(args) => tune::run(&args),
        Command::Put(args) => put::run(&args),
        Command::Get(args) => get::run(&args),
        Command::Cp(args) => cp::run(&args),
        Command::Mv(args) => mv::run(&args),
        Command::Ln(args) => ln::run(&args),
        Command::Chmod(args) => chmod::run(&args),
        Command::Chown(args) => chown::run(&args),
        Command::Rm(args) => rm::run(&args),
        Command::Mkdir(args) => mkdir::run(&args),
        Command::Journal(args) => journal::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Sim(args) => sim::run(args),
        Command::Resize(args) => resize::run(&args),
        Command::Snapshot(args) => snapshot::run(&args),
        Command::Stats(args) => stats::run(&args),
        Command::Man(args) => man::run(&args),
        Command::Completions(args) => completions::run(&args),
    }
}
