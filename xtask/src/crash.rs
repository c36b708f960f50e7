//! `cargo xtask crash`: cut the power at every moment of many workloads, recover, check.
//!
//! Owns the output; the arguments are in `fjord_crash::command`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use fjord_crash::campaign::{self, Event};
pub(crate) use fjord_crash::command::CrashArgs;
use fjord_crash::command::NOT_SAVED;
use fjord_crash::explore::Shared;
use fjord_crash::panics;
use fjord_crash::report::Report;
use indicatif::{ProgressBar, ProgressStyle};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

/// How often the bar is drawn, so that it also moves within a long workload.
const DRAWN_EVERY: Duration = Duration::from_millis(250);
/// Interval of lines without a progress bar, for example in a file.
const SAID_EVERY: Duration = Duration::from_secs(30);

/// Runs a campaign, one workload, or one case.
pub(crate) fn run(args: &CrashArgs) -> Result<()> {
    fjord_testkit::tools::require_root()?;
    // A panic of the engine is a finding with its text; the explorer goes on.
    panics::keep_quiet();
    let started = Instant::now();
    let stopped;
    let report = if args.is_one_run() {
        let shown = Shown::new(Some(1), started)?;
        stopped = shown.shared.stop.clone();
        shown.during(|| args.rerun(&shown.shared, &|text| shown.say(text)))?
    } else {
        let plan = args.plan()?;
        plan.check_save()?;
        let shown = Shown::new(plan.job_count(), started)?;
        stopped = shown.shared.stop.clone();
        shown.during(|| campaign::run(&plan, &shown.shared, &|event| shown.happened(event)))?
    };
    if stopped.load(Ordering::Relaxed) {
        println!("interrupted");
    }
    print_report(&report, args.seed, started.elapsed());
    if report.workloads == 0 && !args.is_one_run() {
        bail!("no workload was run, so nothing is proved; give it more time");
    }
    if !report.findings.is_empty() {
        bail!("{} findings", report.findings.len());
    }
    Ok(())
}

/// Sets a flag when it is dropped.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// What is seen of a campaign while it runs.
struct Shown {
    bar: ProgressBar,
    started: Instant,
    shared: Arc<Shared>,
    workloads: AtomicU64,
}

impl Shown {
    fn new(jobs: Option<usize>, started: Instant) -> Result<Shown> {
        let bar = match jobs {
            Some(count) => ProgressBar::new(count as u64),
            None => ProgressBar::new_spinner(),
        };
        let style = "{wide_bar} {pos}/{len} workloads, {elapsed}, {msg}";
        bar.set_style(ProgressStyle::with_template(style)?);
        let shared: Arc<Shared> = Arc::default();
        // The first signal ends the campaign with its summary, a second one at once.
        for signal in [SIGINT, SIGTERM] {
            flag::register_conditional_shutdown(signal, 128 + signal, shared.stop.clone())?;
            flag::register(signal, shared.stop.clone())?;
        }
        Ok(Shown { bar, started, shared, workloads: AtomicU64::new(0) })
    }

    /// Draws on while this runs.
    fn during<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let done = AtomicBool::new(false);
        let outcome = std::thread::scope(|scope| {
            // Panics end it, too.
            let _ends = Ends(&done);
            scope.spawn(|| {
                let mut said = Instant::now();
                while !done.load(Ordering::Relaxed) {
                    self.draw(&mut said);
                    std::thread::sleep(DRAWN_EVERY);
                }
            });
            work()
        });
        self.bar.finish_and_clear();
        outcome
    }

    fn draw(&self, said: &mut Instant) {
        let states = self.shared.states.load(Ordering::Relaxed);
        let found = self.shared.findings.load(Ordering::Relaxed);
        let rate = states as f64 / self.started.elapsed().as_secs_f64().max(0.001);
        let line = format!("{states} states, {rate:.0}/s, {found} findings");
        let workloads = self.workloads.load(Ordering::Relaxed);
        if self.bar.is_hidden() && said.elapsed() >= SAID_EVERY {
            *said = Instant::now();
            println!("{workloads} workloads: {line}");
        }
        self.bar.set_position(workloads);
        self.bar.set_message(line);
        self.bar.tick();
    }

    fn say(&self, text: &str) {
        self.bar.suspend(|| println!("{text}"));
    }

    fn happened(&self, event: Event<'_>) {
        match event {
            // At once: making it small takes its time, and is shown in the end.
            Event::Found(finding) => {
                self.say(&format!("found, to be made small: {}\n", finding.problem))
            }
            Event::NotSaved(error) => self.say(&format!("{NOT_SAVED}: {error:#}\n")),
            Event::Done(sum) => self.workloads.store(sum.workloads, Ordering::Relaxed),
        }
    }
}

fn print_report(report: &Report, seed: u64, time: Duration) {
    for finding in &report.findings {
        println!("{finding}\n");
    }
    println!(
        "seed {seed}: {} workloads, {} requests, {} of {} moments cut, {} images built, {} states tried ({} of them of \
         cuts inside recovery), {} recoveries, {} runs of e2fsck -fn, {} compared with e2fsck and \
         Linux ({} of them with fast commits; {} torn commit blocks left out for e2fsck; {} times of truncations; \
         {} not for this kernel), {} used afterwards, {} refused by both, {} logs with a wrong bit ({} refused), \
         {} of {} operations refused, {} syncs by the policy and {} that fell back, {} commits of parts, \
         {} combinations of pipeline, policy, data mode, device and scheduler, {} overlapped commits, \
         {} findings; {:.0} s, {:.0} states/s",
        report.workloads,
        report.requests,
        report.walked.tried,
        report.walked.moments,
        report.cases,
        report.all_states(),
        report.inner_states,
        report.judged.recoveries,
        report.judged.fscks,
        report.judged.compared,
        report.judged.fast_commits,
        report.judged.torn_commits,
        report.judged.truncations,
        report.judged.not_for_linux,
        report.judged.used,
        report.judged.marked,
        report.judged.damaged,
        report.judged.refused,
        report.refused,
        report.ops,
        report.by_policy,
        report.fallbacks,
        report.partial_commits,
        report.covered.len(),
        report.overlapped_commits,
        report.findings.len(),
        time.as_secs_f64(),
        report.all_states() as f64 / time.as_secs_f64().max(0.001),
    );
}
