//! Block devices as images: what the mount table, umount(8), findmnt(8), lsblk(8) and fstab make of
//! them, and that a device has one user at a time. Needs root.

use std::{
    fs::{self, File},
    io::Read,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use fjord::{Error, Fs, MountOptions};
use fjord_block::OpenError;
use fjord_fuse::{Server, mount::FuseOptions};
use fjord_testkit::{
    features,
    fjord_mount::{is_mounted, table_line},
    image::{self, Scratch},
    tools::{self, Output},
};
use rustix::{
    fs::{Mode, OFlags},
    mount::MountFlags,
};

/// Runs a command that must succeed.
fn run(command: &mut Command) -> Result<Output> {
    tools::run(command)?.ok()
}

fn program() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_fjord"))
}

fn fjord(args: &[&str], path: &Path) -> Result<Output> {
    tools::run(Command::new(program()).args(args).arg(path))
}

/// A loop device, detached when dropped.
struct Loop(PathBuf);

impl Loop {
    fn new(args: &[&str], file: &Path) -> Result<Loop> {
        let out = run(tools::command("losetup")?.args(["--find", "--show"]).args(args).arg(file))?;
        Ok(Loop(out.stdout.trim().into()))
    }

    fn name(&self) -> Result<&str> {
        self.0.to_str().context("a plain name")
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = tools::command("losetup").and_then(|mut c| tools::run(c.arg("-d").arg(&self.0)));
    }
}

/// A directory to mount on; what is mounted there when it is dropped goes with it.
struct MountDir(PathBuf);

impl std::ops::Deref for MountDir {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.0
    }
}

impl Drop for MountDir {
    fn drop(&mut self) {
        if is_mounted(self).unwrap_or(false) {
            let _ = tools::command("umount").and_then(|mut c| tools::run(c.arg("-l").arg(&self.0)));
        }
    }
}

fn place(name: &str) -> Result<(Scratch, PathBuf, MountDir)> {
    let scratch = Scratch::new(name)?;
    let img = scratch.join("image");
    features::by_name("default").context("a set of the table")?.make(&img)?;
    let dir = scratch.join("mnt");
    fs::create_dir(&dir)?;
    Ok((scratch, img, MountDir(dir)))
}

/// Whether somebody has the device for himself alone.
fn is_claimed(device: &Path) -> bool {
    let flags = OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC;
    rustix::fs::open(device, flags, Mode::empty()).is_err()
}

/// Mounts a device and looks at the mount as people and programs do.
fn shown_and_unmounted(device: &str, dir: &Path) -> Result<()> {
    run(Command::new(program()).args(["mount", "--daemon", "-o", "fuseblk", device]).arg(dir))?;
    let line = table_line(dir)?;
    ensure!(line.starts_with(&format!("{device} ")), "{line}");
    ensure!(line.contains(" fuseblk.fjord "), "{line}");
    for args in [&["-n", "-o", "TARGET", device][..], &["-n", "-o", "TARGET", "-S", device]] {
        let found = run(tools::command("findmnt")?.args(args))?.stdout;
        ensure!(Path::new(found.trim()) == dir, "findmnt {args:?}: {found}");
    }
    let listed = run(tools::command("lsblk")?.args(["-n", "-o", "MOUNTPOINT", device]))?.stdout;
    ensure!(listed.lines().any(|line| Path::new(line.trim()) == dir), "lsblk: {listed}");
    for i in 0..100 {
        fs::write(dir.join(format!("f{i}")), vec![1; 50_000])?;
    }
    // Nobody else gets it meanwhile.
    ensure!(is_claimed(Path::new(device)), "the mount does not claim {device}");
    let other = dir.with_file_name("other");
    fs::create_dir_all(&other)?;
    for command in [&["recover"][..], &["mount", "--daemon"], &["mount", "--daemon", "-o", "ro"]] {
        let mut command_line = Command::new(program());
        command_line.args(command).arg(device);
        if command[0] == "mount" {
            command_line.arg(&other);
        }
        let refused = tools::run(&mut command_line)?;
        ensure!(refused.code == Some(3), "{refused:?}");
        ensure!(refused.stderr.contains(dir.to_str().context("a name")?), "{refused:?}");
    }
    let refused = tools::run(tools::command("mount")?.args(["-t", "ext4", device]).arg(&other))?;
    ensure!(refused.code == Some(32), "{refused:?}");
    // umount(8) by the device waits until it is clean, and it is free at once.
    run(tools::command("umount")?.arg(device))?;
    ensure!(!is_mounted(dir)?);
    ensure!(!is_claimed(Path::new(device)), "{device} is still claimed");
    image::e2fsck_clean(Path::new(device))?;
    let recovered = fjord(&["recover"], Path::new(device))?.ok()?;
    ensure!(recovered.stdout.contains("empty"), "{recovered:?}");
    let linux = tools::command("mount")?.args(["-t", "ext4", device]).arg(dir).status()?;
    ensure!(linux.success() && dir.join("f99").exists(), "Linux does not mount {device}");
    run(tools::command("umount")?.arg(dir))?;
    Ok(())
}

#[test]
fn the_device_is_the_source_of_its_mount() -> Result<()> {
    let (_scratch, img, dir) = place("source")?;
    let device = Loop::new(&[], &img)?;
    shown_and_unmounted(device.name()?, &dir)?;
    // By another name for it: the table shows the one that others know.
    let link = dir.with_file_name("by-name");
    std::os::unix::fs::symlink(&device.0, &link)?;
    run(Command::new(program()).args(["mount", "--daemon"]).arg(&link).arg(&*dir))?;
    ensure!(
        table_line(&dir)?.starts_with(&format!("{} ", device.name()?)),
        "{}",
        table_line(&dir)?
    );
    fjord(&["umount"], &link)?.ok()?;
    ensure!(!is_mounted(&dir)?);
    Ok(())
}

#[test]
fn partitions_and_parts_of_files_are_sources_too() -> Result<()> {
    const START_SECTOR: u32 = 2048;
    let (scratch, img, dir) = place("partition")?;
    let bytes = fs::metadata(&img)?.len();
    let disk = scratch.join("disk");
    image::make_sparse(&disk, bytes + u64::from(START_SECTOR) * 512)?;
    let file = File::options().write(true).open(&disk)?;
    let mut content = Vec::new();
    File::open(&img)?.read_to_end(&mut content)?;
    file.write_all_at(&content, u64::from(START_SECTOR) * 512)?;
    let whole = Loop::new(&[], &disk)?;
    // As the kernel does when it reads a table of partitions.
    let (start, sectors) = (START_SECTOR.to_string(), (bytes / 512).to_string());
    // A loop device keeps the partitions of a file that it showed before.
    tools::run(tools::command("delpart")?.args([whole.name()?, "1"]))?;
    run(tools::command("addpart")?.args([whole.name()?, "1", &start, &sectors]))?;
    let shown = shown_and_unmounted(&format!("{}p1", whole.name()?), &dir);
    // Others look at a new device, too, and have it open for a moment.
    let until = Instant::now() + Duration::from_secs(60);
    while let Err(error) = run(tools::command("delpart")?.args([whole.name()?, "1"])) {
        ensure!(Instant::now() < until, "{error:#}");
        std::thread::sleep(Duration::from_millis(10));
    }
    shown?;
    drop(whole);
    let part = Loop::new(&["--offset", "1048576"], &disk)?;
    shown_and_unmounted(part.name()?, &dir)?;
    // `fjord umount` looks at the part, not at the start of the file, for whether it is clean.
    run(Command::new(program()).args(["mount", "--daemon"]).arg(&part.0).arg(&*dir))?;
    fs::write(dir.join("more"), b"more")?;
    fjord(&["umount"], &dir)?.ok()?;
    Ok(())
}

/// A path as fstab(5) wants it.
fn in_fstab(path: &Path) -> Result<String> {
    Ok(path.to_str().context("a plain name")?.replace(' ', "\\040"))
}

#[test]
fn fstab_with_a_device_a_label_and_a_uuid() -> Result<()> {
    let (scratch, img, dir) = place("fstab")?;
    let label = format!("fj{}", std::process::id());
    run(tools::command("tune2fs")?.args(["-L", &label, "-U", "random"]).arg(&img))?;
    let device = Loop::new(&[], &img)?;
    let shown = run(tools::command("blkid")?.args(["-p", "-s", "UUID", "-o", "value"]).arg(&img))?;
    let uuid = shown.stdout.trim();
    // In a mount namespace whose /usr/sbin has the helper: nothing of the system changes. With nofail,
    // mount(8) says nothing where it finds no such label, which may happen while other tests' devices come
    // and go: it is asked again.
    let script = "set -e\nmount -t tmpfs none \"$0\"\nmkdir \"$0/up\" \"$0/work\"\n\
                  mount -t overlay -o \"lowerdir=/usr/sbin,upperdir=$0/up,workdir=$0/work\" o \
                  /usr/sbin\nln -s \"$1\" /usr/sbin/mount.fuse.fjord\n\
                  until findmnt -n -o SOURCE,OPTIONS \"$3\"; do mount -T \"$2\" \"$3\"; done\ntouch \"$3/made-$5\"\numount \"$4\"\n";
    let tmp = scratch.join("tmp");
    fs::create_dir(&tmp)?;
    let table = scratch.join("fstab");
    for (number, source) in
        [device.name()?.to_owned(), format!("LABEL={label}"), format!("UUID={uuid}")]
            .into_iter()
            .enumerate()
    {
        let line = format!("{source} {} fuse.fjord noatime,nofail 0 0\n", in_fstab(&dir)?);
        fs::write(&table, line)?;
        let out = run(tools::command("unshare")?
            .args(["--mount", "--propagation", "private", "sh", "-c", script])
            .args([tmp.as_path(), program(), &table, &*dir, &device.0])
            .arg(number.to_string())
            .env("BLKID_FILE", scratch.join("blkid.tab")))
        .with_context(|| source.clone())?;
        ensure!(out.stdout.starts_with(device.name()?), "{source}: {out:?}");
        ensure!(out.stdout.contains("noatime"), "{source}: {out:?}");
        image::e2fsck_clean(&img)?;
        let names = fjord(&["ls"], &img)?.ok()?.stdout;
        ensure!(names.contains(&format!("made-{number}")), "{source}: {names}");
    }
    Ok(())
}

/// A device of larger sectors than the file system's blocks, which the kernel would refuse them for.
#[test]
fn blocks_may_be_smaller_than_sectors() -> Result<()> {
    let (_scratch, img, dir) = place("sectors")?;
    run(tools::command("mke2fs")?.args(["-q", "-F", "-t", "ext4", "-b", "1024"]).arg(&img))?;
    let device = Loop::new(&["--sector-size", "4096"], &img)?;
    run(Command::new(program()).args(["mount", "--daemon"]).arg(&device.0).arg(&*dir))?;
    ensure!(table_line(&dir)?.contains(" fuseblk.fjord "), "{}", table_line(&dir)?);
    fs::write(dir.join("a"), vec![1; 5000])?;
    run(tools::command("umount")?.arg(&device.0))?;
    image::e2fsck_clean(&img)?;
    Ok(())
}

/// An image file is shown as the loop device that stands in for it; its own name works with
/// umount(8) and `fjord umount`.
#[test]
fn images_are_unmounted_by_their_names() -> Result<()> {
    let (_scratch, img, dir) = place("names")?;
    let fjord_umount = [program().to_str().context("a name")?, "umount"];
    for (options, by) in
        [("fuseblk", &["umount"][..]), ("fuseblk", &fjord_umount), ("nofuseblk", &fjord_umount)]
    {
        run(Command::new(program())
            .args(["mount", "--daemon", "-o", options])
            .arg(&img)
            .arg(&*dir))?;
        fs::write(dir.join("a"), b"a")?;
        run(Command::new(by[0]).args(&by[1..]).arg(&img)).with_context(|| options.to_owned())?;
        ensure!(!is_mounted(&dir)?, "{options} {by:?}");
        image::e2fsck_clean(&img)?;
    }
    let refused = fjord(&["umount"], &img)?;
    ensure!(
        refused.code == Some(1) && refused.stderr.contains("nothing is mounted"),
        "{refused:?}"
    );
    // A name of one's own needs a mount without a device.
    for (options, is_shown) in [("fuseblk,fsname=mine", false), ("nofuseblk,fsname=mine", true)] {
        let out = run(Command::new(program())
            .args(["mount", "--daemon", "-o", options])
            .arg(&img)
            .arg(&*dir))?;
        let line = table_line(&dir)?;
        fjord(&["umount"], &dir)?.ok()?;
        ensure!(line.starts_with("mine ") == is_shown, "{line}");
        ensure!(out.stderr.contains("fsname=mine is not shown") != is_shown, "{out:?}");
    }
    Ok(())
}

/// Whoever claims the device in the moment between the engine's claim and that of the mount has it;
/// the engine stops, and writes nothing to what is another's by now.
#[test]
fn a_rival_at_the_handing_over_is_left_alone() -> Result<()> {
    let (_scratch, img, _) = place("rival")?;
    let device = Loop::new(&[], &img)?;
    let options = MountOptions::default();
    let fs = Fs::open(&device.0, &options)?;
    fs.root()?.create(b"before", 0o644, &fjord::Cred::root())?.write(0, b"before")?;
    ensure!(is_claimed(&device.0));
    // Nobody came: it is ours again.
    let nobody: Result<(), &str> = fs.hand_over(|| {
        ensure_free(&device.0)?;
        Err("no mount")
    })?;
    ensure!(nobody == Err("no mount") && is_claimed(&device.0));
    fs.root()?.create(b"after", 0o644, &fjord::Cred::root())?;
    let mut second = None;
    let mut rival = None;
    let taken = fs.hand_over(|| {
        // Another instance of fjord is kept off even now.
        second = Some(Fs::open(&device.0, &options).map(drop));
        ensure_free(&device.0)?;
        let flags = OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC;
        rival = rustix::fs::open(&device.0, flags, Mode::empty()).ok();
        Err::<(), _>("no mount")
    });
    ensure!(is_in_use(second.context("not tried")?.err().as_ref()), "a second instance got it");
    let rival = rival.context("the device was not free for a rival")?;
    ensure!(is_in_use(taken.err().as_ref()), "the engine did not notice the rival");
    let before = fs::read(&img)?;
    ensure!(fs.root()?.create(b"late", 0o644, &fjord::Cred::root()).is_err(), "a change was made");
    ensure!(fs.sync().is_err(), "sync promised something");
    ensure!(is_in_use(fs.unmount().err().as_ref()), "unmount promised something");
    ensure!(fs::read(&img)? == before, "something was written to another's device");
    drop((rival, fs));
    fjord(&["recover"], &device.0)?.ok()?;
    image::e2fsck_clean(&img)?;
    let names = fjord(&["ls"], &img)?.ok()?.stdout;
    ensure!(names.contains("before") && names.contains("after"), "{names}");
    Ok(())
}

fn is_in_use(error: Option<&Error>) -> bool {
    matches!(error, Some(Error::Open(e)) if matches!(**e, OpenError::InUse { .. }))
}

/// Others look at a device, too, and have a claim for a moment: blkid(8) of another test.
fn ensure_free(device: &Path) -> Result<(), &'static str> {
    let until = Instant::now() + Duration::from_secs(60);
    while is_claimed(device) {
        if Instant::now() >= until {
            return Err("still claimed");
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// To a second mount(2) of one device the kernel shows the mount there is: nobody would serve the
/// second one. Readers have no claim, so only the mount itself can find out.
#[test]
fn a_device_is_served_by_one_mount() -> Result<()> {
    let (scratch, img, dir) = place("twice")?;
    let device = Loop::new(&[], &img)?;
    let options = MountOptions { read_only: true, ..MountOptions::default() };
    let fuse = FuseOptions { flags: MountFlags::RDONLY, ..FuseOptions::default() };
    let (first, second) = (Fs::open(&device.0, &options)?, Fs::open(&device.0, &options)?);
    let server = Server::mount(&first, &device.0, &dir, &fuse)?;
    let handle = server.handle();
    let serving = std::thread::spawn(move || server.run());
    let other = scratch.join("other");
    fs::create_dir(&other)?;
    let fuse = FuseOptions { kind: fjord_fuse::mount::MountKind::Fuseblk, ..fuse };
    let refused = Server::mount(&second, &device.0, &other, &fuse).err();
    let listed = fs::read_dir(&*dir).map(Iterator::count);
    handle.unmount()?;
    serving.join().ok().context("the server panicked")??;
    let refused = refused.context("mounted twice")?.to_string();
    ensure!(refused.contains("serves it already"), "{refused}");
    ensure!(!is_mounted(&other)?, "the second mount stays");
    ensure!(listed? >= 1, "the first mount suffered");
    second.unmount()?;
    Ok(())
}
