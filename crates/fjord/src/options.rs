//! Mount options.
//!
//! Owns the defaults. Invariant: every option has the default that an ext4 user
//! expects, and an option that the image cannot honour is refused at mount, not
//! ignored.

use std::time::Duration;

use fjord_journal::{JournalIo, JournalLists, PipelineMode};

use crate::attr::Timespec;
use crate::awake::LowLatency;
use crate::error::{Error, Result};

/// What a commit promises about file data (`data=` of ext4).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DataMode {
    /// Data is on the device before the metadata that points to it commits.
    #[default]
    Ordered,
    /// Data and metadata are written in any order.
    Writeback,
    /// Data goes through the journal too.
    Journal,
}

/// Which blocks an fsync commits, and so who can recover the image after a crash: fjord alone for
/// [`Ijournal`](Self::Ijournal), which images made with the defaults are mounted with; Linux and
/// e2fsck too for the others.
///
/// ```
/// use std::sync::Arc;
/// use fjord::{Fs, FsyncPolicyKind, MemDevice, MkfsOptions, MountOptions};
///
/// let device = Arc::new(MemDevice::new(16 << 20));
/// let options = MountOptions { fsync: FsyncPolicyKind::Compound, ..MountOptions::default() };
/// let fs = Fs::create_on(device, &MkfsOptions::default(), &options)?;
/// assert_eq!(fs.stats().fsync_policy, "compound");
/// assert_eq!(FsyncPolicyKind::from_name("compound"), Some(FsyncPolicyKind::Compound));
/// # fs.unmount()?;
/// # Ok::<(), fjord::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum FsyncPolicyKind {
    /// As the environment variable `FJORD_FSYNC` says; without it the finest that the image is
    /// made for: [`Ijournal`](Self::Ijournal) with areas, [`FastCommit`](Self::FastCommit) with
    /// the feature of that name, else [`Compound`](Self::Compound). Decided when it is mounted.
    #[default]
    Auto,
    /// The whole running transaction, as ext4 does. Choose this if Linux or e2fsck are to recover the
    /// image after a crash.
    Compound,
    /// The block groups that the file depends on.
    Group,
    /// The file's own changes, as ext4's fast commit logs them.
    FastCommit,
    /// The file alone, by an i-transaction after the log (iJournaling): one write for a small file.
    /// Needs an image with areas. After a crash only fjord recovers it; Linux and e2fsck refuse the
    /// image until then.
    Ijournal,
}

impl FsyncPolicyKind {
    /// All that a mount can have; [`Auto`](Self::Auto) becomes one of them.
    pub const ALL: &'static [FsyncPolicyKind] = &[
        FsyncPolicyKind::Compound,
        FsyncPolicyKind::Group,
        FsyncPolicyKind::FastCommit,
        FsyncPolicyKind::Ijournal,
    ];

    /// Its name on the command line and in statistics.
    pub fn name(self) -> &'static str {
        match self {
            FsyncPolicyKind::Auto => "auto",
            FsyncPolicyKind::Compound => "compound",
            FsyncPolicyKind::Group => "group",
            FsyncPolicyKind::FastCommit => "fast-commit",
            FsyncPolicyKind::Ijournal => "ijournal",
        }
    }

    /// The variable that `Auto` asks.
    const VARIABLE: &str = "FJORD_FSYNC";

    /// The policy of a name, `auto` among them.
    pub fn from_name(name: &str) -> Option<FsyncPolicyKind> {
        let mut all = FsyncPolicyKind::ALL.iter().copied().chain([FsyncPolicyKind::Auto]);
        all.find(|policy| policy.name() == name)
    }

    /// What the environment makes of `Auto`; may be `Auto` still.
    ///
    /// # Errors
    /// `Usage` if it names another policy than there are.
    pub(crate) fn or_from_environment(self) -> Result<FsyncPolicyKind> {
        if self != FsyncPolicyKind::Auto {
            return Ok(self);
        }
        let Some(name) = std::env::var_os(Self::VARIABLE) else { return Ok(self) };
        name.to_str().and_then(Self::from_name).ok_or_else(|| {
            let known: Vec<&str> = Self::ALL.iter().map(|policy| policy.name()).collect();
            let known = known.join(", ");
            Error::Usage(format!("{} is {name:?}; {known} or auto is expected", Self::VARIABLE))
        })
    }

    /// What `Auto` becomes on an image that has areas for i-transactions or for fast commits.
    pub fn or_for_image(self, has_areas: bool, has_fast_commits: bool) -> FsyncPolicyKind {
        match self {
            FsyncPolicyKind::Auto if has_areas => FsyncPolicyKind::Ijournal,
            FsyncPolicyKind::Auto if has_fast_commits => FsyncPolicyKind::FastCommit,
            FsyncPolicyKind::Auto => FsyncPolicyKind::Compound,
            named => named,
        }
    }
}

/// When a commit may follow another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CommitPipeline {
    /// As the environment variable `FJORD_PIPELINE` says (`serial` or `dual`); without it, serial.
    #[default]
    Auto,
    /// One at a time.
    Serial,
    /// As soon as the one before is dispatched ([`PipelineMode::Dual`]).
    Dual,
}

impl CommitPipeline {
    /// The variable that `Auto` reads.
    const VARIABLE: &str = "FJORD_PIPELINE";

    /// The pipeline with this name.
    pub fn by_name(name: &str) -> Option<CommitPipeline> {
        match name {
            "auto" => Some(CommitPipeline::Auto),
            "serial" => Some(CommitPipeline::Serial),
            "dual" => Some(CommitPipeline::Dual),
            _ => None,
        }
    }

    /// The mode of the journal.
    ///
    /// # Errors
    /// `Usage` if the environment names another one.
    pub(crate) fn resolve(self) -> Result<PipelineMode> {
        let named = match (self, std::env::var_os(Self::VARIABLE)) {
            (CommitPipeline::Auto, Some(name)) => {
                name.to_str().and_then(Self::by_name).ok_or_else(|| {
                    let variable = Self::VARIABLE;
                    Error::Usage(format!("{variable} is {name:?}; expected serial, dual or auto"))
                })?
            }
            (pipeline, _) => pipeline,
        };
        let is_dual = named == CommitPipeline::Dual;
        Ok(if is_dual { PipelineMode::Dual } else { PipelineMode::Serial })
    }
}

/// Who keeps the order of writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Scheduler {
    /// As the environment variable `FJORD_SCHEDULER` says (`epoch` or `direct`); without it, the
    /// default.
    #[default]
    Auto,
    /// The epoch scheduler ([`fjord_block::epoch`]).
    Epoch,
    /// The engine, by waiting and flushing.
    Direct,
}

impl Scheduler {
    /// What [`Scheduler::Auto`] stands for.
    const DEFAULT: Scheduler = Scheduler::Direct;
    /// The variable that `Auto` asks.
    const VARIABLE: &str = "FJORD_SCHEDULER";

    /// The scheduler with this name.
    pub fn by_name(name: &str) -> Option<Scheduler> {
        match name {
            "auto" => Some(Scheduler::Auto),
            "epoch" => Some(Scheduler::Epoch),
            "direct" => Some(Scheduler::Direct),
            _ => None,
        }
    }

    /// `Epoch` or `Direct`.
    ///
    /// # Errors
    /// `Usage` if the environment names another one.
    pub(crate) fn resolve(self) -> Result<Scheduler> {
        if self != Scheduler::Auto {
            return Ok(self);
        }
        let Some(name) = std::env::var_os(Self::VARIABLE) else { return Ok(Self::DEFAULT) };
        match name.to_str().and_then(Self::by_name) {
            Some(Scheduler::Auto) => Ok(Self::DEFAULT),
            Some(scheduler) => Ok(scheduler),
            None => Err(Error::Usage(format!(
                "{} is {name:?}; epoch, direct or auto is expected",
                Self::VARIABLE
            ))),
        }
    }
}

/// When reading a file updates its access time.
///
/// ```
/// use std::sync::Arc;
/// use fjord::{AtimeMode, Fs, MemDevice, MkfsOptions, MountOptions};
///
/// let device = Arc::new(MemDevice::new(16 << 20));
/// let options = MountOptions { atime: AtimeMode::Never, ..MountOptions::default() };
/// let fs = Fs::create_on(device, &MkfsOptions::default(), &options)?;
/// fs.write("/f", "content")?;
/// let before = fs.metadata("/f")?.accessed()?;
/// fs.read("/f")?;
/// assert_eq!(fs.metadata("/f")?.accessed()?, before);
/// # fs.unmount()?;
/// # Ok::<(), fjord::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AtimeMode {
    /// When it is older than mtime or ctime, or older than a day.
    #[default]
    Relatime,
    /// At each read.
    Strict,
    /// Never.
    Never,
}

/// How to open an image.
///
/// **After a crash, an image with the default policy must be recovered by fjord before Linux or
/// e2fsck take it:** by `fjord recover IMAGE`, or by opening it here. `fsync: Auto` stands for
/// [`FsyncPolicyKind::Ijournal`] on images made with the defaults; see [`Fs::open`](crate::Fs::open).
/// A program whose images Linux or e2fsck must be able to recover sets [`MountOptions::fsync`] to
/// [`FsyncPolicyKind::Compound`].
///
/// ```
/// use std::sync::Arc;
/// use fjord::{Fs, FsyncPolicyKind, MemDevice, MkfsOptions, MountOptions};
///
/// let device = Arc::new(MemDevice::new(16 << 20));
/// Fs::create_on(device.clone(), &MkfsOptions::default(), &MountOptions::default())?.unmount()?;
///
/// // To write, with crashes that Linux and e2fsck can recover, and a small cache.
/// let compound = MountOptions {
///     fsync: FsyncPolicyKind::Compound,
///     cache_size_bytes: 16 << 20,
///     ..MountOptions::default()
/// };
/// Fs::open_device(device.clone(), &compound)?.unmount()?;
///
/// // To look at it only.
/// let look = MountOptions { read_only: true, ..MountOptions::default() };
/// let fs = Fs::open_device(device, &look)?;
/// assert!(fs.write("/f", "").is_err());
/// # fs.unmount()?;
/// # Ok::<(), fjord::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountOptions {
    /// Write nothing, not even recovery; a dirty journal is then refused, unless
    /// `recover_before_read_only` or `no_load_journal` is set.
    pub read_only: bool,
    /// With `read_only`: recover an image that needs it first, as Linux does for `-o ro`. The journal
    /// is replayed and orphans are completed; nothing is written after that. `false` is the default:
    /// who only looks writes nothing. `fjord mount -o ro` sets it.
    pub recover_before_read_only: bool,
    /// With `read_only`: ignore a dirty journal instead of refusing it or replaying it. Nothing is
    /// written at all then.
    pub no_load_journal: bool,
    /// How long [`Fs::open`](crate::Fs::open) waits for an image that another process has locked,
    /// before it counts as in use: 1 s by default, since the lock of a killed process or of a mount
    /// that has just ended goes a moment later than they do. Zero does not wait.
    pub lock_timeout: Duration,
    /// Take an image on a cluster (`rbd:…`) from another host that has it: from then on that one can write
    /// nothing to it. Without it, an image in use is refused, and one whose holder has died is waited for.
    pub steal: bool,
    /// Data mode.
    pub data: DataMode,
    /// Fsync policy, and so who can recover the image after a crash; `Auto` is what the image is made
    /// for.
    pub fsync: FsyncPolicyKind,
    /// How the order of writes is kept. A device that keeps order by itself is used as it is.
    pub scheduler: Scheduler,
    /// When a commit may follow another.
    pub pipeline: CommitPipeline,
    /// How changes enter the running transaction. `Locked` is there to be measured.
    pub journal_lists: JournalLists,
    /// Which threads carry out the I/O of commits and checkpoints. `Dedicated`, which needs the serial pipeline,
    /// is there to be measured.
    pub journal_io: JournalIo,
    /// Most blocks that one descriptor in the log describes; `None` for as many as fit. Threads that write a commit
    /// together share it by descriptors.
    pub descriptor_blocks_max: Option<usize>,
    /// Most bytes of dirty file data that an i-transaction carries, so that an fsync is one
    /// write; larger data is written to its place first. At most one block counts always.
    pub inline_data_max_bytes: u64,
    /// Access time updates.
    pub atime: AtimeMode,
    /// Those of directories too.
    pub diratime: bool,
    /// Bytes of page and metadata cache together.
    pub cache_size_bytes: u64,
    /// Longest time a change waits in memory before the running transaction commits.
    pub commit_interval: Duration,
    /// Longest time dirty data waits in memory before it is written.
    pub writeback_interval: Duration,
    /// Send discards for freed blocks once their transaction has committed.
    pub discard: bool,
    /// Flush the device where durability needs it; `false` risks the image on power loss.
    pub barrier: bool,
    /// fsync and fdatasync put changes in order, as [`File::fbarrier`](crate::File::fbarrier) does, and make
    /// nothing durable. For programs that call them for order. Files and directories with the attribute
    /// `user.fjord.order_only` ask for it one by one. [`Fs::sync`](crate::Fs::sync) is durable always.
    pub order_only: bool,
    /// Extended attributes `user.*` and ACLs are honoured.
    pub acl: bool,
    /// Take the group of a new file from its directory always (`grpid`).
    pub grpid: bool,
    /// statfs(2) counts the blocks of the file system's own metadata among those that there are (`minixdf`).
    pub minix_df: bool,
    /// Who may use the reserved blocks besides root.
    pub resuid: Option<u32>,
    /// Which group may use the reserved blocks.
    pub resgid: Option<u32>,
    /// Delay block allocation until writeback.
    pub delalloc: bool,
    /// Keep idle processors from halting while fsyncs come in quick succession.
    pub low_latency: LowLatency,
    /// Start the engine's background threads (writeback, commit timer); without them
    /// only calls do work, which makes tests repeatable.
    pub background_threads: bool,
    /// Files may fill the image to the last block: nothing is kept for root, nor for metadata of
    /// data that is not allocated yet. An accepted write may then fail for lack of space at
    /// writeback, which fsync, sync and unmount report. For images that are filled once: warnings
    /// meant for mounts are logged as debug messages.
    pub fill_all: bool,
    /// Log damage that a read meets, besides returning it to the caller. A program that tells its user what
    /// the call returned says it twice otherwise.
    pub log_damage: bool,
    /// For reproducible images: all times that the file system sets itself (creation, change,
    /// mount) are this one, and generations of new inodes are derived from their numbers.
    pub fixed_time: Option<Timespec>,
}

impl MountOptions {
    /// Least memory of the caches; smaller values of `cache_size_bytes` count as this one.
    pub const CACHE_SIZE_MIN_BYTES: u64 = 8 << 20;
}

impl Default for MountOptions {
    fn default() -> Self {
        Self {
            read_only: false,
            recover_before_read_only: false,
            no_load_journal: false,
            lock_timeout: fjord_block::LOCK_TIMEOUT,
            steal: false,
            data: DataMode::default(),
            fsync: FsyncPolicyKind::default(),
            scheduler: Scheduler::default(),
            pipeline: CommitPipeline::default(),
            journal_lists: JournalLists::default(),
            journal_io: JournalIo::default(),
            descriptor_blocks_max: None,
            inline_data_max_bytes: 32 << 10,
            atime: AtimeMode::default(),
            diratime: true,
            cache_size_bytes: 256 << 20,
            commit_interval: Duration::from_secs(5),
            writeback_interval: Duration::from_secs(5),
            discard: false,
            barrier: true,
            order_only: false,
            acl: true,
            grpid: false,
            minix_df: false,
            resuid: None,
            resgid: None,
            delalloc: true,
            low_latency: LowLatency::default(),
            background_threads: true,
            fill_all: false,
            log_damage: true,
            fixed_time: None,
        }
    }
}
