//! An experiment in virtual time: latency of a thread's writes while another writer saturates the
//! device.
//!
//! Owns the requests of both and the seed of their offsets. Invariant: unless it is paced, the
//! writer always has the maximum number of requests outstanding, so that it uses all bandwidth that
//! it gets.

use std::collections::HashSet;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::profile::{Profile, UNIT_BYTES};
use super::queue::SimQueue;
use crate::device::{Class, Order};
use crate::epoch::{Io, RequestId, Tuning};
use crate::error::IoError;
use crate::ticket::IoResult;

/// Offsets: the thread's area, then the writer's, then the journal.
const AREA_BYTES: u64 = 256 << 20;
const JOURNAL_OFFSET: u64 = 3 * AREA_BYTES;
const DEVICE_BYTES: u64 = 1 << 30;
const SEED: u64 = 20180212;
/// How long the writer runs alone at first.
const HEAD_START_NS: u64 = 20_000_000;
/// The first requests of the thread meet a device that the writer has filled, and the scheduler
/// learns the device's latencies from them: they are not counted.
const WARM_NS: u64 = 300_000_000;
/// A thread that is idle, or only reads, has written before.
const MEET_ROUND_COUNT: u64 = 10;
/// Reads are of earlier writes at the start of the thread's area, on the medium.
const READ_BYTES: u64 = 16 << 20;
const FILL_BYTES: u64 = 512 << 10;
const FILL_NS: u64 = 200_000_000;

/// Operation that the thread repeats, in class Sync.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Probe {
    /// 4 KiB, waited for, then a flush.
    WriteFlush,
    /// Ordered data, the journal's blocks and the commit block as barriers, and a flush, which
    /// alone is waited for.
    Commit,
    /// An fsync that finds its 4 KiB in the queue: it waits for them, then flushes.
    Fsync {
        /// The class in which they were queued.
        queued: Class,
        /// Whether it raises them to its own.
        promotes: bool,
    },
    /// Reads 4 KiB that are on the medium.
    Read,
}

/// The writer that competes with the thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Writer {
    /// Of its requests.
    pub class: Class,
    /// Size of each; 4096 bytes: random offsets; more: sequential.
    pub len: u64,
    /// Requests that it has outstanding.
    pub outstanding_count: usize,
    /// Interval of requests, in ns; 0: unlimited.
    pub period_ns: u64,
}

impl Writer {
    /// 4 KiB at random.
    pub const fn random(class: Class) -> Writer {
        Writer { class, len: UNIT_BYTES, outstanding_count: 128, period_ns: 0 }
    }

    /// 512 KiB one after the other.
    pub const fn sequential(class: Class) -> Writer {
        Writer { class, len: 512 << 10, outstanding_count: 8, period_ns: 0 }
    }

    /// The same with 32 MiB outstanding: far more than a device writes before a thread should go on.
    pub const fn heap(class: Class) -> Writer {
        Writer { outstanding_count: 64, ..Writer::sequential(class) }
    }

    /// 4 KiB every millisecond: next to nothing.
    pub const fn trickle(class: Class) -> Writer {
        Writer { outstanding_count: 1, period_ns: 1_000_000, ..Writer::random(class) }
    }
}

/// The experiment.
#[derive(Clone, Debug)]
pub struct Contention {
    /// What the thread does.
    pub probe: Probe,
    /// The competing writer; None: alone.
    pub writer: Option<Writer>,
    /// The thread's mean pause between two rounds, in ns.
    pub pause_ns: u64,
    /// Idle time before each round, in addition to the pause, in ns; if not 0, the thread ran alone
    /// for some rounds at first.
    pub silence_ns: u64,
    /// Rounds that count.
    pub round_count: usize,
}

/// Result, in virtual time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Waits {
    /// Of a round, in ns.
    pub median_ns: u64,
    /// Of a round, in ns.
    pub p99_ns: u64,
    /// Bandwidth of the writer.
    pub writer_bytes_per_s: f64,
}

impl Contention {
    /// Runs it.
    ///
    /// # Errors
    /// The model refuses a request: a bug of the experiment.
    pub fn run(&self, profile: &Profile, tuning: &Tuning) -> Result<Waits, IoError> {
        let mut stage = Stage {
            sim: SimQueue::new(profile, DEVICE_BYTES, tuning.clone()),
            writer: self.writer,
            written: HashSet::new(),
            written_bytes: 0,
            next_offset: 0,
            next_ns: 0,
            rng: StdRng::seed_from_u64(SEED),
        };
        if self.probe == Probe::Read || self.silence_ns > 0 {
            stage.meet()?;
        }
        if self.probe == Probe::Read {
            stage.fill()?;
        }
        stage.pause(HEAD_START_NS)?;
        let mut start_ns = None;
        let mut times_ns = Vec::with_capacity(self.round_count);
        while times_ns.len() < self.round_count.max(1) {
            if start_ns.is_none() && stage.sim.now_ns() >= WARM_NS {
                (start_ns, stage.written_bytes) = (Some(stage.sim.now_ns()), 0);
            }
            let pause_ns = stage.rng.random_range(0..=2 * self.pause_ns);
            stage.pause(self.silence_ns + pause_ns)?;
            let time_ns = stage.round(self.probe)?;
            if start_ns.is_some() {
                times_ns.push(time_ns);
            }
        }
        let seconds = (stage.sim.now_ns() - start_ns.unwrap_or(0)) as f64 / 1e9;
        times_ns.sort_unstable();
        Ok(Waits {
            median_ns: times_ns[times_ns.len() / 2],
            p99_ns: times_ns[times_ns.len() * 99 / 100],
            writer_bytes_per_s: stage.written_bytes as f64 / seconds,
        })
    }
}

struct Stage {
    sim: SimQueue,
    writer: Option<Writer>,
    /// The writer's requests.
    written: HashSet<RequestId>,
    written_bytes: u64,
    next_offset: u64,
    /// When the writer's next request comes.
    next_ns: u64,
    rng: StdRng,
}

impl Stage {
    fn refill(&mut self) {
        let Some(writer) = self.writer else { return };
        let now_ns = self.sim.now_ns();
        while self.written.len() < writer.outstanding_count && self.next_ns <= now_ns {
            self.next_ns = self.next_ns.max(now_ns) + writer.period_ns;
            self.next_offset = match writer.len {
                UNIT_BYTES => self.rng.random_range(0..AREA_BYTES / UNIT_BYTES) * UNIT_BYTES,
                len => (self.next_offset + len) % AREA_BYTES,
            };
            let offset = AREA_BYTES + self.next_offset;
            let io = Io::write(offset, writer.len, Order::Orderless, writer.class);
            self.written.insert(self.sim.push(io));
        }
    }

    fn step(&mut self, limit_ns: u64, waited: &mut HashSet<RequestId>) -> IoResult {
        self.refill();
        let paced = self.writer.is_some_and(|writer| writer.period_ns > 0);
        let limit_ns = if paced { limit_ns.min(self.next_ns) } else { limit_ns };
        for (id, result) in self.sim.advance(limit_ns) {
            result?;
            if self.written.remove(&id) {
                self.written_bytes += self.writer.map_or(0, |writer| writer.len);
            }
            waited.remove(&id);
        }
        Ok(())
    }

    /// Lets the scheduler learn the idle device, as at a mount.
    fn meet(&mut self) -> IoResult {
        let writer = self.writer.take();
        for _ in 0..MEET_ROUND_COUNT {
            self.round(Probe::WriteFlush)?;
        }
        self.writer = writer;
        Ok(())
    }

    /// Writes the data for reads to the medium.
    fn fill(&mut self) -> IoResult {
        let writer = self.writer.take();
        for offset in (0..READ_BYTES).step_by(FILL_BYTES as usize) {
            let io = Io::write(offset, FILL_BYTES, Order::Orderless, Class::Async);
            let id = self.sim.push(io);
            self.wait(id)?;
        }
        let flush = self.sim.push(Io::flush(Class::Async));
        self.wait(flush)?;
        // A protected cache holds on to it after a flush.
        self.pause(FILL_NS)?;
        self.writer = writer;
        Ok(())
    }

    /// Lets time pass until this is done.
    fn wait(&mut self, id: RequestId) -> IoResult {
        let mut waited = HashSet::from([id]);
        while !waited.is_empty() {
            self.step(u64::MAX, &mut waited)?;
        }
        Ok(())
    }

    /// Lets the writer run alone for this time.
    fn pause(&mut self, ns: u64) -> IoResult {
        let until_ns = self.sim.now_ns() + ns;
        while self.sim.now_ns() < until_ns {
            self.step(until_ns, &mut HashSet::new())?;
        }
        Ok(())
    }

    /// Gives how long it took, in ns.
    fn round(&mut self, probe: Probe) -> Result<u64, IoError> {
        let offset = self.rng.random_range(0..AREA_BYTES / UNIT_BYTES) * UNIT_BYTES;
        let write = |offset, order| Io::write(offset, UNIT_BYTES, order, Class::Sync);
        self.refill();
        let start_ns = self.sim.now_ns();
        match probe {
            Probe::WriteFlush => {
                let id = self.sim.push(write(offset, Order::Orderless));
                self.wait(id)?;
            }
            Probe::Commit => {
                self.sim.push(write(offset, Order::Ordered));
                self.sim.push(write(JOURNAL_OFFSET, Order::Barrier));
                self.sim.push(write(JOURNAL_OFFSET + UNIT_BYTES, Order::Barrier));
            }
            Probe::Fsync { queued, promotes } => {
                let id = self.sim.push(Io { class: queued, ..write(offset, Order::Orderless) });
                if promotes {
                    self.sim.promote(id);
                }
                self.wait(id)?;
            }
            Probe::Read => {
                let offset = offset % READ_BYTES;
                let id = self.sim.push(Io::read(offset, UNIT_BYTES, Class::Sync));
                self.wait(id)?;
                return Ok(self.sim.now_ns() - start_ns);
            }
        }
        let flush = self.sim.push(Io::flush(Class::Sync));
        self.wait(flush)?;
        Ok(self.sim.now_ns() - start_ns)
    }
}
