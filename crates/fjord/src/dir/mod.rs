//! Placeholder for directories' signatures until they land.
use crate::error::Result;
use crate::fs::FsInner;
use crate::inode::Inode;
use crate::vfs::DirEntry;
use std::sync::Arc;
pub(crate) fn read_dir(
    _fs: &Arc<FsInner>,
    _d: &Arc<Inode>,
    _c: u64,
    _e: &mut dyn FnMut(DirEntry<'_>) -> bool,
) -> Result<()> {
    unimplemented!()
}
