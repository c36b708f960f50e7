//! A handle: one atomic change of several blocks.
//!
//! All changes of a handle are in one transaction, so a crash leaves all of them or none.
//!
//! Invariants: a thread has at most one open handle per journal, and the handle stays on its
//! thread; unused credits are returned when the handle stops. The transaction cannot commit while
//! the handle is open, so its owner must not wait for a commit.

use std::cell::{Cell, RefCell};
use std::marker::PhantomData;
use std::rc::Rc;
use std::sync::Arc;

use fjord_block::Ticket;
use fjord_block::lock::{Held, Rank, Turn};
use fjord_block::plant::{Bug, planted};
use fjord_format::types::{BlockNo, Tid};

use crate::buffer::{Buffer, WriteGuard};
use crate::error::{JournalError, Result};
use crate::journal::Journal;
use crate::open_handles;
use crate::part_set::Part;
use crate::transaction::{Admitted, Callback, Transaction};
use crate::wanted_parts::ChangesUpTo;

/// An open handle; see the module documentation. Dropping it stops it.
#[must_use = "a handle that is dropped at once protects nothing"]
pub struct Handle {
    journal: Journal,
    transaction: Arc<Transaction>,
    /// See [`Handle::generation`].
    generation: u32,
    /// Contributions to the transaction, passed on when the handle stops.
    collected: RefCell<Collected>,
    /// Blocks that it may still add to the transaction.
    credits: Cell<u32>,
    stopped: bool,
    /// Its place in the order of locks, while it is open.
    held: Option<Held>,
    /// It has given out a writable buffer.
    changed: Cell<bool>,
    /// A handle stays on its thread.
    not_send: PhantomData<Rc<()>>,
}

/// Contributions of a handle: they belong to all parts that it touches, which are known when it
/// stops.
#[derive(Default)]
struct Collected {
    /// Touched parts, each once; empty if the file system has no parts.
    parts: Vec<Part>,
    data: Vec<Ticket>,
    callbacks: Vec<Callback>,
}

impl Handle {
    pub(crate) fn new(journal: Journal, admitted: Admitted) -> Handle {
        open_handles::add(&journal);
        let Admitted { transaction, generation, credits } = admitted;
        let credits = Cell::new(credits);
        Handle {
            journal,
            transaction,
            generation,
            collected: RefCell::default(),
            credits,
            stopped: false,
            held: Some(Turn::wait_for(Rank::Handle).taken()),
            changed: Cell::new(false),
            not_send: PhantomData,
        }
    }

    /// A stopped handle starts again, with another grant.
    pub(crate) fn begin(&mut self, admitted: Admitted) {
        open_handles::add(&self.journal);
        self.transaction = admitted.transaction;
        self.generation = admitted.generation;
        self.credits.set(admitted.credits);
        self.stopped = false;
        self.held = Some(Turn::wait_for(Rank::Handle).taken());
        self.changed.set(false);
    }

    pub(crate) fn journal(&self) -> &Journal {
        &self.journal
    }

    /// The transaction that the handle belongs to; changes with [`Handle::restart`].
    pub fn tid(&self) -> Tid {
        self.transaction.tid
    }

    /// Number of partial commits of its transaction before the handle started: two handles that
    /// touch the same part commit together if transaction and generation are equal.
    pub fn generation(&self) -> u32 {
        self.generation
    }

    /// The changes of its transaction up to its own, for [`Journal::commit_parts`].
    pub fn changes(&self) -> ChangesUpTo {
        ChangesUpTo { tid: self.tid(), generation: Some(self.generation) }
    }

    /// Adds `part` to the touched parts. Calls that get a buffer or forget a block do so
    /// themselves, except for entries of shared blocks. No effect without parts
    /// ([`Journal::set_parts`]).
    pub fn touch_part(&self, part: Part) {
        if self.journal.parts().is_some() {
            let parts = &mut self.collected.borrow_mut().parts;
            if !parts.contains(&part) {
                parts.push(part);
            }
        }
    }

    fn touch_block(&self, block: BlockNo) {
        if let Some(parts) = self.journal.parts() {
            self.touch_part(parts.part_of(block));
        }
    }

    /// Blocks that may still be added.
    pub fn credits(&self) -> u32 {
        self.credits.get()
    }

    /// Adds a buffer to the transaction and locks its contents for modification. Takes a
    /// credit the first time the transaction meets the buffer. A block that this transaction
    /// freed earlier is thereby in use again: its revoke is cancelled.
    ///
    /// Errs if the credits are used up (call [`Handle::extend`] first) or the journal has stopped.
    pub fn get_write<'a>(&'a self, buffer: &'a Arc<Buffer>) -> Result<WriteGuard<'a>> {
        self.journal.check_running()?;
        self.changed.set(true);
        if !buffer.is_shared() {
            self.touch_block(buffer.block());
        }
        let guard = buffer.lock_for_write();
        let tid = self.transaction.tid;
        if buffer.is_part_of(tid) {
            return Ok(guard);
        }
        self.journal.check_buffer(buffer.block(), &guard)?;
        self.take_credit()?;
        if let Err(error) = self.journal.join(buffer, tid, &guard) {
            self.credits.set(self.credits.get() + 1);
            return Err(error);
        }
        self.transaction.add_buffer(buffer);
        Ok(guard)
    }

    /// As [`Handle::get_write`], for a newly allocated block whose old contents are not needed:
    /// they are zeroed.
    pub fn get_create<'a>(&'a self, buffer: &'a Arc<Buffer>) -> Result<WriteGuard<'a>> {
        let mut guard = self.get_write(buffer)?;
        let fresh = fjord_block::Buf::zeroed(guard.len());
        guard.replace(fresh);
        Ok(guard)
    }

    /// Revokes a freed block that may be in the log: it leaves the transaction, and replay will not
    /// write its earlier copies. Call it for each freed metadata block, and each freed data block
    /// of a file in data=journal mode. The caller must not reuse the block before
    /// [`Handle::on_commit`] has called back. `buffer` is the cached buffer, if there is one.
    ///
    /// Uses one credit per revoke block (hundreds of freed blocks); errs without one.
    pub fn forget(&self, block: BlockNo, buffer: Option<&Arc<Buffer>>) -> Result<()> {
        self.journal.check_running()?;
        self.touch_block(block);
        let live = self.journal.live_buffer(block).or_else(|| buffer.cloned());
        let mut contents = self.transaction.lock_freed();
        if !contents.revoked.contains(&block) && !planted(Bug::NoRevoke) {
            if self.journal.needs_revoke_block(contents.revoked.len()) {
                self.take_credit()?;
            }
            contents.revoked.insert(block);
        }
        if let Some(buffer) = live {
            buffer.leave(self.transaction.tid);
            contents.forgotten.insert(block, buffer);
        }
        Ok(())
    }

    /// Requests more credits in the same transaction. `false` if it has no space for them: bring
    /// the change to a consistent state, then [`Handle::restart`].
    pub fn extend(&self, credits: u32) -> Result<bool> {
        self.journal.check_running()?;
        let granted = self.journal.extend(&self.transaction, credits);
        if granted {
            self.credits.set(self.credits.get().saturating_add(credits));
        }
        Ok(granted)
    }

    /// Calls `callback` when the handle's changes are durable, or have failed: for example to
    /// release freed blocks for reuse. It runs on the committing thread, must be quick, and must
    /// neither start a handle nor wait for a commit.
    pub fn on_commit(&self, callback: impl FnOnce(Result<()>) + Send + 'static) {
        self.collected.borrow_mut().callbacks.push(Box::new(callback));
    }

    /// Attaches ordered data in flight that the transaction's metadata refers to: the commit waits
    /// for it before its flush. On a device that keeps order it must be an ordered write of that
    /// device; the commit then follows it without a wait. A failed write stops the journal.
    pub fn attach_data(&self, ticket: Ticket) {
        self.collected.borrow_mut().data.push(ticket);
    }

    /// Ends the change; returns the transaction to pass to [`Journal::commit`].
    pub fn stop(mut self) -> Tid {
        self.stop_now();
        self.tid()
    }

    fn take_credit(&self) -> Result<()> {
        let left = self.credits.get().checked_sub(1).ok_or_else(|| {
            JournalError::Usage("the handle's credits are used up; extend or restart it".into())
        })?;
        self.credits.set(left);
        Ok(())
    }

    /// Ends the change, if it has not ended.
    pub(crate) fn stop_now(&mut self) {
        if self.stopped {
            return;
        }
        self.stopped = true;
        self.held = None;
        open_handles::remove(&self.journal);
        self.hand_over();
        self.journal.release(&self.transaction, self.credits.replace(0));
    }

    /// Passes the contributions to the transaction, before it can commit.
    fn hand_over(&self) {
        let Collected { parts, data, callbacks } = self.collected.take();
        if parts.is_empty() && data.is_empty() && callbacks.is_empty() {
            return;
        }
        // Any of its parts will do, because they commit together.
        let part = parts.first().copied().unwrap_or(Part::WHOLE);
        self.transaction.add(part, data, callbacks);
        if !parts.is_empty() {
            self.transaction.lock_contents().parts.merge(&parts, self.generation);
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if !self.stopped && self.changed.get() {
            open_handles::abandon(&self.journal);
        }
        self.stop_now();
    }
}

impl std::fmt::Debug for Handle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Handle(transaction {}, {} credits)", self.tid(), self.credits.get())
    }
}
