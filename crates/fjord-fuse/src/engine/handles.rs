//! Open files, by the numbers that the kernel hands back.
//!
//! A handle has the state of one open(2): reported writeback errors, O_SYNC, and the user if open
//! for writing. For this state files are opened with a request although the protocol can omit it: a
//! writeback error must be reported once to every open handle. Directories have no such state and
//! are opened without a request.
//!
//! An inode's count of handles says when no page of it can be locked by a request: every READ and WRITE
//! belongs to an open file, which the kernel releases after them, mappings included.
//!
//! Locks: each shard's mutex (`Rank::FuseHandles`, `Rank::FuseOpens`) guards its map; never both at a time.

use std::{
    collections::{HashMap, hash_map::Entry},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use fjord::{InodeNo, InodeRef, OpenFile};
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
    /// Number of handles of each inode that has some.
    opens: [Mutex<HashMap<InodeNo, u64>>; SHARDS],
    /// Counts up; a number is never used twice in a mount.
    next: AtomicU64,
}

impl Default for Handles {
    fn default() -> Handles {
        Handles {
            shards: std::array::from_fn(|_| Mutex::new(Rank::FuseHandles, HashMap::new())),
            opens: std::array::from_fn(|_| Mutex::new(Rank::FuseOpens, HashMap::new())),
            next: AtomicU64::new(0),
        }
    }
}

impl Handles {
    fn shard(&self, fh: u64) -> &Mutex<HashMap<u64, Arc<Opened>>> {
        &self.shards[fh as usize % SHARDS]
    }

    fn opens(&self, ino: InodeNo) -> &Mutex<HashMap<InodeNo, u64>> {
        &self.opens[ino.0 as usize % SHARDS]
    }

    /// Opens `inode` until [`Handles::remove`]. If nobody else has it open, `alone` is called first, and
    /// nobody else opens it until that returns.
    pub(super) fn open(
        &self,
        inode: &InodeRef,
        open_flags: u32,
        uid: u32,
        alone: impl FnOnce(),
    ) -> u64 {
        {
            let mut opens = self.opens(inode.ino()).lock();
            let count = opens.entry(inode.ino()).or_insert(0);
            if *count == 0 {
                alone();
            }
            *count += 1;
        }
        let file = inode.open();
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
        let Some(gone) = gone else { return };
        let ino = gone.file.inode().ino();
        let mut opens = self.opens(ino).lock();
        if let Entry::Occupied(mut count) = opens.entry(ino) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
    }

    /// Drops all handles, at the end of the mount.
    pub(super) fn clear(&self) {
        for shard in &self.shards {
            let gone = std::mem::take(&mut *shard.lock());
            drop(gone);
        }
        self.opens.iter().for_each(|shard| shard.lock().clear());
    }
}
