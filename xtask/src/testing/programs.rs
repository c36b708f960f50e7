//! The test programs: how they are built, in which order they run, with which settings.

use std::{
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, ensure};
use fjord_testkit::tools;
use serde_json::Value;

use super::pool::{Job, LIMIT, Turn};

/// A built test program.
#[derive(Clone, Debug)]
pub(crate) struct TestProgram {
    pub(crate) name: String,
    /// Folder name of its package.
    pub(crate) package: String,
    program: PathBuf,
    package_dir: PathBuf,
    rank: usize,
}

/// Folders of the packages, from the bottom layer up: a fault shows first where it is.
const LAYERS: [&str; 12] = [
    "fjord-format",
    "fjord-block",
    "fjord-journal",
    "fjord-mkfs",
    "fjord",
    "fjord-tree",
    "fjord-bench",
    "fjord-fuse",
    "fjord-testkit",
    "fjord-crash",
    "fjord-cli",
    "xtask",
];

/// Test programs with features that no other test may meet, each in a build of its own: package,
/// features, name. See docs/locking.md, docs/crash-model.md and docs/commit-pipeline.md.
pub(crate) const OWN_BUILDS: [(&str, &str, &str); 3] = [
    ("fjord-block", "lock-stats", "lock_stats"),
    ("fjord-crash", "plant", "planted"),
    ("fjord-journal", "model,plant", "pipeline_model"),
];

/// Test programs of the engine that run with any scheduler and pipeline, and which of their tests.
const ANY_PIPELINE: [(&str, &str); 5] = [
    ("fjord-journal: journal", ""),
    ("fjord: unit tests", ""),
    ("fjord: names", ""),
    ("fjord-testkit: engine_models", ""),
    ("fjord-cli: mounted_killed", "kill_9_keeps_every_promise_on"),
];

/// Values of `FJORD_SCHEDULER` and `FJORD_PIPELINE` (docs/ordering.md, docs/commit-pipeline.md); the first
/// are the defaults.
const PIPELINES: [(&str, &str); 4] =
    [("direct", "serial"), ("epoch", "dual"), ("direct", "dual"), ("epoch", "serial")];

/// Test programs of mounts that run over each transport and with and without the kernel's write cache.
const MOUNTS: [&str; 9] = [
    "fjord-cli: durable",
    "fjord-cli: killed",
    "fjord-cli: like_linux",
    "fjord-cli: mounted",
    "fjord-cli: mounted_killed",
    "fjord-cli: privileges",
    "fjord-cli: programs_killed",
    "fjord-cli: snapshot_command",
    "fjord-cli: sync_calls",
];

/// Values of `FJORD_MOUNT_OPTIONS` for these. The first is the default: io_uring once there are many callers.
const TRANSPORTS: [&str; 4] = ["", "io_uring", "writeback_cache", "io_uring,writeback_cache"];

/// Tests that ask for what the kernel's write cache cannot keep (docs/mounting.md): ENOSPC at write(2), holes, the
/// ctime of a file after chattr(1), and the order of writes that nobody syncs.
const WITHOUT_WRITE_CACHE: [(&str, &[&str]); 3] = [
    ("fjord-cli: like_linux", &["data_and_holes", "what_was_removed_is_free_after_sync"]),
    ("fjord-cli: privileges", &["nothing_remembered_is_stale"]),
    ("fjord-cli: programs_killed", &["data_journal_keeps_the_order_of_all_writes"]),
];

/// Test programs that keep all processors busy.
const BUSY: [&str; 12] = [
    "fjord: hostile",
    "fjord-bench: figures",
    "fjord-block: proof",
    "fjord-block: sim",
    "fjord-crash: findings",
    "fjord-crash: growth",
    "fjord-crash: planted",
    "fjord-crash: policies",
    "fjord-crash: quick",
    "fjord-journal: oracle",
    "fjord-journal: pipeline_model",
    "fjord-testkit: engine_models",
];

/// Name of a build of its own.
pub(crate) fn own_build_name(package: &str, features: &str) -> String {
    format!("build {package} with {features}")
}

/// Name of the test program of a target, as cargo describes it, in the package in `package_dir`.
pub(crate) fn program_name(package_dir: &Path, target: &Value) -> String {
    let package = package_dir.file_name().unwrap_or_default().to_string_lossy();
    let test = match target["kind"][0] == "test" {
        true => target["name"].as_str().unwrap_or_default(),
        false => "unit tests",
    };
    format!("{package}: {test}")
}

/// Cargo, in the workspace. Without incremental builds, whose state takes five times the space of
/// the programs; `CARGO_INCREMENTAL=1` overrides.
pub(crate) fn cargo_command(root: &Path) -> Command {
    let mut command = Command::new(env!("CARGO"));
    command.current_dir(root);
    if std::env::var_os("CARGO_INCREMENTAL").is_none() {
        command.env("CARGO_INCREMENTAL", "0");
    }
    command
}

/// Builds the tests that `which` names and lists their programs, bottom layer first, unit tests
/// before the others.
pub(crate) fn build(root: &Path, which: &[&str]) -> Result<Vec<TestProgram>> {
    let mut child = cargo_command(root)
        .arg("test")
        .args(which)
        .args(["--no-run", "--quiet", "--message-format", "json"])
        .stdout(Stdio::piped())
        .spawn()?;
    let stdout = child.stdout.take().context("stdout is piped")?;
    let mut programs = Vec::new();
    for line in BufReader::new(stdout).lines() {
        let Ok(message) = serde_json::from_str::<Value>(&line?) else { continue };
        let error = message["message"]["level"] == "error";
        if let Some(text) = message["message"]["rendered"].as_str().filter(|_| error) {
            eprint!("{text}");
        }
        if message["profile"]["test"] != true || message["target"]["kind"][0] == "example" {
            continue;
        }
        let Some(program) = message["executable"].as_str() else { continue };
        let manifest = PathBuf::from(message["manifest_path"].as_str().unwrap_or_default());
        let package_dir = manifest.parent().context("a manifest lies in a directory")?.to_owned();
        let package = package_dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let unit = message["target"]["kind"][0] != "test";
        let layer = LAYERS.iter().position(|name| package == *name).unwrap_or(LAYERS.len());
        programs.push(TestProgram {
            name: program_name(&package_dir, &message["target"]),
            package,
            program: program.into(),
            package_dir,
            rank: layer * 2 + usize::from(!unit),
        });
    }
    ensure!(child.wait()?.success(), "the tests do not build");
    programs.sort_by(|a, b| (a.rank, &a.name).cmp(&(b.rank, &b.name)));
    Ok(programs)
}

/// Names of all test programs that cargo would build.
pub(super) fn names(root: &Path) -> Result<Vec<String>> {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["metadata", "--format-version", "1", "--no-deps", "--offline"]);
    let said = tools::run(cargo.current_dir(root))?.ok()?.stdout;
    let workspace: Value = serde_json::from_str(&said)?;
    let mut names = Vec::new();
    for package in workspace["packages"].as_array().context("no packages")? {
        let manifest = Path::new(package["manifest_path"].as_str().context("no manifest")?);
        let dir = manifest.parent().context("a manifest lies in a directory")?;
        let targets = package["targets"].as_array().context("no targets")?.iter();
        let tested = targets.filter(|target| target["test"] == true);
        names.extend(tested.map(|target| program_name(dir, target)));
    }
    Ok(names)
}

/// Fails if one of `only` is in the name of no run ([`TestProgram::jobs`]) of the test programs `names`.
pub(super) fn check_only(only: &[String], names: &[String], long: bool, seed: u64) -> Result<()> {
    let programs = names.iter().map(|name| TestProgram {
        name: name.clone(),
        package: String::new(),
        program: PathBuf::new(),
        package_dir: PathBuf::new(),
        rank: 0,
    });
    let runs: Vec<String> =
        programs.flat_map(|program| program.jobs(long, seed)).map(|job| job.name).collect();
    let is_unknown = |part: &&String| !runs.iter().any(|name| name.contains(part.as_str()));
    let unknown: Vec<&String> = only.iter().filter(is_unknown).collect();
    ensure!(
        unknown.is_empty(),
        "--only: no test program of this run has {unknown:?} in its name; the names are in xtask/budgets.json"
    );
    Ok(())
}

impl TestProgram {
    /// The program with the tests whose names contain `tests`.
    pub(crate) fn job(&self, tests: &str) -> Job {
        let turn = if BUSY.contains(&&*self.name) { Turn::Busy } else { Turn::Waits };
        Job {
            name: self.name.clone(),
            program_name: self.name.clone(),
            program: self.program.clone(),
            arguments: if tests.is_empty() { Vec::new() } else { vec![tests.to_owned()] },
            dir: self.package_dir.clone(),
            env: Vec::new(),
            turn,
            limit: LIMIT,
            is_careless: false,
        }
    }

    /// Runs of the program: one, with a pipeline and a transport that `seed` chooses where it runs with any; all
    /// if `long`.
    pub(crate) fn jobs(&self, long: bool, seed: u64) -> Vec<Job> {
        let jobs = self.jobs_by_pipeline(long, seed);
        let Some(place) = MOUNTS.iter().position(|name| *name == self.name) else { return jobs };
        let chosen = (seed as usize).wrapping_add(place) % TRANSPORTS.len();
        let with = |options: &&str| {
            let mut jobs = jobs.clone();
            for job in jobs.iter_mut().filter(|_| !options.is_empty()) {
                job.name += &format!(" ({options})");
                job.env.push(("FJORD_MOUNT_OPTIONS".to_owned(), (*options).to_owned()));
                let left_out = WITHOUT_WRITE_CACHE.iter().find(|(name, _)| *name == self.name);
                if let Some((_, tests)) = left_out.filter(|_| options.contains("writeback_cache")) {
                    let skip = |test: &&str| ["--skip".to_owned(), (*test).to_owned()];
                    job.arguments.extend(tests.iter().flat_map(skip));
                }
            }
            jobs
        };
        let transports = if long { &TRANSPORTS[..] } else { &TRANSPORTS[chosen..=chosen] };
        transports.iter().flat_map(with).collect()
    }

    fn jobs_by_pipeline(&self, long: bool, seed: u64) -> Vec<Job> {
        let Some(place) = ANY_PIPELINE.iter().position(|(name, _)| *name == self.name) else {
            return vec![self.job("")];
        };
        let (_, tests) = ANY_PIPELINE[place];
        // Together the programs have all pipelines in each run.
        let chosen = (seed as usize).wrapping_add(place) % PIPELINES.len();
        let mut jobs = Vec::new();
        for (index, (scheduler, pipeline)) in PIPELINES.into_iter().enumerate() {
            let default = index == 0;
            // Some of its tests are for the default only.
            let rest_needs_it = default && !tests.is_empty();
            if !long && index != chosen && !rest_needs_it {
                continue;
            }
            let mut job = self.job(if default { "" } else { tests });
            if !default {
                job.name = format!("{} {tests}", job.name).trim_end().to_owned();
                job.name += &format!(" (scheduler={scheduler}, pipeline={pipeline})");
            }
            job.env = vec![
                ("FJORD_SCHEDULER".to_owned(), scheduler.to_owned()),
                ("FJORD_PIPELINE".to_owned(), pipeline.to_owned()),
            ];
            jobs.push(job);
        }
        jobs
    }
}
