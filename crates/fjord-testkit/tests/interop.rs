//! Each feature set both ways: what fjord wrote is plain ext4 to e2fsck and to Linux, what Linux
//! wrote reads back equal through fjord, and what fjord does not write it refuses by name.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use fjord::{AtimeMode, Fs, MountOptions};
use fjord_testkit::{
    features::{self, FEATURE_SETS, FeatureSet, Support},
    image::{self, KernelMount, Scratch},
    manifest::{Compare, Holes, Kind, Manifest},
    script::{EngineExecutor, Executor, KernelExecutor, Outcome, Script},
    tools,
};

/// The seed of the scripts: fixed, so that a failure is found again; other seeds by FJORD_SEED.
fn seed() -> u64 {
    fjord_testkit::rng::seed_from_env("interop", 1)
}

fn read_only() -> MountOptions {
    MountOptions { read_only: true, ..MountOptions::default() }
}

fn by_fjord(image: &Path) -> Result<Manifest> {
    let fs = Fs::open(image, &read_only()).context("fjord opening read-only")?;
    let manifest = Manifest::from_fjord(&fs)?;
    fs.unmount()?;
    Ok(manifest)
}

fn by_linux(image: &Path) -> Result<Manifest> {
    let mount = KernelMount::new(image, "ro")?;
    let manifest = Manifest::from_directory(mount.path())?;
    mount.unmount()?;
    Ok(manifest)
}

/// Fills an image by the kernel's ext4.
fn fill_by_linux(set: &FeatureSet, image: &Path, script: &Script) -> Result<Vec<Outcome>> {
    set.make(image)?;
    let mount = KernelMount::new(image, "noinit_itable")?;
    let outcomes = KernelExecutor::new(mount.path()).run(script);
    mount.unmount()?;
    Ok(outcomes)
}

/// Fills an image by fjord's library; what fjord shows before and after the unmount must agree.
fn fill_by_fjord(set: &FeatureSet, image: &Path, script: &Script) -> Result<Vec<Outcome>> {
    set.make(image)?;
    // Looking at the tree must not change its access times.
    let options = MountOptions { atime: AtimeMode::Never, ..MountOptions::default() };
    let fs = Fs::open(image, &options)?;
    let outcomes = EngineExecutor::new(&fs).run(script);
    let live = Manifest::from_fjord(&fs).context("before the unmount")?;
    fs.unmount().context("unmount")?;
    drop(fs);
    let checked = image::e2fsck_clean(image);
    let again = by_fjord(image).context("after the unmount");
    // e2fsck's word goes first: it is the better witness of what is wrong.
    checked?;
    let compare =
        Compare { atime: false, blocks: false, holes: Holes::Roughly, ..Compare::SAME_IMAGE };
    live.diff(&again?, &compare).ok("fjord before unmount", "fjord after")?;
    Ok(outcomes)
}

fn written_by_fjord(name: &str) -> Result<()> {
    let set = features::by_name(name).context("a set of the table")?;
    let scratch = Scratch::in_memory("interop")?;
    let script = Script::varied(seed());
    let image = scratch.join("by-fjord.img");
    if let Support::ReadOnly(feature) = set.support {
        return refused(set, &image, feature);
    }
    let found = fill_by_fjord(set, &image, &script)?;
    let tree = by_fjord(&image)?;
    if !set.kernel_mounts()? {
        tools::skipped(name, "this kernel does not mount it; e2fsck and debugfs judge instead");
        let extracted = scratch.join("extracted");
        image::extract_with_debugfs(&image, &extracted)?;
        let extracted = Manifest::from_directory(&extracted)?.without_lost_found();
        return as_extracted(tree.without_lost_found())
            .diff(&as_extracted(extracted), &Compare::EXTRACTED)
            .ok("fjord", "debugfs");
    }
    let linux = by_linux(&image).context("mounted by Linux")?;
    let same = tree.diff(&linux, &Compare::SAME_IMAGE).ok("fjord", "Linux on the same image");
    let reference = scratch.join("by-linux.img");
    let expected = fill_by_linux(set, &reference, &script)?;
    let differ = script.compare_outcomes(&expected, &found);
    ensure!(
        differ.is_empty(),
        "outcomes of Linux (left) and fjord (right) differ:\n{}\nsame image: {same:?}",
        differ.join("\n")
    );
    same?;
    by_linux(&reference)?
        .without_lost_found()
        .diff(&linux.without_lost_found(), &Compare::SAME_SCRIPT)
        .ok("the script run by Linux", "run by fjord")
}

/// debugfs loses special mode bits and the owners of symbolic links.
fn as_extracted(tree: Manifest) -> Manifest {
    let mut tree = without_root(tree);
    for entry in tree.entries.values_mut() {
        entry.mode &= 0o777;
        if entry.kind == Kind::Symlink {
            (entry.uid, entry.gid) = (0, 0);
        }
    }
    tree
}

/// A directory made by extraction has attributes of its own.
fn without_root(mut tree: Manifest) -> Manifest {
    tree.entries.remove(&b""[..]);
    tree
}

fn refused(set: &FeatureSet, image: &Path, feature: &str) -> Result<()> {
    set.make(image)?;
    let before = std::fs::read(image)?;
    let Err(error) = Fs::open(image, &MountOptions::default()) else {
        anyhow::bail!("{feature} should be refused for writing");
    };
    let said = error.to_string();
    ensure!(said.contains(feature), "the refusal does not name {feature}: {said}");
    ensure!(std::fs::read(image)? == before, "a refused image was changed");
    Ok(())
}

fn written_by_linux(name: &str) -> Result<()> {
    let set = features::by_name(name).context("a set of the table")?;
    let scratch = Scratch::in_memory("interop")?;
    let image = scratch.join("by-linux.img");
    let script = Script::varied(seed());
    if !set.kernel_mounts()? {
        tools::skipped(name, "this kernel does not mount it; mke2fs -d fills it instead");
        return filled_by_mke2fs(set, &scratch, &script);
    }
    fill_by_linux(set, &image, &script)?;
    let expected = by_linux(&image)?;
    let copy = scratch.join("copy.img");
    image::copy_sparse(&image, &copy)?;
    let found = by_fjord(&image)?;
    expected.diff(&found, &Compare::SAME_IMAGE).ok("Linux", "fjord")?;
    ensure!(same_bytes(&image, &copy)?, "reading changed the image");
    Ok(())
}

fn same_bytes(left: &Path, right: &Path) -> Result<bool> {
    Ok(tools::run(std::process::Command::new("cmp").arg("-s").args([left, right]))?.code == Some(0))
}

/// A tree copied by mke2fs from a kernel mount.
fn filled_by_mke2fs(set: &FeatureSet, scratch: &Scratch, script: &Script) -> Result<()> {
    let source: PathBuf = scratch.join("source.img");
    let plain = features::by_name("default").context("a set of the table")?;
    fill_by_linux(plain, &source, script)?;
    let mount = KernelMount::new(&source, "ro")?;
    let image = scratch.join("filled.img");
    image::make_sparse(&image, set.size_bytes)?;
    tools::run(
        tools::command("mke2fs")?
            .args(["-q", "-F", "-d"])
            .arg(mount.path())
            .args(set.mke2fs)
            .arg(&image),
    )?
    .ok()?;
    let expected = Manifest::from_directory(mount.path())?.without_lost_found();
    mount.unmount()?;
    // It copies times in whole seconds of 32 bits, no flags, no links of symbolic links, and makes
    // holes of zeros.
    let compare = Compare {
        atime: false,
        mtime: false,
        flags_mask: 0,
        links: false,
        holes: Holes::Ignored,
        ..Compare::SAME_SCRIPT
    };
    let mut found = by_fjord(&image)?.without_lost_found();
    // Nor projects.
    let mut expected = without_root(expected);
    for entry in expected.entries.values_mut().chain(found.entries.values_mut()) {
        entry.project = 0;
    }
    expected.diff(&without_root(found), &compare).ok("the source", "fjord")
}

macro_rules! sets {
    ($($test:ident: $name:literal,)*) => {
        mod fjord_writes {
            $(#[test]
            fn $test() -> anyhow::Result<()> {
                super::written_by_fjord($name)
            })*
        }

        mod fjord_reads {
            $(#[test]
            fn $test() -> anyhow::Result<()> {
                super::written_by_linux($name)
            })*
        }

        const TESTED: &[&str] = &[$($name),*];
    };
}

sets! {
    default: "default",
    block_1k: "block-1k",
    block_2k: "block-2k",
    block_4k: "block-4k",
    block_64k: "block-64k",
    no_metadata_csum: "no-metadata_csum",
    no_64bit: "no-64bit",
    metadata_csum_seed: "metadata_csum_seed",
    orphan_file: "orphan_file",
    fast_commit: "fast_commit",
    inline_data: "inline_data",
    ea_inode: "ea_inode",
    project: "project",
    quota: "quota",
    bigalloc: "bigalloc",
    ext3: "ext3",
    ext2: "ext2",
    meta_bg: "meta_bg",
    no_flex_bg: "no-flex_bg",
    uninit_bg: "uninit_bg",
    inode_128: "inode-128",
    large_dir: "large_dir",
    no_journal: "no-journal",
    no_extents: "no-extents",
    no_dir_index: "no-dir_index",
    inline_ea_inode_1k: "inline-ea_inode-1k",
}

#[test]
fn every_set_of_the_table_is_tested() {
    let table: Vec<&str> = FEATURE_SETS.iter().map(|set| set.name).collect();
    assert_eq!(table, TESTED);
}

#[test]
fn other_features_are_refused_by_name() -> Result<()> {
    for (feature, mke2fs) in [
        ("encrypt", &["-t", "ext4", "-O", "encrypt"][..]),
        ("casefold", &["-t", "ext4", "-O", "casefold"]),
        ("verity", &["-t", "ext4", "-O", "verity"]),
        ("journal_dev", &["-O", "journal_dev"]),
    ] {
        let scratch = Scratch::in_memory("refuse")?;
        let image = scratch.join("image");
        image::make_sparse(&image, 64 << 20)?;
        tools::run(tools::command("mke2fs")?.args(["-q", "-F"]).args(mke2fs).arg(&image))?.ok()?;
        match Fs::open(&image, &MountOptions::default()) {
            Ok(fs) => {
                fs.unmount()?;
                image::e2fsck_clean(&image)?;
            }
            Err(error) => {
                let said = error.to_string();
                ensure!(said.contains(feature), "the refusal does not name {feature}: {said}");
            }
        }
    }
    Ok(())
}
