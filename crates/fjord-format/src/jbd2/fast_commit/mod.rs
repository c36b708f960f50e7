//! The fast-commit area: a stream of little-endian records after the log.
//!
//! A record is a tag, the length of its value, and the value (`struct ext4_fc_tl`). Records do
//! not cross blocks: PAD fills what is left of one. The stream of a transaction starts with HEAD;
//! each fast commit ends with TAIL, which bears the transaction's ID and a CRC-32C over all
//! records since the TAIL before it. `scan` finds the valid ones, [`write`] builds them, [`compat`] has the rules that
//! replay by others asks for.
//!
//! Invariants: a decoder reads only inside the bytes it is given; a decoded [`Record`] has a
//! length that its tag allows, and nothing else in it has been checked.
//!
//! Kernel document: `Documentation/filesystems/ext4/journal.rst`, section "Fast commits".

pub mod compat;
mod scan;
#[cfg(test)]
mod tests;
mod write;

pub use scan::{FastCommitScan, HEAD_TAG_BYTES, starts_with_head};
pub use write::FastCommitWriter;

use crate::error::{FormatError, Result};
use crate::extent::{EXTENT_BLOCK_MAX, EXTENT_LEN_MAX, Extent};
use crate::geometry::GOOD_OLD_INODE_BYTES;
use crate::types::{BlockNo, InodeNo, LogicalBlock};

/// Bytes of the tag and length that start each record (`struct ext4_fc_tl`).
const TL_BYTES: usize = 4;
/// Bytes of the value of HEAD and the least of TAIL.
const ENDS_BYTES: usize = 8;
/// Bytes of the value of ADD_RANGE.
const ADD_RANGE_BYTES: usize = 16;
/// Bytes of the value of DEL_RANGE.
const DEL_RANGE_BYTES: usize = 12;
/// Bytes before the name in the value of CREAT, LINK and UNLINK.
const ENTRY_BYTES: usize = 8;
/// Bytes before the inode in the value of INODE.
const INODE_BYTES: usize = 4;
/// Longest name of a directory entry.
const NAME_BYTES_MAX: usize = 255;

const STRUCTURE: &str = "fast commit";

/// What a record is (`EXT4_FC_TAG_*`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
enum Tag {
    AddRange = 1,
    DelRange = 2,
    Create = 3,
    Link = 4,
    Unlink = 5,
    Inode = 6,
    Pad = 7,
    Tail = 8,
    Head = 9,
}

impl Tag {
    fn from_number(number: u16) -> Option<Tag> {
        Some(match number {
            1 => Tag::AddRange,
            2 => Tag::DelRange,
            3 => Tag::Create,
            4 => Tag::Link,
            5 => Tag::Unlink,
            6 => Tag::Inode,
            7 => Tag::Pad,
            8 => Tag::Tail,
            9 => Tag::Head,
            _ => return None,
        })
    }

    /// Whether a value of this tag can have so many bytes.
    fn allows(self, len: usize) -> bool {
        match self {
            Tag::AddRange => len == ADD_RANGE_BYTES,
            Tag::DelRange => len == DEL_RANGE_BYTES,
            Tag::Create | Tag::Link | Tag::Unlink => {
                (ENTRY_BYTES + 1..=ENTRY_BYTES + NAME_BYTES_MAX).contains(&len)
            }
            Tag::Inode => len >= INODE_BYTES + usize::from(GOOD_OLD_INODE_BYTES),
            Tag::Pad => true,
            Tag::Tail => len >= ENDS_BYTES,
            Tag::Head => len == ENDS_BYTES,
        }
    }
}

/// A directory entry in a record (`struct ext4_fc_dentry_info`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EntryRecord {
    /// The directory.
    pub parent: InodeNo,
    /// The inode that the entry names.
    pub ino: InodeNo,
    /// The name: 1 to 255 bytes.
    pub name: Vec<u8>,
}

/// A change that a fast commit records: the outcome, not the procedure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Record {
    /// File blocks are at these blocks of the device (ADD_RANGE).
    AddRange {
        /// The file.
        ino: InodeNo,
        /// The run.
        extent: Extent,
    },
    /// File blocks are a hole (DEL_RANGE).
    DelRange {
        /// The file.
        ino: InodeNo,
        /// First block of the hole.
        logical: LogicalBlock,
        /// Blocks in it.
        len: u32,
    },
    /// A new inode, whose INODE record came before, has this entry (CREAT).
    Create(EntryRecord),
    /// An inode has this entry (LINK).
    Link(EntryRecord),
    /// An inode does not have this entry (UNLINK).
    Unlink(EntryRecord),
    /// The inode has these attributes (INODE). Its block map and block count are not among them.
    Inode {
        /// Its number.
        ino: InodeNo,
        /// The first 128 bytes or more of the inode as in the inode table.
        bytes: Vec<u8>,
    },
}

impl Record {
    fn tag(&self) -> Tag {
        match self {
            Record::AddRange { .. } => Tag::AddRange,
            Record::DelRange { .. } => Tag::DelRange,
            Record::Create(_) => Tag::Create,
            Record::Link(_) => Tag::Link,
            Record::Unlink(_) => Tag::Unlink,
            Record::Inode { .. } => Tag::Inode,
        }
    }

    /// Reads the value of a record whose length its tag allows; `None` for HEAD, TAIL and PAD.
    fn decode(tag: Tag, value: &[u8]) -> Option<Record> {
        let ino = InodeNo(le32(value, 0)?);
        Some(match tag {
            Tag::AddRange => Record::AddRange { ino, extent: decode_extent(value.get(4..)?)? },
            Tag::DelRange => {
                let logical = LogicalBlock(le32(value, 4)?);
                Record::DelRange { ino, logical, len: le32(value, 8)? }
            }
            Tag::Create => Record::Create(decode_entry(value)?),
            Tag::Link => Record::Link(decode_entry(value)?),
            Tag::Unlink => Record::Unlink(decode_entry(value)?),
            Tag::Inode => Record::Inode { ino, bytes: value.get(INODE_BYTES..)?.to_vec() },
            Tag::Pad | Tag::Tail | Tag::Head => return None,
        })
    }

    /// Appends the value to `out`.
    fn encode(&self, out: &mut Vec<u8>) -> Result<()> {
        match self {
            Record::AddRange { ino, extent } => {
                out.extend(ino.0.to_le_bytes());
                encode_extent(extent, out)?;
            }
            Record::DelRange { ino, logical, len } => {
                for word in [ino.0, logical.0, *len] {
                    out.extend(word.to_le_bytes());
                }
            }
            Record::Create(entry) | Record::Link(entry) | Record::Unlink(entry) => {
                out.extend(entry.parent.0.to_le_bytes());
                out.extend(entry.ino.0.to_le_bytes());
                out.extend(&entry.name);
            }
            Record::Inode { ino, bytes } => {
                out.extend(ino.0.to_le_bytes());
                out.extend(bytes);
            }
        }
        Ok(())
    }
}

fn decode_entry(value: &[u8]) -> Option<EntryRecord> {
    let (parent, ino) = (InodeNo(le32(value, 0)?), InodeNo(le32(value, 4)?));
    Some(EntryRecord { parent, ino, name: value.get(ENTRY_BYTES..)?.to_vec() })
}

/// An extent as it stands in a leaf of an extent tree (`struct ext4_extent`).
fn decode_extent(bytes: &[u8]) -> Option<Extent> {
    let stored = u32::from(le16(bytes, 4)?);
    // Up to 32768 is a written run, above it an unwritten one.
    let unwritten = stored > EXTENT_LEN_MAX;
    let len = if unwritten { stored - EXTENT_LEN_MAX } else { stored };
    let start = u64::from(le16(bytes, 6)?) << 32 | u64::from(le32(bytes, 8)?);
    Some(Extent { logical: LogicalBlock(le32(bytes, 0)?), len, start: BlockNo(start), unwritten })
}

fn encode_extent(extent: &Extent, out: &mut Vec<u8>) -> Result<()> {
    let fits = extent.len >= 1 && extent.len <= Extent::len_max(extent.unwritten);
    if !fits || extent.start.0 > EXTENT_BLOCK_MAX {
        return Err(FormatError::Usage(format!("{extent:?} is no extent of a fast commit")));
    }
    let stored = if extent.unwritten { extent.len + EXTENT_LEN_MAX } else { extent.len };
    out.extend(extent.logical.0.to_le_bytes());
    // Both were checked above to fit their fields.
    out.extend((stored as u16).to_le_bytes());
    out.extend(((extent.start.0 >> 32) as u16).to_le_bytes());
    out.extend((extent.start.0 as u32).to_le_bytes());
    Ok(())
}

fn le16(bytes: &[u8], offset: usize) -> Option<u16> {
    let end = offset.checked_add(2)?;
    Some(u16::from_le_bytes(bytes.get(offset..end)?.try_into().ok()?))
}

fn le32(bytes: &[u8], offset: usize) -> Option<u32> {
    let end = offset.checked_add(4)?;
    Some(u32::from_le_bytes(bytes.get(offset..end)?.try_into().ok()?))
}
