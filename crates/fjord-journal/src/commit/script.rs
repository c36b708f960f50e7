//! Scripts: what a commit sends to the device, in which order and with which waits, as data.
//!
//! Owns the four protocols and their one interpreter. Which protocol applies depends on the device
//! and on the fast-commit area:
//!
//! | [`Protocol`] | when | script | durable |
//! |---|---|---|---|
//! | `Epochs` | the device keeps order | {data, log blocks} barrier {commit block} | when settled |
//! | `Waits` | else | log blocks | when settled: wait, flush, commit block, FUA or flush |
//! | `EndStream` | fast commits are valid | [`super::switch`] | at the end |
//! | `NoLog` | no log | home locations, wait, flush | at the end |
//!
//! Invariants: no script writes a commit block before everything that it refers to, unless the
//! device keeps them in order; each script checks for a stopped journal before its last write.

use fjord_block::lock::RwLockWriteGuard;
use fjord_block::plant::{Bug, planted};
use fjord_block::{Buf, Class, Order, Request, Ticket};
use fjord_format::jbd2::{ChecksumVersion, CommitBlock};

use super::build::LogBlocks;
use crate::error::{JournalError, Result};
use crate::fast_commit_area::Area;
use crate::journal::Journal;
use crate::log::{Log, home_requests, wait_all};
use crate::pipeline::{Commit, Sent};
use crate::transaction::{Batch, Phase, Sequence};

const DATA: &str = "writing file data that a transaction refers to";
pub(super) const BODY: &str = "writing the log";
pub(super) const COMMIT: &str = "writing the commit block";

/// How a commit keeps its writes in order.
#[derive(Clone, Copy)]
pub(super) enum Protocol<'a> {
    /// Leaves order to the device.
    Epochs(&'a Log),
    /// Waits and flushes between them.
    Waits(&'a Log),
    /// As a full commit that ends the stream of fast commits in the area.
    EndStream(&'a Log, &'a Area),
    /// Without a log.
    NoLog,
}

/// When a caller needs a commit to be durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wants {
    /// It waits for this commit alone: FUA of the commit block is cheapest.
    Durability,
    /// It waits for a flush that covers other commits too.
    SharedFlush,
    /// It does not wait: order only.
    Order,
}

/// One step of a script.
enum Step<'a> {
    /// Submits the superblock with the start of the log at the commit.
    LogStart(&'a Log, Order, Class),
    /// Submits writes.
    Write(Vec<Request>),
    /// Dispatches file data that the device might still hold back.
    StartData,
    /// Waits for the file data and all writes so far.
    Wait(&'static str),
    /// Waits for the writes so far, not for the file data.
    WaitOwn(&'static str),
    /// Waits for the file data.
    WaitData,
    /// Flushes the device.
    Flush(&'static str),
    /// Everything before the commit block has been dealt with.
    Enter(Phase),
    /// Errs if the journal has stopped: after a shutdown meanwhile, the transaction must not be
    /// committed.
    CheckRunning,
    /// Checkpoints all older commits, except blocks of this one; holds the checkpoint lock until
    /// the end of the script.
    CheckpointOlder,
    /// Moves the start of the log to a journal block and ends the stream of fast commits.
    MoveStart(&'a Log, &'a Area, u32),
}

/// Steps, and what is left to settle after them.
pub(super) struct Script<'a> {
    steps: Vec<Step<'a>>,
    rest: Rest,
}

/// What the steps leave to settle.
enum Rest {
    /// Nothing: the commit is durable.
    Nothing,
    /// The last write is a commit block at this byte offset, with FUA or not, not waited for.
    CommitInFlight(u64, bool),
    /// The commit block, after a flush.
    CommitBlock(Request),
}

impl Protocol<'_> {
    /// Log blocks left unused before the first one of the commit.
    pub(super) fn hidden_blocks(&self) -> u32 {
        let hides = matches!(self, Protocol::EndStream(..));
        u32::from(hides && !planted(Bug::StreamEndNotHidden))
    }

    pub(super) fn log(&self) -> Option<&Log> {
        match self {
            Protocol::Epochs(log) | Protocol::Waits(log) | Protocol::EndStream(log, _) => Some(log),
            Protocol::NoLog => None,
        }
    }
}

impl Journal {
    /// The protocol of the next commit. The caller holds the commit lock.
    pub(super) fn protocol(&self) -> Protocol<'_> {
        match (&self.inner.log, self.live_area()) {
            (Some(log), Some(area)) => Protocol::EndStream(log, area),
            (Some(log), None) if self.inner.ordered => Protocol::Epochs(log),
            (Some(log), None) => Protocol::Waits(log),
            (None, _) => Protocol::NoLog,
        }
    }

    /// The script of a frozen commit.
    pub(super) fn script<'a>(
        &self,
        protocol: Protocol<'a>,
        batch: &Batch,
        commit: &Commit,
        wants: Wants,
    ) -> Result<Script<'a>> {
        let Some(log) = protocol.log() else { return Ok(self.script_without_log(batch)) };
        let sequence = commit.sequence;
        let LogBlocks { bufs, crc } =
            LogBlocks::build(&log.format, sequence.0, &batch.versions, &batch.revoked)?;
        match protocol {
            Protocol::Epochs(log) => self.script_epochs(log, batch, commit, bufs, crc, wants),
            Protocol::Waits(log) => {
                self.script_waits(log, commit, bufs, crc, wants != Wants::Durability)
            }
            Protocol::EndStream(log, area) => {
                self.prepare_head(log, area, sequence, commit.log_start)?;
                self.script_end_stream(log, area, protocol.hidden_blocks(), commit, bufs, crc)
            }
            Protocol::NoLog => Ok(self.script_without_log(batch)),
        }
    }

    fn script_epochs<'a>(
        &self,
        log: &'a Log,
        batch: &Batch,
        commit: &Commit,
        bufs: Vec<Buf>,
        crc: u32,
        wants: Wants,
    ) -> Result<Script<'a>> {
        let durable = wants == Wants::Durability;
        let class = if wants == Wants::Order { Class::Async } else { Class::Sync };
        let at = log.after(commit.log_start, bufs.len() as u32);
        let mut body = log.write_requests(commit.log_start, bufs, class)?;
        let block = self.commit_request(log, commit.sequence, at, crc, durable, class)?;
        let (_, offset, _) = block.extent();
        let mut start = self.take_new_start().then_some(Order::Ordered);
        let mut steps = Vec::new();
        match (body.last_mut(), &mut start) {
            (Some(_), _)
                if planted(Bug::NoFlushBeforeCommit) || planted(Bug::CommitBeforeBlocks) => {}
            (Some(last), _) => end_epoch(last),
            (None, Some(order)) => *order = Order::Barrier,
            // There is no ordered write that could end the data's epoch.
            (None, None) if !batch.data.is_empty() => {
                steps.extend([Step::WaitData, Step::Flush("flushing before the commit block")]);
            }
            (None, None) => {}
        }
        // Data of i-transactions may not have been dispatched; it belongs to this epoch.
        steps.extend([Step::CheckRunning, Step::StartData]);
        steps.extend(start.map(|order| Step::LogStart(log, order, class)));
        if log.format.checksum == ChecksumVersion::None {
            // Without checksums, recovery would accept the old contents of a block whose write
            // failed, and a device with native barriers may have written the commit block by then.
            steps.extend([Step::Write(body), Step::WaitOwn(BODY), Step::Write(vec![block])]);
        } else {
            body.push(block);
            steps.push(Step::Write(body));
        }
        steps.push(Step::Enter(Phase::Committing));
        Ok(Script { steps, rest: Rest::CommitInFlight(offset, durable) })
    }

    fn script_waits<'a>(
        &self,
        log: &'a Log,
        commit: &Commit,
        bufs: Vec<Buf>,
        crc: u32,
        starts: bool,
    ) -> Result<Script<'a>> {
        let at = log.after(commit.log_start, bufs.len() as u32);
        let body = Step::Write(log.write_requests(commit.log_start, bufs, Class::Sync)?);
        let block = self.commit_request(log, commit.sequence, at, crc, false, Class::Sync)?;
        let start = self.take_new_start();
        let start = start.then_some(Step::LogStart(log, Order::Ordered, Class::Sync));
        let mut steps: Vec<Step<'_>> = start.into_iter().chain([body]).collect();
        if planted(Bug::CommitBeforeBlocks) {
            steps.extend([Step::Write(vec![block.clone()]), Step::WaitOwn(COMMIT)]);
        }
        if starts {
            steps.push(Step::StartData);
        }
        steps.push(Step::CheckRunning);
        Ok(Script { steps, rest: Rest::CommitBlock(block) })
    }

    fn script_end_stream<'a>(
        &self,
        log: &'a Log,
        area: &'a Area,
        hidden_blocks: u32,
        commit: &Commit,
        mut bufs: Vec<Buf>,
        crc: u32,
    ) -> Result<Script<'a>> {
        let start = log.after(commit.log_start, hidden_blocks);
        let at = log.after(start, bufs.len() as u32);
        bufs.push(self.commit_block(log, commit.sequence, at, crc)?);
        let mut steps = vec![
            Step::Write(log.write_requests(start, bufs, Class::Sync)?),
            Step::StartData,
            Step::CheckpointOlder,
            Step::Wait(BODY),
            Step::Enter(Phase::Committing),
        ];
        if !planted(Bug::StreamEndNotFlushed) {
            steps.push(Step::Flush("flushing before the start of the log moves"));
        }
        steps.extend([Step::CheckRunning, Step::MoveStart(log, area, start)]);
        Ok(Script { steps, rest: Rest::Nothing })
    }

    fn script_without_log<'a>(&self, batch: &Batch) -> Script<'a> {
        let blocks = batch.versions.iter();
        let blocks = blocks.map(|(buffer, version)| (buffer.block(), version.clone())).collect();
        let steps = vec![
            Step::Write(home_requests(self.inner.block_size, blocks, Class::Sync)),
            Step::Wait("writing metadata"),
            Step::Enter(Phase::Committing),
            Step::Flush("flushing metadata"),
        ];
        Script { steps, rest: Rest::Nothing }
    }

    /// Runs the script of a commit; `data` is the file data attached to it.
    pub(super) fn run(
        &self,
        script: Script<'_>,
        commit: &std::sync::Arc<Commit>,
        data: Vec<Ticket>,
    ) -> Result<Sent> {
        // Not waited for. A ticket that is alone runs in the waiting thread, which is fastest.
        let mut own: Vec<Ticket> = Vec::new();
        let mut checkpoint_lock: Option<RwLockWriteGuard<'_, ()>> = None;
        for step in script.steps {
            match step {
                Step::LogStart(log, order, class) => {
                    let ticket = self.submit_log_start(log, commit, order, class)?;
                    own.extend((!planted(Bug::LogStartNotOrdered)).then_some(ticket));
                }
                Step::Write(requests) => own.extend(self.inner.device.submit(requests)),
                Step::StartData => own.iter().chain(&data).for_each(Ticket::start),
                Step::Wait(what) => {
                    wait_with_data(&own, &data, what)?;
                    own.clear();
                }
                Step::WaitOwn(what) => {
                    wait_all(&own, what)?;
                    own.clear();
                }
                Step::WaitData => wait_all(&data, DATA)?,
                Step::Flush(what) => self.inner.flush(what)?,
                Step::Enter(phase) => self.inner.state.lock().pipeline.set_phase(commit, phase),
                Step::CheckRunning => self.check_running()?,
                Step::CheckpointOlder => {
                    checkpoint_lock = Some(self.lock_checkpoint());
                    self.checkpoint_older(commit.sequence)?;
                }
                Step::MoveStart(log, area, start) => {
                    self.end_stream(log, area, commit, start)?;
                }
            }
        }
        drop(checkpoint_lock);
        let (commit_offset, fua) = match script.rest {
            Rest::Nothing => return Ok(Sent::Durable),
            Rest::CommitBlock(block) => return Ok(Sent::Body { data, body: own, block }),
            Rest::CommitInFlight(commit_offset, fua) => (commit_offset, fua),
        };
        let lost = || JournalError::Usage("the device gave no ticket for the commit block".into());
        let commit = own.pop().ok_or_else(lost)?;
        Ok(Sent::InFlight { data, body: own, commit, commit_offset, fua })
    }

    /// The write of a commit block at journal block `at`.
    fn commit_request(
        &self,
        log: &Log,
        sequence: Sequence,
        at: u32,
        crc: u32,
        fua: bool,
        class: Class,
    ) -> Result<Request> {
        let block = self.commit_block(log, sequence, at, crc)?;
        let (home, _) = log.map.run(at)?;
        Ok(Request::Write {
            offset: log.offset(home),
            bufs: vec![block],
            // Without barriers, order is not needed either.
            order: if self.inner.barrier { Order::Barrier } else { Order::Orderless },
            fua: fua && !planted(Bug::CommitNotDurable),
            class,
        })
    }

    /// The commit block of `sequence` for journal block `at`.
    fn commit_block(&self, log: &Log, sequence: Sequence, at: u32, crc: u32) -> Result<Buf> {
        use std::time::{SystemTime, UNIX_EPOCH};
        let clock = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let now = self.inner.commit_time.unwrap_or_else(clock);
        let commit = CommitBlock {
            sequence: sequence.0,
            commit_sec: now.as_secs(),
            commit_nsec: now.subsec_nanos(),
            transaction_crc: crc,
        };
        let mut block = Buf::zeroed(self.inner.block_size);
        commit.encode(&log.format, block.make_mut()).map_err(JournalError::format(at))?;
        Ok(block)
    }
}

/// Waits for the transaction's own blocks and for the file data attached to it.
pub(super) fn wait_with_data(own: &[Ticket], data: &[Ticket], what: &'static str) -> Result<()> {
    if planted(Bug::DataAfterCommit) {
        return wait_all(own, what);
    }
    if !data.is_empty() {
        // Concurrently: a ticket may leave its work to the waiting thread.
        own.iter().for_each(Ticket::start);
    }
    let data = wait_all(data, DATA);
    wait_all(own, what).and(data)
}

/// Waits for the data, the log blocks and the commit block of a commit in flight.
pub(super) fn wait_in_flight(data: &[Ticket], body: &[Ticket], commit: &Ticket) -> Result<()> {
    let data = match planted(Bug::DataAfterCommit) {
        true => Ok(()),
        false => wait_all(data, DATA),
    };
    let body = wait_all(body, BODY);
    let commit = commit.wait().map_err(JournalError::io(COMMIT));
    data.and(body).and(commit)
}

fn end_epoch(request: &mut Request) {
    if let Request::Write { order, .. } = request {
        *order = Order::Barrier;
    }
}
