//! The gate that every change of the image passes. Owns the count of requests in flight, and the
//! changes held during a snapshot.
//!
//! A snapshot closes the gate: later changes are held, those in flight finish. The image then has
//! exactly the completed writes. A clone is taken while the gate is closed; during a plain copy the
//! gate passes changes to chunks that have been read, and holds the others until their chunks have
//! been read.
//!
//! Invariants:
//! - a change is counted in flight from before it starts until its bytes are in place; with
//!   [`GUARDED`] set it is counted only under `guard`, if the mode allows it;
//! - `GUARDED` is set while the mode is not `Open`, so that without a snapshot a submission reads
//!   only one word, which it changes anyway;
//! - `submit` never sleeps here: a thread that reaps completions submits from callbacks;
//! - held changes are released when the mode becomes `Open`, however the snapshot ended.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::chunks::Chunks;
use super::clock::{self, Clock};
use super::shared::{Job, Shared, Work};
use crate::buf::AlignedBuf;
use crate::device::Class;
use crate::lock::{Condvar, Mutex, MutexGuard, Rank};
use crate::snapshot::SnapshotError;

/// One request in flight, in the low half of the word.
const REQUEST: u64 = 1;
/// One change in flight.
const CHANGE: u64 = 1 << 32;
const CHANGE_MASK: u64 = GUARDED - CHANGE;
/// A snapshot checks every change.
const GUARDED: u64 = 1 << 63;

/// Poll interval of a closing gate for requests in flight.
const DRAIN_POLL: Duration = Duration::from_millis(1);

/// What may pass.
#[derive(Default)]
pub(super) enum Mode {
    /// All; there is no snapshot, or it has read everything.
    #[default]
    Open,
    /// None, since this time.
    Closed(Instant),
    /// Changes that touch only safe chunks.
    Copying(Chunks),
}

/// A held change.
struct Held {
    work: Work,
    class: Class,
    since: Instant,
}

/// Bytes read for a held change, to be written to the copy.
pub(super) struct Piece {
    pub(super) offset: u64,
    pub(super) buf: AlignedBuf,
}

/// Guarded by `Gate::guard`.
#[derive(Default)]
pub(super) struct Guard {
    pub(super) mode: Mode,
    /// Of pauses and holds.
    pub(super) clock: Clock,
    held: Vec<Held>,
    /// Changes held so far, of this snapshot.
    pub(super) held_count: u64,
    /// Read, not yet written to the copy.
    pub(super) pieces: VecDeque<Piece>,
    pub(super) pieces_bytes: usize,
    /// A snapshot is in progress.
    taken: bool,
    /// Why it failed.
    pub(super) failure: Option<SnapshotError>,
    /// No more reads for held changes: their thread ends.
    pub(super) ended: bool,
}

impl Guard {
    /// The ranges in bytes that held changes touch, oldest first.
    pub(super) fn held_ranges(&self) -> impl Iterator<Item = Range<u64>> {
        let range = |work: &Work| work.offset..work.offset.saturating_add(work.len);
        self.held.iter().map(move |held| range(&held.work))
    }

    /// Start of the oldest held change's wait.
    pub(super) fn oldest(&self) -> Option<Instant> {
        self.held.first().map(|held| held.since)
    }

    /// Takes the changes that may pass now.
    fn take_passing(&mut self) -> Vec<Held> {
        match &self.mode {
            Mode::Open => std::mem::take(&mut self.held),
            Mode::Closed(_) => Vec::new(),
            Mode::Copying(chunks) => {
                let passes = |held: &mut Held| chunks.are_safe(held.work.offset, held.work.len);
                self.held.extract_if(.., passes).collect()
            }
        }
    }
}

/// The gate of one device.
pub(super) struct Gate {
    /// [`GUARDED`], changes in flight, requests in flight.
    word: AtomicU64,
    guard: Mutex<Guard>,
    /// Signalled on all events that a thread of the snapshot may wait for.
    changed: Condvar,
}

impl Default for Gate {
    fn default() -> Gate {
        Gate {
            word: AtomicU64::default(),
            guard: Mutex::new(Rank::Gate, Guard::default()),
            changed: Condvar::new(),
        }
    }
}

/// One request that is not done; dropped just before its ticket completes.
pub(super) struct Pending {
    gate: Arc<Gate>,
    is_change: bool,
}

impl Drop for Pending {
    fn drop(&mut self) {
        let one = if self.is_change { REQUEST + CHANGE } else { REQUEST };
        let before = self.gate.word.fetch_sub(one, Ordering::SeqCst);
        if self.is_change && before & GUARDED != 0 && before & CHANGE_MASK == CHANGE {
            let _guard = self.gate.guard.lock();
            self.gate.changed.notify_all();
        }
    }
}

impl Pending {
    /// Whether it is counted as a change in flight, and so may start.
    pub(super) fn has_passed(&self) -> bool {
        self.is_change
    }
}

impl Gate {
    /// A request that is not a change.
    pub(super) fn enter(self: &Arc<Self>) -> Pending {
        self.word.fetch_add(REQUEST, Ordering::SeqCst);
        Pending { gate: self.clone(), is_change: false }
    }

    /// A change; it may start if it [has passed](Pending::has_passed), else [`Gate::pass`] decides.
    pub(super) fn enter_change(self: &Arc<Self>) -> Pending {
        let before = self.word.fetch_add(REQUEST + CHANGE, Ordering::SeqCst);
        let is_change = before & GUARDED == 0;
        if !is_change {
            self.word.fetch_sub(CHANGE, Ordering::SeqCst);
        }
        Pending { gate: self.clone(), is_change }
    }

    /// Requests in flight, held ones among them.
    pub(super) fn pending_count(&self) -> u64 {
        self.word.load(Ordering::SeqCst) & (CHANGE - 1)
    }

    fn changes_in_flight(&self) -> u64 {
        (self.word.load(Ordering::SeqCst) & CHANGE_MASK) / CHANGE
    }

    /// Returns a change that may start now, and holds any other. A discard is dropped instead of
    /// held, which is always allowed: one can cover most of the image.
    pub(super) fn pass(&self, mut work: Work, class: Class, shared: &Shared) -> Option<Work> {
        if work.pending.has_passed() {
            return Some(work);
        }
        let mut guard = self.guard.lock();
        let passes = match &guard.mode {
            Mode::Open => true,
            Mode::Closed(_) => false,
            Mode::Copying(chunks) => chunks.are_safe(work.offset, work.len),
        };
        if passes {
            self.count(&mut work.pending);
            return Some(work);
        }
        if work.is_discard() {
            drop(guard);
            work.finish(shared, Ok(()));
            return None;
        }
        let since = guard.clock.now();
        guard.held.push(Held { work, class, since });
        guard.held_count += 1;
        self.changed.notify_all();
        None
    }

    fn count(&self, pending: &mut Pending) {
        pending.is_change = true;
        self.word.fetch_add(CHANGE, Ordering::SeqCst);
    }

    /// The state, for the threads of a snapshot.
    pub(super) fn lock(&self) -> MutexGuard<'_, Guard> {
        self.guard.lock()
    }

    /// Waits until something changes, at most until `deadline` by the clock.
    pub(super) fn wait(&self, guard: &mut MutexGuard<'_, Guard>, deadline: Option<Instant>) {
        match deadline {
            Some(deadline) => clock::wait_until(&self.changed, guard, deadline),
            None => self.changed.wait(guard),
        }
    }

    /// Wakes all that [wait](Gate::wait).
    pub(super) fn wake(&self) {
        self.changed.notify_all();
    }

    /// Begins a snapshot; nothing is held yet.
    ///
    /// # Errors
    /// `Busy`: another snapshot is in progress.
    pub(super) fn begin(&self) -> Result<(), SnapshotError> {
        let mut guard = self.guard.lock();
        if guard.taken {
            return Err(SnapshotError::Busy);
        }
        let clock = std::mem::take(&mut guard.clock);
        *guard = Guard { taken: true, clock, ..Guard::default() };
        Ok(())
    }

    /// Closes the gate: holds every change from now on, and waits for those in flight.
    ///
    /// # Errors
    /// The failure of the snapshot meanwhile, by another thread.
    pub(super) fn close(&self, shared: &Arc<Shared>) -> Result<(), SnapshotError> {
        let mut guard = self.guard.lock();
        if let Some(failure) = guard.failure.take() {
            return Err(failure);
        }
        guard.mode = Mode::Closed(guard.clock.now());
        self.word.fetch_or(GUARDED, Ordering::SeqCst);
        self.wake();
        while self.changes_in_flight() > 0 {
            if let Some(failure) = guard.failure.take() {
                return Err(failure);
            }
            // Threads that wait for held changes do not reap other requests.
            let reaped = MutexGuard::unlocked(&mut guard, || shared.reap_for_all(DRAIN_POLL));
            if !reaped {
                self.changed.wait_for(&mut guard, DRAIN_POLL);
            }
        }
        guard.failure.take().map_or(Ok(()), Err)
    }

    /// Changes the mode of a closed gate, and releases the changes that may pass. Returns for how
    /// long it was closed.
    ///
    /// # Errors
    /// The failure of the snapshot meanwhile; the gate is open then.
    pub(super) fn reopen(
        &self,
        mode: Mode,
        shared: &Arc<Shared>,
    ) -> Result<Duration, SnapshotError> {
        let mut guard = self.guard.lock();
        if let Some(failure) = guard.failure.take() {
            return Err(failure);
        }
        let closed = match &guard.mode {
            Mode::Closed(since) => guard.clock.now().saturating_duration_since(*since),
            Mode::Open | Mode::Copying(_) => Duration::ZERO,
        };
        guard.mode = mode;
        self.let_go(guard, shared);
        Ok(closed)
    }

    /// Dispatches the held changes that may pass now.
    pub(super) fn let_go(&self, mut guard: MutexGuard<'_, Guard>, shared: &Arc<Shared>) {
        if matches!(guard.mode, Mode::Open) {
            self.word.fetch_and(!GUARDED, Ordering::SeqCst);
        }
        let mut passing = guard.take_passing();
        passing.iter_mut().for_each(|held| self.count(&mut held.work.pending));
        self.wake();
        drop(guard);
        let mut by_class: [Vec<Arc<Job>>; 3] = Default::default();
        for Held { work, class, .. } in passing {
            by_class[class as usize].push(Job::new(work, shared));
        }
        for (jobs, class) in
            by_class.into_iter().zip([Class::Sync, Class::Async, Class::Background])
        {
            shared.dispatch(jobs, class);
        }
    }

    /// Fails the snapshot, if any: all changes pass from now on.
    pub(super) fn fail(&self, failure: SnapshotError, shared: &Arc<Shared>) {
        let mut guard = self.guard.lock();
        if !guard.taken || guard.ended {
            return;
        }
        guard.failure.get_or_insert(failure);
        guard.mode = Mode::Open;
        self.let_go(guard, shared);
    }

    /// The snapshot has read everything: all changes pass, and the thread that reads for held
    /// changes ends.
    pub(super) fn end_keeping(&self, shared: &Arc<Shared>) {
        let mut guard = self.guard.lock();
        guard.ended = true;
        guard.mode = Mode::Open;
        self.let_go(guard, shared);
    }

    /// Ends the snapshot: the next one may begin.
    pub(super) fn finish(&self) {
        *self.guard.lock() = Guard::default();
    }
}
