//! The scheduler above a device that writes nothing back before it is told to, as an image file in
//! the host's memory does: writes are fast and say nothing of what the next flush has to drain. The
//! modelled devices write back all the time, so that their queues already keep their caches short.
//! In virtual time.

use std::collections::{BTreeMap, HashSet};

use fjord_block::epoch::{CommandId, DeviceTraits, EpochQueue, Io, IoKind, RequestId, Tuning};
use fjord_block::{Class, Order};

const PAGE_BYTES: u64 = 4096;
/// Of a request of the writer.
const LONG_BYTES: u64 = 512 << 10;
const OUTSTANDING_COUNT: usize = 8;
const QUEUE_DEPTH: u32 = 32;
/// Of any write, besides 2 GB/s over the bus.
const WRITE_NS: u64 = 20_000;
/// Of any flush, besides 200 MB/s to the medium.
const FLUSH_NS: u64 = 1_000_000;
const DRAIN_NS_PER_BYTE: u64 = 5;
/// A full cache makes room by itself before it takes more.
const CACHE_BYTES: u64 = 64 << 20;
const NOISE_NS: u64 = 500_000;
const PAUSE_NS: u64 = 10_000_000;
const FACTOR_MAX: u64 = 3;

struct Lazy {
    queue: EpochQueue,
    now_ns: u64,
    bus_free_ns: u64,
    /// Bytes in the cache.
    dirty_bytes: u64,
    /// Commands under way by their end, with what they add to the cache.
    in_flight: BTreeMap<(u64, CommandId), u64>,
    has_writer: bool,
    /// The processor is away now and then: commands seem to take longer than the device does.
    is_noisy: bool,
    noise: u64,
    written: HashSet<RequestId>,
    written_bytes: u64,
    next_offset: u64,
}

impl Lazy {
    fn new() -> Lazy {
        let traits = DeviceTraits {
            volatile_cache: true,
            fua: false,
            native_barrier: false,
            queue_depth: QUEUE_DEPTH,
            logical_block_size: 512,
        };
        Lazy {
            queue: EpochQueue::new(traits, Tuning::for_depth(QUEUE_DEPTH)),
            now_ns: 0,
            bus_free_ns: 0,
            dirty_bytes: 0,
            in_flight: BTreeMap::new(),
            has_writer: false,
            is_noisy: false,
            noise: 1,
            written: HashSet::new(),
            written_bytes: 0,
            next_offset: 1 << 30,
        }
    }

    /// Goes on to the next completion, at the most to `limit_ns`; gives what is done then.
    fn step(&mut self, limit_ns: u64) -> Vec<RequestId> {
        while self.has_writer && self.written.len() < OUTSTANDING_COUNT {
            let io = Io::write(self.next_offset, LONG_BYTES, Order::Orderless, Class::Async);
            self.next_offset += LONG_BYTES;
            self.written.insert(self.queue.push(io, self.now_ns));
        }
        while let Some(command) = self.queue.next_dispatch(self.now_ns) {
            let (end_ns, added_bytes) = match command.kind {
                IoKind::Flush => {
                    let drain_ns = std::mem::take(&mut self.dirty_bytes) * DRAIN_NS_PER_BYTE;
                    (self.now_ns + FLUSH_NS + drain_ns, 0)
                }
                _ => {
                    let is_full = self.dirty_bytes >= CACHE_BYTES;
                    let take_ns =
                        if is_full { command.len * DRAIN_NS_PER_BYTE } else { command.len / 2 };
                    self.bus_free_ns = self.bus_free_ns.max(self.now_ns) + take_ns;
                    (self.bus_free_ns + WRITE_NS, if is_full { 0 } else { command.len })
                }
            };
            let end_ns = end_ns + self.absence_ns();
            self.in_flight.insert((end_ns, command.id), added_bytes);
        }
        match self.in_flight.first_key_value() {
            Some((&(end_ns, id), &added_bytes)) if end_ns <= limit_ns => {
                self.in_flight.remove(&(end_ns, id));
                self.now_ns = end_ns;
                self.dirty_bytes += added_bytes;
                self.queue.completed(id, Ok(()), end_ns);
            }
            _ => self.now_ns = limit_ns,
        }
        let done = std::iter::from_fn(|| self.queue.pop_done()).map(|(id, _)| id);
        let done: Vec<_> = done.collect();
        let long_count = done.iter().filter(|id| self.written.remove(id)).count();
        self.written_bytes += long_count as u64 * LONG_BYTES;
        done
    }

    /// For how long the processor is away: every other time not at all, else up to 0.5 ms.
    fn absence_ns(&mut self) -> u64 {
        self.noise = self.noise.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let random = self.noise >> 33;
        if self.is_noisy && random.is_multiple_of(2) { random % NOISE_NS } else { 0 }
    }

    fn wait(&mut self, io: Io) {
        let id = self.queue.push(io, self.now_ns);
        while !self.step(u64::MAX).contains(&id) {}
    }

    /// A pause, and then how long a write and a flush take, in ns.
    fn round(&mut self) -> u64 {
        let pause_end_ns = self.now_ns + PAUSE_NS;
        while self.now_ns < pause_end_ns {
            self.step(pause_end_ns);
        }
        self.wait(Io::write(0, PAGE_BYTES, Order::Orderless, Class::Sync));
        self.wait(Io::flush(Class::Sync));
        self.now_ns - pause_end_ns
    }
}

/// The bound on what lower classes have in the cache is what keeps the flush short here.
#[test]
fn a_flush_waits_three_times_as_long_at_most_where_nothing_is_written_back() {
    let mut lazy = Lazy::new();
    let alone_ns = (0..10).map(|_| lazy.round()).max().unwrap();
    lazy.has_writer = true;
    // It learns.
    for _ in 0..50 {
        lazy.round();
    }
    let (start_ns, start_bytes) = (lazy.now_ns, lazy.written_bytes);
    let mut times_ns: Vec<_> = (0..200).map(|_| lazy.round()).collect();
    times_ns.sort_unstable();
    let bytes_per_s =
        (lazy.written_bytes - start_bytes) as f64 * 1e9 / (lazy.now_ns - start_ns) as f64;
    let [median_ns, p99_ns] = [50, 99].map(|percent| times_ns[times_ns.len() * percent / 100]);
    let text = format!(
        "alone {alone_ns} ns, beside it {median_ns} and {p99_ns} ns, writer {bytes_per_s:.0} B/s"
    );
    println!("{text}");
    assert!(p99_ns <= FACTOR_MAX * alone_ns, "{text}");
    assert!(bytes_per_s > 1e6, "the writer starves: {text}");
}

/// What the writer reaches beside rounds of write and flush, in bytes per second.
fn written_beside(is_noisy: bool) -> f64 {
    let mut lazy = Lazy::new();
    let rounds = |lazy: &mut Lazy, count: u32| {
        for _ in 0..count {
            lazy.round();
        }
    };
    lazy.is_noisy = is_noisy;
    rounds(&mut lazy, 10);
    lazy.has_writer = true;
    rounds(&mut lazy, 50);
    let (start_ns, start_bytes) = (lazy.now_ns, lazy.written_bytes);
    rounds(&mut lazy, 300);
    (lazy.written_bytes - start_bytes) as f64 * 1e9 / (lazy.now_ns - start_ns) as f64
}

/// Times that vary for other reasons do not narrow the writer to nothing.
#[test]
fn a_writer_goes_on_where_times_vary_by_themselves() {
    let (calm, noisy) = (written_beside(false), written_beside(true));
    println!("{calm:.0} B/s, noisy {noisy:.0} B/s");
    assert!(noisy >= calm / 4.0, "{calm:.0} B/s, noisy {noisy:.0} B/s");
}
