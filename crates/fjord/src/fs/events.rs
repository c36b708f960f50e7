//! Warnings and errors since the mount, for later reading.
//!
//! Owns the latest warnings and errors of one file system. Invariant: each is also sent to
//! `tracing`, once; a repeated one is kept once, with its count, so that it does not displace
//! others.

use std::collections::VecDeque;
use std::fmt::Display;

use fjord_block::lock::{Mutex, Rank};

use crate::attr::Timespec;
use crate::fs::FsInner;

/// How many are kept.
const KEPT_COUNT: usize = 16;

/// How bad an [`Event`] is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Severity {
    /// The file system works as before.
    Warning,
    /// Data was lost, or operations are no longer possible.
    Error,
}

impl Severity {
    /// `warning` or `error`.
    pub fn name(self) -> &'static str {
        match self {
            Severity::Warning => "warning",
            Severity::Error => "error",
        }
    }
}

/// A warning or an error; see [`crate::Stats::events`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// When it happened, for the last time.
    pub time: Timespec,
    /// How bad it is.
    pub severity: Severity,
    /// What happened.
    pub message: String,
    /// How often.
    pub count: u64,
}

/// The latest events, oldest first.
pub(crate) struct Events(Mutex<VecDeque<Event>>);

impl Default for Events {
    fn default() -> Events {
        Events(Mutex::new(Rank::Events, VecDeque::new()))
    }
}

impl Events {
    /// The events kept.
    pub(crate) fn snapshot(&self) -> Vec<Event> {
        self.0.lock().iter().cloned().collect()
    }

    fn keep(&self, severity: Severity, message: String) {
        let time = Timespec::now();
        let mut kept = self.0.lock();
        let known = kept.iter().position(|e| e.severity == severity && e.message == message);
        let count = known.and_then(|at| kept.remove(at)).map_or(0, |event| event.count);
        if kept.len() == KEPT_COUNT {
            kept.pop_front();
        }
        kept.push_back(Event { time, severity, message, count: count.saturating_add(1) });
    }
}

impl FsInner {
    /// Records a warning.
    pub(crate) fn warn(&self, message: impl Display) {
        match self.options.fill_all {
            // Advice about mounts; who fills a new image gets the error itself.
            true => tracing::debug!("{message}"),
            false => tracing::warn!("{message}"),
        }
        self.events.keep(Severity::Warning, message.to_string());
    }

    /// Records an error.
    pub(crate) fn error(&self, message: impl Display) {
        match self.options.fill_all {
            true => tracing::debug!("{message}"),
            false => tracing::error!("{message}"),
        }
        self.events.keep(Severity::Error, message.to_string());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_are_kept_and_repeats_counted() {
        let events = Events::default();
        for _ in 0..3 {
            events.keep(Severity::Warning, "again".into());
        }
        assert_eq!((events.snapshot().len(), events.snapshot()[0].count), (1, 3));
        for number in 0..20 {
            events.keep(Severity::Error, format!("number {number}"));
            events.keep(Severity::Warning, "again".into());
        }
        let kept = events.snapshot();
        assert_eq!(kept.len(), KEPT_COUNT);
        let last = kept.last().map(|event| (event.message.as_str(), event.count));
        assert_eq!(last, Some(("again", 23)));
        assert_eq!(kept[0].message, "number 5");
    }
}
