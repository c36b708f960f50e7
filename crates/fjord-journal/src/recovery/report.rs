//! What a recovery found and did. Owns no state.

use fjord_format::jbd2::fast_commit::Record;
use fjord_format::types::Tid;

use super::cases::Case;

/// Report of a recovery.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecoveryReport {
    /// Whether the log was dirty at all (`s_start` was not 0).
    pub was_dirty: bool,
    /// Complete transactions in the log.
    pub transactions: u32,
    /// The last of them, if any: later fine-grained commits must be newer.
    pub last_tid: Option<Tid>,
    /// The newest transaction that is fully checkpointed after the replay.
    pub committed: Tid,
    /// ID that the next transaction gets.
    pub next_tid: Tid,
    /// I-transactions newer than `committed`, which the engine applies.
    pub i_transactions: usize,
    /// Blocks to replay (each once, the newest copy).
    pub replayed_blocks: usize,
    /// Complete fast commits that follow the last transaction.
    pub fast_commits: u32,
    /// Records of these fast commits, in order. Unless empty, the caller must apply them all in the
    /// first transaction that it commits.
    pub fast_commit_records: Vec<Record>,
    /// Copies in the log that a revoke excluded.
    pub revoked_blocks: usize,
    /// Revoke records read.
    pub revoke_records: usize,
    /// The error that an earlier writer recorded when it aborted (a negative errno); the
    /// caller marks the file system as having errors, then calls
    /// [`Journal::clear_errno`](crate::Journal::clear_errno).
    pub errno: Option<i32>,
    /// The rows of the decision table that applied, each once, in their order of first use.
    pub cases: Vec<Case>,
}
