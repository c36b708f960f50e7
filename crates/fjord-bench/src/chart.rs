//! Panels of curves as SVG, the legend beside them so that it hides nothing.

use std::path::Path;

use plotters::coord::Shift;
use plotters::coord::ranged1d::ValueFormatter;
use plotters::prelude::*;

use crate::error::{BenchError, Result};

const WIDTH: u32 = 1060;
const HEIGHT: u32 = 420;
/// Where the legend begins.
const LEGEND_X: u32 = 840;
/// From entry to entry of the legend, and where it begins.
const LEGEND_LINE: i32 = 20;
const LEGEND_Y: i32 = 52;
const COLORS: [RGBColor; 12] = [
    RGBColor(0x33, 0x33, 0x33),
    RGBColor(0x88, 0x88, 0x88),
    RGBColor(0x00, 0x6d, 0x9c),
    RGBColor(0x00, 0xa0, 0x8a),
    RGBColor(0xd1, 0x49, 0x5b),
    RGBColor(0xed, 0xae, 0x49),
    RGBColor(0x7b, 0x4f, 0x9d),
    RGBColor(0x6b, 0x8e, 0x23),
    RGBColor(0xc7, 0x6b, 0x1e),
    RGBColor(0x3f, 0x51, 0xb5),
    RGBColor(0x9e, 0x2a, 0x6f),
    RGBColor(0x4d, 0x8b, 0x9e),
];

type Drawn<DB> = std::result::Result<(), DrawingAreaErrorKind<<DB as DrawingBackend>::ErrorType>>;

/// A line with a name.
#[derive(Clone, Debug, Default)]
pub(crate) struct Curve {
    pub(crate) label: String,
    pub(crate) points: Vec<(f64, f64)>,
}

/// One diagram.
#[derive(Clone, Debug, Default)]
pub(crate) struct Panel {
    pub(crate) title: String,
    pub(crate) x_label: String,
    pub(crate) y_label: String,
    /// Logarithmic horizontal axis.
    pub(crate) log_x: bool,
    /// Logarithmic vertical axis.
    pub(crate) log_y: bool,
    /// The highest x shown; the largest there is when not given.
    pub(crate) x_max: Option<f64>,
    pub(crate) curves: Vec<Curve>,
}

impl Panel {
    /// Smallest and largest of one coordinate, with something between them.
    fn range(&self, pick: fn(&(f64, f64)) -> f64, log: bool) -> std::ops::Range<f64> {
        let values = || self.curves.iter().flat_map(|curve| curve.points.iter().map(pick));
        let high = values().fold(f64::NEG_INFINITY, f64::max);
        if !high.is_finite() {
            return if log { 1.0..10.0 } else { 0.0..1.0 };
        }
        if !log {
            let low = values().fold(0.0, f64::min);
            return low..(high * 1.05).max(low + 1e-3);
        }
        let low = values().filter(|value| *value > 0.0).fold(f64::INFINITY, f64::min);
        let low = if low.is_finite() { low } else { 1.0 };
        low * 0.9..(high * 1.1).max(low * 2.0)
    }
}

/// Draws the panels one below the other. Without panels nothing is written.
pub(crate) fn write_svg(path: &Path, panels: &[Panel]) -> Result<()> {
    if panels.is_empty() {
        return Ok(());
    }
    let failed = |error: String| BenchError::Io {
        what: format!("draw {}", path.display()),
        source: std::io::Error::other(error),
    };
    let size = (WIDTH, HEIGHT * panels.len() as u32);
    let root = SVGBackend::new(path, size).into_drawing_area();
    root.fill(&WHITE).map_err(|error| failed(error.to_string()))?;
    for (area, panel) in root.split_evenly((panels.len(), 1)).iter().zip(panels) {
        draw(area, panel).map_err(|error| failed(error.to_string()))?;
    }
    root.present().map_err(|error| failed(error.to_string()))
}

fn draw<DB: DrawingBackend>(area: &DrawingArea<DB, Shift>, panel: &Panel) -> Drawn<DB> {
    let mut x = panel.range(|point| point.0, panel.log_x);
    let y = panel.range(|point| point.1, panel.log_y);
    if let Some(max) = panel.x_max {
        x.end = max.max(x.start * 2.0).max(f64::MIN_POSITIVE);
    }
    let (area, legend) = area.split_horizontally(LEGEND_X);
    draw_legend(&legend, panel)?;
    let mut builder = ChartBuilder::on(&area);
    builder
        .caption(&panel.title, ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(60);
    match (panel.log_x, panel.log_y) {
        (true, true) => {
            fill(builder.build_cartesian_2d(x.clone().log_scale(), y.log_scale())?, panel, x)
        }
        (true, false) => fill(builder.build_cartesian_2d(x.clone().log_scale(), y)?, panel, x),
        (false, true) => fill(builder.build_cartesian_2d(x.clone(), y.log_scale())?, panel, x),
        (false, false) => fill(builder.build_cartesian_2d(x.clone(), y)?, panel, x),
    }
}

fn fill<'a, DB, X, Y>(
    mut chart: ChartContext<'a, DB, Cartesian2d<X, Y>>,
    panel: &Panel,
    shown: std::ops::Range<f64>,
) -> Drawn<DB>
where
    DB: DrawingBackend + 'a,
    X: Ranged<ValueType = f64> + ValueFormatter<f64>,
    Y: Ranged<ValueType = f64> + ValueFormatter<f64>,
{
    chart
        .configure_mesh()
        .x_desc(&panel.x_label)
        .y_desc(&panel.y_label)
        .light_line_style(WHITE)
        .draw()?;
    for (index, curve) in panel.curves.iter().enumerate() {
        let color = COLORS[index % COLORS.len()];
        let style = color.stroke_width(2);
        let visible: Vec<(f64, f64)> =
            curve.points.iter().copied().filter(|point| point.0 <= shown.end).collect();
        if visible.len() <= 32 {
            let dot = |point: &(f64, f64)| Circle::new(*point, 3, color.filled());
            chart.draw_series(visible.iter().map(dot))?;
        }
        chart.draw_series(LineSeries::new(visible, style))?;
    }
    Ok(())
}

fn draw_legend<DB: DrawingBackend>(area: &DrawingArea<DB, Shift>, panel: &Panel) -> Drawn<DB> {
    for (index, curve) in panel.curves.iter().enumerate() {
        let color = COLORS[index % COLORS.len()];
        let y = LEGEND_Y + LEGEND_LINE * index as i32;
        area.draw(&PathElement::new(vec![(0, y), (18, y)], color.stroke_width(3)))?;
        area.draw(&Text::new(curve.label.clone(), (24, y - 6), ("sans-serif", 12)))?;
    }
    Ok(())
}
