//! Read-only mounts: of images that need recovery, and of images that cannot be written. Linux is the
//! yardstick. Needs root.

use std::{
    fs::{self, File, OpenOptions},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};
use fjord_format::{
    features::{Incompat, RoCompat},
    superblock::RawSuperblock,
};
use fjord_testkit::{
    fjord_mount::{FjordMount, table_line},
    image::{self, KernelMount, Scratch},
    manifest::{Compare, Manifest},
    tools::{self, Output},
};

const FAILURE: i32 = 1;

fn program() -> PathBuf {
    std::env::var_os("FJORD_BIN").unwrap_or_else(|| env!("CARGO_BIN_EXE_fjord").into()).into()
}

fn fjord(args: &[&str], img: &Path) -> Result<Output> {
    tools::run(Command::new(program()).args(args).arg(img))
}

fn mount(img: &Path, options: &str) -> Result<FjordMount> {
    FjordMount::with_program(&program(), img, &["-o", options])
        .with_context(|| format!("mounting with -o {options}"))
}

fn superblock(img: &Path) -> Result<RawSuperblock> {
    let mut bytes = [0; 1024];
    File::open(img)?.read_exact_at(&mut bytes, 1024)?;
    Ok(RawSuperblock::decode(&bytes)?)
}

fn is_dirty(img: &Path) -> Result<bool> {
    Ok(superblock(img)?.features().incompat.contains(Incompat::RECOVER))
}

fn has_orphans(img: &Path) -> Result<bool> {
    let raw = superblock(img)?;
    let filed = raw.features().ro_compat.contains(RoCompat::ORPHAN_PRESENT);
    Ok(raw.s_last_orphan.get() != 0 || filed)
}

/// The options of the mount as the kernel shows them.
fn shown_options(dir: &Path) -> Result<String> {
    Ok(table_line(dir)?.split(' ').nth(3).context("no options")?.to_owned())
}

fn make(img: &Path, features: &str) -> Result<()> {
    image::make_sparse(img, 48 << 20)?;
    let mut mke2fs = tools::command("mke2fs")?;
    mke2fs.args(["-q", "-F", "-t", "ext4", "-b", "4096", "-O", features]);
    tools::run(mke2fs.args(["-J", "size=4", "-E", "lazy_itable_init=0"]).arg(img))?.ok()?;
    Ok(())
}

/// Leaves files, files that are open without a name, and a truncated one, all of them in the log.
fn work(dir: &Path) -> Result<Vec<File>> {
    let mut open = Vec::new();
    for i in 0..20 {
        fs::write(dir.join(format!("f{i}")), vec![i; 30_000])?;
    }
    tools::run(tools::command("sync")?.arg("-f").arg(dir))?.ok()?;
    for i in 0..10 {
        open.push(File::open(dir.join(format!("f{i}")))?);
        fs::remove_file(dir.join(format!("f{i}")))?;
    }
    fs::write(dir.join("later"), "later")?;
    File::open(dir.join("later"))?.sync_all()?;
    File::open(dir)?.sync_all()?;
    Ok(open)
}

/// An image that a crash of Linux left, with orphans.
fn dirty(scratch: &Scratch, features: &str) -> Result<PathBuf> {
    let img = scratch.join("dirty.img");
    make(&img, features)?;
    let linux = KernelMount::new(&img, "rw,noinit_itable,commit=300")?;
    let open = work(linux.path())?;
    image::shut_down(linux.path())?;
    drop(open);
    linux.unmount()?;
    ensure!(is_dirty(&img)?, "the log is empty");
    Ok(img)
}

/// The tree, and that the mount is what it should be: shown as read-only, unwritable, with counters.
fn looked_at(mount: &FjordMount) -> Result<Manifest> {
    let options = shown_options(mount.path())?;
    ensure!(options.split(',').any(|option| option == "ro"), "mounted {options}");
    let refused = fs::write(mount.path().join("new"), "x").err().context("written")?;
    ensure!(refused.kind() == std::io::ErrorKind::ReadOnlyFilesystem, "{refused}");
    let stats = fjord(&["stats"], mount.path())?.ok()?;
    ensure!(stats.stdout.contains("fsync policy"), "{}", stats.stdout);
    Manifest::from_directory(mount.path())
}

/// Mounts `img` read-only by fjord. It must then be clean, with nothing written by the mount itself.
fn replayed(img: &Path) -> Result<Manifest> {
    let before = superblock(img)?;
    let mount = mount(img, "ro")?;
    let recovered = fs::read(img)?;
    let tree = looked_at(&mount)?;
    mount.unmount()?;
    ensure!(fs::read(img)? == recovered, "written to by a read-only mount");
    let after = superblock(img)?;
    ensure!(!is_dirty(img)?, "still dirty");
    ensure!(after.s_mnt_count == before.s_mnt_count, "counted as a mount");
    ensure!(after.mtime_seconds() == before.mtime_seconds(), "timed as a mount");
    Ok(tree)
}

/// A mount for writing on top, as after any other.
fn used(img: &Path) -> Result<()> {
    let mount = mount(img, "rw")?;
    ensure!(fs::read(mount.path().join("later"))? == b"later");
    fs::write(mount.path().join("more"), "more")?;
    mount.unmount()?;
    image::e2fsck_clean(img)?;
    Ok(())
}

/// fjord and Linux replay copies of `img`.
fn same_as_linux(img: &Path, scratch: &Scratch, features: &str) -> Result<()> {
    let (linux, ours) = (scratch.join("linux.img"), scratch.join("ours.img"));
    image::copy_sparse(img, &linux)?;
    image::copy_sparse(img, &ours)?;
    let mounted = KernelMount::recovering_read_only(&linux)?;
    let theirs = Manifest::from_directory(mounted.path())?;
    mounted.unmount()?;
    let found = replayed(&ours)?;
    let compare = Compare { mtime: false, ctime: false, ..Compare::SAME_IMAGE };
    theirs.diff(&found, &compare).ok("Linux", "fjord")?;
    let mounts = |img: &Path| superblock(img).map(|raw| raw.s_mnt_count.get());
    ensure!(mounts(&linux)? == mounts(&ours)?, "{features}: Linux counts otherwise");
    // Linux writes this one and completes its orphans as well.
    if features != "verity" {
        ensure!(has_orphans(&linux)? == has_orphans(&ours)?, "the records of orphans differ");
        image::e2fsck_clean(&ours)?;
        used(&ours)?;
    }
    Ok(())
}

#[test]
fn a_dirty_image_is_replayed() -> Result<()> {
    for features in ["^orphan_file", "orphan_file", "fast_commit", "^metadata_csum", "verity"] {
        let scratch = Scratch::in_memory("replayed")?;
        let img = dirty(&scratch, features)?;
        same_as_linux(&img, &scratch, features).context(features)?;
        println!("{features}: as Linux");
    }
    Ok(())
}

/// Orphans without a dirty log.
#[test]
fn orphans_of_a_clean_log_are_completed() -> Result<()> {
    let scratch = Scratch::in_memory("orphans")?;
    for features in ["^orphan_file", "^has_journal"] {
        let img = scratch.join("clean.img");
        image::make_sparse(&img, 48 << 20)?;
        let mut mke2fs = tools::command("mke2fs")?;
        mke2fs.args(["-q", "-F", "-t", "ext4", "-b", "4096", "-O", features]);
        tools::run(mke2fs.args(["-E", "lazy_itable_init=0"]).arg(&img))?.ok()?;
        let linux = KernelMount::new(&img, "rw,noinit_itable")?;
        fs::write(linux.path().join("later"), "later")?;
        fs::write(linux.path().join("orphan"), vec![1; 100_000])?;
        linux.unmount()?;
        let ino = image::debugfs(&img, "stat /orphan")?;
        let ino = ino.split_whitespace().nth(1).context("an inode")?.to_owned();
        let requests = [
            "unlink /orphan".to_owned(),
            format!("sif <{ino}> links_count 0"),
            format!("ssv last_orphan {ino}"),
        ];
        image::debugfs_write(&img, &requests)?;
        ensure!(has_orphans(&img)? && !is_dirty(&img)?);
        same_as_linux(&img, &scratch, features).context(features)?;
    }
    Ok(())
}

/// What fjord itself left, also with fsyncs that only it recovers.
#[test]
fn what_a_crash_of_fjord_left_is_replayed() -> Result<()> {
    for (policy, made) in [
        ("compound", &["mkfs", "-s", "48M"][..]),
        ("fast-commit", &["mkfs", "-s", "48M", "-O", "fast_commit"]),
        ("ijournal", &["mkfs", "-s", "48M", "--ijournal", "2x1M"]),
    ] {
        for crash in ["kill", "shutdown"] {
            let scratch = Scratch::in_memory("crashed")?;
            let img = scratch.join("img");
            fjord(made, &img)?.ok()?;
            let mut mount = FjordMount::with_program(
                &program(),
                &img,
                &["--fsync", policy, "-o", "commit=300"],
            )?;
            let open = work(mount.path())?;
            let kept = File::create(mount.path().join("kept"))?;
            kept.write_all_at(b"kept", 0)?;
            kept.sync_all()?;
            drop(kept);
            match crash {
                "kill" => {
                    mount.kill()?;
                    drop(open);
                    mount.detach();
                }
                _ => {
                    image::shut_down(mount.path())?;
                    drop(open);
                    mount.unmount()?;
                }
            }
            ensure!(is_dirty(&img)?, "the log is empty");
            let tree = replayed(&img).with_context(|| format!("{policy}, {crash}"))?;
            for name in ["kept", "later", "f19"] {
                ensure!(tree.entries.contains_key(name.as_bytes()), "{policy}: {name} is lost");
            }
            ensure!(!tree.entries.contains_key(b"f0".as_slice()), "{policy}: f0 is back");
            image::e2fsck_clean(&img).with_context(|| format!("{policy}, {crash}"))?;
            used(&img)?;
        }
    }
    Ok(())
}

#[test]
fn without_replay_nothing_is_written() -> Result<()> {
    for features in ["^orphan_file", "orphan_file"] {
        let scratch = Scratch::in_memory("noload")?;
        let img = dirty(&scratch, features)?;
        let before = fs::read(&img)?;
        for options in ["ro,noload", "ro,norecovery"] {
            let mount = mount(&img, options)?;
            looked_at(&mount)?;
            mount.unmount()?;
            ensure!(fs::read(&img)? == before, "{options} writes");
        }
        for command in ["ls", "tree", "info", "journal"] {
            let out = fjord(&[command], &img)?;
            if matches!(command, "ls" | "tree") {
                let out = out.expect_code(&[FAILURE])?;
                let names = ["journal is dirty", "fjord recover", "-o ro,noload"];
                ensure!(names.iter().all(|word| out.stderr.contains(word)), "{}", out.stderr);
            } else {
                out.ok()?;
            }
            ensure!(fs::read(&img)? == before, "{command} writes");
        }
        replayed(&img)?;
        used(&img)?;
    }
    Ok(())
}

/// An ext4 of Linux to keep images on, so that `chattr` works wherever the tests run.
fn host(scratch: &Scratch) -> Result<KernelMount> {
    let host = scratch.join("host.img");
    image::make_sparse(&host, 256 << 20)?;
    tools::run(tools::command("mke2fs")?.args(["-q", "-F", "-t", "ext4"]).arg(&host))?.ok()?;
    KernelMount::new(&host, "rw")
}

fn chattr(flag: &str, img: &Path) -> Result<()> {
    tools::run(tools::command("chattr")?.arg(flag).arg(img))?.ok().map(drop)
}

/// Mounts what cannot be written: a clean image read-only with a warning, a dirty one only without
/// replay.
fn write_protected(dirty: &Path, clean: &Path, scratch: &Scratch) -> Result<()> {
    let dir = scratch.join("mnt");
    fs::create_dir_all(&dir)?;
    for options in ["rw", "ro"] {
        let mut refused = Command::new(program());
        refused.args(["mount", "--daemon", "-o", options]).arg(dirty).arg(&dir);
        let refused = tools::run(&mut refused)?.expect_code(&[FAILURE])?;
        let words = ["journal is dirty", "cannot be written", "ro,noload"];
        ensure!(words.iter().all(|word| refused.stderr.contains(word)), "{}", refused.stderr);
    }
    let noload = mount(dirty, "ro,noload")?;
    looked_at(&noload)?;
    noload.unmount()?;
    let mut fallback = Command::new(program());
    let fallback = tools::run(fallback.args(["mount", "--daemon"]).arg(clean).arg(&dir))?.ok()?;
    ensure!(fallback.stderr.contains("write-protected"), "no warning: {}", fallback.stderr);
    ensure!(fallback.stderr.contains("mounted read-only"), "no warning: {}", fallback.stderr);
    let shown = shown_options(&dir);
    let read = fs::read(dir.join("later"));
    image::unmount(&dir)?;
    ensure!(shown?.starts_with("ro") && read? == b"later");
    let asked = mount(clean, "ro")?;
    looked_at(&asked)?;
    asked.unmount()?;
    let recover = fjord(&["recover"], clean)?.expect_code(&[FAILURE])?;
    ensure!(recover.stderr.contains("cannot be written"), "{}", recover.stderr);
    ensure!(recover.stderr.contains("chattr -i"), "{}", recover.stderr);
    Ok(())
}

#[test]
fn images_that_cannot_be_written() -> Result<()> {
    let scratch = Scratch::in_memory("protected")?;
    let crashed = dirty(&scratch, "^orphan_file")?;
    let host = host(&scratch)?;
    let (dirty, clean) = (host.path().join("dirty"), host.path().join("clean"));
    image::copy_sparse(&crashed, &dirty)?;
    image::copy_sparse(&crashed, &clean)?;
    fjord(&["recover"], &clean)?.ok()?;
    let both = [&dirty, &clean];
    both.iter().try_for_each(|img| chattr("+i", img))?;
    let immutable = write_protected(&dirty, &clean, &scratch).context("chattr +i");
    both.iter().try_for_each(|img| chattr("-i", img))?;
    immutable?;
    let remount = |how: &str| -> Result<()> {
        let options = format!("remount,{how}");
        tools::run(tools::command("mount")?.args(["-o", &options]).arg(host.path()))?.ok()?;
        Ok(())
    };
    remount("ro")?;
    let on_read_only = write_protected(&dirty, &clean, &scratch).context("a read-only host");
    remount("rw")?;
    on_read_only?;
    let mut nodes = Vec::new();
    for img in both {
        let attach = ["--read-only", "--find", "--show"];
        let node = tools::run(tools::command("losetup")?.args(attach).arg(img))?.ok()?.stdout;
        nodes.push(PathBuf::from(node.trim()));
    }
    let devices = write_protected(&nodes[0], &nodes[1], &scratch).context("read-only devices");
    for node in &nodes {
        tools::run(tools::command("losetup")?.arg("--detach").arg(node))?.ok()?;
    }
    devices?;
    // And now that it can be written:
    replayed(&dirty)?;
    used(&dirty)?;
    host.unmount()
}

/// A log with fsyncs of fjord is not replayed beside features that fjord does not write.
#[test]
fn an_image_that_fjord_does_not_write() -> Result<()> {
    let scratch = Scratch::in_memory("unknown")?;
    let img = dirty(&scratch, "verity")?;
    let refused = FjordMount::with_program(&program(), &img, &[]).err().context("mounted")?;
    ensure!(format!("{refused:#}").contains("verity"), "{refused:#}");
    ensure!(is_dirty(&img)?, "written to by a mount that was refused");
    let mut torn = OpenOptions::new();
    let device = torn.write(true).read(true).open(&img)?;
    let mut byte = [0];
    // The last byte of the superblock's checksum: the log has it whole.
    device.read_exact_at(&mut byte, 2047)?;
    device.write_all_at(&[byte[0] ^ 0xff], 2047)?;
    drop(device);
    replayed(&img).map(drop)
}

/// Links are not followed, and a remount keeps it so.
#[test]
fn nosymfollow_is_kept_by_a_remount() -> Result<()> {
    let scratch = Scratch::new("nosymfollow")?;
    let img = scratch.join("image");
    image::make_sparse(&img, 64 << 20)?;
    tools::run(tools::command("mke2fs")?.args(["-q", "-F", "-t", "ext4"]).arg(&img))?.ok()?;
    let mounted = mount(&img, "nosymfollow")?;
    std::os::unix::fs::symlink("target", mounted.path().join("link"))?;
    fs::write(mounted.path().join("target"), "content")?;
    let read = || fs::read(mounted.path().join("link")).map_err(|error| error.raw_os_error());
    for options in ["remount,ro", "remount,rw"] {
        ensure!(read() == Err(Some(libc::ELOOP)), "before {options}");
        let mut remount = Command::new(program());
        tools::run(remount.args(["mount", "-o", options]).arg(&img).arg(mounted.path()))?.ok()?;
    }
    ensure!(read() == Err(Some(libc::ELOOP)), "at the end");
    mounted.unmount()
}

/// The letter of mount(8) for a read-only mount.
#[test]
fn the_letter_r_mounts_read_only() -> Result<()> {
    let scratch = Scratch::in_memory("letter")?;
    let img = scratch.join("image");
    make(&img, "^fast_commit")?;
    let mount = FjordMount::with_program(&program(), &img, &["-r"])?;
    ensure!(shown_options(mount.path())?.split(',').any(|option| option == "ro"));
    let said = fs::write(mount.path().join("new"), "x").map_err(|error| error.raw_os_error());
    ensure!(said == Err(Some(libc::EROFS)), "{said:?}");
    mount.unmount()?;
    Ok(())
}
