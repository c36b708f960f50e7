//! Figures of papers, redone on modelled devices in virtual time: exactly repeatable, whatever the
//! machine is doing. Except [`run_locks`], whose threads are real.
//!
//! Owns the experiments of `fjord bench --figure`; the devices are [`fjord_block::sim`].

mod drive;
mod latency;
mod locks;
mod ordering;
mod plot;

use std::path::Path;

use fjord_block::sim::Profile;
use serde::Serialize;

use crate::error::{BenchError, Result};

pub use latency::{LatencyReport, LatencyRow};
pub use locks::{LockCost, LockOptions, LockRow, LocksReport, run_locks};
pub use ordering::{Ordering, OrderingReport, OrderingRow};

/// The devices of these figures: all but that of parallel journaling, whose figures run on others.
fn profiles() -> impl Iterator<Item = &'static Profile> {
    Profile::ALL.into_iter().filter(|profile| profile.name != Profile::P3700.name)
}

/// A figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Figure {
    /// Figure 9 of *Barrier-Enabled IO Stack for Flash Storage* (FAST '18): throughput of 4 KiB
    /// random writes by way of ordering.
    Barrier9,
    /// Figure 10 of the same: queue depth over time.
    Barrier10,
    /// Not of a paper: how long a thread waits beside a writer that saturates the device.
    SyncLatency,
}

impl Figure {
    /// All figures.
    pub const ALL: [Figure; 3] = [Figure::Barrier9, Figure::Barrier10, Figure::SyncLatency];

    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Figure::Barrier9 => "barrier-9",
            Figure::Barrier10 => "barrier-10",
            Figure::SyncLatency => "sync-latency",
        }
    }

    /// The figure of a name.
    ///
    /// # Errors
    /// [`BenchError::Usage`], naming the figures there are.
    pub fn from_name(name: &str) -> Result<Figure> {
        let known = || Figure::ALL.map(Figure::name).join(", ");
        Figure::ALL
            .into_iter()
            .find(|figure| figure.name() == name)
            .ok_or_else(|| BenchError::Usage(format!("no figure {name:?}; known: {}", known())))
    }
}

/// A figure's numbers.
#[derive(Clone, Debug, Serialize)]
#[serde(untagged)]
pub enum FigureReport {
    /// Of [`Figure::Barrier9`] and [`Figure::Barrier10`].
    Ordering(OrderingReport),
    /// Of [`Figure::SyncLatency`].
    Latency(LatencyReport),
}

/// Makes a figure, in seconds of real time.
///
/// # Errors
/// The model refuses a request, which would be a fault of the experiment.
pub fn run_figure(figure: Figure) -> Result<FigureReport> {
    match figure {
        Figure::Barrier9 | Figure::Barrier10 => ordering::run(figure).map(FigureReport::Ordering),
        Figure::SyncLatency => latency::run(figure).map(FigureReport::Latency),
    }
}

impl FigureReport {
    /// The figure as a table of text.
    pub fn to_table(&self) -> String {
        match self {
            FigureReport::Ordering(report) => report.to_table(),
            FigureReport::Latency(report) => report.to_table(),
        }
    }

    /// Draws the figure.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write_svg(&self, path: &Path) -> Result<()> {
        match self {
            FigureReport::Ordering(report) => plot::draw_ordering(report, path),
            FigureReport::Latency(report) => plot::draw_latency(report, path),
        }
    }

    /// The figure as JSON.
    pub fn to_json(&self) -> String {
        match serde_json::to_string_pretty(self) {
            Ok(json) => json,
            Err(_) => unreachable!("strings, numbers and lists always serialise"),
        }
    }
}
