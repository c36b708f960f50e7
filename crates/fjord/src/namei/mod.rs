//! Placeholder for name operations' signatures until they land.
use crate::attr::Cred;
use crate::error::Result;
use crate::fs::FsInner;
use crate::inode::Inode;
use crate::vfs::RenameFlags;
use std::sync::Arc;
type F = Arc<FsInner>;
type I = Arc<Inode>;
pub(crate) fn lookup(_f: &F, _d: &I, _n: &[u8]) -> Result<I> {
    unimplemented!()
}
pub(crate) fn create(_f: &F, _d: &I, _n: &[u8], _m: u16, _c: &Cred) -> Result<I> {
    unimplemented!()
}
pub(crate) fn mknod(_f: &F, _d: &I, _n: &[u8], _m: u16, _r: u32, _c: &Cred) -> Result<I> {
    unimplemented!()
}
pub(crate) fn mkdir(_f: &F, _d: &I, _n: &[u8], _m: u16, _c: &Cred) -> Result<I> {
    unimplemented!()
}
pub(crate) fn symlink(_f: &F, _d: &I, _n: &[u8], _t: &[u8], _c: &Cred) -> Result<I> {
    unimplemented!()
}
pub(crate) fn tmpfile(_f: &F, _d: &I, _m: u16, _c: &Cred) -> Result<I> {
    unimplemented!()
}
pub(crate) fn link(_f: &F, _t: &I, _d: &I, _n: &[u8]) -> Result<()> {
    unimplemented!()
}
pub(crate) fn unlink(_f: &F, _d: &I, _n: &[u8]) -> Result<I> {
    unimplemented!()
}
pub(crate) fn rmdir(_f: &F, _d: &I, _n: &[u8]) -> Result<I> {
    unimplemented!()
}
pub(crate) fn rename(
    _f: &F,
    _d: &I,
    _n: &[u8],
    _nd: &I,
    _nn: &[u8],
    _fl: RenameFlags,
    _c: &Cred,
) -> Result<Option<I>> {
    unimplemented!()
}
pub(crate) fn read_link(_f: &F, _i: &I) -> Result<Vec<u8>> {
    unimplemented!()
}
