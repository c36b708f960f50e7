//! Limits on the classes below Sync, learnt from the device's latencies.
//!
//! Owns the latency estimates. Principle: commands of lower classes in the device may lengthen a
//! command of class Sync by a fixed share of its latency alone. So a slow device gets few bytes at
//! a time and a fast one many, without configuration.
//!
//! Invariant: without progress of the clock nothing is learnt, so a state search without time has
//! no additional states.

use crate::device::Class;

/// Latency of a kind of command without interference by lower classes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Alone {
    /// In ns, once it is known.
    ns: Option<u64>,
    /// Measured without interference at least once.
    is_sure: bool,
}

impl Alone {
    /// Records a latency. With interference it is only an upper bound: the only information before
    /// the first measurement without interference, and of little value afterwards, because among
    /// many commands some are fast by chance.
    pub(super) fn note(&mut self, took_ns: u64, undisturbed: bool) {
        if took_ns == 0 {
            return;
        }
        let part = if undisturbed {
            8
        } else if self.is_sure {
            32
        } else {
            2
        };
        self.ns = Some(match self.ns {
            None => took_ns,
            Some(known_ns) if undisturbed && !self.is_sure => took_ns.min(known_ns),
            Some(known_ns) if took_ns < known_ns => known_ns - (known_ns - took_ns).div_ceil(part),
            Some(known_ns) if undisturbed => known_ns + (took_ns - known_ns) / part,
            Some(known_ns) => known_ns,
        });
        self.is_sure |= undisturbed;
    }

    /// The latency, once it is known.
    pub(super) fn ns(self) -> Option<u64> {
        self.ns
    }

    /// Whether it was measured rather than guessed.
    pub(super) fn is_sure(self) -> bool {
        self.is_sure
    }
}

/// The least width: one page.
const BYTES_MIN: u64 = 4096;
/// Time between two steps beyond the edge.
const EDGE_STEP_NS: u64 = 150_000_000;
/// Consecutive slow commands that narrow a window, by witness: a single one may be slow by chance.
const LATE_COUNT: [u32; 2] = [2, 2];
/// Commands of lower classes come in bursts, and one scheduling delay makes many slow: they must
/// have been slow for this long.
const LATE_NS: u64 = 200_000;
/// Interval of a rate measurement.
const SPAN_NS: u64 = 100_000_000;
/// How often the best rate decays, and by which fraction.
const FADE_NS: u64 = 10_000_000_000;
const FADE_PART: u64 = 16;

/// Sustained write rate of lower classes (beyond the device's cache), in bytes per second: the
/// recent maximum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Rate {
    bytes_per_s: u64,
    faded_ns: u64,
    /// The current interval: its start and the bytes written in it.
    since_ns: u64,
    bytes: u64,
}

impl Rate {
    /// A write of `len` bytes ended.
    pub(super) fn note(&mut self, len: u64, now_ns: u64) {
        if now_ns.saturating_sub(self.faded_ns) >= FADE_NS {
            self.bytes_per_s -= self.bytes_per_s / FADE_PART;
            self.faded_ns = now_ns;
        }
        self.bytes = self.bytes.saturating_add(len);
        let took_ns = now_ns.saturating_sub(self.since_ns);
        if took_ns < SPAN_NS {
            return;
        }
        let is_pause = took_ns > 4 * SPAN_NS;
        let rate = u128::from(self.bytes) * 1_000_000_000 / u128::from(took_ns);
        let rate = if is_pause { 0 } else { rate };
        self.bytes_per_s = self.bytes_per_s.max(u64::try_from(rate).unwrap_or(u64::MAX));
        (self.since_ns, self.bytes) = (now_ns, 0);
    }

    /// Bytes that the device writes in this time, once the rate is known.
    pub(super) fn bytes_in(self, ns: u64) -> Option<u64> {
        let bytes = u128::from(self.bytes_per_s) * u128::from(ns) / 1_000_000_000;
        (self.bytes_per_s > 0).then(|| u64::try_from(bytes).unwrap_or(u64::MAX))
    }
}

/// Consecutive slow commands of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Late {
    count: u32,
    /// When the first was sent.
    since_ns: u64,
    /// Latency of the fastest.
    least_ns: u64,
}

/// Origin of a judged command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Witness {
    Sync,
    Lower,
}

impl From<Class> for Witness {
    fn from(class: Class) -> Witness {
        if class == Class::Sync { Witness::Sync } else { Witness::Lower }
    }
}

/// A limit in bytes; grows while Sync latency is good, shrinks when it is not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Window {
    bytes: u64,
    /// Lower bound of the width.
    bytes_min: u64,
    /// Times of the last change and of the last narrowing: commands sent earlier say nothing about
    /// the current width. (Except slow commands sent before the last widening.)
    changed_ns: u64,
    narrowed_ns: u64,
    /// The width after the last narrowing; none before. A cache takes time to fill, so slowness may
    /// begin long after the step that caused it: beyond this width it is widened slowly.
    edge_bytes: Option<u64>,
    /// By witness.
    late: [Late; 2],
}

impl Window {
    pub(super) fn new(bytes: u64) -> Window {
        Window {
            bytes: bytes.max(BYTES_MIN),
            bytes_min: BYTES_MIN,
            changed_ns: 0,
            narrowed_ns: 0,
            edge_bytes: None,
            late: [Late::default(); 2],
        }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// A safe width, regardless of single commands.
    pub(super) fn set_least(&mut self, bytes: u64) {
        self.bytes_min = bytes.max(BYTES_MIN);
        self.bytes = self.bytes.max(self.bytes_min);
    }

    /// One page at a time: remaining slowness is not caused by lower classes.
    pub(super) fn is_least(&self) -> bool {
        self.bytes <= BYTES_MIN
    }

    /// Judges a command in flight from `sent_ns` to `now_ns` against `target_ns`. Returns whether
    /// it met the target; narrows the window if none of the last few of its kind did.
    pub(super) fn judge(
        &mut self,
        witness: Witness,
        sent_ns: u64,
        now_ns: u64,
        target_ns: u64,
    ) -> bool {
        let took_ns = now_ns.saturating_sub(sent_ns);
        let late = &mut self.late[witness as usize];
        if took_ns <= target_ns {
            late.count = 0;
            return true;
        }
        if sent_ns < self.narrowed_ns {
            return false;
        }
        if late.count == 0 {
            *late = Late { count: 0, since_ns: sent_ns, least_ns: took_ns };
        }
        late.count += 1;
        late.least_ns = late.least_ns.min(took_ns);
        let is_long = witness == Witness::Sync || now_ns.saturating_sub(late.since_ns) >= LATE_NS;
        if late.count >= LATE_COUNT[witness as usize] && is_long {
            let scaled = u128::from(self.bytes) * u128::from(target_ns) / u128::from(late.least_ns);
            let scaled = u64::try_from(scaled).unwrap_or(u64::MAX).max(self.bytes / 8);
            self.bytes = scaled.min(self.bytes - self.bytes / 8).max(self.bytes_min);
            self.edge_bytes = Some(self.bytes);
            (self.changed_ns, self.narrowed_ns) = (now_ns, now_ns);
            self.late = Default::default();
        }
        false
    }

    /// Records that the window was in use from `sent_ns` to `now_ns` and the target was met.
    pub(super) fn widen(&mut self, sent_ns: u64, now_ns: u64, bytes_max: u64) {
        let is_beyond = self.edge_bytes.is_some_and(|edge| self.bytes >= edge);
        let step_ns = if is_beyond { EDGE_STEP_NS } else { 1 };
        if sent_ns < self.changed_ns || now_ns.saturating_sub(self.changed_ns) < step_ns {
            return;
        }
        let step = match self.edge_bytes {
            // Before the first narrowing the right width may be much larger.
            None => self.bytes,
            Some(_) => (self.bytes / 8).max(512),
        };
        self.bytes = self.bytes.saturating_add(step).min(bytes_max.max(self.bytes_min));
        self.changed_ns = now_ns;
        if is_beyond {
            self.edge_bytes = Some(self.bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The lucky ones among commands that vary are not what others have to expect.
    #[test]
    fn what_a_command_takes_alone_is_a_mean() {
        let mut alone = Alone::default();
        for round in 0..200 {
            alone.note(if round % 2 == 0 { 100_000 } else { 300_000 }, true);
        }
        let known_ns = alone.ns().unwrap();
        assert!((150_000..250_000).contains(&known_ns), "{known_ns} ns");
        // With others in the way it could only be less, and that counts little.
        alone.note(900_000, false);
        assert_eq!(alone.ns(), Some(known_ns));
        alone.note(50_000, false);
        assert!(alone.ns().unwrap() > known_ns - 10_000);
    }
}
