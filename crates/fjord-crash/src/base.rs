//! Base images: the file systems that workloads start from.
//!
//! Owns [`Features`], the mke2fs feature sets, and [`Base`], a clean image with the tree that a
//! workload expects, and the model of that tree. Bases are made once per process and set.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use anyhow::{Context, Result, ensure};
use fjord::{AreaLayout, Fs, FsyncPolicyKind, MountOptions};
use fjord_testkit::image::{self, Scratch};
use fjord_testkit::tools;
use parking_lot::Mutex;

use crate::image::Image;
use crate::model::Model;
use crate::ops::{self, Op};
use crate::record::{DeviceKind, RecordingDevice};
use crate::run::{Runner, made};

/// Byte extents: start and length.
pub type Extents = Vec<(u64, u64)>;

/// A feature set of mke2fs, on a device small enough for many images.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Features {
    /// Name on the command line.
    pub name: &'static str,
    mke2fs: &'static [&'static str],
    size_bytes: u64,
    /// Bytes of the device behind the file system, for it to grow into.
    spare_bytes: u64,
    /// Extended options of mke2fs besides those of all.
    extended: &'static str,
    inodes: u32,
    /// Areas for i-transactions after the log.
    pub areas: u32,
}

const fn set(name: &'static str, mke2fs: &'static [&'static str]) -> Features {
    Features {
        name,
        mke2fs,
        size_bytes: 16 << 20,
        spare_bytes: 0,
        extended: "",
        inodes: 256,
        areas: 0,
    }
}

/// All feature sets, the plainest first.
pub const FEATURES: [Features; 22] = [
    set("default", &["-b", "4096"]),
    set("block-1k", &["-b", "1024"]),
    set("no-extents", &["-b", "4096", "-O", "^extents,^64bit"]),
    set("no-metadata_csum", &["-b", "4096", "-O", "^metadata_csum"]),
    set("inline_data", &["-b", "4096", "-O", "inline_data"]),
    set("orphan_file", &["-b", "4096", "-O", "orphan_file"]),
    set("inode-128", &["-b", "4096", "-I", "128"]),
    set("fast_commit", &["-b", "4096", "-O", "fast_commit"]),
    set("ea_inode", &["-b", "4096", "-O", "ea_inode"]),
    set("no-dir_index", &["-b", "1024", "-O", "^dir_index,^64bit"]),
    set("meta_bg", &["-b", "1024", "-O", "meta_bg,^resize_inode"]),
    set("inline+orphan_file", &["-b", "4096", "-O", "inline_data,orphan_file"]),
    set(
        "ext3",
        &["-b", "4096", "-O", "^extents,^64bit,^metadata_csum,^flex_bg,^huge_file,^dir_nlink"],
    ),
    set("block-2k", &["-b", "2048"]),
    // A journal has 1024 blocks at least.
    Features { size_bytes: 160 << 20, ..set("block-64k", &["-b", "65536", "-J", "size=64"]) },
    set("no-64bit", &["-b", "4096", "-O", "^64bit"]),
    set("metadata_csum_seed", &["-b", "4096", "-O", "metadata_csum,metadata_csum_seed"]),
    set("project", &["-b", "4096", "-O", "project"]),
    set("no-flex_bg", &["-b", "1024", "-O", "^flex_bg"]),
    set("uninit_bg", &["-b", "1024", "-O", "^metadata_csum,uninit_bg"]),
    set("large_dir", &["-b", "1024", "-O", "large_dir"]),
    set("inline-ea_inode-1k", &["-b", "1024", "-I", "512", "-O", "inline_data,ea_inode"]),
];

/// The sets of the policy `fast-commit`, all with the feature.
pub const FAST_COMMIT: [Features; 5] = [
    set("fast_commit", &["-b", "4096", "-O", "fast_commit"]),
    set("fast_commit-1k", &["-b", "1024", "-O", "fast_commit"]),
    set("fast_commit-plain", &["-b", "4096", "-O", "fast_commit,^metadata_csum"]),
    set("fast_commit-128", &["-b", "4096", "-I", "128", "-O", "fast_commit,orphan_file"]),
    set("fast_commit-inline", &["-b", "4096", "-O", "fast_commit,inline_data"]),
];

/// Many small block groups, for policies that distinguish them: each with its own bitmaps, and
/// together in flex groups.
pub const GROUPS: [Features; 4] = [
    set("groups", &["-b", "4096", "-g", "512", "-G", "1", "-O", "orphan_file", "-J", "size=4"]),
    set("groups-flex", &["-b", "4096", "-g", "512", "-G", "4", "-J", "size=4"]),
    set("groups-1k", &["-b", "1024", "-g", "1024", "-O", "^flex_bg", "-J", "size=1"]),
    set(
        "groups-meta_bg",
        &["-b", "1024", "-g", "256", "-O", "meta_bg,^resize_inode,orphan_file", "-J", "size=1"],
    ),
];

/// Room for files beyond 1 GiB; only for workloads that need it.
pub const LARGE: Features = Features {
    size_bytes: 3 << 30,
    ..set("large", &["-b", "4096", "-J", "size=4", "-O", "fast_commit"])
};

/// Room for more than a thousand files; only for workloads that need it.
pub const MANY: Features =
    Features { inodes: 1200, ..set("many-inodes", &["-b", "4096", "-O", "fast_commit"]) };

/// The same in eight block groups, for the policy that distinguishes them.
pub const MANY_GROUPS: Features = Features {
    name: "many-groups",
    mke2fs: &["-b", "4096", "-g", "512", "-G", "1", "-J", "size=4"],
    ..MANY
};

/// Blocks of 1 KiB, a small log, and many inodes: where much is soon full; only for workloads that
/// need it.
pub const FAR_1K: Features = Features {
    inodes: 512,
    ..set("far-1k", &["-b", "1024", "-m", "0", "-J", "size=1", "-O", "fast_commit"])
};

/// The same without a fast-commit area, so that the log wraps.
pub const SMALL_LOG: Features =
    Features { inodes: 512, ..set("small-log", &["-b", "1024", "-m", "0", "-J", "size=1"]) };

/// Room for values of attributes in inodes of their own; only for workloads that need it.
pub const FAR_EA: Features =
    set("far-ea", &["-b", "4096", "-m", "0", "-J", "size=4", "-O", "ea_inode,fast_commit"]);

/// Many small groups and a small log; only for workloads that need it.
pub const SPREAD: Features = Features {
    size_bytes: 96 << 20,
    inodes: 3072,
    ..set("spread", &["-b", "1024", "-g", "256", "-J", "size=1", "-O", "fast_commit,^resize_inode"])
};

const fn growing(name: &'static str, mke2fs: &'static [&'static str]) -> Features {
    // 16 groups have a block of descriptors; blocks for those of 64 MiB are reserved.
    let extended = ",resize=65536";
    Features { spare_bytes: 11 << 20, extended, ..set(name, mke2fs) }
}

/// Small file systems on larger devices, of groups so small that several have a block of descriptors.
pub const GROWING: [Features; 4] = [
    growing("growing", &["-b", "1024", "-g", "256", "-J", "size=1", "-O", "fast_commit"]),
    growing(
        "growing-plain",
        &["-b", "1024", "-g", "256", "-J", "size=1", "-O", "^metadata_csum,^flex_bg,^64bit"],
    ),
    Features {
        extended: "",
        ..growing(
            "growing-meta_bg",
            &["-b", "1024", "-g", "256", "-O", "meta_bg,^resize_inode", "-J", "size=1"],
        )
    },
    Features {
        size_bytes: 24 << 20,
        ..growing("growing-4k", &["-b", "4096", "-g", "512", "-G", "4", "-J", "size=4"])
    },
];

/// Bytes of an area: as few as it can have, so that it fills up: so many blocks,
const AREA_BLOCKS: u64 = 16;
/// and with small ones so many bytes.
const AREA_BYTES_MIN: u64 = 64 << 10;

/// What only some workloads need; not part of campaigns otherwise.
pub const SPECIAL: [Features; 7] = [LARGE, MANY, MANY_GROUPS, FAR_1K, SMALL_LOG, FAR_EA, SPREAD];

impl Features {
    /// The set with this name, [`GROUPS`], [`SPECIAL`] and [`GROWING`] ones among them.
    pub fn by_name(name: &str) -> Option<Features> {
        let mut all =
            FEATURES.into_iter().chain(GROUPS).chain(FAST_COMMIT).chain(SPECIAL).chain(GROWING);
        all.find(|set| set.name == name)
    }

    /// The replacement for this set under a policy.
    #[must_use]
    pub fn under(self, policy: FsyncPolicyKind) -> Features {
        match policy {
            FsyncPolicyKind::Group if self == MANY => MANY_GROUPS,
            FsyncPolicyKind::FastCommit if self == SMALL_LOG => FAR_1K,
            _ => self,
        }
    }

    /// The same with so many areas for i-transactions.
    #[must_use]
    pub const fn with_areas(self, areas: u32) -> Features {
        Features { areas, ..self }
    }

    /// Whether the running kernel mounts an image of the set; found by trying, once per process.
    ///
    /// # Errors
    /// The tools do not run, or the mount fails for another reason than what is in the image.
    pub fn kernel_mounts(&self) -> Result<bool> {
        static KNOWN: Mutex<Vec<(&str, bool)>> = Mutex::new(Vec::new());
        let mut known = KNOWN.lock();
        if let Some((_, mounts)) = known.iter().find(|(name, _)| *name == self.name) {
            return Ok(*mounts);
        }
        let scratch = Scratch::in_memory("crash-probe")?;
        let path = scratch.join("image");
        let (image, _) = self.with_areas(0).make()?;
        image.write_to_file(&path)?;
        let mounts = image::kernel_mounts(&path)?;
        known.push((self.name, mounts));
        Ok(mounts)
    }

    /// The image, the byte extents of its log, and those with the areas.
    fn make(&self) -> Result<(Image, [Extents; 2])> {
        let scratch = Scratch::in_memory("crash-base")?;
        let path = scratch.join("image");
        image::make_sparse(&path, self.size_bytes)?;
        // Fixed identifiers: two runs give the same bytes but for the times.
        let uuid = "5f6a0c1e-7d3b-4a2f-9c58-0123456789ab";
        let extended = format!("hash_seed={uuid},lazy_itable_init=0{}", self.extended);
        let fixed = ["-U", uuid, "-E", &extended];
        let size_kib = (self.size_bytes - self.spare_bytes) >> 10;
        let mut mke2fs = tools::command("mke2fs")?;
        mke2fs
            .args(["-q", "-F", "-t", "ext4", "-N", &self.inodes.to_string()])
            .args(fixed)
            .args(self.mke2fs);
        tools::run(mke2fs.arg(&path).arg(format!("{size_kib}K")))?.ok()?;
        let log = log_extents(&path)?;
        if self.areas > 0 {
            let fs = Fs::open(&path, &quiet(&MountOptions::default()))?;
            let blocks_bytes = AREA_BLOCKS * u64::from(fs.statfs().block_size);
            let area_bytes = blocks_bytes.max(AREA_BYTES_MIN);
            let layout = AreaLayout { count: self.areas, area_bytes };
            fs.set_ijournal_areas(Some(layout))?;
            fs.unmount()?;
        }
        Ok((Image::from_file(&path)?, [log, log_extents(&path)?]))
    }
}

/// The byte extents of the journal without its superblock: after recovery they mean nothing.
fn log_extents(path: &std::path::Path) -> Result<Vec<(u64, u64)>> {
    let size = image::debugfs(path, "stats")?;
    let block_size = size
        .lines()
        .find_map(|line| line.strip_prefix("Block size:"))
        .and_then(|text| text.trim().parse::<u64>().ok())
        .context("debugfs does not show the block size")?;
    let blocks: Vec<u64> = image::debugfs(path, "blocks <8>")?
        .split_whitespace()
        .filter_map(|word| word.parse().ok())
        .collect();
    ensure!(blocks.len() > 1, "the image has no journal");
    let mut extents: Vec<(u64, u64)> = Vec::new();
    for block in &blocks[1..] {
        let at = block * block_size;
        match extents.last_mut() {
            Some((start, len)) if *start + *len == at => *len += block_size,
            _ => extents.push((at, block_size)),
        }
    }
    Ok(extents)
}

/// A clean file system with a tree.
#[derive(Debug)]
pub struct Base {
    /// The image, unmounted.
    pub image: Image,
    /// Its tree; all of it is promised.
    pub model: Model,
    /// Byte extents (start, length) of the log.
    pub log_extents: Extents,
    /// The same of all that means nothing after recovery: the log, and the areas after it.
    pub dead_extents: Extents,
}

/// Options of mounts without background work.
pub fn quiet(options: &MountOptions) -> MountOptions {
    MountOptions {
        background_threads: false,
        atime: fjord::AtimeMode::Never,
        cache_size_bytes: options.cache_size_bytes.min(16 << 20),
        ..options.clone()
    }
}

impl Base {
    fn make(features: Features, setup: &[Op]) -> Result<Base> {
        let (image, [log_extents, dead_extents]) = features.make()?;
        let device = Arc::new(RecordingDevice::plain(image, DeviceKind::Volatile));
        let fs = Fs::open_device(device.clone(), &quiet(&MountOptions::default()))?;
        let model = Mutex::new(Model::new(&made(&fs.root()?)));
        let stamp = || device.stamp();
        let mut runner = Runner::new(&fs, &model, &stamp);
        for op in setup {
            runner.step(op).context("preparing the tree")?;
        }
        drop(runner);
        let mut model = model.into_inner();
        fs.unmount()?;
        model.settle();
        Ok(Base { image: device.image(), model, log_extents, dead_extents })
    }

    /// The base of a feature set and a tree; made when first asked for.
    ///
    /// # Errors
    /// mke2fs or debugfs are missing, or the engine cannot make the tree.
    pub fn get(features: Features, setup: &[Op]) -> Result<Arc<Base>> {
        type Known = Mutex<HashMap<(Features, String), Arc<Base>>>;
        static KNOWN: OnceLock<Known> = OnceLock::new();
        let key = (features, ops::format(setup));
        let known = KNOWN.get_or_init(Known::default);
        if let Some(base) = known.lock().get(&key) {
            return Ok(base.clone());
        }
        let base = Arc::new(Base::make(features, setup)?);
        Ok(known.lock().entry(key).or_insert(base).clone())
    }
}
