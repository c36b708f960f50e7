//! The GUID partition table: header, entries, and the backup of both at the end of the disk.

use super::{ENTRIES_BYTES_MAX, Partition, ReadAt, sectors};
use crate::error::FormatError;

const SIGNATURE: &[u8; 8] = b"EFI PART";
/// An image does not say which its disk has.
const SECTOR_BYTES: [u64; 2] = [512, 4096];
const HEADER_BYTES_MIN: usize = 92;
const CHECKSUM_OFFSET: usize = 16;
const ENTRY_BYTES_MIN: u32 = 128;
const NAME_OFFSET: usize = 56;
const NAME_BYTES: usize = 72;

/// The fields of a header that say where the entries are.
struct Header {
    entries_lba: u64,
    entry_count: u32,
    entry_bytes: u32,
    entries_checksum: u32,
}

/// The partitions of a disk with a protective MBR.
pub(super) fn read<E: From<FormatError>>(
    size_bytes: u64,
    read: &mut impl ReadAt<E>,
) -> Result<Vec<Partition>, E> {
    let firsts = SECTOR_BYTES.map(|sector_bytes| (sector_bytes, 1));
    let backups = SECTOR_BYTES.map(|bytes| (bytes, (size_bytes / bytes).saturating_sub(1)));
    for (sector_bytes, lba) in firsts.into_iter().chain(backups) {
        let Some(place) = sectors(lba, 1, sector_bytes).filter(|place| place.end <= size_bytes)
        else {
            continue;
        };
        let mut sector = vec![0; sector_bytes as usize];
        read(place.start, &mut sector)?;
        let Some(header) = Header::decode(&sector, lba) else { continue };
        let len = u64::from(header.entry_count) * u64::from(header.entry_bytes);
        let start = header.entries_lba.saturating_mul(sector_bytes);
        if len > ENTRIES_BYTES_MAX || start.saturating_add(len) > size_bytes {
            continue;
        }
        let mut entries = vec![0; len as usize];
        read(start, &mut entries)?;
        if crc32fast::hash(&entries) == header.entries_checksum {
            let entries = entries.chunks_exact(header.entry_bytes as usize);
            let found = (1..).zip(entries);
            return Ok(found.filter_map(|(n, bytes)| partition(n, bytes, sector_bytes)).collect());
        }
    }
    let detail =
        "the first copy and the backup at the end are both invalid; repair them with gdisk";
    Err(FormatError::corrupt("GUID partition table", detail).into())
}

fn number<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&bytes[at..at + N]);
    out
}

impl Header {
    /// The header in the sector `lba`; `None` if it is invalid.
    fn decode(sector: &[u8], lba: u64) -> Option<Header> {
        let len = u32::from_le_bytes(number(sector, 12)) as usize;
        if &sector[..8] != SIGNATURE || !(HEADER_BYTES_MIN..=sector.len()).contains(&len) {
            return None;
        }
        let mut bytes = sector[..len].to_vec();
        bytes[CHECKSUM_OFFSET..CHECKSUM_OFFSET + 4].fill(0);
        let stored = u32::from_le_bytes(number(sector, CHECKSUM_OFFSET));
        let header = Header {
            entries_lba: u64::from_le_bytes(number(sector, 72)),
            entry_count: u32::from_le_bytes(number(sector, 80)),
            entry_bytes: u32::from_le_bytes(number(sector, 84)),
            entries_checksum: u32::from_le_bytes(number(sector, 88)),
        };
        let is_own = u64::from_le_bytes(number(sector, 24)) == lba;
        let is_valid = crc32fast::hash(&bytes) == stored && header.entry_bytes >= ENTRY_BYTES_MIN;
        (is_own && is_valid).then_some(header)
    }
}

/// The partition of an entry; `None` if it is not in use.
fn partition(number_in_table: u32, bytes: &[u8], sector_bytes: u64) -> Option<Partition> {
    let kind: [u8; 16] = number(bytes, 0);
    let first = u64::from_le_bytes(number(bytes, 32));
    let last = u64::from_le_bytes(number(bytes, 40));
    if kind == [0; 16] || last < first {
        return None;
    }
    let count = (last - first).checked_add(1)?;
    let units = bytes[NAME_OFFSET..NAME_OFFSET + NAME_BYTES].chunks_exact(2);
    let units: Vec<u16> = units.map(|unit| u16::from_le_bytes([unit[0], unit[1]])).collect();
    let len = units.iter().position(|unit| *unit == 0).unwrap_or(units.len());
    let name = String::from_utf16_lossy(&units[..len]);
    let range = sectors(first, count, sector_bytes)?;
    Some(Partition { number: number_in_table, range, name })
}
