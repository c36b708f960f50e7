//! Making a finding small.
//!
//! Owns [`minimise`]: operations are left out as long as a finding of the same kind remains.
//!
//! Runs of several threads stay as they are: they are not repeatable to the last request.
//!
//! Invariant: what comes back was found by an exploration, so its case belongs to its operations.

use anyhow::Result;

use crate::explore::{Config, Finding, Passed, Workload, explore};

/// Explorations that one finding is worth.
const TRIES_MAX: usize = 400;

/// The finding with as few operations as trying finds.
///
/// # Errors
/// The tools do not run.
pub fn minimise(config: &Config, mut finding: Finding) -> Result<Finding> {
    let config = Config { findings_max: 1, ..config.clone() };
    if !finding.workload.others.is_empty() {
        return Ok(finding);
    }
    let mut tries = 0;
    let mut width = finding.workload.ops.len().div_ceil(2);
    while width > 0 {
        let mut at = 0;
        while at < finding.workload.ops.len() && tries < TRIES_MAX {
            let mut ops = finding.workload.ops.clone();
            ops.drain(at..(at + width).min(ops.len()));
            tries += 1;
            let workload = Workload { ops, ..finding.workload.clone() };
            let report = explore(&config, &workload, &Passed::default())?;
            let same = |other: &Finding| other.problem.kind == finding.problem.kind;
            match report.findings.into_iter().find(same) {
                Some(smaller) => finding = smaller,
                None => at += width,
            }
        }
        width /= 2;
    }
    Ok(finding)
}
