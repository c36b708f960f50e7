//! What every parser must stand, whatever the bytes: one function per parser, used by the
//! mutation tests here and by the fuzz targets.
//!
//! Each function panics when a promise of the crate is broken: when what was decoded does not
//! encode to the same, or when an edit of something valid leaves something invalid. Anything
//! else that panics is a bug of the parser itself.

pub mod directory;
pub mod ijournal;
pub mod journal;
pub mod metadata;
pub mod xattrs;

use fjord_format::dirent::DirFormat;
use fjord_format::features::{Compat, Features, Incompat, RoCompat};
use fjord_format::geometry::Geometry;
use fjord_format::superblock::RawSuperblock;
use fjord_format::xattr::XattrRules;

/// The file system that the bytes are taken to come from.
#[derive(Clone, Debug)]
pub struct Env {
    /// Its layout.
    pub geometry: Geometry,
    /// The shape of its directories.
    pub dir: DirFormat,
    /// What its attributes may be.
    pub xattr: XattrRules,
}

impl Env {
    /// The environment of a real image.
    pub fn of(geometry: Geometry) -> Env {
        let (dir, xattr) = (DirFormat::new(&geometry), XattrRules::new(&geometry));
        Env { geometry, dir, xattr }
    }

    /// The choice whose made-up file system is most like this one.
    pub fn choice(&self) -> u8 {
        let has = |bit: u8, on: bool| u8::from(on) << bit;
        let features = &self.geometry.features;
        let metadata_csum = features.ro_compat.contains(RoCompat::METADATA_CSUM);
        let block_size = match self.geometry.block_size {
            1024 => 0,
            2048 => 1,
            4096 => 2,
            _ => 3,
        };
        block_size
            | has(2, !features.incompat.contains(Incompat::FILETYPE))
            | has(3, features.incompat.contains(Incompat::BIT64))
            | has(4, metadata_csum)
            | has(5, features.incompat.contains(Incompat::EA_INODE))
            | has(6, features.incompat.contains(Incompat::LARGEDIR))
            | has(7, self.geometry.inode_size == 128)
    }

    /// A small made-up file system; the bits of `choice` say which.
    pub fn made_up(choice: u8) -> Env {
        let log_block_size = [0u32, 1, 2, 6][usize::from(choice & 3)];
        let bit = |number: u8| choice >> number & 1 == 1;
        let mut sb = RawSuperblock::empty();
        let mut features = Features {
            compat: Compat::empty(),
            incompat: Incompat::EXTENTS,
            ro_compat: RoCompat::empty(),
        };
        features.incompat.set(Incompat::FILETYPE, !bit(2));
        features.incompat.set(Incompat::BIT64, bit(3));
        features.ro_compat.set(RoCompat::METADATA_CSUM, bit(4));
        features.incompat.set(Incompat::EA_INODE, bit(5));
        features.incompat.set(Incompat::LARGEDIR, bit(6));
        features.ro_compat.set(RoCompat::GDT_CSUM, bit(7) && !bit(4));
        sb.s_rev_level.set(1);
        sb.set_features(&features);
        sb.s_log_block_size.set(log_block_size);
        sb.s_log_cluster_size.set(log_block_size);
        sb.s_first_data_block.set(u32::from(log_block_size == 0));
        sb.s_blocks_per_group.set(8192);
        sb.s_clusters_per_group.set(8192);
        sb.s_inodes_per_group.set(1024);
        sb.s_inodes_count.set(4096);
        sb.set_blocks_count(4 * 8192 - 7);
        sb.s_inode_size.set(if bit(7) { 128 } else { 256 });
        sb.s_first_ino.set(11);
        sb.s_desc_size.set(if bit(3) { 64 } else { 0 });
        sb.s_want_extra_isize.set(32);
        sb.s_min_extra_isize.set(32);
        sb.s_checksum_type = 1;
        sb.update_checksum();
        Env::of(Geometry::from_superblock(&sb).expect("a valid superblock was made"))
    }
}

/// A number from the bytes themselves, so that edits depend on the input and nothing else.
pub fn pick(bytes: &[u8], salt: usize) -> u32 {
    let mut hash = 0x811c_9dc5u32 ^ salt as u32;
    for byte in bytes.iter().step_by(bytes.len() / 61 + 1) {
        hash = (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193);
    }
    hash >> 3
}
