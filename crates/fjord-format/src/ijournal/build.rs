//! Puts an i-transaction together.
//!
//! Invariant: the payload blocks that the caller writes after the header are those for which
//! [`Place::Payload`] was returned, in that order.

use super::{AreaFormat, FIXED_BYTES, FLAG_ESCAPED, HEADER_BLOCKS_MAX, MAGIC, Order};
use super::{RECORD_HEAD_BYTES, VERSION, at, kind, needs_escape};
use crate::checksum;
use crate::error::{FormatError, Result};
use crate::le;
use crate::types::{BlockNo, InodeNo, Tid};

const STRUCTURE: &str = "i-transaction";

/// Where a block of an i-transaction goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Into the header, all of it.
    Header,
    /// Behind the header, as the next payload block.
    Payload {
        /// Its first four bytes must be zero there.
        escaped: bool,
    },
}

/// An i-transaction in the making. Records come in the order of the calls; inodes and entries
/// belong in front of data, which takes what room is left.
#[derive(Debug)]
pub struct Builder {
    format: AreaFormat,
    header: Vec<u8>,
    payload_blocks: u32,
}

impl Builder {
    /// Starts the i-transaction `sub_id` of the file `ino`, whose newest change is in the
    /// transaction `tid`.
    pub fn new(format: &AreaFormat, tid: Tid, sub_id: u64, ino: InodeNo) -> Builder {
        let mut header = Vec::with_capacity(format.block_size);
        header.resize(FIXED_BYTES, 0);
        let mut put = |offset: usize, bytes: &[u8]| {
            header[offset..offset + bytes.len()].copy_from_slice(bytes);
        };
        put(at::MAGIC, &MAGIC.to_le_bytes());
        put(at::VERSION, &VERSION.to_le_bytes());
        put(at::TID, &tid.0.to_le_bytes());
        put(at::NONCE, &format.nonce.to_le_bytes());
        put(at::SUB_ID, &sub_id.to_le_bytes());
        put(at::INO, &ino.0.to_le_bytes());
        Builder { format: *format, header, payload_blocks: 0 }
    }

    /// The inode as its table is to hold it: the file's own, or that of a directory above it
    /// which no committed transaction has yet.
    pub fn inode(&mut self, ino: InodeNo, bytes: &[u8]) -> Result<()> {
        self.record(kind::INODE, &[&ino.0.to_le_bytes(), bytes])
    }

    /// `name` in the directory `parent` names `child`; `file_type` as in directory entries.
    pub fn entry(
        &mut self,
        parent: InodeNo,
        child: InodeNo,
        file_type: u8,
        name: &[u8],
    ) -> Result<()> {
        let numbers = [parent.0.to_le_bytes(), child.0.to_le_bytes()];
        let kind = u32::from(file_type).to_le_bytes();
        self.record(kind::ENTRY, &[&numbers[0], &numbers[1], &kind, name])
    }

    /// A block of the file's extent tree.
    pub fn extent_block(&mut self, home: BlockNo, content: &[u8]) -> Result<Place> {
        self.payload(kind::EXTENT_BLOCK, home, content)
    }

    /// A block of the file's data: `content` is the whole block. What it holds without the
    /// zeroes at its end goes into the header if it fits into the header's first block.
    pub fn data(&mut self, home: BlockNo, content: &[u8]) -> Result<Place> {
        let used = content.iter().rposition(|&byte| byte != 0).map_or(0, |last| last + 1);
        let room = self.format.block_size.saturating_sub(self.header.len());
        if RECORD_HEAD_BYTES + 12 + used <= room {
            let len = (used as u32).to_le_bytes();
            self.record(kind::DATA_HERE, &[&home.0.to_le_bytes(), &len, &content[..used]])?;
            return Ok(Place::Header);
        }
        self.payload(kind::DATA_BLOCK, home, content)
    }

    /// Data of these blocks in earlier i-transactions is out of date: they were written in
    /// place since.
    pub fn superseded(&mut self, home: BlockNo, count: u32) -> Result<()> {
        self.record(kind::SUPERSEDED, &[&home.0.to_le_bytes(), &count.to_le_bytes()])
    }

    /// Blocks that it takes so far, header included.
    pub fn total_blocks(&self) -> u32 {
        self.header_blocks() + self.payload_blocks
    }

    /// Errs if it is too large for the format.
    pub fn check(&self) -> Result<()> {
        let header_blocks = self.header_blocks();
        if header_blocks > HEADER_BLOCKS_MAX {
            return Err(FormatError::NoRoom {
                structure: STRUCTURE,
                need: u64::from(header_blocks),
                capacity: u64::from(HEADER_BLOCKS_MAX),
            });
        }
        Ok(())
    }

    /// The header, whole blocks long, of an i-transaction with this place among barriers.
    pub fn finish(mut self, order: &Order) -> Result<Vec<u8>> {
        self.check()?;
        let (header_blocks, total_blocks) = (self.header_blocks(), self.total_blocks());
        // At most HEADER_BLOCKS_MAX blocks of 64 KiB.
        let used = self.header.len() as u32;
        let format = self.format;
        let header = &mut self.header;
        header.resize(header_blocks as usize * format.block_size, 0);
        le::put_u32(STRUCTURE, header, at::HEADER_BLOCKS, header_blocks)?;
        le::put_u32(STRUCTURE, header, at::TOTAL_BLOCKS, total_blocks)?;
        le::put_u32(STRUCTURE, header, at::HEADER_BYTES, used)?;
        le::put_u32(STRUCTURE, header, at::BARRIER, order.barrier)?;
        le::put_u32(STRUCTURE, header, at::NEWEST_TID, order.newest.0)?;
        le::put_u32(STRUCTURE, header, at::BEHIND_NEWEST, order.behind_newest)?;
        le::put_u32(STRUCTURE, header, at::BEHIND_OLDER, order.behind_older)?;
        let checksum = format.header_checksum(header);
        le::put_u32(STRUCTURE, header, at::CHECKSUM, checksum)?;
        Ok(self.header)
    }

    fn header_blocks(&self) -> u32 {
        let blocks = self.header.len().div_ceil(self.format.block_size.max(1));
        u32::try_from(blocks).unwrap_or(u32::MAX)
    }

    fn payload(&mut self, kind: u16, home: BlockNo, content: &[u8]) -> Result<Place> {
        FormatError::check_len(STRUCTURE, content, self.format.block_size)?;
        let escaped = needs_escape(content);
        let crc = if escaped {
            let zeroes = checksum::crc32c(self.format.seed(), &[0; 4]);
            checksum::crc32c(zeroes, &content[4..])
        } else {
            self.format.payload_crc(content)
        };
        let flags = if escaped { FLAG_ESCAPED } else { 0 };
        self.record(kind, &[&home.0.to_le_bytes(), &crc.to_le_bytes(), &flags.to_le_bytes()])?;
        self.payload_blocks += 1;
        Ok(Place::Payload { escaped })
    }

    fn record(&mut self, kind: u16, parts: &[&[u8]]) -> Result<()> {
        let len: usize = parts.iter().map(|part| part.len()).sum();
        let too_long = |_| FormatError::NoRoom {
            structure: STRUCTURE,
            need: len as u64,
            capacity: u64::from(u16::MAX),
        };
        let field = u16::try_from(len).map_err(too_long)?;
        self.header.extend_from_slice(&kind.to_le_bytes());
        self.header.extend_from_slice(&field.to_le_bytes());
        for part in parts {
            self.header.extend_from_slice(part);
        }
        self.header.resize(self.header.len().next_multiple_of(4), 0);
        Ok(())
    }
}
