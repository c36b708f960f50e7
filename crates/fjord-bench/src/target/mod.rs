//! Targets set up to be measured. Owns the way from a [`Target`] to something that takes calls,
//! and its tear-down.
//!
//! Invariant: whatever was mounted, attached, started or created for a [`Stand`] goes away with
//! it, also when a run ends early by an error.

mod bytes;
mod library;
mod mount;
mod posix;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub(crate) use bytes::DirectFile;
pub(crate) use library::LibraryFs;
pub(crate) use mount::{Mount, run_program};
pub(crate) use posix::PosixFs;

use crate::error::{BenchError, Result};
use crate::options::{Options, Target};

/// An open file of a target.
pub(crate) trait BenchFile: Send {
    fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()>;
    /// Fills `data`.
    fn read_at(&mut self, offset: u64, data: &mut [u8]) -> io::Result<()>;
    fn sync(&mut self, data_only: bool) -> io::Result<()>;
}

/// The calls of a target. Paths are relative to its root.
pub(crate) trait BenchFs: Send + Sync {
    /// Creates or empties a file, for reading and writing.
    fn create(&self, path: &str) -> io::Result<Box<dyn BenchFile>>;
    fn open(&self, path: &str) -> io::Result<Box<dyn BenchFile>>;
    fn make_dir(&self, path: &str) -> io::Result<()>;
    fn remove_file(&self, path: &str) -> io::Result<()>;
    fn remove_tree(&self, path: &str) -> io::Result<()>;
    fn sync(&self) -> io::Result<()>;
}

/// A target ready to be measured.
pub(crate) struct Stand {
    pub(crate) target: Target,
    /// None only while remounting.
    fs: Option<Arc<dyn BenchFs>>,
    /// Unmounts when dropped; declared after `fs`, so that files close first.
    mount: Option<Mount>,
    /// The image, removed with the stand.
    image: Option<PathBuf>,
    options: Options,
}

impl Stand {
    /// Makes the image of `target`, and mounts or opens it.
    pub(crate) fn new(target: &Target, options: &Options) -> Result<Stand> {
        if target.needs_root() && !rustix::process::geteuid().is_root() {
            return Err(BenchError::NotRoot { target: target.name() });
        }
        let mut stand = Stand {
            target: target.clone(),
            fs: None,
            mount: None,
            image: None,
            options: options.clone(),
        };
        if let Target::Directory(path) = target {
            stand.fs = Some(Arc::new(PosixFs::in_new_dir(path)?));
            return Ok(stand);
        }
        let image = options.dir.join(format!("{}.img", target.name()));
        stand.image = Some(image.clone());
        make_file(&image, options.image_size_bytes)?;
        if target.has_names() {
            let fast_commit: &[&str] =
                if *target == Target::KernelFastCommit { &["-O", "fast_commit"] } else { &[] };
            format(&image, fast_commit)?;
        }
        stand.attach()?;
        Ok(stand)
    }

    /// The calls of the target.
    pub(crate) fn fs(&self) -> Result<Arc<dyn BenchFs>> {
        self.fs
            .clone()
            .ok_or_else(|| BenchError::Usage(format!("{} is not mounted", self.target.name())))
    }

    /// Empties every cache between the files and the disk: unmounts, drops what the host caches
    /// (as root), and mounts again.
    pub(crate) fn remount(&mut self) -> Result<()> {
        if let Target::Directory(_) = self.target {
            self.fs()?.sync().map_err(BenchError::io("sync"))?;
            drop_host_caches();
            return Ok(());
        }
        self.detach()?;
        drop_host_caches();
        self.attach()
    }

    fn attach(&mut self) -> Result<()> {
        let Some(image) = &self.image else { return Ok(()) };
        let dir = self.options.dir.join(format!("{}.mnt", self.target.name()));
        let mut mounted = |mount: Result<Mount>| -> Result<Arc<dyn BenchFs>> {
            let mount = mount?;
            let fs = PosixFs::new(mount.dir());
            self.mount = Some(mount);
            Ok(Arc::new(fs))
        };
        let fs: Arc<dyn BenchFs> = match &self.target {
            Target::Raw => Arc::new(bytes::RawFs::open(image)?),
            Target::Block => Arc::new(bytes::BlockFs::open(image)?),
            Target::Library => Arc::new(LibraryFs::open(image)?),
            Target::Kernel | Target::KernelFastCommit => mounted(Mount::kernel(image, &dir))?,
            Target::Fuse2fs => mounted(Mount::fuse2fs(image, &dir))?,
            Target::Fuse => mounted(Mount::fjord(
                &self.options.fjord_program,
                &self.options.fjord_mount_args,
                image,
                &dir,
            ))?,
            Target::Directory(_) => return Ok(()),
        };
        self.fs = Some(fs);
        Ok(())
    }

    fn detach(&mut self) -> Result<()> {
        self.fs = None;
        match self.mount.take() {
            Some(mount) => mount.unmount(),
            None => Ok(()),
        }
    }

    /// Takes everything down and tells of failures; dropping does the same silently.
    pub(crate) fn finish(mut self) -> Result<()> {
        self.detach()
    }
}

impl Drop for Stand {
    fn drop(&mut self) {
        // The error that ended the run is the one to tell.
        let _ = self.detach();
        if let Some(image) = &self.image {
            let _ = fs::remove_file(image);
        }
    }
}

/// Creates a file whose blocks are all written, so that no target pays for their allocation.
fn make_file(path: &Path, size_bytes: u64) -> Result<()> {
    let failed = || BenchError::io(format!("create {}", path.display()));
    drop(fs::File::create(path).map_err(failed())?);
    let mut file = DirectFile::open(path).map_err(failed())?;
    file.fill(size_bytes).map_err(failed())
}

/// Formats an image as mke2fs does by default, keeping its blocks.
pub(crate) fn format(image: &Path, more: &[&str]) -> Result<()> {
    let mut args =
        vec!["-q", "-F", "-t", "ext4", "-E", "nodiscard,lazy_itable_init=0,lazy_journal_init=0"];
    args.extend(more);
    run_program("mke2fs", &args, &[image])
}

/// Drops the page cache of the host, as far as we may.
fn drop_host_caches() {
    rustix::fs::sync();
    // Without root the caches stay warm for every target alike.
    let _ = fs::write("/proc/sys/vm/drop_caches", "3");
}
