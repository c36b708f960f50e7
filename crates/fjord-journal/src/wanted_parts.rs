//! What a caller of a partial commit wants, needs and gets. Owns no state of the journal.

use std::sync::Arc;

use fjord_format::types::Tid;

use crate::part_set::{Part, WholeReason};
use crate::pipeline::Commit;

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

/// The parts of transaction `tid` that a caller wants.
pub(crate) struct WantedParts {
    pub(crate) tid: Tid,
    pub(crate) seeds: Vec<Part>,
    /// What it takes; found when the caller asks first.
    pub(crate) need: Option<Need>,
    /// The commit that makes them durable.
    pub(crate) found: Option<Found>,
    /// Transaction and number of a partial commit without contents: durable with `found`.
    pub(crate) nothing: Option<(Tid, u32)>,
}

/// The commit that makes wanted parts durable, and the outcome when it has.
pub(crate) struct Found {
    /// `None` if nothing is in flight.
    pub(crate) commit: Option<Arc<Commit>>,
    pub(crate) outcome: PartialCommit,
}

impl WantedParts {
    pub(crate) fn new(tid: Tid, seeds: &[Part]) -> WantedParts {
        WantedParts { tid, seeds: seeds.to_vec(), need: None, found: None, nothing: None }
    }

    /// The partial commit that will make them durable; `None` if it takes a full one.
    pub(crate) fn partial(&self) -> Option<u32> {
        match self.need? {
            Need::InFlight(number) | Need::Commit(number) => Some(number),
            Need::Nothing | Need::Whole(_) => None,
        }
    }
}

/// What a caller has to do.
#[derive(Clone, Copy)]
pub(crate) enum Need {
    Nothing,
    /// Wait until the commits up to this generation are durable, or have failed.
    InFlight(u32),
    /// The same; and do the last of them if no other thread does.
    Commit(u32),
    Whole(WholeReason),
}
