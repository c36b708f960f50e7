//! Random histories, cut at every request, with every kind of loss that the device allows.
//!
//! Verifies: what is recovered is exactly the state after some transaction, no older than the
//! newest whose commit had returned; data written to a freed block after the free committed
//! is never overwritten; recovery again, also after a crash inside it, changes nothing.
//! Does not verify: torn sectors (the format promises nothing about them but the commit
//! block's first).

use std::collections::BTreeMap;
use std::sync::Arc;

use fjord_block::{Buf, Device, DeviceExt, Request};
use fjord_format::jbd2::ChecksumVersion;
use fjord_format::types::BlockNo;
use fjord_journal::{Buffer, Journal, recover};
use proptest::prelude::*;
use rand::SeedableRng;
use rand::rngs::StdRng;

use crate::rig::{Event, JOURNAL_START, Recorder, Rig, Survival, crash, is_whole, set_value};

const BLOCK_SIZE: usize = 1024;
const BLOCKS: u64 = 12;
/// The ID that the first transaction of a fresh journal gets.
const FIRST_TID: u32 = 2;

#[derive(Clone, Debug)]
enum Op {
    /// One handle that writes some blocks.
    Write(Vec<u64>),
    /// One handle that frees a block.
    Free(u64),
    /// A data write to a block whose free has committed.
    Data(u64),
    Commit,
    Checkpoint,
    Quiesce,
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let block = 0..BLOCKS;
    let op = prop_oneof![
        6 => prop::collection::vec(block.clone(), 1..4).prop_map(Op::Write),
        2 => block.clone().prop_map(Op::Free),
        2 => block.prop_map(Op::Data),
        4 => Just(Op::Commit),
        1 => Just(Op::Checkpoint),
        1 => Just(Op::Quiesce),
    ];
    prop::collection::vec(op, 1..40)
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    Metadata(u64),
    /// Freed by this transaction; not to be reused before it committed.
    Free(u32),
    /// Value, and the request that wrote it.
    Data(u64, usize),
}

type States = BTreeMap<u64, State>;

struct History {
    rig: Rig,
    journal: Journal,
    buffers: BTreeMap<u64, Arc<Buffer>>,
    now: States,
    /// State after each transaction.
    after: BTreeMap<u32, States>,
    /// Requests so far when a commit returned, and the transaction.
    promises: Vec<(usize, u32)>,
    counter: u64,
}

impl History {
    fn new(checksum: ChecksumVersion, bit64: bool) -> History {
        let rig = Rig::new(BLOCK_SIZE, checksum, bit64, 40);
        let journal = rig.open();
        let now: States = (0..BLOCKS).map(|block| (block, State::Metadata(0))).collect();
        let after = BTreeMap::from([(0, now.clone()), (1, now.clone())]);
        let (buffers, promises) = (BTreeMap::new(), Vec::new());
        History { rig, journal, buffers, now, after, promises, counter: 0 }
    }

    fn run(&mut self, op: &Op) {
        self.counter += 1;
        match op {
            Op::Write(blocks) => self.write(blocks),
            Op::Free(block) => self.free(*block),
            Op::Data(block) => self.data(*block),
            Op::Commit => {
                let tid = self.journal.commit_running().unwrap();
                if tid.0 >= FIRST_TID {
                    self.promises.push((self.rig.device.event_count(), tid.0));
                }
            }
            Op::Checkpoint => drop(self.journal.checkpoint_some(5).unwrap()),
            Op::Quiesce => self.journal.quiesce().unwrap(),
        }
    }

    fn write(&mut self, blocks: &[u64]) {
        let handle = self.journal.start(blocks.len() as u32).unwrap();
        for &block in blocks {
            let is_metadata = matches!(self.now[&block], State::Metadata(_));
            if let State::Free(tid) = self.now[&block] {
                // In use again by its own transaction, or by a later one once committed.
                let committed = self.journal.is_committed(fjord_format::types::Tid(tid));
                if tid != handle.tid().0 && !committed {
                    continue;
                }
            }
            if !is_metadata && !self.buffers.get(&block).is_some_and(|old| old.is_dirty()) {
                self.buffers.remove(&block);
            }
            let rig = &self.rig;
            let buffer = self.buffers.entry(block).or_insert_with(|| rig.buffer(block));
            let mut guard =
                if is_metadata { handle.get_write(buffer) } else { handle.get_create(buffer) }
                    .unwrap();
            set_value(&mut guard, self.counter);
            self.now.insert(block, State::Metadata(self.counter));
        }
        self.after.insert(handle.stop().0, self.now.clone());
    }

    fn free(&mut self, block: u64) {
        if !matches!(self.now[&block], State::Metadata(_)) {
            return;
        }
        let handle = self.journal.start(1).unwrap();
        // The cache may or may not still have the buffer.
        let buffer = self.buffers.get(&block).filter(|_| self.counter.is_multiple_of(2));
        handle.forget(BlockNo(block), buffer).unwrap();
        self.now.insert(block, State::Free(handle.tid().0));
        self.after.insert(handle.stop().0, self.now.clone());
    }

    fn data(&mut self, block: u64) {
        let State::Free(tid) = self.now[&block] else { return };
        if !self.journal.is_committed(fjord_format::types::Tid(tid)) {
            return;
        }
        let mut contents = Buf::zeroed(BLOCK_SIZE);
        set_value(contents.make_mut(), self.counter);
        let index = self.rig.device.event_count();
        let request = Request::write(block * BLOCK_SIZE as u64, vec![contents]);
        self.rig.device.submit_one(request).wait().unwrap();
        self.now.insert(block, State::Data(self.counter, index));
        // The journal knows nothing of this write; states of transactions from the next on
        // have it, and the present one's too.
        let last = *self.after.keys().last().unwrap();
        self.after.insert(last, self.now.clone());
    }

    fn check(&self, events: &[Event], cut: usize, image: Vec<u8>, how: Survival) {
        let promised = self.promises.iter().filter(|(at, _)| *at <= cut).map(|(_, tid)| *tid);
        let promised = promised.max().unwrap_or(0);
        let device = Arc::new(Recorder::from_image(&image));
        let (_, report) =
            self.rig.open_on(&device).unwrap_or_else(|error| panic!("cut {cut}, {how:?}: {error}"));
        let tid = report.next_tid.0 - 2;
        assert!(tid >= promised, "cut {cut}, {how:?}: recovered {tid}, promised {promised}");
        let states = &self.after[&tid];
        let recovered = device.image();
        for (&block, &state) in states {
            let at = block as usize * BLOCK_SIZE;
            let contents = &recovered[at..at + BLOCK_SIZE];
            let expected = match state {
                State::Metadata(value) => value,
                State::Data(value, index) => {
                    let mut later = events[..cut].iter().skip(index + 1);
                    if index >= cut || !later.any(|event| matches!(event, Event::Flush)) {
                        continue;
                    }
                    value
                }
                State::Free(_) => continue,
            };
            let value = self.rig.value(&recovered, block);
            assert!(
                value == expected && is_whole(contents),
                "cut {cut}, {how:?}, transaction {tid}: block {block} has {value}, not {expected}"
            );
        }
    }

    /// A crash inside recovery, and recovery after it, must give the same blocks.
    fn check_recovery(&self, image: &[u8], rng: &mut StdRng) {
        let recovering = Arc::new(Recorder::from_image(image));
        let device: Arc<dyn Device> = recovering.clone();
        recover(&device, &self.rig.map, BLOCK_SIZE).unwrap();
        let wanted = recovering.image();
        let events = recovering.events();
        for cut in 0..=events.len() {
            for how in [Survival::All, Survival::None, Survival::Sectors, Survival::Requests] {
                let half = Arc::new(Recorder::from_image(&crash(image, &events, cut, how, rng)));
                let device: Arc<dyn Device> = half.clone();
                recover(&device, &self.rig.map, BLOCK_SIZE).unwrap();
                let home = JOURNAL_START as usize * BLOCK_SIZE;
                assert!(half.image()[..home] == wanted[..home], "cut {cut}, {how:?}");
            }
        }
    }
}

fn explore(ops: &[Op], checksum: ChecksumVersion, bit64: bool, seed: u64) {
    let mut history = History::new(checksum, bit64);
    let start = history.rig.device.image();
    ops.iter().for_each(|op| history.run(op));
    let events = history.rig.device.events();
    let mut rng = StdRng::seed_from_u64(seed);
    for cut in 0..=events.len() {
        for how in [Survival::All, Survival::None, Survival::Sectors, Survival::Requests] {
            let image = crash(&start, &events, cut, how, &mut rng);
            if cut % 16 == 7 {
                history.check_recovery(&image, &mut rng);
            }
            history.check(&events, cut, image, how);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]
    #[test]
    fn every_crash_recovers_to_a_transaction_boundary(
        ops in ops(),
        version in 0usize..4,
        bit64: bool,
        seed: u64,
    ) {
        let versions =
            [ChecksumVersion::None, ChecksumVersion::V1, ChecksumVersion::V2, ChecksumVersion::V3];
        explore(&ops, versions[version], bit64, seed);
    }
}
