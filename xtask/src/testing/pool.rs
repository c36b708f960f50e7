//! Runs supervised programs, several beside each other where they mostly wait.
//!
//! Owns the order of the programs. Invariant: of the programs whose [`Turn`] is `Busy` one runs at a time.

use std::{
    collections::VecDeque,
    io::BufReader,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::Mutex,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};

use super::{
    budgets::Stage,
    kept::Kept,
    run_limit,
    totals::{Counts, Totals},
};
use crate::supervise;

/// Time limit of a program.
pub(super) const LIMIT: Duration = Duration::from_secs(300);
/// Programs that run at the same time.
const WORKERS: usize = 3;

/// Which programs may run at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// It keeps all processors busy.
    Busy,
    /// It mostly waits, for the kernel or for other processes.
    Waits,
}

/// A program to run.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    /// Name of its stage.
    pub(crate) name: String,
    /// … without the settings of this run.
    pub(crate) program_name: String,
    pub(crate) program: PathBuf,
    pub(crate) arguments: Vec<String>,
    pub(crate) dir: PathBuf,
    pub(crate) env: Vec<(String, String)>,
    pub(crate) turn: Turn,
    pub(crate) limit: Duration,
    /// Started as a careless caller would (`supervise --careless`).
    pub(crate) is_careless: bool,
}

/// What came of a job.
struct Ended {
    stage: Stage,
    outcome: Result<()>,
    counts: Counts,
    output: Kept,
}

/// Runs all `jobs` and adds them to `totals`. Scratch folders are made below `scratch`.
pub(super) fn run(jobs: &[Job], scratch: &Path, totals: &mut Totals) {
    let numbered = jobs.iter().enumerate();
    let (busy, waiting): (VecDeque<_>, VecDeque<_>) =
        numbered.partition(|(_, job)| job.turn == Turn::Busy);
    let (queues, totals) = (Mutex::new([busy, waiting]), Mutex::new(totals));
    // Neither lock can be poisoned in a way that matters: what they guard is whole after each step.
    let next = |may_be_busy: bool| {
        let mut queues = queues.lock().unwrap_or_else(|poison| poison.into_inner());
        let [busy, waiting] = &mut *queues;
        let first = may_be_busy.then(|| busy.pop_front()).flatten();
        first.or_else(|| waiting.pop_front()).filter(|_| !run_limit::ends())
    };
    let add = |ended: Ended| {
        let mut totals = totals.lock().unwrap_or_else(|poison| poison.into_inner());
        println!("== {}\n{}", ended.stage.name, ended.output.text().trim_end());
        totals.end(ended.stage, &ended.outcome, &ended.counts);
    };
    let (next, add) = (&next, &add);
    std::thread::scope(|scope| {
        for worker in 0..WORKERS {
            scope.spawn(move || {
                while let Some((index, job)) = next(worker == 0) {
                    add(run_one(job, &scratch.join(format!("run {index}"))));
                }
            });
        }
    });
}

fn run_one(job: &Job, scratch: &Path) -> Ended {
    let started = Instant::now();
    let (mut counts, mut output) = (Counts::default(), Kept::default());
    let outcome = supervised(job, scratch, &mut counts, &mut output);
    let stage = Stage::new(&job.name, started.elapsed(), outcome.is_ok(), true);
    Ended { stage, outcome, counts, output }
}

fn supervised(job: &Job, scratch: &Path, counts: &mut Counts, output: &mut Kept) -> Result<()> {
    let mut command: Command = supervise::command(job.limit, scratch, job.is_careless)?;
    command.arg(&job.program).args(&job.arguments).current_dir(&job.dir);
    command.envs(job.env.iter().map(|(name, value)| (name, value)));
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
    // Only the supervisor has the other end, and it always ends.
    let stdout = child.stdout.take().context("stdout is piped")?;
    output.read(BufReader::new(stdout), counts)?;
    match child.wait()?.code() {
        Some(0) => Ok(()),
        Some(supervise::FAILED) => bail!("it failed"),
        Some(supervise::HUNG) => bail!("it hung, and was ended (limit {} s)", job.limit.as_secs()),
        Some(supervise::LEFT_BEHIND) => bail!("it left something behind"),
        _ => bail!("its supervisor was killed"),
    }
}
