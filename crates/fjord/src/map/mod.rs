//! Placeholder for the block map until it lands; signatures are final.
use crate::attr::FileKind;
use crate::error::Result;
use crate::fs::FsInner;
use crate::inode::{Inode, InodeState};
use fjord_format::BlockNo;
use fjord_format::features::Incompat;
use fjord_format::inode::InodeFlags;
use fjord_journal::Handle;
use std::sync::Arc;
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MapKind {
    Hole,
    Written(BlockNo),
    Unwritten(BlockNo),
}
#[derive(Debug, Clone, Copy)]
pub(crate) struct Mapping {
    pub(crate) len: u32,
    pub(crate) kind: MapKind,
}
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Progress {
    Done,
    More,
}
pub(crate) fn lookup(
    _fs: &FsInner,
    _i: &Inode,
    _s: &InodeState,
    _l: u32,
    _m: u32,
) -> Result<Mapping> {
    unimplemented!()
}
pub(crate) fn neighbour(
    _fs: &FsInner,
    _i: &Inode,
    _s: &InodeState,
    _l: u32,
) -> Result<Option<(BlockNo, bool)>> {
    unimplemented!()
}
pub(crate) fn insert(
    _fs: &FsInner,
    _h: &Handle,
    _i: &Inode,
    _s: &mut InodeState,
    _l: u32,
    _p: BlockNo,
    _n: u32,
    _w: bool,
) -> Result<()> {
    unimplemented!()
}
pub(crate) fn alloc_block(
    _fs: &FsInner,
    _h: &Handle,
    _i: &Inode,
    _s: &mut InodeState,
    _l: u32,
) -> Result<BlockNo> {
    unimplemented!()
}
pub(crate) fn mark_written(
    _fs: &FsInner,
    _h: &Handle,
    _i: &Inode,
    _s: &mut InodeState,
    _l: u32,
    _n: u32,
) -> Result<()> {
    unimplemented!()
}
pub(crate) fn mark_unwritten(
    _fs: &FsInner,
    _h: &Handle,
    _i: &Inode,
    _s: &mut InodeState,
    _l: u32,
    _n: u32,
) -> Result<()> {
    unimplemented!()
}
pub(crate) fn remove(
    _fs: &FsInner,
    _h: &Handle,
    _i: &Inode,
    _s: &mut InodeState,
    _f: u64,
    _t: u64,
) -> Result<Progress> {
    unimplemented!()
}
pub(crate) fn collapse(
    _fs: &Arc<FsInner>,
    _i: &Inode,
    _s: &mut InodeState,
    _f: u32,
    _n: u32,
) -> Result<()> {
    unimplemented!()
}
pub(crate) fn expand(
    _fs: &Arc<FsInner>,
    _i: &Inode,
    _s: &mut InodeState,
    _f: u32,
    _n: u32,
) -> Result<()> {
    unimplemented!()
}
/// Gives a new inode an empty map of the kind that the image has.
pub(crate) fn init(fs: &FsInner, state: &mut InodeState) {
    clear(state);
    if fs.geo.features.incompat.contains(Incompat::EXTENTS) {
        state.disk.flags.insert(InodeFlags::EXTENTS);
        let _ = fjord_format::extent::ExtentNodeMut::init(
            &mut state.disk.i_block,
            fjord_format::extent::NodeKind::Root,
            0,
            &fs.geo,
        );
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
/// Whether `i_block` holds a map.
pub(crate) fn has_map(state: &InodeState) -> bool {
    let inline = state.disk.flags.contains(InodeFlags::INLINE_DATA);
    match state.kind() {
        FileKind::Regular | FileKind::Directory => !inline,
        FileKind::Symlink => {
            !inline && (has_extents(state) || state.disk.size >= state.disk.i_block.len() as u64)
        }
        _ => false,
    }
}
pub(crate) fn credits_insert(_fs: &FsInner, _runs: u32) -> u32 {
    unimplemented!()
}
pub(crate) fn credits_remove(_fs: &FsInner) -> u32 {
    unimplemented!()
}
pub(crate) fn max_size_bytes(_fs: &FsInner, _s: &InodeState) -> u64 {
    unimplemented!()
}
