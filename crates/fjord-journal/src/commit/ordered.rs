//! Commits over a device that keeps order: a transaction is submitted at once, in two epochs,
//! {data, log blocks} and {commit block}, without a wait in between.
//!
//! Owns [`InFlight`]: commits whose outcome is not known. For durability, the commit block is
//! written with FUA (a device without FUA makes it a write and a flush) and waited for. For order
//! alone (`fbarrier`), the commit stays in flight; one flush later ends all commits in flight.
//!
//! A device with native barriers may have written the commit block before the failure of an earlier
//! write is known. The commit block is then overwritten, so that recovery does not accept the
//! transaction.
//!
//! Invariants: commits are submitted and ended in order, under the commit lock; versions are queued
//! for checkpoints, and callbacks called with success, only when the commit block is durable.

use std::sync::Arc;
use std::time::Instant;

use fjord_block::plant::{Bug, planted};
use fjord_block::{Buf, Class, DeviceExt, Order, Request, Ticket};
use fjord_format::jbd2::ChecksumVersion;
use fjord_format::types::Tid;

use super::build::LogBlocks;
use crate::buffer::Buffer;
use crate::error::{JournalError, Result};
use crate::journal::Journal;
use crate::log::{Log, wait_all};
use crate::transaction::{Batch, Callback, Phase, Sequence};

/// A transaction, or parts of one, whose log blocks have been submitted.
pub(crate) struct InFlight {
    tid: Tid,
    /// The transaction, if this commit ends it.
    whole: Option<Tid>,
    sequence: Sequence,
    began: Instant,
    log_start: u32,
    buffers: Vec<Arc<Buffer>>,
    forgotten: Vec<Arc<Buffer>>,
    callbacks: Vec<Callback>,
    data: Vec<Ticket>,
    body: Vec<Ticket>,
    commit: Ticket,
    /// Byte offset of the commit block.
    commit_offset: u64,
    /// The commit block was submitted with FUA.
    fua: bool,
}

impl InFlight {
    pub(crate) fn tid(&self) -> Tid {
        self.tid
    }
}

/// Tickets of [`Journal::send`].
struct Sent {
    log_start: u32,
    log_blocks: u32,
    body: Vec<Ticket>,
    commit: Ticket,
    commit_offset: u64,
}

impl Journal {
    /// Submits the running transaction, which must exist, without waiting, unless it ends a stream
    /// of fast commits. The caller holds the commit lock. On failure the journal stops and every
    /// callback is called with the error.
    pub(crate) fn begin_commit(&self) -> Result<()> {
        let began = Instant::now();
        let locked = self.lock_running()?;
        self.complete_whole(&locked)?;
        let batch = locked.transaction.freeze(locked.sequence);
        if self.live_area().is_some() {
            return self.commit_batch(batch, began).map(drop);
        }
        self.begin_batch(batch, began, false).map(drop)
    }

    /// Submits the frozen blocks; with `durable` the caller waits for them. Returns the number of
    /// log blocks.
    pub(super) fn begin_batch(
        &self,
        mut batch: Batch,
        began: Instant,
        durable: bool,
    ) -> Result<u32> {
        let callbacks = std::mem::take(&mut batch.callbacks);
        self.count_blocks(&batch.versions);
        let log = self.inner.log_or_usage();
        let sent = match log.and_then(|log| self.send(log, &batch, durable)) {
            Ok(sent) => sent,
            Err(error) => {
                self.abort(error.clone());
                return self.conclude(None, began, callbacks, Err(&error)).map(|()| 0);
            }
        };
        self.inner.in_flight.lock().push_back(InFlight {
            tid: batch.tid,
            whole: batch.whole(),
            sequence: batch.sequence,
            began,
            log_start: sent.log_start,
            buffers: batch.versions.into_iter().map(|(buffer, _)| buffer).collect(),
            forgotten: batch.forgotten,
            callbacks,
            data: batch.data,
            body: sent.body,
            commit: sent.commit,
            commit_offset: sent.commit_offset,
            fua: durable,
        });
        Ok(sent.log_blocks)
    }

    fn send(&self, log: &Log, batch: &Batch, durable: bool) -> Result<Sent> {
        let sequence = batch.sequence;
        let body_blocks = self.count_body(log, batch);
        let log_blocks = body_blocks + 1;
        self.check_no_wrap(log, log_blocks)?;
        let log_start = self.start_flushing(batch, log_blocks);
        // From here on handles start again and modify the same buffers.
        let blocks = LogBlocks::build(&log.format, sequence.0, &batch.versions, &batch.revoked)?;
        self.mark_log_in_use(log, sequence, log_start, !batch.revoked.is_empty())?;

        let class = if durable { Class::Sync } else { Class::Async };
        let mut body = log.write_requests(log_start, blocks.bufs, class)?;
        let at = log.after(log_start, body_blocks);
        let mut commit = self.commit_request(log, sequence, at, blocks.crc, durable)?;
        set_class(&mut commit, class);
        let (_, commit_offset, _) = commit.extent();
        match body.last_mut() {
            Some(_) if planted(Bug::NoFlushBeforeCommit) || planted(Bug::CommitBeforeBlocks) => {}
            Some(last) => end_epoch(last),
            // There is no ordered write that could end the data's epoch.
            None if !batch.data.is_empty() => {
                wait_all(&batch.data, DATA)?;
                self.inner.flush("flushing before the commit block")?;
            }
            None => {}
        }
        self.check_running()?;
        // Deferred writes of carried data may not be submitted yet, and belong in this epoch.
        batch.data.iter().for_each(Ticket::start);
        let (body, commit) = self.submit(log, body, commit)?;
        self.set_phase(sequence, Phase::Committing);
        Ok(Sent { log_start, log_blocks, body, commit, commit_offset })
    }

    /// Submits the log blocks and the commit block.
    fn submit(
        &self,
        log: &Log,
        mut body: Vec<Request>,
        commit: Request,
    ) -> Result<(Vec<Ticket>, Ticket)> {
        if log.format.checksum == ChecksumVersion::None {
            // Without checksums, recovery would accept stale contents in place of a failed block; a
            // device with native barriers may have written the commit block before the failure is
            // known.
            let body = self.inner.device.submit(body);
            wait_all(&body, BODY)?;
            return Ok((body, self.inner.device.submit_one(commit)));
        }
        body.push(commit);
        let mut tickets = self.inner.device.submit(body);
        let lost = || JournalError::Usage("the device gave no ticket for the commit block".into());
        let commit = tickets.pop().ok_or_else(lost)?;
        Ok((tickets, commit))
    }

    /// Waits for all commits in flight and ends them. The caller holds the commit lock. On failure
    /// the journal stops and every callback is called with the error.
    pub(crate) fn finish_in_flight(&self) -> Result<()> {
        let in_flight = std::mem::take(&mut *self.inner.in_flight.lock());
        let Some(last) = in_flight.back() else { return Ok(()) };
        let end = if last.fua {
            last.commit.wait().map_err(JournalError::io(COMMIT))
        } else {
            self.inner.flush("flushing commits")
        };
        // The earliest failure is the most informative.
        let parts: Vec<_> = in_flight.iter().map(wait_parts).collect();
        if let Some(first) = in_flight.iter().zip(&parts).find(|(_, part)| part.is_err()) {
            self.invalidate_commit(first.0);
        }
        let result = parts.into_iter().chain([end]).fold(Ok(()), Result::and);
        if let Err(error) = &result {
            self.abort(error.clone());
        }
        let mut outcome = Ok(());
        for in_flight in in_flight {
            let InFlight { whole, sequence, log_start, buffers, forgotten, .. } = in_flight;
            if result.is_ok() {
                self.logged(whole, sequence, log_start, buffers, &forgotten);
            }
            let result = result.as_ref().map(drop);
            let told = self.conclude(whole, in_flight.began, in_flight.callbacks, result);
            outcome = outcome.and(told);
        }
        outcome
    }

    /// Overwrites the commit block of a transaction after a failed write; even if the commit block
    /// failed, the device may have it. All later commits in the log become invalid with it.
    fn invalidate_commit(&self, in_flight: &InFlight) {
        let request = Request::Write {
            offset: in_flight.commit_offset,
            bufs: vec![Buf::zeroed(self.inner.block_size)],
            // Order is already broken: no ordered write.
            order: Order::Orderless,
            fua: true,
            class: Class::Sync,
        };
        if let Err(error) = self.inner.device.submit_one(request).wait() {
            tracing::warn!(%error, "cannot invalidate a commit block after a failed write; \
                                    recovery may refuse the log");
        }
    }

    /// The journal has stopped: calls the callbacks of commits in flight with the error, unless the
    /// committing thread is about to.
    pub(crate) fn fail_in_flight(&self, error: &JournalError) {
        let Some(_place) = self.inner.try_lock_committer() else { return };
        let in_flight = std::mem::take(&mut *self.inner.in_flight.lock());
        for callback in in_flight.into_iter().flat_map(|in_flight| in_flight.callbacks) {
            callback(Err(error.clone()));
        }
    }
}

const DATA: &str = "writing file data that a transaction refers to";
const BODY: &str = "writing the log";
const COMMIT: &str = "writing the commit block";

/// Waits for the data, the log blocks and the commit block of one transaction.
fn wait_parts(in_flight: &InFlight) -> Result<()> {
    let data = match planted(Bug::DataAfterCommit) {
        true => Ok(()),
        false => wait_all(&in_flight.data, DATA),
    };
    let body = wait_all(&in_flight.body, BODY);
    let commit = in_flight.commit.wait().map_err(JournalError::io(COMMIT));
    data.and(body).and(commit)
}

fn set_class(request: &mut Request, wanted: Class) {
    if let Request::Write { class, .. } = request {
        *class = wanted;
    }
}

fn end_epoch(request: &mut Request) {
    if let Request::Write { order, .. } = request {
        *order = Order::Barrier;
    }
}
