//! Quasi-async writes: background writes that are promoted when a thread waits for them.
//!
//! Owns the list of writes in flight under one lock (an inode's writeback, a journal's checkpoint),
//! so that a thread that waits for the lock can promote them (section 3 of *Barrier-Enabled IO
//! Stack for Flash Storage*).
//!
//! Invariant: while a [`PromoteGuard`] lives, all writes in the list are promoted and every new one
//! is of class Sync, whichever of the two came first.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::device::Class;
use crate::lock::{Mutex, Rank};
use crate::ticket::Ticket;

/// Writes in flight that a thread may wait for later.
#[derive(Debug)]
pub struct QuasiAsyncWrites {
    /// Waiters change it before they lock `tickets`; submitters read it under that lock.
    waiter_count: AtomicU32,
    /// [`Ticket::promote`] takes the device's locks under it.
    tickets: Mutex<Vec<Ticket>>,
}

impl Default for QuasiAsyncWrites {
    fn default() -> QuasiAsyncWrites {
        QuasiAsyncWrites {
            waiter_count: AtomicU32::default(),
            tickets: Mutex::new(Rank::QuasiAsyncWrites, Vec::new()),
        }
    }
}

impl QuasiAsyncWrites {
    /// The class of the next writes: `usual` while nobody waits.
    pub fn class(&self, usual: Class) -> Class {
        if self.waiter_count.load(Ordering::SeqCst) > 0 { Class::Sync } else { usual }
    }

    /// Adds writes that have been submitted.
    pub fn began(&self, tickets: &[Ticket]) {
        let mut list = self.tickets.lock();
        list.retain(|ticket| !ticket.is_done());
        list.extend_from_slice(tickets);
        if self.waiter_count.load(Ordering::SeqCst) > 0 {
            tickets.iter().for_each(Ticket::promote);
        }
    }

    /// Removes writes that have ended.
    pub fn ended(&self) {
        self.tickets.lock().retain(|ticket| !ticket.is_done());
    }

    /// Promotes the writes in flight, and those added while the guard lives.
    #[must_use = "new writes are promoted only while it lives"]
    pub fn promote(&self) -> PromoteGuard<'_> {
        self.waiter_count.fetch_add(1, Ordering::SeqCst);
        self.tickets.lock().iter().for_each(Ticket::promote);
        PromoteGuard { writes: self }
    }
}

/// A thread waits; see [`QuasiAsyncWrites::promote`].
#[derive(Debug)]
pub struct PromoteGuard<'a> {
    writes: &'a QuasiAsyncWrites,
}

impl Drop for PromoteGuard<'_> {
    fn drop(&mut self) {
        self.writes.waiter_count.fetch_sub(1, Ordering::SeqCst);
    }
}
