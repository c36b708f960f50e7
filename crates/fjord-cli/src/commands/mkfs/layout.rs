//! The parameters of a new file system.

use fjord_mkfs::{IjournalAreas, JournalSize, MkfsOptions};

use super::compat::{self, Extended, FsType};
use crate::{commands::tune, failure::Result, size, users};

/// Percentage of reserved blocks, as in mke2fs.
const RESERVED_PERCENT: f64 = 5.0;

/// The parameters of the file system.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Layout")]
pub(super) struct Layout {
    /// Block size in bytes
    #[arg(short, long, value_name = "BYTES")]
    block_size: Option<u32>,
    /// Volume name, at most 16 bytes
    #[arg(short = 'L', long, value_name = "NAME")]
    label: Option<String>,
    /// Features to set, or with ^ to clear
    #[arg(short = 'O', long, value_name = "LIST", allow_hyphen_values = true)]
    features: Option<String>,
    /// UUID [default: random]
    #[arg(short = 'U', long, value_parser = compat::parse_uuid)]
    uuid: Option<[u8; 16]>,
    /// Seed of the directory hashes, a UUID [default: random]
    #[arg(long, value_name = "UUID", value_parser = compat::parse_uuid)]
    hash_seed: Option<[u8; 16]>,
    /// Number of inodes
    #[arg(short = 'N', long, value_name = "COUNT")]
    inodes: Option<u32>,
    /// Bytes per inode
    #[arg(short = 'i', long, value_name = "BYTES", conflicts_with = "inodes")]
    inode_ratio: Option<u32>,
    /// Size of an inode in bytes
    #[arg(short = 'I', long, value_name = "BYTES")]
    inode_size: Option<u16>,
    /// Percentage of blocks reserved for root [default: 5; 0 with --shrink]
    #[arg(short = 'm', long, value_name = "PERCENT")]
    reserved: Option<f64>,
    /// Size of the journal, or none
    #[arg(short = 'J', long, value_name = "SIZE|none", value_parser = parse_journal)]
    journal: Option<JournalSize>,
    /// Number and size of the areas for i-transactions (records of single fsyncs under --fsync
    /// ijournal), such as 4x2M. none: after a crash Linux and e2fsck recover the image too, and its
    /// default fsync policy is compound, or fast-commit with -O fast_commit. [default: one per core,
    /// four with --reproducible, none with --shrink; of a size in proportion to the journal]
    #[arg(long, value_name = "NxSIZE|none", value_parser = tune::parse_areas)]
    ijournal: Option<tune::Areas>,
    /// Owner of the root directory
    #[arg(long, value_name = "USER:GROUP", value_parser = users::owner)]
    owner: Option<(u32, u32)>,
    /// File system type: ext4, ext3 or ext2
    #[arg(short = 't', value_name = "TYPE", value_parser = FsType::parse)]
    #[arg(default_value = "ext4", hide_default_value = true)]
    fs_type: FsType,
    /// Extended options of mke2fs: hash_seed=UUID, root_owner=USER:GROUP, no_copy_xattrs
    #[arg(short = 'E', value_name = "LIST", value_parser = Extended::parse)]
    extended: Option<Extended>,
}

impl Layout {
    pub(super) fn uuid(&self) -> Option<[u8; 16]> {
        self.uuid
    }

    pub(super) fn block_size(&self) -> Option<u32> {
        self.block_size
    }

    /// Owner of the root directory.
    pub(super) fn root_owner(&self) -> Option<(u32, u32)> {
        self.owner.or_else(|| self.extended.as_ref()?.root_owner)
    }

    pub(super) fn no_copy_xattrs(&self) -> bool {
        self.extended.as_ref().is_some_and(|extended| extended.no_copy_xattrs)
    }

    /// Warns of options without effect.
    pub(super) fn warn(&self) {
        if let Some(extended) = &self.extended {
            extended.warn();
        }
    }

    pub(super) fn options(&self, shrinks: bool) -> MkfsOptions {
        let reserved = if shrinks { 0.0 } else { RESERVED_PERCENT };
        MkfsOptions {
            block_size: self.block_size,
            inode_size: self.inode_size,
            inode_ratio: self.inode_ratio,
            inode_count: self.inodes,
            label: self.label.clone().unwrap_or_default().into_bytes(),
            uuid: self.uuid,
            hash_seed: self.hash_seed.or_else(|| self.extended.as_ref()?.hash_seed),
            features: self.fs_type.features(self.features.as_deref().unwrap_or_default()),
            reserved_percent: self.reserved.unwrap_or(reserved),
            root_owner: self.root_owner().unwrap_or_default(),
            journal: self.journal.unwrap_or_default(),
            ijournal: match self.ijournal {
                None => IjournalAreas::Auto,
                Some(tune::Areas::None) => IjournalAreas::None,
                Some(tune::Areas::Some { count, area_bytes }) => {
                    IjournalAreas::Areas { count, area_bytes }
                }
            },
            ..MkfsOptions::default()
        }
    }
}

fn parse_journal(text: &str) -> Result<JournalSize, String> {
    match text {
        "none" => Ok(JournalSize::None),
        _ => size::parse(text).map(JournalSize::Bytes),
    }
}
