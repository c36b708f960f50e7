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

use fjord_block::plant::{Bug, planted};
use fjord_format::types::{BlockNo, Tid};

use super::build::LogShape;
use super::{Locked, Wants};
use crate::buffer::{Buffer, Entries};
use crate::error::{JournalError, Result};
use crate::handle::check_no_open_handle;
use crate::journal::Journal;
use crate::log::Log;
use crate::part::{Part, PartSet, Parts, WholeReason};
use crate::pipeline::Commit;
use crate::roles::{Claim, CommitLock, Turn};
use crate::state::State;
use crate::stats;
use crate::transaction::{Batch, Contents, Phase, Version};

/// If the rest would be at most this fraction (1/N) of the blocks, the whole transaction commits:
/// it costs hardly more, and the next one starts empty.
const NEARLY_ALL: usize = 8;

/// Outcome of [`Journal::commit_parts`].
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

/// How often, and how long, a partial commit waits for parts that are not ready.
const TRIES_MAX: u32 = 8;
const TRY_INTERVAL: Duration = Duration::from_micros(200);

/// Why a partial commit is not possible.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NotPartial {
    Whole(WholeReason),
    /// See [`Parts::is_ready`]; may succeed later.
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

/// The parts of transaction `tid` that a caller wants.
pub(crate) struct WantedParts {
    pub(crate) tid: Tid,
    seeds: Vec<Part>,
    /// What it takes; found when the caller asks first.
    need: Option<Need>,
}

impl WantedParts {
    pub(crate) fn new(tid: Tid, seeds: &[Part]) -> WantedParts {
        WantedParts { tid, seeds: seeds.to_vec(), need: None }
    }

    /// The partial commit that will make them durable; `None` if it takes a full one.
    pub(crate) fn partial(&self) -> Option<u32> {
        match self.need? {
            Need::InFlight(number) | Need::Commit(number) => Some(number),
            Need::Nothing | Need::Whole(_) => None,
        }
    }
}

/// What [`Journal::commit_wanted`] did.
struct Wanted {
    outcome: PartialCommit,
    /// To be settled.
    commit: Option<Arc<Commit>>,
    /// Transaction and number of a partial commit without contents: durable with `commit`.
    nothing: Option<(Tid, u32)>,
}

/// What a caller has to do.
#[derive(Clone, Copy)]
enum Need {
    Nothing,
    /// Wait until the commits up to this generation are durable, or have failed.
    InFlight(u32),
    /// The same; and do the last of them if no other thread does.
    Commit(u32),
    Whole(WholeReason),
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
        let WantedParts { tid, seeds, need: goal } = wanted;
        let tid = *tid;
        let (Some(log), Some(parts)) = (&self.inner.log, self.parts()) else {
            return self.commit_whole_for(tid, WholeReason::NoParts);
        };
        for tries_left in (0..=TRIES_MAX).rev() {
            let turn = self.take_turn(Claim::Commit, |state| {
                let served = served(state, tid, seeds, goal);
                if served.is_none() {
                    self.check_running()?;
                }
                Ok(served)
            })?;
            let lock = match turn {
                Turn::Outcome(Served::Done(outcome)) => return Ok(outcome),
                Turn::Outcome(Served::NeedsWhole(reason)) => {
                    return self.commit_whole_for(tid, reason);
                }
                Turn::Outcome(Served::InFlight(commit, outcome)) => {
                    self.settle_until(|_| commit.is_settled())?;
                    return Ok(outcome);
                }
                Turn::Mine(lock) => lock,
            };
            self.avoid_log_wrap()?;
            self.wait_for_room_in_flight()?;
            let Some(wanted) = self.commit_wanted(log, parts, tries_left > 0)? else {
                drop(lock);
                std::thread::sleep(TRY_INTERVAL);
                continue;
            };
            return self.settle_wanted(lock, wanted);
        }
        self.commit_whole_for(tid, WholeReason::WholePart)
    }

    /// Makes the dispatched commits of `wanted` durable.
    fn settle_wanted(&self, lock: CommitLock<'_>, wanted: Wanted) -> Result<PartialCommit> {
        if self.inner.dual {
            drop(lock);
            let settled = |commit: &Arc<Commit>| commit.is_settled();
            self.settle_until(|_| wanted.commit.as_ref().is_none_or(settled))?;
        } else {
            self.settle()?;
        }
        if let Some((tid, generation)) = wanted.nothing {
            self.publish_generation(tid, generation);
        }
        Ok(wanted.outcome)
    }

    /// What other commits have done for a caller, if they have made its parts durable. The parts are
    /// registered for the next partial commit.
    pub(crate) fn poll_parts(&self, wanted: &mut WantedParts) -> Option<PartialCommit> {
        let WantedParts { tid, seeds, need } = wanted;
        if need.is_none() && (self.inner.log.is_none() || self.parts().is_none()) {
            *need = Some(Need::Whole(WholeReason::NoParts));
        }
        if let Some(Need::Whole(reason)) = *need {
            return self.is_committed(*tid).then_some(PartialCommit::Whole(reason));
        }
        match served(&mut self.inner.state.lock(), *tid, seeds, need)? {
            Served::Done(outcome) => Some(outcome),
            Served::InFlight(commit, outcome) => commit.is_settled().then_some(outcome),
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

    /// Dispatches the wanted parts of the running transaction; `None` if they are not ready and
    /// `may_retry`. The caller holds the commit lock.
    fn commit_wanted(
        &self,
        log: &Log,
        parts: &Arc<dyn Parts>,
        may_retry: bool,
    ) -> Result<Option<Wanted>> {
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
                return Ok(Some(Wanted { outcome, commit: Some(commit), nothing: None }));
            }
            // An earlier commit included the wanted parts.
            Ok(None) => return Ok(Some(self.commit_nothing(&locked))),
            Err(unplanned) => unplanned,
        };
        let reason = match unplanned {
            NotPartial::Whole(reason) => reason,
            NotPartial::NotReady if may_retry => {
                // For a moment, so that handles can start and stop.
                self.unlock_running(&locked.wanted);
                return Ok(None);
            }
            NotPartial::NotReady => WholeReason::WholePart,
        };
        self.inner.state.lock().whole = Some((locked.transaction.tid, reason));
        let commit = self.dispatch_whole(&locked, began, self.wants(Wants::Durability))?;
        let outcome = PartialCommit::Whole(reason);
        Ok(Some(Wanted { outcome, commit: Some(commit), nothing: None }))
    }

    /// There is nothing to commit: the newest commit in flight covers the wanted parts.
    fn commit_nothing(&self, locked: &Locked) -> Wanted {
        self.unlock_running(&[]);
        let state = self.inner.state.lock();
        Wanted {
            outcome: PartialCommit::Parts { log_blocks: 0 },
            commit: state.pipeline.in_flight().last().cloned(),
            nothing: Some((locked.transaction.tid, locked.generation)),
        }
    }

    /// The partial commits of transaction `tid` up to that number are durable.
    fn publish_generation(&self, tid: Tid, generation: u32) {
        let mut state = self.inner.state.lock();
        if let Some(running) = &mut state.running
            && running.transaction.tid == tid
        {
            running.generations_committed = running.generations_committed.max(generation);
        }
        self.inner.commits_moved.notify_all();
    }

    /// Unlocks the running transaction, whose next partial commit includes the parts `wanted`.
    fn unlock_running(&self, wanted: &[Part]) {
        let mut state = self.inner.state.lock();
        if let Some(running) = &mut state.running {
            running.phase = Phase::Running;
            running.wanted.extend_from_slice(wanted);
        }
        self.inner.unlocked.notify_all();
    }

    /// The closure of the wanted parts; `None` if it is empty.
    fn plan(
        &self,
        log: &Log,
        parts: &Arc<dyn Parts>,
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
    /// It has been dispatched: the commit to settle, and the outcome then.
    InFlight(Arc<Commit>, PartialCommit),
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
            let commit = state.pipeline.dispatched_generation(tid, number)?;
            Some(Served::InFlight(commit, PartialCommit::Durable))
        }
        Need::Commit(number) => {
            let commit = state.pipeline.dispatched_generation(tid, number)?;
            Some(Served::InFlight(commit, PartialCommit::Parts { log_blocks: 0 }))
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
    fn of(contents: &Contents, parts: &Arc<dyn Parts>, closure: &PartSet) -> Counts {
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
fn take_parts(parts: &Arc<dyn Parts>, locked: &Locked, plan: Plan) -> Result<Batch> {
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
