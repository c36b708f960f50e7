//! The state of an open journal: the running transaction, the pipeline, the use of the log, and which
//! threads have a role ([`crate::roles`]).
//!
//! Invariants, asserted by [`State::check`] in debug builds:
//! - the log blocks of the pipeline's commits follow each other up to `head`, and those from `tail`
//!   to `head` are in use;
//! - sequences go on from the pipeline's newest commit, and `logged` is the newest durable one;
//! - transactions commit in order: no commit in flight is of a transaction that is committed;
//! - the running transaction is the newest one.

use fjord_block::plant::{Bug, any_planted, planted};
use fjord_format::types::Tid;

use crate::late_joiners::LateJoiners;
use crate::log::Log;
use crate::part_set::WholeReason;
use crate::pipeline::Pipeline;
use crate::transaction::{Running, Sequence};

/// Guarded by `Inner::state`. Never held over I/O.
pub(crate) struct State {
    /// The transaction that accepts handles; none until the first one starts.
    pub(crate) running: Option<Running>,
    /// Frozen and committed transactions that are not fully checkpointed.
    pub(crate) pipeline: Pipeline,
    /// Who commits.
    pub(crate) roles: Roles,
    /// Callers that may come back.
    pub(crate) late_joiners: LateJoiners,
    /// The last transaction with a full commit instead of a partial one, and why.
    pub(crate) whole: Option<(Tid, WholeReason)>,
    /// The newest transaction that is durable and whose callbacks have run.
    pub(crate) committed: Tid,
    /// The newest durable commit block; its callbacks may not have run yet.
    pub(crate) logged: Sequence,
    /// ID that the next transaction gets.
    pub(crate) next_tid: Tid,
    /// Sequence of the next commit. Changed under the commit lock only.
    pub(crate) next_sequence: Sequence,
    /// Journal block where the next commit starts.
    pub(crate) head: u32,
    /// Journal block where recovery would start. Equal to `head` when the log is empty.
    pub(crate) tail: u32,
    /// Log blocks from `tail` to `head`.
    pub(crate) used_blocks: u32,
    /// The journal has stopped, and commits from this sequence on fail.
    pub(crate) stopped_at: Option<Sequence>,
    /// The superblock on disk says that the log is empty (`s_start` is 0), and no commit in flight
    /// changes that.
    pub(crate) empty_on_disk: bool,
    /// The log is empty and restarts at its first block (`head`); the superblock on disk has the old
    /// head, and no commit in flight changes that.
    pub(crate) restarts: bool,
}

impl State {
    /// That of a journal whose log is empty and begins at journal block `head`.
    pub(crate) fn new(next_tid: Tid, head: u32) -> State {
        State {
            running: None,
            pipeline: Pipeline::default(),
            roles: Roles::default(),
            late_joiners: LateJoiners::new(),
            whole: None,
            committed: Tid(next_tid.0.wrapping_sub(1)),
            logged: Sequence(Tid(next_tid.0.wrapping_sub(1))),
            next_tid,
            next_sequence: Sequence(next_tid),
            head,
            tail: head,
            used_blocks: 0,
            stopped_at: None,
            empty_on_disk: true,
            restarts: false,
        }
    }

    /// Sequence of the oldest commit in flight; that of the next commit if there is none.
    pub(crate) fn oldest_in_flight(&self) -> Sequence {
        let oldest = self.pipeline.in_flight().next();
        oldest.map_or(self.next_sequence, |commit| commit.sequence)
    }

    /// The oldest sequence that recovery still needs and where it starts in the log.
    pub(crate) fn oldest_needed(&self) -> (Sequence, u32) {
        if planted(Bug::TailPastInFlight) && !self.pipeline.has_checkpoints() {
            return (self.next_sequence, self.head);
        }
        let oldest = self.pipeline.oldest().map(|commit| (commit.sequence, commit.log_start));
        oldest.unwrap_or((self.logged.next(), self.head))
    }

    /// The invariants of the whole state, in debug builds without a planted bug.
    pub(crate) fn check(&self, log: Option<&Log>) {
        if !cfg!(debug_assertions) || self.stopped_at.is_some() || any_planted() {
            return;
        }
        if let Some(log) = log {
            self.check_log(log);
        }
        let newest = Tid(self.next_tid.0.wrapping_sub(1));
        if let Some(running) = &self.running {
            assert_eq!(running.transaction.tid, newest, "an old transaction runs");
        }
        assert!(newest.at_least(self.committed), "a transaction is durable that never ran");
        for commit in self.pipeline.in_flight() {
            assert!(
                commit.tid.newer_than(self.committed),
                "{} is durable and in flight",
                commit.tid
            );
            assert!(!self.logged.at_least(commit.sequence), "logged is past a commit in flight");
        }
    }

    fn check_log(&self, log: &Log) {
        let used = log.distance(self.tail, self.head);
        assert_eq!(used, self.used_blocks, "use of the log from {} to {}", self.tail, self.head);
        let commits: Vec<_> = self.pipeline.all().collect();
        let starts = commits.iter().skip(1).map(|commit| commit.log_start).chain([self.head]);
        for (commit, next_start) in commits.iter().zip(starts) {
            let end = log.after(commit.log_start, commit.log_blocks);
            assert_eq!(end, next_start, "log blocks of commit {:?}", commit.sequence);
        }
        if let Some(newest) = commits.last() {
            assert_eq!(newest.sequence.next(), self.next_sequence, "sequences have gaps");
        }
    }
}

/// Guarded by `Inner::state`.
#[derive(Default)]
pub(crate) struct Roles {
    /// A thread holds the commit lock.
    pub(crate) dispatching: bool,
    /// A thread holds the settle lock.
    pub(crate) settling: bool,
    /// Threads that wait for the commit lock for something else than a commit.
    pub(crate) lock_waiters: u32,
}

impl State {
    /// Whether threads wait to commit the running transaction, or parts of it.
    pub(crate) fn has_waiting_commits(&self) -> bool {
        self.running.as_ref().is_some_and(|running| running.waiter_count() > 0)
    }

    /// Whether a thread holds the commit lock or waits for it to commit.
    pub(crate) fn expects_commits(&self) -> bool {
        self.roles.dispatching || self.has_waiting_commits()
    }

    /// The callers of the running transaction, compared with those of all commits in flight.
    pub(crate) fn compare_callers(&self) -> std::cmp::Ordering {
        let callers = self.running.as_ref().map_or(0, |running| running.callers);
        callers.cmp(&self.pipeline.callers_in_flight())
    }

    /// Wakes all threads that wait for a commit.
    pub(crate) fn wake_waiters(&self) {
        self.running.iter().for_each(Running::wake_waiters);
        self.pipeline.all().for_each(|commit| commit.wake_waiters());
    }
}
