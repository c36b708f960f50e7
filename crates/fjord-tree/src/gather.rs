//! A device that gathers writes: what lies side by side goes out as one large request.
//!
//! Owns writes that were accepted and are not on the device yet. The files of a tree are small and
//! their blocks lie side by side; one request for each of them would cost more than the data.
//!
//! Invariants:
//! - a write that is gathered counts as done, so its failure is reported by a later request, and at
//!   the latest by [`Gather::settle`];
//! - no two writes that overlap are under way together, and a read sees all writes before it;
//! - memory held is bounded by [`GATHERED_BYTES_MAX`] and [`UNDER_WAY_BYTES_MAX`];
//! - flushes do nothing: whoever needs durability settles, and flushes the device below.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use fjord_block::lock::{Mutex, Rank};
use fjord_block::{
    AlignedBuf, Buf, Capabilities, Class, Device, DeviceStats, IoError, OpenError, Order,
    ReadTicket, Request, Ticket,
};

/// Bytes that are gathered before they go out.
const GATHERED_BYTES_MAX: u64 = 2 << 20;
/// Bytes of requests under way, beyond which the oldest are waited for.
const UNDER_WAY_BYTES_MAX: u64 = 4 << 20;
/// Bytes of one request, unless it came larger.
const REQUEST_BYTES_MAX: u64 = 1 << 20;

/// A device whose writes come later, in large requests, and where room below is not asked for before
/// it is needed.
#[derive(Debug)]
pub(crate) struct Gather {
    below: Arc<dyn Device>,
    writes: Mutex<Writes>,
}

/// Bytes from one offset on.
#[derive(Debug)]
struct Piece {
    bufs: Vec<Buf>,
    len: u64,
}

#[derive(Debug)]
struct UnderWay {
    ticket: Ticket,
    offset: u64,
    len: u64,
}

#[derive(Debug, Default)]
struct Writes {
    /// By offset; they do not overlap.
    gathered: BTreeMap<u64, Piece>,
    gathered_bytes: u64,
    under_way: VecDeque<UnderWay>,
    under_way_bytes: u64,
    /// The first failure of a write that counted as done.
    failed: Option<IoError>,
}

impl Gather {
    pub(crate) fn new(below: Arc<dyn Device>) -> Gather {
        Gather { below, writes: Mutex::new(Rank::Gather, Writes::default()) }
    }

    /// Whether a write failed because the file system that holds the image is full.
    pub(crate) fn is_full_below(&self) -> bool {
        self.writes.lock().failed.as_ref().is_some_and(IoError::is_no_space)
    }

    /// Waits until all writes are on the device; they are not durable yet.
    ///
    /// # Errors
    /// The first failure of a write.
    pub(crate) fn settle(&self) -> Result<(), IoError> {
        let mut writes = self.writes.lock();
        writes.send(&*self.below);
        writes.wait_all();
        writes.failed.clone().map_or(Ok(()), Err)
    }
}

impl Writes {
    /// Whether a range overlaps what is gathered.
    fn has_gathered(&self, offset: u64, len: u64) -> bool {
        let before = self.gathered.range(..offset.saturating_add(len)).next_back();
        before.is_some_and(|(start, piece)| start.saturating_add(piece.len) > offset)
    }

    /// Waits for the requests under way that overlap a range.
    fn wait_for(&mut self, offset: u64, len: u64) {
        let end = offset.saturating_add(len);
        let overlaps = |one: &UnderWay| one.offset < end && one.offset + one.len > offset;
        if self.under_way.iter().any(overlaps) {
            self.wait_all();
        }
    }

    fn wait_all(&mut self) {
        while let Some(oldest) = self.under_way.pop_front() {
            self.end(&oldest);
        }
    }

    fn end(&mut self, one: &UnderWay) {
        self.under_way_bytes -= one.len;
        if let Err(error) = one.ticket.wait() {
            self.failed.get_or_insert(error);
        }
    }

    /// Sees to it that a request for a range comes after all writes to it.
    fn before(&mut self, offset: u64, len: u64, below: &dyn Device) {
        if self.has_gathered(offset, len) {
            self.send(below);
        }
        self.wait_for(offset, len);
    }

    fn write(&mut self, offset: u64, bufs: Vec<Buf>, below: &dyn Device) -> Result<(), IoError> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let len = bufs.iter().map(|buf| buf.len() as u64).sum();
        if len == 0 {
            return Ok(());
        }
        match self.gathered.get_mut(&offset).filter(|piece| piece.len == len) {
            // The same block again, such as a bitmap.
            Some(piece) => piece.bufs = bufs,
            None => {
                if self.has_gathered(offset, len) {
                    self.send(below);
                }
                self.gathered.insert(offset, Piece { bufs, len });
                self.gathered_bytes += len;
            }
        }
        if self.gathered_bytes >= GATHERED_BYTES_MAX {
            self.send(below);
        }
        Ok(())
    }

    /// Sends out what is gathered, in the order of offsets.
    fn send(&mut self, below: &dyn Device) {
        let mut requests: Vec<(u64, Piece)> = Vec::new();
        for (offset, piece) in std::mem::take(&mut self.gathered) {
            self.wait_for(offset, piece.len);
            match requests.last_mut() {
                Some((start, last))
                    if *start + last.len == offset && last.len + piece.len <= REQUEST_BYTES_MAX =>
                {
                    last.bufs.extend(piece.bufs);
                    last.len += piece.len;
                }
                _ => requests.push((offset, piece)),
            }
        }
        self.gathered_bytes = 0;
        let ranges: Vec<(u64, u64)> =
            requests.iter().map(|(offset, piece)| (*offset, piece.len)).collect();
        let batch = requests.into_iter().map(|(offset, piece)| Request::Write {
            offset,
            bufs: piece.bufs,
            order: Order::Orderless,
            fua: false,
            class: Class::Async,
        });
        let tickets = below.submit(batch.collect());
        for (ticket, (offset, len)) in tickets.into_iter().zip(ranges) {
            self.under_way.push_back(UnderWay { ticket, offset, len });
            self.under_way_bytes += len;
        }
        while self.under_way_bytes > UNDER_WAY_BYTES_MAX {
            let Some(oldest) = self.under_way.pop_front() else { break };
            self.end(&oldest);
        }
    }
}

impl Device for Gather {
    fn capabilities(&self) -> &Capabilities {
        self.below.capabilities()
    }

    fn size_bytes(&self) -> u64 {
        self.below.size_bytes()
    }

    fn check(&self) -> Result<(), IoError> {
        self.below.check()
    }

    fn submit(&self, batch: Vec<Request>) -> Vec<Ticket> {
        let below = &*self.below;
        let mut writes = self.writes.lock();
        let tickets = batch.into_iter().map(|request| match request {
            Request::Write { offset, bufs, .. } => Ticket::ready(writes.write(offset, bufs, below)),
            Request::Flush { .. } => Ticket::ready(writes.failed.clone().map_or(Ok(()), Err)),
            Request::Discard { offset, len } | Request::WriteZeroes { offset, len } => {
                writes.before(offset, len, below);
                // A later write must not overtake it.
                let done = below.submit(vec![request]).iter().try_for_each(Ticket::wait);
                Ticket::ready(done)
            }
        });
        tickets.collect()
    }

    fn submit_read(&self, offset: u64, bufs: Vec<AlignedBuf>, class: Class) -> ReadTicket {
        let len = bufs.iter().map(|buf| buf.len() as u64).sum();
        self.writes.lock().before(offset, len, &*self.below);
        self.below.submit_read(offset, bufs, class)
    }

    fn stats(&self) -> DeviceStats {
        self.below.stats()
    }

    fn claim(&self, alone: bool) -> Result<(), OpenError> {
        self.below.claim(alone)
    }
}

#[cfg(test)]
mod tests {
    use fjord_block::{DeviceExt, IoOp, MemDevice};
    use fjord_testkit::rng::{Rng, pattern_vec, seed_from_env};

    use super::*;

    fn write(device: &Gather, offset: u64, data: &[u8]) -> Result<(), IoError> {
        device.submit_one(Request::write(offset, vec![Buf::from_slice(data)])).wait()
    }

    #[test]
    fn neighbours_go_out_together() {
        let below = Arc::new(MemDevice::new(64 << 20));
        let device = Gather::new(below.clone());
        // From the end to the start, as many requests as a large tree has files.
        for at in (0..1024u64).rev() {
            write(&device, at << 13, &[at as u8; 8192]).expect("gathered");
        }
        device.settle().expect("written");
        let written = below.stats().writes_total();
        assert_eq!(written.bytes, 8 << 20);
        assert!(written.request_count <= 8, "{} requests", written.request_count);
    }

    #[test]
    fn it_holds_what_a_device_would() {
        const SIZE: u64 = 12 << 20;
        let seed = seed_from_env("it_holds_what_a_device_would", 1);
        let mut rng = Rng::new(seed);
        let below = Arc::new(MemDevice::new(SIZE));
        let device = Gather::new(below.clone());
        let mut model = vec![0; SIZE as usize];
        for step in 0..4000 {
            let len = (1 + rng.magnitude(63)) << 10;
            let offset = rng.below((SIZE - len) >> 10) << 10;
            let range = offset as usize..(offset + len) as usize;
            match rng.below(20) {
                0..4 => {
                    let mut found = vec![0; len as usize];
                    device.read_exact_at(offset, &mut found).expect("read");
                    assert_eq!(found, model[range], "step {step} of seed {seed}");
                }
                4 => {
                    device.submit_one(Request::WriteZeroes { offset, len }).wait().expect("zeroed");
                    model[range].fill(0);
                }
                5 => device.flush().expect("nothing failed"),
                _ => {
                    let data = pattern_vec(step, 0, len as usize);
                    write(&device, offset, &data).expect("gathered");
                    model[range].copy_from_slice(&data);
                }
            }
            let held = device.writes.lock();
            assert!(held.gathered_bytes < GATHERED_BYTES_MAX);
            assert!(held.under_way_bytes <= UNDER_WAY_BYTES_MAX);
            let pieces: u64 = held.gathered.values().map(|piece| piece.len).sum();
            assert_eq!(pieces, held.gathered_bytes);
        }
        device.settle().expect("written");
        let mut found = vec![0; SIZE as usize];
        below.read_exact_at(0, &mut found).expect("read");
        assert!(found == model, "seed {seed}");
    }

    #[test]
    fn a_failure_is_told_in_the_end() {
        let below = Arc::new(MemDevice::new(16 << 20));
        let device = Gather::new(below.clone());
        below.faults().fail_nth(Some(IoOp::Write), 0, libc::EIO);
        write(&device, 0, &[1; 4096]).expect("gathered");
        assert!(device.settle().is_err());
        assert!(device.settle().is_err(), "forgotten");
        assert!(write(&device, 4096, &[1; 4096]).is_err() && device.flush().is_err());
        // A failure shows in the requests that follow, too.
        let device = Gather::new(below.clone());
        below.faults().fail_nth(Some(IoOp::Write), 0, libc::ENOSPC);
        let failed = (0..4000u64).find(|at| write(&device, at << 12, &[1; 4096]).is_err());
        assert!(failed.is_some_and(|at| at << 12 <= GATHERED_BYTES_MAX + UNDER_WAY_BYTES_MAX));
        assert!(device.settle().is_err_and(|error| error.is_no_space()));
    }
}
