//! Commits of parts: what is taken along, what is left, what shared blocks hold, who is told.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fjord_block::{Buf, DeviceExt, IoOp, Request, Ticket};
use fjord_format::jbd2::ChecksumVersion;
use fjord_format::types::{BlockNo, Tid};
use fjord_journal::{
    Buffer, BufferKind, Handle, Journal, JournalError, Part, PartSet, PartialCommit, Parts, Phase,
    WholeReason,
};

use crate::rig::{Awaited, Recorder, Rig, set_value, wait_until};

/// Parts of the tests: block `n` is of part `n` modulo this.
pub(crate) const PARTS: u32 = 4;
/// The block that all parts share.
pub(crate) const SHARED: u64 = 20;
/// A block of no single part.
pub(crate) const OF_ALL: u64 = 21;
const BLOCK_SIZE: usize = 1024;
const ENTRY_BYTES: usize = BLOCK_SIZE / PARTS as usize;

/// See [`PARTS`].
pub(crate) struct ByNumber;

impl Parts for ByNumber {
    fn part_of(&self, block: BlockNo) -> Part {
        if block.0 == OF_ALL { Part::WHOLE } else { Part(block.0 as u32 % PARTS) }
    }

    fn copy_entries(&self, block: BlockNo, current: &[u8], version: &mut [u8], chosen: &PartSet) {
        assert_eq!(block.0, SHARED);
        for part in (0..PARTS).filter(|&part| chosen.contains(Part(part))) {
            version[entry(part)].copy_from_slice(&current[entry(part)]);
        }
    }
}

/// Where a part's entry lies in the shared block.
pub(crate) fn entry(part: u32) -> std::ops::Range<usize> {
    let start = part as usize * ENTRY_BYTES;
    start..start + ENTRY_BYTES
}

/// Value of a part's entry on an image.
pub(crate) fn entry_value(image: &[u8], part: u32) -> u64 {
    let at = SHARED as usize * BLOCK_SIZE + entry(part).start + 8;
    u64::from_be_bytes(image[at..at + 8].try_into().unwrap())
}

/// Sets a part's entry of the shared block.
pub(crate) fn set_entry(handle: &Handle, shared: &Arc<Buffer>, part: u32, value: u64) {
    handle.touch_part(Part(part));
    set_value(&mut handle.get_write(shared).unwrap()[entry(part)], value);
}

/// A journal with parts.
pub(crate) fn open(rig: &Rig) -> Journal {
    let journal = rig.open();
    journal.set_parts(Arc::new(ByNumber)).unwrap();
    journal
}

pub(crate) fn shared_buffer() -> Arc<Buffer> {
    Buffer::new_keeping_base(BlockNo(SHARED), Buf::zeroed(BLOCK_SIZE), BufferKind::Metadata)
}

struct Bench {
    rig: Rig,
    journal: Journal,
    shared: Arc<Buffer>,
    buffers: Vec<Arc<Buffer>>,
}

impl Bench {
    fn new() -> Bench {
        let rig = Rig::new(BLOCK_SIZE, ChecksumVersion::V3, true, 64);
        let journal = open(&rig);
        let buffers = (0..12).map(|block| rig.buffer(block)).collect();
        Bench { rig, journal, shared: shared_buffer(), buffers }
    }

    /// One handle that sets blocks, and the entries of their parts, to `value`.
    fn write(&self, blocks: &[u64], value: u64) -> Tid {
        let handle = self.journal.start(blocks.len() as u32 + 1).unwrap();
        for &block in blocks {
            let buffer = &self.buffers[block as usize];
            set_value(&mut handle.get_write(buffer).unwrap(), value);
            set_entry(&handle, &self.shared, block as u32 % PARTS, value);
        }
        handle.stop()
    }

    fn commit(&self, tid: Tid, part: u32) -> PartialCommit {
        self.journal.commit_parts(tid, &[Part(part)]).unwrap()
    }

    /// The blocks and the entries after a crash now and recovery.
    fn recovered(&self) -> ([u64; 12], [u64; PARTS as usize]) {
        let device = Arc::new(Recorder::from_image(&self.rig.device.image()));
        self.rig.open_on(&device).unwrap();
        let image = device.image();
        let block = |block: usize| self.rig.value(&image, block as u64);
        (std::array::from_fn(block), std::array::from_fn(|part| entry_value(&image, part as u32)))
    }
}

#[test]
fn a_commit_of_one_part_leaves_the_others_behind() {
    let bench = Bench::new();
    let tid = bench.write(&[0], 1);
    bench.write(&[1], 2);
    bench.write(&[2, 6], 3);
    assert!(matches!(bench.commit(tid, 2), PartialCommit::Parts { log_blocks: 5 }));
    let (blocks, entries) = bench.recovered();
    assert_eq!((blocks[0], blocks[1], blocks[2], blocks[6]), (0, 0, 3, 3));
    assert_eq!(entries, [0, 0, 3, 0]);
    assert_eq!(bench.commit(tid, 2), PartialCommit::Durable);
    assert!(!bench.journal.is_committed(tid), "the transaction runs on");
    // The rest, on top of what is committed by now, with a checkpoint in between.
    bench.journal.checkpoint_all().unwrap();
    bench.write(&[2], 4);
    assert!(matches!(bench.commit(tid, 0), PartialCommit::Parts { .. }));
    let (blocks, entries) = bench.recovered();
    assert_eq!((blocks[0], blocks[1], blocks[2]), (1, 0, 3));
    assert_eq!(entries, [1, 0, 3, 0]);
    bench.journal.commit(tid).unwrap();
    assert_eq!(bench.recovered().1, [1, 2, 4, 0]);
    assert_eq!(bench.journal.stats().partial_commits, 2);
    bench.journal.close().unwrap();
    assert!(bench.shared.is_evictable());
    assert_eq!(entry_value(&bench.rig.device.image(), 2), 4);
}

#[test]
fn handles_that_touched_several_parts_are_not_torn() {
    let bench = Bench::new();
    // 0 and 1 share a handle, 1 and 2 another; 3 stands alone.
    let tid = bench.write(&[0, 1], 1);
    bench.write(&[5, 6], 2);
    bench.write(&[3, 7], 3);
    assert!(matches!(bench.commit(tid, 0), PartialCommit::Parts { .. }));
    let (blocks, entries) = bench.recovered();
    assert_eq!((blocks[0], blocks[1], blocks[5], blocks[6], blocks[3]), (1, 1, 2, 2, 0));
    assert_eq!(entries, [1, 2, 2, 0]);
    // Committed parts part again.
    bench.write(&[0, 4], 4);
    bench.write(&[1], 5);
    assert!(matches!(bench.commit(tid, 0), PartialCommit::Parts { .. }));
    assert_eq!(bench.recovered().1, [4, 2, 2, 0]);
}

#[test]
fn what_is_of_no_part_or_nearly_everything_commits_whole() {
    let bench = Bench::new();
    let handle = bench.journal.start(2).unwrap();
    let of_all = bench.rig.buffer(OF_ALL);
    set_value(&mut handle.get_write(&of_all).unwrap(), 1);
    set_value(&mut handle.get_write(&bench.buffers[0]).unwrap(), 1);
    let tid = handle.stop();
    bench.write(&[1, 5], 2);
    let whole = PartialCommit::Whole(WholeReason::WholePart);
    assert_eq!(bench.commit(tid, 0), whole);
    assert!(bench.journal.is_committed(tid));
    let tid = bench.write(&[0, 4, 8], 3);
    assert_eq!(bench.commit(tid, 0), PartialCommit::Whole(WholeReason::Everything));
    assert!(bench.journal.is_committed(tid));
    let tid = bench.write(&[0, 1, 2, 4, 5, 6, 8], 3);
    bench.write(&[3], 4);
    assert_eq!(bench.commit(tid, 0), PartialCommit::Whole(WholeReason::NearlyAll));
    assert_eq!(bench.commit(tid, 0), PartialCommit::Durable);
    let later = bench.journal.commit_parts(tid.next(), &[Part(0)]);
    assert!(matches!(later, Err(JournalError::Usage(_))));
}

#[test]
fn without_parts_or_a_log_everything_commits() {
    let rig = Rig::new(BLOCK_SIZE, ChecksumVersion::V3, true, 64);
    let plain = rig.open();
    let device = Arc::new(Recorder::new(1 << 20));
    let unlogged = Journal::without_log(device, BLOCK_SIZE);
    unlogged.set_parts(Arc::new(ByNumber)).unwrap();
    for journal in [plain, unlogged] {
        let buffer = Buffer::new(BlockNo(1), Buf::zeroed(BLOCK_SIZE), BufferKind::Metadata);
        let handle = journal.start(1).unwrap();
        set_value(&mut handle.get_write(&buffer).unwrap(), 1);
        let tid = handle.stop();
        let done = journal.commit_parts(tid, &[Part(1)]).unwrap();
        assert_eq!(done, PartialCommit::Whole(WholeReason::NoParts));
    }
    let journal = open(&rig);
    assert!(matches!(journal.set_parts(Arc::new(ByNumber)), Err(JournalError::Usage(_))));
    let plain = rig.open();
    let _running = plain.start(1).unwrap();
    assert!(matches!(plain.set_parts(Arc::new(ByNumber)), Err(JournalError::Usage(_))));
}

#[test]
fn only_the_data_and_the_callbacks_of_its_parts_concern_a_commit() {
    let bench = Bench::new();
    let told: [Arc<AtomicBool>; 2] = Default::default();
    let (ticket, completer, awaited) = Awaited::pending();
    let mut pending = Some(ticket);
    let mut tid = Tid(0);
    for (part, flag) in told.iter().enumerate() {
        let handle = bench.journal.start(1).unwrap();
        let flag = flag.clone();
        handle.on_commit(move |result| {
            assert!(result.is_ok());
            flag.store(true, Ordering::SeqCst);
        });
        if part == 1 {
            handle.attach_data(pending.take().unwrap());
        }
        set_value(&mut handle.get_write(&bench.buffers[part]).unwrap(), 7);
        tid = handle.stop();
    }
    let was_told = |part: usize| told[part].load(Ordering::SeqCst);
    // The other part's data is not there, and nobody waits for it.
    assert!(matches!(bench.commit(tid, 0), PartialCommit::Parts { .. }));
    assert!(was_told(0) && !was_told(1));
    assert_eq!((bench.recovered().0[0], bench.recovered().0[1]), (7, 0));
    std::thread::scope(|scope| {
        let commit = scope.spawn(|| bench.commit(tid, 1));
        wait_until("a wait for the data", || awaited.is_awaited() || commit.is_finished());
        assert!(!was_told(1) && !commit.is_finished());
        completer.complete(Ok(()));
        commit.join().unwrap();
    });
    assert!(was_told(1));
}

#[test]
fn who_wants_parts_during_a_commit_is_served_by_the_next() {
    let bench = Bench::new();
    let (ticket, completer) = Ticket::pending(None);
    let handle = bench.journal.start(1).unwrap();
    set_value(&mut handle.get_write(&bench.buffers[0]).unwrap(), 1);
    handle.attach_data(ticket);
    let tid = handle.stop();
    bench.write(&[3, 7, 11], 9);
    std::thread::scope(|scope| {
        let first = scope.spawn(|| bench.commit(tid, 0));
        while bench.journal.running_tid().is_none() || bench.journal.stats().metadata_blocks == 0 {
            std::thread::yield_now();
        }
        // Handles start again, in the same transaction, while its part is on its way.
        assert_eq!(bench.write(&[1], 2), tid);
        bench.write(&[2], 3);
        let others = [1, 2].map(|part| {
            let bench = &bench;
            scope.spawn(move || bench.commit(tid, part))
        });
        // Not changed since, but not durable yet either.
        let again = scope.spawn(|| bench.commit(tid, 0));
        let waits = || bench.journal.stats().commit_waits;
        if bench.journal.is_dual() {
            // Not all wait for their turn there. One that returns later than this goes unnoticed.
            std::thread::sleep(Duration::from_millis(20));
        } else {
            wait_until("all wait for their turn", || waits() == 3);
        }
        assert!(!again.is_finished() && others.iter().all(|other| !other.is_finished()));
        completer.complete(Ok(()));
        first.join().unwrap();
        assert_eq!(again.join().unwrap(), PartialCommit::Durable);
        for other in others {
            assert!(matches!(other.join().unwrap(), PartialCommit::Parts { .. }));
        }
    });
    // In dual mode nothing is in the way of the second one, either.
    let most = if bench.journal.is_dual() { 3 } else { 2 };
    let commits = bench.journal.stats().partial_commits;
    assert!((2..=most).contains(&commits), "one commit serves both, not {commits}");
    let (blocks, entries) = bench.recovered();
    assert_eq!((blocks[0], blocks[1], blocks[2], blocks[3]), (1, 2, 3, 0));
    assert_eq!(entries, [0, 2, 3, 0]);
}

/// A journal that stopped knows of each part whether its changes are durable.
#[test]
fn a_failed_commit_of_one_part_leaves_the_others_durable() {
    let bench = Bench::new();
    let tid = bench.write(&[0], 1);
    bench.write(&[1], 2);
    bench.write(&[3, 7, 11], 3);
    let are_committed = |parts: &[u32]| {
        let parts: Vec<Part> = parts.iter().copied().map(Part).collect();
        bench.journal.are_parts_committed(tid, &parts)
    };
    assert!(!are_committed(&[0]) && are_committed(&[2]));
    assert!(matches!(bench.commit(tid, 0), PartialCommit::Parts { .. }));
    assert!(are_committed(&[0]) && are_committed(&[0, 2]) && !are_committed(&[0, 1]));
    bench.rig.device.faults().fail_nth(Some(IoOp::Write), 0, 5);
    bench.journal.commit_parts(tid, &[Part(1)]).unwrap_err();
    assert!(bench.journal.error().is_some());
    // Its changes have left the running transaction, but are not durable.
    assert!(!are_committed(&[1]), "of the failed commit");
    assert!(!are_committed(&[3]), "of no commit");
    assert!(are_committed(&[0]) && are_committed(&[2]));
    bench.journal.commit_parts(tid, &[Part(1)]).unwrap_err();
    bench.journal.commit_parts(tid, &[Part(3)]).unwrap_err();
    assert_eq!(bench.commit(tid, 0), PartialCommit::Durable);
    let (blocks, entries) = bench.recovered();
    assert_eq!((blocks[0], blocks[1], entries), (1, 0, [1, 0, 0, 0]));
}

/// The same if the commit that fails is that of the rest of the transaction.
#[test]
fn a_failed_commit_of_the_rest_leaves_the_parts_before_it_durable() {
    let bench = Bench::new();
    let tid = bench.write(&[0], 1);
    bench.write(&[1], 2);
    bench.write(&[3, 7, 11], 3);
    assert!(matches!(bench.commit(tid, 0), PartialCommit::Parts { .. }));
    bench.rig.device.faults().fail_nth(Some(IoOp::Write), 0, 5);
    bench.journal.commit(tid).unwrap_err();
    assert!(bench.journal.are_parts_committed(tid, &[Part(0)]));
    assert!(!bench.journal.are_parts_committed(tid, &[Part(0), Part(1)]));
    assert_eq!(bench.commit(tid, 0), PartialCommit::Durable);
    bench.journal.commit_parts(tid, &[Part(1)]).unwrap_err();
    assert_eq!(bench.recovered().0[..2], [1, 0]);
}

/// Later changes to a part, which fail, are not those of a caller whose changes are durable.
#[test]
fn changes_of_a_part_do_not_fail_with_later_ones() {
    let bench = Bench::new();
    let change = |value| {
        let handle = bench.journal.start(1).unwrap();
        set_value(&mut handle.get_write(&bench.buffers[0]).unwrap(), value);
        let changes = handle.changes();
        handle.stop();
        changes
    };
    bench.write(&[3, 7, 11], 3);
    let early = change(1);
    assert!(!bench.journal.are_parts_committed(early, &[Part(0)]));
    let done = bench.journal.commit_parts(early, &[Part(0)]).unwrap();
    assert!(matches!(done, PartialCommit::Parts { log_blocks } if log_blocks > 0));
    let late = change(2);
    assert_eq!(late.tid(), early.tid());
    assert!(bench.journal.are_parts_committed(early, &[Part(0)]));
    assert!(!bench.journal.are_parts_committed(late, &[Part(0)]));
    let again = bench.journal.commit_parts(early, &[Part(0)]);
    assert_eq!(again, Ok(PartialCommit::Durable), "nothing to commit");
    bench.rig.device.faults().fail_nth(Some(IoOp::Write), 0, 5);
    bench.journal.commit_parts(late, &[Part(0)]).unwrap_err();
    assert!(!bench.journal.are_parts_committed(late, &[Part(0)]));
    assert!(bench.journal.are_parts_committed(early, &[Part(0)]));
    assert_eq!(bench.journal.commit_parts(early, &[Part(0)]), Ok(PartialCommit::Durable));
    bench.journal.commit_parts(late.tid(), &[Part(0)]).unwrap_err();
    assert_eq!(bench.recovered().0[0], 1);
}

#[test]
fn a_journal_that_stops_while_a_commit_waits_for_a_handle_has_lost_no_part() {
    let bench = Bench::new();
    let tid = bench.write(&[0], 1);
    bench.write(&[3, 7, 11], 3);
    assert!(matches!(bench.commit(tid, 0), PartialCommit::Parts { .. }));
    let handle = bench.journal.start(1).unwrap();
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| bench.journal.commit_parts(tid, &[Part(3)]));
        while bench.journal.phase(tid) != Some(Phase::Locked) {
            std::thread::yield_now();
        }
        bench.journal.shutdown();
        waits.join().unwrap().unwrap_err();
    });
    handle.stop();
    assert!(bench.journal.are_parts_committed(tid, &[Part(0)]));
    assert!(!bench.journal.are_parts_committed(tid, &[Part(3)]));
}

#[test]
fn a_free_is_revoked_by_the_commit_of_its_part() {
    let bench = Bench::new();
    bench.write(&[0, 1], 1);
    bench.journal.commit_running().unwrap();
    let handle = bench.journal.start(1).unwrap();
    handle.forget(BlockNo(0), Some(&bench.buffers[0])).unwrap();
    let tid = handle.stop();
    let handle = bench.journal.start(1).unwrap();
    handle.forget(BlockNo(1), Some(&bench.buffers[1])).unwrap();
    handle.stop();
    bench.write(&[2, 6, 10], 3);
    assert!(matches!(bench.commit(tid, 0), PartialCommit::Parts { .. }));
    assert_eq!(bench.journal.stats().revoke_records, 1);
    let (blocks, _) = bench.recovered();
    assert_eq!((blocks[0], blocks[1]), (0, 1));
    // Data now, which no checkpoint may overwrite with the old version.
    let mut contents = Buf::zeroed(BLOCK_SIZE);
    set_value(contents.make_mut(), 9);
    bench.rig.device.submit_one(Request::write(0, vec![contents])).wait().unwrap();
    bench.journal.checkpoint_all().unwrap();
    assert_eq!(bench.rig.value(&bench.rig.device.image(), 0), 9);
    assert_eq!(bench.recovered().0[0], 9);
    bench.journal.commit(tid).unwrap();
    assert_eq!(bench.recovered().0[0], 9);
    assert_eq!(bench.journal.stats().revoke_records, 2);
}

#[test]
fn reservations_come_back_with_every_commit_of_parts() {
    let bench = Bench::new();
    bench.write(&[3, 7], 1);
    // Far more than a transaction of this log could hold, were they not given back.
    for value in 2..200 {
        let tid = bench.write(&[0, 4], value);
        let done = bench.commit(tid, 0);
        assert!(matches!(done, PartialCommit::Parts { .. }), "{value}: {done:?}");
        bench.journal.checkpoint_all().unwrap();
    }
    assert_eq!(bench.journal.running_tid(), Some(Tid(2)));
    assert_eq!((bench.recovered().0[0], bench.recovered().0[3]), (199, 0));
}

#[test]
fn a_log_without_room_for_two_commits_all() {
    let rig = Rig::new(BLOCK_SIZE, ChecksumVersion::V3, true, 39);
    let journal = open(&rig);
    let buffers: Vec<_> = (0..12).map(|block| rig.buffer(block)).collect();
    let write = |block: usize| {
        let handle = journal.start(1).unwrap();
        set_value(&mut handle.get_write(&buffers[block]).unwrap(), 5);
        handle.stop()
    };
    let mut reasons = Vec::new();
    for round in 0..12 {
        let tid = write(0);
        for block in 1..7 {
            write(block);
        }
        if let PartialCommit::Whole(reason) = journal.commit_parts(tid, &[Part(0)]).unwrap() {
            reasons.push((round, reason));
        }
    }
    assert!(reasons.iter().any(|&(_, reason)| reason == WholeReason::LogSpace), "{reasons:?}");
    journal.close().unwrap();
}
