//! What the papers report, in their words where they give no number, to stand beside what was
//! measured. Their machines are others: shapes and ratios compare, milliseconds do not.

use super::Experiment;
use super::plan::{Load, Setting};
use crate::options::Target;

/// MB/s of fs_mark without and with fast commits, by unit (rows) and file (columns): 4, 8, 32 KiB
/// and 32, 128, 256 KiB.
const WITHOUT: [[f64; 3]; 3] = [[0.27, 0.25, 0.24], [0.45, 0.51, 0.46], [2.15, 2.23, 2.28]];
const WITH: [[f64; 3]; 3] = [[0.74, 1.42, 1.94], [1.52, 1.88, 2.48], [1.8, 4.29, 7.38]];

/// The method of the papers that a target follows.
fn method(target: &Target) -> &'static str {
    match target {
        Target::Kernel => "compound",
        Target::KernelFastCommit => "fast-commit",
        _ => target.policy().map_or("", |policy| policy.name()),
    }
}

/// The paper's figure for one row.
pub(super) fn figure(
    experiment: Experiment,
    device: &str,
    target: &Target,
    setting: &Setting,
) -> Option<String> {
    let method = method(target);
    // The papers' desktop has an SSD, the phones have eMMC.
    let desktop = matches!(device, "disk" | "plain-ssd");
    let text = match (experiment, setting.load) {
        (Experiment::Ijournaling6, _) if desktop => match method {
            "compound" => "p95 > 3500 ms",
            "ijournal" => "p95 < 200 ms",
            _ => return None,
        },
        (Experiment::Ijournaling7, Load::Stream { mb_per_s: 500 }) if method == "compound" => {
            "not before the writer ends"
        }
        (Experiment::Ijournaling8, _) if desktop && method == "ijournal" => "< 200 ms in both",
        (Experiment::Ijournaling9, _) if method == "ijournal" => match device {
            "zram" => "linear with an area per core",
            _ => "linear up to 4 cores",
        },
        (Experiment::Pbg2 | Experiment::Pbg3, _) if method == "group" => {
            match setting.setup.flex_group_count {
                Some(1) => "75 % less (4.0 ×)",
                _ => "52 % less (2.1 ×)",
            }
        }
        (Experiment::FastCommitTable, Load::FsMark { unit_kib, file_kib }) => {
            let place = |sizes: [usize; 3], size| sizes.iter().position(|s| *s == size);
            let (row, column) = (place([4, 8, 32], unit_kib)?, place([32, 128, 256], file_kib)?);
            let table = match method {
                "compound" => WITHOUT,
                "fast-commit" => WITH,
                _ => return None,
            };
            return Some(format!("{:.2} MB/s", table[row][column]));
        }
        _ => return barriers(experiment, device, target).map(str::to_owned),
    };
    Some(text.into())
}

/// Section 6 of the paper on barriers: EXT4-DR is the kernel, BFS-DR dual mode, BFS-OD that with order only.
fn barriers(experiment: Experiment, device: &str, target: &Target) -> Option<&'static str> {
    let how = target.how();
    let is_kernel = *target == Target::Kernel;
    Some(match (experiment, device) {
        (Experiment::BarrierTable2, "ufs") if how.dual => "mean 60 % less, p99.99 50 %",
        (Experiment::BarrierTable2, "plain-ssd") if how.dual => "mean 40 % less, p99.99 20 %",
        (Experiment::BarrierTable2, "supercap-ssd") if how.dual => "mean 40 % less, p99.99 70 %",
        (Experiment::Barrier11, _) if is_kernel => "2: after the data, after the commit",
        (Experiment::Barrier11, _) if how.dual && how.order => "none of its own",
        (Experiment::Barrier12, _) if is_kernel => "1",
        (Experiment::Barrier12, _) if how.dual && how.order => "full",
        (Experiment::Barrier12, _) if how.dual => "up to 2",
        (Experiment::Barrier14, "plain-ssd") if how.dual && how.order => {
            "varmail 36 ×, OLTP-insert 43 × durable EXT4"
        }
        (Experiment::Barrier14, "plain-ssd") if how.dual => "varmail 1.6 × EXT4",
        (Experiment::Barrier14, "supercap-ssd") if how.dual && !how.order => "varmail 1.1 × EXT4",
        (Experiment::Barrier13, "plain-ssd") if how.dual => "2 × EXT4 with any number of cores",
        (Experiment::Barrier13, "supercap-ssd") if how.dual => "1.3 × EXT4, from six cores on",
        _ => return None,
    })
}

/// What the paper says of the mean gain over all settings.
pub(super) fn mean_gain(experiment: Experiment, target: &Target) -> Option<&'static str> {
    let fits = experiment == Experiment::FastCommitTable && method(target) == "fast-commit";
    fits.then_some("3.8 × (+280 %)")
}
