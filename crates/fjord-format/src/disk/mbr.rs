//! The master boot record, and the chain of records in an extended partition.

use std::ops::Range;

use super::{LOGICAL_COUNT_MAX, Partition, ReadAt, sectors};

/// An MBR counts in these, whatever the disk has.
const SECTOR_BYTES: u64 = 512;
const ENTRIES_OFFSET: usize = 446;
const ENTRY_BYTES: usize = 16;
const SIGNATURE: [u8; 2] = [0x55, 0xaa];
/// Number of the first logical partition.
const FIRST_LOGICAL: u32 = 5;
const TYPE_GPT: u8 = 0xee;
/// Extended partitions: of DOS, with LBA, of Linux.
const TYPES_EXTENDED: [u8; 3] = [0x05, 0x0f, 0x85];

/// An entry of a record.
#[derive(Clone, Copy, Debug)]
struct Entry {
    kind: u8,
    first: u32,
    count: u32,
}

impl Entry {
    fn is_used(self) -> bool {
        self.kind != 0 && self.count != 0
    }

    fn is_extended(self) -> bool {
        TYPES_EXTENDED.contains(&self.kind)
    }

    /// Where it lies; `base` is the sector that `first` is counted from.
    fn range(self, base: u64) -> Option<Range<u64>> {
        sectors(base.checked_add(u64::from(self.first))?, u64::from(self.count), SECTOR_BYTES)
    }
}

/// A sector with four entries: the first one of a disk, or of a logical partition.
pub(super) struct Record([Entry; 4]);

impl Record {
    /// The entries of a sector; `None` where they are none.
    pub(super) fn decode(sector: &[u8; 512]) -> Option<Record> {
        if sector[510..] != SIGNATURE {
            return None;
        }
        let mut entries = [Entry { kind: 0, first: 0, count: 0 }; 4];
        let bytes = sector[ENTRIES_OFFSET..].chunks_exact(ENTRY_BYTES);
        for (entry, bytes) in entries.iter_mut().zip(bytes) {
            // The mark of the partition that is booted: other values are code.
            if bytes[0] & 0x7f != 0 {
                return None;
            }
            let number = |at: usize| {
                u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
            };
            *entry = Entry { kind: bytes[4], first: number(8), count: number(12) };
        }
        Some(Record(entries))
    }

    /// Whether the table is a GPT, which the record only announces.
    pub(super) fn is_protective(&self) -> bool {
        self.0.iter().any(|entry| entry.kind == TYPE_GPT)
    }
}

/// The partitions of a disk whose first sector is `record`.
pub(super) fn read<E>(
    record: &Record,
    size_bytes: u64,
    read: &mut impl ReadAt<E>,
) -> Result<Vec<Partition>, E> {
    let mut found = Vec::new();
    for (number, entry) in (1..).zip(record.0).filter(|(_, entry)| entry.is_used()) {
        if !entry.is_extended() {
            found.extend(entry.range(0).map(|range| partition(number, range)));
        }
    }
    for entry in record.0.into_iter().filter(|entry| entry.is_used() && entry.is_extended()) {
        read_logical(entry, size_bytes, read, &mut found)?;
    }
    Ok(found)
}

fn partition(number: u32, range: Range<u64>) -> Partition {
    Partition { number, range, name: String::new() }
}

/// Follows the records of an extended partition: each has one logical partition, counted from the record, and
/// the place of the next record, counted from the start of the extended partition.
fn read_logical<E>(
    extended: Entry,
    size_bytes: u64,
    read: &mut impl ReadAt<E>,
    found: &mut Vec<Partition>,
) -> Result<(), E> {
    let base = u64::from(extended.first);
    let end = base + u64::from(extended.count);
    let mut at = base;
    for _ in 0..LOGICAL_COUNT_MAX {
        let Some(place) = sectors(at, 1, SECTOR_BYTES) else { break };
        if at < base || at >= end || place.end > size_bytes {
            break;
        }
        let mut sector = [0; SECTOR_BYTES as usize];
        read(place.start, &mut sector)?;
        let Some(record) = Record::decode(&sector) else { break };
        for entry in record.0.into_iter().filter(|entry| entry.is_used()) {
            let inside = at + u64::from(entry.first) + u64::from(entry.count) <= end;
            if !entry.is_extended() && inside && found.len() < 2 * LOGICAL_COUNT_MAX {
                let last = found.last().map_or(0, |last| last.number);
                let number = (last + 1).max(FIRST_LOGICAL);
                found.extend(entry.range(at).map(|range| partition(number, range)));
            }
        }
        let next = record.0.into_iter().find(|entry| entry.is_used() && entry.is_extended());
        match next {
            Some(next) => at = base + u64::from(next.first),
            None => break,
        }
    }
    Ok(())
}
