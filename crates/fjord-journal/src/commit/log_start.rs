//! The start of the log (`s_start`, `s_sequence`): the commit that recovery finds first writes it.
//!
//! That is the first commit after opening, when `s_start` is 0, and the first one of a log that restarts
//! at its first block ([`super::wrap`]). The write is a step of the commit's script, beside the log
//! blocks: nothing waits for it but what the commit block waits for. So it is durable before the
//! commit block is, and a failure fails the commit and all behind it. What a power cut leaves before
//! that, for fjord, Linux and e2fsck alike:
//!
//! | on disk | recovery |
//! |---|---|
//! | neither | as before the commit: `s_start` is 0, or the head of the emptied log |
//! | log blocks, any of them; not the superblock | `s_start` 0: nothing is read. Old head: the walk ends there, at an older sequence, or, if these blocks cover the head, at the transaction's missing commit block |
//! | the superblock; not all log blocks | the walk begins at this commit and ends at an older sequence, a wrong checksum or the missing commit block |
//!
//! In each row nothing is replayed, and nothing has to be: all that had committed is checkpointed, durably,
//! before the log counts as empty. After the middle row the first commit of the next mount may have the
//! sequence and the place of this one. The log then has one commit block of that sequence, which comes
//! after all log blocks of the later commit, so blocks of the earlier one are never replayed. The
//! superblock is not torn: its changes are in one sector.
//!
//! Owns no state. Invariant: the caller holds the commit lock. With valid fast commits
//! [`super::switch`] moves the start.

use fjord_block::plant::{Bug, planted};
use fjord_block::{Class, Order, Ticket};
use fjord_format::jbd2::Incompat;

use crate::error::Result;
use crate::journal::Journal;
use crate::log::Log;
use crate::pipeline::Commit;

impl Journal {
    /// Whether recovery would not find the next commit, which then has to write the start of the
    /// log. Asked once for each commit.
    pub(super) fn take_new_start(&self) -> bool {
        let mut state = self.inner.state.lock();
        let restarts = std::mem::take(&mut state.restarts);
        std::mem::take(&mut state.empty_on_disk) || restarts
    }

    /// Submits the superblock with the start of the log at `commit`. Sets REVOKE as well: the first
    /// commit of a mount comes here or ends a stream of fast commits, so later ones have it.
    pub(super) fn submit_log_start(
        &self,
        log: &Log,
        commit: &Commit,
        order: Order,
        class: Class,
    ) -> Result<Ticket> {
        let is_lost = planted(Bug::LogStartNotOrdered);
        let order = if is_lost { Order::Orderless } else { order };
        log.submit_superblock(&self.inner.counters, order, class, |superblock| {
            superblock.s_start = commit.log_start;
            superblock.s_sequence = commit.sequence.0;
            superblock.s_feature_incompat |= Incompat::REVOKE;
        })
    }
}
