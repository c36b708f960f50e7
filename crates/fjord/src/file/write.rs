//! Writing file data into the page cache.
//!
//! Owns delayed allocation: a write reserves blocks, copies data and returns; blocks
//! are picked at writeback. Invariants: every page without a place on the device holds
//! exactly one reservation; a write that fails half way has written a prefix and
//! reports its length.

use std::sync::Arc;

use fjord_block::plant::{Bug, planted};
use fjord_block::{AlignedBuf, Buf};
use rustix::io::Errno;

use crate::attr::{FileKind, S_ISGID, S_ISUID, S_IXGRP, Timespec};
use crate::error::Result;
use crate::file::read::load_page;
use crate::file::{background, inline, writeback};
use crate::fs::FsInner;
use crate::inode::{Inode, InodeState, attr, flags};
use crate::map::{self, MapKind};
use crate::xattr;

/// How to write; see [`crate::InodeRef::write_with`].
///
/// ```
/// # use std::sync::Arc;
/// # use fjord::{Fs, MemDevice, MkfsOptions, MountOptions};
/// use fjord::WriteOptions;
///
/// # let device = Arc::new(MemDevice::new(16 << 20));
/// # let fs = Fs::create_on(device, &MkfsOptions::default(), &MountOptions::default())?;
/// fs.write("/log", "one ")?;
/// let append = WriteOptions { append: true, ..WriteOptions::default() };
/// fs.resolve("/log")?.write_with(0, b"two", append)?;
/// assert_eq!(fs.read("/log")?, b"one two");
/// # fs.unmount()?;
/// # Ok::<(), fjord::Error>(())
/// ```
#[derive(Debug, Clone, Copy, Default)]
pub struct WriteOptions {
    /// Write at the end of the file, wherever that is by then.
    pub append: bool,
    /// Drop set-user-ID, set-group-ID and capabilities, as a write without CAP_FSETID does.
    pub kill_privileges: bool,
    /// The writer may use the reserved blocks.
    pub use_reserve: bool,
    /// Comes from a cache above that keeps the times itself and has made the checks for an
    /// append-only file: leave the times alone, and take the data wherever it goes.
    pub from_cache: bool,
}

/// Writes `data` at `offset` and returns the count of bytes written.
///
/// # Errors
/// `EFBIG`, `ENOSPC` (nothing written), `EPERM` (immutable, or append-only without
/// `append`), `EROFS`, `EISDIR`, `EINVAL`; device errors and corruption.
pub(crate) fn write(
    fs: &Arc<FsInner>,
    inode: &Arc<Inode>,
    offset: u64,
    data: &[u8],
    options: WriteOptions,
) -> Result<usize> {
    fs.check_writable()?;
    background::throttle(fs, inode)?;
    let mut state = inode.state.write();
    check_target(&state)?;
    let offset = if options.append { state.size } else { offset };
    flags::check_write(&state, options.append || options.from_cache)?;
    if data.is_empty() {
        return Ok(0);
    }
    let limit = fs.max_file_size(&state);
    if offset >= limit {
        return Err(Errno::FBIG.into());
    }
    let data = &data[..data.len().min((limit - offset).min(usize::MAX as u64) as usize)];
    if options.kill_privileges {
        kill_privileges(fs, inode, &mut state, false)?;
    }
    let written = if inline::wants_inline(fs, inode, &state, offset, data.len())? {
        inline::write(fs, inode, &mut state, offset, data)?
    } else {
        inline::convert(fs, inode, &mut state)?;
        zero_old_tail(fs, inode, &state, offset)?;
        write_pages(fs, inode, &mut state, offset, data, options.use_reserve)?
    };
    let end = offset + written as u64;
    let grows = end > state.size;
    state.size = state.size.max(end);
    if planted(Bug::SizeBeforeData) {
        state.disk.size = state.size;
    }
    let has_new_times = !options.from_cache && set_times(&mut state, fs.now());
    state.dirty |= grows || has_new_times;
    fs.dirty_inodes.add(inode);
    writeback::journal_at_once(fs, inode, &mut state)?;
    drop(state);
    fs.page_lru.reclaim();
    Ok(written)
}

/// Whether the times have changed. As in Linux, they do not between two ticks of the clock, nor does
/// the version: an fsync after each of several overwrites has only data to write then.
fn set_times(state: &mut InodeState, now: Timespec) -> bool {
    if state.disk.mtime == now.into() && state.disk.ctime == now.into() {
        return false;
    }
    attr::set_mtime(&mut state.disk, now);
    attr::set_ctime(&mut state.disk, now);
    true
}

fn check_target(state: &InodeState) -> Result<()> {
    if state.dead {
        return Err(Errno::STALE.into());
    }
    match state.kind() {
        FileKind::Regular => Ok(()),
        FileKind::Directory => Err(Errno::ISDIR.into()),
        _ => Err(Errno::INVAL.into()),
    }
}

/// Drops set-user-ID and friends, as a write by an unprivileged user must; `outside_group` tells
/// that the user is not in the file's group.
pub(crate) fn kill_privileges(
    fs: &Arc<FsInner>,
    inode: &Arc<Inode>,
    state: &mut InodeState,
    outside_group: bool,
) -> Result<()> {
    let mut mode = state.disk.mode & !S_ISUID;
    if outside_group || mode & S_IXGRP != 0 {
        mode &= !S_ISGID;
    }
    if mode != state.disk.mode {
        state.disk.mode = mode;
        state.dirty = true;
        // The call may fail before it stores the inode.
        fs.dirty_inodes.add(inode);
    }
    xattr::remove_capability(fs, inode, state)
}

/// Before the file grows past a partly used last block, its old tail must be zeros on
/// the device too, or the growth would show what an earlier truncation left there. Returns whether
/// there was something to do; the page is dirty then.
pub(crate) fn zero_old_tail(
    fs: &FsInner,
    inode: &Arc<Inode>,
    state: &InodeState,
    new_start: u64,
) -> Result<bool> {
    let block_size = u64::from(fs.geo.block_size);
    let tail = (state.size % block_size) as usize;
    let lblk = (state.size / block_size) as u32;
    if tail == 0 || new_start <= state.size || inode.pages.is_pending(lblk) {
        return Ok(false);
    }
    if planted(Bug::OldTailKept) {
        return Ok(false);
    }
    if let MapKind::Written(_) = map::lookup(fs, inode, state, lblk, 1)?.kind {
        load_page(fs, inode, state, lblk)?;
        let is_dirty = inode.pages.modify(lblk, false, |page| page[tail..].fill(0));
        if is_dirty {
            // The caller may find no space; until the page is written it keeps the size back.
            fs.dirty_inodes.add(inode);
        }
        return Ok(is_dirty);
    }
    Ok(false)
}

/// Copies `data` into pages, reserving blocks where the file has none.
fn write_pages(
    fs: &Arc<FsInner>,
    inode: &Inode,
    state: &mut InodeState,
    offset: u64,
    data: &[u8],
    use_reserve: bool,
) -> Result<usize> {
    let block_size = u64::from(fs.geo.block_size);
    let mut done = 0usize;
    // What the map says from `known.0` on, for `known.1` blocks.
    let mut known: (u32, u32, MapKind) = (0, 0, MapKind::Hole);
    while done < data.len() {
        let position = offset + done as u64;
        let lblk = (position / block_size) as u32;
        let skip = (position % block_size) as usize;
        let part = (data.len() - done).min(block_size as usize - skip);
        if lblk.wrapping_sub(known.0) >= known.1 {
            let most = (offset + data.len() as u64).div_ceil(block_size) - u64::from(lblk);
            let found = map::lookup(fs, inode, state, lblk, most as u32)?;
            known = (lblk, found.len, found.kind);
        }
        let bytes = &data[done..done + part];
        match write_page(fs, inode, state, lblk, skip, bytes, known.2, use_reserve) {
            Ok(()) => done += part,
            Err(error) if done == 0 => return Err(error),
            Err(_) => break,
        }
    }
    Ok(done)
}

#[expect(clippy::too_many_arguments, reason = "one page of a write, all of it needed")]
fn write_page(
    fs: &Arc<FsInner>,
    inode: &Inode,
    state: &mut InodeState,
    lblk: u32,
    skip: usize,
    bytes: &[u8],
    kind: MapKind,
    use_reserve: bool,
) -> Result<()> {
    let block_size = fs.geo.block_size as usize;
    let reserve = kind == MapKind::Hole && !inode.pages.is_delalloc(lblk);
    if reserve {
        fs.reserve_blocks(1, use_reserve)?;
        state.reserved_blocks += 1;
    }
    if inode.pages.overwrite(lblk, reserve, skip, bytes) {
        return Ok(());
    }
    let mut page = AlignedBuf::uninit(block_size);
    let whole = bytes.len() == block_size;
    let covers_to_eof =
        skip == 0 && u64::from(lblk) * block_size as u64 + bytes.len() as u64 >= state.size;
    if !whole {
        match kind {
            MapKind::Written(_) if !covers_to_eof => match load_page(fs, inode, state, lblk) {
                Ok(Some(old)) => page.copy_from_slice(&old),
                Ok(None) => page.fill(0),
                Err(error) => return Err(error),
            },
            _ => page.fill(0),
        }
    }
    page[skip..skip + bytes.len()].copy_from_slice(bytes);
    inode.pages.insert_dirty(lblk, Buf::from(page), reserve);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attr::{Cred, SetAttr};
    use crate::file::truncate;
    use crate::fsync;
    use crate::testing::TestFs;

    /// Writes until there is no space, even after what was reserved for metadata is free again.
    fn fill_up(test: &TestFs) {
        let big = test.create("big");
        let append = WriteOptions { append: true, ..WriteOptions::default() };
        while write(&test.fs, &big, 0, &[1; 4096], append).is_ok() {
            while write(&test.fs, &big, 0, &[1; 4096], append).is_ok() {}
            test.fs.sync().unwrap();
        }
    }

    /// Between two ticks of the clock an overwrite leaves the inode as it is.
    #[test]
    fn an_fsync_commits_nothing_for_an_overwrite_with_the_same_times() {
        let test = TestFs::new(&["-t", "ext4", "-b", "4096"], 16);
        let fs = &test.fs;
        let file = test.create("file");
        let overwrite = || {
            write(fs, &file, 0, &[1; 4096], WriteOptions::default()).unwrap();
            fsync::fsync(fs, &file, false).unwrap();
        };
        overwrite();
        let is_kept = |_| {
            let (times, commits) = (file.state.read().disk.mtime, fs.journal().stats().commits);
            overwrite();
            let has_committed = fs.journal().stats().commits > commits;
            let has_ticked = file.state.read().disk.mtime != times;
            assert_eq!(has_committed, has_ticked);
            !has_ticked
        };
        assert!((0..1000).any(is_kept), "the clock ticks for each write");
        drop(file);
        test.finish();
    }

    /// What a write without space has changed is on the device after the unmount.
    #[test]
    fn a_write_that_fails_leaves_nothing_unwritten() {
        let test = TestFs::new(&["-t", "ext4", "-b", "4096"], 16);
        let fs = &test.fs;
        let (short, program) = (test.create("short"), test.create("program"));
        for inode in [&short, &program] {
            write(fs, inode, 0, &[1; 843], WriteOptions::default()).unwrap();
        }
        let change = SetAttr { mode: Some(0o4755), ..SetAttr::default() };
        attr::set_attr(fs, &program, &change, &Cred::root()).unwrap();
        fill_up(&test);
        let unprivileged = WriteOptions { kill_privileges: true, ..WriteOptions::default() };
        for (inode, options) in [(&short, WriteOptions::default()), (&program, unprivileged)] {
            let error = write(fs, inode, 40_960, b"more", options).unwrap_err();
            assert!(error.is(Errno::NOSPC));
        }
        // The old tail is dirty, and keeps the size back until it is written.
        truncate::set_size(fs, &short, 64_812).unwrap();
        drop((short, program));
        fs.unmount().unwrap();
        let stat = test.debugfs("stat /short");
        assert!(stat.contains("Size: 64812\n"), "{stat}");
        let stat = test.debugfs("stat /program");
        assert!(stat.contains("Mode:  0755 "), "{stat}");
        test.finish();
    }
}
