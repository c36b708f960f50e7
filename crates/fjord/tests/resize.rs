//! Growth of file systems by a program that embeds the engine: every feature set, in steps, and the
//! refusals. e2fsck, dumpe2fs and Linux judge.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use fjord::resize::NewSize;
use fjord::{Cred, Fs, MountOptions};
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
