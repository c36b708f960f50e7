//! Four ways to keep writes in order, on each device: Figures 9 and 10 of *Barrier-Enabled IO Stack
//! for Flash Storage* (FAST '18). Owns no state.

use std::fmt::Write as _;

use serde::Serialize;

use super::{Figure, drive};
use crate::error::Result;

/// How the host keeps its writes in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Ordering {
    /// Not at all.
    Orderless,
    /// Each write is a barrier, through the epoch scheduler. On a device without a barrier command
    /// the scheduler transfers and flushes, and the caller still does not wait.
    Barrier,
    /// The next write waits for the transfer of the one before. This orders transfers only.
    WaitOnTransfer,
    /// The next write waits for transfer and flush of the one before.
    TransferAndFlush,
}

impl Ordering {
    /// All, in the order of the paper's figure.
    pub const ALL: [Ordering; 4] = [
        Ordering::TransferAndFlush,
        Ordering::WaitOnTransfer,
        Ordering::Barrier,
        Ordering::Orderless,
    ];

    /// A short name.
    pub fn name(self) -> &'static str {
        match self {
            Ordering::Orderless => "orderless",
            Ordering::Barrier => "barrier",
            Ordering::WaitOnTransfer => "wait-on-transfer",
            Ordering::TransferAndFlush => "transfer-and-flush",
        }
    }
}

/// What the paper says of a profile, in percent of orderless writes.
fn paper(profile: &str, ordering: Ordering) -> Option<&'static str> {
    let shares = match profile {
        "ufs" => ["10", "< 40", "80", "100"],
        "plain-ssd" => ["0.5", "< 40", "90", "100"],
        "supercap-ssd" => ["35", "< 40", "90", "100"],
        _ => return None,
    };
    Ordering::ALL.iter().position(|other| *other == ordering).map(|index| shares[index])
}

/// One way of ordering on one device.
#[derive(Clone, Debug, Serialize)]
pub struct OrderingRow {
    /// The device's profile.
    pub profile: String,
    /// Commands that the device takes at a time.
    pub queue_depth: u32,
    /// How order was kept.
    pub ordering: Ordering,
    /// Writes of 4 KiB per second.
    pub writes_per_s: f64,
    /// Of the rate of orderless writes.
    pub percent_of_orderless: f64,
    /// The same in the paper, where it has this device.
    pub paper_percent: Option<String>,
    /// The mean queue depth over time.
    pub queue_depth_mean: f64,
    /// The largest queue depth.
    pub queue_depth_max: usize,
    /// Changes of the queue depth: microseconds since the start of the stretch shown, commands.
    pub queue_depth_over_time: Vec<(f64, u32)>,
}

/// The ways of ordering, measured.
#[derive(Clone, Debug, Serialize)]
pub struct OrderingReport {
    /// The figure's name.
    pub figure: String,
    /// Device by device, the ways of ordering in the order of [`Ordering::ALL`].
    pub rows: Vec<OrderingRow>,
}

/// Measures them; with the queue depth over time where the figure shows it.
pub(super) fn run(figure: Figure) -> Result<OrderingReport> {
    let mut rows = Vec::new();
    for profile in super::profiles() {
        let runs = Ordering::ALL.map(|ordering| drive::run(profile, ordering));
        let mut measured = Vec::new();
        for (ordering, run) in Ordering::ALL.into_iter().zip(runs) {
            measured.push((ordering, run?));
        }
        let base = measured.iter().find(|(ordering, _)| *ordering == Ordering::Orderless);
        let base = base.map_or(f64::NAN, |(_, run)| run.writes_per_s);
        rows.extend(measured.into_iter().map(|(ordering, run)| OrderingRow {
            profile: profile.name.into(),
            queue_depth: profile.queue_depth,
            ordering,
            writes_per_s: run.writes_per_s,
            percent_of_orderless: run.writes_per_s / base * 100.0,
            paper_percent: paper(profile.name, ordering).map(String::from),
            queue_depth_mean: run.stats.queue_depth_mean(),
            queue_depth_max: run.stats.queue_depth_max(),
            queue_depth_over_time: match figure {
                Figure::Barrier10 => run.depths,
                _ => Vec::new(),
            },
        }));
    }
    Ok(OrderingReport { figure: figure.name().into(), rows })
}

impl OrderingReport {
    /// The figure as a table of text.
    pub fn to_table(&self) -> String {
        let mut text = String::new();
        let mut last = "";
        for row in &self.rows {
            if row.profile != last {
                let _ = writeln!(
                    text,
                    "\n{}, queue of {} · 4 KiB random writes, virtual time",
                    row.profile, row.queue_depth
                );
                let _ = writeln!(
                    text,
                    "  {:<20}{:>12}{:>13}{:>9}{:>13}{:>6}",
                    "ordering", "writes/s", "% orderless", "paper", "queue mean", "max"
                );
                last = &row.profile;
            }
            let _ = writeln!(
                text,
                "  {:<20}{:>12.0}{:>13.2}{:>9}{:>13.2}{:>6}",
                row.ordering.name(),
                row.writes_per_s,
                row.percent_of_orderless,
                row.paper_percent.as_deref().unwrap_or("–"),
                row.queue_depth_mean,
                row.queue_depth_max
            );
        }
        text
    }
}
