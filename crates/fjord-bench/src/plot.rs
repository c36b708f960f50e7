//! The latency distribution as an SVG: one curve per target, the share of operations that are
//! faster than the latency on the (logarithmic) horizontal axis.

use std::path::Path;

use plotters::prelude::*;

use crate::error::{BenchError, Result};
use crate::report::{CaseResult, Report};

const PANEL_SIZE: (u32, u32) = (900, 420);
/// Quantiles at which a curve is drawn.
const POINT_COUNT: u32 = 400;
const COLORS: [RGBColor; 8] = [
    RGBColor(0x33, 0x33, 0x33),
    RGBColor(0x88, 0x88, 0x88),
    RGBColor(0x00, 0x6d, 0x9c),
    RGBColor(0x00, 0xa0, 0x8a),
    RGBColor(0xd1, 0x49, 0x5b),
    RGBColor(0xed, 0xae, 0x49),
    RGBColor(0x7b, 0x4f, 0x9d),
    RGBColor(0x6b, 0x8e, 0x23),
];

/// The points (latency in µs, percent of operations) of one curve.
fn curve(case: &CaseResult) -> Vec<(f64, f64)> {
    let Some(histogram) = &case.histogram else { return Vec::new() };
    (0..=POINT_COUNT)
        .map(|i| f64::from(i) / f64::from(POINT_COUNT))
        .map(|quantile| (histogram.value_at_quantile(quantile) as f64 / 1e3, quantile * 100.0))
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
        if panels.is_empty() {
            return Ok(());
        }
        let failed = |error: String| BenchError::Io {
            what: format!("draw {}", path.display()),
            source: std::io::Error::other(error),
        };
        let size = (PANEL_SIZE.0, PANEL_SIZE.1 * panels.len() as u32);
        let root = SVGBackend::new(path, size).into_drawing_area();
        root.fill(&WHITE).map_err(|error| failed(error.to_string()))?;
        for (area, panel) in root.split_evenly((panels.len(), 1)).iter().zip(&panels) {
            draw_panel(area, panel).map_err(|error| failed(error.to_string()))?;
        }
        root.present().map_err(|error| failed(error.to_string()))
    }
}

fn same_panel(panel: &[&CaseResult], case: &CaseResult) -> bool {
    panel.first().is_some_and(|first| {
        (&first.workload, first.thread_count) == (&case.workload, case.thread_count)
    })
}

fn draw_panel<DB: DrawingBackend>(
    area: &DrawingArea<DB, plotters::coord::Shift>,
    panel: &[&CaseResult],
) -> std::result::Result<(), DrawingAreaErrorKind<DB::ErrorType>> {
    let curves: Vec<Vec<(f64, f64)>> = panel.iter().map(|case| curve(case)).collect();
    let low = curves.iter().flatten().map(|point| point.0).fold(f64::INFINITY, f64::min).max(0.1);
    let high = panel
        .iter()
        .filter_map(|case| case.latency.as_ref())
        .map(|l| l.p99_9_us)
        .fold(low * 10.0, f64::max);
    let title = panel.first().map_or(String::new(), |case| {
        format!(
            "{}, {} thread(s): share of operations faster than …",
            case.workload, case.thread_count
        )
    });
    let mut chart = ChartBuilder::on(area)
        .caption(title, ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(50)
        .build_cartesian_2d((low * 0.9..high * 1.1).log_scale(), 0f64..100f64)?;
    chart
        .configure_mesh()
        .x_desc("latency in µs")
        .y_desc("% of operations")
        .light_line_style(WHITE)
        .draw()?;
    for (index, (case, points)) in panel.iter().zip(curves).enumerate() {
        let color = COLORS[index % COLORS.len()];
        let visible = points.into_iter().filter(|point| point.0 <= high * 1.1);
        chart
            .draw_series(LineSeries::new(visible, color.stroke_width(2)))?
            .label(case.target.clone())
            .legend(move |(x, y)| {
                PathElement::new(vec![(x, y), (x + 18, y)], color.stroke_width(2))
            });
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::LowerRight)
        .background_style(WHITE)
        .border_style(BLACK.mix(0.3))
        .draw()
}
