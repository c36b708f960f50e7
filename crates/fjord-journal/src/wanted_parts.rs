//! What a caller of a partial commit wants, needs and gets. Owns no state of the journal.
//!
//! Invariant: a caller waits for the commit that has its own changes, and for no later one: it does not
//! fail with what other threads change in the same parts.

use std::sync::Arc;

use fjord_block::plant::{Bug, planted};
use fjord_format::types::Tid;

use crate::part_set::{Part, WholeReason};
use crate::pipeline::Commit;
use crate::state::State;
use crate::transaction::Running;

/// Outcome of [`Journal::commit_parts`](crate::Journal::commit_parts).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PartialCommit {
    /// Nothing to commit: the parts were durable, or in flight and have been waited for. There may
    /// have been no flush since the call.
    Durable,
    /// Committed the closure of the parts, with a flush that started after the call.
    Parts {
        /// Log blocks; 0 if another caller's commit included the parts.
        log_blocks: u32,
    },
    /// Committed the whole transaction.
    Whole(WholeReason),
}

/// Changes that a caller wants to be durable, in some parts: all of a transaction up to now, or those up
/// to a handle ([`Handle::changes`](crate::Handle::changes)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChangesUpTo {
    pub(crate) tid: Tid,
    /// Number of partial commits of the transaction before the handle started; `None` for all
    /// changes up to now.
    pub(crate) generation: Option<u32>,
}

impl ChangesUpTo {
    /// Those of a transaction up to the handles of this generation
    /// ([`Handle::generation`](crate::Handle::generation)).
    pub fn new(tid: Tid, generation: u32) -> ChangesUpTo {
        ChangesUpTo { tid, generation: Some(generation) }
    }

    /// Their transaction.
    pub fn tid(self) -> Tid {
        self.tid
    }

    /// Their newest generation; `None` for all up to now.
    pub fn generation(self) -> Option<u32> {
        self.generation
    }
}

impl From<Tid> for ChangesUpTo {
    fn from(tid: Tid) -> ChangesUpTo {
        ChangesUpTo { tid, generation: None }
    }
}

/// Stage of changes.
pub(crate) enum Stage {
    /// No commit has taken them.
    Running,
    /// In a commit that is not durable, or whose callers have not been told.
    Frozen(Arc<Commit>),
    Durable,
}

/// Parts whose changes a caller wants to be durable.
#[derive(Clone)]
pub(crate) struct WantedParts {
    pub(crate) changes: ChangesUpTo,
    pub(crate) seeds: Vec<Part>,
    /// What it takes; found when the caller asks first.
    pub(crate) need: Option<Need>,
    /// The outcome of the commit that the caller has dispatched for them.
    pub(crate) own: Option<PartialCommit>,
}

/// What it takes to make parts durable.
#[derive(Clone, Copy)]
pub(crate) enum Need {
    Nothing,
    /// A commit in flight, the one of this number.
    InFlight(u32),
    /// A commit that follows, of this number or the one in progress.
    Commit(u32),
    Whole(WholeReason),
}

impl WantedParts {
    pub(crate) fn new(changes: ChangesUpTo, seeds: &[Part]) -> WantedParts {
        WantedParts { changes, seeds: seeds.to_vec(), need: None, own: None }
    }

    /// The partial commit that will make them durable; `None` if it takes a full one.
    pub(crate) fn partial(&self) -> Option<u32> {
        match self.need? {
            Need::InFlight(number) | Need::Commit(number) => Some(number),
            Need::Nothing | Need::Whole(_) => None,
        }
    }

    /// What it takes. The first call registers the parts for the next partial commit, if it takes
    /// one.
    pub(crate) fn need(&mut self, state: &mut State) -> Need {
        if let Some(need) = self.need {
            return need;
        }
        self.changes = state.all_up_to_now(self.changes);
        let tid = self.changes.tid;
        let need = match self.stage(state) {
            _ if !state.next_tid.newer_than(tid) => Need::Whole(WholeReason::UnderWay),
            Stage::Durable => Need::Nothing,
            Stage::Frozen(commit) if commit.is_last => Need::Whole(state.why_whole(tid)),
            Stage::Frozen(commit) => Need::InFlight(commit.generation),
            Stage::Running => state.running.as_mut().map_or(Need::Nothing, |running| {
                let closure = running.transaction.lock_contents().parts.closure(&self.seeds);
                if closure.contains(Part::WHOLE) {
                    return Need::Whole(WholeReason::WholePart);
                }
                running.wanted.extend_from_slice(&self.seeds);
                Need::Commit(running.generation() + 1)
            }),
        };
        self.need = Some(need);
        need
    }

    /// The stage of the changes.
    pub(crate) fn stage(&self, state: &State) -> Stage {
        match state.stage_of(self.changes, &self.seeds) {
            // Only for the other callers: the one that has dispatched the commit settles it.
            Stage::Frozen(commit)
                if planted(Bug::PartsToldInFlight)
                    && self.own.is_none()
                    && commit.is_dispatched() =>
            {
                Stage::Durable
            }
            stage => stage,
        }
    }

    /// The outcome now that the changes are durable.
    pub(crate) fn outcome(&self, state: &State) -> PartialCommit {
        let tid = self.changes.tid;
        match (self.own, self.need) {
            (Some(own), _) => own,
            (None, Some(Need::Commit(_))) if state.committed.at_least(tid) => {
                PartialCommit::Whole(state.why_whole(tid))
            }
            (None, Some(Need::Commit(_))) => PartialCommit::Parts { log_blocks: 0 },
            (None, _) => PartialCommit::Durable,
        }
    }
}

impl State {
    /// Fixes which changes those up to now are, while their transaction runs.
    pub(crate) fn all_up_to_now(&self, changes: ChangesUpTo) -> ChangesUpTo {
        let runs = |running: &&Running| running.transaction.tid == changes.tid;
        let up_to_now = self.running.as_ref().filter(runs).map(Running::newest_generation);
        ChangesUpTo { generation: changes.generation.or(up_to_now), ..changes }
    }

    /// The stage of changes to `seeds`. A commit that has later changes to these parts does not count.
    pub(crate) fn stage_of(&self, changes: ChangesUpTo, seeds: &[Part]) -> Stage {
        let ChangesUpTo { tid, generation } = changes;
        if self.committed.at_least(tid) {
            return Stage::Durable;
        }
        if let Some(running) = &self.running
            && running.transaction.tid == tid
            && !(running.closed && planted(Bug::PartsLeaveEarly))
            && running.transaction.lock_contents().parts.changed().has_any(seeds, generation)
        {
            return Stage::Running;
        }
        match self.pipeline.not_durable(tid, generation, seeds) {
            Some(commit) => Stage::Frozen(commit.clone()),
            None => Stage::Durable,
        }
    }

    /// Why a full commit served a caller who wanted parts: if it began as a partial commit, its
    /// reason applies to all callers that waited for it.
    pub(crate) fn why_whole(&self, tid: Tid) -> WholeReason {
        self.whole.filter(|(other, _)| *other == tid).map_or(WholeReason::UnderWay, |(_, why)| why)
    }
}
