//! A quick selection of the explorer's workloads, and proof that it bites.

use std::sync::Arc;

use fjord::{FsyncPolicyKind, MountOptions, Scheduler};
use fjord_crash::base::{FEATURES, Features};
use fjord_crash::campaign::{self, Plan};
use fjord_crash::check::Kind;
use fjord_crash::explore::{Config, Workload, explore, explore_recording};
use fjord_crash::journal_how::JOURNALS;
use fjord_crash::ops;
use fjord_crash::record::DeviceKind;
use fjord_crash::recording::record;
use fjord_crash::report::Report;
use fjord_crash::workloads::Family;
use fjord_testkit::size::pick;
use support::{DATA, PIPELINES, passes};

mod support;

fn run(config: &Config, text: &str) -> Report {
    let ops = ops::parse(text).expect("operations");
    let workload = Workload::new(Vec::new(), ops);
    explore(config, &workload, &Default::default()).expect("the explorer runs")
}

const PROMISES: &str = "create /a; append /a 9000; fsync /a; mkdir /d; rename /a /d/b; \
                        write /d/b 100 6000; fdatasync /d/b; create /c; append /c 3000; \
                        unlink /d/b; fsync /c; sync";

#[test]
fn promises_are_kept() {
    let config =
        Config { compare_every: 6, inner_every: 3, ..Config::new(MountOptions::default()) };
    let report = run(&config, PROMISES);
    println!("{report:?}");
    assert!(report.findings.is_empty(), "{}", report.findings[0]);
    assert!(
        report.states > 12 && report.inner_states > 20 && report.judged.compared > 0,
        "{report:?}"
    );
}

/// Without flushes promises must be lost: the explorer bites.
#[test]
fn without_flushes_promises_are_lost() {
    let config = Config::new(MountOptions { barrier: false, ..MountOptions::default() });
    let report = run(&config, PROMISES);
    println!("{report:?}");
    assert!(!report.findings.is_empty(), "nothing found in {} states", report.states);
}

/// One operation and one sync, every way, on the plainest file system.
#[test]
fn ace_of_length_1() {
    let config =
        Config { compare_every: 40, inner_every: 24, ..Config::new(MountOptions::default()) };
    let mut plan = Plan::new(&[Family::Ace1], config);
    plan.sample_every = pick(16, 2, 1);
    passes(&plan);
}

/// Two operations: a sample, each under another configuration.
#[test]
fn sample_under_all_configurations() {
    let config =
        Config { compare_every: 100, inner_every: 40, ..Config::new(MountOptions::default()) };
    let mut plan = Plan::new(
        &[Family::RenameToSub, Family::CreateDelete, Family::DeepLeaf, Family::Ace2],
        config,
    );
    everywhere(&mut plan);
    plan.sample_every = 157 * pick(16, 2, 1);
    passes(&plan);
}

/// The same, and barriers, over the epoch scheduler: on each kind of device.
#[test]
fn sample_over_the_scheduler() {
    let options = MountOptions { scheduler: Scheduler::Epoch, ..MountOptions::default() };
    let config = Config { compare_every: 100, inner_every: 32, ..Config::new(options) };
    let families = [Family::Barriers, Family::RenameToSub, Family::CreateDelete, Family::Ace2];
    let mut plan = Plan::new(&families, config);
    plan.features = FEATURES.to_vec();
    plan.data = DATA.to_vec();
    plan.devices = DeviceKind::ALL.to_vec();
    plan.pipelines = PIPELINES.to_vec();
    plan.journals = JOURNALS.to_vec();
    plan.sample_every = 331 * pick(16, 2, 1);
    passes(&plan);
    (plan.families, plan.sample_every) = (vec![Family::Barriers], pick(16, 4, 2));
    passes(&plan);
}

/// Deep trees, full logs, long truncations: some images of each, under every policy.
#[test]
fn edges_hold() {
    let policies = [
        FsyncPolicyKind::Compound,
        FsyncPolicyKind::Group,
        FsyncPolicyKind::FastCommit,
        FsyncPolicyKind::Ijournal,
    ];
    for fsync in policies {
        let options = MountOptions { fsync, ..MountOptions::default() };
        let mut config = Config { compare_every: 25, inner_every: 50, ..Config::new(options) };
        config.budget.subsets_max = 4;
        config.budget.images_max = Some(36);
        if fsync == FsyncPolicyKind::Ijournal {
            // Their images carry the mark, so nobody else recovers them.
            config.features = config.features.with_areas(1);
        }
        let plan = Plan::new(&[Family::Edges], config);
        let report = campaign::run(&plan, &Default::default(), &|_| ()).expect("it runs");
        println!("{fsync:?}: {} states, {:?}", report.all_states(), report.judged);
        assert!(report.findings.is_empty(), "{}", report.findings[0]);
        assert!(report.states > 100 && report.judged.compared + report.judged.marked > 0);
    }
}

/// Somebody wants it to end: what was tried until then is told.
#[test]
fn a_campaign_that_is_stopped_tells_what_it_has() {
    let shared: std::sync::Arc<fjord_crash::explore::Shared> = Default::default();
    let plan = Plan::new(&[Family::Random], Config::new(MountOptions::default()));
    let stop = |event: campaign::Event<'_>| {
        if matches!(event, campaign::Event::Done(_)) {
            shared.stop.store(true, std::sync::atomic::Ordering::Relaxed);
        }
    };
    let report = campaign::run(&plan, &shared, &stop).expect("it runs");
    assert!(report.workloads >= 1 && report.states > 0, "{report:?}");
}

/// A recording that cannot be kept does not cost the finding that it is of.
#[test]
fn a_finding_outlives_a_full_disk() {
    let options = MountOptions { barrier: false, ..MountOptions::default() };
    let mut plan = Plan::new(&[Family::Threads], Config::new(options));
    plan.save = Some("/proc/no-such-place".into());
    assert!(plan.check_save().is_err());
    let untold = std::sync::atomic::AtomicU64::new(0);
    let count = |event: campaign::Event<'_>| {
        if matches!(event, campaign::Event::NotSaved(_)) {
            untold.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        }
    };
    let report = campaign::run(&plan, &Default::default(), &count).expect("it runs");
    assert!(!report.findings.is_empty() && untold.into_inner() > 0, "{report:?}");
}

/// Long random sequences, some of them by several threads, each under another configuration,
/// without and with the scheduler.
#[test]
fn random_sequences() {
    for scheduler in [Scheduler::Direct, Scheduler::Epoch] {
        let options = MountOptions { scheduler, ..MountOptions::default() };
        let config = Config { compare_every: 100, inner_every: 300, ..Config::new(options) };
        let mut plan = Plan::new(&[Family::Random, Family::Threads], config);
        everywhere(&mut plan);
        plan.workloads_max = Some(pick(2, 4, 6));
        passes(&plan);
    }
}

/// All features, data modes, devices and pipelines in turn.
fn everywhere(plan: &mut Plan) {
    plan.features = FEATURES.to_vec();
    plan.data = DATA.to_vec();
    plan.devices = DeviceKind::ALL.to_vec();
    plan.pipelines = PIPELINES.to_vec();
    plan.journals = JOURNALS.to_vec();
}

/// Compound commits keep metadata in the order of the calls; commits of groups do not, and judged by
/// the same rule they are found out.
#[test]
fn the_order_of_metadata_is_looked_at() {
    let each = |text: &str| (0..6).map(|n| text.replace('N', &n.to_string())).collect::<String>();
    let setup = each("mkdir /GN; create /GN/a; append /GN/a 9000; ");
    let changes = each("chmod /GN/a 600; ") + "fsync /G5/a";
    let parse = |text: &str| ops::parse(text).expect("operations");
    let workload = Workload::new(parse(&setup), parse(&changes));
    let explored = |recorded: FsyncPolicyKind| {
        let options = |fsync| MountOptions { fsync, ..MountOptions::default() };
        let mut config = Config::new(options(recorded));
        config.features = Features::by_name("groups").expect("a feature set");
        let run = record(&config, &workload).expect("a run");
        let config = Config { options: options(FsyncPolicyKind::Compound), ..config };
        let shared = Default::default();
        explore_recording(&config, &workload, Arc::new(run.recording), &shared, None).expect("it")
    };
    let report = explored(FsyncPolicyKind::Compound);
    assert!(report.findings.is_empty() && report.states > 3, "{}", report.findings[0]);
    let report = explored(FsyncPolicyKind::Group);
    assert_eq!(report.findings.first().map(|found| found.kind()), Some(Kind::OrderBroken));
}
