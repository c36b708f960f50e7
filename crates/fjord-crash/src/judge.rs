//! Judging one image: recovery, e2fsck, a second recovery, other recoverers.
//!
//! Owns [`Judge`], one per thread, with a file in memory that e2fsck reads, and [`Recovered`].
//!
//! Invariants: the file holds what `on_file` says, so only changed pieces are written; images
//! that differ only in times of mounts, the journal's sequence number and its dead log are judged
//! by e2fsck once per process.

mod others;
mod used;

use std::fs::File;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use fjord::{Fs, MountOptions};
use fjord_format::features::RoCompat;
use fjord_format::jbd2;
use fjord_format::superblock::{RawSuperblock, SUPERBLOCK_BYTES};
use fjord_testkit::image::Scratch;
use fjord_testkit::rng::Rng;
use fjord_testkit::tools;

use crate::base::{Features, quiet};
use crate::check::{Kind, Problem};
use crate::explore::Shared;
use crate::finding::Damage;
use crate::image::{Image, PIECE_BYTES};
use crate::panics;
use crate::record::{DeviceKind, Log, RecordingDevice};
use crate::tree::{Seen, Tree};

/// Where the superblock is, in bytes.
const SUPERBLOCK_AT: u64 = 1024;
/// Fields of it that a mount changes (offset, length): mtime, wtime, mount count, what makes the checksum
/// fit, kbytes written, checksum.
const SUPERBLOCK_VARYING: [(u64, usize); 6] =
    [(0x2C, 4), (0x30, 4), (0x34, 2), (0xC8, 4), (0x178, 8), (0x3FC, 4)];
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
    /// Recovered file systems that were used.
    pub used: u64,
    /// Dirty images that this kernel cannot mount, for its features or its page size.
    pub not_for_linux: u64,
    /// Files to which Linux gave the time of its mount when it completed their truncation.
    pub truncations: u64,
    /// Images whose torn commit block e2fsck rejects, and with it the last transaction.
    pub torn_commits: u64,
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
        self.used += other.used;
        self.not_for_linux += other.not_for_linux;
        self.truncations += other.truncations;
        self.torn_commits += other.torn_commits;
        self.fast_commits += other.fast_commits;
        self.damaged += other.damaged;
        self.refused += other.refused;
    }
}

/// Judges images, one after the other.
pub struct Judge {
    options: MountOptions,
    features: Features,
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
        features: Features,
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
            features,
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
        std::panic::catch_unwind(AssertUnwindSafe(mount)).unwrap_or_else(|payload| {
            Err(Failure::Later(panics::told("engine", &*payload).to_string()))
        })
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
        // A piece may hold several blocks, the last of them the first after the log.
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

    /// What `e2fsck -fn` says of an image, if that is anything.
    fn fsck(&mut self, image: &Image) -> Result<Option<String>> {
        let path = self.put(image)?;
        // What e2fsck says without it would be taken for a fault of the engine.
        ensure!(path.exists(), "{} was removed; run it again", path.display());
        self.stats.fscks += 1;
        let said = tools::run(tools::command("e2fsck")?.arg("-fn").arg(&path))?;
        Ok((said.code != Some(0)).then(|| said.stdout.trim().to_owned()))
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
        if let Some(said) = self.fsck(&recovered.image)? {
            return Ok(Err(Problem::new(Kind::Fsck, said)));
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

    /// Whether a byte of the log is in the fast-commit area.
    fn is_fast_commit(&self, image: &Image, at: u64) -> bool {
        let Some(superblock) = self.journal(image) else { return false };
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

    /// The journal's superblock.
    fn journal(&self, image: &Image) -> Option<jbd2::Superblock> {
        let mut bytes = [0; jbd2::SUPERBLOCK_BYTES];
        image.read(self.journal_superblock(image)?, &mut bytes);
        jbd2::Superblock::decode(&bytes).ok()
    }

    /// Where the journal's superblock is, in bytes: right before the log.
    fn journal_superblock(&self, image: &Image) -> Option<u64> {
        let (first, _) = self.log_extents.first()?;
        let mut size = [0; 4];
        image.read(SUPERBLOCK_AT + 0x18, &mut size);
        Some(first.saturating_sub(1024u64 << u32::from_le_bytes(size).min(6)))
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
