//! Images, scratch directories and mounts of the kernel's ext4, each undone when dropped.
//!
//! Invariant: nothing made here outlives its value, also when a test panics. `cargo xtask test`
//! runs in a mount namespace of its own besides, so that even a killed run leaves no mount.

use std::{
    fs::{File, OpenOptions},
    os::unix::fs::{FileExt, MetadataExt},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use fjord_block::MemImage;
use rustix::fs::SeekFrom;

use crate::manifest::{Compare, Manifest};
use crate::tools::{self, Output, run};

/// A temporary directory below `FJORD_SCRATCH` or the system's, removed when dropped.
#[derive(Debug)]
pub struct Scratch(tempfile::TempDir);

impl Scratch {
    /// A new empty directory with `name` in its name.
    pub fn new(name: &str) -> Result<Self> {
        let base = std::env::var_os("FJORD_SCRATCH").map_or_else(std::env::temp_dir, PathBuf::from);
        std::fs::create_dir_all(&base)?;
        // As the mount table has it, where the checkout lies below a symbolic link.
        let base = base.canonicalize()?;
        let dir = tempfile::Builder::new()
            .prefix(&format!("fjord-{name}-"))
            .tempdir_in(&base)
            .with_context(|| format!("cannot make a scratch directory in {}", base.display()))?;
        Ok(Scratch(dir))
    }

    /// A new empty directory in memory, where thousands of fsyncs cost nothing; on the disk when
    /// /dev/shm has less than 2 GiB free.
    pub fn in_memory(name: &str) -> Result<Self> {
        const SHM: &str = "/dev/shm";
        const NEEDED_BYTES: u64 = 2 << 30;
        let room = rustix::fs::statvfs(SHM).map_or(0, |stat| stat.f_bavail * stat.f_frsize);
        if room < NEEDED_BYTES {
            return Self::new(name);
        }
        Ok(Scratch(tempfile::Builder::new().prefix(&format!("fjord-{name}-")).tempdir_in(SHM)?))
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// A path in the directory.
    pub fn join(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }
}

/// Whether the running kernel mounts a clean image for writing.
///
/// # Errors
/// The mount fails for another reason than what is in the image.
pub fn kernel_mounts(path: &Path) -> Result<bool> {
    match KernelMount::new(path, "rw") {
        Ok(mount) => mount.unmount().map(|()| true),
        Err(error) if format!("{error:#}").contains("wrong fs type") => Ok(false),
        Err(error) => Err(error),
    }
}

/// Makes (or empties) the file and sets its size, without allocating.
pub fn make_sparse(path: &Path, size_bytes: u64) -> Result<()> {
    let file = File::create(path).with_context(|| format!("cannot create {}", path.display()))?;
    file.set_len(size_bytes)?;
    Ok(())
}

/// Copies the data of a sparse file and keeps its holes.
pub fn copy_sparse(from: &Path, to: &Path) -> Result<()> {
    let source = File::open(from).with_context(|| format!("cannot open {}", from.display()))?;
    let size = source.metadata()?.len();
    make_sparse(to, size)?;
    let target = OpenOptions::new().write(true).open(to)?;
    let mut buf = vec![0; 1 << 20];
    let mut at = 0;
    while at < size {
        let start = match rustix::fs::seek(&source, SeekFrom::Data(at)) {
            Ok(start) => start,
            Err(rustix::io::Errno::NXIO) => break,
            Err(error) => return Err(error.into()),
        };
        let end = rustix::fs::seek(&source, SeekFrom::Hole(start))?;
        let mut pos = start;
        while pos < end {
            let want = buf.len().min((end - pos) as usize);
            let got = source.read_at(&mut buf[..want], pos)?;
            if got == 0 {
                break;
            }
            target.write_all_at(&buf[..got], pos)?;
            pos += got as u64;
        }
        at = end;
    }
    Ok(())
}

/// A mount of an image by the kernel's ext4, through a loop device.
#[derive(Debug)]
pub struct KernelMount {
    dir: tempfile::TempDir,
    mounted: bool,
}

impl KernelMount {
    /// Mounts `image` with these mount options.
    pub fn new(image: &Path, options: &str) -> Result<Self> {
        Self::with_type(image, "ext4", options)
    }

    /// Mounts `image` as `fs_type` with these mount options. With `ro` the device cannot be written either.
    pub fn with_type(image: &Path, fs_type: &str, options: &str) -> Result<Self> {
        let is_read_only = options.split(',').any(|option| option == "ro");
        Self::attached(image, is_read_only, fs_type, options)
    }

    /// Mounts `image` read-only on a loop device that can be written, so that the kernel recovers it
    /// first.
    pub fn recovering_read_only(image: &Path) -> Result<Self> {
        Self::attached(image, false, "ext4", "ro")
    }

    /// On a loop device of its own. `mount -o loop` takes one that an earlier mount of the image has not let
    /// go of yet: read-only, if that mount was; and with the superblock that the kernel still has in memory,
    /// which with blocks of 1 KiB says of a rewritten file that its log need not be replayed.
    fn attached(image: &Path, is_read_only: bool, fs_type: &str, options: &str) -> Result<Self> {
        tools::require_root()?;
        let dir = tempfile::Builder::new().prefix("fjord-mnt-").tempdir()?;
        let mut attach = tools::command("losetup")?;
        attach.args(["--find", "--show"]);
        attach.args(is_read_only.then_some("--read-only"));
        let node = run(attach.arg(image))?.ok()?.stdout;
        let node = node.trim();
        let mount = ["-t", fs_type, "-o", options, node];
        let mounted = run(tools::command("mount")?.args(mount).arg(dir.path()));
        // One that is mounted stays until it is unmounted.
        run(tools::command("losetup")?.args(["--detach", node]))?.ok()?;
        mounted?.ok().with_context(|| format!("the kernel does not mount {}", image.display()))?;
        Ok(KernelMount { dir, mounted: true })
    }

    /// The mount point.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// The loop device's name, such as `loop3`.
    pub fn loop_name(&self) -> Result<String> {
        let out = run(std::process::Command::new("findmnt")
            .args(["-n", "-o", "SOURCE"])
            .arg(self.dir.path()))?
        .ok()?;
        Ok(out.stdout.trim().trim_start_matches("/dev/").to_owned())
    }

    /// Unmounts; the image is then what Linux leaves behind.
    pub fn unmount(mut self) -> Result<()> {
        self.mounted = false;
        unmount(self.dir.path())
    }
}

impl Drop for KernelMount {
    fn drop(&mut self) {
        if self.mounted
            && let Err(error) = unmount(self.dir.path())
        {
            eprintln!("left mounted: {}: {error:#}", self.dir.path().display());
        }
    }
}

/// Unmounts a directory; retries while it is busy, then detaches it.
pub fn unmount(dir: &Path) -> Result<()> {
    let mut last = None;
    for wait_ms in [0, 20, 100, 300, 1000, 2000, 5000, 10_000, 20_000, 30_000] {
        std::thread::sleep(Duration::from_millis(wait_ms));
        let out = run(tools::command("umount")?.arg(dir))?;
        if out.code == Some(0) {
            return Ok(());
        }
        last = Some(out);
    }
    let _ = run(tools::command("umount")?.arg("-l").arg(dir))?;
    bail!("{} stayed busy and was detached: {:?}", dir.display(), last.map(|out| out.stderr));
}

/// Waits until a process has locked a file (flock).
pub fn wait_for_lock(pid: u32, path: &Path) -> Result<()> {
    let (pid, file) = (pid.to_string(), format!(":{}", std::fs::metadata(path)?.ino()));
    let deadline = Instant::now() + Duration::from_secs(120);
    let is_it = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        words.contains(&"FLOCK")
            && words.contains(&pid.as_str())
            && words.iter().any(|word| word.ends_with(&file))
    };
    while !std::fs::read_to_string("/proc/locks")?.lines().any(is_it) {
        ensure!(Instant::now() < deadline, "{} is not locked", path.display());
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// Runs `e2fsck -fn` and fails unless it finds nothing at all; returns what it said.
pub fn e2fsck_clean(image: &Path) -> Result<Output> {
    run(tools::command("e2fsck")?.arg("-fn").arg(image))?.ok()
}

/// As [`e2fsck_clean`], for an image in memory.
pub fn e2fsck_clean_in_memory(image: &MemImage) -> Result<()> {
    let scratch = Scratch::in_memory("e2fsck")?;
    let path = scratch.join("image");
    image.write_to_file(&path)?;
    e2fsck_clean(&path).map(drop)
}

/// Has e2fsck find nothing in an image, and Linux the tree below `source` in it.
pub fn same_on_linux(source: &Path, image: &Path, compare: &Compare) -> Result<()> {
    e2fsck_clean(image)?;
    let mount = KernelMount::new(image, "ro")?;
    let found = Manifest::from_directory(mount.path())?.without_lost_found();
    mount.unmount()?;
    let expected = Manifest::from_directory(source)?.without_lost_found();
    expected.diff(&found, compare).ok("put in", "seen by Linux")
}

/// Runs `e2fsck -fy`, which replays the journal and repairs; fails when errors are left.
///
/// The exit code tells: 0 nothing done besides the replay, 1 something repaired.
pub fn e2fsck_repair(image: &Path) -> Result<Output> {
    // Without this it also makes extent trees smaller, which is no repair.
    let keep = ["-E", "no_optimize_extents"];
    run(tools::command("e2fsck")?.arg("-fy").args(keep).arg(image))?.expect_code(&[0, 1])
}

/// Runs one debugfs request on an image that is opened read-only, without its bitmaps: those of
/// a dirty image need not fit their checksums. What debugfs cannot do gives an empty text.
pub fn debugfs(image: &Path, request: &str) -> Result<String> {
    Ok(run(tools::command("debugfs")?.args(["-c", "-R", request]).arg(image))?.ok()?.stdout)
}

/// Runs debugfs requests on an image opened for writing.
pub fn debugfs_write(image: &Path, requests: &[String]) -> Result<String> {
    let scratch = Scratch::new("debugfs")?;
    let script = scratch.join("requests");
    std::fs::write(&script, requests.join("\n") + "\n")?;
    let out = run(tools::command("debugfs")?.arg("-w").arg("-f").arg(&script).arg(image))?.ok()?;
    Ok(out.stdout + &out.stderr)
}

/// Extracts a whole image with `debugfs rdump`: files, directories, symlinks, modes, owners and
/// times, for block sizes that the kernel here cannot mount.
pub fn extract_with_debugfs(image: &Path, to: &Path) -> Result<()> {
    std::fs::create_dir_all(to)?;
    let request = format!("rdump / \"{}\"", to.display());
    run(tools::command("debugfs")?.args(["-R", &request]).arg(image))?.ok()?;
    Ok(())
}

/// Shuts a mounted file system down at once, without flushing its log: everything not yet on the
/// device is lost, as in a crash (XFS_IOC_GOINGDOWN, which ext4 shares).
pub fn shut_down(dir: &Path) -> Result<()> {
    const GOINGDOWN: u32 = rustix::ioctl::opcode::read::<u32>(b'X', 125);
    const NO_LOG_FLUSH: u32 = 2;
    let dir = File::open(dir)?;
    // SAFETY: the call reads one u32, which Setter passes by reference.
    unsafe {
        rustix::ioctl::ioctl(&dir, rustix::ioctl::Setter::<GOINGDOWN, u32>::new(NO_LOG_FLUSH))?
    };
    Ok(())
}
