//! Placeholder for the block map's signatures until it lands.
use crate::error::Result;
use crate::fs::FsInner;
use crate::inode::{Inode, InodeState};
use fjord_format::BlockNo;
use fjord_format::inode::DiskInode;
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
pub(crate) fn init(_fs: &FsInner, _d: &mut DiskInode) {
    unimplemented!()
}
pub(crate) fn has_map(_s: &InodeState) -> bool {
    unimplemented!()
}
pub(crate) fn credits_insert(_fs: &FsInner) -> u32 {
    unimplemented!()
}
pub(crate) fn credits_remove(_fs: &FsInner) -> u32 {
    unimplemented!()
}
pub(crate) fn max_size_bytes(_fs: &FsInner, _s: &InodeState) -> u64 {
    unimplemented!()
}
