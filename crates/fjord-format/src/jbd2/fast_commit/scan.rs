//! Finds the valid fast commits of an area.
//!
//! Invariants: only fast commits whose TAIL is valid (transaction ID and checksum) give records,
//! and none after the first that is not; memory is bounded by the bytes pushed.

use super::{ENDS_BYTES, Record, TL_BYTES, Tag, le16, le32};
use crate::checksum;
use crate::error::{FormatError, Result};
use crate::types::Tid;

/// Bytes of a HEAD record with its tag.
pub const HEAD_TAG_BYTES: usize = TL_BYTES + ENDS_BYTES;

/// Whether a block of the area starts with HEAD, of whatever transaction.
pub fn starts_with_head(block: &[u8]) -> bool {
    le16(block, 0) == Some(Tag::Head as u16)
}

/// Scans the blocks of a fast-commit area, in order.
#[derive(Clone, Debug)]
pub struct FastCommitScan {
    /// The transaction whose fast commits count; any if `None`.
    expected: Option<Tid>,
    crc: u32,
    started: bool,
    /// Fast commits with a valid tail so far.
    commits: u32,
    /// Their records.
    records: Vec<Record>,
    /// Records since the last tail.
    pending: Vec<Record>,
}

impl FastCommitScan {
    /// A scan for fast commits that follow the last full commit, that is, those that bear
    /// the ID `expected` of the transaction that would have come next. With `None` for whatever lies
    /// in the area, which is not to be replayed.
    pub fn new(expected: impl Into<Option<Tid>>) -> FastCommitScan {
        let expected = expected.into();
        let (records, pending) = (Vec::new(), Vec::new());
        FastCommitScan { expected, crc: 0, started: false, commits: 0, records, pending }
    }

    /// How many complete fast commits there are to replay.
    pub fn commit_count(&self) -> u32 {
        self.commits
    }

    /// The records of the complete fast commits, in order.
    pub fn into_records(self) -> Vec<Record> {
        self.records
    }

    /// Looks at the next block of the area; `false` when no later block matters.
    ///
    /// # Errors
    /// `Incompatible` for fast commits of the expected transaction with features that are not
    /// known: they cannot be read, and must not be dropped.
    pub fn push_block(&mut self, block: &[u8]) -> Result<bool> {
        if !self.started && !starts_with_head(block) {
            return Ok(false);
        }
        self.started = true;
        let mut rest = block;
        while rest.len() >= TL_BYTES {
            let Some((tag, record)) = next_record(rest) else { return Ok(false) };
            if !self.push_record(tag, record)? {
                return Ok(false);
            }
            rest = rest.get(record.len()..).unwrap_or_default();
        }
        Ok(true)
    }

    fn push_record(&mut self, tag: Tag, record: &[u8]) -> Result<bool> {
        let value = record.get(TL_BYTES..).unwrap_or_default();
        match tag {
            Tag::Head => {
                let (Some(features), Some(tid)) = (le32(value, 0), le32(value, 4)) else {
                    return Ok(false);
                };
                if !self.is_expected(tid) {
                    return Ok(false);
                }
                if features != 0 {
                    let feature = format!("fast-commit feature bits {features:#x}");
                    return Err(FormatError::Incompatible { feature });
                }
            }
            Tag::Tail => return Ok(self.push_tail(record, value)),
            Tag::Pad => {}
            _ => {
                let Some(decoded) = Record::decode(tag, value) else { return Ok(false) };
                self.pending.push(decoded);
            }
        }
        self.crc = checksum::crc32c(self.crc, record);
        Ok(true)
    }

    fn is_expected(&self, tid: u32) -> bool {
        self.expected.is_none_or(|expected| expected.0 == tid)
    }

    fn push_tail(&mut self, record: &[u8], value: &[u8]) -> bool {
        let (Some(tid), Some(stored)) = (le32(value, 0), le32(value, 4)) else { return false };
        let covered = record.get(..TL_BYTES + 4).unwrap_or_default();
        let computed = checksum::crc32c(self.crc, covered);
        self.crc = 0;
        if !self.is_expected(tid) || stored != computed {
            return false;
        }
        self.commits = self.commits.saturating_add(1);
        self.records.append(&mut self.pending);
        true
    }
}

/// The record at the start of `rest`, with its tag and length.
fn next_record(rest: &[u8]) -> Option<(Tag, &[u8])> {
    let tag = Tag::from_number(le16(rest, 0)?)?;
    let len = usize::from(le16(rest, 2)?);
    let record = rest.get(..TL_BYTES.checked_add(len)?)?;
    tag.allows(len).then_some((tag, record))
}
