//! The feature sets that interoperation is shown for, and their mke2fs arguments.
//!
//! Invariant: each set states which feature it is about in full, so that a set means the same
//! under every mke2fs.conf.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::Mutex,
};

use anyhow::{Context, Result};

use crate::{
    image::{self, Scratch},
    tools,
};

/// What fjord does with images of a set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Support {
    /// Reads and writes them.
    Write,
    /// Opens them read-only; a writing open is refused with a message that has this name.
    ReadOnly(&'static str),
}

/// A named combination of features.
#[derive(Debug, Clone, Copy)]
pub struct FeatureSet {
    /// Name in reports.
    pub name: &'static str,
    /// Arguments of mke2fs before the image name.
    pub mke2fs: &'static [&'static str],
    /// Size of the image in bytes (the file is sparse).
    pub size_bytes: u64,
    /// What fjord promises for it.
    pub support: Support,
}

/// 520 MiB: above the limit under which mke2fs takes other defaults ("small" file systems).
const SIZE: u64 = 520 << 20;

const fn set(name: &'static str, mke2fs: &'static [&'static str]) -> FeatureSet {
    FeatureSet { name, mke2fs, size_bytes: SIZE, support: Support::Write }
}

const fn read_only(
    name: &'static str,
    mke2fs: &'static [&'static str],
    feature: &'static str,
) -> FeatureSet {
    FeatureSet { name, mke2fs, size_bytes: SIZE, support: Support::ReadOnly(feature) }
}

/// All sets, the plainest first.
pub const FEATURE_SETS: &[FeatureSet] = &[
    set("default", &["-t", "ext4"]),
    set("block-1k", &["-t", "ext4", "-b", "1024"]),
    set("block-2k", &["-t", "ext4", "-b", "2048"]),
    set("block-4k", &["-t", "ext4", "-b", "4096"]),
    set("block-64k", &["-t", "ext4", "-b", "65536"]),
    set("no-metadata_csum", &["-t", "ext4", "-O", "^metadata_csum"]),
    set("no-64bit", &["-t", "ext4", "-O", "^64bit"]),
    set("metadata_csum_seed", &["-t", "ext4", "-O", "metadata_csum,metadata_csum_seed"]),
    set("orphan_file", &["-t", "ext4", "-O", "orphan_file"]),
    set("fast_commit", &["-t", "ext4", "-O", "fast_commit"]),
    set("inline_data", &["-t", "ext4", "-O", "inline_data"]),
    set("ea_inode", &["-t", "ext4", "-O", "ea_inode"]),
    set("project", &["-t", "ext4", "-O", "project"]),
    read_only("quota", &["-t", "ext4", "-O", "quota"], "quota"),
    read_only("bigalloc", &["-t", "ext4", "-O", "bigalloc"], "bigalloc"),
    set("ext3", &["-t", "ext3"]),
    set("ext2", &["-t", "ext2"]),
    set("meta_bg", &["-t", "ext4", "-b", "1024", "-O", "meta_bg,^resize_inode"]),
    set("no-flex_bg", &["-t", "ext4", "-O", "^flex_bg"]),
    set("uninit_bg", &["-t", "ext4", "-O", "^metadata_csum,uninit_bg"]),
    set("inode-128", &["-t", "ext4", "-I", "128"]),
    set("large_dir", &["-t", "ext4", "-b", "1024", "-O", "large_dir"]),
    // Met in the wild, beyond the twenty.
    set("no-journal", &["-t", "ext4", "-O", "^has_journal"]),
    set("no-extents", &["-t", "ext4", "-O", "^extents,^64bit"]),
    set("no-dir_index", &["-t", "ext4", "-O", "^dir_index"]),
    set(
        "inline-ea_inode-1k",
        &["-t", "ext4", "-b", "1024", "-I", "512", "-O", "inline_data,ea_inode"],
    ),
];

/// A scratch directory, an image of the set `default` in it, and an empty directory to mount that on.
pub fn image_to_mount(name: &str) -> Result<(Scratch, PathBuf, PathBuf)> {
    let scratch = Scratch::new(name)?;
    let (image, dir) = (scratch.join("image"), scratch.join("mnt"));
    by_name("default").context("a set of the table")?.make(&image)?;
    std::fs::create_dir(&dir)?;
    Ok((scratch, image, dir))
}

/// The set with this name, if there is one.
pub fn by_name(name: &str) -> Option<&'static FeatureSet> {
    FEATURE_SETS.iter().find(|set| set.name == name)
}

impl FeatureSet {
    /// Makes a new image of the set at `path`.
    pub fn make(&self, path: &Path) -> Result<()> {
        image::make_sparse(path, self.size_bytes)?;
        tools::run(tools::command("mke2fs")?.arg("-q").arg("-F").args(self.mke2fs).arg(path))?
            .ok()?;
        Ok(())
    }

    /// Whether the running kernel mounts the set for writing; found by trying, once per process.
    pub fn kernel_mounts(&self) -> Result<bool> {
        static KNOWN: Mutex<Option<HashMap<&'static str, bool>>> = Mutex::new(None);
        if let Some(&known) =
            KNOWN.lock().expect("no panic while held").get_or_insert_default().get(self.name)
        {
            return Ok(known);
        }
        let scratch = Scratch::new("probe")?;
        let path = scratch.path().join("probe.img");
        self.make(&path)?;
        let mounts = image::kernel_mounts(&path)?;
        KNOWN
            .lock()
            .expect("no panic while held")
            .get_or_insert_default()
            .insert(self.name, mounts);
        Ok(mounts)
    }
}
