//! Drives a modelled device through virtual time: one host that writes 4 KiB at random, and keeps
//! its writes in order in one of four ways.
//!
//! Invariant: nothing here reads a real clock, and all that is random comes from one seed.

use std::collections::HashMap;

use fjord_block::epoch::{self, DeviceTraits, EpochQueue, Io, IoKind, Tuning};
use fjord_block::sim::{CommandId, Completion, Profile, SimCore, SimStats, UNIT_BYTES};
use fjord_block::{Buf, Class, Order, Request};
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
struct Source {
    rng: StdRng,
    zeroes: Buf,
}

impl Source {
    fn offset(&mut self) -> u64 {
        self.rng.random_range(0..AREA_BYTES / UNIT_BYTES) * UNIT_BYTES
    }

    fn request(&self, offset: u64, len: u64, order: Order) -> Request {
        let bufs = match len {
            UNIT_BYTES => vec![self.zeroes.clone()],
            // Neighbours that the scheduler has merged.
            len => vec![Buf::zeroed(len as usize)],
        };
        Request::Write { offset, bufs, order, fua: false, class: Class::Sync }
    }
}

/// A host that writes.
trait Host {
    /// Submits what may be submitted now.
    fn submit(&mut self, core: &mut SimCore, source: &mut Source);
    /// Learns of a completion; gives the number of writes that are done by it.
    fn completed(&mut self, core: &mut SimCore, completion: &Completion) -> Result<u32>;
}

/// Runs one way of ordering on one device.
pub(super) fn run(profile: &Profile, ordering: Ordering) -> Result<Run> {
    let mut core = SimCore::new(profile, DEVICE_BYTES);
    let zeroes = Buf::zeroed(UNIT_BYTES as usize);
    let mut source = Source { rng: StdRng::seed_from_u64(SEED), zeroes };
    let window = 2 * profile.queue_depth as usize;
    let mut host: Box<dyn Host> = match ordering {
        Ordering::Orderless => Box::new(Window { width: window, outstanding: 0 }),
        Ordering::WaitOnTransfer => Box::new(Window { width: 1, outstanding: 0 }),
        Ordering::TransferAndFlush => Box::new(Flushing { outstanding: 0, flushing: None }),
        Ordering::Barrier => Box::new(Scheduled::new(profile, window)),
    };
    let slow = ordering == Ordering::TransferAndFlush || profile.barrier.is_none();
    let count = if slow { SLOW_WRITE_COUNT } else { WRITE_COUNT };
    let warm = count / 4;
    let (mut done, mut start_ns) = (0, 0);
    while done < count {
        host.submit(&mut core, &mut source);
        let completions = core.advance_to_completion();
        if completions.is_empty() {
            return Err(BenchError::Usage("the modelled device has come to a halt".into()));
        }
        for completion in completions {
            let was_warm = done >= warm;
            done += host.completed(&mut core, &completion)?;
            if done >= warm && !was_warm {
                start_ns = core.now_ns();
                core.reset_stats();
                core.start_trace();
            }
        }
    }
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

fn checked(completion: &Completion) -> Result<()> {
    completion.result.clone().map_err(|error| BenchError::Io {
        what: "write to the modelled device".into(),
        source: error.into(),
    })
}

/// So many writes at a time, without a flush.
struct Window {
    width: usize,
    outstanding: usize,
}

impl Host for Window {
    fn submit(&mut self, core: &mut SimCore, source: &mut Source) {
        while self.outstanding < self.width {
            let offset = source.offset();
            core.submit(&source.request(offset, UNIT_BYTES, Order::Orderless));
            self.outstanding += 1;
        }
    }

    fn completed(&mut self, _: &mut SimCore, completion: &Completion) -> Result<u32> {
        checked(completion)?;
        self.outstanding -= 1;
        Ok(1)
    }
}

/// A write, then a flush, then the next write.
struct Flushing {
    outstanding: usize,
    flushing: Option<CommandId>,
}

impl Host for Flushing {
    fn submit(&mut self, core: &mut SimCore, source: &mut Source) {
        if self.outstanding == 0 {
            let offset = source.offset();
            core.submit(&source.request(offset, UNIT_BYTES, Order::Orderless));
            self.outstanding = 1;
        }
    }

    fn completed(&mut self, core: &mut SimCore, completion: &Completion) -> Result<u32> {
        checked(completion)?;
        if self.flushing.take() == Some(completion.id) {
            self.outstanding = 0;
            return Ok(1);
        }
        self.flushing = Some(core.submit(&Request::flush()));
        Ok(0)
    }
}

/// Barrier writes through the epoch scheduler.
struct Scheduled {
    queue: EpochQueue,
    width: usize,
    outstanding: usize,
    commands: HashMap<CommandId, epoch::CommandId>,
}

impl Scheduled {
    fn new(profile: &Profile, width: usize) -> Self {
        let traits = DeviceTraits::from(&profile.capabilities());
        let queue = EpochQueue::new(traits, Tuning::for_depth(profile.queue_depth));
        Scheduled { queue, width, outstanding: 0, commands: HashMap::new() }
    }
}

impl Host for Scheduled {
    fn submit(&mut self, core: &mut SimCore, source: &mut Source) {
        while self.outstanding < self.width {
            let io = Io::write(source.offset(), UNIT_BYTES, Order::Barrier, Class::Sync);
            self.queue.push(io, core.now_ns());
            self.outstanding += 1;
        }
        while let Some(command) = self.queue.next_dispatch(core.now_ns()) {
            let id = match command.kind {
                IoKind::Write { order, .. } => {
                    core.submit(&source.request(command.offset, command.len, order))
                }
                _ => core.submit(&Request::flush()),
            };
            self.commands.insert(id, command.id);
        }
    }

    fn completed(&mut self, core: &mut SimCore, completion: &Completion) -> Result<u32> {
        checked(completion)?;
        if let Some(command) = self.commands.remove(&completion.id) {
            self.queue.completed(command, Ok(()), core.now_ns());
        }
        let mut done = 0;
        while self.queue.pop_done().is_some() {
            done += 1;
            self.outstanding -= 1;
        }
        Ok(done)
    }
}
