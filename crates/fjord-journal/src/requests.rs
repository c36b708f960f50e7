//! Requests for commits that hold no thread: each has a callback instead of a caller that waits.
//!
//! The queue is data ([`crate::request_queue`]); here are the threads that serve it. A thread that makes a request serves
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

use fjord_block::lock::thread_local;
use fjord_block::plant::{Bug, planted};
use fjord_format::types::Tid;

use crate::error::Result;
use crate::fast_commit_area::{FastCommitOutcome, FastCommitTicket};
use crate::journal::Journal;
use crate::open_handles::check_no_open_handle;
use crate::part_set::Part;
use crate::request_queue::{Answer, Cover, Request, SERVERS_MAX};
use crate::wanted_parts::{ChangesUpTo, PartialCommit, WantedParts};

thread_local! {
    /// The journal whose requests this thread serves; 0 for none.
    static SERVING: Cell<usize> = const { Cell::new(0) };
}

impl Request {
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
            Request::Whole(tid, then) => Answer::Whole(journal.commit_for(tid, false), then),
            Request::Parts(mut wanted, then) => {
                Answer::Parts(journal.commit_wanted_parts(&mut wanted, false), then)
            }
            Request::FastCommit(ticket, then) => {
                Answer::FastCommit(journal.wait_fast_commit(ticket), then)
            }
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
        changes: impl Into<ChangesUpTo>,
        seeds: &[Part],
        then: impl FnOnce(Result<PartialCommit>) + Send + 'static,
    ) {
        self.request(Request::Parts(WantedParts::new(changes.into(), seeds), Box::new(then)));
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
                let tid = request.tid();
                self.inner.requests.queue.lock().waiting.push_back(request);
                tid.into_iter().for_each(|tid| self.arrive_for(tid));
                self.serve_requests();
            }
        }
    }

    /// A caller without a thread waits for transaction `tid`. If that makes its callers enough, a thread
    /// that waits for the transaction is offered the commit lock: a thread that arrives takes it itself.
    fn arrive_for(&self, tid: Tid) {
        let mut state = self.inner.state.lock();
        if !state.running.as_ref().is_some_and(|running| running.transaction.tid == tid) {
            return self.arrive_late(&mut state);
        }
        self.arrive(&mut state);
        if state.compare_callers().is_eq() {
            self.inner.offer_commit_lock(&state);
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
