//! The epoch scheduler above a modelled device, both in virtual time: for deterministic
//! experiments.
//!
//! Owns the scheduler, the device and the mapping of their command numbers. Data are zeroes.
//!
//! Invariant: all dispatchable commands are dispatched before time advances.

use std::collections::HashMap;

use super::core::{CommandId, SimCore};
use super::profile::{Profile, UNIT_BYTES};
use crate::buf::Buf;
use crate::device::Request;
use crate::epoch::{self, DeviceTraits, EpochQueue, EpochStats, Io, IoKind, RequestId, Tuning};
use crate::ticket::IoResult;

/// A scheduler with its device.
#[derive(Debug)]
pub struct SimQueue {
    queue: EpochQueue,
    core: SimCore,
    /// The scheduler's numbers of commands in the device.
    commands: HashMap<CommandId, epoch::CommandId>,
    zeroes: Buf,
}

impl SimQueue {
    /// An empty device of `size_bytes` below an empty scheduler.
    pub fn new(profile: &Profile, size_bytes: u64, tuning: Tuning) -> SimQueue {
        let traits = DeviceTraits::from(&profile.capabilities());
        SimQueue {
            queue: EpochQueue::new(traits, tuning),
            core: SimCore::new(profile, size_bytes),
            commands: HashMap::new(),
            zeroes: Buf::zeroed(UNIT_BYTES as usize),
        }
    }

    /// The virtual time.
    pub fn now_ns(&self) -> u64 {
        self.core.now_ns()
    }

    /// Submits a request at the present time. Its bytes are in whole units of [`UNIT_BYTES`].
    pub fn push(&mut self, io: Io) -> RequestId {
        self.queue.push(io, self.core.now_ns())
    }

    /// A thread depends on this request from now on.
    pub fn promote(&mut self, request: RequestId) {
        self.queue.promote(request, self.core.now_ns());
    }

    /// Lets time pass until requests complete, and gives those; nothing when `limit_ns` comes
    /// first, or when the limit is `u64::MAX` and nothing is left to do.
    pub fn advance(&mut self, limit_ns: u64) -> Vec<(RequestId, IoResult)> {
        loop {
            self.dispatch();
            let done: Vec<_> = std::iter::from_fn(|| self.queue.pop_done()).collect();
            if !done.is_empty() {
                return done;
            }
            let next_ns = self.core.next_event_ns().filter(|next_ns| *next_ns <= limit_ns);
            if next_ns.is_none() && limit_ns == u64::MAX {
                return done;
            }
            let completions = self.core.advance_to(next_ns.unwrap_or(limit_ns));
            for completion in completions {
                if let Some(command) = self.commands.remove(&completion.id) {
                    self.queue.completed(command, completion.result, self.core.now_ns());
                }
            }
            if next_ns.is_none() {
                self.dispatch();
                return std::iter::from_fn(|| self.queue.pop_done()).collect();
            }
        }
    }

    fn dispatch(&mut self) {
        while let Some(command) = self.queue.next_dispatch(self.core.now_ns()) {
            let (offset, len, class) = (command.offset, command.len, command.class);
            let id = match command.kind {
                IoKind::Read => self.core.submit_read(offset, len),
                IoKind::Write { order, fua } => {
                    let bufs = vec![self.zeroes.clone(); (len / UNIT_BYTES) as usize];
                    self.core.submit(&Request::Write { offset, bufs, order, fua, class })
                }
                IoKind::Flush | IoKind::FlushCompleted => {
                    self.core.submit(&Request::Flush { class })
                }
                IoKind::Discard => self.core.submit(&Request::Discard { offset, len }),
                IoKind::WriteZeroes => self.core.submit(&Request::WriteZeroes { offset, len }),
            };
            self.commands.insert(id, command.id);
        }
    }

    /// What the scheduler did.
    pub fn epoch_stats(&self) -> EpochStats {
        self.queue.stats()
    }

    /// The device, for its counts and traces.
    pub fn core_mut(&mut self) -> &mut SimCore {
        &mut self.core
    }
}
