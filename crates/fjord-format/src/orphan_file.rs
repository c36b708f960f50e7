//! Blocks of the orphan file: inode numbers of files that recovery must delete or truncate.
//!
//! Invariants: a block is an array of 32-bit slots (0 is free) and an eight-byte tail with magic
//! and checksum; the checksum covers the block's physical number and the slots, not the tail.
//!
//! Format: Linux `Documentation/filesystems/ext4/orphan.rst`.

use crate::checksum;
use crate::error::{FormatError, Result};
use crate::le;
use crate::types::{BlockNo, InodeNo};

const WHAT: &str = "orphan file block";

/// `ob_magic` in the tail of each block.
pub const ORPHAN_BLOCK_MAGIC: u32 = 0x0b10_ca04;
/// Most blocks that an orphan file may have (Linux's limit, 512 KiB at 1 KiB blocks).
pub const ORPHAN_FILE_BLOCKS_MAX: u32 = 512;

const TAIL_BYTES: usize = 8;
const SLOT_BYTES: usize = 4;

/// Number of slots in a block of this size.
pub fn slot_count(block_bytes: usize) -> usize {
    block_bytes.saturating_sub(TAIL_BYTES) / SLOT_BYTES
}

fn tail_offset(block: &[u8]) -> Result<usize> {
    block.len().checked_sub(TAIL_BYTES).ok_or(FormatError::Truncated {
        structure: WHAT,
        need_bytes: TAIL_BYTES,
        got_bytes: block.len(),
    })
}

/// Checksum of a block: `inode_seed` is [`checksum::inode_seed`] of the orphan file, `block_no`
/// the block's physical place.
fn compute(block: &[u8], inode_seed: u32, block_no: BlockNo) -> Result<u32> {
    let slots = le::slice(WHAT, block, 0, slot_count(block.len()).saturating_mul(SLOT_BYTES))?;
    let seed = checksum::crc32c(inode_seed, &block_no.0.to_le_bytes());
    Ok(checksum::crc32c(seed, slots))
}

/// Checks magic and, when `inode_seed` is given (feature `metadata_csum`), checksum of a block.
///
/// # Errors
/// [`FormatError::BadMagic`], [`FormatError::Checksum`].
pub fn verify(block: &[u8], inode_seed: Option<u32>, block_no: BlockNo) -> Result<()> {
    let tail = tail_offset(block)?;
    let found = le::get_u32(WHAT, block, tail)?;
    if found != ORPHAN_BLOCK_MAGIC {
        return Err(FormatError::BadMagic { structure: WHAT, found });
    }
    let Some(inode_seed) = inode_seed else { return Ok(()) };
    let stored = le::get_u32(WHAT, block, tail.saturating_add(4))?;
    FormatError::check_checksum(WHAT, stored, compute(block, inode_seed, block_no)?)
}

/// Sets magic and, with `metadata_csum`, checksum. Call after every change of a slot.
///
/// # Errors
/// [`FormatError::Truncated`] when the block is shorter than its tail.
pub fn seal(block: &mut [u8], inode_seed: Option<u32>, block_no: BlockNo) -> Result<()> {
    let tail = tail_offset(block)?;
    let sum = inode_seed.map(|seed| compute(block, seed, block_no)).transpose()?.unwrap_or(0);
    le::put_u32(WHAT, block, tail, ORPHAN_BLOCK_MAGIC)?;
    le::put_u32(WHAT, block, tail.saturating_add(4), sum)
}

/// The slots in use: index and inode.
pub fn orphans(block: &[u8]) -> impl Iterator<Item = (usize, InodeNo)> + '_ {
    let slots = block.as_chunks::<SLOT_BYTES>().0.iter().take(slot_count(block.len()));
    slots.enumerate().filter_map(|(index, raw)| {
        let number = u32::from_le_bytes(*raw);
        (number != 0).then_some((index, InodeNo(number)))
    })
}

/// Index of a free slot at `from` or after it, or before it when there is none.
pub fn free_slot(block: &[u8], from: usize) -> Option<usize> {
    let slots = block.as_chunks::<SLOT_BYTES>().0.get(..slot_count(block.len()))?;
    let (before, behind) = slots.split_at(from.min(slots.len()));
    let is_free = |raw: &[u8; SLOT_BYTES]| *raw == [0; SLOT_BYTES];
    let later = behind.iter().position(is_free).map(|index| index.saturating_add(before.len()));
    later.or_else(|| before.iter().position(is_free))
}

/// Fills slot `index` with an inode, or frees it.
///
/// # Errors
/// [`FormatError::Usage`] when the block has no such slot.
pub fn set_slot(block: &mut [u8], index: usize, inode: Option<InodeNo>) -> Result<()> {
    let count = slot_count(block.len());
    if index >= count {
        return Err(FormatError::Usage(format!("orphan slot {index} of {count}")));
    }
    let offset = index.saturating_mul(SLOT_BYTES);
    le::put_u32(WHAT, block, offset, inode.map_or(0, |inode| inode.0))
}
