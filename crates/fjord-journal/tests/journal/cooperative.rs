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

/// In each of both ways to write, each write of `call` fails in turn, which all threads make at a time; `before` comes
/// first. `check` sees what they were told, and the values after a restart. Returns the fewest writes that there were.
fn each_write_fails(
    before: impl Fn(&Journal, &[Arc<Buffer>]) -> Tid,
    call: impl Fn(&Journal, Tid) -> fjord_journal::Result<()> + Sync,
    check: impl Fn(&[fjord_journal::Result<()>], Option<u64>) -> bool,
) -> u64 {
    let writes = JournalIo::ALL.map(|io| {
        for skip_count in 0.. {
            let rig = rig(io);
            let journal = rig.open();
            let buffers: Vec<_> = (0..BLOCKS).map(|block| rig.buffer(block)).collect();
            let tid = before(&journal, &buffers);
            fail_write(&rig.device, skip_count);
            let told = together(|| call(&journal, tid));
            if rig.device.faults().hit_count() == 0 {
                assert!(told.iter().all(Result::is_ok), "{told:?}");
                return skip_count;
            }
            assert!(journal.error().is_some() && journal.start(1).is_err());
            let found = recovered(&rig);
            assert!(check(&told, found), "{io:?}, write {skip_count}: {told:?}, {found:?}");
        }
        unreachable!("a call has an end")
    });
    writes.into_iter().min().unwrap_or(0)
}

/// All threads are told, the journal stops, and what was committed before is there.
#[test]
fn a_failed_write_of_a_commit_is_told_to_all() {
    let writes = each_write_fails(
        |journal, buffers| {
            journal.commit(change_all(journal, buffers, 1)).unwrap();
            change_all(journal, buffers, 2)
        },
        |journal, tid| journal.commit(tid),
        |told, found| told.iter().all(Result::is_err) && matches!(found, None | Some(1)),
    );
    // Its pieces, and the commit block.
    assert!(writes >= 2, "{writes}");
}

/// A thread is told, and recovery has everything.
#[test]
fn a_failed_write_of_a_checkpoint_is_told() {
    let writes = each_write_fails(
        |journal, buffers| {
            for value in 1..=2 {
                // Each commit has blocks of its own, and some that the next one has too.
                let own = &buffers[3 * value - 3..];
                journal.commit(change_all(journal, own, value as u64)).unwrap();
            }
            let last = change_all(journal, buffers, 3);
            journal.commit(last).unwrap();
            last
        },
        |journal, _| journal.checkpoint_all(),
        |told, found| told.iter().any(Result::is_err) && found == Some(3),
    );
    assert!(writes >= 1, "{writes}");
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
