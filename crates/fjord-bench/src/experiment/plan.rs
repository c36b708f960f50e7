//! What each experiment varies and how long it takes. Owns devices, targets, settings and sizes
//! that are taken when the caller names none.

use std::time::Duration;

use fjord::FsyncPolicyKind;

use super::parallel::Parallel;
use super::{Experiment, ExperimentOptions};
use crate::options::{How, Target, policies};
use crate::target::{DeviceKind, Setup};
use crate::workload::VARMAIL_THREAD_COUNT;

/// One point of an experiment: what is varied besides device and target.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Setting {
    /// For the table.
    pub(super) name: String,
    /// Place on the horizontal axis.
    pub(super) x: f64,
    pub(super) setup: Setup,
    pub(super) load: Load,
}

/// What is done at a point.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Load {
    /// 80 KiB, a pause, fsync, beside a stream of so many MB/s, or none.
    Stream { mb_per_s: u64 },
    /// 1 KiB and fsync every half second, beside a copy.
    Copy,
    /// 4 KiB appended and fsynced by so many threads.
    Threads { count: usize },
    /// Files of so many KiB written and fsynced in units of so many KiB by four threads.
    FsMark { unit_kib: usize, file_kib: usize },
    /// A probe, alone and beside eight writers.
    Neighbours,
    /// Threads that seldom wait for the device.
    Parallel { what: Parallel, count: usize },
    /// Threads that append and fsync; commits are followed on the device.
    Commits { count: usize },
    /// Blocks of a file overwritten at random, each synced.
    Overwrite,
    /// The same; the queue of the device is recorded.
    Queue,
    /// MariaDB inserts rows.
    OltpInsert,
    /// A program or a pattern of calls whose fsyncs are counted.
    Program(Program),
}

/// Whose fsyncs are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Program {
    CreateWriteFsync,
    AppendFsync,
    FsMark,
    Varmail,
    /// With this journal mode.
    Sqlite(&'static str),
    Git,
}

impl Program {
    const ALL: [Program; 8] = [
        Program::CreateWriteFsync,
        Program::AppendFsync,
        Program::FsMark,
        Program::Varmail,
        Program::Sqlite("WAL"),
        Program::Sqlite("PERSIST"),
        Program::Sqlite("DELETE"),
        Program::Git,
    ];

    /// Whether it is a program of its own, and needs a mount.
    fn needs_mount(self) -> bool {
        matches!(self, Program::Sqlite(_) | Program::Git)
    }

    fn name(self) -> String {
        match self {
            Program::CreateWriteFsync => "create+write+fsync".into(),
            Program::AppendFsync => "append+fsync".into(),
            Program::FsMark => "fs_mark".into(),
            Program::Varmail => "varmail".into(),
            Program::Sqlite(mode) => format!("SQLite {mode}"),
            Program::Git => "git".into(),
        }
    }
}

/// Everything that a run goes through.
pub(super) struct Plan {
    pub(super) devices: Vec<DeviceKind>,
    pub(super) targets: Vec<Target>,
    pub(super) round_count: u32,
    pub(super) turn: Duration,
    /// The background goes on alone for so long before a turn.
    pub(super) warm: Duration,
    pub(super) image_size_bytes: u64,
    pub(super) quick: bool,
}

/// Room for the background of a quick run, and of a whole one.
const IMAGE_BYTES: [u64; 2] = [256 << 20, 2 << 30];

impl Plan {
    pub(super) fn new(experiment: Experiment, options: &ExperimentOptions) -> Plan {
        let quick = options.quick;
        let (seconds, quick_seconds) = experiment.turn_seconds();
        let default = Duration::from_secs_f64(if quick { quick_seconds } else { seconds });
        let or = |given: &[DeviceKind]| match given {
            [] => experiment.devices(),
            given => given.to_vec(),
        };
        let targets = match &*options.targets {
            [] => experiment.targets(),
            given => given.iter().flat_map(every_policy).collect(),
        };
        Plan {
            devices: or(&options.devices),
            targets,
            round_count: options.round_count.unwrap_or(1),
            turn: options.turn.unwrap_or(default),
            warm: Duration::from_millis(if quick { 50 } else { 1000 }),
            image_size_bytes: options.image_size_bytes.unwrap_or(IMAGE_BYTES[usize::from(!quick)]),
            quick,
        }
    }

    /// Every how many bytes a background file starts over.
    pub(super) fn stream_file_bytes(&self) -> u64 {
        self.image_size_bytes / 2
    }
}

/// A target of fjord without a policy stands for all of them.
fn every_policy(target: &Target) -> Vec<Target> {
    let each = |how: &How| -> Vec<How> {
        policies().map(|policy| How { policy: Some(policy), ..*how }).collect()
    };
    match target {
        Target::Library(how) if how.policy.is_none() => {
            each(how).into_iter().map(Target::Library).collect()
        }
        Target::Fuse(how) if how.policy.is_none() => {
            each(how).into_iter().map(Target::Fuse).collect()
        }
        other => vec![other.clone()],
    }
}

impl Experiment {
    /// Seconds of a turn, and of a quick one.
    fn turn_seconds(self) -> (f64, f64) {
        match self {
            Experiment::Ijournaling6 | Experiment::Ijournaling8 => (4.0, 0.25),
            Experiment::Ijournaling7 => (2.0, 0.15),
            Experiment::Ijournaling9 => (1.5, 0.1),
            Experiment::Pbg2 => (5.0, 0.6),
            Experiment::Pbg3 => (10.0, 0.6),
            Experiment::FastCommitTable => (0.6, 0.05),
            Experiment::Neighbours => (5.0, 0.2),
            Experiment::Fallbacks => (2.0, 0.2),
            Experiment::Barrier8 | Experiment::Barrier12 => (0.5, 0.1),
            Experiment::BarrierTable2 => (4.0, 0.1),
            Experiment::Barrier11 | Experiment::Barrier13 => (1.5, 0.1),
            Experiment::Barrier14 => (5.0, 0.1),
            Experiment::ParallelTokubench
            | Experiment::ParallelSysbench
            | Experiment::ParallelVarmail
            | Experiment::ParallelFileserver => (1.0, 0.05),
        }
    }

    /// Those of the paper, and the real disk.
    fn devices(self) -> Vec<DeviceKind> {
        let names: &[&str] = match self {
            Experiment::Ijournaling6 | Experiment::FastCommitTable => {
                &["disk", "ufs", "plain-ssd", "supercap-ssd"]
            }
            Experiment::Ijournaling7 | Experiment::Ijournaling8 | Experiment::Neighbours => {
                &["disk", "plain-ssd"]
            }
            Experiment::Ijournaling9 => &["disk", "zram"],
            Experiment::Pbg2 | Experiment::Pbg3 => &["disk", "ufs"],
            Experiment::Fallbacks => &["disk"],
            Experiment::Barrier8 | Experiment::Barrier12 => &["ufs", "plain-ssd", "supercap-ssd"],
            Experiment::BarrierTable2
            | Experiment::Barrier11
            | Experiment::Barrier13
            | Experiment::Barrier14 => &["disk", "ufs", "plain-ssd", "supercap-ssd"],
            Experiment::ParallelTokubench
            | Experiment::ParallelSysbench
            | Experiment::ParallelVarmail
            | Experiment::ParallelFileserver => &["disk", "zram", "p3700"],
        };
        DeviceKind::ALL.into_iter().filter(|kind| names.contains(&kind.name())).collect()
    }

    fn targets(self) -> Vec<Target> {
        if self == Experiment::Barrier14 {
            return order_targets();
        }
        if self.is_of_barriers() {
            return barrier_targets(self);
        }
        if self.is_parallel() {
            return parallel_targets();
        }
        let raw: &[Target] = if self == Experiment::Ijournaling9 { &[Target::Raw] } else { &[] };
        let kernel: &[Target] = match self {
            // It does not tell.
            Experiment::Fallbacks => &[],
            _ => &[Target::Kernel, Target::KernelFastCommit],
        };
        let mut fjord = vec![Target::Library(How::default()), Target::Fuse(How::default())];
        if matches!(self, Experiment::Ijournaling6 | Experiment::Neighbours) {
            // What the scheduler is for.
            let how = How { epoch: true, ..How::with_policy(FsyncPolicyKind::Ijournal) };
            fjord.extend([Target::Library(how), Target::Fuse(how)]);
        }
        raw.iter().chain(kernel).chain(&fjord).flat_map(every_policy).collect()
    }

    /// The points to measure for a target on a device.
    pub(super) fn settings(self, device: DeviceKind, target: &Target, plan: &Plan) -> Vec<Setting> {
        let with =
            |name: String, x: f64, setup: Setup, load: Load| Setting { name, x, setup, load };
        let plain = |name: String, x: f64, load| with(name, x, Setup::default(), load);
        let rates = rates_mb_per_s(device);
        match self {
            Experiment::Ijournaling6 => {
                let mb_per_s = paper_rate_mb_per_s(device);
                let alone = plain("alone".into(), 0.0, Load::Stream { mb_per_s: 0 });
                let beside = plain(format!("{mb_per_s} MB/s"), 1.0, Load::Stream { mb_per_s });
                // A modelled device has no noise of its own.
                let is_real = matches!(device, DeviceKind::Disk | DeviceKind::Zram);
                is_real.then_some(alone).into_iter().chain([beside]).collect()
            }
            Experiment::Ijournaling7 => {
                let rates = if plan.quick { &rates[..2] } else { &rates[..] };
                let point = |mb_per_s: &u64| {
                    let load = Load::Stream { mb_per_s: *mb_per_s };
                    plain(format!("{mb_per_s} MB/s"), *mb_per_s as f64, load)
                };
                rates.iter().map(point).collect()
            }
            Experiment::Ijournaling8 => {
                let load = Load::Stream { mb_per_s: paper_rate_mb_per_s(device) };
                let point = |(name, no_delalloc): (&str, bool)| {
                    let setup = Setup { no_delalloc, ..Setup::default() };
                    with(name.into(), f64::from(u8::from(no_delalloc)), setup, load)
                };
                [("delalloc", false), ("nodelalloc", true)].map(point).into()
            }
            Experiment::Ijournaling9 => threads(target, plan),
            Experiment::Pbg2 | Experiment::Pbg3 => {
                let point = |count: u32| {
                    let setup = Setup { flex_group_count: Some(count), ..Setup::default() };
                    with(format!("flex group of {count}"), f64::from(count), setup, Load::Copy)
                };
                [1, 16].map(point).into()
            }
            Experiment::FastCommitTable => {
                let files: &[usize] = if plan.quick { &[32] } else { &[32, 128, 256] };
                let point = |unit_kib: usize, file_kib: usize, x: usize| {
                    let name = format!("{unit_kib} KiB to {file_kib} KiB");
                    plain(name, x as f64, Load::FsMark { unit_kib, file_kib })
                };
                let cells = [4, 8, 32].into_iter();
                cells
                    .flat_map(|unit| files.iter().map(move |file| (unit, *file)))
                    .enumerate()
                    .map(|(x, (unit, file))| point(unit, file, x))
                    .collect()
            }
            Experiment::Barrier8 => {
                let load = |count| Load::Commits { count };
                vec![
                    plain("1 thread".into(), 1.0, load(1)),
                    plain("4 threads".into(), 4.0, load(4)),
                ]
            }
            Experiment::BarrierTable2 => {
                vec![plain("append".into(), 0.0, Load::Threads { count: 1 })]
            }
            Experiment::Barrier11 => vec![plain("overwrite".into(), 0.0, Load::Overwrite)],
            Experiment::Barrier12 => vec![plain("overwrite".into(), 0.0, Load::Queue)],
            Experiment::Barrier13 => threads(target, plan),
            Experiment::Barrier14 => {
                let load = Load::Parallel { what: Parallel::Varmail, count: VARMAIL_THREAD_COUNT };
                let oltp = plain("OLTP-insert".into(), 1.0, Load::OltpInsert);
                let is_mount = !matches!(target, Target::Library(_));
                [plain("varmail".into(), 0.0, load)]
                    .into_iter()
                    .chain(is_mount.then_some(oltp))
                    .collect()
            }
            Experiment::ParallelTokubench => parallel(Parallel::Create, target, plan),
            Experiment::ParallelSysbench => parallel(Parallel::RandomWrite, target, plan),
            Experiment::ParallelVarmail => parallel(Parallel::Varmail, target, plan),
            Experiment::ParallelFileserver => parallel(Parallel::Fileserver, target, plan),
            Experiment::Neighbours => vec![plain("eight writers".into(), 0.0, Load::Neighbours)],
            Experiment::Fallbacks => {
                let runs = |program: &Program| match target {
                    Target::Fuse(_) => true,
                    _ => !program.needs_mount(),
                };
                let point = |(x, program): (usize, Program)| {
                    plain(program.name(), x as f64, Load::Program(program))
                };
                Program::ALL.into_iter().filter(runs).enumerate().map(point).collect()
            }
        }
    }
}

/// The kernel with and without barriers, and fjord's compound commits: as a file, on the device
/// itself in serial and dual mode, and with order only where a figure is of that too. Processors
/// may halt, as they may for the kernel.
fn barrier_targets(experiment: Experiment) -> Vec<Target> {
    let compound = How { halts: true, ..How::with_policy(FsyncPolicyKind::Compound) };
    let native = How { native: true, ..compound };
    let dual = How { epoch: true, dual: true, ..compound };
    let native_dual = How { native: true, ..dual };
    let group = How { policy: Some(FsyncPolicyKind::Group), ..native_dual };
    let mut hows = vec![compound, dual, native, How { epoch: true, ..native }, native_dual, group];
    if !matches!(experiment, Experiment::BarrierTable2 | Experiment::Barrier13) {
        hows.push(How { order: true, ..native_dual });
    }
    let fjord = hows.into_iter().map(Target::Library);
    [Target::Kernel, Target::KernelNoBarrier].into_iter().chain(fjord).collect()
}

/// The kernel with and without barriers; fjord's i-transactions and its commits in dual mode, with durability and with
/// order only: mounted, and varmail in the library too, there also on the device itself. Processors may halt, as they
/// may for the kernel.
fn order_targets() -> Vec<Target> {
    let ijournal = How { halts: true, ..How::with_policy(FsyncPolicyKind::Ijournal) };
    let compound = How { halts: true, ..How::with_policy(FsyncPolicyKind::Compound) };
    let dual = How { epoch: true, dual: true, ..compound };
    let both = |how: How| [how, How { order: true, ..how }];
    let mounted = [ijournal, dual].into_iter().flat_map(both).map(Target::Fuse);
    let native = How { native: true, ..dual };
    let library = [ijournal, native].into_iter().flat_map(both).map(Target::Library);
    let kernel = [Target::Kernel, Target::KernelNoBarrier];
    kernel.into_iter().chain(mounted).chain(library).collect()
}

/// The slides' EXT4, P-EXT4 and O-EXT4: the kernel's, and in one code base fjord with one thread of the journal
/// and locked lists, with threads that write together, and with lists without locks as well; then as many file
/// systems as threads, what SpanFS would reach at best; ordered, and with all data in the journal. Processors may
/// halt, as they may for the kernel.
fn parallel_targets() -> Vec<Target> {
    let full = How { halts: true, ..How::with_policy(FsyncPolicyKind::Compound) };
    let cooperative = How { locked_lists: true, ..full };
    let dedicated = How { dedicated: true, ..cooperative };
    let separate = How { separate: true, ..full };
    let systems = |data_journal| {
        [dedicated, cooperative, full, separate]
            .map(|how| Target::Library(How { data_journal, ..how }))
    };
    let mut targets = vec![Target::Kernel];
    targets.extend(systems(false));
    targets.push(Target::KernelDataJournal);
    targets.extend(systems(true));
    targets
}

/// Thread counts up to those of the slides.
fn parallel(what: Parallel, target: &Target, plan: &Plan) -> Vec<Setting> {
    let counts: &[usize] = if plan.quick { &[1, 2] } else { &[1, 2, 4, 8, 16, 32, 72] };
    let point = |count: &usize| Setting {
        name: format!("{count} thread{}", if *count == 1 { "" } else { "s" }),
        x: *count as f64,
        setup: Setup { part_count: target.how().separate.then_some(*count), ..Setup::default() },
        load: Load::Parallel { what, count: *count },
    };
    counts.iter().map(point).collect()
}

/// Thread counts; with i-transactions one shared area, and one per processor.
fn threads(target: &Target, plan: &Plan) -> Vec<Setting> {
    let counts: &[usize] = if plan.quick { &[1, 2] } else { &[1, 2, 4, 8, 16] };
    let points = |areas: &str, area_count: Option<usize>| -> Vec<Setting> {
        let point = |count: &usize| Setting {
            name: format!("{count} thread{}{areas}", if *count == 1 { "" } else { "s" }),
            x: *count as f64,
            setup: Setup { area_count, ..Setup::default() },
            load: Load::Threads { count: *count },
        };
        counts.iter().map(point).collect()
    };
    let shares_areas = target.policy().is_some_and(|policy| policy.name() == "ijournal");
    let mut all = points("", None);
    if shares_areas {
        all.extend(points(", one area", Some(1)));
    }
    all
}

/// The background of Figures 6 and 8: the paper's for a desktop, and for a phone; where the device
/// is slower than that, three quarters of what it sustains.
fn paper_rate_mb_per_s(device: DeviceKind) -> u64 {
    match device.name() {
        "ufs" => 50,
        "supercap-ssd" => 75,
        _ => 400,
    }
}

/// The backgrounds of Figure 7, the first for a quick run.
fn rates_mb_per_s(device: DeviceKind) -> [u64; 5] {
    match device.name() {
        "ufs" => [10, 20, 30, 40, 50],
        "supercap-ssd" => [15, 30, 45, 60, 75],
        _ => [100, 200, 300, 400, 500],
    }
}
