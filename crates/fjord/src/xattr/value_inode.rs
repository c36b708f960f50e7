//! Values in inodes of their own (feature `ea_inode`).
//!
//! Invariants: a value inode has the flag `EA_INODE`, one link while it is referred to, its
//! value in blocks that are journaled like metadata, the hash of the value in its access time
//! and the count of references in its change time (upper half) and version (lower half).

use std::sync::Arc;

use fjord_format::InodeNo;
use fjord_format::inode::{DiskInode, InodeFlags};
use fjord_format::time::Timestamp;
use fjord_format::xattr::{self as format, XattrSet, XattrValue};
use fjord_journal::Handle;
use rustix::io::Errno;

use super::{Garbage, damaged};
use crate::alloc::INODE_CREDITS;
use crate::attr::S_IFREG;
use crate::error::Result;
use crate::fs::FsInner;
use crate::inode::{Inode, InodeState, disk, table};
use crate::map::{self, MapKind};
use crate::orphan;

/// Metadata blocks that dropping a reference can dirty.
pub(super) const CREDITS_DROP: u32 = 2 * disk::STORE_CREDITS + orphan::CREDITS;

/// A value inode as an attribute names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) ino: InodeNo,
    pub(super) size_bytes: u32,
}

/// A value inode that was just made, with one reference.
pub(super) struct Fresh {
    pub(super) inode: Arc<Inode>,
    pub(super) place: Place,
    pub(super) hash: u32,
}

/// Where the value is, if it is in an inode.
pub(super) fn place_of(value: &XattrValue) -> Option<Place> {
    match *value {
        XattrValue::EaInode { inode, size_bytes } => Some(Place { ino: inode, size_bytes }),
        XattrValue::Bytes(_) => None,
    }
}

/// All value inodes that a set refers to.
pub(super) fn places(set: &XattrSet) -> Vec<Place> {
    set.iter().filter_map(|xattr| place_of(xattr.value())).collect()
}

/// What the value inodes of a set add to the `i_blocks` of an inode that refers to them, in
/// units of 512 bytes, as in Linux.
pub(super) fn sectors(fs: &FsInner, set: &XattrSet) -> u64 {
    places(set).iter().map(|place| place.sectors(fs)).sum()
}

impl Place {
    /// As [`sectors`], for one value.
    pub(super) fn sectors(self, fs: &FsInner) -> u64 {
        u64::from(self.size_bytes.div_ceil(fs.geo.block_size)) * u64::from(fs.geo.block_size / 512)
    }
}

/// The value inode, checked to be one. `owner` is named in errors.
fn open(fs: &FsInner, owner: &Inode, place: Place) -> Result<Arc<Inode>> {
    let bad = || damaged(owner, format_args!("inode {} holds no value", place.ino));
    if place.ino == owner.ino || place.ino < fs.geo.first_inode {
        return Err(bad());
    }
    let inode = table::get(fs, place.ino)
        .map_err(|error| if error.is(Errno::STALE) { bad() } else { error })?;
    let good = {
        let state = inode.state.read();
        state.is_file()
            && state.disk.flags.contains(InodeFlags::EA_INODE)
            && state.disk.links_count != 0
            && !state.dead
    };
    if good { Ok(inode) } else { Err(bad()) }
}

/// Reads a value, and checks and returns its hash.
pub(super) fn read(fs: &FsInner, owner: &Inode, place: Place) -> Result<(Vec<u8>, u32)> {
    let inode = open(fs, owner, place)?;
    let state = inode.state.read();
    let bad = |detail: &str| damaged(owner, format_args!("value inode {}: {detail}", place.ino));
    if state.size != u64::from(place.size_bytes) || place.size_bytes > format::XATTR_SIZE_MAX {
        return Err(bad("its size is another one"));
    }
    let size = place.size_bytes as usize;
    let mut value = Vec::with_capacity(size);
    for lblk in 0..place.size_bytes.div_ceil(fs.geo.block_size) {
        let MapKind::Written(block) = map::lookup(fs, &inode, &state, lblk, 1)?.kind else {
            return Err(bad("a block is missing"));
        };
        let buffer = fs.meta.read(block, |_| Ok(()))?;
        let bytes = buffer.read();
        let wanted = bytes.len().min(size.saturating_sub(value.len()));
        value.extend_from_slice(bytes.get(..wanted).unwrap_or_default());
    }
    let hash = format::value_hash(fs.geo.csum_seed, &value);
    if hash != state.disk.atime.sec as u32 {
        return Err(bad("its hash does not fit"));
    }
    Ok((value, hash))
}

/// Makes a value inode for an attribute of `owner`.
///
/// # Errors
/// `ENOSPC`, and nothing has changed; damage, I/O.
pub(super) fn create(
    fs: &Arc<FsInner>,
    h: &Handle,
    owner: &Inode,
    owner_state: &InodeState,
    value: &[u8],
) -> Result<Fresh> {
    let size_bytes = u32::try_from(value.len()).map_err(|_| Errno::TOOBIG)?;
    let blocks = size_bytes.div_ceil(fs.geo.block_size);
    let credits =
        INODE_CREDITS + 2 * disk::STORE_CREDITS + blocks + map::credits_insert(fs, blocks);
    if !h.extend(credits)? {
        return Err(Errno::NOSPC.into());
    }
    let hash = format::value_hash(fs.geo.csum_seed, value);
    let mut decoded = DiskInode::new(S_IFREG | 0o600, &fs.geo);
    decoded.uid = owner_state.disk.uid;
    decoded.gid = owner_state.disk.gid;
    decoded.flags = InodeFlags::EA_INODE;
    decoded.links_count = 1;
    // Wrapped to what an inode of any size can hold; only the 32 bits count.
    decoded.atime = Timestamp { sec: i64::from(hash.cast_signed()), nsec: 0 };
    let now = fs.now().into();
    (decoded.mtime, decoded.crtime) = (now, now);
    let ino = fs.alloc_inode(h, owner.ino, false)?;
    let inode = table::detached(fs, ino, decoded);
    let done = {
        let mut state = inode.state.write_unshared();
        table::publish(fs, &inode);
        set_refs(&mut state.disk, 1);
        map::init(fs, &mut state);
        write(fs, h, &inode, &mut state, value)
    };
    if let Err(error) = done {
        take_back(fs, h, &inode)?;
        return Err(error);
    }
    Ok(Fresh { inode, place: Place { ino, size_bytes }, hash })
}

fn write(
    fs: &Arc<FsInner>,
    h: &Handle,
    inode: &Inode,
    state: &mut InodeState,
    value: &[u8],
) -> Result<()> {
    for (lblk, chunk) in (0u32..).zip(value.chunks(fs.geo.block_size as usize)) {
        let block = map::alloc_block(fs, h, inode, state, lblk)?;
        let buffer = fs.meta.create(block);
        let mut bytes = h.get_create(&buffer)?;
        bytes.iter_mut().zip(chunk).for_each(|(to, from)| *to = *from);
    }
    state.size = value.len() as u64;
    state.disk.size = state.size;
    disk::store_new(fs, h, inode, state)
}

/// Undoes [`create`] in the same handle.
pub(super) fn take_back(fs: &Arc<FsInner>, h: &Handle, inode: &Arc<Inode>) -> Result<()> {
    let mut state = inode.state.write();
    map::remove(fs, h, inode, &mut state, 0, u64::from(u32::MAX))?;
    disk::clear(fs, h, inode, &mut state)?;
    state.dead = true;
    fs.inodes.forget(inode);
    fs.free_inode(h, inode.ino, false)
}

fn refs(decoded: &DiskInode) -> u64 {
    (decoded.ctime.sec as u64) << 32 | (decoded.version & u64::from(u32::MAX))
}

fn set_refs(decoded: &mut DiskInode, refs: u64) {
    decoded.ctime = Timestamp { sec: (refs >> 32) as i64, nsec: 0 };
    decoded.version = refs & u64::from(u32::MAX);
}

/// Counts another reference.
pub(super) fn add_ref(fs: &FsInner, h: &Handle, owner: &Inode, place: Place) -> Result<()> {
    let inode = open(fs, owner, place)?;
    let mut state = inode.state.write();
    let count = refs(&state.disk).saturating_add(1);
    set_refs(&mut state.disk, count);
    disk::store(fs, h, &inode, &mut state)
}

/// Drops a reference; the inode goes to the orphan record and `garbage` with the last.
pub(super) fn drop_ref(
    fs: &FsInner,
    h: &Handle,
    owner: &Inode,
    place: Place,
    garbage: &mut Garbage,
) -> Result<()> {
    let inode = open(fs, owner, place)?;
    {
        let mut state = inode.state.write();
        let count = refs(&state.disk).saturating_sub(1);
        set_refs(&mut state.disk, count);
        if count == 0 {
            state.disk.links_count = 0;
            orphan::add(fs, h, &inode, &mut state)?;
        }
        disk::store(fs, h, &inode, &mut state)?;
        if count != 0 {
            return Ok(());
        }
    }
    garbage.0.push(inode);
    Ok(())
}
