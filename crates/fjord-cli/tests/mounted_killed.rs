//! Mounts whose process is killed (kill -9), or that end otherwise, while programs work: every fsync's promise is
//! kept.
//!
//! One test at a time: with two processors two daemons under load only slow each other down and blur which
//! one failed.

use std::{path::Path, sync::Mutex};

use anyhow::{Result, ensure};
use fjord_testkit::kill9::{self, End};
use fjord_testkit::{features, io_uring, rng, size::pick};

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn kills(set_name: &str, rounds: u64, mount_args: &[&str]) -> Result<()> {
    kills_of(set_name, &[], rounds, mount_args)
}

fn kills_of(set_name: &str, tune_args: &[&str], rounds: u64, mount_args: &[&str]) -> Result<()> {
    ends_of(End::Kill, set_name, tune_args, rounds, mount_args)
}

fn ends_of(
    end: End,
    set_name: &str,
    tune_args: &[&str],
    rounds: u64,
    mount_args: &[&str],
) -> Result<()> {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(|broken| broken.into_inner());
    let owned = |args: &[&str]| args.iter().map(|arg| (*arg).to_owned()).collect();
    let options = kill9::Options {
        end,
        rounds,
        seed: rng::seed_from_env("kill9", 1),
        workers: 4,
        set: features::by_name(set_name).expect("a set of the table"),
        program: env!("CARGO_BIN_EXE_fjord").into(),
        mount_args: owned(mount_args),
        tune_args: owned(tune_args),
        linux_recovers: !mount_args.iter().any(|arg| arg.contains("ijournal")),
        keep_failed_in: Some(Path::new(env!("CARGO_TARGET_TMPDIR")).join("kill9-failed")),
    };
    let summary = kill9::run(&options)?;
    println!("{set_name} {mount_args:?} {end:?}: {summary:?}");
    ensure!(summary.fsyncs > 0, "nothing was promised");
    Ok(())
}

#[test]
fn kill_9_keeps_every_promise() -> Result<()> {
    kills("default", pick(2, 8, 36), &[])
}

#[test]
fn kill_9_keeps_every_promise_on_1k_blocks() -> Result<()> {
    kills("block-1k", pick(1, 3, 12), &[])
}

#[test]
fn kill_9_keeps_every_promise_on_ext3() -> Result<()> {
    kills("ext3", pick(1, 3, 12), &[])
}

/// The policies other than the default one, with both keepers of order.
#[test]
fn each_fsync_policy_keeps_its_promises_when_killed() -> Result<()> {
    for (set, tune_args, policy) in [
        ("default", &[][..], "fsync=group"),
        ("fast_commit", &[], "fsync=fast-commit"),
        ("default", &["--ijournal", "4x1M"], "fsync=ijournal"),
    ] {
        for scheduler in ["direct", "epoch"] {
            let options = format!("{policy},scheduler={scheduler}");
            kills_of(set, tune_args, pick(1, 2, 5), &["-o", &options])?;
        }
    }
    Ok(())
}

/// Requests over io_uring, over /dev/fuse, and over io_uring once there are many callers.
#[test]
fn each_end_of_a_mount_keeps_every_promise() -> Result<()> {
    let offers = io_uring::is_offered()?;
    for (place, transport) in ["io_uring", "noio_uring", "rw"].into_iter().enumerate() {
        if transport != "noio_uring" && !offers {
            continue;
        }
        for (turn, end) in End::ALL.into_iter().enumerate() {
            // In a short run each way has two ends, and each end one way at least.
            if pick(true, false, false) && (turn + place) % 2 == 1 {
                continue;
            }
            let options = format!("fsync=ijournal,{transport}");
            ends_of(end, "default", &["--ijournal", "4x1M"], pick(1, 2, 8), &["-o", &options])?;
        }
    }
    Ok(())
}
