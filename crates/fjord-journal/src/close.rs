//! Emptying the log on disk: for a freeze, and to end the use of the journal.
//!
//! Owns no state. Invariant: the log is marked as empty under the commit lock and the checkpoint lock,
//! when everything that has committed is checkpointed.

use fjord_format::jbd2::Incompat;

use crate::error::{JournalError, Result};
use crate::journal::Journal;
use crate::open_handles::check_no_open_handle;

impl Journal {
    /// Commits, checkpoints everything and marks the log empty on disk: the image is as clean as
    /// after [`Journal::close`], and the journal stays open (freeze, sync before a snapshot).
    /// Handles that start meanwhile may dirty it again.
    pub fn quiesce(&self) -> Result<()> {
        check_no_open_handle(self, "emptying the log")?;
        loop {
            self.commit_running()?;
            // The mark stays while one is perhaps not written.
            self.make_barriers_durable()?;
            let Some(log) = &self.inner.log else { return Ok(()) };
            self.checkpoint_all()?;
            // Commit and checkpoint locks are held: the log does not change from here on.
            let _commits = self.inner.lock_commits();
            self.settle()?;
            let _checkpoint = self.lock_checkpoint();
            let (sequence, head, empty) = {
                let state = self.inner.state.lock();
                if !state.pipeline.is_empty() {
                    continue;
                }
                (state.logged.next().0, state.head, state.empty_on_disk)
            };
            self.check_running()?;
            if let Some(area) = &self.inner.area {
                area.wipe(log, self.inner.barrier)?;
            }
            let done = self.write_rest(log, empty, |superblock| {
                superblock.s_start = 0;
                superblock.s_sequence = sequence;
                superblock.s_head = head;
                superblock.s_feature_incompat.remove(Incompat::FAST_COMMIT);
            })?;
            if !done {
                continue;
            }
            self.inner.state.lock().empty_on_disk = true;
            return Ok(());
        }
    }

    /// Ends the use of the journal: as [`Journal::quiesce`], and later starts fail. On `Ok`
    /// the journal is clean on disk. Idempotent. No handle may start meanwhile.
    pub fn close(&self) -> Result<()> {
        if self.error() == Some(JournalError::Closed) {
            return Ok(());
        }
        self.quiesce()?;
        let next = self.inner.state.lock().next_sequence;
        self.stop_with(next, JournalError::Closed);
        Ok(())
    }
}
