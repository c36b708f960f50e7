//! Workloads and measurements: fjord beside the raw device, the kernel's ext4 and fuse2fs.
//!
//! [`run`] sets every target up, lets them take turns round by round on the same machine at the
//! same time, and reports rates, latencies and ratios. Absolute figures of two runs do not compare;
//! ratios of one run do. [`run_experiment`] measures figures of papers about fsync in the same way;
//! [`run_figure`] redoes others in virtual time; [`run_locks`] measures what locks cost.

mod chart;
mod error;
mod experiment;
mod figure;
mod how;
mod options;
mod plot;
mod report;
mod served;
mod target;
mod workload;

use std::ops::ControlFlow;
use std::time::Duration;

pub use error::{BenchError, Result};
pub use experiment::{
    Experiment, ExperimentOptions, ExperimentReport, Gains, Mean, Row, run_experiment,
};
pub use figure::{
    Figure, FigureReport, LatencyReport, LatencyRow, LockCost, LockOptions, LockRow, LocksReport,
    Ordering, OrderingReport, OrderingRow, run_figure, run_locks,
};
pub use options::{How, Options, Target, Workload};
pub use report::{CaseResult, Latency, OpenResult, Report};
pub use served::Served;
pub use target::DeviceKind;

use target::Stand;
use workload::{Case, Sample};

/// Where a run is.
#[derive(Clone, Debug)]
pub struct Progress {
    /// Steps done.
    pub done_count: u64,
    /// Steps in all.
    pub total_count: u64,
    /// What is being done now.
    pub what: String,
    /// How long all steps measure, without the time that making and mounting images takes; zero if
    /// that is not known before.
    pub measured_time: Duration,
}

/// Counts steps and asks the caller whether to go on.
struct Reporter<'a> {
    callback: &'a mut dyn FnMut(&Progress) -> ControlFlow<()>,
    progress: Progress,
}

impl Reporter<'_> {
    fn step(&mut self, what: String) -> Result<()> {
        self.progress.what = what;
        let flow = (self.callback)(&self.progress);
        self.progress.done_count += 1;
        if flow.is_break() { Err(BenchError::Interrupted) } else { Ok(()) }
    }
}

/// Runs what `options` ask for. `callback` is called before every step; when it breaks, everything
/// is taken down and the run ends with [`BenchError::Interrupted`].
///
/// A target that cannot be set up (no root, program not installed, no loop device) is left out and
/// named in [`Report::skipped`]; a failure while measuring ends the run.
///
/// # Errors
/// [`BenchError::Usage`] for options that make no sense, [`BenchError::NoSpace`], failures of
/// commands and calls.
pub fn run(
    options: &Options,
    callback: &mut dyn FnMut(&Progress) -> ControlFlow<()>,
) -> Result<Report> {
    options.check()?;
    let in_dir =
        |target: &&Target| options.pool.is_none() && !matches!(target, Target::Directory(_));
    let image_count = options.targets.iter().filter(in_dir).count();
    check_space(options, image_count)?;
    let cases = Case::all(options);
    let turns_per_case = options.targets.len() as u64 * u64::from(options.round_count);
    let total_count = options.targets.len() as u64 + cases.len() as u64 * turns_per_case;
    let mut reporter = Reporter {
        callback,
        progress: Progress {
            done_count: 0,
            total_count,
            what: String::new(),
            measured_time: Duration::ZERO,
        },
    };
    let mut report = Report { load_average: [report::load_average(); 2], ..Report::default() };

    let mut stands = Vec::new();
    if cases.iter().any(|case| case.workload != Workload::OpenHuge) {
        for target in &options.targets {
            reporter.step(format!("set up {}", target.name()))?;
            match Stand::new(target, options) {
                Ok(stand) => stands.push(stand),
                Err(error) => report.skipped.push(format!("{}: {error}", target.name())),
            }
        }
    }
    for case in cases {
        if case.workload == Workload::OpenHuge {
            reporter.step("open an image of 16 TiB".into())?;
            let (opens, skipped) = workload::open_huge(options)?;
            report.opens = opens;
            report.skipped.extend(skipped)
        } else {
            let samples = run_case(case, &mut stands, options, &mut reporter)?;
            report.add(case, samples);
        }
    }
    stands.into_iter().try_for_each(Stand::finish)?;
    report.load_average[1] = report::load_average();
    Ok(report)
}

/// Lets the targets take turns at one case.
fn run_case(
    case: Case,
    stands: &mut [Stand],
    options: &Options,
    reporter: &mut Reporter<'_>,
) -> Result<Vec<(Target, Vec<Sample>)>> {
    let fits = |target: &Target| target.has_names() || !case.workload.needs_names();
    let mut stands: Vec<&mut Stand> =
        stands.iter_mut().filter(|stand| fits(&stand.target)).collect();
    let mut samples: Vec<(Target, Vec<Sample>)> =
        stands.iter().map(|stand| (stand.target.clone(), Vec::new())).collect();
    let stand_count = stands.len();
    for round in 0..options.round_count {
        for turn in 0..stand_count {
            // Another target goes first in each round.
            let index = (turn + round as usize) % stand_count;
            let stand = &mut *stands[index];
            let name = stand.target.name();
            reporter.step(format!("{} on {name}, round {}", case.workload.name(), round + 1))?;
            samples[index].1.push(workload::run_turn(case, stand, options, round)?);
        }
    }
    Ok(samples)
}

fn check_space(options: &Options, image_count: usize) -> Result<()> {
    let io = || BenchError::io(format!("use {}", options.dir.display()));
    std::fs::create_dir_all(&options.dir).map_err(io())?;
    let statfs = rustix::fs::statvfs(&options.dir).map_err(|errno| io()(errno.into()))?;
    let needed_bytes = options.image_size_bytes * image_count as u64 + (256 << 20);
    let free_bytes = statfs.f_bavail * statfs.f_frsize;
    if free_bytes < needed_bytes {
        return Err(BenchError::NoSpace { dir: options.dir.clone(), free_bytes, needed_bytes });
    }
    Ok(())
}
