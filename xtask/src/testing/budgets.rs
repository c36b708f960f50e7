//! Times of the stages of `cargo xtask test`: their budgets, their record, the table at the end.
//!
//! Owns `xtask/budgets.json` (budgets, in seconds) and `target/test-times.json` (the last
//! [`RUNS_MAX`] runs, newest last). Invariant: a stage over its budget is a warning, because a machine
//! may be slow or busy; what limits a run is [`super::run_limit`].

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, ensure};
use fjord_testkit::tools;
use serde_json::{Value, json};

use super::totals::Totals;

/// The budgets, below the workspace.
const BUDGETS: &str = "xtask/budgets.json";
/// The record, below the workspace.
const RECORD: &str = "target/test-times.json";
/// Runs that the record keeps.
const RUNS_MAX: usize = 100;
/// Stages in the table at the end, if all ended well and in time.
const SLOWEST: usize = 15;
/// Load average of a minute, up to which a machine is quiet.
const QUIET_LOAD_MAX: f64 = 1.0;

/// A stage that has ended.
#[derive(Clone, Debug)]
pub(crate) struct Stage {
    pub(crate) name: String,
    pub(crate) time: Duration,
    pub(crate) passed: bool,
    /// It runs tests; others prepare them.
    pub(crate) is_test: bool,
}

impl Stage {
    pub(super) fn new(name: &str, time: Duration, passed: bool, is_test: bool) -> Stage {
        Stage { name: name.to_owned(), time, passed, is_test }
    }
}

/// What stages may take.
#[derive(Debug)]
pub(crate) struct Budgets {
    stages: BTreeMap<String, Duration>,
    /// All stages that run tests, one after the other.
    tests: Duration,
}

impl Budgets {
    /// Those of the workspace at `root`.
    pub(crate) fn load(root: &Path) -> Result<Budgets> {
        let text = std::fs::read_to_string(root.join(BUDGETS)).context(BUDGETS)?;
        Budgets::parse(&text).context(BUDGETS)
    }

    fn parse(text: &str) -> Result<Budgets> {
        let file: Value = serde_json::from_str(text)?;
        let seconds = |value: &Value, name: &str| -> Result<Duration> {
            let seconds = value.as_u64().with_context(|| format!("{name}: no whole seconds"))?;
            ensure!(seconds > 0, "{name}: 0 seconds");
            Ok(Duration::from_secs(seconds))
        };
        let stages = file["stages"].as_object().context("no stages")?;
        let stages = stages.iter().map(|(name, value)| Ok((name.clone(), seconds(value, name)?)));
        Ok(Budgets {
            stages: stages.collect::<Result<_>>()?,
            tests: seconds(&file["tests"], "tests")?,
        })
    }

    /// Names of the stages that have one.
    #[cfg(test)]
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.stages.keys().map(String::as_str)
    }

    /// That of a stage; one without has none to keep.
    pub(crate) fn of(&self, name: &str) -> Duration {
        self.stages.get(name).copied().unwrap_or_default()
    }

    /// Takes more than twice what it may.
    fn is_over(&self, stage: &Stage) -> bool {
        self.stages.get(&stage.name).is_some_and(|budget| stage.time > *budget * 2)
    }

    /// The slowest stages beside their budgets, those that failed or took more than twice as long, and
    /// the whole run. On a machine that was busy before, times say nothing.
    pub(super) fn report(&self, totals: &Totals, record: &Record, whole: Duration) -> String {
        let stages = &totals.stages;
        let mut slowest: Vec<&Stage> = stages.iter().collect();
        slowest.sort_by_key(|stage| std::cmp::Reverse(stage.time));
        let mut text = "   seconds  budget  slowest stages\n".to_owned();
        let is_over = |stage: &Stage| record.was_quiet() && self.is_over(stage);
        for (index, stage) in slowest.iter().enumerate() {
            let (is_over, failed) = (is_over(stage), !stage.passed);
            if index >= SLOWEST && !is_over && !failed {
                continue;
            }
            let budget = self.stages.get(&stage.name);
            let budget = budget.map_or("none".to_owned(), |budget| budget.as_secs().to_string());
            let marks = [(is_over, "  OVER TWICE ITS BUDGET"), (failed, "  FAILED")];
            let marks: String = marks.iter().filter(|mark| mark.0).map(|mark| mark.1).collect();
            let seconds = stage.time.as_secs_f64();
            let _ = writeln!(text, "{seconds:10.1}  {budget:>6}  {}{marks}", stage.name);
        }
        let over: Vec<&str> =
            stages.iter().filter(|stage| is_over(stage)).map(|stage| &*stage.name).collect();
        if !over.is_empty() {
            let _ = writeln!(text, "warning: over twice their budget: {}", over.join("; "));
        }
        if !record.was_quiet() {
            text += "the machine was busy before the run: times are not compared with budgets\n";
        }
        let tests = totals.tests_time();
        let _ = writeln!(
            text,
            "tests one after the other: {}, of {}",
            minutes(tests),
            minutes(self.tests)
        );
        let _ = write!(text, "in all: {}", minutes(whole));
        text
    }
}

fn minutes(time: Duration) -> String {
    format!("{:.1} min", time.as_secs_f64() / 60.0)
}

/// The record of a run.
pub(super) struct Record {
    /// What is known before the first stage.
    begin: Value,
}

impl Record {
    /// Begins the record of a run of the stages that `only` names; of all if it is empty.
    pub(super) fn begin(root: &Path, only: &[String], long: bool) -> Record {
        let started = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let processors = std::thread::available_parallelism().map_or(0, usize::from);
        let begin = json!({
            "commit": commit(root), "only": only, "long": long, "started_unix_seconds": started.as_secs(),
            "processors": processors, "load_average_before": load_average(),
        });
        Record { begin }
    }

    /// Whether the machine had little to do in the minute before the run.
    fn was_quiet(&self) -> bool {
        self.begin["load_average_before"][0].as_f64().is_some_and(|load| load < QUIET_LOAD_MAX)
    }

    /// Adds the run to the file of the last runs.
    pub(super) fn save(self, root: &Path, totals: &Totals, whole: Duration) -> Result<()> {
        let Record { begin: mut run } = self;
        run["load_average_after"] = json!(load_average());
        run["seconds"] = json!(seconds(whole));
        run["tests_seconds"] = json!(seconds(totals.tests_time()));
        run["stages"] = stages_json(&totals.stages);
        let path = root.join(RECORD);
        let earlier = std::fs::read_to_string(&path).unwrap_or_default();
        let text = serde_json::to_string_pretty(&with_run(&earlier, run))?;
        std::fs::create_dir_all(root.join("target"))?;
        std::fs::write(&path, text).context(RECORD)
    }
}

/// The shortest time of each stage in the last runs; others on a busy machine took longer.
pub(crate) fn known_times(root: &Path) -> BTreeMap<String, Duration> {
    let text = std::fs::read_to_string(root.join(RECORD)).unwrap_or_default();
    let runs: Vec<Value> = serde_json::from_str(&text).unwrap_or_default();
    let mut known: BTreeMap<String, Duration> = BTreeMap::new();
    for (name, seconds) in runs.iter().filter_map(|run| run["stages"].as_object()).flatten() {
        let Some(time) = seconds.as_f64().and_then(|s| Duration::try_from_secs_f64(s).ok()) else {
            continue;
        };
        let known = known.entry(name.clone()).or_insert(time);
        *known = time.min(*known);
    }
    known
}

/// Runs of the file `earlier` and `run`. A file that cannot be read has none.
fn with_run(earlier: &str, run: Value) -> Vec<Value> {
    let mut runs: Vec<Value> = serde_json::from_str(earlier).unwrap_or_default();
    runs.push(run);
    runs.drain(..runs.len().saturating_sub(RUNS_MAX));
    runs
}

/// Seconds by name; programs of the same name count together.
fn stages_json(stages: &[Stage]) -> Value {
    let mut by_name: BTreeMap<&str, Duration> = BTreeMap::new();
    for stage in stages {
        *by_name.entry(&stage.name).or_default() += stage.time;
    }
    by_name.into_iter().map(|(name, time)| (name.to_owned(), json!(seconds(time)))).collect()
}

/// To a tenth of a second.
fn seconds(time: Duration) -> f64 {
    (time.as_secs_f64() * 10.0).round() / 10.0
}

/// The commit of the workspace, marked if something is changed; nothing outside of a repository.
fn commit(root: &Path) -> Option<String> {
    let mut git = tools::command("git").ok()?;
    let git = git.args(["describe", "--always", "--dirty", "--abbrev=40"]).current_dir(root);
    let said = tools::run(git).ok()?.ok().ok()?;
    Some(said.stdout.trim().to_owned())
}

/// The load averages of 1, 5 and 15 minutes; none if the kernel does not say.
fn load_average() -> Vec<f64> {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').take(3).filter_map(|word| word.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = r#"{"tests": 60, "stages": {"quick": 10, "slow": 40}}"#;

    fn stage(name: &str, seconds: u64) -> Stage {
        Stage::new(name, Duration::from_secs(seconds), true, true)
    }

    fn report(stages: &[Stage], load: f64) -> String {
        let record = Record { begin: json!({"load_average_before": [load]}) };
        let totals = Totals { stages: stages.to_owned(), ..Totals::default() };
        Budgets::parse(FILE).unwrap().report(&totals, &record, Duration::from_secs(90))
    }

    #[test]
    fn stages_over_twice_their_budget_are_named_on_a_quiet_machine() {
        let in_time = report(&[stage("quick", 20), stage("slow", 80)], 0.3);
        assert!(!in_time.contains("OVER") && !in_time.contains("warning"), "{in_time}");
        let late = report(&[stage("quick", 21), stage("slow", 81)], 0.3);
        assert!(late.contains("      81.0      40  slow  OVER TWICE ITS BUDGET\n"), "{late}");
        assert!(late.contains("warning: over twice their budget: quick; slow\n"), "{late}");
        assert!(late.ends_with("in all: 1.5 min"), "{late}");
        let busy = report(&[stage("quick", 21)], 4.0);
        assert!(!busy.contains("OVER") && busy.contains("busy"), "{busy}");
    }

    #[test]
    fn the_table_has_the_slowest_stages_and_all_that_failed() {
        let mut stages: Vec<Stage> =
            (0..20).map(|index| stage(&format!("stage {index}"), index)).collect();
        stages[0].passed = false;
        let report = report(&stages, 0.0);
        let named = |name: &str| report.contains(&format!("none  {name}"));
        assert!(named("stage 19\n") && named("stage 5\n") && !named("stage 4\n"), "{report}");
        assert!(named("stage 0  FAILED\n"), "{report}");
    }

    #[test]
    fn the_record_keeps_the_last_runs() {
        let mut text = "not JSON".to_owned();
        for run in 0..RUNS_MAX + 2 {
            text = serde_json::to_string(&with_run(&text, json!(run))).unwrap();
        }
        let runs: Vec<usize> = serde_json::from_str(&text).unwrap();
        assert_eq!((runs.len(), runs[0], runs[RUNS_MAX - 1]), (RUNS_MAX, 2, RUNS_MAX + 1));
    }

    #[test]
    fn a_run_is_recorded() {
        let root = tempfile::tempdir().unwrap();
        let record = Record::begin(root.path(), &["quick".to_owned()], false);
        let stages = vec![stage("quick", 2), stage("quick", 3), stage("slow", 1)];
        let totals = Totals { stages, ..Totals::default() };
        record.save(root.path(), &totals, Duration::from_secs(7)).unwrap();
        let text = std::fs::read_to_string(root.path().join(RECORD)).unwrap();
        assert_eq!(known_times(root.path())["quick"], Duration::from_secs(5));
        let runs: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(runs[0]["stages"], json!({"quick": 5.0, "slow": 1.0}));
        assert_eq!((&runs[0]["seconds"], &runs[0]["tests_seconds"]), (&json!(7.0), &json!(6.0)));
        assert_eq!(runs[0]["load_average_before"].as_array().unwrap().len(), 3);
    }

    #[test]
    fn budgets_are_positive() {
        assert!(Budgets::parse(&FILE.replace("10", "0")).is_err());
        assert!(Budgets::parse(r#"{"stages": {}}"#).is_err());
    }
}
