//! Health of a mounted file system.
//!
//! Owns the one-way road from healthy to read-only to shut down. Invariant: once an
//! error has made the file system read-only, no later success makes it writable again,
//! and the first error is kept for the user.

use std::sync::atomic::{AtomicU8, Ordering};

use fjord_journal::JournalError;
use parking_lot::Mutex;

use crate::error::Error;
use crate::fs::FsInner;

const HEALTHY: u8 = 0;
const READ_ONLY: u8 = 1;
const SHUT_DOWN: u8 = 2;
const UNMOUNTED: u8 = 3;

/// How to shut a file system down (XFS_IOC_GOINGDOWN).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShutdownMode {
    /// Write everything first.
    Default,
    /// Commit the log, leave the rest.
    LogFlush,
    /// Stop at once, as a power cut would.
    NoLogFlush,
}

/// Health and the error that ended it.
#[derive(Default)]
pub(crate) struct Status {
    /// Only ever grows.
    level: AtomicU8,
    first_error: Mutex<Option<Error>>,
}

impl Status {
    /// Whether an error has made the file system read-only.
    pub(crate) fn is_read_only(&self) -> bool {
        self.level.load(Ordering::Acquire) != HEALTHY
    }

    /// Whether every call must fail.
    pub(crate) fn is_shut_down(&self) -> bool {
        self.level.load(Ordering::Acquire) >= SHUT_DOWN
    }

    /// Whether unmount has completed.
    pub(crate) fn is_unmounted(&self) -> bool {
        self.level.load(Ordering::Acquire) == UNMOUNTED
    }

    /// Every call fails from now on.
    pub(crate) fn shut_down(&self) {
        self.level.fetch_max(SHUT_DOWN, Ordering::AcqRel);
    }

    /// Unmount has completed.
    pub(crate) fn set_unmounted(&self) {
        self.level.fetch_max(UNMOUNTED, Ordering::AcqRel);
    }

    /// The error that made the file system read-only.
    pub(crate) fn first_error(&self) -> Option<Error> {
        self.first_error.lock().clone()
    }

    fn fail(&self, error: &Error) -> bool {
        self.first_error.lock().get_or_insert_with(|| error.clone());
        self.level.fetch_max(READ_ONLY, Ordering::AcqRel) == HEALTHY
    }
}

impl FsInner {
    /// Records that a write, flush or commit failed: the file system turns read-only and
    /// the journal stops, so that nothing half-written ever commits.
    pub(crate) fn note_write_error(&self, error: &Error) {
        if matches!(error, Error::Posix(_)) {
            return;
        }
        if self.status.fail(error) {
            tracing::error!(%error, "the file system is read-only from now on");
        }
        match error {
            Error::Io(source) => self
                .journal()
                .abort(JournalError::Io { what: "writing file data", source: source.clone() }),
            _ => self.journal().shutdown(),
        }
        self.record_error_in_superblock(error);
    }

    /// The image is somebody else's now: turns read-only without another write.
    pub(crate) fn stop_at_once(&self, error: &Error) {
        if self.status.fail(error) {
            tracing::error!(%error, "nothing more is written");
        }
        self.journal().shutdown();
    }

    /// Records damage that an operation met. `changing` says whether the operation was
    /// changing something: then its transaction must not commit. The same holds when the
    /// journal refused a part of a change.
    pub(crate) fn note_damage(&self, error: &Error, changing: bool) {
        let refused = changing && matches!(error, Error::Journal(_));
        if !(error.is_corrupt() || refused) {
            return;
        }
        if changing {
            return self.note_write_error(error);
        }
        if self.status.fail(error) {
            tracing::error!(%error, "the file system is read-only from now on");
            if let Err(error) = self.journal().commit_running() {
                tracing::error!(%error, "the last commit failed");
            }
            self.record_error_in_superblock(error);
        }
    }
}
