//! Errors of the journal.
//!
//! Invariant: an error is cheap to clone, because one failure reaches every waiter.

use std::sync::Arc;

use fjord_block::IoError;
use fjord_format::FormatError;
use fjord_format::jbd2::Superblock;
use fjord_format::types::{BlockNo, Tid};

/// Result of a journal operation.
pub type Result<T, E = JournalError> = std::result::Result<T, E>;

/// Errors of journal operations.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JournalError {
    /// The device failed a request.
    #[error("journal: {what}: {source}")]
    Io {
        /// What the journal was doing.
        what: &'static str,
        /// The device's error.
        source: IoError,
    },
    /// A structure of the journal is invalid, or has an unknown feature.
    #[error("journal block {at}: {source}")]
    Format {
        /// Block of the journal, counted from its start.
        at: u32,
        /// What is wrong with it.
        source: FormatError,
    },
    /// The log is corrupt in a way that no crash can cause, so replay is not safe. Nothing was
    /// replayed.
    #[error(
        "the journal is corrupt at transaction {tid}, journal block {at}: {detail}; nothing was \
         replayed"
    )]
    Corrupt {
        /// The transaction concerned.
        tid: Tid,
        /// Block of the journal, counted from its start.
        at: u32,
        /// What is wrong.
        detail: String,
    },
    /// Such an error while the ijournal mark is set, so that e2fsck refuses the image.
    #[error(
        "{0}; the journal holds fsynced changes that only fjord can read, so e2fsck refuses the \
         image; restore another copy of it, or discard these changes with `fjord recover \
         --drop-fsyncs`"
    )]
    Marked(Box<JournalError>),
    /// The fast commits of a log must be applied as one transaction, which does not fit in the log.
    #[error(
        "the fast commits do not fit in one transaction of this journal; mount the image once with \
         Linux or run e2fsck -fy"
    )]
    ReplayTooLarge,
    /// The areas hold fsynced changes that only the engine can apply.
    #[error(
        "the journal holds {count} i-transactions, fsynced changes that are not in the log; run \
         `fjord recover` on the image, then try again"
    )]
    NeedsIjournalReplay {
        /// How many there are.
        count: usize,
    },
    /// The mapping of the journal given by the caller has holes or overlaps.
    #[error("the journal inode is corrupt: {0}; run e2fsck -fy")]
    BadMap(String),
    /// The journal stopped after an earlier failure; nothing more is written.
    #[error("the journal was stopped by an earlier failure ({0}); unmount and recover the image")]
    Aborted(Arc<JournalError>),
    /// The owner stopped the journal on purpose ([`Journal::shutdown`](crate::Journal::shutdown)).
    #[error("the file system was shut down; unmount it and mount it again")]
    Shutdown,
    /// The owner closed the journal ([`Journal::close`](crate::Journal::close)).
    #[error("the file system is unmounted")]
    Closed,
    /// The buffer of a freed block is still part of a transaction that has not committed.
    #[error("block {0} is live in the journal with another buffer (a cache must not hold two)")]
    TwoBuffers(BlockNo),
    /// The call is not allowed here; the message says what to do.
    #[error("journal usage: {0}")]
    Usage(String),
}

impl JournalError {
    /// The same for a journal with this superblock.
    pub(crate) fn under_mark_of(self, superblock: &Superblock) -> JournalError {
        match self {
            JournalError::Corrupt { .. }
            | JournalError::Format { .. }
            | JournalError::BadMap(_)
                if superblock.ijournal().is_some() =>
            {
                JournalError::Marked(Box::new(self))
            }
            other => other,
        }
    }

    /// Wraps an error of the device.
    pub(crate) fn io(what: &'static str) -> impl FnOnce(IoError) -> JournalError {
        move |source| JournalError::Io { what, source }
    }

    /// Wraps an error of the format at a block of the journal.
    pub(crate) fn format(at: u32) -> impl FnOnce(FormatError) -> JournalError {
        move |source| JournalError::Format { at, source }
    }

    /// The error of later calls, after this error has stopped the journal.
    pub(crate) fn into_sticky(self) -> JournalError {
        match self {
            JournalError::Aborted(_) | JournalError::Shutdown | JournalError::Closed => self,
            cause => JournalError::Aborted(Arc::new(cause)),
        }
    }

    /// The failure of the device behind this error, if it was one.
    pub fn io_error(&self) -> Option<&IoError> {
        match self {
            JournalError::Io { source, .. } => Some(source),
            JournalError::Aborted(cause) => cause.io_error(),
            _ => None,
        }
    }
}
