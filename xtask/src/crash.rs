//! `cargo xtask crash`: cut the power at every moment of many workloads, recover, judge.
//!
//! Owns what is shown of it; the arguments are `fjord_crash::command`'s.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use fjord_crash::campaign::{self, Plan};
pub(crate) use fjord_crash::command::CrashArgs;
use fjord_crash::report::Report;
use indicatif::{ProgressBar, ProgressStyle};

/// Runs a campaign, one workload, or one case.
pub(crate) fn run(args: &CrashArgs) -> Result<()> {
    fjord_testkit::tools::require_root()?;
    // A panic of the engine is a finding with its text; the explorer goes on.
    std::panic::set_hook(Box::new(|_| {}));
    let started = Instant::now();
    let report = if args.is_one_run() {
        args.rerun(&|text| println!("{text}"))?
    } else {
        many(&args.plan()?)?
    };
    print_report(&report, args.seed, started.elapsed());
    if !report.findings.is_empty() {
        bail!("{} findings", report.findings.len());
    }
    Ok(())
}

fn many(plan: &Plan) -> Result<Report> {
    let bar = match plan.job_count() {
        Some(count) => ProgressBar::new(count as u64),
        None => ProgressBar::new_spinner(),
    };
    let style = "{wide_bar} {pos}/{len} workloads, {elapsed}, {msg}";
    bar.set_style(ProgressStyle::with_template(style)?);
    let started = Instant::now();
    let shown = Mutex::new((0, Instant::now()));
    let report = campaign::run(plan, &|sum| {
        let rate = sum.all_states() as f64 / started.elapsed().as_secs_f64().max(0.001);
        let found = sum.findings.len();
        let line = format!("{} states, {rate:.0}/s, {found} findings", sum.all_states());
        bar.set_position(sum.workloads);
        bar.set_message(line.clone());
        let Ok(mut shown) = shown.lock() else { return };
        for finding in &sum.findings[shown.0..] {
            bar.suspend(|| println!("{finding}\n"));
        }
        shown.0 = found;
        // Where no bar is drawn, into a file for example, a line now and then.
        if bar.is_hidden() && shown.1.elapsed() > Duration::from_secs(30) {
            shown.1 = Instant::now();
            println!("{} workloads: {line}", sum.workloads);
        }
    })?;
    bar.finish_and_clear();
    Ok(report)
}

fn print_report(report: &Report, seed: u64, time: Duration) {
    for finding in &report.findings {
        println!("{finding}\n");
    }
    println!(
        "seed {seed}: {} workloads, {} requests, {} images built, {} states tried ({} of them of \
         cuts inside recovery), {} recoveries, {} runs of e2fsck -fn, {} compared with e2fsck and \
         Linux ({} of them with fast commits; {} torn superblocks, {} torn commit blocks and {} stale \
         areas left out), {} refused by both, {} logs with a wrong bit ({} \
         refused), {} of {} operations refused, {} syncs by the policy and {} that fell back, {} commits of \
         parts, {} findings; {:.0} s, {:.0} states/s",
        report.workloads,
        report.requests,
        report.cases,
        report.all_states(),
        report.inner_states,
        report.judged.recoveries,
        report.judged.fscks,
        report.judged.compared,
        report.judged.fast_commits,
        report.judged.torn_superblocks,
        report.judged.torn_commits,
        report.judged.stale_areas,
        report.judged.marked,
        report.judged.damaged,
        report.judged.refused,
        report.refused,
        report.ops,
        report.by_policy,
        report.fallbacks,
        report.partial_commits,
        report.findings.len(),
        time.as_secs_f64(),
        report.all_states() as f64 / time.as_secs_f64().max(0.001),
    );
}
