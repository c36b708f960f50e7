//! File data kept in the inode (feature `inline_data`).
//!
//! Owns reading, writing and resizing of inline files and their move to blocks.
//! Invariants: inline data never has pages in the cache; the move to a block writes the
//! data first, so that a crash leaves the file either inline or in its block.

use std::sync::Arc;

use fjord_block::{AlignedBuf, Buf, Class, DeviceExt, Order, Request};
use fjord_format::features::Incompat;
use fjord_format::geometry::GOOD_OLD_INODE_BYTES;
use fjord_format::inline_data::{self, DATA_NAME, InlineData};
use fjord_format::inode::InodeFlags;
use fjord_format::xattr::{NameIndex, XattrRules, XattrSet, parse_ibody};
use fjord_journal::Handle;
use rustix::io::Errno;

use crate::alloc::{Goal, Run};
use crate::error::Result;
use crate::fs::FsInner;
use crate::inode::changes::CommitReason;
use crate::inode::{Inode, InodeState, attr, disk};
use crate::map;

/// Whether the file's data is in its inode.
pub(crate) fn has_inline_data(state: &InodeState) -> bool {
    state.disk.flags.contains(InodeFlags::INLINE_DATA)
}

fn rules(fs: &FsInner) -> XattrRules {
    XattrRules {
        ea_inode: fs.geo.features.incompat.contains(Incompat::EA_INODE),
        inodes_count: fs.geo.inode_count,
    }
}

/// Where the attribute area of an inode starts in its bytes.
fn area_start(state: &InodeState) -> usize {
    usize::from(GOOD_OLD_INODE_BYTES) + usize::from(state.disk.extra_isize)
}

fn contents(fs: &FsInner, inode: &Inode, state: &InodeState) -> Result<Vec<u8>> {
    disk::read_bytes(fs, inode.ino, |bytes| {
        let area = bytes.get(area_start(state)..).unwrap_or_default();
        let view = parse_ibody(area, &rules(fs))?;
        let data = InlineData::parse(&state.disk.i_block, view.as_ref())?;
        Ok(data.contents(state.size)?)
    })
}

fn capacity(fs: &FsInner, inode: &Inode, state: &InodeState) -> Result<u64> {
    disk::read_bytes(fs, inode.ino, |bytes| {
        let area = bytes.get(area_start(state)..).unwrap_or_default();
        let view = parse_ibody(area, &rules(fs))?;
        Ok(inline_data::capacity_bytes(area.len(), view.as_ref()) as u64)
    })
}

/// Reads from an inline file; `offset..offset + buf.len()` lies inside it.
pub(crate) fn read(
    fs: &FsInner,
    inode: &Inode,
    state: &InodeState,
    offset: u64,
    buf: &mut [u8],
) -> Result<usize> {
    let data = contents(fs, inode, state)?;
    let start = usize::try_from(offset).unwrap_or(usize::MAX).min(data.len());
    let part = buf.len().min(data.len() - start);
    buf[..part].copy_from_slice(&data[start..start + part]);
    Ok(part)
}

/// Whether a write belongs into the inode: the file is inline, or empty on a file system
/// with the feature, and the result fits.
pub(crate) fn wants_inline(
    fs: &FsInner,
    inode: &Inode,
    state: &InodeState,
    offset: u64,
    len: usize,
) -> Result<bool> {
    if !fs.geo.features.incompat.contains(Incompat::INLINE_DATA) {
        return Ok(false);
    }
    let empty = state.size == 0 && state.disk.blocks_512 == 0 && state.reserved_blocks == 0;
    if !has_inline_data(state) && !empty {
        return Ok(false);
    }
    Ok(offset.saturating_add(len as u64) <= capacity(fs, inode, state)?)
}

/// Writes into an inline file, or makes an empty file inline.
pub(crate) fn write(
    fs: &Arc<FsInner>,
    inode: &Inode,
    state: &mut InodeState,
    offset: u64,
    data: &[u8],
) -> Result<usize> {
    let mut content = if has_inline_data(state) { contents(fs, inode, state)? } else { Vec::new() };
    // `wants_inline` has bounded offset and length by the size of an inode.
    let start = offset as usize;
    if content.len() < start + data.len() {
        content.resize(start + data.len(), 0);
    }
    content[start..start + data.len()].copy_from_slice(data);
    store(fs, inode, state, &content)?;
    Ok(data.len())
}

/// Changes the size of an inline file. Returns false if the new size does not fit.
pub(crate) fn resize(
    fs: &Arc<FsInner>,
    inode: &Inode,
    state: &mut InodeState,
    size: u64,
) -> Result<bool> {
    if size > capacity(fs, inode, state)? {
        return Ok(false);
    }
    let mut content = contents(fs, inode, state)?;
    content.resize(size as usize, 0);
    store(fs, inode, state, &content)?;
    Ok(true)
}

fn store(fs: &Arc<FsInner>, inode: &Inode, state: &mut InodeState, content: &[u8]) -> Result<()> {
    let handle = fs.start(disk::STORE_CREDITS)?;
    let (head, tail) = inline_data::split(content);
    change_set(fs, &handle, inode, state, |set| {
        set.set(NameIndex::SYSTEM, DATA_NAME, tail)?;
        Ok(())
    })?;
    if !has_inline_data(state) {
        // A log of one file's changes does not tell that it had a map before.
        state.changes.require_commit(handle.tid(), CommitReason::Entangled);
    }
    state.disk.i_block = head;
    state.disk.flags.insert(InodeFlags::INLINE_DATA);
    state.disk.flags.remove(InodeFlags::EXTENTS);
    state.size = content.len() as u64;
    state.disk.size = state.size;
    let now = fs.now();
    attr::set_mtime(&mut state.disk, now);
    attr::set_ctime(&mut state.disk, now);
    inode.touch_tid(handle.changes(), true);
    disk::store(fs, &handle, inode, state)?;
    handle.stop();
    Ok(())
}

fn change_set(
    fs: &FsInner,
    handle: &Handle,
    inode: &Inode,
    state: &InodeState,
    change: impl FnOnce(&mut XattrSet) -> Result<()>,
) -> Result<()> {
    let start = area_start(state);
    disk::change_bytes(fs, handle, inode.ino, |bytes| {
        let area = bytes.get_mut(start..).ok_or(Errno::NOSPC)?;
        let mut set = match parse_ibody(area, &rules(fs))? {
            Some(view) => XattrSet::from_view(&view)?,
            None => XattrSet::new(),
        };
        change(&mut set)?;
        Ok(set.encode_ibody(area)?)
    })
}

/// Moves inline data to a block; does nothing for other files.
pub(crate) fn convert(fs: &Arc<FsInner>, inode: &Arc<Inode>, state: &mut InodeState) -> Result<()> {
    if !has_inline_data(state) {
        return Ok(());
    }
    let data = contents(fs, inode, state)?;
    let run = if data.is_empty() { None } else { Some(write_out(fs, inode, state, &data)?) };
    let credits = map::credits_insert(fs, 1) + 4 + disk::STORE_CREDITS;
    let handle = match fs.start(credits) {
        Ok(handle) => handle,
        Err(error) => {
            if let Some(run) = run {
                fs.unpick(run);
            }
            return Err(error);
        }
    };
    change_set(fs, &handle, inode, state, |set| {
        set.remove(NameIndex::SYSTEM, DATA_NAME);
        Ok(())
    })?;
    // Records of its extents would refer to an inode that has no map yet:
    // `fjord_format::jbd2::fast_commit::compat`.
    state.changes.attributes_changed(handle.tid());
    state.disk.flags.remove(InodeFlags::INLINE_DATA);
    map::init(fs, state);
    if let Some(run) = run {
        fs.use_picked(&handle, run, 1)?;
        map::insert(fs, &handle, inode, state, 0, run.start, run.len, true)?;
        // What was written out waits for a flush still.
        state.carried.mapped_unflushed(handle.tid());
    }
    inode.touch_tid(handle.changes(), true);
    disk::store(fs, &handle, inode, state)?;
    handle.stop();
    Ok(())
}

/// Writes inline data to a freshly picked block and waits for it. The block's
/// reservation is held until the caller has inserted it.
fn write_out(fs: &Arc<FsInner>, inode: &Inode, state: &mut InodeState, data: &[u8]) -> Result<Run> {
    fs.reserve_blocks(1, false)?;
    let picked = Goal::for_file(fs, inode, state, 0).and_then(|goal| fs.pick_blocks(goal, 1));
    let run = match picked {
        Ok(run) => run,
        Err(error) => {
            fs.release_blocks(1);
            return Err(error);
        }
    };
    if let Err(error) = fs.ensure_room(run.start, 1) {
        fs.unpick(run);
        fs.release_blocks(1);
        return Err(error);
    }
    let mut page = AlignedBuf::zeroed(fs.geo.block_size as usize);
    page[..data.len()].copy_from_slice(data);
    let request = Request::Write {
        offset: fs.byte_offset(run.start),
        bufs: vec![Buf::from(page)],
        order: Order::Ordered,
        fua: false,
        class: Class::Sync,
    };
    if let Err(error) = fs.data_device.submit_one(request).wait() {
        fs.unpick(run);
        fs.release_blocks(1);
        return Err(error.into());
    }
    Ok(run)
}
