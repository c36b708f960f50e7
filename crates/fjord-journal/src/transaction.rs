//! A transaction: the buffers, revokes, data tickets and callbacks that commit together.
//!
//! A transaction walks through [`Phase`]s in order. Which transaction is in which phase is
//! the journal's state (`journal::State`); what it contains is here.
//!
//! Two numbers: a [`Tid`] is what handles are told and callers wait for; a [`Sequence`] is what
//! a transaction bears in the log, given when it is frozen. A running transaction of which
//! parts committed early has filled several sequences under one `Tid`. Until the first such
//! commit of a journal the two run alike.
//!
//! Invariants: contents are added only while the transaction is running or locked, under an
//! open handle; what is frozen belongs to the committing thread.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Instant;

use fjord_block::{Buf, Ticket};
use fjord_format::types::{BlockNo, Tid};
use parking_lot::Mutex;

use crate::buffer::Buffer;
use crate::error::JournalError;
use crate::part::{Part, PartSet, PartUnions};

/// ID of a transaction in the log: without gaps, in the order of commits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sequence(pub(crate) Tid);

impl Sequence {
    /// The one after it.
    pub(crate) fn next(self) -> Sequence {
        Sequence(self.0.next())
    }
}

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
    /// Data writes that must be on the device before the commit block, each with a part of
    /// the handle that attached it.
    pub(crate) data: Vec<(Part, Ticket)>,
    /// To be told the outcome, each with a part of the handle that asked.
    pub(crate) callbacks: Vec<(Part, Callback)>,
    /// Parts that handles touched, as far as they have not committed.
    pub(crate) parts: PartUnions,
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

    /// Freezes all that is left of the transaction; all its handles are stopped.
    pub(crate) fn freeze(&self, sequence: Sequence) -> Batch {
        let contents = std::mem::take(&mut *self.contents.lock());
        let freeze = |buffer: Arc<Buffer>| {
            buffer.freeze(self.tid, sequence).map(|version| (buffer, version))
        };
        Batch {
            tid: self.tid,
            sequence,
            parts: None,
            reserved_blocks: 0,
            versions: contents.buffers.into_iter().filter_map(freeze).collect(),
            revoked: contents.revoked,
            forgotten: contents.forgotten.into_values().collect(),
            data: contents.data.into_iter().map(|(_, ticket)| ticket).collect(),
            callbacks: contents.callbacks.into_iter().map(|(_, callback)| callback).collect(),
        }
    }
}

/// What a commit writes: a whole transaction, or some parts of one. Frozen.
pub(crate) struct Batch {
    /// The transaction that it is of.
    pub(crate) tid: Tid,
    pub(crate) sequence: Sequence,
    /// The parts that commit; `None` for all that is left.
    pub(crate) parts: Option<PartSet>,
    /// How much of what the transaction reserved in the log the rest of it needs no more;
    /// means something with `parts` only.
    pub(crate) reserved_blocks: u32,
    pub(crate) versions: Vec<Version>,
    pub(crate) revoked: BTreeSet<BlockNo>,
    pub(crate) forgotten: Vec<Arc<Buffer>>,
    pub(crate) data: Vec<Ticket>,
    pub(crate) callbacks: Vec<Callback>,
}

impl Batch {
    /// The transaction, if this is all that was left of it.
    pub(crate) fn whole(&self) -> Option<Tid> {
        self.parts.is_none().then_some(self.tid)
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
    /// How often parts of it were frozen to commit before the rest.
    pub(crate) generation: u32,
    /// How many of those commits are durable and have run their callbacks.
    pub(crate) generations_committed: u32,
    /// Parts that somebody waits for; the next commit of parts takes them along.
    pub(crate) wanted: Vec<Part>,
}

impl Running {
    pub(crate) fn new(tid: Tid) -> Running {
        Running {
            transaction: Transaction::new(tid),
            phase: Phase::Running,
            handles: 0,
            reserved_blocks: 0,
            generation: 0,
            generations_committed: 0,
            wanted: Vec::new(),
        }
    }
}

/// A transaction, or parts of one, being committed. Guarded by the journal's state lock.
pub(crate) struct Committing {
    pub(crate) tid: Tid,
    pub(crate) sequence: Sequence,
    /// The parts that commit; `None` for a whole transaction.
    pub(crate) parts: Option<PartSet>,
    /// From [`Phase::Flushing`] on.
    pub(crate) phase: Phase,
    /// First log block it was given (journal block).
    pub(crate) log_start: u32,
}

/// What a commit logged and is not all home. Guarded by the journal's state lock.
pub(crate) struct Checkpoint {
    /// The transaction, if it committed whole or this is what was left of it.
    pub(crate) tid: Option<Tid>,
    pub(crate) sequence: Sequence,
    /// [`Phase::Committed`] or [`Phase::Checkpointing`].
    pub(crate) phase: Phase,
    /// First log block (journal block).
    pub(crate) log_start: u32,
    /// Its buffers; which version goes home is the buffer's knowledge.
    pub(crate) buffers: Arc<Vec<Arc<Buffer>>>,
}
