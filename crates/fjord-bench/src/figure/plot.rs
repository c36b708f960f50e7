//! The figures as SVG: one panel per device.

use std::path::Path;

use plotters::coord::Shift;
use plotters::prelude::*;

use super::{Figure, LatencyReport, LatencyRow, Ordering, OrderingReport, OrderingRow};
use crate::error::{BenchError, Result};

const PANEL_SIZE: (u32, u32) = (900, 260);
/// Twenty bars, each with two lines of text above it.
const LATENCY_PANEL_SIZE: (u32, u32) = (1900, 260);
const COLORS: [RGBColor; 4] = [
    RGBColor(0xd1, 0x49, 0x5b),
    RGBColor(0xed, 0xae, 0x49),
    RGBColor(0x00, 0x6d, 0x9c),
    RGBColor(0x88, 0x88, 0x88),
];

type Drawn<DB> = std::result::Result<(), DrawingAreaErrorKind<<DB as DrawingBackend>::ErrorType>>;

/// Draws one panel for each run of rows with the same profile.
fn draw_panels<'a, R>(
    rows: &'a [R],
    profile: impl Fn(&R) -> &str,
    path: &Path,
    panel_size: (u32, u32),
    draw: impl for<'b> Fn(&DrawingArea<SVGBackend<'b>, Shift>, &[&'a R]) -> Drawn<SVGBackend<'b>>,
) -> Result<()> {
    let panels: Vec<Vec<&R>> = rows
        .chunk_by(|a, b| profile(a) == profile(b))
        .map(|panel| panel.iter().collect())
        .collect();
    let failed = |error: String| BenchError::Io {
        what: format!("draw {}", path.display()),
        source: std::io::Error::other(error),
    };
    let size = (panel_size.0, panel_size.1 * panels.len() as u32);
    let root = SVGBackend::new(path, size).into_drawing_area();
    root.fill(&WHITE).map_err(|error| failed(error.to_string()))?;
    for (area, panel) in root.split_evenly((panels.len(), 1)).iter().zip(&panels) {
        draw(area, panel).map_err(|error| failed(error.to_string()))?;
    }
    root.present().map_err(|error| failed(error.to_string()))
}

/// Bars of throughput for Figure 9, queue depth over time for Figure 10.
pub(super) fn draw_ordering(report: &OrderingReport, path: &Path) -> Result<()> {
    let over_time = report.figure == Figure::Barrier10.name();
    draw_panels(
        &report.rows,
        |row| &row.profile,
        path,
        PANEL_SIZE,
        |area, panel| match over_time {
            true => draw_depths(area, panel),
            false => draw_bars(area, panel),
        },
    )
}

/// Bars of the 99th percentile as a multiple of that alone.
pub(super) fn draw_latency(report: &LatencyReport, path: &Path) -> Result<()> {
    draw_panels(&report.rows, |row| &row.profile, path, LATENCY_PANEL_SIZE, draw_multiples)
}

/// How often as long the thread waits, by what it does and what is beside it.
fn draw_multiples<'b>(
    area: &DrawingArea<SVGBackend<'b>, Shift>,
    panel: &[&LatencyRow],
) -> Drawn<SVGBackend<'b>> {
    let Some(first) = panel.first() else { return Ok(()) };
    let high = panel.iter().map(|row| row.p99_multiple).fold(10.0, f64::max) * 6.0;
    let title = format!("{}: 99th percentile, as a multiple of that alone", first.profile);
    let mut chart = ChartBuilder::on(area)
        .caption(title, ("sans-serif", 16))
        .margin(10)
        .x_label_area_size(8)
        .y_label_area_size(50)
        .build_cartesian_2d(0f64..panel.len() as f64, (0.5f64..high).log_scale())?;
    chart.configure_mesh().disable_x_mesh().x_labels(0).light_line_style(WHITE).draw()?;
    let width = panel.len() as f64;
    chart.draw_series(LineSeries::new([(0.0, 3.0), (width, 3.0)], BLACK.stroke_width(1)))?;
    chart.draw_series(panel.iter().enumerate().map(|(index, row)| {
        let left = index as f64 + 0.15;
        let color = if row.is_bounded { COLORS[2] } else { COLORS[0] };
        Rectangle::new([(left, 0.5), (left + 0.7, row.p99_multiple)], color.filled())
    }))?;
    for (line, rise) in [(0, 4.0), (1, 2.0)] {
        chart.draw_series(panel.iter().enumerate().map(|(index, row)| {
            let text = if line == 0 { row.thread.clone() } else { row.writer.clone() };
            let place = (index as f64 + 0.05, row.p99_multiple.max(3.0) * rise);
            Text::new(text, place, ("sans-serif", 10))
        }))?;
    }
    Ok(())
}

fn color(ordering: Ordering) -> RGBColor {
    let index = Ordering::ALL.iter().position(|other| *other == ordering).unwrap_or(0);
    COLORS[index]
}

/// Throughput, one bar for each way of ordering.
fn draw_bars<DB: DrawingBackend>(
    area: &DrawingArea<DB, Shift>,
    panel: &[&OrderingRow],
) -> Drawn<DB> {
    let Some(first) = panel.first() else { return Ok(()) };
    let high = panel.iter().map(|row| row.writes_per_s).fold(1.0, f64::max) * 1.2;
    let mut chart = ChartBuilder::on(area)
        .caption(format!("{}: 4 KiB random writes per second", first.profile), ("sans-serif", 16))
        .margin(10)
        .x_label_area_size(8)
        .y_label_area_size(70)
        .build_cartesian_2d(0f64..panel.len() as f64, 0f64..high)?;
    chart.configure_mesh().disable_x_mesh().x_labels(0).light_line_style(WHITE).draw()?;
    chart.draw_series(panel.iter().enumerate().map(|(index, row)| {
        let left = index as f64 + 0.2;
        Rectangle::new([(left, 0.0), (left + 0.6, row.writes_per_s)], color(row.ordering).filled())
    }))?;
    chart.draw_series(panel.iter().enumerate().map(|(index, row)| {
        let text = format!("{} {:.1} %", row.ordering.name(), row.percent_of_orderless);
        let place = (index as f64 + 0.2, row.writes_per_s + high * 0.08);
        Text::new(text, place, ("sans-serif", 13))
    }))?;
    Ok(())
}

/// Queue depth over time, one line for each way of ordering.
fn draw_depths<DB: DrawingBackend>(
    area: &DrawingArea<DB, Shift>,
    panel: &[&OrderingRow],
) -> Drawn<DB> {
    let Some(first) = panel.first() else { return Ok(()) };
    let ends = panel.iter().filter_map(|row| row.queue_depth_over_time.last());
    // The shortest stretch, so that each line spans the panel.
    let end_us = ends.map(|(at_us, _)| *at_us).fold(f64::INFINITY, f64::min);
    let end_us = if end_us.is_finite() { end_us.max(1.0) } else { 1.0 };
    let high = f64::from(first.queue_depth) * 1.1 + 0.5;
    let title = format!("{}: commands in the queue (of {})", first.profile, first.queue_depth);
    let mut chart = ChartBuilder::on(area)
        .caption(title, ("sans-serif", 16))
        .margin(10)
        .x_label_area_size(30)
        .y_label_area_size(40)
        .build_cartesian_2d(0f64..end_us, 0f64..high)?;
    chart.configure_mesh().x_desc("time in µs").light_line_style(WHITE).draw()?;
    for row in panel {
        let style = color(row.ordering).stroke_width(2);
        let shown = row.queue_depth_over_time.iter().filter(|(at_us, _)| *at_us <= end_us);
        let mut points: Vec<(f64, f64)> = Vec::new();
        for (at_us, depth) in shown {
            // A step: the depth stays until it changes.
            points.extend(points.last().map(|(_, before)| (*at_us, *before)));
            points.push((*at_us, f64::from(*depth)));
        }
        chart
            .draw_series(LineSeries::new(points, style))?
            .label(row.ordering.name())
            .legend(move |(x, y)| PathElement::new(vec![(x, y), (x + 18, y)], style));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::MiddleRight)
        .background_style(WHITE)
        .border_style(BLACK.mix(0.3))
        .draw()
}
