//! Which home writes of a checkpoint come next, for threads that carry one out together.
//!
//! Owns the commits that are being checkpointed, and how far. A thread claims a batch of their blocks under the
//! lock, writes it without, and tells the end of it; so the batches of several threads are in flight at a
//! time ("cooperative checkpoint" of parallel journaling, FAST '18). A batch may reach over several commits: of
//! small ones many go home in one wait.
//!
//! Invariants: commits are claimed from the oldest on, each of their blocks once; the checkpoint of a commit ends
//! when all of it has been claimed and each batch with a part of it has been written, and not before that of an
//! older one. A commit that has to be prepared is prepared while no batch is in flight. Two batches may have a
//! block in common: which of them writes it, and when, is the buffer's state.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use fjord_block::lock::{Condvar, Mutex, Rank};
use fjord_block::plant::{Bug, planted};

use crate::pipeline::Commit;

/// Most blocks in one batch of home writes: the most that a freed block waits for.
/// One where a model check looks at several batches.
pub(crate) const BATCH_BLOCKS: usize = if cfg!(feature = "model") { 1 } else { 256 };

/// Blocks of commits, in the order of commits.
pub(crate) type ClaimedBlocks = Vec<(Arc<Commit>, Range<usize>)>;

/// See the [module](self).
pub(crate) struct CheckpointClaims {
    window: Mutex<Window>,
    /// Signalled, with `window`, when a batch has ended, or a commit is prepared.
    moved: Condvar,
}

/// Guarded by `CheckpointClaims::window`.
#[derive(Default)]
struct Window {
    /// Oldest first.
    commits: VecDeque<InProgress>,
    /// Their log blocks.
    log_blocks: u32,
    /// Parts of commits in batches that have not ended.
    in_flight_count: usize,
    /// A thread prepares the first commit that is not claimed.
    is_preparing: bool,
    /// A write failed, so that nothing is claimed any more.
    is_failed: bool,
    /// Changes so far, for threads that wait for one.
    moves: u64,
}

/// A commit whose checkpoint has begun.
struct InProgress {
    commit: Arc<Commit>,
    /// Buffers that have been claimed.
    claimed_count: usize,
    /// All of them have been, if there are any.
    is_claimed: bool,
    /// Batches with a part of it that have not ended.
    in_flight_count: usize,
    /// What has to precede its batches is done.
    is_prepared: bool,
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

/// How far a thread goes on.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Wanted {
    /// It has so many blocks left to write home.
    Blocks(usize),
    /// So many log blocks have to become free, those of commits included whose checkpoint has begun: threads that
    /// wait for the same room write no more home, all of them together, than it takes.
    Room(u32),
}

/// What a thread is to do next.
pub(crate) enum Claim {
    /// To prepare the next commit, before any more of its blocks is written; then [`CheckpointClaims::ready`].
    Prepare,
    /// To write these blocks; then [`CheckpointClaims::ended`].
    Batch(ClaimedBlocks),
    /// Nothing, until other threads have moved on from this number of changes.
    Wait(u64),
    /// Nothing is committed that is not checkpointed.
    Nothing,
}

impl Default for CheckpointClaims {
    fn default() -> CheckpointClaims {
        let window = Mutex::new(Rank::CheckpointClaims, Window::default());
        CheckpointClaims { window, moved: Condvar::new() }
    }
}

impl InProgress {
    fn new(commit: Arc<Commit>) -> InProgress {
        InProgress {
            commit,
            claimed_count: 0,
            is_claimed: false,
            in_flight_count: 0,
            is_prepared: false,
        }
    }

    /// Claims at most so many blocks.
    fn claim(&mut self, blocks_max: usize) -> Range<usize> {
        let first = self.claimed_count;
        let end = self.commit.buffers.len().min(first.saturating_add(blocks_max));
        self.claimed_count = end;
        self.is_claimed = end == self.commit.buffers.len();
        self.in_flight_count += 1;
        first..end
    }
}

impl Window {
    /// The first commit that has not been claimed; `begin` begins the checkpoint of the next one, which
    /// `wanted` may stand against for a thread that has claimed so many blocks.
    fn unclaimed(
        &mut self,
        wanted: Wanted,
        claimed: usize,
        begin: &mut impl FnMut() -> Option<Arc<Commit>>,
    ) -> Option<&mut InProgress> {
        let at = match self.commits.iter().position(|commit| !commit.is_claimed) {
            Some(at) => at,
            None => {
                let may_begin = match wanted {
                    Wanted::Blocks(blocks) => claimed < blocks,
                    Wanted::Room(blocks) => self.log_blocks < blocks,
                };
                let commit = if may_begin { begin()? } else { return None };
                self.log_blocks = self.log_blocks.saturating_add(commit.log_blocks);
                self.commits.push_back(InProgress::new(commit));
                self.commits.len() - 1
            }
        };
        self.commits.get_mut(at)
    }
}

impl CheckpointClaims {
    /// Claims what is next. `begin` begins the checkpoint of the oldest commit of which it has not begun, as far as
    /// `wanted` goes; what has begun is claimed to its end. `needs` tells which commits have to be prepared.
    pub(crate) fn claim(
        &self,
        wanted: Wanted,
        mut begin: impl FnMut() -> Option<Arc<Commit>>,
        needs: impl Fn(&Commit) -> bool,
    ) -> Claim {
        let window = &mut *self.window.lock();
        if window.is_failed {
            return Claim::Nothing;
        }
        if window.is_preparing {
            return Claim::Wait(window.moves);
        }
        let mut blocks = ClaimedBlocks::new();
        let mut left = BATCH_BLOCKS;
        let is_idle = window.in_flight_count == 0;
        while left > 0
            && blocks.len() < BATCH_BLOCKS
            && let Some(next) = window.unclaimed(wanted, BATCH_BLOCKS - left, &mut begin)
        {
            if !next.is_prepared && needs(&next.commit) {
                if !blocks.is_empty() || !is_idle {
                    break;
                }
                window.is_preparing = true;
                return Claim::Prepare;
            }
            next.is_prepared = true;
            let range = next.claim(left);
            left -= range.len();
            blocks.push((next.commit.clone(), range));
        }
        window.in_flight_count += blocks.len();
        match blocks.is_empty() {
            false => Claim::Batch(blocks),
            true if window.in_flight_count > 0 && !planted(Bug::BatchOfOthersUncounted) => {
                Claim::Wait(window.moves)
            }
            true => Claim::Nothing,
        }
    }

    /// What has to precede the next batch is done.
    pub(crate) fn ready(&self) {
        let mut window = self.window.lock();
        window.is_preparing = false;
        if let Some(prepared) = window.unclaimed(Wanted::Blocks(0), 0, &mut || None) {
            prepared.is_prepared = true;
        }
        self.moved(&mut window);
    }

    /// What has to precede a batch is another from now on. No batch is in flight: the caller has the checkpoint
    /// lock alone.
    pub(crate) fn prepare_again(&self) {
        let mut window = self.window.lock();
        debug_assert!(window.in_flight_count == 0 || window.is_failed, "a batch is in flight");
        window.commits.iter_mut().for_each(|commit| commit.is_prepared = false);
    }

    /// A batch was written; `end` ends the checkpoint of the oldest commit, when all of it is.
    pub(crate) fn ended(&self, blocks: &ClaimedBlocks, mut end: impl FnMut()) {
        let window = &mut *self.window.lock();
        for (commit, _) in blocks {
            window.in_flight_count = window.in_flight_count.saturating_sub(1);
            let has = |other: &&mut InProgress| Arc::ptr_eq(&other.commit, commit);
            if let Some(commit) = window.commits.iter_mut().find(has) {
                commit.in_flight_count = commit.in_flight_count.saturating_sub(1);
            }
        }
        let is_written = |commit: &InProgress| {
            commit.in_flight_count == 0 || planted(Bug::BatchOfOthersUncounted)
        };
        let is_claimed =
            |commit: &InProgress| commit.is_claimed || planted(Bug::HomeBeforeLastBatch);
        let is_home = |commit: &InProgress| is_claimed(commit) && is_written(commit);
        while !window.is_failed && window.commits.front().is_some_and(is_home) {
            end();
            let home = window.commits.pop_front();
            let log_blocks = home.map_or(0, |home| home.commit.log_blocks);
            window.log_blocks = window.log_blocks.saturating_sub(log_blocks);
        }
        self.moved(window);
    }

    /// A batch failed, or what precedes one; the journal has stopped, so that nobody claims more.
    pub(crate) fn failed(&self) {
        let mut window = self.window.lock();
        window.is_failed = true;
        self.moved(&mut window);
    }

    /// Whether a part of a commit has been claimed, and not all of it.
    pub(crate) fn has_more(&self) -> bool {
        let window = self.window.lock();
        !window.is_failed && window.commits.iter().any(|commit| !commit.is_claimed)
    }

    /// Waits until other threads have moved on.
    pub(crate) fn wait(&self, moves: u64) {
        let mut window = self.window.lock();
        while window.moves == moves {
            self.moved.wait(&mut window);
        }
    }

    fn moved(&self, window: &mut Window) {
        window.moves += 1;
        if !planted(Bug::BatchEndWakesNobody) {
            self.moved.notify_all();
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

    fn commit(sequence: u32, blocks: u64) -> Arc<Commit> {
        let buffer = |number| Buffer::new(BlockNo(number), Buf::zeroed(1024), BufferKind::Metadata);
        commit_of(Sequence(Tid(sequence)), (0..blocks).map(buffer).collect())
    }

    fn claimed(claim: Claim) -> ClaimedBlocks {
        match claim {
            Claim::Batch(blocks) => blocks,
            Claim::Prepare => panic!("to prepare"),
            Claim::Wait(_) => panic!("to wait"),
            Claim::Nothing => panic!("nothing"),
        }
    }

    /// A commit that is in part in its home location when the order of home writes changes is prepared again,
    /// before any more of it is claimed.
    #[test]
    fn the_rest_of_a_commit_is_prepared_again() {
        let mut commits = vec![commit(7, BATCH_BLOCKS as u64 + 1)];
        let claims = CheckpointClaims::default();
        let mut claim = || claims.claim(Wanted::Blocks(usize::MAX), || commits.pop(), |_| true);
        assert!(matches!(claim(), Claim::Prepare));
        assert!(matches!(claim(), Claim::Wait(_)));
        claims.ready();
        let first = claimed(claim());
        assert_eq!(first[0].1, 0..BATCH_BLOCKS);
        claims.ended(&first, || panic!("a batch is left"));
        claims.prepare_again();
        assert!(matches!(claim(), Claim::Prepare));
        assert!(matches!(claim(), Claim::Wait(_)));
        claims.ready();
        let second = claimed(claim());
        assert_eq!(second[0].1.len(), 1);
        let mut has_ended = false;
        claims.ended(&second, || has_ended = true);
        assert!(has_ended && matches!(claim(), Claim::Nothing));
        claims.prepare_again();
    }

    /// Small commits go home together, an empty one among them; each ends after those before it.
    #[test]
    #[cfg(not(feature = "model"))]
    fn a_batch_reaches_over_commits() {
        let mut commits =
            vec![commit(10, 3), commit(9, BATCH_BLOCKS as u64), commit(8, 0), commit(7, 5)];
        let claims = CheckpointClaims::default();
        let mut claim = || claims.claim(Wanted::Blocks(usize::MAX), || commits.pop(), |_| false);
        let first = claimed(claim());
        let ranges: Vec<_> = first.iter().map(|(_, range)| range.clone()).collect();
        assert_eq!(ranges, [0..5, 0..0, 0..BATCH_BLOCKS - 5]);
        let second = claimed(claim());
        let ranges: Vec<_> = second.iter().map(|(_, range)| range.clone()).collect();
        assert_eq!(ranges, [BATCH_BLOCKS - 5..BATCH_BLOCKS, 0..3]);
        assert!(matches!(claim(), Claim::Wait(_)));
        claims.ended(&second, || panic!("older ones are left"));
        let mut ended = 0;
        claims.ended(&first, || ended += 1);
        assert!(ended == 4 && matches!(claim(), Claim::Nothing));
    }

    /// Who wants few blocks begins no more commits than it takes, and ends what it has begun.
    #[test]
    #[cfg(not(feature = "model"))]
    fn a_batch_is_no_larger_than_wanted() {
        let large = BATCH_BLOCKS as u64 + 9;
        let mut commits = vec![commit(10, 5), commit(9, large), commit(8, 2), commit(7, 2)];
        let claims = CheckpointClaims::default();
        let mut claim = |wanted| claims.claim(Wanted::Blocks(wanted), || commits.pop(), |_| false);
        let lengths = |blocks: &ClaimedBlocks| -> Vec<usize> {
            blocks.iter().map(|(_, range)| range.len()).collect()
        };
        assert_eq!(lengths(&claimed(claim(3))), [2, 2]);
        assert_eq!(lengths(&claimed(claim(1))), [BATCH_BLOCKS]);
        assert_eq!(lengths(&claimed(claim(0))), [9]);
        assert!(matches!(claim(0), Claim::Wait(_)) && !claims.has_more());
    }

    /// Threads that wait for room begin no more commits, together, than it takes.
    #[test]
    fn room_is_made_once() {
        let mut commits = vec![commit(9, 1), commit(8, 1), commit(7, 1)];
        let log_blocks = commits[0].log_blocks;
        assert!(log_blocks > 0);
        let claims = CheckpointClaims::default();
        let mut claim = |blocks| claims.claim(Wanted::Room(blocks), || commits.pop(), |_| false);
        let first = claimed(claim(log_blocks));
        assert_eq!(first.len(), 1);
        assert!(matches!(claim(log_blocks), Claim::Wait(_)), "another thread makes it");
        let second = claimed(claim(log_blocks + 1));
        assert_eq!(second.len(), 1);
        claims.ended(&first, || ());
        claims.ended(&second, || ());
        assert_eq!(claimed(claim(log_blocks)).len(), 1, "what has ended counts no more");
    }

    /// A commit that has to be prepared waits for the batches before it.
    #[test]
    fn no_batch_is_in_flight_while_one_is_prepared() {
        let mut commits = vec![commit(8, 1), commit(7, 1)];
        let claims = CheckpointClaims::default();
        let mut claim = || {
            claims.claim(
                Wanted::Blocks(usize::MAX),
                || commits.pop(),
                |commit| commit.sequence == Sequence(Tid(8)),
            )
        };
        let first = claimed(claim());
        assert!(first.len() == 1 && matches!(claim(), Claim::Wait(_)));
        let mut ended = 0;
        claims.ended(&first, || ended += 1);
        assert!(ended == 1 && matches!(claim(), Claim::Prepare));
        claims.ready();
        assert_eq!(claimed(claim()).len(), 1);
    }
}
