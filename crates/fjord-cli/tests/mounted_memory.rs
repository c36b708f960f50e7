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
    io_uring, rng,
};

const CACHE_BYTES: u64 = 8 << 20;
const FILE_COUNT: usize = 40_000;
/// What may come on top of the cache. An inode in memory for each file would be twice this.
const ALLOWANCE_BYTES: u64 = 20 << 20;

/// Threads that call at a time, and open files.
const CALLER_COUNT: u64 = 256;
const OPEN_COUNT: u64 = 1000;
/// fsyncs of each thread.
const FSYNC_COUNT: u64 = 16;
const BLOCK_BYTES: usize = 4096;
/// What a worker of the server may take: its largest request, the pages that it makes of it, and its stack. There are
/// 64.
const WORKERS_BYTES: u64 = 64 * ((2 << 20) + (64 << 10));

fn mounted(name: &str) -> Result<(Scratch, PathBuf, FjordMount)> {
    mounted_with(name, "rw")
}

fn mounted_with(name: &str, options: &str) -> Result<(Scratch, PathBuf, FjordMount)> {
    let scratch = Scratch::new(name)?;
    let img = scratch.join("image");
    let set = features::by_name("default").context("a set of the table")?;
    features::FeatureSet { size_bytes: 1 << 30, ..*set }.make(&img)?;
    let program = Path::new(env!("CARGO_BIN_EXE_fjord"));
    let mount = FjordMount::with_program(program, &img, &["--cache-size", "8M", "-o", options])?;
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

/// A thread's blocks, each in a file that others write and fsync as well.
fn append(files: &[File], caller: u64) -> Result<()> {
    for n in 0..FSYNC_COUNT {
        let block = rng::pattern_vec(caller, n, BLOCK_BYTES);
        let file = &files[((caller + n * 61) % OPEN_COUNT) as usize];
        file.write_all_at(&block, (caller * FSYNC_COUNT + n) * BLOCK_BYTES as u64)?;
        file.sync_all()?;
    }
    Ok(())
}

/// Large requests, so that many workers see some.
fn write_large(dir: &Path, caller: u64) -> Result<()> {
    let file = File::create(dir.join(format!("large-{caller}")))?;
    let piece = rng::pattern_vec(caller, 0, 1 << 20);
    (0..8).try_for_each(|n| file.write_all_at(&piece, n << 20))?;
    Ok(file.sync_all()?)
}

#[test]
fn many_callers_with_many_open_files_stay_within_bounds() -> Result<()> {
    let offers = io_uring::is_offered()?;
    for options in ["noio_uring", "io_uring", "rw"] {
        if options == "io_uring" && !offers {
            continue;
        }
        let (_scratch, img, mount) = mounted_with("memory-callers", options)?;
        let dir = mount.path();
        let open = |n| {
            File::options().read(true).write(true).create_new(true).open(dir.join(format!("{n}")))
        };
        let files = (0..OPEN_COUNT).map(open).collect::<std::io::Result<Vec<_>>>()?;
        std::thread::scope(|scope| {
            let callers = (0..CALLER_COUNT).map(|caller| {
                let files = &files;
                scope.spawn(move || match caller % 8 {
                    0 => write_large(dir, caller),
                    _ => append(files, caller),
                })
            });
            let callers: Vec<_> = callers.collect();
            let done = callers.into_iter().map(|caller| caller.join().expect("it does not panic"));
            done.collect::<Result<Vec<()>>>()
        })?;
        let peak = peak_bytes(mount.pid())?;
        eprintln!("{options}: peak {} KiB for {CALLER_COUNT} callers", peak >> 10);
        ensure!(peak <= CACHE_BYTES + ALLOWANCE_BYTES + WORKERS_BYTES, "peak of {peak} bytes");
        for caller in (0..CALLER_COUNT).filter(|caller| caller % 8 != 0) {
            for n in 0..FSYNC_COUNT {
                let mut block = vec![0; BLOCK_BYTES];
                let file = &files[((caller + n * 61) % OPEN_COUNT) as usize];
                file.read_exact_at(&mut block, (caller * FSYNC_COUNT + n) * BLOCK_BYTES as u64)?;
                ensure!(block == rng::pattern_vec(caller, n, BLOCK_BYTES), "{caller}, {n}");
            }
        }
        drop(files);
        mount.unmount()?;
        image::e2fsck_clean(&img)?;
    }
    Ok(())
}
