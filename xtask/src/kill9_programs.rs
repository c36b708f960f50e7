//! `cargo xtask kill9-programs`: long runs of SQLite and the usual ways of making files durable,
//! with kills.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use clap::Args;
use fjord_testkit::{
    features,
    programs::{self, POLICIES, SCHEDULERS},
};

/// Arguments of `cargo xtask kill9-programs`.
#[derive(Debug, Args)]
pub(crate) struct Kill9ProgramsArgs {
    /// Kills for each policy and scheduler
    #[arg(long, default_value_t = 100)]
    rounds: u64,
    /// Seed of the jobs and the moments
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Only this fsync policy: compound, group, fast-commit, ijournal (may be repeated)
    #[arg(long = "policy", value_name = "POLICY")]
    policies: Vec<String>,
    /// Only this scheduler: direct, epoch (may be repeated)
    #[arg(long = "scheduler", value_name = "SCHEDULER")]
    schedulers: Vec<String>,
    /// Only jobs whose names contain this, such as sqlite-delete-extra or names-
    #[arg(long, default_value = "", value_name = "PART")]
    only: String,
    /// Argument for `fjord mount` (may be repeated)
    #[arg(long = "mount-arg", value_name = "ARG", allow_hyphen_values = true)]
    mount_args: Vec<String>,
    /// Count failed rounds and continue, each time with a new image
    #[arg(long)]
    keep_going: bool,
    /// Use Linux's ext4 with its shutdown ioctl instead (a check of the checker)
    #[arg(long, conflicts_with_all = ["policies", "schedulers", "only", "mount_args", "keep_going"])]
    kernel: bool,
    /// Build fjord without optimisation, with overflow checks
    #[arg(long)]
    debug: bool,
    /// Keep the image of a failed round here
    #[arg(long, default_value = "target/programs-failed")]
    keep: PathBuf,
}

/// Which of the known names are wanted: all, or those given.
fn wanted<'a>(what: &str, known: &[&'a str], given: &[String]) -> Result<Vec<&'a str>> {
    if let Some(odd) = given.iter().find(|name| !known.contains(&name.as_str())) {
        anyhow::bail!("there is no {what} {odd}; known: {}", known.join(", "));
    }
    let is_wanted = |name: &&str| given.is_empty() || given.iter().any(|given| given == name);
    Ok(known.iter().copied().filter(is_wanted).collect())
}

/// Runs the kills.
pub(crate) fn run(args: &Kill9ProgramsArgs) -> Result<()> {
    let set =
        |name: &str| features::by_name(name).with_context(|| format!("no feature set {name}"));
    if args.kernel {
        for name in ["default", "fast_commit"] {
            let summary = programs::on_linux(set(name)?, args.rounds, args.seed)
                .with_context(|| format!("Linux itself, {name}, seed {}", args.seed))?;
            report(&format!("Linux, {name}"), &summary);
        }
        return Ok(());
    }
    let names: Vec<&str> = POLICIES.iter().map(|policy| policy.name).collect();
    let policies = wanted("policy", &names, &args.policies)?;
    let schedulers = wanted("scheduler", SCHEDULERS, &args.schedulers)?;
    let program = crate::mounted::build(args.debug)?;
    let mut failed = 0;
    for policy in POLICIES.iter().filter(|policy| policies.contains(&policy.name)) {
        for scheduler in &schedulers {
            let options = programs::Options {
                rounds: args.rounds,
                seed: args.seed,
                set: set(policy.set)?,
                program: program.clone(),
                mount_args: [policy.mount_args(scheduler), args.mount_args.clone()].concat(),
                tune_args: policy.tune_args.iter().map(|arg| (*arg).to_owned()).collect(),
                linux_recovers: policy.linux_recovers,
                with_writeback_cache: true,
                jobs: programs::jobs,
                only: args.only.clone(),
                keep_going: args.keep_going,
                keep_failed_in: Some(crate::workspace().join(&args.keep)),
            };
            let name = format!("{}, {scheduler}, seed {}", policy.name, args.seed);
            let summary = programs::run(&options).with_context(|| name.clone())?;
            report(&name, &summary);
            failed += summary.failed.len();
        }
    }
    ensure!(failed == 0, "{failed} rounds failed");
    Ok(())
}

fn report(name: &str, summary: &programs::Summary) {
    for failed in &summary.failed {
        println!("FAILED {name}: {failed}");
    }
    println!(
        "{name}: {} kills survived, {} failed; {} steps acknowledged, {} lost as SQLite permits",
        summary.rounds,
        summary.failed.len(),
        summary.counts.acknowledged,
        summary.counts.lost_as_permitted
    );
}
