//! Changes that the file system adds to a transaction just before its full commit: what most of its
//! handles would write and take back again, and what thus is written once.
//!
//! Invariant: no other handle is open while they are added, so that nothing is changed after them.

use std::sync::Arc;

use crate::error::Result;
use crate::handle::Handle;
use crate::journal::{Journal, LastRules};
use crate::transaction::Admitted;

/// What the file system adds last.
pub trait LastChanges: Send + Sync {
    /// Whether there is something to add now. No handle is open.
    fn are_pending(&self) -> bool;

    /// Adds it to the transaction of the handle: at most one new block. No other handle is open; must
    /// not wait for any.
    fn add(&self, handle: &Handle) -> Result<()>;
}

impl Journal {
    /// Says who adds changes before each full commit. Call it once, while no transaction runs.
    ///
    /// # Errors
    /// [`JournalError::Usage`](crate::JournalError::Usage) otherwise.
    pub fn set_last_changes(&self, changes: Arc<dyn LastChanges>) -> Result<()> {
        self.set_once(&self.inner.last_changes, Box::new(changes), "last changes")
    }
}

impl LastRules for Arc<dyn LastChanges> {
    fn are_pending(&self) -> bool {
        (**self).are_pending()
    }

    fn add(&self, journal: &Journal, admitted: Admitted) -> Result<()> {
        let handle = Handle::new(journal.clone(), admitted);
        let done = (**self).add(&handle);
        handle.stop();
        done
    }
}
