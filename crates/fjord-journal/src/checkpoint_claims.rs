//! Which home writes of a checkpoint come next, for threads that carry one out together.
//!
//! Owns the commit that is being checkpointed, and how far. A thread claims a batch of its blocks under the
//! lock, writes it without, and tells the end of it; so the batches of several threads are in flight at a
//! time ("cooperative checkpoint" of parallel journaling, FAST '18).
//!
//! Invariants: one commit at a time, the oldest, so that no block has two home writes in flight; each of its
//! batches is claimed once; its checkpoint has ended when all have been claimed and each has been written.

use std::ops::Range;
use std::sync::Arc;

use fjord_block::lock::{Condvar, Mutex, Rank};
use fjord_block::plant::{Bug, planted};

use crate::pipeline::Commit;

/// Most blocks in one batch of home writes: the most that a freed block waits for.
/// One where a model check looks at several batches.
pub(crate) const BATCH_BLOCKS: usize = if cfg!(feature = "model") { 1 } else { 256 };

/// See the [module](self).
pub(crate) struct CheckpointClaims {
    current: Mutex<Option<Current>>,
    /// Signalled when a batch has ended, or a commit is ready to be claimed from.
    moved: Condvar,
}

/// Guarded by `CheckpointClaims::current`.
struct Current {
    commit: Arc<Commit>,
    /// Buffers that have been claimed.
    claimed_count: usize,
    /// Batches that have not ended.
    in_flight_count: usize,
    preparation: Preparation,
    /// A write failed, so that it never ends.
    is_failed: bool,
}

/// How far what has to precede the batches of a commit is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Preparation {
    Needed,
    /// A thread is at it.
    UnderWay,
    Done,
}

/// What a call that claims and writes a batch did.
pub(crate) enum Batch {
    /// It wrote a batch, with so many blocks.
    Done(usize),
    /// It waited for other threads.
    Waited,
    /// Nothing is committed that is not checkpointed.
    Nothing,
}

/// What a thread is to do next.
pub(crate) enum Claim {
    /// To prepare the commit, before any more of its blocks is written; then [`CheckpointClaims::ready`].
    Prepare(Arc<Commit>),
    /// To write these buffers of the commit; then [`CheckpointClaims::ended`].
    Batch(Arc<Commit>, Range<usize>),
    /// Nothing, until other threads have written theirs.
    Wait,
    /// Nothing is committed that is not checkpointed.
    Nothing,
}

impl Default for CheckpointClaims {
    fn default() -> CheckpointClaims {
        CheckpointClaims {
            current: Mutex::new(Rank::CheckpointClaims, None),
            moved: Condvar::new(),
        }
    }
}

impl Current {
    fn is_claimed(&self) -> bool {
        self.claimed_count == self.commit.buffers.len()
    }

    /// Whether all depends on other threads.
    fn is_busy(&self) -> bool {
        let is_waited_for = match self.preparation {
            Preparation::Needed => false,
            Preparation::UnderWay => true,
            Preparation::Done => self.is_claimed() && self.in_flight_count > 0,
        };
        is_waited_for && !self.is_failed
    }
}

impl CheckpointClaims {
    /// Claims what is next; `begin` begins the checkpoint of the oldest commit, if there is one.
    pub(crate) fn claim(&self, begin: impl FnOnce() -> Option<Arc<Commit>>) -> Claim {
        let mut slot = self.current.lock();
        let Some(current) = &mut *slot else {
            let Some(commit) = begin() else { return Claim::Nothing };
            *slot = Some(Current {
                commit: commit.clone(),
                claimed_count: 0,
                in_flight_count: 0,
                preparation: Preparation::UnderWay,
                is_failed: false,
            });
            return Claim::Prepare(commit);
        };
        if current.is_failed {
            return Claim::Nothing;
        }
        if current.is_busy() {
            return Claim::Wait;
        }
        if current.preparation == Preparation::Needed {
            current.preparation = Preparation::UnderWay;
            return Claim::Prepare(current.commit.clone());
        }
        let first = current.claimed_count;
        let end = current.commit.buffers.len().min(first + BATCH_BLOCKS);
        current.claimed_count = end;
        current.in_flight_count += 1;
        Claim::Batch(current.commit.clone(), first..end)
    }

    /// What has to precede the next batch is done.
    pub(crate) fn ready(&self) {
        if let Some(current) = &mut *self.current.lock() {
            current.preparation = Preparation::Done;
        }
        self.moved.notify_all();
    }

    /// What has to precede a batch is another from now on. No batch is in flight: the caller has the checkpoint
    /// lock alone.
    pub(crate) fn prepare_again(&self) {
        if let Some(current) = &mut *self.current.lock() {
            debug_assert!(
                current.in_flight_count == 0 || current.is_failed,
                "a batch is in flight"
            );
            current.preparation = Preparation::Needed;
        }
    }

    /// A batch was written; `end` ends the checkpoint of its commit, if it was the last.
    pub(crate) fn ended(&self, end: impl FnOnce()) {
        let mut current = self.current.lock();
        if let Some(commit) = &mut *current {
            commit.in_flight_count = commit.in_flight_count.saturating_sub(1);
            let is_written = commit.in_flight_count == 0 || planted(Bug::BatchOfOthersUncounted);
            if commit.is_claimed() && is_written && !commit.is_failed {
                end();
                *current = None;
            }
        }
        drop(current);
        if !planted(Bug::BatchEndWakesNobody) {
            self.moved.notify_all();
        }
    }

    /// A batch failed, or what precedes one; the journal has stopped, so that nobody claims more.
    pub(crate) fn failed(&self) {
        if let Some(current) = &mut *self.current.lock() {
            current.is_failed = true;
        }
        self.moved.notify_all();
    }

    /// Whether batches of the commit in progress can be claimed.
    pub(crate) fn has_more(&self) -> bool {
        self.current
            .lock()
            .as_ref()
            .is_some_and(|current| !current.is_claimed() && !current.is_failed)
    }

    /// Waits while all depends on other threads.
    pub(crate) fn wait(&self) {
        let mut current = self.current.lock();
        while current.as_ref().is_some_and(Current::is_busy) {
            self.moved.wait(&mut current);
        }
    }
}

#[cfg(test)]
mod tests {
    use fjord_block::Buf;
    use fjord_format::types::{BlockNo, Tid};

    use super::*;
    use crate::buffer::{Buffer, BufferKind};
    use crate::pipeline::tests::commit_of;
    use crate::transaction::Sequence;

    /// A commit that is in part in its home location when the order of home writes changes is prepared again,
    /// before any more of it is claimed.
    #[test]
    fn the_rest_of_a_commit_is_prepared_again() {
        let buffer = |number| Buffer::new(BlockNo(number), Buf::zeroed(1024), BufferKind::Metadata);
        let buffers = (0..BATCH_BLOCKS as u64 + 1).map(buffer).collect();
        let mut commits = vec![commit_of(Sequence(Tid(7)), buffers)];
        let claims = CheckpointClaims::default();
        assert!(matches!(claims.claim(|| commits.pop()), Claim::Prepare(_)));
        assert!(matches!(claims.claim(|| commits.pop()), Claim::Wait));
        claims.ready();
        assert!(matches!(claims.claim(|| None), Claim::Batch(_, range) if range.start == 0));
        claims.ended(|| panic!("a batch is left"));
        claims.prepare_again();
        assert!(matches!(claims.claim(|| None), Claim::Prepare(_)));
        assert!(matches!(claims.claim(|| None), Claim::Wait));
        claims.ready();
        assert!(matches!(claims.claim(|| None), Claim::Batch(_, range) if range.len() == 1));
        let mut has_ended = false;
        claims.ended(|| has_ended = true);
        assert!(has_ended && matches!(claims.claim(|| None), Claim::Nothing));
        claims.prepare_again();
    }
}
