//! `cargo xtask check`: what a change needs before the next one.
//!
//! Format, lints, the tests of the crates that the change touches in their shortest form, those that
//! compare a page that it touches with the code, and a short selection of power cuts. What would take it beyond
//! [`TARGET`] it leaves out, and names. The rest of what it leaves out is in docs/testing.md.

use std::{
    collections::BTreeSet,
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use clap::Args;
use fjord_testkit::tools;

use crate::testing::{
    Run,
    budgets::{Budgets, known_times},
    cargo,
    pool::{Job, Turn},
    programs,
    run_limit::RunLimit,
};

/// What a check with a warm target may take.
const TARGET: Duration = Duration::from_secs(4 * 60);
/// Time for tests, however long the builds have taken.
const TESTS_MIN: Duration = Duration::from_secs(90);

/// Limit of a whole check, builds included.
const LIMIT: Duration = Duration::from_secs(20 * 60);

/// The crash explorer, and which of its test programs looks at a few workloads of each kind.
const CRASH: (&str, &str) = ("fjord-crash", "fjord-crash: quick");

/// Pages that a test compares with the code: page, folder of the package, program.
const READ_PAGES: [(&str, &str, &str); 3] = [
    ("docs/fast-commit-compatibility.md", "fjord", "fjord: modules"),
    ("docs/locking.md", "fjord-block", "fjord-block: lock_ranks"),
    ("docs/images.md", "fjord-cli", "fjord-cli: manual_pages"),
];

/// Arguments of `cargo xtask check`.
#[derive(Debug, Args)]
pub(crate) struct CheckArgs {
    /// What changed since this commit. If the files are those of HEAD: since its parent
    #[arg(long, value_name = "REV", default_value = "HEAD")]
    since: String,
    /// Also what takes the check beyond four minutes
    #[arg(long)]
    all: bool,
}

/// Runs the check.
pub(crate) fn run(args: &CheckArgs) -> Result<()> {
    let root = crate::workspace();
    let limit = RunLimit::start(LIMIT)?;
    let started = Instant::now();
    let files = changed_files(&root, &args.since)?;
    let packages = touched(&files);
    let pages = READ_PAGES.iter().filter(|(page, ..)| files.iter().any(|file| file == page));
    let pages: Vec<_> = pages.filter(|(_, package, _)| !packages.contains(*package)).collect();
    let mut run = Run::new(&root, "check")?;
    run.totals.prepare("format", || cargo(&root, &["fmt", "--all", "--check"]));
    if !packages.is_empty() || !pages.is_empty() {
        println!("crates: {}", packages.iter().cloned().collect::<Vec<_>>().join(", "));
        run.totals.prepare("lints", || {
            let lints =
                ["clippy", "--workspace", "--all-targets", "--quiet", "--", "-D", "warnings"];
            cargo(&root, &lints)
        });
        let mut built = Vec::new();
        run.totals.prepare("build", || {
            // The program that tests start.
            cargo(&root, &["build", "--package", "fjord-cli", "--quiet"])?;
            let names = packages.iter().map(String::as_str);
            let names = names.chain(pages.iter().map(|(_, package, _)| *package));
            let names = names.chain((!packages.is_empty()).then_some(CRASH.0));
            let names: BTreeSet<String> = names.map(cargo_name).collect();
            let which = names.iter().flat_map(|name| ["--package", name]).collect::<Vec<_>>();
            built = programs::build(&root, &which)?;
            Ok(())
        });
        let is_wanted = |program: &programs::TestProgram| {
            packages.contains(&program.package)
                || (program.name == CRASH.1 && !packages.is_empty())
                || pages.iter().any(|(.., name)| *name == program.name)
        };
        let jobs = built.iter().filter(|program| is_wanted(program)).map(|program| program.job(""));
        let first = |name: &str| {
            name == CRASH.1
                || pages.iter().any(|(.., page)| *page == name)
                || has_changed(name, &files)
        };
        let budgets = Budgets::load(&root)?;
        let known = known_times(&root);
        let cost = |job: &Job| {
            known.get(&job.program_name).copied().unwrap_or_else(|| budgets.of(&job.program_name))
        };
        let time = match args.all {
            true => Duration::MAX,
            false => TARGET.saturating_sub(started.elapsed()).max(TESTS_MIN),
        };
        let (jobs, left) = select(jobs.collect(), cost, first, time);
        run.pool(&jobs);
        if !left.is_empty() {
            let names: Vec<&str> = left.iter().map(|job| &*job.program_name).collect();
            println!("left out, since it takes longer (--all takes it too): {}", names.join("; "));
        }
        run.count_skipped();
    }
    drop(limit);
    let whole = started.elapsed().as_secs_f64();
    for stage in &run.totals.stages {
        println!("{:8.1} s  {}", stage.time.as_secs_f64(), stage.name);
    }
    println!("{whole:8.1} s  in all");
    run.end()
}

/// The programs that fit into `time`, the longest first, and those that do not: `first` ones always, then those that
/// take the least, so that as many as possible run.
fn select(
    mut jobs: Vec<Job>,
    cost: impl Fn(&Job) -> Duration,
    first: impl Fn(&str) -> bool,
    time: Duration,
) -> (Vec<Job>, Vec<Job>) {
    jobs.sort_by_key(|job| (!first(&job.program_name), cost(job)));
    // One that keeps all processors busy has them to itself; of others two take as long as one.
    let mut spent = Duration::ZERO;
    let fits = |job: &Job| {
        spent = spent.saturating_add(match job.turn {
            Turn::Busy => cost(job),
            Turn::Waits => cost(job) / 2,
        });
        first(&job.program_name) || spent <= time
    };
    let (mut fit, left): (Vec<Job>, Vec<Job>) = jobs.into_iter().partition(fits);
    fit.sort_by_key(|job| std::cmp::Reverse(cost(job)));
    (fit, left)
}

/// Whether the source of a test program is among `files`: `crates/fjord-cli/tests/killed.rs` is of
/// `fjord-cli: killed`.
fn has_changed(name: &str, files: &[String]) -> bool {
    let Some((package, program)) = name.split_once(": ") else { return false };
    let source = format!("crates/{package}/tests/{program}");
    files.iter().any(|file| {
        file.strip_prefix(&source).is_some_and(|rest| rest == ".rs" || rest.starts_with('/'))
    })
}

/// Files that differ from those of `since`, below `root`, those that git does not know yet included.
fn changed_files(root: &Path, since: &str) -> Result<Vec<String>> {
    let new = git(root, &["ls-files", "--others", "--exclude-standard"])?;
    let changed = |rev: &str| git(root, &["diff", "--name-only", "--no-renames", rev]);
    let mut files = changed(since)?;
    if files.is_empty() && new.is_empty() && since == "HEAD" {
        println!("nothing is changed since HEAD: what HEAD changed");
        files = changed("HEAD~1")?;
    }
    files.extend(new);
    Ok(files)
}

fn git(root: &Path, arguments: &[&str]) -> Result<Vec<String>> {
    let mut git = tools::command("git")?;
    let output =
        git.args(["-c", "core.quotePath=false"]).args(arguments).current_dir(root).output()?;
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "git {}: {}", arguments.join(" "), error.trim_end());
    let text = String::from_utf8(output.stdout).context("a file name that is not UTF-8")?;
    Ok(text.lines().map(str::to_owned).collect())
}

/// The folders of the packages to which `files` belong.
fn touched(files: &[String]) -> BTreeSet<String> {
    let package = |file: &String| {
        let mut parts = file.split('/');
        match parts.next()? {
            "crates" => parts.next().map(str::to_owned),
            "xtask" => Some("xtask".to_owned()),
            // Dependencies and profiles.
            "Cargo.toml" | "Cargo.lock" => Some("fjord-cli".to_owned()),
            _ => None,
        }
    };
    files.iter().filter_map(package).collect()
}

/// Name of the package in a folder.
fn cargo_name(folder: &str) -> String {
    if folder == "fjord" { "fjord-fs".to_owned() } else { folder.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crates_are_found_by_their_files() {
        let files = ["crates/fjord-journal/src/lib.rs", "docs/testing.md", "xtask/src/main.rs"];
        let found = touched(&files.map(str::to_owned));
        assert_eq!(found.into_iter().collect::<Vec<_>>(), ["fjord-journal", "xtask"]);
        assert!(touched(&["README.md".to_owned()]).is_empty());
    }

    fn job(name: &str, turn: Turn) -> Job {
        Job {
            name: name.to_owned(),
            program_name: name.to_owned(),
            program: "true".into(),
            arguments: Vec::new(),
            dir: "/".into(),
            env: Vec::new(),
            turn,
            limit: Duration::from_secs(1),
            is_careless: false,
        }
    }

    /// What has changed always runs, then what takes least; two that wait count as one.
    #[test]
    fn a_check_ends_in_time() {
        let cost = |job: &Job| Duration::from_secs(job.program_name.len() as u64 * 10);
        let jobs = || {
            let waits = ["a", "bb", "ccc", "dddd"].map(|name| job(name, Turn::Waits));
            waits.into_iter().chain([job("eeeee", Turn::Busy)]).collect::<Vec<Job>>()
        };
        let names = |jobs: &[Job]| -> Vec<String> {
            jobs.iter().map(|job| job.program_name.clone()).collect()
        };
        let (fit, left) = select(jobs(), cost, |_| false, Duration::from_secs(30));
        assert_eq!(
            (names(&fit), names(&left)),
            (vec!["ccc".into(), "bb".into(), "a".into()], vec!["dddd".into(), "eeeee".into()])
        );
        let (fit, left) = select(jobs(), cost, |name| name == "eeeee", Duration::from_secs(30));
        assert_eq!(names(&fit), ["eeeee"]);
        assert_eq!(left.len(), 4);
        let (fit, left) = select(jobs(), cost, |_| false, Duration::MAX);
        assert!(fit.len() == 5 && left.is_empty());
    }

    #[test]
    fn sources_of_programs_are_known() {
        let files = ["crates/fjord-cli/tests/killed.rs", "crates/fjord/tests/names/main.rs"];
        let files = files.map(str::to_owned);
        for (name, changed) in [
            ("fjord-cli: killed", true),
            ("fjord: names", true),
            ("fjord-cli: kill", false),
            ("fjord: unit tests", false),
        ] {
            assert_eq!(has_changed(name, &files), changed, "{name}");
        }
    }

    #[test]
    fn a_commit_that_does_not_exist_is_an_error() {
        let error = changed_files(&crate::workspace(), "no-such-commit").unwrap_err();
        assert!(format!("{error:#}").contains("no-such-commit"), "{error:#}");
    }
}
