//! fjord's library against models: one file under all operations, and many threads at once.

use anyhow::{Context, Result};
use fjord::{Fs, MountOptions};
use fjord_testkit::{
    engine_file::EngineFile,
    features, fsx,
    image::{self, KernelMount, Scratch},
    manifest::Manifest,
    rng,
    script::EngineExecutor,
    stress,
};

fn fsx_on(set: &str, operations: u64, options: MountOptions) -> Result<()> {
    let set = features::by_name(set).context("a set of the table")?;
    let scratch = Scratch::in_memory("fsx")?;
    let img = scratch.join("fsx.img");
    set.make(&img)?;
    let seed = rng::seed_from_env("fsx", 1);
    let mut file = EngineFile::create(img.clone(), b"file", options)?;
    let block_bytes = if set.name == "block-64k" { 65_536 } else { 4096 };
    let options = fsx::Options { block_bytes, ..fsx::Options::new(seed, operations) };
    let counts = fsx::check(&mut file, options)?;
    println!("{}: {counts:?}", set.name);
    file.close()?;
    image::e2fsck_clean(&img)?;
    Ok(())
}

#[test]
fn fsx_extents() -> Result<()> {
    fsx_on("default", 100_000, MountOptions::default())
}

#[test]
fn fsx_extents_1k() -> Result<()> {
    fsx_on("block-1k", 50_000, MountOptions::default())
}

#[test]
fn fsx_block_map() -> Result<()> {
    fsx_on("ext3", 50_000, MountOptions::default())
}

#[test]
fn fsx_64k() -> Result<()> {
    fsx_on("block-64k", 40_000, MountOptions::default())
}

#[test]
fn fsx_inline_data() -> Result<()> {
    fsx_on("inline_data", 40_000, MountOptions::default())
}

#[test]
fn fsx_with_a_small_cache() -> Result<()> {
    fsx_on("default", 40_000, MountOptions { cache_size_bytes: 2 << 20, ..MountOptions::default() })
}

#[test]
fn fsx_without_delayed_allocation() -> Result<()> {
    fsx_on("default", 40_000, MountOptions { delalloc: false, ..MountOptions::default() })
}

fn stress_on(set: &str, options: MountOptions) -> Result<()> {
    let set = features::by_name(set).context("a set of the table")?;
    let scratch = Scratch::in_memory("stress")?;
    let img = scratch.join("stress.img");
    set.make(&img)?;
    let seed = rng::seed_from_env("stress", 1);
    let fs = Fs::open(&img, &options)?;
    let run = stress::Options { seed, threads: 4, steps: 15_000 };
    let expected = stress::run(run, || Box::new(EngineExecutor::new(&fs)))?;
    expected.verify(&Manifest::from_fjord(&fs)?).context("before the unmount")?;
    fs.unmount()?;
    image::e2fsck_clean(&img)?;
    let mount = KernelMount::new(&img, "ro")?;
    expected.verify(&Manifest::from_directory(mount.path())?).context("seen by Linux")?;
    mount.unmount()
}

#[test]
fn stress_default() -> Result<()> {
    stress_on("default", MountOptions::default())
}

#[test]
fn stress_inline_data() -> Result<()> {
    stress_on("inline_data", MountOptions::default())
}

#[test]
fn stress_ext3() -> Result<()> {
    stress_on("ext3", MountOptions::default())
}

#[test]
fn stress_with_a_small_cache() -> Result<()> {
    stress_on("default", MountOptions { cache_size_bytes: 4 << 20, ..MountOptions::default() })
}
