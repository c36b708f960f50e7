//! The log on the device: its geometry, its superblock, its writes.
//!
//! Invariants: geometry and format are fixed while the journal is open; the superblock in memory
//! equals the last one submitted; at most one write of it is in flight.

use std::ops::Range;
use std::sync::Arc;

use fjord_block::lock::{Mutex, Rank};
use fjord_block::plant::{Bug, planted};
use fjord_block::{Buf, Class, Device, DeviceExt, Order, Request, Ticket};
use fjord_format::jbd2::{LogFormat, SUPERBLOCK_BYTES, Superblock};
use fjord_format::types::BlockNo;

use crate::error::{JournalError, Result};
use crate::map::JournalMap;
use crate::stats::{self, Counters};

/// Most bytes of one write request.
pub(crate) const REQUEST_BYTES_MAX: usize = 1 << 20;

/// The log of an open journal.
#[derive(Debug)]
pub(crate) struct Log {
    pub(crate) device: Arc<dyn Device>,
    pub(crate) map: JournalMap,
    pub(crate) format: LogFormat,
    /// First journal block of the log.
    pub(crate) first: u32,
    /// Journal block just past it.
    pub(crate) end: u32,
    /// Most versions that one descriptor describes, at least 1.
    pub(crate) versions_per_descriptor: usize,
    /// Journal blocks of the fast-commit area, valid or not; empty without an area.
    pub(crate) area: Range<u32>,
    /// Held over I/O.
    superblock: Mutex<LastSuperblock>,
}

/// The superblock as last submitted.
#[derive(Debug)]
struct LastSuperblock {
    fields: Superblock,
    /// The block that it lies in.
    block: Buf,
    /// The write that a commit waits for ([`Log::submit_superblock`]).
    in_flight: Option<Ticket>,
}

impl Log {
    /// Builds the log from a checked superblock and the block it was read from. With `has_area` the
    /// log leaves space for fast commits. `descriptor_blocks_max` as in
    /// [`JournalOptions`](crate::JournalOptions).
    pub(crate) fn new(
        device: Arc<dyn Device>,
        map: JournalMap,
        superblock: Superblock,
        block: Buf,
        has_area: bool,
        descriptor_blocks_max: Option<usize>,
    ) -> Log {
        let format = superblock.log_format();
        let maxlen = superblock.s_maxlen;
        let area = if has_area { superblock.reserved_area() } else { maxlen..maxlen };
        Log {
            device,
            map,
            format,
            versions_per_descriptor: format
                .tags_per_descriptor()
                .min(descriptor_blocks_max.unwrap_or(usize::MAX))
                .max(1),
            first: superblock.s_first,
            // One block between them belongs to neither.
            end: if has_area { area.start.saturating_sub(1) } else { maxlen },
            area,
            superblock: Mutex::new(
                Rank::LogSuperblock,
                LastSuperblock { fields: superblock, block, in_flight: None },
            ),
        }
    }

    /// What `read` takes from the superblock as last submitted. A write by [`Log::write_superblock`]
    /// holds it up, so no commit asks while it is dispatched.
    pub(crate) fn of_superblock<T>(&self, read: impl FnOnce(&Superblock) -> T) -> T {
        read(&self.superblock.lock().fields)
    }

    /// Length of the log in blocks.
    pub(crate) fn len(&self) -> u32 {
        self.end - self.first
    }

    /// The journal block `count` blocks after `from`, wrapping at the end of the log. `count` is
    /// at most the log's length.
    pub(crate) fn after(&self, from: u32, count: u32) -> u32 {
        let offset = u64::from(from - self.first) + u64::from(count);
        let len = u64::from(self.len());
        let skipped = u32::from(planted(Bug::WrapOffByOne) && offset >= len);
        self.first + (offset % len) as u32 + skipped
    }

    /// Number of blocks from `from` to `to`, wrapping at the end of the log.
    pub(crate) fn distance(&self, from: u32, to: u32) -> u32 {
        if to >= from { to - from } else { self.len() - (from - to) }
    }

    /// Byte offset of a block of the device.
    pub(crate) fn offset(&self, block: BlockNo) -> u64 {
        block.0.saturating_mul(self.format.block_size as u64)
    }

    /// Ordered writes of `bufs` (one per block) to the log from journal block `at` on, as few
    /// and large as the mapping allows.
    pub(crate) fn write_requests(
        &self,
        mut at: u32,
        bufs: Vec<Buf>,
        class: Class,
    ) -> Result<Vec<Request>> {
        let mut requests = Vec::new();
        let mut bufs = bufs.into_iter().peekable();
        while bufs.peek().is_some() {
            let (start, mapped) = self.map.run(at)?;
            let most = mapped.min(self.end - at) as usize;
            let most = most.min((REQUEST_BYTES_MAX / self.format.block_size).max(1));
            let run: Vec<Buf> = bufs.by_ref().take(most).collect();
            at = self.after(at, run.len() as u32);
            let offset = self.offset(start);
            let order = Order::Ordered;
            requests.push(Request::Write { offset, bufs: run, order, fua: false, class });
        }
        Ok(requests)
    }

    /// Ordered writes of `bufs` (one per block) to journal blocks from `at` on that are not part of
    /// the log; does not wrap.
    pub(crate) fn contiguous_requests(
        &self,
        mut at: u32,
        bufs: Vec<Buf>,
        fua: bool,
    ) -> Result<Vec<Request>> {
        let mut requests = Vec::with_capacity(1);
        let mut bufs = bufs.into_iter().peekable();
        while bufs.peek().is_some() {
            let (start, mapped) = self.map.run(at)?;
            let most = (mapped as usize).min((REQUEST_BYTES_MAX / self.format.block_size).max(1));
            let run: Vec<Buf> = bufs.by_ref().take(most).collect();
            at = at.saturating_add(run.len() as u32);
            let (offset, order, class) = (self.offset(start), Order::Ordered, Class::Sync);
            requests.push(Request::Write { offset, bufs: run, order, fua, class });
        }
        Ok(requests)
    }

    /// Changes the superblock and writes it, durably if `durable`.
    pub(crate) fn write_superblock(
        &self,
        counters: &Counters,
        durable: bool,
        change: impl FnOnce(&mut Superblock),
    ) -> Result<()> {
        let mut last = self.superblock.lock();
        // It is waited for, so it needs no order, and works even when order is broken: the error of
        // an abort.
        let write = (Order::Orderless, durable, Class::Sync);
        let ticket = self.send_superblock(&mut last, counters, write, change)?;
        ticket.wait().map_err(JournalError::io("writing the journal superblock"))
    }

    /// Changes the superblock and submits it, for a commit that waits for it.
    pub(crate) fn submit_superblock(
        &self,
        counters: &Counters,
        order: Order,
        class: Class,
        change: impl FnOnce(&mut Superblock),
    ) -> Result<Ticket> {
        let mut last = self.superblock.lock();
        let ticket = self.send_superblock(&mut last, counters, (order, false, class), change)?;
        last.in_flight = Some(ticket.clone());
        Ok(ticket)
    }

    fn send_superblock(
        &self,
        last: &mut LastSuperblock,
        counters: &Counters,
        (order, fua, class): (Order, bool, Class),
        change: impl FnOnce(&mut Superblock),
    ) -> Result<Ticket> {
        if let Some(earlier) = last.in_flight.take() {
            // Of two writes in flight either may be the one that lasts. A failure is that of the
            // commit, which looks for it.
            let _ = earlier.wait();
        }
        change(&mut last.fields);
        last.block.make_mut()[..SUPERBLOCK_BYTES].copy_from_slice(&last.fields.encode());
        let (start, _) = self.map.run(0)?;
        let (offset, bufs) = (self.offset(start), vec![last.block.clone()]);
        stats::add(&counters.superblock_writes, 1);
        Ok(self.device.submit_one(Request::Write { offset, bufs, order, fua, class }))
    }
}

/// Write requests to home locations, in ascending order, adjacent blocks merged.
pub(crate) fn home_requests(
    block_size: usize,
    mut blocks: Vec<(BlockNo, Buf)>,
    class: Class,
) -> Vec<Request> {
    blocks.sort_by_key(|&(block, _)| block);
    let most = (REQUEST_BYTES_MAX / block_size).max(1);
    let mut requests = Vec::new();
    let mut run: Vec<Buf> = Vec::new();
    let mut run_start = BlockNo(0);
    let mut flush_run = |start: BlockNo, run: &mut Vec<Buf>| {
        if !run.is_empty() {
            requests.push(Request::Write {
                offset: start.0.saturating_mul(block_size as u64),
                bufs: std::mem::take(run),
                order: Order::Orderless,
                fua: false,
                class,
            });
        }
    };
    for (block, buf) in blocks {
        if run.len() == most || run_start.checked_add(run.len() as u64) != Some(block) {
            flush_run(run_start, &mut run);
            run_start = block;
        }
        run.push(buf);
    }
    flush_run(run_start, &mut run);
    requests
}

/// Waits for all of `tickets`.
pub(crate) fn wait_all(tickets: &[Ticket], what: &'static str) -> Result<()> {
    Ticket::wait_all(tickets).map_err(JournalError::io(what))
}
