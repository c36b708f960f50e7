//! SQLite in all its modes, and the usual ways of making files and names durable, on mounts whose
//! daemon is killed: each fsync policy, waiting and flushing and over the epoch scheduler.
//!
//! What is asked of each mode of SQLite stands in `fjord_testkit::programs::sqlite`, of each
//! pattern in `fjord_testkit::programs::patterns`. `cargo xtask kill9-programs` does the same for longer.

use std::{path::Path, sync::Mutex};

use anyhow::{Context, Result, ensure};
use fjord_testkit::{
    features,
    programs::{self, Policy, SCHEDULERS},
    rng,
    size::pick,
};

/// Two daemons under load would only slow each other down.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn kills(policy: &str) -> Result<()> {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(|broken| broken.into_inner());
    let policy: &Policy = programs::POLICIES
        .iter()
        .find(|known| known.name == policy)
        .context("a policy of the table")?;
    // For each policy and scheduler.
    let rounds = pick(1, 5, 20);
    for scheduler in SCHEDULERS {
        let options = programs::Options {
            rounds,
            seed: rng::seed_from_env("programs killed", 1),
            set: features::by_name(policy.set).context("a set of the table")?,
            program: env!("CARGO_BIN_EXE_fjord").into(),
            mount_args: policy.mount_args(scheduler),
            tune_args: policy.tune_args.iter().map(|arg| (*arg).to_owned()).collect(),
            linux_recovers: policy.linux_recovers,
            with_writeback_cache: true,
            jobs: programs::jobs,
            only: String::new(),
            keep_going: false,
            keep_failed_in: Some(Path::new(env!("CARGO_TARGET_TMPDIR")).join("programs-failed")),
        };
        let summary = programs::run(&options)?;
        println!("{} {scheduler}: {summary:?}", policy.name);
        ensure!(summary.rounds == rounds && summary.counts.acknowledged > 0, "{summary:?}");
    }
    Ok(())
}

#[test]
fn compound() -> Result<()> {
    kills("compound")
}

#[test]
fn group() -> Result<()> {
    kills("group")
}

#[test]
fn fast_commit() -> Result<()> {
    kills("fast-commit")
}

#[test]
fn ijournal() -> Result<()> {
    kills("ijournal")
}

/// LMDB, RocksDB and SQLite sync nothing, and are whole all the same: with `data=journal` everything is as it was at
/// one moment.
#[test]
fn data_journal_keeps_the_order_of_all_writes() -> Result<()> {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(|broken| broken.into_inner());
    let rounds = pick(2, 12, 100);
    let options = programs::Options {
        rounds,
        seed: rng::seed_from_env("unsynced programs killed", 1),
        set: features::by_name("default").context("a set of the table")?,
        program: env!("CARGO_BIN_EXE_fjord").into(),
        mount_args: vec!["-o".to_owned(), "data=journal,commit=1".to_owned()],
        tune_args: Vec::new(),
        linux_recovers: true,
        with_writeback_cache: false,
        jobs: programs::unsynced_jobs,
        only: String::new(),
        keep_going: false,
        keep_failed_in: Some(Path::new(env!("CARGO_TARGET_TMPDIR")).join("programs-failed")),
    };
    let summary = programs::run(&options)?;
    println!("{summary:?}");
    ensure!(summary.rounds == rounds && summary.counts.acknowledged > 0, "{summary:?}");
    Ok(())
}
