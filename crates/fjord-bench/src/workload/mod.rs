//! The workloads. Owns what one turn does; knows targets only by [`BenchFs`].
//!
//! Invariant: preparation and clean-up of a turn are not timed, and a turn leaves no files behind
//! but those that later turns of the same workload reuse.

mod fsync;
mod huge;
mod mail;
mod stream;
mod tree;

use std::io;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;

pub(crate) use fsync::{filled, overwrite};
pub(crate) use huge::open_huge;
pub(crate) use mail::{MAIL_BYTES, VARMAIL_THREAD_COUNT, sync_after_last, varmail};
pub(crate) use stream::{LARGE_FILE, READ_FILE_BYTES};

use crate::error::{BenchError, Result};
use crate::options::{Options, Workload};
use crate::target::Stand;

/// One workload with one thread count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Case {
    pub(crate) workload: Workload,
    pub(crate) thread_count: usize,
}

impl Case {
    /// All cases that the options ask for.
    pub(crate) fn all(options: &Options) -> Vec<Case> {
        let case = |workload| move |thread_count| Case { workload, thread_count };
        let threads = |workload| match workload {
            Workload::AppendFsync
            | Workload::CreateFsync
            | Workload::OverwriteFdatasync
            | Workload::Varmail => options.fsync_threads.clone(),
            Workload::ParallelRead => options.read_threads.clone(),
            _ => vec![1],
        };
        options.workloads.iter().flat_map(|w| threads(*w).into_iter().map(case(*w))).collect()
    }
}

/// What one turn gave.
pub(crate) struct Sample {
    /// In the workload's unit.
    pub(crate) amount: f64,
    pub(crate) elapsed: Duration,
    /// Of single operations, in nanoseconds; empty where there are none.
    pub(crate) latency: Histogram<u64>,
    /// Context switches of the threads that ran them.
    pub(crate) switches: Switches,
}

/// Context switches of threads.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Switches {
    /// The thread waited.
    pub(crate) voluntary_count: u64,
    /// The thread was preempted.
    pub(crate) involuntary_count: u64,
}

impl Switches {
    /// Those of the calling thread since it began; none where /proc does not tell.
    fn of_thread() -> Switches {
        let text = std::fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
        let number = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name));
            line.and_then(|value| value.trim().parse().ok()).unwrap_or(0)
        };
        Switches {
            voluntary_count: number("voluntary_ctxt_switches:"),
            involuntary_count: number("nonvoluntary_ctxt_switches:"),
        }
    }

    fn since(self, before: Switches) -> Switches {
        Switches {
            voluntary_count: self.voluntary_count.saturating_sub(before.voluntary_count),
            involuntary_count: self.involuntary_count.saturating_sub(before.involuntary_count),
        }
    }

    pub(crate) fn add(&mut self, other: Switches) {
        self.voluntary_count += other.voluntary_count;
        self.involuntary_count += other.involuntary_count;
    }
}

impl Sample {
    /// One whose single operations were not timed.
    pub(crate) fn without_latency(amount: f64, elapsed: Duration) -> Sample {
        let (latency, switches) = (new_histogram(), Switches::default());
        Sample { amount, elapsed, latency, switches }
    }

    /// Amount per second.
    pub(crate) fn rate(&self) -> f64 {
        self.amount / self.elapsed.as_secs_f64().max(1e-9)
    }
}

/// The longest latency told apart from longer ones, in nanoseconds.
const LATENCY_NS_MAX: u64 = 1_000_000_000_000;

/// An empty histogram of nanoseconds with three digits.
pub(crate) fn new_histogram() -> Histogram<u64> {
    match Histogram::new_with_max(LATENCY_NS_MAX, 3) {
        Ok(histogram) => histogram,
        Err(_) => unreachable!("this maximum and three significant digits are allowed"),
    }
}

/// Runs one turn of a case.
pub(crate) fn run_turn(
    case: Case,
    stand: &mut Stand,
    options: &Options,
    round: u32,
) -> Result<Sample> {
    let what = format!("{} on {}", case.workload.name(), stand.target.name());
    match case.workload {
        Workload::AppendFsync => {
            fsync::append(&*stand.fs()?, case.thread_count, options.turn, round)
        }
        Workload::CreateFsync => {
            fsync::create(&*stand.fs()?, case.thread_count, options.turn, round)
        }
        Workload::OverwriteFdatasync => {
            overwrite(&*stand.fs()?, case.thread_count, options.turn, true)
        }
        Workload::Varmail => mail::turn(&*stand.fs()?, case.thread_count, options.turn, round),
        Workload::RandomWrite => fsync::random_write(&*stand.fs()?, options.turn),
        Workload::SequentialWrite => stream::write(&*stand.fs()?, options.sequential_bytes),
        Workload::SequentialRead => {
            stream::prepare_large(&*stand.fs()?, options.sequential_bytes)
                .map_err(BenchError::io(&what))?;
            stand.remount()?;
            stream::read(&*stand.fs()?, options.sequential_bytes)
        }
        Workload::ParallelRead => {
            let file_count = options.read_threads.iter().max().copied().unwrap_or(1);
            stream::prepare_many(&*stand.fs()?, file_count).map_err(BenchError::io(&what))?;
            stand.remount()?;
            stream::read_parallel(&*stand.fs()?, case.thread_count)
        }
        Workload::Untar => tree::untar(&*stand.fs()?, options.file_count, round),
        Workload::CreateUnlink => tree::create_unlink(&*stand.fs()?, options.file_count, round),
        // Not a turn on a stand; see `open_huge`.
        Workload::OpenHuge => Err(io::ErrorKind::Unsupported.into()),
    }
    .map_err(BenchError::io(what))
}

/// Runs `op` from each thread until the time is over; `start` makes a thread's state, untimed. A thread that a busy
/// machine starts late calls it once.
pub(crate) fn run_timed<S: Send>(
    thread_count: usize,
    turn: Duration,
    mut start: impl FnMut(usize) -> io::Result<S>,
    op: impl Fn(&mut S, u64) -> io::Result<()> + Sync,
) -> io::Result<Sample> {
    let states = (0..thread_count).map(&mut start).collect::<io::Result<Vec<S>>>()?;
    let began = Instant::now();
    let run_thread = |mut state: S| -> io::Result<(Histogram<u64>, Switches)> {
        let mut latency = new_histogram();
        let switches = Switches::of_thread();
        let mut index = 0;
        let mut before = began.elapsed();
        loop {
            op(&mut state, index)?;
            let after = began.elapsed();
            latency.saturating_record((after - before).as_nanos() as u64);
            before = after;
            index += 1;
            if before >= turn {
                break;
            }
        }
        Ok((latency, Switches::of_thread().since(switches)))
    };
    let results: Vec<io::Result<(Histogram<u64>, Switches)>> = std::thread::scope(|scope| {
        let threads: Vec<_> =
            states.into_iter().map(|state| scope.spawn(|| run_thread(state))).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|_| Err(io::Error::other("panic"))))
            .collect()
    });
    let elapsed = began.elapsed();
    let (mut latency, mut switches) = (new_histogram(), Switches::default());
    for result in results {
        let (thread, switched) = result?;
        // Both have the same range and digits.
        let _ = latency.add(thread);
        switches.add(switched);
    }
    Ok(Sample { amount: latency.len() as f64, elapsed, latency, switches })
}

/// A small generator, so that every target sees the same sequence (xorshift64*).
pub(crate) struct Sequence(u64);

impl Sequence {
    pub(crate) fn new(seed: u64) -> Sequence {
        Sequence(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_thread_counts_however_late_it_starts() {
        let start = |thread: usize| Ok(thread);
        let sample = run_timed(3, Duration::ZERO, start, |_, _| Ok(())).unwrap();
        assert_eq!(sample.amount, 3.0);
    }
}
