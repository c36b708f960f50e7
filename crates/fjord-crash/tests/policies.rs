//! The explorer's workloads under each fsync policy, by what only that policy writes, and with several threads.

use std::collections::BTreeMap;

use fjord::{FsyncPolicyKind, MountOptions, Scheduler};
use fjord_crash::base::{FAST_COMMIT, FEATURES, Features, GROUPS};
use fjord_crash::campaign::{self, Plan};
use fjord_crash::explore::Config;
use fjord_crash::journal_how::JOURNALS;
use fjord_crash::record::DeviceKind;
use fjord_crash::workloads::Family;
use fjord_testkit::size::pick;
use support::{DATA, PIPELINES, passes};

mod support;

/// Fast commits: what fjord logs, Linux and e2fsck replay to the same tree.
#[test]
fn fast_commits_are_replayed_alike() {
    let options = MountOptions { fsync: FsyncPolicyKind::FastCommit, ..MountOptions::default() };
    let config = Config { compare_every: 40, inner_every: 60, ..Config::new(options) };
    let mut plan = Plan::new(
        &[Family::RenameToSub, Family::CreateDelete, Family::DeepLeaf, Family::Ace2],
        config,
    );
    plan.features = FAST_COMMIT.to_vec();
    plan.data = DATA.to_vec();
    plan.devices = DeviceKind::ALL.to_vec();
    plan.pipelines = PIPELINES.to_vec();
    plan.journals = JOURNALS.to_vec();
    plan.sample_every = 613 * pick(8, 2, 1);
    passes(&plan);
    (plan.families, plan.sample_every) = (vec![Family::Fsyncs], 1);
    plan.workloads_max = Some(6);
    plan.config.compare_every = 5;
    let report = passes(&plan);
    assert!(report.judged.fast_commits > 20, "{report:?}");
}

/// The group policy on images with many groups, some of whose fsyncs commit a few of them.
#[test]
fn groups_commit_alone() {
    let options = MountOptions { fsync: FsyncPolicyKind::Group, ..MountOptions::default() };
    let config = Config { compare_every: 100, inner_every: 300, ..Config::new(options) };
    let mut plan = Plan::new(&[Family::Groups], config);
    plan.features = GROUPS.to_vec();
    plan.data = DATA.to_vec();
    plan.devices = DeviceKind::ALL.to_vec();
    plan.pipelines = PIPELINES.to_vec();
    plan.journals = JOURNALS.to_vec();
    plan.workloads_max = Some(16);
    let report = passes(&plan);
    assert!(report.partial_commits >= 10 && report.fallbacks > 0, "{report:?}");
}

/// Fsync by i-transactions, with one area and with three, under every configuration; what Linux
/// and e2fsck must not touch, they refuse.
#[test]
fn i_transactions() {
    let fsync = FsyncPolicyKind::Ijournal;
    let options = MountOptions { fsync, ..MountOptions::default() };
    let config = Config { compare_every: 60, inner_every: 24, ..Config::new(options) };
    let mut plan = Plan::new(
        &[Family::RenameToSub, Family::CreateDelete, Family::DeepLeaf, Family::Ace1],
        config.clone(),
    );
    let with_areas = |count| FEATURES.into_iter().map(move |set| set.with_areas(count));
    plan.features = with_areas(1).chain(with_areas(3)).collect();
    plan.data = DATA.to_vec();
    plan.devices = DeviceKind::ALL.to_vec();
    plan.pipelines = PIPELINES.to_vec();
    plan.journals = JOURNALS.to_vec();
    plan.sample_every = 3 * pick(16, 2, 1);
    let report = campaign::run(&plan, &Default::default(), &|_| ()).expect("the explorer runs");
    println!("{} workloads, {} states, {:?}", report.workloads, report.states, report.judged);
    assert!(report.findings.is_empty(), "{}", report.findings[0]);
    assert!(report.judged.marked > 0 && report.judged.compared > 0, "{report:?}");
}

/// A policy with the feature sets for it: one over the direct scheduler, one over the other.
const POLICIES: [(FsyncPolicyKind, [Features; 2]); 4] = [
    (FsyncPolicyKind::Compound, [FEATURES[0], FEATURES[0]]),
    (FsyncPolicyKind::Group, [GROUPS[0], GROUPS[0]]),
    (FsyncPolicyKind::FastCommit, [FAST_COMMIT[0], FAST_COMMIT[0]]),
    (FsyncPolicyKind::Ijournal, [FEATURES[0].with_areas(1), FEATURES[0].with_areas(3)]),
];

/// Commits of several threads: some images under every pipeline, policy, data mode, kind of device
/// and scheduler.
#[test]
fn commits_overlap_under_every_pipeline() {
    let mut covered = BTreeMap::new();
    for (fsync, features) in POLICIES {
        for (scheduler, set) in [Scheduler::Direct, Scheduler::Epoch].into_iter().zip(features) {
            let options = MountOptions { fsync, scheduler, ..MountOptions::default() };
            let mut config = Config { compare_every: 30, inner_every: 60, ..Config::new(options) };
            config.features = set;
            config.budget.subsets_max = 4;
            config.budget.images_max = Some(36);
            let mut plan = Plan::new(&[Family::Overlaps], config);
            (plan.data, plan.devices) = (DATA.to_vec(), DeviceKind::ALL.to_vec());
            plan.pipelines = PIPELINES.to_vec();
            plan.journals = JOURNALS.to_vec();
            plan.workloads_max = Some(DATA.len() * DeviceKind::ALL.len() * PIPELINES.len());
            let report = campaign::run(&plan, &Default::default(), &|_| ()).expect("it runs");
            let (states, overlapped) = (report.all_states(), report.overlapped_commits);
            println!("{fsync:?}, {scheduler:?}: {states} states, {overlapped} overlapped commits");
            assert!(report.findings.is_empty(), "{}", report.findings[0]);
            assert!(report.states > 100 && report.judged.compared + report.judged.marked > 0);
            covered.extend(report.covered);
        }
    }
    for (combination, covered) in &covered {
        assert!(covered.workloads > 0 && covered.states > 0, "{combination:?}: {covered:?}");
        let is_serial = combination.pipeline == "serial";
        // fbarrier's commits overlap in serial mode, too, where the device keeps their order.
        let overlaps = !is_serial || combination.scheduler == "epoch";
        assert!(overlaps || covered.overlapped_commits == 0, "{combination:?}: {covered:?}");
    }
    let combinations = PIPELINES.len() * POLICIES.len() * DATA.len() * DeviceKind::ALL.len() * 2;
    assert_eq!(covered.len(), combinations, "{covered:?}");
    for policy in ["compound", "group"] {
        for device in DeviceKind::ALL {
            for scheduler in ["direct", "epoch"] {
                let dual = covered.iter().filter(|(combination, _)| {
                    combination.pipeline == "dual"
                        && combination.policy == policy
                        && combination.device == device.name()
                        && combination.scheduler == scheduler
                });
                let overlapped: u64 = dual.map(|(_, covered)| covered.overlapped_commits).sum();
                assert!(overlapped > 0, "{policy}, {device:?}, {scheduler}: no commits overlap");
            }
        }
    }
}

/// Several threads, shared directories and random operations: under every policy, data mode and
/// count of areas, some images of each, each with another pipeline, device and scheduler.
#[test]
fn threads_hold_under_every_policy() {
    for (fsync, features) in POLICIES {
        for (scheduler, set) in [Scheduler::Direct, Scheduler::Epoch].into_iter().zip(features) {
            let options = MountOptions { fsync, scheduler, ..MountOptions::default() };
            let mut config = Config { compare_every: 25, inner_every: 30, ..Config::new(options) };
            config.features = set;
            config.budget.subsets_max = 4;
            config.budget.images_max = Some(25);
            let families = [Family::Threads, Family::SharedDirs, Family::Random, Family::Fsyncs];
            let mut plan = Plan::new(&families, config);
            (plan.data, plan.devices) = (DATA.to_vec(), DeviceKind::ALL.to_vec());
            plan.pipelines = PIPELINES.to_vec();
            plan.journals = JOURNALS.to_vec();
            plan.workloads_max = Some(16);
            let report = campaign::run(&plan, &Default::default(), &|_| ()).expect("it runs");
            println!(
                "{fsync:?}, {scheduler:?}: {} states, {:?}",
                report.all_states(),
                report.judged
            );
            assert!(report.findings.is_empty(), "{}", report.findings[0]);
            assert!(report.states > 100 && report.judged.compared + report.judged.marked > 0);
        }
    }
}

/// Scenarios of the paper on iJournaling (section 6.4).
#[test]
fn the_scenarios_of_the_ijournaling_paper() {
    let fsync = FsyncPolicyKind::Ijournal;
    let options = MountOptions { fsync, ..MountOptions::default() };
    let mut config = Config { inner_every: 60, ..Config::new(options) };
    config.features = config.features.with_areas(3);
    config.budget.subsets_max = 3;
    // All images of the thousand files take a minute: `cargo xtask crash --workload thousand-files`.
    let scenarios = [Family::AppendFar, Family::DeepLeaf, Family::TenThreads];
    let mut thousand = config.clone();
    thousand.budget.images_max = Some(60);
    scenarios_hold(&[Family::ThousandFiles], thousand);
    scenarios_hold(&scenarios, config);
}

fn scenarios_hold(scenarios: &[Family], config: Config) {
    let mut plan = Plan::new(scenarios, config);
    plan.sample_every = 1;
    let report = campaign::run(&plan, &Default::default(), &|_| ()).expect("the explorer runs");
    println!("{} workloads, {} states, {:?}", report.workloads, report.states, report.judged);
    assert!(report.findings.is_empty(), "{}", report.findings[0]);
}
