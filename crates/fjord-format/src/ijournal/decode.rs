//! Reads an i-transaction from the blocks of an area.
//!
//! Invariant: a decoded i-transaction has the right checksums throughout; what its numbers
//! refer to is for the engine to check.

use super::{AreaFormat, FIXED_BYTES, FLAG_ESCAPED, HEADER_BLOCKS_MAX, MAGIC, Order};
use super::{RECORD_HEAD_BYTES, VERSION, at, kind};
use crate::error::{FormatError, Result};
use crate::le;
use crate::types::{BlockNo, InodeNo, Tid};

const STRUCTURE: &str = "i-transaction";
/// A name in a directory has at most this many bytes.
const NAME_BYTES_MAX: usize = 255;

/// The fixed fields of a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The transaction that holds the file's newest change.
    pub tid: Tid,
    /// Place in the order of all i-transactions of this use of the areas.
    pub sub_id: u64,
    /// The file.
    pub ino: InodeNo,
    /// Blocks of the header.
    pub header_blocks: u32,
    /// Blocks of header and payload.
    pub total_blocks: u32,
    /// Bytes of the header in use.
    pub header_bytes: u32,
    /// Place among barriers.
    pub order: Order,
    /// The stored checksum.
    checksum: u32,
}

/// An inode as the inode table is to hold it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InodeImage {
    /// Its number.
    pub ino: InodeNo,
    /// Its bytes.
    pub bytes: Vec<u8>,
}

/// A name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The directory.
    pub parent: InodeNo,
    /// What the name stands for.
    pub child: InodeNo,
    /// The type in the entry.
    pub file_type: u8,
    /// The name: 1 to 255 bytes without `/` and NUL, neither `.` nor `..`.
    pub name: Vec<u8>,
}

/// A block of the extent tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExtentBlock {
    /// Where it belongs.
    pub home: BlockNo,
    /// What it holds.
    pub content: Vec<u8>,
}

/// A block of data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataBlock {
    /// Where it belongs.
    pub home: BlockNo,
    /// What it holds, the whole block.
    pub content: Vec<u8>,
}

/// A run of blocks whose data in earlier i-transactions is out of date.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Superseded {
    /// First block.
    pub home: BlockNo,
    /// How many.
    pub count: u32,
}

/// An i-transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ITransaction {
    /// The transaction that holds the file's newest change.
    pub tid: Tid,
    /// Place in the order of all i-transactions of this use of the areas.
    pub sub_id: u64,
    /// The file.
    pub ino: InodeNo,
    /// Place among barriers.
    pub order: Order,
    /// The file's inode and those of new directories above it.
    pub inodes: Vec<InodeImage>,
    /// Names, topmost directory first.
    pub entries: Vec<Entry>,
    /// Blocks of the file's extent tree.
    pub extent_blocks: Vec<ExtentBlock>,
    /// Blocks of the file's data.
    pub data: Vec<DataBlock>,
    /// Data of earlier i-transactions that must not be written home any more.
    pub superseded: Vec<Superseded>,
}

impl Header {
    /// Reads the fixed fields if the block starts an i-transaction of this use of the areas.
    /// The checksum is not looked at: that takes all of the header.
    pub fn decode(format: &AreaFormat, block: &[u8]) -> Option<Header> {
        if block.len() < format.block_size || !block.starts_with(&MAGIC.to_le_bytes()) {
            return None;
        }
        let word = |offset| le::get_u32(STRUCTURE, block, offset).ok();
        let long = |offset| Some(u64::from(word(offset)?) | u64::from(word(offset + 4)?) << 32);
        let version = le::get_u16(STRUCTURE, block, at::VERSION).ok()?;
        if version != VERSION || long(at::NONCE)? != format.nonce {
            return None;
        }
        let header = Header {
            tid: Tid(word(at::TID)?),
            sub_id: long(at::SUB_ID)?,
            ino: InodeNo(word(at::INO)?),
            header_blocks: word(at::HEADER_BLOCKS)?,
            total_blocks: word(at::TOTAL_BLOCKS)?,
            header_bytes: word(at::HEADER_BYTES)?,
            order: Order {
                barrier: word(at::BARRIER)?,
                newest: Tid(word(at::NEWEST_TID)?),
                behind_newest: word(at::BEHIND_NEWEST)?,
                behind_older: word(at::BEHIND_OLDER)?,
            },
            checksum: word(at::CHECKSUM)?,
        };
        let bytes_max = u64::from(header.header_blocks) * format.block_size as u64;
        let sane = (1..=HEADER_BLOCKS_MAX).contains(&header.header_blocks)
            && header.total_blocks >= header.header_blocks
            && (FIXED_BYTES as u64..=bytes_max).contains(&u64::from(header.header_bytes));
        sane.then_some(header)
    }
}

impl ITransaction {
    /// One without records.
    pub(super) fn empty(tid: Tid, sub_id: u64, ino: InodeNo, order: Order) -> ITransaction {
        ITransaction {
            tid,
            sub_id,
            ino,
            order,
            inodes: Vec::new(),
            entries: Vec::new(),
            extent_blocks: Vec::new(),
            data: Vec::new(),
            superseded: Vec::new(),
        }
    }

    /// Reads an i-transaction; `blocks` are those that its header calls for
    /// ([`Header::total_blocks`]), as they lie in the area.
    ///
    /// # Errors
    /// A checksum that does not match (a write that a power cut tore), or records that make no
    /// sense.
    pub fn decode(format: &AreaFormat, blocks: &[u8]) -> Result<ITransaction> {
        let Some(header) = Header::decode(format, blocks) else {
            return Err(FormatError::corrupt(STRUCTURE, "it has no header"));
        };
        let block_size = format.block_size;
        let header_len = header.header_blocks as usize * block_size;
        let total_len = (header.total_blocks as usize).saturating_mul(block_size);
        FormatError::check_len(STRUCTURE, blocks, total_len)?;
        let (head, payload) = blocks[..total_len].split_at(header_len);
        FormatError::check_checksum(STRUCTURE, header.checksum, format.header_checksum(head))?;
        let mut reader = Reader {
            format,
            payload: payload.chunks(block_size),
            out: ITransaction::empty(header.tid, header.sub_id, header.ino, header.order),
        };
        // Checked by `Header::decode`.
        let mut records = &head[FIXED_BYTES..header.header_bytes as usize];
        while !records.is_empty() {
            let kind = le::get_u16(STRUCTURE, records, 0)?;
            let len = usize::from(le::get_u16(STRUCTURE, records, 2)?);
            reader.record(kind, le::slice(STRUCTURE, records, RECORD_HEAD_BYTES, len)?)?;
            let next = (RECORD_HEAD_BYTES + len).next_multiple_of(4);
            records = records.get(next..).unwrap_or_default();
        }
        if reader.payload.next().is_some() {
            return Err(FormatError::corrupt(STRUCTURE, "it has blocks that no record names"));
        }
        Ok(reader.out)
    }

    /// The image of an inode, if it holds one.
    pub fn inode(&self, ino: InodeNo) -> Option<&InodeImage> {
        self.inodes.iter().find(|image| image.ino == ino)
    }
}

struct Reader<'a> {
    format: &'a AreaFormat,
    payload: std::slice::Chunks<'a, u8>,
    out: ITransaction,
}

impl Reader<'_> {
    fn record(&mut self, kind: u16, body: &[u8]) -> Result<()> {
        let word = |offset| le::get_u32(STRUCTURE, body, offset);
        let home = || Ok(BlockNo(u64::from(word(0)?) | u64::from(word(4)?) << 32));
        match kind {
            kind::INODE => {
                let bytes = body.get(4..).unwrap_or_default().to_vec();
                self.out.inodes.push(InodeImage { ino: InodeNo(word(0)?), bytes });
            }
            kind::ENTRY => {
                let name = body.get(12..).unwrap_or_default();
                check_name(name)?;
                self.out.entries.push(Entry {
                    parent: InodeNo(word(0)?),
                    child: InodeNo(word(4)?),
                    file_type: word(8)? as u8,
                    name: name.to_vec(),
                });
            }
            kind::EXTENT_BLOCK => {
                let content = self.next_block(word(8)?, word(12)?)?;
                self.out.extent_blocks.push(ExtentBlock { home: home()?, content });
            }
            kind::DATA_BLOCK => {
                let content = self.next_block(word(8)?, word(12)?)?;
                self.out.data.push(DataBlock { home: home()?, content });
            }
            kind::DATA_HERE => {
                let used = le::slice(STRUCTURE, body, 12, word(8)? as usize)?;
                if used.len() > self.format.block_size {
                    return Err(FormatError::corrupt(STRUCTURE, "more data than a block holds"));
                }
                let mut content = used.to_vec();
                content.resize(self.format.block_size, 0);
                self.out.data.push(DataBlock { home: home()?, content });
            }
            kind::SUPERSEDED => {
                self.out.superseded.push(Superseded { home: home()?, count: word(8)? });
            }
            _ => {
                return Err(FormatError::corrupt(STRUCTURE, format!("unknown record {kind}")));
            }
        }
        Ok(())
    }

    fn next_block(&mut self, crc: u32, flags: u32) -> Result<Vec<u8>> {
        let missing = || FormatError::corrupt(STRUCTURE, "a record without its block");
        let block = self.payload.next().ok_or_else(missing)?;
        FormatError::check_checksum(STRUCTURE, crc, self.format.payload_crc(block))?;
        let mut content = block.to_vec();
        if flags & FLAG_ESCAPED != 0 {
            content[..4].copy_from_slice(&MAGIC.to_le_bytes());
        }
        Ok(content)
    }
}

fn check_name(name: &[u8]) -> Result<()> {
    let fits = (1..=NAME_BYTES_MAX).contains(&name.len());
    let dots = matches!(name, b"." | b"..");
    if !fits || dots || name.iter().any(|&byte| byte == 0 || byte == b'/') {
        return Err(FormatError::corrupt(STRUCTURE, "a name that no directory can hold"));
    }
    Ok(())
}
