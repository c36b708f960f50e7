//! What an fsync still has to wait for after its policy has done the caller's part.
//!
//! Owns the split of an fsync in two. The first part is done by the caller: it submits the data and
//! chooses the commit. The second follows that commit: in the same call ([`Step::wait`]), or as a
//! callback of the journal, so that no thread waits for it ([`Step::then`]).
//!
//! Invariant: both ways give the same outcome. A second part that runs for somebody else must not
//! wait for a lock that is held over I/O ([`Runs::ForAnother`]).

use std::sync::Arc;

use fjord_format::types::Tid;
use fjord_journal::{
    ChangesUpTo, FastCommitOutcome, FastCommitTicket, Journal, JournalError, Part, PartialCommit,
};

use super::Outcome;
use crate::error::Result;
use crate::fs::FsInner;

/// Where the second part of an fsync runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Runs {
    /// In the thread that called fsync.
    ByCaller,
    /// In a thread that answers others too.
    ForAnother,
}

type Rest<T> = Box<dyn FnOnce(Result<T, JournalError>, Runs) -> Result<Step> + Send>;

/// Told the outcome of an fsync.
pub(crate) type Done = Box<dyn FnOnce(Result<Outcome>) + Send>;

/// State of an fsync.
pub(crate) enum Step {
    /// It has ended.
    Done(Outcome),
    /// It goes on when a transaction is durable.
    Commit(Tid, Rest<()>),
    /// It goes on when changes to a part are durable.
    CommitPart(ChangesUpTo, Part, Rest<PartialCommit>),
    /// It goes on when its fast commit is durable or refused.
    FastCommit(FastCommitTicket, Rest<FastCommitOutcome>),
}

impl Step {
    /// Waits until it has ended.
    ///
    /// # Errors
    /// Those of the commits and of the second part.
    pub(crate) fn wait(self, journal: &Journal) -> Result<Outcome> {
        let mut step = self;
        loop {
            step = match step {
                Step::Done(outcome) => return Ok(outcome),
                Step::Commit(tid, rest) => rest(journal.commit(tid), Runs::ByCaller)?,
                Step::CommitPart(changes, part, rest) => {
                    rest(journal.commit_parts(changes, &[part]), Runs::ByCaller)?
                }
                Step::FastCommit(ticket, rest) => {
                    rest(journal.wait_fast_commit(ticket), Runs::ByCaller)?
                }
            }
        }
    }

    /// Calls `done` with the outcome when it has ended, in this thread or another one, without a
    /// lock held. The caller holds none.
    pub(crate) fn then(self, fs: Arc<FsInner>, done: Done) {
        let journal = fs.journal().clone();
        match self {
            Step::Done(outcome) => done(Ok(outcome)),
            Step::Commit(tid, rest) => {
                journal.commit_then(tid, move |told| go_on(fs, rest(told, Runs::ForAnother), done));
            }
            Step::CommitPart(changes, part, rest) => {
                let then = move |told| go_on(fs, rest(told, Runs::ForAnother), done);
                journal.commit_parts_then(changes, &[part], then);
            }
            Step::FastCommit(ticket, rest) => {
                let then = move |told| go_on(fs, rest(told, Runs::ForAnother), done);
                journal.fast_commit_then(ticket, then);
            }
        }
    }
}

/// Adds `end` to a step whose first part has run in this thread: it gets the outcome, failures
/// included, and gives the final one.
pub(crate) fn ending<F>(step: Result<Step>, end: F) -> Result<Step>
where
    F: FnOnce(Result<Outcome>, Runs) -> Result<Outcome> + Send + 'static,
{
    ending_in(step, Runs::ByCaller, end)
}

fn ending_in<F>(step: Result<Step>, runs: Runs, end: F) -> Result<Step>
where
    F: FnOnce(Result<Outcome>, Runs) -> Result<Outcome> + Send + 'static,
{
    Ok(match step {
        Err(error) => Step::Done(end(Err(error), runs)?),
        Ok(Step::Done(outcome)) => Step::Done(end(Ok(outcome), runs)?),
        Ok(Step::Commit(tid, rest)) => Step::Commit(tid, extended(rest, end)),
        Ok(Step::CommitPart(changes, part, rest)) => {
            Step::CommitPart(changes, part, extended(rest, end))
        }
        Ok(Step::FastCommit(ticket, rest)) => Step::FastCommit(ticket, extended(rest, end)),
    })
}

fn extended<T: 'static, F>(rest: Rest<T>, end: F) -> Rest<T>
where
    F: FnOnce(Result<Outcome>, Runs) -> Result<Outcome> + Send + 'static,
{
    Box::new(move |told, runs| ending_in(rest(told, runs), runs, end))
}

fn go_on(fs: Arc<FsInner>, step: Result<Step>, done: Done) {
    match step {
        Ok(step) => step.then(fs, done),
        Err(error) => done(Err(error)),
    }
}
