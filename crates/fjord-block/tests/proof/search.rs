//! Visits every state that a script can lead to: all moments of submission, all choices that the
//! scheduler calls legal, all orders of completion, every single failure.

use std::collections::{BTreeMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};

use fjord_block::epoch::{
    Choice, Command, DeviceTraits, EpochQueue, Io, IoKind, RequestId, Rules, Tuning,
};
use fjord_block::{IoError, Order};

use super::model::{Model, touches};

/// What is searched.
#[derive(Clone, Debug)]
pub(crate) struct Case<R> {
    pub(crate) rules: R,
    pub(crate) traits: DeviceTraits,
    pub(crate) script: Vec<Io>,
    pub(crate) merge_bytes_max: u64,
    /// How many commands may fail.
    pub(crate) failures: u32,
    /// Check for delay by orderless requests also where the same bytes justify one.
    pub(crate) demand_no_delay: bool,
}

/// Scheduler and device at one moment.
#[derive(Clone, Hash)]
struct State<R: Rules> {
    queue: EpochQueue<R>,
    model: Model,
    /// Script places by request.
    ids: BTreeMap<RequestId, usize>,
}

/// One thing that can happen.
#[derive(Clone, Copy, Debug)]
enum Step {
    Push,
    Dispatch(Choice),
    Complete(usize, bool),
}

/// States visited, and what broke with the steps that led there.
pub(crate) struct Outcome {
    pub(crate) state_count: u64,
    pub(crate) violation: Option<String>,
}

pub(crate) fn search<R: Rules>(case: &Case<R>) -> Outcome {
    let tuning = Tuning {
        merge_bytes_max: case.merge_bytes_max,
        background_bytes_max: 4096,
        flush_depth: 2,
        ..Tuning::for_depth(case.traits.queue_depth)
    };
    let start = State {
        queue: EpochQueue::with_rules(case.rules, case.traits, tuning),
        model: Model::new(case.traits, &case.script, case.failures),
        ids: BTreeMap::new(),
    };
    let check_delay =
        case.demand_no_delay || (orderless_is_apart(&case.script) && case.failures == 0);
    let mut seen = HashSet::new();
    let mut todo = vec![(start, None::<usize>)];
    // The steps to each state, as links, for the report.
    let mut trail: Vec<(Option<usize>, Step)> = Vec::new();
    while let Some((state, link)) = todo.pop() {
        let mut hasher = DefaultHasher::new();
        state.hash(&mut hasher);
        if !seen.insert(hasher.finish()) {
            continue;
        }
        let result = state.expand(check_delay, case.traits.queue_depth as usize);
        let next = match result {
            Ok(next) => next,
            Err((violation, step)) => {
                let steps = steps_to(&trail, link);
                let violation = format!("{violation}\n{case:?}\nafter {steps:?}, then {step:?}");
                return Outcome { state_count: seen.len() as u64, violation: Some(violation) };
            }
        };
        for (state, step) in next {
            trail.push((link, step));
            todo.push((state, Some(trail.len() - 1)));
        }
    }
    Outcome { state_count: seen.len() as u64, violation: None }
}

fn steps_to(trail: &[(Option<usize>, Step)], mut link: Option<usize>) -> Vec<Step> {
    let mut steps = Vec::new();
    while let Some(at) = link {
        steps.push(trail[at].1);
        link = trail[at].0;
    }
    steps.reverse();
    steps
}

/// No ordered write touches bytes of an earlier request that is not ordered.
fn orderless_is_apart(script: &[Io]) -> bool {
    let free = |io: &Io| io.kind.order() == Order::Orderless;
    script.iter().enumerate().all(|(index, io)| {
        free(io) || !script[..index].iter().any(|earlier| free(earlier) && touches(earlier, io))
    })
}

type Failure = (String, Option<Step>);

impl<R: Rules> State<R> {
    /// All states one step further, each checked.
    fn expand(&self, check_delay: bool, depth: usize) -> Result<Vec<(Self, Step)>, Failure> {
        let choices = self.queue.choices();
        self.check_discipline(&choices).map_err(|violation| (violation, None))?;
        if check_delay {
            self.check_delay().map_err(|violation| (violation, None))?;
        }
        let mut steps = Vec::new();
        if self.model.pushed_count < self.model.results.len() {
            steps.push(Step::Push);
        }
        if self.model.in_flight.len() < depth {
            steps.extend(choices.into_iter().map(Step::Dispatch));
        }
        for at in 0..self.model.in_flight.len() {
            steps.push(Step::Complete(at, true));
            if self.model.failures_left > 0 {
                steps.push(Step::Complete(at, false));
            }
        }
        if steps.is_empty() {
            self.model.check_end().map_err(|violation| (violation, None))?;
        }
        let mut next = Vec::with_capacity(steps.len());
        for step in steps {
            let mut state = self.clone();
            state.step(step).map_err(|violation| (violation, Some(step)))?;
            next.push((state, step));
        }
        Ok(next)
    }

    fn step(&mut self, step: Step) -> Result<(), String> {
        match step {
            Step::Push => {
                let index = self.model.pushed_count;
                let io = self.model.push();
                let id = self.queue.push(io, 0);
                self.ids.insert(id, index);
            }
            Step::Dispatch(choice) => {
                let command = self.queue.dispatch(choice, 0).ok_or("a choice that is none")?;
                let owners: Vec<_> = command.parts.iter().map(|p| self.ids[&p.request]).collect();
                self.model.dispatch(command, &owners)?;
            }
            Step::Complete(at, well) => {
                let command = self.model.complete(at, well);
                let result = if well { Ok(()) } else { Err(error_of(&command)) };
                self.queue.completed(command.id, result, 0);
            }
        }
        while let Some((id, result)) = self.queue.pop_done() {
            self.model.done(self.ids[&id], &result)?;
        }
        Ok(())
    }

    /// The discipline's pick is legal, and there is one when the device has nothing to do.
    fn check_discipline(&self, choices: &[Choice]) -> Result<(), String> {
        match self.queue.choose(0) {
            Some(choice) if !choices.contains(&choice) => Err(format!("{choice:?} is not legal")),
            None if self.model.in_flight.is_empty() && !choices.is_empty() => {
                Err(format!("nothing is sent although {choices:?} may leave"))
            }
            _ => Ok(()),
        }
    }

    /// With every orderless request held back for ever, ordered writes and flushes all end.
    fn check_delay(&self) -> Result<(), String> {
        let mut state = self.clone();
        let ordered = |state: &Self, choice: &Choice| match choice {
            Choice::Flush => true,
            Choice::Request(id) => state.model.io(state.ids[id]).kind.order() != Order::Orderless,
        };
        loop {
            let is_apart =
                |c: &Command| c.kind == IoKind::Flush || c.kind.order() != Order::Orderless;
            let choice = state.queue.choices().into_iter().find(|choice| ordered(&state, choice));
            let step = match state.model.in_flight.iter().position(is_apart) {
                Some(at) => Step::Complete(at, true),
                None if state.model.pushed_count < state.model.results.len() => Step::Push,
                None => match choice {
                    Some(choice) => Step::Dispatch(choice),
                    None => break,
                },
            };
            state.step(step)?;
        }
        for (index, result) in state.model.results.iter().enumerate() {
            let kind = state.model.io(index).kind;
            if (kind.is_flush() || kind.order() != Order::Orderless) && result.is_none() {
                return Err(format!("request {index} waits for an orderless one"));
            }
        }
        Ok(())
    }
}

fn error_of(command: &Command) -> IoError {
    IoError::os(libc::EIO, command.kind.op(), command.offset, command.len)
}
