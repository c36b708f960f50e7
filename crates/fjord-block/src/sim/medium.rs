//! The medium behind the cache: jobs of the chips (or of the arm).
//!
//! Owns the chips, the channels, the arm's place, and the queue of units that wait to be
//! programmed. Knows no commands of the host but by number, and no contents.
//!
//! Invariants: a chip does one thing at a time, and so does a channel's transfer; in the order
//! forms a unit starts only when the form's rule allows it; a read goes before queued programs. A
//! suspended program operation resumes after one read, and is suspended a bounded number of times.

use std::collections::{BTreeMap, HashMap, VecDeque};

use super::core::CommandId;
use super::profile::{BarrierForm, Medium, Profile, UNIT_BYTES, time_ns};

/// A unit that waits for its program operation.
#[derive(Clone, Copy, Debug)]
pub(super) struct DrainUnit {
    /// Its number in the log.
    pub(super) number: u64,
    pub(super) id: CommandId,
    pub(super) epoch: u64,
    pub(super) offset: u64,
}

/// Most suspensions of a program operation for reads, so that it ends.
const SUSPENSIONS_MAX: u32 = 4;

/// What a chip is doing.
#[derive(Debug)]
pub(super) enum Job {
    Program(Vec<DrainUnit>),
    Read(CommandId),
}

/// A chip at work.
#[derive(Debug)]
struct Working {
    job: Job,
    /// The number of this start of the job; a resumed job has another.
    start: u64,
    end_ns: u64,
    suspension_count: u32,
}

/// A program operation that is suspended for a read.
#[derive(Debug)]
struct Suspended {
    units: Vec<DrainUnit>,
    left_ns: u64,
    count: u32,
}

/// A job that was just started.
#[derive(Debug)]
pub(super) struct Started {
    /// Which chip (0 for the arm).
    pub(super) way: u32,
    /// The number of this start, for [`Chips::finish`].
    pub(super) start: u64,
    /// When it ends.
    pub(super) end_ns: u64,
    /// The numbers of the units that it programs; empty for a read.
    pub(super) numbers: Vec<u64>,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Chips {
    medium: Medium,
    /// The order that the drain keeps; None with power-loss protection, which needs none.
    form: Option<BarrierForm>,
    size_bytes: u64,
    /// By way; None when free.
    jobs: Vec<Option<Working>>,
    /// By way: the operation that resumes when the read in `jobs` has ended.
    suspended: Vec<Option<Suspended>>,
    start_count: u64,
    free_count: usize,
    /// By channel: until when its transfers are taken.
    channel_free_ns: Vec<u64>,
    /// Reads that wait, by way: command, number of units.
    reads: Vec<VecDeque<(CommandId, Vec<u64>)>>,
    waiting_read_count: usize,
    /// The log's next chip.
    next_way: usize,
    /// Units to be programmed, in transfer order.
    drain: VecDeque<DrainUnit>,
    /// FUA writes, which need not wait for what the cache held before them.
    urgent: VecDeque<DrainUnit>,
    /// Units being programmed, by epoch.
    programming: BTreeMap<u64, u32>,
    /// Where a unit lies, by unit number; a unit that is not here has never been programmed.
    location: HashMap<u64, u32>,
    /// Where the arm stands, in bytes.
    head_offset: u64,
}

impl Chips {
    pub(super) fn new(profile: &Profile, size_bytes: u64) -> Self {
        let (channels, ways) = match profile.medium {
            Medium::Flash { channel_count, ways_per_channel, .. } => {
                (channel_count.max(1), channel_count.max(1) * ways_per_channel.max(1))
            }
            Medium::Disk { .. } => (1, 1),
        };
        Chips {
            medium: profile.medium,
            form: profile.barrier.filter(|_| !profile.power_loss_protection),
            size_bytes,
            jobs: (0..ways).map(|_| None).collect(),
            suspended: (0..ways).map(|_| None).collect(),
            start_count: 0,
            free_count: ways as usize,
            channel_free_ns: vec![0; channels as usize],
            reads: (0..ways).map(|_| VecDeque::new()).collect(),
            waiting_read_count: 0,
            next_way: 0,
            drain: VecDeque::new(),
            urgent: VecDeque::new(),
            programming: BTreeMap::new(),
            location: HashMap::new(),
            head_offset: 0,
        }
    }

    /// Queues a unit to be programmed.
    pub(super) fn push(&mut self, unit: DrainUnit, urgent: bool) {
        if urgent { self.urgent.push_back(unit) } else { self.drain.push_back(unit) }
    }

    /// The number of the unit to be programmed next, where the order matters.
    pub(super) fn head_number(&self) -> Option<u64> {
        self.drain.front().map(|unit| unit.number)
    }

    /// Whether any chip is free.
    pub(super) fn has_free(&self) -> bool {
        self.free_count > 0
    }

    /// Queues the reads of a command for the units given; gives the number of chips that are to
    /// answer. Units that were never programmed lie where the device was made with them.
    pub(super) fn push_read(&mut self, id: CommandId, units: impl Iterator<Item = u64>) -> u32 {
        let way_count = self.jobs.len() as u64;
        let mut by_way: BTreeMap<usize, Vec<u64>> = BTreeMap::new();
        for unit in units {
            let way = self.location.get(&unit).copied().unwrap_or((unit % way_count) as u32);
            by_way.entry(way as usize).or_default().push(unit);
        }
        let count = by_way.len() as u32;
        self.waiting_read_count += by_way.len();
        for (way, units) in by_way {
            self.reads[way].push_back((id, units));
        }
        count
    }

    /// Starts one job, if a chip is free for one. `limit` is the number at which the drain stops
    /// in transactional writeback; `flush_limit` the number up to which somebody waits.
    pub(super) fn start(&mut self, now_ns: u64, limit: u64, flush_limit: u64) -> Option<Started> {
        if !self.has_free() {
            return None;
        }
        if self.waiting_read_count > 0
            && let Some(way) = (0..self.jobs.len())
                .find(|way| self.jobs[*way].is_none() && !self.reads[*way].is_empty())
        {
            return self.start_read(way, now_ns);
        }
        let batch = self.take_batch(limit, flush_limit);
        let first = *batch.first()?;
        let count = self.jobs.len();
        let way = (0..count)
            .map(|step| (self.next_way + step) % count)
            .find(|way| self.jobs[*way].is_none())?;
        self.next_way = (way + 1) % count;
        let bytes = batch.len() as u64 * UNIT_BYTES;
        let end_ns = match self.medium {
            Medium::Flash { channel_bytes_per_s, program_ns, .. } => {
                let channel = way % self.channel_free_ns.len();
                let start = now_ns.max(self.channel_free_ns[channel]);
                self.channel_free_ns[channel] = start + time_ns(bytes, channel_bytes_per_s);
                self.channel_free_ns[channel] + program_ns
            }
            Medium::Disk { .. } => self.move_arm(first.offset, bytes, now_ns),
        };
        for unit in &batch {
            *self.programming.entry(unit.epoch).or_default() += 1;
        }
        let numbers = batch.iter().map(|unit| unit.number).collect();
        Some(Started { numbers, ..self.occupy(way, Job::Program(batch), end_ns, 0) })
    }

    fn occupy(&mut self, way: usize, job: Job, end_ns: u64, suspension_count: u32) -> Started {
        self.start_count += 1;
        let start = self.start_count;
        self.jobs[way] = Some(Working { job, start, end_ns, suspension_count });
        self.free_count -= 1;
        Started { way: way as u32, start, end_ns, numbers: Vec::new() }
    }

    /// Suspends a program operation for a read that waits for its chip, if there is one and the
    /// chips support it.
    pub(super) fn suspend_for_read(&mut self, now_ns: u64) -> Option<Started> {
        let Medium::Flash { suspend_ns: Some(suspend_ns), .. } = self.medium else { return None };
        if self.waiting_read_count == 0 {
            return None;
        }
        let can_yield = |working: &Working| {
            matches!(working.job, Job::Program(_))
                && working.suspension_count < SUSPENSIONS_MAX
                && working.end_ns > now_ns + suspend_ns
        };
        let way = (0..self.jobs.len()).find(|way| {
            !self.reads[*way].is_empty() && self.jobs[*way].as_ref().is_some_and(can_yield)
        })?;
        let Some(Working { job: Job::Program(units), end_ns, suspension_count, .. }) =
            self.jobs[way].take()
        else {
            return None;
        };
        self.free_count += 1;
        let (left_ns, count) = (end_ns - now_ns, suspension_count + 1);
        self.suspended[way] = Some(Suspended { units, left_ns, count });
        self.start_read(way, now_ns + suspend_ns)
    }

    /// Resumes the suspended program operation of a chip, if there is one.
    pub(super) fn resume(&mut self, way: u32, now_ns: u64) -> Option<Started> {
        let way = way as usize;
        let Suspended { units, left_ns, count } = self.suspended.get_mut(way)?.take()?;
        Some(self.occupy(way, Job::Program(units), now_ns + left_ns, count))
    }

    fn start_read(&mut self, way: usize, now_ns: u64) -> Option<Started> {
        let (id, units) = self.reads[way].pop_front()?;
        self.waiting_read_count -= 1;
        let bytes = units.len() as u64 * UNIT_BYTES;
        let end_ns = match self.medium {
            Medium::Flash { channel_bytes_per_s, units_per_program, read_ns, .. } => {
                let pages = (units.len() as u64).div_ceil(u64::from(units_per_program.max(1)));
                now_ns + pages * read_ns + time_ns(bytes, channel_bytes_per_s)
            }
            Medium::Disk { .. } => {
                let offset = units.first().map_or(0, |unit| unit * UNIT_BYTES);
                self.move_arm(offset, bytes, now_ns)
            }
        };
        Some(self.occupy(way, Job::Read(id), end_ns, 0))
    }

    /// The units of the next program operation; empty when none may start now.
    fn take_batch(&mut self, limit: u64, flush_limit: u64) -> Vec<DrainUnit> {
        let Medium::Flash { units_per_program, .. } = self.medium else {
            return self.take_run(flush_limit);
        };
        let count_max = units_per_program.max(1) as usize;
        if !self.urgent.is_empty() {
            let count = count_max.min(self.urgent.len());
            return self.urgent.drain(..count).collect();
        }
        let Some(head) = self.drain.front() else { return Vec::new() };
        let epoch = head.epoch;
        let in_order = self.form == Some(BarrierForm::InOrderWriteback);
        if in_order && self.programming.keys().next().is_some_and(|oldest| *oldest < epoch) {
            return Vec::new();
        }
        let fits = |unit: &&DrainUnit| unit.number < limit && (!in_order || unit.epoch == epoch);
        let count = self.drain.iter().take(count_max).take_while(fits).count();
        self.drain.drain(..count).collect()
    }

    /// The run of adjacent units nearest to the arm, among those that somebody waits for if there
    /// are such.
    fn take_run(&mut self, flush_limit: u64) -> Vec<DrainUnit> {
        const RUN_MAX: usize = 64;
        let queue = if self.urgent.is_empty() { &mut self.drain } else { &mut self.urgent };
        let awaited = queue.front().is_some_and(|unit| unit.number < flush_limit);
        let head = self.head_offset;
        let mut offset = match queue
            .iter()
            .filter(|unit| !awaited || unit.number < flush_limit)
            .min_by_key(|unit| (unit.offset.abs_diff(head), unit.number))
        {
            Some(unit) => unit.offset,
            None => return Vec::new(),
        };
        let mut run = Vec::new();
        while run.len() < RUN_MAX
            && let Some(index) = queue.iter().position(|unit| unit.offset == offset)
            && let Some(unit) = queue.remove(index)
        {
            offset = (unit.offset / UNIT_BYTES + 1) * UNIT_BYTES;
            run.push(unit);
        }
        run
    }

    /// Seeks, waits for the sector, transfers. Gives the end.
    fn move_arm(&mut self, offset: u64, bytes: u64, now_ns: u64) -> u64 {
        let Medium::Disk { seek_min_ns, seek_max_ns, turn_ns, media_bytes_per_s } = self.medium
        else {
            return now_ns;
        };
        let way = offset.abs_diff(self.head_offset) as f64 / self.size_bytes.max(1) as f64;
        let seek_ns = match way {
            0.0 => 0,
            way => seek_min_ns + ((seek_max_ns - seek_min_ns) as f64 * way.min(1.0).sqrt()) as u64,
        };
        let there_ns = now_ns + seek_ns;
        // A track passes in a turn; offsets lie along the track as they pass.
        let along_ns = time_ns(offset, media_bytes_per_s) % turn_ns.max(1);
        let wait_ns = (along_ns + turn_ns - there_ns % turn_ns.max(1)) % turn_ns.max(1);
        self.head_offset = offset.saturating_add(bytes);
        there_ns + wait_ns + time_ns(bytes, media_bytes_per_s)
    }

    /// The job of a chip has ended, unless it was suspended since this start.
    pub(super) fn finish(&mut self, way: u32, start: u64) -> Option<Job> {
        let working = self.jobs.get_mut(way as usize)?;
        let job = working.take_if(|working| working.start == start)?.job;
        self.free_count += 1;
        if let Job::Program(units) = &job {
            for unit in units {
                self.location.insert(unit.offset / UNIT_BYTES, way);
                if let Some(count) = self.programming.get_mut(&unit.epoch) {
                    *count -= 1;
                    if *count == 0 {
                        self.programming.remove(&unit.epoch);
                    }
                }
            }
        }
        Some(job)
    }
}
