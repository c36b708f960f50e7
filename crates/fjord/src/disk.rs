//! What lies on a device where no ext2, ext3 or ext4 was found: for messages that say what to do.
//!
//! Owns [`DiskContents`] and [`Partitions`]. Invariant: it only reads, and what it reads is hostile.

use std::fmt;
use std::ops::Range;

use fjord_format::FormatError;
use fjord_format::disk::{Partition, ReadAt, Scheme, Table};
use fjord_mkfs::held;

/// What is on a device that has no superblock of ext2, ext3 or ext4.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DiskContents {
    /// Nothing that is known.
    Unknown,
    /// DiskContents with a signature, described: `"an XFS file system"`.
    Known(&'static str),
    /// A disk with partitions.
    Disk(Partitions),
}

impl DiskContents {
    /// Looks at a device of `size_bytes`.
    ///
    /// # Errors
    /// Those of `read`.
    pub fn look<E: From<FormatError>>(
        size_bytes: u64,
        mut read: impl ReadAt<E>,
    ) -> Result<DiskContents, E> {
        let Some(what) = held::known(size_bytes, &mut read)? else {
            return Ok(DiskContents::Unknown);
        };
        if held::is_partition_table(what)
            && let Some(table) = Table::read(size_bytes, &mut read)?
        {
            return Ok(DiskContents::Disk(Partitions::look(table, size_bytes, &mut read)?));
        }
        Ok(DiskContents::Known(what))
    }

    /// The number of the first partition with a file system that fjord opens.
    pub fn usable_partition(&self) -> Option<u32> {
        let DiskContents::Disk(partitions) = self else { return None };
        let mut found = partitions.found.iter();
        found.find(|(_, what)| *what == Some(held::EXT4)).map(|(found, _)| found.number)
    }
}

impl fmt::Display for DiskContents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DiskContents::Unknown => {
                f.write_str("; check the path, or create one with `fjord mkfs`")
            }
            DiskContents::Known(what) => match held::unpacked_by(what) {
                Some(command) => write!(f, " but {what}; unpack it first: `{command}`"),
                // A part of a disk: nobody should write a file system over its partitions.
                None if held::is_partition_table(what) => {
                    write!(f, " but {what}; check the path and the offset")
                }
                None => write!(
                    f,
                    " but {what}; check the path, or replace it with `fjord mkfs --force`"
                ),
            },
            DiskContents::Disk(partitions) => {
                write!(f, " but a disk with {partitions}; name a partition as IMAGE@NUMBER")
            }
        }
    }
}

/// The partitions of a disk, and what is in them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Partitions {
    scheme: Scheme,
    /// With a description of the contents where they are known.
    found: Vec<(Partition, Option<&'static str>)>,
}

impl Partitions {
    /// Looks at the partitions of a disk of `size_bytes`.
    ///
    /// # Errors
    /// Those of `read`.
    pub(crate) fn look<E: From<FormatError>>(
        table: Table,
        size_bytes: u64,
        read: &mut impl ReadAt<E>,
    ) -> Result<Partitions, E> {
        let mut found = Vec::with_capacity(table.partitions.len());
        for partition in table.partitions {
            let inside = partition.range.end <= size_bytes;
            let Range { start, end } = partition.range;
            let what = match inside {
                true => held::known(end - start, &mut |offset, bytes| read(start + offset, bytes))?,
                false => Some("beyond the end of the file"),
            };
            found.push((partition, what));
        }
        Ok(Partitions { scheme: table.scheme, found })
    }
}

impl fmt::Display for Partitions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        /// The rest is counted.
        const SHOWN: usize = 16;
        if self.found.is_empty() {
            return write!(f, "an empty partition table ({})", self.scheme);
        }
        write!(f, "these partitions ({}):", self.scheme)?;
        for (partition, what) in self.found.iter().take(SHOWN) {
            let Range { start, end } = partition.range;
            let mib = (end - start) as f64 / f64::from(1 << 20);
            write!(f, " {}: {}, {mib:.1} MiB", partition.number, what.unwrap_or("unknown"))?;
            if !partition.name.is_empty() {
                write!(f, ", {:?}", partition.name)?;
            }
            f.write_str(if partition.number == self.last() { "" } else { ";" })?;
        }
        match self.found.len().saturating_sub(SHOWN) {
            0 => Ok(()),
            more => write!(f, " and {more} more"),
        }
    }
}

impl Partitions {
    fn last(&self) -> u32 {
        self.found.last().map_or(0, |(last, _)| last.number)
    }
}
