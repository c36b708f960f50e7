//! The full commit that ends a stream of fast commits: one write makes it valid and them invalid.
//!
//! Fast commits count while the journal superblock bears FAST_COMMIT, if they are of the transaction
//! that would come next in the log. Once that is in the log they are of the wrong one, and e2fsck
//! 1.47 then drops the whole log. So the commit is written where no recovery looks, one block behind
//! the end of the log, and everything before it is brought home; then the superblock lets the log
//! start at it, and takes the bit away:
//!
//! 1. write its blocks, the commit block among them, one block further than recovery looks; wait for
//!    file data; write home what older transactions hold, but for blocks that this one holds too;
//! 2. flush;
//! 3. write the superblock with FUA (the first sector holds all that changes).
//!
//! A crash before 3 leaves the older transactions and the fast commits, one behind it this commit. It
//! costs what a compound commit does, and the home writes.
//!
//! Invariants: nothing that is of the sequence to come is at the block where recovery looks; the
//! tail stays there until 3, whoever checkpoints meanwhile; from 1 to 3 nobody else does.

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
    /// Writes what is frozen, in place of the area's fast commits. The caller has the committer's
    /// place. Returns how many log blocks it takes.
    pub(super) fn commit_behind(&self, log: &Log, area: &Area, batch: Batch) -> Result<u32> {
        let sequence = batch.sequence;
        let body_blocks = self.count_body(log, &batch);
        let hidden = u32::from(!planted(Bug::StreamEndNotHidden));
        let log_blocks = hidden + body_blocks + 1;
        self.check_straight(log, log_blocks)?;
        let looked_at = self.start_flushing(&batch, log_blocks);
        // From here on handles start again and modify the same buffers.
        let blocks = LogBlocks::build(&log.format, sequence.0, &batch.versions, &batch.revoked)?;
        self.prepare_place(log, area, sequence, looked_at)?;

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
            self.inner.flush("flushing before the log starts anew")?;
        }
        // A shutdown that came in between must not find the transaction committed.
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

    /// Sees to it that recovery looks at journal block `at` and finds nothing there.
    fn prepare_place(&self, log: &Log, area: &Area, sequence: Sequence, at: u32) -> Result<()> {
        let restarts = std::mem::take(&mut self.inner.state.lock().restarts);
        if !restarts && !area.is_inherited() {
            return Ok(());
        }
        // A crash may have left part of a transaction of this sequence.
        let zeros = vec![Buf::zeroed(self.inner.block_size)];
        let wipe = log.straight_requests(at, zeros, self.inner.barrier)?;
        wait_all(&self.inner.device.submit(wipe), "wiping a block of the log")?;
        if !restarts {
            return Ok(());
        }
        log.write_superblock(&self.inner.counters, self.inner.barrier, |superblock| {
            superblock.s_start = at;
            superblock.s_sequence = sequence.0;
        })
    }

    /// Lets the log start at journal block `log_start`, with `sequence`, and ends the stream.
    fn switch(&self, log: &Log, sequence: Sequence, log_start: u32) -> Result<()> {
        log.write_superblock(&self.inner.counters, self.inner.barrier, |superblock| {
            superblock.s_start = log_start;
            superblock.s_sequence = sequence.0;
            superblock.s_feature_incompat |= Incompat::REVOKE;
            superblock.s_feature_incompat.remove(Incompat::FAST_COMMIT);
            // As when a tail moves: all that came before is home.
            let mark = superblock.ijournal();
            superblock
                .set_ijournal(mark.map(|mark| IjournalMark { recovering_after: None, ..mark }));
        })
    }
}
