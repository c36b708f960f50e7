//! Placeholder for attributes' signatures until they land.
use crate::error::Result;
use crate::fs::FsInner;
use crate::inode::{Inode, InodeState};
use crate::vfs::XattrFlags;
use std::sync::Arc;
type F = Arc<FsInner>;
type I = Arc<Inode>;
pub(crate) const CREDITS: u32 = 8;
pub(crate) fn get(_f: &F, _i: &I, _n: &[u8]) -> Result<Vec<u8>> {
    unimplemented!()
}
pub(crate) fn set(_f: &F, _i: &I, _n: &[u8], _v: &[u8], _x: XattrFlags) -> Result<()> {
    unimplemented!()
}
pub(crate) fn list(_f: &F, _i: &I) -> Result<Vec<Vec<u8>>> {
    unimplemented!()
}
pub(crate) fn remove(_f: &F, _i: &I, _n: &[u8]) -> Result<()> {
    unimplemented!()
}
pub(crate) fn remove_capability(_f: &F, _i: &I, _s: &mut InodeState) -> Result<()> {
    Ok(())
}
pub(crate) fn delete_all(_f: &F, _i: &I, _s: &mut InodeState) -> Result<()> {
    Ok(())
}
