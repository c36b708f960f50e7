//! Requests for commits that hold no thread: each has a callback instead of a caller that waits.
//!
//! Owns the queue of requests, and the threads that serve it. A thread that makes a request serves
//! it at once, by an ordinary commit, if no more than the allowed number of threads do so; then it
//! answers all requests that are durable, and goes on while some are left that nobody serves. Any
//! other request waits in the queue. So a lone request needs no thread switch, and hundreds need
//! [`SERVERS_MAX`] threads at most.
//!
//! Invariants:
//! - while a request is queued, some thread serves requests, and it looks at the queue again
//!   before it goes; so no request is forgotten, also when the journal stops: the commit that a
//!   serving thread then tries gives the error;
//! - one thread commits for requests in serial mode, [`SERVERS_MAX`] in dual mode, where each waits
//!   for another commit in flight; others may still be answering;
//! - callbacks run without a lock of the journal, on a thread that made a request. One that makes
//!   another request queues it, and does not serve it before it returns.

use std::cell::Cell;
use std::collections::VecDeque;

use fjord_block::lock::{Mutex, Rank, thread_local};
use fjord_block::plant::{Bug, planted};
use fjord_format::types::Tid;

use crate::commit::{PartialCommit, WantedParts};
use crate::error::Result;
use crate::fast_commit::{FastCommitOutcome, FastCommitTicket};
use crate::handle::check_no_open_handle;
use crate::journal::Journal;
use crate::part::Part;

/// Most threads that serve requests at a time, committing or answering.
const SERVERS_MAX: usize = 3;

/// Told the outcome of a request.
type Then<T> = Box<dyn FnOnce(Result<T>) + Send>;

thread_local! {
    /// The journal whose requests this thread serves; 0 for none.
    static SERVING: Cell<usize> = const { Cell::new(0) };
}

enum Request {
    Whole(Tid, Then<()>),
    Parts(WantedParts, Then<PartialCommit>),
    FastCommit(FastCommitTicket, Then<FastCommitOutcome>),
}

/// A request with its outcome.
enum Answer {
    Whole(Result<()>, Then<()>),
    Parts(Result<PartialCommit>, Then<PartialCommit>),
    FastCommit(Result<FastCommitOutcome>, Then<FastCommitOutcome>),
}

impl Answer {
    fn give(self) {
        match self {
            Answer::Whole(outcome, then) => then(outcome),
            Answer::Parts(outcome, then) => then(outcome),
            Answer::FastCommit(outcome, then) => then(outcome),
        }
    }
}

/// What is durable when a request has been served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cover {
    /// Everything up to this transaction.
    Whole(Tid),
    /// The partial commits of this transaction up to this one.
    Parts(Tid, u32),
    /// All queued fast commits, nearly: what arrives too late is served next, as one thread at a
    /// time can.
    FastCommits,
}

impl Cover {
    fn includes(self, other: Cover) -> bool {
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
    fn cover(&self) -> Cover {
        match self {
            Request::Whole(tid, _) => Cover::Whole(*tid),
            Request::Parts(wanted, _) => match wanted.partial() {
                Some(number) => Cover::Parts(wanted.tid, number),
                None => Cover::Whole(wanted.tid),
            },
            Request::FastCommit(..) => Cover::FastCommits,
        }
    }

    /// Its answer if other commits have given it one.
    fn poll(self, journal: &Journal) -> Result<Answer, Request> {
        match self {
            Request::Whole(tid, then) if journal.is_committed(tid) => {
                Ok(Answer::Whole(Ok(()), then))
            }
            Request::Parts(mut wanted, then) => match journal.poll_parts(&mut wanted) {
                Some(outcome) => Ok(Answer::Parts(Ok(outcome), then)),
                None => Err(Request::Parts(wanted, then)),
            },
            Request::FastCommit(ticket, then) => match journal.poll_fast_commit(&ticket) {
                Some(outcome) => Ok(Answer::FastCommit(outcome, then)),
                None => Err(Request::FastCommit(ticket, then)),
            },
            waiting @ Request::Whole(..) => Err(waiting),
        }
    }

    /// Waits until it is durable, by a commit of this thread or of another one.
    fn serve(self, journal: &Journal) -> Answer {
        match self {
            Request::Whole(tid, then) => Answer::Whole(journal.commit(tid), then),
            Request::Parts(mut wanted, then) => {
                Answer::Parts(journal.commit_wanted_parts(&mut wanted), then)
            }
            Request::FastCommit(ticket, then) => {
                Answer::FastCommit(journal.wait_fast_commit(ticket), then)
            }
        }
    }
}

/// The queue of requests.
pub(crate) struct Requests {
    /// Held for memory operations; `Inner::state` is taken under it.
    queue: Mutex<Queue>,
}

impl Default for Requests {
    fn default() -> Requests {
        Requests { queue: Mutex::new(Rank::CommitRequests, Queue::default()) }
    }
}

/// Guarded by [`Requests::queue`].
#[derive(Default)]
struct Queue {
    /// Oldest first.
    waiting: VecDeque<Request>,
    /// What the threads that are committing serve.
    committing: Vec<Cover>,
    /// Threads that serve requests: they commit or answer.
    serving: usize,
}

impl Queue {
    /// The oldest request that no thread serves, if one more thread may.
    fn next(&mut self, committing_max: usize) -> Option<(Request, Cover)> {
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

    fn end_commit(&mut self, cover: Cover) {
        if let Some(place) = self.committing.iter().position(|&other| other == cover) {
            self.committing.swap_remove(place);
        }
    }
}

impl Journal {
    /// Makes transaction `tid` durable as [`Journal::commit`] does, and calls `then` with the
    /// outcome: at once if it is durable, after a commit by this thread if few threads serve such
    /// requests, else later from another thread that made one.
    ///
    /// The caller holds no lock that a callback of any other request may take: they run here too.
    pub fn commit_then(&self, tid: Tid, then: impl FnOnce(Result<()>) + Send + 'static) {
        self.request(Request::Whole(tid, Box::new(then)));
    }

    /// As [`Journal::commit_then`], for [`Journal::commit_parts`].
    pub fn commit_parts_then(
        &self,
        tid: Tid,
        seeds: &[Part],
        then: impl FnOnce(Result<PartialCommit>) + Send + 'static,
    ) {
        self.request(Request::Parts(WantedParts::new(tid, seeds), Box::new(then)));
    }

    /// As [`Journal::commit_then`], for [`Journal::wait_fast_commit`].
    pub fn fast_commit_then(
        &self,
        ticket: FastCommitTicket,
        then: impl FnOnce(Result<FastCommitOutcome>) + Send + 'static,
    ) {
        self.request(Request::FastCommit(ticket, Box::new(then)));
    }

    /// Requests that wait for a commit, without those that are being served.
    pub fn waiting_requests(&self) -> usize {
        self.inner.requests.queue.lock().waiting.len()
    }

    fn request(&self, request: Request) {
        if let Err(error) = check_no_open_handle(self, "a commit") {
            return request.refuse(error).give();
        }
        match request.poll(self) {
            Ok(answer) => answer.give(),
            Err(request) => {
                self.inner.requests.queue.lock().waiting.push_back(request);
                self.serve_requests();
            }
        }
    }

    /// Serves requests until none is left that no other thread serves, or enough threads do.
    fn serve_requests(&self) {
        if SERVING.get() == self.key() {
            // In a callback: the loop that called it goes on.
            return;
        }
        let committing_max = if self.inner.dual { SERVERS_MAX } else { 1 };
        loop {
            let next = self.inner.requests.queue.lock().next(committing_max);
            let Some((request, cover)) = next else { return };
            let mut seat = Seat { journal: self, committing: Some(cover), outer: SERVING.get() };
            SERVING.set(self.key());
            let answer = request.serve(self);
            let others = seat.committed();
            answer.give();
            others.into_iter().for_each(Answer::give);
            if planted(Bug::QueueNotLookedAt) {
                return;
            }
        }
    }
}

impl Request {
    fn refuse(self, error: crate::error::JournalError) -> Answer {
        match self {
            Request::Whole(_, then) => Answer::Whole(Err(error), then),
            Request::Parts(_, then) => Answer::Parts(Err(error), then),
            Request::FastCommit(_, then) => Answer::FastCommit(Err(error), then),
        }
    }
}

/// One of the threads that serve requests, until it is dropped.
struct Seat<'a> {
    journal: &'a Journal,
    /// What it commits; `None` while it answers.
    committing: Option<Cover>,
    /// The journal that the thread served before.
    outer: usize,
}

impl Seat<'_> {
    /// Its commit has ended: the answers that are known now. Another thread may commit.
    fn committed(&mut self) -> Vec<Answer> {
        let mut queue = self.journal.inner.requests.queue.lock();
        if let Some(cover) = self.committing.take() {
            queue.end_commit(cover);
        }
        let mut answers = Vec::new();
        let waiting = std::mem::take(&mut queue.waiting);
        for request in waiting {
            match request.poll(self.journal) {
                Ok(answer) => answers.push(answer),
                Err(request) => queue.waiting.push_back(request),
            }
        }
        answers
    }
}

impl Drop for Seat<'_> {
    fn drop(&mut self) {
        SERVING.set(self.outer);
        let mut queue = self.journal.inner.requests.queue.lock();
        if let Some(cover) = self.committing.take() {
            queue.end_commit(cover);
        }
        queue.serving -= 1;
        // A panic of a callback: if no thread is left to serve them, the others are dropped, which
        // their owners see as a failure.
        let is_last = queue.serving == 0 && std::thread::panicking();
        let lost = if is_last { std::mem::take(&mut queue.waiting) } else { VecDeque::new() };
        drop(queue);
        drop(lost);
    }
}
