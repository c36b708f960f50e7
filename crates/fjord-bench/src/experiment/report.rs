//! Results of an experiment. Owns how outcomes become numbers, gains, the table and JSON.
//!
//! A gain is how many times better a target is than another at the same device and setting: than
//! the kernel's ext4 without and with fast commits, than its own kind with compound commits, and
//! than the raw device where that is a target. The number compared is the experiment's main one.

use std::fmt::Write as _;

use serde::Serialize;
use serde::ser::{SerializeMap, Serializer};

use super::barrier::{Commits, Depth};
use super::measure::Outcome;
use super::plan::Plan;
use super::{Cell, Experiment, paper};
use crate::options::{How, Target};
use crate::plot::distribution;
use crate::served::Served;

/// A number of a row.
#[derive(Clone, Copy, Debug)]
struct Column {
    /// In JSON.
    name: &'static str,
    /// In the table.
    heading: &'static str,
    decimals: usize,
    of: fn(&Outcome) -> Option<f64>,
}

const fn column(
    name: &'static str,
    heading: &'static str,
    decimals: usize,
    of: fn(&Outcome) -> Option<f64>,
) -> Column {
    Column { name, heading, decimals, of }
}

fn at(outcome: &Outcome, quantile: f64) -> Option<f64> {
    let measured = !outcome.latency.is_empty();
    measured.then(|| outcome.latency.value_at_quantile(quantile) as f64 / 1e6)
}

fn idle_at(outcome: &Outcome, quantile: f64) -> Option<f64> {
    let measured = !outcome.idle.is_empty();
    measured.then(|| outcome.idle.value_at_quantile(quantile) as f64 / 1e6)
}

fn times(busy: Option<f64>, idle: Option<f64>) -> Option<f64> {
    Some(busy? / idle.filter(|idle| *idle > 0.0)?)
}

fn mb_per_s(bytes: u64, seconds: f64) -> Option<f64> {
    (seconds > 0.0).then(|| bytes as f64 / 1e6 / seconds)
}

fn of_served(outcome: &Outcome, pick: fn(&Served) -> u64) -> Option<f64> {
    outcome.served.as_ref().map(|served| pick(served) as f64)
}

const COUNT: Column =
    column("fsync_count", "fsyncs", 0, |outcome| Some(outcome.latency.len() as f64));
const MEAN: Column = column("mean_ms", "mean ms", 2, |outcome| {
    (!outcome.latency.is_empty()).then(|| outcome.latency.mean() / 1e6)
});
const P50: Column = column("p50_ms", "p50", 2, |outcome| at(outcome, 0.5));
const P95: Column = column("p95_ms", "p95", 2, |outcome| at(outcome, 0.95));
const P99: Column = column("p99_ms", "p99", 2, |outcome| at(outcome, 0.99));
const P99_9: Column = column("p99_9_ms", "p99.9", 2, |outcome| at(outcome, 0.999));
const P99_99: Column = column("p99_99_ms", "p99.99", 2, |outcome| at(outcome, 0.9999));
const MAX: Column = column("max_ms", "max ms", 2, |outcome| at(outcome, 1.0));
const BACKGROUND: Column = column("background_mb_per_s", "bg MB/s", 1, |outcome| {
    mb_per_s(outcome.background.bytes, outcome.background.seconds)
});
const RATE: Column = column("mb_per_s", "MB/s", 2, |outcome| {
    mb_per_s(outcome.written.bytes, outcome.written.seconds)
});
const OPS: Column = column("fsyncs_per_s", "fsyncs/s", 0, |outcome| {
    (outcome.written.seconds > 0.0).then(|| outcome.latency.len() as f64 / outcome.written.seconds)
});

const LATENCY: [Column; 8] = [COUNT, MEAN, P50, P95, P99, P99_9, MAX, BACKGROUND];
const BANDWIDTH: [Column; 4] = [RATE, OPS, P50, P99];
/// Calls that seldom wait.
const CALLS: [Column; 4] =
    [Column { name: "operations_per_s", heading: "ops/s", ..OPS }, RATE, P50, P99];
const TAIL: [Column; 7] = [COUNT, MEAN, P50, P99, P99_9, P99_99, MAX];
const SWITCHES: [Column; 4] = [
    COUNT,
    column("switches_per_call", "switches", 2, |outcome| {
        let switches = outcome.switches;
        per_call(outcome, switches.voluntary_count + switches.involuntary_count)
    }),
    column("voluntary_per_call", "voluntary", 2, |outcome| {
        per_call(outcome, outcome.switches.voluntary_count)
    }),
    MEAN,
];
const DEPTH: [Column; 4] = [
    COUNT,
    column("queue_depth_mean", "mean depth", 2, |outcome| outcome.depth.as_ref().map(Depth::mean)),
    column("queue_depth_max", "max depth", 0, |outcome| {
        outcome.depth.as_ref().map(|depth| f64::from(depth.max))
    }),
    MEAN,
];
const COMMITS: [Column; 5] = [
    column("commit_count", "commits", 0, |outcome| {
        outcome.commits.as_ref().map(|commits| commits.count as f64)
    }),
    column("commits_per_s", "commits/s", 0, |outcome| outcome.commits.as_ref().map(Commits::per_s)),
    column("interval_ms", "interval ms", 3, |outcome| {
        outcome.commits.as_ref().map(|commits| 1e3 / commits.per_s().max(1e-9))
    }),
    column("to_surface_ms", "to surface ms", 3, |outcome| {
        outcome.commits.as_ref().map(Commits::to_surface_ms)
    }),
    column("in_flight_mean", "in flight", 2, |outcome| {
        outcome.commits.as_ref().map(Commits::in_flight_mean)
    }),
];

fn per_call(outcome: &Outcome, count: u64) -> Option<f64> {
    (!outcome.latency.is_empty()).then(|| count as f64 / outcome.latency.len() as f64)
}

const BESIDE: [Column; 8] = [
    column("idle_p50_ms", "alone p50", 2, |outcome| idle_at(outcome, 0.5)),
    column("idle_p99_ms", "p99", 2, |outcome| idle_at(outcome, 0.99)),
    column("p50_ms", "beside p50", 2, |outcome| at(outcome, 0.5)),
    P99,
    MAX,
    column("p50_times_idle", "p50 ×", 1, |outcome| times(at(outcome, 0.5), idle_at(outcome, 0.5))),
    column("p99_times_idle", "p99 ×", 1, |o| times(at(o, 0.99), idle_at(o, 0.99))),
    BACKGROUND,
];
const COUNTS: [Column; 6] = [
    column("fsync_count", "fsyncs", 0, |outcome| of_served(outcome, Served::call_count)),
    column("policy_count", "policy", 0, |outcome| of_served(outcome, |served| served.policy)),
    column("data_count", "data only", 0, |outcome| of_served(outcome, |served| served.data)),
    column("nothing_count", "nothing", 0, |outcome| of_served(outcome, |served| served.nothing)),
    column("fallback_count", "fallbacks", 0, |outcome| of_served(outcome, Served::fallback_count)),
    column("fallback_percent", "%", 1, |outcome| {
        let call_count = of_served(outcome, Served::call_count)?.max(1.0);
        Some(of_served(outcome, Served::fallback_count)? / call_count * 100.0)
    }),
];

/// How an experiment is told.
struct Shape {
    columns: &'static [Column],
    /// Index of the number that gains are of.
    main: usize,
    more_is_better: bool,
    /// Gains are averaged over the settings.
    averages: bool,
    /// Targets are compared at all.
    has_gains: bool,
}

impl Experiment {
    /// What is told of an outcome.
    pub(super) fn numbers(self, outcome: &Outcome) -> Numbers {
        Numbers(self.shape().columns.iter().map(|c| (*c, (c.of)(outcome))).collect())
    }

    fn shape(self) -> Shape {
        let latency = |main| Shape {
            columns: &LATENCY,
            main,
            more_is_better: false,
            averages: false,
            has_gains: true,
        };
        match self {
            Experiment::Ijournaling6 => latency(3),
            Experiment::Ijournaling7
            | Experiment::Ijournaling8
            | Experiment::Pbg2
            | Experiment::Pbg3 => latency(1),
            Experiment::Ijournaling9 => {
                Shape { columns: &BANDWIDTH, more_is_better: true, ..latency(0) }
            }
            Experiment::FastCommitTable => {
                Shape { columns: &BANDWIDTH, more_is_better: true, averages: true, ..latency(0) }
            }
            Experiment::Neighbours => Shape { columns: &BESIDE, ..latency(3) },
            Experiment::Fallbacks => Shape { columns: &COUNTS, has_gains: false, ..latency(5) },
            Experiment::Barrier8 => Shape { columns: &COMMITS, more_is_better: true, ..latency(1) },
            Experiment::BarrierTable2 => Shape { columns: &TAIL, ..latency(1) },
            Experiment::Barrier11 => Shape { columns: &SWITCHES, ..latency(1) },
            Experiment::Barrier12 => Shape { columns: &DEPTH, more_is_better: true, ..latency(1) },
            Experiment::Barrier14
            | Experiment::ParallelTokubench
            | Experiment::ParallelSysbench
            | Experiment::ParallelVarmail
            | Experiment::ParallelFileserver => {
                Shape { columns: &CALLS, more_is_better: true, ..latency(0) }
            }
            Experiment::Barrier13 => {
                Shape { columns: &BANDWIDTH, more_is_better: true, ..latency(1) }
            }
        }
    }
}

/// The numbers of a row, by name.
#[derive(Clone, Debug)]
pub struct Numbers(Vec<(Column, Option<f64>)>);

impl Numbers {
    /// A number, where it was measured.
    pub fn get(&self, name: &str) -> Option<f64> {
        self.0.iter().find(|(column, _)| column.name == name)?.1
    }
}

impl Serialize for Numbers {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (column, value) in &self.0 {
            map.serialize_entry(column.name, value)?;
        }
        map.end()
    }
}

/// One target on one device at one setting.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The device's name.
    pub device: String,
    /// What was varied.
    pub setting: String,
    /// The target's name.
    pub target: String,
    /// What was measured.
    pub numbers: Numbers,
    /// The main number of each round; None for a turn that failed.
    pub rounds: Vec<Option<f64>>,
    /// All numbers of each round.
    pub turns: Vec<Option<Numbers>>,
    /// How many times better than others the main number is: the median over the rounds, since
    /// targets take turns in each.
    #[serde(flatten)]
    pub gains: Gains,
    /// What the paper has for this method here.
    pub paper: Option<String>,
    /// How fsyncs were served, where that is counted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub served: Option<Served>,
    /// Seconds and milliseconds of each fsync, where they are told over time.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub series: Vec<(f64, f64)>,
    /// Curve of the distribution, place on the horizontal axis: for the plot.
    #[serde(skip)]
    pub(super) curve: Vec<(f64, f64)>,
    #[serde(skip)]
    pub(super) x: f64,
}

/// How many times better than others a number is; None where the other was not measured.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Gains {
    /// Than the raw device.
    #[serde(rename = "gain_over_raw", skip_serializing_if = "Option::is_none")]
    pub over_raw: Option<f64>,
    /// Than the kernel's ext4.
    #[serde(rename = "gain_over_kernel")]
    pub over_kernel: Option<f64>,
    /// Than the kernel's ext4 with fast_commit.
    #[serde(rename = "gain_over_kernel_fast_commit")]
    pub over_kernel_fast_commit: Option<f64>,
    /// Than the same with compound commits.
    #[serde(rename = "gain_over_compound")]
    pub over_compound: Option<f64>,
}

impl Gains {
    /// Headings of [`Gains::columns`].
    const HEADINGS: [&str; 4] = ["÷ raw", "÷ kernel", "÷ kernel-fc", "÷ compound"];

    fn columns(&self) -> [Option<f64>; 4] {
        [self.over_raw, self.over_kernel, self.over_kernel_fast_commit, self.over_compound]
    }

    /// The mean of each.
    fn mean(all: &[Gains]) -> Gains {
        let mean = |pick: fn(&Gains) -> Option<f64>| {
            let gains: Vec<f64> = all.iter().filter_map(pick).collect();
            (!gains.is_empty()).then(|| gains.iter().sum::<f64>() / gains.len() as f64)
        };
        Gains {
            over_raw: mean(|gains| gains.over_raw),
            over_kernel: mean(|gains| gains.over_kernel),
            over_kernel_fast_commit: mean(|gains| gains.over_kernel_fast_commit),
            over_compound: mean(|gains| gains.over_compound),
        }
    }
}

/// Gains of a target, averaged over the settings of a device.
#[derive(Clone, Debug, Serialize)]
pub struct Mean {
    /// The device's name.
    pub device: String,
    /// The target's name.
    pub target: String,
    /// The means of [`Row::gains`].
    #[serde(flatten)]
    pub gains: Gains,
    /// The paper's.
    pub paper: Option<&'static str>,
}

/// All that came out.
#[derive(Clone, Debug, Serialize)]
pub struct ExperimentReport {
    /// The experiment's name.
    pub figure: String,
    /// What was measured.
    pub about: String,
    /// The number that gains are of.
    pub main_number: &'static str,
    /// Seconds of a turn.
    pub turn_s: f64,
    /// Turns of each target.
    pub round_count: u32,
    /// A quick run: the numbers mean nothing.
    pub quick: bool,
    /// Device by device, setting by setting, in the order of the targets.
    pub rows: Vec<Row>,
    /// Empty where settings are not averaged.
    pub means: Vec<Mean>,
    /// What could not be measured, and why.
    pub left_out: Vec<String>,
    /// One-minute load averages of the machine before and after.
    pub load_average: [f64; 2],
    #[serde(skip)]
    pub(super) experiment: Experiment,
}

/// The targets that gains are counted from.
fn compound_of(target: &Target) -> Option<Target> {
    let compound = How::with_policy(fjord::FsyncPolicyKind::Compound);
    match target {
        Target::Kernel | Target::KernelFastCommit | Target::KernelNoBarrier => Some(Target::Kernel),
        Target::KernelDataJournal => Some(Target::KernelDataJournal),
        Target::Library(how) => Some(Target::Library(How {
            native: how.native,
            halts: how.halts,
            data_journal: how.data_journal,
            ..compound
        })),
        Target::Fuse(how) => {
            Some(Target::Fuse(How { halts: how.halts, data_journal: how.data_journal, ..compound }))
        }
        _ => None,
    }
}

/// The kernel's ext4 in the same data mode.
fn kernel_of(target: &Target) -> Target {
    match target {
        Target::KernelDataJournal => Target::KernelDataJournal,
        other if other.how().data_journal => Target::KernelDataJournal,
        _ => Target::Kernel,
    }
}

/// Makes the report of the cells that have an outcome.
pub(super) fn build(
    experiment: Experiment,
    plan: &Plan,
    cells: Vec<Cell>,
    left_out: Vec<String>,
    load_average: [f64; 2],
) -> ExperimentReport {
    let shape = experiment.shape();
    let mut cells: Vec<Cell> = cells.into_iter().filter(|cell| cell.outcome.is_some()).collect();
    // Settings together, their targets in the order they were given; the sort is stable.
    let device_place = |cell: &Cell| plan.devices.iter().position(|kind| *kind == cell.device);
    cells.sort_by(|a, b| {
        let by_device = device_place(a).cmp(&device_place(b));
        let by_place = by_device.then(a.setting.x.total_cmp(&b.setting.x));
        by_place.then_with(|| a.setting.name.cmp(&b.setting.name))
    });
    let gain = |own: &Cell, base: Option<Target>| {
        let base = base.filter(|_| shape.has_gains)?;
        let base = cells.iter().find(|other| {
            (other.device, other.setting.x) == (own.device, own.setting.x) && other.target == base
        })?;
        median_gain(&main_numbers(own, &shape), &main_numbers(base, &shape), shape.more_is_better)
    };
    let row = |cell: &Cell| {
        let outcome = cell.outcome.as_ref()?;
        let device = cell.device.name();
        let over_time = matches!(
            experiment,
            Experiment::Ijournaling8
                | Experiment::Pbg3
                | Experiment::Barrier8
                | Experiment::Barrier12
        );
        Some(Row {
            device: device.into(),
            setting: cell.setting.name.clone(),
            target: cell.target.name(),
            numbers: experiment.numbers(outcome),
            rounds: main_numbers(cell, &shape),
            turns: cell.turns.clone(),
            gains: Gains {
                over_raw: gain(cell, Some(Target::Raw)),
                over_kernel: gain(cell, Some(kernel_of(&cell.target))),
                over_kernel_fast_commit: gain(cell, Some(Target::KernelFastCommit)),
                over_compound: gain(cell, compound_of(&cell.target)),
            },
            paper: paper::figure(experiment, device, &cell.target, &cell.setting),
            served: outcome.served.clone(),
            series: if over_time { outcome.series.clone() } else { Vec::new() },
            curve: distribution(&outcome.latency, 1e6),
            x: cell.setting.x,
        })
    };
    let rows: Vec<Row> = cells.iter().filter_map(row).collect();
    let means = if shape.averages { means(experiment, plan, &rows) } else { Vec::new() };
    ExperimentReport {
        figure: experiment.name().into(),
        about: experiment.about().into(),
        main_number: shape.columns[shape.main].name,
        turn_s: plan.turn.as_secs_f64(),
        round_count: plan.round_count,
        quick: plan.quick,
        rows,
        means,
        left_out,
        load_average,
        experiment,
    }
}

/// The main number of each turn of a cell.
fn main_numbers(cell: &Cell, shape: &Shape) -> Vec<Option<f64>> {
    let main = |turn: &Option<Numbers>| turn.as_ref()?.0.get(shape.main)?.1;
    cell.turns.iter().map(main).collect()
}

/// The median over the rounds of how many times better `own` is than `base`.
fn median_gain(own: &[Option<f64>], base: &[Option<f64>], more_is_better: bool) -> Option<f64> {
    let pairs = own.iter().zip(base).filter_map(|(own, base)| Some(((*own)?, (*base)?)));
    let gains = pairs.map(|(own, base)| if more_is_better { own / base } else { base / own });
    let mut gains: Vec<f64> = gains.filter(|gain| gain.is_finite()).collect();
    gains.sort_by(f64::total_cmp);
    let (low, high) = (gains.len().checked_sub(1)? / 2, gains.len() / 2);
    Some((gains.get(low)? + gains.get(high)?) / 2.0)
}

fn means(experiment: Experiment, plan: &Plan, rows: &[Row]) -> Vec<Mean> {
    let mut means = Vec::new();
    for kind in &plan.devices {
        for target in &plan.targets {
            let own =
                rows.iter().filter(|row| row.device == kind.name() && row.target == target.name());
            let gains: Vec<Gains> = own.map(|row| row.gains).collect();
            if !gains.is_empty() {
                means.push(Mean {
                    device: kind.name().into(),
                    target: target.name(),
                    gains: Gains::mean(&gains),
                    paper: paper::mean_gain(experiment, target),
                });
            }
        }
    }
    means
}

/// Width of a gain in the table.
const GAIN_WIDTH: usize = 12;

/// Width of the smallest and largest main number by round.
const SPREAD_WIDTH: usize = 24;

/// The smallest and largest main number by round; nothing for one round.
fn spread(rounds: &[Option<f64>]) -> String {
    let known = || rounds.iter().flatten().copied();
    if known().count() < 2 {
        return String::new();
    }
    let (low, high) = known().fold((f64::INFINITY, 0.0), |(low, high): (f64, f64), number| {
        (low.min(number), high.max(number))
    });
    format!("{low:.2} to {high:.2}")
}

/// Width of a column of the table: the heading, or numbers up to 99999.99.
fn width(column: &Column) -> usize {
    column.heading.chars().count().max(8) + 2
}

fn number(value: Option<f64>, decimals: usize) -> String {
    value.map_or("–".into(), |value| format!("{value:.decimals$}"))
}

impl ExperimentReport {
    /// The report as a table of text.
    pub fn to_table(&self) -> String {
        let mut text = format!("{} · {}\n", self.figure, self.about);
        let _ = writeln!(
            text,
            "{} round(s) of {} s{}{}",
            self.round_count,
            self.turn_s,
            match self.experiment.shape().has_gains {
                true => format!("; ÷: how many times better {} is", self.main_number),
                false => String::new(),
            },
            if self.quick { "; a quick run: the numbers mean nothing" } else { "" }
        );
        let mut last = None;
        for row in &self.rows {
            let heading = (&row.device, &row.setting);
            if last != Some(heading) {
                self.write_heading(&mut text, row);
                last = Some(heading);
            }
            let _ = write!(text, "  {:<1$}", row.target, self.target_width());
            for (column, value) in &row.numbers.0 {
                let _ = write!(text, "{:>1$}", number(*value, column.decimals), width(column));
            }
            match &row.served {
                Some(served) => {
                    let told = served.fallbacks.iter();
                    let told: Vec<String> = told.map(|(why, n)| format!("{why} {n}")).collect();
                    let _ = write!(text, "  {}", told.join(", "));
                    text.truncate(text.trim_end().len());
                }
                None => {
                    self.write_gains(&mut text, &row.gains);
                    let _ = write!(text, "{:>SPREAD_WIDTH$}", spread(&row.rounds));
                    let _ = write!(text, "  {}", row.paper.as_deref().unwrap_or("–"));
                }
            }
            text.push('\n');
        }
        self.write_means(&mut text);
        for left_out in &self.left_out {
            let _ = writeln!(text, "\nleft out: {left_out}");
        }
        let [before, after] = self.load_average;
        let _ =
            writeln!(text, "\nload average of the machine {before:.1} before, {after:.1} after");
        text
    }

    /// Width of the column of targets.
    fn target_width(&self) -> usize {
        self.rows.iter().map(|row| row.target.chars().count()).max().unwrap_or(0).max(32)
    }

    fn write_heading(&self, text: &mut String, row: &Row) {
        let target_width = self.target_width();
        let _ =
            write!(text, "\n{} · {}\n  {:<3$}", row.device, row.setting, "target", target_width);
        for (column, _) in &row.numbers.0 {
            let _ = write!(text, "{:>1$}", column.heading, width(column));
        }
        match row.served {
            Some(_) => text.push_str("  reasons\n"),
            None => self.write_gain_headings(text),
        }
    }

    fn write_means(&self, text: &mut String) {
        let mut last = None;
        for mean in &self.means {
            if last != Some(&mean.device) {
                let target_width = self.target_width();
                let device = &mean.device;
                let _ = write!(
                    text,
                    "\n{device} · mean over the settings\n  {:<1$}",
                    "target", target_width
                );
                self.write_gain_headings(text);
                last = Some(&mean.device);
            }
            let _ = write!(text, "  {:<1$}", mean.target, self.target_width());
            self.write_gains(text, &mean.gains);
            let _ = write!(text, "{:>SPREAD_WIDTH$}", "");
            let _ = writeln!(text, "  {}", mean.paper.unwrap_or("–"));
        }
    }

    /// Which gains are shown: that over the raw device only where there is one.
    fn shown_gains(&self) -> impl Iterator<Item = usize> {
        let has_raw = self.rows.iter().any(|row| row.gains.over_raw.is_some());
        usize::from(!has_raw)..Gains::HEADINGS.len()
    }

    fn write_gain_headings(&self, text: &mut String) {
        for index in self.shown_gains() {
            let _ = write!(text, "{:>GAIN_WIDTH$}", Gains::HEADINGS[index]);
        }
        let _ = writeln!(text, "{:>SPREAD_WIDTH$}  paper", "by round");
    }

    fn write_gains(&self, text: &mut String, gains: &Gains) {
        for index in self.shown_gains() {
            let _ = write!(text, "{:>GAIN_WIDTH$}", number(gains.columns()[index], 2));
        }
    }

    /// The report as JSON.
    pub fn to_json(&self) -> String {
        match serde_json::to_string_pretty(self) {
            Ok(json) => json,
            Err(_) => unreachable!("strings, numbers and lists always serialise"),
        }
    }
}
