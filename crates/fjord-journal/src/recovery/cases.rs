//! The decision table of recovery, as code: one [`Case`] per row.
//!
//! Invariant: every branch of the scan names its row, and the test of the table fails if a row is
//! never reached. The conditions of the rows are in [`super::decide`].

use crate::error::JournalError;

/// Consequence of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// Nothing to replay.
    Nothing,
    /// The scan continues.
    Continue,
    /// The log ends here; complete transactions before it are replayed.
    End,
    /// The block is not written.
    Skip,
    /// An error; nothing was written.
    Refuse,
}

macro_rules! cases {
    ($($number:literal $name:ident $outcome:ident $reason:literal;)*) => {
        /// A row of the decision table.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u8)]
        pub enum Case {
            $(
                #[doc = $reason]
                $name = $number,
            )*
        }

        impl Case {
            /// All rows, in order.
            pub const ALL: &[Case] = &[$(Case::$name),*];

            /// The row's number, as in `docs/on-disk.md`.
            pub fn number(self) -> u8 {
                self as u8
            }

            /// Its consequence.
            pub fn outcome(self) -> Outcome {
                match self {
                    $(Case::$name => Outcome::$outcome,)*
                }
            }

            /// Finding, and reason for the consequence.
            pub fn reason(self) -> &'static str {
                match self {
                    $(Case::$name => $reason,)*
                }
            }
        }
    };
}

cases! {
    1 Clean Nothing
    "s_start is 0: the journal was closed cleanly, whatever the log's blocks hold.";
    2 EmptyLog Nothing
    "s_start is set, but transaction s_sequence does not stand there: the writer stopped before its first commit.";
    3 BadSuperblock Refuse
    "Magic number, version or checksum of the superblock is wrong: nothing in it can be believed.";
    4 UnknownFeature Refuse
    "An unknown incompatible feature, or a shared external journal: blocks may mean something else.";
    5 BadGeometry Refuse
    "Block size, s_maxlen, s_first or s_start contradict the file system or each other.";
    6 VersionOne Continue
    "A version 1 superblock: the fields from 0x24 on are undefined and count as no features.";
    7 ErrorRecorded Continue
    "s_errno is set: the log is still good up to the abort; the file system is marked by the caller.";
    8 ReadError Refuse
    "A log block cannot be read: what it held is unknown, and guessing that the log ends would lose transactions.";
    9 NoHeader End
    "No magic number where a header must stand: the log was never written this far.";
    10 StaleSequence End
    "A header with another transaction ID: a block of an earlier lap (or a later one that never got its place).";
    11 UnknownBlockType End
    "A header with a block type that does not belong into a log ends it, as in Linux.";
    12 TornTransaction End
    "Blocks of a transaction without its commit block: the crash came first, so it never happened.";
    13 Wrapped Continue
    "The log goes on at s_first after its last block, also between a descriptor and its blocks.";
    14 WholeLap Refuse
    "The walk has read as many blocks as the log has without an end, and checksums or a commit block of the transaction vouch for its tags: only a forged log does that.";
    15 BadDescriptorTorn End
    "Wrong checksum of a descriptor or revoke block, and the log has no commit block of its transaction: it was being written.";
    16 BadDescriptorStale End
    "Wrong checksum of a descriptor or revoke block, and its commit is older than the one before: left by another journal.";
    17 BadDescriptorCommitted Refuse
    "Wrong checksum of a descriptor or revoke block of a committed transaction: the flush before the commit excludes a crash.";
    18 PartialCommitBlock Continue
    "The commit block's checksum holds if all after its first 64 bytes is zero: only its first sector arrived, which is all of it.";
    19 CommitWithoutChecksum Continue
    "Checksum v1 with type and size 0: written before the feature was switched on.";
    20 BadCommitStale End
    "Wrong commit checksum, and the block is older than the commit before: left by another journal.";
    21 BadCommit Refuse
    "Wrong commit checksum without async commit: the block is written alone after a flush. Linux replays the transactions before, then refuses.";
    22 AsyncCommitTorn End
    "Async commit, a wrong checksum anywhere in the last transaction: its commit block overtook its blocks. Linux refuses, unless v1 or the commit block's own checksum tells.";
    23 AsyncCommitCorrupt Refuse
    "Async commit, a wrong checksum, and a later transaction is committed: that one's flush covered this one.";
    24 BadDataChecksum Refuse
    "Wrong checksum of a block that would be replayed, in a committed transaction. Linux replays the others, then refuses.";
    25 Revoked Skip
    "A revoke of the same or a later transaction names the block: it was freed and may be data by now.";
    26 RevokedBefore Continue
    "A revoke of an earlier transaction does not concern this copy: the block is metadata again.";
    27 Superseded Skip
    "A later transaction holds a newer copy of the block: only that one is written.";
    28 Escaped Continue
    "The tag says that the first word was the magic number: it is put back.";
    29 OutsideDevice Refuse
    "The block's home lies past the end of the device.";
    30 InsideJournal Refuse
    "The block's home is the journal itself: replaying it would destroy what is being replayed.";
    31 BadRevokeCount Refuse
    "A revoke block of a committed transaction claims more bytes than it has.";
    32 NoFastCommit Continue
    "The fast-commit area has no complete fast commit that follows the last transaction.";
    33 FastCommit Continue
    "The fast-commit area holds complete fast commits of the transaction that would come next: the caller is handed their records and applies them as that transaction.";
    34 Complete Continue
    "Descriptors, blocks and commit block are whole: the transaction is replayed.";
    35 BadFastCommit Refuse
    "Fast commits of the transaction that would come next bear unknown features: dropping them would lose fsynced changes.";
    36 TornLap End
    "The walk has read as many blocks as the log has, by tags without a checksum, and the log has no commit block of their transaction: the descriptor was being written.";
}

/// A refusal and its row.
#[derive(Clone, Debug)]
pub(crate) struct Refusal {
    pub(crate) case: Case,
    pub(crate) error: JournalError,
}
