//! Dirty journals made by Linux and by debugfs recover to the same tree in e2fsck, in Linux and in
//! fjord.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::{Context, Result, ensure};
use fjord::{Fs, MountOptions};
use fjord_testkit::{
    dirty::{self, RECIPES, WRITTEN, tree_on_linux},
    image::{self, Scratch},
    manifest::Compare,
    rng,
};

/// Recovers a copy by fjord.
fn recovered_by_fjord(dirty: &Path, scratch: &Scratch) -> Result<PathBuf> {
    let copy = scratch.join("by-fjord.img");
    image::copy_sparse(dirty, &copy)?;
    let fs = Fs::open(&copy, &MountOptions::default()).context("fjord recovering")?;
    fs.unmount().context("fjord unmounting")?;
    Ok(copy)
}

/// A node of an extent tree, with blocks of 4 KiB.
const LEAF_512B: u64 = 8;

fn check(dirty: &Path) -> Result<usize> {
    let scratch = Scratch::in_memory("recover")?;
    let began = SystemTime::now();
    let linux_image = dirty::recovered_by_linux(dirty, &scratch)?.image()?;
    let mut linux = tree_on_linux(&linux_image)?;
    let e2fsck = tree_on_linux(&dirty::recovered_by_e2fsck(dirty, &scratch)?)?;
    let completed = linux.take_back_truncation_times(&e2fsck, began);
    if !completed.is_empty() {
        println!("{}: truncations that Linux completed: {completed:?}", dirty.display());
    }
    linux.diff(&e2fsck, &Compare::SAME_IMAGE).ok("Linux", "e2fsck")?;
    let fjord_image = recovered_by_fjord(dirty, &scratch)?;
    let fjord = tree_on_linux(&fjord_image)?;
    for path in &completed {
        // fjord takes the last leaf of the extents into the inode when they fit there, Linux does not.
        if let Some(entry) = linux.entries.get_mut(path.as_bytes())
            && let Some(ours) = fjord.entries.get(path.as_bytes())
            && entry.blocks_512b == ours.blocks_512b + LEAF_512B
        {
            entry.blocks_512b = ours.blocks_512b;
        }
    }
    linux.diff(&fjord, &Compare::SAME_IMAGE).ok("Linux", "fjord")?;
    if image::e2fsck_clean(&linux_image).is_ok() {
        image::e2fsck_clean(&fjord_image).context("after fjord's recovery")?;
    }
    Ok(linux.entries.len())
}

#[test]
fn journals_written_by_linux() -> Result<()> {
    let seed = rng::seed_from_env("journals_written_by_linux", 1);
    for recipe in RECIPES {
        let scratch = Scratch::in_memory("dirty")?;
        for dirty in dirty::make(recipe, seed, scratch.path())? {
            let entries = check(&dirty).with_context(|| format!("{}", dirty.display()))?;
            println!("{}: {entries} entries", dirty.display());
        }
    }
    Ok(())
}

#[test]
fn journals_written_by_debugfs() -> Result<()> {
    let seed = rng::seed_from_env("journals_written_by_debugfs", 1);
    for written in WRITTEN {
        let scratch = Scratch::in_memory("dirty")?;
        let dirty = dirty::make_with_debugfs(written, seed, scratch.path())?;
        let stats = image::debugfs(&dirty, "logdump -S")?;
        let entries = check(&dirty).with_context(|| format!("{written:?}\n{stats}"))?;
        ensure!(entries > 60, "the transactions were not replayed");
        println!("{written:?}: {entries} entries");
    }
    Ok(())
}
