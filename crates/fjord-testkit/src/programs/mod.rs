//! Programs that rely on fsync, on a file system that dies under them: SQLite in all its modes
//! ([`sqlite`]) and the ways in which programs make files and names durable ([`patterns`]); and databases that sync
//! nothing ([`unsynced`]), where a crash keeps the order of all writes.
//!
//! Owns the rounds: mount with fjord, run some of the jobs at once, `kill -9` the daemon at a
//! random moment, recover copies of the image, let each job verify its files, continue with the
//! image as the kill left it. [`on_linux`] does the same with Linux's ext4 and its shutdown ioctl:
//! jobs expect no more than Linux keeps.
//!
//! Invariants: what a job was promised is kept in this process, outside the file system under
//! test. A promise is noted after the call has returned, what is begun before the call is made; so
//! each state that the job knows as possible is possible, and no other is. A program that outlives
//! the file system may take the failure of a sync for success, which no program does that loses its
//! power too; so what a program says counts only while [`Until::is_dying`] is false.

pub mod patterns;
mod session;
pub mod sqlite;
pub mod unsynced;

use std::{
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};

use crate::{
    features::FeatureSet,
    fjord_mount::FjordMount,
    image::{self, KernelMount, Scratch},
    rng::{Rng, mix},
    tools,
};

/// A program, and what it was promised.
pub trait Job: Send + Sync {
    /// Its name; also that of its directory below the root.
    fn name(&self) -> &str;

    /// Works below the root until it is enough, which is asked before each step, or until the file
    /// system fails.
    ///
    /// # Errors
    /// The file system's, or the program's.
    fn run(&mut self, root: &Path, until: &Until<'_>) -> Result<()>;

    /// Ends what still runs, without giving it a chance to tidy up.
    fn end(&mut self) {}

    /// Compares what is below the root with what was promised.
    ///
    /// # Errors
    /// A promise was broken; the message says which.
    fn verify(&self, root: &Path) -> Result<()>;

    /// After [`Job::verify`]: takes what was found as the state to go on from, or starts afresh.
    ///
    /// # Errors
    /// Those of the file system.
    fn go_on(&mut self, root: &Path) -> Result<()>;

    /// What happened so far.
    fn counts(&self) -> Counts;
}

/// When a job ends.
pub struct Until<'a> {
    enough: &'a (dyn Fn() -> bool + Sync),
    dying: Option<&'a AtomicBool>,
}

impl<'a> Until<'a> {
    /// The file system outlives the job, which ends by itself.
    pub fn enough(enough: &'a (dyn Fn() -> bool + Sync)) -> Self {
        Until { enough, dying: None }
    }

    /// The file system is killed after this is set.
    fn dying(enough: &'a (dyn Fn() -> bool + Sync), dying: &'a AtomicBool) -> Self {
        Until { enough, dying: Some(dying) }
    }

    /// Whether the job is to end before its next step.
    pub fn is_enough(&self) -> bool {
        (self.enough)()
    }

    /// Whether the file system may be dead already.
    pub fn is_dying(&self) -> bool {
        self.dying.is_some_and(|dying| dying.load(Ordering::SeqCst))
    }
}

/// Counted by a job.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Steps that were acknowledged as durable, or as durable as the job's mode has it.
    pub acknowledged: u64,
    /// Acknowledged steps that were lost as the program's documentation permits.
    pub lost_as_permitted: u64,
}

/// All jobs; a seed gives the same data each time.
pub fn jobs(seed: u64) -> Vec<Box<dyn Job>> {
    let databases =
        sqlite::Database::all(seed).into_iter().map(|job| Box::new(job) as Box<dyn Job>);
    let files = patterns::Pattern::all(seed).into_iter().map(|job| Box::new(job) as Box<dyn Job>);
    databases.chain(files).collect()
}

/// Databases that sync nothing, beside others that do all the time.
pub fn unsynced_jobs(seed: u64) -> Vec<Box<dyn Job>> {
    let stores = unsynced::Store::all(seed).into_iter().map(|job| Box::new(job) as Box<dyn Job>);
    let databases =
        sqlite::Database::unsynced(seed).into_iter().map(|job| Box::new(job) as Box<dyn Job>);
    // Two, so that most rounds have one of them.
    let syncs = [unsynced::Syncs, unsynced::Syncs].map(|job| Box::new(job) as Box<dyn Job>);
    stores.chain(databases).chain(syncs).collect()
}

/// What to run.
#[derive(Debug, Clone)]
pub struct Options {
    /// Number of kills.
    pub rounds: u64,
    /// Seed of the jobs and the moments.
    pub seed: u64,
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
    /// Some rounds are with `--writeback-cache`, where the kernel holds data and gives it in an order of its own.
    pub with_writeback_cache: bool,
    /// The jobs for a seed.
    pub jobs: fn(u64) -> Vec<Box<dyn Job>>,
    /// Only jobs whose names contain this.
    pub only: String,
    /// Count failed rounds, each followed by a new image, and go on.
    pub keep_going: bool,
    /// Directory that receives the image of a failed round.
    pub keep_failed_in: Option<PathBuf>,
}

/// What happened.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Summary {
    /// Kills survived.
    pub rounds: u64,
    /// What was wrong in rounds that failed; only with [`Options::keep_going`].
    pub failed: Vec<String>,
    /// Summed over the jobs.
    pub counts: Counts,
}

impl Summary {
    fn add(&mut self, jobs: &[Box<dyn Job>]) {
        for counts in jobs.iter().map(|job| job.counts()) {
            self.counts.acknowledged += counts.acknowledged;
            self.counts.lost_as_permitted += counts.lost_as_permitted;
        }
    }
}

/// A policy of fsync and what its images need.
#[derive(Debug, Clone, Copy)]
pub struct Policy {
    /// Value of the mount option `fsync`.
    pub name: &'static str,
    /// Feature set.
    pub set: &'static str,
    /// Arguments of `fjord tune`.
    pub tune_args: &'static [&'static str],
    /// Whether Linux recovers it.
    pub linux_recovers: bool,
}

impl Policy {
    /// Arguments of `fjord mount`.
    pub fn mount_args(&self, scheduler: &str) -> Vec<String> {
        vec!["-o".to_owned(), format!("fsync={},scheduler={scheduler}", self.name)]
    }
}

/// All policies.
pub const POLICIES: &[Policy] = &[
    Policy { name: "compound", set: "default", tune_args: &[], linux_recovers: true },
    Policy { name: "group", set: "default", tune_args: &[], linux_recovers: true },
    Policy { name: "fast-commit", set: "fast_commit", tune_args: &[], linux_recovers: true },
    Policy {
        name: "ijournal",
        set: "default",
        tune_args: &["--ijournal", "4x1M"],
        linux_recovers: false,
    },
];

/// Each policy runs with and without the scheduler.
pub const SCHEDULERS: &[&str] = &["direct", "epoch"];

/// Runs the rounds. The error of a failed round has its number, the seed and the kept image.
pub fn run(options: &Options) -> Result<Summary> {
    let mut rng = Rng::new(options.seed);
    let mut summary = Summary::default();
    let mut first = 0;
    while first < options.rounds {
        let mut rig = Rig::new(options, rng.next_u64())?;
        let failed = (first..options.rounds).find_map(|round| {
            let failed = rig.round(&mut rng).err().map(|error| (round, error));
            summary.rounds += u64::from(failed.is_none());
            failed
        });
        let failed = match failed {
            None => rig.last_look().err().map(|error| (options.rounds - 1, error)),
            failed => failed,
        };
        summary.add(&rig.jobs);
        let Some((round, error)) = failed else { break };
        let kept = rig.keep(round).unwrap_or_else(|e| format!("not kept: {e:#}"));
        let error =
            error.context(format!("programs: seed {} round {round}; image {kept}", options.seed));
        if !options.keep_going {
            return Err(error);
        }
        summary.failed.push(format!("{error:#}"));
        first = round + 1;
    }
    Ok(summary)
}

/// An image and the jobs that work on it.
struct Rig<'a> {
    options: &'a Options,
    scratch: Scratch,
    jobs: Vec<Box<dyn Job>>,
    /// Which jobs ran in the round before.
    ran: Vec<bool>,
    rounds: u64,
}

impl<'a> Rig<'a> {
    fn new(options: &'a Options, seed: u64) -> Result<Self> {
        let scratch = Scratch::in_memory("programs")?;
        let img = scratch.join("live.img");
        options.set.make(&img)?;
        if !options.tune_args.is_empty() {
            let mut tune = Command::new(&options.program);
            tools::run(tune.arg("tune").args(&options.tune_args).arg(&img))?.ok()?;
        }
        let mut jobs = (options.jobs)(seed);
        jobs.retain(|job| job.name().contains(&options.only));
        ensure!(!jobs.is_empty(), "no job has {:?} in its name", options.only);
        let ran = vec![false; jobs.len()];
        Ok(Rig { options, scratch, jobs, ran, rounds: 0 })
    }

    fn keep(&self, round: u64) -> Result<String> {
        let Some(dir) = &self.options.keep_failed_in else {
            return Ok("dropped (no directory to keep it in)".to_owned());
        };
        std::fs::create_dir_all(dir)?;
        let name = self.options.mount_args.join("").replace(|c: char| !c.is_alphanumeric(), "-");
        let to = dir.join(format!("programs{name}-{}-{round}.img", self.options.seed));
        image::copy_sparse(&self.scratch.join("killed.img"), &to)?;
        Ok(to.display().to_string())
    }

    fn mount(&mut self, args: &[&str]) -> Result<FjordMount> {
        let img = self.scratch.join("live.img");
        let mount = FjordMount::with_program(&self.options.program, &img, args)
            .context("mounting the image of the last kill")?;
        verify(&self.jobs, &self.ran, mount.path()).context("after fjord's recovery on mount")?;
        for (job, ran) in self.jobs.iter_mut().zip(&mut self.ran) {
            if std::mem::take(ran) {
                job.go_on(mount.path()).with_context(|| format!("{} goes on", job.name()))?;
            }
        }
        Ok(mount)
    }

    fn round(&mut self, rng: &mut Rng) -> Result<()> {
        let options = self.options;
        let mut args: Vec<&str> = options.mount_args.iter().map(String::as_str).collect();
        if rng.percent(25) && options.with_writeback_cache {
            args.push("--writeback-cache");
        }
        let mut mount = self.mount(&args)?;
        self.ran = choose(self.jobs.len(), rng);
        // Half the kills come early, when little is committed.
        let live =
            Duration::from_millis(if rng.percent(50) { rng.below(150) } else { rng.below(1000) });
        let root = mount.path().to_owned();
        let outcome = run_for(&mut self.jobs, &self.ran, &root, live, || mount.kill());
        mount.detach();
        let killed = self.scratch.join("killed.img");
        image::copy_sparse(&self.scratch.join("live.img"), &killed)?;
        outcome?;
        self.rounds += 1;
        let copy = self.scratch.join("copy.img");
        image::copy_sparse(&killed, &copy)?;
        if options.linux_recovers && self.rounds.is_multiple_of(2) && options.set.kernel_mounts()? {
            return self.look(&copy).context("after Linux's recovery");
        }
        tools::run(Command::new(&options.program).arg("recover").arg(&copy))?
            .ok()
            .context("fjord recover")?;
        image::e2fsck_clean(&copy).context("e2fsck after fjord recover")?;
        self.look(&copy).context("after fjord recover")
    }

    /// Mounts an image with Linux and lets the jobs look; SQLite recovers databases, which writes.
    fn look(&self, image: &Path) -> Result<()> {
        let mount = KernelMount::new(image, "rw,noinit_itable")?;
        verify(&self.jobs, &self.ran, mount.path())?;
        mount.unmount()?;
        image::e2fsck_clean(image)?;
        Ok(())
    }

    /// What the last kill left, recovered by a mount.
    fn last_look(&mut self) -> Result<()> {
        let mount = self.mount(&[])?;
        mount.unmount()?;
        image::e2fsck_clean(&self.scratch.join("live.img"))?;
        Ok(())
    }
}

/// Which jobs run at once: one alone, whose fsyncs nobody else's commits help, some, or most.
fn choose(count: usize, rng: &mut Rng) -> Vec<bool> {
    let wanted = match rng.below(4) {
        0 => 1,
        1 => 4,
        _ => count * 2 / 3,
    };
    let mut chosen = vec![false; count];
    for _ in 0..wanted.clamp(1, count) {
        chosen[rng.below(count as u64) as usize] = true;
    }
    chosen
}

/// Runs all jobs for this long, then lets `cut` end the file system under them.
///
/// # Errors
/// Of a job before the cut, and of the cut.
pub fn run_until_cut(
    jobs: &mut [Box<dyn Job>],
    root: &Path,
    live: Duration,
    cut: impl FnOnce() -> Result<()>,
) -> Result<()> {
    run_for(jobs, &vec![true; jobs.len()], root, live, cut)
}

/// Compares what a cut has left with what all jobs were promised.
///
/// # Errors
/// What is wrong, by job.
pub fn verify_all(jobs: &[Box<dyn Job>], root: &Path) -> Result<()> {
    verify(jobs, &vec![true; jobs.len()], root)
}

/// Runs the chosen jobs for this long, then lets `kill` end the file system under them.
fn run_for(
    jobs: &mut [Box<dyn Job>],
    chosen: &[bool],
    root: &Path,
    live: Duration,
    kill: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let stop = AtomicBool::new(false);
    let enough = || stop.load(Ordering::SeqCst);
    let until = Until::dying(&enough, &stop);
    let outcomes: Result<Vec<()>> = std::thread::scope(|scope| {
        let running: Vec<_> = jobs
            .iter_mut()
            .zip(chosen)
            .filter(|(_, chosen)| **chosen)
            .map(|(job, _)| {
                scope.spawn(|| {
                    let outcome = job.run(root, &until);
                    // Read after the outcome: the killer sets the flag before it kills.
                    match outcome {
                        Err(error) if !enough() => {
                            bail!("{}: {error:#} while the file system should live", job.name())
                        }
                        _ => Ok(()),
                    }
                })
            })
            .collect();
        std::thread::sleep(live);
        stop.store(true, Ordering::SeqCst);
        let killed = kill();
        let outcomes =
            running.into_iter().map(|thread| thread.join().expect("a job does not panic"));
        let outcomes = outcomes.collect();
        killed.and(outcomes)
    });
    jobs.iter_mut().for_each(|job| job.end());
    outcomes.map(|_| ())
}

/// All chosen jobs' judgements, at once.
fn verify(jobs: &[Box<dyn Job>], chosen: &[bool], root: &Path) -> Result<()> {
    let wrong: Vec<String> = std::thread::scope(|scope| {
        let judges: Vec<_> = jobs
            .iter()
            .zip(chosen)
            .filter(|(_, chosen)| **chosen)
            .map(|(job, _)| scope.spawn(move || (job.name(), job.verify(root))))
            .collect();
        let found = judges.into_iter().map(|judge| judge.join().expect("a judge does not panic"));
        found
            .filter_map(|(name, found)| found.err().map(|error| format!("{name}: {error:#}")))
            .collect()
    });
    ensure!(wrong.is_empty(), "{}", wrong.join("\n  "));
    Ok(())
}

/// The same jobs on Linux' ext4, which cannot be killed: it is shut down without a flush of its
/// log when the jobs have stopped.
///
/// # Errors
/// A job that Linux fails, and so is wrong.
pub fn on_linux(set: &FeatureSet, rounds: u64, seed: u64) -> Result<Summary> {
    let scratch = Scratch::in_memory("programs")?;
    let img = scratch.join("linux.img");
    set.make(&img)?;
    let mut rng = Rng::new(mix(seed));
    let mut jobs = jobs(seed);
    let mut ran = vec![false; jobs.len()];
    let mut summary = Summary::default();
    for round in 0..rounds {
        let mount = KernelMount::new(&img, "noinit_itable")?;
        verify(&jobs, &ran, mount.path())
            .with_context(|| format!("Linux, seed {seed}, before round {round}"))?;
        for (job, _) in jobs.iter_mut().zip(&ran).filter(|(_, ran)| **ran) {
            job.go_on(mount.path())?;
        }
        ran = choose(jobs.len(), &mut rng);
        let live = Duration::from_millis(rng.range(20, 600));
        run_stopped(&mut jobs, &ran, mount.path(), live)?;
        mount.unmount()?;
        summary.rounds += 1;
    }
    let mount = KernelMount::new(&img, "noinit_itable")?;
    verify(&jobs, &ran, mount.path()).with_context(|| format!("Linux, seed {seed}, at last"))?;
    mount.unmount()?;
    image::e2fsck_clean(&img)?;
    summary.add(&jobs);
    Ok(summary)
}

/// Jobs that stop between two steps, with their programs still there; then the shutdown. At once,
/// an fsync that the shutdown overtakes returns 0 now and then (Linux 6.18).
fn run_stopped(
    jobs: &mut [Box<dyn Job>],
    chosen: &[bool],
    root: &Path,
    live: Duration,
) -> Result<()> {
    let end = std::time::Instant::now() + live;
    let enough = || std::time::Instant::now() >= end;
    let until = Until::enough(&enough);
    let outcome: Result<()> = std::thread::scope(|scope| {
        let chosen = jobs.iter_mut().zip(chosen).filter(|(_, chosen)| **chosen);
        let running: Vec<_> = chosen
            .map(|(job, _)| scope.spawn(|| (job.run(root, &until), job.name().to_owned())))
            .collect();
        running.into_iter().try_for_each(|thread| {
            let (outcome, name) = thread.join().expect("a job does not panic");
            outcome.context(name)
        })
    });
    let down = image::shut_down(root);
    jobs.iter_mut().for_each(|job| job.end());
    outcome.and(down)
}
