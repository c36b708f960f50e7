//! The hashes of entries, values and blocks, by which equal blocks are found and shared.
//!
//! Invariant: an entry hash covers the name and the value padded with zeroes to words; a block
//! hash of zero means "never share this block".

use crate::checksum;

/// `e_hash` of an entry whose value is stored beside it.
///
/// For a value in an inode of its own, `value` is the four bytes of [`value_hash`].
pub fn entry_hash(name: &[u8], value: &[u8]) -> u32 {
    hash_with(name, value, u32::from)
}

/// The variant that old kernels wrote on machines whose `char` is signed.
pub(super) fn entry_hash_signed(name: &[u8], value: &[u8]) -> u32 {
    hash_with(name, value, |byte| i32::from(byte.cast_signed()).cast_unsigned())
}

/// Whether an entry with this `e_hash` has a value in an inode of its own with this [`value_hash`].
pub fn names_value(name: &[u8], e_hash: u32, value_hash: u32) -> bool {
    let value = value_hash.to_le_bytes();
    entry_hash(name, &value) == e_hash || entry_hash_signed(name, &value) == e_hash
}

fn hash_with(name: &[u8], value: &[u8], widen: fn(u8) -> u32) -> u32 {
    let hash = name.iter().fold(0u32, |hash, &byte| hash.rotate_left(5) ^ widen(byte));
    value.chunks(4).fold(hash, |hash, chunk| {
        let mut word = [0u8; 4];
        for (to, from) in word.iter_mut().zip(chunk) {
            *to = *from;
        }
        hash.rotate_left(16) ^ u32::from_le_bytes(word)
    })
}

/// Hash of a value that lives in an inode of its own; stored in that inode's access time and
/// mixed into the entry's hash. `fs_seed` is the checksum seed of the file system.
pub fn value_hash(fs_seed: u32, value: &[u8]) -> u32 {
    checksum::crc32c(fs_seed, value)
}

/// `h_hash` of a block with entries of these hashes.
pub(super) fn block_hash(entry_hashes: impl IntoIterator<Item = u32>) -> u32 {
    let mut hash = 0u32;
    for entry in entry_hashes {
        if entry == 0 {
            return 0;
        }
        hash = hash.rotate_left(16) ^ entry;
    }
    hash
}
