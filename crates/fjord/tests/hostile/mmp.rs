//! Multi-mount protection: two users of one image, where no lock of the system tells them apart.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use fjord::{Cred, Fs};
use fjord_block::{DeviceExt, MemDevice};
use fjord_format::BlockNo;
use fjord_format::mmp::{MmpBlock, SEQ_CLEAN, SEQ_FSCK};
use fjord_testkit::image::{self, Scratch};
use fjord_testkit::tools;

use crate::workload::options;

struct Image {
    scratch: Scratch,
    path: PathBuf,
    device: Arc<MemDevice>,
}

fn image() -> Result<Image> {
    let scratch = Scratch::in_memory("mmp")?;
    let path = scratch.join("mmp.img");
    image::make_sparse(&path, 16 << 20)?;
    let mut mke2fs = tools::command("mke2fs")?;
    mke2fs.args(["-q", "-F", "-t", "ext4", "-O", "mmp", "-E", "mmp_update_interval=1"]);
    tools::run(mke2fs.arg(&path))?.ok()?;
    let device = Arc::new(MemDevice::from_file(&path)?);
    Ok(Image { scratch, path, device })
}

/// Reads the block, as a second user of the device would.
fn read(device: &MemDevice, fs: &Fs) -> Result<(u64, MmpBlock)> {
    let block_bytes = u64::from(fs.geometry().block_size);
    let at = BlockNo(fs.superblock().s_mmp_block.get()).0 * block_bytes;
    let bytes = device.read_buf(at, block_bytes as usize)?;
    Ok((at, MmpBlock::decode(&bytes, fs.geometry())?))
}

fn write_seq(device: &MemDevice, fs: &Fs, seq: u32) -> Result<()> {
    let (at, mut block) = read(device, fs)?;
    block.seq = seq;
    let mut bytes = device.read_buf(at, fs.geometry().block_size as usize)?.to_vec();
    block.encode(&mut bytes, fs.geometry())?;
    Ok(device.write_all_at(at, &bytes)?)
}

fn write_promise(fs: &Fs) -> Result<()> {
    let file = fs.root()?.create(b"promised", 0o644, &Cred::root())?;
    file.write(0, b"kept")?;
    Ok(file.open().fsync(false)?)
}

type Case = (&'static str, fn() -> Result<()>);

/// Most of them wait for seconds, as the protocol has it: all at once.
#[test]
fn two_users_notice_each_other() -> Result<()> {
    let cases: [Case; 5] = [
        ("a_second_user_is_refused", a_second_user_is_refused),
        ("whoever_loses_the_image_stops_writing", whoever_loses_the_image_stops_writing),
        ("the_image_of_a_dead_user_is_taken_over", the_image_of_a_dead_user_is_taken_over),
        ("the_mark_of_e2fsck_is_respected", the_mark_of_e2fsck_is_respected),
        ("a_mount_that_fails_gives_the_image_free", a_mount_that_fails_gives_the_image_free),
    ];
    std::thread::scope(|scope| {
        let threads = cases.map(|(name, case)| (name, scope.spawn(case)));
        threads.into_iter().try_for_each(|(name, thread)| match thread.join() {
            Ok(result) => result.context(name),
            Err(_) => bail!("{name} panicked"),
        })
    })
}

fn a_second_user_is_refused() -> Result<()> {
    let image = image()?;
    let fs = Fs::open_device(image.device.clone(), &options())?;
    let second = Fs::open_device(image.device.clone(), &options());
    let message = second.err().context("two users of one image")?.to_string();
    ensure!(message.contains("in use"), "{message}");
    // The first one never noticed.
    write_promise(&fs)?;
    fs.unmount()?;
    ensure!(read(&image.device, &fs)?.1.seq == SEQ_CLEAN, "not given free");
    image.device.snapshot().write_to_file(&image.path)?;
    image::e2fsck_clean(&image.path)?;
    drop(image.scratch);
    Ok(())
}

fn whoever_loses_the_image_stops_writing() -> Result<()> {
    let image = image()?;
    let fs = Fs::open_device(image.device.clone(), &options())?;
    write_promise(&fs)?;
    let file = fs.root()?.lookup(b"promised")?;
    file.write(0, b"late")?;
    write_seq(&image.device, &fs, 77)?;
    let began = Instant::now();
    while !fs.is_read_only() {
        ensure!(began.elapsed() < Duration::from_secs(120), "the theft goes unnoticed");
        std::thread::sleep(Duration::from_millis(50));
    }
    let stolen = image.device.snapshot();
    ensure!(file.open().fsync(false).is_err(), "a promise about an image of somebody else");
    ensure!(fs.sync().is_err(), "the same of all files");
    ensure!(fs.root()?.create(b"more", 0o644, &Cred::root()).is_err(), "still writable");
    let error = fs.unmount().err().context("unmount says that all is well")?;
    ensure!(error.to_string().contains("claimed the image"), "{error}");
    drop((file, fs));
    ensure!(image.device.snapshot() == stolen, "it wrote to an image of somebody else");
    Ok(())
}

fn the_image_of_a_dead_user_is_taken_over() -> Result<()> {
    let image = image()?;
    let fs = Fs::open_device(image.device.clone(), &options())?;
    write_promise(&fs)?;
    // The user dies: its heart beats on another device from now on.
    let left = Arc::new(MemDevice::from_image(&image.device.snapshot()));
    let seq = read(&left, &fs)?.1.seq;
    ensure!(seq != SEQ_CLEAN, "not marked as in use");
    let next = Fs::open_device(left.clone(), &options())?;
    ensure!(next.read("promised")? == b"kept", "the promise is lost");
    next.unmount()?;
    left.snapshot().write_to_file(&image.path)?;
    image::e2fsck_clean(&image.path)?;
    Ok(())
}

fn the_mark_of_e2fsck_is_respected() -> Result<()> {
    let image = image()?;
    let mut looking = options();
    looking.read_only = true;
    let fs = Fs::open_device(image.device.clone(), &looking)?;
    write_seq(&image.device, &fs, SEQ_FSCK)?;
    let before = image.device.snapshot();
    let error = Fs::open_device(image.device.clone(), &options()).err().context("opened")?;
    ensure!(error.to_string().contains("e2fsck"), "{error}");
    ensure!(image.device.snapshot() == before, "it wrote nevertheless");
    Ok(())
}

fn a_mount_that_fails_gives_the_image_free() -> Result<()> {
    let image = image()?;
    let mut looking = options();
    looking.read_only = true;
    let fs = Fs::open_device(image.device.clone(), &looking)?;
    // The journal inode is the eighth; without its first bytes it is none.
    let journal = image::debugfs(&image.path, "imap <8>")?;
    let block = journal.split("at block ").nth(1).and_then(|rest| rest.split(',').next());
    let block: u64 = block.context("imap")?.trim().parse()?;
    let offset = journal.split("offset 0x").nth(1).context("imap")?.trim();
    let offset = u64::from_str_radix(offset, 16)?;
    let at = block * u64::from(fs.geometry().block_size) + offset;
    image.device.write_all_at(at, &[0; 64])?;
    ensure!(Fs::open_device(image.device.clone(), &options()).is_err(), "opened");
    ensure!(read(&image.device, &fs)?.1.seq == SEQ_CLEAN, "stays marked as in use");
    Ok(())
}
