//! Makes the mount read-only after an error has made the file system read-only.
//!
//! Owns the thread that polls whether the engine has turned read-only, and then remounts:
//! /proc/mounts says `ro`, and the kernel refuses writes itself, as with ext4's
//! `errors=remount-ro`. syncfs(2) still reaches the engine, which says that not all is durable.
//!
//! The kernel refuses that while files are open for writing, so it is tried until it succeeds.
//! Needs root; without root only `fjord stats` and errors of calls show it.

use std::{
    path::PathBuf,
    sync::mpsc::{self, RecvTimeoutError, Sender},
    thread::{self, JoinHandle},
    time::Duration,
};

use fjord::Fs;
use rustix::mount::MountFlags;

use crate::mount::{self, MountError};

/// Poll interval.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// Ends the thread when it is dropped.
pub(crate) struct Standstill {
    end: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Standstill {
    /// Watches `fs`, which is mounted on `dir` for writing.
    pub(crate) fn watch(fs: Fs, dir: PathBuf) -> Standstill {
        let (end, ended) = mpsc::channel();
        let look = move || {
            while ended.recv_timeout(LOOK_EVERY) == Err(RecvTimeoutError::Timeout) {
                if fs.is_read_only() && show(&dir) {
                    return;
                }
            }
        };
        let spawned = thread::Builder::new().name("fjord-standstill".into()).spawn(look);
        if let Err(error) = &spawned {
            tracing::warn!(%error, "after an error of the file system, the mount table will not \
                                    show ro");
        }
        Standstill { end: Some(end), thread: spawned.ok() }
    }
}

impl Drop for Standstill {
    fn drop(&mut self) {
        drop(self.end.take());
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread that watches for errors had panicked");
        }
    }
}

/// Remounts read-only. False when it is to be tried again.
fn show(dir: &std::path::Path) -> bool {
    let flags = match mount::flags_of(dir) {
        Ok(flags) if flags.contains(MountFlags::RDONLY) => return true,
        // The mount, not the file system: of one that is read-only the kernel says that all is durable (syncfs(2) returns
        // 0) without asking the server.
        Ok(flags) => flags | MountFlags::RDONLY | MountFlags::BIND,
        Err(_) => return false,
    };
    match mount::remount(dir, flags) {
        Ok(()) => {
            tracing::warn!("remounted read-only");
            true
        }
        Err(MountError::Busy(_)) => false,
        Err(error) => {
            tracing::warn!(%error, "cannot remount read-only after an error");
            true
        }
    }
}
