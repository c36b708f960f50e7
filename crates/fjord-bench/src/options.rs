//! What to measure. Owns the names of targets and workloads.

use std::path::PathBuf;
use std::time::Duration;

use fjord::FsyncPolicyKind;
use serde::{Deserialize, Serialize};

use crate::error::{BenchError, Result};
pub use crate::how::How;

/// Where a workload runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// O_DIRECT pwrite and fdatasync on a preallocated file: the floor for fsync. Its reads go one
    /// by one without readahead, so that the cached targets may well be faster there.
    Raw,
    /// The same through fjord's block layer.
    Block,
    /// fjord as a library, on an image file.
    Library(How),
    /// fjord mounted, by the fjord program.
    Fuse(How),
    /// The kernel's ext4 on a loop device.
    Kernel,
    /// The same with the fast_commit feature.
    KernelFastCommit,
    /// The kernel's ext4, mounted with `nobarrier`: it sends no flushes, so an fsync promises neither
    /// order nor durability (the barrier paper's EXT4-OD).
    KernelNoBarrier,
    /// The kernel's ext4 with all data in the journal (`data=journal`).
    KernelDataJournal,
    /// fuse2fs.
    Fuse2fs,
    /// A directory of the caller's choice.
    Directory(PathBuf),
}

impl Target {
    /// The targets that need no argument.
    pub const ALL: [Target; 9] = [
        Target::Raw,
        Target::Block,
        Target::Library(How::DEFAULT),
        Target::Fuse(How::DEFAULT),
        Target::Kernel,
        Target::KernelFastCommit,
        Target::KernelNoBarrier,
        Target::KernelDataJournal,
        Target::Fuse2fs,
    ];

    /// A short name for tables, files and the command line.
    pub fn name(&self) -> String {
        match self {
            Target::Raw => "raw".into(),
            Target::Block => "fjord-block".into(),
            Target::Library(how) => how.name("fjord-library"),
            Target::Fuse(how) => how.name("fjord-fuse"),
            Target::Kernel => "kernel".into(),
            Target::KernelFastCommit => "kernel-fc".into(),
            Target::KernelNoBarrier => "kernel-nobarrier".into(),
            Target::KernelDataJournal => "kernel-data-journal".into(),
            Target::Fuse2fs => "fuse2fs".into(),
            Target::Directory(path) => path.display().to_string(),
        }
    }

    /// The target of a name; an absolute path is a directory. What fjord is asked for stands
    /// after colons: `fjord-library:compound`, `fjord-fuse:ijournal:epoch:nolow_latency`.
    pub fn from_name(name: &str) -> Result<Target> {
        if name.starts_with('/') {
            return Ok(Target::Directory(name.into()));
        }
        let mut words = name.split(':');
        let plain = words.next().unwrap_or_default();
        let how = How::from_words(words)?;
        let target = Target::ALL.into_iter().find(|target| target.name() == plain);
        let usage = |message: String| Err(BenchError::Usage(message));
        match target {
            Some(Target::Library(_)) if how.separate && (how.native || how.order) => usage(
                format!("{name}: separate file systems are synced, on a device of the kernel"),
            ),
            Some(Target::Library(_)) => Ok(Target::Library(how)),
            Some(Target::Fuse(_)) if how.native || how.separate => usage(format!(
                "{name}: only fjord-library works on a modelled device itself, or with a file system \
                 for each thread"
            )),
            Some(Target::Fuse(_)) => Ok(Target::Fuse(how)),
            Some(target) if how == How::default() => Ok(target),
            Some(target) => usage(format!(
                "{} has no fsync policies and no options; only fjord-library and fjord-fuse have",
                target.name()
            )),
            None => usage(format!(
                "no target {name:?}; known: {}, or an absolute path",
                Target::ALL.map(|target| target.name()).join(", ")
            )),
        }
    }

    /// How fjord is asked to work; the default for others.
    pub(crate) fn how(&self) -> How {
        match self {
            Target::Library(how) | Target::Fuse(how) => *how,
            _ => How::default(),
        }
    }

    /// The fsync policy, where fjord is asked for one.
    pub(crate) fn policy(&self) -> Option<FsyncPolicyKind> {
        self.how().policy
    }

    /// Whether it has directories and many files (not only bytes at offsets).
    pub(crate) fn has_names(&self) -> bool {
        !matches!(self, Target::Raw | Target::Block)
    }

    /// Whether it works only as root.
    pub(crate) fn needs_root(&self) -> bool {
        self.is_kernels()
    }

    /// Whether the kernel mounts it.
    pub(crate) fn is_kernels(&self) -> bool {
        matches!(
            self,
            Target::Kernel
                | Target::KernelFastCommit
                | Target::KernelNoBarrier
                | Target::KernelDataJournal
        )
    }
}

/// The policies that stand for themselves: `auto` is always another one.
pub(crate) fn policies() -> impl Iterator<Item = FsyncPolicyKind> {
    FsyncPolicyKind::ALL.iter().copied().filter(|policy| policy.name() != "auto")
}

/// What is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Workload {
    /// Append 4 KiB, fsync.
    AppendFsync,
    /// Create a file, write 4 KiB, fsync and close it.
    CreateFsync,
    /// Overwrite 4 KiB at random in a file of 16 MiB, fdatasync.
    OverwriteFdatasync,
    /// Filebench's varmail: mails deleted, created, read and appended to, with fsyncs.
    Varmail,
    /// Overwrite 4 KiB at random in a file of 64 MiB without any sync, then sync.
    RandomWrite,
    /// Write one large file and fsync it.
    SequentialWrite,
    /// Read it back with cold caches.
    SequentialRead,
    /// Create a tree of small files as tar does, and sync it.
    Untar,
    /// Create an empty file and unlink it.
    CreateUnlink,
    /// Threads read a file each, with cold caches.
    ParallelRead,
    /// Open an image of 16 TiB.
    OpenHuge,
}

impl Workload {
    /// All workloads.
    pub const ALL: [Workload; 11] = [
        Workload::AppendFsync,
        Workload::CreateFsync,
        Workload::OverwriteFdatasync,
        Workload::Varmail,
        Workload::RandomWrite,
        Workload::SequentialWrite,
        Workload::SequentialRead,
        Workload::Untar,
        Workload::CreateUnlink,
        Workload::ParallelRead,
        Workload::OpenHuge,
    ];

    /// A short name.
    pub fn name(self) -> &'static str {
        match self {
            Workload::AppendFsync => "append-fsync",
            Workload::CreateFsync => "create-fsync",
            Workload::OverwriteFdatasync => "overwrite-fdatasync",
            Workload::Varmail => "varmail",
            Workload::RandomWrite => "random-write",
            Workload::SequentialWrite => "seq-write",
            Workload::SequentialRead => "seq-read",
            Workload::Untar => "untar",
            Workload::CreateUnlink => "create-unlink",
            Workload::ParallelRead => "parallel-read",
            Workload::OpenHuge => "open-huge",
        }
    }

    /// The workload of a name.
    pub fn from_name(name: &str) -> Result<Workload> {
        let known = || Workload::ALL.map(Workload::name).join(", ");
        Workload::ALL
            .into_iter()
            .find(|workload| workload.name() == name)
            .ok_or_else(|| BenchError::Usage(format!("no workload {name:?}; known: {}", known())))
    }

    /// What its rate counts per second.
    pub fn unit(self) -> &'static str {
        match self {
            Workload::AppendFsync
            | Workload::CreateFsync
            | Workload::OverwriteFdatasync
            | Workload::Varmail
            | Workload::RandomWrite => "ops/s",
            Workload::SequentialWrite | Workload::SequentialRead | Workload::ParallelRead => {
                "MiB/s"
            }
            Workload::Untar | Workload::CreateUnlink => "files/s",
            Workload::OpenHuge => "opens/s",
        }
    }

    /// Whether it needs directories.
    pub(crate) fn needs_names(self) -> bool {
        matches!(
            self,
            Workload::CreateFsync
                | Workload::Varmail
                | Workload::Untar
                | Workload::CreateUnlink
                | Workload::ParallelRead
                | Workload::OpenHuge
        )
    }
}

/// What to measure and how long.
#[derive(Clone, Debug)]
pub struct Options {
    /// A directory for images and mounts; on the disk to be measured.
    pub dir: PathBuf,
    /// A pool of a cluster in which the images lie instead: `rbd:POOL[/NAMESPACE][?conf=FILE&id=USER]`.
    pub pool: Option<String>,
    /// In the order of the table.
    pub targets: Vec<Target>,
    /// In the order of the table.
    pub workloads: Vec<Workload>,
    /// Every target takes its turn this often; the medians are reported.
    pub round_count: u32,
    /// How long a turn of the fsync workloads lasts.
    pub turn: Duration,
    /// Thread counts of the fsync workloads.
    pub fsync_threads: Vec<usize>,
    /// Thread counts of parallel reads.
    pub read_threads: Vec<usize>,
    /// Size of each image, in bytes.
    pub image_size_bytes: u64,
    /// Size of the journal of each image, in bytes; mke2fs decides when not given.
    pub journal_size_bytes: Option<u64>,
    /// Bytes of the large file.
    pub sequential_bytes: u64,
    /// Files of untar and create-unlink.
    pub file_count: u32,
    /// The fjord program, for [`Target::Fuse`].
    pub fjord_program: PathBuf,
    /// More arguments for `fjord mount`.
    pub fjord_mount_args: Vec<String>,
}

impl Options {
    /// The fsync comparison on images of 512 MiB in `dir`, in about a minute.
    pub fn new(dir: impl Into<PathBuf>) -> Options {
        Options {
            dir: dir.into(),
            pool: None,
            // Without barriers nothing is durable, which compares with nothing here; nor does data in the journal.
            targets: Target::ALL
                .into_iter()
                .filter(|t| !matches!(t, Target::KernelNoBarrier | Target::KernelDataJournal))
                .collect(),
            workloads: vec![Workload::AppendFsync, Workload::OverwriteFdatasync],
            round_count: 5,
            turn: Duration::from_secs(1),
            fsync_threads: vec![1],
            read_threads: vec![1, 2, 4],
            image_size_bytes: 512 << 20,
            journal_size_bytes: None,
            sequential_bytes: 256 << 20,
            file_count: 20_000,
            fjord_program: PathBuf::from("fjord"),
            fjord_mount_args: Vec::new(),
        }
    }

    pub(crate) fn check(&self) -> Result<()> {
        let usage = |message: &str| Err(BenchError::Usage(message.into()));
        if self.targets.is_empty() || self.workloads.is_empty() || self.round_count == 0 {
            return usage("choose at least one target, one workload and one round");
        }
        if self.fsync_threads.contains(&0) || self.read_threads.contains(&0) {
            return usage("a thread count is at least 1");
        }
        if self.image_size_bytes < 64 << 20 {
            return usage("images for benchmarks have at least 64 MiB");
        }
        let streams = [Workload::SequentialWrite, Workload::SequentialRead];
        let reads = self.read_threads.iter().max().copied().unwrap_or(1) as u64
            * crate::workload::READ_FILE_BYTES;
        let large = if self.workloads.iter().any(|w| streams.contains(w)) {
            self.sequential_bytes
        } else {
            0
        };
        let large =
            if self.workloads.contains(&Workload::ParallelRead) { large.max(reads) } else { large };
        if large > self.image_size_bytes / 10 * 8 {
            return usage("the files to read and write must fit into 80 % of the image size");
        }
        Ok(())
    }
}
