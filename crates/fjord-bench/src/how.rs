//! How fjord works as a target. Owns the words after a target's name.

use std::time::Duration;

use fjord::awake::LowLatency;
use fjord::{
    CommitPipeline, DataMode, FsyncPolicyKind, JournalIo, JournalLists, MountOptions, Scheduler,
};

use crate::error::{BenchError, Result};

/// How fjord is asked to work, where not by default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct How {
    /// The fsync policy.
    pub policy: Option<FsyncPolicyKind>,
    /// Over the epoch scheduler.
    pub epoch: bool,
    /// Commits in dual mode, which needs the epoch scheduler.
    pub dual: bool,
    /// Changes enter a transaction under a lock.
    pub locked_lists: bool,
    /// One thread of the journal commits for all.
    pub dedicated: bool,
    /// File data goes through the journal.
    pub data_journal: bool,
    /// Seconds after which changes commit by themselves.
    pub commit_s: Option<u32>,
    /// Idle processors halt, also while calls come in quick succession.
    pub halts: bool,
    /// On a modelled device itself, in this process and with its barrier command, instead of the
    /// file that stands for it.
    pub native: bool,
    /// Sync calls give order only (`fbarrier`, `fdatabarrier`; on a mount the option `order_only`).
    pub order: bool,
    /// A file system for each thread, side by side on the device; in the figures of parallel journaling.
    pub separate: bool,
    /// Requests come over io_uring, or over /dev/fuse; in a mount.
    pub io_uring: Option<bool>,
}

const EPOCH: &str = "epoch";
const DUAL: &str = "dual";
const LOCKED: &str = "locked";
const DEDICATED: &str = "dedicated";
const DATA_JOURNAL: &str = "data-journal";
/// With a number of seconds behind it.
const COMMIT: &str = "commit=";
const HALTS: &str = "nolow_latency";
const NATIVE: &str = "native";
const ORDER: &str = "order";
const SEPARATE: &str = "separate";
const IO_URING: &str = "io_uring";
const NO_IO_URING: &str = "noio_uring";

impl How {
    /// The defaults.
    pub(crate) const DEFAULT: How = How {
        policy: None,
        epoch: false,
        dual: false,
        locked_lists: false,
        dedicated: false,
        data_journal: false,
        commit_s: None,
        halts: false,
        native: false,
        order: false,
        separate: false,
        io_uring: None,
    };

    /// An fsync policy, and the defaults.
    pub fn with_policy(policy: FsyncPolicyKind) -> How {
        How { policy: Some(policy), ..How::default() }
    }

    /// Takes the words after a target's name.
    pub(crate) fn from_words<'a>(words: impl Iterator<Item = &'a str>) -> Result<How> {
        let mut how = How::default();
        for word in words {
            match word {
                EPOCH => how.epoch = true,
                DUAL => how.dual = true,
                LOCKED => how.locked_lists = true,
                DEDICATED => how.dedicated = true,
                DATA_JOURNAL => how.data_journal = true,
                HALTS => how.halts = true,
                NATIVE => how.native = true,
                ORDER => how.order = true,
                SEPARATE => how.separate = true,
                IO_URING => how.io_uring = Some(true),
                NO_IO_URING => how.io_uring = Some(false),
                other => match other.strip_prefix(COMMIT) {
                    Some(seconds) => how.commit_s = Some(seconds_from(seconds)?),
                    None => how.policy = Some(policy_from_name(other)?),
                },
            }
        }
        Ok(how)
    }

    /// Options of the engine inside this process.
    pub(crate) fn engine_options(self) -> MountOptions {
        let default = MountOptions::default();
        MountOptions {
            fsync: self.policy.unwrap_or(default.fsync),
            scheduler: if self.epoch { Scheduler::Epoch } else { default.scheduler },
            pipeline: if self.dual { CommitPipeline::Dual } else { default.pipeline },
            journal_lists: match self.locked_lists {
                true => JournalLists::Locked,
                false => default.journal_lists,
            },
            journal_io: if self.dedicated { JournalIo::Dedicated } else { default.journal_io },
            data: if self.data_journal { DataMode::Journal } else { default.data },
            commit_interval: match self.commit_s {
                Some(seconds) => Duration::from_secs(seconds.into()),
                None => default.commit_interval,
            },
            low_latency: if self.halts { LowLatency::Never } else { default.low_latency },
            ..default
        }
    }

    /// The same as options of `fjord mount`.
    pub(crate) fn mount_words(self) -> Vec<String> {
        let policy = self.policy.map(|policy| format!("fsync={}", policy.name()));
        let epoch = self.epoch.then(|| "scheduler=epoch".into());
        let dual = self.dual.then(|| "pipeline=dual".into());
        let lists = self.locked_lists.then(|| "journal_lists=locked".into());
        let io = self.dedicated.then(|| "journal_io=dedicated".into());
        let data = self.data_journal.then(|| "data=journal".into());
        let halts = self.halts.then(|| HALTS.into());
        let commit = self.commit_s.map(|seconds| format!("{COMMIT}{seconds}"));
        // There programs call fsync.
        let order = self.order.then(|| "order_only".into());
        let rings = self.io_uring_word().map(String::from);
        let words = [policy, epoch, dual, lists, io, data, commit, halts, order, rings];
        words.into_iter().flatten().collect()
    }

    fn io_uring_word(self) -> Option<&'static str> {
        self.io_uring.map(|rings| if rings { IO_URING } else { NO_IO_URING })
    }

    /// A target's name and the words that give this back.
    pub(crate) fn name(self, target: &str) -> String {
        let epoch = self.epoch.then_some(EPOCH);
        let dual = self.dual.then_some(DUAL);
        let locked = self.locked_lists.then_some(LOCKED);
        let dedicated = self.dedicated.then_some(DEDICATED);
        let data_journal = self.data_journal.then_some(DATA_JOURNAL);
        let halts = self.halts.then_some(HALTS);
        let native = self.native.then_some(NATIVE);
        let order = self.order.then_some(ORDER);
        let separate = self.separate.then_some(SEPARATE);
        let policy = self.policy.map(FsyncPolicyKind::name);
        let commit = self.commit_s.map(|seconds| format!("{COMMIT}{seconds}"));
        let words = [
            policy,
            epoch,
            dual,
            locked,
            dedicated,
            data_journal,
            commit.as_deref(),
            halts,
            native,
            order,
            separate,
            self.io_uring_word(),
        ];
        std::iter::once(target).chain(words.into_iter().flatten()).collect::<Vec<_>>().join(":")
    }
}

fn seconds_from(text: &str) -> Result<u32> {
    let seconds = text.parse().ok().filter(|seconds| *seconds > 0);
    seconds.ok_or_else(|| {
        BenchError::Usage(format!("{COMMIT}{text}: a number of seconds is expected"))
    })
}

fn policy_from_name(name: &str) -> Result<FsyncPolicyKind> {
    FsyncPolicyKind::from_name(name).ok_or_else(|| {
        let known: Vec<&str> = FsyncPolicyKind::ALL.iter().map(|policy| policy.name()).collect();
        BenchError::Usage(format!(
            "fjord has no fsync policy {name:?}; there are: {}; and the words {EPOCH}, {DUAL}, {LOCKED}, {DEDICATED}, {DATA_JOURNAL}, {COMMIT}SECONDS, {HALTS}, {NATIVE}, {ORDER}, {SEPARATE}, {IO_URING}, {NO_IO_URING}",
            known.join(", ")
        ))
    })
}
