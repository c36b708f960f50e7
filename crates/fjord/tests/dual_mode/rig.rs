//! Devices, modes, files, and the check of what fsyncs promised.

use std::process::Command;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use fjord::{
    CommitPipeline, Cred, DataMode, Fs, FsyncPolicyKind, InodeRef, MountOptions, Scheduler,
};
use fjord_block::{MemDevice, MemImage};
use fjord_testkit::gate_device::{Cache, GateDevice};
use fjord_testkit::rng::pattern_vec;

pub(crate) const BLOCK_BYTES: usize = 4096;
pub(crate) const DIR_COUNT: usize = 4;
/// Content of a file that no mount has in its cache.
pub(crate) const OLD: &[u8] = &[9; 3 * BLOCK_BYTES];
/// Every page of a file begins with this and the file's number.
const LABEL: u64 = 0xF1D0_DA7A_0000_0000;
/// How long something that must happen may take.
const PATIENCE: Duration = Duration::from_secs(120);

/// A kind of device, and who keeps its order.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kind {
    pub(crate) cache: Cache,
    pub(crate) scheduler: Scheduler,
}

pub(crate) const NATIVE_BARRIER: Kind =
    Kind { cache: Cache::NativeBarrier, scheduler: Scheduler::Epoch };
pub(crate) const CACHE_EPOCH: Kind = Kind { cache: Cache::Volatile, scheduler: Scheduler::Epoch };
pub(crate) const CACHE_DIRECT: Kind = Kind { cache: Cache::Volatile, scheduler: Scheduler::Direct };
pub(crate) const NO_CACHE_EPOCH: Kind = Kind { cache: Cache::None, scheduler: Scheduler::Epoch };
pub(crate) const NO_CACHE_DIRECT: Kind = Kind { cache: Cache::None, scheduler: Scheduler::Direct };

impl Kind {
    pub(crate) fn keeps_order(self) -> bool {
        self.scheduler == Scheduler::Epoch
    }
}

/// Fsync policy and data mode.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mode {
    pub(crate) fsync: FsyncPolicyKind,
    pub(crate) data: DataMode,
}

pub(crate) const MODES: [Mode; 3] = [
    Mode { fsync: FsyncPolicyKind::Compound, data: DataMode::Ordered },
    Mode { fsync: FsyncPolicyKind::Compound, data: DataMode::Journal },
    Mode { fsync: FsyncPolicyKind::Group, data: DataMode::Ordered },
];

fn options(kind: Kind, mode: Mode) -> MountOptions {
    MountOptions {
        background_threads: false,
        pipeline: CommitPipeline::Dual,
        scheduler: kind.scheduler,
        fsync: mode.fsync,
        data: mode.data,
        ..MountOptions::default()
    }
}

/// Several groups, one flex group.
static IMAGE: LazyLock<MemImage> = LazyLock::new(|| make_image("40M", &[]));

/// Directories of the root lie in different flex groups, of which there are more than directories, so
/// group commits are partial. In one flex group a group commit takes all.
static SPREAD_IMAGE: LazyLock<MemImage> =
    LazyLock::new(|| make_image("80M", &["-G", "1", "-O", "orphan_file"]));

/// Directories, and a file with [`OLD`] in it.
fn make_image(size: &str, arguments: &[&str]) -> MemImage {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("image");
    let made = Command::new("mke2fs")
        .args(["-q", "-F", "-t", "ext4", "-b", "4096", "-g", "2048", "-J", "size=4"])
        .args(arguments)
        .arg(&path)
        .arg(size)
        .status()
        .expect("mke2fs runs (package e2fsprogs)");
    assert!(made.success());
    let device = Arc::new(MemDevice::from_file(&path).expect("the image is read"));
    let fs = Fs::open_device(device.clone(), &MountOptions::default()).expect("it mounts");
    for number in 0..DIR_COUNT {
        fs.create_dir(format!("/d{number}")).expect("a directory");
    }
    fs.create_dir("/aside").expect("a directory");
    fs.write("/old", OLD).expect("a file");
    fs.unmount().expect("unmount");
    device.snapshot()
}

impl Mode {
    pub(crate) fn commits_groups(self) -> bool {
        self.fsync == FsyncPolicyKind::Group
    }

    /// What a device has in the beginning.
    pub(crate) fn image(self) -> &'static MemImage {
        if self.commits_groups() { &SPREAD_IMAGE } else { &IMAGE }
    }
}

/// A mounted device.
pub(crate) struct Rig {
    pub(crate) kind: Kind,
    pub(crate) mode: Mode,
    pub(crate) gate: Arc<GateDevice>,
    pub(crate) fs: Fs,
    dirs: Vec<InodeRef>,
}

impl Rig {
    pub(crate) fn new(kind: Kind, mode: Mode) -> Rig {
        let gate = Arc::new(GateDevice::new(mode.image(), kind.cache));
        let fs = Fs::open_device(gate.clone(), &options(kind, mode)).expect("it mounts");
        let root = fs.root().expect("the root");
        let dir = |number| root.lookup(format!("d{number}").as_bytes()).expect("a directory");
        let dirs = (0..DIR_COUNT).map(dir).collect();
        Rig { kind, mode, gate, fs, dirs }
    }

    /// Changes a group that no other file needs, so that no group commit takes the whole transaction
    /// until something else does.
    pub(crate) fn change_aside(&self) {
        self.fs.create_dir("/aside/changed").expect("a directory");
    }

    /// Commits of some of the changed groups so far.
    pub(crate) fn partial_commits(&self) -> u64 {
        self.fs.stats().journal.partial_commits
    }

    /// How often a call has waited for a commit.
    pub(crate) fn commit_waits(&self) -> u64 {
        self.fs.stats().journal.commit_waits
    }

    /// Creates file `number` and writes its content into the cache.
    pub(crate) fn write(&self, number: usize) -> fjord::Result<InodeRef> {
        let dir = &self.dirs[number % DIR_COUNT];
        let file = dir.create(format!("f{number}").as_bytes(), 0o644, &Cred::root())?;
        file.write(0, &content(number))?;
        Ok(file)
    }

    /// Checks an image after a power cut: recovery succeeds, file `n` is there if `promised[n]`, no
    /// file of full size has other bytes than its own, and e2fsck finds nothing.
    pub(crate) fn check(&self, image: &MemImage, promised: &[bool], what: &str) {
        let what = format!("{:?} {:?}: {what}", self.kind, self.mode);
        let device = Arc::new(MemDevice::from_image(image));
        let fs = Fs::open_device(device.clone(), &options(self.kind, self.mode));
        let fs = fs.unwrap_or_else(|error| panic!("{what}: recovery: {error}"));
        for (number, promised) in promised.iter().enumerate() {
            let found = fs.read(path(number)).unwrap_or_default();
            let is_whole = found.len() as u64 == size_of(number);
            assert!(!promised || is_whole, "{what}: file {number} is lost: {} bytes", found.len());
            assert!(!is_whole || found == content(number), "{what}: file {number} has other bytes");
        }
        assert_eq!(fs.read("/old").expect("the old file"), OLD, "{what}");
        fs.unmount().unwrap_or_else(|error| panic!("{what}: unmount: {error}"));
        if let Err(error) = fjord_testkit::image::e2fsck_clean_in_memory(&device.snapshot()) {
            panic!("{what}: e2fsck: {error:#}");
        }
    }
}

/// Differs from that of every other file.
pub(crate) fn size_of(number: usize) -> u64 {
    5000 + 37 * number as u64
}

fn path(number: usize) -> String {
    format!("/d{}/f{number}", number % DIR_COUNT)
}

fn content(number: usize) -> Vec<u8> {
    let mut bytes = pattern_vec(number as u64, 0, size_of(number) as usize);
    for page in bytes.chunks_mut(BLOCK_BYTES) {
        page[..8].copy_from_slice(&(LABEL + number as u64).to_le_bytes());
    }
    bytes
}

/// The file whose data a page is.
pub(crate) fn file_of_page(page: &[u8]) -> Option<usize> {
    let label = u64::from_le_bytes(page.get(..8)?.try_into().ok()?);
    let number = label.checked_sub(LABEL)?;
    (number < 64).then_some(number as usize)
}

pub(crate) fn wait_until(what: &str, mut reached: impl FnMut() -> bool) {
    let began = Instant::now();
    while !reached() {
        assert!(began.elapsed() < PATIENCE, "{what}: not within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}
