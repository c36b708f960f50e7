//! JBD2: the journal's superblock, its log blocks (descriptor, commit, revoke) and the
//! fast-commit area.
//!
//! All fields are big-endian except those of the fast-commit area. What a log block looks
//! like depends on the features in the journal superblock; [`LogFormat`] is that knowledge
//! in one value, and every reader and writer of log blocks takes one.
//!
//! Invariant: a decoder here reads only inside the slice it is given, allocates no more than
//! a block can describe, and returns a [`FormatError`] for bytes that make no sense.
//!
//! Kernel document: `Documentation/filesystems/ext4/journal.rst`.

mod commit;
mod descriptor;
pub mod fast_commit;
mod revoke;
mod superblock;

pub use commit::{CommitBlock, crc32_be};
pub use descriptor::{DescriptorBuilder, Tag, TagFlags, data_checksum, parse_tags};
pub use revoke::{RevokeBuilder, parse_revokes};
pub use superblock::{
    DEFAULT_FAST_COMMIT_BLOCKS, IjournalMark, MIN_JOURNAL_BLOCKS, SUPERBLOCK_BYTES, Superblock,
    Version,
};

use bitflags::bitflags;

use crate::checksum;
use crate::error::{FormatError, Result};
use crate::types::Tid;

/// First word of every block that JBD2 itself writes to the log (`JBD2_MAGIC_NUMBER`).
pub const MAGIC: u32 = 0xc03b_3998;

/// Bytes of the header that starts every such block.
pub const HEADER_BYTES: usize = 12;

/// Bytes of the checksum that ends descriptor and revoke blocks under checksum v2 and v3.
pub const TAIL_BYTES: usize = 4;

bitflags! {
    /// Compatible journal features.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct Compat: u32 {
        /// Checksum v1: the commit block holds a CRC-32 of the transaction.
        const CHECKSUM = 0x1;
        const _ = !0;
    }
}

bitflags! {
    /// Incompatible journal features: a log with an unknown one must not be replayed.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct Incompat: u32 {
        /// There may be revoke blocks.
        const REVOKE = 0x1;
        /// Block numbers have 64 bits.
        const BIT64 = 0x2;
        /// A commit block may be on disk before the blocks that it commits.
        const ASYNC_COMMIT = 0x4;
        /// Checksum v2: CRC-32C of each log block, 16 bits of it for data blocks.
        const CSUM_V2 = 0x8;
        /// Checksum v3: as v2, with all 32 bits for data blocks.
        const CSUM_V3 = 0x10;
        /// The tail of the journal is a fast-commit area.
        const FAST_COMMIT = 0x20;
        /// fjord's own: i-transactions may live after `s_maxlen` (see [`crate::ijournal`]),
        /// so Linux and e2fsck must refuse the image, and do, rather than drop them.
        const FJORD_IJOURNAL = 0x4000_0000;
        /// fjord's own, with the former only: i-transactions may come behind barriers, which decide whether
        /// they count ([`crate::ijournal::Order`]). A fjord without it must refuse them.
        const FJORD_BARRIERS = 0x2000_0000;
        const _ = !0;
    }
}

impl Compat {
    /// The features that fjord knows.
    pub const KNOWN: Compat = Compat::CHECKSUM;
}

impl Incompat {
    /// The features that fjord can replay and write.
    pub const KNOWN: Incompat = Incompat::REVOKE
        .union(Incompat::BIT64)
        .union(Incompat::ASYNC_COMMIT)
        .union(Incompat::CSUM_V2)
        .union(Incompat::CSUM_V3)
        .union(Incompat::FAST_COMMIT)
        .union(Incompat::FJORD_IJOURNAL)
        .union(Incompat::FJORD_BARRIERS);
}

/// Which checksums a log carries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ChecksumVersion {
    /// None.
    #[default]
    None,
    /// `COMPAT_CHECKSUM`: one CRC-32 for the whole transaction, in the commit block.
    V1,
    /// `INCOMPAT_CSUM_V2`: CRC-32C per block, cut to 16 bits for data blocks.
    V2,
    /// `INCOMPAT_CSUM_V3`: CRC-32C per block.
    V3,
}

/// What the features of a journal say about the shape of its log blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogFormat {
    /// Size of a log block in bytes; the same as the file system's block size.
    pub block_size: usize,
    /// Whether block numbers have 64 bits.
    pub bit64: bool,
    /// Which checksums there are.
    pub checksum: ChecksumVersion,
    /// Seed of the v2 and v3 checksums: CRC-32C of the journal's UUID.
    pub seed: u32,
    /// The journal's UUID, which follows the first tag of a descriptor.
    pub uuid: [u8; 16],
}

impl LogFormat {
    /// Whether log blocks have their own checksums (v2 or v3).
    pub fn has_block_checksums(&self) -> bool {
        matches!(self.checksum, ChecksumVersion::V2 | ChecksumVersion::V3)
    }

    /// Bytes that one tag of a descriptor takes, without the UUID (`journal_tag_bytes`).
    pub fn tag_bytes(&self) -> usize {
        match self.checksum {
            ChecksumVersion::V3 => 16,
            // Two bytes of padding that v2 has had since it was introduced.
            ChecksumVersion::V2 if self.bit64 => 14,
            ChecksumVersion::V2 => 10,
            _ if self.bit64 => 12,
            _ => 8,
        }
    }

    /// Bytes at the end of descriptor and revoke blocks that belong to the checksum.
    pub fn tail_bytes(&self) -> usize {
        if self.has_block_checksums() { TAIL_BYTES } else { 0 }
    }

    /// How many blocks one descriptor block can describe.
    pub fn tags_per_descriptor(&self) -> usize {
        let used = HEADER_BYTES + 16 + self.tail_bytes();
        self.block_size.saturating_sub(used) / self.tag_bytes()
    }

    /// Bytes of one record in a revoke block.
    pub fn revoke_record_bytes(&self) -> usize {
        if self.bit64 { 8 } else { 4 }
    }

    /// How many blocks one revoke block can revoke.
    pub fn revokes_per_block(&self) -> usize {
        let used = HEADER_BYTES + 4 + self.tail_bytes();
        self.block_size.saturating_sub(used) / self.revoke_record_bytes()
    }

    /// Verifies the checksum at the end of a descriptor or revoke block, if there is one.
    pub fn verify_tail(&self, structure: &'static str, block: &[u8]) -> Result<()> {
        if !self.has_block_checksums() {
            return Ok(());
        }
        let Some(offset) = block.len().checked_sub(TAIL_BYTES) else {
            return FormatError::check_len(structure, block, TAIL_BYTES);
        };
        let stored = be32(block, offset);
        FormatError::check_checksum(structure, stored, self.hole_checksum(block, offset))
    }

    /// Sets the checksum at the end of a descriptor or revoke block, if there is one.
    pub(crate) fn set_tail(&self, block: &mut [u8]) {
        if !self.has_block_checksums() {
            return;
        }
        if let Some(offset) = block.len().checked_sub(TAIL_BYTES) {
            let computed = self.hole_checksum(block, offset);
            put_be32(block, offset, computed);
        }
    }

    /// CRC-32C of a log block whose checksum field at `offset` counts as zero.
    pub(crate) fn hole_checksum(&self, block: &[u8], offset: usize) -> u32 {
        checksum::crc32c_with_hole(self.seed, block, offset, 4).unwrap_or_default()
    }
}

/// Type of a log block (`h_blocktype`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BlockType {
    /// Lists the home addresses of the blocks that follow it.
    Descriptor,
    /// Ends a transaction.
    Commit,
    /// Superblock, version 1.
    SuperblockV1,
    /// Superblock, version 2.
    SuperblockV2,
    /// Lists blocks whose earlier copies in the log must not be replayed.
    Revoke,
}

impl BlockType {
    /// The type with this number, if there is one.
    pub fn from_number(number: u32) -> Option<BlockType> {
        Some(match number {
            1 => BlockType::Descriptor,
            2 => BlockType::Commit,
            3 => BlockType::SuperblockV1,
            4 => BlockType::SuperblockV2,
            5 => BlockType::Revoke,
            _ => return None,
        })
    }

    /// The number on disk.
    pub fn number(self) -> u32 {
        match self {
            BlockType::Descriptor => 1,
            BlockType::Commit => 2,
            BlockType::SuperblockV1 => 3,
            BlockType::SuperblockV2 => 4,
            BlockType::Revoke => 5,
        }
    }
}

/// Header of a block that JBD2 itself wrote (`journal_header_t`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockHeader {
    /// What the block is (`h_blocktype`).
    pub block_type: BlockType,
    /// The transaction it belongs to (`h_sequence`).
    pub sequence: Tid,
}

impl BlockHeader {
    /// Reads the header; `None` when the block has none or a type that JBD2 does not know,
    /// either of which ends a log.
    pub fn decode(block: &[u8]) -> Option<BlockHeader> {
        if block.len() < HEADER_BYTES || be32(block, 0) != MAGIC {
            return None;
        }
        let block_type = BlockType::from_number(be32(block, 4))?;
        Some(BlockHeader { block_type, sequence: Tid(be32(block, 8)) })
    }

    /// Writes the header to the start of `block`, which must have [`HEADER_BYTES`].
    pub fn encode(&self, block: &mut [u8]) -> Result<()> {
        FormatError::check_len("journal block", block, HEADER_BYTES)?;
        put_be32(block, 0, MAGIC);
        put_be32(block, 4, self.block_type.number());
        put_be32(block, 8, self.sequence.0);
        Ok(())
    }
}

/// Whether a block's own contents start like a log block, so that its copy in the log has to
/// be escaped: the first word zeroed there, and restored on replay.
pub fn needs_escape(content: &[u8]) -> bool {
    content.len() >= 4 && be32(content, 0) == MAGIC
}

/// The big-endian word at `offset`; zero when it does not lie in `bytes`, which callers have
/// checked before.
pub(crate) fn be32(bytes: &[u8], offset: usize) -> u32 {
    offset
        .checked_add(4)
        .and_then(|end| bytes.get(offset..end))
        .and_then(|word| word.try_into().ok())
        .map_or(0, u32::from_be_bytes)
}

/// As [`be32`], for 16 bits.
pub(crate) fn be16(bytes: &[u8], offset: usize) -> u16 {
    offset
        .checked_add(2)
        .and_then(|end| bytes.get(offset..end))
        .and_then(|word| word.try_into().ok())
        .map_or(0, u16::from_be_bytes)
}

/// As [`be32`], for 64 bits.
pub(crate) fn be64(bytes: &[u8], offset: usize) -> u64 {
    (u64::from(be32(bytes, offset)) << 32) | u64::from(be32(bytes, offset.saturating_add(4)))
}

/// Stores a big-endian word where callers have checked that there is room.
pub(crate) fn put_be32(bytes: &mut [u8], offset: usize, value: u32) {
    put(bytes, offset, &value.to_be_bytes());
}

/// Stores bytes where callers have checked that there is room.
pub(crate) fn put(bytes: &mut [u8], offset: usize, value: &[u8]) {
    if let Some(place) = offset.checked_add(value.len()).and_then(|end| bytes.get_mut(offset..end))
    {
        place.copy_from_slice(value);
    }
}

#[cfg(test)]
mod tests;
