//! Blocks of the i-journal.

use fjord_format::checksum;
use fjord_format::ijournal::{AreaFormat, AreaTable, Header, ITransaction, MAGIC, VERSION};

/// What the bytes are taken to belong to.
pub const FORMAT: AreaFormat = AreaFormat { block_size: 1024, uuid: [3; 16], nonce: 9 };
/// Offsets that the format fixes; see `fjord_format::ijournal`.
const CHECKSUM: usize = 8;
const NONCE: usize = 16;
const HEADER_BLOCKS: usize = 36;

/// Whole areas: any bytes, as they are and with the fields set that would end the reading at
/// once: magic number, version, nonce, checksum.
pub fn i_transaction(bytes: &[u8]) {
    let _ = ITransaction::decode(&FORMAT, bytes);
    let _ = AreaTable::decode(bytes, &FORMAT.uuid);
    if bytes.len() < FORMAT.block_size {
        return;
    }
    let mut sealed = bytes.to_vec();
    sealed[..4].copy_from_slice(&MAGIC.to_le_bytes());
    sealed[4..6].copy_from_slice(&VERSION.to_le_bytes());
    sealed[NONCE..NONCE + 8].copy_from_slice(&FORMAT.nonce.to_le_bytes());
    sealed[HEADER_BLOCKS..HEADER_BLOCKS + 4].copy_from_slice(&1u32.to_le_bytes());
    let seed = checksum::crc32c(checksum::uuid_seed(&FORMAT.uuid), &FORMAT.nonce.to_le_bytes());
    let header = &sealed[..FORMAT.block_size];
    let sum = checksum::crc32c_with_hole(seed, header, CHECKSUM, 4).expect("it lies inside");
    sealed[CHECKSUM..CHECKSUM + 4].copy_from_slice(&sum.to_le_bytes());
    let header = Header::decode(&FORMAT, &sealed);
    if let Ok(read) = ITransaction::decode(&FORMAT, &sealed) {
        let header = header.expect("it has been read");
        assert!(header.total_blocks as usize * FORMAT.block_size <= sealed.len());
        let held: usize = read.inodes.iter().map(|image| image.bytes.len()).sum();
        let names: usize = read.entries.iter().map(|entry| entry.name.len()).sum();
        assert!(held + names <= sealed.len());
        assert!(read.data.len() + read.extent_blocks.len() <= sealed.len() / 16);
    }
}
