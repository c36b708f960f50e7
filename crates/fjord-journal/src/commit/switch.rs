//! Full commit that ends a stream of fast commits: one write makes the commit valid and the stream
//! invalid.
//!
//! Fast commits are valid while the journal superblock has FAST_COMMIT and they bear the ID of the
//! next transaction in the log. No moment may have both that transaction and the stream before it
//! ([`fjord_format::jbd2::fast_commit::compat`]). So the commit is written where recovery does not look, one block past the head of the
//! log, and everything older is checkpointed; then one superblock write moves the start of the log
//! to the commit and clears the bit:
//!
//! 1. write its blocks, including the commit block, one block past the head; wait for file data;
//!    checkpoint older transactions, except for blocks that are also in this one;
//! 2. flush;
//! 3. write the superblock with FUA (all changes are in its first sector).
//!
//! A crash before 3 leaves the older transactions and the fast commits; a crash after 3, this
//! commit. The cost is that of an ordinary full commit plus the checkpoint writes.
//!
//! Invariants: the block where recovery looks for the next transaction holds no block with its
//! sequence; checkpoints do not move the tail past it before 3; no other checkpoint runs from 1 to
//! 3.

use fjord_block::Buf;
use fjord_block::plant::{Bug, planted};
use fjord_format::jbd2::{IjournalMark, Incompat};

use crate::error::Result;
use crate::fast_commit_area::Area;
use crate::journal::Journal;
use crate::log::{Log, wait_all};
use crate::pipeline::Commit;
use crate::transaction::Sequence;

impl Journal {
    /// Ensures that recovery looks at journal block `at` and finds no valid block there.
    ///
    /// Both writes are waited for, with FUA, before the script: the commit's blocks may cover the
    /// block where recovery has looked so far, and would end the stream there before the commit is
    /// valid; and the superblock must not be there before the block is wiped. It happens once in a lap
    /// of the log and after a recovery, and the script of such a commit waits for the device anyway.
    pub(super) fn prepare_head(
        &self,
        log: &Log,
        area: &Area,
        sequence: Sequence,
        at: u32,
    ) -> Result<()> {
        let restarts = std::mem::take(&mut self.inner.state.lock().restarts);
        if !restarts && !area.is_inherited() {
            return Ok(());
        }
        // A crash may have left part of a transaction of this sequence.
        let zeros = vec![Buf::zeroed(self.inner.block_size)];
        let wipe = log.contiguous_requests(at, zeros, self.inner.barrier)?;
        wait_all(&self.inner.device.submit(wipe), "wiping a block of the log")?;
        if !restarts {
            return Ok(());
        }
        log.write_superblock(&self.inner.counters, self.inner.barrier, |superblock| {
            superblock.s_start = at;
            superblock.s_sequence = sequence.0;
        })
    }

    /// Moves the start of the log to journal block `start`, with the sequence of the commit, and
    /// ends the stream. All older commits are checkpointed. This is the write that makes the commit
    /// valid, and the protocol of the next commit depends on its outcome, so it is waited for.
    pub(super) fn end_stream(
        &self,
        log: &Log,
        area: &Area,
        commit: &Commit,
        start: u32,
    ) -> Result<()> {
        log.write_superblock(&self.inner.counters, self.inner.barrier, |superblock| {
            superblock.s_start = start;
            superblock.s_sequence = commit.sequence.0;
            superblock.s_feature_incompat |= Incompat::REVOKE;
            superblock.s_feature_incompat.remove(Incompat::FAST_COMMIT);
            // As when the tail moves: everything older is checkpointed.
            let mark = superblock.ijournal();
            superblock
                .set_ijournal(mark.map(|mark| IjournalMark { recovering_after: None, ..mark }));
        })?;
        area.end_stream();
        let mut state = self.inner.state.lock();
        let freed = log.distance(state.tail, commit.log_start);
        state.tail = commit.log_start;
        state.used_blocks = state.used_blocks.saturating_sub(freed);
        Ok(())
    }

    /// Checkpoints everything older than the commit of `sequence`, except blocks with a version of
    /// it. The caller has the checkpoint lock alone.
    pub(super) fn checkpoint_older(&self, sequence: Sequence) -> Result<()> {
        if !planted(Bug::StreamEndBeforeHome) {
            self.checkpoint_older_than(Some(sequence))?;
        }
        Ok(())
    }
}
