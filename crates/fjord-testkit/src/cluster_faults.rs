//! Faults of a cluster under a mount with load: what must wait, what must fail, what must end, and that nothing
//! promised is lost.
//!
//! Each fault has an image of its own, and leaves the cluster as it was. The judge is the ledger of a workload
//! ([`crate::promise`]), read on a mount that is made afterwards.

use std::{
    fs,
    path::Path,
    process::Command,
    sync::atomic::Ordering,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};

use crate::{
    ceph::{Cluster, POOL},
    fjord_mount::{FjordMount, fjord, fjord_program},
    promise::{self, Ledger},
    tools,
};

/// Threads of the workload.
const WORKER_COUNT: u32 = 3;
/// A cluster that has lost an OSD answers again within it: that takes some 15 s.
const STANDSTILL_MAX: Duration = Duration::from_secs(90);
/// What a signal's unmount may take while nothing answers.
const END_MAX: Duration = Duration::from_secs(40);

/// A fault, and what has to be true of it.
#[derive(Clone, Copy, Debug)]
pub struct Fault {
    /// What happens.
    pub name: &'static str,
    /// OSDs that it needs.
    pub osds: u32,
    /// Whether it takes seconds only.
    pub is_quick: bool,
    run: fn(&On<'_>) -> Result<()>,
}

/// What a fault happens to.
struct On<'a> {
    cluster: &'a Cluster,
    image: &'a str,
    seed: u64,
    mount_args: &'a [&'a str],
}

/// All of them.
pub const FAULTS: [Fault; 10] = [
    Fault { name: "the monitor is killed", osds: 1, is_quick: true, run: monitor_killed },
    Fault { name: "all is killed and started", osds: 1, is_quick: true, run: all_restarted },
    Fault { name: "the pool is full", osds: 1, is_quick: false, run: pool_full },
    Fault { name: "two signals while nothing answers", osds: 1, is_quick: true, run: two_signals },
    Fault { name: "one signal while nothing answers", osds: 1, is_quick: false, run: one_signal },
    Fault {
        name: "kill -9 while nothing answers",
        osds: 1,
        is_quick: true,
        run: killed_in_silence,
    },
    Fault { name: "a signal while the lock is waited for", osds: 1, is_quick: true, run: waiting },
    Fault { name: "the image is deleted", osds: 1, is_quick: true, run: image_deleted },
    Fault { name: "the user's key is revoked", osds: 1, is_quick: false, run: key_revoked },
    Fault { name: "an OSD of three is killed", osds: 3, is_quick: false, run: osd_killed },
];

impl Fault {
    /// Makes an image, and runs the fault on a mount of it with these options.
    ///
    /// # Errors
    /// What is not as it must be.
    pub fn run(&self, cluster: &Cluster, seed: u64, mount_args: &[&str]) -> Result<()> {
        let name: String = self.name.chars().filter(char::is_ascii_alphabetic).collect();
        let image = format!("{name}-{seed}");
        // Blocks as the ledger has them: with smaller ones an overwrite that nobody synced may be torn between them.
        fjord(&["mkfs", "-q", "-b", "4096", "--size", "256M", &cluster.url(&image)], &[])?.ok()?;
        let on = On { cluster, image: &image, seed, mount_args };
        (self.run)(&on).with_context(|| format!("{}, seed {seed}", self.name))
    }
}

/// Takes the image over, as another host, and looks for every promise.
fn verify(on: &On<'_>, ledgers: &[Ledger]) -> Result<()> {
    let url = format!("{}&id=admin", on.cluster.url(on.image));
    let mount = FjordMount::new(Path::new(&url), &["--steal"])?;
    for ledger in ledgers {
        ledger.verify(mount.path())?;
    }
    mount.unmount()
}

fn mount(on: &On<'_>) -> Result<FjordMount> {
    FjordMount::new(Path::new(&on.cluster.url(on.image)), on.mount_args)
}

/// Lets the workload run, so that the fault meets it in the middle.
fn for_a_while() {
    thread::sleep(Duration::from_millis(400));
}

fn monitor_killed(on: &On<'_>) -> Result<()> {
    let mount = mount(on)?;
    let (ledgers, ()) = promise::under_load(mount.path(), on.seed, WORKER_COUNT, |_| {
        for_a_while();
        on.cluster.kill("mon.a")?;
        // Whoever is connected needs no monitor.
        for index in 0..20 {
            let took = mount.fsync_new_file(&format!("no-monitor-{index}"))?;
            ensure!(took < Duration::from_secs(20), "an fsync took {took:?} without a monitor");
        }
        on.cluster.start_monitor()
    })?;
    mount.unmount()?;
    verify(on, &ledgers)
}

fn all_restarted(on: &On<'_>) -> Result<()> {
    let mount = mount(on)?;
    let (ledgers, ()) = promise::under_load(mount.path(), on.seed, WORKER_COUNT, |_| {
        for_a_while();
        on.cluster.kill_all()?;
        for_a_while();
        on.cluster.start_all()?;
        mount.fsync_new_file("afterwards").map(drop)
    })?;
    mount.unmount()?;
    verify(on, &ledgers)
}

fn osd_killed(on: &On<'_>) -> Result<()> {
    let mount = mount(on)?;
    let (ledgers, ()) = promise::under_load(mount.path(), on.seed, WORKER_COUNT, |_| {
        for_a_while();
        on.cluster.kill("osd.1")?;
        // Each file lies on other placement groups: some of them had the dead one first.
        for index in 0..20 {
            let took = mount.fsync_new_file(&format!("two-left-{index}"))?;
            ensure!(took < STANDSTILL_MAX, "an fsync took {took:?} with two OSDs of three");
        }
        on.cluster.start_osd(1)?;
        mount.fsync_new_file("three-again").map(drop)
    })?;
    mount.unmount()?;
    verify(on, &ledgers)
}

/// Writes to a full cluster wait, and end when it has room again.
fn pool_full(on: &On<'_>) -> Result<()> {
    let mount = mount(on)?;
    let (ledgers, ()) = promise::under_load(mount.path(), on.seed, WORKER_COUNT, |_| {
        for_a_while();
        on.cluster.be_full(true)?;
        thread::scope(|scope| {
            let waits = scope.spawn(|| mount.fsync_new_file("while-full"));
            thread::sleep(Duration::from_secs(2));
            let has_waited = !waits.is_finished();
            on.cluster.be_full(false)?;
            waits.join().expect("an fsync does not panic")?;
            ensure!(has_waited, "an fsync on a full cluster returned");
            Ok(())
        })
    })?;
    mount.unmount()?;
    verify(on, &ledgers)
}

fn two_signals(on: &On<'_>) -> Result<()> {
    ends_in_silence(on, &[Signal::TERM, Signal::TERM], Duration::from_secs(10))
}

fn one_signal(on: &On<'_>) -> Result<()> {
    ends_in_silence(on, &[Signal::TERM], END_MAX)
}

fn killed_in_silence(on: &On<'_>) -> Result<()> {
    ends_in_silence(on, &[Signal::KILL], Duration::from_secs(5))
}

/// Stops all OSDs under load, and then ends the mount by signals.
fn ends_in_silence(on: &On<'_>, signals: &[Signal], patience: Duration) -> Result<()> {
    let mut mount = mount(on)?;
    let pid = mount.pid();
    let root = mount.path().to_owned();
    let (ledgers, (said, took)) = promise::under_load(&root, on.seed, WORKER_COUNT, |stop| {
        for_a_while();
        on.cluster.pause_osds(true)?;
        // What fails from here on fails since the mount ends.
        stop.store(true, Ordering::SeqCst);
        for_a_while();
        let began = Instant::now();
        for signal in signals {
            kill(pid, *signal)?;
            thread::sleep(Duration::from_millis(100));
        }
        let ended = mount.wait_for_end(patience);
        let took = began.elapsed();
        on.cluster.pause_osds(false)?;
        Ok((ended?, took))
    })?;
    println!("  ended after {took:?}");
    if signals[0] != Signal::KILL {
        ensure!(said.contains("has not answered"), "the mount said: {said}");
    }
    mount.detach();
    verify(on, &ledgers)
}

/// A mount that waits until the cluster gives up a dead holder of the lock ends by a signal.
fn waiting(on: &On<'_>) -> Result<()> {
    let mut first = mount(on)?;
    first.fsync_new_file("promised")?;
    first.kill()?;
    first.detach();
    let dir = tempfile::tempdir()?;
    let url = format!("{}&id=admin", on.cluster.url(on.image));
    let mut second = tools::hear_signals(&mut Command::new(fjord_program()?))
        .args(["mount", &url])
        .arg(dir.path())
        .spawn()?;
    thread::sleep(Duration::from_millis(1500));
    kill(second.id(), Signal::TERM)?;
    let began = Instant::now();
    while second.try_wait()?.is_none() {
        if began.elapsed() > Duration::from_secs(5) {
            second.kill()?;
            second.wait()?;
            anyhow::bail!("a mount that waits for the lock did not end by SIGTERM");
        }
        thread::sleep(Duration::from_millis(5));
    }
    let third = FjordMount::new(Path::new(&url), &["--steal"])?;
    ensure!(fs::read(third.path().join("promised"))? == b"promised");
    third.unmount()
}

/// A user who is removed can be served until its next connection; from then on its mount can do nothing but end.
fn key_revoked(on: &On<'_>) -> Result<()> {
    let user = format!("client.user-{}", on.seed);
    let osd = format!("profile rbd pool={POOL}");
    on.cluster
        .tell("ceph", &["auth", "get-or-create", &user, "mon", "profile rbd", "osd", &osd])?;
    on.cluster.add_key(&user)?;
    let url = format!("{}&id={user}", on.cluster.url(on.image));
    let mut mount = FjordMount::new(Path::new(&url), on.mount_args)?;
    let (pid, root) = (mount.pid(), mount.path().to_owned());
    let (ledgers, said) = promise::under_load(&root, on.seed, WORKER_COUNT, |stop| {
        for_a_while();
        on.cluster.tell("ceph", &["auth", "del", &user])?;
        stop.store(true, Ordering::SeqCst);
        // New daemons know of no connection that was allowed before.
        on.cluster.kill_all()?;
        on.cluster.start_all()?;
        kill(pid, Signal::TERM)?;
        thread::sleep(Duration::from_millis(100));
        kill(pid, Signal::TERM)?;
        mount.wait_for_end(END_MAX)
    })?;
    println!("  said: {}", said.lines().next().unwrap_or_default());
    mount.detach();
    let refused = FjordMount::new(Path::new(&url), &["--steal"]);
    let told = refused.err().context("a user who was removed has mounted")?;
    ensure!(format!("{told:#}").contains("check the user (`?id=`)"), "told: {told:#}");
    verify(on, &ledgers)
}

/// Ceph refuses to remove an image that is mounted; removed by force below a mount, the mount can be ended.
fn image_deleted(on: &On<'_>) -> Result<()> {
    let mut mount = mount(on)?;
    mount.fsync_new_file("promised")?;
    let refused = tools::run(on.cluster.command("rbd").args(["rm", "--no-progress", on.image]))?;
    ensure!(refused.code != Some(0), "rbd removed an image that is mounted");
    mount.fsync_new_file("still-there")?;
    let info = on.cluster.tell("rbd", &["info", on.image])?;
    let prefix = info.lines().find_map(|line| line.trim().strip_prefix("block_name_prefix: "));
    let id = prefix.and_then(|prefix| prefix.rsplit('.').next()).context("the image's id")?;
    let objects = on.cluster.tell("rados", &["-p", POOL, "ls"])?;
    for object in objects.lines().filter(|object| object.contains(id)) {
        on.cluster.tell("rados", &["-p", POOL, "rm", object])?;
    }
    // Whatever this returns: there is nothing to lose, and it must return.
    let _ = mount.fsync_new_file("too-late");
    kill(mount.pid(), Signal::TERM)?;
    mount.wait_for_end(END_MAX)?;
    mount.detach();
    on.cluster.tell("rados", &["-p", POOL, "rm", &format!("rbd_id.{}", on.image)]).map(drop)?;
    // The list of images names it still.
    tools::run(on.cluster.command("rbd").args(["rm", "--no-progress", on.image]))?;
    Ok(())
}

fn kill(pid: u32, signal: Signal) -> Result<()> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).context("a process")?;
    Ok(kill_process(pid, signal)?)
}
