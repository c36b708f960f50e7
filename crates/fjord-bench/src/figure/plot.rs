//! The figures as SVG: one panel per device; bars of throughput for Figure 9, queue depth over
//! time for Figure 10.

use std::path::Path;

use plotters::coord::Shift;
use plotters::prelude::*;

use super::{Figure, FigureReport, FigureRow, Ordering};
use crate::error::{BenchError, Result};

const PANEL_SIZE: (u32, u32) = (900, 260);
const COLORS: [RGBColor; 4] = [
    RGBColor(0xd1, 0x49, 0x5b),
    RGBColor(0xed, 0xae, 0x49),
    RGBColor(0x00, 0x6d, 0x9c),
    RGBColor(0x88, 0x88, 0x88),
];

type Drawn<DB> = std::result::Result<(), DrawingAreaErrorKind<<DB as DrawingBackend>::ErrorType>>;

impl FigureReport {
    /// Draws the figure.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write_svg(&self, path: &Path) -> Result<()> {
        let mut panels: Vec<Vec<&FigureRow>> = Vec::new();
        for row in &self.rows {
            match panels.last_mut() {
                Some(panel) if panel.first().is_some_and(|r| r.profile == row.profile) => {
                    panel.push(row);
                }
                _ => panels.push(vec![row]),
            }
        }
        let failed = |error: String| BenchError::Io {
            what: format!("draw {}", path.display()),
            source: std::io::Error::other(error),
        };
        let over_time = self.figure == Figure::Barrier10.name();
        let size = (PANEL_SIZE.0, PANEL_SIZE.1 * panels.len() as u32);
        let root = SVGBackend::new(path, size).into_drawing_area();
        root.fill(&WHITE).map_err(|error| failed(error.to_string()))?;
        for (area, panel) in root.split_evenly((panels.len(), 1)).iter().zip(&panels) {
            let drawn = if over_time { draw_depths(area, panel) } else { draw_bars(area, panel) };
            drawn.map_err(|error| failed(error.to_string()))?;
        }
        root.present().map_err(|error| failed(error.to_string()))
    }
}

fn color(ordering: Ordering) -> RGBColor {
    let index = Ordering::ALL.iter().position(|other| *other == ordering).unwrap_or(0);
    COLORS[index]
}

/// Throughput, one bar for each way of ordering.
fn draw_bars<DB: DrawingBackend>(area: &DrawingArea<DB, Shift>, panel: &[&FigureRow]) -> Drawn<DB> {
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
    panel: &[&FigureRow],
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
