//! Which inodes have a map, of which kind, and how a new one begins.
//!
//! Owns no state. Invariant: `i_block` is a map only where [`has_map`] says so; elsewhere
//! it is a device number, a short link target or inline data.

use fjord_format::blockmap;
use fjord_format::extent::{EXTENT_DEPTH_MAX, ExtentNode, ExtentNodeMut, NodeKind};
use fjord_format::features::Incompat;
use fjord_format::inode::InodeFlags;

use crate::attr::FileKind;
use crate::fs::FsInner;
use crate::inode::InodeState;

/// Gives an inode an empty map of the kind that the image has.
pub(crate) fn init(fs: &FsInner, state: &mut InodeState) {
    clear(state);
    if !fs.geo.features.incompat.contains(Incompat::EXTENTS) {
        return;
    }
    // Depth 0 and 60 bytes are always right, so this does not fail.
    if ExtentNodeMut::init(&mut state.disk.i_block, NodeKind::Root, 0, &fs.geo).is_ok() {
        state.disk.flags.insert(InodeFlags::EXTENTS);
    }
}

/// Takes the map of an inode away: its `i_block` is all zeros then.
pub(crate) fn clear(state: &mut InodeState) {
    state.disk.flags.remove(InodeFlags::EXTENTS);
    state.disk.i_block.fill(0);
}

/// Whether the inode's map is an extent tree.
pub(crate) fn has_extents(state: &InodeState) -> bool {
    state.disk.flags.contains(InodeFlags::EXTENTS)
}

/// Levels of nodes below the inode in its extent tree; the most there can be if it is damaged.
pub(crate) fn depth(fs: &FsInner, state: &InodeState) -> u16 {
    let root = ExtentNode::parse(&state.disk.i_block, NodeKind::Root, None, &fs.geo);
    root.map_or(EXTENT_DEPTH_MAX, |root| root.depth())
}

/// Whether `i_block` holds a map.
pub(crate) fn has_map(state: &InodeState) -> bool {
    let inline = state.disk.flags.contains(InodeFlags::INLINE_DATA);
    match state.kind() {
        FileKind::Regular | FileKind::Directory => !inline,
        // A short target lies in `i_block` itself, which never is an extent tree then.
        FileKind::Symlink => {
            let fits = state.disk.size < state.disk.i_block.len() as u64;
            !inline && (has_extents(state) || !fits)
        }
        _ => false,
    }
}

/// The largest size in bytes that the inode's kind of map allows.
pub(crate) fn max_size_bytes(fs: &FsInner, state: &InodeState) -> u64 {
    // Inline data becomes a map of the kind that new files get.
    let inline = state.disk.flags.contains(InodeFlags::INLINE_DATA);
    let extents = fs.geo.features.incompat.contains(Incompat::EXTENTS);
    if has_extents(state) || (inline && extents) {
        fs.geo.extent_file_size_max_bytes()
    } else {
        blockmap::file_size_max_bytes(&fs.geo)
    }
}
