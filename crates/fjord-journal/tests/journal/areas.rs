//! Areas: the mark, what a crash leaves in them, and what counts of it afterwards.

use std::collections::BTreeSet;
use std::sync::Arc;

use fjord_block::{Buf, IoOp};
use fjord_format::ijournal::{AreaTable, InodeImage};
use fjord_format::jbd2::{ChecksumVersion, Incompat, Superblock};
use fjord_format::types::{BlockNo, InodeNo, Tid};
use fjord_journal::{
    AreaWriter, Journal, JournalError, JournalOptions, Submitted, UnplacedITransaction, write_table,
};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::rig::{JOURNAL_START, Recorder, Rig, Survival, crash, set_value};

const BLOCK_SIZE: usize = 1024;
const AREA_BLOCKS: u32 = 16;

pub(crate) fn rig() -> Rig {
    let mut rig = Rig::new(BLOCK_SIZE, ChecksumVersion::V3, true, 200);
    rig.grow_behind_the_log();
    let device: Arc<dyn fjord_block::Device> = rig.device.clone();
    let superblock = superblock(&rig.device.image());
    let table = AreaTable { uuid: superblock.s_uuid, area_count: 2, area_blocks: AREA_BLOCKS };
    write_table(&device, &rig.map, &superblock, &table).unwrap();
    rig.options = JournalOptions { replays_ijournal: true, ..rig.options.clone() };
    rig
}

fn superblock(image: &[u8]) -> Superblock {
    Superblock::decode(&image[JOURNAL_START as usize * BLOCK_SIZE..]).unwrap()
}

/// Changes a block in the running transaction.
pub(crate) fn change(rig: &Rig, journal: &Journal, block: u64, value: u64) -> Tid {
    let buffer = journal.live_buffer(BlockNo(block)).unwrap_or_else(|| rig.buffer(block));
    let handle = journal.start(1).unwrap();
    set_value(&mut handle.get_write(&buffer).unwrap(), value);
    handle.stop()
}

/// Writes an i-transaction with one payload block; its sub-transaction ID, or `None` when the
/// areas are full.
fn fsync(journal: &Journal, hint: usize, tid: Tid, value: u8) -> Option<u64> {
    let writer = journal.area_writer().unwrap().unwrap();
    let (sub_id, transaction) = i_transaction(&writer, tid, value);
    match writer.submit(hint, transaction, true).unwrap() {
        Submitted::Written(write) => {
            let is_behind = write.is_behind_barriers;
            writer.wait(write).unwrap();
            assert_eq!(journal.make_barriers_durable().unwrap(), is_behind);
            Some(sub_id)
        }
        Submitted::Full => None,
    }
}

/// An i-transaction with one payload block, and its sub-transaction ID.
fn i_transaction(writer: &AreaWriter<'_>, tid: Tid, value: u8) -> (u64, UnplacedITransaction) {
    i_transaction_of(writer, InodeNo(20), tid, value)
}

pub(crate) fn i_transaction_of(
    writer: &AreaWriter<'_>,
    ino: InodeNo,
    tid: Tid,
    value: u8,
) -> (u64, UnplacedITransaction) {
    let sub_id = writer.next_sub_id();
    let transaction = UnplacedITransaction {
        tid,
        sub_id,
        ino,
        inodes: vec![InodeImage { ino, bytes: vec![value; 600] }],
        entries: Vec::new(),
        superseded: Vec::new(),
        extent_blocks: Vec::new(),
        data: [(BlockNo(7), Buf::from_slice(&[value.max(1); BLOCK_SIZE]))].into(),
    };
    (sub_id, transaction)
}

/// As [`fsync`], a barrier; its number too.
fn barrier(
    journal: &Journal,
    hint: usize,
    tid: Tid,
    value: u8,
    is_held: bool,
) -> Option<(u64, u64)> {
    let writer = journal.barrier_writer().unwrap().unwrap();
    let (sub_id, transaction) = i_transaction(&writer, tid, value);
    let submitted = writer.submit_barrier(hint, transaction, is_held).unwrap();
    submitted.map(|submitted| (sub_id, submitted.number))
}

pub(crate) fn sub_ids(journal: &Journal) -> Vec<u64> {
    journal.take_pending().iter().map(|transaction| transaction.sub_id).collect()
}

#[test]
fn i_transactions_of_uncommitted_transactions_come_back() {
    let rig = rig();
    let journal = rig.open();
    assert!(journal.has_areas());
    assert_eq!(superblock(&rig.device.image()).ijournal(), None);
    let first = change(&rig, &journal, 3, 1);
    assert_eq!(fsync(&journal, 0, first, 1), Some(1));
    assert!(superblock(&rig.device.image()).ijournal().is_some());
    journal.commit(first).unwrap();
    let second = change(&rig, &journal, 3, 2);
    assert_eq!(fsync(&journal, 1, second, 2), Some(2));
    assert_eq!(fsync(&journal, 0, second, 3), Some(3));
    journal.shutdown();

    let image = rig.device.image();
    let plain = JournalOptions { replays_ijournal: false, ..rig.options.clone() };
    let device = Arc::new(Recorder::from_image(&image));
    let refused = Journal::open(device.clone(), rig.map.clone(), BLOCK_SIZE, &plain);
    assert!(matches!(refused, Err(JournalError::NeedsIjournalReplay { count: 2 })));
    assert!(device.image() == image, "nothing is written before the refusal");

    let (journal, report) = rig.open_on(&device).unwrap();
    assert_eq!((report.committed, report.i_transactions), (first, 2));
    assert!(journal.area_writer().unwrap().is_none(), "not before recovery has ended");
    assert_eq!(sub_ids(&journal), [2, 3]);
    assert_eq!(sub_ids(&journal), []);
    let recovery = change(&rig, &journal, 4, 9);
    assert!(recovery.at_least(second));
    journal.quiesce().unwrap();
    assert_eq!(superblock(&device.image()).ijournal(), None);
    assert!(journal.area_writer().unwrap().is_some());
}

#[test]
fn a_clean_journal_has_no_mark() {
    let rig = rig();
    let before = rig.device.image();
    let journal = rig.open();
    let tid = change(&rig, &journal, 3, 1);
    fsync(&journal, 0, tid, 1).unwrap();
    journal.close().unwrap();
    let after = superblock(&rig.device.image());
    assert_eq!(after.ijournal(), None);
    let mut expected = superblock(&before);
    (expected.s_sequence, expected.s_head) = (after.s_sequence, after.s_head);
    expected.s_feature_incompat = after.s_feature_incompat;
    assert!(after.encode() == expected.encode(), "no trace of the nonce either");
    assert_eq!(sub_ids(&rig.open()), []);
}

#[test]
fn a_full_area_waits_for_a_commit_and_others_help_out() {
    let rig = rig();
    let journal = rig.open();
    let tid = change(&rig, &journal, 3, 1);
    let written = (0..).map_while(|value| fsync(&journal, 0, tid, value)).count();
    assert_eq!(written as u32, 2 * AREA_BLOCKS / 2);
    assert_eq!(journal.area_stats().unwrap().full, 1);
    journal.commit(tid).unwrap();
    let tid = change(&rig, &journal, 3, 2);
    assert!(fsync(&journal, 0, tid, 1).is_some());
}

#[test]
fn barriers_wait_for_nothing_and_become_durable_together() {
    let rig = rig();
    let journal = rig.open();
    let tid = change(&rig, &journal, 3, 1);
    fsync(&journal, 0, tid, 1).unwrap();
    let features = || superblock(&rig.device.image()).s_feature_incompat;
    assert!(!features().contains(Incompat::FJORD_BARRIERS), "none so far");
    assert_eq!(barrier(&journal, 0, tid, 2, false), Some((2, 1)));
    assert!(features().contains(Incompat::FJORD_BARRIERS));
    let flushes = journal.stats().flushes;
    assert_eq!(barrier(&journal, 1, tid, 3, false), Some((3, 2)));
    assert_eq!(barrier(&journal, 0, tid, 4, true), Some((4, 3)));
    assert_eq!((journal.last_barrier(), journal.durable_barrier()), (3, 0));
    assert_eq!(journal.stats().flushes, flushes, "no flush");
    fsync(&journal, 0, tid, 5).unwrap();
    assert_eq!((journal.last_barrier(), journal.durable_barrier()), (3, 3));
    assert_eq!(journal.stats().flushes, flushes + 2, "before the one that is held, and behind all");
    assert!(!journal.make_barriers_durable().unwrap());
    assert_eq!((journal.stats().barriers, journal.stats().barrier_rounds), (3, 1));
    journal.close().unwrap();
    let after = superblock(&rig.device.image());
    assert_eq!(after.ijournal(), None);
    assert!(!after.s_feature_incompat.contains(Incompat::FJORD_BARRIERS));
}

/// Failed once: the next barriers had the numbers of those that were missing.
#[test]
fn what_recovery_drops_stays_dropped() {
    let rig = rig();
    let journal = rig.open();
    let first = change(&rig, &journal, 3, 1);
    barrier(&journal, 0, first, 1, true).unwrap();
    barrier(&journal, 1, first, 2, false).unwrap();
    // The first one waits for a flush, so a crash has only the second.
    let device = Arc::new(Recorder::from_image(&rig.device.image()));
    journal.shutdown();
    let (journal, _) = rig.open_on(&device).unwrap();
    assert_eq!(sub_ids(&journal), []);
    journal.quiesce().unwrap();
    let second = change(&rig, &journal, 3, 3);
    assert!(second.newer_than(first));
    let (id, _) = barrier(&journal, 0, second, 3, false).unwrap();
    let device = Arc::new(Recorder::from_image(&device.image()));
    journal.shutdown();
    let (journal, _) = rig.open_on(&device).unwrap();
    assert_eq!(sub_ids(&journal), [id]);
}

#[test]
fn a_failed_barrier_stops_the_journal() {
    let rig = rig();
    let journal = rig.open();
    let tid = change(&rig, &journal, 3, 1);
    barrier(&journal, 0, tid, 2, false).unwrap();
    rig.device.faults().fail_range(Some(IoOp::Write), 0..u64::MAX, 5);
    let writer = journal.barrier_writer().unwrap().unwrap();
    let (_, transaction) = i_transaction(&writer, tid, 3);
    // The call may meet the failure of its own write, or leave it to the next one.
    let _ = writer.submit_barrier(0, transaction, false);
    drop(writer);
    assert!(journal.make_barriers_durable().is_err());
    assert!(journal.make_barriers_durable().is_err(), "also later");
    assert_eq!(journal.durable_barrier(), 0);
    assert!(journal.barrier_writer().is_err());
}

/// Cuts the power anywhere, also during the recovery from the first cut: what was promised and
/// is not committed is found, once, and nothing that is committed.
#[test]
fn power_cuts() {
    let seed = std::env::var("FJORD_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed: u64 = seed.unwrap_or_else(rand::random);
    println!("FJORD_SEED={seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    for round in 0..60 {
        let rig = rig();
        let start = rig.device.image();
        let from = rig.device.event_count();
        let journal = rig.open();
        // (events when it was promised, transaction, sub-transaction ID); a barrier is never promised.
        let mut promises: Vec<(usize, Tid, u64)> = Vec::new();
        let mut values = Vec::new();
        for value in 1..rng.random_range(2..25) {
            let tid = change(&rig, &journal, 3, value);
            values.push((tid, value));
            if rng.random_bool(0.5)
                && let Some((sub_id, _)) = barrier(
                    &journal,
                    rng.random_range(0..2),
                    tid,
                    value as u8,
                    rng.random_bool(0.2),
                )
            {
                promises.push((usize::MAX, tid, sub_id));
            }
            if rng.random_bool(0.5)
                && let Some(sub_id) = fsync(&journal, rng.random_range(0..2), tid, value as u8)
            {
                promises.push((rig.device.event_count() - from, tid, sub_id));
            }
            if rng.random_bool(0.3) {
                journal.commit(tid).unwrap();
            }
            if rng.random_bool(0.1) {
                journal.quiesce().unwrap();
                // A new use of the areas: their IDs go on, so they still are unique.
            }
        }
        let events = rig.device.events().split_off(from);
        for _ in 0..8 {
            let cut = rng.random_range(0..=events.len());
            let image = crash(&start, &events, cut, survival(&mut rng), &mut rng);
            let committed = committed_of(&rig, &image);
            let want: BTreeSet<u64> = promises
                .iter()
                .filter(|&&(when, tid, _)| when <= cut && tid.newer_than(committed))
                .map(|&(.., sub_id)| sub_id)
                .collect();
            recover(&rig, &image, &want, committed, &promises, &mut rng, round);
        }
    }
}

fn survival(rng: &mut StdRng) -> Survival {
    [Survival::All, Survival::None, Survival::Sectors, Survival::Requests][rng.random_range(0..4)]
}

fn committed_of(rig: &Rig, image: &[u8]) -> Tid {
    let device: Arc<dyn fjord_block::Device> = Arc::new(Recorder::from_image(image));
    fjord_journal::recovery::scan(&device, &rig.map, BLOCK_SIZE).unwrap().report().committed
}

/// Recovers, cutting the power again within, until a recovery ends.
fn recover(
    rig: &Rig,
    image: &[u8],
    want: &BTreeSet<u64>,
    committed: Tid,
    promises: &[(usize, Tid, u64)],
    rng: &mut StdRng,
    round: usize,
) {
    let device = Arc::new(Recorder::from_image(image));
    let (journal, report) = rig.open_on(&device).unwrap();
    assert_eq!(report.committed, committed, "round {round}");
    let found = journal.take_pending();
    let ids: BTreeSet<u64> = found.iter().map(|transaction| transaction.sub_id).collect();
    assert_eq!(ids.len(), found.len());
    assert!(want.is_subset(&ids), "round {round}: {want:?} in {ids:?}");
    // What comes behind a barrier is there only with it.
    let last = promises.iter().rposition(|&(.., id)| ids.contains(&id)).map_or(0, |last| last + 1);
    for &(when, tid, id) in &promises[..last] {
        let is_live_barrier = when == usize::MAX && tid.newer_than(committed);
        assert!(!is_live_barrier || ids.contains(&id), "round {round}: barrier {id} of {ids:?}");
    }
    for transaction in &found {
        // One that was under way may be there, but a committed one never.
        assert!(transaction.tid.newer_than(committed), "round {round}");
        assert!(promises.iter().any(|&(.., id)| id == transaction.sub_id), "round {round}");
    }
    if journal.is_recovering() && !found.is_empty() {
        let tid = change(rig, &journal, 5, 0xabcd);
        assert!(found.iter().all(|transaction| tid.at_least(transaction.tid)));
    }
    journal.quiesce().unwrap();
    assert_eq!(superblock(&device.image()).ijournal(), None);
    let events = device.events();
    for _ in 0..6 {
        let cut = rng.random_range(0..=events.len());
        let again = crash(image, &events, cut, survival(rng), rng);
        let device = Arc::new(Recorder::from_image(&again));
        let (journal, _) = rig.open_on(&device).unwrap();
        let second: BTreeSet<u64> =
            journal.take_pending().iter().map(|transaction| transaction.sub_id).collect();
        if found.is_empty() {
            assert!(second.is_empty());
            continue;
        }
        // All of them once more, or the recovery's own transaction.
        let applied = rig.value(&device.image(), 5) == 0xabcd;
        assert_eq!(second.is_empty(), applied, "round {round}, cut {cut}");
        assert!(second.is_empty() || second == ids, "round {round}, cut {cut}");
    }
}
