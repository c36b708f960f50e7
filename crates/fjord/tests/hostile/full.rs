//! A sparse image on a disk that fills up, at each page in turn: calls fail with `ENOSPC` and
//! nothing else, what was promised stays, and all is well when there is room again.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use fjord::{Cred, DataMode, Fs, FsyncPolicyKind, MountOptions, Scheduler};
use fjord_block::{FaultDevice, MemDevice, MemImage, SparseRoom};
use fjord_testkit::hostile::base;
use fjord_testkit::image::{self, Scratch};
use fjord_testkit::tools;

use crate::faults::{Setup, Stack, after_power_cut, one_more, policies, policy_setups, timed};
use crate::workload::{self, Promises, Run};

/// Pages that have blocks below: those with content.
fn backed_pages(image: &MemImage) -> Result<HashSet<u64>> {
    let mut backed = HashSet::new();
    let mut page = [0; 4096];
    for number in 0..image.size_bytes() / 4096 {
        image.read_at(number * 4096, &mut page)?;
        if page.iter().any(|&byte| byte != 0) {
            backed.insert(number);
        }
    }
    Ok(backed)
}

fn judge(image: &MemImage, promises: &Promises, e2fsck: bool) -> Result<()> {
    let device = Arc::new(MemDevice::from_image(image));
    workload::check(device.clone(), promises)?;
    if e2fsck {
        image::e2fsck_clean_in_memory(&device.snapshot())?;
    }
    Ok(())
}

/// A run with so many pages left below. `false` if it was enough.
fn one(setup: Setup, options: &MountOptions, left_count: u64, e2fsck: bool) -> Result<bool> {
    let before = setup.image()?;
    let memory = Arc::new(MemDevice::from_image(&before));
    let device = FaultDevice::new(memory.clone()).claiming(|has| setup.stack.claim(has));
    let device = Arc::new(device);
    let backed = backed_pages(&before)?;
    device.with_room(|room| {
        *room = Some(SparseRoom { backed, left_count, ..SparseRoom::default() });
    });
    device.start_recording();
    let counts = || device.with_room(|room| room.clone().unwrap_or_default());
    let fs = match Fs::open_device(device.clone(), options) {
        Ok(fs) => fs,
        Err(error) => {
            ensure!(error.errno() == libc::ENOSPC, "opening reports {error}");
            ensure!(counts().refused_count > 0, "nothing was refused");
            return Ok(true);
        }
    };
    let mut run = Run::new(&fs);
    run.all();
    run.fragments();
    let log = run.log.join("\n  ");
    let is_hit = counts().refused_count > 0;
    // A name that could not be made is not there.
    let is_expected = |errno| matches!(errno, libc::ENOSPC | libc::ENOENT);
    let odd = run.errors.iter().find(|error| !is_expected(error.errno()));
    ensure!(odd.is_none(), "{odd:?}\n  {log}");
    ensure!(is_hit || run.errors.is_empty(), "errors with room for all: {:?}", run.errors);
    ensure!(!fs.is_read_only(), "read-only\n  {log}");
    ensure!(counts().refused_write_count == 0, "a write found no room\n  {log}");
    let promises = run.promises;
    let records = device.take_recording();
    let cut = after_power_cut(&before, &records, setup.stack)?;
    judge(&cut, &promises, e2fsck).with_context(|| format!("after a power cut\n  {log}"))?;

    // With room again all that was accepted goes out.
    let waited = fs.stats().full_below_since.is_some();
    device.with_room(|room| room.iter_mut().for_each(|room| room.left_count = u64::MAX));
    fs.sync().with_context(|| format!("with room again\n  {log}"))?;
    ensure!(fs.stats().dirty_pages_bytes == 0, "something still waits\n  {log}");
    ensure!(fs.stats().full_below_since.is_none(), "still full\n  {log}");
    one_more(&fs)?;
    fs.unmount()?;
    drop(fs);
    judge(&memory.snapshot(), &promises, e2fsck).with_context(|| format!("at the end\n  {log}"))?;
    ensure!(is_hit || !waited, "full without a refusal");
    Ok(is_hit)
}

/// Runs with less and less room, down by `step` pages from what is enough.
fn sweep(setup: Setup, options: &MountOptions, step: usize) -> Result<()> {
    let title = format!("image {}, {setup:?}", base::get(setup.index)?.name);
    let mut hits = 0;
    for (number, left_count) in (0..).step_by(step).enumerate() {
        let (options, e2fsck) = (options.clone(), number % 4 == 0);
        let title = format!("{title}, {left_count} pages left");
        let hit = timed(&title, move || one(setup, &options, left_count, e2fsck))?;
        if !hit.context(title)? {
            break;
        }
        hits += 1;
    }
    println!("{title}: full at {hits} places");
    ensure!(hits > 20, "{title}: full at {hits} places only");
    Ok(())
}

fn sweep_policy(fsync: FsyncPolicyKind) -> Result<()> {
    policy_setups(fsync).into_iter().try_for_each(|setup| sweep(setup, &setup.options(), 5))
}

#[test]
fn full_at_every_page() -> Result<()> {
    let setup = Setup { index: 0, fsync: FsyncPolicyKind::Compound, stack: Stack::Direct };
    sweep(setup, &setup.options(), 1)
}

#[test]
fn full_below_other_images_and_stacks() -> Result<()> {
    // Small blocks, block maps, and the scheduler.
    for (index, stack) in
        [(0, Stack::Epoch), (0, Stack::EpochNative), (1, Stack::Epoch), (3, Stack::Direct)]
    {
        let setup = Setup { index, fsync: FsyncPolicyKind::Compound, stack };
        sweep(setup, &setup.options(), 5)?;
    }
    Ok(())
}

#[test]
fn full_below_finer_policies() -> Result<()> {
    policies().filter(|policy| *policy != FsyncPolicyKind::Auto).try_for_each(sweep_policy)
}

#[test]
fn full_below_journaled_data() -> Result<()> {
    let setup = Setup { index: 0, fsync: FsyncPolicyKind::Compound, stack: Stack::Direct };
    sweep(setup, &MountOptions { data: DataMode::Journal, ..setup.options() }, 5)
}

/// A small tmpfs under a sparse image, unmounted when it is dropped.
struct Below {
    scratch: Scratch,
}

impl Below {
    fn new(size_bytes: u64) -> Result<Below> {
        tools::require_root()?;
        let scratch = Scratch::new("full-below")?;
        let dir = scratch.join("below");
        std::fs::create_dir(&dir)?;
        let size = format!("size={size_bytes}");
        let mut mount = tools::command("mount")?;
        mount.args(["-t", "tmpfs", "-o", &size, "fjord-test"]).arg(&dir);
        tools::run(&mut mount)?.ok()?;
        Ok(Below { scratch })
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.scratch.join("below").join(name)
    }

    /// A sparse image of 64 MiB with a log of 4 MiB that has no blocks yet.
    fn image(&self) -> Result<std::path::PathBuf> {
        let path = self.path("sparse.img");
        image::make_sparse(&path, 64 << 20)?;
        let mut mke2fs = tools::command("mke2fs")?;
        mke2fs.args(["-q", "-F", "-t", "ext4", "-J", "size=4", "-E", "lazy_journal_init=1"]);
        tools::run(mke2fs.arg(&path))?.ok()?;
        Ok(path)
    }
}

impl Drop for Below {
    fn drop(&mut self) {
        if let Err(error) = image::unmount(&self.scratch.join("below")) {
            eprintln!("{error}");
        }
    }
}

fn write_one(fs: &Fs, number: u32) -> fjord::Result<()> {
    let file = fs.root()?.create(format!("f{number}").as_bytes(), 0o644, &Cred::root())?;
    file.write(0, &vec![b'z'; 200_000])?;
    file.open().fsync(false)
}

fn wait_until(what: &str, condition: impl Fn() -> bool) -> Result<()> {
    let deadline = Instant::now() + Duration::from_secs(120);
    while !condition() {
        ensure!(Instant::now() < deadline, "{what}: not after 120 s");
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

/// The file system that holds a sparse image fills up, and gets room again.
fn fill_and_free(options: &MountOptions) -> Result<()> {
    let below = Below::new(16 << 20)?;
    let path = below.image()?;
    let ballast = below.path("ballast");
    std::fs::write(&ballast, vec![1; 9 << 20])?;
    let fs = Fs::open(&path, options)?;
    let mut promised = 0;
    let error = loop {
        match write_one(&fs, promised) {
            Ok(()) => promised += 1,
            Err(error) => break error,
        }
        ensure!(promised < 60, "it never filled up");
    };
    ensure!(error.errno() == libc::ENOSPC, "{error}");
    ensure!(!fs.is_read_only(), "read-only");
    ensure!(fs.stats().full_below_since.is_some(), "the state is not told");
    // What has blocks below can be written, and made durable.
    let old = fs.resolve("/f0")?;
    old.write(0, b"new")?;
    old.open().fsync(false)?;
    // Memory is bounded: a writer hears of it before long.
    let big = fs.root()?.create(b"big", 0o644, &Cred::root());
    if let Ok(big) = &big {
        let piece = vec![7; 1 << 20];
        let refused = (0..40).find_map(|at| big.write(at << 20, &piece).err());
        let Some(error) = refused else { bail!("40 MiB were taken into a cache of 8 MiB") };
        ensure!(error.errno() == libc::ENOSPC, "{error}");
    }
    ensure!(fs.stats().dirty_pages_bytes <= 8 << 20, "{}", fs.stats().dirty_pages_bytes);
    // Nothing lets go of it by itself.
    ensure!(fs.sync().is_err_and(|error| error.errno() == libc::ENOSPC), "sync says all is well");

    std::fs::remove_file(&ballast)?;
    let late = fs.root()?.create(b"late", 0o644, &Cred::root())?;
    if options.background_threads {
        // By itself.
        wait_until("there is room", || fs.stats().full_below_since.is_none())?;
        ensure!(fs.stats().dirty_pages_bytes == 0 || big.is_ok());
    }
    late.write(0, b"late")?;
    late.open().fsync(false)?;
    if let Ok(file) = fs.resolve(format!("/f{promised}")) {
        file.open().fsync(false)?;
        drop(file);
        ensure!(fs.read(format!("f{promised}"))? == vec![b'z'; 200_000]);
    }
    drop((old, big, late));
    fs.unmount()?;
    drop(fs);
    let fs = Fs::open(&path, &workload::options())?;
    for number in 1..promised {
        ensure!(fs.read(format!("f{number}"))? == vec![b'z'; 200_000], "f{number} is lost");
    }
    ensure!(fs.read("f0")?.starts_with(b"newzz"));
    ensure!(fs.read("late")? == b"late");
    fs.unmount()?;
    drop(fs);
    image::e2fsck_clean(&path).map(drop)
}

#[test]
fn the_disk_below_fills_up_and_gets_room_again() -> Result<()> {
    for scheduler in [Scheduler::Direct, Scheduler::Epoch] {
        for background_threads in [false, true] {
            let cache_size_bytes = 8 << 20;
            let options = MountOptions {
                scheduler,
                background_threads,
                cache_size_bytes,
                ..MountOptions::default()
            };
            fill_and_free(&options).with_context(|| {
                format!("{scheduler:?}, background threads: {background_threads}")
            })?;
        }
    }
    Ok(())
}

/// A mount takes the room of its log, or is refused by name; then it needs none to be mounted.
#[test]
fn a_mount_without_room_for_the_log_is_refused() -> Result<()> {
    let below = Below::new(10 << 20)?;
    let path = below.image()?;
    let ballast = below.path("ballast");
    std::fs::write(&ballast, vec![1; 8 << 20])?;
    let error = match Fs::open(&path, &workload::options()) {
        Ok(_) => bail!("mounted without room for the log"),
        Err(error) => error,
    };
    ensure!(error.errno() == libc::ENOSPC, "{error}");
    let place = below.path("").display().to_string();
    ensure!(error.to_string().contains(place.trim_end_matches('/')), "not named: {error}");
    // To look at it needs nothing.
    let read_only = MountOptions { read_only: true, ..workload::options() };
    drop(Fs::open(&path, &read_only)?);
    std::fs::remove_file(&ballast)?;
    let fs = Fs::open(&path, &workload::options())?;
    fs.unmount()?;
    drop(fs);
    fill(&below.path("filler"))?;
    let fs = Fs::open(&path, &workload::options())?;
    let root = fs.root()?;
    root.set_attr(&fjord::SetAttr { mode: Some(0o700), ..Default::default() }, &Cred::root())?;
    root.open().fsync(false)?;
    drop(root);
    fs.unmount()?;
    drop(fs);
    image::e2fsck_clean(&path).map(drop)
}

/// Takes all the room that there is.
fn fill(path: &Path) -> Result<()> {
    use std::io::Write;
    let mut file = std::fs::File::create(path)?;
    while file.write_all(&[1; 4096]).is_ok() {}
    Ok(())
}

/// What cannot be written by the end of the mount is said to be lost; the rest is clean.
#[test]
fn what_found_no_room_is_told_at_the_end() -> Result<()> {
    let below = Below::new(10 << 20)?;
    let path = below.image()?;
    let fs = Fs::open(&path, &workload::options())?;
    let file = fs.root()?.create(b"file", 0o644, &Cred::root())?;
    file.write(0, &vec![5; 100_000])?;
    fill(&below.path("filler"))?;
    drop(file);
    let error = fs.unmount().err().context("unmount says that all is well")?;
    ensure!(error.errno() == libc::ENOSPC, "{error}");
    ensure!(error.to_string().contains("bytes of file data"), "{error}");
    drop(fs);
    image::e2fsck_clean(&path).map(drop)
}
