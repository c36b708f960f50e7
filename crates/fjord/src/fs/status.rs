//! Health of a mounted file system.
//!
//! Owns the one-way state: healthy, read-only, shut down. Invariant: once an
//! error has made the file system read-only, no later success makes it writable again,
//! and the first error is kept for the user.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use fjord_block::IoError;
use fjord_block::lock::{Mutex, Rank};
use fjord_journal::JournalError;

use crate::attr::Timespec;
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

/// What made a file system read-only; see [`crate::Stats::failure`].
#[derive(Debug, Clone)]
pub struct Failure {
    /// Since when nothing can be changed.
    pub time: Timespec,
    /// The first error.
    pub error: Error,
}

/// Health and the error that ended it.
pub(crate) struct Status {
    /// Only ever grows.
    level: AtomicU8,
    first_error: Mutex<Option<(Timespec, Error)>>,
}

impl Default for Status {
    fn default() -> Status {
        Status { level: AtomicU8::new(HEALTHY), first_error: Mutex::new(Rank::FirstError, None) }
    }
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
        self.first_error.lock().as_ref().map(|(_, error)| error.clone())
    }

    /// When it turned read-only because of an error, and the error.
    pub(crate) fn failure(&self) -> Option<Failure> {
        let first = self.first_error.lock();
        first.as_ref().map(|(time, error)| Failure { time: *time, error: error.clone() })
    }

    fn fail(&self, error: &Error) -> bool {
        self.first_error.lock().get_or_insert_with(|| (Timespec::now(), error.clone()));
        self.level.fetch_max(READ_ONLY, Ordering::AcqRel) == HEALTHY
    }
}

/// Whether the image file was truncated below: what is written now would only lengthen it again.
fn is_truncated(error: &Error) -> bool {
    let cause = match error {
        Error::Io(error) => Some(error),
        Error::Journal(error) => error.io_error(),
        _ => None,
    };
    cause.is_some_and(IoError::is_truncated)
}

/// Whether a call failed because the file system was shut down or unmounted, which somebody asked for.
fn was_asked_for(error: &Error) -> bool {
    matches!(error, Error::Closed | Error::Journal(JournalError::Shutdown | JournalError::Closed))
}

impl FsInner {
    /// Whether an error says nothing of the image: what was under way when it was shut down or unmounted
    /// fails, and nothing is written any more.
    fn is_no_failure(&self, error: &Error) -> bool {
        was_asked_for(error) || self.status.is_shut_down()
    }

    /// Records that a write, flush or commit failed: the file system turns read-only and
    /// the journal stops, so that nothing half-written ever commits.
    pub(crate) fn note_write_error(&self, error: &Error) {
        if matches!(error, Error::Posix(_)) || self.is_no_failure(error) {
            return;
        }
        // Whatever failed: that is why, if so, and what is said.
        if let Err(error) = self.device.check() {
            return self.stop_at_once(&error.into());
        }
        if self.status.fail(error) {
            self.error(format_args!("the file system is now read-only: {error}"));
        }
        match error {
            Error::Io(source) => self
                .journal()
                .abort(JournalError::Io { what: "writing file data", source: source.clone() }),
            // It has stopped: the commits before the failed one keep their outcome.
            Error::Journal(_) if self.journal().error().is_some() => {}
            _ => self.journal().shutdown(),
        }
        self.record_error_in_superblock(error);
    }

    /// The image was claimed by another user, or truncated: turns read-only without another write.
    pub(crate) fn stop_at_once(&self, error: &Error) {
        if self.status.fail(error) {
            self.error(format_args!(
                "the file system is now read-only, without further writes: {error}"
            ));
        }
        self.journal().shutdown();
    }

    /// See [`crate::Fs::hand_over`].
    pub(crate) fn hand_over<T, E>(
        self: &Arc<Self>,
        take: impl FnOnce() -> Result<T, E>,
    ) -> Result<Result<T, E>, Error> {
        let claimed = |alone| self.device.claim(alone).map_err(|e| Error::Open(Arc::new(e)));
        // A clean file system writes nothing while the device is not claimed.
        self.sync()?;
        claimed(false)?;
        let taken = take();
        if taken.is_err() {
            claimed(true).inspect_err(|error| self.stop_at_once(error))?;
        }
        Ok(taken)
    }

    /// Says that a read has met damage; what was read-only before says no more than that.
    fn tell_damage(&self, error: &Error) {
        let text = match self.options.read_only {
            true => error.to_string(),
            false => format!("the file system is now read-only: {error}"),
        };
        match self.options.log_damage {
            true => self.error(text),
            false => tracing::debug!("{text}"),
        }
    }

    /// Records damage that an operation met. `changing` says whether the operation was
    /// changing something: then its transaction must not commit. The same holds when the
    /// journal refused a part of a change.
    pub(crate) fn note_damage(&self, error: &Error, changing: bool) {
        if self.is_no_failure(error) {
            return;
        }
        if is_truncated(error) {
            return self.stop_at_once(error);
        }
        let refused = changing && matches!(error, Error::Journal(_));
        if !(error.is_corrupt() || refused) {
            return;
        }
        if changing {
            return self.note_write_error(error);
        }
        if self.status.fail(error) {
            self.tell_damage(error);
            if self.options.read_only {
                return;
            }
            if let Err(error) = self.journal().commit_running() {
                self.error(format_args!("the last commit failed: {error}"));
            }
            self.record_error_in_superblock(error);
        }
    }
}
