//! Planted bugs: deliberate mistakes that the crash explorer, or the model check of the commit
//! pipeline, must find, switched on by their tests.
//!
//! Owns [`Bug`], their names, and the switch. Without the feature `plant`, [`planted`] is a
//! constant, so its branches are removed. The names for all layers are here, in the lowest crate
//! with a bug, so that there is one switch.
//!
//! Invariant: one bug at a time in a process; a `Planting` with a bug owns the switch while it lives,
//! those without one share it.

macro_rules! bugs {
    ($($(#[$list_doc:meta])* $list:ident { $($(#[$doc:meta])* $name:ident,)* })*) => {
        /// A mistake in the order of storage, in recovery, or of threads.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Bug {
            $($($(#[$doc])* $name,)*)*
        }

        impl Bug {
            $($(#[$list_doc])* pub const $list: &'static [Bug] = &[$(Bug::$name),*];)*
        }
    };
}

bugs! {
    /// Mistakes that an image after a power cut shows, or a single thread.
    ALL {
        /// Scheduler: the barrier of an epoch stays on the write that it was submitted with.
        BarrierNotReassigned,
        /// Commit: the commit block is written before the blocks that it commits.
        CommitBeforeBlocks,
        /// Commit: no flush between the blocks and the commit block.
        NoFlushBeforeCommit,
        /// Commit: the commit block stays in the device's cache; the only flush is before it.
        CommitNotDurable,
        /// Commit: the superblock with the start of the log is not ordered before the commit block.
        LogStartNotOrdered,
        /// Commit: does not wait for ordered data.
        DataAfterCommit,
        /// Cooperative commit: pieces begin where the blocks of revokes do.
        PiecesOverRevokes,
        /// Cooperative commit: the writes of pieces are not waited for before the flush.
        PiecesNotAwaited,
        /// Commit: waiters and callbacks run before the log is written; freed blocks may be reused.
        ToldBeforeLogged,
        /// Commit: freed metadata blocks are not revoked.
        NoRevoke,
        /// Log: wraps to its second block.
        WrapOffByOne,
        /// Checkpoint: the tail moves without a flush of the checkpoint writes.
        TailBeforeHome,
        /// Checkpoint: log space is reused before the superblock with the new tail is durable.
        TailNotDurable,
        /// Checkpoint: writes contents of the running transaction.
        RunningGoesHome,
        /// Recovery: revoke records are ignored.
        RevokesIgnored,
        /// Recovery: the first word of an escaped block stays zero.
        EscapeNotUndone,
        /// Recovery: the transaction ID of blocks is not checked.
        SequenceNotChecked,
        /// Recovery: checksums of logged blocks are not verified.
        ChecksumsNotVerified,
        /// Recovery: the log is marked empty before the replayed blocks are durable.
        ReplayNotFlushed,
        /// Recovery: the newest transaction is not replayed.
        LastCommitIgnored,
        /// Superblock: a change also updates the checksum, which is in the second sector.
        SuperblockInTwoSectors,
        /// Mount: the superblock does not get `needs_recovery`.
        LogNotAnnounced,
        /// Allocator: freed blocks are reused before their transaction has committed.
        BlockReuse,
        /// Allocator: blocks are freed twice.
        FreedTwice,
        /// Allocator: an inode number is free as soon as the last name is removed, before the deletion.
        InodeReuse,
        /// Allocator: freed blocks are discarded before their transaction has committed.
        DiscardBeforeCommit,
        /// Names: a new entry commits before the inode that it names.
        EntryBeforeInode,
        /// Names: a rename is two transactions.
        RenameInTwo,
        /// Orphans: a file without a name is recorded only when it is closed.
        OrphanTooLate,
        /// Orphans: ignored at mount.
        OrphansNotProcessed,
        /// Files: the size is stored before delayed data is allocated.
        SizeBeforeData,
        /// Files: growth exposes old data after the end in the last block.
        StaleTail,
        /// Orphans: an interrupted truncation of several transactions is taken for complete.
        TruncationNotCompleted,
        /// Attributes: freed blocks of a value inode are not revoked.
        ValueNotRevoked,
        /// Commit: a revoke block after the first holds one record only.
        RevokeBlockCut,
        /// Files: the page that a truncation zeroes partly is not written.
        ShrunkPageForgotten,
        /// Files: growth does not zero the rest of the last block, which has old data if a power cut
        /// lost the zeroing of a truncation.
        OldTailKept,
        /// Files: data is written to a shifted range before the shift has committed.
        ShiftNotCommitted,
        /// Writeback: metadata is committed after submission of the data, not after its transfer.
        WritebackNotAwaited,
        /// Writeback: of a request with the data of several files, that of the second is left out.
        NeighbourForgotten,
        /// Fsync: does only what fdatasync does.
        FsyncAsFdatasync,
        /// Fsync: fdatasync of a directory ignores changes of its entries.
        DirectoryFdatasync,
        /// Fsync: a directory whose inode did not change commits nothing.
        DirectoryFsyncAlone,
        /// Fsync: an overwrite is waited for, but not flushed.
        OverwriteNotFlushed,
        /// fbarrier and fdatabarrier do nothing.
        BarrierIgnored,
        /// Fast commit: no flush between data and the records that add its blocks.
        FastCommitBeforeData,
        /// Fast commit: files with an attribute block are logged.
        FastCommitAttributeBlock,
        /// Group: overwritten data is not flushed if nothing commits.
        PartOverwriteNotFlushed,
        /// Fast commit: the log wraps, where e2fsck does not look.
        LogGoesRound,
        /// Fast commit: the blocks stay in the device's cache.
        FastCommitNotDurable,
        /// Fast commit: the stream continues at its old position after a full commit.
        FastCommitNotRestarted,
        /// Fast commit: link counts of directories that are not checkpointed are ignored.
        DirectoryCountNotHome,
        /// Fast commit: the area is valid before its first block is written.
        StreamMarkedEarly,
        /// Fast commit: the full commit that ends the stream is written where recovery looks.
        StreamEndNotHidden,
        /// Fast commit: no flush between that commit and the superblock that makes it valid.
        StreamEndNotFlushed,
        /// Fast commit: older transactions are not checkpointed before that commit.
        StreamEndBeforeHome,
        /// Fast commit: the entry of a new file is not logged.
        FastCommitNoName,
        /// Fast commit: only mapped blocks of the changed range are logged.
        FastCommitNoHoles,
        /// Recovery: the transaction ID of fast commits is not checked.
        FastCommitTidNotChecked,
        /// Recovery: the log is marked clean before its fast commits are applied.
        FastCommitMarkedClean,
        /// Recovery: fast commits are applied in several transactions.
        FastCommitInParts,
        /// Partial commit: parts that share a handle are not included.
        PartsNotClosed,
        /// Partial commit: a shared block is logged with the entries of all parts.
        EntriesOfAllParts,
        /// Partial commit: entries are copied into a version older than the last committed one.
        EntriesBeforeLastPart,
        /// Partial commit: does not wait for ordered data.
        PartDataNotAwaited,
        /// Partial commit: the next commit has the same sequence in the log.
        PartSequenceReused,
        /// Partial commit: blocks freed by all parts are reused.
        FreedOfAllParts,
        /// i-journal: i-transactions are applied although their transaction has committed.
        ItransactionDead,
        /// i-journal: i-transactions are applied newest first.
        ItransactionOrder,
        /// i-journal: live i-transactions are overwritten.
        ItransactionAreaReused,
        /// i-journal: large overwritten data is not flushed.
        ItransactionOverwriteNotFlushed,
        /// i-journal: a new name of a file is not logged.
        ItransactionLinkNotCommitted,
        /// i-journal: a changed attribute block of a file is not logged.
        ItransactionAttributesNotCommitted,
        /// i-journal: an i-transaction stays in the device's cache.
        ItransactionNotDurable,
        /// i-journal: carried data is marked superseded before the newer data is flushed.
        SupersededNotFlushed,
        /// i-journal: other i-transactions depend on a new directory before its own is durable.
        EntryLoggedTooEarly,
        /// i-journal: an i-transaction refers to blocks whose data is not flushed.
        ItransactionBeforeData,
        /// i-journal: new parent directories of a file are not logged.
        ItransactionNoParents,
        /// i-journal: changed blocks of the extent tree are not logged.
        ItransactionNoNodes,
        /// i-journal: the removal of one name deletes a file with other names.
        ItransactionNameTaken,
        /// i-journal: the ijournal mark is not set before the first i-transaction.
        ItransactionNoMark,
        /// i-journal: recovery restores data that was overwritten since.
        InlineDataStale,
        /// i-journal: recovery does not write inline data.
        InlineDataNotReplayed,
        /// i-journal: a commit does not wait for deferred writes of carried data.
        InlineDataNotCommitted,
        /// i-journal: the start of a recovery is not recorded.
        RecoveryNotMarked,
        /// Barriers: recovery applies i-transactions behind a barrier that is missing.
        BarrierGapAccepted,
        /// Barriers: the journal does not tell recovery that i-transactions come behind barriers.
        BarriersNotMarked,
        /// Barriers: an i-transaction does not name the last barrier before it.
        LastBarrierNotNamed,
        /// Barriers: numbers count anew after a flush, within the same transaction.
        BarrierCountLost,
        /// Barriers: those that are submitted together count each by itself.
        OpenBarriersCountAlone,
        /// Barriers: they count as durable when they are written, without a flush.
        BarriersNotFlushed,
        /// Barriers: one that needs a flush of earlier data first does not wait for it.
        HeldBarrierSentAtOnce,
        /// Barriers: data in place does not wait for those before it.
        DataOvertakesBarriers,
        /// Barriers: carried data goes home before the barriers before it are durable.
        CarriedDataOvertakesBarriers,
        /// Barriers: one does not carry the data that the file got since the last one.
        BarrierWithoutData,
        /// Barriers: FUA of an i-transaction is taken for a flush of the barriers before it.
        FuaCoversBarriers,
        /// Barriers: an fsync of what a barrier has logged does not make it durable.
        FsyncTrustsBarriers,
        /// `data=journal`: data enters a transaction when it is written back, not in the call that writes it.
        JournaledDataLate,
        /// Dual: callbacks of the newest commit of a round are called before those of older ones.
        LaterToldFirst,
        /// Dual: callbacks are called when a commit is dispatched, so freed blocks are reused in flight.
        ToldWhenDispatched,
        /// Dual: a round publishes its commits before the flush.
        ToldBeforeFlush,
        /// Dual: a round retires commits that were dispatched after its flush began.
        RoundJoinedLate,
        /// Dual: a round retires commits whose commit blocks were written after its flush.
        CommitBlockNotFlushed,
        /// Dual: a round writes the commit blocks before it flushes the log blocks.
        CommitBlockBeforeFlush,
        /// Dual: a commit that settles drops newer frozen versions of its buffers.
        NewerVersionDropped,
        /// Dual: the versions of a round are queued for checkpoints newest first.
        RetiredNewestFirst,
        /// Dual: the failure of a commit is not told to those behind it.
        LaterNotTold,
        /// Dual: the commit block of a failed commit stays on the device.
        FailedNotTakenBack,
        /// Dual: the log restarts at its first block while commits are in flight.
        LogRestartsInFlight,
        /// Dual: commits in flight are checkpointed.
        CheckpointInFlight,
        /// Dual: the tail moves past commits in flight.
        TailPastInFlight,
        /// Dual: parts count as durable while their commit is in flight.
        PartsToldInFlight,
        /// Dual: only the data of the oldest commit of a round is waited for.
        LaterDataNotAwaited,
    }
    /// Mistakes that only an interleaving of threads shows; the model check of the journal finds
    /// them.
    RACES {
        /// Roles: the settle lock is released without waking those that wait for it.
        SettleLockWakesNobody,
        /// Roles: a thread that found the settle lock taken sleeps without looking again, in which
        /// time the lock may have become free.
        SleepsWithoutLooking,
        /// Dispatch: the commit lock is released before the commit is marked as dispatched.
        CommitLockReleasedEarly,
        /// Dispatch: threads that wait for a commit are not woken when the log blocks of the one
        /// before are durable.
        FollowerNotWoken,
        /// Dispatch: a commit is dispatched while another one has log blocks that no flush covers.
        DispatchedUnflushed,
        /// Roles: the settle lock is offered to a thread that waits for a commit which another
        /// thread settles, and which goes on without it.
        OfferLost,
        /// Settle: the FUA of one commit of a round also retires those behind it.
        FuaCoversLater,
        /// Settle: a commit block is written, and its commit retires, before the one before it is
        /// durable.
        LastWriteOvertaken,
        /// Settle: a commit is published before its callbacks have been called.
        CommittedBeforeCallbacks,
        /// Partial commit: its parts leave the running transaction before the commit is in the
        /// pipeline.
        PartsLeaveEarly,
        /// Late joiners: the end of a commit does not wake callers that were too few to commit.
        EndWakesNobody,
        /// Handles: the last one to stop does not wake the commit that waits for it.
        LastHandleWakesNobody,
        /// Handles: one starts while a commit has locked the transaction.
        HandleDuringFreeze,
        /// Requests: a thread that has served one does not look at the queue again.
        QueueNotLookedAt,
        /// Errors: threads that wait to start a handle are not woken when the journal stops.
        StopUnheard,
        /// A transaction: of two buffers that join at a time, one does not get on the list.
        InsertLost,
        /// A transaction: what handles have added is gathered when it is locked, not when they have stopped.
        GatheredEarly,
        /// Cooperative commit: two threads claim the same piece, so that nobody writes the next one.
        PieceClaimedTwice,
        /// Cooperative commit: the commit block follows before the pieces of other threads have been sent.
        CommitBeforeLastPiece,
        /// Cooperative commit: a thread that has sent a piece does not wake the one that waits for it.
        PieceEndWakesNobody,
        /// Checkpoint: a commit counts as written home when its last batch is, whatever other threads write.
        BatchOfOthersUncounted,
        /// Checkpoint: a thread writes a version home while another one writes an older one of the block.
        TwoHomeWrites,
        /// Checkpoint: the end of a batch does not wake threads that have none left to claim.
        BatchEndWakesNobody,
        /// The table of live buffers: one that a handle has just joined is removed, since it was clean before.
        BufferLostWhileFetched,
    }
    /// Mistakes that the model check finds, without a race, and no image shows.
    RULES {
        /// A transaction: the freeze takes a buffer that has left because its block was freed.
        RemovedBufferWritten,
        /// Checkpoint: a commit counts as written home before its last batch is claimed.
        HomeBeforeLastBatch,
    }
}

#[cfg(not(feature = "plant"))]
/// Whether the bug is switched on: never in this build.
#[inline(always)]
pub const fn planted(_: Bug) -> bool {
    false
}

#[cfg(not(feature = "plant"))]
/// Whether any bug is switched on: never in this build.
#[inline(always)]
pub const fn any_planted() -> bool {
    false
}

#[cfg(feature = "plant")]
pub use switch::{Planting, any_planted, planted};

#[cfg(feature = "plant")]
mod switch {
    use std::sync::atomic::{AtomicU8, Ordering};

    use crate::lock::{Rank, RwLock, RwLockReadGuard, RwLockWriteGuard};

    use super::Bug;

    const NONE: u8 = u8::MAX;
    /// The bug that is on; changed under `OWNER`.
    static ON: AtomicU8 = AtomicU8::new(NONE);
    static OWNER: RwLock<()> = RwLock::new(Rank::Planting, ());

    /// Whether the bug is switched on.
    pub fn planted(bug: Bug) -> bool {
        ON.load(Ordering::Relaxed) == bug as u8
    }

    /// Whether any bug is switched on. Assertions that would catch it are off then.
    pub fn any_planted() -> bool {
        ON.load(Ordering::Relaxed) != NONE
    }

    /// The switch, owned by one test, or off and shared by several; others wait for it.
    #[derive(Debug)]
    pub enum Planting {
        /// A bug is on.
        On(RwLockWriteGuard<'static, ()>),
        /// None is.
        Off(RwLockReadGuard<'static, ()>),
    }

    impl Planting {
        /// Switches `bug` on, or none, until this is dropped.
        pub fn new(bug: Option<Bug>) -> Planting {
            let Some(bug) = bug else { return Planting::Off(OWNER.read()) };
            let owner = OWNER.write();
            ON.store(bug as u8, Ordering::SeqCst);
            Planting::On(owner)
        }
    }

    impl Drop for Planting {
        fn drop(&mut self) {
            if let Planting::On(_) = self {
                ON.store(NONE, Ordering::SeqCst);
            }
        }
    }
}
