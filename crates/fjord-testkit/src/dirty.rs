//! Dirty journals: images copied while the kernel works on them, images shut down in the middle of
//! work, journals written by debugfs in the checksum formats Linux no longer writes, and damaged
//! copies of all of these.
//!
//! Invariant: a copy taken of a live image is one state of the device: it is taken again when the
//! loop device wrote meanwhile.

use std::{
    fs::{File, OpenOptions},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use fjord::{Cred, Fs, MountOptions};
use fjord_format::jbd2::{HEADER_BYTES, Incompat, Superblock};

use crate::{
    image::{self, KernelMount, Scratch},
    kernel_log::KernelLog,
    manifest::Manifest,
    rng::{Rng, mix},
    script::{Executor, KernelExecutor, Op, Script, Shape},
    tools,
};

/// Bytes of the images: small, so that copies are cheap.
const SIZE: u64 = 96 << 20;

/// How an image with a dirty journal is made.
#[derive(Debug, Clone, Copy)]
pub struct Recipe {
    /// Name in reports.
    pub name: &'static str,
    /// mke2fs arguments besides the journal size.
    pub mke2fs: &'static [&'static str],
    /// Mount options while the kernel works.
    pub mount: &'static str,
}

const fn recipe(
    name: &'static str,
    mke2fs: &'static [&'static str],
    mount: &'static str,
) -> Recipe {
    Recipe { name, mke2fs, mount }
}

/// All ways the kernel itself writes journals. The journal has 4 MiB or less, so that it wraps.
pub const RECIPES: &[Recipe] = &[
    recipe("v3-4k", &["-t", "ext4", "-b", "4096"], "rw"),
    recipe("v3-1k", &["-t", "ext4", "-b", "1024"], "rw"),
    recipe("v3-no64bit", &["-t", "ext4", "-b", "4096", "-O", "^64bit"], "rw"),
    recipe("v3-async", &["-t", "ext4", "-b", "4096"], "journal_async_commit,data=writeback"),
    recipe("v3-data-journal", &["-t", "ext4", "-b", "4096"], "data=journal"),
    recipe("v3-orphan_file", &["-t", "ext4", "-b", "4096", "-O", "orphan_file"], "rw"),
    recipe("none-64bit", &["-t", "ext4", "-b", "4096", "-O", "^metadata_csum"], "rw"),
    recipe("none-no64bit-1k", &["-t", "ext4", "-b", "1024", "-O", "^metadata_csum,^64bit"], "rw"),
    recipe("v1", &["-t", "ext4", "-b", "4096", "-O", "^metadata_csum"], "journal_checksum"),
    recipe(
        "v1-async-no64bit",
        &["-t", "ext4", "-b", "1024", "-O", "^metadata_csum,^64bit"],
        "journal_async_commit,data=writeback",
    ),
    recipe("ext3-1k", &["-t", "ext3", "-b", "1024"], "rw"),
    recipe("ext3-data-journal", &["-t", "ext3", "-b", "1024"], "data=journal"),
];

/// Fsyncs the file `synced` in an image with ijournal areas, and leaves in `cut` what a kill after
/// that leaves: the file is in an area of the journal alone.
pub fn fsync_into_area(img: &Path, cut: &Path) -> Result<()> {
    let options = MountOptions { background_threads: false, ..MountOptions::default() };
    let fs = Fs::open(img, &options)?;
    let file = fs.root()?.create(b"synced", 0o644, &Cred::root())?;
    file.write(0, b"what was synced")?;
    file.fsync(false)?;
    std::fs::copy(img, cut)?;
    drop(file);
    fs.unmount()?;
    Ok(())
}

/// Makes dirty images of a recipe in `dir`: some copied between operations, one left by a shutdown
/// in the middle of operations.
pub fn make(recipe: &Recipe, seed: u64, dir: &Path) -> Result<Vec<PathBuf>> {
    let live = dir.join(format!("{}-live.img", recipe.name));
    image::make_sparse(&live, SIZE)?;
    // 4 MiB needs 1,024 blocks at least; larger blocks take the least the journal may have.
    tools::run(
        tools::command("mke2fs")?
            .args(["-q", "-F", "-J", "size=4", "-E", "lazy_itable_init=0"])
            .args(recipe.mke2fs)
            .arg(&live),
    )?
    .ok()?;
    // The timers are kept out, so that the log holds what the fsyncs put there.
    let options = format!("{},commit=300,noinit_itable", recipe.mount);
    let mount = KernelMount::new(&live, &options)?;
    let device = mount.loop_name()?;
    let mut copies = Vec::new();
    let mut rng = Rng::new(seed);
    for number in 0..3 {
        work(mount.path(), &format!("w{number}"), rng.next_u64(), &AtomicBool::new(false));
        let copy = dir.join(format!("{}-paused-{number}.img", recipe.name));
        copy_quiet(&live, &copy, &device)?;
        copies.push(copy);
    }
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| -> Result<()> {
        for number in 0..2 {
            let (root, stop, seed) = (mount.path(), &stop, rng.next_u64());
            scope.spawn(move || work(root, &format!("s{number}"), seed, stop));
        }
        std::thread::sleep(Duration::from_millis(rng.range(20, 400)));
        let down = image::shut_down(mount.path());
        stop.store(true, Ordering::SeqCst);
        down
    })?;
    mount.unmount()?;
    copies.push(live);
    Ok(copies)
}

/// A small varied script with fsyncs strewn in, tables deleted again (revokes), and blocks that
/// look like journal blocks (escapes). Ends early when told; failures are part of the script.
fn work(root: &Path, name: &str, seed: u64, stop: &AtomicBool) {
    let mut kernel = KernelExecutor::new(root);
    let top = name.as_bytes().to_vec();
    let _ = kernel.apply(&Op::Mkdir { path: top.into(), mode: 0o755 });
    let mut below = KernelExecutor::new(&root.join(name));
    let shape = Shape { large_directory: 300, random_steps: 300, depth: 5 };
    let script = Script::with_shape(seed, shape);
    let mut rng = Rng::new(seed);
    for (index, op) in script.ops.iter().enumerate() {
        if stop.load(Ordering::SeqCst) {
            return;
        }
        // Far offsets and large files would fill the small image.
        let large = matches!(op, Op::Write { len, .. } if *len > 400_000);
        if large || matches!(op, Op::SetFlags { .. } | Op::StampAll { .. }) {
            continue;
        }
        let _ = below.apply(op);
        if rng.percent(4) {
            let _ = below.apply(&Op::Fsync { path: "".into() });
        }
        if index % 200 == 0 {
            let _ = tables(&root.join(name), index, &mut below);
        }
    }
}

/// Makes and deletes a directory and a file with mapping blocks, and reuses their blocks.
fn tables(root: &Path, number: usize, run: &mut KernelExecutor) -> std::io::Result<()> {
    let dir = format!("tables-{number}");
    let _ = run.apply(&Op::Mkdir { path: dir.as_str().into(), mode: 0o755 });
    for index in 0..40 {
        let path = format!("{dir}/{index}-{}", "n".repeat(100)).as_str().into();
        let _ = run.apply(&Op::Create { path, mode: 0o644 });
    }
    let mapped = format!("mapped-{number}");
    let _ = run.apply(&Op::Create { path: mapped.as_str().into(), mode: 0o644 });
    for index in 0..30u64 {
        let path = mapped.as_str().into();
        let _ = run.apply(&Op::Write { path, offset: index * 16_384, len: 900, seed: index });
    }
    let _ = run.apply(&Op::Fsync { path: mapped.as_str().into() });
    for index in 0..40 {
        let path = format!("{dir}/{index}-{}", "n".repeat(100)).as_str().into();
        let _ = run.apply(&Op::Unlink { path });
    }
    let _ = run.apply(&Op::Rmdir { path: dir.as_str().into() });
    let _ = run.apply(&Op::Truncate { path: mapped.as_str().into(), size: 3000 });
    let _ = run.apply(&Op::Fsync { path: mapped.as_str().into() });
    // The magic number of journal blocks at the start of each block of a file.
    let mut block = vec![0u8; 32_768];
    for start in (0..block.len()).step_by(1024) {
        block[start..start + 8].copy_from_slice(&[0xC0, 0x3B, 0x39, 0x98, 0, 0, 0, 1]);
    }
    let file = std::fs::File::create(root.join(format!("magic-{number}")))?;
    file.write_all_at(&block, 0)?;
    file.sync_all()
}

/// Copies a live image; again when the device wrote meanwhile, or had not finished a write.
pub(crate) fn copy_quiet(live: &Path, copy: &Path, device: &str) -> Result<()> {
    let stat = format!("/sys/block/{device}/stat");
    let writes = || -> Result<(String, String)> {
        let text = std::fs::read_to_string(&stat).with_context(|| format!("reading {stat}"))?;
        let fields: Vec<&str> = text.split_whitespace().collect();
        // Writes completed, and requests in flight.
        let field = |at: usize| fields.get(at).copied().unwrap_or_default().to_owned();
        Ok((field(4), field(8)))
    };
    for _ in 0..200 {
        let before = writes()?;
        image::copy_sparse(live, copy)?;
        if before.1 == "0" && writes()? == before {
            return Ok(());
        }
    }
    bail!("{device} never stayed quiet for the time of a copy")
}

/// A copy of a dirty image with a few bytes of its log changed.
pub fn damage_log(from: &Path, to: &Path, seed: u64) -> Result<()> {
    image::copy_sparse(from, to)?;
    let (block_bytes, blocks) = journal_blocks(to)?;
    let file = OpenOptions::new().read(true).write(true).open(to)?;
    let mut head = [0; 1024];
    file.read_exact_at(&mut head, blocks[0] * block_bytes)?;
    let start = u32::from_be_bytes([head[0x1c], head[0x1d], head[0x1e], head[0x1f]]);
    ensure!(start != 0, "{} has no dirty journal", from.display());
    let mut rng = Rng::new(seed);
    for _ in 0..rng.range(1, 3) {
        // Near the start of the log, where live transactions are, or anywhere in it.
        let log_blocks = blocks.len() as u64 - 1;
        let reach = if rng.percent(40) { 40 } else { log_blocks };
        let index = (u64::from(start) - 1 + rng.below(reach)) % log_blocks + 1;
        let place = blocks[index as usize] * block_bytes;
        let offset = if rng.percent(50) { rng.below(64) } else { rng.below(block_bytes) };
        let mut byte = [0];
        file.read_exact_at(&mut byte, place + offset)?;
        byte[0] ^= 1 << rng.below(8);
        file.write_all_at(&byte, place + offset)?;
    }
    Ok(())
}

/// Changes `N` bytes at `offset` of a block of the journal.
pub fn change_log<const N: usize>(
    image: &Path,
    journal_block: usize,
    offset: u64,
    change: impl FnOnce(&mut [u8; N]),
) -> Result<()> {
    let (block_bytes, blocks) = journal_blocks(image)?;
    let block = blocks.get(journal_block).context("the journal has no such block")?;
    let file = OpenOptions::new().read(true).write(true).open(image)?;
    let mut bytes = [0; N];
    file.read_exact_at(&mut bytes, block * block_bytes + offset)?;
    change(&mut bytes);
    file.write_all_at(&bytes, block * block_bytes + offset)?;
    Ok(())
}

/// The journal's superblock.
fn journal_superblock(image: &Path) -> Result<Superblock> {
    let (block_bytes, blocks) = journal_blocks(image)?;
    let mut bytes = [0; 1024];
    File::open(image)?.read_exact_at(&mut bytes, blocks[0] * block_bytes)?;
    Ok(Superblock::decode(&bytes)?)
}

/// Marks the log as one of asynchronous commits.
pub fn make_async(image: &Path) -> Result<()> {
    let mut superblock = journal_superblock(image)?;
    superblock.s_feature_incompat |= Incompat::ASYNC_COMMIT;
    change_log(image, 0, 0, |bytes| *bytes = superblock.encode())
}

/// A header that debugfs finds on its walk along the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogHeader {
    /// Whether it is of a commit block.
    pub commit: bool,
    /// Its place in the journal.
    pub journal_block: usize,
}

/// The headers that the walk along the log meets, as debugfs walks it.
pub fn log_headers(image: &Path) -> Result<Vec<LogHeader>> {
    let said = image::debugfs(image, "logdump -S")?;
    let found = said.lines().filter(|line| line.starts_with("Found expected sequence"));
    found
        .map(|line| {
            let (_, place) = line.rsplit_once(" at block ").context("debugfs tells no place")?;
            let journal_block = place.trim().parse().context("the place of a header")?;
            Ok(LogHeader { commit: line.contains("(commit block)"), journal_block })
        })
        .collect()
}

/// A copy of an image with a log of asynchronous commits, without the log's last transaction: its
/// commit block has no header.
pub fn without_last_async(from: &Path, to: &Path) -> Result<()> {
    let features = journal_superblock(from)?.s_feature_incompat;
    ensure!(features.contains(Incompat::ASYNC_COMMIT), "the log has no asynchronous commits");
    image::copy_sparse(from, to)?;
    let headers = log_headers(from)?;
    let last = headers.iter().rfind(|header| header.commit).context("nothing is committed")?;
    change_log(to, last.journal_block, 0, |header: &mut [u8; HEADER_BYTES]| header.fill(0))
}

/// The transaction IDs of all commit blocks in the log, those of earlier laps included.
pub fn committed(image: &Path) -> Result<Vec<u32>> {
    const COMMIT_BLOCK: [u8; 8] = [0xC0, 0x3B, 0x39, 0x98, 0, 0, 0, 2];
    let (block_bytes, blocks) = journal_blocks(image)?;
    let file = std::fs::File::open(image)?;
    let mut tids = Vec::new();
    for block in blocks {
        let mut header = [0; 12];
        file.read_exact_at(&mut header, block * block_bytes)?;
        let (kind, tid) = header.split_at(8);
        if kind == COMMIT_BLOCK {
            tids.push(u32::from_be_bytes(tid.try_into().context("four bytes")?));
        }
    }
    Ok(tids)
}

/// Block size and physical blocks of the journal inode, in logical order.
fn journal_blocks(image: &Path) -> Result<(u64, Vec<u64>)> {
    let stats = image::debugfs(image, "show_super_stats -h")?;
    let block_bytes = stats
        .lines()
        .find_map(|line| line.strip_prefix("Block size:"))
        .and_then(|value| value.trim().parse().ok())
        .context("debugfs shows a block size")?;
    let said = image::debugfs(image, "blocks <8>")?;
    let blocks: Vec<u64> =
        said.split_whitespace().map(str::parse).collect::<Result<_, _>>().context("block list")?;
    ensure!(blocks.len() > 100, "the journal has only {} blocks", blocks.len());
    // debugfs lists mapping blocks of a block map among them; a journal of extents has none here.
    Ok((block_bytes, blocks))
}

/// A journal written by debugfs.
#[derive(Debug, Clone, Copy)]
pub struct Written {
    /// Checksum version 1, 2 or 3; 0: none.
    pub checksum: u32,
    /// mke2fs arguments.
    pub mke2fs: &'static [&'static str],
}

/// What debugfs can write: each checksum version, with and without 64-bit block numbers.
pub const WRITTEN: &[Written] = &[
    Written { checksum: 0, mke2fs: &["-O", "^metadata_csum,^64bit"] },
    Written { checksum: 0, mke2fs: &["-O", "^metadata_csum,64bit"] },
    Written { checksum: 2, mke2fs: &["-O", "metadata_csum,^64bit"] },
    Written { checksum: 2, mke2fs: &["-O", "metadata_csum,64bit"] },
    Written { checksum: 3, mke2fs: &["-O", "metadata_csum,^64bit"] },
    Written { checksum: 3, mke2fs: &["-O", "metadata_csum,64bit"] },
];

/// Makes an image whose journal, written by debugfs, leads from one tree to another: a
/// transaction with half of the changed blocks, one with the rest, a revoke of a block that no
/// later transaction writes, and a transaction without a commit record that must not be replayed.
pub fn make_with_debugfs(written: &Written, seed: u64, dir: &Path) -> Result<PathBuf> {
    let (before, after) = (dir.join("before.img"), dir.join("after.img"));
    image::make_sparse(&before, SIZE)?;
    tools::run(
        tools::command("mke2fs")?
            .args(["-q", "-F", "-t", "ext4", "-b", "4096", "-J", "size=8"])
            .args(["-E", "lazy_itable_init=0"])
            .args(written.mke2fs)
            .arg(&before),
    )?
    .ok()?;
    let mount = KernelMount::new(&before, "noinit_itable")?;
    work(mount.path(), "one", seed, &AtomicBool::new(false));
    mount.unmount()?;
    image::copy_sparse(&before, &after)?;
    let mount = KernelMount::new(&after, "noinit_itable")?;
    let mut run = KernelExecutor::new(mount.path());
    let _ = run.apply(&Op::Mkdir { path: "two".into(), mode: 0o755 });
    for index in 0..60 {
        let path: crate::script::Path = format!("two/{index}").as_str().into();
        let _ = run.apply(&Op::Create { path: path.clone(), mode: 0o644 });
        let _ = run.apply(&Op::Write { path, offset: 0, len: 6000, seed: mix(seed ^ index) });
    }
    mount.unmount()?;
    write_journal(&before, &after, written, dir)?;
    Ok(before)
}

fn write_journal(before: &Path, after: &Path, written: &Written, dir: &Path) -> Result<()> {
    const BLOCK: usize = 4096;
    let (_, journal) = journal_blocks(before)?;
    let (old, new) = (std::fs::read(before)?, std::fs::read(after)?);
    // Not the superblock: its flag that says "recover me" must stay.
    let changed: Vec<usize> = (1..old.len() / BLOCK)
        .filter(|block| old[block * BLOCK..][..BLOCK] != new[block * BLOCK..][..BLOCK])
        .filter(|block| !journal.contains(&(*block as u64)))
        .collect();
    ensure!(changed.len() > 20, "too few changed blocks: {}", changed.len());
    let mut requests = vec![match written.checksum {
        0 => "jo".to_owned(),
        version => format!("jo -c -v {version}"),
    }];
    let mut transaction = |name: &str, blocks: &[usize], extra: &str, from: &[u8]| -> Result<()> {
        let file = dir.join(name);
        let content: Vec<u8> =
            blocks.iter().flat_map(|block| &from[block * BLOCK..][..BLOCK]).copied().collect();
        std::fs::write(&file, content)?;
        let list: Vec<String> = blocks.iter().map(ToString::to_string).collect();
        requests.push(format!("jw {extra} -b {} \"{}\"", list.join(","), file.display()));
        Ok(())
    };
    let (first, second) = changed.split_at(changed.len() / 2);
    // First, wrongly, zeros for one block that the revoke below must keep from being replayed.
    let free =
        (1..old.len() / BLOCK).rev().find(|block| !changed.contains(block)).context("a block")?;
    let zeros = vec![0; old.len()];
    transaction("revoked", &[free], "", &zeros)?;
    transaction("first", first, "", &new)?;
    transaction("second", second, "", &new)?;
    transaction("uncommitted", &[changed[0]], "-c", &zeros)?;
    // The revoke record belongs to a transaction after the one it revokes.
    requests.insert(2, format!("jw -r {free}"));
    requests.push("jc".to_owned());
    let said = image::debugfs_write(before, &requests)?;
    let failed = said.lines().find(|line| line.contains("while") || line.contains("Usage"));
    ensure!(failed.is_none(), "debugfs could not write the journal: {said}");
    Ok(())
}

/// What Linux does with a dirty image.
#[derive(Debug)]
pub enum ByLinux {
    /// It has recovered this copy.
    Recovered(PathBuf),
    /// It refuses the image as damaged; what mount and the kernel's log say.
    Refused(String),
}

impl ByLinux {
    /// The recovered copy.
    ///
    /// # Errors
    /// Linux refuses, with its reason.
    pub fn image(self) -> Result<PathBuf> {
        match self {
            ByLinux::Recovered(copy) => Ok(copy),
            ByLinux::Refused(reason) => bail!("Linux refuses the image: {reason}"),
        }
    }
}

/// The outcome of Linux on a copy of a dirty image.
///
/// # Errors
/// The mount fails for another reason than damage in the image, such as a lack of loop devices.
pub fn recovered_by_linux(dirty: &Path, scratch: &Scratch) -> Result<ByLinux> {
    let copy = scratch.join("by-linux.img");
    image::copy_sparse(dirty, &copy)?;
    let mut log = KernelLog::from_now();
    match KernelMount::new(&copy, "rw,noinit_itable") {
        Ok(mount) => mount.unmount().map(|()| ByLinux::Recovered(copy)),
        Err(error) => {
            let error = format!("{error:#}");
            let lines = log.lines_with(&["JBD2", "EXT4-fs", "I/O error"]);
            let is_refusal = is_refusal(&error, &lines);
            let reason = format!("{error} ({})", lines.join("; "));
            ensure!(is_refusal, "Linux does not mount, but not for damage: {reason}");
            Ok(ByLinux::Refused(reason))
        }
    }
}

/// Whether a mount failed because of what the image holds, by what mount(8) and the kernel say.
fn is_refusal(error: &str, lines: &[String]) -> bool {
    // EBADMSG and EUCLEAN, in the versions of mount(8).
    const DAMAGE: [&str; 3] =
        ["probably corrupted filesystem", "Structure needs cleaning", "Bad message"];
    if DAMAGE.iter().any(|damage| error.contains(damage)) {
        return true;
    }
    // EINVAL and EIO say nothing by themselves: an impossible revoke count gives the first. Other
    // tests mount at the same time: lines count that name the device, which mount(8) then tells.
    let Some((_, rest)) = error.split_once("/dev/loop") else { return false };
    let number: String = rest.chars().take_while(char::is_ascii_digit).collect();
    let by_journal = format!("EXT4-fs (loop{number}): error loading journal");
    let by_device = format!("I/O error, dev loop{number},");
    let says = |what: &str| lines.iter().any(|line| line.contains(what));
    says(&by_journal) && !says(&by_device)
}

/// What Linux shows of an image.
pub fn tree_on_linux(image: &Path) -> Result<Manifest> {
    let mount = KernelMount::new(image, "ro")?;
    let manifest = Manifest::from_directory(mount.path())?;
    mount.unmount()?;
    Ok(manifest)
}

/// The outcome of `e2fsck -fy` on a copy of a dirty image.
pub fn recovered_by_e2fsck(dirty: &Path, scratch: &Scratch) -> Result<PathBuf> {
    let copy = scratch.join("by-e2fsck.img");
    image::copy_sparse(dirty, &copy)?;
    image::e2fsck_repair(&copy)?;
    Ok(copy)
}
