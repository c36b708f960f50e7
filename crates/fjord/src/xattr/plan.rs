//! Updating one attribute: where it goes, and in which order things are written.
//!
//! Invariant: the places are tried in Linux's order: the inode, the block, an inode of its
//! own (feature `ea_inode`; first of all for values that would fill most of a block). An
//! attribute is in one place only.

use std::sync::Arc;

use fjord_format::InodeNo;
use fjord_format::features::Incompat;
use fjord_format::xattr::{self as format, NameIndex, XattrSet, XattrValue};
use fjord_journal::Handle;
use rustix::io::Errno;

use super::value_inode::{self, Place};
use super::{Garbage, area_range, block, damaged, store_ibody, with_ibody};
use crate::error::Result;
use crate::fs::FsInner;
use crate::inode::changes::CommitReason;
use crate::inode::{Inode, InodeState};

/// Copies the attributes in the inode.
pub(super) fn load_ibody(fs: &FsInner, inode: &Inode, state: &InodeState) -> Result<XattrSet> {
    with_ibody(fs, inode, state, |_, view| match view {
        Some(view) => XattrSet::from_view(view).map_err(|error| damaged(inode, error)),
        None => Ok(XattrSet::new()),
    })
}

/// Removes the attribute whose value is in the inode `place`.
pub(super) fn remove_place(set: &mut XattrSet, place: Place) {
    let found = set.iter().find(|xattr| value_inode::place_of(xattr.value()) == Some(place));
    if let Some((index, name)) = found.map(|xattr| (xattr.index(), xattr.name().to_vec())) {
        set.remove(index, &name);
    }
}

/// The attributes of an inode, before and after.
#[derive(Clone)]
struct Sets {
    ibody: XattrSet,
    block: XattrSet,
}

/// Where a new value goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Home {
    Ibody,
    Block,
}

impl Sets {
    /// Puts the attribute into `home` and takes it out of the other place. `apart` is the
    /// inode of its value, with the hash.
    fn put(
        &mut self,
        home: Home,
        (index, name): (NameIndex, &[u8]),
        value: &[u8],
        apart: Option<(Place, u32)>,
    ) -> Result<()> {
        let (here, other) = match home {
            Home::Ibody => (&mut self.ibody, &mut self.block),
            Home::Block => (&mut self.block, &mut self.ibody),
        };
        match apart {
            Some((place, hash)) => {
                here.set_ea_inode(index, name, place.ino, place.size_bytes, hash)?
            }
            None => here.set(index, name, value)?,
        };
        other.remove(index, name);
        Ok(())
    }

    fn fit(&self, home: Home, room: &Room) -> bool {
        match home {
            Home::Ibody => self.ibody.ibody_bytes() <= room.ibody_bytes,
            Home::Block => {
                let values = self.block.iter().map(|xattr| match xattr.value() {
                    XattrValue::Bytes(bytes) => bytes.len().next_multiple_of(4),
                    XattrValue::EaInode { .. } => 0,
                });
                self.block.block_bytes() <= room.block_bytes
                    && values.sum::<usize>() <= room.block_values_bytes
            }
        }
    }
}

/// How much each place can take.
struct Room {
    ibody_bytes: usize,
    block_bytes: usize,
    /// Values in the block; less than the block where long ones can go elsewhere.
    block_values_bytes: usize,
}

/// Decides where a value goes, and whether it gets an inode of its own.
fn plan(
    fs: &FsInner,
    state: &InodeState,
    sets: &Sets,
    key: (NameIndex, &[u8]),
    value: &[u8],
) -> Result<(Home, bool)> {
    let block_bytes = fs.geo.block_size as usize;
    let may_be_apart = fs.geo.features.incompat.contains(Incompat::EA_INODE) && !value.is_empty();
    let must_be_apart = may_be_apart
        && value.len().next_multiple_of(4) > format::ea_inode_value_bytes_min(block_bytes);
    for apart in [false, true] {
        if (apart && !may_be_apart) || (!apart && must_be_apart) {
            continue;
        }
        let kept_free =
            if may_be_apart && !apart { format::block_reserve_bytes(block_bytes) } else { 0 };
        let room = Room {
            ibody_bytes: area_range(fs, state).len(),
            block_bytes,
            block_values_bytes: block_bytes.saturating_sub(kept_free),
        };
        let size_bytes = u32::try_from(value.len()).map_err(|_| Errno::TOOBIG)?;
        let stand_in = Place { ino: InodeNo::ROOT, size_bytes };
        for home in [Home::Ibody, Home::Block] {
            let mut after = sets.clone();
            after.put(home, key, value, apart.then_some((stand_in, 0)))?;
            if after.fit(home, &room) {
                return Ok((home, apart));
            }
        }
    }
    Err(Errno::NOSPC.into())
}

/// Sets (`Some`) or removes an attribute. The caller stores the inode afterwards.
///
/// # Errors
/// `ENOSPC`, and nothing has changed; damage, I/O.
pub(crate) fn update(
    fs: &Arc<FsInner>,
    h: &Handle,
    inode: &Inode,
    state: &mut InodeState,
    index: NameIndex,
    name: &[u8],
    value: Option<&[u8]>,
) -> Result<Garbage> {
    let before =
        Sets { ibody: load_ibody(fs, inode, state)?, block: block::load(fs, inode, state)? };
    let old_ibody = before.ibody.get(index, name).map(|xattr| xattr.value().clone());
    let old_block = before.block.get(index, name).map(|xattr| xattr.value().clone());
    let same = |old: &XattrValue| matches!((old, value), (XattrValue::Bytes(a), Some(b)) if a == b);
    if old_ibody.iter().chain(&old_block).any(same) {
        return Ok(Garbage::default());
    }
    let mut after = before.clone();
    let mut fresh = None;
    let (mut changes_ibody, mut changes_block) = (old_ibody.is_some(), old_block.is_some());
    if let Some(value) = value {
        let (home, apart) = plan(fs, state, &before, (index, name), value)?;
        if apart {
            state.changes.require_commit(h.tid(), CommitReason::Attributes);
            fresh = Some(value_inode::create(fs, h, inode, state, value)?);
        }
        let at = fresh.as_ref().map(|fresh| (fresh.place, fresh.hash));
        after.put(home, (index, name), value, at)?;
        changes_ibody |= home == Home::Ibody;
        changes_block |= home == Home::Block;
    } else {
        after.ibody.remove(index, name);
        after.block.remove(index, name);
    }
    let mut garbage = Garbage::default();
    let mut dropped = old_ibody;
    if changes_block {
        // The block comes first: it is what may lack space.
        match block::store(fs, h, inode, state, &after.block, fresh.as_ref(), &mut garbage) {
            // A block that others go on to use keeps its reference to the value.
            Ok(was_shared) if was_shared => {}
            Ok(_) => dropped = dropped.or(old_block),
            Err(error) => {
                if let Some(fresh) = &fresh {
                    value_inode::take_back(fs, h, &fresh.inode)?;
                }
                return Err(error);
            }
        }
    }
    let charged =
        |sets: &Sets| value_inode::sectors(fs, &sets.ibody) + value_inode::sectors(fs, &sets.block);
    let blocks = state.disk.blocks_512.saturating_add(charged(&after));
    state.disk.blocks_512 = blocks.saturating_sub(charged(&before));
    if changes_ibody {
        state.changes.attributes_changed(h.tid());
        store_ibody(fs, h, inode, state, &after.ibody)?;
    }
    if value.is_some() {
        fs.mark_ext_attr(h)?;
    }
    if let Some(place) = dropped.as_ref().and_then(value_inode::place_of) {
        state.changes.require_commit(h.tid(), CommitReason::Attributes);
        value_inode::drop_ref(fs, h, inode, place, &mut garbage)?;
    }
    Ok(garbage)
}
