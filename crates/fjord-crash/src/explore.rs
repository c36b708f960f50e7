//! Exploring one workload: run, cut, recover, judge.
//!
//! Owns [`explore`], [`replay`], and the types of their arguments and results.
//!
//! Invariant: a state is counted once per workload, however many cuts may leave it.

use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt;
use std::ops::ControlFlow;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use fjord::{Fs, MountOptions, Scheduler};
use fjord_testkit::rng::Rng;
use parking_lot::Mutex;

use crate::base::{Base, Features, quiet};
use crate::check::{Kind, Problem, check};
use crate::image::Image;
use crate::judge::{Judge, JudgeStats, Recovered, differ};
use crate::model::Model;
use crate::ops::{self, Op};
use crate::record::{DeviceKind, Log, RecordingDevice};
use crate::run::Runner;
use crate::states::{self, Budget, Case, CrashState};
use crate::tree::Tree;

/// Operations on a prepared tree.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Workload {
    /// What makes the tree; not cut.
    pub setup: Vec<Op>,
    /// What is cut.
    pub ops: Vec<Op>,
    /// What other threads do meanwhile, each in a directory of its own; with them the engine's
    /// own threads run, too.
    pub others: Vec<Vec<Op>>,
    /// The only feature set that it fits, if not all do.
    pub features: Option<Features>,
}

impl Workload {
    /// A sequence for one thread, on any feature set.
    pub fn new(setup: Vec<Op>, ops: Vec<Op>) -> Workload {
        Workload { setup, ops, ..Workload::default() }
    }

    /// A workload of several threads, on any feature set.
    pub fn threads(setup: Vec<Op>, mut threads: Vec<Vec<Op>>) -> Workload {
        let ops = if threads.is_empty() { Vec::new() } else { threads.remove(0) };
        Workload { setup, ops, others: threads, features: None }
    }
}

/// How to explore.
#[derive(Clone, Debug)]
pub struct Config {
    /// The file system.
    pub features: Features,
    /// How it is mounted. Background threads are left out.
    pub options: MountOptions,
    /// The device.
    pub device: DeviceKind,
    /// How many images of each moment.
    pub budget: Budget,
    /// For what is random.
    pub seed: u64,
    /// Of the distinct states, one in so many is also cut inside its recovery; 0 for none.
    pub inner_every: u64,
    /// Of the distinct states, one in so many is also recovered by e2fsck and Linux; 0 for none.
    pub compare_every: u64,
    /// Of the distinct states, one in so many also gets a wrong bit in its log; 0 for none.
    pub damage_every: u64,
    /// Stop after so many findings.
    pub findings_max: usize,
}

impl Config {
    /// Default features and options on a volatile device.
    pub fn new(options: MountOptions) -> Config {
        Config {
            features: crate::base::FEATURES[0],
            options,
            device: DeviceKind::Volatile,
            budget: Budget::default(),
            seed: 1,
            inner_every: 16,
            compare_every: 0,
            damage_every: 16,
            findings_max: 1,
        }
    }
}

impl Config {
    /// The configuration that a workload really gets.
    fn of(&self, workload: &Workload) -> Config {
        let areas = self.features.areas;
        let features = workload.features.unwrap_or(self.features).with_areas(areas);
        Config { features, ..self.clone() }
    }
}

/// A case, and inside the recovery from it perhaps another, and so on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CasePath(pub Vec<Case>);

impl fmt::Display for CasePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts: Vec<_> = self.0.iter().map(Case::to_string).collect();
        f.write_str(&parts.join("+"))
    }
}

impl std::str::FromStr for CasePath {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<CasePath> {
        Ok(CasePath(text.split('+').map(str::parse).collect::<Result<_>>()?))
    }
}

/// Something that must not be.
#[derive(Clone, Debug)]
pub struct Finding {
    /// What.
    pub problem: Problem,
    /// Which image; `None` when the run itself failed.
    pub case: Option<CasePath>,
    /// The workload.
    pub workload: Workload,
    /// The feature set.
    pub features: Features,
    /// The device.
    pub device: DeviceKind,
    /// The mount options.
    pub options: MountOptions,
}

impl Finding {
    /// The command that shows it again.
    pub fn rerun(&self) -> String {
        let mut line = format!(
            "cargo xtask crash --policy {} --features {} --data {} --device {}",
            self.options.fsync.name(),
            self.features.name,
            data_name(self.options.data),
            self.device.name()
        );
        if self.features.areas > 0 {
            line += &format!(" --areas {}", self.features.areas);
        }
        if !self.options.barrier {
            line += " --no-barrier";
        }
        match self.options.scheduler {
            Scheduler::Auto => {}
            Scheduler::Epoch => line += " --scheduler epoch",
            Scheduler::Direct => line += " --scheduler direct",
        }
        if self.options.discard {
            line += " --discard";
        }
        if !self.workload.setup.is_empty() {
            line += &format!(" --setup '{}'", ops::format(&self.workload.setup));
        }
        let threads: Vec<_> =
            [&self.workload.ops].into_iter().chain(&self.workload.others).cloned().collect();
        line += &format!(" --ops '{}'", ops::format_threads(&threads));
        if let Some(case) = &self.case {
            line += &format!(" --case '{case}'");
        }
        line
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}\n  rerun: {}", self.problem, self.rerun())
    }
}

/// The name of a data mode on the command line.
pub fn data_name(data: fjord::DataMode) -> &'static str {
    match data {
        fjord::DataMode::Ordered => "ordered",
        fjord::DataMode::Writeback => "writeback",
        fjord::DataMode::Journal => "journal",
    }
}

/// What an exploration did.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Workloads.
    pub workloads: u64,
    /// Operations that the engine refused.
    pub refused: u64,
    /// fsync and fdatasync calls that the policy served by itself.
    pub by_policy: u64,
    /// Those that fell back to a commit of everything.
    pub fallbacks: u64,
    /// Commits of parts of a transaction (policy `group`).
    pub partial_commits: u64,
    /// Requests recorded.
    pub requests: u64,
    /// Images built, equal ones too.
    pub cases: u64,
    /// Distinct images of the workloads' cuts.
    pub states: u64,
    /// Distinct images of cuts inside recovery.
    pub inner_states: u64,
    /// Recoveries, e2fsck runs, comparisons.
    pub judged: JudgeStats,
    /// What was found.
    pub findings: Vec<Finding>,
}

impl Report {
    fn of(ran: Ran) -> Report {
        Report {
            workloads: 1,
            refused: ran.refused,
            by_policy: ran.by_policy,
            fallbacks: ran.fallbacks,
            partial_commits: ran.partial_commits,
            ..Report::default()
        }
    }

    /// Adds another.
    pub fn add(&mut self, other: Report) {
        self.workloads += other.workloads;
        self.refused += other.refused;
        self.by_policy += other.by_policy;
        self.fallbacks += other.fallbacks;
        self.partial_commits += other.partial_commits;
        self.requests += other.requests;
        self.cases += other.cases;
        self.states += other.states;
        self.inner_states += other.inner_states;
        self.judged.recoveries += other.judged.recoveries;
        self.judged.fscks += other.judged.fscks;
        self.judged.compared += other.judged.compared;
        self.judged.torn_commits += other.judged.torn_commits;
        self.judged.stale_areas += other.judged.stale_areas;
        self.judged.fast_commits += other.judged.fast_commits;
        self.judged.torn_superblocks += other.judged.torn_superblocks;
        self.judged.marked += other.judged.marked;
        self.judged.damaged += other.judged.damaged;
        self.judged.refused += other.judged.refused;
        self.findings.extend(other.findings);
    }

    /// All states that were tried.
    pub fn all_states(&self) -> u64 {
        self.states + self.inner_states
    }
}

/// What e2fsck has passed already; share one between explorations.
pub type Passed = Arc<Mutex<HashSet<u64>>>;

/// A workload that was run.
struct Recorded {
    log: Log,
    model: Model,
    ran: Ran,
    failed: Option<Problem>,
}

/// What the engine says of a run.
#[derive(Clone, Copy, Debug, Default)]
struct Ran {
    refused: u64,
    by_policy: u64,
    fallbacks: u64,
    partial_commits: u64,
}

/// Intervals of the engine's own threads in runs that have them.
const BACKGROUND_INTERVAL: Duration = Duration::from_millis(25);

fn record(config: &Config, base: &Base, workload: &Workload) -> Result<Recorded> {
    let threaded = !workload.others.is_empty();
    let image = base.image.clone();
    let device = Arc::new(if threaded {
        RecordingDevice::recording_threads(image, config.device)
    } else {
        RecordingDevice::recording(image, config.device)
    });
    let options = MountOptions {
        background_threads: threaded,
        commit_interval: BACKGROUND_INTERVAL,
        writeback_interval: BACKGROUND_INTERVAL,
        ..quiet(&config.options)
    };
    let model = Mutex::new(base.model.clone());
    let run = || run(&device, &options, &model, workload);
    let ran = std::panic::catch_unwind(AssertUnwindSafe(run));
    let ran = ran.unwrap_or_else(|_| Err(anyhow::anyhow!("the engine panicked")));
    let log = device.take_log(base.image.clone());
    let failed = ran.as_ref().err().map(|e| Problem::new(Kind::EngineFailed, format!("{e:#}")));
    Ok(Recorded { log, model: model.into_inner(), ran: ran.unwrap_or_default(), failed })
}

/// Mounts, runs all threads to their end, unmounts (a promise for everything).
fn run(
    device: &Arc<RecordingDevice>,
    options: &MountOptions,
    model: &Mutex<Model>,
    workload: &Workload,
) -> Result<Ran> {
    let fs = Fs::open_device(device.clone(), options)?;
    let one = |ops: &[Op]| -> Result<u64> {
        let stamp = || device.stamp();
        let mut runner = Runner::new(&fs, model, &stamp);
        let mut refused = 0;
        for op in ops {
            refused += u64::from(!runner.step(op)?);
        }
        Ok(refused)
    };
    let refused = std::thread::scope(|scope| -> Result<u64> {
        let others: Vec<_> = workload.others.iter().map(|ops| scope.spawn(|| one(ops))).collect();
        let mut refused = one(&workload.ops)?;
        for other in others {
            refused += other.join().unwrap_or_else(|_| bail!("the engine panicked"))?;
        }
        Ok(refused)
    })?;
    fs.unmount().context("unmount")?;
    let stamp = device.stamp();
    model.lock().promise(stamp, &Op::Sync);
    let stats = fs.stats();
    Ok(Ran {
        refused,
        by_policy: stats.fsync.policy,
        fallbacks: stats.fsync.fallbacks.iter().map(|(_, count)| count).sum(),
        partial_commits: stats.journal.partial_commits,
    })
}

/// Explores a workload.
///
/// # Errors
/// The tools do not run, or the base cannot be made. What the engine does wrong is a finding.
pub fn explore(config: &Config, workload: &Workload, passed: &Passed) -> Result<Report> {
    let config = &config.of(workload);
    let base = Base::get(config.features, &workload.setup)?;
    let recorded = record(config, &base, workload)?;
    let size = base.image.size_bytes();
    let judge =
        Judge::new(&config.options, &base.log_extents, &base.dead_extents, size, passed.clone())?;
    let subject = Subject { config, workload, model: &recorded.model, base: &base.image };
    let mut explorer = Explorer::new(subject, judge, Report::of(recorded.ran));
    explorer.report.requests = recorded.log.entries.len() as u64;
    if let Some(problem) = recorded.failed {
        explorer.found(problem, None);
        return Ok(explorer.report);
    }
    let mut outcome = Ok(());
    let (device, budget) = (config.device, &config.budget);
    states::enumerate(&recorded.log, device, budget, config.seed, 0, &mut |state| {
        outcome = explorer.visit(state);
        let enough = explorer.report.findings.len() >= config.findings_max;
        if outcome.is_err() || enough { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    outcome?;
    explorer.report.judged = explorer.judge.stats;
    Ok(explorer.report)
}

/// Trees that are kept for images that come again, as most do soon or never.
const RECENT_MAX: usize = 32;

/// What is explored.
struct Subject<'a> {
    config: &'a Config,
    workload: &'a Workload,
    model: &'a Model,
    base: &'a Image,
}

struct Explorer<'a> {
    config: &'a Config,
    workload: &'a Workload,
    model: &'a Model,
    base: &'a Image,
    judge: Judge,
    /// The last cuts that each image, by its hash, was compared with the model for.
    known: HashMap<u64, Vec<u64>>,
    /// The trees of the newest images, by hash.
    recent: VecDeque<(u64, Tree)>,
    /// Decides which states get the dearer checks: of the seed, the configuration, the operations.
    lot: u64,
    report: Report,
}

fn lot(config: &Config, workload: &Workload) -> u64 {
    let options = &config.options;
    let names = [config.features.name, data_name(options.data), config.device.name()];
    let text = format!("{names:?} {} {}", options.fsync.name(), ops::format(&workload.ops));
    xxhash_rust::xxh3::xxh3_64_with_seed(text.as_bytes(), config.seed)
}

impl<'a> Explorer<'a> {
    fn new(subject: Subject<'a>, judge: Judge, report: Report) -> Explorer<'a> {
        let Subject { config, workload, model, base } = subject;
        Explorer {
            config,
            workload,
            model,
            base,
            judge,
            known: HashMap::new(),
            recent: VecDeque::new(),
            lot: lot(config, workload),
            report,
        }
    }

    fn found(&mut self, problem: Problem, case: Option<CasePath>) {
        self.report.findings.push(Finding {
            problem,
            case,
            workload: self.workload.clone(),
            features: self.config.features,
            device: self.config.device,
            options: self.config.options.clone(),
        });
    }

    fn visit(&mut self, state: CrashState) -> Result<()> {
        self.report.cases += 1;
        let hash = state.image.hash();
        let case = || CasePath(vec![state.case.clone()]);
        if let Some(last_cuts) = self.known.get_mut(&hash) {
            // Its first cut came first; a later last cut has more promises.
            if !last_cuts.contains(&state.last_cut) {
                last_cuts.push(state.last_cut);
                if let Err(problem) = self.judge_again(hash, &state) {
                    self.found(problem, Some(case()));
                }
            }
            return Ok(());
        }
        self.report.states += 1;
        // By lot, not by count: most workloads have fewer states than one in so many.
        let mut lot = Rng::new(self.lot ^ self.report.states);
        let mut one_in = |n: u64| n != 0 && lot.below(n) == 0;
        let (inner, compare) = (one_in(self.config.inner_every), one_in(self.config.compare_every));
        let damage = one_in(self.config.damage_every);
        match self.judge_state(&state.image, &state.cuts(), inner)? {
            Err(problem) => self.found(problem, Some(case())),
            Ok(recovered) => {
                if compare
                    && let Err(problem) = self.judge.compare(&state.image, &recovered.tree)?
                {
                    self.found(problem, Some(case()));
                }
                if damage
                    && let Err(problem) =
                        self.judge.damaged(&state.image, self.base, &recovered, &mut lot)?
                {
                    self.found(problem, Some(case()));
                }
                if inner {
                    self.inside(&state, &recovered)?;
                }
                self.known.insert(hash, vec![state.last_cut]);
                self.recent.truncate(RECENT_MAX - 1);
                self.recent.push_front((hash, recovered.tree));
            }
        }
        Ok(())
    }

    /// An image that was judged before is compared with the model for another last cut.
    fn judge_again(&mut self, hash: u64, state: &CrashState) -> Result<(), Problem> {
        let recovered;
        let tree = match self.recent.iter().find(|recent| recent.0 == hash) {
            Some(recent) => &recent.1,
            None => {
                recovered = self.judge.recover(&state.image, false)?;
                &recovered.tree
            }
        };
        check(tree, self.model, state.last_cut, self.config.options.data)
    }

    fn judge_state(
        &mut self,
        image: &Image,
        cuts: &[u64],
        record: bool,
    ) -> Result<Result<Recovered, Problem>> {
        let recovered = match self.judge.recover(image, record) {
            Ok(recovered) => recovered,
            Err(problem) => return Ok(Err(problem)),
        };
        for &cut in cuts {
            let judged = check(&recovered.tree, self.model, cut, self.config.options.data);
            if let Err(problem) = judged {
                return Ok(Err(problem));
            }
        }
        Ok(self.judge.sound(&recovered)?.map(|_| recovered))
    }

    /// Cuts inside the recovery of a state, and inside the recovery of some of these.
    fn inside(&mut self, outer: &CrashState, expected: &Recovered) -> Result<()> {
        let mut rng = Rng::new(self.config.seed ^ outer.case.after);
        let mut queue = vec![(expected.log.clone(), CasePath(vec![outer.case.clone()]))];
        let mut seen = HashSet::new();
        let mut second = false;
        while let Some((log, path)) = queue.pop() {
            let Some(log) = log else { continue };
            for state in inner_states(&log, self.config.seed) {
                if !seen.insert(state.image.hash()) {
                    continue;
                }
                self.report.inner_states += 1;
                let deeper = !second && path.0.len() == 1 && rng.percent(10);
                let mut path = path.clone();
                path.0.push(state.case);
                match self.judge_inner(&state.image, expected, deeper)? {
                    Err(problem) => {
                        self.found(problem, Some(path));
                        return Ok(());
                    }
                    Ok(again) if deeper => {
                        second = true;
                        queue.push((again.log, path));
                    }
                    Ok(_) => {}
                }
            }
        }
        Ok(())
    }

    fn judge_inner(
        &mut self,
        image: &Image,
        expected: &Recovered,
        record: bool,
    ) -> Result<Result<Recovered, Problem>> {
        let again = match self.judge.recover(image, record) {
            Ok(again) => again,
            Err(problem) => return Ok(Err(problem)),
        };
        if again.tree != expected.tree {
            let text = differ(&expected.tree, &again.tree);
            let text = format!("after a cut inside recovery (undisturbed, disturbed): {text}");
            return Ok(Err(Problem::new(Kind::NotIdempotent, text)));
        }
        Ok(self.judge.sound(&again)?.map(|_| again))
    }
}

/// States of cuts inside a recovery: fewer of each moment than for the workload itself.
fn inner_states(log: &Log, seed: u64) -> Vec<CrashState> {
    let budget = Budget { subsets_max: 4, torn_max: 1 };
    let mut list = Vec::new();
    states::enumerate(log, DeviceKind::Volatile, &budget, seed, 0, &mut |state| {
        list.push(state);
        ControlFlow::Continue(())
    });
    list
}

/// Judges one case of a workload again, with all checks.
///
/// # Errors
/// As [`explore`]; the case is not one of this workload.
pub fn replay(config: &Config, workload: &Workload, path: &CasePath) -> Result<Report> {
    let config = &config.of(workload);
    let base = Base::get(config.features, &workload.setup)?;
    let recorded = record(config, &base, workload)?;
    let size = base.image.size_bytes();
    let judge = Judge::new(
        &config.options,
        &base.log_extents,
        &base.dead_extents,
        size,
        Passed::default(),
    )?;
    let report = Report { workloads: 1, states: 1, cases: 1, ..Report::default() };
    let subject = Subject { config, workload, model: &recorded.model, base: &base.image };
    let mut explorer = Explorer::new(subject, judge, report);
    let Some((first, inner)) = path.0.split_first() else { bail!("no case is named") };
    let unknown = |case: &Case| format!("{case} is no case of this workload");
    let state = states::find(&recorded.log, config.device, first);
    let state = state.with_context(|| unknown(first))?;
    let mut judged = explorer.judge_state(&state.image, &state.cuts(), true)?;
    if inner.is_empty()
        && let Ok(recovered) = &judged
        && let Err(problem) = explorer.judge.compare(&state.image, &recovered.tree)?
    {
        judged = Err(problem);
    }
    let mut log = judged.as_ref().ok().and_then(|recovered| recovered.log.clone());
    let expected = judged;
    let mut problem = expected.as_ref().err().cloned();
    for case in inner {
        let (Ok(expected), None, Some(inside)) = (&expected, &problem, log.take()) else { break };
        explorer.report.inner_states += 1;
        let state = states::find(&inside, DeviceKind::Volatile, case);
        let state = state.with_context(|| unknown(case))?;
        match explorer.judge_inner(&state.image, expected, true)? {
            Ok(again) => log = again.log,
            Err(found) => problem = Some(found),
        }
    }
    problem.into_iter().for_each(|problem| explorer.found(problem, Some(path.clone())));
    explorer.report.judged = explorer.judge.stats;
    Ok(explorer.report)
}
