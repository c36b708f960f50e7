//! sync, shutdown and unmount.
//!
//! Owns the order in which a file system comes to rest. Invariant: unmount marks the
//! image clean only after data, metadata and superblock counts are on the device and
//! flushed; after an error it never does.

use std::sync::Arc;
use std::time::{Duration, Instant};

use fjord_block::Class;
use parking_lot::{Condvar, Mutex};

use crate::error::{Error, Result};
use crate::file::background;
use crate::fs::FsInner;
use crate::fs::status::ShutdownMode;

/// How long `ENOSPC` waits for removed files that somebody still holds.
const RELEASE_WAIT: Duration = Duration::from_millis(200);

/// Where `ENOSPC` sleeps until removed files let go of their blocks.
#[derive(Default)]
pub(crate) struct Releases {
    /// How often it happened; pairs with `released`; a leaf lock.
    count: Mutex<u64>,
    released: Condvar,
}

impl Releases {
    /// A removed file has been freed, or will not be for now.
    pub(crate) fn notify(&self) {
        *self.count.lock() += 1;
        self.released.notify_all();
    }

    fn wait_while(&self, condition: impl Fn() -> bool, time_max: Duration) {
        let deadline = Instant::now() + time_max;
        loop {
            let seen = *self.count.lock();
            if !condition() {
                return;
            }
            let mut count = self.count.lock();
            while *count == seen {
                if self.released.wait_until(&mut count, deadline).timed_out() {
                    return;
                }
            }
        }
    }
}

impl FsInner {
    /// Writes all dirty data and commits: what `syncfs(2)` promises.
    pub(crate) fn sync(self: &Arc<Self>) -> Result<()> {
        self.check_alive()?;
        if self.is_read_only() {
            return self.status.first_error().map_or(Ok(()), Err);
        }
        self.write_all_dirty()?;
        self.commit()?;
        self.flush_device()
    }

    /// Commits what is under way; blocks that it freed are free then.
    pub(crate) fn commit(&self) -> Result<()> {
        self.journal().commit_running().map(drop).map_err(|error| self.failed(error.into()))
    }

    fn failed(&self, error: Error) -> Error {
        self.note_write_error(&error);
        error
    }

    fn write_all_dirty(self: &Arc<Self>) -> Result<()> {
        background::write_group(self, self.dirty_inodes.take_all(), Class::Async)
    }

    /// After `ENOSPC`: turns reservations into blocks and makes freed blocks usable again.
    /// Returns whether another try may find space.
    pub(crate) fn regain_space(self: &Arc<Self>) -> bool {
        // A front end lets go of a removed file a moment after the removal.
        let may_come = || self.pending_free_blocks() == 0 && !self.orphans.is_empty();
        self.releases.wait_while(may_come, RELEASE_WAIT);
        let waiting = self.pending_free_blocks() > 0;
        let dirty = self.page_lru.dirty_bytes() > 0;
        if !waiting && !dirty {
            return false;
        }
        let written = if dirty { self.write_all_dirty() } else { Ok(()) };
        written.is_ok() && self.journal().commit_running().is_ok()
    }

    /// Stops the file system in one of three ways; every later call fails with EIO.
    pub(crate) fn go_down(self: &Arc<Self>, mode: ShutdownMode) -> Result<()> {
        let result = match mode {
            ShutdownMode::Default => self.sync(),
            ShutdownMode::LogFlush => {
                self.journal().commit_running().map(drop).map_err(Error::from)
            }
            ShutdownMode::NoLogFlush => Ok(()),
        };
        self.status.shut_down();
        self.journal().shutdown();
        result
    }

    /// Brings everything home and marks the image clean. A second call does nothing.
    pub(crate) fn unmount(self: &Arc<Self>) -> Result<()> {
        if self.status.is_unmounted() {
            return Ok(());
        }
        self.threads.stop();
        let result = if self.options.read_only { Ok(()) } else { self.come_to_rest() };
        self.mmp.release();
        self.status.set_unmounted();
        self.device.release();
        result
    }

    fn come_to_rest(self: &Arc<Self>) -> Result<()> {
        if self.is_read_only() || self.status.is_shut_down() {
            return self.status.first_error().map_or(Ok(()), Err);
        }
        self.empty_log()?;
        self.write_clean_superblock().map_err(|error| self.failed(error))
    }

    /// Brings everything home and closes the journal.
    fn empty_log(self: &Arc<Self>) -> Result<()> {
        self.write_all_dirty()?;
        self.commit()?;
        self.journal().checkpoint_all().map_err(|error| self.failed(error.into()))?;
        self.journal().close().map_err(|error| self.failed(error.into()))
    }

    /// Ends a recovery that no mount for writing follows. The device stays as it is for the next user.
    pub(crate) fn end_recovery(self: &Arc<Self>) -> Result<()> {
        let rested = match self.status.first_error() {
            Some(error) => Err(error),
            None => self
                .empty_log()
                .and_then(|()| self.write_recovered_superblock().map_err(|e| self.failed(e))),
        };
        self.mmp.release();
        self.status.set_unmounted();
        rested
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};

    #[test]
    fn a_release_ends_the_wait() {
        let (releases, free) = (Releases::default(), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                releases.wait_while(|| !free.load(Ordering::SeqCst), Duration::from_secs(3600));
            });
            // One that frees nothing does not end it.
            releases.notify();
            assert!(!waiter.is_finished());
            free.store(true, Ordering::SeqCst);
            releases.notify();
        });
        // And time does.
        releases.wait_while(|| true, Duration::from_millis(1));
    }
}
