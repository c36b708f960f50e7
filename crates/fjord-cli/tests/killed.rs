//! A daemon that is killed (kill -9, the OOM killer, systemd after its stop timeout) at any moment of mount,
//! service and unmount: its process ends, the lock of the image is free, the mount point can be used again,
//! and what was fsynced is there. Needs root and /dev/fuse.

use std::{
    fs::{self, File},
    io::Write,
    os::unix::process::ExitStatusExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use fjord_testkit::{
    fjord_mount::is_mounted,
    image::{self, Scratch},
    rng::{self, Rng},
    size,
    tools::{self, Output},
};

/// Only ends a test that would hang; docs/mounting.md says 5 s.
const PATIENCE: Duration = Duration::from_secs(120);
/// Data that the unmount has to write.
const UNSYNCED_BYTES: usize = 24 << 20;
/// The longest random time until the kill.
const KILL_US_MAX: u64 = 60_000;

fn program() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_fjord"))
}

/// An image, its mount point, and the process that serves it.
struct Served {
    image: PathBuf,
    dir: PathBuf,
    /// The process that was started: the daemon itself in the foreground, else its parent.
    child: Child,
    pid: i32,
}

/// How a daemon runs.
#[derive(Clone, Copy, Debug)]
struct Way {
    options: &'static str,
    daemon: bool,
    /// It is the only process of its mount namespace, whose mounts go with it.
    is_alone: bool,
}

const WAYS: [Way; 6] = [
    Way { options: "rw", daemon: true, is_alone: false },
    Way { options: "nofuseblk", daemon: true, is_alone: false },
    Way { options: "rw", daemon: true, is_alone: true },
    Way { options: "rw", daemon: false, is_alone: false },
    Way { options: "nofuseblk", daemon: false, is_alone: false },
    Way { options: "rw", daemon: false, is_alone: true },
];

/// When the daemon is killed.
#[derive(Clone, Copy, Debug)]
enum Moment {
    /// While a program writes to it.
    Service,
    /// After SIGTERM, when a thread or child process waits in umount(2).
    InUmount,
    /// At any time after SIGTERM.
    Unmount,
}

impl Way {
    /// Starts a mount; it may not be there yet.
    fn start(self, image: &Path, dir: &Path) -> Result<Child> {
        let mut command = if self.is_alone {
            let mut command = tools::command("unshare")?;
            command.args(["--mount", "--propagation", "private", "--"]).arg(program());
            command
        } else {
            Command::new(program())
        };
        tools::hear_signals(&mut command).args(["mount", "-o", self.options]);
        if self.daemon {
            command.arg("--daemon");
        }
        command.args([image, dir]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        Ok(command.spawn()?)
    }

    fn serve(self, image: &Path, dir: &Path) -> Result<Served> {
        let mut child = self.start(image, dir)?;
        let pid = if self.daemon {
            ensure!(child.wait()?.success(), "the start of the daemon failed");
            *servers(image)?.first().context("no daemon")?
        } else {
            i32::try_from(child.id())?
        };
        let until = Instant::now() + PATIENCE;
        while !is_mounted_for(pid, dir)? {
            if !self.daemon
                && let Some(status) = child.try_wait()?
            {
                bail!("no mount: {status}");
            }
            ensure!(Instant::now() < until, "no mount");
            std::thread::sleep(Duration::from_millis(1));
        }
        // As the server sees it, whatever its mount namespace is.
        let dir = format!("/proc/{pid}/root{}", dir.display()).into();
        Ok(Served { image: image.to_owned(), dir, child, pid })
    }
}

/// Whether something is mounted on `dir` in the mount namespace of a process.
fn is_mounted_for(pid: i32, dir: &Path) -> Result<bool> {
    let table = fs::read(format!("/proc/{pid}/mountinfo"))?;
    Ok(fjord_block::mountinfo::parse(&table).iter().any(|entry| entry.mountpoint == dir))
}

/// Whether nothing is left of a process but what its parent has not asked for. One whose first thread has
/// ended and another cannot is not among [`servers`] any more.
fn has_ended(pid: i32) -> bool {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    threads.map(|thread| fs::read_to_string(thread.path().join("stat"))).all(|stat| match stat {
        Ok(stat) => stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with(['Z', 'X'])),
        Err(_) => true,
    })
}

/// Processes of the program with `image` among their arguments.
fn servers(image: &Path) -> Result<Vec<i32>> {
    let image = image.to_str().context("a plain name")?;
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc")?.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        // It may have ended.
        let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let mut arguments = line.split(|byte| *byte == 0);
        let is_program = arguments.next() == Some(program().as_os_str().as_encoded_bytes());
        if is_program && arguments.any(|argument| argument == image.as_bytes()) {
            found.push(pid);
        }
    }
    Ok(found)
}

fn signal(pid: i32, number: i32) {
    // SAFETY: a process ID and a signal number; one that has ended is no error here.
    unsafe { libc::kill(pid, number) };
}

impl Served {
    /// Whether a thread of a server of the image, or of a child of one, is in umount(2) and waits.
    fn is_in_umount(&self) -> Result<bool> {
        for pid in servers(&self.image)? {
            for thread in fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten()
            {
                let wchan = fs::read_to_string(thread.path().join("wchan")).unwrap_or_default();
                if wchan.contains("request_wait") || wchan.contains("fuse_") {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    /// Kills the server at `moment`; whether it was seen to wait in umount(2).
    fn kill_at(&self, moment: Moment, rng: &mut Rng) -> Result<bool> {
        let mut was_seen = false;
        let delay = Duration::from_micros(rng.below(KILL_US_MAX));
        match moment {
            Moment::Service => {
                let file = self.dir.join("written");
                std::thread::scope(|scope| {
                    // It ends with an error, when the server is gone.
                    scope.spawn(|| while fs::write(&file, vec![7; 1 << 20]).is_ok() {});
                    std::thread::sleep(delay);
                    signal(self.pid, libc::SIGKILL);
                });
            }
            Moment::InUmount => {
                signal(self.pid, libc::SIGTERM);
                let until = Instant::now() + PATIENCE;
                // It may end before the wait is seen: then this round is one without a kill.
                while !was_seen && !servers(&self.image)?.is_empty() {
                    was_seen = self.is_in_umount()?;
                    ensure!(Instant::now() < until, "the signal does nothing");
                }
            }
            Moment::Unmount => {
                signal(self.pid, libc::SIGTERM);
                std::thread::sleep(delay);
            }
        }
        signal(self.pid, libc::SIGKILL);
        if rng.percent(50) {
            // As systemd does: also the child that is in umount(2).
            for server in servers(&self.image)? {
                signal(server, libc::SIGKILL);
            }
        }
        Ok(was_seen)
    }

    /// Waits until no process of the mount is left; how long it took.
    fn ends(&mut self) -> Result<Duration> {
        let killed = Instant::now();
        let until = killed + PATIENCE;
        if let Ok(None) = self.child.try_wait() {
            while self.child.try_wait()?.is_none() {
                ensure!(Instant::now() < until, "{} cannot be killed", self.pid);
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        loop {
            let left = servers(&self.image)?;
            if left.is_empty() && has_ended(self.pid) {
                return Ok(killed.elapsed());
            }
            ensure!(Instant::now() < until, "{} or {left:?} cannot be killed", self.pid);
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Makes the mount point free again, in one of the ways that a user would try. A mount that has gone is
/// fine, one that was killed while it served stays.
fn free_mount_point(dir: &Path, image: &Path, round: usize) -> Result<()> {
    match round % 3 {
        _ if !is_mounted(dir)? => {}
        // 1: the daemon has died, and it says so.
        0 => {
            drop(tools::run(Command::new(program()).arg("umount").arg(dir))?.expect_code(&[0, 1])?)
        }
        1 => drop(tools::run(tools::command("umount")?.arg("-l").arg(dir))?.ok()?),
        // A new mount, which says what to do first.
        _ => {
            let refused =
                tools::run(Command::new(program()).arg("mount").args([image, dir]))?.stderr;
            ensure!(refused.contains("has died") && refused.contains("fjord umount"), "{refused}");
            tools::run(tools::command("umount")?.arg(dir))?.ok()?;
        }
    }
    ensure!(!is_mounted(dir)?, "still mounted");
    Ok(())
}

fn new_image(scratch: &Scratch) -> Result<PathBuf> {
    let image = scratch.join("image");
    image::make_sparse(&image, 192 << 20)?;
    tools::run(tools::command("mke2fs")?.args(["-q", "-F", "-t", "ext4"]).arg(&image))?.ok()?;
    Ok(image)
}

/// A file that survives, and data that the unmount has to write.
fn write(dir: &Path, round: usize) -> Result<()> {
    let mut promised = File::create(dir.join("promised"))?;
    write!(promised, "round {round}")?;
    promised.sync_all()?;
    fs::write(dir.join("unsynced"), vec![round as u8; UNSYNCED_BYTES])?;
    Ok(())
}

fn killed(moment: Moment, rounds: usize) -> Result<()> {
    let seed = rng::seed_from_env(&format!("killed {moment:?}"), 1);
    let mut rng = Rng::new(seed);
    let (mut longest, mut seen_count) = (Duration::ZERO, 0);
    let needs_more = |seen_count| seen_count == 0 && matches!(moment, Moment::InUmount);
    let began = Instant::now();
    for (number, way) in WAYS.into_iter().cycle().enumerate() {
        // All, and again where this thread is too slow to see a wait.
        if number >= WAYS.len() && (!needs_more(seen_count) || began.elapsed() > PATIENCE) {
            break;
        }
        let scratch = Scratch::new("killed")?;
        let (image, dir) = (new_image(&scratch)?, scratch.join("mnt"));
        fs::create_dir(&dir)?;
        for round in 0..rounds {
            let what = || format!("{way:?}, round {round}");
            let mut served = way.serve(&image, &dir).with_context(what)?;
            write(&served.dir, round).with_context(what)?;
            seen_count += usize::from(served.kill_at(moment, &mut rng).with_context(what)?);
            longest = longest.max(served.ends().with_context(what)?);
            free_mount_point(&dir, &image, round).with_context(what)?;
            // The lock is free, the log is replayed.
            let read = tools::run(Command::new(program()).arg("recover").arg(&image))
                .and_then(Output::ok)
                .and_then(|_| {
                    tools::run(Command::new(program()).arg("cat").arg(&image).arg("promised"))?.ok()
                });
            ensure!(read.with_context(what)?.stdout == format!("round {round}"), "{}", what());
        }
        image::e2fsck_clean(&image)?;
    }
    println!("{moment:?}: killed in umount(2) {seen_count} times, {longest:?} to its end at most");
    ensure!(!needs_more(seen_count), "never in umount(2)");
    Ok(())
}

#[test]
fn killed_in_the_umount() -> Result<()> {
    killed(Moment::InUmount, size::pick(1, 6, 13))
}

#[test]
fn killed_while_it_unmounts() -> Result<()> {
    killed(Moment::Unmount, size::pick(1, 4, 13))
}

#[test]
fn killed_while_it_serves() -> Result<()> {
    killed(Moment::Service, size::pick(1, 3, 13))
}

#[test]
fn killed_while_it_mounts() -> Result<()> {
    let seed = rng::seed_from_env("killed Mount", 1);
    let mut rng = Rng::new(seed);
    for way in WAYS {
        let scratch = Scratch::new("killed")?;
        let (image, dir) = (new_image(&scratch)?, scratch.join("mnt"));
        fs::create_dir(&dir)?;
        for round in 0..size::pick(2, 6, 25) {
            let what = || format!("{way:?}, round {round}");
            let child = way.start(&image, &dir).with_context(what)?;
            let pid = i32::try_from(child.id())?;
            std::thread::sleep(Duration::from_micros(rng.below(KILL_US_MAX)));
            let mut served = Served { image: image.clone(), dir: dir.clone(), child, pid };
            // All: the one that was started, and the daemon that it has started.
            for server in servers(&image)?.into_iter().chain([pid]) {
                signal(server, libc::SIGKILL);
            }
            // One that the daemon's parent has started meanwhile serves, and can be unmounted.
            let status = served.child.wait()?;
            if status.signal() == Some(libc::SIGKILL) || status.success() {
                for server in servers(&image)? {
                    signal(server, libc::SIGKILL);
                }
            }
            served.ends().with_context(what)?;
            while is_mounted(&dir)? {
                tools::run(tools::command("umount")?.arg("-l").arg(&dir))?.ok()?;
            }
            let recovered = tools::run(Command::new(program()).arg("recover").arg(&image))?;
            recovered.ok().with_context(what)?;
            image::e2fsck_clean(&image).with_context(what)?;
        }
    }
    Ok(())
}
