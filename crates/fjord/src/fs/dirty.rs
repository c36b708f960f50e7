//! The list of inodes with something to write.
//!
//! Owns the order in which background writeback visits them. Invariant: an inode with
//! dirty pages or lazy changes is on the list, or is being written by whoever took it
//! off; the list holds a reference, so such an inode stays in memory.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::inode::Inode;

#[derive(Default)]
struct Entries {
    queue: VecDeque<(Instant, Arc<Inode>)>,
    members: HashSet<u32>,
}

/// Inodes in the order in which they became dirty.
#[derive(Default)]
pub(crate) struct DirtyList {
    /// Leaf lock.
    entries: Mutex<Entries>,
}

impl DirtyList {
    /// Adds an inode unless it is there.
    pub(crate) fn add(&self, inode: &Arc<Inode>) {
        let mut entries = self.entries.lock();
        if entries.members.insert(inode.ino.0) {
            entries.queue.push_back((Instant::now(), inode.clone()));
        }
    }

    /// Takes the oldest inode if it has been dirty for `age`.
    pub(crate) fn pop_older_than(&self, now: Instant, age: Duration) -> Option<Arc<Inode>> {
        let mut entries = self.entries.lock();
        let (since, _) = entries.queue.front()?;
        if now.saturating_duration_since(*since) < age {
            return None;
        }
        let (_, inode) = entries.queue.pop_front()?;
        entries.members.remove(&inode.ino.0);
        Some(inode)
    }

    /// Takes all inodes.
    pub(crate) fn take_all(&self) -> Vec<Arc<Inode>> {
        let mut entries = self.entries.lock();
        entries.members.clear();
        entries.queue.drain(..).map(|(_, inode)| inode).collect()
    }

    /// Takes an inode off after its deletion.
    pub(crate) fn forget(&self, inode: &Inode) {
        let mut entries = self.entries.lock();
        if entries.members.remove(&inode.ino.0) {
            entries.queue.retain(|(_, other)| other.ino != inode.ino);
        }
    }
}
