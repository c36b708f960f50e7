//! Recovery before a read-only mount.
//!
//! Owns what [`MountOptions::recover_before_read_only`] asks for: a dirty image is recovered as a
//! mount for writing would recover it, and closed; then it is opened read-only. Linux does the same
//! for `-o ro`.
//!
//! Invariants: an image that needs no recovery is not written; nor is one below which nothing can be
//! written. Only what belongs to recovery is written: no mount count, no time of a mount.

use std::path::Path;
use std::sync::Arc;

use fjord_block::{Device, DeviceExt, OpenError};
use fjord_format::features::{Compat, Features, Incompat, RoCompat};
use fjord_format::geometry::Geometry;
use fjord_format::superblock::{RawSuperblock, SUPERBLOCK_OFFSET_BYTES};
use fjord_journal::recovery;

use crate::awake::LowLatency;
use crate::error::{Error, Result};
use crate::fs::mount::{self, Purpose};
use crate::fs::superblock;
use crate::options::{CommitPipeline, DataMode, FsyncPolicyKind, MountOptions, Scheduler};

/// Whether a mount has something to recover first.
pub(super) fn is_wanted(options: &MountOptions) -> bool {
    options.read_only && options.recover_before_read_only && !options.no_load_journal
}

/// A warning for the mount that follows.
type Warning = Option<String>;

/// Recovers the image at `path` if it needs that.
///
/// # Errors
/// `Usage` for a dirty journal in an image that cannot be written; those of a mount for writing.
pub(super) fn at_path(path: &Path, options: &MountOptions) -> Result<Warning> {
    let open = |read_only| mount::open_image(path, options, read_only);
    let needs = match Needs::of(&*open(true)?, options)? {
        Needed::Recovery(needs) => needs,
        Needed::Nothing(warning) => return Ok(warning),
    };
    let error = match open(false) {
        Ok(device) => {
            return on_device(&device, options, Purpose::Recovery);
        }
        Err(error) => error,
    };
    if let Error::Open(refused) = &error
        && let OpenError::WriteProtected { source, .. } = &**refused
    {
        return needs.without_writing(&source.to_string());
    }
    Err(error)
}

/// Recovers the image on `device` if it needs that, for one of the purposes that recover.
///
/// # Errors
/// As [`at_path`].
pub(super) fn on_device(
    device: &Arc<dyn Device>,
    options: &MountOptions,
    purpose: Purpose,
) -> Result<Warning> {
    let needs = match Needs::of(&**device, options)? {
        Needed::Recovery(needs) => needs,
        Needed::Nothing(warning) => return Ok(warning),
    };
    if device.capabilities().read_only {
        return needs.without_writing("the device is read-only");
    }
    tracing::info!(?needs, "recovering the image before it is mounted read-only");
    let options = recovering(options);
    if !needs.unknown.is_empty() {
        return replay_log(device, &options, &needs).map(|()| None);
    }
    mount::mount_device(device.clone(), &options, purpose)?.end_recovery().map(|()| None)
}

/// What is to be done, read from the superblock.
#[derive(Debug)]
struct Needs {
    /// The log is to be replayed.
    log: bool,
    /// Features with which nothing but the log can be replayed.
    unknown: Features,
}

/// Whether an image needs recovery.
enum Needed {
    Recovery(Needs),
    /// The image is clean, or nothing can be done, which a warning says.
    Nothing(Warning),
}

impl Needs {
    fn of(device: &dyn Device, options: &MountOptions) -> Result<Needed> {
        let raw = mount::read_torn_superblock(device, options)?;
        let features = raw.features();
        let log = features.compat.contains(Compat::HAS_JOURNAL)
            && features.incompat.contains(Incompat::RECOVER);
        let orphans =
            raw.s_last_orphan.get() != 0 || features.ro_compat.contains(RoCompat::ORPHAN_PRESENT);
        let unknown = features.without(&mount::writable()).ro_compat;
        let unknown = Features { ro_compat: unknown, ..Features::default() };
        if !log && orphans && !unknown.is_empty() {
            // As Linux has it with features that it does not know.
            let names = unknown.names().join(", ");
            return Ok(Needed::Nothing(Some(format!(
                "orphans are not processed: the image has the unsupported feature {names}"
            ))));
        }
        match log || orphans {
            true => Ok(Needed::Recovery(Needs { log, unknown })),
            false => Ok(Needed::Nothing(None)),
        }
    }

    /// Without a replay, orphans can wait for the next mount; the tree is whole.
    fn without_writing(&self, why: &str) -> Result<Warning> {
        if self.log {
            return Err(dirty(&format!(
                "it cannot be replayed, because the image cannot be written ({why}); make it \
                 writable, or mount it with -o ro,noload, without the changes that are only in the \
                 journal"
            )));
        }
        Ok(Some(format!("orphans are left to the next mount: the image cannot be written ({why})")))
    }
}

/// The error for a journal that is to be replayed first.
pub(super) fn dirty(what: &str) -> Error {
    Error::Usage(format!("the journal is dirty and {what}"))
}

/// Options of the mount that recovers.
fn recovering(options: &MountOptions) -> MountOptions {
    MountOptions {
        read_only: false,
        recover_before_read_only: false,
        data: DataMode::Ordered,
        fsync: FsyncPolicyKind::Compound,
        scheduler: Scheduler::Direct,
        pipeline: CommitPipeline::Serial,
        discard: false,
        low_latency: LowLatency::Never,
        background_threads: false,
        ..options.clone()
    }
}

/// Replays the log, block by block, and nothing else.
///
/// # Errors
/// `Incompatible` for fast commits and i-transactions, which need a mount; those of a replay.
fn replay_log(device: &Arc<dyn Device>, options: &MountOptions, needs: &Needs) -> Result<()> {
    let raw = mount::read_torn_superblock(&**device, options)?;
    let geo = Geometry::from_superblock(&raw)?;
    let (map, _) = mount::find_journal_of(device, &raw, &geo, options)?;
    let plan = recovery::scan(device, &map, geo.block_size as usize)?;
    if plan.report().fast_commits > 0 || !plan.i_transactions()?.is_empty() {
        return Err(Error::Incompatible {
            feature: needs.unknown.names().join(", "),
            hint: "the journal holds fast commits that fjord cannot replay with the image's \
                 unsupported features; mount the image with Linux, or run e2fsck"
                .into(),
        });
    }
    let failed = plan.apply()?.errno.is_some();
    let mut raw: RawSuperblock = mount::read_superblock(&**device)?;
    superblock::set_replayed(&mut raw, failed);
    device.write_all_at(SUPERBLOCK_OFFSET_BYTES, raw.as_bytes())?;
    Ok(device.flush()?)
}
