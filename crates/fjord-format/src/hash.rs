//! Hashes of names in indexed directories: legacy, half-MD4 and TEA, signed and unsigned.
//!
//! Invariants: a hash is a pure function of name, version and seed; bit 0 of the major hash is
//! always clear (the index uses it to mark a continued collision), and the value that marks the
//! end of a directory is never returned. The superblock, not the directory, says whether bytes
//! of a name count as signed (`s_flags`), so the byte in a directory's root is not a version yet.
//!
//! Format: Linux `Documentation/filesystems/ext4/directory.rst`, "Hash Tree Directories".

use crate::error::{FormatError, Result};

/// `s_def_hash_version` and `dx_root.hash_version` of the legacy hash.
pub const DX_HASH_LEGACY: u8 = 0;
/// `s_def_hash_version` and `dx_root.hash_version` of half-MD4.
pub const DX_HASH_HALF_MD4: u8 = 1;
/// `s_def_hash_version` and `dx_root.hash_version` of TEA.
pub const DX_HASH_TEA: u8 = 2;
/// `dx_root.hash_version` of SipHash, which only encrypted casefolded directories have.
pub const DX_HASH_SIPHASH: u8 = 6;

/// The largest 31-bit hash, kept as the mark of the directory's end.
const HTREE_EOF_32BIT: u32 = 0x7fff_ffff;

/// Which mixing function a directory uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HashKind {
    /// The hash of the first htree code.
    Legacy,
    /// A cut-down MD4; what mke2fs chooses.
    HalfMd4,
    /// The tiny encryption algorithm.
    Tea,
}

/// How the names of one directory are hashed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HashVersion {
    /// The mixing function.
    pub kind: HashKind,
    /// Whether bytes from 0x80 on count as positive (`EXT2_FLAGS_UNSIGNED_HASH`).
    pub unsigned: bool,
}

/// The seed of a file system's hashes, `s_hash_seed`; all zero means the built-in seed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HashSeed(pub [u32; 4]);

/// Hash of one name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct DirHash {
    /// What the index is sorted by; bit 0 is clear.
    pub hash: u32,
    /// Tells names with equal `hash` apart in readdir cookies; not stored in the index.
    pub minor_hash: u32,
}

impl HashVersion {
    /// The version that a directory's root (`hash_version`) or the superblock
    /// (`s_def_hash_version`) names; `unsigned` comes from `s_flags`.
    ///
    /// # Errors
    /// [`FormatError::Incompatible`] for SipHash, [`FormatError::Corrupt`] for unknown values.
    pub fn from_disk(hash_version: u8, unsigned: bool) -> Result<HashVersion> {
        let kind = match hash_version {
            DX_HASH_LEGACY => HashKind::Legacy,
            DX_HASH_HALF_MD4 => HashKind::HalfMd4,
            DX_HASH_TEA => HashKind::Tea,
            DX_HASH_SIPHASH => {
                return Err(FormatError::Incompatible {
                    feature: "a directory hashed with SipHash (encrypted and casefolded)".into(),
                });
            }
            other => {
                return Err(FormatError::corrupt(
                    "directory index root",
                    format!("hash version {other} is unknown"),
                ));
            }
        };
        Ok(HashVersion { kind, unsigned })
    }

    /// The byte for a directory's root.
    pub fn to_disk(self) -> u8 {
        match self.kind {
            HashKind::Legacy => DX_HASH_LEGACY,
            HashKind::HalfMd4 => DX_HASH_HALF_MD4,
            HashKind::Tea => DX_HASH_TEA,
        }
    }

    /// One byte of a name as the number that is mixed in.
    fn widen(self, byte: u8) -> u32 {
        if self.unsigned { u32::from(byte) } else { i32::from(byte.cast_signed()).cast_unsigned() }
    }
}

impl HashSeed {
    /// The seed from the 16 bytes of `s_hash_seed`.
    pub fn from_bytes(bytes: &[u8; 16]) -> HashSeed {
        let mut seed = [0u32; 4];
        for (word, chunk) in seed.iter_mut().zip(bytes.as_chunks::<4>().0) {
            *word = u32::from_le_bytes(*chunk);
        }
        HashSeed(seed)
    }

    fn start(self) -> [u32; 4] {
        if self.0 == [0; 4] { [0x6745_2301, 0xefcd_ab89, 0x98ba_dcfe, 0x1032_5476] } else { self.0 }
    }
}

/// Hash of `name` in a directory with this version and seed.
pub fn dirhash(name: &[u8], version: HashVersion, seed: HashSeed) -> DirHash {
    let (hash, minor_hash) = match version.kind {
        HashKind::Legacy => (legacy(name, version), 0),
        HashKind::HalfMd4 => {
            let mut state = seed.start();
            let mut rest = name;
            while !rest.is_empty() {
                half_md4_transform(&mut state, &hash_words::<8>(rest, version));
                rest = rest.get(32..).unwrap_or_default();
            }
            (state[1], state[2])
        }
        HashKind::Tea => {
            let mut state = seed.start();
            let mut rest = name;
            while !rest.is_empty() {
                tea_transform(&mut state, &hash_words::<4>(rest, version));
                rest = rest.get(16..).unwrap_or_default();
            }
            (state[0], state[1])
        }
    };
    let hash = match hash & !1 {
        end if end == HTREE_EOF_32BIT << 1 => (HTREE_EOF_32BIT - 1) << 1,
        hash => hash,
    };
    DirHash { hash, minor_hash }
}

fn legacy(name: &[u8], version: HashVersion) -> u32 {
    let (mut hash0, mut hash1) = (0x12a3_fe2du32, 0x37ab_e8f9u32);
    for &byte in name {
        let mixed = hash0 ^ version.widen(byte).wrapping_mul(7_152_373);
        let mut hash = hash1.wrapping_add(mixed);
        if hash & 0x8000_0000 != 0 {
            hash = hash.wrapping_sub(0x7fff_ffff);
        }
        hash1 = hash0;
        hash0 = hash;
    }
    hash0 << 1
}

/// The next `N` words of a name, padded with its remaining length.
fn hash_words<const N: usize>(rest: &[u8], version: HashVersion) -> [u32; N] {
    // Only names that no directory can hold exceed 32 bits here; their hash is arbitrary anyway.
    let len = u32::try_from(rest.len()).unwrap_or(u32::MAX);
    let pad = len | (len << 8);
    let pad = pad | (pad << 16);
    let mut words = [pad; N];
    for (word, chunk) in words.iter_mut().zip(rest.chunks(4)) {
        *word = chunk.iter().fold(pad, |value, &byte| version.widen(byte).wrapping_add(value << 8));
    }
    words
}

fn tea_transform(state: &mut [u32; 4], words: &[u32; 4]) {
    const DELTA: u32 = 0x9e37_79b9;
    let [a, b, c, d] = *words;
    let [mut b0, mut b1, ..] = *state;
    let mut sum = 0u32;
    for _ in 0..16 {
        sum = sum.wrapping_add(DELTA);
        b0 = b0.wrapping_add(
            (b1 << 4).wrapping_add(a) ^ b1.wrapping_add(sum) ^ (b1 >> 5).wrapping_add(b),
        );
        b1 = b1.wrapping_add(
            (b0 << 4).wrapping_add(c) ^ b0.wrapping_add(sum) ^ (b0 >> 5).wrapping_add(d),
        );
    }
    state[0] = state[0].wrapping_add(b0);
    state[1] = state[1].wrapping_add(b1);
}

/// One round: which word comes in at each of the eight steps, and how far each step rotates.
struct Md4Round {
    mix: fn(u32, u32, u32) -> u32,
    constant: u32,
    words: [usize; 8],
    shifts: [u32; 4],
}

const HALF_MD4_ROUNDS: [Md4Round; 3] = [
    Md4Round {
        mix: |x, y, z| z ^ (x & (y ^ z)),
        constant: 0,
        words: [0, 1, 2, 3, 4, 5, 6, 7],
        shifts: [3, 7, 11, 19],
    },
    Md4Round {
        mix: |x, y, z| (x & y).wrapping_add((x ^ y) & z),
        constant: 0x5a82_7999,
        words: [1, 3, 5, 7, 0, 2, 4, 6],
        shifts: [3, 5, 9, 13],
    },
    Md4Round {
        mix: |x, y, z| x ^ y ^ z,
        constant: 0x6ed9_eba1,
        words: [3, 7, 2, 6, 1, 5, 0, 4],
        shifts: [3, 9, 11, 15],
    },
];

fn half_md4_transform(state: &mut [u32; 4], words: &[u32; 8]) {
    let [mut a, mut b, mut c, mut d] = *state;
    for round in &HALF_MD4_ROUNDS {
        for (step, &word) in round.words.iter().enumerate() {
            let mixed = a
                .wrapping_add((round.mix)(b, c, d))
                .wrapping_add(words[word])
                .wrapping_add(round.constant)
                .rotate_left(round.shifts[step % 4]);
            // The registers trade places instead of being named anew at each step.
            (a, b, c, d) = (d, mixed, b, c);
        }
    }
    for (word, add) in state.iter_mut().zip([a, b, c, d]) {
        *word = word.wrapping_add(add);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn siphash_is_incompatible_and_garbage_is_corrupt() {
        assert!(matches!(
            HashVersion::from_disk(DX_HASH_SIPHASH, false),
            Err(FormatError::Incompatible { .. })
        ));
        for byte in [3, 4, 5, 7, 255] {
            assert!(matches!(HashVersion::from_disk(byte, true), Err(FormatError::Corrupt { .. })));
        }
    }

    #[test]
    fn end_mark_is_never_a_hash() {
        for kind in [HashKind::Legacy, HashKind::HalfMd4, HashKind::Tea] {
            let version = HashVersion { kind, unsigned: false };
            for number in 0..20_000u32 {
                let hash = dirhash(&number.to_le_bytes(), version, HashSeed::default()).hash;
                assert!(hash & 1 == 0 && hash != HTREE_EOF_32BIT << 1);
            }
        }
    }
}
