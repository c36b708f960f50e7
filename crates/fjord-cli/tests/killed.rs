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
    /// After SIGTERM, when its child process is there and was stopped, as by ^Z: the child goes too.
    StoppedChild,
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
    are_threads_in(pid, &['Z', 'X'])
}

/// Whether each thread of a process is in one of these states.
fn are_threads_in(pid: i32, states: &[char]) -> bool {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    threads.map(|thread| fs::read_to_string(thread.path().join("stat"))).all(|stat| match stat {
        Ok(stat) => stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with(states)),
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

    /// Kills the server at `moment`; whether it was seen to wait in umount(2), or had a child that was stopped.
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
            Moment::StoppedChild => {
                signal(self.pid, libc::SIGTERM);
                let until = Instant::now() + PATIENCE;
                let mut all = servers(&self.image)?;
                while !was_seen && !all.is_empty() {
                    // One that is stopped before its first steps has all that its parent has.
                    let has_files = |pid: &i32| {
                        fs::read_dir(format!("/proc/{pid}/fd"))
                            .map_or(true, |mut fds| fds.next().is_some())
                    };
                    all.retain(|pid| *pid != self.pid && !has_files(pid));
                    for child in all {
                        signal(child, libc::SIGSTOP);
                        was_seen = true;
                    }
                    ensure!(Instant::now() < until, "the signal does nothing");
                    all = servers(&self.image)?;
                }
                signal(self.pid, libc::SIGKILL);
                return Ok(was_seen);
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
    let needs_more =
        |seen_count| seen_count == 0 && matches!(moment, Moment::InUmount | Moment::StoppedChild);
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
    println!("{moment:?}: seen {seen_count} times, {longest:?} to its end at most");
    ensure!(!needs_more(seen_count), "the moment was never met");
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
fn killed_beside_its_stopped_child() -> Result<()> {
    killed(Moment::StoppedChild, size::pick(1, 2, 8))
}

#[test]
fn killed_while_it_serves() -> Result<()> {
    killed(Moment::Service, size::pick(1, 3, 13))
}

/// Kills the process that waits for the daemon's mount, before the daemon has one. Returns the daemon, or
/// `None` if it was mounted before it could be stopped.
fn kill_the_parent(parent: &mut Child, image: &Path, dir: &Path) -> Result<Option<i32>> {
    let parent_pid = i32::try_from(parent.id())?;
    let until = Instant::now() + PATIENCE;
    let daemon = loop {
        if let Some(daemon) = servers(image)?.into_iter().find(|pid| *pid != parent_pid) {
            break daemon;
        }
        if parent.try_wait()?.is_some() {
            return Ok(None);
        }
        ensure!(Instant::now() < until, "no daemon");
    };
    signal(daemon, libc::SIGSTOP);
    while !are_threads_in(daemon, &['T', 'Z', 'X']) {
        ensure!(Instant::now() < until, "the daemon cannot be stopped");
        std::thread::sleep(Duration::from_millis(1));
    }
    // One that has mounted may have told its parent.
    if is_mounted(dir)? || has_ended(daemon) {
        signal(daemon, libc::SIGCONT);
        ensure!(parent.wait()?.success(), "no mount");
        return Ok(None);
    }
    parent.kill()?;
    let was_killed = parent.wait()?.signal() == Some(libc::SIGKILL);
    signal(daemon, libc::SIGCONT);
    Ok(was_killed.then_some(daemon))
}

#[test]
fn killed_the_parent_of_a_daemon() -> Result<()> {
    let scratch = Scratch::new("killed")?;
    let (image, dir) = (new_image(&scratch)?, scratch.join("mnt"));
    fs::create_dir(&dir)?;
    let (mut killed_count, until) = (0, Instant::now() + PATIENCE);
    while killed_count < size::pick(1, 3, 25) {
        ensure!(Instant::now() < until, "the daemon was never stopped in time");
        let mut parent = WAYS[0].start(&image, &dir)?;
        let Some(daemon) = kill_the_parent(&mut parent, &image, &dir)? else {
            tools::run(Command::new(program()).arg("umount").arg(&dir))?.ok()?;
            continue;
        };
        // Nobody was told of its mount, so it leaves none.
        while !has_ended(daemon) {
            ensure!(Instant::now() < until, "the daemon serves a mount that nobody was told of");
            std::thread::sleep(Duration::from_millis(1));
        }
        ensure!(!is_mounted(&dir)?, "the daemon left its mount");
        image::e2fsck_clean(&image)?;
        killed_count += 1;
    }
    Ok(())
}

/// A control group in which no further process can be started.
struct Full(PathBuf);

impl Full {
    /// With this process in it; `None` where the machine has no such groups.
    fn with(pid: i32) -> Result<Option<Full>> {
        let controllers =
            fs::read_to_string("/sys/fs/cgroup/cgroup.controllers").unwrap_or_default();
        let place = match controllers.split_whitespace().any(|name| name == "pids") {
            true => Path::new("/sys/fs/cgroup"),
            false => Path::new("/sys/fs/cgroup/pids"),
        };
        let dir = place.join(format!("fjord-killed.{pid}"));
        if !place.is_dir() || fs::create_dir(&dir).is_err() {
            return Ok(None);
        }
        let full = Full(dir);
        if fs::write(full.0.join("pids.max"), "1").is_err() {
            return Ok(None);
        }
        fs::write(full.0.join("cgroup.procs"), pid.to_string())?;
        Ok(Some(full))
    }
}

impl Drop for Full {
    fn drop(&mut self) {
        // Of a process that has not ended; the test has failed then.
        let _ = fs::remove_dir(&self.0);
    }
}

#[test]
fn killed_where_it_can_start_no_process() -> Result<()> {
    let scratch = Scratch::new("killed")?;
    let (image, dir) = (new_image(&scratch)?, scratch.join("mnt"));
    fs::create_dir(&dir)?;
    let mut rng = Rng::new(rng::seed_from_env("killed without processes", 1));
    let rounds = size::pick(2, 2, 10);
    for round in 0..rounds {
        let mut served = WAYS[0].serve(&image, &dir)?;
        write(&served.dir, round)?;
        let Some(full) = Full::with(served.pid)? else {
            signal(served.pid, libc::SIGKILL);
            served.ends()?;
            free_mount_point(&dir, &image, 1)?;
            tools::skipped(
                "a full control group",
                "this machine has none for numbers of processes",
            );
            return Ok(());
        };
        // In the last round it takes the mount down before it is killed. The image is closed later: some
        // of the kernel's own I/O needs a thread.
        if round + 1 < rounds {
            served.kill_at(Moment::Unmount, &mut rng)?;
        } else {
            signal(served.pid, libc::SIGTERM);
            let until = Instant::now() + PATIENCE;
            while is_mounted(&dir)? {
                ensure!(Instant::now() < until, "it does not take the mount down");
                std::thread::sleep(Duration::from_millis(5));
            }
            signal(served.pid, libc::SIGKILL);
        }
        served.ends()?;
        drop(full);
        free_mount_point(&dir, &image, round)?;
        tools::run(Command::new(program()).arg("recover").arg(&image))?.ok()?;
        let read = tools::run(Command::new(program()).arg("cat").arg(&image).arg("promised"))?;
        ensure!(read.ok()?.stdout == format!("round {round}"));
        image::e2fsck_clean(&image)?;
    }
    Ok(())
}

/// A killed server whose root directory the kernel has in its cache.
#[test]
fn a_new_mount_names_the_dead_one() -> Result<()> {
    let scratch = Scratch::new("killed")?;
    let (image, dir) = (new_image(&scratch)?, scratch.join("mnt"));
    fs::create_dir(&dir)?;
    for way in WAYS.into_iter().filter(|way| !way.is_alone) {
        let mut served = way.serve(&image, &dir)?;
        for _ in 0..2 {
            fs::read_dir(&dir)?.for_each(drop);
        }
        signal(served.pid, libc::SIGKILL);
        served.ends()?;
        free_mount_point(&dir, &image, 2)?;
    }
    Ok(())
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
