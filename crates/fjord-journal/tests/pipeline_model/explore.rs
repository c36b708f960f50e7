//! Ways through the interleavings of a case, and how to repeat one of them.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::time::Instant;

use fjord_block::lock::model::shuttle;
use shuttle::scheduler::{
    PctScheduler, RandomScheduler, ReplayScheduler, Schedule, Scheduler, Task, TaskId,
};
use shuttle::{Config, MaxSteps, Runner};

use crate::world::{Setup, World};

/// A model: threads over one journal.
#[derive(Clone, Copy)]
pub(crate) struct Case {
    setup: Setup,
    threads: &'static [Step],
    before: Step,
    after: Step,
}

/// What a thread does.
pub(crate) type Step = fn(&World);

/// Which interleavings.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Search {
    /// All with at most so many preemptions: moments when a thread that could run on does not.
    Preemptions(usize),
    /// So many random ones.
    Random(usize),
    /// So many, each with random priorities that change at so many moments, less one.
    Priorities(usize, usize),
}

/// Steps of one run; more are a thread that never ends.
const STEPS_MAX: usize = 20_000;
const STACK_BYTES: usize = 256 << 10;

impl Case {
    /// `threads` over a journal of this setup; no call fails.
    pub(crate) const fn new(setup: Setup, threads: &'static [Step]) -> Case {
        Case { setup, threads, before: |_| (), after: World::assert_all_durable }
    }

    /// Before the threads begin.
    pub(crate) const fn before(self, before: Step) -> Case {
        Case { before, ..self }
    }

    /// When they have ended, instead of the check that no call failed.
    pub(crate) const fn after(self, after: Step) -> Case {
        Case { after, ..self }
    }

    fn run(&self) {
        let world = Arc::new(World::new(self.setup));
        (self.before)(&world);
        shuttle::thread::scope(|scope| {
            for thread in self.threads {
                let world = &world;
                scope.spawn(move || thread(world));
            }
        });
        world.check();
        (self.after)(&world);
    }

    fn runner<S: Scheduler + 'static>(&self, scheduler: S) -> usize {
        let mut config = Config::new();
        config.stack_size = STACK_BYTES;
        config.max_steps = MaxSteps::FailAfter(STEPS_MAX);
        config.ungraceful_shutdown_config.immediately_return_on_panic = true;
        let case = *self;
        Runner::new(scheduler, config).run(move || case.run())
    }

    /// Runs the interleavings; their number.
    pub(crate) fn search(&self, search: Search) -> usize {
        match search {
            Search::Preemptions(max) => self.runner(Bounded::new(max)),
            Search::Random(count) => self.runner(RandomScheduler::new_from_seed(seed(), count)),
            Search::Priorities(depth, count) => {
                self.runner(PctScheduler::new_from_seed(seed(), depth, count))
            }
        }
    }

    /// Runs the interleavings of all `searches`, and prints how many there were, or how to repeat the
    /// one that failed.
    pub(crate) fn check(&self, name: &str, searches: &[Search]) {
        #[cfg(feature = "plant")]
        let _without_bugs = fjord_block::plant::Planting::new(None);
        if let Ok(schedule) = std::env::var("FJORD_SCHEDULE") {
            self.runner(ReplayScheduler::new_from_encoded(schedule.trim()));
            return;
        }
        for &search in searches {
            let began = Instant::now();
            match catch_unwind(AssertUnwindSafe(|| self.search(search))) {
                Ok(count) => {
                    let time = began.elapsed().as_secs_f64();
                    println!("{name}: {search:?}: {count} interleavings, {time:.1} s");
                }
                Err(failure) => {
                    println!(
                        "{name}: {search:?}: failed. Repeat the search, or the schedule above:"
                    );
                    let test = "cargo test -p fjord-journal --features model --test pipeline_model";
                    println!("  FJORD_SEED={} {test} {name}", seed());
                    println!("  FJORD_SCHEDULE=… {test} {name}");
                    resume_unwind(failure);
                }
            }
        }
    }
}

/// The seed of random searches.
fn seed() -> u64 {
    const USUAL: u64 = 1;
    std::env::var("FJORD_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(USUAL)
}

/// All interleavings with a bounded number of preemptions, depth first.
struct Bounded {
    preemptions_max: usize,
    /// Moments of this run with a choice: the tasks, in the order in which they are tried, and the
    /// one that is taken.
    levels: Vec<(Vec<TaskId>, usize)>,
    /// The next of them.
    at: usize,
    preemptions: usize,
    is_first: bool,
}

impl Bounded {
    fn new(preemptions_max: usize) -> Bounded {
        Bounded { preemptions_max, levels: Vec::new(), at: 0, preemptions: 0, is_first: true }
    }
}

impl Scheduler for Bounded {
    fn new_execution(&mut self) -> Option<Schedule> {
        if !std::mem::take(&mut self.is_first) {
            // The last choice that has an alternative.
            while self.levels.last().is_some_and(|(tasks, taken)| taken + 1 == tasks.len()) {
                self.levels.pop();
            }
            self.levels.last_mut()?.1 += 1;
        }
        (self.at, self.preemptions) = (0, 0);
        Some(Schedule::new(0))
    }

    fn next_task(
        &mut self,
        runnable: &[&Task],
        current: Option<TaskId>,
        is_yielding: bool,
    ) -> Option<TaskId> {
        let mut tasks: Vec<TaskId> = runnable.iter().map(|task| task.id()).collect();
        let runs_on = current.filter(|current| !is_yielding && tasks.contains(current));
        if let Some(current) = runs_on {
            tasks.retain(|task| *task != current);
            tasks.insert(0, current);
            if self.preemptions == self.preemptions_max {
                return Some(current);
            }
        }
        if tasks.len() == 1 {
            return tasks.pop();
        }
        if self.at == self.levels.len() {
            self.levels.push((tasks.clone(), 0));
        }
        let (known, taken) = &self.levels[self.at];
        assert_eq!(*known, tasks, "the model is not deterministic");
        self.at += 1;
        let task = known[*taken];
        self.preemptions += usize::from(runs_on.is_some_and(|current| current != task));
        Some(task)
    }

    fn next_u64(&mut self) -> u64 {
        panic!("the model draws no random numbers");
    }
}
