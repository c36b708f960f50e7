//! Settling: makes dispatched commits durable, in rounds, and retires them in order ([`super::retire`]).
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
//! Invariant: a round takes commits in order, under the settle lock. [`super::failure`] has the commits
//! that fail.

use std::sync::Arc;

use fjord_block::plant::{Bug, planted};
use fjord_block::{DeviceExt, Ticket};

use super::retire::{Dispatched, wait_body};
use super::script::COMMIT;
use crate::error::{JournalError, Result};
use crate::journal::Journal;
use crate::pipeline::{Commit, Sent};
use crate::roles::SettleLock;
use crate::transaction::Phase;

const FLUSH: &str = "flushing commits";

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
    pub(super) fn settle_round(&self, _lock: &SettleLock<'_>) -> Option<Result<()>> {
        let mut commits = self.take_dispatched();
        if commits.is_empty() {
            return None;
        }
        if commits.iter().all(|(_, sent)| matches!(sent, Sent::Written { .. })) {
            commits.extend(self.await_dispatch());
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

    /// The commit that is being dispatched now, if there is one: the flush that the commits of a round
    /// need is to serve it too.
    fn await_dispatch(&self) -> Vec<Dispatched> {
        let mut state = self.inner.state.lock();
        while state.pipeline.is_dispatching() {
            self.inner.dispatched.wait(&mut state);
        }
        drop(state);
        self.take_dispatched()
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
        self.inner.commits_follow.notify_all();
    }

    /// Whether the flush of a next round is near, so that it can make the commit blocks of this one
    /// durable.
    fn expects_follower(&self) -> bool {
        if !self.inner.dual {
            return false;
        }
        let state = self.inner.state.lock();
        state.pipeline.has_unflushed() || state.expects_commits()
    }
}
