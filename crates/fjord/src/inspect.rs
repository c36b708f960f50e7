//! Inspection of images that are not mounted.

use std::path::Path;

use fjord_block::FileOptions;
use fjord_journal::recovery::{self, Plan};

use crate::error::Result;
use crate::fs::mount;
use crate::image_name::ImageName;

/// The log of the image at `path` and what a mount would replay from it; `None` without a journal.
/// Writes nothing.
///
/// # Errors
/// As [`crate::Fs::open`]; a log that recovery would refuse.
pub fn log(path: impl AsRef<Path>) -> Result<Option<Plan>> {
    let options = FileOptions { read_only: true, ..FileOptions::default() };
    let device = ImageName::parse(path.as_ref()).open(&options, false)?;
    let Some((map, block_size)) = mount::find_journal(&device)? else { return Ok(None) };
    Ok(Some(recovery::scan(&device, &map, block_size)?))
}

/// Whether the ijournal mark is set in the image at `path`: e2fsck and Linux refuse the image until
/// it is recovered. Writes nothing.
///
/// # Errors
/// As [`log`].
pub fn is_marked(path: impl AsRef<Path>) -> Result<bool> {
    let options = FileOptions { read_only: true, ..FileOptions::default() };
    let device = ImageName::parse(path.as_ref()).open(&options, false)?;
    let Some((map, block_size)) = mount::find_journal(&device)? else { return Ok(false) };
    Ok(recovery::is_marked(&device, &map, block_size)?)
}

/// Discards the i-transactions (fsynced changes since the last commit) of an image whose areas, or
/// whose log with the mark, are damaged: see [`recovery::drop_i_transactions`]. Returns whether
/// there was a mark.
///
/// # Errors
/// As [`crate::Fs::open`]; an invalid journal superblock.
pub fn drop_fsyncs(path: impl AsRef<Path>) -> Result<bool> {
    let device = ImageName::parse(path.as_ref()).open(&FileOptions::default(), false)?;
    let Some((map, block_size)) = mount::find_journal(&device)? else { return Ok(false) };
    Ok(recovery::drop_i_transactions(&device, &map, block_size)?)
}
