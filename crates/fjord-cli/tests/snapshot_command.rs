//! `fjord snapshot`: copies of mounts under load, and what must not happen when one fails. Needs root.

use std::{
    fs::{self, File, Permissions},
    os::unix::{
        fs::{FileExt, MetadataExt, PermissionsExt},
        process::ExitStatusExt,
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use fjord::{Fs, FsyncPolicyKind, MountOptions};
use fjord_testkit::{
    fjord_mount::{FjordMount, is_mounted},
    image::{self, KernelMount, Scratch},
    numbered::{self, Writers},
    rng::pattern_vec,
    tools::{self, Output},
};
use serde_json::Value;

use in_use::{fjord, mounted, on_linux, program, run};

mod in_use;

fn make(image: &Path, size_bytes: u64) -> Result<()> {
    in_use::make(image, size_bytes, &[])
}

/// Ends a test that would hang.
const PATIENCE: Duration = Duration::from_secs(120);

/// Takes a snapshot, which must succeed; what it told. Another one where the machine is so slow that the
/// limits of time end it.
fn snapshot(args: &[&str], source: &Path, out: &Path) -> Result<Value> {
    let began = Instant::now();
    loop {
        let told = in_use::told(&[&["snapshot"], args].concat(), &[source, out]);
        let is_slow = |error: &anyhow::Error| {
            let said = format!("{error:#}");
            said.contains("the copy was too slow") || said.contains("writes were paused for longer")
        };
        if !told.as_ref().is_err_and(is_slow) || began.elapsed() > PATIENCE {
            return told;
        }
    }
}

/// A snapshot that must fail with this code and these words.
fn refused(args: &[&str], source: &Path, out: &Path, code: i32, words: &str) -> Result<()> {
    in_use::must_fail(&[&["snapshot"], args].concat(), &[source, out], code, words)
}

/// The names in a directory, hidden ones too.
fn names(dir: &Path) -> Result<Vec<String>> {
    let names = fs::read_dir(dir)?.map(|entry| Ok(entry?.file_name().to_string_lossy().into()));
    names.collect()
}

fn allocated_bytes(path: &Path) -> Result<u64> {
    Ok(fs::metadata(path)?.blocks() * 512)
}

/// Takes a snapshot of a mount under load, and has e2fsck and Linux judge it.
fn snapshot_under_load(mount: &FjordMount, args: &[&str], out: &Path) -> Result<Value> {
    let writers = Writers::start(mount.path())?;
    writers.wait_for(12);
    let promised = writers.promised();
    let told = snapshot(args, mount.path(), out)?;
    let attempted = writers.attempted();
    // The mount goes on.
    writers.wait_for(3);
    writers.stop()?;
    image::e2fsck_clean(out)?;
    let recovered = fjord(&["recover"], &[out])?.ok()?.stdout;
    ensure!(recovered.contains("the journal was empty"), "{recovered}");
    // By a loop device that cannot be written, so that Linux finds it clean or not at all.
    on_linux(out, "ro", |dir| {
        numbered::verify(dir, &promised, &attempted)
            .with_context(|| format!("{told}, {promised:?} to {attempted:?}"))
    })?;
    Ok(told)
}

fn under_load(policy: FsyncPolicyKind) -> Result<()> {
    in_use::with_each_scheduler("snapshot-load", policy, |scratch, options| {
        let image = scratch.join("image");
        make(&image, 256 << 20)?;
        let mount = mounted(&image, options)?;
        // So that the copy takes a while.
        fs::write(mount.path().join("large"), pattern_vec(6, 0, 80 << 20))?;
        for (round, args) in [&[][..], &["--force"]].into_iter().enumerate() {
            let told = snapshot_under_load(&mount, args, &scratch.join("copy"))?;
            println!("{round}: {told}");
            ensure!(told["mounted"] == true && told["size_bytes"] == 256 << 20, "{told}");
            ensure!(told["pause_us"].as_u64().is_some(), "{told}");
            for dir in ["Append", "Create", "Replace", "Overwrite", "noise"] {
                fs::remove_dir_all(mount.path().join(dir))?;
            }
        }
        mount.unmount()?;
        image::e2fsck_clean(&image).map(drop)
    })
}

in_use::each_policy!(under_load);

#[test]
fn journaled_data_and_held_back_writes() -> Result<()> {
    for options in [&["-o", "data=journal"][..], &["--writeback-cache"], &["-o", "nofuseblk"]] {
        let scratch = Scratch::new("snapshot-data")?;
        let image = scratch.join("image");
        make(&image, 256 << 20)?;
        let mount = mounted(&image, options)?;
        // What was written and not fsynced before the call is there as well.
        fs::write(mount.path().join("unsynced"), pattern_vec(1, 0, 1_000_000))?;
        snapshot_under_load(&mount, &[], &scratch.join("copy"))?;
        let copied = fjord(&["stat"], &[&scratch.join("copy"), Path::new("/unsynced")])?.ok()?;
        ensure!(copied.stdout.contains("1000000"), "{copied:?}");
        mount.unmount()?;
    }
    Ok(())
}

/// A file system of the kernel on a loop device, thawed and unmounted when dropped.
struct Disk {
    mount: KernelMount,
    _scratch: Scratch,
}

impl Disk {
    fn new(fs_type: &str, make: &[&str], size_bytes: u64) -> Result<Disk> {
        let scratch = Scratch::new("snapshot-disk")?;
        let file = scratch.join("disk");
        image::make_sparse(&file, size_bytes)?;
        run(make[0], &make[1..], &[&file])?;
        let mount = KernelMount::with_type(&file, fs_type, "rw")?;
        fs::set_permissions(mount.path(), Permissions::from_mode(0o755))?;
        Ok(Disk { mount, _scratch: scratch })
    }

    fn ext4(size_bytes: u64) -> Result<Disk> {
        Disk::new("ext4", &["mke2fs", "-q", "-F", "-t", "ext4", "-m", "0"], size_bytes)
    }

    fn join(&self, name: &str) -> PathBuf {
        self.mount.path().join(name)
    }

    fn used_bytes(&self) -> Result<u64> {
        let stat = rustix::fs::statvfs(self.mount.path())?;
        Ok((stat.f_blocks - stat.f_bfree) * stat.f_frsize)
    }

    /// Everything that writes to it waits, until it is thawed.
    fn freeze(&self) -> Result<()> {
        run("fsfreeze", &["-f"], &[self.mount.path()]).map(drop)
    }

    fn thaw(&self) -> Result<()> {
        run("fsfreeze", &["-u"], &[self.mount.path()]).map(drop)
    }

    /// Fails unless nothing is there and nothing is taken.
    fn is_as_before(&self, used_bytes: u64) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        while self.used_bytes()? > used_bytes && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(20));
        }
        let (left, used) = (names(self.mount.path())?, self.used_bytes()?);
        ensure!(left.iter().all(|name| name == "lost+found"), "{left:?}");
        ensure!(used <= used_bytes, "{used} bytes used, {used_bytes} before");
        Ok(())
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // Fails where it is not frozen.
        let _ = self.thaw();
    }
}

#[test]
fn blocks_are_shared_on_xfs() -> Result<()> {
    let xfs = Disk::new("xfs", &["mkfs.xfs", "-q", "-m", "reflink=1"], 1 << 30)?;
    let image = xfs.join("image");
    make(&image, 512 << 20)?;
    for policy in FsyncPolicyKind::ALL {
        let mount = mounted(&image, &["--fsync", policy.name()])?;
        fs::write(mount.path().join("large"), pattern_vec(2, 0, 100 << 20))?;
        File::open(mount.path().join("large"))?.sync_all()?;
        let used = xfs.used_bytes()?;
        let told = snapshot_under_load(&mount, &["--reflink=always"], &xfs.join("copy"))?;
        println!("{}: {told}", policy.name());
        ensure!(told["reflinked"] == true && told["copied_bytes"] == 0, "{told}");
        let more = xfs.used_bytes()?.saturating_sub(used);
        ensure!(more < 60 << 20, "{more} bytes more for a copy that shares 100 MiB");
        // The same without: everything is there twice.
        let never = snapshot(&["--reflink=never"], mount.path(), &xfs.join("bytes"))?;
        ensure!(never["reflinked"] == false, "{never}");
        ensure!(never["copied_bytes"].as_u64() > Some(100 << 20), "{never}");
        image::e2fsck_clean(&xfs.join("bytes"))?;
        // Little room left, which every block that is overwritten may need.
        let filler = File::create(xfs.join("filler"))?;
        let free = rustix::fs::fstatvfs(&filler).map(|stat| stat.f_bavail * stat.f_frsize)?;
        let flags = rustix::fs::FallocateFlags::empty();
        rustix::fs::fallocate(&filler, flags, 0, free.saturating_sub(70 << 20))?;
        drop(filler);
        let out = xfs.join("tight");
        let warned = fjord(&["snapshot"], &[mount.path(), &out])?.ok()?;
        ensure!(warned.stderr.contains("needs space"), "{warned:?}");
        ensure!(warned.stdout.contains("blocks shared; writes paused for"), "{warned:?}");
        mount.unmount()?;
        for name in ["copy", "bytes", "filler", "tight"] {
            fs::remove_file(xfs.join(name))?;
        }
        fs::remove_file(&image)?;
        make(&image, 512 << 20)?;
    }
    // An image that is not mounted shares its blocks as well.
    let told = snapshot(&["--reflink=always"], &image, &xfs.join("copy"))?;
    ensure!(told["reflinked"] == true && told["mounted"] == false, "{told}");
    // Elsewhere they cannot be shared.
    let other = Scratch::new("snapshot-other")?;
    refused(&["--reflink=always"], &image, &other.join("copy"), 1, "cannot be shared")?;
    ensure!(names(other.path())?.is_empty());
    Ok(())
}

#[test]
fn holes_are_kept() -> Result<()> {
    let scratch = Scratch::new("snapshot-holes")?;
    let (image, copy) = (scratch.join("image"), scratch.join("copy"));
    make(&image, 3 << 30)?;
    let mount = mounted(&image, &[])?;
    fs::write(mount.path().join("small"), pattern_vec(3, 0, 5_000_000))?;
    let file = File::create(mount.path().join("sparse"))?;
    file.write_all_at(b"end", 5 << 30)?;
    file.sync_all()?;
    drop(file);
    let told = snapshot(&[], mount.path(), &copy)?;
    ensure!(fs::metadata(&copy)?.len() == 3 << 30, "{told}");
    let allocated = allocated_bytes(&copy)?;
    ensure!(allocated < 24 << 20, "{allocated} bytes, {told}");
    ensure!(fs::metadata(&copy)?.mode() & 0o7777 == fs::metadata(&image)?.mode() & 0o666);
    image::e2fsck_clean(&copy)?;
    // By the name of the image, too, whose copy is its twin once it is not mounted.
    fs::remove_file(&copy)?;
    snapshot(&[], &image, &copy)?;
    mount.unmount()?;
    let told = snapshot(&["-f"], &image, &copy)?;
    ensure!(told["mounted"] == false, "{told}");
    run("cmp", &[], &[&image, &copy])?;
    ensure!(allocated_bytes(&copy)? < 24 << 20);
    Ok(())
}

#[test]
fn places_that_make_no_sense_are_refused() -> Result<()> {
    let scratch = Scratch::new("snapshot-places")?;
    let (image, copy) = (scratch.join("image"), scratch.join("copy"));
    make(&image, 64 << 20)?;
    let mount = mounted(&image, &[])?;
    let dir = mount.path();
    fs::create_dir(dir.join("sub"))?;
    // On the mount itself, by whatever name.
    std::os::unix::fs::symlink(dir.join("sub"), scratch.join("way"))?;
    for out in [dir.join("copy"), dir.join("sub/copy"), scratch.join("way/copy")] {
        refused(&[], dir, &out, 2, "on the mount that it would copy")?;
        refused(&[], &image, &out, 2, "on the mount that it would copy")?;
    }
    ensure!(names(&dir.join("sub"))?.is_empty());
    // On a mount whose image lies on it, and on Linux's mount of one.
    for (name, is_fjord) in [("by-fjord", true), ("by-linux", false)] {
        let inner = dir.join(name);
        make(&inner, 16 << 20)?;
        let by_fjord = is_fjord.then(|| mounted(&inner, &[])).transpose()?;
        let by_linux = (!is_fjord).then(|| image::KernelMount::new(&inner, "rw")).transpose()?;
        let place = match (&by_fjord, &by_linux) {
            (Some(mount), _) => mount.path(),
            (_, Some(mount)) => mount.path(),
            (None, None) => unreachable!("one of both is mounted"),
        };
        refused(&[], dir, &place.join("copy"), 2, "on the mount that it would copy")?;
        by_fjord.map_or(Ok(()), |mount| mount.unmount().map(drop))?;
        by_linux.map_or(Ok(()), |mount| mount.unmount().map(drop))?;
    }
    // The image itself, by whatever name.
    fs::hard_link(&image, scratch.join("same"))?;
    std::os::unix::fs::symlink("image", scratch.join("link"))?;
    for name in ["image", "same", "link"] {
        for source in [dir, &image] {
            refused(&[], source, &scratch.join(name), 1, "already exists")?;
            let said = fjord(&["snapshot", "-f"], &[source, &scratch.join(name)])?;
            ensure!(matches!(said.code, Some(2 | 3)), "{said:?}");
        }
    }
    // What is there already, and what is no file.
    fs::write(&copy, "old")?;
    refused(&[], dir, &copy, 1, "--force")?;
    refused(&["-f"], dir, Path::new("/dev/null"), 2, "not a regular file")?;
    refused(&["-f"], dir, scratch.path(), 2, "is a directory")?;
    refused(&[], dir, &scratch.join("none/copy"), 1, "none")?;
    ensure!(fs::read(&copy)? == b"old");
    snapshot(&["--force"], dir, &copy)?;
    image::e2fsck_clean(&copy)?;
    mount.unmount()?;
    for name in ["image", "same", "link"] {
        refused(&["-f"], &image, &scratch.join(name), 2, "the image itself")?;
    }
    image::e2fsck_clean(&image)?;
    // What is no image, no mount of fjord.
    refused(&[], Path::new("/proc"), &scratch.join("x"), 1, "not on a fjord mount")?;
    refused(&[], scratch.path(), &scratch.join("x"), 1, "not on a fjord mount")?;
    refused(&[], Path::new("/dev/null"), &scratch.join("x"), 2, "character device")?;
    refused(&[], &scratch.join("nothing"), &scratch.join("x"), 1, "nothing")?;
    fs::write(scratch.join("text"), vec![b'x'; 9000])?;
    refused(&[], &scratch.join("text"), &scratch.join("x"), 1, "not an ext2, ext3 or ext4 image")?;
    refused(&["--reflink=maybe"], &image, &scratch.join("x"), 2, "auto, always or never")?;
    ensure!(!scratch.join("x").exists());
    Ok(())
}

#[test]
fn images_that_others_use_are_refused() -> Result<()> {
    let scratch = Scratch::new("snapshot-used")?;
    let (image, copy) = (scratch.join("image"), scratch.join("copy"));
    make(&image, 64 << 20)?;
    let linux = KernelMount::new(&image, "rw")?;
    refused(&[], &image, &copy, 3, "mounted by Linux")?;
    refused(&[], linux.path(), &copy, 1, "not on a fjord mount")?;
    linux.unmount()?;
    // A program that embeds fjord.
    let fs = Fs::open(&image, &MountOptions::default())?;
    refused(&[], &image, &copy, 3, "in use by process")?;
    fs.unmount()?;
    // A place that is in use as an image.
    let other = scratch.join("other");
    make(&other, 64 << 20)?;
    let linux = KernelMount::new(&other, "rw")?;
    refused(&["-f"], &image, &other, 3, "mounted by Linux")?;
    linux.unmount()?;
    let fs = Fs::open(&other, &MountOptions::default())?;
    refused(&["-f"], &image, &other, 3, "in use by process")?;
    fs.unmount()?;
    // A mark of multi-mount protection: of a mount of ours it is taken from the copy.
    let protected = scratch.join("mmp");
    image::make_sparse(&protected, 64 << 20)?;
    run("mke2fs", &["-q", "-F", "-t", "ext4", "-O", "mmp"], &[&protected])?;
    let mut mount = mounted(&protected, &[])?;
    // To see that nobody else has it takes ten seconds. On a busy machine a call may take as long; but
    // one of many does not.
    let took = || -> Result<Duration> {
        let began = Instant::now();
        snapshot(&["-f"], mount.path(), &copy)?;
        Ok(began.elapsed())
    };
    let began = Instant::now();
    while took()? >= Duration::from_secs(5) {
        ensure!(began.elapsed() < PATIENCE, "it looks whether the mark changes");
    }
    image::e2fsck_clean(&copy)?;
    mount.kill()?;
    mount.detach();
    // Of another node it is a reason not to copy.
    refused(&["-f"], &protected, &copy, 1, "clear the mark")?;
    // Nothing recovers what has no journal.
    let plain = scratch.join("plain");
    image::make_sparse(&plain, 64 << 20)?;
    run("mke2fs", &["-q", "-F", "-t", "ext2"], &[&plain])?;
    let mount = mounted(&plain, &[])?;
    refused(&["-f"], mount.path(), &copy, 1, "without a journal")?;
    mount.unmount()?;
    let mount = mounted(&plain, &["--read-only"])?;
    snapshot(&["-f"], mount.path(), &copy)?;
    run("cmp", &[], &[&plain, &copy])?;
    mount.unmount()
}

#[test]
fn only_the_owner_and_root_may_ask() -> Result<()> {
    let scratch = Scratch::new("snapshot-owner")?;
    let image = scratch.join("image");
    make(&image, 64 << 20)?;
    let mount = mounted(&image, &[])?;
    let mut nobody = in_use::as_nobody(&scratch, &mount)?;
    let dir = scratch.join("open");
    fs::create_dir(&dir)?;
    fs::set_permissions(&dir, Permissions::from_mode(0o777))?;
    let said = tools::run(nobody.arg("snapshot").arg(mount.path()).arg(dir.join("copy")))?;
    ensure!(said.code == Some(1) && said.stderr.contains("only root"), "{said:?}");
    ensure!(names(&dir)?.is_empty());
    snapshot(&[], mount.path(), &dir.join("copy"))?;
    mount.unmount()
}

#[test]
fn read_only_mounts_block_devices_and_dirty_images() -> Result<()> {
    let scratch = Scratch::new("snapshot-kinds")?;
    let (image, copy) = (scratch.join("image"), scratch.join("copy"));
    make(&image, 128 << 20)?;
    let mut mount = mounted(&image, &["--fsync", "ijournal"])?;
    fs::write(mount.path().join("kept"), "kept")?;
    File::open(mount.path().join("kept"))?.sync_all()?;
    mount.kill()?;
    mount.detach();
    // Dirty and not mounted: the copy is recovered, the image is not touched.
    let before = fs::read(&image)?;
    let told = snapshot(&[], &image, &copy)?;
    ensure!(told["mounted"] == false, "{told}");
    ensure!(fs::read(&image)? == before);
    image::e2fsck_clean(&copy)?;
    ensure!(fjord(&["cat"], &[&copy, Path::new("/kept")])?.ok()?.stdout == "kept");
    // Read-only, as it is.
    for options in ["ro,noload", "ro"] {
        let mount = mounted(&image, &["-o", options])?;
        snapshot(&["-f"], mount.path(), &copy)?;
        image::e2fsck_clean(&copy)?;
        ensure!(fjord(&["cat"], &[&copy, Path::new("/kept")])?.ok()?.stdout == "kept");
        mount.unmount()?;
    }
    // A block device, by its own name and by the mount's.
    let attached = run("losetup", &["--find", "--show"], &[&image])?.stdout;
    let device = Loop(attached.trim().into());
    let mount = mounted(&device.0, &[])?;
    let told = snapshot_under_load(&mount, &["-f"], &copy)?;
    ensure!(told["reflinked"] == false, "{told}");
    snapshot(&["-f"], &device.0, &copy)?;
    image::e2fsck_clean(&copy)?;
    ensure!(allocated_bytes(&copy)? < 100 << 20);
    mount.unmount()?;
    let told = snapshot(&["-f"], &device.0, &copy)?;
    ensure!(told["mounted"] == false, "{told}");
    run("cmp", &[], &[&image, &copy])?;
    Ok(())
}

/// A loop device, detached when dropped.
struct Loop(PathBuf);

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = tools::command("losetup").and_then(|mut c| tools::run(c.arg("-d").arg(&self.0)));
    }
}

#[test]
fn a_full_disk_leaves_nothing() -> Result<()> {
    let scratch = Scratch::new("snapshot-full")?;
    let image = scratch.join("image");
    make(&image, 256 << 20)?;
    let mount = mounted(&image, &[])?;
    fs::write(mount.path().join("large"), pattern_vec(4, 0, 100 << 20))?;
    let small = Disk::ext4(32 << 20)?;
    let used = small.used_bytes()?;
    let writers = Writers::start(mount.path())?;
    writers.wait_for(3);
    refused(&[], mount.path(), &small.join("copy"), 1, "No space left")?;
    small.is_as_before(used)?;
    // Nobody was hurt, and the next one may come at once.
    writers.wait_for(3);
    writers.stop()?;
    snapshot(&[], mount.path(), &scratch.join("copy"))?;
    mount.unmount()?;
    refused(&[], &image, &small.join("copy"), 1, "No space left")?;
    small.is_as_before(used)
}

/// A snapshot under way to a disk that hangs.
struct Copying {
    child: Child,
}

impl Copying {
    /// Starts one, and freezes the disk when a part of 300 MiB is written.
    fn start(source: &Path, disk: &Disk, out: &Path) -> Result<Copying> {
        let began = Instant::now();
        loop {
            let used = disk.used_bytes()?;
            let child = Command::new(program())
                .arg("snapshot")
                .args([source, out])
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()?;
            let mut copying = Copying { child };
            while disk.used_bytes()? < used + (2 << 20) && copying.is_running()? {
                ensure!(began.elapsed() < PATIENCE, "nothing is written");
                std::thread::yield_now();
            }
            disk.freeze()?;
            if copying.is_running()? && disk.used_bytes()? < used + (200 << 20) {
                return Ok(copying);
            }
            // This thread was slower than the copy.
            disk.thaw()?;
            copying.end()?.ok()?;
            ensure!(began.elapsed() < PATIENCE, "the copies are too fast for this test");
            fs::remove_file(out)?;
            disk.is_as_before(used)?;
        }
    }

    fn is_running(&mut self) -> Result<bool> {
        Ok(self.child.try_wait()?.is_none())
    }

    fn end(self) -> Result<Output> {
        let said = self.child.wait_with_output()?;
        Ok(Output {
            command: "fjord snapshot".into(),
            code: said.status.code(),
            stdout: String::from_utf8_lossy(&said.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&said.stderr).into_owned(),
        })
    }

    /// Kills the command. It does not end before its write to the disk does.
    fn kill(&mut self) -> Result<()> {
        Ok(self.child.kill()?)
    }

    fn has_been_killed(mut self) -> Result<()> {
        ensure!(self.child.wait()?.signal() == Some(libc::SIGKILL), "it had ended before");
        Ok(())
    }
}

/// A mount with 300 MiB in it, and a disk for copies.
fn slow_copy(name: &str) -> Result<(Scratch, FjordMount, Disk)> {
    let scratch = Scratch::new(name)?;
    let image = scratch.join("image");
    make(&image, 512 << 20)?;
    let mount = mounted(&image, &[])?;
    for part in 0..3 {
        let path = mount.path().join(format!("large-{part}"));
        fs::write(path, pattern_vec(part, 0, 100 << 20))?;
    }
    run("sync", &["-f"], &[mount.path()])?;
    let disk = Disk::ext4(700 << 20)?;
    Ok((scratch, mount, disk))
}

/// The disk for the copy hangs: writes to the mount wait for seconds at the most, and the snapshot
/// fails. Another one is refused meanwhile, the mount is busy, and a killed command leaves nothing.
#[test]
fn a_disk_that_hangs_holds_nobody_up() -> Result<()> {
    let (scratch, mount, disk) = slow_copy("snapshot-hangs")?;
    let used = disk.used_bytes()?;
    let copying = Copying::start(mount.path(), &disk, &disk.join("copy"))?;
    refused(&[], mount.path(), &scratch.join("second"), 3, "another snapshot")?;
    let unmounted = tools::run(tools::command("umount")?.arg(mount.path()))?;
    ensure!(unmounted.code != Some(0) && is_mounted(mount.path())?, "{unmounted:?}");
    // All that is there is overwritten, more than is kept in memory, while the disk hangs.
    let began = Instant::now();
    for part in 0..3 {
        let path = mount.path().join(format!("large-{part}"));
        let file = File::options().write(true).open(path)?;
        file.write_all_at(&pattern_vec(part + 9, 0, 100 << 20), 0)?;
        file.sync_all()?;
    }
    let took = began.elapsed();
    println!("300 MiB overwritten in {took:?} beside a snapshot that hangs");
    disk.thaw()?;
    let said = copying.end()?;
    ensure!(said.code == Some(1) && said.stderr.contains("the copy was too slow"), "{said:?}");
    disk.is_as_before(used)?;
    // The command is killed while the server waits for the disk.
    let mut copying = Copying::start(mount.path(), &disk, &disk.join("copy"))?;
    copying.kill()?;
    copying.has_been_killed()?;
    fs::write(mount.path().join("more"), "more")?;
    File::open(mount.path().join("more"))?.sync_all()?;
    disk.thaw()?;
    disk.is_as_before(used)?;
    let told = snapshot(&[], mount.path(), &disk.join("copy"))?;
    image::e2fsck_clean(&disk.join("copy"))?;
    println!("{told}");
    mount.unmount()
}

/// Kills a command in the middle of a copy, which goes on then.
fn killed_copy(source: &Path, disk: &Disk) -> Result<()> {
    let mut copying = Copying::start(source, disk, &disk.join("copy"))?;
    copying.kill()?;
    disk.thaw()?;
    copying.has_been_killed()
}

#[test]
fn a_killed_command_leaves_nothing() -> Result<()> {
    let (_scratch, mount, disk) = slow_copy("snapshot-killed")?;
    let used = disk.used_bytes()?;
    let writers = Writers::start(mount.path())?;
    for _ in 0..3 {
        killed_copy(mount.path(), &disk)?;
        disk.is_as_before(used)?;
        writers.wait_for(3);
    }
    writers.stop()?;
    // The image is not mounted: this process copies.
    let image = _scratch.join("image");
    mount.unmount()?;
    killed_copy(&image, &disk)?;
    disk.is_as_before(used)?;
    snapshot(&[], &image, &disk.join("copy"))?;
    Ok(())
}

/// The mount is cut off, or its process is killed, in the middle of a copy.
#[test]
fn a_mount_that_ends_ends_its_snapshot() -> Result<()> {
    let (scratch, mut mount, disk) = slow_copy("snapshot-cut")?;
    let used = disk.used_bytes()?;
    let copying = Copying::start(mount.path(), &disk, &disk.join("copy"))?;
    // It ends when its write to the disk does.
    run("kill", &["-KILL", &mount.pid().to_string()], &[])?;
    disk.thaw()?;
    mount.kill()?;
    let said = copying.end()?;
    ensure!(said.code == Some(1) && said.stderr.contains("ended during"), "{said:?}");
    disk.is_as_before(used)?;
    mount.detach();
    let image = scratch.join("image");
    let mount = mounted(&image, &[])?;
    let copying = Copying::start(mount.path(), &disk, &disk.join("copy"))?;
    // Cuts the connection; whether the mount goes with it depends on who notices first.
    let cut = tools::run(tools::command("umount")?.arg("-f").arg(mount.path()))?;
    disk.thaw()?;
    ensure!(matches!(cut.code, Some(0 | 32)), "{cut:?}");
    let said = copying.end()?;
    ensure!(said.code == Some(1), "{said:?}");
    let words = ["ended during", "unmounted during"];
    ensure!(words.iter().any(|words| said.stderr.contains(words)), "{said:?}");
    disk.is_as_before(used)?;
    let began = Instant::now();
    while image::e2fsck_clean(&image).is_err() && began.elapsed() < PATIENCE {
        std::thread::sleep(Duration::from_millis(50));
    }
    image::e2fsck_clean(&image)?;
    drop(mount);
    // A lazy unmount and a signal wait for the copy.
    for lazy in [true, false] {
        let began = Instant::now();
        while !waits_for_the_copy(&image, &disk, lazy)? {
            ensure!(began.elapsed() < PATIENCE, "the copy is too slow each time");
        }
    }
    image::e2fsck_clean(&image)?;
    Ok(())
}

/// Unmounts, lazily or by a signal, in the middle of a copy, which must be complete. False where the
/// machine is so slow that the patience of the signal has ended before.
fn waits_for_the_copy(image: &Path, disk: &Disk, lazy: bool) -> Result<bool> {
    let mount = mounted(image, &[])?;
    let copying = Copying::start(mount.path(), disk, &disk.join("copy"))?;
    let began = Instant::now();
    if lazy {
        run("umount", &["-l"], &[mount.path()])?;
    } else {
        run("kill", &["-TERM", &mount.pid().to_string()], &[])?;
    }
    disk.thaw()?;
    let said = copying.end()?;
    let is_late = !lazy && said.code != Some(0) && began.elapsed() >= Duration::from_secs(5);
    if !is_late {
        said.ok()?;
        image::e2fsck_clean(&disk.join("copy"))?;
        fs::remove_file(disk.join("copy"))?;
    }
    drop(mount);
    fjord(&["recover"], &[image])?.ok()?;
    Ok(!is_late)
}

/// A file system without nameless files: nothing is left but after SIGKILL.
#[test]
fn places_without_nameless_files() -> Result<()> {
    let scratch = Scratch::new("snapshot-named")?;
    let (image, disk, dir) = (scratch.join("image"), scratch.join("disk"), scratch.join("dir"));
    make(&image, 512 << 20)?;
    let mount = mounted(&image, &[])?;
    fs::write(mount.path().join("large"), pattern_vec(5, 0, 100 << 20))?;
    image::make_sparse(&disk, 700 << 20)?;
    run("mke2fs", &["-q", "-F", "-t", "ext4"], &[&disk])?;
    fs::create_dir(&dir)?;
    run("fuse2fs", &["-o", "fakeroot"], &[&disk, &dir])?;
    let _unmounted = Unmounted(&dir);
    let nameless = rustix::fs::OFlags::TMPFILE | rustix::fs::OFlags::RDWR;
    let mode = rustix::fs::Mode::RUSR;
    ensure!(rustix::fs::open(&dir, nameless, mode).is_err(), "fuse2fs has nameless files by now");
    snapshot(&[], mount.path(), &dir.join("copy"))?;
    image::e2fsck_clean(&dir.join("copy"))?;
    refused(&[], mount.path(), &dir.join("copy"), 1, "--force")?;
    snapshot(&["--force"], mount.path(), &dir.join("copy"))?;
    ensure!(names(&dir)?.iter().all(|name| ["copy", "lost+found"].contains(&name.as_str())));
    fs::remove_file(dir.join("copy"))?;
    let began = Instant::now();
    while !is_ended_in_the_middle(mount.path(), &dir)? {
        // This thread was slower than the copy.
        ensure!(began.elapsed() < PATIENCE, "the copies are too fast for this test");
        fs::remove_file(dir.join("copy"))?;
    }
    // libfuse removes a file that was open a moment later.
    let began = Instant::now();
    while names(&dir)?.len() > 1 && began.elapsed() < PATIENCE {
        std::thread::sleep(Duration::from_millis(10));
    }
    let left = names(&dir)?;
    ensure!(left == ["lost+found"], "{left:?}");
    mount.unmount()
}

/// Ends a command by SIGTERM when its copy has a name; whether it came in time.
fn is_ended_in_the_middle(source: &Path, dir: &Path) -> Result<bool> {
    let mut command = Command::new(program());
    command.arg("snapshot").args([source, &dir.join("copy")]);
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
    while names(dir)?.len() < 2 && child.try_wait()?.is_none() {
        std::thread::yield_now();
    }
    if child.try_wait()?.is_none() {
        run("kill", &["-TERM", &child.id().to_string()], &[])?;
    }
    let code = child.wait()?.code();
    ensure!(matches!(code, Some(0 | 1)), "{code:?}");
    Ok(code == Some(1))
}

/// Unmounts a directory when dropped.
struct Unmounted<'a>(&'a Path);

impl Drop for Unmounted<'_> {
    fn drop(&mut self) {
        let _ = image::unmount(self.0);
    }
}

#[test]
fn the_help_has_examples() -> Result<()> {
    let help = fjord(&["snapshot", "--help"], &[])?.ok()?.stdout;
    for words in ["Examples:", "fjord snapshot /mnt backup.img", "--reflink", "--force", "--json"] {
        ensure!(help.contains(words), "{words}: {help}");
    }
    Ok(())
}
