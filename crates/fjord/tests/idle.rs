//! A file system that nobody uses writes nothing, whatever was done before: under every policy, with both
//! schedulers and pipelines.
//!
//! Time is short here: what happens every five seconds happens every 20 ms, so that quiet means that many
//! periods pass. The counters are those of the device, below the scheduler.

use std::sync::Arc;
use std::time::{Duration, Instant};

use fjord::{
    CommitPipeline, Device, Fs, FsyncPolicyKind, MemDevice, MkfsOptions, MountOptions, Result,
    Scheduler,
};

const PERIOD: Duration = Duration::from_millis(20);
/// Periods without a request after which what was under way has ended.
const SETTLED_PERIODS: u32 = 10;
/// Periods that must pass without a request then.
const QUIET_PERIODS: u32 = 50;
/// A file system that never becomes quiet fails then, on any machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// Requests that change the device.
fn changes(device: &MemDevice) -> u64 {
    let stats = device.stats();
    stats.writes_total().request_count
        + stats.flush_issued_count
        + stats.discards.request_count
        + stats.write_zeroes.request_count
}

/// A bit of everything: names, data, fsyncs, open files that were removed, a truncation.
fn work(fs: &Fs, round: u64) -> Result<()> {
    let dir = format!("/dir-{round}");
    fs.create_dir(&dir)?;
    for number in 0..40 {
        let path = format!("{dir}/{number}");
        fs.write(&path, vec![number; 9000])?;
        if number % 4 == 0 {
            fs.open_file(&path)?.sync_all()?;
        }
    }
    let gone = fs.open_file(format!("{dir}/1"))?;
    for number in 0..20 {
        fs.remove_file(format!("{dir}/{number}"))?;
    }
    drop(gone);
    fs.sync()
}

/// Waits until so many periods have passed without a request; returns how many came until then.
fn wait_for_quiet(device: &MemDevice, periods: u32, what: &str) -> u64 {
    let (begun, first) = (Instant::now(), changes(device));
    let (mut seen, mut since) = (first, Instant::now());
    while since.elapsed() < PERIOD * periods {
        assert!(begun.elapsed() < PATIENCE, "{what}: never quiet");
        std::thread::sleep(PERIOD);
        let now = changes(device);
        if now != seen {
            (seen, since) = (now, Instant::now());
        }
    }
    seen - first
}

#[test]
fn nothing_is_written_when_nothing_is_done() -> Result<()> {
    let policies = [
        FsyncPolicyKind::Compound,
        FsyncPolicyKind::Group,
        FsyncPolicyKind::FastCommit,
        FsyncPolicyKind::Ijournal,
    ];
    for fsync in policies {
        for (scheduler, pipeline) in
            [(Scheduler::Direct, CommitPipeline::Serial), (Scheduler::Epoch, CommitPipeline::Dual)]
        {
            let what = format!("{fsync:?}, {scheduler:?}, {pipeline:?}");
            let device = Arc::new(MemDevice::new(64 << 20));
            let options = MountOptions {
                fsync,
                scheduler,
                pipeline,
                commit_interval: PERIOD,
                writeback_interval: PERIOD,
                ..MountOptions::default()
            };
            let image = MkfsOptions {
                features: "fast_commit,orphan_file".to_owned(),
                ..MkfsOptions::default()
            };
            let fs = Fs::create_on(device.clone(), &image, &options)?;
            if fsync == FsyncPolicyKind::Ijournal {
                assert!(fs.ijournal_areas().is_some_and(|areas| areas.count > 0));
            }
            for round in 0..2 {
                let before = changes(&device);
                work(&fs, round)?;
                wait_for_quiet(&device, SETTLED_PERIODS, &what);
                assert!(changes(&device) > before + 10, "{what}: the work was written");
                let more = wait_for_quiet(&device, QUIET_PERIODS, &what);
                assert_eq!(more, 0, "{what}, round {round}: requests of an idle file system");
            }
            fs.unmount()?;
        }
    }
    Ok(())
}
