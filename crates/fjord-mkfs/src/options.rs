//! Options of a new image, and the resulting features.
//!
//! Invariant: a [`Features`] set that leaves [`resolve_features`] is one that fjord can write
//! and whose features agree with each other.

use fjord_format::features::{Compat, Features, Incompat, RoCompat};

use crate::error::{MkfsError, Result, usage};

/// Features of a new image unless the options say otherwise; those of mke2fs 1.47.
const DEFAULT_FEATURES: &str = "has_journal ext_attr resize_inode dir_index filetype extent \
     64bit flex_bg sparse_super large_file huge_file dir_nlink extra_isize metadata_csum";

/// Features that may be asked for besides the default ones.
const OPTIONAL_FEATURES: &str = "sparse_super2 fast_commit stable_inodes orphan_file meta_bg \
     mmp ea_inode metadata_csum_seed large_dir inline_data uninit_bg project";

/// Size of the journal; [`MkfsOptions`] has an example.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum JournalSize {
    /// As long as mke2fs makes it for this size; none where that is too small for one.
    #[default]
    Auto,
    /// No journal.
    None,
    /// This many bytes, rounded down to blocks.
    Bytes(u64),
}

/// The areas for i-transactions, after the log in the journal inode. Other tools ignore them.
///
/// An image with areas is mounted by fjord with the fsync policy of that name unless the mount says
/// otherwise, and after a crash must be recovered by fjord before Linux or e2fsck accept it.
/// [`IjournalAreas::None`] makes an image as mke2fs does. [`MkfsOptions`] has an example.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IjournalAreas {
    /// One for each core of this machine, of a size that goes with the journal's.
    #[default]
    Auto,
    /// None, as mke2fs.
    None,
    /// These.
    Areas {
        /// How many.
        count: u32,
        /// Bytes of each, rounded down to blocks.
        area_bytes: u64,
    },
}

/// Options of a new image. [`MkfsOptions::default`] is what `mke2fs -t ext4` makes, and areas for
/// fsync by i-transactions ([`IjournalAreas`] says what these mean after a crash).
///
/// ```
/// use fjord_block::MemDevice;
/// use fjord_mkfs::{IjournalAreas, JournalSize, MkfsOptions, format};
///
/// let options = MkfsOptions {
///     size_bytes: Some(64 << 20),
///     block_size: Some(4096),
///     label: b"data".to_vec(),
///     features: "^resize_inode,orphan_file".into(),
///     journal: JournalSize::Bytes(8 << 20),
///     ijournal: IjournalAreas::None,
///     reserved_percent: 0.0,
///     ..MkfsOptions::default()
/// };
/// let report = format(&MemDevice::new(64 << 20), &options)?;
/// assert_eq!((report.block_count, report.journal_blocks), (16384, 2048));
/// # Ok::<(), fjord_mkfs::MkfsError>(())
/// ```
#[derive(Clone, Debug)]
pub struct MkfsOptions {
    /// Size in bytes; `None` takes the device as it is. A file is set to this size.
    pub size_bytes: Option<u64>,
    /// Block size in bytes; `None` picks by size, as mke2fs does.
    pub block_size: Option<u32>,
    /// Inode size in bytes; `None` for 256.
    pub inode_size: Option<u16>,
    /// One inode for this many bytes; `None` picks by size, as mke2fs does.
    pub inode_ratio: Option<u32>,
    /// Number of inodes, in place of the ratio.
    pub inode_count: Option<u32>,
    /// Label, at most 16 bytes.
    pub label: Vec<u8>,
    /// UUID; `None` for a random one.
    pub uuid: Option<[u8; 16]>,
    /// Features to add and remove, as `mke2fs -O` takes them: `"orphan_file,^64bit"`; `none`
    /// removes all that came before it.
    pub features: String,
    /// Percentage of the blocks kept for the superuser, 0 to 50.
    pub reserved_percent: f64,
    /// Owner and group of the root directory.
    pub root_owner: (u32, u32),
    /// Length of the journal.
    pub journal: JournalSize,
    /// Areas after the journal's log.
    pub ijournal: IjournalAreas,
    /// Cores that [`IjournalAreas::Auto`] makes areas for; `None` for those of this machine.
    pub cores: Option<u32>,
    /// Seconds since 1970 for all times; `None` for now.
    pub time_seconds: Option<u64>,
    /// Seed of the directory hash; `None` for a random one.
    pub hash_seed: Option<[u8; 16]>,
}

impl Default for MkfsOptions {
    fn default() -> Self {
        MkfsOptions {
            size_bytes: None,
            block_size: None,
            inode_size: None,
            inode_ratio: None,
            inode_count: None,
            label: Vec::new(),
            uuid: None,
            features: String::new(),
            reserved_percent: 5.0,
            root_owner: (0, 0),
            journal: JournalSize::Auto,
            ijournal: IjournalAreas::Auto,
            cores: None,
            time_seconds: None,
            hash_seed: None,
        }
    }
}

fn named(names: &str) -> Features {
    names
        .split_whitespace()
        .filter_map(Features::from_name)
        .fold(Features::default(), |all, feature| all.with(&feature))
}

/// Features that fjord can put on a new image.
pub fn supported_features() -> Features {
    named(DEFAULT_FEATURES).with(&named(OPTIONAL_FEATURES))
}

/// The features that the options ask for, checked against each other and against what fjord
/// can write.
pub(crate) fn resolve_features(options: &MkfsOptions) -> Result<Features> {
    let mut features = named(DEFAULT_FEATURES);
    let mut asked = Features::default();
    for word in options.features.split([',', ' ', '\t']).filter(|word| !word.is_empty()) {
        if word == "none" {
            features = Features::default();
            continue;
        }
        let (name, on) = match word.strip_prefix(['^', '-']) {
            Some(name) => (name, false),
            None => (word.strip_prefix('+').unwrap_or(word), true),
        };
        let feature = Features::from_name(name)
            .ok_or_else(|| usage(format!("there is no feature {name:?}; see `mke2fs -O`")))?;
        if on {
            features = features.with(&feature);
            asked = asked.with(&feature);
        } else {
            features = features.without(&feature);
            asked = asked.without(&feature);
        }
    }
    if options.journal == JournalSize::None {
        features.compat.remove(Compat::HAS_JOURNAL);
    }
    settle(&mut features, &asked);
    let unknown = features.without(&supported_features());
    if !unknown.is_empty() {
        return Err(usage(format!(
            "fjord cannot make images with {}; use mke2fs",
            unknown.names().join(", ")
        )));
    }
    check_agreement(&features, options)?;
    Ok(features)
}

/// Drops what another feature takes the place of, as mke2fs does.
fn settle(features: &mut Features, asked: &Features) {
    if features.has_metadata_csum() {
        features.ro_compat.remove(RoCompat::GDT_CSUM);
    }
    if features.incompat.contains(Incompat::META_BG) && !asked.compat.contains(Compat::RESIZE_INODE)
    {
        features.compat.remove(Compat::RESIZE_INODE);
    }
    if features.compat.contains(Compat::RESIZE_INODE) {
        // The resize inode is larger than 2 GiB.
        features.ro_compat.insert(RoCompat::LARGE_FILE);
    }
}

fn check_agreement(features: &Features, options: &MkfsOptions) -> Result<()> {
    let (compat, incompat, ro) = (features.compat, features.incompat, features.ro_compat);
    let journal = compat.contains(Compat::HAS_JOURNAL);
    let large_inodes = options.inode_size.is_none_or(|size| size > 128);
    let resize = compat.contains(Compat::RESIZE_INODE);
    let rules = [
        (
            resize && incompat.contains(Incompat::META_BG),
            "resize_inode and meta_bg exclude each other; add ^resize_inode",
        ),
        (
            resize && !ro.contains(RoCompat::SPARSE_SUPER),
            "resize_inode needs sparse_super; add ^resize_inode",
        ),
        (compat.contains(Compat::ORPHAN_FILE) && !journal, "orphan_file needs has_journal"),
        (compat.contains(Compat::FAST_COMMIT) && !journal, "fast_commit needs has_journal"),
        (
            incompat.contains(Incompat::CSUM_SEED) && !features.has_metadata_csum(),
            "metadata_csum_seed needs metadata_csum",
        ),
        (
            incompat.contains(Incompat::INLINE_DATA) && !large_inodes,
            "inline_data needs inodes of 256 bytes or more",
        ),
        (
            incompat.contains(Incompat::INLINE_DATA) && !compat.contains(Compat::EXT_ATTR),
            "inline_data needs ext_attr",
        ),
        (
            ro.contains(RoCompat::PROJECT) && !large_inodes,
            "project needs inodes of 256 bytes or more",
        ),
        (
            matches!(options.ijournal, IjournalAreas::Areas { .. }) && !journal,
            "areas for i-transactions need has_journal",
        ),
        (
            matches!(options.journal, JournalSize::Bytes(_)) && !journal,
            "a journal size needs has_journal",
        ),
    ];
    match rules.iter().find(|(broken, _)| *broken) {
        Some((_, message)) => Err(MkfsError::Usage((*message).to_owned())),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve(features: &str) -> Result<String> {
        let options = MkfsOptions { features: features.to_owned(), ..MkfsOptions::default() };
        resolve_features(&options).map(|features| features.names().join(" "))
    }

    #[test]
    fn defaults_and_edits() {
        let defaults = resolve("").expect("defaults agree");
        assert_eq!(named(&defaults), named(DEFAULT_FEATURES));
        assert!(!resolve("^64bit").expect("agrees").contains("64bit"));
        assert!(!resolve("meta_bg").expect("agrees").contains("resize_inode"));
        assert_eq!(resolve("none").expect("agrees"), "");
        assert!(resolve("uninit_bg,^metadata_csum").expect("agrees").contains("uninit_bg"));
        assert!(!resolve("uninit_bg").expect("agrees").contains("uninit_bg"));
    }

    #[test]
    fn refusals_name_the_feature() {
        for (features, word) in [
            ("bigalloc", "bigalloc"),
            ("quota", "quota"),
            ("encrypt casefold", "casefold"),
            ("frobnicate", "frobnicate"),
            ("orphan_file,^has_journal", "has_journal"),
            ("meta_bg,resize_inode", "meta_bg"),
            ("^sparse_super", "sparse_super"),
            ("metadata_csum_seed,^metadata_csum", "metadata_csum"),
        ] {
            let error = resolve(features).expect_err(features).to_string();
            assert!(error.contains(word), "{features}: {error}");
        }
    }
}
