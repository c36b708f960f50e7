//! Partial commit: the changes of some parts of the running transaction become a transaction in the
//! log; the rest keeps running.
//!
//! 1. lock the transaction and wait for its handles, as in a full commit;
//! 2. compute the closure of the wanted parts ([`crate::part`]); if it is nearly everything, or
//!    includes a block of no single part, or the log is too full for two transactions, make a full
//!    commit;
//! 3. freeze the closure: its buffers, revokes, data tickets and callbacks; of shared blocks the
//!    last committed version with the closure's entries. The transaction accepts handles again;
//! 4. continue as in a full commit. For recovery it is an ordinary transaction.
//!
//! Threads that want parts during a commit register them ([`Running::wanted`]); the next partial
//! commit includes them all.
//!
//! Invariant: no handle is split between the logged parts and the rest, so a crash may lose the
//! rest.
//!
//! [`Running::wanted`]: crate::transaction::Running

use std::sync::Arc;
use std::time::{Duration, Instant};

use fjord_block::lock::pause;
use fjord_block::plant::{Bug, planted};
use fjord_format::types::{BlockNo, Tid};

use super::build::LogShape;
use super::lock::Locked;
use super::script::Wants;
use super::turn::{Next, Turn};
use crate::buffer::{Buffer, Entries};
use crate::error::{JournalError, Result};
use crate::journal::{Journal, PartRules};
use crate::log::Log;
use crate::open_handles::check_no_open_handle;
use crate::part_set::{Part, PartSet, WholeReason};
use crate::pipeline::Commit;
use crate::state::State;
use crate::stats;
use crate::transaction::{Batch, Contents, Phase, Version};
use crate::wanted_parts::{Found, Need, PartialCommit, WantedParts};

/// If the rest would be at most this fraction (1/N) of the blocks, the whole transaction commits:
/// it costs hardly more, and the next one starts empty.
const NEARLY_ALL: usize = 8;

/// How often, and how long, a partial commit waits for parts that are not ready.
const TRIES_MAX: u32 = 8;
const TRY_INTERVAL: Duration = Duration::from_micros(200);

/// Why a partial commit is not possible.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NotPartial {
    Whole(WholeReason),
    /// See [`PartRules::is_ready`]; may succeed later.
    NotReady,
}

impl From<WholeReason> for NotPartial {
    fn from(reason: WholeReason) -> NotPartial {
        NotPartial::Whole(reason)
    }
}

/// The contents of a partial commit.
struct Plan {
    closure: PartSet,
    /// Reserved revoke blocks that the rest of the transaction no longer needs.
    revoke_blocks: u32,
}

impl Journal {
    /// Makes durable the changes of transaction `tid` to the closure of `seeds`. Same as
    /// [`Journal::commit`] if a partial commit is not possible. Returns at once if they are
    /// durable.
    pub fn commit_parts(&self, tid: Tid, seeds: &[Part]) -> Result<PartialCommit> {
        self.commit_wanted_parts(&mut WantedParts::new(tid, seeds))
    }

    /// Whether the changes of transaction `tid` to the closure of `seeds` are durable, by commits of
    /// parts or of the whole transaction. Commits nothing and does not wait.
    pub fn are_parts_committed(&self, tid: Tid, seeds: &[Part]) -> bool {
        if self.is_committed(tid) {
            return true;
        }
        let state = self.inner.state.lock();
        let runs = state.running.as_ref().is_some_and(|running| running.transaction.tid == tid);
        self.parts().is_some() && runs && matches!(need(&state, seeds), Need::Nothing)
    }

    /// [`Journal::commit_parts`], for a caller that may have asked before.
    pub(crate) fn commit_wanted_parts(&self, wanted: &mut WantedParts) -> Result<PartialCommit> {
        check_no_open_handle(self, "a commit")?;
        let tid = wanted.tid;
        let (Some(log), Some(parts)) = (&self.inner.log, self.parts()) else {
            return self.commit_whole_for(tid, WholeReason::NoParts);
        };
        let mut tries_left = TRIES_MAX;
        loop {
            let turn = self.take_turn(|state| self.next_for_parts(state, wanted))?;
            let lock = match turn {
                Turn::Outcome(Ok(outcome)) => {
                    if let Some((tid, generation)) = wanted.nothing {
                        self.publish_generation(tid, generation);
                    }
                    return Ok(outcome);
                }
                Turn::Outcome(Err(reason)) => return self.commit_whole_for(tid, reason),
                Turn::Settle(lock) => {
                    let found = wanted.found.as_ref().and_then(|found| found.commit.as_ref());
                    self.settle_until(lock, |_| found.is_none_or(|commit| commit.has_ended()));
                    continue;
                }
                Turn::Commit(lock) => lock,
            };
            self.avoid_log_wrap()?;
            if self.inner.dual {
                self.wait_for_room_in_flight()?;
            }
            if !self.commit_wanted(log, parts, wanted, tries_left > 0)? {
                drop(lock);
                pause(TRY_INTERVAL);
                tries_left -= 1;
            } else if self.inner.dual {
                lock.release_to_settle();
            } else {
                self.settle()?;
            }
        }
    }

    /// What a thread needs that waits for parts; `Err` with the reason if it needs a full commit.
    fn next_for_parts(
        &self,
        state: &mut State,
        wanted: &mut WantedParts,
    ) -> Result<Next<Result<PartialCommit, WholeReason>>> {
        let WantedParts { tid, seeds, need, found, .. } = wanted;
        if found.is_none() {
            match served(state, *tid, seeds, need) {
                Some(Served::Done(outcome)) => return Ok(Next::Done(Ok(outcome))),
                Some(Served::NeedsWhole(reason)) => return Ok(Next::Done(Err(reason))),
                Some(Served::Frozen(commit, outcome)) => {
                    *found = Some(Found { commit: Some(commit), outcome });
                }
                None => {
                    self.check_running()?;
                    return Ok(Next::Commit(wanted.partial()));
                }
            }
        }
        Ok(match found {
            Some(Found { commit: Some(commit), .. }) if !commit.is_settled() => {
                Next::Settle(commit.clone())
            }
            Some(Found { outcome, .. }) => Next::Done(Ok(*outcome)),
            None => Next::Commit(wanted.partial()),
        })
    }

    /// What other commits have done for a caller, if they have made its parts durable. The parts are
    /// registered for the next partial commit.
    pub(crate) fn poll_parts(&self, wanted: &mut WantedParts) -> Option<PartialCommit> {
        let WantedParts { tid, seeds, need, .. } = wanted;
        if need.is_none() && (self.inner.log.is_none() || self.parts().is_none()) {
            *need = Some(Need::Whole(WholeReason::NoParts));
        }
        if let Some(Need::Whole(reason)) = *need {
            return self.is_committed(*tid).then_some(PartialCommit::Whole(reason));
        }
        match served(&mut self.inner.state.lock(), *tid, seeds, need)? {
            Served::Done(outcome) => Some(outcome),
            Served::Frozen(commit, outcome) => commit.is_settled().then_some(outcome),
            Served::NeedsWhole(reason) => {
                *need = Some(Need::Whole(reason));
                None
            }
        }
    }

    fn commit_whole_for(&self, tid: Tid, reason: WholeReason) -> Result<PartialCommit> {
        if self.is_committed(tid) {
            return Ok(PartialCommit::Durable);
        }
        self.commit(tid).map(|()| PartialCommit::Whole(reason))
    }

    /// Dispatches the wanted parts of the running transaction; `false` if they are not ready and
    /// `may_retry`. The caller holds the commit lock.
    fn commit_wanted(
        &self,
        log: &Log,
        parts: &dyn PartRules,
        wanted: &mut WantedParts,
        may_retry: bool,
    ) -> Result<bool> {
        let began = Instant::now();
        // A journal that stops meanwhile leaves the transaction locked. Nothing has left it.
        let locked = self.lock_running().inspect_err(|_| self.unlock_running(&[]))?;
        let unplanned = match self.plan(log, parts, &locked) {
            Ok(Some(plan)) => {
                let batch = take_parts(parts, &locked, plan);
                let batch = batch.inspect_err(|error| self.abort(error.clone()))?;
                let commit = self.dispatch(batch, began, self.wants(Wants::Durability))?;
                if self.inner.dual && planted(Bug::PartsToldInFlight) {
                    self.publish_generation(commit.tid, commit.generation);
                }
                stats::add(&self.inner.counters.partial_commits, 1);
                let outcome = PartialCommit::Parts { log_blocks: commit.log_blocks };
                wanted.found = Some(Found { commit: Some(commit), outcome });
                return Ok(true);
            }
            // An earlier commit included the wanted parts.
            Ok(None) => {
                self.commit_nothing(&locked, wanted);
                return Ok(true);
            }
            Err(unplanned) => unplanned,
        };
        let reason = match unplanned {
            NotPartial::Whole(reason) => reason,
            NotPartial::NotReady if may_retry => {
                // For a moment, so that handles can start and stop.
                self.unlock_running(&locked.wanted);
                return Ok(false);
            }
            NotPartial::NotReady => WholeReason::WholePart,
        };
        self.inner.state.lock().whole = Some((locked.transaction.tid, reason));
        let commit = self.dispatch_whole(&locked, began, self.wants(Wants::Durability))?;
        let outcome = PartialCommit::Whole(reason);
        wanted.found = Some(Found { commit: Some(commit), outcome });
        Ok(true)
    }

    /// There is nothing to commit: the newest commit in flight covers the wanted parts.
    fn commit_nothing(&self, locked: &Locked, wanted: &mut WantedParts) {
        let mut state = self.inner.state.lock();
        if let Some(running) = &mut state.running {
            running.unlock();
            if planted(Bug::NothingToldInFlight) {
                running.generations_committed = locked.generation;
            }
        }
        self.inner.unlocked.notify_all();
        let outcome = PartialCommit::Parts { log_blocks: 0 };
        let commit = state.pipeline.without_outcome().last().cloned();
        wanted.found = Some(Found { commit, outcome });
        wanted.nothing = Some((locked.transaction.tid, locked.generation));
    }

    /// The partial commits of transaction `tid` up to that number are durable.
    fn publish_generation(&self, tid: Tid, generation: u32) {
        let mut state = self.inner.state.lock();
        if let Some(running) = &mut state.running
            && running.transaction.tid == tid
        {
            running.generations_committed = running.generations_committed.max(generation);
            running.wake_waiters();
        }
    }

    /// Unlocks the running transaction, whose next partial commit includes the parts `wanted`.
    fn unlock_running(&self, wanted: &[Part]) {
        let mut state = self.inner.state.lock();
        if let Some(running) = &mut state.running {
            running.unlock();
            running.wanted.extend_from_slice(wanted);
        }
        self.inner.unlocked.notify_all();
    }

    /// The closure of the wanted parts; `None` if it is empty.
    fn plan(
        &self,
        log: &Log,
        parts: &dyn PartRules,
        locked: &Locked,
    ) -> Result<Option<Plan>, NotPartial> {
        let mut contents = locked.transaction.contents.lock();
        let mut closure = contents.parts.closure(&locked.wanted);
        if planted(Bug::PartsNotClosed) {
            closure = locked.wanted.iter().copied().collect();
        }
        if closure.is_empty() {
            return Ok(None);
        }
        if closure.contains(Part::WHOLE) {
            return Err(WholeReason::WholePart.into());
        }
        if !parts.is_ready(&closure) {
            return Err(NotPartial::NotReady);
        }
        let counts = Counts::of(&contents, parts, &closure);
        drop(contents);
        if let Some(reason) = counts.are_nearly_all() {
            return Err(reason.into());
        }
        let per_block = log.format.revokes_per_block().max(1);
        let rest = counts.all_revokes - counts.revokes;
        let revoke_blocks = counts.all_revokes.div_ceil(per_block) - rest.div_ceil(per_block);
        let shape =
            LogShape::new(&log.format, counts.blocks + counts.shared_blocks, counts.revokes);
        let state = self.inner.state.lock();
        let reserved = state.running.as_ref().map_or(0, |running| running.reserved_blocks);
        let rest = reserved.saturating_sub((counts.blocks + revoke_blocks) as u32);
        let need = self.log_blocks_needed(rest).saturating_add(shape.blocks() as u32 + 1);
        if need > self.free_blocks(&state) {
            return Err(WholeReason::LogSpace.into());
        }
        Ok(Some(Plan { closure, revoke_blocks: revoke_blocks as u32 }))
    }
}

/// What other commits have done for a caller.
enum Served {
    Done(PartialCommit),
    /// A full commit is needed.
    NeedsWhole(WholeReason),
    /// It is frozen: the commit to wait for, and the outcome then.
    Frozen(Arc<Commit>, PartialCommit),
}

/// Whether the commit lock is not needed for `seeds` of transaction `tid`: what has been done for
/// them, or `None`. `goal` is what the caller found that it needs when it was first asked.
fn served(state: &mut State, tid: Tid, seeds: &[Part], goal: &mut Option<Need>) -> Option<Served> {
    if state.committed.at_least(tid) {
        let whole = PartialCommit::Whole(state.why_whole(tid));
        return Some(Served::Done(goal.map_or(PartialCommit::Durable, |_| whole)));
    }
    if state.running.as_ref().is_none_or(|running| running.transaction.tid != tid) {
        return Some(Served::NeedsWhole(state.why_whole(tid)));
    }
    let need = *goal.get_or_insert_with(|| {
        let need = need(state, seeds);
        if let (Need::Commit(_), Some(running)) = (need, &mut state.running) {
            running.wanted.extend_from_slice(seeds);
        }
        need
    });
    let committed = state.running.as_ref().map_or(0, |run| run.generations_committed);
    match need {
        Need::Nothing => Some(Served::Done(PartialCommit::Durable)),
        Need::Whole(reason) => Some(Served::NeedsWhole(reason)),
        Need::InFlight(wanted) if committed >= wanted => Some(Served::Done(PartialCommit::Durable)),
        Need::Commit(wanted) if committed >= wanted => {
            Some(Served::Done(PartialCommit::Parts { log_blocks: 0 }))
        }
        Need::InFlight(number) => {
            let commit = state.pipeline.partial_commit(tid, number)?.clone();
            Some(Served::Frozen(commit, PartialCommit::Durable))
        }
        Need::Commit(number) => {
            let commit = state.pipeline.partial_commit(tid, number)?.clone();
            Some(Served::Frozen(commit, PartialCommit::Parts { log_blocks: 0 }))
        }
    }
}

/// What a caller needs of the running transaction, which must exist.
fn need(state: &State, seeds: &[Part]) -> Need {
    let not_durable = state.pipeline.generation_not_durable(seeds);
    let Some(running) = &state.running else { return Need::Nothing };
    let closure = running.transaction.contents.lock().parts.closure(seeds);
    if closure.contains(Part::WHOLE) {
        Need::Whole(WholeReason::WholePart)
    } else if !closure.is_empty() {
        Need::Commit(running.generation + 1)
    } else if running.phase == Phase::Locked {
        // Perhaps frozen by the commit in progress.
        Need::InFlight(running.generation)
    } else if let Some(generation) = not_durable {
        Need::InFlight(generation)
    } else {
        Need::Nothing
    }
}

impl State {
    /// Why a full commit served a caller who wanted parts: if it began as a partial commit, its
    /// reason applies to all callers that waited for it.
    fn why_whole(&self, tid: Tid) -> WholeReason {
        self.whole.filter(|(other, _)| *other == tid).map_or(WholeReason::UnderWay, |(_, why)| why)
    }
}

/// Share of a transaction that a closure has.
struct Counts {
    /// Blocks of the closure; a block that left and rejoined the transaction counts twice.
    blocks: usize,
    /// Blocks of all parts, counted likewise.
    all_blocks: usize,
    /// Blocks that parts share.
    shared_blocks: usize,
    revokes: usize,
    all_revokes: usize,
    /// Ordered data of other parts only.
    other_data: usize,
}

impl Counts {
    fn of(contents: &Contents, parts: &dyn PartRules, closure: &PartSet) -> Counts {
        let is_chosen = |block: BlockNo| closure.contains(parts.part_of(block));
        let shared_blocks = contents.buffers.iter().filter(|buffer| buffer.is_shared()).count();
        let is_own = |buffer: &&Arc<Buffer>| !buffer.is_shared() && is_chosen(buffer.block());
        Counts {
            blocks: contents.buffers.iter().filter(is_own).count(),
            all_blocks: contents.buffers.len() - shared_blocks,
            shared_blocks,
            revokes: contents.revoked.iter().filter(|&&block| is_chosen(block)).count(),
            all_revokes: contents.revoked.len(),
            other_data: contents.data.iter().filter(|(part, _)| !closure.contains(*part)).count(),
        }
    }

    fn are_nearly_all(&self) -> Option<WholeReason> {
        let rest = self.all_blocks - self.blocks + self.all_revokes - self.revokes;
        let is_little = rest * NEARLY_ALL <= self.all_blocks + self.all_revokes;
        let reason = if rest == 0 { WholeReason::Everything } else { WholeReason::NearlyAll };
        (self.other_data == 0 && is_little).then_some(reason)
    }
}

/// Freezes the contents of the plan and removes them from the transaction, which has no open
/// handle.
fn take_parts(parts: &dyn PartRules, locked: &Locked, plan: Plan) -> Result<Batch> {
    let Plan { closure, revoke_blocks } = plan;
    let (tid, sequence) = (locked.transaction.tid, locked.sequence);
    let is_chosen = |block: BlockNo| closure.contains(parts.part_of(block));
    // Buffers are locked before the contents of a transaction.
    let buffers = std::mem::take(&mut locked.transaction.contents.lock().buffers);
    let mut versions: Vec<Version> = Vec::new();
    let mut kept = Vec::new();
    let mut reserved_blocks = revoke_blocks;
    for buffer in buffers {
        let block = buffer.block();
        if buffer.is_shared() {
            let copy = |current: &[u8], version: &mut [u8]| {
                if planted(Bug::EntriesOfAllParts) {
                    version.copy_from_slice(current);
                }
                parts.copy_entries(block, current, version, &closure);
            };
            match buffer.freeze_entries(tid, sequence, copy) {
                Entries::Left => reserved_blocks += 1,
                Entries::Unchanged => kept.push(buffer),
                Entries::Frozen { version, is_all } => {
                    reserved_blocks += u32::from(is_all);
                    if !is_all {
                        kept.push(buffer.clone());
                    }
                    versions.push((buffer, version));
                }
                Entries::NoBase => {
                    let message = format!("block {block} has lost its last committed contents");
                    return Err(JournalError::Usage(message));
                }
            }
        } else if is_chosen(block) {
            reserved_blocks += 1;
            let version = buffer.freeze(tid, sequence);
            versions.extend(version.map(|version| (buffer, version)));
        } else {
            kept.push(buffer);
        }
    }
    let mut contents = locked.transaction.contents.lock();
    let contents = &mut *contents;
    contents.buffers = kept;
    contents.parts.remove(&closure);
    let (revoked, rest) =
        std::mem::take(&mut contents.revoked).into_iter().partition(|&block| is_chosen(block));
    contents.revoked = rest;
    let forgotten = contents.forgotten.extract_if(|&block, _| is_chosen(block));
    let data = contents.data.extract_if(.., |(part, _)| closure.contains(*part));
    let data = data.filter(|_| !planted(Bug::PartDataNotAwaited));
    let callbacks = contents.callbacks.extract_if(.., |(part, _)| closure.contains(*part));
    Ok(Batch {
        tid,
        sequence,
        generation: locked.generation,
        reserved_blocks,
        versions,
        revoked,
        forgotten: forgotten.map(|(_, buffer)| buffer).collect(),
        data: data.map(|(_, ticket)| ticket).collect(),
        callbacks: callbacks.map(|(_, callback)| callback).collect(),
        parts: Some(closure),
    })
}
