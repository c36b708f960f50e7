//! The commit block, which ends a transaction.
//!
//! Invariant: what [`CommitBlock::encode`] writes, [`CommitBlock::verify`] accepts.

use super::{
    BlockHeader, BlockType, ChecksumVersion, HEADER_BYTES, LogFormat, be32, be64, put, put_be32,
};
use crate::error::{FormatError, Result};
use crate::types::Tid;

const CHKSUM_TYPE: usize = HEADER_BYTES;
const CHKSUM_SIZE: usize = 13;
const CHKSUM: usize = 16;
const COMMIT_SEC: usize = 48;
const COMMIT_NSEC: usize = 56;
/// Bytes of the fields; the rest of the block is zero.
const COMMIT_BYTES: usize = 60;

/// `JBD2_CRC32_CHKSUM`: the only type that checksum v1 was ever written with.
const TYPE_CRC32: u8 = 1;

/// A commit block (`struct commit_header`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CommitBlock {
    /// The transaction that it ends.
    pub sequence: Tid,
    /// When it was written (`h_commit_sec`), in seconds since 1970.
    pub commit_sec: u64,
    /// The nanoseconds to that (`h_commit_nsec`).
    pub commit_nsec: u32,
    /// Checksum v1 only: [`crc32_be`] over the transaction's descriptor and data blocks.
    pub transaction_crc: u32,
}

impl CommitBlock {
    /// Bytes of the kernel's structure: the fields and four bytes of padding, which are zero. What
    /// follows them is no part of it.
    pub const HEAD_BYTES: usize = 64;

    /// Writes the whole block; `block` must have the log's block size.
    pub fn encode(&self, format: &LogFormat, block: &mut [u8]) -> Result<()> {
        FormatError::check_len("commit block", block, COMMIT_BYTES)?;
        block.fill(0);
        BlockHeader { block_type: BlockType::Commit, sequence: self.sequence }.encode(block)?;
        put(block, COMMIT_SEC, &self.commit_sec.to_be_bytes());
        put_be32(block, COMMIT_NSEC, self.commit_nsec);
        match format.checksum {
            ChecksumVersion::None => {}
            ChecksumVersion::V1 => {
                put(block, CHKSUM_TYPE, &[TYPE_CRC32, 4]);
                put_be32(block, CHKSUM, self.transaction_crc);
            }
            ChecksumVersion::V2 | ChecksumVersion::V3 => {
                let computed = format.hole_checksum(block, CHKSUM);
                put_be32(block, CHKSUM, computed);
            }
        }
        Ok(())
    }

    /// Reads the fields; the header's type is the caller's to have checked.
    pub fn decode(block: &[u8]) -> Result<CommitBlock> {
        FormatError::check_len("commit block", block, COMMIT_BYTES)?;
        Ok(CommitBlock {
            sequence: Tid(be32(block, 8)),
            commit_sec: be64(block, COMMIT_SEC),
            commit_nsec: be32(block, COMMIT_NSEC),
            transaction_crc: be32(block, CHKSUM),
        })
    }

    /// Verifies the block's checksum. `transaction_crc` is what the reader computed over the
    /// transaction, for checksum v1.
    ///
    /// Under v2 and v3 a block is also good when only its first [`Self::HEAD_BYTES`] reached the disk
    /// and the rest is still what was there before: that part is all zero by definition. The padding
    /// among them counts, as in Linux: fields that arrived came with it, in one sector.
    pub fn verify(format: &LogFormat, block: &[u8], transaction_crc: u32) -> Result<()> {
        FormatError::check_len("commit block", block, Self::HEAD_BYTES)?;
        let stored = be32(block, CHKSUM);
        match format.checksum {
            ChecksumVersion::None => Ok(()),
            ChecksumVersion::V1 => {
                let kind = (block[CHKSUM_TYPE], block[CHKSUM_SIZE]);
                // A transaction written before the feature was switched on has none.
                if kind == (0, 0) && stored == 0 {
                    return Ok(());
                }
                if kind != (TYPE_CRC32, 4) {
                    let detail = format!("its checksum type is {}, not CRC-32", kind.0);
                    return Err(FormatError::corrupt("commit block", detail));
                }
                FormatError::check_checksum("commit block", stored, transaction_crc)
            }
            ChecksumVersion::V2 | ChecksumVersion::V3 => {
                let computed = format.hole_checksum(block, CHKSUM);
                if stored == computed {
                    return Ok(());
                }
                let mut head = block.to_vec();
                head[Self::HEAD_BYTES..].fill(0);
                if stored == format.hole_checksum(&head, CHKSUM) {
                    return Ok(());
                }
                FormatError::check_checksum("commit block", stored, computed)
            }
        }
    }
}

/// The CRC-32 of checksum v1: most significant bit first, polynomial 0x04c11db7, raw. The
/// first call of a transaction passes `!0`, later ones the result so far.
pub fn crc32_be(seed: u32, bytes: &[u8]) -> u32 {
    bytes
        .iter()
        .fold(seed, |crc, &byte| (crc << 8) ^ CRC32_BE_TABLE[((crc >> 24) as u8 ^ byte) as usize])
}

const CRC32_BE_TABLE: [u32; 256] = crc32_be_table();

const fn crc32_be_table() -> [u32; 256] {
    let mut table = [0u32; 256];
    let mut index = 0;
    while index < 256 {
        let mut crc = (index as u32) << 24;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 0x8000_0000 != 0 { (crc << 1) ^ 0x04c1_1db7 } else { crc << 1 };
            bit += 1;
        }
        table[index] = crc;
        index += 1;
    }
    table
}
