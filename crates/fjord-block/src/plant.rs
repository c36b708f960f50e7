//! Planted bugs: mistakes that the crash explorer must find, switched on by its tests.
//!
//! Owns [`Bug`], their names, and the switch. Without the feature `plant` [`planted`] is a
//! constant, and so is every branch that asks it. The names of all layers are here, in the lowest
//! crate with a bug, so that there is one switch.
//!
//! Invariant: one bug at a time in a process; a `Planting` owns the switch while it lives.

/// A mistake in the order of storage or in recovery.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Bug {
    /// Scheduler: the barrier of an epoch stays on the write that it came with.
    BarrierNotReassigned,
    /// Commit: the commit block is written before the blocks that it commits.
    CommitBeforeBlocks,
    /// Commit: no flush between the blocks and the commit block.
    NoFlushBeforeCommit,
    /// Commit: the commit block stays in the device's cache; the only flush was before it.
    CommitNotDurable,
    /// Commit: the file data of data=ordered is not waited for.
    DataAfterCommit,
    /// Commit: who waits for its end is told before the log is written; what it frees may be taken.
    ToldBeforeLogged,
    /// Commit: freed metadata blocks are not revoked.
    NoRevoke,
    /// Log: behind its end it goes on at its second block.
    WrapOffByOne,
    /// Checkpoint: the tail moves without a flush of what was written home.
    TailBeforeHome,
    /// Checkpoint: log space is used again before the superblock with the new tail is durable.
    TailNotDurable,
    /// Checkpoint: contents of the running transaction go home.
    RunningGoesHome,
    /// Recovery: revoke records are ignored.
    RevokesIgnored,
    /// Recovery: the first word of an escaped block stays zero.
    EscapeNotUndone,
    /// Recovery: blocks of any transaction are taken for the next one's.
    SequenceNotChecked,
    /// Recovery: checksums of logged blocks are not verified.
    ChecksumsNotVerified,
    /// Recovery: the log is marked empty before the replayed blocks are durable.
    ReplayNotFlushed,
    /// Recovery: the newest transaction is left out.
    LastCommitIgnored,
    /// Superblock: a change of it changes the checksum in its second sector, too.
    SuperblockInTwoSectors,
    /// Mount: the superblock does not say that the log is in use.
    LogNotAnnounced,
    /// Allocator: freed blocks are picked again before their transaction has committed.
    BlockReuse,
    /// Allocator: blocks are freed twice.
    FreedTwice,
    /// Allocator: an inode's number is free as soon as its last name is gone, while its deletion
    /// is still to come.
    InodeReuse,
    /// Allocator: freed blocks are discarded before their transaction has committed.
    DiscardBeforeCommit,
    /// Names: a new entry commits before the inode that it names.
    EntryBeforeInode,
    /// Names: a rename is two transactions.
    RenameInTwo,
    /// Orphans: a file without names is recorded only when it is closed.
    OrphanTooLate,
    /// Orphans: nothing is done about them at mount.
    OrphansNotProcessed,
    /// Files: the size is stored before delayed data has blocks.
    SizeBeforeData,
    /// Files: growth shows what a truncation left in the last block.
    StaleTail,
    /// Orphans: a truncation of several transactions that was cut short is taken for complete.
    TruncationNotCompleted,
    /// Attributes: freed blocks of a value's own inode are not revoked.
    ValueNotRevoked,
    /// Commit: a revoke block that is not the first holds one record.
    RevokeBlockCut,
    /// Files: the page whose end a truncation clears is forgotten.
    ShrunkPageForgotten,
    /// Files: growth does not clear the rest of the last block, which holds what a truncation left
    /// there if the power was cut before it was written.
    OldTailKept,
    /// Files: a shifted range is written to before the shift has committed.
    ShiftNotCommitted,
    /// Writeback: metadata follows data that was sent, but is not there yet.
    WritebackNotAwaited,
    /// Fsync: does no more than fdatasync.
    FsyncAsFdatasync,
    /// Fsync: fdatasync of a directory takes none of its names for data.
    DirectoryFdatasync,
    /// Fsync: a directory without changes of its own commits nothing.
    DirectoryFsyncAlone,
    /// Fsync: an overwrite in place is waited for, but not flushed.
    OverwriteNotFlushed,
    /// fbarrier and fdatabarrier do nothing.
    BarrierIgnored,
    /// Fast commit: no flush between the data and the records that add its blocks.
    FastCommitBeforeData,
    /// Fast commit: files with a block of attributes are logged.
    FastCommitAttributeBlock,
    /// Group: blocks written in place are not flushed where nothing commits.
    PartOverwriteNotFlushed,
    /// Fast commit: the log goes on at its front, where e2fsck does not look.
    LogGoesRound,
    /// Fast commit: the blocks stay in the device's cache.
    FastCommitNotDurable,
    /// Fast commit: behind a full commit the stream goes on where it was.
    FastCommitNotRestarted,
    /// Fast commit: counts of directories that are not home are taken for harmless.
    DirectoryCountNotHome,
    /// Fast commit: the area counts before its first block is written.
    StreamMarkedEarly,
    /// Fast commit: the full commit that ends the stream is written where recovery looks.
    StreamEndNotHidden,
    /// Fast commit: no flush between that commit and the superblock that makes it valid.
    StreamEndNotFlushed,
    /// Fast commit: what came before that commit is not brought home.
    StreamEndBeforeHome,
    /// Fast commit: the entry of a new file is not logged.
    FastCommitNoName,
    /// Fast commit: of the changed range only what is mapped is logged.
    FastCommitNoHoles,
    /// Recovery: fast commits of any transaction are taken for the next one's.
    FastCommitTidNotChecked,
    /// Recovery: the log is marked clean before its fast commits are applied.
    FastCommitMarkedClean,
    /// Recovery: fast commits are applied in several transactions.
    FastCommitInParts,
    /// Commit of parts: what shares a handle with them is left behind.
    PartsNotClosed,
    /// Commit of parts: a shared block is logged with the entries of all.
    EntriesOfAllParts,
    /// Commit of parts: entries are put into a version older than the last committed one.
    EntriesBeforeLastPart,
    /// Commit of parts: the file data that they refer to is not waited for.
    PartDataNotAwaited,
    /// Commit of parts: the next commit bears the same number in the log.
    PartSequenceReused,
    /// Commit of parts: what all parts freed is used again.
    FreedOfAllParts,
    /// i-journal: i-transactions count although their transaction has committed.
    ItransactionDead,
    /// i-journal: i-transactions are applied newest first.
    ItransactionOrder,
    /// i-journal: an area is written over while its i-transactions are live.
    ItransactionAreaReused,
    /// i-journal: large data written over in place is not flushed.
    ItransactionOverwriteNotFlushed,
    /// i-journal: a file that got another name is logged without it.
    ItransactionLinkNotCommitted,
    /// i-journal: a file whose block of attributes changed is logged without that.
    ItransactionAttributesNotCommitted,
    /// i-journal: an i-transaction stays in the device's cache.
    ItransactionNotDurable,
    /// i-journal: carried data is called superseded before what supersedes it is flushed.
    SupersededNotFlushed,
    /// i-journal: others rely on a new directory before the i-transaction with it is durable.
    EntryLoggedTooEarly,
    /// i-journal: an i-transaction shows blocks whose data is not flushed.
    ItransactionBeforeData,
    /// i-journal: the new directories above a file are left out.
    ItransactionNoParents,
    /// i-journal: changed blocks of the extent tree are left out.
    ItransactionNoNodes,
    /// i-journal: a name is taken from a file that lives on elsewhere.
    ItransactionNameTaken,
    /// i-journal: the journal is not marked before the first i-transaction.
    ItransactionNoMark,
    /// i-journal: data that was written over in place is brought back.
    InlineDataStale,
    /// i-journal: inline data is not written home.
    InlineDataNotReplayed,
    /// i-journal: a commit does not wait for what an i-transaction carries.
    InlineDataNotCommitted,
    /// i-journal: that recovery has begun is not written down.
    RecoveryNotMarked,
}

impl Bug {
    /// All of them.
    pub const ALL: [Bug; 81] = [
        Bug::BarrierNotReassigned,
        Bug::CommitBeforeBlocks,
        Bug::NoFlushBeforeCommit,
        Bug::CommitNotDurable,
        Bug::DataAfterCommit,
        Bug::ToldBeforeLogged,
        Bug::NoRevoke,
        Bug::WrapOffByOne,
        Bug::TailBeforeHome,
        Bug::TailNotDurable,
        Bug::RunningGoesHome,
        Bug::RevokesIgnored,
        Bug::EscapeNotUndone,
        Bug::SequenceNotChecked,
        Bug::ChecksumsNotVerified,
        Bug::ReplayNotFlushed,
        Bug::LastCommitIgnored,
        Bug::SuperblockInTwoSectors,
        Bug::LogNotAnnounced,
        Bug::BlockReuse,
        Bug::FreedTwice,
        Bug::InodeReuse,
        Bug::DiscardBeforeCommit,
        Bug::EntryBeforeInode,
        Bug::RenameInTwo,
        Bug::OrphanTooLate,
        Bug::OrphansNotProcessed,
        Bug::SizeBeforeData,
        Bug::StaleTail,
        Bug::TruncationNotCompleted,
        Bug::ValueNotRevoked,
        Bug::RevokeBlockCut,
        Bug::ShrunkPageForgotten,
        Bug::OldTailKept,
        Bug::ShiftNotCommitted,
        Bug::WritebackNotAwaited,
        Bug::FsyncAsFdatasync,
        Bug::DirectoryFdatasync,
        Bug::DirectoryFsyncAlone,
        Bug::OverwriteNotFlushed,
        Bug::BarrierIgnored,
        Bug::FastCommitBeforeData,
        Bug::LogGoesRound,
        Bug::FastCommitAttributeBlock,
        Bug::PartOverwriteNotFlushed,
        Bug::FastCommitNotDurable,
        Bug::FastCommitNotRestarted,
        Bug::DirectoryCountNotHome,
        Bug::StreamMarkedEarly,
        Bug::StreamEndNotHidden,
        Bug::StreamEndNotFlushed,
        Bug::StreamEndBeforeHome,
        Bug::FastCommitNoName,
        Bug::FastCommitNoHoles,
        Bug::FastCommitTidNotChecked,
        Bug::FastCommitMarkedClean,
        Bug::FastCommitInParts,
        Bug::PartsNotClosed,
        Bug::EntriesOfAllParts,
        Bug::EntriesBeforeLastPart,
        Bug::PartDataNotAwaited,
        Bug::PartSequenceReused,
        Bug::FreedOfAllParts,
        Bug::ItransactionDead,
        Bug::ItransactionOrder,
        Bug::ItransactionAreaReused,
        Bug::ItransactionOverwriteNotFlushed,
        Bug::ItransactionLinkNotCommitted,
        Bug::ItransactionAttributesNotCommitted,
        Bug::ItransactionNotDurable,
        Bug::SupersededNotFlushed,
        Bug::EntryLoggedTooEarly,
        Bug::ItransactionBeforeData,
        Bug::ItransactionNoParents,
        Bug::ItransactionNoNodes,
        Bug::ItransactionNameTaken,
        Bug::ItransactionNoMark,
        Bug::InlineDataStale,
        Bug::InlineDataNotReplayed,
        Bug::InlineDataNotCommitted,
        Bug::RecoveryNotMarked,
    ];
}

#[cfg(not(feature = "plant"))]
/// Whether the bug is switched on: never in this build.
#[inline(always)]
pub const fn planted(_: Bug) -> bool {
    false
}

#[cfg(feature = "plant")]
pub use switch::{Planting, planted};

#[cfg(feature = "plant")]
mod switch {
    use std::sync::atomic::{AtomicU8, Ordering};

    use parking_lot::{Mutex, MutexGuard};

    use super::Bug;

    const NONE: u8 = u8::MAX;
    /// The bug that is on; changed under `OWNER`.
    static ON: AtomicU8 = AtomicU8::new(NONE);
    static OWNER: Mutex<()> = Mutex::new(());

    /// Whether the bug is switched on.
    pub fn planted(bug: Bug) -> bool {
        ON.load(Ordering::Relaxed) == bug as u8
    }

    /// The switch, in the hands of one test; others wait for it.
    #[derive(Debug)]
    pub struct Planting {
        _owner: MutexGuard<'static, ()>,
    }

    impl Planting {
        /// Switches `bug` on, or none, until this is dropped.
        pub fn new(bug: Option<Bug>) -> Planting {
            let owner = OWNER.lock();
            ON.store(bug.map_or(NONE, |bug| bug as u8), Ordering::SeqCst);
            Planting { _owner: owner }
        }
    }

    impl Drop for Planting {
        fn drop(&mut self) {
            ON.store(NONE, Ordering::SeqCst);
        }
    }
}
