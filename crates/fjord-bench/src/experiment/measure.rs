//! One point measured on one target.

use std::io;
use std::time::Duration;

use hdrhistogram::Histogram;

use super::Experiment;
use super::barrier::{self, Commits, Depth};
use super::fallbacks;
use super::load::{self, Neighbours, Probe, Probed, Stream, Streamed};
use super::oltp;
use super::plan::{Load, Plan, Setting};
use crate::error::{BenchError, Result};
use crate::served::Served;
use crate::target::{BenchFile, BenchFs, Stand};
use crate::workload::{Sample, Switches, new_histogram, overwrite, run_timed};

/// What one turn, or several added up, came to.
pub(super) struct Outcome {
    /// Of fsyncs (or of write and fsync), in nanoseconds.
    pub(super) latency: Histogram<u64>,
    /// The same without neighbours.
    pub(super) idle: Histogram<u64>,
    /// Seconds since the start, milliseconds.
    pub(super) series: Vec<(f64, f64)>,
    /// What was written by those who fsync, and in what time.
    pub(super) written: Streamed,
    /// What the background wrote.
    pub(super) background: Streamed,
    /// Context switches of the threads that fsynced.
    pub(super) switches: Switches,
    /// Queue depth of the device; None where it is not recorded.
    pub(super) depth: Option<Depth>,
    /// Commits on the device; None where they are not followed.
    pub(super) commits: Option<Commits>,
    /// How fsyncs were served; None where that is not asked for.
    pub(super) served: Option<Served>,
}

impl Outcome {
    pub(super) fn new() -> Outcome {
        Outcome {
            latency: new_histogram(),
            idle: new_histogram(),
            series: Vec::new(),
            written: Streamed::default(),
            background: Streamed::default(),
            switches: Switches::default(),
            depth: None,
            commits: None,
            served: None,
        }
    }

    fn of_probe((probed, background): (Probed, Streamed)) -> Outcome {
        let Probed { latency, series } = probed;
        Outcome { latency, series, background, ..Outcome::new() }
    }

    pub(super) fn of_sample(sample: Sample, unit_bytes: usize) -> Outcome {
        let bytes = sample.latency.len() * unit_bytes as u64;
        let written = Streamed { bytes, seconds: sample.elapsed.as_secs_f64() };
        let switches = sample.switches;
        Outcome { latency: sample.latency, written, switches, ..Outcome::new() }
    }

    /// Adds another turn of the same point.
    pub(super) fn add(&mut self, other: Outcome) {
        // All histograms have the same range and digits.
        let _ = self.latency.add(&other.latency);
        let _ = self.idle.add(&other.idle);
        let start = self.series.last().map_or(0.0, |(at, _)| *at);
        self.series.extend(other.series.into_iter().map(|(at, ms)| (start + at, ms)));
        for (sum, turn) in
            [(&mut self.written, other.written), (&mut self.background, other.background)]
        {
            sum.bytes += turn.bytes;
            sum.seconds += turn.seconds;
        }
        self.switches.add(other.switches);
        match (&mut self.depth, other.depth) {
            (Some(sum), Some(turn)) => sum.add(&turn),
            (sum, turn) => *sum = turn,
        }
        match (&mut self.commits, other.commits) {
            (Some(sum), Some(turn)) => sum.add(&turn),
            (sum, turn) => *sum = turn,
        }
        match (&mut self.served, other.served) {
            (Some(sum), Some(turn)) => sum.add(&turn),
            (sum, turn) => *sum = turn,
        }
    }
}

/// Measures one point.
pub(super) fn run(
    experiment: Experiment,
    setting: &Setting,
    stand: &Stand,
    plan: &Plan,
) -> Result<Outcome> {
    let what = || {
        BenchError::io(format!(
            "{}, {}, on {}",
            experiment.name(),
            setting.name,
            stand.target.name()
        ))
    };
    let fs = stand.fs()?;
    if let Load::Program(program) = setting.load {
        return fallbacks::run(program, stand, plan);
    }
    match setting.load {
        Load::Commits { count } => barrier::commits(stand, count, plan),
        Load::Queue => barrier::queue(stand, plan),
        Load::OltpInsert => oltp::insert(stand, plan).map(|sample| Outcome::of_sample(sample, 0)),
        load => run_load(load, &*fs, plan).map_err(what()),
    }
}

fn run_load(load: Load, fs: &dyn BenchFs, plan: &Plan) -> io::Result<Outcome> {
    match load {
        Load::Stream { mb_per_s } => {
            let stream = Stream {
                path: "background",
                unit_bytes: 4096,
                bytes_per_s: mb_per_s * 1_000_000,
                file_bytes: plan.stream_file_bytes(),
                anew: false,
            };
            load::beside(fs, &slow_probe(plan), &stream, plan.warm, plan.turn)
                .map(Outcome::of_probe)
        }
        Load::Copy => {
            fs.make_dir("media")?;
            fs.make_dir("app")?;
            let stream = Stream {
                path: "media/copy",
                unit_bytes: 128 << 10,
                // As fast as it goes, like the paper's.
                bytes_per_s: u64::MAX,
                file_bytes: plan.stream_file_bytes(),
                anew: true,
            };
            let probe = Probe {
                path: "app/file",
                unit_bytes: 1 << 10,
                pause: Duration::ZERO,
                period: Duration::from_millis(if plan.quick { 100 } else { 500 }),
                counts_write: false,
            };
            load::beside(fs, &probe, &stream, plan.warm, plan.turn).map(Outcome::of_probe)
        }
        Load::Threads { count } => append_in_sequence(fs, count, plan)
            .map(|sample| Outcome::of_sample(sample, BLOCK_BYTES)),
        Load::FsMark { unit_kib, file_kib } => {
            let sample = fs_mark(fs, unit_kib << 10, file_kib << 10, plan.turn)?;
            Ok(Outcome::of_sample(sample, unit_kib << 10))
        }
        Load::Neighbours => beside_neighbours(fs, plan),
        Load::Parallel { what, count } => {
            what.run(fs, count, plan).map(|sample| Outcome::of_sample(sample, what.unit_bytes()))
        }
        Load::Overwrite => {
            overwrite(fs, 1, plan.turn, false).map(|sample| Outcome::of_sample(sample, BLOCK_BYTES))
        }
        // Served by the caller.
        Load::Commits { .. } | Load::Queue | Load::OltpInsert | Load::Program(_) => {
            Err(io::ErrorKind::Unsupported.into())
        }
    }
}

/// 80 KB written, a pause so that writeback may take them up, fsync.
fn slow_probe(plan: &Plan) -> Probe {
    Probe {
        path: "probe",
        unit_bytes: 80 << 10,
        pause: Duration::from_millis(if plan.quick { 10 } else { 100 }),
        period: Duration::ZERO,
        counts_write: false,
    }
}

pub(super) const BLOCK_BYTES: usize = 4096;
/// Files of each thread, and their size, as sysbench has them by default.
const FILE_COUNT: u64 = 128;
const FILE_BYTES: u64 = 16 << 20;

/// A thread's files; one is open at a time.
struct Files {
    dir: String,
    open: Option<(u64, Box<dyn BenchFile>)>,
}

/// Each thread appends blocks to its files, one file after the other, each block with an fsync.
pub(super) fn append_in_sequence(
    fs: &dyn BenchFs,
    thread_count: usize,
    plan: &Plan,
) -> io::Result<Sample> {
    let file_count = if plan.quick { 2 } else { FILE_COUNT };
    let root = |thread: usize| format!("threads{thread_count}-{thread}");
    let block = [0x5a; BLOCK_BYTES];
    let make_files = |thread: usize| -> io::Result<Files> {
        // Byte targets have no directories.
        let dir = match fs.make_dir(&root(thread)) {
            Ok(()) => format!("{}/", root(thread)),
            Err(error) if error.kind() == io::ErrorKind::Unsupported => String::new(),
            Err(error) => return Err(error),
        };
        for index in 0..file_count {
            fs.create(&format!("{dir}{index}"))?;
        }
        Ok(Files { dir, open: None })
    };
    let states = (0..thread_count).map(make_files).collect::<io::Result<Vec<Files>>>()?;
    fs.sync()?;
    let mut states = states.into_iter();
    let next = |_: usize| states.next().ok_or_else(|| io::Error::other("no files for a thread"));
    let sample = run_timed(thread_count, plan.turn, next, |files, index| {
        let offset = index * BLOCK_BYTES as u64;
        let number = offset / FILE_BYTES % file_count;
        let mut file = match files.open.take().filter(|(open, _)| *open == number) {
            Some((_, file)) => file,
            None => fs.open(&format!("{}{number}", files.dir))?,
        };
        file.write_at(offset % FILE_BYTES, &block)?;
        file.sync(false)?;
        files.open = Some((number, file));
        Ok(())
    })?;
    for thread in 0..thread_count {
        let _ = fs.remove_tree(&root(thread));
    }
    Ok(sample)
}

/// Threads of fs_mark in the patch's table.
const FS_MARK_THREAD_COUNT: usize = 4;

/// As fs_mark with an fsync after every write: files made one after the other, each thread in a
/// directory of its own.
pub(super) fn fs_mark(
    fs: &dyn BenchFs,
    unit_bytes: usize,
    file_bytes: usize,
    turn: Duration,
) -> io::Result<Sample> {
    let root = format!("fsmark-{unit_bytes}-{file_bytes}");
    fs.make_dir(&root)?;
    let unit = vec![0x5a; unit_bytes];
    let units_per_file = (file_bytes / unit_bytes) as u64;
    let start = |thread: usize| {
        let dir = format!("{root}/{thread}");
        fs.make_dir(&dir)?;
        Ok((dir, None::<Box<dyn BenchFile>>))
    };
    let sample = run_timed(FS_MARK_THREAD_COUNT, turn, start, |(dir, open), index| {
        let place = index % units_per_file;
        let mut file = match open.take().filter(|_| place > 0) {
            Some(file) => file,
            None => fs.create(&format!("{dir}/{}", index / units_per_file))?,
        };
        file.write_at(place * unit_bytes as u64, &unit)?;
        file.sync(false)?;
        *open = Some(file);
        Ok(())
    })?;
    fs.remove_tree(&root)?;
    fs.sync()?;
    Ok(sample)
}

/// The probe alone for half of the turn, then beside the writers for a whole one.
fn beside_neighbours(fs: &dyn BenchFs, plan: &Plan) -> io::Result<Outcome> {
    let probe = |path| Probe {
        path,
        unit_bytes: BLOCK_BYTES,
        pause: Duration::ZERO,
        period: Duration::from_millis(20),
        counts_write: true,
    };
    let idle = probe("alone").run(fs, plan.turn / 2)?.latency;
    let neighbours = if plan.quick {
        Neighbours { count: 2, file_bytes: 1 << 20, fsync_every: 4 }
    } else {
        Neighbours { count: 8, file_bytes: 8 << 20, fsync_every: 4 }
    };
    let busy = neighbours.beside(fs, &probe("beside"), plan.warm, plan.turn)?;
    Ok(Outcome { idle, ..Outcome::of_probe(busy) })
}
