//! What the locks of a file system cost, and how far it can scale with them: the last table of the slides on
//! parallel journaling (FAST '18), for fjord as a library on a modelled device in real time.
//!
//! Owns the workloads; [`lock_stats`] counts, in builds with the feature `lock-stats`.

use std::fmt::Write as _;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier, Mutex, PoisonError};
use std::time::{Duration, Instant};

use fjord::{AreaLayout, DataMode, Fs, FsyncPolicyKind, JournalLists, MkfsOptions, MountOptions};
use fjord_block::MemDevice;
use fjord_block::lock::{LockStats, allocation_count, lock_stats, reset_lock_stats};
use fjord_block::sim::{Profile, SimDevice};
use serde::Serialize;

use crate::error::{BenchError, Result};
use crate::target::{BenchFile, BenchFs, LibraryFs};
use crate::workload::Sequence;

const BLOCK_BYTES: u64 = 4096;
const IMAGE_BYTES: u64 = 1 << 30;
/// Size of each file of the random writes.
const FILE_BYTES: u64 = 16 << 20;
const AREA_BYTES: u64 = 8 << 20;
/// Processors for which the bound is told: those of the slides, and fewer.
const PROCESSOR_COUNTS: [u32; 3] = [8, 16, 72];
/// What the slides measured on.
const P3700: Profile = Profile::P3700;

/// What is measured, and how long.
#[derive(Clone, Debug)]
pub struct LockOptions {
    /// Rounds; the report has the median by rate.
    pub round_count: u32,
    /// Length of a round.
    pub turn: Duration,
}

impl Default for LockOptions {
    fn default() -> LockOptions {
        LockOptions { round_count: 1, turn: Duration::from_secs(2) }
    }
}

/// What the threads do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Work {
    AppendFsync,
    CreateFsync,
    RandomWrite,
}

/// Workload by workload, and their numbers of threads.
const CASES: [(Work, FsyncPolicyKind, DataMode, &str); 4] = [
    (Work::AppendFsync, FsyncPolicyKind::Ijournal, DataMode::Ordered, "append + fsync, ijournal"),
    (
        Work::CreateFsync,
        FsyncPolicyKind::Ijournal,
        DataMode::Ordered,
        "create + write + fsync, ijournal",
    ),
    (
        Work::CreateFsync,
        FsyncPolicyKind::Compound,
        DataMode::Ordered,
        "create + write + fsync, compound",
    ),
    (
        Work::RandomWrite,
        FsyncPolicyKind::Compound,
        DataMode::Journal,
        "4 KiB random writes, data=journal",
    ),
];
const THREAD_COUNTS: [usize; 2] = [1, 8];

/// The locks of one rank during a workload.
#[derive(Clone, Debug, Serialize)]
pub struct LockCost {
    /// Name of the rank: docs/locking.md says which lock it is.
    pub lock: String,
    /// There is one in a file system, so that its time bounds how far it scales.
    pub of_the_file_system: bool,
    /// Taken so often per operation.
    pub taken_per_operation: f64,
    /// Held per operation.
    pub held_ns_per_operation: f64,
    /// Held in one piece, at most.
    pub held_us_max: f64,
    /// Waited for, as a share of the time of all threads, in percent.
    pub waited_percent: f64,
}

/// One workload with one number of threads: the median round by rate.
#[derive(Clone, Debug, Serialize)]
pub struct LockRow {
    /// What the threads do, and how it is made durable.
    pub workload: String,
    /// How changes enter a transaction: the mount option `journal_lists`.
    pub journal_lists: String,
    /// Number of threads.
    pub thread_count: usize,
    /// Operations per second.
    pub operations_per_s: f64,
    /// The same of the slowest and the fastest round.
    pub operations_per_s_range: (f64, f64),
    /// Allocations per operation, those of the modelled device and of the workload included.
    pub allocations_per_operation: f64,
    /// Costs, most waited for first, then longest held.
    pub locks: Vec<LockCost>,
    /// Number of processors, and how much faster than one thread all may be together by the lock of the file
    /// system that an operation holds longest.
    pub bounds: Vec<(u32, f64)>,
}

/// The figure's numbers.
#[derive(Clone, Debug, Serialize)]
pub struct LocksReport {
    /// The figure's name.
    pub figure: String,
    /// The modelled device.
    pub device: String,
    /// Rounds of each row.
    pub round_count: u32,
    /// Processors of this machine.
    pub processor_count: usize,
    /// Workload by workload.
    pub rows: Vec<LockRow>,
}

/// Measures the figure `locks`.
///
/// # Errors
/// [`BenchError::Usage`] in a build without the feature `lock-stats`; failures of the file system.
pub fn run_locks(options: &LockOptions) -> Result<LocksReport> {
    if lock_stats().is_none() {
        return Err(BenchError::Usage(
            "this build does not count locks: build with `cargo build --release --features lock-stats \
             --package fjord-cli`"
                .into(),
        ));
    }
    let mut rows = Vec::new();
    for (work, policy, data, name) in CASES {
        let mut alone_ns = [None; JournalLists::ALL.len()];
        for thread_count in THREAD_COUNTS {
            let mut rounds = JournalLists::ALL.map(|_| Vec::new());
            // They take turns.
            for _ in 0..options.round_count.max(1) {
                for (lists, rounds) in JournalLists::ALL.into_iter().zip(&mut rounds) {
                    let mount = MountOptions {
                        fsync: policy,
                        data,
                        journal_lists: lists,
                        ..MountOptions::default()
                    };
                    let round = measure(work, &mount, thread_count, options.turn);
                    rounds.push(round.map_err(BenchError::io(name))?);
                }
            }
            let all = JournalLists::ALL.into_iter().zip(rounds).zip(&mut alone_ns);
            for ((lists, mut rounds), alone_ns) in all {
                rounds.sort_by(|a, b| a.rate().total_cmp(&b.rate()));
                let range = (rounds[0].rate(), rounds[rounds.len() - 1].rate());
                let median = &rounds[rounds.len() / 2];
                let alone_ns = *alone_ns.get_or_insert(1e9 / median.rate());
                let row = median.row((name, lists), thread_count, range, alone_ns);
                rows.push(row);
            }
        }
    }
    let processor_count = std::thread::available_parallelism().map_or(1, usize::from);
    Ok(LocksReport {
        figure: "locks".into(),
        device: format!("{} ({})", P3700.name, P3700.about),
        round_count: options.round_count.max(1),
        processor_count,
        rows,
    })
}

/// One round.
struct Round {
    operation_count: u64,
    time: Duration,
    stats: Vec<LockStats>,
    allocation_count: u64,
}

fn failed(error: fjord::Error) -> io::Error {
    io::Error::other(error)
}

/// An empty file system on the modelled device.
fn open(options: &MountOptions) -> io::Result<LibraryFs> {
    let memory = Arc::new(MemDevice::new(IMAGE_BYTES));
    let compound = MountOptions { fsync: FsyncPolicyKind::Compound, ..MountOptions::default() };
    let fs = Fs::create_on(memory.clone(), &MkfsOptions::default(), &compound).map_err(failed)?;
    if options.fsync == FsyncPolicyKind::Ijournal {
        let count = THREAD_COUNTS[THREAD_COUNTS.len() - 1] as u32;
        fs.set_ijournal_areas(Some(AreaLayout { count, area_bytes: AREA_BYTES }))
            .map_err(failed)?;
    }
    fs.unmount().map_err(failed)?;
    let device = SimDevice::with_contents(&P3700, memory.snapshot());
    LibraryFs::on(Arc::new(device), options, false).map_err(io::Error::other)
}

/// What a thread works on.
struct Worker<'a> {
    fs: &'a dyn BenchFs,
    work: Work,
    dir: String,
    file: Box<dyn BenchFile>,
    sequence: Sequence,
    count: u64,
}

impl Worker<'_> {
    fn new(fs: &dyn BenchFs, work: Work, thread: usize) -> io::Result<Worker<'_>> {
        let dir = format!("d{thread}");
        fs.make_dir(&dir)?;
        let mut file = fs.create(&format!("{dir}/file"))?;
        if work == Work::RandomWrite {
            let chunk = vec![1; 1 << 20];
            for offset in (0..FILE_BYTES).step_by(chunk.len()) {
                file.write_at(offset, &chunk)?;
            }
        }
        file.sync(false)?;
        let sequence = Sequence::new(thread as u64 + 1);
        Ok(Worker { fs, work, dir, file, sequence, count: 0 })
    }

    fn step(&mut self) -> io::Result<()> {
        let block = [0x5a; BLOCK_BYTES as usize];
        self.count += 1;
        match self.work {
            Work::AppendFsync => {
                self.file.write_at(self.count * BLOCK_BYTES, &block)?;
                self.file.sync(false)
            }
            Work::CreateFsync => {
                let mut file = self.fs.create(&format!("{}/{}", self.dir, self.count))?;
                file.write_at(0, &block)?;
                file.sync(false)
            }
            Work::RandomWrite => {
                let index = self.sequence.next() % (FILE_BYTES / BLOCK_BYTES);
                self.file.write_at(index * BLOCK_BYTES, &block)
            }
        }
    }
}

fn measure(
    work: Work,
    options: &MountOptions,
    thread_count: usize,
    turn: Duration,
) -> io::Result<Round> {
    let fs = open(options)?;
    let workers = (0..thread_count)
        .map(|thread| Worker::new(&fs, work, thread))
        .collect::<io::Result<Vec<_>>>()?;
    fs.sync()?;
    let (ended, begin) = (AtomicBool::new(false), Barrier::new(thread_count + 1));
    let failure = Mutex::new(None);
    let run = |mut worker: Worker<'_>| {
        begin.wait();
        while !ended.load(Ordering::Relaxed) {
            if let Err(error) = worker.step() {
                *failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
                break;
            }
        }
        worker.count
    };
    let (operation_count, time, stats, allocation_count) = std::thread::scope(|scope| {
        let threads: Vec<_> =
            workers.into_iter().map(|worker| scope.spawn(|| run(worker))).collect();
        reset_lock_stats();
        let before = allocation_count().unwrap_or(0);
        begin.wait();
        let began = Instant::now();
        std::thread::sleep(turn);
        // Before the last operations end: these wait for more than they would.
        let (stats, time) = (lock_stats().unwrap_or_default(), began.elapsed());
        let allocations = allocation_count().unwrap_or(0) - before;
        ended.store(true, Ordering::Relaxed);
        let counts = threads.into_iter().map(|thread| thread.join().unwrap_or(0));
        let count = counts.sum::<u64>().saturating_sub(thread_count as u64);
        (count, time, stats, allocations)
    });
    match failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(error) => Err(error),
        None => {
            Ok(Round { operation_count: operation_count.max(1), time, stats, allocation_count })
        }
    }
}

impl Round {
    fn rate(&self) -> f64 {
        self.operation_count as f64 / self.time.as_secs_f64()
    }

    fn row(
        &self,
        (name, lists): (&str, JournalLists),
        thread_count: usize,
        range: (f64, f64),
        alone_ns: f64,
    ) -> LockRow {
        let per_operation = |count: u64| count as f64 / self.operation_count as f64;
        let all_ns = self.time.as_nanos() as f64 * thread_count as f64;
        let cost = |stats: &LockStats| LockCost {
            lock: format!("{:?}", stats.rank),
            of_the_file_system: stats.rank.is_of_the_file_system(),
            taken_per_operation: per_operation(stats.taken_count),
            held_ns_per_operation: per_operation(stats.held_ns),
            held_us_max: stats.held_ns_max as f64 / 1e3,
            waited_percent: 100.0 * stats.waited_ns as f64 / all_ns,
        };
        let mut locks: Vec<LockCost> = self.stats.iter().map(cost).collect();
        locks.sort_by(|a, b| {
            let by_wait = b.waited_percent.total_cmp(&a.waited_percent);
            by_wait.then(b.held_ns_per_operation.total_cmp(&a.held_ns_per_operation))
        });
        let of_fs = locks.iter().filter(|lock| lock.of_the_file_system);
        let held_ns = of_fs.map(|lock| lock.held_ns_per_operation).fold(0.0, f64::max);
        let bound = |count: u32| (count, f64::from(count).min(alone_ns / held_ns.max(1.0)));
        LockRow {
            workload: name.into(),
            journal_lists: lists.name().into(),
            thread_count,
            allocations_per_operation: per_operation(self.allocation_count),
            operations_per_s: self.rate(),
            operations_per_s_range: range,
            locks,
            bounds: PROCESSOR_COUNTS.map(bound).to_vec(),
        }
    }
}

impl LockRow {
    /// The lock of the file system that an operation holds longest.
    fn longest(&self) -> Option<&LockCost> {
        let of_fs = self.locks.iter().filter(|lock| lock.of_the_file_system);
        of_fs.max_by(|a, b| a.held_ns_per_operation.total_cmp(&b.held_ns_per_operation))
    }
}

impl LocksReport {
    /// The figure as a table of text.
    pub fn to_table(&self) -> String {
        const LOCK_COUNT_MAX: usize = 10;
        let mut text = format!(
            "locks of fjord as a library on {}, {} rounds, {} processors\n",
            self.device, self.round_count, self.processor_count
        );
        for row in &self.rows {
            let (least, most) = row.operations_per_s_range;
            let _ = writeln!(
                text,
                "\n{}, {} lists, {} threads: {:.0} operations/s ({least:.0} to {most:.0}), {:.1} allocations/op",
                row.workload,
                row.journal_lists,
                row.thread_count,
                row.operations_per_s,
                row.allocations_per_operation
            );
            let _ = writeln!(
                text,
                "  {:<22}{:>12}{:>12}{:>14}{:>12}",
                "lock", "taken/op", "held ns/op", "longest µs", "waited %"
            );
            for lock in row.locks.iter().take(LOCK_COUNT_MAX) {
                let name =
                    format!("{}{}", lock.lock, if lock.of_the_file_system { " *" } else { "" });
                let _ = writeln!(
                    text,
                    "  {name:<22}{:>12.2}{:>12.0}{:>14.0}{:>12.2}",
                    lock.taken_per_operation,
                    lock.held_ns_per_operation,
                    lock.held_us_max,
                    lock.waited_percent
                );
            }
            if let Some(longest) = row.longest() {
                let bounds: Vec<String> = row
                    .bounds
                    .iter()
                    .map(|(count, bound)| format!("{count} processors {bound:.1}"))
                    .collect();
                let _ = writeln!(
                    text,
                    "  at most, by {}, × one thread: {}",
                    longest.lock,
                    bounds.join(", ")
                );
            }
        }
        text.push_str(
            "\n* one for the file system. Waited: of the time of all threads, waits below 1 µs left out.\n\
             The bound is what that lock alone allows, if its time per operation stays as it is here: it\n\
             counts no waits for the device that a lock is held over as ones that others could share, no\n\
             caches that move between processors, and no other limit. Each lock costs some 60 ns more\n\
             for being counted.\n",
        );
        text
    }

    /// The figure as JSON.
    pub fn to_json(&self) -> String {
        match serde_json::to_string_pretty(self) {
            Ok(json) => json,
            Err(_) => unreachable!("strings, numbers and lists always serialise"),
        }
    }
}
