//! The smallest image that holds given contents.
//!
//! The space that contents need is known only once they are in an image; the space that an image of
//! some size has is known once it is formatted, which is cheap in memory. So a first, large image
//! gives the number of blocks and inodes, a search finds the smallest size with as many, and a
//! second image of that size proves it. With another layout the contents may need a few more blocks
//! (for extent trees), or fewer; then the search continues with the result of the last image.
//!
//! Invariant: the result was built; no smaller size that was tried held the contents.

use fjord_block::MemDevice;
use fjord_mkfs::{IjournalAreas, JournalSize, MkfsError, MkfsOptions, Report};

use crate::builder::Populated;
use crate::error::{Full, Result, TreeError};

/// Images that are built at most.
const BUILDS_MAX: u32 = 8;
/// Sizes are whole multiples of so many bytes, if not of larger blocks.
const UNIT_BYTES_MIN: u64 = 4096;
/// Blocks of the smallest journal, as mke2fs has it.
const JOURNAL_BLOCKS: u64 = 1024;
/// Below so many blocks an image has no journal, unless one is asked for, as mke2fs has it.
const JOURNAL_IMAGE_BLOCKS: u64 = 2048;
/// Largest size that is tried, in blocks.
const BLOCKS_MAX: u64 = 1 << 32;

/// What contents need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Need {
    /// Free blocks.
    blocks: u64,
    inodes: u64,
}

impl Need {
    fn of(filled: &Populated, extra_blocks: u64) -> Need {
        Need { blocks: filled.blocks.saturating_add(extra_blocks), inodes: filled.inodes }
    }
}

/// The options of an image that is to be as small as it can be: a short journal, no areas for
/// i-transactions, unless `options` ask for them.
pub fn small(options: &MkfsOptions) -> MkfsOptions {
    let mut small = options.clone();
    if small.ijournal == IjournalAreas::Auto {
        small.ijournal = IjournalAreas::None;
    }
    small
}

/// Builds images by `build`, each in place of the one before, and leaves the smallest that holds the
/// contents with `extra_bytes` of free space. `options` are those of [`small`], `roomy` the same for
/// an image that has more than enough room.
///
/// # Errors
/// Those of `build`, but for the lack of space in an image that was tried.
pub fn shrink(
    options: &MkfsOptions,
    roomy: &MkfsOptions,
    extra_bytes: u64,
    mut build: impl FnMut(&MkfsOptions) -> Result<(Report, Populated)>,
) -> Result<(Report, Populated)> {
    let mut last = build(roomy)?;
    let extra_blocks = extra_bytes.div_ceil(last.0.block_size.into());
    let mut need = Need::of(&last.1, extra_blocks);
    let mut current = roomy.clone();
    let mut best: Option<MkfsOptions> = None;
    // No smaller one is tried again.
    let mut too_small_bytes = 0;
    for _ in 1..BUILDS_MAX {
        let next = smallest(options, last.0.block_size, need, too_small_bytes)?;
        let reached = best.as_ref().and_then(|best| best.size_bytes);
        if reached.is_some_and(|reached| next.size_bytes >= Some(reached)) {
            break;
        }
        current = next;
        match build(&current) {
            Ok(built) if offers(&built.0, &built.1, extra_blocks) => {
                need = Need::of(&built.1, extra_blocks);
                (last, best) = (built, Some(current.clone()));
            }
            Ok((_, filled)) => {
                // The contents fit, the extra space does not.
                need = Need::of(&filled, extra_blocks);
                too_small_bytes = current.size_bytes.unwrap_or(0);
            }
            Err(TreeError::Full { of: Full::Space { .. } | Full::Inodes { .. }, .. }) => {
                too_small_bytes = current.size_bytes.unwrap_or(0);
                need.blocks = need.blocks.saturating_add(1 + need.blocks / 512);
            }
            Err(error) => return Err(error),
        }
    }
    // The one that stands there is the last that was built.
    match best {
        Some(best) if best.size_bytes != current.size_bytes => build(&best),
        Some(_) => Ok(last),
        None => build(roomy),
    }
}

fn offers(report: &Report, filled: &Populated, extra_blocks: u64) -> bool {
    report.free_blocks.saturating_sub(filled.blocks) >= extra_blocks
}

/// The smallest image above `above_bytes` that offers what is needed.
fn smallest(
    options: &MkfsOptions,
    block_size: u32,
    need: Need,
    above_bytes: u64,
) -> Result<MkfsOptions> {
    let mut base = options.clone();
    base.block_size = Some(block_size);
    if options.inode_count.is_none() && options.inode_ratio.is_none() {
        base.inode_count = Some(u32::try_from(need.inodes).unwrap_or(u32::MAX));
    }
    let unit = UNIT_BYTES_MIN.max(block_size.into());
    let bytes = |blocks: u64| blocks.saturating_mul(block_size.into());
    let first = above_bytes / unit + 1;
    if options.journal == JournalSize::Auto {
        // Without a journal first, as images of that size are.
        let end = bytes(JOURNAL_IMAGE_BLOCKS) / unit;
        if let Some(found) = search(&base, unit, first..end, need)? {
            return Ok(found);
        }
        base.journal = JournalSize::Bytes(bytes(JOURNAL_BLOCKS));
    }
    let first = if base.journal == options.journal {
        first
    } else {
        first.max(bytes(JOURNAL_IMAGE_BLOCKS) / unit)
    };
    let found = search(&base, unit, first..bytes(BLOCKS_MAX) / unit, need)?;
    found.ok_or_else(|| TreeError::Usage("no image is large enough".to_owned()))
}

/// The first size of `range`, in units of bytes, that offers what is needed.
fn search(
    base: &MkfsOptions,
    unit: u64,
    range: std::ops::Range<u64>,
    need: Need,
) -> Result<Option<MkfsOptions>> {
    let at = |size: u64| MkfsOptions { size_bytes: Some(size * unit), ..base.clone() };
    let fits = |size: u64| -> Result<bool> {
        match fjord_mkfs::format(&MemDevice::new(0), &at(size)) {
            Ok(report) => Ok(report.free_blocks >= need.blocks),
            Err(MkfsError::TooSmall(_)) => Ok(false),
            Err(error) => Err(error.into()),
        }
    };
    if range.is_empty() {
        return Ok(None);
    }
    // The contents alone are a bound from below; from there on in steps that grow.
    let block_size = u64::from(base.block_size.unwrap_or(1024));
    let contents = need.blocks.saturating_mul(block_size) / unit;
    let (mut below, mut step) = (range.start.max(contents).saturating_sub(1), 16);
    let mut above = loop {
        let tried = below.saturating_add(step).min(range.end - 1);
        if fits(tried)? {
            break tried;
        }
        if tried + 1 >= range.end {
            return Ok(None);
        }
        (below, step) = (tried, step * 2);
    };
    while above - below > 1 {
        let middle = below + (above - below) / 2;
        match fits(middle)? {
            true => above = middle,
            false => below = middle,
        }
    }
    Ok(Some(at(above)))
}
