//! The sound images that mutations start from.
//!
//! Invariant: an image is small (a copy costs little), holds each structure that its features
//! know, and is sound: e2fsck finds nothing before the first mutation, or only a log to replay.

use std::path::Path;
use std::sync::{Arc, OnceLock};

use anyhow::{Context, Result};
use fjord::{Cred, FallocMode, Fs, InodeRef, MountOptions, ShutdownMode, XattrFlags};
use fjord_block::{MemDevice, MemImage};
use fjord_format::features::Incompat;

use super::places::{self, Place};
use crate::image::{self, Scratch};
use crate::rng::pattern_vec;
use crate::tools;

const SIZE_BYTES: u64 = 12 << 20;

/// A recipe.
#[derive(Debug, Clone, Copy)]
struct Recipe {
    name: &'static str,
    mke2fs: &'static [&'static str],
    /// Left behind as by a crash: with a log to replay and orphans.
    dirty: bool,
}

const fn recipe(name: &'static str, mke2fs: &'static [&'static str], dirty: bool) -> Recipe {
    Recipe { name, mke2fs, dirty }
}

const NO_SUMS: &str = "^metadata_csum,^uninit_bg";

const RECIPES: &[Recipe] = &[
    recipe("default", &["-t", "ext4", "-b", "4096"], false),
    recipe("1k-plain", &["-t", "ext4", "-b", "1024", "-O", NO_SUMS], false),
    recipe("1k-sums", &["-t", "ext4", "-b", "1024"], false),
    recipe("ext3", &["-t", "ext3", "-b", "1024"], false),
    recipe("ext2", &["-t", "ext2", "-b", "1024"], false),
    recipe(
        "inline-plain",
        &["-t", "ext4", "-b", "1024", "-I", "512", "-O", "^metadata_csum,inline_data,ea_inode"],
        false,
    ),
    recipe(
        "inline-sums",
        &["-t", "ext4", "-b", "4096", "-I", "256", "-O", "inline_data,ea_inode,orphan_file"],
        false,
    ),
    recipe(
        "orphans-plain",
        &["-t", "ext4", "-b", "1024", "-O", "^metadata_csum,orphan_file"],
        true,
    ),
    recipe("orphans-sums", &["-t", "ext4", "-b", "1024", "-O", "orphan_file"], true),
    recipe("dirty-plain", &["-t", "ext4", "-b", "1024", "-O", NO_SUMS], true),
    recipe("dirty-sums", &["-t", "ext4", "-b", "1024"], true),
    recipe("dirty-ext3", &["-t", "ext3", "-b", "1024"], true),
    recipe(
        "uninit",
        &["-t", "ext4", "-b", "1024", "-g", "1024", "-O", "^metadata_csum,uninit_bg"],
        false,
    ),
    recipe(
        "meta_bg",
        &["-t", "ext4", "-b", "1024", "-g", "1024", "-O", "^metadata_csum,meta_bg,^resize_inode"],
        false,
    ),
];

/// A sound image with the places of its structures.
#[derive(Debug)]
pub struct Base {
    /// Name in reports.
    pub name: &'static str,
    /// Contents.
    pub image: MemImage,
    /// What can be mutated.
    pub places: Vec<Place>,
}

/// Number of base images.
pub const COUNT: usize = RECIPES.len();

/// Base image number `index % COUNT`; made once per process.
///
/// # Errors
/// Missing programs; a sound image that fjord or e2fsck does not accept.
pub fn get(index: usize) -> Result<Arc<Base>> {
    static MADE: [OnceLock<Result<Arc<Base>, String>>; COUNT] = [const { OnceLock::new() }; COUNT];
    let index = index % COUNT;
    let make = || {
        let recipe = &RECIPES[index];
        recipe.make().map(Arc::new).map_err(|error| format!("image {}: {error:#}", recipe.name))
    };
    MADE[index].get_or_init(make).clone().map_err(anyhow::Error::msg)
}

impl Recipe {
    fn make(&self) -> Result<Base> {
        let scratch = Scratch::in_memory("hostile")?;
        let path = scratch.join("base.img");
        image::make_sparse(&path, SIZE_BYTES)?;
        let mut mke2fs = tools::command("mke2fs")?;
        mke2fs.args(["-q", "-F", "-N", "256", "-U", "6a1e9c5e-0f0b-4d6c-9d53-3f2c6d1b7a10"]);
        mke2fs.args(["-E", "hash_seed=2b7f9a34-55c1-4a0e-8d8e-6c1f0e9b4d21"]);
        if self.mke2fs[1] != "ext2" {
            mke2fs.args(["-J", if self.mke2fs.contains(&"4096") { "size=4" } else { "size=1" }]);
        }
        tools::run(mke2fs.args(self.mke2fs).arg(&path))?.ok()?;
        let device = Arc::new(MemDevice::from_file(&path)?);
        let options = MountOptions { background_threads: false, ..MountOptions::default() };
        let fs = Fs::open_device(device.clone(), &options)?;
        let block = u64::from(fs.geometry().block_size);
        fill(&fs, block).context("filling it")?;
        fs.sync()?;
        if self.dirty {
            leave_dirty(&fs, block)?;
        } else {
            fs.unmount()?;
        }
        let image = device.snapshot();
        self.check(&image, &path)?;
        let places = places::find(&image)?;
        Ok(Base { name: self.name, image, places })
    }

    /// e2fsck must find it sound.
    fn check(&self, image: &MemImage, path: &Path) -> Result<()> {
        image.write_to_file(path)?;
        if self.dirty {
            image::e2fsck_repair(path)?
        } else {
            image::e2fsck_clean(path)?
        };
        Ok(())
    }
}

fn fill(fs: &Fs, block: u64) -> Result<()> {
    let cred = Cred::root();
    let root = fs.root()?;
    let whole = pattern_vec(1, 0, 40 * block as usize);
    root.create(b"small", 0o644, &cred)?.write(0, b"some bytes")?;
    root.create(b"big", 0o644, &cred)?.write(0, &whole)?;
    let holes = root.create(b"holes", 0o600, &cred)?;
    for number in 0..380 {
        holes.write(number * 2 * block, &pattern_vec(2, number, 40))?;
    }
    if fs.geometry().features.incompat.contains(Incompat::EXTENTS) {
        let reserved = root.create(b"reserved", 0o600, &cred)?;
        reserved.fallocate(FallocMode::empty(), 0, 64 * block)?;
        reserved.write(20 * block, &whole[..5 * block as usize])?;
    }
    let far = root.create(b"far", 0o600, &cred)?;
    far.write(block * (12 + 300) + 5, b"beyond the first double block")?;
    root.symlink(b"short-link", b"small", &cred)?;
    root.symlink(b"long-link", &[b'x'; 300], &cred)?;
    root.mknod(b"device", 0o020_600, 0x0105, &cred)?;
    root.mknod(b"fifo", 0o010_600, 0, &cred)?;
    fill_directories(&root, &cred)?;
    fill_attributes(fs, &root, &cred)
}

fn fill_directories(root: &InodeRef, cred: &Cred) -> Result<()> {
    let flat = root.mkdir(b"flat", 0o755, cred)?;
    let file = flat.create(b"file", 0o644, cred)?;
    flat.mkdir(b"below", 0o755, cred)?.mkdir(b"deeper", 0o700, cred)?;
    let tree = root.mkdir(b"tree", 0o755, cred)?;
    // On blocks of 1 KiB a second level of the index.
    for number in 0..620_usize {
        tree.link(&file, long_name(number).as_bytes())?;
    }
    tree.mkdir(b"inner", 0o755, cred)?;
    Ok(())
}

/// Name number `number` of the large directory.
pub(super) fn long_name(number: usize) -> String {
    format!("n{number:04}-{}", "y".repeat(200 + number % 40))
}

fn fill_attributes(fs: &Fs, root: &InodeRef, cred: &Cred) -> Result<()> {
    let one = root.create(b"attributes", 0o644, cred)?;
    one.set_xattr(b"user.short", b"value", XattrFlags::empty())?;
    one.set_xattr(b"user.middle", &[b'm'; 400], XattrFlags::empty())?;
    let two = root.create(b"attributes-too", 0o644, cred)?;
    two.set_xattr(b"user.middle", &[b'm'; 400], XattrFlags::empty())?;
    if fs.geometry().features.incompat.contains(Incompat::EA_INODE) {
        one.set_xattr(b"user.large", &[b'l'; 9000], XattrFlags::empty())?;
        root.create(b"attributes-three", 0o644, cred)?.set_xattr(
            b"user.large",
            &[b'l'; 9000],
            XattrFlags::empty(),
        )?;
    }
    Ok(())
}

/// Committed but not checkpointed changes, and deleted files that were open.
fn leave_dirty(fs: &Fs, block: u64) -> Result<()> {
    let cred = Cred::root();
    let root = fs.root()?;
    let mut open = Vec::new();
    for number in 0..5 {
        let name = format!("orphan-{number}");
        let file = root.create(name.as_bytes(), 0o600, &cred)?;
        file.write(0, &pattern_vec(3, number, 3 * block as usize))?;
        open.push((name, file));
    }
    fs.sync()?;
    for (name, _) in &open {
        root.unlink(name.as_bytes())?;
        fs.sync()?;
    }
    // Frees metadata blocks, so that the log holds revokes.
    root.unlink(b"holes")?;
    root.create(b"late", 0o644, &cred)?.write(0, &pattern_vec(4, 0, 2 * block as usize))?;
    fs.sync()?;
    fs.shutdown(ShutdownMode::NoLogFlush)?;
    Ok(())
}
