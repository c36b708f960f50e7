//! Room below the image: what happens when the disk that holds a sparse image is full.
//!
//! Owns the rule that room is taken before anything depends on it: the log's when the image is
//! mounted, that of a metadata block before it is allocated, that of file data before its write
//! is submitted. So a full disk is an `ENOSPC` of the one call, as a full image is; no transaction
//! refers to data that has no room, and no checkpoint finds none. File data that was accepted
//! stays dirty and is tried again; see `docs/decisions/0014-room-below-comes-first.md`.
//!
//! Invariant: while the state says that the disk is full, something was refused since the last
//! time that all that waits went out.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::SystemTime;

use fjord_block::{Class, Device, IoError};
use fjord_format::BlockNo;
use fjord_format::geometry::Geometry;
use parking_lot::Mutex;
use rustix::io::Errno;

use crate::error::{Error, Result};
use crate::file::background::{self, Want};
use crate::fs::FsInner;

/// Since when the disk below is full, and what it refused.
#[derive(Debug, Clone, Copy)]
struct Full {
    since: SystemTime,
    /// Byte offset and length of what was refused last.
    refused: (u64, u64),
    refused_count: u64,
}

/// Whether the disk below is full.
#[derive(Default)]
pub(crate) struct Room {
    /// A copy for whoever only asks.
    is_full: AtomicBool,
    /// Leaf lock.
    full: Mutex<Option<Full>>,
}

impl Room {
    /// Whether something was refused and waits.
    pub(crate) fn is_full(&self) -> bool {
        self.is_full.load(Ordering::Acquire)
    }

    /// Since when.
    pub(crate) fn full_since(&self) -> Option<SystemTime> {
        self.full.lock().map(|full| full.since)
    }

    /// Notes a refusal. Returns whether it is the first since there was room.
    fn refuse(&self, offset: u64, len: u64) -> bool {
        let mut state = self.full.lock();
        let begins = state.is_none();
        let full = state.get_or_insert(Full {
            since: SystemTime::now(),
            refused: (offset, len),
            refused_count: 0,
        });
        full.refused = (offset, len);
        full.refused_count += 1;
        self.is_full.store(true, Ordering::Release);
        begins
    }

    /// What waited went out, unless more was refused than `refused_count` times. Returns for how many
    /// seconds the disk was full.
    fn end(&self, refused_count: u64) -> Option<u64> {
        let mut state = self.full.lock();
        let full = state.filter(|full| full.refused_count <= refused_count)?;
        *state = None;
        self.is_full.store(false, Ordering::Release);
        Some(full.since.elapsed().unwrap_or_default().as_secs())
    }
}

impl FsInner {
    /// Sees to it that writes to the blocks find room below.
    ///
    /// # Errors
    /// `ENOSPC`.
    pub(crate) fn ensure_room(&self, start: BlockNo, count: u64) -> Result<()> {
        let len = count.saturating_mul(u64::from(self.geo.block_size));
        self.told_room(self.device.ensure_room(self.byte_offset(start), len))
    }

    /// What the file system makes of an answer to a request for room, or to a write: a lack of it
    /// is noted and becomes an `ENOSPC`.
    pub(crate) fn told_room(&self, result: Result<(), IoError>) -> Result<()> {
        match result {
            Err(error) if error.is_no_space() => {
                if self.room.refuse(error.offset, error.len) {
                    self.warn(
                        "the file system that holds the image is full: file data waits in memory, \
                         and fsync fails with ENOSPC, until there is room there",
                    );
                }
                Err(Errno::NOSPC.into())
            }
            Err(error) => {
                // The write itself will tell, if it matters.
                tracing::debug!(%error, "cannot take room below");
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }

    /// Writes out what waits for room, if there seems to be some again.
    pub(crate) fn retry_room(self: &Arc<Self>) {
        let Some(full) = *self.room.full.lock() else { return };
        let (offset, len) = full.refused;
        if self.device.ensure_room(offset, len).is_err() {
            return;
        }
        background::write_old(self, Want::Any, Class::Background, || self.status.is_read_only());
        self.end_full(full.refused_count);
    }

    fn end_full(&self, refused_count: u64) {
        if let Some(seconds) = self.room.end(refused_count) {
            let again = "the file system that holds the image has room again";
            self.warn(format_args!("{again}, after {seconds} seconds"));
        }
    }

    /// Runs something that writes out all that waits, and notes it if it does.
    pub(crate) fn ending_full<T>(&self, write: impl FnOnce() -> Result<T>) -> Result<T> {
        let before = *self.room.full.lock();
        let result = write();
        if let (Some(full), Ok(_)) = (before, &result) {
            self.end_full(full.refused_count);
        }
        result
    }
}

/// Takes room for the log, which lies in `runs`, and for the superblock and the descriptors of
/// groups: whatever is written there later must find some.
///
/// # Errors
/// [`Error::NoRoom`].
pub(crate) fn ensure_fixed(
    device: &dyn Device,
    geo: &Geometry,
    runs: &[(BlockNo, u64)],
) -> Result<()> {
    let block_size = u64::from(geo.block_size);
    let descriptors = (0..).map_while(|index| geo.desc_block_location(index));
    let fixed = std::iter::once(BlockNo(0)).chain(descriptors).map(|block| (block, 1));
    for (start, count) in fixed.chain(runs.iter().copied()) {
        let (offset, len) = (start.0.saturating_mul(block_size), count.saturating_mul(block_size));
        match device.ensure_room(offset, len) {
            Err(error) if error.is_no_space() => {
                let log_bytes =
                    runs.iter().map(|run| run.1).sum::<u64>().saturating_mul(block_size);
                return Err(Error::NoRoom(format!(
                    "the file system that holds the image is full: the log needs {log_bytes} \
                     bytes there in all; make room and mount again"
                )));
            }
            Err(error) => tracing::debug!(%error, "cannot take room below"),
            Ok(()) => {}
        }
    }
    Ok(())
}

/// Puts the name of the file system that holds the image at `path` into an error about it.
pub(crate) fn name_full(error: Error, path: &Path) -> Error {
    let place = mount_point(path).unwrap_or_else(|| path.to_owned());
    let place = place.display();
    match error {
        Error::NoRoom(what) => Error::NoRoom(format!("{place}: {what}")),
        Error::Io(error) if error.is_no_space() => Error::NoRoom(format!("{place}: {error}")),
        other => other,
    }
}

/// The directory on which the file system of `path` is mounted: the topmost one on the same
/// device.
fn mount_point(path: &Path) -> Option<std::path::PathBuf> {
    use std::os::unix::fs::MetadataExt;
    let path = std::fs::canonicalize(path).ok()?;
    let dev = std::fs::metadata(&path).ok()?.dev();
    let is_on_it = |dir: &&Path| std::fs::metadata(dir).is_ok_and(|found| found.dev() == dev);
    Some(path.ancestors().skip(1).take_while(is_on_it).last()?.to_owned())
}
