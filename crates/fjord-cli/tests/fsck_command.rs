//! `fjord fsck` and `fsck.fjord`: recovery first, then e2fsck, with its options and the exit codes of
//! fsck(8). Needs root.

use std::{
    fs::{self, File, Permissions},
    io::Read,
    os::{
        fd::AsRawFd,
        unix::fs::{FileExt, PermissionsExt, symlink},
    },
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, ensure};
use fjord::{Fs, MountOptions};
use fjord_format::{features::Incompat, ijournal::AreaTable, superblock::RawSuperblock};
use fjord_testkit::{
    dirty, features,
    fjord_mount::FjordMount,
    image::{self, KernelMount, Scratch},
    tools::{self, Output},
};

const UNCORRECTED: i32 = 4;
const OPERATIONAL: i32 = 8;
const USAGE: i32 = 16;

/// Every fsync policy that writes something of its own.
const POLICIES: [&str; 4] = ["compound", "group", "fast-commit", "ijournal"];

fn program() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_fjord"))
}

fn fjord(args: &[&str], img: &Path) -> Result<Output> {
    tools::run(Command::new(program()).args(args).arg(img))
}

fn fsck(args: &[&str], img: &Path) -> Result<Output> {
    fjord(&[&["fsck"], args].concat(), img)
}

fn make(img: &Path) -> Result<()> {
    fjord(&["mkfs", "-s", "96M", "-b", "4096", "-J", "32M", "--ijournal", "2x1M"], img)?.ok()?;
    fjord(&["tune", "--fast-commit", "on"], img)?.ok()?;
    Ok(())
}

/// An image of a daemon that was killed with a fsynced file, under a policy.
fn dirty(scratch: &Scratch, policy: &str) -> Result<PathBuf> {
    let img = scratch.join(policy);
    make(&img)?;
    let mut mount = FjordMount::with_program(program(), &img, &["--fsync", policy])?;
    fs::create_dir(mount.path().join("dir"))?;
    for i in 0..20 {
        let path = mount.path().join(format!("dir/{i}"));
        fs::write(&path, vec![i; 3000])?;
        File::open(&path)?.sync_all()?;
    }
    mount.kill()?;
    mount.detach();
    Ok(img)
}

fn superblock(img: &Path) -> Result<RawSuperblock> {
    let mut bytes = [0; 1024];
    File::open(img)?.read_exact_at(&mut bytes, 1024)?;
    Ok(RawSuperblock::decode(&bytes)?)
}

fn change_superblock(img: &Path, change: impl FnOnce(&mut RawSuperblock)) -> Result<()> {
    let mut raw = superblock(img)?;
    change(&mut raw);
    raw.update_checksum();
    File::options().write(true).open(img)?.write_all_at(raw.as_bytes(), 1024)?;
    Ok(())
}

/// A program in the place of e2fsck, before it in PATH. `$@` are the arguments.
fn with_stub(scratch: &Scratch, script: &str) -> Result<Command> {
    let stub = scratch.join("bin");
    fs::create_dir_all(&stub)?;
    let path = stub.join("e2fsck");
    fs::write(&path, format!("#!/bin/sh\n{script}\n"))?;
    fs::set_permissions(&path, Permissions::from_mode(0o755))?;
    let path = std::env::var("PATH")?;
    let mut command = Command::new(program());
    command.arg("fsck").env("PATH", format!("{}:{path}", stub.display()));
    Ok(command)
}

#[test]
fn a_dirty_image_of_each_policy_is_recovered_and_checked() -> Result<()> {
    let scratch = Scratch::new("fsck")?;
    for policy in POLICIES {
        let img = dirty(&scratch, policy)?;
        let mounts = superblock(&img)?.s_mnt_count.get();
        // As e2fsck after a replay: nothing was wrong.
        let done = fsck(&["-p"], &img)?.ok()?;
        let words = [": journal recovered: ", "clean,"];
        ensure!(words.iter().all(|word| done.stdout.contains(word)), "{policy}: {done:?}");
        ensure!(superblock(&img)?.s_mnt_count.get() == mounts, "{policy}: counted as a mount");
        image::e2fsck_clean(&img)?;
        for i in 0..20u8 {
            let file = format!("dir/{i}");
            let read = tools::run(Command::new(program()).arg("cat").arg(&img).arg(&file))?.ok()?;
            ensure!(read.stdout.as_bytes() == vec![i; 3000], "{policy}: {file}");
        }
        // Once more: clean, and nothing to recover.
        let again = fsck(&["-p"], &img)?.ok()?;
        ensure!(!again.stdout.contains("recovered"), "{policy}: {again:?}");
    }
    Ok(())
}

#[test]
fn a_dirty_image_of_linux_is_recovered_and_checked() -> Result<()> {
    let scratch = Scratch::new("fsck")?;
    let img = scratch.join("linux");
    features::by_name("default").context("a set of the table")?.make(&img)?;
    let linux = KernelMount::new(&img, "rw,noinit_itable,commit=300")?;
    fs::write(linux.path().join("synced"), "synced")?;
    File::open(linux.path().join("synced"))?.sync_all()?;
    image::shut_down(linux.path())?;
    linux.unmount()?;
    let unknown = scratch.join("unknown");
    image::copy_sparse(&img, &unknown)?;
    fsck(&["-n"], &img)?.expect_code(&[UNCORRECTED])?;
    let done = fsck(&["-fp"], &img)?.ok()?;
    ensure!(done.stdout.contains("journal recovered"), "{done:?}");
    image::e2fsck_clean(&img)?;
    // What fjord does not mount, e2fsck recovers.
    change_superblock(&unknown, |raw| {
        let bits = raw.s_feature_incompat.get() | Incompat::ENCRYPT.bits();
        raw.s_feature_incompat.set(bits);
    })?;
    let done = fsck(&["-p"], &unknown)?.expect_code(&[0, 1])?;
    ensure!(done.stderr.contains("recovery is left to e2fsck"), "{done:?}");
    ensure!(done.stdout.contains("recovering journal"), "{done:?}");
    image::e2fsck_clean(&unknown)?;
    Ok(())
}

#[test]
fn nothing_is_written_with_n() -> Result<()> {
    let scratch = Scratch::new("fsck")?;
    for policy in POLICIES {
        let img = dirty(&scratch, policy)?;
        let before = fs::read(&img)?;
        for args in [&["-n"][..], &["-fn"], &["-n", "-v", "-t"]] {
            let told = fsck(args, &img)?.expect_code(&[UNCORRECTED])?;
            let words = ["journal is dirty (", "s), and nothing is written", "fsck.fjord -p"];
            ensure!(words.iter().all(|word| told.stderr.contains(word)), "{policy}: {told:?}");
        }
        ensure!(fs::read(&img)? == before, "{policy}: -n has written");
    }
    // A clean one is checked.
    let img = scratch.join("clean");
    make(&img)?;
    let done = fsck(&["-fn"], &img)?.ok()?;
    ensure!(done.stdout.contains("Pass 5"), "{done:?}");
    change_superblock(&img, |raw| raw.s_free_inodes_count.set(7))?;
    let before = fs::read(&img)?;
    let done = fsck(&["-fn"], &img)?.expect_code(&[0, UNCORRECTED])?;
    ensure!(done.stdout.contains("Free inodes count wrong"), "{done:?}");
    ensure!(fs::read(&img)? == before, "-n has written to a damaged image");
    // Nor does the journal of one that cannot be written matter.
    let ro = scratch.join("ijournal");
    fs::set_permissions(&ro, Permissions::from_mode(0o444))?;
    fsck(&["-n"], &ro)?.expect_code(&[UNCORRECTED])?;
    Ok(())
}

#[test]
fn errors_corrected_are_1_and_errors_left_are_4() -> Result<()> {
    let scratch = Scratch::new("fsck")?;
    let img = scratch.join("image");
    make(&img)?;
    fjord(&["mkdir"], &img)?.expect_code(&[2])?;
    let mkdir = tools::run(Command::new(program()).arg("mkdir").arg(&img).arg("/lost"))?;
    mkdir.ok()?;
    // An inode that no directory names, and a directory that is none: not for -p.
    image::debugfs_write(&img, &["unlink /lost".to_owned()])?;
    fsck(&["-fp"], &img)?.expect_code(&[UNCORRECTED])?;
    let repaired = fsck(&["-fy"], &img)?.expect_code(&[1])?;
    ensure!(repaired.stdout.contains("FILE SYSTEM WAS MODIFIED"), "{repaired:?}");
    image::e2fsck_clean(&img)?;
    fsck(&["-f", "-y"], &img)?.ok()?;
    Ok(())
}

/// What e2fsck ends with, and gets as arguments: a program in its place tells.
#[test]
fn options_and_exit_codes_are_those_of_e2fsck() -> Result<()> {
    let scratch = Scratch::new("fsck")?;
    let img = scratch.join("image");
    make(&img)?;
    for code in [0, 1, 2, 4, 8, 16, 32, 33] {
        let mut command = with_stub(&scratch, &format!("exit {code}"))?;
        tools::run(command.arg("-a").arg(&img))?.expect_code(&[code])?;
    }
    let name = img.to_str().context("a plain name")?;
    for (given, wanted) in [
        (&["-a"][..], "-p"),
        (&["-p", "-C0"], "-p -C 0"),
        (&["-C", "-1", "-fy"], "-y -f -C -1"),
        (&["-n", "-b", "32768", "-B", "4096"], "-n -b 32768 -B 4096"),
        (&["-cckvttFDd"], "-c -c -k -D -F -t -t -d -v"),
        (&["-l", "bad", "-E", "discard", "-E", "fixes_only"], "-l bad -E discard -E fixes_only"),
        (&["-L", "bad", "-j", "/dev/x", "-z", "undo"], "-L bad -j /dev/x -z undo"),
        (&["-r"], ""),
    ] {
        let mut command = with_stub(&scratch, r#"printf '%s\n' "$*""#)?;
        let got = tools::run(command.args(given).arg(&img))?.ok()?;
        let wanted = format!("{wanted} -- {name}");
        ensure!(got.stdout.trim_end() == wanted.trim_start(), "{given:?}: {}", got.stdout);
    }
    // The descriptor of -C is inherited.
    let (mut reader, writer) = std::io::pipe()?;
    rustix::io::fcntl_setfd(&writer, rustix::io::FdFlags::empty())?;
    let fd = writer.as_raw_fd().to_string();
    tools::run(Command::new(program()).args(["fsck", "-f", "-p", "-C", &fd]).arg(&img))?.ok()?;
    drop(writer);
    let mut progress = String::new();
    reader.read_to_string(&mut progress)?;
    ensure!(progress.lines().any(|line| line.starts_with("5 ")), "{progress:?}");
    Ok(())
}

#[test]
fn wrong_arguments_are_16() -> Result<()> {
    let scratch = Scratch::new("fsck")?;
    let img = dirty(&scratch, "ijournal")?;
    let before = fs::read(&img)?;
    for args in [&["-p", "-y"][..], &["-n", "-p"], &["-Q"], &["-b"], &["-l", "a", "-L", "b"]] {
        fsck(args, &img)?.expect_code(&[USAGE])?;
    }
    tools::run(Command::new(program()).args(["fsck", "-p"]))?.expect_code(&[USAGE])?;
    tools::run(Command::new(program()).args(["fsck", "-p", "a", "b"]))?.expect_code(&[USAGE])?;
    ensure!(fs::read(&img)? == before);
    let help = tools::run(Command::new(program()).args(["fsck", "--help"]))?.ok()?;
    ensure!(help.stdout.contains("Exit codes"), "{help:?}");
    Ok(())
}

#[test]
fn what_cannot_be_checked_is_8() -> Result<()> {
    let scratch = Scratch::new("fsck")?;
    let img = scratch.join("image");
    make(&img)?;
    let refused = |args: &[&str], img: &Path, word: &str| -> Result<()> {
        let told = fsck(args, img)?.expect_code(&[OPERATIONAL])?;
        ensure!(told.stderr.contains(word), "{word:?}: {told:?}");
        Ok(())
    };
    refused(&["-p"], &scratch.join("none"), "does not exist")?;
    refused(&["-p"], scratch.path(), "directory")?;
    let junk = scratch.join("junk");
    fs::write(&junk, vec![7; 100_000])?;
    refused(&["-p"], &junk, "Bad magic number")?;

    let mounted = FjordMount::with_program(program(), &img, &[])?;
    fs::write(mounted.path().join("file"), "content")?;
    for mode in ["-p", "-n", "-fy"] {
        refused(&[mode], &img, "mounted by fjord")?;
    }
    mounted.unmount()?;
    let linux = KernelMount::new(&img, "rw")?;
    refused(&["-p"], &img, "mounted by Linux")?;
    linux.unmount()?;
    let library = Fs::open(&img, &MountOptions::default())?;
    refused(&["-p"], &img, "in use")?;
    library.unmount()?;
    fsck(&["-fp"], &img)?.ok()?;

    // Dirty, and not to be written.
    let img = dirty(&scratch, "ijournal")?;
    let mut chattr = tools::command("chattr")?;
    tools::run(chattr.arg("+i").arg(&img))?.ok()?;
    let told = fsck(&["-p"], &img);
    tools::run(tools::command("chattr")?.arg("-i").arg(&img))?.ok()?;
    let told = told?.expect_code(&[OPERATIONAL])?;
    ensure!(told.stderr.contains("cannot be written"), "{told:?}");
    Ok(())
}

#[test]
fn without_e2fsck_nothing_is_done() -> Result<()> {
    let scratch = Scratch::new("fsck")?;
    let img = dirty(&scratch, "ijournal")?;
    let before = fs::read(&img)?;
    let e2fsck = tools::find("e2fsck").context("a tool of the tests")?;
    let script = r#"mount --bind /dev/null "$0" && "$1" fsck -p "$2""#;
    let told = tools::run(
        tools::command("unshare")?
            .args(["--mount", "--propagation", "private", "sh", "-c", script])
            .args([&fs::canonicalize(e2fsck)?, program(), &img]),
    )?
    .expect_code(&[OPERATIONAL])?;
    ensure!(told.stderr.contains("install the package e2fsprogs"), "{told:?}");
    ensure!(fs::read(&img)? == before);
    Ok(())
}

/// As long as e2fsck works, fjord keeps off.
#[test]
fn the_image_is_locked_while_e2fsck_runs() -> Result<()> {
    let scratch = Scratch::new("fsck")?;
    let img = scratch.join("image");
    make(&img)?;
    let mut command = with_stub(&scratch, "echo running; exec sleep 60")?;
    let mut child = command.arg("-p").arg(&img).stdout(Stdio::piped()).spawn()?;
    let mut said = [0; 8];
    child.stdout.take().context("a pipe")?.read_exact(&mut said)?;
    let refused = fjord(&["recover"], &img);
    child.kill()?;
    child.wait()?;
    refused?.expect_code(&[3])?;
    fjord(&["recover"], &img)?.ok()?;
    Ok(())
}

/// Areas that are damaged: what only they have is kept, unless everything is to be answered yes.
#[test]
fn damaged_fsyncs_are_discarded_by_yes_only() -> Result<()> {
    let scratch = Scratch::new("fsck")?;
    let (img, cut) = (scratch.join("image"), scratch.join("cut"));
    make(&img)?;
    dirty::fsync_into_area(&img, &cut)?;
    let table = fs::read(&cut)?.chunks(1024).position(AreaTable::is_table).context("no table")?;
    File::options().write(true).open(&cut)?.write_all_at(&[0xff; 4], table as u64 * 1024)?;
    let before = fs::read(&cut)?;
    for mode in ["-p", "-n", "-f"] {
        fsck(&[mode], &cut)?.expect_code(&[UNCORRECTED])?;
        ensure!(fs::read(&cut)? == before, "{mode} has written");
    }
    let told = fsck(&["-p"], &cut)?.expect_code(&[UNCORRECTED])?;
    ensure!(told.stderr.contains("fsck.fjord -y"), "{told:?}");
    let done = fsck(&["-fy"], &cut)?.expect_code(&[0, 1])?;
    ensure!(done.stdout.contains("discarded the fsynced changes"), "{done:?}");
    image::e2fsck_clean(&cut)?;
    Ok(())
}

#[test]
fn as_fsck_runs_it() -> Result<()> {
    let scratch = Scratch::new("fsck")?;
    let img = dirty(&scratch, "group")?;
    for name in ["fsck.fjord", "fsck.fuse.fjord", "mkfs.fjord"] {
        symlink(program(), scratch.join(name))?;
    }
    // fsck(8) runs fsck.TYPE of its PATH, here for the type in an fstab.
    let fstab = scratch.join("fstab");
    // As fstab(5) wants it.
    let source = img.display().to_string().replace(' ', "\\040");
    let line = format!("{source} /nowhere fuse.fjord noatime 0 2\n");
    fs::write(&fstab, line)?;
    let path = format!("{}:{}", scratch.path().display(), std::env::var("PATH")?);
    let mut command = tools::command("fsck")?;
    command.env("PATH", path).env("FSTAB_FILE", &fstab);
    let done = tools::run(command.args(["-A", "-T", "-a"]))?.ok()?;
    ensure!(done.stdout.contains("journal recovered"), "{done:?}");
    image::e2fsck_clean(&img)?;
    let new = scratch.join("new");
    let done = tools::run(Command::new(scratch.join("mkfs.fjord")).args(["-s", "16M"]).arg(&new))?;
    done.ok()?;
    let done = tools::run(Command::new(scratch.join("fsck.fjord")).arg("-fn").arg(&new))?.ok()?;
    ensure!(done.stdout.contains("Pass 5"), "{done:?}");
    tools::run(Command::new(scratch.join("fsck.fuse.fjord")).arg("-Q"))?.expect_code(&[USAGE])?;
    Ok(())
}
