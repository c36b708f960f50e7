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

/// The size was stored at once, what lies below it was still only in memory: zeros in place of
/// data, or what a truncation had taken away.
#[test]
fn a_size_does_not_show_what_is_not_there_yet() {
    let setup = "create /a; append /a 9000";
    passes(setup, "truncate /a 5000; truncate /a 8100; create /b; fsync /b");
    passes(setup, "append /a 20000; truncate /a 40000; create /b; fsync /b");
    passes(setup, "append /a 20000; truncate /a 15000; create /b; fsync /b");
    passes(setup, "append /a 6000; fallocate /a plain 20480 20000; create /b; fsync /b");
    passes(setup, "truncate /a 5000; fallocate /a zero 20480 20000; create /b; fsync /b");
}

/// An overwrite in place went to blocks that the committed tree still showed elsewhere.
#[test]
fn a_shifted_range_is_committed_before_it_is_overwritten() {
    let setup = "create /foo; append /foo 20000";
    passes(setup, "fallocate /foo insert 4096 4096; write /foo 3000 6000; fdatasync /foo");
    passes(setup, "fallocate /foo collapse 4096 4096; write /foo 3000 6000; sync");
}

/// Pages of a range were written before those below it, and took the on-disk size along.
#[test]
fn allocating_a_range_leaves_no_hole_below_the_size() {
    let setup = "create /a; mkdir /D";
    passes(setup, "append /a 23534; fallocate /a keep 5969 14514; fsync /D");
    passes(
        "mkdir /D; mkdir /D/E; create /D/e; link /D/e /D/E/a",
        "append /D/E/a 23534; fallocate /D/E/a keep 5969 14514; fsync /D",
    );
}
