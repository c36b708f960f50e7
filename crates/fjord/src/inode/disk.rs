//! Inodes between memory and the inode table.
//!
//! Owns reading and storing of one inode. Invariants: an inode's table block is read
//! and verified before use; a stored inode carries a right checksum; the next pointer of
//! the orphan list is always taken from [`crate::orphan`].

use fjord_block::plant::{Bug, planted};
use fjord_format::geometry::GOOD_OLD_INODE_BYTES;
use fjord_format::inode::{self, DiskInode, InodeFlags};
use fjord_format::jbd2::fast_commit::compat;
use fjord_format::time::Timestamp;
use fjord_format::{BlockNo, InodeNo};
use fjord_journal::Handle;

use super::extra::{self, Grown};
use super::{Inode, InodeState, Orphan};
use crate::error::{Error, Result};
use crate::fs::FsInner;

/// Metadata blocks that storing an inode can dirty: that of the table, and the superblock for a feature.
pub(crate) const STORE_CREDITS: u32 = 2;
/// A file system with a longer file bears a mark.
const SMALL_FILE_BYTES_MAX: u64 = i32::MAX as u64;

/// Where an inode lies: its block and the bytes in it.
fn place(fs: &FsInner, ino: InodeNo) -> Result<(BlockNo, std::ops::Range<usize>)> {
    let location = fs
        .geo
        .inode_location(ino)
        .ok_or_else(|| Error::corrupt("inode number", format!("{ino} is out of range")))?;
    let table = fs.inode_table(location.group)?;
    let block = table
        .checked_add(u64::from(location.table_block))
        .filter(|&block| fs.geo.contains(block))
        .ok_or_else(|| Error::corrupt("inode table", format!("group {}", location.group)))?;
    let start = location.offset_bytes as usize;
    Ok((block, start..start + usize::from(fs.geo.inode_size)))
}

/// The block of the inode table that an inode lies in.
pub(crate) fn table_block(fs: &FsInner, ino: InodeNo) -> Result<BlockNo> {
    place(fs, ino).map(|(block, _)| block)
}

/// Reads an inode and verifies its checksum.
pub(crate) fn load(fs: &FsInner, ino: InodeNo) -> Result<DiskInode> {
    let (block, range) = place(fs, ino)?;
    let buffer = fs.meta.read(block, |_| Ok(()))?;
    let content = buffer.read();
    let bytes = &content[range];
    let named = |error: fjord_format::FormatError| {
        Error::corrupt(format!("inode {ino}"), error.to_string())
    };
    let disk = DiskInode::decode(bytes, &fs.geo).map_err(named)?;
    if disk.mode == 0 && disk.links_count == 0 {
        // Never used: there may be no checksum to verify.
        return Ok(disk);
    }
    inode::verify_checksum(bytes, &fs.geo, ino).map_err(named)?;
    if crate::attr::FileKind::from_mode(disk.mode).is_none() {
        return Err(Error::corrupt(format!("inode {ino}"), format!("mode {:o}", disk.mode)));
    }
    // With this every block number in the file fits 32 bits, the one after its end too.
    if disk.size > fs.geo.extent_file_size_max_bytes() {
        return Err(Error::corrupt(format!("inode {ino}"), format!("{} bytes", disk.size)));
    }
    Ok(disk)
}

/// Changes an inode's bytes in its table block and seals them.
pub(crate) fn change_bytes<T>(
    fs: &FsInner,
    h: &Handle,
    ino: InodeNo,
    change: impl FnOnce(&mut [u8]) -> Result<T>,
) -> Result<T> {
    change_bytes_and(fs, h, ino, change, |_| {})
}

/// As [`change_bytes`]; `look` sees the sealed bytes.
fn change_bytes_and<T>(
    fs: &FsInner,
    h: &Handle,
    ino: InodeNo,
    change: impl FnOnce(&mut [u8]) -> Result<T>,
    look: impl FnOnce(&[u8]),
) -> Result<T> {
    let (block, range) = place(fs, ino)?;
    let buffer = fs.meta.read(block, |_| Ok(()))?;
    let mut content = h.get_write(&buffer)?;
    let bytes = &mut content[range];
    let result = change(bytes)?;
    inode::update_checksum(bytes, &fs.geo, ino)?;
    look(bytes);
    Ok(result)
}

/// Reads an inode's bytes, with what lies after the fields that [`DiskInode`] knows.
pub(crate) fn read_bytes<T>(
    fs: &FsInner,
    ino: InodeNo,
    read: impl FnOnce(&[u8]) -> Result<T>,
) -> Result<T> {
    let (block, range) = place(fs, ino)?;
    let buffer = fs.meta.read(block, |_| Ok(()))?;
    let content = buffer.read();
    read(&content[range])
}

/// Writes `state.disk` into the inode table as part of `h`'s transaction.
pub(crate) fn store(fs: &FsInner, h: &Handle, inode: &Inode, state: &mut InodeState) -> Result<()> {
    store_and(fs, h, inode, state, |_| {})
}

/// As [`store`]; returns the inode's bytes, as they are in its table now.
pub(crate) fn store_image(
    fs: &FsInner,
    h: &Handle,
    inode: &Inode,
    state: &mut InodeState,
) -> Result<Vec<u8>> {
    let mut image = Vec::new();
    store_and(fs, h, inode, state, |bytes| image = bytes.to_vec())?;
    Ok(image)
}

fn store_and(
    fs: &FsInner,
    h: &Handle,
    inode: &Inode,
    state: &mut InodeState,
    look: impl FnOnce(&[u8]),
) -> Result<()> {
    // The next pointer must not be overtaken by a change of the list.
    let listed = state.orphan == Some(Orphan::List);
    let _frozen = listed.then(|| fs.orphans.freeze());
    if listed {
        state.disk.dtime = fs.orphans.next_of(inode.ino);
    }
    settle_times(fs, &mut state.disk);
    if state.is_file() && state.disk.size > SMALL_FILE_BYTES_MAX {
        fs.mark_large_file(h)?;
    }
    let mut grown = Grown::No;
    let change = |bytes: &mut [u8]| -> Result<()> {
        if state.disk.extra_isize < fs.geo.want_extra_isize {
            grown = extra::grow(bytes, &fs.geo, state.disk.extra_isize);
            if grown != Grown::No {
                state.disk.extra_isize = fs.geo.want_extra_isize;
            }
        }
        Ok(state.disk.encode(bytes, &fs.geo)?)
    };
    change_bytes_and(fs, h, inode.ino, change, look)?;
    if grown == Grown::AttributesToo {
        state.changes.attributes_changed(h.tid());
    }
    state.dirty = false;
    inode.touch_tid(h.changes(), false);
    Ok(())
}

/// Turns times into what the inode can keep, so that memory shows what a remount will.
fn settle_times(fs: &FsInner, disk: &mut DiskInode) {
    for time in [&mut disk.atime, &mut disk.ctime, &mut disk.mtime, &mut disk.crtime] {
        *time = fs.storable((*time).into()).into();
    }
    if fs.geo.inode_size <= GOOD_OLD_INODE_BYTES {
        disk.crtime = Timestamp::default();
    }
}

/// Writes a new inode: what an earlier life left in its bytes is wiped first.
pub(crate) fn store_new(
    fs: &FsInner,
    h: &Handle,
    inode: &Inode,
    state: &mut InodeState,
) -> Result<()> {
    settle_times(fs, &mut state.disk);
    let mut stale = fs.hazards.has_stale_tails(place(fs, inode.ino)?.0);
    if !planted(Bug::EntryBeforeInode) {
        change_bytes(fs, h, inode.ino, |bytes| {
            stale |= compat::has_tail(bytes);
            bytes.fill(0);
            Ok(state.disk.encode(bytes, &fs.geo)?)
        })?;
    }
    if stale {
        // A replay that changes fields only would find another inode's attributes after them.
        state.changes.attributes_changed(h.tid());
    }
    state.dirty = false;
    inode.touch_tid(h.changes(), true);
    Ok(())
}

/// Marks an inode deleted: no links, no mode, a time of deletion.
pub(crate) fn clear(fs: &FsInner, h: &Handle, inode: &Inode, state: &mut InodeState) -> Result<()> {
    state.disk.dtime = fs.now().sec as u32;
    state.disk.links_count = 0;
    state.disk.size = 0;
    state.disk.blocks_512 = 0;
    change_bytes(fs, h, inode.ino, |bytes| Ok(state.disk.encode(bytes, &fs.geo)?))
}

/// Rewrites the next pointer of a listed orphan after its neighbour has gone.
pub(crate) fn relink_orphan(fs: &FsInner, h: &Handle, ino: InodeNo) -> Result<()> {
    change_bytes(fs, h, ino, |bytes| {
        let mut disk = DiskInode::decode(bytes, &fs.geo)?;
        disk.dtime = fs.orphans.next_of(ino);
        Ok(disk.encode(bytes, &fs.geo)?)
    })
}

/// Whether the inode asks for its data to be journaled.
pub(crate) fn has_journal_data_flag(disk: &DiskInode) -> bool {
    disk.flags.contains(InodeFlags::JOURNAL_DATA)
}
