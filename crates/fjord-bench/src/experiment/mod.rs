//! Figures of papers about fsync, and others of the kind, measured: the kernel's ext4 and fjord
//! under every policy, on the disk, in RAM and on modelled devices.
//!
//! Every target is formatted anew on the same device and takes its turn there; what a
//! paper says stands beside what came out. Owns the experiments' names and the run.

mod barrier;
mod fallbacks;
mod load;
mod measure;
mod oltp;
mod paper;
mod parallel;
mod picture;
mod plan;
mod report;

use std::path::PathBuf;
use std::time::Duration;

pub use report::{ExperimentReport, Gains, Mean, Row};

use crate::error::{BenchError, Result};
use crate::options::{Options, Target};
use crate::report::load_average;
use crate::target::{Device, DeviceKind, Setup, Stand};
use crate::{Progress, Reporter, check_space};
use measure::Outcome;
use plan::{Plan, Setting};
use report::Numbers;

/// A figure or table that is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Experiment {
    /// Figure 6 of *iJournaling* (ATC '17): the distribution of fsync latency beside a writer.
    Ijournaling6,
    /// Figure 7 of the same: the mean against the writer's bandwidth.
    Ijournaling7,
    /// Figure 8: over time, with and without delayed allocation.
    Ijournaling8,
    /// Figure 9: bandwidth of append and fsync against threads.
    Ijournaling9,
    /// Figure 2 of *Per-Block-Group Journaling*: the mean beside a copy, by size of flex groups.
    Pbg2,
    /// Figure 3 of the same: over time.
    Pbg3,
    /// The table of the fast-commit patch series: fs_mark with an fsync after every write.
    FastCommitTable,
    /// A probe alone, and beside eight writers that fsync.
    Neighbours,
    /// How often programs make a policy commit everything.
    Fallbacks,
    /// Figure 8 of *Barrier-Enabled IO Stack for Flash Storage* (FAST '18): journal commits over
    /// time, from the transfer of the first log block to the programmed commit block.
    Barrier8,
    /// Table 2 of the same: the distribution of fsync latency.
    BarrierTable2,
    /// Figure 11: context switches per call.
    Barrier11,
    /// Figure 12: queue depth of the device.
    Barrier12,
    /// Figure 13: append and fsync of a file each (DWSL) against threads.
    Barrier13,
    /// varmail, and OLTP-insert on MariaDB: with durability, and with order only.
    Barrier14,
    /// Tokubench of *High-Performance Transaction Processing in Journaling File Systems* (FAST '18): file creation.
    ParallelTokubench,
    /// Sysbench of the same: random writes.
    ParallelSysbench,
    /// Varmail of the same.
    ParallelVarmail,
    /// Fileserver of the same.
    ParallelFileserver,
}

impl Experiment {
    /// All of them.
    pub const ALL: [Experiment; 19] = [
        Experiment::Ijournaling6,
        Experiment::Ijournaling7,
        Experiment::Ijournaling8,
        Experiment::Ijournaling9,
        Experiment::Pbg2,
        Experiment::Pbg3,
        Experiment::FastCommitTable,
        Experiment::Neighbours,
        Experiment::Fallbacks,
        Experiment::Barrier8,
        Experiment::BarrierTable2,
        Experiment::Barrier11,
        Experiment::Barrier12,
        Experiment::Barrier13,
        Experiment::Barrier14,
        Experiment::ParallelTokubench,
        Experiment::ParallelSysbench,
        Experiment::ParallelVarmail,
        Experiment::ParallelFileserver,
    ];

    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Experiment::Ijournaling6 => "ijournaling-6",
            Experiment::Ijournaling7 => "ijournaling-7",
            Experiment::Ijournaling8 => "ijournaling-8",
            Experiment::Ijournaling9 => "ijournaling-9",
            Experiment::Pbg2 => "pbg-2",
            Experiment::Pbg3 => "pbg-3",
            Experiment::FastCommitTable => "fastcommit-table",
            Experiment::Neighbours => "neighbours",
            Experiment::Fallbacks => "fallbacks",
            Experiment::Barrier8 => "barrier-8",
            Experiment::BarrierTable2 => "barrier-table2",
            Experiment::Barrier11 => "barrier-11",
            Experiment::Barrier12 => "barrier-12",
            Experiment::Barrier13 => "barrier-13",
            Experiment::Barrier14 => "barrier-14",
            Experiment::ParallelTokubench => "parallel-tokubench",
            Experiment::ParallelSysbench => "parallel-sysbench",
            Experiment::ParallelVarmail => "parallel-varmail",
            Experiment::ParallelFileserver => "parallel-fileserver",
        }
    }

    /// The experiment of a name.
    pub fn from_name(name: &str) -> Option<Experiment> {
        Experiment::ALL.into_iter().find(|experiment| experiment.name() == name)
    }

    /// What is measured, in a line.
    pub fn about(self) -> &'static str {
        match self {
            Experiment::Ijournaling6 => {
                "80 KiB, a pause of 0.1 s, fsync, beside a sequential writer: latency of fsync"
            }
            Experiment::Ijournaling7 => "the same: mean latency by the writer's bandwidth",
            Experiment::Ijournaling8 => "the same, with and without delayed allocation",
            Experiment::Ijournaling9 => "4 KiB appended and fsynced: bandwidth by threads",
            Experiment::Pbg2 => {
                "1 KiB and fsync every 0.5 s beside a copy in another directory: mean latency"
            }
            Experiment::Pbg3 => "the same: latency over time",
            Experiment::FastCommitTable => {
                "fs_mark, 4 threads, fsync after every write: MB/s by unit and file size"
            }
            Experiment::Neighbours => {
                "4 KiB append and fsync every 20 ms, alone and beside eight writers that fsync"
            }
            Experiment::Fallbacks => "fsyncs that had to commit everything, by program",
            Experiment::Barrier8 => {
                "4 KiB appended and synced by 4 threads: commits from dispatch to surface"
            }
            Experiment::BarrierTable2 => "4 KiB appended and fsynced: latency",
            Experiment::Barrier11 => "4 KiB overwritten at random and synced: context switches",
            Experiment::Barrier12 => "the same: queue depth of the device",
            Experiment::Barrier13 => {
                "4 KiB appended and fsynced, a file per thread (DWSL): fsyncs/s by threads"
            }
            Experiment::Barrier14 => {
                "varmail, and OLTP-insert of sysbench on MariaDB, with durability and with order only: \
                 operations/s"
            }
            Experiment::ParallelTokubench => "files of 4 KiB created: files/s by threads",
            Experiment::ParallelSysbench => {
                "4 KiB written at random, a file per thread, an fsync each 100: writes/s by threads"
            }
            Experiment::ParallelVarmail => "varmail: rounds of its flow/s by threads",
            Experiment::ParallelFileserver => "fileserver: rounds of its flow/s by threads",
        }
    }
}

/// What to measure with, where not the experiment's own choice.
#[derive(Clone, Debug)]
pub struct ExperimentOptions {
    /// A directory for images and mounts; on the disk to be measured.
    pub dir: PathBuf,
    /// None: the experiment's own. A target of fjord without a policy stands for all policies.
    pub targets: Vec<Target>,
    /// None: the experiment's own.
    pub devices: Vec<DeviceKind>,
    /// How often each target takes its turn.
    pub round_count: Option<u32>,
    /// How long one point takes.
    pub turn: Option<Duration>,
    /// Seconds for everything; the figures mean nothing then.
    pub quick: bool,
    /// Size of each device.
    pub image_size_bytes: Option<u64>,
    /// Memory for cached data: fjord's cache, and the kernel's dirty pages of the device. None
    /// leaves both as they are by default.
    pub cache_bytes: Option<u64>,
    /// The fjord program: it mounts, and serves modelled devices.
    pub fjord_program: PathBuf,
    /// More arguments for `fjord mount`.
    pub fjord_mount_args: Vec<String>,
}

impl ExperimentOptions {
    /// The experiment's own choice of everything, in `dir`, with 256 MiB of cache for all.
    pub fn new(dir: impl Into<PathBuf>) -> ExperimentOptions {
        ExperimentOptions {
            dir: dir.into(),
            targets: Vec::new(),
            devices: Vec::new(),
            round_count: None,
            turn: None,
            quick: false,
            image_size_bytes: None,
            cache_bytes: Some(256 << 20),
            fjord_program: PathBuf::from("fjord"),
            fjord_mount_args: Vec::new(),
        }
    }

    /// The same for whoever sets targets up.
    fn for_stands(&self, plan: &Plan) -> Options {
        Options {
            targets: Vec::new(),
            image_size_bytes: plan.image_size_bytes,
            fjord_program: self.fjord_program.clone(),
            fjord_mount_args: self.fjord_mount_args.clone(),
            ..Options::new(&self.dir)
        }
    }
}

/// A target on a device at one setting.
struct Cell {
    device: DeviceKind,
    target: Target,
    setting: Setting,
    /// All turns together; None until the first, or if none succeeded.
    outcome: Option<Outcome>,
    /// The numbers of each turn, by round; None for a turn that failed.
    turns: Vec<Option<Numbers>>,
}

/// Runs an experiment. `callback` is called before every step, as by [`crate::run`].
///
/// A device or target that cannot be set up, or that fails while it is measured, is left out and
/// named in [`ExperimentReport::left_out`].
///
/// # Errors
/// [`BenchError::Usage`] for options that make no sense, [`BenchError::NoSpace`],
/// [`BenchError::Interrupted`].
pub fn run_experiment(
    experiment: Experiment,
    options: &ExperimentOptions,
    callback: &mut dyn FnMut(&Progress) -> std::ops::ControlFlow<()>,
) -> Result<ExperimentReport> {
    let plan = Plan::new(experiment, options);
    let stand_options = options.for_stands(&plan);
    check(&plan)?;
    if plan.devices.contains(&DeviceKind::Disk) {
        check_space(&stand_options, 1)?;
    }
    let before = load_average();
    let mut cells: Vec<Cell> = Vec::new();
    for device in &plan.devices {
        for target in targets_on(&plan, *device) {
            let settings = experiment.settings(*device, target, &plan).into_iter();
            cells.extend(settings.map(|setting| Cell {
                device: *device,
                target: target.clone(),
                setting,
                outcome: None,
                turns: Vec::new(),
            }));
        }
    }
    let has_no_cell = |target: &&Target| !cells.iter().any(|cell| cell.target == **target);
    let asked = if options.targets.is_empty() { &[] } else { &*plan.targets };
    if let Some(target) = asked.iter().find(has_no_cell) {
        let name = target.name();
        return Err(BenchError::Usage(format!(
            "{name} runs on none of the devices: a directory needs disk, :native a modelled device \
             (--devices)"
        )));
    }
    let total_count = cells.len() as u64 * u64::from(plan.round_count);
    let step_count = u32::try_from(total_count).unwrap_or(u32::MAX);
    let measured_time = plan.turn.saturating_mul(step_count);
    let progress = Progress { done_count: 0, total_count, what: String::new(), measured_time };
    let mut run = Run {
        experiment,
        plan,
        options: stand_options,
        cache_bytes: options.cache_bytes,
        reporter: Reporter { callback, progress },
        left_out: Vec::new(),
    };
    for kind in run.plan.devices.clone() {
        run.device(kind, &mut cells)?;
    }
    let load = [before, load_average()];
    Ok(report::build(experiment, &run.plan, cells, run.left_out, load))
}

fn check(plan: &Plan) -> Result<()> {
    let usage = |message: &str| Err(BenchError::Usage(message.into()));
    if plan.round_count == 0 || plan.turn.is_zero() {
        return usage("choose at least one round, and a time for it");
    }
    if plan.image_size_bytes < 256 << 20 || !plan.image_size_bytes.is_multiple_of(4096) {
        return usage("devices of figures have at least 256 MiB, whole blocks of 4 KiB");
    }
    Ok(())
}

/// The targets for a device: a directory lies on no device but the real disk, and only a modelled
/// device has a barrier command.
fn targets_on(plan: &Plan, device: DeviceKind) -> impl Iterator<Item = &Target> {
    plan.targets.iter().filter(move |target| match target {
        Target::Directory(_) => device == DeviceKind::Disk,
        Target::Library(how) if how.native => matches!(device, DeviceKind::Modelled(_)),
        _ => true,
    })
}

/// A run under way.
struct Run<'a> {
    experiment: Experiment,
    plan: Plan,
    options: Options,
    cache_bytes: Option<u64>,
    reporter: Reporter<'a>,
    left_out: Vec<String>,
}

impl Run<'_> {
    /// Everything on one device.
    fn device(&mut self, kind: DeviceKind, cells: &mut [Cell]) -> Result<()> {
        let device = match Device::new(kind, &self.options) {
            Ok(device) => device,
            Err(error) => {
                self.leave_out(format!("{}: {error}", kind.name()));
                return Ok(());
            }
        };
        let targets: Vec<Target> = targets_on(&self.plan, kind).cloned().collect();
        for round in 0..self.plan.round_count {
            for turn in 0..targets.len() {
                // Another target goes first in each round.
                let target = &targets[(turn + round as usize) % targets.len()];
                let own =
                    cells.iter_mut().filter(|cell| cell.device == kind && cell.target == *target);
                self.target(&device, target, own)?;
            }
        }
        if let Err(error) = device.finish() {
            self.leave_out(format!("{}: {error}", kind.name()));
        }
        Ok(())
    }

    /// Notes what is left out; once, although each round tries it.
    fn leave_out(&mut self, message: String) {
        if !self.left_out.contains(&message) {
            self.left_out.push(message);
        }
    }

    /// One target's turn at each of its settings.
    fn target<'c>(
        &mut self,
        device: &Device,
        target: &Target,
        cells: impl Iterator<Item = &'c mut Cell>,
    ) -> Result<()> {
        let mut stand: Option<(Setup, Stand)> = None;
        for cell in cells {
            let what = format!("{}, {}, {}", cell.device.name(), target.name(), cell.setting.name);
            self.reporter.step(what.clone())?;
            let result = self.point(device, cell, &mut stand);
            if result.is_err() {
                cell.turns.push(None);
            }
            if let Err(error) = result {
                self.leave_out(format!("{what}: {error}"));
                // Whatever state it is in, the next point gets a new one.
                stand = None;
            }
        }
        if let Some((_, stand)) = stand
            && let Err(error) = stand.finish()
        {
            self.leave_out(format!("{}, {}: {error}", device.path().display(), target.name()));
        }
        Ok(())
    }

    /// One point, on the file system of the point before where nothing speaks against it.
    fn point(
        &self,
        device: &Device,
        cell: &mut Cell,
        stand: &mut Option<(Setup, Stand)>,
    ) -> Result<()> {
        let setup = Setup { cache_bytes: self.cache_bytes, ..cell.setting.setup.clone() };
        let (_, stand) = match stand.take() {
            Some(kept) if self.experiment.reuses_stands() && kept.0 == setup => stand.insert(kept),
            other => {
                if let Some((_, used)) = other {
                    used.finish()?;
                }
                let new = Stand::on(&cell.target, device, &setup, &self.options)?;
                stand.insert((setup, new))
            }
        };
        let outcome = measure::run(self.experiment, &cell.setting, stand, &self.plan)?;
        cell.turns.push(Some(self.experiment.numbers(&outcome)));
        match &mut cell.outcome {
            Some(sum) => sum.add(outcome),
            none => *none = Some(outcome),
        }
        Ok(())
    }
}

impl Experiment {
    /// Whether points leave a file system as they found it; those with a background do not.
    fn reuses_stands(self) -> bool {
        matches!(
            self,
            Experiment::Ijournaling9 | Experiment::FastCommitTable | Experiment::Barrier13
        ) || self.is_parallel()
    }

    /// Whether it is of parallel journaling.
    fn is_parallel(self) -> bool {
        matches!(
            self,
            Experiment::ParallelTokubench
                | Experiment::ParallelSysbench
                | Experiment::ParallelVarmail
                | Experiment::ParallelFileserver
        )
    }
}
