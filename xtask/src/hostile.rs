//! `cargo xtask hostile`: long campaigns of damaged images.

use std::{path::PathBuf, time::Duration};

use anyhow::Result;
use clap::Args;
use fjord_testkit::hostile::{self, Options, memory::CountingAllocator};

/// Detects allocations of unchecked lengths from an image.
#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Arguments of `cargo xtask hostile`.
#[derive(Debug, Args)]
pub(crate) struct HostileArgs {
    /// Number of damaged images
    #[arg(long, default_value_t = 20_000)]
    rounds: u64,
    /// Seed of the first image; counts up
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Threads
    #[arg(long, default_value_t = 2)]
    threads: usize,
    /// Start no new image after this many seconds
    #[arg(long, value_name = "SECONDS")]
    time: Option<u64>,
    /// Keep images of failed rounds here
    #[arg(long, default_value = "target/hostile-failed")]
    keep: PathBuf,
}

/// Runs the campaign.
pub(crate) fn run(args: &HostileArgs) -> Result<()> {
    let summary = hostile::run(&Options {
        seed: args.seed,
        rounds: args.rounds,
        threads: args.threads.max(1),
        time_max: args.time.map(Duration::from_secs),
        keep_failed_in: Some(crate::workspace().join(&args.keep)),
    })?;
    println!(
        "seeds from {}: {} damaged images, {} opened for writing, {} turned read-only; outcomes by errno: {:?}",
        args.seed, summary.cases, summary.opened, summary.stopped, summary.outcomes
    );
    Ok(())
}
