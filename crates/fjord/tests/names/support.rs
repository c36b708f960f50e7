//! Images to work on, and what is done with them afterwards.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fjord::{Cred, Fs, InodeRef, MountOptions};
use fjord_testkit::image::{self, Scratch};
use fjord_testkit::tools;

/// A scratch image made by mke2fs.
pub(crate) struct Image {
    /// Removes the directory when the test ends.
    _scratch: Scratch,
    path: PathBuf,
}

impl Image {
    /// Makes an image of `mib` MiB with these arguments for mke2fs.
    pub(crate) fn new(mib: u64, mke2fs: &[&str]) -> Image {
        let scratch = Scratch::in_memory("names").expect("scratch directory");
        let path = scratch.join("image");
        image::make_sparse(&path, mib << 20).expect("sparse file");
        let mut command = tools::command("mke2fs").expect("mke2fs");
        command.args(["-q", "-F"]).args(mke2fs).arg(&path);
        tools::run(&mut command).and_then(tools::Output::ok).expect("mke2fs");
        Image { _scratch: scratch, path }
    }

    /// Where it is.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Opens it without background threads.
    pub(crate) fn open(&self) -> Fs {
        let options = MountOptions { background_threads: false, ..MountOptions::default() };
        Fs::open(&self.path, &options).expect("the image opens")
    }

    /// Asks e2fsck.
    pub(crate) fn check(&self) {
        image::e2fsck_clean(&self.path).expect("e2fsck finds nothing");
    }
}

/// Unmounts; all references are gone.
pub(crate) fn finish(fs: Fs) {
    fs.unmount().expect("unmount");
}

/// All names of a directory with inode numbers, `.` and `..` left out.
pub(crate) fn names(dir: &InodeRef) -> Vec<(Vec<u8>, u32)> {
    let mut names = Vec::new();
    dir.read_dir(0, &mut |entry| {
        if entry.name != b"." && entry.name != b".." {
            names.push((entry.name.to_vec(), entry.ino.0));
        }
        true
    })
    .expect("read_dir");
    names.sort();
    names
}

/// The errno of a result, 0 for success.
pub(crate) fn errno<T>(result: &fjord::Result<T>) -> i32 {
    result.as_ref().err().map_or(0, fjord::Error::errno)
}

pub(crate) fn root_cred() -> Cred {
    Cred::root()
}

/// Ends the process when a test does not end in time: a deadlock shall not look like a
/// slow machine.
pub(crate) struct Watchdog(Arc<AtomicBool>);

impl Watchdog {
    pub(crate) fn new(what: &'static str, seconds: u64) -> Watchdog {
        let done = Arc::new(AtomicBool::new(false));
        let seen = done.clone();
        std::thread::spawn(move || {
            for _ in 0..seconds * 10 {
                std::thread::sleep(Duration::from_millis(100));
                if seen.load(Ordering::Relaxed) {
                    return;
                }
            }
            eprintln!("{what}: still running after {seconds} s");
            std::process::abort();
        });
        Watchdog(done)
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
