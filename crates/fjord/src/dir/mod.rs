//! Directories: names to inode numbers, in every layout that ext4 has.
//!
//! Owns the entries of linear, indexed (htree) and inline directories and their checksums.
//! [`crate::namei`] owns the effects on inodes: link counts, times and storing the directory's
//! inode after an edit, in the same handle.
//!
//! Invariants:
//! - each function leaves the directory readable by Linux and e2fsck, also when it fails:
//!   new blocks are filled in memory before they are allocated, and a block that has become
//!   part of the directory is written in the same handle;
//! - if new names are logged separately (policy fast-commit), the directory gets another block
//!   before the last one is full;
//! - a directory of one block that overflows becomes indexed (feature `dir_index`), a linear
//!   one of several blocks stays linear, as in Linux;
//! - `state.size == state.disk.size`, a multiple of the block size except inline;
//! - any bytes on disk lead to an entry or `Error::Corrupt`: a descent is bounded by the depth of
//!   the index, a walk by the number of blocks.
//!
//! Guards: the caller holds the directory's `state` (read for finding, write for editing);
//! [`read_dir`] takes it itself, batch by batch, and calls back without it.

mod block;
pub(crate) mod htree;
mod inline;
mod linear;
mod readdir;

use fjord_format::checksum::inode_seed;
use fjord_format::dirent::{self, DirFormat, FileType};
use fjord_format::features::{Compat, Incompat, RoCompat};
use fjord_format::geometry::Geometry;
use fjord_format::hash::{HashSeed, HashVersion};
use fjord_format::htree::{Depth, DxKind};
use fjord_format::superblock::{FsFlags, RawSuperblock};
use fjord_format::{InodeNo, LogicalBlock};
use fjord_journal::Handle;
use rustix::io::Errno;

use crate::error::{Error, Result};
use crate::fs::FsInner;
use crate::inode::{Inode, InodeState};

pub(crate) use readdir::read_dir;

/// What the superblock says about all directories of a file system; fixed at mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DirParams {
    format: DirFormat,
    hash_seed: HashSeed,
    unsigned_hash: bool,
    /// `s_def_hash_version`, for directories that become indexed.
    def_hash_version: u8,
    depth: Depth,
    dir_index: bool,
    large_dir: bool,
    inline_data: bool,
    csum_seed: u32,
}

impl DirParams {
    /// Takes the parameters from a validated superblock.
    pub(crate) fn new(geo: &Geometry, sb: &RawSuperblock) -> DirParams {
        let features = &geo.features;
        let large_dir = features.incompat.contains(Incompat::LARGEDIR);
        DirParams {
            format: DirFormat {
                block_bytes: geo.block_size as usize,
                filetype: features.incompat.contains(Incompat::FILETYPE),
                metadata_csum: features.ro_compat.contains(RoCompat::METADATA_CSUM),
                inodes_count: geo.inode_count,
            },
            hash_seed: HashSeed(sb.hash_seed()),
            unsigned_hash: sb.flags().contains(FsFlags::UNSIGNED_HASH),
            def_hash_version: sb.s_def_hash_version,
            depth: Depth::new(large_dir),
            dir_index: features.compat.contains(Compat::DIR_INDEX),
            large_dir,
            inline_data: features.incompat.contains(Incompat::INLINE_DATA),
            csum_seed: geo.csum_seed,
        }
    }
}

/// Location of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// In a block of the directory, at this offset of the block.
    Block {
        /// Which block.
        lblk: LogicalBlock,
        /// Bytes from its start.
        offset: usize,
    },
    /// In one of the two parts of an inline directory, at this offset of the part.
    Inline {
        /// Whether it is the part after the inode's fixed fields.
        in_xattr: bool,
        /// Bytes from the start of the part.
        offset: usize,
    },
}

/// A found entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    /// The inode it names.
    pub(crate) ino: InodeNo,
    /// The type it claims; `Unknown` without feature `filetype`.
    pub(crate) file_type: FileType,
    /// Valid until the directory changes.
    place: Place,
}

/// One directory as the functions of this module see it.
#[derive(Clone, Copy)]
struct Dir<'a> {
    fs: &'a FsInner,
    inode: &'a Inode,
    params: &'a DirParams,
    /// How its blocks are read; with the inodes that there are by now.
    format: DirFormat,
    /// Seed of the checksums of its blocks.
    seed: u32,
}

impl<'a> Dir<'a> {
    fn new(fs: &'a FsInner, inode: &'a Inode, state: &InodeState) -> Dir<'a> {
        let params = &fs.dir_params;
        let seed = inode_seed(params.csum_seed, inode.ino, state.disk.generation);
        let format = DirFormat { inodes_count: fs.geo.inode_count, ..params.format };
        Dir { fs, inode, params, format, seed }
    }

    fn format(&self) -> &DirFormat {
        &self.format
    }

    fn corrupt(&self, detail: impl std::fmt::Display) -> Error {
        Error::corrupt("directory", format!("inode {}: {detail}", self.inode.ino))
    }

    /// Wraps the error of a decoder with the block that it decoded.
    fn damaged(&self, lblk: LogicalBlock) -> impl Fn(fjord_format::FormatError) -> Error + use<'_> {
        move |error| self.corrupt(format_args!("block {lblk}: {error}"))
    }

    /// Hash version of a directory that is not indexed yet.
    fn default_hash(&self) -> Result<HashVersion> {
        Ok(HashVersion::from_disk(self.params.def_hash_version, self.params.unsigned_hash)?)
    }

    fn is_indexed(&self, state: &InodeState) -> bool {
        self.params.dir_index && is_indexed(state)
    }

    /// Whether the directory has an index, but is listed without it, as Linux does: a block of the index is
    /// damaged. Only where nothing can be written: a change would have to keep the index right. It is so for
    /// as long as the file system is read-only, so that positions in a listing keep their meaning.
    fn is_listed_without_index(&self, state: &InodeState) -> bool {
        if !self.fs.is_read_only() {
            self.inode.index.forget();
            return false;
        }
        let look = || {
            let is_damaged = htree::is_damaged(self, state)?;
            if is_damaged {
                let found = self.corrupt("its index is damaged, and all its blocks are searched");
                tracing::warn!("{found}");
            }
            Ok::<_, Error>(is_damaged)
        };
        self.is_indexed(state) && self.inode.index.is_damaged(look)
    }

    /// Whether a listing has met damage, while nothing can be written.
    fn has_unreachable_names(&self) -> bool {
        self.fs.is_read_only() && self.inode.listing_damage.get().is_some()
    }

    /// Whether `..` is read from a root of an index that is otherwise damaged: nothing can be written.
    fn has_damaged_root(&self, state: &InodeState) -> bool {
        self.fs.is_read_only() && self.is_indexed(state) && htree::is_root_damaged(self, state)
    }
}

/// Whether the directory has an index.
pub(crate) fn is_indexed(state: &InodeState) -> bool {
    state.disk.flags.contains(fjord_format::inode::InodeFlags::INDEX)
}

fn is_inline(state: &InodeState) -> bool {
    state.disk.flags.contains(fjord_format::inode::InodeFlags::INLINE_DATA)
}

/// The entry with this name, `.` and `..` among them.
///
/// # Errors
/// Damage and I/O errors.
pub(crate) fn find(
    fs: &FsInner,
    inode: &Inode,
    state: &InodeState,
    name: &[u8],
) -> Result<Option<Found>> {
    let dir = Dir::new(fs, inode, state);
    match name {
        b"." => {
            let place = Place::Block { lblk: LogicalBlock(0), offset: 0 };
            Ok(Some(Found { ino: inode.ino, file_type: FileType::Directory, place }))
        }
        b".." => parent_entry(&dir, state).map(Some),
        _ if is_inline(state) => inline::find(&dir, state, name),
        _ if dir.is_indexed(state) => match htree::find(&dir, state, name) {
            // As Linux: without the index. Not for a change, which would have to keep the index right.
            Err(error) if htree::is_damage(&error) && fs.is_read_only() => {
                linear::find_without_index(&dir, state, name)
            }
            // Damage may have led to another sound block, or the name lies in a block for other hashes.
            Ok(None) if dir.is_listed_without_index(state) || dir.has_unreachable_names() => {
                linear::find_without_index(&dir, state, name)
            }
            found => found,
        },
        _ => linear::find(&dir, state, name),
    }
}

/// Adds an entry. The caller has made sure that the name is not there.
///
/// # Errors
/// `EEXIST`, `ENOSPC` (no block, or an index of the greatest depth is full); damage, I/O.
pub(crate) fn insert(
    fs: &FsInner,
    h: &Handle,
    inode: &Inode,
    state: &mut InodeState,
    name: &[u8],
    ino: InodeNo,
    file_type: FileType,
) -> Result<()> {
    let dir = Dir::new(fs, inode, state);
    let new = NewEntry { name, ino, file_type };
    if is_inline(state) && inline::insert(&dir, h, state, &new)? {
        return Ok(());
    }
    let blocks = state.disk.blocks_512;
    if dir.is_indexed(state) {
        htree::insert(&dir, h, state, &new)?;
    } else {
        linear::insert(&dir, h, state, &new)?;
    }
    if state.disk.blocks_512 != blocks {
        state.changes.reshaped(h.tid(), -1);
        return Ok(());
    }
    state.changes.entry_added(h.tid(), dirent::rec_len_for(name.len()));
    if !fs.fsync_policy.logs_names_alone() {
        return Ok(());
    }
    match grow_early(&dir, h, state, name) {
        // There is space for this entry; growing early is optional.
        Err(error) if error.is(Errno::NOSPC) => Ok(()),
        other => other,
    }
}

/// If a policy logs the names of new files separately, replay must find space for them in the
/// blocks of the last commit. So a directory grows early: a background commit includes the new
/// block before the old ones are full.
fn grow_early(dir: &Dir<'_>, h: &Handle, state: &mut InodeState, name: &[u8]) -> Result<()> {
    let room = if dir.is_indexed(state) {
        htree::split_early(dir, h, state, name)?
    } else {
        linear::grow_early(dir, h, state)?
    };
    if let Some(room_bytes) = room {
        state.changes.reshaped(h.tid(), i64::try_from(room_bytes).unwrap_or(i64::MAX));
        dir.fs.threads.want_commit();
    }
    Ok(())
}

/// With less free space than this for an entry, the directory grows early.
fn early_room_bytes(dir: &Dir<'_>) -> usize {
    dir.format().block_bytes / 4
}

/// An entry to be added.
#[derive(Clone, Copy)]
struct NewEntry<'a> {
    name: &'a [u8],
    ino: InodeNo,
    file_type: FileType,
}

/// Removes an entry that [`find`] has just found, under the same lock.
///
/// # Errors
/// Damage, I/O.
pub(crate) fn remove(
    fs: &FsInner,
    h: &Handle,
    inode: &Inode,
    state: &mut InodeState,
    found: &Found,
) -> Result<()> {
    let dir = Dir::new(fs, inode, state);
    let format = dir.format();
    let room_bytes = match found.place {
        Place::Block { lblk, .. } => {
            let mut room = block::room_bytes(&dir, state, lblk)?;
            if !dir.is_indexed(state) {
                // A new entry may go to any block.
                room = room.max(linear::last_room_bytes(&dir, state)?);
            }
            i64::try_from(room).unwrap_or(i64::MAX)
        }
        Place::Inline { .. } => -1,
    };
    state.changes.reshaped(h.tid(), room_bytes);
    match found.place {
        Place::Block { lblk, offset } => {
            block::edit(&dir, h, state, lblk, |area| dirent::remove(area, format, offset))
        }
        Place::Inline { .. } => inline::edit(&dir, h, state, found.place, |area, offset| {
            dirent::remove(area, format, offset)
        }),
    }
}

/// Points an entry that [`find`] has just found to another inode.
///
/// # Errors
/// Damage, I/O.
pub(crate) fn replace(
    fs: &FsInner,
    h: &Handle,
    inode: &Inode,
    state: &mut InodeState,
    found: &Found,
    ino: InodeNo,
    file_type: FileType,
) -> Result<()> {
    let dir = Dir::new(fs, inode, state);
    let format = dir.format();
    match found.place {
        Place::Block { lblk, offset } => block::edit(&dir, h, state, lblk, |area| {
            dirent::set_inode(area, format, offset, ino, file_type)
        }),
        Place::Inline { .. } => inline::edit(&dir, h, state, found.place, |area, offset| {
            dirent::set_inode(area, format, offset, ino, file_type)
        }),
    }
}

/// Writes `.` and `..` of a new directory: inline where the feature and the inode's size
/// allow it, else in its first block. Sets size and flags of `state`, not the link count.
///
/// # Errors
/// `ENOSPC`; nothing was changed then.
pub(crate) fn init(
    fs: &FsInner,
    h: &Handle,
    inode: &Inode,
    state: &mut InodeState,
    parent: InodeNo,
) -> Result<()> {
    let dir = Dir::new(fs, inode, state);
    if dir.params.inline_data && inline::init(&dir, h, state, parent)? {
        return Ok(());
    }
    block::append(&dir, h, state, |bytes| {
        dirent::init_first_block(bytes, dir.format(), inode.ino, parent)?;
        dirent::set_checksum(bytes, dir.format(), dir.seed)
    })?;
    Ok(())
}

/// Whether nothing but `.` and `..` is in the directory.
///
/// # Errors
/// Damage, I/O.
pub(crate) fn is_empty(fs: &FsInner, inode: &Inode, state: &InodeState) -> Result<bool> {
    let dir = Dir::new(fs, inode, state);
    if is_inline(state) {
        inline::is_empty(&dir, state)
    } else if dir.is_indexed(state) {
        htree::is_empty(&dir, state)
    } else {
        linear::is_empty(&dir, state)
    }
}

/// The inode that `..` names.
///
/// # Errors
/// Damage, I/O.
pub(crate) fn parent(fs: &FsInner, inode: &Inode, state: &InodeState) -> Result<InodeNo> {
    Ok(parent_entry(&Dir::new(fs, inode, state), state)?.ino)
}

fn parent_entry(dir: &Dir<'_>, state: &InodeState) -> Result<Found> {
    if is_inline(state) {
        return inline::parent(dir, state);
    }
    let lblk = LogicalBlock(0);
    let parent_in = |area: &[u8]| {
        let entry = dirent::dotdot(area, dir.format()).map_err(dir.damaged(lblk))?;
        let ino = entry.inode.ok_or_else(|| dir.corrupt("'..' names no inode"))?;
        let place = Place::Block { lblk, offset: entry.offset };
        Ok(Found { ino, file_type: entry.file_type, place })
    };
    if dir.has_damaged_root(state) {
        return block::look_unchecked(dir, state, lblk, parent_in);
    }
    let (buffer, kind) = block::read_first(dir, state)?;
    let bytes = buffer.read();
    match kind {
        block::First::Root => parent_in(&bytes),
        block::First::Leaf => {
            parent_in(dir.format().entries_area(&bytes).map_err(dir.damaged(lblk))?)
        }
    }
}

/// Sets the parent in `..`.
///
/// # Errors
/// Damage, I/O.
pub(crate) fn set_parent(
    fs: &FsInner,
    h: &Handle,
    inode: &Inode,
    state: &mut InodeState,
    parent: InodeNo,
) -> Result<()> {
    let dir = Dir::new(fs, inode, state);
    if is_inline(state) {
        return inline::set_parent(&dir, state, parent);
    }
    let found = parent_entry(&dir, state)?;
    let (buffer, kind) = block::read_first(&dir, state)?;
    let format = dir.format();
    match kind {
        block::First::Leaf => replace(fs, h, inode, state, &found, parent, FileType::Directory),
        block::First::Root => {
            let mut bytes = h.get_write(&buffer)?;
            let lblk = LogicalBlock(0);
            fjord_format::htree::set_root_parent(&mut bytes, format, parent)
                .map_err(dir.damaged(lblk))?;
            htree::seal(&dir, &mut bytes, DxKind::Root, lblk)
        }
    }
}

/// Checks that a name is valid in a directory.
///
/// # Errors
/// `ENOENT` for the empty name, `ENAMETOOLONG` over 255 bytes, `EINVAL` with a slash or NUL.
pub(crate) fn check_name(name: &[u8]) -> Result<()> {
    if name.is_empty() {
        return Err(Errno::NOENT.into());
    }
    if name.len() > dirent::NAME_LEN_MAX {
        return Err(Errno::NAMETOOLONG.into());
    }
    if name.iter().any(|&byte| byte == 0 || byte == b'/') {
        return Err(Errno::INVAL.into());
    }
    Ok(())
}
