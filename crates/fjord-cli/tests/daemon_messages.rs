//! What a daemon says after it has let go of the terminal: to syslog, to the kernel's log, and to
//! those who ask `fjord stats`. Needs root.

use std::{
    fs::{self, File},
    io::Read,
    os::unix::{
        fs::{FileExt, OpenOptionsExt},
        net::UnixDatagram,
    },
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, Result, ensure};
use fjord_fuse::mount;
use fjord_testkit::{
    image::{self, Scratch},
    tools::{self, Output},
};
use rustix::mount::MountFlags;
use serde_json::Value;

fn program() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_fjord"))
}

/// Runs a command that must succeed.
fn run(command: &mut Command) -> Result<Output> {
    tools::run(command)?.ok()
}

fn fjord(args: &[&str], path: &Path) -> Result<Output> {
    tools::run(Command::new(program()).args(args).arg(path))
}

/// A socket that takes messages as /dev/log does.
struct Syslog {
    socket: UnixDatagram,
    path: PathBuf,
}

impl Syslog {
    fn new(path: PathBuf) -> Result<Syslog> {
        let socket = UnixDatagram::bind(&path)?;
        socket.set_read_timeout(Some(Duration::from_secs(120)))?;
        Ok(Syslog { socket, path })
    }

    /// The next message that contains `words`; the ones before it are passed over.
    fn wait_for(&self, words: &str) -> Result<String> {
        let mut seen = String::new();
        loop {
            let mut bytes = [0; 2048];
            let len = self
                .socket
                .recv(&mut bytes)
                .with_context(|| format!("no message with {words:?} came, but: {seen}"))?;
            let message = String::from_utf8(bytes[..len].to_vec())?;
            if message.contains(words) {
                return Ok(message);
            }
            seen += &message;
            seen.push('\n');
        }
    }
}

/// An image on a small file system of its own, which can be filled below it.
struct Below {
    _scratch: Scratch,
    below: PathBuf,
    img: PathBuf,
    dir: PathBuf,
    syslog: Syslog,
}

impl Below {
    fn new(name: &str) -> Result<Below> {
        let scratch = Scratch::new(name)?;
        let (below, dir) = (scratch.join("below"), scratch.join("mnt"));
        fs::create_dir(&below)?;
        fs::create_dir(&dir)?;
        let syslog = Syslog::new(scratch.join("log"))?;
        run(tools::command("mount")?.args(["-t", "tmpfs", "-o", "size=96M", "none"]).arg(&below))?;
        let img = below.join("image");
        let made = Below { _scratch: scratch, below, img, dir, syslog };
        fjord(&["mkfs", "--size", "256M", "-b", "4096"], &made.img)?.ok()?;
        Ok(made)
    }

    /// Truncates the image below, and writes what cannot reach it.
    fn fail(&self) -> Result<()> {
        let file = File::create(self.dir.join("file"))?;
        file.sync_all()?;
        File::options().write(true).open(&self.img)?.set_len(1 << 20)?;
        file.write_all_at(&[7; 1 << 20], 0).context("a write into memory")?;
        ensure!(file.sync_all().is_err(), "an fsync to a truncated image succeeded");
        Ok(())
    }

    /// Waits until the mount table shows the mount read-only.
    fn wait_for_ro(&self) -> Result<()> {
        let deadline = Instant::now() + Duration::from_secs(120);
        while !mount::flags_of(&self.dir)?.contains(MountFlags::RDONLY) {
            ensure!(Instant::now() < deadline, "/proc/mounts still shows rw");
            std::thread::sleep(Duration::from_millis(50));
        }
        let refused = File::create(self.dir.join("late"));
        let errno = refused.err().and_then(|error| error.raw_os_error());
        ensure!(errno == Some(libc::EROFS), "a late file: {errno:?}");
        Ok(())
    }

    fn named_in(&self, message: &str) -> Result<()> {
        for path in [&self.img, &self.dir] {
            let path = path.to_str().context("a plain name")?;
            ensure!(message.contains(path), "{path} is not in {message}");
        }
        Ok(())
    }
}

impl Drop for Below {
    fn drop(&mut self) {
        for dir in [&self.dir, &self.below] {
            let _ = tools::command("umount").and_then(|mut c| tools::run(c.arg("-l").arg(dir)));
        }
    }
}

fn now() -> Result<i64> {
    Ok(i64::try_from(SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs())?)
}

/// A write that fails is told to syslog, to `fjord stats`, in the mount table, and when the daemon
/// ends.
#[test]
fn a_failed_write_is_told() -> Result<()> {
    let below = Below::new("told")?;
    let started = now()?;
    // As mount(8) starts it.
    let helper = below.dir.with_file_name("mount.fuse.fjord");
    std::os::unix::fs::symlink(program(), &helper)?;
    run(Command::new(&helper)
        .args([&below.img, &below.dir])
        .args(["-o", "rw,noatime"])
        .env("FJORD_SYSLOG", &below.syslog.path))?;
    let healthy = fjord(&["stats"], &below.dir)?.ok()?.stdout;
    ensure!(healthy.starts_with("state                 read-write\n"), "{healthy}");
    below.fail()?;
    let message = below.syslog.wait_for("is now read-only")?;
    ensure!(message.starts_with("<27>fjord["), "{message}");
    ensure!(message.contains("was truncated"), "{message}");
    below.named_in(&message)?;

    let json = fjord(&["stats", "--json"], &below.dir)?.ok()?.stdout;
    let health = &serde_json::from_str::<Value>(&json)?["health"];
    ensure!(health["read_only"] == true, "{health}");
    let error = health["failure"]["error"].as_str().context("no error")?;
    ensure!(error.contains("was truncated"), "{error}");
    let since = health["failure"]["time"].as_i64().context("no time")?;
    ensure!((started - 1..=now()?).contains(&since), "{health}");
    let events = health["events"].as_array().context("no events")?;
    let first = events.iter().find(|event| event["severity"] == "error").context("no error")?;
    ensure!(first["message"].as_str().context("a text")?.contains("is now read-only"), "{first}");
    ensure!(first["count"] == 1 && first["time"].as_i64() >= Some(started - 1), "{first}");
    let table = fjord(&["stats"], &below.dir)?.ok()?.stdout;
    ensure!(table.starts_with("state                 read-only since 2"), "{table}");
    ensure!(table.contains("UTC error: the file system is now read-only"), "{table}");

    below.wait_for_ro()?;

    let ended = fjord(&["umount"], &below.dir)?;
    ensure!(ended.code == Some(4), "{ended:?}");
    let message = below.syslog.wait_for("closing the image failed")?;
    below.named_in(&message)
}

/// What a mount lacks is a warning, for those who look later too.
#[test]
fn what_the_mount_lacks_is_told() -> Result<()> {
    let below = Below::new("lacks")?;
    run(Command::new(program())
        .args(["mount", "--daemon", "-o", "nofuseblk"])
        .args([&below.img, &below.dir])
        .env("FJORD_SYSLOG", &below.syslog.path))?;
    let message = below.syslog.wait_for("no fuseblk mount")?;
    ensure!(message.starts_with("<28>fjord["), "{message}");
    below.named_in(&message)?;
    let table = fjord(&["stats"], &below.dir)?.ok()?.stdout;
    ensure!(table.contains("UTC warning: no fuseblk mount"), "{table}");
    fjord(&["umount"], &below.dir)?.ok()?;
    image::e2fsck_clean(&below.img)?;
    Ok(())
}

/// Where no syslog listens the kernel's log has it.
#[test]
fn without_syslog_it_is_in_the_kernels_log() -> Result<()> {
    let below = Below::new("kmsg")?;
    let mut log = File::options()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open("/dev/kmsg")
        .context("/dev/kmsg, which a container needs to be given")?;
    run(Command::new(program())
        .args(["mount", "--daemon", "-o", "nofuseblk"])
        .args([&below.img, &below.dir])
        .env("FJORD_SYSLOG", below.dir.with_file_name("nobody")))?;
    let stats = fjord(&["stats"], &below.dir)?.ok();
    fjord(&["umount"], &below.dir)?.ok()?;
    stats?;
    let dir = below.dir.to_str().context("a plain name")?;
    let mut record = [0; 8192];
    loop {
        match log.read(&mut record) {
            Ok(len) => {
                let text = String::from_utf8_lossy(&record[..len]);
                if text.contains("no fuseblk mount") && text.contains(dir) {
                    // Facility 3 and level 4, as the kernel shows them.
                    ensure!(text.starts_with("28,") && text.contains(";fjord["), "{text}");
                    return Ok(());
                }
            }
            // The oldest were overwritten meanwhile.
            Err(error) if error.raw_os_error() == Some(libc::EPIPE) => {}
            Err(error) => return Err(error).context("the kernel's log has no such record"),
        }
    }
}
