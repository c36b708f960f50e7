//! Random histories with commits of parts, cut at every request.
//!
//! Verifies: what is recovered is exactly what the definition says: the state after some
//! commit, in which a part is as new as the newest commit whose closure, worked out here from
//! the list of handles, held it; entries of the shared block likewise; no older than the newest
//! commit that had returned; callbacks ran for what committed and for nothing else.
//! Does not verify: torn sectors.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};

use fjord_format::jbd2::ChecksumVersion;
use fjord_format::types::BlockNo;
use fjord_journal::{Buffer, Handle, Journal, Part, PartialCommit};
use proptest::prelude::*;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::history::{
    Blocks, Buffers, CHECKSUMS, State, check_blocks, each_crash, each_third_recovered, promised,
    write_data,
};
use crate::parts::{OF_ALL, PARTS, entry_value, open, set_entry, shared_buffer};
use crate::rig::{Event, Recorder, Rig, Survival, set_value};

const BLOCK_SIZE: usize = 1024;
const BLOCKS: u64 = 16;
/// What the first commit of a fresh journal bears in the log.
const FIRST_SEQUENCE: u32 = 2;

#[derive(Clone, Debug)]
enum Op {
    /// One handle that writes some blocks and, with `entries`, the entries of their parts.
    Write {
        blocks: Vec<u64>,
        entries: bool,
    },
    /// One handle that changes what is of no part, and a block.
    OfAll(u64),
    /// One handle that frees a block.
    Free(u64),
    /// A data write to one of the blocks whose free has committed.
    Data(usize),
    CommitParts(Vec<u32>),
    Commit,
    Checkpoint,
    Quiesce,
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let block = 0..BLOCKS;
    let write = (prop::collection::vec(block.clone(), 1..3), prop::bool::weighted(0.7));
    let op = prop_oneof![
        10 => write.prop_map(|(blocks, entries)| Op::Write { blocks, entries }),
        1 => block.clone().prop_map(Op::OfAll),
        3 => block.clone().prop_map(Op::Free),
        3 => (0..100usize).prop_map(Op::Data),
        8 => prop::collection::vec(0..PARTS, 1..3).prop_map(Op::CommitParts),
        1 => Just(Op::Commit),
        2 => Just(Op::Checkpoint),
        1 => Just(Op::Quiesce),
    ];
    prop::collection::vec(op, 1..60)
}

#[derive(Clone, Debug)]
struct States {
    /// A freed one is not to be reused before the flag is set.
    blocks: Blocks<Arc<AtomicBool>>,
    entries: BTreeMap<u32, u64>,
    of_all: u64,
}

fn part_of(block: u64) -> u32 {
    block as u32 % PARTS
}

struct History {
    rig: Rig,
    journal: Journal,
    shared: Arc<Buffer>,
    of_all: Arc<Buffer>,
    buffers: Buffers,
    now: States,
    committed: States,
    /// Parts of each handle, as far as they have not committed; `PARTS` stands for all.
    handles: Vec<BTreeSet<u32>>,
    /// Callbacks that have to run with a commit of the part.
    flags: Vec<(u32, Arc<AtomicBool>)>,
    /// State after each commit.
    after: BTreeMap<u32, States>,
    /// Requests so far when a commit returned, and its sequence.
    promises: Vec<(usize, u32)>,
    counter: u64,
}

impl History {
    fn new(checksum: ChecksumVersion, bit64: bool) -> History {
        let rig = Rig::new(BLOCK_SIZE, checksum, bit64, 60);
        let journal = open(&rig);
        let now = States {
            blocks: (0..BLOCKS).map(|block| (block, State::Metadata(0))).collect(),
            entries: (0..PARTS).map(|part| (part, 0)).collect(),
            of_all: 0,
        };
        // An empty log may say so or not.
        let after = [0, 1].map(|sequence| (sequence, now.clone())).into();
        let (shared, of_all) = (shared_buffer(), rig.buffer(OF_ALL));
        History {
            rig,
            journal,
            shared,
            of_all,
            buffers: Buffers::default(),
            committed: now.clone(),
            now,
            handles: Vec::new(),
            flags: Vec::new(),
            after,
            promises: Vec::new(),
            counter: 0,
        }
    }

    fn run(&mut self, op: &Op) {
        self.counter += 1;
        let commits = self.journal.stats().commits;
        match op {
            Op::Write { blocks, entries } => self.write(blocks, *entries, false),
            Op::OfAll(block) => self.write(&[*block], false, true),
            Op::Free(block) => self.free(*block),
            Op::Data(choice) => self.data(*choice),
            Op::CommitParts(parts) => self.commit_parts(parts),
            Op::Commit => {
                self.journal.commit_running().unwrap();
                self.note_commit(None, commits);
            }
            Op::Checkpoint => drop(self.journal.checkpoint_some(5).unwrap()),
            Op::Quiesce => {
                self.journal.quiesce().unwrap();
                self.note_commit(None, commits);
            }
        }
        let noted = self.after.keys().last().copied().unwrap_or(0);
        let sequence = u64::from(FIRST_SEQUENCE) - 1 + self.journal.stats().commits;
        assert_eq!(u64::from(noted), sequence, "{op:?} committed unasked");
    }

    /// Starts a handle, which commits when the transaction or the log is full.
    fn start(&mut self, credits: u32) -> Handle {
        let commits = self.journal.stats().commits;
        let handle = self.journal.start(credits).unwrap();
        if self.journal.stats().commits != commits {
            self.note_commit(None, commits);
        }
        handle
    }

    fn write(&mut self, blocks: &[u64], entries: bool, of_all: bool) {
        let handle = self.start(blocks.len() as u32 + 2);
        let mut parts = BTreeSet::new();
        for &block in blocks {
            let was_metadata = self.now.blocks[&block].is_metadata();
            self.buffers.write(&self.rig, &handle, block, was_metadata, self.counter);
            self.now.blocks.insert(block, State::Metadata(self.counter));
            parts.insert(part_of(block));
            if entries {
                set_entry(&handle, &self.shared, part_of(block), self.counter);
                self.now.entries.insert(part_of(block), self.counter);
            }
        }
        if of_all {
            set_value(&mut handle.get_write(&self.of_all).unwrap(), self.counter);
            self.now.of_all = self.counter;
            parts.insert(PARTS);
        }
        handle.stop();
        self.handles.push(parts);
    }

    fn free(&mut self, block: u64) {
        if !self.now.blocks[&block].is_metadata() {
            return;
        }
        let handle = self.start(2);
        // The cache may or may not still have the buffer.
        let buffer = self.buffers.get(block).filter(|_| self.counter.is_multiple_of(2));
        handle.forget(BlockNo(block), buffer).unwrap();
        let flag = Arc::new(AtomicBool::new(false));
        let told = flag.clone();
        handle.on_commit(move |result| told.store(result.is_ok(), Ordering::SeqCst));
        handle.stop();
        self.flags.push((part_of(block), flag.clone()));
        self.now.blocks.insert(block, State::Free(flag));
        self.handles.push([part_of(block)].into());
    }

    fn data(&mut self, choice: usize) {
        let is_free = |state: &State<Arc<AtomicBool>>| match state {
            State::Free(flag) => flag.load(Ordering::SeqCst),
            _ => false,
        };
        let free = self.now.blocks.iter().filter(|(_, state)| is_free(state));
        let free: Vec<u64> = free.map(|(&block, _)| block).collect();
        let Some(&block) = free.get(choice % free.len().max(1)) else { return };
        // The journal knows nothing of this write: all states from the present one on have it.
        let state: State<Arc<AtomicBool>> = write_data(&self.rig, block, self.counter);
        self.now.blocks.insert(block, state.clone());
        self.committed.blocks.insert(block, state);
        self.after.insert(*self.after.keys().last().unwrap(), self.committed.clone());
    }

    /// What the definition says: all that shares a handle, again and again.
    fn closure(&self, seeds: &[u32]) -> BTreeSet<u32> {
        let touched: BTreeSet<u32> = self.handles.iter().flatten().copied().collect();
        let mut closure: BTreeSet<u32> =
            seeds.iter().copied().filter(|seed| touched.contains(seed)).collect();
        loop {
            let before = closure.len();
            for handle in &self.handles {
                if !handle.is_disjoint(&closure) {
                    closure.extend(handle);
                }
            }
            if closure.len() == before {
                return closure;
            }
        }
    }

    fn commit_parts(&mut self, seeds: &[u32]) {
        let commits = self.journal.stats().commits;
        let closure = self.closure(seeds);
        let seeds: Vec<Part> = seeds.iter().copied().map(Part).collect();
        let tid = self.journal.newest_tid();
        match self.journal.commit_parts(tid, &seeds).unwrap() {
            PartialCommit::Durable => assert!(closure.is_empty(), "{closure:?}"),
            PartialCommit::Parts { .. } => {
                assert!(!closure.is_empty() && !closure.contains(&PARTS));
                self.note_commit(Some(closure), commits);
            }
            PartialCommit::Whole(_) => self.note_commit(None, commits),
        }
    }

    /// A commit of a closure, or of everything, has returned; `commits` is the count before.
    fn note_commit(&mut self, closure: Option<BTreeSet<u32>>, commits: u64) {
        if self.journal.stats().commits == commits {
            assert!(self.handles.is_empty(), "handles {:?} did not commit", self.handles);
            return;
        }
        let chosen = |part: u32| closure.as_ref().is_none_or(|closure| closure.contains(&part));
        for (block, state) in self.now.blocks.iter().filter(|(block, _)| chosen(part_of(**block))) {
            self.committed.blocks.insert(*block, state.clone());
        }
        for (&part, &value) in self.now.entries.iter().filter(|(part, _)| chosen(**part)) {
            self.committed.entries.insert(part, value);
        }
        if chosen(PARTS) {
            self.committed.of_all = self.now.of_all;
        }
        self.handles.retain(|parts| !parts.iter().any(|&part| chosen(part)));
        for (part, flag) in &self.flags {
            assert_eq!(flag.load(Ordering::SeqCst), chosen(*part), "callback of part {part}");
        }
        self.flags.retain(|(part, _)| !chosen(*part));
        let sequence = FIRST_SEQUENCE - 1 + self.journal.stats().commits as u32;
        self.after.insert(sequence, self.committed.clone());
        self.promises.push((self.rig.device.event_count(), sequence));
    }

    fn check(&self, events: &[Event], cut: usize, image: Vec<u8>, how: Survival) {
        let promised = promised(&self.promises, cut);
        let device = Arc::new(Recorder::from_image(&image));
        let (_, report) =
            self.rig.open_on(&device).unwrap_or_else(|error| panic!("cut {cut}, {how:?}: {error}"));
        let sequence = report.next_tid.0 - 2;
        assert!(sequence >= promised, "cut {cut}, {how:?}: {sequence}, promised {promised}");
        let states = &self.after[&sequence];
        let recovered = device.image();
        let context = format!("cut {cut}, {how:?}, commit {sequence}");
        check_blocks(&self.rig, &states.blocks, &recovered, (events, cut), &context);
        for (&part, &value) in &states.entries {
            assert_eq!(entry_value(&recovered, part), value, "{context}: entry {part}");
        }
        assert_eq!(self.rig.value(&recovered, OF_ALL), states.of_all, "{context}");
    }
}

fn explore(ops: &[Op], checksum: ChecksumVersion, bit64: bool, seed: u64) {
    let mut history = History::new(checksum, bit64);
    let start = history.rig.device.image();
    ops.iter().for_each(|op| history.run(op));
    let events = history.rig.device.events();
    each_crash(&start, &events, seed, |cut, how, image, _| history.check(&events, cut, image, how));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]
    #[test]
    fn every_crash_recovers_to_what_had_to_commit_together(
        ops in ops(),
        version in 0usize..4,
        bit64: bool,
        seed: u64,
    ) {
        explore(&ops, CHECKSUMS[version], bit64, seed);
    }
}

const ROUNDS: u64 = 80;
/// In every so-manieth round the threads wait for each other around their handles, and then for the
/// commit of one part: however they are scheduled, parts are committed beside others.
const MEETING_INTERVAL: u64 = 8;

/// Each thread's handles add 1 to its own block and entry; some do so in two parts at once, and
/// count that in a block of each. Whatever commits when, block and entry agree, both counts of
/// a pair agree, and what a thread was promised is there.
#[test]
fn many_threads_commit_their_parts_at_once() {
    let rig = Rig::new(BLOCK_SIZE, ChecksumVersion::V3, true, 250);
    let journal = open(&rig);
    let start = rig.device.image();
    let shared = shared_buffer();
    // Block `part`: the part's own; `part + 4`: what it did together with its neighbour.
    let buffers: Vec<_> = (0..8).map(|block| rig.buffer(block)).collect();
    let promises = parking_lot::Mutex::new(Vec::new());
    let done = AtomicBool::new(false);
    let meeting = Barrier::new(PARTS as usize);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                journal.checkpoint_some(3).unwrap();
                std::thread::yield_now();
            }
        });
        let workers: Vec<_> = (0..PARTS)
            .map(|part| {
                let (journal, shared, buffers) = (&journal, &shared, &buffers);
                let (promises, rig, meeting) = (&promises, &rig, &meeting);
                scope.spawn(move || {
                    let mut rng = StdRng::seed_from_u64(u64::from(part));
                    for round in 1..=ROUNDS {
                        let meets = round % MEETING_INTERVAL == 0;
                        if meets {
                            meeting.wait();
                        }
                        let handle = journal.start(4).unwrap();
                        set_value(&mut handle.get_write(&buffers[part as usize]).unwrap(), round);
                        set_entry(&handle, shared, part, round);
                        if rng.random_range(0..4) == 0 {
                            let first = (part & !1) as usize;
                            for block in [first + 4, first + 5] {
                                let mut guard = handle.get_write(&buffers[block]).unwrap();
                                let sum = u64::from_be_bytes(guard[8..16].try_into().unwrap());
                                set_value(&mut guard, sum + 1);
                            }
                        }
                        let tid = handle.stop();
                        if meets {
                            meeting.wait();
                            if part == 0 {
                                journal.commit_parts(tid, &[Part(part)]).unwrap();
                            }
                            meeting.wait();
                        }
                        match rng.random_range(0..20) {
                            0 => journal.commit(tid).unwrap(),
                            1..10 => drop(journal.commit_parts(tid, &[Part(part)]).unwrap()),
                            _ => continue,
                        }
                        promises.lock().push((rig.device.event_count(), part, round));
                    }
                })
            })
            .collect();
        workers.into_iter().for_each(|worker| worker.join().unwrap());
        done.store(true, Ordering::Relaxed);
    });
    assert!(journal.stats().partial_commits > 0);
    let events = rig.device.events();
    let promises = promises.into_inner();
    each_third_recovered(&rig, &start, &events, |cut, image| {
        for part in 0..PARTS {
            let value = rig.value(image, u64::from(part));
            assert_eq!(value, entry_value(image, part), "cut {cut}: entry of part {part}");
            let promised =
                promises.iter().filter(|(at, of, _)| *at <= cut && *of == part).map(|p| p.2);
            assert!(value >= promised.max().unwrap_or(0), "cut {cut}: a promise was broken");
        }
        for pair in [4, 6] {
            assert_eq!(rig.value(image, pair), rig.value(image, pair + 1), "cut {cut}: torn");
        }
    });
    journal.close().unwrap();
    assert!((0..PARTS).all(|part| entry_value(&rig.device.image(), part) == ROUNDS));
    assert!(shared.is_evictable());
}
