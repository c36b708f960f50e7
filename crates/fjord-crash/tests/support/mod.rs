//! What the campaigns of several test programs share.

use fjord::{CommitPipeline, DataMode};
use fjord_crash::campaign::{self, Plan};
use fjord_crash::report::Report;

/// All data modes.
pub(crate) const DATA: [DataMode; 3] = [DataMode::Ordered, DataMode::Journal, DataMode::Writeback];

/// All pipelines.
pub(crate) const PIPELINES: [CommitPipeline; 2] = [CommitPipeline::Serial, CommitPipeline::Dual];

/// Runs a campaign that must find nothing, and must have compared something.
pub(crate) fn passes(plan: &Plan) -> Report {
    let started = std::time::Instant::now();
    let report = campaign::run(plan, &Default::default(), &|_| ()).expect("the explorer runs");
    println!(
        "{} workloads, {} states, {} inside recovery, {:?}, {:.1} s",
        report.workloads,
        report.states,
        report.inner_states,
        report.judged,
        started.elapsed().as_secs_f64()
    );
    assert!(report.findings.is_empty(), "{}", report.findings[0]);
    assert!(report.states > report.workloads && report.inner_states > 0, "{report:?}");
    assert!(report.judged.compared > 0, "{report:?}");
    report
}
