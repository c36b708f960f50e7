//! The fast-commit area of an open journal: a stream of records that follows the last full commit.
//!
//! Owns the area's state: the queue of requests ([`queue`]: how long a writer waits for more) and
//! the stream that the area holds. [`crate::fast_commit`] writes it. A full commit ends the stream:
//! recovery accepts only fast commits with the ID of the next transaction in the log.
//!
//! The journal's feature bit FAST_COMMIT makes the area valid. One write makes a full commit valid
//! and the stream before it invalid: see the commit's module `switch`. That, and every other rule
//! that serves the replay by others, is explained in [`compat`].
//!
//! Invariants:
//! - the area's last block stays unused ([`compat::usable_blocks`]);
//! - on close the head of the area is wiped, because Linux sets the bit when it mounts.

mod queue;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use fjord_block::lock::{Mutex, Rank};
use fjord_block::plant::{Bug, planted};
use fjord_block::{Buf, DeviceExt};
use fjord_format::jbd2::Incompat;
use fjord_format::jbd2::fast_commit::compat::BlockUse;
use fjord_format::jbd2::fast_commit::{Record, compat, starts_with_head};
use fjord_format::types::Tid;

use crate::error::{JournalError, Result};
use crate::log::{Log, wait_all};
use queue::Queue;

const WIPING: &str = "wiping the fast-commit area";

/// Durability of the file data of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum DataNeeds {
    /// All file data is durable, or there is none.
    Nothing,
    /// Transferred data must be durable when the fast commit is.
    FlushAfter,
    /// Transferred data must be durable before the fast commit is valid.
    FlushBefore,
}

/// A caller's request.
#[derive(Clone, Debug)]
pub struct FastCommitRequest {
    /// The newest transaction with the recorded changes.
    pub tid: Tid,
    /// The records, in replay order. Empty: only wait for the requests before it.
    pub records: Vec<Record>,
    /// Durability of the file data.
    pub data: DataNeeds,
    /// What they do to blocks, which later records depend on.
    pub blocks: BlockUse,
    /// Replay must not write log blocks before the records, so the log is emptied first.
    pub needs_empty_log: bool,
}

/// Outcome of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FastCommitOutcome {
    /// It is durable by a fast commit.
    Logged {
        /// Blocks written; a fast commit of several requests counts them for the first.
        blocks: u32,
    },
    /// A full commit made its transaction durable meanwhile.
    Committed,
    /// The area is full: a full commit is needed.
    Full,
    /// The records cannot be replayed after those in the area.
    Conflict,
    /// There is no area.
    Unavailable,
}

/// A queued request; wait for it.
#[must_use = "a queued request is durable only after the wait"]
pub struct FastCommitTicket(pub(crate) Arc<Waiting>);

/// A request that waits.
pub(crate) struct Waiting {
    pub(crate) request: FastCommitRequest,
    /// Set once, by the thread that wrote it; a leaf lock.
    pub(crate) outcome: Mutex<Option<Result<FastCommitOutcome>>>,
}

/// The area.
pub(crate) struct Area {
    /// Usable journal blocks.
    pub(crate) blocks: Range<u32>,
    /// Requests that no writer has taken, oldest first.
    pub(crate) queue: Queue<Arc<Waiting>>,
    /// Changed under the commit lock.
    pub(crate) stream: Mutex<Stream>,
    /// Blocks used; readable without the commit lock.
    pub(crate) used_hint: AtomicU32,
}

/// The fast commits of the next transaction in the log.
#[derive(Default)]
pub(crate) struct Stream {
    /// Blocks written.
    pub(crate) used: u32,
    /// The area is valid: the bit is set on disk.
    pub(crate) is_live: bool,
    /// A crash left the stream; the first full commit includes its changes.
    pub(crate) is_inherited: bool,
    /// The area begins with a head on disk, of this or an earlier transaction.
    pub(crate) has_head: bool,
    /// Replay will allocate blocks for this owner.
    pub(crate) allocates: Option<u32>,
    /// A request was refused until this transaction commits, and why: later requests may depend on
    /// it, so they are refused too.
    pub(crate) closed: Option<(Tid, FastCommitOutcome)>,
}

impl Area {
    /// The area of a journal that has one. It is valid if recovery left it valid.
    pub(crate) fn new(log: &Log) -> Option<Area> {
        let features = log.of_superblock(|superblock| superblock.s_feature_incompat);
        let pending = features.contains(Incompat::FAST_COMMIT);
        let blocks = compat::usable_blocks(log.area.clone());
        let (is_live, is_inherited, has_head) = (pending, pending, pending);
        let stream = Stream { is_live, is_inherited, has_head, ..Stream::default() };
        let (queue, used_hint) = (Queue::new(), AtomicU32::new(0));
        let stream = Mutex::new(Rank::FastCommitStream, stream);
        (!blocks.is_empty()).then_some(Area { blocks, queue, stream, used_hint })
    }

    /// Whether a crash left the stream.
    pub(crate) fn is_inherited(&self) -> bool {
        self.stream.lock().is_inherited
    }

    /// A full commit has ended the stream. The caller holds the commit lock.
    pub(crate) fn end_stream(&self) {
        let mut stream = self.stream.lock();
        (stream.is_live, stream.is_inherited) = (false, false);
        stream.allocates = None;
        if !planted(Bug::FastCommitNotRestarted) {
            stream.used = 0;
            self.used_hint.store(0, Ordering::Relaxed);
        }
    }
    /// Whether the area is valid, so that a full commit must end the stream. Exact under the commit
    /// lock; else a hint.
    pub(crate) fn is_live(&self) -> bool {
        self.stream.lock().is_live
    }

    /// Wipes the first block of the invalid area, if it holds a head. The caller holds the commit
    /// lock.
    pub(crate) fn wipe(&self, log: &Log, durable: bool) -> Result<()> {
        if !std::mem::take(&mut self.stream.lock().has_head) {
            return Ok(());
        }
        let zeros = vec![Buf::zeroed(log.format.block_size)];
        let requests = log.contiguous_requests(self.blocks.start, zeros, durable)?;
        wait_all(&log.device.submit(requests), WIPING)
    }
}

/// Wipes the first block of the invalid area, if it holds a head.
pub(crate) fn wipe_stale_head(log: &Log) -> Result<()> {
    if log.area.is_empty() {
        return Ok(());
    }
    let (home, _) = log.map.run(log.area.start)?;
    let size = log.format.block_size;
    let block = log.device.read_buf(log.offset(home), size);
    let block = block.map_err(JournalError::io("reading the fast-commit area"))?;
    if !starts_with_head(&block) {
        return Ok(());
    }
    let requests = log.contiguous_requests(log.area.start, vec![Buf::zeroed(size)], false)?;
    wait_all(&log.device.submit(requests), WIPING)?;
    log.device.flush().map_err(JournalError::io("flushing the fast-commit area"))
}
