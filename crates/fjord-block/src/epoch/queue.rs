//! The state machine. Owns every request from its submission to its result.
//!
//! Pure: no threads, no locks, no clock, no data. The owner pushes requests, takes commands out
//! while there are any, and reports their completion; results come out of [`EpochQueue::pop_done`].
//!
//! Invariants:
//! - every dependency is on an earlier submission (overlap, epochs, flushes), so that there are no
//!   cycles;
//! - an ordered write is ready only while its epoch is the open one;
//! - every request gets one result; after a failure that breaks order, no request that it stops is
//!   dispatched or succeeds.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::failure::Failures;
use super::flushes::{ChangeTime, Flushes};
use super::overlap::Overlaps;
use super::ready::{Place, Ready};
use super::rules::{DeviceTraits, Paper, Progress, Rules};
use super::share::Share;
use super::stats::EpochStats;
use super::types::{CommandId, Epoch, Io, IoKind, RequestId, Tuning};
use crate::device::{Class, Order};
use crate::error::{IoError, IoErrorKind};
use crate::ticket::IoResult;

/// A request that is not done.
#[derive(Clone, Debug, Hash)]
pub(super) struct Entry {
    pub(super) io: Io,
    /// Its current class; promotion may have raised it.
    pub(super) class: Class,
    pub(super) pushed_ns: u64,
    /// The epoch of an ordered write.
    pub(super) epoch: Option<Epoch>,
    /// Bytes that have been dispatched.
    pub(super) sent: u64,
    /// All of it has been dispatched.
    pub(super) left: bool,
    /// Commands in flight with pieces of it.
    pub(super) in_flight: u32,
    /// Earlier requests on the same bytes that are not done.
    pub(super) blockers: BTreeSet<RequestId>,
    /// Later requests that wait for this one.
    pub(super) blocks: Vec<RequestId>,
    error: Option<IoError>,
}

/// An unfinished epoch.
#[derive(Clone, Debug, Default, Hash)]
pub(super) struct EpochState {
    /// Its barrier was submitted.
    pub(super) closed: bool,
    /// Writes that have not been dispatched.
    pub(super) queued_count: u64,
    /// Writes that are not transferred.
    pub(super) unfinished_count: u64,
    /// End of the last change that a flush must make durable before the next epoch: of its own
    /// transfers, or of any write that had completed when its barrier was submitted.
    changed: ChangeTime,
    /// Number of writes submitted while an earlier epoch was open.
    outside: Vec<RequestId>,
}

/// A command in flight.
#[derive(Clone, Debug, Hash)]
pub(super) struct InFlight {
    pub(super) kind: IoKind,
    pub(super) class: Class,
    pub(super) requests: Vec<RequestId>,
    pub(super) len: u64,
    pub(super) sent_ns: u64,
    /// The bounds of lower classes were in force when it was sent.
    pub(super) bounded: bool,
}

/// The scheduler.
#[derive(Clone, Debug, Hash)]
pub struct EpochQueue<R: Rules = Paper> {
    pub(super) rules: R,
    pub(super) traits: DeviceTraits,
    pub(super) tuning: Tuning,
    next_request: u64,
    pub(super) next_command: u64,
    pub(super) requests: BTreeMap<RequestId, Entry>,
    pub(super) commands: BTreeMap<CommandId, InFlight>,
    pub(super) ready: Ready,
    overlaps: Overlaps,
    /// The number of the first of `epochs`.
    open: Epoch,
    /// The open epoch, then the waiting ones; new ordered writes join the last.
    pub(super) epochs: VecDeque<EpochState>,
    /// Ordered writes that are not transferred.
    pub(super) ordered: BTreeSet<RequestId>,
    /// Queued ordered writes below class Sync, promoted when a higher class depends on them.
    low_ordered: BTreeSet<RequestId>,
    pub(super) flushes: Flushes,
    pub(super) share: Share,
    /// The last command was chosen because it was overdue. The next one is not: else a stream of
    /// overdue requests would delay class Sync.
    pub(super) overdue_left_last: bool,
    pub(super) failures: Failures,
    done: VecDeque<(RequestId, IoResult)>,
    pub(super) stats: EpochStats,
}

impl EpochQueue<Paper> {
    /// An empty queue for a device.
    pub fn new(traits: DeviceTraits, tuning: Tuning) -> Self {
        EpochQueue::with_rules(Paper, traits, tuning)
    }
}

impl<R: Rules> EpochQueue<R> {
    /// An empty queue with wrong rules, to test the tests.
    pub fn with_rules(rules: R, traits: DeviceTraits, tuning: Tuning) -> Self {
        EpochQueue {
            rules,
            next_request: 1,
            next_command: 1,
            requests: BTreeMap::new(),
            commands: BTreeMap::new(),
            ready: Ready::default(),
            overlaps: Overlaps::new(traits.logical_block_size),
            open: Epoch(0),
            epochs: VecDeque::from([EpochState::default()]),
            ordered: BTreeSet::new(),
            low_ordered: BTreeSet::new(),
            flushes: Flushes::new(traits.volatile_cache),
            share: Share::new(traits.volatile_cache, &tuning),
            overdue_left_last: false,
            failures: Failures::default(),
            done: VecDeque::new(),
            stats: EpochStats::default(),
            tuning,
            traits,
        }
    }

    /// Queues a request. `now_ns` is of any monotonic clock.
    pub fn push(&mut self, io: Io, now_ns: u64) -> RequestId {
        let id = RequestId(self.next_request);
        self.next_request += 1;
        self.stats.request_count += 1;
        if io.class == Class::Sync {
            self.share.note_sync(&io, now_ns);
        }
        if let Some(error) = self.stop_error(id, &io, io.kind.takes_part()) {
            self.done.push_back((id, Err(error)));
            return id;
        }
        let entry = Entry {
            io,
            class: io.class,
            pushed_ns: now_ns,
            epoch: None,
            sent: 0,
            left: false,
            in_flight: 0,
            blockers: BTreeSet::new(),
            blocks: Vec::new(),
            error: None,
        };
        self.requests.insert(id, entry);
        self.count_queued(1);
        match io.kind {
            IoKind::Flush => {
                self.stats.flush_request_count += 1;
                self.flushes.not_ready.insert(id);
                self.raise_ordered_before(id, None, io.class);
            }
            IoKind::FlushCompleted => {
                self.stats.flush_request_count += 1;
                self.wait_for_flush(id);
            }
            _ => self.push_transfer(id, io),
        }
        self.settle();
        id
    }

    /// Queues a flush that makes all writes durable that have completed. A failed write does not
    /// fail it, wherever it lies.
    pub fn push_flush_completed(&mut self, class: Class, now_ns: u64) -> RequestId {
        self.push(Io::flush_completed(class), now_ns)
    }

    /// Lets a request with nothing left to dispatch wait until all changes so far are durable.
    fn wait_for_flush(&mut self, id: RequestId) {
        self.leave(id);
        if self.requests.contains_key(&id) {
            let served = self.flushes.wait(id);
            self.stats.combined_flush_count += u64::from(served);
        }
    }

    fn push_transfer(&mut self, id: RequestId, io: Io) {
        for other in self.overlaps.find(&io) {
            let Some(earlier) = self.requests.get_mut(&other) else { continue };
            if self.rules.excludes(&earlier.io, &io) {
                earlier.blocks.push(id);
                if let Some(entry) = self.requests.get_mut(&id) {
                    entry.blockers.insert(other);
                }
                self.raise(other, io.class);
            }
        }
        self.overlaps.insert(id, &io);
        let order = io.kind.order();
        if order != Order::Orderless {
            let epoch = self.join_epoch(order);
            if let Some(entry) = self.requests.get_mut(&id) {
                entry.epoch = Some(epoch);
            }
            self.raise_ordered_before(id, Some(epoch), io.class);
            if epoch != self.open
                && let Some(state) = self.epoch_mut(epoch)
            {
                state.outside.push(id);
            }
            self.ordered.insert(id);
            if io.class != Class::Sync {
                self.low_ordered.insert(id);
            }
        }
        self.make_ready(id);
    }

    /// Adds a write to the newest epoch, and starts another after a barrier.
    fn join_epoch(&mut self, order: Order) -> Epoch {
        let epoch = Epoch(self.open.0 + self.epochs.len() as u64 - 1);
        if let Some(state) = self.epochs.back_mut() {
            state.queued_count += 1;
            state.unfinished_count += 1;
            state.closed = order == Order::Barrier;
            if state.closed && self.rules.barrier_covers_completed() {
                state.changed = self.flushes.now;
            }
        }
        if order == Order::Barrier {
            self.stats.epoch_count += 1;
            self.epochs.push_back(EpochState::default());
        }
        epoch
    }

    /// The state of an unfinished epoch.
    pub(super) fn epoch_mut(&mut self, epoch: Epoch) -> Option<&mut EpochState> {
        let index = usize::try_from(epoch.0.checked_sub(self.open.0)?).ok()?;
        self.epochs.get_mut(index)
    }

    /// Whether order allows it to be dispatched now.
    pub(super) fn is_free(&self, entry: &Entry) -> bool {
        !entry.io.kind.is_flush()
            && !entry.left
            && entry.blockers.is_empty()
            && entry.epoch.is_none_or(|epoch| epoch == self.open)
    }

    pub(super) fn place(&self, id: RequestId) -> Option<Place> {
        let entry = self.requests.get(&id)?;
        Some(Place {
            id,
            class: entry.class,
            pushed_ns: entry.pushed_ns,
            offset: entry.io.offset + entry.sent,
            is_write: matches!(entry.io.kind, IoKind::Write { .. }) && entry.io.len > 0,
        })
    }

    fn make_ready(&mut self, id: RequestId) {
        let Some(entry) = self.requests.get(&id) else { return };
        if self.is_free(entry)
            && let Some(place) = self.place(id)
        {
            self.ready.insert(place);
        }
    }

    /// Promotes a request and its dependencies to class Sync, because a thread depends on it.
    pub fn promote(&mut self, id: RequestId, now_ns: u64) {
        let Some(io) = self.requests.get(&id).map(|entry| entry.io) else { return };
        self.share.note_sync(&io, now_ns);
        if io.kind == IoKind::Flush {
            self.raise_ordered_before(id, None, Class::Sync);
        }
        self.raise(id, Class::Sync);
    }

    /// Promotes the ordered writes before `before` in epochs earlier than `epoch` (None: in all).
    fn raise_ordered_before(&mut self, before: RequestId, epoch: Option<Epoch>, class: Class) {
        let low = |entry: &Entry| {
            entry.class > class && epoch.is_none_or(|epoch| entry.epoch.is_some_and(|e| e < epoch))
        };
        let ids: Vec<_> = self.low_ordered.range(..before).copied().collect();
        for id in ids {
            if self.requests.get(&id).is_some_and(low) {
                self.raise(id, class);
            }
        }
    }

    /// Promotes a request and its dependencies to `class`, if that is higher.
    fn raise(&mut self, id: RequestId, class: Class) {
        let mut todo = vec![id];
        while let Some(id) = todo.pop() {
            let Some(entry) = self.requests.get(&id) else { continue };
            if entry.class <= class {
                continue;
            }
            let was_ready = self.place(id).is_some_and(|place| self.ready.remove(place));
            let Some(entry) = self.requests.get_mut(&id) else { continue };
            entry.class = class;
            self.stats.promoted_count += 1;
            todo.extend(entry.blockers.iter().copied());
            let epoch = entry.epoch;
            if was_ready {
                self.make_ready(id);
            }
            if class == Class::Sync {
                self.low_ordered.remove(&id);
            }
            if let Some(epoch) = epoch {
                let earlier = self.low_ordered.range(..id).copied();
                let earlier = earlier.filter(|other| {
                    self.requests.get(other).is_some_and(|e| e.epoch.is_some_and(|e| e < epoch))
                });
                todo.extend(earlier);
            }
        }
    }

    /// Processes the completion of a command.
    pub fn completed(&mut self, command: CommandId, result: IoResult, now_ns: u64) {
        let Some(in_flight) = self.commands.remove(&command) else { return };
        self.stats.in_flight_count -= 1;
        if in_flight.kind == IoKind::Flush {
            self.flushes.end(command, result.is_ok());
            self.share.end_flush(command, &in_flight, now_ns, &self.tuning);
        } else {
            self.share.end(&in_flight, now_ns, &self.tuning);
        }
        let passed_fua =
            matches!(in_flight.kind, IoKind::Write { fua: true, .. }) && result.is_ok();
        if in_flight.kind.changes() && self.traits.volatile_cache && !passed_fua {
            self.flushes.now += 1;
        }
        for id in &in_flight.requests {
            self.note_transfer(*id, &result, passed_fua);
        }
        if let Err(error) = &result
            && self.rules.stops(in_flight.kind)
        {
            self.break_order(&in_flight, error.clone());
        }
        for id in in_flight.requests {
            if self.requests.get(&id).is_some_and(|entry| entry.left && entry.in_flight == 0) {
                self.finish_transfer(id);
            }
        }
        self.settle();
    }

    /// A command with a piece of this request ended.
    fn note_transfer(&mut self, id: RequestId, result: &IoResult, passed_fua: bool) {
        let place = self.place(id);
        let Some(entry) = self.requests.get_mut(&id) else { return };
        entry.in_flight -= 1;
        let epoch = entry.epoch;
        if let Err(error) = result {
            // The rest is not sent.
            entry.error.get_or_insert_with(|| error.clone());
            place.map(|place| self.ready.remove(place));
            self.leave(id);
        }
        let now = self.flushes.now;
        if let Some(state) = epoch.and_then(|epoch| self.epoch_mut(epoch))
            && !passed_fua
        {
            state.changed = now;
        }
    }

    /// Completes a request with nothing in flight and nothing more to send.
    fn finish_transfer(&mut self, id: RequestId) {
        if let Some(place) = self.place(id) {
            self.ready.remove(place);
        }
        self.leave(id);
        self.low_ordered.remove(&id);
        self.ordered.remove(&id);
        let Some(entry) = self.requests.get_mut(&id) else { return };
        let (io, error) = (entry.io, entry.error.clone());
        let (epoch, blocks) = (entry.epoch, std::mem::take(&mut entry.blocks));
        self.overlaps.remove(id, &io);
        if let Some(state) = epoch.and_then(|epoch| self.epoch_mut(epoch)) {
            state.unfinished_count -= 1;
        }
        for later in blocks {
            if let Some(entry) = self.requests.get_mut(&later) {
                entry.blockers.remove(&id);
            }
            self.make_ready(later);
        }
        let emulated_fua = match io.kind {
            IoKind::Write { order, fua: true } => !self.rules.passes_fua(&self.traits, order),
            _ => false,
        };
        match error.or_else(|| self.stop_error(id, &io, emulated_fua)) {
            Some(error) => self.finish(id, Err(error)),
            None if emulated_fua => {
                self.stats.flush_request_count += 1;
                self.wait_for_flush(id);
            }
            None => self.finish(id, Ok(())),
        }
    }

    /// Marks a request as no longer in the queue.
    pub(super) fn leave(&mut self, id: RequestId) {
        let Some(entry) = self.requests.get_mut(&id) else { return };
        if std::mem::replace(&mut entry.left, true) {
            return;
        }
        let epoch = entry.epoch;
        self.count_queued(-1);
        if let Some(state) = epoch.and_then(|epoch| self.epoch_mut(epoch)) {
            state.queued_count -= 1;
        }
    }

    fn finish(&mut self, id: RequestId, result: IoResult) {
        if self.requests.remove(&id).is_some() {
            self.done.push_back((id, result));
        }
    }

    fn count_queued(&mut self, change: i64) {
        self.stats.queued_count = self.stats.queued_count.saturating_add_signed(change);
        self.stats.queued_count_max = self.stats.queued_count_max.max(self.stats.queued_count);
    }

    /// The error of a request that a failure stops. `by_flush`: a failed flush stops it.
    fn stop_error(&self, id: RequestId, io: &Io, by_flush: bool) -> Option<IoError> {
        let first = self.failures.stopping(self.rules, id, io.kind, by_flush)?;
        let kind = IoErrorKind::OrderBroken {
            errno: first.errno(),
            op: first.op,
            offset: first.offset,
            len: first.len,
        };
        Some(IoError::new(kind, io.kind.op(), io.offset, io.len))
    }

    /// The failure that broke order, if any.
    pub fn failure(&self) -> Option<&IoError> {
        self.failures.any()
    }

    /// Breaks order for every ordered write and flush submitted from now on: for failures that the
    /// owner detects itself.
    pub fn fail(&mut self, error: IoError) {
        if self.failure().is_none() {
            self.failures.add_write(RequestId(self.next_request - 1), error);
            self.share.stop_flushes();
        }
    }

    /// Breaks order at a command that failed: for requests after its first ordered write, or at
    /// once if it is a flush.
    fn break_order(&mut self, failed: &InFlight, error: IoError) {
        let first = failed.requests.iter().filter(|id| self.ordered.contains(id)).min();
        let stops_more = match first {
            Some(first) => self.failures.add_write(*first, error),
            None => self.failures.add_flush(error),
        };
        if stops_more {
            self.fail_stopped();
        }
    }

    /// Fails the requests not dispatched that a failure stops, and those that wait for a flush.
    /// Others that it stops are in flight, and fail when they complete.
    fn fail_stopped(&mut self) {
        self.share.stop_flushes();
        let waiting = self.flushes.waiting.iter().map(|(id, _)| *id);
        let flushes: Vec<_> = self.flushes.not_ready.iter().copied().chain(waiting).collect();
        for id in flushes {
            let Some(entry) = self.requests.get(&id) else { continue };
            let Some(error) = self.stop_error(id, &entry.io, true) else { continue };
            self.flushes.forget(id);
            self.leave(id);
            self.finish(id, Err(error));
        }
        let queued: Vec<RequestId> = self.ordered.iter().copied().collect();
        for id in queued {
            let Some(entry) = self.requests.get(&id).filter(|entry| !entry.left) else { continue };
            let Some(error) = self.stop_error(id, &entry.io, true) else { continue };
            if let Some(place) = self.place(id) {
                self.ready.remove(place);
            }
            self.leave(id);
            if let Some(entry) = self.requests.get_mut(&id) {
                entry.error.get_or_insert(error);
                if entry.in_flight == 0 {
                    self.finish_transfer(id);
                }
            }
        }
    }

    /// Updates the state: epochs advance, flush requests become ready or are served.
    pub(super) fn settle(&mut self) {
        loop {
            let first_ordered = self.ordered.first().copied();
            while let Some(flush) = self.flushes.not_ready.first().copied() {
                let ordered_before = first_ordered.is_some_and(|first| first < flush);
                if !self.rules.flush_may_begin(ordered_before) {
                    break;
                }
                self.flushes.not_ready.remove(&flush);
                self.wait_for_flush(flush);
            }
            for id in self.flushes.take_served() {
                self.finish(id, Ok(()));
            }
            if !self.advance_epoch() {
                return;
            }
        }
    }

    /// Opens the next epoch if the rules allow it.
    fn advance_epoch(&mut self) -> bool {
        let Some(progress) = self.progress() else { return false };
        if !self.rules.next_epoch_may_leave(&self.traits, progress) {
            return false;
        }
        self.epochs.pop_front();
        self.open.0 += 1;
        let outside = self.epochs.front_mut().map(|open| std::mem::take(&mut open.outside));
        outside.into_iter().flatten().for_each(|id| self.make_ready(id));
        true
    }

    /// Progress of the open epoch; None before its barrier.
    fn progress(&self) -> Option<Progress> {
        let open = self.epochs.front().filter(|open| open.closed)?;
        Some(Progress {
            left: open.queued_count == 0,
            transferred: open.unfinished_count == 0,
            durable: open.changed <= self.flushes.durable,
        })
    }

    /// The request for which a flush is needed so that the next epoch can be dispatched.
    pub(super) fn epoch_flush_request(&self) -> Option<RequestId> {
        let progress = self.progress()?;
        let open = self.epochs.front()?;
        if self.traits.native_barrier
            || !progress.transferred
            || progress.durable
            || self.flushes.is_served(open.changed)
        {
            return None;
        }
        self.ordered.first().copied()
    }

    /// The flush in flight that the next epoch waits for, whose earlier writes are transferred.
    pub(super) fn epoch_flush(&self) -> Option<CommandId> {
        let changed = self.epochs.front()?.changed;
        let class = self.requests.get(self.ordered.first()?)?.class;
        self.flushes.awaited(changed, class, self.tuning.flush_depth)
    }

    /// Takes a result, oldest first.
    pub fn pop_done(&mut self) -> Option<(RequestId, IoResult)> {
        self.done.pop_front()
    }

    /// Whether no request is left (results may not have been taken).
    pub fn is_idle(&self) -> bool {
        self.requests.is_empty() && self.commands.is_empty()
    }

    /// Counters.
    pub fn stats(&self) -> EpochStats {
        self.stats
    }

    /// The device it was made for.
    pub fn traits(&self) -> &DeviceTraits {
        &self.traits
    }
}
