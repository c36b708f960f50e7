//! Open files, by the numbers that the kernel hands back.
//!
//! A handle has the state of one open(2): reported writeback errors, O_SYNC, and the user if open
//! for writing. For this state files are opened with a request although the protocol can omit it: a
//! writeback error must be reported once to every open handle. Directories have no such state and
//! are opened without a request.
//!
//! Locks: each shard's mutex (`Rank::FuseHandles`) guards its map.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use fjord::{InodeNo, OpenFile};
use fjord_block::lock::{Mutex, Rank};

const SHARDS: usize = 16;
const O_SYNC: u32 = libc::O_SYNC as u32;
const O_ACCMODE: u32 = libc::O_ACCMODE as u32;
const O_RDONLY: u32 = libc::O_RDONLY as u32;

/// State of one open(2).
pub(super) struct Opened {
    pub file: OpenFile,
    /// Opened with O_SYNC (not with O_DSYNC alone).
    pub sync: bool,
    /// Who opened it for writing, if that is what it is open for.
    writer: Option<u32>,
}

/// All open files of a mount.
pub(super) struct Handles {
    shards: [Mutex<HashMap<u64, Arc<Opened>>>; SHARDS],
    /// Counts up; a number is never used twice in a mount.
    next: AtomicU64,
}

impl Default for Handles {
    fn default() -> Handles {
        Handles {
            shards: std::array::from_fn(|_| Mutex::new(Rank::FuseHandles, HashMap::new())),
            next: AtomicU64::new(0),
        }
    }
}

impl Handles {
    fn shard(&self, fh: u64) -> &Mutex<HashMap<u64, Arc<Opened>>> {
        &self.shards[fh as usize % SHARDS]
    }

    /// Keeps `file` until [`Handles::remove`].
    pub(super) fn insert(&self, file: OpenFile, open_flags: u32, uid: u32) -> u64 {
        let sync = open_flags & O_SYNC == O_SYNC;
        let writer = (open_flags & O_ACCMODE != O_RDONLY).then_some(uid);
        // Zero is what the kernel sends where it has no handle.
        let fh = self.next.fetch_add(1, Ordering::Relaxed) + 1;
        self.shard(fh).lock().insert(fh, Arc::new(Opened { file, sync, writer }));
        fh
    }

    pub(super) fn get(&self, fh: u64) -> Option<Arc<Opened>> {
        self.shard(fh).lock().get(&fh).map(Arc::clone)
    }

    /// Whether the user with this ID has opened the inode for writing. Looks at every open file.
    pub(super) fn has_writer(&self, ino: InodeNo, uid: u32) -> bool {
        let writes =
            |opened: &Arc<Opened>| opened.writer == Some(uid) && opened.file.inode().ino() == ino;
        self.shards.iter().any(|shard| shard.lock().values().any(writes))
    }

    pub(super) fn remove(&self, fh: u64) {
        let gone = self.shard(fh).lock().remove(&fh);
        drop(gone);
    }

    /// Drops all handles, at the end of the mount.
    pub(super) fn clear(&self) {
        for shard in &self.shards {
            let gone = std::mem::take(&mut *shard.lock());
            drop(gone);
        }
    }
}
