//! Failures that break order. Owns [`Failures`]: which requests a failure stops.
//!
//! Invariants:
//! - the earliest failed write is the one recorded, in whatever order failures are reported; it
//!   stops only requests with greater numbers;
//! - a failed flush is recorded for good. Which completed writes are durable is unknown then, so it
//!   stops requests of any number.

use super::rules::Rules;
use super::types::{IoKind, RequestId};
use crate::error::IoError;

/// The failures of one queue.
#[derive(Clone, Debug, Default, Hash)]
pub(super) struct Failures {
    write: Option<(RequestId, IoError)>,
    flush: Option<IoError>,
}

impl Failures {
    /// Records a write that failed at request `at`; returns whether it stops more than before.
    pub(super) fn add_write(&mut self, at: RequestId, error: IoError) -> bool {
        let is_first = self.write.as_ref().is_none_or(|(first, _)| at < *first);
        if is_first {
            self.write = Some((at, error));
        }
        is_first
    }

    /// Records a failed flush; returns whether it is the first.
    pub(super) fn add_flush(&mut self, error: IoError) -> bool {
        let is_first = self.flush.is_none();
        self.flush.get_or_insert(error);
        is_first
    }

    /// The failure that stops request `id`. `by_flush`: a failed flush stops it.
    pub(super) fn stopping(
        &self,
        rules: impl Rules,
        id: RequestId,
        kind: IoKind,
        by_flush: bool,
    ) -> Option<&IoError> {
        let write = self.write.as_ref().filter(|(at, _)| rules.stopped_by_write(kind, id > *at));
        let flush = self.flush.as_ref().filter(|_| by_flush);
        write.map(|(_, error)| error).or(flush)
    }

    /// The failure that broke order, if any.
    pub(super) fn any(&self) -> Option<&IoError> {
        self.write.as_ref().map(|(_, error)| error).or(self.flush.as_ref())
    }

    /// Whether a flush has failed.
    pub(super) fn has_flush(&self) -> bool {
        self.flush.is_some()
    }
}
