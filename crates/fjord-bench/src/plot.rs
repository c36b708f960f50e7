//! The latency distribution as an SVG: one curve per target, the share of operations that are
//! faster than the latency on the (logarithmic) horizontal axis.

use std::path::Path;

use hdrhistogram::Histogram;

use crate::chart::{self, Curve, Panel};
use crate::error::Result;
use crate::report::{CaseResult, Report};

/// Quantiles at which a curve is drawn.
const POINT_COUNT: u32 = 400;

/// The points (latency in units of `unit_ns`, percent of operations) of one curve.
pub(crate) fn distribution(histogram: &Histogram<u64>, unit_ns: f64) -> Vec<(f64, f64)> {
    (0..=POINT_COUNT)
        .map(|i| f64::from(i) / f64::from(POINT_COUNT))
        .map(|quantile| (histogram.value_at_quantile(quantile) as f64 / unit_ns, quantile * 100.0))
        .collect()
}

impl Report {
    /// Writes the latency distributions to an SVG file, one panel per workload. Without latencies
    /// nothing is written.
    pub fn write_latency_svg(&self, path: &Path) -> Result<()> {
        let mut panels: Vec<Vec<&CaseResult>> = Vec::new();
        for case in self.cases.iter().filter(|case| case.histogram.is_some()) {
            match panels.last_mut() {
                Some(panel) if same_panel(panel, case) => panel.push(case),
                _ => panels.push(vec![case]),
            }
        }
        let panels: Vec<Panel> = panels.iter().map(|cases| panel(cases)).collect();
        chart::write_svg(path, &panels)
    }
}

fn same_panel(panel: &[&CaseResult], case: &CaseResult) -> bool {
    panel.first().is_some_and(|first| {
        (&first.workload, first.thread_count) == (&case.workload, case.thread_count)
    })
}

fn panel(cases: &[&CaseResult]) -> Panel {
    let slowest = cases.iter().filter_map(|case| case.latency.as_ref());
    let title = cases.first().map_or(String::new(), |case| {
        format!(
            "{}, {} thread(s): share of operations faster than …",
            case.workload, case.thread_count
        )
    });
    let curve = |case: &&CaseResult| Curve {
        label: case.target.clone(),
        points: case.histogram.as_ref().map_or(Vec::new(), |h| distribution(h, 1e3)),
    };
    Panel {
        title,
        x_label: "latency in µs".into(),
        y_label: "% of operations".into(),
        log_x: true,
        x_max: Some(slowest.map(|latency| latency.p99_9_us * 1.1).fold(1.0, f64::max)),
        curves: cases.iter().map(curve).collect(),
        ..Panel::default()
    }
}
