//! A device with a volatile cache that knows what is durable.
//!
//! The weakest one that [`Device`] allows. A request is done when a thread waits for it, no earlier.
//! A flush makes durable what was done when it was submitted; if the device keeps order, also all
//! ordered writes that were submitted before. What is not durable is taken for lost.

use std::collections::BTreeMap;
use std::sync::Arc;

use fjord_block::lock::{Mutex, Rank};
use fjord_block::{
    AlignedBuf, Buf, Capabilities, Class, Completer, Device, Driver, IoError, IoOp, IoResult,
    Order, ReadTicket, Request, Ticket, TicketCore,
};
use fjord_format::jbd2::{BlockHeader, BlockType, ChecksumVersion, SUPERBLOCK_BYTES, Superblock};

/// Bytes of a block.
pub(crate) const BLOCK_SIZE: usize = 1024;
/// Blocks of the device; the journal is at its end.
const DEVICE_BLOCKS: u64 = JOURNAL_START + JOURNAL_BLOCKS as u64;
/// First block of the journal.
pub(crate) const JOURNAL_START: u64 = 100;
/// Blocks of the journal.
pub(crate) const JOURNAL_BLOCKS: u32 = 1024;
/// Byte offset of the journal superblock.
const SUPERBLOCK_OFFSET: u64 = JOURNAL_START * BLOCK_SIZE as u64;
/// Sequence, and transaction, of the first commit.
pub(crate) const FIRST: u32 = 2;
const EIO: i32 = 5;

/// The request that fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The superblock with the start of the log.
    LogStart,
    /// The log blocks of the commit with this sequence.
    Body(u32),
    /// Its commit block.
    CommitBlock(u32),
    /// The home location of this block.
    Home(u64),
    /// The flush of this number, counted from 0; all later ones fail too.
    Flush(usize),
}

/// What may not be durable yet when the log blocks of a commit arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bound {
    /// The commit blocks of at most so many older commits.
    CommitBlocks(usize),
    /// Of older commits, nothing but commit blocks.
    NoLogBlocks,
}

/// Contents of a block that a test wrote: its number and a value, in every word.
pub(crate) fn contents(block: u64, value: u32) -> Vec<u8> {
    let word = (block << 32) | u64::from(value);
    word.to_be_bytes().repeat(BLOCK_SIZE / 8)
}

/// Block and value that [`contents`] put there.
fn read_contents(bytes: &[u8]) -> Option<(u64, u32)> {
    let word = u64::from_be_bytes(bytes[..8].try_into().ok()?);
    (contents(word >> 32, word as u32) == bytes).then_some((word >> 32, word as u32))
}

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct ModelDevice {
    capabilities: Capabilities,
    shared: Arc<Shared>,
}

struct Shared {
    keeps_order: bool,
    bound: Bound,
    fault: Option<Fault>,
    state: Mutex<State>,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ModelDevice(keeps_order {}, fault {:?})", self.keeps_order, self.fault)
    }
}

#[derive(Default)]
struct State {
    /// All requests, in the order of their submission.
    requests: Vec<Sent>,
    /// Epochs that barriers have ended.
    epoch: usize,
    flush_count: usize,
    has_failed_flush: bool,
    /// A write of a device that keeps order has failed: the number of its request.
    failed_write: Option<usize>,
}

struct Sent {
    what: What,
    completer: Option<Completer>,
    /// None until it is done.
    result: Option<IoResult>,
}

enum What {
    Write { offset: u64, bytes: Vec<u8>, epoch: Option<usize>, fua: bool, durable: bool },
    Flush { covers: Vec<usize>, number: usize, only_completed: bool },
}

impl Sent {
    fn is_durable(&self) -> bool {
        matches!(self.what, What::Write { durable: true, .. })
    }
}

/// Has a request done by the thread that waits for it.
struct Drive {
    shared: Arc<Shared>,
    number: usize,
}

impl Driver for Drive {
    fn drive(&self, _: &Arc<TicketCore>) {
        self.shared.finish(self.number);
    }

    /// The device takes its time.
    fn start(&self, _: &Arc<TicketCore>) {}
}

impl Shared {
    fn submit(self: &Arc<Self>, batch: Vec<Request>, only_completed: bool) -> Vec<Ticket> {
        let mut state = self.state.lock();
        let add = |request| {
            let number = state.requests.len();
            let (ticket, completer) = Ticket::pending(None);
            completer.set_driver(Arc::new(Drive { shared: self.clone(), number }));
            let what = match request {
                Request::Write { offset, bufs, order, fua, .. } => {
                    let bytes: Vec<u8> = bufs.iter().flat_map(|buf| buf.iter().copied()).collect();
                    self.check_bound(&state, &bytes);
                    check_overlap(&state, offset, bytes.len());
                    let epoch = (order != Order::Orderless).then_some(state.epoch);
                    state.epoch += usize::from(order == Order::Barrier);
                    What::Write { offset, bytes, epoch, fua, durable: false }
                }
                Request::Flush { .. } => {
                    state.flush_count += 1;
                    let covers = self.covered(&state, only_completed);
                    What::Flush { covers, number: state.flush_count - 1, only_completed }
                }
                other => panic!("a journal has no use for {other:?}"),
            };
            state.requests.push(Sent { what, completer: Some(completer), result: None });
            ticket
        };
        batch.into_iter().map(add).collect()
    }

    /// How many commits may be in flight.
    fn check_bound(&self, state: &State, bytes: &[u8]) {
        let Some((false, own)) = log_block(bytes) else { return };
        let lost = |commit_block: bool| {
            let is_lost = |sent: &&Sent| match &sent.what {
                What::Write { bytes, durable: false, .. } => {
                    log_block(bytes).is_some_and(|(is_commit_block, sequence)| {
                        is_commit_block == commit_block && sequence != own
                    })
                }
                _ => false,
            };
            state.requests.iter().filter(is_lost).count()
        };
        match self.bound {
            Bound::CommitBlocks(max) => assert!(lost(true) <= max, "{} in flight", lost(true)),
            Bound::NoLogBlocks => assert_eq!(lost(false), 0, "commits that no flush covers"),
        }
    }

    /// The writes that a flush makes durable.
    fn covered(&self, state: &State, only_completed: bool) -> Vec<usize> {
        let waits_for_order = self.keeps_order && !only_completed;
        let is_covered = |sent: &Sent| match &sent.what {
            What::Write { epoch, .. } => {
                sent.result == Some(Ok(()))
                    || waits_for_order && epoch.is_some() && sent.result.is_none()
            }
            What::Flush { .. } => false,
        };
        let numbers = 0..state.requests.len();
        numbers.filter(|&number| is_covered(&state.requests[number])).collect()
    }

    /// Does a request, and what its order needs.
    fn finish(&self, number: usize) {
        let mut told = Vec::new();
        let mut state = self.state.lock();
        self.run(&mut state, number, &mut told);
        drop(state);
        for (completer, result) in told {
            completer.complete(result);
        }
    }

    fn run(&self, state: &mut State, number: usize, told: &mut Vec<(Completer, IoResult)>) {
        if state.requests[number].result.is_some() {
            return;
        }
        // Before anything else: what it does may come back here.
        state.requests[number].result = Some(Ok(()));
        let result = match &state.requests[number].what {
            What::Flush { covers, number, only_completed } => {
                let (covers, number, only_completed) = (covers.clone(), *number, *only_completed);
                self.flush(state, &covers, number, only_completed, told)
            }
            What::Write { epoch, fua, .. } => {
                let (epoch, fua) = (*epoch, *fua);
                self.write(state, number, epoch, fua, told)
            }
        };
        let sent = &mut state.requests[number];
        sent.result = Some(result.clone());
        told.extend(sent.completer.take().map(|completer| (completer, result)));
    }

    fn flush(
        &self,
        state: &mut State,
        covers: &[usize],
        number: usize,
        only_completed: bool,
        told: &mut Vec<(Completer, IoResult)>,
    ) -> IoResult {
        covers.iter().for_each(|&write| self.run(state, write, told));
        state.has_failed_flush |= self.fault == Some(Fault::Flush(number));
        let order_is_broken = state.failed_write.is_some() && !only_completed;
        if state.has_failed_flush || order_is_broken {
            return Err(IoError::os(EIO, IoOp::Flush, 0, 0));
        }
        covers.iter().for_each(|&write| make_durable(state, write));
        Ok(())
    }

    fn write(
        &self,
        state: &mut State,
        number: usize,
        epoch: Option<usize>,
        fua: bool,
        told: &mut Vec<(Completer, IoResult)>,
    ) -> IoResult {
        let ordered = epoch.filter(|_| self.keeps_order);
        let older: Vec<usize> = match ordered {
            // Its epochs come first.
            Some(epoch) => (0..number).filter(|&at| is_older(&state.requests[at], epoch)).collect(),
            None => Vec::new(),
        };
        older.iter().for_each(|&write| self.run(state, write, told));
        let What::Write { offset, bytes, .. } = &state.requests[number].what else { return Ok(()) };
        let (offset, len) = (*offset, bytes.len() as u64);
        let stopped = ordered.is_some() && state.failed_write.is_some_and(|failed| failed < number);
        let starts_log = offset == SUPERBLOCK_OFFSET && !fua;
        if stopped || self.fails(offset, bytes) || starts_log && self.fault == Some(Fault::LogStart)
        {
            if ordered.is_some() && !stopped {
                state.failed_write = Some(number);
            }
            return Err(IoError::os(EIO, IoOp::Write, offset, len));
        }
        if fua {
            older.iter().for_each(|&write| make_durable(state, write));
            make_durable(state, number);
        }
        Ok(())
    }

    fn fails(&self, offset: u64, bytes: &[u8]) -> bool {
        match (log_block(bytes), self.fault) {
            (Some((true, sequence)), Some(Fault::CommitBlock(at))) => at == sequence,
            (Some((false, sequence)), Some(Fault::Body(at))) => at == sequence,
            (None, Some(Fault::Home(block))) => offset == block * BLOCK_SIZE as u64,
            _ => false,
        }
    }
}

/// Whether a write begins with a commit block, or with others of a commit, and of which sequence.
fn log_block(bytes: &[u8]) -> Option<(bool, u32)> {
    let header = BlockHeader::decode(bytes)?;
    match header.block_type {
        BlockType::Commit => Some((true, header.sequence.0)),
        BlockType::Descriptor | BlockType::Revoke => Some((false, header.sequence.0)),
        _ => None,
    }
}

/// The outcome of two writes of one block is undefined while both are in flight. In the log the
/// journal leaves their order to a device that keeps it.
fn check_overlap(state: &State, offset: u64, len: usize) {
    let end = offset + len as u64;
    let overlaps = |sent: &Sent| match &sent.what {
        What::Write { offset: other, bytes, .. } => {
            sent.result.is_none() && *other < end && offset < other + bytes.len() as u64
        }
        What::Flush { .. } => false,
    };
    let is_log = offset > SUPERBLOCK_OFFSET;
    assert!(is_log || !state.requests.iter().any(overlaps), "two writes of a block in flight");
}

fn is_older(sent: &Sent, epoch: usize) -> bool {
    matches!(sent.what, What::Write { epoch: Some(of), .. } if of < epoch)
}

fn make_durable(state: &mut State, number: usize) {
    let sent = &mut state.requests[number];
    if let (Some(Ok(())), What::Write { durable, .. }) = (&sent.result, &mut sent.what) {
        *durable = true;
    }
}

impl ModelDevice {
    /// A device with an empty journal.
    pub(crate) fn new(keeps_order: bool, bound: Bound, fault: Option<Fault>) -> ModelDevice {
        let capabilities = Capabilities {
            volatile_cache: true,
            fua: true,
            native_barrier: false,
            discard: false,
            queue_depth: 8,
            logical_block_size: 512,
            read_only: false,
        };
        let state = Mutex::new(Rank::SimDevice, State::default());
        let shared = Arc::new(Shared { keeps_order, bound, fault, state });
        let device = ModelDevice { capabilities, shared };
        let mut superblock =
            Superblock::new(BLOCK_SIZE as u32, JOURNAL_BLOCKS, *b"0123456789abcdef");
        superblock.set_checksum_version(ChecksumVersion::V3);
        let mut block = vec![0; BLOCK_SIZE];
        block[..SUPERBLOCK_BYTES].copy_from_slice(&superblock.encode());
        device.put(JOURNAL_START, block);
        device
    }

    /// Writes a block, durably.
    fn put(&self, block: u64, bytes: Vec<u8>) {
        let offset = block * BLOCK_SIZE as u64;
        let what = What::Write { offset, bytes, epoch: None, fua: true, durable: true };
        let done = Sent { what, completer: None, result: Some(Ok(())) };
        self.shared.state.lock().requests.push(done);
    }

    /// Blocks of the device as its writes that `wanted` selects left them.
    fn blocks(&self, wanted: impl Fn(&Sent) -> bool) -> BTreeMap<u64, Vec<u8>> {
        let mut blocks = BTreeMap::new();
        for sent in self.shared.state.lock().requests.iter().filter(|sent| wanted(sent)) {
            let What::Write { offset, bytes, .. } = &sent.what else { continue };
            for (block, bytes) in (offset / BLOCK_SIZE as u64..).zip(bytes.chunks(BLOCK_SIZE)) {
                blocks.insert(block, bytes.to_vec());
            }
        }
        blocks
    }

    /// The value of each block after a power cut now and recovery. Only for logs that never wrapped;
    /// revokes do not matter here.
    pub(crate) fn recovered(&self) -> BTreeMap<u64, u32> {
        let blocks = self.blocks(Sent::is_durable);
        let home = blocks.range(..JOURNAL_START);
        let mut found: BTreeMap<u64, u32> =
            home.filter_map(|(_, bytes)| read_contents(bytes)).collect();
        let superblock = Superblock::decode(&blocks[&JOURNAL_START]).expect("a superblock");
        let mut sequence = superblock.s_sequence.0;
        let mut at = JOURNAL_START + u64::from(superblock.s_start);
        if superblock.s_start == 0 {
            return found;
        }
        while let Some((next, values)) = read_transaction(&blocks, at, sequence) {
            found.extend(values);
            (at, sequence) = (next, sequence.wrapping_add(1));
        }
        found
    }

    /// The value of a block at its home location: what a power cut leaves, or what a read sees now.
    pub(crate) fn at_home(&self, block: u64, durable: bool) -> Option<u32> {
        let blocks = self.blocks(|sent| match durable {
            true => sent.is_durable(),
            false => sent.result == Some(Ok(())),
        });
        blocks.get(&block).and_then(|bytes| read_contents(bytes)).map(|(_, value)| value)
    }
}

/// The transaction that begins at device block `at`, if it is complete: where the next one begins,
/// and the values that it has.
fn read_transaction(
    blocks: &BTreeMap<u64, Vec<u8>>,
    mut at: u64,
    sequence: u32,
) -> Option<(u64, Vec<(u64, u32)>)> {
    let mut values = Vec::new();
    loop {
        let bytes = blocks.get(&at)?;
        at += 1;
        match BlockHeader::decode(bytes) {
            Some(header) if header.sequence.0 != sequence => return None,
            Some(header) if header.block_type == BlockType::Commit => return Some((at, values)),
            Some(_) => {}
            None => values.push(read_contents(bytes)?),
        }
    }
}

impl Device for ModelDevice {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn size_bytes(&self) -> u64 {
        DEVICE_BLOCKS * BLOCK_SIZE as u64
    }

    fn submit(&self, batch: Vec<Request>) -> Vec<Ticket> {
        self.shared.submit(batch, false)
    }

    fn flush_completed(&self) -> Ticket {
        let ticket = self.shared.submit(vec![Request::flush()], true).pop();
        ticket.expect("a ticket for each request")
    }

    fn submit_read(&self, offset: u64, mut bufs: Vec<AlignedBuf>, _: Class) -> ReadTicket {
        let blocks = self.blocks(|sent| sent.result == Some(Ok(())));
        let chunks = bufs.iter_mut().flat_map(|buf| buf.chunks_mut(BLOCK_SIZE));
        for (block, chunk) in (offset / BLOCK_SIZE as u64..).zip(chunks) {
            match blocks.get(&block) {
                Some(bytes) => chunk.copy_from_slice(&bytes[..chunk.len()]),
                None => chunk.fill(0),
            }
        }
        ReadTicket::ready(Ok(bufs))
    }

    fn keeps_order(&self) -> bool {
        self.shared.keeps_order
    }
}

/// A write of `value` to the home location of a block.
pub(crate) fn home_write(block: u64, value: u32) -> Request {
    let offset = block * BLOCK_SIZE as u64;
    let bufs = vec![Buf::from_slice(&contents(block, value))];
    Request::Write { offset, bufs, order: Order::Ordered, fua: false, class: Class::Sync }
}
