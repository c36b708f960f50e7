//! Extended attributes: in the inode, in a block that inodes may share, in inodes of their own.
//!
//! Owns where an attribute is kept, the reference counts of shared blocks and of value inodes,
//! and the attribute `system.data` that inline data lives in.
//!
//! Invariants:
//! - an update is planned on copies; what it needs is allocated before anything is written,
//!   so that `ENOSPC` leaves all attributes as they were;
//! - a block with more than one reference is never changed, except for the count;
//! - `system.data` stays in the inode;
//! - attributes in the inode lie in its table block only, no copy is kept in memory.
//!
//! Guards: the inode's `state`, held by the caller unless the function takes no state. A value
//! inode's state is taken below its owner's, with the handle open: a holder of that lock never
//! waits for a handle, except for its deletion, when it has no other user.

mod block;
mod plan;
mod value_inode;

use std::sync::Arc;

use fjord_format::geometry::GOOD_OLD_INODE_BYTES;
use fjord_format::inline_data::{self, DATA_NAME};
use fjord_format::inode::InodeFlags;
use fjord_format::xattr::{
    self as format, NameIndex, ValueRef, XattrRef, XattrRules, XattrSet, XattrView,
};
use fjord_journal::Handle;
use rustix::io::Errno;

use crate::acl;
use crate::attr::FileKind;
use crate::error::{Error, Result};
use crate::fs::FsInner;
use crate::inode::{Inode, InodeState, attr, disk, evict, order_only};
use crate::vfs::XattrFlags;

pub(crate) use block::release as release_block;
pub(crate) use plan::update;

/// Metadata blocks that setting a short attribute can dirty: the inode, a new block with
/// bitmap and descriptor, the old one with its own.
pub(crate) const CREDITS: u32 = disk::STORE_CREDITS + 8;
/// Metadata blocks that what a new inode inherits can dirty: access lists, and after them an attribute that may
/// need another block.
pub(crate) const CREDITS_NEW: u32 = CREDITS + 8;
/// Metadata blocks that a change of inline data can dirty.
pub(crate) const CREDITS_INLINE: u32 = disk::STORE_CREDITS;

/// Longest value that a system call can pass, in bytes (`XATTR_SIZE_MAX`).
const VALUE_BYTES_MAX: usize = 65_536;
/// Longest full name, in bytes (`XATTR_NAME_MAX`).
const FULL_NAME_BYTES_MAX: usize = 255;

/// Value inodes that lost their last reference and are on the orphan record. To be given to
/// [`Garbage::free`] once no handle is open; if that never happens, the next mount does it.
#[derive(Default)]
#[must_use = "value inodes wait to be freed"]
pub(crate) struct Garbage(Vec<Arc<Inode>>);

impl Garbage {
    /// Frees the inodes.
    ///
    /// # Errors
    /// Journal and I/O errors.
    pub(crate) fn free(self, fs: &Arc<FsInner>) -> Result<()> {
        self.0.iter().try_for_each(|inode| evict::release(fs, inode))
    }
}

fn damaged(inode: &Inode, detail: impl std::fmt::Display) -> Error {
    Error::corrupt("extended attributes", format!("inode {}: {detail}", inode.ino))
}

fn rules(fs: &FsInner) -> XattrRules {
    XattrRules::new(&fs.geo)
}

/// Where attributes lie in an inode's bytes; empty when it has no room for any.
fn area_range(fs: &FsInner, state: &InodeState) -> std::ops::Range<usize> {
    let end = usize::from(fs.geo.inode_size);
    if state.disk.extra_isize == 0 {
        return end..end;
    }
    usize::from(GOOD_OLD_INODE_BYTES + state.disk.extra_isize).min(end)..end
}

/// Looks at the attributes in the inode.
fn with_ibody<T>(
    fs: &FsInner,
    inode: &Inode,
    state: &InodeState,
    look: impl FnOnce(&[u8], Option<&XattrView<'_>>) -> Result<T>,
) -> Result<T> {
    disk::read_bytes(fs, inode.ino, |bytes| {
        let area = bytes.get(area_range(fs, state)).unwrap_or_default();
        let view = format::parse_ibody(area, &rules(fs)).map_err(|error| damaged(inode, error))?;
        look(area, view.as_ref())
    })
}

/// Writes the attributes in the inode.
fn store_ibody(
    fs: &FsInner,
    h: &Handle,
    inode: &Inode,
    state: &InodeState,
    set: &XattrSet,
) -> Result<()> {
    disk::change_bytes(fs, h, inode.ino, |bytes| {
        let area = bytes.get_mut(area_range(fs, state)).unwrap_or_default();
        set.encode_ibody(area).map_err(|error| damaged(inode, error))
    })
}

/// The value of an attribute.
///
/// # Errors
/// Damage, I/O.
pub(crate) fn read(
    fs: &FsInner,
    inode: &Inode,
    state: &InodeState,
    index: NameIndex,
    name: &[u8],
) -> Result<Option<Vec<u8>>> {
    let take = |view: &XattrView<'_>| view.find(index, name).map(Taken::from);
    let mut taken = with_ibody(fs, inode, state, |_, view| Ok(view.and_then(take)))?;
    if taken.is_none() {
        taken = block::with_view(fs, inode, state, |_, view| Ok(take(view)))?.flatten();
    }
    taken.map(|taken| taken.value(fs, inode)).transpose()
}

/// A value, or its place and what the attribute says of it, copied.
enum Taken {
    Bytes(Vec<u8>),
    Inode { place: value_inode::Place, name: Vec<u8>, e_hash: u32 },
}

impl From<XattrRef<'_>> for Taken {
    fn from(found: XattrRef<'_>) -> Taken {
        match found.value {
            ValueRef::Bytes(bytes) => Taken::Bytes(bytes.to_vec()),
            ValueRef::EaInode { inode, size_bytes } => Taken::Inode {
                place: value_inode::Place { ino: inode, size_bytes },
                name: found.name.to_vec(),
                e_hash: found.e_hash,
            },
        }
    }
}

impl Taken {
    fn value(self, fs: &FsInner, inode: &Inode) -> Result<Vec<u8>> {
        let (place, name, e_hash) = match self {
            Taken::Bytes(bytes) => return Ok(bytes),
            Taken::Inode { place, name, e_hash } => (place, name, e_hash),
        };
        let (value, hash) = value_inode::read(fs, inode, place)?;
        if !format::names_value(&name, e_hash, hash) {
            let what = format_args!(
                "the hash of its attribute with value inode {} does not fit",
                place.ino
            );
            return Err(damaged(inode, what));
        }
        Ok(value)
    }
}

/// Splits a full name; system attributes other than access lists are not supported.
fn split(name: &[u8]) -> Result<(NameIndex, &[u8])> {
    if name.is_empty() || name.len() > FULL_NAME_BYTES_MAX {
        return Err(Errno::RANGE.into());
    }
    if [&b"user."[..], b"trusted.", b"security."].contains(&name) || name.contains(&0) {
        return Err(Errno::INVAL.into());
    }
    match format::split_name(name) {
        Some((NameIndex::HURD | NameIndex::RICHACL, _)) | None => Err(Errno::OPNOTSUPP.into()),
        Some(split) => Ok(split),
    }
}

fn is_acl(index: NameIndex) -> bool {
    matches!(index, NameIndex::POSIX_ACL_ACCESS | NameIndex::POSIX_ACL_DEFAULT)
}

fn has_user_attributes(state: &InodeState) -> bool {
    matches!(state.kind(), FileKind::Regular | FileKind::Directory)
}

/// The value of the attribute with this full name.
///
/// # Errors
/// `ENODATA`, `EOPNOTSUPP`, `ERANGE`, `EINVAL`; damage, I/O.
pub(crate) fn get(fs: &Arc<FsInner>, inode: &Arc<Inode>, name: &[u8]) -> Result<Vec<u8>> {
    let (index, suffix) = split(name)?;
    let state = inode.state.read();
    check_alive(&state)?;
    if is_acl(index) {
        return acl::get_xattr(fs, inode, &state, index);
    }
    if index == NameIndex::USER && !has_user_attributes(&state) {
        return Err(Errno::NODATA.into());
    }
    Ok(read(fs, inode, &state, index, suffix)?.ok_or(Errno::NODATA)?)
}

fn check_alive(state: &InodeState) -> Result<()> {
    if state.dead { Err(Errno::STALE.into()) } else { Ok(()) }
}

fn check_change(index: NameIndex, state: &InodeState) -> Result<()> {
    check_alive(state)?;
    if state.disk.flags.intersects(InodeFlags::IMMUTABLE | InodeFlags::APPEND) {
        return Err(Errno::PERM.into());
    }
    if index == NameIndex::USER && !has_user_attributes(state) {
        return Err(Errno::PERM.into());
    }
    Ok(())
}

/// Sets the attribute with this full name.
///
/// # Errors
/// `EEXIST`, `ENODATA`, `ENOSPC`, `E2BIG`, `ERANGE`, `EINVAL`, `EPERM`, `EOPNOTSUPP`, `EACCES`
/// (a default access list on a file); damage, I/O.
pub(crate) fn set(
    fs: &Arc<FsInner>,
    inode: &Arc<Inode>,
    name: &[u8],
    value: &[u8],
    flags: XattrFlags,
) -> Result<()> {
    let (index, suffix) = split(name)?;
    if value.len() > VALUE_BYTES_MAX {
        return Err(Errno::TOOBIG.into());
    }
    let mut state = inode.state.write();
    check_change(index, &state)?;
    if flags.intersects(XattrFlags::CREATE | XattrFlags::REPLACE) {
        let exists = exists(fs, inode, &state, index, suffix)?;
        if exists && flags.contains(XattrFlags::CREATE) {
            return Err(Errno::EXIST.into());
        }
        if !exists && flags.contains(XattrFlags::REPLACE) {
            return Err(Errno::NODATA.into());
        }
    }
    if is_acl(index) {
        return acl::set_xattr(fs, inode, &mut state, index, value);
    }
    change(fs, inode, &mut state, index, suffix, Some(value))
}

fn exists(
    fs: &FsInner,
    inode: &Inode,
    state: &InodeState,
    index: NameIndex,
    name: &[u8],
) -> Result<bool> {
    let has = |view: &XattrView<'_>| view.find(index, name).is_some();
    Ok(with_ibody(fs, inode, state, |_, view| Ok(view.is_some_and(has)))?
        || block::with_view(fs, inode, state, |_, view| Ok(has(view)))? == Some(true))
}

/// Changes one attribute in a handle of its own and stores the inode.
pub(crate) fn change(
    fs: &Arc<FsInner>,
    inode: &Arc<Inode>,
    state: &mut InodeState,
    index: NameIndex,
    name: &[u8],
    value: Option<&[u8]>,
) -> Result<()> {
    let h = fs.start(CREDITS)?;
    let garbage = update(fs, &h, inode, state, index, name, value)?;
    attr::set_ctime(&mut state.disk, fs.now());
    disk::store(fs, &h, inode, state)?;
    if is_order_only(index, name) {
        inode.order_only.learn(value);
    }
    h.stop();
    garbage.free(fs)
}

fn is_order_only(index: NameIndex, name: &[u8]) -> bool {
    index == NameIndex::USER && name == order_only::NAME
}

/// Whether fsync of this file orders only, because its attribute says so. With its state, which somebody has
/// locked.
pub(crate) fn orders_only_locked(fs: &FsInner, inode: &Inode, state: &InodeState) -> Result<bool> {
    if let Some(known) = inode.order_only.get() {
        return Ok(known);
    }
    let value = match has_user_attributes(state) {
        true => read(fs, inode, state, NameIndex::USER, order_only::NAME)?,
        false => None,
    };
    Ok(inode.order_only.learn(value.as_deref()))
}

/// As [`orders_only_locked`].
///
/// # Errors
/// Damage, I/O: the first time it is asked for.
pub(crate) fn orders_only(fs: &FsInner, inode: &Inode) -> Result<bool> {
    match inode.order_only.get() {
        Some(known) => Ok(known),
        None => orders_only_locked(fs, inode, &inode.state.read()),
    }
}

/// Gives a new inode the attribute that makes its fsync order only, if its directory has it.
pub(crate) fn inherit_order_only(
    fs: &Arc<FsInner>,
    h: &Handle,
    (dir, dir_state): (&Inode, &InodeState),
    (inode, state): (&Inode, &mut InodeState),
) -> Result<()> {
    if !orders_only_locked(fs, dir, dir_state)? || !has_user_attributes(state) {
        return Ok(());
    }
    let (index, name, value) = (NameIndex::USER, order_only::NAME, Some(&b"1"[..]));
    // A short value has no inode of its own.
    drop(update(fs, h, inode, state, index, name, value)?);
    inode.order_only.learn(value);
    Ok(())
}

/// The full names of all attributes that users see.
///
/// # Errors
/// Damage, I/O.
pub(crate) fn list(fs: &Arc<FsInner>, inode: &Arc<Inode>) -> Result<Vec<Vec<u8>>> {
    let state = inode.state.read();
    check_alive(&state)?;
    let mut names = Vec::new();
    let mut add = |view: &XattrView<'_>| {
        let shown = view.iter().filter(|entry| {
            entry.index != NameIndex::HURD && (fs.options.acl || !is_acl(entry.index))
        });
        names.extend(shown.filter_map(|entry| format::full_name(entry.index, entry.name)));
    };
    with_ibody(fs, inode, &state, |_, view| {
        view.into_iter().for_each(&mut add);
        Ok(())
    })?;
    block::with_view(fs, inode, &state, |_, view| {
        add(view);
        Ok(())
    })?;
    Ok(names)
}

/// Removes the attribute with this full name.
///
/// # Errors
/// `ENODATA`, `EPERM`, `EOPNOTSUPP`, `ERANGE`, `EINVAL`; damage, I/O.
pub(crate) fn remove(fs: &Arc<FsInner>, inode: &Arc<Inode>, name: &[u8]) -> Result<()> {
    let (index, suffix) = split(name)?;
    let mut state = inode.state.write();
    check_change(index, &state)?;
    if is_acl(index) {
        acl::check_supported(fs, &state)?;
    }
    if !exists(fs, inode, &state, index, suffix)? {
        return Err(Errno::NODATA.into());
    }
    change(fs, inode, &mut state, index, suffix, None)
}

/// Removes `security.capability`, as a write to the file must.
///
/// # Errors
/// Damage, I/O.
pub(crate) fn remove_capability(
    fs: &Arc<FsInner>,
    inode: &Arc<Inode>,
    state: &mut InodeState,
) -> Result<()> {
    let (index, name) = (NameIndex::SECURITY, &b"capability"[..]);
    if !exists(fs, inode, state, index, name)? {
        return Ok(());
    }
    change(fs, inode, state, index, name, None)
}

/// Frees all attributes of an inode that is being deleted.
///
/// # Errors
/// Journal and I/O errors.
pub(crate) fn delete_all(
    fs: &Arc<FsInner>,
    inode: &Arc<Inode>,
    state: &mut InodeState,
) -> Result<()> {
    let in_inode = plan::load_ibody(fs, inode, state)?;
    for place in value_inode::places(&in_inode) {
        let h = fs.start(CREDITS + value_inode::CREDITS_DROP)?;
        let mut left = plan::load_ibody(fs, inode, state)?;
        plan::remove_place(&mut left, place);
        store_ibody(fs, &h, inode, state, &left)?;
        state.disk.blocks_512 = state.disk.blocks_512.saturating_sub(place.sectors(fs));
        disk::store(fs, &h, inode, state)?;
        let mut garbage = Garbage::default();
        value_inode::drop_ref(fs, &h, inode, place, &mut garbage)?;
        h.stop();
        garbage.free(fs)?;
    }
    if state.disk.file_acl.0 == 0 {
        return Ok(());
    }
    let h = fs.start(CREDITS)?;
    let garbage = block::release(fs, &h, inode, state)?;
    disk::store(fs, &h, inode, state)?;
    h.stop();
    garbage.free(fs)
}

/// The value of `system.data`: what inline data has after its first 60 bytes.
///
/// # Errors
/// `Corrupt` when the attribute is missing; I/O.
pub(crate) fn inline_tail(fs: &FsInner, inode: &Inode, state: &InodeState) -> Result<Vec<u8>> {
    with_ibody(fs, inode, state, |_, view| {
        inline_data::InlineData::parse(&state.disk.i_block, view)
            .map(|data| data.tail.to_vec())
            .map_err(|error| damaged(inode, error))
    })
}

/// Most bytes of inline data that the inode can hold beside its other attributes, the 60 in
/// `i_block` among them; 0 when data cannot be inline.
///
/// # Errors
/// Damage, I/O.
pub(crate) fn inline_capacity(fs: &FsInner, inode: &Inode, state: &InodeState) -> Result<usize> {
    with_ibody(fs, inode, state, |area, view| Ok(inline_data::capacity_bytes(area.len(), view)))
}

/// Sets or removes `system.data`. [`inline_capacity`] says what fits.
///
/// # Errors
/// `ENOSPC`; damage, I/O.
pub(crate) fn set_inline_tail(
    fs: &FsInner,
    h: &Handle,
    inode: &Inode,
    state: &InodeState,
    tail: Option<&[u8]>,
) -> Result<()> {
    let mut set = plan::load_ibody(fs, inode, state)?;
    match tail {
        Some(tail) => {
            set.set(NameIndex::SYSTEM, DATA_NAME, tail)?;
        }
        None => {
            set.remove(NameIndex::SYSTEM, DATA_NAME);
        }
    }
    if set.ibody_bytes() > area_range(fs, state).len() {
        return Err(Errno::NOSPC.into());
    }
    store_ibody(fs, h, inode, state, &set)
}
