//! What the explorer has found in the engine, so that it stays mended.

use fjord::{DataMode, MountOptions};
use fjord_crash::explore::{Config, Workload, explore};
use fjord_crash::ops;
use fjord_crash::record::DeviceKind;

fn passes(setup: &str, text: &str) {
    for data in [DataMode::Ordered, DataMode::Writeback, DataMode::Journal] {
        for device in DeviceKind::ALL {
            let options = MountOptions { data, ..MountOptions::default() };
            let config = Config { device, ..Config::new(options) };
            let parse = |text| ops::parse(text).expect("operations");
            let workload = Workload::new(parse(setup), parse(text));
            let report = explore(&config, &workload, &Default::default()).expect("it runs");
            assert!(report.findings.is_empty(), "{}", report.findings[0]);
        }
    }
}

/// An overwrite in place went to blocks that the committed tree still showed elsewhere.
#[test]
fn a_shifted_range_is_committed_before_it_is_overwritten() {
    let setup = "create /foo; append /foo 20000";
    passes(setup, "fallocate /foo insert 4096 4096; write /foo 3000 6000; fdatasync /foo");
    passes(setup, "fallocate /foo collapse 4096 4096; write /foo 3000 6000; sync");
}
