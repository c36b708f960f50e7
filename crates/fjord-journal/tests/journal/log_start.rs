//! The first commit writes the start of the log: beside its log blocks, before its commit block.

use std::sync::Arc;

use fjord_block::epoch::EpochDevice;
use fjord_block::{
    AlignedBuf, Capabilities, Class, Device, DeviceExt, FaultAction, FaultMatch, FaultRule, IoOp,
    ReadTicket, Request, Ticket,
};
use fjord_format::jbd2::{BlockHeader, BlockType, ChecksumVersion, SUPERBLOCK_BYTES, Superblock};
use fjord_journal::Journal;
use parking_lot::Mutex;

use crate::rig::{JOURNAL_START, Recorder, Rig, on_wait, set_value};

const BLOCK_SIZE: usize = 1024;
const BLOCK: u64 = 7;
const SUPERBLOCK_OFFSET: u64 = JOURNAL_START * BLOCK_SIZE as u64;

/// A device that does a write of the journal superblock when a thread waits for it.
#[derive(Debug)]
struct Lazy {
    device: Arc<Recorder>,
    start: Mutex<Option<Ticket>>,
    /// At each write of log blocks and of commit blocks: whether the superblock was written.
    seen: Mutex<Vec<(BlockType, bool)>>,
}

impl Lazy {
    fn submit_one(&self, request: Request) -> Ticket {
        let Request::Write { offset, bufs, fua, .. } = &request else {
            return self.device.submit_one(request);
        };
        if let Some(header) = BlockHeader::decode(&bufs[0]).filter(|_| *offset > SUPERBLOCK_OFFSET)
        {
            let is_written = self.start.lock().as_ref().map(Ticket::is_done);
            self.seen.lock().extend(is_written.map(|is_written| (header.block_type, is_written)));
        }
        if *offset != SUPERBLOCK_OFFSET || *fua {
            return self.device.submit_one(request);
        }
        let ticket = on_wait(self.device.clone(), request);
        *self.start.lock() = Some(ticket.clone());
        ticket
    }
}

impl Device for Lazy {
    fn capabilities(&self) -> &Capabilities {
        self.device.capabilities()
    }

    fn size_bytes(&self) -> u64 {
        self.device.size_bytes()
    }

    fn submit(&self, batch: Vec<Request>) -> Vec<Ticket> {
        batch.into_iter().map(|request| self.submit_one(request)).collect()
    }

    fn submit_read(&self, offset: u64, bufs: Vec<AlignedBuf>, class: Class) -> ReadTicket {
        self.device.submit_read(offset, bufs, class)
    }
}

fn superblock(image: &[u8]) -> Superblock {
    let at = SUPERBLOCK_OFFSET as usize;
    Superblock::decode(&image[at..at + SUPERBLOCK_BYTES]).unwrap()
}

fn commit(journal: &Journal, rig: &Rig, value: u64) -> fjord_journal::Result<()> {
    let handle = journal.start(1)?;
    set_value(&mut handle.get_write(&rig.buffer(BLOCK))?, value);
    journal.commit(handle.stop())
}

#[test]
fn it_is_written_beside_the_log_blocks_and_before_the_commit_block() {
    let rig = Rig::new(BLOCK_SIZE, ChecksumVersion::V3, true, 64);
    let device = Arc::new(Lazy {
        device: rig.device.clone(),
        start: Mutex::default(),
        seen: Mutex::default(),
    });
    let opened = Journal::open(device.clone(), rig.map.clone(), BLOCK_SIZE, &rig.options);
    let (journal, _) = opened.unwrap();
    assert_eq!(superblock(&rig.device.image()).s_start, 0);
    commit(&journal, &rig, 1).unwrap();
    assert_ne!(superblock(&rig.device.image()).s_start, 0);
    let seen = device.seen.lock().clone();
    assert_eq!(seen, [(BlockType::Descriptor, false), (BlockType::Commit, true)]);
}

/// With each scheduler: the commit fails, and so do all behind it; a power cut then leaves what was.
#[test]
fn a_failed_write_of_it_fails_the_commits() {
    for ordered in [false, true] {
        let rig = Rig::new(BLOCK_SIZE, ChecksumVersion::V3, true, 64);
        let device: Arc<dyn Device> = match ordered {
            true => Arc::new(EpochDevice::new(rig.device.clone())),
            false => rig.device.clone(),
        };
        let opened = Journal::open(device, rig.map.clone(), BLOCK_SIZE, &rig.options);
        let (journal, _) = opened.unwrap();
        rig.device.faults().add(FaultRule {
            matches: FaultMatch {
                op: Some(IoOp::Write),
                range: Some(SUPERBLOCK_OFFSET..SUPERBLOCK_OFFSET + BLOCK_SIZE as u64),
            },
            skip_count: 0,
            hit_count_max: 1,
            action: FaultAction::Fail(5),
        });
        commit(&journal, &rig, 1).unwrap_err();
        commit(&journal, &rig, 2).unwrap_err();
        assert_eq!(rig.device.faults().hit_count(), 1);
        let left = Arc::new(Recorder::from_image(&rig.device.image()));
        let (_, report) = rig.open_on(&left).unwrap();
        assert_eq!((report.transactions, report.errno), (0, Some(-5)));
        assert_eq!(rig.value(&left.image(), BLOCK), 0);
    }
}
