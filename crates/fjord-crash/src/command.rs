//! The command line of the explorer, both ways.
//!
//! Owns [`CrashArgs`]: the arguments of `cargo xtask crash`, what they mean, and the line that a
//! finding prints. Invariant: parsing the text of arguments gives the same arguments, so that a
//! printed command is a command.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::{Args, Parser};
use fjord::{CommitPipeline, DataMode, FsyncPolicyKind, MountOptions, Scheduler};

use crate::base::{FAST_COMMIT, FEATURES, Features, GROUPS, GROWING, SPECIAL};
use crate::campaign::Plan;
use crate::explore::{Config, Replayer, Shared, Workload, explore, explore_recording};
use crate::finding::{CasePath, Damage, Target};
use crate::journal_how::{JOURNALS, JournalHow};
use crate::minimise::minimise;
use crate::ops;
use crate::record::DeviceKind;
use crate::recording::Recording;
use crate::report::Report;
use crate::states::Budget;
use crate::workloads::{FAMILIES, Family};

const DATA_MODES: [DataMode; 3] = [DataMode::Ordered, DataMode::Journal, DataMode::Writeback];
/// Those of a campaign that names none.
const PIPELINES: [CommitPipeline; 2] = [CommitPipeline::Serial, CommitPipeline::Dual];

/// Arguments of `cargo xtask crash`.
#[derive(Clone, Debug, PartialEq, Args)]
#[command(
    after_help = "By default every family runs under every configuration in turn; endless families \
                  (ace3, random, threads, overlaps, groups, fsyncs) run until --hours or --workloads ends \
                  them. A finding prints the command that repeats it. docs/crash-model.md \
                  describes the model."
)]
pub struct CrashArgs {
    /// Families of workloads (may be repeated): ace1, ace2, ace3, rename-to-sub, create-delete,
    /// barriers, edges, thousand-files, append-far, deep-leaf, ten-threads, random, threads,
    /// shared-dirs, overlaps, groups, fsyncs
    #[arg(long, value_name = "FAMILY")]
    pub workload: Vec<String>,
    /// These operations instead, such as 'create /a; append /a 4096; fsync /a'; `||` between
    /// those of several threads
    #[arg(long, conflicts_with = "workload")]
    pub ops: Option<String>,
    /// Operations that make the tree before --ops
    #[arg(long, requires = "ops", default_value = "")]
    pub setup: String,
    /// The recorded run in this file instead
    #[arg(long, value_name = "FILE", conflicts_with_all = ["workload", "ops"])]
    pub recording: Option<PathBuf>,
    /// Only this case of --ops or --recording
    #[arg(long)]
    pub case: Option<CasePath>,
    /// The case with this bit turned: BYTE:BIT
    #[arg(long, requires = "case")]
    pub damage: Option<Damage>,
    /// Feature sets of the image (may be repeated); leaves out families with images of their own
    #[arg(long, value_name = "SET")]
    pub features: Vec<String>,
    /// Data modes (may be repeated): ordered, journal, writeback
    #[arg(long, value_name = "MODE")]
    pub data: Vec<String>,
    /// Devices (may be repeated): volatile, barrier, nocache, nofua, objects
    #[arg(long, value_name = "KIND")]
    pub device: Vec<String>,
    /// Fsync policy: compound, group, fast-commit, ijournal
    #[arg(long, default_value = "compound")]
    pub policy: String,
    /// Areas for i-transactions (may be repeated); with policy ijournal 1 and 3 if not given
    #[arg(long, value_name = "COUNT")]
    pub areas: Vec<u32>,
    /// Leave flushes out, as `-o nobarrier` does: promises are lost then
    #[arg(long)]
    pub no_barrier: bool,
    /// Who keeps the order of writes: epoch, direct, auto
    #[arg(long, default_value = "auto")]
    pub scheduler: String,
    /// When a commit may follow another (may be repeated): serial, dual, auto; serial and dual if
    /// not given
    #[arg(long, value_name = "MODE")]
    pub pipeline: Vec<String>,
    /// How the journal works (may be repeated): locked or lockfree, dedicated or cooperative, and the most
    /// blocks of a descriptor if that is not as many as fit; all in turn if not given
    #[arg(long, value_name = "LISTS,IO[,BLOCKS]")]
    pub journal: Vec<String>,
    /// Discard freed blocks
    #[arg(long)]
    pub discard: bool,
    /// Where choices come from
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// End after this time, inside a workload if need be
    #[arg(long)]
    pub hours: Option<f64>,
    /// At most so many workloads
    #[arg(long)]
    pub workloads: Option<usize>,
    /// Take one workload in so many of each family
    #[arg(long, default_value_t = 1)]
    pub sample_every: usize,
    /// Every workload under every configuration, instead of one each in turn
    #[arg(long)]
    pub product: bool,
    /// Subsets of unflushed writes that each moment gives; of more than that can be, some that
    /// have each pair of writes in all four combinations are always among them
    #[arg(long, default_value_t = Budget::default().subsets_max)]
    pub subsets: usize,
    /// Torn images that each moment gives at the most
    #[arg(long, default_value_t = Budget::default().torn_max)]
    pub torn: usize,
    /// About so many images of a workload: of one that would give more few moments are taken, evenly
    /// and by seed. If not given, thousand-files has 4,000, each of edges 1,200, others all
    #[arg(long, value_name = "COUNT")]
    pub images: Option<usize>,
    /// Of the states, one in so many is cut inside its recovery too; 0 for none
    #[arg(long, default_value_t = 60)]
    pub inner_every: u64,
    /// Of the states, one in so many is recovered by e2fsck and Linux too; 0 for none
    #[arg(long, default_value_t = 400)]
    pub compare_every: u64,
    /// Of the states, one in so many also gets a wrong bit in its log; 0 for none
    #[arg(long, default_value_t = 100)]
    pub damage_every: u64,
    /// Of the states, one in so many is used after its recovery: files grow, a new one comes; 0 for
    /// none
    #[arg(long, default_value_t = 60)]
    pub use_every: u64,
    /// Threads
    #[arg(long, default_value_t = 2)]
    pub threads: usize,
    /// Stop at so many findings
    #[arg(long, default_value_t = 10)]
    pub findings: usize,
    /// Where runs of several threads that show something are kept
    #[arg(long, value_name = "DIR", default_value = "target/crash")]
    pub save: PathBuf,
}

/// What is said when a finding's recording cannot be written.
pub const NOT_SAVED: &str = "the run of this finding is not kept (--save)";
/// How every line begins.
const COMMAND: &str = "cargo xtask crash";

/// Arguments alone, for [`CrashArgs::parse_line`].
#[derive(Parser)]
#[command(name = COMMAND)]
struct Line {
    #[command(flatten)]
    args: CrashArgs,
}

impl Default for CrashArgs {
    fn default() -> CrashArgs {
        Line::parse_from([COMMAND]).args
    }
}

/// The words of a line; single quotes keep what is between them together.
fn words(line: &str) -> Vec<String> {
    let mut words = Vec::new();
    for (number, part) in line.split('\'').enumerate() {
        if number % 2 == 1 {
            words.push(part.to_owned());
        } else {
            words.extend(part.split_whitespace().map(str::to_owned));
        }
    }
    words
}

/// The options of a line that differ from the defaults.
struct Options(String);

impl Options {
    /// An option with a value. No value of ours has quotes in it.
    fn add(&mut self, name: &str, value: &dyn fmt::Display) {
        let value = value.to_string();
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:,+".contains(c);
        if !value.is_empty() && value.chars().all(plain) {
            self.0 += &format!(" --{name} {value}");
        } else {
            self.0 += &format!(" --{name} '{value}'");
        }
    }

    fn unless<T: fmt::Display + PartialEq>(&mut self, name: &str, value: &T, usual: &T) {
        if value != usual {
            self.add(name, value);
        }
    }

    fn list<T: fmt::Display>(&mut self, name: &str, values: impl IntoIterator<Item = T>) {
        values.into_iter().for_each(|value| self.add(name, &value));
    }

    fn flag(&mut self, name: &str, is_set: bool) {
        if is_set {
            self.0 += &format!(" --{name}");
        }
    }
}

impl fmt::Display for CrashArgs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let usual = CrashArgs::default();
        let mut line = Options(COMMAND.to_owned());
        line.list("workload", &self.workload);
        line.unless("policy", &self.policy, &usual.policy);
        line.list("features", &self.features);
        line.list("areas", &self.areas);
        line.list("data", &self.data);
        line.list("device", &self.device);
        line.flag("no-barrier", self.no_barrier);
        line.unless("scheduler", &self.scheduler, &usual.scheduler);
        line.list("pipeline", &self.pipeline);
        line.list("journal", &self.journal);
        line.flag("discard", self.discard);
        line.unless("seed", &self.seed, &usual.seed);
        line.list("hours", self.hours);
        line.list("workloads", self.workloads);
        line.unless("sample-every", &self.sample_every, &usual.sample_every);
        line.flag("product", self.product);
        line.unless("subsets", &self.subsets, &usual.subsets);
        line.unless("torn", &self.torn, &usual.torn);
        line.list("images", self.images);
        line.unless("inner-every", &self.inner_every, &usual.inner_every);
        line.unless("compare-every", &self.compare_every, &usual.compare_every);
        line.unless("damage-every", &self.damage_every, &usual.damage_every);
        line.unless("use-every", &self.use_every, &usual.use_every);
        line.unless("threads", &self.threads, &usual.threads);
        line.unless("findings", &self.findings, &usual.findings);
        line.unless("save", &self.save.display().to_string(), &usual.save.display().to_string());
        line.unless("setup", &self.setup, &usual.setup);
        line.list("ops", &self.ops);
        line.list("recording", self.recording.iter().map(|path| path.display()));
        line.list("case", &self.case);
        line.list("damage", self.damage);
        f.write_str(&line.0)
    }
}

/// The name of a data mode on the command line.
pub fn data_name(data: DataMode) -> &'static str {
    match data {
        DataMode::Ordered => "ordered",
        DataMode::Writeback => "writeback",
        DataMode::Journal => "journal",
    }
}

/// The name of a scheduler on the command line; of the one that the environment chooses, too.
pub(crate) fn scheduler_name(scheduler: Scheduler) -> String {
    match scheduler {
        Scheduler::Epoch => "epoch".to_owned(),
        Scheduler::Direct => "direct".to_owned(),
        Scheduler::Auto => std::env::var("FJORD_SCHEDULER").unwrap_or_else(|_| "auto".to_owned()),
    }
}

/// The name of a pipeline on the command line; of the one that the environment chooses, too.
pub(crate) fn pipeline_name(pipeline: CommitPipeline) -> String {
    match pipeline {
        CommitPipeline::Serial => "serial".to_owned(),
        CommitPipeline::Dual => "dual".to_owned(),
        CommitPipeline::Auto => {
            std::env::var("FJORD_PIPELINE").unwrap_or_else(|_| "auto".to_owned())
        }
    }
}

/// The values of a repeated option, or all there are.
fn choose<T: Clone>(
    what: &str,
    names: &[String],
    all: &[T],
    name_of: impl Fn(&T) -> &'static str,
) -> Result<Vec<T>> {
    if names.is_empty() {
        return Ok(all.to_vec());
    }
    let known = |wanted: &String| {
        let all_names: Vec<&str> = all.iter().map(&name_of).collect();
        let found = all.iter().find(|value| name_of(value) == wanted).cloned();
        found.with_context(|| format!("unknown {what} {wanted:?}; one of {}", all_names.join(", ")))
    };
    names.iter().map(known).collect()
}

impl CrashArgs {
    /// The arguments of a line such as a finding prints.
    ///
    /// # Errors
    /// It begins otherwise, or clap does not understand it.
    pub fn parse_line(line: &str) -> Result<CrashArgs> {
        let rest = line.strip_prefix(COMMAND).with_context(|| format!("no {COMMAND}: {line:?}"))?;
        let words = [COMMAND.to_owned()].into_iter().chain(words(rest));
        Ok(Line::try_parse_from(words)?.args)
    }

    /// What explores this run in the same way.
    pub fn of_run(config: &Config, workload: &Workload) -> CrashArgs {
        let threads: Vec<_> =
            [&workload.ops].into_iter().chain(&workload.others).cloned().collect();
        let options = &config.options;
        let is_usual = config.features.areas == 0 && options.fsync != FsyncPolicyKind::Ijournal;
        CrashArgs {
            policy: options.fsync.name().to_owned(),
            features: vec![config.features.name.to_owned()],
            data: vec![data_name(options.data).to_owned()],
            device: vec![config.device.name().to_owned()],
            areas: if is_usual { Vec::new() } else { vec![config.features.areas] },
            no_barrier: !options.barrier,
            scheduler: scheduler_name(options.scheduler),
            pipeline: vec![pipeline_name(options.pipeline)],
            journal: vec![JournalHow::of(options).name()],
            discard: options.discard,
            seed: config.seed,
            subsets: config.budget.subsets_max,
            torn: config.budget.torn_max,
            images: config.budget.images_max,
            inner_every: config.inner_every,
            compare_every: config.compare_every,
            damage_every: config.damage_every,
            use_every: config.use_every,
            setup: ops::format(&workload.setup),
            ops: Some(ops::format_threads(&threads)),
            ..CrashArgs::default()
        }
    }

    /// The judge of a recorded run.
    pub fn of_recording(path: PathBuf) -> CrashArgs {
        CrashArgs { recording: Some(path), ..CrashArgs::default() }
    }

    /// The requested campaign.
    ///
    /// # Errors
    /// A name is unknown, or an endless campaign has no end.
    pub fn plan(&self) -> Result<Plan> {
        let scheduler = Scheduler::by_name(&self.scheduler).with_context(|| {
            format!("unknown scheduler {:?}; epoch, direct, auto", self.scheduler)
        })?;
        let options = MountOptions {
            fsync: self.fsync_policy()?,
            scheduler,
            barrier: !self.no_barrier,
            discard: self.discard,
            ..MountOptions::default()
        };
        let mut config = Config::new(options);
        config.seed = self.seed;
        config.budget =
            Budget { subsets_max: self.subsets, torn_max: self.torn, images_max: self.images };
        (config.inner_every, config.compare_every) = (self.inner_every, self.compare_every);
        (config.damage_every, config.use_every) = (self.damage_every, self.use_every);
        let families = self.families()?;
        let deadline = self.deadline()?;
        ensure!(
            self.is_one_run()
                || deadline.is_some()
                || self.workloads.is_some()
                || !families.iter().any(|family| family.is_endless()),
            "ace3, random, threads, overlaps, groups and fsyncs never end: give --hours or --workloads, or \
             choose others with --workload"
        );
        Ok(Plan {
            features: self.feature_sets()?,
            data: choose("data mode", &self.data, &DATA_MODES, |mode| data_name(*mode))?,
            devices: choose("device", &self.device, &DeviceKind::ALL, |kind| kind.name())?,
            pipelines: self.pipelines()?,
            journals: self.journals()?,
            product: self.product,
            sample_every: self.sample_every,
            workloads_max: self.workloads,
            deadline,
            threads: self.threads,
            findings_max: self.findings,
            save: Some(self.save.clone()),
            ..Plan::new(&families, config)
        })
    }

    /// The families asked for. Without any, all; of these only such as take any image, if feature
    /// sets are asked for.
    fn families(&self) -> Result<Vec<Family>> {
        let mut families =
            choose("workload", &self.workload, &FAMILIES, |family: &Family| family.name())?;
        let has_own = |family: &Family| {
            family.workloads(self.seed).next().is_some_and(|workload| workload.features.is_some())
        };
        if !self.features.is_empty() && self.workload.is_empty() {
            families.retain(|family| !has_own(family));
        } else if let Some(family) = families.iter().find(|family| has_own(family))
            && !self.features.is_empty()
        {
            let name = family.name();
            bail!("the workloads of {name} have their own images; omit --features");
        }
        Ok(families)
    }

    fn deadline(&self) -> Result<Option<Instant>> {
        let Some(hours) = self.hours else { return Ok(None) };
        let time = Duration::try_from_secs_f64(hours * 3600.0);
        Ok(Some(
            Instant::now()
                + time.with_context(|| format!("--hours {hours} is not a valid time"))?,
        ))
    }

    fn fsync_policy(&self) -> Result<FsyncPolicyKind> {
        let wanted = std::slice::from_ref(&self.policy);
        let policies = choose("fsync policy", wanted, FsyncPolicyKind::ALL, |policy| policy.name());
        policies?.first().copied().context("a policy")
    }

    fn pipelines(&self) -> Result<Vec<CommitPipeline>> {
        if self.pipeline.is_empty() {
            return Ok(PIPELINES.to_vec());
        }
        let by_name = |name: &String| {
            CommitPipeline::by_name(name)
                .with_context(|| format!("unknown pipeline {name:?}; serial, dual, auto"))
        };
        self.pipeline.iter().map(by_name).collect()
    }

    fn journals(&self) -> Result<Vec<JournalHow>> {
        match self.journal.as_slice() {
            [] => Ok(JOURNALS.to_vec()),
            names => names.iter().map(|name| JournalHow::by_name(name)).collect(),
        }
    }

    /// The feature sets asked for; without any, those that the policy makes use of. [`SPECIAL`]
    /// ones only by name.
    fn feature_sets(&self) -> Result<Vec<Features>> {
        let all = FEATURES.into_iter().chain(GROUPS).chain(FAST_COMMIT).chain(SPECIAL);
        let all = all.chain(GROWING);
        let known: Vec<Features> = all.collect();
        let policy = self.fsync_policy()?;
        let sets = match (self.features.is_empty(), policy) {
            // Where there is one group, this policy commits everything.
            (true, FsyncPolicyKind::Group) => GROUPS.to_vec(),
            (true, FsyncPolicyKind::FastCommit) => FAST_COMMIT.to_vec(),
            (true, _) => FEATURES.to_vec(),
            (false, _) => choose("feature set", &self.features, &known, |set| set.name)?,
        };
        let areas = match (self.areas.as_slice(), policy) {
            ([], FsyncPolicyKind::Ijournal) => &[1, 3],
            ([], _) => &[0][..],
            (areas, _) => areas,
        };
        let with_areas = |set: Features| areas.iter().map(move |&areas| set.with_areas(areas));
        Ok(sets.into_iter().flat_map(with_areas).collect())
    }

    /// Whether one run is named, by its operations or by its recording.
    pub fn is_one_run(&self) -> bool {
        self.ops.is_some() || self.recording.is_some()
    }

    /// The configuration and the workload of one run: the first of all that is allowed.
    fn one_run(&self) -> Result<(Config, Workload)> {
        let plan = self.plan()?;
        let mut config = plan.config;
        config.features = *plan.features.first().context("a feature set")?;
        config.options.data = *plan.data.first().context("a data mode")?;
        config.device = *plan.devices.first().context("a device")?;
        config.options.pipeline = *plan.pipelines.first().context("a pipeline")?;
        plan.journals.first().context("a journal")?.apply(&mut config.options);
        config.findings_max = plan.findings_max;
        let threads = ops::parse_threads(self.ops.as_deref().unwrap_or_default())?;
        Ok((config, Workload::threads(ops::parse(&self.setup)?, threads)))
    }

    fn target(&self) -> Result<Option<Target>> {
        let Some(path) = self.case.clone() else { return Ok(None) };
        ensure!(self.is_one_run(), "--case needs a run: give --ops or --recording");
        Ok(Some(Target { path, damage: self.damage }))
    }

    /// Judges one run again, or one case of it; `say` is told when the case is sound now and all
    /// of the run is tried, and `shared` how far that is.
    ///
    /// # Errors
    /// The recording cannot be read, or the tools do not run.
    pub fn rerun(&self, shared: &Arc<Shared>, say: &dyn Fn(&str)) -> Result<Report> {
        if let Some(path) = &self.recording {
            return self.rejudge(path, shared, say);
        }
        let (config, workload) = self.one_run()?;
        if let Some(target) = self.target()? {
            let run = crate::recording::record(&config.of(&workload), &workload)?;
            let mut replayer = Replayer::new(&config, &workload, run.recording.into())?;
            match replayer.problem(&target) {
                Ok(Some(problem)) => return Ok(replayer.report(problem, target)),
                Ok(None) => say("this case passes now; trying all of the workload"),
                Err(error) => say(&format!("{error:#}; trying all of the workload")),
            }
        }
        let mut report = explore(&config, &workload, shared)?;
        report.findings.truncate(1);
        for finding in &mut report.findings {
            *finding = minimise(finding.clone())?;
            if let Err(error) = finding.save(&self.save) {
                say(&format!("{NOT_SAVED}: {error:#}\n"));
            }
        }
        Ok(report)
    }

    /// The same for a recorded run.
    fn rejudge(
        &self,
        path: &std::path::Path,
        shared: &Arc<Shared>,
        say: &dyn Fn(&str),
    ) -> Result<Report> {
        let (line, recording) = Recording::load(path)?;
        let (config, workload) = CrashArgs::parse_line(&line)?.one_run()?;
        let recording = Arc::new(recording);
        let here = |mut report: Report| {
            report.findings.iter_mut().for_each(|found| found.saved = Some(path.to_owned()));
            report
        };
        if let Some(target) = self.target()? {
            let mut replayer = Replayer::new(&config, &workload, recording.clone())?;
            if let Some(problem) = replayer.problem(&target)? {
                return Ok(here(replayer.report(problem, target)));
            }
            say("this case passes now; trying all of the recording");
        }
        explore_recording(&config, &workload, recording, shared, None).map(here)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_and_back() {
        let args = CrashArgs {
            ops: Some("create /a; fsync /a || mkdir /d".into()),
            setup: "create /b".into(),
            case: Some("17:3,5/0110+2:-".parse().unwrap()),
            damage: Some("4096:7".parse().unwrap()),
            policy: "ijournal".into(),
            features: vec!["block-1k".into()],
            areas: vec![0],
            data: vec!["journal".into()],
            device: vec!["barrier".into()],
            no_barrier: true,
            scheduler: "epoch".into(),
            pipeline: vec!["dual".into()],
            journal: vec!["locked,cooperative,5".into()],
            discard: true,
            seed: 7,
            hours: Some(0.5),
            workloads: Some(3),
            sample_every: 2,
            product: true,
            subsets: 5,
            torn: 0,
            images: Some(99),
            inner_every: 1,
            compare_every: 2,
            damage_every: 3,
            use_every: 4,
            threads: 1,
            findings: 4,
            save: "/tmp/a b".into(),
            workload: Vec::new(),
            recording: None,
        };
        assert_eq!(CrashArgs::parse_line(&args.to_string()).unwrap(), args);
        let args =
            CrashArgs { workload: vec!["ace1".into(), "threads".into()], ..CrashArgs::default() };
        assert_eq!(CrashArgs::parse_line(&args.to_string()).unwrap(), args);
        let args = CrashArgs::of_recording("/tmp/x.recording".into());
        assert_eq!(CrashArgs::parse_line(&args.to_string()).unwrap(), args);
        assert_eq!(CrashArgs::default().to_string(), COMMAND);
    }

    #[test]
    fn nonsense_is_refused() {
        for line in ["cargo xtask bench", "cargo xtask crash --case 1:-x", "cargo xtask crash --up"]
        {
            assert!(CrashArgs::parse_line(line).is_err(), "{line}");
        }
        let own = CrashArgs::parse_line("cargo xtask crash --workload edges --features block-1k");
        let error = own.unwrap().plan().unwrap_err().to_string();
        assert!(error.contains("their own images"), "{error}");
        let args = CrashArgs::parse_line("cargo xtask crash --case 1:- --workload ace1").unwrap();
        assert!(args.target().is_err());
    }
}
