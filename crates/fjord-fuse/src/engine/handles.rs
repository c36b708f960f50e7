//! Open files, by the numbers that the kernel hands back.
//!
//! A handle carries what belongs to one open(2) and to nothing else: which writeback errors it has
//! reported. That is why files are opened with a request although the protocol can do without: an
//! error must reach every handle that was open, once. Directories have no such state and are
//! opened without a request.
//!
//! Locks: each shard's mutex guards its map and is a leaf.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use fjord::OpenFile;
use parking_lot::Mutex;

const SHARDS: usize = 16;

/// All open files of a mount.
#[derive(Default)]
pub(super) struct Handles {
    shards: [Mutex<HashMap<u64, Arc<OpenFile>>>; SHARDS],
    /// Counts up; a number is never used twice in a mount.
    next: AtomicU64,
}

impl Handles {
    fn shard(&self, fh: u64) -> &Mutex<HashMap<u64, Arc<OpenFile>>> {
        &self.shards[fh as usize % SHARDS]
    }

    /// Keeps `file` until [`Handles::remove`].
    pub(super) fn insert(&self, file: OpenFile) -> u64 {
        // Zero is what the kernel sends where it has no handle.
        let fh = self.next.fetch_add(1, Ordering::Relaxed) + 1;
        self.shard(fh).lock().insert(fh, Arc::new(file));
        fh
    }

    pub(super) fn get(&self, fh: u64) -> Option<Arc<OpenFile>> {
        self.shard(fh).lock().get(&fh).map(Arc::clone)
    }

    pub(super) fn remove(&self, fh: u64) {
        let gone = self.shard(fh).lock().remove(&fh);
        drop(gone);
    }

    /// Lets go of everything, at the end of the mount.
    pub(super) fn clear(&self) {
        for shard in &self.shards {
            let gone = std::mem::take(&mut *shard.lock());
            drop(gone);
        }
    }
}
