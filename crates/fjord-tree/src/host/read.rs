//! Copies a tree of the host into an image, with hard links, attributes, devices, holes and times.
//! Symbolic links are copied, never followed.
//!
//! Invariant: names come from `readdir` and are looked at through the open directory.

use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use fjord::{InodeNo, InodeRef};
use fjord_format::inode::DeviceNumber;
use rustix::fs::{FileType, Mode, OFlags, SeekFrom};
use rustix::io::Errno;

use super::DEPTH_MAX;
use super::sys::{self, Place, Status};
use crate::builder::{Builder, COPY_BYTES, Meta, New, Spot, shown};
use crate::error::{Result, TreeError};

struct Walk<'b, 'a> {
    builder: &'b mut Builder<'a>,
    /// Inodes in the image of what has several names in the source, by its key there.
    linked: HashMap<(u64, u64), InodeNo>,
    buffer: Vec<u8>,
    /// Bytes of a path before the part that begins at the top of the tree.
    top_bytes: usize,
    /// Entries that cannot be copied are listed and skipped instead of ending the copy.
    goes_on: bool,
}

/// Copies what is in the directory `source` to the root of the image.
pub(crate) fn from_dir(builder: &mut Builder<'_>, source: &Path) -> Result<()> {
    let root = builder.at(b"/", builder.fs.root())?;
    Walk::new(builder, false).contents(source, &root)
}

/// Copies what is in the directory `source` to `target`, a directory of the image. What cannot be
/// read is listed.
pub(crate) fn contents_of(
    builder: &mut Builder<'_>,
    source: &Path,
    target: &InodeRef,
) -> Result<()> {
    Walk::new(builder, true).contents(source, target)
}

/// Copies what `source` names to `name` in the directory `parent` of the image. What cannot be read
/// below it is listed.
pub(crate) fn from_path(
    builder: &mut Builder<'_>,
    source: &Path,
    parent: &InodeRef,
    name: &[u8],
) -> Result<()> {
    let path = source.as_os_str().as_bytes();
    let Some(own_name) = source.file_name().filter(|_| !path.ends_with(b"/")) else {
        let (target, _) = builder.directory_in(Spot { parent, name, path })?;
        return contents_of(builder, source, &target);
    };
    let above = source.parent().filter(|above| !above.as_os_str().is_empty());
    let dir = open_root(above.unwrap_or(Path::new(".")))?;
    let own_name = CString::new(own_name.as_bytes());
    let own_name = read(path, own_name.map_err(|_| Errno::INVAL))?;
    let status = read(path, sys::status_at(dir.as_fd(), &own_name))?;
    let found = Found { dir: &dir, name: &own_name, status, path: path.to_vec(), depth: 0 };
    let mut walk = Walk::new(builder, true);
    walk.top_bytes = top_bytes(path);
    walk.entry(&found, parent, name)
}

pub(crate) fn read<T>(path: &[u8], result: rustix::io::Result<T>) -> Result<T> {
    result.map_err(|errno| TreeError::Source { path: shown(path), source: errno.into() })
}

/// Bytes of the paths of entries, as [`join`] makes them, before what [`Exclude::has`] asks for.
///
/// [`Exclude::has`]: crate::exclude::Exclude::has
pub(crate) fn top_bytes(root: &[u8]) -> usize {
    root.len() + usize::from(!root.ends_with(b"/"))
}

pub(crate) fn join(path: &[u8], name: &CStr) -> Vec<u8> {
    let slash: &[u8] = if path.ends_with(b"/") { b"" } else { b"/" };
    [path, slash, name.to_bytes()].concat()
}

/// Opens the directory that a walk begins at; a link there is followed.
pub(crate) fn open_root(path: &Path) -> Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    read(path.as_os_str().as_bytes(), rustix::fs::open(path, flags, Mode::empty()))
}

/// Opens an entry of a directory; no link is followed.
pub(crate) fn open_in(dir: &OwnedFd, name: &CStr, path: &[u8], more: OFlags) -> Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | more;
    read(path, rustix::fs::openat(dir, name, flags, Mode::empty()))
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
    status: Status,
    path: Vec<u8>,
    depth: usize,
}

impl<'b, 'a> Walk<'b, 'a> {
    fn new(builder: &'b mut Builder<'a>, goes_on: bool) -> Walk<'b, 'a> {
        let buffer = vec![0; COPY_BYTES];
        Walk { builder, linked: HashMap::new(), buffer, top_bytes: 0, goes_on }
    }

    /// A directory's contents and attributes, given to `target`.
    fn contents(&mut self, source: &Path, target: &InodeRef) -> Result<()> {
        let path = source.as_os_str().as_bytes();
        let dir = open_root(source)?;
        let status = read(path, sys::status(dir.as_fd()))?;
        let meta = meta(path, &status, Place::Open(dir.as_fd()))?;
        self.top_bytes = top_bytes(path);
        let filled = self.directory(&dir, target, path, 0);
        let finished = self.finish(target, path, &meta);
        filled.and(finished)
    }

    fn directory(
        &mut self,
        dir: &OwnedFd,
        target: &InodeRef,
        path: &[u8],
        depth: usize,
    ) -> Result<()> {
        if depth > DEPTH_MAX {
            return Err(TreeError::too_deep(path));
        }
        for name in names(dir, path)? {
            let path = join(path, &name);
            let copied = read(&path, sys::status_at(dir.as_fd(), &name)).and_then(|status| {
                let is_dir = status.kind() == FileType::Directory;
                if self.builder.rules.exclude.has(&path[self.top_bytes..], is_dir) {
                    return Ok(());
                }
                let found = Found { dir, name: &name, status, path, depth };
                self.entry(&found, target, name.to_bytes())
            });
            match copied {
                Err(error) if self.goes_on => self.builder.go_on(error)?,
                copied => copied?,
            }
        }
        Ok(())
    }

    fn entry(&mut self, found: &Found<'_>, parent: &InodeRef, name: &[u8]) -> Result<()> {
        let (path, status) = (&found.path[..], &found.status);
        let spot = Spot { parent, name, path };
        let kind = status.kind();
        if kind == FileType::Directory {
            let dir = open_in(found.dir, found.name, path, OFlags::DIRECTORY)?;
            let meta = meta(path, status, Place::Open(dir.as_fd()))?;
            let (inode, _) = self.builder.directory_in(spot)?;
            let filled = self.directory(&dir, &inode, path, found.depth + 1);
            // Also of one that is not complete: nobody may enter it yet.
            let finished = self.finish(&inode, path, &meta);
            return filled.and(finished);
        }
        if let Some(ino) = self.linked.get(&status.key()) {
            let first = self.builder.at(path, self.builder.fs.inode(*ino, None))?;
            if self.builder.link(spot, &first)? {
                self.builder.count_entry();
                return Ok(());
            }
        }
        let inode = match kind {
            FileType::RegularFile => self.file(found, spot)?,
            _ => self.special(found, spot)?,
        };
        self.builder.count_entry();
        if status.links > 1 {
            self.linked.insert(status.key(), inode.ino());
        }
        Ok(())
    }

    /// Sets the attributes of a directory, which has all that goes into it.
    fn finish(&mut self, target: &InodeRef, path: &[u8], meta: &Meta) -> Result<()> {
        self.builder.apply(target, path, meta)?;
        self.builder.count_entry();
        Ok(())
    }

    fn file(&mut self, found: &Found<'_>, spot: Spot<'_>) -> Result<InodeRef> {
        let path = spot.path;
        let file = open_in(found.dir, found.name, path, OFlags::NONBLOCK)?;
        let meta = meta(path, &found.status, Place::Open(file.as_fd()))?;
        let buffer = &mut self.buffer;
        self.builder.place(spot, New::File, &mut |builder, inode| {
            let mut copy = Copy { builder, file: &file, inode, path, buffer };
            copy.data(&found.status)?;
            builder.set_size(inode, path, found.status.size)?;
            builder.apply(inode, path, &meta)
        })
    }

    /// A symbolic link, a device, a pipe or a socket.
    fn special(&mut self, found: &Found<'_>, spot: Spot<'_>) -> Result<InodeRef> {
        let place = Place::At(found.dir.as_fd(), found.name);
        let meta = meta(spot.path, &found.status, place)?;
        let mut target = CString::default();
        let new = if found.status.kind() == FileType::Symlink {
            let link = rustix::fs::readlinkat(found.dir, found.name, Vec::new());
            target = read(spot.path, link)?;
            New::Symlink(target.to_bytes())
        } else {
            let (major, minor) =
                (rustix::fs::major(found.status.rdev), rustix::fs::minor(found.status.rdev));
            // Type and permissions are the low 16 bits.
            let mode = found.status.mode as u16;
            New::Node { mode, device: DeviceNumber { major, minor } }
        };
        let made = self
            .builder
            .place(spot, new, &mut |builder, inode| builder.apply(inode, spot.path, &meta));
        drop(target);
        made
    }
}

/// The data of one file on its way.
struct Copy<'c, 'a> {
    builder: &'c mut Builder<'a>,
    file: &'c OwnedFd,
    inode: &'c InodeRef,
    path: &'c [u8],
    buffer: &'c mut [u8],
}

impl Copy<'_, '_> {
    /// Copies the data, leaving out what the source says are holes.
    fn data(&mut self, status: &Status) -> Result<()> {
        if !status.has_holes() {
            return self.range(0, status.size);
        }
        let (file, path) = (self.file.as_fd(), self.path);
        let mut copy = |start, end| self.range(start, end);
        for_data(file, status.size, &mut copy, |errno| TreeError::Source {
            path: shown(path),
            source: errno.into(),
        })
    }

    fn range(&mut self, start: u64, end: u64) -> Result<()> {
        let mut at = start;
        while at < end {
            let want = (end - at).min(self.buffer.len() as u64) as usize;
            let count = rustix::io::pread(self.file, &mut self.buffer[..want], at);
            let count = read(self.path, count)?;
            if count == 0 {
                // It has become shorter.
                return Ok(());
            }
            self.builder.write(self.inode, self.path, at, &self.buffer[..count])?;
            at += count as u64;
        }
        Ok(())
    }
}

/// Calls `each` for the ranges of data of a file; all of it where the file system knows no holes.
pub(crate) fn for_data(
    file: BorrowedFd<'_>,
    size: u64,
    each: &mut dyn FnMut(u64, u64) -> Result<()>,
    failed: impl Fn(Errno) -> TreeError,
) -> Result<()> {
    let mut at = 0;
    while at < size {
        let start = match rustix::fs::seek(file, SeekFrom::Data(at)) {
            Ok(start) => start,
            Err(Errno::NXIO) => return Ok(()),
            Err(Errno::INVAL | Errno::OPNOTSUPP) => return each(at, size),
            Err(errno) => return Err(failed(errno)),
        };
        let end = rustix::fs::seek(file, SeekFrom::Hole(start)).map_err(&failed)?.min(size);
        if start < end {
            each(start, end)?;
        }
        at = end.max(start).max(at + 1);
    }
    Ok(())
}

fn meta(path: &[u8], status: &Status, place: Place<'_>) -> Result<Meta> {
    Ok(Meta {
        mode: (status.mode & 0o7777) as u16,
        uid: status.uid,
        gid: status.gid,
        atime: status.atime,
        mtime: status.mtime,
        xattrs: read(path, xattrs(place))?,
        marks: sys::marks(place),
    })
}

/// All attributes of a file that this process may see, with their values.
pub(crate) fn xattrs(place: Place<'_>) -> rustix::io::Result<Vec<(Vec<u8>, Vec<u8>)>> {
    let list = match grown(|buffer| sys::list_xattrs(place, buffer)) {
        Ok(list) => list,
        Err(Errno::OPNOTSUPP) => return Ok(Vec::new()),
        Err(errno) => return Err(errno),
    };
    let mut found = Vec::new();
    for name in list.split_inclusive(|byte| *byte == 0) {
        let Ok(name) = CStr::from_bytes_with_nul(name) else { continue };
        match grown(|buffer| sys::get_xattr(place, name, buffer)) {
            Ok(value) => found.push((name.to_bytes().to_vec(), value)),
            // Gone since the list was made.
            Err(Errno::NODATA) => {}
            Err(errno) => return Err(errno),
        }
    }
    found.sort();
    Ok(found)
}

/// Calls with ever larger buffers until the answer fits; the kernel's limit is 64 KiB.
fn grown(call: impl Fn(&mut [u8]) -> rustix::io::Result<usize>) -> rustix::io::Result<Vec<u8>> {
    let mut small = [0; 1024];
    match call(&mut small) {
        Ok(len) => return Ok(small[..len].to_vec()),
        Err(Errno::RANGE) => {}
        Err(errno) => return Err(errno),
    }
    let mut buffer = vec![0; 1 << 16];
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
