//! Results. Owns how samples become rates, percentiles and ratios, and the table and JSON of them.
//!
//! Ratios are taken round by round between targets that took turns in the same round, and their
//! median is reported, so that a slow minute of the machine hits both sides.

use std::fmt::Write as _;

use hdrhistogram::Histogram;
use serde::Serialize;

use crate::options::Target;
use crate::workload::{Case, Sample, new_histogram};

/// Latency of single operations, in microseconds.
#[derive(Clone, Debug, Serialize)]
pub struct Latency {
    /// The median.
    pub p50_us: f64,
    /// 99 of 100 are faster.
    pub p99_us: f64,
    /// 999 of 1000 are faster.
    pub p99_9_us: f64,
    /// The slowest.
    pub max_us: f64,
}

/// One workload on one target.
#[derive(Clone, Debug, Serialize)]
pub struct CaseResult {
    /// The workload's name.
    pub workload: String,
    /// Threads that worked side by side.
    pub thread_count: usize,
    /// The target's name.
    pub target: String,
    /// The median rate over the rounds.
    pub rate: f64,
    /// The unit of `rate`.
    pub unit: String,
    /// The rate of each round.
    pub round_rates: Vec<f64>,
    /// None where single operations are not measured.
    pub latency: Option<Latency>,
    /// Rate over the raw floor's.
    pub ratio_to_raw: Option<f64>,
    /// Rate over the kernel's ext4 on a loop device.
    pub ratio_to_kernel: Option<f64>,
    /// For the plot.
    #[serde(skip)]
    pub(crate) histogram: Option<Histogram<u64>>,
}

/// An image of 16 TiB opened.
#[derive(Clone, Debug, Serialize)]
pub struct OpenResult {
    /// The target's name.
    pub target: String,
    /// The fastest open or mount.
    pub milliseconds: f64,
    /// Memory that the open took (library), or the most that the server had (FUSE).
    pub resident_bytes: Option<u64>,
}

/// All results of a run.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    /// Workload by workload, in the order of the targets.
    pub cases: Vec<CaseResult>,
    /// The 16 TiB image.
    pub opens: Vec<OpenResult>,
    /// Targets left out, and why.
    pub skipped: Vec<String>,
    /// One-minute load averages of the machine before and after.
    pub load_average: [f64; 2],
}

fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => None,
        n if n % 2 == 1 => Some(values[n / 2]),
        n => Some((values[n / 2 - 1] + values[n / 2]) / 2.0),
    }
}

impl Report {
    /// Adds the samples of one case: per target, per round.
    pub(crate) fn add(&mut self, case: Case, samples: Vec<(Target, Vec<Sample>)>) {
        let first = self.cases.len();
        for (target, samples) in samples {
            let round_rates: Vec<f64> = samples.iter().map(Sample::rate).collect();
            let mut histogram = new_histogram();
            for sample in &samples {
                // All histograms have the same range and digits.
                let _ = histogram.add(&sample.latency);
            }
            let micros = |quantile| histogram.value_at_quantile(quantile) as f64 / 1e3;
            let measured = !histogram.is_empty();
            let latency = measured.then(|| Latency {
                p50_us: micros(0.5),
                p99_us: micros(0.99),
                p99_9_us: micros(0.999),
                max_us: histogram.max() as f64 / 1e3,
            });
            self.cases.push(CaseResult {
                workload: case.workload.name().into(),
                thread_count: case.thread_count,
                target: target.name(),
                rate: median(round_rates.iter().copied()).unwrap_or(0.0),
                unit: case.workload.unit().into(),
                round_rates,
                latency,
                ratio_to_raw: None,
                ratio_to_kernel: None,
                histogram: measured.then_some(histogram),
            });
        }
        let rates_of = |cases: &[CaseResult], target: Target| {
            cases
                .iter()
                .find(|case| case.target == target.name())
                .map(|case| case.round_rates.clone())
        };
        let raw = rates_of(&self.cases[first..], Target::Raw);
        let kernel = rates_of(&self.cases[first..], Target::Kernel);
        for case in &mut self.cases[first..] {
            let ratio = |base: &Option<Vec<f64>>| {
                let pairs = case.round_rates.iter().zip(base.as_ref()?);
                median(pairs.filter(|(_, base)| **base > 0.0).map(|(own, base)| own / base))
            };
            (case.ratio_to_raw, case.ratio_to_kernel) = (ratio(&raw), ratio(&kernel));
        }
    }

    /// The report as a table of text.
    pub fn to_table(&self) -> String {
        let mut text = String::new();
        let mut last = None;
        for case in &self.cases {
            let heading = (case.workload.clone(), case.thread_count);
            if last.as_ref() != Some(&heading) {
                let threads = if case.thread_count == 1 { "thread" } else { "threads" };
                let _ = writeln!(text, "\n{} · {} {threads}", case.workload, case.thread_count);
                let _ = writeln!(
                    text,
                    "  {:<32}{:>12}{:>9}{:>10}{:>10}{:>10}{:>9}{:>9}",
                    "target", "rate", "", "p50 µs", "p99 µs", "p99.9 µs", "÷ raw", "÷ kernel"
                );
                last = Some(heading);
            }
            let micros = |pick: fn(&Latency) -> f64| {
                case.latency
                    .as_ref()
                    .map_or("–".into(), |latency| format!("{:.0}", pick(latency)))
            };
            let ratio =
                |ratio: Option<f64>| ratio.map_or("–".into(), |ratio| format!("{ratio:.2}"));
            let _ = writeln!(
                text,
                "  {:<32}{:>12.0}{:>9}{:>10}{:>10}{:>10}{:>9}{:>9}",
                case.target,
                case.rate,
                case.unit,
                micros(|l| l.p50_us),
                micros(|l| l.p99_us),
                micros(|l| l.p99_9_us),
                ratio(case.ratio_to_raw),
                ratio(case.ratio_to_kernel)
            );
        }
        if !self.opens.is_empty() {
            let _ = writeln!(text, "\nopen-huge · an image of 16 TiB");
            let _ = writeln!(text, "  {:<32}{:>12}{:>14}", "target", "ms", "resident MiB");
        }
        for open in &self.opens {
            let resident = open
                .resident_bytes
                .map_or("–".into(), |bytes| format!("{:.1}", bytes as f64 / (1 << 20) as f64));
            let _ =
                writeln!(text, "  {:<32}{:>12.1}{:>14}", open.target, open.milliseconds, resident);
        }
        for skipped in &self.skipped {
            let _ = writeln!(text, "\nleft out: {skipped}");
        }
        let [before, after] = self.load_average;
        let _ =
            writeln!(text, "\nload average of the machine {before:.1} before, {after:.1} after");
        text
    }

    /// The report as JSON.
    pub fn to_json(&self) -> String {
        match serde_json::to_string_pretty(self) {
            Ok(json) => json,
            Err(_) => unreachable!("strings, numbers and lists always serialise"),
        }
    }
}

/// The one-minute load average; 0 if it is not available.
pub(crate) fn load_average() -> f64 {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().and_then(|first| first.parse().ok()).unwrap_or(0.0)
}
