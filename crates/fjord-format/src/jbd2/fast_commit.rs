//! Just enough of the fast-commit area to know whether it holds something to replay.
//!
//! The area is a stream of little-endian tags; a fast commit starts with a HEAD tag (the
//! first one only) and ends with a TAIL tag that bears the transaction ID and a CRC-32C.
//! Only a commit with a valid tail counts: without one the area is what a crash in the
//! middle, or an earlier transaction, left behind.
//!
//! Invariant: tags are stepped over by their length, never past the block given.

use crate::checksum;
use crate::types::Tid;

/// Bytes of the tag and length that start each record (`struct ext4_fc_tl`).
const TL_BYTES: usize = 4;
/// Bytes of a HEAD record with its tag.
pub const HEAD_TAG_BYTES: usize = TL_BYTES + 8;

const TAG_FIRST: u16 = 1;
const TAG_PAD: u16 = 7;
const TAG_TAIL: u16 = 8;
const TAG_HEAD: u16 = 9;

/// Scans the blocks of a fast-commit area, in order.
#[derive(Clone, Debug)]
pub struct FastCommitScan {
    expected: Tid,
    crc: u32,
    started: bool,
    /// Fast commits with a valid tail so far.
    commits: u32,
}

impl FastCommitScan {
    /// A scan for fast commits that follow the last full commit, that is, those that bear
    /// the ID `expected` of the transaction that would have come next.
    pub fn new(expected: Tid) -> FastCommitScan {
        FastCommitScan { expected, crc: 0, started: false, commits: 0 }
    }

    /// How many complete fast commits there are to replay.
    pub fn commit_count(&self) -> u32 {
        self.commits
    }

    /// Looks at the next block of the area; `false` when no later block matters.
    pub fn push_block(&mut self, block: &[u8]) -> bool {
        if !self.started && le16(block, 0) != Some(TAG_HEAD) {
            return false;
        }
        self.started = true;
        let mut rest = block;
        while rest.len() >= TL_BYTES {
            let (Some(tag), Some(len)) = (le16(rest, 0), le16(rest, 2)) else { return false };
            let Some(end) = TL_BYTES.checked_add(usize::from(len)) else { return false };
            let Some(record) = rest.get(..end) else { return false };
            if !self.push_record(tag, record) {
                return false;
            }
            rest = rest.get(end..).unwrap_or_default();
        }
        true
    }

    fn push_record(&mut self, tag: u16, record: &[u8]) -> bool {
        let value = record.get(TL_BYTES..).unwrap_or_default();
        match tag {
            TAG_HEAD => {
                let (Some(features), Some(tid)) = (le32(value, 0), le32(value, 4)) else {
                    return false;
                };
                if features != 0 || tid != self.expected.0 {
                    return false;
                }
                self.crc = checksum::crc32c(self.crc, record);
                true
            }
            TAG_TAIL => {
                let (Some(tid), Some(stored)) = (le32(value, 0), le32(value, 4)) else {
                    return false;
                };
                let covered = record.get(..TL_BYTES + 4).unwrap_or_default();
                let computed = checksum::crc32c(self.crc, covered);
                self.crc = 0;
                if tid != self.expected.0 || stored != computed {
                    return false;
                }
                self.commits = self.commits.saturating_add(1);
                true
            }
            TAG_FIRST..=TAG_PAD => {
                self.crc = checksum::crc32c(self.crc, record);
                true
            }
            _ => false,
        }
    }
}

fn le16(bytes: &[u8], offset: usize) -> Option<u16> {
    let end = offset.checked_add(2)?;
    Some(u16::from_le_bytes(bytes.get(offset..end)?.try_into().ok()?))
}

fn le32(bytes: &[u8], offset: usize) -> Option<u32> {
    let end = offset.checked_add(4)?;
    Some(u32::from_le_bytes(bytes.get(offset..end)?.try_into().ok()?))
}
