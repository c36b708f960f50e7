//! Which journals the calling thread has an open handle on, and on which it gave one up.
//!
//! Invariant: a thread has at most one open handle per journal, and the handle stays on its thread.
//! So whether a call would deadlock is known without a lock.

use std::cell::RefCell;

use fjord_block::lock::{Rank, thread_local};

use crate::error::{JournalError, Result};
use crate::journal::Journal;

thread_local! {
    /// Journals (by address) on which this thread has an open handle.
    static OPEN: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
    /// Journals on which this thread dropped a handle that had changed something.
    static ABANDONED: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

impl Journal {
    /// Whether this thread, since the last call, dropped a handle after changes instead of stopping
    /// it, as an error in the middle of a change does. The caller decides whether the partial
    /// change is consistent; if not, it must abort the journal.
    pub fn take_abandoned(&self) -> bool {
        let key = self.key();
        ABANDONED.with_borrow_mut(|abandoned| {
            let before = abandoned.len();
            abandoned.retain(|&other| other != key);
            abandoned.len() != before
        })
    }
}

/// Errs if this thread has an open handle on the journal: `what` would deadlock.
pub(crate) fn check_no_open_handle(journal: &Journal, what: &str) -> Result<()> {
    let key = journal.key();
    if OPEN.with_borrow(|open| open.contains(&key)) {
        return Err(JournalError::Usage(format!(
            "{what} while this thread has an open handle would deadlock; stop the handle first"
        )));
    }
    // Most calls find no reason to commit; the order is checked in all of them.
    Rank::CommitLock.check_order();
    Ok(())
}

/// A handle of this thread starts.
pub(crate) fn add(journal: &Journal) {
    OPEN.with_borrow_mut(|open| open.push(journal.key()));
}

/// A handle of this thread stops.
pub(crate) fn remove(journal: &Journal) {
    let key = journal.key();
    OPEN.with_borrow_mut(|open| {
        if let Some(index) = open.iter().rposition(|&other| other == key) {
            open.swap_remove(index);
        }
    });
}

/// A handle of this thread was dropped after changes.
pub(crate) fn abandon(journal: &Journal) {
    let key = journal.key();
    ABANDONED.with_borrow_mut(|abandoned| {
        if !abandoned.contains(&key) {
            abandoned.push(key);
        }
    });
}
