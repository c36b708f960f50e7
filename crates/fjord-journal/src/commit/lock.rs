//! A locked transaction: the first step of a commit, before anything is frozen.
//!
//! Invariant: while a transaction is locked no handle starts, and [`Locked`] exists only when none is
//! open; so its contents cannot change except by the last changes of the file system.

use std::sync::Arc;

use fjord_block::plant::{Bug, planted};

use crate::error::{JournalError, Result};
use crate::journal::Journal;
use crate::part_set::Part;
use crate::reservation::ADDED_BLOCKS;
use crate::transaction::{Admitted, Sequence, Transaction};

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
            let gate = &running.transaction.gate;
            if !gate.is_closed() && planted(Bug::GatheredEarly) {
                drop(running.transaction.lock_contents());
            }
            gate.close();
            if gate.handle_count() == 0 {
                // Atomically: later callers are served by a later generation.
                gate.next_generation();
                running.closed = true;
                let wanted = std::mem::take(&mut running.wanted);
                let (transaction, generation) = (running.transaction.clone(), running.generation());
                return Ok(Locked { transaction, sequence, generation, wanted });
            }
            self.inner.drained.wait(&mut state);
        }
    }

    /// Lets the file system add its last changes to a locked transaction before a full freeze. On
    /// failure the journal stops.
    pub(super) fn complete_whole(&self, locked: &Locked) -> Result<()> {
        let Some(changes) = self.last_changes().filter(|changes| changes.are_pending()) else {
            return Ok(());
        };
        let generation = {
            let state = self.inner.state.lock();
            let Some(running) = &state.running else { return Ok(()) };
            running.transaction.gate.enter_as_exception(ADDED_BLOCKS);
            running.generation()
        };
        let transaction = locked.transaction.clone();
        let admitted = Admitted { transaction, generation, credits: ADDED_BLOCKS };
        let done = changes.add(self, admitted);
        done.inspect_err(|error| self.abort(error.clone()))
    }
}
