//! Space on the host: behaviour when the disk that holds a sparse image is full.
//!
//! Owns the rule that space is allocated before anything depends on it: for the log at mount, for a
//! metadata block before it is allocated in the image, for file data before its write is submitted.
//! So a full disk is an `ENOSPC` of a single call, like a full image; no transaction refers to data
//! without space, and no checkpoint runs out of it. Accepted file data stays dirty and is retried;
//! see `docs/decisions/0014-room-below-comes-first.md`.
//!
//! Invariant: the state is "full" only if an allocation was refused since all waiting data was last
//! written.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::SystemTime;

use fjord_block::lock::{Mutex, Rank};
use fjord_block::{Class, Device, IoError};
use fjord_format::BlockNo;
use fjord_format::geometry::Geometry;
use rustix::io::Errno;

use crate::error::{Error, Result};
use crate::file::background::{self, Want};
use crate::fs::FsInner;

/// Start of the full state, and the refused allocations.
#[derive(Debug, Clone, Copy)]
struct Full {
    since: SystemTime,
    /// Byte offset and length of what was refused last.
    refused: (u64, u64),
    refused_count: u64,
}

/// Whether the disk below is full.
pub(crate) struct Room {
    /// A copy for whoever only asks.
    is_full: AtomicBool,
    /// Leaf lock.
    full: Mutex<Option<Full>>,
}

impl Default for Room {
    fn default() -> Room {
        Room { is_full: AtomicBool::new(false), full: Mutex::new(Rank::HostRoom, None) }
    }
}

impl Room {
    /// Whether refused data waits.
    pub(crate) fn is_full(&self) -> bool {
        self.is_full.load(Ordering::Acquire)
    }

    /// Since when.
    pub(crate) fn full_since(&self) -> Option<SystemTime> {
        self.full.lock().map(|full| full.since)
    }

    /// Records a refusal. Returns whether it is the first since there was space.
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

    /// Ends the full state unless there were more than `refused_count` refusals. Returns for how
    /// many seconds the disk was full.
    fn end(&self, refused_count: u64) -> Option<u64> {
        let mut state = self.full.lock();
        let full = state.filter(|full| full.refused_count <= refused_count)?;
        *state = None;
        self.is_full.store(false, Ordering::Release);
        Some(full.since.elapsed().unwrap_or_default().as_secs())
    }
}

impl FsInner {
    /// Allocates host space for writes to the blocks.
    ///
    /// # Errors
    /// `ENOSPC`.
    pub(crate) fn ensure_room(&self, start: BlockNo, count: u64) -> Result<()> {
        let len = count.saturating_mul(u64::from(self.geo.block_size));
        self.told_room(self.device.ensure_room(self.byte_offset(start), len))
    }

    /// Maps the result of an allocation or a write: lack of space is recorded and becomes `ENOSPC`.
    pub(crate) fn told_room(&self, result: Result<(), IoError>) -> Result<()> {
        match result {
            Err(error) if error.is_no_space() => {
                if self.room.refuse(error.offset, error.len) {
                    self.warn(
                        "the file system that holds the image is full: file data waits in memory, \
                         and fsync fails with ENOSPC, until space is freed there",
                    );
                }
                Err(Errno::NOSPC.into())
            }
            Err(error) => {
                // The write itself will fail, if it matters.
                tracing::debug!(%error, "cannot allocate space for the image");
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }

    /// Writes waiting data if there seems to be space again.
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
            let again = "the file system that holds the image has free space again";
            self.warn(format_args!("{again}, after {seconds} seconds"));
        }
    }

    /// Runs a function that writes all waiting data, and records success.
    pub(crate) fn ending_full<T>(&self, write: impl FnOnce() -> Result<T>) -> Result<T> {
        let before = *self.room.full.lock();
        let result = write();
        if let (Some(full), Ok(_)) = (before, &result) {
            self.end_full(full.refused_count);
        }
        result
    }
}

/// Allocates host space for the log, which is in `runs`, and for the superblock and the group
/// descriptors, so that later writes there cannot fail.
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
                    "the file system that holds the image is full: the log needs {log_bytes} bytes \
                     there in total; free space and mount again"
                )));
            }
            Err(error) => tracing::debug!(%error, "cannot allocate space for the image"),
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
