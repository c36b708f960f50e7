//! When flushes are due and which requests they serve. Owns the change clock and the flushes in
//! flight.
//!
//! The clock counts completed changes. A flush that begins at time `t` covers all changes up to `t`
//! when it succeeds, and serves every request that needs a time up to `t`. So one flush serves
//! every request whose writes completed before it began.

use std::collections::BTreeSet;

use super::types::{CommandId, RequestId};
use crate::device::Class;

/// A time of the change clock.
pub(super) type ChangeTime = u64;

/// Flushes of one device.
#[derive(Clone, Debug, Hash)]
pub(super) struct Flushes {
    /// Changes completed so far. Starts at 1: earlier users may have left data in caches.
    pub(super) now: ChangeTime,
    /// All changes up to here are durable.
    pub(super) durable: ChangeTime,
    /// Flush requests that still wait for ordered writes before them.
    pub(super) not_ready: BTreeSet<RequestId>,
    /// Flush requests and writes with emulated FUA that need durability up to a time.
    pub(super) waiting: Vec<(RequestId, ChangeTime)>,
    /// In flight, oldest first, with its start time and class.
    pub(super) in_flight: Vec<(CommandId, ChangeTime, Class)>,
}

impl Flushes {
    pub(super) fn new(volatile_cache: bool) -> Self {
        Flushes {
            now: u64::from(volatile_cache),
            durable: 0,
            not_ready: BTreeSet::new(),
            waiting: Vec::new(),
            in_flight: Vec::new(),
        }
    }

    /// Registers a request that needs all changes so far; returns whether a flush in flight or an
    /// earlier one is sufficient.
    pub(super) fn wait(&mut self, id: RequestId) -> bool {
        self.waiting.push((id, self.now));
        self.is_served(self.now)
    }

    /// Removes a request that has failed.
    pub(super) fn forget(&mut self, id: RequestId) {
        self.not_ready.remove(&id);
        self.waiting.retain(|(waiting, _)| *waiting != id);
    }

    /// Whether a flush in flight or an earlier one makes changes up to `time` durable.
    pub(super) fn is_served(&self, time: ChangeTime) -> bool {
        self.durable >= time || self.in_flight.iter().any(|(_, began, _)| *began >= time)
    }

    /// The time that a request waits for.
    pub(super) fn time_of(&self, id: RequestId) -> Option<ChangeTime> {
        self.waiting.iter().find(|(waiting, _)| *waiting == id).map(|(_, time)| *time)
    }

    /// The flush in flight that has to end before changes up to `time` can be durable for a request
    /// of this class: one that serves it, or else one of the `depth` that a new flush waits for.
    pub(super) fn awaited(&self, time: ChangeTime, class: Class, depth: u32) -> Option<CommandId> {
        let serves = self.in_flight.iter().find(|(_, began, _)| *began >= time);
        let mut before = self.in_flight.iter().filter(|(.., other)| *other <= class);
        let is_full = before.clone().count() >= depth as usize;
        let awaited = serves.or_else(|| before.next().filter(|_| is_full));
        awaited.map(|(command, ..)| *command)
    }

    /// Requests that no flush in flight will serve.
    pub(super) fn unserved(&self) -> impl Iterator<Item = RequestId> {
        self.waiting.iter().filter(|(_, time)| !self.is_served(*time)).map(|(id, _)| *id)
    }

    /// Begins a flush; returns the number of requests that no other flush serves.
    pub(super) fn begin(&mut self, command: CommandId, class: Class) -> u64 {
        let count = self.unserved().count();
        self.in_flight.push((command, self.now, class));
        count as u64
    }

    /// A flush ended.
    pub(super) fn end(&mut self, command: CommandId, well: bool) {
        let Some(at) = self.in_flight.iter().position(|(id, ..)| *id == command) else { return };
        let (_, began, _) = self.in_flight.remove(at);
        if well {
            self.durable = self.durable.max(began);
        }
    }

    /// Removes requests whose time is durable.
    pub(super) fn take_served(&mut self) -> Vec<RequestId> {
        let durable = self.durable;
        let mut served = Vec::new();
        self.waiting.retain(|(id, time)| {
            let done = *time <= durable;
            if done {
                served.push(*id);
            }
            !done
        });
        served
    }
}
