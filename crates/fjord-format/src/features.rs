//! The three feature sets of the superblock and their names as e2fsprogs prints them.
//!
//! Invariant: the names here are those of `mke2fs -O` and `dumpe2fs -h`. Which features fjord
//! can read or write is the engine's to say.

use bitflags::bitflags;

bitflags! {
    /// Compatible features: a program that does not know one may still write the image.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct Compat: u32 {
        /// Directory preallocation.
        const DIR_PREALLOC = 0x0001;
        /// AFS server inodes.
        const IMAGIC_INODES = 0x0002;
        /// There is a journal.
        const HAS_JOURNAL = 0x0004;
        /// Extended attributes.
        const EXT_ATTR = 0x0008;
        /// The resize inode owns reserved group-descriptor blocks.
        const RESIZE_INODE = 0x0010;
        /// Hashed directories.
        const DIR_INDEX = 0x0020;
        /// Uninitialised groups, first form (never in Linux).
        const LAZY_BG = 0x0040;
        /// Snapshot exclude bitmap (never in Linux).
        const EXCLUDE_BITMAP = 0x0100;
        /// Superblock backups in at most two named groups.
        const SPARSE_SUPER2 = 0x0200;
        /// The journal has a fast-commit area.
        const FAST_COMMIT = 0x0400;
        /// Inode numbers and UUID must not change.
        const STABLE_INODES = 0x0800;
        /// There is an orphan file.
        const ORPHAN_FILE = 0x1000;
        const _ = !0;
    }
}

bitflags! {
    /// Incompatible features: a program that does not know one must leave the image alone.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct Incompat: u32 {
        /// Compressed files (never in Linux).
        const COMPRESSION = 0x0001;
        /// Directory entries carry a file type.
        const FILETYPE = 0x0002;
        /// The journal must be replayed.
        const RECOVER = 0x0004;
        /// This device is an external journal.
        const JOURNAL_DEV = 0x0008;
        /// Descriptors lie in meta block groups.
        const META_BG = 0x0010;
        /// Files may use extents.
        const EXTENTS = 0x0040;
        /// Block numbers of more than 32 bits, larger descriptors.
        const BIT64 = 0x0080;
        /// Multi-mount protection.
        const MMP = 0x0100;
        /// Bitmaps and inode tables may lie outside their group.
        const FLEX_BG = 0x0200;
        /// Large attribute values live in inodes.
        const EA_INODE = 0x0400;
        /// Data in directory entries (never in Linux).
        const DIRDATA = 0x1000;
        /// The checksum seed is stored instead of derived from the UUID.
        const CSUM_SEED = 0x2000;
        /// Directories over 2 GiB or with three index levels.
        const LARGEDIR = 0x4000;
        /// Small files live in the inode.
        const INLINE_DATA = 0x8000;
        /// Encrypted files.
        const ENCRYPT = 0x1_0000;
        /// Case-insensitive directories.
        const CASEFOLD = 0x2_0000;
        const _ = !0;
    }
}

bitflags! {
    /// Read-only compatible features: a program that does not know one may only read.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct RoCompat: u32 {
        /// Superblock backups only in groups 0, 1 and powers of 3, 5, 7.
        const SPARSE_SUPER = 0x0001;
        /// Files of 2 GiB and more.
        const LARGE_FILE = 0x0002;
        /// B-tree directories (never in Linux).
        const BTREE_DIR = 0x0004;
        /// Block counts of files in units of file-system blocks.
        const HUGE_FILE = 0x0008;
        /// CRC-16 group descriptors with uninitialised groups (`uninit_bg`).
        const GDT_CSUM = 0x0010;
        /// Directories with more than 65,000 subdirectories.
        const DIR_NLINK = 0x0020;
        /// Inodes have room for extra fields.
        const EXTRA_ISIZE = 0x0040;
        /// Snapshots (never in Linux).
        const HAS_SNAPSHOT = 0x0080;
        /// Quota files are kept by the file system itself.
        const QUOTA = 0x0100;
        /// Allocation in clusters of blocks.
        const BIGALLOC = 0x0200;
        /// CRC-32C on all metadata.
        const METADATA_CSUM = 0x0400;
        /// Replicas (never in Linux).
        const REPLICA = 0x0800;
        /// The image must not be written.
        const READONLY = 0x1000;
        /// Project quotas.
        const PROJECT = 0x2000;
        /// Blocks shared between files, read-only (Android).
        const SHARED_BLOCKS = 0x4000;
        /// Files with fs-verity.
        const VERITY = 0x8000;
        /// The orphan file may list inodes.
        const ORPHAN_PRESENT = 0x1_0000;
        const _ = !0;
    }
}

const COMPAT_NAMES: &[(Compat, &str)] = &[
    (Compat::DIR_PREALLOC, "dir_prealloc"),
    (Compat::HAS_JOURNAL, "has_journal"),
    (Compat::IMAGIC_INODES, "imagic_inodes"),
    (Compat::EXT_ATTR, "ext_attr"),
    (Compat::DIR_INDEX, "dir_index"),
    (Compat::RESIZE_INODE, "resize_inode"),
    (Compat::LAZY_BG, "lazy_bg"),
    (Compat::EXCLUDE_BITMAP, "snapshot_bitmap"),
    (Compat::SPARSE_SUPER2, "sparse_super2"),
    (Compat::FAST_COMMIT, "fast_commit"),
    (Compat::STABLE_INODES, "stable_inodes"),
    (Compat::ORPHAN_FILE, "orphan_file"),
];

const INCOMPAT_NAMES: &[(Incompat, &str)] = &[
    (Incompat::COMPRESSION, "compression"),
    (Incompat::FILETYPE, "filetype"),
    (Incompat::RECOVER, "needs_recovery"),
    (Incompat::JOURNAL_DEV, "journal_dev"),
    (Incompat::EXTENTS, "extent"),
    (Incompat::META_BG, "meta_bg"),
    (Incompat::BIT64, "64bit"),
    (Incompat::MMP, "mmp"),
    (Incompat::FLEX_BG, "flex_bg"),
    (Incompat::EA_INODE, "ea_inode"),
    (Incompat::DIRDATA, "dirdata"),
    (Incompat::CSUM_SEED, "metadata_csum_seed"),
    (Incompat::LARGEDIR, "large_dir"),
    (Incompat::INLINE_DATA, "inline_data"),
    (Incompat::ENCRYPT, "encrypt"),
    (Incompat::CASEFOLD, "casefold"),
];

const RO_COMPAT_NAMES: &[(RoCompat, &str)] = &[
    (RoCompat::SPARSE_SUPER, "sparse_super"),
    (RoCompat::LARGE_FILE, "large_file"),
    (RoCompat::HUGE_FILE, "huge_file"),
    (RoCompat::GDT_CSUM, "uninit_bg"),
    (RoCompat::DIR_NLINK, "dir_nlink"),
    (RoCompat::EXTRA_ISIZE, "extra_isize"),
    (RoCompat::QUOTA, "quota"),
    (RoCompat::BIGALLOC, "bigalloc"),
    (RoCompat::METADATA_CSUM, "metadata_csum"),
    (RoCompat::REPLICA, "replica"),
    (RoCompat::READONLY, "read-only"),
    (RoCompat::PROJECT, "project"),
    (RoCompat::SHARED_BLOCKS, "shared_blocks"),
    (RoCompat::VERITY, "verity"),
    (RoCompat::ORPHAN_PRESENT, "orphan_present"),
];

/// Second names that `mke2fs -O` takes.
const ALIASES: &[(&str, &str)] =
    &[("extents", "extent"), ("uninit_groups", "uninit_bg"), ("fname_encoding", "casefold")];

/// All features of a file system.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Features {
    /// `s_feature_compat`.
    pub compat: Compat,
    /// `s_feature_incompat`.
    pub incompat: Incompat,
    /// `s_feature_ro_compat`.
    pub ro_compat: RoCompat,
}

impl Features {
    /// The set with exactly the feature of this name, or `None` when there is none such.
    pub fn from_name(name: &str) -> Option<Features> {
        let name = ALIASES.iter().find(|(alias, _)| *alias == name).map_or(name, |(_, n)| *n);
        let mut features = Features::default();
        if let Some((flag, _)) = COMPAT_NAMES.iter().find(|(_, n)| *n == name) {
            features.compat = *flag;
        } else if let Some((flag, _)) = INCOMPAT_NAMES.iter().find(|(_, n)| *n == name) {
            features.incompat = *flag;
        } else if let Some((flag, _)) = RO_COMPAT_NAMES.iter().find(|(_, n)| *n == name) {
            features.ro_compat = *flag;
        } else {
            return None;
        }
        Some(features)
    }

    /// Names of all features that are set, in the order of the bits; a bit without a name
    /// comes out as e2fsprogs writes it (`FEATURE_C13`, `FEATURE_I20`, `FEATURE_R31`).
    pub fn names(&self) -> Vec<String> {
        let name = |class: char, bit: u32, name: Option<&str>| {
            name.map_or_else(|| format!("FEATURE_{class}{bit}"), str::to_owned)
        };
        let mut names = Vec::new();
        for bit in set_bits(self.compat.bits()) {
            let known = COMPAT_NAMES.iter().find(|(f, _)| f.bits() == 1 << bit);
            names.push(name('C', bit, known.map(|(_, n)| *n)));
        }
        for bit in set_bits(self.incompat.bits()) {
            let known = INCOMPAT_NAMES.iter().find(|(f, _)| f.bits() == 1 << bit);
            names.push(name('I', bit, known.map(|(_, n)| *n)));
        }
        for bit in set_bits(self.ro_compat.bits()) {
            let known = RO_COMPAT_NAMES.iter().find(|(f, _)| f.bits() == 1 << bit);
            names.push(name('R', bit, known.map(|(_, n)| *n)));
        }
        names
    }

    /// The features that are in `self` but not in `known`.
    #[must_use]
    pub fn without(&self, known: &Features) -> Features {
        Features {
            compat: self.compat.difference(known.compat),
            incompat: self.incompat.difference(known.incompat),
            ro_compat: self.ro_compat.difference(known.ro_compat),
        }
    }

    /// The features that are in either set.
    #[must_use]
    pub fn with(&self, more: &Features) -> Features {
        Features {
            compat: self.compat | more.compat,
            incompat: self.incompat | more.incompat,
            ro_compat: self.ro_compat | more.ro_compat,
        }
    }

    /// Whether every feature of `other` is set.
    pub fn contains(&self, other: &Features) -> bool {
        other.without(self).is_empty()
    }

    /// Whether no feature is set.
    pub fn is_empty(&self) -> bool {
        self.compat.is_empty() && self.incompat.is_empty() && self.ro_compat.is_empty()
    }

    /// Whether all metadata carries CRC-32C.
    pub fn has_metadata_csum(&self) -> bool {
        self.ro_compat.contains(RoCompat::METADATA_CSUM)
    }

    /// Whether group descriptors carry a checksum of either kind, so that groups may be
    /// uninitialised.
    pub fn has_group_csum(&self) -> bool {
        self.ro_compat.intersects(RoCompat::METADATA_CSUM | RoCompat::GDT_CSUM)
    }
}

fn set_bits(bits: u32) -> impl Iterator<Item = u32> {
    (0..32).filter(move |bit| bits >> bit & 1 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The names that libe2p of March 2025 knows, its aliases among them.
    const NAMES_OF_E2FSPROGS: &str = "64bit bigalloc casefold compression dir_index dir_nlink dir_prealloc \
        dirdata ea_inode encrypt ext_attr extent extents extra_isize fast_commit filetype flex_bg \
        fname_encoding has_journal huge_file imagic_inodes inline_data journal_dev large_dir large_file \
        lazy_bg meta_bg metadata_csum metadata_csum_seed mmp needs_recovery orphan_file orphan_present \
        project quota replica resize_inode shared_blocks snapshot_bitmap sparse_super sparse_super2 \
        stable_inodes uninit_bg uninit_groups verity";

    #[test]
    fn the_names_of_e2fsprogs_are_known() {
        for name in NAMES_OF_E2FSPROGS.split_whitespace() {
            assert!(Features::from_name(name).is_some(), "{name}");
        }
    }

    #[test]
    fn every_name_leads_back_to_its_flag() {
        let all = Features {
            compat: Compat::all(),
            incompat: Incompat::all(),
            ro_compat: RoCompat::all(),
        };
        for name in all.names().iter().filter(|n| !n.starts_with("FEATURE_")) {
            let features = Features::from_name(name).expect("a printed name parses");
            assert_eq!(features.names().join(","), *name);
        }
        assert_eq!(Features::from_name("extents"), Features::from_name("extent"));
        assert_eq!(Features::from_name("nonsense"), None);
    }

    #[test]
    fn unknown_bits_are_kept_and_named() {
        let features =
            Features { incompat: Incompat::from_bits_retain(1 << 20), ..Default::default() };
        assert_eq!(features.names(), ["FEATURE_I20"]);
        assert_eq!(features.without(&Features::default()), features);
    }
}
