//! Dirty journals made by Linux and by debugfs recover to the same tree in e2fsck, in Linux and in
//! fjord.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use fjord_testkit::{
    dirty::{self, RECIPES, WRITTEN},
    image::{self, KernelMount, Scratch},
    manifest::{Compare, Manifest},
    rng,
};

fn tree(image: &Path) -> Result<Manifest> {
    let mount = KernelMount::new(image, "ro")?;
    let manifest = Manifest::from_directory(mount.path())?;
    mount.unmount()?;
    Ok(manifest)
}

fn check(dirty: &Path) -> Result<usize> {
    let scratch = Scratch::in_memory("recover")?;
    let linux = dirty::recovered_by_linux(dirty, &scratch)?.context("Linux refuses the image")?;
    let linux = tree(&linux)?;
    let e2fsck = tree(&dirty::recovered_by_e2fsck(dirty, &scratch)?)?;
    linux.diff(&e2fsck, &Compare::SAME_IMAGE).ok("Linux", "e2fsck")?;
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
