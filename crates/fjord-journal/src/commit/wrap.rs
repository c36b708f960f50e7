//! Commits of a log that must not wrap, because fast commits follow it: see
//! `compat::ends_in_front_of_area`.
//!
//! Owns no state. Invariant: with a fast-commit area, a commit takes log blocks in front of the end of
//! the log only.

use fjord_block::plant::{Bug, planted};

use crate::error::Result;
use crate::journal::Journal;

impl Journal {
    /// Keeps the next commit from wrapping: if it might not fit before the end of the log, empties
    /// the log so that the commit starts at its first block. The caller holds the commit lock. Only with
    /// a fast-commit area: see `compat::ends_in_front_of_area`.
    ///
    /// The superblock that `empty_log` writes is waited for, with FUA: until it is durable, recovery
    /// begins at the old tail. If new log blocks had overwritten a transaction that is checkpointed,
    /// it would replay only those before that one, over newer contents.
    pub(crate) fn avoid_log_wrap(&self) -> Result<()> {
        let Some(log) = &self.inner.log else { return Ok(()) };
        if !self.may_wrap() || planted(Bug::LogGoesRound) {
            return Ok(());
        }
        if !planted(Bug::LogRestartsInFlight) {
            self.settle()?;
        }
        self.empty_log(log)?;
        let mut state = self.inner.state.lock();
        (state.head, state.tail) = (log.first, log.first);
        state.restarts = !state.empty_on_disk;
        Ok(())
    }
}
