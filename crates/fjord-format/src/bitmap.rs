//! Bit operations over block and inode bitmaps, and the first content of a bitmap.
//!
//! Bit `n` is bit `n % 8` of byte `n / 8`. Invariant: a bit outside the slice counts as set
//! ("in use") when read and is ignored when written, so no number from disk can panic here.
//! Checksums of bitmaps live in their group's descriptor: see [`GroupDesc`].

use crate::geometry::Geometry;
use crate::group::GroupDesc;
use crate::types::{BlockNo, GroupNo};

/// A run of bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Run {
    /// First bit of the run.
    pub start: u32,
    /// Bits in the run.
    pub len: u32,
}

fn bit_count(bits: &[u8]) -> u32 {
    u32::try_from(bits.len().saturating_mul(8)).unwrap_or(u32::MAX)
}

/// Whether the bit is set.
pub fn test(bits: &[u8], bit: u32) -> bool {
    bits.get(bit as usize / 8).is_none_or(|byte| byte >> (bit % 8) & 1 != 0)
}

/// Sets the bit and tells whether it was set before.
pub fn set(bits: &mut [u8], bit: u32) -> bool {
    let was = test(bits, bit);
    if let Some(byte) = bits.get_mut(bit as usize / 8) {
        *byte |= 1 << (bit % 8);
    }
    was
}

/// Clears the bit and tells whether it was set before.
pub fn clear(bits: &mut [u8], bit: u32) -> bool {
    let was = test(bits, bit);
    if let Some(byte) = bits.get_mut(bit as usize / 8) {
        *byte &= !(1 << (bit % 8));
    }
    was
}

/// Sets `len` bits from `start` on.
pub fn set_range(bits: &mut [u8], start: u32, len: u32) {
    for_each_byte(bits, start, len, |byte, mask| *byte |= mask);
}

/// Clears `len` bits from `start` on.
pub fn clear_range(bits: &mut [u8], start: u32, len: u32) {
    for_each_byte(bits, start, len, |byte, mask| *byte &= !mask);
}

/// Calls `change` for every byte that the range touches, with the mask of its bits in range.
fn for_each_byte(bits: &mut [u8], start: u32, len: u32, change: impl Fn(&mut u8, u8)) {
    let end = start.saturating_add(len).min(bit_count(bits));
    if start >= end {
        return;
    }
    let (first, last) = (start as usize / 8, (end - 1) as usize / 8);
    let head = 0xffu8 << (start % 8);
    let tail = 0xffu8 >> (7 - (end - 1) % 8);
    for (index, byte) in bits[first..=last].iter_mut().enumerate() {
        let mut mask = 0xff;
        if index == 0 {
            mask &= head;
        }
        if index == last - first {
            mask &= tail;
        }
        change(byte, mask);
    }
}

/// Whether all `len` bits from `start` on are clear.
pub fn is_range_clear(bits: &[u8], start: u32, len: u32) -> bool {
    let Some(end) = start.checked_add(len) else { return false };
    end <= bit_count(bits) && next_set(bits, start, end).is_none()
}

/// Whether all `len` bits from `start` on are set.
pub fn is_range_set(bits: &[u8], start: u32, len: u32) -> bool {
    next_clear(bits, start, start.saturating_add(len)).is_none()
}

/// The first clear bit in `start..end`.
pub fn next_clear(bits: &[u8], start: u32, end: u32) -> Option<u32> {
    scan(bits, start, end, |word| !word)
}

/// The first set bit in `start..end`, of those that the slice holds.
pub fn next_set(bits: &[u8], start: u32, end: u32) -> Option<u32> {
    scan(bits, start, end, |word| word)
}

/// First bit in range for which `wanted` of its word has a one; 64 bits at a time.
fn scan(bits: &[u8], start: u32, end: u32, wanted: impl Fn(u64) -> u64) -> Option<u32> {
    let end = end.min(bit_count(bits));
    let mut at = start;
    while at < end {
        let base = at as usize / 64 * 8;
        let hits = wanted(word_at(bits, base)) & (!0 << (at % 64));
        let word_start = at / 64 * 64;
        if hits != 0 {
            let bit = word_start + hits.trailing_zeros();
            return (bit < end).then_some(bit);
        }
        at = word_start.checked_add(64)?;
    }
    None
}

/// The 64 bits from byte `base` on; bytes past the end come out as zero.
fn word_at(bits: &[u8], base: usize) -> u64 {
    let rest = bits.get(base..).unwrap_or_default();
    if let Some(chunk) = rest.first_chunk::<8>() {
        return u64::from_le_bytes(*chunk);
    }
    let mut word = [0; 8];
    word[..rest.len()].copy_from_slice(rest);
    u64::from_le_bytes(word)
}

/// Clear bits among the first `len`.
pub fn count_clear(bits: &[u8], len: u32) -> u32 {
    let len = len.min(bit_count(bits));
    let (whole, rest) = bits.split_at(len as usize / 8);
    let chunks = whole.chunks_exact(8);
    let tail: u32 = chunks.remainder().iter().map(|byte| byte.count_zeros()).sum();
    let words: u32 = chunks
        .map(|chunk| chunk.iter().fold(0u64, |word, &byte| word << 8 | u64::from(byte)))
        .map(u64::count_zeros)
        .sum();
    let odd = len % 8;
    let last = rest.first().map_or(0, |byte| (!byte & ((1u8 << odd) - 1)).count_ones());
    words + tail + last
}

/// All runs of clear bits in `start..end`, in order.
pub fn clear_runs(bits: &[u8], start: u32, end: u32) -> impl Iterator<Item = Run> + '_ {
    let end = end.min(bit_count(bits));
    let mut at = start;
    std::iter::from_fn(move || {
        let run_start = next_clear(bits, at, end)?;
        let run_end = next_set(bits, run_start, end).unwrap_or(end);
        at = run_end;
        Some(Run { start: run_start, len: run_end - run_start })
    })
}

/// The longest run of clear bits in `start..end`, the first of equals.
pub fn longest_clear_run(bits: &[u8], start: u32, end: u32) -> Option<Run> {
    clear_runs(bits, start, end).reduce(|best, run| if run.len > best.len { run } else { best })
}

/// Fills `bitmap` (one block) with what the block bitmap of a `BLOCK_UNINIT` group stands
/// for: its superblock and descriptor copies, its own bitmaps and inode table where they lie
/// in the group, and the bits past its end are in use.
pub fn init_block_bitmap(bitmap: &mut [u8], geometry: &Geometry, group: GroupNo, desc: &GroupDesc) {
    bitmap.fill(0);
    let base = geometry.base_metadata_blocks(group);
    set_range(bitmap, 0, base.div_ceil(geometry.cluster_ratio));
    mark_blocks(bitmap, geometry, group, desc.block_bitmap, 1);
    mark_blocks(bitmap, geometry, group, desc.inode_bitmap, 1);
    mark_blocks(bitmap, geometry, group, desc.inode_table, geometry.inode_table_blocks());
    pad(bitmap, geometry.clusters_in_group(group));
}

/// Fills `bitmap` (one block) with what the inode bitmap of an `INODE_UNINIT` group stands
/// for: every inode free, bits past the last inode in use.
pub fn init_inode_bitmap(bitmap: &mut [u8], geometry: &Geometry) {
    bitmap.fill(0);
    pad(bitmap, geometry.inodes_per_group);
}

/// Sets all bits from `used_bits` to the end of the bitmap block.
pub fn pad(bitmap: &mut [u8], used_bits: u32) {
    set_range(bitmap, used_bits, bit_count(bitmap).saturating_sub(used_bits));
}

/// Sets the bits of those of the `count` blocks from `start` that lie in the group.
pub fn mark_blocks(
    bitmap: &mut [u8],
    geometry: &Geometry,
    group: GroupNo,
    start: BlockNo,
    count: u32,
) {
    let first = geometry.group_first_block(group).0;
    let end = first + u64::from(geometry.blocks_in_group(group));
    let from = start.0.max(first);
    let to = start.0.saturating_add(u64::from(count)).min(end);
    if from >= to {
        return;
    }
    // Both differences are below `blocks_per_group`, which has 32 bits.
    let first_bit = (from - first) as u32 >> geometry.cluster_ratio_bits;
    let last_bit = (to - 1 - first) as u32 >> geometry.cluster_ratio_bits;
    set_range(bitmap, first_bit, last_bit - first_bit + 1);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn outside_counts_as_in_use() {
        let mut bits = [0u8; 3];
        assert!(test(&bits, 24));
        assert!(set(&mut bits, 1000));
        assert!(!is_range_clear(&bits, 20, 5));
        assert_eq!(next_clear(&bits, 24, u32::MAX), None);
        set_range(&mut bits, 20, u32::MAX);
        assert_eq!(bits, [0, 0, 0xf0]);
    }

    proptest! {
        #[test]
        fn agrees_with_one_bit_at_a_time(
            bytes in proptest::collection::vec(prop_oneof![Just(0u8), Just(0xff), any::<u8>()], 1..40),
            start in 0u32..330,
            len in 0u32..330,
        ) {
            let total = bytes.len() as u32 * 8;
            let end = (start + len).min(total);
            let get = |bit: u32| bytes[bit as usize / 8] >> (bit % 8) & 1 != 0;
            prop_assert_eq!(next_clear(&bytes, start, start + len), (start..end).find(|&b| !get(b)));
            prop_assert_eq!(next_set(&bytes, start, start + len), (start..end).find(|&b| get(b)));
            prop_assert_eq!(count_clear(&bytes, len),
                (0..len.min(total)).filter(|&b| !get(b)).count() as u32);

            let mut set_bytes = bytes.clone();
            set_range(&mut set_bytes, start, len);
            let mut cleared = bytes.clone();
            clear_range(&mut cleared, start, len);
            for bit in 0..total {
                let inside = bit >= start && bit < end;
                prop_assert_eq!(test(&set_bytes, bit), inside || get(bit));
                prop_assert_eq!(test(&cleared, bit), !inside && get(bit));
            }

            let mut runs = vec![];
            for bit in (start..end).filter(|&b| !get(b)) {
                match runs.last_mut() {
                    Some(Run { start, len }) if *start + *len == bit => *len += 1,
                    _ => runs.push(Run { start: bit, len: 1 }),
                }
            }
            prop_assert_eq!(clear_runs(&bytes, start, start + len).collect::<Vec<_>>(), runs.clone());
            let longest = runs.iter().map(|run| run.len).max();
            prop_assert_eq!(longest_clear_run(&bytes, start, start + len).map(|r| r.len), longest);
        }
    }
}
