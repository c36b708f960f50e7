//! Commits over a device that keeps order: all of a transaction is submitted at once, in two
//! epochs, {data, log blocks} and {commit block}, and nobody waits in between.
//!
//! Owns [`Flying`]: what was submitted and whose outcome is not known. A caller that wants
//! durability asks FUA of the commit block (the device makes a write and a flush of it where it
//! has none) and waits for it. One that wants order only (`fbarrier`) leaves the transaction
//! flying; one flush ends all that fly.
//!
//! A device with native barriers may have the commit block by the time that something before it
//! turns out to have failed. The commit block is then overwritten, so that recovery does not take
//! the transaction for whole.
//!
//! Invariants: transactions fly in order and end in order, in the committer's place; none is
//! handed to the checkpoint, and no callback told of success, before its commit block is durable.

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

/// A transaction, or parts of one, whose log blocks are with the device.
pub(crate) struct Flying {
    tid: Tid,
    /// The transaction, if this is all that was left of it.
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
    /// The commit block is durable when its ticket is done.
    fua: bool,
}

impl Flying {
    pub(crate) fn tid(&self) -> Tid {
        self.tid
    }
}

/// What [`Journal::send`] submitted.
struct Sent {
    log_start: u32,
    log_blocks: u32,
    body: Vec<Ticket>,
    commit: Ticket,
    commit_offset: u64,
}

impl Journal {
    /// Submits the running transaction, which there is. Nobody waits for it, unless it has to take
    /// the place of fast commits. The caller has the committer's place. On failure the journal is stopped and every callback told.
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

    /// Submits what is frozen; with `durable` somebody waits for it. Returns how many log blocks
    /// it takes.
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
        self.inner.flying.lock().push_back(Flying {
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
        self.check_straight(log, log_blocks)?;
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
            // Nothing that could end the data's epoch.
            None if !batch.data.is_empty() => {
                wait_all(&batch.data, DATA)?;
                self.inner.flush("flushing before the commit block")?;
            }
            None => {}
        }
        self.check_running()?;
        // Those that i-transactions carry may be in nobody's hands yet, and belong into this epoch.
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
            // Without checksums recovery would take what lies in the place of a block that could
            // not be written; a device with native barriers may have the commit block by the time
            // that shows.
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

    /// Waits for all transactions that fly and ends them. The caller has the committer's place.
    /// On failure the journal is stopped and every callback told.
    pub(crate) fn finish_flying(&self) -> Result<()> {
        let flying = std::mem::take(&mut *self.inner.flying.lock());
        let Some(last) = flying.back() else { return Ok(()) };
        let end = if last.fua {
            last.commit.wait().map_err(JournalError::io(COMMIT))
        } else {
            self.inner.flush("flushing commits")
        };
        // The failure of what was needed first says more than that of the end.
        let parts: Vec<_> = flying.iter().map(wait_parts).collect();
        if let Some(first) = flying.iter().zip(&parts).find(|(_, part)| part.is_err()) {
            self.take_back(first.0);
        }
        let result = parts.into_iter().chain([end]).fold(Ok(()), Result::and);
        if let Err(error) = &result {
            self.abort(error.clone());
        }
        let mut outcome = Ok(());
        for flying in flying {
            let Flying { whole, sequence, log_start, buffers, forgotten, .. } = flying;
            if result.is_ok() {
                self.logged(whole, sequence, log_start, buffers, &forgotten);
            }
            let result = result.as_ref().map(drop);
            let told = self.conclude(whole, flying.began, flying.callbacks, result);
            outcome = outcome.and(told);
        }
        outcome
    }

    /// Overwrites the commit block of a transaction of which something failed; its own failure
    /// does not say whether the device has it. With it goes all that follows in the log.
    fn take_back(&self, flying: &Flying) {
        let request = Request::Write {
            offset: flying.commit_offset,
            bufs: vec![Buf::zeroed(self.inner.block_size)],
            // Order is broken; this need not wait for anything.
            order: Order::Orderless,
            fua: true,
            class: Class::Sync,
        };
        if let Err(error) = self.inner.device.submit_one(request).wait() {
            tracing::warn!(%error, "cannot take back a commit; recovery may refuse the log");
        }
    }

    /// The journal has stopped: nobody will wait for what flies. Tells its callbacks, unless the
    /// thread that commits right now is about to.
    pub(crate) fn fail_flying(&self, error: &JournalError) {
        let Some(_place) = self.inner.try_lock_committer() else { return };
        let flying = std::mem::take(&mut *self.inner.flying.lock());
        for callback in flying.into_iter().flat_map(|flying| flying.callbacks) {
            callback(Err(error.clone()));
        }
    }
}

const DATA: &str = "writing file data that a transaction refers to";
const BODY: &str = "writing the log";
const COMMIT: &str = "writing the commit block";

/// Waits for the data, the log blocks and the commit block of one transaction.
fn wait_parts(flying: &Flying) -> Result<()> {
    let data = match planted(Bug::DataAfterCommit) {
        true => Ok(()),
        false => wait_all(&flying.data, DATA),
    };
    let body = wait_all(&flying.body, BODY);
    let commit = flying.commit.wait().map_err(JournalError::io(COMMIT));
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
