//! Retiring: a commit that is durable queues its versions for the checkpoint, calls its callbacks, and is
//! published.
//!
//! Owns no state. Invariants: commits retire in order, under the settle lock; versions are queued for
//! checkpoints, and callbacks called with success, only when the commit is durable.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use fjord_block::plant::{Bug, planted};
use fjord_block::{Request, Ticket};

use super::script::{BODY, COMMIT, wait_in_flight, wait_with_data};
use crate::buffer::Buffer;
use crate::error::{JournalError, Result};
use crate::journal::Journal;
use crate::pipeline::{Commit, Ended, Sent};
use crate::stats;
use crate::transaction::{Callback, Phase, Sequence};

/// A dispatched commit and what is left to settle.
pub(super) type Dispatched = (Arc<Commit>, Sent);

impl Journal {
    /// The commits are durable.
    pub(super) fn retire_all(&self, commits: Vec<Dispatched>) {
        if planted(Bug::LaterToldFirst) {
            let newest_first = commits.iter().rev();
            newest_first.for_each(|(commit, _)| call_all(commit.take_callbacks(), &Ok(())));
        }
        if planted(Bug::RetiredNewestFirst) {
            commits.iter().rev().for_each(|(commit, _)| self.retire(commit));
        }
        for (commit, sent) in commits {
            drop(sent);
            if !planted(Bug::RetiredNewestFirst) {
                self.retire(&commit);
            }
            self.conclude(&commit);
        }
    }

    /// The commit is durable: its versions wait for a checkpoint.
    fn retire(&self, commit: &Arc<Commit>) {
        let in_place = self.inner.log.is_none();
        for buffer in &commit.buffers {
            buffer.committed(commit.sequence, in_place);
        }
        self.discard_forgotten(commit.sequence, &commit.forgotten);
        if in_place {
            self.inner.live.remove_clean(commit.buffers.iter());
        }
        let mut state = self.inner.state.lock();
        state.pipeline.set_phase(commit, Phase::Committed);
        state.logged = commit.sequence;
    }

    /// Calls the callbacks of a durable commit, then publishes it.
    pub(super) fn conclude(&self, commit: &Arc<Commit>) {
        if let Some(tid) = commit.ends().filter(|_| planted(Bug::CommittedBeforeCallbacks)) {
            self.inner.state.lock().committed = tid;
        }
        call_all(commit.take_callbacks(), &Ok(()));
        self.count_commit(commit.began);
        let mut state = self.inner.state.lock();
        if self.inner.log.is_none() {
            state.pipeline.remove(commit);
        }
        commit.end(Ended::Durable);
        self.inner.ended.notify_all();
        if self.inner.dual {
            state.late_joiners.commit_ended(commit.callers, commit.began.elapsed());
        }
        if let Some(tid) = commit.ends() {
            state.committed = tid;
            self.inner.committed.store(tid.0, Ordering::Release);
        }
        state.check(self.inner.log.as_ref());
        let bugs = [Bug::EndWakesNobody, Bug::FollowerNotWoken, Bug::OfferLost];
        if self.inner.dual && !bugs.into_iter().any(planted) {
            self.inner.offer_commit_lock(&state);
        }
    }

    fn count_commit(&self, began: Instant) {
        stats::add(&self.inner.counters.commits, 1);
        stats::add_time(&self.inner.counters.commit_nanoseconds, began.elapsed());
    }

    /// Freed blocks must not be checkpointed any more: the next owner may write them as soon as the
    /// callbacks have run. Waits for checkpoint writes in flight.
    fn discard_forgotten(&self, sequence: Sequence, forgotten: &[Arc<Buffer>]) {
        for buffer in forgotten {
            if !buffer.discard_up_to(sequence) {
                self.inner.checkpoint_writes.wait_until(|| buffer.discard_up_to(sequence));
            }
        }
        self.inner.live.remove_clean(forgotten.iter());
    }
}

/// Of commits in order whose writes have succeeded: number of those that the FUA of one of them made
/// durable.
pub(super) fn durable_count(commits: &[Dispatched]) -> usize {
    let is_durable =
        |(_, sent): &Dispatched| matches!(sent, Sent::Durable | Sent::InFlight { fua: true, .. });
    commits.iter().rposition(is_durable).map_or(0, |newest| newest + 1)
}

/// Calls callbacks with the outcome of their commit.
pub(super) fn call_all(callbacks: Vec<Callback>, outcome: &Result<()>) {
    for callback in callbacks {
        callback(outcome.clone());
    }
}

impl Sent {
    /// Waits for the submitted writes.
    pub(super) fn wait(&self) -> Result<()> {
        match self {
            Sent::Durable | Sent::Written { ticket: None, .. } => Ok(()),
            Sent::Written { ticket: Some(ticket), .. } => {
                ticket.wait().map_err(JournalError::io(COMMIT))
            }
            Sent::Body { data, body, .. } => wait_body(data, body),
            Sent::InFlight { data, body, commit, .. } => wait_in_flight(data, body, commit),
        }
    }

    /// Whether a round has to flush before it can write the commit block, or retire the commit.
    pub(super) fn needs_flush(&self) -> bool {
        matches!(self, Sent::Body { .. } | Sent::Written { .. })
    }

    /// The write of the commit block; from now on it may be on the device.
    pub(super) fn write_block(&mut self, with_fua: bool) -> Option<Request> {
        let commit_offset = self.commit_offset()?;
        let written = Sent::Written { commit_offset, ticket: None };
        let Sent::Body { block, .. } = std::mem::replace(self, written) else {
            return None;
        };
        let mut block = block;
        if let Request::Write { fua, .. } = &mut block {
            *fua = with_fua && !planted(Bug::CommitNotDurable);
        }
        Some(block)
    }

    /// The write of the commit block, which is submitted.
    pub(super) fn written_by(&mut self, write: Ticket) {
        if let Sent::Written { ticket, .. } = self {
            *ticket = Some(write);
        }
    }

    /// Byte offset of the commit block.
    pub(super) fn commit_offset(&self) -> Option<u64> {
        match self {
            Sent::Durable => None,
            Sent::Body { block, .. } => Some(block.extent().1),
            Sent::Written { commit_offset, .. } | Sent::InFlight { commit_offset, .. } => {
                Some(*commit_offset)
            }
        }
    }

    /// Whether the device may have the commit block.
    pub(super) fn may_be_on_disk(&self) -> bool {
        matches!(self, Sent::Written { .. } | Sent::InFlight { .. })
    }
}

/// Waits for the log blocks and the data of a commit.
pub(super) fn wait_body(data: &[Ticket], body: &[Ticket]) -> Result<()> {
    wait_with_data(body, data, BODY)
}
