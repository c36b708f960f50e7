//! A locked transaction: the first step of a commit, before anything is frozen.
//!
//! Invariant: while a transaction is locked no handle starts, and [`Locked`] exists only when none is
//! open; so its contents cannot change except by the last changes of the file system.

use std::sync::Arc;

use crate::error::{JournalError, Result};
use crate::journal::Journal;
use crate::part_set::Part;
use crate::reservation::ADDED_BLOCKS;
use crate::transaction::{Admitted, Phase, Sequence, Transaction};

/// A locked running transaction: no new handles, none open.
pub(super) struct Locked {
    pub(super) transaction: Arc<Transaction>,
    /// The commit's sequence in the log.
    pub(super) sequence: Sequence,
    /// Number of the partial commit that follows.
    pub(super) generation: u32,
    /// Parts that threads wait for.
    pub(super) wanted: Vec<Part>,
}

impl Journal {
    /// Locks the running transaction and waits until its handles have stopped.
    pub(super) fn lock_running(&self) -> Result<Locked> {
        let mut state = self.inner.state.lock();
        loop {
            self.check_running()?;
            let sequence = state.next_sequence;
            let Some(running) = &mut state.running else {
                return Err(JournalError::Usage("there is no transaction to commit".into()));
            };
            running.phase = Phase::Locked;
            if running.handles == 0 {
                // Atomically: later callers are served by a later generation.
                running.generation += 1;
                running.closed = true;
                let wanted = std::mem::take(&mut running.wanted);
                let (transaction, generation) = (running.transaction.clone(), running.generation);
                return Ok(Locked { transaction, sequence, generation, wanted });
            }
            self.inner.drained.wait(&mut state);
        }
    }

    /// Lets the file system add its last changes to a locked transaction before a full freeze. On
    /// failure the journal stops.
    pub(super) fn complete_whole(&self, locked: &Locked) -> Result<()> {
        let Some(parts) = self.parts() else { return Ok(()) };
        let generation = {
            let mut state = self.inner.state.lock();
            let Some(running) = &mut state.running else { return Ok(()) };
            running.handles += 1;
            running.reserved_blocks += ADDED_BLOCKS;
            running.generation
        };
        let transaction = locked.transaction.clone();
        let admitted = Admitted { transaction, generation, credits: ADDED_BLOCKS };
        let done = parts.before_whole_commit(self, admitted);
        done.inspect_err(|error| self.abort(error.clone()))
    }
}
