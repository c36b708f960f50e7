//! How long a thread waits for its writes beside a writer that saturates the device, as a multiple
//! of how long it waits alone. Owns no state; the experiment is [`Contention`].

use std::fmt::Write as _;

use fjord_block::Class;
use fjord_block::epoch::Tuning;
use fjord_block::sim::{Contention, Probe, Profile, Waits, Writer};
use serde::Serialize;

use super::Figure;
use crate::error::{BenchError, Result};

const PAUSE_NS: u64 = 1_000_000;
const ROUND_COUNT: usize = 300;
/// Where a round takes seconds.
const SLOW_ROUND_COUNT: usize = 20;

/// One thread beside one writer on one device. Times are in µs of the model.
#[derive(Clone, Debug, Serialize)]
pub struct LatencyRow {
    /// The device's profile.
    pub profile: String,
    /// What the thread does.
    pub thread: String,
    /// What is beside it.
    pub writer: String,
    /// Whether the scheduler is to keep it within three times.
    pub is_bounded: bool,
    /// Of the thread alone.
    pub alone_us_p50: f64,
    /// Of the thread alone.
    pub alone_us_p99: f64,
    /// Beside the writer.
    pub beside_us_p50: f64,
    /// Beside the writer.
    pub beside_us_p99: f64,
    /// Beside it as a multiple of alone.
    pub p50_multiple: f64,
    /// The same of the 99th percentiles.
    pub p99_multiple: f64,
    /// What the writer got, in MB/s.
    pub writer_mb_per_s: f64,
}

/// The figure's numbers.
#[derive(Clone, Debug, Serialize)]
pub struct LatencyReport {
    /// The figure's name.
    pub figure: String,
    /// Device by device.
    pub rows: Vec<LatencyRow>,
}

/// What is shown of each device: the thread, its name, the writer, its name, whether bounded.
fn cases() -> Vec<(Probe, &'static str, Writer, &'static str, bool)> {
    let mut cases = Vec::new();
    for (probe, name) in [(Probe::WriteFlush, "write, flush"), (Probe::Commit, "commit")] {
        for (class, random, sequential) in [
            (Class::Background, "background, 4K", "background, 512K"),
            (Class::Async, "async, 4K", "async, 512K"),
        ] {
            cases.push((probe, name, Writer::random(class), random, true));
            cases.push((probe, name, Writer::sequential(class), sequential, true));
        }
    }
    for (promotes, name) in [(true, "fsync, promoting"), (false, "not promoting")] {
        let queued = Class::Async;
        let probe = Probe::Fsync { queued, promotes };
        cases.push((probe, name, Writer::heap(queued), "32M async", promotes));
    }
    cases
}

/// Measures all devices with a queue.
pub(super) fn run(figure: Figure) -> Result<LatencyReport> {
    let mut rows = Vec::new();
    for profile in Profile::ALL.into_iter().filter(|profile| profile.queue_depth > 1) {
        let tuning = Tuning::for_depth(profile.queue_depth);
        let mut known: Option<(Probe, Waits)> = None;
        for (probe, thread, writer, beside, is_bounded) in cases() {
            let round_count = if is_bounded { ROUND_COUNT } else { SLOW_ROUND_COUNT };
            let measure = |writer| {
                let experiment = Contention { probe, writer, pause_ns: PAUSE_NS, round_count };
                experiment.run(profile, &tuning).map_err(|error| BenchError::Io {
                    what: "write to the modelled device".into(),
                    source: error.into(),
                })
            };
            let alone = match known.filter(|(other, _)| *other == probe) {
                Some((_, alone)) => alone,
                None => measure(None)?,
            };
            known = Some((probe, alone));
            let waits = measure(Some(writer))?;
            rows.push(LatencyRow {
                profile: profile.name.into(),
                thread: thread.into(),
                writer: beside.into(),
                is_bounded,
                alone_us_p50: alone.median_ns as f64 / 1e3,
                alone_us_p99: alone.p99_ns as f64 / 1e3,
                beside_us_p50: waits.median_ns as f64 / 1e3,
                beside_us_p99: waits.p99_ns as f64 / 1e3,
                p50_multiple: waits.median_ns as f64 / alone.median_ns as f64,
                p99_multiple: waits.p99_ns as f64 / alone.p99_ns as f64,
                writer_mb_per_s: waits.writer_bytes_per_s / 1e6,
            });
        }
    }
    Ok(LatencyReport { figure: figure.name().into(), rows })
}

impl LatencyReport {
    /// The figure as a table of text.
    pub fn to_table(&self) -> String {
        let mut text = String::new();
        for panel in self.rows.chunk_by(|a, b| a.profile == b.profile) {
            let name = panel.first().map_or("", |row| &row.profile);
            let _ = writeln!(text, "\n{name}: µs, 50th and 99th percentile, virtual time");
            let _ = writeln!(
                text,
                "  {:<18}{:<18}{:>17}{:>21}{:>18}{:>13}",
                "thread", "writer", "alone", "beside the writer", "multiple", "writer MB/s"
            );
            for row in panel {
                let _ = writeln!(
                    text,
                    "  {:<18}{:<18}{:>9.0}{:>8.0}{:>12.0}{:>9.0}{:>9.2}{:>9.2}{:>13.0}",
                    row.thread,
                    row.writer,
                    row.alone_us_p50,
                    row.alone_us_p99,
                    row.beside_us_p50,
                    row.beside_us_p99,
                    row.p50_multiple,
                    row.p99_multiple,
                    row.writer_mb_per_s
                );
            }
        }
        text
    }
}
