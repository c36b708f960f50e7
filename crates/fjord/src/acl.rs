//! Placeholder for access lists' signatures until they land.
use crate::error::Result;
use crate::fs::FsInner;
use crate::inode::{Inode, InodeState};
use fjord_journal::Handle;
pub(crate) struct AclUpdate;
pub(crate) fn prepare_chmod(
    _f: &FsInner,
    _i: &Inode,
    _s: &InodeState,
    _m: u16,
) -> Result<Option<AclUpdate>> {
    Ok(None)
}
pub(crate) fn store(
    _f: &FsInner,
    _h: &Handle,
    _i: &Inode,
    _s: &mut InodeState,
    _u: AclUpdate,
) -> Result<()> {
    Ok(())
}
