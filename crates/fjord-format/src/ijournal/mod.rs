//! The i-journal: areas after the log that hold i-transactions, one per fsync.
//!
//! The journal inode goes on after `s_maxlen`, where neither Linux nor e2fsck looks: one
//! block with the [`AreaTable`], then the areas. An i-transaction is one *header* of whole
//! blocks and the *payload* blocks right after it:
//!
//! ```text
//! header:  fixed fields, then records: inode images, directory entries, tags of extent
//!          blocks, data that fits here, tags of data blocks, names of superseded blocks
//! payload: extent blocks and data blocks, in the order of their tags, a CRC in each tag
//! ```
//!
//! The header's checksum covers the records, and so the CRCs of the payload: the whole
//! i-transaction is valid or not, whatever order its blocks reached the device in. That one
//! checksum is what the commit block is in the paper ("iJournaling", ATC '17, section 4.1),
//! and an i-transaction without payload is its single-block form.
//!
//! The nonce of a header identifies the use of the areas; it changes each time that the mark is set
//! ([`IjournalMark`](crate::jbd2::IjournalMark)), so that i-transactions of an earlier use are
//! invalid. All fields are little-endian.
//!
//! Invariants: no payload block starts with the header's magic number (it is escaped as JBD2
//! does it), so that every block of an area that starts with it was written as a header; a
//! decoder reads only inside what it is given and never allocates more than that has.

mod build;
mod decode;
mod order;
mod size;
mod table;
#[cfg(test)]
mod tests;

pub use build::{Builder, Place};
pub use decode::{DataBlock, Entry, ExtentBlock, Header, ITransaction, InodeImage, Superseded};
pub use order::{Order, behind_gaps};
pub use size::Size;
pub use table::{AREA_BLOCKS_MIN, AREA_COUNT_MAX, AreaTable};

use crate::checksum;

/// First word of an i-transaction ("fjIT").
pub const MAGIC: u32 = u32::from_le_bytes(*b"fjIT");
/// Version of the format described here.
pub const VERSION: u16 = 1;
/// Bytes of the fixed fields that start a header.
pub const FIXED_BYTES: usize = 64;
/// Most blocks that a header takes.
pub const HEADER_BLOCKS_MAX: u32 = 64;

/// Offsets of the fixed fields.
mod at {
    pub(super) const MAGIC: usize = 0;
    pub(super) const VERSION: usize = 4;
    pub(super) const CHECKSUM: usize = 8;
    pub(super) const TID: usize = 12;
    pub(super) const NONCE: usize = 16;
    pub(super) const SUB_ID: usize = 24;
    pub(super) const INO: usize = 32;
    pub(super) const HEADER_BLOCKS: usize = 36;
    pub(super) const TOTAL_BLOCKS: usize = 40;
    pub(super) const HEADER_BYTES: usize = 44;
    // Zero without FJORD_BARRIERS.
    pub(super) const BARRIER: usize = 48;
    pub(super) const NEWEST_TID: usize = 52;
    pub(super) const BEHIND_NEWEST: usize = 56;
    pub(super) const BEHIND_OLDER: usize = 60;
}

/// Kinds of records.
mod kind {
    pub(super) const INODE: u16 = 1;
    pub(super) const ENTRY: u16 = 2;
    pub(super) const EXTENT_BLOCK: u16 = 3;
    pub(super) const DATA_HERE: u16 = 4;
    pub(super) const DATA_BLOCK: u16 = 5;
    pub(super) const SUPERSEDED: u16 = 6;
}

/// Bytes of a record's head: kind and length of its body.
const RECORD_HEAD_BYTES: usize = 4;
/// The payload block's first word was [`MAGIC`] and is zero in the area.
const FLAG_ESCAPED: u32 = 1;

/// What ties i-transactions to one journal and one use of its areas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AreaFormat {
    /// Size of a block in bytes.
    pub block_size: usize,
    /// The journal's UUID.
    pub uuid: [u8; 16],
    /// The nonce in the journal's superblock.
    pub nonce: u64,
}

impl AreaFormat {
    fn seed(&self) -> u32 {
        checksum::crc32c(checksum::uuid_seed(&self.uuid), &self.nonce.to_le_bytes())
    }

    /// CRC-32C of a payload block as it lies in the area.
    fn payload_crc(&self, block: &[u8]) -> u32 {
        checksum::crc32c(self.seed(), block)
    }

    /// The checksum of a header of whole blocks, its own field taken as zero.
    fn header_checksum(&self, header: &[u8]) -> u32 {
        checksum::crc32c_with_hole(self.seed(), header, at::CHECKSUM, 4).unwrap_or_default()
    }
}

/// Whether a block has to be escaped before it goes into an area as payload.
pub fn needs_escape(block: &[u8]) -> bool {
    block.starts_with(&MAGIC.to_le_bytes())
}
