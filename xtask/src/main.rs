//! The developer's commands: `cargo xtask check`, `test`, `images`, `fsx`, `stress`, `hostile`, `crash`,
//! `kill9`, `kill9-programs`, `bench`, `front-end`, `mkfs-bench`, `recovery-bench`, `ceph`, `packages`, `deb`.
//!
//! As root each runs in its own mount namespace, so that no mount is left however it ends.

#[macro_use]
mod say;

mod bench;
mod ceph;
mod check;
mod crash;
mod deb;
mod front_end;
mod hostile;
mod images;
mod kill9_programs;
mod mkfs_bench;
mod mounted;
mod namespace;
mod packages;
mod recovery_bench;
mod supervise;
mod testing;

use anyhow::Result;
use clap::{Parser, Subcommand};

#[derive(Debug, Parser)]
#[command(name = "cargo xtask", about = "The developer's commands of fjord")]
struct Args {
    #[command(subcommand)]
    command: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Format, lints, and the tests of the crates that a change touches: a few minutes
    Check(check::CheckArgs),
    /// Format check, lints, every kind of test once; with --long all of each kind
    Test(testing::TestArgs),
    /// Run one program and take down whatever it leaves (used by test and check)
    #[command(hide = true)]
    Supervise(supervise::SuperviseArgs),
    /// Make an image of each feature set, empty or filled by the kernel
    Images(images::ImagesArgs),
    /// Random operations on one file, compared with a model
    Fsx(mounted::FsxArgs),
    /// All operations from many threads, compared with a model
    Stress(mounted::StressArgs),
    /// Damage images at random and use them through the engine
    Hostile(hostile::HostileArgs),
    /// Cut the power at every moment of many workloads, recover, check
    Crash(Box<crash::CrashArgs>),
    /// Run the benchmarks, and write the figures to docs/benchmarks.md
    Bench(bench::BenchArgs),
    /// Measure ordinary programs on a mount beside the kernel's ext4
    FrontEnd(front_end::FrontEndArgs),
    /// Measure mkfs with contents beside mke2fs -d; prints JSON
    MkfsBench(mkfs_bench::MkfsBenchArgs),
    /// Measure recovery beside e2fsck and Linux; prints JSON
    RecoveryBench(recovery_bench::RecoveryBenchArgs),
    /// Kill the daemon under load, recover, check every promise
    Kill9(mounted::Kill9Args),
    /// Kill the daemon under SQLite and other programs that rely on fsync, recover, check every
    /// promise
    Kill9Programs(kill9_programs::Kill9ProgramsArgs),
    /// Start or end a Ceph cluster on this machine
    Ceph(ceph::CephArgs),
    /// Check that the library crates can be published: metadata, documentation, cargo publish --dry-run
    Packages(packages::PackagesArgs),
    /// Build the Debian package
    Deb(deb::DebArgs),
}

fn main() -> Result<()> {
    let args = Args::parse();
    namespace::enter()?;
    match args.command {
        Task::Check(args) => check::run(&args),
        Task::Test(args) => testing::run(&args),
        Task::Supervise(args) => supervise::run(&args),
        Task::Images(args) => images::run(&args),
        Task::Fsx(args) => mounted::fsx(&args),
        Task::Stress(args) => mounted::stress(&args),
        Task::Hostile(args) => hostile::run(&args),
        Task::Crash(args) => crash::run(&args),
        Task::Bench(args) => bench::run(&args),
        Task::FrontEnd(args) => front_end::run(&args),
        Task::MkfsBench(args) => mkfs_bench::run(&args),
        Task::RecoveryBench(args) => recovery_bench::run(&args),
        Task::Kill9(args) => mounted::kill9(&args),
        Task::Kill9Programs(args) => kill9_programs::run(&args),
        Task::Ceph(args) => ceph::run(&args),
        Task::Packages(args) => packages::run(&args),
        Task::Deb(args) => deb::run(&args),
    }
}

/// The root of the workspace.
fn workspace() -> std::path::PathBuf {
    let here = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here).to_owned()
}
