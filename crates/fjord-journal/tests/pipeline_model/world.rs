//! A journal over the model device, and the record of what its callers were told.
//!
//! The record is no part of the model: all threads of a model are one thread of the system, so its
//! lock is never waited for.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use fjord_block::{Buf, Device, DeviceExt, Ticket};
use fjord_format::types::{BlockNo, Tid};
use fjord_journal::{
    Buffer, BufferKind, Handle, Journal, JournalError, JournalMap, JournalOptions, Part, PartSet,
    Parts, PipelineMode,
};

use crate::device::{
    BLOCK_SIZE, Bound, Fault, JOURNAL_BLOCKS, JOURNAL_START, ModelDevice, contents, home_write,
};

/// Parts of the tests: block `n` is of part `n` modulo this.
const PARTS: u32 = 4;
const BUFFERS: u64 = 12;

/// See [`PARTS`].
struct ByNumber {
    /// How often a partial commit is not possible yet.
    refusals: AtomicUsize,
}

impl Parts for ByNumber {
    fn part_of(&self, block: BlockNo) -> Part {
        part_of(block.0)
    }

    fn copy_entries(&self, block: BlockNo, _: &[u8], _: &mut [u8], _: &PartSet) {
        panic!("block {block} is not shared");
    }

    fn is_ready(&self, _: &PartSet) -> bool {
        let refuse = |left: usize| left.checked_sub(1);
        self.refusals.fetch_update(Ordering::Relaxed, Ordering::Relaxed, refuse).is_err()
    }
}

/// The part of a block.
pub(crate) fn part_of(block: u64) -> Part {
    Part(block as u32 % PARTS)
}

/// A change of one block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Change {
    pub(crate) tid: Tid,
    block: u64,
    value: u32,
    /// It has data at the home location of this block.
    data: Option<u64>,
}

/// What callers were told.
#[derive(Default)]
struct Record {
    /// A caller may find the parts of its change durable before the callbacks of their commit.
    has_parts: bool,
    /// Each change with the outcome that its callback got.
    changes: Vec<(Change, Option<bool>)>,
    /// Outcomes of callbacks, in their order.
    callbacks: Vec<(Tid, bool)>,
    /// Outcomes of calls, with the transaction.
    outcomes: Vec<(Tid, Result<(), JournalError>)>,
    /// Changes of which a caller was told that they failed.
    failed: Vec<Change>,
    asked: usize,
    /// Writes of data to freed blocks.
    reuses: Vec<(Change, Ticket)>,
}

/// See the module documentation.
pub(crate) struct World {
    pub(crate) device: Arc<ModelDevice>,
    pub(crate) journal: Journal,
    buffers: Vec<Arc<Buffer>>,
    record: Arc<Mutex<Record>>,
}

/// How to build a world.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Setup {
    pub(crate) pipeline: PipelineMode,
    pub(crate) keeps_order: bool,
    pub(crate) parts: bool,
    /// A commit of several blocks has as many pieces, which threads write together.
    pub(crate) pieces: bool,
    /// How often a partial commit is not possible yet.
    pub(crate) refusals: usize,
    pub(crate) fault: Option<Fault>,
}

/// Most commits in flight over a device that keeps order.
const IN_FLIGHT_COUNT_MAX: usize = 8;

impl Setup {
    fn bound(&self) -> Bound {
        match self.pipeline {
            // Before the one that comes.
            _ if self.keeps_order => Bound::CommitBlocks(IN_FLIGHT_COUNT_MAX - 1),
            PipelineMode::Serial => Bound::CommitBlocks(0),
            PipelineMode::Dual => Bound::NoLogBlocks,
        }
    }
}

fn lock(record: &Mutex<Record>) -> MutexGuard<'_, Record> {
    record.lock().expect("no check fails while it is locked")
}

impl World {
    pub(crate) fn new(setup: Setup) -> World {
        let device = Arc::new(ModelDevice::new(setup.keeps_order, setup.bound(), setup.fault));
        let map = JournalMap::contiguous(BlockNo(JOURNAL_START), JOURNAL_BLOCKS).expect("a map");
        let options = JournalOptions {
            pipeline: setup.pipeline,
            descriptor_blocks_max: setup.pieces.then_some(1),
            helpers_max: Some(BUFFERS as usize),
            ..JournalOptions::default()
        };
        let over: Arc<dyn Device> = device.clone();
        let (journal, _) = Journal::open(over, map, BLOCK_SIZE, &options).expect("an open journal");
        if setup.parts {
            let parts = ByNumber { refusals: AtomicUsize::new(setup.refusals) };
            journal.set_parts(Arc::new(parts)).expect("no transaction runs");
        }
        let buffer =
            |block| Buffer::new(BlockNo(block), Buf::zeroed(BLOCK_SIZE), BufferKind::Metadata);
        let buffers = (0..BUFFERS).map(buffer).collect();
        let record = Record { has_parts: setup.parts, ..Record::default() };
        World { device, journal, buffers, record: Arc::new(Mutex::new(record)) }
    }

    /// Changes a block under a handle of its own; nothing if the journal has stopped.
    pub(crate) fn change(&self, block: u64) -> Option<Change> {
        let handle = self.journal.start(1).ok()?;
        let change = self.change_under(&handle, block, None)?;
        handle.stop();
        Some(change)
    }

    /// Changes a block, and fetches its buffer while the transaction runs.
    pub(crate) fn change_and_fetch(&self, block: u64) {
        let changed = self.change(block).expect("the journal runs");
        assert!(
            self.journal.live_buffer(BlockNo(changed.block)).is_some(),
            "a buffer with changes is not in the table"
        );
    }

    /// As [`World::change`], with data at the home location of another block.
    pub(crate) fn change_with_data(&self, block: u64, data: u64) -> Option<Change> {
        let handle = self.journal.start(1).ok()?;
        let change = self.change_under(&handle, block, Some(data))?;
        handle.attach_data(self.device.submit_one(home_write(data, change.value)));
        handle.stop();
        Some(change)
    }

    /// Frees a block, whose place takes data as soon as that has committed, and changes another.
    pub(crate) fn free(&self, freed: u64, block: u64) -> Option<Change> {
        let handle = self.journal.start(2).ok()?;
        self.free_under(handle, freed, block)
    }

    /// The same for a block that the transaction has changed.
    pub(crate) fn change_and_free(&self, freed: u64, block: u64) -> Option<Change> {
        let handle = self.journal.start(3).ok()?;
        drop(handle.get_write(&self.buffers[freed as usize]).ok()?);
        self.free_under(handle, freed, block)
    }

    fn free_under(&self, handle: Handle, freed: u64, block: u64) -> Option<Change> {
        handle.forget(BlockNo(freed), Some(&self.buffers[freed as usize])).ok()?;
        let change = self.change_under(&handle, block, None)?;
        let (device, record) = (self.device.clone(), self.record.clone());
        handle.on_commit(move |outcome| {
            if outcome.is_ok() {
                assert_durable(&device, change, "the next owner of a freed block");
                let ticket = device.submit_one(home_write(freed, change.value));
                lock(&record).reuses.push((change, ticket));
            }
        });
        handle.stop();
        Some(change)
    }

    /// The data in the place of a freed block is there, and stays.
    pub(crate) fn assert_reused(&self, freed: u64) {
        let (change, ticket) = lock(&self.record).reuses.pop().expect("the block was freed");
        ticket.wait().expect("a write of data");
        self.journal.checkpoint_all().expect("a checkpoint");
        let found = self.device.at_home(freed, false);
        assert_eq!(found, Some(change.value), "a checkpoint wrote a freed block");
    }

    /// Changes a block under `handle`, with a callback.
    fn change_under(&self, handle: &Handle, block: u64, data: Option<u64>) -> Option<Change> {
        let buffer = &self.buffers[block as usize];
        let mut guard = handle.get_write(buffer).ok()?;
        let mut record = lock(&self.record);
        let (index, tid) = (record.changes.len(), handle.tid());
        let change = Change { tid, block, value: index as u32 + 1, data };
        record.changes.push((change, None));
        drop(record);
        guard.copy_from_slice(&contents(block, change.value));
        drop(guard);
        let (device, record) = (self.device.clone(), self.record.clone());
        handle.on_commit(move |outcome| {
            if outcome.is_ok() {
                assert_durable(&device, change, "a callback");
            }
            let mut record = lock(&record);
            let earlier = record.changes[index].1.replace(outcome.is_ok());
            record.callbacks.push((tid, outcome.is_ok()));
            drop(record);
            assert_eq!(earlier, None, "a callback is called again: {change:?}");
        });
        Some(change)
    }

    /// Makes a change durable.
    pub(crate) fn fsync(&self, change: Option<Change>) {
        let Some(change) = change else { return };
        let outcome = self.journal.commit(change.tid);
        told(&self.device, &self.record, change, outcome);
    }

    /// Makes the part of a change durable.
    pub(crate) fn fsync_part(&self, change: Option<Change>) {
        let Some(change) = change else { return };
        let outcome = self.journal.commit_parts(change.tid, &[part_of(change.block)]);
        told(&self.device, &self.record, change, outcome.map(drop));
    }

    /// The newest change of a block.
    pub(crate) fn newest(&self, block: u64) -> Option<Change> {
        let record = lock(&self.record);
        let changes = record.changes.iter().rev().map(|(change, _)| *change);
        changes.into_iter().find(|change| change.block == block)
    }

    /// Fixes the order of a change.
    pub(crate) fn fbarrier(&self, change: Option<Change>) {
        let Some(change) = change else { return };
        let outcome = self.journal.commit_in_order(change.tid);
        if outcome.is_err() {
            lock(&self.record).outcomes.push((change.tid, outcome));
        }
    }

    /// Asks for a change to be made durable, without waiting.
    pub(crate) fn ask(&self, change: Option<Change>) {
        let Some(change) = change else { return };
        lock(&self.record).asked += 1;
        let (device, record) = (self.device.clone(), self.record.clone());
        self.journal.commit_then(change.tid, move |outcome| {
            lock(&record).asked -= 1;
            told(&device, &record, change, outcome);
        });
    }

    /// The same for its part.
    pub(crate) fn ask_part(&self, change: Option<Change>) {
        let Some(change) = change else { return };
        lock(&self.record).asked += 1;
        let (device, record) = (self.device.clone(), self.record.clone());
        self.journal.commit_parts_then(change.tid, &[part_of(change.block)], move |outcome| {
            lock(&record).asked -= 1;
            told(&device, &record, change, outcome.map(drop));
        });
    }

    /// What holds when all threads have ended.
    pub(crate) fn check(&self) {
        let record = lock(&self.record);
        assert_eq!(record.asked, 0, "requests without an answer");
        let tids = |outcomes: &[(Tid, bool)], ok: bool| -> Vec<u32> {
            outcomes.iter().filter(|outcome| outcome.1 == ok).map(|(tid, _)| tid.0).collect()
        };
        let told = tids(&record.callbacks, true);
        assert!(told.is_sorted(), "callbacks are out of order: {told:?}");
        if record.has_parts {
            return;
        }
        let outcomes = record.outcomes.iter().map(|(tid, outcome)| (*tid, outcome.is_ok()));
        let outcomes: Vec<_> = outcomes.collect();
        let newest = |outcomes| tids(outcomes, true).into_iter().max();
        let oldest = |outcomes| tids(outcomes, false).into_iter().min().unwrap_or(u32::MAX);
        assert!(
            newest(&record.callbacks).is_none_or(|tid| tid < oldest(&record.callbacks)),
            "success behind a failure: {:?}",
            record.callbacks
        );
        // An abort fails those that wait for the commit lock, even if their commit goes on.
        assert!(
            newest(&outcomes).is_none_or(|tid| tid <= oldest(&outcomes)),
            "success behind a failure: {outcomes:?}"
        );
    }

    /// The newest changes are there after a power cut, from the log or from their home locations.
    pub(crate) fn assert_newest_durable(&self) {
        let changes: Vec<Change> = (0..BUFFERS).filter_map(|block| self.newest(block)).collect();
        for change in changes {
            assert_durable(&self.device, change, "who has checkpointed");
        }
    }

    /// No call failed.
    pub(crate) fn assert_all_durable(&self) {
        let record = lock(&self.record);
        let failed = record.outcomes.iter().find(|(_, outcome)| outcome.is_err());
        assert_eq!(failed, None);
    }

    /// Every change has committed.
    pub(crate) fn assert_all_called(&self) {
        let record = lock(&self.record);
        let lost = record.changes.iter().find(|(_, called)| *called != Some(true));
        assert!(lost.is_none(), "its callback was not called with success: {lost:?}");
    }

    /// No caller was told of a failure whose change is in a commit before it.
    pub(crate) fn assert_failed_are_lost(&self) {
        let recovered = self.device.recovered();
        for change in &lock(&self.record).failed {
            let found = recovered.get(&change.block).copied();
            let is_lost = found < Some(change.value);
            assert!(is_lost, "{change:?} failed, but recovery finds {recovered:?}");
        }
    }

    /// Transactions from `first` on failed, and none before.
    pub(crate) fn assert_failed_from(&self, first: u32) {
        let record = lock(&self.record);
        for (tid, outcome) in &record.outcomes {
            assert_eq!(outcome.is_ok(), tid.0 < first, "transaction {tid}: {outcome:?}");
        }
    }
}

/// A caller is told that its change is durable, or that it failed.
fn told(
    device: &ModelDevice,
    record: &Mutex<Record>,
    change: Change,
    outcome: Result<(), JournalError>,
) {
    if outcome.is_ok() {
        assert_durable(device, change, "a caller");
    }
    let mut record = lock(record);
    let (called, has_parts) = (record.changes[change.value as usize - 1].1, record.has_parts);
    record.outcomes.push((change.tid, outcome.clone()));
    if outcome.is_err() {
        record.failed.push(change);
    }
    drop(record);
    if outcome.is_ok() && !has_parts {
        assert_eq!(called, Some(true), "the callback of {change:?} comes after its caller");
    }
}

fn assert_durable(device: &ModelDevice, change: Change, who: &str) {
    let recovered = device.recovered();
    let found = recovered.get(&change.block).copied();
    assert!(
        found >= Some(change.value),
        "{who} is told of {change:?}, but a power cut leaves {recovered:?}"
    );
    if let Some(block) = change.data {
        let data = device.at_home(block, true);
        assert!(
            data >= Some(change.value),
            "{who} is told of {change:?} before its data: {data:?}"
        );
    }
}
