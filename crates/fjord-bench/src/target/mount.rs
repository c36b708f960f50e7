//! Mounts made for the benchmark. Owns loop devices, mount points and server processes.
//!
//! Invariant: dropping a [`Mount`] unmounts, ends the server or detaches the loop device, and
//! removes the directory, whatever state it is in.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::error::{BenchError, Result};

/// How long a server may take to mount, and to end after its unmount.
const SERVER_PATIENCE: Duration = Duration::from_secs(60);
/// How long a mount may be busy after its last file was closed.
const BUSY_PATIENCE: Duration = Duration::from_secs(10);

/// Runs a program to its end; its standard error becomes the error.
pub(crate) fn run_program(program: &str, args: &[&str], paths: &[&Path]) -> Result<()> {
    output_of(program, args, paths).map(drop)
}

pub(crate) fn output_of(program: &str, args: &[&str], paths: &[&Path]) -> Result<String> {
    let output = Command::new(program)
        .args(args)
        .args(paths)
        .stdin(Stdio::null())
        .output()
        .map_err(|source| BenchError::MissingProgram { program: program.into(), source })?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned());
    }
    let paths = paths.iter().map(|path| path.display().to_string());
    let words: Vec<String> = args.iter().map(|arg| (*arg).to_owned()).chain(paths).collect();
    // Sysbench says it on its standard output.
    let said = if output.stderr.is_empty() { &output.stdout } else { &output.stderr };
    let message = String::from_utf8_lossy(said).trim().to_owned();
    Err(BenchError::Command { command: format!("{program} {}", words.join(" ")), message })
}

/// A mounted image.
pub(crate) struct Mount {
    dir: PathBuf,
    mounted: bool,
    loop_device: Option<PathBuf>,
    server: Option<Child>,
    /// Where the limit of dirty data was set: it would outlive the mount.
    limited: Option<PathBuf>,
}

/// What an image lies on, as the kernel sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Medium {
    /// A file behind a loop device that goes through the page cache, as `mount -o loop` makes it.
    #[default]
    BufferedFile,
    /// A file behind a loop device with direct I/O.
    DirectFile,
    /// A block device.
    BlockDevice,
}

/// How the kernel mounts an image.
#[derive(Clone, Debug, Default)]
pub(crate) struct KernelMount {
    pub(crate) medium: Medium,
    /// Without delayed allocation.
    pub(crate) no_delalloc: bool,
    /// Without flushes.
    pub(crate) no_barrier: bool,
    /// All data goes through the journal.
    pub(crate) data_journal: bool,
    /// None leaves the limits as they are.
    pub(crate) dirty_bytes_max: Option<u64>,
}

impl Mount {
    fn new(dir: &Path) -> Result<Mount> {
        fs::create_dir_all(dir).map_err(BenchError::io(format!("create {}", dir.display())))?;
        Ok(Mount {
            dir: dir.to_owned(),
            mounted: false,
            loop_device: None,
            server: None,
            limited: None,
        })
    }

    /// The kernel's ext4.
    pub(crate) fn kernel(image: &Path, dir: &Path, how: &KernelMount) -> Result<Mount> {
        let mut mount = Mount::new(dir)?;
        let device = match how.medium {
            Medium::BlockDevice => image.to_owned(),
            Medium::BufferedFile | Medium::DirectFile => {
                let mut args = vec!["--find", "--show"];
                if how.medium == Medium::DirectFile {
                    args.push("--direct-io=on");
                }
                let device = PathBuf::from(output_of("losetup", &args, &[image])?);
                mount.loop_device = Some(device.clone());
                device
            }
        };
        let words = [
            (how.no_delalloc, "nodelalloc"),
            (how.no_barrier, "nobarrier"),
            (how.data_journal, "data=journal"),
        ];
        let words = words.into_iter().filter(|(wanted, _)| *wanted).map(|(_, word)| word);
        let options = std::iter::once("defaults").chain(words).collect::<Vec<_>>().join(",");
        run_program("mount", &["-t", "ext4", "-o", &options], &[&device, dir])?;
        mount.mounted = true;
        if let Some(bytes) = how.dirty_bytes_max {
            mount.limit_dirty(bytes)?;
        }
        Ok(mount)
    }

    /// Lets the device of the mount have so much dirty data in the page cache and no more: the
    /// kernel's own limits are shares of the machine's memory, which no experiment of seconds
    /// reaches on a large machine.
    fn limit_dirty(&mut self, bytes: u64) -> Result<()> {
        let failed = || BenchError::io(format!("limit the dirty data of {}", self.dir.display()));
        let device = fs::metadata(&self.dir).map_err(failed())?.dev();
        let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
        let bdi = PathBuf::from(format!("/sys/class/bdi/{major}:{minor}"));
        let set = |name: &str, value: String| fs::write(bdi.join(name), value).map_err(failed());
        set("max_bytes", bytes.to_string())?;
        set("strict_limit", "1".into())?;
        self.limited = Some(bdi);
        Ok(())
    }

    /// A modelled device, served by the fjord program as the file `disk` in `dir`.
    pub(crate) fn sim(program: &Path, profile: &str, size_bytes: u64, dir: &Path) -> Result<Mount> {
        let size = size_bytes.to_string();
        let mut args: Vec<&OsStr> =
            ["sim", "--profile", profile, "--size", &size].map(OsStr::new).into();
        args.push(dir.as_os_str());
        Mount::served(program.as_os_str(), &args, dir)
    }

    /// fuse2fs, journal and all.
    pub(crate) fn fuse2fs(image: &Path, dir: &Path) -> Result<Mount> {
        let args = [OsStr::new("-f"), image.as_os_str(), dir.as_os_str()];
        Mount::served("fuse2fs".as_ref(), &args, dir)
    }

    /// fjord, by its own program.
    pub(crate) fn fjord(
        program: &Path,
        more: &[String],
        image: &Path,
        dir: &Path,
    ) -> Result<Mount> {
        let mut args: Vec<OsString> = vec!["mount".into()];
        args.extend(more.iter().map(OsString::from));
        args.extend([image.as_os_str().to_owned(), dir.as_os_str().to_owned()]);
        Mount::served(program.as_os_str(), &args, dir)
    }

    /// Starts a server in the foreground and waits until `dir` is a mount.
    pub(super) fn served(program: &OsStr, args: &[impl AsRef<OsStr>], dir: &Path) -> Result<Mount> {
        let mut mount = Mount::new(dir)?;
        let log = dir.with_extension("log");
        let log_file =
            fs::File::create(&log).map_err(BenchError::io(format!("create {}", log.display())))?;
        let name = Path::new(program).display().to_string();
        let server = Command::new(program)
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log_file)
            // An interrupt from the terminal is for the run, which then unmounts.
            .process_group(0)
            .spawn();
        let server = match server {
            Ok(server) => mount.server.insert(server),
            Err(source) => {
                let _ = fs::remove_file(&log);
                return Err(BenchError::MissingProgram { program: name, source });
            }
        };
        let deadline = Instant::now() + SERVER_PATIENCE;
        while !is_mount_point(dir) {
            let ended = server.try_wait().ok().flatten();
            if ended.is_some() || Instant::now() > deadline {
                let message = fs::read_to_string(&log).unwrap_or_default();
                let _ = fs::remove_file(&log);
                let why =
                    ended.map_or("not mounted in time".to_owned(), |status| status.to_string());
                let message = format!("{why}; {}", message.trim());
                return Err(BenchError::Command {
                    command: format!("{name} … {}", dir.display()),
                    message,
                });
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        mount.mounted = true;
        let _ = fs::remove_file(&log);
        Ok(mount)
    }

    /// Where it is mounted.
    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// The most memory that the server had so far, in bytes; None for the kernel's file systems.
    pub(crate) fn server_peak_bytes(&self) -> Option<u64> {
        let status =
            fs::read_to_string(format!("/proc/{}/status", self.server.as_ref()?.id())).ok()?;
        let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
        Some(peak.trim().trim_end_matches(" kB").parse::<u64>().ok()? << 10)
    }

    /// Unmounts and waits until the image is closed.
    pub(crate) fn unmount(mut self) -> Result<()> {
        self.take_down()
    }

    /// Unmounts; loop devices and requests let go of their files a moment after they have ended.
    fn unmount_soon(&self) -> Result<()> {
        let deadline = Instant::now() + BUSY_PATIENCE;
        loop {
            let result = run_program("umount", &[], &[&self.dir]);
            if result.is_ok() || Instant::now() > deadline {
                return result;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn take_down(&mut self) -> Result<()> {
        let mut result = Ok(());
        if let Some(bdi) = self.limited.take() {
            // As a device has it when it is new.
            let _ = fs::write(bdi.join("strict_limit"), "0");
            let _ = fs::write(bdi.join("max_ratio"), "100");
        }
        if std::mem::take(&mut self.mounted) {
            result = self.unmount_soon();
            if result.is_err() {
                // A file left open must not keep the mount forever.
                let _ = run_program("umount", &["--lazy"], &[&self.dir]);
            }
        }
        if let Some(mut server) = self.server.take() {
            result = result.and(wait_for(&mut server, &self.dir));
        }
        if let Some(device) = self.loop_device.take() {
            result = result.and(run_program("losetup", &["--detach"], &[&device]));
        }
        let _ = fs::remove_dir(&self.dir);
        result
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        // `unmount` tells of failures; this is the way out after another error.
        let _ = self.take_down();
    }
}

fn wait_for(server: &mut Child, dir: &Path) -> Result<()> {
    let deadline = Instant::now() + SERVER_PATIENCE;
    loop {
        if let Ok(Some(_)) = server.try_wait() {
            return Ok(());
        }
        if Instant::now() > deadline {
            let _ = server.kill();
            let _ = server.wait();
            let message = "the server did not end after its unmount and was killed".into();
            return Err(BenchError::Command {
                command: format!("umount {}", dir.display()),
                message,
            });
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Whether another file system is mounted at `dir`.
fn is_mount_point(dir: &Path) -> bool {
    let dir = dir.canonicalize();
    dir.and_then(|dir| fjord_block::mountinfo::mount_at(&dir)).is_ok_and(|mount| mount.is_some())
}
