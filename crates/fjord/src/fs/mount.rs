//! Mounting: from a device to a running file system.
//!
//! Owns the order of the steps: read the superblock, check features, claim the MMP block, find the
//! journal, allocate host space for it and replay it, read the superblock again, mark the image in
//! use, complete orphans, start the background threads. Invariants: nothing is written before every
//! check has passed; a read-only mount writes nothing at all, but for the recovery before it where
//! that is asked for ([`super::recover`]).

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use fjord_block::epoch::EpochDevice;
use fjord_block::lock::{Mutex, Rank};
use fjord_block::plant::{Bug, planted};
use fjord_block::{DeferredWrites, Device, DeviceExt, FileOptions};
use fjord_format::features::{Compat, Features, Incompat, RoCompat};
use fjord_format::geometry::Geometry;
use fjord_format::jbd2::ChecksumVersion;
use fjord_format::jbd2::fast_commit::Record;
use fjord_format::superblock::{
    FsState, OS_HURD, RawSuperblock, SUPERBLOCK_BYTES, SUPERBLOCK_OFFSET_BYTES,
};
use fjord_format::{BlockNo, FormatError, InodeNo};
use fjord_journal::{
    Journal, JournalExtent, JournalIo, JournalMap, JournalOptions, PipelineMode, RecoveryReport,
};

use crate::alloc::{GroupParts, Groups};
use crate::awake::{Awake, CPU_DMA_LATENCY, FSYNC_TIME_MIN};
use crate::cache::meta::MetaCache;
use crate::cache::page::PageLru;
use crate::dir::DirParams;
use crate::disk::DiskContents;
use crate::error::{Error, Result};
use crate::file::carry::Carriers;
use crate::file::data_device::DataDevice;
use crate::fs::geo::Geo;
use crate::fs::superblock::{self, SuperState};
use crate::fs::{Counters, FsInner, dirty, events, mmp, recover, room, status, sync, threads};
use crate::fsync;
use crate::fsync::epochs::Epochs;
use crate::fsync::hazards::ReplayHazards;
use crate::fsync::order_only;
use crate::fsync::stats::FsyncCounters;
use crate::image_name::ImageName;
use crate::inode::table::{self, InodeTable};
use crate::map::{self, MapKind};
use crate::options::{DataMode, MountOptions, Scheduler};
use crate::orphan::{self, FreshOrphans, OrphanTable};
use crate::replay;

/// Blocks that the largest change takes, with room to spare; a log of the smallest size that
/// mke2fs makes (1024 blocks) has far more.
const JOURNAL_CREDITS_MIN: u32 = 256;
/// Bytes that an inode in memory stands for when the table's capacity is worked out.
const INODE_BYTES: u64 = 1024;
/// Blocks that the largest operations need in one transaction, with ample room.
const TRANSACTION_BLOCKS_MIN: u32 = 1024;

/// Purpose of loading an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// To be used.
    Use,
    /// To be recovered, and no more.
    Recovery,
    /// As `Recovery`, of a copy that nobody else has: no mark of multi-mount protection is needed.
    RecoveryOfCopy,
}

/// Features that fjord reads and writes.
pub(super) fn writable() -> Features {
    Features {
        compat: Compat::DIR_PREALLOC
            | Compat::HAS_JOURNAL
            | Compat::EXT_ATTR
            | Compat::RESIZE_INODE
            | Compat::DIR_INDEX
            | Compat::SPARSE_SUPER2
            | Compat::FAST_COMMIT
            | Compat::STABLE_INODES
            | Compat::ORPHAN_FILE,
        incompat: Incompat::FILETYPE
            | Incompat::RECOVER
            | Incompat::META_BG
            | Incompat::EXTENTS
            | Incompat::BIT64
            | Incompat::MMP
            | Incompat::FLEX_BG
            | Incompat::EA_INODE
            | Incompat::CSUM_SEED
            | Incompat::LARGEDIR
            | Incompat::INLINE_DATA,
        ro_compat: RoCompat::SPARSE_SUPER
            | RoCompat::LARGE_FILE
            | RoCompat::HUGE_FILE
            | RoCompat::GDT_CSUM
            | RoCompat::DIR_NLINK
            | RoCompat::EXTRA_ISIZE
            | RoCompat::METADATA_CSUM
            | RoCompat::PROJECT
            | RoCompat::ORPHAN_PRESENT,
    }
}

/// Opens the image at `path`.
pub(crate) fn open_path(path: &Path, options: &MountOptions) -> Result<Arc<FsInner>> {
    let warning = if recover::is_wanted(options) { recover::at_path(path, options)? } else { None };
    let device = open_image(path, options, options.read_only)?;
    let fs = mount_device(device, options, Purpose::Use)
        .map_err(|error| room::name_full(error, ImageName::parse(path).path()))?;
    warning.inspect(|warning| fs.warn(warning));
    Ok(fs)
}

/// Opens and locks the image that `path` names, waiting for its lock as `options` say.
pub(super) fn open_image(
    path: &Path,
    options: &MountOptions,
    read_only: bool,
) -> Result<Arc<dyn Device>> {
    let lock_timeout = options.lock_timeout;
    let file_options = FileOptions { read_only, lock_timeout, ..FileOptions::default() };
    ImageName::parse(path).open(&file_options, options.steal)
}

/// Opens the image on `device`.
pub(crate) fn open_device(device: Arc<dyn Device>, options: &MountOptions) -> Result<Arc<FsInner>> {
    let warning = match recover::is_wanted(options) {
        true => recover::on_device(&device, options, Purpose::Recovery)?,
        false => None,
    };
    let fs = mount_device(device, options, Purpose::Use)?;
    warning.inspect(|warning| fs.warn(warning));
    Ok(fs)
}

/// Loads the image on `device`.
pub(super) fn mount_device(
    device: Arc<dyn Device>,
    options: &MountOptions,
    purpose: Purpose,
) -> Result<Arc<FsInner>> {
    let below = Below::new(device, options)?;
    let device = &below.device;
    let raw = read_torn_superblock(&**device, options)?;
    let options = settle_options(&raw, options)?;
    let geo = Geometry::from_superblock(&raw)?;
    check_size(&**device, &geo)?;
    let mmp = Arc::new(match purpose {
        Purpose::Use | Purpose::Recovery => mmp::Mmp::acquire(device, &raw, &geo, &options)?,
        Purpose::RecoveryOfCopy => mmp::Mmp::none(),
    });
    // The image is not in use after all when the rest fails.
    load(below, &raw, &geo, options, mmp.clone(), purpose).inspect_err(|_| mmp.release())
}

/// What a file system stands on.
struct Below {
    device: Arc<dyn Device>,
    /// The scheduler in `device`, if this mount put one there.
    scheduler: Option<Arc<EpochDevice>>,
    /// It has barriers of its own.
    native_barrier: bool,
}

impl Below {
    fn new(device: Arc<dyn Device>, options: &MountOptions) -> Result<Below> {
        let wanted = options.scheduler.resolve()? == Scheduler::Epoch;
        let native_barrier = device.capabilities().native_barrier;
        if !wanted || options.read_only || device.keeps_order() {
            return Ok(Below { device, scheduler: None, native_barrier });
        }
        let scheduler = Arc::new(EpochDevice::new(device));
        Ok(Below { device: scheduler.clone(), scheduler: Some(scheduler), native_barrier })
    }
}

/// Mounts an image that is ours.
fn load(
    below: Below,
    raw: &RawSuperblock,
    geo: &Geometry,
    options: MountOptions,
    mmp: Arc<mmp::Mmp>,
    purpose: Purpose,
) -> Result<Arc<FsInner>> {
    let device = &below.device;
    let awake = awake(&options)?;
    let journal = open_journal(device, raw, geo, &options)?;
    let options = settle_policy(options, journal.as_ref().map(|opened| &opened.journal))?;
    // The replay may have changed the superblock.
    let raw = read_superblock(&**device)?;
    let geo = Geometry::from_superblock(&raw)?;
    let groups = Groups::open(device, &geo, &raw)?;
    if let Some(damage) = groups.damage()
        && !options.read_only
    {
        return Err(damage.clone());
    }
    let damage = groups.damage().cloned();
    if options.fill_all {
        groups.keep_nothing();
    }
    let fs = build(below, raw, geo, options, mmp, groups);
    if let Some(damage) = damage {
        fs.warn(format_args!("what can be read is read all the same: {damage}"));
    }
    if let Some(awake) = awake {
        fs.awake.get_or_init(|| awake);
    }
    let (mut aborted, mut fast_commits) = (false, Vec::new());
    if let Some(opened) = journal {
        fs.groups.protect_journal(opened.runs)?;
        if fs.commits_groups() {
            let parts = fs.parts.get_or_init(|| Arc::new(GroupParts::new(&fs)));
            opened.journal.set_parts(parts.clone())?;
        }
        opened.journal.set_last_changes(Arc::new(FreshOrphans::of(&fs)))?;
        fs.set_journal(opened.journal);
        (aborted, fast_commits) = (opened.report.errno.is_some(), opened.fast_commits);
        fs.recovery.get_or_init(|| opened.report);
    }
    if !fs.options.read_only {
        start_writing(&fs, purpose, aborted, fast_commits)?;
    }
    Ok(fs)
}

fn start_writing(
    fs: &Arc<FsInner>,
    purpose: Purpose,
    aborted: bool,
    fast_commits: Vec<Record>,
) -> Result<()> {
    if fs.sb.snapshot().state().contains(FsState::ERROR) || aborted {
        fs.warn("the superblock records an earlier error; unmount and run e2fsck -f");
    }
    if fs.options.order_only && purpose == Purpose::Use {
        fs.warn(order_only::WARNING);
    }
    orphan::load_file(fs)?;
    let orphan::Records { inodes: orphans, damage } = orphan::load(fs)?;
    replay::fast_commit::apply(fs, fast_commits)?;
    replay::ijournal::apply(fs, fs.journal().take_pending())?;
    match purpose {
        Purpose::Use => fs.write_mounted_superblock(aborted)?,
        Purpose::Recovery | Purpose::RecoveryOfCopy => fs.write_recovering_superblock(aborted)?,
    }
    if aborted {
        // The superblock has the mark now, where e2fsck looks for it.
        fs.journal().clear_errno()?;
    }
    if let Some(damage) = &damage {
        fs.record_error_in_superblock(damage);
    }
    orphan::empty_stale_slots(fs)?;
    match orphan::complete_all(fs, &orphans) {
        Ok(()) if orphans.is_empty() => {}
        Ok(()) => {
            let completed = orphans.len();
            tracing::info!(completed, "completed interrupted deletions and truncations (orphans)");
        }
        // What can be read still is worth a mount; nothing is written any more.
        Err(error) if error.is_corrupt() => fs.note_damage(&error, true),
        Err(error) => return Err(error),
    }
    threads::Threads::start(fs);
    mmp::Mmp::start(fs);
    Ok(())
}

fn decode_superblock(device: &dyn Device) -> Result<RawSuperblock> {
    let mut bytes = [0; SUPERBLOCK_BYTES];
    let end = SUPERBLOCK_OFFSET_BYTES + SUPERBLOCK_BYTES as u64;
    if device.size_bytes() < end {
        return Err(Error::Usage(format!(
            "the image has {} bytes, too few for a file system; create one with `fjord mkfs`",
            device.size_bytes()
        )));
    }
    device.read_exact_at(SUPERBLOCK_OFFSET_BYTES, &mut bytes)?;
    let raw = RawSuperblock::decode(&bytes).map_err(|error| match error {
        FormatError::BadMagic { .. } => not_ext4(device),
        other => other.into(),
    })?;
    Ok(raw)
}

/// The error for a device without a superblock: says what it has instead.
fn not_ext4(device: &dyn Device) -> Error {
    let read = |offset, bytes: &mut [u8]| Ok(device.read_exact_at(offset, bytes)?);
    DiskContents::look(device.size_bytes(), read).map_or_else(|error| error, Error::NotExt4)
}

/// The superblock, whole.
pub(super) fn read_superblock(device: &dyn Device) -> Result<RawSuperblock> {
    let raw = decode_superblock(device)?;
    raw.verify_checksum()?;
    Ok(raw)
}

/// The superblock for a look at the journal: a power cut may have torn it, and then the log
/// has it whole. Nothing in it is trusted further than that before the replay.
pub(super) fn read_torn_superblock(
    device: &dyn Device,
    options: &MountOptions,
) -> Result<RawSuperblock> {
    let mut raw = decode_superblock(device)?;
    let replays = !options.read_only || recover::is_wanted(options);
    let may_replay = replays && raw.features().compat.contains(Compat::HAS_JOURNAL);
    match raw.verify_checksum() {
        Err(error) if may_replay => {
            tracing::warn!(%error, "reading the superblock's copy in the journal");
            raw.update_checksum();
        }
        other => other?,
    }
    Ok(raw)
}

fn check_size(device: &dyn Device, geo: &Geometry) -> Result<()> {
    let need = geo.block_count.saturating_mul(u64::from(geo.block_size));
    if device.size_bytes() < need {
        return Err(Error::Usage(format!(
            "the image is truncated: the file system has {need} bytes, the image {}; restore the \
             missing part or run resize2fs",
            device.size_bytes()
        )));
    }
    Ok(())
}

/// Refuses features whose fields in the inode mean something else to the Hurd.
fn check_hurd(features: &Features) -> Result<()> {
    let no_room = Features {
        incompat: Incompat::BIT64 | Incompat::EA_INODE,
        ro_compat: RoCompat::METADATA_CSUM | RoCompat::HUGE_FILE,
        ..Features::default()
    };
    let named = features.without(&features.without(&no_room)).names();
    if named.is_empty() {
        return Ok(());
    }
    Err(Error::Incompatible {
        feature: format!("{} in an image for the Hurd", named.join(", ")),
        hint: "the inodes of the Hurd have other fields in its place: mount the image read-only (-o ro)"
            .into(),
    })
}

/// Refuses features by name and turns options into what this image allows.
fn settle_options(raw: &RawSuperblock, options: &MountOptions) -> Result<MountOptions> {
    let features = raw.features();
    let unknown = features.without(&writable());
    let mut options = options.clone();
    if !unknown.incompat.is_empty() {
        let only = Features { incompat: unknown.incompat, ..Features::default() };
        return Err(Error::Incompatible {
            feature: only.names().join(", "),
            hint: "mount the image with Linux".into(),
        });
    }
    if !unknown.ro_compat.is_empty() && !options.read_only {
        let only = Features { ro_compat: unknown.ro_compat, ..Features::default() };
        return Err(Error::Incompatible {
            feature: only.names().join(", "),
            hint: "mount the image read-only (-o ro), or with Linux".into(),
        });
    }
    if raw.s_creator_os.get() == OS_HURD && !options.read_only {
        check_hurd(&features)?;
    }
    options.cache_size_bytes = options.cache_size_bytes.max(MountOptions::CACHE_SIZE_MIN_BYTES);
    options.fsync = options.fsync.or_from_environment()?;
    if !options.read_only {
        fsync::policy(options.fsync).check_features(&features)?;
    }
    if options.data == DataMode::Journal {
        // As ext4: the data mode that journals data does not delay allocation's promises,
        // but needs a log.
        if !features.compat.contains(Compat::HAS_JOURNAL) {
            return Err(Error::Usage("data=journal needs an image with a journal".into()));
        }
    }
    Ok(options)
}

/// Decides which policy `Auto` is. Journaled data has nothing that is logged more finely.
///
/// # Errors
/// `Usage` for a policy that the image is not made for.
fn settle_policy(options: MountOptions, journal: Option<&Journal>) -> Result<MountOptions> {
    if !options.read_only {
        fsync::policy(options.fsync).check_journal(journal)?;
    }
    let journal = journal.filter(|_| options.data != DataMode::Journal);
    let has_areas = journal.is_some_and(Journal::has_areas);
    let has_fast_commits = journal.is_some_and(|journal| journal.fast_commit_blocks() > 0);
    let fsync = options.fsync.or_for_image(has_areas, has_fast_commits);
    Ok(MountOptions { fsync, ..options })
}

/// What keeps processors from halting while fsyncs come, if it is wanted.
fn awake(options: &MountOptions) -> Result<Option<Awake>> {
    if options.read_only || !options.background_threads {
        return Ok(None);
    }
    options.low_latency.start(FSYNC_TIME_MIN).map_err(|error| {
        let advice = "run as root, or leave low latency to LowLatency::Auto";
        Error::Usage(format!("low latency needs {CPU_DMA_LATENCY} ({error}): {advice}"))
    })
}

fn build(
    below: Below,
    raw: RawSuperblock,
    geo: Geometry,
    options: MountOptions,
    mmp: Arc<mmp::Mmp>,
    groups: Groups,
) -> Arc<FsInner> {
    let budget = options.cache_size_bytes;
    let meta_budget = meta_budget_bytes(&options);
    let inode_budget = budget / 16;
    let Below { device, scheduler, native_barrier } = below;
    let meta = MetaCache::new(device.clone(), geo.block_size, meta_budget);
    let dir_params = DirParams::new(&geo, &raw);
    let inode_capacity = (inode_budget / INODE_BYTES).max(256);
    let data_device = Arc::new(DataDevice::new(device.clone()));
    Arc::new(FsInner {
        deferred: match planted(Bug::CarriedDataOvertakesBarriers) {
            true => DeferredWrites::new(device.clone()),
            false => DeferredWrites::new(data_device.clone()),
        },
        data_device,
        carriers: Carriers::default(),
        device,
        scheduler,
        data_in_order: AtomicBool::new(false),
        epochs: Epochs::new(!native_barrier),
        pace: Arc::default(),
        unawaited_bytes: AtomicU64::new(0),
        meta,
        page_lru: PageLru::new(budget - meta_budget - inode_budget, geo.block_size),
        inodes: InodeTable::new(usize::try_from(inode_capacity).unwrap_or(usize::MAX)),
        dirty_inodes: dirty::DirtyList::default(),
        groups,
        sb: SuperState::new(raw),
        dir_params,
        orphans: OrphanTable::default(),
        releases: sync::Releases::default(),
        resize_lock: Mutex::new(Rank::Resize, ()),
        rename_lock: Mutex::new(Rank::Rename, ()),
        fsync_policy: fsync::policy(options.fsync),
        hazards: ReplayHazards::default(),
        room: room::Room::default(),
        status: status::Status::default(),
        events: events::Events::default(),
        fsync_counters: FsyncCounters::default(),
        stats: Counters::default(),
        threads: threads::Threads::default(),
        awake: OnceLock::new(),
        mmp,
        geo: Arc::new(Geo::new(geo)),
        options,
        parts: OnceLock::new(),
        journal: OnceLock::new(),
        recovery: OnceLock::new(),
    })
}

/// A journal that has been replayed.
struct OpenedJournal {
    journal: Journal,
    /// The blocks it lies in.
    runs: Vec<(BlockNo, u64)>,
    /// What was found and done; without the fast commits.
    report: RecoveryReport,
    /// What is to be applied before anything else.
    fast_commits: Vec<Record>,
}

/// Opens the journal, replaying it if need be. `None` for images without one and for
/// read-only mounts.
fn open_journal(
    device: &Arc<dyn Device>,
    raw: &RawSuperblock,
    geo: &Geometry,
    options: &MountOptions,
) -> Result<Option<OpenedJournal>> {
    if !geo.features.compat.contains(Compat::HAS_JOURNAL) {
        return Ok(None);
    }
    if options.read_only {
        if geo.features.incompat.contains(Incompat::RECOVER) && !options.no_load_journal {
            return Err(recover::dirty(
                "a read-only open does not replay it: if the image is mounted on another host, use \
                 it there; else run `fjord recover`, or mount it (-o ro replays the journal, -o \
                 ro,noload ignores it); a snapshot on a cluster is recovered in a copy, by `fjord \
                 snapshot`",
            ));
        }
        return Ok(None);
    }
    let (journal_map, runs) = find_journal_of(device, raw, geo, options)?;
    room::ensure_fixed(&**device, geo, &runs)?;
    let pipeline = options.pipeline.resolve()?;
    if options.journal_io == JournalIo::Dedicated && pipeline == PipelineMode::Dual {
        return Err(Error::Usage(
            "journal_io=dedicated commits one transaction after the other; mount with pipeline=serial, too (without \
             the option the environment variable FJORD_PIPELINE decides)"
                .into(),
        ));
    }
    let journal_options = JournalOptions {
        barrier: options.barrier,
        bit64: geo.features.incompat.contains(Incompat::BIT64),
        checksum: geo.features.has_metadata_csum().then_some(ChecksumVersion::V3),
        pipeline,
        lists: options.journal_lists,
        // Small descriptors are for tests, which want many threads at the pieces.
        helpers_max: options.descriptor_blocks_max.map(|_| usize::MAX),
        io: options.journal_io,
        descriptor_blocks_max: options.descriptor_blocks_max,
        fast_commit: geo.features.compat.contains(Compat::FAST_COMMIT),
        transaction_blocks_max: Some(transaction_blocks_max(geo, options)),
        replays_ijournal: true,
        fit_replayed: Some(superblock::fit_replayed),
        replayed_last: Some(BlockNo(SUPERBLOCK_OFFSET_BYTES / u64::from(geo.block_size))),
        commit_time: options.fixed_time.map(|time| {
            Duration::new(u64::try_from(time.sec).unwrap_or(0), time.nsec.min(999_999_999))
        }),
    };
    let block_size = geo.block_size as usize;
    let (journal, mut report) =
        Journal::open(device.clone(), journal_map, block_size, &journal_options)?;
    let fast_commits = std::mem::take(&mut report.fast_commit_records);
    if geo.features.incompat.contains(Incompat::RECOVER) {
        tracing::info!(?report, "journal replayed");
    }
    if journal.credits_max() < JOURNAL_CREDITS_MIN {
        let detail = "the log is too short for a transaction".to_owned();
        return Err(Error::corrupt("journal", detail));
    }
    Ok(Some(OpenedJournal { journal, runs, report, fast_commits }))
}

/// Blocks of a transaction stay in memory until it is checkpointed: a running and a committing one
/// together are not to need more than the budget of metadata.
fn transaction_blocks_max(geo: &Geometry, options: &MountOptions) -> u32 {
    let blocks = meta_budget_bytes(options) / 2 / u64::from(geo.block_size);
    u32::try_from(blocks).unwrap_or(u32::MAX).max(TRANSACTION_BLOCKS_MIN)
}

fn meta_budget_bytes(options: &MountOptions) -> u64 {
    options.cache_size_bytes / 4
}

/// Where the journal of an image lies, and the block size in bytes; `None` without a journal.
pub(crate) fn find_journal(device: &Arc<dyn Device>) -> Result<Option<(JournalMap, usize)>> {
    let raw = read_superblock(&**device)?;
    let options = MountOptions { read_only: true, ..MountOptions::default() };
    let options = settle_options(&raw, &options)?;
    let geo = Geometry::from_superblock(&raw)?;
    check_size(&**device, &geo)?;
    if !geo.features.compat.contains(Compat::HAS_JOURNAL) {
        return Ok(None);
    }
    let (map, _) = find_journal_of(device, &raw, &geo, &options)?;
    Ok(Some((map, geo.block_size as usize)))
}

/// The journal of an image with one, and the blocks it lies in.
///
/// # Errors
/// `Incompatible` for one on another device; `Corrupt` for an inode that cannot be a journal.
pub(super) fn find_journal_of(
    device: &Arc<dyn Device>,
    raw: &RawSuperblock,
    geo: &Geometry,
    options: &MountOptions,
) -> Result<(JournalMap, Vec<(BlockNo, u64)>)> {
    let Some(ino) = raw.journal_inode() else {
        if raw.s_journal_dev.get() == 0 && raw.s_journal_uuid == [0; 16] {
            return Err(no_journal("the superblock names no inode for it"));
        }
        return Err(Error::Incompatible {
            feature: "external journal device".into(),
            hint: "move the journal into the image with tune2fs -O ^has_journal and -j".into(),
        });
    };
    journal_map(device, raw, geo, options, ino)
}

/// The error for an inode that cannot be the journal, and what then helps.
fn no_journal(why: &str) -> Error {
    Error::corrupt(
        "journal inode",
        format!(
            "{why}, so there is no log to replay; changes that were only in the journal are lost; \
             run `e2fsck -fy` to repair the image and make a new journal"
        ),
    )
}

/// Finds the journal's blocks with a throw-away, read-only view of the image: what it
/// caches is from before the replay.
fn journal_map(
    device: &Arc<dyn Device>,
    raw: &RawSuperblock,
    geo: &Geometry,
    options: &MountOptions,
    ino: InodeNo,
) -> Result<(JournalMap, Vec<(BlockNo, u64)>)> {
    let view_options = MountOptions { read_only: true, ..options.clone() };
    let groups = Groups::unread(geo);
    let below = Below { device: device.clone(), scheduler: None, native_barrier: false };
    let fs = build(below, *raw, geo.clone(), view_options, Arc::new(mmp::Mmp::none()), groups);
    let inode = match table::get(&fs, ino) {
        Ok(inode) => inode,
        Err(error @ Error::Io(_)) => return Err(error),
        Err(Error::Corrupt { detail, .. }) => {
            return Err(no_journal(&format!("inode {ino} cannot be read ({detail})")));
        }
        Err(_) => return Err(no_journal(&format!("inode {ino} is not in use"))),
    };
    let state = inode.state.read();
    if !state.is_file() || state.disk.links_count == 0 {
        return Err(no_journal(&format!("inode {ino} is not a file in use")));
    }
    let blocks = state.size / u64::from(geo.block_size);
    let blocks = u32::try_from(blocks)
        .map_err(|_| Error::corrupt("journal inode", format!("{blocks} blocks are too many")))?;
    let mut extents = Vec::new();
    let mut logical = 0;
    while logical < blocks {
        let found = map::lookup(&fs, &inode, &state, logical, blocks - logical)?;
        let MapKind::Written(start) = found.kind else {
            return Err(no_journal(&format!("inode {ino} has no block {logical}")));
        };
        extents.push(JournalExtent { logical, start, len: found.len });
        logical = logical.saturating_add(found.len.max(1));
    }
    let runs = extents.iter().map(|extent| (extent.start, u64::from(extent.len))).collect();
    Ok((JournalMap::new(extents)?, runs))
}
