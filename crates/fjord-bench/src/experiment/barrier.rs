//! What a modelled device tells of commits and of its queue: Figures 8 and 12 of *Barrier-Enabled IO
//! Stack for Flash Storage* (FAST '18).
//!
//! A commit is followed from outside, the same way for every file system: a block with the magic
//! of JBD2 that the device programmed is a log block, and tells its kind and its sequence. So the
//! figure needs no tracing of the file system, and the kernel is measured like fjord.

use std::collections::HashMap;

use fjord_format::Tid;
use fjord_format::jbd2::{BlockHeader, BlockType};

use super::Experiment;
use super::measure::{BLOCK_BYTES, Outcome, append_in_sequence};
use super::plan::Plan;
use crate::error::{BenchError, Result};
use crate::target::{Model, Stand, Trace};
use crate::workload::overwrite;

/// Lines and changes that a figure shows of each target.
const SHOWN_COUNT_MAX: usize = 60;
/// Commands whose queue depth is shown.
const DEPTHS_COUNT_MAX: usize = 400;

impl Experiment {
    /// Whether it is of the barrier paper's journal.
    pub(super) fn is_of_barriers(self) -> bool {
        matches!(
            self,
            Experiment::Barrier8
                | Experiment::BarrierTable2
                | Experiment::Barrier11
                | Experiment::Barrier12
                | Experiment::Barrier13
                | Experiment::Barrier14
        )
    }
}

/// Commits as the device saw them.
#[derive(Clone, Debug, Default)]
pub(super) struct Commits {
    pub(super) count: u64,
    /// Added up: from the transfer of the first log block to the programmed commit block.
    to_surface_ns: u64,
    /// From the first transfer to the last programmed commit block.
    span_ns: u64,
}

impl Commits {
    pub(super) fn add(&mut self, other: &Commits) {
        self.count += other.count;
        self.to_surface_ns += other.to_surface_ns;
        self.span_ns += other.span_ns;
    }

    pub(super) fn per_s(&self) -> f64 {
        self.count as f64 * 1e9 / (self.span_ns as f64).max(1.0)
    }

    pub(super) fn to_surface_ms(&self) -> f64 {
        self.to_surface_ns as f64 / 1e6 / (self.count as f64).max(1.0)
    }

    /// Commits under way at a time, in the mean.
    pub(super) fn in_flight_mean(&self) -> f64 {
        self.to_surface_ns as f64 / (self.span_ns as f64).max(1.0)
    }
}

/// Queue depth over time.
#[derive(Clone, Debug, Default)]
pub(super) struct Depth {
    /// Commands times nanoseconds.
    weighted_ns: f64,
    span_ns: f64,
    pub(super) max: u32,
}

impl Depth {
    pub(super) fn add(&mut self, other: &Depth) {
        self.weighted_ns += other.weighted_ns;
        self.span_ns += other.span_ns;
        self.max = self.max.max(other.max);
    }

    /// The mean while the workload ran, its idle time included.
    pub(super) fn mean(&self) -> f64 {
        self.weighted_ns / self.span_ns.max(1.0)
    }

    fn of(changes: &[(u64, u32)]) -> Depth {
        let mut depth = Depth::default();
        for pair in changes.windows(2) {
            let [(from_ns, commands), (to_ns, _)] = pair else { continue };
            let time_ns = to_ns.saturating_sub(*from_ns) as f64;
            depth.weighted_ns += f64::from(*commands) * time_ns;
            depth.span_ns += time_ns;
            depth.max = depth.max.max(*commands);
        }
        depth
    }
}

/// Random overwrites, each synced, with the device's queue recorded.
pub(super) fn queue(stand: &Stand, plan: &Plan) -> Result<Outcome> {
    let model = stand.model()?.clone();
    let fs = stand.fs()?;
    let failed = || BenchError::io(format!("overwrite on {}", stand.target.name()));
    // The file is made by a first turn.
    overwrite(&*fs, 1, plan.turn / 8, false).map_err(failed())?;
    model.start_trace()?;
    let sample = overwrite(&*fs, 1, plan.turn, false).map_err(failed())?;
    let trace = model.take_trace()?;
    let start_ns = trace.depths.first().map_or(0, |(at_ns, _)| *at_ns);
    let shown = trace.depths.iter().take(DEPTHS_COUNT_MAX);
    let series = steps(shown.map(|(at_ns, depth)| (since_ms(*at_ns, start_ns), f64::from(*depth))));
    let depth = Some(Depth::of(&trace.depths));
    Ok(Outcome { depth, series, ..Outcome::of_sample(sample, BLOCK_BYTES) })
}

/// Appends by `count` threads, each synced; their commits are followed on the device.
pub(super) fn commits(stand: &Stand, count: usize, plan: &Plan) -> Result<Outcome> {
    let model = stand.model()?.clone();
    let fs = stand.fs()?;
    let failed = BenchError::io(format!("append on {}", stand.target.name()));
    model.start_trace()?;
    let sample = append_in_sequence(&*fs, count, plan).map_err(failed)?;
    let trace = model.take_trace()?;
    let lines = followed(&model, &trace)?;
    let start_ns = lines.first().map_or(0, |line| line.dispatched_ns);
    let end_ns = lines.iter().map(|line| line.surface_ns).max().unwrap_or(start_ns);
    let commits = Commits {
        count: lines.len() as u64,
        to_surface_ns: lines.iter().map(|line| line.surface_ns - line.dispatched_ns).sum(),
        span_ns: end_ns - start_ns,
    };
    // One line per commit; the gaps between them are drawn as steps.
    let shown = lines.iter().take(SHOWN_COUNT_MAX).enumerate();
    let series = shown.flat_map(|(number, line)| {
        let y = number as f64;
        [(since_ms(line.dispatched_ns, start_ns), y), (since_ms(line.surface_ns, start_ns), y)]
    });
    let series = series.collect();
    Ok(Outcome { commits: Some(commits), series, ..Outcome::of_sample(sample, BLOCK_BYTES) })
}

/// A commit on the device.
struct Line {
    dispatched_ns: u64,
    surface_ns: u64,
}

/// The commits of a trace by the time of their dispatch.
fn followed(model: &Model, trace: &Trace) -> Result<Vec<Line>> {
    let mut headers: HashMap<u64, Option<BlockHeader>> = HashMap::new();
    let mut first_ns: HashMap<Tid, u64> = HashMap::new();
    let mut lines = Vec::new();
    for (at_ns, command, offset) in &trace.persists {
        let header = match headers.get(offset) {
            Some(header) => *header,
            None => {
                let header = BlockHeader::decode(&model.read_block(*offset)?);
                *headers.entry(*offset).or_insert(header)
            }
        };
        let (Some(header), Some(transfer_ns)) = (header, trace.transfers_ns.get(command)) else {
            continue;
        };
        let first = first_ns.entry(header.sequence).or_insert(*transfer_ns);
        *first = (*first).min(*transfer_ns);
        if header.block_type == BlockType::Commit {
            lines.push((header.sequence, *at_ns));
        }
    }
    let line = |(sequence, surface_ns): (Tid, u64)| {
        let dispatched_ns = *first_ns.get(&sequence)?;
        Some(Line { dispatched_ns, surface_ns: surface_ns.max(dispatched_ns) })
    };
    let mut lines: Vec<Line> = lines.into_iter().filter_map(line).collect();
    lines.sort_by_key(|line| line.dispatched_ns);
    Ok(lines)
}

fn since_ms(at_ns: u64, start_ns: u64) -> f64 {
    at_ns.saturating_sub(start_ns) as f64 / 1e6
}

/// Points of a curve that keeps its height until the next one.
fn steps(points: impl Iterator<Item = (f64, f64)>) -> Vec<(f64, f64)> {
    let mut all: Vec<(f64, f64)> = Vec::new();
    for (x, y) in points {
        if let Some((_, before)) = all.last().copied() {
            all.push((x, before));
        }
        all.push((x, y));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn depth_is_weighted_by_time() {
        let depth = Depth::of(&[(0, 1), (10, 3), (20, 0), (40, 2)]);
        assert_eq!(depth.max, 3);
        assert!((depth.mean() - 1.0).abs() < 1e-9, "{}", depth.mean());
    }

    #[test]
    fn steps_keep_their_height() {
        let points = steps([(0.0, 1.0), (2.0, 3.0)].into_iter());
        assert_eq!(points, [(0.0, 1.0), (2.0, 1.0), (2.0, 3.0)]);
    }
}
