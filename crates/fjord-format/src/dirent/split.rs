//! Splitting a full htree leaf.
//!
//! Owns which entries go to the new block. Invariant: both blocks are packed, and the new one has the greater hashes.
//!
//! Format: Linux `Documentation/filesystems/ext4/directory.rst`, "Hash Tree Directories".

use super::{DirEntry, DirFormat, HEADER_BYTES, WHAT, entries, init_block, rec_len_for};
use crate::error::{FormatError, Result};
use crate::hash::{HashSeed, HashVersion, dirhash};
use crate::le;

/// What [`split_leaf`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeafSplit {
    /// Names with this hash or a greater one are now in the new block.
    pub first_hash: u32,
    /// Some names with `first_hash` stayed in the old block: the index entry of the new block
    /// must be marked as continued (see [`LeafSplit::index_hash`]).
    pub continued: bool,
}

impl LeafSplit {
    /// The hash to put in the index for the new block.
    pub fn index_hash(&self) -> u32 {
        self.first_hash | u32::from(self.continued)
    }
}

/// One entry on its way from a full leaf to one of two.
struct Moved {
    hash: u32,
    offset: usize,
    rec_len: usize,
    name_len: usize,
}

/// Splits a full leaf by hash: the upper half moves to `new_block`, both are packed and get
/// tails (checksums not yet set). Which block then takes a new name: the new one when its hash
/// is at least [`LeafSplit::first_hash`].
///
/// # Errors
/// [`FormatError::Corrupt`] when an entry breaks a rule, [`FormatError::Usage`] when the leaf has
/// fewer than two entries. On an error both blocks are as they were.
pub fn split_leaf(
    block: &mut [u8],
    new_block: &mut [u8],
    format: &DirFormat,
    version: HashVersion,
    seed: HashSeed,
) -> Result<LeafSplit> {
    FormatError::check_len(WHAT, new_block, format.block_bytes)?;
    let mut map = Vec::new();
    for entry in entries(format.entries_area(block)?, format) {
        let DirEntry { offset, rec_len, name, .. } = entry?;
        let hash = dirhash(name, version, seed).hash;
        map.push(Moved { hash, offset, rec_len, name_len: name.len() });
    }
    map.sort_by_key(|moved| moved.hash);
    let split = split_point(&map, format.block_bytes);
    let (stay, go) = map.split_at_checked(split).unwrap_or((&map, &[]));
    let (Some(last), Some(first)) = (stay.last(), go.first()) else {
        return Err(FormatError::Usage(
            "a leaf with fewer than two entries cannot be split".into(),
        ));
    };
    let result = LeafSplit { first_hash: first.hash, continued: first.hash == last.hash };
    let old = le::slice(WHAT, block, 0, format.block_bytes)?.to_vec();
    pack(&old, new_block, format, go)?;
    // The entries that stay keep their order in the block, as when they are packed in place.
    map.truncate(split);
    map.sort_by_key(|moved| moved.offset);
    pack(&old, block, format, &map)?;
    Ok(result)
}

/// How many of the sorted entries stay: neither half gets more than half a block, as far as
/// records of that size go.
fn split_point(map: &[Moved], block_bytes: usize) -> usize {
    let half = block_bytes / 2;
    let mut moved_bytes = 0usize;
    for (index, entry) in map.iter().enumerate().rev() {
        if moved_bytes.saturating_add(entry.rec_len / 2) > half {
            return index.saturating_add(1).min(map.len().saturating_sub(1));
        }
        moved_bytes = moved_bytes.saturating_add(entry.rec_len);
    }
    map.len() / 2
}

/// Fills `target` with the records `chosen` of `source`, each as short as its name allows and
/// the last one reaching to the end.
fn pack(source: &[u8], target: &mut [u8], format: &DirFormat, chosen: &[Moved]) -> Result<()> {
    init_block(target, format)?;
    let area = format.entries_area_mut(target)?;
    let mut at = 0usize;
    for (index, moved) in chosen.iter().enumerate() {
        let used = rec_len_for(moved.name_len);
        let is_last = index.saturating_add(1) == chosen.len();
        let rec_len = if is_last { area.len().saturating_sub(at) } else { used };
        // Names only: padding after them would carry bytes of names long removed.
        let kept = HEADER_BYTES.saturating_add(moved.name_len);
        le::put(WHAT, area, at, le::slice(WHAT, source, moved.offset, kept)?)?;
        format.put_rec_len(area, at, rec_len)?;
        at = at.saturating_add(used);
    }
    Ok(())
}
