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
    /// the log so that the commit starts at the front. The caller holds the commit lock. Only with
    /// a fast-commit area: see `compat::ends_in_front_of_area`.
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
