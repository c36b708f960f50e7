//! Descriptor blocks: the list of home addresses of the log blocks that follow.
//!
//! Invariant: [`parse_tags`] reads back what [`DescriptorBuilder`] wrote, in each of the five
//! tag layouts.

use bitflags::bitflags;

use super::{
    BlockHeader, BlockType, ChecksumVersion, HEADER_BYTES, LogFormat, be16, be32, put, put_be32,
};
use crate::checksum;
use crate::error::{FormatError, Result};
use crate::types::{BlockNo, Tid};

const UUID_BYTES: usize = 16;

bitflags! {
    /// Flags of one tag (`t_flags`).
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct TagFlags: u16 {
        /// The block's first word was [`MAGIC`](super::MAGIC) and is zero in the log.
        const ESCAPE = 1;
        /// No UUID follows this tag.
        const SAME_UUID = 2;
        /// The block was deleted by this transaction (no version of Linux writes it).
        const DELETED = 4;
        /// No tag follows.
        const LAST_TAG = 8;
        const _ = !0;
    }
}

/// One entry of a descriptor block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tag {
    /// Home of the block.
    pub block: BlockNo,
    /// Its flags.
    pub flags: TagFlags,
    /// Checksum of the copy in the log: all of it (v3), its low 16 bits (v2), else zero.
    pub checksum: u32,
}

impl Tag {
    /// Whether `log_copy` (as it stands in the log, escaped) is what this tag describes.
    pub fn matches(&self, format: &LogFormat, sequence: Tid, log_copy: &[u8]) -> bool {
        match format.checksum {
            ChecksumVersion::None | ChecksumVersion::V1 => true,
            ChecksumVersion::V2 => {
                data_checksum(format, sequence, log_copy) & 0xffff == self.checksum
            }
            ChecksumVersion::V3 => data_checksum(format, sequence, log_copy) == self.checksum,
        }
    }
}

/// CRC-32C of a data block as checksum v2 and v3 define it: UUID, transaction, contents.
pub fn data_checksum(format: &LogFormat, sequence: Tid, log_copy: &[u8]) -> u32 {
    checksum::crc32c(checksum::crc32c(format.seed, &sequence.0.to_be_bytes()), log_copy)
}

/// The tags of a descriptor block, in order. A block without a last-tag flag ends where no
/// further tag fits. The checksum is [`LogFormat::verify_tail`]'s to check.
pub fn parse_tags(format: &LogFormat, block: &[u8]) -> Vec<Tag> {
    let end = block.len().saturating_sub(format.tail_bytes());
    let size = format.tag_bytes();
    let mut tags = Vec::new();
    let mut offset = HEADER_BYTES;
    while offset.saturating_add(size) <= end {
        let tag = decode_tag(format, block, offset);
        tags.push(tag);
        offset = offset.saturating_add(size);
        if !tag.flags.contains(TagFlags::SAME_UUID) {
            offset = offset.saturating_add(UUID_BYTES);
        }
        if tag.flags.contains(TagFlags::LAST_TAG) {
            break;
        }
    }
    tags
}

/// Offsets inside a tag: the flags lie at 6 in every layout (v3 has them as a 32-bit word
/// whose upper half is unused), the upper half of the block number at 8.
const FLAGS: usize = 6;
const BLOCKNR_HIGH: usize = 8;

fn decode_tag(format: &LogFormat, block: &[u8], offset: usize) -> Tag {
    let low = be32(block, offset);
    let high = if format.bit64 { be32(block, offset + BLOCKNR_HIGH) } else { 0 };
    let checksum = match format.checksum {
        ChecksumVersion::None | ChecksumVersion::V1 => 0,
        ChecksumVersion::V2 => u32::from(be16(block, offset + 4)),
        ChecksumVersion::V3 => be32(block, offset + 12),
    };
    Tag {
        block: BlockNo((u64::from(high) << 32) | u64::from(low)),
        flags: TagFlags::from_bits_retain(be16(block, offset + FLAGS)),
        checksum,
    }
}

fn encode_tag(format: &LogFormat, tag: &Tag, block: &mut [u8], offset: usize) {
    put_be32(block, offset, tag.block.0 as u32);
    match format.checksum {
        ChecksumVersion::None | ChecksumVersion::V1 => {}
        ChecksumVersion::V2 => put(block, offset + 4, &(tag.checksum as u16).to_be_bytes()),
        ChecksumVersion::V3 => put_be32(block, offset + 12, tag.checksum),
    }
    put(block, offset + FLAGS, &tag.flags.bits().to_be_bytes());
    if format.bit64 {
        put_be32(block, offset + BLOCKNR_HIGH, (tag.block.0 >> 32) as u32);
    }
}

/// Fills a descriptor block.
#[derive(Debug)]
pub struct DescriptorBuilder<'a> {
    format: &'a LogFormat,
    block: &'a mut [u8],
    /// Where the next tag goes.
    offset: usize,
    /// The last tag written and where, since it must be marked as the last.
    last: Option<(usize, Tag)>,
    count: usize,
}

impl<'a> DescriptorBuilder<'a> {
    /// Starts a descriptor in `block`, which must have the log's block size.
    pub fn new(format: &'a LogFormat, sequence: Tid, block: &'a mut [u8]) -> Result<Self> {
        FormatError::check_len("descriptor block", block, format.block_size)?;
        block.fill(0);
        BlockHeader { block_type: BlockType::Descriptor, sequence }.encode(block)?;
        Ok(DescriptorBuilder { format, block, offset: HEADER_BYTES, last: None, count: 0 })
    }

    /// Whether another tag fits.
    pub fn has_room(&self) -> bool {
        self.count < self.format.tags_per_descriptor()
    }

    /// Adds a block. `checksum` is [`data_checksum`] of the copy in the log (ignored unless
    /// checksum v2 or v3 is on). Errs when the descriptor is full or the number too wide.
    pub fn push(&mut self, home: BlockNo, escaped: bool, checksum: u32) -> Result<()> {
        if !self.has_room() {
            return Err(FormatError::NoRoom {
                structure: "descriptor block",
                need: self.count as u64 + 1,
                capacity: self.format.tags_per_descriptor() as u64,
            });
        }
        check_width(self.format, home)?;
        let mut flags = TagFlags::empty();
        flags.set(TagFlags::ESCAPE, escaped);
        flags.set(TagFlags::SAME_UUID, self.last.is_some());
        let tag = Tag { block: home, flags, checksum };
        encode_tag(self.format, &tag, self.block, self.offset);
        let first = self.last.is_none();
        self.last = Some((self.offset, tag));
        self.offset += self.format.tag_bytes();
        if first {
            put(self.block, self.offset, &self.format.uuid);
            self.offset += UUID_BYTES;
        }
        self.count += 1;
        Ok(())
    }

    /// Marks the last tag and sets the checksum. Errs when there is no tag.
    pub fn finish(self) -> Result<()> {
        let Some((offset, mut tag)) = self.last else {
            return Err(FormatError::Usage("a descriptor block needs a tag".into()));
        };
        tag.flags |= TagFlags::LAST_TAG;
        encode_tag(self.format, &tag, self.block, offset);
        self.format.set_tail(self.block);
        Ok(())
    }
}

/// Errs when a log with 32-bit block numbers cannot express `block`.
pub(super) fn check_width(format: &LogFormat, block: BlockNo) -> Result<()> {
    if format.bit64 || u32::try_from(block.0).is_ok() {
        return Ok(());
    }
    Err(FormatError::Usage(format!("block {block} needs a journal with the 64bit feature")))
}
