//! Rounds of: mount with fjord, run a mixed workload with fsyncs, `kill -9` the daemon or end the mount another
//! way ([`End`]) at a random moment, recover copies of the image with `fjord recover` and with Linux, check both.
//!
//! The next round mounts the image as the kill left it, so fjord's own recovery on mount is part
//! of every round too, and what earlier rounds left must still be there.

use std::{
    os::fd::AsRawFd,
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use anyhow::{Context, Result, ensure};

use crate::{
    features::FeatureSet,
    fjord_mount::FjordMount,
    image::{self, KernelMount, Scratch},
    manifest::{Compare, Manifest},
    promise::{self, Ledger},
    rng::Rng,
    tools,
};

/// Longest that a mount may take to end once nobody uses it.
const PATIENCE: Duration = Duration::from_secs(60);

/// How a mount ends while programs work on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// SIGKILL to the daemon.
    Kill,
    /// SIGTERM to the daemon, which takes the mount down.
    Signal,
    /// umount(8) `-l`: the mount ends when the last program has closed its files.
    Detach,
    /// umount(8) `-f`: the kernel aborts the connection.
    Abort,
}

impl End {
    /// All ends.
    pub const ALL: [End; 4] = [End::Kill, End::Signal, End::Detach, End::Abort];
}

/// What to run.
#[derive(Debug, Clone)]
pub struct Options {
    /// How each round ends.
    pub end: End,
    /// Number of kills.
    pub rounds: u64,
    /// Seed of the workload and the moments.
    pub seed: u64,
    /// Threads of the workload.
    pub workers: u32,
    /// The image's features.
    pub set: &'static FeatureSet,
    /// The fjord program.
    pub program: PathBuf,
    /// Further arguments of `fjord mount`.
    pub mount_args: Vec<String>,
    /// Arguments of `fjord tune` for the new image; none leave it as it is.
    pub tune_args: Vec<String>,
    /// Whether Linux recovers what is killed: not what `fsync=ijournal` wrote.
    pub linux_recovers: bool,
    /// Directory that receives the image of a failed round.
    pub keep_failed_in: Option<PathBuf>,
}

/// What happened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Summary {
    /// Kills survived.
    pub rounds: u64,
    /// Operations that returned.
    pub operations: u64,
    /// fsyncs that returned, all of which held.
    pub fsyncs: u64,
}

/// Runs the rounds. The error of a failed round has its number, the seed and the kept image.
pub fn run(options: &Options) -> Result<Summary> {
    let (disk, scratch) = (Scratch::new("kill9")?, Scratch::in_memory("kill9")?);
    let img = disk.join("live.img");
    options.set.make(&img)?;
    if !options.tune_args.is_empty() {
        let mut tune = Command::new(&options.program);
        tools::run(tune.arg("tune").args(&options.tune_args).arg(&img))?.ok()?;
    }
    let mut rng = Rng::new(options.seed);
    let mut summary = Summary::default();
    let mut old: Option<(String, Vec<Ledger>)> = None;
    for round in 0..options.rounds {
        let outcome = one_round(options, &scratch, &img, round, &mut rng, &mut old);
        let ledgers = outcome.map_err(|error| {
            let kept =
                keep(options, &scratch, round).unwrap_or_else(|e| format!("not kept: {e:#}"));
            error.context(format!("kill9: seed {} round {round}; image {kept}", options.seed))
        })?;
        summary.rounds += 1;
        summary.operations += ledgers.iter().map(|ledger| ledger.operations).sum::<u64>();
        summary.fsyncs += ledgers.iter().map(|ledger| ledger.fsyncs).sum::<u64>();
        old = Some((format!("round-{round}"), ledgers));
    }
    Ok(summary)
}

fn keep(options: &Options, scratch: &Scratch, round: u64) -> Result<String> {
    let Some(dir) = &options.keep_failed_in else {
        return Ok("dropped (no directory to keep it in)".to_owned());
    };
    std::fs::create_dir_all(dir)?;
    let to = dir.join(format!("kill9-{}-{round}.img", options.seed));
    image::copy_sparse(&scratch.join("killed.img"), &to)?;
    Ok(to.display().to_string())
}

fn one_round(
    options: &Options,
    scratch: &Scratch,
    img: &Path,
    round: u64,
    rng: &mut Rng,
    old: &mut Option<(String, Vec<Ledger>)>,
) -> Result<Vec<Ledger>> {
    let args: Vec<&str> = options.mount_args.iter().map(String::as_str).collect();
    let mut mount = FjordMount::with_program(&options.program, img, &args)
        .context("mounting the image of the last kill")?;
    if let Some((_, ledgers)) = old.take() {
        verify(&ledgers, mount.path()).context("after fjord's recovery on mount")?;
        clear(mount.path()).context("clearing the last round's directories")?;
    }
    let stop = AtomicBool::new(false);
    let name = format!("round-{round}");
    // Half the kills come early, when little is committed.
    let live =
        Duration::from_millis(if rng.percent(50) { rng.below(150) } else { rng.below(1500) });
    let seed = rng.next_u64();
    let ledgers = std::thread::scope(|scope| {
        // Through this they reach the mount also when it is detached.
        let held = std::fs::File::open(mount.path())?;
        let root = PathBuf::from(format!("/proc/self/fd/{}", held.as_raw_fd()));
        let (name, stop) = (&name, &stop);
        let workers = scope.spawn(move || promise::run(&root, name, seed, options.workers, stop));
        std::thread::sleep(live);
        let early = workers.is_finished();
        stop.store(true, Ordering::SeqCst);
        let ended = if early { Ok(()) } else { begin_end(options.end, &mut mount) };
        let ledgers = workers.join().expect("the workload does not panic")?;
        drop(held);
        ended?;
        ensure!(!early, "the workload ended before the mount");
        Ok(ledgers)
    })?;
    if options.end != End::Kill {
        mount.wait_for_end(PATIENCE).with_context(|| format!("{:?}", options.end))?;
    }
    mount.detach();
    let killed = scratch.join("killed.img");
    image::copy_sparse(img, &killed)?;
    check_with_fjord(options, &ledgers, &killed, &scratch.join("by-fjord.img"))?;
    check_with_linux(options, &ledgers, &killed, &scratch.join("by-linux.img"))?;
    Ok(ledgers)
}

/// Ends the mount, or does what it takes for that; programs still work on it.
fn begin_end(end: End, mount: &mut FjordMount) -> Result<()> {
    match end {
        End::Kill => mount.kill(),
        End::Signal => mount.signal("TERM"),
        End::Detach => {
            tools::run(tools::command("umount")?.arg("-l").arg(mount.path()))?.ok().map(drop)
        }
        End::Abort => mount.abort(),
    }
}

/// Removes all that earlier rounds made, so that the image does not fill up.
fn clear(root: &Path) -> Result<()> {
    for child in std::fs::read_dir(root)? {
        let child = child?;
        if child.file_name() != "lost+found" {
            std::fs::remove_dir_all(child.path())?;
        }
    }
    Ok(())
}

fn verify(ledgers: &[Ledger], root: &Path) -> Result<()> {
    ledgers.iter().try_for_each(|ledger| ledger.verify(root))
}

fn check_with_fjord(
    options: &Options,
    ledgers: &[Ledger],
    killed: &Path,
    copy: &Path,
) -> Result<()> {
    image::copy_sparse(killed, copy)?;
    recover(options, copy)?.ok().context("fjord recover")?;
    image::e2fsck_clean(copy).context("e2fsck after fjord recover")?;
    let once = {
        let mount = KernelMount::new(copy, "ro")?;
        verify(ledgers, mount.path()).context("after fjord recover")?;
        let tree = Manifest::from_directory(mount.path())?;
        mount.unmount()?;
        tree
    };
    recover(options, copy)?.ok().context("a second fjord recover")?;
    let mount = KernelMount::new(copy, "ro")?;
    let twice = Manifest::from_directory(mount.path())?;
    mount.unmount()?;
    once.diff(&twice, &Compare::SAME_IMAGE).ok("recovered once", "recovered twice")
}

fn recover(options: &Options, image: &Path) -> Result<tools::Output> {
    tools::run(Command::new(&options.program).arg("recover").arg(image))
}

fn check_with_linux(
    options: &Options,
    ledgers: &[Ledger],
    killed: &Path,
    copy: &Path,
) -> Result<()> {
    if !options.linux_recovers || !options.set.kernel_mounts()? {
        return Ok(());
    }
    image::copy_sparse(killed, copy)?;
    let mount = KernelMount::new(copy, "rw,noinit_itable").context("Linux's recovery")?;
    verify(ledgers, mount.path()).context("after Linux's recovery")?;
    mount.unmount()?;
    image::e2fsck_clean(copy).context("e2fsck after Linux's recovery")?;
    Ok(())
}
