//! A metadata block in memory, with the versions of it that transactions need.
//!
//! One [`Buffer`] exists per block that is cached; the cache is the engine's. Besides the current
//! contents, a buffer holds the versions that older transactions still need:
//!
//! ```text
//! current ── running transaction modifies it (copy on write)
//! frozen  ── committing transactions, oldest first: what they write to the log
//! committed ─ newest committed version, not yet checkpointed
//! base    ── for buffers that ask for it: the version before the running one
//! ```
//!
//! The running version belongs to a transaction ([`Tid`]), the others to what was logged under
//! one [`Sequence`]; see the module `transaction`.
//!
//! Invariants: versions are in order of their sequence; at most one is `committed`, because a newer
//! one supersedes it; a version never changes once it is frozen, because a version is a clone of
//! the [`Buf`] and the next writer copies. `contents` is locked before `state`.

use std::collections::VecDeque;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use fjord_block::Buf;
use fjord_block::lock::{Mutex, Rank, RwLock, RwLockReadGuard, RwLockWriteGuard};
use fjord_block::plant::{Bug, planted};
use fjord_format::types::{BlockNo, Tid};

use crate::sequence::Sequence;

/// Kind of contents; the journal treats both alike and counts them separately.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BufferKind {
    /// A block of metadata.
    Metadata,
    /// A block of file data, logged because the file is in data=journal mode.
    Data,
}

/// How a buffer became part of a transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Joined {
    /// It was part of it.
    Before,
    /// It joined.
    Now,
    /// It joined while a version of it is in flight: a page conflict (barrier-enabled I/O stack,
    /// section 4.2). The frozen version stays; the handle modifies a copy.
    InConflict,
}

/// A block that transactions can modify.
#[derive(Debug)]
pub struct Buffer {
    block: BlockNo,
    kind: BufferKind,
    /// Whether to keep the version before the running transaction's.
    keeps_base: bool,
    /// The current contents. Written only through a [`WriteGuard`].
    contents: RwLock<Buf>,
    /// Versions, by transaction.
    state: Mutex<Versions>,
}

/// Guarded by `Buffer::state`.
#[derive(Debug, Default)]
struct Versions {
    /// The transaction whose handles modify the contents now.
    running: Option<Tid>,
    /// Versions being committed, oldest first.
    frozen: VecDeque<(Sequence, Buf)>,
    /// The newest committed version, until it is checkpointed.
    committed: Option<(Sequence, Buf)>,
    /// Contents before the running transaction, if they were clean.
    base: Option<Buf>,
    /// A checkpoint is writing a version to the home location.
    home_write: bool,
}

impl Versions {
    fn is_clean(&self) -> bool {
        self.running.is_none() && self.frozen.is_empty() && self.committed.is_none()
    }
}

impl Buffer {
    /// A clean buffer with the contents as read from the device (or zeroes for a block that
    /// [`Handle::get_create`](crate::Handle::get_create) is about to initialise).
    pub fn new(block: BlockNo, contents: Buf, kind: BufferKind) -> Arc<Buffer> {
        Arc::new(Buffer::build(block, contents, kind, false))
    }

    /// As [`Buffer::new`], for a block that several parts share entry by entry: group
    /// descriptors. A commit of parts logs [`last_committed`](Buffer::last_committed) with the
    /// entries of those parts. Costs one more copy of the block while a transaction modifies
    /// it.
    pub fn new_keeping_base(block: BlockNo, contents: Buf, kind: BufferKind) -> Arc<Buffer> {
        Arc::new(Buffer::build(block, contents, kind, true))
    }

    fn build(block: BlockNo, contents: Buf, kind: BufferKind, keeps_base: bool) -> Buffer {
        let state = Mutex::new(Rank::BufferState, Versions::default());
        let contents = RwLock::new(Rank::BufferContents, contents);
        Buffer { block, kind, keeps_base, contents, state }
    }

    /// Home location, as a block number.
    pub fn block(&self) -> BlockNo {
        self.block
    }

    /// Whether parts share the block entry by entry: [`Buffer::new_keeping_base`].
    pub fn is_shared(&self) -> bool {
        self.keeps_base
    }

    /// Kind of contents.
    pub fn kind(&self) -> BufferKind {
        self.kind
    }

    /// The current contents. Blocks while a [`WriteGuard`] exists; a thread must not hold two
    /// guards of one buffer.
    pub fn read(&self) -> ReadGuard<'_> {
        ReadGuard { contents: self.contents.read() }
    }

    /// The current contents as a cheap clone, unaffected by later writers.
    pub fn snapshot(&self) -> Buf {
        self.contents.read().clone()
    }

    /// Whether some version is not checkpointed, whether in the log or only in memory.
    pub fn is_dirty(&self) -> bool {
        !self.state.lock().is_clean()
    }

    /// Whether a cache may drop the buffer: the block can be read from the device again.
    /// (The cache also checks that it holds the only `Arc`.)
    pub fn is_evictable(&self) -> bool {
        let state = self.state.lock();
        state.is_clean() && !state.home_write
    }

    /// The running transaction that modified the contents, if one did.
    pub fn running_tid(&self) -> Option<Tid> {
        self.state.lock().running
    }

    /// The contents as of the newest *committed* transaction. Exact for buffers made by
    /// [`Buffer::new_keeping_base`]; others return `None` when that version is gone.
    pub fn last_committed(&self) -> Option<Buf> {
        let contents = self.contents.read();
        let state = self.state.lock();
        if let Some((_, version)) = &state.committed {
            return Some(version.clone());
        }
        if state.is_clean() { Some(contents.clone()) } else { state.base.clone() }
    }

    /// Locks the contents for a handle's write.
    pub(crate) fn lock_for_write(&self) -> WriteGuard<'_> {
        WriteGuard { contents: self.contents.write() }
    }

    /// Adds the buffer to the transaction; the caller holds the contents' write lock through
    /// `guard`.
    pub(crate) fn join(&self, tid: Tid, guard: &WriteGuard<'_>) -> Joined {
        let mut state = self.state.lock();
        if state.running == Some(tid) {
            return Joined::Before;
        }
        // If there are committing or committed versions, the newest of those is the base.
        if self.keeps_base && state.is_clean() {
            state.base = Some(guard.contents.clone());
        }
        state.running = Some(tid);
        if state.frozen.is_empty() { Joined::Now } else { Joined::InConflict }
    }

    /// Whether the buffer is part of the transaction already.
    pub(crate) fn is_part_of(&self, tid: Tid) -> bool {
        self.state.lock().running == Some(tid)
    }

    /// Removes the buffer from the running transaction because the block was freed. `true` if it
    /// was part of it.
    pub(crate) fn leave(&self, tid: Tid) -> bool {
        let mut state = self.state.lock();
        let was_part = state.running == Some(tid);
        if was_part {
            state.running = None;
        }
        was_part
    }

    /// Freezes the current contents of `tid` as the version of `sequence`; all its handles are
    /// stopped. `None` when the buffer is no longer part of the transaction.
    pub(crate) fn freeze(&self, tid: Tid, sequence: Sequence) -> Option<Buf> {
        let contents = self.contents.read();
        let mut state = self.state.lock();
        if state.running != Some(tid) && !planted(Bug::RemovedBufferWritten) {
            return None;
        }
        state.running = None;
        let version = contents.clone();
        state.frozen.push_back((sequence, version.clone()));
        Some(version)
    }

    /// Freezes, as the version of `sequence`, the newest logged contents after `copy(current,
    /// logged)` has copied entries into them. The buffer stays in transaction `tid` if other
    /// entries have changed too.
    pub(crate) fn freeze_entries(
        &self,
        tid: Tid,
        sequence: Sequence,
        copy: impl FnOnce(&[u8], &mut [u8]),
    ) -> Entries {
        let contents = self.contents.read();
        let mut state = self.state.lock();
        if state.running != Some(tid) {
            return Entries::Left;
        }
        let logged = state.frozen.back().or(state.committed.as_ref()).map(|(_, version)| version);
        let older = state.base.as_ref();
        let stale = older.filter(|_| planted(Bug::EntriesBeforeLastPart));
        let Some(base) = stale.or(logged).or(older) else { return Entries::NoBase };
        let mut version = base.clone();
        copy(&contents, version.make_mut());
        if version[..] == base[..] {
            return Entries::Unchanged;
        }
        let is_all = version[..] == contents[..];
        if is_all {
            state.running = None;
            version = contents.clone();
        }
        state.frozen.push_back((sequence, version.clone()));
        Entries::Frozen { version, is_all }
    }

    /// The version of `sequence` is committed; it supersedes an older committed one. Without a log
    /// it is also checkpointed.
    pub(crate) fn committed(&self, sequence: Sequence, home: bool) {
        let mut state = self.state.lock();
        let index = state.frozen.iter().position(|(frozen, _)| *frozen == sequence);
        let Some((sequence, version)) = index.and_then(|index| state.frozen.remove(index)) else {
            return;
        };
        if planted(Bug::NewerVersionDropped) {
            state.frozen.clear();
        }
        if home {
            self.set_base(&mut state, version);
        } else {
            if !planted(Bug::EntriesBeforeLastPart) {
                state.base = None;
            }
            state.committed = Some((sequence, version));
        }
    }

    /// The commit of `sequence` freed the block: versions up to it must not be checkpointed any
    /// more. `false` while a checkpoint is writing one.
    pub(crate) fn discard_up_to(&self, sequence: Sequence) -> bool {
        let mut state = self.state.lock();
        let committed = state.committed.as_ref();
        if committed.is_some_and(|(committed, _)| sequence.0.at_least(committed.0)) {
            state.committed = None;
        }
        !state.home_write
    }

    /// The version of `sequence` for a checkpoint to write; `newer` as in
    /// [`Journal::checkpoint_older_than`](crate::Journal).
    pub(crate) fn begin_home_write(
        &self,
        sequence: Sequence,
        newer: Option<Sequence>,
    ) -> HomeWrite {
        let mut state = self.state.lock();
        if newer.is_some_and(|newer| state.frozen.iter().any(|(frozen, _)| *frozen == newer)) {
            return HomeWrite::NotNeeded;
        }
        match &state.committed {
            // Of two writes in flight either may be the one that lasts.
            Some((committed, _))
                if *committed == sequence && state.home_write && !planted(Bug::TwoHomeWrites) =>
            {
                HomeWrite::InFlight
            }
            Some((committed, version)) if *committed == sequence => {
                let in_flight = state.frozen.back().filter(|_| planted(Bug::CheckpointInFlight));
                let version = in_flight.map_or(version, |(_, version)| version).clone();
                state.home_write = true;
                HomeWrite::Begun(version)
            }
            _ => HomeWrite::NotNeeded,
        }
    }

    /// Whether a checkpoint is writing a version.
    pub(crate) fn is_going_home(&self) -> bool {
        self.state.lock().home_write
    }

    /// The newest committed version for a checkpoint to write home, whichever it is; `None` when that is
    /// there already.
    pub(crate) fn begin_newest_home_write(&self) -> Option<(Sequence, Buf)> {
        let mut state = self.state.lock();
        let newest = state.committed.clone()?;
        state.home_write = true;
        Some(newest)
    }

    /// The checkpoint's write of `sequence`'s version ended.
    pub(crate) fn end_home_write(&self, sequence: Sequence, written: bool) {
        let mut state = self.state.lock();
        state.home_write = false;
        let newest = state.committed.as_ref().map(|&(newest, _)| newest);
        let is_home = written && newest == Some(sequence);
        if let Some((_, version)) = state.committed.take_if(|_| is_home) {
            self.set_base(&mut state, version);
        }
    }

    /// Keeps a checkpointed version until a newer one is committed.
    fn set_base(&self, state: &mut Versions, version: Buf) {
        state.base = (self.keeps_base && !state.is_clean()).then_some(version);
    }
}

/// What a checkpoint has to do with a version.
pub(crate) enum HomeWrite {
    /// To write it.
    Begun(Buf),
    /// To wait until an older one, which another thread is writing, is there; then to ask again.
    InFlight,
    /// Nothing: a newer committed one has superseded it, or is about to, or the block was freed.
    NotNeeded,
}

/// Outcome of freezing the entries of some parts of a shared block.
pub(crate) enum Entries {
    /// The buffer has left the transaction.
    Left,
    /// The entries are unchanged.
    Unchanged,
    /// The version for the log; `is_all` if it equals the current contents, so that the buffer has
    /// left the transaction.
    Frozen {
        /// The version.
        version: Buf,
        /// Whether nothing remains for a later commit.
        is_all: bool,
    },
    /// The last committed contents are not known: a bug of this crate.
    NoBase,
}

/// The contents of a buffer, shared.
#[derive(Debug)]
pub struct ReadGuard<'a> {
    contents: RwLockReadGuard<'a, Buf>,
}

impl Deref for ReadGuard<'_> {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.contents
    }
}

/// The contents of a buffer, writable under a handle. The first modification copies
/// the block when an older version is still in use.
#[derive(Debug)]
pub struct WriteGuard<'a> {
    contents: RwLockWriteGuard<'a, Buf>,
}

impl WriteGuard<'_> {
    /// Replaces the whole contents without copying the old ones. The length must not change.
    pub fn replace(&mut self, contents: Buf) {
        debug_assert_eq!(contents.len(), self.contents.len());
        *self.contents = contents;
    }
}

impl Deref for WriteGuard<'_> {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.contents
    }
}

impl DerefMut for WriteGuard<'_> {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.contents.make_mut()
    }
}
