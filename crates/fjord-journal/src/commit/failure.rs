//! Commits that fail.
//!
//! A failed write fails its commit and every commit behind it; commits before it keep their own
//! outcome. The device may have the commit block of a commit of which another write failed (native
//! barriers), or whose own write failed. So it is overwritten, and recovery does not accept the
//! transaction; everything behind it in the log goes with it.
//!
//! Invariant: a commit fails only after the journal has stopped at its sequence or an earlier one
//! (`State::stopped_at`).

use std::sync::Arc;

use fjord_block::plant::{Bug, planted};
use fjord_block::{Buf, Class, DeviceExt, Order, Request};

use super::retire::{Dispatched, call_all, durable_count};
use crate::error::{JournalError, Result};
use crate::journal::Journal;
use crate::pipeline::{Commit, Ended, Sent};

impl Journal {
    /// Of `commits`, those from the sequence on at which the journal has stopped, and the error.
    pub(super) fn split_stopped(
        &self,
        mut commits: Vec<Dispatched>,
    ) -> (Vec<Dispatched>, Option<(Vec<Dispatched>, JournalError)>) {
        let mut stopped = commits.iter().map(|(commit, _)| self.stopped_for(commit.sequence));
        let Some(first) = stopped.position(|error| error.is_some()) else { return (commits, None) };
        let Some(error) = self.error() else { return (commits, None) };
        let stopped = commits.split_off(first);
        (commits, Some((stopped, error)))
    }

    /// Commit `index` and all behind it have failed with `error`; those before it are transferred,
    /// and retire if a flush makes them durable.
    pub(super) fn fail_behind(
        &self,
        mut commits: Vec<Dispatched>,
        index: usize,
        error: JournalError,
    ) -> Result<()> {
        let mut failed = commits.split_off(index);
        let mut error = error;
        if !commits.is_empty() {
            match self.settle_before_failure(commits) {
                Ok(()) => {}
                Err((mut lost, why)) => {
                    lost.append(&mut failed);
                    (failed, error) = (lost, why);
                }
            }
        }
        if let Some((commit, _)) = failed.first() {
            self.abort_at(commit.sequence, error.clone());
        }
        self.fail(failed, &error)
    }

    /// Makes commits before a failure durable: by the FUA or the flush that they need.
    fn settle_before_failure(
        &self,
        mut commits: Vec<Dispatched>,
    ) -> std::result::Result<(), (Vec<Dispatched>, JournalError)> {
        let durable = commits.drain(..durable_count(&commits)).collect();
        self.retire_all(durable);
        if commits.is_empty() {
            return Ok(());
        }
        let ended = match commits.iter().any(|(_, sent)| matches!(sent, Sent::Body { .. })) {
            true => self.end_before_failure(&mut commits).map_err(|(_, error)| error),
            false => self.inner.flush_completed("flushing commits before a failure"),
        };
        match ended {
            Ok(()) => {
                self.retire_all(commits);
                Ok(())
            }
            Err(error) => Err((commits, error)),
        }
    }

    /// Calls the callbacks of failed commits.
    pub(super) fn fail(&self, commits: Vec<Dispatched>, error: &JournalError) -> Result<()> {
        if commits.is_empty() {
            return Ok(());
        }
        for (index, (commit, sent)) in commits.into_iter().enumerate() {
            // After a shutdown nothing is written.
            if *error != JournalError::Shutdown {
                self.take_back(&sent);
            }
            drop(sent);
            self.inner.state.lock().pipeline.fail(&commit);
            if index > 0 && planted(Bug::LaterNotTold) {
                self.conclude(&commit);
            } else {
                self.tell_failed(&commit, error);
            }
        }
        Err(error.clone())
    }

    fn tell_failed(&self, commit: &Commit, error: &JournalError) {
        call_all(commit.take_callbacks(), &Err(error.clone()));
        self.end_failed(commit);
    }

    fn end_failed(&self, commit: &Commit) {
        let _state = self.inner.state.lock();
        commit.end(Ended::Failed);
        self.inner.ended.notify_all();
    }

    /// While this exists, a panic of a callback fails the commit, so that no thread waits for it.
    pub(super) fn fails_on_panic<'a>(&'a self, commit: &Arc<Commit>) -> FailsOnPanic<'a> {
        FailsOnPanic { journal: self, commit: commit.clone() }
    }

    /// Overwrites the commit block of a failed commit, if the device may have it.
    fn take_back(&self, sent: &Sent) {
        let Some(offset) = sent.commit_offset().filter(|_| sent.may_be_on_disk()) else { return };
        if planted(Bug::FailedNotTakenBack) {
            return;
        }
        let request = Request::Write {
            offset,
            bufs: vec![Buf::zeroed(self.inner.block_size)],
            // Order is broken, so it must not wait for earlier writes.
            order: Order::Orderless,
            fua: true,
            class: Class::Sync,
        };
        // The commit block's own write must not come after it.
        if let Sent::InFlight { commit: ticket, .. } | Sent::Written { ticket: Some(ticket), .. } =
            sent
        {
            let _ = ticket.wait();
        }
        if let Err(error) = self.inner.device.submit_one(request).wait() {
            tracing::warn!(%error, "cannot take back a commit; recovery may accept it");
        }
    }

    /// The script of a commit failed while it was dispatched.
    pub(super) fn fail_dispatch(&self, commit: &Arc<Commit>, error: JournalError) -> JournalError {
        self.abort_at(commit.sequence, error.clone());
        self.inner.state.lock().pipeline.fail(commit);
        self.tell_failed(commit, &error);
        error
    }
}

/// See [`Journal::fails_on_panic`].
pub(super) struct FailsOnPanic<'a> {
    journal: &'a Journal,
    commit: Arc<Commit>,
}

impl Drop for FailsOnPanic<'_> {
    fn drop(&mut self) {
        if !std::thread::panicking() || self.commit.has_ended() {
            return;
        }
        let message = "a callback of a commit panicked".to_owned();
        self.journal.abort_at(self.commit.sequence, JournalError::Usage(message));
        self.journal.inner.state.lock().pipeline.fail(&self.commit);
        self.journal.end_failed(&self.commit);
    }
}
