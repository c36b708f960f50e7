//! A transaction: the buffers, revokes, data tickets and callbacks that commit together.
//!
//! A transaction walks through [`Phase`]s in order. Which transaction is in which phase is
//! the journal's state (`state::State`); what it contains is here.
//!
//! Two numbers: handles get and callers wait for a [`Tid`]; a [`Sequence`] numbers a commit in the
//! log and is assigned at the freeze. A transaction with partial commits has several sequences and
//! one `Tid`. Before the first partial commit of a journal the two are equal.
//!
//! Handles add buffers, data and callbacks without a lock ([`JournalLists::LockFree`]): one atomic operation puts
//! each on a queue, from which whoever looks at the contents sorts them in. (Parallel journaling, FAST '18,
//! inserts by atomic exchange, removes by a mark, and fetches by compare-and-swap: here a buffer that leaves
//! marks itself, and the queue is drained when all handles have stopped.)
//!
//! Invariants: contents are added only while the transaction is running or locked, under an
//! open handle; frozen contents belong to the committing thread.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use crossbeam_queue::SegQueue;
use fjord_block::lock::{Mutex, MutexGuard, Rank, point};
use fjord_block::plant::{Bug, planted};
use fjord_block::{Buf, Ticket};
use fjord_format::types::{BlockNo, Tid};

use crate::buffer::Buffer;
use crate::error::JournalError;
use crate::gate::Gate;
use crate::options::JournalLists;
use crate::part_set::{ChangedParts, Part, PartSet, PartUnions};
use crate::waiters::Waiters;

pub(crate) use crate::sequence::Sequence;

/// State of a transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Phase {
    /// Handles start and stop.
    Running,
    /// A commit has begun: no handle starts; open handles finish.
    Locked,
    /// Frozen: its log blocks are written, and its data is waited for.
    Flushing,
    /// Everything before the commit block is flushed; the commit block is being written.
    Committing,
    /// Durable. Its versions wait for a checkpoint.
    Committed,
    /// A checkpoint writes its versions to their home locations.
    Checkpointing,
}

/// Called when the outcome of a transaction is known.
pub(crate) type Callback = Box<dyn FnOnce(Result<(), JournalError>) + Send>;

/// Contents of a transaction.
pub(crate) struct Transaction {
    /// Its ID.
    pub(crate) tid: Tid,
    /// When its first handle started.
    pub(crate) started: Instant,
    /// Where its handles start and stop.
    pub(crate) gate: Gate,
    /// What handles have added and nobody has sorted into `contents`; `None` if they add under its lock.
    added: Option<SegQueue<Added>>,
    /// `contents` has, or had, freed blocks: a buffer that joins may be one of them. Set under `contents`; who
    /// uses a freed block again has synchronised with who freed it, as the allocator's locks have it.
    has_freed: AtomicBool,
    contents: Mutex<Contents>,
}

/// What a handle adds.
enum Added {
    Buffer(Arc<Buffer>),
    Data(Part, Ticket),
    Callback(Part, Callback),
}

/// Guarded by `Transaction::contents`.
#[derive(Default)]
pub(crate) struct Contents {
    /// Buffers in the order in which they joined. A buffer that left and rejoined is listed twice;
    /// one that left is still listed. The freeze checks each buffer.
    pub(crate) buffers: Vec<Arc<Buffer>>,
    /// Blocks freed by this transaction and not reused as metadata by it.
    pub(crate) revoked: BTreeSet<BlockNo>,
    /// Freed blocks whose older versions must not be checkpointed after this transaction's commit.
    pub(crate) forgotten: HashMap<BlockNo, Arc<Buffer>>,
    /// Ordered data: writes that must be durable before the commit block, each with a part of the
    /// handle that attached it.
    pub(crate) data: Vec<(Part, Ticket)>,
    /// Callbacks for the outcome, each with a part of the handle that registered it.
    pub(crate) callbacks: Vec<(Part, Callback)>,
    /// Touched parts. They leave when their commit enters the pipeline, so that they are always in
    /// one of both.
    pub(crate) parts: PartUnions,
}

impl Contents {
    fn take_in(&mut self, added: Added) {
        match added {
            Added::Buffer(buffer) => self.buffers.push(buffer),
            Added::Data(part, ticket) => self.data.push((part, ticket)),
            Added::Callback(part, callback) => self.callbacks.push((part, callback)),
        }
    }

    /// A block that was freed is metadata again: its revoke is cancelled.
    fn use_again(&mut self, block: BlockNo) {
        self.revoked.remove(&block);
        self.forgotten.remove(&block);
    }

    /// Whether a commit would make nothing durable and call no callback.
    pub(crate) fn is_empty(&self) -> bool {
        self.buffers.is_empty()
            && self.revoked.is_empty()
            && self.data.is_empty()
            && self.callbacks.is_empty()
    }
}

/// A version to log: home location and contents.
pub(crate) type Version = (Arc<Buffer>, Buf);

impl Transaction {
    pub(crate) fn new(tid: Tid, lists: JournalLists, limit_blocks: u32) -> Arc<Transaction> {
        Arc::new(Transaction {
            tid,
            started: Instant::now(),
            gate: Gate::new(limit_blocks),
            added: (lists == JournalLists::LockFree).then(SegQueue::new),
            has_freed: AtomicBool::new(false),
            contents: Mutex::new(Rank::TransactionContents, Contents::default()),
        })
    }

    /// Adds a buffer that has joined. If its block was freed by this transaction, it is in use again.
    pub(crate) fn add_buffer(&self, buffer: &Arc<Buffer>) {
        let Some(added) = &self.added else {
            let mut contents = self.contents.lock();
            contents.buffers.push(buffer.clone());
            contents.use_again(buffer.block());
            return;
        };
        let before = planted(Bug::InsertLost).then(|| added.len());
        point();
        if before.is_none_or(|before| before == added.len()) {
            added.push(Added::Buffer(buffer.clone()));
        }
        if self.has_freed.load(Ordering::Acquire) {
            self.contents.lock().use_again(buffer.block());
        }
    }

    /// Adds the data and the callbacks of a handle that touched `part`.
    pub(crate) fn add(&self, part: Part, data: Vec<Ticket>, callbacks: Vec<Callback>) {
        let data = data.into_iter().map(|ticket| Added::Data(part, ticket));
        let callbacks = callbacks.into_iter().map(|callback| Added::Callback(part, callback));
        let all = data.chain(callbacks);
        match &self.added {
            Some(added) => all.for_each(|one| added.push(one)),
            None => {
                let mut contents = self.contents.lock();
                all.for_each(|one| contents.take_in(one));
            }
        }
    }

    /// The contents, with all that has been added so far.
    pub(crate) fn lock_contents(&self) -> MutexGuard<'_, Contents> {
        let mut contents = self.contents.lock();
        if let Some(added) = &self.added {
            while let Some(one) = added.pop() {
                contents.take_in(one);
            }
        }
        contents
    }

    /// As [`Transaction::lock_contents`], to enter a freed block.
    pub(crate) fn lock_freed(&self) -> MutexGuard<'_, Contents> {
        let contents = self.lock_contents();
        self.has_freed.store(true, Ordering::Release);
        contents
    }

    /// Freezes the rest of the transaction; all its handles are stopped.
    pub(crate) fn freeze(&self, sequence: Sequence, generation: u32) -> Batch {
        let contents = {
            let mut contents = match planted(Bug::GatheredEarly) {
                true => self.contents.lock(),
                false => self.lock_contents(),
            };
            let parts = std::mem::take(&mut contents.parts);
            std::mem::replace(&mut *contents, Contents { parts, ..Contents::default() })
        };
        let mut buffers = contents.buffers;
        let mut versions = Vec::with_capacity(buffers.len());
        buffers.retain(|buffer| {
            let version = buffer.freeze(self.tid, sequence);
            let is_frozen = version.is_some();
            versions.extend(version.map(|version| (buffer.clone(), version)));
            is_frozen
        });
        let is_revoked = |buffer: &Arc<Buffer>| contents.revoked.contains(&buffer.block());
        debug_assert!(!buffers.iter().any(is_revoked), "a freed block is logged");
        Batch {
            tid: self.tid,
            sequence,
            generation,
            parts: None,
            reserved_blocks: 0,
            buffers,
            versions,
            revoked: contents.revoked,
            forgotten: contents.forgotten.into_values().collect(),
            data: contents.data.into_iter().map(|(_, ticket)| ticket).collect(),
            callbacks: contents.callbacks.into_iter().map(|(_, callback)| callback).collect(),
        }
    }
}

/// What a commit writes: a whole transaction, or some parts of one. Frozen.
pub(crate) struct Batch {
    /// Its transaction.
    pub(crate) tid: Tid,
    pub(crate) sequence: Sequence,
    /// Number of the commit in its transaction.
    pub(crate) generation: u32,
    /// The parts that commit; `None` for all of the rest.
    pub(crate) parts: Option<PartSet>,
    /// Reserved log blocks that the rest of the transaction no longer needs; valid with `parts`
    /// only.
    pub(crate) reserved_blocks: u32,
    /// Those of `versions`, in the same order.
    pub(crate) buffers: Vec<Arc<Buffer>>,
    pub(crate) versions: Vec<Version>,
    pub(crate) revoked: BTreeSet<BlockNo>,
    pub(crate) forgotten: Vec<Arc<Buffer>>,
    pub(crate) data: Vec<Ticket>,
    pub(crate) callbacks: Vec<Callback>,
}

/// A transaction that accepts handles, and who waits for it. Guarded by the journal's
/// state lock.
pub(crate) struct Running {
    pub(crate) transaction: Arc<Transaction>,
    /// Parts that threads wait for; the next partial commit includes them.
    pub(crate) wanted: Vec<Part>,
    /// Callers that wait for the next commit, with a thread or without.
    pub(crate) callers: u32,
    /// Threads that wait for the next commit; for the one in progress while it is closed.
    pub(crate) waiters: Arc<Waiters>,
    /// A commit is about to freeze it, or parts of it.
    pub(crate) closed: bool,
    /// While it is closed: threads that wait for the rest of it, which may commit now or next.
    pub(crate) late_waiters: Arc<Waiters>,
}

impl Running {
    pub(crate) fn new(tid: Tid, lists: JournalLists, limit_blocks: u32) -> Running {
        Running {
            transaction: Transaction::new(tid, lists, limit_blocks),
            wanted: Vec::new(),
            callers: 0,
            waiters: Arc::default(),
            closed: false,
            late_waiters: Arc::default(),
        }
    }

    /// [`Phase::Running`] or [`Phase::Locked`].
    pub(crate) fn phase(&self) -> Phase {
        if self.transaction.gate.is_closed() { Phase::Locked } else { Phase::Running }
    }

    /// Number of partial commits frozen.
    pub(crate) fn generation(&self) -> u32 {
        self.transaction.gate.generation()
    }

    /// The newest generation of handles that have changed anything: none has since it was closed.
    pub(crate) fn newest_generation(&self) -> u32 {
        self.generation() - u32::from(self.closed)
    }

    /// The list of a thread that waits for the commit of a part's `generation`, or of the whole.
    pub(crate) fn waiters_for(&self, generation: Option<u32>) -> &Arc<Waiters> {
        let is_late = generation.is_none_or(|generation| generation > self.generation());
        match self.closed && is_late {
            true => &self.late_waiters,
            false => &self.waiters,
        }
    }

    /// Number of threads that wait for a commit.
    pub(crate) fn waiter_count(&self) -> u32 {
        self.waiters.count() + self.late_waiters.count()
    }

    /// A commit takes the threads that wait for it: all if it ends the transaction, which is to be let go of
    /// before the state lock is.
    pub(crate) fn take_waiters(&mut self, ends: bool) -> Vec<Arc<Waiters>> {
        if ends {
            return vec![self.waiters.clone(), self.late_waiters.clone()];
        }
        self.closed = false;
        let late = std::mem::take(&mut self.late_waiters);
        vec![std::mem::replace(&mut self.waiters, late)]
    }

    /// A commit takes its parts, `None` for all. Threads that wanted some of them while it was in
    /// progress wait for it, not for the next one: they wake.
    pub(crate) fn take_parts(&mut self, parts: Option<&PartSet>) -> ChangedParts {
        let unions = &mut self.transaction.lock_contents().parts;
        let Some(parts) = parts else { return unions.take_all() };
        let wanted_count = self.wanted.len();
        self.wanted.retain(|&part| !parts.contains(part));
        if self.wanted.len() < wanted_count {
            self.waiters.wake_all();
        }
        unions.take(parts)
    }

    /// Handles may start again, without a commit.
    pub(crate) fn unlock(&mut self) {
        self.closed = false;
        self.transaction.gate.open();
        self.wake_waiters();
    }

    /// Wakes all that wait, since what they wait for has changed.
    pub(crate) fn wake_waiters(&self) {
        self.waiters.wake_all();
        self.late_waiters.wake_all();
    }
}

/// Grant of a started handle.
pub(crate) struct Admitted {
    pub(crate) transaction: Arc<Transaction>,
    pub(crate) generation: u32,
    pub(crate) credits: u32,
}
