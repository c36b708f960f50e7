//! What `fjord umount` says of the image that it leaves. Needs root.

use std::{
    fs::{self, File},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};
use fjord_testkit::{
    fjord_mount::FjordMount,
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

/// Also right after the kill, while the process is still ending.
#[test]
fn a_killed_process_is_named_as_the_cause() -> Result<()> {
    let scratch = Scratch::new("umount-killed")?;
    let img = scratch.join("image");
    fjord(&["mkfs", "-q", "--size", "64M"], &[&img])?.ok()?;
    for round in 0..8 {
        let mut mount = FjordMount::with_program(program(), &img, &[])?;
        let file = File::create(mount.path().join("file"))?;
        file.write_all_at(b"synced", 0)?;
        file.sync_all()?;
        drop(file);
        // SAFETY: plain system call on a child that has not been waited for.
        ensure!(unsafe { libc::kill(mount.pid() as libc::pid_t, libc::SIGKILL) } == 0);
        let said = fjord(&["umount"], &[mount.path()])?.expect_code(&[1])?;
        let words = ["had died", "everything fsynced is safe"];
        ensure!(words.iter().all(|word| said.stderr.contains(word)), "{round}: {said:?}");
        mount.kill()?;
        mount.detach();
    }
    Ok(())
}

/// A monitor that asks for free space all the time holds the mount for moments; `fjord umount` waits for them.
#[test]
fn who_only_looks_at_the_mount_does_not_keep_it() -> Result<()> {
    let scratch = Scratch::new("umount-polled")?;
    let (img, dir) = (scratch.join("image"), scratch.join("mnt"));
    fjord(&["mkfs", "--size", "32M"], &[&img])?.ok()?;
    for round in 0..10 {
        mount(&img, &dir, "rw")?;
        fs::write(dir.join("file"), vec![round; 100_000])?;
        let is_over = std::sync::atomic::AtomicBool::new(false);
        let said = std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(std::sync::atomic::Ordering::Relaxed) {
                    // It answers from the directory below, once the mount has gone.
                    let _ = rustix::fs::statvfs(&dir);
                    std::thread::sleep(std::time::Duration::from_micros(300));
                }
            });
            let said = fjord(&["umount"], &[&dir]);
            is_over.store(true, std::sync::atomic::Ordering::Relaxed);
            said
        });
        said?.ok().with_context(|| format!("round {round}"))?;
        image::e2fsck_clean(&img)?;
    }
    Ok(())
}
