//! The daemon's memory when the kernel remembers many files, and that a file the kernel remembers
//! stays what it is although the engine has let go of its inode. Needs root.

use std::{
    ffi::CString,
    fs::{self, File},
    io::Read,
    os::{
        fd::AsRawFd,
        unix::{
            ffi::OsStrExt,
            fs::{FileExt, MetadataExt, OpenOptionsExt},
        },
    },
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};
use fjord_testkit::{
    features,
    fjord_mount::FjordMount,
    image::{self, Scratch},
};

const CACHE_BYTES: u64 = 8 << 20;
const FILE_COUNT: usize = 40_000;
/// What may come on top of the cache. An inode in memory for each file would be twice this.
const ALLOWANCE_BYTES: u64 = 20 << 20;

fn mounted(name: &str) -> Result<(Scratch, PathBuf, FjordMount)> {
    let scratch = Scratch::new(name)?;
    let img = scratch.join("image");
    let set = features::by_name("default").context("a set of the table")?;
    features::FeatureSet { size_bytes: 1 << 30, ..*set }.make(&img)?;
    let program = Path::new(env!("CARGO_BIN_EXE_fjord"));
    let mount = FjordMount::with_program(program, &img, &["--cache-size", "8M"])?;
    Ok((scratch, img, mount))
}

fn peak_bytes(pid: u32) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:")).context("no VmHWM")?;
    Ok(line.trim_matches(|c: char| !c.is_ascii_digit()).parse::<u64>()? << 10)
}

/// Makes empty files with one request each; the kernel remembers them all.
fn make_files(dir: &Path, count: usize) -> Result<()> {
    for index in 0..count {
        let parent = dir.join(format!("{}", index / 1000));
        if index % 1000 == 0 {
            fs::create_dir(&parent)?;
        }
        let path = CString::new(parent.join(format!("file-{index}")).as_os_str().as_bytes())?;
        // SAFETY: a valid string, and a call that takes nothing else.
        let made = unsafe { libc::mknod(path.as_ptr(), libc::S_IFREG | 0o644, 0) };
        ensure!(made == 0, "mknod: {}", std::io::Error::last_os_error());
    }
    Ok(())
}

#[test]
fn files_that_the_kernel_remembers_cost_little() -> Result<()> {
    let (_scratch, img, mount) = mounted("memory-nodes")?;
    make_files(mount.path(), FILE_COUNT)?;
    let peak = peak_bytes(mount.pid())?;
    eprintln!("peak {} KiB for {FILE_COUNT} files", peak >> 10);
    ensure!(peak <= CACHE_BYTES + ALLOWANCE_BYTES, "peak of {peak} bytes");
    mount.unmount()?;
    image::e2fsck_clean(&img)?;
    Ok(())
}

#[test]
fn a_deleted_file_lives_as_long_as_the_kernel_knows_it() -> Result<()> {
    let (_scratch, img, mount) = mounted("memory-deleted")?;
    let (kept, named) = (mount.path().join("kept"), mount.path().join("named"));
    fs::write(&kept, b"still here")?;
    fs::write(&named, b"old")?;
    // Known to the kernel without an open file of the daemon's.
    let handle = File::options().read(true).custom_flags(libc::O_PATH).open(&kept)?;
    let ino = handle.metadata()?.ino();
    fs::remove_file(&kept)?;
    let file = File::options().read(true).write(true).open(&named)?;
    file.write_all_at(b"new", 0)?;
    make_files(mount.path(), 5000)?;

    ensure!(handle.metadata()?.nlink() == 0);
    let mut text = String::new();
    File::open(format!("/proc/self/fd/{}", handle.as_raw_fd()))?.read_to_string(&mut text)?;
    ensure!(text == "still here", "{text}");
    for entry in fs::read_dir(mount.path().join("4"))? {
        ensure!(entry?.metadata()?.ino() != ino, "the number was given to another file");
    }
    drop(file);
    drop(handle);
    fs::remove_dir_all(mount.path().join("0"))?;
    ensure!(fs::read(&named)? == b"new");
    mount.unmount()?;
    image::e2fsck_clean(&img)?;
    let listed = image::debugfs(&img, &format!("ncheck {ino}"))?;
    ensure!(!listed.contains("kept"), "{listed}");
    Ok(())
}
