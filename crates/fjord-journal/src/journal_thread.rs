//! The journal's own thread, with [`JournalIo::Dedicated`](crate::JournalIo::Dedicated): it commits for all
//! callers, one after the other, as JBD2's thread does.
//!
//! Owns the thread. A commit is a job that a caller waits for, so no commit runs anywhere else. Invariants: jobs
//! run in the order in which they came; a panic of one is that of its caller; the thread ends with the journal.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::mpsc::{Sender, channel};
use std::thread::{self, JoinHandle};

use fjord_block::lock::Rank;

use crate::error::{JournalError, Result};

type Job = Box<dyn FnOnce() + Send>;

/// See the [module](self).
pub(crate) struct JournalThread {
    /// None while it ends.
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
}

impl JournalThread {
    /// Starts the thread.
    ///
    /// # Errors
    /// The system has no thread left.
    pub(crate) fn start() -> Result<JournalThread> {
        let (jobs, waiting) = channel::<Job>();
        let work = move || waiting.into_iter().for_each(|job| job());
        let thread = thread::Builder::new().name("fjord-journal".into()).spawn(work);
        let thread = thread
            .map_err(|error| JournalError::Usage(format!("no thread for the journal: {error}")))?;
        Ok(JournalThread { jobs: Some(jobs), thread: Some(thread) })
    }

    /// Runs `job` on the thread and waits for it. The caller holds no lock that a commit takes.
    pub(crate) fn run<T: Send + 'static>(&self, job: impl FnOnce() -> T + Send + 'static) -> T {
        Rank::CommitLock.check_order();
        let Some(jobs) = self.jobs.as_ref().filter(|_| !self.is_current()) else { return job() };
        let (give, take) = channel();
        let run = move || {
            // A caller that is gone needs no answer.
            let _ = give.send(catch_unwind(AssertUnwindSafe(job)));
        };
        if jobs.send(Box::new(run)).is_err() {
            unreachable!("the thread ends after the journal, and no job's panic ends it");
        }
        match take.recv() {
            Ok(Ok(outcome)) => outcome,
            Ok(Err(panic)) => resume_unwind(panic),
            Err(_) => unreachable!("a job answers even if it panics"),
        }
    }

    /// Whether the calling thread is the journal's: a callback of a commit may ask for another one.
    fn is_current(&self) -> bool {
        self.thread.as_ref().is_some_and(|thread| thread.thread().id() == thread::current().id())
    }
}

impl Drop for JournalThread {
    fn drop(&mut self) {
        let is_current = self.is_current();
        self.jobs = None;
        // The last user of the journal may be a job; its thread cannot wait for itself.
        if let Some(thread) = self.thread.take().filter(|_| !is_current) {
            // No panic of a job ends it.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn jobs_run_on_the_thread_and_may_ask_for_others() {
        let thread = Arc::new(JournalThread::start().unwrap());
        let here = thread::current().id();
        let inner = thread.clone();
        let (there, nested) = thread.run(move || {
            let there = thread::current().id();
            (there, inner.run(move || thread::current().id() == there))
        });
        assert!(there != here && nested);
    }

    #[test]
    fn a_panic_is_that_of_the_caller() {
        let thread = JournalThread::start().unwrap();
        let caught = catch_unwind(AssertUnwindSafe(|| thread.run(|| panic!("of the job"))));
        let panic = caught.unwrap_err();
        assert_eq!(panic.downcast_ref::<&str>(), Some(&"of the job"));
        assert_eq!(thread.run(|| 7), 7);
    }

    /// The last owner of a journal may be a job.
    #[test]
    fn a_thread_may_drop_itself() {
        let thread = Arc::new(JournalThread::start().unwrap());
        let (give, take) = channel();
        let last = thread.clone();
        thread.run(move || give.send(last).unwrap());
        let last = take.recv().unwrap();
        let (done, wait) = channel();
        let jobs = thread.jobs.clone().unwrap();
        drop(thread);
        jobs.send(Box::new(move || {
            drop(last);
            done.send(()).unwrap();
        }))
        .unwrap();
        wait.recv().unwrap();
    }
}
