//! A transaction: the buffers, revokes, data tickets and callbacks that commit together.
//!
//! A transaction walks through [`Phase`]s in order. Which transaction is in which phase is
//! the journal's state (`journal::State`); what it contains is here.
//!
//! Invariants: contents are added only while the transaction is running or locked, under an
//! open handle; from [`Phase::Flushing`] on they belong to the committing thread.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Instant;

use fjord_block::{Buf, Ticket};
use fjord_format::types::{BlockNo, Tid};
use parking_lot::Mutex;

use crate::buffer::Buffer;
use crate::error::JournalError;

/// Where a transaction stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Phase {
    /// Handles start and stop.
    Running,
    /// A commit has begun: no handle starts; the open ones finish.
    Locked,
    /// Frozen: its log blocks are written, and its data is waited for.
    Flushing,
    /// Everything before the commit block is flushed; the commit block is being written.
    Committing,
    /// Durable. Its versions wait for a checkpoint.
    Committed,
    /// A checkpoint writes its versions home.
    Checkpointing,
}

/// Called once the outcome of a transaction is known.
pub(crate) type Callback = Box<dyn FnOnce(Result<(), JournalError>) + Send>;

/// What a transaction contains.
pub(crate) struct Transaction {
    /// Its ID.
    pub(crate) tid: Tid,
    /// When its first handle started.
    pub(crate) started: Instant,
    /// What it contains.
    pub(crate) contents: Mutex<Contents>,
}

/// Guarded by `Transaction::contents`.
#[derive(Default)]
pub(crate) struct Contents {
    /// Buffers that joined, in that order. One that left and came back is listed twice; one
    /// that only left is still listed. Freezing asks the buffer.
    pub(crate) buffers: Vec<Arc<Buffer>>,
    /// Blocks freed by this transaction and not reused as metadata by it.
    pub(crate) revoked: BTreeSet<BlockNo>,
    /// Freed blocks whose older versions must not go home once this transaction committed.
    pub(crate) forgotten: HashMap<BlockNo, Arc<Buffer>>,
    /// Data writes that must be on the device before the commit block.
    pub(crate) data: Vec<Ticket>,
    /// To be told the outcome.
    pub(crate) callbacks: Vec<Callback>,
}

impl Contents {
    /// Whether a commit would make nothing durable and tell nobody.
    pub(crate) fn is_empty(&self) -> bool {
        self.buffers.is_empty()
            && self.revoked.is_empty()
            && self.data.is_empty()
            && self.callbacks.is_empty()
    }
}

/// A version to be logged: where it belongs and its contents.
pub(crate) type Version = (Arc<Buffer>, Buf);

impl Transaction {
    pub(crate) fn new(tid: Tid) -> Arc<Transaction> {
        Arc::new(Transaction { tid, started: Instant::now(), contents: Mutex::default() })
    }

    /// Freezes the buffers that are still part of the transaction; all its handles are
    /// stopped.
    pub(crate) fn freeze(&self) -> Vec<Version> {
        let buffers = std::mem::take(&mut self.contents.lock().buffers);
        let freeze = |buffer: Arc<Buffer>| buffer.freeze(self.tid).map(|version| (buffer, version));
        buffers.into_iter().filter_map(freeze).collect()
    }
}

/// A transaction that takes handles, and the bookkeeping for them. Guarded by the journal's
/// state lock.
pub(crate) struct Running {
    pub(crate) transaction: Arc<Transaction>,
    /// [`Phase::Running`] or [`Phase::Locked`].
    pub(crate) phase: Phase,
    /// Open handles.
    pub(crate) handles: u32,
    /// Log blocks promised to open handles or used up by buffers and revokes so far; without
    /// the descriptors and the commit block.
    pub(crate) reserved_blocks: u32,
}

/// A transaction being committed. Guarded by the journal's state lock.
pub(crate) struct Committing {
    pub(crate) transaction: Arc<Transaction>,
    /// From [`Phase::Flushing`] on.
    pub(crate) phase: Phase,
    /// First log block it was given (journal block).
    pub(crate) log_start: u32,
}

/// A committed transaction whose versions are not all home. Guarded by the journal's state
/// lock.
pub(crate) struct Checkpoint {
    pub(crate) tid: Tid,
    /// [`Phase::Committed`] or [`Phase::Checkpointing`].
    pub(crate) phase: Phase,
    /// First log block (journal block).
    pub(crate) log_start: u32,
    /// Its buffers; which version goes home is the buffer's knowledge.
    pub(crate) buffers: Arc<Vec<Arc<Buffer>>>,
}
