//! An image file that somebody truncates while it is mounted: reads fail, nothing is promised,
//! and nothing lengthens the file again.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use fjord::{AreaLayout, Cred, Fs, FsyncPolicyKind, MountOptions, Scheduler};
use fjord_testkit::image::{self, Scratch};
use fjord_testkit::tools;

use crate::workload;

const SIZE_BYTES: u64 = 64 << 20;
const LEFT_BYTES: u64 = 3 << 20;
/// Data of a file that reaches beyond what is left.
const DATA_BYTES: usize = 16 << 20;

fn made(scratch: &Scratch) -> Result<PathBuf> {
    let path = scratch.join("image");
    image::make_sparse(&path, SIZE_BYTES)?;
    let mut mke2fs = tools::command("mke2fs")?;
    tools::run(mke2fs.args(["-q", "-F", "-t", "ext4", "-J", "size=4"]).arg(&path))?.ok()?;
    let fs = Fs::open(&path, &workload::options())?;
    let file = fs.root()?.create(b"data", 0o644, &Cred::root())?;
    file.write(0, &vec![9; DATA_BYTES])?;
    drop(file);
    fs.unmount()?;
    Ok(path)
}

fn truncate(path: &Path) -> Result<()> {
    Ok(File::options().write(true).open(path)?.set_len(LEFT_BYTES)?)
}

fn ends(fs: &Fs, path: &Path) -> Result<()> {
    ensure!(fs.is_read_only(), "still writable");
    let first = fs.first_error().context("the error is not kept")?.to_string();
    ensure!(first.contains("the image file was truncated"), "{first}");
    ensure!(fs.unmount().is_err(), "unmount says that all is well");
    let len = path.metadata()?.len();
    ensure!(len == LEFT_BYTES, "{len} bytes, not {LEFT_BYTES}");
    Ok(())
}

#[test]
fn reads_behind_the_end_fail() -> Result<()> {
    let scratch = Scratch::new("truncated")?;
    let path = made(&scratch)?;
    let fs = Fs::open(&path, &workload::options())?;
    let file = fs.resolve("/data")?;
    truncate(&path)?;
    let mut page = vec![0; 4096];
    let error = file.read(DATA_BYTES as u64 - 4096, &mut page).err().context("read zeroes")?;
    ensure!(error.errno() == libc::EIO, "{error}");
    drop(file);
    ends(&fs, &path)
}

/// The first fsync after it says so, by whatever way it goes that flushes.
#[test]
fn an_fsync_promises_nothing() -> Result<()> {
    for scheduler in [Scheduler::Direct, Scheduler::Epoch] {
        let scratch = Scratch::new("truncated")?;
        let path = made(&scratch)?;
        let fsync = FsyncPolicyKind::Compound;
        let options = MountOptions { scheduler, fsync, ..workload::options() };
        let fs = Fs::open(&path, &options)?;
        let file = fs.resolve("/data")?;
        truncate(&path)?;
        file.write(0, &[1; 8192])?;
        let error = file.open().fsync(true).err().context("fsync says that all is well")?;
        ensure!(error.errno() == libc::EIO, "{error}");
        drop(file);
        ends_somewhere(&fs)?;
    }
    Ok(())
}

/// An i-transaction is made durable by FUA writes, without a flush.
#[test]
fn an_fsync_by_an_area_promises_nothing() -> Result<()> {
    for scheduler in [Scheduler::Direct, Scheduler::Epoch] {
        let scratch = Scratch::new("truncated")?;
        let path = made(&scratch)?;
        let fs = Fs::open(&path, &workload::options())?;
        fs.set_ijournal_areas(Some(AreaLayout { count: 2, area_bytes: 256 << 10 }))?;
        fs.unmount()?;
        let fsync = FsyncPolicyKind::Ijournal;
        let options = MountOptions { scheduler, fsync, ..workload::options() };
        let fs = Fs::open(&path, &options)?;
        let file = fs.root()?.create(b"new", 0o644, &Cred::root())?;
        file.write(0, &[1; 8192])?;
        file.open().fsync(false)?;
        truncate(&path)?;
        file.write(0, &[2; 16384])?;
        let error = file.open().fsync(false).err().context("fsync says that all is well")?;
        ensure!(error.errno() == libc::EIO, "{error}");
        drop(file);
        ends_somewhere(&fs)?;
    }
    Ok(())
}

/// As [`ends`]; a write of before may have lengthened the file.
fn ends_somewhere(fs: &Fs) -> Result<()> {
    ensure!(fs.is_read_only(), "still writable");
    let first = fs.first_error().context("the error is not kept")?.to_string();
    ensure!(first.contains("the image file was truncated"), "{first}");
    ensure!(fs.unmount().is_err(), "unmount says that all is well");
    Ok(())
}

/// Without a request of anybody.
#[test]
fn it_is_noticed_in_the_background() -> Result<()> {
    let scratch = Scratch::new("truncated")?;
    let path = made(&scratch)?;
    let options = MountOptions { background_threads: true, ..workload::options() };
    let fs = Fs::open(&path, &options)?;
    truncate(&path)?;
    let deadline = Instant::now() + Duration::from_secs(120);
    while !fs.is_read_only() {
        ensure!(Instant::now() < deadline, "not noticed");
        std::thread::sleep(Duration::from_millis(50));
    }
    ends(&fs, &path)
}
