//! The queue of requests for commits that hold no thread, as data: what each wants, and which of them
//! the threads that serve them are committing. [`crate::requests`] has those threads.
//!
//! Invariant: at most [`SERVERS_MAX`] threads serve requests, and none commits for a request that the
//! commit of another one covers.

use std::collections::VecDeque;

use fjord_block::lock::{Mutex, Rank};
use fjord_format::types::Tid;

use crate::error::{JournalError, Result};
use crate::fast_commit_area::{FastCommitOutcome, FastCommitTicket};
use crate::wanted_parts::{PartialCommit, WantedParts};

/// Most threads that serve requests at a time, committing or answering.
pub(crate) const SERVERS_MAX: usize = 3;

/// Told the outcome of a request.
pub(crate) type Then<T> = Box<dyn FnOnce(Result<T>) + Send>;

/// A commit that somebody wants to be told about.
pub(crate) enum Request {
    Whole(Tid, Then<()>),
    Parts(WantedParts, Then<PartialCommit>),
    FastCommit(FastCommitTicket, Then<FastCommitOutcome>),
}

/// A request with its outcome.
pub(crate) enum Answer {
    Whole(Result<()>, Then<()>),
    Parts(Result<PartialCommit>, Then<PartialCommit>),
    FastCommit(Result<FastCommitOutcome>, Then<FastCommitOutcome>),
}

impl Answer {
    /// Tells the outcome.
    pub(crate) fn give(self) {
        match self {
            Answer::Whole(outcome, then) => then(outcome),
            Answer::Parts(outcome, then) => then(outcome),
            Answer::FastCommit(outcome, then) => then(outcome),
        }
    }
}

/// What is durable when a request has been served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cover {
    /// Everything up to this transaction.
    Whole(Tid),
    /// The partial commits of this transaction up to this one.
    Parts(Tid, u32),
    /// All queued fast commits, nearly: what arrives too late is served next, as one thread at a
    /// time can.
    FastCommits,
}

impl Cover {
    /// Whether a commit that covers this much covers `other`.
    pub(crate) fn includes(self, other: Cover) -> bool {
        match (self, other) {
            (Cover::Whole(tid), Cover::Whole(other) | Cover::Parts(other, _)) => {
                tid.at_least(other)
            }
            (Cover::Parts(tid, number), Cover::Parts(other, other_number)) => {
                tid == other && number >= other_number
            }
            (Cover::FastCommits, Cover::FastCommits) => true,
            _ => false,
        }
    }
}

impl Request {
    /// What a commit for it makes durable.
    pub(crate) fn cover(&self) -> Cover {
        match self {
            Request::Whole(tid, _) => Cover::Whole(*tid),
            Request::Parts(wanted, _) => match wanted.partial() {
                Some(number) => Cover::Parts(wanted.changes.tid, number),
                None => Cover::Whole(wanted.changes.tid),
            },
            Request::FastCommit(..) => Cover::FastCommits,
        }
    }

    /// The transaction that it waits for; `None` for a fast commit.
    pub(crate) fn tid(&self) -> Option<Tid> {
        match self {
            Request::Whole(tid, _) => Some(*tid),
            Request::Parts(wanted, _) => Some(wanted.changes.tid),
            Request::FastCommit(..) => None,
        }
    }

    /// Its answer if it cannot be served.
    pub(crate) fn refuse(self, error: JournalError) -> Answer {
        match self {
            Request::Whole(_, then) => Answer::Whole(Err(error), then),
            Request::Parts(_, then) => Answer::Parts(Err(error), then),
            Request::FastCommit(_, then) => Answer::FastCommit(Err(error), then),
        }
    }
}

/// The queue of requests.
pub(crate) struct Requests {
    /// Held for memory operations; `Inner::state` is taken under it.
    pub(crate) queue: Mutex<Queue>,
}

impl Default for Requests {
    fn default() -> Requests {
        Requests { queue: Mutex::new(Rank::CommitRequests, Queue::default()) }
    }
}

/// Guarded by [`Requests::queue`].
#[derive(Default)]
pub(crate) struct Queue {
    /// Oldest first.
    pub(crate) waiting: VecDeque<Request>,
    /// What the threads that are committing serve.
    pub(crate) committing: Vec<Cover>,
    /// Threads that serve requests: they commit or answer.
    pub(crate) serving: usize,
}

impl Queue {
    /// The oldest request that no thread serves, if one more thread may.
    pub(crate) fn next(&mut self, committing_max: usize) -> Option<(Request, Cover)> {
        if self.serving >= SERVERS_MAX || self.committing.len() >= committing_max {
            return None;
        }
        let is_served = |cover: Cover| self.committing.iter().any(|other| other.includes(cover));
        let place = self.waiting.iter().position(|request| !is_served(request.cover()))?;
        let request = self.waiting.remove(place)?;
        let cover = request.cover();
        self.committing.push(cover);
        self.serving += 1;
        Some((request, cover))
    }

    /// A thread that served `cover` does not commit any more.
    pub(crate) fn end_commit(&mut self, cover: Cover) {
        if let Some(place) = self.committing.iter().position(|&other| other == cover) {
            self.committing.swap_remove(place);
        }
    }
}
