//! The four protocols: how a commit keeps its writes in order. Which one applies depends on the device and on the
//! fast-commit area. Owns no state.

use fjord_block::plant::{Bug, planted};

use crate::fast_commit_area::Area;
use crate::journal::Journal;
use crate::log::Log;

/// How a commit keeps its writes in order.
#[derive(Clone, Copy)]
pub(super) enum Protocol<'a> {
    /// Leaves order to the device.
    Epochs(&'a Log),
    /// Waits and flushes between them.
    Waits(&'a Log),
    /// As a full commit that ends the stream of fast commits in the area.
    EndStream(&'a Log, &'a Area),
    /// Without a log.
    NoLog,
}

impl Protocol<'_> {
    /// Log blocks left unused before the first one of the commit.
    pub(super) fn hidden_blocks(&self) -> u32 {
        let hides = matches!(self, Protocol::EndStream(..));
        u32::from(hides && !planted(Bug::StreamEndNotHidden))
    }

    pub(super) fn log(&self) -> Option<&Log> {
        match self {
            Protocol::Epochs(log) | Protocol::Waits(log) | Protocol::EndStream(log, _) => Some(log),
            Protocol::NoLog => None,
        }
    }
}

impl Journal {
    /// The protocol of the next commit. The caller holds the commit lock.
    pub(super) fn protocol(&self) -> Protocol<'_> {
        match (&self.inner.log, self.live_area()) {
            (Some(log), Some(area)) => Protocol::EndStream(log, area),
            (Some(log), None) if self.inner.ordered => Protocol::Epochs(log),
            (Some(log), None) => Protocol::Waits(log),
            (None, _) => Protocol::NoLog,
        }
    }
}
