//! `cargo xtask test`: every check in order, the time of each, and a summary line.
//!
//! Invariant: nothing is installed unless asked for (`--install`, or `CI=true`); a stage that
//! cannot run fails; what the machine cannot do is counted as skipped, with its reason.

use std::{
    io::{BufRead, BufReader},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use fjord_testkit::tools;

/// Free space that the builds and the scratch files need, in bytes: 4 GiB of programs, 4 GiB of images.
const ROOM_BYTES: u64 = 8 << 30;

/// Time limit of a test program.
const LIMIT: Duration = Duration::from_secs(15 * 60);

/// Arguments of `cargo xtask test`.
#[derive(Debug, Args)]
pub(crate) struct TestArgs {
    /// Install missing programs with apt-get (also when CI=true)
    #[arg(long)]
    install: bool,
    /// Only test programs whose name contains this (may be repeated); skips the lints
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
}

#[derive(Debug, Default)]
struct Totals {
    passed: u64,
    failed: u64,
    skipped: u64,
    times: Vec<(String, Duration, bool)>,
}

impl Totals {
    /// Runs one stage; its outcome counts as one test unless it counted tests itself.
    fn stage(&mut self, name: &str, run: impl FnOnce(&mut Totals) -> Result<()>) {
        println!("== {name}");
        let (started, counted) = (Instant::now(), self.passed + self.failed);
        let failed_before = self.failed;
        let outcome = run(self);
        let ok = outcome.is_ok();
        if let Err(error) = outcome {
            println!("FAILED {name}: {error:#}");
            self.failed += u64::from(failed_before == self.failed);
        } else if counted == self.passed + self.failed {
            self.passed += 1;
        }
        self.times.push((name.to_owned(), started.elapsed(), ok));
    }

    /// Adds the counts of a closing line of the test harness.
    fn count(&mut self, line: &str) {
        let Some(rest) = line.strip_prefix("test result: ") else { return };
        for part in rest.split(['.', ';']) {
            let mut words = part.split_whitespace();
            let (Some(number), Some(what)) = (words.next(), words.next()) else { continue };
            let Ok(number) = number.parse::<u64>() else { continue };
            match what {
                "passed" => self.passed += number,
                "failed" => self.failed += number,
                "ignored" => self.skipped += number,
                _ => {}
            }
        }
    }
}

/// Runs all stages.
pub(crate) fn run(args: &TestArgs) -> Result<()> {
    let root = crate::workspace();
    let scratch = root.join("target/scratch");
    let skip_log = root.join("target/skipped.txt");
    remove_if_there(&skip_log)?;
    let env = [("FJORD_SCRATCH", scratch.as_path()), ("FJORD_SKIP_LOG", skip_log.as_path())];
    let started = Instant::now();
    let mut totals = Totals::default();
    totals.stage("tools", |_| check_tools(args).and_then(|()| check_room(&root)));
    if totals.failed == 0 {
        if args.only.is_empty() {
            totals.stage("format", |_| cargo(&root, &["fmt", "--all", "--check"]));
            totals.stage("lints", |_| {
                let lints = ["clippy", "--workspace", "--all-targets", "--quiet", "--"];
                cargo(&root, &[&lints[..], &["-D", "warnings"]].concat())?;
                OWN_BUILDS.into_iter().try_for_each(|(package, features, _)| {
                    let own = ["clippy", "--package", package, "--features", features];
                    let rest = ["--all-targets", "--quiet", "--", "-D", "warnings"];
                    cargo(&root, &[&own[..], &rest].concat())
                })
            });
        }
        run_tests(&root, args, &env, &mut totals);
    }
    if let Ok(log) = std::fs::read_to_string(&skip_log) {
        println!("== skipped: not supported by this machine");
        for line in log.lines() {
            println!("   {line}");
            totals.skipped += 1;
        }
    }
    if scratch.exists() {
        // What a failed test left mounted must not hide the count of passed and failed.
        if let Err(error) = std::fs::remove_dir_all(&scratch) {
            println!("could not remove {}: {error}", scratch.display());
        }
    }
    println!("== times");
    for (name, time, ok) in &totals.times {
        println!("{:8.1} s  {name}{}", time.as_secs_f64(), if *ok { "" } else { "  FAILED" });
    }
    println!("{:8.1} s  in all", started.elapsed().as_secs_f64());
    println!("{} passed, {} failed, {} skipped", totals.passed, totals.failed, totals.skipped);
    if totals.failed > 0 {
        std::process::exit(1);
    }
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

/// Cargo, in the workspace. Without incremental builds, whose state takes five times the space of
/// the programs; `CARGO_INCREMENTAL=1` overrides.
fn cargo_command(root: &Path) -> Command {
    let mut command = Command::new(env!("CARGO"));
    command.current_dir(root);
    if std::env::var_os("CARGO_INCREMENTAL").is_none() {
        command.env("CARGO_INCREMENTAL", "0");
    }
    command
}

fn cargo(root: &Path, args: &[&str]) -> Result<()> {
    let status = cargo_command(root).args(args).status()?;
    ensure!(status.success(), "cargo {} failed", args.join(" "));
    Ok(())
}

/// A built test program.
#[derive(Debug)]
struct TestProgram {
    name: String,
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
/// features, name. See docs/crash-model.md and docs/commit-pipeline.md.
const OWN_BUILDS: [(&str, &str, &str); 2] =
    [("fjord-crash", "plant", "planted"), ("fjord-journal", "model,plant", "pipeline_model")];

/// Test programs of the engine, and which of their tests, that run again with the other scheduler
/// setting (`FJORD_SCHEDULER`; docs/ordering.md).
const OTHER_SCHEDULER: [(&str, &str); 5] = [
    ("fjord-journal: journal", ""),
    ("fjord: unit tests", ""),
    ("fjord: names", ""),
    ("fjord-testkit: engine_models", ""),
    ("fjord-cli: mounted", "kill_9_keeps_every_promise_on"),
];

/// The value of `FJORD_SCHEDULER` for them.
const OTHER: &str = "epoch";

/// The value of `FJORD_PIPELINE` for them (docs/commit-pipeline.md).
const OTHER_PIPELINE: &str = "dual";

fn run_tests(root: &Path, args: &TestArgs, env: &[(&str, &Path)], totals: &mut Totals) {
    let mut programs = Vec::new();
    totals.stage("build", |_| {
        programs = build_tests(root, &["--workspace"])?;
        Ok(())
    });
    let wanted =
        |name: &str| args.only.is_empty() || args.only.iter().any(|part| name.contains(part));
    for (package, features, test) in OWN_BUILDS {
        if wanted(&format!("{package}: {test}")) {
            totals.stage(&format!("build {package} with {features}"), |_| {
                let own = ["--package", package, "--features", features, "--test", test];
                programs.extend(build_tests(root, &own)?);
                Ok(())
            });
        }
    }
    for test in programs.iter().filter(|test| wanted(&test.name)) {
        totals.stage(&test.name, |totals| {
            let mut command = Command::new(&test.program);
            command.current_dir(&test.package_dir).envs(env.iter().copied());
            run_counted(&mut command, totals)
        });
    }
    for (name, tests) in OTHER_SCHEDULER.into_iter().filter(|(name, _)| wanted(name)) {
        totals.stage(
            &format!("{name} {tests} (scheduler={OTHER}, pipeline={OTHER_PIPELINE})"),
            |totals| {
                let test = programs.iter().find(|test| test.name == name);
                let test = test.with_context(|| format!("there is no test program {name:?}"))?;
                let mut command = Command::new(&test.program);
                command.current_dir(&test.package_dir).envs(env.iter().copied());
                command.env("FJORD_SCHEDULER", OTHER).env("FJORD_PIPELINE", OTHER_PIPELINE);
                run_counted(command.arg(tests), totals)
            },
        );
    }
    if args.only.is_empty() {
        totals.stage("documentation examples", |totals| {
            let mut command = cargo_command(root);
            command.args(["test", "--workspace", "--doc", "--quiet"]);
            run_counted(&mut command, totals)
        });
    }
}

/// Builds the tests that `which` names and lists their programs, bottom layer first, unit tests
/// before the others.
fn build_tests(root: &Path, which: &[&str]) -> Result<Vec<TestProgram>> {
    let mut child = cargo_command(root)
        .arg("test")
        .args(which)
        .args(["--no-run", "--quiet", "--message-format", "json"])
        .stdout(Stdio::piped())
        .spawn()?;
    let stdout = child.stdout.take().context("stdout is piped")?;
    let mut programs = Vec::new();
    for line in BufReader::new(stdout).lines() {
        let Ok(message) = serde_json::from_str::<serde_json::Value>(&line?) else { continue };
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
        let target = message["target"]["name"].as_str().unwrap_or_default();
        let layer = LAYERS.iter().position(|name| *name == package).unwrap_or(LAYERS.len());
        programs.push(TestProgram {
            name: format!("{package}: {}", if unit { "unit tests" } else { target }),
            program: program.into(),
            package_dir,
            rank: layer * 2 + usize::from(!unit),
        });
    }
    ensure!(child.wait()?.success(), "the tests do not build");
    programs.sort_by(|a, b| (a.rank, &a.name).cmp(&(b.rank, &b.name)));
    Ok(programs)
}

/// Runs a test program, shows its output, counts its tests and ends it at the limit.
fn run_counted(command: &mut Command, totals: &mut Totals) -> Result<()> {
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).process_group(0).spawn()?;
    let stdout = child.stdout.take().context("stdout is piped")?;
    let done = Arc::new(AtomicBool::new(false));
    let watch = watchdog(&child, done.clone())?;
    for line in BufReader::new(stdout).lines() {
        let line = line?;
        if !line.is_empty() {
            println!("{line}");
        }
        totals.count(&line);
    }
    let status = child.wait()?;
    done.store(true, Ordering::SeqCst);
    if watch.join().unwrap_or(false) {
        bail!("killed after {LIMIT:?}: it hung");
    }
    ensure!(status.success(), "ended with {status}");
    Ok(())
}

/// Ends the child's process group when it runs too long; the thread's value says whether it did.
fn watchdog(child: &Child, done: Arc<AtomicBool>) -> Result<std::thread::JoinHandle<bool>> {
    let pid = rustix::process::Pid::from_raw(i32::try_from(child.id())?).context("a process ID")?;
    Ok(std::thread::spawn(move || {
        let started = Instant::now();
        while !done.load(Ordering::SeqCst) {
            if started.elapsed() > LIMIT {
                let _ = rustix::process::kill_process_group(pid, rustix::process::Signal::KILL);
                return true;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        false
    }))
}

#[cfg(test)]
mod tests {
    use super::Totals;

    #[test]
    fn closing_lines_are_summed() {
        let mut totals = Totals::default();
        totals.count("test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 2 filtered out; finished in 0.1s");
        totals.count(
            "test result: FAILED. 1 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out",
        );
        totals.count("test some::name ... ok");
        assert_eq!((totals.passed, totals.failed, totals.skipped), (4, 2, 1));
    }

    #[test]
    fn a_stage_without_tests_counts_once() {
        let mut totals = Totals::default();
        totals.stage("good", |_| Ok(()));
        totals.stage("bad", |_| anyhow::bail!("no"));
        totals.stage("counted", |totals| {
            totals.count("test result: FAILED. 5 passed; 1 failed; 0 ignored");
            anyhow::bail!("status 101")
        });
        assert_eq!((totals.passed, totals.failed), (6, 2));
    }
}
