//! Settling: makes dispatched commits durable, and retires them in order.
//!
//! A round settles every commit that has been dispatched by then:
//!
//! | commits | round |
//! |---|---|
//! | in order ([`Sent::InFlight`]) | one flush, or the FUA of the only one; wait for their writes |
//! | not in order ([`Sent::Body`]) | wait for log blocks and data; flush; write the commit blocks |
//! | written ([`Sent::Written`]) | durable by the flush of the round |
//!
//! So over a device that keeps no order, the flush that a commit needs before its commit block also
//! makes the commit blocks before it durable: one flush for each round of a busy pipeline instead of
//! two. A commit that is alone gets FUA on its commit block.
//!
//! Invariants: commits retire in order, under the settle lock; versions are queued for checkpoints,
//! and callbacks called with success, only when the commit is durable. [`super::failure`] has the
//! commits that fail.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use fjord_block::plant::{Bug, planted};
use fjord_block::{DeviceExt, Request, Ticket};

use super::script::{COMMIT, wait_in_flight, wait_with_data};
use crate::buffer::Buffer;
use crate::error::{JournalError, Result};
use crate::journal::Journal;
use crate::pipeline::{Commit, Sent};
use crate::roles::SettleLock;
use crate::state::State;
use crate::stats;
use crate::transaction::{Callback, Phase, Sequence};

const FLUSH: &str = "flushing commits";

/// A dispatched commit and what is left to settle.
pub(super) type Dispatched = (Arc<Commit>, Sent);

impl Journal {
    /// Settles all commits that have been dispatched.
    ///
    /// # Errors
    /// The failure of one of them; the journal has stopped.
    pub(crate) fn settle(&self) -> Result<()> {
        let lock = self.inner.lock_settling();
        let mut result = Ok(());
        while let Some(settled) = self.settle_round(&lock) {
            result = result.and(settled);
        }
        result
    }

    /// Gives every dispatched commit its outcome: for callers that find the journal stopped.
    pub fn settle_in_flight(&self) {
        // A failure is that of the commits, whose callers see it.
        let _ = self.settle();
    }

    /// Settles dispatched commits until `done`, or waits until another thread has. What `done` waits
    /// for has been dispatched.
    ///
    /// # Errors
    /// The journal has stopped, and no commit in flight can fulfil `done`.
    pub(crate) fn settle_until(&self, done: impl Fn(&State) -> bool) -> Result<()> {
        while let Some(lock) = self.take_settle_turn(&done)? {
            // A failure stops the journal, which the next turn reports unless `done`.
            let _ = self.settle_round(&lock);
        }
        Ok(())
    }

    /// One round, unless another thread settles. For the holder of the commit lock.
    pub(super) fn settle_once(&self) -> Result<()> {
        let Some(lock) = self.inner.try_lock_settling() else { return Ok(()) };
        self.settle_round(&lock).unwrap_or(Ok(()))
    }

    /// If the journal has stopped: gives every dispatched commit its outcome, unless another thread
    /// does.
    pub(crate) fn settle_if_stopped(&self) {
        if self.check_running().is_ok() {
            return;
        }
        let Some(lock) = self.inner.try_lock_settling() else { return };
        while self.settle_round(&lock).is_some() {}
    }

    /// One round; `None` if nothing has been dispatched.
    fn settle_round(&self, _lock: &SettleLock<'_>) -> Option<Result<()>> {
        let commits = self.take_dispatched();
        if commits.is_empty() {
            return None;
        }
        let (commits, stopped) = self.split_stopped(commits);
        if self.inner.dual && planted(Bug::ToldBeforeFlush) {
            commits.iter().for_each(|(commit, _)| self.conclude(commit));
        }
        let in_order = !commits.iter().any(|(_, sent)| sent.needs_flush());
        let settled = match in_order {
            true => self.settle_in_order(commits),
            false => self.settle_by_flush(commits),
        };
        let failed = match stopped {
            Some((commits, error)) => self.fail(commits, &error),
            None => Ok(()),
        };
        Some(settled.and(failed))
    }

    /// Takes what is left to settle of the dispatched commits, oldest first.
    fn take_dispatched(&self) -> Vec<Dispatched> {
        let state = self.inner.state.lock();
        let is_in_round = |commit: &&Arc<Commit>| commit.is_dispatched() && !commit.can_settle();
        let in_flight = state.pipeline.in_flight().skip_while(is_in_round);
        in_flight.map_while(|commit| Some((commit.clone(), commit.take_sent()?))).collect()
    }

    /// Commits whose writes the device keeps in order, or that are durable.
    fn settle_in_order(&self, mut commits: Vec<Dispatched>) -> Result<()> {
        let has_fua = |(_, sent): &Dispatched| matches!(sent, Sent::InFlight { fua: true, .. });
        let covered = commits.iter().find(|commit| has_fua(commit) && planted(Bug::FuaCoversLater));
        let Some((_, last)) = covered.or(commits.last()) else { return Ok(()) };
        let end = match last {
            Sent::InFlight { fua: false, .. } => self.inner.flush(FLUSH),
            Sent::InFlight { commit, .. } => commit.wait().map_err(JournalError::io(COMMIT)),
            Sent::Durable | Sent::Body { .. } | Sent::Written { .. } => Ok(()),
        };
        if planted(Bug::RoundJoinedLate) {
            commits.extend(self.take_dispatched());
        }
        // The failure of an earlier write is more useful than that of the flush.
        let mut outcomes = commits.iter().map(|(_, sent)| sent.wait()).enumerate();
        let failed = outcomes.find_map(|(index, outcome)| Some((index, outcome.err()?)));
        match (failed, end) {
            (None, Ok(())) => {
                self.retire_all(commits);
                Ok(())
            }
            // A write behind these commits may have failed the flush; then another one covers them.
            (None, Err(error)) => {
                let count = commits.len();
                self.fail_behind(commits, count, error)
            }
            (Some((index, error)), _) => self.fail_behind(commits, index, error),
        }
    }

    /// Commits over a device that keeps no order: `commits` are written ones, then others.
    fn settle_by_flush(&self, mut commits: Vec<Dispatched>) -> Result<()> {
        let is_written = |(_, sent): &Dispatched| matches!(sent, Sent::Written { .. });
        let written_count = commits.iter().take_while(|commit| is_written(commit)).count();
        let bodies = commits.iter().enumerate().skip(written_count);
        let mut failed = None;
        for (index, (_, sent)) in bodies {
            let waited = match sent {
                Sent::Body { body, .. }
                    if written_count > 0 && planted(Bug::LaterDataNotAwaited) =>
                {
                    wait_body(&[], body)
                }
                sent => sent.wait(),
            };
            if let Err(error) = waited {
                failed = Some((index, error));
                break;
            }
        }
        if let Some((index, error)) = failed {
            return self.fail_behind(commits, index, error);
        }
        if self.inner.dual && planted(Bug::CommitBlockBeforeFlush) {
            let blocks = commits.iter_mut().filter_map(|(_, sent)| sent.write_block(false));
            let blocks = self.inner.device.submit(blocks.collect());
            Ticket::wait_all(&blocks).map_err(JournalError::io(COMMIT))?;
        }
        if !planted(Bug::NoFlushBeforeCommit)
            && let Err(error) = self.inner.flush("flushing before the commit block")
        {
            return self.fail_behind(commits, 0, error);
        }
        let bodies = commits.split_off(written_count);
        self.retire_all(commits);
        self.write_commit_blocks(bodies)
    }

    /// Writes the commit blocks of commits whose log blocks and data are durable.
    fn write_commit_blocks(&self, mut commits: Vec<Dispatched>) -> Result<()> {
        if commits.is_empty() {
            return Ok(());
        }
        self.enter_committing(&commits);
        let alone = commits.len() == 1 && !self.expects_follower();
        let mut failed = None;
        let mut tickets = Vec::with_capacity(commits.len());
        for (index, (commit, sent)) in commits.iter_mut().enumerate() {
            // A shutdown meanwhile: the transaction must not be committed.
            if let Some(error) = self.stopped_for(commit.sequence) {
                failed = Some((index, error));
                break;
            }
            if let Some(request) = sent.write_block(alone && self.inner.barrier) {
                tickets.push((index, self.inner.device.submit_one(request)));
            }
        }
        if tickets.len() > 1 {
            tickets.iter().for_each(|(_, ticket)| ticket.start());
        }
        // All of them, since those behind a failure are overwritten.
        for (index, ticket) in tickets.into_iter().rev() {
            if let Err(error) = ticket.wait() {
                failed = Some((index, JournalError::io(COMMIT)(error)));
            }
        }
        if let Some((index, error)) = failed {
            return self.fail_behind(commits, index, error);
        }
        if alone || !self.inner.barrier || planted(Bug::CommitBlockNotFlushed) {
            self.retire_all(commits);
            return Ok(());
        }
        for (commit, sent) in commits {
            commit.put_sent(sent);
        }
        Ok(())
    }

    /// The log blocks of the commits are durable, so the holder of the commit lock need not wait.
    fn enter_committing(&self, commits: &[Dispatched]) {
        let mut state = self.inner.state.lock();
        for (commit, _) in commits {
            state.pipeline.set_phase(commit, Phase::Committing);
        }
        if !planted(Bug::FollowerNotWoken) {
            self.inner.commits_follow.notify_all();
        }
    }

    /// Whether the flush of a next round is near, so that it can make the commit blocks of this one
    /// durable.
    fn expects_follower(&self) -> bool {
        if !self.inner.dual {
            return false;
        }
        let state = self.inner.state.lock();
        state.pipeline.has_unflushed() || state.roles.expects_commits()
    }

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
        let home = self.inner.log.is_none();
        for buffer in &commit.buffers {
            buffer.committed(commit.sequence, home);
        }
        self.discard_forgotten(commit.sequence, &commit.forgotten);
        if home {
            self.remove_clean(commit.buffers.iter());
        }
        let mut state = self.inner.state.lock();
        if home {
            state.pipeline.remove(commit);
        } else {
            state.pipeline.set_phase(commit, Phase::Committed);
        }
        state.logged = commit.sequence;
    }

    /// Calls the callbacks of a durable commit, then publishes it.
    pub(super) fn conclude(&self, commit: &Commit) {
        if let Some(tid) = commit.ends().filter(|_| planted(Bug::CommittedBeforeCallbacks)) {
            self.inner.state.lock().committed = tid;
        }
        call_all(commit.take_callbacks(), &Ok(()));
        self.count_commit(commit.began);
        let mut state = self.inner.state.lock();
        commit.unsettled.lock().settled = true;
        if let Some(tid) = commit.ends() {
            state.committed = tid;
            self.inner.committed.store(tid.0, Ordering::Release);
        } else if let Some(running) = &mut state.running
            && running.transaction.tid == commit.tid
        {
            running.generations_committed = running.generations_committed.max(commit.generation);
        }
        state.check(self.inner.log.as_ref());
    }

    fn count_commit(&self, began: Instant) {
        stats::add(&self.inner.counters.commits, 1);
        stats::add_time(&self.inner.counters.commit_nanoseconds, began.elapsed());
    }

    /// Freed blocks must not be checkpointed any more: the next owner may write them as soon as the
    /// callbacks have run. Waits for checkpoint writes in flight.
    fn discard_forgotten(&self, sequence: Sequence, forgotten: &[Arc<Buffer>]) {
        for buffer in forgotten {
            if buffer.discard_up_to(sequence) {
                continue;
            }
            let _promoted = self.inner.home_writes.promote();
            let mut idle = self.inner.home_lock.lock();
            while !buffer.discard_up_to(sequence) {
                self.inner.home_idle.wait(&mut idle);
            }
        }
        self.remove_clean(forgotten.iter());
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
    fn wait(&self) -> Result<()> {
        match self {
            Sent::Durable | Sent::Written { .. } => Ok(()),
            Sent::Body { data, body, .. } => wait_body(data, body),
            Sent::InFlight { data, body, commit, .. } => wait_in_flight(data, body, commit),
        }
    }

    /// Whether a round has to flush before it can write the commit block, or retire the commit.
    fn needs_flush(&self) -> bool {
        matches!(self, Sent::Body { .. } | Sent::Written { .. })
    }

    /// The write of the commit block; from now on it may be on the device.
    pub(super) fn write_block(&mut self, with_fua: bool) -> Option<Request> {
        let commit_offset = self.commit_offset()?;
        let Sent::Body { block, .. } = std::mem::replace(self, Sent::Written { commit_offset })
        else {
            return None;
        };
        let mut block = block;
        if let Request::Write { fua, .. } = &mut block {
            *fua = with_fua && !planted(Bug::CommitNotDurable);
        }
        Some(block)
    }

    /// Byte offset of the commit block.
    pub(super) fn commit_offset(&self) -> Option<u64> {
        match self {
            Sent::Durable => None,
            Sent::Body { block, .. } => Some(block.extent().1),
            Sent::Written { commit_offset } | Sent::InFlight { commit_offset, .. } => {
                Some(*commit_offset)
            }
        }
    }

    /// Whether the device may have the commit block.
    pub(super) fn may_be_on_disk(&self) -> bool {
        matches!(self, Sent::Written { .. } | Sent::InFlight { .. })
    }
}

fn wait_body(data: &[Ticket], body: &[Ticket]) -> Result<()> {
    wait_with_data(body, data, super::script::BODY)
}
