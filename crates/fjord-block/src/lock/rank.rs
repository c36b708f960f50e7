//! The ranks of all locks, in the order in which a thread may take them; the same table, with what
//! each lock guards, is in `docs/locking.md`.

use super::held::Tag;

macro_rules! ranks {
    ($($(#[$doc:meta])* $name:ident = $number:literal,)*) => {
        /// Rank of a lock. A thread takes only locks of a higher rank than all it holds.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(u16)]
        pub enum Rank {
            $($(#[$doc])* $name = $number,)*
        }

        impl Rank {
            /// All ranks, lowest first.
            pub const ALL: &'static [Rank] = &[$(Rank::$name),*];
        }
    };
}

ranks! {
    // Tests.
    /// The switch for planted bugs, in tests.
    Planting = 10,

    // Program.
    /// `Signals::state`, held over a mount.
    Signals = 20,
    /// `Hidden` of a pending file.
    HiddenName = 21,

    // FUSE server.
    /// The lanes of a session.
    FuseLanes = 49,
    /// Channels to rings, until the workers start.
    FuseRings = 50,
    /// Worker threads of a session.
    FuseWorkers = 51,
    /// Which worker reads requests.
    FuseDuty = 52,
    /// The session's descriptor.
    FuseFd = 53,
    /// The number of the session's connection.
    FuseConnection = 54,
    /// The result of the unmount.
    FuseClosed = 55,
    /// A shard of the open files.
    FuseHandles = 56,
    /// A shard of the open files' counts, held over a notification of the kernel.
    FuseOpens = 57,
    /// The simulated kernel's texts.
    SimTexts = 58,
    /// The simulated cut.
    SimCut = 59,

    // Engine: over whole operations.
    /// `api::File::position`.
    FilePosition = 105,
    /// `FsInner::resize_lock`.
    Resize = 110,
    /// `FsInner::rename_lock`.
    Rename = 120,
    /// `Inode::writeback`.
    InodeWriteback = 130,
    /// `Inode::state`.
    InodeState = 140,
    /// `mmp::Held::block`.
    MmpBlock = 160,

    // Journal: over I/O.
    /// The commit lock.
    CommitLock = 210,
    /// The settle lock.
    SettleLock = 220,
    /// `Inner::checkpoint_lock`.
    Checkpoint = 230,
    /// `Inner::tail_lock`.
    CheckpointTail = 232,
    /// `Areas::mark`.
    AreaMark = 240,
    /// `Barriers::round`.
    BarrierRound = 245,
    /// `fast_commit::Area::stream`.
    FastCommitStream = 250,
    /// `Log::superblock`.
    LogSuperblock = 260,

    // Engine: under a handle.
    /// An open journal handle.
    Handle = 300,
    /// `Inode::state` of an inode that holds the value of an attribute.
    ValueState = 305,
    /// `OrphanTable::serial`.
    OrphanSerial = 310,
    /// `Slot::load` of the inode table.
    InodeLoad = 315,
    /// `Groups::trim_lock`.
    Trim = 320,
    /// `Cell::lock` of a block group.
    Group = 330,
    /// `SuperState::raw`.
    Superblock = 340,
    /// `Slot::load` of the metadata cache.
    MetaLoad = 350,

    // Journal: in memory.
    /// `CheckpointClaims::current`.
    CheckpointClaims = 403,
    /// The queue of commit requests.
    CommitRequests = 405,
    /// `Barriers::state`.
    Barriers = 408,
    /// The ring of an area.
    AreaRing = 410,
    /// `Inner::state` of the journal.
    JournalState = 420,
    /// `Buffer` contents.
    BufferContents = 430,
    /// A shard of `Inner::live`.
    LiveBuffers = 440,
    /// `Transaction::contents`.
    TransactionContents = 450,
    /// A shard of the metadata cache.
    MetaShard = 455,
    /// `CheckpointWrites::lock`.
    CheckpointWrites = 457,
    /// `Buffer` state.
    BufferState = 460,
    /// `Commit::unsettled`.
    Unsettled = 470,
    /// `CommitPieces::sent`.
    CommitPieces = 480,
    /// The queue of fast commits.
    FastCommitQueue = 490,
    /// `fast_commit::Waiting::outcome`.
    FastCommitOutcome = 491,
    /// `Areas::pending`.
    PendingITransactions = 492,

    // Engine: leaves.
    /// `Epochs::state`.
    Epochs = 509,
    /// `OrphanTable::state`.
    OrphanState = 510,
    /// A shard of `DirtyList`.
    DirtyList = 511,
    /// `Releases::leaving`.
    Releases = 512,
    /// A shard of `Carriers`.
    Carriers = 513,
    /// `Budget::spent`.
    Budget = 514,
    /// `Pace::out_count`.
    Pace = 515,
    /// `FreedTable::by_key`.
    Freed = 516,
    /// `FreedTable::discarding`.
    Discarding = 517,
    /// `ReplayHazards::stale_tails`.
    StaleTails = 518,
    /// `Room::full`.
    HostRoom = 519,
    /// `SuperState::uncommitted`.
    UncommittedSizes = 520,
    /// `GroupParts::places`.
    GroupPlaces = 521,
    /// `Zones::fixed`.
    Zones = 522,
    /// A shard of the inode table.
    InodeShard = 530,
    /// `PageMap::inner`.
    PageMap = 540,
    /// `PageLru::queue`.
    PageLru = 541,
    /// `Status::first_error`.
    FirstError = 550,
    /// `Events`.
    Events = 551,
    /// `Threads::joins`.
    ThreadJoins = 560,
    /// `Threads::signal`.
    ThreadSignal = 561,
    /// `mmp::Mmp::stop`.
    MmpStop = 562,
    /// `Awake::thread`.
    AwakeThread = 570,
    /// `Awake::state`.
    AwakeState = 571,

    // Block layer.
    /// Writes that `Gather` collects.
    Gather = 605,
    /// `QuasiAsyncWrites::tickets`.
    QuasiAsyncWrites = 610,
    /// A shard of `DeferredWrites`.
    DeferredWrites = 620,
    /// The epoch scheduler's state.
    EpochQueue = 630,
    /// The epoch scheduler's slot for unseen errors.
    EpochUnseen = 631,
    /// The rules of a `FaultPlan`.
    FaultRules = 640,
    /// The log of a `FaultDevice`.
    FaultLog = 641,
    /// The free space of a `FaultDevice`.
    FaultRoom = 642,
    /// The modelled device's state.
    SimDevice = 650,
    /// The batch of waiting flushes of a file.
    FileFlush = 660,
    /// The queues of a file's helper threads.
    FileHelpers = 661,
    /// The submission queue of a ring.
    RingSubmission = 662,
    /// The leader of a ring's waiters.
    RingLead = 663,
    /// Changes of a file's length.
    FileRoom = 664,
    /// A shard of what a file's helper threads leave to its submitters.
    FileLazy = 669,
    /// The gate of a file.
    Gate = 670,
    /// A request that no thread has claimed.
    FileJob = 680,
    /// First error of a request in several parts.
    RingError = 681,
    /// The pieces of a `MemDevice`.
    MemPieces = 690,
    /// Requests that librbd has.
    RbdRequests = 695,
    /// The inside of a `Ticket`.
    Ticket = 700,
    /// The buffers of a `ReadTicket`.
    ReadSlot = 710,
    /// The sticky error of a file.
    Sticky = 720,
    /// The lock file of an image.
    ImageLock = 730,
    /// A size class of the buffer pool.
    BufferPool = 740,
    /// Who has the memory of a FUSE ring's entry.
    FuseEntry = 745,
}

impl Rank {
    /// Its place in the order.
    pub fn number(self) -> u16 {
        self as u16
    }

    /// Checks that this thread may wait for a lock of this rank: for calls that do so now and then.
    #[inline]
    #[track_caller]
    pub fn check_order(self) {
        // Counters take a check for the begin of a wait.
        if cfg!(not(feature = "lock-stats")) {
            Tag::new(self).check(0);
        }
    }
}
