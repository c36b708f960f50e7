//! `cargo xtask test`: every check in order, the time of each ([`budgets`]), and a summary line.
//!
//! Invariant: a run ends within its limit ([`run_limit`]), and each of its programs within its own
//! ([`pool`]); nothing is installed unless asked for (`--install`, or `CI=true`); a stage that cannot run
//! fails; what the machine cannot do is counted as skipped, with its reason.

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant, SystemTime},
};

use anyhow::{Context, Result, ensure};
use clap::Args;
use fjord_testkit::io_uring::PARAMETER;
use fjord_testkit::tools;

use budgets::{Budgets, Record};
use pool::{Job, LIMIT, Turn};
use programs::{OWN_BUILDS, TestProgram, cargo_command, own_build_name};
use run_limit::RunLimit;
use totals::Totals;

pub(crate) mod budgets;
mod kept;
pub(crate) mod pool;
pub(crate) mod programs;
pub(crate) mod run_limit;
mod totals;

/// Free space that the builds and the scratch files need, in bytes: 4 GiB of programs, 4 GiB of images.
const ROOM_BYTES: u64 = 8 << 30;

/// Limits of a whole run, builds included.
const RUN_LIMIT: Duration = Duration::from_secs(40 * 60);
const LONG_RUN_LIMIT: Duration = Duration::from_secs(4 * 3600);

/// Arguments of `cargo xtask test`.
#[derive(Debug, Args)]
pub(crate) struct TestArgs {
    /// Install missing programs with apt-get (also when CI=true)
    #[arg(long)]
    install: bool,
    /// All of each kind of test, with every scheduler and pipeline: an hour or more
    #[arg(long)]
    long: bool,
    /// Only test programs whose name contains this (may be repeated); skips the lints
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
    /// Run this program in place of the tests (may be repeated), to try the runner
    #[arg(long, value_name = "PATH", hide = true)]
    program: Vec<PathBuf>,
    /// Seconds that each of them may take
    #[arg(long, default_value_t = LIMIT.as_secs(), hide = true)]
    limit: u64,
    /// Seconds that the whole run may take
    #[arg(long, hide = true)]
    run_limit: Option<u64>,
}

// Names of stages, which xtask/budgets.json has, too.
const TOOLS: &str = "tools";
const FORMAT: &str = "format";
const LINTS: &str = "lints";
const BUILD: &str = "build";
const EXAMPLES: &str = "documentation examples";

/// Runs all stages.
pub(crate) fn run(args: &TestArgs) -> Result<()> {
    let root = crate::workspace();
    let limit = if args.long { LONG_RUN_LIMIT } else { RUN_LIMIT };
    let limit = RunLimit::start(args.run_limit.map_or(limit, Duration::from_secs))?;
    if !args.program.is_empty() {
        return run_given(args, &root);
    }
    let seed = seed();
    programs::check_only(&args.only, &programs::names(&root)?, args.long, seed)?;
    let budgets = Budgets::load(&root)?;
    let record = Record::begin(&root, &args.only, args.long);
    let started = Instant::now();
    let mut run = Run::new(&root, if args.long { "long" } else { "default" })?;
    run.totals.prepare(TOOLS, || check_tools(args).and_then(|()| check_room(&root)));
    if run.totals.failed == 0 {
        if args.only.is_empty() {
            run.totals.prepare(FORMAT, || cargo(&root, &["fmt", "--all", "--check"]));
            run.totals.prepare(LINTS, || lint(&root));
        }
        let mut jobs = jobs(args, &mut run, seed);
        // The longest first, so that none is left alone at the end.
        jobs.sort_by_key(|job| std::cmp::Reverse(budgets.of(&job.program_name)));
        run.pool(&jobs);
    }
    run.count_skipped();
    drop(limit);
    let whole = started.elapsed();
    println!("== times\n{}", budgets.report(&run.totals, &record, whole));
    if let Err(error) = record.save(&root, &run.totals, whole) {
        println!("could not record the times: {error:#}");
    }
    run.end()
}

/// Runs `--program`s.
fn run_given(args: &TestArgs, root: &Path) -> Result<()> {
    let dir = std::env::current_dir()?;
    let job = |program: &PathBuf| Job {
        name: program.display().to_string(),
        program_name: program.display().to_string(),
        program: program.clone(),
        arguments: Vec::new(),
        dir: dir.clone(),
        env: Vec::new(),
        turn: Turn::Waits,
        limit: Duration::from_secs(args.limit),
        is_careless: true,
    };
    // Another folder may be set for what is built (CARGO_TARGET_DIR).
    std::fs::create_dir_all(root.join("target"))?;
    let mut run = Run {
        scratch: tempfile::tempdir_in(root.join("target"))?.keep(),
        skip_log: root.join("target/skipped-given.txt"),
        ..Run::new(root, "default")?
    };
    run.pool(&args.program.iter().map(job).collect::<Vec<_>>());
    run.end()
}

/// What [`run`] and `cargo xtask check` share.
pub(crate) struct Run {
    pub(crate) totals: Totals,
    scratch: PathBuf,
    skip_log: PathBuf,
    /// In the environment of all tests: see `fjord_testkit::size`.
    size: &'static str,
    /// Until the end.
    rings: Option<RingsOffered>,
}

/// The kernel offers FUSE over io_uring to the mounts of the tests; dropped, what it offered before.
struct RingsOffered {
    before: String,
}

impl RingsOffered {
    /// `None` where the kernel has no such thing, or this is not root: then tests say so.
    fn begin() -> Option<RingsOffered> {
        let before = std::fs::read_to_string(PARAMETER).ok()?;
        std::fs::write(PARAMETER, "Y").ok()?;
        Some(RingsOffered { before })
    }
}

impl Drop for RingsOffered {
    fn drop(&mut self) {
        if let Err(error) = std::fs::write(PARAMETER, self.before.trim()) {
            println!("could not restore {PARAMETER} to {}: {error}", self.before.trim());
        }
    }
}

impl Run {
    pub(crate) fn new(root: &Path, size: &'static str) -> Result<Run> {
        let (scratch, skip_log) = (root.join("target/scratch"), root.join("target/skipped.txt"));
        remove_if_there(&skip_log)?;
        let rings = RingsOffered::begin();
        Ok(Run { totals: Totals::default(), scratch, skip_log, size, rings })
    }

    /// Runs `jobs`.
    pub(crate) fn pool(&mut self, jobs: &[Job]) {
        let skip_log = self.skip_log.to_string_lossy().into_owned();
        let env = [
            ("FJORD_SKIP_LOG".to_owned(), skip_log),
            ("FJORD_TEST_SIZE".to_owned(), self.size.to_owned()),
        ];
        let with_env = |job: &Job| {
            let mut job = job.clone();
            job.env.extend(env.iter().cloned());
            job
        };
        let jobs: Vec<Job> = jobs.iter().map(with_env).collect();
        pool::run(&jobs, &self.scratch, &mut self.totals);
    }

    /// Counts and prints what tests have skipped.
    pub(crate) fn count_skipped(&mut self) {
        let Ok(log) = std::fs::read_to_string(&self.skip_log) else { return };
        println!("== skipped: not supported by this machine");
        for line in log.lines() {
            println!("   {line}");
            self.totals.skipped += 1;
        }
    }

    /// Ends this process with status 1 if something failed.
    pub(crate) fn end(mut self) -> Result<()> {
        self.rings = None;
        if run_limit::end_leftovers() {
            println!("FAILED: a process was left at the end");
            self.totals.failed += 1;
        }
        let Totals { passed, failed, skipped, .. } = self.totals;
        println!("{passed} passed, {failed} failed, {skipped} skipped");
        if failed > 0 {
            std::process::exit(1);
        }
        Ok(())
    }
}

/// Builds the tests and chooses what runs.
fn jobs(args: &TestArgs, run: &mut Run, seed: u64) -> Vec<Job> {
    let root = crate::workspace();
    let wanted =
        |name: &str| args.only.is_empty() || args.only.iter().any(|part| name.contains(part));
    let mut built: Vec<TestProgram> = Vec::new();
    run.totals.prepare(BUILD, || {
        built = programs::build(&root, &["--workspace"])?;
        Ok(())
    });
    for (package, features, test) in OWN_BUILDS {
        if wanted(&format!("{package}: {test}")) {
            run.totals.prepare(&own_build_name(package, features), || {
                let own = ["--package", package, "--features", features, "--test", test];
                built.extend(programs::build(&root, &own)?);
                Ok(())
            });
        }
    }
    println!("pipelines of this run: FJORD_SEED={seed}");
    let mut jobs: Vec<Job> =
        built.iter().flat_map(|program| program.jobs(args.long, seed)).collect();
    jobs.retain(|job| wanted(&job.name));
    for job in &mut jobs {
        job.is_careless = true;
        job.limit *= if args.long { 3 } else { 1 };
    }
    if args.only.is_empty() {
        jobs.push(examples(&root));
    }
    jobs
}

/// `FJORD_SEED`, or the seconds of the clock.
fn seed() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let given = std::env::var("FJORD_SEED").ok().and_then(|seed| seed.parse().ok());
    given.unwrap_or(now.as_secs())
}

/// The programs of the documentation, which cargo builds and runs.
fn examples(root: &Path) -> Job {
    let cargo = cargo_command(root);
    let env = cargo.get_envs().filter_map(|(name, value)| Some((name.to_str()?, value?.to_str()?)));
    Job {
        name: EXAMPLES.to_owned(),
        program_name: EXAMPLES.to_owned(),
        program: cargo.get_program().into(),
        arguments: ["test", "--workspace", "--doc", "--quiet"].map(str::to_owned).into(),
        dir: root.to_owned(),
        env: env.map(|(name, value)| (name.to_owned(), value.to_owned())).collect(),
        turn: Turn::Busy,
        // Cold, it builds.
        limit: LIMIT * 2,
        // Cargo needs HOME.
        is_careless: false,
    }
}

fn lint(root: &Path) -> Result<()> {
    let lints = ["clippy", "--workspace", "--all-targets", "--quiet", "--"];
    cargo(root, &[&lints[..], &["-D", "warnings"]].concat())?;
    OWN_BUILDS.into_iter().try_for_each(|(package, features, _)| {
        let own = ["clippy", "--package", package, "--features", features];
        let rest = ["--all-targets", "--quiet", "--", "-D", "warnings"];
        cargo(root, &[&own[..], &rest].concat())
    })
}

/// Runs cargo in the workspace.
pub(crate) fn cargo(root: &Path, args: &[&str]) -> Result<()> {
    let status = cargo_command(root).args(args).status()?;
    ensure!(status.success(), "cargo {} failed", args.join(" "));
    Ok(())
}

fn remove_if_there(path: &Path) -> Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error.into()),
        _ => Ok(()),
    }
}

/// All programs and privileges the tests need, or a message that says how to get them.
fn check_tools(args: &TestArgs) -> Result<()> {
    tools::require_root()?;
    ensure!(Path::new("/dev/fuse").exists(), "there is no /dev/fuse: modprobe fuse");
    let mut packages: Vec<&str> = tools::missing().iter().map(|tool| tool.package).collect();
    packages.sort_unstable();
    packages.dedup();
    if packages.is_empty() {
        return Ok(());
    }
    let install = args.install || std::env::var("CI").is_ok_and(|ci| ci == "true");
    let line = format!("apt-get install {}", packages.join(" "));
    ensure!(install, "programs are missing: {line} (or use --install)");
    println!("{line}");
    for step in [&["update", "-qq"][..], &["install", "-y", "-qq", "--no-install-recommends"][..]] {
        let mut apt = Command::new("apt-get");
        apt.args(step).env("DEBIAN_FRONTEND", "noninteractive").stdout(Stdio::null());
        if step[0] == "install" {
            apt.args(&packages);
        }
        let status = apt.status().context("cannot start apt-get")?;
        ensure!(status.success(), "apt-get {} failed: {line}", step[0]);
    }
    let left = tools::missing();
    ensure!(left.is_empty(), "still missing: {left:?}");
    Ok(())
}

/// Enough free space for what the tests build and write, or a message that says how much there is.
fn check_room(root: &Path) -> Result<()> {
    let stat = rustix::fs::statvfs(root)?;
    let free = stat.f_bavail.saturating_mul(stat.f_frsize);
    ensure!(
        free >= ROOM_BYTES,
        "{} MiB are free below {}; the tests need {} MiB: free some space (cargo clean helps)",
        free >> 20,
        root.display(),
        ROOM_BYTES >> 20,
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Names of the stages that prepare tests, and of all test programs that cargo would build.
    fn stage_names(root: &Path) -> BTreeSet<String> {
        let mut names: BTreeSet<String> =
            [TOOLS, FORMAT, LINTS, BUILD, EXAMPLES].map(str::to_owned).into();
        names.extend(OWN_BUILDS.map(|(package, features, _)| own_build_name(package, features)));
        names.extend(programs::names(root).unwrap());
        names
    }

    #[test]
    fn each_stage_has_a_budget() {
        let root = crate::workspace();
        let names = stage_names(&root);
        assert!(names.contains("fjord-crash: planted") && names.len() > 30, "{names:?}");
        let budgets = Budgets::load(&root).unwrap();
        let budgets: BTreeSet<String> = budgets.names().map(str::to_owned).collect();
        let without: Vec<_> = names.difference(&budgets).collect();
        assert!(without.is_empty(), "xtask/budgets.json has no budget for {without:?}");
        let stale: Vec<_> = budgets.difference(&names).collect();
        assert!(stale.is_empty(), "xtask/budgets.json names stages that do not exist: {stale:?}");
    }
}
