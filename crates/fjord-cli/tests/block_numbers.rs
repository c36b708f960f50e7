//! FIBMAP and filefrag(8) on a fuseblk mount name the blocks that debugfs finds in the image. Needs
//! root.

use std::{
    fs::{self, File},
    os::{
        fd::AsRawFd,
        unix::fs::{FileExt, MetadataExt},
    },
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use fjord_testkit::{
    features,
    fjord_mount::FjordMount,
    image::{self, KernelMount, Scratch},
    tools,
};

/// The block of the device that block `index` of the file is, in blocks of FIGETBSZ.
fn fibmap(file: &File, index: u32) -> Result<u32> {
    let mut block = index;
    // SAFETY: FIBMAP reads and writes one int through a pointer that is valid for the call.
    let rc = unsafe { libc::ioctl(file.as_raw_fd(), 1, &raw mut block) };
    ensure!(rc == 0, "FIBMAP: {}", std::io::Error::last_os_error());
    Ok(block)
}

/// Files of all kinds of blocks, written just now.
fn make(dir: &Path, block: u64) -> Result<()> {
    fs::write(dir.join("plain"), vec![1; 10 * block as usize])?;
    let holes = File::create(dir.join("holes"))?;
    for index in [1, 2, 5, 9, 30, 700] {
        holes.write_all_at(&vec![2; block as usize], index * block)?;
    }
    holes.set_len(720 * block + 17)?;
    let reserved = File::create(dir.join("reserved"))?;
    match rustix::fs::fallocate(&reserved, rustix::fs::FallocateFlags::empty(), 0, 20 * block) {
        // Files with a block map have no unwritten blocks.
        Err(rustix::io::Errno::OPNOTSUPP) => reserved.set_len(20 * block)?,
        other => other?,
    }
    reserved.write_all_at(&vec![3; 2 * block as usize], 4 * block)?;
    fs::write(dir.join("small"), b"small")?;
    File::create(dir.join("empty"))?;
    Ok(())
}

const FILES: [(&str, u32); 5] =
    [("plain", 12), ("holes", 725), ("reserved", 24), ("small", 2), ("empty", 2)];

/// The size in bytes of the blocks that FIBMAP counts in.
fn block_size(dir: &Path) -> Result<u64> {
    let mut size = 0u32;
    let dir = File::open(dir)?;
    // SAFETY: FIGETBSZ writes one int through a pointer that is valid for the call.
    let rc = unsafe { libc::ioctl(dir.as_raw_fd(), 2, &raw mut size) };
    ensure!(rc == 0, "FIGETBSZ: {}", std::io::Error::last_os_error());
    Ok(u64::from(size))
}

/// The block numbers of all files, as FIBMAP gives them right after the files were written.
fn asked(dir: &Path, block: u64) -> Result<Vec<Vec<u64>>> {
    let unit = block_size(dir)?;
    FILES
        .iter()
        .map(|(name, blocks)| {
            let file = File::open(dir.join(name))?;
            let count = (u64::from(*blocks) * block / unit) as u32;
            (0..count).map(|index| Ok(u64::from(fibmap(&file, index)?))).collect()
        })
        .collect()
}

/// The same by debugfs, whose bmap tells unwritten blocks by a word and holes by 0, in blocks of
/// `unit` bytes: of smaller ones in the image all must lie one after the other.
fn in_image(img: &Path, block: u64, unit: u64) -> Result<Vec<Vec<u64>>> {
    FILES
        .iter()
        .map(|(name, blocks)| {
            let script: Vec<_> = (0..*blocks).map(|i| format!("bmap /{name} {i}\n")).collect();
            let requests = img.with_extension("requests");
            fs::write(&requests, script.concat())?;
            let out = tools::run(tools::command("debugfs")?.arg("-f").arg(&requests).arg(img))?;
            let said = out.ok()?.stdout;
            // An answer below each request; none for content in the inode.
            let number = |answer: &str| -> Result<u64> {
                let word = answer.lines().nth(1).and_then(|line| line.split(' ').next());
                if answer.contains("uninit") { Ok(0) } else { Ok(word.unwrap_or("0").parse()?) }
            };
            let told = said.split("debugfs: ").skip(1).map(number).collect::<Result<Vec<_>>>()?;
            ensure!(told.len() == *blocks as usize, "debugfs: {said}");
            let out = tools::run(
                tools::command("debugfs")?.arg("-R").arg(format!("stat /{name}")).arg(img),
            )?;
            let out = out.ok()?.stdout;
            let size = out.split("Size: ").nth(1).and_then(|rest| rest.split_whitespace().next());
            let size: u64 = size.context("a size")?.parse()?;
            let (parts, count) = ((unit / block).max(1), u64::from(*blocks) * block / unit);
            Ok((0..count)
                .map(|index| {
                    let at = index * unit / block;
                    let first = told[at as usize];
                    let end = (at + parts).min(size.div_ceil(block).max(at + 1));
                    let whole = (at..end).all(|i| told[i as usize] == first + i - at && first != 0);
                    let start = first * block + index * unit % block;
                    if whole && start.is_multiple_of(unit) { start / unit } else { 0 }
                })
                .collect())
        })
        .collect()
}

#[test]
fn fibmap_tells_what_debugfs_finds() -> Result<()> {
    let program = Path::new(env!("CARGO_BIN_EXE_fjord"));
    let sets = [("block-4k", 4096), ("block-1k", 1024), ("inline_data", 4096), ("ext3", 4096)];
    for (set, block) in sets {
        let scratch = Scratch::in_memory("block-numbers")?;
        let img = scratch.join("image");
        features::by_name(set).context("a set of the table")?.make(&img)?;
        let fjord = FjordMount::with_program(program, &img, &["-o", "fuseblk"])?;
        make(fjord.path(), block)?;
        let unit = block_size(fjord.path())?;
        let found = asked(fjord.path(), block)?;
        let dir = File::open(fjord.path())?;
        ensure!(fibmap(&dir, 0).is_err(), "{set}: FIBMAP of a directory, which Linux refuses");
        let mut filefrag = tools::command("filefrag")?;
        let said = tools::run(filefrag.arg(fjord.path().join("holes")))?.ok()?.stdout;
        ensure!(unit != block || !said.contains(": 0 extents"), "{set}: {said}");
        drop(dir);
        fjord.unmount()?;
        image::e2fsck_clean(&img)?;
        let expected = in_image(&img, block, unit)?;
        ensure!(expected == found, "{set}: debugfs {expected:?}\nfjord {found:?}");
        let plain = &found[0];
        ensure!(unit != block || plain[..10].iter().all(|&b| b != 0) && plain[10..] == [0, 0]);
        // Linux tells the same of the image that fjord left.
        let linux = KernelMount::new(&img, "acl")?;
        let told = asked(linux.path(), block)?;
        let theirs = in_image(&img, block, block_size(linux.path())?)?;
        linux.unmount()?;
        ensure!(told == theirs, "{set}: debugfs {theirs:?}\nLinux {told:?}");
    }
    Ok(())
}

/// Without a block device below there are no numbers, and none are made up.
#[test]
fn plain_fuse_has_no_block_numbers() -> Result<()> {
    let program = Path::new(env!("CARGO_BIN_EXE_fjord"));
    let scratch = Scratch::in_memory("block-numbers")?;
    let img = scratch.join("image");
    features::by_name("block-4k").context("a set of the table")?.make(&img)?;
    let fjord = FjordMount::with_program(program, &img, &["-o", "nofuseblk"])?;
    fs::write(fjord.path().join("f"), vec![1; 3 * 4096])?;
    let file = File::open(fjord.path().join("f"))?;
    ensure!(fibmap(&file, 0).unwrap_or(0) == 0);
    drop(file);
    fjord.unmount()
}

/// Files that were looked at while they were empty, a new and an old one: programs such as tar take one of no blocks for
/// a hole. With its write cache the kernel does not ask again when it has written.
#[test]
fn what_empty_files_use_once_they_are_written() -> Result<()> {
    for args in [&[][..], &["--writeback-cache"]] {
        let scratch = Scratch::new("blocks-used")?;
        let image = scratch.join("image");
        image::make_sparse(&image, 64 << 20)?;
        tools::run(tools::command("mke2fs")?.args(["-q", "-t", "ext4"]).arg(&image))?.ok()?;
        let requests = ["write /dev/null old", "set_inode_field old ctime 20200101000000"];
        image::debugfs_write(&image, &requests.map(str::to_owned))?;
        let mount = FjordMount::new(&image, args)?;
        for name in ["new", "old"] {
            let path = mount.path().join(name);
            let file = File::options().create(true).truncate(false).write(true).open(&path)?;
            ensure!(fs::metadata(&path)?.blocks() == 0, "{args:?}: an empty file has blocks");
            file.write_all_at(&vec![7; 1 << 20], 0)?;
            file.sync_all()?;
            let patience = Instant::now() + Duration::from_secs(20);
            while fs::metadata(&path)?.blocks() < 2048 {
                ensure!(Instant::now() < patience, "{args:?}: {name}: {:?}", fs::metadata(&path)?);
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        mount.unmount()?;
    }
    Ok(())
}
