//! How long a thread waits for its writes beside a writer that saturates the device, as a multiple
//! of how long it waits alone. Owns no state; the experiment is [`Contention`].

use std::fmt::Write as _;
use std::panic::resume_unwind;

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
/// Where each comes after a silence; the modelled caches fill in less.
const FIRST_ROUND_COUNT: usize = 100;
const SILENCE_NS: u64 = 20_000_000;

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

/// What is shown of each device.
struct Case {
    probe: Probe,
    thread: &'static str,
    writer: Writer,
    beside: &'static str,
    silence_ns: u64,
    /// False where it is shown what happens otherwise.
    is_kept: bool,
    /// As the profile has it; else chips end each program operation before they read.
    sets_aside: bool,
}

fn cases() -> Vec<Case> {
    const KEPT: Case = Case {
        probe: Probe::WriteFlush,
        thread: "write, flush",
        writer: Writer::sequential(Class::Async),
        beside: "async, 512K",
        silence_ns: 0,
        is_kept: true,
        sets_aside: true,
    };
    let (background, r#async) = (Class::Background, Class::Async);
    let mut cases = Vec::new();
    for (probe, thread) in [(Probe::WriteFlush, "write, flush"), (Probe::Commit, "commit")] {
        for (writer, beside) in [
            (Writer::random(background), "background, 4K"),
            (Writer::sequential(background), "background, 512K"),
            (Writer::random(r#async), "async, 4K"),
            (Writer::sequential(r#async), "async, 512K"),
        ] {
            cases.push(Case { probe, thread, writer, beside, ..KEPT });
        }
    }
    for (is_kept, thread) in [(true, "fsync, promoting"), (false, "not promoting")] {
        let probe = Probe::Fsync { queued: r#async, promotes: is_kept };
        let writer = Writer::heap(r#async);
        cases.push(Case { probe, thread, writer, beside: "32M async", is_kept, ..KEPT });
    }
    for (probe, thread) in
        [(Probe::WriteFlush, "first write, flush"), (Probe::Commit, "first commit")]
    {
        let random = Writer::random(background);
        let silence_ns = SILENCE_NS;
        let first = Case { probe, thread, silence_ns, ..KEPT };
        cases.push(Case { writer: random, beside: "background, 4K", ..first });
        cases.push(Case { probe, thread, silence_ns, ..KEPT });
    }
    for (writer, beside) in [
        (Writer::trickle(background), "4 MB/s"),
        (Writer::random(background), "background, 4K"),
        (Writer::sequential(r#async), "async, 512K"),
    ] {
        cases.push(Case { probe: Probe::Read, thread: "read", writer, beside, ..KEPT });
    }
    let silence_ns = SILENCE_NS;
    let read = Case { probe: Probe::Read, thread: "first read", silence_ns, ..KEPT };
    cases.push(Case { writer: Writer::random(background), beside: "background, 4K", ..read });
    let (is_kept, sets_aside, thread) = (false, false, "read, not set aside");
    cases.push(Case { thread, silence_ns: 0, is_kept, sets_aside, ..read });
    cases.push(read);
    cases
}

fn measure(profile: &Profile, case: &Case, writer: Option<Writer>) -> Result<Waits> {
    let tuning = Tuning::for_depth(profile.queue_depth);
    let round_count = match case.silence_ns {
        0 if case.is_kept || !case.sets_aside => ROUND_COUNT,
        0 => SLOW_ROUND_COUNT,
        _ => FIRST_ROUND_COUNT,
    };
    let (probe, silence_ns) = (case.probe, case.silence_ns);
    // Alone it makes no difference how long the others were silent.
    let silence_ns = if writer.is_some() { silence_ns } else { 0 };
    let experiment = Contention { probe, writer, pause_ns: PAUSE_NS, round_count, silence_ns };
    experiment.run(profile, &tuning).map_err(|error| BenchError::Io {
        what: "write to the modelled device".into(),
        source: error.into(),
    })
}

/// Measures all devices with a queue.
pub(super) fn run(figure: Figure) -> Result<LatencyReport> {
    // Each has a time of its own, so they may run side by side.
    let panels: Vec<Result<Vec<LatencyRow>>> = std::thread::scope(|scope| {
        let profiles = super::profiles().filter(|profile| profile.queue_depth > 1);
        let threads: Vec<_> = profiles.map(|profile| scope.spawn(|| panel(profile))).collect();
        let ended = threads.into_iter().map(|thread| thread.join());
        ended.map(|rows| rows.unwrap_or_else(|panic| resume_unwind(panic))).collect()
    });
    let rows = panels.into_iter().collect::<Result<Vec<_>>>()?.concat();
    Ok(LatencyReport { figure: figure.name().into(), rows })
}

/// The rows of one device.
fn panel(profile: &Profile) -> Result<Vec<LatencyRow>> {
    let mut rows = Vec::new();
    let mut known: Option<(Probe, Waits)> = None;
    let unyielding = profile.without_suspension();
    for case in cases() {
        if !case.sets_aside && unyielding == *profile {
            continue;
        }
        let alone = match known.filter(|(other, _)| *other == case.probe) {
            Some((_, alone)) => alone,
            None => measure(profile, &case, None)?,
        };
        known = Some((case.probe, alone));
        let device = if case.sets_aside { profile } else { &unyielding };
        let waits = measure(device, &case, Some(case.writer))?;
        rows.push(LatencyRow {
            profile: profile.name.into(),
            thread: case.thread.into(),
            writer: case.beside.into(),
            is_bounded: case.is_kept,
            alone_us_p50: alone.median_ns as f64 / 1e3,
            alone_us_p99: alone.p99_ns as f64 / 1e3,
            beside_us_p50: waits.median_ns as f64 / 1e3,
            beside_us_p99: waits.p99_ns as f64 / 1e3,
            p50_multiple: waits.median_ns as f64 / alone.median_ns as f64,
            p99_multiple: waits.p99_ns as f64 / alone.p99_ns as f64,
            writer_mb_per_s: waits.writer_bytes_per_s / 1e6,
        });
    }
    Ok(rows)
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
                "  {:<20}{:<18}{:>17}{:>21}{:>18}{:>13}",
                "thread", "writer", "alone", "beside the writer", "multiple", "writer MB/s"
            );
            for row in panel {
                let _ = writeln!(
                    text,
                    "  {:<20}{:<18}{:>9.0}{:>8.0}{:>12.0}{:>9.0}{:>9.2}{:>9.2}{:>13.0}",
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
