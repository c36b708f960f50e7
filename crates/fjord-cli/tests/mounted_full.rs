//! A mount whose image is filled to its last block, again and again: what stays is whole.
//!
//! One test at a time, so that they do not slow each other down.

use std::{path::Path, sync::Mutex};

use anyhow::{Context, Result};
use fjord_testkit::{
    fjord_mount::FjordMount,
    image::{self, KernelMount, Scratch},
    workloads,
};

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn fill(mke2fs: &[&str]) -> Result<()> {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(|broken| broken.into_inner());
    let scratch = Scratch::in_memory("mounted")?;
    let img = scratch.join("image");
    workloads::make_small(&img, mke2fs)?;
    let fuse = FjordMount::with_program(Path::new(env!("CARGO_BIN_EXE_fjord")), &img, &[])?;
    // At once.
    let survivors = workloads::fill_up(fuse.path(), || Ok(()))?;
    let old = fuse.path().to_owned();
    fuse.unmount()?;
    image::e2fsck_clean(&img)?;
    let linux = KernelMount::new(&img, "ro")?;
    survivors.check_at(&old, linux.path()).context("seen by Linux")?;
    linux.unmount()
}

#[test]
fn a_full_image_loses_nothing() -> Result<()> {
    fill(&[])
}

#[test]
fn a_full_image_with_block_maps_loses_nothing() -> Result<()> {
    fill(&["-O", "^extents,^64bit"])
}

#[test]
fn a_full_image_with_inline_data_loses_nothing() -> Result<()> {
    fill(&["-O", "inline_data"])
}
