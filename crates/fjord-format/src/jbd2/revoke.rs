//! Revoke blocks: blocks whose copies in this and earlier transactions are not to be replayed.
//!
//! Invariant: [`parse_revokes`] reads back what [`RevokeBuilder`] wrote.

use super::descriptor::check_width;
use super::{BlockHeader, BlockType, HEADER_BYTES, LogFormat, be32, be64, put, put_be32};
use crate::error::{FormatError, Result};
use crate::types::{BlockNo, Tid};

/// Where `r_count` is: the bytes used, header included.
const COUNT: usize = HEADER_BYTES;
const RECORDS: usize = HEADER_BYTES + 4;

/// The blocks that a revoke block names. The checksum is [`LogFormat::verify_tail`]'s to
/// check. Errs when the block claims to hold more than fits.
pub fn parse_revokes(format: &LogFormat, block: &[u8]) -> Result<Vec<BlockNo>> {
    FormatError::check_len("revoke block", block, RECORDS)?;
    let used_bytes = be32(block, COUNT) as usize;
    let room_bytes = block.len().saturating_sub(format.tail_bytes());
    if used_bytes > room_bytes {
        let detail = format!("it claims {used_bytes} bytes of {room_bytes}");
        return Err(FormatError::corrupt("revoke block", detail));
    }
    let records = block.get(RECORDS..used_bytes).unwrap_or_default();
    let numbers = records.chunks_exact(format.revoke_record_bytes()).map(|record| {
        BlockNo(if format.bit64 { be64(record, 0) } else { u64::from(be32(record, 0)) })
    });
    Ok(numbers.collect())
}

/// Fills a revoke block.
#[derive(Debug)]
pub struct RevokeBuilder<'a> {
    format: &'a LogFormat,
    block: &'a mut [u8],
    offset: usize,
}

impl<'a> RevokeBuilder<'a> {
    /// Starts a revoke block in `block`, which must have the log's block size.
    pub fn new(format: &'a LogFormat, sequence: Tid, block: &'a mut [u8]) -> Result<Self> {
        FormatError::check_len("revoke block", block, format.block_size.max(RECORDS))?;
        block.fill(0);
        BlockHeader { block_type: BlockType::Revoke, sequence }.encode(block)?;
        Ok(RevokeBuilder { format, block, offset: RECORDS })
    }

    /// Adds a block. Errs when the revoke block is full or the number too wide.
    pub fn push(&mut self, revoked: BlockNo) -> Result<()> {
        let bytes = self.format.revoke_record_bytes();
        let room = self.block.len() - self.format.tail_bytes();
        if self.offset + bytes > room {
            let capacity = self.format.revokes_per_block() as u64;
            let structure = "revoke block";
            return Err(FormatError::NoRoom { structure, need: capacity + 1, capacity });
        }
        check_width(self.format, revoked)?;
        if self.format.bit64 {
            put(self.block, self.offset, &revoked.0.to_be_bytes());
        } else {
            put_be32(self.block, self.offset, revoked.0 as u32);
        }
        self.offset += bytes;
        Ok(())
    }

    /// Sets the count and the checksum.
    pub fn finish(self) {
        put_be32(self.block, COUNT, self.offset as u32);
        self.format.set_tail(self.block);
    }
}
