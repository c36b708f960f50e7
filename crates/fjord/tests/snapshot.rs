//! Snapshots by a program that embeds the engine.

use std::fs::File;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use fjord::snapshot::{self, Reflink, SnapshotError, SnapshotOptions, SnapshotReport};
use fjord::{Cred, Error, Fs, FsyncPolicyKind, MountOptions, Scheduler, ShutdownMode};
use fjord_testkit::image::{self, Scratch};
use fjord_testkit::rng::pattern_vec;
use fjord_testkit::tools;

fn make(path: &Path) -> Result<()> {
    image::make_sparse(path, 96 << 20)?;
    let mut mke2fs = tools::command("mke2fs")?;
    mke2fs.args(["-q", "-F", "-t", "ext4", "-O", "fast_commit"]);
    tools::run(mke2fs.arg(path))?.ok()?;
    Ok(())
}

fn copied<'a>() -> SnapshotOptions<'a> {
    SnapshotOptions { reflink: Reflink::Never, ..SnapshotOptions::default() }
}

/// Fails unless the error is the wanted one.
fn is_failure(error: &Error, wanted: fn(&SnapshotError) -> bool) -> Result<()> {
    let is_it = matches!(error, Error::Snapshot(failure) if wanted(failure));
    ensure!(is_it, "{error}");
    Ok(())
}

/// Each of several threads makes files and fsyncs them, one after the other.
#[test]
fn what_was_fsynced_before_is_in_the_copy() -> Result<()> {
    const THREADS: u64 = 3;
    let scratch = Scratch::new("engine-snapshot")?;
    let (path, copy) = (scratch.join("image"), scratch.join("copy"));
    for policy in [FsyncPolicyKind::Compound, FsyncPolicyKind::Group, FsyncPolicyKind::FastCommit] {
        for scheduler in [Scheduler::Direct, Scheduler::Epoch] {
            make(&path)?;
            let options = MountOptions { fsync: policy, scheduler, ..MountOptions::default() };
            let fs = Fs::open(&path, &options)?;
            let made: Vec<AtomicU64> = (0..THREADS).map(|_| AtomicU64::new(0)).collect();
            let stop = AtomicBool::new(false);
            let work = |thread: usize| -> Result<()> {
                for number in 1.. {
                    if stop.load(Ordering::SeqCst) {
                        break;
                    }
                    let name = format!("{thread}-{number}");
                    let file = fs.root()?.create(name.as_bytes(), 0o644, &Cred::root())?;
                    file.write(0, &pattern_vec(number, 0, 2000))?;
                    file.fsync(false)?;
                    made[thread].store(number, Ordering::SeqCst);
                }
                Ok(())
            };
            let promised = std::thread::scope(|scope| -> Result<Vec<u64>> {
                let threads: Vec<_> =
                    (0..THREADS as usize).map(|n| scope.spawn(move || work(n))).collect();
                while made.iter().any(|made| made.load(Ordering::SeqCst) < 8)
                    && !threads.iter().any(|thread| thread.is_finished())
                {
                    std::thread::yield_now();
                }
                let promised = made.iter().map(|made| made.load(Ordering::SeqCst)).collect();
                let taken = taken_in_time(&fs, &copy);
                stop.store(true, Ordering::SeqCst);
                threads.into_iter().try_for_each(|t| t.join().expect("a thread panicked"))?;
                let report = taken?;
                ensure!(report.size_bytes == 96 << 20 && report.copied_bytes > 0, "{report:?}");
                Ok(promised)
            })?;
            snapshot::settle(&copy)?;
            image::e2fsck_clean(&copy)?;
            let opened = Fs::open(&copy, &MountOptions { read_only: true, ..options.clone() })?;
            for (thread, promised) in promised.into_iter().enumerate() {
                for number in 1..=promised {
                    let file = opened.root()?.lookup(format!("{thread}-{number}").as_bytes())?;
                    let mut found = [0; 2000];
                    ensure!(file.read(0, &mut found)? == 2000);
                    ensure!(found[..] == pattern_vec(number, 0, 2000), "{thread}-{number}");
                }
            }
            fs.unmount()?;
            image::e2fsck_clean(&path)?;
        }
    }
    Ok(())
}

/// Takes another one where the machine is so slow that the limits of time end it.
fn taken_in_time(fs: &Fs, copy: &Path) -> Result<SnapshotReport> {
    let began = Instant::now();
    loop {
        let taken = fs.snapshot_to(&File::create(copy)?, &copied());
        let is_slow = |failure: &SnapshotError| {
            matches!(failure, SnapshotError::SlowCopy(_) | SnapshotError::SlowPause(_))
        };
        match taken {
            Err(error)
                if is_failure(&error, is_slow).is_ok()
                    && began.elapsed() < Duration::from_secs(120) => {}
            taken => return Ok(taken?),
        }
    }
}

#[test]
fn a_file_system_that_ends_or_has_failed_ends_its_snapshots() -> Result<()> {
    let scratch = Scratch::new("engine-snapshot-ends")?;
    let (path, copy) = (scratch.join("image"), scratch.join("copy"));
    make(&path)?;
    let fs = Fs::open(&path, &MountOptions::default())?;
    let file = fs.root()?.create(b"large", 0o644, &Cred::root())?;
    file.write(0, &pattern_vec(1, 0, 20 << 20))?;
    let asked = AtomicU64::new(0);
    let unmounting = || {
        if asked.fetch_add(1, Ordering::SeqCst) == 4 {
            fs.unmount().expect("nothing is wrong with it");
        }
        false
    };
    let options = SnapshotOptions { is_cancelled: Some(&unmounting), ..copied() };
    let error = fs.snapshot_to(&File::create(&copy)?, &options).expect_err("it was unmounted");
    is_failure(&error, |failure| matches!(failure, SnapshotError::Closed))?;
    drop((file, fs));
    image::e2fsck_clean(&path)?;
    // Cancelled by its user.
    let fs = Fs::open(&path, &MountOptions::default())?;
    let options = SnapshotOptions { is_cancelled: Some(&|| true), ..copied() };
    let error = fs.snapshot_to(&File::create(&copy)?, &options).expect_err("it was cancelled");
    is_failure(&error, |failure| matches!(failure, SnapshotError::Cancelled))?;
    // One that was stopped has promised nothing for the copy.
    fs.shutdown(ShutdownMode::NoLogFlush)?;
    ensure!(fs.snapshot_to(&File::create(&copy)?, &copied()).is_err());
    drop(fs);
    // The image itself needs nobody.
    snapshot::copy_image(&path, &File::create(&copy)?, &copied())?;
    snapshot::settle(&copy)?;
    image::e2fsck_clean(&copy)?;
    Ok(())
}
