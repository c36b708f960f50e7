//! What background writes may take of the device. Owns the counts of commands under way and of
//! background bytes in the device's cache.
//!
//! Three bounds keep background writes from holding up who waits: commands under way (the queue),
//! bytes per command (the bus), and bytes not yet flushed (a flush drains them all). Each is
//! tighter while requests of class Sync were about lately. Each lets at least one command through,
//! so that background writes always advance.

use super::types::{CommandId, Tuning};
use crate::device::Class;

/// Guarded, like all of the scheduler, by its owner.
#[derive(Clone, Debug, Hash)]
pub(super) struct Share {
    /// Commands under way by class; flushes apart.
    flying: [u32; 3],
    pub(super) flying_flushes: u32,
    /// When a request of class Sync was seen last.
    sync_seen_ns: Option<u64>,
    /// Background bytes ever sent, ever transferred, and known to be out of the cache.
    sent_bytes: u64,
    transferred_bytes: u64,
    durable_bytes: u64,
    /// Flushes under way and the background bytes each will drain.
    flushing: Vec<(CommandId, u64)>,
    volatile_cache: bool,
}

impl Share {
    pub(super) fn new(volatile_cache: bool) -> Self {
        Share {
            flying: [0; 3],
            flying_flushes: 0,
            sync_seen_ns: None,
            sent_bytes: 0,
            transferred_bytes: 0,
            durable_bytes: 0,
            flushing: Vec::new(),
            volatile_cache,
        }
    }

    pub(super) fn flying_total(&self) -> u32 {
        self.flying.iter().sum::<u32>() + self.flying_flushes
    }

    pub(super) fn flying_of(&self, class: Class) -> u32 {
        self.flying[class as usize]
    }

    pub(super) fn note_sync(&mut self, now_ns: u64) {
        self.sync_seen_ns = Some(now_ns);
    }

    /// Whether class Sync was about lately.
    pub(super) fn is_busy(&self, now_ns: u64, tuning: &Tuning) -> bool {
        self.sync_seen_ns.is_some_and(|at| now_ns.saturating_sub(at) < tuning.sync_memory_ns)
    }

    /// Whether a command of this class may leave.
    pub(super) fn allows(&self, class: Class, now_ns: u64, tuning: &Tuning) -> bool {
        let [_, r#async, background] = self.flying;
        match class {
            Class::Sync => true,
            Class::Async => r#async + background < tuning.async_depth,
            Class::Background => {
                let depth = if self.is_busy(now_ns, tuning) {
                    tuning.background_depth_busy
                } else {
                    tuning.background_depth
                };
                background < depth
                    && r#async + background < tuning.async_depth
                    && !self.cache_is_full(now_ns, tuning)
            }
        }
    }

    /// Whether background bytes fill their share of the cache, so that only a flush makes room.
    pub(super) fn cache_is_full(&self, now_ns: u64, tuning: &Tuning) -> bool {
        let bytes_max = if self.is_busy(now_ns, tuning) {
            tuning.background_cache_bytes_max_busy
        } else {
            tuning.background_cache_bytes_max
        };
        self.volatile_cache && self.sent_bytes - self.durable_bytes >= bytes_max
    }

    /// No flush will make room any more: background writes go on without that bound.
    pub(super) fn stop_flushes(&mut self) {
        self.volatile_cache = false;
    }

    /// Whether a flush beginning now would drain background bytes that no other drains.
    pub(super) fn flush_would_help(&self) -> bool {
        let draining = self.flushing.iter().map(|(_, bytes)| *bytes).max().unwrap_or(0);
        self.transferred_bytes > draining.max(self.durable_bytes)
    }

    /// The longest piece of a background request, in bytes.
    pub(super) fn piece_bytes_max(&self, now_ns: u64, tuning: &Tuning) -> u64 {
        if self.is_busy(now_ns, tuning) {
            tuning.background_bytes_max_busy
        } else {
            tuning.background_bytes_max
        }
    }

    pub(super) fn begin(&mut self, class: Class, change_bytes: u64) {
        self.flying[class as usize] += 1;
        if class == Class::Background {
            self.sent_bytes += change_bytes;
        }
    }

    pub(super) fn end(&mut self, class: Class, change_bytes: u64) {
        self.flying[class as usize] -= 1;
        if class == Class::Background {
            self.transferred_bytes += change_bytes;
        }
    }

    pub(super) fn begin_flush(&mut self, command: CommandId) {
        self.flying_flushes += 1;
        self.flushing.push((command, self.transferred_bytes));
    }

    pub(super) fn end_flush(&mut self, command: CommandId) {
        self.flying_flushes -= 1;
        if let Some(at) = self.flushing.iter().position(|(id, _)| *id == command) {
            let (_, bytes) = self.flushing.swap_remove(at);
            self.durable_bytes = self.durable_bytes.max(bytes);
        }
    }
}
