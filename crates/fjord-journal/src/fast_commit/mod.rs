//! The fast-commit area of an open journal: a stream of records that follows the last full commit.
//!
//! A caller queues what it wants logged ([`Journal::queue_fast_commit`]) and waits; whoever gets
//! the committer's place writes all that is queued as one fast commit, so concurrent callers share
//! a write and a flush ([`queue`] tells how long it waits for them). A full commit ends the stream:
//! recovery takes only fast commits that bear the ID of the transaction that would have come next.
//!
//! Steps of a fast commit: 1. callers have waited for their file data; 2. **flush**, if some of it
//! must not be missing behind what is logged; 3. write the blocks **with FUA** (or write and
//! **flush**, when data wants one anyway); 4. the first of a stream sets the journal's feature bit
//! FAST_COMMIT **with FUA**. The checksum covers all blocks, so no order is needed among them. A
//! crash before 3 or 4 is complete leaves the fast commits before.
//!
//! The bit says that the area counts. e2fsck 1.47 drops the whole log when it finds the head of
//! another transaction's stream in an area that counts, so one write must both make the full commit
//! valid and the stream invalid: see the commit's module `switch`.
//!
//! Invariants:
//! - a fast commit is written under the committer's place, with its transaction running, so the
//!   full commit that ends the stream is neither under way nor done;
//! - the bit is set on disk only while the area begins with the head of the transaction that would
//!   come next in the log;
//! - the area's last block stays unused: Linux and e2fsck look one block further than the last
//!   one in use, and fail past the end;
//! - an area is left without a head when the journal is closed, for Linux, which sets the bit
//!   when it mounts.

mod queue;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use fjord_block::plant::{Bug, planted};
use fjord_block::{Buf, DeviceExt};
use fjord_format::jbd2::fast_commit::{FastCommitWriter, Record, starts_with_head};
use fjord_format::jbd2::{Incompat, MIN_JOURNAL_BLOCKS};
use fjord_format::types::Tid;
use parking_lot::Mutex;

use crate::error::{JournalError, Result};
use crate::handle::check_no_open_handle;
use crate::journal::{CommitterGuard, Journal};
use crate::log::{Log, wait_all};
use crate::stats;

use queue::Queue;

/// The area takes one block in so many of the journal, as with mke2fs.
const AREA_SHARE: u32 = 64;
/// Least length of an area that is worth having, in blocks.
const AREA_BLOCKS_MIN: u32 = 4;

/// What the file data of a request asks of the fast commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum DataNeeds {
    /// All of it is durable, or there is none.
    Nothing,
    /// Complete writes are to be durable when the fast commit is.
    FlushAfter,
    /// Complete writes must be durable before the fast commit counts.
    FlushBefore,
}

/// What a caller wants logged.
#[derive(Clone, Debug)]
pub struct FastCommitRequest {
    /// The newest transaction that holds what the records say.
    pub tid: Tid,
    /// The records, in the order in which they are to be replayed. None: to be told when the
    /// requests before are durable.
    pub records: Vec<Record>,
    /// What the file data asks.
    pub data: DataNeeds,
    /// Whom the blocks belong to that the records add.
    pub owner: u32,
    /// The records add blocks to their owner.
    pub adds_blocks: bool,
    /// Replay will allocate blocks of its own choice for the owner; nobody may add blocks behind
    /// that, for replay could have chosen them.
    pub allocates: bool,
    /// The log must hold nothing that replay has to bring home first; it is emptied.
    pub needs_empty_log: bool,
}

/// What became of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FastCommitOutcome {
    /// It is durable by a fast commit.
    Logged {
        /// Blocks that it took; those of a fast commit for several requests are the first one's.
        blocks: u32,
    },
    /// A full commit made its transaction durable meanwhile.
    Committed,
    /// The area is full: a full commit is needed.
    Full,
    /// The records could not be replayed behind those that are in the area.
    Conflict,
    /// There is no area.
    Unavailable,
}

/// A request in the queue, to be waited for.
#[must_use = "what is queued is durable only after the wait"]
pub struct FastCommitTicket(Arc<Waiting>);

/// A request that waits.
pub(crate) struct Waiting {
    request: FastCommitRequest,
    /// Set once, by whoever wrote it; a leaf lock.
    outcome: Mutex<Option<Result<FastCommitOutcome>>>,
}

/// The area.
pub(crate) struct Area {
    /// Journal blocks that can be used.
    blocks: Range<u32>,
    /// Requests that nobody has taken yet, oldest first.
    queue: Queue<Arc<Waiting>>,
    /// Changed by the holder of the committer's place.
    stream: Mutex<Stream>,
    /// Blocks used, for whoever does not hold that place.
    used_hint: AtomicU32,
}

/// The fast commits of the transaction that would come next.
#[derive(Default)]
struct Stream {
    /// Blocks written.
    used: u32,
    /// The area counts: the bit is set on disk.
    is_live: bool,
    /// A crash left it, and the first full commit holds what it says.
    is_inherited: bool,
    /// The area begins with a head on disk, of this transaction or an earlier one.
    has_head: bool,
    /// Replay will allocate blocks for this owner.
    allocates: Option<u32>,
    /// A request was refused ahead of this transaction, and why: those behind it may build on it,
    /// so they are refused too.
    closed: Option<(Tid, FastCommitOutcome)>,
}

impl Area {
    /// The area of a journal that has one. It counts if recovery left it so.
    pub(crate) fn new(log: &Log) -> Option<Area> {
        let pending = log.superblock.lock().0.s_feature_incompat.contains(Incompat::FAST_COMMIT);
        let blocks = log.area.start..log.area.end.saturating_sub(1);
        let (is_live, is_inherited, has_head) = (pending, pending, pending);
        let stream = Stream { is_live, is_inherited, has_head, ..Stream::default() };
        let (queue, used_hint) = (Queue::new(), AtomicU32::new(0));
        let stream = Mutex::new(stream);
        (!blocks.is_empty()).then_some(Area { blocks, queue, stream, used_hint })
    }

    /// Whether a crash left the stream.
    pub(crate) fn is_inherited(&self) -> bool {
        self.stream.lock().is_inherited
    }

    /// A full commit has taken the place of the stream. The caller has the committer's place.
    pub(crate) fn end_stream(&self) {
        let mut stream = self.stream.lock();
        (stream.is_live, stream.is_inherited) = (false, false);
        stream.allocates = None;
        if !planted(Bug::FastCommitNotRestarted) {
            stream.used = 0;
            self.used_hint.store(0, Ordering::Relaxed);
        }
    }
}

impl Journal {
    /// How many blocks of fast commits the area takes between two full commits; 0 without one.
    pub fn fast_commit_blocks(&self) -> u32 {
        self.inner.area.as_ref().map_or(0, |area| area.blocks.len() as u32)
    }

    /// Whether more than half of the area is used, so that a full commit in the background keeps
    /// requests from being refused. A hint.
    pub fn fast_commits_fill_area(&self) -> bool {
        self.is_area_used_beyond(1, 2)
    }

    /// Whether little of the area is left: whoever used it last had better see to a full commit
    /// than leave the next one without. A hint.
    pub fn fast_commits_exhaust_area(&self) -> bool {
        self.is_area_used_beyond(3, 4)
    }

    fn is_area_used_beyond(&self, part: u32, of: u32) -> bool {
        self.inner.area.as_ref().is_some_and(|area| {
            area.used_hint.load(Ordering::Relaxed) > area.blocks.len() as u32 * part / of
        })
    }

    /// Whether the full commit that ends the fast commits would have to bring older transactions
    /// home, so that a checkpoint in the background spares it that. A hint.
    pub fn fast_commits_follow_others(&self) -> bool {
        self.is_area_used_beyond(0, 1) && !self.inner.state.lock().checkpoints.is_empty()
    }

    /// Sets the size of the fast-commit area of later mounts (`s_num_fc_blks`): a 64th of the
    /// journal as mke2fs takes, as far as a log of the least length is left. Returns it; 0 when
    /// there is no room.
    ///
    /// # Errors
    /// I/O errors; the journal has an area now.
    pub fn size_fast_commit_area(&self) -> Result<u32> {
        let log = self.inner.log_or_usage()?;
        if self.inner.area.is_some() {
            return Err(JournalError::Usage("the journal has a fast-commit area".into()));
        }
        let maxlen = log.superblock.lock().0.s_maxlen;
        let room = maxlen.saturating_sub(MIN_JOURNAL_BLOCKS);
        let blocks = (maxlen / AREA_SHARE).min(room);
        // One block belongs to nobody, and the last is not used.
        if blocks < AREA_BLOCKS_MIN {
            return Ok(0);
        }
        log.write_superblock(&self.inner.counters, self.inner.barrier, |superblock| {
            superblock.s_num_fc_blks = blocks;
        })?;
        Ok(blocks)
    }

    /// Puts a request behind those of all threads, in the order of the calls. `None` without an
    /// area. Takes a leaf lock, so the caller may hold what its records were made under.
    pub fn queue_fast_commit(&self, request: FastCommitRequest) -> Option<FastCommitTicket> {
        let area = self.inner.area.as_ref()?;
        let waiting = Arc::new(Waiting { request, outcome: Mutex::default() });
        area.queue.push(waiting.clone());
        Some(FastCommitTicket(waiting))
    }

    /// Makes a queued request durable by a fast commit, together with those of other threads, or
    /// says why a full commit is needed.
    ///
    /// # Errors
    /// I/O errors, which stop the journal; the call from a thread with an open handle.
    pub fn wait_fast_commit(&self, ticket: FastCommitTicket) -> Result<FastCommitOutcome> {
        check_no_open_handle(self, "a fast commit")?;
        let (Some(area), Some(log)) = (&self.inner.area, &self.inner.log) else {
            return Ok(FastCommitOutcome::Unavailable);
        };
        let FastCommitTicket(mine) = ticket;
        let mut state = self.inner.state.lock();
        loop {
            if let Some(outcome) = mine.outcome.lock().take() {
                return outcome;
            }
            self.check_running()?;
            if state.committed.at_least(mine.request.tid) {
                // The next one to write finds it in the queue, and passes over it.
                return Ok(FastCommitOutcome::Committed);
            }
            if state.committer_busy || state.commits_waiting > 0 {
                self.inner.committer_free.wait(&mut state);
                continue;
            }
            state.committer_busy = true;
            drop(state);
            let place = CommitterGuard::of(&self.inner);
            // What was committed in order only comes before it; a failure shows above.
            if self.finish_flying().is_ok() {
                let batch = area.queue.gather();
                let began = Instant::now();
                self.write_batch(log, area, &batch);
                area.queue.served(batch.len(), began);
            }
            drop(place);
            state = self.inner.state.lock();
            if mine.outcome.lock().is_none() && self.check_running().is_ok() {
                // Whoever had taken it has panicked.
                return Err(JournalError::Usage("a fast commit was given up".into()));
            }
        }
    }

    /// Decides about each request and writes those that can be logged. The caller has the
    /// committer's place.
    fn write_batch(&self, log: &Log, area: &Area, batch: &[Arc<Waiting>]) {
        if batch.iter().any(|waiting| waiting.request.needs_empty_log)
            && self.empty_log(log).is_err()
        {
            // The journal has stopped, and every waiter learns that.
            return;
        }
        let (committed, next) = {
            let state = self.inner.state.lock();
            (state.committed, state.logged.next().0)
        };
        let mut stream = area.stream.lock();
        let first = stream.used == 0;
        let mut writer = FastCommitWriter::new(self.inner.block_size, next, first);
        let mut allocates = stream.allocates;
        let mut closed = stream.closed.filter(|(tid, _)| *tid == next).map(|(_, why)| why);
        let (mut logged, mut data) = (Vec::new(), DataNeeds::Nothing);
        for waiting in batch {
            let request = &waiting.request;
            let other = allocates.is_some_and(|owner| owner != request.owner);
            // e2fsck does not look ahead: its nodes may take what any later record adds.
            let taken = allocates.is_some() && request.adds_blocks;
            let outcome = if committed.at_least(request.tid) {
                FastCommitOutcome::Committed
            } else if let Some(why) = closed {
                why
            } else if taken || (other && request.allocates) {
                FastCommitOutcome::Conflict
            } else if !push_all(&mut writer, &request.records) {
                FastCommitOutcome::Full
            } else {
                data = data.max(request.data);
                if request.allocates {
                    allocates = Some(request.owner);
                }
                logged.push(waiting);
                continue;
            };
            if outcome != FastCommitOutcome::Committed {
                closed = Some(outcome);
            }
            *waiting.outcome.lock() = Some(Ok(outcome));
        }
        let outcome = self.write_stream(log, area, &mut stream, writer, &logged, data);
        match &outcome {
            Ok(FastCommitOutcome::Logged { .. }) => stream.allocates = allocates,
            Ok(why) => closed = Some(*why),
            Err(error) => self.abort(error.clone()),
        }
        stream.closed = closed.map(|why| (next, why));
        drop(stream);
        for (index, waiting) in logged.into_iter().enumerate() {
            let mut mine = outcome.clone();
            if let (Ok(FastCommitOutcome::Logged { blocks }), true) = (&mut mine, index > 0) {
                *blocks = 0;
            }
            *waiting.outcome.lock() = Some(mine);
        }
    }

    fn write_stream(
        &self,
        log: &Log,
        area: &Area,
        stream: &mut Stream,
        writer: FastCommitWriter,
        logged: &[&Arc<Waiting>],
        data: DataNeeds,
    ) -> Result<FastCommitOutcome> {
        if logged.iter().all(|waiting| waiting.request.records.is_empty()) {
            // Nothing to write; what came before is durable, for whoever had the place before
            // has left it.
            if data != DataNeeds::Nothing {
                self.inner.flush("flushing file data")?;
            }
            return Ok(FastCommitOutcome::Logged { blocks: 0 });
        }
        let bytes = match writer.finish() {
            Ok(bytes) => bytes,
            Err(_) => return Ok(FastCommitOutcome::Full),
        };
        let bufs: Vec<Buf> = bytes.chunks(self.inner.block_size).map(Buf::from_slice).collect();
        let count = bufs.len() as u32;
        if count > area.blocks.len() as u32 - stream.used {
            return Ok(FastCommitOutcome::Full);
        }
        if data == DataNeeds::FlushBefore && !planted(Bug::FastCommitBeforeData) {
            self.inner.flush("flushing file data before a fast commit")?;
        }
        let flush_after = data == DataNeeds::FlushAfter;
        let fua = self.inner.barrier && !flush_after && !planted(Bug::FastCommitNotDurable);
        let requests = log.straight_requests(area.blocks.start + stream.used, bufs, fua)?;
        if planted(Bug::StreamMarkedEarly) {
            self.mark_stream(log, stream)?;
        }
        stream.has_head = true;
        let tickets = self.inner.device.submit(requests);
        wait_all(&tickets, "writing a fast commit")?;
        if flush_after {
            self.inner.flush("flushing a fast commit")?;
        }
        self.mark_stream(log, stream)?;
        // A shutdown in between: whether it counts is for recovery to find out.
        self.check_running()?;
        stream.used += count;
        area.used_hint.store(stream.used, Ordering::Relaxed);
        stats::add(&self.inner.counters.fast_commits, 1);
        stats::add(&self.inner.counters.fast_commit_requests, logged.len());
        stats::add(&self.inner.counters.fast_commit_blocks, count as usize);
        Ok(FastCommitOutcome::Logged { blocks: count })
    }

    /// Makes the area count, durably, if it does not yet; and says where recovery looks for the
    /// full commit that comes next, if the superblock does not.
    fn mark_stream(&self, log: &Log, stream: &mut Stream) -> Result<()> {
        if stream.is_live {
            return Ok(());
        }
        let new_start = {
            let mut state = self.inner.state.lock();
            let restarts = std::mem::take(&mut state.restarts);
            let is_new = std::mem::take(&mut state.empty_on_disk) || restarts;
            is_new.then(|| (state.head, state.logged.next()))
        };
        log.write_superblock(&self.inner.counters, self.inner.barrier, |superblock| {
            if let Some((head, sequence)) = new_start {
                superblock.s_start = head;
                superblock.s_sequence = sequence.0;
            }
            superblock.s_feature_incompat |= Incompat::FAST_COMMIT;
        })?;
        stream.is_live = true;
        Ok(())
    }

    /// A full commit waits for the place that the writer of a fast commit may hold longer than it must.
    pub(crate) fn hurry_fast_commit(&self) {
        if let Some(area) = &self.inner.area {
            area.queue.hurry();
        }
    }

    /// The area, if it counts, so that a full commit has to take the place of its stream. For the
    /// holder of the committer's place; a hint for others.
    pub(crate) fn live_area(&self) -> Option<&Area> {
        self.inner.area.as_ref().filter(|area| area.stream.lock().is_live)
    }

    /// Wipes the first block of an area that does not count, if it holds a head. The caller has the
    /// committer's place.
    pub(crate) fn wipe_area(&self, log: &Log) -> Result<()> {
        let Some(area) = &self.inner.area else { return Ok(()) };
        if !std::mem::take(&mut area.stream.lock().has_head) {
            return Ok(());
        }
        let zeros = vec![Buf::zeroed(self.inner.block_size)];
        let requests = log.straight_requests(area.blocks.start, zeros, self.inner.barrier)?;
        wait_all(&log.device.submit(requests), WIPING)
    }

    /// Lets one transaction use the whole log, and makes a handle that does not fit an error
    /// rather than a reason to commit: what is done until this is switched off again is one
    /// transaction. For a caller that is alone, such as one that applies
    /// [`RecoveryReport::fast_commit_records`](crate::RecoveryReport::fast_commit_records).
    pub fn whole_log(&self, on: bool) {
        self.inner.whole_log.store(on, Ordering::Release);
    }
}

const WIPING: &str = "wiping the fast-commit area";

/// Wipes the first block of the area, which does not count, if it holds a head.
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
    let requests = log.straight_requests(log.area.start, vec![Buf::zeroed(size)], false)?;
    wait_all(&log.device.submit(requests), WIPING)?;
    log.device.flush().map_err(JournalError::io("flushing the fast-commit area"))
}

/// Adds all records or none that fits.
fn push_all(writer: &mut FastCommitWriter, records: &[Record]) -> bool {
    let before = writer.clone();
    let pushed = records.iter().all(|record| writer.push(record).is_ok());
    if !pushed {
        *writer = before;
    }
    pushed
}
