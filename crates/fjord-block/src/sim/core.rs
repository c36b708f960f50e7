//! The model: an event-driven machine with its own clock and no threads.
//!
//! Owns the command queue, the controller, the bus, the cache and (through [`Log`] and [`Chips`])
//! contents and medium. Deterministic: the same calls at the same virtual times give the same
//! results, in a loop over virtual time or in real time ([`super::SimDevice`]).
//!
//! Path of a write: host (one command at a time, `dispatch_ns`) → queue → controller
//! (`setup_ns`) → bus, as soon as the cache has room → cache: *transferred*; completed
//! `write_ack_ns` later; meanwhile the drain programs it: *persisted*.
//!
//! Invariants:
//! - at most `queue_depth` commands are between dispatch and completion; more wait in the host, in
//!   order;
//! - a command with the barrier flag is transferred after all commands dispatched before it and
//!   before all dispatched after it; the rest in any order;
//! - a flush covers all data transferred when it left the queue, which includes all that had
//!   completed when it was submitted.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::cut::{CutScope, CutState};
use super::log::{Data, Log, Progress, split};
use super::medium::{Chips, DrainUnit, Job, Started};
use super::profile::{BarrierForm, Profile, TransferOrder, UNIT_BYTES};
use super::stats::{Meter, Persisted, SimStats, SimTrace, Transferred};
use crate::device::{Order, Request, check_range};
use crate::error::{IoError, IoOp};
use crate::mem::MemImage;
use crate::ticket::IoResult;

/// Identifies a command; never reused by one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CommandId(pub u64);

/// A command that is done.
#[derive(Clone, Debug)]
pub struct Completion {
    /// Which.
    pub id: CommandId,
    /// When, in virtual nanoseconds.
    pub at_ns: u64,
    /// Its result.
    pub result: IoResult,
    /// What was read; None for other commands and for failed reads.
    pub data: Option<Vec<u8>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// The host has handed the command over.
    Arrived(CommandId),
    /// The controller has prepared the transfer.
    SetUp(CommandId),
    /// The bus is done with it.
    Transferred(CommandId),
    /// A chip has finished its job.
    /// Which chip, and which start of its job.
    ChipDone(u32, u64),
    /// The host learns that it is done.
    Completed(CommandId),
}

#[derive(Debug)]
enum Kind {
    Write {
        units: Vec<(u64, Data)>,
        barrier: bool,
        fua: bool,
    },
    /// Discard and write-zeroes: the mapping table alone.
    Zeroes {
        offset: u64,
        len: u64,
    },
    Read {
        offset: u64,
        len: u64,
        chips_left: u32,
        data: Option<Vec<u8>>,
    },
    Flush,
}

#[derive(Debug)]
struct Command {
    kind: Kind,
    op: IoOp,
    offset: u64,
    len: u64,
    /// What is durable once it completes.
    covers: Option<std::ops::Range<u64>>,
}

/// A flush or FUA write that waits for the medium.
#[derive(Debug)]
struct Waiting {
    id: CommandId,
    /// All entries before this number must be programmed…
    limit: u64,
    /// … or, for a FUA write that may overtake the cache, so many units of its own.
    own_units_left: Option<usize>,
}

/// See the module.
#[derive(Debug)]
pub struct SimCore {
    profile: Profile,
    size_bytes: u64,
    now_ns: u64,
    /// By time, then in order of scheduling.
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    event_count: u64,
    commands: HashMap<CommandId, Command>,
    next_id: u64,
    /// Submitted, not yet dispatched.
    host_queue: VecDeque<CommandId>,
    host_free_ns: u64,
    /// Dispatched, not yet completed.
    depth: u32,
    /// In the device, not yet begun, in order of dispatch.
    queue: VecDeque<CommandId>,
    /// What the controller prepares.
    in_setup: Option<CommandId>,
    /// A write that waits for the bus and for room in the cache.
    prepared: Option<CommandId>,
    /// Reads that wait for the bus.
    read_ready: VecDeque<CommandId>,
    /// What is on the bus.
    on_bus: Option<CommandId>,
    /// Writes between the start of their setup and the end of their transfer.
    begun_count: u32,
    /// One of them has the barrier flag.
    barrier_begun: bool,
    stalled_since_ns: Option<u64>,
    /// Units in the cache, and how often each unit number.
    cache_used: u32,
    cached: HashMap<u64, u32>,
    waiting: Vec<Waiting>,
    log: Log,
    chips: Chips,
    meter: Meter,
    rng: Option<StdRng>,
    powered: bool,
    done: Vec<Completion>,
}

impl SimCore {
    /// An empty device of `size_bytes`.
    pub fn new(profile: &Profile, size_bytes: u64) -> Self {
        SimCore::with_contents(profile, MemImage::new(size_bytes))
    }

    /// A device that holds `contents`, all durable.
    pub fn with_contents(profile: &Profile, contents: MemImage) -> Self {
        let protected = profile.power_loss_protection;
        let transactional =
            !protected && profile.barrier == Some(BarrierForm::TransactionalWriteback);
        let size_bytes = contents.size_bytes();
        SimCore {
            size_bytes,
            now_ns: 0,
            events: BinaryHeap::new(),
            event_count: 0,
            commands: HashMap::new(),
            next_id: 0,
            host_queue: VecDeque::new(),
            host_free_ns: 0,
            depth: 0,
            queue: VecDeque::new(),
            in_setup: None,
            prepared: None,
            read_ready: VecDeque::new(),
            on_bus: None,
            begun_count: 0,
            barrier_begun: false,
            stalled_since_ns: None,
            cache_used: 0,
            cached: HashMap::new(),
            waiting: Vec::new(),
            log: Log::new(contents, protected, transactional),
            chips: Chips::new(profile, size_bytes),
            meter: Meter::default(),
            rng: match profile.transfer_order {
                TransferOrder::Fifo => None,
                TransferOrder::Random(seed) => Some(StdRng::seed_from_u64(seed)),
            },
            powered: true,
            done: Vec::new(),
            profile: profile.clone(),
        }
    }

    /// The constants of the device.
    pub fn profile(&self) -> &Profile {
        &self.profile
    }

    /// Size in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// The virtual time.
    pub fn now_ns(&self) -> u64 {
        self.now_ns
    }

    /// Commands dispatched and not completed.
    pub fn queue_depth(&self) -> u32 {
        self.depth
    }

    /// Commands submitted and not completed, those that wait for a place in the queue included.
    pub fn outstanding_count(&self) -> usize {
        self.commands.len()
    }

    /// When the next thing happens by itself; None when the device is idle.
    pub fn next_event_ns(&self) -> Option<u64> {
        if !self.done.is_empty() {
            return Some(self.now_ns);
        }
        self.events.peek().map(|Reverse((at_ns, _, _))| *at_ns)
    }

    /// Submits a request at the present time. Failures, too, come as a [`Completion`].
    pub fn submit(&mut self, request: &Request) -> CommandId {
        let (op, offset, len) = request.extent();
        let kind = match request {
            Request::Write { bufs, order, fua, .. } => Kind::Write {
                units: split(offset, bufs),
                barrier: *order == Order::Barrier && self.profile.barrier.is_some(),
                fua: *fua,
            },
            Request::Flush { .. } => Kind::Flush,
            Request::Discard { .. } | Request::WriteZeroes { .. } => Kind::Zeroes { offset, len },
        };
        self.add(Command { kind, op, offset, len, covers: None })
    }

    /// Submits a read at the present time.
    pub fn submit_read(&mut self, offset: u64, len: u64) -> CommandId {
        let kind = Kind::Read { offset, len, chips_left: 0, data: None };
        self.add(Command { kind, op: IoOp::Read, offset, len, covers: None })
    }

    fn add(&mut self, command: Command) -> CommandId {
        let id = CommandId(self.next_id);
        self.next_id += 1;
        let Command { op, offset, len, .. } = command;
        let mut result = check_range(op, offset, len, self.size_bytes);
        if !self.powered {
            result = Err(IoError::os(libc::EIO, op, offset, len));
        }
        if result.is_err() {
            self.done.push(Completion { id, at_ns: self.now_ns, result, data: None });
            return id;
        }
        self.commands.insert(id, command);
        self.host_queue.push_back(id);
        self.dispatch();
        id
    }

    /// Lets time pass up to `at_ns` and gives what was completed on the way, in order of time.
    pub fn advance_to(&mut self, at_ns: u64) -> Vec<Completion> {
        while let Some(Reverse((event_ns, _, _))) = self.events.peek()
            && *event_ns <= at_ns
        {
            self.step();
        }
        self.now_ns = self.now_ns.max(at_ns);
        std::mem::take(&mut self.done)
    }

    /// Lets time pass until something completes, and gives that; nothing when the device becomes
    /// idle first. For loops over virtual time.
    pub fn advance_to_completion(&mut self) -> Vec<Completion> {
        while self.done.is_empty() && self.step() {}
        std::mem::take(&mut self.done)
    }

    fn step(&mut self) -> bool {
        let Some(Reverse((at_ns, _, event))) = self.events.pop() else { return false };
        self.now_ns = self.now_ns.max(at_ns);
        self.handle(event);
        self.work();
        true
    }

    fn schedule(&mut self, at_ns: u64, event: Event) {
        self.event_count += 1;
        self.events.push(Reverse((at_ns, self.event_count, event)));
    }

    /// Hands commands over while the queue has room.
    fn dispatch(&mut self) {
        while self.depth < self.profile.queue_depth
            && let Some(id) = self.host_queue.pop_front()
        {
            self.depth += 1;
            self.meter.set_depth(self.depth, self.now_ns);
            self.host_free_ns = self.host_free_ns.max(self.now_ns) + self.profile.dispatch_ns;
            self.schedule(self.host_free_ns, Event::Arrived(id));
        }
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Arrived(id) => self.queue.push_back(id),
            Event::SetUp(id) => self.set_up(id),
            Event::Transferred(id) => self.transferred(id),
            Event::ChipDone(way, start) => self.chip_done(way, start),
            Event::Completed(id) => self.complete(id),
        }
    }

    /// Starts whatever can start now.
    fn work(&mut self) {
        while self.begin() || self.start_transfer() {}
        self.start_chips();
        self.check_waiting();
    }

    /// Takes a command out of the queue.
    fn begin(&mut self) -> bool {
        let Some(index) = self.choose_command() else { return false };
        let Some(id) = self.queue.remove(index) else { return false };
        let setup_ns = match self.commands.get(&id).map(|command| &command.kind) {
            Some(Kind::Flush) => {
                self.waiting.push(Waiting { id, limit: self.log.end(), own_units_left: None });
                return true;
            }
            Some(Kind::Write { barrier, .. }) => {
                self.begun_count += 1;
                self.barrier_begun |= *barrier;
                self.profile.setup_ns + if *barrier { self.profile.barrier_ns } else { 0 }
            }
            Some(Kind::Zeroes { .. }) => {
                self.begun_count += 1;
                self.profile.setup_ns
            }
            _ => self.profile.setup_ns,
        };
        self.in_setup = Some(id);
        self.schedule(self.now_ns + setup_ns, Event::SetUp(id));
        true
    }

    /// A command in the queue that may begin now.
    fn choose_command(&mut self) -> Option<usize> {
        if self.barrier_begun {
            return None;
        }
        let mut candidates = Vec::new();
        for (index, id) in self.queue.iter().enumerate() {
            let may_begin = match self.commands.get(id).map(|command| &command.kind) {
                Some(Kind::Write { barrier: true, .. }) => {
                    if index == 0 && self.begun_count == 0 && self.in_setup.is_none() {
                        candidates.push(index);
                    }
                    break;
                }
                Some(Kind::Write { .. } | Kind::Zeroes { .. }) => {
                    self.in_setup.is_none() && self.prepared.is_none()
                }
                Some(Kind::Read { .. }) => self.in_setup.is_none(),
                Some(Kind::Flush) | None => true,
            };
            if may_begin {
                candidates.push(index);
            }
        }
        match (&mut self.rng, candidates.len()) {
            (_, 0) => None,
            (Some(rng), count) if count > 1 => Some(candidates[rng.random_range(0..count)]),
            _ => candidates.first().copied(),
        }
    }

    fn set_up(&mut self, id: CommandId) {
        self.in_setup = None;
        let Some(command) = self.commands.get_mut(&id) else { return };
        match &mut command.kind {
            Kind::Write { .. } => self.prepared = Some(id),
            Kind::Zeroes { offset, len } => {
                let units = vec![(*offset, Data::Zeroes(*len))];
                self.log.append(id, units);
                self.begun_count -= 1;
                self.meter.stats.discard_count += 1;
                self.trace_transfer(id);
                self.schedule(self.now_ns + self.profile.write_ack_ns, Event::Completed(id));
            }
            Kind::Read { offset, len, chips_left, .. } => {
                let units = *offset / UNIT_BYTES..(*offset + *len).div_ceil(UNIT_BYTES);
                let (cached, current) = (&self.cached, &self.log.current);
                let on_medium = units.filter(|unit| {
                    !cached.contains_key(unit) && current.is_stored(unit * UNIT_BYTES)
                });
                *chips_left = self.chips.push_read(id, on_medium);
                if *chips_left == 0 {
                    self.read_ready.push_back(id);
                }
            }
            Kind::Flush => {}
        }
    }

    /// Puts a prepared transfer on the bus.
    fn start_transfer(&mut self) -> bool {
        if self.on_bus.is_some() {
            return false;
        }
        if let Some(id) = self.read_ready.pop_front() {
            self.put_on_bus(id);
            return true;
        }
        let Some(id) = self.prepared else { return false };
        let Some(Kind::Write { units, .. }) = self.commands.get(&id).map(|c| &c.kind) else {
            return false;
        };
        // A command larger than the cache flows through it.
        let needed = (units.len() as u32).min(self.profile.cache_units);
        if self.cache_used + needed > self.profile.cache_units {
            self.stalled_since_ns.get_or_insert(self.now_ns);
            return false;
        }
        if let Some(since_ns) = self.stalled_since_ns.take() {
            self.meter.stats.cache_stall_ns += self.now_ns - since_ns;
        }
        self.prepared = None;
        self.put_on_bus(id);
        true
    }

    fn put_on_bus(&mut self, id: CommandId) {
        let len = self.commands.get(&id).map_or(0, |command| command.len);
        self.on_bus = Some(id);
        let end_ns = self.now_ns + self.profile.transfer_ns(len);
        self.schedule(end_ns, Event::Transferred(id));
    }

    fn transferred(&mut self, id: CommandId) {
        self.on_bus = None;
        let Some(command) = self.commands.get_mut(&id) else { return };
        match &mut command.kind {
            Kind::Read { offset, len, data, .. } => {
                let mut bytes = vec![0; *len as usize];
                // The range was checked when the command was submitted.
                let _ = self.log.current.read_at(*offset, &mut bytes);
                *data = Some(bytes);
                self.meter.stats.read_count += 1;
                self.meter.stats.read_bytes += *len;
                self.schedule(self.now_ns + self.profile.read_ack_ns, Event::Completed(id));
            }
            Kind::Write { units, barrier, fua } => {
                let (units, barrier, fua) = (std::mem::take(units), *barrier, *fua);
                let len = command.len;
                self.count_write(id, len, barrier, fua);
                self.enter_cache(id, units, fua);
                self.begun_count -= 1;
                if barrier {
                    self.barrier_begun = false;
                    self.log.epoch += 1;
                }
            }
            Kind::Zeroes { .. } | Kind::Flush => {}
        }
    }

    fn count_write(&mut self, id: CommandId, len: u64, barrier: bool, fua: bool) {
        let stats = &mut self.meter.stats;
        stats.write_count += 1;
        stats.write_bytes += len;
        stats.barrier_count += u64::from(barrier);
        stats.fua_count += u64::from(fua);
        self.trace_transfer(id);
    }

    fn trace_transfer(&mut self, id: CommandId) {
        if let Some(trace) = &mut self.meter.trace {
            let epoch = self.log.epoch;
            trace.transfers.push(Transferred { id, at_ns: self.now_ns, epoch });
        }
    }

    fn enter_cache(&mut self, id: CommandId, units: Vec<(u64, Data)>, fua: bool) {
        let offsets: Vec<u64> = units.iter().map(|(offset, _)| *offset).collect();
        let numbers = self.log.append(id, units);
        let protected = self.profile.power_loss_protection;
        let must_wait = fua && !protected && !offsets.is_empty();
        // Where the device keeps an order, FUA cannot overtake it.
        let overtakes = must_wait && self.profile.barrier.is_none();
        let epoch = self.log.epoch;
        self.cache_used += offsets.len() as u32;
        for (number, offset) in numbers.clone().zip(&offsets) {
            *self.cached.entry(offset / UNIT_BYTES).or_default() += 1;
            self.chips.push(DrainUnit { number, id, epoch, offset: *offset }, overtakes);
        }
        if must_wait {
            let own_units_left = overtakes.then_some(offsets.len());
            if overtakes && let Some(command) = self.commands.get_mut(&id) {
                command.covers = Some(numbers.clone());
            }
            self.waiting.push(Waiting { id, limit: numbers.end, own_units_left });
        } else {
            self.schedule(self.now_ns + self.profile.write_ack_ns, Event::Completed(id));
        }
    }

    fn start_chips(&mut self) {
        while let Some(started) = self.chips.suspend_for_read(self.now_ns) {
            self.started(&started);
        }
        while self.chips.has_free() {
            let limit = self.drain_limit();
            let flush_limit =
                self.waiting.iter().filter(|w| w.own_units_left.is_none()).map(|w| w.limit).min();
            let flush_limit = flush_limit.unwrap_or(0);
            let Some(started) = self.chips.start(self.now_ns, limit, flush_limit) else { return };
            self.started(&started);
        }
    }

    fn started(&mut self, started: &Started) {
        self.schedule(started.end_ns, Event::ChipDone(started.way, started.start));
        for number in &started.numbers {
            self.log.set_progress(*number, Progress::Programming);
        }
    }

    /// Where the drain has to stop: at the end of the present unit in transactional writeback,
    /// which is as much as the cache held when the unit was begun, or what a flush waits for.
    fn drain_limit(&mut self) -> u64 {
        let transactional = !self.profile.power_loss_protection
            && self.profile.barrier == Some(BarrierForm::TransactionalWriteback);
        let Some(head) = self.chips.head_number().filter(|_| transactional) else {
            return u64::MAX;
        };
        if let Some(end) = self.log.unit_ends.back().copied().filter(|end| head < *end) {
            return end;
        }
        let awaited = self.waiting.iter().map(|waiting| waiting.limit).filter(|end| head < *end);
        let end = awaited.min().unwrap_or(u64::MAX).min(self.log.end());
        self.log.unit_ends.push_back(end);
        end
    }

    fn chip_done(&mut self, way: u32, start: u64) {
        match self.chips.finish(way, start) {
            Some(Job::Read(id)) => {
                if let Some(started) = self.chips.resume(way, self.now_ns) {
                    self.started(&started);
                }
                if let Some(Command { kind: Kind::Read { chips_left, .. }, .. }) =
                    self.commands.get_mut(&id)
                {
                    *chips_left -= 1;
                    if *chips_left == 0 {
                        self.read_ready.push_back(id);
                    }
                }
            }
            Some(Job::Program(units)) => {
                self.meter.stats.program_count += 1;
                self.meter.stats.programmed_units += units.len() as u64;
                units.iter().for_each(|unit| self.programmed(unit));
            }
            None => {}
        }
    }

    fn programmed(&mut self, unit: &DrainUnit) {
        self.cache_used -= 1;
        let key = unit.offset / UNIT_BYTES;
        if let Some(count) = self.cached.get_mut(&key) {
            *count -= 1;
            if *count == 0 {
                self.cached.remove(&key);
            }
        }
        self.log.set_progress(unit.number, Progress::Programmed);
        for waiting in self.waiting.iter_mut().filter(|waiting| waiting.id == unit.id) {
            waiting.own_units_left = waiting.own_units_left.map(|left| left - 1);
        }
        if let Some(trace) = &mut self.meter.trace {
            let DrainUnit { id, epoch, offset, .. } = *unit;
            trace.persists.push(Persisted { id, at_ns: self.now_ns, epoch, offset });
        }
    }

    /// Sends flushes and FUA writes on whose data is on the medium.
    fn check_waiting(&mut self) {
        if self.waiting.is_empty() {
            return;
        }
        let programmed_end = match self.profile.power_loss_protection {
            true => u64::MAX,
            false => self.log.programmed_end(),
        };
        let is_done = |waiting: &Waiting| match waiting.own_units_left {
            Some(left) => left == 0,
            None => waiting.limit <= programmed_end,
        };
        let (done, rest) = std::mem::take(&mut self.waiting).into_iter().partition(is_done);
        self.waiting = rest;
        let done: Vec<Waiting> = done;
        for waiting in done {
            if let Some(command) = self.commands.get_mut(&waiting.id) {
                command.covers.get_or_insert(0..waiting.limit);
            }
            let at_ns = self.now_ns + self.profile.flush_ns;
            self.schedule(at_ns, Event::Completed(waiting.id));
        }
    }

    fn complete(&mut self, id: CommandId) {
        let Some(command) = self.commands.remove(&id) else { return };
        if let Some(numbers) = command.covers {
            self.log.acknowledge(numbers);
        }
        let data = match command.kind {
            Kind::Read { data, .. } => data,
            Kind::Flush => {
                self.meter.stats.flush_count += 1;
                None
            }
            _ => None,
        };
        self.depth -= 1;
        self.meter.set_depth(self.depth, self.now_ns);
        self.done.push(Completion { id, at_ns: self.now_ns, result: Ok(()), data });
        self.dispatch();
    }

    /// The state from which the images come that a power cut now could leave. The device goes on.
    pub fn cut_state(&self, scope: CutScope) -> CutState {
        let on_bus = self.on_bus.and_then(|id| match &self.commands.get(&id)?.kind {
            Kind::Write { units, .. } => Some((id, units.as_slice())),
            _ => None,
        });
        let protected = self.profile.power_loss_protection;
        CutState::new(&self.log, on_bus, self.profile.barrier, protected, scope)
    }

    /// Cuts the power: commands under way and all later ones fail with EIO. Take
    /// [`SimCore::cut_state`] before.
    pub fn power_off(&mut self) {
        self.powered = false;
        self.events.clear();
        self.waiting.clear();
        self.depth = 0;
        self.meter.end(self.now_ns);
        let mut ids: Vec<CommandId> = self.commands.keys().copied().collect();
        ids.sort_unstable();
        for id in ids {
            let Some(command) = self.commands.remove(&id) else { continue };
            let error = IoError::os(libc::EIO, command.op, command.offset, command.len);
            let at_ns = self.now_ns;
            self.done.push(Completion { id, at_ns, result: Err(error), data: None });
        }
    }

    /// Whether the power is on.
    pub fn is_powered(&self) -> bool {
        self.powered
    }

    /// The contents as reads see them.
    pub fn contents(&self) -> MemImage {
        self.log.current.clone()
    }

    /// The counts so far.
    pub fn stats(&mut self) -> SimStats {
        self.meter.snapshot(self.now_ns)
    }

    /// Starts to count anew, for instance when a device has filled its cache.
    pub fn reset_stats(&mut self) {
        self.meter.reset(self.now_ns);
    }

    /// Starts to record transfer order, persist order and queue depth, with an empty trace.
    pub fn start_trace(&mut self) {
        let trace =
            SimTrace { queue_depths: vec![(self.now_ns, self.depth)], ..SimTrace::default() };
        self.meter.trace = Some(trace);
    }

    /// Stops recording and gives the trace.
    pub fn take_trace(&mut self) -> SimTrace {
        self.meter.trace.take().unwrap_or_default()
    }

    /// Gives the trace so far and goes on with an empty one; None when nothing is recorded.
    pub fn next_trace(&mut self) -> Option<SimTrace> {
        let trace = self.meter.trace.take()?;
        self.start_trace();
        Some(trace)
    }
}
