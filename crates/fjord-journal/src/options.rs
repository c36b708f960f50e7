//! How to open a journal. Owns no state.

use std::time::Duration;

use fjord_block::Device;
use fjord_format::jbd2::ChecksumVersion;
use fjord_format::types::BlockNo;

/// How to open a journal.
#[derive(Clone, Debug)]
pub struct JournalOptions {
    /// Flush the device where the order of the log requires it. Without it a power cut, though not
    /// a crash of the process, may corrupt the file system (`nobarrier`).
    pub barrier: bool,
    /// The file system has the 64bit feature, so the log must have it too.
    pub bit64: bool,
    /// Checksum version of the log from now on; `None` keeps the current one. Linux uses
    /// v3 for file systems with `metadata_csum` and none otherwise.
    pub checksum: Option<ChecksumVersion>,
    /// When a commit may follow another.
    pub pipeline: PipelineMode,
    /// How handles add to a transaction.
    pub lists: JournalLists,
    /// Which threads carry out the I/O of commits and checkpoints.
    pub io: JournalIo,
    /// Most blocks that one descriptor describes; `None` for as many as fit. Of a large commit a descriptor
    /// with its blocks is a piece, which one thread writes.
    pub descriptor_blocks_max: Option<usize>,
    /// Most waiting threads that are woken to help with the pieces of a commit; `None` for one less than the
    /// processors, since more would only take turns.
    pub helpers_max: Option<usize>,
    /// Keep a fast-commit area at the end of the journal (`s_num_fc_blks`), if there is space.
    pub fast_commit: bool,
    /// Largest transaction in log blocks; `None` for a third of the log.
    pub transaction_blocks_max: Option<u32>,
    /// The caller applies i-transactions that a crash left ([`Journal::take_pending`](crate::Journal::take_pending)). Without it,
    /// a journal with i-transactions is refused.
    pub replays_ijournal: bool,
    /// Callback of replay for each block before it is written.
    pub fit_replayed: Option<FitReplayed>,
    /// The block that replay writes when all others are durable.
    pub replayed_last: Option<BlockNo>,
    /// The time in commit blocks, since 1970, for reproducible images; `None` for that of the clock.
    pub commit_time: Option<Duration>,
}

/// When a commit may follow another (barrier-enabled I/O stack, section 4).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum PipelineMode {
    /// One at a time: a commit begins when the one before is durable.
    #[default]
    Serial,
    /// Dual-mode journaling: a commit begins when the one before is dispatched. Several are in
    /// flight, each with its own durability, and one flush settles all that it covers. Over a device
    /// that keeps no order, the log blocks of a commit are written while the one before is settled.
    Dual,
}

/// How handles add buffers, data and callbacks to the running transaction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum JournalLists {
    /// Under one lock, as JBD2 does (`j_list_lock`).
    Locked,
    /// Each with one atomic operation (parallel journaling, FAST '18).
    #[default]
    LockFree,
}

impl JournalLists {
    /// Both of them.
    pub const ALL: [JournalLists; 2] = [JournalLists::Locked, JournalLists::LockFree];

    /// As in the mount option `journal_lists`.
    pub fn name(self) -> &'static str {
        match self {
            JournalLists::Locked => "locked",
            JournalLists::LockFree => "lockfree",
        }
    }

    /// The one with this name.
    pub fn by_name(name: &str) -> Option<JournalLists> {
        JournalLists::ALL.into_iter().find(|lists| lists.name() == name)
    }
}

/// Which threads carry out the I/O of commits and checkpoints.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum JournalIo {
    /// One thread of the journal commits for all, and one thread at a time checkpoints, as with JBD2.
    Dedicated,
    /// Threads that would wait carry it out together (parallel journaling, FAST '18).
    #[default]
    Cooperative,
}

impl JournalIo {
    /// Both of them.
    pub const ALL: [JournalIo; 2] = [JournalIo::Dedicated, JournalIo::Cooperative];

    /// As in the mount option `journal_io`.
    pub fn name(self) -> &'static str {
        match self {
            JournalIo::Dedicated => "dedicated",
            JournalIo::Cooperative => "cooperative",
        }
    }

    /// The one with this name.
    pub fn by_name(name: &str) -> Option<JournalIo> {
        JournalIo::ALL.into_iter().find(|io| io.name() == name)
    }
}

/// Changes the content that replay is about to write to a block.
pub type FitReplayed = fn(&dyn Device, BlockNo, &mut [u8]);

impl Default for JournalOptions {
    fn default() -> JournalOptions {
        JournalOptions {
            barrier: true,
            bit64: false,
            checksum: None,
            pipeline: PipelineMode::default(),
            lists: JournalLists::default(),
            io: JournalIo::default(),
            descriptor_blocks_max: None,
            helpers_max: None,
            fast_commit: false,
            transaction_blocks_max: None,
            replays_ijournal: false,
            fit_replayed: None,
            replayed_last: None,
            commit_time: None,
        }
    }
}
