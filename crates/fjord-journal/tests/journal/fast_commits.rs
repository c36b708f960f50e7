//! Fast commits beside full ones.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fjord_block::{AlignedBuf, Capabilities, Class, Device, ReadTicket, Request, Ticket};
use fjord_format::InodeNo;
use fjord_format::jbd2::fast_commit::Record;
use fjord_format::jbd2::fast_commit::compat::BlockUse;
use fjord_format::jbd2::{ChecksumVersion, MIN_JOURNAL_BLOCKS, SUPERBLOCK_BYTES, Superblock};
use fjord_format::types::{BlockNo, Tid};
use fjord_journal::{
    DataNeeds, FastCommitOutcome, FastCommitRequest, Journal, JournalExtent, JournalMap,
    JournalOptions,
};

use crate::rig::{JOURNAL_START, Recorder, Rig, set_value};

/// A device whose flushes take a while, so that others queue up behind a commit.
#[derive(Debug)]
struct SlowFlush(Arc<Recorder>);

impl Device for SlowFlush {
    fn capabilities(&self) -> &Capabilities {
        self.0.capabilities()
    }

    fn size_bytes(&self) -> u64 {
        self.0.size_bytes()
    }

    fn submit(&self, batch: Vec<Request>) -> Vec<Ticket> {
        if batch.iter().any(|request| matches!(request, Request::Flush { .. })) {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.0.submit(batch)
    }

    fn submit_read(&self, offset: u64, bufs: Vec<AlignedBuf>, class: Class) -> ReadTicket {
        self.0.submit_read(offset, bufs, class)
    }
}

/// First of a thousand blocks behind the journal.
const HOME: u64 = 2000;

/// A journal with an area for fast commits behind a log of the least length that there can be.
fn rig_with_area() -> Rig {
    const AREA_BLOCKS: u32 = 64;
    const BLOCK_SIZE: usize = 1024;
    let maxlen = MIN_JOURNAL_BLOCKS + AREA_BLOCKS;
    let extent = JournalExtent { logical: 0, start: BlockNo(JOURNAL_START), len: maxlen };
    let map = JournalMap::new(vec![extent]).unwrap();
    let mut superblock = Superblock::new(BLOCK_SIZE as u32, maxlen, *b"0123456789abcdef");
    superblock.set_checksum_version(ChecksumVersion::V3);
    superblock.s_num_fc_blks = AREA_BLOCKS;
    let mut image = vec![0; (HOME as usize + 1000) * BLOCK_SIZE];
    let at = JOURNAL_START as usize * BLOCK_SIZE;
    image[at..at + SUPERBLOCK_BYTES].copy_from_slice(&superblock.encode());
    let device = Arc::new(Recorder::from_image(&image));
    let options = JournalOptions { fast_commit: true, bit64: true, ..JournalOptions::default() };
    Rig { device, map, block_size: BLOCK_SIZE, options }
}

/// Changes a block under a handle and gives the handle's transaction.
fn change(journal: &Journal, rig: &Rig, block: u64) -> Tid {
    let buffer = journal.live_buffer(BlockNo(block));
    let buffer = buffer.unwrap_or_else(|| rig.buffer(block));
    let handle = journal.start(1).unwrap();
    set_value(&mut handle.get_write(&buffer).unwrap(), block);
    handle.stop()
}

/// Logs an inode by a fast commit.
fn fast_commit(journal: &Journal, tid: Tid) -> FastCommitOutcome {
    let ticket = journal.queue_fast_commit(FastCommitRequest {
        tid,
        records: vec![Record::Inode { ino: InodeNo(12), bytes: vec![1; 128] }],
        data: DataNeeds::FlushBefore,
        blocks: BlockUse { owner: 12, adds_blocks: false, allocates: false },
        needs_empty_log: false,
    });
    journal.wait_fast_commit(ticket.unwrap()).unwrap()
}

/// What applies fast commits may be larger than any other transaction; it must not go on at the front of
/// the log, where no recovery looks once the fast commits do not count.
#[test]
fn a_long_replay_of_fast_commits_stays_in_one_piece() {
    const REPLAYED: u64 = 500;
    for commits in [1, 100, 170, 210, 250, 300] {
        let rig = rig_with_area();
        let journal = rig.open_direct();
        for _ in 0..commits {
            let tid = change(&journal, &rig, 20);
            journal.commit(tid).unwrap();
        }
        let tid = change(&journal, &rig, 20);
        assert_eq!(fast_commit(&journal, tid), FastCommitOutcome::Logged { blocks: 1 });
        journal.shutdown();
        let (journal, report) = rig.open_on(&rig.device).unwrap();
        assert_eq!(report.fast_commit_records.len(), 1, "behind {commits} commits");
        journal.whole_log(true);
        for number in 0..REPLAYED {
            change(&journal, &rig, HOME + number);
        }
        journal.whole_log(false);
        journal.commit_running().unwrap();
        journal.shutdown();
        let device: Arc<dyn Device> = rig.device.clone();
        let report = fjord_journal::recover(&device, &rig.map, rig.block_size).unwrap();
        let replayed = (report.transactions, report.replayed_blocks as u64);
        assert_eq!(replayed, (1, REPLAYED), "behind {commits} commits: {report:?}");
    }
}

/// Threads that commit in turn always wait for one another, so that fast commits, which let commits
/// go first, would never have their turn; the commits that pass them do what they wait for.
#[test]
fn fast_commits_are_served_by_the_commits_that_pass_them() {
    // Two or three, and more on a busy machine, where a thread that is woken runs late. A thread that
    // starves sees hundreds.
    const COMMITS_MAX: u64 = 50;
    let rig = rig_with_area();
    let device = Arc::new(SlowFlush(rig.device.clone()));
    let (journal, _) = Journal::open(device, rig.map.clone(), 1024, &rig.options).unwrap();
    assert!(journal.fast_commit_blocks() > 0);
    let done = AtomicBool::new(false);
    let passed = std::thread::scope(|scope| {
        for thread in 0..8 {
            let (journal, rig, done) = (&journal, &rig, &done);
            scope.spawn(move || {
                // Bounded, so that starvation fails the test instead of hanging it.
                for _ in 0..400 {
                    if done.load(Ordering::Relaxed) {
                        return;
                    }
                    let tid = change(journal, rig, 10 + thread);
                    journal.commit(tid).unwrap();
                }
            });
        }
        let mut passed = Vec::new();
        for _ in 0..20 {
            let tid = change(&journal, &rig, 20);
            let before = journal.stats().commits;
            let outcome = fast_commit(&journal, tid);
            assert!(matches!(
                outcome,
                FastCommitOutcome::Logged { .. } | FastCommitOutcome::Committed
            ));
            passed.push(journal.stats().commits - before);
        }
        done.store(true, Ordering::Relaxed);
        passed
    });
    let most = passed.iter().max().copied().unwrap_or(0);
    assert!(most <= COMMITS_MAX, "commits that passed each of them: {passed:?}");
}
