//! The journal superblock, versions 1 and 2.
//!
//! Invariants: a decoded superblock has a valid magic number, version and (v2/v3) checksum;
//! [`Superblock::check`] adds that its geometry holds together and that every feature is
//! known. Bytes without a meaning here are kept as they were read.

use super::{
    BlockHeader, BlockType, ChecksumVersion, Compat, Incompat, LogFormat, be32, be64, put, put_be32,
};
use crate::checksum;
use crate::error::{FormatError, Result};
use crate::types::Tid;

/// Bytes of the superblock; the rest of its block is unused.
pub const SUPERBLOCK_BYTES: usize = 1024;
/// The shortest journal that Linux takes, in blocks (`JBD2_MIN_JOURNAL_BLOCKS`).
pub const MIN_JOURNAL_BLOCKS: u32 = 1024;
/// Size of the fast-commit area when `s_num_fc_blks` is zero, in blocks.
pub const DEFAULT_FAST_COMMIT_BLOCKS: u32 = 256;

const BLOCKSIZE: usize = 0x0c;
const MAXLEN: usize = 0x10;
const FIRST: usize = 0x14;
const SEQUENCE: usize = 0x18;
const START: usize = 0x1c;
const ERRNO: usize = 0x20;
const FEATURE_COMPAT: usize = 0x24;
const FEATURE_INCOMPAT: usize = 0x28;
const FEATURE_RO_COMPAT: usize = 0x2c;
const UUID: usize = 0x30;
const NR_USERS: usize = 0x40;
const CHECKSUM_TYPE: usize = 0x50;
const NUM_FC_BLKS: usize = 0x54;
const HEAD: usize = 0x58;
// fjord's own, at the end of `s_padding`, while FJORD_IJOURNAL is set; else zero.
const IJOURNAL_NONCE: usize = 0xe0;
const IJOURNAL_FLAGS: usize = 0xe8;
const IJOURNAL_FLOOR: usize = 0xec;
const IJOURNAL_SEQUENCE: usize = 0xf0;
const IJOURNAL_START: usize = 0xf4;
/// `IJOURNAL_FLOOR` counts.
const IJOURNAL_RECOVERING: u32 = 1;
/// `IJOURNAL_SEQUENCE` and `IJOURNAL_START` count.
const IJOURNAL_PLACE: u32 = 2;
const CHECKSUM: usize = 0xfc;

/// `JBD2_CRC32C_CHKSUM`, the type that v2 and v3 require.
const TYPE_CRC32C: u8 = 4;
const STRUCTURE: &str = "journal superblock";

/// The mark of a journal whose i-transactions may be live.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IjournalMark {
    /// Random number that ties i-transactions to this use of the areas.
    pub nonce: u64,
    /// I-transactions may come behind barriers (`FJORD_BARRIERS`).
    pub has_barriers: bool,
    /// Set while a recovery is under way: the last transaction that had committed before it.
    /// A transaction in the log is then the recovery's own, and covers all i-transactions.
    pub recovering_after: Option<Tid>,
}

/// Version of the superblock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Version {
    /// No features, no UUID.
    V1,
    /// What every tool has written for twenty years.
    V2,
}

/// The journal superblock (`journal_superblock_t`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Superblock {
    /// Version 1 or 2.
    pub version: Version,
    /// Size of a log block, in bytes.
    pub s_blocksize: u32,
    /// Length of the journal, in blocks, with this superblock and the fast-commit area.
    pub s_maxlen: u32,
    /// First block of the log, counted from the start of the journal.
    pub s_first: u32,
    /// ID of the first transaction in the log; of the next one when the log is empty.
    pub s_sequence: Tid,
    /// Where the log starts, in blocks from the start of the journal; 0 when it is empty.
    pub s_start: u32,
    /// Error that made a writer abort the journal, as a negative errno; 0 for none.
    pub s_errno: i32,
    /// Compatible features; none in version 1.
    pub s_feature_compat: Compat,
    /// Incompatible features; none in version 1.
    pub s_feature_incompat: Incompat,
    /// Read-only compatible features; none are defined.
    pub s_feature_ro_compat: u32,
    /// UUID of the journal.
    pub s_uuid: [u8; 16],
    /// Number of file systems that share the log.
    pub s_nr_users: u32,
    /// Size of the fast-commit area, in blocks; 0 means the default.
    pub s_num_fc_blks: u32,
    /// Where the log ended when the journal was closed (only a hint).
    pub s_head: u32,
    /// The bytes as read; what has no field above is written back from here.
    image: Box<[u8; SUPERBLOCK_BYTES]>,
}

impl Superblock {
    /// A superblock of version 2 for an empty journal of `blocks` blocks, first one included.
    pub fn new(block_size_bytes: u32, blocks: u32, uuid: [u8; 16]) -> Superblock {
        Superblock {
            version: Version::V2,
            s_blocksize: block_size_bytes,
            s_maxlen: blocks,
            s_first: 1,
            s_sequence: Tid(1),
            s_start: 0,
            s_errno: 0,
            s_feature_compat: Compat::empty(),
            s_feature_incompat: Incompat::empty(),
            s_feature_ro_compat: 0,
            s_uuid: uuid,
            s_nr_users: 1,
            s_num_fc_blks: 0,
            s_head: 0,
            image: Box::new([0; SUPERBLOCK_BYTES]),
        }
    }

    /// Reads a superblock from the start of the journal's first block.
    pub fn decode(bytes: &[u8]) -> Result<Superblock> {
        FormatError::check_len(STRUCTURE, bytes, SUPERBLOCK_BYTES)?;
        let version = match BlockHeader::decode(bytes).map(|header| header.block_type) {
            Some(BlockType::SuperblockV1) => Version::V1,
            Some(BlockType::SuperblockV2) => Version::V2,
            Some(other) => {
                let detail = format!("its block type is {other:?}");
                return Err(FormatError::corrupt(STRUCTURE, detail));
            }
            None => {
                return Err(FormatError::BadMagic { structure: STRUCTURE, found: be32(bytes, 0) });
            }
        };
        let mut image = Box::new([0; SUPERBLOCK_BYTES]);
        image.copy_from_slice(&bytes[..SUPERBLOCK_BYTES]);
        let v2 = |offset| if version == Version::V2 { be32(bytes, offset) } else { 0 };
        let mut s_uuid = [0; 16];
        if version == Version::V2 {
            s_uuid.copy_from_slice(&bytes[UUID..UUID + 16]);
        }
        let superblock = Superblock {
            version,
            s_blocksize: be32(bytes, BLOCKSIZE),
            s_maxlen: be32(bytes, MAXLEN),
            s_first: be32(bytes, FIRST),
            s_sequence: Tid(be32(bytes, SEQUENCE)),
            s_start: be32(bytes, START),
            s_errno: be32(bytes, ERRNO) as i32,
            s_feature_compat: Compat::from_bits_retain(v2(FEATURE_COMPAT)),
            s_feature_incompat: Incompat::from_bits_retain(v2(FEATURE_INCOMPAT)),
            s_feature_ro_compat: v2(FEATURE_RO_COMPAT),
            s_uuid,
            s_nr_users: v2(NR_USERS),
            s_num_fc_blks: v2(NUM_FC_BLKS),
            s_head: v2(HEAD),
            image,
        };
        superblock.check_features()?;
        superblock.check_checksum()?;
        Ok(superblock.with_own_place())
    }

    /// A marked journal with the place of its log as its writer left it: tune2fs and debugfs empty
    /// the log of a journal that they refuse to recover.
    fn with_own_place(mut self) -> Superblock {
        let is_marked = self.s_feature_incompat.contains(Incompat::FJORD_IJOURNAL);
        if is_marked && be32(&*self.image, IJOURNAL_FLAGS) & IJOURNAL_PLACE != 0 {
            self.s_sequence = Tid(be32(&*self.image, IJOURNAL_SEQUENCE));
            self.s_start = be32(&*self.image, IJOURNAL_START);
        }
        self
    }

    /// The bytes to write to the start of the journal's first block, checksum included.
    pub fn encode(&self) -> [u8; SUPERBLOCK_BYTES] {
        let mut bytes = *self.image;
        let block_type = match self.version {
            Version::V1 => BlockType::SuperblockV1,
            Version::V2 => BlockType::SuperblockV2,
        };
        put_be32(&mut bytes, 0, super::MAGIC);
        put_be32(&mut bytes, 4, block_type.number());
        put_be32(&mut bytes, BLOCKSIZE, self.s_blocksize);
        put_be32(&mut bytes, MAXLEN, self.s_maxlen);
        put_be32(&mut bytes, FIRST, self.s_first);
        put_be32(&mut bytes, SEQUENCE, self.s_sequence.0);
        put_be32(&mut bytes, START, self.s_start);
        put_be32(&mut bytes, ERRNO, self.s_errno as u32);
        if self.version == Version::V1 {
            return bytes;
        }
        put_be32(&mut bytes, FEATURE_COMPAT, self.s_feature_compat.bits());
        put_be32(&mut bytes, FEATURE_INCOMPAT, self.s_feature_incompat.bits());
        put_be32(&mut bytes, FEATURE_RO_COMPAT, self.s_feature_ro_compat);
        put(&mut bytes, UUID, &self.s_uuid);
        put_be32(&mut bytes, NR_USERS, self.s_nr_users);
        put_be32(&mut bytes, NUM_FC_BLKS, self.s_num_fc_blks);
        put_be32(&mut bytes, HEAD, self.s_head);
        if self.s_feature_incompat.contains(Incompat::FJORD_IJOURNAL) {
            let flags = be32(&bytes, IJOURNAL_FLAGS) | IJOURNAL_PLACE;
            put_be32(&mut bytes, IJOURNAL_FLAGS, flags);
            put_be32(&mut bytes, IJOURNAL_SEQUENCE, self.s_sequence.0);
            put_be32(&mut bytes, IJOURNAL_START, self.s_start);
        }
        let with_checksum = self.has_block_checksums();
        bytes[CHECKSUM_TYPE] = if with_checksum { TYPE_CRC32C } else { 0 };
        let checksum = if with_checksum { superblock_checksum(&bytes) } else { 0 };
        put_be32(&mut bytes, CHECKSUM, checksum);
        bytes
    }

    /// Turns version 1 into version 2 without features. The fields that version 1 leaves
    /// undefined become zero.
    pub fn upgrade_to_v2(&mut self) {
        if self.version == Version::V1 {
            self.version = Version::V2;
            self.image[FEATURE_COMPAT..].fill(0);
            self.s_nr_users = 1;
        }
    }

    /// Switches the checksum version; the log must be empty.
    pub fn set_checksum_version(&mut self, version: ChecksumVersion) {
        self.s_feature_compat.set(Compat::CHECKSUM, version == ChecksumVersion::V1);
        self.s_feature_incompat.set(Incompat::CSUM_V2, version == ChecksumVersion::V2);
        self.s_feature_incompat.set(Incompat::CSUM_V3, version == ChecksumVersion::V3);
    }

    /// Which checksums the log carries.
    pub fn checksum_version(&self) -> ChecksumVersion {
        if self.s_feature_incompat.contains(Incompat::CSUM_V3) {
            ChecksumVersion::V3
        } else if self.s_feature_incompat.contains(Incompat::CSUM_V2) {
            ChecksumVersion::V2
        } else if self.s_feature_compat.contains(Compat::CHECKSUM) {
            ChecksumVersion::V1
        } else {
            ChecksumVersion::None
        }
    }

    /// What the log's blocks look like.
    pub fn log_format(&self) -> LogFormat {
        LogFormat {
            block_size: self.s_blocksize as usize,
            bit64: self.s_feature_incompat.contains(Incompat::BIT64),
            checksum: self.checksum_version(),
            seed: checksum::uuid_seed(&self.s_uuid),
            uuid: self.s_uuid,
        }
    }

    /// Blocks of the fast-commit area; 0 without the feature (`jbd2_journal_get_num_fc_blks`).
    pub fn fast_commit_blocks(&self) -> u32 {
        let counts = self.s_feature_incompat.contains(Incompat::FAST_COMMIT);
        if counts { self.reserved_blocks() } else { 0 }
    }

    /// Blocks that the fast-commit area takes once the feature is on.
    fn reserved_blocks(&self) -> u32 {
        match self.s_num_fc_blks {
            0 => DEFAULT_FAST_COMMIT_BLOCKS,
            blocks => blocks,
        }
    }

    /// Whether the journal is long enough for a log and, with the feature, an area.
    pub fn has_fast_commit_room(&self) -> bool {
        let rest = self.s_maxlen.checked_sub(MIN_JOURNAL_BLOCKS);
        rest.is_some_and(|rest| rest >= self.reserved_blocks())
    }

    /// Journal block just past the log, where it wraps to `s_first`.
    pub fn log_end(&self) -> u32 {
        self.s_maxlen.saturating_sub(self.fast_commit_blocks())
    }

    /// Journal blocks of the fast-commit area. As in Linux the block at [`Self::log_end`]
    /// belongs to neither.
    pub fn fast_commit_area(&self) -> std::ops::Range<u32> {
        if self.fast_commit_blocks() == 0 {
            return self.s_maxlen..self.s_maxlen;
        }
        self.reserved_area()
    }

    /// Journal blocks of the fast-commit area once the feature is on: a writer leaves them alone
    /// until then.
    pub fn reserved_area(&self) -> std::ops::Range<u32> {
        let log_end = self.s_maxlen.saturating_sub(self.reserved_blocks());
        log_end.saturating_add(1).min(self.s_maxlen)..self.s_maxlen
    }

    /// The mark of live i-transactions, if the journal has it.
    pub fn ijournal(&self) -> Option<IjournalMark> {
        if !self.s_feature_incompat.contains(Incompat::FJORD_IJOURNAL) {
            return None;
        }
        let recovering = be32(&*self.image, IJOURNAL_FLAGS) & IJOURNAL_RECOVERING != 0;
        Some(IjournalMark {
            nonce: be64(&*self.image, IJOURNAL_NONCE),
            has_barriers: self.s_feature_incompat.contains(Incompat::FJORD_BARRIERS),
            recovering_after: recovering.then(|| Tid(be32(&*self.image, IJOURNAL_FLOOR))),
        })
    }

    /// Sets or clears the mark; clearing restores the old bytes. It is in the first sector, so that
    /// a power cut leaves the old mark or the new one.
    pub fn set_ijournal(&mut self, mark: Option<IjournalMark>) {
        self.s_feature_incompat.set(Incompat::FJORD_IJOURNAL, mark.is_some());
        let has_barriers = mark.is_some_and(|mark| mark.has_barriers);
        self.s_feature_incompat.set(Incompat::FJORD_BARRIERS, has_barriers);
        let floor = mark.and_then(|mark| mark.recovering_after);
        let flags = if floor.is_some() { IJOURNAL_RECOVERING } else { 0 };
        let nonce = mark.map_or(0, |mark| mark.nonce);
        put(&mut *self.image, IJOURNAL_NONCE, &nonce.to_be_bytes());
        put_be32(&mut *self.image, IJOURNAL_FLAGS, flags);
        put_be32(&mut *self.image, IJOURNAL_FLOOR, floor.map_or(0, |tid| tid.0));
        // With the mark `encode` fills these in.
        put_be32(&mut *self.image, IJOURNAL_SEQUENCE, 0);
        put_be32(&mut *self.image, IJOURNAL_START, 0);
    }

    /// Clears the mark in a superblock as it lies on disk, which may have a wrong checksum; that stays wrong.
    /// Whether there was one.
    pub fn clear_ijournal_in(bytes: &mut [u8]) -> bool {
        let version = BlockHeader::decode(bytes).map(|header| header.block_type);
        if bytes.len() < SUPERBLOCK_BYTES || version != Some(BlockType::SuperblockV2) {
            return false;
        }
        let mut features = Incompat::from_bits_retain(be32(bytes, FEATURE_INCOMPAT));
        if !features.contains(Incompat::FJORD_IJOURNAL) {
            return false;
        }
        features.remove(Incompat::FJORD_IJOURNAL | Incompat::FJORD_BARRIERS);
        put_be32(bytes, FEATURE_INCOMPAT, features.bits());
        true
    }

    /// Checks the geometry against the file system: its block size in bytes, and the blocks
    /// that the journal inode really has.
    pub fn check(&self, block_size_bytes: u32, mapped_blocks: u64) -> Result<()> {
        let fail = |detail: String| Err(FormatError::corrupt(STRUCTURE, detail));
        if self.s_blocksize != block_size_bytes {
            return fail(format!(
                "its block size is {}, that of the file system {block_size_bytes}",
                self.s_blocksize
            ));
        }
        if u64::from(self.s_maxlen) > mapped_blocks {
            return fail(format!(
                "s_maxlen is {}, but the journal has {mapped_blocks} blocks",
                self.s_maxlen
            ));
        }
        let fast_commit = self.fast_commit_blocks();
        if self.s_maxlen < MIN_JOURNAL_BLOCKS || self.s_maxlen - MIN_JOURNAL_BLOCKS < fast_commit {
            return fail(format!(
                "s_maxlen is {}, too short with {fast_commit} fast-commit blocks",
                self.s_maxlen
            ));
        }
        if self.s_first == 0 || self.s_first >= self.log_end() {
            return fail(format!("s_first is {}", self.s_first));
        }
        if self.s_start != 0 && !(self.s_first..self.log_end()).contains(&self.s_start) {
            return fail(format!("s_start {} lies outside the log", self.s_start));
        }
        Ok(())
    }

    fn has_block_checksums(&self) -> bool {
        self.s_feature_incompat.intersects(Incompat::CSUM_V2 | Incompat::CSUM_V3)
    }

    /// Errs by name for features that are unknown or exclude each other. The count of users means
    /// something for external journals only, and some programs leave anything there.
    fn check_features(&self) -> Result<()> {
        let refuse = |feature: String| Err(FormatError::Incompatible { feature });
        let unknown = self.s_feature_incompat.difference(Incompat::KNOWN);
        if !unknown.is_empty() {
            return refuse(format!("journal feature bits {:#x} (incompat)", unknown.bits()));
        }
        if self.s_feature_ro_compat != 0 {
            let bits = self.s_feature_ro_compat;
            return refuse(format!("journal feature bits {bits:#x} (ro_compat)"));
        }
        let v1 = self.s_feature_compat.contains(Compat::CHECKSUM);
        let v2 = self.s_feature_incompat.contains(Incompat::CSUM_V2);
        let v3 = self.s_feature_incompat.contains(Incompat::CSUM_V3);
        if u8::from(v1) + u8::from(v2) + u8::from(v3) > 1 {
            return Err(FormatError::corrupt(STRUCTURE, "several checksum versions are on"));
        }
        Ok(())
    }

    fn check_checksum(&self) -> Result<()> {
        if !self.has_block_checksums() {
            return Ok(());
        }
        let kind = self.image[CHECKSUM_TYPE];
        if kind != TYPE_CRC32C {
            return Err(FormatError::Incompatible { feature: format!("journal checksum {kind}") });
        }
        let stored = be32(&*self.image, CHECKSUM);
        FormatError::check_checksum(STRUCTURE, stored, superblock_checksum(&*self.image))
    }
}

fn superblock_checksum(bytes: &[u8]) -> u32 {
    checksum::crc32c_with_hole(checksum::SEED_START, bytes, CHECKSUM, 4).unwrap_or_default()
}
