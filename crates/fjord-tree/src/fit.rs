//! Computes the size of an image for given contents.
//!
//! Invariant: the space that an image of some size offers is never guessed: it is formatted in
//! memory, which costs only the few blocks that are not zero.

use fjord_block::MemDevice;
use fjord_mkfs::{MkfsError, MkfsOptions, Report};

use crate::contents::Contents;
use crate::error::{Result, TreeError};

const MIB: u64 = 1 << 20;
/// Room beyond the contents, unless it is given: a tenth of them and this much.
const SLACK_BYTES: u64 = 4 * MIB;
/// Smallest image that is proposed, in bytes, unless the room is given.
const SIZE_MIN_BYTES: u64 = 8 * MIB;
/// Most images that are tried.
const TRIES_MAX: u32 = 100;
/// Bytes of extra space for one more inode, as mke2fs has it for most images.
const INODE_RATIO: u64 = 16 << 10;
/// Inodes that a new image has in use already.
const USED_INODES: u64 = 11;

/// Room in an image beyond its contents.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Room {
    /// A tenth of the contents, and 4 MiB.
    #[default]
    Usual,
    /// So many bytes.
    Bytes(u64),
}

impl Room {
    /// Inodes for what is put there later.
    fn extra_inodes(self) -> u64 {
        match self {
            Room::Usual => 0,
            Room::Bytes(bytes) => extra_inodes(bytes),
        }
    }

    /// Blocks to be free for contents of `blocks` blocks, themselves among them.
    fn with_contents(self, blocks: u64, block_size: u32) -> u64 {
        let shift = block_size.trailing_zeros();
        match self {
            Room::Usual => blocks + blocks / 10 + (SLACK_BYTES >> shift),
            // Blocks of extent trees are in the slack above; here they are counted generously.
            Room::Bytes(bytes) => blocks + blocks / 64 + 16 + bytes.div_ceil(1 << shift),
        }
    }
}

/// Inodes that go with so many bytes of extra space.
pub(crate) fn extra_inodes(bytes: u64) -> u64 {
    bytes / INODE_RATIO
}

impl Contents {
    /// The options with what they leave open chosen for these contents: the size as the smallest
    /// that holds them with `room`, in whole MiB; more inodes than the usual ratio gives where they
    /// need more.
    ///
    /// # Errors
    /// As [`format`](fjord_mkfs::format), for options that cannot be had.
    pub fn fit(&self, options: &MkfsOptions, room: Room) -> Result<MkfsOptions> {
        let mut fitted = options.clone();
        let inodes_open = options.inode_count.is_none() && options.inode_ratio.is_none();
        let smallest = match room {
            Room::Usual => SIZE_MIN_BYTES,
            Room::Bytes(_) => MIB,
        };
        let smallest = smallest.max(self.bytes).next_multiple_of(MIB);
        let mut size_bytes = options.size_bytes.unwrap_or(smallest);
        for _ in 0..TRIES_MAX {
            fitted.size_bytes = Some(size_bytes);
            let Some(report) = trial(&fitted, options.size_bytes.is_none())? else {
                size_bytes = size_bytes.saturating_add(size_bytes / 4).next_multiple_of(MIB);
                continue;
            };
            let values = match report.features.iter().any(|name| name == "ea_inode") {
                true => self.value_inodes(report.block_size),
                false => 0,
            };
            let inodes_wanted = self.inodes_wanted(values, room);
            let is_short = inodes_open && report.inode_count < inodes_wanted;
            if is_short && fitted.inode_count != Some(inodes_wanted) {
                fitted.inode_count = Some(inodes_wanted);
                continue;
            }
            let contents = self.blocks(report.block_size).saturating_add(values);
            let wanted = room.with_contents(contents, report.block_size);
            let offered = report.free_blocks.saturating_sub(report.reserved_blocks);
            if options.size_bytes.is_some() || offered >= wanted {
                return Ok(fitted);
            }
            // Part of what is added goes to metadata and the reserve, so this takes a few rounds.
            let missing_bytes = (wanted - offered).saturating_mul(report.block_size.into());
            size_bytes = size_bytes.saturating_add(missing_bytes).next_multiple_of(MIB);
        }
        Err(TreeError::Usage(
            "no size was found that holds the contents with these options; give a size".to_owned(),
        ))
    }
}

impl Contents {
    fn inodes_wanted(&self, values: u64, room: Room) -> u32 {
        let inodes = self.inodes.saturating_add(values);
        let inodes = inodes.saturating_add(inodes / 20 + USED_INODES + 16);
        u32::try_from(inodes.saturating_add(room.extra_inodes())).unwrap_or(u32::MAX)
    }
}

/// Formats an image in memory; `None` if it is too small for that and `grows`.
fn trial(options: &MkfsOptions, grows: bool) -> Result<Option<Report>> {
    match fjord_mkfs::format(&MemDevice::new(0), options) {
        Err(MkfsError::TooSmall(_)) if grows => Ok(None),
        made => Ok(Some(made?)),
    }
}
