//! Contents from a directory tree: hard links, attributes, devices, holes and times as they
//! are there. Symbolic links are copied, never followed.
//!
//! Invariant: names come from `readdir` and are looked at through the open directory, so that
//! a tree that changes meanwhile leads to an error or an older state, not outside.

use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::os::fd::OwnedFd;
use std::path::Path;

use fjord::{InodeNo, InodeRef, Timespec};
use fjord_format::inode::DeviceNumber;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, SeekFrom, Stat};
use rustix::io::Errno;

use crate::builder::{Builder, COPY_BYTES, Meta, shown};
use crate::error::{Result, TreeError};

/// Directories open at once on the way down; deeper trees are refused.
pub(crate) const DEPTH_MAX: usize = 500;

struct Walk<'b, 'a> {
    builder: &'b mut Builder<'a>,
    /// Device and inode in the source of what has several names, and its inode in the image.
    linked: HashMap<(u64, u64), InodeNo>,
    buffer: Vec<u8>,
}

/// Copies the tree below `source` to the root of the image.
pub(crate) fn from_dir(builder: &mut Builder<'_>, source: &Path) -> Result<()> {
    let path = source.as_os_str().as_encoded_bytes();
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let dir = read(path, rustix::fs::open(source, flags, Mode::empty()))?;
    let root = builder.at(b"/", builder.fs.root())?;
    let mut walk = Walk { builder, linked: HashMap::new(), buffer: vec![0; COPY_BYTES] };
    let meta = walk.meta(path, &read(path, rustix::fs::fstat(&dir))?, Xattrs::Open(&dir))?;
    walk.directory(dir, &root, path, 0)?;
    walk.builder.finish_entry(&root, path, meta)
}

pub(crate) fn read<T>(path: &[u8], result: rustix::io::Result<T>) -> Result<T> {
    result.map_err(|errno| TreeError::Source { path: shown(path), source: errno.into() })
}

pub(crate) fn join(path: &[u8], name: &CStr) -> Vec<u8> {
    [path, name.to_bytes()].join(&b'/')
}

/// The names in a directory, sorted: the same tree gives the same image, whatever order the
/// source keeps.
pub(crate) fn names(dir: &OwnedFd, path: &[u8]) -> Result<Vec<CString>> {
    let mut names = Vec::new();
    for entry in read(path, rustix::fs::Dir::read_from(dir))? {
        let name = read(path, entry)?.file_name().to_owned();
        if !matches!(name.to_bytes(), b"." | b"..") {
            names.push(name);
        }
    }
    names.sort();
    Ok(names)
}

/// An entry of the source, on its way into the image.
struct Found<'e> {
    dir: &'e OwnedFd,
    name: &'e CStr,
    stat: Stat,
    /// The directory that it goes to.
    parent: &'e InodeRef,
    path: Vec<u8>,
    depth: usize,
}

/// How to get at the attributes of an entry.
pub(crate) enum Xattrs<'a> {
    /// Through an open file.
    Open(&'a OwnedFd),
    /// By path: links, devices, sockets and pipes, which cannot be opened without effect.
    Path(&'a [u8]),
}

impl Walk<'_, '_> {
    fn directory(
        &mut self,
        dir: OwnedFd,
        target: &InodeRef,
        path: &[u8],
        depth: usize,
    ) -> Result<()> {
        if depth > DEPTH_MAX {
            return read(path, Err(Errno::LOOP));
        }
        for name in names(&dir, path)? {
            let path = join(path, &name);
            let flags = AtFlags::SYMLINK_NOFOLLOW;
            let stat = read(&path, rustix::fs::statat(&dir, &name, flags))?;
            self.entry(&Found { dir: &dir, name: &name, stat, parent: target, path, depth })?;
        }
        Ok(())
    }

    fn entry(&mut self, found: &Found<'_>) -> Result<()> {
        let (path, stat, name) = (&found.path[..], &found.stat, found.name.to_bytes());
        let kind = FileType::from_raw_mode(stat.st_mode);
        let key = (stat.st_dev, stat.st_ino);
        if kind != FileType::Directory
            && let Some(ino) = self.linked.get(&key)
        {
            let first = self.builder.at(path, self.builder.fs.inode(*ino, None))?;
            self.builder.at(path, found.parent.link(&first, name))?;
            self.builder.count_entry();
            return Ok(());
        }
        let (inode, meta) = match kind {
            FileType::Directory => {
                let dir = open(found, OFlags::DIRECTORY)?;
                let meta = self.meta(path, stat, Xattrs::Open(&dir))?;
                let inode = self.builder.directory(found.parent, name, path)?;
                self.directory(dir, &inode, path, found.depth + 1)?;
                (inode, meta)
            }
            FileType::RegularFile => {
                let file = open(found, OFlags::NONBLOCK)?;
                let meta = self.meta(path, stat, Xattrs::Open(&file))?;
                let made = found.parent.create(name, 0o600, &self.builder.cred);
                let inode = self.builder.at(path, made)?;
                self.copy_data(&file, &inode, path)?;
                let size = u64::try_from(stat.st_size).unwrap_or(0);
                self.builder.set_size(&inode, path, size)?;
                (inode, meta)
            }
            _ => {
                let made = self.special(found, kind)?;
                (self.builder.at(path, made)?, self.meta(path, stat, Xattrs::Path(path))?)
            }
        };
        self.builder.finish_entry(&inode, path, meta)?;
        if kind != FileType::Directory && stat.st_nlink > 1 {
            self.linked.insert(key, inode.ino());
        }
        Ok(())
    }

    /// A link, device, pipe or socket.
    fn special(&self, found: &Found<'_>, kind: FileType) -> Result<fjord::Result<InodeRef>> {
        let (name, cred) = (found.name.to_bytes(), &self.builder.cred);
        if kind == FileType::Symlink {
            let link = rustix::fs::readlinkat(found.dir, found.name, Vec::new());
            let link = read(&found.path, link)?;
            return Ok(found.parent.symlink(name, link.as_bytes(), cred));
        }
        let device = DeviceNumber {
            major: rustix::fs::major(found.stat.st_rdev),
            minor: rustix::fs::minor(found.stat.st_rdev),
        };
        // Type and permissions are the low 16 bits.
        let mode = found.stat.st_mode as u16;
        Ok(found.parent.mknod(name, mode, device.to_u32(), cred))
    }

    /// Copies the data, leaving out what the source says are holes.
    fn copy_data(&mut self, file: &OwnedFd, inode: &InodeRef, path: &[u8]) -> Result<()> {
        let mut at = 0;
        loop {
            let start = match rustix::fs::seek(file, SeekFrom::Data(at)) {
                Ok(start) => start,
                Err(Errno::NXIO) => return Ok(()),
                // No holes on this file system: all is data.
                Err(Errno::INVAL | Errno::OPNOTSUPP) => {
                    return self.copy_range(file, inode, path, at, u64::MAX);
                }
                Err(errno) => return read(path, Err(errno)),
            };
            let end = read(path, rustix::fs::seek(file, SeekFrom::Hole(start)))?;
            self.copy_range(file, inode, path, start, end)?;
            at = end;
        }
    }

    fn copy_range(
        &mut self,
        file: &OwnedFd,
        inode: &InodeRef,
        path: &[u8],
        start: u64,
        end: u64,
    ) -> Result<()> {
        let mut at = start;
        while at < end {
            let want = (end - at).min(self.buffer.len() as u64) as usize;
            let count = read(path, rustix::io::pread(file, &mut self.buffer[..want], at))?;
            if count == 0 {
                return Ok(());
            }
            self.builder.write(inode, path, at, &self.buffer[..count])?;
            at += count as u64;
        }
        Ok(())
    }

    fn meta(&mut self, path: &[u8], stat: &Stat, from: Xattrs<'_>) -> Result<Meta> {
        let time = |sec: i64, nsec: u64| Timespec { sec, nsec: u32::try_from(nsec).unwrap_or(0) };
        Ok(Meta {
            mode: (stat.st_mode & 0o7777) as u16,
            uid: stat.st_uid,
            gid: stat.st_gid,
            atime: time(stat.st_atime, stat.st_atime_nsec),
            mtime: time(stat.st_mtime, stat.st_mtime_nsec),
            xattrs: read(path, xattrs(&from))?,
        })
    }
}

fn open(found: &Found<'_>, more: OFlags) -> Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | more;
    read(&found.path, rustix::fs::openat(found.dir, found.name, flags, Mode::empty()))
}

pub(crate) fn xattrs(from: &Xattrs<'_>) -> rustix::io::Result<Vec<(Vec<u8>, Vec<u8>)>> {
    let list = grown(|buffer| match from {
        Xattrs::Open(file) => rustix::fs::flistxattr(file, buffer),
        Xattrs::Path(path) => rustix::fs::llistxattr(*path, buffer),
    });
    let list = match list {
        Ok(list) => list,
        Err(Errno::OPNOTSUPP) => return Ok(Vec::new()),
        Err(errno) => return Err(errno),
    };
    let mut found = Vec::new();
    for name in list.split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
        let value = grown(|buffer| match from {
            Xattrs::Open(file) => rustix::fs::fgetxattr(file, name, buffer),
            Xattrs::Path(path) => rustix::fs::lgetxattr(*path, name, buffer),
        });
        match value {
            Ok(value) => found.push((name.to_vec(), value)),
            // Gone since the list was made.
            Err(Errno::NODATA) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(found)
}

/// Calls with ever larger buffers until the answer fits; the kernel's limit is 64 KiB.
fn grown(call: impl Fn(&mut [u8]) -> rustix::io::Result<usize>) -> rustix::io::Result<Vec<u8>> {
    let mut buffer = vec![0; 4096];
    loop {
        match call(&mut buffer) {
            Ok(len) => {
                buffer.truncate(len);
                return Ok(buffer);
            }
            Err(Errno::RANGE) if buffer.len() < 1 << 20 => buffer.resize(buffer.len() * 4, 0),
            Err(errno) => return Err(errno),
        }
    }
}
