//! Rounds of fail-over: a workload with fsyncs on a mount of an image on a cluster; the daemon is killed, or stopped, at
//! a random moment; a second mount, as of another host, takes the image over, and has every promise.
//!
//! A stopped daemon goes on once the image is gone: what it promises then counts too, so that a single fsync that
//! returned without its data being there is found. The second mount is the first one of the next round.

use std::{
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};

use crate::{
    ceph::Cluster,
    fjord_mount::{FjordMount, fjord_program},
    image::{self, Scratch},
    promise::{self, Ledger},
    rng::Rng,
    tools,
};

/// Size of the image.
const IMAGE_SIZE: &str = "512M";
/// Rounds after which the image is unmounted, exported and judged by e2fsck.
const ROUNDS_PER_CHECK: u64 = 5;

/// What to run.
#[derive(Clone, Debug)]
pub struct Options {
    /// Fail-overs.
    pub rounds: u64,
    /// Seed of the workload, the moments and the ways.
    pub seed: u64,
    /// Threads of the workload.
    pub workers: u32,
    /// Of the first daemons to be killed so many are not stolen from: the other mount waits until the cluster has
    /// given them up, up to 30 s each.
    pub waits: u64,
}

/// What happened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Daemons that were killed.
    pub killed: u64,
    /// Those of them that the other mount waited for.
    pub waited: u64,
    /// Daemons that were stopped, and went on.
    pub stopped: u64,
    /// Operations that returned.
    pub operations: u64,
    /// fsyncs that returned, all of which held.
    pub fsyncs: u64,
    /// The longest time from a kill or stop until the other mount was there, with `--steal`.
    pub takeover_max: Duration,
    /// The longest time without it.
    pub wait_max: Duration,
}

/// A command that runs the program, without arguments, on one of two hosts.
type Program<'a> = &'a dyn Fn(usize) -> Result<Command>;

/// Runs the rounds with two processes of this host. The error of a failed one has its number and the seed.
pub fn run(cluster: &Cluster, options: &Options) -> Result<Summary> {
    run_between(cluster, options, &|_| Ok(Command::new(fjord_program()?)))
}

/// The same between two hosts; `program` gives the program of each.
pub fn run_between(cluster: &Cluster, options: &Options, program: Program<'_>) -> Result<Summary> {
    let scratch = Scratch::new("failover")?;
    let name = format!("failover-{}", options.seed);
    // Two hosts: neither finds the other's mount by its name.
    let urls = [cluster.url(&name), format!("{}&id=admin", cluster.url(&name))];
    let mut mkfs = program(0)?;
    tools::run(mkfs.args(["mkfs", "-q", "--size", IMAGE_SIZE, &urls[0]]))?.ok()?;
    let mut rng = Rng::new(options.seed);
    let mut summary = Summary::default();
    let mut holder = None;
    for round in 0..options.rounds {
        let mount = |turn: u64, args: &[&str]| {
            let host = ((round + turn) % 2) as usize;
            FjordMount::start(program(host)?, Path::new(&urls[host]), args)
        };
        let first = match holder.take() {
            Some(mount) => mount,
            None => mount(0, &[])?,
        };
        let second = |waits: bool| mount(1, if waits { &[] } else { &["--steal"] });
        let next = one_round(first, &second, round, options, &mut rng, &mut summary);
        let next = next.with_context(|| format!("seed {}, round {round}", options.seed))?;
        if round % ROUNDS_PER_CHECK == ROUNDS_PER_CHECK - 1 || round + 1 == options.rounds {
            next.unmount()?;
            check(cluster, &name, &scratch.join("exported.img"))
                .with_context(|| format!("seed {}, after round {round}", options.seed))?;
        } else {
            holder = Some(next);
        }
    }
    cluster.tell("rbd", &["rm", "--no-progress", &name])?;
    Ok(summary)
}

/// The workload on `first`, until that is killed or stopped, and the mount that has taken over.
fn one_round(
    mut first: FjordMount,
    take_over: &dyn Fn(bool) -> Result<FjordMount>,
    round: u64,
    options: &Options,
    rng: &mut Rng,
    summary: &mut Summary,
) -> Result<FjordMount> {
    let is_killed = rng.percent(50);
    let waits = is_killed && summary.waited < options.waits;
    let live = Duration::from_millis(rng.below(1500));
    let seed = rng.next_u64();
    let (stop, name) = (AtomicBool::new(false), format!("round-{round}"));
    let (ledgers, second, took) = std::thread::scope(|scope| {
        let root: PathBuf = first.path().to_owned();
        let (name, stop) = (&name, &stop);
        let workers = scope.spawn(move || promise::run(&root, name, seed, options.workers, stop));
        std::thread::sleep(live);
        let early = workers.is_finished();
        stop.store(true, Ordering::SeqCst);
        let began = Instant::now();
        let ended = if is_killed { first.kill() } else { signal(&first, Signal::STOP) };
        let second = take_over(waits);
        let took = began.elapsed();
        if !is_killed {
            signal(&first, Signal::CONT)?;
        }
        let ledgers: Vec<Ledger> = workers.join().expect("the workload does not panic")?;
        ended?;
        ensure!(!early, "the workload ended before its time");
        Ok((ledgers, second?, took))
    })?;
    if !is_killed {
        first.kill()?;
    }
    first.detach();
    for ledger in &ledgers {
        ledger.verify(second.path()).context("on the mount that took over")?;
        summary.operations += ledger.operations;
        summary.fsyncs += ledger.fsyncs;
    }
    for ledger in &ledgers {
        let dir = second.path().join(format!("{name}-{}", ledger.worker()));
        if dir.exists() {
            std::fs::remove_dir_all(dir)?;
        }
    }
    let longest = if waits { &mut summary.wait_max } else { &mut summary.takeover_max };
    *longest = took.max(*longest);
    summary.waited += u64::from(waits);
    match is_killed {
        true => summary.killed += 1,
        false => summary.stopped += 1,
    }
    Ok(second)
}

fn signal(mount: &FjordMount, signal: Signal) -> Result<()> {
    let pid = i32::try_from(mount.pid()).ok().and_then(Pid::from_raw).context("a process")?;
    Ok(kill_process(pid, signal)?)
}

/// e2fsck finds nothing in the exported image.
pub(crate) fn check(cluster: &Cluster, name: &str, file: &Path) -> Result<()> {
    let path = file.to_str().context("a plain path")?;
    if file.exists() {
        std::fs::remove_file(file)?;
    }
    cluster.tell("rbd", &["export", "--no-progress", name, path])?;
    image::e2fsck_clean(file).map(drop)
}
