//! Boosting: writes that nobody waited for become urgent when somebody does.
//!
//! Owns the list of writes under way on behalf of one lock (an inode's writeback, a journal's
//! checkpoint), so that whoever has to wait for that lock can promote them: section 3 of
//! *Barrier-Enabled IO Stack for Flash Storage* calls such writes quasi-async.
//!
//! Invariant: while a [`Hurry`] lives, every write in the list is promoted and every new one is of
//! class Sync, whichever of the two came first.

use std::sync::atomic::{AtomicU32, Ordering};

use parking_lot::Mutex;

use crate::device::Class;
use crate::ticket::Ticket;

/// Writes under way that others may come to wait for.
#[derive(Debug, Default)]
pub struct Boost {
    /// Changed before `tickets` is locked by who waits, read under that lock by who submits.
    waiter_count: AtomicU32,
    /// A leaf lock, but for the device's own.
    tickets: Mutex<Vec<Ticket>>,
}

impl Boost {
    /// The class of the next writes: `usual` while nobody waits.
    pub fn class(&self, usual: Class) -> Class {
        if self.waiter_count.load(Ordering::SeqCst) > 0 { Class::Sync } else { usual }
    }

    /// These writes are under way.
    pub fn began(&self, tickets: &[Ticket]) {
        let mut list = self.tickets.lock();
        list.retain(|ticket| !ticket.is_done());
        list.extend_from_slice(tickets);
        if self.waiter_count.load(Ordering::SeqCst) > 0 {
            tickets.iter().for_each(Ticket::promote);
        }
    }

    /// Some of them have ended: lets go of those.
    pub fn ended(&self) {
        self.tickets.lock().retain(|ticket| !ticket.is_done());
    }

    /// Promotes what is under way, and what comes while the value lives.
    #[must_use = "new writes are urgent only while it lives"]
    pub fn hurry(&self) -> Hurry<'_> {
        self.waiter_count.fetch_add(1, Ordering::SeqCst);
        self.tickets.lock().iter().for_each(Ticket::promote);
        Hurry { boost: self }
    }
}

/// Somebody waits; see [`Boost::hurry`].
#[derive(Debug)]
pub struct Hurry<'a> {
    boost: &'a Boost,
}

impl Drop for Hurry<'_> {
    fn drop(&mut self) {
        self.boost.waiter_count.fetch_sub(1, Ordering::SeqCst);
    }
}
