//! The block map of ext2 and ext3: twelve direct pointers and three trees in `i_block`.
//!
//! Invariant: a [`BlockPath`] has offsets that lie inside `i_block` and inside an indirect
//! block of the block size it was made for. Pointers are 32-bit block numbers; 0 is a hole.

use crate::error::{FormatError, Result};
use crate::geometry::Geometry;
use crate::inode::I_BLOCK_BYTES;
use crate::types::{BlockNo, LogicalBlock};

const STRUCTURE: &str = "block map";
/// Pointers in `i_block` that lead straight to data.
pub const DIRECT_POINTERS: u32 = 12;
/// Place in `i_block` of the pointer to the indirect block.
pub const INDIRECT: u32 = 12;
/// Place in `i_block` of the pointer to the double indirect block.
pub const DOUBLE_INDIRECT: u32 = 13;
/// Place in `i_block` of the pointer to the triple indirect block.
pub const TRIPLE_INDIRECT: u32 = 14;

/// How to get from `i_block` to a file block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockPath {
    offsets: [u32; 4],
    len: usize,
}

impl BlockPath {
    /// The path to a file block, or `None` when it lies past what the map can reach.
    pub fn to(logical: LogicalBlock, geometry: &Geometry) -> Option<BlockPath> {
        let bits = pointer_bits(geometry);
        let pointers = 1u64 << bits;
        let mask = pointers - 1;
        let mut rest = u64::from(logical.0);
        if rest < u64::from(DIRECT_POINTERS) {
            return Some(BlockPath { offsets: [logical.0, 0, 0, 0], len: 1 });
        }
        rest -= u64::from(DIRECT_POINTERS);
        let mut offsets = [0; 4];
        for level in 1..=3u32 {
            let reach = pointers.pow(level);
            if rest >= reach {
                rest -= reach;
                continue;
            }
            offsets[0] = DIRECT_POINTERS + level - 1;
            for step in 1..=level {
                offsets[step as usize] = (rest >> (bits * (level - step)) & mask) as u32;
            }
            return Some(BlockPath { offsets, len: level as usize + 1 });
        }
        None
    }

    /// Places of the pointers to follow: first in `i_block`, then in each indirect block; the
    /// last one points to the data. One to four of them.
    pub fn offsets(&self) -> &[u32] {
        &self.offsets[..self.len]
    }

    /// Indirect blocks on the way.
    pub fn indirect_blocks(&self) -> usize {
        self.len - 1
    }
}

fn pointer_bits(geometry: &Geometry) -> u32 {
    geometry.block_size_bits - 2
}

/// Pointers in one indirect block.
pub fn pointers_per_block(geometry: &Geometry) -> u32 {
    1 << pointer_bits(geometry)
}

/// File blocks that the map can reach, not more than a 32-bit index can name.
pub fn blocks_max(geometry: &Geometry) -> u64 {
    let pointers = u64::from(pointers_per_block(geometry));
    let reach = u64::from(DIRECT_POINTERS) + pointers + pointers.pow(2) + pointers.pow(3);
    reach.min(u64::from(u32::MAX))
}

/// Largest size in bytes of a file mapped by a block map, as Linux limits it: what the map can
/// reach, and what the inode's block counter can count together with the indirect blocks.
pub fn file_size_max_bytes(geometry: &Geometry) -> u64 {
    let bits = geometry.block_size_bits;
    let has_huge_file = geometry.features.ro_compat.contains(crate::features::RoCompat::HUGE_FILE);
    let countable =
        if has_huge_file { (1u64 << 48) - 1 } else { u64::from(u32::MAX) >> (bits - 9) };
    let reach = blocks_max(geometry);
    let data = if reach + indirect_blocks_of(reach, geometry) <= countable {
        reach
    } else {
        countable - indirect_blocks_of(countable, geometry)
    };
    data << bits
}

/// Indirect blocks that a file of this many blocks without holes needs, were the map to go on
/// as the triple tree does.
fn indirect_blocks_of(data_blocks: u64, geometry: &Geometry) -> u64 {
    let pointers = u64::from(pointers_per_block(geometry));
    let mut rest = data_blocks.saturating_sub(u64::from(DIRECT_POINTERS));
    let mut blocks = 0;
    for level in 1..=3u32 {
        if rest == 0 {
            break;
        }
        let here = if level == 3 { rest } else { rest.min(pointers.pow(level)) };
        blocks += (1..=level).map(|step| here.div_ceil(pointers.pow(step))).sum::<u64>();
        rest -= here;
    }
    blocks
}

/// The pointer at `offset` of `i_block` or of an indirect block; `None` for a hole.
///
/// # Errors
/// [`FormatError::Corrupt`] when it points outside the file system, or
/// [`FormatError::Truncated`] when there is no such place.
pub fn read_pointer(bytes: &[u8], offset: u32, geometry: &Geometry) -> Result<Option<BlockNo>> {
    let at = offset as usize * 4;
    FormatError::check_len(STRUCTURE, bytes, at + 4)?;
    let block = u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    let block = BlockNo(u64::from(block));
    if block.0 == 0 {
        return Ok(None);
    }
    if !geometry.contains(block) {
        return Err(FormatError::corrupt(STRUCTURE, format!("there is no block {block}")));
    }
    Ok(Some(block))
}

/// Sets the pointer at `offset` of `i_block` or of an indirect block.
///
/// # Errors
/// [`FormatError::Usage`] for a block number of more than 32 bits, [`FormatError::Truncated`]
/// when there is no such place.
pub fn write_pointer(bytes: &mut [u8], offset: u32, block: Option<BlockNo>) -> Result<()> {
    let at = offset as usize * 4;
    FormatError::check_len(STRUCTURE, bytes, at + 4)?;
    let number = block.map_or(0, |block| block.0);
    let number = u32::try_from(number)
        .map_err(|_| FormatError::Usage(format!("a block map cannot point to block {number}")))?;
    bytes[at..at + 4].copy_from_slice(&number.to_le_bytes());
    Ok(())
}

const _: () = assert!(I_BLOCK_BYTES == (TRIPLE_INDIRECT as usize + 1) * 4);
