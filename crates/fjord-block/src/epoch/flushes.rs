//! When flushes are due and whom they serve. Owns the clock of changes and the flushes under way.
//!
//! The clock counts completed changes. A flush that begins at time `t` covers all changes up to
//! `t` once it has ended well; whoever needs a time no later than that is served by it. So one
//! flush serves every request whose covered writes completed before it began.

use std::collections::BTreeSet;

use super::types::{CommandId, RequestId};
use crate::device::Class;

/// A time of the clock of changes.
pub(super) type ChangeTime = u64;

/// Flushes of one device.
#[derive(Clone, Debug, Hash)]
pub(super) struct Flushes {
    /// Changes completed so far. Starts at 1: what earlier users left in caches is not known.
    pub(super) now: ChangeTime,
    /// All changes up to here are durable.
    pub(super) durable: ChangeTime,
    /// Flush requests that still wait for ordered writes before them.
    pub(super) not_ready: BTreeSet<RequestId>,
    /// Flush requests and writes with emulated FUA that need durability up to a time.
    pub(super) waiting: Vec<(RequestId, ChangeTime)>,
    /// Under way, oldest first, with the time each began and its class.
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

    /// A request needs all changes so far; gives whether a flush under way or an earlier one will do.
    pub(super) fn wait(&mut self, id: RequestId) -> bool {
        self.waiting.push((id, self.now));
        self.is_served(self.now)
    }

    /// Whether a flush under way or an earlier one brings durability up to `time`.
    pub(super) fn is_served(&self, time: ChangeTime) -> bool {
        self.durable >= time || self.in_flight.iter().any(|(_, began, _)| *began >= time)
    }

    /// Those that no flush under way will serve.
    pub(super) fn unserved(&self) -> impl Iterator<Item = RequestId> {
        self.waiting.iter().filter(|(_, time)| !self.is_served(*time)).map(|(id, _)| *id)
    }

    /// A flush begins; gives the number of requests that no other one serves.
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

    /// Takes out those whose time is durable.
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
