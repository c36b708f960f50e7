//! The gate that every change of the image passes. Owns the count of requests in flight, and the
//! changes held back while a snapshot is taken.
//!
//! A snapshot closes the gate: changes submitted from then on are held, those in flight finish. What
//! lies on the image then is what a crash at that moment would leave of completed writes. A clone is
//! taken while the gate is closed; for a plain copy it lets changes through to chunks that have
//! been read, and holds the others until theirs have been.
//!
//! Invariants:
//! - a change is counted in flight from before it starts until its bytes are in place; with
//!   [`GUARDED`] set it is counted only under `guard`, where the mode allows it;
//! - `GUARDED` is set while the mode is not `Open`, so that a submission looks at one word, which
//!   it changes anyway, while there is no snapshot;
//! - `submit` never sleeps here: a thread that reaps completions submits from callbacks;
//! - held changes are let go when the mode becomes `Open`, whatever ended the snapshot.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::chunks::Chunks;
use super::shared::{Job, Shared, Work};
use crate::buf::AlignedBuf;
use crate::device::Class;
use crate::snapshot::SnapshotError;

/// One request in flight, in the low half of the word.
const REQUEST: u64 = 1;
/// One change in flight.
const CHANGE: u64 = 1 << 32;
const CHANGE_MASK: u64 = GUARDED - CHANGE;
/// A snapshot looks at every change.
const GUARDED: u64 = 1 << 63;

/// How often a closing gate looks again at what is in flight.
const DRAIN_POLL: Duration = Duration::from_millis(1);

/// What may pass.
#[derive(Default)]
pub(super) enum Mode {
    /// Everything; there is no snapshot, or nothing is left for it to read.
    #[default]
    Open,
    /// Nothing, since then.
    Closed(Instant),
    /// What touches only chunks that are safe.
    Copying(Chunks),
}

/// A change that waits.
struct Held {
    work: Work,
    class: Class,
    since: Instant,
}

/// Bytes that were read for a held change and are to be written to the copy.
pub(super) struct Piece {
    pub(super) offset: u64,
    pub(super) buf: AlignedBuf,
}

/// Guarded by `Gate::guard`.
#[derive(Default)]
pub(super) struct Guard {
    pub(super) mode: Mode,
    held: Vec<Held>,
    /// Changes held so far, of this snapshot.
    pub(super) held_count: u64,
    /// Read, not yet written to the copy.
    pub(super) pieces: VecDeque<Piece>,
    pub(super) pieces_bytes: usize,
    /// There is a snapshot.
    taken: bool,
    /// Why it failed.
    pub(super) failure: Option<SnapshotError>,
    /// Nothing more is to be kept: the thread that reads for held changes ends.
    pub(super) ended: bool,
}

impl Guard {
    /// The ranges in bytes that held changes touch, oldest first.
    pub(super) fn held_ranges(&self) -> impl Iterator<Item = Range<u64>> {
        let range = |work: &Work| work.offset..work.offset.saturating_add(work.len);
        self.held.iter().map(move |held| range(&held.work))
    }

    /// Since when the oldest held change waits.
    pub(super) fn oldest(&self) -> Option<Instant> {
        self.held.first().map(|held| held.since)
    }

    /// Takes out what may pass now.
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
#[derive(Default)]
pub(super) struct Gate {
    /// [`GUARDED`], changes in flight, requests in flight.
    word: AtomicU64,
    guard: Mutex<Guard>,
    /// Whatever a thread of the snapshot may wait for.
    changed: Condvar,
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
    /// A request that changes nothing.
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

    /// Gives a change back that may start now, and holds any other. A discard is not held but
    /// dropped, as it may be at any time: one can be of most of the image.
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
        guard.held.push(Held { work, class, since: Instant::now() });
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

    /// Waits until something changes, at most until `deadline`; `false` when that is over.
    pub(super) fn wait(
        &self,
        guard: &mut MutexGuard<'_, Guard>,
        deadline: Option<Instant>,
    ) -> bool {
        match deadline {
            Some(deadline) => !self.changed.wait_until(guard, deadline).timed_out(),
            None => {
                self.changed.wait(guard);
                true
            }
        }
    }

    /// Wakes all that [wait](Gate::wait).
    pub(super) fn wake(&self) {
        self.changed.notify_all();
    }

    /// A snapshot begins; nothing is held yet.
    ///
    /// # Errors
    /// `Busy`: there is one.
    pub(super) fn begin(&self) -> Result<(), SnapshotError> {
        let mut guard = self.guard.lock();
        if guard.taken {
            return Err(SnapshotError::Busy);
        }
        *guard = Guard { taken: true, ..Guard::default() };
        Ok(())
    }

    /// Holds every change from now on, and waits for those in flight.
    ///
    /// # Errors
    /// What made the snapshot fail meanwhile, by another thread.
    pub(super) fn close(&self, shared: &Arc<Shared>) -> Result<(), SnapshotError> {
        let mut guard = self.guard.lock();
        if let Some(failure) = guard.failure.take() {
            return Err(failure);
        }
        guard.mode = Mode::Closed(Instant::now());
        self.word.fetch_or(GUARDED, Ordering::SeqCst);
        self.wake();
        while self.changes_in_flight() > 0 {
            if let Some(failure) = guard.failure.take() {
                return Err(failure);
            }
            // Those who wait for held changes do not reap the others.
            let reaped = MutexGuard::unlocked(&mut guard, || shared.reap_for_all(DRAIN_POLL));
            if !reaped {
                self.wait(&mut guard, Some(Instant::now() + DRAIN_POLL));
            }
        }
        guard.failure.take().map_or(Ok(()), Err)
    }

    /// Changes the mode of a closed gate, and lets go what may pass then. Returns for how long it
    /// was closed.
    ///
    /// # Errors
    /// What made the snapshot fail meanwhile; the gate is open then.
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
            Mode::Closed(since) => since.elapsed(),
            Mode::Open | Mode::Copying(_) => Duration::ZERO,
        };
        guard.mode = mode;
        self.let_go(guard, shared);
        Ok(closed)
    }

    /// Dispatches what may pass as things are.
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

    /// The snapshot has failed, if there is one: everything passes from now on.
    pub(super) fn fail(&self, failure: SnapshotError, shared: &Arc<Shared>) {
        let mut guard = self.guard.lock();
        if !guard.taken || guard.ended {
            return;
        }
        guard.failure.get_or_insert(failure);
        guard.mode = Mode::Open;
        self.let_go(guard, shared);
    }

    /// Nothing more is to be read: everything passes, and the thread that reads for held changes
    /// ends.
    pub(super) fn end_keeping(&self, shared: &Arc<Shared>) {
        let mut guard = self.guard.lock();
        guard.ended = true;
        guard.mode = Mode::Open;
        self.let_go(guard, shared);
    }

    /// The next snapshot may begin.
    pub(super) fn finish(&self) {
        *self.guard.lock() = Guard::default();
    }
}
