//! sync, shutdown and unmount.
//!
//! Owns the order of the steps to a clean image. Invariant: unmount marks the
//! image clean only after data, metadata and superblock counts are on the device and
//! flushed; after an error it never does.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use fjord_block::Class;
use fjord_block::lock::{Condvar, Mutex, Rank};
#[cfg(debug_assertions)]
use fjord_block::plant::{Bug, planted};
use rustix::io::Errno;

use crate::error::{Error, Result};
use crate::file::background;
use crate::fs::FsInner;
use crate::fs::status::ShutdownMode;
use crate::inode::{Inode, Instance};

/// How long after its removal a file is expected to be let go of by a front end that holds it, and
/// by one that seems to have it open: what it does after close(2) takes a moment, too.
const HELD_WAIT: Duration = Duration::from_millis(500);
const OPEN_WAIT: Duration = Duration::from_millis(50);
/// How long the blocks of a removed file may take to be freed before nobody waits any more.
const DELETION_WAIT: Duration = Duration::from_secs(10);

/// A file without names that is not deleted yet.
struct Nameless {
    since: Instant,
    inode: Weak<Inode>,
    is_being_deleted: bool,
}

impl Nameless {
    /// Until when somebody who wants to see its blocks free should wait.
    fn wait_until(&self) -> Instant {
        let is_open = self.inode.upgrade().is_some_and(|inode| inode.is_referenced());
        self.since
            + match (self.is_being_deleted, is_open) {
                (true, _) => DELETION_WAIT,
                (false, true) => OPEN_WAIT,
                (false, false) => HELD_WAIT,
            }
    }
}

#[derive(Default)]
struct Leaving {
    /// How often a file was freed.
    count: u64,
    /// Each entry has a weak reference, so no other inode can come to be the same instance.
    nameless: HashMap<Instance, Nameless>,
}

impl Leaving {
    fn is_deleting(&self) -> bool {
        self.nameless.values().any(|nameless| nameless.is_being_deleted)
    }
}

/// Removed files that still have their blocks, and where those sleep who wait for them.
pub(crate) struct Releases {
    /// Pairs with `released`.
    leaving: Mutex<Leaving>,
    released: Condvar,
}

impl Default for Releases {
    fn default() -> Releases {
        Releases {
            leaving: Mutex::new(Rank::Releases, Leaving::default()),
            released: Condvar::new(),
        }
    }
}

impl Releases {
    /// The last name of a file was removed.
    pub(crate) fn begin(&self, inode: &Arc<Inode>) {
        let nameless = Nameless {
            since: Instant::now(),
            inode: Arc::downgrade(inode),
            is_being_deleted: false,
        };
        self.leaving.lock().nameless.insert(inode.instance(), nameless);
    }

    /// Nobody uses it any more: its blocks are about to be freed.
    pub(crate) fn deletes(&self, inode: &Inode) {
        if let Some(nameless) = self.leaving.lock().nameless.get_mut(&inode.instance()) {
            (nameless.since, nameless.is_being_deleted) = (Instant::now(), true);
        }
    }

    /// A removed file has been freed, or will not be for now.
    pub(crate) fn notify(&self, inode: &Inode) {
        let mut leaving = self.leaving.lock();
        leaving.count += 1;
        leaving.nameless.remove(&inode.instance());
        drop(leaving);
        self.released.notify_all();
    }

    /// Waits until the removed files are freed that nobody has open. Returns whether one was freed
    /// meanwhile.
    fn settle(&self) -> bool {
        let mut leaving = self.leaving.lock();
        let before_count = leaving.count;
        loop {
            let now = Instant::now();
            let ends = leaving.nameless.values().map(Nameless::wait_until);
            let Some(next) = ends.filter(|end| *end > now).min() else {
                return leaving.count != before_count;
            };
            // Some let go without a word.
            self.released.wait_until(&mut leaving, next.min(now + OPEN_WAIT));
        }
    }

    /// Waits until no file is being deleted.
    fn finish(&self) {
        let mut leaving = self.leaving.lock();
        while leaving.is_deleting() {
            self.released.wait(&mut leaving);
        }
    }

    #[cfg(test)]
    fn is_deleting(&self) -> bool {
        self.leaving.lock().is_deleting()
    }
}

impl FsInner {
    /// Writes all dirty data and commits: what `syncfs(2)` promises.
    pub(crate) fn sync(self: &Arc<Self>) -> Result<()> {
        self.check_alive()?;
        if self.is_read_only() {
            return self.status.first_error().map_or(Ok(()), Err);
        }
        let written = self.write_all_dirty();
        // Data without space on the host stays dirty; the rest is still written.
        if written.as_ref().is_err_and(|error| !error.is(Errno::NOSPC)) {
            return written;
        }
        self.commit()?;
        self.flush_device().and(written)
    }

    /// Waits for removed files that a front end is about to let go of, and for the end of
    /// deletions, so that what they had is free afterwards; not for files that are in use.
    pub(crate) fn settle_removed(&self) {
        if !self.orphans.is_empty() {
            self.releases.settle();
        }
    }

    /// Commits what is under way; blocks that it freed are free then.
    pub(crate) fn commit(&self) -> Result<()> {
        self.journal().commit_running().map(drop).map_err(|error| self.failed(error.into()))
    }

    fn failed(&self, error: Error) -> Error {
        self.note_write_error(&error);
        error
    }

    fn write_all_dirty(self: &Arc<Self>) -> Result<()> {
        let written = self.ending_full(|| {
            background::write_group(self, self.dirty_inodes.take_all(), Class::Async)
        });
        // Without the check, the explorer has to find the planted bug by a power cut.
        #[cfg(debug_assertions)]
        if written.is_ok() && !planted(Bug::ShrunkPageForgotten) {
            self.check_dirty_are_listed();
        }
        written
    }

    /// A dirty inode that is not on the list is never written, and nobody would hear of it.
    #[cfg(debug_assertions)]
    fn check_dirty_are_listed(&self) {
        let unlisted = self.inodes.unlisted_dirty();
        let is_in_order = !self.is_read_only() && !self.status.is_shut_down();
        if let Some(ino) = unlisted.filter(|_| is_in_order) {
            panic!("inode {ino} has something to write, and is not on the list of dirty inodes");
        }
    }

    /// After `ENOSPC`: turns reservations into blocks and makes freed blocks usable again, those of
    /// files that are being deleted included. Returns whether another try may find space.
    pub(crate) fn regain_space(self: &Arc<Self>) -> bool {
        // A front end lets go of a removed file a moment after the removal, and a large file is
        // freed in several transactions.
        let freed = !self.orphans.is_empty() && self.releases.settle();
        let waiting = self.pending_free_blocks() > 0;
        let dirty = self.page_lru.dirty_bytes() > 0;
        if !freed && !waiting && !dirty {
            return false;
        }
        let written = if dirty { self.write_all_dirty() } else { Ok(()) };
        written.is_ok() && self.journal().commit_running().is_ok()
    }

    /// Stops the file system in one of three ways; every later call fails with EIO.
    pub(crate) fn go_down(self: &Arc<Self>, mode: ShutdownMode) -> Result<()> {
        let result = match mode {
            ShutdownMode::Default => self.sync(),
            ShutdownMode::LogFlush => {
                self.journal().commit_running().map(drop).map_err(Error::from)
            }
            ShutdownMode::NoLogFlush => Ok(()),
        };
        self.status.shut_down();
        self.journal().shutdown();
        result
    }

    /// Checkpoints everything and marks the image clean. A second call does nothing.
    pub(crate) fn unmount(self: &Arc<Self>) -> Result<()> {
        // A growth ends first; none begins afterwards.
        let _still = self.resize_lock.lock();
        if self.status.is_unmounted() {
            return Ok(());
        }
        self.threads.stop();
        let result = if self.options.read_only { Ok(()) } else { self.come_to_rest() };
        self.mmp.release();
        self.status.set_unmounted();
        self.device.release();
        result
    }

    fn come_to_rest(self: &Arc<Self>) -> Result<()> {
        if self.is_read_only() || self.status.is_shut_down() {
            return self.status.first_error().map_or(Ok(()), Err);
        }
        // A front end may have let go of removed files just now, in other threads.
        self.settle_removed();
        self.releases.finish();
        let written = self.write_all_dirty();
        let unwritten_bytes = self.page_lru.dirty_bytes();
        let written = match written {
            Err(error) if error.is(Errno::NOSPC) => Err(Error::NoRoom(format!(
                "{unwritten_bytes} bytes of file data that no fsync had made durable are lost: the \
                 file system that holds the image is full"
            ))),
            other => Ok(other?),
        };
        self.empty_log()?;
        self.write_clean_superblock().map_err(|error| self.failed(error))?;
        written
    }

    /// Commits, checkpoints everything and closes the journal.
    fn empty_log(self: &Arc<Self>) -> Result<()> {
        self.commit()?;
        self.journal().checkpoint_all().map_err(|error| self.failed(error.into()))?;
        self.journal().close().map_err(|error| self.failed(error.into()))
    }

    /// Ends a recovery that no mount for writing follows. The device stays as it is for the next user.
    pub(crate) fn end_recovery(self: &Arc<Self>) -> Result<()> {
        let rested = match self.status.first_error() {
            Some(error) => Err(error),
            None => self
                .write_all_dirty()
                .and_then(|()| self.empty_log())
                .and_then(|()| self.write_recovered_superblock().map_err(|e| self.failed(e))),
        };
        self.mmp.release();
        self.status.set_unmounted();
        rested
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file::write::{WriteOptions, write};
    use crate::inode::table;
    use crate::namei;
    use crate::testing::TestFs;
    use fjord_format::InodeNo;

    /// A file with many extents, whose last name is gone: its deletion takes a while.
    fn removed_file(test: &TestFs) -> impl Send + use<> {
        let fs = &test.fs;
        let file = test.create("file");
        for at in 0..12_000 {
            write(fs, &file, at * 2048, &[1; 1024], WriteOptions::default()).unwrap();
        }
        fs.sync().unwrap();
        drop(file);
        let root = table::get(fs, InodeNo::ROOT).unwrap();
        namei::unlink(fs, &root, b"file").unwrap()
    }

    /// Another thread is deleting a file with many extents when the file system is unmounted.
    #[test]
    fn an_unmount_waits_for_deletions() {
        let test = TestFs::new(&["-t", "ext4", "-b", "1024"], 64);
        let fs = &test.fs;
        let removed = removed_file(&test);
        std::thread::scope(|scope| {
            scope.spawn(|| drop(removed));
            while !fs.releases.is_deleting() {
                std::thread::yield_now();
            }
            fs.unmount().unwrap();
        });
        test.finish();
    }

    /// ENOSPC while another thread has freed a part of a large file: the rest comes, too.
    #[test]
    fn the_whole_of_a_deleted_file_is_regained() {
        let test = TestFs::new(&["-t", "ext4", "-b", "1024"], 64);
        let fs = &test.fs;
        let removed = removed_file(&test);
        std::thread::scope(|scope| {
            scope.spawn(|| drop(removed));
            while fs.pending_free_blocks() == 0 && !fs.orphans.is_empty() {
                std::thread::yield_now();
            }
            assert!(fs.regain_space());
            assert!(!fs.releases.is_deleting(), "blocks of the file are still in use");
        });
        fs.unmount().unwrap();
        test.finish();
    }

    impl Releases {
        fn set_since(&self, inode: &Inode, since: Instant) {
            self.leaving.lock().nameless.get_mut(&inode.instance()).unwrap().since = since;
        }
    }

    #[test]
    fn removed_files_are_waited_for_until_they_are_gone_or_old() {
        let test = TestFs::new(&["-t", "ext4"], 16);
        let (file, other) = (test.create("file"), test.create("other"));
        let releases = Releases::default();
        releases.settle();
        releases.begin(&file);
        std::thread::scope(|scope| {
            // So young that it is waited for, however long the threads sleep.
            let hour = Duration::from_secs(3600);
            releases.set_since(&file, Instant::now() + hour);
            let waiter = scope.spawn(|| releases.settle());
            // A waiter that does not wait goes unnoticed if it is slower than this.
            std::thread::sleep(Duration::from_millis(20));
            assert!(!waiter.is_finished());
            releases.deletes(&file);
            releases.set_since(&file, Instant::now() + hour);
            releases.notify(&file);
            waiter.join().unwrap();
        });
        let began = Instant::now();
        releases.begin(&other);
        releases.settle();
        assert!(began.elapsed() >= HELD_WAIT);
        // Old now. On a busy machine a call may take long; but one of many does not.
        let began = Instant::now();
        let took = || {
            let began = Instant::now();
            releases.settle();
            began.elapsed()
        };
        while took() >= HELD_WAIT / 2 {
            assert!(began.elapsed() < Duration::from_secs(120), "it waits each time");
        }
    }

    /// The number of a deleted file has a new owner, which is removed before the deletion of the
    /// first one is reported.
    #[test]
    fn the_end_of_a_deletion_is_not_that_of_the_next_file_of_its_number() {
        let test = TestFs::new(&["-t", "ext4"], 16);
        let old = test.create("file");
        let new = table::detached(&test.fs, old.ino, old.state.read().disk.clone());
        let releases = Releases::default();
        releases.begin(&old);
        releases.deletes(&old);
        releases.begin(&new);
        releases.deletes(&new);
        releases.notify(&old);
        assert!(releases.is_deleting());
        releases.notify(&new);
        assert!(!releases.is_deleting());
    }
}
