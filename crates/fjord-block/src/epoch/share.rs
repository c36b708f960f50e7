//! Shares of the device for classes below Sync. Owns the counts of commands in flight and of lower
//! classes' bytes in the device's cache.
//!
//! Four bounds limit the delay of class Sync by lower classes: bytes in flight (queue), bytes per
//! command (bus: no longer than a read), bytes sent while a command of class Sync is in flight (the
//! device may serve the newcomer first), and bytes not yet flushed (a flush drains them all). The
//! widths are learnt, see `pace`, and also apply while class Sync is idle, because dispatched
//! commands cannot be recalled when its next request arrives. Before the first write of class Sync
//! only background writes are bounded, widely. Each bound admits at least one command, so that all
//! classes make progress.

use super::pace::{Alone, Rate, Window, Witness};
use super::queue::InFlight;
use super::types::{CommandId, Io, IoKind, Tuning};
use crate::device::Class;

/// Pieces per window.
const PIECES: u64 = 2;
const PIECE_ALIGN_BYTES: u64 = 4096;
/// Lower bound of a piece that reads can cause, however fast they are: each command has a fixed
/// cost.
const PIECE_BESIDE_READS_BYTES_MIN: u64 = 32 << 10;
/// A flush is sent when lower classes have used this fraction of their share of the cache.
const FLUSH_PART: u64 = 2;
/// Beyond this, class Sync slows itself down: concurrent commands say nothing about lower classes.
const SYNC_BYTES_MAX: u64 = 64 << 10;
/// How long the bounds apply before a write of class Sync has shown its latency.
const LEARNING_NS: u64 = 1_000_000_000;
/// After this time without lower classes, even a protected cache holds no data of theirs.
const QUIET_NS: u64 = 100_000_000;

/// A flush in flight.
#[derive(Clone, Copy, Debug, Hash)]
struct Draining {
    command: CommandId,
    /// Total bytes of lower classes transferred when it began.
    bytes: u64,
    /// Something was transferred since the previous flush.
    has_work: bool,
    /// Bytes of class Sync transferred since the previous flush.
    sync_bytes: u64,
}

/// Guarded, like all of the scheduler, by its owner.
#[derive(Clone, Debug, Hash)]
pub(super) struct Share {
    /// Commands in flight by class, without flushes.
    in_flight: [u32; 3],
    /// Bytes of lower classes in flight.
    lower_bytes: u64,
    /// Bytes of class Sync in flight, and when they were last above the limit.
    sync_bytes: u64,
    sync_heavy_ns: Option<u64>,
    /// Bytes of class Sync transferred since the last flush began.
    sync_cached_bytes: u64,
    pub(super) in_flight_flushes: u32,
    /// Commands of lower classes in flight that were sent without these bounds, and when the last
    /// of them ended: commands concurrent with them are not used for learning.
    unbounded: u32,
    unbounded_end_ns: u64,
    /// Time of the last submission of a short write of class Sync.
    sync_seen_ns: Option<u64>,
    /// When a command of a lower class was last in flight.
    lower_seen_ns: u64,
    /// Bytes of lower classes sent since a command of class Sync was sent or completed.
    overtaking_bytes: u64,
    /// Total bytes of lower classes: sent, transferred, and known to have left the cache.
    sent_bytes: u64,
    transferred_bytes: u64,
    durable_bytes: u64,
    draining: Vec<Draining>,
    /// Something was transferred since the last flush began.
    has_work: bool,
    /// Lower classes used their share of the cache since the last flush of class Sync.
    was_full: bool,
    volatile_cache: bool,
    write_alone: Alone,
    flush_alone: Alone,
    read_alone: Alone,
    /// Of writes of lower classes.
    rate: Rate,
    /// For bytes of lower classes in flight.
    window: Window,
    /// For their bytes in the cache.
    cache_window: Window,
}

impl Share {
    pub(super) fn new(volatile_cache: bool, tuning: &Tuning) -> Self {
        Share {
            in_flight: [0; 3],
            lower_bytes: 0,
            sync_bytes: 0,
            sync_heavy_ns: None,
            sync_cached_bytes: 0,
            in_flight_flushes: 0,
            unbounded: 0,
            unbounded_end_ns: 0,
            sync_seen_ns: None,
            lower_seen_ns: 0,
            overtaking_bytes: 0,
            sent_bytes: 0,
            transferred_bytes: 0,
            durable_bytes: 0,
            draining: Vec::new(),
            has_work: false,
            was_full: false,
            volatile_cache,
            write_alone: Alone::default(),
            flush_alone: Alone::default(),
            read_alone: Alone::default(),
            rate: Rate::default(),
            window: Window::new(tuning.lower_bytes_start),
            cache_window: Window::new(tuning.lower_cache_bytes_start),
        }
    }

    pub(super) fn in_flight_total(&self) -> u32 {
        self.in_flight.iter().sum::<u32>() + self.in_flight_flushes
    }

    pub(super) fn in_flight_of(&self, class: Class) -> u32 {
        self.in_flight[class as usize]
    }

    /// A request of class Sync arrived. The bounds start with its first write, so that its latency
    /// can be measured.
    pub(super) fn note_sync(&mut self, io: &Io, now_ns: u64) {
        let is_plain_write = matches!(io.kind, IoKind::Write { fua: false, .. });
        if is_plain_write && io.len <= SYNC_BYTES_MAX {
            self.sync_seen_ns = Some(now_ns);
        }
    }

    /// Whether the bounds apply: the latency of class Sync alone is known or being learnt.
    fn is_bounded(&self, now_ns: u64) -> bool {
        let is_learning =
            || self.sync_seen_ns.is_some_and(|at_ns| now_ns.saturating_sub(at_ns) < LEARNING_NS);
        self.write_alone.ns().is_some() || is_learning()
    }

    /// Whether a command of this class may be dispatched.
    pub(super) fn allows(&self, class: Class, now_ns: u64, tuning: &Tuning) -> bool {
        if class == Class::Sync {
            return true;
        }
        let [sync, r#async, background] = self.in_flight;
        let piece = self.piece_bytes(now_ns, tuning);
        let has_depth = r#async + background < tuning.async_depth
            && (class == Class::Async || background < tuning.background_depth);
        let fits = self.lower_bytes == 0 || self.lower_bytes + piece <= self.window.bytes();
        let may_overtake = sync == 0 || self.overtaking_bytes < piece;
        let bounds_cache = self.is_bounded(now_ns) || class == Class::Background;
        has_depth
            && (!self.is_bounded(now_ns) || (fits && may_overtake))
            && !(bounds_cache && self.cached_bytes() >= self.cache_bytes_max(now_ns, tuning))
    }

    /// Bytes of lower classes that a power cut could take.
    fn cached_bytes(&self) -> u64 {
        if self.volatile_cache { self.sent_bytes - self.durable_bytes } else { 0 }
    }

    /// Limit of those bytes.
    fn cache_bytes_max(&self, now_ns: u64, tuning: &Tuning) -> u64 {
        match self.flush_alone.ns() {
            Some(_) if self.is_bounded(now_ns) => self.cache_window.bytes(),
            _ => tuning.background_cache_bytes_max,
        }
    }

    /// Whether a flush should free the lower classes' share of the cache: early, so that they need
    /// not wait for it.
    pub(super) fn wants_flush(&self, now_ns: u64, tuning: &Tuning) -> bool {
        let draining = self.draining.iter().map(|flush| flush.bytes).max().unwrap_or(0);
        let flushable = self.transferred_bytes.saturating_sub(draining.max(self.durable_bytes));
        self.volatile_cache
            && flushable > 0
            && self.cached_bytes() >= self.cache_bytes_max(now_ns, tuning) / FLUSH_PART
    }

    /// No flush will succeed any more: this bound no longer applies.
    pub(super) fn stop_flushes(&mut self) {
        self.volatile_cache = false;
    }

    /// The longest piece of a request below class Sync, in bytes.
    pub(super) fn piece_bytes(&self, now_ns: u64, tuning: &Tuning) -> u64 {
        if !self.is_bounded(now_ns) {
            return tuning.background_bytes_max;
        }
        let mut piece = self.window.bytes() / PIECES;
        if self.volatile_cache {
            piece = piece.min(self.cache_window.bytes());
        }
        if let Some(bytes) = self.read_alone.ns().and_then(|ns| self.rate.bytes_in(ns)) {
            piece = piece.min(bytes.max(PIECE_BESIDE_READS_BYTES_MIN));
        }
        let piece = (piece - piece % PIECE_ALIGN_BYTES).max(PIECE_ALIGN_BYTES);
        piece.min(tuning.background_bytes_max)
    }

    /// Whether these bounds apply to commands sent now.
    pub(super) fn bounds(&self, class: Class, now_ns: u64) -> bool {
        class != Class::Sync && self.is_bounded(now_ns)
    }

    /// A command was sent; not for flushes.
    pub(super) fn begin(&mut self, sent: &InFlight) {
        if sent.class == Class::Sync {
            if self.in_flight[Class::Sync as usize] == 0 {
                self.overtaking_bytes = 0;
            }
            self.sync_bytes += sent.len;
            self.note_heavy(sent.sent_ns);
        } else {
            self.lower_seen_ns = sent.sent_ns;
            self.unbounded += u32::from(!sent.bounded);
            self.lower_bytes += sent.len;
            self.overtaking_bytes = self.overtaking_bytes.saturating_add(sent.len);
            self.sent_bytes += if sent.kind.changes() { sent.len } else { 0 };
            let cached_bytes = self.sent_bytes - self.durable_bytes;
            self.was_full |=
                self.volatile_cache && cached_bytes >= self.cache_window.bytes() / FLUSH_PART;
        }
        self.in_flight[sent.class as usize] += 1;
    }

    /// A command has ended; not for flushes.
    pub(super) fn end(&mut self, sent: &InFlight, now_ns: u64, tuning: &Tuning) {
        let was_filled = self.lower_bytes + self.piece_bytes(now_ns, tuning) > self.window.bytes();
        let is_plain_write = matches!(sent.kind, IoKind::Write { fua: false, .. });
        self.in_flight[sent.class as usize] -= 1;
        self.has_work |= sent.kind.changes();
        if sent.class == Class::Sync {
            self.overtaking_bytes = 0;
            self.note_heavy(now_ns);
            self.sync_bytes -= sent.len;
            self.sync_cached_bytes += if sent.kind.changes() { sent.len } else { 0 };
            if is_plain_write && self.is_light(sent) {
                self.learn_alone(sent, now_ns, tuning);
            } else if sent.kind == IoKind::Read && sent.len <= SYNC_BYTES_MAX {
                let took_ns = now_ns.saturating_sub(sent.sent_ns);
                self.read_alone.note(took_ns, self.is_quiet(sent));
            }
            return;
        }
        self.lower_seen_ns = now_ns;
        self.lower_bytes -= sent.len;
        self.transferred_bytes += if sent.kind.changes() { sent.len } else { 0 };
        if is_plain_write {
            self.rate.note(sent.len, now_ns);
        }
        if !sent.bounded {
            self.unbounded -= 1;
            self.unbounded_end_ns = now_ns;
        } else if is_plain_write
            && self.is_light(sent)
            && self.judge(sent, now_ns, tuning)
            && was_filled
        {
            let bytes_max = u64::from(tuning.background_depth) * tuning.background_bytes_max;
            self.window.widen(sent.sent_ns, now_ns, bytes_max);
        }
    }

    fn note_heavy(&mut self, now_ns: u64) {
        if self.sync_bytes > SYNC_BYTES_MAX {
            self.sync_heavy_ns = Some(now_ns);
        }
    }

    /// Whether class Sync had few bytes in flight since this was sent.
    fn is_light(&self, sent: &InFlight) -> bool {
        self.sync_heavy_ns.is_none_or(|at_ns| at_ns < sent.sent_ns)
    }

    /// Whether lower classes were idle when this was sent, and shortly before.
    fn is_quiet(&self, sent: &InFlight) -> bool {
        let [_, r#async, background] = self.in_flight;
        r#async + background == 0 && self.lower_seen_ns.saturating_add(QUIET_NS) <= sent.sent_ns
    }

    /// Learns from a write of class Sync.
    fn learn_alone(&mut self, sent: &InFlight, now_ns: u64, tuning: &Tuning) {
        if self.unbounded > 0 || sent.sent_ns < self.unbounded_end_ns {
            return;
        }
        let is_quiet = self.is_quiet(sent);
        let undisturbed = is_quiet || self.window.is_least();
        self.write_alone.note(now_ns.saturating_sub(sent.sent_ns), undisturbed);
        if !is_quiet {
            self.judge(sent, now_ns, tuning);
        }
    }

    /// Permitted delay of a write of class Sync by lower classes, and again of a flush: a fraction
    /// of their latencies alone, in ns.
    fn slack_ns(&self, tuning: &Tuning) -> Option<u64> {
        let alone_ns = self.write_alone.ns()?.saturating_add(self.flush_alone.ns().unwrap_or(0));
        Some(tuning.slack_ns(alone_ns))
    }

    /// Bytes that the device writes in this time; the given limit while the rate is unknown.
    fn least_bytes(&self, ns: u64, unknown_bytes: u64) -> u64 {
        let unknown_bytes = if self.write_alone.is_sure() { unknown_bytes } else { 0 };
        self.rate.bytes_in(ns).unwrap_or(unknown_bytes)
    }

    /// Whether a write met the target of class Sync.
    fn judge(&mut self, sent: &InFlight, now_ns: u64, tuning: &Tuning) -> bool {
        let (Some(alone_ns), Some(slack_ns)) = (self.write_alone.ns(), self.slack_ns(tuning))
        else {
            return false;
        };
        let target_ns = alone_ns.saturating_add(slack_ns);
        self.window.set_least(self.least_bytes(alone_ns / 4 * 3, tuning.background_bytes_max));
        self.window.judge(Witness::from(sent.class), sent.sent_ns, now_ns, target_ns)
    }

    pub(super) fn begin_flush(&mut self, command: CommandId) {
        self.in_flight_flushes += 1;
        let has_work = std::mem::take(&mut self.has_work);
        let sync_bytes = std::mem::take(&mut self.sync_cached_bytes);
        let bytes = self.transferred_bytes;
        self.draining.push(Draining { command, bytes, has_work, sync_bytes });
    }

    pub(super) fn end_flush(
        &mut self,
        command: CommandId,
        sent: &InFlight,
        now_ns: u64,
        tuning: &Tuning,
    ) {
        self.in_flight_flushes -= 1;
        let Some(at) = self.draining.iter().position(|flush| flush.command == command) else {
            return;
        };
        let flush = self.draining.swap_remove(at);
        let drained_bytes = flush.bytes.saturating_sub(self.durable_bytes);
        self.durable_bytes = self.durable_bytes.max(flush.bytes);
        let width = self.cache_window.bytes();
        let was_full = std::mem::take(&mut self.was_full);
        let is_light = self.is_light(sent) && flush.sync_bytes <= SYNC_BYTES_MAX;
        if drained_bytes / 2 > width || !is_light {
            // Such data was sent under other bounds, or by waiting threads.
            return;
        }
        // A flush without a waiter starts at arbitrary times, and one with an empty cache is
        // unusually fast: neither is representative for a waiting thread.
        if sent.class == Class::Sync && flush.has_work {
            let undisturbed = (drained_bytes == 0 && !was_full) || self.cache_window.is_least();
            self.flush_alone.note(now_ns.saturating_sub(sent.sent_ns), undisturbed);
        }
        let has_share = drained_bytes > 0 || was_full;
        let is_well = has_share && self.judge_flush(sent, drained_bytes, now_ns, tuning);
        if is_well && was_full {
            let bytes_max = tuning.background_cache_bytes_max;
            self.cache_window.widen(sent.sent_ns, now_ns, bytes_max);
        }
    }

    /// Whether a flush was not delayed by lower classes' data in the cache. A flush that drains
    /// faster than the device writes was not delayed by that data.
    fn judge_flush(
        &mut self,
        sent: &InFlight,
        drained_bytes: u64,
        now_ns: u64,
        tuning: &Tuning,
    ) -> bool {
        let Some(alone_ns) = self.flush_alone.ns() else { return false };
        let slack_ns = self.slack_ns(tuning).unwrap_or_else(|| tuning.slack_ns(alone_ns));
        let target_ns = alone_ns.saturating_add(slack_ns);
        let more_ns = now_ns.saturating_sub(sent.sent_ns).saturating_sub(alone_ns);
        let is_other = self.rate.bytes_in(more_ns).is_some_and(|bytes| drained_bytes / 2 > bytes);
        // The drain rate is at least the write rate.
        let both_ns = alone_ns.saturating_add(self.write_alone.ns().unwrap_or(0));
        self.cache_window.set_least(self.least_bytes(both_ns / 4 * 3, tuning.background_bytes_max));
        let target_ns = if is_other { u64::MAX } else { target_ns };
        self.cache_window.judge(Witness::from(sent.class), sent.sent_ns, now_ns, target_ns)
    }
}
