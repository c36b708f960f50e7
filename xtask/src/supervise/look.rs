//! Where the kernel tells of processes, mounts and devices.
//!
//! Owns descriptors of /proc, /sys and the list of FUSE connections. Invariant: once [`open`] has
//! returned, a mount over one of them does not change what is read here.

use std::{
    ffi::OsString,
    fs::File,
    io::{self, Read, Write},
    os::{
        fd::OwnedFd,
        unix::ffi::{OsStrExt, OsStringExt},
    },
    path::{Path, PathBuf},
    sync::OnceLock,
};

use anyhow::{Context, Result};
use rustix::fs::{Dir, Mode, OFlags, open as open_at_path, openat, readlinkat};

pub(super) static PROC: Place = Place::at("/proc");
pub(super) static SYS: Place = Place::at("/sys");
/// One folder for each connection, if the kernel has FUSE and fusectl is mounted.
pub(super) static CONNECTIONS: Place = Place::at("/sys/fs/fuse/connections");

/// A folder that the kernel fills; opened at its first use.
pub(super) struct Place {
    path: &'static str,
    dir: OnceLock<rustix::io::Result<OwnedFd>>,
}

/// Opens all places. Call it after the last change of this process' own mounts.
pub(super) fn open() -> Result<()> {
    PROC.dir().context("/proc")?;
    SYS.dir().context("/sys")?;
    // It need not be there.
    let _ = CONNECTIONS.dir();
    Ok(())
}

/// Writes to a file in a folder that is open.
pub(super) fn write_below(folder: &File, name: &str, text: &str) -> io::Result<()> {
    let file = openat(folder, name, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
    File::from(file).write_all(text.as_bytes())
}

impl Place {
    const fn at(path: &'static str) -> Place {
        Place { path, dir: OnceLock::new() }
    }

    fn dir(&self) -> io::Result<&OwnedFd> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = self.dir.get_or_init(|| open_at_path(self.path, flags, Mode::empty()));
        dir.as_ref().map_err(|error| (*error).into())
    }

    /// Opens a path below it; symbolic links are followed.
    pub(super) fn open(&self, path: impl AsRef<Path>, flags: OFlags) -> io::Result<File> {
        let flags = flags | OFlags::CLOEXEC | OFlags::NOCTTY;
        Ok(File::from(openat(self.dir()?, path.as_ref(), flags, Mode::empty())?))
    }

    pub(super) fn read(&self, path: impl AsRef<Path>) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        self.open(path, OFlags::RDONLY)?.read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    pub(super) fn text(&self, path: impl AsRef<Path>) -> io::Result<String> {
        Ok(String::from_utf8_lossy(&self.read(path)?).into_owned())
    }

    pub(super) fn link(&self, path: impl AsRef<Path>) -> io::Result<PathBuf> {
        let target = readlinkat(self.dir()?, path.as_ref(), Vec::new())?;
        Ok(OsString::from_vec(target.into_bytes()).into())
    }

    /// Names in a folder; none if it cannot be read.
    pub(super) fn names(&self, path: impl AsRef<Path>) -> Vec<String> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY;
        let Ok(dir) = self.open(path, flags).and_then(|file| Ok(Dir::new(file)?)) else {
            return Vec::new();
        };
        let name = |bytes: &[u8]| std::ffi::OsStr::from_bytes(bytes).to_str().map(str::to_owned);
        let names = dir.flatten().filter_map(|entry| name(entry.file_name().to_bytes()));
        names.filter(|name| name != "." && name != "..").collect()
    }
}
