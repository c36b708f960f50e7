//! The pipeline of commits: every commit from the freeze of its contents until its last checkpoint
//! write.
//!
//! Owns [`Commit`], one object per commit, and [`Pipeline`], the commits in the order of their
//! sequences with the stage of each. A commit goes through the stages in order:
//!
//! ```text
//! freeze ─ dispatch ─── settle ──────── retire ─────────────── checkpoint
//!          Flushing     Committing      Committed               Checkpointing
//!          its writes   all submitted;  durable; versions are   to home locations;
//!          are built    outcome not     published, callbacks    then it leaves
//!                       known           told
//! ```
//!
//! Invariants: sequences have no gaps; stages never increase from the oldest commit to the newest;
//! a commit leaves the pipeline at its oldest end only. Without a log there is nothing to
//! checkpoint, so a commit leaves when it retires.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use fjord_block::lock::Mutex;
use fjord_block::plant::{Bug, planted};
use fjord_block::{Request, Ticket};
use fjord_format::types::Tid;

use crate::buffer::Buffer;
use crate::commit_pieces::CommitPieces;
use crate::part_set::{ChangedParts, Part};
use crate::transaction::{Callback, Phase, Sequence};
use crate::waiters::Waiters;

/// A transaction, or parts of one, on its way to its home locations.
pub(crate) struct Commit {
    /// Its transaction.
    pub(crate) tid: Tid,
    pub(crate) sequence: Sequence,
    /// The parts that commit.
    pub(crate) parts: ChangedParts,
    /// It commits the rest of its transaction, and so ends it.
    pub(crate) is_last: bool,
    /// Number of the commit in its transaction.
    pub(crate) generation: u32,
    /// First journal block that it takes.
    pub(crate) log_start: u32,
    /// Log blocks that it takes.
    pub(crate) log_blocks: u32,
    /// When the commit began.
    pub(crate) began: Instant,
    /// Buffers with a version of it; each knows which version to checkpoint.
    pub(crate) buffers: Vec<Arc<Buffer>>,
    /// Freed blocks whose older versions must not be checkpointed any more.
    pub(crate) forgotten: Vec<Arc<Buffer>>,
    /// Callers that asked for it before it was frozen, with a thread or without.
    pub(crate) callers: u32,
    /// Threads that wait for it.
    pub(crate) waiters: Vec<Arc<Waiters>>,
    /// What is left to do until it retires.
    pub(crate) unsettled: Mutex<Unsettled>,
}

/// How a commit has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    /// It is durable, and its callbacks have been called.
    Durable,
    /// It failed: the journal has stopped.
    Failed,
}

/// Guarded by [`Commit::unsettled`]. The first two are empty once the commit has retired or failed.
#[derive(Default)]
pub(crate) struct Unsettled {
    /// Called with the outcome.
    pub(crate) callbacks: Vec<Callback>,
    /// What its script left to settle; `None` until it is dispatched, and while a thread settles it.
    pub(crate) sent: Option<Sent>,
    /// Its script has run.
    pub(crate) dispatched: bool,
    /// What threads that wait for it may write, until it is dispatched.
    pub(crate) pieces: Option<Arc<CommitPieces>>,
    /// Its outcome, once the callbacks have been called.
    pub(crate) ended: Option<Ended>,
}

/// What a commit's script left to settle.
pub(crate) enum Sent {
    /// Nothing: the commit is durable.
    Durable,
    /// Its log blocks were submitted. The commit block follows once they are flushed.
    Body {
        /// File data that the commit refers to.
        data: Vec<Ticket>,
        /// Log blocks before the commit block.
        body: Vec<Ticket>,
        /// The write of the commit block, without FUA.
        block: Request,
    },
    /// Its log blocks are durable, and its commit block was submitted without FUA; the next flush
    /// makes it durable.
    Written {
        /// Byte offset of the commit block.
        commit_offset: u64,
        /// The write; `None` once it has been waited for.
        ticket: Option<Ticket>,
    },
    /// All its writes were submitted, in order, and their outcome is not known.
    InFlight {
        /// File data that the commit refers to.
        data: Vec<Ticket>,
        /// Log blocks before the commit block.
        body: Vec<Ticket>,
        /// The commit block.
        commit: Ticket,
        /// Byte offset of the commit block.
        commit_offset: u64,
        /// The commit block was submitted with FUA.
        fua: bool,
    },
}

impl Commit {
    /// The transaction, if this commit ends it.
    pub(crate) fn ends(&self) -> Option<Tid> {
        self.is_last.then_some(self.tid)
    }

    /// Threads that wait for the commit may write pieces of it.
    pub(crate) fn share(&self, pieces: Arc<CommitPieces>) {
        self.unsettled.lock().pieces = Some(pieces);
    }

    /// No thread writes pieces of it any more.
    pub(crate) fn give_up_pieces(&self) {
        let pieces = self.unsettled.lock().pieces.take();
        pieces.into_iter().for_each(|pieces| pieces.give_up());
    }

    /// Its pieces, if any is left that no thread has claimed.
    pub(crate) fn shared_pieces(&self) -> Option<Arc<CommitPieces>> {
        self.unsettled.lock().pieces.clone().filter(|pieces| pieces.has_unclaimed())
    }

    /// Takes what is left to settle; `None` unless the commit has been dispatched.
    pub(crate) fn take_sent(&self) -> Option<Sent> {
        self.unsettled.lock().sent.take()
    }

    /// Returns what is left to settle after a part of it.
    pub(crate) fn put_sent(&self, sent: Sent) {
        self.unsettled.lock().sent = Some(sent);
    }

    /// Whether its script has run and its outcome is not known.
    pub(crate) fn can_settle(&self) -> bool {
        self.unsettled.lock().sent.is_some()
    }

    pub(crate) fn take_callbacks(&self) -> Vec<Callback> {
        std::mem::take(&mut self.unsettled.lock().callbacks)
    }

    /// Whether its script has run.
    pub(crate) fn is_dispatched(&self) -> bool {
        self.unsettled.lock().dispatched
    }

    /// Whether it is durable and its callbacks have been called.
    pub(crate) fn is_settled(&self) -> bool {
        self.unsettled.lock().ended == Some(Ended::Durable)
    }

    /// Whether it has an outcome.
    pub(crate) fn has_ended(&self) -> bool {
        self.unsettled.lock().ended.is_some()
    }

    /// Whether it failed.
    pub(crate) fn has_failed(&self) -> bool {
        self.unsettled.lock().ended == Some(Ended::Failed)
    }

    /// The commit has ended: wakes the threads that wait for it. Under the state lock.
    pub(crate) fn end(&self, ended: Ended) {
        let mut unsettled = self.unsettled.lock();
        (unsettled.ended, unsettled.pieces) = (Some(ended), None);
        drop(unsettled);
        self.wake_waiters();
    }

    /// Wakes all threads that wait for it.
    pub(crate) fn wake_waiters(&self) {
        self.waiters.iter().for_each(|waiters| waiters.wake_all());
    }

    /// Its script has run.
    pub(crate) fn dispatched(&self, sent: Sent) {
        let mut unsettled = self.unsettled.lock();
        (unsettled.sent, unsettled.dispatched) = (Some(sent), true);
        unsettled.pieces = None;
    }

    /// Whether its script waited until it was durable.
    pub(crate) fn is_durable(&self) -> bool {
        matches!(self.unsettled.lock().sent, Some(Sent::Durable))
    }

    /// Whether it has changes to any of `seeds` that were made in transaction `tid` up to
    /// `generation`, or at any time if that is `None`.
    fn has_changes(&self, tid: Tid, generation: Option<u32>, seeds: &[Part]) -> bool {
        self.tid == tid && self.parts.has_any(seeds, generation)
    }
}

/// The commits. Guarded by the journal's state lock.
#[derive(Default)]
pub(crate) struct Pipeline {
    /// Oldest first. A log has room for thousands of commits that wait for their checkpoint.
    slots: VecDeque<Slot>,
    /// Number of the oldest commits that are known to have retired and to have told their callers: only
    /// their checkpoint is left. So the search for a commit in flight does not pass them.
    retired_count: usize,
}

struct Slot {
    commit: Arc<Commit>,
    /// From [`Phase::Flushing`] on.
    phase: Phase,
    /// The commit failed, and its callbacks have been called. The journal has stopped, so it stays.
    failed: bool,
}

impl Pipeline {
    /// A commit is frozen.
    pub(crate) fn push(&mut self, commit: Arc<Commit>) {
        self.skip_retired();
        self.slots.push_back(Slot { commit, phase: Phase::Flushing, failed: false });
        self.check(self.slots.len() - 1);
    }

    pub(crate) fn set_phase(&mut self, commit: &Arc<Commit>, phase: Phase) {
        let Some(index) = self.index_of(commit) else { return };
        self.slots[index].phase = phase;
        self.check(index);
    }

    /// The slot of a commit in flight, which is one of the newest.
    fn index_of(&self, commit: &Arc<Commit>) -> Option<usize> {
        self.slots.iter().rposition(|slot| Arc::ptr_eq(&slot.commit, commit))
    }

    /// Counts commits that have retired since.
    fn skip_retired(&mut self) {
        let is_retired = |slot: &&Slot| slot.phase >= Phase::Committed && slot.commit.is_settled();
        self.retired_count += self.open_slots().take_while(is_retired).count();
    }

    /// All commits that have not retired, and perhaps some that have; oldest first.
    fn open_slots(&self) -> impl Iterator<Item = &Slot> {
        self.slots.range(self.retired_count.min(self.slots.len())..)
    }

    fn open(&self) -> impl Iterator<Item = &Arc<Commit>> {
        self.open_slots().map(|slot| &slot.commit)
    }

    /// A commit failed: it is not in flight any more.
    pub(crate) fn fail(&mut self, commit: &Arc<Commit>) {
        if let Some(index) = self.index_of(commit) {
            self.slots[index].failed = true;
        }
    }

    /// Removes a commit that leaves nothing to checkpoint.
    pub(crate) fn remove(&mut self, commit: &Arc<Commit>) {
        self.slots.retain(|slot| !Arc::ptr_eq(&slot.commit, commit));
        self.retired_count = 0;
    }

    /// All commits, oldest first.
    pub(crate) fn all(&self) -> impl Iterator<Item = &Arc<Commit>> {
        self.slots.iter().map(|slot| &slot.commit)
    }

    /// Commits whose outcome is not known, oldest first.
    pub(crate) fn in_flight(&self) -> impl Iterator<Item = &Arc<Commit>> {
        let is_in_flight = |slot: &&Slot| slot.phase < Phase::Committed && !slot.failed;
        self.open_slots().filter(is_in_flight).map(|slot| &slot.commit)
    }

    /// Number of callers of the commits in flight.
    pub(crate) fn callers_in_flight(&self) -> u32 {
        self.in_flight().map(|commit| commit.callers).sum()
    }

    /// Whether a commit in flight has log blocks that no flush has made durable yet.
    pub(crate) fn has_unflushed(&self) -> bool {
        self.open_slots().any(|slot| slot.phase == Phase::Flushing && !slot.failed)
    }

    /// Whether a commit can be settled: it has been dispatched, and no other thread settles it.
    pub(crate) fn can_settle(&self) -> bool {
        self.in_flight().any(|commit| commit.can_settle())
    }

    /// The oldest commit that another thread settles.
    pub(crate) fn last_write_in_flight(&self) -> Option<&Arc<Commit>> {
        let is_settled_elsewhere = |commit: &&Arc<Commit>| {
            commit.is_dispatched() && !commit.can_settle() && !commit.has_ended()
        };
        self.open().find(is_settled_elsewhere)
    }

    /// Whether a commit before `commit` has no outcome.
    pub(crate) fn has_open_before(&self, commit: &Arc<Commit>) -> bool {
        let mut before = self.open().take_while(|other| !Arc::ptr_eq(other, commit));
        !commit.has_ended() && before.any(|other| !other.has_ended())
    }

    /// The commit that ends a transaction, until it is checkpointed.
    pub(crate) fn commit_of(&self, tid: Tid) -> Option<&Arc<Commit>> {
        self.slot_that_ends(tid).map(|slot| &slot.commit)
    }

    /// Whether the outcome of every commit is known, and none is being dispatched.
    pub(crate) fn is_drained(&self) -> bool {
        self.in_flight().next().is_none()
    }

    /// Whether some commit waits for its checkpoint.
    pub(crate) fn has_checkpoints(&self) -> bool {
        self.slots.front().is_some_and(|slot| slot.phase >= Phase::Committed)
    }

    /// Whether no commit is in flight and none waits for its checkpoint.
    pub(crate) fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// The newest commit that has changes to any of `seeds` as in [`Commit::has_changes`] and is not
    /// durable, or whose callers have not been told: in flight, retiring, or failed.
    pub(crate) fn not_durable(
        &self,
        tid: Tid,
        generation: Option<u32>,
        seeds: &[Part],
    ) -> Option<&Arc<Commit>> {
        let others = self.open().filter(|commit| !commit.is_settled());
        others.filter(|commit| commit.has_changes(tid, generation, seeds)).last()
    }

    /// The oldest commit that is not checkpointed.
    pub(crate) fn oldest(&self) -> Option<&Arc<Commit>> {
        self.slots.front().map(|slot| &slot.commit)
    }

    /// Begins the checkpoint of the oldest commit of which it has not begun; `None` if that is not durable.
    pub(crate) fn begin_checkpoint(&mut self) -> Option<Arc<Commit>> {
        let slot = self.slots.iter_mut().find(|slot| slot.phase != Phase::Checkpointing)?;
        let slot = Some(slot).filter(|slot| slot.phase == Phase::Committed)?;
        slot.phase = Phase::Checkpointing;
        Some(slot.commit.clone())
    }

    /// The checkpoint of the oldest commit has ended.
    pub(crate) fn end_checkpoint(&mut self) {
        let ended = self.slots.pop_front();
        self.retired_count = self.retired_count.saturating_sub(1);
        debug_assert!(ended.is_some_and(|slot| slot.phase == Phase::Checkpointing));
    }

    /// Phase of the commit that ends a transaction.
    pub(crate) fn phase_of(&self, tid: Tid) -> Option<Phase> {
        self.slot_that_ends(tid).map(|slot| slot.phase)
    }

    /// The search begins with the newest, and ends at older transactions.
    fn slot_that_ends(&self, tid: Tid) -> Option<&Slot> {
        let mut slots = self.slots.iter().rev().take_while(|slot| slot.commit.tid.at_least(tid));
        slots.find(|slot| slot.commit.ends() == Some(tid))
    }

    /// The invariants, after a change of slot `index`: no commit is further than an older one, and their
    /// log sequences have no gap. Of the slot and its neighbours; in debug builds of all.
    fn check(&self, index: usize) {
        let (first, count) = match cfg!(debug_assertions) {
            true => (0, self.slots.len()),
            false => (index.saturating_sub(1), 3),
        };
        let near = || self.slots.iter().skip(first).take(count);
        for (older, newer) in near().zip(near().skip(1)) {
            assert!(
                planted(Bug::RetiredNewestFirst) || older.phase >= newer.phase,
                "stages increase: {:?} {:?}, {:?} {:?}",
                older.commit.sequence,
                older.phase,
                newer.commit.sequence,
                newer.phase
            );
            assert!(
                planted(Bug::PartSequenceReused)
                    || older.commit.sequence.next() == newer.commit.sequence,
                "sequences have gaps: {:?}, {:?}",
                older.commit.sequence,
                newer.commit.sequence
            );
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use fjord_block::lock::Rank;

    fn commit(sequence: Sequence) -> Arc<Commit> {
        commit_of(sequence, Vec::new())
    }

    pub(crate) fn commit_of(sequence: Sequence, buffers: Vec<Arc<Buffer>>) -> Arc<Commit> {
        Arc::new(Commit {
            tid: Tid(7),
            sequence,
            parts: ChangedParts::default(),
            is_last: false,
            generation: 0,
            log_start: 1,
            log_blocks: 1,
            began: Instant::now(),
            buffers,
            forgotten: Vec::new(),
            callers: 0,
            waiters: Vec::new(),
            unsettled: Mutex::new(Rank::Unsettled, Unsettled::default()),
        })
    }

    fn sequences_in_flight(pipeline: &Pipeline) -> Vec<Sequence> {
        pipeline.in_flight().map(|commit| commit.sequence).collect()
    }

    /// Commits that wait for their checkpoint cost a search for those in flight nothing.
    #[test]
    fn retired_commits_are_passed_once() {
        let mut pipeline = Pipeline::default();
        let mut sequence = Sequence(Tid(7));
        for _ in 0..100 {
            let newest = commit(sequence);
            pipeline.push(newest.clone());
            assert!(pipeline.open_slots().count() <= 2);
            assert_eq!(sequences_in_flight(&pipeline), [sequence]);
            pipeline.set_phase(&newest, Phase::Committed);
            assert!(pipeline.is_drained());
            assert!(pipeline.not_durable(newest.tid, None, &[]).is_none());
            newest.end(Ended::Durable);
            sequence = sequence.next();
        }
        pipeline.push(commit(sequence));
        for _ in 0..100 {
            assert!(pipeline.begin_checkpoint().is_some());
            pipeline.end_checkpoint();
            assert_eq!(sequences_in_flight(&pipeline), [sequence]);
        }
        assert!(pipeline.begin_checkpoint().is_none());
    }
}
