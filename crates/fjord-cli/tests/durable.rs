//! What must be on the disk, and what must be told when it is not: syncfs, shutdown, failures of
//! the disk below, the kernel's write cache. Needs root.

use std::{
    fs::{self, File},
    io::Write,
    os::{
        fd::AsRawFd,
        unix::fs::{FileExt, MetadataExt},
    },
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use fjord_testkit::{
    features,
    fjord_mount::{FjordMount, table_line},
    fsx::{self, KernelFile},
    image::{self, KernelMount, Scratch},
    manifest::{Compare, Manifest},
    rng,
    tools::{self, Output},
};

const CACHED: &[&str] = &["--writeback-cache"];

fn program() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_fjord"))
}

/// Runs a command that must succeed.
fn run(command: &mut Command) -> Result<Output> {
    tools::run(command)?.ok()
}

fn place(name: &str) -> Result<(Scratch, PathBuf)> {
    let scratch = Scratch::in_memory(name)?;
    let img = scratch.join("image");
    features::by_name("default").context("a set of the table")?.make(&img)?;
    Ok((scratch, img))
}

fn mount(img: &Path, args: &[&str]) -> Result<FjordMount> {
    FjordMount::with_program(program(), img, args)
}

/// Some files of all sizes in directories, not synced.
fn work(dir: &Path, round: u8) -> Result<()> {
    for index in 0..40usize {
        let sub = dir.join(format!("d{}", index % 5));
        fs::create_dir_all(&sub)?;
        fs::write(sub.join(format!("f{index}")), vec![round; index * index * 97])?;
        fs::rename(sub.join(format!("f{index}")), sub.join(format!("r{round}-{index}")))?;
    }
    let mut grown = File::options().append(true).create(true).open(dir.join("grown"))?;
    grown.write_all(&[round; 7001])?;
    fs::remove_dir_all(dir.join("d3"))?;
    Ok(())
}

/// A copy of the image right after the call, recovered, must hold what was there.
fn durable_after(args: &[&str], sync: impl Fn(&Path) -> Result<()>) -> Result<()> {
    let (scratch, img) = place("durable")?;
    let fuse = mount(&img, args)?;
    for round in 0..4 {
        work(fuse.path(), round)?;
        let expected = Manifest::from_directory(fuse.path())?;
        sync(fuse.path())?;
        let copy = scratch.join("copy");
        image::copy_sparse(&img, &copy)?;
        run(Command::new(program()).arg("recover").arg(&copy))?;
        image::e2fsck_clean(&copy)?;
        let linux = KernelMount::new(&copy, "ro")?;
        let found = Manifest::from_directory(linux.path())?;
        linux.unmount()?;
        // Reading it all for the list moved access times.
        let compare = Compare { atime: false, ..Compare::SAME_SCRIPT };
        expected.diff(&found, &compare).ok("mounted", "in the copy")?;
    }
    fuse.unmount()?;
    image::e2fsck_clean(&img)?;
    Ok(())
}

#[test]
fn syncfs_is_durable() -> Result<()> {
    let syncfs = |dir: &Path| Ok(rustix::fs::syncfs(File::open(dir)?)?);
    durable_after(&[], syncfs)?;
    durable_after(CACHED, syncfs)
}

#[test]
fn sync_is_durable() -> Result<()> {
    durable_after(&[], |_| {
        rustix::fs::sync();
        Ok(())
    })
}

/// Stops the file system as XFS_IOC_GOINGDOWN does.
fn go_down(file: &File, mode: u32) -> Result<()> {
    // SAFETY: the ioctl reads one u32 through a pointer that is valid for the call.
    let rc = unsafe { libc::ioctl(file.as_raw_fd(), 0x8004_587d, &raw const mode) };
    ensure!(rc == 0, "shutdown: {}", std::io::Error::last_os_error());
    Ok(())
}

/// Fsyncs one file, makes another, shuts down; whether the other one's name and content are there
/// after recovery.
fn shut_down_in(dir: &Path, mode: u32) -> Result<()> {
    let kept = File::create(dir.join("kept"))?;
    kept.write_all_at(b"kept", 0)?;
    kept.sync_all()?;
    fs::write(dir.join("late"), b"late")?;
    go_down(&kept, mode)?;
    ensure!(kept.sync_all().is_err(), "fsync after a shutdown");
    let denied = File::create(dir.join("after")).expect_err("a file made after a shutdown");
    ensure!(denied.raw_os_error() == Some(libc::EIO), "{denied}");
    ensure!(fs::write(dir.join("late"), b"more").is_err(), "a write after a shutdown");
    Ok(())
}

fn left_of_late(img: &Path) -> Result<(bool, bool)> {
    image::e2fsck_repair(img)?;
    let linux = KernelMount::new(img, "ro")?;
    ensure!(fs::read(linux.path().join("kept"))? == b"kept");
    ensure!(!linux.path().join("after").exists());
    let late = linux.path().join("late");
    let left = (late.exists(), fs::read(&late).is_ok_and(|content| content == b"late"));
    linux.unmount()?;
    Ok(left)
}

#[test]
fn shutdown_in_its_three_modes() -> Result<()> {
    for mode in 0..3 {
        let (_scratch, img) = place("shutdown")?;
        let linux = KernelMount::new(&img, "acl")?;
        shut_down_in(linux.path(), mode).context("on Linux")?;
        linux.unmount()?;
        let expected = left_of_late(&img)?;

        let (_scratch, img) = place("shutdown")?;
        let fuse = mount(&img, &[])?;
        shut_down_in(fuse.path(), mode).context("on fjord")?;
        image::unmount(fuse.path())?;
        drop(fuse);
        let found = left_of_late(&img)?;
        ensure!(found == expected, "mode {mode}: Linux {expected:?}, fjord {found:?}");
    }
    let (_scratch, img) = place("shutdown")?;
    let fuse = mount(&img, &[])?;
    ensure!(go_down(&File::open(fuse.path())?, 3).is_err(), "there is no mode 3");
    fuse.unmount()
}

/// The disk below is full when data is written back: each open file is told, by each fsync for as
/// long as its data is not there; nothing else is wrong with the mount, and all is well when there
/// is room again.
#[test]
fn each_open_file_is_told_of_a_full_disk() -> Result<()> {
    let scratch = Scratch::new("told")?;
    let below = scratch.join("below");
    fs::create_dir(&below)?;
    run(tools::command("mount")?.args(["-t", "tmpfs", "-o", "size=128M", "none"]).arg(&below))?;
    let told = ["compound", "group", "ijournal"].iter().try_for_each(|policy| {
        told_each(&below, policy).with_context(|| format!("policy {policy}"))
    });
    run(tools::command("umount")?.arg("-l").arg(&below))?;
    told
}

/// Ends a test that would hang.
const PATIENCE: Duration = Duration::from_secs(120);

/// Waits until the space of a removed file is free: a child of another test that has not reached its
/// exec(2) holds a copy of each descriptor.
fn wait_for_room(dir: &Path) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while rustix::fs::statvfs(dir)?.f_bfree < 1024 {
        ensure!(Instant::now() < deadline, "{} stays full", dir.display());
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

fn told_each(below: &Path, policy: &str) -> Result<()> {
    let img = below.join("image");
    let _ = fs::remove_file(&img);
    run(Command::new(program()).args(["mkfs", "--size", "256M", "-b", "4096"]).arg(&img))?;
    let fuse = mount(&img, &["--fsync", policy])?;
    let path = fuse.path().join("file");
    let first = File::create(&path)?;
    first.sync_all()?;
    let second = File::options().write(true).open(&path)?;
    let untouched = File::create(fuse.path().join("other"))?;
    untouched.sync_all()?;
    let ballast = below.join("ballast");
    let mut fill = File::create(&ballast)?;
    while fill.write_all(&[1; 4096]).is_ok() {}
    first.write_all_at(&[7; 1 << 20], 0).context("a write into memory")?;
    let full = |file: &File, who: &str| -> Result<()> {
        let failed = file.sync_all().err().with_context(|| format!("{who}: told of success"))?;
        ensure!(failed.raw_os_error() == Some(libc::ENOSPC), "{who}: {failed}");
        Ok(())
    };
    full(&first, "who wrote")?;
    full(&second, "who had it open")?;
    untouched.sync_all().context("a file that lost nothing")?;
    let stats = || run(Command::new(program()).arg("stats").arg(fuse.path()));
    let said = stats()?.stdout;
    ensure!(said.contains("host disk full") && said.contains("waiting for space"), "{said}");
    let line = table_line(fuse.path())?;
    ensure!(line.contains(" rw,"), "{line}");
    drop(fill);
    fs::remove_file(&ballast)?;
    wait_for_room(below)?;
    first.sync_all().context("who wrote, with room")?;
    second.sync_all().context("who had it open, with room")?;
    fs::write(fuse.path().join("new"), b"x")?;
    let deadline = Instant::now() + PATIENCE;
    loop {
        let said = stats()?.stdout;
        if !said.contains("host disk full") {
            break;
        }
        ensure!(Instant::now() < deadline, "{said}");
        std::thread::sleep(Duration::from_millis(50));
    }
    drop((first, second, untouched));
    fuse.unmount()?;
    image::e2fsck_clean(&img)?;
    let content = run(Command::new(program()).arg("cat").arg(&img).arg("/file"))?.stdout;
    ensure!(content.len() == 1 << 20 && content.bytes().all(|byte| byte == 7));
    Ok(())
}

#[test]
fn fsx_with_the_write_cache() -> Result<()> {
    let first = rng::seed_from_env("write cache fsx", 1);
    let (_scratch, img) = place("cached")?;
    let fuse = mount(&img, CACHED)?;
    for seed in first..first + 2 {
        let mut file = KernelFile::create(&fuse.path().join(format!("file-{seed}")))?;
        fsx::check(&mut file, fsx::Options::new(seed, 30_000))?;
    }
    fuse.unmount()?;
    image::e2fsck_clean(&img)?;
    Ok(())
}

#[test]
fn the_write_cache_keeps_times_appends_and_promises() -> Result<()> {
    let (scratch, img) = place("cached")?;
    let mut fuse = mount(&img, CACHED)?;
    let at = |name: &str| fuse.path().join(name);
    // Two appenders take turns.
    let append = || File::options().append(true).create(true).open(at("log"));
    let (mut one, mut two) = (append()?, append()?);
    let mut expected = Vec::new();
    for turn in 0..3000u32 {
        let line = format!("line {turn}\n");
        let file = if turn % 2 == 0 { &mut one } else { &mut two };
        file.write_all(line.as_bytes())?;
        expected.extend_from_slice(line.as_bytes());
    }
    ensure!(fs::metadata(at("log"))?.len() == expected.len() as u64);
    ensure!(fs::read(at("log"))? == expected, "read back before it was written back");
    two.sync_all()?;
    // A write moves the time of change, at once for whoever looks.
    let time = |name: &str| -> Result<(i64, i64)> {
        let meta = fs::metadata(at(name))?;
        Ok((meta.mtime(), meta.mtime_nsec()))
    };
    let before = time("log")?;
    std::thread::sleep(Duration::from_millis(20));
    one.write_all(b"end\n")?;
    expected.extend_from_slice(b"end\n");
    let after = time("log")?;
    ensure!(after > before, "{before:?} {after:?}");
    one.sync_data()?;
    ensure!(time("log")? == after, "writing back is no change");
    // A time that was set stays, also when earlier writes are written back later.
    let set = File::create(at("set"))?;
    set.write_all_at(&[1; 100_000], 0)?;
    run(Command::new("touch").args(["-d", "2001-02-03 04:05:06.5 UTC"]).arg(at("set")))?;
    set.sync_all()?;
    ensure!(time("set")? == (981_173_106, 500_000_000), "{:?}", time("set")?);
    // An append-only file takes what is appended, and nothing else.
    fs::write(at("only"), b"first\n")?;
    run(tools::command("chattr")?.arg("+a").arg(at("only")))?;
    let mut only = File::options().append(true).open(at("only"))?;
    only.write_all(b"second\n")?;
    only.sync_all().context("an append-only file")?;
    ensure!(fs::write(at("only"), b"other").is_err(), "an append-only file was replaced");
    // Not synced, and gone or there: never mixed with what was.
    fs::write(at("unsynced"), vec![3; 50_000])?;
    fuse.kill()?;
    drop((one, two, set, only));
    fuse.detach();
    run(Command::new(program()).arg("recover").arg(&img))?;
    image::e2fsck_clean(&img)?;
    let out = scratch.join("out");
    run(Command::new(program()).arg("get").arg(&img).arg("/log").arg(&out))?;
    ensure!(fs::read(&out)? == expected, "what was fsynced is gone");
    let only = run(Command::new(program()).arg("cat").arg(&img).arg("/only"))?.stdout;
    ensure!(only == "first\nsecond\n", "{only}");
    let stat = run(Command::new(program()).args(["stat", "--json"]).arg(&img).arg("/set"))?.stdout;
    ensure!(stat.contains("2001-02-03 04:05:06") || stat.contains("981173106"), "{stat}");
    Ok(())
}

/// tune2fs and debugfs refuse to recover what only fjord can, and still mark its log empty.
#[test]
fn what_others_refuse_to_recover_stays_whole() -> Result<()> {
    let scratch = Scratch::in_memory("refused")?;
    let img = scratch.join("image");
    image::make_sparse(&img, 64 << 20)?;
    run(Command::new(program()).args(["mkfs", "--ijournal", "2x1M"]).arg(&img))?;
    let mut fuse = mount(&img, &["-o", "fsync=ijournal"])?;
    // A commit in the log, and i-transactions of the transaction behind it.
    let first = File::create(fuse.path().join("first"))?;
    first.write_all_at(&[1; 100_000], 0)?;
    first.sync_all()?;
    fs::rename(fuse.path().join("first"), fuse.path().join("renamed"))?;
    first.sync_all()?;
    let second = File::create(fuse.path().join("second"))?;
    second.write_all_at(&[2; 5000], 0)?;
    second.sync_all()?;
    drop((first, second));
    fuse.kill()?;
    let touched = |command: &mut Command, name: &str| -> Result<Manifest> {
        let copy = scratch.join(name);
        image::copy_sparse(&img, &copy)?;
        let said = tools::run(command.arg(&copy))?;
        let said = format!("{}{}", said.stdout, said.stderr);
        ensure!(name == "untouched" || said.contains("unsupported feature"), "{name}: {said}");
        run(Command::new(program()).arg("recover").arg(&copy))?;
        image::e2fsck_clean(&copy)?;
        let linux = KernelMount::new(&copy, "ro")?;
        let found = Manifest::from_directory(linux.path())?;
        linux.unmount()?;
        Ok(found)
    };
    let expected = touched(&mut Command::new("true"), "untouched")?;
    for name in [&b"renamed"[..], b"second"] {
        ensure!(expected.entries.contains_key(name), "no {name:?} in {expected:?}");
    }
    let compare = Compare { atime: false, ..Compare::SAME_SCRIPT };
    let by_tune2fs = touched(tools::command("tune2fs")?.args(["-L", "label"]), "tune2fs")?;
    expected.diff(&by_tune2fs, &compare).ok("untouched", "after tune2fs")?;
    let by_debugfs = touched(tools::command("debugfs")?.args(["-w", "-R", "jo"]), "debugfs")?;
    expected.diff(&by_debugfs, &compare).ok("untouched", "after debugfs")?;
    Ok(())
}
