//! Deletion of inodes: frees the blocks, attributes and number of a deleted file.
//!
//! Owns the deletion of an unused inode without links. Invariant: the inode stays on the orphan
//! record until its number is free, in one transaction with that, so that a crash at any point
//! resumes the deletion.

use std::sync::Arc;

use fjord_block::plant::{Bug, planted};

use crate::error::Result;
use crate::file::{carry, truncate, writeback};
use crate::fs::FsInner;
use crate::inode::{InFlight, Inode, InodeState, disk};
use crate::{map, orphan, xattr};

/// Gives up what only a file in use has.
pub(crate) fn close(fs: &Arc<FsInner>, inode: &Arc<Inode>) {
    if inode.state.read().prealloc.is_some() {
        fs.discard_window(&mut inode.state.write());
    }
}

/// Deletes `inode` if nothing refers to it any more: no links, no outside references. Since the caller
/// dropped the last one, another thread may have opened the file and removed its name; then the
/// deletion is left to that one's last reference.
pub(crate) fn release(fs: &Arc<FsInner>, inode: &Arc<Inode>) -> Result<()> {
    close(fs, inode);
    // Without a record as an orphan the inode was deleted long ago: somebody asked for its
    // number only.
    let nameless = {
        let state = inode.state.read();
        let recorded = state.orphan.is_some() || planted(Bug::OrphanTooLate);
        state.disk.links_count == 0 && recorded
    };
    if !nameless || fs.inodes.is_used(inode) || fs.is_read_only() || fs.status.is_shut_down() {
        return Ok(());
    }
    fs.releases.deletes(inode);
    let deleted = delete(fs, inode);
    fs.releases.notify(inode);
    deleted
}

/// Frees the blocks, attributes and number of an inode without links.
pub(crate) fn delete(fs: &Arc<FsInner>, inode: &Arc<Inode>) -> Result<()> {
    let mut in_flight = inode.lock_writeback();
    // An error of data that is going away anyway does not matter.
    let _ = writeback::drain_submitted(fs, inode, &mut in_flight);
    let mut state = inode.state.write();
    // Somebody may have asked for it by number.
    if state.dead || fs.inodes.is_used(inode) {
        return Ok(());
    }
    if inode.holds_value {
        // On a damaged image it may have another owner, which looks at it with a handle open. The
        // deletion starts handles, so it must not keep the lock.
        let mut taken = state.take_dead();
        drop(state);
        take_apart(fs, inode, &mut in_flight, &mut taken)?;
    } else {
        take_apart(fs, inode, &mut in_flight, &mut state)?;
        drop(state);
    }
    fs.dirty_inodes.forget(inode);
    fs.inodes.forget(inode);
    Ok(())
}

fn take_apart(
    fs: &Arc<FsInner>,
    inode: &Arc<Inode>,
    in_flight: &mut InFlight,
    state: &mut InodeState,
) -> Result<()> {
    let is_dir = state.is_dir();
    truncate::drop_pages(fs, inode, state, 0..u64::MAX);
    truncate::discard_prealloc(fs, state);
    let orphaned = state.orphan.is_some();
    if map::has_map(state) {
        state.size = 0;
        state.disk.size = 0;
        truncate::remove_blocks(fs, inode, state, 0, u64::from(u32::MAX), !orphaned)?;
    }
    xattr::delete_all(fs, inode, state)?;
    free_number(fs, inode, in_flight, state, is_dir)?;
    state.dead = true;
    Ok(())
}

fn free_number(
    fs: &Arc<FsInner>,
    inode: &Arc<Inode>,
    in_flight: &mut InFlight,
    state: &mut InodeState,
    is_dir: bool,
) -> Result<()> {
    let handle = fs.start(disk::STORE_CREDITS + orphan::CREDITS + 4)?;
    carry::forget(fs, in_flight, handle.tid());
    orphan::remove(fs, &handle, inode, state)?;
    disk::clear(fs, &handle, inode, state)?;
    if !planted(Bug::InodeReuse) {
        fs.free_inode(&handle, inode.ino, is_dir)?;
    }
    handle.stop();
    Ok(())
}

#[cfg(test)]
mod tests {
    use fjord_format::InodeNo;

    use super::*;
    use crate::file::write::{WriteOptions, write};
    use crate::inode::table;
    use crate::namei;
    use crate::testing::TestFs;

    /// A thread has dropped the last reference of a file with a name, and comes to look whether it
    /// was deleted after another one has opened it and removed the name.
    #[test]
    fn a_late_release_keeps_a_file_that_is_open_again() {
        let test = TestFs::new(&["-t", "ext4"], 16);
        let fs = &test.fs;
        let root = table::get(fs, InodeNo::ROOT).unwrap();
        let (referenced, held) = (test.create("referenced"), test.create("held"));
        let open = namei::lookup(fs, &root, b"referenced").unwrap();
        namei::lookup(fs, &root, b"held").unwrap().hold();
        drop(namei::unlink(fs, &root, b"referenced").unwrap());
        drop(namei::unlink(fs, &root, b"held").unwrap());
        for inode in [&referenced, &held] {
            release(fs, inode).unwrap();
            write(fs, inode, 0, b"content", WriteOptions::default()).unwrap();
        }
        drop(open);
        assert!(referenced.state.read().dead);
        assert!(fs.inodes.unhold(held.ino, 1));
        release(fs, &held).unwrap();
        assert!(held.state.read().dead);
        drop((root, referenced, held));
        test.finish();
    }
}
