//! `fjord resize`: images and mounts that grow, under load, killed, and what is refused. Needs root.

use std::{
    fs::{self, File},
    os::unix::fs::FileExt,
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use fjord::{Fs, FsyncPolicyKind, MountOptions};
use fjord_testkit::{
    features::{FEATURE_SETS, Support},
    image::{self, KernelMount, Scratch},
    numbered::{self, Writers},
    rng::pattern_vec,
    tools,
};
use serde_json::Value;

use in_use::{fjord, mounted, on_linux, program, run};

mod in_use;

const MIB: u64 = 1 << 20;

/// A new image with small block groups: 16 have a block of descriptors.
fn make(image: &Path, size_bytes: u64) -> Result<()> {
    in_use::make(image, size_bytes, &["-b", "1024"])
}

/// The target of a resize and the size, if one is given.
fn operands<'a>(target: &'a Path, size: &[&'a str]) -> Vec<&'a Path> {
    [target].into_iter().chain(size.iter().copied().map(Path::new)).collect()
}

/// Resizes, which must succeed; what it told.
fn resize(target: &Path, size: &[&str]) -> Result<Value> {
    in_use::told(&["resize"], &operands(target, size))
}

/// A call that must fail with this code and these words.
fn refused(target: &Path, size: &[&str], code: i32, words: &str) -> Result<()> {
    in_use::must_fail(&["resize"], &operands(target, size), code, words)
}

/// Blocks of 1 KiB and more that a file system has, in bytes, as statfs tells.
fn size_bytes(dir: &Path) -> Result<u64> {
    let stat = rustix::fs::statvfs(dir)?;
    Ok(stat.f_blocks * stat.f_frsize)
}

/// Writes files until nothing more fits. Returns how many bytes did.
fn fill(dir: &Path) -> Result<u64> {
    let mut written = 0;
    for number in 0.. {
        let file = File::create(dir.join(format!("fill{number}")))?;
        let bytes = pattern_vec(number, 0, MIB as usize);
        for at in 0..16 {
            match file.write_all_at(&bytes, at * MIB) {
                Ok(()) => written += MIB,
                Err(error) if error.raw_os_error() == Some(libc::ENOSPC) => return Ok(written),
                Err(error) => return Err(error.into()),
            }
        }
    }
    Ok(written)
}

/// Grows a mount several times while others write; e2fsck and Linux judge.
fn under_load(policy: FsyncPolicyKind) -> Result<()> {
    // Within a group, to the end of it, into a block of descriptors, over several, a large step.
    const SIZES: [&str; 5] = ["+1M", "104M", "+60M", "+200M", "+1G"];
    in_use::with_each_scheduler("resize-load", policy, |scratch, options| {
        let image = scratch.join("image");
        make(&image, 96 * MIB + 1000 * 1024)?;
        let linux_size = on_linux(&image, "ro", size_bytes)?;
        let mount = mounted(&image, options)?;
        // fjord does not count the areas behind the log for data.
        let areas_bytes = linux_size - size_bytes(mount.path())?;
        let writers = Writers::start(mount.path())?;
        writers.wait_for(3);
        let mut old_bytes = 0;
        for size in SIZES {
            let told = resize(mount.path(), &[size])?;
            println!("{told}");
            ensure!(told["mounted"] == true, "{told}");
            ensure!(told["new_bytes"].as_u64() > told["old_bytes"].as_u64(), "{told}");
            ensure!(old_bytes == 0 || told["old_bytes"] == old_bytes, "{told}");
            old_bytes = told["new_bytes"].as_u64().context("a size")?;
            writers.wait_for(2);
            // What is new is used at once.
            fs::write(mount.path().join(format!("large{size}")), pattern_vec(5, 0, 30 << 20))?;
        }
        ensure!(fs::metadata(&image)?.len() == old_bytes, "{old_bytes}");
        let (size, promised) = (size_bytes(mount.path())?, writers.promised());
        writers.wait_for(2);
        // One more may have begun.
        let attempted = writers.attempted().map(|number| number + 1);
        writers.stop()?;
        mount.unmount()?;
        image::e2fsck_clean(&image)?;
        on_linux(&image, "ro", |dir| {
            let linux_size = size_bytes(dir)?;
            ensure!(linux_size == size + areas_bytes, "{linux_size} {size} {areas_bytes}");
            numbered::verify(dir, &promised, &attempted)?;
            for size in SIZES {
                let found = fs::read(dir.join(format!("large{size}")))?;
                ensure!(found == pattern_vec(5, 0, 30 << 20), "large{size}");
            }
            Ok(())
        })
    })
}

in_use::each_policy!(under_load);

/// Each is killed at another moment of a long growth.
fn killed(policy: FsyncPolicyKind) -> Result<()> {
    for round in 0..10 {
        let scratch = Scratch::new("resize-killed")?;
        let image = scratch.join("image");
        make(&image, 96 * MIB)?;
        let mut mount = mounted(&image, &["--fsync", policy.name()])?;
        let writers = Writers::start(mount.path())?;
        writers.wait_for(2);
        let mut growing = Command::new(program())
            .arg("resize")
            .args([mount.path(), Path::new("4G")])
            .stderr(Stdio::null())
            .spawn()?;
        std::thread::sleep(Duration::from_millis(5 + round * 12));
        let promised = writers.promised();
        mount.kill()?;
        let attempted = writers.attempted();
        let _ = writers.stop();
        growing.wait()?;
        mount.detach();
        if policy == FsyncPolicyKind::Compound {
            let copy = scratch.join("copy");
            image::copy_sparse(&image, &copy)?;
            image::e2fsck_repair(&copy)?;
            image::e2fsck_clean(&copy)?;
        }
        let before = scratch.join("before");
        image::copy_sparse(&image, &before)?;
        let told = fjord(&["recover", "--json"], &[&image])?.ok()?;
        image::e2fsck_clean(&image).inspect_err(|_| describe(&before, &told.stdout))?;
        let linux = KernelMount::new(&image, "rw")?;
        numbered::verify(linux.path(), &promised, &attempted)
            .with_context(|| format!("round {round}: {promised:?} to {attempted:?}"))?;
        let size = size_bytes(linux.path())?;
        println!("{} round {round}: {size} bytes", policy.name());
        ensure!(size > 80 * MIB, "{size}");
        linux.unmount()?;
        // What was left undone is done.
        let told = resize(&image, &["4G"])?;
        ensure!(told["new_bytes"] == 4096 * MIB, "{told}");
        image::e2fsck_clean(&image)?;
    }
    Ok(())
}

/// Prints what a recovery that went wrong began with, and what it told.
fn describe(before: &Path, told: &str) {
    println!("{told}");
    let show = |command: &str| {
        let said = tools::run(tools::command("debugfs")?.args(["-R", command]).arg(before))?;
        println!("{command}\n{}", said.stdout);
        anyhow::Ok(())
    };
    for command in ["show_super_stats -h", "logdump -S"] {
        if let Err(error) = show(command) {
            println!("{command}: {error:#}");
        }
    }
}

mod killed_in {
    super::in_use::each_policy!(super::killed);
}

/// Each set, unmounted and mounted; then fjord and Linux use all of it.
#[test]
fn every_feature_set_can_be_used_until_it_is_full() -> Result<()> {
    let scratch = Scratch::new("resize-sets")?;
    let image = scratch.join("image");
    for set in FEATURE_SETS.iter().filter(|set| set.support == Support::Write) {
        let _ = fs::remove_file(&image);
        image::make_sparse(&image, 90 * MIB)?;
        run("mke2fs", &[&["-q", "-F"], set.mke2fs].concat(), &[&image])?;
        let used = || -> Result<()> {
            let told = resize(&image, &["120M"])?;
            ensure!(told["mounted"] == false && told["new_bytes"] == 120 * MIB, "{told}");
            image::e2fsck_clean(&image)?;
            let mount = mounted(&image, &[])?;
            fs::write(mount.path().join("kept"), pattern_vec(1, 0, 300_000)).context("kept")?;
            resize(mount.path(), &["+150M"])?;
            resize(&image, &["+30M"])?;
            let filled = fill(mount.path())?;
            ensure!(filled > 200 * MIB, "{filled} bytes fit");
            ensure!(fs::read(mount.path().join("kept"))? == pattern_vec(1, 0, 300_000));
            mount.unmount()?;
            image::e2fsck_clean(&image)?;
            if set.kernel_mounts()? {
                let linux = KernelMount::new(&image, "rw")?;
                ensure!(fs::read(linux.path().join("kept"))? == pattern_vec(1, 0, 300_000));
                ensure!(fs::read(linux.path().join("fill3"))?.len() == 16 << 20);
                fs::remove_file(linux.path().join("fill3")).context("Linux removes a file")?;
                // Linux may count the blocks as free later than the call returns.
                rustix::fs::syncfs(File::open(linux.path())?)?;
                fs::write(linux.path().join("linux"), pattern_vec(2, 0, 9 << 20))
                    .context("Linux uses what it has freed")?;
                linux.unmount()?;
                image::e2fsck_clean(&image)?;
            }
            Ok(())
        };
        used().with_context(|| set.name)?;
    }
    Ok(())
}

/// resize2fs of a mount grows the file and fails; who ran it goes on with fjord.
#[test]
fn a_file_that_is_larger_already_is_grown_into() -> Result<()> {
    let scratch = Scratch::new("resize-larger")?;
    let image = scratch.join("image");
    make(&image, 64 * MIB)?;
    let mount = mounted(&image, &[])?;
    let said = tools::run(tools::command("resize2fs")?.args([&image, Path::new("300M")]))?;
    ensure!(said.code != Some(0), "{said:?}");
    let file = File::options().write(true).open(&image)?;
    // Somebody's bytes lie there, too.
    file.write_all_at(&vec![0xff; 200 << 20], 64 << 20)?;
    file.set_len(300 << 20)?;
    let told = resize(mount.path(), &[])?;
    ensure!(told["old_bytes"] == 64 * MIB && told["new_bytes"] == 300 * MIB, "{told}");
    let said = tools::run(Command::new(program()).arg("resize").arg(mount.path()))?.ok()?;
    ensure!(said.stdout.contains("300.0 MiB as before"), "{said:?}");
    fs::create_dir(mount.path().join("dir"))?;
    for number in 0..40_000 {
        File::create(mount.path().join(format!("dir/{number}")))?;
    }
    ensure!(fill(mount.path())? > 180 * MIB);
    mount.unmount()?;
    image::e2fsck_clean(&image)?;
    let linux = KernelMount::new(&image, "rw")?;
    ensure!(fs::read_dir(linux.path().join("dir"))?.count() == 40_000);
    linux.unmount()?;
    image::e2fsck_clean(&image)?;
    Ok(())
}

#[test]
fn sizes_that_cannot_be_are_refused() -> Result<()> {
    let scratch = Scratch::new("resize-refused")?;
    let image = scratch.join("image");
    make(&image, 64 * MIB)?;
    let before = fs::read(&image)?;
    refused(&image, &["32M"], 2, "resize2fs")?;
    refused(&image, &["32Q"], 2, "not a size")?;
    refused(&image, &["1000000P"], 2, "larger than any image")?;
    ensure!(fs::metadata(&image)?.len() == 64 * MIB);
    let mount = mounted(&image, &[])?;
    refused(mount.path(), &["63M"], 2, "resize2fs")?;
    mount.unmount()?;
    let mount = mounted(&image, &["--read-only"])?;
    refused(mount.path(), &["128M"], 1, "mounted read-only")?;
    mount.unmount()?;
    ensure!(fs::metadata(&image)?.len() == before.len() as u64);
    // Without reserved blocks and without meta_bg: as far as the descriptor blocks reach.
    let plain = scratch.join("plain");
    image::make_sparse(&plain, 64 * MIB)?;
    run("mke2fs", &["-q", "-F", "-b", "1024", "-t", "ext4", "-O", "^resize_inode"], &[&plain])?;
    refused(&plain, &["129M"], 5, "resize2fs")?;
    ensure!(fs::metadata(&plain)?.len() == 64 * MIB);
    let told = resize(&plain, &["128M"])?;
    ensure!(told["new_bytes"] == 128 * MIB, "{told}");
    image::e2fsck_clean(&plain)?;
    // What the message names does it, after the check that it asks for where an image was mounted since the
    // last one.
    image::e2fsck_repair(&plain)?;
    run("truncate", &["-s", "200M"], &[&plain])?;
    run("resize2fs", &[], &[&plain])?;
    image::e2fsck_clean(&plain)?;
    // What is no image, and no mount of fjord.
    refused(Path::new("/proc"), &["1G"], 1, "not on a fjord mount")?;
    refused(&scratch.join("none"), &["1G"], 1, "none")?;
    let linux = KernelMount::new(&image, "rw")?;
    refused(&image, &["1G"], 3, "mounted by Linux")?;
    linux.unmount()?;
    let fs = Fs::open(&image, &MountOptions::default())?;
    refused(&image, &["1G"], 3, "in use by process")?;
    fs.unmount()?;
    Ok(())
}

#[test]
fn only_the_owner_and_root_may_ask() -> Result<()> {
    let scratch = Scratch::new("resize-owner")?;
    let image = scratch.join("image");
    make(&image, 64 * MIB)?;
    let mount = mounted(&image, &[])?;
    let mut nobody = in_use::as_nobody(&scratch, &mount)?;
    let said = tools::run(nobody.arg("resize").arg(mount.path()).arg("128M"))?;
    ensure!(said.code == Some(1) && said.stderr.contains("only root"), "{said:?}");
    ensure!(fs::metadata(&image)?.len() == 64 * MIB);
    resize(mount.path(), &["128M"])?;
    mount.unmount()
}

/// A loop device stands for every block device: it has the size that it has.
#[test]
fn block_devices_have_their_size() -> Result<()> {
    let scratch = Scratch::new("resize-device")?;
    let image = scratch.join("image");
    make(&image, 64 * MIB)?;
    run("truncate", &["-s", "100M"], &[&image])?;
    let name = run("losetup", &["--find", "--show"], &[&image])?.stdout;
    let device = Path::new(name.trim());
    let used = || -> Result<()> {
        refused(device, &["200M"], 1, "losetup -c")?;
        let mount = mounted(device, &[])?;
        refused(mount.path(), &["200M"], 1, "losetup -c")?;
        let told = resize(mount.path(), &[])?;
        ensure!(told["new_bytes"] == 100 * MIB, "{told}");
        run("truncate", &["-s", "300M"], &[&image])?;
        run("losetup", &["-c"], &[device])?;
        let told = resize(mount.path(), &["200M"])?;
        ensure!(told["new_bytes"] == 200 * MIB, "{told}");
        fs::write(mount.path().join("file"), pattern_vec(1, 0, 120 << 20))?;
        mount.unmount()?;
        let told = resize(device, &[])?;
        ensure!(told["new_bytes"] == 300 * MIB, "{told}");
        image::e2fsck_clean(device)?;
        Ok(())
    };
    let result = used();
    run("losetup", &["-d"], &[device])?;
    result
}
