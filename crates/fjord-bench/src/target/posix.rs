//! A directory of a mounted file system as a target.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::{BenchFile, BenchFs};
use crate::error::{BenchError, Result};

/// Calls below one directory.
pub(crate) struct PosixFs {
    root: PathBuf,
    /// The root was made for the benchmark and goes with it.
    temporary: bool,
}

impl PosixFs {
    pub(crate) fn new(root: &Path) -> PosixFs {
        PosixFs { root: root.to_owned(), temporary: false }
    }

    /// Works in a new directory below `parent`, which is removed in the end.
    pub(crate) fn in_new_dir(parent: &Path) -> Result<PosixFs> {
        let root = parent.join(format!("fjord-bench-{}", std::process::id()));
        fs::create_dir(&root).map_err(BenchError::io(format!("create {}", root.display())))?;
        Ok(PosixFs { root, temporary: true })
    }
}

impl Drop for PosixFs {
    fn drop(&mut self) {
        if self.temporary {
            // What is left is harmless, and a drop has nobody to tell.
            let _ = fs::remove_dir_all(&self.root);
        }
    }
}

struct PosixFile(File);

impl BenchFile for PosixFile {
    fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.0.write_all_at(data, offset)
    }
    fn read_at(&mut self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        self.0.read_exact_at(data, offset)
    }
    fn sync(&mut self, data_only: bool) -> io::Result<()> {
        if data_only { self.0.sync_data() } else { self.0.sync_all() }
    }
}

impl BenchFs for PosixFs {
    fn create(&self, path: &str) -> io::Result<Box<dyn BenchFile>> {
        let path = self.root.join(path);
        let file = File::options().read(true).write(true).create(true).truncate(true).open(path)?;
        Ok(Box::new(PosixFile(file)))
    }
    fn open(&self, path: &str) -> io::Result<Box<dyn BenchFile>> {
        Ok(Box::new(PosixFile(File::options().read(true).write(true).open(self.root.join(path))?)))
    }
    fn make_dir(&self, path: &str) -> io::Result<()> {
        fs::create_dir(self.root.join(path))
    }
    fn remove_file(&self, path: &str) -> io::Result<()> {
        fs::remove_file(self.root.join(path))
    }
    fn remove_tree(&self, path: &str) -> io::Result<()> {
        fs::remove_dir_all(self.root.join(path))
    }
    fn sync(&self) -> io::Result<()> {
        Ok(rustix::fs::syncfs(File::open(&self.root)?)?)
    }
}
