//! Block maps for images without extents.
//!
//! Invariant: indirect blocks are taken from the space in the order in which they are needed.

use std::collections::BTreeMap;

use fjord_format::blockmap::{BlockPath, read_pointer, write_pointer};
use fjord_format::geometry::Geometry;
use fjord_format::inode::I_BLOCK_BYTES;
use fjord_format::types::{BlockNo, LogicalBlock};

use crate::error::{Result, usage};
use crate::space::{BlockRun, Space};

/// Maps the runs, in order, as file blocks from 0 on. Returns the number of indirect blocks
/// and their contents.
pub(crate) fn map_blocks(
    i_block: &mut [u8; I_BLOCK_BYTES],
    runs: &[BlockRun],
    geometry: &Geometry,
    space: &mut Space<'_>,
) -> Result<(u64, BTreeMap<BlockNo, Vec<u8>>)> {
    let mut indirect: BTreeMap<BlockNo, Vec<u8>> = BTreeMap::new();
    let data = runs.iter().flat_map(|run| (0..run.len).map(|i| BlockNo(run.start.0 + i)));
    for (logical, block) in data.enumerate() {
        let path = u32::try_from(logical)
            .ok()
            .and_then(|logical| BlockPath::to(LogicalBlock(logical), geometry))
            .ok_or_else(|| usage("the journal is too long for a block map"))?;
        let mut at = None;
        let (last, way) = path.offsets().split_last().ok_or_else(|| usage("an empty path"))?;
        for offset in way {
            let node = node(i_block, &mut indirect, at)?;
            let next = match read_pointer(node, *offset, geometry)? {
                Some(next) => next,
                None => {
                    let place = space.allocate(block, 1)?[0].start;
                    write_pointer(node, *offset, Some(place))?;
                    indirect.insert(place, vec![0; geometry.block_size as usize]);
                    place
                }
            };
            at = Some(next);
        }
        write_pointer(node(i_block, &mut indirect, at)?, *last, Some(block))?;
    }
    Ok((indirect.len() as u64, indirect))
}

/// The bytes that hold pointers: the inode's own or those of an indirect block.
fn node<'a>(
    i_block: &'a mut [u8; I_BLOCK_BYTES],
    indirect: &'a mut BTreeMap<BlockNo, Vec<u8>>,
    at: Option<BlockNo>,
) -> Result<&'a mut [u8]> {
    match at {
        None => Ok(i_block),
        Some(block) => indirect
            .get_mut(&block)
            .map(Vec::as_mut_slice)
            .ok_or_else(|| usage(format!("indirect block {block} was never made"))),
    }
}
