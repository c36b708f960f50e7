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
//! Over a device that keeps no order a commit needs a flush before its commit block and another one
//! after it. Dual mode has two ways to overlap them with the next commit:
//!
//! - few threads: the commit block has FUA. The thread that waits for it has released the settle
//!   lock ([`LastWrite`]), so the next commit is dispatched and flushed meanwhile;
//! - many threads: the settling thread dispatches the next commit and writes this one's commit block
//!   at once; one flush makes both durable: that commit block, and the log blocks of the next.
//!
//! What the commits of the second row send is [`super::round`]'s.
//!
//! Invariants: a round takes commits in order, under the settle lock; no commit block is written, and
//! no commit retires, before every earlier commit has an outcome. [`super::failure`] has the commits
//! that fail.

use std::sync::Arc;

use fjord_block::plant::{Bug, planted};
use fjord_block::{DeviceExt, Request};

use super::protocol::Protocol;
use super::retire::Dispatched;
use super::script::{COMMIT, Wants};
use crate::error::{JournalError, Result};
use crate::journal::Journal;
use crate::pipeline::{Commit, Sent};
use crate::roles::SettleLock;
use crate::state::State;
use crate::transaction::Phase;

const FLUSH: &str = "flushing commits";
/// From this number of waiting threads on, a flush is shared by the commit before them and theirs.
/// Fewer threads are served sooner if both commits flush by themselves, at the same time. Debug
/// builds share from one thread on, so that tests with few threads take both ways.
const SHARING_THREADS_MIN: u32 = if cfg!(debug_assertions) { 1 } else { 4 };

/// Result of a round.
struct Round {
    result: Result<()>,
    last_write: Option<LastWrite>,
}

/// The commit block of a commit whose log blocks and data are durable, with FUA. Nothing else is left
/// to do until it retires, and no other round touches it.
struct LastWrite {
    commit: Arc<Commit>,
    sent: Sent,
    block: Request,
}

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
        result.and(self.await_last_writes())
    }

    /// Rounds for a thread that waits for one of the commits, until `done`. The lock is held only
    /// until the commit block of a lone commit is to be written, so that the next commits are flushed
    /// meanwhile. A failure stops the journal.
    pub(super) fn settle_until(&self, lock: SettleLock<'_>, done: impl Fn(&State) -> bool) {
        while let Some(round) = self.round(&lock) {
            if round.last_write.is_some() {
                drop(lock);
                // The failure is that of the commits, whose callers see it.
                let _ = self.end_round(round);
                return;
            }
            if done(&self.inner.state.lock()) {
                return;
            }
        }
    }

    /// Gives every dispatched commit its outcome: for callers that find the journal stopped.
    pub fn settle_in_flight(&self) {
        // A failure is that of the commits, whose callers see it.
        let _ = self.settle();
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
    fn settle_round(&self, lock: &SettleLock<'_>) -> Option<Result<()>> {
        self.round(lock).map(|round| self.end_round(round))
    }

    /// One round, except for the last write of a lone commit.
    fn round(&self, _lock: &SettleLock<'_>) -> Option<Round> {
        let commits = self.take_dispatched();
        if commits.is_empty() {
            return None;
        }
        let _unwinding: Vec<_> =
            commits.iter().map(|(commit, _)| self.fails_on_panic(commit)).collect();
        let (commits, stopped) = self.split_stopped(commits);
        if self.inner.dual && planted(Bug::ToldBeforeFlush) {
            commits.iter().for_each(|(commit, _)| self.conclude(commit));
        }
        let in_order = !commits.iter().any(|(_, sent)| sent.needs_flush());
        let (settled, last_write) = match in_order {
            true => (self.settle_in_order(commits), None),
            false => match self.settle_by_flush(commits) {
                Ok(last_write) => (Ok(()), last_write),
                Err(error) => (Err(error), None),
            },
        };
        let failed = match stopped {
            Some((commits, error)) => self.fail(commits, &error),
            None => Ok(()),
        };
        Some(Round { result: settled.and(failed), last_write })
    }

    /// Writes the commit block of a lone commit, if the round has left one.
    fn end_round(&self, round: Round) -> Result<()> {
        let Round { result, last_write } = round;
        let Some(LastWrite { commit, sent, block }) = last_write else { return result };
        let _unwinding = self.fails_on_panic(&commit);
        let written = self.inner.device.submit_one(block).wait();
        let ended = match written {
            Ok(()) => {
                self.retire_all(vec![(commit.clone(), sent)]);
                Ok(())
            }
            Err(error) => {
                self.fail_behind(vec![(commit.clone(), sent)], 0, JournalError::io(COMMIT)(error))
            }
        };
        result.and(ended)
    }

    /// Waits until commits whose last write another thread waits for have an outcome.
    fn await_last_writes(&self) -> Result<()> {
        let mut state = self.inner.state.lock();
        let mut result = Ok(());
        while let Some(commit) = state.pipeline.last_write_in_flight().cloned() {
            while !commit.has_ended() {
                self.inner.ended.wait(&mut state);
            }
            if commit.has_failed() {
                result = result.and(self.check_running());
            }
        }
        result
    }

    /// Waits until every commit before the first of `commits` has an outcome.
    fn await_predecessors(&self, commits: &[Dispatched]) {
        let Some((first, _)) = commits.first() else { return };
        let mut state = self.inner.state.lock();
        while state.pipeline.has_open_before(first) && !planted(Bug::LastWriteOvertaken) {
            self.inner.ended.wait(&mut state);
        }
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
    fn settle_by_flush(&self, mut commits: Vec<Dispatched>) -> Result<Option<LastWrite>> {
        let is_written = |(_, sent): &Dispatched| matches!(sent, Sent::Written { .. });
        let written_count = commits.iter().take_while(|commit| is_written(commit)).count();
        if let Err((index, error)) = self.make_bodies_durable(&mut commits) {
            return self.fail_behind(commits, index, error).map(|()| None);
        }
        let flushed = commits.split_off(written_count);
        if flushed.is_empty() {
            self.retire_all(commits);
            return Ok(None);
        }
        self.enter_committing(&flushed);
        let has_follower = self.dispatch_follower();
        // Commits whose last write another thread waits for.
        self.await_predecessors(if commits.is_empty() { &flushed } else { &commits });
        if flushed.len() == 1 && !has_follower && self.inner.barrier {
            self.retire_all(commits);
            return self.last_write(flushed);
        }
        let written = self.write_commit_blocks(flushed);
        // While the device writes.
        self.retire_all(commits);
        written.map(|()| None)
    }

    /// Writes the commit blocks of commits whose log blocks and data are durable. The next round
    /// waits for them.
    fn write_commit_blocks(&self, mut commits: Vec<Dispatched>) -> Result<()> {
        match self.write_blocks(&mut commits) {
            Ok(true) => commits.into_iter().for_each(|(commit, sent)| commit.put_sent(sent)),
            Ok(false) => self.retire_all(commits),
            Err((index, error)) => return self.fail_behind(commits, index, error),
        }
        Ok(())
    }

    /// The commit block of a lone commit, with FUA.
    fn last_write(&self, mut commits: Vec<Dispatched>) -> Result<Option<LastWrite>> {
        let Some((commit, mut sent)) = commits.pop() else { return Ok(None) };
        // A shutdown meanwhile: the transaction must not be committed.
        if let Some(error) = self.stopped_for(commit.sequence) {
            return self.fail_behind(vec![(commit, sent)], 0, error).map(|()| None);
        }
        match sent.write_block(true) {
            Some(block) => Ok(Some(LastWrite { commit, sent, block })),
            // It was written before the flush.
            None => {
                self.retire_all(vec![(commit, sent)]);
                Ok(None)
            }
        }
    }

    /// The log blocks of the commits are durable, so the next commit may be dispatched.
    fn enter_committing(&self, commits: &[Dispatched]) {
        let mut state = self.inner.state.lock();
        for (commit, _) in commits {
            state.pipeline.set_phase(commit, Phase::Committing);
        }
    }

    /// A commit may be dispatched again. Many threads that wait for one share the next flush: this
    /// thread, which is awake, dispatches their commit, and `true` is returned. Of few threads, one
    /// may dispatch it while this commit ends.
    fn dispatch_follower(&self) -> bool {
        if !self.inner.dual || self.inner.ordered {
            return false;
        }
        // Parts are chosen by the threads that want them.
        let lock = match self.parts() {
            None => self.inner.try_lock_commits(SHARING_THREADS_MIN),
            Some(_) => None,
        };
        let Some(lock) = lock else {
            if !planted(Bug::FollowerNotWoken) {
                self.inner.offer_commit_lock(&self.inner.state.lock());
            }
            return false;
        };
        let is_plain = matches!(self.protocol(), Protocol::Waits(_)) && !self.may_wrap();
        if is_plain && self.dispatch_one(Wants::SharedFlush).is_ok() {
            lock.release_to_settle();
            return true;
        }
        false
    }
}
