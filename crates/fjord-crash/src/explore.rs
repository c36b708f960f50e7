//! Exploring one workload: run, cut, recover, judge.
//!
//! Owns [`explore`], [`Replayer`], and the types of their arguments.
//!
//! Invariant: a state is counted once per workload, however many cuts may leave it.

use std::collections::{HashMap, HashSet, VecDeque};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use fjord::{DataMode, FsyncPolicyKind, MountOptions};
use fjord_testkit::rng::Rng;
use parking_lot::Mutex;

use crate::base::Features;
use crate::check::{Kind, Problem, Rules, check};
use crate::command::{data_name, pipeline_name, scheduler_name};
use crate::finding::{CasePath, Damage, Finding, Target};
use crate::image::Image;
use crate::judge::{Judge, Recovered, differ};
use crate::moment;
use crate::ops::{self, Op};
use crate::record::{DeviceKind, Log};
use crate::recording::{Recording, Run, record};
use crate::report::Report;
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
    /// About so many images of it, if all would be too many ([`Budget::images_max`]).
    pub images_max: Option<usize>,
}

impl Workload {
    /// A sequence for one thread, on any feature set.
    pub fn new(setup: Vec<Op>, ops: Vec<Op>) -> Workload {
        Workload { setup, ops, ..Workload::default() }
    }

    /// A workload of several threads, on any feature set.
    pub fn threads(setup: Vec<Op>, mut threads: Vec<Vec<Op>>) -> Workload {
        let ops = if threads.is_empty() { Vec::new() } else { threads.remove(0) };
        Workload { setup, ops, others: threads, ..Workload::default() }
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
    /// Of the distinct states, one in so many is used after its recovery; 0 for none.
    pub use_every: u64,
    /// Stop after so many findings.
    pub findings_max: usize,
}

impl Config {
    /// Default features on a volatile device. `Auto` means compound here: the caller chooses the
    /// policy explicitly.
    pub fn new(mut options: MountOptions) -> Config {
        if options.fsync == FsyncPolicyKind::Auto {
            options.fsync = FsyncPolicyKind::Compound;
        }
        Config {
            features: crate::base::FEATURES[0],
            options,
            device: DeviceKind::Volatile,
            budget: Budget::default(),
            seed: 1,
            inner_every: 16,
            compare_every: 0,
            damage_every: 16,
            use_every: 16,
            findings_max: 1,
        }
    }
}

impl Config {
    /// The configuration that a workload really gets.
    pub fn of(&self, workload: &Workload) -> Config {
        let areas = self.features.areas;
        let wanted = workload.features.map(|set| set.under(self.options.fsync));
        let features = wanted.unwrap_or(self.features).with_areas(areas);
        let images_max = self.budget.images_max.or(workload.images_max);
        Config { features, budget: Budget { images_max, ..self.budget }, ..self.clone() }
    }
}

/// State shared by explorations: images that e2fsck has passed, and progress counters.
#[derive(Debug, Default)]
pub struct Shared {
    /// Canonical hashes of images that e2fsck has passed; a leaf lock.
    pub(crate) passed: Mutex<HashSet<u64>>,
    /// Distinct images tried so far, those of cuts inside recovery among them.
    pub states: AtomicU64,
    /// Findings so far, those among them that are being made small.
    pub findings: AtomicU64,
    /// Somebody wants it to end: what was tried counts, what goes wrong from here on does not, for
    /// tools may have been told to end, too.
    pub stop: Arc<AtomicBool>,
}

impl Shared {
    pub(crate) fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

/// Explores a workload.
///
/// # Errors
/// The tools do not run, or the base cannot be made. What the engine does wrong is a finding.
pub fn explore(config: &Config, workload: &Workload, shared: &Arc<Shared>) -> Result<Report> {
    explore_until(config, workload, shared, None)
}

/// As [`explore`], with a deadline: later cases are skipped.
pub(crate) fn explore_until(
    config: &Config,
    workload: &Workload,
    shared: &Arc<Shared>,
    deadline: Option<Instant>,
) -> Result<Report> {
    let config = config.of(workload);
    let Run { recording, ran, failed } = record(&config, workload)?;
    let recording = Arc::new(recording);
    let mut report = Report { requests: recording.log.entries.len() as u64, ..Report::of(ran) };
    match failed {
        Some(problem) => {
            shared.findings.fetch_add(1, Ordering::Relaxed);
            report.findings.push(Finding {
                problem,
                target: None,
                workload: workload.clone(),
                config,
                recording,
                saved: None,
            });
        }
        None => {
            report.add(explore_recording(&config, workload, recording, shared, deadline)?);
            report.cover(&config);
        }
    }
    Ok(report)
}

/// Explores a run that was recorded; up to a moment, if one is given.
///
/// # Errors
/// The tools do not run.
pub fn explore_recording(
    config: &Config,
    workload: &Workload,
    recording: Arc<Recording>,
    shared: &Arc<Shared>,
    deadline: Option<Instant>,
) -> Result<Report> {
    let config = &config.of(workload);
    let log = &recording.log;
    let mut explorer = Explorer::new(config, workload, recording.clone(), shared.clone())?;
    let mut outcome = Ok(());
    let late = || deadline.is_some_and(|deadline| Instant::now() >= deadline);
    let walked =
        states::enumerate(log, config.device, &config.budget, config.seed, 0, &mut |state| {
            outcome = explorer.visit(state);
            let enough = explorer.report.findings.len() >= config.findings_max;
            if outcome.is_err() || enough || late() || shared.is_stopped() {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        });
    if !shared.is_stopped() {
        outcome?;
    }
    explorer.report.walked = walked;
    Ok(explorer.into_report())
}

/// Trees that are kept for images that come again, as most do soon or never.
const RECENT_MAX: usize = 32;

struct Explorer {
    config: Config,
    workload: Workload,
    recording: Arc<Recording>,
    judge: Judge,
    shared: Arc<Shared>,
    /// The moments at which what is admissible changes, in order.
    stamps: Vec<u64>,
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
    let how = [pipeline_name(options.pipeline), scheduler_name(options.scheduler)];
    let policy = options.fsync.name();
    let text = format!("{names:?} {how:?} {policy} {}", ops::format(&workload.ops));
    xxhash_rust::xxh3::xxh3_64_with_seed(text.as_bytes(), config.seed)
}

impl Explorer {
    fn new(
        config: &Config,
        workload: &Workload,
        recording: Arc<Recording>,
        shared: Arc<Shared>,
    ) -> Result<Explorer> {
        let size = recording.log.base.size_bytes();
        let (log, dead) = (&recording.log_extents, &recording.dead_extents);
        Ok(Explorer {
            judge: Judge::new(config.features, &config.options, log, dead, size, shared.clone())?,
            shared,
            stamps: recording.model.stamps(),
            config: config.clone(),
            workload: workload.clone(),
            recording,
            known: HashMap::new(),
            recent: VecDeque::new(),
            lot: lot(config, workload),
            report: Report::default(),
        })
    }

    fn into_report(self) -> Report {
        Report { judged: self.judge.stats, ..self.report }
    }

    fn finding(&self, problem: Problem, target: Target) -> Finding {
        Finding {
            problem,
            target: Some(target),
            workload: self.workload.clone(),
            config: self.config.clone(),
            recording: self.recording.clone(),
            saved: None,
        }
    }

    fn found(&mut self, problem: Problem, path: CasePath, damage: Option<Damage>) {
        if self.shared.is_stopped() {
            return;
        }
        self.shared.findings.fetch_add(1, Ordering::Relaxed);
        let finding = self.finding(problem, Target { path, damage });
        self.report.findings.push(finding);
    }

    fn visit(&mut self, state: CrashState) -> Result<()> {
        self.report.cases += 1;
        let hash = state.image.hash();
        let case = || CasePath(vec![state.case.clone()]);
        if let Some(last_cuts) = self.known.get_mut(&hash) {
            // Its first cut came first; a later last cut has more promises.
            let (stamps, cut) = (&self.stamps, state.last_cut);
            if !last_cuts.iter().any(|known| admit_the_same(stamps, *known, cut)) {
                last_cuts.push(cut);
                if let Err(problem) = self.judge_again(hash, &state) {
                    self.found(problem, case(), None);
                }
            }
            return Ok(());
        }
        self.report.states += 1;
        self.shared.states.fetch_add(1, Ordering::Relaxed);
        // By lot, not by count: most workloads have fewer states than one in so many.
        let mut lot = Rng::new(self.lot ^ self.report.states);
        let mut one_in = |n: u64| n != 0 && lot.below(n) == 0;
        let (inner, compare) = (one_in(self.config.inner_every), one_in(self.config.compare_every));
        let (damage, used) = (one_in(self.config.damage_every), one_in(self.config.use_every));
        match self.judge_state(&state.image, &state.cuts(), inner)? {
            Err(problem) => self.found(problem, case(), None),
            Ok(recovered) => {
                if compare
                    && let Err(problem) = self.judge.compare(&state.image, &recovered.tree)?
                {
                    self.found(problem, case(), None);
                }
                if used && let Err(problem) = self.judge.used(&recovered)? {
                    self.found(problem, case(), None);
                }
                if damage {
                    let base = &self.recording.log.base;
                    let damage = self.judge.choose_damage(&state.image, base, &mut lot);
                    if let Some(damage) = damage
                        && let Err(problem) =
                            self.judge.damaged(&state.image, &recovered, damage)?
                    {
                        self.found(problem, case(), Some(damage));
                    }
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
        check(tree, &self.recording.model, state.last_cut, self.rules())
    }

    fn is_of_one_moment(&self) -> bool {
        let options = &self.config.options;
        options.data == DataMode::Journal
            && options.fsync == FsyncPolicyKind::Compound
            && self.workload.others.is_empty()
            && self.workload.ops.iter().all(moment::is_one_step)
    }

    fn rules(&self) -> Rules {
        let options = &self.config.options;
        Rules {
            data: options.data,
            metadata_in_order: options.fsync == FsyncPolicyKind::Compound
                && self.workload.others.is_empty(),
            one_moment: self.is_of_one_moment(),
        }
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
        let mut judged_at = None;
        for &cut in cuts {
            if judged_at.is_some_and(|before| admit_the_same(&self.stamps, before, cut)) {
                continue;
            }
            judged_at = Some(cut);
            let judged = check(&recovered.tree, &self.recording.model, cut, self.rules());
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
            for state in inner_states(&log, &self.config) {
                if !seen.insert(state.image.hash()) {
                    continue;
                }
                self.report.inner_states += 1;
                self.shared.states.fetch_add(1, Ordering::Relaxed);
                let deeper = !second && path.0.len() == 1 && rng.percent(10);
                let every = self.config.compare_every;
                let compare = every != 0 && rng.below(every) == 0;
                let mut path = path.clone();
                path.0.push(state.case);
                match self.judge_inner(&state.image, expected, deeper, compare)? {
                    Err(problem) => {
                        self.found(problem, path, None);
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
        compare: bool,
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
        if let Err(problem) = self.judge.sound(&again)? {
            return Ok(Err(problem));
        }
        if compare && let Err(problem) = self.judge.compare(image, &again.tree)? {
            return Ok(Err(problem));
        }
        Ok(Ok(again))
    }
}

/// Whether a model with these stamps admits the same at both cuts: nothing began or was promised in
/// between.
fn admit_the_same(stamps: &[u64], a: u64, b: u64) -> bool {
    let before = |cut: u64| stamps.partition_point(|stamp| *stamp < cut);
    before(a) == before(b)
}

/// States of cuts inside a recovery.
fn inner_states(log: &Log, config: &Config) -> Vec<CrashState> {
    let mut list = Vec::new();
    let (kind, budget) = (DeviceKind::Volatile, config.budget.inside());
    states::enumerate(log, kind, &budget, config.seed, 0, &mut |state| {
        list.push(state);
        ControlFlow::Continue(())
    });
    list
}

/// Judges single images of one run, with all checks.
pub struct Replayer {
    explorer: Explorer,
}

impl Replayer {
    /// For a run that was recorded.
    ///
    /// # Errors
    /// No place for the file of the judge.
    pub fn new(
        config: &Config,
        workload: &Workload,
        recording: Arc<Recording>,
    ) -> Result<Replayer> {
        let config = config.of(workload);
        let explorer = Explorer::new(&config, workload, recording, Arc::default())?;
        Ok(Replayer { explorer })
    }

    /// What is wrong with the image that a target names; `None` when nothing is.
    ///
    /// # Errors
    /// The target is none of this run, or the tools do not run.
    pub fn problem(&mut self, target: &Target) -> Result<Option<Problem>> {
        let explorer = &mut self.explorer;
        explorer.report.cases += 1;
        explorer.report.states += 1;
        let Some((first, inner)) = target.path.0.split_first() else { bail!("no case is named") };
        let unknown = |case: &Case| format!("{case} is not a case of this workload");
        let recording = explorer.recording.clone();
        let state = states::find(&recording.log, explorer.config.device, first);
        let state = state.with_context(|| unknown(first))?;
        let expected = match explorer.judge_state(&state.image, &state.cuts(), true)? {
            Ok(recovered) => recovered,
            Err(problem) => return Ok(Some(problem)),
        };
        if let Some(damage) = target.damage {
            return Ok(explorer.judge.damaged(&state.image, &expected, damage)?.err());
        }
        if inner.is_empty() {
            return Ok(match explorer.judge.used(&expected)? {
                Ok(()) => explorer.judge.compare(&state.image, &expected.tree)?.err(),
                Err(problem) => Some(problem),
            });
        }
        let mut log = expected.log.clone();
        for case in inner {
            let Some(inside) = log.take() else { break };
            explorer.report.inner_states += 1;
            let state = states::find(&inside, DeviceKind::Volatile, case);
            let state = state.with_context(|| unknown(case))?;
            match explorer.judge_inner(&state.image, &expected, true, true)? {
                Ok(again) => log = again.log,
                Err(problem) => return Ok(Some(problem)),
            }
        }
        Ok(None)
    }

    /// The writes that are pending at the last cut of a path, by their index in its log.
    pub fn pending(&mut self, path: &[Case]) -> Option<Vec<usize>> {
        let explorer = &mut self.explorer;
        let (first, inner) = path.split_first()?;
        let (mut log, mut kind) = (explorer.recording.log.clone(), explorer.config.device);
        let mut case = first;
        for next in inner {
            let state = states::find(&log, kind, case)?;
            log = explorer.judge.recover(&state.image, true).ok()?.log?;
            (kind, case) = (DeviceKind::Volatile, next);
        }
        states::pending(&log, kind, case)
    }

    /// The report of a rerun that found this.
    pub fn report(mut self, problem: Problem, target: Target) -> Report {
        let finding = self.explorer.finding(problem, target);
        self.explorer.report.findings.push(finding);
        Report { workloads: 1, ..self.explorer.into_report() }
    }
}
