//! Background writeback: of old data, and under memory pressure.
//!
//! Owns which inodes of the dirty list are written together, and when a writer has to help. A
//! writer with much dirty data helps; a writer of a small file does not. A small file with regular
//! fsyncs is left to them: the fsync would have to wait for the group that writes it back.
//!
//! Invariant: a thread that holds the writeback locks of several inodes has blocked only on the
//! first.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fjord_block::Class;
use fjord_block::lock::MutexGuard;
use rustix::io::Errno;

use super::pace;
use super::writeback::{
    Batch, Mode, complete, drain, noting, store_lazy, submit_all, submit_together, wanted_size,
    write_batches, write_inode,
};
use crate::error::Result;
use crate::fs::FsInner;
use crate::fs::dirty::Busy;
use crate::inode::{InFlight, Inode};

/// Most pages of an inode that is written back together with others: so that none waits for a pass (unless it has
/// grown meanwhile).
const GROUP_PAGES_MAX: usize = pace::SMALL_PAGES;

/// Selection from the dirty list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Want {
    /// What has been dirty for so long.
    Older(Duration),
    /// Anything.
    Any,
    /// What helps when too much is dirty.
    Bulk,
}

/// Writes back inodes from the dirty list, oldest first, until `enough` says so. Errors are
/// recorded in the inodes and the file system.
pub(crate) fn write_old(fs: &Arc<FsInner>, want: Want, class: Class, enough: impl Fn() -> bool) {
    let now = Instant::now();
    let age = if let Want::Older(age) = want { age } else { Duration::ZERO };
    loop {
        let mut group = Vec::new();
        let most = fs.pace.group_inodes();
        for _ in 0..fs.dirty_inodes.len() {
            if group.len() >= most || enough() {
                break;
            }
            let Some(busy) = fs.dirty_inodes.pop_older_than(now, age) else { break };
            if want == Want::Bulk && fs.pace.is_left_to_its_owner(busy.inode()) {
                busy.put_back();
                continue;
            }
            let is_big = busy.inode().pages.dirty_count() > GROUP_PAGES_MAX;
            group.push(busy);
            if is_big {
                // The rest is left to other threads, so that they can help.
                break;
            }
        }
        if group.is_empty() {
            return;
        }
        match write_group(fs, group, class) {
            // Said when it began.
            Err(error) if error.is(Errno::NOSPC) && fs.room.is_full() => {}
            Err(error) => fs.warn(format_args!("writeback failed: {error}")),
            Ok(()) => {}
        }
    }
}

/// An inode of a group whose data has blocks.
struct Started<'a> {
    busy: &'a Busy<'a>,
    in_flight: MutexGuard<'a, InFlight>,
    pending: VecDeque<Batch>,
    /// See [`wanted_size`].
    wanted: u64,
    result: Result<()>,
}

impl Started<'_> {
    fn batches(&mut self) -> impl Iterator<Item = (&Inode, &mut Batch)> {
        let inode: &Inode = self.busy.inode();
        self.pending.iter_mut().map(move |batch| (inode, batch))
    }
}

/// Writes back many inodes, keeping the device busy with the data of several at once: files
/// of a page or two would otherwise each cost a round trip. While the device has the data of some, the
/// extents of those before them are stored. Files with much data come after
/// them, alone: an fsync of a small file must not wait for a group that has a big one.
///
/// # Errors
/// The first error met; the other inodes are written all the same.
pub(crate) fn write_group(fs: &Arc<FsInner>, group: Vec<Busy<'_>>, class: Class) -> Result<()> {
    let mut first_error = Ok(());
    let mut before: Vec<Started<'_>> = Vec::new();
    let mut others = Vec::new();
    for part in group.chunks(fs.pace.group_inodes()) {
        let mut started: Vec<Started<'_>> = Vec::new();
        for busy in part {
            let is_small = busy.inode().pages.dirty_count() <= GROUP_PAGES_MAX;
            let may_wait = before.is_empty() && started.is_empty();
            let one = match is_small {
                true => start_one(fs, busy, may_wait, class),
                false => None,
            };
            match one {
                Some(one) => started.push(one),
                None => others.push(busy),
            }
        }
        let mut batches: Vec<_> = started.iter_mut().flat_map(Started::batches).collect();
        submit_together(fs, &mut batches);
        let ended = end_all(fs, std::mem::replace(&mut before, started), class);
        first_error = first_error.and(ended);
    }
    first_error = first_error.and(end_all(fs, before, class));
    for busy in others {
        let written = write_inode(fs, busy.inode(), 0..u64::MAX, Mode::DataFirst(class));
        first_error = first_error.and(written);
    }
    first_error
}

fn end_all(fs: &Arc<FsInner>, started: Vec<Started<'_>>, class: Class) -> Result<()> {
    let mut first_error = Ok(());
    for one in started {
        first_error = first_error.and(end_one(fs, one, class));
    }
    first_error
}

/// Begins the writeback of an inode with little data, which [`submit_together`] submits. `None` if its lock is taken: a thread that holds
/// several may block only on the first, or two groups would deadlock.
fn start_one<'a>(
    fs: &Arc<FsInner>,
    busy: &'a Busy<'a>,
    may_wait: bool,
    class: Class,
) -> Option<Started<'a>> {
    let inode = busy.inode();
    let mut in_flight =
        if may_wait { inode.lock_writeback() } else { inode.writeback.try_lock()? };
    let mut pending = VecDeque::new();
    let mode = Mode::Together(class);
    let wanted = wanted_size(inode, &(0..u64::MAX));
    let result = drain(fs, inode, &mut in_flight)
        .and_then(|()| submit_all(fs, inode, &mut in_flight, 0..u64::MAX, mode, &mut pending));
    Some(Started { busy, in_flight, pending, wanted, result })
}

fn end_one(fs: &Arc<FsInner>, mut one: Started<'_>, class: Class) -> Result<()> {
    let inode = one.busy.inode();
    let mut result = one.result;
    for batch in one.pending {
        result = result.and(complete(fs, inode, batch));
    }
    let mode = Mode::DataFirst(class);
    let result = result.and_then(|()| match store_lazy(fs, inode, mode)? {
        size if size >= one.wanted => Ok(()),
        _ => write_batches(fs, inode, &mut one.in_flight, 0..u64::MAX, mode),
    });
    noting(fs, inode, result)
}

/// Throttles a writer to `inode` while too much of the cache is dirty. Called without any lock
/// held.
///
/// # Errors
/// `ENOSPC` when that much is dirty because the disk below is full.
pub(crate) fn throttle(fs: &Arc<FsInner>, inode: &Inode) -> Result<()> {
    let lru = &fs.page_lru;
    let dirty_bytes = lru.dirty_bytes();
    if dirty_bytes > lru.background_threshold_bytes() {
        fs.wake_writeback();
    }
    let limit = lru.throttle_threshold_bytes();
    if dirty_bytes <= limit {
        return Ok(());
    }
    let urgent = lru.urgent_threshold_bytes();
    if inode.pages.dirty_count() > pace::SMALL_PAGES {
        write_old(fs, Want::Bulk, Class::Async, || lru.dirty_bytes() <= limit);
    }
    if lru.dirty_bytes() > urgent {
        write_old(fs, Want::Any, Class::Async, || lru.dirty_bytes() <= urgent);
    }
    if fs.room.is_full() && lru.dirty_bytes() > limit {
        return Err(Errno::NOSPC.into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file::write::{WriteOptions, write};
    use crate::fsync;
    use crate::options::MountOptions;
    use crate::testing::{TestFs, quiet_options};

    const PAGE: usize = 4096;

    fn write_pages(fs: &Arc<FsInner>, inode: &Arc<Inode>, at: usize, count: usize) {
        let data = vec![0x5a; count * PAGE];
        let offset = (at * PAGE) as u64;
        assert_eq!(write(fs, inode, offset, &data, WriteOptions::default()).unwrap(), data.len());
    }

    #[test]
    fn a_small_file_is_left_to_whoever_syncs_it() {
        let test = TestFs::new(&["-t", "ext4", "-b", "4096"], 32);
        let fs = &test.fs;
        let (small, big) = (test.create("small"), test.create("big"));
        for inode in [&small, &big] {
            write_pages(fs, inode, 0, 1);
            fsync::fsync(fs, inode, false).unwrap();
        }
        write_pages(fs, &small, 1, 1);
        write_pages(fs, &big, 1, GROUP_PAGES_MAX + 1);
        write_old(fs, Want::Bulk, Class::Background, || false);
        assert_eq!([small.pages.dirty_count(), big.pages.dirty_count()], [1, 0]);
        // It is on the list as before: whoever wants everything gets it.
        write_old(fs, Want::Any, Class::Background, || false);
        assert_eq!(small.pages.dirty_count(), 0);
        // Nobody has called fsync for it since it was big.
        fsync::fsync(fs, &big, false).unwrap();
        write_pages(fs, &big, 0, GROUP_PAGES_MAX + 1);
        fsync::fsync(fs, &big, false).unwrap();
        write_pages(fs, &big, 0, 1);
        write_old(fs, Want::Bulk, Class::Background, || false);
        assert_eq!(big.pages.dirty_count(), 0);
        drop((small, big));
        test.finish();
    }

    #[test]
    fn whoever_dirties_little_helps_late() {
        let options = MountOptions { cache_size_bytes: 16 << 20, ..quiet_options() };
        let test = TestFs::with_options(&["-t", "ext4", "-b", "4096"], 64, &options);
        let fs = &test.fs;
        let (small, big) = (test.create("small"), test.create("big"));
        let lru = &fs.page_lru;
        let pages_in = |bytes: u64| bytes as usize / PAGE;
        let much = pages_in(lru.throttle_threshold_bytes()) + 8;
        write_pages(fs, &big, 0, much);
        write_pages(fs, &small, 0, 1);
        assert_eq!(pages_in(lru.dirty_bytes()), much + 1);
        write_pages(fs, &big, much, 1);
        assert_eq!([small.pages.dirty_count(), big.pages.dirty_count()], [1, 1]);
        write_pages(fs, &big, 0, pages_in(lru.urgent_threshold_bytes()) + 8);
        write_pages(fs, &small, 1, 1);
        assert!(lru.dirty_bytes() <= lru.throttle_threshold_bytes());
        drop((small, big));
        test.finish();
    }

    /// Threads with much to write, beside one that calls fsync for little: every byte arrives, and
    /// all passes come back.
    #[test]
    fn bulk_data_beside_small_fsyncs_arrives() {
        let test = TestFs::new(&["-t", "ext4", "-b", "4096"], 64);
        let fs = &test.fs;
        let small = test.create("small");
        let big: Vec<_> = (0..4).map(|number| test.create(&format!("big{number}"))).collect();
        std::thread::scope(|scope| {
            for inode in &big {
                scope.spawn(move || {
                    for round in 0..3 {
                        write_pages(fs, inode, round * 400, 400);
                        fsync::fsync(fs, inode, false).unwrap();
                    }
                });
            }
            for at in 0..20 {
                write_pages(fs, &small, at, 1);
                fsync::fsync(fs, &small, false).unwrap();
            }
        });
        assert!(fs.pace.needs_pass());
        assert_eq!(fs.pace.out_count(), 0);
        for inode in big.iter().chain([&small]) {
            assert_eq!(inode.pages.dirty_count(), 0);
            let state = inode.state.read();
            assert_eq!(state.disk.size, state.size);
        }
        drop((small, big));
        test.finish();
    }
}
