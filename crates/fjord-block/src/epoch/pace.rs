//! How much of the device the classes below Sync may fill, learnt from the device's own times.
//!
//! Owns what is known of those times. The principle: what lower classes have in the device may make
//! a command of class Sync take so much longer than by itself, and no more. So a slow device gets
//! little at a time and a fast one much, without anybody naming its speed.
//!
//! Invariant: a clock that stands still teaches nothing, so that a search over states without time
//! meets no more of them.

/// How long a kind of command takes when no lower class is in its way, in ns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Alone(Option<u64>);

impl Alone {
    /// A command took so long. With others in its way it can only show that the time alone is
    /// shorter than was thought; a device that has become slower shows by those without.
    pub(super) fn note(&mut self, took_ns: u64, undisturbed: bool) {
        if took_ns == 0 {
            return;
        }
        self.0 = Some(match self.0 {
            None => took_ns,
            // Quickly down, but not by one lucky command.
            Some(known_ns) if took_ns < known_ns => known_ns - (known_ns - took_ns).div_ceil(2),
            Some(known_ns) if undisturbed => known_ns + (took_ns - known_ns) / 8,
            Some(known_ns) => known_ns,
        });
    }

    /// The time, once it is known.
    pub(super) fn ns(self) -> Option<u64> {
        self.0
    }
}

/// The least width: one page.
const BYTES_MIN: u64 = 4096;
/// Time between two steps beyond the edge.
const EDGE_STEP_NS: u64 = 100_000_000;

/// How many bytes may be somewhere; grows while that does no harm, shrinks when it does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Window {
    bytes: u64,
    /// When it was changed and when it was narrowed last: what was sent earlier tells nothing of
    /// the present width. (A slow command that was sent before the last widening does.)
    changed_ns: u64,
    narrowed_ns: u64,
    /// The width after it was narrowed last; none before. Trouble may begin long after the step
    /// that led to it, for a cache takes its time to fill: beyond this it is widened slowly.
    edge_bytes: Option<u64>,
}

impl Window {
    pub(super) fn new(bytes: u64) -> Window {
        Window { bytes: bytes.max(BYTES_MIN), changed_ns: 0, narrowed_ns: 0, edge_bytes: None }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// It cannot be narrower: what is slow now is so by itself.
    pub(super) fn is_least(&self) -> bool {
        self.bytes <= BYTES_MIN
    }

    /// A command that was under way from `sent_ns` to `now_ns` was allowed `target_ns`. Gives
    /// whether it kept to that; the window is narrower if not.
    pub(super) fn judge(&mut self, sent_ns: u64, now_ns: u64, target_ns: u64) -> bool {
        let took_ns = now_ns.saturating_sub(sent_ns);
        if took_ns <= target_ns {
            return true;
        }
        if sent_ns >= self.narrowed_ns {
            let scaled = u128::from(self.bytes) * u128::from(target_ns) / u128::from(took_ns);
            // One command that was late by chance shall not undo it all.
            let scaled = u64::try_from(scaled).unwrap_or(u64::MAX).max(self.bytes / 2);
            self.bytes = scaled.min(self.bytes - self.bytes / 8).max(BYTES_MIN);
            self.edge_bytes = Some(self.bytes);
            (self.changed_ns, self.narrowed_ns) = (now_ns, now_ns);
        }
        false
    }

    /// The window was in use from `sent_ns` to `now_ns`, and all was well.
    pub(super) fn widen(&mut self, sent_ns: u64, now_ns: u64, bytes_max: u64) {
        let is_beyond = self.edge_bytes.is_some_and(|edge| self.bytes >= edge);
        let step_ns = if is_beyond { EDGE_STEP_NS } else { 1 };
        if sent_ns < self.changed_ns || now_ns.saturating_sub(self.changed_ns) < step_ns {
            return;
        }
        let step = match self.edge_bytes {
            // As long as nothing went wrong the right width may be far away.
            None => self.bytes,
            Some(_) => (self.bytes / 8).max(512),
        };
        self.bytes = self.bytes.saturating_add(step).min(bytes_max.max(BYTES_MIN));
        self.changed_ns = now_ns;
        if is_beyond {
            self.edge_bytes = Some(self.bytes);
        }
    }
}
