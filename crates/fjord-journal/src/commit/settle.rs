//! Settling: waits until dispatched commits are durable, and retires them in order.
//!
//! A device with native barriers may have written a commit block before the failure of an earlier
//! write is known. The commit block is then overwritten, so that recovery does not accept the
//! transaction; everything after it in the log goes with it.
//!
//! Invariants: commits retire in order, under the settle lock; versions are queued for checkpoints,
//! and callbacks called with success, only when the commit is durable.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use fjord_block::{Buf, Class, DeviceExt, Order, Request};

use super::script::{COMMIT, wait_in_flight};
use crate::buffer::Buffer;
use crate::error::{JournalError, Result};
use crate::journal::{Journal, State};
use crate::pipeline::{Commit, Sent};
use crate::roles::SettleLock;
use crate::stats;
use crate::transaction::{Callback, Phase, Sequence};

impl Journal {
    /// Settles all commits that have been dispatched. On failure the journal stops and every
    /// callback is called with the error.
    pub(crate) fn settle(&self) -> Result<()> {
        let lock = self.inner.lock_settling();
        self.settle_dispatched(&lock)
    }

    /// Settles dispatched commits until `done`, or waits until another thread has. What `done` waits
    /// for has been dispatched. Errors as [`Journal::settle`].
    pub(crate) fn settle_until(&self, done: impl Fn(&State) -> bool) -> Result<()> {
        while let Some(lock) = self.take_settle_turn(&done)? {
            self.settle_dispatched(&lock)?;
        }
        Ok(())
    }

    fn settle_dispatched(&self, _lock: &SettleLock<'_>) -> Result<()> {
        let commits: Vec<(Arc<Commit>, Sent)> = {
            let state = self.inner.state.lock();
            let in_flight = state.pipeline.in_flight().cloned();
            in_flight.map_while(|commit| Some((commit.clone(), commit.take_sent()?))).collect()
        };
        let Some((_, last)) = commits.last() else { return Ok(()) };
        let end = match last {
            Sent::Durable => Ok(()),
            Sent::InFlight { fua: true, commit, .. } => {
                commit.wait().map_err(JournalError::io(COMMIT))
            }
            Sent::InFlight { .. } => self.inner.flush("flushing commits"),
        };
        // The failure of an earlier write is more useful than that of the flush.
        let outcomes: Vec<Result<()>> = commits.iter().map(|(_, sent)| sent.wait()).collect();
        let failed = commits.iter().zip(&outcomes).find(|(_, outcome)| outcome.is_err());
        if let Some(((_, sent), _)) = failed {
            self.take_back(sent);
        }
        let result = outcomes.into_iter().chain([end]).fold(Ok(()), Result::and);
        if let Err(error) = &result {
            self.abort(error.clone());
        }
        let mut outcome = Ok(());
        for (commit, sent) in commits {
            drop(sent);
            if result.is_ok() {
                self.retire(&commit);
            }
            outcome = outcome.and(self.conclude(&commit, result.as_ref().map(drop)));
        }
        outcome
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

    /// Calls the callbacks of a commit with its outcome, then publishes it.
    fn conclude(
        &self,
        commit: &Commit,
        result: std::result::Result<(), &JournalError>,
    ) -> Result<()> {
        let callbacks = commit.take_callbacks();
        self.tell(commit.began, callbacks, result)?;
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
        Ok(())
    }

    /// Calls callbacks with the outcome of a commit that began at `began`.
    pub(super) fn tell(
        &self,
        began: Instant,
        callbacks: Vec<Callback>,
        result: std::result::Result<(), &JournalError>,
    ) -> Result<()> {
        let outcome = result.map_err(JournalError::clone).and_then(|()| self.check_running());
        for callback in callbacks {
            callback(outcome.clone());
        }
        outcome?;
        stats::add(&self.inner.counters.commits, 1);
        stats::add_time(&self.inner.counters.commit_nanoseconds, began.elapsed());
        Ok(())
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

    /// Overwrites the commit block of a commit of which a write failed; the failure does not tell
    /// whether the device has the commit block.
    fn take_back(&self, sent: &Sent) {
        let Sent::InFlight { commit_offset, .. } = sent else { return };
        let request = Request::Write {
            offset: *commit_offset,
            bufs: vec![Buf::zeroed(self.inner.block_size)],
            // Order is broken, so it must not wait for earlier writes.
            order: Order::Orderless,
            fua: true,
            class: Class::Sync,
        };
        if let Err(error) = self.inner.device.submit_one(request).wait() {
            tracing::warn!(%error, "cannot take back a commit; recovery may refuse the log");
        }
    }

    /// The journal has stopped: calls the callbacks of commits in flight with the error, unless a
    /// settling thread is about to.
    pub(crate) fn fail_in_flight(&self, error: &JournalError) {
        let Some(_lock) = self.inner.try_lock_settling() else { return };
        let in_flight: Vec<Arc<Commit>> = {
            let state = self.inner.state.lock();
            let dispatched = state.pipeline.in_flight().filter(|commit| commit.is_dispatched());
            dispatched.cloned().collect()
        };
        for commit in in_flight {
            drop(commit.take_sent());
            commit.take_callbacks().into_iter().for_each(|callback| callback(Err(error.clone())));
        }
    }
}

impl Sent {
    /// Waits for all of it to be transferred.
    fn wait(&self) -> Result<()> {
        match self {
            Sent::Durable => Ok(()),
            Sent::InFlight { data, body, commit, .. } => wait_in_flight(data, body, commit),
        }
    }
}
