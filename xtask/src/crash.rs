//! `cargo xtask crash`: cut the power at every moment of many workloads, recover, judge.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use fjord::{DataMode, FsyncPolicyKind, MountOptions, Scheduler};
use fjord_crash::base::{FAST_COMMIT, FEATURES, Features, GROUPS, SPECIAL};
use fjord_crash::campaign::{self, Plan};
use fjord_crash::explore::{CasePath, Config, Report, Workload, data_name, explore, replay};
use fjord_crash::minimise::minimise;
use fjord_crash::ops;
use fjord_crash::record::DeviceKind;
use fjord_crash::workloads::{FAMILIES, Family};
use indicatif::{ProgressBar, ProgressStyle};

const DATA_MODES: [DataMode; 3] = [DataMode::Ordered, DataMode::Journal, DataMode::Writeback];

/// Arguments of `cargo xtask crash`.
#[derive(Debug, Args)]
#[command(after_help = "Without choices every family runs under every configuration in turn; \
endless families (ace3, random, threads, groups, fsyncs) go on until --hours or --workloads end them. A finding \
prints the command that runs it again. docs/crash-model.md says what is modelled.")]
pub(crate) struct CrashArgs {
    /// Families of workloads (may be repeated): ace1, ace2, ace3, rename-to-sub, create-delete,
    /// barriers, thousand-files, append-far, deep-leaf, ten-threads, random, threads, groups, fsyncs
    #[arg(long, value_name = "FAMILY")]
    workload: Vec<String>,
    /// These operations instead, such as 'create /a; append /a 4096; fsync /a'; `||` between
    /// those of several threads
    #[arg(long, conflicts_with = "workload")]
    ops: Option<String>,
    /// Operations that make the tree before --ops
    #[arg(long, requires = "ops", default_value = "")]
    setup: String,
    /// Only this case of --ops
    #[arg(long, requires = "ops")]
    case: Option<CasePath>,
    /// Feature sets of the image (may be repeated)
    #[arg(long, value_name = "SET")]
    features: Vec<String>,
    /// Data modes (may be repeated): ordered, journal, writeback
    #[arg(long, value_name = "MODE")]
    data: Vec<String>,
    /// Devices (may be repeated): volatile, barrier, nocache
    #[arg(long, value_name = "KIND")]
    device: Vec<String>,
    /// Fsync policy: compound, group, fast-commit, ijournal
    #[arg(long, default_value = "compound")]
    policy: String,
    /// Areas for i-transactions (may be repeated); with policy ijournal 1 and 3 if not given
    #[arg(long, value_name = "COUNT")]
    areas: Vec<u32>,
    /// Leave flushes out, as `-o nobarrier` does: promises are lost then
    #[arg(long)]
    no_barrier: bool,
    /// Who keeps the order of writes: epoch, direct, auto
    #[arg(long, default_value = "auto")]
    scheduler: String,
    /// Discard freed blocks
    #[arg(long)]
    discard: bool,
    /// Where choices come from
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Start no new workload after this time
    #[arg(long)]
    hours: Option<f64>,
    /// At most so many workloads
    #[arg(long)]
    workloads: Option<usize>,
    /// Take one workload in so many of each family
    #[arg(long, default_value_t = 1)]
    sample_every: usize,
    /// Every workload under every configuration, instead of one each in turn
    #[arg(long)]
    product: bool,
    /// Subsets of unflushed writes that each moment gives at the most
    #[arg(long, default_value_t = 12)]
    subsets: usize,
    /// Of the states, one in so many is cut inside its recovery too; 0 for none
    #[arg(long, default_value_t = 60)]
    inner_every: u64,
    /// Of the states, one in so many is recovered by e2fsck and Linux too; 0 for none
    #[arg(long, default_value_t = 400)]
    compare_every: u64,
    /// Of the states, one in so many also gets a wrong bit in its log; 0 for none
    #[arg(long, default_value_t = 100)]
    damage_every: u64,
    /// Threads
    #[arg(long, default_value_t = 2)]
    threads: usize,
    /// Stop at so many findings
    #[arg(long, default_value_t = 10)]
    findings: usize,
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

/// Runs a campaign, one workload, or one case.
pub(crate) fn run(args: &CrashArgs) -> Result<()> {
    fjord_testkit::tools::require_root()?;
    // A panic of the engine is a finding with its text; the explorer goes on.
    std::panic::set_hook(Box::new(|_| {}));
    let plan = plan(args)?;
    let started = Instant::now();
    let report = match &args.ops {
        Some(text) => one(args, &plan, text)?,
        None => many(&plan)?,
    };
    print_report(&report, args.seed, started.elapsed());
    if !report.findings.is_empty() {
        bail!("{} findings", report.findings.len());
    }
    Ok(())
}

fn plan(args: &CrashArgs) -> Result<Plan> {
    let fsync = policy(args)?;
    let (barrier, discard) = (!args.no_barrier, args.discard);
    let scheduler = Scheduler::by_name(&args.scheduler)
        .with_context(|| format!("unknown scheduler {:?}; epoch, direct, auto", args.scheduler))?;
    let options = MountOptions { fsync, scheduler, barrier, discard, ..MountOptions::default() };
    let mut config = Config::new(options);
    config.seed = args.seed;
    config.budget.subsets_max = args.subsets;
    (config.inner_every, config.compare_every) = (args.inner_every, args.compare_every);
    config.damage_every = args.damage_every;
    let deadline = match args.hours {
        None => None,
        Some(hours) => {
            let time = Duration::try_from_secs_f64(hours * 3600.0);
            Some(Instant::now() + time.with_context(|| format!("--hours {hours} is no time"))?)
        }
    };
    let families = choose("workload", &args.workload, &FAMILIES, |family: &Family| family.name())?;
    ensure!(
        args.ops.is_some()
            || deadline.is_some()
            || args.workloads.is_some()
            || !families.iter().any(|family| family.is_endless()),
        "ace3, random, threads, groups and fsyncs never end: give --hours or --workloads, or choose others with \
         --workload"
    );
    Ok(Plan {
        features: features(args)?,
        data: choose("data mode", &args.data, &DATA_MODES, |mode| data_name(*mode))?,
        devices: choose("device", &args.device, &DeviceKind::ALL, |kind| kind.name())?,
        product: args.product,
        sample_every: args.sample_every,
        workloads_max: args.workloads,
        deadline,
        threads: args.threads,
        findings_max: args.findings,
        ..Plan::new(&families, config)
    })
}

fn policy(args: &CrashArgs) -> Result<FsyncPolicyKind> {
    let wanted = std::slice::from_ref(&args.policy);
    let policies = choose("fsync policy", wanted, FsyncPolicyKind::ALL, |policy| policy.name())?;
    policies.first().copied().context("a policy")
}

/// The feature sets asked for; without any, those that the policy makes use of. [`SPECIAL`] ones
/// only by name.
fn features(args: &CrashArgs) -> Result<Vec<Features>> {
    let all = FEATURES.into_iter().chain(GROUPS).chain(FAST_COMMIT).chain(SPECIAL);
    let known: Vec<Features> = all.collect();
    let policy = policy(args)?;
    let sets = match (args.features.is_empty(), policy) {
        // Where there is one group, this policy commits everything.
        (true, FsyncPolicyKind::Group) => GROUPS.to_vec(),
        (true, FsyncPolicyKind::FastCommit) => FAST_COMMIT.to_vec(),
        (true, FsyncPolicyKind::Compound | FsyncPolicyKind::Ijournal) => FEATURES.to_vec(),
        (false, _) => choose("feature set", &args.features, &known, |set| set.name)?,
    };
    let areas = match (args.areas.as_slice(), policy) {
        ([], FsyncPolicyKind::Ijournal) => &[1, 3],
        ([], _) => &[0][..],
        (areas, _) => areas,
    };
    let with_areas = |set: Features| areas.iter().map(move |&areas| set.with_areas(areas));
    Ok(sets.into_iter().flat_map(with_areas).collect())
}

/// One sequence in one configuration, or one case of it.
fn one(args: &CrashArgs, plan: &Plan, text: &str) -> Result<Report> {
    let mut config = plan.config.clone();
    config.features = *plan.features.first().context("a feature set")?;
    config.options.data = *plan.data.first().context("a data mode")?;
    config.device = *plan.devices.first().context("a device")?;
    config.findings_max = plan.findings_max;
    let workload = Workload::threads(ops::parse(&args.setup)?, ops::parse_threads(text)?);
    if let Some(case) = &args.case {
        match replay(&config, &workload, case) {
            Ok(report) if !report.findings.is_empty() => return Ok(report),
            Ok(_) => println!("this case is sound now; trying all of the workload"),
            Err(error) => println!("{error:#}; trying all of the workload"),
        }
    }
    let mut report = explore(&config, &workload, &Default::default())?;
    report.findings.truncate(1);
    for finding in &mut report.findings {
        *finding = minimise(&config, finding.clone())?;
    }
    Ok(report)
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
         refused), {} operations refused, {} syncs by the policy and {} that fell back, {} commits of \
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
        report.by_policy,
        report.fallbacks,
        report.partial_commits,
        report.findings.len(),
        time.as_secs_f64(),
        report.all_states() as f64 / time.as_secs_f64().max(0.001),
    );
}
