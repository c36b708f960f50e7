//! Scripts: what a commit sends to the device, in which order and with which waits, as data.
//!
//! Owns what each protocol ([`super::protocol`]) sends, and the one interpreter:
//!
//! | [`Protocol`] | when | script | durable |
//! |---|---|---|---|
//! | `Epochs` | the device keeps order | {data, log blocks} barrier {commit block} | when settled |
//! | `Waits` | else | log blocks; the rest in rounds ([`super::round`]) | when settled: wait, flush, commit block, FUA or flush |
//! | `EndStream` | fast commits are valid | [`super::switch`] | at the end |
//! | `NoLog` | no log | home locations, wait, flush | at the end |
//!
//! Invariants: no script writes a commit block before everything that it refers to, unless the
//! device keeps them in order; each script checks for a stopped journal before its last write.

use std::sync::Arc;

use fjord_block::lock::RwLockWriteGuard;
use fjord_block::plant::{Bug, planted};
use fjord_block::{Buf, Class, Order, Request, Ticket};
use fjord_format::jbd2::{ChecksumVersion, CommitBlock};

use super::build::LogBlocks;
use super::protocol::Protocol;
use crate::commit_pieces::CommitPieces;
use crate::error::{JournalError, Result};
use crate::fast_commit_area::Area;
use crate::journal::Journal;
use crate::log::{Log, wait_all};
use crate::pipeline::{Commit, Sent};
use crate::transaction::{Batch, Phase, Sequence, Version};

const DATA: &str = "writing file data that a transaction refers to";
pub(super) const BODY: &str = "writing the log";
pub(super) const COMMIT: &str = "writing the commit block";

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
    /// Submits the pieces that nobody has claimed, and waits until the others have been submitted.
    WritePieces(Arc<CommitPieces>),
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

/// What a commit writes before its commit block.
struct Body {
    /// Pieces that other threads may write.
    shared: Option<Arc<CommitPieces>>,
    /// The other blocks: those of revokes come before the pieces, those of versions after them.
    own: LogBlocks,
}

impl Body {
    /// The pieces, the writes of the other blocks, and the journal block behind all.
    fn requests(
        self,
        log: &Log,
        commit: &Commit,
        class: Class,
    ) -> Result<(Option<Arc<CommitPieces>>, Vec<Request>, u32)> {
        let mut bufs = self.own.bufs;
        let shared_blocks =
            self.shared.as_ref().map_or(0, |pieces| pieces.count() * pieces.piece_blocks());
        let end = log.after(commit.log_start, (bufs.len() + shared_blocks) as u32);
        if self.shared.is_none() {
            return Ok((None, log.write_requests(commit.log_start, bufs, class)?, end));
        }
        let behind = bufs.split_off(self.own.revoke_blocks);
        let at = log.after(commit.log_start, (bufs.len() + shared_blocks) as u32);
        let mut requests = log.write_requests(commit.log_start, bufs, class)?;
        requests.extend(log.write_requests(at, behind, class)?);
        Ok((self.shared, requests, end))
    }
}

/// The class of a commit's writes.
fn class_of(wants: Wants) -> Class {
    if wants == Wants::Order { Class::Async } else { Class::Sync }
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

impl Journal {
    /// The script of a frozen commit.
    pub(super) fn script<'a>(
        &self,
        protocol: Protocol<'a>,
        batch: &mut Batch,
        commit: &Commit,
        wants: Wants,
    ) -> Result<Script<'a>> {
        let sequence = commit.sequence;
        let shared = self.share_pieces(protocol, batch, commit, class_of(wants));
        let Some(log) = protocol.log() else {
            return Ok(self.script_without_log(&batch.versions, shared));
        };
        let own = LogBlocks::build(log, sequence.0, &batch.versions, &batch.revoked)?;
        let body = Body { shared, own };
        match protocol {
            Protocol::Epochs(log) => self.script_epochs(log, batch, commit, body, wants),
            Protocol::Waits(log) => {
                self.script_waits(log, commit, body, wants != Wants::Durability)
            }
            Protocol::EndStream(log, area) => {
                self.prepare_head(log, area, sequence, commit.log_start)?;
                let LogBlocks { bufs, crc, .. } = body.own;
                self.script_end_stream(log, area, protocol.hidden_blocks(), commit, bufs, crc)
            }
            Protocol::NoLog => Ok(self.script_without_log(&batch.versions, None)),
        }
    }

    fn script_epochs<'a>(
        &self,
        log: &'a Log,
        batch: &Batch,
        commit: &Commit,
        body: Body,
        wants: Wants,
    ) -> Result<Script<'a>> {
        let durable = wants == Wants::Durability;
        let class = class_of(wants);
        let crc = body.own.crc;
        let (shared, mut body, at) = body.requests(log, commit, class)?;
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
        steps.extend(shared.map(Step::WritePieces));
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
        body: Body,
        starts: bool,
    ) -> Result<Script<'a>> {
        let crc = body.own.crc;
        let (shared, body, at) = body.requests(log, commit, Class::Sync)?;
        let block = self.commit_request(log, commit.sequence, at, crc, false, Class::Sync)?;
        let start = self.take_new_start();
        let start = start.then_some(Step::LogStart(log, Order::Ordered, Class::Sync));
        let shared = shared.map(Step::WritePieces);
        let mut steps: Vec<Step<'_>> =
            start.into_iter().chain(shared).chain([Step::Write(body)]).collect();
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

    fn script_without_log<'a>(
        &self,
        versions: &[Version],
        shared: Option<Arc<CommitPieces>>,
    ) -> Script<'a> {
        let mut steps = Vec::new();
        steps.extend(shared.map(Step::WritePieces));
        steps.extend([
            Step::Write(self.requests_home(versions, Class::Sync)),
            Step::Wait("writing metadata"),
            Step::Enter(Phase::Committing),
            Step::Flush("flushing metadata"),
        ]);
        Script { steps, rest: Rest::Nothing }
    }

    /// Runs the script of a commit; `data` is the file data attached to it.
    pub(super) fn run(
        &self,
        script: Script<'_>,
        commit: &Arc<Commit>,
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
                Step::WritePieces(pieces) => {
                    self.write_pieces(&pieces);
                    let sent = pieces.wait()?;
                    own.extend(sent.into_iter().filter(|_| !planted(Bug::PiecesNotAwaited)));
                }
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
