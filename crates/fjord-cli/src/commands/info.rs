//! `fjord info`: superblock, features and journal, as `dumpe2fs -h` users expect.
//!
//! Reads the superblock from the image directly: this works on images in use and on unknown
//! features.

use std::path::{Path, PathBuf};

use fjord::{DiskContents, Error, FsyncPolicyKind};
use fjord_format::features::Compat;
use fjord_format::superblock::{FsState, RawSuperblock, SUPERBLOCK_BYTES, SUPERBLOCK_OFFSET_BYTES};
use serde::Serialize;

use crate::{
    failure::{self, Context, Failure, Result},
    image, in_use, output,
    pending::Pending,
    size,
};

#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  fjord info disk.img\n  fjord info --json disk.img | jq .features"
)]
pub(crate) struct Args {
    /// Image file, block device, or image on a cluster (rbd:POOL/IMAGE)
    pub(crate) image: PathBuf,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Info {
    volume_name: String,
    last_mounted_on: String,
    uuid: String,
    revision: u32,
    features: Vec<String>,
    state: String,
    errors: u16,
    inode_count: u32,
    block_count: u64,
    reserved_block_count: u64,
    free_blocks: u64,
    free_inodes: u32,
    first_block: u32,
    block_size: u64,
    blocks_per_group: u32,
    inodes_per_group: u32,
    inode_size: u16,
    first_inode: u32,
    journal_inode: Option<u32>,
    created: String,
    last_mount_time: String,
    last_write_time: String,
    last_checked: String,
    mount_count: u16,
    default_directory_hash: &'static str,
    checksum_ok: bool,
    /// Recovery is due; None if the image is in use or the journal cannot be read.
    needs_recovery: Option<bool>,
    mounted_on: Option<PathBuf>,
    journal: Option<JournalInfo>,
    /// Why the journal cannot be read.
    journal_damage: Option<String>,
}

#[derive(Debug, Serialize)]
struct JournalInfo {
    blocks: u32,
    sequence: u32,
    start: u32,
    transactions: usize,
    fast_commits: usize,
    #[serde(skip)]
    pending: Pending,
    ijournal_areas: u32,
    ijournal_area_blocks: u32,
    /// The ijournal mark is set in the journal's superblock: Linux and e2fsck refuse the image.
    ijournal_marked: bool,
    /// I-transactions that recovery would apply; None if `damage` prevents reading them.
    i_transactions: Option<usize>,
    /// Why the i-transactions or the areas cannot be read.
    damage: Option<String>,
    /// The policy that `fsync=auto` selects on this image.
    fsync_policy: &'static str,
}

/// Reads and decodes the superblock, in any state of the image.
pub(super) fn read_superblock(image: &Path) -> Result<RawSuperblock> {
    let raw = image::open_raw(image)?;
    let mut bytes = [0; SUPERBLOCK_BYTES];
    raw.read_exact_at(&mut bytes, SUPERBLOCK_OFFSET_BYTES).map_err(|e| match e.kind() {
        std::io::ErrorKind::UnexpectedEof => Failure::new(format!(
            "{} is too small for a file system; make one with `fjord mkfs`",
            image.display()
        )),
        _ => Failure::from(e).context(image.display()),
    })?;
    RawSuperblock::decode(&bytes).or_else(|_| {
        let read = |offset, bytes: &mut [u8]| Ok(raw.read_exact_at(bytes, offset)?);
        let (size_bytes, _) = raw.size().context(image.display())?;
        let contents = DiskContents::look::<Failure>(size_bytes, read)?;
        Err(failure::open_failed(image, Error::NotExt4(contents)))
    })
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let sb = read_superblock(&args.image)?;
    let mounted_on = in_use::mount_of(&args.image).map(|m| m.mountpoint);
    // The log of an image in use changes while it is read.
    let journal = match mounted_on {
        Some(_) => Ok(None),
        None => image::log(&args.image).map(|log| {
            log.map(|plan| {
                let found = plan.i_transactions();
                let damage = found.as_ref().err().map(|error| error.to_string());
                let marked = plan.superblock().ijournal().is_some();
                let pending = Pending::of(&plan, &sb);
                let areas = plan.area_table().ok().flatten();
                let has_fast_commits = sb.features().compat.contains(Compat::FAST_COMMIT);
                let policy =
                    FsyncPolicyKind::Auto.or_for_image(areas.is_some() || marked, has_fast_commits);
                JournalInfo {
                    blocks: plan.superblock().s_maxlen,
                    sequence: plan.superblock().s_sequence.0,
                    start: plan.superblock().s_start,
                    transactions: pending.transactions,
                    fast_commits: pending.fast_commits,
                    pending,
                    ijournal_areas: areas.map_or(0, |areas| areas.area_count),
                    ijournal_area_blocks: areas.map_or(0, |areas| areas.area_blocks),
                    ijournal_marked: marked,
                    i_transactions: found.ok().map(|found| found.len()),
                    damage,
                    fsync_policy: policy.name(),
                }
            })
        }),
    };
    let (journal, journal_damage) = match journal {
        Ok(journal) => (journal, None),
        Err(failure) => (None, Some(failure.message)),
    };
    let is_readable = mounted_on.is_none() && journal_damage.is_none();
    let needs_recovery =
        is_readable.then(|| journal.as_ref().is_some_and(|journal| journal.pending.is_due));
    let info = Info { journal_damage, needs_recovery, ..gather(&sb, mounted_on, journal) };
    if args.json { output::json(&info) } else { output::print(text(&info)) }
}

fn gather(sb: &RawSuperblock, mounted_on: Option<PathBuf>, journal: Option<JournalInfo>) -> Info {
    let time = |seconds: u64| match seconds {
        0 => "never".to_owned(),
        s => format!("{} UTC", output::seconds(i64::try_from(s).unwrap_or(i64::MAX / 2))),
    };
    let state = sb.state();
    let mut state_text =
        if state.contains(FsState::VALID) { "clean" } else { "not clean" }.to_owned();
    if state.contains(FsState::ERROR) {
        state_text += " with errors";
    }
    Info {
        volume_name: output::name(sb.volume_name()),
        last_mounted_on: output::name(sb.last_mounted()),
        uuid: output::uuid(&sb.s_uuid),
        revision: sb.s_rev_level.get(),
        features: sb.features().names(),
        state: state_text,
        errors: sb.s_errors.get(),
        inode_count: sb.s_inodes_count.get(),
        block_count: sb.blocks_count(),
        reserved_block_count: sb.r_blocks_count(),
        free_blocks: sb.free_blocks_count(),
        free_inodes: sb.s_free_inodes_count.get(),
        first_block: sb.s_first_data_block.get(),
        block_size: 1024u64.checked_shl(sb.s_log_block_size.get()).unwrap_or(0),
        blocks_per_group: sb.s_blocks_per_group.get(),
        inodes_per_group: sb.s_inodes_per_group.get(),
        inode_size: sb.s_inode_size.get(),
        first_inode: sb.s_first_ino.get(),
        journal_inode: sb.journal_inode().map(|ino| ino.0),
        created: time(sb.mkfs_time_seconds()),
        last_mount_time: time(sb.mtime_seconds()),
        last_write_time: time(sb.wtime_seconds()),
        last_checked: time(sb.lastcheck_seconds()),
        mount_count: sb.s_mnt_count.get(),
        default_directory_hash: match sb.s_def_hash_version {
            0 => "legacy",
            1 => "half_md4",
            2 => "tea",
            _ => "unknown",
        },
        checksum_ok: sb.verify_checksum().is_ok(),
        needs_recovery: None,
        mounted_on,
        journal,
        journal_damage: None,
    }
}

/// The answer of the text output.
fn needs_recovery(i: &Info) -> String {
    match (&i.journal, i.needs_recovery) {
        (Some(journal), _) => journal.pending.answer(),
        (None, Some(_)) => "no".to_owned(),
        (None, None) if i.journal_damage.is_some() => "unknown: the journal is damaged".to_owned(),
        (None, None) => "unknown while the image is in use".to_owned(),
    }
}

fn text(i: &Info) -> String {
    let none = |s: &str| if s.is_empty() { "<none>".to_owned() } else { s.to_owned() };
    let bytes = |blocks: u64| size::show(blocks.saturating_mul(i.block_size));
    let mut rows = vec![
        ("Filesystem volume name", none(&i.volume_name)),
        ("Last mounted on", none(&i.last_mounted_on)),
        ("Filesystem UUID", i.uuid.clone()),
        ("Filesystem revision", i.revision.to_string()),
        ("Filesystem features", i.features.join(" ")),
        ("Filesystem state", i.state.clone()),
        ("Needs recovery", needs_recovery(i)),
        ("Superblock checksum", if i.checksum_ok { "good" } else { "bad" }.into()),
        ("Inode count", i.inode_count.to_string()),
        ("Block count", format!("{} ({})", i.block_count, bytes(i.block_count))),
        ("Reserved block count", i.reserved_block_count.to_string()),
        ("Free blocks", format!("{} ({})", i.free_blocks, bytes(i.free_blocks))),
        ("Free inodes", i.free_inodes.to_string()),
        ("First block", i.first_block.to_string()),
        ("Block size", i.block_size.to_string()),
        ("Blocks per group", i.blocks_per_group.to_string()),
        ("Inodes per group", i.inodes_per_group.to_string()),
        ("Inode size", i.inode_size.to_string()),
        ("First inode", i.first_inode.to_string()),
        ("Default directory hash", i.default_directory_hash.into()),
        ("Filesystem created", i.created.clone()),
        ("Last mount time", i.last_mount_time.clone()),
        ("Last write time", i.last_write_time.clone()),
        ("Last checked", i.last_checked.clone()),
        ("Mount count", i.mount_count.to_string()),
    ];
    if let Some(ino) = i.journal_inode {
        rows.push(("Journal inode", ino.to_string()));
    }
    if let Some(damage) = &i.journal_damage {
        rows.push(("Journal", damage.clone()));
    }
    if let Some(j) = &i.journal {
        rows.push(("Journal length", format!("{} ({})", j.blocks, bytes(u64::from(j.blocks)))));
        rows.push(("Journal sequence", j.sequence.to_string()));
        rows.push(("Journal start", j.start.to_string()));
        rows.push(("Journal transactions", format!("{} to replay", j.transactions)));
        if j.fast_commits > 0 {
            rows.push(("Journal fast commits", format!("{} to replay", j.fast_commits)));
        }
        if j.ijournal_areas > 0 {
            let each = bytes(u64::from(j.ijournal_area_blocks));
            rows.push(("I-transaction areas", format!("{} of {each}", j.ijournal_areas)));
        }
        rows.push(("Fsync policy (auto)", j.fsync_policy.into()));
        if j.ijournal_marked {
            let text = match (j.i_transactions, &j.damage) {
                (Some(count), _) => format!("{count} to apply"),
                (None, damage) => format!("damaged: {}", damage.as_deref().unwrap_or("unreadable")),
            };
            rows.push(("Journal i-transactions", text));
        }
    }
    if let Some(dir) = &i.mounted_on {
        rows.push(("Mounted on", format!("{} (the figures may be stale)", dir.display())));
    }
    rows.iter().map(|(label, value)| format!("{:<26}{value}\n", format!("{label}:"))).collect()
}
