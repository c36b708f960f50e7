//! A device that records what a journal does, and the images that a power cut could leave.
//!
//! The crash model is that of `Device`: a write that completed before a flush was submitted is
//! durable once the flush completed; a write with FUA is durable when it completed; any subset
//! of the others may be there, also in parts of a sector's size.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use fjord_block::epoch::EpochDevice;
use fjord_block::{
    AlignedBuf, Buf, Capabilities, Class, Completer, Device, DeviceExt, Driver, MemDevice,
    MemImage, ReadTicket, Request, Ticket, TicketCore,
};
use fjord_format::jbd2::{ChecksumVersion, Incompat, Superblock};
use fjord_format::types::BlockNo;
use fjord_journal::{
    Buffer, BufferKind, Journal, JournalExtent, JournalMap, JournalOptions, PipelineMode,
};
use parking_lot::Mutex;
use rand::Rng;
use rand::rngs::StdRng;

/// Ends a test that would hang.
const PATIENCE: Duration = Duration::from_secs(120);

pub(crate) fn wait_until(what: &str, holds: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "never: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Tells that a thread has come to wait for data that is not there.
#[derive(Default)]
pub(crate) struct Awaited(AtomicBool);

impl Awaited {
    /// Data, what completes it, and this.
    pub(crate) fn pending() -> (Ticket, Completer, Arc<Awaited>) {
        let (ticket, completer) = Ticket::pending(None);
        let awaited = Arc::new(Awaited::default());
        completer.set_driver(awaited.clone());
        (ticket, completer, awaited)
    }

    pub(crate) fn is_awaited(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

impl Driver for Awaited {
    fn drive(&self, _: &Arc<TicketCore>) {
        self.0.store(true, Ordering::SeqCst);
    }

    fn start(&self, _: &Arc<TicketCore>) {}
}

/// A request that the device gets when a thread waits for it.
pub(crate) fn on_wait(device: Arc<Recorder>, request: Request) -> Ticket {
    let (ticket, completer) = Ticket::pending(None);
    // Its driver holds it until then, and it holds its driver.
    let driver = Arc::new(OnWait { device, request: Mutex::default() });
    completer.set_driver(driver.clone());
    *driver.request.lock() = Some((request, completer));
    ticket
}

struct OnWait {
    device: Arc<Recorder>,
    request: Mutex<Option<(Request, Completer)>>,
}

impl Driver for OnWait {
    fn drive(&self, _: &Arc<TicketCore>) {
        if let Some((request, completer)) = self.request.lock().take() {
            completer.complete(self.device.submit_one(request).wait());
        }
    }

    fn start(&self, _: &Arc<TicketCore>) {}
}

/// One request as it was submitted.
#[derive(Clone, Debug)]
pub(crate) enum Event {
    /// A write: offset in bytes, contents, whether it was durable by itself.
    Write(u64, Vec<u8>, bool),
    /// A flush.
    Flush,
}

/// A device with a volatile cache whose every request is recorded.
#[derive(Debug)]
pub(crate) struct Recorder {
    device: MemDevice,
    capabilities: Capabilities,
    /// In the order of submission; requests complete before `submit` returns.
    events: Mutex<Vec<Event>>,
}

impl Recorder {
    pub(crate) fn new(size_bytes: u64) -> Recorder {
        let device = MemDevice::new(size_bytes);
        let mut capabilities = device.capabilities().clone();
        capabilities.volatile_cache = true;
        Recorder { device, capabilities, events: Mutex::default() }
    }

    pub(crate) fn from_image(image: &[u8]) -> Recorder {
        let recorder = Recorder::new(image.len() as u64);
        recorder.device.write_all_at(0, image).unwrap();
        recorder
    }

    pub(crate) fn faults(&self) -> &fjord_block::FaultPlan {
        self.device.faults()
    }

    /// Number of requests so far.
    pub(crate) fn event_count(&self) -> usize {
        self.events.lock().len()
    }

    pub(crate) fn events(&self) -> Vec<Event> {
        self.events.lock().clone()
    }

    /// The whole contents, for another device.
    pub(crate) fn snapshot(&self) -> MemImage {
        self.device.snapshot()
    }

    /// The whole contents.
    pub(crate) fn image(&self) -> Vec<u8> {
        let mut image = vec![0; self.size_bytes() as usize];
        self.device.read_exact_at(0, &mut image).unwrap();
        image
    }
}

impl Device for Recorder {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn size_bytes(&self) -> u64 {
        self.device.size_bytes()
    }

    fn submit(&self, batch: Vec<Request>) -> Vec<Ticket> {
        // One lock over recording and doing, so that the record has the order of effects.
        let mut events = self.events.lock();
        for request in &batch {
            match request {
                Request::Write { offset, bufs, fua, .. } => {
                    events.push(Event::Write(*offset, flatten(bufs), *fua));
                }
                Request::Flush { .. } => events.push(Event::Flush),
                other => panic!("a journal has no use for {other:?}"),
            }
        }
        self.device.submit(batch)
    }

    fn submit_read(&self, offset: u64, bufs: Vec<AlignedBuf>, class: Class) -> ReadTicket {
        self.device.submit_read(offset, bufs, class)
    }
}

fn flatten(bufs: &[Buf]) -> Vec<u8> {
    bufs.iter().flat_map(|buf| buf.iter().copied()).collect()
}

/// The image that a power cut after `cut` requests leaves, if each write that is not durable
/// survives sector by sector as `keep` says.
pub(crate) fn crash_image(
    start: &[u8],
    events: &[Event],
    cut: usize,
    mut keep: impl FnMut(usize) -> bool,
) -> Vec<u8> {
    const SECTOR: usize = 512;
    let events = &events[..cut];
    let last_flush = events.iter().rposition(|event| matches!(event, Event::Flush));
    let mut image = start.to_vec();
    for (index, event) in events.iter().enumerate() {
        let Event::Write(offset, data, fua) = event else { continue };
        let durable = *fua || last_flush.is_some_and(|flush| index < flush);
        for (number, sector) in data.chunks(SECTOR).enumerate() {
            if durable || keep(index) {
                let at = *offset as usize + number * SECTOR;
                image[at..at + sector.len()].copy_from_slice(sector);
            }
        }
    }
    image
}

/// How the writes that are not durable survive.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Survival {
    All,
    None,
    /// Each sector by a coin.
    Sectors,
    /// Each request by a coin.
    Requests,
}

pub(crate) fn crash(
    start: &[u8],
    events: &[Event],
    cut: usize,
    how: Survival,
    rng: &mut StdRng,
) -> Vec<u8> {
    let whole: Vec<bool> = (0..cut).map(|_| rng.random()).collect();
    crash_image(start, events, cut, |index| match how {
        Survival::All => true,
        Survival::None => false,
        Survival::Sectors => rng.random(),
        Survival::Requests => whole[index],
    })
}

/// A journal of `blocks` blocks on a device of `device_blocks`, in two pieces.
pub(crate) struct Rig {
    pub(crate) device: Arc<Recorder>,
    pub(crate) map: JournalMap,
    pub(crate) block_size: usize,
    pub(crate) options: JournalOptions,
}

pub(crate) const JOURNAL_START: u64 = 100;

impl Rig {
    /// `first` shortens the log from the front, so that it wraps early.
    pub(crate) fn new(
        block_size: usize,
        checksum: ChecksumVersion,
        bit64: bool,
        log_blocks: u32,
    ) -> Rig {
        let maxlen = 1024u32;
        let extents = vec![
            JournalExtent { logical: 0, start: BlockNo(JOURNAL_START), len: 1000 },
            JournalExtent {
                logical: 1000,
                start: BlockNo(JOURNAL_START + 1100),
                len: maxlen - 1000,
            },
        ];
        let map = JournalMap::new(extents).unwrap();
        let device = Arc::new(Recorder::new(1300 * block_size as u64));
        let mut superblock = Superblock::new(block_size as u32, maxlen, *b"0123456789abcdef");
        superblock.set_checksum_version(checksum);
        superblock.s_feature_incompat.set(Incompat::BIT64, bit64);
        superblock.s_first = maxlen - log_blocks;
        let mut block = vec![0; block_size];
        block[..1024].copy_from_slice(&superblock.encode());
        device.device.write_all_at(JOURNAL_START * block_size as u64, &block).unwrap();
        let pipeline = match std::env::var("FJORD_PIPELINE").as_deref() {
            Ok("dual") => PipelineMode::Dual,
            _ => PipelineMode::Serial,
        };
        let options = JournalOptions { pipeline, ..JournalOptions::default() };
        Rig { device, map, block_size, options }
    }

    /// Gives the journal blocks behind the log, in two pieces.
    pub(crate) fn grow_behind_the_log(&mut self) {
        let mut extents = vec![
            JournalExtent { logical: 0, start: BlockNo(JOURNAL_START), len: 1000 },
            JournalExtent { logical: 1000, start: BlockNo(JOURNAL_START + 1100), len: 24 },
        ];
        extents.push(JournalExtent { logical: 1024, start: BlockNo(1230), len: 20 });
        extents.push(JournalExtent { logical: 1044, start: BlockNo(1260), len: 20 });
        self.map = JournalMap::new(extents).unwrap();
    }

    pub(crate) fn open(&self) -> Journal {
        self.open_on(&self.device).unwrap().0
    }

    /// Opens it without a scheduler in between.
    pub(crate) fn open_direct(&self) -> Journal {
        let device = self.device.clone();
        Journal::open(device, self.map.clone(), self.block_size, &self.options).unwrap().0
    }

    pub(crate) fn open_on(
        &self,
        device: &Arc<Recorder>,
    ) -> fjord_journal::Result<(Journal, fjord_journal::RecoveryReport)> {
        let device: Arc<dyn Device> = match std::env::var("FJORD_SCHEDULER").as_deref() {
            Ok("direct") => device.clone(),
            _ => Arc::new(EpochDevice::new(device.clone())),
        };
        Journal::open(device, self.map.clone(), self.block_size, &self.options)
    }

    pub(crate) fn buffer(&self, block: u64) -> Arc<Buffer> {
        let contents =
            self.device.read_buf(block * self.block_size as u64, self.block_size).unwrap();
        Buffer::new(BlockNo(block), contents.into(), BufferKind::Metadata)
    }

    /// First bytes of a block on an image.
    pub(crate) fn value(&self, image: &[u8], block: u64) -> u64 {
        let at = block as usize * self.block_size + 8;
        u64::from_be_bytes(image[at..at + 8].try_into().unwrap())
    }
}

/// Sets the value that [`Rig::value`] reads, and fills the rest so that torn copies show.
pub(crate) fn set_value(contents: &mut [u8], value: u64) {
    for word in contents.chunks_mut(8) {
        word.copy_from_slice(&value.to_be_bytes());
    }
}

/// Whether all of a block bears the same value; false for a torn one.
pub(crate) fn is_whole(contents: &[u8]) -> bool {
    contents.chunks(8).all(|word| word == &contents[8..16])
}
