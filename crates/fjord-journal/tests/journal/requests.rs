//! Commits with callbacks: nobody waits, everybody is told, by few threads.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, channel};

use fjord_block::Device;
use fjord_block::epoch::EpochDevice;
use fjord_format::jbd2::ChecksumVersion;
use fjord_journal::{Buffer, Journal, JournalError, Part, PartialCommit, PipelineMode};
use fjord_testkit::gate_device::{Cache, GateDevice, is_durable};
use parking_lot::Mutex;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::parts::ByNumber;
use crate::rig::{Rig, set_value, wait_until};

const REQUEST_COUNT: usize = 200;
/// Threads that may stay in a call.
const SERVERS_MAX: usize = 3;

/// A journal with parts over a gate.
struct Bench {
    gate: Arc<GateDevice>,
    journal: Journal,
    buffers: Vec<Arc<Buffer>>,
}

impl Bench {
    fn new(pipeline: PipelineMode) -> Bench {
        let mut rig = Rig::new(1024, ChecksumVersion::V3, true, 400);
        rig.options.pipeline = pipeline;
        let gate = Arc::new(GateDevice::new(&rig.device.snapshot(), Cache::Volatile));
        let device: Arc<dyn Device> = Arc::new(EpochDevice::new(gate.clone()));
        let (journal, _) =
            Journal::open(device, rig.map.clone(), rig.block_size, &rig.options).unwrap();
        journal.set_parts(Arc::new(ByNumber)).unwrap();
        let buffers = (0..16).map(|block| rig.buffer(block)).collect();
        Bench { gate, journal, buffers }
    }

    /// Changes the block; returns the transaction.
    fn change(&self, block: usize, value: u64) -> fjord_format::Tid {
        let handle = self.journal.start(1).unwrap();
        handle.touch_part(Part(block as u32 % crate::parts::PARTS));
        set_value(&mut handle.get_write(&self.buffers[block]).unwrap(), value);
        handle.stop()
    }

    /// Changes a block and asks for a commit of it, of all or of its part.
    fn request(&self, number: usize, told: &Told) {
        self.ask(number, self.change(self.block_of(number), number as u64), told);
    }

    fn block_of(&self, number: usize) -> usize {
        number % self.buffers.len()
    }

    /// Asks for a commit of the change of a request.
    fn ask(&self, number: usize, tid: fjord_format::Tid, told: &Told) {
        let block = self.block_of(number);
        let told = told.clone();
        let journal = self.journal.clone();
        if number.is_multiple_of(2) {
            self.journal.commit_then(tid, move |outcome| {
                assert!(outcome.is_err() || journal.is_committed(tid));
                told.tell(number, outcome);
            });
        } else {
            let seeds = [Part(block as u32 % crate::parts::PARTS)];
            let then = move |outcome: fjord_journal::Result<PartialCommit>| {
                told.tell(number, outcome.map(drop));
            };
            self.journal.commit_parts_then(tid, &seeds, then);
        }
    }
}

/// How often each request was told, and what.
#[derive(Clone)]
struct Told(Arc<Mutex<Vec<Outcomes>>>);

/// The outcomes that one request was told.
type Outcomes = Vec<Result<(), JournalError>>;

impl Told {
    fn new(count: usize) -> Told {
        Told(Arc::new(Mutex::new(vec![Vec::new(); count])))
    }

    fn tell(&self, number: usize, outcome: Result<(), JournalError>) {
        self.0.lock()[number].push(outcome);
    }

    fn count(&self) -> usize {
        self.0.lock().iter().map(Vec::len).sum()
    }

    /// Each exactly once.
    fn check(&self, is_right: impl Fn(&Result<(), JournalError>) -> bool) {
        for (number, outcomes) in self.0.lock().iter().enumerate() {
            assert!(matches!(&outcomes[..], [one] if is_right(one)), "{number}: {outcomes:?}");
        }
    }
}

#[test]
fn a_lone_request_is_served_by_its_caller() {
    for pipeline in [PipelineMode::Serial, PipelineMode::Dual] {
        let bench = Bench::new(pipeline);
        let told = Told::new(4);
        for number in 0..4 {
            bench.request(number, &told);
            assert_eq!(told.count(), number + 1);
        }
        told.check(Result::is_ok);
        let again = Told::new(1);
        let tid = bench.journal.newest_tid();
        bench.journal.commit_then(tid, {
            let again = again.clone();
            move |outcome| again.tell(0, outcome)
        });
        again.check(Result::is_ok);
    }
}

/// While the device stands still, at most three callers stay; when it goes on, all are told.
fn stalled(pipeline: PipelineMode, fails: bool) {
    let bench = Bench::new(pipeline);
    let told = Told::new(REQUEST_COUNT);
    let (changed, returned) = (AtomicUsize::new(0), AtomicUsize::new(0));
    bench.gate.hold(is_durable);
    std::thread::scope(|scope| {
        let (bench, told, changed, returned) = (&bench, &told, &changed, &returned);
        let _release = bench.gate.release_on_drop();
        for number in 0..REQUEST_COUNT {
            scope.spawn(move || {
                let tid = bench.change(bench.block_of(number), number as u64);
                changed.fetch_add(1, Ordering::SeqCst);
                bench.ask(number, tid, told);
                returned.fetch_add(1, Ordering::SeqCst);
            });
        }
        wait_until("all but a few return", || {
            returned.load(Ordering::SeqCst) >= REQUEST_COUNT - SERVERS_MAX
        });
        // A journal that has stopped takes no change.
        wait_until("every change", || changed.load(Ordering::SeqCst) == REQUEST_COUNT);
        bench.gate.wait_until_held();
        assert!(bench.journal.waiting_requests() >= REQUEST_COUNT - SERVERS_MAX);
        assert_eq!(told.count(), 0);
        // They are not in anybody's way.
        bench.change(3, 7);
        if fails {
            bench.gate.fail_next_write();
        }
        bench.gate.release_all();
    });
    assert_eq!(bench.journal.waiting_requests(), 0);
    told.check(|outcome| outcome.is_err() == fails);
}

#[test]
fn hundreds_of_requests_hold_three_threads() {
    stalled(PipelineMode::Serial, false);
    stalled(PipelineMode::Dual, false);
}

/// Callers that come one by one while nothing ends: the third is one, fewer than the two in flight,
/// and the fourth makes them enough. Requests count as threads do.
#[test]
fn a_request_that_makes_callers_enough_begins_their_commit() {
    for with_threads in [true, false] {
        let bench = Bench::new(PipelineMode::Dual);
        let told = Told::new(4);
        bench.gate.hold(is_durable);
        std::thread::scope(|scope| {
            let (bench, told, _release) = (&bench, &told, bench.gate.release_on_drop());
            for (number, overlapped) in [0, 1, 1, 2].into_iter().enumerate() {
                let tid = bench.change(number, 1);
                scope.spawn(move || {
                    if with_threads {
                        told.tell(number, bench.journal.commit(tid));
                    } else {
                        let told = told.clone();
                        bench.journal.commit_then(tid, move |outcome| told.tell(number, outcome));
                    }
                });
                let begun = || bench.journal.stats().overlapped_commits;
                wait_until("its commit begins", || begun() >= overlapped);
                // One of the callers sees to the oldest commit, the others wait.
                let waiting = || {
                    bench.journal.stats().commit_waits as usize + bench.journal.waiting_requests()
                };
                match number {
                    0 => bench.gate.wait_until_held(),
                    _ => wait_until("it waits", || waiting() >= number),
                }
                assert_eq!(begun(), overlapped, "threads: {with_threads}, caller {number}");
            }
        });
        told.check(Result::is_ok);
    }
}

#[test]
fn all_requests_are_told_that_the_journal_stopped() {
    stalled(PipelineMode::Serial, true);
    stalled(PipelineMode::Dual, true);
}

#[test]
fn a_callback_may_make_another_request() {
    let bench = Bench::new(PipelineMode::Serial);
    let (sender, receiver): (_, Receiver<_>) = channel();
    let journal = bench.journal.clone();
    let buffer = bench.buffers[1].clone();
    bench.journal.commit_then(bench.change(0, 1), move |first| {
        first.unwrap();
        let handle = journal.start(1).unwrap();
        set_value(&mut handle.get_write(&buffer).unwrap(), 2);
        let tid = handle.stop();
        let told = sender.clone();
        journal.commit_then(tid, move |second| told.send(second).unwrap());
        assert!(!journal.is_committed(tid), "it is served when this callback has returned");
    });
    receiver.try_recv().unwrap().unwrap();
}

#[test]
fn a_request_under_an_open_handle_is_refused() {
    let bench = Bench::new(PipelineMode::Serial);
    let handle = bench.journal.start(1).unwrap();
    let told = Told::new(1);
    let tell = told.clone();
    bench.journal.commit_then(handle.tid(), move |outcome| tell.tell(0, outcome));
    told.check(|outcome| matches!(outcome, Err(JournalError::Usage(_))));
    handle.stop();
}

/// The requests that the panicking thread was to serve are dropped, and later ones are served.
#[test]
fn a_panic_in_a_callback_loses_nobody() {
    struct Dropped(Arc<AtomicUsize>);
    impl Drop for Dropped {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }
    let bench = Bench::new(PipelineMode::Serial);
    let ended = Arc::new(AtomicUsize::new(0));
    bench.gate.hold(is_durable);
    std::thread::scope(|scope| {
        let (bench, ended) = (&bench, &ended);
        let first = scope.spawn(move || {
            bench.journal.commit_then(bench.change(0, 1), |_| panic!("planned"));
        });
        bench.gate.wait_until_held();
        for number in 0..8 {
            let dropped = Dropped(ended.clone());
            bench.journal.commit_then(bench.change(1, number), move |_| drop(dropped));
        }
        assert_eq!(bench.journal.waiting_requests(), 8);
        bench.gate.release_all();
        assert!(first.join().is_err());
    });
    assert_eq!((ended.load(Ordering::SeqCst), bench.journal.waiting_requests()), (8, 0));
    let told = Told::new(1);
    bench.request(0, &told);
    told.check(Result::is_ok);
}

/// Blocking calls, requests for all and for parts, and checkpoints, from many threads.
#[test]
fn requests_and_callers_that_wait_serve_each_other() {
    const THREADS: usize = 8;
    const ROUNDS: usize = 150;
    let given = std::env::var("FJORD_SEED").ok();
    let seed: u64 = given.map_or_else(rand::random, |seed| seed.parse().unwrap());
    println!("FJORD_SEED={seed}");
    for pipeline in [PipelineMode::Serial, PipelineMode::Dual] {
        let bench = Bench::new(pipeline);
        let told = Told::new(THREADS * ROUNDS);
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let (bench, told) = (&bench, &told);
                scope.spawn(move || {
                    let mut rng = StdRng::seed_from_u64(seed ^ thread as u64);
                    for number in thread * ROUNDS..(thread + 1) * ROUNDS {
                        match rng.random_range(0..8) {
                            0 => {
                                let tid = bench.change(number % 16, 0);
                                told.tell(number, bench.journal.commit(tid));
                            }
                            1 => {
                                let tid = bench.change(5, 0);
                                let done = bench.journal.commit_parts(tid, &[Part(1)]);
                                told.tell(number, done.map(drop));
                            }
                            2 => {
                                bench.journal.checkpoint_some(3).unwrap();
                                bench.request(number, told);
                            }
                            _ => bench.request(number, told),
                        }
                    }
                });
            }
        });
        // Whoever served the last request has returned.
        assert_eq!(bench.journal.waiting_requests(), 0);
        told.check(Result::is_ok);
    }
}
