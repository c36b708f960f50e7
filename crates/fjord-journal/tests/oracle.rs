//! The journal against e2fsck and Linux.
//!
//! What fjord-journal logs in an image made by mke2fs, e2fsck and Linux must replay to the
//! same blocks; what Linux and debugfs log, fjord-journal must replay to the same image as
//! `e2fsck -E journal_only`, outside the journal and the superblock (which bears the
//! recovery flag and times).

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use fjord_block::{Buf, Device, DeviceExt, MemDevice, Request};
use fjord_format::jbd2::fast_commit::Record;
use fjord_format::jbd2::{ChecksumVersion, DescriptorBuilder, MAGIC};
use fjord_format::types::{BlockNo, Tid};
use fjord_journal::{
    Buffer, BufferKind, Journal, JournalExtent, JournalMap, JournalOptions, Part, PartSet,
    PartialCommit, Parts, recover, recovery,
};
use fjord_testkit::image::{self, KernelMount, Scratch};
use fjord_testkit::{dirty, tools};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// Runs a debugfs request. Checksums are not verified, for in an image taken while Linux
/// works the superblock may be older than its checksum.
fn debugfs(image: &Path, request: &str) -> Result<String> {
    let mut command = tools::command("debugfs")?;
    Ok(tools::run(command.args(["-n", "-R", request]).arg(image))?.ok()?.stdout)
}

/// Runs of a file's blocks as debugfs shows them: logical start, physical start, length.
fn file_blocks(image: &Path, file: &str) -> Result<Vec<(u32, u64, u32)>> {
    let said = debugfs(image, &format!("stat {file}"))?;
    let (_, list) = said
        .split_once("EXTENTS:")
        .or_else(|| said.split_once("BLOCKS:"))
        .with_context(|| format!("no block list for {file} in {said}"))?;
    let range = |text: &str| -> Result<(u64, u64)> {
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        Ok((first.parse()?, last.parse()?))
    };
    let mut runs = Vec::new();
    for piece in list.split('(').skip(1) {
        let (logical, physical) = piece.split_once("):").context("a block range")?;
        if !logical.starts_with(|c: char| c.is_ascii_digit()) {
            continue;
        }
        let physical = physical.split(|c: char| c != '-' && !c.is_ascii_digit()).next();
        let (first, last) = range(logical)?;
        let (start, _) = range(physical.context("a physical range")?)?;
        runs.push((first as u32, start, (last - first + 1) as u32));
    }
    Ok(runs)
}

fn block_size(image: &Path) -> Result<usize> {
    let stats = debugfs(image, "show_super_stats -h")?;
    let size = stats.lines().find_map(|line| line.strip_prefix("Block size:"));
    size.and_then(|text| text.trim().parse().ok()).context("debugfs shows a block size")
}

fn journal_map(image: &Path) -> Result<JournalMap> {
    let extents = file_blocks(image, "<8>")?
        .into_iter()
        .map(|(logical, start, len)| JournalExtent { logical, start: BlockNo(start), len });
    Ok(JournalMap::new(extents.collect())?)
}

fn load(image: &Path) -> Result<Arc<dyn Device>> {
    Ok(Arc::new(MemDevice::from_file(image)?))
}

fn store(device: &dyn Device, image: &Path) -> Result<()> {
    image::make_sparse(image, device.size_bytes())?;
    let file = fs::OpenOptions::new().write(true).open(image)?;
    let mut piece = vec![0; 1 << 20];
    for offset in (0..device.size_bytes()).step_by(piece.len()) {
        let len = piece.len().min((device.size_bytes() - offset) as usize);
        device.read_exact_at(offset, &mut piece[..len])?;
        if piece[..len].iter().any(|&byte| byte != 0) {
            file.write_all_at(&piece[..len], offset)?;
        }
    }
    Ok(())
}

/// The first block outside the journal and the superblock in which two devices differ.
fn difference(
    ours: &dyn Device,
    theirs: &dyn Device,
    map: &JournalMap,
    block_size: usize,
) -> Result<Option<u64>> {
    ensure!(ours.size_bytes() == theirs.size_bytes(), "the images differ in size");
    let superblock = 1024 / block_size as u64;
    let (mut a, mut b) = (vec![0; block_size], vec![0; block_size]);
    for block in 0..ours.size_bytes() / block_size as u64 {
        if block == superblock || map.contains(BlockNo(block)) {
            continue;
        }
        ours.read_exact_at(block * block_size as u64, &mut a)?;
        theirs.read_exact_at(block * block_size as u64, &mut b)?;
        if a != b {
            return Ok(Some(block));
        }
    }
    Ok(None)
}

fn said(output: &tools::Output) -> String {
    format!("{}{}", output.stdout, output.stderr)
}

/// Replays a copy with e2fsck and nothing else; what it says when it complains about the journal.
fn replayed_by_e2fsck(dirty: &Path, scratch: &Scratch) -> Result<Result<Arc<dyn Device>, String>> {
    let copy = scratch.join("by-e2fsck.img");
    image::copy_sparse(dirty, &copy)?;
    let mut command = tools::command("e2fsck")?;
    let output = tools::run(command.args(["-y", "-E", "journal_only"]).arg(&copy))?;
    let complained = ["corrupt", "invalid", "Invalid", "error", "bad"];
    let said = said(&output);
    let failed = output.code.is_none_or(|code| code > 1);
    if said.contains("orphaned inode") {
        // It has replayed the log, and goes on to free what was open when the power went, about which
        // it may complain; debugfs stops at the replay.
        image::copy_sparse(dirty, &copy)?;
        let mut command = tools::command("debugfs")?;
        // Before the replay the bitmaps need not fit their checksums: -n.
        let output =
            tools::run(command.args(["-n", "-w", "-R", "journal_run"]).arg(&copy))?.ok()?;
        let text = self::said(&output);
        ensure!(!text.contains("not open"), "debugfs has not replayed the log: {text}");
    } else if failed || complained.iter().any(|word| said.contains(word)) {
        return Ok(Err(said));
    }
    load(&copy).map(Ok)
}

/// Replays with fjord and with e2fsck; both must agree. Returns the rows of the table met.
fn compare(dirty: &Path, scratch: &Scratch) -> Result<Vec<recovery::Case>> {
    let size = block_size(dirty)?;
    let map = journal_map(dirty)?;
    let device = load(dirty)?;
    let ours = recover(&device, &map, size);
    let theirs = replayed_by_e2fsck(dirty, scratch)?;
    match (ours, theirs) {
        (Ok(report), Ok(theirs)) => {
            if let Some(block) = difference(&device, &theirs, &map, size)? {
                bail!("block {block} differs; {report:?}");
            }
            Ok(report.cases)
        }
        (Err(error), Err(_)) => {
            // Refusing must leave everything as it was.
            let before = load(dirty)?;
            ensure!(difference(&device, &before, &map, size)?.is_none(), "{error}: but it wrote");
            Ok(Vec::new())
        }
        (Err(error), Ok(_)) => bail!("fjord refuses what e2fsck replays: {error}"),
        (Ok(report), Err(said)) => {
            bail!("fjord replays what e2fsck refuses: {report:?}; e2fsck says:\n{said}")
        }
    }
}

/// Makes an image and mounts it; only fsyncs commit.
fn mounted_by_linux(image: &Path, features: &[&str]) -> Result<KernelMount> {
    image::make_sparse(image, 64 << 20)?;
    let mut mke2fs = tools::command("mke2fs")?;
    tools::run(mke2fs.args(["-q", "-F"]).args(features).arg(image))?.ok()?;
    KernelMount::new(image, "rw,commit=300")
}

#[test]
fn journals_written_by_linux_replay_as_under_e2fsck() -> Result<()> {
    tools::require_root()?;
    let mut met = BTreeSet::new();
    for (index, recipe) in dirty::RECIPES.iter().enumerate() {
        let scratch = Scratch::in_memory("journal-linux")?;
        for image in dirty::make(recipe, index as u64, scratch.path())? {
            let cases = compare(&image, &scratch);
            met.extend(cases.with_context(|| format!("{}: {}", recipe.name, image.display()))?);
        }
    }
    for case in [recovery::Case::Complete, recovery::Case::Revoked, recovery::Case::Escaped] {
        ensure!(met.contains(&case), "no journal had {case:?}: {met:?}");
    }
    Ok(())
}

#[test]
fn a_file_that_was_open_without_a_name_does_not_change_the_replay() -> Result<()> {
    tools::require_root()?;
    let scratch = Scratch::in_memory("journal-orphan")?;
    let live = scratch.join("live.img");
    let mount = mounted_by_linux(&live, &["-t", "ext3", "-b", "1024"])?;
    let name = mount.path().join("open");
    let file = fs::File::create(&name)?;
    file.write_all_at(&[0x55; 4096], 0)?;
    fs::remove_file(&name)?;
    file.sync_all()?;
    let dirty = scratch.join("dirty.img");
    image::copy_sparse(&live, &dirty)?;
    drop(file);
    mount.unmount()?;
    let cases = compare(&dirty, &scratch)?;
    ensure!(cases.contains(&recovery::Case::Complete), "nothing was replayed: {cases:?}");
    Ok(())
}

#[test]
fn journals_written_by_debugfs_replay_as_under_e2fsck() -> Result<()> {
    tools::require_root()?;
    for (index, written) in dirty::WRITTEN.iter().enumerate() {
        let scratch = Scratch::in_memory("journal-debugfs")?;
        let image = dirty::make_with_debugfs(written, index as u64, scratch.path())?;
        let cases = compare(&image, &scratch).with_context(|| format!("{written:?}"))?;
        ensure!(cases.contains(&recovery::Case::TornTransaction), "{written:?}: {cases:?}");
    }
    Ok(())
}

#[test]
fn damaged_logs_are_refused_or_replayed_as_under_e2fsck() -> Result<()> {
    tools::require_root()?;
    let scratch = Scratch::in_memory("journal-damaged")?;
    let recipe = &dirty::RECIPES[0];
    let image = dirty::make(recipe, 99, scratch.path())?.remove(1);
    let (size, map) = (block_size(&image)?, journal_map(&image)?);
    let mut refused = 0;
    for seed in 0..40 {
        let damaged = scratch.join("damaged.img");
        dirty::damage_log(&image, &damaged, seed)?;
        let device = load(&damaged)?;
        match (recover(&device, &map, size), replayed_by_e2fsck(&damaged, &scratch)?) {
            (Ok(report), Ok(theirs)) => {
                let block = difference(&device, &theirs, &map, size)?;
                ensure!(block.is_none(), "seed {seed}: block {block:?} differs; {report:?}");
            }
            // e2fsck replays what it can and then repairs; fjord leaves that to it.
            (Err(_), _) => refused += 1,
            // Linux, not yet e2fsck, takes a commit block whose header is whole for one that was
            // written in part.
            (Ok(report), Err(_)) if report.cases.contains(&recovery::Case::PartialCommitBlock) => {}
            (Ok(report), Err(said)) => bail!("seed {seed}: e2fsck refuses; {report:?}\n{said}"),
        }
    }
    ensure!(refused > 0, "no damage was noticed");
    Ok(())
}

#[test]
fn a_fast_commit_area_is_handed_over_and_stays_until_it_is_applied() -> Result<()> {
    tools::require_root()?;
    let scratch = Scratch::in_memory("journal-fast-commit")?;
    let live = scratch.join("live.img");
    let mount = mounted_by_linux(&live, &["-t", "ext4", "-O", "fast_commit"])?;
    let file = fs::File::create(mount.path().join("file"))?;
    file.sync_all()?;
    for number in 0..5u64 {
        file.write_all_at(&[number as u8 + 1; 4096], number * 4096)?;
        file.sync_all()?;
    }
    let copy = scratch.join("dirty.img");
    image::copy_sparse(&live, &copy)?;
    drop(file);
    mount.unmount()?;
    let map = journal_map(&copy)?;
    let device = load(&copy)?;
    let block_size = block_size(&copy)?;
    let report = recover(&device, &map, block_size)?;
    let adds = |record: &&Record| matches!(record, Record::AddRange { .. });
    ensure!(report.fast_commits > 0, "{report:?}");
    ensure!(report.fast_commit_records.iter().any(|record| adds(&record)), "{report:?}");
    // Nobody has applied it.
    let again = recover(&device, &map, block_size)?;
    ensure!(again.fast_commit_records == report.fast_commit_records, "{again:?}");
    ensure!((again.transactions, again.next_tid) == (0, report.next_tid), "{again:?}");
    // A commit of its ID ends it, whatever that commit holds.
    let options = JournalOptions { fast_commit: true, ..JournalOptions::default() };
    let (journal, opened) = Journal::open(device.clone(), map.clone(), block_size, &options)?;
    ensure!(opened.fast_commit_records == report.fast_commit_records, "{opened:?}");
    ensure!(journal.fast_commit_blocks() > 0, "no area");
    let handle = journal.start(1)?;
    ensure!(handle.tid() == report.next_tid, "{}", handle.tid());
    handle.stop();
    journal.commit_running()?;
    drop(journal);
    let after = recover(&device, &map, block_size)?;
    ensure!(after.fast_commits == 0 && after.was_dirty, "{after:?}");
    // Once Linux has replayed it, fjord takes the journal, and its feature is gone.
    KernelMount::new(&copy, "rw")?.unmount()?;
    let report = recover(&load(&copy)?, &map, block_size)?;
    ensure!(!report.was_dirty, "{report:?}");
    Ok(())
}

/// An image with a file whose blocks the tests log, as if they were metadata.
struct Target {
    scratch: Scratch,
    block_size: usize,
    map: JournalMap,
    /// Blocks of the file.
    blocks: Vec<u64>,
    device: Arc<dyn Device>,
    /// What each of them must hold after recovery.
    wanted: BTreeMap<u64, Vec<u8>>,
}

impl Target {
    fn new(mke2fs: &[&str]) -> Result<Target> {
        let scratch = Scratch::in_memory("journal-written")?;
        let contents = scratch.join("contents");
        fs::create_dir(&contents)?;
        fs::write(contents.join("target"), vec![0x11; 300 << 10])?;
        let path = scratch.join("made.img");
        image::make_sparse(&path, 64 << 20)?;
        let mut command = tools::command("mke2fs")?;
        command.args(["-q", "-F", "-J", "size=4"]).args(mke2fs).arg("-d").arg(&contents);
        tools::run(command.arg(&path))?.ok()?;
        let size = block_size(&path)?;
        let runs = file_blocks(&path, "/target")?;
        let blocks: Vec<u64> =
            runs.iter().flat_map(|&(_, start, len)| start..start + u64::from(len)).collect();
        let wanted = blocks.iter().map(|&block| (block, vec![0x11; size])).collect();
        let (map, device) = (journal_map(&path)?, load(&path)?);
        Ok(Target { scratch, block_size: size, map, blocks, device, wanted })
    }

    fn buffer(&self, block: u64) -> Result<Arc<Buffer>> {
        let contents = self.device.read_buf(block * self.block_size as u64, self.block_size)?;
        Ok(Buffer::new(BlockNo(block), contents.into(), BufferKind::Metadata))
    }

    /// Laps of the log, then transactions with everything the format has: several descriptors,
    /// escapes, revokes, newer copies; at last a change that never commits.
    fn log(&mut self, options: &JournalOptions) -> Result<()> {
        let (journal, report) =
            Journal::open(self.device.clone(), self.map.clone(), self.block_size, options)?;
        ensure!(!report.was_dirty, "mke2fs left a dirty journal");
        let buffers = self.blocks.iter().map(|&block| self.buffer(block));
        let buffers: Vec<_> = buffers.collect::<Result<_>>()?;
        for lap in 0..40u8 {
            for (index, buffer) in buffers.iter().enumerate() {
                let fill = lap.wrapping_mul(31).wrapping_add(index as u8);
                self.change(&journal, buffer, fill, index % 7 == 0)?;
            }
            journal.commit_running()?;
            if lap % 3 == 1 {
                journal.checkpoint_all()?;
            }
        }
        // Freed and used for data: the data must stay.
        let freed: Vec<_> = buffers.iter().skip(3).step_by(5).collect();
        let handle = journal.start(2)?;
        for buffer in &freed {
            handle.forget(buffer.block(), Some(buffer))?;
        }
        journal.commit(handle.stop())?;
        for buffer in &freed {
            let data = vec![0xda; self.block_size];
            let offset = buffer.block().0 * self.block_size as u64;
            let request = Request::write(offset, vec![Buf::from_slice(&data)]);
            self.device.submit_one(request).wait()?;
            self.wanted.insert(buffer.block().0, data);
        }
        self.change(&journal, &buffers[0], 0x77, true)?;
        journal.commit_running()?;
        let kept = self.wanted.clone();
        self.change(&journal, &buffers[1], 0x99, false)?;
        self.wanted = kept;
        journal.shutdown();
        Ok(())
    }

    /// Handles in some of eight parts and now and then in two, commits of parts, checkpoints,
    /// frees; at last changes of every part, of which one commits.
    fn log_parts(&mut self, seed: u64) -> Result<()> {
        let options = JournalOptions {
            bit64: true,
            checksum: Some(ChecksumVersion::V3),
            ..JournalOptions::default()
        };
        let (journal, _) =
            Journal::open(self.device.clone(), self.map.clone(), self.block_size, &options)?;
        journal.set_parts(Arc::new(InTurn))?;
        let shared = self.buffer(self.blocks[0])?.snapshot();
        let shared =
            Buffer::new_keeping_base(BlockNo(self.blocks[0]), shared, BufferKind::Metadata);
        let buffers = self.blocks[1..].iter().map(|&block| self.buffer(block));
        let buffers: Vec<_> = buffers.collect::<Result<_>>()?;
        let mut rng = StdRng::seed_from_u64(seed);
        // What each part holds since it last committed.
        let mut pending: BTreeMap<u32, BTreeMap<u64, Vec<u8>>> = BTreeMap::new();
        let mut partial = 0;
        for round in 0..600u32 {
            let fill = round as u8;
            let handle = journal.start(2)?;
            let buffer = &buffers[rng.random_range(0..buffers.len())];
            let part = InTurn.part_of(buffer.block()).0;
            let mut guard = handle.get_write(buffer)?;
            guard.fill(fill);
            pending.entry(part).or_default().insert(buffer.block().0, guard.to_vec());
            drop(guard);
            handle.touch_part(Part(part));
            handle.get_write(&shared)?[InTurn::entry(part, self.block_size)].fill(fill);
            let tid = handle.stop();
            let wanted = rng.random_range(0..InTurn::PARTS);
            match rng.random_range(0..12) {
                0 => drop(journal.checkpoint_some(9)?),
                1..5 => match journal.commit_parts(tid, &[Part(wanted)])? {
                    PartialCommit::Durable => {}
                    PartialCommit::Parts { .. } => {
                        partial += 1;
                        self.committed(pending.remove(&wanted), wanted, &shared);
                    }
                    PartialCommit::Whole(_) => {
                        for (part, blocks) in std::mem::take(&mut pending) {
                            self.committed(Some(blocks), part, &shared);
                        }
                    }
                },
                _ => {}
            }
        }
        ensure!(partial > 20 && pending.len() > 1, "{partial} commits of parts, {pending:?}");
        journal.shutdown();
        Ok(())
    }

    /// What `part` held has committed.
    fn committed(
        &mut self,
        blocks: Option<BTreeMap<u64, Vec<u8>>>,
        part: u32,
        shared: &Arc<Buffer>,
    ) {
        if let Some(blocks) = blocks {
            self.wanted.extend(blocks);
            let entry = InTurn::entry(part, self.block_size);
            let version = self.wanted.entry(shared.block().0).or_default();
            version[entry.clone()].copy_from_slice(&shared.read()[entry]);
        }
    }

    fn change(
        &mut self,
        journal: &Journal,
        buffer: &Arc<Buffer>,
        fill: u8,
        magic: bool,
    ) -> Result<()> {
        let handle = journal.start(1)?;
        let mut guard = handle.get_write(buffer)?;
        guard.fill(fill);
        if magic {
            guard[..4].copy_from_slice(&MAGIC.to_be_bytes());
        }
        self.wanted.insert(buffer.block().0, guard.to_vec());
        drop(guard);
        handle.stop();
        Ok(())
    }

    /// The image with the flag that makes e2fsck and Linux look at the journal.
    fn dirty_image(&self, name: &str) -> Result<std::path::PathBuf> {
        let path = self.scratch.join(name);
        store(&self.device, &path)?;
        image::debugfs_write(&path, &["features needs_recovery".to_owned()])?;
        Ok(path)
    }

    fn check(&self, device: &dyn Device, by: &str) -> Result<()> {
        for (&block, wanted) in &self.wanted {
            let got = device.read_buf(block * self.block_size as u64, self.block_size)?;
            ensure!(got[..] == wanted[..], "{by}: block {block} is {:x?}", &got[..8]);
        }
        Ok(())
    }
}

#[test]
fn logs_written_by_fjord_are_replayed_by_e2fsck_and_linux() -> Result<()> {
    tools::require_root()?;
    use ChecksumVersion::{None as Plain, V1, V2, V3};
    let made: &[(&[&str], ChecksumVersion, bool)] = &[
        (&["-t", "ext4", "-b", "4096"], V3, true),
        (&["-t", "ext4", "-b", "1024"], V3, true),
        (&["-t", "ext4", "-b", "4096", "-O", "^64bit"], V3, false),
        (&["-t", "ext4", "-b", "4096"], V2, true),
        (&["-t", "ext4", "-b", "1024", "-O", "^64bit"], V2, false),
        (&["-t", "ext4", "-b", "4096", "-O", "^metadata_csum"], V1, true),
        (&["-t", "ext4", "-b", "1024", "-O", "^metadata_csum,^64bit"], V1, false),
        (&["-t", "ext4", "-b", "4096", "-O", "^metadata_csum"], Plain, true),
        (&["-t", "ext3", "-b", "1024"], Plain, false),
    ];
    for &(mke2fs, checksum, bit64) in made {
        let context = || format!("{mke2fs:?} {checksum:?}");
        let mut target = Target::new(mke2fs).with_context(context)?;
        let options =
            JournalOptions { bit64, checksum: Some(checksum), ..JournalOptions::default() };
        target.log(&options).with_context(context)?;

        let checked = target.dirty_image("e2fsck.img")?;
        let said = said(&image::e2fsck_repair(&checked).with_context(context)?);
        ensure!(said.contains("recovering journal"), "{}: {said}", context());
        image::e2fsck_clean(&checked).with_context(context)?;
        target.check(&load(&checked)?, "e2fsck").with_context(context)?;

        let mounted = target.dirty_image("linux.img")?;
        KernelMount::new(&mounted, "rw").with_context(context)?.unmount()?;
        target.check(&load(&mounted)?, "Linux").with_context(context)?;

        let ours = load(&target.dirty_image("fjord.img")?)?;
        let report = recover(&ours, &target.map, target.block_size)?;
        ensure!(report.revoked_blocks > 0, "{}: {report:?}", context());
        target.check(&ours, "fjord").with_context(context)?;
    }
    Ok(())
}

/// What stood before in the later sectors of a descriptor that a power cut tore.
#[derive(Clone, Copy, Debug)]
enum Torn {
    /// Nothing: the log was never written this far.
    Zeros,
    /// A descriptor with more tags.
    LongerDescriptor,
    /// Zeros, and its first sector is the old one as well.
    OldHeader,
}

impl Target {
    const SECTOR: usize = 512;

    /// Fills the log with commits until one of `blocks` blocks just fits.
    fn fill_log(&mut self, journal: &Journal, buffers: &[Arc<Buffer>], blocks: u32) -> Result<()> {
        let most = buffers.len() as u32;
        let mut fill = 0u8;
        loop {
            let plan = recovery::scan(&self.device, &self.map, self.block_size)?;
            let (superblock, end) = (plan.superblock(), plan.log_end());
            let len = superblock.log_end() - superblock.s_first;
            let start = if superblock.s_start == 0 { end } else { superblock.s_start };
            let used = if end >= start { end - start } else { len - (start - end) };
            // Each commit has a descriptor and a commit block, and one block of the log stays free.
            let free = len - 1 - used - (blocks + 2);
            let next = match free {
                0 => return Ok(()),
                _ if free > 2 * (most + 2) => most,
                _ if free > most + 2 => free / 2,
                _ => free - 2,
            };
            fill = fill.wrapping_add(1);
            for buffer in &buffers[..next as usize] {
                self.change(journal, buffer, fill, false)?;
            }
            journal.commit_running()?;
        }
    }

    /// A nearly full log whose newest commit was cut short: its blocks are there, its commit block
    /// is not, and its descriptor is torn after the first sector, which has tags only.
    fn tear(&mut self, options: &JournalOptions, torn: Torn) -> Result<()> {
        let (journal, _) =
            Journal::open(self.device.clone(), self.map.clone(), self.block_size, options)?;
        let buffers = self.blocks.iter().map(|&block| self.buffer(block));
        let buffers: Vec<_> = buffers.collect::<Result<_>>()?;
        let format = recovery::scan(&self.device, &self.map, self.block_size)?;
        let format = format.superblock().log_format();
        let blocks = (Self::SECTOR - 12 - 16) / format.tag_bytes() + 8;
        self.fill_log(&journal, &buffers[..75], blocks as u32)?;
        let at = recovery::scan(&self.device, &self.map, self.block_size)?.log_end();
        let kept = self.wanted.clone();
        for buffer in &buffers[..blocks] {
            self.change(&journal, buffer, 0xee, false)?;
        }
        journal.commit_running()?;
        self.wanted = kept;
        journal.shutdown();
        let plan = recovery::scan(&self.device, &self.map, self.block_size)?;
        ensure!(plan.transactions().last().is_some_and(|last| last.start == at), "no commit");
        let mut old = vec![0; self.block_size];
        if let Torn::LongerDescriptor = torn {
            let mut builder = DescriptorBuilder::new(&format, Tid(1), &mut old)?;
            while builder.has_room() {
                builder.push(BlockNo(self.blocks[0]), false, 0)?;
            }
            builder.finish()?;
        }
        let superblock = plan.superblock();
        let offset = |at: u32| -> Result<u64> {
            let len = superblock.log_end() - superblock.s_first;
            let at = superblock.s_first + (at - superblock.s_first) % len;
            Ok(self.map.run(at)?.0.0 * self.block_size as u64)
        };
        let from = if let Torn::OldHeader = torn { 0 } else { Self::SECTOR };
        self.device.write_all_at(offset(at)? + from as u64, &old[from..])?;
        self.device.write_all_at(offset(at + 1 + blocks as u32)?, &vec![0; self.block_size])?;
        Ok(())
    }
}

#[test]
fn a_torn_descriptor_at_the_end_of_a_full_log_ends_it_as_under_e2fsck_and_linux() -> Result<()> {
    tools::require_root()?;
    use ChecksumVersion::{None as Plain, V1, V2, V3};
    let made: &[(&[&str], ChecksumVersion, bool)] = &[
        (&["-t", "ext4", "-b", "4096"], V3, true),
        (&["-t", "ext4", "-b", "1024"], V2, true),
        (&["-t", "ext4", "-b", "1024", "-O", "^metadata_csum"], V1, true),
        (&["-t", "ext4", "-b", "4096", "-O", "^metadata_csum"], Plain, true),
        (&["-t", "ext3", "-b", "1024"], Plain, false),
    ];
    for &(mke2fs, checksum, bit64) in made {
        for torn in [Torn::Zeros, Torn::LongerDescriptor, Torn::OldHeader] {
            let context = || format!("{mke2fs:?} {checksum:?} {torn:?}");
            let mut target = Target::new(mke2fs).with_context(context)?;
            let options =
                JournalOptions { bit64, checksum: Some(checksum), ..JournalOptions::default() };
            target.tear(&options, torn).with_context(context)?;
            let image = target.dirty_image("torn.img")?;
            let cases = compare(&image, &target.scratch).with_context(context)?;
            let row = match (torn, checksum) {
                (Torn::OldHeader, _) => recovery::Case::NoHeader,
                (_, Plain | V1) => recovery::Case::TornLap,
                (_, V2 | V3) => recovery::Case::BadDescriptorTorn,
            };
            ensure!(cases.contains(&row), "{}: {cases:?}", context());
            let ours = load(&image)?;
            recover(&ours, &target.map, target.block_size)?;
            target.check(&ours, "fjord").with_context(context)?;
            KernelMount::new(&image, "rw").with_context(context)?.unmount()?;
            target.check(&load(&image)?, "Linux").with_context(context)?;
        }
    }
    Ok(())
}

/// Parts by block number, and a shared block with an entry of each.
struct InTurn;

impl InTurn {
    const PARTS: u32 = 8;

    fn entry(part: u32, block_size: usize) -> std::ops::Range<usize> {
        let bytes = block_size / Self::PARTS as usize;
        part as usize * bytes..(part as usize + 1) * bytes
    }
}

impl Parts for InTurn {
    fn part_of(&self, block: BlockNo) -> Part {
        Part((block.0 % u64::from(Self::PARTS)) as u32)
    }

    fn copy_entries(&self, _: BlockNo, current: &[u8], version: &mut [u8], chosen: &PartSet) {
        for part in (0..Self::PARTS).filter(|&part| chosen.contains(Part(part))) {
            let entry = InTurn::entry(part, current.len());
            version[entry.clone()].copy_from_slice(&current[entry]);
        }
    }
}

#[test]
fn commits_of_parts_are_replayed_by_e2fsck_and_linux() -> Result<()> {
    tools::require_root()?;
    for seed in 0..6 {
        let context = || format!("seed {seed}");
        let block_size = if seed % 2 == 0 { "4096" } else { "1024" };
        let mut target = Target::new(&["-t", "ext4", "-b", block_size])?;
        target.log_parts(seed).with_context(context)?;
        let checked = target.dirty_image("e2fsck.img")?;
        let said = said(&image::e2fsck_repair(&checked).with_context(context)?);
        ensure!(said.contains("recovering journal"), "{}: {said}", context());
        target.check(&load(&checked)?, "e2fsck").with_context(context)?;
        let mounted = target.dirty_image("linux.img")?;
        KernelMount::new(&mounted, "rw").with_context(context)?.unmount()?;
        target.check(&load(&mounted)?, "Linux").with_context(context)?;
        let ours = load(&target.dirty_image("fjord.img")?)?;
        recover(&ours, &target.map, target.block_size)?;
        target.check(&ours, "fjord").with_context(context)?;
    }
    Ok(())
}

#[test]
fn a_journal_closed_by_fjord_is_clean_for_e2fsck() -> Result<()> {
    tools::require_root()?;
    let mut target = Target::new(&["-t", "ext4", "-b", "4096"])?;
    let options = JournalOptions { bit64: true, ..JournalOptions::default() };
    target.log(&options)?;
    let (journal, report) =
        Journal::open(target.device.clone(), target.map.clone(), 4096, &options)?;
    ensure!(report.was_dirty, "the log was dirty");
    journal.close()?;
    let path = target.scratch.join("clean.img");
    store(&target.device, &path)?;
    image::e2fsck_clean(&path)?;
    KernelMount::new(&path, "rw")?.unmount()?;
    target.check(&load(&path)?, "closed")
}
