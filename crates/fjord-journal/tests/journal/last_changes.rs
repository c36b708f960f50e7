//! Changes that the file system adds before a full commit.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use fjord_block::Device;
use fjord_format::jbd2::ChecksumVersion;
use fjord_journal::{Buffer, Handle, JournalError, LastChanges, Part, recover};

use crate::parts::{self, OF_ALL};
use crate::rig::{Recorder, Rig, crash_image, set_value};

const BLOCK_SIZE: usize = 1024;
const LOG_BLOCKS: u32 = 64;

/// Sets a block to the number of the time at which it is added, if it is asked to.
struct Numbered {
    buffer: Arc<Buffer>,
    is_pending: AtomicBool,
    count: AtomicUsize,
}

impl Numbered {
    fn new(buffer: Arc<Buffer>) -> Arc<Numbered> {
        Arc::new(Numbered { buffer, is_pending: AtomicBool::new(false), count: 0.into() })
    }

    fn ask(&self) {
        self.is_pending.store(true, Ordering::Release);
    }
}

impl LastChanges for Numbered {
    fn are_pending(&self) -> bool {
        self.is_pending.load(Ordering::Acquire)
    }

    fn add(&self, handle: &Handle) -> fjord_journal::Result<()> {
        let number = self.count.fetch_add(1, Ordering::AcqRel) as u64 + 1;
        set_value(&mut handle.get_write(&self.buffer)?, number);
        self.is_pending.store(false, Ordering::Release);
        Ok(())
    }
}

/// They are in the commit that they were asked for in, also if nothing but a crash follows, and in no other.
#[test]
fn they_are_in_the_full_commit() {
    let rig = Rig::new(BLOCK_SIZE, ChecksumVersion::V3, true, LOG_BLOCKS);
    let start = rig.device.image();
    let journal = parts::open(&rig);
    let last = Numbered::new(rig.buffer(OF_ALL));
    journal.set_last_changes(last.clone()).unwrap();
    let written = [rig.buffer(1), rig.buffer(2)];
    let mut seen = Vec::new();
    for (round, asks) in [false, true, false, true].into_iter().enumerate() {
        for buffer in &written {
            let handle = journal.start(1).unwrap();
            set_value(&mut handle.get_write(buffer).unwrap(), round as u64 + 1);
            handle.stop();
        }
        if asks {
            last.ask();
        }
        journal.commit_running().unwrap();
        let events = rig.device.events();
        let cut =
            Arc::new(Recorder::from_image(&crash_image(&start, &events, events.len(), |_| false)));
        let device: Arc<dyn Device> = cut.clone();
        recover(&device, &rig.map, BLOCK_SIZE).unwrap();
        seen.push((rig.value(&cut.image(), 1), rig.value(&cut.image(), OF_ALL)));
    }
    assert_eq!(seen, [(1, 0), (2, 1), (3, 1), (4, 2)]);
    journal.close().unwrap();
}

/// A commit of some parts leaves them to the next full one.
#[test]
fn a_partial_commit_adds_none() {
    let rig = Rig::new(BLOCK_SIZE, ChecksumVersion::V3, true, LOG_BLOCKS);
    let journal = parts::open(&rig);
    let last = Numbered::new(rig.buffer(OF_ALL));
    journal.set_last_changes(last.clone()).unwrap();
    let buffers = [rig.buffer(1), rig.buffer(2)];
    let [tid, _] = buffers.each_ref().map(|buffer| {
        let handle = journal.start(1).unwrap();
        set_value(&mut handle.get_write(buffer).unwrap(), 7);
        handle.stop()
    });
    last.ask();
    journal.commit_parts(tid, &[Part(1)]).unwrap();
    assert_eq!(last.count.load(Ordering::Acquire), 0);
    journal.close().unwrap();
}

#[test]
fn they_are_set_once_and_before_the_first_transaction() {
    let rig = Rig::new(BLOCK_SIZE, ChecksumVersion::V3, true, LOG_BLOCKS);
    let last = Numbered::new(rig.buffer(OF_ALL));
    let journal = rig.open();
    journal.set_last_changes(last.clone()).unwrap();
    assert!(matches!(journal.set_last_changes(last.clone()), Err(JournalError::Usage(_))));
    let running = rig.open();
    let _handle = running.start(1).unwrap();
    assert!(matches!(running.set_last_changes(last), Err(JournalError::Usage(_))));
}
