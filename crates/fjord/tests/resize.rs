//! Growth of file systems by a program that embeds the engine: every feature set, in steps, and the
//! refusals. e2fsck, dumpe2fs and Linux judge.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use fjord::resize::NewSize;
use fjord::{Cred, Fs, MemDevice, MountOptions};
use fjord_block::{FaultDevice, IoOp};
use fjord_format::geometry::Geometry;
use fjord_format::superblock::{RawSuperblock, SUPERBLOCK_BYTES, SUPERBLOCK_OFFSET_BYTES};
use fjord_testkit::features::{FEATURE_SETS, Support};
use fjord_testkit::image::{self, Scratch};
use fjord_testkit::rng::pattern_vec;
use fjord_testkit::tools;

const MIB: u64 = 1 << 20;

fn make(path: &Path, size_bytes: u64, args: &[&str]) -> Result<()> {
    let _ = std::fs::remove_file(path);
    image::make_sparse(path, size_bytes)?;
    tools::run(tools::command("mke2fs")?.args(["-q", "-F"]).args(args).arg(path))?.ok()?;
    Ok(())
}

/// e2fsck finds nothing, and each backup is as the original. (e2fsck with a backup finds faults in every
/// image, since it takes no flag of a backup for true.)
fn check(path: &Path) -> Result<()> {
    image::e2fsck_clean(path)?;
    let file = File::open(path)?;
    let read = |offset: u64, len: usize| -> Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        file.read_exact_at(&mut bytes, offset)?;
        Ok(bytes)
    };
    let sb = RawSuperblock::decode(&read(SUPERBLOCK_OFFSET_BYTES, SUPERBLOCK_BYTES)?)?;
    let geo = Geometry::from_superblock(&sb)?;
    let size = u64::from(geo.block_size);
    for group in geo.super_backup_groups() {
        let at = geo.group_first_block(group).0 * size;
        let backup = RawSuperblock::decode(&read(at, SUPERBLOCK_BYTES)?)?;
        let same = Geometry::from_superblock(&backup)? == geo
            && backup.r_blocks_count() == sb.r_blocks_count()
            && u32::from(backup.s_block_group_nr.get()) == group.0;
        ensure!(same, "the superblock of group {group} differs: {backup:?}");
    }
    for index in 0..geo.desc_block_count {
        let primary = geo.desc_block_location(index).context("there is none")?.0 * size;
        let primary = read(primary, geo.block_size as usize)?;
        for place in geo.desc_block_backups(index) {
            let copy = read(place.0 * size, geo.block_size as usize)?;
            ensure!(copy == primary, "descriptor block {index} differs from its copy at {place}");
        }
    }
    Ok(())
}

fn write(fs: &Fs, name: &str, seed: u64, len: usize) -> Result<()> {
    let file = fs.root()?.create(name.as_bytes(), 0o644, &Cred::root())?;
    file.write(0, &pattern_vec(seed, 0, len))?;
    file.fsync(false)?;
    Ok(())
}

fn expect(fs: &Fs, name: &str, seed: u64, len: usize) -> Result<()> {
    ensure!(fs.read(format!("/{name}"))? == pattern_vec(seed, 0, len), "{name} has other bytes");
    Ok(())
}

/// Grows by less than a group, to a group's end, by several groups, and over descriptor blocks.
#[test]
fn every_feature_set_grows() -> Result<()> {
    let scratch = Scratch::new("engine-resize")?;
    let path = scratch.join("image");
    for set in FEATURE_SETS.iter().filter(|set| set.support == Support::Write) {
        grow_set(&path, set.mke2fs).with_context(|| set.name)?;
    }
    Ok(())
}

fn grow_set(path: &Path, args: &[&str]) -> Result<()> {
    make(path, 100 * MIB + 300 * 1024, args)?;
    let sizes = [101 * MIB, 128 * MIB, 130 * MIB, 300 * MIB, 301 * MIB + 4096, 1200 * MIB];
    for (number, size_bytes) in (0u64..).zip(sizes) {
        let fs = Fs::open(path, &MountOptions::default())?;
        write(&fs, &format!("before{number}"), number, 3_000_000)?;
        let report = fs.resize(NewSize::Bytes(size_bytes))?;
        ensure!(report.new_bytes <= size_bytes, "{report:?}");
        ensure!(report.new_bytes + 64 * MIB > size_bytes, "{report:?}");
        write(&fs, &format!("after{number}"), number + 100, 3_000_000)?;
        fs.unmount()?;
        drop(fs);
        image::e2fsck_clean(path).with_context(|| format!("{size_bytes} bytes, then a file"))?;
        let fs = Fs::open(path, &MountOptions::default())?;
        fs.resize(NewSize::Device)?;
        fs.unmount()?;
        drop(fs);
        check(path).with_context(|| format!("{size_bytes} bytes"))?;
    }
    let fs = Fs::open(path, &MountOptions::default())?;
    for number in 0..sizes.len() as u64 {
        expect(&fs, &format!("before{number}"), number, 3_000_000)?;
        expect(&fs, &format!("after{number}"), number + 100, 3_000_000)?;
    }
    fs.unmount()?;
    Ok(())
}

/// Each write, flush and read of a growth fails in turn. The error is told, and the file system is whole
/// after the next mount, with the old size, the new one, or one between them.
#[test]
fn each_request_of_a_growth_can_fail() -> Result<()> {
    let scratch = Scratch::in_memory("engine-resize-faults")?;
    let path = scratch.join("image");
    // 16 groups have a block of descriptors.
    let args = ["-b", "1024", "-g", "1024", "-J", "size=2", "-t", "ext4", "-E", "resize=131072"];
    make(&path, 24 * MIB, &args)?;
    let image = MemDevice::from_file(&path)?.snapshot();
    for op in [IoOp::Write, IoOp::Flush, IoOp::Read] {
        for number in 0.. {
            let device = Arc::new(MemDevice::from_image(&image));
            let faulty = Arc::new(FaultDevice::new(device.clone()));
            let options = MountOptions { background_threads: false, ..MountOptions::default() };
            let fs = Fs::open_device(faulty.clone(), &options)?;
            write(&fs, "kept", 1, 300_000)?;
            faulty.faults().fail_nth(Some(op), number, libc::EIO);
            let result = fs.resize(NewSize::Bytes(60 * MIB));
            let was_hit = faulty.faults().hit_count() > 0;
            // It fails after most errors; what counts is what is on the device.
            let _ = fs.unmount();
            drop(fs);
            is_whole(&device, &path)
                .with_context(|| format!("{op:?} {number}: {result:?}, hit: {was_hit}"))?;
            if !was_hit {
                println!("{number} requests of kind {op:?}");
                ensure!(result.is_ok() && number > 0, "{result:?}");
                break;
            }
        }
    }
    Ok(())
}

fn is_whole(device: &Arc<MemDevice>, path: &Path) -> Result<()> {
    let fs = Fs::open_device(device.clone(), &MountOptions::default())?;
    expect(&fs, "kept", 1, 300_000)?;
    write(&fs, "after", 2, 2_000_000)?;
    let size_bytes = fs.geometry().block_count * 1024;
    ensure!((24 * MIB..=60 * MIB).contains(&size_bytes), "{size_bytes}");
    fs.unmount()?;
    device.snapshot().write_to_file(path)?;
    // The mark of the error is no fault.
    let said = tools::run(tools::command("e2fsck")?.arg("-fn").arg(path))?;
    let faults = ["wrong", "nvalid", "differences", "ecreate", "elocate", "rror:"];
    let is_clean = !faults.iter().any(|word| said.stdout.contains(word));
    ensure!(is_clean && matches!(said.code, Some(0 | 4)), "{said:?}");
    Ok(())
}
