//! The formatter: ext4 images as mke2fs makes them, without root.
//!
//! [`format()`] plans the whole image in memory (layout, space, special files) and then writes
//! the few blocks that are not zero. Invariant: until the last write, of the superblock, the
//! device holds no valid file system.
//!
//! ```
//! use fjord_block::MemDevice;
//! use fjord_mkfs::{MkfsOptions, format};
//!
//! let device = MemDevice::new(64 << 20);
//! let report = format(&device, &MkfsOptions::default())?;
//! assert_eq!(report.block_size, 1024);
//! # Ok::<(), fjord_mkfs::MkfsError>(())
//! ```

#![forbid(unsafe_code)]

mod blockmap;
mod error;
mod files;
pub mod held;
mod layout;
mod options;
mod space;
mod write;

use std::time::{SystemTime, UNIX_EPOCH};

use fjord_block::{Device, IoErrorKind};
use fjord_format::features::Compat;
use fjord_format::geometry::Geometry;
use fjord_format::superblock::RawSuperblock;
use fjord_format::types::GroupNo;

pub use error::{MkfsError, Result};
pub use held::{Held, held};
pub use options::{IjournalAreas, JournalSize, MkfsOptions, supported_features};

use files::Files;
use space::Space;
use write::ImageWriter;

/// Report of a new image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Block size in bytes.
    pub block_size: u32,
    /// Blocks of the file system.
    pub block_count: u64,
    /// Blocks kept for the superuser.
    pub reserved_blocks: u64,
    /// Blocks that are free.
    pub free_blocks: u64,
    /// Inodes of the file system.
    pub inode_count: u32,
    /// Block groups.
    pub group_count: u32,
    /// Blocks of the journal, fast-commit area included; 0 without one.
    pub journal_blocks: u32,
    /// Areas of the i-journal.
    pub area_count: u32,
    /// Blocks of each area.
    pub area_blocks: u32,
    /// Names of the features.
    pub features: Vec<String>,
    /// UUID.
    pub uuid: [u8; 16],
    /// Bytes that were written to the device.
    pub bytes_written: u64,
}

/// Blocks that an image without a journal may have when it is to have one by default.
const JOURNAL_IMAGE_BLOCKS_MIN: u64 = 2048;

/// Makes a file system on the device; what it held is lost. A file or memory device is set to
/// `options.size_bytes` and emptied, space that was allocated to it included.
///
/// # Errors
/// [`MkfsError::Usage`] and [`MkfsError::Format`] before anything is written, for unsupported
/// parameters; [`MkfsError::Io`] when the device fails.
pub fn format(device: &dyn Device, options: &MkfsOptions) -> Result<Report> {
    let size_bytes = options.size_bytes.unwrap_or_else(|| device.size_bytes());
    let mut sb = plan(options, size_bytes)?;
    let geometry = Geometry::from_superblock(&sb)?;
    let mut space = Space::new(&geometry)?;
    let fixed = used_blocks(&geometry, &space);
    let files = Files::make(options, &mut sb, &geometry, &mut space)?;
    count_free(&mut sb, &geometry, &space, &files, fixed);

    let is_empty = empty(device, size_bytes)?;
    let mut writer = ImageWriter::new(device, &geometry);
    writer.begin(is_empty)?;
    if !is_empty {
        writer.clear(&files, &space)?;
    }
    writer.files(&files, &space)?;
    let descs = writer.groups(&files, &space, is_empty)?;
    writer.descriptors(&descs)?;
    writer.finish(&mut sb)?;
    tracing::info!(bytes = writer.bytes_written, "made a file system");
    Ok(Report {
        block_size: geometry.block_size,
        block_count: geometry.block_count,
        reserved_blocks: sb.r_blocks_count(),
        free_blocks: sb.free_blocks_count(),
        inode_count: geometry.inode_count,
        group_count: geometry.group_count,
        journal_blocks: files.journal_blocks,
        area_count: files.areas.map_or(0, |areas| areas.area_count),
        area_blocks: files.areas.map_or(0, |areas| areas.area_blocks),
        features: sb.features().names(),
        uuid: sb.s_uuid,
        bytes_written: writer.bytes_written,
    })
}

/// The superblock that the options call for.
fn plan(options: &MkfsOptions, size_bytes: u64) -> Result<RawSuperblock> {
    let mut features = options::resolve_features(options)?;
    let now_seconds = options.time_seconds.unwrap_or_else(|| {
        SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
    });
    let sb = layout::superblock(options, features, size_bytes, now_seconds)?;
    let wants_journal = features.compat.contains(Compat::HAS_JOURNAL);
    let too_small = sb.blocks_count() < JOURNAL_IMAGE_BLOCKS_MIN;
    if !(wants_journal && too_small && options.journal == JournalSize::Auto) {
        return Ok(sb);
    }
    features.compat.remove(Compat::HAS_JOURNAL | Compat::FAST_COMMIT | Compat::ORPHAN_FILE);
    layout::superblock(options, features, size_bytes, now_seconds)
}

/// Empties the device where that is cheap. Returns whether all of it reads as zeroes now.
fn empty(device: &dyn Device, size_bytes: u64) -> Result<bool> {
    match device.set_size(0) {
        Ok(()) => {
            device.set_size(size_bytes)?;
            Ok(true)
        }
        // A file that keeps its size, such as a modelled device, says EPERM.
        Err(error)
            if matches!(error.kind, IoErrorKind::Unsupported | IoErrorKind::Os(libc::EPERM)) =>
        {
            let has = device.size_bytes();
            if has < size_bytes {
                return Err(error::usage(format!(
                    "the device has {has} bytes, {size_bytes} are needed"
                )));
            }
            Ok(false)
        }
        Err(error) => Err(error.into()),
    }
}

fn used_blocks(geometry: &Geometry, space: &Space<'_>) -> u64 {
    geometry.block_count - geometry.first_data_block.0 - free_blocks(geometry, space)
}

fn free_blocks(geometry: &Geometry, space: &Space<'_>) -> u64 {
    (0..geometry.group_count).map(|group| u64::from(space.free_blocks(GroupNo(group)))).sum()
}

/// Sets what the superblock counts: free blocks and inodes, and fixed metadata.
fn count_free(
    sb: &mut RawSuperblock,
    geometry: &Geometry,
    space: &Space<'_>,
    files: &Files<'_>,
    fixed: u64,
) {
    sb.set_free_blocks_count(free_blocks(geometry, space));
    sb.s_free_inodes_count.set(geometry.inode_count - files.inodes_used);
    let overhead = geometry.first_data_block.0 + fixed + u64::from(files.journal_blocks);
    // Zero makes Linux count for itself.
    sb.s_overhead_clusters.set(u32::try_from(overhead).unwrap_or(0));
}

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
