//! An experiment as SVG: distributions, latency over time, or the main number by setting.

use std::path::Path;

use super::Experiment;
use super::report::{ExperimentReport, Row};
use crate::chart::{self, Curve, Panel};
use crate::error::Result;

/// What the curves of a figure are.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// The share of fsyncs faster than the time on the horizontal axis.
    Distribution,
    /// Each fsync at its time.
    OverTime,
    /// The main number by setting.
    BySetting,
}

impl Experiment {
    fn kind(self) -> Kind {
        match self {
            Experiment::Ijournaling6 | Experiment::Neighbours | Experiment::BarrierTable2 => {
                Kind::Distribution
            }
            Experiment::Ijournaling8
            | Experiment::Pbg3
            | Experiment::Barrier8
            | Experiment::Barrier12 => Kind::OverTime,
            Experiment::Ijournaling7
            | Experiment::Ijournaling9
            | Experiment::Pbg2
            | Experiment::FastCommitTable
            | Experiment::Fallbacks
            | Experiment::Barrier11
            | Experiment::Barrier13
            | Experiment::Barrier14
            | Experiment::ParallelTokubench
            | Experiment::ParallelSysbench
            | Experiment::ParallelVarmail
            | Experiment::ParallelFileserver => Kind::BySetting,
        }
    }

    /// Whether the vertical axis begins at 0.
    fn is_linear(self) -> bool {
        self == Experiment::Fallbacks
            || (self.is_of_barriers()
                && !matches!(self, Experiment::Barrier13 | Experiment::Barrier14))
    }

    /// A panel with axes.
    fn panel(self, title: String) -> Panel {
        let mean = "mean latency of fsync in ms";
        let (x_label, y_label) = match self {
            Experiment::Ijournaling6 | Experiment::Neighbours | Experiment::BarrierTable2 => {
                ("latency in ms", "% of fsyncs")
            }
            Experiment::Ijournaling8 | Experiment::Pbg3 => ("time in s", "latency of fsync in ms"),
            Experiment::Ijournaling7 => ("background in MB/s", mean),
            Experiment::Ijournaling9 => ("threads", "MB/s"),
            Experiment::Barrier8 => ("time in ms", "commit"),
            Experiment::Barrier11 => ("", "context switches per call"),
            Experiment::Barrier12 => ("time in ms", "commands in the queue"),
            Experiment::Barrier13 => ("threads", "fsyncs/s"),
            Experiment::Barrier14 => ("varmail, OLTP-insert", "operations/s"),
            Experiment::ParallelTokubench => ("threads", "files/s"),
            Experiment::ParallelSysbench => ("threads", "writes/s"),
            Experiment::ParallelVarmail | Experiment::ParallelFileserver => {
                ("threads", "rounds of the flow/s")
            }
            Experiment::Pbg2 => ("groups of a flex group", mean),
            Experiment::Fallbacks => ("program, in the order of the table", "% fallbacks"),
            Experiment::FastCommitTable => {
                ("unit and file size, in the order of the table", "MB/s")
            }
        };
        Panel {
            title,
            x_label: x_label.into(),
            y_label: y_label.into(),
            log_x: self.kind() == Kind::Distribution
                || matches!(self, Experiment::Ijournaling9 | Experiment::Barrier13)
                || self.is_parallel(),
            log_y: self.kind() != Kind::Distribution && !self.is_linear(),
            ..Panel::default()
        }
    }
}

impl ExperimentReport {
    /// Draws the figure: a panel for each device, and for each setting where each has curves.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write_svg(&self, path: &Path) -> Result<()> {
        chart::write_svg(path, &self.panels())
    }

    fn panels(&self) -> Vec<Panel> {
        let kind = self.experiment.kind();
        let mut panels: Vec<Panel> = Vec::new();
        for row in &self.rows {
            let title = match kind {
                Kind::BySetting => format!("{}: {}", self.figure, row.device),
                _ => format!("{}: {}, {}", self.figure, row.device, row.setting),
            };
            if panels.last().is_none_or(|panel| panel.title != title) {
                panels.push(self.experiment.panel(title));
            }
            let Some(panel) = panels.last_mut() else { continue };
            let label = row.target.clone();
            match kind {
                Kind::Distribution => {
                    panel.curves.push(Curve { label, points: row.curve.clone() });
                }
                Kind::OverTime => panel.curves.push(Curve { label, points: row.series.clone() }),
                Kind::BySetting => self.add_point(panel, row),
            }
        }
        panels
    }

    /// Adds a row's main number to the curve of its target.
    fn add_point(&self, panel: &mut Panel, row: &Row) {
        let Some(value) = row.numbers.get(self.main_number) else { return };
        // A setting with areas of its own is a line of its own.
        let label = match row.setting.split_once(", ") {
            Some((_, more)) => format!("{}, {more}", row.target),
            None => row.target.clone(),
        };
        match panel.curves.iter_mut().find(|curve| curve.label == label) {
            Some(curve) => curve.points.push((row.x, value)),
            None => panel.curves.push(Curve { label, points: vec![(row.x, value)] }),
        }
    }
}
