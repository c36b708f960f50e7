//! A request of a commit fails, on a device that keeps epochs apart by itself, and the power goes
//! before the journal has done anything about it.

use std::sync::Arc;

use fjord_block::epoch::EpochDevice;
use fjord_block::{
    AlignedBuf, Capabilities, Class, Device, DeviceExt, FaultAction, FaultMatch, FaultRule, IoOp,
    MemDevice, ReadTicket, Request, Ticket,
};
use fjord_format::jbd2::ChecksumVersion;
use fjord_journal::{Buffer, Journal};
use parking_lot::Mutex;

use crate::rig::{Recorder, Rig, set_value};

const BLOCK_SIZE: usize = 1024;
const BLOCKS: [u64; 2] = [3, 7];

/// A device with native barriers and a cache that loses nothing. It keeps an image of itself after
/// every request, whole or failed.
#[derive(Debug)]
struct Moments {
    memory: MemDevice,
    capabilities: Capabilities,
    images: Mutex<Vec<Vec<u8>>>,
}

impl Moments {
    fn new(image: &[u8]) -> Moments {
        let memory = MemDevice::new(image.len() as u64);
        memory.write_all_at(0, image).unwrap();
        let capabilities = Capabilities {
            volatile_cache: true,
            native_barrier: true,
            ..memory.capabilities().clone()
        };
        Moments { memory, capabilities, images: Mutex::default() }
    }
}

impl Device for Moments {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn size_bytes(&self) -> u64 {
        self.memory.size_bytes()
    }

    fn submit(&self, batch: Vec<Request>) -> Vec<Ticket> {
        let submit = |request| {
            let ticket = self.memory.submit(vec![request]).remove(0);
            let mut image = vec![0; self.size_bytes() as usize];
            self.memory.read_exact_at(0, &mut image).unwrap();
            self.images.lock().push(image);
            ticket
        };
        batch.into_iter().map(submit).collect()
    }

    fn submit_read(&self, offset: u64, bufs: Vec<AlignedBuf>, class: Class) -> ReadTicket {
        self.memory.submit_read(offset, bufs, class)
    }
}

/// Gives all blocks the value, in one transaction.
fn commit(journal: &Journal, buffers: &[Arc<Buffer>], value: u64) -> fjord_journal::Result<()> {
    let handle = journal.start(buffers.len() as u32)?;
    for buffer in buffers {
        set_value(&mut handle.get_write(buffer)?, value);
    }
    journal.commit(handle.stop())
}

/// What the moments of a run were, after recovery.
#[derive(Debug, Default, PartialEq, Eq)]
struct Seen {
    old_count: usize,
    new_count: usize,
    /// Recovery refused the log: e2fsck has to look at it.
    refused_count: usize,
    /// Recovery took for whole what was not.
    wrong_count: usize,
}

/// `before` commits and one more; the `skip_count`-th write of the last one loses all but its first
/// `keep_blocks` blocks. None when there is no such write.
fn run(checksum: ChecksumVersion, before: u64, skip_count: u64, keep_blocks: u64) -> Option<Seen> {
    let rig = Rig::new(BLOCK_SIZE, checksum, true, 64);
    let device = Arc::new(Moments::new(&rig.device.image()));
    let scheduler = Arc::new(EpochDevice::new(device.clone()));
    let opened = Journal::open(scheduler, rig.map.clone(), BLOCK_SIZE, &rig.options);
    let (journal, _) = opened.unwrap();
    let buffers = BLOCKS.map(|block| rig.buffer(block));
    (1..=before).for_each(|value| commit(&journal, &buffers, value).unwrap());
    device.images.lock().clear();
    let faults = device.memory.faults();
    faults.add(FaultRule {
        matches: FaultMatch { op: Some(IoOp::Write), range: None },
        skip_count,
        hit_count_max: 1,
        action: FaultAction::Torn { keep_bytes: keep_blocks * BLOCK_SIZE as u64, errno: 5 },
    });
    let outcome = commit(&journal, &buffers, before + 1);
    if faults.hit_count() == 0 {
        outcome.unwrap();
        return None;
    }
    outcome.unwrap_err();
    let mut seen = Seen::default();
    for image in device.images.lock().iter() {
        let left = Arc::new(Recorder::from_image(image));
        if rig.open_on(&left).is_err() {
            seen.refused_count += 1;
            continue;
        }
        let image = left.image();
        let [first, second] = BLOCKS.map(|block| rig.value(&image, block));
        match first.checked_sub(before).filter(|_| first == second) {
            Some(0) => seen.old_count += 1,
            Some(1) => seen.new_count += 1,
            _ => seen.wrong_count += 1,
        }
    }
    Some(seen)
}

fn runs(checksum: ChecksumVersion, before: u64) -> Seen {
    let mut sum = Seen::default();
    for keep_blocks in 0..4 {
        for seen in (0..).map_while(|skip_count| run(checksum, before, skip_count, keep_blocks)) {
            sum.old_count += seen.old_count;
            sum.new_count += seen.new_count;
            sum.refused_count += seen.refused_count;
            sum.wrong_count += seen.wrong_count;
        }
    }
    println!("{checksum:?}, {before} commits before: {sum:?}");
    sum
}

/// Nothing tells a whole transaction from one whose block was not written: the commit block must
/// not be with the device before the others are.
#[test]
fn a_log_without_checksums_has_no_commit_block_before_its_blocks_are_written() {
    for before in [0, 1] {
        let seen = runs(ChecksumVersion::None, before);
        assert_eq!((seen.wrong_count, seen.refused_count), (0, 0), "{seen:?}");
        assert!(seen.old_count > 0, "{seen:?}");
    }
}

/// With checksums the commit block may be there by then; such a log is refused, and none of it
/// goes home, until the journal has taken the commit block back.
#[test]
fn a_log_with_checksums_is_refused_until_the_commit_is_taken_back() {
    for before in [0, 1] {
        let seen = runs(ChecksumVersion::V3, before);
        assert_eq!(seen.wrong_count, 0, "{seen:?}");
        assert!(seen.refused_count > 0 && seen.old_count > 0, "{seen:?}");
    }
}
