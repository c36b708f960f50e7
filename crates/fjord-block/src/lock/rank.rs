//! The ranks of all locks, in the order in which a thread may take them; the same table, with what
//! each lock guards, is in `docs/locking.md`.

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

    // Engine: over whole operations.
    /// `FsInner::resize_lock`.
    Resize = 110,
    /// `FsInner::rename_lock`.
    Rename = 120,
    /// `Inode::writeback`.
    InodeWriteback = 130,
    /// `Inode::state`.
    InodeState = 140,

    // Journal: over I/O.
    /// The commit lock.
    CommitLock = 210,
    /// The settle lock.
    SettleLock = 220,
    /// `Inner::checkpoint_lock`.
    Checkpoint = 230,
    /// `Areas::mark`.
    AreaMark = 240,
    /// `fast_commit::Area::stream`.
    FastCommitStream = 250,
    /// `Log::superblock`.
    LogSuperblock = 260,

    // Engine: under a handle.
    /// An open journal handle.
    Handle = 300,
    /// `OrphanTable::serial`.
    OrphanSerial = 310,
    /// `Groups::trim_lock`.
    Trim = 320,
    /// `Cell::lock` of a block group.
    Group = 330,
    /// `SuperState::raw`.
    Superblock = 340,

    // Journal: in memory.
    /// The ring of an area.
    AreaRing = 410,
    /// `Inner::state` of the journal.
    JournalState = 420,
    /// `Buffer` contents.
    BufferContents = 430,
    /// `Inner::live`.
    LiveBuffers = 440,
    /// `Transaction::contents`.
    TransactionContents = 450,
    /// `Buffer` state.
    BufferState = 460,
    /// `Commit::unsettled`.
    Unsettled = 470,
    /// `Inner::home_lock`.
    HomeWrites = 480,
    /// The queue of fast commits.
    FastCommitQueue = 490,
    /// `fast_commit::Waiting::outcome`.
    FastCommitOutcome = 491,
    /// `Areas::pending`.
    PendingITransactions = 492,

    // Block layer.
    /// `QuasiAsyncWrites::tickets`.
    QuasiAsyncWrites = 610,
    /// `DeferredWrites`.
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
    /// The gate of a file.
    Gate = 670,
    /// A request that no thread has claimed.
    FileJob = 680,
    /// First error of a request in several parts.
    RingError = 681,
    /// The pieces of a `MemDevice`.
    MemPieces = 690,
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
}

impl Rank {
    /// Its place in the order.
    pub fn number(self) -> u16 {
        self as u16
    }
}
