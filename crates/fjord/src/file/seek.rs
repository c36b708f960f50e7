//! SEEK_DATA, SEEK_HOLE, fiemap and bmap: where a file has data.
//!
//! Owns the merge of the block map with delayed data in the page cache. Invariant: a
//! page that is not on the device yet counts as data.

use std::sync::Arc;

use fjord_block::Class;
use rustix::io::Errno;

use crate::error::Result;
use crate::file::{inline, writeback};
use crate::fs::FsInner;
use crate::inode::{Inode, InodeState};
use crate::map::{self, MapKind};

/// One extent of [`crate::InodeRef::fiemap`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FiemapExtent {
    /// Offset in the file in bytes.
    pub logical: u64,
    /// Offset on the device in bytes; meaningless with `delalloc` or `inline`.
    pub physical: u64,
    /// Length in bytes.
    pub length: u64,
    /// Allocated but not written: reads as zeros.
    pub unwritten: bool,
    /// Not allocated yet.
    pub delalloc: bool,
    /// Stored in the inode.
    pub inline: bool,
    /// The last extent of the file.
    pub last: bool,
}

/// The offset of the next data (or hole) at or after `offset`.
///
/// # Errors
/// `ENXIO` if `offset` is at or after the end of the file, or no data follows.
pub(crate) fn seek(fs: &FsInner, inode: &Inode, offset: u64, want_data: bool) -> Result<u64> {
    fs.check_alive()?;
    let state = inode.state.read();
    if offset >= state.size {
        return Err(Errno::NXIO.into());
    }
    if inline::has_inline_data(&state) {
        return Ok(if want_data { offset } else { state.size });
    }
    let block_size = u64::from(fs.geo.block_size);
    let end = state.size.div_ceil(block_size);
    let mut lblk = offset / block_size;
    while lblk < end {
        let (is_data, len) = data_at(fs, inode, &state, lblk, end)?;
        if is_data == want_data {
            return Ok((lblk * block_size).max(offset));
        }
        lblk += u64::from(len);
    }
    if want_data { Err(Errno::NXIO.into()) } else { Ok(state.size) }
}

/// Whether block `lblk` holds data, and for how many blocks that stays so.
fn data_at(
    fs: &FsInner,
    inode: &Inode,
    state: &InodeState,
    lblk: u64,
    end: u64,
) -> Result<(bool, u32)> {
    let first = lblk as u32;
    let found = map::lookup(fs, inode, state, first, (end - lblk).min(u64::from(u32::MAX)) as u32)?;
    if let MapKind::Written(_) = found.kind {
        return Ok((true, found.len));
    }
    if inode.pages.is_pending(first) {
        return Ok((true, 1));
    }
    let next = inode.pages.next_pending(lblk).map_or(u64::MAX, u64::from);
    Ok((false, u64::from(found.len).min(next - lblk).max(1) as u32))
}

/// The extents of the file in a byte range.
///
/// # Errors
/// I/O errors and corruption.
pub(crate) fn fiemap(
    fs: &FsInner,
    inode: &Inode,
    offset: u64,
    length: u64,
) -> Result<Vec<FiemapExtent>> {
    fs.check_alive()?;
    let state = inode.state.read();
    if inline::has_inline_data(&state) {
        return Ok(vec![FiemapExtent {
            logical: 0,
            physical: 0,
            length: state.size,
            unwritten: false,
            delalloc: false,
            inline: true,
            last: true,
        }]);
    }
    if !map::has_map(&state) {
        return Ok(Vec::new());
    }
    let block_size = u64::from(fs.geo.block_size);
    let end = offset.saturating_add(length).div_ceil(block_size).min(u64::from(u32::MAX));
    let mut lblk = offset / block_size;
    let mut extents: Vec<FiemapExtent> = Vec::new();
    while lblk < end {
        let most = (end - lblk).min(u64::from(u32::MAX)) as u32;
        let found = map::lookup(fs, inode, &state, lblk as u32, most)?;
        let mut len = found.len.max(1);
        let pending = inode.pages.is_pending(lblk as u32);
        let (start, unwritten) = match found.kind {
            MapKind::Written(start) => (Some(start), false),
            MapKind::Unwritten(start) => (Some(start), true),
            MapKind::Hole => {
                let next = inode.pages.next_pending(lblk).map_or(u64::MAX, u64::from);
                len = if pending { 1 } else { u64::from(len).min(next - lblk) as u32 };
                (None, false)
            }
        };
        if start.is_some() || pending {
            push_merged(
                &mut extents,
                FiemapExtent {
                    logical: lblk * block_size,
                    physical: start.map_or(0, |s| fs.byte_offset(s)),
                    length: u64::from(len) * block_size,
                    unwritten,
                    delalloc: start.is_none(),
                    inline: false,
                    last: false,
                },
            );
        }
        lblk += u64::from(len);
    }
    if let Some(last) = extents.last_mut() {
        last.last = last.logical + last.length >= state.size;
    }
    Ok(extents)
}

/// The block on the device of block `lblk` of the file, if it has been written.
///
/// # Errors
/// I/O errors and corruption; those of writing back what has no place yet.
pub(crate) fn bmap(fs: &Arc<FsInner>, inode: &Arc<Inode>, lblk: u64) -> Result<Option<u64>> {
    fs.check_alive()?;
    if !fs.is_read_only() {
        writeback::write_inode(fs, inode, 0..u64::MAX, writeback::Mode::DataFirst(Class::Sync))?;
    }
    let state = inode.state.read();
    if inline::has_inline_data(&state) || !map::has_map(&state) {
        return Ok(None);
    }
    let Ok(lblk) = u32::try_from(lblk) else { return Ok(None) };
    match map::lookup(fs, inode, &state, lblk, 1)?.kind {
        MapKind::Written(block) => Ok(Some(block.0)),
        MapKind::Unwritten(_) | MapKind::Hole => Ok(None),
    }
}

fn push_merged(extents: &mut Vec<FiemapExtent>, next: FiemapExtent) {
    if let Some(last) = extents.last_mut() {
        let adjacent = last.logical + last.length == next.logical
            && last.unwritten == next.unwritten
            && last.delalloc == next.delalloc
            && (last.delalloc || last.physical + last.length == next.physical);
        if adjacent {
            last.length += next.length;
            return;
        }
    }
    extents.push(next);
}
