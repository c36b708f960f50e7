//! Placeholder for the allocator's signatures until it lands.
use crate::attr::StatFs;
use crate::error::Result;
use crate::fs::FsInner;
use crate::inode::{Inode, InodeState};
use crate::options::MountOptions;
use fjord_format::geometry::Geometry;
use fjord_format::superblock::RawSuperblock;
use fjord_format::{BlockNo, GroupNo, InodeNo};
use fjord_journal::Handle;
use std::sync::Arc;
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) start: BlockNo,
    pub(crate) len: u32,
}
#[derive(Debug, Clone, Copy)]
pub(crate) struct Goal;
impl Goal {
    pub(crate) fn for_file(_fs: &FsInner, _i: &Inode, _s: &InodeState, _l: u32) -> Result<Goal> {
        unimplemented!()
    }
}
pub(crate) struct Groups;
impl Groups {
    pub(crate) fn open(
        _g: &Geometry,
        _r: &RawSuperblock,
        _o: &MountOptions,
        _replayed: bool,
    ) -> Groups {
        unimplemented!()
    }
    pub(crate) fn free_blocks_total(&self) -> u64 {
        unimplemented!()
    }
    pub(crate) fn free_inodes_total(&self) -> u32 {
        unimplemented!()
    }
}
impl FsInner {
    pub(crate) fn inode_table(&self, _g: GroupNo) -> Result<BlockNo> {
        unimplemented!()
    }
    pub(crate) fn reserve_blocks(&self, _n: u64, _r: bool) -> Result<()> {
        unimplemented!()
    }
    pub(crate) fn release_blocks(&self, _n: u64) {
        unimplemented!()
    }
    pub(crate) fn pick_blocks(&self, _g: Goal, _w: u32) -> Result<Run> {
        unimplemented!()
    }
    pub(crate) fn pick_for_file(
        &self,
        _s: &mut InodeState,
        _g: Goal,
        _l: u32,
        _w: u32,
    ) -> Result<Run> {
        unimplemented!()
    }
    pub(crate) fn unpick(&self, _r: Run) {
        unimplemented!()
    }
    pub(crate) fn use_picked(&self, _h: &Handle, _r: Run) -> Result<()> {
        unimplemented!()
    }
    pub(crate) fn alloc_blocks(&self, _h: &Handle, _g: Goal, _w: u32) -> Result<Run> {
        unimplemented!()
    }
    pub(crate) fn pending_free_blocks(&self) -> u64 {
        unimplemented!()
    }
    pub(crate) fn free_inode(&self, _h: &Handle, _i: InodeNo, _d: bool) -> Result<()> {
        unimplemented!()
    }
    pub(crate) fn statfs(&self) -> StatFs {
        unimplemented!()
    }
    pub(crate) fn trim(self: &Arc<Self>, _s: u64, _l: u64, _m: u64) -> Result<u64> {
        unimplemented!()
    }
}
