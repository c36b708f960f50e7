//! The two checksums of ext4 and JBD2: CRC-16 (`uninit_bg`) and CRC-32C (`metadata_csum`).
//!
//! Invariant: every function here is *raw*, as in the kernel: the register starts with the
//! seed given and comes out unmodified, so checksums chain by passing one as the next seed.
//! ext4 starts from [`SEED_START`] and never inverts the result.

use crate::types::InodeNo;

/// The register value that ext4 and JBD2 start their first checksum from.
pub const SEED_START: u32 = !0;

/// Raw CRC-32C: continues from `seed` over `bytes`, with no inversion before or after.
pub fn crc32c(seed: u32, bytes: &[u8]) -> u32 {
    // The crate inverts on both sides, as iSCSI does; inverting again takes that away.
    !crc32c::crc32c_append(!seed, bytes)
}

/// Raw CRC-16 (polynomial 0x8005, reflected): continues from `seed` over `bytes`.
pub fn crc16(seed: u16, bytes: &[u8]) -> u16 {
    bytes.iter().fold(seed, |crc, &byte| {
        (crc >> 8) ^ CRC16_TABLE[usize::from((crc ^ u16::from(byte)) & 0xff)]
    })
}

/// Seed of every checksum of a file system whose seed is derived from its UUID.
pub fn uuid_seed(uuid: &[u8; 16]) -> u32 {
    crc32c(SEED_START, uuid)
}

/// Seed of the checksums of what one inode owns (the inode itself, extent blocks, directory
/// blocks): the file-system seed continued over inode number and generation.
pub fn inode_seed(fs_seed: u32, ino: InodeNo, generation: u32) -> u32 {
    let seed = crc32c(fs_seed, &ino.0.to_le_bytes());
    crc32c(seed, &generation.to_le_bytes())
}

/// Raw CRC-32C over `bytes` with `hole_bytes` zero bytes in place of the checksum field that
/// starts at `hole_offset`. `None` when the hole does not lie inside `bytes`.
pub fn crc32c_with_hole(
    seed: u32,
    bytes: &[u8],
    hole_offset: usize,
    hole_bytes: usize,
) -> Option<u32> {
    let hole_end = hole_offset.checked_add(hole_bytes)?;
    let crc = crc32c(seed, bytes.get(..hole_offset)?);
    let tail = bytes.get(hole_end..)?;
    const ZEROES: [u8; 16] = [0; 16];
    let crc = crc32c(crc, ZEROES.get(..hole_bytes)?);
    Some(crc32c(crc, tail))
}

/// The four bytes that between `before` and `after` make the raw CRC-32C, begun at `seed`, come out as
/// `wanted`.
pub fn crc32c_filler(seed: u32, before: &[u8], after: &[u8], wanted: u32) -> [u8; 4] {
    // Back from the end to the register after the four bytes, and on as if they were zero: what the
    // register before them differs in is what they are.
    let behind = after.iter().rev().fold(wanted, |crc, &byte| crc32c_step_back(crc, byte));
    let needed = (0..4).fold(behind, |crc, _| crc32c_step_back(crc, 0));
    (needed ^ crc32c(seed, before)).to_le_bytes()
}

/// The register before `byte` that is `crc` after it.
fn crc32c_step_back(crc: u32, byte: u8) -> u32 {
    let (low, entry) = CRC32C_BY_HIGHEST[(crc >> 24) as usize];
    ((crc ^ entry) << 8) | u32::from(low ^ byte)
}

/// The table of the CRC by the highest bytes of its entries, which are all different: the index of such
/// an entry, and the entry.
const CRC32C_BY_HIGHEST: [(u8, u32); 256] = crc32c_by_highest();

const fn crc32c_by_highest() -> [(u8, u32); 256] {
    let mut table = [(0, 0); 256];
    let mut index = 0;
    while index < 256 {
        let crc = divided(index as u32, 0x82f6_3b78);
        table[(crc >> 24) as usize] = (index as u8, crc);
        index += 1;
    }
    table
}

const CRC16_TABLE: [u16; 256] = crc16_table();

const fn crc16_table() -> [u16; 256] {
    let mut table = [0u16; 256];
    let mut index = 0;
    while index < 256 {
        table[index] = divided(index as u32, 0xa001) as u16;
        index += 1;
    }
    table
}

/// The entry of a byte in the table of a CRC, least significant bit first.
const fn divided(byte: u32, polynomial: u32) -> u32 {
    let (mut crc, mut bit) = (byte, 0);
    while bit < 8 {
        crc = if crc & 1 != 0 { (crc >> 1) ^ polynomial } else { crc >> 1 };
        bit += 1;
    }
    crc
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn four_bytes_make_any_checksum() {
        let (before, after) = (b"a superblock", b"and what is behind the four bytes");
        for wanted in [0, 1, 0xdead_beef, u32::MAX] {
            let filler = crc32c_filler(SEED_START, before, after, wanted);
            let whole = [&before[..], &filler, &after[..]].concat();
            assert_eq!(crc32c(SEED_START, &whole), wanted);
        }
    }

    #[test]
    fn crc16_matches_the_arc_check_value() {
        assert_eq!(crc16(0, b"123456789"), 0xbb3d);
    }

    #[test]
    fn crc32c_is_raw_and_chains() {
        // The published check value is the inverted one.
        assert_eq!(!crc32c(!0, b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(crc32c(7, b"1234"), b"56789"), crc32c(7, b"123456789"));
        assert_eq!(crc32c(0, &[0; 4]), 0);
    }

    #[test]
    fn hole_counts_as_zeroes() {
        let mut bytes = *b"abcdefgh";
        let crc = crc32c_with_hole(1, &bytes, 2, 4);
        bytes[2..6].fill(0);
        assert_eq!(crc, Some(crc32c(1, &bytes)));
        assert_eq!(crc32c_with_hole(1, &bytes, 6, 4), None);
    }
}
