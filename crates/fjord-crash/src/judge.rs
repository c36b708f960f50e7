//! Judging one image: recovery, e2fsck, a second recovery, other recoverers.
//!
//! Owns [`Judge`], one per thread, with a file in memory that e2fsck reads, and [`Recovered`].
//!
//! Invariants: the file holds what `on_file` says, so only changed pieces are written; images
//! that differ only in times of mounts, the journal's sequence number and its dead log are judged
//! by e2fsck once per process.

use std::fs::File;
use std::panic::AssertUnwindSafe;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};
use fjord::{FileKind, Fs, MountOptions, Timespec};
use fjord_format::features::RoCompat;
use fjord_format::jbd2;
use fjord_format::jbd2::fast_commit::{HEAD_TAG_BYTES, starts_with_head};
use fjord_format::superblock::{RawSuperblock, SUPERBLOCK_BYTES};
use fjord_journal::recovery::{Case, Plan};
use fjord_testkit::image::{KernelMount, Scratch};
use fjord_testkit::rng::Rng;
use fjord_testkit::tools;

use crate::base::quiet;
use crate::check::{Kind, Problem};
use crate::explore::Shared;
use crate::finding::Damage;
use crate::image::{Image, PIECE_BYTES};
use crate::record::{DeviceKind, Log, RecordingDevice};
use crate::tree::{Seen, Tree};

/// Where the superblock is, in bytes.
const SUPERBLOCK_AT: u64 = 1024;
/// Fields of it that a mount changes (offset, length): mtime, wtime, mount count, kbytes written,
/// checksum.
const SUPERBLOCK_VARYING: [(u64, usize); 5] =
    [(0x2C, 4), (0x30, 4), (0x34, 2), (0x178, 8), (0x3FC, 4)];
/// Fields of the journal's superblock: sequence, head of fast commits, checksum.
const JOURNAL_VARYING: [(u64, usize); 3] = [(0x18, 4), (0x58, 4), (0xFC, 4)];

/// An image after recovery and a clean unmount.
#[derive(Debug)]
pub struct Recovered {
    /// The image.
    pub image: Image,
    /// What it shows.
    pub tree: Tree,
    /// A hash that leaves out what a mount changes without meaning.
    pub canonical: u64,
    /// What recovery wrote, when asked for.
    pub log: Option<Log>,
}

/// Counts of a judge.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct JudgeStats {
    /// Images recovered by the engine, with second recoveries.
    pub recoveries: u64,
    /// Runs of `e2fsck -fn`.
    pub fscks: u64,
    /// Recoveries by e2fsck and by the kernel, compared.
    pub compared: u64,
    /// Images with the mark of i-transactions, which both refused.
    pub marked: u64,
    /// Images not compared with the kernel's recovery, because the cut tore the superblock.
    pub torn_superblocks: u64,
    /// Images whose torn commit block e2fsck rejects, and with it the last transaction.
    pub torn_commits: u64,
    /// Images cut between a full commit and the wipe of the fast-commit area, whose log e2fsck
    /// gives up.
    pub stale_areas: u64,
    /// Of the images compared, those that had fast commits.
    pub fast_commits: u64,
    /// Images with a wrong bit in the log, and how many of them were refused.
    pub damaged: u64,
    /// See `damaged`.
    pub refused: u64,
}

impl JudgeStats {
    /// Adds another.
    pub fn add(&mut self, other: &JudgeStats) {
        self.recoveries += other.recoveries;
        self.fscks += other.fscks;
        self.compared += other.compared;
        self.marked += other.marked;
        self.torn_superblocks += other.torn_superblocks;
        self.torn_commits += other.torn_commits;
        self.stale_areas += other.stale_areas;
        self.fast_commits += other.fast_commits;
        self.damaged += other.damaged;
        self.refused += other.refused;
    }
}

/// Judges images, one after the other.
pub struct Judge {
    options: MountOptions,
    log_extents: Vec<(u64, u64)>,
    dead_extents: Vec<(u64, u64)>,
    shared: Arc<Shared>,
    scratch: Scratch,
    file: File,
    on_file: Image,
    /// Counts.
    pub stats: JudgeStats,
}

impl Judge {
    /// A judge for images of one base.
    ///
    /// # Errors
    /// No place for the file.
    pub fn new(
        options: &MountOptions,
        log_extents: &[(u64, u64)],
        dead_extents: &[(u64, u64)],
        size_bytes: u64,
        shared: Arc<Shared>,
    ) -> Result<Judge> {
        let scratch = Scratch::in_memory("crash")?;
        let path = scratch.join("image");
        let file = File::create(&path)?;
        file.set_len(size_bytes)?;
        Ok(Judge {
            // Recovery is judged with flushes, whatever the run did without.
            options: MountOptions { barrier: true, ..quiet(options) },
            log_extents: log_extents.to_vec(),
            dead_extents: dead_extents.to_vec(),
            shared,
            scratch,
            file,
            on_file: Image::new(size_bytes),
            stats: JudgeStats::default(),
        })
    }

    fn canonical(&self, image: &Image) -> u64 {
        let mut image = image.clone();
        for (at, len) in SUPERBLOCK_VARYING {
            image.zero(SUPERBLOCK_AT + at, len as u64);
        }
        if let Some(at) = self.journal_superblock(&image) {
            JOURNAL_VARYING.iter().for_each(|(field, len)| image.zero(at + field, *len as u64));
        }
        for (start, len) in &self.dead_extents {
            image.zero(*start, *len);
        }
        image.hash()
    }

    /// Mounts, reads everything, unmounts.
    ///
    /// # Errors
    /// The problem, when the engine fails or panics.
    pub fn recover(&mut self, image: &Image, record: bool) -> Result<Recovered, Problem> {
        self.attempt(image, record).map_err(Failure::into_problem)
    }

    /// Mounts and unmounts; gives what is on the device then.
    fn remount(&mut self, image: &Image) -> Result<Image, Problem> {
        let device = Arc::new(RecordingDevice::plain(image.clone(), DeviceKind::Volatile));
        self.mounted(&device, |_| Ok(())).map_err(Failure::into_problem)?;
        Ok(device.image())
    }

    /// Mounts a device, does something, unmounts.
    fn mounted<T>(
        &mut self,
        device: &Arc<RecordingDevice>,
        work: impl FnOnce(&Fs) -> Result<T>,
    ) -> Result<T, Failure> {
        self.stats.recoveries += 1;
        let mount = || -> Result<T, Failure> {
            let fs = Fs::open_device(device.clone(), &self.options)
                .map_err(|error| Failure::Mount(format!("mount: {error}")))?;
            let later = |error: anyhow::Error| Failure::Later(format!("{error:#}"));
            let done = work(&fs).map_err(later)?;
            fs.unmount().context("unmount").map_err(later)?;
            Ok(done)
        };
        std::panic::catch_unwind(AssertUnwindSafe(mount))
            .unwrap_or_else(|_| Err(Failure::Later("the engine panicked".into())))
    }

    fn attempt(&mut self, image: &Image, record: bool) -> Result<Recovered, Failure> {
        let kind = DeviceKind::Volatile;
        let device = Arc::new(if record {
            RecordingDevice::recording(image.clone(), kind)
        } else {
            RecordingDevice::plain(image.clone(), kind)
        });
        let tree = self.mounted(&device, Tree::read)?;
        let log = record.then(|| device.take_log(image.clone()));
        let image = device.image();
        let canonical = self.canonical(&image);
        Ok(Recovered { image, tree, canonical, log })
    }

    /// A bit of the log that was written since `base`. The first words of a block are spared:
    /// without them the log ends there, and nothing tells that it went on. So does a stream of fast
    /// commits at a wrong checksum. `None` where logged blocks have no checksums.
    pub fn choose_damage(&self, dirty: &Image, base: &Image, rng: &mut Rng) -> Option<Damage> {
        const SPARED_BYTES: u64 = 64;
        let in_log = |at: &u64| {
            self.log_extents.iter().any(|(start, len)| (*start..start + len).contains(at))
        };
        let written =
            dirty.changed_pieces(base).into_iter().map(|piece| piece * PIECE_BYTES as u64);
        // A piece may hold several blocks, the last of them the first behind the log.
        let pieces: Vec<u64> = written.filter(in_log).collect();
        if pieces.is_empty() || !has_checksums(dirty) {
            return None;
        }
        // Blocks have 1024 bytes or more.
        let inside = rng.below(PIECE_BYTES as u64 / 1024) * 1024 + rng.range(SPARED_BYTES, 1024);
        let at = rng.pick(&pieces) + inside;
        let bit = rng.below(8) as u8;
        (in_log(&at) && !self.is_fast_commit(dirty, at)).then_some(Damage { at, bit })
    }

    /// Turns one bit of the image: the mount must be refused, or the bit must not matter.
    ///
    /// # Errors
    /// Outer: the tools do not run. Inner: the problem.
    pub fn damaged(
        &mut self,
        dirty: &Image,
        ours: &Recovered,
        damage: Damage,
    ) -> Result<Result<(), Problem>> {
        let mut image = dirty.clone();
        let mut byte = [0];
        image.read(damage.at, &mut byte);
        image.write(damage.at, &[byte[0] ^ 1 << damage.bit]);
        self.stats.damaged += 1;
        let wrong = |text: String| {
            let Damage { at, bit } = damage;
            let text = format!("bit {bit} of byte {at} turned in the log: {text}");
            Ok(Err(Problem::new(Kind::DamageReplayed, text)))
        };
        let again = match self.attempt(&image, false) {
            Ok(again) => again,
            Err(Failure::Mount(_)) => {
                self.stats.refused += 1;
                return Ok(Ok(()));
            }
            Err(Failure::Later(text)) => return wrong(text),
        };
        if again.tree != ours.tree {
            return wrong(differ(&ours.tree, &again.tree));
        }
        // Not the same bytes: orphans get the time of their deletion.
        match self.sound(&again)? {
            Ok(_) => Ok(Ok(())),
            Err(problem) => wrong(problem.to_string()),
        }
    }

    fn put(&mut self, image: &Image) -> Result<std::path::PathBuf> {
        image.patch_file(&self.file, &self.on_file)?;
        self.on_file = image.clone();
        Ok(self.scratch.join("image"))
    }

    /// e2fsck finds nothing, and a second recovery changes nothing; `Ok(true)` when this image
    /// was not known before.
    ///
    /// # Errors
    /// Outer: the tools do not run. Inner: the problem.
    pub fn sound(&mut self, recovered: &Recovered) -> Result<Result<bool, Problem>> {
        if self.shared.passed.lock().contains(&recovered.canonical) {
            return Ok(Ok(false));
        }
        let path = self.put(&recovered.image)?;
        self.stats.fscks += 1;
        let said = tools::run(tools::command("e2fsck")?.arg("-fn").arg(&path))?;
        if said.code != Some(0) {
            return Ok(Err(Problem::new(Kind::Fsck, said.stdout.trim().to_owned())));
        }
        // Where no byte that means something has changed, the tree has not.
        let again = match self.remount(&recovered.image) {
            Ok(again) => again,
            Err(problem) => return Ok(Err(problem)),
        };
        if self.canonical(&again) != recovered.canonical {
            let pieces = again.changed_pieces(&recovered.image);
            let text = format!("a second recovery changed pieces {pieces:?}");
            return Ok(Err(Problem::new(Kind::NotIdempotent, text)));
        }
        self.shared.passed.lock().insert(recovered.canonical);
        Ok(Ok(true))
    }

    /// Whether the journal bears the mark of i-transactions.
    fn is_marked(&self, image: &Image) -> bool {
        let Some(at) = self.journal_superblock(image) else { return false };
        let mut bytes = [0; jbd2::SUPERBLOCK_BYTES];
        image.read(at, &mut bytes);
        jbd2::Superblock::decode(&bytes).is_ok_and(|found| found.ijournal().is_some())
    }

    /// What e2fsck may give up of this image, of whose log this is the plan.
    fn excuses(&self, image: &Image, plan: &Plan) -> Excuses {
        let report = plan.report();
        // Commit blocks before the last one are durable, and so whole.
        let torn_commit = report.cases.contains(&Case::PartialCommitBlock);
        let stale_area = || -> Option<bool> {
            let mut bytes = [0; jbd2::SUPERBLOCK_BYTES];
            let at = self.journal_superblock(image)?;
            image.read(at, &mut bytes);
            let superblock = jbd2::Superblock::decode(&bytes).ok()?;
            let area = superblock.fast_commit_area();
            let at = self.log_block(area.start, u64::from(superblock.s_blocksize))?;
            let mut head = [0; HEAD_TAG_BYTES];
            image.read(at, &mut head);
            let tid = u32::from_le_bytes(head[8..12].try_into().ok()?);
            // Without fast commits that count, the expected number is left unused.
            let is_expected = tid.wrapping_add(1) == report.next_tid.0;
            Some(!area.is_empty() && starts_with_head(&head) && !is_expected)
        };
        let stale_area = !has_records(plan) && stale_area() == Some(true);
        Excuses { torn_commit, stale_area }
    }

    /// Whether a byte of the log is in the fast-commit area.
    fn is_fast_commit(&self, image: &Image, at: u64) -> bool {
        let mut bytes = [0; jbd2::SUPERBLOCK_BYTES];
        let Some(superblock) = self.journal_superblock(image).and_then(|at| {
            image.read(at, &mut bytes);
            jbd2::Superblock::decode(&bytes).ok()
        }) else {
            return false;
        };
        let block_size = u64::from(superblock.s_blocksize);
        superblock.fast_commit_area().any(|block| {
            let start = self.log_block(block, block_size);
            start.is_some_and(|start| (start..start + block_size).contains(&at))
        })
    }

    /// The byte offset of a block of the journal; block 1 is the first of the log.
    fn log_block(&self, block: u32, block_size: u64) -> Option<u64> {
        let mut left = u64::from(block).checked_sub(1)?.checked_mul(block_size)?;
        for (start, len) in &self.log_extents {
            if left < *len {
                return Some(start + left);
            }
            left -= len;
        }
        None
    }

    /// Where the journal's superblock is, in bytes: right before the log.
    fn journal_superblock(&self, image: &Image) -> Option<u64> {
        let (first, _) = self.log_extents.first()?;
        let mut size = [0; 4];
        image.read(SUPERBLOCK_AT + 0x18, &mut size);
        Some(first.saturating_sub(1024u64 << u32::from_le_bytes(size).min(6)))
    }

    /// Neither e2fsck nor Linux may make anything of an image with live i-transactions.
    fn is_refused(&mut self, dirty: &Image) -> Result<Result<(), Problem>> {
        let path = self.scratch.join("dirty");
        dirty.write_to_file(&path)?;
        let said = tools::run(tools::command("e2fsck")?.arg("-fy").arg(&path))?;
        let refused = said.code.is_some_and(|code| code >= 8);
        if !refused || Image::from_file(&path)?.hash() != dirty.hash() {
            let text = format!("e2fsck took an image with the mark: {}", said.stdout.trim());
            return Ok(Err(Problem::new(Kind::Disagrees, text)));
        }
        if !superblock_is_torn(dirty) && KernelMount::new(&path, "rw").is_ok() {
            let text = "Linux mounted an image with the mark".to_owned();
            return Ok(Err(Problem::new(Kind::Disagrees, text)));
        }
        self.stats.marked += 1;
        Ok(Ok(()))
    }

    /// Lets e2fsck and, where it can, the kernel recover the dirty image, and compares the trees.
    ///
    /// # Errors
    /// Outer: the tools do not run. Inner: the problem.
    pub fn compare(&mut self, dirty: &Image, ours: &Tree) -> Result<Result<(), Problem>> {
        if self.is_marked(dirty) {
            return self.is_refused(dirty);
        }
        let path = self.scratch.join("dirty");
        with_whole_superblock(dirty).write_to_file(&path)?;
        let plan = fjord::inspect::log(&path).ok().flatten();
        let fast_commits = plan.as_ref().is_some_and(has_records);
        let excuses = plan.as_ref().map(|plan| self.excuses(dirty, plan)).unwrap_or_default();
        for (who, run) in [("e2fsck", by_e2fsck as fn(&Path) -> Result<By>), ("Linux", by_linux)] {
            let torn = superblock_is_torn(dirty);
            if who == "Linux" && torn {
                // Linux refuses an image whose superblock is torn, its own too; e2fsck takes the
                // backup where it finds one, fjord the copy in the log.
                self.stats.torn_superblocks += 1;
                continue;
            }
            dirty.write_to_file(&path)?;
            match run(&path) {
                Ok(By::Recovered) => {}
                Ok(by) => match excuses.take(by, &mut self.stats) {
                    Ok(()) => continue,
                    Err(problem) => return Ok(Err(problem)),
                },
                Err(_) if torn => {
                    self.stats.torn_superblocks += 1;
                    continue;
                }
                Err(error) => {
                    let text = format!("{who} does not recover it: {error:#}");
                    return Ok(Err(Problem::new(Kind::Disagrees, text)));
                }
            }
            self.stats.compared += 1;
            let theirs = match self.recover(&Image::from_file(&path)?, false) {
                Ok(theirs) => theirs,
                Err(problem) => return Ok(Err(problem)),
            };
            self.stats.fast_commits += u64::from(fast_commits);
            let same = if fast_commits && who == "Linux" {
                // Its replay takes an entry that it adds for a change of the directory now.
                without_directory_times(&theirs.tree) == without_directory_times(ours)
            } else {
                theirs.tree == *ours
            };
            if !same {
                let text = format!("recovered by {who}: {}", differ(ours, &theirs.tree));
                return Ok(Err(Problem::new(Kind::Disagrees, text)));
            }
        }
        Ok(Ok(()))
    }
}

/// Circumstances in which e2fsck 1.47.0 gives up what Linux and fjord recover.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Excuses {
    /// The last commit block is torn behind its first sector.
    torn_commit: bool,
    /// No fast commit counts, but their area begins with the head of another transaction.
    stale_area: bool,
}

impl Excuses {
    /// Counts an excuse, if there is one for this.
    fn take(self, by: By, stats: &mut JudgeStats) -> Result<(), Problem> {
        let what = match by {
            By::Recovered => return Ok(()),
            By::GaveUpCommit if self.torn_commit => {
                stats.torn_commits += 1;
                return Ok(());
            }
            By::GaveUpLog if self.stale_area => {
                stats.stale_areas += 1;
                return Ok(());
            }
            By::GaveUpCommit => "a transaction whose commit block is whole",
            By::GaveUpLog => "a log whose fast-commit area has no head of another transaction",
        };
        Err(Problem::new(Kind::Disagrees, format!("e2fsck gives up {what}")))
    }
}

/// How a recovery fails.
enum Failure {
    /// The image is refused.
    Mount(String),
    /// It is not, but then cannot be read or unmounted, or the engine panics.
    Later(String),
}

impl Failure {
    fn into_problem(self) -> Problem {
        let (Failure::Mount(text) | Failure::Later(text)) = self;
        Problem::new(Kind::RecoveryFailed, text)
    }
}

fn has_checksums(image: &Image) -> bool {
    let mut bytes = [0; SUPERBLOCK_BYTES];
    image.read(SUPERBLOCK_AT, &mut bytes);
    let has = |raw: RawSuperblock| raw.features().ro_compat.contains(RoCompat::METADATA_CSUM);
    RawSuperblock::decode(&bytes).is_ok_and(has)
}

/// The image with the right checksum in its superblock, for a look at its log: what a torn one says of
/// the journal's place holds.
fn with_whole_superblock(image: &Image) -> Image {
    /// Where the checksum is in it.
    const CHECKSUM: u64 = 0x3FC;
    let mut image = image.clone();
    let mut bytes = [0; SUPERBLOCK_BYTES];
    image.read(SUPERBLOCK_AT, &mut bytes);
    if let Ok(mut raw) = RawSuperblock::decode(&bytes) {
        raw.update_checksum();
        image.write(SUPERBLOCK_AT + CHECKSUM, &raw.s_checksum.get().to_le_bytes());
    }
    image
}

fn superblock_is_torn(image: &Image) -> bool {
    let mut bytes = [0; SUPERBLOCK_BYTES];
    image.read(SUPERBLOCK_AT, &mut bytes);
    RawSuperblock::decode(&bytes).is_ok_and(|raw| raw.verify_checksum().is_err())
}

/// What became of a recovery by another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    /// It recovered the image.
    Recovered,
    /// It gave up the last transaction for a torn commit block. Linux and fjord accept one whose
    /// first sector is whole, e2fsck 1.47.0 does not.
    GaveUpCommit,
    /// It gave up the whole log, as e2fsck 1.47.0 does for a fast-commit area that begins with
    /// the head of another transaction.
    GaveUpLog,
}

fn by_e2fsck(path: &Path) -> Result<By> {
    let keep = ["-E", "no_optimize_extents"];
    let mut e2fsck = tools::command("e2fsck")?;
    let said = tools::run(e2fsck.arg("-fy").args(keep).arg(path))?.expect_code(&[0, 1])?;
    let all = said.stdout + &said.stderr;
    Ok(if all.contains("was corrupt, replay was aborted") {
        By::GaveUpCommit
    } else if all.contains("while recovering journal") {
        By::GaveUpLog
    } else {
        By::Recovered
    })
}

fn by_linux(path: &Path) -> Result<By> {
    KernelMount::new(path, "rw")?.unmount().map(|()| By::Recovered)
}

fn has_records(plan: &Plan) -> bool {
    !plan.report().fast_commit_records.is_empty()
}

fn without_directory_times(tree: &Tree) -> Tree {
    let mut tree = tree.clone();
    for seen in tree.inodes.values_mut().filter(|seen| seen.kind == FileKind::Directory) {
        seen.attrs.mtime = Timespec::default();
    }
    tree
}

/// The first difference between two trees.
pub fn differ(ours: &Tree, theirs: &Tree) -> String {
    let numbers: std::collections::BTreeSet<_> =
        ours.inodes.keys().chain(theirs.inodes.keys()).collect();
    for ino in numbers {
        match (ours.inodes.get(ino), theirs.inodes.get(ino)) {
            (Some(a), Some(b)) if a == b => {}
            (Some(a), Some(b)) => {
                let what = if a.names != b.names {
                    format!("names {:?} and {:?}", a.names, b.names)
                } else if a.content != b.content {
                    let sizes = (a.content.size_bytes(), b.content.size_bytes());
                    format!("content, of {} and {} bytes", sizes.0, sizes.1)
                } else if a.attrs != b.attrs {
                    format!("attributes {:?} and {:?}", a.attrs, b.attrs)
                } else if a.xattrs != b.xattrs {
                    let lens = |seen: &Seen| -> Vec<(String, usize)> {
                        seen.xattrs.iter().map(|(name, v)| (name.clone(), v.len())).collect()
                    };
                    format!("extended attributes {:?} and {:?}", lens(a), lens(b))
                } else {
                    "target, kind or generation".into()
                };
                return format!("inode {ino}: {what}");
            }
            (Some(a), None) => return format!("inode {ino} {:?} only here", a.names),
            (None, Some(b)) => return format!("inode {ino} {:?} only there", b.names),
            (None, None) => {}
        }
    }
    "no difference".into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_excuse_is_for_one_thing() {
        let torn_commit = Excuses { torn_commit: true, stale_area: false };
        let stale_area = Excuses { torn_commit: false, stale_area: true };
        let mut stats = JudgeStats::default();
        for excuses in [Excuses::default(), stale_area] {
            assert!(excuses.take(By::GaveUpCommit, &mut stats).is_err());
        }
        for excuses in [Excuses::default(), torn_commit] {
            assert!(excuses.take(By::GaveUpLog, &mut stats).is_err());
        }
        assert_eq!(stats, JudgeStats::default());
        assert!(torn_commit.take(By::GaveUpCommit, &mut stats).is_ok());
        assert!(stale_area.take(By::GaveUpLog, &mut stats).is_ok());
        assert_eq!((stats.torn_commits, stats.stale_areas), (1, 1));
    }
}
