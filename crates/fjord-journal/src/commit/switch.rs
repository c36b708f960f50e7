//! Full commit that ends a stream of fast commits: one write makes the commit valid and the stream
//! invalid.
//!
//! Fast commits are valid while the journal superblock has FAST_COMMIT and they bear the ID of the
//! next transaction in the log. If the log already has that transaction, e2fsck 1.47 drops the
//! whole log. So the commit is written where recovery does not look, one block past the head of the
//! log, and everything older is checkpointed; then one superblock write moves the start of the log
//! to the commit and clears the bit:
//!
//! 1. write its blocks, including the commit block, one block past the head; wait for file data;
//!    checkpoint older transactions, except for blocks that are also in this one;
//! 2. flush;
//! 3. write the superblock with FUA (all changes are in its first sector).
//!
//! A crash before 3 leaves the older transactions and the fast commits; a crash after 3, this
//! commit. The cost is that of an ordinary full commit plus the home writes.
//!
//! Invariants: the block where recovery looks for the next transaction holds no block with its
//! sequence; checkpoints do not move the tail past it before 3; no other checkpoint runs from 1 to
//! 3.

use fjord_block::plant::{Bug, planted};
use fjord_block::{Buf, Class, Ticket};
use fjord_format::jbd2::{IjournalMark, Incompat};

use super::build::LogBlocks;
use super::wait_with_data;
use crate::error::Result;
use crate::fast_commit::Area;
use crate::journal::Journal;
use crate::log::{Log, wait_all};
use crate::transaction::{Batch, Phase, Sequence};

impl Journal {
    /// Writes the frozen blocks and ends the stream of fast commits. The caller holds the commit
    /// lock. Returns the number of log blocks.
    pub(super) fn commit_behind(&self, log: &Log, area: &Area, batch: Batch) -> Result<u32> {
        let sequence = batch.sequence;
        let body_blocks = self.count_body(log, &batch);
        let hidden = u32::from(!planted(Bug::StreamEndNotHidden));
        let log_blocks = hidden + body_blocks + 1;
        self.check_no_wrap(log, log_blocks)?;
        let looked_at = self.start_flushing(&batch, log_blocks);
        // From here on handles start again and modify the same buffers.
        let blocks = LogBlocks::build(&log.format, sequence.0, &batch.versions, &batch.revoked)?;
        self.prepare_head(log, area, sequence, looked_at)?;

        let log_start = log.after(looked_at, hidden);
        let commit_at = log.after(log_start, body_blocks);
        let mut bufs = blocks.bufs;
        bufs.push(self.commit_block(log, sequence, commit_at, blocks.crc)?);
        let tickets = self.inner.device.submit(log.write_requests(log_start, bufs, Class::Sync)?);
        tickets.iter().chain(&batch.data).for_each(Ticket::start);
        let _checkpoint = self.lock_checkpoint(Class::Sync);
        if !planted(Bug::StreamEndBeforeHome) {
            while self.checkpoint_oldest(Class::Sync, Some(sequence))?.is_some() {}
        }
        wait_with_data(&tickets, &batch.data, "writing the log")?;
        self.set_phase(sequence, Phase::Committing);
        if !planted(Bug::StreamEndNotFlushed) {
            self.inner.flush("flushing before the start of the log moves")?;
        }
        // After a shutdown meanwhile, the transaction must not be committed.
        self.check_running()?;
        self.switch(log, sequence, log_start)?;
        area.end_stream();
        {
            let mut state = self.inner.state.lock();
            let freed = log.distance(state.tail, looked_at);
            state.tail = looked_at;
            state.used_blocks = state.used_blocks.saturating_sub(freed);
        }
        let whole = batch.whole();
        let buffers = batch.versions.into_iter().map(|(buffer, _)| buffer).collect();
        self.logged(whole, sequence, looked_at, buffers, &batch.forgotten);
        Ok(log_blocks)
    }

    /// Ensures that recovery looks at journal block `at` and finds no valid block there.
    fn prepare_head(&self, log: &Log, area: &Area, sequence: Sequence, at: u32) -> Result<()> {
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

    /// Moves the start of the log to journal block `log_start`, with `sequence`, and ends the
    /// stream.
    fn switch(&self, log: &Log, sequence: Sequence, log_start: u32) -> Result<()> {
        log.write_superblock(&self.inner.counters, self.inner.barrier, |superblock| {
            superblock.s_start = log_start;
            superblock.s_sequence = sequence.0;
            superblock.s_feature_incompat |= Incompat::REVOKE;
            superblock.s_feature_incompat.remove(Incompat::FAST_COMMIT);
            // As when the tail moves: everything older is checkpointed.
            let mark = superblock.ijournal();
            superblock
                .set_ijournal(mark.map(|mark| IjournalMark { recovering_after: None, ..mark }));
        })
    }
}
