//! What `fjord umount` says of the image that it leaves. Needs root.

use std::{
    fs::{self, File},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};
use fjord_testkit::{
    image::{self, KernelMount, Scratch},
    tools::{self, Output},
};
use serde_json::Value;

fn program() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_fjord"))
}

fn fjord(args: &[&str], paths: &[&Path]) -> Result<Output> {
    tools::run(Command::new(program()).args(args).args(paths))
}

/// Mounts `img` in the background.
fn mount(img: &Path, dir: &Path, options: &str) -> Result<()> {
    fs::create_dir_all(dir)?;
    fjord(&["mount", "--daemon", "-o", options], &[img, dir])?.ok().map(drop)
}

/// An image whose log has something to replay, as Linux leaves it when it is shut down.
fn dirty_image(scratch: &Scratch) -> Result<PathBuf> {
    let img = scratch.join("image");
    image::make_sparse(&img, 32 << 20)?;
    tools::run(tools::command("mke2fs")?.args(["-q", "-F", "-t", "ext4"]).arg(&img))?.ok()?;
    let mounted = KernelMount::new(&img, "rw")?;
    let file = File::create(mounted.path().join("file"))?;
    file.sync_all()?;
    drop(file);
    image::shut_down(mounted.path())?;
    drop(mounted);
    Ok(img)
}

#[test]
fn a_mount_that_wrote_nothing_is_not_blamed_for_the_dirty_log() -> Result<()> {
    let scratch = Scratch::new("umount-noload")?;
    let img = dirty_image(&scratch)?;
    let before = fs::read(&img)?;
    let dir = scratch.join("mnt");
    mount(&img, &dir, "ro,noload")?;
    fjord(&["umount"], &[&dir])?.ok()?;
    ensure!(fs::read(&img)? == before, "the image was written to");
    Ok(())
}

#[test]
fn data_that_finds_no_room_is_told() -> Result<()> {
    let scratch = Scratch::new("umount-full")?;
    let (below, dir) = (scratch.join("below"), scratch.join("mnt"));
    fs::create_dir(&below)?;
    let mut tmpfs = tools::command("mount")?;
    tools::run(tmpfs.args(["-t", "tmpfs", "-o", "size=24M", "none"]).arg(&below))?.ok()?;
    let outcome = unmounted_when_full(&below.join("image"), &dir);
    tools::run(tools::command("umount")?.arg("-l").arg(&below))?.ok()?;
    outcome
}

fn unmounted_when_full(img: &Path, dir: &Path) -> Result<()> {
    fjord(&["mkfs", "--size", "128M", "-J", "1M"], &[img])?.ok()?;
    mount(img, dir, "writeback=3600")?;
    let file = File::create(dir.join("file"))?;
    file.write_all_at(&vec![7; 48 << 20], 0).context("a write into memory")?;
    drop(file);
    let told = fjord(&["umount"], &[dir])?;
    ensure!(told.code == Some(1), "{told:?}");
    let words = told.stderr;
    ensure!(words.contains("are lost") && words.contains("is full"), "{words}");
    image::e2fsck_clean(img).map(drop)
}

#[test]
fn what_went_wrong_at_the_mount_is_among_the_events() -> Result<()> {
    let scratch = Scratch::new("umount-events")?;
    let img = scratch.join("image");
    image::make_sparse(&img, 32 << 20)?;
    tools::run(tools::command("mke2fs")?.args(["-q", "-F", "-t", "ext4"]).arg(&img))?.ok()?;
    let mut debugfs = tools::command("debugfs")?;
    tools::run(debugfs.args(["-w", "-R", "ssv last_orphan 1"]).arg(&img))?.ok()?;
    let dir = scratch.join("mnt");
    mount(&img, &dir, "rw")?;
    let stats = fjord(&["stats", "--json"], &[&dir])?.ok()?;
    fjord(&["umount"], &[&dir])?.ok()?;
    let stats: Value = serde_json::from_slice(stats.stdout.as_bytes())?;
    let events = stats["health"]["events"].as_array().context("no list of events")?;
    let is_told = |event: &Value| {
        event["message"].as_str().is_some_and(|told| told.contains("orphan record is ignored"))
    };
    ensure!(events.iter().any(is_told), "{events:?}");
    Ok(())
}
