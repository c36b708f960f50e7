//! Random histories, cut at every request, with every kind of loss that the device allows.
//!
//! Verifies: what is recovered is exactly the state after some transaction, no older than the
//! newest whose commit had returned; data written to a freed block after the free committed
//! is never overwritten; recovery again, also after a crash inside it, changes nothing.
//! Does not verify: torn sectors (the format promises nothing about them but the commit
//! block's first).

use std::collections::BTreeMap;
use std::sync::Arc;

use fjord_block::Device;
use fjord_format::jbd2::ChecksumVersion;
use fjord_format::types::{BlockNo, Tid};
use fjord_journal::{Journal, recover};
use proptest::prelude::*;
use rand::rngs::StdRng;

use crate::history::{
    Blocks, Buffers, CHECKSUMS, SURVIVALS, State, check_blocks, each_crash, promised, write_data,
};
use crate::rig::{Event, JOURNAL_START, Recorder, Rig, Survival, crash};

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

/// A freed block is not to be reused before this transaction has committed.
type States = Blocks<Tid>;

struct History {
    rig: Rig,
    journal: Journal,
    buffers: Buffers,
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
        let (buffers, promises) = (Buffers::default(), Vec::new());
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
            let was_metadata = self.now[&block].is_metadata();
            if let State::Free(tid) = self.now[&block] {
                // In use again by its own transaction, or by a later one once committed.
                if tid != handle.tid() && !self.journal.is_committed(tid) {
                    continue;
                }
            }
            self.buffers.write(&self.rig, &handle, block, was_metadata, self.counter);
            self.now.insert(block, State::Metadata(self.counter));
        }
        self.after.insert(handle.stop().0, self.now.clone());
    }

    fn free(&mut self, block: u64) {
        if !self.now[&block].is_metadata() {
            return;
        }
        let handle = self.journal.start(1).unwrap();
        // The cache may or may not still have the buffer.
        let buffer = self.buffers.get(block).filter(|_| self.counter.is_multiple_of(2));
        handle.forget(BlockNo(block), buffer).unwrap();
        self.now.insert(block, State::Free(handle.tid()));
        self.after.insert(handle.stop().0, self.now.clone());
    }

    fn data(&mut self, block: u64) {
        let State::Free(tid) = self.now[&block] else { return };
        if !self.journal.is_committed(tid) {
            return;
        }
        self.now.insert(block, write_data(&self.rig, block, self.counter));
        // The journal knows nothing of this write; states of transactions from the next on
        // have it, and the present one's too.
        let last = *self.after.keys().last().unwrap();
        self.after.insert(last, self.now.clone());
    }

    fn check(&self, events: &[Event], cut: usize, image: Vec<u8>, how: Survival) {
        let promised = promised(&self.promises, cut);
        let device = Arc::new(Recorder::from_image(&image));
        let (_, report) =
            self.rig.open_on(&device).unwrap_or_else(|error| panic!("cut {cut}, {how:?}: {error}"));
        let tid = report.next_tid.0 - 2;
        assert!(tid >= promised, "cut {cut}, {how:?}: recovered {tid}, promised {promised}");
        let context = format!("cut {cut}, {how:?}, transaction {tid}");
        check_blocks(&self.rig, &self.after[&tid], &device.image(), (events, cut), &context);
    }

    /// A crash inside recovery, and recovery after it, must give the same blocks.
    fn check_recovery(&self, image: &[u8], rng: &mut StdRng) {
        let recovering = Arc::new(Recorder::from_image(image));
        let device: Arc<dyn Device> = recovering.clone();
        recover(&device, &self.rig.map, BLOCK_SIZE).unwrap();
        let wanted = recovering.image();
        let events = recovering.events();
        for cut in 0..=events.len() {
            for how in SURVIVALS {
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
    each_crash(&start, &events, seed, |cut, how, image, rng| {
        if cut % 16 == 7 {
            history.check_recovery(&image, rng);
        }
        history.check(&events, cut, image, how);
    });
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
        explore(&ops, CHECKSUMS[version], bit64, seed);
    }
}
