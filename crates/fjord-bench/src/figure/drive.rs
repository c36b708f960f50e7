//! Drives a modelled device through virtual time: one host that writes 4 KiB at random, and keeps
//! its writes in order in one of four ways.
//!
//! Invariant: nothing here reads a real clock, and all that is random comes from one seed.

use fjord_block::epoch::{Io, Tuning};
use fjord_block::sim::{Profile, SimCore, SimQueue, SimStats, UNIT_BYTES};
use fjord_block::{Buf, Class, IoResult, Order, Request};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::ordering::Ordering;
use crate::error::{BenchError, Result};

const DEVICE_BYTES: u64 = 1 << 30;
/// The writes go to this much of the device.
const AREA_BYTES: u64 = 64 << 20;
const SEED: u64 = 20180212;
/// Writes on a flash device; the first quarter fills the cache and is not counted.
const WRITE_COUNT: u32 = 24_000;
/// Writes where one takes milliseconds.
const SLOW_WRITE_COUNT: u32 = 2_000;
/// Changes of the queue depth that a figure shows.
const DEPTH_COUNT_MAX: usize = 200;

/// What a run gave.
pub(super) struct Run {
    pub(super) writes_per_s: f64,
    pub(super) stats: SimStats,
    /// Changes of the queue depth (µs, commands).
    pub(super) depths: Vec<(f64, u32)>,
}

/// Where the writes go.
struct Places(StdRng);

impl Places {
    fn next(&mut self) -> u64 {
        self.0.random_range(0..AREA_BYTES / UNIT_BYTES) * UNIT_BYTES
    }
}

/// A host that writes.
trait Host {
    /// Submits what may be submitted and lets time pass until something is done; gives the number
    /// of writes.
    fn step(&mut self, places: &mut Places) -> Result<u32>;
    fn core(&mut self) -> &mut SimCore;
}

/// Runs one way of ordering on one device.
pub(super) fn run(profile: &Profile, ordering: Ordering) -> Result<Run> {
    let window = 2 * profile.queue_depth;
    let mut host: Box<dyn Host> = match ordering {
        Ordering::Orderless => Box::new(Direct::new(profile, window, false)),
        Ordering::WaitOnTransfer => Box::new(Direct::new(profile, 1, false)),
        Ordering::TransferAndFlush => Box::new(Direct::new(profile, 1, true)),
        Ordering::Barrier => Box::new(Scheduled::new(profile, window)),
    };
    let mut places = Places(StdRng::seed_from_u64(SEED));
    let slow = ordering == Ordering::TransferAndFlush || profile.barrier.is_none();
    let count = if slow { SLOW_WRITE_COUNT } else { WRITE_COUNT };
    let warm = count / 4;
    let (mut done, mut start_ns) = (0, 0);
    while done < count {
        let was_warm = done >= warm;
        done += host.step(&mut places)?;
        if done >= warm && !was_warm {
            start_ns = host.core().now_ns();
            host.core().reset_stats();
            host.core().start_trace();
        }
    }
    let core = host.core();
    let seconds = (core.now_ns() - start_ns) as f64 / 1e9;
    let depths = core.take_trace().queue_depths;
    let first_ns = depths.first().map_or(0, |(at_ns, _)| *at_ns);
    let shown = depths.into_iter().take(DEPTH_COUNT_MAX);
    Ok(Run {
        writes_per_s: f64::from(done - warm) / seconds,
        stats: core.stats(),
        depths: shown.map(|(at_ns, depth)| ((at_ns - first_ns) as f64 / 1e3, depth)).collect(),
    })
}

/// So many orderless writes at a time, straight to the device; each flushed or none.
struct Direct {
    core: SimCore,
    data: Buf,
    width: u32,
    outstanding: u32,
    flushes: bool,
}

impl Direct {
    fn new(profile: &Profile, width: u32, flushes: bool) -> Self {
        let core = SimCore::new(profile, DEVICE_BYTES);
        Direct { core, data: Buf::zeroed(UNIT_BYTES as usize), width, outstanding: 0, flushes }
    }

    /// Gives the number of commands that are done.
    fn wait(&mut self) -> Result<u32> {
        counted(self.core.advance_to_completion().into_iter().map(|done| done.result))
    }
}

impl Host for Direct {
    fn step(&mut self, places: &mut Places) -> Result<u32> {
        while self.outstanding < self.width {
            self.core.submit(&Request::write(places.next(), vec![self.data.clone()]));
            self.outstanding += 1;
        }
        let done = self.wait()?;
        self.outstanding -= done;
        if self.flushes {
            self.core.submit(&Request::flush());
            self.wait()?;
        }
        Ok(done)
    }

    fn core(&mut self) -> &mut SimCore {
        &mut self.core
    }
}

/// Barrier writes through the epoch scheduler.
struct Scheduled {
    sim: SimQueue,
    width: u32,
    outstanding: u32,
}

impl Scheduled {
    fn new(profile: &Profile, width: u32) -> Self {
        let tuning = Tuning::for_depth(profile.queue_depth);
        Scheduled { sim: SimQueue::new(profile, DEVICE_BYTES, tuning), width, outstanding: 0 }
    }
}

impl Host for Scheduled {
    fn step(&mut self, places: &mut Places) -> Result<u32> {
        while self.outstanding < self.width {
            self.sim.push(Io::write(places.next(), UNIT_BYTES, Order::Barrier, Class::Sync));
            self.outstanding += 1;
        }
        let done = counted(self.sim.advance(u64::MAX).into_iter().map(|(_, result)| result))?;
        self.outstanding -= done;
        Ok(done)
    }

    fn core(&mut self) -> &mut SimCore {
        self.sim.core_mut()
    }
}

/// The number of results, all of them good.
fn counted(results: impl ExactSizeIterator<Item = IoResult>) -> Result<u32> {
    if results.len() == 0 {
        return Err(BenchError::Usage("the modelled device has come to a halt".into()));
    }
    let mut count = 0;
    for result in results {
        result.map_err(|error| BenchError::Io {
            what: "write to the modelled device".into(),
            source: error.into(),
        })?;
        count += 1;
    }
    Ok(count)
}
