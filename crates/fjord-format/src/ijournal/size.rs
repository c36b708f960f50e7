//! How many blocks an i-transaction takes at the most, before it is put together.
//!
//! Invariant: a [`Builder`](super::Builder) that gets the same records makes no more blocks, in whatever order.

use super::{AreaFormat, FIXED_BYTES, HEADER_BLOCKS_MAX, RECORD_HEAD_BYTES};

/// Upper bound on the blocks of an i-transaction. Data is counted as blocks behind the header; what fits into the
/// header instead takes a block less, and makes the header longer by one at the most.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    block_size: usize,
    header_bytes: usize,
    payload_blocks: u32,
    /// A record is longer than its head can tell.
    has_long_record: bool,
}

impl Size {
    /// That of an i-transaction without records.
    pub fn new(format: &AreaFormat) -> Size {
        let block_size = format.block_size.max(1);
        Size { block_size, header_bytes: FIXED_BYTES, payload_blocks: 0, has_long_record: false }
    }

    /// With an inode of `len` bytes.
    pub fn inode(mut self, len: usize) -> Size {
        self.records(1, len.saturating_add(4));
        self
    }

    /// With a name of `len` bytes.
    pub fn entry(mut self, len: usize) -> Size {
        self.records(1, len.saturating_add(12));
        self
    }

    /// With this many runs of superseded blocks.
    pub fn superseded(mut self, count: usize) -> Size {
        self.records(count, 12);
        self
    }

    /// With this many blocks of the extent tree or of data.
    pub fn blocks(mut self, count: usize) -> Size {
        self.records(count, 16);
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        self.payload_blocks = self.payload_blocks.saturating_add(count);
        self
    }

    /// Blocks, header included. `None` if it is too large for the format.
    pub fn total_blocks(&self) -> Option<u32> {
        let header_blocks = u32::try_from(self.header_bytes.div_ceil(self.block_size)).ok()?;
        let fits = header_blocks <= HEADER_BLOCKS_MAX && !self.has_long_record;
        header_blocks.checked_add(self.payload_blocks).filter(|_| fits)
    }

    /// Records with bodies of `len` bytes.
    fn records(&mut self, count: usize, len: usize) {
        self.has_long_record |= u16::try_from(len).is_err();
        let record = len.saturating_add(RECORD_HEAD_BYTES).div_ceil(4).saturating_mul(4);
        self.header_bytes = self.header_bytes.saturating_add(record.saturating_mul(count));
    }
}
