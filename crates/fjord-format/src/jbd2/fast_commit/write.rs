//! Making a fast commit.
//!
//! The first one of a transaction begins with HEAD and, after it in the same sector, a TAIL of
//! its own: an empty fast commit, for the sake of other replays ([`super::compat`]), which end the
//! area without a complaint when a later one is torn. A sector is not torn, so either the area is
//! not there or it has this one.
//!
//! Invariants: a fast commit starts at a block's start (the first one right after the empty
//! one) and ends at a block's end; each block is full, PAD or TAIL included.

use super::{ENDS_BYTES, Record, TL_BYTES, Tag};
use crate::checksum;
use crate::error::{FormatError, Result};
use crate::types::Tid;

/// Collects the records of one fast commit.
#[derive(Clone, Debug)]
pub struct FastCommitWriter {
    block_size: usize,
    tid: Tid,
    /// Of the records since the last TAIL.
    crc: u32,
    /// The blocks so far, the last one not full.
    bytes: Vec<u8>,
}

impl FastCommitWriter {
    /// A fast commit of transaction `tid` in blocks of this size; `first` if the area has none of
    /// this transaction yet.
    pub fn new(block_size: usize, tid: Tid, first: bool) -> FastCommitWriter {
        let mut writer = FastCommitWriter { block_size, tid, crc: 0, bytes: Vec::new() };
        if first {
            let mut head = [0; ENDS_BYTES];
            head[4..].copy_from_slice(&tid.0.to_le_bytes());
            writer.append(Tag::Head, &head);
            writer.append_tail(ENDS_BYTES);
        }
        writer
    }

    /// Blocks begun so far.
    pub fn block_count(&self) -> usize {
        self.bytes.len().div_ceil(self.block_size)
    }

    /// Adds a record.
    ///
    /// # Errors
    /// `NoRoom` for one that fits no block, `Usage` for values that the format cannot hold.
    pub fn push(&mut self, record: &Record) -> Result<()> {
        let mut value = Vec::with_capacity(64);
        record.encode(&mut value)?;
        if !record.tag().allows(value.len()) {
            let message = format!("a value of {} bytes in {:?}", value.len(), record.tag());
            return Err(FormatError::Usage(message));
        }
        self.reserve(TL_BYTES + value.len())?;
        self.append(record.tag(), &value);
        Ok(())
    }

    /// Ends the fast commit; returns its bytes, whole blocks.
    ///
    /// # Errors
    /// `NoRoom` with blocks too small for anything.
    pub fn finish(mut self) -> Result<Vec<u8>> {
        self.reserve(TL_BYTES + ENDS_BYTES)?;
        let left = self.block_size - self.used();
        self.append_tail(left - TL_BYTES);
        Ok(self.bytes)
    }

    /// Bytes used of the last block; 0 when it is full or there is none.
    fn used(&self) -> usize {
        self.bytes.len() % self.block_size
    }

    /// Makes sure that a record of `len` bytes and a PAD after it fit the block, or begins a
    /// new one.
    fn reserve(&mut self, len: usize) -> Result<()> {
        let capacity = self.block_size.saturating_sub(TL_BYTES);
        if len > capacity {
            let (need, capacity) = (len as u64, capacity as u64);
            return Err(FormatError::NoRoom { structure: super::STRUCTURE, need, capacity });
        }
        if self.used() + len > capacity {
            let rest = self.block_size - self.used() - TL_BYTES;
            self.append(Tag::Pad, &vec![0; rest]);
        }
        Ok(())
    }

    fn append(&mut self, tag: Tag, value: &[u8]) {
        let start = self.bytes.len();
        self.bytes.extend((tag as u16).to_le_bytes());
        // Shorter than a block, which has at most 65536 bytes, by the tag at least.
        self.bytes.extend((value.len() as u16).to_le_bytes());
        self.bytes.extend(value);
        self.crc = checksum::crc32c(self.crc, &self.bytes[start..]);
    }

    fn append_tail(&mut self, len: usize) {
        let start = self.bytes.len();
        self.bytes.extend((Tag::Tail as u16).to_le_bytes());
        self.bytes.extend((len as u16).to_le_bytes());
        self.bytes.extend(self.tid.0.to_le_bytes());
        let crc = checksum::crc32c(self.crc, &self.bytes[start..]);
        self.bytes.extend(crc.to_le_bytes());
        self.bytes.resize(start + TL_BYTES + len, 0);
        self.crc = 0;
    }
}
