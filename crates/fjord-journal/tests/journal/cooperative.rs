//! Commits and checkpoints that several threads carry out together: failures, and a thread that stands still.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use fjord_block::{
    AlignedBuf, Capabilities, Class, Device, FaultAction, FaultMatch, FaultRule, IoOp, ReadTicket,
    Request, Ticket,
};
use fjord_format::jbd2::{BlockHeader, BlockType, ChecksumVersion};
use fjord_format::types::Tid;
use fjord_journal::{Buffer, Journal, JournalIo};
use parking_lot::{Condvar, Mutex};

use crate::rig::{Recorder, Rig, set_value, wait_until};

const BLOCK_SIZE: usize = 1024;
const THREADS: usize = 4;
const BLOCKS: u64 = 9;

/// Descriptors of two blocks, so that a commit of nine has four pieces for others and one more.
fn rig(io: JournalIo) -> Rig {
    let mut rig = Rig::new(BLOCK_SIZE, ChecksumVersion::V3, true, 400);
    (rig.options.io, rig.options.descriptor_blocks_max) = (io, Some(2));
    if io == JournalIo::Dedicated {
        rig.options.pipeline = Default::default();
    }
    rig
}

fn change_all(journal: &Journal, buffers: &[Arc<Buffer>], value: u64) -> Tid {
    let handle = journal.start(buffers.len() as u32).unwrap();
    for buffer in buffers {
        set_value(&mut handle.get_write(buffer).unwrap(), value);
    }
    handle.stop()
}

/// All threads call at a time; what each is told.
fn together(call: impl Fn() -> fjord_journal::Result<()> + Sync) -> Vec<fjord_journal::Result<()>> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(&call)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn fail_write(device: &Recorder, skip_count: u64) {
    device.faults().add(FaultRule {
        matches: FaultMatch { op: Some(IoOp::Write), range: None },
        skip_count,
        hit_count_max: 1,
        action: FaultAction::Fail(5),
    });
}

/// The values after a restart of the journal, all the same.
fn recovered(rig: &Rig) -> Option<u64> {
    let left = Arc::new(Recorder::from_image(&rig.device.image()));
    // A log whose commit block came before a failed block is refused.
    let (journal, _) = rig.open_on(&left).ok()?;
    journal.close().unwrap();
    let image = left.image();
    let first = rig.value(&image, 0);
    assert!((0..BLOCKS).all(|block| rig.value(&image, block) == first), "a part of a commit");
    Some(first)
}

/// One write of a commit fails, each in turn: all threads are told, the journal stops, and what was committed before
/// is there.
#[test]
fn a_failed_write_of_a_commit_is_told_to_all() {
    for io in JournalIo::ALL {
        let mut failed = 0;
        for skip_count in 0.. {
            let rig = rig(io);
            let journal = rig.open();
            let buffers: Vec<_> = (0..BLOCKS).map(|block| rig.buffer(block)).collect();
            journal.commit(change_all(&journal, &buffers, 1)).unwrap();
            let tid = change_all(&journal, &buffers, 2);
            fail_write(&rig.device, skip_count);
            let told = together(|| journal.commit(tid));
            if rig.device.faults().hit_count() == 0 {
                assert!(told.iter().all(Result::is_ok), "{told:?}");
                break;
            }
            failed += 1;
            assert!(told.iter().all(Result::is_err), "{io:?}, write {skip_count}: {told:?}");
            assert!(journal.error().is_some() && journal.start(1).is_err());
            assert!(matches!(recovered(&rig), None | Some(1)), "{io:?}, write {skip_count}");
        }
        // Its pieces, and the commit block.
        assert!(failed >= 2, "{io:?}: {failed}");
    }
}

/// One write home fails, each in turn: all threads are told, and recovery has everything.
#[test]
fn a_failed_write_of_a_checkpoint_is_told_to_all() {
    for io in JournalIo::ALL {
        let mut failed = 0;
        for skip_count in 0.. {
            let rig = rig(io);
            let journal = rig.open();
            let buffers: Vec<_> = (0..BLOCKS).map(|block| rig.buffer(block)).collect();
            for value in 1..=3 {
                // Each commit has blocks of its own, and some that the next one has too.
                let own = if value == 3 { &buffers[..] } else { &buffers[3 * value - 3..] };
                journal.commit(change_all(&journal, own, value as u64)).unwrap();
            }
            fail_write(&rig.device, skip_count);
            let told = together(|| journal.checkpoint_all());
            if rig.device.faults().hit_count() == 0 {
                assert!(told.iter().all(Result::is_ok), "{told:?}");
                break;
            }
            failed += 1;
            assert!(told.iter().any(Result::is_err), "{io:?}, write {skip_count}: {told:?}");
            assert!(journal.error().is_some() && journal.start(1).is_err());
            assert_eq!(recovered(&rig), Some(3), "{io:?}, write {skip_count}");
        }
        assert!(failed >= 1, "{io:?}: {failed}");
    }
}

/// A device at which the thread that submits the second descriptor stands still until it may go on.
#[derive(Debug)]
struct Still {
    below: Arc<Recorder>,
    descriptors: AtomicUsize,
    may_go_on: Mutex<bool>,
    moved: Condvar,
}

impl Device for Still {
    fn capabilities(&self) -> &Capabilities {
        self.below.capabilities()
    }

    fn size_bytes(&self) -> u64 {
        self.below.size_bytes()
    }

    fn submit(&self, batch: Vec<Request>) -> Vec<Ticket> {
        let is_descriptor = |request: &Request| match request {
            Request::Write { bufs, .. } => BlockHeader::decode(&bufs[0])
                .is_some_and(|header| header.block_type == BlockType::Descriptor),
            _ => false,
        };
        if batch.iter().any(is_descriptor) && self.descriptors.fetch_add(1, Ordering::SeqCst) == 1 {
            let mut may_go_on = self.may_go_on.lock();
            while !*may_go_on {
                self.moved.wait(&mut may_go_on);
            }
        }
        self.below.submit(batch)
    }

    fn submit_read(&self, offset: u64, bufs: Vec<AlignedBuf>, class: Class) -> ReadTicket {
        self.below.submit_read(offset, bufs, class)
    }
}

/// A thread that has claimed a piece stands still: the other pieces are written, handles start and stop, and only
/// those that wait for this commit wait.
#[test]
fn a_thread_that_stands_still_holds_up_its_commit_only() {
    let rig = rig(JournalIo::Cooperative);
    let device = Arc::new(Still {
        below: rig.device.clone(),
        descriptors: AtomicUsize::new(0),
        may_go_on: Mutex::new(false),
        moved: Condvar::new(),
    });
    let opened = Journal::open(device.clone(), rig.map.clone(), BLOCK_SIZE, &rig.options);
    let (journal, _) = opened.unwrap();
    let buffers: Vec<_> = (0..BLOCKS).map(|block| rig.buffer(block)).collect();
    let tid = change_all(&journal, &buffers, 1);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..2).map(|_| scope.spawn(|| journal.commit(tid))).collect();
        // Of four pieces that are shared; the fifth comes after them.
        let all_shared = || device.descriptors.load(Ordering::SeqCst) == 4;
        wait_until("the other pieces are written", all_shared);
        change_all(&journal, &buffers, 2);
        assert!(!journal.is_committed(tid) && threads.iter().all(|thread| !thread.is_finished()));
        *device.may_go_on.lock() = true;
        device.moved.notify_all();
        threads.into_iter().for_each(|thread| thread.join().unwrap().unwrap());
    });
    assert!(journal.is_committed(tid));
    assert_eq!(recovered(&rig), Some(1));
    journal.close().unwrap();
    assert_eq!(rig.value(&rig.device.image(), 0), 2);
}
