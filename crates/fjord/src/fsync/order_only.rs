//! What fsync(2) asks for: durability, or order only, where the mount or the file says so.
//!
//! For programs that call fsync and need order: the mount option `order_only`, and the attribute
//! [`crate::inode::order_only`] of files and directories. It weakens what the program asks for, so it is counted
//! and said.
//!
//! Owns that choice. Invariant: where it cannot be told what a file says, its fsync is durable.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::{barrier, barrier_then, fsync, fsync_then};
use crate::error::Result;
use crate::fs::FsInner;
use crate::inode::Inode;
use crate::xattr;

/// What a mount with the option says.
pub(crate) const WARNING: &str = "order_only: fsync and fdatasync only put changes in order; a power cut may \
     lose what they returned for, of the newest seconds; syncfs, sync and unmount make all durable";

/// Whether the fsync that is asked for orders only. Counts it, and says it the first time.
fn orders_only(fs: &FsInner, inode: &Inode) -> bool {
    let by_file = || xattr::orders_only(fs, inode).unwrap_or(false);
    if !(fs.options.order_only || by_file()) {
        return false;
    }
    fs.stats.fsyncs_order_only.fetch_add(1, Ordering::Relaxed);
    if !fs.options.order_only && !fs.stats.order_only_is_told.swap(true, Ordering::Relaxed) {
        fs.warn(format_args!(
            "user.fjord.order_only: fsync of files with this attribute only puts changes in order"
        ));
    }
    true
}

/// [`fsync`], or [`barrier`] where order is all that is asked for.
///
/// # Errors
/// As these.
pub(crate) fn sync(fs: &Arc<FsInner>, inode: &Arc<Inode>, datasync: bool) -> Result<()> {
    match orders_only(fs, inode) {
        true => barrier(fs, inode, datasync).map(drop),
        false => fsync(fs, inode, datasync),
    }
}

/// As [`sync`], and calls `done` with the outcome as [`fsync_then`] does.
pub(crate) fn sync_then(
    fs: &Arc<FsInner>,
    inode: &Arc<Inode>,
    datasync: bool,
    done: impl FnOnce(Result<()>) + Send + 'static,
) {
    match orders_only(fs, inode) {
        true => barrier_then(fs, inode, datasync, move |result| done(result.map(drop))),
        false => fsync_then(fs, inode, datasync, done),
    }
}
