//! Orderless requests without end, beside a few that are ordered or flush: these end all the same,
//! within a bound, by the scheduler's own choice ([`EpochQueue::next_dispatch`]) with its classes,
//! deadlines, shares and learning.
//!
//! Each script runs against each kind of flood: there is always another orderless request in the
//! queue, ahead of where the last one ended. All moments of submission are visited and all orders
//! in which the device completes, so long as it leaves no command lying; every completion takes one
//! tick of the clock.

use std::collections::{BTreeMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};

use fjord_block::epoch::{Command, CommandId, DeviceTraits, EpochQueue, Io, RequestId, Tuning};

/// Requests of the flood in the queue at any moment.
const WAITING_COUNT: usize = 2;
/// Completions before the script begins, and at most between two of its requests.
const GAP_MAX: u32 = 2;
/// The flood lies above the script, no two of its requests beside each other.
const FLOOD_OFFSET: u64 = 1 << 20;
const FLOOD_STEP: u64 = 8192;

/// What is searched.
#[derive(Clone, Debug)]
pub(crate) struct Flood {
    pub(crate) traits: DeviceTraits,
    pub(crate) tuning: Tuning,
    pub(crate) script: Vec<Io>,
    /// What comes without end; its place does not matter.
    pub(crate) flood: Io,
    /// Time from one completion to the next.
    pub(crate) tick_ns: u64,
    /// When a request of each class has to have its turn.
    pub(crate) overdue_ns: [u64; 3],
}

impl Flood {
    /// Completions that may pass before a command of the device ends.
    fn patience(&self) -> u32 {
        self.traits.queue_depth + 1
    }

    /// How many ticks a request may take once it is overdue: for each request and flush before it
    /// and for its own, until a place is free and the one whose turn it is has left, until
    /// what is overdue in its class has ended, and for its own command; the same once more for
    /// commands that were overdue before it.
    fn limit_ticks(&self) -> u64 {
        2 * self.script.len() as u64 * (2 * u64::from(self.patience()) + 2)
    }
}

/// A command with the device.
#[derive(Clone, Copy, Hash)]
struct InFlight {
    id: CommandId,
    /// Completions since it was sent.
    age: u32,
}

#[derive(Clone, Hash)]
struct State {
    queue: EpochQueue,
    now_ns: u64,
    /// Completions since the script went on.
    gap: u32,
    /// When each request of the script was submitted.
    pushed_ns: Vec<u64>,
    /// Script places by request, of those without a result.
    ids: BTreeMap<RequestId, usize>,
    /// Requests of the flood that have not left.
    waiting: Vec<RequestId>,
    next_offset: u64,
    in_flight: Vec<InFlight>,
}

/// What a search saw.
#[derive(Default)]
pub(crate) struct Seen {
    pub(crate) state_count: u64,
    /// The longest time that a request took, beyond the age at which it is overdue, in ticks.
    pub(crate) ticks_max: u64,
    pub(crate) violation: Option<String>,
}

pub(crate) fn search(case: &Flood) -> Seen {
    let start = State {
        queue: EpochQueue::new(case.traits, case.tuning.clone()),
        now_ns: 1,
        gap: 0,
        pushed_ns: Vec::new(),
        ids: BTreeMap::new(),
        waiting: Vec::new(),
        next_offset: FLOOD_OFFSET,
        in_flight: Vec::new(),
    };
    let mut seen = Seen::default();
    let mut visited = HashSet::new();
    let mut todo = vec![start];
    while let Some(mut state) = todo.pop() {
        state.dispatch(case);
        let mut hasher = DefaultHasher::new();
        state.hash(&mut hasher);
        if !visited.insert(hasher.finish()) {
            continue;
        }
        seen.state_count += 1;
        if let Err(violation) = state.expand(case, &mut todo, &mut seen.ticks_max) {
            seen.violation = Some(format!("{violation}\n{case:?}"));
            break;
        }
    }
    seen
}

impl State {
    /// The scheduler sends what it likes, and the flood follows at once.
    fn dispatch(&mut self, case: &Flood) {
        loop {
            while self.waiting.len() < WAITING_COUNT {
                let io = Io { offset: self.next_offset, ..case.flood };
                self.next_offset += FLOOD_STEP;
                self.waiting.push(self.queue.push(io, self.now_ns));
            }
            let Some(command) = self.queue.next_dispatch(self.now_ns) else { return };
            self.sent(&command);
        }
    }

    fn sent(&mut self, command: &Command) {
        let has = |id: &RequestId| command.parts.iter().any(|part| part.request == *id);
        self.waiting.retain(|id| !has(id));
        self.in_flight.push(InFlight { id: command.id, age: 0 });
    }

    /// Adds all that can happen next.
    fn expand(
        &self,
        case: &Flood,
        todo: &mut Vec<State>,
        ticks_max: &mut u64,
    ) -> Result<(), String> {
        if self.in_flight.is_empty() {
            return Err("nothing is sent".into());
        }
        let is_whole = self.pushed_ns.len() == case.script.len();
        if !is_whole {
            let mut state = self.clone();
            let index = state.pushed_ns.len();
            let id = state.queue.push(case.script[index], state.now_ns);
            state.ids.insert(id, index);
            state.pushed_ns.push(state.now_ns);
            state.gap = 0;
            todo.push(state);
            if self.gap == GAP_MAX {
                return Ok(());
            }
        }
        let oldest = self.in_flight.iter().map(|in_flight| in_flight.age).max().unwrap_or(0);
        for (at, in_flight) in self.in_flight.iter().enumerate() {
            if oldest + 1 >= case.patience() && in_flight.age < oldest {
                continue;
            }
            let mut state = self.clone();
            state.complete(at, case, ticks_max)?;
            if !is_whole || !state.ids.is_empty() {
                todo.push(state);
            }
        }
        Ok(())
    }

    fn complete(&mut self, at: usize, case: &Flood, ticks_max: &mut u64) -> Result<(), String> {
        let InFlight { id, .. } = self.in_flight.remove(at);
        self.in_flight.iter_mut().for_each(|other| other.age += 1);
        self.now_ns += case.tick_ns;
        self.gap += u32::from(self.pushed_ns.len() < case.script.len());
        self.queue.completed(id, Ok(()), self.now_ns);
        while let Some((id, _)) = self.queue.pop_done() {
            self.ids.remove(&id);
        }
        for index in self.ids.values() {
            let class = case.script[*index].class;
            let waited_ns = self.now_ns - self.pushed_ns[*index];
            let late_ns = waited_ns.saturating_sub(case.overdue_ns[class as usize]);
            let ticks = late_ns / case.tick_ns;
            if ticks > case.limit_ticks() {
                return Err(format!("request {index} waits since {waited_ns} ns"));
            }
            *ticks_max = (*ticks_max).max(ticks);
        }
        Ok(())
    }
}
