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
use crate::state::State;
use crate::stats;
use crate::transaction::{Batch, Contents, Version};
use crate::wanted_parts::{ChangesUpTo, Need, PartialCommit, Stage, WantedParts};

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
    /// Makes durable the changes to the closure of `seeds`. Same as [`Journal::commit`] if a partial
    /// commit is not possible. Returns at once if they are durable.
    pub fn commit_parts(
        &self,
        changes: impl Into<ChangesUpTo>,
        seeds: &[Part],
    ) -> Result<PartialCommit> {
        self.commit_wanted_parts(&mut WantedParts::new(changes.into(), seeds), true)
    }

    /// Whether the changes to `seeds` are durable, by commits of parts or of the whole transaction.
    /// Commits nothing and does not wait.
    pub fn are_parts_committed(&self, changes: impl Into<ChangesUpTo>, seeds: &[Part]) -> bool {
        let changes = changes.into();
        if self.is_committed(changes.tid) {
            return true;
        }
        let state = self.inner.state.lock();
        let is_durable =
            || matches!(state.stage_of(state.all_up_to_now(changes), seeds), Stage::Durable);
        self.parts().is_some() && state.next_tid.newer_than(changes.tid) && is_durable()
    }

    /// [`Journal::commit_parts`], for a caller that may have asked before; `arrives` as in
    /// [`Journal::take_turn`].
    pub(crate) fn commit_wanted_parts(
        &self,
        wanted: &mut WantedParts,
        arrives: bool,
    ) -> Result<PartialCommit> {
        check_no_open_handle(self, "a commit")?;
        let Some(thread) = &self.inner.thread else {
            return self.commit_wanted_parts_here(wanted, arrives);
        };
        let (journal, mut moved) = (self.clone(), wanted.clone());
        let (outcome, moved) = thread.run(move || {
            let outcome = journal.commit_wanted_parts_here(&mut moved, arrives);
            (outcome, moved)
        });
        *wanted = moved;
        outcome
    }

    fn commit_wanted_parts_here(
        &self,
        wanted: &mut WantedParts,
        mut arrives: bool,
    ) -> Result<PartialCommit> {
        let tid = wanted.changes.tid;
        let (Some(log), Some(parts)) = (&self.inner.log, self.parts()) else {
            return self.commit_whole_for(tid, WholeReason::NoParts, arrives);
        };
        let mut tries_left = TRIES_MAX;
        loop {
            let turn = self.take_turn(&mut arrives, |state| self.next_for_parts(state, wanted))?;
            let lock = match turn {
                Turn::Outcome(Ok(outcome)) => return Ok(outcome),
                Turn::Outcome(Err(reason)) => {
                    return self.commit_whole_for(tid, reason, arrives);
                }
                Turn::Settle(lock) => {
                    self.settle_until(lock, |state| match wanted.stage(state) {
                        Stage::Frozen(commit) => commit.has_ended(),
                        Stage::Running | Stage::Durable => true,
                    });
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
        if let Need::Whole(reason) = wanted.need(state) {
            return Ok(Next::Done(Err(reason)));
        }
        Ok(match wanted.stage(state) {
            Stage::Durable => Next::Done(Ok(wanted.outcome(state))),
            Stage::Frozen(commit) => Next::Settle(commit),
            Stage::Running => {
                self.check_running()?;
                Next::Commit(wanted.partial())
            }
        })
    }

    /// What other commits have done for a caller, if they have made its parts durable. The parts are
    /// registered for the next partial commit.
    pub(crate) fn poll_parts(&self, wanted: &mut WantedParts) -> Option<PartialCommit> {
        if wanted.need.is_none() && (self.inner.log.is_none() || self.parts().is_none()) {
            wanted.need = Some(Need::Whole(WholeReason::NoParts));
        }
        let mut state = self.inner.state.lock();
        if let Need::Whole(reason) = wanted.need(&mut state) {
            let is_durable = state.committed.at_least(wanted.changes.tid);
            return is_durable.then_some(PartialCommit::Whole(reason));
        }
        matches!(wanted.stage(&state), Stage::Durable).then(|| wanted.outcome(&state))
    }

    fn commit_whole_for(
        &self,
        tid: Tid,
        reason: WholeReason,
        arrives: bool,
    ) -> Result<PartialCommit> {
        if self.is_committed(tid) {
            return Ok(PartialCommit::Durable);
        }
        self.commit_for(tid, arrives).map(|()| PartialCommit::Whole(reason))
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
            Ok(plan) => {
                let batch = take_parts(parts, &locked, plan);
                let batch = batch.inspect_err(|error| self.abort(error.clone()))?;
                let commit = self.dispatch(batch, began, self.wants(Wants::Durability))?;
                stats::add(&self.inner.counters.partial_commits, 1);
                wanted.own = Some(PartialCommit::Parts { log_blocks: commit.log_blocks });
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
        self.dispatch_whole(&locked, began, self.wants(Wants::Durability))?;
        wanted.own = Some(PartialCommit::Whole(reason));
        Ok(true)
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

    /// The closure of the wanted parts, which are in the transaction.
    fn plan(&self, log: &Log, parts: &dyn PartRules, locked: &Locked) -> Result<Plan, NotPartial> {
        let mut contents = locked.transaction.lock_contents();
        let mut closure = contents.parts.closure(&locked.wanted);
        if planted(Bug::PartsNotClosed) {
            closure = locked.wanted.iter().copied().collect();
        }
        debug_assert!(!closure.is_empty(), "nobody wants parts of this transaction");
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
        let shape = LogShape::new(log, counts.blocks + counts.shared_blocks, counts.revokes);
        let state = self.inner.state.lock();
        let reserved =
            state.running.as_ref().map_or(0, |running| running.transaction.gate.reserved_blocks());
        let rest = reserved.saturating_sub((counts.blocks + revoke_blocks) as u32);
        let need = self.log_blocks_needed(rest).saturating_add(shape.blocks() as u32 + 1);
        if need > self.free_blocks(&state) {
            return Err(WholeReason::LogSpace.into());
        }
        Ok(Plan { closure, revoke_blocks: revoke_blocks as u32 })
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
    let buffers = std::mem::take(&mut locked.transaction.lock_contents().buffers);
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
    let mut contents = locked.transaction.lock_contents();
    let contents = &mut *contents;
    contents.buffers = kept;
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
        buffers: versions.iter().map(|(buffer, _)| buffer.clone()).collect(),
        versions,
        revoked,
        forgotten: forgotten.map(|(_, buffer)| buffer).collect(),
        data: data.map(|(_, ticket)| ticket).collect(),
        callbacks: callbacks.map(|(_, callback)| callback).collect(),
        parts: Some(closure),
    })
}
