//! Power cuts while a file system grows: each leaves the old size, the new one or one between them, clean
//! to e2fsck and to Linux, with all that was promised.

use fjord::{FsyncPolicyKind, MountOptions, Scheduler};
use fjord_crash::base::GROWING;
use fjord_crash::explore::{Config, Workload, explore};
use fjord_crash::ops;

/// A growth within the last group and the descriptor block, then over blocks of descriptors, between
/// files that are promised, and that lie in new groups after it.
const GROWTH: &str = "create /a; append /a 9000; fsync /a; grow 100000; append /a 70000; fsync /a; \
                      mkdir /d; create /d/b; append /d/b 20000; grow 9000000; fsync /d/b; \
                      append /d/b 900000; create /c; append /c 400000; fsync /c; unlink /a; \
                      fsync /d/b; grow 500000; sync";

fn grows(policy: FsyncPolicyKind) {
    for (number, features) in GROWING.into_iter().enumerate() {
        // Fast commits are a feature. Without flex groups the log lies in pieces, and the judge does not
        // find the mark of i-transactions.
        let is_meant = match policy {
            FsyncPolicyKind::FastCommit => features.name == "growing",
            FsyncPolicyKind::Ijournal => features.name != "growing-plain",
            _ => true,
        };
        if !is_meant {
            continue;
        }
        let scheduler = if number % 2 == 0 { Scheduler::Direct } else { Scheduler::Epoch };
        let options = MountOptions { fsync: policy, scheduler, ..MountOptions::default() };
        let mut config = Config { compare_every: 8, inner_every: 60, ..Config::new(options) };
        config.features = features;
        if policy == FsyncPolicyKind::Ijournal {
            config.features = config.features.with_areas(1);
        }
        config.budget.subsets_max = 6;
        config.budget.images_max = Some(500);
        let workload = Workload::new(Vec::new(), ops::parse(GROWTH).expect("operations"));
        let report = explore(&config, &workload, &Default::default()).expect("the explorer runs");
        println!("{} {policy:?}: {} states, {:?}", features.name, report.states, report.judged);
        assert!(report.findings.is_empty(), "{}", report.findings[0]);
        assert!(report.states > 60, "{report:?}");
        assert!(report.judged.compared + report.judged.marked > 0, "{report:?}");
    }
}

#[test]
fn compound() {
    grows(FsyncPolicyKind::Compound);
}

#[test]
fn group() {
    grows(FsyncPolicyKind::Group);
}

#[test]
fn fast_commit() {
    grows(FsyncPolicyKind::FastCommit);
}

#[test]
fn ijournal() {
    grows(FsyncPolicyKind::Ijournal);
}
