//! The order of writes, checked by the log of a device: what it was given, and as it answered.
//!
//! Owns [`LoggedDevice`], which notes when each tagged write is submitted and answered, and [`check_device`], which
//! sends epochs through the epoch scheduler over one. On a device without barriers and without a cache the
//! scheduler promises that no ordered write is sent before all of earlier epochs were answered (barrier-enabled I/O
//! stack, §3; docs/ordering.md).
//!
//! Invariant: stamps are unique and grow; a write is noted as answered before whoever waits for it knows.

use std::{
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use anyhow::{Context, Result, ensure};
use fjord_block::{
    AlignedBuf, Buf, Capabilities, Class, Device, DeviceExt, Order, ReadTicket, Request, Ticket,
    epoch::EpochDevice,
};

use crate::rng::Rng;

const BLOCK_BYTES: usize = 4096;
/// Begins a block that names its epoch.
const TAG: u64 = 0x6570_6f63_6866_6a72;
/// Epochs of one check.
const EPOCH_COUNT: u64 = 80;

/// An ordered block that the device was given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Line {
    epoch: u64,
    submitted_at: u64,
    /// 0 while it is under way.
    answered_at: u64,
}

#[derive(Debug, Default)]
struct Log {
    clock: AtomicU64,
    lines: Mutex<Vec<Line>>,
}

impl Log {
    fn lines(&self) -> MutexGuard<'_, Vec<Line>> {
        // A panic elsewhere leaves whole lines.
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tick(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::SeqCst) + 1
    }
}

/// A device that logs.
struct LoggedDevice {
    inner: Arc<dyn Device>,
    log: Arc<Log>,
}

impl fmt::Debug for LoggedDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LoggedDevice({:?})", self.inner)
    }
}

/// The epochs that the blocks of a write name.
fn epochs_of(request: &Request) -> Vec<u64> {
    let Request::Write { bufs, .. } = request else { return Vec::new() };
    let bytes: Vec<u8> = bufs.iter().flat_map(|buf| buf.iter().copied()).collect();
    let word = |block: &[u8], at: usize| {
        let word = block.get(at..at + 8).and_then(|word| word.try_into().ok());
        word.map(u64::from_le_bytes)
    };
    let epoch = |block: &[u8]| word(block, 8).filter(|_| word(block, 0) == Some(TAG));
    bytes.chunks(BLOCK_BYTES).filter_map(epoch).collect()
}

impl Device for LoggedDevice {
    fn capabilities(&self) -> &Capabilities {
        self.inner.capabilities()
    }

    fn size_bytes(&self) -> u64 {
        self.inner.size_bytes()
    }

    fn submit(&self, batch: Vec<Request>) -> Vec<Ticket> {
        let submit_one = |request: Request| {
            let places: Vec<usize> = {
                let mut lines = self.log.lines();
                let submitted_at = self.log.tick();
                let new = epochs_of(&request);
                let first = lines.len();
                lines.extend(new.iter().map(|epoch| Line {
                    epoch: *epoch,
                    submitted_at,
                    answered_at: 0,
                }));
                (first..lines.len()).collect()
            };
            let ticket = self.inner.submit_one(request);
            let log = self.log.clone();
            ticket.watch(move |_| {
                let mut lines = log.lines();
                let answered_at = log.tick();
                places.iter().for_each(|place| lines[*place].answered_at = answered_at);
            });
            ticket
        };
        batch.into_iter().map(submit_one).collect()
    }

    fn submit_read(&self, offset: u64, bufs: Vec<AlignedBuf>, class: Class) -> ReadTicket {
        self.inner.submit_read(offset, bufs, class)
    }
}

/// What a check saw.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seen {
    /// Ordered blocks.
    pub blocks: usize,
    /// Pairs of neighbouring ones of an epoch that were under way at once.
    pub together: usize,
}

/// Whether each epoch was answered before the next one was sent.
fn check(lines: &[Line]) -> Result<Seen> {
    let mut sorted = lines.to_vec();
    sorted.sort_by_key(|line| (line.epoch, line.submitted_at));
    let mut answered_before = 0;
    let mut together = 0;
    for epoch in sorted.chunk_by(|a, b| a.epoch == b.epoch) {
        for line in epoch {
            ensure!(line.answered_at > 0, "a block was never answered: {line:?}");
            ensure!(
                line.submitted_at > answered_before,
                "{line:?} was sent before all of earlier epochs were answered, at {answered_before}"
            );
        }
        together += epoch.windows(2).filter(|two| two[1].submitted_at < two[0].answered_at).count();
        let last = epoch.iter().map(|line| line.answered_at).max();
        answered_before = last.context("an epoch has blocks")?;
    }
    Ok(Seen { blocks: lines.len(), together })
}

fn block(epoch: Option<u64>, index: u64) -> Buf {
    let mut bytes = vec![index as u8; BLOCK_BYTES];
    bytes[..8].copy_from_slice(&epoch.map_or(0, |_| TAG).to_le_bytes());
    bytes[8..16].copy_from_slice(&epoch.unwrap_or(0).to_le_bytes());
    bytes[16..24].copy_from_slice(&index.to_le_bytes());
    Buf::from_slice(&bytes)
}

/// Sends epochs of ordered and orderless writes to `device`, without waiting for any, and checks the log.
///
/// # Errors
/// A write that was sent too early; content that is not what was written.
pub fn check_device(device: Arc<dyn Device>, seed: u64) -> Result<Seen> {
    let log = Arc::new(Log::default());
    let logged = LoggedDevice { inner: device, log: log.clone() };
    let scheduler = EpochDevice::new(Arc::new(logged));
    let pages = scheduler.size_bytes() / BLOCK_BYTES as u64;
    let mut rng = Rng::new(seed);
    let (mut places, mut tickets, mut index) = (Vec::new(), Vec::new(), 0);
    for epoch in 0..EPOCH_COUNT {
        let ordered = rng.range(1, 7);
        let mut batch = Vec::new();
        for at in 0..ordered + rng.below(3) {
            let is_ordered = at < ordered;
            let order = match is_ordered {
                false => Order::Orderless,
                true if at + 1 == ordered => Order::Barrier,
                true => Order::Ordered,
            };
            // Each page once, all over the device.
            let page = (index * 7919 + seed) % pages;
            let content = block(is_ordered.then_some(epoch), index);
            places.push((page, content.clone()));
            let (offset, bufs) = (page * BLOCK_BYTES as u64, vec![content]);
            batch.push(Request::Write { offset, bufs, order, fua: false, class: Class::Sync });
            index += 1;
        }
        tickets.extend(scheduler.submit(batch));
    }
    Ticket::wait_all(&tickets)?;
    ensure!(index < pages, "the device is too small");
    for (page, wanted) in places {
        let mut found = vec![0; BLOCK_BYTES];
        scheduler.read_exact_at(page * BLOCK_BYTES as u64, &mut found)?;
        ensure!(found == wanted[..], "page {page} is not what was written");
    }
    let lines = log.lines().clone();
    let seen = check(&lines).with_context(|| format!("seed {seed}"))?;
    ensure!(seen.together > 0, "seed {seed}: one write at a time shows no order");
    Ok(seen)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_that_is_sent_too_early_is_found() {
        let line = |epoch, submitted_at, answered_at| Line { epoch, submitted_at, answered_at };
        let good = [line(0, 1, 4), line(0, 2, 3), line(1, 5, 6)];
        assert_eq!(check(&good).expect("in order"), Seen { blocks: 3, together: 1 });
        assert!(check(&[line(0, 1, 4), line(0, 2, 5), line(1, 5, 6)]).is_err());
        assert!(check(&[line(0, 1, 4), line(0, 2, 0)]).is_err());
    }
}
