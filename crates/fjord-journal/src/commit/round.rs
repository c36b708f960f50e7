//! Rounds over a device that keeps no order: the second half of the script of
//! [`Protocol::Waits`](super::protocol::Protocol::Waits), as steps that all commits of a round take together, so that
//! they share flushes.
//!
//! Owns these steps, as data, and their interpreter. What happens between two lists (the next commit is dispatched,
//! others retire) is [`super::settle`]'s.
//!
//! Invariants: a flush lies between the wait for log blocks and data and the commit blocks, and another one between
//! those and the end, in this round or the next; no commit block is written once the journal has stopped at its
//! commit.

use fjord_block::DeviceExt;
use fjord_block::plant::{Bug, planted};

use super::retire::{Dispatched, wait_body};
use crate::error::JournalError;
use crate::journal::Journal;
use crate::pipeline::Sent;
use crate::transaction::Sequence;

/// One step, for all commits of a round.
#[derive(Clone, Copy, Debug)]
pub(super) enum RoundStep {
    /// Waits for what was submitted: log blocks and data, or the commit block.
    Wait,
    /// Flushes the device.
    Flush(&'static str),
    /// Flushes what is complete, where another write has failed.
    FlushCompleted(&'static str),
    /// Submits the commit blocks that have not been, without FUA.
    CommitBlocks,
}

const BEFORE_BLOCKS: &str = "flushing before the commit block";

/// Until the log blocks are durable, and with them commits whose commit block was written in the round before.
const LOG_BLOCKS: &[RoundStep] = &[RoundStep::Wait, RoundStep::Flush(BEFORE_BLOCKS)];
/// The commit blocks; the next round waits for them, and its flush makes them durable.
const FOR_NEXT_FLUSH: &[RoundStep] = &[RoundStep::CommitBlocks];
/// The same where nobody flushes (`nobarrier`).
const WITHOUT_FLUSH: &[RoundStep] = &[RoundStep::CommitBlocks, RoundStep::Wait];
/// All that is left, of commits whose log blocks have been transferred and before which another write failed.
const BEFORE_FAILURE: &[RoundStep] = &[
    RoundStep::FlushCompleted(BEFORE_BLOCKS),
    RoundStep::CommitBlocks,
    RoundStep::Wait,
    RoundStep::FlushCompleted("flushing commits"),
];

/// Commit `index` of a round has failed, and all behind it.
pub(super) type FailedAt = (usize, JournalError);

impl Journal {
    /// Makes the log blocks durable.
    pub(super) fn make_bodies_durable(&self, commits: &mut [Dispatched]) -> Result<(), FailedAt> {
        if self.inner.dual && planted(Bug::CommitBlockBeforeFlush) {
            const EARLY: &[RoundStep] =
                &[RoundStep::Wait, RoundStep::CommitBlocks, RoundStep::Wait];
            self.take_steps(EARLY, commits)?;
        }
        self.take_steps(LOG_BLOCKS, commits)
    }

    /// Writes the commit blocks. Whether the flush of the next round makes them durable.
    pub(super) fn write_blocks(&self, commits: &mut [Dispatched]) -> Result<bool, FailedAt> {
        let is_left_to_next = self.inner.barrier && !planted(Bug::CommitBlockNotFlushed);
        let steps = if is_left_to_next { FOR_NEXT_FLUSH } else { WITHOUT_FLUSH };
        self.take_steps(steps, commits).map(|()| is_left_to_next)
    }

    /// Makes commits durable whose log blocks were transferred before another write failed.
    pub(super) fn end_before_failure(&self, commits: &mut [Dispatched]) -> Result<(), FailedAt> {
        self.take_steps(BEFORE_FAILURE, commits)
    }

    /// The error that stopped the journal, if it fails the commit of `sequence`.
    pub(super) fn stopped_for(&self, sequence: Sequence) -> Option<JournalError> {
        let stopped_at = self.inner.state.lock().stopped_at?;
        self.error().filter(|_| sequence.at_least(stopped_at))
    }

    fn take_steps(&self, steps: &[RoundStep], commits: &mut [Dispatched]) -> Result<(), FailedAt> {
        for step in steps {
            match *step {
                RoundStep::Wait => {
                    if let Some(failed) = first_failure(commits) {
                        return Err(failed);
                    }
                }
                RoundStep::Flush(_) if planted(Bug::NoFlushBeforeCommit) => {}
                RoundStep::Flush(what) => self.inner.flush(what).map_err(|error| (0, error))?,
                RoundStep::FlushCompleted(what) => {
                    self.inner.flush_completed(what).map_err(|error| (0, error))?;
                }
                RoundStep::CommitBlocks => self.submit_blocks(commits)?,
            }
        }
        Ok(())
    }

    fn submit_blocks(&self, commits: &mut [Dispatched]) -> Result<(), FailedAt> {
        for index in 0..commits.len() {
            let (commit, sent) = &mut commits[index];
            // A shutdown meanwhile: the transaction must not be committed.
            if let Some(error) = self.stopped_for(commit.sequence) {
                return Err(first_failure(&commits[..index]).unwrap_or((index, error)));
            }
            if let Some(request) = sent.write_block(false) {
                let ticket = self.inner.device.submit_one(request);
                ticket.start();
                sent.written_by(ticket);
            }
        }
        Ok(())
    }
}

/// Waits for the writes of all commits: the first that failed, and its error.
fn first_failure(commits: &[Dispatched]) -> Option<FailedAt> {
    let has_written = commits.iter().any(|(_, sent)| matches!(sent, Sent::Written { .. }));
    let wait = |sent: &Sent| match sent {
        Sent::Body { body, .. } if has_written && planted(Bug::LaterDataNotAwaited) => {
            wait_body(&[], body)
        }
        sent => sent.wait(),
    };
    let mut outcomes = commits.iter().map(|(_, sent)| wait(sent)).enumerate();
    outcomes.find_map(|(index, outcome)| Some((index, outcome.err()?)))
}
