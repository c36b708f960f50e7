//! Room at the end of a log that must not wrap, because fast commits follow it: see
//! [`compat::ends_in_front_of_area`]. [`super::wrap`] makes room.
//!
//! Owns no state.

use fjord_block::plant::{Bug, planted};
use fjord_format::jbd2::fast_commit::compat;

use crate::error::{JournalError, Result};
use crate::journal::Journal;
use crate::log::Log;

impl Journal {
    /// Whether the next commit must not take log blocks before the log is emptied.
    pub(super) fn may_wrap(&self) -> bool {
        let (Some(log), Some(_)) = (&self.inner.log, &self.inner.area) else { return false };
        let state = self.inner.state.lock();
        // A transaction admitted under `whole_log` may exceed the current limit.
        let running =
            state.running.as_ref().map_or(0, |running| running.transaction.gate.reserved_blocks());
        let most = self.transaction_blocks_max().max(self.log_blocks_needed(running));
        !compat::ends_in_front_of_area(state.head, most, log.end)
    }

    /// Errs if a commit of so many blocks would wrap in a log that must not wrap
    /// ([`Journal::avoid_log_wrap`] has ensured it): recovery would look for the rest elsewhere.
    pub(super) fn check_no_wrap(&self, log: &Log, log_blocks: u32) -> Result<()> {
        let room = log.end.saturating_sub(self.inner.state.lock().head);
        if self.inner.area.is_none() || log_blocks < room || planted(Bug::LogGoesRound) {
            return Ok(());
        }
        let message = format!("a commit of {log_blocks} blocks {room} before the end of its log");
        Err(JournalError::Usage(message))
    }
}
