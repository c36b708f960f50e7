//! Partition tables of disks: `gpt` and `mbr`.
//!
//! Invariants: nothing is read outside `0..size_bytes`, at most [`ENTRIES_BYTES_MAX`] at a time, and a chain
//! of logical partitions ends after [`LOGICAL_COUNT_MAX`] of them, whatever it says.

mod gpt;
mod mbr;

use std::fmt;
use std::ops::Range;

use crate::error::FormatError;

/// The largest array of entries of a GPT that is read. Linux makes 16 KiB, of 128 partitions.
const ENTRIES_BYTES_MAX: u64 = 1 << 20;
/// The most logical partitions, as for Linux.
const LOGICAL_COUNT_MAX: usize = 100;

/// Reads all of a buffer from an offset in bytes.
pub trait ReadAt<E>: FnMut(u64, &mut [u8]) -> Result<(), E> {}
impl<E, F: FnMut(u64, &mut [u8]) -> Result<(), E>> ReadAt<E> for F {}

/// The kind of a partition table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scheme {
    /// GUID partition table (UEFI specification, chapter 5).
    Gpt,
    /// Master boot record.
    Mbr,
}

impl fmt::Display for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Scheme::Gpt => "GPT",
            Scheme::Mbr => "MBR",
        })
    }
}

/// A partition, as its table has it: it may reach beyond the end of the disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Partition {
    /// Its number, as Linux and sfdisk(8) count; logical partitions of an MBR begin with 5.
    pub number: u32,
    /// Where it lies, in bytes from the start of the disk.
    pub range: Range<u64>,
    /// Its name in a GPT.
    pub name: String,
}

/// A partition table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    /// Its kind.
    pub scheme: Scheme,
    /// The partitions in use, by number. Without the extended partition, which holds others.
    pub partitions: Vec<Partition>,
}

impl Table {
    /// Reads the partition table of a disk of `size_bytes`; `None` without one. As Linux does: a GPT
    /// counts where a protective MBR announces it; its backup, where the first one is damaged.
    ///
    /// # Errors
    /// Those of `read`; `Corrupt` for a GPT of which both copies are damaged.
    pub fn read<E: From<FormatError>>(
        size_bytes: u64,
        read: &mut impl ReadAt<E>,
    ) -> Result<Option<Table>, E> {
        if size_bytes < 512 {
            return Ok(None);
        }
        let mut sector = [0; 512];
        read(0, &mut sector)?;
        let Some(record) = mbr::Record::decode(&sector) else { return Ok(None) };
        if record.is_protective() {
            let partitions = gpt::read(size_bytes, read)?;
            return Ok(Some(Table { scheme: Scheme::Gpt, partitions }));
        }
        let partitions = mbr::read(&record, size_bytes, read)?;
        let table = Table { scheme: Scheme::Mbr, partitions };
        // The boot sector of a file system looks like a record without partitions.
        Ok(Some(table).filter(|table| !table.partitions.is_empty()))
    }
}

/// A range of `count` sectors from `first` on; `None` where it does not fit into 64 bits.
fn sectors(first: u64, count: u64, sector_bytes: u64) -> Option<Range<u64>> {
    let start = first.checked_mul(sector_bytes)?;
    Some(start..start.checked_add(count.checked_mul(sector_bytes)?)?)
}
