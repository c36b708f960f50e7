//! The block that says where the areas are.
//!
//! Invariant: all fields lie in one sector, so that a power cut leaves the old table or the
//! new one.

use crate::checksum;
use crate::error::{FormatError, Result};
use crate::le;

const STRUCTURE: &str = "i-journal area table";
const MAGIC: u32 = u32::from_le_bytes(*b"fjAT");
const VERSION: u32 = 1;
const TABLE_BYTES: usize = 64;
const UUID: usize = 8;
const AREA_COUNT: usize = 24;
const AREA_BLOCKS: usize = 28;
const CHECKSUM: usize = 60;

/// Most areas that a journal has.
pub const AREA_COUNT_MAX: u32 = 256;
/// Minimum length of an area, in blocks.
pub const AREA_BLOCKS_MIN: u32 = 16;

/// Number and length of the areas; they follow the table's block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AreaTable {
    /// The journal's UUID.
    pub uuid: [u8; 16],
    /// How many areas there are.
    pub area_count: u32,
    /// Blocks of each.
    pub area_blocks: u32,
}

impl AreaTable {
    /// Whether a block starts like a table.
    pub fn is_table(block: &[u8]) -> bool {
        block.starts_with(&MAGIC.to_le_bytes())
    }

    /// Blocks that the table and its areas take.
    pub fn total_blocks(&self) -> u64 {
        1 + u64::from(self.area_count) * u64::from(self.area_blocks)
    }

    /// Reads the table of the journal with this UUID.
    pub fn decode(block: &[u8], uuid: &[u8; 16]) -> Result<AreaTable> {
        FormatError::check_len(STRUCTURE, block, TABLE_BYTES)?;
        let word = |offset| le::get_u32(STRUCTURE, block, offset);
        let magic = word(0)?;
        if magic != MAGIC {
            return Err(FormatError::BadMagic { structure: STRUCTURE, found: magic });
        }
        let computed = table_checksum(&block[..TABLE_BYTES]);
        FormatError::check_checksum(STRUCTURE, word(CHECKSUM)?, computed)?;
        if word(4)? != VERSION {
            let feature = format!("version {} of the i-journal", word(4)?);
            return Err(FormatError::Incompatible { feature });
        }
        if block[UUID..UUID + 16] != *uuid {
            return Err(FormatError::corrupt(STRUCTURE, "it belongs to another journal"));
        }
        let table = AreaTable {
            uuid: *uuid,
            area_count: word(AREA_COUNT)?,
            area_blocks: word(AREA_BLOCKS)?,
        };
        table.check()?;
        Ok(table)
    }

    /// Writes the table to the start of a block, the rest of which becomes zero.
    pub fn encode(&self, block: &mut [u8]) -> Result<()> {
        FormatError::check_len(STRUCTURE, block, TABLE_BYTES)?;
        self.check()?;
        block.fill(0);
        le::put_u32(STRUCTURE, block, 0, MAGIC)?;
        le::put_u32(STRUCTURE, block, 4, VERSION)?;
        le::put(STRUCTURE, block, UUID, &self.uuid)?;
        le::put_u32(STRUCTURE, block, AREA_COUNT, self.area_count)?;
        le::put_u32(STRUCTURE, block, AREA_BLOCKS, self.area_blocks)?;
        let checksum = table_checksum(&block[..TABLE_BYTES]);
        le::put_u32(STRUCTURE, block, CHECKSUM, checksum)
    }

    fn check(&self) -> Result<()> {
        let count = (1..=AREA_COUNT_MAX).contains(&self.area_count);
        if !count || self.area_blocks < AREA_BLOCKS_MIN || self.total_blocks() > 1 << 31 {
            let detail = format!("{} areas of {} blocks", self.area_count, self.area_blocks);
            return Err(FormatError::corrupt(STRUCTURE, detail));
        }
        Ok(())
    }
}

fn table_checksum(table: &[u8]) -> u32 {
    checksum::crc32c_with_hole(checksum::SEED_START, table, CHECKSUM, 4).unwrap_or_default()
}
